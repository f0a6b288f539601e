//! Supervised fine-tuning of Qwen3-class language models, with LoRA or in full, on Burn.
#![recursion_limit = "256"]

pub mod config;
pub mod data;
pub mod error;
pub mod export;
pub mod model;
pub mod ops;

pub use error::{Error, Result};
