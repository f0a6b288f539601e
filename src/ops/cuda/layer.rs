//! A decoder layer as one op in bf16: one node on Burn's tape, one entry to the card a pass.
//!
//! Saved for backward: the input, q, k and v before their norms, attention's output and log-sum-exp, the sum after
//! attention, gate and up; the backward pass makes the normed inputs, the turned q and k and SwiGLU's output again,
//! each a pass over memory. Adapters cost no pass over an output (`layer/group.rs`).
//!
//! What this op doesn't take (f32, biases, dropout, other head sizes) goes by the other ops.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{Autodiff, Cube, TensorMetadata};
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::tensor::{cast, dense, empty, gpu, is_on_card, known_matrix, pieces, pointer, rows};
use crate::ops::{DecoderLayer, Documents, Next, Rope};
use backward::Places;
use forward::{Call, NextTokens, Saved};
use operands::{NORMS, PARENTS, PROJECTIONS, X, weight};
pub use packed::Slot;

mod backward;
mod forward;
mod group;
mod operands;
mod packed;

/// Whether [`decoder_layer`] takes these tensors.
pub fn takes(x: &Tensor<2>, layer: &DecoderLayer, rope: &Rope) -> bool {
    let [tokens, _] = x.dims();
    let tables = rope.cos.dtype() == DType::F32 && rope.sin.dtype() == DType::F32;
    is_on_card(x) && x.dtype() == DType::BF16 && tokens > 0 && tables && operands::fits(layer, tokens)
}

/// See [`crate::ops::decoder_layer`].
pub fn decoder_layer(x: Tensor<2>, layer: &DecoderLayer, rope: &Rope, documents: &Documents) -> Tensor<2> {
    check(&x, layer, rope, documents);
    let (operands, tape) = operands::take(x, layer);
    let call = Call::new(operands, layer, rope, documents);
    let Some((nodes, tracked)) = tape else {
        return Tensor::from_primitive::<Cube>(call.forward(false, None).0);
    };
    let out = match LayerBackward.prepare::<NoCheckpointing>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => {
            let (out, saved) = call.forward(true, None);
            let saved = saved.expect("asked for");
            prepared.finish(State { saved: Arc::new(saved), tracked: tracked.into() }, out)
        }
        OpsKind::UnTracked(prepared) => prepared.finish(call.forward(false, None).0),
    };
    Tensor::from_primitive::<Autodiff<Cube>>(out)
}

/// See [`crate::ops::next_layer`]; `kept` are keys and values, `[texts · room, g · d]`, which grow in place.
pub fn next_layer(
    x: Tensor<2>,
    layer: &DecoderLayer,
    rope: &Rope,
    kept: [Tensor<2>; 2],
    room: usize,
    next: &[Next],
) -> (Tensor<2>, [Tensor<2>; 2]) {
    // A document each: what is said of them depends on their number alone, so it is made once.
    let documents = Documents { cu_seqlens: (0..=next.len() as u32).collect() };
    check(&x, layer, rope, &documents);
    let (operands, tape) = operands::take(x, layer);
    assert!(tape.is_none(), "next_layer: there is no gradient");
    let call = Call::new(operands, layer, rope, &documents);
    let kept = kept.map(|x| dense(x.try_into_primitive::<Cube>().expect("on the card of x")));
    let tokens = NextTokens { kept: kept.each_ref().map(known_matrix), room, next, scale: layer.scale() };
    let (out, _) = call.forward(false, Some(&tokens));
    (Tensor::from_primitive::<Cube>(out), kept.map(Tensor::from_primitive::<Cube>))
}

type NoCheckpointing = burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;

fn check(x: &Tensor<2>, layer: &DecoderLayer, rope: &Rope, documents: &Documents) {
    let ([t, e], d) = (x.dims(), layer.head_dim);
    let dims = |p: &crate::ops::Projection| p.weight.dims();
    let ([q, _], [kv, _], [f, _]) = (dims(&layer.q), dims(&layer.k), dims(&layer.gate));
    let wanted = [[q, e], [kv, e], [kv, e], [e, q], [f, e], [f, e], [e, f]];
    let found = operands::projections(layer).map(dims);
    assert_eq!(found, wanted, "decoder_layer: weights of q, k, v, o, gate, up, down");
    assert!(
        q % d == 0 && kv % d == 0 && kv > 0 && q % kv == 0,
        "decoder_layer: widths {q}, {kv}, heads of {d}"
    );
    for (projection, [out, input]) in operands::projections(layer).into_iter().zip(wanted) {
        if let Some(adapters) = &projection.adapters {
            let ranks: usize = adapters.parts.iter().map(|part| part.rank).sum();
            assert_eq!(adapters.a.dims(), [ranks, input], "decoder_layer: A");
            assert_eq!(adapters.b.dims(), [out, ranks], "decoder_layer: B");
        }
    }
    assert_eq!([layer.input_norm.dims(), layer.post_norm.dims()], [[e]; 2], "decoder_layer: norms");
    for norm in [&layer.q_norm, &layer.k_norm].into_iter().flatten() {
        assert_eq!(norm.dims(), [d], "decoder_layer: norm of heads");
    }
    assert_eq!([rope.cos.dims(), rope.sin.dims()], [[t, d]; 2], "decoder_layer: rotary tables");
    let bounds = &documents.cu_seqlens;
    let whole = bounds.first() == Some(&0) && bounds.last() == Some(&(t as u32)) && bounds.is_sorted();
    assert!(whole, "decoder_layer: document boundaries of {t} tokens");
}

#[derive(Debug, Clone)]
struct State {
    saved: Arc<Saved>,
    /// Which parents are tracked.
    tracked: Arc<[bool]>,
}

#[derive(Debug)]
struct LayerBackward;

impl Backward<Cube, PARENTS> for LayerBackward {
    type State = State;

    fn backward(self, ops: Ops<State, PARENTS>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = rows(grads.consume::<Cube>(&ops.node));
        let State { saved, tracked } = ops.state;
        let outs = Outs::new(&saved, &tracked);
        let gpu = gpu(&dy);
        // The one look-up that waits for what was launched before.
        let at = pointer(&dy);
        let dy_at = super::gemm::Matrix { pointer: at, ..known_matrix(&dy) };
        let spare = dy.can_mut();
        gpu.enter(|side| backward::run(&saved, side, dy_at, spare, &outs.places));
        for (node, gradient) in ops.parents.into_iter().zip(outs.gradients(&saved)) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<Cube>(node.id, gradient);
            }
        }
    }
}

/// Places for the gradients that are wanted.
struct Outs {
    /// In the order of the parents; those of norms in f32, of both norms of heads in one.
    tensors: Vec<Option<CubeTensor>>,
    heads: Option<CubeTensor>,
    places: Places,
}

impl Outs {
    fn new(saved: &Saved, tracked: &[bool]) -> Self {
        let operands = &saved.call.operands;
        let mut tensors: Vec<Option<CubeTensor>> = vec![None; PARENTS];
        let x = operands.tensor(X);
        // A's gradients of a group follow each other, so that they are one product.
        let a = (0..PROJECTIONS).map(|j| weight(j) + 1);
        let b = (0..PROJECTIONS).map(|j| weight(j) + 2);
        let wide = a.chain(b).chain(NORMS[..2].iter().copied()).filter(|&place| tracked[place]);
        let of_weights = (0..PROJECTIONS).map(weight).filter(|&place| tracked[place]);
        for (list, dtype) in [(wide.collect::<Vec<_>>(), DType::F32), (of_weights.collect(), DType::BF16)] {
            let shapes: Vec<_> = list.iter().map(|&place| operands.tensor(place).shape()).collect();
            if !list.is_empty() {
                for (place, tensor) in list.into_iter().zip(pieces(x, &shapes, dtype)) {
                    tensors[place] = Some(tensor);
                }
            }
        }
        let [q_norm, k_norm] = [NORMS[2], NORMS[3]].map(|place| tracked[place]);
        let heads = (q_norm || k_norm).then(|| empty(x, [2 * saved.call.head_dim], DType::F32));
        if tracked[X] {
            tensors[X] = Some(saved.call.hidden(x));
        }
        let at = |place: usize| tensors[place].as_ref().map(known_matrix);
        let places = Places {
            dx: at(X),
            norms: [at(NORMS[0]), at(NORMS[1])],
            heads: heads.as_ref().map(known_matrix),
            weights: (0..PROJECTIONS).map(|j| at(weight(j))).collect(),
            a: (0..PROJECTIONS).map(|j| at(weight(j) + 1)).collect(),
            b: (0..PROJECTIONS).map(|j| at(weight(j) + 2)).collect(),
        };
        Self { tensors, heads, places }
    }

    /// The gradients in the types of their tensors.
    fn gradients(mut self, saved: &Saved) -> Vec<Option<CubeTensor>> {
        if let Some(heads) = self.heads.take() {
            let d = saved.call.head_dim;
            for (n, place) in [NORMS[2], NORMS[3]].into_iter().enumerate() {
                let part = <Cube as burn::backend::ops::FloatTensorOps<Cube>>::float_slice(
                    heads.clone(),
                    &[(n * d..(n + 1) * d).into()],
                );
                self.tensors[place] = Some(dense(part));
            }
        }
        for place in NORMS {
            self.tensors[place] = self.tensors[place].take().map(|x| cast(x, DType::BF16));
        }
        self.tensors
    }
}
