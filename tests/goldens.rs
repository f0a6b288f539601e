//! The model and its adapters against transformers and PEFT, on the CPU: logits, losses, every
//! gradient, adapter files and merged weights.
#![cfg(feature = "flex")]

mod common;

use burn::tensor::Device;
use common::goldens::{Case, check_config};

/// f32 on CPU against f32 on CPU: the tolerances as they stand.
const FACTOR: f64 = 1.0;

#[test]
fn model_values_are_those_of_transformers() {
    for case in Case::all("model") {
        case.check_values(&Device::flex(), FACTOR);
    }
}

#[test]
fn both_config_styles_mean_the_same() {
    for case in Case::all("model") {
        check_config(&case);
    }
}

#[test]
fn packed_documents_are_as_if_alone() {
    for case in Case::all("packed") {
        case.check_values(&Device::flex(), FACTOR);
    }
}
