//! Optimizers over the trainable parameters, each flattened to `[n]`, in the module's fixed order.
//!
//! `g` is the gradient after normalising and clipping, `lr` the step's rate, `wd` the weight decay:
//!
//! * AdamW: `torch.optim.AdamW` (see [`ops::adamw`]).
//! * SGD: `torch.optim.SGD`: `g += wd·p; b = μ·b + g (first: b = g); p -= lr·(g + μ·b)` with
//!   nesterov, else `p -= lr·b`.
//! * Muon (Keller Jordan's; as in the `dion` package that prime-rl uses, `nesterov = False`,
//!   `adjust_lr = "rms_norm"`): for matrices outside head and embedding
//!   `b = μ·b + g; p = p·(1 − lr·wd) − 0.2·√max(out, in)·lr·NS₅(b)` ([`newton_schulz`], f32
//!   where dion rounds to bf16; the factor is arXiv 2502.16982's); AdamW for everything else.
//! * sign-SGD: `p = p·(1 − lr·wd) − lr·sign(g)`.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, Tensor};

use super::ranks::Ranks;
use crate::Result;
use crate::checkpoint::Named;
use crate::config::{OptimConfig, OptimKind};
use crate::device::host;
use crate::model::Trainable;
use crate::ops::{self, Clip};

/// Dion's ε, for the norm in [`newton_schulz`] and for AdamW beside Muon.
const MUON_EPS: f64 = 1e-8;

/// The update rule of one parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rule {
    AdamW { beta1: f64, beta2: f64, eps: f64, moments: DType },
    Sgd { nesterov: bool, momentum: f64 },
    Muon { mu: f64, rows: usize, columns: usize },
    SignSgd,
}

/// One parameter's rule and state.
#[derive(Debug)]
struct Slot {
    name: String,
    shape: Vec<usize>,
    rule: Rule,
    weight_decay: f64,
    /// In the order of [`Rule::state_names`]; empty before the first update.
    state: Vec<Tensor<1>>,
}

/// The optimizer of a run: rules, state and the number of finished updates.
#[derive(Debug)]
pub struct Optimizer {
    slots: Vec<Slot>,
    updates: usize,
    held_in: DType,
    /// Which rank updates each parameter and holds its state (ZeRO-1, arXiv 1910.02054); `None`: every rank does
    /// all of it.
    shards: Option<Shards>,
}

/// The parameters shared out among the ranks.
#[derive(Debug)]
struct Shards {
    rank: usize,
    owners: Vec<usize>,
}

impl Optimizer {
    /// An optimizer for these parameters; weight decay on all of them, as prime-rl has it.
    pub fn new(config: &OptimConfig, trainable: &[Trainable]) -> Self {
        let slots = trainable.iter().map(|p| Slot {
            name: p.name.clone(),
            shape: p.shape.clone(),
            rule: Rule::of(&config.kind, p),
            weight_decay: config.weight_decay,
            state: Vec::new(),
        });
        Self { slots: slots.collect(), updates: 0, held_in: DType::F32, shards: None }
    }

    /// Leaves weight decay only on the parameters whose name `decayed` accepts, e.g.
    /// [`not_norm_or_bias`] for the groups of transformers' Trainer.
    pub fn decay_only(mut self, decayed: impl Fn(&str) -> bool) -> Self {
        for slot in &mut self.slots {
            if !decayed(&slot.name) {
                slot.weight_decay = 0.0;
            }
        }
        self
    }

    /// Rounds the parameters to this type after each update (`model.optimization_dtype`).
    pub fn hold_in(self, dtype: DType) -> Self {
        Self { held_in: dtype, ..self }
    }

    /// Each rank updates a part of the parameters, and holds the state of that part alone.
    #[must_use]
    pub fn sharded(self, ranks: &Ranks) -> Self {
        let sizes: Vec<usize> = self.slots.iter().map(|slot| slot.shape.iter().product()).collect();
        let shards = Shards { rank: ranks.rank(), owners: ranks.owners(&sizes) };
        Self { shards: (ranks.count() > 1).then_some(shards), ..self }
    }

    fn is_own(&self, slot: usize) -> bool {
        self.shards.as_ref().is_none_or(|shards| shards.owners[slot] == shards.rank)
    }

    /// Whether a tensor of a saved state is another rank's to hold.
    pub fn leaves_out(&self, name: &str) -> bool {
        let slot = self.slots.iter().position(|slot| {
            name.strip_prefix(slot.name.as_str())
                .is_some_and(|rest| rest.starts_with('.') && !rest[1..].contains('.'))
        });
        slot.is_some_and(|slot| !self.is_own(slot))
    }

    /// Number of finished updates.
    pub fn updates(&self) -> usize {
        self.updates
    }

    /// Whether every rule can take its clip coefficient from the device.
    pub fn clips_on_device(&self) -> bool {
        self.slots.iter().all(|slot| matches!(slot.rule, Rule::AdamW { .. }))
    }

    /// Forgets the last update, which changed nothing because its norm wasn't finite.
    pub fn take_back(&mut self) {
        self.updates -= 1;
        if self.updates == 0 {
            self.slots.iter_mut().for_each(|slot| slot.state.clear());
        }
    }

    /// The parameters after one more update, other ranks' as they were ([`Optimizer::spread`] brings them). `grads` are
    /// sums; each is multiplied by `grad_scale`
    /// (1/tokens times the clip coefficient, but for `clip`'s own) before use.
    ///
    /// # Panics
    /// If the number of values or gradients isn't that of the parameters; if there is a `clip` where
    /// [`Optimizer::clips_on_device`] or [`ops::clips_on_device`] doesn't hold.
    pub fn update(
        &mut self,
        values: Vec<Tensor<1>>,
        grads: Vec<Tensor<1>>,
        lr: f64,
        grad_scale: f64,
        clip: Option<&Clip>,
    ) -> Vec<Tensor<1>> {
        assert_eq!((values.len(), grads.len()), (self.slots.len(), self.slots.len()));
        self.updates += 1;
        let (updates, held_in) = (self.updates, self.held_in);
        let step = Step { lr, grad_scale, updates };
        let mut updated: Vec<Option<Tensor<1>>> = Vec::with_capacity(values.len());
        let mut adamw = AdamWBatch::default();
        for (n, (value, grad)) in values.into_iter().zip(grads).enumerate() {
            let own = self.is_own(n);
            let slot = &mut self.slots[n];
            updated.push(match slot.rule {
                _ if !own => Some(value),
                Rule::AdamW { .. } => {
                    adamw.add(n, slot, value, grad, step);
                    None
                }
                _ => Some(slot.update(value, grad, step)),
            });
        }
        for (n, [value, m, v]) in adamw.run(clip) {
            self.slots[n].state = vec![m, v];
            updated[n] = Some(value);
        }
        let updated = updated.into_iter().map(|value| value.expect("each parameter has one rule"));
        let round = |value: Tensor<1>| match held_in {
            DType::F32 => value,
            held_in => value.cast(held_in).cast(DType::F32),
        };
        updated.map(round).collect()
    }

    /// Updated parameters, each as the rank has it that updates it; on cards they are there after [`Ranks::finish`].
    ///
    /// # Errors
    /// Another rank failed.
    pub fn spread(&self, values: Vec<Tensor<1>>, ranks: &Ranks) -> Result<Vec<Tensor<1>>> {
        match &self.shards {
            None => Ok(values),
            Some(shards) => ranks.spread(values, &shards.owners),
        }
    }

    /// The state, `PARAMETER.exp_avg` and so on, none before the first update: all of it on rank 0, on the host what
    /// other ranks hold. Every rank takes part.
    ///
    /// # Errors
    /// Another rank failed.
    pub fn state(&self, ranks: &Ranks, device: &Device) -> Result<Vec<Named>> {
        let mut all = Vec::new();
        for (n, slot) in self.slots.iter().enumerate().filter(|_| self.updates > 0) {
            for (k, kind) in slot.rule.state_names().iter().enumerate() {
                // Always written in f32, which holds bf16's numbers exactly.
                let mut values = slot.state.get(k).map(|values| values.clone().cast(DType::F32));
                if let Some(shards) = &self.shards {
                    let none = || Tensor::zeros([slot.shape.iter().product::<usize>()], device);
                    let owner = &shards.owners[n..=n];
                    let part = ranks.spread(vec![values.unwrap_or_else(none)], owner)?.remove(0);
                    ranks.finish()?;
                    let foreign = ranks.is_first() && owner[0] != shards.rank;
                    values = Some(if foreign { Tensor::from_data(part.into_data(), &host()) } else { part });
                }
                // No state before a parameter's own first update.
                let Some(values) = values.filter(|_| ranks.is_first()) else { continue };
                all.push(Named { name: format!("{}.{kind}", slot.name), shape: slot.shape.clone(), values });
            }
        }
        Ok(all)
    }

    /// Takes over a saved state after `updates` updates; of what is shared out, its own part.
    ///
    /// # Errors
    /// What doesn't fit: a missing, an unknown or a mis-shaped tensor, with its name.
    pub fn restore(&mut self, mut state: BTreeMap<String, Named>, updates: usize) -> Result<(), String> {
        for n in 0..self.slots.len() {
            let own = self.is_own(n);
            let slot = &mut self.slots[n];
            let names = if updates == 0 || !own { &[] } else { slot.rule.state_names() };
            let mut tensors = Vec::with_capacity(names.len());
            for kind in names {
                let name = format!("{}.{kind}", slot.name);
                let tensor = state.remove(&name).ok_or(format!("tensor `{name}` is missing"))?;
                if tensor.shape != slot.shape {
                    let (found, wanted) = (&tensor.shape, &slot.shape);
                    return Err(format!("tensor `{name}` has shape {found:?}, wanted {wanted:?}"));
                }
                tensors.push(tensor.values.cast(slot.rule.held_in()));
            }
            slot.state = tensors;
        }
        if let Some(name) = state.keys().next() {
            return Err(format!("tensor `{name}` belongs to no trainable parameter"));
        }
        self.updates = updates;
        Ok(())
    }
}

/// Whether transformers' Trainer decays this parameter: norms and biases are not.
pub fn not_norm_or_bias(name: &str) -> bool {
    !name.contains("norm") && !name.ends_with("bias")
}

/// The scalars of one update.
#[derive(Clone, Copy)]
struct Step {
    lr: f64,
    grad_scale: f64,
    updates: usize,
}

impl Rule {
    fn of(kind: &OptimKind, parameter: &Trainable) -> Self {
        match *kind {
            OptimKind::AdamW { betas1, betas2, eps, ref moments_dtype } => {
                let moments = if moments_dtype == "bfloat16" { DType::BF16 } else { DType::F32 };
                Rule::AdamW { beta1: betas1, beta2: betas2, eps, moments }
            }
            OptimKind::Sgd { nesterov, momentum } => Rule::Sgd { nesterov, momentum },
            OptimKind::Muon { mu, betas1, betas2 } => match parameter.shape[..] {
                [rows, columns] if !is_head_or_embedding(&parameter.name) => Rule::Muon { mu, rows, columns },
                _ => Rule::AdamW { beta1: betas1, beta2: betas2, eps: MUON_EPS, moments: DType::F32 },
            },
            OptimKind::SignSgd => Rule::SignSgd,
        }
    }

    /// The type of the state tensors.
    fn held_in(self) -> DType {
        if let Rule::AdamW { moments, .. } = self { moments } else { DType::F32 }
    }

    /// torch's names of the state tensors.
    fn state_names(self) -> &'static [&'static str] {
        match self {
            Rule::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
            Rule::Sgd { momentum: 0.0, .. } => &[],
            Rule::Sgd { .. } | Rule::Muon { .. } => &["momentum_buffer"],
            Rule::SignSgd => &[],
        }
    }
}

fn is_head_or_embedding(name: &str) -> bool {
    name.contains("lm_head") || name.contains("embed_tokens")
}

impl Slot {
    fn update(&mut self, value: Tensor<1>, grad: Tensor<1>, step: Step) -> Tensor<1> {
        let decayed = |value: Tensor<1>, slot: &Slot| value.mul_scalar(1.0 - step.lr * slot.weight_decay);
        match self.rule {
            Rule::AdamW { .. } => unreachable!("AdamW goes through `AdamWBatch`"),
            Rule::Sgd { nesterov, momentum } => {
                let grad = grad.mul_scalar(step.grad_scale);
                let grad = match self.weight_decay {
                    0.0 => grad,
                    decay => grad + value.clone().mul_scalar(decay),
                };
                let grad = self.momentum(grad, momentum, nesterov);
                value - grad.mul_scalar(step.lr)
            }
            Rule::Muon { mu, rows, columns } => {
                let buffer = self.momentum(grad.mul_scalar(step.grad_scale), mu, false);
                let [n] = buffer.dims();
                let direction = newton_schulz(buffer.reshape([rows, columns])).reshape([n]);
                let lr = step.lr * 0.2 * (rows.max(columns) as f64).sqrt();
                decayed(value, self) - direction.mul_scalar(lr)
            }
            // The sign is the same for a gradient that isn't scaled.
            Rule::SignSgd => decayed(value, self) - grad.sign().mul_scalar(step.lr),
        }
    }

    /// The direction after momentum; torch's first buffer is the gradient itself.
    fn momentum(&mut self, grad: Tensor<1>, momentum: f64, nesterov: bool) -> Tensor<1> {
        if momentum == 0.0 {
            return grad;
        }
        let buffer = match std::mem::take(&mut self.state).pop() {
            Some(buffer) => buffer.mul_scalar(momentum) + grad.clone(),
            None => grad.clone(),
        };
        self.state = vec![buffer.clone()];
        if nesterov { grad + buffer.mul_scalar(momentum) } else { buffer }
    }
}

/// The parameters that AdamW updates, all at once.
#[derive(Default)]
struct AdamWBatch {
    slots: Vec<usize>,
    tensors: Vec<[Tensor<1>; 4]>,
    scalars: Vec<ops::AdamW>,
}

impl AdamWBatch {
    fn add(&mut self, n: usize, slot: &mut Slot, value: Tensor<1>, grad: Tensor<1>, step: Step) {
        let Rule::AdamW { beta1, beta2, eps, moments } = slot.rule else { return };
        let mut state = std::mem::take(&mut slot.state).into_iter();
        let (m, v) = match (state.next(), state.next()) {
            (Some(m), Some(v)) => (m, v),
            _ => (grad.zeros_like().cast(moments), grad.zeros_like().cast(moments)),
        };
        self.slots.push(n);
        self.tensors.push([value, m, v, grad]);
        self.scalars.push(ops::AdamW {
            lr: step.lr,
            beta1,
            beta2,
            eps,
            weight_decay: slot.weight_decay,
            update: step.updates,
            grad_scale: step.grad_scale,
            rounding: ops::mix(ops::mix(step.updates as u32).wrapping_add(n as u32)),
        });
    }

    /// Number of the slot, new value, m and v.
    fn run(self, clip: Option<&Clip>) -> impl Iterator<Item = (usize, [Tensor<1>; 3])> {
        self.slots.into_iter().zip(ops::adamw_of(self.tensors, &self.scalars, clip))
    }
}

/// Five Newton–Schulz steps towards the nearest orthogonal matrix: with `X = G/(‖G‖ + ε)`,
/// `X ← aX + (bA + cA²)X` where `A = XXᵀ`; coefficients as in the `dion` package (`muon.py`).
///
/// # Shapes
/// - `[rows, columns]` → `[rows, columns]`
pub fn newton_schulz(matrix: Tensor<2>) -> Tensor<2> {
    const STEPS: [(f32, f32, f32); 5] = [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ];
    let [rows, columns] = matrix.dims();
    // The smaller side first, so that A is as small as can be.
    let matrix = if rows > columns { matrix.transpose() } else { matrix };
    let flat: Tensor<1> = matrix.clone().reshape([rows * columns]);
    let norm = ops::sum_squares(flat).sqrt().add_scalar(MUON_EPS);
    let mut x = matrix / norm.unsqueeze();
    for (a, b, c) in STEPS {
        let gram = x.clone().matmul(x.clone().transpose());
        let polynomial = gram.clone().mul_scalar(b) + gram.clone().matmul(gram).mul_scalar(c);
        x = x.clone().mul_scalar(a) + polynomial.matmul(x);
    }
    if rows > columns { x.transpose() } else { x }
}

#[cfg(all(test, feature = "flex"))]
mod tests;
