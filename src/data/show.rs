//! A row as training sees it: for people to look at.

use super::read::subsets_and_splits;
use super::row::{Row, read_rows};
use super::{ChatTokenizer, Sample, Unprinted};
use crate::config::SftDataConfig;
use crate::error::{Error, Result};
use crate::hub;

/// A row, and what is made of it before it is cut and packed.
#[derive(Debug, Clone, PartialEq)]
pub struct Preview {
    /// The row in its normal form.
    pub row: Row,
    /// Its tokens.
    pub sample: Sample,
    /// What of it the chat template leaves out.
    pub unprinted: Option<Unprinted>,
}

/// Row `number`, counted from 1 through all the files that `data` names.
///
/// # Errors
/// There aren't as many rows, or this one isn't right.
pub fn preview(data: &SftDataConfig, tokenizer: &ChatTokenizer, number: usize) -> Result<Preview> {
    let mut rows = 0;
    for (subset, split) in subsets_and_splits(data) {
        for file in hub::dataset_files(&data.name, subset, split)? {
            for row in read_rows(&file, data)? {
                rows += 1;
                if rows == number {
                    let row = row?;
                    let (sample, unprinted) = tokenizer.encode_telling(&row, &data.loss_mask)?;
                    return Ok(Preview { row, sample, unprinted });
                }
            }
        }
    }
    let message = format!("there is no row {number}: the last one is {rows}");
    Err(Error::data(&data.name, None, message, "Rows are counted from 1, through all files."))
}

impl Sample {
    /// Whether token `i` is trained as a target; nothing comes before the first.
    pub fn is_trained(&self, i: usize) -> bool {
        i > 0 && self.mask[i]
    }

    /// How many tokens are trained as targets.
    pub fn trained(&self) -> usize {
        (0..self.ids.len()).filter(|&i| self.is_trained(i)).count()
    }
}

impl ChatTokenizer {
    /// The text of a document in parts, those that are trained apart from the others.
    ///
    /// # Errors
    /// The tokenizer can't decode the ids.
    pub fn parts(&self, sample: &Sample) -> Result<Vec<(String, bool)>> {
        let mut parts = Vec::new();
        let mut start = 0;
        for end in 1..=sample.ids.len() {
            let trained = sample.is_trained(start);
            if end == sample.ids.len() || sample.is_trained(end) != trained {
                parts.push((self.decode(&sample.ids[start..end], false)?, trained));
                start = end;
            }
        }
        Ok(parts)
    }
}
