//! A [`Batch`] on a device: what every layer of the decoder needs besides the hidden states.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::HfConfig;
use super::stack::Stacked;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::ops::{Documents, Rope, Stream};

/// One micro-batch on the device, checked.
#[derive(Debug, Clone)]
pub struct Inputs {
    pub(super) ids: Tensor<1, Int>,
    pub(super) rope: Rope,
    pub(super) documents: Documents,
    /// Each run's positions that have a trained target, and those targets; `None` where it has none.
    pub(super) trained: Vec<Option<(Tensor<1, Int>, Tensor<1, Int>)>>,
    pub(super) run_tokens: Vec<usize>,
    pub(super) streams: Vec<Stream>,
    pub(super) dropout_seed: Option<u64>,
    pub(super) recompute: Option<usize>,
    pub(super) stacked: Stacked,
}

impl Inputs {
    /// Checks the batch and puts it on `device`; `dropout_seed` is `None` in evaluation.
    ///
    /// # Errors
    /// Where the batch's parts disagree: lengths, document boundaries, an id beyond the
    /// vocabulary, or a run partition that is missing or doesn't sum to the number of tokens.
    pub fn new(
        batch: &Batch,
        config: &HfConfig,
        device: &Device,
        dropout_seed: Option<u64>,
    ) -> Result<Inputs> {
        Self::with_tables(batch, config, &RopeTables::default(), device, dropout_seed)
    }

    /// As [`Inputs::new`], with rotary tables that may have been made before.
    pub(super) fn with_tables(
        batch: &Batch,
        config: &HfConfig,
        made: &RopeTables,
        device: &Device,
        dropout_seed: Option<u64>,
    ) -> Result<Inputs> {
        check(batch, config)?;
        let device = device.clone().without_autodiff();
        let mut start = 0;
        let trained = batch.run_tokens.iter().map(|tokens| {
            let run = start..start + tokens;
            start = run.end;
            let rows: Vec<usize> = run.filter(|&t| batch.loss_mask[t]).collect();
            let targets = rows.iter().map(|&t| batch.targets[t] as i32).collect();
            let some = !rows.is_empty();
            let rows = rows.into_iter().map(|t| t as i32).collect();
            some.then(|| (ints(rows, &device), ints(targets, &device)))
        });
        let trained = trained.collect();
        Ok(Inputs {
            ids: ints(batch.input_ids.iter().map(|&id| id as i32).collect(), &device),
            rope: made.rope(&batch.position_ids, config, &device),
            documents: Documents { cu_seqlens: batch.cu_seqlens.as_slice().into() },
            trained,
            run_tokens: batch.run_tokens.clone(),
            streams: batch.streams.clone(),
            dropout_seed,
            recompute: None,
            stacked: Stacked::default(),
        })
    }

    /// With every n-th layer's activations made again in the backward pass; only where [`super::Decoder::recomputes`].
    #[must_use]
    pub fn recomputing(self, every: usize) -> Self {
        Self { recompute: Some(every.max(1)), ..self }
    }

    /// Without stacked adapters, for a pass without a tape.
    #[must_use]
    pub fn unstacked(self) -> Self {
        Self { stacked: Stacked::default(), ..self }
    }

    /// Number of tokens T, padding included.
    pub fn tokens(&self) -> usize {
        self.run_tokens.iter().sum()
    }

    /// Number of adapter runs that share the batch.
    pub fn runs(&self) -> usize {
        self.run_tokens.len()
    }

    /// Of each run, whether it has tokens.
    pub(super) fn present(&self) -> impl Iterator<Item = bool> {
        self.run_tokens.iter().map(|&tokens| tokens > 0)
    }

    /// Whether any position has a trained target; where none has, the loss is a constant 0.
    pub fn has_targets(&self) -> bool {
        self.trained.iter().any(Option::is_some)
    }
}

fn ints(values: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    let n = values.len();
    Tensor::from_data(TensorData::new(values, [n]), device)
}

/// Hugging Face's tables of the positions from 0 on, made once for the longest document so far: angles in f32, the
/// second half of a head repeats the first. Copies share them.
#[derive(Debug, Clone, Default)]
pub(super) struct RopeTables(Arc<Mutex<Option<Rope>>>);

impl RopeTables {
    fn rope(&self, positions: &[u32], config: &HfConfig, device: &Device) -> Rope {
        let rows = positions.iter().max().map_or(0, |&last| last as usize + 1);
        if rows > positions.len() {
            return tables(positions.iter().copied(), config, device);
        }
        // Positions come again in each document: their rows are spread on the device.
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |made: &Rope| made.cos.dims()[0] >= rows && made.cos.device() == *device;
        let Rope { cos, sin } = match made.clone().filter(fits) {
            Some(made) => made,
            None => made.insert(tables(0..rows as u32, config, device)).clone(),
        };
        let rows = ints(positions.iter().map(|&position| position as i32).collect(), device);
        Rope { cos: cos.select(0, rows.clone()), sin: sin.select(0, rows) }
    }
}

/// A row for each position.
fn tables(positions: impl ExactSizeIterator<Item = u32>, config: &HfConfig, device: &Device) -> Rope {
    let frequencies = config.inverse_frequencies();
    let shape = [positions.len(), config.head_dim];
    let (mut cos, mut sin) =
        (Vec::with_capacity(shape[0] * shape[1]), Vec::with_capacity(shape[0] * shape[1]));
    for position in positions {
        let row = cos.len();
        for &frequency in &frequencies {
            // The angle is rounded to f32 as in Hugging Face; its cosine is taken exactly.
            let (sine, cosine) = f64::from(position as f32 * frequency).sin_cos();
            cos.push(cosine as f32);
            sin.push(sine as f32);
        }
        cos.extend_from_within(row..);
        sin.extend_from_within(row..);
    }
    let table = |values: Vec<f32>| Tensor::from_data(TensorData::new(values, shape), device);
    Rope { cos: table(cos), sin: table(sin) }
}

fn check(batch: &Batch, config: &HfConfig) -> Result<()> {
    let t = batch.tokens();
    let bad = |message: String| {
        Err(Error::train(message, "a batch that the loader makes always holds; this one was made elsewhere"))
    };
    let lengths = [batch.position_ids.len(), batch.targets.len(), batch.loss_mask.len()];
    if t == 0 || lengths.iter().any(|&n| n != t) {
        return bad(format!(
            "the batch has {t} ids, {} positions, {} targets and {} loss flags: wanted as many of each",
            lengths[0], lengths[1], lengths[2]
        ));
    }
    let bounds = &batch.cu_seqlens;
    let whole = bounds.first() == Some(&0) && bounds.last().is_some_and(|&end| end as usize == t);
    if !whole || bounds.windows(2).any(|w| w[0] >= w[1]) {
        return bad(format!(
            "document boundaries {bounds:?} do not rise from 0 to the {t} tokens of the batch"
        ));
    }
    if batch.run_tokens.is_empty() {
        return bad(format!("the batch does not say how many of its {t} tokens belong to each adapter run"));
    }
    if batch.streams.len() != batch.run_tokens.len() {
        let (streams, runs) = (batch.streams.len(), batch.run_tokens.len());
        return bad(format!(
            "the batch has {runs} adapter runs and says of {streams} where their tokens lie"
        ));
    }
    let sum: usize = batch.run_tokens.iter().sum();
    if sum != t {
        let parts = &batch.run_tokens;
        return bad(format!("the tokens of the adapter runs {parts:?} sum to {sum}, the batch has {t}"));
    }
    let ends = batch.run_tokens.iter().scan(0, |end, n| {
        *end += n;
        Some(*end)
    });
    if let Some(end) = ends.into_iter().find(|&end| !bounds.contains(&(end as u32))) {
        return bad(format!("an adapter run ends at token {end}, inside a document: a document has one run"));
    }
    let trained = |n: usize| batch.loss_mask[n].then_some(batch.targets[n]);
    let ids = (0..t).flat_map(|n| [Some(batch.input_ids[n]), trained(n)]).flatten();
    match ids.max().filter(|&id| id as usize >= config.vocab_size) {
        Some(id) => bad(format!("token id {id} is not below `vocab_size` {}", config.vocab_size)),
        None => Ok(()),
    }
}
