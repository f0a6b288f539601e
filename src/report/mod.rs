//! What a run tells while it trains: the [`Report`] trait, the plain reporter of a line a step, and the one of the
//! command, with Burn's dashboard on a terminal.
//!
//! The recipe calls `start` once, then `step` and `event` as they come, then `finish`. The row in
//! `metrics.jsonl` isn't a reporter's business: the recipe writes it whatever listens here.

use std::path::PathBuf;

mod axis;
mod curves;
#[cfg(feature = "tui")]
mod dashboard;
mod facts;
mod live;
pub mod log;
mod metrics;
mod monitors;
mod page;
mod plain;
mod plot;
mod sheet;

pub use curves::{Curves, Row, distinct_names, name_of_folder, run_folders};
pub use facts::RunFacts;
pub use live::Live;
pub use metrics::{PhaseTimes, StepMetrics, Summary, gib};
pub use monitors::Monitors;
pub use page::{Page, RunLine, duration, is_page, shell_quoted};
pub use plain::{LineFormat, Plain, thousands};
pub use plot::{Smoothing, is_picture, svg, write_png};

/// Listener of a run.
pub trait Report {
    /// Something long is under way, `done` of `total` (0: who knows how many; both 0: it has no parts): `loading
    /// weights`. It ends when all of `total` is done, or when something else is told.
    fn progress(&mut self, what: &str, done: usize, total: usize);
    /// Setup is done.
    fn start(&mut self, run: &RunInfo);
    /// A step is done.
    fn step(&mut self, metrics: &StepMetrics);
    /// Something else happened.
    fn event(&mut self, event: &Event);
    /// The run is over.
    fn finish(&mut self, summary: &Summary);
}

/// What is known once a run is set up.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RunInfo {
    /// The model as the configuration names it.
    pub model: String,
    /// The device, with the hardware's name where it has one.
    pub device: String,
    /// The type that layers compute in.
    pub dtype: String,
    /// All parameters.
    pub parameters: usize,
    /// Parameters that are trained.
    pub trainable: usize,
    /// What was adapted and what the data is, a line each.
    pub details: Vec<String>,
    /// Steps until the end, if there is one.
    pub max_steps: Option<usize>,
    /// Steps that are done already.
    pub resumed_step: Option<usize>,
    /// Steps of a pass over the data, where they have an end and the run is alone.
    pub steps_per_epoch: Option<f64>,
    /// Names of the runs, where there are several.
    pub runs: Vec<String>,
    /// Whether there will be samples.
    pub samples: bool,
    /// The run's folder.
    pub output_dir: PathBuf,
}

/// Something that happened beside the steps.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Worth knowing.
    Note(String),
    /// Worth doing something about.
    Warning(String),
    /// Held-out loss after `step` steps.
    Validation {
        /// The run, where there are several.
        run: Option<String>,
        /// Finished steps.
        step: usize,
        /// Mean loss over the trained tokens of the held-out set.
        loss: f64,
        /// Seconds it took.
        seconds: f64,
    },
    /// What the model answers to a prompt after `step` steps.
    Sample {
        /// The run, where there are several.
        run: Option<String>,
        /// Finished steps.
        step: usize,
        /// What was asked.
        prompt: String,
        /// The answer.
        text: String,
    },
    /// A folder was written.
    Saved {
        /// `checkpoint`, `adapter`, `weights` or `report`.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// Seconds it took.
        seconds: f64,
    },
}

/// Tells two listeners the same, e.g. the terminal and a log file.
#[derive(Debug)]
pub struct Both<A, B>(pub A, pub B);

impl<A: Report, B: Report> Report for Both<A, B> {
    fn progress(&mut self, what: &str, done: usize, total: usize) {
        self.0.progress(what, done, total);
        self.1.progress(what, done, total);
    }

    fn start(&mut self, run: &RunInfo) {
        self.0.start(run);
        self.1.start(run);
    }

    fn step(&mut self, metrics: &StepMetrics) {
        self.0.step(metrics);
        self.1.step(metrics);
    }

    fn event(&mut self, event: &Event) {
        self.0.event(event);
        self.1.event(event);
    }

    fn finish(&mut self, summary: &Summary) {
        self.0.finish(summary);
        self.1.finish(summary);
    }
}

impl<R: Report + ?Sized> Report for &mut R {
    fn progress(&mut self, what: &str, done: usize, total: usize) {
        (**self).progress(what, done, total);
    }

    fn start(&mut self, run: &RunInfo) {
        (**self).start(run);
    }

    fn step(&mut self, metrics: &StepMetrics) {
        (**self).step(metrics);
    }

    fn event(&mut self, event: &Event) {
        (**self).event(event);
    }

    fn finish(&mut self, summary: &Summary) {
        (**self).finish(summary);
    }
}

/// Tells of one run of several: what it says begins with its name.
pub struct Named<'a> {
    report: &'a mut dyn Report,
    name: Option<String>,
}

impl<'a> Named<'a> {
    /// `None`: a run alone, told as it is.
    pub fn new(report: &'a mut dyn Report, name: Option<&String>) -> Self {
        Self { report, name: name.cloned() }
    }
}

impl Report for Named<'_> {
    fn progress(&mut self, what: &str, done: usize, total: usize) {
        match &self.name {
            None => self.report.progress(what, done, total),
            Some(name) => self.report.progress(&format!("{name}: {what}"), done, total),
        }
    }

    fn start(&mut self, run: &RunInfo) {
        self.report.start(run);
    }

    fn step(&mut self, metrics: &StepMetrics) {
        self.report.step(metrics);
    }

    fn event(&mut self, event: &Event) {
        let Some(name) = &self.name else { return self.report.event(event) };
        self.report.event(&match event {
            Event::Note(text) => Event::Note(format!("{name}: {text}")),
            Event::Warning(text) => Event::Warning(format!("{name}: {text}")),
            &Event::Validation { step, loss, seconds, .. } => {
                Event::Validation { run: Some(name.clone()), step, loss, seconds }
            }
            Event::Sample { step, prompt, text, .. } => Event::Sample {
                run: Some(name.clone()),
                step: *step,
                prompt: prompt.clone(),
                text: text.clone(),
            },
            saved @ Event::Saved { .. } => saved.clone(),
        });
    }

    fn finish(&mut self, summary: &Summary) {
        self.report.finish(summary);
    }
}

/// Listens to nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quiet;

impl Report for Quiet {
    fn progress(&mut self, _: &str, _: usize, _: usize) {}
    fn start(&mut self, _: &RunInfo) {}
    fn step(&mut self, _: &StepMetrics) {}
    fn event(&mut self, _: &Event) {}
    fn finish(&mut self, _: &Summary) {}
}
