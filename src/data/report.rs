//! What was read and what became of it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::row::{Format, Place};

/// Why a row isn't trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DropReason {
    /// No turn of a trained role, or an empty text.
    NothingTrained,
    /// Its trained tokens all lie beyond the cut at `seq_len`.
    TrainedBeyondSeqLen,
}

/// Rows with something in common, and the first of them.
#[derive(Debug, Clone, PartialEq, Eq)]
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
}

/// What was read and what became of it: the numbers that `check` prints.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DataReport {
    /// The files, in the order read.
    pub files: Vec<PathBuf>,
    /// Rows read.
    pub rows: usize,
    /// Rows by shape.
    pub formats: BTreeMap<Format, usize>,
    /// Rows that aren't trained, by reason.
    pub dropped: BTreeMap<DropReason, Counted>,
    /// Rows longer than `seq_len`, of which the head is kept.
    pub truncated: Option<Counted>,
    /// Rows whose last trained turn doesn't end in a token that stops generation.
    pub without_stop: Option<Counted>,
    /// The length that documents are cut to.
    pub seq_len: usize,
    /// Documents kept.
    pub documents: usize,
    /// Their tokens, after cutting.
    pub tokens: usize,
    /// Those that are trained, as targets.
    pub trained: usize,
    /// The longest document, after cutting.
    pub longest: usize,
    /// Packed rows of one epoch.
    pub packed_rows: usize,
    /// Tokens in the full rows of one epoch over their places, the tail row apart; 1 without any.
    pub fill: f64,
    /// `batch_size`.
    pub(super) batch_size: usize,
}

impl DataReport {
    /// Optimizer steps of one epoch.
    pub fn steps_per_epoch(&self) -> usize {
        self.packed_rows.div_ceil(self.batch_size.max(1))
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
        for (reason, counted) in &self.dropped {
            match reason {
                DropReason::NothingTrained => {
                    warn(
                        counted,
                        "has",
                        "have",
                        "no trained token (no assistant turn) and no part in training",
                    );
                }
                DropReason::TrainedBeyondSeqLen => warn(
                    counted,
                    "is",
                    "are",
                    &format!(
                        "longer than seq_len {}, with no trained token before the cut: left out",
                        self.seq_len
                    ),
                ),
            }
        }
        if let Some(counted) = &self.truncated {
            warn(
                counted,
                "is",
                "are",
                &format!("longer than seq_len {}: only the head is trained", self.seq_len),
            );
        }
        if let Some(counted) = &self.without_stop {
            warn(
                counted,
                "ends",
                "end",
                "in no stop token that is trained: a model trained on them may not know when to stop",
            );
        }
        warnings
    }
}
