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

/// `--section.key …`.
#[derive(Debug)]
pub(crate) struct Flag {
    /// As it was given, without its value.
    name: String,
    /// The key, from the top.
    pub path: Vec<String>,
    pub given: Given,
    /// `{"a": 1}` is the text that it is, not a table.
    is_text: bool,
}

#[derive(Debug)]
pub(crate) enum Given {
    Value(Value),
    /// `--model @ model.toml`.
    File(PathBuf),
}

impl Flag {
    /// The value as a tree from the top.
    pub fn node(&self, value: &Value, sources: &mut Sources) -> Node {
        let place = sources.add(&self.name);
        let object = match value {
            Value::Words(words) if !self.is_text => json(words, '{', place),
            _ => None,
        };
        object.unwrap_or(Node { value: value.clone(), place }).nested(&self.path)
    }
}

/// Reads the arguments after the command's name.
pub(crate) fn parse(args: &[String], problems: &mut Vec<Problem>) -> Arguments {
    let mut parser = Parser { args, problems, reference: Reference::new(), arguments: Arguments::default() };
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
        let (key, words) = match flag.split_once('=') {
            Some((key, value)) => (key, vec![value.to_string()]),
            None => (flag, self.words()),
        };
        let name = format!("--{key}");
        let (path, negated) = path_of(key);
        let given = match (negated, words.is_empty()) {
            (false, false) => Some(Given::Value(Value::Words(words))),
            (false, true) => self.section_file(&path, &name).unwrap_or(Some(Given::Value(Value::Bare))),
            (true, true) => Some(Given::Value(Value::Negated)),
            (true, false) => {
                self.problem(&name, "a value after `--no-`", "give `--key value` or `--no-key`, not both");
                None
            }
        };
        let is_text = self.reference.takes_text(&path.join("."));
        self.arguments.flags.extend(given.map(|given| Flag { name, path, given, is_text }));
    }

    /// The file, if a section and not a boolean stands before the `@`; within, `None` if the file is missing.
    fn section_file(&mut self, path: &[String], name: &str) -> Option<Option<Given>> {
        let (at, rest) = self.args.split_first()?;
        let glued = at.strip_prefix('@').filter(|_| self.reference.is_section(&path.join(".")))?;
        self.args = rest;
        Some(self.file(glued, name).map(Given::File))
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
