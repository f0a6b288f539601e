//! How large a micro-batch fits into a device's memory, by [`Memory`]'s estimate.

use std::fmt::{self, Display, Formatter};

use burn::tensor::DType;

use crate::Error;
use crate::config::{OptimKind, Plan, SftConfig};
use crate::device::{Selected, device_bytes, free_bytes};
use crate::model::{HfConfig, Load, Memory, Place, Sizes};
use crate::ops;
use crate::report::gib;

/// More rows than that nobody means.
const MOST_ROWS: usize = 1 << 24;

/// What the memory of a run depends on; the estimate for any number of rows in a micro-batch.
#[derive(Debug, Clone)]
pub(super) struct Room {
    model: HfConfig,
    sizes: Sizes,
    /// Of one row.
    load: Load,
    /// Rows of a micro-batch as it is configured, and of a step on one rank.
    pub rows: usize,
    rows_of_step: usize,
}

impl Room {
    pub fn new(
        config: &SftConfig,
        plan: &Plan,
        (selected, dtype): (&Selected, DType),
        model: &HfConfig,
        sizes: &Sizes,
    ) -> Self {
        let state_bytes = match config.optim.kind {
            OptimKind::AdamW { ref moments_dtype, .. } if moments_dtype == "bfloat16" => 4,
            OptimKind::AdamW { .. } => 8,
            OptimKind::Sgd { momentum: 0.0, .. } | OptimKind::SignSgd => 0,
            OptimKind::Sgd { .. } | OptimKind::Muon { .. } => 4,
        };
        let load = Load {
            tokens: plan.seq_len,
            longest: plan.seq_len,
            sums: false,
            compute_bytes: dtype.size(),
            state_bytes: f64::from(state_bytes) / plan.world_size as f64,
            in_place: matches!(config.optim.kind, OptimKind::AdamW { .. }),
            recompute: config.model.ac.as_ref().map(|ac| ac.freq),
            place: place(config, selected, dtype, model),
        };
        Self {
            model: model.clone(),
            sizes: sizes.clone(),
            load,
            rows: plan.rows_per_micro_batch,
            rows_of_step: plan.rows_per_step / plan.world_size,
        }
    }

    /// The estimate for micro-batches of so many rows.
    pub fn memory(&self, rows: usize) -> Memory {
        let load = Load { tokens: rows * self.load.tokens, sums: rows < self.rows_of_step, ..self.load };
        Memory::estimate(&self.model, &self.sizes, load)
    }

    /// The most rows that fit into so many bytes; `None` where not even one does.
    pub fn largest(&self, bytes: u64) -> Option<usize> {
        let fits = |rows: usize| self.memory(rows).total() <= bytes;
        // A whole step at once has no sums of gradients: it may fit where one row less doesn't.
        let (mut least, mut most) = match fits(self.rows_of_step) {
            true => (self.rows_of_step, MOST_ROWS),
            false => (0, self.rows_of_step),
        };
        while most - least > 1 {
            let middle = if least > 0 { (2 * least).min(least.midpoint(most)) } else { least.midpoint(most) };
            match fits(middle) {
                true => least = middle,
                false => most = middle,
            }
        }
        (least > 0).then_some(least)
    }

    /// What `data.micro_batch_size` may be with at most so many rows: it divides the rows of a step.
    fn divisor(&self, rows: usize) -> usize {
        (1..=rows.min(self.rows_of_step)).rev().find(|n| self.rows_of_step.is_multiple_of(*n)).unwrap_or(1)
    }

    /// What to set where so many bytes don't hold what is configured.
    pub fn advice(&self, bytes: u64) -> String {
        match self.largest(bytes).map(|rows| rows.min(self.rows.saturating_sub(1))).filter(|&rows| rows > 0) {
            Some(rows) => {
                format!("`data.micro_batch_size = {}` is the largest that fits", self.divisor(rows))
            }
            None => {
                "not even one row fits: lower `data.seq_len`, switch `[model.ac]` on, or take a smaller model"
                    .into()
            }
        }
    }

    /// An error for want of memory on a device, with what fits into all that is free and that this process holds.
    pub fn explain(&self, error: Error, selected: &Selected) -> Error {
        match error {
            Error::Device { message, .. } if message.starts_with(ops::OUT_OF_MEMORY) => {
                let held = device_bytes(&selected.device).unwrap_or(0);
                let bytes = free_bytes(selected).map_or(0, |free| free + held);
                Error::device(message, format!("{}; `check --fit` looks for it", self.advice(bytes)))
            }
            other => other,
        }
    }

    /// What fits into so many bytes.
    pub fn fit(&self, bytes: u64) -> Fit {
        let rows = self.largest(bytes);
        let [at, beyond] = [rows.unwrap_or(1), rows.unwrap_or(0) + 1].map(|rows| self.memory(rows).total());
        Fit {
            bytes,
            rows,
            seq_len: self.load.tokens,
            estimate: at,
            one_more: beyond,
            rows_of_step: self.rows_of_step,
            micro_batch_size: rows.map(|rows| self.divisor(rows)),
        }
    }
}

/// Where the tensors lie; which layers are one op on a card, `ops::cuda::layer` says.
fn place(config: &SftConfig, selected: &Selected, dtype: DType, model: &HfConfig) -> Place {
    if selected.name == "flex" {
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        return Place::Cpu { threads };
    }
    let biases = model.qkv_bias || model.o_bias || model.mlp_bias;
    let dropout = config.model.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
    let widths = [model.hidden_size, model.intermediate_size].iter().all(|n| n.is_multiple_of(8));
    let taken = matches!(model.head_dim, 64 | 128) && widths && !biases && !dropout;
    Place::Card { fused: selected.name.starts_with("cuda") && dtype == DType::BF16 && taken }
}

/// The largest micro-batch that fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fit {
    /// The memory that there is.
    pub bytes: u64,
    /// The most rows that fit, whether or not a step has as many; `None` where not even one does.
    pub rows: Option<usize>,
    /// Tokens of a row.
    pub seq_len: usize,
    /// The estimate for so many rows, at least one.
    pub estimate: u64,
    /// The estimate for one row more.
    pub one_more: u64,
    /// Rows of a step on one device.
    pub rows_of_step: usize,
    /// The largest `data.micro_batch_size` that fits and divides the rows of a step.
    pub micro_batch_size: Option<usize>,
}

impl Display for Fit {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (room, estimate, seq_len) = (gib(self.bytes), gib(self.estimate), self.seq_len);
        let (Some(rows), Some(set)) = (self.rows, self.micro_batch_size) else {
            return write!(
                f,
                "Largest micro-batch in {room:.2} GiB: none, one row of {seq_len} tokens is estimated to take \
                 {estimate:.2} GiB\n  lower `data.seq_len`, switch `[model.ac]` on, or take a smaller model"
            );
        };
        let s = if rows == 1 { "" } else { "s" };
        writeln!(
            f,
            "Largest micro-batch in {room:.2} GiB: {rows} row{s} of {seq_len} tokens, estimated at {estimate:.2} GiB \
             (one more: {:.2} GiB)",
            gib(self.one_more)
        )?;
        let of_step = self.rows_of_step;
        match set == of_step {
            true => write!(
                f,
                "  set `data.micro_batch_size = {set}`: all rows that a device has in a step, at once"
            ),
            false => write!(
                f,
                "  set `data.micro_batch_size = {set}`: the largest that divides a step's {of_step} rows"
            ),
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use serde_json::json;

    use super::*;

    /// A run of `batch` rows a step, on the CPU or as if on a card.
    fn room(batch: usize, lora: bool, place: Place) -> Room {
        let text = json!({
            "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936,
            "tie_word_embeddings": true, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
        });
        let model = HfConfig::from_json(text.as_object().unwrap(), std::path::Path::new("x")).unwrap();
        let spec = lora.then(|| crate::model::LoraSpec::from_config(&crate::config::LoraConfig::default()));
        let sizes = crate::model::sizes(&model, spec.as_ref(), &burn::tensor::Device::flex()).unwrap();
        let load = Load {
            tokens: 512,
            longest: 512,
            sums: false,
            compute_bytes: 4,
            state_bytes: 8.0,
            in_place: true,
            recompute: None,
            place,
        };
        Room { model, sizes, load, rows: batch, rows_of_step: batch }
    }

    #[test]
    fn the_largest_micro_batch_fits_and_one_row_more_does_not() {
        let cpu = Place::Cpu { threads: 2 };
        for (lora, place) in [(true, cpu), (false, cpu), (true, Place::Card { fused: true })] {
            for batch in [1, 8, 128] {
                let room = room(batch, lora, place);
                for gib in [1, 2, 3, 5, 10, 12, 14, 24, 80, 640] {
                    let bytes = gib << 30;
                    let fits = |rows| room.memory(rows).total() <= bytes;
                    match room.largest(bytes) {
                        None => assert!(!fits(1), "{gib} GiB, {batch} rows a step"),
                        Some(rows) => assert!(fits(rows) && !fits(rows + 1), "{rows} rows in {gib} GiB"),
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_to_be_set_divides_the_rows_of_a_step() {
        let room = room(12, true, Place::Cpu { threads: 2 });
        let fit = room.fit(room.memory(5).total());
        assert_eq!((fit.rows, fit.micro_batch_size), (Some(5), Some(4)));
        let text = fit.to_string();
        assert!(
            text.contains("5 rows of 512 tokens") && text.contains("`data.micro_batch_size = 4`"),
            "{text}"
        );
        assert!(room.advice(room.memory(5).total()).contains("`data.micro_batch_size = 4`"));
        // Where the estimate was too low, still fewer rows than failed.
        assert!(room.advice(u64::MAX).contains("`data.micro_batch_size = 6`"));
        assert!(room.fit(1 << 20).to_string().contains("none, one row of 512 tokens"));
        assert!(room.advice(1 << 20).contains("not even one row"));
    }
}
