//! The picture of one or several runs: training and held-out loss, and below them the learning rate, the norm of the
//! gradient and tokens/s.
//!
//! Training loss is faint where it is noisy, with its smoothed curve over it; held-out loss has points. A run alone has
//! a colour for each of the two, several have a colour and a shape of points each, those after the eighth dashes too.
//! Of more than four runs the smoothed curves alone are drawn.

use std::path::Path;

use plotters::prelude::DrawingBackend;

use super::axis::{Axis, most_of, wider};
use super::curves::{Curves, Row, limits, smoothed, smoothed_if_noisy, thinned};
use super::page::start_of;
use super::sheet::{self, Beside, Dashes, Drawing, GRID, Ink, MUTED, Mark, RUNS, Sheet, TEXT, text_width};
use crate::{Error, Result};

const WIDTH: f64 = 900.0;
/// The left and right ends of panels.
const LEFT: f64 = 52.0;
const RIGHT: f64 = WIDTH - 18.0;
const LETTERS: f64 = 13.0;
const SMALL_LETTERS: f64 = 11.5;
/// More points than this aren't told apart in a panel.
const MOST_POINTS: usize = 1600;
/// Points with a mark, of a curve.
const MOST_MARKS: usize = 30;
/// The noise of more runs than this hides what is behind it.
const MOST_NOISY: usize = 4;

/// How much training loss is smoothed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Smoothing {
    /// Where it is noisy, by a window that fits the length of the run.
    #[default]
    Auto,
    /// The mean over so many steps; up to 1 is not at all.
    Steps(usize),
}

/// The picture as an SVG, 900 pixels wide, that needs nothing else.
///
/// # Errors
/// There is nothing to draw.
pub fn svg(runs: &[Curves], smoothing: Smoothing) -> Result<String> {
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    sheet::svg(&Picture::new(runs, smoothing)?, &format!("Loss curves of {}", names.join(", ")))
}

/// Whether a file is such an SVG.
pub fn is_picture(path: &Path) -> bool {
    start_of(path).is_some_and(|start| start.starts_with("<svg ") && start.contains(sheet::CLASS))
}

/// The picture as a PNG, 1800 pixels wide.
///
/// # Errors
/// There is nothing to draw, or the file can't be written.
pub fn write_png(runs: &[Curves], smoothing: Smoothing, path: &Path) -> Result<()> {
    sheet::write_png(&Picture::new(runs, smoothing)?, path)
}

struct Picture {
    height: f64,
    legend: Vec<Entry>,
    panels: Vec<Panel>,
}

/// A sample of a line, what it is, and where it stands.
struct Entry {
    text: String,
    line: Option<(Ink, f64)>,
    dashes: Dashes,
    mark: Option<(Mark, Ink)>,
    place: (f64, f64),
}

struct Panel {
    title: &'static str,
    letters: f64,
    x: Axis,
    y: Axis,
    curves: Vec<Curve>,
    /// Left, top, right, bottom.
    place: [f64; 4],
}

struct Curve {
    /// Points, in stretches without a gap.
    stretches: Vec<Vec<(f64, f64)>>,
    ink: Ink,
    width: f64,
    dashes: Dashes,
    mark: Option<Mark>,
}

impl Curve {
    fn whole(points: Vec<(f64, f64)>, ink: Ink, width: f64) -> Self {
        Self {
            stretches: vec![thinned(points, MOST_POINTS)],
            ink,
            width,
            dashes: Dashes::default(),
            mark: None,
        }
    }

    /// With a gap where a value is missing.
    fn with_gaps(series: &[(f64, Option<f64>)], ink: Ink, width: f64) -> Self {
        let there = series.split(|point| point.1.is_none()).filter(|stretch| !stretch.is_empty());
        let points = |stretch: &[(f64, Option<f64>)]| {
            thinned(stretch.iter().filter_map(|&(x, y)| Some((x, y?))).collect(), MOST_POINTS)
        };
        let stretches = there.map(points).collect();
        Self { stretches, ink, width, dashes: Dashes::default(), mark: None }
    }

    /// What is drawn of a noisy curve: itself, or where there are many runs its smoothed one.
    fn calm(runs: usize, series: &[(f64, Option<f64>)], ink: Ink, width: f64) -> Self {
        let points: Vec<_> = series.iter().filter_map(|&(x, y)| Some((x, y?))).collect();
        match smoothed_if_noisy(&points).filter(|_| runs > MOST_NOISY) {
            Some(smooth) => Self::whole(smooth, ink, width),
            None => Self::with_gaps(series, ink, width),
        }
    }
}

/// The colour, dashes and points of a run.
fn look(index: usize) -> (Ink, Dashes, Mark) {
    let (color, round) = (index % RUNS.len(), index / RUNS.len());
    (RUNS[color], Dashes::of_round(round), Mark::ALL[(index + round) % Mark::ALL.len()])
}

impl Picture {
    fn new(runs: &[Curves], smoothing: Smoothing) -> Result<Self> {
        let mut x: Range = None;
        for run in runs {
            let steps = [run.rows.keys().next(), run.rows.keys().next_back()];
            x = wider(x, steps[0].zip(steps[1]).map(|(first, last)| (*first as f64, *last as f64)));
        }
        let (from, to) = x.ok_or_else(nothing)?;
        let mut kinds = Kinds::default();
        let loss = loss_panel(runs, smoothing, &mut kinds, Axis::of_steps(from, to, 10));
        let x = || Axis::of_steps(from, to, 4);
        let others = [
            small_panel(runs, "learning rate", |row| row.lr, limits, x()),
            small_panel(runs, "gradient norm", |row| row.grad_norm, most_of, x()),
            small_panel(runs, "tokens/s", |row| row.throughput.filter(|_| !row.skipped), most_of, x()),
        ];
        let others: Vec<Panel> = others.into_iter().flatten().collect();
        if loss.is_none() && others.is_empty() {
            return Err(nothing());
        }
        let mut legend = legend(runs, &kinds);
        let mut y = place_legend(&mut legend) + 34.0;
        let mut panels = Vec::new();
        if let Some(mut panel) = loss {
            panel.place = [LEFT, y, RIGHT, y + 300.0];
            panels.push(panel);
            y += 300.0 + 68.0;
        }
        let share = WIDTH / others.len().max(1) as f64;
        let height = if others.is_empty() { y - 28.0 } else { y + 110.0 + 44.0 };
        for (n, mut panel) in others.into_iter().enumerate() {
            let start = n as f64 * share;
            panel.place = [start + LEFT, y, start + share - (WIDTH - RIGHT), y + 110.0];
            panels.push(panel);
        }
        Ok(Self { height, legend, panels })
    }
}

fn nothing() -> Error {
    let hint = "a row has `loss/mean` or `val/loss` at least, as docs/metrics.md says";
    Error::train("there is nothing to draw: no row holds a number that is plotted", hint)
}

/// Which kinds of lines there are, for the legend.
#[derive(Default)]
struct Kinds {
    training: bool,
    /// As it is, behind its smoothed curve.
    noisy: bool,
    smoothed: bool,
    held_out: bool,
}

fn loss_panel(runs: &[Curves], smoothing: Smoothing, kinds: &mut Kinds, x: Axis) -> Option<Panel> {
    let (mut behind, mut between, mut before) = (Vec::new(), Vec::new(), Vec::new());
    let mut range = None;
    for (index, run) in runs.iter().enumerate() {
        let (ink, dashes, mark) = look(index);
        let raw = run.points(|row| row.loss);
        let smooth = match smoothing {
            Smoothing::Auto => smoothed_if_noisy(&raw),
            Smoothing::Steps(width) => (width > 1 && raw.len() > 2).then(|| smoothed(&raw, width)),
        };
        kinds.training |= !raw.is_empty();
        let series = run.series(|row| row.loss);
        if smooth.is_none() || runs.len() <= MOST_NOISY {
            range = wider(range, most_of(&raw));
        }
        match smooth {
            Some(smooth) => {
                kinds.smoothed = true;
                range = wider(range, limits(&smooth));
                if runs.len() <= MOST_NOISY {
                    kinds.noisy = true;
                    behind.push(Curve::with_gaps(&series, ink.faint(), 1.0));
                }
                between.push(Curve { dashes, ..Curve::whole(smooth, ink, 1.75) });
            }
            None => between.push(Curve { dashes, ..Curve::with_gaps(&series, ink, 1.5) }),
        }
        let held_out = run.points(|row| row.val_loss);
        if !held_out.is_empty() {
            kinds.held_out = true;
            range = wider(range, limits(&held_out));
            let ink = if runs.len() == 1 { RUNS[1] } else { ink };
            before.push(Curve { mark: Some(mark), dashes, ..Curve::whole(held_out, ink, 2.25) });
        }
    }
    let (low, high) = range?;
    let curves = behind.into_iter().chain(between).chain(before).collect();
    let y = Axis::of_values(low, high, 6, false);
    Some(Panel { title: "loss (nats a trained token)", letters: LETTERS, x, y, curves, place: [0.0; 4] })
}

type Range = Option<(f64, f64)>;

fn small_panel(
    runs: &[Curves],
    title: &'static str,
    value: fn(&Row) -> Option<f64>,
    range: fn(&[(f64, f64)]) -> Range,
    x: Axis,
) -> Option<Panel> {
    let curve = |(index, run): (usize, &Curves)| {
        let (ink, dashes, _) = look(index);
        Curve { dashes, ..Curve::calm(runs.len(), &run.series(value), ink, 1.25) }
    };
    let curves: Vec<Curve> = runs.iter().enumerate().map(curve).collect();
    let drawn = curves.iter().map(|curve| range(&curve.stretches.concat()));
    let (low, high) = drawn.reduce(wider)??;
    let y = Axis::of_values(low, high, 5, true);
    Some(Panel { title, letters: SMALL_LETTERS, x, y, curves, place: [0.0; 4] })
}

fn legend(runs: &[Curves], kinds: &Kinds) -> Vec<Entry> {
    let entry = |text: &str, line, mark| Entry {
        text: text.into(),
        line,
        dashes: Dashes::default(),
        mark,
        place: (0.0, 0.0),
    };
    let alone = runs.len() == 1;
    let mut entries: Vec<Entry> = match runs {
        [run] => vec![entry(&run.name, None, None)],
        _ => {
            let of_run = |(index, run): (usize, &Curves)| {
                let (ink, dashes, mark) = look(index);
                let points = run.rows.values().any(|row| row.val_loss.is_some());
                let mark = points.then_some((mark, ink));
                Entry { dashes, ..entry(&run.name, Some((ink, 2.25)), mark) }
            };
            runs.iter().enumerate().map(of_run).collect()
        }
    };
    let (training, held_out) = if alone { (RUNS[0], RUNS[1]) } else { (MUTED, MUTED) };
    if kinds.noisy {
        entries.push(entry("training", Some((training.faint(), 1.0)), None));
        entries.push(entry("smoothed", Some((training, 1.75)), None));
    } else if kinds.training {
        let text = if kinds.smoothed { "training, smoothed" } else { "training" };
        entries.push(entry(text, Some((training, 1.75)), None));
    }
    if kinds.held_out {
        entries.push(entry("held out", Some((held_out, 2.25)), Some((Mark::Disc, held_out))));
    }
    entries
}

/// Puts entries into lines, and returns the height of the last.
fn place_legend(entries: &mut [Entry]) -> f64 {
    let (mut x, mut y) = (LEFT, 20.0);
    for entry in entries {
        let sample = if entry.line.is_some() { 32.0 } else { 0.0 };
        while text_width(&entry.text, LETTERS) + sample > RIGHT - LEFT {
            entry.text = shortened(&entry.text);
        }
        let width = sample + text_width(&entry.text, LETTERS);
        if x > LEFT && x + width > RIGHT {
            (x, y) = (LEFT, y + 22.0);
        }
        entry.place = (x, y);
        x += width + 22.0;
    }
    y
}

/// A name without a letter of its middle.
fn shortened(name: &str) -> String {
    let letters: Vec<char> = name.chars().filter(|c| *c != '…').collect();
    let half = letters.len() / 2;
    let (start, end) = (&letters[..half.saturating_sub(1)], &letters[half..]);
    start.iter().chain(&['…']).chain(end).collect()
}

impl Drawing for Picture {
    fn size(&self) -> (u32, u32) {
        (WIDTH as u32, self.height as u32)
    }

    fn draw<D: DrawingBackend>(&self, sheet: &Sheet<'_, D>) -> Result<(), String> {
        for entry in &self.legend {
            entry.draw(sheet)?;
        }
        self.panels.iter().try_for_each(|panel| panel.draw(sheet))
    }
}

impl Entry {
    fn draw<D: DrawingBackend>(&self, sheet: &Sheet<'_, D>) -> Result<(), String> {
        let (x, y) = self.place;
        if let Some((ink, width)) = self.line {
            sheet.dashed(&[(x, y), (x + 26.0, y)], ink, width, self.dashes)?;
        }
        if let Some((mark, ink)) = self.mark {
            sheet.mark((x + 13.0, y), mark, ink)?;
        }
        let sample = if self.line.is_some() { 32.0 } else { 0.0 };
        sheet.text(&self.text, (x + sample, y), LETTERS, TEXT, Beside::Right)
    }
}

impl Panel {
    fn draw<D: DrawingBackend>(&self, sheet: &Sheet<'_, D>) -> Result<(), String> {
        let [left, top, right, bottom] = self.place;
        let size = self.letters;
        let at = |x: f64, y: f64| {
            (left + self.x.part(x) * (right - left), bottom - self.y.part(y) * (bottom - top))
        };
        sheet.text(self.title, (left, top - 14.0), size, MUTED, Beside::Right)?;
        for (value, text) in &self.y.ticks {
            let (_, y) = at(self.x.low, *value);
            sheet.line(&[(left, y), (right, y)], GRID, 1.0)?;
            sheet.text(text, (left - 7.0, y), size, TEXT, Beside::Left)?;
        }
        for (value, text) in &self.x.ticks {
            let (x, _) = at(*value, self.y.low);
            sheet.line(&[(x, bottom), (x, bottom + 4.0)], MUTED, 1.0)?;
            sheet.text(text, (x, bottom + 6.0 + size / 2.0), size, TEXT, Beside::Middle)?;
        }
        sheet.line(&[(left, bottom), (right, bottom)], MUTED, 1.0)?;
        sheet.text("step", ((left + right) / 2.0, bottom + 2.4 * size), size, MUTED, Beside::Middle)?;
        for curve in &self.curves {
            for stretch in &curve.stretches {
                let points: Vec<_> = stretch.iter().map(|&(x, y)| at(x, y)).collect();
                sheet.dashed(&points, curve.ink, curve.width, curve.dashes)?;
            }
        }
        // Points of one run aren't hidden by the line of another.
        for curve in &self.curves {
            let Some(mark) = curve.mark else { continue };
            let points: Vec<_> = curve.stretches.iter().flatten().collect();
            let every = points.len().div_ceil(MOST_MARKS).max(1);
            for (x, y) in points.iter().rev().step_by(every) {
                sheet.mark(at(*x, *y), mark, curve.ink)?;
            }
        }
        Ok(())
    }
}
