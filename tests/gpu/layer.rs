//! The layer op against the ops it is made of, in f32 on the CPU and in bf16 on the card.

use std::cell::Cell;

use burn::tensor::{DType, Device, Tensor};
use embertune::ops::{self, Adapters, DecoderLayer, Documents, Kept, LoraPart, Projection};

use super::{Input, card, flat, poison, random, relative, rope, run};

/// A layer to try.
struct Case {
    name: &'static str,
    /// e, h, g, d, f
    sizes: [usize; 5],
    documents: &'static [usize],
    /// Each run's tokens, and its ranks on the seven linear layers.
    runs: &'static [(usize, [usize; 7])],
    /// Full fine-tuning: all weights are tracked.
    full: bool,
    head_norms: bool,
    x_tracked: bool,
    recompute: Cell<bool>,
}

#[allow(clippy::declare_interior_mutable_const)] // each case is a copy of its own
const PLAIN: Case = Case {
    name: "plain",
    sizes: [128, 4, 2, 64, 192],
    documents: &[1, 2, 63, 64, 65, 127, 128, 129, 300],
    runs: &[],
    full: false,
    head_norms: true,
    x_tracked: true,
    recompute: Cell::new(false),
};

fn cases() -> Vec<Case> {
    vec![
        Case { name: "lora on all", runs: &[(879, [16; 7])], ..PLAIN },
        Case {
            name: "lora, heads of 128, groups of 4",
            sizes: [256, 8, 2, 128, 512],
            documents: &[700, 31],
            runs: &[(731, [16; 7])],
            x_tracked: false,
            ..PLAIN
        },
        Case {
            name: "lora on q and v, no head norms, groups of 1",
            sizes: [128, 2, 2, 64, 256],
            documents: &[4096, 1],
            runs: &[(4097, [8, 0, 3, 0, 0, 0, 0])],
            head_norms: false,
            ..PLAIN
        },
        Case {
            name: "three runs of uneven ranks, groups of 8",
            sizes: [136, 8, 1, 64, 200],
            documents: &[50, 33, 121],
            runs: &[
                (50, [16, 8, 4, 0, 16, 5, 3]),
                (33, [0, 8, 8, 8, 0, 16, 0]),
                (121, [4, 0, 16, 8, 8, 0, 8]),
            ],
            ..PLAIN
        },
        Case { name: "full", full: true, ..PLAIN },
        Case { name: "frozen", ..PLAIN },
    ]
}

#[test]
fn decoder_layer_is_what_it_is_made_of() {
    for case in cases() {
        case.check();
    }
}

/// Sizes of the seven weights.
fn shapes([e, h, g, d, f]: [usize; 5]) -> [[usize; 2]; 7] {
    [[h * d, e], [g * d, e], [g * d, e], [e, h * d], [f, e], [f, e], [e, f]]
}

impl Case {
    fn tokens(&self) -> usize {
        self.documents.iter().sum()
    }

    fn inputs(&self) -> Vec<Input> {
        let [e, _, _, d, _] = self.sizes;
        let frozen = |input: Input| if self.full { input } else { input.frozen() };
        let x = random(self.tokens() * e, 2.0, 1);
        let mut inputs = vec![if self.x_tracked { x } else { x.frozen() }];
        for (n, width) in [e, e, d, d].into_iter().enumerate() {
            let mut norm = random(width, 0.5, 2 + n as u64);
            norm.values.iter_mut().for_each(|w| *w += 1.0);
            inputs.push(frozen(norm));
        }
        for (j, [out, input]) in shapes(self.sizes).into_iter().enumerate() {
            let seed = 10 + 3 * j as u64;
            let scale = (3.0 / input as f32).sqrt();
            inputs.push(frozen(random(out * input, scale, seed)));
            let rank: usize = self.runs.iter().map(|(_, ranks)| ranks[j]).sum();
            if rank > 0 {
                inputs.push(random(rank * input, scale, seed + 1).wide());
                inputs.push(random(out * rank, 0.3, seed + 2).wide());
            }
        }
        inputs
    }

    fn layer(&self, tensors: &[Tensor<1>], kept: &Kept) -> (Tensor<2>, DecoderLayer) {
        let [e, _, _, d, _] = self.sizes;
        let mut tensors = tensors.iter().cloned();
        let mut next = || tensors.next().expect("as many tensors as inputs");
        let x = next().reshape([self.tokens(), e]);
        let [input_norm, post_norm, q_norm, k_norm] = [(); 4].map(|()| next());
        let mut projections = shapes(self.sizes).into_iter().enumerate().map(|(j, [out, input])| {
            let weight = next().reshape([out, input]);
            let rank: usize = self.runs.iter().map(|(_, ranks)| ranks[j]).sum();
            let part = |(n, &(tokens, ranks)): (usize, &(usize, [usize; 7]))| LoraPart {
                tokens,
                rank: ranks[j],
                scale: 0.5 + n as f32,
                dropout: None,
            };
            let adapters = (rank > 0).then(|| Adapters {
                a: next().reshape([rank, input]),
                b: next().reshape([out, rank]),
                parts: self.runs.iter().enumerate().map(part).collect(),
            });
            Projection { weight, bias: None, adapters }
        });
        let mut projection = || projections.next().expect("seven");
        let (q, k, v, o) = (projection(), projection(), projection(), projection());
        let (gate, up, down) = (projection(), projection(), projection());
        let heads = |norm: Tensor<1>| self.head_norms.then_some(norm);
        let (q_norm, k_norm, kept) = (heads(q_norm), heads(k_norm), kept.clone());
        #[rustfmt::skip]
        let layer = DecoderLayer {
            input_norm, q, k, v, o, q_norm, k_norm, post_norm, gate, up, down, head_dim: d, eps: 1e-6, recompute: self.recompute.get(), kept,
        };
        (x, layer)
    }

    fn run(&self, dtype: DType, device: &Device, fused: bool, kept: &Kept) -> Vec<Vec<f32>> {
        let ends = self.documents.iter().scan(0, |sum, n| {
            *sum += *n as u32;
            Some(*sum)
        });
        let documents = Documents { cu_seqlens: std::iter::once(0).chain(ends).collect() };
        let mut inputs = self.inputs();
        if !self.head_norms {
            inputs[3].tracked = false;
            inputs[4].tracked = false;
        }
        let op = |tensors: &[Tensor<1>]| {
            let (x, layer) = self.layer(tensors, kept);
            let rope = rope(self.tokens(), self.sizes[3], &x.device().without_autodiff());
            let f = if fused { ops::decoder_layer } else { ops::composed };
            flat(f(x, &layer, &rope, &documents))
        };
        run(&inputs, dtype, device, *device != Device::flex(), &op)
    }

    fn check(&self) {
        let Some(device) = card() else { return };
        let kept = Kept::default();
        let want = self.run(DType::BF16, &Device::flex(), false, &kept);
        let composed = self.run(DType::BF16, &device, false, &kept);
        let got = self.run(DType::BF16, &device, true, &kept);
        poison(&device);
        assert_eq!(got, self.run(DType::BF16, &device, true, &kept), "{}: the same bits twice", self.name);
        let fresh = self.run(DType::BF16, &device, true, &Kept::default());
        assert_eq!(got, fresh, "{}: whatever was kept", self.name);
        case_recomputed(self, &got, &device);
        let errors = |of: &[Vec<f32>]| -> Vec<f64> {
            of.iter().zip(&want).map(|(got, want)| relative(got, want)).collect()
        };
        let (fused, composed) = (errors(&got), errors(&composed));
        let shown = |errors: &[f64]| errors.iter().map(|e| format!("{e:.1e}")).collect::<Vec<_>>().join(" ");
        eprintln!("{}: {}\n  op by op: {}", self.name, shown(&fused), shown(&composed));
        for (n, (fused, composed)) in fused.iter().zip(&composed).enumerate() {
            // The same roundings, but for s·B and one less of each sum.
            assert!(
                *fused < 1.5 * composed + 1e-3,
                "{}, result {n}: {fused}, op by op {composed}",
                self.name
            );
            assert!(*fused < 3e-2, "{}, result {n}: {fused}", self.name);
        }
    }
}

fn case_recomputed(case: &Case, want: &[Vec<f32>], device: &Device) {
    case.recompute.set(true);
    let again = case.run(DType::BF16, device, true, &Kept::default());
    assert_eq!(want, again, "{}: recomputed", case.name);
    case.recompute.set(false);
}
