//! Byte-level BPE (the kind of GPT-2, Qwen and Llama 3) without what `tokenizers` writes down about every
//! character: the same ids and offsets, faster and in a fraction of the memory.
//!
//! Added tokens and words are found here; the tokens of a word come from the library's own BPE and are
//! remembered. What lies between two added tokens is encoded by the library where it would be normalised, and so
//! is everything where the tokenizer is of another kind.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::utils::SysRegex;
use tokenizers::{
    Model, ModelWrapper, NormalizerWrapper, Offsets, PreTokenizerWrapper, Result, SplitDelimiterBehavior,
    Tokenizer,
};
use unicode_normalization_alignments::is_nfc;

/// How `ByteLevel` itself splits words, with `use_regex` (tokenizers, pre_tokenizers/byte_level.rs).
const GPT2_WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Words that a cache remembers before it starts anew.
const REMEMBERED: usize = 1 << 16;
/// Longer words come once and never again.
const MEMORABLE_BYTES: usize = 64;

/// A byte-level BPE tokenizer, taken apart.
pub(super) struct ByteLevel {
    added: Option<AhoCorasick>,
    /// Ids of the patterns of `added`.
    added_ids: Vec<u32>,
    wants_nfc: bool,
    splits: Vec<Split>,
    /// The letter that stands for each byte in the vocabulary.
    letters: [char; 256],
    /// One for each thread that is encoding.
    idle: Mutex<Vec<Words>>,
}

/// One way of cutting a text into words.
enum Split {
    Regex(SysRegex),
    /// Each digit alone.
    Digits,
}

/// The tokens of words that were met: ids and lengths in bytes.
type Words = HashMap<Box<str>, Box<[(u32, u32)]>>;

impl ByteLevel {
    /// `None` where the tokenizer is of another kind.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let letters = letters();
        let bpe = bpe(tokenizer)?;
        let plain = |affix: &Option<String>| affix.as_ref().is_none_or(String::is_empty);
        let every_byte = letters.iter().all(|letter| bpe.token_to_id(&letter.to_string()).is_some());
        let drops = bpe.dropout.is_some_and(|p| p > 0.0);
        if drops || !every_byte || !plain(&bpe.continuing_subword_prefix) || !plain(&bpe.end_of_word_suffix) {
            return None;
        }
        let wants_nfc = match tokenizer.get_normalizer() {
            None => false,
            Some(NormalizerWrapper::NFC(_)) => true,
            Some(_) => return None,
        };
        let (added, added_ids) = added_tokens(tokenizer)?;
        let splits = splits(tokenizer.get_pre_tokenizer()?)?;
        Some(Self { added, added_ids, wants_nfc, splits, letters, idle: Mutex::default() })
    }

    /// Ids and byte ranges as [`Tokenizer::encode`] gives them for the `tokenizer` that this was made of.
    ///
    /// # Errors
    /// The library's.
    pub fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Result<(Vec<u32>, Vec<Offsets>)> {
        let bpe = bpe(tokenizer).ok_or("not the tokenizer that was taken apart")?;
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let words = idle().pop().unwrap_or_default();
        let (ids, offsets) = (Vec::with_capacity(text.len() / 4), Vec::with_capacity(text.len() / 4));
        let mut encoding = Encoding { of: self, tokenizer, bpe, text, words, ids, offsets };
        let done = encoding.run();
        idle().push(encoding.words);
        done.map(|()| (encoding.ids, encoding.offsets))
    }
}

/// A text on its way.
struct Encoding<'a> {
    of: &'a ByteLevel,
    tokenizer: &'a Tokenizer,
    bpe: &'a BPE,
    text: &'a str,
    words: Words,
    ids: Vec<u32>,
    offsets: Vec<Offsets>,
}

impl Encoding<'_> {
    fn run(&mut self) -> Result<()> {
        let (of, text) = (self.of, self.text);
        let mut from = 0;
        for found in of.added.iter().flat_map(|added| added.find_iter(text)) {
            self.part(from, found.start())?;
            self.ids.push(of.added_ids[found.pattern().as_usize()]);
            self.offsets.push((found.start(), found.end()));
            from = found.end();
        }
        self.part(from, text.len())
    }

    /// What lies between two added tokens: the library treats it by itself as well.
    fn part(&mut self, from: usize, to: usize) -> Result<()> {
        let part = &self.text[from..to];
        if self.of.wants_nfc && !part.is_ascii() && !is_nfc(part) {
            let encoded = self.tokenizer.encode(part, false)?;
            self.ids.extend_from_slice(encoded.get_ids());
            self.offsets.extend(encoded.get_offsets().iter().map(|(a, b)| (from + a, from + b)));
            return Ok(());
        }
        self.words_of(from, to, 0)
    }

    /// A part of the text, to be cut by the splits from number `split` on.
    fn words_of(&mut self, from: usize, to: usize, split: usize) -> Result<()> {
        let part = &self.text[from..to];
        let of = self.of;
        let mut done = from;
        let mut matched = |this: &mut Self, start: usize, end: usize| {
            let gap = std::mem::replace(&mut done, end);
            if gap < start {
                this.words_of(gap, start, split + 1)?;
            }
            if start < end { this.words_of(start, end, split + 1) } else { Ok(()) }
        };
        match of.splits.get(split) {
            None if part.is_empty() => return Ok(()),
            None => return self.word(from, to),
            Some(Split::Regex(regex)) => {
                let mut matches = regex.find_iter(part);
                matches.try_for_each(|(start, end)| matched(self, from + start, from + end))?;
            }
            Some(Split::Digits) => {
                let mut digits = part.char_indices().filter(|(_, c)| c.is_numeric());
                digits.try_for_each(|(at, c)| matched(self, from + at, from + at + c.len_utf8()))?;
            }
        }
        if done < to { self.words_of(done, to, split + 1) } else { Ok(()) }
    }

    fn word(&mut self, from: usize, to: usize) -> Result<()> {
        let word = &self.text[from..to];
        if let Some(tokens) = self.words.get(word) {
            add(&mut self.ids, &mut self.offsets, self.text, from, tokens);
            return Ok(());
        }
        let tokens = self.tokens_of(word)?;
        add(&mut self.ids, &mut self.offsets, self.text, from, &tokens);
        if word.len() <= MEMORABLE_BYTES {
            if self.words.len() >= REMEMBERED {
                self.words.clear();
            }
            self.words.insert(word.into(), tokens);
        }
        Ok(())
    }

    /// The library's answer.
    fn tokens_of(&self, word: &str) -> Result<Box<[(u32, u32)]>> {
        let letters: String = word.bytes().map(|byte| self.of.letters[usize::from(byte)]).collect();
        let tokens = self.bpe.tokenize(&letters)?;
        let bytes = |(start, end): Offsets| letters[start..end].chars().count() as u32;
        Ok(tokens.iter().map(|token| (token.id, bytes(token.offsets))).collect())
    }
}

/// Appends the tokens of a word that begins at `from`; one that ends inside a character has all of it.
fn add(ids: &mut Vec<u32>, offsets: &mut Vec<Offsets>, text: &str, from: usize, tokens: &[(u32, u32)]) {
    let mut start = from;
    for &(id, len) in tokens {
        let end = start + len as usize;
        ids.push(id);
        offsets.push((text.floor_char_boundary(start), text.ceil_char_boundary(end)));
        start = end;
    }
}

fn bpe(tokenizer: &Tokenizer) -> Option<&BPE> {
    match tokenizer.get_model() {
        ModelWrapper::BPE(bpe) => Some(bpe),
        _ => None,
    }
}

/// What finds the added tokens; `None` if there are some that depend on what stands around them.
fn added_tokens(tokenizer: &Tokenizer) -> Option<(Option<AhoCorasick>, Vec<u32>)> {
    let mut tokens: Vec<_> = tokenizer.get_added_tokens_decoder().into_iter().collect();
    tokens.sort_unstable_by_key(|(id, _)| *id);
    if tokens.iter().any(|(_, token)| token.normalized || token.single_word || token.lstrip || token.rstrip) {
        return None;
    }
    if tokens.is_empty() {
        return Some((None, Vec::new()));
    }
    let texts = tokens.iter().map(|(_, token)| token.content.as_bytes());
    let finder = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts).ok()?;
    Some((Some(finder), tokens.into_iter().map(|(id, _)| id).collect()))
}

/// The ways in which a text is cut, one after the other, if the last makes bytes of it.
fn splits(pre_tokenizer: &PreTokenizerWrapper) -> Option<Vec<Split>> {
    let steps = match pre_tokenizer {
        PreTokenizerWrapper::Sequence(steps) => steps.as_ref(),
        one => std::slice::from_ref(one),
    };
    let (last, before) = steps.split_last()?;
    let mut splits = before.iter().map(split).collect::<Option<Vec<_>>>()?;
    match last {
        PreTokenizerWrapper::ByteLevel(last) if !last.add_prefix_space => {
            if last.use_regex {
                splits.push(Split::Regex(SysRegex::new(GPT2_WORDS).ok()?));
            }
            Some(splits)
        }
        _ => None,
    }
}

fn split(step: &PreTokenizerWrapper) -> Option<Split> {
    match step {
        PreTokenizerWrapper::Digits(digits) if digits.individual_digits => Some(Split::Digits),
        PreTokenizerWrapper::Split(split)
            if !split.invert && split.behavior == SplitDelimiterBehavior::Isolated =>
        {
            match &split.pattern {
                SplitPattern::Regex(regex) => SysRegex::new(regex).ok().map(Split::Regex),
                SplitPattern::String(_) => None,
            }
        }
        _ => None,
    }
}

/// GPT-2's letters: printable bytes of Latin-1 stand for themselves, the others for what comes from U+0100 on.
fn letters() -> [char; 256] {
    let mut beyond = '\u{100}'..;
    std::array::from_fn(|byte| match byte as u8 {
        byte @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) => char::from(byte),
        _ => beyond.next().expect("there are more characters than bytes"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const LLAMA3_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    /// The goldens' tokenizer (Qwen3's parts), and others made of it.
    fn tokenizers() -> Vec<(&'static str, Tokenizer)> {
        let goldens = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/tiny_tokenizer/tokenizer.json");
        let qwen: Value = serde_json::from_slice(&std::fs::read(goldens).unwrap()).unwrap();
        let with = |steps: Value, normalizer: Value| {
            let mut made = qwen.clone();
            made["pre_tokenizer"] = steps;
            made["normalizer"] = normalizer;
            made
        };
        let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
        let sequence =
            |first: Value, use_regex| json!({"type": "Sequence", "pretokenizers": [first, bytes(use_regex)]});
        let llama = json!({"type": "Split", "pattern": {"Regex": LLAMA3_WORDS}, "behavior": "Isolated", "invert": false});
        let digits = json!({"type": "Digits", "individual_digits": true});
        let made = [
            ("GPT-2", with(bytes(true), Value::Null)),
            ("Llama 3", with(sequence(llama, false), Value::Null)),
            ("SmolLM2", with(sequence(digits, true), json!({"type": "NFC"}))),
            ("Qwen", qwen),
        ];
        let load = |(name, value): (_, Value)| {
            let mut tokenizer = Tokenizer::from_bytes(value.to_string()).unwrap();
            // As `ChatTokenizer` has it.
            tokenizer.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
            (name, tokenizer)
        };
        let mut all: Vec<_> = made.into_iter().map(load).collect();
        if let Some(dir) = std::env::var_os("EMBERTUNE_QWEN3_TOKENIZER") {
            let text = std::fs::read_to_string(std::path::Path::new(&dir).join("tokenizer.json")).unwrap();
            all.push(load(("Qwen3", serde_json::from_str(&text).unwrap())));
        }
        all
    }

    fn compare(name: &str, tokenizer: &Tokenizer, fast: &ByteLevel, text: &str) {
        let want = tokenizer.encode(text, false).unwrap();
        let (ids, offsets) = fast.encode(tokenizer, text).unwrap();
        assert_eq!(ids, want.get_ids(), "{name}: {text:?}");
        assert_eq!(offsets, want.get_offsets(), "{name}: {text:?}");
    }

    #[test]
    fn ids_and_offsets_are_those_of_the_library() {
        // What templates print, what people write, and what lies at the edges of the patterns.
        const PARTS: [&str; 40] = [
            "<|im_start|>",
            "<|im_end|>",
            "<think>",
            "</think>",
            "<|im_",
            "|>",
            "user\n",
            " the",
            "The",
            "'s",
            "'S",
            "'ll",
            "don't",
            " ",
            "  ",
            "\n",
            "\r\n",
            "\t",
            "\u{a0}",
            "\u{2003}",
            "\u{85}",
            "12",
            "3456",
            "\u{bd}",
            "\u{664}",
            "é",
            "e\u{301}",
            "ﬁ",
            "ſ",
            "日本語",
            "한국어",
            "\u{1100}\u{1161}",
            "🦀",
            "👩\u{200d}👩",
            "\u{fe0f}",
            "اَلْ",
            "हिन्दी",
            "\u{0}",
            "\u{10ffff}",
            "Việt",
        ];
        let mut state = 7u64;
        let mut next = |n: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % n
        };
        for (name, tokenizer) in tokenizers() {
            let fast = ByteLevel::of(&tokenizer).unwrap_or_else(|| panic!("{name} is byte-level"));
            for round in 0..2_000 {
                let mut text = String::new();
                for _ in 0..next(24) {
                    match next(8) {
                        // Any character, of the first planes above all.
                        0 => text.extend(char::from_u32(
                            next(if round % 2 == 0 { 0x3000 } else { 0x30000 }) as u32
                        )),
                        1 => text.push(char::from(next(128) as u8)),
                        _ => text.push_str(PARTS[next(PARTS.len())]),
                    }
                }
                compare(name, &tokenizer, &fast, &text);
            }
        }
    }

    #[test]
    fn every_character_is_cut_where_the_library_cuts_it() {
        for (name, tokenizer) in tokenizers().into_iter().filter(|(name, _)| ["Qwen", "GPT-2"].contains(name))
        {
            let fast = ByteLevel::of(&tokenizer).unwrap();
            for block in (0..0x20000u32).step_by(64) {
                let text: String =
                    (block..block + 64).filter_map(char::from_u32).flat_map(|c| [c, 'a']).collect();
                compare(name, &tokenizer, &fast, &text);
            }
        }
    }

    #[test]
    fn a_full_cache_and_words_too_long_for_it_change_nothing() {
        let (name, tokenizer) = tokenizers().remove(3);
        let fast = ByteLevel::of(&tokenizer).unwrap();
        let many: String =
            (0..REMEMBERED + 10).map(|i| format!("{}x{}y", char::from(b'a' + (i % 26) as u8), i)).collect();
        compare(name, &tokenizer, &fast, &many);
        let text = "w".repeat(MEMORABLE_BYTES + 1);
        for _ in 0..2 {
            compare(name, &tokenizer, &fast, &text);
        }
        compare(name, &tokenizer, &fast, "");
    }

    #[test]
    fn other_kinds_are_left_to_the_library() {
        let (_, tokenizer) = tokenizers().remove(0);
        let other = |change: &dyn Fn(&mut Value)| {
            let mut value: Value = serde_json::from_str(&tokenizer.to_string(false).unwrap()).unwrap();
            change(&mut value);
            ByteLevel::of(&Tokenizer::from_bytes(value.to_string()).unwrap()).is_none()
        };
        assert!(!other(&|_| {}));
        assert!(other(&|v| v["added_tokens"][0]["lstrip"] = true.into()));
        assert!(other(&|v| v["added_tokens"][0]["normalized"] = true.into()));
        assert!(other(&|v| v["normalizer"] = json!({"type": "NFKC"})));
        assert!(other(&|v| v["pre_tokenizer"]["add_prefix_space"] = true.into()));
        assert!(other(&|v| v["pre_tokenizer"] = json!({"type": "Whitespace"})));
        assert!(other(&|v| v["model"]["dropout"] = 0.1.into()));
    }
}
