//! `x · Wᵀ + s · (dropout(x) · Aᵀ) · Bᵀ` on the CPU: each run's share is added in place to its own
//! rows of the base product.
//!
//! Saved for backward, each only if a gradient needs it: handles of x, W, A, B, and
//! h = s · dropout(x) · Aᵀ (rank numbers a token). Dropout masks are computed again.
//!
//! A run's rows of the result and of the gradient of x, and its rows of the gradient of A and columns
//! of that of B, are bit for bit those of the run alone in a batch: see [`product`] for the rows; the
//! gradients of A and B are one product over the run's own tokens.

use std::borrow::Cow;

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::flex::gemm::{Matrix, Target, Threads, add_product, multiply, product};
use super::flex::{self, simd};
use super::linear::{matrix, weight_gradient};
use super::{Dropout, LoraPart};

/// The product with a frozen weight and low-rank adapters.
#[backend_extension(Flex, Autodiff)]
pub trait LoraLinearOps: Backend {
    /// See [`super::lora_linear`].
    fn lora_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        parts: Vec<LoraPart>,
    ) -> FloatTensor<Self>;
}

/// See [`super::lora_linear`].
pub fn lora_linear(
    x: Tensor<2>,
    weight: Tensor<2>,
    a: Tensor<2>,
    b: Tensor<2>,
    parts: &[LoraPart],
) -> Tensor<2> {
    let [x, weight, a, b] = [x, weight, a, b].map(Tensor::into_dispatch);
    Tensor::from_dispatch(<Dispatch as LoraLinearOps>::lora_linear(x, weight, a, b, parts.to_vec()))
}

impl LoraLinearOps for Flex {
    fn lora_linear(
        x: FlexTensor,
        weight: FlexTensor,
        a: FlexTensor,
        b: FlexTensor,
        parts: Vec<LoraPart>,
    ) -> FlexTensor {
        let [x, weight, a, b] = [x, weight, a, b].map(flex::dense);
        forward(&x, &weight, &a, &b, &parts).0
    }
}

impl<C: CheckpointStrategy> LoraLinearOps for Autodiff<Flex, C> {
    fn lora_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        parts: Vec<LoraPart>,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), weight.node(), a.node(), b.node()];
        let prepared = LoraBackward.prepare::<C>(nodes).compute_bound().stateful();
        let tracked =
            Tracked { x: x.is_tracked(), weight: weight.is_tracked(), a: a.is_tracked(), b: b.is_tracked() };
        let [x, weight, a, b] = [x, weight, a, b].map(|tensor| flex::dense(tensor.into_primitive()));
        let (out, h) = forward(&x, &weight, &a, &b, &parts);
        let state = || State {
            a: tracked.x.then_some(a),
            b: (tracked.x || tracked.a).then_some(b),
            h: tracked.b.then_some(h),
            x: (tracked.a || tracked.weight).then_some(x),
            weight: tracked.x.then_some(weight),
            tracked,
            parts,
        };
        super::tape::record(prepared, state, out)
    }
}

#[derive(Debug, Clone, Copy)]
struct Tracked {
    x: bool,
    weight: bool,
    a: bool,
    b: bool,
}

#[derive(Debug, Clone)]
struct State {
    x: Option<FlexTensor>,
    weight: Option<FlexTensor>,
    a: Option<FlexTensor>,
    b: Option<FlexTensor>,
    /// One block `[tokens, rank]` a part, one after the other.
    h: Option<Vec<f32>>,
    tracked: Tracked,
    parts: Vec<LoraPart>,
}

/// Where a part lies: its first token, its first row of A, and the start of its block in h.
#[derive(Debug, Clone, Copy)]
struct Place<'a> {
    part: &'a LoraPart,
    token: usize,
    row: usize,
    block: usize,
}

/// The parts that have tokens and rank.
fn places(parts: &[LoraPart]) -> impl Iterator<Item = Place<'_>> {
    let (mut token, mut row, mut block) = (0, 0, 0);
    let places = parts.iter().map(move |part| {
        let place = Place { part, token, row, block };
        token += part.tokens;
        row += part.rank;
        block += part.tokens * part.rank;
        place
    });
    places.filter(|place| place.part.tokens > 0 && place.part.rank > 0)
}

impl Place<'_> {
    /// The part's rows of a matrix with rows of `width` elements, one a token.
    fn tokens<'b>(&self, values: &'b [f32], width: usize) -> &'b [f32] {
        &values[self.token * width..(self.token + self.part.tokens) * width]
    }

    fn tokens_mut<'b>(&self, values: &'b mut [f32], width: usize) -> &'b mut [f32] {
        &mut values[self.token * width..(self.token + self.part.tokens) * width]
    }

    /// The part's rows of A: `[rank, in]`.
    fn a<'b>(&self, a: &'b FlexTensor) -> Matrix<'b> {
        let width = a.shape()[1];
        let rows = &flex::values(a)[self.row * width..(self.row + self.part.rank) * width];
        Matrix::new(rows, self.part.rank, width)
    }

    /// The part's columns of B: `[out, rank]`, side by side as they are when the run is alone (gemm
    /// may round differently for other steps).
    fn b<'b>(&self, b: &'b FlexTensor) -> Cow<'b, [f32]> {
        let (rank, ranks) = (self.part.rank, b.shape()[1]);
        match rank == ranks {
            true => Cow::Borrowed(flex::values(b)),
            false => flex::values(b)
                .chunks(ranks)
                .flat_map(|row| &row[self.row..self.row + rank])
                .copied()
                .collect(),
        }
    }
}

/// The result, and h.
fn forward(
    x: &FlexTensor,
    weight: &FlexTensor,
    a: &FlexTensor,
    b: &FlexTensor,
    parts: &[LoraPart],
) -> (FlexTensor, Vec<f32>) {
    let (inner, out) = (x.shape()[1], weight.shape()[0]);
    let mut y = product(flex::values(x), x.shape()[0], matrix(weight).t(), Threads::All);
    let mut blocks = Vec::new();
    for place in places(parts) {
        let tokens = place.part.tokens;
        let rows = place.tokens(flex::values(x), inner);
        let mut h = match &place.part.dropout {
            None => product(rows, tokens, place.a(a).t(), Threads::All),
            Some(dropout) => {
                product(&masked(rows, &factors(dropout, tokens, inner)), tokens, place.a(a).t(), Threads::All)
            }
        };
        simd::scale(&mut h, place.part.scale);
        let b = place.b(b);
        let b = Matrix::new(&b, out, place.part.rank);
        add_product(place.tokens_mut(&mut y, out), &h, tokens, b.t(), Threads::All);
        blocks.extend_from_slice(&h);
    }
    (flex::tensor(y, [x.shape()[0], out]), blocks)
}

/// The factors of all elements of a part, computed in parallel; each row depends on its token alone.
fn factors(dropout: &Dropout, tokens: usize, width: usize) -> Vec<f32> {
    let mut factors = vec![0.0; tokens * width];
    factors.par_chunks_exact_mut(width.max(1)).enumerate().for_each(|(n, row)| dropout.factors(n, row));
    factors
}

/// x ∘ factors
fn masked(x: &[f32], factors: &[f32]) -> Vec<f32> {
    x.par_iter().with_min_len(16 * 1024).zip(factors).map(|(x, factor)| x * factor).collect()
}

#[derive(Debug)]
struct LoraBackward;

impl Backward<Flex, 4> for LoraBackward {
    type State = State;

    fn backward(self, ops: Ops<State, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = flex::dense(grads.consume::<Flex>(&ops.node));
        let state = ops.state;
        let [x_node, weight_node, a_node, b_node] = ops.parents;
        if let (Some(node), Some(x)) = (weight_node, &state.x) {
            grads.register::<Flex>(node.id, weight_gradient(&grad, x));
        }
        if let (Some(node), Some(h)) = (b_node, &state.h) {
            grads.register::<Flex>(node.id, b_gradient(&grad, h, &state.parts));
        }
        let (dx, da) = input_and_a_gradients(&grad, &state);
        if let (Some(node), Some(da)) = (a_node, da) {
            grads.register::<Flex>(node.id, da);
        }
        if let (Some(node), Some(dx)) = (x_node, dx) {
            grads.register::<Flex>(node.id, dx);
        }
    }
}

/// gᵀ · h of each part, in the part's columns of `[out, Σ rank]`.
fn b_gradient(grad: &FlexTensor, h: &[f32], parts: &[LoraPart]) -> FlexTensor {
    let out = grad.shape()[1];
    let ranks = parts.iter().map(|part| part.rank).sum();
    let mut db = vec![0.0; out * ranks];
    for place in places(parts) {
        let (tokens, rank) = (place.part.tokens, place.part.rank);
        let g = Matrix::new(place.tokens(flex::values(grad), out), tokens, out);
        let h = Matrix::new(&h[place.block..place.block + tokens * rank], tokens, rank);
        let mut own = vec![0.0; out * rank];
        multiply(Target::overwrite(&mut own, out, rank), g.t(), h, Threads::All);
        for (row, own) in db.chunks_exact_mut(ranks).zip(own.chunks_exact(rank)) {
            row[place.row..place.row + rank].copy_from_slice(own);
        }
    }
    flex::tensor(db, [out, ranks])
}

/// g · W + s · (g · B) · A, and s · (g · B)ᵀ · dropout(x), those that are tracked.
fn input_and_a_gradients(grad: &FlexTensor, state: &State) -> (Option<FlexTensor>, Option<FlexTensor>) {
    let (t, out) = (grad.shape()[0], grad.shape()[1]);
    let g = flex::values(grad);
    let mut dx = state.weight.as_ref().map(|w| product(g, t, matrix(w), Threads::All));
    let width = state.weight.as_ref().or(state.x.as_ref()).map_or(0, |tensor| tensor.shape()[1]);
    let ranks: usize = state.parts.iter().map(|part| part.rank).sum();
    let mut da = state.tracked.a.then(|| vec![0.0; ranks * width]);
    if let Some(b) = &state.b {
        for place in places(&state.parts) {
            let (tokens, rank) = (place.part.tokens, place.part.rank);
            let b = place.b(b);
            let mut gb = product(place.tokens(g, out), tokens, Matrix::new(&b, out, rank), Threads::All);
            simd::scale(&mut gb, place.part.scale);
            let mask = place.part.dropout.as_ref().map(|dropout| factors(dropout, tokens, width));
            if let (Some(dx), Some(a)) = (&mut dx, &state.a) {
                add_input_gradient(place.tokens_mut(dx, width), &gb, tokens, place.a(a), mask.as_deref());
            }
            if let (Some(da), Some(x)) = (&mut da, &state.x) {
                let x = place.tokens(flex::values(x), width);
                let dropped = mask.as_ref().map(|mask| masked(x, mask));
                let x = Matrix::new(dropped.as_deref().unwrap_or(x), tokens, width);
                let rows = &mut da[place.row * width..(place.row + rank) * width];
                multiply(
                    Target::overwrite(rows, rank, width),
                    Matrix::new(&gb, tokens, rank).t(),
                    x,
                    Threads::All,
                );
            }
        }
    }
    (dx.map(|dx| flex::tensor(dx, [t, width])), da.map(|da| flex::tensor(da, [ranks, width])))
}

/// dx ← dx + (gb · A) ∘ mask
fn add_input_gradient(dx: &mut [f32], gb: &[f32], tokens: usize, a: Matrix<'_>, mask: Option<&[f32]>) {
    match mask {
        None => add_product(dx, gb, tokens, a, Threads::All),
        Some(mask) => simd::add(dx, &masked(&product(gb, tokens, a, Threads::All), mask)),
    }
}
