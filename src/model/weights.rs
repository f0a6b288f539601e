//! Weights on disk → parameters: safetensors, one file or shards with an index, memory-mapped and
//! converted tensor by tensor; everything that does not fit is reported together.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use memmap2::Mmap;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::lora::normal;
use super::{Decoder, HfConfig, read_json_object};
use crate::error::{Error, Result};
use crate::ops::mapped::{map_file, release};

/// Makes [`Error::Model`] or [`Error::Adapter`] from path, message and hint.
pub(crate) type MakeError = fn(PathBuf, String, String) -> Error;

/// What loading found besides the weights.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LoadReport {
    /// Tensors in the files that the model has no place for.
    pub unused: Vec<String>,
    /// What the user should know, `unused` included.
    pub warnings: Vec<String>,
}

/// One tensor in a safetensors file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Index in [`Checkpoint::files`].
    pub file: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    range: Range<usize>,
}

/// A file of tensors, mapped.
pub(crate) struct TensorFile {
    pub path: PathBuf,
    map: Mmap,
}

/// The tensors of a folder, or of one file.
pub(crate) struct Checkpoint {
    pub files: Vec<TensorFile>,
    pub entries: BTreeMap<String, Entry>,
    error: MakeError,
}

impl Checkpoint {
    /// `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// Where there are no weights, shards are missing, or a file is not whole.
    pub fn open_model(dir: &Path) -> Result<Self> {
        let mut all = Checkpoint { files: Vec::new(), entries: BTreeMap::new(), error: Error::model };
        let single = dir.join("model.safetensors");
        if single.exists() {
            all.add(single, |_| true)?;
            return Ok(all);
        }
        let index = dir.join("model.safetensors.index.json");
        if !index.exists() {
            let hint = match dir.join("pytorch_model.bin").exists() {
                true => "there is a `pytorch_model.bin`: save the model as safetensors first",
                false => "a model folder holds `config.json` and `*.safetensors`",
            };
            return Err(Error::model(dir, "has no `model.safetensors` and no index of shards", hint));
        }
        let map = shard_of_tensor(&index)?;
        let mut shards: Vec<&String> = map.values().collect();
        shards.sort();
        shards.dedup();
        let lost: Vec<String> =
            shards.iter().filter(|s| !dir.join(s).exists()).map(|s| format!("`{s}`")).collect();
        if !lost.is_empty() {
            let message = format!("names shards that are not there: {}", lost.join(", "));
            return Err(Error::model(index, message, "download the model again"));
        }
        for shard in &shards {
            all.add(dir.join(shard), |name| map.get(name).is_none_or(|home| home == *shard))?;
        }
        Ok(all)
    }

    /// The tensors of one file.
    ///
    /// # Errors
    /// Where the file is not a whole safetensors file; `error` makes it.
    pub fn open_file(path: &Path, error: MakeError) -> Result<Self> {
        let mut all = Checkpoint { files: Vec::new(), entries: BTreeMap::new(), error };
        all.add(path.into(), |_| true)?;
        Ok(all)
    }

    fn add(&mut self, path: PathBuf, keep: impl Fn(&str) -> bool) -> Result<()> {
        let map = map_file(&path)?;
        let (header, metadata) = match SafeTensors::read_metadata(&map) {
            Ok(read) => read,
            Err(cause) => return Err(broken(path, &map, &cause, self.error)),
        };
        let file = self.files.len();
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            let range = 8 + header + start..8 + header + end;
            if keep(&name) {
                self.entries
                    .insert(name, Entry { file, dtype: info.dtype, shape: info.shape.clone(), range });
            }
        }
        self.files.push(TensorFile { path, map });
        Ok(())
    }

    /// A tensor's bytes as they lie in the file.
    pub fn bytes(&self, entry: &Entry) -> &[u8] {
        &self.files[entry.file].map[entry.range.clone()]
    }

    /// Gives back the memory of a tensor that was read and isn't needed again.
    pub fn release(&self, entry: &Entry) {
        release(&self.files[entry.file].map, entry.range.clone());
    }

    /// A tensor's values in f32.
    ///
    /// # Errors
    /// Where its dtype is none of f32, f16 and bf16, or a value is not finite.
    pub fn values(&self, name: &str, entry: &Entry) -> Result<Vec<f32>> {
        let path = &self.files[entry.file].path;
        let Some(values) = decode(entry.dtype, self.bytes(entry)) else {
            let message = format!("`{name}` is stored as {:?}, wanted F32, F16 or BF16", entry.dtype);
            return Err((self.error)(path.clone(), message, String::new()));
        };
        if all_finite(&values) {
            return Ok(values);
        }
        let message = format!("`{name}` holds values that are not finite (NaN or infinity)");
        let hint =
            "the file was damaged or the training that made it broke down; nothing can be trained on it";
        Err((self.error)(path.clone(), message, hint.into()))
    }
}

/// Tensor → file, from an index.
fn shard_of_tensor(index: &Path) -> Result<BTreeMap<String, String>> {
    let json = read_json_object(index, Error::model)?;
    let Some(map) = json.get("weight_map").and_then(|map| map.as_object()) else {
        return Err(Error::model(index, "has no `weight_map`", "download the model again"));
    };
    map.iter()
        .map(|(name, file)| {
            let plain = |file: &&str| Path::new(file).file_name().is_some_and(|name| name == *file);
            let file = file.as_str().filter(plain);
            let file =
                file.ok_or_else(|| Error::model(index, format!("`{name}`: wanted a file name"), ""))?;
            Ok((name.clone(), file.to_string()))
        })
        .collect()
}

fn broken(path: PathBuf, bytes: &[u8], cause: &SafeTensorError, error: MakeError) -> Error {
    let size = bytes.len();
    if bytes.starts_with(b"version https://git-lfs") {
        let message = "is a git-lfs pointer, not the weights".into();
        return error(path, message, "run `git lfs pull` in the folder".into());
    }
    let claimed = bytes.first_chunk::<8>().map(|n| u64::from_le_bytes(*n));
    let message = match (cause, claimed) {
        (_, None) => format!("is no safetensors file: {size} bytes are too short for a header"),
        (_, Some(n)) if n > size as u64 - 8 => {
            format!("is truncated or no safetensors file: its header claims {n} bytes, the file has {size}")
        }
        (SafeTensorError::MetadataIncompleteBuffer, _) => {
            format!("is truncated: its tensors end beyond or before the file's {size} bytes")
        }
        _ => format!("has a broken safetensors header: {cause}"),
    };
    error(path, message, "download or copy the file again".into())
}

/// Stored floats in f32; `None` for other dtypes.
pub(crate) fn decode(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    const CHUNK: usize = 1 << 18;
    let width = match dtype {
        Dtype::F32 => 4,
        Dtype::F16 | Dtype::BF16 => 2,
        _ => return None,
    };
    let mut values = vec![0f32; bytes.len() / width];
    let chunks = values.par_chunks_mut(CHUNK).zip(bytes.par_chunks(CHUNK * width));
    chunks.for_each(|(values, bytes)| match dtype {
        Dtype::F32 => {
            for (value, b) in values.iter_mut().zip(bytes.chunks_exact(4)) {
                *value = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        Dtype::BF16 => {
            for (value, b) in values.iter_mut().zip(bytes.chunks_exact(2)) {
                *value = bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        _ => {
            let halves: Vec<f16> = bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
            halves.convert_to_f32_slice(values);
        }
    });
    Some(values)
}

/// Written so that the compiler vectorises it.
fn all_finite(values: &[f32]) -> bool {
    values.iter().fold(true, |all, value| all & value.is_finite())
}

/// Values for a device, in `dtype`; `None` where they do not fit it.
fn tensor_data(values: Vec<f32>, shape: &[usize], dtype: DType) -> Option<TensorData> {
    let data = match dtype {
        DType::F16 => TensorData::new(values.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>(), shape),
        DType::BF16 => TensorData::new(values.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>(), shape),
        _ => return Some(TensorData::new(values, shape)),
    };
    let limit = if dtype == DType::F16 { f16::MAX.to_f32() } else { f32::MAX };
    values.iter().fold(true, |all, value| all & (value.abs() <= limit)).then_some(data)
}

impl Decoder {
    /// Reads a Hugging Face folder; `dtype` is what the forward pass computes in on `device`.
    ///
    /// `progress` hears of bytes read and bytes in all; warnings go to the log.
    ///
    /// # Errors
    /// One error with every missing and mis-shaped tensor; broken files; values that aren't finite.
    pub fn load(
        dir: &Path,
        dtype: DType,
        device: &Device,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Decoder> {
        let (decoder, report) = Decoder::load_with_report(dir, dtype, device, progress)?;
        for warning in &report.warnings {
            tracing::warn!("{}: {warning}", dir.display());
        }
        Ok(decoder)
    }

    /// As [`Decoder::load`], with what it found instead of log lines.
    ///
    /// # Errors
    /// As [`Decoder::load`].
    pub fn load_with_report(
        dir: &Path,
        dtype: DType,
        device: &Device,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<(Decoder, LoadReport)> {
        let (checkpoint, decoder, report) = open(dir, dtype, device)?;
        let total = checkpoint.entries.values().map(|entry| entry.range.len()).sum();
        let path = Vec::new();
        let mut loader =
            Loader { checkpoint: &checkpoint, dtype, path, done: 0, total, progress, error: None };
        let decoder = decoder.map(&mut loader);
        match loader.error {
            Some(error) => Err(error),
            None => Ok((decoder, report)),
        }
    }

    /// A decoder with fresh weights: N(0, `initializer_range`), norms 1, biases 0; they depend on
    /// the seed and each parameter's name alone.
    pub fn random(config: &HfConfig, seed: u64, device: &Device) -> Decoder {
        let device = device.clone().without_autodiff();
        let mut filler = Filler { seed, deviation: config.initializer_range, path: Vec::new() };
        Decoder::empty(config, DType::F32, &device).map(&mut filler)
    }
}

/// Whether a folder holds weights, and they fit its `config.json` by their names and shapes: headers are read, no
/// values. `None` without any weights.
///
/// # Errors
/// As [`Decoder::load`], but for values.
pub fn check_weights(dir: &Path, device: &Device) -> Result<Option<LoadReport>> {
    let there =
        ["model.safetensors", "model.safetensors.index.json"].iter().any(|name| dir.join(name).exists());
    there.then(|| open(dir, DType::F32, device).map(|(_, _, report)| report)).transpose()
}

/// The files of a folder, and the empty decoder that they fit.
fn open(dir: &Path, dtype: DType, device: &Device) -> Result<(Checkpoint, Decoder, LoadReport)> {
    let mut config = HfConfig::load(dir)?;
    let checkpoint = Checkpoint::open_model(dir)?;
    let mut report = LoadReport::default();
    untie_if_heads_differ(&checkpoint, &mut config, &mut report);
    let decoder = Decoder::empty(&config, dtype, &device.clone().without_autodiff());
    check_fit(dir, &checkpoint, &decoder.base_parameters(), config.tie_word_embeddings, &mut report)?;
    Ok((checkpoint, decoder, report))
}

/// A tied checkpoint may hold the head too; where it is another one, both are kept apart
/// (transformers 5 does the same).
fn untie_if_heads_differ(checkpoint: &Checkpoint, config: &mut HfConfig, report: &mut LoadReport) {
    let get = |name: &str| checkpoint.entries.get(name);
    let (Some(head), Some(embedding)) = (get("lm_head.weight"), get("model.embed_tokens.weight")) else {
        return;
    };
    let same = head.shape == embedding.shape
        && head.dtype == embedding.dtype
        && checkpoint.bytes(head) == checkpoint.bytes(embedding);
    if config.tie_word_embeddings && !same {
        config.tie_word_embeddings = false;
        report.warnings.push(
            "`tie_word_embeddings` is true, yet `lm_head.weight` differs from `model.embed_tokens.weight`: \
             using both as they are"
                .into(),
        );
    }
}

/// One report of all that does not fit; unused tensors are warnings.
fn check_fit(
    dir: &Path,
    checkpoint: &Checkpoint,
    expected: &[(String, Vec<usize>)],
    tied: bool,
    report: &mut LoadReport,
) -> Result<()> {
    let mut lines = Vec::new();
    for (name, want) in expected {
        match checkpoint.entries.get(name) {
            None if name == "lm_head.weight" => lines.push(
                "`lm_head.weight` is missing, and `tie_word_embeddings` in `config.json` is false".into(),
            ),
            None => lines.push(format!("`{name}` is missing")),
            Some(entry) if entry.shape != *want => {
                let got = &entry.shape;
                lines.push(format!("`{name}` has shape {got:?}, `config.json` wants {want:?}"));
            }
            Some(_) => {}
        }
    }
    let known = |name: &str| expected.iter().any(|(n, _)| n == name);
    // Old checkpoints carry this table; it is computed here.
    let harmless = |name: &str| name.ends_with("rotary_emb.inv_freq") || tied && name == "lm_head.weight";
    report.unused = checkpoint.entries.keys().filter(|n| !known(n) && !harmless(n)).cloned().collect();
    if !report.unused.is_empty() {
        let names: Vec<String> = report.unused.iter().map(|n| format!("`{n}`")).collect();
        report.warnings.push(format!("the model has no place for {}", shortened(&names, ", ")));
    }
    if lines.is_empty() {
        return Ok(());
    }
    let message = format!("the weights do not fit `config.json`:\n  {}", shortened(&lines, "\n  "));
    let hint = match report.unused.first() {
        None if lines.len() == 1 && lines[0].starts_with("`lm_head.weight` is missing") => {
            "if this model's head is its embedding, set `tie_word_embeddings` to true".into()
        }
        Some(name) => format!("the files also hold `{name}`, which the model has no place for"),
        None => "`config.json` and the weights must come from the same model".into(),
    };
    Err(Error::model(dir, message, hint))
}

/// At most ten of them.
fn shortened(lines: &[String], separator: &str) -> String {
    let shown = lines.iter().take(10).cloned().collect::<Vec<_>>().join(separator);
    match lines.len().saturating_sub(10) {
        0 => shown,
        more => format!("{shown}{separator}and {more} more"),
    }
}

/// Fills an empty decoder from a checkpoint whose tensors are known to fit.
struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    dtype: DType,
    path: Vec<String>,
    done: usize,
    total: usize,
    progress: &'a mut dyn FnMut(usize, usize),
    error: Option<Error>,
}

impl Loader<'_> {
    fn read<const D: usize>(&mut self, device: &Device) -> Result<Tensor<D>> {
        let name = self.path.join(".");
        let entry = &self.checkpoint.entries[&name];
        let values = self.checkpoint.values(&name, entry)?;
        self.checkpoint.release(entry);
        let Some(data) = tensor_data(values, &entry.shape, self.dtype) else {
            let message = format!("`{name}` has values beyond the range of {:?}", self.dtype);
            let path = &self.checkpoint.files[entry.file].path;
            return Err(Error::model(path, message, "set `model.dtype = \"float32\"`"));
        };
        self.done += entry.range.len();
        (self.progress)(self.done, self.total);
        Ok(Tensor::from_data(data, (device, self.dtype)))
    }
}

impl ModuleMapper for Loader<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        match self.read(&param.lazy_device()) {
            Ok(tensor) => Param::initialized(param.id, tensor),
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}

/// Fills an empty decoder with fresh weights.
struct Filler {
    seed: u64,
    deviation: f64,
    path: Vec<String>,
}

impl ModuleMapper for Filler {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (name, shape) = (self.path.join("."), param.lazy_shape());
        let n = shape.num_elements();
        let values: Vec<f32> = if name.ends_with("norm.weight") {
            vec![1.0; n]
        } else if name.ends_with(".bias") {
            vec![0.0; n]
        } else {
            let seed = xxh3_64_with_seed(name.as_bytes(), self.seed);
            let mut generator = ChaCha8Rng::seed_from_u64(seed);
            (0..n).map(|_| (self.deviation * normal(&mut generator)) as f32).collect()
        };
        let data = TensorData::new(values, shape);
        Param::initialized(param.id, Tensor::from_data(data, (&param.lazy_device(), DType::F32)))
    }
}
