//! Thoughts (`<think>…</think>`) of assistant turns: left to the template, kept, or taken out.
//!
//! What a template drops is kept by a hole: the message is printed with a character in the thought's
//! place, which afterwards becomes the thought in the form that the template itself gives to thoughts.

use serde_json::{Map, Value};

use super::{ChatTemplate, Conversation, Fault, Rendered, around, messages_value, untraceable};
use crate::config::{LossMaskConfig, Thinking};
use crate::data::trace;

type Message = Map<String, Value>;

/// Names of the field that a thought may stand in.
pub(super) const FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// What a template prints before and after a thought.
#[derive(Debug)]
pub(super) struct Form {
    before: String,
    after: String,
}

/// The conversation without the thoughts that `thinking` doesn't want.
pub(super) fn without_unwanted(conversation: &Conversation, thinking: Thinking) -> Conversation {
    let messages = &conversation.messages;
    let end = match thinking {
        Thinking::Template | Thinking::Keep => 0,
        Thinking::Last => messages.iter().rposition(is_query).unwrap_or(0),
        Thinking::Strip => messages.len(),
    };
    let mut conversation = conversation.clone();
    for message in &mut conversation.messages[..end] {
        if let Some((_, words)) = split(message) {
            take_out(message, words);
        }
    }
    conversation
}

/// A user's message; one that only hands over a tool's result is none (Qwen3's template).
fn is_query(message: &Message) -> bool {
    let content = content(message);
    let result = content.starts_with("<tool_response>") && content.ends_with("</tool_response>");
    message.get("role").is_some_and(|role| role == "user") && !result
}

fn content(message: &Message) -> &str {
    message.get("content").and_then(Value::as_str).unwrap_or_default()
}

/// An assistant's thought and its words. In the content, a thought is what stands before `</think>`.
pub(super) fn split(message: &Message) -> Option<(String, String)> {
    if message.get("role").is_none_or(|role| role != "assistant") {
        return None;
    }
    let content = content(message);
    if let Some(thought) = FIELDS.iter().find_map(|field| message.get(*field)?.as_str()) {
        return Some((thought.into(), content.into()));
    }
    let (thought, words) = content.split_once("</think>")?;
    let thought = thought.trim_start();
    let thought = thought.strip_prefix("<think>").unwrap_or(thought);
    Some((thought.trim_matches('\n').into(), words.trim_start_matches('\n').into()))
}

/// Leaves `words` only.
fn take_out(message: &mut Message, words: String) {
    message.retain(|key, _| !FIELDS.contains(&key.as_str()));
    message.insert("content".into(), words.into());
}

/// Puts another thought where the message has its own.
fn replace(message: &mut Message, words: &str, thought: &str) {
    match FIELDS.iter().find(|field| message.get(**field).is_some_and(Value::is_string)) {
        Some(field) => message.insert((*field).into(), thought.into()),
        None => message.insert("content".into(), format!("<think>\n{thought}\n</think>\n\n{words}").into()),
    };
}

impl ChatTemplate {
    /// What the template prints around a thought; asked of a conversation of our own.
    pub(super) fn learn_form(&self) -> Result<Form, Fault> {
        let [question, thought, answer] = ["embertunequestion", "embertunethought", "embertuneanswer"];
        let message = |role: &str, content: &str| {
            Map::from_iter([("role".into(), role.into()), ("content".into(), content.into())])
        };
        let mut messages = vec![message("user", question), message("assistant", answer)];
        messages[1].insert(FIELDS[0].into(), thought.into());
        let conversation = Conversation { messages, ..Default::default() };
        let messages = messages_value(&conversation.messages);
        let text = self.run(super::PLAIN, &messages, &conversation, None)?;
        let unmarked = self.run_marked(&text, &messages, &conversation)?;
        let header = &self.turn.as_ref().map_err(Fault::clone)?.header;
        let (before, after) = around(&text, &unmarked, 1, thought)?;
        let (_, before) = before.split_once(header.as_str()).unwrap_or(("", before));
        let (after, _) = after.split_once(answer).unwrap_or((after, ""));
        Ok(Form { before: before.into(), after: after.into() })
    }

    /// Renders with every thought, those that the template drops too.
    pub(super) fn render_keeping(
        &self,
        conversation: &Conversation,
        trained: &LossMaskConfig,
    ) -> Result<Rendered, Fault> {
        let dropped = self.dropped(conversation)?;
        if dropped.is_empty() {
            return self.render_as_is(conversation, trained);
        }
        let form = self.learn_form().map_err(|_| {
            Fault::new(
                "`thinking` is `keep`, but the chat template prints no `reasoning_content`",
                "Put the thoughts into `content`, between `<think>` and `</think>`.",
            )
        })?;
        let hole = free_character(conversation);
        let mut holed = conversation.clone();
        let mut thoughts = Vec::new();
        for Dropped { index, thought, words } in dropped {
            take_out(&mut holed.messages[index], format!("{hole}{words}"));
            let block = format!("{}{}{}", form.before, thought.trim_matches('\n'), form.after);
            thoughts.push((block, words.is_empty()));
        }
        let rendered = self.render_as_is(&holed, trained)?;
        if rendered.text.matches(hole).count() != thoughts.len() {
            return Err(untraceable("it prints an earlier turn's words not just once"));
        }
        Ok(fill(&rendered, hole, &thoughts))
    }

    /// The messages whose thought doesn't come out; told by a mark in its place.
    fn dropped(&self, conversation: &Conversation) -> Result<Vec<Dropped>, Fault> {
        let mut found = Vec::new();
        let mark = free_character(conversation);
        let sign = |index: usize| format!("{mark}{index}{mark}");
        let mut probe = conversation.clone();
        for (index, message) in probe.messages.iter_mut().enumerate() {
            let Some((thought, words)) = split(message) else { continue };
            if !thought.trim().is_empty() {
                replace(message, &words, &sign(index));
                found.push(Dropped { index, thought, words });
            }
        }
        if !found.is_empty() {
            let printed = self.run(super::PLAIN, &messages_value(&probe.messages), &probe, None)?;
            found.retain(|dropped| !printed.contains(&sign(dropped.index)));
        }
        Ok(found)
    }
}

/// A message whose thought the template drops.
struct Dropped {
    index: usize,
    thought: String,
    words: String,
}

/// A character that the conversation doesn't hold.
fn free_character(conversation: &Conversation) -> char {
    let text: String = conversation.messages.iter().flat_map(Map::values).map(Value::to_string).collect();
    trace::free_character(&text)
}

/// Puts each thought into its hole; `true` beside it says that no words follow.
fn fill(rendered: &Rendered, hole: char, thoughts: &[(String, bool)]) -> Rendered {
    let mut parts = rendered.text.split(hole);
    let mut text = parts.next().unwrap_or_default().to_string();
    // Each hole: where it was, and by how much all behind it moves.
    let mut moves = Vec::new();
    let mut at = text.len();
    for (part, (block, no_words)) in parts.zip(thoughts) {
        let mut block = block.as_str();
        // A template that parts words from a call by a newline took the hole for words.
        if *no_words && part.starts_with('\n') {
            block = block.strip_suffix('\n').unwrap_or(block);
        }
        text.push_str(block);
        text.push_str(part);
        moves.push((at, block.len() as isize - hole.len_utf8() as isize));
        at += hole.len_utf8() + part.len();
    }
    let moved = |old: usize| {
        let by: isize = moves.iter().filter(|(hole, _)| *hole < old).map(|(_, by)| by).sum();
        old.saturating_add_signed(by)
    };
    let spans = rendered.spans.iter().map(|span| moved(span.start)..moved(span.end)).collect();
    Rendered { text, spans }
}
