//! Tokens that training never reached, told by their rows of the embedding; read from the weights' file
//! without loading it.

use std::path::Path;

use super::weights::{Checkpoint, Entry, decode};
use crate::error::{Error, Result};

const EMBEDDING: &str = "model.embed_tokens.weight";
/// How many rows, evenly spread, tell what is usual.
const SAMPLE: usize = 256;
/// A row whose deviation is less than this part of the usual one was never trained.
const FLAT: f32 = 0.1;
/// Rows that differ nowhere by more than this part of the usual deviation are the same.
const SAME: f32 = 1e-3;

/// Those of `ids` whose row is next to nothing, or the same as the row of another token in `special`.
/// Where the folder holds no weights, none is.
///
/// # Errors
/// The weights can't be read.
pub fn untrained_tokens(dir: &Path, ids: &[u32], special: &[u32]) -> Result<Vec<u32>> {
    let there =
        ["model.safetensors", "model.safetensors.index.json"].iter().any(|name| dir.join(name).exists());
    if ids.is_empty() || !there {
        return Ok(Vec::new());
    }
    let checkpoint = Checkpoint::open_model(dir)?;
    let Some(entry) = checkpoint.entries.get(EMBEDDING).filter(|entry| entry.shape.len() == 2) else {
        return Ok(Vec::new());
    };
    let row = |id: usize| row(&checkpoint, entry, id).ok_or_else(|| unreadable(dir));
    let count = entry.shape[0];
    let mut deviations = Vec::new();
    for id in (0..count).step_by(count.div_ceil(SAMPLE).max(1)) {
        deviations.push(deviation(&row(id)?));
    }
    deviations.sort_by(f32::total_cmp);
    let usual = deviations.get(deviations.len() / 2).copied().unwrap_or(0.0);
    let mut others = Vec::new();
    for &id in special.iter().filter(|&&id| (id as usize) < count) {
        others.push((id, row(id as usize)?));
    }
    let mut untrained = Vec::new();
    for &id in ids.iter().filter(|&&id| (id as usize) < count) {
        let own = row(id as usize)?;
        let same =
            |(other, row): &(u32, Vec<f32>)| *other != id && largest_difference(&own, row) <= SAME * usual;
        if deviation(&own) < FLAT * usual || others.iter().any(same) {
            untrained.push(id);
        }
    }
    Ok(untrained)
}

fn row(checkpoint: &Checkpoint, entry: &Entry, id: usize) -> Option<Vec<f32>> {
    let bytes = checkpoint.bytes(entry);
    let length = bytes.len() / entry.shape[0];
    decode(entry.dtype, &bytes[id * length..][..length])
}

fn unreadable(dir: &Path) -> Error {
    Error::model(dir, format!("`{EMBEDDING}` is stored in a type other than F32, F16 and BF16"), "")
}

/// The standard deviation of a row's values.
fn deviation(row: &[f32]) -> f32 {
    let n = row.len().max(1) as f32;
    let mean = row.iter().sum::<f32>() / n;
    (row.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / n).sqrt()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

    #[test]
    fn rows_that_are_flat_or_the_same_are_untrained() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(untrained_tokens(dir.path(), &[1], &[1]).unwrap(), [0; 0], "no weights, nothing to say");
        // Row 3 is zero, rows 5 and 6 are one row, row 7 is flat though not zero; the others go up and down.
        let value = |row: usize, column: usize| match row {
            3 => 0.0,
            7 => 0.5,
            _ => (((if row == 6 { 5 } else { row }) * 7 + column * 3) % 11) as f32 - 5.0,
        };
        let values: Vec<f32> = (0..10).flat_map(|row| (0..8).map(move |column| value(row, column))).collect();
        let view = TensorView::new(Dtype::F32, vec![10, 8], bytemuck::cast_slice(&values)).unwrap();
        serialize_to_file([(EMBEDDING, view)], None, &dir.path().join("model.safetensors")).unwrap();
        let all: Vec<u32> = (0..12).collect();
        assert_eq!(untrained_tokens(dir.path(), &all, &all).unwrap(), [3, 5, 6, 7]);
        assert_eq!(untrained_tokens(dir.path(), &[4, 5], &[4, 5]).unwrap(), [0; 0]);
    }
}
