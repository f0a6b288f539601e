//! One run: what is trained, on which data, by which optimizer, and its files. A run alone and one of several that
//! share a frozen base are the same code; each counts, clips, divides and saves for itself.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::eval::held_out_loss;
use super::ground::Ground;
use super::metrics::{MetricsFile, peak_process_bytes};
use super::optim::Optimizer;
use super::page;
use super::ranks::Ranks;
use super::resume;
use super::sample::Samples;
use super::schedule::Schedule;
use super::setup;
use super::skipped::{self, Skipped};
use super::step::Update;
use crate::checkpoint::{Locks, Named, Progress, RunFolder, Start, State, folder, not_whole};
use crate::config::SftConfig;
use crate::data::{Batch, Validation};
use crate::device::device_bytes;
use crate::export::{self, AdapterMeta, Card, Results};
use crate::model::{Decoder, Trainable};
use crate::report::{Event, PhaseTimes, Report, RunFacts, StepMetrics, Summary};
use crate::{Error, Result, assets};

/// A run while it trains.
pub(super) struct Run {
    /// What it is called among several.
    pub name: Option<String>,
    /// The number of its adapters in the model.
    pub index: usize,
    pub config: SftConfig,
    /// Steps of the others that it waits before its first.
    pub start_step: usize,
    folder: RunFolder,
    /// No other run writes to the folder while this one lives.
    _locks: Locks,
    data: setup::Data,
    samples: Option<Samples>,
    pub optimizer: Optimizer,
    schedule: Schedule,
    schedule_step: usize,
    max_steps: usize,
    skipped: Skipped,
    keys: resume::Keys,
    pub progress: Progress,
    /// Rank 0's.
    metrics: Option<MetricsFile>,
    pub summary: Summary,
    save_seconds: f64,
    started: Instant,
}

/// What a step came to, for one run.
pub(super) struct Step<'a> {
    pub update: Option<Update>,
    /// This rank's own micro-batches.
    pub batches: &'a [Batch],
    /// Of all ranks.
    pub trained_tokens: usize,
    pub lr: f64,
    pub time: PhaseTimes,
}

impl Run {
    /// What stands on its ground: the checkpoint goes into the model, the folder is made ready.
    pub fn new(
        (name, index, start_step): (Option<String>, usize, usize),
        config: SftConfig,
        ground: Ground,
        model: &mut Decoder,
        ranks: &Ranks,
        report: &mut dyn Report,
    ) -> Result<Self> {
        let started = Instant::now();
        let own = parameters(model, index);
        let mut optimizer = setup::optimizer(&config, &own, ranks);
        #[rustfmt::skip]
        let Ground { folder, mut locks, start, selected, base, data, samples, keys, begun, max_steps, schedule, .. } = ground;
        if let (Start::Fresh, Some(adapter)) = (&start, setup::init_adapter(&config)?) {
            // What it warns of, the survey has told.
            export::load_adapter(model, index, &adapter)?;
            report.event(&Event::Note(format!("starts from the adapter `{}`", adapter.display())));
        }
        if let Start::Resume { path, .. } = &start {
            let values = resume::restore(&config, &folder, path, &model.device(), &own, &mut optimizer)?;
            set_values(model, index, values);
        }
        setup::agree(ranks, &config, &keys, &data.loader)?;
        let mut metrics = None;
        ranks.from_first(|| {
            locks.add_all(&folder)?;
            if folder.start(&config)? != start {
                let message = "another run has saved here in the meantime";
                return Err(Error::checkpoint(&folder.root, message, "start again"));
            }
            metrics = Some(setup::folder(&config, &folder, &start, begun.progress.step, report)?);
            let place = (begun.progress.step, max_steps);
            let mut info = setup::info(&config, ranks, &selected, model, Vec::new(), place);
            // Among several, the base and its own adapter alone.
            let trained = own.iter().map(|p| p.shape.iter().product::<usize>()).sum();
            info.parameters = info.parameters - info.trainable + trained;
            info.trainable = trained;
            let facts = RunFacts::new(&info, ranks.count(), &base, data.loader.report());
            page::warn(report, facts.write(&folder.root));
            Ok(())
        })?;
        if begun.schedule_restarts {
            let note = "`ckpt.skip_progress`: the schedule starts anew with the steps";
            report.event(&Event::Note(note.into()));
        }
        let skipped = Skipped::new(config.optim.max_skipped);
        let steps = begun.progress.step;
        let mut summary = Summary { base, steps, resumed_step: steps, ..Summary::default() };
        if name.is_some() {
            // One that has nothing left to do is ranked by what it came to.
            let last = metrics.as_ref().map_or([None; 2], |metrics| metrics.last);
            [summary.last_loss, summary.last_val_loss] = last.map(|of| of.map(|(_, loss)| loss));
        }
        let (schedule_step, progress) = (begun.schedule_step, begun.progress);
        #[rustfmt::skip]
        let run = Self {
            name, index, config, start_step, folder, _locks: locks, data, samples, optimizer, schedule, schedule_step,
            max_steps, skipped, keys, progress, metrics, summary, save_seconds: 0.0, started,
        };
        Ok(run)
    }

    /// The step that it ends at.
    pub fn max_steps(&self) -> usize {
        self.max_steps
    }

    pub fn is_done(&self) -> bool {
        self.progress.step >= self.max_steps
    }

    /// This rank's micro-batches of the next step; `None` at the end of the data.
    pub fn next_batches(&mut self, report: &mut dyn Report) -> Result<Option<Vec<Batch>>> {
        let Some(batches) = self.data.loader.next_step()? else { return Ok(None) };
        if let (true, Some(tokenizer)) = (self.config.log.log_data, &self.data.tokenizer) {
            for text in setup::marked_documents(tokenizer, &batches)? {
                report.event(&Event::Note(text));
            }
        }
        Ok(Some(batches))
    }

    /// The rate of the next step.
    pub fn lr(&self) -> f64 {
        self.schedule.lr(self.schedule_step)
    }

    /// Held-out loss and samples before the first step, where they are wanted.
    pub fn begin(&mut self, model: &Decoder, ranks: &Ranks, report: &mut dyn Report) -> Result<()> {
        if self.progress.step == 0 && self.config.val.as_ref().is_some_and(|v| v.eval_on_start) {
            let loss = self.validate(model, ranks, report)?;
            self.append(&serde_json::json!({ "step": 0, "val/loss": loss }))?;
        }
        let asked = self.samples.as_ref().filter(|samples| self.progress.step == 0 && samples.on_start);
        asked.map_or(Ok(()), |samples| samples.ask(model, self.index, 0, ranks, report))
    }

    /// Counts a step, tells of it, and saves if that is due.
    pub fn end_step(
        &mut self,
        step: Step<'_>,
        model: &Decoder,
        speed: &setup::Speed,
        ranks: &Ranks,
        report: &mut dyn Report,
    ) -> Result<()> {
        let Step { update, batches, trained_tokens, lr, mut time } = step;
        let number = self.progress.step + 1;
        let stopped = self.check_finite(number, update.as_ref(), (model, batches), report).err();

        // ---- count ----
        // All ranks have micro-batches of one shape.
        let tokens = ranks.count() * batches.iter().map(Batch::tokens).sum::<usize>();
        self.schedule_step += 1;
        self.progress.step = number;
        self.progress.tokens += tokens;
        self.progress.trained_tokens += trained_tokens;
        self.progress.rows += tokens / self.config.data.seq_len();

        // ---- held-out loss ----
        let clock = Instant::now();
        let val_loss = if self.val_is_due() { Some(self.validate(model, ranks, report)?) } else { None };
        time.val = clock.elapsed().as_secs_f64();
        time.save_ckpt = self.save_seconds;

        // ---- tell: a line and a row ----
        let metrics = StepMetrics {
            run: self.name.clone(),
            step: number,
            epoch: self.data.loader.epoch(),
            loss: update.map_or(0.0, |u| u.loss),
            grad_norm: update.map_or(0.0, |u| u.grad_norm),
            lr,
            tokens,
            ranks: ranks.count(),
            trained_tokens,
            total_tokens: self.progress.tokens,
            total_trained_tokens: self.progress.trained_tokens,
            total_rows: self.progress.rows,
            mfu: speed.mfu(batches, time.step()),
            peak_bytes: peak_process_bytes(),
            device_bytes: device_bytes(&model.device()),
            time,
            val_loss,
            skipped: !update.is_some_and(|update| update.applied),
        };
        self.note_losses(&metrics);
        report.step(&metrics);
        self.append(&metrics.to_json())?;

        // ---- samples: between the steps, whose times they are no part of ----
        let due = |samples: &&Samples| stopped.is_none() && samples.is_due(number, self.max_steps);
        if let Some(samples) = self.samples.as_ref().filter(due) {
            samples.ask(model, self.index, number, ranks, report)?;
        }

        // ---- save ----
        if let Some(error) = stopped {
            self.save(model, ranks, report)?;
            self.write_page(report);
            return Err(self.at_step(number, error));
        }
        let clock = Instant::now();
        if self.save_is_due() {
            self.save(model, ranks, report)?;
        }
        self.save_seconds = clock.elapsed().as_secs_f64();
        Ok(())
    }

    /// After the last step: what isn't saved yet, and the summary.
    pub fn finish(&mut self, model: &Decoder, ranks: &Ranks, report: &mut dyn Report) -> Result<()> {
        if self.progress.step > 0 {
            self.save(model, ranks, report)?;
            self.write_page(report);
        }
        self.summary.seconds = self.started.elapsed().as_secs_f64();
        self.summary.peak_bytes = peak_process_bytes();
        Ok(())
    }

    /// Tells of a step that was skipped because it isn't finite; an error after too many of them.
    fn check_finite(
        &mut self,
        step: usize,
        update: Option<&Update>,
        (model, batches): (&Decoder, &[Batch]),
        report: &mut dyn Report,
    ) -> Result<()> {
        match update {
            Some(Update { loss, grad_norm, applied: false, .. }) => {
                let seq_len = self.config.data.seq_len();
                let among = |batch: &Batch| self.among(batch, model);
                let what = skipped::describe(model, batches, seq_len, [*loss, *grad_norm], &among)?;
                report.event(&Event::Warning(self.skipped.note(step, &what)?));
            }
            Some(_) => self.skipped.reset(),
            None => {}
        }
        Ok(())
    }

    /// A batch of this run alone, as the model takes it.
    fn among(&self, batch: &Batch, model: &Decoder) -> Batch {
        let mut parts = vec![None; model.runs().len().max(1)];
        parts[self.index] = Some(batch);
        Batch::joined(&parts)
    }

    fn val_is_due(&self) -> bool {
        let interval = self.config.val.as_ref().map(|v| v.interval.max(1));
        let step = self.progress.step;
        interval.is_some_and(|n| step.is_multiple_of(n) || step == self.max_steps)
    }

    fn validate(&mut self, model: &Decoder, ranks: &Ranks, report: &mut dyn Report) -> Result<f64> {
        let clock = Instant::now();
        let batches = self.data.val.iter().flat_map(Validation::batches);
        let batches = batches.map(|batch| Ok(self.among(&batch?, model)));
        let loss = held_out_loss(model, batches, ranks)?;
        let seconds = clock.elapsed().as_secs_f64();
        report.event(&Event::Validation { run: None, step: self.progress.step, loss, seconds });
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

    fn save_is_due(&self) -> bool {
        let interval = self.config.ckpt.as_ref().and_then(|c| c.interval);
        interval.is_some_and(|n| self.progress.step.is_multiple_of(n.max(1)))
    }

    /// Exports the weights, then writes the checkpoint: a kill in between leaves weights that the resumed run
    /// makes anew, and never a checkpoint whose weights are missing. What is there already stays.
    ///
    /// Rank 0 writes; the others give it their part of the optimizer's state, go on, and wait at their next sum.
    fn save(&mut self, model: &Decoder, ranks: &Ranks, report: &mut dyn Report) -> Result<()> {
        if !ranks.is_first() {
            return self.save_checkpoint(model, ranks, report);
        }
        let wants_weights = self.config.ckpt.as_ref().is_some_and(|c| c.weights.is_some());
        if wants_weights || self.config.model.lora.is_some() {
            self.save_weights(model, report)?;
        }
        self.save_checkpoint(model, ranks, report)?;
        // Not before: the weights of the last checkpoint stay until there is a newer one.
        match &self.config.ckpt {
            Some(c) => folder::prune(&self.folder.weights, c.keep_last, c.keep_interval).map(drop),
            None => Ok(()),
        }
    }

    /// `report.html`, on rank 0.
    fn write_page(&self, report: &mut dyn Report) {
        if self.metrics.is_some() {
            page::tell(&self.folder.root, report);
        }
    }

    /// `checkpoints/step_N`.
    fn save_checkpoint(&mut self, model: &Decoder, ranks: &Ranks, report: &mut dyn Report) -> Result<()> {
        let step = self.progress.step;
        let Some(ckpt) = self.config.ckpt.as_ref().filter(|c| !c.weights_only) else { return Ok(()) };
        let target = self.folder.checkpoints.join(format!("step_{step}"));
        if ranks.from_first(|| Ok(!target.join(folder::STABLE).exists()))? {
            let optimizer = self.optimizer.state(ranks, &model.device())?;
            if !ranks.is_first() {
                return Ok(());
            }
            self.make_way(&self.folder.checkpoints, report)?;
            report.progress("saving the checkpoint", 0, 0);
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
            let all = model.trainable_values();
            let values = model.trainable_of(self.index).into_iter().map(|n| all[n].clone());
            let trainable = parameters(model, self.index).into_iter().zip(values);
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
    fn save_weights(&mut self, model: &Decoder, report: &mut dyn Report) -> Result<()> {
        let lora = self.config.model.lora.is_some();
        let target = self.folder.weights.join(format!("step_{}", self.progress.step));
        let adapter = target.join("lora_adapters");
        if !target.join(folder::STABLE).exists() {
            self.make_way(&self.folder.weights, report)?;
            report.progress("saving the weights", 0, 0);
            let clock = Instant::now();
            let card = self.card();
            folder::write(&self.folder.weights, self.progress.step, |partial| {
                if lora {
                    let meta = AdapterMeta { base_model_name_or_path: Some(self.base_name()) };
                    let adapter = partial.join("lora_adapters");
                    export::save_adapter_with_card(model, self.index, &adapter, &meta, &card)
                } else {
                    let dtype = setup::stored_dtype(&self.config, model);
                    export::save_model_with_card(model, &self.summary.base, partial, dtype, &card)
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

    /// What the weights' card says of the run so far.
    fn card(&self) -> Card {
        let [loss, val_loss] = self.metrics.as_ref().map_or([None; 2], |metrics| metrics.last);
        let Progress { step, trained_tokens, .. } = self.progress;
        let results = Results { step, trained_tokens, loss, val_loss };
        Card::of_run(&self.config, &self.summary.base, results)
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
    pub fn at_step(&self, step: usize, error: Error) -> Error {
        let Error::Train { message, hint } = error else { return error };
        let steps = folder::steps(&self.folder.checkpoints).unwrap_or_default();
        let hint = match self.skipped.began() {
            Some(began) => hint + &resume::where_it_was_fine(began, &steps),
            None => hint + &resume::where_to_go_on(step, &steps),
        };
        Error::Train { message: format!("step {step}: {message}"), hint }
    }

    /// The answer to Ctrl-C after a save.
    pub fn interruption(&self) -> (usize, Option<PathBuf>, String) {
        let (step, checkpoint) = (self.progress.step, self.summary.checkpoint.clone());
        let hint = setup::how_to_go_on(&self.config, step, checkpoint.as_deref());
        (step, checkpoint, hint)
    }
}

/// What a run trains, by the names that it has alone.
pub(super) fn parameters(model: &Decoder, index: usize) -> Vec<Trainable> {
    let all = model.trainable();
    let own = model.trainable_of(index).into_iter().map(|n| all[n].clone());
    let (here, alone) = (format!(".adapters.{index}."), ".adapters.0.");
    own.map(|parameter| Trainable { name: parameter.name.replace(&here, alone), ..parameter }).collect()
}

/// Replaces a run's values.
fn set_values(model: &mut Decoder, index: usize, new: Vec<burn::tensor::Tensor<1>>) {
    let mut values: Vec<_> = model.trainable_values();
    model.trainable_of(index).into_iter().zip(new).for_each(|(n, value)| values[n] = value);
    *model = model.clone().set_trainable(values);
}
