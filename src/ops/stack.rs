//! Matrices of f32 put together and taken apart, many at once.

use burn::tensor::Tensor;

/// Matrices in one, one under the other (dimension 0) or side by side (1); of each group, without autodiff.
///
/// # Shapes
/// - `[r_i, n]`, 0 → `[Σ r_i, n]`; `[n, r_i]`, 1 → `[n, Σ r_i]`
pub fn stacked(groups: Vec<(Vec<Tensor<2>>, usize)>) -> Vec<Tensor<2>> {
    #[cfg(feature = "cuda")]
    if groups.iter().flat_map(|(matrices, _)| matrices).all(super::cuda::stack::takes) {
        return super::cuda::stack::stacked(groups);
    }
    groups.into_iter().map(|(matrices, dim)| Tensor::cat(matrices, dim)).collect()
}

/// What [`stacked`] has put together, apart again, flattened; each group with its dimension and sizes.
///
/// # Shapes
/// - `[Σ r_i, n]`, 0 → `[r_i · n]`; `[n, Σ r_i]`, 1 → `[n · r_i]`
pub fn apart(groups: Vec<(Tensor<2>, usize, Vec<usize>)>) -> Vec<Vec<Tensor<1>>> {
    #[cfg(feature = "cuda")]
    if groups.iter().all(|(matrix, ..)| super::cuda::stack::takes(matrix)) {
        return super::cuda::stack::apart(groups);
    }
    let flat = |x: Tensor<2>| {
        let n = x.shape().num_elements();
        x.reshape([n])
    };
    let split = |(matrix, dim, sizes): (Tensor<2>, usize, Vec<usize>)| {
        matrix.split_with_sizes(sizes, dim).into_iter().map(flat).collect()
    };
    groups.into_iter().map(split).collect()
}
