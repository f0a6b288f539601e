//! `embertune generate`: answers of a model, with an adapter or without, to prompts or in a conversation.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use clap::Args;
use serde_json::json;
use tracing::Level;

use super::folders;
use crate::config::{DeviceSpec, SampleConfig, TokenizerConfig};
use crate::data::{ChatTokenizer, Conversation, Prompt};
use crate::model::{Answer, Decoder, Heard, Pace, Speaker};
use crate::report::{LineFormat, log};
use crate::{Error, Result, device, export};

/// What answers, and how.
#[derive(Debug, Args)]
pub(super) struct GenerateArgs {
    /// A Hugging Face folder or hub id.
    #[arg(long, value_name = "MODEL")]
    model: String,
    /// Folder of a PEFT adapter, or of a run.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// A file of prompts: `.txt` with one a line, or rows in any form that training takes, whose last answer is left out.
    #[arg(long, value_name = "FILE", conflicts_with = "chat")]
    prompts: Option<PathBuf>,
    /// A conversation, a line a turn: `/reset` begins anew, `/exit` or Ctrl-D ends it. So it is without a prompt, too.
    #[arg(long)]
    chat: bool,
    /// A system message before each prompt that has none.
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Take prompts as they are, without the chat template.
    #[arg(long, conflicts_with = "chat")]
    raw: bool,
    /// Another tokenizer than the model's: a folder or hub id, as the key `tokenizer.name`.
    #[arg(long, value_name = "NAME")]
    tokenizer: Option<String>,
    /// Another chat template: a file, or the template itself.
    #[arg(long, value_name = "JINJA", conflicts_with = "raw")]
    chat_template: Option<String>,
    /// Further variables for the chat template, as JSON: `{"enable_thinking": false}`.
    #[arg(long, value_name = "JSON", conflicts_with = "raw")]
    chat_template_kwargs: Option<String>,
    /// Most tokens of an answer.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = positive, allow_negative_numbers = true)]
    max_new_tokens: usize,
    /// 0 takes the most likely token each time.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f64,
    /// Draw from the most likely tokens that have this much of the probability together.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f64,
    /// Draw from so many of the most likely tokens.
    #[arg(long, value_parser = positive, allow_negative_numbers = true)]
    top_k: Option<usize>,
    /// Of the drawing.
    #[arg(long, default_value_t = 0, value_parser = whole, allow_negative_numbers = true)]
    seed: u64,
    /// A text or token that ends an answer, beside the model's own; as often as needed.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Prompts that are answered at once.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = positive, allow_negative_numbers = true)]
    batch_size: usize,
    /// A line of JSON an answer.
    #[arg(long, conflicts_with = "chat")]
    json: bool,
    /// As the key `device`.
    #[arg(long, default_value = "auto")]
    device: String,
    /// As the key `model.dtype`.
    #[arg(long, default_value = "auto")]
    dtype: String,
    /// What is asked; in a conversation, its first turns.
    #[arg(value_name = "PROMPT")]
    asked: Vec<String>,
}

fn positive(text: &str) -> std::result::Result<usize, String> {
    text.parse().ok().filter(|&n| n > 0).ok_or_else(|| "wanted a whole number above 0".into())
}

fn whole(text: &str) -> std::result::Result<u64, String> {
    text.parse().map_err(|_| "wanted a whole number, 0 or more".into())
}

/// Answers the prompts, or talks.
///
/// # Errors
/// What can't be loaded; a prompt that is too long.
pub(super) fn run(args: &GenerateArgs) -> Result<()> {
    log::init(Level::INFO, LineFormat::Text, None);
    let config = args.sampling()?;
    let prompts = Prompt::all(&config)?;
    let talks = args.chat || prompts.is_empty();
    if talks && (args.json || args.raw) {
        let message = format!("`--{}` without a prompt", if args.json { "json" } else { "raw" });
        return Err(Error::Usage {
            message,
            hint: "name what is asked, or a file of it: `--prompts`".into(),
        });
    }
    let base = folders::model_dir(&args.model, "--model")?;
    let adapter = args.adapter.as_deref().map(folders::adapter_dir).transpose()?;
    let (name, chat_template) = (args.tokenizer.clone(), args.chat_template.clone());
    let settings = TokenizerConfig { name, chat_template, ..TokenizerConfig::default() };
    let tokenizer = Arc::new(ChatTokenizer::load(&base, &settings)?);
    if talks && !tokenizer.has_chat_template() {
        let message = "the tokenizer has no chat template, which a conversation needs";
        let hint = "name one with `--chat-template FILE`, or a prompt to go on with: `embertune generate … \"Once\"`";
        return Err(Error::model(tokenizer.dir(), message, hint));
    }
    let speaker = Speaker::new(&config, tokenizer)?;
    let model = args.load(&base, adapter.as_deref())?;
    let talker = Talker { model, speaker, json: args.json, from: (base, adapter) };
    if talks {
        return talker.talk(args.system.as_deref(), &args.asked);
    }
    if talker.speaker.is_raw() && !args.raw {
        tracing::info!("the model has no chat template: prompts are taken as they are");
    }
    talker.answer(&prompts)
}

impl GenerateArgs {
    fn sampling(&self) -> Result<SampleConfig> {
        if let Some((message, hint)) = self.out_of_range().or_else(|| self.empty()) {
            return Err(Error::Usage { message, hint: hint.into() });
        }
        Ok(SampleConfig {
            prompts: if self.chat { vec![] } else { self.asked.clone() },
            file: self.prompts.clone(),
            system: self.system.clone(),
            chat_template_kwargs: self.chat_template_kwargs.clone(),
            raw: self.raw,
            batch_size: self.batch_size,
            max_new_tokens: self.max_new_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            stop: self.stop.clone(),
            seed: self.seed,
            ..SampleConfig::default()
        })
    }

    fn out_of_range(&self) -> Fault {
        let (temperature, top_p) = (self.temperature, self.top_p);
        if !(temperature >= 0.0 && temperature.is_finite() && top_p > 0.0 && top_p <= 1.0) {
            let message = format!("`--temperature` is {temperature}, `--top-p` is {top_p}");
            return Some((
                message,
                "a temperature is 0 or more (0 draws nothing), `--top-p` above 0 and at most 1",
            ));
        }
        let in_vain = temperature == 0.0 && (top_p < 1.0 || self.top_k.is_some());
        in_vain.then(|| {
            let message =
                "`--top-p` and `--top-k` limit what is drawn, but `--temperature` is 0: nothing is drawn";
            (message.into(), "set `--temperature 0.7`, or leave them out")
        })
    }

    fn empty(&self) -> Fault {
        if self.stop.iter().any(String::is_empty) {
            let message = "`--stop` is empty: every answer would end at once";
            return Some((message.into(), "leave it out, or name a text or token that ends an answer"));
        }
        let prompt = self.asked.iter().position(String::is_empty)?;
        let hint = "name what the model is to answer: `embertune generate … \"What is a tide?\"`";
        Some((format!("prompt {} is empty", prompt + 1), hint))
    }

    /// An adapter of another model doesn't fit in many places: what they come from is told first.
    fn about_base(&self, error: Error, base: &Path, adapter: &Path) -> Error {
        let named = export::named_base(adapter).filter(|named| !export::is_base(named, base));
        match (error, named) {
            (Error::Adapter { path, message, .. }, Some(named)) => {
                let message = format!(
                    "the adapter was made for `{named}`, and `--model` is `{}`: {message}",
                    self.model
                );
                Error::adapter(
                    path,
                    message,
                    format!("set `--model {named}`, or name an adapter of this model"),
                )
            }
            (error, _) => error,
        }
    }

    fn load(&self, base: &Path, adapter: Option<&Path>) -> Result<Decoder> {
        let spec = DeviceSpec::parse(&self.device).map_err(|problem| Error::Config(vec![problem]))?;
        let selected = device::select(&spec)?;
        if let Some(warning) = &selected.warning {
            tracing::warn!("{warning}");
        }
        let dtype = device::compute_dtype(&selected, &self.dtype)?;
        let mut model = Decoder::load(base, dtype, &selected.device, &mut |_, _| {})?;
        if let Some(adapter) = adapter {
            let found = export::load_adapter(&mut model, 0, adapter);
            let found = found.map_err(|error| self.about_base(error, base, adapter))?;
            found.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        }
        Ok(model)
    }
}

/// That a limit of the command line doesn't hold, and what mends it; nothing where all do.
type Fault = Option<(String, &'static str)>;

/// Whether someone still reads.
fn say(text: &str) -> Result<bool> {
    let mut out = io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(Error::io("standard output", "write", e)),
        Ok(()) => Ok(true),
    }
}

/// A model that is ready to answer.
struct Talker {
    model: Decoder,
    speaker: Speaker,
    json: bool,
    /// Where the model and its adapter lie.
    from: (PathBuf, Option<PathBuf>),
}

impl Talker {
    /// Prints the answers in the order of the prompts, as they come.
    fn answer(&self, prompts: &[Prompt]) -> Result<()> {
        let mut ids = Vec::with_capacity(prompts.len());
        for (n, prompt) in prompts.iter().enumerate() {
            let own = self.encode(prompt)?;
            ids.push(own.map_err(|what| {
                Error::train(format!("prompt {} {what}", n + 1), "shorten it, or lower `--max-new-tokens`")
            })?);
        }
        let mut page = Page::new(prompts, self.json);
        let mut failed = None;
        let mut heard = |n: usize, heard: Heard<'_>| match say(&page.next(n, heard)) {
            Ok(goes_on) => goes_on,
            Err(error) => {
                failed = Some(error);
                false
            }
        };
        let (_, pace) = self.ask(&ids, &mut heard)?;
        tracing::info!("{}", speed(&pace));
        failed.map_or(Ok(()), Err)
    }

    fn ask(
        &self,
        prompts: &[Vec<u32>],
        heard: &mut dyn FnMut(usize, Heard<'_>) -> bool,
    ) -> Result<(Vec<Answer>, Pace)> {
        let answered = self.speaker.answer(&self.model, 0, prompts, heard);
        answered.map_err(|error| match error {
            Error::NotANumber { .. } => Error::NotANumber { of: self.broken().display().to_string() },
            error => error,
        })
    }

    /// Whose weights are to blame for an output that isn't a number.
    fn broken(&self) -> &Path {
        let is_number = |values: Tensor<1>| {
            values.cast(DType::F32).into_data().iter::<f32>().all(|value| value.is_finite())
        };
        match &self.from.1 {
            Some(adapter) if !self.model.trainable_values().into_iter().all(is_number) => adapter,
            _ => &self.from.0,
        }
    }

    fn encode(&self, prompt: &Prompt) -> Result<std::result::Result<Vec<u32>, String>> {
        self.speaker.encode(prompt, self.model.config().max_position_embeddings)
    }

    /// A conversation; each line is a turn.
    fn talk(&self, system: Option<&str>, begun: &[String]) -> Result<()> {
        let start = Conversation {
            messages: system.iter().map(|text| Conversation::turn("system", text)).collect(),
            ..Conversation::default()
        };
        let mut conversation = start.clone();
        let terminal = io::stdin().is_terminal();
        if terminal {
            tracing::info!("a line is a turn; /reset begins anew, /exit or Ctrl-D ends");
        }
        let typed = std::iter::from_fn(|| next_line(terminal).transpose());
        for line in begun.iter().cloned().map(Ok).chain(typed) {
            match line?.trim() {
                "" => {}
                "/reset" => {
                    conversation = start.clone();
                    tracing::info!("a new conversation");
                }
                "/exit" | "/quit" => return Ok(()),
                line => {
                    if !self.turn(&mut conversation, line)? {
                        return Ok(());
                    }
                }
            }
        }
        // Behind the prompt that Ctrl-D was pressed at.
        if terminal { say("\n").map(drop) } else { Ok(()) }
    }

    /// Asks, and takes question and answer into the conversation; whether someone still reads.
    fn turn(&self, conversation: &mut Conversation, line: &str) -> Result<bool> {
        let mut asked = conversation.clone();
        asked.messages.push(Conversation::turn("user", line));
        let ids = match self.encode(&Prompt::Chat(asked.clone()))? {
            Ok(ids) => ids,
            Err(what) => {
                tracing::warn!("the conversation {what}: `/reset` begins anew, `--max-new-tokens` lowers it");
                return Ok(true);
            }
        };
        let (mut failed, mut read) = (None, true);
        let mut heard = |_: usize, heard: Heard<'_>| {
            let text = match heard {
                Heard::Text(text) => text,
                Heard::End(_) => "\n",
            };
            match say(text) {
                Ok(goes_on) => read = goes_on,
                Err(error) => failed = Some(error),
            }
            read && failed.is_none()
        };
        let (answers, _) = self.ask(&[ids], &mut heard)?;
        if let Some(error) = failed {
            return Err(error);
        }
        let said = answers.first().map_or("", |answer| answer.text.as_str());
        asked.messages.push(Conversation::turn("assistant", said));
        *conversation = asked;
        Ok(read)
    }
}

/// A line of the standard input; on a terminal, asked for.
fn next_line(terminal: bool) -> Result<Option<String>> {
    if terminal && !say("> ")? {
        return Ok(None);
    }
    let mut line = String::new();
    let read = io::stdin().lock().read_line(&mut line).map_err(|e| Error::io("standard input", "read", e))?;
    Ok((read > 0).then_some(line))
}

/// Answers in the order of their prompts: the one whose turn it is appears as it comes, the others wait.
struct Page<'a> {
    prompts: &'a [Prompt],
    json: bool,
    /// The prompt whose answer is being shown.
    turn: usize,
    /// What there is to say of each, and whether that was all.
    waiting: Vec<(String, bool)>,
}

impl<'a> Page<'a> {
    fn new(prompts: &'a [Prompt], json: bool) -> Self {
        let heading = |(n, prompt): (usize, &Prompt)| match prompts.len() {
            2.. if !json => format!("{}> {}\n", if n > 0 { "\n" } else { "" }, prompt.shown()),
            _ => String::new(),
        };
        let waiting = prompts.iter().enumerate().map(|prompt| (heading(prompt), false)).collect();
        Self { prompts, json, turn: 0, waiting }
    }

    /// What can be said now.
    fn next(&mut self, n: usize, heard: Heard<'_>) -> String {
        let (text, ends) = match heard {
            Heard::Text(_) if self.json => return String::new(),
            Heard::Text(text) => (text.to_string(), false),
            Heard::End(answer) => (if self.json { self.row(n, answer) } else { "\n".into() }, true),
        };
        self.waiting[n].0.push_str(&text);
        self.waiting[n].1 = ends;
        let mut said = String::new();
        while let Some((text, ended)) = self.waiting.get_mut(self.turn) {
            said.push_str(&std::mem::take(text));
            if !*ended {
                break;
            }
            self.turn += 1;
        }
        said
    }

    fn row(&self, n: usize, answer: &Answer) -> String {
        let row = json!({
            "prompt": self.prompts[n].shown(),
            "text": answer.text,
            "prompt_tokens": answer.prompt_tokens,
            "tokens": answer.tokens,
            "finish_reason": if answer.is_whole { "stop" } else { "length" },
        });
        format!("{row}\n")
    }
}

/// "12 tokens of prompts in 0.10 s, 40 of answers at 35.1 tokens/s"
fn speed(pace: &Pace) -> String {
    let Pace { prompt_tokens, prompt_seconds, tokens, seconds } = *pace;
    let in_a_second = if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
    format!(
        "{prompt_tokens} tokens read in {prompt_seconds:.3} s; then {tokens} written in {seconds:.3} s, {in_a_second:.1} a second"
    )
}
