//! What was read and what became of it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Unprinted;
use super::row::Place;
use crate::config::DataFormat;

/// Why a row isn't trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DropReason {
    /// No turn of a trained role, or an empty text.
    NothingTrained,
    /// Its trained tokens were all cut off at `seq_len`.
    TrainedBeyondSeqLen,
    /// It is longer than `seq_len`, and `long_documents` is `drop`.
    TooLong,
}

/// Rows with something in common, and the first of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// How many.
    pub rows: usize,
    /// The first one.
    pub first: Place,
}

impl Counted {
    pub(super) fn add(counted: &mut Option<Counted>, place: &Place) {
        match counted {
            Some(counted) => counted.rows += 1,
            None => *counted = Some(Counted { rows: 1, first: place.clone() }),
        }
    }

    /// Counts a row among those with the same `key`.
    pub(super) fn among<K: Ord>(all: &mut BTreeMap<K, Counted>, key: K, place: &Place) {
        all.entry(key).or_insert_with(|| Counted { rows: 0, first: place.clone() }).rows += 1;
    }
}

/// What was read and what became of it: the numbers that `check` prints.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DataReport {
    /// The files, in the order read.
    pub files: Vec<PathBuf>,
    /// Rows read.
    pub rows: usize,
    /// Rows by format.
    #[serde(serialize_with = "write_formats", deserialize_with = "read_formats")]
    pub formats: BTreeMap<DataFormat, usize>,
    /// Rows that aren't trained, by reason.
    pub dropped: BTreeMap<DropReason, Counted>,
    /// Rows longer than `seq_len`, of which one end is kept.
    pub truncated: Option<Counted>,
    /// Rows whose last trained turn doesn't end in a token that stops generation.
    pub without_stop: Option<Counted>,
    /// Rows that begin with two `bos_token`s.
    pub begun_twice: Option<Counted>,
    /// Trained rows of which the chat template doesn't print something.
    pub unprinted: BTreeMap<Unprinted, Counted>,
    /// The length that documents are cut to.
    pub seq_len: usize,
    /// `long_documents`: which end of them is kept.
    #[serde(skip)]
    pub(super) kept_end: &'static str,
    /// Documents kept.
    pub documents: usize,
    /// Their tokens, after cutting.
    pub tokens: usize,
    /// Those that are trained, as targets.
    pub trained: usize,
    /// Documents by length before cutting: the smallest power of two that holds them, and how many.
    pub lengths: BTreeMap<usize, usize>,
    /// The longest document, after cutting.
    pub longest: usize,
    /// Packed rows of one epoch.
    pub packed_rows: usize,
    /// Tokens in the rows of one epoch over their places; the tail row apart, unless it is the only one.
    pub fill: f64,
    /// `batch_size`.
    #[serde(skip)]
    pub(super) batch_size: usize,
    /// What became of the cache, if that wasn't as it should be.
    #[serde(skip)]
    pub(super) cache: Option<String>,
}

fn write_formats<S: Serializer>(
    formats: &BTreeMap<DataFormat, usize>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(formats.iter().map(|(format, rows)| (format.as_str(), rows)))
}

fn read_formats<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<DataFormat, usize>, D::Error> {
    let by_name = BTreeMap::<String, usize>::deserialize(deserializer)?;
    let named = |(name, rows): (String, usize)| {
        let format = DataFormat::ALL.iter().find(|format| format.as_str() == name);
        let unknown = || serde::de::Error::custom(format!("no format is called `{name}`"));
        Ok((*format.ok_or_else(unknown)?, rows))
    };
    by_name.into_iter().map(named).collect()
}

impl DataReport {
    /// Optimizer steps of one epoch alone. Of several, one begins in the step in which the last ends: that makes
    /// fewer (see [`DataReport::epochs`]).
    pub fn steps_per_epoch(&self) -> usize {
        self.packed_rows.div_ceil(self.batch_size.max(1))
    }

    /// Epochs in so many steps; less than one step is one epoch's where data are small.
    pub fn epochs(&self, steps: usize) -> f64 {
        (steps * self.batch_size) as f64 / self.packed_rows.max(1) as f64
    }

    /// The formats that rows were found in: "messages", "text (3), alpaca (4)".
    pub fn formats(&self) -> String {
        match self.formats.len() {
            1 => self.formats.keys().map(|format| format.as_str()).collect(),
            _ => {
                let counted =
                    self.formats.iter().map(|(format, rows)| format!("{} ({rows})", format.as_str()));
                counted.collect::<Vec<_>>().join(", ")
            }
        }
    }

    /// Whether rows went through the chat template.
    pub fn has_chats(&self) -> bool {
        let plain = [DataFormat::Text, DataFormat::RawPromptCompletion, DataFormat::Pretokenized];
        self.formats.keys().any(|format| !plain.contains(format))
    }

    /// Rows that aren't trained.
    pub fn dropped_rows(&self) -> usize {
        self.dropped.values().map(|counted| counted.rows).sum()
    }

    /// What the user should know before training, one line each.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let mut warn = |counted: &Counted, is: &str, are: &str, what: &str| {
            let verb = if counted.rows == 1 { is } else { are };
            warnings.push(format!(
                "{} of {} rows {verb} {what} (first: {})",
                counted.rows, self.rows, counted.first
            ));
        };
        let seq_len = self.seq_len;
        let end = self.kept_end;
        for (reason, counted) in &self.dropped {
            let (is, are, what) = match reason {
                DropReason::NothingTrained => ("has", "have", "no trained token (no assistant turn)".into()),
                DropReason::TrainedBeyondSeqLen => (
                    "is",
                    "are",
                    format!("longer than seq_len {seq_len}, with no trained token in its {end}"),
                ),
                DropReason::TooLong => ("is", "are", format!("longer than seq_len {seq_len}")),
            };
            warn(counted, is, are, &format!("{what}: left out"));
        }
        if let Some(counted) = &self.truncated {
            warn(counted, "is", "are", &format!("longer than seq_len {seq_len}: only the {end} is trained"));
        }
        if let Some(counted) = &self.without_stop {
            warn(
                counted,
                "ends",
                "end",
                "in no stop token that is trained: a model trained on them may not know when to stop; \
                 the chat template should print it inside the assistant's turn",
            );
        }
        if let Some(counted) = &self.begun_twice {
            warn(
                counted,
                "begins",
                "begin",
                "with two `bos_token`s: take one out of the chat template or the data",
            );
        }
        for (what, counted) in &self.unprinted {
            let what = format!("{} that the chat template doesn't print: {}", what.as_str(), what.hint());
            warn(counted, "holds", "hold", &what);
        }
        warnings.extend(self.cache.clone());
        warnings
    }
}
