//! What a row is: its place, what can be wrong with it, and its normal form (which `format` makes).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::{DataFormat, SftDataConfig};
use crate::error::Error;

/// Where a row stands: file and 1-based line (jsonl) or row (parquet).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "(PathBuf, usize)", from = "(PathBuf, usize)")]
pub struct Place {
    /// The file.
    pub file: Arc<PathBuf>,
    /// 1-based line or row.
    pub row: usize,
}

impl From<(PathBuf, usize)> for Place {
    fn from((file, row): (PathBuf, usize)) -> Self {
        Self { file: Arc::new(file), row }
    }
}

impl From<Place> for (PathBuf, usize) {
    fn from(place: Place) -> Self {
        (place.file.as_ref().clone(), place.row)
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.row)
    }
}

/// What is wrong with a row; [`Fault::at`] says where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    message: String,
    hint: String,
}

impl Fault {
    pub fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { message: message.into(), hint: hint.into() }
    }

    pub fn at(self, place: &Place) -> Error {
        Error::data(place.file.as_ref(), place.row, self.message, self.hint)
    }

    /// For faults of a model's files.
    pub fn at_file(self, path: &Path) -> Error {
        Error::model(path, self.message, self.hint)
    }

    /// What is wrong, and how to mend it.
    pub fn into_parts(self) -> (String, String) {
        (self.message, self.hint)
    }

    pub fn hint(mut self, hint: &str) -> Self {
        self.hint = hint.into();
        self
    }
}

/// A row as the file has it.
#[derive(Debug, Clone)]
pub(super) struct RawRow {
    pub place: Place,
    pub columns: Map<String, Value>,
    /// Columns of a parquet file have one type, so absent fields of inner objects are there as nulls.
    pub padded_with_nulls: bool,
}

/// The messages of one document and what goes into its chat template beside them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    /// Objects with `role` and `content` (always a string), maybe `tool_calls` and others.
    pub messages: Vec<Map<String, Value>>,
    /// The first so many messages are context and never trained.
    pub context: usize,
    /// The list of tools, if there is one.
    pub tools: Option<Value>,
    /// Further variables for the template.
    pub kwargs: Map<String, Value>,
}

/// A row in its normal form.
#[derive(Debug, Clone, PartialEq)]
pub enum Body {
    /// To be rendered by the chat template.
    Chat(Conversation),
    /// To be tokenised as it is; every token is trained.
    Text(String),
    /// Plain text too, of which only what follows the prompt is trained.
    Continuation {
        /// Context.
        prompt: String,
        /// What is trained, and the end token after it.
        completion: String,
    },
    /// Tokenised already.
    Tokens {
        /// Token ids.
        input_ids: Vec<i64>,
        /// The same ids, or -100 where a token is not trained (not shifted, as in transformers).
        labels: Vec<i64>,
    },
}

/// A row in its normal form, its shape and place.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Where it stands.
    pub place: Place,
    /// What it was; never [`DataFormat::Auto`].
    pub format: DataFormat,
    /// What it says.
    pub body: Body,
}

/// The rows of a data file, in their normal form; `data` names format and columns.
///
/// # Errors
/// The file can't be read; each item: the row isn't right.
pub fn read_rows(
    path: &Path,
    data: &SftDataConfig,
) -> Result<impl Iterator<Item = Result<Row, Error>> + use<>, Error> {
    let (rows, data) = (super::source::open(path, &data.columns)?, data.clone());
    Ok(rows.map(move |raw| super::format::normalise(raw?.read()?, &data)))
}
