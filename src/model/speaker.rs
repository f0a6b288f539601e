//! Prompts in, answers out: [`Decoder::generate`] with a tokenizer around it, for people.

use std::sync::Arc;
use std::time::Instant;

use serde_json::{Map, Value};

use super::{Decoder, Sampling};
use crate::config::SampleConfig;
use crate::data::{ChatTokenizer, Prompt, template_variables};
use crate::error::Result;

/// How prompts become answers.
pub struct Speaker {
    tokenizer: Arc<ChatTokenizer>,
    sampling: Sampling,
    /// Texts that end an answer and are no token.
    stop: Vec<String>,
    system: Option<String>,
    variables: Map<String, Value>,
    raw: bool,
    batch_size: usize,
}

/// What became of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Answer {
    /// What was said.
    pub text: String,
    /// Tokens of the prompt, the chat template's included.
    pub prompt_tokens: usize,
    /// Tokens of the answer.
    pub tokens: usize,
    /// Whether it came to its end, or else to the limit of tokens.
    pub is_whole: bool,
}

/// How fast it went.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Pace {
    /// Tokens of prompts.
    pub prompt_tokens: usize,
    /// Seconds until each had its first token.
    pub prompt_seconds: f64,
    /// Tokens after the first of each answer.
    pub tokens: usize,
    /// Seconds that they took.
    pub seconds: f64,
}

/// What is heard while answers come.
#[derive(Debug, Clone, Copy)]
pub enum Heard<'a> {
    /// More of the text, whole characters.
    Text(&'a str),
    /// The end of it.
    End(&'a Answer),
}

impl Speaker {
    /// One that speaks as `config` says; `config.prompts` and `config.file` are the caller's.
    ///
    /// # Errors
    /// Variables for the chat template that aren't an object in JSON.
    pub fn new(config: &SampleConfig, tokenizer: Arc<ChatTokenizer>) -> Result<Self> {
        let variables = config.chat_template_kwargs.as_deref().map(template_variables).transpose()?;
        let mut ids = tokenizer.stop_ids();
        let as_token = |text: &String| tokenizer.token_id(text);
        ids.extend(config.stop.iter().filter_map(as_token));
        let sampling = Sampling {
            max_tokens: config.max_new_tokens,
            temperature: config.temperature,
            top_p: config.top_p,
            top_k: config.top_k,
            seed: config.seed,
            stream: 0,
            stop: ids,
        };
        Ok(Self {
            sampling,
            stop: config.stop.clone(),
            system: config.system.clone(),
            variables: variables.unwrap_or_default(),
            raw: config.raw || !tokenizer.has_chat_template(),
            batch_size: config.batch_size.max(1),
            tokenizer,
        })
    }

    /// Whether prompts go to the model as they are.
    pub fn is_raw(&self) -> bool {
        self.raw
    }

    /// The ids of a prompt, for a model with so many positions.
    ///
    /// # Errors
    /// The chat template doesn't take it; else what is wrong with its length, and a remedy.
    pub fn encode(&self, prompt: &Prompt, positions: usize) -> Result<std::result::Result<Vec<u32>, String>> {
        let ids = match prompt {
            Prompt::Text(text) if self.raw => self.tokenizer.encode_start(text)?,
            _ => {
                self.tokenizer.encode_prompt(&prompt.conversation(self.system.as_deref(), &self.variables))?
            }
        };
        Ok(self.sampling.check(ids.len(), positions).map(|()| ids))
    }

    /// Answers prompts, some at a time, with the adapters of `run`. `heard` hears of each prompt, by its number, and says
    /// whether to go on at all.
    ///
    /// # Errors
    /// As [`Decoder::generate`]; what can't be decoded.
    pub fn answer(
        &self,
        model: &Decoder,
        run: usize,
        prompts: &[Vec<u32>],
        heard: &mut dyn FnMut(usize, Heard<'_>) -> bool,
    ) -> Result<(Vec<Answer>, Pace)> {
        let (mut answers, mut pace) = (Vec::with_capacity(prompts.len()), Pace::default());
        let mut goes_on = true;
        for (batch, prompts) in prompts.chunks(self.batch_size).enumerate() {
            let first = batch * self.batch_size;
            let sampling = Sampling { stream: first as u64, ..self.sampling.clone() };
            let mut texts: Vec<Text<'_>> =
                prompts.iter().map(|prompt| Text::new(self, prompt.len())).collect();
            let (begun, mut speaking, mut failed) = (Instant::now(), None, None);
            let mut told = |n: usize, token: Option<u32>| {
                speaking.get_or_insert_with(|| begun.elapsed().as_secs_f64());
                let text = &mut texts[n];
                let taken = token.map_or(Ok(()), |id| text.take(id));
                failed = failed.take().or(taken.err());
                if token.is_none() || text.answer.is_whole || text.answer.tokens == sampling.max_tokens {
                    text.end(token.is_none());
                    goes_on &=
                        text.tell(n + first, true, heard) && heard(n + first, Heard::End(&text.answer));
                    return false;
                }
                goes_on &= failed.is_none() && text.tell(n + first, false, heard);
                goes_on
            };
            model.generate(prompts, run, &sampling, &mut told)?;
            if let Some(error) = failed {
                return Err(error);
            }
            pace.add(&texts, begun.elapsed().as_secs_f64(), speaking.unwrap_or_default());
            answers.extend(texts.into_iter().map(|text| text.answer));
            if !goes_on {
                break;
            }
        }
        Ok((answers, pace))
    }
}

impl Pace {
    fn add(&mut self, texts: &[Text<'_>], seconds: f64, of_prompts: f64) {
        for Text { answer, .. } in texts {
            self.prompt_tokens += answer.prompt_tokens;
            self.tokens += answer.tokens.saturating_sub(1);
        }
        self.prompt_seconds += of_prompts;
        self.seconds += seconds - of_prompts;
    }
}

/// An answer as its tokens come.
struct Text<'a> {
    speaker: &'a Speaker,
    answer: Answer,
    ids: Vec<u32>,
    /// Where the ids begin that are decoded together, and those whose text isn't there yet: what an id says may depend on
    /// those before it, but not on all of them.
    window: [usize; 2],
    /// Bytes that were told.
    told: usize,
}

impl<'a> Text<'a> {
    fn new(speaker: &'a Speaker, prompt_tokens: usize) -> Self {
        let answer = Answer { prompt_tokens, ..Answer::default() };
        Self { speaker, answer, ids: Vec::new(), window: [0; 2], told: 0 }
    }

    /// Takes a token; the answer is whole where a stop text is in it.
    fn take(&mut self, id: u32) -> Result<()> {
        self.ids.push(id);
        self.answer.tokens += 1;
        let more = self.fresh()?;
        // The rest of a character may still come.
        if !more.is_empty() && !more.ends_with('\u{fffd}') {
            self.window = [self.window[1], self.ids.len()];
            self.add(&more);
        }
        Ok(())
    }

    /// The text of the ids that have none yet.
    fn fresh(&self) -> Result<String> {
        let [from, to] = self.window;
        let decode = |ids| self.speaker.tokenizer.decode(ids, true);
        let (before, mut all) = (decode(&self.ids[from..to])?, decode(&self.ids[from..])?);
        Ok(if all.starts_with(&before) { all.split_off(before.len()) } else { all })
    }

    fn add(&mut self, more: &str) {
        let Answer { text, is_whole, .. } = &mut self.answer;
        let stop = &self.speaker.stop;
        let longest = stop.iter().map(String::len).max().unwrap_or(0);
        let mut from = text.len().saturating_sub(longest);
        while !text.is_char_boundary(from) {
            from -= 1;
        }
        text.push_str(more);
        let found = stop.iter().filter_map(|stop| text[from..].find(stop.as_str())).min();
        if let Some(at) = found {
            text.truncate(from + at);
            *is_whole = true;
        }
    }

    /// No more tokens come.
    fn end(&mut self, is_whole: bool) {
        if !self.answer.is_whole {
            let rest = self.fresh().unwrap_or_default();
            self.window = [self.ids.len(); 2];
            self.add(&rest);
        }
        self.answer.is_whole |= is_whole;
    }

    /// Tells what is new, but for what may be the beginning of a stop text.
    fn tell(&mut self, number: usize, ended: bool, heard: &mut dyn FnMut(usize, Heard<'_>) -> bool) -> bool {
        let text = &self.answer.text;
        let open = |stop: &String| (1..stop.len()).rev().find(|&n| ends_with(text, &stop.as_bytes()[..n]));
        let held = if ended { 0 } else { self.speaker.stop.iter().filter_map(open).max().unwrap_or(0) };
        let end = (text.len() - held).max(self.told);
        let more = std::mem::replace(&mut self.told, end)..end;
        more.is_empty() || heard(number, Heard::Text(&text[more]))
    }
}

fn ends_with(text: &str, bytes: &[u8]) -> bool {
    text.as_bytes().ends_with(bytes)
}
