//! Root-mean-square norm on the CPU: one pass forward, one backward.
//!
//! Saved for backward: x, and the weight if x is tracked. The inverse root mean square is computed
//! again, by the same code, from the row that backward reads anyway.

use std::mem::MaybeUninit;

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::flex::simd::{self, fma, sum_of, vectorised};
use super::flex::{self, Buffer};

/// Rows that one task works through; weight gradients are summed within it, then over the tasks.
const ROWS: usize = 32;

/// The norm of each row of `[rows, e]`.
#[backend_extension(Flex, Autodiff)]
pub trait RmsNormOps: Backend {
    /// See [`super::rms_norm`].
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64) -> FloatTensor<Self>;
}

/// See [`super::rms_norm`].
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, eps: f64) -> Tensor<2> {
    assert_eq!(x.dims()[1], weight.dims()[0], "rms_norm: width of x and of the weight");
    let out = <Dispatch as RmsNormOps>::rms_norm(x.into_dispatch(), weight.into_dispatch(), eps);
    Tensor::from_dispatch(out)
}

impl RmsNormOps for Flex {
    fn rms_norm(x: FlexTensor, weight: FlexTensor, eps: f64) -> FlexTensor {
        let (x, weight) = (flex::dense(x), flex::dense(weight));
        let (x_values, w) = (flex::values(&x), flex::values(&weight));
        let width = w.len();
        let mut out = Buffer::new(x_values.len());
        let chunk = (ROWS * width).max(1);
        out.slots().par_chunks_mut(chunk).zip(x_values.par_chunks(chunk)).for_each(|(out, x)| {
            for (out, x) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
                forward_row(x, w, eps as f32, out);
            }
        });
        // SAFETY: the chunks cover the result, and `forward_row` writes all of a row.
        flex::tensor(unsafe { out.finish() }, burn::backend::TensorMetadata::shape(&x))
    }
}

impl<C: CheckpointStrategy> RmsNormOps for Autodiff<Flex, C> {
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        let prepared = RmsNormBackward.prepare::<C>([x.node(), weight.node()]).compute_bound().stateful();
        let out = Flex::rms_norm(x.primitive().clone(), weight.primitive().clone(), eps);
        let state = || State {
            x: x.primitive().clone(),
            weight: x.is_tracked().then(|| weight.primitive().clone()),
            eps: eps as f32,
            weight_is_tracked: weight.is_tracked(),
        };
        super::tape::record(prepared, state, out)
    }
}

#[derive(Debug, Clone)]
struct State {
    x: FlexTensor,
    weight: Option<FlexTensor>,
    eps: f32,
    weight_is_tracked: bool,
}

#[derive(Debug)]
struct RmsNormBackward;

impl Backward<Flex, 2> for RmsNormBackward {
    type State = State;

    fn backward(self, ops: Ops<State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = flex::dense(grads.consume::<Flex>(&ops.node));
        let [x_node, weight_node] = ops.parents;
        let State { x, weight, eps, weight_is_tracked } = ops.state;
        let x = flex::dense(x);
        let shape = burn::backend::TensorMetadata::shape(&x);
        let width = shape[shape.num_dims() - 1];
        let weight = weight.map(flex::dense);
        let weight = weight.as_ref().map(flex::values);
        let (dx, dw) = backward(flex::values(&x), weight, flex::values(&grad), width, eps, weight_is_tracked);
        if let (Some(node), Some(dx)) = (x_node, dx) {
            grads.register::<Flex>(node.id, flex::tensor(dx, shape));
        }
        if let (Some(node), Some(dw)) = (weight_node, dw) {
            grads.register::<Flex>(node.id, flex::tensor(dw, [width]));
        }
    }
}

/// Gradients of x (if there is a weight) and of the weight (if `weight_is_tracked`).
fn backward(
    x: &[f32],
    weight: Option<&[f32]>,
    grad: &[f32],
    width: usize,
    eps: f32,
    weight_is_tracked: bool,
) -> (Option<Vec<f32>>, Option<Vec<f32>>) {
    let mut dx = Buffer::new(if weight.is_some() { x.len() } else { 0 });
    let chunk = (ROWS * width).max(1);
    let chunks = x.len().div_ceil(chunk);
    let outs: Vec<&mut [MaybeUninit<f32>]> = match weight {
        Some(_) => dx.slots().chunks_mut(chunk).collect(),
        None => (0..chunks).map(|_| Default::default()).collect(),
    };
    let partial: Vec<Vec<f32>> = (x.par_chunks(chunk), grad.par_chunks(chunk), outs)
        .into_par_iter()
        .map(|(x, grad, out)| {
            let mut dw = vec![0.0; if weight_is_tracked { width } else { 0 }];
            let mut out = out.chunks_exact_mut(width);
            for (x, grad) in x.chunks_exact(width).zip(grad.chunks_exact(width)) {
                let inverse = inverse_rms(x, eps);
                if let (Some(weight), Some(out)) = (weight, out.next()) {
                    input_gradient(x, weight, grad, inverse, out);
                }
                weight_gradient(x, grad, inverse, &mut dw);
            }
            dw
        })
        .collect();
    // SAFETY: there are as many chunks of `dx` as of x, and `input_gradient` writes all of a row.
    let dx = weight.map(|_| unsafe { dx.finish() });
    (dx, weight_is_tracked.then(|| sum_partials(&partial, width)))
}

/// Σ of the tasks' sums, in the order of the rows.
pub fn sum_partials(partial: &[Vec<f32>], width: usize) -> Vec<f32> {
    let mut sum = vec![0.0; width];
    for part in partial {
        simd::add(&mut sum, part);
    }
    sum
}

vectorised! {
    /// weight · x / rms(x)
    pub fn forward_row(x: &[f32], weight: &[f32], eps: f32, out: &mut [MaybeUninit<f32>]) {
        let mean = sum_of(x.len(), |i| x[i] * x[i]) / x.len() as f32;
        let inverse = 1.0 / (mean + eps).sqrt();
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            out.write(x * inverse * w);
        }
    }
}

vectorised! {
    /// 1 / sqrt(mean(x²) + eps)
    pub fn inverse_rms(x: &[f32], eps: f32) -> f32 {
        let mean = sum_of(x.len(), |i| x[i] * x[i]) / x.len() as f32;
        1.0 / (mean + eps).sqrt()
    }
}

vectorised! {
    /// With n = x · inverse: inverse · (g · w − n · mean(g · w · n)).
    pub fn input_gradient(
        x: &[f32],
        weight: &[f32],
        grad: &[f32],
        inverse: f32,
        out: &mut [MaybeUninit<f32>],
    ) {
        let (weight, grad) = (&weight[..x.len()], &grad[..x.len()]);
        let mean = sum_of(x.len(), |i| grad[i] * weight[i] * x[i]) * inverse / x.len() as f32;
        let back = -mean * inverse * inverse;
        for (((out, x), w), g) in out.iter_mut().zip(x).zip(weight).zip(grad) {
            out.write(fma::<FMA>(*x, back, g * w * inverse));
        }
    }
}

vectorised! {
    /// dw ← dw + g · x · inverse; an empty `dw` is left alone.
    pub fn weight_gradient(x: &[f32], grad: &[f32], inverse: f32, dw: &mut [f32]) {
        for ((dw, x), g) in dw.iter_mut().zip(x).zip(grad) {
            *dw = fma::<FMA>(x * inverse, *g, *dw);
        }
    }
}
