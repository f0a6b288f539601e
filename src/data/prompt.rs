//! What a model is asked, and where its answer ends.

use serde_json::{Map, Value};

use super::row::Conversation;
use super::tokenize::{ChatTokenizer, read_object};
use crate::config::LossMaskConfig;
use crate::error::Result;

impl Conversation {
    /// One question, with a system message or without.
    pub fn asking(system: Option<&str>, prompt: &str) -> Self {
        let turns = system.map(|text| ("system", text)).into_iter().chain([("user", prompt)]);
        Self { messages: turns.map(|(role, text)| Self::turn(role, text)).collect(), ..Self::default() }
    }

    /// A message of plain text.
    pub fn turn(role: &str, text: &str) -> Map<String, Value> {
        let pairs = [("role", role), ("content", text)];
        pairs.into_iter().map(|(key, value)| (key.to_string(), value.into())).collect()
    }
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

    /// Tokens that end an answer: the tokenizer's end token, and those that the model's `generation_config.json` names.
    pub fn stop_ids(&self) -> Vec<u32> {
        let named = read_object(&self.dir().join("generation_config.json")).ok().flatten();
        let named = named.and_then(|config| config.get("eos_token_id").cloned());
        let ids = match named {
            Some(Value::Array(ids)) => ids,
            Some(id) => vec![id],
            None => Vec::new(),
        };
        let ids = ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok());
        let mut all: Vec<u32> = self.eos_id().into_iter().chain(ids).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}
