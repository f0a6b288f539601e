//! Many tensors at once, in one launch where the device can: added, cast, put together and taken apart.

use burn::tensor::{DType, Tensor};

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

/// [`super::sum_squares`] of many tensors: values that add up to the sum over all, as few as is quick.
pub fn sum_squares_of(xs: Vec<Tensor<1>>) -> Vec<Tensor<1>> {
    #[cfg(feature = "cuda")]
    if !xs.is_empty() && xs.iter().all(super::cuda::optim::takes) {
        return vec![super::cuda::optim::sum_squares(xs)];
    }
    xs.into_iter().map(super::sum_squares).collect()
}

/// `sums[i] + more[i]` for each i, in the type of the sum.
///
/// # Panics
/// Where there are not as many of both.
pub fn add_each(sums: Vec<Tensor<1>>, more: Vec<Tensor<1>>) -> Vec<Tensor<1>> {
    assert_eq!(sums.len(), more.len(), "add_each: numbers of tensors");
    #[cfg(feature = "cuda")]
    if !sums.is_empty()
        && sums.iter().all(super::cuda::optim::takes)
        && more.iter().all(super::cuda::optim::takes_either)
    {
        return super::cuda::optim::add(sums, more);
    }
    let sum = |(sum, more): (Tensor<1>, Tensor<1>)| {
        let dtype = sum.dtype();
        sum + if more.dtype() == dtype { more } else { more.cast(dtype) }
    };
    sums.into_iter().zip(more).map(sum).collect()
}

/// Each in this type.
pub fn cast_each(xs: Vec<Tensor<1>>, dtype: DType) -> Vec<Tensor<1>> {
    #[cfg(feature = "cuda")]
    if !xs.is_empty()
        && matches!(dtype, DType::F32 | DType::BF16)
        && xs.iter().all(|x| x.dtype() != dtype && super::cuda::optim::takes_either(x))
    {
        return super::cuda::optim::cast(xs, dtype);
    }
    xs.into_iter().map(|x| if x.dtype() == dtype { x } else { x.cast(dtype) }).collect()
}
