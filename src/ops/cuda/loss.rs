//! Head and cross-entropy on the card, in chunks of trained rows: the logits of one chunk are all
//! that is ever held, and they become their gradient in place.
//!
//! Where something is tracked, a chunk goes back through the head at once. Saved for backward: the
//! gradient of the trained rows `[n, e]`, of the weight only if it is tracked. Logits have the type
//! of hidden, each row's loss is f32. The trained rows must ascend.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Cube, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{DType, Int, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::super::tape::record;
use super::driver::Side;
use super::gemm::Matrix;
use super::kernels::{Arg, CE_THREADS, Files, Grid, Module};
use super::memory::Layout;
use super::tensor::{cast, dense, empty, gpu, is_on_card, matrix, pointer};

/// Rows of a chunk: its products fill a card's multiprocessors about once, and more rows don't make them faster.
const CHUNK_ROWS: usize = 4096;
/// Bytes of a chunk's logits, at most.
const CHUNK: usize = 2 << 30;

/// The loss of trained rows under a head.
#[backend_extension(Cube, Autodiff)]
pub trait LossOps: Backend {
    /// See [`crate::ops::linear_cross_entropy`].
    fn cuda_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rows: IntTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self>;
    /// See [`crate::ops::token_losses`].
    fn cuda_token_losses(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rows: IntTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// Whether the kernels take these tensors.
pub fn takes(hidden: &Tensor<2>, weight: &Tensor<2>, rows: &Tensor<1, Int>) -> bool {
    let same = hidden.dtype() == weight.dtype() && hidden.dims()[1] == weight.dims()[1];
    let full = hidden.dims()[0] > 0 && rows.dims()[0] > 0;
    is_on_card(hidden) && is_on_card(weight) && same && full
}

/// With zeros up to whole chunks of 8 columns, as the kernels want them: they change no product.
fn whole_chunks(x: Tensor<2>) -> Tensor<2> {
    let [rows, width] = x.dims();
    match width.next_multiple_of(8) - width {
        0 => x,
        missing => {
            let zeros = Tensor::zeros([rows, missing], (&x.device().without_autodiff(), x.dtype()));
            Tensor::cat(vec![x, zeros], 1)
        }
    }
}

/// See [`crate::ops::linear_cross_entropy`].
pub fn linear_cross_entropy(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    rows: Tensor<1, Int>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    assert_eq!(rows.dims(), targets.dims(), "linear_cross_entropy: rows and targets");
    let [hidden, weight] = [hidden, weight].map(|x| whole_chunks(x).into_dispatch());
    let [rows, targets] = [rows, targets].map(|x| x.inner().cast(DType::I32).into_dispatch());
    Tensor::from_dispatch(<Dispatch as LossOps>::cuda_loss(hidden, weight, rows, targets))
}

/// See [`crate::ops::token_losses`].
pub fn token_losses(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    rows: Tensor<1, Int>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    assert_eq!(rows.dims(), targets.dims(), "token_losses: rows and targets");
    let [hidden, weight] = [hidden, weight].map(|x| whole_chunks(x).into_dispatch());
    let [rows, targets] = [rows, targets].map(|x| x.inner().cast(DType::I32).into_dispatch());
    Tensor::from_dispatch(<Dispatch as LossOps>::cuda_token_losses(hidden, weight, rows, targets))
}

impl LossOps for Cube {
    fn cuda_loss(
        hidden: CubeTensor,
        weight: CubeTensor,
        rows: CubeTensor,
        targets: CubeTensor,
    ) -> CubeTensor {
        let head = Head::new(hidden, weight, rows, targets);
        total(&head.losses([false; 2]).losses)
    }

    fn cuda_token_losses(
        hidden: CubeTensor,
        weight: CubeTensor,
        rows: CubeTensor,
        targets: CubeTensor,
    ) -> CubeTensor {
        Head::new(hidden, weight, rows, targets).losses([false; 2]).losses
    }
}

impl<C: CheckpointStrategy> LossOps for Autodiff<Cube, C> {
    fn cuda_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rows: IntTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let nodes = [hidden.node(), weight.node()];
        let tracked = [hidden.is_tracked(), weight.is_tracked()];
        let prepared = HeadBackward.prepare::<C>(nodes).compute_bound().stateful();
        let head = Head::new(hidden.into_primitive(), weight.into_primitive(), rows, targets);
        let results = head.losses(tracked);
        let loss = total(&results.losses);
        let tokens = head.hidden.shape()[0];
        let state = || State { rows: head.rows, d_rows: results.d_rows, d_weight: results.d_weight, tokens };
        record(prepared, state, loss)
    }

    fn cuda_token_losses(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rows: IntTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        use burn::backend::AutodiffBackend;
        let (hidden, weight) = (hidden.into_primitive(), weight.into_primitive());
        Self::from_inner(Cube::cuda_token_losses(hidden, weight, rows, targets))
    }
}

/// Σ in a fixed order, as a tensor of one element.
fn total(losses: &CubeTensor) -> CubeTensor {
    let out = empty(losses, [1], DType::F32);
    let arguments = [pointer(losses).into(), pointer(&out).into(), losses.shape()[0].into(), 0usize.into()];
    let module = Module::bf16(Files::Optimizer, 0);
    gpu(losses).enter(|side| side.launch(module, "sum_values", Grid::new(1, 256), &arguments));
    out
}

struct Head {
    hidden: CubeTensor,
    weight: CubeTensor,
    rows: CubeTensor,
    targets: CubeTensor,
}

/// What a pass through the head leaves.
struct Results {
    /// `[n]`, f32
    losses: CubeTensor,
    /// Gradient of the trained rows, `[n, e]`.
    d_rows: Option<CubeTensor>,
    /// Gradient of the weight, in its type.
    d_weight: Option<CubeTensor>,
}

impl Head {
    fn new(hidden: CubeTensor, weight: CubeTensor, rows: CubeTensor, targets: CubeTensor) -> Self {
        let [hidden, weight, rows, targets] = [hidden, weight, rows, targets].map(dense);
        Self { hidden, weight, rows, targets }
    }

    /// The loss of each row, and the gradients of their sum that are wanted, of hidden and weight.
    fn losses(&self, [of_rows, of_weight]: [bool; 2]) -> Results {
        let (hidden, dtype, n) = (&self.hidden, self.hidden.dtype, self.rows.shape()[0]);
        let [vocabulary, width] = [self.weight.shape()[0], self.weight.shape()[1]];
        let stride = vocabulary.next_multiple_of(8);
        let chunk = chunk_rows(n, stride * dtype.size());
        let x = empty(hidden, [n, width], dtype);
        let losses = empty(hidden, [n], DType::F32);
        let d_rows = of_rows.then(|| empty(hidden, [n, width], dtype));
        let d_weight = of_weight.then(|| empty(hidden, [vocabulary, width], DType::F32));
        let call = Call {
            hidden: pointer(hidden),
            rows: pointer(&self.rows),
            targets: pointer(&self.targets),
            losses: pointer(&losses),
            x: matrix(&x),
            weight: matrix(&self.weight),
            // Given its place below.
            logits: Matrix { stride, ..Matrix::dense(0, chunk, vocabulary, dtype) },
            d_rows: d_rows.as_ref().map(matrix),
            d_weight: d_weight.as_ref().map(matrix),
        };
        gpu(hidden).enter(|side| {
            // The logits share their memory with what the layers work in.
            let mut layout = Layout::default();
            let logits = layout.matrix(chunk, vocabulary, stride, dtype);
            let block = layout.block(side);
            Call { logits: block.at(logits), ..call }.run(side, n, chunk);
        });
        let d_weight = d_weight.map(|d_weight| cast(d_weight, self.weight.dtype));
        Results { losses, d_rows, d_weight }
    }
}

/// Rows of a chunk of `n` rows.
fn chunk_rows(n: usize, row_bytes: usize) -> usize {
    (CHUNK / row_bytes).clamp(1, CHUNK_ROWS).min(n)
}

/// Addresses of a pass through the head.
struct Call {
    hidden: u64,
    rows: u64,
    targets: u64,
    losses: u64,
    x: Matrix,
    weight: Matrix,
    logits: Matrix,
    d_rows: Option<Matrix>,
    d_weight: Option<Matrix>,
}

impl Call {
    fn run(&self, side: &mut Side<'_>, n: usize, chunk: usize) {
        let width = self.x.columns;
        let float32 = self.x.dtype == DType::F32;
        let arguments = [self.hidden.into(), self.rows.into(), self.x.pointer.into(), n.into(), width.into()];
        let grid = Grid::new((n * width).div_ceil(2048), 256);
        side.launch(Module::of(Files::Rows, 0, float32), "gather_rows", grid, &arguments);
        for first in (0..n).step_by(chunk) {
            let count = chunk.min(n - first);
            let (x, logits) = (self.x.rows(first, count), self.logits.rows(0, count));
            side.product(x, self.weight.t(), logits, 1.0, 0.0);
            self.cross_entropy(side, first, logits);
            if let Some(d_rows) = self.d_rows {
                side.product(logits, self.weight, d_rows.rows(first, count), 1.0, 0.0);
            }
            if let Some(d_weight) = self.d_weight {
                let beta = if first == 0 { 0.0 } else { 1.0 };
                side.product(logits.t(), x, d_weight, 1.0, beta);
            }
        }
    }

    /// Losses of the rows from `first` on, whose logits turn into their gradient.
    fn cross_entropy(&self, side: &mut Side<'_>, first: usize, logits: Matrix) {
        let at = 4 * first as u64;
        let bytes = 8 * logits.dtype.size();
        // The part of a row that stays in shared memory.
        let limit = side.gpu.shared_memory.saturating_sub(8 << 10).min(216 << 10);
        let kept = logits.columns.div_ceil(8).min(limit / bytes);
        let arguments = [
            logits.pointer.into(),
            (self.targets + at).into(),
            (self.losses + at).into(),
            0u64.into(),
            logits.stride.into(),
            logits.rows.into(),
            logits.columns.into(),
            kept.into(),
            1.0f32.into(),
        ];
        let blocks = logits.rows.min(side.gpu.multiprocessors);
        let grid = Grid { blocks, threads: CE_THREADS, shared: kept * bytes };
        let module = Module::of(Files::CrossEntropy, 0, logits.dtype == DType::F32);
        side.launch(module, "cross_entropy", grid, &arguments);
    }
}

#[derive(Debug, Clone)]
struct State {
    rows: CubeTensor,
    d_rows: Option<CubeTensor>,
    d_weight: Option<CubeTensor>,
    /// Rows of hidden.
    tokens: usize,
}

#[derive(Debug)]
struct HeadBackward;

impl Backward<Cube, 2> for HeadBackward {
    type State = State;

    fn backward(self, ops: Ops<State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let factor = dense(grads.consume::<Cube>(&ops.node));
        let [hidden_node, weight_node] = ops.parents;
        let State { rows, d_rows, d_weight, tokens } = ops.state;
        if let (Some(node), Some(d_rows)) = (hidden_node, d_rows) {
            grads.register::<Cube>(node.id, scatter(&d_rows, &rows, &factor, tokens));
        }
        if let (Some(node), Some(d_weight)) = (weight_node, d_weight) {
            let shape = [1, 1].into();
            let factor = Cube::float_reshape(cast(factor, d_weight.dtype), shape);
            grads.register::<Cube>(node.id, Cube::float_mul(d_weight, factor));
        }
    }
}

/// The gradient of hidden: zeros but for the trained rows, those times the factor.
fn scatter(slopes: &CubeTensor, rows: &CubeTensor, factor: &CubeTensor, tokens: usize) -> CubeTensor {
    let [n, width] = [slopes.shape()[0], slopes.shape()[1]];
    let out = empty(slopes, [tokens, width], slopes.dtype);
    let mut arguments: Vec<_> = [slopes, rows, factor, &out].map(|x| pointer(x).into()).into_iter().collect();
    arguments.extend([n, tokens, width].map(Arg::from));
    let module = Module::of(Files::Rows, 0, slopes.dtype == DType::F32);
    let grid = Grid::new((tokens * width).div_ceil(2048), 256);
    gpu(slopes).enter(|side| side.launch(module, "scatter_rows", grid, &arguments));
    out
}
