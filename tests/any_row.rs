//! Any row whatever goes through format, template and tokenizer: an error with a place or the right mask, never a
//! panic and never a hang.
//!
//! `EMBERTUNE_ANY_ROW_SECONDS` runs it for longer; `EMBERTUNE_ANY_ROW_SEED` runs one case again.

mod common;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use embertune::config::{LossMaskConfig, SftDataConfig, Thinking, TokenizerConfig};
use embertune::data::{Body, ChatTokenizer, Conversation, Row, read_rows};
use serde_json::{Map, Value, json};

/// One case may take so much of a core; the tokenizer alone takes 2 s for a word of 5 MB, some times over.
const LIMIT: f64 = 60.0;

/// What this process has had of the cores; where that isn't told, the time.
fn seconds_used(since: Instant) -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Behind the name, which may hold anything: user and system time are the 12th and 13th.
    let fields = stat.rsplit_once(')').map_or(Vec::new(), |(_, rest)| rest.split_whitespace().collect());
    let ticks = |i: usize| fields.get(i).and_then(|field: &&str| field.parse::<f64>().ok());
    match (ticks(11), ticks(12)) {
        (Some(user), Some(system)) => (user + system) / 100.0,
        _ => since.elapsed().as_secs_f64(),
    }
}

/// SplitMix64.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len())]
    }

    fn text(&mut self) -> String {
        const PIECES: [&str; 32] = [
            "",
            " ",
            "\n",
            "\n\n",
            "\r\n",
            "\t",
            "a",
            "word",
            "<|im_end|>",
            "<|im_start|>",
            "assistant\n",
            "<think>",
            "</think>",
            "<think>\n\n</think>\n\n",
            "<tool_response>",
            "</tool_response>",
            "{{ x }}",
            "{% for %}",
            "é",
            "e\u{301}",
            "日本語",
            "👩‍👩‍👧",
            "\u{202e}",
            "\u{feff}",
            "\u{0}",
            "\u{1}g\u{1}",
            "\u{e000}",
            "\u{f8ff}0,1\u{f8ff}",
            "\u{10fffd}",
            "\u{2028}",
            "ﬁ",
            "\"\\'<&>",
        ];
        let pieces = self.below(8);
        let text: String = (0..pieces).map(|_| self.pick(&PIECES)).collect();
        match self.below(4000) {
            0 => text + &self.pick(&PIECES).repeat(5_000_000 / 8),
            1 => text + &"x".repeat(5_000_000),
            2..40 => text + &self.pick(&PIECES).repeat(3_000),
            _ => text,
        }
    }

    fn value(&mut self, depth: usize) -> Value {
        match self.below(if depth > 4 { 9 } else { 12 }) {
            0 => Value::Null,
            1 => json!(self.one_in(2)),
            2 => json!(self.next() as i64 % 1000),
            3 => json!([i64::MIN, i64::MAX, 0, -100][self.below(4)]),
            4 => json!([1e308, -0.0, 1.5, 5e-324][self.below(4)]),
            5 => json!(u64::MAX),
            6..9 => json!(self.text()),
            9 => (0..self.below(4)).map(|_| self.value(depth + 1)).collect(),
            10 => {
                const NAMES: [&str; 14] = [
                    "role",
                    "content",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "type",
                    "text",
                    "from",
                    "value",
                    "train",
                    "thinking",
                    "reasoning_content",
                    "",
                ];
                let entry = |draw: &mut Self| (draw.pick(&NAMES).to_string(), draw.value(depth + 1));
                Value::Object((0..self.below(5)).map(|_| entry(self)).collect())
            }
            _ => json!(self.value(depth + 1).to_string()),
        }
    }

    fn turn(&mut self) -> Value {
        let role = if self.one_in(30) {
            self.pick(&["developer", "", "Assistant", "function", "ipython"])
        } else {
            self.pick(&["user", "assistant", "user", "assistant", "system", "tool"])
        };
        let mut turn = json!({"role": role, "content": self.text()});
        if self.one_in(4) {
            turn["content"] = json!([{"type": "text", "text": self.text()}, self.text()]);
        }
        if role == "assistant" && self.one_in(3) {
            turn["tool_calls"] =
                json!([{"type": "function", "function": {"name": self.text(), "arguments": self.value(2)}}]);
        }
        if self.one_in(4) {
            turn[self.pick(&["reasoning_content", "thinking", "reasoning"])] = json!(self.text());
        }
        if self.one_in(6) {
            turn["train"] = json!(self.one_in(2));
        }
        turn
    }

    fn turns(&mut self) -> Value {
        (0..self.below(7)).map(|_| self.turn()).collect()
    }

    /// A row of some format, as it ought to be.
    fn row(&mut self) -> Value {
        let mut row = match self.below(9) {
            0..4 => json!({"messages": self.turns()}),
            4 => json!({"prompt": self.turns(), "completion": self.turns()}),
            5 => json!({"prompt": self.text(), "completion": self.text()}),
            6 => {
                let turn = |draw: &mut Self| {
                    let from = draw.pick(&["human", "gpt", "system", "observation", "function_call"]);
                    let value = if from == "function_call" {
                        r#"{"name":"f","arguments":{}}"#.into()
                    } else {
                        draw.text()
                    };
                    json!({"from": from, "value": value})
                };
                json!({"conversations": (0..self.below(6)).map(|_| turn(self)).collect::<Vec<_>>()})
            }
            7 => json!({"instruction": self.text(), "input": self.text(), "output": self.text()}),
            _ if self.one_in(2) => json!({"text": self.text()}),
            _ => {
                let ids: Vec<u64> = (0..self.below(20)).map(|_| self.next() % 290).collect();
                let labels: Vec<i64> =
                    ids.iter().map(|&id| if self.one_in(2) { -100 } else { id as i64 }).collect();
                json!({"input_ids": ids, "labels": labels})
            }
        };
        if self.one_in(4) {
            row["tools"] =
                json!([{"type": "function", "function": {"name": self.text(), "parameters": self.value(1)}}]);
        }
        if self.one_in(5) {
            row["chat_template_kwargs"] =
                json!({"enable_thinking": self.one_in(2), "add_generation_prompt": self.one_in(3)});
            if self.one_in(5) {
                let name = self.pick(&[
                    "messages",
                    "tools",
                    "documents",
                    "bos_token",
                    "ns",
                    "loop",
                    "content",
                    "__embertune_mark",
                ]);
                row["chat_template_kwargs"][name] = self.value(2);
            }
        }
        if self.one_in(8) {
            row["system"] = json!(self.text());
        }
        row
    }

    /// Changes one thing somewhere.
    fn mutate(&mut self, value: &mut Value) {
        let inner = match value {
            Value::Array(items) if !items.is_empty() && !self.one_in(4) => items.len(),
            Value::Object(map) if !map.is_empty() && !self.one_in(5) => map.len(),
            _ => 0,
        };
        let at = if inner > 0 { self.below(inner) } else { 0 };
        match value {
            Value::Array(items) if inner > 0 => match self.below(10) {
                0 => drop(items.remove(at)),
                1 => items.push(items[at].clone()),
                _ => self.mutate(&mut items[at]),
            },
            Value::Object(map) if inner > 0 => {
                let name = map.keys().nth(at).cloned().unwrap();
                match self.below(10) {
                    0 => drop(map.shift_remove(&name)),
                    1 => {
                        let moved = map.shift_remove(&name).unwrap();
                        map.insert(
                            self.pick(&["messages", "prompt", "content", "tools", "x", "text"]).to_string(),
                            moved,
                        );
                    }
                    _ => self.mutate(&mut map[&name]),
                }
            }
            value => *value = self.value(0),
        }
    }

    /// A line of a file: mostly JSON.
    fn line(&mut self) -> Vec<u8> {
        let mut row = self.row();
        for _ in 0..[0, 0, 1, 1, 2, 5][self.below(6)] {
            self.mutate(&mut row);
        }
        let mut text = row.to_string();
        match self.below(40) {
            0 => text = text.replacen("\"content\":", "\"content\":\"twice\",\"content\":", 1),
            1 => text = text.replacen(":\"", ":\"\\ud800", 1),
            2 => text = text.replacen('[', &format!("[{}", "[".repeat(100_000)), 1),
            3 => text = text.replacen(":\"", ":1e999,\"y\":\"", 1),
            4 => text.truncate(text.floor_char_boundary(self.below(text.len() + 1))),
            5 => text = text.replace("\",\"", "\",\n\""),
            6 => {
                let mut bytes = text.into_bytes();
                let at = self.below(bytes.len());
                bytes[at] = self.next() as u8;
                return bytes;
            }
            7 => text = format!("{{\"a\":{}1{}}}", "{\"a\":".repeat(500), "}".repeat(500)),
            _ => {}
        }
        text.into_bytes()
    }
}

/// The templates that rows are printed by, and the tokenizer by itself.
struct Printers {
    plain: ChatTokenizer,
    others: Vec<ChatTokenizer>,
    tokenizer: tokenizers::Tokenizer,
}

impl Printers {
    fn new(dir: &Path) -> Self {
        let file = common::goldens::root().join("tiny_tokenizer/tokenizer.json");
        std::fs::copy(&file, dir.join("tokenizer.json")).unwrap();
        std::fs::write(dir.join("tokenizer_config.json"), r#"{"eos_token": "<|im_end|>"}"#).unwrap();
        let load = |template: &str, thinking| {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/rendering/templates");
            let chat_template = Some(format!("{folder}/{template}.jinja"));
            ChatTokenizer::load(dir, &TokenizerConfig { chat_template, thinking, ..Default::default() })
                .unwrap()
        };
        let others = [
            ("qwen3", Thinking::Template),
            ("qwen3", Thinking::Keep),
            ("qwen3", Thinking::Strip),
            ("qwen2_5", Thinking::Last),
            ("qwen3_training", Thinking::Template),
        ];
        let mut tokenizer = tokenizers::Tokenizer::from_file(&file).unwrap();
        tokenizer.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        let others = others.map(|(template, thinking)| load(template, thinking)).into();
        Self { plain: load("smollm2", Thinking::Template), others, tokenizer }
    }

    /// Whatever the row is: right, or an error.
    fn check(&self, row: &Row, bytes: usize) {
        let trained = LossMaskConfig::default();
        let printers = if bytes > 1 << 20 { 2 } else { usize::MAX };
        for (i, printer) in std::iter::once(&self.plain).chain(&self.others).take(printers).enumerate() {
            let sample = match printer.encode(row, &trained) {
                Ok(sample) => sample,
                Err(error) => {
                    assert!(error.to_string().contains(":1: "), "no place: {error}");
                    continue;
                }
            };
            assert_eq!(sample.ids.len(), sample.mask.len());
            let Body::Chat(conversation) = &row.body else {
                if let Body::Tokens { labels, .. } = &row.body {
                    assert_eq!(sample.mask, labels.iter().map(|&l| l != -100).collect::<Vec<_>>());
                }
                break;
            };
            let rendered = printer.render(conversation, &trained).unwrap();
            if i == 0 {
                let (text, spans) = by_hand(conversation);
                assert_eq!((&rendered.text, &rendered.spans), (&text, &spans));
            }
            turns_are_whole(conversation, &rendered.text, &rendered.spans);
            let (ids, mask) = self.slowly(&rendered.text, &rendered.spans);
            assert!(ids == sample.ids, "ids");
            assert!(mask == sample.mask, "mask");
        }
    }

    /// Token by token, span by span.
    fn slowly(&self, text: &str, spans: &[Range<usize>]) -> (Vec<u32>, Vec<bool>) {
        let encoding = self.tokenizer.encode(text, false).unwrap();
        let inside = |&(start, end): &(usize, usize)| {
            start < end && (start..end).all(|byte| spans.iter().any(|span| span.contains(&byte)))
        };
        // Spans are apart by a header at least, so no token lies in two.
        (encoding.get_ids().to_vec(), encoding.get_offsets().iter().map(inside).collect())
    }
}

fn wanted(conversation: &Conversation) -> impl Iterator<Item = &Map<String, Value>> {
    let trains = |message: &&Map<String, Value>| {
        message["role"] == "assistant" && message.get("train").is_none_or(|train| *train != json!(false))
    };
    conversation.messages.iter().skip(conversation.context).filter(trains)
}

/// The plain template, written out: what it prints and which of it is the assistant's.
fn by_hand(conversation: &Conversation) -> (String, Vec<Range<usize>>) {
    let (mut text, mut spans) = (String::new(), Vec::new());
    for (i, message) in conversation.messages.iter().enumerate() {
        let (role, content) = (message["role"].as_str().unwrap(), message["content"].as_str().unwrap());
        if i == 0 && role != "system" {
            text += "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n";
        }
        text += &format!("<|im_start|>{role}\n");
        let start = text.len();
        text += content;
        text += "<|im_end|>";
        let trains =
            role == "assistant" && i >= conversation.context && message.get("train") != Some(&json!(false));
        spans.extend(trains.then_some(start..text.len()));
        text.push('\n');
    }
    if conversation.kwargs.get("add_generation_prompt").is_some_and(truthy) {
        text += "<|im_start|>assistant\n";
    }
    (text, spans)
}

/// As Python has it.
fn truthy(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(map) => !map.is_empty(),
    }
}

/// A span for each trained turn, from its header to its stop token, with its words in it.
fn turns_are_whole(conversation: &Conversation, text: &str, spans: &[Range<usize>]) {
    assert_eq!(spans.len(), wanted(conversation).count(), "{spans:?}");
    for (span, message) in spans.iter().zip(wanted(conversation)) {
        assert!(text[..span.start].ends_with("<|im_start|>assistant\n"), "{span:?}");
        let turn = text[span.clone()].trim_end();
        assert!(turn.ends_with("<|im_end|>"), "{span:?}");
        // Templates trim words and cut thoughts; what comes last of them stays.
        let words = message["content"].as_str().unwrap().rsplit("</think>").next().unwrap_or_default();
        assert!(
            turn.contains(words.trim()),
            "{span:?} lacks {:?}",
            words.chars().take(80).collect::<String>()
        );
    }
}

/// One case; an error's text is worth a look too.
fn case(seed: u64, dir: &Path, printers: &Printers) -> bool {
    let mut draw = Draw(seed);
    let file = dir.join("row.jsonl");
    let line = draw.line();
    std::fs::write(&file, &line).unwrap();
    let row = match read_rows(&file, &SftDataConfig::default()) {
        Ok(mut rows) => rows.next(),
        Err(_) => return false,
    };
    match row {
        Some(Ok(row)) => {
            printers.check(&row, line.len());
            true
        }
        Some(Err(error)) => {
            assert!(error.to_string().contains("row.jsonl"), "no place: {error}");
            false
        }
        None => false,
    }
}

#[test]
fn any_row_is_right_or_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let printers = Printers::new(dir.path());
    let number = |key| std::env::var(key).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("EMBERTUNE_ANY_ROW_SEED") {
        case(seed, dir.path(), &printers);
        return;
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let current = Arc::new(AtomicU64::new(0));
    let (seen, started) = (current.clone(), Instant::now());
    std::thread::spawn(move || {
        let (mut last, mut before) = (0, 0.0);
        loop {
            std::thread::sleep(Duration::from_millis(500));
            let (seed, used) = (seen.load(Ordering::SeqCst), seconds_used(started));
            if seed != last {
                (last, before) = (seed, used);
            }
            if used - before > LIMIT {
                eprintln!("EMBERTUNE_ANY_ROW_SEED={seed} has taken {LIMIT} s");
                std::process::abort();
            }
        }
    });
    let seconds = number("EMBERTUNE_ANY_ROW_SECONDS").unwrap_or(8);
    // So many from a fixed seed, then others each time.
    const FIXED: u64 = 600;
    let (mut cases, mut good) = (0u64, 0);
    while cases < FIXED + 200 || started.elapsed() < Duration::from_secs(seconds) {
        let base = if cases < FIXED { 0 } else { now };
        let seed = base.wrapping_add(cases.wrapping_mul(0x1234_5678_9abc_def1)) | 1;
        current.store(seed, Ordering::SeqCst);
        match catch_unwind(AssertUnwindSafe(|| case(seed, dir.path(), &printers))) {
            Ok(read) => good += u64::from(read),
            Err(_) => panic!("EMBERTUNE_ANY_ROW_SEED={seed} shows it again"),
        }
        cases += 1;
    }
    println!("{cases} rows, {good} of them good");
    assert!(good * 4 > cases, "most rows are refused: {good} of {cases} are read");
}
