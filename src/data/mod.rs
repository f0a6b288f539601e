//! From files to packed rows of tokens.
//!
//! One packed row of `seq_len` tokens holds whole documents; nothing crosses a boundary:
//!
//! ```text
//! documents      |<------ doc 0 ------>|<--- doc 1 --->|<-- padding -->|
//! input_ids       a  b  c  d  e  f  g   p  q  r  s  t    0  0  0  0
//! position_ids    0  1  2  3  4  5  6   0  1  2  3  4    0  1  2  3
//! targets         b  c  d  e  f  g  .   q  r  s  t  .    .  .  .  .     ('.' = none)
//! loss_mask       0  0  1  1  1  1  0   0  1  1  1  0    0  0  0  0     (of the target)
//! cu_seqlens      0                     7               12           16
//! ```
//!
//! The way there: `read` takes files row by row (`source`, `csv`, `json_list`, `parquet`), brings each [`Row`] into one
//! form (`format`, `message`), renders it (`chat`, with `jinja` and `trace`) and tokenises it ([`ChatTokenizer`], `bytes`),
//! on all cores and as a stream (`pipeline`), into a file (`store`) that may outlive the run (`cache`). The [`Loader`]
//! reads them from there, and hands out packed batches (`pack`, `batch`, `ahead`) in an order that its seed decides
//! (`order`). `show` is for people.

mod ahead;
mod batch;
mod bytes;
mod cache;
mod chat;
mod csv;
mod fake;
mod format;
mod interleave;
mod jinja;
mod json_list;
mod loader;
mod message;
mod order;
mod pack;
mod parquet;
mod pipeline;
mod prompt;
mod read;
mod report;
mod row;
mod show;
mod source;
mod store;
mod tokenize;
mod trace;

pub use chat::{Rendered, Unprinted};
pub use loader::{Loader, LoaderState, Validation, validation_batches};
pub use prompt::{Prompt, template_variables};
pub use report::{Counted, DataReport, DropReason};
pub use row::{Body, Conversation, Place, Row, read_rows};
pub use show::{Preview, preview};
pub use tokenize::ChatTokenizer;

pub use crate::ops::Stream;

/// One tokenised document, before packing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sample {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Whether each token is trained (as a target); same length as `ids`.
    pub mask: Vec<bool>,
}

/// One micro-batch: packed rows laid end to end, `T = rows * seq_len` tokens.
///
/// The tokens of one run are contiguous, in run order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Batch {
    /// `[T]` token ids.
    pub input_ids: Vec<u32>,
    /// `[T]` positions, restarting at 0 in each document.
    pub position_ids: Vec<u32>,
    /// `[T]` the id to predict at each position (0 where there is none).
    pub targets: Vec<u32>,
    /// `[T]` whether the position's target counts in the loss.
    pub loss_mask: Vec<bool>,
    /// `[n + 1]` document boundaries, from 0 to T; row ends are boundaries too.
    pub cu_seqlens: Vec<u32>,
    /// Tokens of each adapter run, summing to T; `[T]` for a single run.
    pub run_tokens: Vec<usize>,
    /// Where each run's tokens lie in its whole stream: the counter of its dropout generator.
    pub streams: Vec<Stream>,
}

impl Batch {
    /// Number of tokens T, padding included.
    pub fn tokens(&self) -> usize {
        self.input_ids.len()
    }

    /// Number of trained target tokens of one adapter run.
    pub fn trained_tokens_of(&self, run: usize) -> usize {
        let start: usize = self.run_tokens[..run].iter().sum();
        self.loss_mask[start..start + self.run_tokens[run]].iter().filter(|&&m| m).count()
    }

    /// Number of trained target tokens.
    pub fn trained_tokens(&self) -> usize {
        self.loss_mask.iter().filter(|&&m| m).count()
    }
}
