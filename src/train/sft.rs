//! THE RECIPE: supervised fine-tuning from a configuration, read top to bottom: set up, loop, finish.
//!
//! The command line does nothing but call this, so the library does what the command does:
//!
//! ```no_run
//! # fn main() -> embertune::Result<()> {
//! let config = embertune::SftConfig::from_toml(&std::fs::read_to_string("run.toml").unwrap(), "run.toml")?;
//! let summary = embertune::SftLearner::new(config)?.fit(&mut embertune::report::Plain::stderr())?;
//! println!("the adapter is in {:?}", summary.adapter);
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::control;
use super::fit::Room;
use super::ground::{Ground, Purpose, check_folders};
use super::metrics::peak_process_bytes;
use super::page;
use super::ranks::{Ranks, World};
use super::run::{Run, Step};
use super::setup::{self, go_on};
use super::step::{StepOptions, Turn, forward_backward_runs, update_runs};
use crate::checkpoint::{Locks, RunFolder};
use crate::config::{Plan, RunConfig, SftConfig};
use crate::data::Batch;
use crate::device::Selected;
use crate::model::Decoder;
use crate::report::{Both, Event, Monitors, Named, PhaseTimes, Report, Summary};
use crate::{Error, Result};

/// A run of supervised fine-tuning.
#[derive(Debug, Clone)]
pub struct SftLearner {
    config: SftConfig,
    runs: Vec<RunConfig>,
    plan: Plan,
    world: World,
}

/// Asks a run to stop after the step at hand. Clones share the flag.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Asks to stop; returns whether that was asked before.
    pub fn stop(&self) -> bool {
        self.0.swap(true, Ordering::SeqCst)
    }

    /// Whether someone asked to stop.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

impl SftLearner {
    /// A run of this configuration.
    ///
    /// # Errors
    /// Every rule of the configuration that doesn't hold.
    pub fn new(config: SftConfig) -> Result<Self> {
        Self::with_runs(config, Vec::new())
    }

    /// Several adapter runs over one frozen base, each with a configuration of its own ([`crate::config::load`] reads
    /// them); none is [`SftLearner::new`].
    ///
    /// # Errors
    /// Every rule of the configurations that doesn't hold.
    pub fn with_runs(config: SftConfig, runs: Vec<RunConfig>) -> Result<Self> {
        check_folders(&config)?;
        let world = World::of(&config)?;
        let plan = Plan::new(&config, world.ranks())?;
        for run in &runs {
            plan.of_run(&run.config)?;
        }
        Ok(Self { config, runs, plan, world })
    }

    /// Trains to the end.
    ///
    /// # Errors
    /// Whatever is wrong with configuration, model, data, device or checkpoint: before the first step.
    pub fn fit(&self, report: &mut dyn Report) -> Result<Summary> {
        self.fit_with(report, &StopFlag::default())
    }

    /// Trains to the end, or until `stop` is set: then the step at hand is finished and saved (or, before the
    /// first one, nothing is changed).
    ///
    /// # Errors
    /// As [`SftLearner::fit`], and [`Error::Interrupted`] when it was stopped.
    pub fn fit_with(&self, report: &mut dyn Report, stop: &StopFlag) -> Result<Summary> {
        if self.config.dry_run {
            let path = RunFolder::new(&self.config).write_dry_run(&self.config.to_toml())?;
            report.event(&Event::Note(format!("dry run: wrote `{}`", path.display())));
            return Ok(Summary::default());
        }
        let report = &mut Both(report, Monitors::new(&self.config));
        self.world.run(&self.config, &self.plan, report, &|ranks, plan, report| {
            let mut job = Job::set_up(&self.config, &self.runs, ranks, plan, report, stop)?;
            job.train(report, stop)?;
            job.finish(report)
        })
    }
}

/// All that a rank holds while its runs train: one model, and usually one run.
pub(super) struct Job<'a> {
    pub config: &'a SftConfig,
    pub plan: &'a Plan,
    pub ranks: Ranks,
    pub model: Decoder,
    /// Those that train, or wait to.
    pub runs: Vec<Run>,
    /// Those that are done, each with its name.
    ended: Vec<(String, Summary)>,
    /// Those that could not go on, and why.
    failed: Vec<(String, Error)>,
    options: StepOptions,
    speed: setup::Speed,
    /// Where the device has too little memory after all: what would fit. `None` where several runs share it.
    room: Option<(Room, Selected)>,
    /// Steps of this job, whichever runs took part.
    step: usize,
    started: Instant,
    /// No other job writes to the folder that the runs' folders lie in.
    _locks: Locks,
}

/// A job of several runs and a run by itself have other folders for what they save, and the same for all else.
fn nobody_else_saved(config: &SftConfig, several: bool) -> Result<()> {
    let root = &config.output_dir;
    let folder = RunFolder::new(config);
    let jobs = || std::fs::read_dir(root.join("runs")).into_iter().flatten().flatten();
    let (found, who) = match several {
        true => (folder.checkpoints.exists() || folder.weights.exists(), "a run that isn't a job of several"),
        false => (jobs().any(|run| run.path().join("metrics.jsonl").exists()), "a job of several runs"),
    };
    if !found {
        return Ok(());
    }
    let message = format!("{who} has saved here, and nothing is overwritten");
    Err(Error::checkpoint(root, message, "set another `output_dir`, or move the folder away"))
}

/// One run's `clean_output_dir` may not delete what another one reads.
fn spare_inputs(runs: &[RunConfig]) -> Result<()> {
    for cleaned in runs.iter().filter(|run| run.config.clean_output_dir) {
        let folder = RunFolder::new(&cleaned.config);
        runs.iter().try_for_each(|run| folder.may_clean(&run.config))?;
    }
    Ok(())
}

impl<'a> Job<'a> {
    /// Everything before the first step. What a user can get wrong fails here, before anything in
    /// a run's folder is touched.
    fn set_up(
        config: &'a SftConfig,
        runs: &[RunConfig],
        mut ranks: Ranks,
        plan: &'a Plan,
        report: &mut dyn Report,
        stop: &StopFlag,
    ) -> Result<Self> {
        let started = Instant::now();
        let alone = [RunConfig { name: String::new(), start_step: 0, config: config.clone() }];
        let several = !runs.is_empty();
        let runs = if several { runs } else { &alone };

        // ---- all that can be found out before the weights are read ----
        let mut grounds = Vec::with_capacity(runs.len());
        for run in runs {
            let report = &mut Named::new(report, several.then_some(&run.name));
            let plan = plan.of_run(&run.config)?;
            let ground = Ground::survey(&run.config, &plan, Purpose::Train, &mut ranks, report, stop);
            grounds.push(ground.map_err(|error| if several { error.of_run(&run.name) } else { error })?);
        }

        let mut locks = Locks::default();
        ranks.from_first(|| {
            nobody_else_saved(config, several)?;
            // A run by itself was held against its own folder above.
            if several {
                locks = Locks::of_existing(&RunFolder::new(config))?;
                spare_inputs(runs)?;
            }
            Ok(())
        })?;

        // ---- model, adapters ----
        go_on(config, &ranks, stop)?;
        let (mut model, details) = setup::model(runs, &grounds, report)?;
        let speed = setup::Speed::new(&grounds[0].selected, &model);
        let room = (!several).then(|| (grounds[0].room.clone(), grounds[0].selected.clone()));
        let first = (grounds[0].begun.progress.step, grounds[0].max_steps);
        let mut info = setup::info(config, &ranks, &grounds[0].selected, &model, details, first);
        info.steps_per_epoch = setup::steps_per_epoch(&grounds[0].data.loader).filter(|_| !several);
        info.samples = runs.iter().any(|run| run.config.sample.is_some());

        // ---- each run: optimizer, what an earlier process left, its folder ----
        go_on(config, &ranks, stop)?;
        let mut made = Vec::with_capacity(runs.len());
        for (index, (run, ground)) in runs.iter().zip(grounds).enumerate() {
            let name = several.then(|| run.name.clone());
            let report = &mut Named::new(report, name.as_ref());
            let place = (name.clone(), index, run.start_step);
            made.push(Run::new(place, run.config.clone(), ground, &mut model, &ranks, report)?);
        }
        if several {
            ranks.from_first(|| {
                locks.add_all(&RunFolder::new(config))?;
                control::write_config(config, runs)?;
                control::left_over(config, &made).into_iter().for_each(|w| report.event(&Event::Warning(w)));
                Ok(())
            })?;
            info.runs = runs.iter().map(|run| run.name.clone()).collect();
            info.max_steps = made.iter().map(|run| run.start_step + run.max_steps()).max();
        }
        report.start(&info);
        if let Some(why) = setup::nothing_to_do(first.0, first.1).filter(|_| !several) {
            report.event(&Event::Note(why));
        }
        let options = setup::step_options(config);
        // A run that hasn't begun still waits.
        let begun = made.iter().filter(|run| run.progress.step > 0);
        let step = begun.map(|run| run.start_step + run.progress.step).max().unwrap_or(0);
        let (ended, failed) = (Vec::new(), Vec::new());
        #[rustfmt::skip]
        let job = Self {
            config, plan, ranks, model, runs: made, ended, failed, options, speed, room, step, started, _locks: locks,
        };
        Ok(job)
    }

    /// The loop.
    fn train(&mut self, report: &mut dyn Report, stop: &StopFlag) -> Result<()> {
        if self.ranks.any(stop.is_set())? {
            return self.interrupted(report);
        }
        for run in &mut self.runs {
            run.begin(&self.model, &self.ranks, &mut Named::new(report, run.name.clone().as_ref()))?;
        }
        loop {
            control::obey(self, report, stop)?;
            self.end_runs(report)?;
            if self.runs.is_empty() {
                return Ok(());
            }
            if self.ranks.any(stop.is_set())? {
                return self.interrupted(report);
            }
            self.one_step(report)?;
        }
    }

    /// One optimizer step of every run whose turn it is.
    fn one_step(&mut self, report: &mut dyn Report) -> Result<()> {
        let mut time = PhaseTimes::default();
        // Where all wait, the next doesn't.
        self.step = self.step.max(self.runs.iter().map(|run| run.start_step).min().unwrap_or(0));

        // ---- data: each run's micro-batches, and what they make together ----
        let clock = Instant::now();
        let mut brought: Vec<Option<Vec<Batch>>> = Vec::with_capacity(self.runs.len());
        for run in &mut self.runs {
            let report = &mut Named::new(report, run.name.clone().as_ref());
            brought.push(if run.start_step <= self.step { run.next_batches(report)? } else { None });
        }
        let rounds = brought.iter().flatten().map(Vec::len).max().unwrap_or(0);
        let joined = self.joined(&brought, rounds);
        let batches = joined.as_deref().or(brought[0].as_deref()).unwrap_or_default();
        // Asked for before the device has work, since the answer waits for it.
        let mut tokens: Vec<f64> = brought
            .iter()
            .flatten()
            .map(|own| own.iter().map(|batch| batch.trained_tokens() as f64).sum())
            .collect();
        self.ranks.sum_each(&mut tokens)?;
        let mut tokens = tokens.into_iter();
        time.data = clock.elapsed().as_secs_f64();

        // ---- forward and backward: each run's sums of loss, gradients and trained tokens ----
        let clock = Instant::now();
        let sums = forward_backward_runs(&self.model, batches, &self.options)
            .map_err(|e| match &self.room {
                Some((room, selected)) => room.explain(e, selected),
                None => e,
            })
            .map_err(|e| self.runs[0].at_step(self.runs[0].progress.step + 1, e))?;
        let mut sums: Vec<_> = sums.into_iter().map(Some).collect();
        let mut turns = Vec::new();
        let mut counts = Vec::new();
        for (run, brought) in self.runs.iter_mut().zip(&brought) {
            let Some(own) = brought else { continue };
            let sums = sums[run.index].take().expect("each run has its own");
            let tokens = tokens.next().expect("one number for each run that brings something") as usize;
            let sums = sums.over(&self.ranks, &self.model, run.index, own.len(), tokens)?;
            let (lr, max_norm) = (run.lr(), run.config.optim.max_norm);
            counts.push((sums.trained_tokens, lr));
            turns.push(Turn { run: run.index, sums, optimizer: &mut run.optimizer, lr, max_norm });
        }
        time.forward_backward = clock.elapsed().as_secs_f64();

        // ---- divide by each run's tokens, clip, update ----
        let clock = Instant::now();
        let mut updates = update_runs(&mut self.model, turns, &self.ranks);
        time.optimizer = clock.elapsed().as_secs_f64();

        // ---- count, held-out loss, a line and a row, save ----
        // Another rank's failure, say: what the other runs have read may be garbage, and must not be saved.
        let of_all = |update: &Result<_>| matches!(update, Err(e) if !matches!(e, Error::Train { .. }));
        if let Some(n) = updates.iter().position(of_all) {
            return updates.swap_remove(n).map(drop);
        }
        let turns = counts.into_iter().zip(updates);
        let stepped: Vec<_> =
            brought.iter().enumerate().filter_map(|(n, b)| Some((n, b.as_deref()?))).collect();
        let mut errors = Vec::new();
        for ((n, own), ((trained_tokens, lr), update)) in stepped.into_iter().zip(turns) {
            let run = &mut self.runs[n];
            let report = &mut Named::new(report, run.name.clone().as_ref());
            let number = run.progress.step + 1;
            let done = update.map_err(|e| run.at_step(number, e)).and_then(|update| {
                let step = Step { update, batches: own, trained_tokens, lr, time };
                run.end_step(step, &self.model, &self.speed, &self.ranks, report)
            });
            errors.extend(done.err().map(|error| (n, error)));
        }
        // A run whose data have ended is over.
        let over = |(n, b): (usize, &Option<Vec<Batch>>)| b.is_none() && self.runs[n].start_step <= self.step;
        let over: Vec<usize> = brought.iter().enumerate().filter(|&at| over(at)).map(|(n, _)| n).collect();
        self.step += 1;
        self.leave(errors, over, report)
    }

    /// What the runs bring, one batch a round; `None` where one run alone brings it as it is.
    fn joined(&self, brought: &[Option<Vec<Batch>>], rounds: usize) -> Option<Vec<Batch>> {
        let runs = self.model.runs().len().max(1);
        if runs == 1 {
            return None;
        }
        let round = |round: usize| {
            let mut parts = vec![None; runs];
            for (run, brought) in self.runs.iter().zip(brought) {
                parts[run.index] = brought.as_ref().and_then(|batches| batches.get(round));
            }
            Batch::joined(&parts)
        };
        Some((0..rounds).map(round).collect())
    }

    /// Runs that failed or have no more data leave; alone, a failure is the job's.
    fn leave(
        &mut self,
        errors: Vec<(usize, Error)>,
        over: Vec<usize>,
        report: &mut dyn Report,
    ) -> Result<()> {
        let mut gone: Vec<(usize, Option<Error>)> = over.into_iter().map(|n| (n, None)).collect();
        for (n, error) in errors {
            match (&self.runs[n].name, &error) {
                (Some(_), Error::Train { .. }) => gone.push((n, Some(error))),
                _ => return Err(error),
            }
        }
        gone.sort_by_key(|(n, _)| std::cmp::Reverse(*n));
        for (n, error) in gone {
            let run = self.runs.remove(n);
            match error {
                None => self.end(run, report)?,
                Some(error) => {
                    let name = run.name.clone().unwrap_or_default();
                    let others = if self.runs.is_empty() { "" } else { ", the others go on" };
                    report.event(&Event::Warning(format!("{name} is stopped{others}: {error}")));
                    self.ended.push((name.clone(), Summary { failed: true, ..run.summary }));
                    self.failed.push((name, error));
                }
            }
        }
        Ok(())
    }

    /// Runs that have come to their last step end.
    fn end_runs(&mut self, report: &mut dyn Report) -> Result<()> {
        while let Some(n) = self.runs.iter().position(Run::is_done) {
            let run = self.runs.remove(n);
            self.end(run, report)?;
        }
        Ok(())
    }

    /// Names of all runs that there have been.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let ended = self.ended.iter().map(|(name, _)| name.as_str());
        self.runs.iter().filter_map(|run| run.name.as_deref()).chain(ended)
    }

    /// Saves a run and lets go of it.
    pub fn end(&mut self, mut run: Run, report: &mut dyn Report) -> Result<()> {
        let name = run.name.clone();
        run.finish(&self.model, &self.ranks, &mut Named::new(report, name.as_ref()))?;
        if let Some(name) = &name {
            let step = run.progress.step;
            report.event(&Event::Note(format!("{name} has ended after {step} steps")));
        }
        if let (Some(name), true) = (&name, self.ranks.is_first()) {
            control::ended(self.config, name);
        }
        self.ended.push((name.unwrap_or_default(), run.summary));
        Ok(())
    }

    /// After the last step of the last run.
    fn finish(mut self, report: &mut dyn Report) -> Result<Summary> {
        self.ranks.wait()?;
        self.write_page(report);
        let names = self.ended.len();
        let mut summary = match &self.ended[..] {
            [(name, only)] if name.is_empty() => only.clone(),
            _ => Summary { runs: std::mem::take(&mut self.ended), ..Summary::default() },
        };
        summary.rank_runs();
        summary.seconds = self.started.elapsed().as_secs_f64();
        summary.peak_bytes = peak_process_bytes();
        report.finish(&summary);
        if self.failed.is_empty() {
            return Ok(summary);
        }
        let failed: Vec<String> =
            self.failed.iter().map(|(name, error)| format!("{name}: {error}")).collect();
        let others = self.failed.len() < names;
        let hint = if others { "the other runs are saved" } else { "look at `optim.lr` and at the data" };
        Err(Error::train(format!("stopped before their end:\n  {}", failed.join("\n  ")), hint))
    }

    /// The page about a job of several runs, whose own are written; on rank 0.
    fn write_page(&self, report: &mut dyn Report) {
        if self.ranks.is_first() && self.names().any(|name| !name.is_empty()) {
            page::tell(&self.config.output_dir, report);
        }
    }

    /// Someone pressed Ctrl-C: the step is done, so save and leave.
    fn interrupted(&mut self, report: &mut dyn Report) -> Result<()> {
        for run in &mut self.runs {
            run.finish(&self.model, &self.ranks, &mut Named::new(report, run.name.clone().as_ref()))?;
        }
        self.ranks.wait()?;
        self.write_page(report);
        for (name, error) in &self.failed {
            report.event(&Event::Warning(format!("{name} was stopped before its end: {error}")));
        }
        let furthest = self.runs.iter().max_by_key(|run| run.progress.step).expect("there is a run");
        let (step, checkpoint, hint) = furthest.interruption();
        Err(Error::Interrupted { step, checkpoint, hint })
    }
}
