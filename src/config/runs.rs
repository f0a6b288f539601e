//! `[[runs]]`: several adapter runs in one job. A run is what stands at the top of the file with its own keys on top; a
//! table of another `type` takes the place of the job's.
//!
//! ```toml
//! max_steps = 200
//! [model.lora]
//! rank = 16
//!
//! [[runs]]
//! name = "slow"
//! optim.lr = 1e-4
//!
//! [[runs]]
//! name = "wide"
//! start_step = 50
//! model.lora.rank = 64
//! ```

use super::SftConfig;
use super::read::Reader;
use super::source::{Node, Value};

/// One of several runs that share a frozen base.
#[derive(Debug, Clone, PartialEq)]
pub struct RunConfig {
    /// Its name: that of its folder, `output_dir/runs/NAME`.
    pub name: String,
    /// Steps of the job before its first.
    pub start_step: usize,
    /// Its whole configuration.
    pub config: SftConfig,
}

/// What a run can have of its own; all else is the job's.
const OWN: [&str; 9] =
    ["max_steps", "num_epochs", "seed", "model", "data", "val", "sample", "optim", "scheduler"];
/// Below `model`, the adapter alone.
const OWN_MODEL: [&str; 1] = ["lora"];

/// The entries of `[[runs]]` that a tree holds, taken out of it.
pub(super) fn take(root: &mut Node) -> Vec<Node> {
    let Value::Table(entries) = &mut root.value else { return Vec::new() };
    let Some(at) = entries.iter().position(|(name, _)| name == "runs") else { return Vec::new() };
    let (_, runs) = entries.remove(at);
    match runs.value {
        Value::List(items) => items,
        value => vec![Node { value, ..runs }],
    }
}

/// Its own keys of an entry: name, first step, and the tree that lies on top of the job's. What is wrong is noted.
pub(super) fn own(entry: &Node, number: usize, reader: &mut Reader) -> Option<(String, usize, Node)> {
    let path = format!("runs[{number}]");
    let Value::Table(entries) = &entry.value else {
        return reader.wrong_type(entry, &path, "a table; write `[[runs]]` with its keys below");
    };
    let (mut name, mut start_step) = (None, 0);
    let mut tree = Vec::new();
    for (key, node) in entries {
        let full = format!("{path}.{key}");
        match key.as_str() {
            "name" => name = name_of(node, &full, reader),
            "start_step" => match node.integer().and_then(|n| usize::try_from(n).ok()) {
                Some(step) => start_step = step,
                None => return reader.wrong_type(node, &full, "a number of steps"),
            },
            _ if OWN.contains(&key.as_str()) => {
                if key == "model" {
                    only_lora(node, &full, reader);
                }
                tree.push((key.clone(), node.clone()));
            }
            _ => job_key(node, &full, reader),
        }
    }
    if !entries.iter().any(|(key, _)| key == "name") {
        let message = format!("`{path}` has no `name`");
        reader.problem(entry.place, &path, message, "give each run a name of its own, `name = \"lr-1e-4\"`");
    }
    Some((name?, start_step, Node { value: Value::Table(tree), place: entry.place }))
}

/// Lays a run's keys over the job's. A table of another `type` takes the place of the job's, whose keys would mean
/// nothing in it.
pub(super) fn lay_over(tree: &mut Node, own: Node) {
    let kind = |node: &Node| {
        let (_, kind) = node.entries()?.iter().find(|(key, _)| key == "type")?;
        Some(kind.text()?.to_string())
    };
    if let (Value::Table(there), Value::Table(here)) = (&mut tree.value, &own.value) {
        there.retain(|(key, old)| {
            let new = here.iter().find(|(name, _)| name == key).map(|(_, new)| new);
            new.and_then(kind).zip(kind(old)).is_none_or(|(new, old)| new == old)
        });
    }
    tree.merge(own);
}

fn job_key(node: &Node, full: &str, reader: &mut Reader) {
    let message = format!("`{full}` is not a run's own: it belongs to the whole job");
    let hint =
        format!("a run has `name`, `start_step` and keys of {}; put it above `[[runs]]`", OWN.join(", "));
    reader.problem(node.place, full, message, hint);
}

fn only_lora(node: &Node, full: &str, reader: &mut Reader) {
    for (key, node) in node.entries().unwrap_or_default() {
        if !OWN_MODEL.contains(&key.as_str()) {
            job_key(node, &format!("{full}.{key}"), reader);
        }
    }
}

/// A name that is a folder's everywhere.
fn name_of(node: &Node, full: &str, reader: &mut Reader) -> Option<String> {
    let good = |name: &&str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.+=".contains(c);
        !name.is_empty() && name.len() <= 100 && !name.starts_with('.') && name.chars().all(plain)
    };
    match node.text().filter(good) {
        Some(name) => Some(name.to_string()),
        None => reader.wrong_type(node, full, "a name of letters, digits, `-`, `_`, `.`, `+` and `=`"),
    }
}

/// The folders of a run below the job's.
pub(super) fn place(config: &mut SftConfig, name: &str) {
    config.output_dir = config.output_dir.join("runs").join(name);
    if let Some(dir) = config.ckpt.as_mut().and_then(|ckpt| ckpt.output_dir.as_mut()) {
        *dir = dir.join("runs").join(name);
    }
}

/// What runs need together. What doesn't hold is noted.
pub(super) fn rules(runs: &[RunConfig], reader: &mut Reader) {
    for (n, run) in runs.iter().enumerate() {
        let path = format!("runs[{n}]");
        let twice = runs[..n].iter().any(|other| other.name == run.name);
        let message = || format!("two runs are called `{}`", run.name);
        reader.rule(!twice, &[&format!("{path}.name")], message, "give each a name of its own");
        let whole = run.config.model.lora.as_ref().is_none_or(|lora| !lora.modules_to_save.is_empty());
        let message =
            || format!("`{}` trains more than an adapter, and the runs share a frozen base", run.name);
        let hint = "add `[model.lora]` without `modules_to_save`, or train it in a job of its own";
        reader.rule(!whole, &[&path, "model.lora"], message, hint);
    }
}

impl RunConfig {
    /// The file of a job with these runs: the job's keys, then each run's that differ. It reads back equal.
    pub fn to_toml(job: &SftConfig, runs: &[RunConfig]) -> String {
        let table = |config: &SftConfig| -> toml::Table {
            config.to_toml().parse().expect("a configuration's own text reads back")
        };
        let mut all = table(job);
        let entries = runs.iter().map(|run| {
            let mut own = toml::Table::new();
            own.insert("name".into(), run.name.clone().into());
            if run.start_step > 0 {
                own.insert("start_step".into(), (run.start_step as i64).into());
            }
            let mut there = run.config.clone();
            (there.output_dir, there.ckpt) = (job.output_dir.clone(), job.ckpt.clone());
            own.extend(differing(&table(job), table(&there)));
            toml::Value::Table(own)
        });
        let entries: Vec<toml::Value> = entries.collect();
        if !entries.is_empty() {
            all.insert("runs".into(), entries.into());
        }
        toml::to_string(&all).expect("keys are strings, values plain")
    }
}

/// The keys of `over` whose values aren't those of `base`.
fn differing(base: &toml::Table, over: toml::Table) -> toml::Table {
    let mut out = toml::Table::new();
    for (key, value) in over {
        match (base.get(&key), value) {
            (Some(old), value) if *old == value => {}
            // A table of another type has other keys: it is written whole.
            (Some(toml::Value::Table(old)), toml::Value::Table(new))
                if old.get("type") == new.get("type") =>
            {
                out.insert(key, differing(old, new).into());
            }
            (_, value) => {
                out.insert(key, value);
            }
        }
    }
    out
}
