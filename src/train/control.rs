//! What is said to a job of several runs while it trains, by files in `output_dir/control/`:
//!
//! | file | what happens before the next step |
//! |---|---|
//! | `add/NAME.toml` | a run NAME begins, with the file's keys on top of the job's (an entry of `[[runs]]` without its name) |
//! | `stop/NAME` | the run NAME saves and ends |
//!
//! A file that was obeyed is moved to `done/`, and to `ended/` when the run that it added has ended; one that couldn't be to
//! `refused/`, with the reason in the log.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::ground::{Ground, Purpose};
use super::run::Run;
use super::sft::{Job, StopFlag};
use crate::checkpoint::RunFolder;
use crate::config::{Plan, RunConfig, SftConfig, load_run};
use crate::model::LoraSpec;
use crate::report::{Event, Named, Report};
use crate::{Error, Result};

/// One file.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Add {
        name: String,
        text: String,
    },
    Stop {
        name: String,
    },
    /// Why it can't be read.
    Unreadable {
        file: String,
        why: String,
    },
}

impl Order {
    /// Below `control/`.
    fn file(&self) -> String {
        match self {
            Order::Add { name, .. } => format!("add/{name}.toml"),
            Order::Stop { name } => format!("stop/{name}"),
            Order::Unreadable { file, .. } => file.clone(),
        }
    }
}

/// An order that nothing speaks against so far: what every rank finds out by itself.
enum Ready {
    Add {
        name: String,
        config: Box<SftConfig>,
        plan: Box<Plan>,
    },
    /// The run's place among those that train.
    Stop(usize),
}

/// Writes `configs/sft.toml` of a job of several runs.
pub(super) fn write_config(config: &SftConfig, runs: &[RunConfig]) -> Result<()> {
    let folder = RunFolder::new(config);
    folder.write_config(&RunConfig::to_toml(config, runs))?;
    let control = control(config);
    for inner in ["add", "stop"] {
        let path = control.join(inner);
        fs::create_dir_all(&path).map_err(|e| Error::io(&path, "create", e))?;
    }
    Ok(())
}

fn control(config: &SftConfig) -> PathBuf {
    config.output_dir.join("control")
}

/// What an earlier process of the job was told that its file doesn't say. The records of another job, whose runs were
/// cleaned away, go.
pub(super) fn left_over(config: &SftConfig, runs: &[Run]) -> Vec<String> {
    let control = control(config);
    let done = control.join("done");
    let mut warnings = Vec::new();
    if runs.iter().all(|run| run.progress.step == 0) {
        for inner in ["done", "refused", "ended"].iter().filter(|_| config.clean_output_dir) {
            let _ = fs::remove_dir_all(control.join(inner)); // What stays is told of, no more.
        }
    }
    let mut records: Vec<PathBuf> =
        fs::read_dir(&done).into_iter().flatten().flatten().map(|e| e.path()).collect();
    records.sort();
    for record in records {
        let Some(file) = record.file_name().and_then(|name| name.to_str()) else { continue };
        let run = |name: &str| runs.iter().find(|run| run.name.as_deref() == Some(name));
        match (file.strip_suffix(".toml"), run(file)) {
            (Some(name), _) if run(name).is_none() && !control.join("add").join(file).exists() => {
                warnings.push(format!(
                    "the run `{name}` was added while the job trained and isn't in its file: move `control/done/{file}` to \
                     `control/add/` and it goes on"
                ));
            }
            (None, Some(run)) if !run.is_done() => {
                warnings.push(format!(
                    "{file} was stopped by `control/stop` and goes on now: a file `control/stop/{file}` stops it again"
                ));
                // Said once.
                let _ = put(&record, &control.join("ended"));
            }
            _ => {}
        }
    }
    warnings
}

/// An added run that has ended isn't missed when the job is resumed.
pub(super) fn ended(config: &SftConfig, name: &str) {
    let control = control(config);
    // At worst a resumed job tells of it.
    let _ = put(&control.join("done").join(format!("{name}.toml")), &control.join("ended"));
}

/// Does what the files say.
///
/// # Errors
/// With several ranks, a run whose data or folder turn out wrong while it is added; and what can't be saved.
pub(super) fn obey(job: &mut Job<'_>, report: &mut dyn Report, stop: &StopFlag) -> Result<()> {
    if job.runs.iter().all(|run| run.name.is_none()) {
        return Ok(());
    }
    let orders = job.ranks.from_first(|| Ok(orders(&control(job.config))))?;
    for order in orders {
        let (config, file) = (job.config, order.file());
        let ready = ready(job, order);
        // All refuse it, or none.
        let refused = job.ranks.any(ready.is_err())?;
        let result = match ready {
            Ok(_) if refused => Err(Error::train("another rank refuses it", "its log says why")),
            Ok(Ready::Add { name, config, plan }) => add(job, name, *config, &plan, report, stop),
            Ok(Ready::Stop(n)) => {
                let run = job.runs.remove(n);
                job.end(run, report)
            }
            Err(error) => Err(error),
        };
        let done = result.is_ok();
        if let Err(error) = result {
            if !refused && job.ranks.count() > 1 {
                // Ranks can't go on apart. The file must not be found again by whoever resumes.
                if job.ranks.is_first() {
                    put_away(&control(config), &file, false)?;
                }
                return Err(error);
            }
            let hint = error.hint().map(|hint| format!(" ({hint})")).unwrap_or_default();
            report.event(&Event::Warning(format!("`control/{file}` is refused: {error}{hint}")));
        }
        job.ranks.from_first(|| put_away(&control(config), &file, done))?;
    }
    Ok(())
}

/// What can be said against an order without asking other ranks.
fn ready(job: &Job<'_>, order: Order) -> Result<Ready> {
    match order {
        Order::Add { name, text } => {
            if job.names().any(|taken| taken == name) {
                let hint = "give the file another name";
                return Err(Error::train(format!("there is a run `{name}` already"), hint));
            }
            let RunConfig { config, start_step, .. } = load_run(job.config, &name, &text)?;
            if start_step > 0 {
                return Err(Error::train("a run that is added begins at once", "leave `start_step` out"));
            }
            let plan = Box::new(job.plan.of_run(&config)?);
            Ok(Ready::Add { name, config: Box::new(config), plan })
        }
        Order::Stop { name } => {
            let found = job.runs.iter().position(|run| run.name.as_deref() == Some(&name));
            let missing =
                || Error::train(format!("no run `{name}` is training"), "look at `runs/` for the names");
            found.map(Ready::Stop).ok_or_else(missing)
        }
        Order::Unreadable { why, .. } => Err(Error::train(why, "a plain file in UTF-8 is wanted")),
    }
}

/// What is there, in the order of the names.
fn orders(control: &Path) -> Vec<Order> {
    let names = |inner: &str| {
        let entries = fs::read_dir(control.join(inner)).into_iter().flatten().flatten();
        let mut names: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        names.sort();
        names
    };
    let stem = |path: &Path| Some(path.file_stem()?.to_str()?.to_string());
    let added = names("add").into_iter().filter(|path| path.extension().is_some_and(|e| e == "toml"));
    let added = added.filter_map(|path| {
        let name = stem(&path)?;
        // Not a pipe, which nobody may ever write to.
        let text = match path.is_file() {
            true => fs::read_to_string(&path).map_err(|why| why.to_string()),
            false => Err("it is no file".into()),
        };
        Some(match text {
            Ok(text) => Order::Add { name, text },
            Err(why) => Order::Unreadable { file: format!("add/{name}.toml"), why },
        })
    });
    let stopped = names("stop").into_iter().filter_map(|path| {
        let name = path.file_name()?.to_str()?.to_string();
        Some(match path.is_file() {
            true => Order::Stop { name },
            false => Order::Unreadable { file: format!("stop/{name}"), why: "it is no file".into() },
        })
    });
    added.chain(stopped).collect()
}

/// A file that stays where it is would be found again before every step.
fn put_away(control: &Path, file: &str, done: bool) -> Result<()> {
    let from = control.join(file);
    let moved = put(&from, &control.join(if done { "done" } else { "refused" }));
    moved.map_err(|e| Error::io(&from, "move", e))
}

/// Into a folder, under its own name or, where that is taken, `NAME.2` and so on.
fn put(from: &Path, to: &Path) -> std::io::Result<()> {
    let name = from.file_name().expect("an order has a name");
    fs::symlink_metadata(from)?;
    fs::create_dir_all(to)?;
    let numbered = |n: u32| {
        let mut name = name.to_os_string();
        name.push(format!(".{n}"));
        to.join(name)
    };
    let taken = |path: &PathBuf| fs::symlink_metadata(path).is_ok();
    let names = std::iter::once(to.join(name)).chain((2..).map(numbered));
    let free = names.into_iter().find(|path| !taken(path)).expect("some number is free");
    fs::rename(from, free)
}

fn add(
    job: &mut Job<'_>,
    name: String,
    config: SftConfig,
    plan: &Plan,
    report: &mut dyn Report,
    stop: &StopFlag,
) -> Result<()> {
    let report = &mut Named::new(report, Some(&name));
    let ground = Ground::survey(&config, plan, Purpose::Train, &mut job.ranks, report, stop);
    let ground = ground.map_err(|error| error.of_run(&name))?;
    let lora = config.model.lora.as_ref().expect("runs have adapters: a rule of their file");
    let mut model = job.model.clone();
    model.attach_one_more(&LoraSpec::from_config(lora), config.seed)?;
    let place = (Some(name.clone()), model.runs().len() - 1, 0);
    let mut run = Run::new(place, config, ground, &mut model, &job.ranks, report)?;
    job.model = model;
    run.begin(&job.model, &job.ranks, report)?;
    let steps = run.max_steps();
    report.event(&Event::Note(format!("begins, for {steps} steps")));
    job.runs.push(run);
    Ok(())
}
