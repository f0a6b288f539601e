//! Attention: uneven documents, head sizes and groups.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::super::{Documents, attention, plain};
use super::*;

/// Scores are sums of up to 128 products, results of up to 1000 weights: 6e-8 · sqrt(1000) ≈ 2e-6,
/// and the softmax adds the error of scores of size 10 (6e-7); times three.
const TOLERANCE: f32 = 1e-5;

type Attention = fn(Tensor<3>, Tensor<3>, Tensor<3>, &Documents, f32) -> Tensor<3>;

#[derive(Clone)]
struct Case {
    lengths: Vec<u32>,
    heads: usize,
    groups: usize,
    size: usize,
}

impl Case {
    fn new(lengths: &[u32], heads: usize, groups: usize, size: usize) -> Self {
        Self { lengths: lengths.to_vec(), heads, groups, size }
    }

    fn tokens(&self) -> usize {
        self.lengths.iter().sum::<u32>() as usize
    }

    fn inputs(&self) -> Vec<Input> {
        let kv = self.tokens() * self.groups * self.size;
        vec![random(self.tokens() * self.heads * self.size, 1), random(kv, 2), random(kv, 3)]
    }

    fn op(&self, op: Attention) -> impl Fn(&[Tensor<1>]) -> Tensor<1> + Sync + use<> {
        let Case { lengths, heads, groups, size } = self.clone();
        let tokens = self.tokens();
        let ends = lengths.iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        let documents = Documents { cu_seqlens: Arc::from_iter([0].into_iter().chain(ends)) };
        // Larger than 1/sqrt(size): weights far from even.
        let scale = 8.0 / size as f32;
        move |x| {
            let shaped = |i: usize, heads: usize| x[i].clone().reshape([tokens, heads, size]);
            op(shaped(0, heads), shaped(1, groups), shaped(2, groups), &documents, scale).reshape([-1])
        }
    }
}

#[test]
fn attention_is_the_plain_one() {
    for case in [
        Case::new(&[1], 1, 1, 16),
        Case::new(&[1, 1, 2, 1], 2, 2, 16),
        Case::new(&[5, 64, 1, 63, 0, 65, 128, 300, 2], 4, 2, 64),
        Case::new(&[129, 31], 4, 1, 128),
        Case::new(&[1000, 7, 33], 3, 1, 16),
        Case::new(&[1100], 2, 2, 32),
        Case::new(&[40, 90], 8, 4, 8),
        Case::new(&[40], 8, 8, 8),
    ] {
        let name =
            format!("attention {:?}, {}/{} heads of {}", case.lengths, case.heads, case.groups, case.size);
        compare(&name, &case.inputs(), TOLERANCE, &case.op(attention), &case.op(plain::attention));
    }
}

#[test]
fn untracked_inputs_change_nothing_for_the_others() {
    let case = Case::new(&[70, 3], 4, 2, 16);
    for tracked in 0..8 {
        let inputs: Vec<_> = (case.inputs().into_iter().enumerate())
            .map(|(i, input)| if tracked >> i & 1 == 1 { input } else { input.frozen() })
            .collect();
        let name = format!("attention, tracked {tracked:03b}");
        compare(&name, &inputs, TOLERANCE, &case.op(attention), &case.op(plain::attention));
    }
}

#[test]
fn attention_gradient_is_the_slope() {
    let case = Case::new(&[6, 1, 3], 2, 1, 4);
    assert_slopes("attention", &case.inputs(), 1e-2, &case.op(attention));
}

#[test]
fn attention_repeats_bit_for_bit() {
    for case in [Case::new(&[5, 300, 64, 1], 4, 2, 16), Case::new(&[2100, 20], 2, 1, 8)] {
        assert_same_bits("attention", &case.inputs(), &case.op(attention));
    }
}

/// A packed document computes what it computes alone, forward and backward, bit for bit.
#[test]
fn a_document_computes_as_if_alone() {
    let case = Case::new(&[70, 1, 200, 33], 4, 2, 16);
    let inputs = case.inputs();
    let packed = run(&inputs, &case.op(attention));
    let widths = [case.heads, case.heads, case.groups, case.groups].map(|heads| heads * case.size);
    let incoming = random(packed[0].len(), 999).values;
    let mut start = 0;
    for &len in &case.lengths {
        let rows =
            |values: &[f32], width: usize| values[start * width..(start + len as usize) * width].to_vec();
        let own: Vec<_> = (inputs.iter().zip(&widths[1..]))
            .map(|(input, &width)| Input { values: rows(&input.values, width), tracked: true })
            .collect();
        let alone = Case { lengths: vec![len], ..case.clone() };
        let got = run_with(&own, &rows(&incoming, widths[0]), &alone.op(attention));
        for (n, (got, width)) in got.iter().zip(widths).enumerate() {
            let expected = rows(&packed[n], width);
            let same = got.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same && got.len() == expected.len(), "document of {len}: result {n} (0 = output)");
        }
        start += len as usize;
    }
}
