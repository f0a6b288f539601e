//! Ten optimizer steps against the reference trainer on the CPU: losses, gradient norms, clip
//! coefficients and final parameters, full and LoRA.
#![cfg(feature = "flex")]

mod common;

use burn::tensor::Device;
use common::train_goldens::run;

#[test]
fn full_fine_tuning_with_a_tied_head() {
    run("full", None, &Device::flex(), 1.0);
}

#[test]
fn full_fine_tuning_without_decay_on_norms_and_biases() {
    run("full-no-norm-decay", None, &Device::flex(), 1.0);
}

#[test]
fn lora_from_default_init() {
    run("lora", None, &Device::flex(), 1.0);
}

#[test]
fn lora_with_a_micro_batch_without_targets() {
    run("lora-zero-micro", None, &Device::flex(), 1.0);
}

/// The same with recomputed layers.
#[test]
fn recomputation_changes_nothing() {
    run("full", Some(1), &Device::flex(), 1.0);
    run("lora", Some(2), &Device::flex(), 1.0);
}
