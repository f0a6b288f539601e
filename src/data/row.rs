//! One row of a data file → a conversation (or plain text) in one normal form.
//!
//! | columns | becomes |
//! |---|---|
//! | `messages` | the messages |
//! | `prompt` + `completion` | message lists or single messages, joined; strings are one user and one assistant message; the prompt is context only |
//! | `conversations` | ShareGPT's `from`/`value` |
//! | `text` | plain text, no chat template |
//! | `input_ids` + `labels` | tokens as they are; -100 in `labels` = not trained |
//!
//! Beside them: `tools` (or `tool_defs`; list or JSON string), `chat_template_kwargs` (object or JSON
//! string), `system` (becomes the first message). `content` may be null or missing (then empty) or a
//! list of text parts (then joined). Anything else is an error that says what and where.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::error::Error;

/// Where a row stands: file and 1-based line (jsonl) or row (parquet).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub file: Arc<PathBuf>,
    /// 1-based line or row.
    pub row: usize,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.row)
    }
}

/// What is wrong with a row; [`Fault::at`] says where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    message: String,
    hint: String,
}

impl Fault {
    pub fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { message: message.into(), hint: hint.into() }
    }

    pub fn at(self, place: &Place) -> Error {
        Error::data(place.file.as_ref(), place.row, self.message, self.hint)
    }

    /// For faults of a model's files.
    pub fn at_file(self, path: &Path) -> Error {
        Error::model(path, self.message, self.hint)
    }

    fn hint(mut self, hint: &str) -> Self {
        self.hint = hint.into();
        self
    }
}

/// A row as the file has it.
#[derive(Debug, Clone)]
pub(super) struct RawRow {
    pub place: Place,
    pub columns: Map<String, Value>,
    /// Columns of a parquet file have one type, so absent fields of inner objects are there as nulls.
    pub padded_with_nulls: bool,
}

/// The shape a row was found in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Format {
    /// `messages`.
    Messages,
    /// `prompt` and `completion`.
    PromptCompletion,
    /// `conversations` with `from` and `value`.
    ShareGpt,
    /// `text`.
    Text,
    /// `input_ids` and `labels`.
    Tokens,
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Format::Messages => "messages",
            Format::PromptCompletion => "prompt + completion",
            Format::ShareGpt => "conversations",
            Format::Text => "text",
            Format::Tokens => "input_ids + labels",
        })
    }
}

/// The messages of one document and what goes into its chat template beside them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    /// Objects with `role` and `content` (always a string), maybe `tool_calls` and others.
    pub messages: Vec<Map<String, Value>>,
    /// The first so many messages are context and never trained.
    pub context: usize,
    /// The list of tools, if there is one.
    pub tools: Option<Value>,
    /// Further variables for the template.
    pub kwargs: Map<String, Value>,
}

/// A row in its normal form.
#[derive(Debug, Clone, PartialEq)]
pub enum Body {
    /// To be rendered by the chat template.
    Chat(Conversation),
    /// To be tokenised as it is; every token is trained.
    Text(String),
    /// Tokenised already.
    Tokens {
        /// Token ids.
        input_ids: Vec<i64>,
        /// The same ids, or -100 where a token is not trained (not shifted, as in transformers).
        labels: Vec<i64>,
    },
}

/// A row in its normal form, its shape and place.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Where it stands.
    pub place: Place,
    /// What it was.
    pub format: Format,
    /// What it says.
    pub body: Body,
}

/// Columns that mean something here; others are not read.
pub(super) const COLUMNS: [&str; 11] = [
    "messages",
    "prompt",
    "completion",
    "conversations",
    "text",
    "input_ids",
    "labels",
    "system",
    "tools",
    "tool_defs",
    "chat_template_kwargs",
];

const WANTED: &str =
    "`messages`, or `prompt` and `completion`, or `conversations`, or `text`, or `input_ids` and `labels`";

/// The rows of a data file, in their normal form.
///
/// # Errors
/// The file can't be read; each item: the row isn't right.
pub fn read_rows(path: &Path) -> Result<impl Iterator<Item = Result<Row, Error>>, Error> {
    Ok(super::source::open(path)?.map(|raw| normalise(raw?)))
}

/// Brings a row into its normal form.
pub(super) fn normalise(raw: RawRow) -> Result<Row, Error> {
    let RawRow { place, mut columns, padded_with_nulls } = raw;
    if padded_with_nulls {
        columns.values_mut().for_each(drop_nulls);
    }
    columns.retain(|_, value| !value.is_null());
    match body(&mut columns) {
        Ok((format, body)) => Ok(Row { place, format, body }),
        Err(fault) => Err(fault.at(&place)),
    }
}

fn body(columns: &mut Map<String, Value>) -> Result<(Format, Body), Fault> {
    let has = |name: &str| columns.contains_key(name);
    if has("messages") || has("conversations") || (has("prompt") && has("completion")) {
        return conversation(columns).map(|(format, conversation)| (format, Body::Chat(conversation)));
    }
    if let Some(text) = columns.shift_remove("text") {
        return match text {
            Value::String(text) => Ok((Format::Text, Body::Text(text))),
            other => Err(wrong_type("text", &other, "a string")),
        };
    }
    match (columns.shift_remove("input_ids"), columns.shift_remove("labels")) {
        (Some(ids), Some(labels)) => {
            let (input_ids, labels) = (numbers("input_ids", &ids)?, numbers("labels", &labels)?);
            Ok((Format::Tokens, Body::Tokens { input_ids, labels }))
        }
        (ids, labels) => {
            columns.extend(ids.map(|ids| ("input_ids".into(), ids)));
            columns.extend(labels.map(|labels| ("labels".into(), labels)));
            Err(wrong_columns(columns))
        }
    }
}

fn conversation(columns: &mut Map<String, Value>) -> Result<(Format, Conversation), Fault> {
    let mut context = 0;
    let (format, mut messages) = if let Some(value) = columns.shift_remove("messages") {
        (Format::Messages, messages("messages", value)?)
    } else if let Some(value) = columns.shift_remove("conversations") {
        (Format::ShareGpt, share_gpt(value)?)
    } else {
        let mut messages = turns("prompt", columns.shift_remove("prompt"), "user")?;
        context = messages.len();
        messages.extend(turns("completion", columns.shift_remove("completion"), "assistant")?);
        (Format::PromptCompletion, messages)
    };
    if let Some(system) = columns.shift_remove("system") {
        let Value::String(text) = system else {
            return Err(wrong_type("system", &system, "a string"));
        };
        messages.insert(0, simple_message("system", text));
        context += usize::from(context > 0);
    }
    let tools = columns.shift_remove("tools").or_else(|| columns.shift_remove("tool_defs"));
    let tools = tools.map(|value| list("tools", value)).transpose()?.map(Value::Array);
    let kwargs = columns.shift_remove("chat_template_kwargs").map(kwargs).transpose()?.unwrap_or_default();
    Ok((format, Conversation { messages, context, tools, kwargs }))
}

fn numbers(what: &str, value: &Value) -> Result<Vec<i64>, Fault> {
    let items = value.as_array().ok_or_else(|| wrong_type(what, value, "a list of numbers"))?;
    let number = |(i, item): (usize, &Value)| {
        item.as_i64().ok_or_else(|| wrong_type(&format!("{what}[{i}]"), item, "a whole number"))
    };
    items.iter().enumerate().map(number).collect()
}

fn wrong_columns(columns: &Map<String, Value>) -> Fault {
    let found = match columns.len() {
        0 => "no columns".to_string(),
        1 => format!("column {}", names(columns)),
        _ => format!("columns {}", names(columns)),
    };
    Fault::new(
        format!("found {found}; wanted {WANTED}"),
        "Rename the columns of the file to one of these shapes.",
    )
}

fn names(columns: &Map<String, Value>) -> String {
    columns.keys().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", ")
}

fn wrong_type(what: &str, found: &Value, wanted: &str) -> Fault {
    Fault::new(format!("`{what}` is {}; wanted {wanted}", describe(found)), "")
}

/// "the number 4", "a list", … for messages.
fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".to_string(),
        Value::Bool(b) => format!("the boolean {b}"),
        Value::Number(n) => format!("the number {n}"),
        Value::String(s) if s.chars().count() <= 40 => format!("the string {s:?}"),
        Value::String(_) => "a string".to_string(),
        Value::Array(_) => "a list".to_string(),
        Value::Object(_) => "an object".to_string(),
    }
}

/// A list, or a JSON string that holds one.
fn list(what: &str, value: Value) -> Result<Vec<Value>, Fault> {
    match value {
        Value::Array(items) => Ok(items),
        Value::String(text) => match serde_json::from_str(&text) {
            Ok(Value::Array(items)) => Ok(items),
            Ok(other) => Err(wrong_type(what, &other, "a list").hint("It was given as a JSON string.")),
            Err(error) => Err(Fault::new(
                format!("`{what}` is a string that is not JSON: {error}"),
                format!("`{what}` must be a list or a JSON string that holds a list."),
            )),
        },
        other => Err(wrong_type(what, &other, "a list or a JSON string")),
    }
}

fn kwargs(value: Value) -> Result<Map<String, Value>, Fault> {
    const WHAT: &str = "chat_template_kwargs";
    let value = match value {
        Value::String(text) => serde_json::from_str(&text)
            .map_err(|error| Fault::new(format!("`{WHAT}` is a string that is not JSON: {error}"), ""))?,
        other => other,
    };
    match value {
        Value::Object(mut map) => {
            map.retain(|_, value| !value.is_null());
            Ok(map)
        }
        other => Err(wrong_type(WHAT, &other, "an object or a JSON string")),
    }
}

fn messages(column: &str, value: Value) -> Result<Vec<Map<String, Value>>, Fault> {
    list(column, value)?
        .into_iter()
        .enumerate()
        .map(|(i, value)| message(&format!("{column}[{i}]"), value))
        .collect()
}

/// A side of `prompt` + `completion`: a list of messages, one message, or a string.
fn turns(column: &str, value: Option<Value>, role: &str) -> Result<Vec<Map<String, Value>>, Fault> {
    match value {
        Some(Value::String(text)) => Ok(vec![simple_message(role, text)]),
        Some(value @ Value::Object(_)) => Ok(vec![message(column, value)?]),
        Some(value @ Value::Array(_)) => messages(column, value),
        other => {
            Err(wrong_type(column, &other.unwrap_or_default(), "a string, a message or a list of messages"))
        }
    }
}

fn simple_message(role: &str, content: String) -> Map<String, Value> {
    let mut message = Map::new();
    message.insert("role".into(), role.into());
    message.insert("content".into(), content.into());
    message
}

fn message(place: &str, value: Value) -> Result<Map<String, Value>, Fault> {
    let Value::Object(mut message) = value else {
        return Err(wrong_type(place, &value, "an object with `role` and `content`"));
    };
    message.retain(|_, value| !value.is_null());
    match message.get("role") {
        Some(Value::String(role)) if ["system", "user", "assistant", "tool"].contains(&role.as_str()) => {}
        Some(Value::String(role)) => {
            return Err(Fault::new(
                format!("unknown role `{role}` in `{place}`; wanted `system`, `user`, `assistant` or `tool`"),
                "Chat templates drop roles they don't know without a word: rename the role in the file.",
            ));
        }
        Some(other) => return Err(wrong_type(&format!("{place}.role"), other, "a string")),
        None => {
            return Err(Fault::new(format!("`{place}` has no `role` (it has {})", names(&message)), ""));
        }
    }
    // In place: a template that prints whole messages sees the order of the fields.
    let content = message.get_mut("content").map(Value::take);
    let content = text_of(&format!("{place}.content"), content)?;
    message.insert("content".into(), content.into());
    if let Some(calls) = message.get_mut("tool_calls") {
        *calls = Value::Array(tool_calls(&format!("{place}.tool_calls"), calls.take())?);
    }
    Ok(message)
}

/// Content as one string: null and missing are empty, text parts are joined with nothing between.
fn text_of(what: &str, content: Option<Value>) -> Result<String, Fault> {
    match content {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for (i, part) in parts.iter().enumerate() {
                text.push_str(part_text(part).ok_or_else(|| not_text(what, i, part))?);
            }
            Ok(text)
        }
        Some(other) => Err(wrong_type(what, &other, "a string, null or a list of text parts")),
    }
}

fn part_text(part: &Value) -> Option<&str> {
    match part {
        Value::String(text) => Some(text),
        Value::Object(part) if part.get("type").is_none_or(|t| t == "text") => part.get("text")?.as_str(),
        _ => None,
    }
}

fn not_text(what: &str, i: usize, part: &Value) -> Fault {
    let found = match part.get("type") {
        Some(kind) => format!("of type {kind}"),
        None => describe(part),
    };
    Fault::new(
        format!("`{what}[{i}]` is {found}; wanted a text part"),
        "Only text is trained: drop rows with images, audio or video.",
    )
}

fn tool_calls(place: &str, value: Value) -> Result<Vec<Value>, Fault> {
    let mut calls = list(place, value)?;
    for (i, call) in calls.iter_mut().enumerate() {
        if let Value::String(text) = call
            && let Ok(parsed @ Value::Object(_)) = serde_json::from_str(text)
        {
            *call = parsed;
        }
        let Value::Object(fields) = call else {
            return Err(wrong_type(&format!("{place}[{i}]"), call, "an object"));
        };
        fields.retain(|_, value| !value.is_null());
        let function = match fields.get("function") {
            Some(Value::Object(function)) => function,
            _ => fields,
        };
        if !function.get("name").is_some_and(Value::is_string) {
            return Err(Fault::new(
                format!("`{place}[{i}]` has no function name"),
                "A call is {\"type\": \"function\", \"function\": {\"name\": …, \"arguments\": …}}.",
            ));
        }
    }
    Ok(calls)
}

/// ShareGPT's `from`/`value`; lists that hold ordinary messages are taken as such.
fn share_gpt(value: Value) -> Result<Vec<Map<String, Value>>, Fault> {
    let turns = list("conversations", value)?;
    let turn = |(i, value): (usize, Value)| {
        let place = format!("conversations[{i}]");
        let Value::Object(mut turn) = value else {
            return Err(wrong_type(&place, &value, "an object with `from` and `value`"));
        };
        match turn.get("from").filter(|from| !from.is_null()) {
            None => message(&place, Value::Object(turn)),
            Some(Value::String(from)) => {
                let role = share_gpt_role(&place, from)?;
                let text = text_of(&format!("{place}.value"), turn.shift_remove("value"))?;
                match role {
                    "function_call" => function_call(&place, &text),
                    role => Ok(simple_message(role, text)),
                }
            }
            Some(other) => Err(wrong_type(&format!("{place}.from"), other, "a string")),
        }
    };
    turns.into_iter().enumerate().map(turn).collect()
}

fn share_gpt_role(place: &str, from: &str) -> Result<&'static str, Fault> {
    match from {
        "human" | "user" => Ok("user"),
        "gpt" | "assistant" | "model" => Ok("assistant"),
        "system" => Ok("system"),
        "tool" | "observation" => Ok("tool"),
        "function_call" => Ok("function_call"),
        _ => Err(Fault::new(
            format!(
                "unknown role `{from}` in `{place}.from`; wanted `human`, `gpt`, `system`, `observation` or `function_call`"
            ),
            "Rename the role in the file.",
        )),
    }
}

fn function_call(place: &str, text: &str) -> Result<Map<String, Value>, Fault> {
    let call: Value = serde_json::from_str(text).map_err(|error| {
        Fault::new(format!("`{place}.value` of a `function_call` is not JSON: {error}"), "")
    })?;
    let mut message = simple_message("assistant", String::new());
    let calls = match call {
        Value::Array(calls) => calls,
        call => vec![call],
    };
    let wrap = |function| {
        Value::Object(Map::from_iter([
            ("type".to_string(), "function".into()),
            ("function".to_string(), function),
        ]))
    };
    let calls = Value::Array(calls.into_iter().map(wrap).collect());
    message.insert("tool_calls".into(), Value::Array(tool_calls(place, calls)?));
    Ok(message)
}

/// Removes null fields of objects at every depth.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}
