//! Text from the model: prompts go through at once, then a token a pass, with the keys and values of earlier tokens kept.

use burn::module::Module;
use burn::tensor::{DType, Int, Tensor, TensorData};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::lora::{uniform, value};
use super::{Decoder, Inputs};
use crate::data::{Batch, Stream};
use crate::error::{Error, Result};
use crate::ops::{self, DecoderLayer, KeyValues, Next, Projection};

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
    /// The first prompt's stream; the next has the next.
    pub stream: u64,
    /// Tokens that end a text; they aren't part of it.
    pub stop: Vec<u32>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            max_tokens: 256,
            temperature: 0.0,
            top_p: 1.0,
            top_k: None,
            seed: 0,
            stream: 0,
            stop: Vec::new(),
        }
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

/// A model that has taken prompts in and takes tokens in one by one.
struct Reader {
    model: Decoder,
    /// The adapters' number.
    run: usize,
    /// The parameters, gathered and cast once.
    layers: Vec<DecoderLayer>,
    head: Projection,
    kept: Vec<KeyValues>,
}

impl Decoder {
    /// What comes after each prompt, by the adapters of `run` (0 where there is one or none). `told` hears of each
    /// token, with its prompt's number, as it is chosen, and says whether that text goes on; of `None` where a stop token
    /// ends it.
    ///
    /// With temperature 0 a token is the most likely one after all before it, the first of equals. Where two are equally
    /// likely but for rounding, the pass over the whole text at once, whose sums run in another order, may prefer the other.
    ///
    /// # Errors
    /// An empty prompt, an id beyond the vocabulary, a text longer than the model's positions, no such run; first logits that
    /// aren't numbers.
    pub fn generate(
        &self,
        prompts: &[Vec<u32>],
        run: usize,
        sampling: &Sampling,
        told: &mut dyn FnMut(usize, Option<u32>) -> bool,
    ) -> Result<Vec<Vec<u32>>> {
        let limit = self.config().max_position_embeddings;
        let mut texts = Vec::with_capacity(prompts.len());
        for (number, prompt) in prompts.iter().enumerate() {
            sampling.check(prompt.len(), limit).map_err(|what| {
                Error::train(format!("prompt {number} {what}"), "shorten it, or ask for less")
            })?;
            let mut generator = ChaCha8Rng::seed_from_u64(sampling.seed);
            generator.set_stream(sampling.stream + number as u64);
            texts.push(Text { number, new: prompt.clone(), seen: 0, generator });
        }
        let mut written = vec![Vec::new(); prompts.len()];
        if texts.is_empty() || sampling.max_tokens == 0 {
            return Ok(written);
        }
        let device = self.device();
        let (mut reader, mut logits) = ops::in_series(&device, || Reader::new(self.valid(), run, &texts))?;
        if !ops::is_finite(logits.clone()) {
            return Err(Error::NotANumber { of: "the model".into() });
        }
        loop {
            let chosen = sampling.choose(logits, &mut texts);
            let mut chosen = chosen.into_iter();
            texts.retain_mut(|text| {
                let id = chosen.next().expect("a token for each text");
                if sampling.stop.contains(&id) {
                    told(text.number, None);
                    return false;
                }
                written[text.number].push(id);
                text.seen += text.new.len();
                text.new = vec![id];
                told(text.number, Some(id)) && written[text.number].len() < sampling.max_tokens
            });
            if texts.is_empty() {
                return Ok(written);
            }
            logits = ops::in_series(&device, || reader.next(&texts))?;
        }
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
}

impl Reader {
    /// Takes the texts' prompts in; with the logits after the last token of each.
    fn new(model: Decoder, run: usize, texts: &[Text]) -> Result<(Self, Tensor<2>)> {
        let inputs = model.inputs_of(texts, run)?;
        let mut x = model.embed(&inputs);
        let layers = model.model.layers.iter().map(|layer| layer.parameters(&inputs, x.dtype(), false));
        let layers: Vec<DecoderLayer> = layers.collect();
        let mut kept = Vec::with_capacity(layers.len());
        for layer in &layers {
            let (y, of_layer) = ops::prompt_layer(x, layer, &inputs.rope, &inputs.documents);
            kept.push(of_layer);
            x = y;
        }
        let ends: Vec<i32> = inputs.documents.ranges().map(|(_, end)| end as i32 - 1).collect();
        let ends = TensorData::new(ends, [texts.len()]);
        let ends: Tensor<1, Int> = Tensor::from_data(ends, &x.device());
        let head = match &model.lm_head {
            Some(head) => head.projection(&inputs, x.dtype()),
            None => Projection {
                weight: value(&model.model.embed_tokens.weight, x.dtype()),
                bias: None,
                adapters: None,
            },
        };
        let mut reader = Self { model, run, layers, head, kept };
        reader.set_texts(texts.len());
        let logits = reader.logits(x.select(0, ends));
        Ok((reader, logits))
    }

    /// Takes each text's newest token in; with the logits after it.
    fn next(&mut self, texts: &[Text]) -> Result<Tensor<2>> {
        self.set_texts(texts.len());
        let inputs = self.model.inputs_of(texts, self.run)?;
        let next: Vec<Next> = texts.iter().map(|text| Next { text: text.number, seen: text.seen }).collect();
        let mut x = self.model.embed(&inputs);
        let kept = std::mem::take(&mut self.kept);
        for (layer, of_layer) in self.layers.iter().zip(kept) {
            let (y, of_layer) = ops::next_layer(x, layer, &inputs.rope, of_layer, &next);
            self.kept.push(of_layer);
            x = y;
        }
        Ok(self.logits(x))
    }

    /// A row a text from here on.
    fn set_texts(&mut self, texts: usize) {
        let projections = self.layers.iter_mut().flat_map(DecoderLayer::projections_mut);
        projections.chain([&mut self.head]).for_each(|projection| projection.set_tokens(texts));
    }

    fn logits(&self, x: Tensor<2>) -> Tensor<2> {
        ops::project_few(self.model.model.norm.forward(x), &self.head)
    }
}

impl Sampling {
    /// Whether a prompt of so many tokens can be answered by a model with so many positions; else what is wrong.
    ///
    /// # Errors
    /// It is empty, or too long.
    pub fn check(&self, prompt: usize, positions: usize) -> std::result::Result<(), String> {
        if (1..=positions.saturating_sub(self.max_tokens)).contains(&prompt) {
            return Ok(());
        }
        let to_come = self.max_tokens;
        Err(format!("has {prompt} tokens, with {to_come} to come; wanted 1 to {positions} in all"))
    }

    /// The next token of each text, of its row of logits.
    fn choose(&self, logits: Tensor<2>, texts: &mut [Text]) -> Vec<u32> {
        if self.temperature <= 0.0 {
            return ops::most_likely(logits);
        }
        let [_, vocabulary] = logits.dims();
        let values = logits.cast(DType::F32).into_data();
        let values = values.as_slice::<f32>().expect("logits were cast to f32");
        let rows = values.chunks(vocabulary).zip(texts);
        rows.map(|(row, text)| self.draw(row, &mut text.generator)).collect()
    }

    /// A token, as often as it is likely. Sums run in a fixed order: over all in that of the vocabulary, over those that
    /// are drawn from in that of their likelihood.
    fn draw(&self, logits: &[f32], generator: &mut impl Rng) -> u32 {
        let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let weight = |id: &u32| ((f64::from(logits[*id as usize]) - largest) / self.temperature).exp();
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let limit = self.top_k.unwrap_or(ids.len()).clamp(1, ids.len());
        // Without limits the order says nothing.
        if limit < ids.len() || self.top_p < 1.0 {
            self.most_likely_first(&mut ids, logits, limit, &weight);
        }
        let weights: Vec<f64> = ids.iter().map(weight).collect();
        let mut at = uniform(generator) * weights.iter().sum::<f64>();
        let drawn = weights.iter().position(|weight| {
            at -= weight;
            at < 0.0
        });
        ids[drawn.unwrap_or(ids.len() - 1)]
    }

    /// Leaves those that may be drawn. Sorts no more than it has to: as a rule a few of a large vocabulary have nearly
    /// all of the probability.
    fn most_likely_first(
        &self,
        ids: &mut Vec<u32>,
        logits: &[f32],
        limit: usize,
        weight: &impl Fn(&u32) -> f64,
    ) {
        let descending =
            |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        if limit < ids.len() {
            ids.select_nth_unstable_by(limit - 1, descending);
            ids.truncate(limit);
            ids.sort_unstable_by(descending);
        }
        let wanted = self.top_p * ids.iter().map(weight).sum::<f64>();
        let (mut sorted, mut kept, mut together) = (0, 0, 0.0);
        while kept < ids.len() && !(together >= wanted && kept > 0) {
            if kept == sorted {
                sorted = (4 * sorted).clamp(256, ids.len().max(256)).min(ids.len());
                if sorted < ids.len() {
                    ids[kept..].select_nth_unstable_by(sorted - kept - 1, descending);
                }
                ids[kept..sorted].sort_unstable_by(descending);
            }
            together += weight(&ids[kept]);
            kept += 1;
        }
        ids.truncate(kept);
    }
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
            (0..20_000).for_each(|_| counts[sampling.draw(&logits, &mut generator) as usize] += 1);
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
    }

    #[test]
    fn a_large_vocabulary_is_sorted_as_far_as_needed() {
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let logits: Vec<f32> = (0..5000).map(|_| (4.0 * uniform(&mut random)) as f32).collect();
        let weight = |id: &u32| f64::from(logits[*id as usize]).exp();
        let mut sorted: Vec<u32> = (0..5000).collect();
        sorted.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        for (top_p, top_k) in [(0.01, None), (0.5, None), (0.999, None), (1.0, Some(700)), (0.7, Some(700))] {
            let sampling = Sampling { top_p, top_k, ..Sampling::default() };
            let mut kept: Vec<u32> = (0..5000).collect();
            sampling.most_likely_first(&mut kept, &logits, top_k.unwrap_or(5000), &weight);
            let of = &sorted[..top_k.unwrap_or(5000)];
            let (all, mut together) = (of.iter().map(weight).sum::<f64>(), 0.0);
            let enough = of.iter().position(|id| {
                together += weight(id);
                together >= top_p * all * (1.0 - 1e-12)
            });
            let enough = enough.map_or(of.len(), |last| last + 1);
            assert!(kept.len().abs_diff(enough) <= 1, "{top_p}: {} of {enough}", kept.len());
            assert_eq!(kept, sorted[..kept.len()], "{top_p} {top_k:?}");
        }
        // Not a number: no panic, and a token of the vocabulary.
        let sampling = Sampling { temperature: 1.0, top_p: 0.9, ..Sampling::default() };
        assert!(sampling.draw(&[f32::NAN; 300], &mut random) < 300);
    }
}
