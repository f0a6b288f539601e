//! A warm start: whether an adapter is what a run would train, by configurations and headers alone.

use std::path::Path;

use super::adapter_config::{AdapterConfig, plain};
use super::merge::{shapes_and_modules, wanted_by};
use super::peft::{WEIGHTS, check_tensors, no_place_for, unfit};
use crate::config::TargetModules;
use crate::error::{Error, Result};
use crate::model::{Checkpoint, HfConfig, LoraSpec, Modules, Resolved, Run, resolve};

/// Names of a list that a message shows.
const SHOWN: usize = 8;

/// Holds the adapter in `dir` against what a run of `spec` would train of a model: ranks, scales and targets, then
/// the tensors' names and shapes. What to warn of comes back.
///
/// # Errors
/// The adapter is of another kind than the run, or of another base; what a folder without a whole adapter has wrong.
pub fn check_start(dir: &Path, spec: &LoraSpec, model: &HfConfig) -> Result<Option<String>> {
    let config = AdapterConfig::load(dir)?;
    let (shapes, all) = shapes_and_modules(model);
    let Resolved { modules, saved, .. } = resolve(spec, &all).map_err(Error::Config)?;
    let run = Run { spec: spec.clone(), modules, saved };
    let found = agree(&run, &config, &all, &dir.join("adapter_config.json"))?;
    let path = dir.join(WEIGHTS);
    let file = Checkpoint::open_file(&path, Error::adapter)?;
    let stored = file.entries.iter().map(|(name, entry)| (name.clone(), entry.shape.clone())).collect();
    let unused = check_tensors(&path, &wanted_by(&found, &shapes), &stored)?;
    Ok(no_place_for(&unused))
}

/// A run takes only an adapter of the same ranks, scales and targets.
pub(super) fn agree(run: &Run, config: &AdapterConfig, modules: &Modules, path: &Path) -> Result<Resolved> {
    let found = resolve(&config.spec, modules).map_err(|problems| unfit(path, problems))?;
    if found.modules == run.modules && found.saved == run.saved {
        return Ok(found);
    }
    let (got, want) = (&config.spec, &run.spec);
    let message = format!(
        "the adapter has r {}, alpha {} and targets {}; this run has rank {}, alpha {} and {}",
        got.rank,
        got.alpha,
        told(&got.target_modules),
        want.rank,
        want.alpha,
        told(&want.target_modules)
    );
    let others: String = differences(got, want)
        .filter(|(key, ..)| !["rank", "alpha", "target_modules"].contains(key))
        .map(|(key, got, want)| format!("; `{key}` is {got} there, {want} here"))
        .collect();
    let mended: Vec<String> =
        differences(got, want).map(|(key, got, _)| format!("`model.lora.{key} = {got}`")).collect();
    let hint = format!("set `model.lora` to the adapter's values: {}", mended.join(", "));
    Err(Error::adapter(path, message + &others, hint))
}

/// Targets as a user thinks of them.
fn told(rule: &TargetModules) -> String {
    let TargetModules::List(names) = rule else { return value_of(rule) };
    let shown = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// (key, the adapter's value, the run's) of what differs.
fn differences(got: &LoraSpec, want: &LoraSpec) -> impl Iterator<Item = (&'static str, String, String)> {
    let pairs = values(got).into_iter().zip(values(want));
    pairs.filter(|((_, got), (_, want))| got != want).map(|((key, got), (_, want))| (key, got, want))
}

/// The keys of `[model.lora]` that make an adapter what it is, with their values in TOML.
fn values(spec: &LoraSpec) -> [(&'static str, String); 9] {
    let none = || "\"None\"".to_string();
    let pattern = |pairs: Vec<String>| format!("{{{}}}", pairs.join(", "));
    let ranks = spec.rank_pattern.iter().map(|(key, rank)| format!("{key:?} = {rank}"));
    let alphas = spec.alpha_pattern.iter().map(|(key, alpha)| format!("{key:?} = {}", plain(*alpha)));
    [
        ("rank", spec.rank.to_string()),
        ("alpha", plain(spec.alpha).to_string()),
        ("target_modules", value_of(&spec.target_modules)),
        ("exclude_modules", spec.exclude_modules.as_ref().map_or_else(none, value_of)),
        ("modules_to_save", list(&spec.modules_to_save)),
        ("use_rslora", spec.use_rslora.to_string()),
        ("rank_pattern", pattern(ranks.collect())),
        ("alpha_pattern", pattern(alphas.collect())),
        ("layers_to_transform", spec.layers_to_transform.as_ref().map_or_else(none, |n| format!("{n:?}"))),
    ]
}

fn value_of(rule: &TargetModules) -> String {
    match rule {
        TargetModules::List(names) => list(names),
        TargetModules::Regex(regex) => format!("{regex:?}"),
        TargetModules::AllLinear => "\"all-linear\"".into(),
    }
}

/// Sorted: PEFT writes a set, in any order.
fn list(names: &[String]) -> String {
    let mut names: Vec<&String> = names.iter().collect();
    names.sort();
    format!("{names:?}")
}
