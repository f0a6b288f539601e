//! `linear` and `lora_linear`.

use burn::tensor::{Int, Tensor};

use super::super::{Dropout, LoraPart, Stream, embedding, linear, lora_linear, plain};
use super::*;

/// 6e-8 · sqrt(1536) ≈ 2.4e-6, times two.
const TOLERANCE: f32 = 5e-6;

type Linear = fn(Tensor<2>, Tensor<2>) -> Tensor<2>;

fn shaped(op: Linear, [t, out, inner]: [usize; 3]) -> impl Fn(&[Tensor<1>]) -> Tensor<1> + Sync {
    move |x| op(x[0].clone().reshape([t, inner]), x[1].clone().reshape([out, inner])).reshape([-1])
}

#[test]
fn linear_is_the_plain_product() {
    for shape in [[1, 1, 1], [1, 64, 32], [3, 17, 5], [300, 192, 576], [65, 576, 1536]] {
        let [t, out, inner] = shape;
        let (x, weight) = (random(t * inner, 1), random(out * inner, 2));
        for inputs in [
            [x.clone(), weight.clone()],
            [x.clone(), weight.clone().frozen()],
            [x.clone().frozen(), weight.clone()],
            [x.clone().frozen(), weight.clone().frozen()],
        ] {
            let name = format!("linear {shape:?}");
            compare(&name, &inputs, TOLERANCE, &shaped(linear, shape), &shaped(plain::linear, shape));
        }
    }
}

#[test]
fn linear_repeats_bit_for_bit() {
    let inputs = [random(200 * 300, 3), random(150 * 300, 4)];
    assert_same_bits("linear", &inputs, &shaped(linear, [200, 150, 300]));
}

type LoraLinear = fn(Tensor<2>, Tensor<2>, Tensor<2>, Tensor<2>, &[LoraPart]) -> Tensor<2>;

/// A layer with its runs: width of x, of the result, parts.
#[derive(Clone)]
struct Layer {
    inner: usize,
    out: usize,
    parts: Vec<LoraPart>,
}

fn part(tokens: usize, rank: usize, scale: f32, dropout: Option<f32>) -> LoraPart {
    let dropout = dropout.map(|p| Dropout { p, key: 77 + rank as u64, stream: Stream::unbroken(1000) });
    LoraPart { tokens, rank, scale, dropout }
}

impl Layer {
    fn tokens(&self) -> usize {
        self.parts.iter().map(|part| part.tokens).sum()
    }

    fn ranks(&self) -> usize {
        self.parts.iter().map(|part| part.rank).sum()
    }

    /// x, W, A, B; B isn't zero.
    fn inputs(&self) -> Vec<Input> {
        let ranks = self.ranks();
        let x = random(self.tokens() * self.inner, 5);
        vec![x, random(self.out * self.inner, 6), random(ranks * self.inner, 7), random(self.out * ranks, 8)]
    }

    fn op(&self, op: LoraLinear) -> impl Fn(&[Tensor<1>]) -> Tensor<1> + Sync + use<> {
        let Layer { inner, out, parts } = self.clone();
        let (tokens, ranks) = (self.tokens(), self.ranks());
        move |x| {
            let shaped = |i: usize, shape: [usize; 2]| x[i].clone().reshape(shape);
            let (a, b) = (shaped(2, [ranks, inner]), shaped(3, [out, ranks]));
            op(shaped(0, [tokens, inner]), shaped(1, [out, inner]), a, b, &parts).reshape([-1])
        }
    }
}

fn layers() -> Vec<Layer> {
    let layer = |inner, out, parts: &[LoraPart]| Layer { inner, out, parts: parts.to_vec() };
    vec![
        layer(16, 24, &[part(1, 2, 2.0, None)]),
        layer(48, 96, &[part(130, 8, 2.0, None)]),
        layer(576, 192, &[part(70, 16, 0.5, Some(0.3))]),
        layer(
            32,
            48,
            &[
                part(5, 4, 2.0, None),
                part(100, 0, 1.0, None),
                part(33, 1, 0.25, Some(0.5)),
                part(0, 3, 2.0, None),
                part(64, 12, 3.0, None),
            ],
        ),
    ]
}

#[test]
fn lora_linear_is_the_plain_one() {
    for (n, layer) in layers().into_iter().enumerate() {
        let inputs = layer.inputs();
        for tracked in 0..16 {
            let inputs: Vec<_> = (inputs.iter().enumerate())
                .map(|(i, input)| if tracked >> i & 1 == 1 { input.clone() } else { input.clone().frozen() })
                .collect();
            let name = format!("lora_linear, layer {n}, tracked {tracked:04b}");
            compare(&name, &inputs, TOLERANCE, &layer.op(lora_linear), &layer.op(plain::lora_linear));
        }
    }
}

#[test]
fn lora_linear_gradient_is_the_slope() {
    let layer = Layer { inner: 6, out: 5, parts: vec![part(3, 2, 2.0, Some(0.4)), part(4, 1, 0.5, None)] };
    // The op is linear in each input: differences over 2e-2 lose only digits.
    assert_slopes("lora_linear", &layer.inputs(), 2e-3, &layer.op(lora_linear));
}

#[test]
fn lora_linear_repeats_bit_for_bit() {
    for layer in layers().into_iter().skip(2) {
        assert_same_bits("lora_linear", &layer.inputs(), &layer.op(lora_linear));
    }
}

/// Several runs in one product give each run what it gets alone, bit for bit.
#[test]
fn a_run_computes_as_if_alone() {
    let layer = layers().pop().expect("the one with several parts");
    let inputs = layer.inputs();
    let together = run(&inputs, &layer.op(lora_linear));
    let (mut token, mut row) = (0, 0);
    for part in &layer.parts {
        let (tokens, rank) = (token..token + part.tokens, row..row + part.rank);
        (token, row) = (tokens.end, rank.end);
        if part.tokens == 0 || part.rank == 0 {
            continue;
        }
        let rows = |values: &[f32], range: &std::ops::Range<usize>, width: usize| {
            values[range.start * width..range.end * width].to_vec()
        };
        let columns = |values: &[f32]| -> Vec<f32> {
            values.chunks(layer.ranks()).flat_map(|row| row[rank.clone()].to_vec()).collect()
        };
        let alone = Layer { parts: vec![part.clone()], ..layer.clone() };
        let tracked = |values: Vec<f32>| Input { values, tracked: true };
        let own = [
            tracked(rows(&inputs[0].values, &tokens, layer.inner)),
            inputs[1].clone().frozen(),
            tracked(rows(&inputs[2].values, &rank, layer.inner)),
            tracked(columns(&inputs[3].values)),
        ];
        let incoming = rows(&random(layer.tokens() * layer.out, 999).values, &tokens, layer.out);
        let expected = [
            rows(&together[0], &tokens, layer.out),
            rows(&together[1], &tokens, layer.inner),
            rows(&together[3], &rank, layer.inner),
            columns(&together[4]),
        ];
        let got = run_with(&own, &incoming, &alone.op(lora_linear));
        assert_eq!(got.len(), expected.len());
        for (n, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let same = got.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(
                same && got.len() == expected.len(),
                "run of rank {}: result {n} (0 = output)",
                part.rank
            );
        }
    }
}

/// Transposed and cut-out tensors are read by their strides.
#[test]
fn views_are_read_as_what_they_show() {
    let [t, inner, out] = [70, 24, 40];
    let inputs = [random((t + 9) * inner, 9), random(inner * out, 10)];
    let views = |op: Linear| {
        move |x: &[Tensor<1>]| {
            let rows = x[0].clone().reshape([t + 9, inner]).narrow(0, 5, t);
            let weight = x[1].clone().reshape([inner, out]).transpose();
            op(rows, weight).transpose().reshape([-1])
        }
    };
    compare("linear of views", &inputs, TOLERANCE, &views(linear), &views(plain::linear));
}

/// The gradient of a row is the sum of those of its tokens, in their order.
#[test]
fn embedding_gradient_adds_up_repeated_ids() {
    let (v, e) = (50, 8);
    let ids: Vec<i64> = (0..300).map(|n| (n * n + 3) % 17).collect();
    let op = |x: &[Tensor<1>]| {
        let data = TensorData::new(ids.clone(), [ids.len()]);
        let ids = Tensor::<1, Int>::from_data(data, &Device::flex());
        embedding(ids, x[0].clone().reshape([v, e])).reshape([-1])
    };
    let weight = random(v * e, 11);
    let [out, gradient] =
        <[Vec<f32>; 2]>::try_from(run(std::slice::from_ref(&weight), &op)).expect("two results");
    let incoming = random(ids.len() * e, 999).values;
    let mut expected = vec![0.0f32; v * e];
    for (n, &id) in ids.iter().enumerate() {
        for c in 0..e {
            let at = id as usize * e + c;
            assert_eq!(out[n * e + c], weight.values[at]);
            expected[at] += incoming[n * e + c];
        }
    }
    assert_eq!(gradient, expected);
    assert_same_bits("embedding", &[random(v * e, 11)], &op);
}
