//! How large a model and its training are, from `config.json` alone: no weights are read.

use burn::tensor::{DType, Device};

use super::{Decoder, HfConfig, LoraSpec, ParameterCounts, resolve};
use crate::error::{Error, Result};

/// The linear layers of a decoder layer.
const LINEARS: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// What will be trained of a model.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sizes {
    /// Parameters, as [`Decoder::parameter_counts`] will count them.
    pub counts: ParameterCounts,
    /// Adapted layers; 0 in full fine-tuning.
    pub modules: usize,
    /// For q, k, v, o, gate, up and down of each decoder layer: the adapter's rank, 0 where the weight itself is trained,
    /// `None` where nothing is.
    pub layers: Vec<[Option<usize>; 7]>,
    /// The rank of the head's adapter; 0 without.
    pub head_rank: usize,
    /// Parameters of the base that are trained themselves.
    pub saved: usize,
    /// Whether the embedding is one of them,
    pub trains_embedding: bool,
    /// and the output head, which may be the same.
    pub trains_head: bool,
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
        return Ok(Sizes {
            counts: ParameterCounts { total, trainable: total },
            layers: vec![[Some(0); 7]; config.num_hidden_layers],
            saved: total,
            trains_embedding: true,
            trains_head: true,
            ..Default::default()
        });
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
    let rank =
        |name: &str| resolved.modules.iter().find(|module| module.name == name).map(|module| module.rank);
    let of_layer = |n: usize| {
        LINEARS.map(|linear| {
            let name = format!("model.layers.{n}.{linear}");
            rank(&name).or_else(|| saves(&name).then_some(0))
        })
    };
    let total = base.parameter_counts().total + adapters;
    Ok(Sizes {
        counts: ParameterCounts { total, trainable: adapters + saved },
        modules: resolved.modules.len(),
        layers: (0..config.num_hidden_layers).map(of_layer).collect(),
        head_rank: rank("lm_head").unwrap_or(0),
        saved,
        trains_embedding: saves("model.embed_tokens"),
        trains_head: saves("lm_head"),
        warnings: resolved.warnings,
    })
}
