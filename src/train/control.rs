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
use crate::config::{RunConfig, SftConfig, load_run};
use crate::model::LoraSpec;
use crate::report::{Event, Named, Report};
use crate::{Error, Result};

/// One file.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Add { name: String, text: String },
    Stop { name: String },
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

/// Does what the files say.
///
/// # Errors
/// With several ranks, a run that can't be added; and what can't be saved.
pub(super) fn obey(job: &mut Job<'_>, report: &mut dyn Report, stop: &StopFlag) -> Result<()> {
    if job.runs.iter().all(|run| run.name.is_none()) {
        return Ok(());
    }
    let orders = job.ranks.from_first(|| Ok(orders(&control(job.config))))?;
    for order in orders {
        let (file, result) = match &order {
            Order::Add { name, text } => (format!("add/{name}.toml"), add(job, name, text, report, stop)),
            Order::Stop { name } => (format!("stop/{name}"), end(job, name, report)),
        };
        let done = result.is_ok();
        if let Err(error) = result {
            // Ranks can't go on apart.
            if job.ranks.count() > 1 {
                return Err(error);
            }
            report.event(&Event::Warning(format!("`control/{file}` is refused: {error}")));
        }
        let config = job.config;
        job.ranks.from_first(|| put_away(&control(config), &file, done))?;
    }
    Ok(())
}

/// What is there, in the order of the names; what can't be read is left for the next time.
fn orders(control: &Path) -> Vec<Order> {
    let names = |inner: &str| {
        let entries = fs::read_dir(control.join(inner)).into_iter().flatten().flatten();
        let mut names: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        names.sort();
        names
    };
    let stem = |path: &Path| Some(path.file_stem()?.to_str()?.to_string());
    let added = names("add").into_iter().filter(|path| path.extension().is_some_and(|e| e == "toml"));
    let added = added
        .filter_map(|path| Some(Order::Add { name: stem(&path)?, text: fs::read_to_string(&path).ok()? }));
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

fn add(job: &mut Job<'_>, name: &str, text: &str, report: &mut dyn Report, stop: &StopFlag) -> Result<()> {
    if job.names().any(|taken| taken == name) {
        let hint = "give the file another name";
        return Err(Error::train(format!("there is a run `{name}` already"), hint));
    }
    let RunConfig { config, .. } = load_run(job.config, name, text)?;
    let plan = job.plan.of_run(&config)?;
    let report = &mut Named::new(report, Some(&name.to_string()));
    let ground = Ground::survey(&config, &plan, Purpose::Train, &mut job.ranks, report, stop)?;
    let lora = config.model.lora.as_ref().expect("runs have adapters: a rule of their file");
    let mut model = job.model.clone();
    model.attach_one_more(&LoraSpec::from_config(lora), config.seed)?;
    let place = (Some(name.to_string()), model.runs().len() - 1, 0);
    let mut run = Run::new(place, config, ground, &mut model, &job.ranks, report)?;
    job.model = model;
    run.begin(&job.model, &job.ranks, report)?;
    let steps = run.max_steps();
    report.event(&Event::Note(format!("begins, for {steps} steps")));
    job.runs.push(run);
    Ok(())
}

fn end(job: &mut Job<'_>, name: &str, report: &mut dyn Report) -> Result<()> {
    let Some(n) = job.runs.iter().position(|run| run.name.as_deref() == Some(name)) else {
        return Err(Error::train(format!("no run `{name}` is training"), "look at `runs/` for the names"));
    };
    let run = job.runs.remove(n);
    job.end(run, report)
}
