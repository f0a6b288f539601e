//! One row of a data file → a conversation, text or tokens in one normal form.
//!
//! | format | columns | becomes |
//! |---|---|---|
//! | `messages` | `messages` | the messages |
//! | `prompt_completion` | `prompt` + `completion` | message lists or single messages, joined; strings are one user and one assistant message; the prompt is context only |
//! | `raw_prompt_completion` | the same, strings | plain text, of which the completion and the end token are trained |
//! | `sharegpt` | `conversations` | ShareGPT's `from`/`value` |
//! | `alpaca` | `instruction` + `output`, maybe `input` | one user and one assistant message |
//! | `text` | `text` | plain text, no chat template |
//! | `pretokenized` | `input_ids` + `labels` | tokens as they are; -100 in `labels` = not trained |
//!
//! Beside them: `tools` (or `tool_defs`; list or JSON string), `chat_template_kwargs` (object or JSON
//! string), `system` (becomes the first message). `[data.columns]` gives each column another name.
//! Anything else is an error that says what and where.

use serde_json::{Map, Value};

use super::message::{drop_nulls, list, messages, names, share_gpt, simple_message, turns, wrong_type};
use super::row::{Body, Conversation, Fault, RawRow, Row};
use crate::config::{ColumnsConfig, DataFormat, SftDataConfig};
use crate::error::Error;

/// What `auto` looks for, in this order.
const DETECTED: [DataFormat; 6] = [
    DataFormat::Messages,
    DataFormat::PromptCompletion,
    DataFormat::ShareGpt,
    DataFormat::Alpaca,
    DataFormat::Text,
    DataFormat::Pretokenized,
];

/// Another name that `tools` goes by.
pub(super) const TOOL_DEFS: &str = "tool_defs";

/// Brings a row into its normal form.
pub(super) fn normalise(raw: RawRow, data: &SftDataConfig) -> Result<Row, Error> {
    let RawRow { place, mut columns, padded_with_nulls } = raw;
    if padded_with_nulls {
        columns.values_mut().for_each(drop_nulls);
    }
    let null = columns.iter().filter(|(_, value)| value.is_null()).map(|(name, _)| name.clone()).collect();
    columns.retain(|_, value| !value.is_null());
    let mut columns = Columns { columns, null, names: &data.columns };
    let read = columns.format(data.format).and_then(|format| Ok((format, columns.body(format)?)));
    match read {
        Ok((format, body)) => Ok(Row { place, format, body }),
        Err(fault) => Err(fault.at(&place)),
    }
}

/// A row's columns by the names that the configuration gives them.
struct Columns<'a> {
    columns: Map<String, Value>,
    /// Those that are there and hold nothing.
    null: Vec<String>,
    names: &'a ColumnsConfig,
}

impl Columns<'_> {
    /// The format that was asked for, or the one that the columns show.
    fn format(&self, wanted: DataFormat) -> Result<DataFormat, Fault> {
        let candidates = if wanted == DataFormat::Auto { &DETECTED[..] } else { &[wanted] };
        let has = |format: &&DataFormat| self.needed(**format).iter().all(|n| self.columns.contains_key(*n));
        candidates.iter().find(has).copied().ok_or_else(|| self.wrong_columns(candidates))
    }

    /// The columns that a format can't do without.
    fn needed(&self, format: DataFormat) -> Vec<&str> {
        let names = self.names;
        match format {
            DataFormat::Auto => vec![],
            DataFormat::Messages => vec![&names.messages],
            DataFormat::PromptCompletion | DataFormat::RawPromptCompletion => {
                vec![&names.prompt, &names.completion]
            }
            DataFormat::ShareGpt => vec![&names.conversations],
            DataFormat::Alpaca => vec![&names.instruction, &names.output],
            DataFormat::Text => vec![&names.text],
            DataFormat::Pretokenized => vec![&names.input_ids, &names.labels],
        }
    }

    fn wrong_columns(&self, candidates: &[DataFormat]) -> Fault {
        let found = match self.columns.len() {
            0 => "no columns".to_string(),
            1 => format!("column {}", names(&self.columns)),
            _ => format!("columns {}", names(&self.columns)),
        };
        let needed =
            |name: &&String| candidates.iter().any(|format| self.needed(*format).contains(&name.as_str()));
        let null = self.null.iter().find(needed).map_or(String::new(), |name| format!(" (`{name}` is null)"));
        let quoted = |format: &DataFormat| {
            self.needed(*format).iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" and ")
        };
        let wanted = candidates.iter().map(quoted).collect::<Vec<_>>().join(", or ");
        let because = match candidates {
            [named] => format!(" (`format = \"{}\"`)", named.as_str()),
            _ => String::new(),
        };
        Fault::new(
            format!("found {found}{null}; wanted {wanted}{because}"),
            match null.is_empty() {
                true => {
                    "Say which is which in `[data.columns]` (for example `prompt = \"question\"`), or rename the columns."
                }
                false => "Leave the row out, or give it a value.",
            },
        )
    }

    fn take(&mut self, name: &str) -> Option<Value> {
        self.columns.shift_remove(name)
    }

    /// A column that the format needs.
    fn needs(&mut self, name: &str) -> Value {
        self.take(name).unwrap_or_default()
    }

    fn text(&mut self, name: &str) -> Result<String, Fault> {
        match self.needs(name) {
            Value::String(text) => Ok(text),
            other => Err(wrong_type(name, &other, "a string")),
        }
    }

    fn body(&mut self, format: DataFormat) -> Result<Body, Fault> {
        let names = self.names;
        let (messages, context) = match format {
            DataFormat::Auto => unreachable!("`format` finds one"),
            DataFormat::Text => return self.text(&names.text).map(Body::Text),
            DataFormat::RawPromptCompletion => {
                let (prompt, completion) = (self.text(&names.prompt)?, self.text(&names.completion)?);
                return Ok(Body::Continuation { prompt, completion });
            }
            DataFormat::Pretokenized => {
                let (ids, labels) = (self.needs(&names.input_ids), self.needs(&names.labels));
                let input_ids = numbers(&names.input_ids, ids)?;
                return Ok(Body::Tokens { input_ids, labels: numbers(&names.labels, labels)? });
            }
            DataFormat::Messages => (messages(&names.messages, self.needs(&names.messages))?, 0),
            DataFormat::ShareGpt => (share_gpt(&names.conversations, self.needs(&names.conversations))?, 0),
            DataFormat::Alpaca => (self.alpaca()?, 0),
            DataFormat::PromptCompletion => {
                let mut messages = turns(&names.prompt, self.needs(&names.prompt), "user")?;
                let context = messages.len();
                messages.extend(turns(&names.completion, self.needs(&names.completion), "assistant")?);
                (messages, context)
            }
        };
        self.conversation(messages, context).map(Body::Chat)
    }

    /// The instruction and its input, a blank line between, are the user's.
    fn alpaca(&mut self) -> Result<Vec<Map<String, Value>>, Fault> {
        let names = self.names;
        let mut question = self.text(&names.instruction)?;
        if self.columns.contains_key(&names.input) {
            let input = self.text(&names.input)?;
            if !input.is_empty() {
                question = format!("{question}\n\n{input}");
            }
        }
        let answer = self.text(&names.output)?;
        Ok(vec![simple_message("user", question), simple_message("assistant", answer)])
    }

    /// Adds what may stand beside the messages.
    fn conversation(
        &mut self,
        mut messages: Vec<Map<String, Value>>,
        mut context: usize,
    ) -> Result<Conversation, Fault> {
        let names = self.names;
        if self.columns.contains_key(&names.system) {
            messages.insert(0, simple_message("system", self.text(&names.system)?));
            context += usize::from(context > 0);
        }
        let tools = self.take(&names.tools).or_else(|| self.take(TOOL_DEFS));
        let tools = tools.map(|value| list(&names.tools, value)).transpose()?.map(Value::Array);
        let given = self.take(&names.chat_template_kwargs);
        let kwargs = given.map(|value| kwargs(&names.chat_template_kwargs, value)).transpose()?;
        Ok(Conversation { messages, context, tools, kwargs: kwargs.unwrap_or_default() })
    }
}

fn numbers(what: &str, value: Value) -> Result<Vec<i64>, Fault> {
    let items = list(what, value)?;
    let number = |(i, item): (usize, &Value)| {
        item.as_i64().ok_or_else(|| wrong_type(&format!("{what}[{i}]"), item, "a whole number"))
    };
    items.iter().enumerate().map(number).collect()
}

/// Variables of a template that are no row's to set.
const OWN_VARIABLES: [&str; 2] = ["messages", "tools"];

/// Variables for the chat template.
pub(super) fn kwargs(what: &str, value: Value) -> Result<Map<String, Value>, Fault> {
    let value = match value {
        Value::String(text) => serde_json::from_str(&text)
            .map_err(|error| Fault::new(format!("`{what}` is a string that is not JSON: {error}"), ""))?,
        other => other,
    };
    match value {
        Value::Object(mut map) => {
            map.retain(|_, value| !value.is_null());
            if let Some(own) = OWN_VARIABLES.iter().find(|name| map.contains_key(**name)) {
                return Err(Fault::new(
                    format!("`{what}` holds `{own}`, which the template gets from the row itself"),
                    format!("take `{own}` out of `{what}`; a column of that name is read"),
                ));
            }
            Ok(map)
        }
        other => Err(wrong_type(what, &other, "an object or a JSON string")),
    }
}

#[cfg(test)]
mod tests;
