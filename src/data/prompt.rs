//! What a model is asked, and where its answer ends.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use super::format::{kwargs, normalise};
use super::row::{Body, Conversation, Fault, Place, RawRow};
use super::source;
use super::tokenize::{ChatTokenizer, read_object};
use crate::config::{LossMaskConfig, SampleConfig, SftDataConfig};
use crate::error::{Error, Result};

/// Something to be answered.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// A question; where prompts are taken as they are, a text to go on with.
    Text(String),
    /// A conversation up to where the assistant is to speak.
    Chat(Conversation),
}

impl Prompt {
    /// The prompts that `[sample]` names: those in it, then those of its file.
    ///
    /// # Errors
    /// The file can't be read, or a row of it asks nothing.
    pub fn all(config: &SampleConfig) -> Result<Vec<Self>> {
        let mut all: Vec<Self> = config.prompts.iter().cloned().map(Prompt::Text).collect();
        if let Some(file) = &config.file {
            all.extend(from_file(file)?);
        }
        Ok(all)
    }

    /// What is asked, for people: the last message of the user.
    pub fn shown(&self) -> &str {
        match self {
            Prompt::Text(text) => text,
            Prompt::Chat(conversation) => {
                let mut messages = conversation.messages.iter().rev();
                let asked = messages.find(|m| m.get("role").is_some_and(|role| role == "user"));
                asked.and_then(|m| m.get("content")?.as_str()).unwrap_or_default()
            }
        }
    }

    /// The conversation that it begins, with these at its start where it has no system message or variables of its own.
    pub fn conversation(&self, system: Option<&str>, variables: &Map<String, Value>) -> Conversation {
        let mut conversation = match self {
            Prompt::Chat(conversation) => conversation.clone(),
            Prompt::Text(text) => {
                Conversation { messages: vec![Conversation::turn("user", text)], ..Conversation::default() }
            }
        };
        let has_system = conversation.messages.first().is_some_and(|m| m["role"] == "system");
        if let Some(text) = system.filter(|_| !has_system) {
            conversation.messages.insert(0, Conversation::turn("system", text));
        }
        for (name, value) in variables {
            conversation.kwargs.entry(name).or_insert_with(|| value.clone());
        }
        conversation
    }
}

impl Conversation {
    /// A message of plain text.
    pub fn turn(role: &str, text: &str) -> Map<String, Value> {
        super::message::simple_message(role, text.to_string())
    }
}

/// Lines of a `.txt` file, or rows of a data file.
fn from_file(file: &Path) -> Result<Vec<Prompt>> {
    let prompts: Vec<Prompt> = if file.extension().is_some_and(|ending| ending == "txt") {
        let text = fs::read_to_string(file).map_err(|e| Error::io(file, "read", e))?;
        let lines = text.trim_start_matches('\u{feff}').lines().filter(|line| !line.trim().is_empty());
        lines.map(|line| Prompt::Text(line.to_string())).collect()
    } else {
        let data = SftDataConfig::default();
        let rows = source::open(file, &data.columns)?;
        rows.map(|row| asked(row?.read()?, &data)).collect::<Result<_>>()?
    };
    if prompts.is_empty() {
        return Err(Error::data(file, None, "no prompts: the file is empty", ""));
    }
    Ok(prompts)
}

/// What a row asks: all before its last answer, which needn't be there.
fn asked(mut row: RawRow, data: &SftDataConfig) -> Result<Prompt> {
    let names = &data.columns;
    for (question, answer) in [(&names.prompt, &names.completion), (&names.instruction, &names.output)] {
        if row.columns.contains_key(question) {
            row.columns.entry(answer).or_insert_with(|| "".into());
        }
    }
    let place = row.place.clone();
    let mut conversation = match normalise(row, data)?.body {
        Body::Text(text) | Body::Continuation { prompt: text, .. } => return Ok(Prompt::Text(text)),
        Body::Tokens { .. } => return Err(nothing(&place, "holds tokens")),
        Body::Chat(conversation) => conversation,
    };
    let asks = |m: &Map<String, Value>| m.get("role").is_some_and(|role| role == "user" || role == "tool");
    let last = conversation.messages.iter().rposition(asks);
    let last = last.ok_or_else(|| nothing(&place, "has no message of the user"))?;
    conversation.messages.truncate(last + 1);
    Ok(Prompt::Chat(conversation))
}

fn nothing(place: &Place, what: &str) -> Error {
    let hint =
        "A prompt is a line of a `.txt` file, or a row with `messages`, `conversations`, `prompt` or `text`.";
    Fault::new(format!("the row {what}: there is nothing to answer"), hint).at(place)
}

/// Variables for the chat template from JSON.
///
/// # Errors
/// It isn't an object, or holds what isn't its to set.
pub fn template_variables(json: &str) -> Result<Map<String, Value>> {
    let read = kwargs("chat_template_kwargs", json.into());
    read.map_err(|fault| {
        let (message, hint) = fault.into_parts();
        Error::Usage { message, hint }
    })
}

impl ChatTokenizer {
    /// The ids of a conversation up to where the assistant's next turn begins.
    ///
    /// # Errors
    /// There is no chat template, or it fails on this conversation.
    pub fn encode_prompt(&self, conversation: &Conversation) -> Result<Vec<u32>> {
        let mut conversation = conversation.clone();
        conversation.kwargs.insert("add_generation_prompt".into(), true.into());
        let untrained = LossMaskConfig { system: false, user: false, assistant: false, tool: false };
        self.encode_text(&self.render(&conversation, &untrained)?.text)
    }

    /// The ids of a text to go on with, begun as a `text` row begins.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub fn encode_start(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode_text(text)?;
        if let Some(bos) = self.bos.filter(|bos| ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The token that is exactly this text.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.tokenizer.token_to_id(text)
    }

    /// Tokens that end an answer: the tokenizer's end token, those that the model's `generation_config.json` names, and
    /// the one that the chat template puts behind an answer, which training teaches.
    pub fn stop_ids(&self) -> Vec<u32> {
        let named = read_object(&self.dir().join("generation_config.json")).ok().flatten();
        let named = named.and_then(|config| config.get("eos_token_id").cloned());
        let ids = match named {
            Some(Value::Array(ids)) => ids,
            Some(id) => vec![id],
            None => Vec::new(),
        };
        let ids = ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok());
        let mut all: Vec<u32> = self.eos_id().into_iter().chain(ids).chain(self.turn_end()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The special token that ends an assistant's turn.
    fn turn_end(&self) -> Option<u32> {
        let messages = vec![Conversation::turn("user", "a"), Conversation::turn("assistant", "a")];
        let conversation = Conversation { messages, ..Conversation::default() };
        let (sample, _) = self.encode_chat(&conversation, &LossMaskConfig::default()).ok()?;
        let trained =
            sample.ids.into_iter().zip(sample.mask).filter_map(|(id, trained)| trained.then_some(id));
        trained.filter(|&id| self.is_special(id)).last()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, text: &str) -> Result<Vec<Prompt>> {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join(name);
        fs::write(&path, text).expect("written");
        Prompt::all(&SampleConfig { file: Some(path), ..SampleConfig::default() })
    }

    #[test]
    fn a_file_of_prompts_has_lines_or_rows_with_or_without_answers() {
        let lines = read("a.txt", "\u{feff}What is a tide?\n\n  Why?\n").unwrap();
        assert_eq!(lines, [Prompt::Text("What is a tide?".into()), Prompt::Text("  Why?".into())]);
        let rows = [
            r#"{"prompt": "P"}"#,
            r#"{"prompt": "P", "completion": "C"}"#,
            r#"{"prompt": [{"role": "user", "content": "P"}]}"#,
            r#"{"messages": [{"role": "user", "content": "P"}]}"#,
            r#"{"messages": [{"role": "user", "content": "P"}, {"role": "assistant", "content": "A"}]}"#,
            r#"{"conversations": [{"from": "human", "value": "P"}, {"from": "gpt", "value": "A"}]}"#,
            r#"{"instruction": "P"}"#,
        ];
        let asked = Prompt::Chat(Conversation {
            messages: vec![Conversation::turn("user", "P")],
            ..Conversation::default()
        });
        for row in rows {
            let found = read("a.jsonl", row).unwrap();
            let [Prompt::Chat(found)] = &found[..] else { panic!("{row}: {found:?}") };
            assert_eq!(Prompt::Chat(Conversation { context: 0, ..found.clone() }), asked, "{row}");
        }
        assert_eq!(read("a.jsonl", r#"{"text": "T"}"#).unwrap(), [Prompt::Text("T".into())]);
        let several = r#"{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"},
            {"role": "assistant", "content": "4"}]}"#;
        let several = read("a.json", &format!("[{several}]")).unwrap().remove(0);
        assert_eq!(several.shown(), "3");
        let whole = several.conversation(Some("another"), &Map::new());
        assert_eq!(whole.messages.len(), 4, "its own system message stays");
        let begun =
            asked.conversation(Some("S"), &template_variables(r#"{"enable_thinking": false}"#).unwrap());
        assert_eq!((&begun.messages[0]["role"], begun.messages.len()), (&Value::from("system"), 2));
        assert_eq!(begun.kwargs["enable_thinking"], false);
    }

    #[test]
    fn what_asks_nothing_is_an_error_with_its_place() {
        let fails = |name: &str, text: &str| read(name, text).unwrap_err().to_string();
        assert!(fails("a.txt", "\n \n").contains("a.txt: no prompts"));
        let answer = r#"{"messages": [{"role": "assistant", "content": "A"}]}"#;
        assert!(fails("a.jsonl", answer).contains("a.jsonl:1: the row has no message of the user"));
        assert!(fails("a.jsonl", r#"{"input_ids": [1], "labels": [1]}"#).contains("holds tokens"));
        assert!(fails("a.jsonl", r#"{"question": "Q"}"#).contains("`question`"));
        assert!(template_variables("[1]").unwrap_err().to_string().contains("chat_template_kwargs"));
        assert!(template_variables(r#"{"messages": []}"#).is_err());
    }
}
