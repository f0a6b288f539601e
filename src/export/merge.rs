//! Base model + adapter → merged model: `W + s·B·A` in f32, rounded once to the base's dtype, shard
//! by shard, tensor by tensor, without a device. What is in memory at a time is the adapter, and one weight of the base
//! (in f32 and as it is stored).
//!
//! Tied heads: an adapter that changes the head or the embedding alone unties them; both are then
//! written and `tie_word_embeddings` is false (PEFT does the same).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use burn::tensor::{DType, Device};
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;

use super::adapter_config::AdapterConfig;
use super::card;
use super::file::{Outgoing, encode, in_new_folder, write_tensors};
use super::peft::{WEIGHTS, check_tensors, dtype_of, no_place_for, other_base, unfit};
use super::{copy_companions, write_config, write_index};
use crate::error::{Error, Result};
use crate::model::{AdaptedModule, Checkpoint, Decoder, Entry, HfConfig, Modules, Resolved, resolve};

/// What a merge did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MergeReport {
    /// Number of weights that changed.
    pub changed: usize,
    /// Largest |s·B·A| of all elements, and the weight that holds it.
    pub largest_change: (f32, String),
    /// Largest |merged in f32 − merged as stored|: what rounding to the base's dtype costs.
    pub largest_rounding: f32,
    /// Whether a tied head was untied.
    pub untied: bool,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// What is done to one weight.
enum Change {
    /// W + s·B·A
    Add { a: Vec<f32>, b: Vec<f32>, rank: usize, scale: f32 },
    /// Trained whole.
    Replace(Vec<f32>),
}

/// A merge being done.
struct Merge<'a> {
    base: &'a Checkpoint,
    changes: BTreeMap<String, Change>,
    /// A head that the base doesn't store: written from the embedding, plus its change.
    new_head: bool,
    dtype: Option<Dtype>,
    report: RefCell<MergeReport>,
}

/// Writes the model in `base` with `adapter` merged in as a new Hugging Face folder `out`, in the
/// base's dtypes.
///
/// # Errors
/// Where a folder is broken, adapter and base don't fit, or `out` holds something already.
pub fn merge(base: &Path, adapter: &Path, out: &Path) -> Result<MergeReport> {
    merge_as(base, adapter, out, None)
}

/// As [`merge`], all weights stored as `dtype`.
///
/// # Errors
/// As [`merge`].
pub fn merge_as(base: &Path, adapter: &Path, out: &Path, dtype: Option<DType>) -> Result<MergeReport> {
    let config = HfConfig::load(base)?;
    let adapter_config = AdapterConfig::load(adapter)?;
    let checkpoint = Checkpoint::open_model(base)?;
    let mut report = MergeReport::default();
    let other = other_base(&adapter_config, base);
    let named = adapter_config.base_model_name_or_path.as_ref().filter(|_| other.is_none());
    let card = card::of_merge(named.map_or(&*base.to_string_lossy(), |name| name), base, adapter);
    report.warnings.extend(other);
    let changes = read_changes(&config, &checkpoint, &adapter_config, adapter, &mut report)?;
    let touches = |name: &str| changes.contains_key(name);
    let untied =
        config.tie_word_embeddings && (touches("lm_head.weight") || touches("model.embed_tokens.weight"));
    let merge = Merge {
        new_head: untied && !checkpoint.entries.contains_key("lm_head.weight"),
        base: &checkpoint,
        changes,
        dtype: dtype.map(dtype_of),
        report: RefCell::new(MergeReport { untied, ..report }),
    };
    in_new_folder(out, |out| {
        merge.write(out)?;
        copy_companions(base, out)?;
        write_config(base, out, untied.then_some(false), dtype)?;
        card.write_model(out, &card::merged(&merge.report.borrow()))
    })?;
    Ok(merge.report.into_inner())
}

/// The adapter's effect on each weight, by the weight's name.
fn read_changes(
    config: &HfConfig,
    base: &Checkpoint,
    adapter: &AdapterConfig,
    dir: &Path,
    report: &mut MergeReport,
) -> Result<BTreeMap<String, Change>> {
    let (shape_of, modules) = shapes_and_modules(config);
    let config_path = dir.join("adapter_config.json");
    let resolved = resolve(&adapter.spec, &modules).map_err(|problems| unfit(&config_path, problems))?;
    let file = Checkpoint::open_file(&dir.join(WEIGHTS), Error::adapter)?;
    let found = file.entries.iter().map(|(name, entry)| (name.clone(), entry.shape.clone())).collect();
    let unused = check_tensors(&dir.join(WEIGHTS), &wanted_by(&resolved, &shape_of), &found)?;
    report.warnings.extend(resolved.warnings.clone());
    report.warnings.extend(no_place_for(&unused));

    let values = |name: &str| file.values(name, &file.entries[name]);
    let mut changes = BTreeMap::new();
    for module in &resolved.modules {
        let [a, b] = low_rank_names(&module.name);
        let change = Change::Add { a: values(&a)?, b: values(&b)?, rank: module.rank, scale: module.scale };
        changes.insert(format!("{}.weight", module.name), change);
    }
    for name in saved_by(&resolved, &shape_of) {
        changes.insert(name.clone(), Change::Replace(values(&format!("base_model.model.{name}"))?));
    }
    check_base(base, &changes, &shape_of, config.tie_word_embeddings)?;
    Ok(changes)
}

/// Parameters that an adapter holds whole.
fn saved_by<'a>(resolved: &'a Resolved, shape_of: &'a Shapes) -> impl Iterator<Item = &'a String> {
    let is_saved = |module: &str| resolved.saved.iter().any(|saved| saved == module);
    shape_of.keys().filter(move |name| name.rsplit_once('.').is_some_and(|(module, _)| is_saved(module)))
}

/// Names and shapes of all tensors of an adapter's file.
pub(super) fn wanted_by(resolved: &Resolved, shape_of: &Shapes) -> Vec<(String, Vec<usize>)> {
    let low_rank = resolved.modules.iter().flat_map(|module| wanted(module, shape_of));
    let saved = saved_by(resolved, shape_of);
    let saved = saved.map(|name| (format!("base_model.model.{name}"), shape_of[name].clone()));
    low_rank.chain(saved).collect()
}

/// Names and shapes of a module's A and B in an adapter's file.
pub(super) fn wanted(module: &AdaptedModule, shape_of: &Shapes) -> [(String, Vec<usize>); 2] {
    let shape = &shape_of[&format!("{}.weight", module.name)];
    let [a, b] = low_rank_names(&module.name);
    [(a, vec![module.rank, shape[1]]), (b, vec![shape[0], module.rank])]
}

/// Shapes of parameters by their names.
pub(super) type Shapes = BTreeMap<String, Vec<usize>>;

/// A model's parameters and modules.
pub(super) fn shapes_and_modules(config: &HfConfig) -> (Shapes, Modules) {
    let shape_of = shapes(config);
    let modules = Modules::from_parameters(shape_of.keys().map(String::as_str));
    (shape_of, modules)
}

/// Every parameter's shape, a tied head's included. Nothing is put on a device; naming the CPU
/// keeps Burn from looking for others.
fn shapes(config: &HfConfig) -> Shapes {
    #[cfg(feature = "flex")]
    let device = Device::flex();
    #[cfg(not(feature = "flex"))]
    let device = Device::default();
    let parameters = Decoder::empty(config, DType::F32, &device).base_parameters();
    let mut shapes: Shapes = parameters.into_iter().collect();
    shapes.insert("lm_head.weight".into(), vec![config.vocab_size, config.hidden_size]);
    shapes
}

fn low_rank_names(module: &str) -> [String; 2] {
    ["A", "B"].map(|letter| format!("base_model.model.{module}.lora_{letter}.weight"))
}

/// Every weight that changes is in the base's files, in the shape that its config says.
fn check_base(
    base: &Checkpoint,
    changes: &BTreeMap<String, Change>,
    shape_of: &BTreeMap<String, Vec<usize>>,
    tied: bool,
) -> Result<()> {
    for name in changes.keys() {
        let stored = match base.entries.get(name) {
            None if tied && name == "lm_head.weight" => base.entries.get("model.embed_tokens.weight"),
            stored => stored,
        };
        let want = &shape_of[name];
        let wrong = match stored {
            None => format!("`{name}` is missing"),
            Some(entry) if entry.shape != *want => {
                format!("`{name}` has shape {:?}, `config.json` wants {want:?}", entry.shape)
            }
            Some(_) => continue,
        };
        let hint = "`config.json` and the weights of the base must come from the same model";
        return Err(Error::model(&base.files[0].path, wrong, hint));
    }
    Ok(())
}

impl Merge<'_> {
    fn write(&self, out: &Path) -> Result<()> {
        let last = self.base.files.len() - 1;
        let mut homes = BTreeMap::new();
        let mut total = 0;
        for (i, file) in self.base.files.iter().enumerate() {
            let own = self.base.entries.iter().filter(|(_, entry)| entry.file == i);
            let mut tensors: Vec<Outgoing> = own.map(|(name, entry)| self.outgoing(name, entry)).collect();
            if self.new_head && i == last {
                let embedding = &self.base.entries["model.embed_tokens.weight"];
                tensors.push(self.outgoing("lm_head.weight", embedding));
            }
            let name = file.path.file_name().expect("a file that was opened").to_string_lossy().into_owned();
            for tensor in &tensors {
                homes.insert(tensor.name.clone(), name.clone());
                total += tensor.len();
            }
            write_tensors(&out.join(&name), tensors)?;
        }
        let files: BTreeSet<&String> = homes.values().collect();
        if files.len() > 1 || !files.contains(&"model.safetensors".to_string()) {
            write_index(out, &homes, total)?;
        }
        Ok(())
    }

    /// The tensor `name` made from the base's `entry`.
    fn outgoing<'a>(&'a self, name: &str, entry: &'a Entry) -> Outgoing<'a> {
        let float = matches!(entry.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16);
        let dtype = self.dtype.filter(|_| float).unwrap_or(entry.dtype);
        let name = name.to_string();
        let source = name.clone();
        let bytes = Box::new(move || {
            let bytes = match self.changes.get(&source) {
                None if dtype == entry.dtype => Ok(self.base.bytes(entry).to_vec()),
                change => self.merged(&source, entry, change, dtype),
            };
            self.base.release(entry);
            bytes
        });
        Outgoing { name, dtype, shape: entry.shape.clone(), bytes }
    }

    fn merged(&self, name: &str, entry: &Entry, change: Option<&Change>, dtype: Dtype) -> Result<Vec<u8>> {
        let mut values = self.base.values(name, entry)?;
        let mut largest = 0.0;
        match change {
            None => {}
            Some(Change::Replace(new)) => {
                largest = values.iter().zip(new).fold(0.0, |m: f32, (old, new)| m.max((new - old).abs()));
                values.clone_from(new);
            }
            Some(Change::Add { a, b, rank, scale }) => {
                largest = add_product(&mut values, entry.shape[1], a, b, *rank, *scale);
            }
        }
        let path = &self.base.files[entry.file].path;
        let beyond = || {
            let message = format!("`{name}` merged has values beyond the range of {dtype:?}");
            Error::model(path, message, "merge into a model stored as bfloat16 or float32")
        };
        let bytes = encode(&values, dtype).ok_or_else(beyond)?;
        if change.is_some() {
            let rounding = values.iter().fold(0.0, |m: f32, v| m.max((v - rounded(*v, dtype)).abs()));
            let mut report = self.report.borrow_mut();
            report.changed += 1;
            report.largest_rounding = report.largest_rounding.max(rounding);
            if largest > report.largest_change.0 {
                report.largest_change = (largest, name.to_string());
            }
        }
        Ok(bytes)
    }
}

/// A value as it is stored.
fn rounded(value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::BF16 => bf16::from_f32(value).to_f32(),
        Dtype::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// `w += s·B·A` in f32, row by row; returns the largest |s·B·A|.
fn add_product(w: &mut [f32], width: usize, a: &[f32], b: &[f32], rank: usize, scale: f32) -> f32 {
    let row = |(row, b): (&mut [f32], &[f32])| {
        let mut product = vec![0.0f32; width];
        for (factor, a) in b.iter().zip(a.chunks_exact(width)) {
            for (p, a) in product.iter_mut().zip(a) {
                *p += factor * a;
            }
        }
        let mut largest = 0.0f32;
        for (w, p) in row.iter_mut().zip(product) {
            let change = scale * p;
            *w += change;
            largest = largest.max(change.abs());
        }
        largest
    };
    w.par_chunks_mut(width).zip(b.par_chunks(rank)).map(row).reduce(|| 0.0, f32::max)
}
