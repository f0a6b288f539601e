//! Text from the model: with keys and values kept, each token is the one that the whole text's logits say; and the
//! command around it.
#![cfg(feature = "flex")]

mod common;

use burn::tensor::{DType, Device, Tensor};
use std::process::Stdio;
use std::sync::Arc;

use common::goldens::floats;
use common::next::{CASES, Place, errors};
use common::run::{Ran, RunDir};
use embertune::config::{LoraConfig, SampleConfig, TokenizerConfig};
use embertune::data::{Batch, ChatTokenizer, Prompt, Stream};
use embertune::hub;
use embertune::model::{Decoder, Heard, LoraSpec, Sampling, Speaker};
use serde_json::Value;

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
fn a_layer_over_a_token_at_a_time_is_the_layer_over_whole_texts() {
    let place = Place { device: &Device::flex(), on_card: false };
    for (n, case) in CASES.iter().enumerate() {
        let errors = errors(&case.one_by_one(place, &|| {}), &case.at_once(place));
        // Sums in another order.
        assert!(errors.iter().all(|&error| error < 2e-5), "case {n}: {errors:?}");
    }
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
fn an_answer_ends_where_training_ends_a_turn() {
    let tiny = hub::model_dir("embertune/tiny").expect("it is compiled in");
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(tiny.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    // As in Qwen's base models, whose chat template ends turns with another token than the one that ends texts.
    let settings = std::fs::read_to_string(tiny.join("tokenizer_config.json")).unwrap();
    let settings = settings.replace(r#""eos_token": "<|im_end|>""#, r#""eos_token": "<|endoftext|>""#);
    std::fs::write(dir.path().join("tokenizer_config.json"), settings).unwrap();
    let tokenizer = ChatTokenizer::load(dir.path(), &TokenizerConfig::default()).unwrap();
    let id = |text| tokenizer.token_id(text).unwrap();
    assert_eq!(tokenizer.eos_id(), Some(id("<|endoftext|>")));
    let mut both = vec![id("<|endoftext|>"), id("<|im_end|>")];
    both.sort_unstable();
    assert_eq!(tokenizer.stop_ids(), both);
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
fn an_output_that_is_no_number_is_an_error() {
    let model = with_adapters(tiny());
    let broken = |value: Tensor<1>| value.clone().inner() * f32::NAN;
    let values = model.trainable_values().into_iter().map(broken).collect();
    let model = model.set_trainable(values);
    for temperature in [0.0, 1.0] {
        let sampling = Sampling { max_tokens: 4, temperature, ..Sampling::default() };
        let error = model.generate(&[vec![5]], 0, &sampling, &mut |_, _| panic!("a token")).unwrap_err();
        assert!(error.to_string().contains("the model's output isn't a number"), "{error}");
    }
    // The command names whose weights they are.
    let dir = RunDir::new();
    let train = ["sft", "--max-steps", "1", "--device", "flex", "--output-dir", "out", "--val", "None"];
    dir.run(&train).succeeds();
    let folder = "out/weights/step_1/lora_adapters";
    let file = format!("{folder}/adapter_model.safetensors");
    let mut bytes = dir.bytes(&file);
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(dir.path(&file), bytes).unwrap();
    let ask = ["generate", "--model", "embertune/tiny", "--device", "flex", "--adapter", "out", "x"];
    let ran = dir.run(&ask).fails(1).says(&["NaN", folder]);
    assert!(ran.stdout.is_empty(), "{}", ran.all());
}

#[test]
fn text_comes_in_whole_characters_and_ends_before_a_stop_text() {
    let dir = hub::model_dir("embertune/tiny").expect("it is compiled in");
    let tokenizer = Arc::new(ChatTokenizer::load(&dir, &TokenizerConfig::default()).unwrap());
    let model = tiny();
    // Hot enough for all kinds of bytes.
    let config =
        SampleConfig { max_new_tokens: 60, temperature: 3.0, batch_size: 2, ..SampleConfig::default() };
    let speak = |config: &SampleConfig| {
        let speaker = Speaker::new(config, tokenizer.clone()).unwrap();
        let prompts = ["one", "two", "three"].map(|text| Prompt::Text(text.into()));
        let ids: Vec<Vec<u32>> =
            prompts.iter().map(|prompt| speaker.encode(prompt, 4096).unwrap().unwrap()).collect();
        let mut heard = vec![(String::new(), 0); 3];
        let mut hear = |n: usize, what: Heard<'_>| {
            match what {
                Heard::Text(text) => heard[n].0.push_str(text),
                Heard::End(answer) => {
                    assert_eq!(heard[n].0, answer.text);
                    heard[n].1 += 1;
                }
            }
            true
        };
        let (answers, pace) = speaker.answer(&model, 0, &ids, &mut hear).unwrap();
        assert!(heard.iter().zip(&answers).all(|((text, ends), answer)| text == &answer.text && *ends == 1));
        assert_eq!(pace.prompt_tokens, ids.iter().map(Vec::len).sum::<usize>());
        assert_eq!(pace.tokens, answers.iter().map(|answer| answer.tokens.saturating_sub(1)).sum::<usize>());
        answers
    };
    let answers = speak(&config);
    for (answer, seed) in answers.iter().zip(0..) {
        assert_eq!(answer.tokens == 60, !answer.is_whole, "{seed}");
        assert!(answer.text.chars().count() > 10, "{answer:?}");
    }
    assert_eq!(
        speak(&SampleConfig { batch_size: 1, ..config.clone() }),
        answers,
        "whatever is answered beside it"
    );
    // A stop text of several tokens, from the middle of an answer.
    let whole: Vec<char> = answers[1].text.chars().collect();
    let stop: String = whole[whole.len() / 2..whole.len() / 2 + 4].iter().collect();
    let cut = speak(&SampleConfig { stop: vec!["never said".into(), stop.clone()], ..config });
    for (cut, whole) in cut.iter().zip(&answers) {
        let wanted = whole.text.find(&stop).map_or(&whole.text[..], |at| &whole.text[..at]);
        assert_eq!(cut.text, wanted, "before {stop:?}");
    }
    assert!(cut[1].is_whole && cut[1].tokens < answers[1].tokens);
}

#[test]
fn the_command_answers_with_an_adapter_and_in_a_conversation() {
    let dir = RunDir::new();
    let train = ["sft", "--max-steps", "12", "--device", "flex", "--output-dir", "out", "--val", "None"];
    dir.run(&train).succeeds();
    let base = ["generate", "--model", "embertune/tiny", "--device", "flex", "--max-new-tokens", "12"];
    let ask = |more: &[&str]| dir.run(&[&base[..], more].concat()).succeeds();
    let (plain, adapted) = (ask(&["Reverse: abc"]), ask(&["--adapter", "out", "Reverse: abc"]));
    assert!(!plain.stdout.trim().is_empty() && !adapted.stdout.trim().is_empty());
    assert_ne!(plain.stdout, adapted.stdout, "the adapter has something to say");
    assert_eq!(ask(&["--adapter", "out", "Reverse: abc"]).stdout, adapted.stdout);
    let two = ask(&["one", "two"]);
    assert!(two.stdout.contains("> one\n") && two.stdout.contains("\n> two\n"), "{}", two.stdout);
    // A line of JSON each, in the order of the prompts; the same as each alone.
    dir.write("prompts.txt", "Reverse: abc\n\ntwo and a few words more\n");
    dir.write(
        "more.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"one\"}]}\n{\"prompt\": \"Hi\"}\n",
    );
    let json = |more: &[&str]| -> Vec<Value> {
        let out = ask(&[&["--json", "--adapter", "out"], more].concat()).stdout;
        out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let all = json(&["one", "--prompts", "prompts.txt"]);
    assert_eq!(
        all.iter().map(|row| row["prompt"].as_str().unwrap()).collect::<Vec<_>>(),
        ["one", "Reverse: abc", "two and a few words more"]
    );
    assert_eq!(all[1]["text"].as_str().unwrap(), adapted.stdout.strip_suffix('\n').unwrap());
    assert_eq!(json(&["two and a few words more"])[0], all[2]);
    assert_eq!(json(&["--batch-size", "1", "one", "--prompts", "prompts.txt"]), all);
    assert_eq!(json(&["--prompts", "more.jsonl"])[0], all[0]);
    for row in &all {
        assert_eq!(row["finish_reason"] == "length", row["tokens"] == 12, "{row}");
    }
    dir.run(&["generate", "--model", "nowhere", "x"]).fails(1).says(&["nowhere"]);
    let usage = |more: &[&str], word: &str| {
        dir.run(&[&base[..], more].concat()).fails(2).says(&[word]);
    };
    usage(&["--temperature=-1", "x"], "--temperature");
    usage(&["--temperature", "-1", "x"], "`--temperature` is -1");
    usage(&["--top-p", "-0.5", "x"], "`--top-p` is -0.5");
    usage(&["--top-k", "-1", "x"], "wanted a whole number above 0");
    usage(&["--seed", "-1", "x"], "wanted a whole number, 0 or more");
    usage(&["--stop", "", "x"], "hint: leave it out");
    usage(&["one", ""], "prompt 2 is empty");
    let fails =
        |more: &[&str], words: &[&str]| drop(dir.run(&[&base[..], more].concat()).fails(1).says(words));
    fails(&["--adapter", "nope", "x"], &["nope: there is no such folder", "the folder of a PEFT adapter"]);
    dir.run(&["generate", "--model", "out", "x"]).fails(1).says(&["the folder of a run", "--adapter out`"]);
    let merge = ["merge", "--base", "embertune/tiny", "--adapter", "nope", "--out", "merged"];
    dir.run(&merge).fails(1).says(&["nope: there is no such folder", "the folder of a PEFT adapter"]);
    // An adapter of another model.
    let other = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/adapters/plain");
    std::fs::create_dir(dir.path("other")).unwrap();
    std::fs::copy(other.join("adapter_model.safetensors"), dir.path("other/adapter_model.safetensors"))
        .unwrap();
    let config = std::fs::read_to_string(other.join("adapter_config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["base_model_name_or_path"] = "someone/else".into();
    dir.write("other/adapter_config.json", &config.to_string());
    let first = "the adapter was made for `someone/else`, and `--model` is `embertune/tiny`: ";
    fails(&["--adapter", "other", "x"], &[first, "hint: set `--model someone/else`"]);
    usage(&["--top-p", "0.5", "x"], "nothing is drawn");
    usage(&["--json"], "`--json` without a prompt");
    usage(&["--json", "--chat"], "--chat");
    dir.run(&["generate", "--model", "embertune/tiny", "--max-new-tokens", "0", "x"])
        .fails(2)
        .says(&["above 0"]);
    usage(&["--chat-template-kwargs", "{", "x"], "chat_template_kwargs");
}

#[test]
fn a_conversation_remembers_until_it_is_reset() {
    let dir = RunDir::new();
    let base = ["generate", "--model", "embertune/tiny", "--device", "flex", "--max-new-tokens", "8"];
    let talk = |more: &[&str], lines: &str| {
        let mut talk = dir.command(&[&base[..], more].concat());
        talk.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut talk = talk.spawn().unwrap();
        std::io::Write::write_all(&mut talk.stdin.take().unwrap(), lines.as_bytes()).unwrap();
        let ran = Ran::of(talk.wait_with_output().unwrap()).succeeds();
        ran.stdout
    };
    let once = talk(&[], "hello there\n");
    assert!(!once.trim().is_empty());
    let twice = talk(&[], "hello there\n\nhello there\n");
    assert!(
        twice.starts_with(&once) && twice != once.repeat(2),
        "the second answer knows of the first: {twice:?}"
    );
    assert_eq!(talk(&[], "hello there\n/reset\nhello there\n/exit\nmore"), once.repeat(2));
    assert_eq!(talk(&["--chat", "hello there"], ""), once);
    // Too long: told, and the conversation goes on.
    let long = format!("{}\nhello there\n", "word ".repeat(3000));
    assert_eq!(talk(&[], &long), once);

    // Without a template.
    let tiny = hub::model_dir("embertune/tiny").expect("it is compiled in");
    std::fs::create_dir(dir.path("bare")).unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(tiny.join(file), dir.path("bare").join(file)).unwrap();
    }
    let bare = ["generate", "--model", "bare", "--device", "flex", "--max-new-tokens", "4"];
    for more in [&["--chat"][..], &[]] {
        dir.run(&[&bare[..], more].concat()).fails(1).says(&["no chat template", "--chat-template FILE"]);
    }
    dir.run(&[&bare[..], &["Once"]].concat()).succeeds().says(&["taken as they are"]);
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    dir.run(&[&bare[..], &["--chat-template", template, "Once"]].concat()).succeeds();
}
