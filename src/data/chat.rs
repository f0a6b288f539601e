//! Messages → text by the model's own chat template, and which parts of the text are trained.
//!
//! The trained part of an assistant turn is everything the template prints between the turn's header
//! (`<|im_start|>assistant\n`) and the end of its stop token. It is known from the structure: the
//! template says which text belongs to which message (see [`super::trace`]), and header and footer of
//! an assistant turn are learned once from a conversation of our own.

use std::ops::Range;
use std::sync::Arc;

use minijinja::value::{Enumerator, Object};
use minijinja::{Environment, ErrorKind, State, Value};
use serde_json::Map;

use super::row::{Conversation, Fault};
use super::{jinja, trace};
use crate::config::{LossMaskConfig, Thinking};

mod thoughts;
mod unprinted;

pub use unprinted::Unprinted;

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The whole text.
    pub text: String,
    /// Byte ranges of the text that are trained, ascending and apart.
    pub spans: Vec<Range<usize>>,
}

/// A chat template, ready to render.
pub(super) struct ChatTemplate {
    env: Environment<'static>,
    /// `bos_token` and its like.
    variables: Vec<(String, Value)>,
    special_tokens: Vec<String>,
    has_generation: bool,
    turn: Result<Turn, Fault>,
    prints: unprinted::Prints,
    thinking: Thinking,
}

const PLAIN: &str = "chat template";
const MARKED: &str = "chat template with marks";
const MARK_VARIABLE: &str = "__embertune_mark";

impl ChatTemplate {
    /// Compiles `source`; `special_tokens` are the texts of tokens that end turns.
    pub fn new(
        source: &str,
        variables: Vec<(String, Value)>,
        special_tokens: Vec<String>,
    ) -> Result<Self, Fault> {
        // Jinja2 reads every kind of line end as a newline, in strings too (lexer.py, `_normalize_newlines`).
        let traced = trace::trace(&source.replace("\r\n", "\n").replace('\r', "\n"));
        let mut env = jinja::environment();
        env.add_function(trace::BEGIN, |state: &mut State, number: usize, value: Value| {
            let message = value.downcast_object_ref::<TracedMessage>();
            message.map_or_else(String::new, |m| trace::begin_mark(mark_of(state), number, m.index))
        });
        env.add_function(trace::END, |state: &mut State, number: usize| {
            trace::end_mark(mark_of(state), number)
        });
        env.add_function(trace::GENERATION, |state: &mut State, begins: bool| {
            trace::generation_mark(mark_of(state), begins)
        });
        env.add_template_owned(PLAIN, traced.plain).map_err(|e| fault(&e))?;
        env.add_template_owned(MARKED, traced.marked).map_err(|e| fault(&e))?;
        let prints = unprinted::Prints { tools: true, calls: true };
        let (turn, thinking) = (Err(Fault::new("", "")), Thinking::Template);
        let has_generation = traced.has_generation;
        let mut template = Self { env, variables, special_tokens, has_generation, turn, prints, thinking };
        template.turn = template.learn_turn();
        template.prints = template.learn_prints();
        Ok(template)
    }

    /// What becomes of thoughts; without, it is the template's to say.
    pub fn with_thinking(self, thinking: Thinking) -> Self {
        Self { thinking, ..self }
    }

    /// The text of a conversation and its trained parts.
    pub fn render(&self, conversation: &Conversation, trained: &LossMaskConfig) -> Result<Rendered, Fault> {
        if conversation.messages.is_empty() {
            // Nothing to train, whether the template can do without a message or not.
            let text = self.run(PLAIN, &messages_value(&[]), conversation, None).unwrap_or_default();
            return Ok(Rendered { text, spans: Vec::new() });
        }
        match self.thinking {
            Thinking::Template => self.render_as_is(conversation, trained),
            Thinking::Keep => self.render_keeping(conversation, trained),
            thinking => self.render_as_is(&thoughts::without_unwanted(conversation, thinking), trained),
        }
    }

    fn render_as_is(&self, conversation: &Conversation, trained: &LossMaskConfig) -> Result<Rendered, Fault> {
        let messages = messages_value(&conversation.messages);
        let text = self.run(PLAIN, &messages, conversation, None)?;
        let mut spans = Vec::new();
        if trained.assistant {
            spans = self.assistant_spans(&text, &messages, conversation)?;
        }
        for (role, wanted) in [("system", trained.system), ("user", trained.user), ("tool", trained.tool)] {
            if wanted {
                spans.extend(self.bodies(&text, role, conversation)?);
            }
        }
        spans.retain(|span| !span.is_empty());
        spans.sort_by_key(|span| (span.start, span.end));
        spans.dedup_by(|next, last| {
            let overlaps = next.start < last.end;
            last.end = if overlaps { last.end.max(next.end) } else { last.end };
            overlaps
        });
        Ok(Rendered { text, spans })
    }

    fn run(
        &self,
        template: &str,
        messages: &Value,
        conversation: &Conversation,
        mark: Option<char>,
    ) -> Result<String, Fault> {
        let template = self.env.get_template(template).expect("added in new");
        let tools = conversation.tools.as_ref().map(jinja::from_json);
        let mut variables = vec![
            ("messages".to_string(), messages.clone()),
            ("tools".to_string(), tools.unwrap_or_else(|| Value::from(()))),
            ("documents".to_string(), Value::from(())),
            ("add_generation_prompt".to_string(), Value::from(false)),
        ];
        variables.extend(self.variables.iter().cloned());
        variables.extend(conversation.kwargs.iter().map(|(k, v)| (k.clone(), jinja::from_json(v))));
        variables.extend(mark.map(|mark| (MARK_VARIABLE.to_string(), Value::from(mark.to_string()))));
        template.render(Value::from_pairs(variables)).map_err(|e| fault(&e))
    }

    /// Renders with marks and checks that they change nothing.
    fn run_marked(
        &self,
        text: &str,
        messages: &Value,
        conversation: &Conversation,
    ) -> Result<trace::Unmarked, Fault> {
        let mark = trace::free_character(text);
        let unmarked = trace::unmark(&self.run(MARKED, messages, conversation, Some(mark))?, mark);
        if unmarked.text == text {
            Ok(unmarked)
        } else {
            Err(untraceable("it prints something else when traced"))
        }
    }

    fn assistant_spans(
        &self,
        text: &str,
        messages: &Value,
        conversation: &Conversation,
    ) -> Result<Vec<Range<usize>>, Fault> {
        let wanted = |i: usize| {
            let message = &conversation.messages[i];
            i >= conversation.context
                && message.get("role").is_some_and(|role| role == "assistant")
                && message.get("train").is_none_or(|train| train != false)
        };
        if !(0..conversation.messages.len()).any(wanted) {
            return Ok(Vec::new());
        }
        let unmarked = self.run_marked(text, messages, conversation)?;
        if self.has_generation {
            return Ok(generations(&unmarked, wanted));
        }
        let turn = self.turn.as_ref().map_err(Fault::clone)?;
        (0..conversation.messages.len())
            .filter(|&i| wanted(i))
            .map(|i| self.turn_span(turn, text, &unmarked, i))
            .collect()
    }

    /// The trained part of assistant message `index`.
    fn turn_span(
        &self,
        turn: &Turn,
        text: &str,
        unmarked: &trace::Unmarked,
        index: usize,
    ) -> Result<Range<usize>, Fault> {
        let mut regions = unmarked
            .regions
            .iter()
            .filter(|r| r.message == index && text[r.range.clone()].contains(&turn.header))
            .map(|r| r.range.clone())
            .filter(|r| !r.is_empty());
        let region = match (regions.next(), regions.next()) {
            (Some(region), None) => region,
            (first, _) => {
                let what = first.map_or("without its header, or not at all", |_| "more than once");
                return Err(untraceable(&format!("it prints assistant message {index} {what}")));
            }
        };
        let printed = &text[region.clone()];
        // A template may print something of its own (a default system prompt) before the header;
        // the message's own words come after it.
        let start = printed.find(&turn.header).expect("filtered above") + turn.header.len();
        let end = start
            + self.turn_end(turn, &printed[start..]).ok_or_else(|| {
                untraceable(&format!("assistant message {index} doesn't end as assistant turns do"))
            })?;
        Ok(region.start + start..region.start + end)
    }

    /// Where the turn's stop token ends in what follows its header.
    fn turn_end(&self, turn: &Turn, printed: &str) -> Option<usize> {
        for footer in &turn.footers {
            if let Some(body) = printed.strip_suffix(footer.as_str()) {
                return Some(body.len() + self.stop_len(footer));
            }
        }
        let trimmed = printed.trim_end();
        self.special_tokens.iter().any(|token| trimmed.ends_with(token)).then_some(trimmed.len())
    }

    /// How much of a footer is trained: up to the end of its first special token.
    fn stop_len(&self, footer: &str) -> usize {
        let first = self
            .special_tokens
            .iter()
            .filter_map(|token| footer.find(token.as_str()).map(|at| (at, std::cmp::Reverse(token.len()))))
            .min();
        first.map_or(footer.trim_end().len(), |(at, len)| at + len.0)
    }

    /// Renders a conversation of our own to see what surrounds the words of an assistant turn.
    fn learn_turn(&self) -> Result<Turn, Fault> {
        let words = ["embertunequestion", "embertuneanswer", "embertuneagain", "embertunelast"];
        let messages: Vec<Map<String, serde_json::Value>> = words
            .iter()
            .zip(["user", "assistant"].iter().cycle())
            .map(|(word, role)| {
                Map::from_iter([("role".into(), (*role).into()), ("content".into(), (*word).into())])
            })
            .collect();
        let conversation = Conversation { messages, ..Default::default() };
        let messages = messages_value(&conversation.messages);
        let text = self.run(PLAIN, &messages, &conversation, None)?;
        let unmarked = self.run_marked(&text, &messages, &conversation)?;
        let prompt = self.generation_prompt(&conversation).unwrap_or_default();

        let mut turn: Option<Turn> = None;
        for index in [1, 3] {
            let (before, after) = around(&text, &unmarked, index, words[index])?;
            let turn = turn.get_or_insert_with(|| Turn { header: before.into(), footers: Vec::new() });
            turn.header.truncate(common_prefix(&turn.header, before));
            if !turn.footers.iter().any(|footer| footer == after) {
                turn.footers.push(after.into());
            }
        }
        let mut turn = turn.expect("two turns were read");
        if !prompt.is_empty() && !turn.header.is_empty() {
            let shared = common_prefix(&turn.header, &prompt);
            turn.header.truncate(if shared > 0 { shared } else { turn.header.len() });
        }
        // A thought that the template always opens is the model's to write.
        let end = turn.header.find("<think>").unwrap_or(turn.header.len());
        turn.header.truncate(end);
        turn.footers.sort_by_key(|footer| std::cmp::Reverse(footer.len()));
        Ok(turn)
    }

    /// What the template prints to have the next turn written, after the words of a user.
    fn generation_prompt(&self, conversation: &Conversation) -> Option<String> {
        let mut begun = Conversation { messages: conversation.messages[..3].to_vec(), ..Default::default() };
        let messages = messages_value(&begun.messages);
        let without = self.run(PLAIN, &messages, &begun, None).ok()?;
        begun.kwargs.insert("add_generation_prompt".into(), true.into());
        let with = self.run(PLAIN, &messages, &begun, None).ok()?;
        with.strip_prefix(&without).map(str::to_string)
    }

    /// Where the contents of the messages of `role` stand: their words alone are trained.
    ///
    /// Found by printing them once more with marks around their words.
    fn bodies(
        &self,
        text: &str,
        role: &str,
        conversation: &Conversation,
    ) -> Result<Vec<Range<usize>>, Fault> {
        let mark = trace::free_character(text);
        let mut marked = conversation.messages.clone();
        for message in marked.iter_mut().skip(conversation.context) {
            let content = message.get("content").and_then(|c| c.as_str()).unwrap_or_default();
            let words = content.trim();
            if message.get("role").is_some_and(|r| r == role) && !words.is_empty() {
                // Inside the white space, which templates may strip.
                let content = content.replacen(words, &format!("{mark}g{mark}{words}{mark}h{mark}"), 1);
                message.insert("content".into(), content.into());
            }
        }
        let printed = self.run(PLAIN, &messages_value(&marked), conversation, None)?;
        let unmarked = trace::unmark(&printed, mark);
        if unmarked.text != text {
            let why = format!("it changes the words of `{role}` messages, which `loss_mask` wants trained");
            return Err(untraceable(&why));
        }
        Ok(unmarked.generations)
    }
}

/// What surrounds the words of an assistant turn.
#[derive(Debug, PartialEq)]
struct Turn {
    header: String,
    /// With the stop token; longest first.
    footers: Vec<String>,
}

/// What message `index` prints before and after `word`.
fn around<'a>(
    text: &'a str,
    unmarked: &trace::Unmarked,
    index: usize,
    word: &str,
) -> Result<(&'a str, &'a str), Fault> {
    unmarked
        .regions
        .iter()
        .filter(|region| region.message == index)
        .find_map(|region| text[region.range.clone()].split_once(word))
        .ok_or_else(|| untraceable("it doesn't print messages one after the other in a `for` loop"))
}

/// Insides of `{% generation %}` blocks that belong to wanted messages.
fn generations(unmarked: &trace::Unmarked, wanted: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let message_of = |span: &Range<usize>| {
        let holds = |r: &&trace::Region| r.range.start <= span.start && span.end <= r.range.end;
        unmarked.regions.iter().filter(holds).min_by_key(|r| r.range.len()).map(|r| r.message)
    };
    unmarked.generations.iter().filter(|span| message_of(span).is_none_or(&wanted)).cloned().collect()
}

/// Bytes that both begin with, at a character boundary.
fn common_prefix(a: &str, b: &str) -> usize {
    a.char_indices().zip(b.chars()).find(|((_, x), y)| x != y).map_or(a.len().min(b.len()), |((i, _), _)| i)
}

fn untraceable(why: &str) -> Fault {
    Fault::new(
        format!("can't tell which part of the chat template's output is the assistant's: {why}"),
        "Put `{% generation %}` and `{% endgeneration %}` around the assistant's part in the template \
         and name it in `[tokenizer] chat_template`.",
    )
}

fn fault(error: &minijinja::Error) -> Fault {
    if error.kind() == ErrorKind::OutOfFuel {
        let line = error.line().map(|line| format!(" (it was at line {line})")).unwrap_or_default();
        return Fault::new(
            format!("the chat template doesn't come to an end{line}"),
            "Look for loops inside loops in it, or shorten the conversation.",
        );
    }
    let mut message = error.detail().map_or_else(|| error.kind().to_string(), str::to_string);
    if let Some(line) = error.line() {
        message.push_str(&format!(" (line {line} of the template)"));
    }
    Fault::new(format!("the chat template failed: {message}"), "")
}

fn mark_of(state: &State) -> char {
    state.lookup(MARK_VARIABLE).and_then(|v| v.as_str()?.chars().next()).unwrap_or('\u{10fffd}')
}

/// A message that knows its number, whatever list, slice or filter hands it to a loop.
#[derive(Debug)]
struct TracedMessage {
    index: usize,
    fields: Vec<(Arc<str>, Value)>,
}

impl Object for TracedMessage {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.fields.iter().find(|(name, _)| name.as_ref() == key).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.fields.iter().map(|(name, _)| Value::from(name.clone())).collect())
    }
}

fn messages_value(messages: &[Map<String, serde_json::Value>]) -> Value {
    let message = |(index, message)| Value::from_object(TracedMessage { index, fields: fields(message) });
    messages.iter().enumerate().map(message).collect()
}

/// The fields of a message, and its thought under every name that templates read it by
/// (transformers 5, `_alias_reasoning_fields`).
fn fields(message: &Map<String, serde_json::Value>) -> Vec<(Arc<str>, Value)> {
    let thought = thoughts::FIELDS.iter().find_map(|key| message.get(*key));
    let mut fields: Vec<(Arc<str>, Value)> = Vec::new();
    if let Some(thought) = thought.filter(|_| !message.contains_key("thinking")) {
        fields.push(("thinking".into(), jinja::from_json(thought)));
    }
    fields.extend(message.iter().map(|(k, v)| (Arc::from(k.as_str()), jinja::from_json(v))));
    if let Some(thought) = thought {
        match fields.iter_mut().find(|(key, _)| key.as_ref() == "reasoning_content") {
            Some((_, value)) => *value = jinja::from_json(thought),
            None => fields.push(("reasoning_content".into(), jinja::from_json(thought))),
        }
    }
    fields
}

#[cfg(test)]
mod tests;
