//! Rendering and masks against transformers: `tests/fixtures/rendering`, or the folder in `EMBERTUNE_RENDERING`.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use embertune::config::{LossMaskConfig, SftDataConfig, TokenizerConfig};
use embertune::data::{Body, ChatTokenizer, Row, read_rows};
use serde_json::Value;

const NOTHING: LossMaskConfig = LossMaskConfig { system: false, user: false, assistant: false, tool: false };

fn folder() -> PathBuf {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/rendering");
    std::env::var_os("EMBERTUNE_RENDERING").map_or(own.into(), PathBuf::from)
}

fn tokenizer(dir: &Path, template: &Path) -> Result<ChatTokenizer, String> {
    let special = serde_json::json!({
        "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
    });
    let file = common::goldens::root().join("tiny_tokenizer/tokenizer.json");
    std::fs::copy(file, dir.join("tokenizer.json")).unwrap();
    std::fs::write(dir.join("tokenizer_config.json"), special.to_string()).unwrap();
    let chat_template = Some(template.to_str().unwrap().to_string());
    ChatTokenizer::load(dir, &TokenizerConfig { chat_template, ..Default::default() })
        .map_err(|e| e.to_string())
}

/// Where each token stands in the text, by the tokenizer alone.
fn offsets(text: &str) -> Vec<(usize, usize)> {
    let file = common::goldens::root().join("tiny_tokenizer/tokenizer.json");
    let mut tokenizer = tokenizers::Tokenizer::from_file(file).unwrap();
    tokenizer.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
    tokenizer.encode(text, false).unwrap().get_offsets().to_vec()
}

fn row(dir: &Path, columns: &Value) -> Row {
    let file = dir.join("row.jsonl");
    std::fs::write(&file, columns.to_string()).unwrap();
    read_rows(&file, &SftDataConfig::default()).unwrap().next().unwrap().unwrap()
}

/// What differs from the reference, if anything; counts what was compared.
fn compare(
    case: &Value,
    tokenizer: &Result<ChatTokenizer, String>,
    row: &Row,
    counts: &mut BTreeMap<&'static str, usize>,
) -> Option<String> {
    let mut count = |what| *counts.entry(what).or_default() += 1;
    let Body::Chat(conversation) = &row.body else { panic!("{row:?}") };
    let rendered = tokenizer.as_ref().map_err(Clone::clone);
    let rendered = rendered.and_then(|t| t.render(conversation, &NOTHING).map_err(|e| e.to_string()));
    let (Some(text), rendered) = (case["text"].as_str(), rendered) else {
        count("refused by transformers");
        return None;
    };
    let rendered = match rendered {
        Ok(rendered) => rendered.text,
        Err(error) => return Some(format!("not rendered: {error}")),
    };
    if rendered != text {
        return Some(format!("text\n got {rendered:?}\nwant {text:?}"));
    }
    count("texts");
    let tokenizer = tokenizer.as_ref().expect("it rendered");
    let trained = LossMaskConfig::default();
    let spans = match tokenizer.render(conversation, &trained) {
        Ok(rendered) => rendered.spans,
        Err(error) if case["generation"].is_null() => {
            count("refused to train, as untraceable");
            return (!error.to_string().contains("which part")).then(|| error.to_string());
        }
        Err(error) => return Some(error.to_string()),
    };
    let Some(wanted) = case["generation"].as_array() else {
        count("spans of the template's structure");
        return None;
    };
    let bytes: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let at = |point: &Value| bytes[point.as_u64().unwrap() as usize];
    let wanted = wanted.iter().map(|span| at(&span[0])..at(&span[1])).filter(|span| !span.is_empty());
    let wanted: Vec<_> = wanted.collect();
    if spans != wanted {
        return Some(format!("spans {spans:?}, wanted {wanted:?}"));
    }
    count("spans of generation marks");
    let sample = tokenizer.encode(row, &trained).unwrap();
    let numbers = |key: &str| -> Vec<u32> { serde_json::from_value(case[key].clone()).unwrap() };
    if sample.ids != numbers("ids") {
        return Some("ids".into());
    }
    // transformers takes a token that an edge of a span cuts; here it isn't trained.
    let want = numbers("assistant_masks");
    let differ = (0..want.len()).filter(|&i| sample.mask[i] != (want[i] == 1)).collect::<Vec<_>>();
    let edges: Vec<usize> = spans.iter().flat_map(|span| [span.start, span.end]).collect();
    let offsets = offsets(text);
    let cut = |i: usize| edges.iter().any(|&edge| offsets[i].0 < edge && edge < offsets[i].1);
    if let Some(i) = differ.into_iter().find(|&i| sample.mask[i] || !cut(i)) {
        return Some(format!("mask of token {i}, {:?}", &text[offsets[i].0..offsets[i].1]));
    }
    count("masks");
    None
}

#[test]
fn texts_spans_and_masks_are_those_of_transformers() {
    let folder = folder();
    let cases: Vec<Value> =
        serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut tokenizers = BTreeMap::new();
    let (mut counts, mut wrong) = (BTreeMap::new(), Vec::new());
    for case in &cases {
        let template = case["template"].as_str().unwrap();
        let load = || tokenizer(dir.path(), &folder.join("templates").join(template));
        let tokenizer = tokenizers.entry(template).or_insert_with(load);
        let differs = compare(case, tokenizer, &row(dir.path(), &case["row"]), &mut counts);
        wrong.extend(differs.map(|what| format!("{template}, {}: {what}", case["case"])));
    }
    println!("{} templates: {counts:?}", tokenizers.len());
    assert!(wrong.is_empty(), "{} of {} differ\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    assert!(counts["texts"] >= 40 && counts["spans of generation marks"] >= 8, "{counts:?}");
    assert_eq!(counts["masks"], counts["spans of generation marks"]);
}
