//! `silu(gate) · up` on the CPU: one pass forward, one backward.
//!
//! Saved for backward: gate, and up if gate is tracked.

use std::mem::MaybeUninit;

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::flex::simd::{fma, sigmoid, vectorised};
use super::flex::{self, Buffer};

/// Elements of one task.
const CHUNK: usize = 16 * 1024;

/// Gated linear unit with SiLU.
#[backend_extension(Flex, Autodiff)]
pub trait SwigluOps: Backend {
    /// See [`super::swiglu`].
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// See [`super::swiglu`].
pub fn swiglu(gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    assert_eq!(gate.dims(), up.dims(), "swiglu: gate and up");
    Tensor::from_dispatch(<Dispatch as SwigluOps>::swiglu(gate.into_dispatch(), up.into_dispatch()))
}

impl SwigluOps for Flex {
    fn swiglu(gate: FlexTensor, up: FlexTensor) -> FlexTensor {
        silu_times(&flex::dense(gate), &flex::dense(up))
    }
}

impl<C: CheckpointStrategy> SwigluOps for Autodiff<Flex, C> {
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let prepared = SwigluBackward.prepare::<C>([gate.node(), up.node()]).compute_bound().stateful();
        let out = Flex::swiglu(gate.primitive().clone(), up.primitive().clone());
        let state = || (gate.primitive().clone(), gate.is_tracked().then(|| up.primitive().clone()));
        super::tape::record(prepared, state, out)
    }
}

#[derive(Debug)]
struct SwigluBackward;

impl Backward<Flex, 2> for SwigluBackward {
    /// gate, up
    type State = (FlexTensor, Option<FlexTensor>);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = flex::dense(grads.consume::<Flex>(&ops.node));
        let [gate_node, up_node] = ops.parents;
        let gate = flex::dense(ops.state.0);
        let up = ops.state.1.map(flex::dense);
        match (gate_node, up_node, up) {
            (Some(gate_node), up_node, Some(up)) => {
                let (d_gate, d_up) = gradients(&gate, &up, &grad, up_node.is_some());
                grads.register::<Flex>(gate_node.id, d_gate);
                if let (Some(node), Some(d_up)) = (up_node, d_up) {
                    grads.register::<Flex>(node.id, d_up);
                }
            }
            (_, Some(node), _) => grads.register::<Flex>(node.id, silu_times(&gate, &grad)),
            _ => {}
        }
    }
}

/// silu(gate) · factor; with the incoming gradient as factor, the gradient of `up`.
fn silu_times(gate: &FlexTensor, factor: &FlexTensor) -> FlexTensor {
    let mut out = Buffer::new(flex::values(gate).len());
    let inputs = flex::values(gate).par_chunks(CHUNK).zip(flex::values(factor).par_chunks(CHUNK));
    let outs = out.slots().par_chunks_mut(CHUNK);
    outs.zip(inputs).for_each(|(out, (gate, factor))| forward(gate, factor, out));
    // SAFETY: the chunks cover the result and `forward` writes all of a chunk.
    flex::tensor(unsafe { out.finish() }, gate.shape())
}

/// The gradients of `gate` and, if wanted, of `up`, in one pass over the inputs.
fn gradients(
    gate: &FlexTensor,
    up: &FlexTensor,
    grad: &FlexTensor,
    up_wanted: bool,
) -> (FlexTensor, Option<FlexTensor>) {
    let len = flex::values(gate).len();
    let (mut d_gate, mut d_up) = (Buffer::new(len), Buffer::new(if up_wanted { len } else { 0 }));
    let d_ups: Vec<&mut [MaybeUninit<f32>]> = match up_wanted {
        true => d_up.slots().chunks_mut(CHUNK).collect(),
        false => (0..len.div_ceil(CHUNK)).map(|_| Default::default()).collect(),
    };
    let [gates, ups, grads] = [gate, up, grad].map(|x| flex::values(x).par_chunks(CHUNK));
    (d_gate.slots().par_chunks_mut(CHUNK), d_ups, gates, ups, grads)
        .into_par_iter()
        .for_each(|(d_gate, d_up, gate, up, grad)| backward(gate, up, grad, d_gate, d_up));
    // SAFETY: the chunks cover both results, and `backward` writes all of the chunks it is given.
    let (d_gate, d_up) = unsafe { (d_gate.finish(), d_up.finish()) };
    (flex::tensor(d_gate, gate.shape()), up_wanted.then(|| flex::tensor(d_up, gate.shape())))
}

vectorised! {
    /// gate · sigmoid(gate) · factor
    fn forward(gate: &[f32], factor: &[f32], out: &mut [MaybeUninit<f32>]) {
        for ((out, &gate), factor) in out.iter_mut().zip(gate).zip(factor) {
            out.write(gate * sigmoid::<FMA>(gate) * factor);
        }
    }
}

vectorised! {
    /// With s = sigmoid(gate): g · up · s · (1 + gate · (1 − s)), and g · gate · s unless `d_up` is
    /// empty.
    fn backward(
        gate: &[f32],
        up: &[f32],
        grad: &[f32],
        d_gate: &mut [MaybeUninit<f32>],
        d_up: &mut [MaybeUninit<f32>],
    ) {
        let (gate, up, grad) = (&gate[..d_gate.len()], &up[..d_gate.len()], &grad[..d_gate.len()]);
        let both = |i: usize| {
            let s = sigmoid::<FMA>(gate[i]);
            (grad[i] * up[i] * s * fma::<FMA>(gate[i], 1.0 - s, 1.0), gate[i] * s * grad[i])
        };
        if d_up.is_empty() {
            d_gate.iter_mut().enumerate().for_each(|(i, d_gate)| _ = d_gate.write(both(i).0));
            return;
        }
        for (i, (d_gate, d_up)) in d_gate.iter_mut().zip(d_up).enumerate() {
            let (of_gate, of_up) = both(i);
            d_gate.write(of_gate);
            d_up.write(of_up);
        }
    }
}
