//! Attention of the next token of each text, over keys and values that lie in order of tokens.

use burn::backend::Flex;
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::super::Next;
use super::super::flex::simd::{exp_and_sum, fma, largest, scale, sum_of, vectorised};
use super::super::flex::{dense, primitive, tensor, values};

/// Products of a call from which on threads share it.
const SHARED: usize = 1 << 18;

/// Writes each text's new key and value behind those that are there, then attends.
///
/// # Shapes
/// - q: `[n, h, d]`, new: `[n, g, d]`, kept: `[texts · room, g · d]` → `[n, h, d]`
pub fn next_token(
    q: Tensor<3>,
    new: [Tensor<3>; 2],
    kept: [Tensor<2>; 2],
    room: usize,
    next: &[Next],
    factor: f32,
) -> (Tensor<3>, [Tensor<2>; 2]) {
    let ([n, h, d], [_, g, _]) = (q.dims(), new[0].dims());
    let width = g * d;
    let mut kept = kept.map(|x| dense(primitive(x)));
    for (kept, new) in kept.iter_mut().zip(new) {
        let new = dense(primitive(new));
        append(kept, values(&new), room, next);
    }
    let [keys, values_of] = kept.each_ref().map(values);
    let q = dense(primitive(q));
    let (q, shared) = (values(&q), h / g);
    let mut out = vec![0.0; n * h * d];
    let group = |(place, out): (usize, &mut [f32])| {
        let (Next { text, seen }, first) = (next[place / g], place % g * d);
        let rows = text * room * width..(text * room + seen + 1) * width;
        let [keys, values] = [&keys[rows.clone()], &values_of[rows]].map(|rows| &rows[first..]);
        let q = &q[place * shared * d..(place + 1) * shared * d];
        let mut scores = vec![0.0; seen + 1];
        for (q, out) in q.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
            head(q, keys, values, width, factor, &mut scores, out);
        }
    };
    let products: usize = next.iter().map(|next| (next.seen + 1) * h * d).sum();
    match products < SHARED {
        true => out.chunks_mut(shared * d).enumerate().for_each(group),
        false => out.par_chunks_mut(shared * d).enumerate().for_each(group),
    }
    let y = Tensor::from_primitive::<Flex>(tensor(out, [n, h, d]));
    (y, kept.map(Tensor::from_primitive::<Flex>))
}

fn append(kept: &mut FlexTensor, new: &[f32], room: usize, next: &[Next]) {
    // A copy where someone else holds the same memory; nobody does after the first token.
    let rows: &mut [f32] = kept.storage_mut();
    let width = new.len() / next.len().max(1);
    for (Next { text, seen }, new) in next.iter().zip(new.chunks_exact(width.max(1))) {
        rows[(text * room + seen) * width..][..width].copy_from_slice(new);
    }
}

vectorised! {
    /// One query head over the tokens whose keys and values begin `width` apart.
    fn head(
        q: &[f32],
        keys: &[f32],
        values: &[f32],
        width: usize,
        factor: f32,
        scores: &mut [f32],
        out: &mut [f32],
    ) {
        let size = q.len();
        for (score, key) in scores.iter_mut().zip(keys.chunks(width)) {
            let key = &key[..size];
            *score = sum_of(size, |i| q[i] * key[i]);
        }
        let shift = -largest(scores) * factor;
        let sum = exp_and_sum::<FMA>(scores, |score| fma::<FMA>(score, factor, shift));
        for (weight, value) in scores.iter().zip(values.chunks(width)) {
            for (out, value) in out.iter_mut().zip(&value[..size]) {
                *out = fma::<FMA>(*weight, *value, *out);
            }
        }
        scale(out, 1.0 / sum);
    }
}
