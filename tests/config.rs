//! The configuration from outside: the files that people start from, the page that lists the keys, and faults
//! in files (the `bad/config` goldens).

mod common;

use common::neutral::{Case, ours};
use embertune::Error;
use embertune::config::{self, Loaded, Plan, SftConfig};
use std::path::{Path, PathBuf};

const CONFIGS: usize = 7;

fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn load(args: &[&str]) -> embertune::Result<Loaded> {
    config::load(&args.iter().map(|arg| arg.to_string()).collect::<Vec<_>>())
}

/// Every TOML file below `configs/`.
fn files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![project().join("configs")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => found.push(path),
            }
        }
    }
    found.sort();
    found
}

#[test]
fn every_file_in_configs_resolves_and_reads_back_equal() {
    let files = files();
    assert_eq!(files.len(), CONFIGS, "{files:?}");
    for file in files {
        let loaded = load(&["@", file.to_str().unwrap()]).unwrap_or_else(|error| panic!("{error}"));
        Plan::new(&loaded.config, 1).unwrap();
        let written = loaded.config.to_toml();
        assert_eq!(SftConfig::from_toml(&written, "written").unwrap(), loaded.config, "{}", file.display());
    }
}

#[test]
fn every_file_in_configs_starts_with_its_command() {
    for file in files() {
        let text = std::fs::read_to_string(&file).unwrap();
        let path = file.strip_prefix(project()).unwrap().to_str().unwrap();
        let command = match path {
            "configs/default.toml" => "# embertune sft".to_string(),
            path => format!("# embertune sft @ {path}"),
        };
        assert!(text.starts_with(&command), "{path} starts with {:?}", text.lines().next());
    }
}

#[test]
fn the_default_file_is_compiled_in() {
    let from_file = load(&["@", project().join("configs/default.toml").to_str().unwrap()]).unwrap();
    assert_eq!(load(&[]).unwrap(), from_file);
    assert!(from_file.config.ckpt.is_some(), "the newcomer's run can be resumed");
}

#[test]
fn the_reference_runs_differ_from_the_defaults_in_this_and_nothing_else() {
    let differences = |name: &str| -> Vec<String> {
        let file = project().join("configs").join(name);
        let loaded = load(&["@", file.to_str().unwrap()]).unwrap();
        loaded.differences.iter().map(|d| format!("{} = {}", d.key, d.value)).collect()
    };
    let model = "model.name = \"PrimeIntellect/Qwen3-0.6B\"";
    let data = [
        "data.batch_size = 32",
        "data.seq_len = 4096",
        "data.name = \"willcb/R1-reverse-wikipedia-paragraphs-v1-1000\"",
    ];
    let checkpoints = ["ckpt = on", "ckpt.interval = 20"];
    let full = [&["max_steps = 200", model], &data[..], &["optim.lr = 2e-5"], &checkpoints].concat();
    assert_eq!(differences("sft_fullft_rtext_200.toml"), full);
    let adapter = ["ckpt.weights.save_adapter_separately = true"];
    let lora = [
        &["max_steps = 200", model, "model.lora = on"],
        &data[..],
        &["optim.lr = 5e-4"],
        &checkpoints,
        &adapter,
    ];
    assert_eq!(differences("sft_lora_rtext_200.toml"), lora.concat());
}

#[test]
fn the_page_of_keys_is_up_to_date() {
    let path = project().join("docs/config.md");
    if std::env::var_os("EMBERTUNE_BLESS").is_some() {
        std::fs::write(&path, config::reference()).unwrap();
    }
    let page = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        page == config::reference(),
        "docs/config.md is stale; `EMBERTUNE_BLESS=1 cargo test --release --test config` writes it anew"
    );
}

// ---- Goldens.

/// Faults that only the model's and the data's files can show; `tests/cli.rs` runs them.
const AT_RUN_TIME: [&str; 4] =
    ["model_dir_missing", "data_file_missing", "target_modules_match_nothing", "one_target_matches_nothing"];

/// The neutral file of a case in our words, read by the loader.
fn load_case(file: &Path) -> embertune::Result<Loaded> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(file.file_name().unwrap());
    std::fs::write(&path, ours(&std::fs::read_to_string(file).unwrap())).unwrap();
    load(&["@", path.to_str().unwrap()])
}

/// Loads, plans and holds the rows against the positions of the tiny model.
fn check_case(file: &Path) -> embertune::Result<()> {
    let model = common::goldens::json(&common::goldens::root().join("bad/_ok/model/config.json"));
    let limit = model["max_position_embeddings"].as_u64().unwrap() as usize;
    Plan::new(&load_case(file)?.config, 1)?.check_positions(limit).map(|_| ())
}

#[test]
fn faulty_files_are_told_as_they_must_be() {
    let cases = Case::of_area("config");
    assert!(cases.len() > AT_RUN_TIME.len());
    for case in &cases {
        let (name, file) = (case.name(), case.file("config", "_ok/config.toml"));
        match check_case(&file) {
            Ok(()) => assert!(AT_RUN_TIME.contains(&name), "`{name}` went through"),
            Err(Error::Config(problems)) => {
                assert_eq!(problems.len(), 1, "`{name}`: {problems:?}");
                let told = problems[0].to_string();
                assert_eq!(case.missing_from(&told), [""; 0], "`{name}`: {told}");
                let line = case.line().map(|line| format!(":{line}")).unwrap_or_default();
                assert!(problems[0].place.ends_with(&line), "`{name}`: {told}");
            }
            Err(other) => panic!("`{name}`: {other:?}"),
        }
    }
}

#[test]
fn the_good_file_goes_through() {
    check_case(&common::goldens::root().join("bad/_ok/config.toml")).unwrap();
}
