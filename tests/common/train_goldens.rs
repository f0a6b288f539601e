//! Ten optimizer steps against the reference trainer (`train/` of the goldens, formulas in their
//! README), on any device.
#![allow(dead_code)] // each test program uses a part

use burn::tensor::{Device, Tensor};
use embertune::config::{OptimConfig, OptimKind};
use embertune::data::Batch;
use embertune::export;
use embertune::model::Decoder;
use embertune::train::optim::{Optimizer, not_norm_or_bias};
use embertune::train::ranks::Ranks;
use embertune::train::step::{StepOptions, forward_backward};
use serde_json::Value;

use super::goldens::{Case, Tolerance, json, root, tensors};

/// Runs a case; tolerances are taken `factor` times.
pub fn run(name: &str, recompute: Option<usize>, device: &Device, factor: f64) {
    let cases = Case::all("train");
    let case = cases.iter().find(|c| c.name == format!("train/{name}")).expect("the case is there");
    let mut model = initial(case, device);
    let hyper = &case.json["hyper"];
    let mut optimizer = optimizer(hyper, &model);
    let max_norm = hyper["max_grad_norm"].as_f64();
    let options = StepOptions { recompute, dropout_seed: 0 };
    let (loss, norm) = (Tolerance::of("train_loss", factor), Tolerance::of("train_grad_norm", factor));
    let steps = case.json["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 10);
    for step in steps {
        let what = |number: &str| format!("{name}, step {}: {number}", step["step"]);
        let batches: Vec<Batch> = step["micro_batches"].as_array().unwrap().iter().map(batch).collect();
        let sums = forward_backward(&model, &batches, &options).unwrap();
        assert_eq!(
            sums.trained_tokens as u64,
            step["n_target_tokens"].as_u64().unwrap(),
            "{}",
            what("targets")
        );
        let lr = step["lr"].as_f64().unwrap();
        let update = sums.update(&mut model, &mut optimizer, lr, max_norm, &Ranks::alone()).unwrap().unwrap();
        let wanted = |key: &str| step[key].as_f64().unwrap() as f32;
        loss.check(&what("loss"), &[update.loss as f32], &[wanted("loss")]);
        norm.check(&what("grad_norm"), &[update.grad_norm as f32], &[wanted("grad_norm")]);
        norm.check(&what("clip_coef"), &[update.clip_coef as f32], &[wanted("clip_coef")]);
    }
    check_final(case, &model, factor);
}

fn initial(case: &Case, device: &Device) -> Decoder {
    let mut model = case.decoder(device);
    if case.json["mode"] == "full" {
        return model.train_all();
    }
    export::load_adapter(&mut model, 0, &case.dir.join(case.json["init"].as_str().unwrap())).unwrap();
    model
}

fn optimizer(hyper: &Value, model: &Decoder) -> Optimizer {
    let number = |key: &str| hyper[key].as_f64().unwrap();
    let kind = OptimKind::AdamW {
        betas1: number("beta1"),
        betas2: number("beta2"),
        eps: number("eps"),
        moments_dtype: "float32".into(),
    };
    let config = OptimConfig {
        lr: number("lr"),
        weight_decay: number("weight_decay"),
        max_norm: None,
        max_skipped: 0,
        kind,
    };
    let optimizer = Optimizer::new(&config, &model.trainable());
    if hyper["decay_groups"] == "hf" { optimizer.decay_only(not_norm_or_bias) } else { optimizer }
}

/// A micro-batch: its packed rows end to end.
fn batch(micro: &Value) -> Batch {
    let mut batch = Batch { cu_seqlens: vec![0], ..Batch::default() };
    for row in micro["rows"].as_array().unwrap() {
        let list = |key: &str| -> Vec<i64> {
            row[key].as_array().unwrap().iter().map(|v| v.as_i64().unwrap()).collect()
        };
        let (ids, documents, labels) = (list("input_ids"), list("document_ids"), list("labels"));
        let start = batch.input_ids.len();
        for t in 0..ids.len() {
            let last = documents.get(t + 1) != Some(&documents[t]);
            let target = if last { -100 } else { labels[t + 1] };
            batch.loss_mask.push(target >= 0);
            batch.targets.push(u32::try_from(target).unwrap_or(0));
            if last {
                batch.cu_seqlens.push((start + t + 1) as u32);
            }
        }
        batch.input_ids.extend(ids.iter().map(|&id| id as u32));
        batch.position_ids.extend(list("position_ids").iter().map(|&p| p as u32));
    }
    batch.run_tokens = vec![batch.input_ids.len()];
    batch.streams = vec![Default::default()];
    batch
}

fn check_final(case: &Case, model: &Decoder, factor: f64) {
    let folder = case.dir.join(case.json["final"].as_str().unwrap());
    let file = if case.json["mode"] == "full" { "model.safetensors" } else { "adapter_model.safetensors" };
    let wanted = tensors(&folder.join(file));
    let limits = &json(&root().join("tolerances.json"))["train_final"];
    let limit = |key: &str| limits[key].as_f64().unwrap() * factor;
    let (usual, worst) = (limit("p999_abs"), limit("max_abs"));
    let mut differences = Vec::new();
    let parameters: Vec<_> = model.trainable().into_iter().zip(model.trainable_values()).collect();
    assert_eq!(parameters.len(), wanted.len(), "{}: number of tensors", case.name);
    for (parameter, value) in parameters {
        let got = values(value);
        let stored = wanted.get(&stored_name(&parameter.name)).expect("the parameter is in the file");
        assert_eq!(stored.shape, parameter.shape, "{}", parameter.name);
        differences.extend(got.iter().zip(&stored.values).map(|(g, w)| f64::from((g - w).abs())));
    }
    differences.sort_by(f64::total_cmp);
    let at_999 = differences[differences.len() * 999 / 1000];
    let largest = differences[differences.len() - 1];
    assert!(at_999 <= usual && largest <= worst, "{}: 99.9 % {at_999:e}, worst {largest:e}", case.name);
}

fn values(tensor: Tensor<1>) -> Vec<f32> {
    tensor.to_data().try_to_vec().unwrap()
}

/// Ours → PEFT's: `q_proj.adapters.0.lora_a` → `base_model.model.….q_proj.lora_A.weight`.
fn stored_name(name: &str) -> String {
    match name.split_once(".adapters.0.") {
        None => name.to_string(),
        Some((module, part)) => {
            let matrix = part.replace("lora_a", "lora_A").replace("lora_b", "lora_B");
            format!("base_model.model.{module}.{matrix}.weight")
        }
    }
}
