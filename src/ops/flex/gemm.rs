//! Matrix products over slices, by the `gemm` crate.
//!
//! What its results depend on (gemm 0.19, read from its source and tested below): threads share
//! out tiles of the result and never the inner dimension, so the number of threads and their timing
//! change nothing. How the inner dimension is cut into blocks depends on its length, and for small
//! results (both sides up to 64) on that fact too; results of one row, one column or up to 256
//! elements have kernels of their own. [`product`] keeps clear of these for the rows.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use gemm::Parallelism;

use super::Buffer;

/// A matrix in a slice: element (i, j) at `i · row_step + j · column_step`.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_step: usize,
    column_step: usize,
}

impl<'a> Matrix<'a> {
    /// A matrix whose rows lie one after the other.
    pub fn new(values: &'a [f32], rows: usize, columns: usize) -> Self {
        Self::strided(values, rows, columns, columns)
    }

    /// A matrix whose rows begin `row_step` elements apart.
    pub fn strided(values: &'a [f32], rows: usize, columns: usize, row_step: usize) -> Self {
        assert_fits(values.len(), rows, columns, row_step);
        Self { values, rows, columns, row_step, column_step: 1 }
    }

    /// The transpose.
    pub fn t(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_step: self.column_step,
            column_step: self.row_step,
            ..self
        }
    }
}

fn assert_fits(len: usize, rows: usize, columns: usize, row_step: usize) {
    let needed = if rows == 0 || columns == 0 { 0 } else { (rows - 1) * row_step + columns };
    assert!(columns <= row_step || rows <= 1, "rows of {columns} elements, {row_step} apart, overlap");
    assert!(needed <= len, "a {rows}×{columns} matrix needs {needed} elements, the slice has {len}");
}

/// Where a product goes, and whether it replaces what is there or is added to it.
pub struct Target<'a> {
    start: *mut f32,
    rows: usize,
    columns: usize,
    row_step: usize,
    add: bool,
    memory: PhantomData<&'a mut f32>,
}

impl<'a> Target<'a> {
    /// Writes to every element of a matrix.
    pub fn write(slots: &'a mut [MaybeUninit<f32>], rows: usize, columns: usize) -> Self {
        assert_fits(slots.len(), rows, columns, columns);
        let start = slots.as_mut_ptr().cast();
        Self { start, rows, columns, row_step: columns, add: false, memory: PhantomData }
    }

    /// As [`Target::write`], over values.
    pub fn overwrite(values: &'a mut [f32], rows: usize, columns: usize) -> Self {
        Self { add: false, ..Self::add(values, rows, columns) }
    }

    /// Adds to every element of a matrix.
    pub fn add(values: &'a mut [f32], rows: usize, columns: usize) -> Self {
        Self::add_strided(values, rows, columns, columns)
    }

    /// As [`Target::add`], rows beginning `row_step` elements apart.
    pub fn add_strided(values: &'a mut [f32], rows: usize, columns: usize, row_step: usize) -> Self {
        assert_fits(values.len(), rows, columns, row_step);
        Self { start: values.as_mut_ptr(), rows, columns, row_step, add: true, memory: PhantomData }
    }

    /// Writes to a matrix with rows `row_step` elements apart.
    ///
    /// # Safety
    /// Until the product is there, nothing else touches the elements of this matrix (what lies
    /// between its rows may be in use), and they stay allocated.
    pub unsafe fn raw(start: *mut f32, rows: usize, columns: usize, row_step: usize) -> Self {
        Self { start, rows, columns, row_step, add: false, memory: PhantomData }
    }
}

/// Who computes a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread; right inside a parallel loop.
    One,
    /// All threads of the pool, for products large enough.
    All,
}

/// target ← a · b, or target ← target + a · b.
pub fn multiply(target: Target<'_>, a: Matrix<'_>, b: Matrix<'_>, threads: Threads) {
    assert_eq!(a.columns, b.rows, "inner dimensions");
    assert_eq!((target.rows, target.columns), (a.rows, b.columns), "dimensions of the result");
    let parallelism = match threads {
        Threads::One => Parallelism::None,
        Threads::All => Parallelism::Rayon(0),
    };
    // SAFETY: the constructors have checked that each matrix lies within its slice; a target is
    // borrowed mutably (or vouched for), so it overlaps neither operand; without `add` gemm doesn't
    // read it.
    unsafe {
        gemm::gemm(
            a.rows,
            b.columns,
            a.columns,
            target.start,
            1,
            target.row_step as isize,
            target.add,
            a.values.as_ptr(),
            a.column_step as isize,
            a.row_step as isize,
            b.values.as_ptr(),
            b.column_step as isize,
            b.row_step as isize,
            1.0f32,
            1.0f32,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// x · b in new memory, where each row depends on that row of `x` and on b alone, bit for bit: not
/// on the other rows, nor on how many there are.
///
/// # Shapes
/// - x: `[rows, inner]`, contiguous → `[rows, b.columns]`
pub fn product(x: &[f32], rows: usize, b: Matrix<'_>, threads: Threads) -> Vec<f32> {
    let (inner, columns) = (b.rows, b.columns);
    assert_eq!(x.len(), rows * inner, "rows of x");
    let needed = least_rows(columns);
    if rows == 0 || rows >= needed {
        let mut out = Buffer::new(rows * columns);
        multiply(Target::write(out.slots(), rows, columns), Matrix::new(x, rows, inner), b, threads);
        // SAFETY: a product without `add` writes every element.
        return unsafe { out.finish() };
    }
    let mut padded = x.to_vec();
    padded.resize(needed * inner, 0.0);
    let mut out = product(&padded, needed, b, threads);
    out.truncate(rows * columns);
    out
}

/// y ← y + x · b, each row on its own as in [`product`].
///
/// # Shapes
/// - y: `[rows, b.columns]`, x: `[rows, b.rows]`, both contiguous
pub fn add_product(y: &mut [f32], x: &[f32], rows: usize, b: Matrix<'_>, threads: Threads) {
    let (inner, columns) = (b.rows, b.columns);
    assert_eq!((y.len(), x.len()), (rows * columns, rows * inner), "rows of y and x");
    let needed = least_rows(columns);
    if rows == 0 || rows >= needed {
        multiply(Target::add(y, rows, columns), Matrix::new(x, rows, inner), b, threads);
        return;
    }
    let (mut padded_y, mut padded_x) = (y.to_vec(), x.to_vec());
    padded_y.resize(needed * columns, 0.0);
    padded_x.resize(needed * inner, 0.0);
    add_product(&mut padded_y, &padded_x, needed, b, threads);
    y.copy_from_slice(&padded_y[..y.len()]);
}

/// Rows from which gemm takes its general path for results with so many columns.
fn least_rows(columns: usize) -> usize {
    match columns {
        0..4 => 257,
        4..=64 => 65,
        65..=256 => 256 / columns + 2,
        _ => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::super::random;
    use super::*;

    fn naive(a: Matrix<'_>, b: Matrix<'_>) -> Vec<f64> {
        let at = |m: Matrix<'_>, i: usize, j: usize| f64::from(m.values[i * m.row_step + j * m.column_step]);
        let element = |i, j| (0..a.columns).map(|k| at(a, i, k) * at(b, k, j)).sum();
        (0..a.rows * b.columns).map(|n| element(n / b.columns, n % b.columns)).collect()
    }

    #[test]
    fn products_in_every_layout() {
        for (m, n, k) in
            [(1, 1, 1), (1, 7, 5), (7, 1, 5), (3, 4, 2), (16, 16, 33), (70, 33, 600), (5, 90, 17)]
        {
            let (x, y) = (random(m * k, 1), random(k * n, 2));
            for layout in 0..4 {
                let a = if layout & 1 == 0 { Matrix::new(&x, m, k) } else { Matrix::new(&x, k, m).t() };
                let b = if layout & 2 == 0 { Matrix::new(&y, k, n) } else { Matrix::new(&y, n, k).t() };
                let mut out = vec![f32::NAN; m * n];
                multiply(Target::overwrite(&mut out, m, n), a, b, Threads::All);
                multiply(Target::add(&mut out, m, n), a, b, Threads::One);
                for (got, exact) in out.iter().zip(naive(a, b)) {
                    // |terms| ≤ 1: k roundings of at most k · 6e-8 each, in practice far fewer.
                    let error = (f64::from(*got) - 2.0 * exact).abs();
                    assert!(error < 1e-5 * (k as f64).sqrt(), "{m}×{n}×{k}, layout {layout}: off by {error}");
                }
            }
        }
    }

    #[test]
    fn an_empty_inner_dimension_gives_zeros() {
        let mut out = vec![f32::NAN; 6];
        multiply(
            Target::overwrite(&mut out, 2, 3),
            Matrix::new(&[], 2, 0),
            Matrix::new(&[], 0, 3),
            Threads::One,
        );
        assert_eq!(out, [0.0; 6]);
    }

    /// The promise of [`product`], for widths around each of gemm's special cases.
    #[test]
    fn a_row_depends_on_itself_alone() {
        for inner in [1, 2, 3, 64, 513, 600, 1536] {
            for columns in [1, 2, 3, 4, 8, 16, 48, 64, 65, 130, 256, 257, 576] {
                let (x, w) = (random(300 * inner, 3), random(columns * inner, 4));
                for transposed in [false, true] {
                    let b = match transposed {
                        true => Matrix::new(&w, columns, inner).t(),
                        false => Matrix::new(&w, inner, columns),
                    };
                    let all = product(&x, 300, b, Threads::All);
                    let mut all_sum = vec![0.75; all.len()];
                    add_product(&mut all_sum, &x, 300, b, Threads::All);
                    let rows_of = |first: usize, rows: usize| &x[first * inner..(first + rows) * inner];
                    for (first, rows) in [(0, 1), (7, 1), (3, 2), (5, 31), (64, 64), (100, 65), (1, 257)] {
                        let some = product(rows_of(first, rows), rows, b, Threads::One);
                        let same =
                            some.iter().zip(&all[first * columns..]).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(
                            same,
                            "inner {inner}, columns {columns}, transposed {transposed}, {rows} rows"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn threads_change_nothing() {
        let (m, n, k) = (300, 700, 1100);
        let (x, w) = (random(m * k, 5), random(n * k, 6));
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            pool.install(|| product(&x, m, Matrix::new(&w, n, k).t(), Threads::All))
        };
        let one = run(1);
        for threads in [2, 3, 5, 8] {
            assert!(run(threads) == one, "{threads} threads");
        }
    }
}
