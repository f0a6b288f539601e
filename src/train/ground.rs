//! What a run stands on: all that can be found out before the weights are read. `sft` and `check` both stand on
//! it, so that what the one refuses or warns of, the other does too.

use std::path::{Path, PathBuf};

use burn::tensor::DType;

use super::fit::Room;
use super::ranks::Ranks;
use super::resume::{self, Begun, Keys};
use super::sample::Samples;
use super::schedule::Schedule;
use super::setup::{self, Data, go_on};
use super::sft::StopFlag;
use crate::checkpoint::{Locks, RunFolder, Start};
use crate::config::{DataConfig, OptimKind, Plan, SftConfig};
use crate::data::{ChatTokenizer, DataReport};
use crate::device::{Selected, compute_dtype, free_bytes, select};
use crate::error::Problem;
use crate::export::check_start;
use crate::model::{HfConfig, LoraSpec, Sizes, check_weights, sizes, untrained_tokens};
use crate::report::{Event, Report, gib};
use crate::{Error, Result, hub, ops};

/// What the run's ground is looked at for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To train on it: weights are fetched if they aren't there.
    Train,
    /// To tell of it: what is there of the weights is looked at.
    Check {
        /// The device's memory in bytes, in the place of what is free now.
        memory: Option<u64>,
        /// Whether it is asked what fits, so that too little memory is an answer.
        fit: bool,
    },
}

/// Everything but the model.
pub(super) struct Ground {
    pub folder: RunFolder,
    /// Why the run can't begin in its folder; only for [`Purpose::Check`], which goes on as if it were empty.
    pub in_the_way: Option<Error>,
    /// No other run writes to the folder while this one lives.
    pub locks: Locks,
    pub start: Start,
    pub selected: Selected,
    /// What frozen weights are held and computed in.
    pub dtype: DType,
    /// The folder of `config.json` and the tokenizer; for [`Purpose::Train`], of the weights too.
    pub base: PathBuf,
    /// Whether the weights are there; for [`Purpose::Train`] they are.
    pub has_weights: bool,
    pub sizes: Sizes,
    /// How much memory it takes.
    pub room: Room,
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
        purpose: Purpose,
        ranks: &mut Ranks,
        report: &mut dyn Report,
        stop: &StopFlag,
    ) -> Result<Self> {
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
        });
        let (start, in_the_way) = match (start, purpose) {
            (Err(error @ Error::Checkpoint { .. }), Purpose::Check { .. }) => (Start::Fresh, Some(error)),
            (start, _) => (start?, None),
        };
        let place = (selected, dtype, folder, locks, start);
        match Self::stand(place, config, plan, purpose, ranks, report, stop) {
            Ok(ground) => Ok(Self { in_the_way, ..ground }),
            Err(error) => Err(error.after(in_the_way)),
        }
    }

    /// The rest, once it is clear where the run computes and where it begins.
    fn stand(
        (selected, dtype, folder, locks, start): (Selected, DType, RunFolder, Locks, Start),
        config: &SftConfig,
        plan: &Plan,
        purpose: Purpose,
        ranks: &mut Ranks,
        report: &mut dyn Report,
        stop: &StopFlag,
    ) -> Result<Self> {
        warn(report, full_without_ckpt(config));
        warn(report, (config.optim.lr == 0.0).then(|| "`optim.lr` is 0: nothing will be learned".into()));
        let adapter = setup::init_adapter(config)?;
        warn(report, selected.warning.clone());

        // ---- model ----
        go_on(config, ranks, stop)?;
        let base = match purpose {
            Purpose::Train => hub::model_dir(&config.model.name)?,
            Purpose::Check { .. } => hub::config_dir(&config.model.name)?,
        };
        let hf = HfConfig::load(&base)?;
        warn(report, plan.check_positions(hf.max_position_embeddings)?);
        let spec = config.model.lora.as_ref().map(LoraSpec::from_config);
        let sizes = sizes(&hf, spec.as_ref(), &selected.device)?;
        warn(report, sizes.warnings.clone());
        if let (Start::Fresh, Some(adapter), Some(spec)) = (&start, &adapter, &spec) {
            warn(report, check_start(adapter, spec, &hf)?);
        }
        let weights = check_weights(&base, &selected.device)?;
        warn(report, weights.is_none().then(|| no_weights(config)));
        let has_weights = weights.is_some();
        warn(report, weights.into_iter().flat_map(|report| report.warnings));
        let room = Room::new(config, plan, (&selected, dtype), &hf, &sizes);
        let (free, fit) = match purpose {
            Purpose::Train => (free_bytes(&selected), false),
            Purpose::Check { memory, fit } => (memory.or_else(|| free_bytes(&selected)), fit),
        };
        warn(report, if fit { None } else { too_large(&room, &selected, free)? });

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
            folder, in_the_way: None, locks, start, selected, dtype, base, has_weights, sizes, room, free, data,
            samples, keys, begun, max_steps, schedule,
        };
        Ok(ground)
    }
}

fn warn(report: &mut dyn Report, warnings: impl IntoIterator<Item = String>) {
    warnings.into_iter().for_each(|warning| report.event(&Event::Warning(warning)));
}

/// Refuses empty names of folders, and a folder of data that the run writes into.
///
/// # Errors
/// The keys.
pub(super) fn check_folders(config: &SftConfig) -> Result<()> {
    let saves = config.ckpt.as_ref().and_then(|ckpt| ckpt.output_dir.as_ref());
    let folders = [("output_dir", Some(&config.output_dir)), ("ckpt.output_dir", saves)];
    let empty = folders.into_iter().filter(|(_, path)| path.is_some_and(|p| p.as_os_str().is_empty()));
    let problem = |(key, _)| Problem {
        place: String::new(),
        message: format!("`{key}` is empty, wanted a folder"),
        hint: format!("`{key} = \".\"` is the folder that the program runs in"),
    };
    let mut problems: Vec<Problem> = empty.map(problem).collect();
    problems.extend(folders.into_iter().filter_map(|(key, path)| written_into(config, key, path?)));
    if problems.is_empty() { Ok(()) } else { Err(Error::Config(problems)) }
}

/// A data folder that holds what `key` names: the run's own files would be read as rows when it is resumed. One with a
/// card may name its files there.
fn written_into(config: &SftConfig, key: &str, output: &Path) -> Option<Problem> {
    let DataConfig::Sft(data) = &config.data else { return None };
    let folder = Path::new(&data.name).canonicalize().ok().filter(|path| path.is_dir())?;
    // The folder itself may not be there yet.
    let output = std::path::absolute(output).ok()?;
    let there = output.ancestors().find_map(|path| path.canonicalize().ok())?;
    (there.starts_with(&folder) && !folder.join("README.md").exists()).then(|| Problem {
        place: String::new(),
        message: format!(
            "`data.name` = `{}` holds `{key}`, so that the run's own files would be read as data",
            data.name
        ),
        hint: format!(
            "name a file or pattern (`data.name = \"*.jsonl\"`), or set `{key}` to a folder elsewhere"
        ),
    })
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
fn too_large(room: &Room, selected: &Selected, free: Option<u64>) -> Result<Option<String>> {
    let needed = room.memory(room.rows).total();
    let Some(free) = free.filter(|free| needed > *free) else { return Ok(None) };
    let hint = room.advice(free);
    let (needed, free) = (gib(needed), gib(free));
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
