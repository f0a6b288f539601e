//! Norm, rotary embedding and SwiGLU on the card: one pass forward, one backward.
//!
//! Saved for backward: handles of the inputs alone.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Cube, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::super::tape::record;
use super::kernels::{Arg, Files, Grid, Module};
use super::tensor::{dense, empty, gpu, is_on_card, pointer};
use crate::ops::Rope;

/// The row-wise ops.
#[backend_extension(Cube, Autodiff)]
pub trait ElementOps: Backend {
    /// See [`crate::ops::rms_norm`].
    fn cuda_rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64) -> FloatTensor<Self>;
    /// See [`crate::ops::qk_norm_rope`].
    fn cuda_norm_rope(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self>;
    /// [`crate::ops::qk_norm_rope`] without norm.
    fn cuda_rope(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self>;
    /// See [`crate::ops::swiglu`].
    fn cuda_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Whether the kernel takes rows of `x` with this norm weight.
fn takes_weight<const D: usize>(x: &Tensor<D>, weight: &Tensor<1>) -> bool {
    is_on_card(weight) && (weight.dtype() == x.dtype() || weight.dtype() == DType::F32)
}

/// Whether [`rms_norm`] takes these tensors.
pub fn takes_norm(x: &Tensor<2>, weight: &Tensor<1>) -> bool {
    let [rows, width] = x.dims();
    is_on_card(x) && takes_weight(x, weight) && rows > 0 && width.is_multiple_of(8) && width <= 32768
}

/// Whether [`qk_norm_rope`] takes these tensors.
pub fn takes_rope(x: &Tensor<3>, weight: Option<&Tensor<1>>, rope: &Rope) -> bool {
    let [tokens, heads, size] = x.dims();
    let tables = rope.cos.dtype() == DType::F32 && rope.sin.dtype() == DType::F32;
    let sizes = tokens > 0 && heads > 0 && matches!(size, 64 | 128);
    is_on_card(x) && weight.is_none_or(|weight| takes_weight(x, weight)) && tables && sizes
}

/// Whether [`swiglu`] takes these tensors.
pub fn takes_swiglu(gate: &Tensor<2>, up: &Tensor<2>) -> bool {
    let [rows, width] = gate.dims();
    is_on_card(gate) && gate.dtype() == up.dtype() && rows > 0 && width.is_multiple_of(8)
}

/// See [`crate::ops::rms_norm`].
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, eps: f64) -> Tensor<2> {
    assert_eq!(x.dims()[1], weight.dims()[0], "rms_norm: width of x and of the weight");
    let out = <Dispatch as ElementOps>::cuda_rms_norm(x.into_dispatch(), weight.into_dispatch(), eps);
    Tensor::from_dispatch(out)
}

/// See [`crate::ops::qk_norm_rope`].
pub fn qk_norm_rope(x: Tensor<3>, weight: Option<Tensor<1>>, eps: f64, rope: &Rope) -> Tensor<3> {
    let [t, _, d] = x.dims();
    assert_eq!(rope.cos.dims(), [t, d], "qk_norm_rope: cos");
    assert_eq!(rope.sin.dims(), [t, d], "qk_norm_rope: sin");
    let (cos, sin) = (rope.cos.clone().into_dispatch(), rope.sin.clone().into_dispatch());
    let x = x.into_dispatch();
    Tensor::from_dispatch(match weight {
        None => <Dispatch as ElementOps>::cuda_rope(x, cos, sin),
        Some(weight) => {
            assert_eq!(weight.dims(), [d], "qk_norm_rope: weight");
            <Dispatch as ElementOps>::cuda_norm_rope(x, weight.into_dispatch(), cos, sin, eps)
        }
    })
}

/// See [`crate::ops::swiglu`].
pub fn swiglu(gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    assert_eq!(gate.dims(), up.dims(), "swiglu: gate and up");
    Tensor::from_dispatch(<Dispatch as ElementOps>::cuda_swiglu(gate.into_dispatch(), up.into_dispatch()))
}

impl ElementOps for Cube {
    fn cuda_rms_norm(x: CubeTensor, weight: CubeTensor, eps: f64) -> CubeTensor {
        let (x, weight) = (dense(x), dense(weight));
        let out = empty(&x, x.shape(), x.dtype);
        let norm = Norm::new(&x, &weight);
        let [from, w, to] = [&x, &weight, &out].map(pointer);
        let blocks = norm.rows.div_ceil(norm.rows_per_block());
        let width = norm.width;
        let arguments = [
            from.into(),
            0u64.into(),
            w.into(),
            0u64.into(),
            to.into(),
            width.into(),
            width.into(),
            width.into(),
            width.into(),
            norm.rows.into(),
            (eps as f32).into(),
        ];
        let grid = Grid::new(blocks, norm.threads());
        gpu(&x).enter(|side| side.launch(norm.module, "rms_norm_forward", grid, &arguments));
        out
    }

    fn cuda_norm_rope(
        x: CubeTensor,
        weight: CubeTensor,
        cos: CubeTensor,
        sin: CubeTensor,
        eps: f64,
    ) -> CubeTensor {
        rotate(&dense(x), Some(&dense(weight)), &dense(cos), &dense(sin), eps)
    }

    fn cuda_rope(x: CubeTensor, cos: CubeTensor, sin: CubeTensor) -> CubeTensor {
        rotate(&dense(x), None, &dense(cos), &dense(sin), 0.0)
    }

    fn cuda_swiglu(gate: CubeTensor, up: CubeTensor) -> CubeTensor {
        let (gate, up) = (dense(gate), dense(up));
        let out = empty(&gate, gate.shape(), gate.dtype);
        let [rows, width] = [gate.shape()[0], gate.shape()[1]];
        let module = Module::of(Files::Swiglu, width, gate.dtype == DType::F32);
        let [g, u, o] = [&gate, &up, &out].map(pointer);
        let arguments = [g.into(), u.into(), o.into(), width.into(), width.into(), rows.into()];
        let grid = Grid::new((rows * width).div_ceil(2048), 256);
        gpu(&gate).enter(|side| side.launch(module, "swiglu_forward", grid, &arguments));
        out
    }
}

/// The norm's module and spread for a tensor.
struct Norm {
    module: Module,
    rows: usize,
    width: usize,
}

impl Norm {
    fn new(x: &CubeTensor, weight: &CubeTensor) -> Self {
        let [rows, width] = [x.shape()[0], x.shape()[1]];
        Self { module: module(Files::Norm, width, x, Some(weight)), rows, width }
    }

    /// Threads that share a row.
    fn row_threads(&self) -> usize {
        let mut threads = 32;
        while self.width > threads * 32 {
            threads *= 2;
        }
        threads
    }

    fn threads(&self) -> usize {
        self.row_threads().max(256)
    }

    fn rows_per_block(&self) -> usize {
        self.threads() / self.row_threads()
    }
}

fn module(files: Files, size: usize, x: &CubeTensor, weight: Option<&CubeTensor>) -> Module {
    let float32 = x.dtype == DType::F32;
    let wide = weight.is_some_and(|weight| weight.dtype == DType::F32);
    Module { weight_float32: wide && !float32, ..Module::of(files, size, float32) }
}

fn rotate(
    x: &CubeTensor,
    weight: Option<&CubeTensor>,
    cos: &CubeTensor,
    sin: &CubeTensor,
    eps: f64,
) -> CubeTensor {
    let [tokens, heads, size] = [x.shape()[0], x.shape()[1], x.shape()[2]];
    let out = empty(x, x.shape(), x.dtype);
    let [from, cos, sin, to] = [x, cos, sin, &out].map(pointer);
    let w = weight.map_or(0, pointer);
    let width = heads * size;
    // All heads count as query heads.
    let arguments = [
        from.into(),
        w.into(),
        w.into(),
        cos.into(),
        sin.into(),
        to.into(),
        to.into(),
        width.into(),
        size.into(),
        width.into(),
        width.into(),
        tokens.into(),
        heads.into(),
        0usize.into(),
        (eps as f32).into(),
    ];
    let (module, grid) = (module(Files::Rope, size, x, weight), Grid::new(tokens.div_ceil(8), 256));
    gpu(x).enter(|side| side.launch(module, "qk_norm_rope_forward", grid, &arguments));
    out
}

impl<C: CheckpointStrategy> ElementOps for Autodiff<Cube, C> {
    fn cuda_rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        let prepared = NormBackward.prepare::<C>([x.node(), weight.node()]).compute_bound().stateful();
        let (x, weight) = (dense(x.into_primitive()), dense(weight.into_primitive()));
        let out = Cube::cuda_rms_norm(x.clone(), weight.clone(), eps);
        record(prepared, || NormState { x, weight, eps: eps as f32 }, out)
    }

    fn cuda_norm_rope(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self> {
        let prepared = NormRopeBackward.prepare::<C>([x.node(), weight.node()]).compute_bound().stateful();
        let [x, weight, cos, sin] = [x, weight, cos, sin].map(|tensor| dense(tensor.into_primitive()));
        let out = rotate(&x, Some(&weight), &cos, &sin, eps);
        let state = || RopeState { x: Some(x), weight: Some(weight), cos, sin, eps: eps as f32 };
        record(prepared, state, out)
    }

    fn cuda_rope(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self> {
        let prepared = RopeBackward.prepare::<C>([x.node()]).compute_bound().stateful();
        let [x, cos, sin] = [x, cos, sin].map(|tensor| dense(tensor.into_primitive()));
        let out = rotate(&x, None, &cos, &sin, 0.0);
        record(prepared, || RopeState { x: None, weight: None, cos, sin, eps: 0.0 }, out)
    }

    fn cuda_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let prepared = SwigluBackward.prepare::<C>([gate.node(), up.node()]).compute_bound().stateful();
        let (gate, up) = (dense(gate.into_primitive()), dense(up.into_primitive()));
        let out = Cube::cuda_swiglu(gate.clone(), up.clone());
        record(prepared, || SwigluState { gate, up }, out)
    }
}

#[derive(Debug, Clone)]
struct NormState {
    x: CubeTensor,
    weight: CubeTensor,
    eps: f32,
}

#[derive(Debug)]
struct NormBackward;

impl Backward<Cube, 2> for NormBackward {
    type State = NormState;

    fn backward(self, ops: Ops<NormState, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = dense(grads.consume::<Cube>(&ops.node));
        let NormState { x, weight, eps } = ops.state;
        let [x_node, weight_node] = ops.parents;
        let norm = Norm::new(&x, &weight);
        let (rows, width, gpu) = (norm.rows, norm.width, gpu(&x));
        let dx = empty(&x, x.shape(), x.dtype);
        let mut blocks = rows.div_ceil(norm.rows_per_block());
        if weight_node.is_some() {
            blocks = blocks.min(8 * gpu.multiprocessors);
        }
        let sums = weight_node.is_some().then(|| WeightSums::new(&x, blocks, width));
        let [h, w, dy, to] = [&x, &weight, &grad, &dx].map(pointer);
        let mut arguments = vec![h.into(), w.into(), dy.into(), 0u64.into(), to.into()];
        arguments.extend(sums.as_ref().map(|sums| Arg::from(sums.partials_pointer)));
        arguments.extend([width, width, width, width, rows].map(Arg::from));
        arguments.push(eps.into());
        let name = if sums.is_some() { "rms_norm_backward_weight" } else { "rms_norm_backward" };
        let grid = Grid::new(blocks, norm.threads());
        gpu.enter(|side| {
            side.launch(norm.module, name, grid, &arguments);
            if let Some(sums) = &sums {
                sums.add(side);
            }
        });
        if let Some(node) = x_node {
            grads.register::<Cube>(node.id, dx);
        }
        if let (Some(node), Some(sums)) = (weight_node, sums) {
            grads.register::<Cube>(node.id, super::tensor::cast(sums.out, weight.dtype));
        }
    }
}

/// Blocks' shares of a weight's gradient, and their sum.
struct WeightSums {
    partials: CubeTensor,
    out: CubeTensor,
    partials_pointer: u64,
    out_pointer: u64,
}

impl WeightSums {
    fn new(like: &CubeTensor, blocks: usize, width: usize) -> Self {
        let partials = empty(like, [blocks, width], DType::F32);
        let out = empty(like, [width], DType::F32);
        let [partials_pointer, out_pointer] = [&partials, &out].map(pointer);
        Self { partials, out, partials_pointer, out_pointer }
    }

    fn add(&self, side: &mut super::driver::Side<'_>) {
        let [blocks, width] = [self.partials.shape()[0], self.partials.shape()[1]];
        let arguments = [
            self.partials_pointer.into(),
            self.out_pointer.into(),
            blocks.into(),
            width.into(),
            0usize.into(),
        ];
        let grid = Grid::new(width.div_ceil(32), 256);
        side.launch(Module::bf16(Files::Small, 0), "sum_partials", grid, &arguments);
    }
}

#[derive(Debug, Clone)]
struct RopeState {
    /// With a norm only.
    x: Option<CubeTensor>,
    weight: Option<CubeTensor>,
    cos: CubeTensor,
    sin: CubeTensor,
    eps: f32,
}

impl RopeState {
    /// The gradient of x, and that of the weight if `with_weight`.
    fn backward(&self, grad: CubeTensor, with_weight: bool) -> (CubeTensor, Option<CubeTensor>) {
        let grad = dense(grad);
        let [tokens, heads, size] = [grad.shape()[0], grad.shape()[1], grad.shape()[2]];
        let gpu = gpu(&grad);
        let dx = empty(&grad, grad.shape(), grad.dtype);
        let mut blocks = tokens.div_ceil(8);
        if with_weight {
            blocks = blocks.min(8 * gpu.multiprocessors);
        }
        // Room for the gradients of q's and of k's norm; the second stays 0.
        let sums = with_weight.then(|| WeightSums::new(&grad, blocks, 2 * size));
        let [dy, to, cos, sin] = [&grad, &dx, &self.cos, &self.sin].map(pointer);
        let [x, w] = [&self.x, &self.weight].map(|tensor| tensor.as_ref().map_or(0, pointer));
        let width = heads * size;
        let mut arguments = vec![x.into(), w.into(), w.into(), cos.into(), sin.into()];
        arguments.extend([dy, dy, to].map(Arg::from));
        arguments.extend(sums.as_ref().map(|sums| Arg::from(sums.partials_pointer)));
        arguments.extend([width, size, width, width, width, tokens, heads, 0].map(Arg::from));
        arguments.push(self.eps.into());
        let name = if with_weight { "qk_norm_rope_backward_weight" } else { "qk_norm_rope_backward" };
        let module = module(Files::Rope, size, &grad, self.weight.as_ref());
        gpu.enter(|side| {
            side.launch(module, name, Grid::new(blocks, 256), &arguments);
            if let Some(sums) = &sums {
                sums.add(side);
            }
        });
        let dw = sums.map(|sums| Cube::float_slice(sums.out, &[(0..size).into()]));
        (dx, dw)
    }
}

#[derive(Debug)]
struct RopeBackward;

impl Backward<Cube, 1> for RopeBackward {
    type State = RopeState;

    fn backward(self, ops: Ops<RopeState, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<Cube>(&ops.node);
        if let [Some(node)] = ops.parents {
            grads.register::<Cube>(node.id, ops.state.backward(grad, false).0);
        }
    }
}

#[derive(Debug)]
struct NormRopeBackward;

impl Backward<Cube, 2> for NormRopeBackward {
    type State = RopeState;

    fn backward(self, ops: Ops<RopeState, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<Cube>(&ops.node);
        let [x_node, weight_node] = ops.parents;
        let (dx, dw) = ops.state.backward(grad, weight_node.is_some());
        if let Some(node) = x_node {
            grads.register::<Cube>(node.id, dx);
        }
        if let (Some(node), Some(dw), Some(weight)) = (weight_node, dw, &ops.state.weight) {
            grads.register::<Cube>(node.id, super::tensor::cast(dw, weight.dtype));
        }
    }
}

#[derive(Debug, Clone)]
struct SwigluState {
    gate: CubeTensor,
    up: CubeTensor,
}

#[derive(Debug)]
struct SwigluBackward;

impl Backward<Cube, 2> for SwigluBackward {
    type State = SwigluState;

    fn backward(self, ops: Ops<SwigluState, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = dense(grads.consume::<Cube>(&ops.node));
        let SwigluState { gate, up } = ops.state;
        let [rows, width] = [gate.shape()[0], gate.shape()[1]];
        let [d_gate, d_up] = [&gate, &up].map(|x| empty(x, x.shape(), x.dtype));
        let module = Module::of(Files::Swiglu, width, gate.dtype == DType::F32);
        let mut arguments: Vec<_> =
            [&gate, &up, &grad, &d_gate, &d_up].map(|x| pointer(x).into()).into_iter().collect();
        arguments.push(0u64.into());
        arguments.extend([width, width, width, width, rows].map(Arg::from));
        let grid = Grid::new((rows * width).div_ceil(2048), 256);
        gpu(&gate).enter(|side| side.launch(module, "swiglu_backward", grid, &arguments));
        for (node, gradient) in ops.parents.into_iter().zip([d_gate, d_up]) {
            if let Some(node) = node {
                grads.register::<Cube>(node.id, gradient);
            }
        }
    }
}
