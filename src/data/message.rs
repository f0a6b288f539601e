//! Messages in one normal form: `role`, `content` as one string, `tool_calls` as objects.
//!
//! `content` may be null or missing (then empty) or a list of text parts (then joined).

use serde_json::{Map, Value};

use super::row::Fault;

pub(super) fn names(columns: &Map<String, Value>) -> String {
    columns.keys().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", ")
}

pub(super) fn wrong_type(what: &str, found: &Value, wanted: &str) -> Fault {
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
pub(super) fn list(what: &str, value: Value) -> Result<Vec<Value>, Fault> {
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

pub(super) fn messages(column: &str, value: Value) -> Result<Vec<Map<String, Value>>, Fault> {
    list(column, value)?
        .into_iter()
        .enumerate()
        .map(|(i, value)| message(&format!("{column}[{i}]"), value))
        .collect()
}

/// A side of `prompt` + `completion`: a list of messages, one message, or a string.
pub(super) fn turns(column: &str, value: Value, role: &str) -> Result<Vec<Map<String, Value>>, Fault> {
    match value {
        Value::String(text) => Ok(vec![simple_message(role, text)]),
        value @ Value::Object(_) => Ok(vec![message(column, value)?]),
        value @ Value::Array(_) => messages(column, value),
        other => Err(wrong_type(column, &other, "a string, a message or a list of messages")),
    }
}

pub(super) fn simple_message(role: &str, content: String) -> Map<String, Value> {
    let mut message = Map::new();
    message.insert("role".into(), role.into());
    message.insert("content".into(), content.into());
    message
}

/// A message; what has `from` and no `role` is a turn of ShareGPT's.
fn message(place: &str, value: Value) -> Result<Map<String, Value>, Fault> {
    let Value::Object(mut message) = value else {
        return Err(wrong_type(place, &value, "an object with `role` and `content`"));
    };
    let has = |name| message.get(name).is_some_and(|value| !value.is_null());
    if has("from") && !has("role") {
        return share_gpt_turn(place, message);
    }
    no_other_name(place, &message, "content")?;
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
    match message.get("train") {
        None | Some(Value::Bool(_)) => weight(place, message),
        // `"false"` and 0 would leave nothing out.
        Some(other) => Err(wrong_type(&format!("{place}.train"), other, "`true` or `false`")),
    }
}

/// `"weight": 0` of OpenAI's files is `"train": false`.
fn weight(place: &str, mut message: Map<String, Value>) -> Result<Map<String, Value>, Fault> {
    let Some(weight) = message.shift_remove("weight") else { return Ok(message) };
    let train = match weight.as_f64() {
        Some(0.0) => false,
        Some(1.0) => true,
        _ => {
            return Err(wrong_type(
                &format!("{place}.weight"),
                &weight,
                "0 or 1: a turn is trained or it isn't",
            ));
        }
    };
    match message.get("train") {
        Some(said) if *said != train => Err(Fault::new(
            format!("`{place}` has `weight` {weight} and `train` {said}, which contradict each other"),
            "Take one of them out.",
        )),
        _ => {
            message.insert("train".into(), train.into());
            Ok(message)
        }
    }
}

/// A turn without words is an empty one, unless they seem to stand under another name.
fn no_other_name(place: &str, message: &Map<String, Value>, wanted: &str) -> Result<(), Fault> {
    if message.contains_key(wanted) {
        return Ok(());
    }
    let seems = |name: &str| {
        ["content", "value", "text", "message"].contains(&name) || strsim::osa_distance(name, wanted) <= 2
    };
    match message.iter().find(|(name, value)| seems(name) && !value.is_null()) {
        None => Ok(()),
        Some((name, _)) => Err(Fault::new(
            format!("`{place}` has no `{wanted}` (it has {})", names(message)),
            format!("Rename `{name}` to `{wanted}` in the file; null is an empty turn."),
        )),
    }
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
pub(super) fn share_gpt(column: &str, value: Value) -> Result<Vec<Map<String, Value>>, Fault> {
    let turn = |(i, value): (usize, Value)| {
        let place = format!("{column}[{i}]");
        match value {
            Value::Object(turn) if turn.get("from").is_some_and(|from| !from.is_null()) => {
                share_gpt_turn(&place, turn)
            }
            Value::Object(_) => message(&place, value),
            other => Err(wrong_type(&place, &other, "an object with `from` and `value`")),
        }
    };
    list(column, value)?.into_iter().enumerate().map(turn).collect()
}

/// `from` and `value` become `role` and `content`; what stands beside them (`train`, a thought) means what it does in
/// other messages.
fn share_gpt_turn(place: &str, mut turn: Map<String, Value>) -> Result<Map<String, Value>, Fault> {
    let role = match turn.shift_remove("from") {
        Some(Value::String(from)) => share_gpt_role(place, &from)?,
        other => return Err(wrong_type(&format!("{place}.from"), &other.unwrap_or_default(), "a string")),
    };
    no_other_name(place, &turn, "value")?;
    let text = text_of(&format!("{place}.value"), turn.shift_remove("value"))?;
    let mut said = match role {
        "function_call" => function_call(place, &text)?,
        role => simple_message(role, text),
    };
    for (name, value) in turn {
        said.entry(name).or_insert(value);
    }
    message(place, Value::Object(said))
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
pub(super) fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}
