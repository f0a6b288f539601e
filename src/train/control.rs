//! What is said to a job of several runs while it trains, by files in `output_dir/control/`:
//!
//! | file | what happens before the next step |
//! |---|---|
//! | `add/NAME.toml` | a run NAME begins, with the file's keys on top of the job's (an entry of `[[runs]]` without its name) |
//! | `stop/NAME` | the run NAME saves and ends |
//!
//! A file that was obeyed is moved to `done/`, one that couldn't be to `refused/`, with the reason in the log.

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
    /// What it holds, or why that can't be read.
    Add {
        name: String,
        text: std::result::Result<String, String>,
    },
    Stop {
        name: String,
    },
}

impl Order {
    /// Below `control/`.
    fn file(&self) -> String {
        match self {
            Order::Add { name, .. } => format!("add/{name}.toml"),
            Order::Stop { name } => format!("stop/{name}"),
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

/// What an earlier process of the job was told that its file doesn't say.
pub(super) fn left_over(config: &SftConfig, runs: &[Run]) -> Vec<String> {
    let mut warnings = Vec::new();
    if runs.iter().all(|run| run.progress.step == 0) {
        return warnings;
    }
    let done = control(config).join("done");
    for name in runs.iter().filter(|run| !run.is_done()).filter_map(|run| run.name.as_deref()) {
        if done.join(name).is_file() {
            warnings.push(format!(
                "{name} was stopped by `control/stop` and goes on now: a file `control/stop/{name}` stops it again"
            ));
        }
    }
    let entries = fs::read_dir(config.output_dir.join("runs")).into_iter().flatten().flatten();
    let mut others: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    others.sort();
    for path in others {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let saved = path.join("checkpoints").read_dir().is_ok_and(|mut saved| saved.next().is_some());
        if saved && !runs.iter().any(|run| run.name.as_deref() == Some(name)) {
            let file = format!("{name}.toml");
            let again = match done.join(&file).is_file() {
                true => format!("move `control/done/{file}` to `control/add/` and it does"),
                false => format!("an entry of `[[runs]]`, or a file `control/add/{file}`, makes it go on"),
            };
            warnings.push(format!("the run `{name}` has checkpoints here and doesn't go on: {again}"));
        }
    }
    warnings
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
            let text = text.map_err(|why| Error::train(why, "write the run's keys into it"))?;
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
        let text = fs::read_to_string(&path).map_err(|why| format!("it can't be read: {why}"));
        Some(Order::Add { name: stem(&path)?, text })
    });
    let stopped = names("stop")
        .into_iter()
        .filter_map(|path| Some(Order::Stop { name: path.file_name()?.to_str()?.to_string() }));
    added.chain(stopped).collect()
}

fn put_away(control: &Path, file: &str, done: bool) -> Result<()> {
    let to = control.join(if done { "done" } else { "refused" });
    fs::create_dir_all(&to).map_err(|e| Error::io(&to, "create", e))?;
    let from = control.join(file);
    let name = from.file_name().expect("an order has a name");
    fs::rename(&from, to.join(name)).map_err(|e| Error::io(&from, "move", e))
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
    let ground = Ground::survey(&config, plan, Purpose::Train, &mut job.ranks, report, stop)?;
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
