//! Head and cross-entropy on the CPU, in chunks of trained rows: the logits of one chunk are all
//! that is ever held.
//!
//! Where something is tracked, a chunk's logits become their gradient in place (softmax − one-hot,
//! still times the softmax's sum) and go back through the head at once, so nothing is computed
//! twice. Saved for backward: the gradient of the trained rows `[n, e]`, of the weight only if it is
//! tracked; backward multiplies them by the gradient that comes in. A row's loss takes its
//! exponentials in f32 and their sum, block by block, in f64; so does the sum over the rows.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{Int, Tensor};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::flex;
use super::flex::gemm::{Matrix, Target, Threads, multiply};
use super::flex::simd::{exp_and_sum, fma, largest, scale, vectorised};
use super::linear::matrix;

/// Rows of a chunk: enough that reading the weight for each chunk costs little beside the product.
const ROWS: usize = 256;

/// The loss of trained rows under a head.
#[backend_extension(Flex, Autodiff)]
pub trait LinearCrossEntropyOps: Backend {
    /// See [`super::linear_cross_entropy`].
    fn linear_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rows: IntTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// See [`super::linear_cross_entropy`].
pub fn linear_cross_entropy(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    rows: Tensor<1, Int>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    assert_eq!(hidden.dims()[1], weight.dims()[1], "linear_cross_entropy: width of hidden and of the weight");
    assert_eq!(rows.dims(), targets.dims(), "linear_cross_entropy: rows and targets");
    let (hidden, weight) = (hidden.into_dispatch(), weight.into_dispatch());
    let (rows, targets) = (rows.inner().into_dispatch(), targets.inner().into_dispatch());
    Tensor::from_dispatch(<Dispatch as LinearCrossEntropyOps>::linear_cross_entropy(
        hidden, weight, rows, targets,
    ))
}

/// See [`super::token_losses`].
pub fn token_losses(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    rows: Tensor<1, Int>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    assert_eq!(hidden.dims()[1], weight.dims()[1], "token_losses: width of hidden and of the weight");
    assert_eq!(rows.dims(), targets.dims(), "token_losses: rows and targets");
    let (hidden, weight) = (flex::primitive(hidden), flex::primitive(weight));
    let losses = Head::new(hidden, weight, flex::primitive(rows), flex::primitive(targets)).losses(None);
    let len = losses.len();
    let losses = losses.into_iter().map(|loss| loss as f32).collect();
    Tensor::from_primitive::<Flex>(flex::tensor(losses, [len]))
}

impl LinearCrossEntropyOps for Flex {
    fn linear_cross_entropy(
        hidden: FlexTensor,
        weight: FlexTensor,
        rows: FlexTensor,
        targets: FlexTensor,
    ) -> FlexTensor {
        total(&Head::new(hidden, weight, rows, targets).losses(None))
    }
}

impl<C: CheckpointStrategy> LinearCrossEntropyOps for Autodiff<Flex, C> {
    fn linear_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rows: IntTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let nodes = [hidden.node(), weight.node()];
        let tracked = [hidden.is_tracked(), weight.is_tracked()];
        let prepared = HeadBackward.prepare::<C>(nodes).compute_bound().stateful();
        let (hidden, weight) = (hidden.into_primitive(), weight.into_primitive());
        let head = Head::new(hidden, weight, rows, targets);
        let mut slopes = Slopes::new(&head, tracked);
        let loss = total(&head.losses(tracked.contains(&true).then_some(&mut slopes)));
        let [tokens, vocabulary, width] =
            [head.hidden.shape()[0], head.weight.shape()[0], head.weight.shape()[1]];
        let state = || State { slopes, rows: head.rows, tokens, weight_shape: [vocabulary, width] };
        super::tape::record(prepared, state, loss)
    }
}

/// Σ, in order, as a tensor of one element.
fn total(losses: &[f64]) -> FlexTensor {
    flex::tensor(vec![losses.iter().sum::<f64>() as f32], [1])
}

struct Head {
    hidden: FlexTensor,
    weight: FlexTensor,
    rows: Vec<usize>,
    targets: Vec<usize>,
}

/// Gradients of the sum of the losses.
#[derive(Debug, Clone)]
struct Slopes {
    /// Of the trained rows of hidden, `[n, e]`.
    rows: Option<Vec<f32>>,
    /// `[v, e]`
    weight: Option<Vec<f32>>,
}

impl Slopes {
    fn new(head: &Head, tracked: [bool; 2]) -> Self {
        let width = head.weight.shape()[1];
        let zeros = |tracked: bool, rows: usize| tracked.then(|| vec![0.0; rows * width]);
        Self { rows: zeros(tracked[0], head.rows.len()), weight: zeros(tracked[1], head.weight.shape()[0]) }
    }
}

/// A row's sum of exponentials and loss.
#[derive(Debug, Clone, Copy)]
struct RowLoss {
    sum: f64,
    loss: f64,
}

impl Head {
    fn new(hidden: FlexTensor, weight: FlexTensor, rows: FlexTensor, targets: FlexTensor) -> Self {
        let (hidden, weight) = (flex::dense(hidden), flex::dense(weight));
        let (rows, targets) = (flex::indices(&rows), flex::indices(&targets));
        let [tokens, vocabulary] = [hidden.shape()[0], weight.shape()[0]];
        let outside = rows.iter().find(|&&row| row >= tokens);
        assert_eq!(outside, None, "linear_cross_entropy: a row outside the {tokens} rows of hidden");
        let outside = targets.iter().find(|&&target| target >= vocabulary);
        assert_eq!(outside, None, "linear_cross_entropy: a target outside the vocabulary of {vocabulary}");
        Self { hidden, weight, rows, targets }
    }

    /// The loss of each row; their gradients go to `slopes`.
    fn losses(&self, mut slopes: Option<&mut Slopes>) -> Vec<f64> {
        let [vocabulary, width] = [self.weight.shape()[0], self.weight.shape()[1]];
        let mut logits = vec![0.0; ROWS.min(self.rows.len()) * vocabulary];
        let mut losses = Vec::with_capacity(self.rows.len());
        for (n, targets) in self.targets.chunks(ROWS).enumerate() {
            let first = n * ROWS;
            let x = self.gather(first..first + targets.len());
            let logits = &mut logits[..targets.len() * vocabulary];
            let target = Target::overwrite(logits, targets.len(), vocabulary);
            multiply(target, Matrix::new(&x, targets.len(), width), matrix(&self.weight).t(), Threads::All);
            let with_slopes = slopes.is_some();
            let row_losses: Vec<RowLoss> = (logits.par_chunks_exact_mut(vocabulary).zip(targets))
                .map(|(logits, &target)| row_loss(logits, target, with_slopes))
                .collect();
            if let Some(slopes) = &mut slopes {
                self.back(first, logits, x, &row_losses, slopes);
            }
            losses.extend(row_losses.iter().map(|row| row.loss));
        }
        losses
    }

    /// The trained rows number `range`, side by side.
    fn gather(&self, range: std::ops::Range<usize>) -> Vec<f32> {
        let width = self.hidden.shape()[1];
        let values = flex::values(&self.hidden);
        self.rows[range].iter().flat_map(|&row| &values[row * width..(row + 1) * width]).copied().collect()
    }

    /// From a chunk's gradient of the logits, times the rows' sums, to the gradients of its rows `x`
    /// (numbered from `first`) and of the weight.
    fn back(&self, first: usize, logits: &[f32], mut x: Vec<f32>, losses: &[RowLoss], slopes: &mut Slopes) {
        let [vocabulary, width] = [self.weight.shape()[0], self.weight.shape()[1]];
        let logits = Matrix::new(logits, losses.len(), vocabulary);
        if let Some(out) = &mut slopes.rows {
            let out = &mut out[first * width..(first + losses.len()) * width];
            multiply(Target::overwrite(out, losses.len(), width), logits, matrix(&self.weight), Threads::All);
            divide_rows(out, width, losses);
        }
        if let Some(out) = &mut slopes.weight {
            divide_rows(&mut x, width, losses);
            multiply(
                Target::add(out, vocabulary, width),
                logits.t(),
                Matrix::new(&x, losses.len(), width),
                Threads::All,
            );
        }
    }
}

/// Each row by its sum of exponentials.
fn divide_rows(values: &mut [f32], width: usize, losses: &[RowLoss]) {
    for (row, loss) in values.chunks_exact_mut(width).zip(losses) {
        scale(row, (1.0 / loss.sum) as f32);
    }
}

/// The loss of a row of logits, which turn into e^(logit − largest), at the target less their sum:
/// that is the gradient of the loss times the sum.
fn row_loss(logits: &mut [f32], target: usize, with_slopes: bool) -> RowLoss {
    let at_target = f64::from(logits[target]);
    let (largest, sum) = exponentials(logits);
    if with_slopes {
        logits[target] = (f64::from(logits[target]) - sum) as f32;
    }
    RowLoss { sum, loss: sum.ln() + (f64::from(largest) - at_target) }
}

vectorised! {
    /// logit ← e^(logit − largest); returns the largest logit and the sum of the exponentials.
    fn exponentials(logits: &mut [f32]) -> (f32, f64) {
        let largest = largest(logits);
        let mut sum = 0.0;
        // Blocks of f32 sums of up to 1024/32 terms a lane: below 1e-6 of the whole.
        for block in logits.chunks_mut(1024) {
            sum += f64::from(exp_and_sum::<FMA>(block, |logit| logit - largest));
        }
        (largest, sum)
    }
}

#[derive(Debug, Clone)]
struct State {
    slopes: Slopes,
    rows: Vec<usize>,
    /// Rows of hidden.
    tokens: usize,
    weight_shape: [usize; 2],
}

#[derive(Debug)]
struct HeadBackward;

impl Backward<Flex, 2> for HeadBackward {
    type State = State;

    fn backward(self, ops: Ops<State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = flex::dense(grads.consume::<Flex>(&ops.node));
        let factor = flex::values(&grad)[0];
        let [hidden_node, weight_node] = ops.parents;
        let State { slopes, rows, tokens, weight_shape } = ops.state;
        if let (Some(node), Some(slopes)) = (hidden_node, slopes.rows) {
            let width = weight_shape[1];
            let gradient = scatter(&slopes, &rows, tokens, width, factor);
            grads.register::<Flex>(node.id, flex::tensor(gradient, [tokens, width]));
        }
        if let (Some(node), Some(mut slopes)) = (weight_node, slopes.weight) {
            slopes.par_chunks_mut(16 * 1024).for_each(|chunk| scale(chunk, factor));
            grads.register::<Flex>(node.id, flex::tensor(slopes, weight_shape));
        }
    }
}

/// The gradient of hidden: zeros but for the trained rows, those times `factor`. A row named twice
/// gets the sum.
fn scatter(slopes: &[f32], rows: &[usize], tokens: usize, width: usize, factor: f32) -> Vec<f32> {
    let mut out = vec![0.0; tokens * width];
    for (&row, slope) in rows.iter().zip(slopes.chunks_exact(width)) {
        add_scaled(&mut out[row * width..(row + 1) * width], slope, factor);
    }
    out
}

vectorised! {
    /// x ← x + y · factor
    fn add_scaled(x: &mut [f32], y: &[f32], factor: f32) {
        for (x, &y) in x.iter_mut().zip(y) {
            *x = fma::<FMA>(y, factor, *x);
        }
    }
}
