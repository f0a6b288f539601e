//! A line a step, for terminals, files and pipes.

use std::io::Write;

use serde_json::json;
use tracing::Level;

use super::{Event, Report, RunInfo, StepMetrics, Summary, gib};

/// Loading fewer bytes than this isn't worth a line.
const SMALL: usize = 1 << 28;

/// How a line looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LineFormat {
    /// `Step 3 | Time: …`, for people.
    #[default]
    Text,
    /// One JSON object, for collectors (`log.json_logging`).
    Json,
}

/// Writes lines to `W`. A write that fails is dropped: a closed terminal must not end a run.
#[derive(Debug)]
pub struct Plain<W> {
    out: W,
    format: LineFormat,
    level: Level,
    /// The part of the progress that was last written.
    written: Option<usize>,
}

impl Plain<std::io::Stderr> {
    /// The reporter of the command line.
    pub fn stderr() -> Self {
        Self::new(std::io::stderr(), LineFormat::Text)
    }
}

impl<W: Write> Plain<W> {
    /// Lines of this format to any writer.
    pub fn new(out: W, format: LineFormat) -> Self {
        Self { out, format, level: Level::INFO, written: None }
    }

    /// Leaves out what is less important than `level` (steps and notes are `INFO`).
    #[must_use]
    pub fn from_level(mut self, level: Level) -> Self {
        self.level = level;
        self
    }

    fn line(&mut self, text: &str) {
        self.line_at(Level::INFO, text);
    }

    fn line_at(&mut self, level: Level, text: &str) {
        if level > self.level {
            return;
        }
        let text = match self.format {
            LineFormat::Text if level == Level::WARN => format!("warning: {text}"),
            LineFormat::Text => text.to_string(),
            LineFormat::Json => json!({ "level": level.as_str(), "message": text }).to_string(),
        };
        self.write(text);
    }

    /// In one piece, for others write too.
    fn write(&mut self, mut line: String) {
        line.push('\n');
        let _ = self.out.write_all(line.as_bytes()).and_then(|()| self.out.flush());
    }
}

impl<W: Write> Report for Plain<W> {
    fn progress(&mut self, what: &str, done: usize, total: usize) {
        // What is done at once is no news.
        let (part, line) = match total {
            0 => (done / 50_000, format!("{what}: {done}")),
            1..SMALL => return,
            _ => (10 * done / total, format!("{what}: {} %", 10 * (10 * done / total))),
        };
        if part > 0 && self.written != Some(part) {
            self.written = Some(part);
            self.line(&line);
        }
    }

    fn start(&mut self, run: &RunInfo) {
        let share = 100.0 * run.trainable as f64 / run.parameters.max(1) as f64;
        self.line(&format!("Model: {} on {} in {}", run.model, run.device, run.dtype));
        self.line(&format!(
            "Parameters: {} in all, {} trainable ({share:.2} %)",
            thousands(run.parameters),
            thousands(run.trainable)
        ));
        for detail in &run.details {
            self.line(detail);
        }
        if let Some(step) = run.resumed_step {
            self.line(&format!("Resuming after step {step}"));
        }
        let steps = run.max_steps.map_or("without end".to_string(), |n| format!("up to step {n}"));
        self.line(&format!("Training {steps}, output in `{}`", run.output_dir.display()));
    }

    fn step(&mut self, metrics: &StepMetrics) {
        match self.format {
            LineFormat::Text => self.line(&step_line(metrics)),
            LineFormat::Json if self.level >= Level::INFO => self.write(metrics.to_json().to_string()),
            LineFormat::Json => {}
        }
    }

    fn event(&mut self, event: &Event) {
        let line = match event {
            Event::Note(text) => text.clone(),
            Event::Warning(text) => return self.line_at(Level::WARN, text),
            Event::Validation { run, step, loss, seconds } => {
                let line = format!("Validation | Step {step} | Loss: {loss:.4} | Time: {seconds:.2}s");
                of_run(run.as_ref(), line)
            }
            Event::Sample { run, step, prompt, text } => {
                of_run(run.as_ref(), format!("Sample | Step {step} | {prompt} -> {text}"))
            }
            Event::Saved { what, path, seconds } => {
                format!("Saved {what} `{}` in {seconds:.2}s", path.display())
            }
        };
        self.line(&line);
    }

    fn finish(&mut self, summary: &Summary) {
        if !summary.runs.is_empty() {
            self.line(&table(summary));
        }
        if summary.runs.is_empty() {
            self.outcome(summary);
        }
        if let Some(bytes) = summary.peak_bytes {
            self.line(&format!("Peak memory: {:.2} GiB", gib(bytes)));
        }
    }
}

impl<W: Write> Plain<W> {
    /// What a run alone came to.
    fn outcome(&mut self, summary: &Summary) {
        let loss = match (summary.first_loss, summary.last_loss) {
            (Some(first), Some(last)) => format!(", loss {first:.4} -> {last:.4}"),
            _ => String::new(),
        };
        let steps = summary.steps - summary.resumed_step;
        let s = if steps == 1 { "" } else { "s" };
        let all = match summary.resumed_step {
            0 => String::new(),
            _ => format!(", {} in all", summary.steps),
        };
        self.line(&format!("Done: {steps} step{s} in {:.1}s{all}{loss}", summary.seconds));
        if let (Some(first), Some(last)) = (summary.first_val_loss, summary.last_val_loss) {
            self.line(&format!("Held-out loss {first:.4} -> {last:.4}"));
        }
    }
}

/// The runs of a job, a line each, the best first.
fn table(summary: &Summary) -> String {
    let width = summary.runs.iter().map(|(name, _)| name.len()).max().unwrap_or(0).max(4);
    let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.4}"));
    let mut text = format!(
        "Done in {:.1}s\n{:width$}  {:>6}  {:>9}  {:>13}  adapter",
        summary.seconds, "run", "steps", "last loss", "held-out loss"
    );
    for (name, run) in &summary.runs {
        let mut adapter = run.adapter.as_ref().map_or(String::new(), |path| path.display().to_string());
        if run.failed {
            adapter += " (stopped by an error)";
        }
        let (loss, held_out) = (number(run.last_loss), number(run.last_val_loss));
        text += &format!("\n{name:width$}  {:>6}  {loss:>9}  {held_out:>13}  {adapter}", run.steps);
    }
    text
}

/// `Step 3 | Time: 0.52s | Loss: 2.1234 | …`, in the order of prime-rl's line.
fn step_line(m: &StepMetrics) -> String {
    of_run(m.run.as_ref(), line_of_one(m))
}

/// A line of one run of several begins with its name.
fn of_run(run: Option<&String>, line: String) -> String {
    run.map_or(line.clone(), |run| format!("{run} | {line}"))
}

fn line_of_one(m: &StepMetrics) -> String {
    if m.skipped && m.trained_tokens > 0 {
        return format!("Step {} | skipped: its loss or gradient is not finite", m.step);
    }
    if m.skipped {
        return format!("Step {} | skipped: no trained token in its {} tokens", m.step, m.tokens);
    }
    let mut line = format!(
        "Step {} | Time: {:.2}s | Loss: {:.4} | Grad. Norm: {:.4} | LR: {:.2e} | \
         Throughput: {:.0} tokens/s ({:.0} trained)",
        m.step,
        m.time.step(),
        m.loss,
        m.grad_norm,
        m.lr,
        m.throughput(),
        m.trained_throughput()
    );
    if let Some(mfu) = m.mfu {
        line += &format!(" | MFU: {mfu:.1}%");
    }
    if let Some(bytes) = m.device_bytes.or(m.peak_bytes) {
        line += &format!(" | Peak Mem.: {:.2} GiB", gib(bytes));
    }
    line
}

/// `1234567` as `1,234,567`.
/// `1,234,567`
pub fn thousands(n: usize) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::PhaseTimes;

    fn metrics() -> StepMetrics {
        StepMetrics {
            step: 3,
            loss: 2.12345,
            grad_norm: 0.5,
            lr: 5e-4,
            tokens: 1024,
            trained_tokens: 512,
            time: PhaseTimes { forward_backward: 0.5, ..Default::default() },
            ..Default::default()
        }
    }

    #[test]
    fn a_line_a_step() {
        let mut out = Vec::new();
        Plain::new(&mut out, LineFormat::Text).step(&metrics());
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "Step 3 | Time: 0.50s | Loss: 2.1235 | Grad. Norm: 0.5000 | LR: 5.00e-4 | \
             Throughput: 2048 tokens/s (1024 trained)\n"
        );
    }

    #[test]
    fn a_resumed_run_counts_its_own_steps() {
        let mut out = Vec::new();
        let summary = Summary { steps: 6, resumed_step: 3, seconds: 2.0, ..Summary::default() };
        Plain::new(&mut out, LineFormat::Text).finish(&summary);
        assert_eq!(String::from_utf8(out).unwrap(), "Done: 3 steps in 2.0s, 6 in all\n");
    }

    #[test]
    fn a_skipped_step_says_so() {
        let line = step_line(&StepMetrics { skipped: true, trained_tokens: 0, ..metrics() });
        assert!(line.contains("skipped: no trained token"), "{line}");
    }

    #[test]
    fn json_lines_are_json() {
        let mut out = Vec::new();
        let mut report = Plain::new(&mut out, LineFormat::Json);
        report.step(&metrics());
        report.event(&Event::Note("a \"note\"".into()));
        for line in String::from_utf8(out).unwrap().lines() {
            assert!(serde_json::from_str::<serde_json::Value>(line).is_ok(), "{line}");
        }
    }

    #[test]
    fn digits_in_groups() {
        assert_eq!(thousands(7), "7");
        assert_eq!(thousands(1_234_567), "1,234,567");
    }
}
