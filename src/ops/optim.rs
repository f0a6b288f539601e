//! Sum of squares and AdamW on the CPU, over flat tensors without a tape.

use burn::backend::Flex;
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::AdamW;
use super::flex;
use super::flex::simd::{sum_of, vectorised};

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

/// See [`super::adamw`]. The tensors' memory is used again where nobody else holds it.
pub fn adamw(param: Tensor<1>, m: Tensor<1>, v: Tensor<1>, grad: Tensor<1>, step: &AdamW) -> [Tensor<1>; 3] {
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
