//! The linear layer with its adapters: `y = x·Wᵀ + s·(dropout(x)·Aᵀ)·Bᵀ + bias`.
//!
//! A layer holds one A, B, scale and dropout per adapter *run*; a batch says how many of its
//! tokens belong to each run, contiguous and in run order. No run at all is a plain linear layer,
//! one run is the usual case, and both are the same code (LoRA: arXiv 2106.09685; scale α/√r:
//! arXiv 2312.03732; initial values: PEFT `tuners/lora/layer.py`, `reset_lora_parameters`).

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::Inputs;
use crate::config::{InitLoraWeights, LoraConfig, TargetModules};
use crate::ops::{self, Adapters, Dropout, LoraPart, Projection, Stream};

/// What one adapter run trains, in PEFT's terms.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSpec {
    /// r
    pub rank: usize,
    /// α
    pub alpha: f64,
    /// Dropout on the adapters' inputs while training.
    pub dropout: f64,
    /// The linear layers that get an adapter.
    pub target_modules: TargetModules,
    /// Modules that get none, whatever `target_modules` says.
    pub exclude_modules: Option<TargetModules>,
    /// Modules that are trained whole.
    pub modules_to_save: Vec<String>,
    /// Scale α/√r instead of α/r.
    pub use_rslora: bool,
    /// Other ranks for some modules: (regular expression on the name's end, r), first match wins.
    pub rank_pattern: Vec<(String, usize)>,
    /// Other α for some modules.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Only these layers.
    pub layers_to_transform: Option<Vec<usize>>,
    /// The name before the layer number, for `layers_to_transform`; empty = any.
    pub layers_pattern: Vec<String>,
    /// The values that A starts with (B starts at 0).
    pub init: InitLoraWeights,
}

impl LoraSpec {
    /// The spec of a `[model.lora]` table.
    pub fn from_config(config: &LoraConfig) -> Self {
        LoraSpec {
            rank: config.rank,
            alpha: config.alpha,
            dropout: config.dropout,
            target_modules: config.target_modules.clone(),
            exclude_modules: config.exclude_modules.clone(),
            modules_to_save: config.modules_to_save.clone(),
            use_rslora: config.use_rslora,
            rank_pattern: config.rank_pattern.clone(),
            alpha_pattern: config.alpha_pattern.clone(),
            layers_to_transform: config.layers_to_transform.clone(),
            layers_pattern: Vec::new(),
            init: config.init_lora_weights,
        }
    }

    /// α/r, or α/√r with rslora.
    pub fn scale(&self, rank: usize, alpha: f64) -> f32 {
        let r = rank as f64;
        (alpha / if self.use_rslora { r.sqrt() } else { r }) as f32
    }
}

/// One adapted layer of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct AdaptedModule {
    /// `model.layers.0.self_attn.q_proj`
    pub name: String,
    /// r of this layer.
    pub rank: usize,
    /// α of this layer.
    pub alpha: f64,
    /// s
    pub scale: f32,
}

/// An adapter run that is attached to a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// What was asked for.
    pub spec: LoraSpec,
    /// The layers that it adapts, in module order.
    pub modules: Vec<AdaptedModule>,
    /// The modules that it trains whole, in module order.
    pub saved: Vec<String>,
}

/// What attaching adapters did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LoraReport {
    /// Adapted layers, over all runs.
    pub modules: usize,
    /// Trainable parameters, over all runs.
    pub parameters: usize,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// A and B of one run in one layer, f32.
#[derive(Module, Debug)]
pub struct Adapter {
    /// `[r, in]`
    pub lora_a: Param<Tensor<2>>,
    /// `[out, r]`
    pub lora_b: Param<Tensor<2>>,
    #[module(skip)]
    scale: f32,
    #[module(skip)]
    dropout: f32,
    /// Of the dropout generator: the run's seed and the module's name. Not the run's number: a run among others has the
    /// masks that it has alone.
    #[module(skip)]
    key: u64,
}

impl Adapter {
    /// Initial values that depend on the seed and the module's name alone.
    pub(super) fn new(
        spec: &LoraSpec,
        module: &AdaptedModule,
        [out, input]: [usize; 2],
        seed: u64,
        device: &Device,
    ) -> Self {
        let r = module.rank;
        let key = mix(seed, xxh3_64_with_seed(module.name.as_bytes(), 0));
        let mut generator = ChaCha8Rng::seed_from_u64(key);
        let a: Vec<f32> = match spec.init {
            InitLoraWeights::Default => {
                let bound = 1.0 / (input as f64).sqrt();
                (0..r * input).map(|_| (bound * (2.0 * uniform(&mut generator) - 1.0)) as f32).collect()
            }
            InitLoraWeights::Gaussian => {
                (0..r * input).map(|_| (normal(&mut generator) / r as f64) as f32).collect()
            }
        };
        Adapter {
            lora_a: leaf(a, [r, input], device),
            lora_b: leaf(vec![0.0; out * r], [out, r], device),
            scale: module.scale,
            dropout: spec.dropout as f32,
            key,
        }
    }

    /// The run's share in the stacked product.
    fn part(&self, tokens: usize, stream: Stream, seed: Option<u64>) -> LoraPart {
        let dropout = seed.filter(|_| self.dropout > 0.0);
        LoraPart {
            tokens,
            rank: self.lora_a.dims()[0],
            scale: self.scale,
            dropout: dropout.map(|seed| Dropout {
                p: self.dropout,
                key: self.key.wrapping_add(seed),
                stream,
            }),
        }
    }
}

/// A number from two, as good as random.
fn mix(seed: u64, key: u64) -> u64 {
    xxh3_64_with_seed(&key.to_le_bytes(), seed)
}

/// In [0, 1).
pub(super) fn uniform(generator: &mut impl Rng) -> f64 {
    (generator.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// Standard normal (Box and Muller).
pub(super) fn normal(generator: &mut impl Rng) -> f64 {
    let (u, v) = (1.0 - uniform(generator), uniform(generator));
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

/// A trainable f32 parameter on the autodiff device.
fn leaf(values: Vec<f32>, shape: [usize; 2], device: &Device) -> Param<Tensor<2>> {
    let device = device.clone().autodiff();
    let tensor = Tensor::from_data(TensorData::new(values, shape), (&device, DType::F32));
    Param::initialized(ParamId::new(), tensor.require_grad())
}

/// The value of a parameter in the dtype that the forward pass computes in.
pub(super) fn value<const D: usize>(param: &Param<Tensor<D>>, dtype: DType) -> Tensor<D> {
    let tensor = param.val();
    if tensor.dtype() == dtype { tensor } else { tensor.cast(dtype) }
}

/// A linear layer, weight as Hugging Face stores it, with the adapters of all runs.
#[derive(Module, Debug)]
pub struct Linear {
    /// `[out, in]`
    pub weight: Param<Tensor<2>>,
    /// `[out]`
    pub bias: Option<Param<Tensor<1>>>,
    /// One per run, `None` where the run doesn't adapt this layer; empty without adapters.
    pub adapters: Vec<Option<Adapter>>,
}

impl Linear {
    pub(super) fn empty(out: usize, input: usize, bias: bool, device: &Device) -> Self {
        Linear {
            weight: unset([out, input], device),
            bias: bias.then(|| unset([out], device)),
            adapters: Vec::new(),
        }
    }

    /// # Shapes
    /// - x: `[t, in]` → `[t, out]`
    pub fn forward(&self, x: Tensor<2>, inputs: &Inputs) -> Tensor<2> {
        let dtype = x.dtype();
        ops::project(x, &self.projection(inputs, dtype))
    }

    /// The layer as the ops take it, computing in `dtype`.
    pub(super) fn projection(&self, inputs: &Inputs, dtype: DType) -> Projection {
        Projection {
            weight: value(&self.weight, dtype),
            bias: self.bias.as_ref().map(|bias| value(bias, dtype)),
            adapters: self.adapters(inputs),
        }
    }

    /// `None` where no run that has tokens adapts this layer.
    pub(super) fn adapters(&self, inputs: &Inputs) -> Option<Adapters> {
        let mut parts = Vec::new();
        let runs = inputs.run_tokens.iter().zip(&inputs.streams);
        for (adapter, (&tokens, &stream)) in
            self.adapters.iter().zip(runs).filter(|(_, (tokens, _))| **tokens > 0)
        {
            parts.push(match adapter {
                None => LoraPart { tokens, rank: 0, scale: 0.0, dropout: None },
                Some(adapter) => adapter.part(tokens, stream, inputs.dropout_seed),
            });
        }
        let [a, b] = match inputs.stacked.of(self) {
            Some(stacked) => stacked,
            None => {
                let (a, b): (Vec<_>, Vec<_>) = self
                    .present(inputs.present())
                    .map(|adapter| (adapter.lora_a.val(), adapter.lora_b.val()))
                    .unzip();
                let one = |mut tensors: Vec<Tensor<2>>, dim| match tensors.len() {
                    0 => None,
                    1 => Some(tensors.remove(0)),
                    _ => Some(Tensor::cat(tensors, dim)),
                };
                [one(a, 0)?, one(b, 1)?]
            }
        };
        Some(Adapters { a, b, parts })
    }

    /// The adapters of the runs that are `present` ([`Inputs::present`]), in their order.
    pub(super) fn present(&self, present: impl Iterator<Item = bool>) -> impl Iterator<Item = &Adapter> {
        self.adapters
            .iter()
            .zip(present)
            .filter_map(|(adapter, present)| adapter.as_ref().filter(|_| present))
    }
}

/// The embedding's rows.
#[derive(Module, Debug)]
pub struct Embedding {
    /// `[v, e]`
    pub weight: Param<Tensor<2>>,
}

/// A parameter whose shape is known and whose value is not read yet.
pub(super) fn unset<const D: usize>(shape: [usize; D], device: &Device) -> Param<Tensor<D>> {
    let zeros = move |device: &Device, _| Tensor::zeros(shape, device);
    Param::uninitialized(ParamId::new(), zeros, device.clone(), false, shape.into())
}
