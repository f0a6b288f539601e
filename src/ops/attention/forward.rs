//! Forward: blocks of query rows in parallel, each with all heads.

use std::mem::MaybeUninit;

use rayon::prelude::*;

use super::super::flex::Buffer;
use super::super::flex::gemm::{Matrix, Target, Threads, multiply};
use super::super::flex::simd::{exp_and_sum, fma, largest, scale_into, vectorised};
use super::{Layout, ROWS};

/// The result `[t, heads, size]` and the log-sum-exp `[t, heads]`.
pub fn forward(q: &[f32], k: &[f32], v: &[f32], layout: &Layout) -> (Vec<f32>, Vec<f32>) {
    let width = layout.q_width();
    let mut out = Buffer::new(q.len());
    let mut lse = Buffer::new(q.len() / layout.size.max(1));
    blocks(out.slots(), lse.slots(), layout).into_par_iter().with_max_len(1).for_each_init(
        Scratch::default,
        |scratch, block| {
            let q = &q[block.row * width..(block.row + block.rows) * width];
            let keys = block.start * layout.k_width()..(block.row + block.rows) * layout.k_width();
            block.compute(q, &k[keys.clone()], &v[keys], layout, scratch);
        },
    );
    // SAFETY: the blocks cover every row of every document, and each writes all of its rows.
    unsafe { (out.finish(), lse.finish()) }
}

/// A block of query rows.
struct Block<'a> {
    /// First token of the document.
    start: usize,
    /// First token of the block.
    row: usize,
    rows: usize,
    out: &'a mut [MaybeUninit<f32>],
    lse: &'a mut [MaybeUninit<f32>],
}

fn blocks<'a>(
    mut out: &'a mut [MaybeUninit<f32>],
    mut lse: &'a mut [MaybeUninit<f32>],
    layout: &Layout,
) -> Vec<Block<'a>> {
    let mut blocks = Vec::new();
    for (start, end) in layout.documents() {
        for row in (start..end).step_by(ROWS) {
            let rows = ROWS.min(end - row);
            let own = out.split_off_mut(..rows * layout.q_width()).expect("q has all documents' rows");
            let own_lse = lse.split_off_mut(..rows * layout.heads).expect("as above");
            blocks.push(Block { start, row, rows, out: own, lse: own_lse });
        }
    }
    // The blocks with the most keys first: threads that end early take the small ones.
    blocks.sort_by_key(|block| std::cmp::Reverse(block.row - block.start));
    blocks
}

/// Memory of one block's scores and of one head's result.
#[derive(Default)]
struct Scratch {
    scores: Vec<f32>,
    tile: Vec<f32>,
    sums: Vec<f32>,
}

impl Block<'_> {
    /// `q` holds the block's rows, `k` and `v` the document up to the block's end.
    fn compute(self, q: &[f32], k: &[f32], v: &[f32], layout: &Layout, scratch: &mut Scratch) {
        let (size, rows, keys) = (layout.size, self.rows, self.row + self.rows - self.start);
        scratch.scores.resize(rows * keys, 0.0);
        scratch.tile.resize(rows * size, 0.0);
        scratch.sums.resize(rows, 0.0);
        for head in 0..layout.heads {
            let shared = head / layout.shared() * size;
            let q = Matrix::strided(&q[head * size..], rows, size, layout.q_width());
            let k = Matrix::strided(&k[shared..], keys, size, layout.k_width());
            let v = Matrix::strided(&v[shared..], keys, size, layout.k_width());
            let Scratch { scores, tile, sums } = scratch;
            multiply(Target::overwrite(scores, rows, keys), q, k.t(), Threads::One);
            for (row, scores) in scores.chunks_exact_mut(keys).enumerate() {
                let (sum, lse) = softmax(scores, keys - rows + row + 1, layout.scale);
                sums[row] = sum;
                self.lse[row * layout.heads + head].write(lse);
            }
            multiply(Target::overwrite(tile, rows, size), Matrix::new(scores, rows, keys), v, Threads::One);
            for (row, values) in tile.chunks_exact(size).enumerate() {
                let start = (row * layout.heads + head) * size;
                scale_into(values, 1.0 / sums[row], &mut self.out[start..start + size]);
            }
        }
    }
}

vectorised! {
    /// Turns the first `seen` scores into e^(scale · (score − largest)) and the rest into zeros;
    /// returns their sum and the log-sum-exp of the scaled scores.
    fn softmax(scores: &mut [f32], seen: usize, scale: f32) -> (f32, f32) {
        let (seen, unseen) = scores.split_at_mut(seen);
        let largest = largest(seen);
        let shift = -largest * scale;
        let sum = exp_and_sum::<FMA>(seen, |score| fma::<FMA>(score, scale, shift));
        unseen.fill(0.0);
        (sum, sum.ln() - shift)
    }
}
