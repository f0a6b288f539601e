//! What a conversation holds and its text doesn't: templates leave out what they don't know, without a word.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{ChatTemplate, Conversation, PLAIN, messages_value, thoughts};
use crate::config::Thinking;

/// What a chat template left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Unprinted {
    /// The list of tools.
    Tools,
    /// An assistant's call of a tool.
    ToolCalls,
    /// A system message.
    System,
    /// A thought, where `[tokenizer] thinking` leaves it to the template.
    Thoughts,
}

impl Unprinted {
    /// As warnings call it.
    pub fn as_str(self) -> &'static str {
        match self {
            Unprinted::Tools => "tools",
            Unprinted::ToolCalls => "tool calls",
            Unprinted::System => "a system message",
            Unprinted::Thoughts => "thoughts",
        }
    }

    /// How to mend it.
    pub fn hint(self) -> &'static str {
        match self {
            Unprinted::Thoughts => "`[tokenizer] thinking` says which are trained",
            _ => "`[tokenizer] chat_template` names another template",
        }
    }
}

/// Whether a template prints tools and calls of them at all.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prints {
    pub tools: bool,
    pub calls: bool,
}

impl ChatTemplate {
    /// Asked of a conversation of our own, as the name of a row's tool may stand in its text by chance.
    pub(super) fn learn_prints(&self) -> Prints {
        let [tool, call] = ["embertunetool", "embertunecall"];
        let function =
            |name: &str| json!({"name": name, "description": "", "parameters": {}, "arguments": {}});
        let message = |role: &str, content: &str| {
            Map::from_iter([("role".into(), role.into()), ("content".into(), content.into())])
        };
        let mut messages = vec![message("user", "q"), message("assistant", "")];
        let calls = json!([{"id": "embertune", "type": "function", "function": function(call)}]);
        messages[1].insert("tool_calls".into(), calls);
        let tools = Some(json!([{"type": "function", "function": function(tool)}]));
        let conversation = Conversation { messages, tools, ..Default::default() };
        // One that fails at this may still print those of a row.
        match self.run(PLAIN, &messages_value(&conversation.messages), &conversation, None) {
            Ok(text) => Prints { tools: text.contains(tool), calls: text.contains(call) },
            Err(_) => Prints { tools: true, calls: true },
        }
    }

    /// What of the conversation isn't to be found in its text, most telling first.
    pub fn unprinted(&self, conversation: &Conversation, text: &str) -> Option<Unprinted> {
        let messages = &conversation.messages;
        let missing = |words: &str| !text.contains(words.trim());
        let unnamed = |call: &Value| {
            let function = call.get("function").unwrap_or(call);
            function.get("name").and_then(Value::as_str).is_some_and(missing)
        };
        let lacks = |list: Option<&Value>, printed: bool| {
            let list = list.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            list.iter().any(|item| !printed || unnamed(item))
        };
        if messages.iter().any(|message| lacks(message.get("tool_calls"), self.prints.calls)) {
            return Some(Unprinted::ToolCalls);
        }
        if lacks(conversation.tools.as_ref(), self.prints.tools) {
            return Some(Unprinted::Tools);
        }
        let is_system =
            |message: &&Map<String, Value>| message.get("role").is_some_and(|role| role == "system");
        let systems = messages.iter().filter(is_system);
        if systems.filter_map(|message| message.get("content")?.as_str()).any(missing) {
            return Some(Unprinted::System);
        }
        let lacks_thought = |message| thoughts::split(message).is_some_and(|(thought, _)| missing(&thought));
        let left_to_it = self.thinking == Thinking::Template;
        (left_to_it && messages.iter().any(lacks_thought)).then_some(Unprinted::Thoughts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}";
    const ALL: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>\
                       {% if m.thinking %}{{ m.thinking }}{% endif %}{{ m.content }}\
                       {% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}</s>{% endfor %}";

    fn told(source: &str, thinking: Thinking, messages: Value, tools: Option<Value>) -> Option<Unprinted> {
        let template =
            ChatTemplate::new(source, Vec::new(), vec!["</s>".into()]).map_err(|_| "fails").unwrap();
        let messages: Vec<Map<String, Value>> = serde_json::from_value(messages).unwrap();
        let conversation = Conversation { messages, tools, ..Default::default() };
        let text = template.run(PLAIN, &messages_value(&conversation.messages), &conversation, None);
        template.with_thinking(thinking).unprinted(&conversation, &text.map_err(|_| "fails").unwrap())
    }

    #[test]
    fn what_a_template_leaves_out_is_seen() {
        let call = json!([{"name": "s", "arguments": {}}]);
        let call = json!([{"role": "assistant", "content": "", "tool_calls": call}]);
        let system = json!([{"role": "system", "content": " be brief\n"}]);
        let thought = json!([{"role": "assistant", "content": "yes", "thinking": "hm"}]);
        let user = json!([{"role": "user", "content": "s"}]);
        let tools = Some(json!([{"name": "s"}]));
        let template = Thinking::Template;
        let no_system =
            WORDS.replace("{{ m.content }}", "{% if m.role != 'system' %}{{ m.content }}{% endif %}");
        for (source, messages, tools, want) in [
            (WORDS, call.clone(), None, Some(Unprinted::ToolCalls)),
            (WORDS, user.clone(), tools.clone(), Some(Unprinted::Tools)),
            (WORDS, thought.clone(), None, Some(Unprinted::Thoughts)),
            (no_system.as_str(), system.clone(), None, Some(Unprinted::System)),
            (WORDS, system, None, None),
            (ALL, call, None, None),
            (ALL, user, tools, None),
            (ALL, thought.clone(), None, None),
        ] {
            assert_eq!(told(source, template, messages, tools), want, "{source}");
        }
        for thinking in [Thinking::Keep, Thinking::Last, Thinking::Strip] {
            assert_eq!(told(WORDS, thinking, thought.clone(), None), None, "the configuration has its say");
        }
    }
}
