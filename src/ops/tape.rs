//! The node that an op leaves on Burn's tape.

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::ops::{Backward, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend};

/// Ends the recording of an op: its state is made only if some parent is tracked.
pub fn record<B, S, O, C, const N: usize>(
    prepared: OpsKind<O, B, S, C, N>,
    state: impl FnOnce() -> S,
    output: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    S: Clone + Send + std::fmt::Debug + 'static,
    O: Backward<B, N, State = S>,
    C: CheckpointStrategy,
{
    match prepared {
        OpsKind::Tracked(prepared) => prepared.finish(state(), output),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    }
}
