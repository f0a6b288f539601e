//! A decoder layer over one more token of each text at a time, and over whole texts.
#![allow(dead_code)] // each test program uses a part

use burn::tensor::{DType, Device, Tensor, TensorData};
use embertune::ops::{self, Adapters, DecoderLayer, Documents, Kept, LoraPart, Next, Projection, Rope};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::goldens::floats;

/// Tokens that are added to each text: more than there is room for at first.
pub const ROUNDS: usize = 70;

/// A layer to try.
#[derive(Clone, Copy)]
pub struct Case {
    /// e, h, g, d, f
    sizes: [usize; 5],
    /// Tokens that each text begins with.
    prompts: &'static [usize],
    /// Of the adapters on q, v, o and down; 0: none.
    rank: usize,
    head_norms: bool,
}

pub const CASES: [Case; 3] = [
    Case { sizes: [128, 4, 2, 64, 192], prompts: &[5, 1, 130], rank: 8, head_norms: true },
    Case { sizes: [256, 8, 2, 128, 512], prompts: &[700], rank: 0, head_norms: true },
    Case { sizes: [136, 8, 1, 64, 200], prompts: &[1, 33], rank: 16, head_norms: false },
];

/// Where a computation takes place: f32 on the CPU, of values that bf16 has, or bf16 on a card.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    pub device: &'a Device,
    pub on_card: bool,
}

impl Place<'_> {
    fn vector(&self, values: Vec<f32>) -> Tensor<1> {
        let values: Vec<f32> = values.into_iter().map(|x| half::bf16::from_f32(x).to_f32()).collect();
        let tensor = self.wide(values);
        if self.on_card { tensor.cast(DType::BF16) } else { tensor }
    }

    /// f32 in either place, as adapters are.
    fn wide(&self, values: Vec<f32>) -> Tensor<1> {
        let length = values.len();
        Tensor::from_data(TensorData::new(values, [length]), (self.device, DType::F32))
    }

    fn matrix(&self, values: Vec<f32>, rows: usize) -> Tensor<2> {
        let columns = values.len() / rows;
        self.vector(values).reshape([rows, columns])
    }

    /// Tables for tokens in these places.
    fn rope(&self, positions: &[usize], size: usize) -> Rope {
        let angle = |t: usize, i: usize| t as f32 * 0.37 / (1.0 + (i % (size / 2)) as f32);
        let table = |f: fn(f32) -> f32| {
            let values = positions.iter().flat_map(|&t| (0..size).map(move |i| f(angle(t, i))));
            let values = TensorData::new(values.collect::<Vec<f32>>(), [positions.len(), size]);
            Tensor::from_data(values, (self.device, DType::F32))
        };
        Rope { cos: table(f32::cos), sin: table(f32::sin) }
    }
}

impl Case {
    fn layer(&self, tokens: usize, place: Place<'_>) -> DecoderLayer {
        let [e, h, g, d, f] = self.sizes;
        let norm = |width: usize, seed: u64| {
            let mut values = random(width, 0.5, seed);
            values.iter_mut().for_each(|w| *w += 1.0);
            place.vector(values)
        };
        let projection = |out: usize, input: usize, adapted: bool, seed: u64| {
            let scale = (3.0 / input as f32).sqrt();
            let part = LoraPart { tokens, rank: self.rank, scale: 0.5, dropout: None };
            let adapters = (adapted && self.rank > 0).then(|| Adapters {
                a: place.wide(random(self.rank * input, scale, seed + 1)).reshape([self.rank, input]),
                b: place.wide(random(out * self.rank, 0.3, seed + 2)).reshape([out, self.rank]),
                parts: vec![part],
            });
            Projection { weight: place.matrix(random(out * input, scale, seed), out), bias: None, adapters }
        };
        DecoderLayer {
            input_norm: norm(e, 2),
            post_norm: norm(e, 3),
            q_norm: self.head_norms.then(|| norm(d, 4)),
            k_norm: self.head_norms.then(|| norm(d, 5)),
            q: projection(h * d, e, true, 10),
            k: projection(g * d, e, false, 13),
            v: projection(g * d, e, true, 16),
            o: projection(e, h * d, true, 19),
            gate: projection(f, e, false, 22),
            up: projection(f, e, false, 25),
            down: projection(e, f, true, 28),
            head_dim: d,
            eps: 1e-6,
            recompute: false,
            kept: Kept::default(),
        }
    }

    /// The rows of x at these tokens of texts.
    fn x(&self, at: &[(usize, usize)], place: Place<'_>) -> Tensor<2> {
        let e = self.sizes[0];
        let row = |&(text, token): &(usize, usize)| random(e, 2.0, 1000 * (1 + text as u64) + token as u64);
        place.matrix(at.iter().flat_map(row).collect(), at.len())
    }

    /// The first `more` tokens after the prompts, and the prompts: text by text.
    fn tokens(&self, more: usize) -> (Vec<(usize, usize)>, Documents) {
        let lengths: Vec<usize> = self.prompts.iter().map(|n| n + more).collect();
        let ends = lengths.iter().scan(0, |sum, n| {
            *sum += *n as u32;
            Some(*sum)
        });
        let documents = Documents { cu_seqlens: std::iter::once(0).chain(ends).collect() };
        let of_text = |(text, &n): (usize, &usize)| (0..n).map(move |token| (text, token));
        (lengths.iter().enumerate().flat_map(of_text).collect(), documents)
    }

    /// Each token's row, from whole texts.
    pub fn at_once(&self, place: Place<'_>) -> Vec<Vec<f32>> {
        let (at, documents) = self.tokens(ROUNDS);
        let [e, _, _, d, _] = self.sizes;
        let positions: Vec<usize> = at.iter().map(|(_, token)| *token).collect();
        let (layer, rope) = (self.layer(at.len(), place), place.rope(&positions, d));
        let y = floats(ops::composed(self.x(&at, place), &layer, &rope, &documents));
        y.chunks(e).map(<[f32]>::to_vec).collect()
    }

    /// The same, the prompts first and then a token of each text at a time, `before` each of which something happens.
    pub fn one_by_one(&self, place: Place<'_>, before: &dyn Fn()) -> Vec<Vec<f32>> {
        let (prompts, documents) = self.tokens(0);
        let [e, _, _, d, _] = self.sizes;
        let positions: Vec<usize> = prompts.iter().map(|(_, token)| *token).collect();
        let mut layer = self.layer(prompts.len(), place);
        let x = self.x(&prompts, place);
        let (y, mut kept) = ops::prompt_layer(x, &layer, &place.rope(&positions, d), &documents);
        let y = floats(y);
        let mut rows: Vec<_> = prompts.into_iter().zip(y.chunks(e).map(<[f32]>::to_vec)).collect();
        layer.projections_mut().into_iter().for_each(|p| p.set_tokens(self.prompts.len()));
        for round in 0..ROUNDS {
            let next: Vec<Next> =
                self.prompts.iter().enumerate().map(|(text, n)| Next { text, seen: n + round }).collect();
            let at: Vec<_> = next.iter().map(|next| (next.text, next.seen)).collect();
            let positions: Vec<usize> = next.iter().map(|next| next.seen).collect();
            let x = self.x(&at, place);
            let rope = place.rope(&positions, d);
            before();
            let (y, more) = ops::next_layer(x, &layer, &rope, kept, &next);
            kept = more;
            rows.extend(at.into_iter().zip(floats(y).chunks(e).map(<[f32]>::to_vec)));
        }
        rows.sort_by_key(|(at, _)| *at);
        rows.into_iter().map(|(_, row)| row).collect()
    }
}

/// In (−scale, scale).
fn random(len: usize, scale: f32, seed: u64) -> Vec<f32> {
    let mut generator = ChaCha8Rng::seed_from_u64(seed);
    let unit = |bits: u32| (bits >> 8) as f32 / (1 << 23) as f32 - 1.0;
    (0..len).map(|_| scale * unit(generator.next_u32())).collect()
}

/// ‖got − want‖ / ‖want‖ of each row.
pub fn errors(got: &[Vec<f32>], want: &[Vec<f32>]) -> Vec<f64> {
    assert_eq!(got.len(), want.len());
    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let error = |(got, want): (&Vec<f32>, &Vec<f32>)| {
        norm(&mut got.iter().zip(want).map(|(g, w)| g - w)) / norm(&mut want.iter().copied())
    };
    got.iter().zip(want).map(error).collect()
}
