//! Rows → batches: what is read, in which order, and where one is in it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::ahead::Ahead;
use super::batch::{Layout, batch};
use super::fake::Fake;
use super::order::{Epochs, Order};
use super::pack::{RowPlanner, Waiting};
use super::read::{Read, read};
use super::report::DataReport;
use super::store::Store;
use super::tokenize::ChatTokenizer;
use super::{Batch, Sample, Stream};
use crate::config::{FakeDataConfig, SftDataConfig};
use crate::error::{Error, Result};

/// Position in the stream of batches; a loader that is [restored](Loader::restore) to it goes on
/// with exactly the batches that would have come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoaderState {
    /// What was being read, so that other data are not taken for it.
    pub fingerprint: String,
    /// Epoch of the next document that enters the packing window.
    pub epoch: u64,
    /// Its place in the shuffled epoch.
    pub position: u64,
    /// Documents in the packing window, oldest first.
    pub window: Vec<u64>,
    /// Tokens of the rows handed out so far, padding included, over all ranks.
    pub tokens: u64,
    /// Steps handed out so far.
    pub steps: u64,
}

/// The documents themselves.
#[derive(Debug)]
enum Corpus {
    Rows(Box<Store>),
    Fake(Fake),
}

impl Corpus {
    fn documents(&self, row: &[u64]) -> Result<Vec<Sample>> {
        let sample = |&id: &u64| match self {
            Corpus::Rows(store) => store.document(id),
            Corpus::Fake(fake) => Ok(fake.sample(id)),
        };
        row.iter().map(sample).collect()
    }
}

/// Which rows of a step are handed out.
#[derive(Debug, Clone, Copy)]
struct Share {
    rank: usize,
    ranks: usize,
}

const ALL: Share = Share { rank: 0, ranks: 1 };

/// Documents on their way into batches.
#[derive(Debug, Clone)]
struct Feed {
    corpus: Arc<Corpus>,
    planner: RowPlanner,
    layout: Layout,
    share: Share,
    batch_size: usize,
    tokens: u64,
    steps: u64,
    fingerprint: String,
}

impl Feed {
    fn next_step(&mut self) -> Result<Option<Vec<Batch>>> {
        let rows: Vec<Vec<u64>> =
            std::iter::from_fn(|| self.planner.next_row()).take(self.batch_size).collect();
        if rows.is_empty() {
            return Ok(None);
        }
        self.steps += 1;
        let (micro, Share { rank, ranks }) = (self.layout.micro_batch_size, self.share);
        let seq_len = self.layout.seq_len as u64;
        let own: Vec<_> = rows.iter().skip(rank).step_by(ranks).collect();
        let batches = (0..rows.len().div_ceil(micro * ranks)).map(|n| {
            let rows = own.iter().skip(n * micro).take(micro).map(|row| self.corpus.documents(row));
            let stream = Stream {
                first: self.tokens + (rank + n * micro * ranks) as u64 * seq_len,
                row: self.layout.seq_len,
                stride: ranks as u64 * seq_len,
            };
            Ok(batch(self.layout, rows.collect::<Result<_>>()?, stream))
        });
        let batches = batches.collect::<Result<_>>()?;
        self.tokens += rows.len() as u64 * seq_len;
        Ok(Some(batches))
    }

    fn state(&self) -> LoaderState {
        let (epoch, position) = self.planner.order.position();
        LoaderState {
            fingerprint: self.fingerprint.clone(),
            epoch,
            position,
            window: self.planner.window.iter().map(|waiting| waiting.id).collect(),
            tokens: self.tokens,
            steps: self.steps,
        }
    }

    /// The same stream elsewhere; `None` if it never gets there.
    fn at(&self, state: &LoaderState) -> Option<Self> {
        let waiting = |&id: &u64| Some(Waiting { id, len: self.planner.order.len_of(id)? });
        let window = state.window.iter().map(waiting).collect::<Option<_>>()?;
        if state.fingerprint != self.fingerprint {
            return None;
        }
        let mut feed = Self { tokens: state.tokens, steps: state.steps, ..self.clone() };
        feed.planner.order.seek(state.epoch, state.position);
        feed.planner.window = window;
        Some(feed)
    }
}

/// The stream of batches of one run. The next step's is made ready in a thread while one is computed.
#[derive(Debug)]
pub struct Loader {
    /// At its start.
    feed: Feed,
    /// Where the last batches that were handed out have led.
    state: LoaderState,
    ahead: Option<Ahead<(Vec<Batch>, LoaderState)>>,
    finite: bool,
    report: DataReport,
}

impl Loader {
    /// Reads and tokenises the data of a run, or takes them from the cache.
    ///
    /// `num_epochs` `None` = without end. `vocab_size` is the model's; documents are cut to
    /// `data.seq_len` and to `max_document`, the model's position limit.
    ///
    /// # Errors
    /// Files that aren't there or can't be read, rows that aren't right (with file and line), ids
    /// beyond the vocabulary, nothing to train on.
    pub fn new(
        data: &SftDataConfig,
        tokenizer: Arc<ChatTokenizer>,
        seed: u64,
        num_epochs: Option<usize>,
        vocab_size: usize,
        max_document: usize,
    ) -> Result<Self> {
        Self::with_progress(data, tokenizer, seed, num_epochs, vocab_size, max_document, &mut |_| Ok(()))
    }

    /// [`Loader::new`], telling `progress` the number of rows read so far, several times a second; an error
    /// of it ends the reading.
    ///
    /// # Errors
    /// As [`Loader::new`], and those of `progress`.
    pub fn with_progress(
        data: &SftDataConfig,
        tokenizer: Arc<ChatTokenizer>,
        seed: u64,
        num_epochs: Option<usize>,
        vocab_size: usize,
        max_document: usize,
        progress: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Self> {
        let layout = Layout {
            seq_len: data.seq_len,
            max_document: data.seq_len.min(max_document),
            micro_batch_size: data.micro_batch_size,
        };
        let Read { store, listed } = read(data, &tokenizer, vocab_size, layout.max_document, progress)?;
        let seed = data.shuffle.then(|| mix(seed, data.seed));
        let order =
            |epochs| Order::Epochs(Epochs::new(store.lengths().clone(), listed.clone(), seed, epochs));
        let planner = RowPlanner::new(order(num_epochs.map(|n| n as u64)), data.seq_len);
        let mut report = store.about().report.clone();
        report.batch_size = data.batch_size;
        measure_packing(RowPlanner::new(order(Some(1)), data.seq_len), data.seq_len, &mut report);
        let fingerprint = fingerprint(store.hash(), &listed, &(seed, data.seq_len));
        let corpus = Corpus::Rows(Box::new(store));
        Ok(Self::begin(corpus, planner, layout, fingerprint, num_epochs.is_some(), report))
    }

    /// Made-up data, without end.
    ///
    /// # Errors
    /// None today; as [`Loader::new`].
    pub fn fake(data: &FakeDataConfig, vocab_size: usize) -> Result<Self> {
        let fake = Fake::new(data, data.seq_len, vocab_size);
        let layout = Layout {
            seq_len: data.seq_len,
            max_document: data.seq_len,
            micro_batch_size: data.micro_batch_size,
        };
        let planner = RowPlanner::new(Order::Fake { fake: fake.clone(), next: 0 }, data.seq_len);
        let report = DataReport { fill: 1.0, batch_size: data.batch_size, ..Default::default() };
        let fingerprint = format!("{fake:?}");
        Ok(Self::begin(Corpus::Fake(fake), planner, layout, fingerprint, false, report))
    }

    fn begin(
        corpus: Corpus,
        planner: RowPlanner,
        layout: Layout,
        fingerprint: String,
        finite: bool,
        report: DataReport,
    ) -> Self {
        let (corpus, batch_size) = (Arc::new(corpus), report.batch_size);
        let (share, tokens, steps) = (ALL, 0, 0);
        let feed = Feed { corpus, planner, layout, share, batch_size, tokens, steps, fingerprint };
        Self { state: feed.state(), feed, ahead: None, finite, report }
    }

    /// The micro-batches of the next optimizer step; `None` after the last epoch.
    ///
    /// The last step may have fewer rows: it has fewer micro-batches, and its last one is filled with
    /// rows of padding, so that shapes stay the same. With [`Loader::shared`], those of one rank.
    ///
    /// # Errors
    /// The tokens can't be read any more.
    pub fn next_step(&mut self) -> Result<Option<Vec<Batch>>> {
        let ahead = match &mut self.ahead {
            Some(ahead) => ahead,
            None => {
                let mut feed = self.here();
                let step = move || Ok(feed.next_step()?.map(|batches| (batches, feed.state())));
                self.ahead.insert(Ahead::start(step)?)
            }
        };
        let step = ahead.next();
        if !matches!(step, Ok(Some(_))) {
            // To begin anew from here, if asked again.
            self.ahead = None;
        }
        let Some((batches, state)) = step? else { return Ok(None) };
        self.state = state;
        Ok(Some(batches))
    }

    /// Hands out the rows of one rank alone from now on: row k of a step belongs to rank k mod `ranks`. All ranks get
    /// as many micro-batches in each step, the last of some with nothing but padding in them; the state is the same
    /// on all, and fits any number of ranks.
    ///
    /// # Panics
    /// If there is no such rank.
    #[must_use]
    pub fn shared(mut self, rank: usize, ranks: usize) -> Self {
        assert!(rank < ranks, "rank {rank} of {ranks}");
        self.feed.share = Share { rank, ranks };
        self.ahead = None;
        self
    }

    /// Where the stream is: behind the last batches that were handed out.
    pub fn state(&self) -> LoaderState {
        self.state.clone()
    }

    /// Goes to where the stream was.
    ///
    /// # Errors
    /// The state is of other data, another seed or another `seq_len`.
    pub fn restore(&mut self, state: LoaderState) -> Result<()> {
        if self.feed.at(&state).is_none() {
            return Err(Error::train(
                "the data are not those of the checkpoint: a row, the tokenizer, the chat template, the seed, \
                 `shuffle` or `seq_len` has changed",
                "Restore what was changed, or start the data anew with `--ckpt.skip-dataloader`.",
            ));
        }
        self.state = state;
        self.ahead = None;
        Ok(())
    }

    /// The stream from here on.
    fn here(&self) -> Feed {
        self.feed.at(&self.state).expect("the state is of this stream")
    }

    /// Epochs whose documents have all been handed out (but for those that wait for a row that they
    /// fill): 0 in the first.
    pub fn epoch(&self) -> usize {
        let per_epoch = self.feed.planner.order.documents_per_epoch();
        let taken = self.state.epoch * per_epoch + self.state.position;
        (taken - self.state.window.len() as u64).checked_div(per_epoch).unwrap_or(0) as usize
    }

    /// What was read and what became of it.
    pub fn report(&self) -> &DataReport {
        &self.report
    }

    /// Steps from here to the end of the last epoch; `None` for data without end.
    pub fn remaining_steps(&self) -> Option<usize> {
        if !self.finite {
            return None;
        }
        let mut planner = self.here().planner;
        let rows = std::iter::from_fn(|| planner.next_row()).count();
        Some(rows.div_ceil(self.feed.batch_size))
    }
}

/// A held-out set, read anew for each use.
#[derive(Debug, Clone)]
pub struct Validation {
    feed: Feed,
    /// What was read.
    pub report: DataReport,
}

impl Validation {
    /// One pass, not shuffled, the last row included.
    ///
    /// # Errors
    /// Each item: the tokens can't be read any more.
    pub fn batches(&self) -> impl Iterator<Item = Result<Batch>> + use<> {
        let mut feed = self.feed.clone();
        std::iter::from_fn(move || feed.next_step().transpose()).flat_map(|step| match step {
            Ok(batches) => batches.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error)],
        })
    }
}

/// Reads and tokenises a held-out set.
///
/// # Errors
/// As [`Loader::with_progress`].
pub fn validation_batches(
    data: &SftDataConfig,
    tokenizer: Arc<ChatTokenizer>,
    vocab_size: usize,
    max_document: usize,
    progress: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<Validation> {
    let data = SftDataConfig { shuffle: false, ..data.clone() };
    let loader = Loader::with_progress(&data, tokenizer, 0, Some(1), vocab_size, max_document, progress)?;
    Ok(Validation { feed: loader.feed, report: loader.report })
}

/// Two seeds into one that depends on both.
fn mix(a: u64, b: u64) -> u64 {
    // SplitMix64's finaliser, so that (1, 0) and (0, 1) differ.
    let mut x = a.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(b);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A hash of everything that the stream depends on; `documents` is that of the store.
fn fingerprint(documents: u64, listed: &[u32], settings: &impl std::fmt::Debug) -> String {
    let mut hash = Xxh3::new();
    hash.update(&documents.to_le_bytes());
    listed.iter().for_each(|id| hash.update(&id.to_le_bytes()));
    hash.update(format!("{settings:?}").as_bytes());
    format!("{:016x}", hash.digest())
}

/// Packs one epoch to count its rows and how full they are.
fn measure_packing(mut planner: RowPlanner, seq_len: usize, report: &mut DataReport) {
    let len_of = |order: &Order, row: &[u64]| row.iter().filter_map(|&id| order.len_of(id)).sum::<usize>();
    let mut full = 0;
    let mut last = 0;
    while let Some(row) = planner.next_row() {
        full += last;
        last = len_of(&planner.order, &row);
        report.packed_rows += 1;
    }
    let (full, rows) = if report.packed_rows == 1 { (last, 1) } else { (full, report.packed_rows - 1) };
    report.fill = full as f64 / (rows * seq_len) as f64;
}
