//! `[sample]`: prompts that the model answers while it trains.

use super::read::Reader;

table! {
    /// Prompts that the model answers while it trains, with the weights of that moment. Training itself stays the same, bit
    /// for bit.
    pub struct SampleConfig {
        /// What is asked, each in a conversation of its own. Has to be given.
        prompts: Vec<String> = vec![];
        /// A system message before each prompt.
        system: Option<String> = None;
        /// Take prompts as they are, without the chat template; so they are where the model has none.
        raw: bool = false;
        /// Steps from one round of answers to the next; there is one after the last step too.
        interval: usize = 50, 1..;
        /// Answer before the first step too.
        sample_on_start: bool = false;
        /// Most tokens of an answer.
        max_tokens: usize = 64, 1..;
        /// 0 takes the most likely token each time; else logits are divided by it before one is drawn.
        temperature: f64 = 0.0, 0.0..;
        /// Draw from the most likely tokens that have this much of the probability together.
        top_p: f64 = 1.0, 0.0..=1.0;
        /// Draw from so many of the most likely tokens; `None`: from all.
        top_k: Option<usize> = None, 1..;
        /// Of the drawing: the same in each round.
        seed: u64 = 0;
    }
}

/// What doesn't hold is noted.
pub(super) fn rules(sample: &SampleConfig, reader: &mut Reader) {
    let empty = sample.prompts.iter().position(|prompt| prompt.is_empty());
    reader.rule(
        !sample.prompts.is_empty() && empty.is_none(),
        &["sample.prompts", "sample"],
        || match empty {
            Some(n) => format!("`sample.prompts` has an empty prompt, number {}", n + 1),
            None => "`[sample]` is on, but `sample.prompts` is empty".into(),
        },
        "name what the model is to answer, `prompts = [\"What is a tide?\"]`, or set `sample = \"None\"`",
    );
    reader.rule(
        sample.system.is_none() || !sample.raw,
        &["sample.system", "sample.raw"],
        || "`sample.system` has no place: `sample.raw` leaves prompts as they are".into(),
        "leave one of the two out",
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
