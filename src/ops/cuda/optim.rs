//! AdamW and sums of squares over many tensors in one launch each.

use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::sys as cu;

use super::driver::{Side, must};
use super::kernels::{Arg, Files, Grid, Module};
use super::tensor::{dense, empty, gpu, is_card, pointer, upload};
use crate::ops::AdamW;

/// Elements of a piece: one block works on it.
const PIECE: usize = 8192;
/// The counter of finished blocks.
const FINISHED: usize = 3;

/// `Piece` of `optimizer.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Piece {
    parameter: u64,
    m: u64,
    v: u64,
    grad: u64,
    copy: u64,
    count: i32,
    weight_decay: f32,
}

/// Whether the kernels take this tensor.
pub fn takes(x: &Tensor<1>) -> bool {
    x.dtype() == DType::F32 && !x.is_autodiff() && x.dims()[0] > 0 && is_card(&x.device())
}

fn primitive(x: Tensor<1>) -> CubeTensor {
    dense(x.try_into_primitive::<Cube>().expect("`takes` has seen the device"))
}

/// The pieces of a tensor's elements at these addresses.
fn pieces(count: usize, [parameter, m, v, grad]: [u64; 4], weight_decay: f32) -> impl Iterator<Item = Piece> {
    (0..count).step_by(PIECE).map(move |first| {
        let [parameter, m, v, grad] =
            [parameter, m, v, grad].map(|x| if x == 0 { 0 } else { x + 4 * first as u64 });
        let count = PIECE.min(count - first) as i32;
        Piece { parameter, m, v, grad, copy: 0, count, weight_decay }
    })
}

/// The table on the card.
fn table(like: &CubeTensor, pieces: &[Piece]) -> CubeTensor {
    let bytes: &[u8] = bytemuck::cast_slice(pieces);
    upload(like, bytes, [bytes.len() / 4], DType::I32)
}

/// Σ x² over all of them.
pub fn sum_squares(xs: Vec<Tensor<1>>) -> Tensor<1> {
    let xs: Vec<CubeTensor> = xs.into_iter().map(primitive).collect();
    let like = &xs[0];
    let list: Vec<Piece> = xs.iter().flat_map(|x| pieces(x.shape()[0], [0, 0, 0, pointer(x)], 0.0)).collect();
    let table = table(like, &list);
    let partials = empty(like, [list.len()], DType::F32);
    let out = empty(like, [1], DType::F32);
    let gpu = gpu(like);
    let arguments = [
        pointer(&table).into(),
        pointer(&partials).into(),
        gpu.counter(FINISHED).into(),
        pointer(&out).into(),
    ];
    let module = Module::bf16(Files::Optimizer, 0);
    gpu.enter(|side| side.launch(module, "sum_squares", Grid::new(list.len(), 256), &arguments));
    Tensor::from_primitive::<Cube>(out)
}

/// Whether one launch can do these updates: they differ in nothing but weight decay.
pub fn alike(steps: &[AdamW]) -> bool {
    let same = |step: &AdamW| AdamW { weight_decay: 0.0, ..*step };
    steps.windows(2).all(|pair| same(&pair[0]) == same(&pair[1]))
}

/// One update of each `[parameter, m, v, gradient]`: the new parameters, m and v. Memory that
/// nobody else holds is updated in place.
pub fn adamw(tensors: Vec<[Tensor<1>; 4]>, steps: &[AdamW]) -> Vec<[Tensor<1>; 3]> {
    let mut copies = Vec::new();
    let mut list = Vec::new();
    let mut kept = Vec::with_capacity(tensors.len());
    for (tensors, step) in tensors.into_iter().zip(steps) {
        let [param, m, v, grad] = tensors.map(primitive);
        let [param, m, v] = [param, m, v].map(|x| own(x, &mut copies));
        let addresses = [&param, &m, &v, &grad].map(pointer);
        list.extend(pieces(param.shape()[0], addresses, step.weight_decay as f32));
        kept.push([param, m, v, grad]);
    }
    let like = &kept[0][0];
    let table = table(like, &list);
    let arguments = [pointer(&table).into(), 0u64.into(), scalars(&steps[0])];
    gpu(like).enter(|side| {
        copies.iter().for_each(|copy| copy.run(side));
        let grid = Grid::new(list.len(), 256);
        side.launch(Module::bf16(Files::Optimizer, 0), "adamw", grid, &arguments);
    });
    let updated = kept.into_iter().map(|[param, m, v, _]| [param, m, v].map(Tensor::from_primitive::<Cube>));
    updated.collect()
}

/// `Adam` of `optimizer.cu`.
fn scalars(step: &AdamW) -> Arg {
    let k = step.update as i32;
    let numbers = [
        step.lr,
        step.beta1,
        step.beta2,
        step.eps,
        1.0 - step.beta1.powi(k),
        (1.0 - step.beta2.powi(k)).sqrt(),
        step.grad_scale,
        0.0,
    ];
    Arg::Floats(numbers.map(|x| x as f32))
}

/// A copy to make before the update.
struct Copy {
    from: CubeTensor,
    from_pointer: u64,
    to_pointer: u64,
}

impl Copy {
    fn run(&self, side: &Side<'_>) {
        let bytes = self.from.shape().num_elements() * 4;
        // SAFETY: both are tensors of that many bytes, held until the launches are queued.
        let result =
            unsafe { cu::cuMemcpyDtoDAsync_v2(self.to_pointer, self.from_pointer, bytes, side.gpu.stream()) };
        must(result, "copying a parameter");
    }
}

/// The tensor if nobody else holds its memory, else a place for a copy of it.
fn own(x: CubeTensor, copies: &mut Vec<Copy>) -> CubeTensor {
    if x.can_mut() {
        return x;
    }
    let to = empty(&x, x.shape(), x.dtype);
    copies.push(Copy { from_pointer: pointer(&x), to_pointer: pointer(&to), from: x });
    to
}
