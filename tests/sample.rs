//! `[sample]`: prompts are answered while a run trains, and nothing of the training changes.
#![cfg(feature = "flex")]

mod common;

use common::run::{Ran, RunDir};
use serde_json::Value;

/// Prompts of all kinds, drawn from.
const SAMPLE: &str = r#"
[sample]
prompts = ["q1", "q22 and more"]
file = "prompts.jsonl"
interval = 2
sample_on_start = true
max_new_tokens = 6
temperature = 0.8
top_p = 0.9
batch_size = 2
"#;
const PROMPTS: &str =
    r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q3"}]}"#;

/// A run of six steps with dropout, as it is and with samples.
fn folder() -> RunDir {
    let dir = RunDir::new();
    let text = dir.text("run.toml").replace("max_steps = 2", "max_steps = 6");
    let text = text.replace("alpha = 8.0", "alpha = 8.0\ndropout = 0.2");
    dir.write("run.toml", &text);
    dir.write("asked.toml", &format!("{text}{SAMPLE}"));
    dir.write("prompts.jsonl", PROMPTS);
    dir
}

fn sft(dir: &RunDir, file: &str, out: &str, more: &[&str]) -> Ran {
    dir.run(&[&["sft", "@", file, "--output-dir", out], more].concat())
}

/// The lines of answers, by their beginnings.
fn count(ran: &Ran, what: &str) -> usize {
    ran.all().matches(what).count()
}

fn assert_same_training(dir: &RunDir, a: &str, b: &str, steps: usize) {
    let numbers = |out: &str| -> Vec<[Value; 4]> {
        let keys = ["step", "loss/mean", "optim/grad_norm", "optim/lr"];
        dir.rows(out).iter().map(|row| keys.map(|key| row[key].clone())).collect()
    };
    assert_eq!(numbers(a).len(), steps);
    assert_eq!(numbers(a), numbers(b));
    for file in [
        format!("weights/step_{steps}/lora_adapters/adapter_model.safetensors"),
        format!("checkpoints/step_{steps}/trainable.safetensors"),
        format!("checkpoints/step_{steps}/optimizer.safetensors"),
    ] {
        assert!(dir.bytes(&format!("{a}/{file}")) == dir.bytes(&format!("{b}/{file}")), "{file}");
    }
}

#[test]
fn samples_change_nothing_of_the_training_and_a_run_with_them_resumes() {
    let dir = folder();
    let plain = sft(&dir, "run.toml", "plain", &[]).succeeds();
    assert_eq!(count(&plain, "Sample |"), 0);
    let asked = sft(&dir, "asked.toml", "asked", &[]).succeeds();
    for step in [0, 2, 4, 6] {
        assert_eq!(count(&asked, &format!("Sample | Step {step} | ")), 3, "{}", asked.all());
    }
    assert_eq!(count(&asked, "Sample |"), 12, "no other steps");
    for prompt in ["q1 -> ", "q22 and more -> ", "q3 -> "] {
        assert_eq!(count(&asked, prompt), 4);
    }
    assert_same_training(&dir, "plain", "asked", 6);

    // Stopped after three steps; goes on with other prompts.
    sft(&dir, "asked.toml", "cut", &["--max-steps", "3"]).succeeds();
    let more = ["--ckpt.resume-step", "-1", "--sample.interval", "5", "--sample.prompts", "q7"];
    let resumed = sft(&dir, "asked.toml", "cut", &more).succeeds();
    assert_eq!(count(&resumed, "Sample | Step 5 | "), 2);
    assert_eq!(count(&resumed, "Sample | Step 6 | "), 2);
    assert_eq!(count(&resumed, "Sample | Step 0 | "), 0, "the run has begun long ago");
    assert_same_training(&dir, "plain", "cut", 6);
}

#[test]
fn ranks_answer_once_and_each_run_with_its_own_adapter() {
    let dir = folder();
    sft(&dir, "run.toml", "plain", &["--device", "flex:0,1"]).succeeds();
    let asked = sft(&dir, "asked.toml", "asked", &["--device", "flex:0,1"]).succeeds();
    assert_eq!(count(&asked, "Sample | Step 2 | "), 3);
    assert_same_training(&dir, "plain", "asked", 6);
    assert!(!dir.text("asked/logs/rank_1.log").contains("Sample |"));

    // The answers after the last step are those of the adapters that are saved then.
    let runs = "\n[[runs]]\nname = \"slow\"\n\n[[runs]]\nname = \"fast\"\noptim.lr = 3e-1\n";
    let sample = "[sample]\nprompts = [\"q1\"]\nmax_new_tokens = 8\ninterval = 100\n";
    dir.write("jobs.toml", &format!("{}{sample}{runs}", dir.text("run.toml")));
    let ran = sft(&dir, "jobs.toml", "jobs", &[]).succeeds();
    let text = dir.text("run.toml");
    let model = text.lines().find_map(|line| line.strip_prefix("name = \"")).unwrap().trim_end_matches('"');
    let answer = |adapter: &[&str]| {
        let args =
            ["generate", "--model", model, "--device", "flex", "--max-new-tokens", "8", "--json", "q1"];
        let row: Value =
            serde_json::from_str(&dir.run(&[&args[..], adapter].concat()).succeeds().stdout).unwrap();
        row["text"].as_str().unwrap().to_string()
    };
    let [base, slow, fast] =
        [&[][..], &["--adapter", "jobs/runs/slow"], &["--adapter", "jobs/runs/fast"]].map(answer);
    assert!(base != fast && slow != fast, "the adapters have something to say: {base:?} {slow:?} {fast:?}");
    for (name, text) in [("slow", slow), ("fast", fast)] {
        let line = format!("{name} | Sample | Step 6 | q1 -> {text}");
        assert_eq!(count(&ran, &line), 1, "`{line}` in {}", ran.all());
    }
}

#[test]
fn what_cannot_be_asked_is_told_before_the_first_step() {
    let dir = folder();
    let fails = |more: &[&str], words: &[&str]| {
        sft(&dir, "asked.toml", "out", more).fails(2).says(words);
        assert!(!dir.path("out/weights").exists());
    };
    fails(&["--sample.prompts", "q1", ""], &["`sample.prompts` has an empty prompt, number 2"]);
    fails(
        &["--sample.prompts", "[]", "--sample.file", "None"],
        &["neither `sample.prompts` nor `sample.file`"],
    );
    fails(&["--sample.top-p", "0"], &["`sample.top_p` is 0"]);
    fails(&["--sample.temperature", "0"], &["nothing is drawn", "sample.temperature = 0.7"]);
    fails(&["--sample.raw", "--sample.system", "s"], &["`sample.system` has no place"]);
    fails(&["--sample.chat-template-kwargs", "[1]"], &["`chat_template_kwargs`"]);
    fails(
        &["--sample.max-new-tokens", "60"],
        &["prompt 1 of `[sample]` has", "wanted 1 to 64", "sample.max_new_tokens"],
    );
    sft(&dir, "asked.toml", "out", &["--sample.file", "nowhere.txt"]).fails(1).says(&["nowhere.txt"]);
    dir.write("bad.jsonl", "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}");
    sft(&dir, "asked.toml", "out", &["--sample.file", "bad.jsonl"])
        .fails(1)
        .says(&["bad.jsonl:1", "nothing to answer"]);
    dir.run(&["check", "@", "asked.toml", "--sample.max-new-tokens", "60"])
        .fails(2)
        .says(&["wanted 1 to 64"]);
}

#[test]
fn answers_of_a_model_whose_weights_overflow_are_left_out() {
    let dir = RunDir::new();
    dir.write("asked.toml", &format!("{}{SAMPLE}", dir.text("run.toml")));
    dir.write("prompts.jsonl", PROMPTS);
    let ran = sft(&dir, "asked.toml", "out", &["--max-steps", "1", "--optim.lr", "1e38"]).succeeds();
    ran.says(&["`[sample]` after step 1 has no answers: the model's output isn't a number"]);
}
