//! Documents of packed rows → the flat arrays of a [`Batch`].

use super::{Batch, Sample, Stream};

/// Sizes of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// Tokens of a row.
    pub seq_len: usize,
    /// Longest document; padding keeps to it too, as positions may end there.
    pub max_document: usize,
    /// Rows of a micro-batch.
    pub micro_batch_size: usize,
}

/// One micro-batch of up to `micro_batch_size` rows of documents; missing rows are padding.
///
/// # Panics
/// If the documents of a row don't fit into it: the packer's promise.
pub(super) fn batch(layout: Layout, rows: Vec<Vec<Sample>>, stream: Stream) -> Batch {
    let mut batch = Batch { cu_seqlens: vec![0], streams: vec![stream], ..Default::default() };
    let mut rows = rows.into_iter();
    for end in (1..=layout.micro_batch_size).map(|row| row * layout.seq_len) {
        rows.next().unwrap_or_default().iter().for_each(|document| add(&mut batch, document));
        assert!(batch.tokens() <= end, "a row holds {} tokens too many", batch.tokens() - end);
        while batch.tokens() < end {
            let len = (end - batch.tokens()).min(layout.max_document);
            add(&mut batch, &Sample { ids: vec![0; len], mask: vec![false; len] });
        }
    }
    assert!(rows.next().is_none(), "more rows than the micro-batch holds");
    batch.run_tokens = vec![batch.tokens()];
    batch
}

impl Batch {
    /// One batch of what several adapter runs bring, in run order; `None`: a run brings nothing.
    ///
    /// # Panics
    /// If nobody brings anything, or a part is shared by several runs itself.
    pub fn joined(parts: &[Option<&Batch>]) -> Batch {
        let mut all = Batch { cu_seqlens: vec![0], ..Batch::default() };
        for part in parts {
            let Some(part) = part else {
                all.run_tokens.push(0);
                all.streams.push(Stream::default());
                continue;
            };
            assert_eq!(part.run_tokens.len(), 1, "a part is one run's");
            let start = all.tokens() as u32;
            all.input_ids.extend_from_slice(&part.input_ids);
            all.position_ids.extend_from_slice(&part.position_ids);
            all.targets.extend_from_slice(&part.targets);
            all.loss_mask.extend_from_slice(&part.loss_mask);
            all.cu_seqlens.extend(part.cu_seqlens[1..].iter().map(|bound| start + bound));
            all.run_tokens.push(part.tokens());
            all.streams.extend_from_slice(&part.streams);
        }
        assert!(all.tokens() > 0, "a batch of several runs has tokens");
        all
    }
}

/// Appends a document; each position's target is the next token, the last has none.
fn add(batch: &mut Batch, document: &Sample) {
    let len = document.ids.len();
    batch.input_ids.extend_from_slice(&document.ids);
    batch.position_ids.extend(0..len as u32);
    batch.targets.extend(document.ids.iter().skip(1).copied().chain([0]));
    batch.loss_mask.extend(document.mask.iter().skip(1).copied().chain([false]));
    batch.cu_seqlens.push(batch.input_ids.len() as u32);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(ids: &[u32]) -> Sample {
        Sample { ids: ids.to_vec(), mask: ids.iter().map(|id| id % 2 == 1).collect() }
    }

    #[test]
    fn documents_and_padding_keep_apart() {
        let layout = Layout { seq_len: 6, max_document: 6, micro_batch_size: 3 };
        let rows = vec![vec![document(&[4, 5, 7]), document(&[9])], vec![document(&[1, 2, 3, 4, 5, 6])]];
        let got = batch(layout, rows, Stream::unbroken(77));
        assert_eq!(got.input_ids, [4, 5, 7, 9, 0, 0, 1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0]);
        assert_eq!(got.position_ids, [0, 1, 2, 0, 0, 1, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]);
        assert_eq!(got.targets, [5, 7, 0, 0, 0, 0, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0, 0]);
        let mask = [1, 1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0].map(|m| m == 1);
        assert_eq!(got.loss_mask, mask);
        assert_eq!(got.cu_seqlens, [0, 3, 4, 6, 12, 18]);
        assert_eq!((got.run_tokens, got.streams), (vec![18], vec![Stream::unbroken(77)]));
    }

    #[test]
    fn padding_keeps_to_the_position_limit() {
        let layout = Layout { seq_len: 8, max_document: 3, micro_batch_size: 1 };
        let got = batch(layout, vec![vec![document(&[1])]], Stream::default());
        assert_eq!(got.cu_seqlens, [0, 1, 4, 7, 8]);
        assert_eq!(got.position_ids.iter().max(), Some(&2));
    }
}
