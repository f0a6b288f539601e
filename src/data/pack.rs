//! Which documents share a row: best fit over a bounded window of documents, in a fixed order.
//!
//! A row always takes the oldest waiting document and then the earliest set of others that fills the
//! row best (an exact subset sum over at most [`WINDOW`] lengths, bit-parallel, so it costs next to
//! nothing). No document waits longer than [`WINDOW`] rows and none is split.

use super::order::Order;

/// How many documents wait to be placed. More fill rows better and move documents further from
/// their place in the shuffled order.
pub(super) const WINDOW: usize = 256;

/// A document that waits for its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Waiting {
    /// Number of the document in the corpus.
    pub id: u64,
    /// Its tokens.
    pub len: usize,
}

/// Turns an endless (or ending) order of documents into rows.
#[derive(Debug, Clone)]
pub(super) struct RowPlanner {
    /// Where the next documents come from.
    pub order: Order,
    /// Those taken from the order and not yet placed, oldest first.
    pub window: Vec<Waiting>,
    capacity: usize,
}

impl RowPlanner {
    /// Rows of at most `capacity` tokens.
    pub fn new(order: Order, capacity: usize) -> Self {
        Self { order, window: Vec::new(), capacity }
    }

    /// The documents of the next row, or `None` when the order has ended and nothing waits.
    pub fn next_row(&mut self) -> Option<Vec<u64>> {
        while self.window.len() < WINDOW {
            let Some(waiting) = self.order.next_document() else { break };
            self.window.push(waiting);
        }
        if self.window.is_empty() {
            return None;
        }
        let lengths: Vec<usize> = self.window.iter().map(|w| w.len).collect();
        let picked = best_fit(&lengths, self.capacity);
        let row = picked.iter().map(|&i| self.window[i].id).collect();
        let mut next = picked.iter().peekable();
        let mut index = 0;
        self.window.retain(|_| {
            let take = next.next_if(|&&p| p == index).is_some();
            index += 1;
            !take
        });
        Some(row)
    }
}

/// Indices, ascending, of the documents that fill a row of `capacity` best and include the first.
///
/// Among equally full choices the one that reaches least far into the window wins.
///
/// # Panics
/// If `lengths` is empty or the first document doesn't fit: the loader cuts documents to the row.
fn best_fit(lengths: &[usize], capacity: usize) -> Vec<usize> {
    let room = capacity.checked_sub(lengths[0]).expect("documents are cut to the row's length");
    // Bit s of `reachable`: some set of documents adds up to s. `last[s]`: the document that made
    // it reachable; the rest of its set lies before it.
    let mut reachable = vec![0u64; room / 64 + 1];
    let mut last = vec![0u16; room + 1];
    reachable[0] = 1;
    for (index, &len) in lengths.iter().enumerate().skip(1) {
        if len > room {
            continue;
        }
        add_document(&mut reachable, &mut last, len, index);
        if reachable[room / 64] >> (room % 64) & 1 == 1 {
            break;
        }
    }
    let mut sum = (0..=room).rev().find(|s| reachable[s / 64] >> (s % 64) & 1 == 1).unwrap_or(0);
    let mut picked = vec![0];
    while sum > 0 {
        let index = usize::from(last[sum]);
        picked.push(index);
        sum -= lengths[index];
    }
    picked.sort_unstable();
    picked
}

/// `reachable |= reachable << len`, noting `index` for each sum that is new.
fn add_document(reachable: &mut [u64], last: &mut [u16], len: usize, index: usize) {
    let (words, bits) = (len / 64, len % 64);
    // From the top down: each word reads only itself and lower words, which are still the old ones.
    for w in (words..reachable.len()).rev() {
        let mut shifted = reachable[w - words] << bits;
        if bits > 0 && w > words {
            shifted |= reachable[w - words - 1] >> (64 - bits);
        }
        let mut new = shifted & !reachable[w];
        reachable[w] |= new;
        while new != 0 {
            let sum = w * 64 + new.trailing_zeros() as usize;
            new &= new - 1;
            match last.get_mut(sum) {
                Some(slot) => *slot = index as u16,
                // Beyond the row: forget it, so that the sums stay true.
                None => reachable[w] &= !(1 << (sum % 64)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(lengths: &[usize], picked: &[usize]) -> usize {
        picked.iter().map(|&i| lengths[i]).sum()
    }

    #[test]
    fn the_best_set_with_the_first_document_is_found() {
        // Against every subset, for many small cases.
        let mut state = 1u64;
        let mut next = |n: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        for _ in 0..300 {
            let capacity = 1 + next(200) as usize;
            let n = 1 + next(10) as usize;
            let lengths: Vec<usize> = (0..n).map(|_| 1 + next(capacity as u64) as usize).collect();
            let picked = best_fit(&lengths, capacity);
            assert_eq!(picked[0], 0);
            assert!(picked.windows(2).all(|w| w[0] < w[1]), "{picked:?} repeats a document");
            let best = (0..1u32 << n)
                .filter(|set| set & 1 == 1)
                .map(|set| (0..n).filter(|i| set >> i & 1 == 1).map(|i| lengths[i]).sum::<usize>())
                .filter(|&s| s <= capacity)
                .max();
            assert_eq!(Some(sum(&lengths, &picked)), best, "{lengths:?} in {capacity}");
        }
    }

    #[test]
    fn equally_full_rows_take_the_oldest_documents() {
        assert_eq!(best_fit(&[4, 3, 3, 6, 1, 1, 1], 10), [0, 1, 2]);
        assert_eq!(best_fit(&[10, 3], 10), [0]);
        assert_eq!(best_fit(&[7, 9, 9], 10), [0]);
    }
}
