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

impl DecoderLayer {
    /// 1/√d, the factor of attention's scores.
    pub(super) fn scale(&self) -> f32 {
        (self.head_dim as f64).powf(-0.5) as f32
    }

    /// The linear layers.
    pub fn projections_mut(&mut self) -> [&mut Projection; 7] {
        let Self { q, k, v, o, gate, up, down, .. } = self;
        [q, k, v, o, gate, up, down]
    }
}

impl Projection {
    /// From here on for so many tokens, all of the run that has tokens now.
    pub fn set_tokens(&mut self, tokens: usize) {
        let parts = self.adapters.iter_mut().flat_map(|adapters| &mut adapters.parts);
        parts.filter(|part| part.tokens > 0).for_each(|part| part.tokens = tokens);
    }
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
    let [q, k, v] = heads(x.clone(), layer, rope, project);
    let attended = super::attention(q, k, v, documents, layer.scale());
    rest(x, attended, layer, project)
}

/// [`project`], or what stands in for it.
type Project = fn(Tensor<2>, &Projection) -> Tensor<2>;

/// The part before attention: q, k and v of the normed input, q and k turned.
///
/// # Shapes
/// - x: `[t, e]` → `[t, h, d]`, `[t, g, d]`, `[t, g, d]`
pub(super) fn heads(x: Tensor<2>, layer: &DecoderLayer, rope: &Rope, project: Project) -> [Tensor<3>; 3] {
    let x = super::rms_norm(x, layer.input_norm.clone(), layer.eps);
    let ([t, _], d) = (x.dims(), layer.head_dim);
    let heads = |y: Tensor<2>| {
        let width = y.dims()[1];
        y.reshape([t, width / d, d])
    };
    let rotated =
        |y: Tensor<2>, norm: &Option<Tensor<1>>| super::qk_norm_rope(heads(y), norm.clone(), layer.eps, rope);
    let q = rotated(project(x.clone(), &layer.q), &layer.q_norm);
    let k = rotated(project(x.clone(), &layer.k), &layer.k_norm);
    [q, k, heads(project(x, &layer.v))]
}

/// The part after attention, whose output it takes beside the layer's input.
///
/// # Shapes
/// - x: `[t, e]`, attended: `[t, h, d]` → `[t, e]`
pub(super) fn rest(x: Tensor<2>, attended: Tensor<3>, layer: &DecoderLayer, project: Project) -> Tensor<2> {
    let [t, h, d] = attended.dims();
    let x = x + project(attended.reshape([t, h * d]), &layer.o);
    let normed = super::rms_norm(x.clone(), layer.post_norm.clone(), layer.eps);
    let (gate, up) = (project(normed.clone(), &layer.gate), project(normed, &layer.up));
    x + project(super::swiglu(gate, up), &layer.down)
}
