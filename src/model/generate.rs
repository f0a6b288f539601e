//! Text from the model: prompts go through at once, then a token a pass, with the keys and values of earlier tokens kept.

use std::cmp::Ordering;

use burn::module::Module;
use burn::tensor::{DType, Int, Tensor, TensorData, activation};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::lora::uniform;
use super::{Decoder, Inputs};
use crate::data::{Batch, Stream};
use crate::error::{Error, Result};
use crate::ops::{self, DecoderLayer};

/// How the next token is chosen, and when that ends.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Most tokens after the prompt.
    pub max_tokens: usize,
    /// 0 takes the most likely token; else logits are divided by it before one is drawn.
    pub temperature: f64,
    /// Draw from the most likely tokens that have this much of the probability together.
    pub top_p: f64,
    /// Draw from so many of the most likely tokens; `None`: from all.
    pub top_k: Option<usize>,
    /// Of the drawing; each prompt has a stream of its own.
    pub seed: u64,
    /// Tokens that end a text; they aren't part of it.
    pub stop: Vec<u32>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { max_tokens: 256, temperature: 0.0, top_p: 1.0, top_k: None, seed: 0, stop: Vec::new() }
    }
}

/// One text in the making.
struct Text {
    /// Its number among the prompts.
    number: usize,
    /// Tokens that no pass has seen yet.
    new: Vec<u32>,
    /// Tokens that the cache holds.
    seen: usize,
    generator: ChaCha8Rng,
}

/// Keys and values of one layer: of each text `[g, tokens so far, d]`.
type Cache = Vec<Option<[Tensor<3>; 2]>>;

impl Decoder {
    /// What comes after each prompt, by the adapters of `run` (0 where there is one or none). `told` hears of each
    /// token, with its prompt's number, as it is chosen.
    ///
    /// # Errors
    /// An empty prompt, an id beyond the vocabulary, a text longer than the model's positions, no such run.
    pub fn generate(
        &self,
        prompts: &[Vec<u32>],
        run: usize,
        sampling: &Sampling,
        told: &mut dyn FnMut(usize, u32),
    ) -> Result<Vec<Vec<u32>>> {
        let model = self.valid();
        let limit = model.config().max_position_embeddings;
        let mut texts = Vec::with_capacity(prompts.len());
        for (number, prompt) in prompts.iter().enumerate() {
            let longest = prompt.len() + sampling.max_tokens;
            if prompt.is_empty() || longest > limit {
                let message = format!(
                    "prompt {number} has {} tokens, with {} to come; wanted 1 to {limit} in all",
                    prompt.len(),
                    sampling.max_tokens
                );
                return Err(Error::train(
                    message,
                    "lower the number of tokens to come, or shorten the prompt",
                ));
            }
            let mut generator = ChaCha8Rng::seed_from_u64(sampling.seed);
            generator.set_stream(number as u64);
            texts.push(Text { number, new: prompt.clone(), seen: 0, generator });
        }
        let mut caches: Vec<Cache> = vec![vec![None; prompts.len()]; model.num_layers()];
        let mut written = vec![Vec::new(); prompts.len()];
        for _ in 0..sampling.max_tokens {
            if texts.is_empty() {
                break;
            }
            let logits = model.next_logits(&mut texts, run, &mut caches)?;
            texts.retain_mut(|text| {
                let id = choose(&logits[text.number], sampling, &mut text.generator);
                if sampling.stop.contains(&id) {
                    return false;
                }
                told(text.number, id);
                written[text.number].push(id);
                text.new = vec![id];
                true
            });
        }
        Ok(written)
    }

    /// Takes each text's new tokens into the cache; the logits after the last of them, by the texts' numbers.
    fn next_logits(&self, texts: &mut [Text], run: usize, caches: &mut [Cache]) -> Result<Vec<Vec<f32>>> {
        let inputs = self.inputs_of(texts, run)?;
        let mut x = self.embed(&inputs);
        for (layer, cache) in self.model.layers.iter().zip(caches) {
            let layer = layer.parameters(&inputs, x.dtype(), false);
            x = cached_layer(x, &layer, &inputs, texts, cache);
        }
        let ends = texts.iter().scan(0, |end, text| {
            *end += text.new.len() as i32;
            Some(*end - 1)
        });
        let last = TensorData::new(ends.collect::<Vec<i32>>(), [texts.len()]);
        let last: Tensor<1, Int> = Tensor::from_data(last, &x.device());
        let logits = self.head_of(x.select(0, last), &inputs).cast(DType::F32);
        let [_, vocabulary] = logits.dims();
        let values = logits.into_data().try_to_vec::<f32>().expect("logits were cast to f32");
        let numbers = texts.iter().map(|text| text.number).max().map_or(0, |most| most + 1);
        let mut by_number = vec![Vec::new(); numbers];
        for (text, row) in texts.iter_mut().zip(values.chunks(vocabulary)) {
            by_number[text.number] = row.to_vec();
            text.seen += text.new.len();
        }
        Ok(by_number)
    }

    fn inputs_of(&self, texts: &[Text], run: usize) -> Result<Inputs> {
        let mut batch = Batch { cu_seqlens: vec![0], ..Batch::default() };
        for text in texts {
            batch.input_ids.extend(&text.new);
            batch.position_ids.extend((text.seen..text.seen + text.new.len()).map(|p| p as u32));
            batch.cu_seqlens.push(batch.input_ids.len() as u32);
        }
        let tokens = batch.tokens();
        (batch.targets, batch.loss_mask) = (vec![0; tokens], vec![false; tokens]);
        batch.run_tokens = vec![0; self.runs().len().max(1)];
        let runs = batch.run_tokens.len();
        let own = batch.run_tokens.get_mut(run);
        *own.ok_or_else(|| {
            Error::train(format!("there is no adapter run {run}: the model has {runs}"), "")
        })? = tokens;
        batch.streams = vec![Stream::default(); runs];
        self.inputs(&batch, None)
    }

    /// Norm and head of a few rows.
    fn head_of(&self, x: Tensor<2>, inputs: &Inputs) -> Tensor<2> {
        let rows = x.dims()[0];
        let hidden = self.model.norm.forward(x);
        let Some(head) = &self.lm_head else {
            return ops::linear(hidden, super::lora::value(&self.model.embed_tokens.weight, self.dtype));
        };
        let mut projection = head.projection(inputs, hidden.dtype());
        let parts = projection.adapters.iter_mut().flat_map(|adapters| &mut adapters.parts);
        parts.filter(|part| part.tokens > 0).for_each(|part| part.tokens = rows);
        ops::project(hidden, &projection)
    }
}

/// A decoder layer over new tokens, whose attention sees what the cache holds too.
fn cached_layer(
    x: Tensor<2>,
    layer: &DecoderLayer,
    inputs: &Inputs,
    texts: &[Text],
    cache: &mut Cache,
) -> Tensor<2> {
    let ([t, _], d) = (x.dims(), layer.head_dim);
    let heads = |y: Tensor<2>| {
        let width = y.dims()[1];
        y.reshape([t, width / d, d])
    };
    let normed = ops::rms_norm(x.clone(), layer.input_norm.clone(), layer.eps);
    let turned = |y: Tensor<2>, norm: &Option<Tensor<1>>| {
        ops::qk_norm_rope(heads(y), norm.clone(), layer.eps, &inputs.rope)
    };
    let q = turned(ops::project(normed.clone(), &layer.q), &layer.q_norm);
    let k = turned(ops::project(normed.clone(), &layer.k), &layer.k_norm);
    let v = heads(ops::project(normed, &layer.v));
    let scale = (d as f64).powf(-0.5) as f32;
    let fresh = texts.iter().all(|text| text.seen == 0);
    let mut outputs = Vec::with_capacity(texts.len());
    let mut start = 0;
    for text in texts {
        let n = text.new.len();
        let own = |x: &Tensor<3>| x.clone().narrow(0, start, n).swap_dims(0, 1);
        let [keys, values] = match cache[text.number].take() {
            None => [own(&k), own(&v)],
            Some([keys, values]) => {
                [Tensor::cat(vec![keys, own(&k)], 1), Tensor::cat(vec![values, own(&v)], 1)]
            }
        };
        if !fresh {
            outputs.push(attend(q.clone().narrow(0, start, n), &keys, &values, scale));
        }
        cache[text.number] = Some([keys, values]);
        start += n;
    }
    let attended =
        if fresh { ops::attention(q, k, v, &inputs.documents, scale) } else { Tensor::cat(outputs, 0) };
    let [_, h, _] = attended.dims();
    let x = x + ops::project(attended.reshape([t, h * d]), &layer.o);
    let normed = ops::rms_norm(x.clone(), layer.post_norm.clone(), layer.eps);
    let (gate, up) = (ops::project(normed.clone(), &layer.gate), ops::project(normed, &layer.up));
    x + ops::project(ops::swiglu(gate, up), &layer.down)
}

/// One new token's attention to all tokens so far, itself the last.
///
/// # Shapes
/// - q: `[1, h, d]`, keys, values: `[g, l, d]` → `[1, h, d]`
fn attend(q: Tensor<3>, keys: &Tensor<3>, values: &Tensor<3>, scale: f32) -> Tensor<3> {
    let ([n, h, d], [g, _, _], dtype) = (q.dims(), keys.dims(), q.dtype());
    assert_eq!(n, 1, "after the prompt, tokens come one by one");
    let q = q.reshape([g, h / g, d]);
    let scores = q.matmul(keys.clone().swap_dims(1, 2)).cast(DType::F32).mul_scalar(scale);
    let weights = activation::softmax(scores, 2).cast(dtype);
    weights.matmul(values.clone()).reshape([1, h, d])
}

/// The next token, of its logits.
fn choose(logits: &[f32], sampling: &Sampling, generator: &mut impl Rng) -> u32 {
    let descending = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    let mut order: Vec<usize> = (0..logits.len()).collect();
    if sampling.temperature <= 0.0 {
        return order.into_iter().min_by(descending).expect("a vocabulary has tokens") as u32;
    }
    order.sort_unstable_by(descending);
    order.truncate(sampling.top_k.unwrap_or(usize::MAX).max(1));
    let largest = f64::from(logits[order[0]]);
    let weight = |&id: &usize| ((f64::from(logits[id]) - largest) / sampling.temperature).exp();
    let mut weights: Vec<f64> = order.iter().map(weight).collect();
    let all: f64 = weights.iter().sum();
    let mut together = 0.0;
    let kept = weights.iter().position(|weight| {
        together += weight;
        together.partial_cmp(&(sampling.top_p * all)) != Some(Ordering::Less)
    });
    weights.truncate(kept.map_or(weights.len(), |last| last + 1));
    let mut at = uniform(generator) * weights.iter().sum::<f64>();
    let drawn = weights.iter().position(|weight| {
        at -= weight;
        at < 0.0
    });
    order[drawn.unwrap_or(weights.len() - 1)] as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_drawn_as_often_as_they_are_likely() {
        let logits = [0.0f32, 2.0, 1.0, -1.0];
        let sampling = Sampling { temperature: 0.5, ..Sampling::default() };
        let mut generator = ChaCha8Rng::seed_from_u64(1);
        let mut draw = |sampling: &Sampling| {
            let mut counts = [0usize; 4];
            (0..20_000).for_each(|_| counts[choose(&logits, sampling, &mut generator) as usize] += 1);
            counts
        };
        let weights = logits.map(|l| (f64::from(l) / 0.5).exp());
        let all: f64 = weights.iter().sum();
        for (count, weight) in draw(&sampling).into_iter().zip(weights) {
            let (want, p) = (20_000.0 * weight / all, weight / all);
            // Five standard deviations.
            assert!(
                (count as f64 - want).abs() <= 5.0 * (20_000.0 * p * (1.0 - p)).sqrt() + 1.0,
                "{count} {want}"
            );
        }
        assert_eq!(draw(&Sampling { top_k: Some(2), ..sampling.clone() })[0], 0);
        let counts = draw(&Sampling { top_p: 0.5, ..sampling.clone() });
        assert_eq!(counts, [0, 20_000, 0, 0], "the most likely token has more than half");
        assert_eq!(choose(&logits, &Sampling::default(), &mut ChaCha8Rng::seed_from_u64(0)), 1);
    }
}
