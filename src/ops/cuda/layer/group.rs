//! Products that share their input, with their low-rank adapters: q, k and v; o; gate and up; down.
//!
//! With adapters the frozen weights W of a group are stacked in one matrix with spare columns and rows beside them,
//! where each pass puts the adapters: `[W | s·B]` over `[A | –]`. Where the input has room for `x·Aᵀ` beside x, the
//! adapters cost no pass over the output: `[x | x·Aᵀ] · [W | s·B]ᵀ`; and backward `[g | g·s·B] · [W over A]`. B is
//! block-diagonal over modules and runs; a run's tokens have zeros in the columns of the others.
//!
//! Zeros cost as much as numbers. So the columns of runs with many tokens for their rank come first, and a run's rows are
//! multiplied up to its own last column, not up to that of all runs ([`Group::segments`]).

use burn::tensor::DType;

use super::super::driver::Side;
use super::super::gemm::{Matrix, Product};
use crate::ops::LoraPart;

/// Columns of one module in one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Low {
    /// Which of the group's modules.
    pub module: usize,
    /// Rank.
    pub rank: usize,
    /// First of its columns beside the input, of which it has the rank rounded up to 8.
    pub column: usize,
    /// Its first row of the module's A and column of its B.
    pub row: usize,
    /// s
    pub scale: f32,
}

/// A run's tokens and columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// First token.
    pub token: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Its modules with an adapter, in order; their columns follow each other.
    pub lows: Vec<Low>,
}

/// Multiplications that take as long as one product more.
const SPLIT: usize = 5 << 30;

/// Tokens that are multiplied together, up to one of the columns beside the input.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Segment {
    token: usize,
    tokens: usize,
    columns: usize,
}

/// Sizes of a group.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// Columns of the input.
    pub input: usize,
    /// Columns of each module's output.
    pub outs: Vec<usize>,
    /// The runs that adapt one of the modules.
    pub runs: Vec<Run>,
    /// All low-rank columns.
    pub columns: usize,
    /// Whether some run that adapts a module has no token.
    pub unused: bool,
}

/// The weights of a group on the card.
#[derive(Debug, Clone)]
pub enum Weights {
    /// Stacked, with room for adapters: `[Σ outs + spare, input + spare]`.
    Stacked(Matrix),
    /// One by one, without adapters.
    Apart(Vec<Matrix>),
}

impl Group {
    /// A group of modules of these output sizes; `parts` has the runs' shares of each module with adapters.
    pub fn new(input: usize, outs: &[usize], parts: &[Option<&[LoraPart]>]) -> Self {
        let tokens = parts.iter().flatten().next().map_or(&[][..], |parts| parts);
        let mut rows = vec![0; outs.len()];
        let (mut columns, mut token, mut runs) = (0, 0, Vec::new());
        for (n, part) in tokens.iter().enumerate() {
            let mut run = Run { token, tokens: part.tokens, lows: Vec::new() };
            for (module, parts) in parts.iter().enumerate() {
                let Some(LoraPart { rank, scale, .. }) = parts.map(|parts| &parts[n]) else { continue };
                if *rank > 0 && part.tokens > 0 {
                    run.lows.push(Low {
                        module,
                        rank: *rank,
                        column: columns,
                        row: rows[module],
                        scale: *scale,
                    });
                    columns += rank.next_multiple_of(8);
                }
                rows[module] += rank;
            }
            token += part.tokens;
            if !run.lows.is_empty() {
                runs.push(run);
            }
        }
        // Least columns a token first: then the sum over all tokens of where their run's columns end is smallest.
        let mut order: Vec<usize> = (0..runs.len()).collect();
        let width = |run: &Run| run.columns().1;
        order.sort_by_key(|&n| (width(&runs[n]) << 32) / runs[n].tokens);
        let mut columns = 0;
        for n in order {
            let (first, width) = runs[n].columns();
            runs[n].lows.iter_mut().for_each(|low| low.column = low.column - first + columns);
            columns += width;
        }
        let unused = parts.iter().flatten().any(|parts| parts.iter().any(|p| p.tokens == 0 && p.rank > 0));
        Self { input, outs: outs.to_vec(), runs, columns, unused }
    }

    /// Σ of the outputs' columns.
    pub fn out(&self) -> usize {
        self.outs.iter().sum()
    }

    /// Spare columns, in whole 128 bytes.
    pub fn spare(&self) -> usize {
        self.columns.next_multiple_of(64)
    }

    /// First column of a module's output.
    pub fn out_start(&self, module: usize) -> usize {
        self.outs[..module].iter().sum()
    }

    /// The columns of a module in a matrix of outputs.
    pub fn out_of(&self, module: usize, outs: Matrix) -> Matrix {
        outs.columns(self.out_start(module), self.outs[module])
    }

    /// `out ← x·Wᵀ` with adapters, `+ add`. x has `input` columns and, in its stride, the spare ones, which are
    /// copied to `keep`.
    pub fn forward(
        &self,
        side: &mut Side<'_>,
        weights: &Weights,
        x: Matrix,
        [out, keep]: [Matrix; 2],
        add: Option<Matrix>,
    ) {
        match weights {
            Weights::Apart(weights) => {
                for (module, &weight) in weights.iter().enumerate() {
                    let add = add.map(|add| self.out_of(module, add));
                    project(side, x, weight, add, self.out_of(module, out));
                }
            }
            Weights::Stacked(all) => {
                self.low(side, all, x);
                if keep.columns > 0 {
                    side.copy(x.columns(self.input, self.columns), keep);
                }
                for Segment { token, tokens, columns } in self.segments(x.rows, self.out()) {
                    let wide = self.input + columns;
                    let [x, to] = [x, out].map(|all| all.rows(token, tokens));
                    let add = add.map(|add| add.rows(token, tokens));
                    let weight = all.rows(0, self.out()).columns(0, wide);
                    project(side, x.columns(0, wide), weight, add, to);
                }
            }
        }
    }

    /// All tokens, so divided that the products are quickest: `width` multiplications each for a column, [`SPLIT`] for a
    /// segment more.
    fn segments(&self, tokens: usize, width: usize) -> Vec<Segment> {
        let mut parts: Vec<Segment> = Vec::new();
        let mut token = 0;
        let ends = self.runs.iter().map(|run| {
            let (first, n) = run.columns();
            Segment { token: run.token, tokens: run.tokens, columns: first + n }
        });
        for part in ends.chain([Segment { token: tokens, tokens: 0, columns: 0 }]) {
            if token < part.token {
                parts.push(Segment { token, tokens: part.token - token, columns: 0 });
            }
            token = part.token + part.tokens;
            parts.push(part);
        }
        parts.pop();
        // The cheapest division of the first n parts, and where its last segment begins.
        let mut best = vec![(0, 0)];
        for end in 1..=parts.len() {
            let (mut rows, mut columns, mut cheapest) = (0, 0, (usize::MAX, 0));
            for first in (0..end).rev() {
                rows += parts[first].tokens;
                columns = parts[first].columns.max(columns);
                cheapest = cheapest.min((best[first].0 + SPLIT + rows * columns * width, first));
            }
            best.push(cheapest);
        }
        let mut segments = Vec::new();
        let mut end = parts.len();
        while end > 0 {
            let first = best[end].1;
            let of = &parts[first..end];
            let tokens = of.iter().map(|part| part.tokens).sum();
            let columns = of.iter().map(|part| part.columns).max().unwrap_or(0);
            segments.push(Segment { token: of[0].token, tokens, columns });
            end = first;
        }
        segments.reverse();
        segments
    }

    /// `x·Aᵀ` into the spare columns of x: each run's own.
    fn low(&self, side: &mut Side<'_>, all: &Matrix, x: Matrix) {
        self.clear_others(side, x.columns(self.input, self.columns));
        let of_run = |run: &Run| {
            let (first, n) = run.columns();
            let a = all.rows(self.out() + first, n).columns(0, self.input);
            let rows = x.rows(run.token, run.tokens);
            let out = rows.columns(self.input + first, n);
            Product { a: rows.columns(0, self.input), b: a.t(), out, alpha: 1.0 }
        };
        side.each_product(self.runs.iter().map(of_run).collect());
    }

    /// `g·s·B` into the spare columns of g: each run's own.
    pub fn low_gradient(&self, side: &mut Side<'_>, weights: &Weights, g: Matrix) {
        let Weights::Stacked(all) = weights else { return };
        let out = self.out();
        self.clear_others(side, g.columns(out, self.columns));
        let of_run = |run: &Run| {
            let (first, n) = run.columns();
            let b = all.rows(0, out).columns(self.input + first, n);
            let rows = g.rows(run.token, run.tokens);
            Product { a: rows.columns(0, out), b, out: rows.columns(out + first, n), alpha: 1.0 }
        };
        side.each_product(self.runs.iter().map(of_run).collect());
    }

    /// The gradient of x from that of the outputs, whose spare columns are filled ([`Group::low_gradient`]).
    pub fn input_gradient(&self, side: &mut Side<'_>, weights: &Weights, g: Matrix, dx: Matrix) {
        match weights {
            Weights::Stacked(all) => {
                for Segment { token, tokens, columns } in self.segments(g.rows, self.input) {
                    let rows = self.out() + columns;
                    let [g, dx] = [g, dx].map(|all| all.rows(token, tokens));
                    side.product(g.columns(0, rows), all.rows(0, rows).columns(0, self.input), dx, 1.0, 0.0);
                }
            }
            Weights::Apart(weights) => {
                for (module, &weight) in weights.iter().enumerate() {
                    let beta = if module == 0 { 0.0 } else { 1.0 };
                    side.product(self.out_of(module, g), weight, dx, 1.0, beta);
                }
            }
        }
    }

    /// The gradients of A and B (f32, stacked over the runs) for each module that there are places for, from x, from
    /// `low`, which are its spare columns in the forward pass, and from g with its own.
    pub fn adapter_gradients(
        &self,
        side: &mut Side<'_>,
        [x, low, g]: [Matrix; 3],
        da: &[Option<Matrix>],
        db: &[Option<Matrix>],
    ) {
        let out = self.out();
        let mut all = Vec::new();
        for run in &self.runs {
            let [inputs, rows_low, rows_g] = [x, low, g].map(|x| x.rows(run.token, run.tokens));
            let inputs = inputs.columns(0, self.input);
            for (first, n, to) in run.merged(da) {
                all.push(Product { a: rows_g.columns(out + first, n).t(), b: inputs, out: to, alpha: 1.0 });
            }
            for low in &run.lows {
                if let Some(db) = db[low.module] {
                    let h = rows_low.columns(low.column, low.rank);
                    let g = self.out_of(low.module, rows_g);
                    let to = db.columns(low.row, low.rank);
                    all.push(Product { a: g.t(), b: h, out: to, alpha: low.scale });
                }
            }
        }
        side.each_product(all);
    }

    /// Where several runs share the batch, the columns of the others are zeros.
    fn clear_others(&self, side: &mut Side<'_>, spare: Matrix) {
        let whole = self.runs.len() == 1 && self.runs[0].tokens == spare.rows;
        if !whole {
            side.clear(spare);
        }
    }
}

/// `to ← x·Wᵀ + add`
fn project(side: &mut Side<'_>, x: Matrix, weight: Matrix, add: Option<Matrix>, to: Matrix) {
    match add {
        Some(add) => side.product_onto(x, weight.t(), add, to),
        None => side.product(x, weight.t(), to, 1.0, 0.0),
    }
}

impl Run {
    /// First column and number of columns.
    fn columns(&self) -> (usize, usize) {
        let first = self.lows.first().map_or(0, |low| low.column);
        let end = self.lows.last().map_or(0, |low| low.column + low.rank.next_multiple_of(8));
        (first, end - first)
    }

    /// First column, columns and place of each product for A's gradients: one for modules whose places follow each
    /// other as their columns do.
    fn merged(&self, da: &[Option<Matrix>]) -> Vec<(usize, usize, Matrix)> {
        let mut all: Vec<(usize, usize, Matrix)> = Vec::new();
        for low in &self.lows {
            let Some(da) = da[low.module] else { continue };
            let to = da.rows(low.row, low.rank);
            let bytes = |rows: usize| (rows * to.stride * to.dtype.size()) as u64;
            match all.last_mut() {
                Some((first, n, before))
                    if *first + *n == low.column && before.pointer + bytes(before.rows) == to.pointer =>
                {
                    *n += low.rank;
                    before.rows += low.rank;
                }
                _ => all.push((low.column, low.rank, to)),
            }
        }
        all
    }
}

/// Products of bf16 with f32 sums.
pub const DTYPE: DType = DType::BF16;

#[cfg(test)]
mod tests {
    use super::*;

    fn part(tokens: usize, rank: usize) -> LoraPart {
        LoraPart { tokens, rank, scale: 2.0, dropout: None }
    }

    #[test]
    fn columns_of_runs_and_modules_follow_each_other_in_whole_chunks() {
        let (q, v) = ([part(5, 16), part(0, 4), part(7, 3)], [part(5, 0), part(0, 8), part(7, 8)]);
        let group = Group::new(64, &[32, 16, 16], &[Some(&q), None, Some(&v)]);
        let low = |module, rank, column, row| Low { module, rank, column, row, scale: 2.0 };
        // The second has fewer columns a token.
        let runs = [
            Run { token: 0, tokens: 5, lows: vec![low(0, 16, 16, 0)] },
            Run { token: 5, tokens: 7, lows: vec![low(0, 3, 0, 20), low(2, 8, 8, 8)] },
        ];
        assert_eq!((group.runs.as_slice(), group.columns, group.spare()), (&runs[..], 32, 64));
        assert_eq!((group.out(), group.out_start(2)), (64, 48));
    }

    /// Against all divisions that there are.
    #[test]
    fn segments_cover_all_tokens_and_cost_least() {
        let k = 1 << 12;
        let ranks = [(8, 1), (8, 2), (0, 1), (16, 4), (32, 2), (64, 4), (64, 1)];
        let parts: Vec<LoraPart> = ranks.iter().map(|&(rank, rows)| part(rows * k, rank)).collect();
        let group = Group::new(1024, &[3072, 3072], &[Some(&parts), Some(&parts)]);
        let tokens = 16 * k; // one row more than the runs have
        let segments = group.segments(tokens, 6144);
        let cost = |segments: &[Segment]| -> usize {
            segments.iter().map(|of| SPLIT + of.tokens * of.columns * 6144).sum()
        };
        let mut end = 0;
        for of in &segments {
            assert_eq!(of.token, end);
            end += of.tokens;
            let inside = |run: &&Run| of.token <= run.token && run.token < end;
            let own = group.runs.iter().filter(inside).map(|run| run.columns().0 + run.columns().1).max();
            assert_eq!(of.columns, own.unwrap_or(0));
        }
        assert_eq!(end, tokens);
        let bounds: Vec<usize> = [1, 3, 4, 8, 10, 14, 15].iter().map(|row| row * k).collect();
        let all = (0..1 << bounds.len()).map(|chosen: usize| {
            let cuts = bounds.iter().enumerate().filter(|(n, _)| chosen >> n & 1 == 1).map(|(_, &at)| at);
            let ends: Vec<usize> = cuts.chain([tokens]).collect();
            let firsts = [0].into_iter().chain(ends.iter().copied());
            let segment = |(token, &end): (usize, &usize)| {
                let inside = |run: &&Run| token <= run.token && run.token < end;
                let columns = group.runs.iter().filter(inside).map(|run| run.columns().0 + run.columns().1);
                Segment { token, tokens: end - token, columns: columns.max().unwrap_or(0) }
            };
            cost(&firsts.zip(&ends).map(segment).collect::<Vec<_>>())
        });
        assert_eq!(all.min(), Some(cost(&segments)));
        assert!(segments.len() > 1);
        // A run that has all tokens is one product, whatever its rank.
        let alone = Group::new(1024, &[3072], &[Some(&[part(tokens, 64)])]);
        assert_eq!(alone.segments(tokens, 3072), [Segment { token: 0, tokens, columns: 64 }]);
    }

    #[test]
    fn gradients_of_a_that_lie_together_are_one_product() {
        let both = [part(9, 16)];
        let group = Group::new(64, &[32, 32], &[Some(&both), Some(&both)]);
        let a = Matrix::dense(4096, 16, 64, DType::F32);
        let b = Matrix { pointer: 4096 + 16 * 64 * 4, ..a };
        let merged = group.runs[0].merged(&[Some(a), Some(b)]);
        assert_eq!(merged, [(0, 32, Matrix { rows: 32, ..a })]);
        assert_eq!(group.runs[0].merged(&[Some(b), Some(a)]).len(), 2);
        assert_eq!(group.runs[0].merged(&[None, Some(b)]), [(16, 16, b)]);
    }
}
