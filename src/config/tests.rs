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
    assert_eq!(optim.kind, OptimKind::AdamW { betas1: 0.9, betas2: 0.999, eps: 1e-8 });
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

// ---- Messages.

#[test]
fn everything_wrong_is_told_at_once_in_file_order() {
    let text = "sed = 3\n[model.lora]\nrank = 0\n[optim]\nlr = \"fast\"\nmomentum = 0.5\n[data]\nbatch_size = 5\nmicro_batch_size = 2";
    assert_eq!(
        told(text),
        "x.toml:2: unknown key `sed`\n    hint: did you mean `seed`?\n\
         x.toml:4: `model.lora.rank` is 0, wanted at least 1\n\
         x.toml:6: `optim.lr` is the string \"fast\", wanted a number\n\
         x.toml:7: `optim.momentum` is a key of `type = \"sgd\"`, and this is `type = \"adamw\"`\n    \
         hint: take it out, or change `optim.type`\n\
         x.toml:9: `data.batch_size` is 5, which isn't divisible by `data.micro_batch_size` = 2\n    \
         hint: make `data.batch_size` a multiple of `data.micro_batch_size`"
    );
}

#[test]
fn unknown_keys_name_what_was_meant() {
    let cases = [
        ("[scheduler]\nwarmpu_steps = 1", "scheduler.warmpu_steps", "did you mean `scheduler.warmup_steps`?"),
        ("[schedular]", "schedular", "did you mean `scheduler`?"),
        ("lr = 1", "lr", "`lr` belongs in `[optim]`"),
        (
            "[optim]\nmax_steps = 1",
            "optim.max_steps",
            "`max_steps` belongs at the top of the file, before the first section",
        ),
        ("shuffle = true", "shuffle", "`shuffle` belongs in `[data]` or `[val.data]`"),
        ("[data]\nmicro-batch-size = 1", "data.micro-batch-size", "did you mean `micro_batch_size`?"),
        ("[model.lora]\nlora_alhpa = 1", "model.lora.lora_alhpa", "did you mean `alpha`?"),
        ("[model.lora]\nr = 1", "model.lora.r", "did you mean `rank`?"),
        ("[optim]\nbetas = [0.9, 0.9]", "optim.betas", "did you mean `betas1` and `betas2`?"),
        ("learning_rate = 1", "learning_rate", "did you mean `optim.lr`?"),
        ("batchsize = 1", "batchsize", "did you mean `data.batch_size`?"),
        ("xyzzy = 1", "xyzzy", "docs/config.md lists every key"),
        ("[model.ac]\nxyzzy = 1", "model.ac.xyzzy", "`[model.ac]` has `freq`"),
    ];
    for (text, key, hint) in cases {
        let line = 1 + text.lines().count();
        assert_eq!(told(text), format!("x.toml:{line}: unknown key `{key}`\n    hint: {hint}"));
    }
}

#[test]
fn a_mistyped_key_breaks_no_rule() {
    let text = "[scheduler]\ntype = \"cosine\"\nwarmpu_steps = 1";
    assert_eq!(
        told(text),
        "x.toml:4: unknown key `scheduler.warmpu_steps`\n    hint: did you mean `warmup_steps`?"
    );
    let missing = SftConfig::from_toml("max_step = 2", "x.toml");
    assert_eq!(problems(missing).len(), 1);
}

#[test]
fn wrong_types_say_what_is_wanted() {
    let cases = [
        ("seed = 4.5", "`seed` is the number 4.5, wanted an integer"),
        ("seed = -1", "`seed` is -1, wanted at least 0"),
        ("seed = 99999999999999999999", "`seed` is `99999999999999999999`, wanted an integer"),
        ("dry_run = \"yes\"", "`dry_run` is the string \"yes\", wanted `true` or `false`"),
        ("device = 1", "`device` is the integer 1, wanted a string"),
        ("seed = 2026-11-30", "`seed` is `2026-11-30`, wanted an integer"),
        ("optim.lr = nan", "`optim.lr` is nan, wanted a finite number"),
        ("optim.lr = -1e-3", "`optim.lr` is -0.001, wanted at least 0"),
        ("optim.betas1 = 1.0", "`optim.betas1` is 1, wanted at least 0 and below 1"),
        ("data.splits = [\"a\", 1]", "`data.splits[1]` is the integer 1, wanted a string"),
        ("data.splits = \"a\"", "`data.splits` is the string \"a\", wanted a list of strings"),
        ("model.lora.rank_pattern = { q = 0 }", "`model.lora.rank_pattern` is 0, wanted at least 1"),
        ("model.lora.rank_pattern = [1]", "`model.lora.rank_pattern` is a list, wanted a table of integers"),
        (
            "model.lora.init_lora_weights = false",
            "`model.lora.init_lora_weights` is `false`, wanted `true` or `\"gaussian\"`",
        ),
    ];
    for (text, message) in cases {
        assert_eq!(told(text), format!("x.toml:2: {message}"));
    }
    assert_eq!(
        told("ckpt = true"),
        "x.toml:2: `ckpt` is `true`, wanted a table\n    hint: write `[ckpt]` with its keys below, or `--ckpt`"
    );
}

#[test]
fn words_name_the_choices() {
    assert_eq!(
        told("[optim]\ntype = \"adamwx\"\nmomentum = 0.1"),
        "x.toml:3: `optim.type` is `adamwx`, wanted `adamw`, `sgd`, `muon` or `sign_sgd`\n    hint: did you mean `adamw`?"
    );
    assert_eq!(
        told("model.dtype = \"bf16\""),
        "x.toml:2: `model.dtype` is `bf16`, wanted `auto`, `float32`, `float16` or `bfloat16`"
    );
    assert_eq!(
        told("data.stopping_strategy = \"all\""),
        "x.toml:2: `data.stopping_strategy` is `all`, wanted `all_exhausted` or `first_exhausted`"
    );
}

#[test]
fn flags_are_named_as_they_were_given() {
    assert_eq!(
        told_of(&["--max-steps", "--data.micro-batch-size=x", "--seed", "1", "2", "--optim.lr-rate", "1"]),
        "--max-steps: `max_steps` is given without a value, wanted an integer\n\
         --data.micro-batch-size: `data.micro_batch_size` is `x`, wanted an integer\n\
         --seed: `seed` is `1 2`, wanted an integer\n\
         --optim.lr-rate: unknown key `optim.lr_rate`\n    hint: `[optim]` has `type`, `betas1`, `betas2`, `eps`, `lr`, `weight_decay` and `max_norm`"
    );
    assert_eq!(
        told_of(&["x.toml", "--no-dry-run", "1", "@"]),
        "x.toml: this stands alone\n    hint: a file is `@ file.toml`, a key is `--section.key value`\n\
         --no-dry-run: a value after `--no-`\n    hint: give `--key value` or `--no-key`, not both\n\
         @: a file is missing after `@`\n    hint: write `@ file.toml`"
    );
    assert_eq!(
        told_of(&["@", "no/such.toml"]),
        "no/such.toml: cannot read this file: No such file or directory (os error 2)"
    );
}

#[test]
fn toml_syntax_shows_the_line() {
    assert_eq!(
        told("seed =\n[optim\nlr = 1"),
        "x.toml:2: a value is missing\n    2 | seed =\n      |       ^\n\
         x.toml:3: unclosed table, expected `]`\n    3 | [optim\n      |       ^"
    );
    assert_eq!(told("seed = 1\nseed = 2"), "x.toml:3: duplicate key\n    3 | seed = 2\n      | ^");
}

#[test]
fn refused_keys_give_reason_and_way_out() {
    assert_eq!(
        told("[wandb]\nproject = \"x\""),
        "x.toml:2: `wandb` is not supported: metrics stay on this machine\n    \
         hint: `metrics.jsonl` in the run folder has every step"
    );
    assert_eq!(
        told("[model]\nattn = \"sdpa\""),
        "x.toml:3: `model.attn` is not supported: there is one attention, always within documents\n    hint: take it out"
    );
    assert!(
        told("[val.data]\npack_function = \"cat\"")
            .starts_with("x.toml:3: `val.data.pack_function` is not supported: ")
    );
    assert_eq!(
        told("[ckpt.weights]\nsave_format = \"torch\""),
        "x.toml:3: `ckpt.weights.save_format` is `torch`, wanted `safetensors`\n    hint: a torch file is a pickle, \
         which can run code when it is loaded; safetensors loads everywhere"
    );
}

#[test]
fn refused_keys_are_not_keys() {
    let reference = reference::Reference::new();
    for refused in refused::REFUSED {
        let (section, name) = refused.key.rsplit_once('.').unwrap_or(("", refused.key));
        let page = reference.pages.iter().find(|page| page.path == section).expect(refused.key);
        assert!(!page.has(name), "`{}` is both a key and refused", refused.key);
    }
}

// ---- Rules between keys: text, then key and words of the only problem.

#[test]
fn rules_between_keys() {
    let fits = "[scheduler]\ntype = \"linear\"\nwarmup_steps = 1\ndecay_steps = 1";
    good(fits);
    let cases = [
        (
            "num_epochs = 1\ndata.type = \"fake\"",
            "`num_epochs` is set, but `data.type = \"fake\"` has no end",
        ),
        (
            "[scheduler]\ntype = \"cosine\"\nwarmup_steps = 50",
            "`scheduler.warmup_steps` is 50, but the run has `max_steps` = 2",
        ),
        (
            "[scheduler]\ntype = \"linear\"\nwarmup_steps = 1\ndecay_steps = 2",
            "`scheduler.warmup_steps` + `scheduler.decay_steps` is 1 + 2, but the run has `max_steps` = 2",
        ),
        (
            "scheduler = { type = \"cosine\", warmup_steps = 0, min_lr = 1e-3 }",
            "`scheduler.min_lr` is 0.001, above `optim.lr` = 0.000001",
        ),
        (
            "data.subsets = [\"a\"]\ndata.splits = [\"a\", \"b\"]",
            "`data.subsets` has 1 entries, `data.splits` has 2",
        ),
        (
            "data.splits = [\"a\"]\ndata.probabilities = [0.5, 0.5]",
            "`data.splits` has 1 entries, `data.probabilities` has 2",
        ),
        (
            "data.splits = [\"a\", \"b\"]\ndata.probabilities = [0.5, 0.6]",
            "`data.probabilities` sum to 1.1, wanted 1",
        ),
        ("data.probabilities = [1.0]", "`data.probabilities` is set, but there is only one source"),
        ("data.splits = []", "`data.splits` is empty"),
        ("val.interval = 5", "`[val]` is on, but `[val.data]` is missing"),
        ("val.data.type = \"fake\"", "`val.data.type` is `fake`, wanted `sft`"),
        ("optim.max_norm = 0", "`optim.max_norm` is 0, which scales every gradient to nothing"),
        ("optim = { type = \"sgd\", momentum = 0 }", "`optim.nesterov` needs `optim.momentum` above 0"),
        (
            "model.lora.target_modules = []",
            "`model.lora.target_modules` is empty, so there is nothing to train",
        ),
        (
            "model.lora.target_modules = \"all-linear\"\nmodel.lora.layers_to_transform = [0]",
            "`model.lora.layers_to_transform` needs a list in `model.lora.target_modules`",
        ),
        (
            "model.lora.exclude_modules = \"all-linear\"",
            "`model.lora.exclude_modules` is \"all-linear\", which leaves nothing",
        ),
        (
            "ckpt.weights.save_adapter_separately = true",
            "`ckpt.weights.save_adapter_separately` needs `[model.lora]`: without it there is no adapter",
        ),
        (
            "ckpt.weights_only = true\nckpt.weights = \"None\"",
            "`ckpt.weights_only` is on, but `ckpt.weights` is off: nothing would be saved",
        ),
        (
            "ckpt.resume_step = -1\nclean_output_dir = true",
            "`clean_output_dir` would delete what `ckpt.resume_step` resumes from",
        ),
        ("ckpt.resume_step = 3", "`ckpt.resume_step` is 3, after the end of the run at `max_steps` = 2"),
        ("ckpt.resume_step = -2", "`ckpt.resume_step` is -2, wanted at least -1"),
        (
            "data.seq_len = 200\nmodel.max_position_embeddings = 100",
            "`data.seq_len` is 200, above `model.max_position_embeddings` = 100",
        ),
        ("device = \"cpu\"", "`device` is `cpu`, wanted `auto`, `cuda`, `wgpu`, `vulkan` or `flex`"),
        ("device = \"cuda:x\"", "`device` is `cuda:x`, wanted indices after the colon"),
        ("device = \"auto:1\"", "`device` is `auto:1`, but `auto` takes no index"),
        ("device = \"cuda:1,1\"", "`device` is `cuda:1,1`, which names a device twice"),
    ];
    for (text, message) in cases {
        let found = problems(SftConfig::from_toml(&format!("max_steps = 2\n{text}"), "x.toml"));
        let messages: Vec<&str> = found.iter().map(|p| p.message.as_str()).collect();
        assert_eq!(messages, [message], "{text}");
        assert!(found[0].place.starts_with("x.toml:"), "{text}: {}", found[0].place);
    }
    let regex = told("model.lora.target_modules = \"q_proj(\"");
    assert!(regex.starts_with(
        "x.toml:2: `model.lora.target_modules` has `q_proj(`, which is not a regular expression: "
    ));
    let endless = problems(SftConfig::from_toml("", "x.toml"));
    assert_eq!(
        endless[0].to_string(),
        "neither `max_steps` nor `num_epochs` is set, so the run would never end\n    hint: set `max_steps = 200`, or `num_epochs = 3`"
    );
}

// ---- Writing.

#[test]
fn a_written_file_reads_back_equal() {
    let texts = [
        "",
        "[ckpt]\nweights = \"None\"",
        "[ckpt]\ninterval = 3\nresume_step = -1\noutput_dir = \"a/ü \\\"b\"\n[ckpt.weights]\nsave_sharded = false",
        "[model.lora]\nrank = 3\nalpha = 0.1\ntarget_modules = \"all-linear\"\ninit_lora_weights = \"gaussian\"",
        "[model.lora]\ntarget_modules = \"(?:a|b).*\"\nexclude_modules = [\"x\"]\nalpha_pattern = { \"a.b\" = 1e-7 }",
        "[model.lora]\nlayers_to_transform = [3, 1]\nmodules_to_save = [\"lm_head\"]\nrank_pattern = { z = 1, a = 2 }",
        "[optim]\ntype = \"muon\"\nlr = 5e-324\nmax_norm = \"None\"\n[scheduler]\ntype = \"cosine\"",
        "[optim]\ntype = \"sgd\"\nlr = 0.1\n[scheduler]\ntype = \"linear\"\nmin_lr = 0.01\n[val.data]\nname = \"x\"",
        "seed = 9223372036854775807\n[optim]\ntype = \"sign_sgd\"\n[data]\ntype = \"fake\"\ninput_ids = \"random\"",
        "[tokenizer]\nchat_template = \"{% if x %}\\n'''\\\"{{ y }}{% endif %}\"\n[data]\nsplits = [\"a\"]\nprobabilities = [1]",
    ];
    for text in texts {
        let config = good(text);
        let written = config.to_toml();
        assert_eq!(SftConfig::from_toml(&written, "written").unwrap(), config, "{written}");
    }
}

#[test]
fn a_written_file_holds_every_key() {
    let written = good("[model.lora]\n[model.ac]\n[val.data]\n[ckpt]").to_toml();
    let table: toml::Table = written.parse().unwrap();
    for page in reference::Reference::new().pages {
        let section =
            page.path.split('.').filter(|p| !p.is_empty()).fold(Some(&table), |t, p| t?.get(p)?.as_table());
        for row in &page.rows {
            let default = page.rows[0].default.trim_matches('"');
            let mut rows = page.rows.iter().filter(|other| other.name == row.name);
            let of_default = rows.any(|row| row.types.is_empty() || row.types.contains(&default));
            assert_eq!(
                section.is_some_and(|t| t.contains_key(row.name)),
                of_default,
                "{}.{}",
                page.path,
                row.name
            );
        }
    }
}

#[test]
fn differences_name_what_was_changed() {
    let told: Vec<String> = good("[model.lora]\nrank = 4\n[optim]\ntype = \"sgd\"\nlr = 1e-4\nmomentum = 0.5\n[ckpt]\nweights = \"None\"")
        .differences()
        .iter()
        .map(|d| format!("{} = {} (default {})", d.key, d.value, d.default))
        .collect();
    assert_eq!(
        told,
        [
            "max_steps = 200 (default None)",
            "model.lora = on (default None)",
            "model.lora.rank = 4 (default 16)",
            "optim.type = \"sgd\" (default \"adamw\")",
            "optim.momentum = 0.5 (default 0.9)",
            "optim.lr = 1e-4 (default 1e-6)",
            "ckpt = on (default None)",
            "ckpt.weights = None (default on)",
        ]
    );
    assert_eq!(SftConfig::default().differences(), []);
}

// ---- Plan.

#[test]
fn a_plan_divides_rows_over_ranks_and_micro_batches() {
    let config = good(
        "device = \"cuda:0,2\"\n[data]\nbatch_size = 24\nmicro_batch_size = 3\nseq_len = 10\n[ckpt]\nresume_step = 7",
    );
    let plan = Plan::new(&config, 2).unwrap();
    assert_eq!((plan.rows_per_step, plan.rows_per_micro_batch, plan.micro_batches_per_step), (24, 3, 4));
    assert_eq!((plan.seq_len, plan.tokens_per_step, plan.world_size), (10, 240, 2));
    assert_eq!(plan.device, DeviceSpec { kind: DeviceKind::Cuda, indices: vec![0, 2] });
    assert_eq!((plan.resume, plan.checkpoint_dir), (Some(Resume::Step(7)), Some("outputs".into())));
    let odd = problems(Plan::new(&config, 5));
    assert_eq!(
        odd[0].message,
        "`data.batch_size` is 24, which isn't divisible by 5 ranks × `data.micro_batch_size` = 3"
    );
}

#[test]
fn a_plan_checks_what_was_built_in_code() {
    let config = SftConfig { max_steps: Some(1), ..SftConfig::default() };
    assert!(Plan::new(&config, 1).is_ok());
    let optim = OptimConfig { lr: f64::NAN, ..OptimConfig::default() };
    let found = problems(Plan::new(&SftConfig { optim, ..config }, 1));
    assert_eq!(found[0].message, "`optim.lr` is nan, wanted a finite number");
}

#[test]
fn a_run_ends_at_steps_or_epochs() {
    let plan = |text: &str| Plan::new(&SftConfig::from_toml(text, "x.toml").unwrap(), 1).unwrap();
    assert_eq!(plan("max_steps = 10").total_steps(Some(3)).unwrap(), 10);
    assert_eq!(plan("max_steps = 10\nnum_epochs = 2").total_steps(Some(3)).unwrap(), 6);
    assert_eq!(plan("num_epochs = 2").total_steps(Some(30)).unwrap(), 60);
    assert_eq!(
        problems(plan("num_epochs = 2").total_steps(None))[0].message,
        "`num_epochs` is set, but the data has no end"
    );
    let short = plan("num_epochs = 2\n[scheduler]\ntype = \"cosine\"").total_steps(Some(3));
    assert_eq!(
        problems(short)[0].message,
        "`scheduler.warmup_steps` is 10, but the run has a length of `num_epochs` × steps per epoch = 6"
    );
}

#[test]
fn rows_end_where_the_model_s_positions_do() {
    let plan = |text: &str| Plan::new(&good(&format!("data.seq_len = 100\n{text}")), 1).unwrap();
    assert_eq!(plan("").check_positions(100).unwrap(), None);
    assert_eq!(
        problems(plan("").check_positions(64))[0].to_string(),
        "`data.seq_len` is 100, above the model's `max_position_embeddings` = 64\n    hint: set `data.seq_len` to at \
         most 64; `model.max_position_embeddings = 100` trains beyond it"
    );
    let lifted = plan("model.max_position_embeddings = 128").check_positions(64).unwrap();
    assert_eq!(
        lifted.unwrap(),
        "`data.seq_len` is 100: positions from 64 on are new to the model, whose `max_position_embeddings` is 64"
    );
}
