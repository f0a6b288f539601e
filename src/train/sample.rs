//! `[sample]`: prompts that are answered while a run trains, with the weights of that moment.
//!
//! Nothing that training depends on is touched. Among several ranks rank 0 answers: each has all weights, and the others
//! go on and wait at their next sum.

use std::sync::Arc;

use super::ranks::Ranks;
use super::step::with_memory;
use crate::config::SftConfig;
use crate::data::{ChatTokenizer, Prompt};
use crate::error::Problem;
use crate::model::{Decoder, Speaker};
use crate::report::{Event, Report};
use crate::{Error, Result};

/// The prompts of a run, ready to be asked.
pub(super) struct Samples {
    speaker: Speaker,
    prompts: Vec<Prompt>,
    ids: Vec<Vec<u32>>,
    interval: usize,
    /// Whether they are asked before the first step.
    pub on_start: bool,
}

impl Samples {
    /// The prompts as the model takes them; `None` without `[sample]`. `positions`: the model's.
    ///
    /// # Errors
    /// A prompt that can't be read, that the chat template doesn't take, or that is too long for the model.
    pub fn prepare(
        config: &SftConfig,
        tokenizer: Option<&Arc<ChatTokenizer>>,
        positions: usize,
    ) -> Result<Option<Self>> {
        let (Some(sample), Some(tokenizer)) = (&config.sample, tokenizer) else { return Ok(None) };
        let speaker = Speaker::new(sample, tokenizer.clone())?;
        let prompts = Prompt::all(sample)?;
        let mut ids = Vec::with_capacity(prompts.len());
        for (n, prompt) in prompts.iter().enumerate() {
            let own = speaker.encode(prompt, positions)?;
            ids.push(own.map_err(|what| {
                Error::Config(vec![Problem {
                    place: String::new(),
                    message: format!("prompt {} of `[sample]` {what}", n + 1),
                    hint: "shorten it, or lower `sample.max_new_tokens`".into(),
                }])
            })?);
        }
        let (interval, on_start) = (sample.interval, sample.sample_on_start);
        Ok(Some(Self { speaker, prompts, ids, interval, on_start }))
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
        let hint = "lower `sample.batch_size` or `sample.max_new_tokens`";
        let answers = with_memory(hint, || self.speaker.answer(model, run, &self.ids, &mut |_, _| true));
        let answers = match answers {
            Ok((answers, _)) => answers,
            // Whether the run goes on is for its loss to say.
            Err(error @ Error::NotANumber { .. }) => {
                report
                    .event(&Event::Warning(format!("`[sample]` after step {step} has no answers: {error}")));
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        for (prompt, answer) in self.prompts.iter().zip(answers) {
            let prompt = prompt.shown().to_string();
            report.event(&Event::Sample { run: None, step, prompt, text: answer.text });
        }
        Ok(())
    }
}
