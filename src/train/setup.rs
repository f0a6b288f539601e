//! The pieces of a run's setup: device, model, data, optimizer and schedule, sizes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::DType;

use super::ground::Ground;
use super::metrics::{FlopCounts, MetricsFile, cut_after, peak_flops};
use super::optim::Optimizer;
use super::ranks::Ranks;
use super::resume::{Begun, Keys};
use super::schedule::Schedule;
use super::sft::StopFlag;
use super::step::StepOptions;
use crate::checkpoint::{RunFolder, Start, find_adapter};
use crate::config::{DataConfig, LoraConfig, Plan, RunConfig, SftConfig};
use crate::data::{Batch, ChatTokenizer, Loader, Sample, Validation, validation_batches};
use crate::device::{Selected, hardware_name};
use crate::export::AdapterConfig;
use crate::model::{Decoder, HfConfig, LoraSpec, Trainable};
use crate::report::{Event, Report, RunInfo};
use crate::{Error, Result};

/// The model, ready to train, and what to tell about it. What there is to warn of, [`Ground`] has.
pub(super) fn model(
    runs: &[RunConfig],
    grounds: &[Ground],
    report: &mut dyn Report,
) -> Result<(Decoder, Vec<String>)> {
    let ground = &grounds[0];
    let mut progress = |done, total| report.progress("loading weights", done, total);
    let (mut model, _) =
        Decoder::load_with_report(&ground.base, ground.dtype, &ground.selected.device, &mut progress)?;
    let mut details = Vec::new();
    let loras: Vec<_> = runs.iter().filter_map(|run| Some((run, run.config.model.lora.as_ref()?))).collect();
    if loras.is_empty() {
        model = model.train_all();
    } else {
        let specs: Vec<_> =
            loras.iter().map(|(run, lora)| (LoraSpec::from_config(lora), run.config.seed)).collect();
        model.attach_runs(&specs)?;
    }
    for (index, (run, ground)) in runs.iter().zip(grounds).enumerate() {
        let prefix = if run.name.is_empty() { String::new() } else { format!("{}: ", run.name) };
        if let Some(LoraConfig { rank, alpha, .. }) = &run.config.model.lora {
            let modules = model.runs()[index].modules.len();
            details.push(format!("{prefix}LoRA: rank {rank}, alpha {alpha}, on {modules} modules"));
        }
        details.push(format!("{prefix}{}", describe_data(&ground.data.loader)));
    }
    Ok((model, details))
}

/// The folder of the adapter that a run starts from, if it starts from one.
///
/// # Errors
/// It holds no adapter that could be loaded.
pub(super) fn init_adapter(config: &SftConfig) -> Result<Option<PathBuf>> {
    let path = config.model.lora.as_ref().and_then(|lora| lora.init_adapter_path.as_ref());
    let Some(path) = path else { return Ok(None) };
    let folder = find_adapter(path)?;
    if !folder.join("adapter_config.json").exists() {
        let message = "`model.lora.init_adapter_path`: there is no `adapter_config.json` here";
        return Err(Error::adapter(&folder, message, "name the folder of a PEFT adapter, or of a run"));
    }
    AdapterConfig::load(&folder)?;
    Ok(Some(folder))
}

/// Data of a run.
pub(super) struct Data {
    /// `None` with made-up tokens.
    pub tokenizer: Option<Arc<ChatTokenizer>>,
    pub loader: Loader,
    /// The held-out set, with `[val]`.
    pub val: Option<Validation>,
}

pub(super) fn data(
    config: &SftConfig,
    base: &Path,
    model: &HfConfig,
    ranks: &Ranks,
    report: &mut dyn Report,
    stop: &StopFlag,
) -> Result<Data> {
    let vocab_size = model.vocab_size;
    let longest = config.model.max_position_embeddings.unwrap_or(model.max_position_embeddings);
    let asks = config.val.is_some() || config.sample.is_some();
    let needs_tokenizer = asks || matches!(config.data, DataConfig::Sft(_));
    let tokenizer =
        if needs_tokenizer { Some(Arc::new(ChatTokenizer::load(base, &config.tokenizer)?)) } else { None };
    let mut progress = |rows| {
        report.progress("reading rows", rows, 0);
        // Several ranks stop at a point that all of them come to.
        if ranks.count() == 1 { go_on(config, ranks, stop) } else { Ok(()) }
    };
    let loader = match (&config.data, &tokenizer) {
        (DataConfig::Sft(data), Some(tokenizer)) => {
            // The order of the data depends on `data.seed` alone.
            let (seed, epochs) = (0, config.num_epochs);
            Loader::with_progress(data, tokenizer.clone(), seed, epochs, vocab_size, longest, &mut progress)?
        }
        (DataConfig::Fake(data), _) => Loader::fake(data, vocab_size)?,
        (DataConfig::Sft(_), None) => unreachable!("a tokenizer is loaded for conversations"),
    };
    let val = match (&config.val, &tokenizer) {
        (Some(val), Some(tokenizer)) => {
            let read = validation_batches(&val.data, tokenizer.clone(), vocab_size, longest, &mut progress);
            Some(read.map_err(of_held_out_data)?)
        }
        _ => None,
    };
    let mut warnings = loader.report().warnings();
    let held_out = val.iter().flat_map(|val| val.report.warnings());
    warnings.extend(held_out.map(|warning| format!("held-out data: {warning}")));
    warnings.into_iter().for_each(|w| report.event(&Event::Warning(w)));
    Ok(Data { tokenizer, loader: loader.shared(ranks.rank(), ranks.count()), val })
}

/// What is wrong with data, by the keys of `[val.data]`.
fn of_held_out_data(error: Error) -> Error {
    let renamed = |text: String| text.replace("`data.", "`val.data.").replace("`[data", "`[val.data");
    match error {
        Error::Hub { message, hint } => Error::Hub { message: renamed(message), hint: renamed(hint) },
        Error::Data { path, row, message, hint } => {
            Error::Data { path, row, message: renamed(message), hint: renamed(hint) }
        }
        other => other,
    }
}

/// Ranks that train different things would not notice by themselves.
///
/// # Errors
/// The configuration, the base model or the data of a rank are others than rank 0's.
pub(super) fn agree(ranks: &Ranks, config: &SftConfig, keys: &Keys, loader: &Loader) -> Result<()> {
    if ranks.count() == 1 {
        return Ok(());
    }
    let same = "start all ranks with the same files and flags, on the same model and data";
    let settings = SftConfig { device: String::new(), ..config.clone() }.to_toml();
    let settings = format!("{:016x}", xxhash_rust::xxh3::xxh3_64(settings.as_bytes()));
    ranks.agree("the configuration", &settings, same)?;
    ranks.agree("the base model", &format!("{:?}", keys.fixed.get("model.name")), same)?;
    ranks.agree("the data", &loader.state().fingerprint, same)
}

/// Makes the run's folder ready, and opens the row-a-step file.
pub(super) fn folder(
    config: &SftConfig,
    folder: &RunFolder,
    start: &Start,
    step: usize,
    report: &mut dyn Report,
) -> Result<MetricsFile> {
    folder.make_ready(config, start, &mut |note| report.event(&Event::Note(note)))?;
    folder.write_config(&config.to_toml())?;
    let (_, samples) = cut_after(&folder.samples(), step)?;
    let metrics = MetricsFile::open(&folder.metrics(), step)?;
    for old in samples.iter().chain(&metrics.old) {
        report.event(&Event::Note(format!("rows of later steps are kept in `{}`", old.display())));
    }
    Ok(metrics)
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
fn describe_data(loader: &Loader) -> String {
    let report = loader.report();
    if report.rows == 0 {
        return "Data: made-up tokens".into();
    }
    format!(
        "Data: {} of {} rows ({}), {} tokens, {} trained; {} packed row{} an epoch, {:.0} % full",
        report.documents,
        report.rows,
        report.formats(),
        report.tokens,
        report.trained,
        report.packed_rows,
        if report.packed_rows == 1 { "" } else { "s" },
        100.0 * report.fill
    )
}

/// Steps of a pass over the data, where they have an end.
pub(super) fn steps_per_epoch(loader: &Loader) -> Option<f64> {
    let report = loader.report();
    (report.packed_rows > 0).then(|| 1.0 / report.epochs(1))
}

/// Adapters are small: every rank updates them all. Of a whole model each rank updates a part.
pub(super) fn optimizer(config: &SftConfig, trainable: &[Trainable], ranks: &Ranks) -> Optimizer {
    let optimizer = Optimizer::new(&config.optim, trainable).hold_in(optimization_dtype(config));
    if config.model.lora.is_none() { optimizer.sharded(ranks) } else { optimizer }
}

pub(super) fn step_options(config: &SftConfig) -> StepOptions {
    let recompute = config.model.ac.as_ref().map(|ac| ac.freq);
    // Each run's dropout has the run's own seed, from where it was attached.
    StepOptions { recompute, dropout_seed: 0 }
}

/// The schedule goes from the step where it began to the end of the run.
///
/// # Errors
/// It doesn't fit: the rule of the configuration, held against the steps that the data turned out to give.
pub(super) fn schedule(config: &SftConfig, begun: &Begun, max_steps: usize) -> Result<Schedule> {
    let began_at = begun.progress.step.saturating_sub(begun.schedule_step);
    let steps = max_steps.saturating_sub(began_at);
    if begun.progress.step < max_steps {
        let alone = SftConfig { ckpt: None, ..config.clone() };
        match config.num_epochs {
            None => drop(Plan::new(&SftConfig { max_steps: Some(steps), ..alone }, 1)?),
            Some(_) => {
                let once = SftConfig { num_epochs: Some(1), max_steps: None, ..alone };
                Plan::new(&once, 1)?.total_steps(Some(steps))?;
            }
        }
    }
    Ok(Schedule::new(&config.scheduler, config.optim.lr, Some(steps)))
}

/// The answer of all ranks to Ctrl-C before the run has changed anything.
///
/// # Errors
/// [`Error::Interrupted`], if `stop` is set.
pub(super) fn go_on(config: &SftConfig, ranks: &Ranks, stop: &StopFlag) -> Result<()> {
    if !ranks.any(stop.is_set())? {
        return Ok(());
    }
    let hint = format!("nothing was changed in `{}`", config.output_dir.display());
    Err(Error::Interrupted { step: 0, checkpoint: None, hint })
}

/// How to go on after an interruption.
pub(super) fn how_to_go_on(config: &SftConfig, step: usize, checkpoint: Option<&Path>) -> String {
    let clean = if config.clean_output_dir { " `--no-clean-output-dir`" } else { "" };
    match (checkpoint, &config.ckpt) {
        (Some(path), _) => {
            let path = path.display();
            format!(
                "go on with the same command and `--ckpt.resume-step -1`{clean} (newest checkpoint: `{path}`)"
            )
        }
        (None, _) if step == 0 => "no step was done: start again with the same command".into(),
        (None, Some(_)) => "`ckpt.weights_only` keeps nothing to go on from".into(),
        (None, None) => "add `--ckpt` to keep checkpoints".into(),
    }
}

/// Why a run has no step to do, if it has none.
pub(super) fn nothing_to_do(done: usize, max_steps: usize) -> Option<String> {
    match (done, max_steps) {
        (0, 0) => Some(
            "nothing to do: the data are at their end (`--ckpt.skip-dataloader` starts them anew)".into(),
        ),
        _ if done >= max_steps => {
            let steps = if done == 1 { "1 step is" } else { &format!("{done} steps are") };
            Some(format!("nothing to do: {steps} done, and the run ends at step {max_steps}"))
        }
        _ => None,
    }
}

/// Each document of the batches as text, what is trained between ⟦ and ⟧.
pub(super) fn marked_documents(tokenizer: &ChatTokenizer, batches: &[Batch]) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    for batch in batches {
        for w in batch.cu_seqlens.windows(2) {
            let range = w[0] as usize..w[1] as usize;
            if range.clone().all(|t| batch.input_ids[t] == 0 && !batch.loss_mask[t]) {
                // Padding.
                continue;
            }
            // Position t predicts token t + 1, so that is the token the mask is about.
            let mask = range.clone().map(|t| t > range.start && batch.loss_mask[t - 1]).collect();
            let parts = tokenizer.parts(&Sample { ids: batch.input_ids[range].to_vec(), mask })?;
            let marked = parts.iter().map(|(text, t)| if *t { format!("⟦{text}⟧") } else { text.clone() });
            texts.push(marked.collect());
        }
    }
    Ok(texts)
}

pub(super) fn info(
    config: &SftConfig,
    ranks: &Ranks,
    selected: &Selected,
    model: &Decoder,
    details: Vec<String>,
    (step, max_steps): (usize, usize),
) -> RunInfo {
    let counts = model.parameter_counts();
    let hardware = hardware_name(&selected.device).map(|name| format!(" ({name})"));
    let others = match ranks.count() {
        1 => String::new(),
        n => format!("{n} ranks, rank {} on ", ranks.rank()),
    };
    RunInfo {
        model: config.model.name.clone(),
        device: format!("{}{}{}", others, selected.name, hardware.unwrap_or_default()),
        dtype: format!("{:?}", model.dtype()).to_lowercase(),
        parameters: counts.total,
        trainable: counts.trainable,
        details,
        max_steps: Some(max_steps),
        resumed_step: (step > 0).then_some(step),
        steps_per_epoch: None,
        runs: Vec::new(),
        samples: false,
        output_dir: config.output_dir.clone(),
    }
}

/// What model FLOPs utilisation is computed from.
#[derive(Debug)]
pub(super) struct Speed {
    flops: FlopCounts,
    /// The device's peak, if it is known for the type that the model computes in.
    peak: Option<f64>,
}

impl Speed {
    pub fn new(selected: &Selected, model: &Decoder) -> Self {
        let half = matches!(model.dtype(), DType::BF16 | DType::F16);
        let peak = hardware_name(&selected.device).filter(|_| half).as_deref().and_then(peak_flops);
        Self { flops: flop_counts(model), peak }
    }

    /// Percent of the peak.
    pub fn mfu(&self, batches: &[Batch], seconds: f64) -> Option<f64> {
        self.peak.map(|peak| 100.0 * self.flops.of_step(batches) / seconds / peak)
    }
}

fn flop_counts(model: &Decoder) -> FlopCounts {
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
fn optimization_dtype(config: &SftConfig) -> DType {
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
