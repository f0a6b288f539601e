//! Steps whose loss or gradient isn't finite: they are skipped, and told with the row where it began.

use burn::module::Module;

use crate::data::Batch;
use crate::model::Decoder;
use crate::{Error, Result};

/// Counts the steps that were skipped one after the other.
#[derive(Debug)]
pub(super) struct Skipped {
    most: usize,
    in_a_row: usize,
    /// The first of them.
    began: Option<usize>,
}

impl Skipped {
    /// `most`: `optim.max_skipped`.
    pub fn new(most: usize) -> Self {
        Self { most, in_a_row: 0, began: None }
    }

    /// A step was fine.
    pub fn reset(&mut self) {
        (self.in_a_row, self.began) = (0, None);
    }

    /// The first of the steps that were skipped one after the other.
    pub fn began(&self) -> Option<usize> {
        self.began
    }

    /// A step was skipped: what to say.
    ///
    /// # Errors
    /// Where it is one too many.
    pub fn note(&mut self, step: usize, what: &str) -> Result<String> {
        self.in_a_row += 1;
        self.began.get_or_insert(step);
        let found = format!("{what}: not finite, nothing was updated");
        if self.in_a_row <= self.most {
            return Ok(format!("step {step} is skipped: {found}"));
        }
        let hint = "lower `optim.lr`, look at the row with `log.log_data = true`, or allow more with \
                    `optim.max_skipped`";
        let before = match self.in_a_row - 1 {
            0 => String::new(),
            n => format!(" (and {n} before it)"),
        };
        Err(Error::train(found + &before, hint))
    }
}

/// Loss, norm and the first document whose loss isn't finite; `among` makes of a run's own batch one that the model
/// takes.
///
/// # Errors
/// A batch that doesn't hold.
pub(super) fn describe(
    model: &Decoder,
    batches: &[Batch],
    seq_len: usize,
    [loss, grad_norm]: [f64; 2],
    among: &dyn Fn(&Batch) -> Batch,
) -> Result<String> {
    let model = model.valid();
    let mut first = 0;
    for batch in batches {
        for bounds in batch.cu_seqlens.windows(2) {
            let [start, end] = [bounds[0] as usize, bounds[1] as usize];
            let document = document(batch, start, end);
            if document.trained_tokens() > 0 && !is_finite(&model, &among(&document))? {
                let (row, at) = ((first + start) / seq_len + 1, (first + start) % seq_len);
                return Ok(format!(
                    "the loss is {loss}, from row {row} of the step, the document at its token {at}"
                ));
            }
        }
        first += batch.tokens();
    }
    Ok(format!("the loss is {loss} and the gradient norm {grad_norm}, though each document's loss is finite"))
}

fn is_finite(model: &Decoder, batch: &Batch) -> Result<bool> {
    let loss = model.loss_sum(&model.inputs(batch, None)?);
    Ok(loss.to_data().try_to_vec::<f32>().expect("the loss is f32").iter().all(|x| x.is_finite()))
}

/// One document of a batch, as a batch.
fn document(batch: &Batch, start: usize, end: usize) -> Batch {
    let mut before = 0;
    let run_tokens = batch.run_tokens.iter().map(|&tokens| {
        let here = before..before + tokens;
        before += tokens;
        if here.contains(&start) { end - start } else { 0 }
    });
    Batch {
        run_tokens: run_tokens.collect(),
        input_ids: batch.input_ids[start..end].to_vec(),
        position_ids: batch.position_ids[start..end].to_vec(),
        targets: batch.targets[start..end].to_vec(),
        loss_mask: batch.loss_mask[start..end].to_vec(),
        cu_seqlens: vec![0, (end - start) as u32],
        streams: batch.streams.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Stream;

    #[test]
    fn one_step_too_many_stops_the_run() {
        let mut skipped = Skipped::new(2);
        assert!(skipped.note(5, "the loss is NaN").unwrap().contains("step 5 is skipped: the loss is NaN"));
        assert_eq!(skipped.began(), Some(5));
        skipped.reset();
        assert_eq!(skipped.began(), None);
        assert!(skipped.note(7, "x").is_ok() && skipped.note(8, "x").is_ok());
        let error = skipped.note(9, "x").unwrap_err();
        assert!(error.to_string().contains("and 2 before it"), "{error}");
        assert!(Skipped::new(0).note(1, "x").is_err());
    }

    #[test]
    fn a_document_keeps_its_run() {
        let batch = Batch {
            input_ids: vec![1, 2, 3, 4, 5],
            position_ids: vec![0, 1, 0, 1, 2],
            targets: vec![2, 0, 4, 5, 0],
            loss_mask: vec![true, false, true, true, false],
            cu_seqlens: vec![0, 2, 5],
            run_tokens: vec![2, 3],
            streams: vec![Stream::unbroken(9); 2],
        };
        let second = document(&batch, 2, 5);
        assert_eq!((second.run_tokens, second.cu_seqlens), (vec![0, 3], vec![0, 3]));
        assert_eq!((second.input_ids, second.targets), (vec![3, 4, 5], vec![4, 5, 0]));
    }
}
