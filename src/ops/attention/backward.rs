//! Backward: documents, key heads and, in long documents, ranges of query rows in parallel.
//!
//! A task adds up the gradients of its keys and values over its rows, in order; where a document is
//! cut into ranges (by its length alone), the ranges' sums are added in order.

use std::ops::Range;

use rayon::prelude::*;

use super::super::flex::gemm::{Matrix, Target, Threads, multiply};
use super::super::flex::simd::{add, exp, fma, sum_lanes, vectorised};
use super::super::flex::{self, Buffer};
use super::{Layout, ROWS, State};

/// Query rows from which a document's backward is cut in two and more.
const LONG: usize = 1024;
/// Ranges of a document at most: each has sums of its own for all keys before its end.
const MOST_RANGES: usize = 4;

/// Gradients of q, k and v; those that aren't tracked are empty.
pub fn backward(state: &State, grad: &[f32]) -> [Vec<f32>; 3] {
    let layout = &state.layout;
    let mut dq = Buffer::new(if state.tracked[0] { grad.len() } else { 0 });
    let call = Call { state, grad, dq: Shared(dq.slots().as_mut_ptr().cast()) };
    let tasks = tasks(layout);
    let compute = |scratch: &mut Scratch, task: &Task| task.compute(&call, scratch);
    let sums: Vec<Sums> = tasks.par_iter().with_max_len(1).map_init(Scratch::default, compute).collect();
    let dk = if state.tracked[1] { gather(layout, &tasks, &sums, |sums| &sums.dk) } else { Vec::new() };
    let dv = if state.tracked[2] { gather(layout, &tasks, &sums, |sums| &sums.dv) } else { Vec::new() };
    // SAFETY: the tasks cover all rows and heads, and each writes all of its rows and heads.
    [unsafe { dq.finish() }, dk, dv]
}

/// What all tasks share.
struct Call<'a> {
    state: &'a State,
    grad: &'a [f32],
    dq: Shared,
}

/// The start of the gradient of q: each task writes rows and heads of its own.
struct Shared(*mut f32);
// SAFETY: no two tasks write the same elements (see `tasks`), and none reads any.
unsafe impl Sync for Shared {}

/// Query rows `rows` (tokens) of the document that begins at `start`, all heads of one group.
struct Task {
    start: usize,
    rows: Range<usize>,
    group: usize,
}

/// Gradients of one head's keys and values, from the document's start to the last of the rows.
struct Sums {
    dk: Vec<f32>,
    dv: Vec<f32>,
}

/// Disjoint in (rows, group); document by document, group by group, ranges in order.
fn tasks(layout: &Layout) -> Vec<Task> {
    let mut tasks = Vec::new();
    for (start, end) in layout.documents() {
        for group in 0..layout.groups {
            tasks.extend(ranges(end - start).map(|r| Task {
                start,
                rows: start + r.start..start + r.end,
                group,
            }));
        }
    }
    tasks
}

/// Row ranges of about equal work: the work up to row n grows with n².
fn ranges(len: usize) -> impl Iterator<Item = Range<usize>> {
    let count = (len / LONG + 1).min(MOST_RANGES);
    let bound = move |i: usize| match i == count {
        true => len,
        false => ((len as f64) * (i as f64 / count as f64).sqrt()) as usize / ROWS * ROWS,
    };
    (0..count).map(move |i| bound(i)..bound(i + 1))
}

#[derive(Default)]
struct Scratch {
    weights: Vec<f32>,
    slopes: Vec<f32>,
}

impl Task {
    fn compute(&self, call: &Call<'_>, scratch: &mut Scratch) -> Sums {
        let layout = &call.state.layout;
        let len = (self.rows.end - self.start) * layout.size;
        let of = |tracked: bool| vec![0.0; if tracked { len } else { 0 }];
        let mut sums = Sums { dk: of(call.state.tracked[1]), dv: of(call.state.tracked[2]) };
        for head in self.group * layout.shared()..(self.group + 1) * layout.shared() {
            for first in self.rows.clone().step_by(ROWS) {
                let rows = first..(first + ROWS).min(self.rows.end);
                self.block(call, head, rows, scratch, &mut sums);
            }
        }
        sums
    }

    /// One head's block of query rows.
    fn block(
        &self,
        call: &Call<'_>,
        head: usize,
        block: Range<usize>,
        scratch: &mut Scratch,
        sums: &mut Sums,
    ) {
        let (state, layout) = (call.state, &call.state.layout);
        let (size, width, k_width) = (layout.size, layout.q_width(), layout.k_width());
        let (rows, keys) = (block.len(), block.end - self.start);
        let own = block.start * width + head * size;
        let shared = self.start * k_width + self.group * size;
        let q = Matrix::strided(&flex::values(&state.q)[own..], rows, size, width);
        let g = Matrix::strided(&call.grad[own..], rows, size, width);
        let k = Matrix::strided(&flex::values(&state.k)[shared..], keys, size, k_width);
        let v = Matrix::strided(&flex::values(&state.v)[shared..], keys, size, k_width);
        let Scratch { weights, slopes } = scratch;
        weights.resize(rows * keys, 0.0);
        slopes.resize(rows * keys, 0.0);
        multiply(Target::overwrite(weights, rows, keys), q, k.t(), Threads::One);
        multiply(Target::overwrite(slopes, rows, keys), g, v.t(), Threads::One);
        let rows_of_both = weights.chunks_exact_mut(keys).zip(slopes.chunks_exact_mut(keys));
        for (row, (weights, slopes)) in rows_of_both.enumerate() {
            let lse = state.lse[(block.start + row) * layout.heads + head];
            softmax_gradient(weights, slopes, keys - rows + row + 1, layout.scale, lse);
        }
        let (weights, slopes) = (Matrix::new(weights, rows, keys), Matrix::new(slopes, rows, keys));
        if state.tracked[0] {
            // SAFETY: within dq, which is as large as q; no other task has these rows and this head.
            let target = unsafe { Target::raw(call.dq.0.add(own), rows, size, width) };
            multiply(target, slopes, k, Threads::One);
        }
        if state.tracked[1] {
            multiply(Target::add(&mut sums.dk[..keys * size], keys, size), slopes.t(), q, Threads::One);
        }
        if state.tracked[2] {
            multiply(Target::add(&mut sums.dv[..keys * size], keys, size), weights.t(), g, Threads::One);
        }
    }
}

vectorised! {
    /// From scores to weights w = e^(scale · score − lse), and from the gradient of the weights to
    /// that of the scores: w · (gradient − Σ w · gradient) · scale. Zeros after the first `seen`.
    fn softmax_gradient(weights: &mut [f32], slopes: &mut [f32], seen: usize, scale: f32, lse: f32) {
        let (weights, unseen) = weights.split_at_mut(seen);
        unseen.fill(0.0);
        let (slopes, unseen) = slopes.split_at_mut(seen);
        unseen.fill(0.0);
        let mut lanes = [0.0f32; 32];
        let mut chunks = weights.chunks_exact_mut(32).zip(slopes.chunks_exact(32));
        for (weights, slopes) in &mut chunks {
            for ((lane, weight), slope) in lanes.iter_mut().zip(weights).zip(slopes) {
                *weight = exp::<FMA>(fma::<FMA>(*weight, scale, -lse));
                *lane = fma::<FMA>(*weight, *slope, *lane);
            }
        }
        let whole = seen / 32 * 32;
        for ((lane, weight), slope) in lanes.iter_mut().zip(&mut weights[whole..]).zip(&slopes[whole..]) {
            *weight = exp::<FMA>(fma::<FMA>(*weight, scale, -lse));
            *lane = fma::<FMA>(*weight, *slope, *lane);
        }
        let mean = sum_lanes(lanes);
        for (slope, weight) in slopes.iter_mut().zip(weights) {
            *slope = *weight * (*slope - mean) * scale;
        }
    }
}

/// The tasks' sums, side by side as `[t, groups, size]`.
fn gather(
    layout: &Layout,
    tasks: &[Task],
    sums: &[Sums],
    of: impl Fn(&Sums) -> &Vec<f32> + Sync,
) -> Vec<f32> {
    let (size, width) = (layout.size, layout.k_width());
    let tokens = layout.cu_seqlens.last().map_or(0, |&end| end as usize);
    let mut out = vec![0.0; tokens * width];
    let mut rest = out.as_mut_slice();
    let mut documents = Vec::new();
    for (start, end) in layout.documents() {
        let own = rest.split_off_mut(..(end - start) * width).expect("room for all documents");
        let first = tasks.partition_point(|task| task.start < start);
        let count = tasks[first..].partition_point(|task| task.start == start);
        documents.push((own, first..first + count));
    }
    documents.into_par_iter().for_each(|(own, range)| {
        for (task, sums) in tasks[range.clone()].iter().zip(&sums[range]) {
            for (token, sum) in own.chunks_exact_mut(width).zip(of(sums).chunks_exact(size)) {
                add(&mut token[task.group * size..(task.group + 1) * size], sum);
            }
        }
    });
    out
}
