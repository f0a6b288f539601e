//! `check` and `sft` see the same: what the one refuses or warns of before the first step, the other does too.
#![cfg(feature = "flex")]

mod common;

use common::neutral::Case;
use common::run::{Ran, RunDir};

/// Both commands with the same arguments.
fn both(dir: &RunDir, args: &[&str]) -> [Ran; 2] {
    ["check", "sft"].map(|command| dir.run(&[&[command, "@", "run.toml"], args].concat()))
}

#[track_caller]
fn both_refuse(dir: &RunDir, args: &[&str], words: &[&str]) {
    for ran in both(dir, args) {
        assert!(ran.code.is_some_and(|code| code > 0), "{}", ran.all());
        ran.without_panic().says(words);
    }
}

#[test]
fn the_whole_configuration_is_shown_where_that_is_wanted() {
    let dir = RunDir::new();
    let ran = dir.run(&["check", "@", "run.toml", "--resolved", "--optim.lr", "3e-4"]).succeeds();
    ran.says(&["betas1 = 0.9", "lr = 0.0003", "[data.columns]", "packing"]);
}

#[test]
fn a_folder_in_use_or_unwritable_is_refused_by_both() {
    let dir = RunDir::new();
    dir.sft(&[]).succeeds();
    both_refuse(&dir, &["--seed", "7"], &["another run has saved here", "--clean-output-dir"]);
    both_refuse(&dir, &["--ckpt.resume-step", "7", "--max-steps", "9"], &["step_7", "[1, 2]"]);
    both_refuse(&dir, &["--output-dir", "run.toml"], &["`output_dir`", "is a file"]);
    both_refuse(&dir, &["--output-dir", ""], &["`output_dir` is empty"]);
    let lock = std::fs::File::open(dir.path("out/.lock")).unwrap();
    lock.lock().unwrap();
    both_refuse(&dir, &["--ckpt.resume-step", "-1", "--max-steps", "4"], &["another run is writing here"]);
}

#[test]
fn check_tells_the_rest_when_another_run_has_saved_here() {
    let dir = RunDir::new();
    dir.sft(&[]).succeeds();
    let check = |args: &[&str]| dir.run(&[&["check", "@", "run.toml"], args].concat()).fails(1);
    let saved = "another run has saved here, and nothing is overwritten";
    let known = ["Model: ", "Data: 8 of 8 rows", "Memory of a device", "Verdict: it can't start", saved];
    check(&[]).says(&known).says(&["error: out/", "hint: resume it"]);
    check(&["--fit", "--memory", "1GiB"]).says(&known).says(&["micro_batch_size"]);
    for (key, name) in [("--data.name", "nowhere.jsonl"), ("--model.name", "./nowhere")] {
        let wrong = ["error: 2 problems", saved, "hint: resume it", "nowhere"];
        check(&[key, name]).says(&wrong);
        let sft = dir.sft(&[key, name]).fails(1).says(&[saved]);
        assert!(!sft.stderr.contains("problems"), "{}", sft.all());
    }
    // Runs over one base: each is looked at.
    let runs = "\n[[runs]]\nname = \"a\"\n[[runs]]\nname = \"b\"\n";
    let text = dir.text("run.toml").replace("\"out\"", "\"several\"") + runs;
    dir.write("runs.toml", &text);
    dir.run(&["sft", "@", "runs.toml"]).succeeds();
    let ran = dir.run(&["check", "@", "runs.toml"]).fails(1).says(&["Run a", "Run b", "error: 2 problems"]);
    assert_eq!(ran.stdout.matches("Verdict: it can't start").count(), 2, "{}", ran.all());
}

#[test]
fn a_checkpoint_that_does_not_fit_is_refused_by_both() {
    let dir = RunDir::new();
    dir.sft(&[]).succeeds();
    let resume = ["--ckpt.resume-step", "-1", "--max-steps", "4"];
    let check = |args: &[&str]| dir.run(&[&["check", "@", "run.toml"], &resume[..], args].concat());
    check(&[]).succeeds().says(&["4 in all, 2 of them done", "ready to train"]);
    let other = |args: &[&'static str]| [&resume[..], args].concat();
    both_refuse(&dir, &other(&["--model.lora.rank", "8"]), &["`model.lora.rank`"]);
    both_refuse(&dir, &other(&["--model.lora.alpha", "9"]), &["`model.lora.alpha`"]);
    both_refuse(&dir, &other(&["--optim.type", "sgd"]), &["`optim.type`"]);
    both_refuse(&dir, &other(&["--data.seed", "5"]), &["not those of the checkpoint"]);
    both_refuse(&dir, &other(&["--data.seq-len", "48"]), &["not those of the checkpoint"]);
    check(&["--seed", "5", "--optim.lr", "0.5"])
        .succeeds()
        .says(&["`seed`: the checkpoint has", "`optim.lr`"]);
    let done = dir.run(&["check", "@", "run.toml", "--ckpt.resume-step", "-1"]).succeeds();
    done.says(&["nothing to do: 2 steps are done"]);
    std::fs::write(dir.path("out/checkpoints/step_2/trainable.safetensors"), "cut").unwrap();
    both_refuse(&dir, &resume, &["trainable.safetensors", "truncated"]);
}

#[test]
fn every_fault_of_models_and_data_that_headers_show_is_told_by_check() {
    for case in Case::of_area("model").into_iter().chain(Case::of_area("data")) {
        // A single value that isn't finite is seen when all are read.
        if case.expected() != "error" || case.name() == "nan_weight" {
            continue;
        }
        let dir = RunDir::new();
        let [model, tokenizer, data] =
            [("model", "_ok/model"), ("tokenizer", "_ok/model"), ("data", "_ok/train.jsonl")]
                .map(|(part, good)| case.file(part, good).to_str().unwrap().to_string());
        let args = ["--model.name", &model, "--tokenizer.name", &tokenizer, "--data.name", &data];
        let ran = dir.run(&[&["check", "@", "run.toml"], &args[..]].concat());
        assert!(ran.code.is_some_and(|code| code > 0), "{}: {}", case.name(), ran.all());
        let missing = case.missing_from(&ran.stderr);
        assert!(missing.is_empty(), "{} must mention {missing:?}\n{}", case.name(), ran.all());
    }
}

#[test]
fn warnings_are_the_same() {
    let dir = RunDir::new();
    let words = [
        "full fine-tuning without `[ckpt]`",
        "`data.batch_size` is 64, and all the data fill",
        "`optim.lr` is 0: nothing will be learned",
    ];
    let args = ["--model.lora", "None", "--ckpt", "None", "--data.batch-size", "64", "--max-steps", "1"];
    let args = [&args[..], &["--optim.lr", "0"]].concat();
    let told = both(&dir, &args).map(|ran| {
        let ran = ran.succeeds().says(&words);
        let text = format!("{}\n{}", ran.stdout, ran.stderr);
        let lines = text.lines().filter_map(|line| line.split_once("warning: ")).map(|(_, warning)| warning);
        lines.map(str::to_string).collect::<Vec<_>>()
    });
    assert_eq!(told[0], told[1]);
    assert_eq!(told[0].len(), 3, "{told:?}");
}

#[test]
fn what_the_template_leaves_out_is_said_by_all_three() {
    let dir = RunDir::new();
    let call = r#"{"from": "function_call", "value": "{\"name\": \"a\", \"arguments\": {}}"}"#;
    let row = format!(r#"{{"conversations": [{{"from": "human", "value": "a"}}, {call}]}}"#);
    std::fs::write(dir.path("calls.jsonl"), format!("{row}\n")).unwrap();
    let words = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
    let args = ["--data.name", "calls.jsonl", "--tokenizer.chat-template", words];
    for ran in both(&dir, &args) {
        ran.succeeds()
            .says(&["1 of 1 rows holds tool calls that the chat template doesn't print", "calls.jsonl:1"]);
    }
    let preview = dir.run(&[&["preview", "@", "run.toml"], &args[..]].concat()).succeeds();
    preview.says(&["it holds tool calls that the chat template doesn't print"]);
}

#[test]
fn faults_of_held_out_data_name_its_own_keys() {
    let dir = RunDir::new();
    let named = |name: &'static str| ["--val.data.seq-len", "64", "--val.data.name", name];
    both_refuse(&dir, &named("nowhere.jsonl"), &["`val.data.name`", "nowhere.jsonl not found"]);
    std::fs::write(dir.path("held.jsonl"), "{\"question\": 1}\n").unwrap();
    both_refuse(&dir, &named("held.jsonl"), &["held.jsonl:1", "`[val.data.columns]`"]);
}

#[test]
fn a_second_beginning_is_said_by_both() {
    let dir = RunDir::new();
    let ok = common::goldens::root().join("bad/_ok/model");
    std::fs::create_dir(dir.path("tokenizer")).unwrap();
    std::fs::copy(ok.join("tokenizer.json"), dir.path("tokenizer/tokenizer.json")).unwrap();
    let template = "{{ bos_token }}{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\
                    {{ m.content }}<|im_end|>\n{% endfor %}";
    let settings = serde_json::json!({
        "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "chat_template": template,
    });
    std::fs::write(dir.path("tokenizer/tokenizer_config.json"), settings.to_string()).unwrap();
    for ran in both(&dir, &["--tokenizer.name", "tokenizer"]) {
        ran.succeeds().says(&["begin with two `bos_token`s"]);
    }
}

#[test]
fn epochs_count_the_rows_that_steps_take() {
    let dir = RunDir::new();
    let counted = |args: &[&str]| {
        let ran = dir.run(&[&["check", "@", "run.toml"], args].concat()).succeeds();
        ran.stdout.lines().find(|line| line.starts_with("  steps")).unwrap().to_string()
    };
    // Eight short rows fill at most eight packed ones: a step of 64 goes through them several times.
    let line = counted(&["--data.batch-size", "64", "--max-steps", "10"]);
    assert!(line.contains("1 an epoch, 10 in all"), "{line}");
    let epochs = line.rsplit_once('(').unwrap().1.split(' ').next().unwrap().parse::<f64>().unwrap();
    assert!(epochs >= 80.0, "{line}");
    let line = counted(&["--max-steps", "None", "--num-epochs", "2", "--data.batch-size", "64"]);
    assert!(line.contains("1 in all"), "{line}");
}

#[test]
fn more_memory_than_there_is_is_said() {
    let dir = RunDir::new();
    let args = ["--data.seq-len", "1000000", "--model.max-position-embeddings", "1000000"];
    let args = [&args[..], &["--data.micro-batch-size", "4096", "--data.batch-size", "4096"]].concat();
    let ran = dir.run(&[&["check", "@", "run.toml"], &args[..]].concat()).succeeds();
    ran.says(&["is estimated to take", "data.micro_batch_size", "the memory may not do"]);
}

#[test]
fn weights_that_are_not_there_are_said_and_not_needed() {
    let dir = RunDir::new();
    let ok = common::goldens::root().join("bad/_ok/model");
    std::fs::create_dir(dir.path("model")).unwrap();
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(ok.join(file), dir.path("model").join(file)).unwrap();
    }
    let [check, sft] = both(&dir, &["--model.name", "model"]);
    check.succeeds().says(&["`model` holds no weights", "ready to train once the weights are there"]);
    sft.fails(1).says(&["model.safetensors"]);
}
