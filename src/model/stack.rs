//! The adapters of runs that share a batch, stacked for the ops: all at once before the forward pass, and their gradients
//! taken apart all at once after the backward pass. One by one, inside the layers, it would be thousands of small ops.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::{Param, ParamId};
use burn::tensor::{Gradients, Tensor};

use super::lora::{Adapter, Linear};
use super::{Decoder, Inputs};
use crate::ops;

/// A and B of linear layers, each a leaf of the tape, by their weights' ids; empty where one run has the batch for
/// itself.
#[derive(Debug, Clone, Default)]
pub(super) struct Stacked(Arc<HashMap<ParamId, [Tensor<2>; 2]>>);

/// What was stacked last, and of which runs. Copies of a decoder share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Stack(Arc<Mutex<Last>>);

type Last = Option<(Vec<bool>, Stacked)>;

impl Stack {
    fn last(&self) -> MutexGuard<'_, Last> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stacked {
    pub fn of(&self, linear: &Linear) -> Option<[Tensor<2>; 2]> {
        self.0.get(&linear.weight.id).cloned()
    }
}

impl Decoder {
    /// The inputs with the adapters of the runs that share them, for a pass whose gradients
    /// [`Decoder::take_grads_of`] takes.
    #[must_use]
    pub fn stacking(&self, inputs: Inputs) -> Inputs {
        let present: Vec<bool> = inputs.present().collect();
        if present.iter().filter(|&&is| is).count() < 2 {
            return inputs;
        }
        Inputs { stacked: self.stacked(&present), ..inputs }
    }

    /// With nothing stacked.
    pub(crate) fn unstacked(mut self) -> Self {
        self.stack = Stack::default();
        self
    }

    /// Stacks what `before`, this decoder with other values, had stacked: while the device still computes the values.
    pub(crate) fn stack_as(&self, before: &Decoder) {
        let last = before.stack.last().as_ref().map(|(present, _)| present.clone());
        if let Some(present) = last.filter(|present| present.len() == self.runs.len()) {
            self.stacked(&present);
        }
    }

    fn stacked(&self, present: &[bool]) -> Stacked {
        let mut last = self.stack.last();
        if let Some((_, stacked)) = last.as_ref().filter(|(of, _)| of == present) {
            return stacked.clone();
        }
        let trained =
            |adapter: &&Adapter| adapter.lora_a.is_require_grad() && adapter.lora_b.is_require_grad();
        let (mut ids, mut groups) = (Vec::new(), Vec::new());
        for linear in self.linears() {
            let present: Vec<&Adapter> = linear.present(present.iter().copied()).collect();
            if present.len() < 2 || !present.iter().all(trained) {
                continue;
            }
            ids.push(linear.weight.id);
            let of = |param: fn(&Adapter) -> &Param<Tensor<2>>| {
                present.iter().map(|adapter| param(adapter).val().inner()).collect()
            };
            groups.extend([(of(|adapter| &adapter.lora_a), 0), (of(|adapter| &adapter.lora_b), 1)]);
        }
        let mut leaves = ops::stacked(groups).into_iter().map(|x| x.autodiff().require_grad());
        let stacked = ids.into_iter().map_while(|id| Some((id, [leaves.next()?, leaves.next()?])));
        let stacked = Stacked(Arc::new(stacked.collect()));
        *last = Some((present.to_vec(), stacked.clone()));
        stacked
    }

    /// [`Decoder::take_grads`] after a pass over these inputs.
    pub fn take_grads_of(&self, inputs: &Inputs, gradients: &mut Gradients) -> Vec<Option<Tensor<1>>> {
        let mut taken = self.take_grads(gradients);
        if inputs.stacked.0.is_empty() {
            return taken;
        }
        let (mut ids, mut groups) = (Vec::new(), Vec::new());
        for linear in self.linears() {
            let Some([a, b]) = inputs.stacked.of(linear) else { continue };
            let present: Vec<&Adapter> = linear.present(inputs.present()).collect();
            let ranks: Vec<usize> = present.iter().map(|adapter| adapter.lora_a.lazy_shape()[0]).collect();
            if let Some(grad) = a.grad_remove(gradients) {
                ids.extend(present.iter().map(|adapter| adapter.lora_a.id));
                groups.push((grad, 0, ranks.clone()));
            }
            if let Some(grad) = b.grad_remove(gradients) {
                ids.extend(present.iter().map(|adapter| adapter.lora_b.id));
                groups.push((grad, 1, ranks));
            }
        }
        let trainable = self.trainable().into_iter().enumerate();
        let places: HashMap<ParamId, usize> = trainable.map(|(n, parameter)| (parameter.id, n)).collect();
        for (id, grad) in ids.into_iter().zip(ops::apart(groups).into_iter().flatten()) {
            taken[places[&id]] = Some(grad);
        }
        taken
    }

    /// The linear layers, in module order.
    fn linears(&self) -> impl Iterator<Item = &Linear> {
        let of_layers = self.model.layers.iter().flat_map(|layer| {
            let (attn, mlp) = (&layer.self_attn, &layer.mlp);
            let of_attention = [&attn.q_proj, &attn.k_proj, &attn.v_proj, &attn.o_proj];
            of_attention.into_iter().chain([&mlp.gate_proj, &mlp.up_proj, &mlp.down_proj])
        });
        of_layers.chain(&self.lm_head)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::super::tests::{floats, shaken, two_runs};
    use super::*;

    /// Against the tape that puts the adapters together in each layer; again with other values, for those that were stacked
    /// before must not come back; and of other runs.
    #[test]
    fn stacked_adapters_have_the_gradients_of_their_own() {
        let (mut decoder, both) = two_runs();
        let mut one = both.clone();
        one.run_tokens = vec![both.tokens(), 0];
        for step in 0..3 {
            for (batch, is_stacked) in [(&both, true), (&one, false), (&both, true)] {
                let inputs = decoder.inputs(batch, None).unwrap();
                let plain = decoder.loss_sum(&inputs);
                let want = decoder.take_grads(&mut plain.backward());
                let inputs = decoder.stacking(inputs);
                let own = decoder.take_grads(&mut decoder.loss_sum(&inputs).backward());
                assert_eq!(
                    own.iter().zip(&want).any(|(own, want)| own.is_none() && want.is_some()),
                    is_stacked
                );
                let stacked = decoder.loss_sum(&inputs);
                let got = decoder.take_grads_of(&inputs, &mut stacked.backward());
                let floats_of =
                    |all: Vec<Option<Tensor<1>>>| all.into_iter().map(|g| g.map(floats)).collect::<Vec<_>>();
                assert_eq!(floats(stacked), floats(plain), "step {step}");
                assert_eq!(floats_of(got), floats_of(want), "step {step}");
            }
            let before = decoder.clone();
            decoder = shaken(decoder);
            decoder.stack_as(&before);
        }
    }
}
