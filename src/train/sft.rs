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

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::eval::held_out_loss;
use super::ground::{Ground, Weights, check_folders};
use super::metrics::{MetricsFile, peak_process_bytes};
use super::optim::Optimizer;
use super::ranks::{Ranks, World};
use super::resume;
use super::schedule::Schedule;
use super::setup::{self, go_on};
use super::skipped::{self, Skipped};
use super::step::{StepOptions, Update, forward_backward};
use crate::checkpoint::{Locks, Named, Progress, RunFolder, Start, State, folder, not_whole};
use crate::config::{Plan, SftConfig};
use crate::data::{Batch, Validation};
use crate::device::device_bytes;
use crate::export::{self, AdapterMeta};
use crate::model::Decoder;
use crate::report::{Event, PhaseTimes, Report, StepMetrics, Summary};
use crate::{Error, Result, assets};

/// A run of supervised fine-tuning.
#[derive(Debug, Clone)]
pub struct SftLearner {
    config: SftConfig,
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
        check_folders(&config)?;
        let world = World::of(&config)?;
        let plan = Plan::new(&config, world.ranks())?;
        Ok(Self { config, plan, world })
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
        self.world.run(&self.config, &self.plan, report, &|ranks, plan, report| {
            let mut run = Run::set_up(&self.config, ranks, plan, report, stop)?;
            run.train(report, stop)?;
            run.finish(report)
        })
    }
}

/// All that a rank of a run holds while it trains.
struct Run<'a> {
    config: &'a SftConfig,
    ranks: Ranks,
    folder: RunFolder,
    /// No other run writes to the folder while this one lives.
    _locks: Locks,
    model: Decoder,
    data: setup::Data,
    optimizer: Optimizer,
    schedule: Schedule,
    schedule_step: usize,
    max_steps: usize,
    options: StepOptions,
    skipped: Skipped,
    speed: setup::Speed,
    keys: resume::Keys,
    progress: Progress,
    /// Rank 0's.
    metrics: Option<MetricsFile>,
    summary: Summary,
    started: Instant,
}

impl<'a> Run<'a> {
    /// Everything before the first step. What a user can get wrong fails here, before anything in
    /// the run's folder is touched.
    fn set_up(
        config: &'a SftConfig,
        mut ranks: Ranks,
        plan: &Plan,
        report: &mut dyn Report,
        stop: &StopFlag,
    ) -> Result<Self> {
        let started = Instant::now();
        let ground = Ground::survey(config, plan, Weights::Needed, &mut ranks, report, stop)?;

        // ---- model, adapters, optimizer ----
        go_on(config, &ranks, stop)?;
        let (mut model, details) = setup::model(config, &ground, report)?;
        let mut optimizer = setup::optimizer(config, &model, &ranks);
        #[rustfmt::skip]
        let Ground { folder, mut locks, start, selected, base, data, keys, begun, max_steps, schedule, .. } = ground;
        if let Start::Resume { path, .. } = &start {
            resume::restore(config, &folder, path, &mut model, &mut optimizer)?;
        }

        // ---- the run's folder ----
        go_on(config, &ranks, stop)?;
        setup::agree(&ranks, config, &keys, &data.loader)?;
        let mut metrics = None;
        ranks.from_first(|| {
            locks.add_all(&folder)?;
            if folder.start(config)? != start {
                let hint = "start again";
                return Err(Error::checkpoint(
                    &folder.root,
                    "another run has saved here in the meantime",
                    hint,
                ));
            }
            metrics = Some(setup::folder(config, &folder, &start, begun.progress.step, report)?);
            Ok(())
        })?;

        report.start(&setup::info(
            config,
            &ranks,
            &selected,
            &model,
            details,
            (begun.progress.step, max_steps),
        ));
        if begun.schedule_restarts {
            report
                .event(&Event::Note("`ckpt.skip_progress`: the schedule starts anew with the steps".into()));
        }
        if let Some(why) = setup::nothing_to_do(begun.progress.step, max_steps) {
            report.event(&Event::Note(why));
        }
        let speed = setup::Speed::new(&selected, &model);
        let options = setup::step_options(config);
        let skipped = Skipped::new(config.optim.max_skipped);
        let summary = Summary { base, steps: begun.progress.step, ..Summary::default() };
        let (schedule_step, progress) = (begun.schedule_step, begun.progress);
        #[rustfmt::skip]
        let run = Self {
            config, ranks, folder, _locks: locks, model, data, optimizer, schedule, schedule_step, max_steps, options, skipped, speed, keys,
            progress, metrics, summary, started,
        };
        Ok(run)
    }

    /// The loop.
    fn train(&mut self, report: &mut dyn Report, stop: &StopFlag) -> Result<()> {
        if self.ranks.any(stop.is_set())? {
            return self.interrupted(report);
        }
        if self.progress.step == 0 && self.config.val.as_ref().is_some_and(|v| v.eval_on_start) {
            let loss = self.validate(report)?;
            self.append(&serde_json::json!({ "step": 0, "val/loss": loss }))?;
        }
        let mut save_seconds = 0.0;
        while self.progress.step < self.max_steps {
            if self.ranks.any(stop.is_set())? {
                return self.interrupted(report);
            }
            let mut time = PhaseTimes { save_ckpt: save_seconds, ..PhaseTimes::default() };

            // ---- data: the micro-batches of one optimizer step ----
            let clock = Instant::now();
            let Some(batches) = self.data.loader.next_step()? else { break };
            self.log_data(&batches, report)?;
            time.data = clock.elapsed().as_secs_f64();

            // ---- forward and backward: sums of loss, gradients and trained tokens ----
            let clock = Instant::now();
            let step = self.progress.step + 1;
            let sums =
                forward_backward(&self.model, &batches, &self.options).map_err(|e| self.at_step(step, e))?;
            let sums = sums.over(&self.ranks, &self.model, 0, batches.len())?;
            time.forward_backward = clock.elapsed().as_secs_f64();

            // ---- divide by the step's tokens, clip, update ----
            let clock = Instant::now();
            let lr = self.schedule.lr(self.schedule_step);
            let trained_tokens = sums.trained_tokens;
            let update = sums
                .update(&mut self.model, &mut self.optimizer, lr, self.config.optim.max_norm, &self.ranks)
                .map_err(|e| self.at_step(step, e))?;
            time.optimizer = clock.elapsed().as_secs_f64();
            let stopped = self.check_finite(step, update.as_ref(), &batches, report).err();

            // ---- count ----
            // All ranks have micro-batches of one shape.
            let tokens = self.ranks.count() * batches.iter().map(Batch::tokens).sum::<usize>();
            self.schedule_step += 1;
            self.progress.step = step;
            self.progress.tokens += tokens;
            self.progress.trained_tokens += trained_tokens;
            self.progress.rows += tokens / self.config.data.seq_len();

            // ---- held-out loss ----
            let clock = Instant::now();
            let val_loss = if self.val_is_due() { Some(self.validate(report)?) } else { None };
            time.val = clock.elapsed().as_secs_f64();

            // ---- tell: a line and a row ----
            let metrics = StepMetrics {
                step,
                epoch: self.data.loader.epoch(),
                loss: update.map_or(0.0, |u| u.loss),
                grad_norm: update.map_or(0.0, |u| u.grad_norm),
                lr,
                tokens,
                ranks: self.ranks.count(),
                trained_tokens,
                total_tokens: self.progress.tokens,
                total_trained_tokens: self.progress.trained_tokens,
                total_rows: self.progress.rows,
                mfu: self.speed.mfu(&batches, time.step()),
                peak_bytes: peak_process_bytes(),
                device_bytes: device_bytes(&self.model.device()),
                time,
                val_loss,
                skipped: !update.is_some_and(|update| update.applied),
            };
            self.note_losses(&metrics);
            report.step(&metrics);
            self.append(&metrics.to_json())?;

            // ---- save ----
            if let Some(error) = stopped {
                self.save(report)?;
                return Err(self.at_step(step, error));
            }
            let clock = Instant::now();
            if self.save_is_due() {
                self.save(report)?;
            }
            save_seconds = clock.elapsed().as_secs_f64();
        }
        Ok(())
    }

    /// Tells of a step that was skipped because it isn't finite; an error after too many of them.
    fn check_finite(
        &mut self,
        step: usize,
        update: Option<&Update>,
        batches: &[Batch],
        report: &mut dyn Report,
    ) -> Result<()> {
        match update {
            Some(Update { loss, grad_norm, applied: false, .. }) => {
                let seq_len = self.config.data.seq_len();
                let what = skipped::describe(&self.model, batches, seq_len, [*loss, *grad_norm])?;
                report.event(&Event::Warning(self.skipped.note(step, &what)?));
            }
            Some(_) => self.skipped.reset(),
            None => {}
        }
        Ok(())
    }

    /// After the last step: what isn't saved yet, and the summary.
    fn finish(mut self, report: &mut dyn Report) -> Result<Summary> {
        if self.progress.step > 0 {
            self.save(report)?;
        }
        self.ranks.wait()?;
        self.summary.seconds = self.started.elapsed().as_secs_f64();
        self.summary.peak_bytes = peak_process_bytes();
        report.finish(&self.summary);
        Ok(self.summary)
    }

    /// Someone pressed Ctrl-C: the step is done, so save and leave.
    fn interrupted(&mut self, report: &mut dyn Report) -> Result<()> {
        if self.progress.step > 0 {
            self.save(report)?;
        }
        self.ranks.wait()?;
        let checkpoint = self.summary.checkpoint.clone();
        let step = self.progress.step;
        let hint = setup::how_to_go_on(self.config, step, checkpoint.as_deref());
        Err(Error::Interrupted { step, checkpoint, hint })
    }

    fn val_is_due(&self) -> bool {
        let interval = self.config.val.as_ref().map(|v| v.interval.max(1));
        let step = self.progress.step;
        interval.is_some_and(|n| step.is_multiple_of(n) || step == self.max_steps)
    }

    fn validate(&mut self, report: &mut dyn Report) -> Result<f64> {
        let clock = Instant::now();
        let batches = self.data.val.iter().flat_map(Validation::batches);
        let loss = held_out_loss(&self.model, batches, &self.ranks)?;
        let seconds = clock.elapsed().as_secs_f64();
        report.event(&Event::Validation { step: self.progress.step, loss, seconds });
        self.summary.first_val_loss.get_or_insert(loss);
        self.summary.last_val_loss = Some(loss);
        Ok(loss)
    }

    /// A row of `metrics.jsonl`, on rank 0.
    fn append(&mut self, row: &serde_json::Value) -> Result<()> {
        self.metrics.as_mut().map_or(Ok(()), |metrics| metrics.append(row))
    }

    fn note_losses(&mut self, metrics: &StepMetrics) {
        self.summary.steps = metrics.step;
        if !metrics.skipped {
            self.summary.first_loss.get_or_insert(metrics.loss);
            self.summary.last_loss = Some(metrics.loss);
        }
    }

    fn log_data(&self, batches: &[Batch], report: &mut dyn Report) -> Result<()> {
        if let (true, Some(tokenizer)) = (self.config.log.log_data, &self.data.tokenizer) {
            for text in setup::marked_documents(tokenizer, batches)? {
                report.event(&Event::Note(text));
            }
        }
        Ok(())
    }

    fn save_is_due(&self) -> bool {
        let interval = self.config.ckpt.as_ref().and_then(|c| c.interval);
        interval.is_some_and(|n| self.progress.step.is_multiple_of(n.max(1)))
    }

    /// Exports the weights, then writes the checkpoint: a kill in between leaves weights that the resumed run
    /// makes anew, and never a checkpoint whose weights are missing. What is there already stays.
    ///
    /// Rank 0 writes; the others give it their part of the optimizer's state, go on, and wait at their next sum.
    fn save(&mut self, report: &mut dyn Report) -> Result<()> {
        if !self.ranks.is_first() {
            return self.save_checkpoint(report);
        }
        let wants_weights = self.config.ckpt.as_ref().is_some_and(|c| c.weights.is_some());
        if wants_weights || self.config.model.lora.is_some() {
            self.save_weights(report)?;
        }
        self.save_checkpoint(report)?;
        // Not before: the weights of the last checkpoint stay until there is a newer one.
        match &self.config.ckpt {
            Some(c) => folder::prune(&self.folder.weights, c.keep_last, c.keep_interval).map(drop),
            None => Ok(()),
        }
    }

    /// `checkpoints/step_N`.
    fn save_checkpoint(&mut self, report: &mut dyn Report) -> Result<()> {
        let step = self.progress.step;
        let Some(ckpt) = self.config.ckpt.as_ref().filter(|c| !c.weights_only) else { return Ok(()) };
        let target = self.folder.checkpoints.join(format!("step_{step}"));
        if self.ranks.from_first(|| Ok(!target.join(folder::STABLE).exists()))? {
            let optimizer = self.optimizer.state(&self.ranks, &self.model.device())?;
            if !self.ranks.is_first() {
                return Ok(());
            }
            self.make_way(&self.folder.checkpoints, report)?;
            let clock = Instant::now();
            let state = State {
                format: State::FORMAT,
                embertune: env!("CARGO_PKG_VERSION").into(),
                progress: self.progress,
                schedule_step: self.schedule_step,
                optimizer_updates: self.optimizer.updates(),
                loader: self.data.loader.state(),
                identity: self.keys.fixed.clone(),
                settings: self.keys.settings.clone(),
            };
            let trainable = self.model.trainable().into_iter().zip(self.model.trainable_values());
            let trainable: Vec<Named> =
                trainable.map(|(p, values)| Named { name: p.name, shape: p.shape, values }).collect();
            self.folder.save(ckpt, &self.config.to_toml(), &state, &trainable, &optimizer)?;
            let seconds = clock.elapsed().as_secs_f64();
            report.event(&Event::Saved { what: "checkpoint", path: target.clone(), seconds });
        }
        self.summary.checkpoint = Some(target);
        Ok(())
    }

    /// `weights/step_N`: the adapter of a LoRA run, the whole model of a full one.
    fn save_weights(&mut self, report: &mut dyn Report) -> Result<()> {
        let lora = self.config.model.lora.is_some();
        let target = self.folder.weights.join(format!("step_{}", self.progress.step));
        let adapter = target.join("lora_adapters");
        if !target.join(folder::STABLE).exists() {
            self.make_way(&self.folder.weights, report)?;
            let clock = Instant::now();
            folder::write(&self.folder.weights, self.progress.step, |partial| {
                if lora {
                    let meta = AdapterMeta { base_model_name_or_path: Some(self.base_name()) };
                    export::save_adapter(&self.model, 0, &partial.join("lora_adapters"), &meta)
                } else {
                    export::save_model(
                        &self.model,
                        &self.summary.base,
                        partial,
                        setup::stored_dtype(self.config, &self.model),
                    )
                }
            })?;
            let (what, path) = if lora { ("adapter", &adapter) } else { ("weights", &target) };
            let seconds = clock.elapsed().as_secs_f64();
            report.event(&Event::Saved { what, path: path.clone(), seconds });
        }
        if lora {
            self.summary.adapter = Some(adapter);
        } else {
            self.summary.weights = Some(target);
        }
        Ok(())
    }

    /// What PEFT is to load the base by: its name; the folder of the embedded one, whose name nobody else knows.
    fn base_name(&self) -> String {
        let name = &self.config.model.name;
        if assets::is_embedded(name) { self.summary.base.display().to_string() } else { name.clone() }
    }

    /// A folder that is no save of ours makes way for one.
    fn make_way(&self, parent: &Path, report: &mut dyn Report) -> Result<()> {
        let step = self.progress.step;
        if let Some(aside) = folder::make_way(parent, step)? {
            report.event(&Event::Warning(not_whole(parent, step, &aside)));
        }
        Ok(())
    }

    /// Says in which step a training error came up, and where to go on from.
    fn at_step(&self, step: usize, error: Error) -> Error {
        let Error::Train { message, hint } = error else { return error };
        let steps = folder::steps(&self.folder.checkpoints).unwrap_or_default();
        let hint = hint + &resume::where_to_go_on(step, &steps);
        Error::Train { message: format!("step {step}: {message}"), hint }
    }
}
