//! `[sample]`: prompts that are answered while a run trains, with the weights of that moment.
//!
//! Nothing that training depends on is touched. Among several ranks rank 0 answers: each has all weights, and the others
//! go on and wait at their next sum.

use std::sync::Arc;

use super::ranks::Ranks;
use super::step::with_memory;
use crate::config::SftConfig;
use crate::data::{ChatTokenizer, Conversation};
use crate::error::Problem;
use crate::model::{Decoder, Sampling};
use crate::report::{Event, Report};
use crate::{Error, Result};

/// The prompts of a run, ready to be asked.
pub(super) struct Samples {
    prompts: Vec<String>,
    ids: Vec<Vec<u32>>,
    sampling: Sampling,
    interval: usize,
    /// Whether they are asked before the first step.
    pub on_start: bool,
    tokenizer: Arc<ChatTokenizer>,
}

impl Samples {
    /// The prompts as the model takes them; `None` without `[sample]`. `positions`: the model's.
    ///
    /// # Errors
    /// A prompt that the chat template doesn't take, or that is too long for the model.
    pub fn prepare(
        config: &SftConfig,
        tokenizer: Option<&Arc<ChatTokenizer>>,
        positions: usize,
    ) -> Result<Option<Self>> {
        let (Some(sample), Some(tokenizer)) = (&config.sample, tokenizer) else { return Ok(None) };
        let sampling = Sampling {
            max_tokens: sample.max_tokens,
            temperature: sample.temperature,
            top_p: sample.top_p,
            top_k: sample.top_k,
            seed: sample.seed,
            stop: tokenizer.stop_ids(),
        };
        let raw = sample.raw || !tokenizer.has_chat_template();
        let mut ids = Vec::with_capacity(sample.prompts.len());
        for (n, prompt) in sample.prompts.iter().enumerate() {
            let own = match raw {
                true => tokenizer.encode_text(prompt)?,
                false => tokenizer.encode_prompt(&Conversation::asking(sample.system.as_deref(), prompt))?,
            };
            sampling.check(own.len(), positions).map_err(|(what, _)| {
                Error::Config(vec![Problem {
                    place: String::new(),
                    message: format!("prompt {} of `sample.prompts` {what}", n + 1),
                    hint: "shorten it, or lower `sample.max_tokens`".into(),
                }])
            })?;
            ids.push(own);
        }
        Ok(Some(Self {
            prompts: sample.prompts.clone(),
            ids,
            sampling,
            interval: sample.interval,
            on_start: sample.sample_on_start,
            tokenizer: tokenizer.clone(),
        }))
    }

    /// Whether they are asked after so many steps.
    pub fn is_due(&self, step: usize, last: usize) -> bool {
        step.is_multiple_of(self.interval) || step == last
    }

    /// Asks, and tells of the answers of run number `run`.
    ///
    /// # Errors
    /// Too little memory.
    pub fn ask(
        &self,
        model: &Decoder,
        run: usize,
        step: usize,
        ranks: &Ranks,
        report: &mut dyn Report,
    ) -> Result<()> {
        if !ranks.is_first() {
            return Ok(());
        }
        let hint = "ask fewer prompts in `sample.prompts`, or lower `sample.max_tokens`";
        let answers = with_memory(hint, || model.generate(&self.ids, run, &self.sampling, &mut |_, _| true))?;
        for (prompt, answer) in self.prompts.iter().zip(answers) {
            let text = self.tokenizer.decode(&answer, true)?;
            report.event(&Event::Sample { run: None, step, prompt: prompt.clone(), text });
        }
        Ok(())
    }
}
