//! One optimizer step, in two halves so that ranks can add up in between:
//!
//! 1. [`forward_backward`]: micro-batches → sums of loss, gradients and trained tokens;
//! 2. [`GradSums::update`]: divide once by the tokens, clip by the global norm, update.
//!
//! So the loss is the mean over all trained tokens of the step, not the mean of micro-batch means.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Instant;

use burn::tensor::Tensor;

use super::optim::Optimizer;
use super::passes::{add, pass};
use super::ranks::Ranks;
use crate::data::Batch;
use crate::model::Decoder;
use crate::ops::{self, Clip};
use crate::{Error, Result};

/// How the forward and backward pass runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepOptions {
    /// Recompute every n-th layer (0, n, 2n, …) in the backward pass; `None`: keep all activations.
    pub recompute: Option<usize>,
    /// Added to the seed of each run's LoRA dropout.
    pub dropout_seed: u64,
}

/// Sums over the micro-batches of a step.
#[derive(Debug)]
pub struct GradSums {
    /// One per trainable parameter, flattened, in the decoder's order; empty without trained tokens.
    pub grads: Vec<Tensor<1>>,
    /// Sums of the loss over the trained tokens of each micro-batch, still on the device; of several ranks in one.
    pub losses: Vec<Tensor<1>>,
    /// Number of trained tokens.
    pub trained_tokens: usize,
}

/// What an update was.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// Mean loss over the step's trained tokens.
    pub loss: f64,
    /// Global norm of the mean's gradient, before clipping.
    pub grad_norm: f64,
    /// What the gradient was multiplied by because of `max_norm`.
    pub clip_coef: f64,
    /// Whether anything was updated: not where loss or norm isn't finite.
    pub applied: bool,
    /// Seconds that the host waited for the device.
    pub waited: f64,
}

/// Runs the micro-batches and sums up.
///
/// # Errors
/// A batch that doesn't hold (see [`Decoder::inputs`]), or a device without memory for it.
pub fn forward_backward(model: &Decoder, batches: &[Batch], options: &StepOptions) -> Result<GradSums> {
    let mut sums = forward_backward_runs(model, batches, options)?;
    assert_eq!(sums.len(), 1, "several adapter runs go through `forward_backward_runs`");
    Ok(sums.remove(0))
}

/// [`forward_backward`] of each adapter run that shares the batches, its gradients those of its own parameters.
///
/// # Errors
/// As [`forward_backward`].
pub fn forward_backward_runs(
    model: &Decoder,
    batches: &[Batch],
    options: &StepOptions,
) -> Result<Vec<GradSums>> {
    let hint = "lower `data.micro_batch_size` or `data.seq_len`, or switch `[model.ac]` on";
    with_memory(hint, || sums_of(model, batches, options))
}

/// Turns a panic for want of memory into an error with this hint.
pub(super) fn with_memory<T>(hint: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    // What the closure leaves half done is dropped: the run ends here.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| match ops::out_of_memory(&*panic) {
        Some(message) => Err(Error::device(message, hint)),
        None => resume_unwind(panic),
    })
}

fn sums_of(model: &Decoder, batches: &[Batch], options: &StepOptions) -> Result<Vec<GradSums>> {
    let runs = model.runs().len().max(1);
    let mut sums: Vec<Option<Tensor<1>>> = Vec::new();
    let mut losses: Vec<Vec<Tensor<1>>> = vec![Vec::with_capacity(batches.len()); runs];
    // A micro-batch without targets adds exactly 0 to the loss, the gradients and the count.
    let rounded = model.rounded();
    for batch in batches.iter().filter(|b| b.trained_tokens() > 0) {
        let inputs = rounded.stacking(rounded.inputs(batch, Some(options.dropout_seed))?);
        let (of_runs, grads) = pass(&rounded, &inputs, options.recompute);
        losses.iter_mut().zip(of_runs).for_each(|(losses, loss)| losses.extend(loss));
        add(&mut sums, grads);
    }
    if sums.iter().any(Option::is_none) {
        let missing = sums.iter_mut().zip(model.trainable_values()).filter(|(grad, _)| grad.is_none());
        missing.for_each(|(grad, value)| *grad = Some(value.zeros_like()));
    }
    let places = model.trainable_of_runs();
    let of_run = |(run, losses): (usize, Vec<Tensor<1>>)| {
        let trained_tokens = batches.iter().map(|batch| batch.trained_tokens_of(run)).sum();
        let own = places[run].iter().filter(|_| trained_tokens > 0);
        GradSums { grads: own.filter_map(|&n| sums[n].take()).collect(), losses, trained_tokens }
    };
    Ok(losses.into_iter().enumerate().map(of_run).collect())
}

impl GradSums {
    /// Σ over the ranks of an adapter run's, in one call for gradients and losses; `rounds`: micro-batches of a rank, as many
    /// on all; `tokens`: trained tokens of all ranks, asked for before the device had anything to do, for the answer waits
    /// for it.
    ///
    /// # Errors
    /// Another rank failed.
    pub fn over(
        self,
        ranks: &Ranks,
        model: &Decoder,
        run: usize,
        rounds: usize,
        tokens: usize,
    ) -> Result<Self> {
        if ranks.count() == 1 {
            return Ok(self);
        }
        if tokens == 0 {
            return Ok(Self { grads: Vec::new(), losses: Vec::new(), trained_tokens: 0 });
        }
        let device = model.device();
        // Each rank's losses have places of their own, so that they come out as they are and add up in f64.
        let zeros = |n: usize| (n > 0).then(|| Tensor::<1>::zeros([n], &device));
        let mut own = self.losses.into_iter();
        let round =
            |_| [zeros(ranks.rank()), own.next().or(zeros(1)), zeros(ranks.count() - ranks.rank() - 1)];
        let losses = Tensor::cat((0..rounds).flat_map(round).flatten().collect(), 0);
        let mut parts = match self.grads.is_empty() {
            false => self.grads,
            // Nothing of this rank's is trained in this step.
            true => {
                let values = model.trainable_values();
                let own = model.trainable_of(run).into_iter();
                own.map(|n| values[n].clone().zeros_like()).collect()
            }
        };
        parts.push(losses);
        let mut grads = ranks.sum(parts)?;
        let losses = grads.pop().into_iter().collect();
        Ok(Self { grads, losses, trained_tokens: tokens })
    }

    /// Sum of the loss over the trained tokens; waits for the device.
    pub fn loss(&self) -> f64 {
        if self.losses.is_empty() { 0.0 } else { on_host(self.losses.clone()).into_iter().sum() }
    }

    /// Divides by the trained tokens, clips to `max_norm` as `torch.nn.utils.clip_grad_norm_` does
    /// (`min(1, max_norm / (norm + 1e-6))`) and updates the model; `None` and nothing changed if the
    /// step has no trained token.
    ///
    /// The device is waited for once. Where it can clip by itself, the update is queued before that: it
    /// changes nothing if the norm isn't finite.
    ///
    /// # Errors
    /// A norm of 0 in the first update: no gradient reached a parameter. Another rank failed.
    pub fn update(
        self,
        model: &mut Decoder,
        optimizer: &mut Optimizer,
        lr: f64,
        max_norm: Option<f64>,
        ranks: &Ranks,
    ) -> Result<Option<Update>> {
        let turn = Turn { run: 0, sums: self, optimizer, lr, max_norm };
        update_runs(model, vec![turn], ranks).remove(0)
    }
}

/// One adapter run's part in an update.
pub struct Turn<'a> {
    /// Its number among the decoder's.
    pub run: usize,
    /// Its gradients.
    pub sums: GradSums,
    /// Its optimizer.
    pub optimizer: &'a mut Optimizer,
    /// Its rate.
    pub lr: f64,
    /// What its norm is clipped to.
    pub max_norm: Option<f64>,
}

/// [`GradSums::update`] of several runs, each with its own norm and tokens.
///
/// # Errors
/// In the place of a run's update, as there.
pub fn update_runs(model: &mut Decoder, turns: Vec<Turn<'_>>, ranks: &Ranks) -> Vec<Result<Option<Update>>> {
    let mut values = model.trainable_values();
    let places = model.trainable_of_runs();
    let mut queued = Vec::with_capacity(turns.len());
    let mut on_device = true;
    for turn in turns {
        let own = &places[turn.run];
        let before = own.iter().map(|&n| values[n].clone()).collect();
        let mut one = Queued::new(turn, before, ranks);
        if let Ok(one) = &mut one {
            let after = std::mem::take(&mut one.after);
            on_device &= one.on_device;
            own.iter().zip(after).for_each(|(&n, value)| values[n] = value);
        }
        queued.push((own, one));
    }
    // While the device still computes them: an update whose norm isn't finite changes no value.
    if on_device {
        let updated = model.clone().set_trainable(values.clone());
        updated.stack_as(model);
        *model = updated;
    }
    let mut settle = |(own, one): (&Vec<usize>, Result<Queued<'_>>)| {
        let (update, new) = one?.settle(ranks)?;
        own.iter().zip(new).for_each(|(&n, value)| values[n] = value);
        Ok(update)
    };
    let updates = queued.into_iter().map(&mut settle).collect();
    if !on_device {
        *model = model.clone().set_trainable(values);
    }
    updates
}

/// An update whose norm the host doesn't know yet.
struct Queued<'a> {
    turn: Turn<'a>,
    squares: Vec<Tensor<1>>,
    /// Whether the device clips by itself, and `after` is what it makes of the values; else they are in `before`.
    on_device: bool,
    before: Vec<Tensor<1>>,
    after: Vec<Tensor<1>>,
}

impl<'a> Queued<'a> {
    fn new(mut turn: Turn<'a>, before: Vec<Tensor<1>>, ranks: &Ranks) -> Result<Self> {
        let (lr, max_norm) = (turn.lr, turn.max_norm);
        let Turn { sums, optimizer, .. } = &mut turn;
        if sums.trained_tokens == 0 {
            let none = Vec::new;
            return Ok(Self { turn, squares: none(), on_device: true, before: none(), after: none() });
        }
        let squares = ops::sum_squares_of(sums.grads.clone());
        let on_device = optimizer.clips_on_device() && ops::clips_on_device(&sums.grads);
        if !on_device {
            return Ok(Self { turn, squares, on_device, before, after: Vec::new() });
        }
        let clip = Clip { squares: with_losses(&squares, &sums.losses), max_norm };
        let scale = 1.0 / sums.trained_tokens as f64;
        let grads = std::mem::take(&mut sums.grads);
        let after = optimizer.update(before, grads, lr, scale, Some(&clip));
        let after = optimizer.spread(after, ranks)?;
        Ok(Self { turn, squares, on_device, before: Vec::new(), after })
    }

    /// Waits for the norm. The new values that the device hasn't made by itself.
    fn settle(self, ranks: &Ranks) -> Result<(Option<Update>, Vec<Tensor<1>>)> {
        let Self { turn: Turn { sums, optimizer, lr, max_norm, .. }, squares, on_device, before, .. } = self;
        let GradSums { grads, losses, trained_tokens } = sums;
        if trained_tokens == 0 {
            return Ok((None, Vec::new()));
        }
        let first = optimizer.updates() == usize::from(on_device);
        let tokens = trained_tokens as f64;
        let clock = Instant::now();
        ranks.finish()?;
        let read = on_host(losses.iter().chain(&squares).cloned().collect());
        let waited = clock.elapsed().as_secs_f64();
        let (losses, squares) = read.split_at(losses.iter().map(|loss| loss.dims()[0]).sum());
        let loss = losses.iter().sum::<f64>() / tokens;
        let grad_norm = squares.iter().sum::<f64>().sqrt() / tokens;
        let applied = loss.is_finite() && grad_norm.is_finite();
        let clip_coef = max_norm.map_or(1.0, |max| (max / (grad_norm + 1e-6)).min(1.0));
        let update = Update { loss, grad_norm, clip_coef, applied, waited };
        if !applied {
            if on_device {
                optimizer.take_back();
            }
            return Ok((Some(update), Vec::new()));
        }
        if first && grad_norm == 0.0 {
            return Err(Error::train(
                "the gradient norm is 0: no gradient reached a trainable parameter",
                "look at `model.lora.target_modules`",
            ));
        }
        if on_device {
            return Ok((Some(update), Vec::new()));
        }
        let after = optimizer.update(before, grads, lr, clip_coef / tokens, None);
        let after = optimizer.spread(after, ranks)?;
        ranks.finish()?;
        Ok((Some(update), after))
    }
}

/// Σ of the squares; not finite where a loss isn't.
fn with_losses(squares: &[Tensor<1>], losses: &[Tensor<1>]) -> Tensor<1> {
    let all = squares.iter().cloned().chain(losses.iter().map(|loss| loss.clone().sum().mul_scalar(0.0)));
    all.reduce(|sum, x| sum + x).expect("there are gradients")
}

/// One read-back for all of them.
fn on_host(parts: Vec<Tensor<1>>) -> Vec<f64> {
    let values = Tensor::cat(parts, 0).to_data().try_to_vec::<f32>().expect("losses and norms are f32");
    values.into_iter().map(f64::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Their adapters are stacked, and lie on a tape; the pass before the layers are run again has none.
    #[cfg(feature = "flex")]
    #[test]
    fn runs_that_share_a_batch_recompute_as_they_keep() {
        let (model, batch) = crate::model::two_runs();
        let sums = |recompute| {
            let options = StepOptions { recompute, dropout_seed: 3 };
            let sums = forward_backward_runs(&model, std::slice::from_ref(&batch), &options).unwrap();
            let floats = |x: Tensor<1>| x.into_data().try_to_vec::<f32>().unwrap();
            let of_run = |run: GradSums| (run.loss(), run.grads.into_iter().map(floats).collect::<Vec<_>>());
            sums.into_iter().map(of_run).collect::<Vec<_>>()
        };
        let kept = sums(None);
        assert!(kept.iter().all(|(loss, grads)| *loss > 0.0 && !grads.is_empty()));
        for every in [1, 2] {
            assert_eq!(sums(Some(every)), kept, "every {every}");
        }
    }

    #[test]
    fn a_panic_for_want_of_memory_is_an_error_and_no_other_is() {
        let ours =
            with_memory::<()>("want less", || panic!("{}: 3.0 GiB more are wanted", ops::OUT_OF_MEMORY));
        let error = ours.unwrap_err();
        assert!(error.to_string().contains("3.0 GiB more"), "{error}");
        assert_eq!(error.hint().unwrap(), "want less");
        let theirs = with_memory::<()>("", || panic!("CUDA_ERROR_OUT_OF_MEMORY"));
        assert!(theirs.unwrap_err().to_string().starts_with(ops::OUT_OF_MEMORY));
        assert_eq!(with_memory("", || Ok(7)).unwrap(), 7);
        let other = catch_unwind(|| with_memory::<()>("", || panic!("something else")));
        assert_eq!(other.unwrap_err().downcast_ref(), Some(&"something else"));
    }
}
