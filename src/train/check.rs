//! What a run would be, found out in seconds: configuration, data, sizes, and whether it can start. No
//! weights are read and nothing is written.

use std::fmt::{self, Display, Formatter};

use burn::tensor::DType;

use super::ranks::{Ranks, World};
use super::resume::Begun;
use super::setup;
use super::sft::StopFlag;
use crate::config::{OptimKind, Plan, SftConfig};
use crate::data::DataReport;
use crate::device::{Selected, compute_dtype};
use crate::model::{HfConfig, Load, LoraSpec, Memory, Sizes, sizes};
use crate::report::{Event, Report, RunInfo, StepMetrics, Summary, gib, thousands};
use crate::{Result, hub};

/// What [`check`] found.
#[derive(Debug, Clone)]
pub struct Checked {
    /// The model's name, and the device it would be trained on.
    pub model: String,
    /// Its sizes.
    pub sizes: Sizes,
    /// What the data are; no rows where they are made up.
    pub data: DataReport,
    /// Optimizer steps of the run.
    pub steps: usize,
    /// Tokens in a packed row.
    pub seq_len: usize,
    /// The estimate for one device.
    pub memory: Memory,
    /// Bytes that are free now, where that is known.
    pub free: Option<u64>,
    /// What the user should know before training.
    pub warnings: Vec<String>,
}

/// Does all that a run does before it reads weights.
///
/// # Errors
/// What would keep the run from starting.
pub fn check(config: &SftConfig) -> Result<Checked> {
    setup::check_folders(config)?;
    let plan = Plan::new(config, World::of(config)?.ranks())?;
    let mut warnings = Warnings::default();
    let selected = setup::device(config, &plan, &mut warnings)?;
    let dtype = compute_dtype(&selected, &config.model.dtype)?;
    let base = hub::config_dir(&config.model.name)?;
    let hf = HfConfig::load(&base)?;
    warnings.0.extend(plan.check_positions(hf.max_position_embeddings)?);
    let spec = config.model.lora.as_ref().map(LoraSpec::from_config);
    let sizes = sizes(&hf, spec.as_ref(), &selected.device)?;
    warnings.0.extend(sizes.warnings.iter().cloned());
    let data = setup::data(config, &base, &hf, &Ranks::alone(), &mut warnings, &StopFlag::default())?;
    let report = data.loader.report().clone();
    let steps = setup::last_step(config, &data.loader, 0);
    setup::schedule(config, &Begun::default(), steps)?;
    Ok(Checked {
        model: format!(
            "{} on {} in {}",
            config.model.name,
            selected.name,
            format!("{dtype:?}").to_lowercase()
        ),
        memory: Memory::estimate(&hf, sizes.counts, load(config, &plan, dtype)),
        sizes,
        steps,
        data: report,
        seq_len: plan.seq_len,
        free: free_bytes(&selected),
        warnings: warnings.0,
    })
}

fn load(config: &SftConfig, plan: &Plan, dtype: DType) -> Load {
    let full_in_half = config.model.lora.is_none() && config.model.optimization_dtype == "bfloat16";
    Load {
        tokens: plan.rows_per_micro_batch * plan.seq_len,
        compute_bytes: dtype.size(),
        trained_bytes: if full_in_half { 2 } else { 4 },
        optimizer_bytes: match config.optim.kind {
            OptimKind::AdamW { .. } => 8,
            OptimKind::Sgd { .. } | OptimKind::Muon { .. } => 4,
            OptimKind::SignSgd => 0,
        },
        recompute: config.model.ac.as_ref().map(|ac| ac.freq),
    }
}

/// The machine's free memory, where that is what the device has (Linux's `/proc/meminfo`).
fn free_bytes(selected: &Selected) -> Option<u64> {
    if selected.name != "flex" {
        return None;
    }
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

impl Checked {
    /// Whether the estimate is more than what is free.
    pub fn too_large(&self) -> bool {
        self.free.is_some_and(|free| self.memory.total() > free)
    }
}

impl Display for Checked {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let counts = self.sizes.counts;
        let adapters = match self.sizes.modules {
            0 => String::new(),
            modules => format!(", adapters on {modules} modules"),
        };
        writeln!(f, "Model: {}", self.model)?;
        writeln!(
            f,
            "  parameters  {}, trained {} ({:.2} %){}",
            thousands(counts.total),
            thousands(counts.trainable),
            percent(counts.trainable, counts.total),
            adapters
        )?;
        self.write_data(f)?;
        let Memory { weights, trained, activations, logits } = self.memory;
        let free = self.free.map(|free| format!("; free now: {:.2} GiB", gib(free))).unwrap_or_default();
        writeln!(f, "Memory of a device, an estimate: {:.2} GiB{free}", gib(self.memory.total()))?;
        let [weights, trained, activations, logits] = [weights, trained, activations, logits].map(gib);
        writeln!(
            f,
            "  weights {weights:.2}, trained parameters with gradients and optimizer {trained:.2}, \
             activations {activations:.2}, logits {logits:.2}"
        )?;
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        write!(f, "Verdict: {}", self.verdict())
    }
}

impl Checked {
    fn write_data(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let data = &self.data;
        if data.rows == 0 {
            return writeln!(f, "Data: made-up tokens, without end; {} steps", self.steps);
        }
        writeln!(f, "Data: {} of {} rows ({})", data.documents, data.rows, data.formats())?;
        let trained = percent(data.trained, data.tokens);
        writeln!(
            f,
            "  tokens      {}, trained {} ({trained:.1} %)",
            thousands(data.tokens),
            thousands(data.trained)
        )?;
        let most = data.lengths.values().copied().max().unwrap_or(1);
        for (i, (longest, documents)) in data.lengths.iter().enumerate() {
            let name = if i == 0 { "lengths" } else { "" };
            let bar = "#".repeat((40 * documents).div_ceil(most));
            writeln!(f, "  {name:<11} up to {longest:>6}: {documents:>8} {bar}")?;
        }
        let fill = 100.0 * data.fill;
        writeln!(
            f,
            "  packing     {} rows of {}, {fill:.1} % full (the last apart)",
            data.packed_rows, self.seq_len
        )?;
        let epoch = data.steps_per_epoch();
        let epochs = data.epochs(self.steps);
        writeln!(f, "  steps       {epoch} an epoch, {} in all ({epochs:.1} epochs)", self.steps)
    }

    fn verdict(&self) -> String {
        let warnings = match self.warnings.len() {
            0 => String::new(),
            1 => ", with a warning".into(),
            n => format!(", with {n} warnings"),
        };
        if self.too_large() {
            let hint = "lower `data.micro_batch_size` or `data.seq_len`, or switch `[model.ac]` on";
            return format!("it can start{warnings}, but the memory may not do: {hint}");
        }
        format!("ready to train{warnings}")
    }
}

fn percent(part: usize, whole: usize) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

/// Keeps warnings.
#[derive(Default)]
struct Warnings(Vec<String>);

impl Report for Warnings {
    fn progress(&mut self, _: &str, _: usize, _: usize) {}

    fn start(&mut self, _: &RunInfo) {}

    fn step(&mut self, _: &StepMetrics) {}

    fn event(&mut self, event: &Event) {
        if let Event::Warning(text) = event {
            self.0.push(text.clone());
        }
    }

    fn finish(&mut self, _: &Summary) {}
}
