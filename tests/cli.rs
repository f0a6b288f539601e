//! The real binary, end to end: train, read the adapter back, resume, and every fault with its message.
#![cfg(feature = "flex")]

mod common;

use common::goldens::{Stored, tensors};
use common::neutral::Case;
use common::run::{Ran, RunDir, device};

#[test]
fn a_run_leaves_an_adapter_rows_a_log_and_its_configuration() {
    let dir = RunDir::new();
    dir.sft(&[]).succeeds().says(&[
        "optim.lr",
        "Step 2 | ",
        "trainable",
        "embertune merge --base",
        "Adapter: ",
    ]);
    for step in [1, 2] {
        assert_adapter(&dir, &format!("out/weights/step_{step}/lora_adapters"), 4);
        for file in ["trainable.safetensors", "optimizer.safetensors", "state.json", "sft.toml", "STABLE"] {
            dir.bytes(&format!("out/checkpoints/step_{step}/{file}"));
        }
    }
    let rows = dir.rows("out");
    assert_eq!(rows.len(), 2);
    for name in
        ["loss/mean", "optim/grad_norm", "optim/lr", "perf/throughput", "progress/num_tokens", "time/step"]
    {
        assert!(rows[1][name].as_f64().is_some_and(|v| v > 0.0), "{name} in {}", rows[1]);
    }
    assert!(dir.text("out/logs/trainer.log").contains("Step 1 | "));
    #[cfg(unix)]
    for file in ["checkpoints/step_1/trainable.safetensors", "weights/step_1/STABLE"] {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path| std::fs::metadata(dir.path(path)).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&format!("out/{file}")), mode("out/metrics.jsonl"), "{file}");
    }
    let resolved = dir.text("out/configs/sft.toml");
    assert!(resolved.contains("max_steps = 2") && resolved.contains("weight_decay"), "{resolved}");
}

/// Keys, shapes and the config of an adapter on q_proj and v_proj of the tiny model.
fn assert_adapter(dir: &RunDir, folder: &str, rank: usize) {
    let found = tensors(&dir.path(&format!("{folder}/adapter_model.safetensors")));
    assert_eq!(found.len(), 8, "2 layers × 2 modules × 2 matrices");
    let shape = |name: &str| -> &[usize] {
        let tensor: &Stored = found.get(name).unwrap_or_else(|| panic!("{name} in {:?}", found.keys()));
        assert!(tensor.values.iter().all(|v| v.is_finite()));
        &tensor.shape
    };
    for layer in [0, 1] {
        let prefix = format!("base_model.model.model.layers.{layer}.self_attn");
        assert_eq!(shape(&format!("{prefix}.q_proj.lora_A.weight")), [rank, 8]);
        assert_eq!(shape(&format!("{prefix}.q_proj.lora_B.weight")), [8, rank]);
        assert_eq!(shape(&format!("{prefix}.v_proj.lora_A.weight")), [rank, 8]);
        assert_eq!(shape(&format!("{prefix}.v_proj.lora_B.weight")), [4, rank]);
    }
    let config: serde_json::Value =
        serde_json::from_str(&dir.text(&format!("{folder}/adapter_config.json"))).unwrap();
    assert_eq!(config["peft_type"], "LORA");
    assert_eq!(config["r"], rank);
}

#[test]
fn a_lora_run_without_checkpoints_still_exports_its_adapter() {
    let dir = RunDir::new();
    dir.sft(&["--ckpt", "None"]).succeeds();
    assert_adapter(&dir, "out/weights/step_2/lora_adapters", 4);
    assert!(!dir.path("out/checkpoints").exists());
}

#[test]
fn full_fine_tuning_exports_a_model_that_trains_again() {
    let dir = RunDir::new();
    dir.sft(&["--model.lora", "None", "--max-steps", "1"]).succeeds().says(&["100.00 %"]);
    let model = dir.path("out/weights/step_1");
    assert_eq!(tensors(&model.join("model.safetensors")).len(), 25, "all weights of the tiny model");
    let model = model.to_str().unwrap();
    dir.sft(&["--model.name", model, "--output-dir", "again"]).succeeds();
}

#[test]
fn merge_writes_a_model_that_trains() {
    let dir = RunDir::new();
    let ran = dir.sft(&[]).succeeds();
    let line =
        ran.stdout.lines().find(|l| l.contains("embertune merge")).expect("the next command is printed");
    let args: Vec<&str> = line.split_whitespace().skip(1).collect();
    dir.run(&args).succeeds().says(&["weights changed"]);
    dir.sft(&["--model.name", "out/merged", "--output-dir", "again"]).succeeds();
    dir.run(&args).fails(1).says(&["merged"]);
    // The run's folder, its `weights` and its checkpoints lead to the adapter too.
    for (n, named) in
        ["out", "out/weights", "out/weights/step_2", "out/checkpoints/step_2"].iter().enumerate()
    {
        let (base, out) = (args[args.iter().position(|a| *a == "--base").unwrap() + 1], format!("m{n}"));
        let ran = dir.run(&["merge", "--base", base, "--adapter", named, "--out", &out]).succeeds();
        ran.says(&["Adapter: out/", "weights/step_2/lora_adapters"]);
        assert_eq!(dir.bytes(&format!("{out}/model.safetensors")), dir.bytes("out/merged/model.safetensors"));
    }
    // What is printed next time names a folder that isn't there.
    dir.sft(&["--max-steps", "3", "--ckpt.resume-step", "-1"]).succeeds().says(&["--out out/merged-2"]);
}

/// As in the seed: one configuration starts, the other resumes; `device` is the environment's.
#[test]
fn ci_configurations_start_and_resume() {
    let dir = RunDir::new();
    let configs = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/ci");
    let run = dir.text("run.toml");
    let of = |key: &str| {
        let line = run.lines().filter(|l| l.starts_with("name = ")).nth(usize::from(key == "data"));
        line.unwrap().trim_start_matches("name = ").trim_matches('"').to_string()
    };
    let (model, data, device) = (of("model"), of("data"), device());
    let train = |config: &str| {
        let config = format!("{configs}/{config}");
        let mut args = vec!["sft", "@", &config, "--model.name", &model, "--data.name", &data];
        args.extend(["--data.seq-len", "64", "--device", &device, "--output-dir", "out"]);
        dir.run(&args)
    };
    train("sft_lora_start.toml").succeeds().says(&["Step 10 | "]);
    train("sft_lora_resume.toml").succeeds().says(&["Resuming after step 10", "Step 11 | ", "Step 20 | "]);
    let losses = dir.losses("out");
    assert_eq!(losses.iter().map(|l| l.0).collect::<Vec<_>>(), (1..=20).collect::<Vec<_>>());
    assert!(losses[19].1 < losses[0].1, "the loss falls: {losses:?}");
    for step in [10, 20] {
        let folder = format!("out/weights/step_{step}/lora_adapters");
        let found = tensors(&dir.path(&format!("{folder}/adapter_model.safetensors")));
        assert_eq!(found.len(), 2 * 7 * 2, "2 layers × 7 modules × 2 matrices");
        for (name, tensor) in &found {
            let rank = tensor.shape[usize::from(name.contains("lora_B"))];
            assert_eq!(rank, 8, "{name}: {:?}", tensor.shape);
        }
        assert!(dir.text(&format!("{folder}/adapter_config.json")).contains("\"lora_alpha\": 16"));
    }
}

#[test]
fn held_out_loss_is_measured_at_the_start_and_every_interval() {
    let dir = RunDir::new();
    let data = dir.text("run.toml").lines().filter(|l| l.starts_with("name")).nth(1).unwrap().to_string();
    let val = format!("[val]\ninterval = 2\neval_on_start = true\n[val.data]\n{data}\nseq_len = 64\n");
    dir.write("val.toml", &val);
    dir.sft(&["@", "val.toml", "--max-steps", "5"])
        .succeeds()
        .says(&["Validation | Step 0", "Held-out loss"]);
    let rows = dir.rows("out");
    let with_loss: Vec<_> =
        rows.iter().filter(|r| r["val/loss"].is_number()).map(|r| r["step"].as_u64().unwrap()).collect();
    assert_eq!(with_loss, [0, 2, 4, 5]);
    let (first, last) = (rows[0]["val/loss"].as_f64().unwrap(), rows[5]["val/loss"].as_f64().unwrap());
    assert!(last < first, "{first} -> {last}");
}

#[test]
fn dry_run_writes_the_configuration_and_stops() {
    let dir = RunDir::new();
    dir.sft(&["--dry-run"]).succeeds().says(&["out/configs/sft.toml"]);
    assert!(!dir.path("out/metrics.jsonl").exists());
    // What was written is a configuration.
    dir.run(&["sft", "@", "out/configs/sft.toml", "--no-dry-run", "--output-dir", "again"]).succeeds();
}

#[test]
fn json_logging_makes_every_line_json() {
    let dir = RunDir::new();
    let ran = dir.sft(&["--log.json-logging"]).succeeds();
    for line in ran.stderr.lines() {
        assert!(serde_json::from_str::<serde_json::Value>(line).is_ok(), "{line}");
    }
}

#[test]
fn log_data_marks_what_is_trained() {
    let dir = RunDir::new();
    let ran = dir.sft(&["--log.log-data", "--max-steps", "1"]).succeeds().says(&["⟦"]);
    // Token 0 is `!`.
    assert!(!ran.all().contains("!!!!"), "padding is no document: {}", ran.all());
}

#[test]
fn help_lists_the_keys() {
    let dir = RunDir::new();
    dir.run(&["sft", "--help"]).succeeds().says(&[
        "Fine-tunes a language model",
        "Usage: embertune sft",
        "--optim.weight-decay",
        "--ckpt.resume-step",
    ]);
    dir.run(&["--help"]).succeeds().says(&["merge", "sft"]);
}

#[test]
fn nothing_is_overwritten_without_clean() {
    let dir = RunDir::new();
    dir.sft(&[]).succeeds();
    let adapter = "out/weights/step_2/lora_adapters/adapter_model.safetensors";
    let before = dir.bytes(adapter);
    dir.sft(&["--seed", "7"]).fails(1).says(&["step_2", "--ckpt.resume-step -1", "--clean-output-dir"]);
    assert_eq!(before, dir.bytes(adapter));
    dir.sft(&["--seed", "7", "--clean-output-dir"]).succeeds();
    assert_ne!(before, dir.bytes(adapter));
    assert_eq!(dir.rows("out").len(), 2);
}

#[test]
fn clean_deletes_nothing_when_the_new_run_cannot_start() {
    let dir = RunDir::new();
    dir.sft(&[]).succeeds();
    dir.sft(&["--clean-output-dir", "--data.name", "gone.jsonl"]).fails(1).says(&["gone.jsonl"]);
    dir.bytes("out/checkpoints/step_2/STABLE");
}

#[test]
fn retention_keeps_what_it_should() {
    let dir = RunDir::new();
    dir.sft(&["--max-steps", "6", "--ckpt.keep-last", "1", "--ckpt.keep-interval", "4"]).succeeds();
    for parent in ["out/checkpoints", "out/weights"] {
        let mut names: Vec<_> =
            std::fs::read_dir(dir.path(parent)).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["step_4", "step_6"], "{parent}");
    }
}

#[test]
fn going_on_from_an_earlier_step_keeps_the_old_branch() {
    let dir = RunDir::new();
    dir.sft(&["--max-steps", "4"]).succeeds();
    let old = dir.bytes("out/checkpoints/step_4/trainable.safetensors");
    dir.sft(&["--max-steps", "4", "--ckpt.resume-step", "2", "--optim.lr", "0.1"])
        .succeeds()
        .says(&["step_4.old-1", "`optim.lr`: the checkpoint has 0.01"]);
    assert_eq!(old, dir.bytes("out/checkpoints/step_4.old-1/trainable.safetensors"));
    assert_ne!(old, dir.bytes("out/checkpoints/step_4/trainable.safetensors"));
    assert_eq!(dir.losses("out").len(), 4);
}

#[test]
fn a_longer_run_moves_the_decay_and_says_so() {
    let dir = RunDir::new();
    let cosine = ["--scheduler.type", "cosine", "--scheduler.warmup-steps", "1", "--ckpt.resume-step", "-1"];
    dir.sft(&[&cosine[..], &["--max-steps", "2"]].concat()).succeeds().says(&["starting from the beginning"]);
    let longer = [&cosine[..], &["--max-steps", "4"]].concat();
    dir.sft(&longer).succeeds().says(&["warning: `max_steps`: the checkpoint has 2, the run 4"]);
    let rates: Vec<_> = dir.rows("out").iter().map(|r| r["optim/lr"].as_f64().unwrap()).collect();
    // Step 3 lies where a cosine of 3 steps after the warmup has it: lr·(1 + cos(π/3))/2.
    assert!((rates[2] - 1e-2 * 0.75).abs() < 1e-9, "{rates:?}");
}

#[test]
fn skip_keys_start_their_part_anew() {
    let dir = RunDir::new();
    dir.sft(&["--max-steps", "4"]).succeeds();
    let skip = [
        "--ckpt.resume-step",
        "-1",
        "--ckpt.skip-progress",
        "--ckpt.skip-dataloader",
        "--ckpt.skip-optimizer",
    ];
    dir.sft(&[&["--max-steps", "3", "--optim.type", "sgd"], &skip[..]].concat()).succeeds();
    assert_eq!(dir.losses("out").iter().map(|l| l.0).collect::<Vec<_>>(), [1, 2, 3]);
    dir.bytes("out/checkpoints/step_4.old-1/STABLE");
    dir.bytes("out/checkpoints/step_3/STABLE");
    // Without `skip_optimizer`, another optimizer can't go on.
    dir.sft(&["--ckpt.resume-step", "-1", "--max-steps", "5"]).fails(1).says(&[
        "`optim.type`",
        "sgd",
        "adamw",
    ]);
}

#[test]
fn data_faults_are_told_before_the_first_step() {
    for case in Case::of_area("data") {
        let dir = RunDir::new();
        let data = case.file("data", "_ok/train.jsonl");
        check(&case, dir.sft(&["--data.name", data.to_str().unwrap()]));
    }
}

#[test]
fn model_faults_are_told_before_the_first_step() {
    for case in Case::of_area("model") {
        let dir = RunDir::new();
        let model = case.file("model", "_ok/model");
        let tokenizer = case.file("tokenizer", "_ok/model");
        let args = ["--model.name", model.to_str().unwrap(), "--tokenizer.name", tokenizer.to_str().unwrap()];
        check(&case, dir.sft(&args));
    }
}

#[test]
fn adapter_faults_are_told_by_merge() {
    for case in Case::of_area("adapter") {
        let dir = RunDir::new();
        let (base, adapter) = (case.file("model", "_ok/model"), case.file("adapter", "_ok/adapter"));
        let folders =
            ["--base", base.to_str().unwrap(), "--adapter", adapter.to_str().unwrap(), "--out", "merged"];
        check(&case, dir.run(&[&["merge"], &folders[..]].concat()));
    }
}

fn check(case: &Case, ran: Ran) {
    let ran = ran.without_panic();
    let (name, failed) = (case.name(), ran.code != Some(0));
    match case.expected() {
        "error" => assert!(failed, "{name} must fail\n{}", ran.all()),
        "ok" => assert!(!failed, "{name} must work\n{}", ran.all()),
        "warning" => assert!(!failed, "{name} must go on\n{}", ran.all()),
        _ => {}
    }
    if failed {
        assert!(!ran.stderr.contains("Step 1 |"), "{name}: too late\n{}", ran.all());
        assert!(!ran.stderr.to_lowercase().contains("internal"), "{name}\n{}", ran.all());
    }
    if failed || case.expected().contains("warning") {
        let missing = case.missing_from(&ran.stderr);
        assert!(missing.is_empty(), "{name} must mention {missing:?}\n{}", ran.all());
    }
}

#[test]
fn configuration_faults_end_with_code_2() {
    let dir = RunDir::new();
    dir.sft(&["--optim.lrr", "1"]).fails(2).says(&["lrr", "lr"]);
    dir.sft(&["--scheduler.type", "cosine", "--scheduler.warmup-steps", "50"])
        .fails(2)
        .says(&["warmup_steps"]);
    dir.sft(&["--model.name", "modle"]).fails(1).says(&["modle"]);
    dir.sft(&["--data.name", "trian.jsonl"]).fails(1).says(&["trian.jsonl"]);
    dir.run(&["sft", "@", "run.tml"]).fails(2).says(&["run.tml: cannot read", "did you mean `run.toml`?"]);
    let ran = dir.run(&["tune"]);
    assert_eq!(ran.code, Some(2), "{}", ran.all());
    assert!(!dir.path("out").exists(), "a run that can't start writes nothing");
}

#[test]
fn a_run_starts_from_an_adapter() {
    let dir = RunDir::new();
    let val = ["--val", "--val.interval", "1", "--val.eval-on-start"];
    let data =
        dir.text("run.toml").lines().filter_map(|l| l.strip_prefix("name = \"")).nth(1).unwrap().to_string();
    let data = data.trim_end_matches('"');
    let val = [&val[..], &["--val.data.name", data, "--val.data.seq-len", "64"]].concat();
    dir.sft(&[&val[..], &["--output-dir", "first"]].concat()).succeeds();
    let from = ["--output-dir", "second", "--model.lora.init-adapter-path", "first"];
    dir.sft(&[&val[..], &from].concat()).succeeds().says(&["starts from the adapter `first/weights/step_2"]);
    let loss = |out: &str, step: usize| dir.rows(out)[step]["val/loss"].clone();
    assert_eq!(loss("first", 2), loss("second", 0), "it goes on where the first stopped, bit for bit");
    assert_ne!(loss("first", 0), loss("second", 0));
    dir.sft(&["--output-dir", "third", "--model.lora.init-adapter-path", "first", "--model.lora.rank", "8"])
        .fails(1)
        .says(&["has r 4", "this run has rank 8", "model.lora"]);
    dir.sft(&["--output-dir", "third", "--model.lora.init-adapter-path", "nowhere"])
        .fails(1)
        .says(&["init_adapter_path", "nowhere"]);
    assert!(!dir.path("third").exists());
}

#[test]
fn a_device_that_is_not_there_names_it() {
    let dir = RunDir::new();
    dir.sft(&["--device", "wgpu:99"]).fails(1).says(&["wgpu:99"]);
    let ran = dir.sft(&["--device", "wgpu:98,99"]).fails(1);
    assert!(ran.stderr.contains("wgpu:98") || ran.stderr.contains("wgpu:99"), "{}", ran.all());
}

#[test]
fn checkpoints_that_are_not_whole_name_the_file() {
    let dir = RunDir::new();
    dir.sft(&[]).succeeds();
    let resume = ["--ckpt.resume-step", "-1", "--max-steps", "3"];
    let newest = dir.path("out/checkpoints/step_2");

    // ckpt_truncated: cut the largest file in half.
    let files = std::fs::read_dir(&newest).unwrap().map(|e| e.unwrap().path());
    let largest = files.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    let whole = std::fs::read(&largest).unwrap();
    std::fs::write(&largest, &whole[..whole.len() / 2]).unwrap();
    let name = largest.file_name().unwrap().to_str().unwrap();
    dir.sft(&resume).fails(1).says(&[name, "truncated", "size", "--ckpt.resume-step 1"]);
    // A single changed byte.
    let mut changed = whole.clone();
    let last = changed.len() - 1;
    changed[last] ^= 1;
    std::fs::write(&largest, changed).unwrap();
    dir.sft(&resume).fails(1).says(&[name, "corrupt", "xxh3"]);
    std::fs::write(&largest, whole).unwrap();

    // ckpt_other_rank.
    dir.sft(&[&resume[..], &["--model.lora.rank", "8"]].concat()).fails(1).says(&[
        "`model.lora.rank`",
        "4",
        "8",
    ]);
    let targets = ["--model.lora.target-modules", "q_proj"];
    dir.sft(&[&resume[..], &targets].concat())
        .fails(1)
        .says(&["`model.lora.target_modules`", "q_proj, v_proj"]);
    dir.sft(&[&resume[..], &["--model.lora", "None"]].concat()).fails(1).says(&["`model.lora"]);
    dir.sft(&["--ckpt.resume-step", "7", "--max-steps", "9"]).fails(1).says(&["step_7", "[1, 2]"]);

    // ckpt_file_missing.
    std::fs::remove_file(newest.join("optimizer.safetensors")).unwrap();
    dir.sft(&resume).fails(1).says(&["optimizer.safetensors", "missing"]);

    // The older one is intact, and an unfinished save beside it is no checkpoint.
    std::fs::create_dir(dir.path("out/checkpoints/.step_3.partial-1")).unwrap();
    std::fs::create_dir(dir.path("out/checkpoints/step_9")).unwrap();
    dir.sft(&["--ckpt.resume-step", "1", "--max-steps", "3"]).succeeds().says(&["Resuming after step 1"]);
}

#[test]
fn resume_with_another_model_names_the_key() {
    let dir = RunDir::new();
    dir.sft(&[]).succeeds();
    // Another model: the same shapes, other weights.
    dir.sft(&["--model.lora", "None", "--output-dir", "full"]).succeeds();
    let other = ["--model.name", "full/weights/step_2", "--ckpt.resume-step", "-1", "--max-steps", "3"];
    dir.sft(&other).fails(1).says(&["`model.name`"]);
    // The same model in another place is the same.
    let model = common::goldens::root().join("bad/_ok/model");
    for entry in std::fs::read_dir(model).unwrap() {
        let path = entry.unwrap().path();
        std::fs::create_dir_all(dir.path("moved")).unwrap();
        std::fs::copy(&path, dir.path("moved").join(path.file_name().unwrap())).unwrap();
    }
    dir.sft(&["--model.name", "moved", "--ckpt.resume-step", "-1", "--max-steps", "3"]).succeeds();
}

#[cfg(unix)]
#[test]
fn ctrl_c_finishes_the_step_saves_and_ends_with_130() {
    use std::io::{BufRead, BufReader, Read};

    let dir = RunDir::new();
    let mut child = dir.spawn(&["--max-steps", "1000000", "--ckpt.interval", "1000000"]);
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("Step 3 |") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the run ended early");
    }
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest}");
    assert!(rest.contains("interrupted after step") && rest.contains("--ckpt.resume-step -1"), "{rest}");
    let last = dir.losses("out").last().unwrap().0;
    dir.bytes(&format!("out/checkpoints/step_{last}/STABLE"));
    let steps = (last + 2).to_string();
    dir.sft(&["--ckpt.resume-step", "-1", "--max-steps", &steps]).succeeds().says(&["Resuming after"]);
    assert_eq!(dir.losses("out").len() as u64, last + 2);
}

#[test]
fn preview_shows_what_is_trained_of_a_row() {
    let dir = RunDir::new();
    dir.write("rows.csv", "question,answer\nfirst,one\nsecond,two\n");
    let columns = ["--data.columns.prompt", "question", "--data.columns.completion", "answer"];
    let preview = |args: &[&str]| {
        dir.run(&[&["preview", "@", "run.toml", "--data.name", "rows.csv"], &columns[..], args].concat())
    };
    let shown = preview(&["--row", "2"]).succeeds().says(&["rows.csv:3 (prompt_completion): "]).stdout;
    let (about, text) = shown.split_once("\n\n").expect("a line about the row, then the row");
    assert!(about.ends_with("trained (⟦so⟧)"), "{about}");
    let (before, trained) = text.split_once('⟦').expect("something is trained");
    assert!(before.contains("second") && !before.contains("two"), "{before}");
    assert!(trained.contains("two") && trained.contains("⟧"), "{trained}");
    assert!(!shown.contains('\x1b'), "colours are for terminals");
    let ids = preview(&["--row=1", "--ids"]).succeeds().stdout;
    let trained = ids.lines().filter(|line| line.contains("⟦\"")).count();
    assert!(ids.contains(&format!(" {trained} trained")), "{ids}");
    preview(&["--row", "3"]).fails(1).says(&["there is no row 3: the last one is 2"]);
}

#[test]
fn check_tells_what_sft_will_do_and_writes_nothing() {
    let dir = RunDir::new();
    let check = |args: &[&str]| dir.run(&[&["check", "@", "run.toml"], args].concat());
    let told = check(&[]).succeeds().says(&["optim.lr", "(messages)", "up to ", "Verdict: ready to train"]);
    assert!(!dir.path("out").exists());
    let ran = dir.sft(&[]).succeeds();
    let line = |text: &str, word: &str| text.lines().find(|l| l.contains(word)).expect(word).to_string();
    let numbers = |line: String| {
        let digits = line.replace(',', "");
        let words = digits.split(|c: char| !c.is_ascii_digit()).filter(|w| w.len() > 1);
        words.map(str::to_string).collect::<Vec<_>>()
    };
    let parameters = numbers(line(&told.stdout, "  parameters  "));
    assert_eq!(parameters[..2], numbers(line(&ran.stderr, "Parameters: "))[..2]);
    for args in [&["--model.lora", "None"][..], &["--model.lora.modules-to-save", "lm_head"]] {
        let args = [args, &["--clean-output-dir"]].concat();
        let told = check(&args).succeeds();
        let ran = dir.sft(&args).succeeds();
        let parameters = numbers(line(&told.stdout, "  parameters  "));
        assert_eq!(parameters[..2], numbers(line(&ran.stderr, "Parameters: "))[..2], "{args:?}");
    }
    check(&["--output-dir", "new", "--data.seq-len", "8"]).fails(1).says(&["nothing to train on"]);
    check(&["--output-dir", "new", "--model.lora.target-modules", "query"])
        .fails(2)
        .says(&["matches no module"]);
}

#[test]
fn chat_tokens_that_the_base_never_learned_are_told() {
    let dir = RunDir::new();
    let told = |args: &[&str]| {
        dir.run(&[&["check", "@", "run.toml", "--output-dir", "new"], args].concat()).succeeds()
    };
    assert!(!told(&[]).stdout.contains("never trained"), "the tiny model's rows are all different");
    let ok = common::goldens::root().join("bad/_ok/model");
    std::fs::create_dir(dir.path("base")).unwrap();
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"] {
        std::fs::copy(ok.join(file), dir.path("base").join(file)).unwrap();
    }
    // The row of `<|im_end|>`, token 264, becomes zero.
    let mut bytes = dir.bytes("base/model.safetensors");
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let embedding = &tensors["model.embed_tokens.weight"];
    let [start, end] = [0, 1].map(|i| embedding["data_offsets"][i].as_u64().unwrap() as usize);
    let row = (end - start) / embedding["shape"][0].as_u64().unwrap() as usize;
    bytes[8 + header + start + 264 * row..][..row].fill(0);
    std::fs::write(dir.path("base/model.safetensors"), bytes).unwrap();
    let base = ["--model.name", "base"];
    told(&base).says(&["prints `<|im_end|>`, which this base model was never trained on", "modules_to_save"]);
    dir.sft(&base).succeeds().says(&["warning: ", "never trained on"]);
    let saved = [&base[..], &["--model.lora.modules-to-save", "embed_tokens", "lm_head"]].concat();
    assert!(!told(&saved).stdout.contains("never trained"));
}

/// Everything below a folder, with its content.
fn snapshot(dir: &RunDir) -> Vec<(String, Vec<u8>)> {
    let files = dir.listing();
    files.lines().map(|path| (path.to_string(), std::fs::read(path).unwrap_or_default())).collect()
}

#[test]
fn clean_deletes_only_what_a_run_wrote() {
    let dir = RunDir::new();
    dir.sft(&[]).succeeds();
    let mine = [
        "out/notes.md",
        "out/checkpoints/best/model.bin",
        "out/checkpoints/step_7/mine.txt",
        "out/weights/step_1/mine.txt",
        "out/configs/mine.toml",
        "out/logs/other.log",
    ];
    for file in mine {
        std::fs::create_dir_all(dir.path(file).parent().unwrap()).unwrap();
        dir.write(file, "mine");
    }
    dir.sft(&["--clean-output-dir", "--max-steps", "1"])
        .succeeds()
        .says(&["that no run wrote, such as `mine.toml`", "step_1.old-1"]);
    for file in mine {
        let moved = file.replace("step_7", "step_7.old-1").replace("step_1/", "step_1.old-1/");
        assert_eq!(dir.text(&moved), "mine", "{moved}");
    }
    assert!(!dir.path("out/checkpoints/step_2").exists());
    dir.bytes("out/weights/step_1/STABLE");
    assert_eq!(dir.rows("out").len(), 1);
    // What only a run wrote leaves no folder behind.
    dir.sft(&["--output-dir", "other"]).succeeds();
    dir.sft(&["--output-dir", "other", "--clean-output-dir", "--ckpt", "None", "--model.lora", "None"])
        .succeeds();
    assert!(!dir.path("other/checkpoints").exists() && !dir.path("other/weights").exists());
    dir.sft(&["--output-dir", ""]).fails(2).says(&["`output_dir` is empty"]);
    let inside = ["--data.name", ".", "--output-dir", "new/out"];
    dir.sft(&inside).fails(2).says(&["`data.name` = `.` holds `output_dir`", "data.name = \"*.jsonl\""]);
}

#[test]
fn clean_spares_the_inputs_of_the_run() {
    let dir = RunDir::new();
    dir.sft(&["--model.lora", "None"]).succeeds();
    let before = snapshot(&dir);
    let model = ["--model.name", "out/weights/step_2", "--clean-output-dir"];
    dir.sft(&model).fails(1).says(&["`model.name`", "out/weights/step_2"]);
    let tokenizer = ["--tokenizer.name", "./out/checkpoints/../weights/step_1", "--clean-output-dir"];
    dir.sft(&tokenizer).fails(1).says(&["`tokenizer.name`", "out/weights/step_1"]);
    assert!(before == snapshot(&dir), "nothing changed");

    let dir = RunDir::new();
    dir.sft(&[]).succeeds();
    let before = snapshot(&dir);
    for adapter in ["out", "out/weights/step_1/lora_adapters"] {
        let warm = ["--model.lora.init-adapter-path", adapter, "--clean-output-dir"];
        dir.sft(&warm).fails(1).says(&["`model.lora.init_adapter_path`", "lies in it"]);
        assert!(before == snapshot(&dir), "nothing changed");
    }
}

#[cfg(unix)]
#[test]
fn one_run_writes_to_a_folder_at_a_time() {
    use std::io::{BufRead, BufReader};

    let dir = RunDir::new();
    let long = ["--max-steps", "1000000", "--ckpt.interval", "1000000"];
    let mut first = dir.spawn(&long);
    let mut lines = BufReader::new(first.stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("Step 1 |") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the run ended early");
    }
    for second in [&["--max-steps", "1"][..], &["--clean-output-dir"], &["--ckpt.resume-step", "-1"]] {
        dir.sft(second).fails(1).says(&["another run is writing here", "hint: "]);
    }
    let shared = ["--output-dir", "elsewhere", "--ckpt.output-dir", "out"];
    dir.sft(&shared).fails(1).says(&["another run is writing here"]);
    // A dry run writes beside what the run goes by.
    let config = dir.bytes("out/configs/sft.toml");
    dir.sft(&["--dry-run"]).succeeds().says(&["out/configs/sft.dry-run.toml"]);
    assert!(config == dir.bytes("out/configs/sft.toml"));
    // A kill lets go of the lock.
    first.kill().unwrap();
    first.wait().unwrap();
    dir.sft(&[]).succeeds();
}

#[cfg(unix)]
#[test]
fn ctrl_c_in_setup_changes_nothing() {
    use std::io::{BufRead, BufReader, Read};

    let dir = RunDir::new();
    // Setup takes a while: reading many rows.
    let row = dir.text("run.toml").lines().filter(|l| l.starts_with("name")).nth(1).unwrap().to_string();
    let rows = std::fs::read_to_string(row.trim_start_matches("name = ").trim_matches('"')).unwrap();
    let rows = rows.trim_end().to_string() + "\n";
    dir.write("many.jsonl", &rows.repeat(200_000 / rows.lines().count()));
    let mut child = dir.spawn(&["--data.name", "many.jsonl", "--no-data.cache", "--log.json-logging"]);
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut text = String::new();
    while !text.contains("reading rows") {
        assert!(lines.read_line(&mut text).unwrap() > 0, "the run ended early: {text}");
    }
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    lines.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{text}");
    assert!(text.contains("stopping: ") && text.contains("nothing was changed in `out`"), "{text}");
    for line in text.lines() {
        assert!(serde_json::from_str::<serde_json::Value>(line).is_ok(), "{line}");
    }
    assert!(!dir.path("out").exists());
}

#[test]
fn a_foreign_step_folder_is_set_aside() {
    let dir = RunDir::new();
    for file in ["out/checkpoints/step_2/mine.txt", "out/weights/step_1/mine.txt"] {
        std::fs::create_dir_all(dir.path(file).parent().unwrap()).unwrap();
        dir.write(file, "mine");
    }
    dir.sft(&[]).succeeds().says(&["step_2.old-1", "step_1.old-1", "it is no save"]);
    assert_eq!(dir.text("out/checkpoints/step_2.old-1/mine.txt"), "mine");
    assert_eq!(dir.text("out/weights/step_1.old-1/mine.txt"), "mine");
    dir.bytes("out/checkpoints/step_2/STABLE");
}

#[test]
fn skip_progress_alone_trains_at_a_rate() {
    let dir = RunDir::new();
    let cosine = ["--scheduler.type", "cosine", "--scheduler.warmup-steps", "1", "--max-steps", "3"];
    dir.sft(&cosine).succeeds();
    let rates = |dir: &RunDir| -> Vec<f64> {
        dir.rows("out").iter().map(|r| r["optim/lr"].as_f64().unwrap()).collect()
    };
    let before = rates(&dir);
    dir.sft(&[&cosine[..], &["--ckpt.resume-step", "-1", "--ckpt.skip-progress"]].concat())
        .succeeds()
        .says(&["the schedule starts anew"]);
    assert_eq!(before, rates(&dir));
}

#[test]
fn epochs_are_told_like_steps() {
    let dir = RunDir::new();
    let cosine = ["--scheduler.type", "cosine", "--scheduler.warmup-steps", "0", "--max-steps", "None"];
    let ran = dir.sft(&[&cosine[..], &["--num-epochs", "1"]].concat()).succeeds();
    ran.says(&["--ckpt.resume-step -1 --num-epochs 2"]);
    let done = dir.rows("out").len();
    let resume = ["--ckpt.resume-step", "-1"];
    dir.sft(&[&cosine[..], &["--num-epochs", "1"], &resume].concat())
        .succeeds()
        .says(&["nothing to do: ", &format!("ends at step {done}")]);
    dir.sft(&[&cosine[..], &["--num-epochs", "2"], &resume].concat())
        .succeeds()
        .says(&["warning: `num_epochs`: the checkpoint has 1, the run 2"]);
    // The rule is the configuration's, whoever finds it broken.
    let long =
        ["--scheduler.type", "linear", "--scheduler.decay-steps", "0", "--scheduler.warmup-steps", "5000"];
    let epochs = ["--max-steps", "None", "--num-epochs", "1", "--output-dir", "long"];
    dir.sft(&[&long[..], &epochs].concat()).fails(2).says(&["warmup_steps", "steps per epoch"]);
    assert!(!dir.path("long").exists());
}

#[test]
fn nothing_to_do_is_said_and_is_no_error() {
    let dir = RunDir::new();
    dir.sft(&[]).succeeds();
    let resume = ["--ckpt.resume-step", "-1"];
    dir.sft(&resume).succeeds().says(&["nothing to do: 2 steps are done"]);
    dir.sft(&[&resume[..], &["--max-steps", "1"]].concat())
        .succeeds()
        .says(&["nothing to do: 2 steps are done"]);
    assert_eq!(dir.rows("out").len(), 2);
}

#[test]
fn the_command_that_goes_on_goes_on() {
    let dir = RunDir::new();
    let run = dir.text("run.toml");
    dir.write("run.toml", &format!("clean_output_dir = true\n{run}"));
    let ran = dir.sft(&["--clean-output-dir=true", "--max-steps", "1"]).succeeds();
    let line = ran.stdout.lines().find(|l| l.contains("--ckpt.resume-step")).expect("the command is printed");
    let args: Vec<&str> = line.split_whitespace().skip(1).collect();
    dir.run(&args).succeeds().says(&["Resuming after step 1", "Step 2 |"]);
}

#[test]
fn rows_that_are_cut_are_kept() {
    let dir = RunDir::new();
    dir.sft(&["--max-steps", "4"]).succeeds();
    let before = dir.bytes("out/metrics.jsonl");
    dir.sft(&["--max-steps", "4", "--ckpt.resume-step", "2"]).succeeds().says(&["metrics.jsonl.old-1"]);
    assert!(before == dir.bytes("out/metrics.jsonl.old-1"));
    dir.sft(&["--max-steps", "5", "--ckpt.resume-step", "4"]).succeeds();
    assert!(!dir.path("out/metrics.jsonl.old-2").exists(), "no row was cut");
}

#[test]
fn weights_of_a_cut_off_save_do_not_pile_up() {
    let dir = RunDir::new();
    let resume = ["--ckpt.resume-step", "-1"];
    for _ in 0..3 {
        dir.sft(&resume).succeeds();
        // As a kill leaves it between weights and checkpoint.
        std::fs::remove_dir_all(dir.path("out/checkpoints/step_2")).unwrap();
    }
    dir.bytes("out/weights/step_2.old-1/STABLE");
    assert!(!dir.path("out/weights/step_2.old-2").exists(), "{}", dir.listing());
    // Weights alone are no run to resume.
    std::fs::remove_dir_all(dir.path("out/checkpoints")).unwrap();
    let ran = dir.sft(&[]).fails(1).says(&["another run has saved here", "--clean-output-dir"]);
    assert!(!ran.stderr.contains("--ckpt.resume-step"), "{}", ran.all());
}

#[test]
fn a_folder_that_cannot_be_written_is_told_early() {
    let dir = RunDir::new();
    dir.write("file", "");
    dir.sft(&["--output-dir", "file"]).fails(1).says(&["`output_dir`", "is a file"]);
    dir.sft(&["--ckpt.output-dir", "file/in"]).fails(1).says(&["`ckpt.output_dir`", "is a file"]);
    assert!(!dir.path("out").exists());
}

#[test]
fn the_log_ends_with_how_the_run_ended() {
    let dir = RunDir::new();
    let ran = dir.sft(&["--optim.lr", "1e30", "--optim.max-norm", "None", "--max-steps", "30"]).fails(1);
    let ran = ran.says(&["not finite", "start anew", " is skipped", "from row ", "`optim.max_skipped`"]);
    assert_eq!(ran.stderr.matches(" is skipped: ").count(), 3, "{}", ran.all());
    let log = dir.text("out/logs/trainer.log");
    assert!(
        log.contains("error: step ") && log.trim_end().lines().last().unwrap().starts_with("hint: "),
        "{log}"
    );
    let ran = dir.sft(&["--log.json-logging", "--data.name", "gone.jsonl"]);
    let last: serde_json::Value = serde_json::from_str(ran.stderr.lines().last().unwrap()).unwrap();
    assert_eq!(last["level"], "ERROR");
    // Before there is a configuration too.
    let ran = dir.sft(&["--log.json-logging", "--optim.lrr", "1"]);
    let last: serde_json::Value = serde_json::from_str(ran.stderr.lines().last().unwrap()).unwrap();
    assert_eq!(last["level"], "ERROR");
}

#[test]
fn merge_takes_names_and_a_runs_weights() {
    let dir = RunDir::new();
    let small = ["--max-steps", "1", "--val", "None", "--scheduler.type", "constant", "--device", "flex"];
    let ran = dir.run(&[&["sft", "--output-dir", "out"], &small[..]].concat()).succeeds();
    let line = ran.stdout.lines().find(|l| l.contains("embertune merge")).unwrap();
    let args: Vec<&str> = line.split_whitespace().skip(1).collect();
    let printed = dir.run(&args).succeeds();
    assert!(!printed.stderr.contains("was made for"), "{}", printed.all());
    let named = ["merge", "--base", "embertune/tiny", "--adapter", "out/weights/step_1", "--out"];
    let ran = dir.run(&[&named[..], &["named"]].concat()).succeeds();
    assert!(!ran.stderr.contains("was made for"), "{}", ran.all());
    assert!(dir.bytes("named/model.safetensors") == dir.bytes("out/merged/model.safetensors"));
    dir.run(&[&named[..], &["named"]].concat()).fails(1).says(&["`--out` is there already", "named"]);
    let unknown = ["merge", "--base", "no-such", "--adapter", "out/weights/step_1", "--out", "x"];
    dir.run(&unknown).fails(1).says(&["`--base`", "no-such"]);
}
