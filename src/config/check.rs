//! The rules between keys, all of them checked in one go, and what a run's numbers follow from them: [`Plan`].
//! Limits of a single key stand beside the key in `mod.rs`.

use super::load::from_toml;
use super::read::Reader;
use super::refused;
use super::table::one_of;
use super::{CkptConfig, LoraConfig, OptimKind, SftConfig, SftDataConfig, TargetModules};
use crate::error::{Error, Problem, Result};
use std::path::PathBuf;

/// Notes every rule that doesn't hold.
pub(super) fn rules(config: &SftConfig, reader: &mut Reader) {
    length(config, reader);
    data(config, reader);
    optimizer(config, reader);
    schedule(config, reader);
    if let Some(lora) = &config.model.lora {
        adapters(lora, reader);
    }
    if let Some(sample) = &config.sample {
        super::sample::rules(sample, reader);
    }
    if let Some(ckpt) = &config.ckpt {
        checkpoints(config, ckpt, reader);
    }
    if let Err(problem) = DeviceSpec::parse(&config.device) {
        reader.rule(false, &["device"], || problem.message, &problem.hint);
    }
}

fn length(config: &SftConfig, reader: &mut Reader) {
    reader.rule(
        config.max_steps.is_some() || config.num_epochs.is_some(),
        &["max_steps", "num_epochs"],
        || "neither `max_steps` nor `num_epochs` is set, so the run would never end".into(),
        "set `max_steps = 200`, or `num_epochs = 3`",
    );
    reader.rule(
        config.num_epochs.is_none() || config.data.kind() != "fake",
        &["num_epochs", "data.type"],
        || "`num_epochs` is set, but `data.type = \"fake\"` has no end".into(),
        "set `max_steps` in its place",
    );
}

fn data(config: &SftConfig, reader: &mut Reader) {
    let (batch, micro) = (config.data.batch_size(), config.data.micro_batch_size());
    reader.rule(
        batch.is_multiple_of(micro),
        &["data.batch_size", "data.micro_batch_size"],
        || {
            format!(
                "`data.batch_size` is {batch}, which isn't divisible by `data.micro_batch_size` = {micro}"
            )
        },
        "make `data.batch_size` a multiple of `data.micro_batch_size`",
    );
    if let Some(limit) = config.model.max_position_embeddings {
        for (key, seq_len) in row_lengths(config) {
            reader.rule(
                seq_len <= limit,
                &[key, "model.max_position_embeddings"],
                || format!("`{key}` is {seq_len}, above `model.max_position_embeddings` = {limit}"),
                "lower it or raise `model.max_position_embeddings`",
            );
        }
    }
    if let super::DataConfig::Sft(sft) = &config.data {
        sources("data", sft, reader);
    }
    if let Some(val) = &config.val {
        sources("val.data", &val.data, reader);
        reader.rule(
            reader.given("val.data"),
            &["val.data", "val"],
            || "`[val]` is on, but `[val.data]` is missing".into(),
            "set `val.data.name` to the held-out data, or `val = \"None\"`",
        );
    }
}

/// `data.seq_len`, and that of held-out data.
fn row_lengths(config: &SftConfig) -> Vec<(&'static str, usize)> {
    let val = config.val.as_ref().map(|val| ("val.data.seq_len", val.data.seq_len));
    std::iter::once(("data.seq_len", config.data.seq_len())).chain(val).collect()
}

/// A column is one thing.
fn columns(section: &str, data: &SftDataConfig, reader: &mut Reader) {
    let names = data.columns.names();
    for (i, (key, column)) in names.iter().enumerate() {
        let Some((other, _)) = names[i + 1..].iter().find(|(_, other)| other == column) else { continue };
        let [key, other] = [key, other].map(|key| format!("{section}.columns.{key}"));
        let message = || format!("`{key}` and `{other}` are both `{column}`");
        reader.rule(false, &[&key, &other], message, "give each a column of its own");
    }
}

/// The lists of sources to interleave go together.
fn sources(section: &str, data: &SftDataConfig, reader: &mut Reader) {
    columns(section, data, reader);
    let [subsets, splits, probabilities] =
        ["subsets", "splits", "probabilities"].map(|k| format!("{section}.{k}"));
    let lists = [
        (&subsets, data.subsets.as_ref().map(Vec::len)),
        (&splits, data.splits.as_ref().map(Vec::len)),
        (&probabilities, data.probabilities.as_ref().map(Vec::len)),
    ];
    for (i, (key, length)) in lists.iter().enumerate() {
        reader.rule(
            *length != Some(0),
            &[key],
            || format!("`{key}` is empty"),
            "name at least one, or leave the key out",
        );
        for (other, other_length) in &lists[i + 1..] {
            let (Some(length), Some(other_length)) = (length, other_length) else { continue };
            let message = || format!("`{key}` has {length} entries, `{other}` has {other_length}");
            reader.rule(
                length == other_length,
                &[key, other],
                message,
                "give both one entry for each source",
            );
        }
    }
    let pair =
        |n: usize| [&data.subsets, &data.splits].map(|list| list.as_ref().and_then(|list| list.get(n)));
    let length = lists[..2].iter().filter_map(|(_, length)| *length).min().unwrap_or(0);
    let twice = (0..length).find(|&n| (0..n).any(|earlier| pair(earlier) == pair(n)));
    let named = |n: usize| pair(n).into_iter().flatten().cloned().collect::<Vec<_>>().join(", ");
    reader.rule(
        twice.is_none(),
        &[&subsets, &splits],
        || format!("`{}` is named twice in `{section}`", twice.map(named).unwrap_or_default()),
        "name each source once; `probabilities` say how often each is drawn from",
    );
    let Some(parts) = &data.probabilities else { return };
    reader.rule(
        data.subsets.is_some() || data.splits.is_some(),
        &[&probabilities],
        || format!("`{probabilities}` is set, but there is only one source"),
        "name the sources in `subsets` or `splits`",
    );
    let sum: f64 = parts.iter().sum();
    reader.rule(
        parts.is_empty() || (sum - 1.0).abs() < 1e-6,
        &[&probabilities],
        || format!("`{probabilities}` sum to {sum}, wanted 1"),
        "",
    );
}

fn optimizer(config: &SftConfig, reader: &mut Reader) {
    reader.rule(
        config.optim.max_norm != Some(0.0),
        &["optim.max_norm"],
        || "`optim.max_norm` is 0, which scales every gradient to nothing".into(),
        "`optim.max_norm = \"None\"` switches clipping off",
    );
    if let OptimKind::Sgd { nesterov: true, momentum } = config.optim.kind {
        reader.rule(
            momentum > 0.0,
            &["optim.momentum", "optim.nesterov"],
            || "`optim.nesterov` needs `optim.momentum` above 0".into(),
            "set `optim.nesterov = false`",
        );
    }
}

fn schedule(config: &SftConfig, reader: &mut Reader) {
    let scheduler = &config.scheduler;
    let (lr, min_lr) = (config.optim.lr, scheduler.min_lr());
    reader.rule(
        min_lr <= lr,
        &["scheduler.min_lr", "optim.lr"],
        || format!("`scheduler.min_lr` is {min_lr}, above `optim.lr` = {lr}"),
        "lower `scheduler.min_lr` or raise `optim.lr`",
    );
    let Some(steps) = config.max_steps else { return };
    if let Some(problem) = schedule_problem(config, steps, "`max_steps`") {
        let keys = ["scheduler.warmup_steps", "scheduler.decay_steps", "max_steps"];
        reader.rule(false, &keys, || problem.message, &problem.hint);
    }
}

/// Why the schedule doesn't fit into a run of so many steps.
fn schedule_problem(config: &SftConfig, steps: usize, steps_name: &str) -> Option<Problem> {
    let (warmup, decay) = (config.scheduler.warmup_steps(), config.scheduler.decay_steps());
    let what = match decay {
        0 => format!("`scheduler.warmup_steps` is {warmup}"),
        _ => format!("`scheduler.warmup_steps` + `scheduler.decay_steps` is {warmup} + {decay}"),
    };
    let key = if decay == 0 || warmup > steps { "scheduler.warmup_steps" } else { "scheduler.decay_steps" };
    (warmup + decay > steps).then(|| Problem {
        place: String::new(),
        message: format!("{what}, but the run has {steps_name} = {steps}"),
        hint: format!("lower `{key}`, or make the run longer"),
    })
}

fn adapters(lora: &LoraConfig, reader: &mut Reader) {
    let targets = "model.lora.target_modules";
    reader.rule(
        lora.target_modules != TargetModules::List(vec![]) || !lora.modules_to_save.is_empty(),
        &[targets],
        || format!("`{targets}` is empty, so there is nothing to train"),
        "name modules such as `q_proj`, or set \"all-linear\"",
    );
    reader.rule(
        lora.layers_to_transform.is_none() || matches!(lora.target_modules, TargetModules::List(_)),
        &["model.lora.layers_to_transform", targets],
        || format!("`model.lora.layers_to_transform` needs a list in `{targets}`"),
        "name the modules, or put the layers into the regular expression",
    );
    let mut regexes: Vec<(&str, &str)> = Vec::new();
    if let TargetModules::Regex(regex) = &lora.target_modules {
        regexes.push((targets, regex));
    }
    match &lora.exclude_modules {
        Some(TargetModules::Regex(regex)) => regexes.push(("model.lora.exclude_modules", regex)),
        Some(TargetModules::AllLinear) => reader.rule(
            false,
            &["model.lora.exclude_modules"],
            || "`model.lora.exclude_modules` is \"all-linear\", which leaves nothing".into(),
            "give a list or a regular expression",
        ),
        _ => {}
    }
    regexes.extend(lora.rank_pattern.iter().map(|(regex, _)| ("model.lora.rank_pattern", regex.as_str())));
    regexes.extend(lora.alpha_pattern.iter().map(|(regex, _)| ("model.lora.alpha_pattern", regex.as_str())));
    for (key, regex) in regexes {
        if let Err(error) = fancy_regex::Regex::new(regex) {
            let message = || format!("`{key}` has `{regex}`, which is not a regular expression: {error}");
            reader.rule(false, &[key], message, "");
        }
    }
}

fn checkpoints(config: &SftConfig, ckpt: &CkptConfig, reader: &mut Reader) {
    reader.rule(
        config.model.lora.is_some() || !ckpt.weights.as_ref().is_some_and(|w| w.save_adapter_separately),
        &["ckpt.weights.save_adapter_separately", "model.lora"],
        || {
            "`ckpt.weights.save_adapter_separately` needs `[model.lora]`: without it there is no adapter"
                .into()
        },
        "add `[model.lora]`, or set `ckpt.weights.save_adapter_separately = false`",
    );
    reader.rule(
        ckpt.weights.is_some() || !ckpt.weights_only,
        &["ckpt.weights_only", "ckpt.weights"],
        || "`ckpt.weights_only` is on, but `ckpt.weights` is off: nothing would be saved".into(),
        "switch `ckpt.weights` on, or set `ckpt.weights_only = false`",
    );
    let Some(step) = ckpt.resume_step else { return };
    reader.rule(
        !config.clean_output_dir,
        &["clean_output_dir", "ckpt.resume_step"],
        || "`clean_output_dir` would delete what `ckpt.resume_step` resumes from".into(),
        "set `clean_output_dir = false` (`--no-clean-output-dir`), or leave `ckpt.resume_step` out",
    );
    let Some(steps) = config.max_steps else { return };
    reader.rule(
        usize::try_from(step).is_ok_and(|step| step <= steps) || step < 0 || ckpt.skip_progress,
        &["ckpt.resume_step", "max_steps"],
        || format!("`ckpt.resume_step` is {step}, after the end of the run at `max_steps` = {steps}"),
        "raise `max_steps`: it counts from the very start of the run",
    );
}

/// What a run's numbers come to, once the configuration holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The device that was asked for.
    pub device: DeviceSpec,
    /// Ranks that share each step.
    pub world_size: usize,
    /// Packed rows in an optimizer step, over all ranks.
    pub rows_per_step: usize,
    /// Packed rows that go through the model at once, on one rank.
    pub rows_per_micro_batch: usize,
    /// Micro-batches in an optimizer step, on one rank.
    pub micro_batches_per_step: usize,
    /// Tokens in a packed row.
    pub seq_len: usize,
    /// Tokens in an optimizer step, over all ranks, padding included.
    pub tokens_per_step: usize,
    /// Where checkpoints and weights go, if they are on.
    pub checkpoint_dir: Option<PathBuf>,
    /// Where to resume from.
    pub resume: Option<Resume>,
    config: SftConfig,
}

/// Which checkpoint a run resumes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resume {
    /// `resume_step = -1`: the newest whole one.
    Newest,
    /// After so many updates.
    Step(usize),
}

impl Plan {
    /// The plan of one rank among `world_size`.
    ///
    /// # Errors
    /// [`Error::Config`] if a limit or rule doesn't hold, also for a configuration that was built in code.
    pub fn new(config: &SftConfig, world_size: usize) -> Result<Self> {
        from_toml(&config.to_toml(), "configuration")?;
        let (rows, micro) = (config.data.batch_size(), config.data.micro_batch_size());
        if !rows.is_multiple_of(world_size * micro) {
            let message = format!(
                "`data.batch_size` is {rows}, which isn't divisible by {world_size} ranks × \
                 `data.micro_batch_size` = {micro}"
            );
            let hint = format!("make `data.batch_size` a multiple of {}", world_size * micro);
            return Err(Error::Config(vec![Problem { place: String::new(), message, hint }]));
        }
        let ckpt = config.ckpt.as_ref();
        Ok(Plan {
            device: DeviceSpec::parse(&config.device).expect("checked above"),
            world_size,
            rows_per_step: rows,
            rows_per_micro_batch: micro,
            micro_batches_per_step: rows / (world_size * micro),
            seq_len: config.data.seq_len(),
            tokens_per_step: rows * config.data.seq_len(),
            checkpoint_dir: ckpt.map(|ckpt| ckpt.output_dir.clone().unwrap_or(config.output_dir.clone())),
            resume: ckpt.and_then(|ckpt| ckpt.resume_step).map(Resume::from_step),
            config: config.clone(),
        })
    }

    /// The plan of one of several runs of a job.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn of_run(&self, config: &SftConfig) -> Result<Self> {
        Ok(Plan { device: self.device.clone(), ..Plan::new(config, self.world_size)? })
    }

    /// The plan of one rank: its own device among those that are named, or the card of its number.
    #[must_use]
    pub fn on_rank(&self, local_rank: usize) -> Self {
        let indices = match self.device.indices.get(local_rank) {
            Some(&index) => vec![index],
            None if self.world_size > 1 && self.device.kind != DeviceKind::Flex => vec![local_rank],
            None => self.device.indices.clone(),
        };
        Plan { device: DeviceSpec { indices, ..self.device.clone() }, ..self.clone() }
    }

    /// Steps of the whole run, given those of one pass over the data (`None` if the data has no end).
    ///
    /// # Errors
    /// [`Error::Config`] if the schedule doesn't fit into them, or the run has no end.
    pub fn total_steps(&self, steps_per_epoch: Option<usize>) -> Result<usize> {
        let config = &self.config;
        let by_epochs = config.num_epochs.zip(steps_per_epoch).map(|(n, steps)| n.saturating_mul(steps));
        let total = [config.max_steps, by_epochs].into_iter().flatten().min();
        let problem = match total {
            None => Some(Problem {
                place: String::new(),
                message: "`num_epochs` is set, but the data has no end".into(),
                hint: "set `max_steps`".into(),
            }),
            Some(total) => schedule_problem(config, total, "a length of `num_epochs` × steps per epoch"),
        };
        match (total, problem) {
            (Some(total), None) => Ok(total),
            (_, problem) => Err(Error::Config(problem.into_iter().collect())),
        }
    }

    /// Holds the row lengths against the model's own `max_position_embeddings`; a warning if
    /// `model.max_position_embeddings` lifts it.
    ///
    /// # Errors
    /// [`Error::Config`] if rows are longer than the model allows.
    pub fn check_positions(&self, model_limit: usize) -> Result<Option<String>> {
        let longest = row_lengths(&self.config).into_iter().max_by_key(|(_, seq_len)| *seq_len);
        let (key, seq_len) = longest.expect("training data has a row length");
        if seq_len <= model_limit {
            return Ok(None);
        }
        if self.config.model.max_position_embeddings.is_some() {
            return Ok(Some(format!(
                "`{key}` is {seq_len}: positions from {model_limit} on are new to the model, whose \
                 `max_position_embeddings` is {model_limit}"
            )));
        }
        let message =
            format!("`{key}` is {seq_len}, above the model's `max_position_embeddings` = {model_limit}");
        let hint = format!(
            "set `{key}` to at most {model_limit}; `model.max_position_embeddings = {seq_len}` trains beyond it"
        );
        Err(Error::Config(vec![Problem { place: String::new(), message, hint }]))
    }
}

impl Resume {
    fn from_step(step: i64) -> Self {
        usize::try_from(step).map_or(Resume::Newest, Resume::Step)
    }
}

/// A device as the key `device` names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSpec {
    /// What kind of device.
    pub kind: DeviceKind,
    /// Which ones of that kind; empty if none is named.
    pub indices: Vec<usize>,
}

/// The kinds of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// The best there is.
    Auto,
    /// NVIDIA GPUs through CUDA.
    Cuda,
    /// Any GPU through WGSL.
    Wgpu,
    /// Any GPU through Vulkan.
    Vulkan,
    /// The CPU.
    Flex,
}

const DEVICES: [(&str, DeviceKind); 5] = [
    ("auto", DeviceKind::Auto),
    ("cuda", DeviceKind::Cuda),
    ("wgpu", DeviceKind::Wgpu),
    ("vulkan", DeviceKind::Vulkan),
    ("flex", DeviceKind::Flex),
];

impl DeviceSpec {
    /// `cuda`, `cuda:1`, `cuda:0,1`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> std::result::Result<Self, Problem> {
        let problem = |message, hint| Problem { place: String::new(), message, hint };
        let (name, list) = text.split_once(':').map_or((text, None), |(name, list)| (name, Some(list)));
        let Some((_, kind)) = DEVICES.iter().find(|(n, _)| *n == name) else {
            let names = DEVICES.map(|(name, _)| name);
            let hint = refused::value("device", name).unwrap_or_default().to_string();
            return Err(problem(format!("`device` is `{text}`, wanted {}", one_of(&names)), hint));
        };
        let Some(list) = list else { return Ok(DeviceSpec { kind: *kind, indices: vec![] }) };
        let parsed: std::result::Result<Vec<usize>, _> = list.split(',').map(str::parse).collect();
        let Ok(indices) = parsed else {
            return Err(problem(
                format!("`device` is `{text}`, wanted indices after the colon"),
                format!("write `{name}:0` or `{name}:0,1`"),
            ));
        };
        if *kind == DeviceKind::Auto {
            return Err(problem(
                format!("`device` is `{text}`, but `auto` takes no index"),
                "name the device".into(),
            ));
        }
        if (1..indices.len()).any(|i| indices[..i].contains(&indices[i])) {
            return Err(problem(format!("`device` is `{text}`, which names a device twice"), String::new()));
        }
        Ok(DeviceSpec { kind: *kind, indices })
    }
}
