//! Causal attention of packed documents on the CPU.
//!
//! Forward and backward go through blocks of query rows. A block's scores are one product with all
//! the keys it may see, `[rows, keys]`: keys after the block are never touched, the few after a row
//! inside the block get weight 0. Saved for backward: handles of q, k, v and one f32 a token and
//! head, the log-sum-exp of its scores; weights are computed again.
//!
//! A document's results depend on that document alone, bit for bit, not on its neighbours.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;

use super::{Documents, flex};

mod backward;
mod forward;
mod next;

pub use next::next_token;

/// Query rows of a block.
const ROWS: usize = 64;

/// Grouped-query causal attention inside each document.
#[backend_extension(Flex, Autodiff)]
pub trait AttentionOps: Backend {
    /// See [`super::attention`]; `cu_seqlens` as in [`Documents`].
    fn attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cu_seqlens: Arc<[u32]>,
        scale: f32,
    ) -> FloatTensor<Self>;
}

/// See [`super::attention`].
pub fn attention(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, documents: &Documents, scale: f32) -> Tensor<3> {
    let ([t, h, d], [_, g, _]) = (q.dims(), k.dims());
    assert_eq!(k.dims(), [t, g, d], "attention: k");
    assert_eq!(v.dims(), [t, g, d], "attention: v");
    assert!(g > 0 && h.is_multiple_of(g), "attention: {h} query heads over {g} key heads");
    assert!(scale > 0.0, "attention: a scale of {scale}");
    let cu_seqlens = documents.cu_seqlens.clone();
    assert_eq!(cu_seqlens.first(), Some(&0), "attention: first document boundary");
    assert_eq!(cu_seqlens.last(), Some(&(t as u32)), "attention: last document boundary");
    assert!(cu_seqlens.is_sorted(), "attention: document boundaries go down");
    let [q, k, v] = [q, k, v].map(Tensor::into_dispatch);
    Tensor::from_dispatch(<Dispatch as AttentionOps>::attention(q, k, v, cu_seqlens, scale))
}

/// Heads and documents of a call.
#[derive(Debug, Clone)]
struct Layout {
    /// Query heads.
    heads: usize,
    /// Key and value heads.
    groups: usize,
    /// Size of a head.
    size: usize,
    scale: f32,
    cu_seqlens: Arc<[u32]>,
}

impl Layout {
    fn new(q: &FlexTensor, k: &FlexTensor, cu_seqlens: Arc<[u32]>, scale: f32) -> Self {
        let [heads, size] = [q.shape()[1], q.shape()[2]];
        Self { heads, groups: k.shape()[1], size, scale, cu_seqlens }
    }

    /// Elements of a token in q.
    fn q_width(&self) -> usize {
        self.heads * self.size
    }

    /// Elements of a token in k and v.
    fn k_width(&self) -> usize {
        self.groups * self.size
    }

    /// Query heads that share a key head.
    fn shared(&self) -> usize {
        self.heads / self.groups
    }

    /// `(start, end)` of each document that isn't empty.
    fn documents(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let ranges = self.cu_seqlens.windows(2).map(|w| (w[0] as usize, w[1] as usize));
        ranges.filter(|(start, end)| start < end)
    }
}

impl AttentionOps for Flex {
    fn attention(
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        cu_seqlens: Arc<[u32]>,
        scale: f32,
    ) -> FlexTensor {
        let [q, k, v] = [q, k, v].map(flex::dense);
        let layout = Layout::new(&q, &k, cu_seqlens, scale);
        let (out, _) = forward::forward(flex::values(&q), flex::values(&k), flex::values(&v), &layout);
        flex::tensor(out, q.shape())
    }
}

impl<C: CheckpointStrategy> AttentionOps for Autodiff<Flex, C> {
    fn attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cu_seqlens: Arc<[u32]>,
        scale: f32,
    ) -> FloatTensor<Self> {
        let nodes = [q.node(), k.node(), v.node()];
        let tracked = [q.is_tracked(), k.is_tracked(), v.is_tracked()];
        let prepared = AttentionBackward.prepare::<C>(nodes).compute_bound().stateful();
        let [q, k, v] = [q, k, v].map(|x| flex::dense(x.into_primitive()));
        let layout = Layout::new(&q, &k, cu_seqlens, scale);
        let (out, lse) = forward::forward(flex::values(&q), flex::values(&k), flex::values(&v), &layout);
        let out = flex::tensor(out, q.shape());
        super::tape::record(prepared, || State { q, k, v, lse, layout, tracked }, out)
    }
}

#[derive(Debug, Clone)]
struct State {
    q: FlexTensor,
    k: FlexTensor,
    v: FlexTensor,
    /// `[t, heads]`
    lse: Vec<f32>,
    layout: Layout,
    tracked: [bool; 3],
}

#[derive(Debug)]
struct AttentionBackward;

impl Backward<Flex, 3> for AttentionBackward {
    type State = State;

    fn backward(self, ops: Ops<State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = flex::dense(grads.consume::<Flex>(&ops.node));
        let shapes = [ops.state.q.shape(), ops.state.k.shape(), ops.state.v.shape()];
        let gradients = backward::backward(&ops.state, flex::values(&grad));
        for ((node, gradient), shape) in ops.parents.into_iter().zip(gradients).zip(shapes) {
            if let Some(node) = node {
                grads.register::<Flex>(node.id, flex::tensor(gradient, shape));
            }
        }
    }
}
