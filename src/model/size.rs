//! How large a model and its training are, from `config.json` alone: no weights are read.

use burn::tensor::{DType, Device};

use super::{Decoder, HfConfig, LoraSpec, ParameterCounts, resolve};
use crate::error::{Error, Result};

/// Rows of logits that the head holds at once (`ops::linear_cross_entropy`).
const LOGITS_ROWS: usize = 256;
/// The same on a CUDA card.
const LOGITS_ROWS_CUDA: usize = 4096;

/// What will be trained of a model.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sizes {
    /// Parameters, as [`Decoder::parameter_counts`] will count them.
    pub counts: ParameterCounts,
    /// Adapted layers; 0 in full fine-tuning.
    pub modules: usize,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// The sizes of a model with an adapter, or trained in full without.
///
/// # Errors
/// As [`Decoder::attach_lora`].
pub fn sizes(config: &HfConfig, lora: Option<&LoraSpec>, device: &Device) -> Result<Sizes> {
    let decoder = Decoder::empty(config, DType::F32, device);
    let total = decoder.parameter_counts().total;
    let Some(spec) = lora else {
        let counts = ParameterCounts { total, trainable: total };
        return Ok(Sizes { counts, ..Default::default() });
    };
    let resolved = resolve(spec, &decoder.modules()).map_err(Error::Config)?;
    let saves = |name: &str| resolved.saved.iter().any(|module| module == name);
    let adapts_head = resolved.modules.iter().any(|module| module.name == "lm_head");
    let unties = adapts_head || saves("lm_head") || saves("model.embed_tokens");
    let config = HfConfig { tie_word_embeddings: config.tie_word_embeddings && !unties, ..config.clone() };
    let base = Decoder::empty(&config, DType::F32, device);
    let (mut adapters, mut saved) = (0, 0);
    for (name, shape) in base.base_parameters() {
        let module = name.rsplit_once('.').map_or(name.as_str(), |(module, _)| module);
        if saves(module) {
            saved += shape.iter().product::<usize>();
        }
        if let (Some(adapted), true) =
            (resolved.modules.iter().find(|adapted| adapted.name == module), name.ends_with(".weight"))
        {
            adapters += adapted.rank * shape.iter().sum::<usize>();
        }
    }
    let total = base.parameter_counts().total + adapters;
    let counts = ParameterCounts { total, trainable: adapters + saved };
    Ok(Sizes { counts, modules: resolved.modules.len(), warnings: resolved.warnings })
}

/// Bytes that training takes on a device, by what takes them. An estimate, made like this:
///
/// * `weights`: frozen parameters × bytes of the type they are held in
/// * `trained`: trained parameters × (bytes they are held in + 4 for the gradient + the optimizer's)
/// * `activations`: t tokens of a micro-batch × bytes of the type × (4e + 2hd + 2gd + 3f for each layer
///   whose activations are kept, e for each that is recomputed)
/// * `logits`: 256 rows × v × 4
///
/// Where a layer is one op (bf16 on a CUDA card): activations × (2e + 2hd + 2gd + 2f), of recomputed layers × (e + hd), and
/// t × (4e + 4f) for the layer at work; the frozen weights of layers with adapters count twice; logits: 4096 rows in the type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// Frozen weights.
    pub weights: u64,
    /// Trained parameters, their gradients and the optimizer's state.
    pub trained: u64,
    /// What the backward pass needs.
    pub activations: u64,
    /// The head's chunk.
    pub logits: u64,
}

/// What an estimate of [`Memory`] depends on beside the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Tokens of a micro-batch.
    pub tokens: usize,
    /// Bytes of the type that frozen weights and activations have.
    pub compute_bytes: usize,
    /// Bytes that a trained parameter is held in.
    pub trained_bytes: usize,
    /// Bytes of the optimizer's state, for each trained parameter.
    pub optimizer_bytes: usize,
    /// Every how many layers one is recomputed.
    pub recompute: Option<usize>,
    /// Whether a layer is one op, and whether it has adapters beside frozen weights.
    pub fused: Option<bool>,
}

impl Memory {
    /// The estimate.
    pub fn estimate(config: &HfConfig, counts: ParameterCounts, load: Load) -> Self {
        let c = config;
        let (layers, e) = (c.num_hidden_layers, c.hidden_size);
        let heads = 2 * c.head_dim * (c.num_attention_heads + c.num_key_value_heads);
        let f = c.intermediate_size;
        let (layer, at_work) = match load.fused {
            Some(_) => (2 * e + heads + 2 * f, 4 * e + 4 * f),
            None => (4 * e + heads + 3 * f, 0),
        };
        let recomputed = load.recompute.map_or(0, |freq| layers / freq.max(1));
        // One layer at a time comes back while it is recomputed.
        let kept = layers - recomputed + usize::from(recomputed > 0);
        // Attention's output is kept where a layer is one op.
        let light = e + if load.fused.is_some() { c.num_attention_heads * c.head_dim } else { 0 };
        let elements = load.tokens * (kept * layer + recomputed * light + at_work);
        let frozen = counts.total - counts.trainable;
        let stacked = if load.fused == Some(true) { layers * e * (heads + 3 * f) } else { 0 };
        let of_trained = load.trained_bytes + 4 + load.optimizer_bytes;
        let logits = match load.fused {
            Some(_) => load.tokens.min(LOGITS_ROWS_CUDA) * c.vocab_size * load.compute_bytes,
            None => load.tokens.min(LOGITS_ROWS) * c.vocab_size * 4,
        };
        Memory {
            weights: ((frozen + stacked) * load.compute_bytes) as u64,
            trained: (counts.trainable * of_trained) as u64,
            activations: (elements * load.compute_bytes) as u64,
            logits: logits as u64,
        }
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.trained + self.activations + self.logits
    }
}
