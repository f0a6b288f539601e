//! A decoder layer while text is made: over whole prompts, whose keys and values are kept, then over one more token of
//! each text at a time. No gradients.
//!
//! A pass over a few tokens reads every weight once and computes little with it, so the CPU has products of its own for
//! that (`flex/few.rs`), whose sums run in another order than those of [`super::project`]: the values of the two agree
//! to rounding. A text's values don't depend on the texts beside it, bit for bit. On CUDA cards a bf16 layer is one op
//! here too (`cuda/layer/forward.rs`).

use burn::tensor::{DType, Tensor, activation};

use super::layer::{heads, project, rest};
use super::{DecoderLayer, Documents, Projection, Rope};

/// Keys and values of the tokens so far of several texts, of one decoder layer.
#[derive(Debug)]
pub struct KeyValues {
    /// Keys and values, `[texts · room, g · d]`.
    tensors: [Tensor<2>; 2],
    /// Tokens that each text has room for.
    room: usize,
}

/// The place of a text's next token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Next {
    /// Number of the text among those of [`KeyValues`].
    pub text: usize,
    /// Tokens before it.
    pub seen: usize,
}

/// [`super::decoder_layer`] over whole prompts, a document each; with their keys and values.
///
/// # Shapes
/// - x: `[t, e]` → `[t, e]`
pub fn prompt_layer(
    x: Tensor<2>,
    layer: &DecoderLayer,
    rope: &Rope,
    documents: &Documents,
) -> (Tensor<2>, KeyValues) {
    let [q, k, v] = heads(x.clone(), layer, rope, project);
    let [t, g, d] = k.dims();
    let kept = [&k, &v].map(|x| x.clone().reshape([t, g * d]));
    let kept = KeyValues::new(kept, documents.ranges().collect());
    let attended = super::attention(q, k, v, documents, layer.scale());
    (rest(x, attended, layer, project), kept)
}

/// [`super::decoder_layer`] over the next token of each of some texts, which sees those before it and is added to them.
///
/// # Shapes
/// - x: `[n, e]`, next: n → `[n, e]`
///
/// # Panics
/// Where a tensor is on a tape.
pub fn next_layer(
    x: Tensor<2>,
    layer: &DecoderLayer,
    rope: &Rope,
    kept: KeyValues,
    next: &[Next],
) -> (Tensor<2>, KeyValues) {
    assert!(!x.is_autodiff(), "next_layer: there is no gradient");
    assert_eq!(x.dims()[0], next.len(), "next_layer: rows of x and texts");
    let kept = kept.with_room_for(next.iter().map(|next| next.seen + 1).max().unwrap_or(0));
    #[cfg(feature = "cuda")]
    if super::cuda::layer::takes(&x, layer, rope) {
        let KeyValues { tensors, room } = kept;
        let (y, tensors) = super::cuda::layer::next_layer(x, layer, rope, tensors, room, next);
        return (y, KeyValues { tensors, room });
    }
    let [q, k, v] = heads(x.clone(), layer, rope, project_few);
    let (attended, kept) = attention(q, k, v, kept, next, layer.scale());
    (rest(x, attended, layer, project_few), kept)
}

/// [`super::project`] for a few rows, at the speed of memory where the device has a way.
///
/// # Shapes
/// - x: `[n, in]` → `[n, out]`
pub fn project_few(x: Tensor<2>, projection: &Projection) -> Tensor<2> {
    #[cfg(feature = "flex")]
    if super::flex::few::takes(&x, projection) {
        return super::flex::few::project(x, projection);
    }
    project(x, projection)
}

/// Whether all elements are numbers. They come to the host for it: a sum of them could overflow by itself.
pub fn is_finite(logits: Tensor<2>) -> bool {
    let values = logits.cast(DType::F32).into_data();
    values.as_slice::<f32>().expect("they were cast to f32").iter().all(|value| value.is_finite())
}

/// The number of each row's largest element, the first of equals.
pub fn most_likely(logits: Tensor<2>) -> Vec<u32> {
    #[cfg(feature = "flex")]
    if super::flex::takes(&logits) {
        return super::flex::few::largest_of_rows(logits);
    }
    let ids = logits.argmax(1).into_data();
    ids.iter::<i64>().map(|id| u32::try_from(id).expect("a vocabulary has fewer tokens")).collect()
}

impl KeyValues {
    /// Of each of these rows of `tensors`, with room for more.
    fn new(tensors: [Tensor<2>; 2], texts: Vec<(usize, usize)>) -> Self {
        let longest = texts.iter().map(|(start, end)| end - start).max().unwrap_or(0);
        // A quarter more each time: no token is moved more than a few times.
        let room = longest + (longest / 4).max(64);
        let spread = |x: Tensor<2>| {
            let width = x.dims()[1];
            let empty = |rows: usize| Tensor::zeros([rows, width], (&x.device(), x.dtype()));
            let parts = texts.iter().flat_map(|&(start, end)| {
                [x.clone().narrow(0, start, end - start), empty(room - (end - start))]
            });
            Tensor::cat(parts.collect(), 0)
        };
        Self { tensors: tensors.map(spread), room }
    }

    fn with_room_for(self, tokens: usize) -> Self {
        if tokens <= self.room {
            return self;
        }
        let Self { tensors, room } = self;
        let texts = tensors[0].dims()[0] / room;
        Self::new(tensors, (0..texts).map(|text| (text * room, (text + 1) * room)).collect())
    }
}

/// Attention of one token of each text to itself and those before it.
///
/// # Shapes
/// - q: `[n, h, d]`, k, v: `[n, g, d]` → `[n, h, d]`
fn attention(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    kept: KeyValues,
    next: &[Next],
    scale: f32,
) -> (Tensor<3>, KeyValues) {
    let KeyValues { tensors, room } = kept;
    #[cfg(feature = "flex")]
    if [&q, &k, &v].into_iter().all(super::flex::takes) {
        let (y, tensors) = super::attention::next_token(q, [k, v], tensors, room, next, scale);
        return (y, KeyValues { tensors, room });
    }
    let [n, g, d] = k.dims();
    let [mut keys, mut values] = tensors;
    let [k, v] = [k, v].map(|x| x.reshape([n, g * d]));
    let mut outputs = Vec::with_capacity(n);
    for (i, Next { text, seen }) in next.iter().enumerate() {
        let (row, width) = (text * room + seen, g * d);
        let place = [row..row + 1, 0..width];
        keys = keys.slice_assign(place.clone(), k.clone().narrow(0, i, 1));
        values = values.slice_assign(place, v.clone().narrow(0, i, 1));
        let of_text = |x: &Tensor<2>| {
            x.clone().narrow(0, text * room, seen + 1).reshape([seen + 1, g, d]).swap_dims(0, 1)
        };
        outputs.push(attend(q.clone().narrow(0, i, 1), of_text(&keys), of_text(&values), scale));
    }
    (Tensor::cat(outputs, 0), KeyValues { tensors: [keys, values], room })
}

/// # Shapes
/// - q: `[1, h, d]`, keys, values: `[g, l, d]` → `[1, h, d]`
fn attend(q: Tensor<3>, keys: Tensor<3>, values: Tensor<3>, scale: f32) -> Tensor<3> {
    let ([_, h, d], [g, _, _], dtype) = (q.dims(), keys.dims(), q.dtype());
    let q = q.reshape([g, h / g, d]);
    let scores = q.matmul(keys.swap_dims(1, 2)).cast(DType::F32).mul_scalar(scale);
    let weights = activation::softmax(scores, 2).cast(dtype);
    weights.matmul(values).reshape([1, h, d])
}
