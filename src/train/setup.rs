//! The pieces of a run's setup: device, model, data, what a checkpoint is held against, sizes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::DType;
use xxhash_rust::xxh3::Xxh3;

use super::metrics::{FlopCounts, peak_flops as peak_of};
use super::optim::Optimizer;
use crate::checkpoint::{Progress, RunFolder, changes};
use crate::config::{DataConfig, Plan, SftConfig};
use crate::data::{Batch, ChatTokenizer, Loader, LoaderState, validation_batches};
use crate::device::{Selected, compute_dtype, hardware_name, select};
use crate::model::{Decoder, HfConfig, LoraSpec};
use crate::report::{Event, Report, RunInfo};
use crate::{Error, Result, hub};

/// The device, with a warning where it will disappoint.
pub(super) fn device(config: &SftConfig, plan: &Plan, report: &mut dyn Report) -> Result<Selected> {
    let selected = select(&plan.device)?;
    compute_dtype(&selected, &config.model.dtype)?;
    if let Some(warning) = &selected.warning {
        report.event(&Event::Warning(warning.clone()));
    }
    Ok(selected)
}

/// A model that is ready to train.
pub(super) struct Loaded {
    /// The folder it was read from.
    pub base: PathBuf,
    pub model: Decoder,
    /// What to tell about it.
    pub details: Vec<String>,
}

pub(super) fn model(
    config: &SftConfig,
    plan: &Plan,
    selected: &Selected,
    report: &mut dyn Report,
) -> Result<Loaded> {
    let base = hub::model_dir(&config.model.name)?;
    let limit = HfConfig::load(&base)?.max_position_embeddings;
    if let Some(warning) = plan.check_positions(limit)? {
        report.event(&Event::Warning(warning));
    }
    let dtype = compute_dtype(selected, &config.model.dtype)?;
    let mut progress = |done, total| report.progress("loading weights", done, total);
    let (mut model, loaded) = Decoder::load_with_report(&base, dtype, &selected.device, &mut progress)?;
    loaded.warnings.into_iter().for_each(|w| report.event(&Event::Warning(w)));
    let mut details = Vec::new();
    match &config.model.lora {
        None => {
            model = model.train_all();
            if config.ckpt.is_none() {
                let warning = "full fine-tuning without `[ckpt]`: the trained weights are not saved";
                report.event(&Event::Warning(warning.into()));
            }
        }
        Some(lora) => {
            let attached = model.attach_lora(&[LoraSpec::from_config(lora)], config.seed)?;
            attached.warnings.into_iter().for_each(|w| report.event(&Event::Warning(w)));
            details.push(format!(
                "LoRA: rank {}, alpha {}, on {} modules",
                lora.rank, lora.alpha, attached.modules
            ));
        }
    }
    Ok(Loaded { base, model, details })
}

/// Data of a run.
pub(super) struct Data {
    /// `None` with made-up tokens.
    pub tokenizer: Option<Arc<ChatTokenizer>>,
    pub loader: Loader,
    /// The held-out set; empty without `[val]`.
    pub val: Vec<Batch>,
}

pub(super) fn data(
    config: &SftConfig,
    base: &Path,
    model: &Decoder,
    report: &mut dyn Report,
) -> Result<Data> {
    let vocab_size = model.config().vocab_size;
    let longest = config.model.max_position_embeddings.unwrap_or(model.config().max_position_embeddings);
    let needs_tokenizer = config.val.is_some() || matches!(config.data, DataConfig::Sft(_));
    let tokenizer =
        if needs_tokenizer { Some(Arc::new(ChatTokenizer::load(base, &config.tokenizer)?)) } else { None };
    let loader = match (&config.data, &tokenizer) {
        (DataConfig::Sft(data), Some(tokenizer)) => {
            // The order of the data depends on `data.seed` alone.
            Loader::new(data, tokenizer.clone(), 0, config.num_epochs, vocab_size, longest)?
        }
        (DataConfig::Fake(data), _) => Loader::fake(data, vocab_size)?,
        (DataConfig::Sft(_), None) => unreachable!("a tokenizer is loaded for conversations"),
    };
    loader.report().warnings().into_iter().for_each(|w| report.event(&Event::Warning(w)));
    let val = match (&config.val, &tokenizer) {
        (Some(val), Some(tokenizer)) => {
            let held_out = validation_batches(&val.data, tokenizer.clone(), vocab_size, longest)?;
            for warning in held_out.report.warnings() {
                report.event(&Event::Warning(format!("held-out data: {warning}")));
            }
            held_out.batches
        }
        _ => Vec::new(),
    };
    Ok(Data { tokenizer, loader, val })
}

/// Where the run ends: at `max_steps`, or with the data if that is sooner.
pub(super) fn last_step(config: &SftConfig, loader: &Loader, done: usize) -> usize {
    let by_data = loader.remaining_steps().map(|steps| done + steps);
    [config.max_steps, by_data]
        .into_iter()
        .flatten()
        .min()
        .expect("checked: `max_steps` or `num_epochs` is set")
}

/// A line about what will be trained on.
pub(super) fn describe_data(loader: &Loader) -> Vec<String> {
    let report = loader.report();
    if report.rows == 0 {
        return vec!["Data: made-up tokens".into()];
    }
    vec![format!(
        "Data: {} of {} rows, {} tokens, {} trained; {} packed rows of {} tokens an epoch",
        report.documents, report.rows, report.tokens, report.trained, report.packed_rows, report.seq_len
    )]
}

/// Each document of the batches as text, what is trained between ⟦ and ⟧.
pub(super) fn marked_documents(tokenizer: &ChatTokenizer, batches: &[Batch]) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    for batch in batches {
        for w in batch.cu_seqlens.windows(2) {
            let (start, end) = (w[0] as usize, w[1] as usize);
            // Position t predicts token t + 1, so that is the token the mask is about.
            let trained = |t: usize| t > start && batch.loss_mask[t - 1];
            let (mut text, mut from) = (String::new(), start);
            for t in start + 1..=end {
                if t == end || trained(t) != trained(from) {
                    let part = tokenizer.decode(&batch.input_ids[from..t], false)?;
                    text += &if trained(from) { format!("⟦{part}⟧") } else { part };
                    from = t;
                }
            }
            texts.push(text);
        }
    }
    Ok(texts)
}

/// What a checkpoint is held against.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Keys {
    /// Keys that have to stay.
    pub fixed: BTreeMap<String, String>,
    /// Keys that may change, with a warning.
    pub settings: BTreeMap<String, String>,
}

/// Sections whose keys say nothing about the numbers that come out.
const NEUTRAL: [&str; 9] =
    ["ckpt", "log", "val", "max_steps", "num_epochs", "output_dir", "clean_output_dir", "dry_run", "device"];
/// LoRA keys that may change from one process to the next.
const LORA_SETTINGS: [&str; 2] = ["model.lora.dropout", "model.lora.init_lora_weights"];

pub(super) fn identity(config: &SftConfig, base: &Path) -> Result<Keys> {
    let table: toml::Table = config.to_toml().parse().expect("a configuration's own text reads back");
    let mut flat = BTreeMap::new();
    flatten("", &toml::Value::Table(table), &mut flat);
    let mut keys = Keys::default();
    for (key, value) in flat {
        let section = key.split('.').next().unwrap_or_default();
        if NEUTRAL.contains(&section) || key == "model.name" || key.starts_with("model.ac") {
            continue;
        }
        let lora = key.starts_with("model.lora") && !LORA_SETTINGS.contains(&key.as_str());
        if lora || key == "optim.type" {
            keys.fixed.insert(key, value);
        } else {
            keys.settings.insert(key, value);
        }
    }
    keys.fixed.insert("model.name".into(), fingerprint(base)?);
    Ok(keys)
}

/// `a.b = value` for each value; lists of words sorted, since their order has no meaning.
fn flatten(path: &str, value: &toml::Value, flat: &mut BTreeMap<String, String>) {
    match value {
        toml::Value::Table(table) => {
            for (key, value) in table {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(&path, value, flat);
            }
        }
        toml::Value::Array(list) if list.iter().all(toml::Value::is_str) => {
            let mut words: Vec<_> = list.iter().filter_map(toml::Value::as_str).collect();
            words.sort_unstable();
            flat.insert(path.into(), words.join(", "));
        }
        value => {
            flat.insert(path.into(), value.to_string());
        }
    }
}

/// Tells base models apart, wherever the folder lies: a hash of `config.json` and, of each weights
/// file, the size, the first bytes (its header), a stretch in the middle and the end.
fn fingerprint(base: &Path) -> Result<String> {
    const STRETCH: u64 = 1 << 16;
    let mut hash = Xxh3::new();
    let config = base.join("config.json");
    hash.update(&fs::read(&config).map_err(|e| Error::io(&config, "read", e))?);
    let entries = fs::read_dir(base).map_err(|e| Error::io(base, "list", e))?;
    let mut files: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
    files.sort();
    for path in files {
        let failed = |e| Error::io(&path, "read", e);
        let mut file = File::open(&path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        hash.update(&size.to_le_bytes());
        for start in [0, size / 2, size.saturating_sub(STRETCH)] {
            let mut bytes = Vec::new();
            file.seek(SeekFrom::Start(start)).map_err(failed)?;
            file.by_ref().take(STRETCH).read_to_end(&mut bytes).map_err(failed)?;
            hash.update(&bytes);
        }
    }
    Ok(format!("a model with fingerprint {:016x}", hash.digest()))
}

/// What a checkpoint brings.
pub(super) struct Resumed {
    pub progress: Progress,
    pub schedule_step: usize,
    /// `None` with `ckpt.skip_dataloader`.
    pub loader: Option<LoaderState>,
    /// Keys that are other than in the checkpoint and may be.
    pub changes: Vec<String>,
}

/// Puts a checkpoint into model and optimizer.
pub(super) fn resume(
    config: &SftConfig,
    folder: &RunFolder,
    path: &Path,
    keys: &Keys,
    model: &mut Decoder,
    optimizer: &mut Optimizer,
) -> Result<Resumed> {
    let ckpt = config.ckpt.as_ref().expect("`ckpt.resume_step` is in `[ckpt]`");
    let device = model.device();
    let mut checkpoint = folder.load(path, ckpt.skip_optimizer, &device)?;
    let mut fixed = keys.fixed.clone();
    if ckpt.skip_optimizer {
        fixed.remove("optim.type");
        checkpoint.state.identity.remove("optim.type");
    }
    checkpoint.check_identity(&fixed)?;
    let trainable = model.trainable();
    let wanted: Vec<_> = trainable.iter().map(|p| (p.name.as_str(), p.shape.as_slice())).collect();
    let values = checkpoint.take_trainable(&wanted)?.into_iter().map(|t| t.values).collect();
    *model = model.clone().set_trainable(values);
    let state = checkpoint.state;
    if !ckpt.skip_optimizer {
        let file = path.join("optimizer.safetensors");
        optimizer
            .restore(checkpoint.optimizer, state.optimizer_updates)
            .map_err(|message| Error::checkpoint(file, message, "set `ckpt.skip_optimizer = true`"))?;
    }
    let changes = changes(&state.settings, &keys.settings);
    Ok(Resumed {
        progress: if ckpt.skip_progress { Progress::default() } else { state.progress },
        schedule_step: if ckpt.skip_scheduler { 0 } else { state.schedule_step },
        loader: (!ckpt.skip_dataloader).then_some(state.loader),
        changes,
    })
}

pub(super) fn info(
    config: &SftConfig,
    selected: &Selected,
    model: &Decoder,
    details: Vec<String>,
    max_steps: usize,
    step: usize,
) -> RunInfo {
    let counts = model.parameter_counts();
    let hardware = hardware_name(&selected.device).map(|name| format!(" ({name})"));
    RunInfo {
        model: config.model.name.clone(),
        device: format!("{}{}", selected.name, hardware.unwrap_or_default()),
        dtype: format!("{:?}", model.dtype()).to_lowercase(),
        parameters: counts.total,
        trainable: counts.trainable,
        details,
        max_steps: Some(max_steps),
        resumed_step: (step > 0).then_some(step),
        output_dir: config.output_dir.clone(),
    }
}

/// The peak of the device, if it is known for the type that the model computes in.
pub(super) fn peak_flops(selected: &Selected, model: &Decoder) -> Option<f64> {
    let half = matches!(model.dtype(), DType::BF16 | DType::F16);
    hardware_name(&selected.device).filter(|_| half).as_deref().and_then(peak_of)
}

pub(super) fn flop_counts(model: &Decoder) -> FlopCounts {
    let c = model.config();
    let (e, d) = (c.hidden_size, c.head_dim);
    let attention = 2 * e * d * (c.num_attention_heads + c.num_key_value_heads);
    let layer = attention + 3 * e * c.intermediate_size;
    let trainable = model.trainable();
    let sum = |wanted: &dyn Fn(&str) -> bool| -> usize {
        let chosen = trainable.iter().filter(|p| wanted(&p.name));
        chosen.map(|p| p.shape.iter().product::<usize>()).sum()
    };
    let adapter = |name: &str| name.contains(".adapters.");
    let head = if c.tie_word_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
    FlopCounts {
        linear_weights: layer * c.num_hidden_layers,
        trained_linear_weights: sum(&|name| name.ends_with("_proj.weight")),
        head_weights: c.vocab_size * e,
        head_trained: trainable.iter().any(|p| p.name == head),
        adapter_weights: sum(&adapter),
        attention_width: c.num_hidden_layers * c.num_attention_heads * d,
    }
}

/// What full fine-tuning holds its weights in between steps; adapters always in f32.
pub(super) fn optimization_dtype(config: &SftConfig) -> DType {
    match config.model.optimization_dtype.as_str() {
        "bfloat16" if config.model.lora.is_none() => DType::BF16,
        _ => DType::F32,
    }
}

/// What a fully fine-tuned model is written in: as its base is stored.
pub(super) fn stored_dtype(config: &SftConfig, model: &Decoder) -> DType {
    match model.config().dtype.as_deref() {
        _ if optimization_dtype(config) == DType::BF16 => DType::BF16,
        Some("bfloat16") => DType::BF16,
        Some("float16") => DType::F16,
        _ => DType::F32,
    }
}
