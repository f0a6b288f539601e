//! What a run stands on: all that can be found out before the weights are read. `sft` and `check` both stand on
//! it, so that what the one refuses or warns of, the other does too.

use std::path::{Path, PathBuf};

use burn::tensor::DType;

use super::ranks::Ranks;
use super::resume::{self, Begun, Keys};
use super::sample::Samples;
use super::schedule::Schedule;
use super::setup::{self, Data, go_on};
use super::sft::StopFlag;
use crate::checkpoint::{Locks, RunFolder, Start};
use crate::config::{OptimKind, Plan, SftConfig};
use crate::data::{ChatTokenizer, DataReport};
use crate::device::{Selected, compute_dtype, select};
use crate::error::Problem;
use crate::model::{HfConfig, Load, LoraSpec, Memory, Sizes, check_weights, sizes, untrained_tokens};
use crate::report::{Event, Report, gib};
use crate::{Error, Result, hub, ops};

/// Whether the run will go on to read the model's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Weights {
    /// They are fetched if they aren't there.
    Needed,
    /// What is there of them is looked at.
    IfThere,
}

/// Everything but the model.
pub(super) struct Ground {
    pub folder: RunFolder,
    /// No other run writes to the folder while this one lives.
    pub locks: Locks,
    pub start: Start,
    pub selected: Selected,
    /// What frozen weights are held and computed in.
    pub dtype: DType,
    /// The folder of `config.json` and the tokenizer; with [`Weights::Needed`], of the weights too.
    pub base: PathBuf,
    /// Whether the weights are there; with [`Weights::Needed`] they are.
    pub has_weights: bool,
    pub sizes: Sizes,
    pub memory: Memory,
    /// Bytes that are free now, where that is known.
    pub free: Option<u64>,
    pub data: Data,
    pub samples: Option<Samples>,
    pub keys: Keys,
    /// Where the run begins; the data are there.
    pub begun: Begun,
    /// The step that the run ends at.
    pub max_steps: usize,
    pub schedule: Schedule,
}

impl Ground {
    /// Looks at device, folder, model files, data and checkpoint, in this order; changes nothing.
    pub fn survey(
        config: &SftConfig,
        plan: &Plan,
        weights: Weights,
        ranks: &mut Ranks,
        report: &mut dyn Report,
        stop: &StopFlag,
    ) -> Result<Self> {
        // ---- device and folder ----
        let selected = select(&plan.device)?;
        let dtype = compute_dtype(&selected, &config.model.dtype)?;
        check_moments(&config.optim.kind, &selected)?;
        ranks.on_device(&selected.device)?;
        let folder = RunFolder::new(config);
        let mut locks = Locks::default();
        let start = ranks.from_first(|| {
            folder.check_writable()?;
            locks = Locks::of_existing(&folder)?;
            folder.start(config)
        })?;
        warn(report, full_without_ckpt(config));
        setup::init_adapter(config)?;
        warn(report, selected.warning.clone());

        // ---- model ----
        go_on(config, ranks, stop)?;
        let base = match weights {
            Weights::Needed => hub::model_dir(&config.model.name)?,
            Weights::IfThere => hub::config_dir(&config.model.name)?,
        };
        let hf = HfConfig::load(&base)?;
        warn(report, plan.check_positions(hf.max_position_embeddings)?);
        let spec = config.model.lora.as_ref().map(LoraSpec::from_config);
        let sizes = sizes(&hf, spec.as_ref(), &selected.device)?;
        warn(report, sizes.warnings.clone());
        let weights = check_weights(&base, &selected.device)?;
        warn(report, weights.is_none().then(|| no_weights(config)));
        let has_weights = weights.is_some();
        warn(report, weights.into_iter().flat_map(|report| report.warnings));
        let estimate = |rows| Memory::estimate(&hf, sizes.counts, load(config, plan, &selected, dtype, rows));
        let (memory, free) = (estimate(plan.rows_per_micro_batch), free_bytes(&selected));
        warn(report, too_large(plan, &selected, free, |rows| estimate(rows).total())?);

        // ---- data ----
        go_on(config, ranks, stop)?;
        let mut data = setup::data(config, &base, &hf, ranks, report, stop)?;
        if let Some(tokenizer) = data.tokenizer.as_ref().filter(|_| data.loader.report().has_chats()) {
            warn(report, untrained_chat_tokens(config, &base, tokenizer)?);
        }

        let samples = Samples::prepare(config, data.tokenizer.as_ref(), hf.max_position_embeddings)?;
        warn(report, too_little_data(config, data.loader.report()));

        // ---- what an earlier process left ----
        go_on(config, ranks, stop)?;
        let keys = resume::keys(config, &base)?;
        let begun = match &start {
            Start::Fresh => Begun::default(),
            Start::Resume { path, .. } => {
                resume::fit(config, path, folder.load_state(path)?, &keys, &mut data.loader)?
            }
        };
        warn(report, begun.changes.iter().cloned());
        let max_steps = setup::last_step(config, &data.loader, begun.progress.step);
        let schedule = setup::schedule(config, &begun, max_steps)?;
        #[rustfmt::skip]
        let ground = Self {
            folder, locks, start, selected, dtype, base, has_weights, sizes, memory, free, data, samples, keys, begun,
            max_steps, schedule,
        };
        Ok(ground)
    }
}

fn warn(report: &mut dyn Report, warnings: impl IntoIterator<Item = String>) {
    warnings.into_iter().for_each(|warning| report.event(&Event::Warning(warning)));
}

/// Refuses empty names of folders.
///
/// # Errors
/// The key that is empty.
pub(super) fn check_folders(config: &SftConfig) -> Result<()> {
    let saves = config.ckpt.as_ref().and_then(|ckpt| ckpt.output_dir.as_ref());
    let folders = [("output_dir", Some(&config.output_dir)), ("ckpt.output_dir", saves)];
    let empty = folders.into_iter().filter(|(_, path)| path.is_some_and(|p| p.as_os_str().is_empty()));
    let problem = |(key, _)| Problem {
        place: String::new(),
        message: format!("`{key}` is empty, wanted a folder"),
        hint: format!("`{key} = \".\"` is the folder that the program runs in"),
    };
    let problems: Vec<Problem> = empty.map(problem).collect();
    if problems.is_empty() { Ok(()) } else { Err(Error::Config(problems)) }
}

fn no_weights(config: &SftConfig) -> String {
    let name = &config.model.name;
    match Path::new(name).is_dir() {
        true => {
            format!("`{name}` holds no weights: `sft` needs its `model.safetensors`, or shards with an index")
        }
        false => format!("the weights of `{name}` are not on this machine: `sft` downloads them first"),
    }
}

fn full_without_ckpt(config: &SftConfig) -> Option<String> {
    let lost = config.model.lora.is_none() && config.ckpt.is_none();
    lost.then(|| "full fine-tuning without `[ckpt]`: the trained weights are not saved; add `--ckpt`".into())
}

/// A step that wants more rows than there are.
fn too_little_data(config: &SftConfig, data: &DataReport) -> Option<String> {
    let (rows, wanted) = (data.packed_rows, config.data.batch_size());
    if data.rows == 0 || rows >= wanted {
        return None;
    }
    let all = if rows == 1 { "1 packed row".into() } else { format!("{rows} packed rows") };
    let so = match config.num_epochs {
        Some(epochs) => {
            format!("{epochs} epochs of them make {:.1} steps", (epochs * rows) as f64 / wanted as f64)
        }
        None => format!("each step goes through them {:.1} times", wanted as f64 / rows.max(1) as f64),
    };
    let seq_len = config.data.seq_len();
    Some(format!(
        "`data.batch_size` is {wanted}, and all the data fill {all} of {seq_len} tokens: {so}; lower \
         `data.batch_size` or `data.seq_len`"
    ))
}

/// More memory than is free: a warning on the CPU, which may swap, an error on a card, with the largest micro-batch
/// that fits.
fn too_large(
    plan: &Plan,
    selected: &Selected,
    free: Option<u64>,
    estimate: impl Fn(usize) -> u64,
) -> Result<Option<String>> {
    let rows = plan.rows_per_micro_batch;
    let Some(free) = free.filter(|free| estimate(rows) > *free) else { return Ok(None) };
    let hint = what_fits(rows, free, &estimate);
    let (needed, free) = (gib(estimate(rows)), gib(free));
    let message = format!(
        "training is estimated to take {needed:.1} GiB on `{}`, and {free:.1} GiB are free",
        selected.name
    );
    if selected.name == "flex" {
        Ok(Some(format!("{message}: {hint}")))
    } else {
        Err(Error::device(message, hint))
    }
}

fn what_fits(rows: usize, free: u64, estimate: &impl Fn(usize) -> u64) -> String {
    match (1..rows).rev().find(|&rows| estimate(rows) <= free) {
        Some(rows) => format!("`data.micro_batch_size = {rows}` is the largest that fits"),
        None => {
            "not even one row fits: lower `data.seq_len`, switch `[model.ac]` on, or take a smaller model"
                .into()
        }
    }
}

fn load(config: &SftConfig, plan: &Plan, selected: &Selected, dtype: DType, rows: usize) -> Load {
    let on_card = selected.name.starts_with("cuda");
    let full_in_half = config.model.lora.is_none() && config.model.optimization_dtype == "bfloat16";
    let fused = on_card && dtype == DType::BF16;
    Load {
        tokens: rows * plan.seq_len,
        compute_bytes: dtype.size(),
        trained_bytes: if full_in_half { 2 } else { 4 },
        optimizer_bytes: match config.optim.kind {
            OptimKind::AdamW { ref moments_dtype, .. } if moments_dtype == "bfloat16" => 4,
            OptimKind::AdamW { .. } => 8,
            OptimKind::Sgd { .. } | OptimKind::Muon { .. } => 4,
            OptimKind::SignSgd => 0,
        },
        recompute: config.model.ac.as_ref().map(|ac| ac.freq),
        fused: fused.then_some(config.model.lora.is_some()),
    }
}

fn check_moments(kind: &OptimKind, selected: &Selected) -> Result<()> {
    match kind {
        OptimKind::AdamW { moments_dtype, .. }
            if moments_dtype == "bfloat16" && !ops::holds_moments_in_bf16(&selected.device) =>
        {
            Err(Error::device(
                format!(
                    "`{}` can't hold AdamW's means in `optim.moments_dtype = \"bfloat16\"`",
                    selected.name
                ),
                "set `optim.moments_dtype = \"float32\"`, or train on CUDA or the CPU",
            ))
        }
        _ => Ok(()),
    }
}

/// What is free now on the card, or of the machine's memory where that is what the device has (Linux's
/// `/proc/meminfo`).
fn free_bytes(selected: &Selected) -> Option<u64> {
    #[cfg(feature = "cuda")]
    if let Some(free) = crate::ops::cuda::free_bytes(&selected.device) {
        return Some(free);
    }
    if selected.name != "flex" {
        return None;
    }
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// A warning where the chat template prints tokens that the base model never learned and that the run won't
/// teach it: without it such a model doesn't learn to stop.
fn untrained_chat_tokens(
    config: &SftConfig,
    base: &Path,
    tokenizer: &ChatTokenizer,
) -> Result<Option<String>> {
    let Some(lora) = &config.model.lora else { return Ok(None) };
    if lora.modules_to_save.iter().any(|module| module.ends_with("embed_tokens")) {
        return Ok(None);
    }
    let (special, printed) = tokenizer.special_ids();
    let untrained = untrained_tokens(base, &printed, special)?;
    if untrained.is_empty() {
        return Ok(None);
    }
    let names = untrained.iter().map(|&id| Ok(format!("`{}`", tokenizer.decode(&[id], false)?)));
    Ok(Some(format!(
        "the chat template prints {}, which this base model was never trained on (by their rows of the \
         embedding), and the adapter doesn't train them: it may not learn to stop; set \
         `model.lora.modules_to_save = [\"embed_tokens\", \"lm_head\"]`, start from the instruct model, or name a \
         template of known tokens in `[tokenizer] chat_template`",
        names.collect::<Result<Vec<_>>>()?.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::what_fits;

    #[test]
    fn the_largest_micro_batch_that_fits_is_named() {
        let estimate = |rows: usize| 10 + 4 * rows as u64;
        assert!(what_fits(8, 30, &estimate).contains("`data.micro_batch_size = 5`"));
        assert!(what_fits(2, 13, &estimate).contains("not even one row"));
    }
}
