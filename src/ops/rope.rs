//! Head norm and rotary embedding in one pass on the CPU.
//!
//! Saved for backward: x and the weight where the model has a norm (the inverse root mean squares
//! are computed again), nothing but the tables where it has none.

use std::mem::MaybeUninit;

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::Rope;
use super::flex::simd::{fma, vectorised};
use super::flex::{self, Buffer};
use super::rms_norm::{input_gradient, inverse_rms, sum_partials, weight_gradient};

/// Tokens that one task works through; weight gradients are summed within it, then over the tasks.
const TOKENS: usize = 32;

/// The norm and rotation of each head of `[t, h, d]`.
#[backend_extension(Flex, Autodiff)]
pub trait RopeOps: Backend {
    /// See [`super::qk_norm_rope`]; `cos` and `sin` are constants.
    fn qk_norm_rope(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self>;

    /// The same without a norm.
    fn rope(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// See [`super::qk_norm_rope`].
pub fn qk_norm_rope(x: Tensor<3>, weight: Option<Tensor<1>>, eps: f64, rope: &Rope) -> Tensor<3> {
    let [t, _, d] = x.dims();
    assert_eq!(rope.cos.dims(), [t, d], "qk_norm_rope: cos");
    assert_eq!(rope.sin.dims(), [t, d], "qk_norm_rope: sin");
    assert!(d.is_multiple_of(2), "qk_norm_rope: head size {d} is odd");
    let (cos, sin) = (rope.cos.clone().into_dispatch(), rope.sin.clone().into_dispatch());
    let x = x.into_dispatch();
    Tensor::from_dispatch(match weight {
        Some(weight) => {
            assert_eq!(weight.dims(), [d], "qk_norm_rope: weight");
            <Dispatch as RopeOps>::qk_norm_rope(x, weight.into_dispatch(), cos, sin, eps)
        }
        None => <Dispatch as RopeOps>::rope(x, cos, sin),
    })
}

/// The tables of a micro-batch.
#[derive(Debug, Clone)]
struct Tables {
    cos: FlexTensor,
    sin: FlexTensor,
}

impl Tables {
    fn new(cos: FlexTensor, sin: FlexTensor) -> Self {
        Self { cos: flex::dense(cos), sin: flex::dense(sin) }
    }

    fn row(&self, token: usize) -> (&[f32], &[f32]) {
        let head = self.cos.shape()[1];
        let range = token * head..(token + 1) * head;
        (&flex::values(&self.cos)[range.clone()], &flex::values(&self.sin)[range])
    }
}

impl RopeOps for Flex {
    fn qk_norm_rope(
        x: FlexTensor,
        weight: FlexTensor,
        cos: FlexTensor,
        sin: FlexTensor,
        eps: f64,
    ) -> FlexTensor {
        let weight = flex::dense(weight);
        each_head(x, &Tables::new(cos, sin), |x, cos, sin, out| {
            let inverse = inverse_rms(x, eps as f32);
            norm_and_rotate(x, flex::values(&weight), inverse, cos, sin, out);
        })
    }

    fn rope(x: FlexTensor, cos: FlexTensor, sin: FlexTensor) -> FlexTensor {
        each_head(x, &Tables::new(cos, sin), rotate)
    }
}

/// Applies `kernel(head, cos, sin, out)` to each head of each token. It writes all of `out`.
fn each_head(
    x: FlexTensor,
    tables: &Tables,
    kernel: impl Fn(&[f32], &[f32], &[f32], &mut [MaybeUninit<f32>]) + Sync,
) -> FlexTensor {
    let x = flex::dense(x);
    let shape = x.shape();
    let (values, width, head) = (flex::values(&x), shape[1] * shape[2], shape[2]);
    let mut out = Buffer::new(values.len());
    let chunk = (TOKENS * width).max(1);
    out.slots().par_chunks_mut(chunk).zip(values.par_chunks(chunk)).enumerate().for_each(|(n, (out, x))| {
        let tokens = out.chunks_exact_mut(width).zip(x.chunks_exact(width));
        for (token, (out, x)) in (n * TOKENS..).zip(tokens) {
            let (cos, sin) = tables.row(token);
            for (out, x) in out.chunks_exact_mut(head).zip(x.chunks_exact(head)) {
                kernel(x, cos, sin, out);
            }
        }
    });
    // SAFETY: the chunks cover the result and each kernel writes all of its head.
    flex::tensor(unsafe { out.finish() }, shape)
}

impl<C: CheckpointStrategy> RopeOps for Autodiff<Flex, C> {
    fn qk_norm_rope(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self> {
        let prepared = NormRopeBackward.prepare::<C>([x.node(), weight.node()]).compute_bound().stateful();
        let (cos, sin) = (cos.into_primitive(), sin.into_primitive());
        let (x_values, weight_values) = (x.primitive().clone(), weight.primitive().clone());
        let out = Flex::qk_norm_rope(x_values.clone(), weight_values.clone(), cos.clone(), sin.clone(), eps);
        let state = || NormState {
            x: x_values,
            weight: weight_values,
            tables: Tables::new(cos, sin),
            eps: eps as f32,
            x_is_tracked: x.is_tracked(),
            weight_is_tracked: weight.is_tracked(),
        };
        super::tape::record(prepared, state, out)
    }

    fn rope(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self> {
        let prepared = RopeBackward.prepare::<C>([x.node()]).compute_bound().stateful();
        let tables = Tables::new(cos.into_primitive(), sin.into_primitive());
        let out = each_head(x.into_primitive(), &tables, rotate);
        super::tape::record(prepared, || tables, out)
    }
}

#[derive(Debug)]
struct RopeBackward;

impl Backward<Flex, 1> for RopeBackward {
    type State = Tables;

    fn backward(self, ops: Ops<Tables, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<Flex>(&ops.node);
        if let [Some(node)] = ops.parents {
            grads.register::<Flex>(node.id, each_head(grad, &ops.state, rotate_back));
        }
    }
}

#[derive(Debug, Clone)]
struct NormState {
    x: FlexTensor,
    weight: FlexTensor,
    tables: Tables,
    eps: f32,
    x_is_tracked: bool,
    weight_is_tracked: bool,
}

#[derive(Debug)]
struct NormRopeBackward;

impl Backward<Flex, 2> for NormRopeBackward {
    type State = NormState;

    fn backward(self, ops: Ops<NormState, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = flex::dense(grads.consume::<Flex>(&ops.node));
        let [x_node, weight_node] = ops.parents;
        let shape = ops.state.x.shape();
        let (dx, dw) = norm_backward(&ops.state, flex::values(&grad));
        if let (Some(node), Some(dx)) = (x_node, dx) {
            grads.register::<Flex>(node.id, flex::tensor(dx, shape));
        }
        if let (Some(node), Some(dw)) = (weight_node, dw) {
            let width = dw.len();
            grads.register::<Flex>(node.id, flex::tensor(dw, [width]));
        }
    }
}

/// Gradients of x and of the weight, those that are tracked.
fn norm_backward(state: &NormState, grad: &[f32]) -> (Option<Vec<f32>>, Option<Vec<f32>>) {
    let (x, weight) = (flex::dense(state.x.clone()), flex::dense(state.weight.clone()));
    let (width, head) = (x.shape()[1] * x.shape()[2], x.shape()[2]);
    let (x, weight) = (flex::values(&x), flex::values(&weight));
    let chunk = (TOKENS * width).max(1);
    let mut dx = Buffer::new(if state.x_is_tracked { x.len() } else { 0 });
    let outs: Vec<&mut [MaybeUninit<f32>]> = match state.x_is_tracked {
        true => dx.slots().chunks_mut(chunk).collect(),
        false => (0..x.len().div_ceil(chunk)).map(|_| Default::default()).collect(),
    };
    let partial: Vec<Vec<f32>> = (x.par_chunks(chunk), grad.par_chunks(chunk), outs)
        .into_par_iter()
        .enumerate()
        .map(|(n, (x, grad, out))| {
            let mut dw = vec![0.0; if state.weight_is_tracked { head } else { 0 }];
            let mut out = out.chunks_exact_mut(head);
            let mut rotated = Buffer::new(head);
            for (i, (x, grad)) in x.chunks_exact(head).zip(grad.chunks_exact(head)).enumerate() {
                let (cos, sin) = state.tables.row(n * TOKENS + i * head / width);
                rotate_back(grad, cos, sin, rotated.slots());
                // SAFETY: `rotate_back` has written all of it.
                let grad = unsafe { rotated.slots().assume_init_ref() };
                let inverse = inverse_rms(x, state.eps);
                if let Some(out) = out.next() {
                    input_gradient(x, weight, grad, inverse, out);
                }
                weight_gradient(x, grad, inverse, &mut dw);
            }
            dw
        })
        .collect();
    // SAFETY: the chunks cover `dx`, and `input_gradient` writes all of a head.
    let dx = state.x_is_tracked.then(|| unsafe { dx.finish() });
    (dx, state.weight_is_tracked.then(|| sum_partials(&partial, head)))
}

vectorised! {
    /// x · cos + rotate_half(x) · sin
    fn rotate(x: &[f32], cos: &[f32], sin: &[f32], out: &mut [MaybeUninit<f32>]) {
        let half = x.len() / 2;
        let (x1, x2) = x.split_at(half);
        let (out1, out2) = out.split_at_mut(half);
        for i in 0..half {
            out1[i].write(fma::<FMA>(x1[i], cos[i], -x2[i] * sin[i]));
            out2[i].write(fma::<FMA>(x2[i], cos[half + i], x1[i] * sin[half + i]));
        }
    }
}

vectorised! {
    /// The gradient of [`rotate`]: the rotation by the opposite angle.
    fn rotate_back(grad: &[f32], cos: &[f32], sin: &[f32], out: &mut [MaybeUninit<f32>]) {
        let half = grad.len() / 2;
        let (g1, g2) = grad.split_at(half);
        let (out1, out2) = out.split_at_mut(half);
        for i in 0..half {
            out1[i].write(fma::<FMA>(g1[i], cos[i], g2[i] * sin[half + i]));
            out2[i].write(fma::<FMA>(g2[i], cos[half + i], -g1[i] * sin[i]));
        }
    }
}

vectorised! {
    /// [`rotate`] of weight · x · inverse.
    fn norm_and_rotate(
        x: &[f32],
        weight: &[f32],
        inverse: f32,
        cos: &[f32],
        sin: &[f32],
        out: &mut [MaybeUninit<f32>],
    ) {
        let half = x.len() / 2;
        let (x1, x2) = x.split_at(half);
        let (w1, w2) = weight.split_at(half);
        let (out1, out2) = out.split_at_mut(half);
        for i in 0..half {
            let (n1, n2) = (x1[i] * inverse * w1[i], x2[i] * inverse * w2[i]);
            out1[i].write(fma::<FMA>(n1, cos[i], -n2 * sin[i]));
            out2[i].write(fma::<FMA>(n2, cos[half + i], n1 * sin[half + i]));
        }
    }
}
