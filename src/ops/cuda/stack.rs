//! Many matrices of f32 into others in one launch: adapters of several runs stacked, and their gradients apart.

use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::gemm::Matrix;
use super::kernels::{Files, Grid, Module};
use super::tensor::{gpu, is_on_card, known_matrix, pieces, pointer, rows, upload};

/// Numbers of a block, if a row isn't longer.
const BLOCK: usize = 8192;

/// `Copy` of `adapters.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Copy {
    from: u64,
    to: u64,
    from_stride: i32,
    to_stride: i32,
    rows: i32,
    columns: i32,
}

/// Whether the kernel takes this matrix.
pub fn takes(x: &Tensor<2>) -> bool {
    x.dtype() == DType::F32 && !x.is_autodiff() && x.shape().num_elements() > 0 && is_on_card(x)
}

fn primitive(x: Tensor<2>) -> CubeTensor {
    rows(x.try_into_primitive::<Cube>().expect("`takes` has seen the device"))
}

/// See [`crate::ops::stacked`].
pub fn stacked(groups: Vec<(Vec<Tensor<2>>, usize)>) -> Vec<Tensor<2>> {
    let groups: Vec<(Vec<CubeTensor>, usize)> =
        groups.into_iter().map(|(list, dim)| (list.into_iter().map(primitive).collect(), dim)).collect();
    let shapes: Vec<Shape> = groups.iter().map(|(list, dim)| together(list, *dim)).collect();
    let Some(like) = groups.first().map(|(list, _)| list[0].clone()) else { return Vec::new() };
    let places = pieces(&like, &shapes, DType::F32);
    let mut copies = Vec::new();
    for ((list, dim), place) in groups.iter().zip(&places) {
        let (whole, mut first) = (known_matrix(place), 0);
        for from in list.iter().map(known_matrix) {
            let size = [from.rows, from.columns][*dim];
            push(&mut copies, from, part(whole, *dim, first, size));
            first += size;
        }
    }
    run(&like, &copies);
    places.into_iter().map(Tensor::from_primitive::<Cube>).collect()
}

/// See [`crate::ops::apart`].
pub fn apart(groups: Vec<(Tensor<2>, usize, Vec<usize>)>) -> Vec<Vec<Tensor<1>>> {
    let groups: Vec<(CubeTensor, usize, Vec<usize>)> =
        groups.into_iter().map(|(matrix, dim, sizes)| (primitive(matrix), dim, sizes)).collect();
    let Some(like) = groups.first().map(|(matrix, ..)| matrix.clone()) else { return Vec::new() };
    let mut parts = Vec::new();
    for (matrix, dim, sizes) in &groups {
        let (whole, mut first) = (known_matrix(matrix), 0);
        for &size in sizes {
            parts.push(part(whole, *dim, first, size));
            first += size;
        }
    }
    let shapes: Vec<Shape> = parts.iter().map(|from| Shape::new([from.rows * from.columns])).collect();
    let places = pieces(&like, &shapes, DType::F32);
    let mut copies = Vec::new();
    for (from, place) in parts.into_iter().zip(&places) {
        let to = Matrix { pointer: known_matrix(place).pointer, stride: from.columns, ..from };
        push(&mut copies, from, to);
    }
    run(&like, &copies);
    let mut places = places.into_iter().map(Tensor::from_primitive::<Cube>);
    groups.iter().map(|(.., sizes)| places.by_ref().take(sizes.len()).collect()).collect()
}

fn together(list: &[CubeTensor], dim: usize) -> Shape {
    let sum = list.iter().map(|x| x.shape()[dim]).sum();
    let mut shape = list[0].shape();
    shape[dim] = sum;
    shape
}

fn part(whole: Matrix, dim: usize, first: usize, size: usize) -> Matrix {
    if dim == 0 { whole.rows(first, size) } else { whole.columns(first, size) }
}

/// The copy, in blocks.
fn push(copies: &mut Vec<Copy>, from: Matrix, to: Matrix) {
    let step = (BLOCK / from.columns).max(1);
    for first in (0..from.rows).step_by(step) {
        let n = step.min(from.rows - first);
        let (from, to) = (from.rows(first, n), to.rows(first, n));
        copies.push(Copy {
            from: from.pointer,
            to: to.pointer,
            from_stride: from.stride as i32,
            to_stride: to.stride as i32,
            rows: n as i32,
            columns: from.columns as i32,
        });
    }
}

fn run(like: &CubeTensor, copies: &[Copy]) {
    let bytes: &[u8] = bytemuck::cast_slice(copies);
    let table = upload(like, bytes, [bytes.len() / 4], DType::I32);
    // This look-up waits for what was launched before.
    let arguments = [pointer(&table).into()];
    let grid = Grid::new(copies.len(), 256);
    gpu(like).enter(|side| side.launch(Module::bf16(Files::Adapters, 0), "copy_blocks", grid, &arguments));
}
