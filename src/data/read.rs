//! Data files → tokenised samples, and what became of each row.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use super::Sample;
use super::format::normalise;
use super::interleave::interleave;
use super::report::{Counted, DataReport, DropReason};
use super::row::{Place, Row};
use super::source;
use super::tokenize::ChatTokenizer;
use crate::config::{LongDocuments, SftDataConfig};
use crate::error::{Error, Result};
use crate::hub;

/// How many rows are tokenised between two reads; bounds what is in memory as text.
const CHUNK: usize = 1024;

/// Reads files into samples.
pub(super) struct Reading<'a> {
    data: &'a SftDataConfig,
    tokenizer: &'a ChatTokenizer,
    vocab_size: usize,
    max_document: usize,
    /// Columns that the user named and no row has had yet, by their keys.
    unseen: Vec<(String, String)>,
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
        data: &'a SftDataConfig,
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
        let kept_end = data.long_documents.as_str();
        let report = DataReport { seq_len: max_document, kept_end, ..Default::default() };
        let unseen = data.columns.renamed();
        Ok(Self { data, tokenizer, vocab_size, max_document, unseen, samples: Vec::new(), report })
    }

    /// Every source.
    pub fn all(mut self, progress: &mut dyn FnMut(usize)) -> Result<Read> {
        let data = self.data;
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
        if let Some((key, column)) = self.unseen.first() {
            let message = format!("no row has a column `{column}`, which `columns.{key}` names");
            return Err(Error::data(&data.name, None, message, "Correct the name in `[data.columns]`."));
        }
        if self.samples.is_empty() {
            return Err(self.nothing_trained());
        }
        let listed =
            interleave(&sources, data.probabilities.as_deref(), data.stopping_strategy, data.seed)
                .map_err(|message| Error::data(&data.name, None, message, "Check `subsets` and `splits`."))?;
        self.report.documents = self.samples.len();
        Ok(Read { samples: self.samples, listed: listed.into(), report: self.report })
    }

    fn file(&mut self, file: &Path, progress: &mut dyn FnMut(usize)) -> Result<()> {
        self.report.files.push(file.to_path_buf());
        let mut rows = source::open(file, &self.data.columns)?;
        loop {
            let chunk: Vec<_> = rows.by_ref().take(CHUNK).collect();
            if chunk.is_empty() {
                return Ok(());
            }
            for raw in chunk.iter().flatten() {
                self.unseen.retain(|(_, column)| !raw.columns.contains_key(column));
            }
            let encoded: Vec<Result<(Row, Sample)>> = chunk
                .into_par_iter()
                .map(|raw| {
                    let row = normalise(raw?, self.data)?;
                    let sample = self.tokenizer.encode(&row, &self.data.loss_mask)?;
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
        if sample.trained() == 0 {
            self.drop(DropReason::NothingTrained, &row.place);
            return Ok(());
        }
        *self.report.lengths.entry(sample.ids.len().next_power_of_two()).or_default() += 1;
        let long = sample.ids.len() > self.max_document;
        if long && !self.cut(row, &mut sample)? {
            return Ok(());
        }
        let has_end = !long || self.data.long_documents == LongDocuments::Tail;
        if has_end && !self.stops(&sample) {
            Counted::add(&mut self.report.without_stop, &row.place);
        }
        self.report.tokens += sample.ids.len();
        self.report.trained += sample.trained();
        self.report.longest = self.report.longest.max(sample.ids.len());
        self.samples.push(sample);
        Ok(())
    }

    /// Shortens a sample that is too long; `false` if nothing of it is left to train.
    fn cut(&mut self, row: &Row, sample: &mut Sample) -> Result<bool> {
        let (len, max) = (sample.ids.len(), self.max_document);
        let kept = match self.data.long_documents {
            LongDocuments::Head => 0..max,
            LongDocuments::Tail => len - max..len,
            LongDocuments::Drop => {
                self.drop(DropReason::TooLong, &row.place);
                return Ok(false);
            }
            LongDocuments::Error => {
                return Err(Error::data(
                    row.place.file.as_ref(),
                    row.place.row,
                    format!("{len} tokens, more than `seq_len` = {max}, and `long_documents` is `error`"),
                    "Raise `seq_len`, or set `long_documents` to `head`, `tail` or `drop`.",
                ));
            }
        };
        *sample = Sample { ids: sample.ids[kept.clone()].to_vec(), mask: sample.mask[kept].to_vec() };
        if sample.trained() == 0 {
            self.drop(DropReason::TrainedBeyondSeqLen, &row.place);
            return Ok(false);
        }
        Counted::add(&mut self.report.truncated, &row.place);
        Ok(true)
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

    fn nothing_trained(&self) -> Error {
        let file = self.report.files.first().cloned().unwrap_or_else(|| PathBuf::from(&self.data.name));
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

fn no_rows(files: &[PathBuf]) -> Error {
    let file = files.first().cloned().unwrap_or_default();
    let more =
        if files.len() > 1 { format!(" (nor in {} more files)", files.len() - 1) } else { String::new() };
    Error::data(file, None, format!("no rows: the file is empty{more}"), "")
}

/// Pairs of subset and split that `data` asks for.
pub(super) fn subsets_and_splits(data: &SftDataConfig) -> Vec<(Option<&str>, &str)> {
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
