//! Values as the user wrote them, with where: TOML text and flags become one tree of [`Node`]s.

use crate::error::Problem;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Where a value was written: a file and line, or a flag (line 0). Sorts in the order things were given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    source: usize,
    line: usize,
}

impl Place {
    /// Whether this is of an earlier file or flag.
    pub fn is_before(self, other: Place) -> bool {
        self.source < other.source
    }
}

/// The names of everything that was read.
#[derive(Debug, Default)]
pub(crate) struct Sources(Vec<String>);

impl Sources {
    /// A file or flag; its places count lines from 1, a flag's is line 0.
    pub fn add(&mut self, name: impl Into<String>) -> Place {
        self.0.push(name.into());
        Place { source: self.0.len() - 1, line: 0 }
    }

    /// `file.toml:12` or `--optim.lr`.
    pub fn show(&self, place: Place) -> String {
        match place.line {
            0 => self.0[place.source].clone(),
            line => format!("{}:{line}", self.0[place.source]),
        }
    }
}

/// A value and its place.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub value: Value,
    pub place: Place,
}

/// What was written. A flag's words have no type until a key reads them.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    Table(Vec<(String, Node)>),
    List(Vec<Node>),
    Text(String),
    Integer(i64),
    Float(f64),
    Boolean(bool),
    /// Whatever no key takes: a date, a number too large, JSON's null.
    Other(String),
    /// The words after a flag.
    Words(Vec<String>),
    /// `--flag` alone.
    Bare,
    /// `--no-flag`.
    Negated,
}

impl Node {
    pub fn table(place: Place) -> Self {
        Node { value: Value::Table(Vec::new()), place }
    }

    /// This node below `path`.
    pub fn nested(self, path: &[String]) -> Self {
        path.iter().rev().fold(self, |inner, name| Node {
            place: inner.place,
            value: Value::Table(vec![(name.clone(), inner)]),
        })
    }

    /// Lays `over` on top: tables merge key by key, anything else is replaced. A bare flag keeps a table.
    pub fn merge(&mut self, over: Node) {
        match (&mut self.value, over.value) {
            (Value::Table(_), Value::Bare) => {}
            (Value::Table(old), Value::Table(new)) => {
                for (name, node) in new {
                    match old.iter_mut().find(|(n, _)| *n == name) {
                        Some((_, below)) => below.merge(node),
                        None => old.push((name, node)),
                    }
                }
            }
            (_, value) => *self = Node { value, place: over.place },
        }
    }

    /// What stands here, for messages.
    pub fn found(&self) -> String {
        match &self.value {
            Value::Table(_) => "a table".into(),
            Value::List(_) => "a list".into(),
            Value::Text(text) => format!("the string \"{text}\""),
            Value::Integer(number) => format!("the integer {number}"),
            Value::Float(number) => format!("the number {number}"),
            Value::Boolean(value) => format!("`{value}`"),
            Value::Other(text) => format!("`{text}`"),
            Value::Words(words) => format!("`{}`", words.join(" ")),
            Value::Bare => "given without a value".into(),
            Value::Negated => "switched off".into(),
        }
    }

    /// `None` as a string or flag, or `--no-…`.
    pub fn is_none(&self) -> bool {
        match &self.value {
            Value::Text(text) => text == "None",
            Value::Words(words) => words == &["None"],
            Value::Negated => true,
            _ => false,
        }
    }

    pub fn entries(&self) -> Option<&[(String, Node)]> {
        match &self.value {
            Value::Table(entries) => Some(entries),
            Value::Bare => Some(&[]),
            _ => None,
        }
    }

    /// The items of a list: TOML's, JSON's, or one of each of a flag's words.
    pub fn items(&self) -> Option<Vec<Node>> {
        match &self.value {
            Value::List(items) => Some(items.clone()),
            Value::Words(words) => match json(words, '[', self.place) {
                Some(Node { value: Value::List(items), .. }) => Some(items),
                _ => {
                    let item = |word: &String| Node { value: Value::Words(vec![word.clone()]), ..*self };
                    Some(words.iter().map(item).collect())
                }
            },
            _ => None,
        }
    }

    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Text(text) => Some(text),
            _ => self.word(),
        }
    }

    pub fn integer(&self) -> Option<i64> {
        match &self.value {
            Value::Integer(number) => Some(*number),
            _ => self.word()?.parse().ok(),
        }
    }

    pub fn number(&self) -> Option<f64> {
        match &self.value {
            Value::Float(number) => Some(*number),
            Value::Integer(number) => Some(*number as f64),
            _ => self.word()?.parse().ok(),
        }
    }

    pub fn boolean(&self) -> Option<bool> {
        match &self.value {
            Value::Boolean(value) => Some(*value),
            Value::Bare => Some(true),
            Value::Negated => Some(false),
            _ => self.word()?.parse().ok(),
        }
    }

    /// The only word of a flag.
    fn word(&self) -> Option<&str> {
        match &self.value {
            Value::Words(words) if words.len() == 1 => Some(&words[0]),
            _ => None,
        }
    }
}

/// A flag's only word as JSON, if it starts like it and is it.
pub(crate) fn json(words: &[String], start: char, place: Place) -> Option<Node> {
    let [word] = words else { return None };
    let value = word.starts_with(start).then(|| serde_json::from_str(word).ok())??;
    Some(from_json(value, place))
}

fn from_json(value: serde_json::Value, place: Place) -> Node {
    use serde_json::Value as Json;
    let value = match value {
        Json::Bool(value) => Value::Boolean(value),
        Json::String(text) => Value::Text(text),
        Json::Array(items) => Value::List(items.into_iter().map(|v| from_json(v, place)).collect()),
        Json::Object(map) => Value::Table(map.into_iter().map(|(k, v)| (k, from_json(v, place))).collect()),
        Json::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(integer), _) => Value::Integer(integer),
            (None, Some(float)) => Value::Float(float),
            (None, None) => Value::Other(number.to_string()),
        },
        Json::Null => Value::Text("None".into()),
    };
    Node { value, place }
}

/// Reads TOML text; what is wrong with its syntax goes to `problems`, all of it.
pub(crate) fn parse(text: &str, name: &str, sources: &mut Sources, problems: &mut Vec<Problem>) -> Node {
    let start = sources.add(name);
    let (table, mut errors) = DeTable::parse_recoverable(text);
    errors.sort_by_key(|error| error.span().map(|span| span.start));
    for error in errors {
        let span = error.span().unwrap_or(0..0);
        let place = sources.show(Place { line: line_of(text, span.start), ..start });
        let message = format!("{}\n{}", what_is_wrong(&error, text, span.start), caret(text, span));
        problems.push(Problem { place, message, hint: String::new() });
    }
    Node { value: table_value(table.get_ref(), text, start), place: start }
}

/// The parser's words, but for a key without a value, where it asks for quotes.
fn what_is_wrong<'e>(error: &'e toml::de::Error, text: &str, at: usize) -> &'e str {
    let (before, after) = text.split_at_checked(at).unwrap_or((text, ""));
    let line_ends = after.is_empty() || after.starts_with(['\n', '\r', '#']);
    if line_ends && before.trim_end_matches([' ', '\t']).ends_with('=') {
        "a value is missing"
    } else {
        error.message()
    }
}

fn table_value(table: &DeTable<'_>, text: &str, start: Place) -> Value {
    let entry = |(key, value): (&Spanned<_>, &Spanned<DeValue<'_>>)| {
        let place = Place { line: line_of(text, key.span().start), ..start };
        let name: &std::borrow::Cow<'_, str> = key.get_ref();
        (name.to_string(), Node { value: value_of(value.get_ref(), text, start), place })
    };
    Value::Table(table.iter().map(entry).collect())
}

fn value_of(value: &DeValue<'_>, text: &str, start: Place) -> Value {
    match value {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => Value::Integer(number),
            Err(_) => Value::Other(number.to_string()),
        },
        DeValue::Float(number) => match number.as_str().parse() {
            Ok(number) => Value::Float(number),
            Err(_) => Value::Other(number.to_string()),
        },
        DeValue::Boolean(value) => Value::Boolean(*value),
        DeValue::Datetime(date) => Value::Other(date.to_string()),
        DeValue::Array(items) => Value::List(
            items
                .iter()
                .map(|item| Node {
                    value: value_of(item.get_ref(), text, start),
                    place: Place { line: line_of(text, item.span().start), ..start },
                })
                .collect(),
        ),
        DeValue::Table(table) => table_value(table, text, start),
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text.as_bytes()[..offset.min(text.len())].iter().filter(|&&b| b == b'\n').count()
}

/// The line of `span` with a caret below its start.
fn caret(text: &str, span: std::ops::Range<usize>) -> String {
    let start = span.start.min(text.len());
    let begin = text[..start].rfind('\n').map_or(0, |at| at + 1);
    let line = text[begin..].lines().next().unwrap_or("");
    let number = line_of(text, start).to_string();
    let column = text[begin..start].chars().count();
    format!("    {number} | {line}\n    {} | {}^", " ".repeat(number.len()), " ".repeat(column))
}
