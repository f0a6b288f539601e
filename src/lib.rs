//! Supervised fine-tuning of Qwen3-class language models, with LoRA or in full, on Burn.
//!
//! ```no_run
//! use embertune::report::Plain;
//! use embertune::{SftConfig, SftLearner};
//!
//! fn main() -> embertune::Result<()> {
//!     // What `embertune sft @ configs/reverse_text_lora.toml --max-steps 50` does.
//!     let args = ["@", "configs/reverse_text_lora.toml", "--max-steps", "50"].map(String::from);
//!     let config: SftConfig = embertune::config::load(&args)?.config;
//!     let summary = SftLearner::new(config)?.fit(&mut Plain::stderr())?;
//!     println!("loss {:?}, adapter in {:?}", summary.last_loss, summary.adapter);
//!     Ok(())
//! }
//! ```
//!
//! # Where to look
//! * [`config`]: the file format; every key, default and meaning.
//! * [`data`] (and [`hub`]): files → conversations → tokens and masks → packed rows.
//! * [`ops`]: the operations a decoder is made of, each with its plain version. Only here is
//!   a Burn backend named.
//! * [`model`]: the decoder, LoRA, loading.
//! * [`train`]: the recipe ([`train::sft`]), one step of it ([`train::step`]), optimizers, schedules.
//! * [`checkpoint`], [`export`], [`report`]: what is written and said.
//! * [`device`]: from the `device` key to a device.
//!
//! Imports run one way: cli → train → checkpoint → {export, report} → model → data → {hub, device} →
//! {ops, config} → {folders, error}.
#![recursion_limit = "256"]
#![warn(missing_docs)]

mod assets;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod data;
pub mod device;
pub mod error;
pub mod export;
mod folders;
pub mod hub;
pub mod model;
pub mod ops;
pub mod report;
mod terminal;
pub mod train;

pub use config::SftConfig;
pub use error::{Error, Result};
pub use train::{SftLearner, StopFlag, Summary};
