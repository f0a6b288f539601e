//! The curves of a run, read from its `metrics.jsonl`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::{Error, Result};

/// A row of `metrics.jsonl`, as far as it is drawn or told of. What a row lacks, or has as `null`, is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Row {
    #[serde(deserialize_with = "finite")]
    step: Option<f64>,
    /// Loss of the step.
    #[serde(rename = "loss/mean", deserialize_with = "finite")]
    pub loss: Option<f64>,
    /// Held-out loss after the step.
    #[serde(rename = "val/loss", deserialize_with = "finite")]
    pub val_loss: Option<f64>,
    /// Learning rate.
    #[serde(rename = "optim/lr", deserialize_with = "finite")]
    pub lr: Option<f64>,
    /// Norm of the gradient before clipping.
    #[serde(rename = "optim/grad_norm", deserialize_with = "finite")]
    pub grad_norm: Option<f64>,
    /// Tokens per second.
    #[serde(rename = "perf/throughput", deserialize_with = "finite")]
    pub throughput: Option<f64>,
    /// Tokens so far.
    #[serde(rename = "progress/num_tokens", deserialize_with = "finite")]
    pub tokens: Option<f64>,
    /// Trained tokens so far.
    #[serde(rename = "progress/num_trained_tokens", deserialize_with = "finite")]
    pub trained_tokens: Option<f64>,
    /// Peak memory of the process in GiB.
    #[serde(rename = "perf/peak_memory", deserialize_with = "finite")]
    pub peak_memory: Option<f64>,
    /// GiB held on the device.
    #[serde(rename = "perf/device_memory", deserialize_with = "finite")]
    pub device_memory: Option<f64>,
    /// Seconds of the step.
    #[serde(rename = "time/step", deserialize_with = "finite")]
    pub seconds: Option<f64>,
    /// Nothing was updated.
    pub skipped: bool,
}

/// Numbers as they are; what is no number, and infinity, as absent.
fn finite<'de, D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Option<f64>, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    Ok(value.as_f64().filter(|value| value.is_finite()))
}

/// The rows of one run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Curves {
    /// What the run is called.
    pub name: String,
    /// Where they were read.
    pub file: PathBuf,
    /// Its rows by step; of two rows of a step the later one counts.
    pub rows: BTreeMap<usize, Row>,
    /// Lines that are no rows, and the number of the first of them; a last line that a kill cut off doesn't count.
    pub unreadable: Option<(usize, usize)>,
}

impl Curves {
    /// Reads a file in the format of `metrics.jsonl`.
    ///
    /// # Errors
    /// It can't be read, or holds no row at all.
    pub fn read(path: &Path, name: &str) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io(path, "read", e))?;
        // Names come from folders, which may be called anything.
        let name = name.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let mut curves = Curves { name, file: path.into(), ..Curves::default() };
        let mut number = 0;
        let mut wrong = Vec::new();
        for line in BufReader::new(file).split(b'\n') {
            let line = line.map_err(|e| Error::io(path, "read", e))?;
            number += 1;
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            match row(&line) {
                Some((step, row)) => drop(curves.rows.insert(step, row)),
                None => wrong.push(number),
            }
        }
        if curves.rows.is_empty() {
            let (row, message) = match wrong.first() {
                Some(&first) => (Some(first), "this is no row with a `step`, and nor is any other line"),
                None => (None, "the file is empty, wanted a row a step"),
            };
            return Err(Error::data(path, row, message, "name a run's folder or its `metrics.jsonl`"));
        }
        wrong.retain(|&line| line != number);
        curves.unreadable = wrong.first().map(|&first| (wrong.len(), first));
        Ok(curves)
    }

    /// The runs that `path` names: a file of rows, a run's folder, or a job's with runs in `runs/NAME`. Those of a job
    /// that have no row yet are left out.
    ///
    /// # Errors
    /// There is none, or its rows can't be read.
    pub fn find(path: &Path) -> Result<Vec<Self>> {
        if !path.is_dir() {
            return Ok(vec![Self::read(path, &name_of_file(path))?]);
        }
        let file = path.join("metrics.jsonl");
        let mut found = Vec::new();
        if file.exists() {
            found.push(Self::read(&file, &name_of_folder(path))?);
        }
        for folder in run_folders(path)? {
            let file = folder.join("metrics.jsonl");
            if std::fs::metadata(&file).is_ok_and(|data| data.len() > 0) {
                found.push(Self::read(&file, &name_of_folder(&folder))?);
            }
        }
        if found.is_empty() {
            let message = "there is no `metrics.jsonl` here, nor in a folder of `runs`";
            return Err(Error::data(path, None, message, "name the `output_dir` of a run"));
        }
        Ok(found)
    }

    /// A value by step. `None` where the row has none: a step that was skipped, or one before which only the held-out
    /// loss was measured.
    pub fn series(&self, value: impl Fn(&Row) -> Option<f64>) -> Vec<(f64, Option<f64>)> {
        let rows = self.rows.iter().filter(|(step, row)| **step > 0 || value(row).is_some());
        rows.map(|(step, row)| (*step as f64, value(row))).collect()
    }

    /// The values that there are, by step.
    pub fn points(&self, value: impl Fn(&Row) -> Option<f64>) -> Vec<(f64, f64)> {
        self.series(value).into_iter().filter_map(|(step, value)| Some((step, value?))).collect()
    }

    /// What there is to warn of: lines of the file that are no rows.
    pub fn warning(&self) -> Option<String> {
        let (lines, first) = self.unreadable?;
        let rest = match lines - 1 {
            0 => "it is left out".to_string(),
            more => format!("it is left out, and {more} more like it"),
        };
        Some(format!("{}:{first}: this is no row with a `step`; {rest}", self.file.display()))
    }

    /// The last step.
    pub fn last_step(&self) -> usize {
        self.rows.keys().next_back().copied().unwrap_or(0)
    }
}

/// The folders of a job's runs, in the order of their names.
///
/// # Errors
/// `runs` is there and can't be read.
pub fn run_folders(root: &Path) -> Result<Vec<PathBuf>> {
    let runs = root.join("runs");
    if !runs.is_dir() {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(&runs).map_err(|e| Error::io(&runs, "list", e))?;
    let mut folders: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    folders.retain(|folder| folder.join("metrics.jsonl").exists());
    folders.sort();
    Ok(folders)
}

/// Gives runs of one name more of their path, until names tell all of them apart: `a/out` and `b/out`.
pub fn distinct_names(runs: &mut [Curves]) {
    for parts in 2.. {
        let names: Vec<String> = runs.iter().map(|run| run.name.clone()).collect();
        let again = |name: &str| names.iter().filter(|known| *known == name).count() > 1;
        let mut longer = false;
        for run in runs.iter_mut().filter(|run| again(&run.name)) {
            let file = run.file.with_extension("");
            let whole = if file.ends_with("metrics") { file.parent().unwrap_or(&file) } else { &file };
            let all: Vec<_> = whole.iter().map(|part| part.to_string_lossy().into_owned()).collect();
            longer |= parts <= all.len();
            run.name = all[all.len().saturating_sub(parts)..].join("/");
        }
        if !longer {
            return;
        }
    }
}

fn name_of_file(path: &Path) -> String {
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    if stem == "metrics" { name_of_folder(path.parent().unwrap_or(path)) } else { stem }
}

/// The last part of a path, also of `.`.
pub fn name_of_folder(path: &Path) -> String {
    let whole = std::fs::canonicalize(path).unwrap_or(path.into());
    whole.file_name().map_or_else(|| "run".into(), |name| name.to_string_lossy().into_owned())
}

fn row(line: &[u8]) -> Option<(usize, Row)> {
    let row: Row = serde_json::from_slice(line).ok()?;
    let step = row.step.filter(|step| *step >= 0.0 && step.fract() == 0.0)?;
    Some((step as usize, row))
}

/// A curve without its noise: the mean over a window around each point, twice, so that near points count more. The
/// window is `width` points wide and narrower towards the ends, where it would lean to one side.
pub(super) fn smoothed(points: &[(f64, f64)], width: usize) -> Vec<(f64, f64)> {
    let half = (width / 2).max(1);
    let values: Vec<f64> = points.iter().map(|point| point.1).collect();
    let values = window_means(&window_means(&values, half), half);
    points.iter().zip(values).map(|(&(step, _), value)| (step, value)).collect()
}

fn window_means(values: &[f64], half: usize) -> Vec<f64> {
    let mut sums = vec![0.0];
    values.iter().for_each(|value| sums.push(sums[sums.len() - 1] + value));
    let mean = |n: usize| {
        let to_end = n.min(values.len() - 1 - n);
        let half = half.min(to_end.max(half / 3));
        let (from, to) = (n.saturating_sub(half), (n + half + 1).min(values.len()));
        (sums[to] - sums[from]) / (to - from) as f64
    };
    (0..values.len()).map(mean).collect()
}

/// The smoothed curve, where there is noise to take away: the points lie further from it than a fiftieth of its height.
pub(super) fn smoothed_if_noisy(points: &[(f64, f64)]) -> Option<Vec<(f64, f64)>> {
    if points.len() < 30 {
        return None;
    }
    let smooth = smoothed(points, (points.len() / 20).max(5));
    let squares: f64 = points.iter().zip(&smooth).map(|(raw, smooth)| (raw.1 - smooth.1).powi(2)).sum();
    let noise = (squares / points.len() as f64).sqrt();
    let (low, high) = limits(&smooth)?;
    (noise > (high - low) / 50.0).then_some(smooth)
}

/// The least and the greatest value.
pub(super) fn limits(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let values = points.iter().map(|point| point.1);
    values.map(|value| (value, value)).reduce(|(low, high), (value, _)| (low.min(value), high.max(value)))
}

/// Fewer points that look the same: of each stretch the least and the greatest.
pub(super) fn thinned(points: Vec<(f64, f64)>, most: usize) -> Vec<(f64, f64)> {
    if points.len() <= most {
        return points;
    }
    let stretch = points.len().div_ceil(most / 2);
    let extremes = |points: &[(f64, f64)]| {
        let by_value = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let two = [points.iter().min_by(by_value), points.iter().max_by(by_value)];
        let mut two = two.map(|point| *point.expect("a stretch holds points"));
        two.sort_by(|a, b| a.0.total_cmp(&b.0));
        two
    };
    points.chunks(stretch).flat_map(extremes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Curves> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, text).unwrap();
        Curves::read(&path, "a\nb")
    }

    #[test]
    fn a_row_that_a_kill_cut_off_is_left_out() {
        let curves =
            read("{\"step\":1,\"loss/mean\":2.0}\n{\"step\":2,\"loss/mean\":1.5}\n{\"step\":3,\"lo").unwrap();
        assert_eq!(curves.points(|row| row.loss), [(1.0, 2.0), (2.0, 1.5)]);
        assert_eq!((curves.unreadable, curves.name.as_str()), (None, "a b"));
        let curves = read("{\"step\":1}\nnot a row\n{\"step\":-1}\n\n{\"step\":2}\n").unwrap();
        assert_eq!(curves.unreadable, Some((2, 2)));
        let warning = curves.warning().unwrap();
        assert!(warning.contains("metrics.jsonl:2: this is no row") && warning.ends_with("1 more like it"));
        assert_eq!(curves.last_step(), 2);
    }

    #[test]
    fn steps_without_a_number_are_gaps() {
        let text = "{\"step\":0,\"val/loss\":3.0}\n{\"step\":1,\"loss/mean\":2.0}\n{\"step\":2,\"skipped\":true}\n\
                    {\"step\":3,\"loss/mean\":null}\n{\"step\":4,\"loss/mean\":\"NaN\",\"val/loss\":1.0}\n";
        let curves = read(text).unwrap();
        let loss = curves.series(|row| row.loss);
        assert_eq!(loss, [(1.0, Some(2.0)), (2.0, None), (3.0, None), (4.0, None)]);
        assert_eq!(curves.points(|row| row.val_loss), [(0.0, 3.0), (4.0, 1.0)]);
    }

    #[test]
    fn the_later_of_two_rows_of_a_step_counts() {
        let curves =
            read("{\"step\":2,\"loss/mean\":1}\n{\"step\":1,\"loss/mean\":2}\n{\"step\":2,\"loss/mean\":3}")
                .unwrap();
        assert_eq!(curves.points(|row| row.loss), [(1.0, 2.0), (2.0, 3.0)]);
    }

    #[test]
    fn runs_of_one_name_are_told_apart_by_their_folders() {
        let run =
            |file: &str, name: &str| Curves { name: name.into(), file: file.into(), ..Curves::default() };
        let mut runs = [
            run("/x/a/out/metrics.jsonl", "out"),
            run("/y/a/out/metrics.jsonl", "out"),
            run("/x/b/out/metrics.jsonl", "out"),
            run("/x/full.jsonl", "full"),
            run("/y/full.jsonl", "full"),
            run("/z/other/metrics.jsonl", "lora"),
        ];
        distinct_names(&mut runs);
        let names = runs.map(|run| run.name);
        assert_eq!(names, ["x/a/out", "y/a/out", "b/out", "x/full", "y/full", "lora"]);
        let mut same = [run("/x/m.jsonl", "m"), run("/x/m.jsonl", "m")];
        distinct_names(&mut same);
    }

    #[test]
    fn files_without_a_row_are_told_of() {
        assert!(read("").unwrap_err().to_string().contains("empty"));
        let error = read("\nname,loss\n1,2\n").unwrap_err().to_string();
        assert!(error.contains("metrics.jsonl:2: this is no row"), "{error}");
    }

    #[test]
    fn smoothing_keeps_lines_and_takes_noise() {
        let line: Vec<_> = (0..100).map(|n| (f64::from(n), 10.0 - f64::from(n) / 20.0)).collect();
        assert_eq!(smoothed_if_noisy(&line), None);
        let noisy: Vec<_> = line
            .iter()
            .map(|&(x, y)| (x, y + if (x as u32).is_multiple_of(2) { 1.0 } else { -1.0 }))
            .collect();
        let smooth = smoothed_if_noisy(&noisy).unwrap();
        let middle = &smooth[10..90];
        assert!(middle.iter().zip(&line[10..]).all(|(a, b)| (a.1 - b.1).abs() < 0.1), "{middle:?}");
    }

    #[test]
    fn thinned_curves_keep_their_peaks() {
        let mut points: Vec<_> = (0..10_000).map(|n| (f64::from(n), 0.0)).collect();
        points[4567].1 = 9.0;
        let thin = thinned(points, 500);
        assert!(thin.len() <= 502 && thin.contains(&(4567.0, 9.0)), "{}", thin.len());
        assert!(thin.is_sorted_by(|a, b| a.0 <= b.0));
    }
}
