//! A loss curve to hold against PyTorch: 50 steps from the same weights, adapter and batches.
//!
//! `EMBERTUNE_CURVE="MODEL OUT"` writes `OUT/adapter`, `OUT/batches.jsonl` (unless it is there: then those are taken) and
//! `OUT/losses.jsonl`; then
//! `tools/parity/peft_train.py MODEL OUT/batches.jsonl --adapter OUT/adapter --lr 5e-4 --device cuda --dtype bfloat16
//! --out OUT/peft.jsonl` and `tools/parity/compare_losses.py OUT/losses.jsonl OUT/peft.jsonl`.

use std::io::Write;
use std::path::Path;

use burn::tensor::{DType, Device};
use embertune::config::{LoraConfig, OptimConfig};
use embertune::data::Batch;
use embertune::export::{AdapterMeta, save_adapter};
use embertune::model::{Decoder, LoraSpec};
use embertune::train::optim::Optimizer;
use embertune::train::ranks::Ranks;
use embertune::train::step::{StepOptions, forward_backward};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde_json::json;

use super::card;

const STEPS: usize = 50;
const LR: f64 = 5e-4;

#[test]
#[ignore = "needs the model that EMBERTUNE_CURVE names"]
fn curve() {
    let Some(_) = card() else { return };
    let arguments = std::env::var("EMBERTUNE_CURVE").expect("EMBERTUNE_CURVE holds the model and a folder");
    let (model, out) = arguments.split_once(' ').expect("a model and a folder");
    let out = Path::new(out);
    std::fs::create_dir_all(out).unwrap();
    let mut model = Decoder::load(Path::new(model), DType::BF16, &Device::cuda(0), &mut |_, _| {}).unwrap();
    model.attach_lora(&[LoraSpec::from_config(&LoraConfig::default())], 7).unwrap();
    save_adapter(&model, 0, &out.join("adapter"), &AdapterMeta::default()).unwrap();
    let config = OptimConfig::default();
    let mut optimizer = Optimizer::new(&config, &model.trainable());
    let create = |name: &str| std::fs::File::create(out.join(name)).unwrap();
    let given = out.join("batches.jsonl");
    if !given.exists() {
        let mut file = create("batches.jsonl");
        for step in 1..=STEPS {
            let Batch { input_ids, position_ids, targets, loss_mask, cu_seqlens, .. } =
                batch(step as u64, model.config().vocab_size as u32);
            let line = json!({
                "step": step, "micro": 0, "input_ids": input_ids, "position_ids": position_ids,
                "targets": targets, "loss_mask": loss_mask, "cu_seqlens": cu_seqlens,
            });
            writeln!(file, "{line}").unwrap();
        }
    }
    let mut losses = create("losses.jsonl");
    for line in std::fs::read_to_string(given).unwrap().lines() {
        let (step, batch) = read(line);
        let trained = batch.trained_tokens();
        let sums = forward_backward(&model, &[batch], &StepOptions::default()).unwrap();
        let update =
            sums.update(&mut model, &mut optimizer, LR, Some(1.0), &Ranks::alone()).unwrap().unwrap();
        let row = json!({
            "step": step, "loss/mean": update.loss, "optim/grad_norm": update.grad_norm, "optim/lr": LR,
            "trained_tokens": trained,
        });
        writeln!(losses, "{row}").unwrap();
        eprintln!("step {step}: loss {:.5} norm {:.4}", update.loss, update.grad_norm);
    }
}

/// A line of `batches.jsonl`.
fn read(line: &str) -> (u64, Batch) {
    let line: serde_json::Value = serde_json::from_str(line).unwrap();
    let numbers = |key: &str| -> Vec<u32> {
        line[key].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32).collect()
    };
    let trained = |flag: &serde_json::Value| flag.as_bool().unwrap_or(flag.as_u64() == Some(1));
    let input_ids = numbers("input_ids");
    let batch = Batch {
        run_tokens: vec![input_ids.len()],
        streams: vec![Default::default()],
        input_ids,
        position_ids: numbers("position_ids"),
        targets: numbers("targets"),
        loss_mask: line["loss_mask"].as_array().unwrap().iter().map(trained).collect(),
        cu_seqlens: numbers("cu_seqlens"),
    };
    (line["step"].as_u64().unwrap(), batch)
}

/// 2,048 tokens of documents of uneven length, each counting up in steps of its own: something to learn.
fn batch(seed: u64, vocabulary: u32) -> Batch {
    let mut generator = ChaCha8Rng::seed_from_u64(seed);
    let mut batch = Batch {
        cu_seqlens: vec![0],
        run_tokens: vec![2048],
        streams: vec![Default::default()],
        ..Default::default()
    };
    while batch.tokens() < 2048 {
        let len = (1 + generator.next_u32() % 700).min(2048 - batch.tokens() as u32);
        let (first, step) = (generator.next_u32() % 500, 1 + generator.next_u32() % 3);
        let token = |n: u32| (first + n * step) % 500 * 97 % vocabulary;
        batch.input_ids.extend((0..len).map(token));
        batch.position_ids.extend(0..len);
        batch.targets.extend((1..=len).map(|n| if n < len { token(n) } else { 0 }));
        batch.loss_mask.extend((1..=len).map(|n| n < len && n % 5 != 0));
        batch.cu_seqlens.push(batch.input_ids.len() as u32);
    }
    batch
}
