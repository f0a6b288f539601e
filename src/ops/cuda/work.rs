//! The order in which attention's tiles are worked through: lists of tiles, made once a micro-batch
//! and kept for all layers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use super::driver::Gpu;
use super::tensor::{pointer, upload};

/// Rows of a tile.
const TILE: usize = 128;
/// Bytes of rows that should stay in the card's cache together.
const SECTION: usize = 24 << 20;
/// Lists kept; more would only be those of batches long gone.
const KEPT: usize = 8;

/// What the lists depend on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shape {
    /// As in [`crate::ops::Documents`].
    pub cu_seqlens: Arc<[u32]>,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub groups: usize,
    /// Size of a head.
    pub size: usize,
}

/// One list on the card.
#[derive(Debug)]
pub struct List {
    /// Keeps the memory.
    _tensor: CubeTensor,
    /// Its address.
    pub pointer: u64,
    /// Number of entries.
    pub len: usize,
}

/// The lists of a micro-batch.
#[derive(Debug)]
pub struct Lists {
    /// Tiles of queries.
    pub queries: List,
    /// Tiles of keys.
    pub keys: List,
    /// Columns of the statistics.
    pub padded: usize,
}

type Cache = HashMap<(usize, Shape), Arc<Lists>>;
static CACHE: Mutex<Option<Cache>> = Mutex::new(None);

/// The lists for this shape on the card of `like`.
pub fn lists(like: &CubeTensor, gpu: &Gpu, shape: &Shape) -> Arc<Lists> {
    let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    let cache = cache.get_or_insert_default();
    let key = (std::ptr::from_ref(gpu).addr(), shape.clone());
    if let Some(lists) = cache.get(&key) {
        return lists.clone();
    }
    if cache.len() >= KEPT {
        cache.clear();
    }
    let lists = Arc::new(shape.lists(like, gpu.multiprocessors));
    cache.insert(key, lists.clone());
    lists
}

/// `(tile, first token, length, document · 1024 + head)`
type Entry = [i32; 4];

impl Shape {
    fn lists(&self, like: &CubeTensor, multiprocessors: usize) -> Lists {
        let n = self.cu_seqlens.len() - 1;
        let tokens = self.cu_seqlens.last().map_or(0, |&end| end as usize);
        assert!(self.heads < 1024 && n < 1 << 21, "attention: {} heads, {n} documents", self.heads);
        let shared = self.heads / self.groups;
        // A token's key and value, or its query and the gradient of its output, of one head.
        let row = self.size * 4;
        let queries: Vec<Vec<usize>> =
            (0..self.groups).map(|g| (g * shared..(g + 1) * shared).collect()).collect();
        let keys: Vec<Vec<usize>> = (0..self.groups).map(|g| vec![g]).collect();
        let queries = self.entries(&queries, row, multiprocessors, |tile, _| tile + 1);
        let keys =
            self.entries(&keys, row * shared, multiprocessors, |tile, tiles| (tiles - tile) * 2 * shared);
        Lists {
            queries: List::new(like, &queries),
            keys: List::new(like, &keys),
            padded: (tokens + 64 * n) / 64 * 64,
        }
    }

    /// The tiles of all documents for these heads: costly ones first, so that the last blocks to
    /// finish are short, but in sections of pairs of document and heads whose rows fit the cache
    /// together, each long enough to even out.
    fn entries(
        &self,
        heads: &[Vec<usize>],
        row: usize,
        multiprocessors: usize,
        cost: impl Fn(usize, usize) -> usize,
    ) -> Vec<Entry> {
        let lengths: Vec<usize> = self.cu_seqlens.windows(2).map(|w| (w[1] - w[0]) as usize).collect();
        let mut documents: Vec<usize> = (0..lengths.len()).collect();
        documents.sort_by_key(|&d| std::cmp::Reverse(lengths[d]));
        let mut section: Vec<(usize, Entry)> = Vec::new();
        let (mut entries, mut bytes, mut total, mut largest) = (Vec::new(), 0, 0, 0);
        for (d, heads) in documents.iter().flat_map(|&d| heads.iter().map(move |heads| (d, heads))) {
            let (length, tiles) = (lengths[d], lengths[d].div_ceil(TILE));
            let full = bytes + length * row > SECTION && total >= multiprocessors * largest;
            if full && !section.is_empty() {
                close(&mut section, &mut entries);
                (bytes, total, largest) = (0, 0, 0);
            }
            bytes += length * row;
            for tile in 0..tiles {
                for &head in heads {
                    let cost = cost(tile, tiles);
                    let start = self.cu_seqlens[d] as i32;
                    section.push((cost, [tile as i32, start, length as i32, (d * 1024 + head) as i32]));
                    total += cost;
                    largest = largest.max(cost);
                }
            }
        }
        close(&mut section, &mut entries);
        entries
    }
}

/// Ends a section: its costly tiles go first.
fn close(section: &mut Vec<(usize, Entry)>, entries: &mut Vec<Entry>) {
    section.sort_by_key(|(cost, _)| std::cmp::Reverse(*cost));
    entries.extend(section.drain(..).map(|(_, entry)| entry));
}

impl List {
    fn new(like: &CubeTensor, entries: &[Entry]) -> Self {
        let tensor = upload(like, bytemuck::cast_slice(entries), [entries.len(), 4], DType::I32);
        let pointer = pointer(&tensor);
        Self { _tensor: tensor, pointer, len: entries.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tile_of_every_document_and_head_is_listed_once() {
        let cu_seqlens: Arc<[u32]> = [0, 1, 1, 300, 4396, 4524].into();
        let shape = Shape { cu_seqlens: cu_seqlens.clone(), heads: 4, groups: 2, size: 128 };
        let heads = [vec![0, 1], vec![2, 3]];
        let mut entries = shape.entries(&heads, 512, 3, |tile, _| tile + 1);
        let mut wanted: Vec<Entry> = Vec::new();
        for (d, w) in cu_seqlens.windows(2).enumerate() {
            for tile in 0..(w[1] - w[0]).div_ceil(128) {
                let of_head =
                    |head: usize| [tile as i32, w[0] as i32, (w[1] - w[0]) as i32, (d * 1024 + head) as i32];
                wanted.extend((0..4).map(of_head));
            }
        }
        assert_eq!(entries[0][0], 31, "the costliest tile first");
        entries.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(entries, wanted);
    }
}
