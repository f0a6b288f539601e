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
        flex::record(prepared, state, out)
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
        if let (Some(node), Some(up)) = (gate_node, &up) {
            grads.register::<Flex>(node.id, gate_gradient(&gate, up, &grad));
        }
        if let Some(node) = up_node {
            grads.register::<Flex>(node.id, silu_times(&gate, &grad));
        }
    }
}

/// silu(gate) · factor; with the incoming gradient as factor, the gradient of `up`.
fn silu_times(gate: &FlexTensor, factor: &FlexTensor) -> FlexTensor {
    let mut out = Buffer::new(flex::values(gate).len());
    let inputs = flex::values(gate).par_chunks(CHUNK).zip(flex::values(factor).par_chunks(CHUNK));
    out.slots()
        .par_chunks_mut(CHUNK)
        .zip(inputs)
        .for_each(|(out, (gate, factor))| forward(gate, factor, out));
    // SAFETY: the chunks cover the result and `forward` writes all of a chunk.
    flex::tensor(unsafe { out.finish() }, gate.shape())
}

/// The gradient of `gate`.
fn gate_gradient(gate: &FlexTensor, up: &FlexTensor, grad: &FlexTensor) -> FlexTensor {
    let mut out = Buffer::new(flex::values(gate).len());
    let inputs = [gate, up, grad].map(|x| flex::values(x).par_chunks(CHUNK));
    let [gates, ups, grads] = inputs;
    (out.slots().par_chunks_mut(CHUNK), gates, ups, grads)
        .into_par_iter()
        .for_each(|(out, gate, up, grad)| backward(gate, up, grad, out));
    // SAFETY: the chunks cover the result and `backward` writes all of a chunk.
    flex::tensor(unsafe { out.finish() }, gate.shape())
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
    /// g · up · s · (1 + gate · (1 − s)) with s = sigmoid(gate).
    fn backward(gate: &[f32], up: &[f32], grad: &[f32], out: &mut [MaybeUninit<f32>]) {
        for (((out, &gate), up), grad) in out.iter_mut().zip(gate).zip(up).zip(grad) {
            let s = sigmoid::<FMA>(gate);
            out.write(grad * up * s * fma::<FMA>(gate, 1.0 - s, 1.0));
        }
    }
}
