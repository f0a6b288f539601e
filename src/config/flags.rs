//! The command line: `@ file`, `--section @ file`, `--section.key value`, `--flag`, `--no-flag`.

use super::reference::Reference;
use super::source::{Node, Sources, Value, json};
use crate::error::Problem;
use std::path::PathBuf;

/// What the arguments say, in their order.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    /// `@ file`.
    pub files: Vec<PathBuf>,
    /// Flags and section files; they win over every file.
    pub flags: Vec<Flag>,
}

#[derive(Debug)]
pub(crate) enum Flag {
    /// A key and its value, as a tree from the top.
    Value(Node),
    /// `--model @ model.toml`.
    SectionFile { section: Vec<String>, file: PathBuf },
}

/// Reads the arguments after the command's name.
pub(crate) fn parse(args: &[String], sources: &mut Sources, problems: &mut Vec<Problem>) -> Arguments {
    let mut parser =
        Parser { args, sources, problems, reference: Reference::new(), arguments: Arguments::default() };
    while let Some((first, rest)) = parser.args.split_first() {
        parser.args = rest;
        match (first.strip_prefix('@'), first.strip_prefix("--")) {
            (Some(glued), _) => {
                let file = parser.file(glued, first);
                parser.arguments.files.extend(file);
            }
            (_, Some(flag)) if !flag.is_empty() => parser.flag(flag),
            _ => parser.problem(
                first,
                "this stands alone",
                "a file is `@ file.toml`, a key is `--section.key value`",
            ),
        }
    }
    parser.arguments
}

struct Parser<'a> {
    args: &'a [String],
    sources: &'a mut Sources,
    problems: &'a mut Vec<Problem>,
    reference: Reference,
    arguments: Arguments,
}

impl Parser<'_> {
    fn problem(&mut self, place: &str, message: &str, hint: &str) {
        let (place, message, hint) = (place.to_string(), message.to_string(), hint.to_string());
        self.problems.push(Problem { place, message, hint });
    }

    /// The file after `@`, glued to it or the next argument.
    fn file(&mut self, glued: &str, place: &str) -> Option<PathBuf> {
        if !glued.is_empty() {
            return Some(glued.into());
        }
        match self.args.split_first() {
            Some((file, rest)) if !file.starts_with("--") => {
                self.args = rest;
                Some(file.into())
            }
            _ => {
                self.problem(place, "a file is missing after `@`", "write `@ file.toml`");
                None
            }
        }
    }

    fn flag(&mut self, flag: &str) {
        let (key, glued) = match flag.split_once('=') {
            Some((key, value)) => (key, Some(value.to_string())),
            None => (flag, None),
        };
        let at = self.sources.add(format!("--{key}"));
        let (path, negated) = path_of(key);
        let words = match glued {
            Some(value) => vec![value],
            None => self.words(),
        };
        let section = self.reference.is_section(&path.join("."));
        if words.is_empty()
            && !negated
            && section
            && self.args.first().is_some_and(|arg| arg.starts_with('@'))
        {
            let glued = self.args[0][1..].to_string();
            self.args = &self.args[1..];
            let file = self.file(&glued, &format!("--{key}"));
            self.arguments.flags.extend(file.map(|file| Flag::SectionFile { section: path, file }));
            return;
        }
        let node = match (negated, words.is_empty()) {
            (true, true) => Node { value: Value::Negated, place: at },
            (true, false) => {
                let hint = "give `--key value` or `--no-key`, not both";
                return self.problem(&format!("--{key}"), "a value after `--no-`", hint);
            }
            (false, true) => Node { value: Value::Bare, place: at },
            (false, false) => json(&words, '{', at).unwrap_or(Node { value: Value::Words(words), place: at }),
        };
        self.arguments.flags.push(Flag::Value(node.nested(&path)));
    }

    /// The words up to the next flag or file.
    fn words(&mut self) -> Vec<String> {
        let is_word = |arg: &&String| !arg.starts_with("--") && !arg.starts_with('@');
        let words: Vec<String> = self.args.iter().take_while(is_word).cloned().collect();
        self.args = &self.args[words.len()..];
        words
    }
}

/// `model.lora.use-rslora` → its keys; `no-` before the first or the last of them negates.
fn path_of(key: &str) -> (Vec<String>, bool) {
    let mut path: Vec<String> = key.split('.').map(|part| part.replace('-', "_")).collect();
    for end in [0, path.len() - 1] {
        if let Some(rest) = path[end].strip_prefix("no_") {
            path[end] = rest.to_string();
            return (path, true);
        }
    }
    (path, false)
}
