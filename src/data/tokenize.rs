//! Text → token ids and loss mask: the whole text once, spans by offsets.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tokenizers::{Offsets, Tokenizer};
use xxhash_rust::xxh3::Xxh3;

use super::Sample;
use super::bytes::ByteLevel;
use super::chat::{ChatTemplate, Rendered, Unprinted};
use super::jinja;
use super::row::{Body, Conversation, Fault, Row};
use crate::config::{LossMaskConfig, TokenizerConfig};
use crate::error::{Error, Result};
use crate::hub;

/// A model's tokenizer with its chat template.
pub struct ChatTokenizer {
    dir: PathBuf,
    pub(super) tokenizer: Tokenizer,
    /// The same, faster, if it is of the usual kind.
    bytes: Option<ByteLevel>,
    /// Highest id + 1.
    vocab_size: usize,
    special_ids: Vec<u32>,
    eos: Option<(String, u32)>,
    /// What the tokenizer itself puts before plain text.
    pub(super) bos: Option<u32>,
    /// `bos_token`, whoever prints it.
    bos_token: Option<u32>,
    template: Option<ChatTemplate>,
    /// For conversations with tools, where the model has a template of its own for them.
    tool_template: Option<ChatTemplate>,
    /// `[tokenizer] chat_template`, to be written beside the copied files.
    own_template: Option<String>,
    /// A hash of the files and settings that it was made from.
    hash: u128,
    /// A template prints today's date.
    is_dated: bool,
}

/// Tokenizer files of a Hugging Face folder, those that there may be.
const FILES: [&str; 7] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE_FILE,
];
const TEMPLATE_FILE: &str = "chat_template.jinja";
const CONFIG_FILE: &str = "tokenizer_config.json";

impl ChatTokenizer {
    /// Reads `tokenizer.json` and the chat template of the model folder `dir`, or of what `config`
    /// names instead.
    ///
    /// # Errors
    /// Files that are missing or can't be read, a template that isn't one.
    pub fn load(dir: &Path, config: &TokenizerConfig) -> Result<Self> {
        let dir = match &config.name {
            Some(name) => hub::tokenizer_dir(name)?,
            None => dir.to_path_buf(),
        };
        let mut hash = Xxh3::new();
        let mut tokenizer = read_tokenizer(&dir, &mut hash)?;
        let settings = read_settings(&dir)?;
        let bos = own_bos(&tokenizer);
        // Its work is done by the template; the byte-level one would also shorten offsets.
        tokenizer.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        let no_truncation = tokenizer.with_truncation(None).map(|_| ());
        no_truncation.map_err(|e| Error::model(dir.join("tokenizer.json"), e.to_string(), ""))?;
        tokenizer.with_padding(None);

        let id_of = |key: &str| {
            let text = token_text(settings.get(key)?)?;
            Some((text.to_string(), tokenizer.token_to_id(text)?))
        };
        let eos = id_of("eos_token").or_else(|| model_eos(&dir, &tokenizer));
        let bos_token = id_of("bos_token").map(|(_, id)| id);
        let vocab_size = tokenizer.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        let mut special: Vec<(u32, String)> = tokenizer
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special)
            .map(|(id, token)| (id, token.content))
            .collect();
        special.sort_unstable();
        let own_template = config.chat_template.as_deref().map(template_argument).transpose()?;
        let special_texts = special.iter().map(|(_, text)| text.clone()).collect::<Vec<_>>();
        let compile = |(path, source): (PathBuf, String)| {
            ChatTemplate::new(&source, template_variables(&settings), special_texts.clone())
                .map(|template| template.with_thinking(config.thinking))
                .map_err(|fault| fault.at_file(&path))
        };
        let (template, tool_template) = match own_template.clone() {
            Some(source) => (Some((PathBuf::from("[tokenizer] chat_template"), source)), None),
            None => folder_templates(&dir, &settings)?,
        };
        let sources =
            [&template, &tool_template].map(|t| t.as_ref().map_or("", |(_, source)| source.as_str()));
        let is_dated = sources.iter().any(|source| source.contains("strftime_now"));
        hash.update(format!("{sources:?} {settings:?} {eos:?} {bos:?} {:?}", config.thinking).as_bytes());
        let template = template.map(compile).transpose()?;
        let tool_template = tool_template.map(compile).transpose()?;
        let special_ids = special.into_iter().map(|(id, _)| id).collect();
        let bytes = ByteLevel::of(&tokenizer);
        Ok(Self {
            dir,
            tokenizer,
            bytes,
            vocab_size,
            special_ids,
            eos,
            bos,
            bos_token,
            template,
            tool_template,
            own_template,
            hash: hash.digest128(),
            is_dated,
        })
    }

    /// One more than the highest id.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The token that ends a text (and, in chat models, a turn).
    pub fn eos_id(&self) -> Option<u32> {
        self.eos.as_ref().map(|(_, id)| *id)
    }

    /// Whether a document begins with two tokens that say that it begins.
    pub(super) fn begins_twice(&self, ids: &[u32]) -> bool {
        matches!((self.bos_token, ids), (Some(bos), &[first, second, ..]) if first == bos && second == bos)
    }

    /// What its tokens depend on, beside the rows.
    pub(super) fn identity(&self) -> String {
        let today = self.is_dated.then(jinja::today);
        format!("{:032x} {}", self.hash, today.unwrap_or_default())
    }

    /// The folder that it was read from.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether there is a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// Whether `id` is one of the tokens flagged special.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.binary_search(&id).is_ok()
    }

    /// The tokens flagged special, and of them those that the chat template prints around a question and
    /// its answer.
    pub fn special_ids(&self) -> (&[u32], Vec<u32>) {
        let said =
            |role: &str| Map::from_iter([("role".into(), role.into()), ("content".into(), Value::from("a"))]);
        let conversation =
            Conversation { messages: vec![said("user"), said("assistant")], ..Default::default() };
        let rendered = self.render_chat(&conversation, &LossMaskConfig::default());
        let ids = rendered.and_then(|rendered| Ok(self.tokenise(&rendered.text)?.0)).unwrap_or_default();
        let printed = |id: &&u32| ids.contains(id);
        (&self.special_ids, self.special_ids.iter().filter(printed).copied().collect())
    }

    /// The text and trained parts of a conversation.
    ///
    /// # Errors
    /// There is no chat template, or it fails on this conversation.
    pub fn render(&self, conversation: &Conversation, trained: &LossMaskConfig) -> Result<Rendered> {
        self.render_chat(conversation, trained).map_err(|fault| fault.at_file(&self.dir))
    }

    fn render_chat(&self, conversation: &Conversation, trained: &LossMaskConfig) -> Result<Rendered, Fault> {
        self.template_for(conversation)?.render(conversation, trained)
    }

    fn template_for(&self, conversation: &Conversation) -> Result<&ChatTemplate, Fault> {
        let for_tools = self.tool_template.as_ref().filter(|_| conversation.tools.is_some());
        for_tools.or(self.template.as_ref()).ok_or_else(|| {
            Fault::new(
                format!("{} has no chat template, and this row needs one", self.dir.display()),
                "Name a template in `[tokenizer] chat_template`, or train on a `text` column.",
            )
        })
    }

    /// The ids and mask of a row; `mask[i]` says whether token i is trained.
    ///
    /// A token is trained if its characters lie wholly inside one trained part; of a `text` row every
    /// token is, the end token that is put after it too.
    ///
    /// # Errors
    /// Names the row's place.
    pub fn encode(&self, row: &Row, trained: &LossMaskConfig) -> Result<Sample> {
        self.encode_telling(row, trained).map(|(sample, _)| sample)
    }

    /// The same, and what of the row the chat template left out.
    pub(super) fn encode_telling(
        &self,
        row: &Row,
        trained: &LossMaskConfig,
    ) -> Result<(Sample, Option<Unprinted>)> {
        let encoded = match &row.body {
            Body::Chat(conversation) => self.encode_chat(conversation, trained),
            body => self.encode_other(body).map(|sample| (sample, None)),
        };
        encoded.map_err(|fault| fault.at(&row.place))
    }

    pub(super) fn encode_chat(
        &self,
        conversation: &Conversation,
        trained: &LossMaskConfig,
    ) -> Result<(Sample, Option<Unprinted>), Fault> {
        let template = self.template_for(conversation)?;
        let Rendered { text, spans } = template.render(conversation, trained)?;
        let (ids, offsets) = self.tokenise(&text)?;
        Ok((Sample { mask: mask(&offsets, &spans), ids }, template.unprinted(conversation, &text)))
    }

    fn encode_other(&self, body: &Body) -> Result<Sample, Fault> {
        match body {
            Body::Chat(_) => unreachable!("`encode_chat` takes these"),
            Body::Text(text) => self.encode_plain("", text),
            Body::Continuation { prompt, completion } => self.encode_plain(prompt, completion),
            Body::Tokens { input_ids, labels } => self.take_tokens(input_ids, labels),
        }
    }

    /// Plain text, trained from the end of `context` on, its end token included.
    fn encode_plain(&self, context: &str, trained: &str) -> Result<Sample, Fault> {
        if trained.is_empty() {
            return Ok(Sample::default());
        }
        let text = format!("{context}{trained}");
        let (mut ids, offsets) = self.tokenise(&text)?;
        let mut mask = mask(&offsets, std::slice::from_ref(&(context.len()..text.len())));
        if let Some(bos) = self.bos.filter(|bos| ids.first() != Some(bos)) {
            ids.insert(0, bos);
            mask.insert(0, context.is_empty());
        }
        if let Some(eos) = self.eos_id().filter(|eos| ids.last() != Some(eos)) {
            ids.push(eos);
            mask.push(true);
        }
        Ok(Sample { ids, mask })
    }

    /// Tokens made elsewhere: checked, as nothing else will.
    fn take_tokens(&self, input_ids: &[i64], labels: &[i64]) -> Result<Sample, Fault> {
        const UNTRAINED: i64 = -100;
        if input_ids.len() != labels.len() {
            let (ids, labels) = (input_ids.len(), labels.len());
            return Err(Fault::new(format!("{ids} `input_ids` but {labels} `labels`; wanted as many"), ""));
        }
        let mut sample = Sample::default();
        for (i, (&id, &label)) in input_ids.iter().zip(labels).enumerate() {
            let known = u32::try_from(id).ok().filter(|&id| (id as usize) < self.vocab_size);
            let known = known.ok_or_else(|| {
                let vocab = self.vocab_size;
                Fault::new(format!("`input_ids[{i}]` is {id}, beyond the tokenizer's vocab of {vocab}"), "")
            })?;
            if label != id && label != UNTRAINED {
                return Err(Fault::new(
                    format!(
                        "`labels[{i}]` is {label}; wanted {UNTRAINED} or the token's own id, {id} (the vocab has {})",
                        self.vocab_size
                    ),
                    "Labels are not shifted: each says whether the token in the same place is trained.",
                ));
            }
            sample.ids.push(known);
            sample.mask.push(label != UNTRAINED);
        }
        Ok(sample)
    }

    /// The ids of a text, without any added token.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        self.tokenise(text).map(|(ids, _)| ids).map_err(|fault| fault.at_file(&self.dir))
    }

    /// Ids, and byte ranges of the text as it was before normalisation.
    fn tokenise(&self, text: &str) -> Result<(Vec<u32>, Vec<Offsets>), Fault> {
        let encoded = match &self.bytes {
            Some(bytes) => bytes.encode(&self.tokenizer, text),
            None => self
                .tokenizer
                .encode(text, false)
                .map(|encoding| (encoding.get_ids().to_vec(), encoding.get_offsets().to_vec())),
        };
        encoded.map_err(|e| Fault::new(format!("the tokenizer failed: {e}"), ""))
    }

    /// The text of ids.
    ///
    /// # Errors
    /// The tokenizer can't decode them.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        self.tokenizer
            .decode(ids, skip_special_tokens)
            .map_err(|e| Error::model(&self.dir, format!("can't decode ids: {e}"), ""))
    }

    /// Copies the tokenizer's files, for a model folder that stands alone.
    ///
    /// # Errors
    /// A file can't be read or written.
    pub fn copy_files(&self, out_dir: &Path) -> Result<()> {
        for name in FILES {
            let (from, to) = (self.dir.join(name), out_dir.join(name));
            if from.is_file() && !same_file(&from, &to) {
                let bytes = fs::read(&from).map_err(|e| Error::io(&from, "read", e))?;
                fs::write(&to, bytes).map_err(|e| Error::io(&to, "write", e))?;
            }
        }
        if let Some(source) = &self.own_template {
            let to = out_dir.join(TEMPLATE_FILE);
            fs::write(&to, source).map_err(|e| Error::io(&to, "write", e))?;
        }
        Ok(())
    }
}

fn same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Whether each token lies wholly inside one of the ascending `spans`.
fn mask(offsets: &[Offsets], spans: &[Range<usize>]) -> Vec<bool> {
    let mut spans = spans.iter().peekable();
    offsets
        .iter()
        .map(|&(start, end)| {
            // Tokens come in the order of their text.
            while spans.next_if(|span| span.end <= start && start < end).is_some() {}
            start < end && spans.peek().is_some_and(|span| span.start <= start && end <= span.end)
        })
        .collect()
}

fn read_tokenizer(dir: &Path, hash: &mut Xxh3) -> Result<Tokenizer> {
    let path = dir.join("tokenizer.json");
    if !path.is_file() {
        return Err(Error::model(
            &path,
            "not found",
            "The model folder must hold the tokenizer as `tokenizer.json`; \
             `AutoTokenizer.from_pretrained(…).save_pretrained(…)` of transformers writes it.",
        ));
    }
    let bytes = fs::read(&path).map_err(|e| Error::io(&path, "read", e))?;
    hash.update(&bytes);
    Tokenizer::from_bytes(bytes).map_err(|e| {
        Error::model(&path, format!("not a tokenizer: {e}"), "If a download was cut, fetch the file again.")
    })
}

/// `tokenizer_config.json`, with what only `special_tokens_map.json` says.
fn read_settings(dir: &Path) -> Result<Map<String, Value>> {
    let mut settings = read_object(&dir.join(CONFIG_FILE))?.unwrap_or_default();
    for (key, value) in read_object(&dir.join("special_tokens_map.json"))?.unwrap_or_default() {
        if settings.get(&key).is_none_or(Value::is_null) {
            settings.insert(key, value);
        }
    }
    Ok(settings)
}

/// A JSON object, or `None` where there is no such file.
pub(super) fn read_object(path: &Path) -> Result<Option<Map<String, Value>>> {
    if !path.is_file() {
        return Ok(None);
    }
    let bytes = fs::read(path).map_err(|e| Error::io(path, "read", e))?;
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|e| Error::model(path, format!("not a JSON object: {e}"), ""))
}

/// A token is a string or an object with its `content`.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// The end token that the model's own files name by id.
fn model_eos(dir: &Path, tokenizer: &Tokenizer) -> Option<(String, u32)> {
    ["generation_config.json", "config.json"].iter().find_map(|name| {
        let settings = read_object(&dir.join(name)).ok()??;
        let id = settings.get("eos_token_id")?;
        let id = u32::try_from(id.as_u64().or_else(|| id.get(0)?.as_u64())?).ok()?;
        Some((tokenizer.id_to_token(id)?, id))
    })
}

/// The token that the tokenizer itself puts before plain text, as Llama's does.
fn own_bos(tokenizer: &Tokenizer) -> Option<u32> {
    let with = tokenizer.encode("a", true).ok()?;
    let without = tokenizer.encode("a", false).ok()?;
    let (with, without) = (with.get_ids(), without.get_ids());
    (with.len() > without.len() && with.first() != without.first()).then(|| with[0])
}

/// `bos_token` and its like, as transformers hands them to the template.
fn template_variables(settings: &Map<String, Value>) -> Vec<(String, minijinja::Value)> {
    let mut variables = Vec::new();
    for key in ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"] {
        if let Some(text) = settings.get(key).and_then(token_text) {
            variables.push((key.to_string(), minijinja::Value::from(text)));
        }
    }
    variables
}

/// `[tokenizer] chat_template`: the path of a file, or a template.
fn template_argument(argument: &str) -> Result<String> {
    let path = Path::new(argument);
    if path.is_file() {
        return fs::read_to_string(path).map_err(|e| Error::io(path, "read", e));
    }
    if argument.contains("{{") || argument.contains("{%") {
        return Ok(argument.to_string());
    }
    Err(Error::model(
        path,
        "`[tokenizer] chat_template` is neither a file that exists nor a Jinja template",
        "Give the path of a `.jinja` file, or the template itself.",
    ))
}

/// A template and where it stands.
type Source = (PathBuf, String);

/// The folder's templates, the general one and the one for tools: its own file first, then
/// `tokenizer_config.json`, as transformers does it (`get_chat_template`).
fn folder_templates(dir: &Path, settings: &Map<String, Value>) -> Result<(Option<Source>, Option<Source>)> {
    let path = dir.join(TEMPLATE_FILE);
    if path.is_file() {
        let source = fs::read_to_string(&path).map_err(|e| Error::io(&path, "read", e))?;
        return Ok((Some((path, source)), None));
    }
    let path = dir.join(CONFIG_FILE);
    let found = |source: &str| Some((path.clone(), source.to_string()));
    match settings.get("chat_template") {
        None | Some(Value::Null) => return Ok((None, None)),
        Some(Value::String(source)) => return Ok((found(source), None)),
        Some(Value::Array(named)) => {
            let template = |name: &str| {
                let entry = named.iter().find(|entry| entry.get("name").is_some_and(|n| n == name));
                found(entry?.get("template")?.as_str()?)
            };
            if let Some(default) = template("default") {
                return Ok((Some(default), template("tool_use")));
            }
        }
        Some(_) => {}
    }
    Err(Error::model(
        path,
        "`chat_template` is neither a string nor a list with one named `default`",
        "Name a template in `[tokenizer] chat_template`.",
    ))
}

#[cfg(test)]
mod tests {
    use super::mask;

    #[test]
    fn only_tokens_wholly_inside_one_span_are_trained() {
        let offsets = [(0, 2), (2, 4), (3, 5), (4, 6), (6, 6), (6, 8), (8, 9)];
        let spans = [2..4, 4..8];
        assert_eq!(mask(&offsets, &spans), [false, true, false, true, false, true, false]);
        assert_eq!(mask(&offsets, &[]), [false; 7]);
        // Several tokens of one character share its range.
        assert_eq!(mask(&[(0, 4), (0, 4), (4, 5)], std::slice::from_ref(&(0..4))), [true, true, false]);
    }
}
