//! `x · Wᵀ` for a few rows of x: each row of W is read once, by the thread that needs it, without packing.
//!
//! Every element is one sum over the inner dimension in lanes ([`super::simd`]): a row of the result depends on that
//! row of x and on W alone, bit for bit. Not the bits of [`super::gemm::product`], which sums in another order.

use std::mem::MaybeUninit;

use burn::backend::Flex;
use burn::tensor::Tensor;
use rayon::prelude::*;

use super::simd::{LANES, fma, largest, sum_lanes, vectorised};
use super::{Buffer, dense, primitive, takes as is_taken, tensor, values};
use crate::ops::{Adapters, Projection};

/// Elements of W that one task reads: enough to be worth a thread's while.
const TASK: usize = 1 << 15;
/// Rows of x that share a pass over a row of W.
const BLOCK: usize = 4;

/// Whether [`project`] takes these tensors.
pub fn takes(x: &Tensor<2>, projection: &Projection) -> bool {
    let Projection { weight, bias, adapters } = projection;
    let plain = |x: &Tensor<2>| is_taken(x) && !x.is_autodiff();
    let alone = |adapters: &Adapters| {
        // The adapters of one run, on all rows.
        let [part] = &adapters.parts[..] else { return false };
        part.tokens == x.dims()[0] && part.dropout.is_none() && plain(&adapters.a) && plain(&adapters.b)
    };
    let bias_too = bias.as_ref().is_none_or(|bias| is_taken(bias) && !bias.is_autodiff());
    plain(x) && plain(weight) && bias_too && adapters.as_ref().is_none_or(alone)
}

/// See [`crate::ops::project_few`].
pub fn project(x: Tensor<2>, projection: &Projection) -> Tensor<2> {
    let [rows, _] = x.dims();
    let x = dense(primitive(x));
    let by = |x: &[f32], weight: &Tensor<2>| {
        let weight = dense(primitive(weight.clone()));
        product(x, rows, values(&weight))
    };
    let mut y = by(values(&x), &projection.weight);
    if let Some(Adapters { a, b, parts }) = &projection.adapters {
        let mut low = by(values(&x), a);
        super::simd::scale(&mut low, parts[0].scale);
        super::simd::add(&mut y, &by(&low, b));
    }
    if let Some(bias) = &projection.bias {
        let bias = dense(primitive(bias.clone()));
        y.chunks_exact_mut(values(&bias).len()).for_each(|row| super::simd::add(row, values(&bias)));
    }
    let out = projection.weight.dims()[0];
    Tensor::from_primitive::<Flex>(tensor(y, [rows, out]))
}

/// x · Wᵀ, row by row of W.
///
/// # Shapes
/// - x: `[rows, inner]`, w: `[columns, inner]` → `[rows, columns]`
fn product(x: &[f32], rows: usize, w: &[f32]) -> Vec<f32> {
    let inner = x.len() / rows.max(1);
    let columns = w.len().checked_div(inner).unwrap_or(0);
    let mut out = Buffer::new(rows * columns);
    let task = (TASK / inner.max(1)).max(1);
    let tasks = out.slots().par_chunks_mut((task * rows).max(1)).zip(w.par_chunks((task * inner).max(1)));
    tasks.for_each(|(out, w)| dots(w, x, inner, out));
    // SAFETY: there are as many tasks' rows as rows of W, and `dots` writes all of its share.
    let by_column = unsafe { out.finish() };
    if rows == 1 {
        return by_column;
    }
    (0..rows * columns).map(|n| by_column[n % columns * rows + n / columns]).collect()
}

vectorised! {
    /// Each row of w with each row of x: `[rows of w, rows of x]`.
    fn dots(w: &[f32], x: &[f32], inner: usize, out: &mut [MaybeUninit<f32>]) {
        let rows = x.len() / inner;
        let blocks = rows / BLOCK * BLOCK;
        for (w, out) in w.chunks_exact(inner).zip(out.chunks_exact_mut(rows)) {
            for first in (0..blocks).step_by(BLOCK) {
                let x: [&[f32]; BLOCK] = std::array::from_fn(|n| &x[(first + n) * inner..][..inner]);
                let sums = dot::<FMA, BLOCK>(w, x);
                out[first..first + BLOCK].iter_mut().zip(sums).for_each(|(out, sum)| _ = out.write(sum));
            }
            for row in blocks..rows {
                let [sum] = dot::<FMA, 1>(w, [&x[row * inner..][..inner]]);
                out[row].write(sum);
            }
        }
    }
}

/// w · x for N vectors at once; each as if alone.
#[inline(always)]
fn dot<const FMA: bool, const N: usize>(w: &[f32], x: [&[f32]; N]) -> [f32; N] {
    let mut lanes = [[0.0f32; LANES]; N];
    let whole = w.len() / LANES * LANES;
    let mut start = 0;
    while start < whole {
        let w: &[f32; LANES] = w[start..start + LANES].try_into().expect("as many");
        for (lanes, x) in lanes.iter_mut().zip(x) {
            let x: &[f32; LANES] = x[start..start + LANES].try_into().expect("as many");
            for i in 0..LANES {
                lanes[i] = fma::<FMA>(w[i], x[i], lanes[i]);
            }
        }
        start += LANES;
    }
    for (lanes, x) in lanes.iter_mut().zip(x) {
        for i in whole..w.len() {
            lanes[i - whole] = fma::<FMA>(w[i], x[i], lanes[i - whole]);
        }
    }
    lanes.map(sum_lanes)
}

/// See [`crate::ops::most_likely`]. Where a row has no largest (NaN), its first.
pub fn largest_of_rows(x: Tensor<2>) -> Vec<u32> {
    let width = x.dims()[1];
    let x = dense(primitive(x));
    let first = |row: &[f32]| {
        let most = largest(row);
        row.iter().position(|value| *value == most).unwrap_or(0) as u32
    };
    values(&x).chunks_exact(width).map(first).collect()
}

#[cfg(test)]
mod tests {
    use super::super::random;
    use super::*;

    #[test]
    fn a_row_is_the_exact_product_and_the_same_among_others() {
        for (inner, columns) in [(1, 1), (16, 48), (33, 7), (576, 1536), (1000, 130)] {
            let (x, w) = (random(9 * inner, 1), random(columns * inner, 2));
            let all = product(&x, 9, &w);
            for row in 0..9 {
                let x = &x[row * inner..][..inner];
                assert!(product(x, 1, &w) == all[row * columns..][..columns], "{inner} {columns}: row {row}");
                for (column, w) in w.chunks_exact(inner).enumerate() {
                    let exact: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                    // |terms| ≤ 1, roundings of 6e-8 in lanes.
                    let off = (f64::from(all[row * columns + column]) - exact).abs();
                    assert!(off < 1e-6 * (inner as f64).sqrt(), "{inner} {columns}: off by {off}");
                }
            }
        }
    }

    #[test]
    fn threads_change_nothing() {
        let (x, w) = (random(3 * 600, 3), random(700 * 600, 4));
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            pool.install(|| product(&x, 3, &w))
        };
        let one = run(1);
        assert!([2, 3, 5].into_iter().all(|threads| run(threads) == one));
    }

    #[test]
    fn the_first_of_the_largest() {
        let rows = [[1.0, 3.0, 3.0], [f32::NAN, f32::NAN, f32::NAN]];
        let rows = Tensor::<2>::from_floats(rows, &burn::tensor::Device::flex());
        assert_eq!(largest_of_rows(rows), [1, 0]);
    }
}
