//! The crate's one error type: what was found, what is wanted, and a hint that mends it.
//!
//! Text is lower case without a period, backticks round keys and paths. What a user can cause is
//! an `Err`, before the first kernel; what only we can cause is an assert.

use std::fmt;
use std::path::{Path, PathBuf};

/// `std::result::Result` with the crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// One thing that is wrong with a configuration, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// `file.toml:12`, `--optim.lr`, or empty for rules between keys.
    pub place: String,
    /// What was found and what is wanted.
    pub message: String,
    /// The key or command that mends it; empty when the message says it all.
    pub hint: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.place.is_empty() {
            write!(f, "{}: ", self.place)?;
        }
        f.write_str(&self.message)?;
        if !self.hint.is_empty() {
            write!(f, "\n    hint: {}", self.hint)?;
        }
        Ok(())
    }
}

/// Everything that can go wrong and is not a bug of ours.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration does not hold; every problem found, in file order.
    #[error("the configuration has {} problem{}\n{}", .0.len(), if .0.len() == 1 { "" } else { "s" }, lines(.0))]
    Config(Vec<Problem>),
    /// The command line could not be understood.
    #[error("{message}")]
    Usage {
        /// What was found and what is wanted.
        message: String,
        /// How to mend it.
        hint: String,
    },
    /// A data file or row.
    #[error("{}{}: {message}", .path.display(), row.map(|r| format!(":{r}")).unwrap_or_default())]
    Data {
        /// The file.
        path: PathBuf,
        /// The 1-based line (jsonl) or row (parquet).
        row: Option<usize>,
        /// What was found and what is wanted.
        message: String,
        /// How to mend it.
        hint: String,
    },
    /// A model folder: config, weights, tokenizer or chat template.
    #[error("{}: {message}", .path.display())]
    Model {
        /// The file or folder.
        path: PathBuf,
        /// What was found and what is wanted, naming key or tensor.
        message: String,
        /// How to mend it.
        hint: String,
    },
    /// A PEFT adapter folder.
    #[error("{}: {message}", .path.display())]
    Adapter {
        /// The file or folder.
        path: PathBuf,
        /// What was found and what is wanted, naming key or tensor.
        message: String,
        /// How to mend it.
        hint: String,
    },
    /// A checkpoint or run folder.
    #[error("{}: {message}", .path.display())]
    Checkpoint {
        /// The file or folder.
        path: PathBuf,
        /// What was found and what is wanted.
        message: String,
        /// How to mend it.
        hint: String,
    },
    /// A device that is not there or can't do what is asked.
    #[error("{message}")]
    Device {
        /// What was found and what is wanted.
        message: String,
        /// How to mend it.
        hint: String,
    },
    /// The Hugging Face hub, or its local cache.
    #[error("hub: {message}")]
    Hub {
        /// What was asked and what came back.
        message: String,
        /// How to mend it.
        hint: String,
    },
    /// Training itself: a loss that isn't finite, nothing to train on.
    #[error("{message}")]
    Train {
        /// What was found and what is wanted.
        message: String,
        /// How to mend it.
        hint: String,
    },
    /// A model whose output isn't a number.
    #[error("the model's output isn't a number: the weights of {of} hold NaN or inf, or overflow")]
    NotANumber {
        /// Whose weights.
        of: String,
    },
    /// Another of the ranks that train together failed, so this one stops too.
    #[error("rank {rank}: {message}")]
    Rank {
        /// Which.
        rank: usize,
        /// What it said.
        message: String,
        /// How to mend it.
        hint: String,
    },
    /// Several at once, none of which follows from another; each with its hint.
    #[error("{} problems\n{}", .0.len(), lines(.0))]
    Several(Vec<Problem>),
    /// A file could not be read or written.
    #[error("{}: cannot {doing}", .path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// "read", "write", "rename", …
        doing: &'static str,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
    /// The run was interrupted and left a checkpoint (or had none to leave).
    #[error("interrupted {}", if *.step == 0 { "before the first step".into() } else { format!("after step {step}") })]
    Interrupted {
        /// The number of finished updates.
        step: usize,
        /// The checkpoint to resume from, if one was written.
        checkpoint: Option<PathBuf>,
        /// How to go on.
        hint: String,
    },
}

fn lines(problems: &[Problem]) -> String {
    problems.iter().map(|p| format!("  {p}")).collect::<Vec<_>>().join("\n")
}

/// Hints as messages are: lower case and without a period at the end.
fn in_one_style(hint: &str) -> String {
    let hint = hint.strip_suffix('.').filter(|rest| !rest.ends_with('.')).unwrap_or(hint);
    let mut letters = hint.chars();
    match (letters.next(), letters.clone().next()) {
        // Not `HF_HOME` or `A call`.
        (Some(first), Some(second)) if second.is_lowercase() => first.to_lowercase().chain(letters).collect(),
        _ => hint.into(),
    }
}

/// What mends an I/O error, where the system's own words don't say it.
fn io_hint(path: &Path, doing: &str, source: &std::io::Error) -> &'static str {
    use std::io::ErrorKind::{InvalidData, InvalidInput, Other, UnexpectedEof};
    use std::io::ErrorKind::{PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    let is_packed = path.extension().is_some_and(|ending| ending == "gz" || ending == "zst");
    match source.kind() {
        _ if doing == "write" && path == std::env::temp_dir() => {
            "tokens lie there while the run lives: the environment variable `TMPDIR` names another folder"
        }
        StorageFull | QuotaExceeded => "make room on that disk, or name a folder on another one",
        PermissionDenied if doing == "read" => "give yourself the right to read it (`chmod u+r`), or copy it",
        PermissionDenied | ReadOnlyFilesystem => {
            "name a folder that you may write to (a run's is `output_dir`), or change its rights (`chmod u+w`)"
        }
        InvalidData | InvalidInput | UnexpectedEof | Other if doing == "read" && is_packed => {
            "if a download was cut, fetch the file again; if it isn't packed, give it a name without that ending"
        }
        _ => "",
    }
}

impl Error {
    /// An I/O error at `path` while `doing` ("read", "write", …).
    pub fn io(path: impl AsRef<Path>, doing: &'static str, source: std::io::Error) -> Self {
        Error::Io { path: path.as_ref().into(), doing, source }
    }

    /// A [`Error::Data`] at a 1-based row.
    pub fn data(
        path: impl AsRef<Path>,
        row: impl Into<Option<usize>>,
        message: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        Error::Data {
            path: path.as_ref().into(),
            row: row.into(),
            message: message.into(),
            hint: hint.into(),
        }
    }

    /// A [`Error::Model`].
    pub fn model(path: impl AsRef<Path>, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Error::Model { path: path.as_ref().into(), message: message.into(), hint: hint.into() }
    }

    /// A [`Error::Adapter`].
    pub fn adapter(path: impl AsRef<Path>, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Error::Adapter { path: path.as_ref().into(), message: message.into(), hint: hint.into() }
    }

    /// A [`Error::Checkpoint`].
    pub fn checkpoint(path: impl AsRef<Path>, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Error::Checkpoint { path: path.as_ref().into(), message: message.into(), hint: hint.into() }
    }

    /// A [`Error::Device`].
    pub fn device(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Error::Device { message: message.into(), hint: hint.into() }
    }

    /// A [`Error::Train`].
    pub fn train(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Error::Train { message: message.into(), hint: hint.into() }
    }

    /// A [`Error::Rank`].
    pub fn rank(rank: usize, message: impl Into<String>) -> Self {
        let hint = format!("`logs/rank_{rank}.log` and the rank's own output say more");
        Error::Rank { rank, message: message.into(), hint: if rank == 0 { String::new() } else { hint } }
    }

    /// The same, as an error of the rank that it came up on.
    #[must_use]
    pub fn on_rank(self, rank: usize) -> Self {
        let (message, hint) = (self.to_string(), self.hint().unwrap_or_default());
        match self {
            Error::Rank { .. } => self,
            _ => Error::Rank { rank, message, hint },
        }
    }

    /// The same, of one run of several.
    #[must_use]
    pub fn of_run(mut self, name: &str) -> Self {
        let prefix = |message: &mut String| *message = format!("run `{name}`: {message}");
        match &mut self {
            Error::Config(problems) | Error::Several(problems) => {
                problems.iter_mut().for_each(|problem| prefix(&mut problem.message));
            }
            Error::Usage { message, .. }
            | Error::Data { message, .. }
            | Error::Model { message, .. }
            | Error::Adapter { message, .. }
            | Error::Checkpoint { message, .. }
            | Error::Device { message, .. }
            | Error::Hub { message, .. }
            | Error::Train { message, .. } => prefix(message),
            Error::Rank { .. } | Error::NotANumber { .. } | Error::Io { .. } | Error::Interrupted { .. } => {}
        }
        self
    }

    /// The same, told after what was found before it and didn't end the search.
    #[must_use]
    pub fn after(self, first: Option<Self>) -> Self {
        match first {
            Some(first) => Error::Several([first.into_problems(), self.into_problems()].concat()),
            None => self,
        }
    }

    fn into_problems(self) -> Vec<Problem> {
        let hint = self.hint().unwrap_or_default();
        let cause = std::error::Error::source(&self).map(|cause| format!(": {cause}")).unwrap_or_default();
        match self {
            Error::Config(problems) | Error::Several(problems) => problems,
            other => vec![Problem { place: String::new(), message: format!("{other}{cause}"), hint }],
        }
    }

    /// The sentence that says how to mend it, if there is one.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Error::Usage { hint, .. }
            | Error::Data { hint, .. }
            | Error::Model { hint, .. }
            | Error::Adapter { hint, .. }
            | Error::Checkpoint { hint, .. }
            | Error::Device { hint, .. }
            | Error::Hub { hint, .. }
            | Error::Train { hint, .. }
            | Error::Rank { hint, .. }
            | Error::Interrupted { hint, .. } => hint.clone(),
            Error::NotANumber { .. } => {
                "train or download them again; `float16` overflows where `bfloat16` and `float32` don't"
                    .into()
            }
            Error::Io { path, doing, source } => io_hint(path, doing, source).into(),
            // Each problem carries its own hint.
            Error::Config(_) | Error::Several(_) => String::new(),
        };
        (!hint.is_empty()).then(|| in_one_style(&hint))
    }

    /// 0 done, 1 failed, 2 usage or config, 130 interrupted.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Config(_) | Error::Usage { .. } => 2,
            Error::Interrupted { .. } => 130,
            _ => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_have_one_style() {
        let told = |hint: &str| Error::train("x", hint).hint();
        assert_eq!(told("Check the name."), Some("check the name".into()));
        assert_eq!(told("HF_HOME names it..."), Some("HF_HOME names it...".into()));
        assert_eq!(told("`--row 3`, for example"), Some("`--row 3`, for example".into()));
        assert_eq!(told(""), None);
    }

    #[test]
    fn what_the_system_says_comes_with_a_hint_where_it_needs_one() {
        let hint = |path: &Path, doing, kind: std::io::ErrorKind| Error::io(path, doing, kind.into()).hint();
        let has =
            |hint: Option<String>, part| assert!(hint.as_ref().is_some_and(|h| h.contains(part)), "{hint:?}");
        has(hint(Path::new("x.jsonl.gz"), "read", std::io::ErrorKind::UnexpectedEof), "fetch the file again");
        has(hint(&std::env::temp_dir(), "write", std::io::ErrorKind::StorageFull), "`TMPDIR`");
        has(hint(Path::new("/data"), "write", std::io::ErrorKind::StorageFull), "make room");
        has(hint(Path::new("x.jsonl"), "read", std::io::ErrorKind::PermissionDenied), "chmod");
        has(hint(Path::new("/x"), "create", std::io::ErrorKind::ReadOnlyFilesystem), "`output_dir`");
        assert_eq!(hint(Path::new("x.jsonl"), "read", std::io::ErrorKind::NotFound), None);
    }
}
