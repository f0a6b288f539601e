//! Another trainer on the same step: a command that is given a file with the work and prints what it took.
//!
//! The file is one JSON object:
//!
//! ```text
//! model      a Hugging Face folder
//! device     "cuda:0" or "cpu"
//! dtype      of the frozen weights: "float32", "float16", "bfloat16"
//! lora       r, lora_alpha, use_rslora and target_modules in PEFT's words, or null for full fine-tuning
//! lr, weight_decay, max_norm, warmup, steps, gradient_checkpointing
//! micro_batches    [[{"ids": […], "trained": […]}, …], …]: the documents of each, and for each token whether it is
//!                  a target
//! ```
//!
//! The last line that the command prints is `{"name": …, "ms": […], "peak_bytes": …}`: milliseconds of each step that
//! counts. `tools/parity/peer.py` is one, for transformers + PEFT.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::{Amount, Peer};
use crate::config::{LoraConfig, SftConfig, TargetModules};
use crate::data::Batch;
use crate::report::{Event, Report};
use crate::train::ground::Ground;
use crate::{Error, Result};

/// Runs the command and reads what it found.
///
/// # Errors
/// It can't be started, fails, or doesn't print what is wanted.
pub(super) fn measure(
    command: &str,
    config: &SftConfig,
    ground: &Ground,
    batches: &[Batch],
    amount: Amount,
    report: &mut dyn Report,
) -> Result<Peer> {
    report.event(&Event::Note(format!("measuring the peer: {command}")));
    let wrong = |message: String| {
        let hint = "see what it printed; `tools/parity/peer.py` is an example of a peer".to_string();
        Error::Usage { message: format!("`--peer`: `{command}` {message}"), hint }
    };
    let failed = |e| Error::io("the peer's work", "write", e);
    let mut file = tempfile::Builder::new().suffix(".json").tempfile().map_err(failed)?;
    file.write_all(work(config, ground, batches, amount).to_string().as_bytes()).map_err(failed)?;
    let shell = format!("{command} \"$0\"");
    let run = Command::new("sh").arg("-c").arg(shell).arg(file.path()).stderr(Stdio::inherit()).output();
    let out = run.map_err(|e| wrong(format!("cannot be started: {e}")))?;
    if !out.status.success() {
        return Err(wrong(format!("ended with {}", out.status)));
    }
    let text = String::from_utf8_lossy(&out.stdout);
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    read(last).ok_or_else(|| wrong(format!("printed `{last}` last, wanted `{{\"name\": …, \"ms\": […]}}`")))
}

fn read(line: &str) -> Option<Peer> {
    let found: Value = serde_json::from_str(line).ok()?;
    let ms: Vec<f64> = found["ms"].as_array()?.iter().map(Value::as_f64).collect::<Option<_>>()?;
    let name = found["name"].as_str()?.to_string();
    (!ms.is_empty()).then(|| Peer { name, ms, peak_bytes: found["peak_bytes"].as_u64() })
}

fn work(config: &SftConfig, ground: &Ground, batches: &[Batch], amount: Amount) -> Value {
    let dtype = format!("{:?}", ground.dtype).to_lowercase();
    let dtype = match dtype.as_str() {
        "f16" => "float16",
        "bf16" => "bfloat16",
        _ => "float32",
    };
    let device = if ground.selected.name.contains("cuda") { ground.selected.name.as_str() } else { "cpu" };
    json!({
        "model": ground.base, "device": device, "dtype": dtype,
        "lora": config.model.lora.as_ref().map(lora),
        "lr": config.optim.lr, "weight_decay": config.optim.weight_decay, "max_norm": config.optim.max_norm,
        "warmup": amount.warmup, "steps": amount.steps, "gradient_checkpointing": config.model.ac.is_some(),
        "micro_batches": batches.iter().map(documents).collect::<Vec<_>>(),
    })
}

fn lora(lora: &LoraConfig) -> Value {
    let targets = match &lora.target_modules {
        TargetModules::List(names) => json!(names),
        TargetModules::Regex(pattern) => json!(pattern),
        TargetModules::AllLinear => json!("all-linear"),
    };
    json!({
        "r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.use_rslora, "lora_dropout": lora.dropout,
        "target_modules": targets,
    })
}

/// A micro-batch's documents. A token is a target where the one before it predicts it.
fn documents(batch: &Batch) -> Value {
    let bounds = batch.cu_seqlens.windows(2).map(|bound| bound[0] as usize..bound[1] as usize);
    bounds
        .map(|range| {
            let mask = &batch.loss_mask[range.start..range.end - 1];
            let trained: Vec<u8> =
                std::iter::once(0).chain(mask.iter().map(|&trained| trained.into())).collect();
            json!({ "ids": batch.input_ids[range], "trained": trained })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_s_targets_are_its_own() {
        let batch = Batch {
            input_ids: vec![1, 2, 3, 4],
            loss_mask: vec![true, false, true, false],
            cu_seqlens: vec![0, 2, 4],
            ..Batch::default()
        };
        let want = json!([{ "ids": [1, 2], "trained": [0, 1] }, { "ids": [3, 4], "trained": [0, 1] }]);
        assert_eq!(documents(&batch), want);
    }

    #[test]
    fn what_a_peer_prints() {
        let found = read(r#"{"name": "x", "ms": [1.5, 2], "peak_bytes": 7}"#);
        assert_eq!(found, Some(Peer { name: "x".into(), ms: vec![1.5, 2.0], peak_bytes: Some(7) }));
        for wrong in ["", "done", r#"{"name": "x", "ms": []}"#, r#"{"name": "x", "ms": ["1"]}"#] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
