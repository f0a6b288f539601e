use std::fs;
use std::path::Path;
use std::process::Command;

use super::*;
use crate::assets::Asset;

/// Variables that the hub's tools read; a test runs in a process of its own, with only these set.
const VARIABLES: [&str; 9] = [
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_ENDPOINT",
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "XDG_CACHE_HOME",
];

/// Set in the processes of [`in_own_process`]; elsewhere their tests have nothing to do.
const OWN: &str = "EMBERTUNE_TEST_OWN_PROCESS";

fn is_own_process() -> bool {
    std::env::var_os(OWN).is_some()
}

/// Runs the ignored test `name` of this module in its own process and environment.
fn in_own_process(name: &str, variables: &[(&str, &str)]) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("hub::tests::{name}"), "--ignored", "--nocapture"]);
    VARIABLES.iter().for_each(|key| {
        command.env_remove(key);
    });
    let output = command.env(OWN, "1").envs(variables.iter().copied()).output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

fn text(error: Error) -> String {
    format!("{error}\n{}", error.hint().unwrap_or_default())
}

/// A cache as Python's tools leave it.
fn fill_cache(cache: &Path, folder: &str, files: &[(&str, &str)]) {
    let repo = cache.join(folder);
    for (path, content) in files {
        let path = repo.join("snapshots/abc").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    fs::create_dir_all(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), "abc\n").unwrap();
}

const TINY_MODEL: &[(&str, &str)] =
    &[("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors", "weights"), ("README.md", "")];

#[test]
fn the_cache_serves_without_a_network() {
    let home = tempfile::tempdir().unwrap();
    fill_cache(&home.path().join("hub"), "models--owner--model", TINY_MODEL);
    fill_cache(
        &home.path().join("hub"),
        "datasets--owner--data",
        &[("data/train-00000-of-00001.parquet", "")],
    );
    // A port that nobody listens on: any request would fail.
    let variables = [("HF_HOME", home.path().to_str().unwrap()), ("HF_ENDPOINT", "http://127.0.0.1:9")];
    in_own_process("own_cached", &variables);
    let elsewhere = home.path().join("hub");
    in_own_process(
        "own_cached",
        &[
            ("HF_HUB_CACHE", elsewhere.to_str().unwrap()),
            ("HF_HOME", "/nonexistent"),
            ("HF_HUB_OFFLINE", "1"),
        ],
    );
}

#[test]
#[ignore = "run by the_cache_serves_without_a_network"]
fn own_cached() {
    if !is_own_process() {
        return;
    }
    assert!(model_dir("owner/model").unwrap().join("model.safetensors").is_file());
    assert_eq!(dataset_files("owner/data", None, "train").unwrap().len(), 1);
    let error = text(dataset_files("owner/data", None, "test").unwrap_err());
    assert!(error.contains("could not be had from the hub"), "{error}");
}

#[test]
fn offline_says_so_and_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    in_own_process(
        "own_offline",
        &[
            ("HF_HOME", home.path().to_str().unwrap()),
            ("HF_HUB_OFFLINE", "1"),
            ("HF_ENDPOINT", "http://127.0.0.1:9"),
        ],
    );
}

#[test]
#[ignore = "run by offline_says_so_and_what_to_do"]
fn own_offline() {
    if !is_own_process() {
        return;
    }
    for error in [
        text(model_dir("owner/model").unwrap_err()),
        text(dataset_files("owner/model", None, "train").unwrap_err()),
    ] {
        for word in [
            "owner/model",
            "no such file or folder",
            "HF_HUB_OFFLINE",
            "hf download",
            "not in the local cache",
        ] {
            assert!(error.contains(word), "`{word}` is missing: {error}");
        }
    }
}

#[test]
fn splits_of_a_single_file_are_an_error_not_a_silence() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rows.jsonl");
    fs::write(&file, "").unwrap();
    let file = file.to_string_lossy();
    assert!(dataset_files(&file, None, "train").is_ok());
    for (subset, split) in [(None, "test"), (Some("x"), "train")] {
        let error = text(dataset_files(&file, subset, split).unwrap_err());
        assert!(error.contains("`data.splits`"), "{error}");
    }
}

#[test]
fn a_misspelled_path_is_not_sought_on_the_hub() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("model")).unwrap();
    fs::write(dir.path().join("train.jsonl"), "").unwrap();
    let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    let error = text(model_dir(&path("modle")).unwrap_err());
    assert!(
        error.contains("modle not found") && error.contains("did you mean") && error.contains("model`"),
        "{error}"
    );
    let error = text(dataset_files(&path("trian.jsonl"), None, "train").unwrap_err());
    assert!(error.contains("trian.jsonl not found") && error.contains("train.jsonl"), "{error}");
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("nowhere.jsonl", dir.path().join("link.jsonl")).unwrap();
        let error = text(dataset_files(&path("link.jsonl"), None, "train").unwrap_err());
        assert!(
            error.contains("a link that can't be followed") && !error.contains("did you mean"),
            "{error}"
        );
    }
    // Relative ones neither, by their shape.
    for name in ["modle", "trian.jsonl", "./a/b", "../a", "data/x.jsonl", "a/b/c", "~/x", "a b/c"] {
        assert_eq!(Repo::parse(Kind::Model, name), None, "{name}");
    }
    assert!(Repo::parse(Kind::Dataset, "willcb/R1-reverse-wikipedia-paragraphs-v1-1000").is_some());
}

#[test]
fn assets_are_written_once_and_mended() {
    let cache = tempfile::tempdir().unwrap();
    in_own_process("own_asset", &[("XDG_CACHE_HOME", cache.path().to_str().unwrap())]);
    assert_eq!(
        fs::read_dir(cache.path().join("embertune")).unwrap().count(),
        1,
        "nothing unfinished is left"
    );
}

#[test]
#[ignore = "run by assets_are_written_once_and_mended"]
fn own_asset() {
    if !is_own_process() {
        return;
    }
    let asset =
        Asset { name: "embertune/tiny", files: &[("config.json", b"{}"), ("sub/x.bin", b"\x00\x01")] };
    let dir = cache::write_asset(&asset).unwrap();
    assert_eq!(fs::read(dir.join("sub/x.bin")).unwrap(), [0, 1]);
    assert_eq!(cache::write_asset(&asset).unwrap(), dir);
    fs::write(dir.join("sub/x.bin"), "broken").unwrap();
    assert_eq!(fs::read(cache::write_asset(&asset).unwrap().join("sub/x.bin")).unwrap(), [0, 1]);
}

#[test]
fn patterns_name_files_whatever_their_split() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["a/test.jsonl", "a/train.jsonl", "b/x.csv.gz", "b/notes.jsonl.d/y"] {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }
    let files = |pattern: &str| {
        let pattern = dir.path().join(pattern);
        let found = dataset_files(pattern.to_str().unwrap(), None, "train").map_err(|e| e.to_string())?;
        let name = |file: &PathBuf| file.strip_prefix(dir.path()).unwrap().to_str().unwrap().to_string();
        Ok(found.iter().map(name).collect::<Vec<_>>())
    };
    assert_eq!(files("a/*.jsonl"), Ok(vec!["a/test.jsonl".into(), "a/train.jsonl".into()]));
    assert_eq!(files("**/*.j*"), files("a/*.jsonl"), "folders are no files");
    assert_eq!(files("?/[x-z].csv.gz"), Ok(vec!["b/x.csv.gz".into()]));
    let error: String = files("c/*.jsonl").unwrap_err();
    assert!(error.contains("c/*.jsonl") && error.contains("no file matches"), "{error}");
}
#[test]
fn a_name_that_is_empty_is_called_so() {
    for found in [model_dir(" "), dataset_files("", None, "train").map(|_| PathBuf::new())] {
        let error = found.unwrap_err();
        assert!(error.to_string().ends_with("` is empty") && error.hint().is_some(), "{error}");
    }
}
