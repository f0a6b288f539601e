//! Data files → tokenised documents, as a stream, and what became of each row.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Sample;
use super::Unprinted;
use super::cache::{self, Origin, Progress};
use super::format::normalise;
use super::interleave::interleave;
use super::pipeline::{Piece, in_order};
use super::report::{Counted, DataReport, DropReason};
use super::row::Place;
use super::source::{self, Unread};
use super::store::{About, Store, Writer};
use super::tokenize::ChatTokenizer;
use crate::config::{DataFormat, LongDocuments, SftDataConfig};
use crate::error::{Error, Result};
use crate::hub;

/// Rows that go through the threads together: so many bytes of them, but not more than so many rows.
const CHUNK_BYTES: usize = 1 << 18;
const CHUNK_ROWS: usize = 1024;
/// Chunks under way for each thread. Rows take several times their bytes while they are worked on.
const CHUNKS_A_THREAD: usize = 3;

/// What was read: documents, and the order of one epoch.
pub(super) struct Read {
    pub store: Store,
    pub listed: Arc<[u32]>,
}

/// Reads and tokenises what `data` names, or takes it from the cache.
pub(super) fn read(
    data: &SftDataConfig,
    tokenizer: &ChatTokenizer,
    vocab_size: usize,
    max_document: usize,
    progress: Progress,
) -> Result<Read> {
    check_vocab(tokenizer, vocab_size)?;
    let pairs = subsets_and_splits(data).into_iter();
    let sources = pairs.map(|(subset, split)| hub::dataset_files(&data.name, subset, split));
    let sources = sources.collect::<Result<Vec<_>>>()?;
    let origin = Origin { data, tokenizer, vocab_size, max_document, sources: &sources };
    let mut make = |writer: Writer, progress: Progress| Reading::new(&origin, writer).all(progress);
    let (mut store, note) = cache::store(&origin, progress, &mut make)?;
    let report = store.report_mut();
    (report.kept_end, report.cache) = (data.long_documents.as_str(), note);
    progress(report.rows)?;
    let sources = &store.about().sources;
    let listed = interleave(sources, data.probabilities.as_deref(), data.stopping_strategy, data.seed)
        .map_err(|message| Error::data(&data.name, None, message, "Check `subsets` and `splits`."))?;
    Ok(Read { store, listed: listed.into() })
}

fn check_vocab(tokenizer: &ChatTokenizer, vocab_size: usize) -> Result<()> {
    let tokens = tokenizer.vocab_size();
    if tokens <= vocab_size {
        return Ok(());
    }
    let message = format!(
        "the tokenizer has {tokens} tokens, the model's embedding only {vocab_size} rows (`vocab_size`)"
    );
    Err(Error::model(tokenizer.dir(), message, "Take the tokenizer that belongs to the model."))
}

/// Files on their way into a store.
struct Reading<'a> {
    origin: &'a Origin<'a>,
    /// Columns that the user named and no row has had yet, by their keys.
    unseen: Vec<(String, String)>,
    writer: Writer,
    report: DataReport,
}

/// What a row became.
struct Made {
    place: Place,
    format: DataFormat,
    sample: Sample,
    unprinted: Option<Unprinted>,
}

/// What some rows became, and the columns that they have.
struct Chunk {
    made: Vec<Result<Made>>,
    columns: Vec<String>,
}

impl<'a> Reading<'a> {
    fn new(origin: &'a Origin<'a>, writer: Writer) -> Self {
        let report = DataReport {
            seq_len: origin.max_document,
            kept_end: origin.data.long_documents.as_str(),
            ..Default::default()
        };
        Self { origin, unseen: origin.data.columns.renamed(), writer, report }
    }

    /// Every source.
    fn all(mut self, progress: Progress) -> Result<Store> {
        let data = self.origin.data;
        let mut sources = Vec::new();
        for files in self.origin.sources {
            let (first, rows) = (self.writer.len() as u32, self.report.rows);
            for file in files {
                self.file(file, progress)?;
            }
            if self.report.rows == rows {
                return Err(no_rows(files));
            }
            sources.push(first..self.writer.len() as u32);
        }
        if let Some((key, column)) = self.unseen.first() {
            let message = format!("no row has a column `{column}`, which `columns.{key}` names");
            return Err(Error::data(&data.name, None, message, "Correct the name in `[data.columns]`."));
        }
        if self.writer.len() == 0 {
            return Err(self.nothing_trained());
        }
        self.report.documents = self.writer.len();
        self.writer.finish(About { sources, report: self.report })
    }

    fn file(&mut self, file: &Path, progress: Progress) -> Result<()> {
        self.report.files.push(file.to_path_buf());
        let rows = source::open(file, &self.origin.data.columns)?;
        let named = self.unseen.iter().map(|(_, column)| column.clone()).collect::<Vec<_>>();
        let threads = rayon::current_num_threads();
        let origin = self.origin;
        in_order(
            Chunks { rows, begun: None },
            threads,
            CHUNK_BYTES * CHUNKS_A_THREAD * threads,
            |rows| encode(origin, &named, rows),
            |chunk| {
                // In file order, so that of several bad rows always the first is reported.
                if let Some(Chunk { made, columns }) = chunk {
                    self.unseen.retain(|(_, column)| !columns.contains(column));
                    for made in made {
                        self.keep(made?)?;
                    }
                }
                progress(self.report.rows)
            },
        )
    }

    /// Cuts a sample and keeps it if something of it is trained.
    fn keep(&mut self, row: Made) -> Result<()> {
        let Made { place, format, mut sample, unprinted } = row;
        let vocab_size = self.origin.vocab_size;
        self.report.rows += 1;
        *self.report.formats.entry(format).or_default() += 1;
        if let Some(&id) = sample.ids.iter().find(|&&id| id as usize >= vocab_size) {
            let message = format!("token id {id} is beyond the model's vocab_size {vocab_size}");
            return Err(Error::data(place.file.as_ref(), place.row, message, ""));
        }
        if sample.trained() == 0 {
            self.drop(DropReason::NothingTrained, &place);
            return Ok(());
        }
        *self.report.lengths.entry(sample.ids.len().next_power_of_two()).or_default() += 1;
        let long = sample.ids.len() > self.origin.max_document;
        if long && !self.cut(&place, &mut sample)? {
            return Ok(());
        }
        let has_end = !long || self.origin.data.long_documents == LongDocuments::Tail;
        if has_end && !self.stops(&sample) {
            Counted::add(&mut self.report.without_stop, &place);
        }
        if self.origin.tokenizer.begins_twice(&sample.ids) {
            Counted::add(&mut self.report.begun_twice, &place);
        }
        if let Some(what) = unprinted {
            Counted::among(&mut self.report.unprinted, what, &place);
        }
        self.report.tokens += sample.ids.len();
        self.report.trained += sample.trained();
        self.report.longest = self.report.longest.max(sample.ids.len());
        self.writer.add(&sample)
    }

    /// Shortens a sample that is too long; `false` if nothing of it is left to train.
    fn cut(&mut self, place: &Place, sample: &mut Sample) -> Result<bool> {
        let (len, max) = (sample.ids.len(), self.origin.max_document);
        let kept = match self.origin.data.long_documents {
            LongDocuments::Head => 0..max,
            LongDocuments::Tail => len - max..len,
            LongDocuments::Drop => {
                self.drop(DropReason::TooLong, place);
                return Ok(false);
            }
            LongDocuments::Error => {
                return Err(Error::data(
                    place.file.as_ref(),
                    place.row,
                    format!("{len} tokens, more than `seq_len` = {max}, and `long_documents` is `error`"),
                    "Raise `seq_len`, or set `long_documents` to `head`, `tail` or `drop`.",
                ));
            }
        };
        *sample = Sample { ids: sample.ids[kept.clone()].to_vec(), mask: sample.mask[kept].to_vec() };
        if sample.trained() == 0 {
            self.drop(DropReason::TrainedBeyondSeqLen, place);
            return Ok(false);
        }
        Counted::add(&mut self.report.truncated, place);
        Ok(true)
    }

    fn drop(&mut self, reason: DropReason, place: &Place) {
        Counted::among(&mut self.report.dropped, reason, place);
    }

    /// Whether the last trained token can stop a generation.
    fn stops(&self, sample: &Sample) -> bool {
        let last = sample.mask.iter().rposition(|&m| m).map(|i| sample.ids[i]);
        let tokenizer = self.origin.tokenizer;
        last.is_some_and(|id| tokenizer.is_special(id) || tokenizer.eos_id() == Some(id))
    }

    fn nothing_trained(&self) -> Error {
        let file =
            self.report.files.first().cloned().unwrap_or_else(|| PathBuf::from(&self.origin.data.name));
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

/// Rows, and those of the `named` columns that they have → documents.
fn encode(origin: &Origin, named: &[String], rows: Vec<Result<Unread>>) -> Chunk {
    let mut columns: Vec<String> = Vec::new();
    let mut made = |row: Result<Unread>| {
        let raw = row?.read()?;
        for name in named.iter().filter(|&name| raw.columns.contains_key(name)) {
            if !columns.contains(name) {
                columns.push(name.clone());
            }
        }
        let row = normalise(raw, origin.data)?;
        let (sample, unprinted) = origin.tokenizer.encode_telling(&row, &origin.data.loss_mask)?;
        Ok(Made { place: row.place, format: row.format, sample, unprinted })
    };
    Chunk { made: rows.into_iter().map(&mut made).collect(), columns }
}

/// Rows in portions that are worth a thread's while.
struct Chunks {
    rows: source::Rows,
    /// A row that didn't fit into the last portion.
    begun: Option<Result<Unread>>,
}

impl Iterator for Chunks {
    type Item = Piece<Vec<Result<Unread>>>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut piece = Piece { content: Vec::new(), bytes: 0 };
        while let Some(row) = self.begun.take().or_else(|| self.rows.next()) {
            let bytes = row.as_ref().map_or(0, Unread::bytes);
            let full = piece.bytes + bytes > CHUNK_BYTES || piece.content.len() == CHUNK_ROWS;
            if full && !piece.content.is_empty() {
                self.begun = Some(row);
                break;
            }
            piece.bytes += bytes;
            piece.content.push(row);
        }
        (!piece.content.is_empty()).then_some(piece)
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
