//! The forward pass of the layer op, and what it keeps.

use std::sync::Arc;

use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use super::super::attention::Layout as Attention;
use super::super::driver::Side;
use super::super::gemm::Matrix;
use super::super::launches::Rotation;
use super::super::memory::{Block, Layout};
use super::super::tensor::{dense, empty_rows, gpu, known_matrix, pointer};
use super::group::{DTYPE, Group, Weights};
use super::operands::{self, GROUPS, NORMS, Operands, PROJECTIONS, SIZES, X};
use super::packed::Packed;
use crate::ops::{DecoderLayer, Documents, Kept, Next, Rope};

/// Places among the groups: q, k, v; o; gate, up; down.
pub(super) const QKV: usize = 0;
pub(super) const O: usize = 1;
pub(super) const GATE_UP: usize = 2;
pub(super) const DOWN: usize = 3;

/// A call of the layer op.
#[derive(Debug)]
pub(super) struct Call {
    pub operands: Operands,
    pub groups: [Group; GROUPS],
    pub attention: Attention,
    pub head_dim: usize,
    pub eps: f32,
    pub tokens: usize,
    /// Hidden size.
    pub e: usize,
    /// Whether all but attention is made again in the backward pass.
    pub recompute: bool,
    kept: Kept,
    /// Holds the tables' memory.
    tables: [CubeTensor; 2],
}

/// What the backward pass needs.
#[derive(Debug)]
pub(super) struct Saved {
    pub call: Call,
    pub packed: Option<Arc<Packed>>,
    /// Of a layer that is recomputed, `att`, `lse` and `low` alone.
    pub activations: Activations,
    _blocks: [Option<Block>; 2],
}

/// Activations that are kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Activations {
    /// `[t, q + 2 kv]`, before norms and rotation.
    pub qkv: Matrix,
    /// `[t, q]`, with spare columns for o's adapters.
    pub att: Matrix,
    /// f32 `[h, t]`
    pub lse: Matrix,
    /// `[t, e]`, x with attention's output added.
    pub middle: Matrix,
    /// `[t, 2 f]`
    pub gate_up: Matrix,
    /// The low-rank columns of each group's input; those of o's lie beside `att`.
    pub low: [Matrix; GROUPS],
}

/// The next token of each of some texts, and where the keys and values of those before it lie.
#[derive(Debug)]
pub(super) struct NextTokens<'a> {
    /// Keys and values: of each text `room` rows.
    pub kept: [Matrix; 2],
    pub room: usize,
    pub next: &'a [Next],
    pub scale: f32,
}

impl NextTokens<'_> {
    /// Of q, k, v and the output, a row is a token.
    fn attend(&self, side: &mut Side<'_>, rows: [Matrix; 4], head_dim: usize) {
        for (n, Next { text, seen }) in self.next.iter().enumerate() {
            let kept = self.kept.map(|kept| kept.rows(text * self.room, self.room));
            side.next_token(rows.map(|x| x.rows(n, 1)), kept, *seen, head_dim, self.scale);
        }
    }
}

impl Call {
    pub fn new(operands: Operands, layer: &DecoderLayer, rope: &Rope, documents: &Documents) -> Self {
        let groups = operands::groups(layer);
        let x = operands.tensor(X).clone();
        let (tokens, e, d) = (x.shape()[0], x.shape()[1], layer.head_dim);
        let heads = groups[QKV].outs[0] / d;
        let scale = (d as f64).powf(-0.5) as f32;
        let key_heads = groups[QKV].outs[1] / d;
        let attention = Attention::new(&x, [heads, d], key_heads, documents.cu_seqlens.clone(), scale);
        let table = |x: &burn::tensor::Tensor<2>| {
            dense(x.clone().inner().try_into_primitive::<Cube>().expect("on the card of x"))
        };
        Self {
            operands,
            groups,
            attention,
            head_dim: d,
            eps: layer.eps as f32,
            tokens,
            e,
            recompute: layer.recompute,
            kept: layer.kept.clone(),
            tables: [table(&rope.cos), table(&rope.sin)],
        }
    }

    /// MLP size.
    pub fn f(&self) -> usize {
        self.groups[DOWN].input
    }

    /// A tensor like x, with room between its rows for the columns that the layer below puts beside a gradient.
    pub fn hidden(&self, like: &CubeTensor) -> CubeTensor {
        empty_rows(like, self.tokens, self.e, self.e + self.groups[DOWN].spare(), like.dtype)
    }

    /// A matrix of a row a token.
    pub fn rows(&self, layout: &mut Layout, columns: usize, spare: usize) -> super::super::memory::Place {
        layout.matrix(self.tokens, columns, columns + spare, DTYPE)
    }

    pub fn rotation(&self) -> Rotation {
        let [q, k] = [NORMS[2], NORMS[3]].map(|place| self.operands.maybe_at(place));
        let [cos, sin] = self.tables.each_ref().map(known_matrix);
        let heads = [0, 1].map(|n| self.groups[QKV].outs[n] / self.head_dim);
        let norms = q.zip(k).map(|(q, k)| [q, k]);
        Rotation { norms, cos, sin, heads, size: self.head_dim, eps: self.eps }
    }

    /// The columns of q, k and v.
    pub fn heads_of(&self, qkv: Matrix) -> [Matrix; 3] {
        [0, 1, 2].map(|n| self.groups[QKV].out_of(n, qkv))
    }

    /// The weights of each group, with this call's adapters in place; `held` as in [`Packed::fill`].
    pub fn weights(&self, side: &mut Side<'_>, packed: Option<&Packed>, held: bool) -> [Weights; GROUPS] {
        if let Some(packed) = packed {
            return packed.fill(side, &self.operands, &self.groups, held);
        }
        let mut first = 0;
        SIZES.map(|n| {
            let matrices = (first..first + n).map(|j| self.operands.weight_at(j)).collect();
            first += n;
            Weights::Apart(matrices)
        })
    }

    /// The output, and what the backward pass needs if that is wanted. With `tokens` each row is a text's next token.
    pub fn forward(self, save: bool, tokens: Option<&NextTokens<'_>>) -> (CubeTensor, Option<Saved>) {
        debug_assert_eq!(SIZES.iter().sum::<usize>(), PROJECTIONS);
        let x = self.operands.tensor(X);
        let out = empty_rows(x, self.tokens, self.e, self.e, x.dtype);
        // This look-up waits for what was launched before.
        let y = Matrix { pointer: pointer(&out), ..known_matrix(&out) };
        let gpu = gpu(x);
        let saved = gpu.enter(|side| {
            let adapted = self.operands.adapted();
            let packed = adapted.then(|| self.kept.cuda.packed(side, &self.operands, &self.groups));
            let weights = self.weights(side, packed.as_deref(), false);
            let (kept, activations) = self.activations(side, save);
            let (again, activations) = self.again(side, activations);
            self.attend(side, &weights, &activations, tokens);
            self.widen(side, &weights, &activations);
            self.narrow(side, &weights, &activations, y);
            (packed, activations, [Some(kept), (!self.recompute).then_some(again)])
        });
        let (packed, activations, blocks) = saved;
        let saved = save.then(|| Saved { call: self, packed, activations, _blocks: blocks });
        (out, saved)
    }

    /// Room for what is always kept.
    fn activations(&self, side: &Side<'_>, save: bool) -> (Block, Activations) {
        let mut layout = Layout::default();
        let [qkv, o, ..] = &self.groups;
        let heads = qkv.outs[0] / self.head_dim;
        let att = self.rows(&mut layout, o.input, o.spare());
        let lse = layout.dense(heads, self.tokens, DType::F32);
        let low = [QKV, GATE_UP, DOWN].map(|n| {
            let columns = if save { self.groups[n].columns } else { 0 };
            self.rows(&mut layout, columns, 0)
        });
        let block = layout.block(side);
        let (att, lse) = (block.at(att), block.at(lse));
        let [of_qkv, of_gate_up, of_down] = low.map(|place| block.at(place));
        let low = [of_qkv, att.columns(o.input, o.columns), of_gate_up, of_down];
        // The others are given their places by `again`.
        (block, Activations { qkv: att, att, lse, middle: att, gate_up: att, low })
    }

    /// Room for what may be made again.
    fn again(&self, side: &Side<'_>, kept: Activations) -> (Block, Activations) {
        let mut layout = Layout::default();
        let [qkv, _, gate_up, _] = &self.groups;
        let columns = [qkv.out(), self.e, gate_up.out()];
        let places = columns.map(|columns| self.rows(&mut layout, columns, 0));
        let block = layout.block(side);
        let [qkv, middle, gate_up] = places.map(|place| block.at(place));
        (block, Activations { qkv, middle, gate_up, ..kept })
    }

    /// For the backward pass: what wasn't kept, all but attention.
    pub fn make_again(
        &self,
        side: &mut Side<'_>,
        weights: &[Weights; GROUPS],
        kept: Activations,
    ) -> (Block, Activations) {
        let (block, activations) = self.again(side, kept);
        self.project(side, weights, &activations);
        self.after_attention(side, weights, &activations);
        self.widen(side, weights, &activations);
        (block, activations)
    }

    /// From x to q, k and v before norms and rotation.
    fn project(&self, side: &mut Side<'_>, weights: &[Weights; GROUPS], to: &Activations) {
        let qkv = &self.groups[QKV];
        let mut layout = Layout::default();
        let normed = self.rows(&mut layout, self.e, qkv.spare());
        let block = layout.block(side);
        let normed = block.at(normed);
        side.norm(self.operands.at(X), self.operands.at(NORMS[0]), normed, self.eps);
        qkv.forward(side, &weights[QKV], normed, [to.qkv, to.low[QKV]], None);
    }

    /// From x to the sum after attention.
    fn attend(
        &self,
        side: &mut Side<'_>,
        weights: &[Weights; GROUPS],
        to: &Activations,
        tokens: Option<&NextTokens<'_>>,
    ) {
        self.project(side, weights, to);
        let qkv = &self.groups[QKV];
        let mut layout = Layout::default();
        let [q, k] = [qkv.outs[0], qkv.outs[1]].map(|columns| self.rows(&mut layout, columns, 0));
        let block = layout.block(side);
        let [q, k] = [q, k].map(|place| block.at(place));
        side.rotate(to.qkv, q, k, &self.rotation());
        let [_, _, v] = self.heads_of(to.qkv);
        match tokens {
            None => self.attention.forward(side, [q, k, v], to.att, to.lse.pointer),
            Some(tokens) => tokens.attend(side, [q, k, v, to.att.columns(0, q.columns)], self.head_dim),
        }
        self.after_attention(side, weights, to);
    }

    /// From attention's output to x with it added.
    fn after_attention(&self, side: &mut Side<'_>, weights: &[Weights; GROUPS], to: &Activations) {
        // The low-rank columns lie where they are kept.
        let nothing = to.low[O].columns(0, 0);
        let x = self.operands.at(X);
        self.groups[O].forward(side, &weights[O], to.att, [to.middle, nothing], Some(x));
    }

    /// From the sum after attention to gate and up.
    fn widen(&self, side: &mut Side<'_>, weights: &[Weights; GROUPS], to: &Activations) {
        let gate_up = &self.groups[GATE_UP];
        let mut layout = Layout::default();
        let normed = self.rows(&mut layout, self.e, gate_up.spare());
        let block = layout.block(side);
        let normed = block.at(normed);
        side.norm(to.middle, self.operands.at(NORMS[1]), normed, self.eps);
        gate_up.forward(side, &weights[GATE_UP], normed, [to.gate_up, to.low[GATE_UP]], None);
    }

    /// From gate and up to the output.
    fn narrow(&self, side: &mut Side<'_>, weights: &[Weights; GROUPS], from: &Activations, out: Matrix) {
        let [_, _, gate_up, down] = &self.groups;
        let mut layout = Layout::default();
        let act = self.rows(&mut layout, self.f(), down.spare());
        let block = layout.block(side);
        let act = block.at(act);
        let [gate, up] = [0, 1].map(|n| gate_up.out_of(n, from.gate_up));
        side.swiglu(gate, up, act);
        down.forward(side, &weights[DOWN], act, [out, from.low[DOWN]], Some(from.middle));
    }
}
