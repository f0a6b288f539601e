use std::path::PathBuf;

use super::*;
use crate::data::Place;
use serde_json::json;

fn read_as(data: &SftDataConfig, columns: Value, padded_with_nulls: bool) -> Result<Row, String> {
    let Value::Object(columns) = columns else { panic!("an object") };
    let place = Place { file: PathBuf::from("x.jsonl").into(), row: 7 };
    normalise(RawRow { place, columns, padded_with_nulls }, data).map_err(|e| e.to_string())
}

fn read(columns: Value, padded_with_nulls: bool) -> Result<Row, String> {
    read_as(&SftDataConfig::default(), columns, padded_with_nulls)
}

fn conversation(columns: Value) -> Conversation {
    match read(columns, false).unwrap().body {
        Body::Chat(conversation) => conversation,
        other => panic!("{other:?}"),
    }
}

fn user() -> Value {
    json!({"role": "user", "content": "u"})
}

#[test]
fn faults_name_the_place_what_was_found_and_what_is_wanted() {
    let cases = [
        (
            json!({"question": "q", "answer": "a"}),
            "found columns `question`, `answer`; wanted `messages`, or `prompt`",
        ),
        (json!({"prompt": "q", "completion": null}), "found column `prompt` (`completion` is null); wanted"),
        (json!({}), "found no columns"),
        (json!({"messages": 3}), "`messages` is the number 3; wanted a list or a JSON string"),
        (json!({"messages": "x"}), "`messages` is a string that is not JSON"),
        (json!({"messages": [user(), 3]}), "`messages[1]` is the number 3; wanted an object with `role`"),
        (json!({"messages": [{"content": "x"}]}), "`messages[0]` has no `role` (it has `content`)"),
        (json!({"messages": [{"role": "developer"}]}), "unknown role `developer` in `messages[0]`"),
        (json!({"messages": [{"role": 1}]}), "`messages[0].role` is the number 1; wanted a string"),
        (json!({"messages": [{"role": "user", "content": 4}]}), "`messages[0].content` is the number 4"),
        (
            json!({"messages": [{"role": "user", "content": ["a", 4]}]}),
            "`messages[0].content[1]` is the number 4; wanted a text part",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            "`messages[0].content[0]` is of type \"image\"",
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
            "`messages[0].tool_calls[0]` has no function name",
        ),
        (json!({"messages": [], "tools": "{}"}), "`tools` is an object; wanted a list"),
        (json!({"messages": [], "chat_template_kwargs": [1]}), "`chat_template_kwargs` is a list"),
        (json!({"messages": [], "system": 1}), "`system` is the number 1"),
        (json!({"prompt": 1, "completion": "x"}), "`prompt` is the number 1; wanted a string, a message"),
        (
            json!({"conversations": [{"from": "narrator", "value": ""}]}),
            "unknown role `narrator` in `conversations[0].from`",
        ),
        (json!({"text": ["x"]}), "`text` is a list; wanted a string"),
        (
            json!({"input_ids": [1, "x"], "labels": []}),
            "`input_ids[1]` is the string \"x\"; wanted a whole number",
        ),
        (json!({"input_ids": [1]}), "found column `input_ids`"),
    ];
    for (columns, want) in cases {
        let got = read(columns.clone(), false).unwrap_err();
        assert!(got.starts_with("x.jsonl:7: "), "{got}");
        assert!(got.contains(want), "{columns}: {got}");
    }
}

#[test]
fn sides_may_be_strings_messages_or_lists() {
    let answer = json!({"role": "assistant", "content": "a"});
    for (prompt, completion) in
        [(json!("u"), json!("a")), (user(), answer.clone()), (json!([user()]), json!([answer]))]
    {
        let got = conversation(json!({"prompt": prompt, "completion": completion, "system": "s"}));
        let roles: Vec<_> = got.messages.iter().map(|m| m["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant"]);
        assert_eq!(got.context, 2, "the system message is context too");
    }
}

#[test]
fn share_gpt_becomes_messages() {
    let got = conversation(json!({"conversations": [
        {"from": "human", "value": "u"},
        {"from": "function_call", "value": "{\"name\": \"now\", \"arguments\": {\"b\": 1, \"a\": 2}}"},
        {"from": "observation", "value": "9:00"},
        {"from": "gpt", "value": null, "train": false, "reasoning_content": "t", "role": "tool"},
        {"role": "user", "content": "as messages"}], "tools": "[]"}));
    let calls = json!([{"type": "function", "function": {"name": "now", "arguments": {"b": 1, "a": 2}}}]);
    let want = json!([
        {"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "9:00"},
        {"role": "assistant", "content": "", "train": false, "reasoning_content": "t"},
        {"role": "user", "content": "as messages"}]);
    assert_eq!(Value::Array(got.messages.into_iter().map(Value::Object).collect()), want);
    assert_eq!(got.tools, Some(json!([])));
}

#[test]
fn share_gpt_turns_may_stand_in_messages_too() {
    let turns = json!([{"from": "human", "value": "u"}, {"from": "gpt", "value": "a", "role": null}]);
    let want = conversation(json!({"conversations": turns.clone()}));
    assert_eq!(conversation(json!({"messages": turns})), want);
}

#[test]
fn words_under_another_name_are_no_empty_turn() {
    let turn = |turn: Value| {
        let row = json!({"conversations": [{"from": "human", "value": "u"}, turn]});
        read(row, false).map_err(|error| assert!(error.contains("`conversations[1]` has no"), "{error}"))
    };
    for wrong in [
        json!({"from": "gpt", "valu": "a"}),
        json!({"from": "gpt", "content": "a"}),
        json!({"role": "assistant", "contents": "a"}),
        json!({"role": "assistant", "value": "a"}),
    ] {
        assert!(turn(wrong).is_err());
    }
    for empty in [
        json!({"from": "gpt", "id": 1}),
        json!({"from": "gpt", "text": null}),
        json!({"role": "assistant", "content": null, "text": "a"}),
    ] {
        assert!(turn(empty).is_ok());
    }
}

#[test]
fn only_booleans_say_whether_a_turn_is_trained() {
    for train in [json!("false"), json!(0), json!([])] {
        let columns = json!({"messages": [{"role": "assistant", "content": "a", "train": train}]});
        let error = read(columns, false).unwrap_err();
        assert!(error.contains("`messages[0].train` is ") && error.contains("`true` or `false`"), "{error}");
    }
}

#[test]
fn a_weight_of_0_or_1_says_whether_a_turn_is_trained() {
    let with = |weight: Value, train: Value| {
        let mut message = json!({"role": "assistant", "content": "a", "weight": weight});
        if !train.is_null() {
            message["train"] = train;
        }
        read(json!({"messages": [message]}), false)
    };
    for (weight, train) in [(json!(0), false), (json!(1.0), true)] {
        let Body::Chat(conversation) = with(weight, json!(null)).unwrap().body else { panic!("a chat") };
        assert_eq!(conversation.messages[0]["train"], train);
        assert!(conversation.messages[0].get("weight").is_none(), "no template is to see it");
    }
    for wrong in [json!(0.5), json!("0")] {
        assert!(with(wrong, json!(null)).unwrap_err().contains("`messages[0].weight` is "));
    }
    assert!(with(json!(0), json!(true)).unwrap_err().contains("contradict"));
}

#[test]
fn nulls_of_parquet_are_absent_fields_and_nulls_of_json_are_the_users() {
    let columns = json!({"text": null, "messages": [
        {"role": "assistant", "content": null, "tool_calls": [
            {"type": null, "function": {"name": "f", "arguments": {"a": 1, "b": null}}}], "name": null}]});
    let arguments = |padded| match read(columns.clone(), padded).unwrap().body {
        Body::Chat(conversation) => {
            let message = &conversation.messages[0];
            assert!(!message.contains_key("name") && message["content"] == "");
            assert!(message["tool_calls"][0].get("type").is_none());
            message["tool_calls"][0]["function"]["arguments"].clone()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(arguments(false), json!({"a": 1, "b": null}));
    assert_eq!(arguments(true), json!({"a": 1}));
}

#[test]
fn fields_keep_their_order() {
    let got = conversation(
        json!({"messages": [{"content": ["a", {"type": "text", "text": "b"}], "zz": 1, "role": "user"}]}),
    );
    assert_eq!(
        Value::Object(got.messages[0].clone()).to_string(),
        r#"{"content":"ab","zz":1,"role":"user"}"#
    );
}

#[test]
fn formats_are_told_by_their_columns_or_named() {
    let message = json!([{"role": "user", "content": "u"}]);
    let all = json!({"messages": message, "prompt": "p", "completion": "c", "conversations": message,
        "instruction": "i", "output": "o", "text": "t", "input_ids": [1], "labels": [1]});
    let mut columns = all.clone();
    for (format, drop) in [
        (DataFormat::Messages, "messages"),
        (DataFormat::PromptCompletion, "prompt"),
        (DataFormat::ShareGpt, "conversations"),
        (DataFormat::Alpaca, "instruction"),
        (DataFormat::Text, "text"),
        (DataFormat::Pretokenized, "labels"),
    ] {
        assert_eq!(read(columns.clone(), false).unwrap().format, format);
        let data = SftDataConfig { format, ..Default::default() };
        assert_eq!(read_as(&data, all.clone(), false).unwrap(), read(columns.clone(), false).unwrap());
        columns.as_object_mut().unwrap().remove(drop);
        let error = read_as(&data, columns.clone(), false).unwrap_err();
        let want = format!("`{drop}`");
        assert!(error.contains(&want) && error.contains(format.as_str()), "{error}");
    }
    let data = SftDataConfig { format: DataFormat::RawPromptCompletion, ..Default::default() };
    let want = Body::Continuation { prompt: "p".into(), completion: "c".into() };
    assert_eq!(read_as(&data, all, false).unwrap().body, want);
}

#[test]
fn alpaca_is_a_question_with_its_input_and_an_answer() {
    let said = |columns| {
        let got = conversation(columns);
        assert_eq!(got.context, 0);
        let text = |m: &Map<String, Value>| format!("{}: {}", m["role"], m["content"]);
        got.messages.iter().map(text).collect::<Vec<_>>().join(" ").replace('"', "")
    };
    for input in [json!(null), json!("")] {
        let row = json!({"instruction": "i", "input": input, "output": "o"});
        assert_eq!(said(row), "user: i assistant: o");
    }
    let row = json!({"instruction": "i", "input": "x", "output": "o", "system": "s", "text": "all of it"});
    assert_eq!(said(row), "system: s user: i\\n\\nx assistant: o");
}

#[test]
fn columns_can_have_other_names() {
    let columns =
        ColumnsConfig { prompt: "question".into(), completion: "answer".into(), ..Default::default() };
    let data = SftDataConfig { columns, ..Default::default() };
    let row = read_as(&data, json!({"question": "u", "answer": "a", "prompt": 3}), false).unwrap();
    assert_eq!(row.body, read(json!({"prompt": "u", "completion": "a"}), false).unwrap().body);
    let error = read_as(&data, json!({"question": 3, "answer": "a"}), false).unwrap_err();
    assert!(error.contains("`question` is the number 3"), "{error}");
    let error = read_as(&data, json!({"prompt": "u"}), false).unwrap_err();
    assert!(error.contains("found column `prompt`") && error.contains("`question` and `answer`"), "{error}");
}
