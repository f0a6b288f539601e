//! Several adapters in one job, each as if it were alone: losses, norms, learning rates and files of a run among
//! others are those of the same run by itself, bit for bit on the CPU.
#![cfg(feature = "flex")]

mod common;

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::run::RunDir;
use serde_json::Value;

/// Three runs that differ in all that a run can have of its own.
const RUNS: &str = r#"
[[runs]]
name = "plain"

[[runs]]
name = "wide"
seed = 7
max_steps = 4
model.lora.rank = 6
model.lora.alpha = 3.0
model.lora.dropout = 0.2
model.lora.target_modules = ["k_proj", "down_proj", "up_proj"]
data.batch_size = 3
data.micro_batch_size = 1
optim.lr = 3e-3
optim.max_norm = 0.1
scheduler = { type = "linear", warmup_steps = 1, decay_steps = 2 }

[[runs]]
name = "short"
seed = 3
max_steps = 7
model.lora.dropout = 0.1
model.lora.use_rslora = true
data.seq_len = 32
data.batch_size = 2
data.micro_batch_size = 2
data.seed = 5
optim = { type = "sgd", lr = 1e-2, momentum = 0.9, nesterov = false }
"#;

/// `run.toml` with these runs below it.
fn job(dir: &RunDir, runs: &str) {
    let text = dir.text("run.toml").replace("max_steps = 2", "max_steps = 6");
    dir.write("job.toml", &format!("{text}\n{runs}"));
}

fn sft(dir: &RunDir, file: &str, args: &[&str]) -> common::run::Ran {
    dir.run(&[&["sft", "@", file], args].concat())
}

/// The job, under way.
fn started(dir: &RunDir, args: &[&str]) -> Child {
    let mut command = dir.command(&[&["sft", "@", "job.toml"], args].concat());
    command.stderr(Stdio::null()).spawn().unwrap()
}

/// Until these are there.
#[track_caller]
fn wait(dir: &RunDir, files: &[&str]) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !files.iter().all(|file| dir.path(file).exists()) {
        assert!(Instant::now() < deadline, "{files:?} in\n{}", dir.listing());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A file in `control/add`, whole at once.
fn add(dir: &RunDir, name: &str, text: &str) {
    dir.write(name, text);
    std::fs::rename(dir.path(name), dir.path(&format!("out/control/add/{name}"))).unwrap();
}

/// One of the runs as a job of its own, from the resolved configuration that the job wrote for it.
fn alone(dir: &RunDir, out: &str, name: &str, args: &[&str]) {
    let text = dir.text(&format!("{out}/runs/{name}/configs/sft.toml"));
    dir.write("alone.toml", &text);
    let to = format!("alone/{name}");
    sft(dir, "alone.toml", &[&["--output-dir", &to], args].concat()).succeeds();
}

fn numbers(dir: &RunDir, out: &str) -> Vec<[Value; 7]> {
    let keys = [
        "step",
        "loss/mean",
        "optim/grad_norm",
        "optim/lr",
        "val/loss",
        "progress/num_tokens",
        "progress/num_trained_tokens",
    ];
    dir.rows(out).iter().map(|row| keys.map(|key| row.get(key).cloned().unwrap_or_default())).collect()
}

/// All numbers, the adapter and the checkpoint of a run are those that it has alone.
#[track_caller]
fn assert_as_alone(dir: &RunDir, among: &str, alone: &str, steps: usize) {
    let found = numbers(dir, among);
    assert_eq!(found.len(), steps, "{}", dir.listing());
    assert_eq!(found, numbers(dir, alone), "{among}");
    for file in [
        format!("weights/step_{steps}/lora_adapters/adapter_model.safetensors"),
        format!("weights/step_{steps}/lora_adapters/adapter_config.json"),
        format!("checkpoints/step_{steps}/trainable.safetensors"),
        format!("checkpoints/step_{steps}/optimizer.safetensors"),
        format!("checkpoints/step_{steps}/state.json"),
    ] {
        assert!(
            dir.bytes(&format!("{among}/{file}")) == dir.bytes(&format!("{alone}/{file}")),
            "{among}: {file}"
        );
    }
}

#[test]
fn three_runs_train_as_each_alone() {
    let dir = RunDir::new();
    let val =
        format!("[val]\ninterval = 2\neval_on_start = true\n[val.data]\nname = \"{}\"\nseq_len = 64\n", {
            let text = dir.text("run.toml");
            text.lines()
                .filter_map(|line| line.strip_prefix("name = \""))
                .nth(1)
                .unwrap()
                .trim_end_matches('"')
                .to_string()
        });
    job(&dir, &format!("{val}{RUNS}"));
    let ran = sft(&dir, "job.toml", &[]).succeeds();
    for (name, steps) in [("plain", 6), ("wide", 4), ("short", 7)] {
        alone(&dir, "out", name, &[]);
        let rows = dir.rows(&format!("out/runs/{name}"));
        assert_eq!(rows[0]["step"], 0, "the evaluation before the first step");
        let (among, single) = (format!("out/runs/{name}"), format!("alone/{name}"));
        let found = numbers(&dir, &among);
        assert_eq!(found.len(), steps + 1);
        assert_eq!(found, numbers(&dir, &single), "{name}");
        let file = format!("weights/step_{steps}/lora_adapters/adapter_model.safetensors");
        assert!(dir.bytes(&format!("{among}/{file}")) == dir.bytes(&format!("{single}/{file}")), "{name}");
    }
    ran.says(&["held-out loss", "wide has ended after 4 steps", "run ", "plain | Step 6"]);
    // The file of the job reads back to the same runs.
    dir.write("again.toml", &dir.text("out/configs/sft.toml"));
    sft(&dir, "again.toml", &["--output-dir", "again"]).succeeds();
    assert_eq!(numbers(&dir, "out/runs/short"), numbers(&dir, "again/runs/short"));
}

#[test]
fn runs_start_late_and_resume() {
    let dir = RunDir::new();
    let late = RUNS.replace("name = \"short\"", "name = \"short\"\nstart_step = 3");
    job(&dir, &late);
    let waits = |ran: &common::run::Ran| {
        let said = format!("{}{}", ran.stdout, ran.stderr);
        let at = |line: &str| said.find(line).unwrap_or_else(|| panic!("{line} in {said}"));
        assert!(
            at("plain | Step 3 ") < at("short | Step 1 ") && at("short | Step 1 ") < at("plain | Step 5 "),
            "{said}"
        );
    };
    waits(&sft(&dir, "job.toml", &[]).succeeds());
    for (name, steps) in [("plain", 6), ("wide", 4), ("short", 7)] {
        alone(&dir, "out", name, &[]);
        assert_as_alone(&dir, &format!("out/runs/{name}"), &format!("alone/{name}"), steps);
    }
    // Stopped after two steps of each, and resumed: the same again.
    job(&dir, &late.replace("max_steps = 4", "max_steps = 2").replace("max_steps = 7", "max_steps = 2"));
    let constant = ["--output-dir", "cut", "--max-steps", "2"];
    sft(&dir, "job.toml", &constant).fails(2).says(&["warmup_steps"]);
    job(&dir, &late);
    let mut child = dir.command(&["sft", "@", "job.toml", "--output-dir", "cut"]).spawn().unwrap();
    let stable = dir.path("cut/runs/wide/checkpoints/step_2/STABLE");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !stable.exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let resumed = sft(&dir, "job.toml", &["--output-dir", "cut", "--ckpt.resume-step", "-1"]).succeeds();
    assert!(resumed.all().contains("short | Step 1 "), "it had not begun: {}", resumed.all());
    for (name, steps) in [("plain", 6), ("wide", 4), ("short", 7)] {
        assert_as_alone(&dir, &format!("cut/runs/{name}"), &format!("alone/{name}"), steps);
    }
}

/// What a resumed job can't know from its file is said; and nobody else writes where it writes.
#[test]
fn a_resumed_job_tells_of_runs_that_were_added_or_stopped() {
    let dir = RunDir::new();
    let two = "[[runs]]\nname = \"a\"\n\n[[runs]]\nname = \"b\"\nmax_steps = 100000\n";
    job(&dir, two);
    let mut child = started(&dir, &["--ckpt.interval", "1"]);
    wait(&dir, &["out/control/add"]);
    let busy = sft(&dir, "run.toml", &["--clean-output-dir"]).fails(1);
    busy.says(&["another run is writing here"]);
    job(&dir, "[[runs]]\nname = \"c\"\n");
    sft(&dir, "job.toml", &[]).fails(1).says(&["another run is writing here"]);
    add(&dir, "new.toml", "max_steps = 3\n");
    std::fs::create_dir(dir.path("out/control/add/folder.toml")).unwrap();
    add(&dir, "late.toml", "start_step = 4\n");
    wait(&dir, &["out/runs/new/checkpoints/step_3/STABLE"]);
    wait(&dir, &["out/control/refused/folder.toml", "out/control/refused/late.toml"]);
    // A name that is taken where it goes, and a run that ends with the job's process.
    std::fs::create_dir_all(dir.path("out/control/done/b")).unwrap();
    wait(&dir, &["out/control/ended/new.toml"]);
    add(&dir, "cut.toml", "max_steps = 100000\n");
    wait(&dir, &["out/runs/cut/metrics.jsonl"]);
    dir.write("out/control/stop/b", "");
    wait(&dir, &["out/control/done/b.2"]);
    std::fs::remove_dir(dir.path("out/control/done/b")).unwrap();
    std::fs::rename(dir.path("out/control/done/b.2"), dir.path("out/control/done/b")).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let steps = dir.rows("out/runs/b").len() + 2;
    job(
        &dir,
        &two.replace("100000", &steps.to_string()).replace("name = \"a\"", "name = \"a\"\nmax_steps = 7"),
    );
    let resumed = sft(&dir, "job.toml", &["--ckpt.resume-step", "-1"]).succeeds();
    let resumed = resumed.says(&[
        "b was stopped by `control/stop` and goes on now",
        "the run `cut` was added while the job trained and isn't in its file: move `control/done/cut.toml` to",
    ]);
    assert!(!resumed.all().contains("`new`"), "it had ended: {}", resumed.all());
    dir.write("plain.toml", &dir.text("run.toml"));
    sft(&dir, "plain.toml", &[]).fails(1).says(&["a job of several runs has saved here"]);
    let said = sft(&dir, "job.toml", &["--ckpt.resume-step", "-1"]).succeeds();
    assert!(!said.all().contains("b was stopped"), "said once: {}", said.all());
    // A damaged checkpoint of one: the others can't go back to its step.
    job(
        &dir,
        &two.replace("100000", &(steps + 2).to_string())
            .replace("name = \"a\"", "name = \"a\"\nmax_steps = 9"),
    );
    let newest = dir.path(&format!("out/runs/b/checkpoints/step_{steps}"));
    std::fs::write(newest.join("trainable.safetensors"), "x").unwrap();
    let refused = sft(&dir, "job.toml", &["--ckpt.resume-step", "-1"]).fails(1);
    refused.says(&["run `b`: truncated", "is intact: move `", "away, then `--ckpt.resume-step -1`"]);
    std::fs::remove_dir_all(newest).unwrap();
    sft(&dir, "job.toml", &["--ckpt.resume-step", "-1"]).succeeds();
}

#[test]
fn a_mistaken_order_ends_no_job_of_several_ranks() {
    let dir = RunDir::new();
    job(&dir, "[[runs]]\nname = \"a\"\nmax_steps = 100000\n");
    let mut child = started(&dir, &["--device", "flex:0,1", "--ckpt.interval", "1000"]);
    wait(&dir, &["out/control/stop"]);
    dir.write("out/control/stop/nobody", "");
    add(&dir, "bad.toml", "optim.lrr = 1\n");
    wait(&dir, &["out/control/refused/nobody"]);
    wait(&dir, &["out/control/refused/bad.toml"]);
    dir.write("out/control/stop/a", "");
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_run_that_breaks_down_stops_and_the_others_go_on() {
    let dir = RunDir::new();
    let broken = "\n[[runs]]\nname = \"broken\"\noptim = { type = \"sgd\", lr = 1e38, momentum = 0.0, nesterov = false, \
                  max_skipped = 1, max_norm = \"None\" }\nmax_steps = 30\n";
    job(&dir, &format!("{RUNS}{broken}"));
    let ran = sft(&dir, "job.toml", &[]).fails(1);
    ran.says(&[
        "broken is stopped, the others go on",
        "not finite",
        "the other runs are saved",
        "(stopped by an error)",
    ]);
    for (name, steps) in [("plain", 6), ("wide", 4), ("short", 7)] {
        alone(&dir, "out", name, &[]);
        assert_as_alone(&dir, &format!("out/runs/{name}"), &format!("alone/{name}"), steps);
    }
}

#[test]
fn runs_are_added_and_stopped_while_others_train() {
    let dir = RunDir::new();
    job(
        &dir,
        "[[runs]]\nname = \"long\"\nmax_steps = 100000\n\n[[runs]]\nname = \"other\"\nmax_steps = 100000\n",
    );
    let mut child = started(&dir, &["--ckpt.interval", "1000"]);
    wait(&dir, &["out/control/add"]);
    add(&dir, "new.toml", "max_steps = 5\nmodel.lora.rank = 2\noptim.lr = 2e-3\n");
    add(&dir, "bad.toml", "output_dir = \"x\"\n");
    wait(&dir, &["out/runs/new/checkpoints/step_5/STABLE"]);
    dir.write("out/control/stop/other", "");
    wait(&dir, &["out/control/done/other"]);
    dir.write("out/control/stop/long", "");
    assert!(child.wait().unwrap().success());
    assert!(
        dir.path("out/control/refused/bad.toml").exists() && dir.path("out/control/ended/new.toml").exists()
    );
    alone(&dir, "out", "new", &[]);
    assert_as_alone(&dir, "out/runs/new", "alone/new", 5);
    let steps = dir.rows("out/runs/other").len();
    assert!(dir.path(&format!("out/runs/other/checkpoints/step_{steps}/STABLE")).exists());
}

#[test]
fn a_sweep_is_a_run_for_each_combination() {
    let dir = RunDir::new();
    let sweep = ["--optim.lr", "1e-3,1e-2", "--model.lora.rank", "2,4", "--max-steps", "3"];
    let ran = dir.run(&[&["sweep", "@", "run.toml"], &sweep[..]].concat()).succeeds();
    ran.says(&["lr=1e-3_rank=2", "held-out loss", "lr=1e-2_rank=4 | Step 3"]);
    alone(&dir, "out", "lr=1e-2_rank=2", &[]);
    assert_as_alone(&dir, "out/runs/lr=1e-2_rank=2", "alone/lr=1e-2_rank=2", 3);
    dir.run(&["sweep", "@", "run.toml", "--output-dir", "x"]).fails(2).says(&["nothing to sweep over"]);
    let refused = |args: &[&str], words: &[&str]| {
        let ran = dir.run(&[&["sweep", "@", "run.toml", "--output-dir", "x"], args].concat()).fails(2);
        ran.says(words);
        assert!(!dir.path("x").exists(), "nothing is made");
    };
    refused(&["--optim.lr", "1e-3,1e-3"], &["two runs would be called `lr=1e-3`"]);
    refused(&["--optim.lr=1e-3,0.001"], &["the runs `lr=1e-3` and `lr=0.001` are the same"]);
    refused(&["--optim.lr", "1,2", "--optim.lr", "3,4"], &["`--optim.lr` is swept over twice"]);
    refused(&["--optim.lr", "1e-3,fast"], &["`fast` is no number"]);
    refused(&["--device", "cuda:0,1"], &["nothing to sweep over"]);
}

#[test]
fn ranks_share_all_runs() {
    let dir = RunDir::new();
    let even = RUNS.replace("data.batch_size = 3", "data.batch_size = 4").replace(
        "data.batch_size = 2\ndata.micro_batch_size = 2",
        "data.batch_size = 2\ndata.micro_batch_size = 1",
    );
    job(&dir, &even);
    sft(&dir, "job.toml", &["--output-dir", "one"]).succeeds();
    sft(&dir, "job.toml", &["--output-dir", "two", "--device", "flex:0,1"]).succeeds();
    for name in ["plain", "wide", "short"] {
        let (one, two) = (dir.losses(&format!("one/runs/{name}")), dir.losses(&format!("two/runs/{name}")));
        assert_eq!(one.len(), two.len());
        for ((step, a), (_, b)) in one.iter().zip(&two) {
            assert!((a - b).abs() <= 1e-6 * a.abs(), "{name}, step {step}: {a} and {b}");
        }
    }
}

#[test]
fn what_a_run_cannot_have_is_named() {
    let dir = RunDir::new();
    let fails = |runs: &str, words: &[&str]| {
        job(&dir, runs);
        sft(&dir, "job.toml", &[]).fails(2).says(words);
    };
    fails("[[runs]]\noptim.lr = 1e-3\n", &["`runs[0]` has no `name`"]);
    fails("[[runs]]\nname = \"a/b\"\n", &["runs[0].name", "letters"]);
    fails("[[runs]]\nname = \"a\"\n[[runs]]\nname = \"a\"\n", &["two runs are called `a`"]);
    fails("[[runs]]\nname = \"a\"\noutput_dir = \"x\"\n", &["`runs[0].output_dir` is not a run's own"]);
    fails("[[runs]]\nname = \"a\"\nmodel.name = \"x\"\n", &["`runs[0].model.name` is not a run's own"]);
    fails("[[runs]]\nname = \"a\"\noptim.lrr = 1\n", &["lrr", "job.toml:"]);
    fails("[[runs]]\nname = \"a\"\nmodel.lora = \"None\"\n", &["trains more than an adapter"]);
    fails("[[runs]]\nname = \"a\"\ndata.batch_size = 3\n", &["isn't divisible by"]);
    assert!(!dir.path("out").exists());
}

#[test]
fn a_job_spares_what_one_of_its_runs_starts_from() {
    let dir = RunDir::new();
    job(&dir, "[[runs]]\nname = \"a\"\n[[runs]]\nname = \"b\"\n");
    sft(&dir, "job.toml", &["--max-steps", "2"]).succeeds();
    job(
        &dir,
        "[[runs]]\nname = \"a\"\n[[runs]]\nname = \"b\"\nmodel.lora.init_adapter_path = \"out/runs/a\"\n",
    );
    let ran = sft(&dir, "job.toml", &["--max-steps", "2", "--clean-output-dir"]).fails(1);
    ran.says(&["`model.lora.init_adapter_path`", "out/runs/a"]);
    dir.bytes("out/runs/a/weights/step_2/lora_adapters/adapter_model.safetensors");
}
