//! Held-out loss: the sum over all trained tokens of the set ÷ their number, without dropout.
//!
//! The same fused cross entropy as in training, on the model without autodiff: no activations are kept
//! and no logits beyond a chunk.

use burn::module::Module;

use super::ranks::Ranks;
use crate::data::Batch;
use crate::model::Decoder;
use crate::{Error, Result};

/// Mean loss over the trained tokens of `batches`, which the ranks share.
///
/// # Errors
/// A set without any trained token, a batch that doesn't hold or can't be read.
pub fn held_out_loss(
    model: &Decoder,
    batches: impl IntoIterator<Item = Result<Batch>>,
    ranks: &Ranks,
) -> Result<f64> {
    let model = model.valid().rounded();
    let (mut sum, mut tokens) = (0.0, 0);
    let trained = batches.into_iter().filter(|b| b.as_ref().map_or(true, |b| b.trained_tokens() > 0));
    for batch in trained.skip(ranks.rank()).step_by(ranks.count()) {
        let batch = batch?;
        let inputs = model.inputs(&batch, None)?;
        let loss = model.loss_sum(&inputs).to_data().try_to_vec::<f32>().expect("the loss is f32");
        sum += f64::from(loss[0]);
        tokens += batch.trained_tokens();
    }
    let [sum, tokens] = ranks.sum_f64([sum, tokens as f64])?;
    if tokens == 0.0 {
        return Err(Error::train("the validation set has no trained token", "look at `val.data`"));
    }
    Ok(sum / tokens)
}
