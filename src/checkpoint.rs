//! A run's folder and the checkpoints in it.
//!
//! ```text
//! output_dir/
//!   configs/sft.toml, run.json   the resolved configuration; what the run is
//!   metrics.jsonl                a row a step
//!   samples.jsonl                a row an answer, with `[sample]`
//!   report.html                  the page about the run
//!   curves.svg, curves.png       its picture, by `embertune plot`
//!   .lock                        held by the run that writes here
//!   logs/trainer.log
//!   tensorboard/                 with `monitors.tensorboard`
//!   checkpoints/step_N/          after N steps:
//!     trainable.safetensors        the trainable parameters (of a LoRA run: megabytes)
//!     optimizer.safetensors        the optimizer's state, `PARAMETER.exp_avg` and so on
//!     state.json                   progress, data position, what the run depends on
//!     sft.toml                     the configuration at that time
//!     STABLE                       size and xxh3 of each file, written last
//!   weights/step_N/              what others load: a Hugging Face folder, or
//!     lora_adapters/               a PEFT adapter; with a STABLE too
//! ```
//!
//! The frozen base is never saved: it is where it was. There is no generator to save either: dropout
//! and shuffling count from the seed, and the counters are part of the data position.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use crate::config::{CkptConfig, SftConfig};
use crate::data::LoaderState;
use crate::{Error, Result};

mod clean;
pub mod folder;
mod guard;
pub mod tensors;

pub use guard::Locks;
pub use tensors::Named;

/// The folders of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunFolder {
    /// `output_dir`.
    pub root: PathBuf,
    /// `checkpoints/`, under `ckpt.output_dir` if that is set.
    pub checkpoints: PathBuf,
    /// `weights/`, beside `checkpoints/`.
    pub weights: PathBuf,
}

/// Counters of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Progress {
    /// Finished steps.
    pub step: usize,
    /// Tokens through the model, padding included.
    pub tokens: usize,
    /// Trained tokens.
    pub trained_tokens: usize,
    /// Packed rows.
    pub rows: usize,
}

/// `state.json`: all of a checkpoint that isn't a tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Version of this file.
    pub format: u32,
    /// Version of the program that wrote it.
    pub embertune: String,
    /// How far the run is.
    pub progress: Progress,
    /// Steps of the schedule that are done; not `progress.step` after `ckpt.skip_scheduler`.
    pub schedule_step: usize,
    /// Updates the optimizer has made; skipped steps are none.
    pub optimizer_updates: usize,
    /// Position in the data.
    pub loader: LoaderState,
    /// Keys that must be the same when the run goes on, with their values.
    pub identity: BTreeMap<String, String>,
    /// Keys that may change, with their values; a change is reported.
    pub settings: BTreeMap<String, String>,
}

/// A checkpoint read back.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// All that isn't a tensor.
    pub state: State,
    /// The trainable parameters by name.
    pub trainable: BTreeMap<String, Named>,
    /// The optimizer's state by name; empty with `ckpt.skip_optimizer`.
    pub optimizer: BTreeMap<String, Named>,
}

/// What a run begins with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Start {
    /// From the model's own weights.
    Fresh,
    /// From this checkpoint.
    Resume {
        /// Its step.
        step: usize,
        /// Its folder.
        path: PathBuf,
    },
}

impl State {
    /// Version of `state.json` that is written.
    pub const FORMAT: u32 = 1;

    /// Compares what the checkpoint in `path` was made with and what the run has now.
    ///
    /// # Errors
    /// All keys that differ, with both values.
    pub fn check_identity(&self, path: &Path, now: &BTreeMap<String, String>) -> Result<()> {
        let changes = changes(&self.identity, now);
        if changes.is_empty() {
            return Ok(());
        }
        Err(Error::checkpoint(
            path,
            format!("the run is another one: {}", changes.join("; ")),
            "set these keys as they were, or start a new run in another `output_dir`",
        ))
    }
}

impl RunFolder {
    /// The folders that a configuration names; creates none.
    pub fn new(config: &SftConfig) -> Self {
        let root = config.output_dir.clone();
        let saves = config.ckpt.as_ref().and_then(|c| c.output_dir.clone()).unwrap_or(root.clone());
        Self { checkpoints: saves.join("checkpoints"), weights: saves.join("weights"), root }
    }

    /// The row-a-step file.
    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    /// The row-an-answer file.
    pub fn samples(&self) -> PathBuf {
        self.root.join("samples.jsonl")
    }

    /// The log file.
    pub fn log(&self) -> PathBuf {
        self.root.join("logs").join("trainer.log")
    }

    /// The log file of a rank other than 0.
    pub fn rank_log(&self, rank: usize) -> PathBuf {
        self.root.join("logs").join(format!("rank_{rank}.log"))
    }

    /// Decides where the run begins; changes nothing.
    ///
    /// # Errors
    /// Checkpoints or weights of another run in a fresh run's way, no such checkpoint, or inputs that
    /// `clean_output_dir` would delete.
    pub fn start(&self, config: &SftConfig) -> Result<Start> {
        if config.clean_output_dir {
            return self.may_clean(config).map(|()| Start::Fresh);
        }
        match config.ckpt.as_ref().and_then(|c| c.resume_step) {
            Some(wanted) => self.find(wanted),
            None => self.refuse_to_mix().map(|()| Start::Fresh),
        }
    }

    /// Makes the folder ready for a run that begins at `start`, whose checkpoint is read already: what is
    /// in the way is renamed, or (with `clean_output_dir`) deleted; `note` hears of it.
    pub fn make_ready(&self, config: &SftConfig, start: &Start, note: &mut dyn FnMut(String)) -> Result<()> {
        if config.clean_output_dir {
            self.clean(note)?;
        }
        for parent in [&self.checkpoints, &self.weights] {
            let removed = folder::remove_partial(parent)?;
            if removed > 0 {
                note(format!("removed {removed} unfinished save in `{}`", parent.display()));
            }
        }
        match start {
            Start::Resume { step, .. } => {
                let skip = config.ckpt.as_ref().is_some_and(|c| c.skip_progress);
                if skip {
                    self.set_rows_aside()?;
                }
                self.set_later_aside(if skip { 0 } else { *step }, note)
            }
            Start::Fresh => {
                if config.ckpt.as_ref().is_some_and(|c| c.resume_step.is_some()) {
                    let place = self.checkpoints.display();
                    note(format!("no checkpoint in `{place}`: starting from the beginning"));
                }
                self.set_rows_aside()?;
                // Only with `resume_step = -1` and no checkpoint: weights that were saved before a kill.
                self.set_later_aside(0, note)
            }
        }
    }

    /// The checkpoint of `wanted`, or the newest for -1 (the beginning if there is none).
    fn find(&self, wanted: i64) -> Result<Start> {
        let steps = folder::steps(&self.checkpoints)?;
        let Ok(wanted) = usize::try_from(wanted) else {
            return Ok(steps.last().map_or(Start::Fresh, |&step| self.resume(step)));
        };
        if steps.contains(&wanted) {
            return Ok(self.resume(wanted));
        }
        let have = match steps.len() {
            0 => "there is none".to_string(),
            _ => format!("there are {steps:?}"),
        };
        Err(Error::checkpoint(
            self.checkpoints.join(format!("step_{wanted}")),
            format!("`ckpt.resume_step = {wanted}`: no such checkpoint; {have}"),
            "set `ckpt.resume_step = -1` for the newest",
        ))
    }

    fn resume(&self, step: usize) -> Start {
        Start::Resume { step, path: self.checkpoints.join(format!("step_{step}")) }
    }

    /// A fresh run doesn't write among the checkpoints of another.
    fn refuse_to_mix(&self) -> Result<()> {
        for parent in [&self.checkpoints, &self.weights] {
            if let Some(step) = folder::steps(parent)?.last() {
                let resume =
                    if *parent == self.checkpoints { "resume it (`--ckpt.resume-step -1`), " } else { "" };
                return Err(Error::checkpoint(
                    parent.join(format!("step_{step}")),
                    "another run has saved here, and nothing is overwritten",
                    format!("{resume}delete it (`--clean-output-dir`), or set another `output_dir`"),
                ));
            }
        }
        Ok(())
    }

    /// Rows of another run stay, under another name.
    fn set_rows_aside(&self) -> Result<()> {
        for file in [self.metrics(), self.samples()] {
            if file.exists() {
                folder::set_aside(&file)?;
            }
        }
        Ok(())
    }

    /// Going on from an earlier step leaves a branch behind: its folders are renamed, unless the same content was
    /// set aside before (a run that is killed again and again between two saves makes the same weights each time).
    /// What is called `step_N` and is no save of ours is renamed too: this run will want the name.
    fn set_later_aside(&self, step: usize, note: &mut dyn FnMut(String)) -> Result<()> {
        for parent in [&self.checkpoints, &self.weights] {
            for later in folder::named(parent)?.into_iter().filter(|&s| s > step) {
                if let Some(aside) = folder::make_way(parent, later)? {
                    note(not_whole(parent, later, &aside));
                    continue;
                }
                let path = parent.join(format!("step_{later}"));
                if let Some(same) = folder::same_set_aside(&path) {
                    let (path_name, same) = (path.display(), same.display());
                    note(format!("`{path_name}` is the same as `{same}`, and is made anew: deleted"));
                    folder::remove(&path)?;
                    continue;
                }
                let aside = folder::set_aside(&path)?;
                note(format!("`{}` is of a branch left behind, now `{}`", path.display(), aside.display()));
            }
        }
        Ok(())
    }

    /// Where the configuration of a dry run goes: beside that of a run, if there was one.
    ///
    /// # Errors
    /// The file or folder can't be written.
    pub fn write_dry_run(&self, text: &str) -> Result<PathBuf> {
        let saved = folder::steps(&self.checkpoints)?.len() + folder::steps(&self.weights)?.len();
        let used = saved > 0 || self.metrics().exists() || self.log().exists();
        self.write_toml(if used { "sft.dry-run.toml" } else { "sft.toml" }, text)
    }

    /// Writes `configs/sft.toml`; a different one that is there is renamed.
    pub fn write_config(&self, text: &str) -> Result<PathBuf> {
        self.write_toml("sft.toml", text)
    }

    fn write_toml(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.root.join("configs").join(name);
        if fs::read_to_string(&path).is_ok_and(|old| old == text) {
            return Ok(path);
        }
        if path.exists() {
            folder::set_aside(&path)?;
        }
        let parent = self.root.join("configs");
        fs::create_dir_all(&parent).map_err(|e| Error::io(&parent, "create", e))?;
        fs::write(&path, text).map_err(|e| Error::io(&path, "write", e))?;
        Ok(path)
    }

    /// Writes a checkpoint and deletes those that retention no longer wants.
    pub fn save(
        &self,
        ckpt: &CkptConfig,
        config: &str,
        state: &State,
        trainable: &[Named],
        optimizer: &[Named],
    ) -> Result<PathBuf> {
        let path = folder::write(&self.checkpoints, state.progress.step, |folder| {
            tensors::save(&folder.join("trainable.safetensors"), trainable)?;
            tensors::save(&folder.join("optimizer.safetensors"), optimizer)?;
            let text = serde_json::to_string_pretty(state).expect("the state is plain data");
            write_file(&folder.join("state.json"), &text)?;
            write_file(&folder.join("sft.toml"), config)
        })?;
        folder::prune(&self.checkpoints, ckpt.keep_last, ckpt.keep_interval)?;
        Ok(path)
    }

    /// Reads a checkpoint after comparing all its files with `STABLE`; of the optimizer's state the tensors that
    /// `optimizer` names.
    ///
    /// # Errors
    /// A file that is missing, truncated or changed, with an older intact checkpoint as hint.
    pub fn load(&self, path: &Path, device: &Device, optimizer: impl Fn(&str) -> bool) -> Result<Checkpoint> {
        let state = self.load_state(path)?;
        let trainable = tensors::load(&path.join("trainable.safetensors"), device, |_| true)?;
        let optimizer = tensors::load(&path.join("optimizer.safetensors"), device, optimizer)?;
        Ok(Checkpoint { path: path.into(), state, trainable, optimizer })
    }

    /// Reads what isn't tensors of a checkpoint, after comparing all its files with `STABLE`.
    ///
    /// # Errors
    /// As [`RunFolder::load`].
    pub fn load_state(&self, path: &Path) -> Result<State> {
        folder::verify(path).map_err(|e| self.with_older(path, e))?;
        let file = path.join("state.json");
        let text = fs::read_to_string(&file).map_err(|e| Error::io(&file, "read", e))?;
        let format = serde_json::from_str(&text)
            .ok()
            .and_then(|value: serde_json::Value| value["format"].as_u64())
            .unwrap_or(0);
        if format != u64::from(State::FORMAT) {
            let message = format!("`format` is {format}, this version reads {}", State::FORMAT);
            return Err(Error::checkpoint(&file, message, "resume with the version that wrote it"));
        }
        serde_json::from_str(&text)
            .map_err(|e| Error::checkpoint(&file, format!("cannot be understood: {e}"), ""))
    }

    /// Names the newest intact checkpoint other than `path` in the hint.
    fn with_older(&self, path: &Path, error: Error) -> Error {
        let Error::Checkpoint { path: file, message, .. } = error else { return error };
        let steps = folder::steps(&self.checkpoints).unwrap_or_default();
        let intact = steps.iter().rev().find(|step| {
            let other = self.checkpoints.join(format!("step_{step}"));
            other != path && folder::verify(&other).is_ok()
        });
        // Several runs go on together, each from its newest checkpoint.
        let among_several = self.root.parent().is_some_and(|parent| parent.ends_with("runs"));
        let hint = match intact {
            Some(step) if among_several => {
                let path = path.display();
                format!("step {step} is intact: move `{path}` away, then `--ckpt.resume-step -1`")
            }
            Some(step) => format!("step {step} is intact: `--ckpt.resume-step {step}`"),
            None => "no other checkpoint is intact: start again with `--clean-output-dir`".to_string(),
        };
        Error::Checkpoint { path: file, message, hint }
    }
}

impl Checkpoint {
    /// Takes the tensors that `wanted` (name, shape) lists, in that order.
    ///
    /// # Errors
    /// The first tensor that is missing, mis-shaped or unknown.
    pub fn take_trainable(&mut self, wanted: &[(&str, &[usize])]) -> Result<Vec<Named>> {
        let path = self.path.join("trainable.safetensors");
        let bad = |message| Err(Error::checkpoint(&path, message, "resume with the keys of the old run"));
        let mut taken = Vec::with_capacity(wanted.len());
        for (name, shape) in wanted {
            match self.trainable.remove(*name) {
                None => return bad(format!("tensor `{name}` is missing")),
                Some(t) if t.shape != *shape => {
                    return bad(format!("tensor `{name}` has shape {:?}, wanted {shape:?}", t.shape));
                }
                Some(tensor) => taken.push(tensor),
            }
        }
        match self.trainable.keys().next() {
            Some(name) => bad(format!("tensor `{name}` is not trainable in this run")),
            None => Ok(taken),
        }
    }
}

/// `key: the checkpoint has a, the run b` for each key whose value differs.
pub fn changes(before: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Vec<String> {
    let keys: std::collections::BTreeSet<_> = before.keys().chain(now.keys()).collect();
    let value = |map: &BTreeMap<String, String>, key| map.get(key).cloned().unwrap_or("nothing".into());
    keys.into_iter()
        .map(|key| (key, value(before, key), value(now, key)))
        .filter(|(_, before, now)| before != now)
        .map(|(key, before, now)| format!("`{key}`: the checkpoint has {before}, the run {now}"))
        .collect()
}

/// The adapter's own folder: the one that was named, or the newest in a run's folder, in its `weights`, or in a
/// `step_N` of either kind.
///
/// # Errors
/// A folder that can't be read.
pub fn find_adapter(named: &Path) -> Result<PathBuf> {
    let is_adapter = |dir: &Path| dir.join("adapter_config.json").exists();
    if is_adapter(named) {
        return Ok(named.into());
    }
    let newest = |parent: &Path| -> Result<Option<PathBuf>> {
        let step = folder::steps(parent)?.into_iter().next_back();
        Ok(step.map(|step| parent.join(format!("step_{step}")).join("lora_adapters")))
    };
    let of_checkpoint = || {
        let run = named.parent()?.parent()?;
        Some(run.join("weights").join(named.file_name()?).join("lora_adapters"))
    };
    let places = [
        Some(named.join("lora_adapters")),
        newest(named)?,
        newest(&named.join("weights"))?,
        named.join("trainable.safetensors").exists().then(of_checkpoint).flatten(),
    ];
    // A folder without an adapter is told of by whoever reads it.
    Ok(places.into_iter().flatten().find(|dir| is_adapter(dir)).unwrap_or_else(|| named.into()))
}

/// What others load of a run: its adapter as [`find_adapter`] finds it, else the newest model in its `weights`, else
/// the folder itself.
///
/// # Errors
/// A folder that can't be read.
pub fn find_export(named: &Path) -> Result<PathBuf> {
    let adapter = find_adapter(named)?;
    if adapter != named || named.join("config.json").exists() || named.join("adapter_config.json").exists() {
        return Ok(adapter);
    }
    for parent in [named.join("weights"), named.to_path_buf()] {
        let steps = folder::steps(&parent)?;
        let models = steps.into_iter().rev().map(|step| parent.join(format!("step_{step}")));
        if let Some(model) = models.into_iter().find(|dir| dir.join("config.json").exists()) {
            return Ok(model);
        }
    }
    Ok(named.into())
}

/// The note about a `step_N` that is no save of ours and was renamed.
pub fn not_whole(parent: &Path, step: usize, aside: &Path) -> String {
    let path = parent.join(format!("step_{step}"));
    format!("`{}` has no `{}`, so it is no save; now `{}`", path.display(), folder::STABLE, aside.display())
}

fn write_file(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|e| Error::io(path, "write", e))
}
