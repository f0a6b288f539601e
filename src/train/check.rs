//! What a run would be, found out in seconds: configuration, data, sizes, and whether it can start. No
//! weights are read and nothing is written.

use std::fmt::{self, Display, Formatter};

use super::fit::Fit;
use super::ground::{Ground, Purpose, check_folders};
use super::ranks::{Ranks, World};
use super::setup;
use super::sft::StopFlag;
use crate::config::{Plan, SftConfig};
use crate::data::DataReport;
use crate::model::{Memory, Sizes};
use crate::report::{Event, Report, RunInfo, StepMetrics, Summary, gib, thousands};
use crate::{Error, Result};

/// What [`check`] found.
#[derive(Debug)]
pub struct Checked {
    /// The model's name, and the device it would be trained on.
    pub model: String,
    /// Whether its weights are on this machine; their headers were held against its sizes then.
    pub has_weights: bool,
    /// Its sizes.
    pub sizes: Sizes,
    /// What the data are; no rows where they are made up.
    pub data: DataReport,
    /// Steps that are done already: those of the checkpoint that the run goes on from.
    pub done: usize,
    /// The step that the run ends at.
    pub steps: usize,
    /// Packed rows of a step.
    pub batch_size: usize,
    /// Tokens in a packed row.
    pub seq_len: usize,
    /// The estimate for one device.
    pub memory: Memory,
    /// Bytes that are free now, where that is known; or those that were given.
    pub free: Option<u64>,
    /// The largest micro-batch that fits, where that was asked.
    pub fit: Option<Fit>,
    /// Why the run can't begin in its folder, as it stands; all else is told as if the folder were empty.
    pub in_the_way: Option<Error>,
    /// What the user should know before training.
    pub warnings: Vec<String>,
}

/// What is asked beside whether a run can start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Asked {
    /// Which micro-batch is the largest that fits.
    pub fit: bool,
    /// The device's memory in bytes; `None`: what is free now.
    pub memory: Option<u64>,
}

/// Does all that a run does before it reads weights.
///
/// # Errors
/// What would keep the run from starting; too little memory only where it isn't asked what fits. A device that doesn't
/// say what is free, where what fits is asked without a number. A folder that can't be used as it is comes in
/// [`Checked::in_the_way`], or before the other error, in one with it.
pub fn check(config: &SftConfig, asked: Asked) -> Result<Checked> {
    check_folders(config)?;
    let plan = Plan::new(config, World::of(config)?.ranks())?;
    let mut warnings = Warnings::default();
    let (mut alone, stop) = (Ranks::alone(), StopFlag::default());
    let purpose = Purpose::Check { memory: asked.memory, fit: asked.fit };
    let found = Ground::survey(config, &plan, purpose, &mut alone, &mut warnings, &stop)?;
    let unknown = || {
        let message = format!("`{}` doesn't say how much memory is free", found.selected.name);
        Error::device(message, "say it: `check --fit --memory 24GiB`")
    };
    let fit = match (asked.fit, found.free) {
        (true, None) => return Err(unknown().after(found.in_the_way)),
        (true, Some(free)) => Some(found.room.fit(free)),
        (false, _) => None,
    };
    let dtype = format!("{:?}", found.dtype).to_lowercase();
    Ok(Checked {
        model: format!("{} on {} in {dtype}", config.model.name, found.selected.name),
        data: found.data.loader.report().clone(),
        done: found.begun.progress.step,
        steps: found.max_steps,
        seq_len: plan.seq_len,
        batch_size: config.data.batch_size(),
        has_weights: found.has_weights,
        sizes: found.sizes,
        memory: found.room.memory(found.room.rows),
        fit,
        free: found.free,
        in_the_way: found.in_the_way,
        warnings: warnings.0,
    })
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
        let Memory { weights, trained, activations, head, rest } = self.memory;
        let free = self.free.map(|free| format!("; free: {:.2} GiB", gib(free))).unwrap_or_default();
        writeln!(f, "Memory of a device, an estimate: {:.2} GiB{free}", gib(self.memory.total()))?;
        let [weights, trained, activations, head, rest] =
            [weights, trained, activations, head, rest].map(gib);
        writeln!(
            f,
            "  weights {weights:.2}, trained parameters with gradients and optimizer {trained:.2}, \
             activations {activations:.2}, head {head:.2}, the rest {rest:.2}"
        )?;
        if let Some(fit) = &self.fit {
            writeln!(f, "{fit}")?;
        }
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
        let (rows, seq_len) = (data.packed_rows, self.seq_len);
        match rows {
            1 => writeln!(
                f,
                "  packing     1 row of {seq_len}, {:.1} % of it filled",
                percent(data.tokens, seq_len)
            )?,
            _ => writeln!(
                f,
                "  packing     {rows} rows of {seq_len}, {:.1} % full (the last apart)",
                100.0 * data.fill
            )?,
        }
        let (epoch, steps, epochs) = (data.steps_per_epoch(), self.steps, data.epochs(self.steps));
        let done = if self.done > 0 { format!(", {} of them done", self.done) } else { String::new() };
        writeln!(f, "  steps       {epoch} an epoch, {steps} in all{done} ({epochs:.1} epochs)")
    }

    fn verdict(&self) -> String {
        let warnings = match self.warnings.len() {
            0 => String::new(),
            1 => ", with a warning".into(),
            n => format!(", with {n} warnings"),
        };
        if let Some(error) = &self.in_the_way {
            return format!("it can't start{warnings}: {error}");
        }
        if let Some(why) = setup::nothing_to_do(self.done, self.steps) {
            return format!("{why}{warnings}");
        }
        if self.too_large() {
            return format!("it can start{warnings}, but the memory may not do");
        }
        let once = if self.has_weights { "" } else { " once the weights are there" };
        format!("ready to train{once}{warnings}")
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
