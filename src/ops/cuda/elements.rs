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
use super::gemm::Matrix;
use super::launches::Rotation;
use super::tensor::{dense, empty, gpu, is_on_card, matrix, pointer};
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
        let [from, w, to] = [&x, &weight, &out].map(matrix);
        gpu(&x).enter(|side| side.norm(from, w, to, eps as f32));
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
        let [g, u, to] = [&gate, &up, &out].map(matrix);
        gpu(&gate).enter(|side| side.swiglu(g, u, to));
        out
    }
}

fn rotate(
    x: &CubeTensor,
    weight: Option<&CubeTensor>,
    cos: &CubeTensor,
    sin: &CubeTensor,
    eps: f64,
) -> CubeTensor {
    let out = empty(x, x.shape(), x.dtype);
    let rotation = rotation(x, weight, [cos, sin], eps as f32);
    let [from, to] = [x, &out].map(of_heads);
    gpu(x).enter(|side| side.rotate(from, to, to, &rotation));
    out
}

/// All heads count as query heads.
fn rotation(x: &CubeTensor, weight: Option<&CubeTensor>, tables: [&CubeTensor; 2], eps: f32) -> Rotation {
    let [cos, sin] = tables.map(matrix);
    let norms = weight.map(|weight| [matrix(weight); 2]);
    Rotation { norms, cos, sin, heads: [x.shape()[1], 0], size: x.shape()[2], eps }
}

/// A dense tensor of heads as a matrix with a row a token.
fn of_heads(x: &CubeTensor) -> Matrix {
    let [tokens, heads, size] = [x.shape()[0], x.shape()[1], x.shape()[2]];
    Matrix::dense(pointer(x), tokens, heads * size, x.dtype)
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
        let dx = empty(&x, x.shape(), x.dtype);
        let dw = weight_node.is_some().then(|| empty(&x, weight.shape(), DType::F32));
        let matrices = [&x, &weight, &grad, &dx].map(matrix);
        let d_weight = dw.as_ref().map(matrix);
        gpu(&x).enter(|side| side.norm_backward(matrices, None, d_weight, eps));
        if let Some(node) = x_node {
            grads.register::<Cube>(node.id, dx);
        }
        if let (Some(node), Some(dw)) = (weight_node, dw) {
            grads.register::<Cube>(node.id, super::tensor::cast(dw, weight.dtype));
        }
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
        let dx = empty(&grad, grad.shape(), grad.dtype);
        let size = grad.shape()[2];
        // Room for the gradients of q's and of k's norm; the second stays 0.
        let sums = with_weight.then(|| empty(&grad, [2 * size], DType::F32));
        let rotation = rotation(&grad, self.weight.as_ref(), [&self.cos, &self.sin], self.eps);
        let [dy, to] = [&grad, &dx].map(of_heads);
        // Without a norm x isn't looked at.
        let x = self.x.as_ref().map_or(dy, of_heads);
        let d_weights = sums.as_ref().map(matrix);
        gpu(&grad).enter(|side| side.rotate_backward([x, dy, dy, to], d_weights, &rotation));
        let dw = sums.map(|sums| Cube::float_slice(sums, &[(0..size).into()]));
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
        let [d_gate, d_up] = [&gate, &up].map(|x| empty(x, x.shape(), x.dtype));
        let inputs = [&gate, &up, &grad].map(matrix);
        let outputs = [&d_gate, &d_up].map(matrix);
        gpu(&gate).enter(|side| side.swiglu_backward(inputs, outputs, None));
        for (node, gradient) in ops.parents.into_iter().zip([d_gate, d_up]) {
            if let Some(node) = node {
                grads.register::<Cube>(node.id, gradient);
            }
        }
    }
}
