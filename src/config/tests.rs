mod messages;
mod written;

use super::*;
use crate::error::{Error, Problem};

fn load_args(args: &[&str]) -> crate::Result<Loaded> {
    load(&args.iter().map(|arg| arg.to_string()).collect::<Vec<_>>())
}

fn problems<T: std::fmt::Debug>(result: crate::Result<T>) -> Vec<Problem> {
    match result {
        Err(Error::Config(problems)) => problems,
        other => panic!("wanted problems, got {other:?}"),
    }
}

/// The problems of a file that ends after two steps, as they are printed.
fn told(toml: &str) -> String {
    let text = format!("max_steps = 2\n{toml}");
    let lines: Vec<String> =
        problems(SftConfig::from_toml(&text, "x.toml")).iter().map(|p| p.to_string()).collect();
    lines.join("\n")
}

fn told_of(args: &[&str]) -> String {
    problems(load_args(args)).iter().map(|p| p.to_string()).collect::<Vec<_>>().join("\n")
}

fn good(toml: &str) -> SftConfig {
    SftConfig::from_toml(&format!("max_steps = 200\n{toml}"), "x.toml").unwrap()
}

fn good_args(args: &[&str]) -> SftConfig {
    load_args(args).unwrap().config
}

/// A folder with these files; arguments may name them by their names.
fn with_files(files: &[(&str, &str)], args: &[&str]) -> crate::Result<Loaded> {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let place = |arg: &&str| match files.iter().any(|(name, _)| name == arg) {
        true => dir.path().join(arg).display().to_string(),
        false => arg.to_string(),
    };
    load(&args.iter().map(place).collect::<Vec<_>>())
}

#[test]
fn defaults_are_prime_rl_s() {
    let config = SftConfig::default();
    assert_eq!(config.output_dir, PathBuf::from("outputs"));
    assert_eq!((config.max_steps, config.dist_timeout_seconds), (None, 600));
    assert_eq!((config.val, config.ckpt), (None, None));
    assert_eq!((config.model.name.as_str(), config.model.seq_len), ("Qwen/Qwen3-0.6B", 2048));
    assert_eq!((config.model.ac, config.model.lora), (None, None));
    let data = SftDataConfig::default();
    assert_eq!((data.batch_size, data.seq_len, data.micro_batch_size), (128, 128, 1));
    assert_eq!((data.name.as_str(), data.shuffle, data.seed), ("PrimeIntellect/Reverse-Text-SFT", true, 0));
    assert_eq!(config.data, DataConfig::Sft(data));
    let lora = LoraConfig::default();
    assert_eq!((lora.rank, lora.alpha, lora.dropout), (16, 32.0, 0.0));
    let optim = config.optim;
    assert_eq!((optim.lr, optim.weight_decay, optim.max_norm), (1e-6, 0.01, Some(1.0)));
    assert_eq!(
        optim.kind,
        OptimKind::AdamW { betas1: 0.9, betas2: 0.999, eps: 1e-8, moments_dtype: "float32".into() }
    );
    assert_eq!(config.scheduler, SchedulerConfig::Constant);
    let ckpt = CkptConfig::default();
    assert_eq!(
        (ckpt.interval, ckpt.resume_step, ckpt.keep_last, ckpt.weights_only),
        (None, None, None, false)
    );
    let weights = ckpt.weights.unwrap();
    assert_eq!((weights.save_sharded, weights.save_adapter_separately), (true, false));
    assert_eq!((config.log.level.as_str(), config.log.file, config.log.log_data), ("info", true, false));
}

#[test]
fn types_have_defaults_of_their_own() {
    assert_eq!(
        good("[optim]\ntype = \"muon\"").optim.kind,
        OptimKind::Muon { mu: 0.95, betas1: 0.9, betas2: 0.95 }
    );
    assert_eq!(good("[optim]\ntype = \"sgd\"").optim.kind, OptimKind::Sgd { nesterov: true, momentum: 0.9 });
    assert_eq!(good("[optim]\ntype = \"sign_sgd\"").optim.kind, OptimKind::SignSgd);
    assert_eq!(
        good("[scheduler]\ntype = \"linear\"\nmin_lr = 1e-9").scheduler,
        SchedulerConfig::Linear { warmup_steps: 10, decay_steps: 10, min_lr: 1e-9 }
    );
    assert_eq!(
        good("[data]\ntype = \"fake\"\nlength = \"variable\"").data,
        DataConfig::Fake(FakeDataConfig { length: FakeLength::Variable, ..FakeDataConfig::default() })
    );
}

// ---- Merging and flags.

#[test]
fn files_merge_left_to_right_and_flags_win() {
    let a =
        "max_steps = 5\n[model.lora]\nrank = 4\ntarget_modules = [\"q_proj\", \"k_proj\"]\n[optim]\nlr = 1.0";
    let b = "[model.lora]\ntarget_modules = [\"v_proj\"]\n[optim]\nweight_decay = 0.5\nlr = 2.0";
    let args = ["--optim.lr", "3", "@", "a.toml", "@", "b.toml", "--no-data.shuffle"];
    let config = with_files(&[("a.toml", a), ("b.toml", b)], &args).unwrap().config;
    let lora = config.model.lora.unwrap();
    assert_eq!((lora.rank, lora.target_modules), (4, TargetModules::List(vec!["v_proj".into()])));
    assert_eq!((config.optim.lr, config.optim.weight_decay), (3.0, 0.5));
    assert!(matches!(config.data, DataConfig::Sft(data) if !data.shuffle));
    assert_eq!(config.model.name, "Qwen/Qwen3-0.6B", "with a file, the embedded default is not below");
}

#[test]
fn without_a_file_flags_lie_on_the_embedded_default() {
    let base = good_args(&[]);
    assert_eq!(base.model.name, "embertune/tiny");
    let changed = good_args(&["--max-steps", "5"]);
    assert_eq!(changed, SftConfig { max_steps: Some(5), ..base });
}

#[test]
fn a_section_comes_from_a_file_of_its_own() {
    let files =
        [("m.toml", "name = \"m\"\n[lora]\nrank = 2"), ("r.toml", "max_steps = 1\nmodel.name = \"r\"")];
    let config = with_files(&files, &["--model", "@", "m.toml", "@", "r.toml"]).unwrap().config;
    assert_eq!((config.model.name.as_str(), config.model.lora.unwrap().rank), ("m", 2));
}

#[test]
fn a_later_type_leaves_the_keys_of_the_earlier_one_behind() {
    let config = good_args(&["--data.type", "fake", "--optim.type", "sgd"]);
    let (base, DataConfig::Fake(data)) = (good_args(&[]), config.data) else { panic!("wanted fake data") };
    assert_eq!((data.seq_len, data.batch_size), (base.data.seq_len(), base.data.batch_size()));
    let file = [("a.toml", "max_steps = 1\n[optim]\nbetas1 = 0.5"), ("b.toml", "[optim]\ntype = \"sgd\"")];
    assert!(with_files(&file, &["@", "a.toml", "@", "b.toml"]).is_ok());
    assert_eq!(problems(with_files(&file, &["@", "b.toml", "@", "a.toml"])).len(), 1);
}

#[test]
fn an_at_sign_after_a_boolean_is_a_file() {
    let config = with_files(&[("r.toml", "max_steps = 1")], &["--dry-run", "@", "r.toml"]).unwrap().config;
    assert!(config.dry_run);
    assert_eq!(config.max_steps, Some(1));
}

#[test]
fn an_at_sign_may_be_glued_to_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.toml");
    std::fs::write(&file, "max_steps = 7").unwrap();
    assert_eq!(good_args(&[&format!("@{}", file.display())]).max_steps, Some(7));
}

#[test]
fn bare_flags_switch_sections_on_and_none_switches_off() {
    let base = "max_steps = 100\n[ckpt]\ninterval = 3";
    let with = |args: &[&str]| {
        let args: Vec<&str> = ["@", "x.toml"].iter().chain(args).copied().collect();
        with_files(&[("x.toml", base)], &args).unwrap().config
    };
    assert_eq!(with(&["--model.ac"]).model.ac, Some(AcConfig { freq: 1 }));
    assert_eq!(with(&["--ckpt"]).ckpt.unwrap().interval, Some(3), "what the file says stays");
    assert_eq!(with(&["--ckpt", "None"]).ckpt, None);
    assert_eq!(with(&["--no-ckpt"]).ckpt, None);
    assert_eq!(with(&["--ckpt.no-weights"]).ckpt.unwrap().weights, None);
    assert_eq!(with(&["--ckpt", "None", "--ckpt"]).ckpt, Some(CkptConfig::default()));
    assert_eq!(with(&["--optim.max-norm", "None"]).optim.max_norm, None);
    assert_eq!(
        good("ckpt = \"None\"\nmodel.lora = \"None\"\noptim.max_norm = \"None\"").optim.max_norm,
        None
    );
}

#[test]
fn flags_take_every_kind_of_value() {
    let target = |words: &[&str]| {
        let args: Vec<&str> = ["--model.lora.target-modules"].iter().chain(words).copied().collect();
        good_args(&args).model.lora.unwrap().target_modules
    };
    let list = |names: &[&str]| TargetModules::List(names.iter().map(|n| n.to_string()).collect());
    assert_eq!(target(&["q_proj", "v_proj"]), list(&["q_proj", "v_proj"]));
    assert_eq!(target(&["q_proj"]), list(&["q_proj"]));
    assert_eq!(target(&["[\"q_proj\", \"v_proj\"]"]), list(&["q_proj", "v_proj"]));
    assert_eq!(target(&["all-linear"]), TargetModules::AllLinear);
    assert_eq!(target(&[".*\\.[qv]_proj"]), TargetModules::Regex(".*\\.[qv]_proj".into()));
    assert_eq!(target(&["[qv]_proj"]), TargetModules::Regex("[qv]_proj".into()));

    let args = ["--model.lora", "{\"rank\": 2, \"rank_pattern\": {\"q_proj\": 4}}", "--ckpt.resume-step=-1"];
    let config = good_args(&args);
    let lora = config.model.lora.unwrap();
    assert_eq!((lora.rank, lora.rank_pattern), (2, vec![("q_proj".into(), 4)]));
    assert_eq!(config.ckpt.unwrap().resume_step, Some(-1));
    let lora =
        good_args(&["--model.lora.layers-to-transform", "0", "2", "--model.lora.use-rslora"]).model.lora;
    assert!(lora.is_some_and(|lora| lora.layers_to_transform == Some(vec![0, 2]) && lora.use_rslora));
    assert!(!good_args(&["--log.file", "false"]).log.file);
}

#[test]
fn json_for_a_text_stays_text() {
    let kwargs = "{\"enable_thinking\": false}";
    let prompts = ["--sample.prompts", "{\"a\": 1}", "b"];
    let config =
        good_args(&[&["--sample.chat-template-kwargs", kwargs, "--sample.system={}"], &prompts[..]].concat());
    let sample = config.sample.unwrap();
    assert_eq!(sample.chat_template_kwargs.as_deref(), Some(kwargs));
    assert_eq!(sample.system.as_deref(), Some("{}"));
    assert_eq!(sample.prompts, ["{\"a\": 1}", "b"]);
}

#[test]
fn toml_forms_of_targets_and_patterns() {
    let lora = |text: &str| good(&format!("[model.lora]\n{text}")).model.lora.unwrap();
    assert_eq!(lora("target_modules = \"all-linear\"").target_modules, TargetModules::AllLinear);
    assert_eq!(lora("target_modules = \".*q_proj\"").target_modules, TargetModules::Regex(".*q_proj".into()));
    let patterns = lora("rank_pattern = { v_proj = 8, \"layers.1.q_proj\" = 4 }").rank_pattern;
    assert_eq!(
        patterns,
        [("v_proj".to_string(), 8), ("layers.1.q_proj".to_string(), 4)],
        "in the file's order"
    );
    assert_eq!(lora("init_lora_weights = \"gaussian\"").init_lora_weights, InitLoraWeights::Gaussian);
    assert_eq!(lora("init_lora_weights = true").init_lora_weights, InitLoraWeights::Default);
}
