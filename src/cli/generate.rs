//! `embertune generate`: answers of a model, with an adapter or without, to prompts or in a conversation.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::PathBuf;

use burn::tensor::DType;
use clap::Args;
use serde_json::{Map, Value};
use tracing::Level;

use crate::checkpoint::find_adapter;
use crate::config::{DeviceSpec, TokenizerConfig};
use crate::data::{ChatTokenizer, Conversation};
use crate::model::{Decoder, Sampling};
use crate::report::{LineFormat, log};
use crate::{Error, Result, device, export, hub};

/// What answers, and how.
#[derive(Debug, Args)]
pub(super) struct GenerateArgs {
    /// A Hugging Face folder or hub id.
    #[arg(long, value_name = "MODEL")]
    model: String,
    /// Folder of a PEFT adapter, or of a run.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// A system message before each prompt.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Take prompts as they are, without the chat template.
    #[arg(long)]
    raw: bool,
    /// Most tokens of an answer.
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// 0 takes the most likely token each time.
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Draw from the most likely tokens that have this much of the probability together.
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Draw from so many of the most likely tokens.
    #[arg(long)]
    top_k: Option<usize>,
    /// Of the drawing.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// As the key `device`.
    #[arg(long, default_value = "auto")]
    device: String,
    /// As the key `model.dtype`.
    #[arg(long, default_value = "auto")]
    dtype: String,
    /// What is asked; without any, a conversation begins, a line a turn.
    #[arg(value_name = "PROMPT")]
    prompts: Vec<String>,
}

/// A model that is ready to answer.
struct Speaker {
    model: Decoder,
    tokenizer: ChatTokenizer,
    sampling: Sampling,
    raw: bool,
}

/// Answers the prompts, or talks.
///
/// # Errors
/// What can't be loaded; a prompt that is too long.
pub(super) fn run(args: &GenerateArgs) -> Result<()> {
    log::init(Level::INFO, LineFormat::Text, None);
    let good =
        args.temperature >= 0.0 && args.temperature.is_finite() && args.top_p > 0.0 && args.top_p <= 1.0;
    if !good {
        let message = format!("`--temperature` is {}, `--top-p` is {}", args.temperature, args.top_p);
        let hint = "a temperature is 0 or more, `--top-p` above 0 and at most 1".into();
        return Err(Error::Usage { message, hint });
    }
    let speaker = Speaker::load(args)?;
    let start: Vec<_> = args.system.iter().map(|text| message("system", text)).collect();
    if args.prompts.is_empty() {
        return speaker.talk(start);
    }
    for (n, prompt) in args.prompts.iter().enumerate() {
        if args.prompts.len() > 1 {
            say(&format!("{}> {prompt}\n", if n > 0 { "\n" } else { "" }))?;
        }
        let mut messages = start.clone();
        messages.push(message("user", prompt));
        speaker.answer(prompt, &messages)?;
    }
    Ok(())
}

fn message(role: &str, text: &str) -> Map<String, Value> {
    let pairs = [("role", role), ("content", text)];
    pairs.into_iter().map(|(key, value)| (key.to_string(), value.into())).collect()
}

fn say(text: &str) -> Result<()> {
    let mut out = io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(Error::io("standard output", "write", e)),
        _ => Ok(()),
    }
}

impl Speaker {
    fn load(args: &GenerateArgs) -> Result<Self> {
        let base = hub::model_dir(&args.model)?;
        let spec = DeviceSpec::parse(&args.device).map_err(|problem| Error::Config(vec![problem]))?;
        let selected = device::select(&spec)?;
        if let Some(warning) = &selected.warning {
            tracing::warn!("{warning}");
        }
        let dtype: DType = device::compute_dtype(&selected, &args.dtype)?;
        let mut model = Decoder::load(&base, dtype, &selected.device, &mut |_, _| {})?;
        if let Some(adapter) = &args.adapter {
            let found = export::load_adapter(&mut model, 0, &find_adapter(adapter)?)?;
            found.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        }
        let tokenizer = ChatTokenizer::load(&base, &TokenizerConfig::default())?;
        let sampling = Sampling {
            max_tokens: args.max_tokens,
            temperature: args.temperature,
            top_p: args.top_p,
            top_k: args.top_k,
            seed: args.seed,
            stop: tokenizer.stop_ids(),
        };
        let raw = args.raw || !tokenizer.has_chat_template();
        Ok(Self { model, tokenizer, sampling, raw })
    }

    /// Prints the answer as it comes, and returns it.
    fn answer(&self, prompt: &str, messages: &[Map<String, Value>]) -> Result<String> {
        let ids = if self.raw {
            self.tokenizer.encode_text(prompt)?
        } else {
            let conversation = Conversation { messages: messages.to_vec(), ..Conversation::default() };
            self.tokenizer.encode_prompt(&conversation)?
        };
        let (mut written, mut shown, mut failed) = (Vec::new(), 0, None);
        let mut told = |_: usize, id: u32| {
            written.push(id);
            let text = self.tokenizer.decode(&written, true).unwrap_or_default();
            // The rest of a character may still come.
            if text.len() > shown && !text.ends_with('\u{fffd}') && failed.is_none() {
                failed = say(&text[shown..]).err();
                shown = text.len();
            }
            true
        };
        self.model.generate(&[ids], 0, &self.sampling, &mut told)?;
        if let Some(error) = failed {
            return Err(error);
        }
        let text = self.tokenizer.decode(&written, true)?;
        say(&format!("{}\n", text.get(shown..).unwrap_or_default()))?;
        Ok(text)
    }

    /// A conversation: a line is a turn, an empty one or the end of the input ends it.
    fn talk(&self, mut messages: Vec<Map<String, Value>>) -> Result<()> {
        let terminal = io::stdin().is_terminal();
        let mut lines = io::stdin().lock().lines();
        loop {
            if terminal {
                say("> ")?;
            }
            let Some(line) = lines.next() else { return Ok(()) };
            let line = line.map_err(|e| Error::io("standard input", "read", e))?;
            if line.trim().is_empty() {
                return Ok(());
            }
            messages.push(message("user", &line));
            let answer = self.answer(&line, &messages)?;
            messages.push(message("assistant", &answer));
        }
    }
}
