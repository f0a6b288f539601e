//! The whole forward pass of a Qwen3, Qwen2 or Llama decoder, in the order in which it is built:
//! attention → MLP → layer → model → decoder with head and loss.
//!
//! Token-flat: a micro-batch is `[t, e]`, whatever its rows; attention stays inside documents
//! (`transformers/models/qwen3/modeling_qwen3.py` is the reference for every formula).

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor};

use super::inputs::RopeTables;
use super::lora::{Embedding, Linear, Run, unset, value};
use super::stack::Stack;
use super::{HfConfig, Inputs};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::ops::{self, Adapters, DecoderLayer, Kept};

/// Root-mean-square norm.
#[derive(Module, Debug)]
pub struct Norm {
    /// `[e]`, or `[d]` for the norms of heads.
    pub weight: Param<Tensor<1>>,
    #[module(skip)]
    eps: f64,
}

impl Norm {
    fn empty(size: usize, config: &HfConfig, device: &Device) -> Self {
        Norm { weight: unset([size], device), eps: config.rms_norm_eps }
    }

    pub(super) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let weight = value(&self.weight, x.dtype());
        ops::rms_norm(x, weight, self.eps)
    }
}

/// Causal self-attention with grouped key/value heads.
#[derive(Module, Debug)]
pub struct Attention {
    /// `[h·d, e]`
    pub q_proj: Linear,
    /// `[g·d, e]`
    pub k_proj: Linear,
    /// `[g·d, e]`
    pub v_proj: Linear,
    /// `[e, h·d]`
    pub o_proj: Linear,
    /// Norm of each query head (Qwen3).
    pub q_norm: Option<Norm>,
    /// Norm of each key head (Qwen3).
    pub k_norm: Option<Norm>,
    #[module(skip)]
    head_dim: usize,
    #[module(skip)]
    eps: f64,
}

impl Attention {
    fn empty(config: &HfConfig, device: &Device) -> Self {
        let (e, (q, kv)) = (config.hidden_size, config.attention_widths());
        let norm = || config.qk_norm.then(|| Norm::empty(config.head_dim, config, device));
        Attention {
            q_proj: Linear::empty(q, e, config.qkv_bias, device),
            k_proj: Linear::empty(kv, e, config.qkv_bias, device),
            v_proj: Linear::empty(kv, e, config.qkv_bias, device),
            o_proj: Linear::empty(e, q, config.o_bias, device),
            q_norm: norm(),
            k_norm: norm(),
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
        }
    }
}

/// `down(silu(gate(x)) · up(x))`
#[derive(Module, Debug)]
pub struct Mlp {
    /// `[f, e]`
    pub gate_proj: Linear,
    /// `[f, e]`
    pub up_proj: Linear,
    /// `[e, f]`
    pub down_proj: Linear,
}

impl Mlp {
    fn empty(config: &HfConfig, device: &Device) -> Self {
        let (e, f, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
        Mlp {
            gate_proj: Linear::empty(f, e, bias, device),
            up_proj: Linear::empty(f, e, bias, device),
            down_proj: Linear::empty(e, f, bias, device),
        }
    }
}

/// One decoder layer: attention and MLP, each on a normed copy, each added back.
#[derive(Module, Debug)]
pub struct Layer {
    /// Attention.
    pub self_attn: Attention,
    /// MLP.
    pub mlp: Mlp,
    /// Norm before attention.
    pub input_layernorm: Norm,
    /// Norm before the MLP.
    pub post_attention_layernorm: Norm,
    #[module(skip)]
    kept: Kept,
}

impl Layer {
    fn empty(config: &HfConfig, device: &Device) -> Self {
        Layer {
            self_attn: Attention::empty(config, device),
            mlp: Mlp::empty(config, device),
            input_layernorm: Norm::empty(config.hidden_size, config, device),
            post_attention_layernorm: Norm::empty(config.hidden_size, config, device),
            kept: Kept::default(),
        }
    }

    /// The layer as the ops take it, computing in `dtype`.
    pub(super) fn parameters(&self, inputs: &Inputs, dtype: DType, recompute: bool) -> DecoderLayer {
        let (attn, mlp) = (&self.self_attn, &self.mlp);
        let of_heads = |norm: &Option<Norm>| norm.as_ref().map(|norm| value(&norm.weight, dtype));
        DecoderLayer {
            input_norm: value(&self.input_layernorm.weight, dtype),
            q: attn.q_proj.projection(inputs, dtype),
            k: attn.k_proj.projection(inputs, dtype),
            v: attn.v_proj.projection(inputs, dtype),
            o: attn.o_proj.projection(inputs, dtype),
            q_norm: of_heads(&attn.q_norm),
            k_norm: of_heads(&attn.k_norm),
            post_norm: value(&self.post_attention_layernorm.weight, dtype),
            gate: mlp.gate_proj.projection(inputs, dtype),
            up: mlp.up_proj.projection(inputs, dtype),
            down: mlp.down_proj.projection(inputs, dtype),
            head_dim: attn.head_dim,
            eps: attn.eps,
            recompute,
            kept: self.kept.clone(),
        }
    }
}

/// The decoder without its head.
#[derive(Module, Debug)]
pub struct Model {
    /// `[v, e]`
    pub embed_tokens: Embedding,
    /// The layers, first to last.
    pub layers: Vec<Layer>,
    /// Norm after the last layer.
    pub norm: Norm,
}

/// A causal language model, its adapters, and what is trainable in it.
#[derive(Module, Debug)]
pub struct Decoder {
    /// Embedding, layers and last norm.
    pub model: Model,
    /// The output head; `None` where it is the embedding.
    pub lm_head: Option<Linear>,
    #[module(skip)]
    pub(super) config: HfConfig,
    #[module(skip)]
    pub(super) runs: Vec<Run>,
    /// What the forward pass computes in.
    #[module(skip)]
    pub(super) dtype: DType,
    #[module(skip)]
    rope: RopeTables,
    /// The adapters as the last pass had them stacked: emptied by whatever changes or attaches some.
    #[module(skip)]
    pub(super) stack: Stack,
}

impl Decoder {
    /// A decoder whose parameters have names and shapes but no values yet.
    pub(crate) fn empty(config: &HfConfig, dtype: DType, device: &Device) -> Self {
        let (v, e) = (config.vocab_size, config.hidden_size);
        let layers = (0..config.num_hidden_layers).map(|_| Layer::empty(config, device)).collect();
        Decoder {
            model: Model {
                embed_tokens: Embedding { weight: unset([v, e], device) },
                layers,
                norm: Norm::empty(e, config, device),
            },
            lm_head: (!config.tie_word_embeddings).then(|| Linear::empty(v, e, false, device)),
            config: config.clone(),
            runs: Vec::new(),
            dtype,
            rope: RopeTables::default(),
            stack: Stack::default(),
        }
    }

    /// The model's sizes and flags.
    pub fn config(&self) -> &HfConfig {
        &self.config
    }

    /// The attached adapter runs.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The dtype that the forward pass computes in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The (plain) device that the model lives on.
    pub fn device(&self) -> Device {
        self.model.embed_tokens.weight.lazy_device().without_autodiff()
    }

    /// Number of decoder layers.
    pub fn num_layers(&self) -> usize {
        self.model.layers.len()
    }

    /// Checks the batch, its run partition included, and puts it on the model's device.
    ///
    /// # Errors
    /// As [`Inputs::new`], and where the batch is divided among another number of runs than are
    /// attached.
    pub fn inputs(&self, batch: &Batch, dropout_seed: Option<u64>) -> Result<Inputs> {
        let (config, device) = (&self.config, self.device());
        let inputs = Inputs::with_tables(batch, config, &self.rope, &device, dropout_seed)?;
        self.check_runs(&inputs)?;
        Ok(inputs)
    }

    fn check_runs(&self, inputs: &Inputs) -> Result<()> {
        let (got, want) = (inputs.runs(), self.runs.len().max(1));
        if got == want {
            return Ok(());
        }
        let message = format!("the batch is divided among {got} adapter runs, the model has {want}");
        Err(Error::train(message, "give each run its number of tokens, 0 included"))
    }

    /// Σ over the batch's trained targets of the cross entropy.
    ///
    /// # Panics
    /// Where `inputs` is divided among another number of runs than are attached
    /// ([`Decoder::inputs`] makes that an error).
    pub fn loss_sum(&self, inputs: &Inputs) -> Tensor<1> {
        self.head_loss(self.hidden(inputs), inputs)
    }

    /// # Shapes
    /// - → `[t, v]`
    ///
    /// # Panics
    /// As [`Decoder::loss_sum`].
    pub fn logits(&self, inputs: &Inputs) -> Tensor<2> {
        let hidden = self.model.norm.forward(self.hidden(inputs));
        match &self.lm_head {
            Some(head) => head.forward(hidden, inputs),
            None => ops::linear(hidden, value(&self.model.embed_tokens.weight, self.dtype)),
        }
    }

    /// The hidden states after the last layer, before its norm.
    ///
    /// # Shapes
    /// - → `[t, e]`
    ///
    /// # Panics
    /// As [`Decoder::loss_sum`].
    pub fn hidden(&self, inputs: &Inputs) -> Tensor<2> {
        (0..self.num_layers()).fold(self.embed(inputs), |x, i| self.layer(i, x, inputs))
    }

    /// First part of the forward pass: the tokens' rows of the embedding.
    ///
    /// # Shapes
    /// - → `[t, e]`
    ///
    /// # Panics
    /// As [`Decoder::loss_sum`].
    pub fn embed(&self, inputs: &Inputs) -> Tensor<2> {
        if let Err(error) = self.check_runs(inputs) {
            panic!("{error}: make the inputs with `Decoder::inputs`");
        }
        let rows = ops::embedding(inputs.ids.clone(), self.model.embed_tokens.weight.val());
        if rows.dtype() == self.dtype { rows } else { rows.cast(self.dtype) }
    }

    /// Middle part: layer `i`.
    ///
    /// # Shapes
    /// - x: `[t, e]` → `[t, e]`
    pub fn layer(&self, i: usize, x: Tensor<2>, inputs: &Inputs) -> Tensor<2> {
        let recompute = inputs.recompute.is_some_and(|every| i.is_multiple_of(every));
        let layer = self.model.layers[i].parameters(inputs, x.dtype(), recompute);
        ops::decoder_layer(x, &layer, &inputs.rope, &inputs.documents)
    }

    /// Whether every layer makes its activations again by itself where [`Inputs::recomputing`] says so.
    pub fn recomputes(&self, x: &Tensor<2>, inputs: &Inputs) -> bool {
        let takes =
            |layer: &Layer| ops::recomputes(x, &layer.parameters(inputs, x.dtype(), true), &inputs.rope);
        self.model.layers.iter().all(takes)
    }

    /// Last part: norm, head and Σ of the cross entropy over trained targets (0 where there is
    /// none, still a function of `x` so that a backward pass finds its way).
    ///
    /// # Shapes
    /// - x: `[t, e]` → `[1]`
    pub fn head_loss(&self, x: Tensor<2>, inputs: &Inputs) -> Tensor<1> {
        if !inputs.has_targets() {
            return x.cast(DType::F32).sum().mul_scalar(0.0);
        }
        let losses = self.head_losses(x, inputs).into_iter().flatten();
        losses.reduce(|sum, loss| sum + loss).expect("a run has targets")
    }

    /// [`Decoder::head_loss`] of each adapter run; `None` where it has no trained target.
    ///
    /// # Shapes
    /// - x: `[t, e]` → `[1]` each
    pub fn head_losses(&self, x: Tensor<2>, inputs: &Inputs) -> Vec<Option<Tensor<1>>> {
        if !inputs.has_targets() {
            return vec![None; inputs.runs()];
        }
        let hidden = self.model.norm.forward(x);
        let (hidden, weight) = match &self.lm_head {
            None => (hidden, value(&self.model.embed_tokens.weight, self.dtype)),
            Some(head) => {
                let weight = value(&head.weight, self.dtype);
                match head.adapters(inputs) {
                    None => (hidden, weight),
                    Some(adapters) => widened(hidden, weight, adapters),
                }
            }
        };
        let loss = |(rows, targets)| ops::linear_cross_entropy(hidden.clone(), weight.clone(), rows, targets);
        inputs.trained.iter().cloned().map(|trained| trained.map(loss)).collect()
    }
}

/// LoRA on the head as one wider product: `[h | s·A·h] · [W | B]ᵀ = h·Wᵀ + s·(h·Aᵀ)·Bᵀ`.
fn widened(hidden: Tensor<2>, weight: Tensor<2>, adapters: Adapters) -> (Tensor<2>, Tensor<2>) {
    let Adapters { a, b, parts } = adapters;
    let (dtype, device) = (hidden.dtype(), hidden.device().without_autodiff());
    let [r, e] = a.dims();
    // The low-rank product alone: zeros for W and the identity for B leave each run's own columns.
    let zeros = Tensor::zeros([r, e], (&device, dtype));
    let low = ops::lora_linear(hidden.clone(), zeros, a, Tensor::eye(r, &device), &parts);
    let weight = Tensor::cat(vec![weight, b.cast(dtype)], 1);
    (Tensor::cat(vec![hidden, low], 1), weight)
}
