//! A layer over one more token of each text at a time in bf16, against the layer over whole texts in f32 on the CPU; and a
//! model's words on the card against those on the CPU.

use burn::tensor::{DType, Device};
use embertune::model::Sampling;

use super::common::next::{CASES, Place, errors};
use super::runs::{model, spec, with_values};
use super::{card, poison};

#[test]
fn a_token_at_a_time_is_the_whole_text() {
    let Some(device) = card() else { return };
    for (n, case) in CASES.iter().enumerate() {
        let place = Place { device: &device, on_card: true };
        let poisoned = || poison(&device);
        let got = case.one_by_one(place, &poisoned);
        assert_eq!(got, case.one_by_one(place, &poisoned), "case {n}: the same bits twice");
        let want = case.at_once(Place { device: &Device::flex(), on_card: false });
        let errors = errors(&got, &want);
        let worst = errors.iter().copied().fold(0.0, f64::max);
        eprintln!("case {n}: a token's row is off by {worst:.1e} at most");
        // A handful of roundings to 8 bits; in a short text a token that isn't seen changes a row by much more.
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
