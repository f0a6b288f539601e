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

/// Where the elements of a parameter, its moments, gradient and copy lie; `None` where a kernel doesn't ask.
#[derive(Clone, Copy, Default)]
struct Places<'a> {
    parameter: Option<&'a CubeTensor>,
    moments: Option<[&'a CubeTensor; 2]>,
    grad: Option<&'a CubeTensor>,
    copy: Option<&'a CubeTensor>,
}

/// The pieces of `count` elements.
fn pieces(count: usize, places: Places<'_>) -> impl Iterator<Item = Piece> {
    let whole = |x: Option<&CubeTensor>| x.map(|x| (address(x), x.dtype.size()));
    let [parameter, grad, copy] = [places.parameter, places.grad, places.copy].map(whole);
    let [m, v] = [0, 1].map(|n| whole(places.moments.map(|moments| moments[n])));
    (0..count).step_by(PIECE).map(move |first| {
        let at = |x: Option<(u64, usize)>| x.map_or(0, |(address, width)| address + (width * first) as u64);
        Piece {
            parameter: at(parameter),
            m: at(m),
            v: at(v),
            grad: at(grad),
            copy: at(copy),
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
    let of_one = |grad| pieces(count(grad), Places { grad: Some(grad), ..Places::default() });
    let list: Vec<Piece> = xs.iter().flat_map(of_one).collect();
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
        let (parameter, grad) = (Some(&params[n]), Some(&grads[n]));
        let places = Places { parameter, moments: Some([&ms[n], &vs[n]]), grad, copy: None };
        let pieces = pieces(count(&params[n]), places);
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

/// Whether [`add`] takes this gradient, and [`cast`] this tensor.
pub fn takes_either(x: &Tensor<1>) -> bool {
    takes(x) || x.dtype() == DType::BF16 && !x.is_autodiff() && x.dims()[0] > 0 && is_card(&x.device())
}

/// Each sum with its gradient added, in one launch for each type of gradients.
pub fn add(sums: Vec<Tensor<1>>, grads: Vec<Tensor<1>>) -> Vec<Tensor<1>> {
    let mut copies = Vec::new();
    let sums = own(sums.into_iter().map(primitive).collect(), &mut copies);
    let grads: Vec<CubeTensor> = grads.into_iter().map(primitive).collect();
    if !copies.is_empty() {
        // This look-up waits for what was launched before.
        pointer(&sums[0]);
        gpu(&sums[0]).enter(|side| copies.iter().for_each(|copy| copy.run(side)));
    }
    let place = |(sum, grad)| Places { parameter: Some(sum), grad: Some(grad), ..Places::default() };
    for dtype in [DType::F32, DType::BF16] {
        let pairs = sums.iter().zip(&grads).filter(|(_, grad)| grad.dtype == dtype);
        over_pieces(gradients(dtype), "add_gradients", pairs.map(place));
    }
    sums.into_iter().map(Tensor::from_primitive::<Cube>).collect()
}

/// Each in the other type, of f32 and bf16, in one allocation.
pub fn cast(xs: Vec<Tensor<1>>, dtype: DType) -> Vec<Tensor<1>> {
    let xs: Vec<CubeTensor> = xs.into_iter().map(primitive).collect();
    let shapes: Vec<_> = xs.iter().map(TensorMetadata::shape).collect();
    let out = super::tensor::pieces(&xs[0], &shapes, dtype);
    let pairs = xs.iter().zip(&out);
    match dtype {
        DType::F32 => {
            let place = |(x, out)| Places { parameter: Some(out), grad: Some(x), ..Places::default() };
            over_pieces(gradients(DType::BF16), "put_gradients", pairs.map(place));
        }
        _ => {
            let place = |(x, out)| Places { parameter: Some(x), copy: Some(out), ..Places::default() };
            over_pieces(gradients(DType::F32), "round_parameters", pairs.map(place));
        }
    }
    out.into_iter().map(Tensor::from_primitive::<Cube>).collect()
}

/// The kernels for gradients of this type.
fn gradients(dtype: DType) -> Module {
    match dtype {
        DType::BF16 => Module::bf16(Files::HalfGradients, 0),
        _ => module(DType::F32),
    }
}

/// A kernel that takes pieces and nothing else.
fn over_pieces<'a>(module: Module, kernel: &'static str, places: impl Iterator<Item = Places<'a>>) {
    let (mut list, mut like) = (Vec::new(), None);
    for places in places {
        let Some(parameter) = places.parameter else { continue };
        list.extend(pieces(count(parameter), places));
        like = Some(parameter);
    }
    let Some(like) = like else { return };
    let table = table(like, &list);
    // This look-up waits for what was launched before.
    let arguments = [pointer(&table).into()];
    gpu(like).enter(|side| side.launch(module, kernel, Grid::new(list.len(), 256), &arguments));
}

fn count(x: &CubeTensor) -> usize {
    x.shape().num_elements()
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
