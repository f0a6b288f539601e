//! The numbers of a step, with their JSON row, and of a whole run.

use std::path::PathBuf;

use serde_json::{Map, Value, json};

/// Seconds of one step by phase.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PhaseTimes {
    /// Waiting for the step's batches.
    pub data: f64,
    /// Forward and backward over all micro-batches.
    pub forward_backward: f64,
    /// Norm, clipping and update.
    pub optimizer: f64,
    /// Validation after the step.
    pub val: f64,
    /// The checkpoint before the step.
    pub save_ckpt: f64,
}

impl PhaseTimes {
    /// Seconds of the step itself: without validation and checkpoint.
    pub fn step(&self) -> f64 {
        self.data + self.forward_backward + self.optimizer
    }
}

/// One finished optimizer step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepMetrics {
    /// The run, where there are several.
    pub run: Option<String>,
    /// Number of steps so far, this one included.
    pub step: usize,
    /// Passes over the data begun so far.
    pub epoch: usize,
    /// Mean loss over the step's trained tokens, before the update.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// The rate used.
    pub lr: f64,
    /// Tokens through the model in this step, padding included.
    pub tokens: usize,
    /// Ranks that shared the step.
    pub ranks: usize,
    /// Trained tokens of this step.
    pub trained_tokens: usize,
    /// Tokens through the model so far.
    pub total_tokens: usize,
    /// Trained tokens so far.
    pub total_trained_tokens: usize,
    /// Packed rows so far.
    pub total_rows: usize,
    /// Percent of the device's peak, where that is known.
    pub mfu: Option<f64>,
    /// The process's peak memory in bytes, where the system says.
    pub peak_bytes: Option<u64>,
    /// Bytes reserved on the device, where it says.
    pub device_bytes: Option<u64>,
    /// Seconds by phase.
    pub time: PhaseTimes,
    /// Validation loss after the step, if it was measured.
    pub val_loss: Option<f64>,
    /// Nothing was updated: the step held no trained token, or its loss or gradient wasn't finite.
    pub skipped: bool,
}

impl StepMetrics {
    /// Tokens through the model per second.
    pub fn throughput(&self) -> f64 {
        per_second(self.tokens, self.time.step())
    }

    /// Trained tokens per second.
    pub fn trained_throughput(&self) -> f64 {
        per_second(self.trained_tokens, self.time.step())
    }

    /// The row in `metrics.jsonl`: prime-rl's names, and ours for what it doesn't have.
    pub fn to_json(&self) -> Value {
        let mut row = Map::new();
        if let Some(run) = &self.run {
            row.insert("run".into(), json!(run));
        }
        row.insert("step".into(), json!(self.step));
        if self.skipped {
            row.insert("skipped".into(), json!(true));
        } else {
            row.insert("loss/mean".into(), json!(self.loss));
            row.insert("loss/perplexity".into(), json!(self.loss.min(20.0).exp()));
            row.insert("optim/grad_norm".into(), json!(self.grad_norm));
        }
        row.insert("optim/lr".into(), json!(self.lr));
        if let Some(loss) = self.val_loss {
            row.insert("val/loss".into(), json!(loss));
        }
        row.insert("progress/epoch".into(), json!(self.epoch));
        row.insert("progress/num_tokens".into(), json!(self.total_tokens));
        row.insert("progress/num_trained_tokens".into(), json!(self.total_trained_tokens));
        row.insert("progress/num_rows".into(), json!(self.total_rows));
        row.insert("perf/tokens".into(), json!(self.tokens));
        row.insert("perf/trained_tokens".into(), json!(self.trained_tokens));
        row.insert("perf/throughput".into(), json!(self.throughput()));
        row.insert("perf/throughput_per_gpu".into(), json!(self.throughput() / self.ranks.max(1) as f64));
        row.insert("perf/trained_throughput".into(), json!(self.trained_throughput()));
        let optional = [
            ("perf/mfu", self.mfu.map(|v| json!(v))),
            ("perf/peak_memory", self.peak_bytes.map(|v| json!(gib(v)))),
            ("perf/device_memory", self.device_bytes.map(|v| json!(gib(v)))),
        ];
        for (name, value) in optional {
            if let Some(value) = value {
                row.insert(name.into(), value);
            }
        }
        let time = &self.time;
        let phases = [
            ("step", time.step()),
            ("data", time.data),
            ("forward_backward", time.forward_backward),
            ("optimizer", time.optimizer),
            ("val", time.val),
            ("save_ckpt", time.save_ckpt),
        ];
        row.extend(phases.map(|(name, seconds)| (format!("time/{name}"), json!(seconds))));
        Value::Object(row)
    }
}

fn per_second(count: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

/// Bytes as GiB.
pub fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

/// What a run came to.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Summary {
    /// Finished steps, those before a resume included.
    pub steps: usize,
    /// Steps that earlier processes did.
    pub resumed_step: usize,
    /// Loss of the first step of this process.
    pub first_loss: Option<f64>,
    /// Loss of the last step.
    pub last_loss: Option<f64>,
    /// First held-out loss of this process.
    pub first_val_loss: Option<f64>,
    /// Last held-out loss.
    pub last_val_loss: Option<f64>,
    /// Folder of the exported PEFT adapter.
    pub adapter: Option<PathBuf>,
    /// Folder of the exported full model.
    pub weights: Option<PathBuf>,
    /// Folder of the last checkpoint.
    pub checkpoint: Option<PathBuf>,
    /// The base model's folder.
    pub base: PathBuf,
    /// Seconds from the start of setup.
    pub seconds: f64,
    /// The process's peak memory in bytes.
    pub peak_bytes: Option<u64>,
    /// Whether it was stopped before its end by an error: one of several.
    pub failed: bool,
    /// The runs of a job of several, by name; the best first.
    pub runs: Vec<(String, Summary)>,
}

impl Summary {
    /// Puts the runs in order: by held-out loss, after them those without by the last step's, at the end those that failed.
    pub fn rank_runs(&mut self) {
        let place = |summary: &Summary| (summary.failed, summary.last_val_loss.is_none());
        let loss = |summary: &Summary| summary.last_val_loss.or(summary.last_loss).unwrap_or(f64::INFINITY);
        self.runs.sort_by(|(_, a), (_, b)| place(a).cmp(&place(b)).then(loss(a).total_cmp(&loss(b))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A training loss isn't held against held-out losses.
    #[test]
    fn runs_are_ranked_by_like_things() {
        let run = |name: &str, last_loss, last_val_loss, failed| {
            (
                name.to_string(),
                Summary { last_loss: Some(last_loss), last_val_loss, failed, ..Summary::default() },
            )
        };
        let runs = vec![
            run("failed", 0.1, Some(0.1), true),
            run("no held-out loss", 0.9, None, false),
            run("second", 0.5, Some(3.2), false),
            run("nan", 0.4, Some(f64::NAN), false),
            run("first", 2.0, Some(3.1), false),
        ];
        let mut summary = Summary { runs, ..Summary::default() };
        summary.rank_runs();
        let names: Vec<&str> = summary.runs.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["first", "second", "nan", "no held-out loss", "failed"]);
    }

    #[test]
    fn row_has_prime_rl_names() {
        let metrics = StepMetrics {
            step: 3,
            loss: 2.0,
            tokens: 100,
            ranks: 2,
            trained_tokens: 50,
            time: PhaseTimes { data: 0.5, forward_backward: 1.0, optimizer: 0.5, ..Default::default() },
            ..Default::default()
        };
        let row = metrics.to_json();
        for name in ["loss/mean", "optim/grad_norm", "optim/lr", "perf/throughput", "time/step"] {
            assert!(row[name].is_number(), "{name} in {row}");
        }
        assert_eq!(row["perf/throughput"], 50.0);
        assert_eq!(row["perf/throughput_per_gpu"], 25.0);
        assert_eq!(row["perf/trained_throughput"], 25.0);
        assert!(row.get("val/loss").is_none() && row.get("perf/mfu").is_none());
    }
}
