//! Going on from a checkpoint: what has to be the same, and putting the state back.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use burn::tensor::{Device, Tensor};
use xxhash_rust::xxh3::Xxh3;

use super::optim::Optimizer;
use crate::checkpoint::{Progress, RunFolder, State, changes};
use crate::config::{SchedulerConfig, SftConfig};
use crate::data::Loader;
use crate::model::Trainable;
use crate::{Error, Result};

/// What a checkpoint is held against.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Keys {
    /// Keys that have to stay.
    pub fixed: BTreeMap<String, String>,
    /// Keys that may change, with a warning.
    pub settings: BTreeMap<String, String>,
}

/// Sections whose keys say nothing about the numbers that come out.
const NEUTRAL: [&str; 10] = [
    "ckpt",
    "log",
    "monitors",
    "heartbeat",
    "val",
    "sample",
    "output_dir",
    "clean_output_dir",
    "dry_run",
    "device",
];
/// LoRA keys that may change from one process to the next.
const LORA_SETTINGS: [&str; 3] =
    ["model.lora.dropout", "model.lora.init_lora_weights", "model.lora.init_adapter_path"];

pub(super) fn keys(config: &SftConfig, base: &Path) -> Result<Keys> {
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
    if matches!(config.scheduler, SchedulerConfig::Constant | SchedulerConfig::Linear { decay_steps: 0, .. })
    {
        // Only the decay depends on where the run ends.
        keys.settings.remove("max_steps");
        keys.settings.remove("num_epochs");
    }
    // Without weights (a look at what isn't downloaded yet) there is nothing to hold against the checkpoint's.
    if let Some(fingerprint) = fingerprint(base)? {
        keys.fixed.insert("model.name".into(), fingerprint);
    }
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
/// file, the size, the first bytes (its header), a stretch in the middle and the end. `None` without weights.
fn fingerprint(base: &Path) -> Result<Option<String>> {
    const STRETCH: u64 = 1 << 16;
    let mut hash = Xxh3::new();
    let config = base.join("config.json");
    hash.update(&fs::read(&config).map_err(|e| Error::io(&config, "read", e))?);
    let entries = fs::read_dir(base).map_err(|e| Error::io(base, "list", e))?;
    let mut files: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
    files.sort();
    if files.is_empty() {
        return Ok(None);
    }
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
    Ok(Some(format!("a model with fingerprint {:016x}", hash.digest())))
}

/// Where a run is when its loop begins.
#[derive(Debug, Default)]
pub(super) struct Begun {
    pub progress: Progress,
    pub schedule_step: usize,
    /// Keys that are other than in the checkpoint, and may be.
    pub changes: Vec<String>,
    /// The schedule starts anew because the steps do.
    pub schedule_restarts: bool,
}

/// Holds a checkpoint against the run, and takes the data to where it was, as far as the `ckpt.skip_*` keys want them.
pub(super) fn fit(
    config: &SftConfig,
    path: &Path,
    mut state: State,
    keys: &Keys,
    loader: &mut Loader,
) -> Result<Begun> {
    let ckpt = config.ckpt.as_ref().expect("`ckpt.resume_step` is in `[ckpt]`");
    let mut fixed = keys.fixed.clone();
    if ckpt.skip_optimizer {
        fixed.remove("optim.type");
        state.identity.remove("optim.type");
    }
    if !keys.fixed.contains_key("model.name") {
        state.identity.remove("model.name");
    }
    state.check_identity(path, &fixed)?;
    if !ckpt.skip_dataloader {
        loader.restore(state.loader)?;
    }
    Ok(Begun {
        progress: if ckpt.skip_progress { Progress::default() } else { state.progress },
        // Counted from 0, the run has as many steps again: the old place on the schedule would be past its end.
        schedule_step: if ckpt.skip_scheduler || ckpt.skip_progress { 0 } else { state.schedule_step },
        schedule_restarts: ckpt.skip_progress && !ckpt.skip_scheduler,
        changes: changes(&state.settings, &keys.settings),
    })
}

/// Puts a checkpoint that fits into the optimizer, and returns the values of the parameters.
pub(super) fn restore(
    config: &SftConfig,
    folder: &RunFolder,
    path: &Path,
    device: &Device,
    trainable: &[Trainable],
    optimizer: &mut Optimizer,
) -> Result<Vec<Tensor<1>>> {
    let skip_optimizer = config.ckpt.as_ref().is_some_and(|ckpt| ckpt.skip_optimizer);
    let mut checkpoint = folder.load(path, device, |name| !skip_optimizer && !optimizer.leaves_out(name))?;
    let wanted: Vec<_> = trainable.iter().map(|p| (p.name.as_str(), p.shape.as_slice())).collect();
    let values = checkpoint.take_trainable(&wanted)?.into_iter().map(|t| t.values).collect();
    if skip_optimizer {
        return Ok(values);
    }
    let file = path.join("optimizer.safetensors");
    let failed = |message| Error::checkpoint(file, message, "set `ckpt.skip_optimizer = true`");
    optimizer.restore(checkpoint.optimizer, checkpoint.state.optimizer_updates).map_err(failed)?;
    Ok(values)
}

/// The checkpoint to go on from after step `failed`: the newest, unless it is so near that what went wrong may
/// have begun before it.
pub(super) fn where_to_go_on(failed: usize, steps: &[usize]) -> String {
    const NEAR: usize = 20;
    match *steps {
        [.., earlier, newest] if failed - newest.min(failed) <= NEAR => format!(
            "; the checkpoint of step {newest} is close to where it failed, `--ckpt.resume-step {earlier}` goes \
             further back"
        ),
        [.., newest] => format!("; `--ckpt.resume-step {newest}` goes on from there"),
        [] => String::new(),
    }
}

/// The checkpoint to go on from where steps were skipped from `began` on: those kept since then, and that of the step
/// before, hold the weights that gave the first of them.
pub(super) fn where_it_was_fine(began: usize, steps: &[usize]) -> String {
    match steps.iter().rfind(|&&step| step + 1 < began) {
        Some(step) => format!("; `--ckpt.resume-step {step}` goes back to before it began"),
        None => {
            "; no checkpoint is from before it began: if the weights are what isn't finite, start anew".into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{where_it_was_fine, where_to_go_on};

    #[test]
    fn weights_that_gave_the_first_bad_loss_are_not_offered() {
        assert!(where_it_was_fine(8, &[4, 6, 7, 11]).contains("--ckpt.resume-step 6"));
        assert!(where_it_was_fine(2, &[1, 5]).contains("start anew"));
        assert!(where_it_was_fine(2, &[]).contains("start anew"));
    }

    #[test]
    fn a_checkpoint_close_to_the_failure_is_not_the_one_to_go_on_from() {
        assert_eq!(where_to_go_on(7, &[]), "");
        assert!(where_to_go_on(7, &[6]).contains("--ckpt.resume-step 6"));
        assert!(where_to_go_on(101, &[50, 100]).contains("--ckpt.resume-step 50"));
        assert!(where_to_go_on(149, &[50, 100]).contains("--ckpt.resume-step 100"));
    }
}
