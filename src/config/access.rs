//! What other modules ask a configuration, beside its fields.

use super::reference::{FlagKey, Reference};
use super::{ColumnsConfig, DataConfig, Difference, SchedulerConfig, SftConfig, load, write};

impl SftConfig {
    /// Reads a whole configuration from TOML text; `name` is what messages call it.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with everything that is wrong.
    pub fn from_toml(text: &str, name: &str) -> crate::Result<Self> {
        load::from_toml(text, name)
    }

    /// Every key with its value, as a file that reads back equal.
    pub fn to_toml(&self) -> String {
        toml::to_string(&write::table_value(self)).expect("keys are strings, values plain")
    }

    /// The keys that aren't at their defaults.
    pub fn differences(&self) -> Vec<Difference> {
        let mut out = Vec::new();
        write::table_differences(self, "", &mut out);
        out
    }
}

impl DataConfig {
    /// Packed rows per optimizer step, over all ranks.
    pub fn batch_size(&self) -> usize {
        match self {
            DataConfig::Sft(data) => data.batch_size,
            DataConfig::Fake(data) => data.batch_size,
        }
    }

    /// Packed rows that go through the model at once.
    pub fn micro_batch_size(&self) -> usize {
        match self {
            DataConfig::Sft(data) => data.micro_batch_size,
            DataConfig::Fake(data) => data.micro_batch_size,
        }
    }

    /// Tokens in a packed row.
    pub fn seq_len(&self) -> usize {
        match self {
            DataConfig::Sft(data) => data.seq_len,
            DataConfig::Fake(data) => data.seq_len,
        }
    }
}

impl SchedulerConfig {
    /// Steps of warmup.
    pub fn warmup_steps(&self) -> usize {
        match *self {
            SchedulerConfig::Constant => 0,
            SchedulerConfig::Linear { warmup_steps, .. } | SchedulerConfig::Cosine { warmup_steps, .. } => {
                warmup_steps
            }
        }
    }

    /// Steps of decay that are set by the file (a cosine takes what is left of the run).
    pub fn decay_steps(&self) -> usize {
        if let SchedulerConfig::Linear { decay_steps, .. } = *self { decay_steps } else { 0 }
    }

    /// The lowest learning rate.
    pub fn min_lr(&self) -> f64 {
        match *self {
            SchedulerConfig::Constant => 0.0,
            SchedulerConfig::Linear { min_lr, .. } | SchedulerConfig::Cosine { min_lr, .. } => min_lr,
        }
    }
}

impl ColumnsConfig {
    /// Each key, and what the file calls that column.
    pub fn names(&self) -> Vec<(String, String)> {
        let toml::Value::Table(table) = write::table_value(self) else { return Vec::new() };
        table.into_iter().filter_map(|(key, column)| Some((key, column.as_str()?.to_string()))).collect()
    }

    /// Those that have a name of their own.
    pub fn renamed(&self) -> Vec<(String, String)> {
        self.names().into_iter().filter(|(key, column)| key != column).collect()
    }
}

/// Whether the key at `path` takes text, or a list of texts.
pub(crate) fn takes_text(path: &str) -> bool {
    Reference::new().takes_text(path)
}

/// The reference of all keys, as in `docs/config.md`.
pub fn reference() -> String {
    Reference::new().markdown()
}

/// The reference of all keys as flags, for `--help`.
pub fn help() -> String {
    Reference::new().flags()
}

/// All keys as flags, for completions and the man page.
pub(crate) fn keys() -> Vec<FlagKey> {
    Reference::new().keys()
}
