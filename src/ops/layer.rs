//! A decoder layer as one op: attention and MLP, each on a normed copy, each added back.
//!
//! The definition is [`composed`], made of the other ops; it runs wherever they run and is the oracle.
//! On CUDA cards a bf16 layer is one op with one tape node (`cuda/layer.rs`): it enters the card once a pass.

use burn::tensor::Tensor;

use super::{Documents, LoraPart, Rope};

/// Low-rank adapters of a linear layer, stacked over the runs that have tokens in the batch.
#[derive(Debug, Clone)]
pub struct Adapters {
    /// `[Σ rank, in]`
    pub a: Tensor<2>,
    /// `[out, Σ rank]`
    pub b: Tensor<2>,
    /// Each run's share, in run order.
    pub parts: Vec<LoraPart>,
}

/// A linear layer with its adapters.
#[derive(Debug, Clone)]
pub struct Projection {
    /// `[out, in]`, in the type of its input.
    pub weight: Tensor<2>,
    /// `[out]`
    pub bias: Option<Tensor<1>>,
    /// `None` where no run adapts it.
    pub adapters: Option<Adapters>,
}

/// The parameters of a decoder layer.
#[derive(Debug, Clone)]
pub struct DecoderLayer {
    /// `[e]`, the norm before attention.
    pub input_norm: Tensor<1>,
    /// `[h·d, e]`
    pub q: Projection,
    /// `[g·d, e]`
    pub k: Projection,
    /// `[g·d, e]`
    pub v: Projection,
    /// `[e, h·d]`
    pub o: Projection,
    /// `[d]`, the norm of each query head.
    pub q_norm: Option<Tensor<1>>,
    /// `[d]`, the norm of each key head.
    pub k_norm: Option<Tensor<1>>,
    /// `[e]`, the norm before the MLP.
    pub post_norm: Tensor<1>,
    /// `[f, e]`
    pub gate: Projection,
    /// `[f, e]`
    pub up: Projection,
    /// `[e, f]`
    pub down: Projection,
    /// d
    pub head_dim: usize,
    /// ε of all norms.
    pub eps: f64,
    /// Make all but attention's output again in the backward pass; only where [`recomputes`].
    pub recompute: bool,
    /// What the layer op has made of the frozen weights before.
    pub kept: Kept,
}

/// What an op makes of frozen weights once and keeps beside them; copies share it.
#[derive(Debug, Clone, Default)]
pub struct Kept {
    #[cfg(feature = "cuda")]
    pub(super) cuda: std::sync::Arc<super::cuda::layer::Slot>,
}

/// `x · Wᵀ` with adapters and bias, where there are any.
///
/// # Shapes
/// - x: `[t, in]` → `[t, out]`
pub fn project(x: Tensor<2>, projection: &Projection) -> Tensor<2> {
    let weight = projection.weight.clone();
    let y = match projection.adapters.clone() {
        None => super::linear(x, weight),
        Some(Adapters { a, b, parts }) => super::lora_linear(x, weight, a, b, &parts),
    };
    match projection.bias.clone() {
        None => y,
        Some(bias) => y + bias.unsqueeze(),
    }
}

/// A decoder layer.
///
/// # Shapes
/// - x: `[t, e]` → `[t, e]`
pub fn decoder_layer(x: Tensor<2>, layer: &DecoderLayer, rope: &Rope, documents: &Documents) -> Tensor<2> {
    #[cfg(feature = "cuda")]
    if super::cuda::layer::takes(&x, layer, rope) {
        return super::cuda::layer::decoder_layer(x, layer, rope, documents);
    }
    composed(x, layer, rope, documents)
}

/// Whether [`decoder_layer`] heeds `recompute` for these tensors.
pub fn recomputes(x: &Tensor<2>, layer: &DecoderLayer, rope: &Rope) -> bool {
    #[cfg(feature = "cuda")]
    return super::cuda::layer::takes(x, layer, rope);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (x, layer, rope);
        false
    }
}

/// The definition of [`decoder_layer`], by the other ops.
///
/// # Shapes
/// - x: `[t, e]` → `[t, e]`
pub fn composed(x: Tensor<2>, layer: &DecoderLayer, rope: &Rope, documents: &Documents) -> Tensor<2> {
    let normed = super::rms_norm(x.clone(), layer.input_norm.clone(), layer.eps);
    let x = x + attention(normed, layer, rope, documents);
    let normed = super::rms_norm(x.clone(), layer.post_norm.clone(), layer.eps);
    let (gate, up) = (project(normed.clone(), &layer.gate), project(normed, &layer.up));
    x + project(super::swiglu(gate, up), &layer.down)
}

fn attention(x: Tensor<2>, layer: &DecoderLayer, rope: &Rope, documents: &Documents) -> Tensor<2> {
    let ([t, _], d) = (x.dims(), layer.head_dim);
    let heads = |y: Tensor<2>| {
        let width = y.dims()[1];
        y.reshape([t, width / d, d])
    };
    let rotated =
        |y: Tensor<2>, norm: &Option<Tensor<1>>| super::qk_norm_rope(heads(y), norm.clone(), layer.eps, rope);
    let q = rotated(project(x.clone(), &layer.q), &layer.q_norm);
    let k = rotated(project(x.clone(), &layer.k), &layer.k_norm);
    let v = heads(project(x, &layer.v));
    let scale = (d as f64).powf(-0.5) as f32;
    let y = super::attention(q, k, v, documents, scale);
    let [_, h, _] = y.dims();
    project(y.reshape([t, h * d]), &layer.o)
}
