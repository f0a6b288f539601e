//! `[data] type = "fake"`: made-up documents, for trying a model or a machine without data.

use rand_chacha::rand_core::Rng;

use super::Sample;
use super::order::{below, generator};
use crate::config::{FakeDataConfig, FakeInputIds, FakeLength};

/// Documents made from their number alone, so that any can be remade at any time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Fake {
    length: FakeLength,
    trained: f64,
    input_ids: FakeInputIds,
    seed: u64,
    seq_len: usize,
    vocab_size: u64,
}

impl Fake {
    /// `seq_len` caps the documents' lengths.
    pub fn new(config: &FakeDataConfig, seq_len: usize, vocab_size: usize) -> Self {
        Self {
            length: config.length,
            trained: config.trained,
            input_ids: config.input_ids,
            seed: config.seed,
            seq_len,
            vocab_size: vocab_size as u64,
        }
    }

    /// Tokens of document `id`: the whole row, or anything from 1 to below it.
    pub fn len(&self, id: u64) -> usize {
        match self.length {
            FakeLength::Fixed => self.seq_len,
            FakeLength::Variable if self.seq_len < 3 => self.seq_len,
            FakeLength::Variable => {
                1 + below(&mut generator(self.seed, id), self.seq_len as u64 - 1) as usize
            }
        }
    }

    /// Document `id`: its number in every place, or random ids; trained at its end.
    pub fn sample(&self, id: u64) -> Sample {
        let len = self.len(id);
        let ids = match self.input_ids {
            FakeInputIds::Increasing => vec![(id % self.vocab_size) as u32; len],
            FakeInputIds::Random => {
                let mut rng = generator(self.seed, id);
                // The first number is the length's.
                rng.next_u64();
                (0..len).map(|_| below(&mut rng, self.vocab_size) as u32).collect()
            }
        };
        let untrained = len - (len as f64 * self.trained).ceil() as usize;
        Sample { mask: (0..len).map(|at| at >= untrained).collect(), ids }
    }
}
