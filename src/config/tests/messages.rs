//! What is told about faults, word for word.

use super::*;

#[test]
fn everything_wrong_is_told_at_once_in_file_order() {
    let text = "sed = 3\n[model.lora]\nrank = 0\n[optim]\nlr = \"fast\"\nmomentum = 0.5\n[data]\nbatch_size = 5\nmicro_batch_size = 2";
    assert_eq!(
        told(text),
        "x.toml:2: unknown key `sed`\n    hint: did you mean `seed`?\n\
         x.toml:4: `model.lora.rank` is 0, wanted 1 to 65536\n\
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
        (
            "xyzzy = 1",
            "xyzzy",
            "docs/config.md lists every key; docs/coming_from.md names those of other trainers",
        ),
        (
            "[model.ac]\nxyzzy = 1",
            "model.ac.xyzzy",
            "`[model.ac]` has `freq`; docs/coming_from.md names those of other trainers",
        ),
    ];
    for (text, key, hint) in cases {
        let line = 1 + text.lines().count();
        assert_eq!(told(text), format!("x.toml:{line}: unknown key `{key}`\n    hint: {hint}"));
    }
}

#[test]
fn keys_of_other_trainers_lead_to_the_page_about_them() {
    let keys = [
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "packing",
        "bf16",
        "load_in_4bit",
        "warmup_ratio",
        "data.packing",
        "model.load_in_4bit",
    ];
    for key in keys {
        let told = told(&format!("{key} = 1"));
        assert!(told.contains("docs/coming_from.md names those of other trainers"), "{told}");
        assert!(told.matches("`type`").count() <= 1, "a key is named once: {told}");
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
        ("model.lora.rank_pattern = { q = 0 }", "`model.lora.rank_pattern` is 0, wanted 1 to 65536"),
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
         --optim.lr-rate: unknown key `optim.lr_rate`\n    hint: `[optim]` has `type`, `betas1`, `betas2`, `eps`, `moments_dtype`, `lr`, `weight_decay`, `max_norm` and `max_skipped`; docs/coming_from.md names those of other trainers"
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
        "x.toml:2: `wandb` is not supported: the program doesn't speak to Weights & Biases itself\n    \
         hint: set `monitors.command = [\"python3\", \"examples/wandb_monitor.py\"]`, which hands it every row"
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
fn monitors_are_checked_before_a_run() {
    assert!(told("[monitors]\ncommand = [\"\"]").contains("`monitors.command` begins with an empty word"));
    assert!(
        told("[monitors.file]\npath = \"x\"").contains("`metrics.jsonl` is always written"),
        "prime-rl's key for it"
    );
    #[cfg(feature = "hub")]
    for text in ["[heartbeat]", "[heartbeat]\nurl = \"example.com\"", "[heartbeat]\nurl = \"ftp://x\""] {
        assert!(told(text).contains("wanted a URL"), "{}", told(text));
    }
}

#[test]
fn every_key_of_prime_rl_is_taken_or_refused() {
    let reference = reference::Reference::new();
    let keys = "model tokenizer data optim scheduler log val ckpt wandb output_dir clean_output_dir max_steps \
        memory_profiler_path trace_path bench dist_timeout_seconds loss_impl heartbeat deployment slurm dry_run \
        model.name model.trust_remote_code model.seq_len model.attn model.impl model.compile model.ac model.ac.freq \
        model.ac_offloading model.fsdp_cpu_offload model.optim_cpu_offload model.reshard_after_forward \
        model.dp_replicate model.cp model.ep model.tp model.optimization_dtype model.reduce_dtype \
        model.moe_use_grouped_mm model.freeze_moe_router model.lora model.debug \
        model.fused_lm_head_token_chunk_size model.lora.rank model.lora.alpha model.lora.dropout \
        model.lora.target_modules model.lora.modules_to_save data.batch_size data.seq_len data.micro_batch_size \
        data.pack_function data.type data.length data.input_ids data.name data.subsets data.splits \
        data.probabilities data.stopping_strategy data.shuffle data.seed data.loss_mask data.loss_mask.system \
        data.loss_mask.user data.loss_mask.assistant data.loss_mask.tool val.interval val.eval_on_start val.data \
        tokenizer.name tokenizer.trust_remote_code tokenizer.chat_template optim.type optim.lr optim.weight_decay \
        optim.max_norm optim.betas1 optim.betas2 optim.nesterov optim.momentum optim.mu scheduler.type \
        scheduler.warmup_steps scheduler.decay_steps scheduler.min_lr ckpt.output_dir ckpt.interval ckpt.weights \
        ckpt.weights.save_sharded ckpt.weights.save_format ckpt.weights.save_adapter_separately ckpt.weights_only \
        ckpt.resume_step ckpt.keep_last ckpt.keep_interval ckpt.skip_progress ckpt.skip_scheduler \
        ckpt.skip_dataloader log.level log.vf_level log.file log.env_worker_logs log.log_data log.json_logging";
    for key in keys.split_whitespace() {
        let (section, name) = key.rsplit_once('.').unwrap_or(("", key));
        let taken = reference.pages.iter().any(|page| page.path == section && page.has(name));
        assert!(taken != refused::key(key).is_some(), "`{key}`: taken {taken}");
    }
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
        ("data.splits = [\"a\", \"b\", \"a\"]", "`a` is named twice in `data`"),
        ("data.subsets = [\"x\", \"x\"]\ndata.splits = [\"a\", \"a\"]", "`x, a` is named twice in `data`"),
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

#[test]
fn a_mangled_file_is_told_and_never_panics() {
    let text = "# é\nmax_steps = 2\n[model.lora]\ntarget_modules = ['q', \"v\"]\nrank_pattern = { a = 1 }\r\n[optim]\nlr = 1e-3";
    let mut faults = 0;
    for at in (0..=text.len()).filter(|at| text.is_char_boundary(*at)) {
        for with in
            ["", "é", "\"", "'", "[", "]", "{", "=", "\n", "\r", "\0", ".", "#", "\u{feff}", "9999999999"]
        {
            for dropped in [0, 1, 2, 5].into_iter().filter(|dropped| text.is_char_boundary(at + dropped)) {
                let mangled = format!("{}{with}{}", &text[..at], &text[at + dropped..]);
                faults += usize::from(SftConfig::from_toml(&mangled, "x.toml").is_err());
            }
        }
    }
    assert!(faults > 1000, "{faults} faults");
}
