//! The backward pass of the layer op, from the last product to the first.
//!
//! A gradient of a group's outputs lies in a matrix with spare columns, where its product with the adapters' B goes:
//! with it the input's gradient is one product, and A's gradients are read off it.

use burn::tensor::DType;

use super::super::driver::Side;
use super::super::gemm::Matrix;
use super::super::memory::Layout;
use super::forward::{Activations, DOWN, GATE_UP, O, QKV, Saved};
use super::group::{Group, Weights};
use super::operands::{GROUPS, NORMS, SIZES, X};

/// Where the gradients go; `None` where one isn't wanted.
#[derive(Debug)]
pub(super) struct Places {
    pub dx: Option<Matrix>,
    /// Of the norms before attention and MLP, f32.
    pub norms: [Option<Matrix>; 2],
    /// Of the norms of query and key heads, f32 `[2 d]`.
    pub heads: Option<Matrix>,
    /// Of each linear layer: the weight's,
    pub weights: Vec<Option<Matrix>>,
    /// A's and
    pub a: Vec<Option<Matrix>>,
    /// B's, f32.
    pub b: Vec<Option<Matrix>>,
}

/// A pass.
struct Pass<'a> {
    saved: &'a Saved,
    activations: Activations,
    weights: [Weights; GROUPS],
    to: &'a Places,
}

/// Writes the gradients, given that of the output; `spare`: what lies between the rows of `dy` may be overwritten.
pub(super) fn run(saved: &Saved, side: &mut Side<'_>, dy: Matrix, spare: bool, to: &Places) {
    let call = &saved.call;
    let weights = call.weights(side, saved.packed.as_deref(), true);
    let (_again, activations) = match call.recompute {
        false => (None, saved.activations),
        true => {
            let (block, activations) = call.make_again(side, &weights, saved.activations);
            (Some(block), activations)
        }
    };
    let pass = Pass { saved, activations, weights, to };
    pass.clear_unused(side);
    let room = call.groups[DOWN].spare();
    // The layer above leaves room between its rows.
    let fits = dy.stride >= call.e + call.groups[DOWN].columns && (spare || room == 0);
    let mut layout = Layout::default();
    let d_middle = call.rows(&mut layout, call.e, call.groups[O].spare());
    let copy = (!fits).then(|| call.rows(&mut layout, call.e, room));
    let block = layout.block(side);
    let d_middle = block.at(d_middle);
    let dy = copy.map_or(dy, |copy| {
        let copy = block.at(copy);
        side.copy(dy, copy);
        copy
    });
    pass.mlp(side, dy, d_middle);
    pass.attention(side, d_middle);
}

impl Pass<'_> {
    fn group(&self, n: usize) -> &Group {
        &self.saved.call.groups[n]
    }

    /// The places of a group's linear layers.
    fn places<'a>(&self, all: &'a [Option<Matrix>], n: usize) -> &'a [Option<Matrix>] {
        let first = SIZES[..n].iter().sum::<usize>();
        &all[first..first + SIZES[n]]
    }

    /// A run without tokens has no gradient: zeros.
    fn clear_unused(&self, side: &mut Side<'_>) {
        for (n, _) in self.saved.call.groups.iter().enumerate().filter(|(_, group)| group.unused) {
            let [a, b] = [&self.to.a, &self.to.b].map(|all| self.places(all, n));
            a.iter().chain(b).flatten().for_each(|&matrix| side.clear(matrix));
        }
    }

    /// What a group gives its parameters: x is its input, g the gradient of its outputs with its spare columns.
    fn parameters(&self, side: &mut Side<'_>, n: usize, x: Matrix, g: Matrix) {
        let group = self.group(n);
        let [a, b] = [&self.to.a, &self.to.b].map(|all| self.places(all, n));
        group.adapter_gradients(side, [x, self.activations.low[n], g], a, b);
        for (module, dw) in self.places(&self.to.weights, n).iter().enumerate() {
            if let Some(dw) = *dw {
                side.product(group.out_of(module, g).t(), x.columns(0, group.input), dw, 1.0, 0.0);
            }
        }
    }

    /// Whether a group's input is needed: for the gradient of some parameter.
    fn trains(&self, n: usize) -> bool {
        [&self.to.a, &self.to.b, &self.to.weights]
            .into_iter()
            .any(|all| self.places(all, n).iter().any(Option::is_some))
    }

    /// From the output's gradient to that of the sum after attention.
    fn mlp(&self, side: &mut Side<'_>, dy: Matrix, d_middle: Matrix) {
        let call = &self.saved.call;
        let kept = &self.activations;
        let (gate_up, down, f) = (self.group(GATE_UP), self.group(DOWN), call.f());
        let mut layout = Layout::default();
        let d_act = call.rows(&mut layout, f, 0);
        let d_gate_up = call.rows(&mut layout, 2 * f, gate_up.spare());
        let normed = call.rows(&mut layout, call.e, 0);
        let d_normed = call.rows(&mut layout, call.e, 0);
        let block = layout.block(side);
        let [d_act, d_gate_up, normed, d_normed] =
            [d_act, d_gate_up, normed, d_normed].map(|place| block.at(place));

        down.low_gradient(side, &self.weights[DOWN], dy);
        down.input_gradient(side, &self.weights[DOWN], dy, d_act);
        let [gate, up] = [0, 1].map(|n| gate_up.out_of(n, kept.gate_up));
        let outs = [0, 1].map(|n| gate_up.out_of(n, d_gate_up));
        // SwiGLU's output takes the place of its gradient.
        side.swiglu_backward([gate, up, d_act], outs, self.trains(DOWN).then_some(d_act));
        self.parameters(side, DOWN, d_act, dy);

        gate_up.low_gradient(side, &self.weights[GATE_UP], d_gate_up);
        gate_up.input_gradient(side, &self.weights[GATE_UP], d_gate_up, d_normed);
        let norm = call.operands.at(NORMS[1]);
        if self.trains(GATE_UP) {
            side.norm(kept.middle, norm, normed, call.eps);
            self.parameters(side, GATE_UP, normed, d_gate_up);
        }
        let matrices = [kept.middle, norm, d_normed, d_middle];
        side.norm_backward(matrices, Some(dy), self.to.norms[1], call.eps);
    }

    /// From the gradient of the sum after attention to the input's.
    fn attention(&self, side: &mut Side<'_>, d_middle: Matrix) {
        let call = &self.saved.call;
        let kept = &self.activations;
        let (qkv, o) = (self.group(QKV), self.group(O));
        let mut layout = Layout::default();
        let d_qkv = call.rows(&mut layout, qkv.out(), qkv.spare());
        let block = layout.block(side);
        let d_qkv = block.at(d_qkv);
        self.heads(side, d_middle, d_qkv);
        self.parameters(side, O, kept.att, d_middle);
        debug_assert_eq!(o.out(), call.e);

        let mut layout = Layout::default();
        let normed = call.rows(&mut layout, call.e, 0);
        let d_normed = call.rows(&mut layout, call.e, 0);
        let block = layout.block(side);
        let [normed, d_normed] = [normed, d_normed].map(|place| block.at(place));
        let (x, norm) = (call.operands.at(X), call.operands.at(NORMS[0]));
        qkv.low_gradient(side, &self.weights[QKV], d_qkv);
        if self.trains(QKV) {
            side.norm(x, norm, normed, call.eps);
            self.parameters(side, QKV, normed, d_qkv);
        }
        if self.to.dx.is_some() || self.to.norms[0].is_some() {
            qkv.input_gradient(side, &self.weights[QKV], d_qkv, d_normed);
            // Where x's gradient isn't wanted it goes where it disturbs nobody.
            let dx = self.to.dx.unwrap_or(normed.columns(0, call.e));
            side.norm_backward([x, norm, d_normed, dx], Some(d_middle), self.to.norms[0], call.eps);
        }
    }

    /// The gradients of q, k and v before norms and rotation.
    fn heads(&self, side: &mut Side<'_>, d_middle: Matrix, d_qkv: Matrix) {
        let call = &self.saved.call;
        let kept = &self.activations;
        let (qkv, o) = (self.group(QKV), self.group(O));
        let mut layout = Layout::default();
        let d_att = call.rows(&mut layout, o.input, 0);
        let [q, dq] = [0; 2].map(|n| call.rows(&mut layout, qkv.outs[n], 0));
        let [k, dk] = [1; 2].map(|n| call.rows(&mut layout, qkv.outs[n], 0));
        let [rows, columns] = call.attention.stats_shape();
        let stats = layout.dense(rows, columns, DType::F32);
        let block = layout.block(side);
        let [d_att, q, dq, k, dk, stats] = [d_att, q, dq, k, dk, stats].map(|place| block.at(place));
        o.low_gradient(side, &self.weights[O], d_middle);
        o.input_gradient(side, &self.weights[O], d_middle, d_att);
        let rotation = call.rotation();
        side.rotate(kept.qkv, q, k, &rotation);
        let ([_, _, v], [_, _, dv]) = (call.heads_of(kept.qkv), call.heads_of(d_qkv));
        let scratch = [kept.lse.pointer, stats.pointer];
        call.attention.backward(side, [q, k, v, kept.att, d_att], scratch, [dq, dk, dv]);
        side.rotate_backward([kept.qkv, dq, dk, d_qkv], self.to.heads, &rotation);
    }
}
