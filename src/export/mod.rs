//! What others load: PEFT adapter folders and Hugging Face model folders.

mod adapter_config;
mod card;
mod file;
mod fold;
mod lint;
mod merge;
mod peft;
mod start;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn::store::ModuleSnapshot;
use burn::store::burn_pack::Tensor as PackTensor;
use burn::tensor::DType;
use safetensors::Dtype;
use serde_json::{Value, json};

pub use adapter_config::AdapterConfig;
pub use card::{Card, Results};
pub use fold::fold_scaling;
pub use lint::{Finding, Lint, SERVERS, Server, Verdict, lint};
pub use merge::{MergeReport, merge, merge_as};
pub use peft::{AdapterMeta, AdapterReport, PeftStore, load_adapter, save_adapter, save_adapter_with_card};
pub(crate) use peft::{is_base, named_base};
pub use start::check_start;

use crate::error::{Error, Result};
use crate::model::{Decoder, decode, read_json_object};
use file::{Outgoing, encode, in_new_folder, write_tensors, write_text};

/// Larger models are written in shards of at most this many bytes.
const SHARD: usize = 5_000_000_000;

/// Writes the whole model as a Hugging Face folder: weights stored as `dtype`, `config.json` and
/// tokenizer files from the folder that it came from.
///
/// `out` must not exist, or be an empty folder.
///
/// # Errors
/// Where the model has adapters (they are exported by [`save_adapter`] and merged by [`merge`]), `out`
/// holds something, or a file cannot be written.
pub fn save_model(decoder: &Decoder, source: &Path, out: &Path, dtype: DType) -> Result<()> {
    let card = Card::of_base(&source.to_string_lossy(), Some(source));
    save_model_with_card(decoder, source, out, dtype, &card)
}

/// As [`save_model`], with a card that knows more.
///
/// # Errors
/// As [`save_model`].
pub fn save_model_with_card(
    decoder: &Decoder,
    source: &Path,
    out: &Path,
    dtype: DType,
    card: &Card,
) -> Result<()> {
    save_model_in_shards(decoder, source, out, (dtype, SHARD), card)
}

fn save_model_in_shards(
    decoder: &Decoder,
    source: &Path,
    out: &Path,
    (dtype, shard): (DType, usize),
    card: &Card,
) -> Result<()> {
    if !decoder.runs().is_empty() {
        let hint = "save the adapter, then `embertune merge`";
        return Err(Error::model(out, "a model with adapters attached has no weights of its own", hint));
    }
    let stored = peft::dtype_of(dtype);
    let tensors = decoder.collect(None, None, false);
    let shards = split(&tensors, stored, shard);
    in_new_folder(out, |out| {
        let mut homes = BTreeMap::new();
        let mut total = 0;
        for (i, tensors) in shards.iter().enumerate() {
            let name = match shards.len() {
                1 => "model.safetensors".to_string(),
                n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
            };
            let outgoing: Vec<Outgoing> = tensors.iter().map(|t| outgoing(t, stored, out)).collect();
            for tensor in &outgoing {
                homes.insert(tensor.name.clone(), name.clone());
                total += tensor.len();
            }
            write_tensors(&out.join(&name), outgoing)?;
        }
        if shards.len() > 1 {
            write_index(out, &homes, total)?;
        }
        copy_companions(source, out)?;
        write_config(source, out, Some(decoder.config().tie_word_embeddings), Some(dtype))?;
        card.write_model(out, "All weights of the base model, trained further.")
    })
}

/// Consecutive tensors, each group at most `limit` bytes (or one tensor).
fn split(tensors: &[PackTensor], dtype: Dtype, limit: usize) -> Vec<Vec<&PackTensor>> {
    let size = |tensor: &PackTensor| tensor.shape.num_elements() * dtype.bitsize() / 8;
    let mut shards: Vec<Vec<&PackTensor>> = vec![Vec::new()];
    let mut filled = 0;
    for tensor in tensors {
        let shard = shards.last_mut().expect("never empty");
        if filled + size(tensor) > limit && !shard.is_empty() {
            shards.push(vec![tensor]);
            filled = size(tensor);
        } else {
            shard.push(tensor);
            filled += size(tensor);
        }
    }
    shards
}

fn outgoing<'a>(tensor: &'a PackTensor, dtype: Dtype, out: &'a Path) -> Outgoing<'a> {
    let bytes = move || {
        let failed = |cause: String| Error::model(out, format!("`{}`: {cause}", tensor.name), "");
        let bytes = tensor.to_bytes().map_err(|e| failed(e.to_string()))?;
        let values = decode(peft::dtype_of(tensor.dtype), &bytes);
        let values = values.ok_or_else(|| failed(format!("{:?} is no float", tensor.dtype)))?;
        encode(&values, dtype).ok_or_else(|| failed(format!("has values beyond the range of {dtype:?}")))
    };
    Outgoing { name: tensor.name.clone(), dtype, shape: tensor.shape.to_vec(), bytes: Box::new(bytes) }
}

/// `model.safetensors.index.json`
fn write_index(out: &Path, homes: &BTreeMap<String, String>, total: usize) -> Result<()> {
    let index = json!({"metadata": {"total_size": total}, "weight_map": homes});
    let text = serde_json::to_string_pretty(&index).expect("JSON values can be written");
    write_text(&out.join("model.safetensors.index.json"), &(text + "\n"))
}

/// `config.json` of the source with what is other now: whether the head is tied, the dtype.
fn write_config(source: &Path, out: &Path, tied: Option<bool>, dtype: Option<DType>) -> Result<()> {
    let mut map = read_json_object(&source.join("config.json"), Error::model)?;
    if let Some(tied) = tied {
        map.insert("tie_word_embeddings".into(), tied.into());
    }
    if let Some(dtype) = dtype {
        let name = match dtype {
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            _ => "float32",
        };
        let key = if map.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
        map.insert(key.into(), name.into());
    }
    let text = serde_json::to_string_pretty(&Value::Object(map)).expect("JSON values can be written");
    write_text(&out.join("config.json"), &(text + "\n"))
}

/// Copies what belongs to a model besides config and weights: tokenizer, chat template, generation
/// settings.
///
/// # Errors
/// Where a file cannot be read or written.
pub fn copy_companions(source: &Path, out: &Path) -> Result<()> {
    let entries = fs::read_dir(source).map_err(|e| Error::io(source, "read", e))?;
    for entry in entries {
        let path = entry.map_err(|e| Error::io(source, "read", e))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let kept = [".json", ".jinja", ".txt", ".model", ".tiktoken"].iter().any(|end| name.ends_with(end));
        let ours = name == "config.json" || name.ends_with(".index.json") || name.starts_with("adapter_");
        if kept && !ours && path.is_file() {
            fs::copy(&path, out.join(name)).map_err(|e| Error::io(&path, "copy", e))?;
        }
    }
    Ok(())
}

#[cfg(all(test, feature = "flex"))]
mod tests;
