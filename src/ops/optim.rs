//! Sum of squares and AdamW on the CPU, over flat tensors without a tape.

use burn::backend::Flex;
use burn::tensor::{DType, Tensor};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::flex;
use super::flex::simd::{sum_of, vectorised};
use super::{AdamW, mix};

/// Elements of one task; the sum of squares is the sum, in order, of the sums of such pieces.
const CHUNK: usize = 16 * 1024;

/// See [`super::sum_squares`].
pub fn sum_squares(x: Tensor<1>) -> Tensor<1> {
    let x = flex::dense(flex::primitive(x));
    let sums: Vec<f64> = flex::values(&x).par_chunks(CHUNK).map(chunk_sum_squares).collect();
    Tensor::from_primitive::<Flex>(flex::tensor(vec![sums.iter().sum::<f64>() as f32], [1]))
}

vectorised! {
    fn chunk_sum_squares(x: &[f32]) -> f64 {
        x.chunks(1024).map(|x| f64::from(sum_of(x.len(), |i| x[i] * x[i]))).sum()
    }
}

/// Whether this version takes them.
pub fn takes([param, m, v, grad]: [&Tensor<1>; 4]) -> bool {
    let moments = |x: &Tensor<1>| x.dtype() == DType::BF16 && flex::is_flex(&x.device());
    [param, grad].into_iter().all(flex::takes)
        && [m, v].into_iter().all(|x| flex::takes(x) || moments(x))
        && [param, m, v, grad].into_iter().all(|x| !x.is_autodiff())
}

/// See [`super::adamw`]. The tensors' memory is used again where nobody else holds it.
pub fn adamw(param: Tensor<1>, m: Tensor<1>, v: Tensor<1>, grad: Tensor<1>, step: &AdamW) -> [Tensor<1>; 3] {
    if m.dtype() == DType::BF16 {
        let [param, m, v] = adamw(param, m.cast(DType::F32), v.cast(DType::F32), grad, step);
        return [param, to_bf16(m, step.rounding, 0), to_bf16(v, step.rounding, 16)];
    }
    let grad = flex::dense(flex::primitive(grad));
    let mut moved = [param, m, v].map(|x| flex::dense(flex::primitive(x)));
    let [p, m, v] = &mut moved;
    let factors = Factors::new(step);
    let (p, m, v) = (own(p), own(m), own(v));
    assert!(
        [p.len(), m.len(), v.len()].iter().all(|&len| len == flex::values(&grad).len()),
        "adamw: lengths"
    );
    let chunks = (p.par_chunks_mut(CHUNK), m.par_chunks_mut(CHUNK), v.par_chunks_mut(CHUNK));
    let chunks = (chunks.0, chunks.1, chunks.2, flex::values(&grad).par_chunks(CHUNK));
    chunks.into_par_iter().for_each(|(p, m, v, g)| update(p, m, v, g, &factors));
    moved.map(Tensor::from_primitive::<Flex>)
}

/// Rounded up or down by chance: by 16 bits, from bit `shift` on, of each element's hash.
pub fn to_bf16(x: Tensor<1>, rounding: u32, shift: u32) -> Tensor<1> {
    let mut x = flex::dense(flex::primitive(x));
    own(&mut x).par_chunks_mut(CHUNK).enumerate().for_each(|(n, values)| {
        for (i, value) in (n * CHUNK..).zip(values) {
            *value = one_of_bf16(*value, mix(mix(i as u32) ^ rounding) >> shift & 0xffff);
        }
    });
    // Each is one of bf16's now, so this changes nothing.
    Tensor::<1>::from_primitive::<Flex>(x).cast(DType::BF16)
}

/// One of the two bf16 numbers around `x`: the one further from 0 where `chance`, of 2¹⁶, reaches over the distance to it.
fn one_of_bf16(x: f32, chance: u32) -> f32 {
    let bits = x.to_bits();
    match x.is_finite() {
        true => f32::from_bits((bits + chance) & 0xffff_0000),
        false => x,
    }
}

/// The tensor's elements, copied first if they are shared or part of a larger tensor.
fn own(x: &mut FlexTensor) -> &mut [f32] {
    if x.layout().start_offset() != 0 || x.bytes().len() != size_of::<f32>() * x.layout().num_elements() {
        *x = x.to_contiguous();
    }
    x.storage_mut()
}

/// The scalars of an update in f32, rounded once.
struct Factors {
    grad: f32,
    beta1: f32,
    beta2: f32,
    one_less_beta1: f32,
    one_less_beta2: f32,
    /// 1 / (1 − β₂ᵏ)
    v_correction: f32,
    /// lr / (1 − β₁ᵏ)
    rate: f32,
    /// 1 − lr · weight decay
    keep: f32,
    eps: f32,
}

impl Factors {
    fn new(step: &AdamW) -> Self {
        let k = step.update as i32;
        Self {
            grad: step.grad_scale as f32,
            beta1: step.beta1 as f32,
            beta2: step.beta2 as f32,
            one_less_beta1: (1.0 - step.beta1) as f32,
            one_less_beta2: (1.0 - step.beta2) as f32,
            v_correction: (1.0 / (1.0 - step.beta2.powi(k))) as f32,
            rate: (step.lr / (1.0 - step.beta1.powi(k))) as f32,
            keep: (1.0 - step.lr * step.weight_decay) as f32,
            eps: step.eps as f32,
        }
    }
}

vectorised! {
    fn update(p: &mut [f32], m: &mut [f32], v: &mut [f32], grad: &[f32], f: &Factors) {
        for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(grad) {
            let g = g * f.grad;
            *m = *m * f.beta1 + g * f.one_less_beta1;
            *v = *v * f.beta2 + g * g * f.one_less_beta2;
            *p = *p * f.keep - *m * f.rate / ((*v * f.v_correction).sqrt() + f.eps);
        }
    }
}
