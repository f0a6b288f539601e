//! A layer over one more token of each text at a time, against the layer over whole texts, in f32 on the CPU; and a model's
//! words on the card against those on the CPU.

use burn::tensor::{DType, Device, Tensor, TensorData};
use embertune::model::Sampling;
use embertune::ops::{self, Adapters, DecoderLayer, Documents, Kept, LoraPart, Next, Projection, Rope};

use super::runs::{model, spec, with_values};
use super::{Input, card, floats, poison, random, relative};

/// Tokens that are added to each text: more than there is room for at first.
const ROUNDS: usize = 70;

/// A layer to try.
#[derive(Clone, Copy)]
struct Case {
    /// e, h, g, d, f
    sizes: [usize; 5],
    /// Tokens that each text begins with.
    prompts: &'static [usize],
    /// Of the adapters on q, v, o and down; 0: none.
    rank: usize,
    head_norms: bool,
}

const CASES: [Case; 3] = [
    Case { sizes: [128, 4, 2, 64, 192], prompts: &[5, 1, 130], rank: 8, head_norms: true },
    Case { sizes: [256, 8, 2, 128, 512], prompts: &[700], rank: 0, head_norms: true },
    Case { sizes: [136, 8, 1, 64, 200], prompts: &[1, 33], rank: 16, head_norms: false },
];

/// Where a computation takes place: f32 on the CPU, of values that bf16 has, or bf16 on a card.
#[derive(Clone, Copy)]
struct Place<'a> {
    device: &'a Device,
    on_card: bool,
}

impl Place<'_> {
    fn vector(&self, input: Input) -> Tensor<1> {
        input.frozen().tensor(DType::BF16, self.device, self.on_card)
    }

    fn matrix(&self, input: Input, rows: usize) -> Tensor<2> {
        let columns = input.values.len() / rows;
        self.vector(input).reshape([rows, columns])
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
            let mut input = random(width, 0.5, seed);
            input.values.iter_mut().for_each(|w| *w += 1.0);
            place.vector(input)
        };
        let projection = |out: usize, input: usize, adapted: bool, seed: u64| {
            let scale = (3.0 / input as f32).sqrt();
            let part = LoraPart { tokens, rank: self.rank, scale: 0.5, dropout: None };
            let adapters = (adapted && self.rank > 0).then(|| Adapters {
                a: place.matrix(random(self.rank * input, scale, seed + 1).wide(), self.rank),
                b: place.matrix(random(out * self.rank, 0.3, seed + 2).wide(), out),
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
        let row =
            |&(text, token): &(usize, usize)| random(e, 2.0, 1000 * (1 + text as u64) + token as u64).values;
        let values = at.iter().flat_map(row).collect();
        place.matrix(Input { values, tracked: false, wide: false }, at.len())
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
    fn at_once(&self, place: Place<'_>) -> Vec<Vec<f32>> {
        let (at, documents) = self.tokens(ROUNDS);
        let [e, _, _, d, _] = self.sizes;
        let positions: Vec<usize> = at.iter().map(|(_, token)| *token).collect();
        let (layer, rope) = (self.layer(at.len(), place), place.rope(&positions, d));
        let y = floats(ops::composed(self.x(&at, place), &layer, &rope, &documents));
        y.chunks(e).map(<[f32]>::to_vec).collect()
    }

    /// The same, the prompts first and then a token of each text at a time.
    fn one_by_one(&self, place: Place<'_>) -> Vec<Vec<f32>> {
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
            if place.on_card {
                poison(place.device);
            }
            let (y, more) = ops::next_layer(x, &layer, &rope, kept, &next);
            kept = more;
            rows.extend(at.into_iter().zip(floats(y).chunks(e).map(<[f32]>::to_vec)));
        }
        rows.sort_by_key(|(at, _)| *at);
        rows.into_iter().map(|(_, row)| row).collect()
    }
}

#[test]
fn a_token_at_a_time_is_the_whole_text() {
    let Some(device) = card() else { return };
    for (n, case) in CASES.iter().enumerate() {
        let place = Place { device: &device, on_card: true };
        let got = case.one_by_one(place);
        assert_eq!(got, case.one_by_one(place), "case {n}: the same bits twice");
        let want = case.at_once(Place { device: &Device::flex(), on_card: false });
        assert_eq!(got.len(), want.len());
        let errors: Vec<f64> = got.iter().zip(&want).map(|(got, want)| relative(got, want)).collect();
        let worst = errors.iter().copied().fold(0.0, f64::max);
        eprintln!("case {n}: a token's row is off by {worst:.1e} at most");
        // A handful of roundings to 8 bits; a token that isn't seen, or seen twice, changes a row by a tenth and more.
        assert!(errors.iter().all(|&error| error < 4e-2), "case {n}: {errors:?}");
    }
}

#[test]
fn the_words_of_a_model_are_those_on_the_cpu() {
    let Some(device) = card() else { return };
    let prompts: Vec<Vec<u32>> = [7, 1, 150].map(|n| (0..n).map(|i| (i * 37 + n) % 640).collect()).to_vec();
    let sampling = Sampling { max_tokens: 80, ..Sampling::default() };
    let words = |device: &Device, run: usize| {
        let mut model = model(DType::F32, device);
        let specs = [(spec(4, 8.0, &["q_proj", "down_proj"]), 1), (spec(8, 8.0, &["v_proj"]), 2)];
        model.attach_runs(&specs).unwrap();
        with_values(model, 5).generate(&prompts, run, &sampling, &mut |_, _| true).unwrap()
    };
    for run in 0..2 {
        assert_eq!(words(&device, run), words(&Device::flex(), run), "run {run}");
    }
}
