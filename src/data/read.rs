//! Data files → tokenised samples, and what became of each row.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use super::Sample;
use super::interleave::interleave;
use super::report::{Counted, DataReport, DropReason};
use super::row::{Place, Row, normalise};
use super::source;
use super::tokenize::ChatTokenizer;
use crate::config::{LossMaskConfig, SftDataConfig};
use crate::error::{Error, Result};
use crate::hub;

/// How many rows are tokenised between two reads; bounds what is in memory as text.
const CHUNK: usize = 1024;

/// Reads files into samples.
pub(super) struct Reading<'a> {
    tokenizer: &'a ChatTokenizer,
    trained: LossMaskConfig,
    vocab_size: usize,
    max_document: usize,
    samples: Vec<Sample>,
    report: DataReport,
}

/// What was read: documents, and the order of one epoch.
pub(super) struct Read {
    pub samples: Vec<Sample>,
    pub listed: Arc<[u32]>,
    pub report: DataReport,
}

impl<'a> Reading<'a> {
    pub fn new(
        data: &SftDataConfig,
        tokenizer: &'a ChatTokenizer,
        vocab_size: usize,
        max_document: usize,
    ) -> Result<Self> {
        if tokenizer.vocab_size() > vocab_size {
            return Err(Error::model(
                tokenizer.dir(),
                format!(
                    "the tokenizer has {} tokens, the model's embedding only {vocab_size} rows (`vocab_size`)",
                    tokenizer.vocab_size()
                ),
                "Take the tokenizer that belongs to the model.",
            ));
        }
        let report = DataReport { seq_len: max_document, ..Default::default() };
        let trained = data.loss_mask;
        Ok(Self { tokenizer, trained, vocab_size, max_document, samples: Vec::new(), report })
    }

    /// Every source of `data`.
    pub fn all(mut self, data: &SftDataConfig, progress: &mut dyn FnMut(usize)) -> Result<Read> {
        let mut sources = Vec::new();
        for (subset, split) in subsets_and_splits(data) {
            let files = hub::dataset_files(&data.name, subset, split)?;
            let before = (self.samples.len() as u32, self.report.rows);
            for file in &files {
                self.file(file, progress)?;
            }
            if self.report.rows == before.1 {
                return Err(no_rows(&files));
            }
            sources.push(before.0..self.samples.len() as u32);
        }
        if self.samples.is_empty() {
            return Err(self.nothing_trained(data));
        }
        let listed =
            interleave(&sources, data.probabilities.as_deref(), data.stopping_strategy, data.seed)
                .map_err(|message| Error::data(&data.name, None, message, "Check `subsets` and `splits`."))?;
        self.report.documents = self.samples.len();
        Ok(Read { samples: self.samples, listed: listed.into(), report: self.report })
    }

    fn file(&mut self, file: &Path, progress: &mut dyn FnMut(usize)) -> Result<()> {
        self.report.files.push(file.to_path_buf());
        let mut rows = source::open(file)?;
        loop {
            let chunk: Vec<_> = rows.by_ref().take(CHUNK).collect();
            if chunk.is_empty() {
                return Ok(());
            }
            let encoded: Vec<Result<(Row, Sample)>> = chunk
                .into_par_iter()
                .map(|raw| {
                    let row = normalise(raw?)?;
                    let sample = self.tokenizer.encode(&row, &self.trained)?;
                    Ok((row, sample))
                })
                .collect();
            // In file order, so that of several bad rows always the first is reported.
            for encoded in encoded {
                let (row, sample) = encoded?;
                self.keep(&row, sample)?;
            }
            progress(self.report.rows);
        }
    }

    /// Cuts a sample and keeps it if something of it is trained.
    fn keep(&mut self, row: &Row, mut sample: Sample) -> Result<()> {
        self.report.rows += 1;
        *self.report.formats.entry(row.format).or_default() += 1;
        if let Some(&id) = sample.ids.iter().find(|&&id| id as usize >= self.vocab_size) {
            let message = format!("token id {id} is beyond the model's vocab_size {}", self.vocab_size);
            return Err(Error::data(row.place.file.as_ref(), row.place.row, message, ""));
        }
        if trained(&sample) == 0 {
            self.drop(DropReason::NothingTrained, &row.place);
            return Ok(());
        }
        if sample.ids.len() > self.max_document {
            sample.ids.truncate(self.max_document);
            sample.mask.truncate(self.max_document);
            if trained(&sample) == 0 {
                self.drop(DropReason::TrainedBeyondSeqLen, &row.place);
                return Ok(());
            }
            Counted::add(&mut self.report.truncated, &row.place);
        } else if !self.stops(&sample) {
            Counted::add(&mut self.report.without_stop, &row.place);
        }
        self.report.tokens += sample.ids.len();
        self.report.trained += trained(&sample);
        self.report.longest = self.report.longest.max(sample.ids.len());
        self.samples.push(sample);
        Ok(())
    }

    fn drop(&mut self, reason: DropReason, place: &Place) {
        let mut counted = self.report.dropped.remove(&reason);
        Counted::add(&mut counted, place);
        self.report.dropped.extend(counted.map(|counted| (reason, counted)));
    }

    /// Whether the last trained token can stop a generation.
    fn stops(&self, sample: &Sample) -> bool {
        let last = sample.mask.iter().rposition(|&m| m).map(|i| sample.ids[i]);
        last.is_some_and(|id| self.tokenizer.is_special(id) || self.tokenizer.eos_id() == Some(id))
    }

    fn nothing_trained(&self, data: &SftDataConfig) -> Error {
        let file = self.report.files.first().cloned().unwrap_or_else(|| PathBuf::from(&data.name));
        Error::data(
            file,
            None,
            format!(
                "nothing to train on: none of {} rows has a trained token\n  {}",
                self.report.rows,
                self.report.warnings().join("\n  ")
            ),
            "Rows need an `assistant` message (see `[data.loss_mask]`) within `seq_len` tokens.",
        )
    }
}

/// Tokens that are trained as targets: the first of a document has nothing before it.
fn trained(sample: &Sample) -> usize {
    sample.mask.iter().skip(1).filter(|&&m| m).count()
}

fn no_rows(files: &[PathBuf]) -> Error {
    let file = files.first().cloned().unwrap_or_default();
    let more =
        if files.len() > 1 { format!(" (nor in {} more files)", files.len() - 1) } else { String::new() };
    Error::data(file, None, format!("no rows: the file is empty{more}"), "")
}

/// Pairs of subset and split that `data` asks for.
fn subsets_and_splits(data: &SftDataConfig) -> Vec<(Option<&str>, &str)> {
    const DEFAULT: &str = "train";
    match (&data.subsets, &data.splits) {
        (None, None) => vec![(None, DEFAULT)],
        (Some(subsets), None) => subsets.iter().map(|s| (Some(s.as_str()), DEFAULT)).collect(),
        (None, Some(splits)) => splits.iter().map(|s| (None, s.as_str())).collect(),
        (Some(subsets), Some(splits)) => {
            subsets.iter().zip(splits).map(|(a, b)| (Some(a.as_str()), b.as_str())).collect()
        }
    }
}
