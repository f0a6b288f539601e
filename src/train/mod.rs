//! Training: the recipe ([`sft`]), one step of it ([`step`]), and what they are made of.

pub mod bench;
pub mod check;
mod control;
pub mod eval;
mod fit;
mod ground;
pub mod metrics;
pub mod optim;
pub mod page;
mod passes;
pub mod ranks;
mod resume;
mod run;
mod sample;
pub mod schedule;
mod setup;
pub mod sft;
mod skipped;
pub mod step;

pub use crate::report::{StepMetrics, Summary};
pub use fit::Fit;
pub use sft::{SftLearner, StopFlag};
