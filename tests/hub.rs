//! Models and data by hub id, against a server on this machine that makes the mistakes that networks make.
#![cfg(all(feature = "hub", feature = "flex"))]

mod common;

use std::process::{Command, Stdio};
use std::time::Instant;

use common::hub::{Fault, Server};
use common::run::{Ran, RunDir};

const ROWS: &str = "data/train.jsonl";

fn row(answer: &str) -> String {
    let user = serde_json::json!({ "role": "user", "content": "question" });
    let assistant = serde_json::json!({ "role": "assistant", "content": answer });
    serde_json::json!({ "messages": [user, assistant] }).to_string() + "\n"
}

/// A process that asks this server, with a cache of its own.
fn command(dir: &RunDir, server: &Server, args: &[&str]) -> Command {
    let mut command = dir.command(args);
    let cache = dir.path("hf");
    for key in ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_CACHE"] {
        command.env_remove(key);
    }
    command.env("HF_HOME", cache).env("HF_ENDPOINT", &server.endpoint).env("HF_TOKEN", "secret");
    command
}

fn preview(dir: &RunDir, server: &Server, data: &str, more: &[&str]) -> Ran {
    let args = [&["preview", "@", "run.toml", "--data.name", data], more].concat();
    Ran::of(command(dir, server, &args).output().unwrap())
}

fn status(status: u16) -> Fault {
    Fault::Status(status, Vec::new())
}

#[test]
fn files_come_once_from_where_the_hub_sends_and_the_token_stays() {
    let server = Server::new(&[("README.md", "# Data"), (ROWS, &row("first")), ("data/test.jsonl", "no")]);
    let dir = RunDir::new();
    let ran = preview(&dir, &server, "owner/data", &[]).succeeds().says(&["first<|im_end|>⟧"]);
    assert!(ran.stderr.contains("downloading data/train.jsonl"), "{}", ran.all());
    preview(&dir, &server, "owner/data", &[]).succeeds().says(&["first<|im_end|>⟧"]);
    assert_eq!(server.asked("/cdn/").len(), 1, "the second time from the cache");
    assert!(server.asked("test.jsonl").is_empty(), "only the split is fetched");
    for asked in server.asked("") {
        let elsewhere = asked.path.starts_with("/cdn/");
        assert_eq!(asked.token.is_some(), !elsewhere, "{asked:?}");
    }
    // As Python's tools lay it out, and whole for who comes offline.
    let repo = "hf/hub/datasets--owner--data";
    assert_eq!(dir.text(&format!("{repo}/refs/main")), "a".repeat(40));
    assert_eq!(dir.text(&format!("{repo}/snapshots/{}/{ROWS}", "a".repeat(40))), row("first"));
    let mut offline = command(&dir, &server, &["preview", "@", "run.toml", "--data.name", "owner/data"]);
    Ran::of(offline.env("HF_HUB_OFFLINE", "1").output().unwrap()).succeeds().says(&["first<|im_end|>⟧"]);
}

#[test]
fn what_has_changed_on_the_hub_is_seen_and_the_cache_serves_without_it() {
    let server = Server::new(&[(ROWS, &row("old"))]);
    let dir = RunDir::new();
    preview(&dir, &server, "owner/data", &[]).succeeds().says(&["old<|im_end|>⟧"]);
    server.commit("main", 'b', &[(ROWS, &row("new"))]);
    preview(&dir, &server, "owner/data", &[]).succeeds().says(&["new<|im_end|>⟧"]);
    server.fault("/revision/", status(503));
    preview(&dir, &server, "owner/data", &[]).succeeds().says(&[
        "new<|im_end|>⟧",
        "taking owner/data from the cache",
        "503",
    ]);
    // Nobody listens.
    let mut gone = Server::new(&[]);
    gone.endpoint = "http://127.0.0.1:9".into();
    let started = Instant::now();
    preview(&dir, &gone, "owner/data", &[])
        .succeeds()
        .says(&["new<|im_end|>⟧", "taking owner/data from the cache"]);
    assert!(started.elapsed().as_secs() < 8, "one try is enough where there is a cache");
    preview(&dir, &gone, "owner/other", &[]).fails(1).says(&["owner/other not found", "127.0.0.1:9"]);
}

#[test]
fn a_revision_stands_behind_the_name() {
    let server = Server::new(&[(ROWS, &row("main"))]);
    server.commit("v1.0", 'c', &[(ROWS, &row("tagged"))]);
    server.commit("main", 'd', &[(ROWS, &row("newer"))]);
    let dir = RunDir::new();
    preview(&dir, &server, "owner/data@v1.0", &[]).succeeds().says(&["tagged<|im_end|>⟧"]);
    preview(&dir, &server, "owner/data", &[]).succeeds().says(&["newer<|im_end|>⟧"]);
    let commit = format!("owner/data@{}", "a".repeat(40));
    preview(&dir, &server, &commit, &[]).succeeds().says(&["main<|im_end|>⟧"]);
    let before = server.asked("").len();
    preview(&dir, &server, &commit, &[]).succeeds().says(&["main<|im_end|>⟧"]);
    assert_eq!(server.asked("").len(), before, "a commit never changes");
    server.fault("/revision/nowhere", status(404));
    preview(&dir, &server, "owner/data@nowhere", &[]).fails(1).says(&[
        "`nowhere`",
        "404",
        "the revision behind `@`",
    ]);
}

#[test]
fn refusals_are_told_with_what_to_do() {
    let server = Server::new(&[(ROWS, &row("x"))]);
    let dir = RunDir::new();
    let gated = vec![("X-Error-Message", "Access to dataset owner/data is restricted".to_string())];
    for (fault, words) in [
        (status(401), ["401", "`HF_TOKEN`"]),
        (Fault::Status(403, gated), ["is restricted", "accept its terms"]),
        (status(404), ["404", "check the name"]),
        (Fault::Status(429, vec![("Retry-After", "9999".into())]), ["wait 9999 s", "try again later"]),
    ] {
        server.state().faults = vec![("/revision/".into(), fault)];
        let started = Instant::now();
        preview(&dir, &server, "owner/data", &[]).fails(1).says(&words).says(&["owner/data"]);
        assert!(started.elapsed().as_secs() < 3, "there is no hope in trying again");
    }
}

#[test]
fn a_busy_hub_is_waited_for() {
    let server = Server::new(&[(ROWS, &row("at last"))]);
    let dir = RunDir::new();
    let wait = Fault::Status(429, vec![("Retry-After", "1".into())]);
    server.fault("/revision/", wait);
    server.fault("/revision/", status(502));
    server.fault("/revision/", status(0));
    server.fault("/resolve/", status(500));
    server.fault("/resolve/", status(0));
    let started = Instant::now();
    let ran = preview(&dir, &server, "owner/data", &[]).succeeds().says(&["at last<|im_end|>⟧"]);
    ran.says(&["answered 429; trying again in 1.0 s", "502", "500"]);
    assert!(started.elapsed().as_secs_f64() > 1.0);
    server.state().faults = vec![("/revision/".into(), status(500))];
    preview(&dir, &server, "owner/other", &[]).fails(1).says(&["500", "check the connection"]);
}

#[test]
fn a_dropped_connection_is_gone_on_with() {
    let rows = row(&"long ".repeat(2000));
    let server = Server::new(&[(ROWS, &rows)]);
    let dir = RunDir::new();
    server.fault("/cdn/", Fault::Cut(3000));
    server.fault("/cdn/", Fault::Cut(10));
    server.fault("/cdn/", status(0));
    preview(&dir, &server, "owner/data", &[]).succeeds().says(&["going on from byte 3000"]);
    let ranges: Vec<_> = server.asked("/cdn/").into_iter().map(|asked| asked.range).collect();
    assert_eq!(ranges, [None, Some("bytes=3000-".into()), Some("bytes=3010-".into())]);
    assert_eq!(dir.text(&format!("hf/hub/datasets--owner--data/snapshots/{}/{ROWS}", "a".repeat(40))), rows);
}

#[cfg(unix)]
#[test]
fn a_killed_download_is_gone_on_with_and_never_taken_for_whole() {
    let (one, two) = (row("one"), row(&"two ".repeat(2000)));
    let server = Server::new(&[("data/train_1.jsonl", &one), ("data/train_2.jsonl", &two)]);
    let dir = RunDir::new();
    server.fault("/cdn/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa/data/train_2", Fault::Stall(4000));
    let args = ["preview", "@", "run.toml", "--data.name", "owner/data"];
    let mut child =
        command(&dir, &server, &args).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let blobs = dir.path("hf/hub/datasets--owner--data/blobs");
    let arrived = || {
        let entries = std::fs::read_dir(&blobs).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.metadata().ok()).any(|m| m.len() == 4000)
    };
    let started = Instant::now();
    while !arrived() {
        assert!(started.elapsed().as_secs() < 20, "{}", dir.listing());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let mut offline = command(&dir, &server, &args);
    let ran = Ran::of(offline.env("HF_HUB_OFFLINE", "1").output().unwrap());
    ran.fails(1).says(&["not in the local cache"]);
    server.state().faults.clear();
    preview(&dir, &server, "owner/data", &["--row", "2"]).succeeds().says(&["two two"]);
    assert_eq!(server.asked("/cdn/").last().unwrap().range.as_deref(), Some("bytes=4000-"));
}

#[test]
fn a_file_of_another_size_than_the_hub_says_is_refused() {
    let server = Server::new(&[(ROWS, &row("x"))]);
    let size = row("x").len();
    let dir = RunDir::new();
    server.fault("/resolve/", Fault::Longer(5));
    let words = [&*format!("{size} bytes came, and the hub says that it has {}", size + 5), ROWS];
    preview(&dir, &server, "owner/data", &[]).fails(1).says(&words);
    server.state().faults.clear();
    preview(&dir, &server, "owner/data", &[]).succeeds().says(&["x<|im_end|>⟧"]);
}

#[test]
fn of_two_processes_one_downloads() {
    let rows = row("shared") + &"\n".repeat(70 << 20);
    let server = Server::new(&[(ROWS, &rows)]);
    let dir = RunDir::new();
    let start = || {
        let args = ["preview", "@", "run.toml", "--data.name", "owner/data"];
        let mut command = command(&dir, &server, &args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let both = [start(), start()].map(|child| Ran::of(child.wait_with_output().unwrap()).succeeds());
    let told = both.map(|ran| ran.says(&["shared<|im_end|>⟧"]).stderr).concat();
    assert_eq!(server.asked("/cdn/").len(), 1);
    // A large file's progress is told where there is no terminal to draw a bar on.
    for word in ["downloading data/train.jsonl, 70.0 MiB", "data/train.jsonl: 14 of 70 MiB"] {
        assert!(told.contains(word), "{word}: {told}");
    }
}

#[test]
fn the_card_names_subsets_and_splits() {
    let card = "---\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n    path: \"raw/en-*.jsonl\"\n  - split: held_out\n    path: raw/h.jsonl\n\
        - config_name: de\n  default: true\n  data_files: raw/de.jsonl\n---\n";
    let files = [
        ("README.md", card),
        ("raw/de.jsonl", &row("deutsch")),
        ("raw/en-1.jsonl", &row("english")),
        ("raw/h.jsonl", &row("held")),
    ];
    let server = Server::new(&files);
    let dir = RunDir::new();
    for (path, text) in files {
        std::fs::create_dir_all(dir.path("local/raw")).unwrap();
        dir.write(&format!("local/{path}"), text);
    }
    for name in ["owner/data", "local"] {
        let shown = |more: &[&str]| preview(&dir, &server, name, more);
        shown(&[]).succeeds().says(&["deutsch<|im_end|>⟧"]);
        shown(&["--data.subsets", "en"]).succeeds().says(&["english<|im_end|>⟧"]);
        shown(&["--data.subsets", "en", "--data.splits", "held_out"]).succeeds().says(&["held<|im_end|>⟧"]);
        shown(&["--data.subsets", "fr"]).fails(1).says(&["no subset `fr`; there are `en`, `de`"]);
    }
}

#[test]
fn a_model_trains_by_its_hub_id() {
    let ok = common::goldens::root().join("bad/_ok/model");
    let names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    let server = Server::new(&[("pytorch_model.bin", "not wanted")]);
    for name in names {
        let content = std::fs::read(ok.join(name)).unwrap();
        server.state().commits.get_mut(&"a".repeat(40)).unwrap().insert(name.into(), content);
    }
    let dir = RunDir::new();
    let name = format!("owner/model@{}", "a".repeat(40));
    let there = ["once the weights are there", "Step 2 | "];
    for ((subcommand, weights), word) in [("check", 0), ("sft", 1)].into_iter().zip(there) {
        let args = [subcommand, "@", "run.toml", "--model.name", &name];
        Ran::of(command(&dir, &server, &args).output().unwrap()).succeeds().says(&[word]);
        assert_eq!(
            server.asked("/cdn/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa/model.safetensors").len(),
            weights
        );
    }
    let adapter = dir.text("out/weights/step_2/lora_adapters/adapter_config.json");
    let adapter: serde_json::Value = serde_json::from_str(&adapter).unwrap();
    assert_eq!(adapter["base_model_name_or_path"], "owner/model");
    assert_eq!(adapter["revision"], "a".repeat(40), "PEFT's name for it");
}
