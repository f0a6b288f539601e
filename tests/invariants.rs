//! What must hold whatever the configuration: resume is exact, accumulation is only a way to save
//! memory, a run repeats bit for bit, a kill loses nothing that was saved, and the base stays.
#![cfg(feature = "flex")]

mod common;

use std::hash::Hasher;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Tensor};
use common::goldens::{root, tensors};
use common::run::RunDir;
use embertune::config::{LoraConfig, OptimConfig, OptimKind};
use embertune::data::{Batch, Stream};
use embertune::model::{Decoder, LoraSpec};
use embertune::train::optim::Optimizer;
use embertune::train::ranks::Ranks;
use embertune::train::step::{StepOptions, forward_backward};
use xxhash_rust::xxh3::Xxh3;

/// Dropout, shuffling, accumulation and a moving rate: all that a resume could get wrong.
const HARD: [&str; 8] = [
    "--model.lora.dropout",
    "0.1",
    "--data.micro-batch-size",
    "1",
    "--scheduler.type",
    "linear",
    "--scheduler.decay-steps",
    "0",
];

fn with<'a>(base: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [base, more].concat()
}

/// Files that must be equal, byte for byte, after `step` steps.
fn assert_same(dir: &RunDir, a: &str, b: &str, step: usize) {
    let files = [
        "checkpoints/step_N/trainable.safetensors",
        "checkpoints/step_N/optimizer.safetensors",
        "checkpoints/step_N/state.json",
        "weights/step_N/lora_adapters/adapter_model.safetensors",
    ];
    for file in files.map(|file| file.replace("step_N", &format!("step_{step}"))) {
        if file.starts_with("weights") && !dir.path(&format!("{a}/{file}")).exists() {
            continue; // full fine-tuning
        }
        assert!(dir.bytes(&format!("{a}/{file}")) == dir.bytes(&format!("{b}/{file}")), "{file} differs");
    }
    assert_eq!(dir.losses(a), dir.losses(b));
    let norms = |out| dir.rows(out).iter().map(|r| r["optim/grad_norm"].clone()).collect::<Vec<_>>();
    assert_eq!(norms(a), norms(b));
}

#[test]
fn ten_and_ten_steps_are_twenty() {
    let modes: [(&str, &[&str]); 5] = [
        ("lora", &[]),
        ("recomputed", &["--model.ac", "--model.ac.freq", "2"]),
        ("full", &["--model.lora", "None", "--model.lora.dropout", "None"]),
        ("muon", &["--optim.type", "muon"]),
        ("sgd", &["--optim.type", "sgd"]),
    ];
    for (name, mode) in modes {
        let dir = RunDir::new();
        let hard = if name == "full" { &HARD[2..] } else { &HARD[..] };
        let mode = if name == "full" { &mode[..2] } else { mode };
        let args = with(hard, &[mode, &["--ckpt.interval", "10"][..]].concat());
        dir.sft(&with(&args, &["--max-steps", "20", "--output-dir", "whole"])).succeeds();
        dir.sft(&with(&args, &["--max-steps", "10", "--output-dir", "parts"])).succeeds();
        let resume = ["--max-steps", "20", "--output-dir", "parts", "--ckpt.resume-step", "-1"];
        dir.sft(&with(&args, &resume)).succeeds();
        assert_same(&dir, "whole", "parts", 20);
        assert_eq!(dir.losses("parts").len(), 20, "{name}");
    }
}

#[test]
fn the_same_twenty_steps_repeat_bit_for_bit_under_load() {
    let dir = RunDir::new();
    let busy = AtomicBool::new(true);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while busy.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        for k in 0..5 {
            let out = format!("run{k}");
            let args = ["--max-steps", "20", "--ckpt.interval", "20", "--output-dir", &out];
            dir.sft(&with(&HARD, &args)).succeeds();
        }
        busy.store(false, Ordering::Relaxed);
    });
    for k in 1..5 {
        assert_same(&dir, "run0", &format!("run{k}"), 20);
    }
}

#[test]
fn a_killed_run_resumes_as_if_nothing_had_happened() {
    let dir = RunDir::new();
    let args = with(&HARD, &["--max-steps", "40", "--ckpt.interval", "2"]);
    dir.sft(&with(&args, &["--output-dir", "whole"])).succeeds();
    // Moments from early in setup to late in the run; a finished run is fine too.
    for millis in [40, 90, 140, 190, 260, 330, 420] {
        let mut child = dir.spawn(&with(&args, &["--output-dir", "killed", "--ckpt.resume-step", "-1"]));
        std::thread::sleep(Duration::from_millis(millis));
        child.kill().expect("the process can be killed");
        child.wait().expect("the process ends");
    }
    dir.sft(&with(&args, &["--output-dir", "killed", "--ckpt.resume-step", "-1"])).succeeds();
    assert_same(&dir, "whole", "killed", 40);
}

/// 8 × 1 rows = 1 × 8 rows: the same mean over tokens, added in another order.
#[test]
fn accumulation_changes_nothing_but_rounding() {
    let dir = RunDir::new();
    let args = ["--max-steps", "5", "--data.batch-size", "8", "--data.seq-len", "32", "--ckpt.interval", "5"];
    dir.sft(&with(&args, &["--data.micro-batch-size", "8", "--output-dir", "one"])).succeeds();
    dir.sft(&with(&args, &["--data.micro-batch-size", "1", "--output-dir", "eight"])).succeeds();
    let losses = dir.losses("one");
    assert_eq!(losses.len(), 5);
    for ((step, one), (_, eight)) in losses.iter().zip(dir.losses("eight")) {
        // f32 sums of a few hundred terms: 1e-5 relative is generous.
        assert!((one - eight).abs() <= 1e-5 * one, "step {step}: {one} and {eight}");
    }
    let file = "weights/step_5/lora_adapters/adapter_model.safetensors";
    let (one, eight) =
        (tensors(&dir.path(&format!("one/{file}"))), tensors(&dir.path(&format!("eight/{file}"))));
    for (name, tensor) in one {
        for (a, b) in tensor.values.iter().zip(&eight[&name].values) {
            // Adam turns rounding of a tiny gradient into a share of lr = 1e-2.
            assert!((a - b).abs() <= 1e-3, "{name}: {a} and {b}");
        }
    }
}

fn tiny() -> Decoder {
    Decoder::load(&root().join("model/qwen3-gqa"), DType::F32, &Device::flex(), &mut |_, _| {}).unwrap()
}

fn with_lora(dropout: f64) -> Decoder {
    let mut model = tiny();
    let config = LoraConfig { rank: 4, alpha: 8.0, dropout, ..LoraConfig::default() };
    model.attach_lora(&[LoraSpec::from_config(&config)], 1).unwrap();
    // B = 0 would leave A without a gradient.
    let values = model.trainable_values().into_iter().enumerate().map(|(i, v)| v + 0.01 * (i + 1) as f32);
    let values = values.collect();
    model.set_trainable(values)
}

/// Two documents and padding; every third token is trained, or none.
fn batch(first: u32, trained: bool) -> Batch {
    let t = 24u32;
    let ends = [0, 10, 20, 24];
    let start = |i: u32| *ends.iter().rev().find(|&&end| end <= i).unwrap();
    Batch {
        input_ids: (0..t).map(|i| (first + 7 * i) % 300).collect(),
        position_ids: (0..t).map(|i| i - start(i)).collect(),
        targets: (0..t).map(|i| (first + 7 * i + 7) % 300).collect(),
        loss_mask: (0..t).map(|i| trained && i < 19 && i != 9 && i % 3 == 0).collect(),
        cu_seqlens: ends.to_vec(),
        run_tokens: vec![t as usize],
        streams: vec![Stream::unbroken(u64::from(first) * 1000)],
    }
}

fn bits(tensors: &[Tensor<1>]) -> Vec<Vec<u32>> {
    let bits = |t: &Tensor<1>| t.to_data().try_to_vec::<f32>().unwrap().iter().map(|v| v.to_bits()).collect();
    tensors.iter().map(bits).collect()
}

#[test]
fn recomputation_gives_the_same_bits() {
    let batches = [batch(3, true), batch(11, false), batch(40, true)];
    let top_only = {
        let mut model = tiny();
        let layers = Some(vec![1]);
        let config = LoraConfig { layers_to_transform: layers, ..LoraConfig::default() };
        model.attach_lora(&[LoraSpec::from_config(&config)], 1).unwrap();
        model
    };
    for model in [with_lora(0.3), tiny().train_all(), top_only] {
        let options = |recompute| StepOptions { recompute, dropout_seed: 5 };
        let whole = forward_backward(&model, &batches, &options(None)).unwrap();
        for every in [1, 2] {
            let again = forward_backward(&model, &batches, &options(Some(every))).unwrap();
            assert_eq!(whole.loss().to_bits(), again.loss().to_bits());
            let pairs = bits(&whole.grads).into_iter().zip(bits(&again.grads));
            let parameters = model.trainable();
            let differ = parameters.iter().zip(pairs).filter(|(_, (a, b))| a != b).map(|(p, _)| &p.name);
            let differ: Vec<_> = differ.collect();
            assert!(differ.is_empty(), "every {every}: {differ:?}");
        }
    }
}

#[test]
fn dropout_depends_on_seed_and_position_and_is_off_in_evaluation() {
    let model = with_lora(0.5);
    let loss = |seed, first_token| {
        let batch = Batch { streams: vec![Stream::unbroken(first_token)], ..batch(3, true) };
        let sums = forward_backward(&model, &[batch], &StepOptions { recompute: None, dropout_seed: seed });
        sums.unwrap().loss()
    };
    assert_eq!(loss(1, 0).to_bits(), loss(1, 0).to_bits());
    assert_ne!(loss(1, 0), loss(2, 0));
    assert_ne!(loss(1, 0), loss(1, 24));
    let held_out = |model: &Decoder| {
        embertune::train::eval::held_out_loss(model, [Ok(batch(3, true))], &Ranks::alone()).unwrap()
    };
    assert_eq!(held_out(&model).to_bits(), held_out(&with_lora(0.0)).to_bits());
}

#[test]
fn held_out_loss_is_the_mean_over_all_tokens_not_over_batches() {
    let model = with_lora(0.0);
    let held_out = |batches: &[Batch]| {
        embertune::train::eval::held_out_loss(&model, batches.iter().cloned().map(Ok), &Ranks::alone())
            .unwrap()
    };
    let (many, few) = (batch(3, true), {
        let mut few = batch(40, true);
        few.loss_mask = (0..24).map(|i| i == 5).collect();
        few
    });
    let (a, b) = (held_out(std::slice::from_ref(&many)), held_out(std::slice::from_ref(&few)));
    let (n, m) = (many.trained_tokens() as f64, few.trained_tokens() as f64);
    assert!(n > m);
    let both = held_out(&[many, few, batch(5, false)]);
    assert!((both - (a * n + b * m) / (n + m)).abs() < 1e-6, "{both}");
}

fn adamw(model: &Decoder) -> Optimizer {
    let kind = OptimKind::AdamW { betas1: 0.9, betas2: 0.999, eps: 1e-8, moments_dtype: "float32".into() };
    let config = OptimConfig { lr: 1e-2, weight_decay: 0.01, max_norm: None, max_skipped: 0, kind };
    Optimizer::new(&config, &model.trainable())
}

#[test]
fn a_step_without_trained_tokens_changes_nothing() {
    let mut model = with_lora(0.0);
    let mut optimizer = adamw(&model);
    let before = bits(&model.trainable_values());
    let sums =
        forward_backward(&model, &[batch(1, false), batch(2, false)], &StepOptions::default()).unwrap();
    assert!(sums.update(&mut model, &mut optimizer, 1e-2, Some(1.0), &Ranks::alone()).unwrap().is_none());
    assert!(before == bits(&model.trainable_values()));
    assert_eq!(optimizer.updates(), 0);
    assert!(optimizer.state(&Ranks::alone(), &Device::flex()).unwrap().is_empty());
}

#[test]
fn a_loss_that_is_not_finite_updates_nothing() {
    let mut model = with_lora(0.0);
    let values = model.trainable_values().into_iter().map(|v| v.mul_scalar(f32::NAN)).collect();
    model = model.set_trainable(values);
    let (mut optimizer, before) = (adamw(&model), bits(&model.trainable_values()));
    let sums = forward_backward(&model, &[batch(1, true)], &StepOptions::default()).unwrap();
    let update = sums.update(&mut model, &mut optimizer, 1e-2, Some(1.0), &Ranks::alone()).unwrap().unwrap();
    assert!(!update.applied && update.loss.is_nan());
    assert!(before == bits(&model.trainable_values()));
    assert_eq!(optimizer.updates(), 0);
    assert!(optimizer.state(&Ranks::alone(), &Device::flex()).unwrap().is_empty());
}

/// xxh3 over all parameters that aren't trained.
fn frozen_hash(model: &Decoder) -> u64 {
    struct Frozen(Xxh3);
    impl ModuleVisitor for Frozen {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if !param.is_require_grad() {
                self.0.update(param.val().to_data().bytes().as_ref());
            }
        }
    }
    let mut visitor = Frozen(Xxh3::new());
    model.visit(&mut visitor);
    visitor.0.finish()
}

#[test]
fn the_base_is_bit_unchanged_after_a_lora_run() {
    let mut model = with_lora(0.1);
    let mut optimizer = adamw(&model);
    let (frozen, trained) = (frozen_hash(&model), bits(&model.trainable_values()));
    for step in 0..5 {
        let sums = forward_backward(&model, &[batch(step, true)], &StepOptions::default()).unwrap();
        sums.update(&mut model, &mut optimizer, 1e-2, Some(1.0), &Ranks::alone()).unwrap();
    }
    assert_eq!(frozen, frozen_hash(&model));
    assert!(trained != bits(&model.trainable_values()));
    // And on disk.
    let dir = RunDir::new();
    let file = root().join("bad/_ok/model/model.safetensors");
    let before = std::fs::read(&file).unwrap();
    dir.sft(&[]).succeeds();
    assert!(before == std::fs::read(&file).unwrap());
}
