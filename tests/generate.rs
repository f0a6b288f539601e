//! Text from the model: with keys and values kept, each token is the one that the whole text's logits say; and the
//! command around it.
#![cfg(feature = "flex")]

mod common;

use burn::tensor::{DType, Device, Tensor};
use common::goldens::floats;
use common::run::RunDir;
use embertune::config::LoraConfig;
use embertune::data::{Batch, Stream};
use embertune::hub;
use embertune::model::{Decoder, LoraSpec, Sampling};

fn tiny() -> Decoder {
    let dir = hub::model_dir("embertune/tiny").expect("it is compiled in");
    Decoder::load(&dir, DType::F32, &Device::flex(), &mut |_, _| {}).unwrap()
}

/// Two adapters whose B's aren't zero.
fn with_adapters(mut model: Decoder) -> Decoder {
    let spec = |rank| LoraSpec::from_config(&LoraConfig { rank, ..LoraConfig::default() });
    model.attach_runs(&[(spec(4), 1), (spec(8), 2)]).unwrap();
    let values = model.trainable_values().into_iter().enumerate().map(|(n, value)| {
        let [length] = value.dims();
        let noise: Vec<f32> = (0..length).map(|i| ((i * 31 + n * 7) % 17) as f32 * 0.004 - 0.03).collect();
        value.clone().inner() + Tensor::from_floats(noise.as_slice(), &value.device().without_autodiff())
    });
    let values = values.collect();
    model.set_trainable(values)
}

/// The next token after `ids`, from all of them at once.
fn next(model: &Decoder, ids: &[u32], run: usize) -> u32 {
    let t = ids.len();
    let mut run_tokens = vec![0; model.runs().len().max(1)];
    run_tokens[run] = t;
    let batch = Batch {
        input_ids: ids.to_vec(),
        position_ids: (0..t as u32).collect(),
        targets: vec![0; t],
        loss_mask: vec![false; t],
        cu_seqlens: vec![0, t as u32],
        streams: vec![Stream::default(); run_tokens.len()],
        run_tokens,
    };
    let logits = floats(model.logits(&model.inputs(&batch, None).unwrap()).inner());
    let last = &logits[logits.len() - logits.len() / t..];
    (0..last.len()).min_by(|&a, &b| last[b].total_cmp(&last[a])).unwrap() as u32
}

#[test]
fn each_token_is_the_most_likely_after_all_before_it() {
    let prompts = [vec![5, 9, 200, 31, 7, 7, 80], vec![17], (1..60).collect::<Vec<u32>>()];
    let sampling = Sampling { max_tokens: 12, ..Sampling::default() };
    for (model, run) in [(tiny(), 0), (with_adapters(tiny()), 0), (with_adapters(tiny()), 1)] {
        let mut told = vec![Vec::new(); 3];
        let found = model
            .generate(&prompts, run, &sampling, &mut |n, id| {
                told[n].extend(id);
                true
            })
            .unwrap();
        assert_eq!(found, told);
        for (prompt, written) in prompts.iter().zip(&found) {
            let mut ids = prompt.clone();
            for &id in written {
                assert_eq!(next(&model, &ids, run), id, "after {ids:?}");
                ids.push(id);
            }
            // Alone as among others.
            assert_eq!(
                &model.generate(std::slice::from_ref(prompt), run, &sampling, &mut |_, _| true).unwrap()[0],
                written
            );
        }
    }
    let adapted = with_adapters(tiny());
    let of = |run| adapted.generate(&prompts, run, &sampling, &mut |_, _| true).unwrap();
    assert_ne!(of(0), of(1), "each adapter has its own words");
}

#[test]
fn texts_end_at_a_stop_token_and_drawing_repeats_with_its_seed() {
    let model = tiny();
    let prompts = [vec![5, 9, 200], vec![5, 9, 200]];
    let draw = |seed| {
        let sampling =
            Sampling { max_tokens: 20, temperature: 1.0, top_p: 0.95, seed, ..Sampling::default() };
        model.generate(&prompts, 0, &sampling, &mut |_, _| true).unwrap()
    };
    let first = draw(1);
    assert_eq!(first, draw(1));
    assert_ne!(first, draw(2));
    assert_ne!(first[0], first[1], "each prompt has a stream of its own");
    let greedy = Sampling { max_tokens: 20, ..Sampling::default() };
    let whole = model.generate(&prompts[..1], 0, &greedy, &mut |_, _| true).unwrap().remove(0);
    let stop = whole[3];
    let until = whole.iter().position(|&id| id == stop).unwrap();
    let sampling = Sampling { stop: vec![stop], ..greedy };
    let cut = model.generate(&prompts[..1], 0, &sampling, &mut |_, _| true).unwrap().remove(0);
    assert_eq!(cut, whole[..until]);
}

#[test]
fn what_cannot_be_answered_is_an_error() {
    let model = tiny();
    let fails = |prompts: &[Vec<u32>], run, max_tokens| {
        let sampling = Sampling { max_tokens, ..Sampling::default() };
        model.generate(prompts, run, &sampling, &mut |_, _| true).unwrap_err().to_string()
    };
    assert!(fails(&[vec![]], 0, 1).contains("prompt 0 has 0 tokens"));
    assert!(fails(&[vec![1]], 0, 1 << 24).contains("wanted 1 to"));
    assert!(fails(&[vec![1 << 30]], 0, 1).contains("token id"));
    assert!(fails(&[vec![1]], 3, 1).contains("no adapter run 3"));
}

#[test]
fn the_command_answers_with_an_adapter_and_in_a_conversation() {
    let dir = RunDir::new();
    let train = ["sft", "--max-steps", "12", "--device", "flex", "--output-dir", "out", "--val", "None"];
    dir.run(&train).succeeds();
    let base = ["generate", "--model", "embertune/tiny", "--device", "flex", "--max-tokens", "12"];
    let ask = |more: &[&str]| dir.run(&[&base[..], more].concat()).succeeds();
    let (plain, adapted) = (ask(&["Reverse: abc"]), ask(&["--adapter", "out", "Reverse: abc"]));
    assert!(!plain.stdout.trim().is_empty() && !adapted.stdout.trim().is_empty());
    assert_ne!(plain.stdout, adapted.stdout, "the adapter has something to say");
    assert_eq!(ask(&["--adapter", "out", "Reverse: abc"]).stdout, adapted.stdout);
    let two = ask(&["one", "two"]);
    assert!(two.stdout.contains("> one\n") && two.stdout.contains("\n> two\n"), "{}", two.stdout);
    let mut talk = dir.command(&base);
    talk.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut talk = talk.spawn().unwrap();
    std::io::Write::write_all(&mut talk.stdin.take().unwrap(), b"hello\nand then?\n").unwrap();
    let out = talk.wait_with_output().unwrap();
    assert!(out.status.success());
    assert!(String::from_utf8_lossy(&out.stdout).lines().count() >= 2);
    dir.run(&["generate", "--model", "nowhere", "x"]).fails(1).says(&["nowhere"]);
    dir.run(&[&base[..], &["--temperature=-1", "x"]].concat()).fails(2).says(&["--temperature"]);
}
