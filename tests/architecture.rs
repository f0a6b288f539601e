//! The layout's promises, held by reading the sources: imports run one way, backends and `unsafe`
//! stay in `ops/`, files stay short, and README's tables name what exists.

use std::fs;
use std::path::{Path, PathBuf};

/// Lower layers first; a module imports only from layers before its own, and from itself.
const LAYERS: &[&[&str]] = &[
    &["error", "folders", "terminal"],
    &["ops", "config", "assets"],
    &["hub", "device"],
    &["data"],
    &["model"],
    &["export", "report"],
    &["checkpoint"],
    &["train"],
    &["cli"],
];
const MAX_LINES: usize = 500;

#[test]
fn imports_run_one_way() {
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        let own = module(&path);
        let Some(own_layer) = layer(&own) else {
            assert!(["lib", "main"].contains(&own.as_str()), "`{own}` has no layer in tests/architecture.rs");
            continue;
        };
        for name in imports(&text) {
            if layer(&name).is_some_and(|imported| imported >= own_layer) && name != own {
                wrong.push(format!("{}: `{own}` imports `{name}`", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn backends_and_unsafe_stay_in_ops() {
    for (path, text) in sources().into_iter().filter(|(path, _)| module(path) != "ops") {
        for word in ["unsafe ", "AutodiffBackend", ": Backend", "<B>"] {
            assert!(!text.contains(word), "{} holds `{word}`; it belongs in src/ops/", path.display());
        }
    }
}

/// A message that was broken over two lines without a `\` holds the second one's indentation.
#[test]
fn messages_have_no_holes() {
    const HOLE: &str = "        ";
    for (path, text) in sources() {
        for line in text.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
            let code = line.split(" // ").next().unwrap_or_default();
            let hole = code.split_once(HOLE).filter(|(before, after)| {
                let word = |c: char| c.is_ascii_alphanumeric() || "`'.,;".contains(c);
                before.contains('"') && before.ends_with(word) && after.trim_start().starts_with(word)
            });
            assert!(hole.is_none(), "{}: {line}", path.display());
        }
    }
}

#[test]
fn files_stay_short() {
    for (path, text) in sources() {
        let lines = text.lines().count();
        assert!(lines <= MAX_LINES, "{}: {lines} lines, at most {MAX_LINES}", path.display());
    }
}

#[test]
fn readme_names_every_source_file_and_nothing_that_is_not_there() {
    let readme = fs::read_to_string(root().join("README.md")).expect("README.md");
    let folders = ["src/", "tests/", "docs/", "configs/", "examples/", "tools/", "assets/"];
    for word in readme.split(|c: char| "`()".contains(c) || c.is_whitespace()) {
        let word = word.trim_end_matches(['.', ',']);
        if folders.iter().any(|folder| word.starts_with(folder)) && !word.contains(['*', '<', '{']) {
            assert!(root().join(word).exists(), "README.md names `{word}`, which isn't there");
        }
    }
    for (path, _) in sources() {
        let name = path.file_name().expect("a file name").to_string_lossy();
        assert!(readme.contains(name.as_ref()), "README.md doesn't name `{}`", path.display());
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources() -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    let mut folders = vec![root().join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of the project") {
            let path = entry.expect("an entry of the folder").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                files.push((path.clone(), fs::read_to_string(&path).expect("a source file")));
            }
        }
    }
    assert!(files.len() > 20, "only {} source files were found", files.len());
    files
}

/// The first component under `src/`: `model` for `src/model/lora.rs` and for `src/model.rs`.
fn module(path: &Path) -> String {
    let relative = path.strip_prefix(root().join("src")).expect("a path under src");
    let first = relative.components().next().expect("a component").as_os_str().to_string_lossy();
    first.trim_end_matches(".rs").to_string()
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|names| names.contains(&module))
}

/// The modules that `crate::name` and `crate::{name, other::Thing}` name.
fn imports(text: &str) -> Vec<String> {
    let identifier =
        |s: &str| s.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    text.match_indices("crate::")
        .flat_map(|(at, prefix)| match text[at + prefix.len()..].strip_prefix('{') {
            Some(list) => top_level_items(list).iter().map(|item| identifier(item)).collect(),
            None => vec![identifier(&text[at + prefix.len()..])],
        })
        .collect()
}

/// `a, b::{c, d}` of `a, b::{c, d}} rest` as `["a", " b::{c, d}"]`.
fn top_level_items(list: &str) -> Vec<String> {
    let (mut items, mut depth) = (vec![String::new()], 0);
    for c in list.chars() {
        match c {
            '}' if depth == 0 => break,
            ',' if depth == 0 => items.push(String::new()),
            _ => {
                depth += i32::from(c == '{') - i32::from(c == '}');
                items.last_mut().expect("one item at least").push(c);
            }
        }
    }
    items
}
