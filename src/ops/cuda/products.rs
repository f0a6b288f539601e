//! `x · Wᵀ`, alone and with low-rank adapters, by cuBLASLt.
//!
//! An adapter's share is added to its own rows of the base product in place: `y = x·Wᵀ`, then for
//! each run `h = s·x·Aᵀ` and `y += h·Bᵀ`. With a bf16 base the f32 A and B are rounded to bf16 for
//! the products; their gradients are sums in f32, stored in f32.
//!
//! Saved for backward, each only if a gradient needs it: handles of x and W, A and B as the products
//! took them, and h.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Cube, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::super::tape::record;
use super::driver::Side;
use super::gemm::Matrix;
use super::tensor::{cast, empty, gpu, is_on_card, matrix, rows};
use crate::ops::LoraPart;

/// Products with a weight.
#[backend_extension(Cube, Autodiff)]
pub trait ProductOps: Backend {
    /// See [`crate::ops::linear`].
    fn cuda_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;
    /// See [`crate::ops::lora_linear`]; without dropout.
    fn cuda_lora_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        parts: Vec<LoraPart>,
    ) -> FloatTensor<Self>;
}

/// Whether [`linear`] takes these tensors.
pub fn takes(x: &Tensor<2>, weight: &Tensor<2>) -> bool {
    let (sizes, more) = (x.dims(), weight.dims());
    let full = sizes.iter().chain(&more).all(|&n| n > 0);
    is_on_card(x) && is_on_card(weight) && x.dtype() == weight.dtype() && full
}

/// See [`crate::ops::linear`].
pub fn linear(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    assert_eq!(x.dims()[1], weight.dims()[1], "linear: width of x and of the weight");
    Tensor::from_dispatch(<Dispatch as ProductOps>::cuda_linear(x.into_dispatch(), weight.into_dispatch()))
}

/// See [`crate::ops::lora_linear`]; without dropout.
pub fn lora_linear(
    x: Tensor<2>,
    weight: Tensor<2>,
    a: Tensor<2>,
    b: Tensor<2>,
    parts: &[LoraPart],
) -> Tensor<2> {
    let [x, weight, a, b] = [x, weight, a, b].map(Tensor::into_dispatch);
    Tensor::from_dispatch(<Dispatch as ProductOps>::cuda_lora_linear(x, weight, a, b, parts.to_vec()))
}

impl ProductOps for Cube {
    fn cuda_linear(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
        let (x, weight) = (rows(x), rows(weight));
        let out = empty(&x, [x.shape()[0], weight.shape()[0]], x.dtype);
        let [m, w, to] = [&x, &weight, &out].map(matrix);
        gpu(&x).enter(|side| side.product(m, w.t(), to, 1.0, 0.0));
        out
    }

    fn cuda_lora_linear(
        x: CubeTensor,
        weight: CubeTensor,
        a: CubeTensor,
        b: CubeTensor,
        parts: Vec<LoraPart>,
    ) -> CubeTensor {
        let (a, b) = (rows(cast(a, x.dtype)), rows(cast(b, x.dtype)));
        lora_forward(&rows(x), &rows(weight), &a, &b, &parts).0
    }
}

/// Where a part lies: its first token and its first row of A.
#[derive(Debug, Clone, Copy)]
struct Place<'a> {
    part: &'a LoraPart,
    token: usize,
    row: usize,
}

/// The parts that do something.
fn places(parts: &[LoraPart]) -> impl Iterator<Item = Place<'_>> {
    let starts = parts.iter().scan((0, 0), |(token, row), part| {
        let place = Place { part, token: *token, row: *row };
        *token += part.tokens;
        *row += part.rank;
        Some(place)
    });
    starts.filter(|place| place.part.tokens > 0 && place.part.rank > 0)
}

impl Place<'_> {
    /// The part's rows of a matrix with a row a token.
    fn tokens(&self, x: Matrix) -> Matrix {
        x.rows(self.token, self.part.tokens)
    }

    /// The part's rows of h or of its gradient.
    fn hidden(&self, h: Matrix) -> Matrix {
        self.tokens(h).columns(0, self.part.rank)
    }

    fn a(&self, a: Matrix) -> Matrix {
        a.rows(self.row, self.part.rank)
    }

    fn b(&self, b: Matrix) -> Matrix {
        b.columns(self.row, self.part.rank)
    }
}

/// Room for `h` of every token: as wide as the largest rank, in whole chunks of 16 bytes.
fn hidden_like(x: &CubeTensor, parts: &[LoraPart]) -> CubeTensor {
    let rank = parts.iter().map(|part| part.rank).max().unwrap_or(0).max(1);
    empty(x, [x.shape()[0], rank.next_multiple_of(8)], x.dtype)
}

/// The output and h.
fn lora_forward(
    x: &CubeTensor,
    weight: &CubeTensor,
    a: &CubeTensor,
    b: &CubeTensor,
    parts: &[LoraPart],
) -> (CubeTensor, CubeTensor) {
    let out = empty(x, [x.shape()[0], weight.shape()[0]], x.dtype);
    let hidden = hidden_like(x, parts);
    let [m, w, a, b, to, h] = [x, weight, a, b, &out, &hidden].map(matrix);
    gpu(x).enter(|side| {
        side.product(m, w.t(), to, 1.0, 0.0);
        for place in places(parts) {
            side.product(place.tokens(m), place.a(a).t(), place.hidden(h), place.part.scale, 0.0);
            side.product(place.hidden(h), place.b(b).t(), place.tokens(to), 1.0, 1.0);
        }
    });
    (out, hidden)
}

impl<C: CheckpointStrategy> ProductOps for Autodiff<Cube, C> {
    fn cuda_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let prepared = LinearBackward.prepare::<C>([x.node(), weight.node()]).compute_bound().stateful();
        let tracked = [x.is_tracked(), weight.is_tracked()];
        let (x, weight) = (rows(x.into_primitive()), rows(weight.into_primitive()));
        let out = Cube::cuda_linear(x.clone(), weight.clone());
        let state = || LinearState { x: tracked[1].then_some(x), weight: tracked[0].then_some(weight) };
        record(prepared, state, out)
    }

    fn cuda_lora_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        parts: Vec<LoraPart>,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), weight.node(), a.node(), b.node()];
        let prepared = LoraBackward.prepare::<C>(nodes).compute_bound().stateful();
        let tracked = [x.is_tracked(), weight.is_tracked(), a.is_tracked(), b.is_tracked()];
        let [x, weight, a, b] = [x, weight, a, b].map(|tensor| tensor.into_primitive());
        let dtypes = [a.dtype, b.dtype];
        let (x, weight) = (rows(x), rows(weight));
        let (a, b) = (rows(cast(a, x.dtype)), rows(cast(b, x.dtype)));
        let (out, h) = lora_forward(&x, &weight, &a, &b, &parts);
        let state = || LoraState { x, weight, a, b, h: tracked[3].then_some(h), dtypes, parts };
        record(prepared, state, out)
    }
}

#[derive(Debug, Clone)]
struct LinearState {
    x: Option<CubeTensor>,
    weight: Option<CubeTensor>,
}

#[derive(Debug)]
struct LinearBackward;

impl Backward<Cube, 2> for LinearBackward {
    type State = LinearState;

    fn backward(self, ops: Ops<LinearState, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = rows(grads.consume::<Cube>(&ops.node));
        let [t, out] = [grad.shape()[0], grad.shape()[1]];
        let g = matrix(&grad);
        let [x_node, weight_node] = ops.parents;
        if let (Some(node), Some(weight)) = (x_node, &ops.state.weight) {
            let dx = empty(&grad, [t, weight.shape()[1]], grad.dtype);
            let [w, to] = [weight, &dx].map(matrix);
            gpu(&grad).enter(|side| side.product(g, w, to, 1.0, 0.0));
            grads.register::<Cube>(node.id, dx);
        }
        if let (Some(node), Some(x)) = (weight_node, &ops.state.x) {
            let dw = empty(&grad, [out, x.shape()[1]], grad.dtype);
            let [x, to] = [x, &dw].map(matrix);
            gpu(&grad).enter(|side| side.product(g.t(), x, to, 1.0, 0.0));
            grads.register::<Cube>(node.id, dw);
        }
    }
}

#[derive(Debug, Clone)]
struct LoraState {
    x: CubeTensor,
    weight: CubeTensor,
    /// In the type of x.
    a: CubeTensor,
    b: CubeTensor,
    h: Option<CubeTensor>,
    /// Those of A and B as they came.
    dtypes: [DType; 2],
    parts: Vec<LoraPart>,
}

#[derive(Debug)]
struct LoraBackward;

impl Backward<Cube, 4> for LoraBackward {
    type State = LoraState;

    fn backward(self, ops: Ops<LoraState, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = rows(grads.consume::<Cube>(&ops.node));
        let state = ops.state;
        let [x_node, weight_node, a_node, b_node] = ops.parents;
        let like = |wanted: bool, x: &CubeTensor, dtype| wanted.then(|| empty(x, x.shape(), dtype));
        let dx = like(x_node.is_some(), &state.x, grad.dtype);
        let dw = like(weight_node.is_some(), &state.weight, grad.dtype);
        let da = like(a_node.is_some(), &state.a, DType::F32);
        let db = like(b_node.is_some(), &state.b, DType::F32);
        state.backward(&grad, [&dx, &dw, &da, &db].map(Option::as_ref));
        let da = da.map(|da| cast(da, state.dtypes[0]));
        let db = db.map(|db| cast(db, state.dtypes[1]));
        for (node, gradient) in [x_node, weight_node, a_node, b_node].into_iter().zip([dx, dw, da, db]) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<Cube>(node.id, gradient);
            }
        }
    }
}

impl LoraState {
    /// dx = g·W + s·(g·B)·A, dW = gᵀ·x, dA = s·(g·B)ᵀ·x, dB = gᵀ·h: those that there is room for.
    fn backward(&self, grad: &CubeTensor, [dx, dw, da, db]: [Option<&CubeTensor>; 4]) {
        let hidden = hidden_like(grad, &self.parts);
        let [g, gb, x, w, a, b] = [grad, &hidden, &self.x, &self.weight, &self.a, &self.b].map(matrix);
        let h = self.h.as_ref().map(matrix);
        let [dx, dw, da, db] = [dx, dw, da, db].map(|out| out.map(matrix));
        gpu(grad).enter(|side| {
            if let Some(dx) = dx {
                side.product(g, w, dx, 1.0, 0.0);
            }
            if let Some(dw) = dw {
                side.product(g.t(), x, dw, 1.0, 0.0);
            }
            // A run without tokens has no gradient.
            if self.parts.iter().any(|part| part.tokens == 0 && part.rank > 0) {
                for out in [da, db].into_iter().flatten() {
                    side.zero(out.pointer, out.rows * out.columns * 4);
                }
            }
            for place in places(&self.parts) {
                place.backward(side, [g, gb, x, a, b], h, [dx, da, db]);
            }
        });
    }
}

impl Place<'_> {
    fn backward(
        &self,
        side: &mut Side<'_>,
        [g, gb, x, a, b]: [Matrix; 5],
        h: Option<Matrix>,
        [dx, da, db]: [Option<Matrix>; 3],
    ) {
        let (g, gb) = (self.tokens(g), self.hidden(gb));
        if dx.is_some() || da.is_some() {
            side.product(g, self.b(b), gb, self.part.scale, 0.0);
        }
        if let Some(dx) = dx {
            side.product(gb, self.a(a), self.tokens(dx), 1.0, 1.0);
        }
        if let Some(da) = da {
            side.product(gb.t(), self.tokens(x), self.a(da), 1.0, 0.0);
        }
        if let (Some(db), Some(h)) = (db, h) {
            side.product(g.t(), self.hidden(h), self.b(db), 1.0, 0.0);
        }
    }
}
