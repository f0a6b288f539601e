//! Where else a run tells of itself, as `[monitors]` and `[heartbeat]` want it: TensorBoard's files, the standard input
//! of a command, a URL. Answers of the model go to `samples.jsonl` in any case. None of them slows a run down or
//! ends it: what goes wrong is told once, as a warning.

mod command;
#[cfg(feature = "hub")]
mod heartbeat;
mod tensorboard;

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::json;

use self::command::Command;
#[cfg(feature = "hub")]
use self::heartbeat::Heartbeat;
use self::tensorboard::EventFile;
use super::{Event, Report, RunInfo, StepMetrics, Summary};
use crate::config::SftConfig;

/// The listeners that a configuration asks for.
#[derive(Debug, Default)]
pub struct Monitors {
    root: PathBuf,
    tensorboard: bool,
    command: Vec<String>,
    #[cfg_attr(
        not(feature = "hub"),
        expect(dead_code, reason = "the configuration is refused without `hub`")
    )]
    url: Option<String>,
    /// By run; `None` where it couldn't be written.
    files: BTreeMap<Option<String>, Option<EventFile>>,
    running: Option<Command>,
    #[cfg(feature = "hub")]
    heartbeat: Option<Heartbeat>,
    resumed_step: usize,
    samples_failed: bool,
}

impl Monitors {
    /// Those of a job.
    pub fn new(config: &SftConfig) -> Self {
        Self {
            root: config.output_dir.clone(),
            tensorboard: config.monitors.tensorboard,
            command: config.monitors.command.clone(),
            url: config.heartbeat.as_ref().map(|heartbeat| heartbeat.url.clone()),
            ..Self::default()
        }
    }

    /// `name` and value of each number of a row of `run`, to TensorBoard.
    fn add_to_tensorboard(&mut self, run: Option<&String>, step: usize, row: &serde_json::Value) {
        if !self.tensorboard {
            return;
        }
        let (root, resumed) = (&self.root, self.resumed_step);
        let file = self.files.entry(run.cloned()).or_insert_with(|| {
            // A run that was added to a job begins at its own first step.
            let before = if run.is_some() { step.saturating_sub(1) } else { resumed };
            told(EventFile::create(&folder_of(root, run).join("tensorboard"), before), "TensorBoard's file")
        });
        let values = row.as_object().into_iter().flatten().filter(|(name, _)| *name != "step");
        let values: Vec<(&str, f64)> =
            values.filter_map(|(name, value)| Some((name.as_str(), value.as_f64()?))).collect();
        if let Some(open) = file
            && told(open.append(step, &values), "TensorBoard's file").is_none()
        {
            *file = None;
        }
    }

    fn sample(&mut self, run: Option<&String>, row: &serde_json::Value) {
        let path = folder_of(&self.root, run).join("samples.jsonl");
        let written = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(format!("{row}\n").as_bytes()));
        if let Err(error) = written
            && !std::mem::replace(&mut self.samples_failed, true)
        {
            tracing::warn!("{}: answers can't be kept: {error}", path.display());
        }
    }
}

/// The folder of a run, which among several has one of its own.
fn folder_of(root: &Path, run: Option<&String>) -> PathBuf {
    run.map_or(root.into(), |name| root.join("runs").join(name))
}

/// What came of something that the run doesn't depend on.
fn told<T>(result: std::io::Result<T>, what: &str) -> Option<T> {
    result.inspect_err(|error| tracing::warn!("{what} is left out from here on: {error}")).ok()
}

impl Report for Monitors {
    fn progress(&mut self, _: &str, _: usize, _: usize) {}

    fn start(&mut self, run: &RunInfo) {
        self.resumed_step = run.resumed_step.unwrap_or(0);
        if !self.command.is_empty() {
            self.running = told(Command::start(&self.command, &self.root), "`monitors.command`");
        }
        #[cfg(feature = "hub")]
        if let Some(url) = self.url.take() {
            self.heartbeat = Some(Heartbeat::start(url));
        }
    }

    fn step(&mut self, metrics: &StepMetrics) {
        #[cfg(feature = "hub")]
        if let Some(heartbeat) = &self.heartbeat {
            heartbeat.beat();
        }
        let row = metrics.to_json();
        self.add_to_tensorboard(metrics.run.as_ref(), metrics.step, &row);
        if let Some(command) = &mut self.running {
            command.send(row);
        }
    }

    fn event(&mut self, event: &Event) {
        match event {
            // Later ones stand in the row of their step.
            Event::Validation { run, step: 0, loss, .. } => {
                let mut row = json!({ "step": 0, "val/loss": loss });
                self.add_to_tensorboard(run.as_ref(), 0, &row);
                if let Some(name) = run {
                    row["run"] = json!(name);
                }
                if let Some(command) = &mut self.running {
                    command.send(row);
                }
            }
            Event::Sample { run, step, prompt, text } => {
                let mut row = json!({ "step": step, "prompt": prompt, "text": text });
                if let Some(name) = run {
                    row["run"] = json!(name);
                }
                self.sample(run.as_ref(), &row);
            }
            _ => {}
        }
    }

    fn finish(&mut self, _: &Summary) {}
}
