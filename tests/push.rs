//! `embertune push` against a server on this machine that speaks the hub's protocol and makes the mistakes that networks
//! make (`tests/common/hub.rs`).
#![cfg(all(feature = "hub", feature = "flex"))]

mod common;

use std::path::Path;
use std::time::Instant;

use common::hub::{Fault, Server};
use common::run::{Ran, RunDir};

const REPO: &str = "owner/mine";

fn push(dir: &RunDir, server: &Server, args: &[&str]) -> Ran {
    let mut command = dir.command(&[&["push"], args].concat());
    for key in ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"] {
        command.env_remove(key);
    }
    command.env("HF_HOME", dir.path("hf")).env("HF_ENDPOINT", &server.endpoint).env("HF_TOKEN", "secret");
    Ran::of(command.output().unwrap())
}

/// An adapter as a run leaves it, with a card and with what is nobody else's business.
fn adapter(dir: &RunDir) -> &'static str {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/adapters/plain");
    std::fs::create_dir_all(dir.path("adapter")).unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(fixture.join(name), dir.path("adapter").join(name)).unwrap();
    }
    dir.write("adapter/README.md", "# Mine\n");
    dir.write("adapter/optimizer.pt", "state");
    dir.write("adapter/.env", "HF_TOKEN=secret");
    "adapter"
}

/// What the repository's branch holds.
fn held(server: &Server, branch: &str) -> Vec<String> {
    let state = server.state();
    state.commits[&state.revisions[branch]].keys().cloned().collect()
}

fn status(status: u16) -> Fault {
    Fault::Status(status, Vec::new())
}

const ADAPTER: [&str; 3] = ["README.md", "adapter_config.json", "adapter_model.safetensors"];

#[test]
fn an_adapter_goes_up_whole_and_once() {
    let (server, dir) = (Server::new(&[]), RunDir::new());
    let adapter = adapter(&dir);
    let ran = push(&dir, &server, &[adapter, "--repo", REPO, "--private", "--message", "First"]).succeeds();
    let ran = ran.says(&[
        "3 files",
        "optimizer.pt",
        "stays here: a trainer's state",
        "Pushed: ",
        "/owner/mine (commit 0",
    ]);
    assert!(!ran.all().contains(".env") && !ran.all().contains("secret"), "{}", ran.all());
    assert_eq!(held(&server, "main"), ADAPTER);
    for name in ADAPTER {
        let state = server.state();
        assert_eq!(
            state.commits[&state.revisions["main"]][name],
            dir.bytes(&format!("adapter/{name}")),
            "{name}"
        );
    }
    assert!(server.state().repositories[REPO], "private");
    assert!(String::from_utf8_lossy(&server.asked("/commit/")[0].body).contains(r#""summary":"First""#));
    // The token is shown to the hub alone, and what is sent has a length.
    for asked in server.asked("") {
        assert_eq!(asked.token.is_some(), asked.host.starts_with("127.0.0.1"), "{asked:?}");
        assert_eq!(asked.length.is_some(), asked.method != "GET", "{asked:?}");
    }
    assert_eq!(server.asked("/store/").len(), 1);
    // Again: the repository is there, and so are the weights.
    push(&dir, &server, &[adapter, "--repo", REPO]).succeeds().says(&["0.00 MiB of large files sent"]);
    assert_eq!(server.asked("/store/").len(), 1, "what is there isn't sent again");
}

#[test]
fn a_dry_run_asks_nobody() {
    let (server, dir) = (Server::new(&[]), RunDir::new());
    let ran = push(&dir, &server, &[adapter(&dir), "--repo", REPO, "--dry-run", "--include", "optimizer.pt"])
        .succeeds();
    ran.says(&["4 files", "optimizer.pt", "adapter_model.safetensors", "dry run: nothing was sent"]);
    assert!(server.asked("").is_empty());
}

#[test]
fn a_name_that_no_repository_can_have_is_refused_before_anything() {
    let (server, dir) = (Server::new(&[]), RunDir::new());
    let adapter = adapter(&dir);
    for repo in ["me/cap tain", "me", "a/b/c", "", "https://huggingface.co/me/x", "../x/y"] {
        for more in [&["--dry-run"][..], &[]] {
            let ran = push(&dir, &server, &[&[adapter, "--repo", repo], more].concat()).fails(2);
            let ran = ran.says(&["can't be a repository's name", "OWNER/NAME"]);
            assert!(ran.stdout.is_empty(), "{repo}: {}", ran.all());
        }
    }
    push(&dir, &server, &[adapter, "--repo", REPO, "--dry-run", "--revision", "a b"]).fails(2);
    assert!(server.asked("").is_empty());
}

#[test]
fn a_branch_is_made_and_main_stays() {
    let (server, dir) = (Server::new(&[("old.md", "x")]), RunDir::new());
    let adapter = adapter(&dir);
    for _ in 0..2 {
        let ran = push(&dir, &server, &[adapter, "--repo", REPO, "--revision", "step-200"]).succeeds();
        ran.says(&["/owner/mine/tree/step-200"]);
    }
    assert_eq!(held(&server, "main"), ["old.md"]);
    assert_eq!(held(&server, "step-200").len(), 4, "with what was there");
}

#[test]
fn large_files_go_in_pieces_where_the_hub_wants_that() {
    let (server, dir) = (Server::new(&[]), RunDir::new());
    let adapter = adapter(&dir);
    let size = dir.bytes("adapter/adapter_model.safetensors").len();
    server.state().piece = Some(size / 3);
    server.fault("/piece/", status(500));
    server.fault("/piece/", Fault::Cut(10));
    server.fault("/piece/", status(0));
    push(&dir, &server, &[adapter, "--repo", REPO]).succeeds().says(&["trying again"]);
    let pieces = server.asked("/piece/");
    assert_eq!(pieces.len(), 2 + size.div_ceil(size / 3), "two of them twice");
    assert_eq!(held(&server, "main"), ADAPTER);
    assert_eq!(server.asked("/verify").len(), 1);
}

#[test]
fn dropped_connections_and_busy_servers_are_tried_again() {
    let (server, dir) = (Server::new(&[]), RunDir::new());
    let adapter = adapter(&dir);
    for (of, fault) in [
        ("/store/", Fault::Cut(100)),
        ("/store/", status(503)),
        ("/store/", status(0)),
        ("/preupload/", Fault::Status(429, vec![("Retry-After", "1".into())])),
        ("/preupload/", status(0)),
        // It was done, and nobody said so.
        ("/commit/", Fault::Lost),
        ("/commit/", status(0)),
    ] {
        server.fault(of, fault);
    }
    let started = Instant::now();
    let ran = push(&dir, &server, &[adapter, "--repo", REPO]).succeeds();
    ran.says(&["answered 503; trying again", "answered 429; trying again in 1.0 s", "Pushed: "]);
    assert!(started.elapsed().as_secs_f64() > 1.0);
    assert_eq!(held(&server, "main"), ADAPTER);
    assert_eq!(server.asked("/store/").len(), 3);
}

#[test]
fn refusals_are_told_with_what_to_do_and_nothing_is_there_then() {
    let (server, dir) = (Server::new(&[]), RunDir::new());
    let adapter = adapter(&dir);
    let said = |status, why: &str| Fault::Status(status, vec![("X-Error-Message", why.to_string())]);
    for (of, fault, words) in [
        (
            "/repos/create",
            said(401, "Invalid username or password."),
            ["Invalid username", "one that may write"],
        ),
        (
            "/repos/create",
            said(403, "You don't have the rights"),
            ["making the repository", "the right `write`"],
        ),
        ("/repos/create", status(400), ["400", "mend what the hub says"]),
        ("/preupload/", status(404), ["at `main`", "`--revision`"]),
        ("/objects/batch", status(413), ["larger than the hub takes", "--dtype bfloat16"]),
        ("/store/", status(403), ["sending `adapter_model.safetensors`", "403"]),
        ("/commit/", said(403, "read-only token"), ["committing", "the token may not write there"]),
        ("/commit/", status(409), ["409", "run the command again"]),
        ("/commit/", status(412), ["412", "someone else pushes"]),
        ("/commit/", status(413), ["413", "leave large files out"]),
        ("/commit/", Fault::Status(429, vec![("Retry-After", "9999".into())]), ["wait 9999 s", "later"]),
    ] {
        server.state().faults = vec![(of.into(), fault)];
        let started = Instant::now();
        push(&dir, &server, &[adapter, "--repo", REPO]).fails(1).says(&words).says(&["owner/mine"]);
        assert!(started.elapsed().as_secs() < 3, "there is no hope in trying again");
        assert!(held(&server, "main").is_empty(), "{of}");
    }
    // A token for one repository may not make any: it is there.
    server.state().faults = vec![("/repos/create".into(), status(403))];
    server.state().repositories.insert(REPO.into(), false);
    push(&dir, &server, &[adapter, "--repo", REPO]).succeeds();
    // What everyone can read is no place for what is private.
    server.state().faults.clear();
    let ran = push(&dir, &server, &[adapter, "--repo", REPO, "--private"]).fails(1);
    ran.says(&["everyone can read it", "leave `--private` out"]);
    // A card that the hub doesn't understand is told of before anything is made or sent.
    let before = server.asked("").len();
    dir.write("adapter/README.md", "---\nbase_model: ./\n---\n");
    let ran = push(&dir, &server, &[adapter, "--repo", "owner/new"]).fails(1);
    ran.says(&[
        "reading the card (`README.md`)",
        "\"base_model\" with value \"./\" is not valid",
        "mend what the hub says",
    ]);
    assert_eq!(server.asked("").len(), before + 1);
    // Nobody listens.
    let mut gone = Server::new(&[]);
    gone.endpoint = "http://127.0.0.1:9".into();
    push(&dir, &gone, &[adapter, "--repo", REPO]).fails(1).says(&["127.0.0.1:9", "check the connection"]);
}

#[test]
fn without_a_token_a_name_or_a_network_nothing_is_asked() {
    let (server, dir) = (Server::new(&[]), RunDir::new());
    let adapter = adapter(&dir);
    let bare = |variables: &[(&str, &str)], args: &[&str]| {
        let mut command = dir.command(&[&["push", adapter], args].concat());
        ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_TOKEN"].iter().for_each(
            |key| {
                command.env_remove(key);
            },
        );
        command.env("HF_HOME", dir.path("hf")).env("HF_ENDPOINT", &server.endpoint);
        Ran::of(command.envs(variables.iter().copied()).output().unwrap())
    };
    bare(&[], &["--repo", REPO]).fails(1).says(&["no token", "`HF_TOKEN`", "hf auth login"]);
    bare(&[("HF_HUB_OFFLINE", "1")], &["--repo", REPO]).fails(1).says(&["`HF_HUB_OFFLINE` is set"]);
    for name in ["mine", "owner/", "a/b/c", "owner/na me"] {
        bare(&[("HF_TOKEN", "x")], &["--repo", name])
            .fails(2)
            .says(&["can't be a repository's name", "OWNER/NAME"]);
    }
    dir.write("adapter/notes.md", &format!("my token is hf_{}", "a1B2".repeat(9)));
    bare(&[("HF_TOKEN", "x")], &["--repo", REPO]).fails(1).says(&[
        "notes.md",
        "line 1",
        "nothing was pushed",
    ]);
    assert!(server.asked("").is_empty());
    // The token of `hf auth login`.
    std::fs::remove_file(dir.path("adapter/notes.md")).unwrap();
    std::fs::create_dir_all(dir.path("hf")).unwrap();
    dir.write("hf/token", "from a file\n");
    bare(&[], &["--repo", REPO]).succeeds();
    assert_eq!(server.asked("/commit/")[0].token.as_deref(), Some("Bearer from a file"));
}

/// A run, its merged model, and both from the hub again by their names.
#[test]
fn what_was_pushed_is_what_comes_back() {
    let (server, dir) = (Server::new(&[]), RunDir::new());
    dir.sft(&[]).succeeds();
    let card = dir.text("out/weights/step_2/lora_adapters/README.md");
    for words in
        ["library_name: peft", "rank 4, alpha 8", "| Steps | 2 |", "Training loss (step 2)", "`train.jsonl`"]
    {
        assert!(card.contains(words), "{words} in {card}");
    }
    assert!(!card.contains(dir.path("").to_str().unwrap()), "{card}");
    // A run's folder stands for its newest adapter, a checkpoint for the adapter that belongs to it.
    for folder in ["out", "out/checkpoints/step_2", "out/weights/step_2"] {
        let ran = push(&dir, &server, &[folder, "--repo", REPO]).succeeds();
        ran.says(&["step_2/lora_adapters to owner/mine: 3 files", "others won't find it"]);
    }
    let base = common::goldens::root().canonicalize().unwrap().join("bad/_ok/model");
    let base = base.to_str().unwrap();
    dir.run(&["merge", "--base", base, "--adapter", "out", "--out", "merged"]).succeeds();
    let card = dir.text("merged/README.md");
    for words in ["library_name: transformers", "weights changed, by", "## Training", "| Steps | 2 |"] {
        assert!(card.contains(words), "{words} in {card}");
    }
    server.commit("main", 'a', &[]);
    push(&dir, &server, &["merged", "--repo", "owner/merged"]).succeeds();
    // The read side knows one repository, whatever its name.
    let commit = server.state().revisions["main"].clone();
    let name = format!("owner/merged@{commit}");
    let mut again = dir.command(&["sft", "@", "run.toml", "--model.name", &name, "--output-dir", "again"]);
    again.env_remove("HF_HUB_OFFLINE").env("HF_HOME", dir.path("hf2")).env("HF_ENDPOINT", &server.endpoint);
    Ran::of(again.output().unwrap()).succeeds().says(&["Step 2 | "]);
    dir.sft(&["--model.name", "merged", "--output-dir", "direct"]).succeeds();
    assert_eq!(dir.losses("again"), dir.losses("direct"));
}

#[test]
fn a_whole_model_has_a_card_and_goes_by_its_runs_folder() {
    let (server, dir) = (Server::new(&[]), RunDir::new());
    dir.sft(&["--model.lora", "None", "--output-dir", "full"]).succeeds();
    let card = dir.text("full/weights/step_2/README.md");
    for words in ["library_name: transformers", "All weights of the base model", "| Trained | all weights |"]
    {
        assert!(card.contains(words), "{words} in {card}");
    }
    let ran = push(&dir, &server, &["full", "--repo", REPO]).succeeds();
    ran.says(&["full/weights/step_2 to owner/mine", "model.safetensors", "tokenizer.json", "STABLE"]);
    assert!(!held(&server, "main").contains(&"STABLE".to_string()));
    push(&dir, &server, &["nowhere", "--repo", REPO]).fails(1).says(&["there is no such folder"]);
    push(&dir, &server, &["full/logs", "--repo", REPO]).fails(1).says(&["neither an adapter", "of a run"]);
}

/// To see that this hub is like the real one, and that others ask it the same: start it, let `huggingface_hub` push to the
/// endpoint that it prints (`HF_HUB_DISABLE_XET=1`), end its input, and read what was asked.
#[test]
#[ignore = "waits for another client"]
fn a_hub_for_other_clients() {
    let server = Server::new(&[]);
    println!("{}", server.endpoint);
    std::io::stdin().read_line(&mut String::new()).unwrap();
    for asked in server.asked("") {
        let body: String = String::from_utf8_lossy(&asked.body).chars().take(400).collect();
        println!("{} {} {:?} {body}", asked.method, asked.path, asked.length);
    }
    println!("{:?}", held(&server, "main"));
}
