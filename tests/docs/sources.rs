//! What the sources say: string literals, and who makes errors.

use std::fs;
use std::path::Path;

/// The files of `src/` by their path in it, without their tests.
pub fn files() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut files, mut folders) = (Vec::new(), vec![root.clone()]);
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                let text = fs::read_to_string(&path).expect("a source file");
                let text = text.split("#[cfg(test)]\nmod ").next().expect("a first part").to_string();
                let inner = path.strip_prefix(&root).expect("below src").to_string_lossy().into_owned();
                files.push((inner, text));
            }
        }
    }
    files.retain(|(path, _)| !path.contains("tests"));
    assert!(files.len() > 50, "{} files", files.len());
    files
}

/// The string literals of a source as the program prints them.
pub fn literals(source: &str) -> Vec<String> {
    let mut literals = Vec::new();
    let mut rest = source;
    while let Some(at) = rest.find(['"', '\'', '/', 'r']) {
        let here = &rest[at..];
        rest = &here[1..];
        if here.starts_with("//") {
            rest = here.split_once('\n').map_or("", |(_, after)| after);
        } else if let Some(after) = here.strip_prefix("'\"'") {
            rest = after;
        } else if let Some(raw) = here.strip_prefix("r#\"") {
            let (text, after) = raw.split_once("\"#").expect("a raw literal ends");
            literals.push(text.into());
            rest = after;
        } else if here.starts_with('"') {
            let end = end_of(rest);
            literals.push(unescaped(&rest[..end]));
            rest = &rest[end + 1..];
        }
    }
    literals
}

/// Where the quote is that closes a literal.
fn end_of(text: &str) -> usize {
    let mut escaped = false;
    let end = text.char_indices().find(|&(_, c)| {
        let closes = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        closes
    });
    end.expect("a literal ends").0
}

fn unescaped(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some('n') => out.push('\n'),
                // The text goes on in the next line, without its indent.
                Some('\n') => while chars.next_if(|c| c.is_whitespace()).is_some() {},
                Some(other) => out.push(other),
                None => {}
            },
            '{' | '}' if chars.peek() == Some(&c) => {
                chars.next();
                out.push(c);
            }
            c => out.push(c),
        }
    }
    out
}

/// Whether errors are made here, or problems of a configuration.
pub fn makes_errors(source: &str) -> bool {
    let makers = ["data", "model", "adapter", "checkpoint", "device", "train", "rank"];
    let kinds = ["Usage {", "Hub {", "Config(vec!["];
    let made = makers
        .map(|maker| format!("Error::{maker}("))
        .into_iter()
        .chain(kinds.map(|k| format!("Error::{k}")));
    made.into_iter().any(|text| source.contains(&text)) || source.contains(".problem(")
}

/// The variants of an enum.
pub fn variants(source: &str, name: &str) -> Vec<String> {
    let (_, body) = source.split_once(&format!("pub enum {name} {{\n")).expect("the enum is there");
    let body = body.split("\n}\n").next().expect("a body");
    let names = body.lines().filter_map(|line| line.strip_prefix("    "));
    let names = names.filter(|line| line.starts_with(|c: char| c.is_ascii_uppercase()));
    names.map(|line| line.split([' ', '(', '{', ',']).next().unwrap_or(line).to_string()).collect()
}
