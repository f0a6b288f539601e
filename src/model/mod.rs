//! The model: a Hugging Face folder → a [`Decoder`] on a device, with LoRA adapters or without.
//!
//! Shape letters: t tokens of a micro-batch, h query heads, g key/value heads, d size of a head,
//! e hidden size, f MLP size, v vocabulary, r rank of an adapter.
//!
//! A parameter's module path is its Hugging Face name (`model.layers.0.self_attn.q_proj.weight`);
//! an adapter's is `….q_proj.adapters.RUN.lora_a`.

mod config;
mod decoder;
mod generate;
mod inputs;
mod lora;
mod memory;
mod rounded;
mod size;
mod speaker;
mod stack;
mod targets;
mod trainable;
mod untrained;
mod weights;

pub use config::HfConfig;
pub(crate) use config::read_json_object;
pub use decoder::{Attention, Decoder, Layer, Mlp, Model, Norm};
pub use generate::Sampling;
pub use inputs::Inputs;
pub use lora::{AdaptedModule, Adapter, Embedding, Linear, LoraReport, LoraSpec, Run};
pub use memory::{Load, Memory, Place};
pub use size::{Sizes, sizes};
pub use speaker::{Answer, Heard, Pace, Speaker};
pub(crate) use targets::{Modules, Resolved, resolve};
pub use trainable::{ParameterCounts, Trainable};
pub use untrained::untrained_tokens;
pub(crate) use weights::{Checkpoint, Entry, decode};
pub use weights::{LoadReport, check_weights};

#[cfg(all(test, feature = "flex"))]
mod tests;
#[cfg(all(test, feature = "flex"))]
pub(crate) use tests::{two_runs, whole_in_bf16};
