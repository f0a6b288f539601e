//! The order of documents: seeded shuffles, epoch after epoch, with a position that can be sought.

use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::fake::Fake;
use super::pack::Waiting;

/// Where the next document comes from.
#[derive(Debug, Clone)]
pub(super) enum Order {
    /// Real rows, shuffled anew in each epoch.
    Epochs(Epochs),
    /// Made-up documents, numbered without end.
    Fake {
        /// What they look like.
        fake: Fake,
        /// The next number.
        next: u64,
    },
}

impl Order {
    /// The next document, or `None` after the last epoch.
    pub fn next_document(&mut self) -> Option<Waiting> {
        match self {
            Order::Epochs(epochs) => epochs.next_document(),
            Order::Fake { fake, next } => {
                let id = *next;
                *next += 1;
                Some(Waiting { id, len: fake.len(id) })
            }
        }
    }

    /// `(epoch, position in it)` of the next document.
    pub fn position(&self) -> (u64, u64) {
        match self {
            Order::Epochs(epochs) => (epochs.epoch, epochs.position as u64),
            Order::Fake { next, .. } => (0, *next),
        }
    }

    /// Goes to where [`Order::position`] was.
    pub fn seek(&mut self, epoch: u64, position: u64) {
        match self {
            Order::Epochs(epochs) => {
                epochs.epoch = epoch;
                epochs.position = position as usize;
                epochs.shuffled.clear();
            }
            Order::Fake { next, .. } => *next = position,
        }
    }

    /// Documents of an epoch; 0 where there are no epochs.
    pub fn documents_per_epoch(&self) -> u64 {
        match self {
            Order::Epochs(epochs) => epochs.listed.len() as u64,
            Order::Fake { .. } => 0,
        }
    }

    /// Tokens of document `id`, or `None` where there is no such document.
    pub fn len_of(&self, id: u64) -> Option<usize> {
        match self {
            Order::Epochs(epochs) => epochs.lengths.get(id as usize).map(|&len| len as usize),
            Order::Fake { fake, .. } => Some(fake.len(id)),
        }
    }
}

/// Real rows: every document of `listed` once an epoch.
#[derive(Debug, Clone)]
pub(super) struct Epochs {
    lengths: Arc<[u32]>,
    /// Document numbers of one epoch in file order (interleaved sources repeat some).
    listed: Arc<[u32]>,
    seed: Option<u64>,
    num_epochs: Option<u64>,
    epoch: u64,
    position: usize,
    /// The epoch at hand; empty until it is needed.
    shuffled: Vec<u32>,
}

impl Epochs {
    /// `seed` `None` = in file order.
    pub fn new(lengths: Arc<[u32]>, listed: Arc<[u32]>, seed: Option<u64>, num_epochs: Option<u64>) -> Self {
        Self { lengths, listed, seed, num_epochs, epoch: 0, position: 0, shuffled: Vec::new() }
    }

    fn next_document(&mut self) -> Option<Waiting> {
        if self.position == self.listed.len() && !self.is_last_epoch() {
            self.epoch += 1;
            self.position = 0;
            self.shuffled.clear();
        }
        if self.shuffled.is_empty() {
            self.shuffle();
        }
        let id = *self.shuffled.get(self.position)?;
        self.position += 1;
        Some(Waiting { id: id.into(), len: self.lengths[id as usize] as usize })
    }

    fn is_last_epoch(&self) -> bool {
        self.num_epochs.is_some_and(|n| self.epoch + 1 >= n)
    }

    /// Fisher–Yates with a generator of this epoch's own, so that any epoch can be sought at once.
    fn shuffle(&mut self) {
        self.shuffled.extend_from_slice(&self.listed);
        let Some(seed) = self.seed else { return };
        let mut rng = generator(seed, self.epoch);
        for i in (1..self.shuffled.len()).rev() {
            self.shuffled.swap(i, below(&mut rng, i as u64 + 1) as usize);
        }
    }
}

/// A generator that depends on both numbers.
pub(super) fn generator(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    rng
}

/// Uniform in `0..n`, without bias (Lemire's multiply and reject, arXiv 1805.10941).
pub(super) fn below(rng: &mut impl Rng, n: u64) -> u64 {
    loop {
        let product = u128::from(rng.next_u64()) * u128::from(n);
        if product as u64 >= n.wrapping_neg() % n {
            return (product >> 64) as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epochs(n: u32, seed: Option<u64>, num_epochs: Option<u64>) -> Epochs {
        let lengths: Vec<u32> = (1..=n).collect();
        let listed: Vec<u32> = (0..n).collect();
        Epochs::new(lengths.into(), listed.into(), seed, num_epochs)
    }

    fn ids(epochs: &mut Epochs) -> Vec<u64> {
        std::iter::from_fn(|| epochs.next_document()).map(|w| w.id).collect()
    }

    #[test]
    fn each_epoch_holds_each_document_once_in_another_order() {
        let all = ids(&mut epochs(50, Some(7), Some(3)));
        assert_eq!(all.len(), 150);
        let parts: Vec<&[u64]> = all.chunks(50).collect();
        assert_ne!(parts[0], parts[1]);
        assert_ne!(parts[1], parts[2]);
        for part in parts {
            let mut sorted = part.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..50).collect::<Vec<u64>>());
        }
        assert_ne!(all, ids(&mut epochs(50, Some(8), Some(3))), "the seed changes the order");
        assert_eq!(ids(&mut epochs(4, None, Some(2))), [0, 1, 2, 3, 0, 1, 2, 3]);
    }

    #[test]
    fn seeking_equals_walking() {
        let mut walked = Order::Epochs(epochs(13, Some(1), Some(4)));
        for _ in 0..52 {
            let (epoch, position) = walked.position();
            let mut sought = Order::Epochs(epochs(13, Some(1), Some(4)));
            sought.seek(epoch, position);
            assert_eq!(sought.clone().next_document(), walked.next_document());
        }
        assert_eq!(walked.next_document(), None);
    }

    #[test]
    fn below_is_uniform() {
        let mut rng = generator(3, 0);
        let mut counts = [0usize; 7];
        for _ in 0..70_000 {
            counts[below(&mut rng, 7) as usize] += 1;
        }
        // Five standard deviations of a binomial around 10,000.
        assert!(counts.iter().all(|&c| (c as i64 - 10_000).abs() < 470), "{counts:?}");
    }
}
