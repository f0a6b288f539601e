//! What a model is asked, and where its answer ends.

use serde_json::Value;

use super::row::Conversation;
use super::tokenize::{ChatTokenizer, read_object};
use crate::config::LossMaskConfig;
use crate::error::Result;

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
