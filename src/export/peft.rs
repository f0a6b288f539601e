//! [`PeftStore`]: an adapter run ↔ the folder that PEFT reads and writes.
//!
//! `base_model.model.` + the module's name + `.lora_A.weight` `[r, in]` or `.lora_B.weight`
//! `[out, r]`, all f32; modules that are trained whole under their own names. A file that was
//! written is read back and compared.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::store::burn_pack::Tensor as PackTensor;
use burn::store::{ApplyResult, ModuleSnapshot, ModuleStore, PathFilter, bridge};
use burn::tensor::{DType, TensorData};
use safetensors::Dtype;

use super::AdapterConfig;
use super::card::Card;
use super::file::{Outgoing, encode, in_new_folder, write_tensors, write_text};
use super::start::agree;
use crate::error::{Error, Problem, Result};
use crate::model::{Checkpoint, Decoder, Run, decode};

/// What every tensor of an adapter is named after.
pub(super) const PREFIX: &str = "base_model.model.";
/// The tensors' file.
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";
/// The frozen head that PEFT stores beside an adapter on it.
pub(super) const FROZEN_HEAD: &str = "base_model.model.lm_head.base_layer.weight";

/// What an exported adapter says about its base.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AdapterMeta {
    /// The base model's hub id or folder.
    pub base_model_name_or_path: Option<String>,
}

/// What loading an adapter found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AdapterReport {
    /// Number of adapted layers.
    pub modules: usize,
    /// The base that the adapter names.
    pub base_model_name_or_path: Option<String>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// A PEFT adapter folder as a store for one run of a module.
pub struct PeftStore {
    dir: PathBuf,
    run: usize,
    /// Paths of the parameters that the run trains whole.
    whole: Vec<String>,
    /// The dtype in which the frozen head goes into the file, where it does.
    frozen_head: Option<Dtype>,
    /// The text of `adapter_config.json`, to be written.
    config: String,
    tensors: Option<BTreeMap<String, PackTensor>>,
}

impl PeftStore {
    /// The store in `dir` of an attached run.
    ///
    /// # Errors
    /// Where the decoder has no such run.
    pub fn new(decoder: &Decoder, run: usize, dir: &Path, meta: &AdapterMeta) -> Result<Self> {
        let found = run_of(decoder, run, dir)?;
        let base_model_name_or_path = meta.base_model_name_or_path.clone();
        let config = AdapterConfig { base_model_name_or_path, spec: found.spec.clone() };
        let parameters = decoder.base_parameters();
        let saved = |path: &&String| {
            let module = path.rsplit_once('.').map_or("", |(module, _)| module);
            found.saved.iter().any(|saved| saved == module)
        };
        let stored = match decoder.config().dtype.as_deref() {
            Some("bfloat16") => Dtype::BF16,
            Some("float16") => Dtype::F16,
            _ => Dtype::F32,
        };
        let head = found.modules.iter().any(|m| m.name == "lm_head");
        Ok(PeftStore {
            dir: dir.into(),
            run,
            whole: parameters.iter().map(|(path, _)| path).filter(saved).cloned().collect(),
            frozen_head: head.then_some(stored),
            config: config.to_text(&decoder.modules()),
            tensors: None,
        })
    }

    fn weights(&self) -> PathBuf {
        self.dir.join(WEIGHTS)
    }

    /// The name in the file of a parameter's path, if it belongs there.
    fn disk_name(&self, path: &str) -> Option<String> {
        if self.whole.iter().any(|whole| whole == path) {
            return Some(format!("{PREFIX}{path}"));
        }
        let (module, letter) = path.split_once(&format!(".adapters.{}.lora_", self.run))?;
        let letter = letter.to_uppercase();
        Some(format!("{PREFIX}{module}.lora_{letter}.weight"))
    }

    /// The module's tensors that belong in the file: (name in the file, tensor).
    fn outgoing<M: ModuleSnapshot>(&self, module: &M) -> Vec<(String, Dtype, PackTensor)> {
        let mut found = Vec::new();
        for tensor in module.collect(None, None, false) {
            if let Some(name) = self.disk_name(&tensor.name) {
                found.push((name, Dtype::F32, tensor));
            } else if let Some(dtype) = self.frozen_head.filter(|_| tensor.name == "lm_head.weight") {
                found.push((FROZEN_HEAD.into(), dtype, tensor));
            }
        }
        found
    }

    /// Reads the written file back: what a server would load is what the module holds.
    fn compare(&self, wanted: &[(String, Dtype, PackTensor)]) -> Result<()> {
        let path = self.weights();
        let file = Checkpoint::open_file(&path, Error::adapter)?;
        let lost = |name: &str| {
            let message = format!("`{name}` does not read back as it was written");
            Error::adapter(&path, message, "the disk or its driver lost data: write to another one")
        };
        if file.entries.len() != wanted.len() {
            return Err(lost("the number of tensors"));
        }
        for (name, dtype, tensor) in wanted {
            let entry = file.entries.get(name).ok_or_else(|| lost(name))?;
            let bytes = to_bytes(tensor, *dtype, &path)?;
            if entry.dtype != *dtype || entry.shape != *tensor.shape || file.bytes(entry) != bytes {
                return Err(lost(name));
            }
        }
        Ok(())
    }

    fn read(&mut self) -> Result<&BTreeMap<String, PackTensor>> {
        if self.tensors.is_none() {
            let file = Checkpoint::open_file(&self.weights(), Error::adapter)?;
            let mut tensors = BTreeMap::new();
            for (name, entry) in &file.entries {
                let data = TensorData::new(file.values(name, entry)?, entry.shape.clone());
                tensors.insert(name.clone(), bridge::from_data(data, name.clone(), None));
            }
            self.tensors = Some(tensors);
        }
        Ok(self.tensors.as_ref().expect("was just filled"))
    }
}

/// A tensor's values in the dtype of the file.
fn to_bytes(tensor: &PackTensor, dtype: Dtype, path: &Path) -> Result<Vec<u8>> {
    let unreadable = |cause: String| Error::adapter(path, format!("`{}`: {cause}", tensor.name), "");
    let bytes = tensor.to_bytes().map_err(|e| unreadable(e.to_string()))?;
    let values = decode(dtype_of(tensor.dtype), &bytes);
    let values = values.ok_or_else(|| unreadable(format!("{:?} is no float", tensor.dtype)))?;
    encode(&values, dtype).ok_or_else(|| unreadable(format!("has values beyond the range of {dtype:?}")))
}

/// The file's word for Burn's dtype of a float.
pub(super) fn dtype_of(dtype: DType) -> Dtype {
    match dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F64 => Dtype::F64,
        _ => Dtype::F32,
    }
}

/// What is wrong with an adapter's tensors, all together; the names that nothing wants come back.
///
/// `wanted`: (name, shape), `found`: the same of the file.
///
/// # Errors
/// One error with every missing and mis-shaped tensor.
pub(super) fn check_tensors(
    path: &Path,
    wanted: &[(String, Vec<usize>)],
    found: &BTreeMap<String, Vec<usize>>,
) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for (name, want) in wanted {
        match found.get(name) {
            None => lines.push(format!("`{name}` is missing")),
            Some(got) if got != want => lines.push(format!("`{name}` has shape {got:?}, wanted {want:?}")),
            Some(_) => {}
        }
    }
    let unused = |name: &&String| *name != FROZEN_HEAD && !wanted.iter().any(|(want, _)| want == *name);
    let unused: Vec<String> = found.keys().filter(unused).cloned().collect();
    if lines.is_empty() {
        return Ok(unused);
    }
    let more = lines.len().saturating_sub(10);
    lines.truncate(10);
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    let hint = match unused.first() {
        Some(name) => format!("the file also holds `{name}`, which the model has no place for"),
        None => "ranks are wanted as `adapter_config.json` has them, widths as the base model has them: all \
                 three files must belong together"
            .into(),
    };
    let message = format!("the tensors do not fit the ranks and the base model:\n  {}", lines.join("\n  "));
    Err(Error::adapter(path, message, hint))
}

/// The warning about tensors that nothing wants.
pub(super) fn no_place_for(unused: &[String]) -> Option<String> {
    let names: Vec<String> = unused.iter().take(5).map(|name| format!("`{name}`")).collect();
    let more = if unused.len() > 5 { format!(" and {} more", unused.len() - 5) } else { String::new() };
    (!unused.is_empty()).then(|| format!("the model has no place for {}{more}: not loaded", names.join(", ")))
}

impl ModuleStore for PeftStore {
    type Error = Error;

    fn collect_from<M: ModuleSnapshot>(&mut self, module: &M) -> Result<()> {
        self.tensors = None;
        let path = self.weights();
        let tensors = self.outgoing(module);
        if tensors.is_empty() {
            let message = format!("the module has no adapter of run {}", self.run);
            return Err(Error::adapter(&self.dir, message, ""));
        }
        let outgoing = tensors.iter().map(|(name, dtype, tensor)| Outgoing {
            name: name.clone(),
            dtype: *dtype,
            shape: tensor.shape.to_vec(),
            bytes: Box::new(|| to_bytes(tensor, *dtype, &path)),
        });
        std::fs::create_dir_all(&self.dir).map_err(|source| Error::io(&self.dir, "create", source))?;
        write_tensors(&path, outgoing.collect())?;
        write_text(&self.dir.join("adapter_config.json"), &self.config)?;
        self.compare(&tensors)
    }

    fn apply_to<M: ModuleSnapshot>(&mut self, module: &mut M) -> Result<ApplyResult> {
        let path = self.weights();
        let places: Vec<(String, String, Vec<usize>)> = module
            .collect(None, None, false)
            .into_iter()
            .filter_map(|t| Some((self.disk_name(&t.name)?, t.name, t.shape.to_vec())))
            .collect();
        let stored = self.read()?;
        let wanted: Vec<_> = places.iter().map(|(name, _, shape)| (name.clone(), shape.clone())).collect();
        let found = stored.iter().map(|(name, tensor)| (name.clone(), tensor.shape.to_vec())).collect();
        let unused = check_tensors(&path, &wanted, &found)?;
        let tensors = places.iter().map(|(name, place, _)| {
            let mut tensor = stored[name].clone();
            tensor.name = place.clone();
            tensor
        });
        let tensors: Vec<PackTensor> = tensors.collect();
        let places: Vec<String> = places.into_iter().map(|(_, place, _)| place).collect();
        let filter = PathFilter::new().with_full_paths(places.iter().cloned());
        let mut result = module.apply(tensors, Some(filter), None, false);
        if let Some(error) = result.errors.first() {
            return Err(Error::adapter(&path, error.to_string(), ""));
        }
        // Burn counts what the filter leaves out, the base and other runs, as missing.
        result.missing.retain(|(path, _)| places.contains(path));
        result.unused = unused;
        Ok(result)
    }

    fn get_tensor(&mut self, name: &str) -> Result<Option<&PackTensor>> {
        Ok(self.read()?.get(name))
    }

    fn get_all_tensors(&mut self) -> Result<&BTreeMap<String, PackTensor>> {
        self.read()
    }

    fn keys(&mut self) -> Result<Vec<String>> {
        Ok(self.read()?.keys().cloned().collect())
    }
}

fn run_of<'a>(decoder: &'a Decoder, run: usize, dir: &Path) -> Result<&'a Run> {
    decoder.runs().get(run).ok_or_else(|| {
        let message = format!("there is no adapter run {run}: {} are attached", decoder.runs().len());
        Error::adapter(dir, message, "")
    })
}

/// Writes an adapter run as PEFT would: a new folder appears when it is whole; in a folder that
/// exists each file is replaced, but for a card (`README.md`).
///
/// # Errors
/// Where there is no such run, or the files cannot be written or don't read back.
pub fn save_adapter(decoder: &Decoder, run: usize, dir: &Path, meta: &AdapterMeta) -> Result<()> {
    let base = meta.base_model_name_or_path.as_deref();
    let card = base.map(|name| Card::of_base(name, None)).unwrap_or_default();
    save_adapter_with_card(decoder, run, dir, meta, &card)
}

/// As [`save_adapter`], with a card that knows more.
///
/// # Errors
/// As [`save_adapter`].
pub fn save_adapter_with_card(
    decoder: &Decoder,
    run: usize,
    dir: &Path,
    meta: &AdapterMeta,
    card: &Card,
) -> Result<()> {
    let spec = &run_of(decoder, run, dir)?.spec;
    let save = |dir: &Path| {
        decoder.save_into(&mut PeftStore::new(decoder, run, dir, meta)?)?;
        card.write_adapter(dir, spec)
    };
    if dir.exists() { save(dir) } else { in_new_folder(dir, save) }
}

/// Loads a PEFT adapter into run `run`: one that is attached (ranks and targets must agree), or the
/// next one, which is attached as the adapter's config says.
///
/// # Errors
/// Where the adapter is of a kind that isn't computed here, doesn't fit the decoder, or is broken;
/// the decoder is then as it was.
pub fn load_adapter(decoder: &mut Decoder, run: usize, dir: &Path) -> Result<AdapterReport> {
    let config = AdapterConfig::load(dir)?;
    let path = dir.join("adapter_config.json");
    let mut report = AdapterReport {
        base_model_name_or_path: config.base_model_name_or_path.clone(),
        ..Default::default()
    };
    let mut filled = decoder.clone();
    match decoder.runs().get(run) {
        Some(attached) => drop(agree(attached, &config, &decoder.modules(), &path)?),
        None if run == decoder.runs().len() => {
            let attached = filled.attach(&config.spec, 0);
            report.warnings = attached.map_err(|problems| unfit(&path, problems))?;
        }
        None => drop(run_of(decoder, run, dir)?),
    }
    let mut store = PeftStore::new(&filled, run, dir, &AdapterMeta::default())?;
    let applied = filled.load_from(&mut store)?;
    report.warnings.extend(no_place_for(&applied.unused));
    report.modules = filled.runs()[run].modules.len();
    *decoder = filled.unstacked();
    Ok(report)
}

/// What an adapter's config asks for and the model doesn't have.
pub(super) fn unfit(path: &Path, problems: Vec<Problem>) -> Error {
    let text: Vec<String> = problems.iter().map(|p| p.message.clone()).collect();
    let mut hints: Vec<String> = problems.into_iter().map(|p| p.hint).filter(|h| !h.is_empty()).collect();
    hints.dedup();
    Error::adapter(path, text.join("; "), hints.join("; "))
}

/// The base model that an adapter names.
pub(crate) fn named_base(adapter: &Path) -> Option<String> {
    AdapterConfig::load(adapter).ok()?.base_model_name_or_path.filter(|name| !name.is_empty())
}

/// Whether the model in `base` may be the one called `named`.
pub(crate) fn is_base(named: &str, base: &Path) -> bool {
    let Some(last) = named.trim_end_matches('/').rsplit('/').next().filter(|last| !last.is_empty()) else {
        return true;
    };
    let whole = std::fs::canonicalize(base).unwrap_or_else(|_| base.into());
    // A hub cache holds `models--Qwen--Qwen3-0.6B/snapshots/HASH`.
    let known = whole.iter().any(|part| {
        let part = part.to_string_lossy();
        // The cache of what is compiled in: `embertune--tiny-HASH`.
        let unhashed = part.rsplit_once('-').map_or("", |(name, _)| name);
        part == last || [&*part, unhashed].iter().any(|part| part.ends_with(&format!("--{last}")))
    });
    known || std::fs::canonicalize(named).is_ok_and(|named| named == whole)
}

/// A warning where an adapter names another base than `base`.
pub(super) fn other_base(adapter: &AdapterConfig, base: &Path) -> Option<String> {
    let named = adapter.base_model_name_or_path.as_deref().filter(|named| !is_base(named, base))?;
    Some(format!(
        "the adapter was made for `{named}`; the shapes fit `{}`, the values may not",
        base.display()
    ))
}
