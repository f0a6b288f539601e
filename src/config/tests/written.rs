//! What is written out, and what follows from a configuration.

use super::*;

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
        "[monitors]\ntensorboard = true\ncommand = [\"sh\", \"-c\", \"a \\\"b\\\"\"]",
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
    let heartbeat = if cfg!(feature = "hub") { "[heartbeat]\nurl = \"https://x\"" } else { "" };
    let sections = "[model.lora]\n[model.ac]\n[val.data]\n[ckpt]\n[sample]\nprompts = [\"q\"]";
    let written = good(&format!("{sections}\n{heartbeat}")).to_toml();
    let table: toml::Table = written.parse().unwrap();
    let known = |path: &str| cfg!(feature = "hub") || path != "heartbeat";
    for page in reference::Reference::new().pages.into_iter().filter(|page| known(&page.path)) {
        let section =
            page.path.split('.').filter(|p| !p.is_empty()).try_fold(&table, |t, p| t.get(p)?.as_table());
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
