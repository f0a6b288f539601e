//! What the dashboard shows, as Burn's renderer takes it.
//!
//! Burn's layout is fixed: a plot for each number, and a column of texts in the order in which they first came, cut
//! off where the terminal ends. So what matters most comes first, and a text holds several numbers. A text's first
//! word is Burn's too: `Train`, `Valid`, or a run's name and `Test`.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_train::metric::{
    MetricAttributes, MetricDefinition, MetricEntry, MetricId, NumericAttributes, NumericEntry,
    SerializedEntry,
};
use burn_train::renderer::{EvaluationName, MetricState, MetricsRenderer};

use crate::report::{RunInfo, StepMetrics, gib, thousands};
use crate::terminal;

const LOSS: &str = "Loss";
const HELD_OUT: &str = "Held-out loss";
const SPEED: &str = "Speed";
const LOG: &str = "Log";
const SAMPLE: &str = "Sample";
const RATE: &str = "Learning rate";
const NORM: &str = "Gradient norm";
const MEMORY: &str = "Memory";
const MFU: &str = "MFU";

/// Doesn't end a line.
const SPACE: char = '\u{a0}';
/// Columns of a terminal whose texts hold loss, learning rate and norm in one line.
const WIDE: u16 = 110;
/// Log lines that are kept in sight.
const LINES: usize = 4;
/// Characters of a text that are shown.
const LONGEST: usize = 600;

/// Which of a metric's lines and series.
#[derive(Clone, Copy)]
enum Row<'a> {
    Train,
    Valid,
    Run(&'a str),
}

/// The state of what is shown.
pub(super) struct Panels {
    steps: Steps,
    steps_per_epoch: Option<f64>,
    /// Those that there are at first.
    runs: Vec<String>,
    samples: bool,
    output: String,
    /// The names that Burn knows, and how many values each plot got since its last cycle began.
    known: HashMap<String, usize>,
    round: Round,
    log: VecDeque<String>,
}

/// One step of each of several runs.
#[derive(Default)]
struct Round {
    runs: Vec<String>,
    tokens: usize,
    seconds: f64,
}

/// How far it is.
struct Steps {
    done: usize,
    resumed: usize,
    total: Option<usize>,
    /// Passes over the data; none: the steps alone are shown.
    laps: usize,
    /// When the first step of this process had ended, and which it was.
    first: Option<(Instant, usize)>,
}

impl Panels {
    pub fn new(run: &RunInfo) -> Self {
        Self {
            steps: Steps::new(run),
            steps_per_epoch: run.steps_per_epoch,
            runs: run.runs.clone(),
            samples: run.samples,
            output: format!("output in `{}`", run.output_dir.display()),
            known: HashMap::new(),
            round: Round::default(),
            log: VecDeque::new(),
        }
    }

    /// What Burn's estimate of the time begins at.
    pub fn starting_point(&self) -> Option<usize> {
        (self.steps.laps == 0).then_some(self.steps.resumed)
    }

    /// The texts in their order, before there is anything to say. Returns a name that the renderer holds while it
    /// lives, in more than two places once it has seen it.
    pub fn begin(&mut self, to: &mut dyn MetricsRenderer) -> Arc<String> {
        let name = self.register(to, LOSS, true);
        for name in [SPEED, RATE, NORM, MEMORY] {
            self.register(to, name, true);
        }
        match self.runs.is_empty() {
            true => Row::Train.update(to, MetricState::Numeric(entry(LOSS, "-"), None)),
            false => self.runs.iter().for_each(|run| {
                Row::Run(run).update(to, MetricState::Numeric(entry(LOSS, "-"), None));
            }),
        }
        Row::Train.update(to, MetricState::Numeric(entry(SPEED, "-"), None));
        self.line(to, &self.output.clone());
        if self.samples {
            self.text(to, SAMPLE, Row::Train, "-");
        }
        name
    }

    pub fn step(&mut self, to: &mut dyn MetricsRenderer, m: &StepMetrics) {
        let row = m.run.as_deref().map_or(Row::Train, Row::Run);
        let (loss, norm) = (Some(m.loss).filter(|_| !m.skipped), Some(m.grad_norm).filter(|_| !m.skipped));
        let text = match m.skipped {
            true => format!("step {} was skipped", m.step),
            false => {
                let mut parts = vec![format!("{:.4}", m.loss), format!("lr {:.2e}", m.lr)];
                if terminal::size().is_none_or(|(columns, _)| columns >= WIDE) {
                    parts.push(format!("norm {:.3}", m.grad_norm));
                }
                joined(parts)
            }
        };
        match &m.run {
            None => {
                self.speed(to, m, m.tokens, m.time.step());
                self.steps.done(m.step);
            }
            Some(run) => self.turn(to, m, run),
        }
        self.number(to, LOSS, row, loss, &text);
        if let Some(run) = &m.run {
            self.number(to, &of_run(run), Row::Train, loss, &text);
        }
        self.number(to, RATE, row, Some(m.lr), &format!("{:.2e}", m.lr));
        self.number(to, NORM, row, norm, &format!("{:.4}", m.grad_norm));
        self.steps.show(to, self.steps_per_epoch);
    }

    /// Held-out loss after `step`.
    pub fn held_out(&mut self, to: &mut dyn MetricsRenderer, run: Option<&str>, step: usize, loss: f64) {
        let text = joined([format!("{loss:.4}"), format!("step {step}")]);
        match run {
            None => {
                self.cycle(to, LOSS, Row::Valid);
                self.number(to, LOSS, Row::Valid, Some(loss), &text);
            }
            Some(run) => {
                self.number(to, HELD_OUT, Row::Run(run), Some(loss), &text);
                self.cycle(to, &of_run(run), Row::Valid);
                self.number(to, &of_run(run), Row::Valid, Some(loss), &text);
            }
        }
    }

    pub fn sample(
        &mut self,
        to: &mut dyn MetricsRenderer,
        (run, step): (Option<&str>, usize),
        prompt: &str,
        answer: &str,
    ) {
        let row = run.map_or(Row::Train, Row::Run);
        self.text(to, SAMPLE, row, &format!("step {step}: {prompt} ➡ {answer}"));
    }

    /// A line of the log.
    pub fn line(&mut self, to: &mut dyn MetricsRenderer, line: &str) {
        self.log.push_front(line.trim().to_string());
        self.log.truncate(LINES);
        let all = self.log.iter().map(String::as_str).collect::<Vec<_>>().join(" │ ");
        self.text(to, LOG, Row::Train, &all);
        if line.starts_with("warning: ") {
            to.log_event_training("Warnings".into());
        }
    }

    /// What is under way until the next step.
    pub fn doing(to: &mut dyn MetricsRenderer, what: &str) {
        // The numbers are those of the bars, which the next step sets.
        to.start(0, 0, None, Some(&shown(what)));
    }

    /// A run has its turn: the first of a round tells what the round before came to.
    fn turn(&mut self, to: &mut dyn MetricsRenderer, m: &StepMetrics, run: &str) {
        if self.round.runs.iter().any(|had| had == run) || self.steps.first.is_none() {
            let Round { tokens, seconds, runs } = std::mem::take(&mut self.round);
            if !runs.is_empty() {
                self.speed(to, m, tokens, seconds);
            }
            for name in [LOSS, RATE, NORM] {
                self.cycle(to, name, Row::Run(run));
            }
            self.steps.done(self.steps.done + 1);
        }
        self.round.runs.push(run.into());
        self.round.tokens += m.tokens;
        self.round.seconds = m.time.step();
    }

    fn speed(&mut self, to: &mut dyn MetricsRenderer, m: &StepMetrics, tokens: usize, seconds: f64) {
        let speed = if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        let mut parts = vec![format!("{} tokens/s", thousands(speed as usize))];
        if let Some(left) = self.steps.left() {
            parts.push(format!("{} left", duration(left)));
            let epoch = self.steps_per_epoch.and_then(|steps| self.steps.left_of_epoch(steps));
            parts.extend(epoch.map(|left| format!("{} of the epoch", duration(left))));
        }
        let memory = m.device_bytes.or(m.peak_bytes).map(gib);
        parts.extend(m.mfu.map(|mfu| format!("MFU {mfu:.1} %")));
        parts.extend(memory.map(|memory| format!("{memory:.2} GiB")));
        let text = joined(parts);
        self.number(to, SPEED, Row::Train, Some(speed), &text);
        if let Some(memory) = memory {
            self.number(to, MEMORY, Row::Train, Some(memory), &format!("{memory:.2} GiB"));
        }
        if let Some(mfu) = m.mfu {
            self.number(to, MFU, Row::Train, Some(mfu), &format!("{mfu:.1} %"));
        }
    }

    /// A value that is plotted, where it is finite, and what the text says of it.
    fn number(
        &mut self,
        to: &mut dyn MetricsRenderer,
        name: &str,
        row: Row<'_>,
        value: Option<f64>,
        text: &str,
    ) {
        self.register(to, name, true);
        *self.known.entry(name.into()).or_default() += 1;
        let value = value.filter(|value| value.is_finite()).map(NumericEntry::Value);
        row.update(to, MetricState::Numeric(entry(name, text), value));
    }

    /// Burn numbers a plot's values through, over all its series, and when there are many keeps those with even
    /// numbers: a series that has the odd ones stands still. With an odd count in each cycle nobody has them always.
    fn cycle(&mut self, to: &mut dyn MetricsRenderer, name: &str, row: Row<'_>) {
        let since = self.known.get_mut(name).map_or(0, std::mem::take);
        if since > 0 && since.is_multiple_of(2) {
            row.update(to, MetricState::Numeric(entry(name, ""), None));
        }
    }

    fn text(&mut self, to: &mut dyn MetricsRenderer, name: &str, row: Row<'_>, text: &str) {
        self.register(to, name, false);
        row.update(to, MetricState::Generic(entry(name, text)));
    }

    /// Makes a name known, before its first value.
    fn register(&mut self, to: &mut dyn MetricsRenderer, name: &str, plotted: bool) -> Arc<String> {
        let shared = Arc::new(name.to_string());
        if !self.known.contains_key(name) {
            self.known.insert(name.into(), 0);
            let attributes =
                if plotted { NumericAttributes::default().into() } else { MetricAttributes::None };
            let (metric_id, name) = (id(name), shared.clone());
            to.register_metric(MetricDefinition { metric_id, name, description: None, attributes });
        }
        shared
    }
}

impl Row<'_> {
    fn update(self, to: &mut dyn MetricsRenderer, state: MetricState) {
        match self {
            Row::Train => to.update_train(state),
            Row::Valid => to.update_valid(state),
            Row::Run(name) => to.update_test(EvaluationName::new(name), state),
        }
    }
}

impl Steps {
    fn new(run: &RunInfo) -> Self {
        let resumed = run.resumed_step.unwrap_or(0);
        let laps = run.max_steps.map_or(0, |total| laps(total, resumed, run.steps_per_epoch));
        Self { done: resumed, resumed, total: run.max_steps, laps, first: None }
    }

    fn done(&mut self, step: usize) {
        self.done = step;
        self.first.get_or_insert((Instant::now(), step));
    }

    /// What a step takes, everything between two steps included.
    fn each(&self) -> Option<Duration> {
        let (since, first) = self.first?;
        let steps = u32::try_from(self.done.checked_sub(first)?).ok().filter(|&steps| steps > 0)?;
        Some(since.elapsed() / steps)
    }

    /// Time to the end.
    fn left(&self) -> Option<Duration> {
        Some(self.each()?.mul_f64(self.total?.saturating_sub(self.done) as f64))
    }

    /// Time to the end of the epoch, where that isn't the end of all.
    fn left_of_epoch(&self, steps_per_epoch: f64) -> Option<Duration> {
        let end = (self.done as f64 / steps_per_epoch).floor().mul_add(steps_per_epoch, steps_per_epoch);
        let left = end - self.done as f64;
        (end < self.total? as f64).then_some(self.each()?.mul_f64(left))
    }

    /// Moves the bars. Burn wants to know the passes and the place in one; where the run doesn't end with a pass, its
    /// bars show the steps.
    fn show(&self, to: &mut dyn MetricsRenderer, steps_per_epoch: Option<f64>) {
        let Some(total) = self.total.filter(|_| self.done > self.resumed) else { return };
        let epochs = |steps: usize, each: f64| steps as f64 / each;
        let label = match steps_per_epoch {
            Some(each) => format!("epoch {:.1} of {:.1}", epochs(self.done, each), epochs(total, each)),
            None => format!("step {} of {total}", self.done),
        };
        let (lap, begin, end) = lap(self.done, total, self.laps);
        to.start(self.laps, lap + 1, None, Some(&label));
        to.start_split("train", end - begin);
        to.update_split(self.done - begin);
    }
}

/// Passes that a run of `total` steps makes; none where it ends within one that isn't its first, or began in the middle.
fn laps(total: usize, resumed: usize, steps_per_epoch: Option<f64>) -> usize {
    let Some(each) = steps_per_epoch.filter(|&each| each > 0.0 && resumed == 0) else { return 0 };
    if total as f64 <= each {
        return 1;
    }
    let passes = (total as f64 / each).round();
    if (passes * each - total as f64).abs() < 1.0 { passes as usize } else { 0 }
}

/// The pass, counted from 0, in which step `done` of `total` lies, and the steps before it and to its end: passes end in
/// the middle of a step where rows aren't a multiple of the batch.
fn lap(done: usize, total: usize, laps: usize) -> (usize, usize, usize) {
    if laps == 0 {
        return (0, 0, total);
    }
    let lap = ((done - 1) * laps / total).min(laps - 1);
    (lap, (lap * total).div_ceil(laps), ((lap + 1) * total).div_ceil(laps))
}

fn of_run(run: &str) -> String {
    format!("{LOSS} · {run}")
}

fn id(name: &str) -> MetricId {
    MetricId::new(Arc::new(name.into()))
}

fn entry(name: &str, text: &str) -> MetricEntry {
    MetricEntry::new(id(name), SerializedEntry::new(shown(text), String::new()))
}

/// `a · b · c`, which ends a line between its parts alone.
fn joined(parts: impl IntoIterator<Item = String>) -> String {
    let parts = parts.into_iter().map(|part| part.replace(' ', &SPACE.to_string()));
    parts.collect::<Vec<_>>().join(&format!("{SPACE}· "))
}

/// Text without what would steer the terminal, its beginning.
fn shown(text: &str) -> String {
    let mut shown: String = text
        .chars()
        .map(|c| match c {
            '\n' => '⏎',
            c if c.is_whitespace() && c != SPACE => ' ',
            c if c.is_control() => '\u{fffd}',
            c => c,
        })
        .take(LONGEST + 1)
        .collect();
    if shown.chars().count() > LONGEST {
        shown.pop();
        shown.push('…');
    }
    shown
}

/// `42s`, `3m 05s`, `2h 04m`, `5d 3h`
fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m {:02}s", seconds / 60, seconds % 60),
        3600..86400 => format!("{}h {:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d {}h", seconds / 86400, seconds / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_count_passes_where_the_run_ends_with_one() {
        assert_eq!(laps(30, 0, Some(10.0)), 3);
        assert_eq!(laps(31, 0, Some(10.4)), 3);
        assert_eq!(laps(5, 0, Some(10.4)), 1);
        assert_eq!(laps(15, 0, Some(10.0)), 0);
        assert_eq!(laps(30, 10, Some(10.0)), 0);
        assert_eq!(laps(30, 0, None), 0);
        for (total, passes) in [(60, laps(60, 0, Some(4.25))), (30, 3), (31, 3), (5, 1), (15, 0)] {
            let mut ended = 0;
            for done in 1..=total {
                let (pass, begin, end) = lap(done, total, passes);
                assert!(
                    begin < done && done <= end && (begin == ended || begin + 1 < done),
                    "{done} of {total}"
                );
                ended = if done == end { end } else { ended };
                assert!(done < total || (end == total && pass + 1 == passes.max(1)), "{done} of {total}");
            }
            assert_eq!(ended, total);
        }
    }

    #[test]
    fn nothing_steers_the_terminal() {
        assert_eq!(shown("a\nb\t\x1b[2J"), "a⏎b \u{fffd}[2J");
        assert_eq!(shown(&"é".repeat(LONGEST + 9)).chars().count(), LONGEST + 1);
    }

    #[test]
    fn times_are_short() {
        let of = |seconds| duration(Duration::from_secs(seconds));
        assert_eq!([of(9), of(185), of(7440), of(442_800)], ["9s", "3m 05s", "2h 04m", "5d 3h"]);
    }
}
