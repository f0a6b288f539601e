//! `[sample]`: prompts that the model answers while it trains.

use std::path::PathBuf;

use super::read::Reader;

table! {
    /// Prompts that the model answers while it trains, with the weights of that moment. Training itself stays the same, bit
    /// for bit.
    pub struct SampleConfig {
        /// What is asked, each in a conversation of its own.
        prompts: Vec<String> = vec![];
        /// A file of more of them: `.txt` with a prompt a line, or rows in any form that `data` takes (`messages`, `prompt`,
        /// …), whose last answer is left out. One of the two has to be given.
        file: Option<PathBuf> = None;
        /// A system message before each prompt that has none.
        system: Option<String> = None;
        /// Further variables for the chat template, as JSON: `{"enable_thinking": false}`.
        chat_template_kwargs: Option<String> = None;
        /// Take prompts as they are, without the chat template; so they are where the model has none.
        raw: bool = false;
        /// Steps from one round of answers to the next; there is one after the last step too.
        interval: usize = 50, 1..;
        /// Answer before the first step too.
        sample_on_start: bool = false;
        /// Prompts that are answered at once.
        batch_size: usize = 8, 1..;
        /// Most tokens of an answer.
        max_new_tokens: usize = 64, 1..;
        /// 0 takes the most likely token each time; else logits are divided by it before one is drawn.
        temperature: f64 = 0.0, 0.0..;
        /// Draw from the most likely tokens that have this much of the probability together.
        top_p: f64 = 1.0, 0.0..=1.0;
        /// Draw from so many of the most likely tokens; `None`: from all.
        top_k: Option<usize> = None, 1..;
        /// Texts or tokens that end an answer and are no part of it, beside the model's own end tokens.
        stop: Vec<String> = vec![];
        /// Of the drawing: the same in each round.
        seed: u64 = 0;
    }
}

/// What doesn't hold is noted.
pub(super) fn rules(sample: &SampleConfig, reader: &mut Reader) {
    let empty = sample.prompts.iter().position(|prompt| prompt.is_empty());
    reader.rule(
        (!sample.prompts.is_empty() || sample.file.is_some()) && empty.is_none(),
        &["sample.prompts", "sample.file", "sample"],
        || match empty {
            Some(n) => format!("`sample.prompts` has an empty prompt, number {}", n + 1),
            None => "`[sample]` is on, but neither `sample.prompts` nor `sample.file` is given".into(),
        },
        "name what the model is to answer, `prompts = [\"What is a tide?\"]`, or set `sample = \"None\"`",
    );
    let of_template = [
        ("system", sample.system.is_some()),
        ("chat_template_kwargs", sample.chat_template_kwargs.is_some()),
    ];
    let vain = of_template.into_iter().find(|(_, given)| *given && sample.raw);
    reader.rule(
        vain.is_none(),
        &["sample.raw"],
        || {
            let key = vain.map_or("", |(key, _)| key);
            format!("`sample.{key}` has no place: `sample.raw` leaves prompts as they are")
        },
        "leave one of the two out",
    );
    reader.rule(
        sample.stop.iter().all(|text| !text.is_empty()),
        &["sample.stop"],
        || "`sample.stop` has an empty text, at which every answer would end".into(),
        "leave it out",
    );
    reader.rule(
        sample.top_p > 0.0,
        &["sample.top_p"],
        || "`sample.top_p` is 0, which leaves nothing to draw from".into(),
        "`sample.temperature = 0.0` takes the most likely token",
    );
    let limited = sample.top_p < 1.0 || sample.top_k.is_some();
    reader.rule(
        sample.temperature > 0.0 || !limited,
        &["sample.temperature", "sample.top_p", "sample.top_k"],
        || {
            "`sample.top_p` and `sample.top_k` limit what is drawn, but `sample.temperature` is 0: nothing is drawn"
                .into()
        },
        "set `sample.temperature = 0.7`, or leave them out",
    );
}
