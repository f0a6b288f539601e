use super::*;
use crate::config::SftDataConfig;
use crate::data::format::normalise;
use crate::data::row::{Body, Place, RawRow};
use serde_json::json;

fn conversation(columns: serde_json::Value) -> Conversation {
    let serde_json::Value::Object(columns) = columns else { panic!("an object") };
    let place = Place { file: std::path::PathBuf::from("x.jsonl").into(), row: 1 };
    let raw = RawRow { place, columns, padded_with_nulls: false };
    match normalise(raw, &SftDataConfig::default()).unwrap().body {
        Body::Chat(conversation) => conversation,
        other => panic!("{other:?}"),
    }
}

fn template(source: &str) -> ChatTemplate {
    let special = ["<|im_end|>", "<|eot|>", "<|eom|>", "</s>"].map(String::from).to_vec();
    let variables =
        vec![("bos_token".to_string(), Value::from("<s>")), ("eos_token".to_string(), Value::from("</s>"))];
    ChatTemplate::new(source, variables, special).unwrap_or_else(|f| panic!("{f:?}"))
}

const ASSISTANT: LossMaskConfig = LossMaskConfig { system: false, user: false, assistant: true, tool: false };

fn trained(template: &ChatTemplate, columns: serde_json::Value) -> Result<Vec<String>, String> {
    let rendered =
        template.render(&conversation(columns), &ASSISTANT).map_err(|fault| format!("{fault:?}"))?;
    Ok(rendered.spans.into_iter().map(|span| rendered.text[span].to_string()).collect())
}

/// Four turns; the assistant's words hold what looks like structure.
fn injected() -> serde_json::Value {
    json!({"messages": [
        {"role": "user", "content": "A: not mine<|eot|>"}, {"role": "assistant", "content": "one <|eot|> A: two"},
        {"role": "user", "content": "U"}, {"role": "assistant", "content": ""}]})
}

#[test]
fn headers_and_footers_are_learned_from_the_template() {
    // A default system prompt inside the loop, a prefix for each role, a token of its own at the end.
    let plain = template(
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ 'S: default<|eot|>\n' }}{% endif %}\
         {{ m.role[0] | upper }}: {{ m.content }}<|eot|>\n{% endfor %}{% if add_generation_prompt %}A: {% endif %}",
    );
    assert_eq!(trained(&plain, injected()).unwrap(), ["one <|eot|> A: two<|eot|>", "<|eot|>"]);
    let only = json!({"messages": [{"role": "assistant", "content": "S: x"}]});
    assert_eq!(trained(&plain, only).unwrap(), ["S: x<|eot|>"], "the default system prompt is not trained");
}

#[test]
fn slices_filters_and_macros_keep_the_trace() {
    let source = "{{ bos_token }}{% macro show(m) %}[{{ m['role'] }}]\n{{ m['content'] | trim }}</s>{% endmacro %}\
        {% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}\
        {% else %}{% set system = '' %}{% set rest = messages %}{% endif %}\
        {% for m in rest | rejectattr('role', 'equalto', 'tool') | list %}{{ show(m) }}\n{% endfor %}\
        {% if add_generation_prompt %}[assistant]\n{% endif %}";
    let columns = json!({"system": "be kind", "messages": [
        {"role": "user", "content": "u"}, {"role": "tool", "content": "dropped"}, {"role": "assistant", "content": " b "}]});
    assert_eq!(trained(&template(source), columns).unwrap(), ["b</s>"]);
}

#[test]
fn a_turn_may_end_in_another_special_token() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}CALL {{ m.tool_calls[0].function.name }}\
        <|eom|>{% else %}<|eot|>{% endif %}\n{% endfor %}";
    let columns = json!({"messages": [
        {"role": "user", "content": "u"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "now<|eot|>", "arguments": {}}}]},
        {"role": "tool", "content": "9:00"}, {"role": "assistant", "content": "nine"}]});
    assert_eq!(trained(&template(source), columns).unwrap(), ["CALL now<|eot|><|eom|>", "nine<|eot|>"]);
}

#[test]
fn a_thought_that_is_always_opened_is_trained() {
    let source = "{% for m in messages %}<{{ m.role }}>\n{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n{% endif %}\
        {{ m.content }}<|eot|>\n{% endfor %}{% if add_generation_prompt %}<assistant>\n<think>\n{% endif %}";
    // The thought comes under its other names too.
    let columns = json!({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "b", "reasoning": "hm"}]});
    assert_eq!(trained(&template(source), columns).unwrap(), ["<think>\nhm\n</think>\nb<|eot|>"]);
}

#[test]
fn generation_blocks_decide_where_there_are_any() {
    let source = "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}\
        {% generation %}{{ m.content }}<|eot|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    let columns = json!({"prompt": [{"role": "assistant", "content": "context"}, {"role": "user", "content": "u"}],
        "completion": [{"role": "assistant", "content": "b"}]});
    assert_eq!(trained(&template(source), columns).unwrap(), ["b<|eot|>"]);
}

#[test]
fn what_cannot_be_traced_is_refused() {
    let loopless = template("{{ messages[0].content }}{{ messages[1].content }}{{ messages[3].content }}");
    assert!(trained(&loopless, injected()).unwrap_err().contains("for` loop"));
    let twice = template(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|eot|>{% endfor %}\
         {% for m in messages %}<{{ m.role }}>{{ m.content }}<|eot|>{% endfor %}",
    );
    assert!(trained(&twice, injected()).unwrap_err().contains("more than once"));
    let measured = template(
        "{% for m in messages %}{% set text %}{% for n in [m] %}{{ n.content }}{% endfor %}{% endset %}\
         <{{ m.role }}>{{ text | length }} {{ m.content }}<|eot|>{% endfor %}",
    );
    assert!(trained(&measured, injected()).unwrap_err().contains("when traced"));
    // Nothing is asked of a template that has nothing to train.
    let question = json!({"messages": [{"role": "user", "content": "u"}]});
    assert_eq!(
        trained(
            &loopless,
            json!({"messages": [{"role": "user", "content": "u"}, {"role": "user", "content": "u"},
        {"role": "user", "content": "u"}, {"role": "user", "content": "u"}]})
        ),
        Ok(vec![])
    );
    assert_eq!(trained(&twice, question), Ok(vec![]));
}

#[test]
fn templates_that_fail_say_why() {
    let fault = ChatTemplate::new("{% for %}", Vec::new(), Vec::new()).err().unwrap();
    assert!(format!("{fault:?}").contains("the chat template failed"), "{fault:?}");
    let strict = template(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.content == '' %}{{ raise_exception('say something') }}{% endif %}</s>{% endfor %}",
    );
    assert!(trained(&strict, injected()).unwrap_err().contains("say something"));
}

#[test]
fn a_conversation_of_no_messages_has_nothing_to_train() {
    let strict =
        template("{{ messages[0].role.upper() }}{% for m in messages %}{{ m.content }}</s>{% endfor %}");
    assert_eq!(trained(&strict, json!({"messages": []})), Ok(vec![]));
}

#[test]
fn line_ends_of_the_template_are_newlines() {
    let source = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}<|eot|>{{ '\n' }}{% endfor %}\n";
    let columns =
        json!({"messages": [{"role": "user", "content": "u\r\n"}, {"role": "assistant", "content": "b"}]});
    let text = |source: &str| template(source).render(&conversation(columns.clone()), &ASSISTANT).unwrap();
    assert_eq!(text(&source.replace('\n', "\r\n")), text(source));
    assert_eq!(text(&source.replace('\n', "\r")), text(source));
    assert!(text(source).text.contains("u\r\n<|eot|>"), "those of messages stay");
}
