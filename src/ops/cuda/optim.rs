//! AdamW and sums of squares over many tensors in one launch each.

use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::sys as cu;

use super::driver::{Side, must};
use super::kernels::{Arg, Files, Grid, Module};
use super::tensor::{address, allocation, dense, empty, gpu, is_card, pointer, upload};
use crate::ops::{AdamW, Clip};

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
    first: u32,
    rounding: u32,
}

/// Whether the kernels take this tensor.
pub fn takes(x: &Tensor<1>) -> bool {
    x.dtype() == DType::F32 && !x.is_autodiff() && x.dims()[0] > 0 && is_card(&x.device())
}

/// Whether the kernels take this parameter, its moments and gradient.
pub fn takes_update([param, m, v, grad]: [&Tensor<1>; 4]) -> bool {
    let halves = |x: &Tensor<1>| x.dtype() == DType::BF16 && !x.is_autodiff();
    [param, grad].into_iter().all(takes) && ([m, v].into_iter().all(takes) || [m, v].into_iter().all(halves))
}

/// The optimizer's kernels for moments of this type.
fn module(moments: DType) -> Module {
    Module::bf16(Files::Optimizer, moments.size() * 8)
}

fn primitive(x: Tensor<1>) -> CubeTensor {
    dense(x.try_into_primitive::<Cube>().expect("`takes` has seen the device"))
}

/// The pieces of a tensor's elements at these addresses, moments of `width` bytes.
fn pieces(count: usize, addresses: [u64; 4], width: usize) -> impl Iterator<Item = Piece> {
    (0..count).step_by(PIECE).map(move |first| {
        let at = |n: usize, width: usize| match addresses[n] {
            0 => 0,
            address => address + (width * first) as u64,
        };
        Piece {
            parameter: at(0, 4),
            m: at(1, width),
            v: at(2, width),
            grad: at(3, 4),
            copy: 0,
            count: PIECE.min(count - first) as i32,
            weight_decay: 0.0,
            first: first as u32,
            rounding: 0,
        }
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
    let list: Vec<Piece> = xs.iter().flat_map(|x| pieces(x.shape()[0], [0, 0, 0, address(x)], 4)).collect();
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
    gpu.enter(|side| side.launch(module(DType::F32), "sum_squares", Grid::new(list.len(), 256), &arguments));
    Tensor::from_primitive::<Cube>(out)
}

/// Whether one launch can do these updates: they differ in nothing but weight decay and random numbers.
pub fn alike(steps: &[AdamW], tensors: &[[Tensor<1>; 4]]) -> bool {
    let same = |step: &AdamW| AdamW { weight_decay: 0.0, rounding: 0, ..*step };
    steps.windows(2).all(|pair| same(&pair[0]) == same(&pair[1]))
        && tensors.windows(2).all(|pair| pair[0][1].dtype() == pair[1][1].dtype())
}

/// One update of each `[parameter, m, v, gradient]`: the new parameters, m and v. Memory that nobody else holds is
/// updated in place; the others' new values share one allocation.
pub fn adamw(tensors: Vec<[Tensor<1>; 4]>, steps: &[AdamW], clip: Option<&Clip>) -> Vec<[Tensor<1>; 3]> {
    let (mut all, mut copies): ([Vec<CubeTensor>; 4], _) = (Default::default(), Vec::new());
    for of_one in tensors {
        of_one.into_iter().zip(&mut all).for_each(|(tensor, list)| list.push(primitive(tensor)));
    }
    let [params, ms, vs, grads] = all;
    let [params, ms, vs] = [params, ms, vs].map(|list| own(list, &mut copies));
    let moments = ms[0].dtype();
    let mut list = Vec::new();
    for (n, step) in steps.iter().enumerate() {
        let addresses = [&params[n], &ms[n], &vs[n], &grads[n]].map(address);
        let pieces = pieces(params[n].shape()[0], addresses, moments.size());
        let (weight_decay, rounding) = (step.weight_decay as f32, step.rounding);
        list.extend(pieces.map(|piece| Piece { weight_decay, rounding, ..piece }));
    }
    let like = &params[0];
    let table = table(like, &list);
    let squares = clip.map(|clip| primitive(clip.squares.clone()));
    // These look-ups wait for what was launched before.
    let squares_at = squares.as_ref().map_or(0, pointer);
    let arguments = [pointer(&table).into(), squares_at.into(), scalars(&steps[0], clip)];
    gpu(like).enter(|side| {
        copies.iter().for_each(|copy| copy.run(side));
        let grid = Grid::new(list.len(), 256);
        side.launch(module(moments), "adamw", grid, &arguments);
    });
    drop(grads);
    let updated = params.into_iter().zip(ms).zip(vs);
    updated.map(|((param, m), v)| [param, m, v].map(Tensor::from_primitive::<Cube>)).collect()
}

/// Each sum with its gradient added, in one launch.
pub fn add(sums: Vec<Tensor<1>>, grads: Vec<Tensor<1>>) -> Vec<Tensor<1>> {
    let mut copies = Vec::new();
    let sums = own(sums.into_iter().map(primitive).collect(), &mut copies);
    let grads: Vec<CubeTensor> = grads.into_iter().map(primitive).collect();
    let pairs = sums.iter().zip(&grads);
    let list: Vec<Piece> =
        pairs.flat_map(|(sum, g)| pieces(sum.shape()[0], [address(sum), 0, 0, address(g)], 4)).collect();
    let table = table(&sums[0], &list);
    // This look-up waits for what was launched before.
    let arguments = [pointer(&table).into()];
    gpu(&sums[0]).enter(|side| {
        copies.iter().for_each(|copy| copy.run(side));
        let grid = Grid::new(list.len(), 256);
        side.launch(module(DType::F32), "add_gradients", grid, &arguments);
    });
    sums.into_iter().map(Tensor::from_primitive::<Cube>).collect()
}

/// `Adam` of `optimizer.cu`.
fn scalars(step: &AdamW, clip: Option<&Clip>) -> Arg {
    let k = step.update as i32;
    let numbers = [
        step.lr,
        step.beta1,
        step.beta2,
        step.eps,
        1.0 - step.beta1.powi(k),
        (1.0 - step.beta2.powi(k)).sqrt(),
        step.grad_scale,
        clip.and_then(|clip| clip.max_norm).unwrap_or(0.0),
    ];
    Arg::Floats(numbers.map(|x| x as f32))
}

/// A copy to make before a launch.
pub(super) struct Copy {
    /// The tensors whose memory it is.
    held: Vec<CubeTensor>,
    from: u64,
    to: u64,
    bytes: usize,
    /// Those that it reads and writes: a copy over the edge of one is refused, even where the next follows at once.
    allocations: [usize; 2],
}

impl Copy {
    pub fn run(&self, side: &Side<'_>) {
        // SAFETY: both are memory of that many bytes, held until the launches are queued.
        debug_assert!(!self.held.is_empty());
        let result = unsafe { cu::cuMemcpyDtoDAsync_v2(self.to, self.from, self.bytes, side.gpu.stream()) };
        must(result, "copying parameters");
    }
}

/// Places for the tensors in one allocation, in order, and the copies that fill them.
pub(super) fn gathered(tensors: Vec<Tensor<1>>) -> (Vec<CubeTensor>, Vec<Copy>) {
    let mut copies = Vec::new();
    let places = moved(tensors.into_iter().map(primitive).collect(), |_| true, &mut copies);
    (places, copies)
}

/// The tensors where nobody else holds their memory, else new places for them and the copies that fill those.
fn own(tensors: Vec<CubeTensor>, copies: &mut Vec<Copy>) -> Vec<CubeTensor> {
    moved(tensors, |tensor| !tensor.can_mut(), copies)
}

/// The tensors, those that are `wanted` in new places of one allocation, and the copies that fill them. What lies together
/// is copied together.
fn moved(
    mut tensors: Vec<CubeTensor>,
    wanted: impl Fn(&CubeTensor) -> bool,
    copies: &mut Vec<Copy>,
) -> Vec<CubeTensor> {
    let chosen: Vec<usize> = (0..tensors.len()).filter(|&n| wanted(&tensors[n])).collect();
    let Some(&first) = chosen.first() else { return tensors };
    let shapes: Vec<_> = chosen.iter().map(|&n| tensors[n].shape()).collect();
    let dtype = tensors[first].dtype();
    let places = super::tensor::pieces(&tensors[first], &shapes, dtype);
    for (n, place) in chosen.into_iter().zip(places) {
        let old = std::mem::replace(&mut tensors[n], place);
        let (from, to) = (address(&old), address(&tensors[n]));
        let bytes = old.shape().num_elements() * dtype.size();
        let allocations = [allocation(&old), allocation(&tensors[n])];
        match copies.last_mut() {
            Some(last)
                if last.allocations == allocations
                    && follows(last, to)
                    && last.from + (to - last.to) == from =>
            {
                last.bytes = (to - last.to) as usize + bytes;
                last.held.push(old);
            }
            _ => copies.push(Copy { held: vec![old], from, to, bytes, allocations }),
        }
    }
    tensors
}

/// Whether the place follows what the copy fills, but for the gap up to its alignment.
fn follows(copy: &Copy, to: u64) -> bool {
    let end = copy.to + copy.bytes as u64;
    end <= to && to - end < super::tensor::PIECE_ALIGNMENT
}
