//! The documentation holds: what the guide tells a newcomer to do works and prints what it shows, the messages of the
//! error catalogue are the program's own, and every key that is named exists.
#![cfg(feature = "flex")]

mod common;
#[path = "docs/markdown.rs"]
mod markdown;
#[path = "docs/sources.rs"]
mod sources;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use common::neutral::{Case, ours};
use common::run::RunDir;
use markdown::{Block, blocks, rows, spans};
use tempfile::TempDir;

fn page(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Whether the pieces between the `…` of a pattern stand in the text, in their order.
fn holds(pattern: &str, text: &str) -> bool {
    let mut rest = text;
    pattern.split('…').filter(|piece| !piece.is_empty()).all(|piece| {
        let found = rest.find(piece);
        rest = found.map_or("", |at| &rest[at + piece.len()..]);
        found.is_some()
    })
}

// The guide.

const MARK: &str = "@@@@ line ";

/// All commands of the guide as one script, in the order of the page. Each prints its line first.
fn script(blocks: &[Block]) -> String {
    let mut script = String::from("set -euo pipefail\nexec 2>&1\n");
    for Block { info, text, line } in blocks {
        match info.split_once(' ').unwrap_or((info, "")) {
            ("sh", "") => writeln!(script, "echo '{MARK}{line}'\n{text}").unwrap(),
            ("sh", needs) if needs.starts_with("needs ") => {
                assert!(!text.contains("embertune "), "docs/guide.md:{line}: a command of ours is run");
                eprintln!("docs/guide.md:{line}: not run, it {needs}");
            }
            ("toml" | "python", file) if !file.is_empty() => {
                writeln!(script, "cat > {file} <<'END OF FILE'\n{text}END OF FILE").unwrap();
            }
            ("text", "") => {}
            _ => panic!("docs/guide.md:{line}: a block of `{info}`"),
        }
    }
    script
}

#[test]
fn the_guide_works_and_prints_what_it_shows() {
    let home = TempDir::new().unwrap();
    let blocks = blocks(&page("docs/guide.md"));
    let bin = Path::new(env!("CARGO_BIN_EXE_embertune")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-c", &script(&blocks)]).current_dir(env!("CARGO_MANIFEST_DIR"));
    bash.env("HOME", home.path()).env("PATH", path).env("HF_HUB_OFFLINE", "1");
    for name in ["XDG_CACHE_HOME", "HF_HOME", "RUST_LOG", "NEVER_CLEAN_OUTPUT_DIR"] {
        bash.env_remove(name);
    }
    let output = bash.output().expect("bash runs");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}");

    let mut last = 0;
    for Block { info, text, line } in &blocks {
        match info.as_str() {
            "sh" => last = *line,
            "text" => {
                let of_command = told.split(MARK).find(|part| part.starts_with(&format!("{last}\n")));
                let mut printed = of_command.expect("each command prints its line").lines();
                for (n, wanted) in text.lines().enumerate().filter(|(_, wanted)| !wanted.is_empty()) {
                    let at = line + 1 + n;
                    assert!(printed.any(|l| holds(wanted, l)), "docs/guide.md:{at}: `{wanted}` in\n{told}");
                }
            }
            _ => {}
        }
    }
    in_peft(home.path());
}

/// `ask.py` of the guide says what `generate` says, where there is a Python with PEFT.
fn in_peft(home: &Path) {
    let Ok(python) = std::env::var("EMBERTUNE_PYTHON") else {
        return eprintln!("EMBERTUNE_PYTHON is not set: `ask.py` is not run");
    };
    let folder = home.join("captain");
    let adapter = "outputs/captain/weights/step_80/lora_adapters";
    let cache = home.join(".cache/embertune").read_dir().unwrap().map(|entry| entry.unwrap().path());
    let base = cache.into_iter().find(|path| path.join("config.json").exists()).expect("the tiny model");
    let ask = Command::new(python)
        .args(["ask.py".as_ref(), base.as_os_str(), adapter.as_ref()])
        .current_dir(&folder)
        .output();
    let ask = ask.expect("EMBERTUNE_PYTHON runs");
    assert!(ask.status.success(), "{}", String::from_utf8_lossy(&ask.stderr));
    let mut ours = Command::new(env!("CARGO_BIN_EXE_embertune"));
    ours.args(["generate", "--device", "flex", "--model"]).arg(&base);
    ours.args(["--adapter", adapter, "How many legs does a spider have?"]).current_dir(&folder);
    let [theirs, ours] = [ask, ours.output().unwrap()].map(|out| String::from_utf8(out.stdout).unwrap());
    assert_eq!(theirs.trim(), ours.trim());
}

// The error catalogue.

/// The messages of the catalogue, each with its line.
fn catalogue() -> Vec<(usize, String)> {
    let text = page("docs/errors.md");
    let messages = text.lines().enumerate().filter_map(|(n, line)| {
        let (message, _) = line.strip_prefix("| `` ")?.split_once(" `` |")?;
        Some((n + 1, message.to_string()))
    });
    messages.collect()
}

#[test]
fn each_message_of_the_catalogue_is_one_of_the_program() {
    let literals: Vec<String> =
        sources::files().into_iter().flat_map(|(_, text)| sources::literals(&text)).collect();
    let catalogue = catalogue();
    assert!(catalogue.len() > 100, "{} messages were found", catalogue.len());
    let short = |message: &str| message.chars().filter(|c| c.is_alphabetic()).count() < 6;
    let said = |message: &str| literals.iter().any(|literal| holds(message, literal));
    let wrong = catalogue.iter().filter(|(_, message)| short(message) || !said(message));
    let wrong: Vec<String> = wrong.map(|(line, message)| format!("{line}: `{message}`")).collect();
    assert!(
        wrong.is_empty(),
        "nothing says these lines of docs/errors.md, or they are too short\n{}",
        wrong.join("\n")
    );
    let mut messages: Vec<&String> = catalogue.iter().map(|(_, message)| message).collect();
    messages.sort();
    messages.dedup();
    assert_eq!(messages.len(), catalogue.len(), "a message stands there twice");
}

/// Sources without an entry, and why.
const WITHOUT_ENTRY: &[(&str, &str)] = &[
    ("cli.rs", "the system takes no handler for Ctrl-C"),
    ("data/ahead.rs", "no thread can be started"),
    ("data/row.rs", "passes on what others found"),
    ("model/decoder.rs", "a caller of the library gave another batch"),
    ("model/inputs.rs", "a caller of the library gave another batch"),
    ("train/fit.rs", "passes on what others found, with another hint"),
    ("train/ranks/threads.rs", "passes on what others found"),
    ("train/resume.rs", "passes on what others found"),
];

#[test]
fn every_kind_of_error_and_every_file_that_makes_one_is_in_the_catalogue() {
    let text = page("docs/errors.md");
    let kinds: BTreeSet<String> = sources::variants(&page("src/error.rs"), "Error").into_iter().collect();
    assert!(kinds.contains("Interrupted"), "{kinds:?}");
    let named = spans(&text).into_iter().filter_map(|span| span.strip_prefix("Error::").map(String::from));
    assert_eq!(named.collect::<BTreeSet<_>>(), kinds);

    let catalogue = catalogue();
    let silent = |text: &str| {
        let literals = sources::literals(text);
        !catalogue.iter().any(|(_, message)| literals.iter().any(|l| holds(message, l)))
    };
    let files = sources::files().into_iter().filter(|(_, text)| sources::makes_errors(text) && silent(text));
    let files: BTreeSet<String> = files.map(|(path, _)| path).collect();
    let without = WITHOUT_ENTRY.iter().map(|(path, _)| path.to_string()).collect();
    assert_eq!(files, without, "files of src/ whose errors docs/errors.md doesn't have, and those known");
}

/// The faults that the goldens hold, as the command tells them.
fn faults() -> Vec<(String, String)> {
    let areas = ["config", "data", "model", "adapter"];
    let told = areas.iter().flat_map(|area| Case::of_area(area)).filter_map(|case| {
        let dir = RunDir::new();
        let file = |kind, ok| case.file(kind, ok).to_str().unwrap().to_string();
        let (model, tokenizer) = (file("model", "_ok/model"), file("tokenizer", "_ok/model"));
        let (data, adapter) = (file("data", "_ok/train.jsonl"), file("adapter", "_ok/adapter"));
        let config = case.file("config", "_ok/config.toml");
        let ran = if adapter.ends_with("_ok/adapter") && !config.ends_with("_ok/config.toml") {
            let text = std::fs::read_to_string(&config).unwrap();
            dir.write("case.toml", &ours(&text));
            dir.run(&["check", "@", "case.toml"])
        } else if adapter.ends_with("_ok/adapter") {
            let args = ["--model.name", &model, "--tokenizer.name", &tokenizer, "--data.name", &data];
            dir.run(&[&["check", "@", "run.toml"], &args[..]].concat())
        } else {
            dir.run(&["merge", "--base", &model, "--adapter", &adapter, "--out", "merged"])
        };
        (ran.code != Some(0)).then(|| (case.name().to_string(), ran.stderr))
    });
    told.collect()
}

/// Cases that the parser of TOML tells, in words of its own.
const IN_TOML_S_WORDS: &[&str] = &["duplicate_key", "toml_syntax"];

#[test]
fn every_fault_of_the_goldens_is_explained() {
    let catalogue = catalogue();
    let faults = faults();
    assert!(faults.len() > 40, "only {} cases failed", faults.len());
    let unexplained = faults.iter().filter(|(case, told)| {
        let error = told.split_once("error: ").unwrap_or_else(|| panic!("{case}: {told}")).1;
        !IN_TOML_S_WORDS.contains(&case.as_str())
            && !catalogue.iter().any(|(_, message)| holds(message, error))
    });
    let unexplained: Vec<String> = unexplained.map(|(case, told)| format!("{case}: {told}")).collect();
    assert!(unexplained.is_empty(), "docs/errors.md explains none of these\n{}", unexplained.join("\n"));
}

// Keys.

/// What `docs/config.md` has: keys by their whole path, sections, and the words that stand as values.
#[derive(Default)]
struct Keys {
    paths: BTreeSet<String>,
    sections: BTreeSet<String>,
    names: BTreeSet<String>,
    values: BTreeSet<String>,
}

impl Keys {
    fn read() -> Self {
        let (mut keys, mut section) = (Self::default(), String::new());
        for line in page("docs/config.md").lines() {
            if let Some(title) = line.strip_prefix("## ") {
                section = title.trim_matches(['`', '[', ']']).to_string();
                keys.sections.insert(section.clone());
            } else if let Some((name, rest)) = line.strip_prefix("| `").and_then(|l| l.split_once("` | ")) {
                let prefix = if section == "Top level" { String::new() } else { format!("{section}.") };
                keys.paths.insert(prefix + name);
                keys.names.insert(name.into());
                let words = spans(rest.split(" | ").next().unwrap_or(""));
                keys.values.extend(words.iter().map(|word| word.trim_matches('"').to_string()));
            }
        }
        assert!(keys.paths.contains("optim.lr") && keys.values.contains("cosine"));
        keys
    }

    /// `--data.seq-len 64` and `data.seq_len = 64` as `data.seq_len`.
    fn plain(span: &str) -> String {
        let key = span.trim_start_matches("--").split([' ', '=']).next().unwrap_or("");
        if span.starts_with("--") { key.replace('-', "_") } else { key.to_string() }
    }

    /// Whether a word between backticks is meant as a key of ours: its first part is one of our sections.
    fn is_meant(&self, span: &str) -> bool {
        let key = Self::plain(span);
        let letters = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_.".contains(c);
        let is_file =
            [".safetensors", ".json", ".jsonl", ".model", ".weight"].iter().any(|end| key.ends_with(end));
        let section = key.split_once('.').is_some_and(|(first, _)| self.sections.contains(first));
        section && !is_file && key.chars().all(letters)
    }

    fn has(&self, path: &str) -> bool {
        self.paths.contains(path) || self.sections.contains(path)
    }
}

#[test]
fn every_key_that_a_page_names_exists() {
    let keys = Keys::read();
    let mut wrong = Vec::new();
    for name in
        ["README.md", "docs/guide.md", "docs/errors.md", "docs/runs.md", "docs/ranks.md", "docs/cuda.md"]
    {
        let is_section = |s: &&str| s.chars().all(|c| c.is_ascii_lowercase() || "_.".contains(c));
        for span in spans(&page(name)) {
            let section = span.strip_prefix('[').and_then(|s| s.strip_suffix(']')).filter(is_section);
            let there = match section {
                Some(section) => keys.sections.contains(section),
                None => !keys.is_meant(&span) || keys.has(&Keys::plain(&span)),
            };
            wrong.extend((!there).then(|| format!("{name}: `{span}`")));
        }
    }
    assert!(wrong.is_empty(), "keys that docs/config.md doesn't have\n{}", wrong.join("\n"));
}

/// Words of our column that are no keys: fields of a row, forms of a name, files of a run.
const NO_KEYS: &[&str] =
    &["train", "weight", "\"train\": false", "name@revision", "metrics.jsonl", "convert_hf_to_gguf.py"];

/// Whether a span of our column is there: a key, a section, a value, a command, a file. `parent` is the section of the
/// span before, which `.name` counts from.
fn is_ours(keys: &Keys, commands: &str, parent: &mut String, span: &str) -> bool {
    if let Some(command) = span.strip_prefix("embertune ") {
        let command = command.split(' ').next();
        return commands.lines().any(|line| line.trim_start().split(' ').next() == command);
    }
    let key = Keys::plain(span);
    let whole = if key.starts_with('.') { format!("{parent}{key}") } else { key.clone() };
    if let Some((section, _)) = whole.rsplit_once('.') {
        *parent = section.into();
    }
    NO_KEYS.contains(&span)
        || keys.sections.contains(span.trim_matches(['[', ']']))
        || keys.has(&whole)
        || keys.names.contains(&key)
        || keys.values.contains(span.trim_matches('"'))
        || span.contains('/') && Path::new(env!("CARGO_MANIFEST_DIR")).join(span).exists()
}

#[test]
fn what_other_trainers_keys_become_exists() {
    let keys = Keys::read();
    let help = RunDir::new().run(&["--help"]).stdout;
    let (mut named, mut wrong) = (0, Vec::new());
    for row in rows(&page("docs/coming_from.md")) {
        let ours =
            row.header.iter().position(|h| h == "here" || h.starts_with("`[")).expect("a column of ours");
        let mut parent = row.header[ours].trim_matches(['`', '[', ']']).to_string();
        let found = spans(&row.cells[ours]);
        named += found.len();
        let absent = found.into_iter().filter(|span| !is_ours(&keys, &help, &mut parent, span));
        wrong.extend(absent.map(|span| format!("{}: `{span}`", row.line)));
        let beside =
            spans(&row.cells[2]).into_iter().filter(|s| keys.is_meant(s) && !keys.has(&Keys::plain(s)));
        wrong.extend(beside.map(|span| format!("{}: `{span}`", row.line)));
    }
    assert!(wrong.is_empty(), "docs/coming_from.md names what isn't there\n{}", wrong.join("\n"));
    assert!(named > 120, "only {named} keys were found");
}

#[test]
fn the_configurations_that_pages_show_are_read() {
    let folder = TempDir::new().unwrap();
    for name in ["README.md", "docs/guide.md", "docs/coming_from.md", "docs/runs.md"] {
        let page = blocks(&page(name));
        for Block { text, line, .. } in
            page.iter().filter(|block| block.info.split(' ').next() == Some("toml"))
        {
            let file = folder.path().join("run.toml");
            std::fs::write(&file, text).unwrap();
            let args = ["@".to_string(), file.display().to_string()];
            if let Err(error) = embertune::config::load(&args) {
                panic!("{name}:{line}: {error}");
            }
        }
    }
}
