//! The forward and backward pass of a micro-batch.
//!
//! With recomputation (`[model.ac]`) the backward pass goes layer by layer: the forward pass keeps
//! only what enters each recomputed layer, and the backward pass runs the layer again, with the
//! gradient of its output, on a tape of its own. Where a layer is one op it does that by itself, and keeps attention's
//! output. In f32, and where layers are one op, the numbers are the same bit for bit; else in half precision the first pass,
//! which has no tape, may round otherwise than the second.

use burn::module::Module;
use burn::tensor::{DType, Gradients, Tensor};

use crate::model::{Decoder, Inputs};
use crate::ops;

/// Each run's loss, `None` where it has no target; and the gradients of their sum, in f32 or the types of the parameters.
pub type Pulled = (Vec<Option<Tensor<1>>>, Vec<Option<Tensor<1>>>);

/// The losses and gradients of a micro-batch; with every n-th layer recomputed if there is an n.
pub fn pass(model: &Decoder, inputs: &Inputs, recompute: Option<usize>) -> Pulled {
    match recompute {
        Some(every) => recomputed(model, inputs, every.max(1)),
        None => on_one_tape(model, inputs),
    }
}

fn on_one_tape(model: &Decoder, inputs: &Inputs) -> Pulled {
    let losses = model.head_losses(model.hidden(inputs), inputs);
    let (losses, tape) = backward(losses);
    // Without a tape no run with tokens in this batch trains anything that they pass.
    let none = || vec![None; model.trainable().len()];
    (losses, tape.map_or_else(none, |mut tape| model.take_grads_of(inputs, &mut tape)))
}

/// The losses without their tape, and the gradients of their sum where it is on one.
fn backward(losses: Vec<Option<Tensor<1>>>) -> (Vec<Option<Tensor<1>>>, Option<Gradients>) {
    let sum = losses.iter().flatten().cloned().reduce(|sum, loss| sum + loss);
    let tape = sum.filter(Tensor::is_tracked).map(|sum| sum.backward());
    (losses.into_iter().map(|loss| loss.map(Tensor::inner)).collect(), tape)
}

/// A layer between the forward and the backward pass.
struct Pass {
    layer: usize,
    /// What entered it; a leaf of the kept tape if there is one.
    x: Tensor<2>,
    /// Its output, on a tape that was kept; else it is run again.
    y: Option<Tensor<2>>,
}

/// A recomputed layer runs without a tape first: one that is dropped stays in Burn's memory until a backward pass comes by.
fn recomputed(model: &Decoder, inputs: &Inputs, every: usize) -> Pulled {
    let embedded = model.embed(inputs);
    if model.recomputes(&embedded, inputs) {
        return on_one_tape(model, &inputs.clone().recomputing(every));
    }
    // The gradient goes down to the lowest trained layer, or to the embedding.
    let lowest = if embedded.is_tracked() { Lowest::Embedding } else { lowest_trained(model) };
    let (plain, bare) = (model.valid(), inputs.clone().unstacked());
    let mut hidden = embedded.clone().inner();
    let mut passes = Vec::with_capacity(model.num_layers());
    for i in 0..model.num_layers() {
        if i.is_multiple_of(every) || !lowest.trains(i) {
            let y = plain.layer(i, hidden.clone(), &bare);
            let x = std::mem::replace(&mut hidden, y);
            passes.extend(lowest.trains(i).then_some(Pass { layer: i, x, y: None }));
        } else {
            let x = leaf(hidden, lowest.is_below(i));
            let y = model.layer(i, x.clone(), inputs);
            hidden = y.clone().inner();
            passes.push(Pass { layer: i, x, y: Some(y) });
        }
    }

    let x = leaf(hidden, lowest.is_below(model.num_layers()));
    let (losses, tape) = backward(model.head_losses(x.clone(), inputs));
    let Some(mut tape) = tape else { return (losses, vec![None; model.trainable().len()]) };
    let mut grads = Vec::new();
    add(&mut grads, model.take_grads_of(inputs, &mut tape));
    let mut upstream = x.grad_remove(&mut tape);
    for Pass { layer, x, y } in passes.into_iter().rev() {
        let x = if y.is_some() { x } else { leaf(x, lowest.is_below(layer)) };
        let y = y.unwrap_or_else(|| model.layer(layer, x.clone(), inputs));
        if !y.is_tracked() {
            break;
        }
        let mut tape = pull(y, upstream.take().expect("a layer above a trained one has a gradient"));
        add(&mut grads, model.take_grads_of(inputs, &mut tape));
        upstream = x.grad_remove(&mut tape);
    }
    if let (Lowest::Embedding, Some(upstream)) = (&lowest, upstream) {
        add(&mut grads, model.take_grads_of(inputs, &mut pull(embedded, upstream)));
    }
    (losses, grads)
}

/// How far down the gradient has to go.
enum Lowest {
    Embedding,
    Layer(usize),
}

impl Lowest {
    /// Whether layer `i` needs a backward pass.
    fn trains(&self, i: usize) -> bool {
        match self {
            Lowest::Embedding => true,
            Lowest::Layer(lowest) => i >= *lowest,
        }
    }

    /// Whether what enters layer `i` needs a gradient.
    fn is_below(&self, i: usize) -> bool {
        match self {
            Lowest::Embedding => true,
            Lowest::Layer(lowest) => i > *lowest,
        }
    }
}

/// The lowest layer with a trainable parameter; the number of layers if only the top has any.
fn lowest_trained(model: &Decoder) -> Lowest {
    let layer = |name: &str| {
        let rest = name.strip_prefix("model.layers.")?;
        rest.split('.').next()?.parse::<usize>().ok()
    };
    let lowest = model.trainable().iter().filter_map(|p| layer(&p.name)).min();
    Lowest::Layer(lowest.unwrap_or(model.num_layers()))
}

fn leaf(x: Tensor<2>, tracked: bool) -> Tensor<2> {
    if tracked { x.autodiff().require_grad() } else { x }
}

/// Backward from `y` given the gradient of the loss at it: the gradient of `Σ y·g` at y is g itself.
fn pull(y: Tensor<2>, gradient: Tensor<2>) -> Gradients {
    (y * gradient).sum().backward()
}

/// Adds gradients to sums in f32, each where there is one.
pub fn add(sums: &mut Vec<Option<Tensor<1>>>, grads: Vec<Option<Tensor<1>>>) {
    sums.resize(grads.len(), None);
    let (mut first, mut more) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new(), Vec::new()));
    for (n, grad) in grads.into_iter().enumerate() {
        match (sums[n].take(), grad) {
            (Some(sum), Some(grad)) => {
                more.0.push(n);
                more.1.push(sum);
                more.2.push(grad);
            }
            (None, Some(grad)) => {
                first.0.push(n);
                first.1.push(grad);
            }
            (sum, None) => sums[n] = sum,
        }
    }
    let (first, more) = (
        first.0.into_iter().zip(ops::cast_each(first.1, DType::F32)),
        more.0.into_iter().zip(ops::add_each(more.1, more.2)),
    );
    first.chain(more).for_each(|(n, sum)| sums[n] = Some(sum));
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    fn floats(x: Tensor<1>) -> Vec<f32> {
        x.cast(DType::F32).into_data().try_to_vec().unwrap()
    }

    /// In full fine-tuning in bf16, where a tied head adds to the embedding's gradient: bit for bit what rounding each weight
    /// where it is used gives, recomputed or not.
    #[test]
    fn rounding_once_is_rounding_in_each_pass() {
        for tied in [true, false] {
            let (model, batches) = crate::model::whole_in_bf16(tied);
            let mut want: Vec<Vec<f32>> = Vec::new();
            for batch in &batches {
                let loss = model.loss_sum(&model.inputs(batch, None).unwrap());
                let grads =
                    model.take_grads(&mut loss.backward()).into_iter().map(|grad| floats(grad.unwrap()));
                want = match want.is_empty() {
                    true => grads.collect(),
                    false => {
                        let sum = |(sum, grad): (&Vec<f32>, Vec<f32>)| {
                            sum.iter().zip(grad).map(|(a, b)| a + b).collect()
                        };
                        want.iter().zip(grads).map(sum).collect()
                    }
                };
            }
            assert!(want.iter().flatten().any(|&x| x != 0.0));
            let rounded = model.rounded();
            for recompute in [None, Some(1), Some(2)] {
                let mut sums = Vec::new();
                for batch in &batches {
                    add(&mut sums, pass(&rounded, &rounded.inputs(batch, None).unwrap(), recompute).1);
                }
                assert!(sums.iter().flatten().all(|sum| sum.dtype() == DType::F32));
                let got: Vec<Vec<f32>> = sums.into_iter().map(|sum| floats(sum.unwrap())).collect();
                assert_eq!(got, want, "tied {tied}, recompute {recompute:?}");
            }
        }
    }

    #[test]
    fn gradients_are_added_where_there_are_some() {
        let one = |x: f32, dtype| Tensor::<1>::from_floats([x], &burn::tensor::Device::flex()).cast(dtype);
        let (full, half) = (DType::F32, DType::BF16);
        let mut sums = Vec::new();
        add(&mut sums, vec![Some(one(1.0, half)), None, None, Some(one(4.0, full))]);
        // In bf16 the sum would be 1.
        add(&mut sums, vec![Some(one(1.0 / 512.0, half)), Some(one(2.0, half)), None, None]);
        let got: Vec<_> = sums.into_iter().map(|sum| sum.map(|sum| (sum.dtype(), floats(sum)[0]))).collect();
        assert_eq!(got, [Some((full, 1.0 + 1.0 / 512.0)), Some((full, 2.0)), None, Some((full, 4.0))]);
    }
}
