//! Causal attention of packed documents on the card: bf16, head sizes 64 and 128, with Hopper's
//! instructions where the card has them. Anything else goes head by head through matrix products
//! ([`by_products`]).
//!
//! Saved for backward: handles of q, k, v and the output, and one f32 a token and head, the
//! log-sum-exp of its scores.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Cube, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{DType, Tensor, activation};
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::sys as cu;

use super::super::tape::record;
use super::driver::{Gpu, Side, must};
use super::gemm::Matrix;
use super::kernels::{Arg, Files, Grid, Module};
use super::tensor::{dense, empty, gpu, is_on_card, pointer};
use super::work::{Lists, Shape, lists};
use crate::ops::{self, Documents};

/// Rows of a tile.
const TILE: usize = 128;

/// Grouped-query causal attention inside each document.
#[backend_extension(Cube, Autodiff)]
pub trait AttentionOps: Backend {
    /// See [`crate::ops::attention`]; `cu_seqlens` as in [`Documents`].
    fn cuda_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cu_seqlens: Arc<[u32]>,
        scale: f32,
    ) -> FloatTensor<Self>;
}

/// Whether the kernels take these tensors.
pub fn takes(q: &Tensor<3>, k: &Tensor<3>, v: &Tensor<3>) -> bool {
    let bf16 = |x: &Tensor<3>| is_on_card(x) && x.dtype() == DType::BF16;
    [q, k, v].into_iter().all(bf16) && q.dims()[0] > 0 && matches!(q.dims()[2], 64 | 128)
}

/// See [`crate::ops::attention`].
pub fn attention(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, documents: &Documents, scale: f32) -> Tensor<3> {
    let ([t, h, d], [_, g, _]) = (q.dims(), k.dims());
    assert_eq!(k.dims(), [t, g, d], "attention: k");
    assert_eq!(v.dims(), [t, g, d], "attention: v");
    assert!(g > 0 && h.is_multiple_of(g), "attention: {h} query heads over {g} key heads");
    let cu_seqlens = documents.cu_seqlens.clone();
    assert_eq!(cu_seqlens.first(), Some(&0), "attention: first document boundary");
    assert_eq!(cu_seqlens.last(), Some(&(t as u32)), "attention: last document boundary");
    assert!(cu_seqlens.is_sorted(), "attention: document boundaries go down");
    let [q, k, v] = [q, k, v].map(Tensor::into_dispatch);
    Tensor::from_dispatch(<Dispatch as AttentionOps>::cuda_attention(q, k, v, cu_seqlens, scale))
}

/// The definition, in f32, with each head's products on their own: right for any type and head
/// size, slow.
pub fn by_products(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, documents: &Documents, scale: f32) -> Tensor<3> {
    let ([_, h, d], [_, g, _], dtype) = (q.dims(), k.dims(), q.dtype());
    let documents = documents.ranges().filter(|(start, end)| start < end).map(|(start, end)| {
        let l = end - start;
        let head = |x: &Tensor<3>, i: usize| {
            let x = x.clone().narrow(0, start, l).narrow(1, i, 1);
            x.reshape([l, d]).cast(DType::F32)
        };
        let future = Tensor::<2>::ones([l, l], (&q.device(), DType::F32)).triu(1).greater_elem(0.5);
        let heads = (0..h).map(|i| {
            let shared = i / (h / g);
            let scores = ops::linear(head(&q, i), head(&k, shared)).mul_scalar(scale);
            let weights = activation::softmax(scores.mask_fill(future.clone(), f32::NEG_INFINITY), 1);
            ops::linear(weights, head(&v, shared).transpose()).unsqueeze_dim::<3>(1).cast(dtype)
        });
        Tensor::cat(heads.collect(), 1)
    });
    Tensor::cat(documents.collect(), 0)
}

/// Sizes and work lists of attention over a micro-batch.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    tokens: usize,
    heads: usize,
    groups: usize,
    size: usize,
    scale: f32,
    lists: Arc<Lists>,
}

impl Layout {
    /// For `[h, d]` query heads over `groups` key heads of the documents; `like` lies on the card.
    pub(super) fn new(
        like: &CubeTensor,
        [heads, size]: [usize; 2],
        groups: usize,
        cu_seqlens: Arc<[u32]>,
        scale: f32,
    ) -> Self {
        let tokens = cu_seqlens.last().map_or(0, |&end| end as usize);
        let shape = Shape { cu_seqlens, heads, groups, size };
        Self { tokens, heads, groups, size, scale, lists: lists(like, gpu(like), &shape) }
    }

    fn of(q: &CubeTensor, k: &CubeTensor, cu_seqlens: Arc<[u32]>, scale: f32) -> Self {
        Self::new(q, [q.shape()[1], q.shape()[2]], k.shape()[1], cu_seqlens, scale)
    }

    fn shared(&self) -> usize {
        self.heads / self.groups
    }

    /// Rows and columns of the statistics of the backward pass, f32.
    pub(super) fn stats_shape(&self) -> [usize; 2] {
        [2 * self.heads, self.lists.padded]
    }

    fn module(&self, hopper: bool) -> Module {
        Module::bf16(if hopper { Files::AttentionHopper } else { Files::Attention }, self.size)
    }

    /// A matrix of heads by tensor map, `rows` rows a box.
    fn map(&self, x: Matrix, rows: usize) -> Arg {
        tensor_map(&x, self.size, rows).into()
    }
}

/// A dense tensor of heads as a matrix with a row a token.
fn of_heads(x: &CubeTensor) -> Matrix {
    let [tokens, heads, size] = [x.shape()[0], x.shape()[1], x.shape()[2]];
    Matrix::dense(pointer(x), tokens, heads * size, x.dtype)
}

impl AttentionOps for Cube {
    fn cuda_attention(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        cu_seqlens: Arc<[u32]>,
        scale: f32,
    ) -> CubeTensor {
        let [q, k, v] = [q, k, v].map(dense);
        let layout = Layout::of(&q, &k, cu_seqlens, scale);
        forward(&q, &k, &v, &layout).0
    }
}

impl<C: CheckpointStrategy> AttentionOps for Autodiff<Cube, C> {
    fn cuda_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cu_seqlens: Arc<[u32]>,
        scale: f32,
    ) -> FloatTensor<Self> {
        let nodes = [q.node(), k.node(), v.node()];
        let prepared = AttentionBackward.prepare::<C>(nodes).compute_bound().stateful();
        let [q, k, v] = [q, k, v].map(|x| dense(x.into_primitive()));
        let layout = Layout::of(&q, &k, cu_seqlens, scale);
        let (out, lse) = forward(&q, &k, &v, &layout);
        let state = || State { q, k, v, out: out.clone(), lse, layout };
        record(prepared, state, out.clone())
    }
}

/// Whether the Hopper kernels run on this card.
fn is_hopper(gpu: &Gpu) -> bool {
    gpu.capability == 90
}

/// The output and the log-sum-exp of the scores, `[h, t]`.
fn forward(q: &CubeTensor, k: &CubeTensor, v: &CubeTensor, layout: &Layout) -> (CubeTensor, CubeTensor) {
    let out = empty(q, q.shape(), q.dtype);
    let lse = empty(q, [layout.heads, layout.tokens], DType::F32);
    let ([q_at, k_at, v_at, out_at], lse_at) = ([q, k, v, &out].map(of_heads), pointer(&lse));
    gpu(q).enter(|side| layout.forward(side, [q_at, k_at, v_at], out_at, lse_at));
    (out, lse)
}

impl Layout {
    /// Rows of q, k, v and the output are tokens; `lse` gets the log-sum-exp of the scores, `[h, t]`.
    pub(super) fn forward(&self, side: &mut Side<'_>, [q, k, v]: [Matrix; 3], out: Matrix, lse: u64) {
        let (gpu, d, list) = (side.gpu, self.size, &self.lists.queries);
        let hopper = is_hopper(gpu);
        let (name, grid, mut arguments): (_, _, Vec<Arg>);
        if hopper {
            let blocks = list.len.min(gpu.multiprocessors);
            name = "attention_forward_sm90";
            grid = Grid { blocks, threads: 384, shared: 1024 + 6 * 256 * d };
            arguments = [q, k, v].map(|x| self.map(x, TILE)).to_vec();
            arguments.extend([out.pointer, lse, list.pointer].map(Arg::from));
            arguments.extend([Arg::from(list.len), gpu.counter(0).into(), out.stride.into()]);
        } else {
            name = "attention_forward";
            grid = Grid { blocks: list.len, threads: 128, shared: 256 * d * 2 };
            arguments = [q, k, v, out].map(|x| Arg::from(x.pointer)).to_vec();
            arguments.extend([lse, list.pointer].map(Arg::from));
            arguments.extend([q, k, v, out].map(|x| Arg::from(x.stride)));
        }
        arguments.extend([Arg::from(self.tokens), self.shared().into(), self.scale.into()]);
        side.launch(self.module(hopper), name, grid, &arguments);
    }

    /// The gradients of q, k and v, from what [`Layout::forward`] took and gave; `stats` is scratch of
    /// [`Layout::stats_shape`].
    pub(super) fn backward(
        &self,
        side: &mut Side<'_>,
        [q, k, v, out, d_out]: [Matrix; 5],
        [lse, stats]: [u64; 2],
        gradients: [Matrix; 3],
    ) {
        let (gpu, inputs) = (side.gpu, [q, k, v, d_out]);
        let hopper = is_hopper(gpu);
        let prepare = self.stats(out, d_out, lse, stats);
        let [d_query, d_key_value] = match hopper {
            true => self.backward_sm90(gpu, inputs, stats, gradients),
            false => self.backward_mma(gpu, inputs, stats, gradients),
        };
        for Launch { name, grid, arguments } in [prepare, d_query, d_key_value] {
            side.launch(self.module(hopper), name, grid, &arguments);
        }
    }
}

#[derive(Debug, Clone)]
struct State {
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    out: CubeTensor,
    lse: CubeTensor,
    layout: Layout,
}

#[derive(Debug)]
struct AttentionBackward;

impl Backward<Cube, 3> for AttentionBackward {
    type State = State;

    fn backward(self, ops: Ops<State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_out = dense(grads.consume::<Cube>(&ops.node));
        let gradients = ops.state.backward(&d_out);
        for (node, gradient) in ops.parents.into_iter().zip(gradients) {
            if let Some(node) = node {
                grads.register::<Cube>(node.id, gradient);
            }
        }
    }
}

impl State {
    /// The gradients of q, k and v.
    fn backward(&self, d_out: &CubeTensor) -> [CubeTensor; 3] {
        let layout = &self.layout;
        let outs = [&self.q, &self.k, &self.v].map(|x| empty(x, x.shape(), x.dtype));
        let stats = empty(d_out, layout.stats_shape(), DType::F32);
        let inputs = [&self.q, &self.k, &self.v, &self.out, d_out].map(of_heads);
        let scratch = [&self.lse, &stats].map(pointer);
        let gradients = outs.each_ref().map(of_heads);
        gpu(d_out).enter(|side| layout.backward(side, inputs, scratch, gradients));
        outs
    }
}

/// A kernel, ready to go.
struct Launch {
    name: &'static str,
    grid: Grid,
    arguments: Vec<Arg>,
}

impl Layout {
    fn stats(&self, out: Matrix, d_out: Matrix, lse: u64, stats: u64) -> Launch {
        let list = &self.lists.queries;
        let mut arguments = [out.pointer, d_out.pointer, lse, stats, list.pointer].map(Arg::from).to_vec();
        let sizes = [out.stride, d_out.stride, self.tokens, self.heads, self.lists.padded];
        arguments.extend(sizes.map(Arg::from));
        Launch { name: "attention_stats", grid: Grid::new(list.len, 256), arguments }
    }

    /// heads, padded, group, scale
    fn rest(&self) -> [Arg; 4] {
        [self.heads.into(), self.lists.padded.into(), self.shared().into(), self.scale.into()]
    }

    fn backward_mma(
        &self,
        gpu: &Gpu,
        inputs: [Matrix; 4],
        stats: u64,
        [dq, dk, dv]: [Matrix; 3],
    ) -> [Launch; 2] {
        let d = self.size;
        let stages = super::kernels::attention_stages(gpu.shared_memory);
        let strides = inputs.map(|x| x.stride);
        let (queries, keys) = (&self.lists.queries, &self.lists.keys);
        let mut first = inputs.map(|x| Arg::from(x.pointer)).to_vec();
        first.push(stats.into());
        let mut second = first.clone();
        first.extend([dq.pointer, queries.pointer].map(Arg::from));
        first.extend(strides.map(Arg::from));
        first.push(dq.stride.into());
        first.extend(self.rest());
        second.extend([dk.pointer, dv.pointer, keys.pointer].map(Arg::from));
        second.extend(strides.map(Arg::from));
        second.extend([dk.stride, dv.stride].map(Arg::from));
        second.extend(self.rest());
        let grid = Grid { blocks: queries.len, threads: 128, shared: (256 + 64 * stages) * d * 2 };
        let d_query = Launch { name: "attention_dq", grid, arguments: first };
        let shared = (256 + 128 * stages) * d * 2 + 512 * stages;
        let grid = Grid { blocks: keys.len, threads: 256, shared };
        [d_query, Launch { name: "attention_dkdv", grid, arguments: second }]
    }

    fn backward_sm90(
        &self,
        gpu: &Gpu,
        [q, k, v, d_out]: [Matrix; 4],
        stats: u64,
        [dq, dk, dv]: [Matrix; 3],
    ) -> [Launch; 2] {
        let d = self.size;
        let maps = |rows| {
            vec![self.map(q, rows), self.map(k, TILE), self.map(v, TILE), self.map(d_out, rows), stats.into()]
        };
        let (queries, keys) = (&self.lists.queries, &self.lists.keys);
        let mut first = maps(TILE);
        first.extend([dq.pointer, queries.pointer].map(Arg::from));
        first.extend([Arg::from(queries.len), gpu.counter(1).into(), dq.stride.into()]);
        first.extend(self.rest());
        let mut second = maps(64);
        second.extend([dk.pointer, dv.pointer, keys.pointer].map(Arg::from));
        second.extend([Arg::from(keys.len), gpu.counter(2).into(), dk.stride.into(), dv.stride.into()]);
        second.extend(self.rest());
        let blocks = |n: usize| n.min(gpu.multiprocessors);
        let grid = Grid { blocks: blocks(queries.len), threads: 384, shared: 1024 + 7 * 256 * d };
        let d_query = Launch { name: "attention_dq_sm90", grid, arguments: first };
        let grid = Grid { blocks: blocks(keys.len), threads: 384, shared: 3072 + 6 * 256 * d };
        [d_query, Launch { name: "attention_dkdv_sm90", grid, arguments: second }]
    }
}

/// A map of a bf16 matrix whose rows are tokens and whose columns heads of `size`, in boxes of `rows` tokens and 64
/// elements.
fn tensor_map(x: &Matrix, size: usize, rows: usize) -> cu::CUtensorMap {
    // SAFETY: a tensor map is plain words, for which zeros are valid.
    let mut map: cu::CUtensorMap = unsafe { std::mem::zeroed() };
    let sizes = [size as u64, (x.columns / size) as u64, x.rows as u64];
    let strides = [size as u64 * 2, x.stride as u64 * 2];
    let (boxes, ones) = ([64u32, 1, rows as u32], [1u32; 3]);
    // SAFETY: the arrays have the rank's length, the strides one less; the map is written in place.
    let result = unsafe {
        cu::cuTensorMapEncodeTiled(
            &mut map,
            cu::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            3,
            x.pointer as *mut std::ffi::c_void,
            sizes.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            ones.as_ptr(),
            cu::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            cu::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cu::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    must(result, "a tensor map");
    map
}
