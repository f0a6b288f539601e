//! How fast a configuration trains here: warm-up, then steps on the same data, then a few more with the device
//! waited for between phases.

mod peer;

use std::time::Instant;

use burn::module::Module;
use serde_json::{Value, json};

use super::ground::{Ground, Purpose};
use super::metrics::peak_process_bytes;
use super::ranks::{Ranks, World};
use super::setup;
use super::sft::StopFlag;
use super::step::{GradSums, StepOptions, forward_backward};
use crate::config::{CkptConfig, Plan, RunConfig, SftConfig};
use crate::data::Batch;
use crate::device::{device_bytes, hardware_name};
use crate::model::Decoder;
use crate::report::{Event, Report};
use crate::{Error, Result};

/// Steps that are taken apart into phases, at most as many as are measured whole.
const PHASED: usize = 5;
/// What MFU is computed from.
pub const MFU_FORMULA: &str = "FLOPs of a step / seconds / the card's dense bf16 peak; a product of m×k and k×n is 2mkn; linear \
     layers 4 × their weights × tokens (6 × where trained), adapters 6 ×, head 4 × weights × trained tokens (6 × where \
     trained), attention 6·L·h·d·Σ l(l + 1) over documents; recomputation, norms and optimizer count nothing";

/// How much to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amount {
    /// Steps that don't count.
    pub warmup: usize,
    /// Steps that count, at least 1.
    pub steps: usize,
}

/// Another trainer, measured on the same batches before this one has anything on the device.
#[derive(Debug, Clone, PartialEq)]
pub struct Peer {
    /// What it calls itself.
    pub name: String,
    /// Milliseconds of each step that counts.
    pub ms: Vec<f64>,
    /// Its peak memory: of the device where there is one, else of the process.
    pub peak_bytes: Option<u64>,
}

/// What was measured. Milliseconds are those of an optimizer step.
#[derive(Debug, Clone, PartialEq)]
pub struct Bench {
    /// Model, device and hardware, type, trained parameters.
    pub what: [String; 4],
    /// Ranks that share a step.
    pub ranks: usize,
    /// Bytes of gradients that are summed over the ranks in a step; 0 with one.
    pub reduced_bytes: u64,
    /// Tokens of a step over all ranks, padding included.
    pub tokens: usize,
    /// Trained tokens of a step over all ranks.
    pub trained: usize,
    /// Each step that counts, in order.
    pub ms: Vec<f64>,
    /// Part of a step that the host waited for the device: where it is 0 the host is the limit.
    pub host_waits: f64,
    /// Phases with the device waited for in between: name and median.
    pub phases: Vec<(&'static str, f64)>,
    /// Percent of the device's peak, where that is known.
    pub mfu: Option<f64>,
    /// Most bytes that were reserved on the device, where it says.
    pub device_bytes: Option<u64>,
    /// The process's peak memory in bytes without mapped files, where the system says.
    pub process_bytes: Option<u64>,
    /// What the peak of the device (on the CPU that of the process) was estimated at.
    pub estimated_bytes: u64,
    /// Seconds from the call (with a peer, from its end) to the end of the first step.
    pub to_first_step: f64,
    /// The peer, if one was asked for.
    pub peer: Option<Peer>,
}

/// Measures; writes nothing. `peer` is a command that measures another trainer on the same step first, for the comparison.
///
/// # Errors
/// What keeps the run from starting, or a step that fails.
pub fn bench(
    config: &SftConfig,
    amount: Amount,
    peer: Option<&str>,
    report: &mut dyn Report,
) -> Result<Bench> {
    // Nothing is written: what lies in the run's own folder is in nobody's way.
    let nowhere = std::env::temp_dir().join(format!("embertune-bench-{}", std::process::id()));
    let config = SftConfig { output_dir: nowhere, ckpt: Some(CkptConfig::default()), ..config.clone() };
    let world = World::of(&config)?;
    let plan = Plan::new(&config, world.ranks())?;
    if peer.is_some() && world.ranks() > 1 {
        let message = "a peer is measured on one device";
        return Err(Error::Usage { message: message.into(), hint: "name one with `--device`".into() });
    }
    world.run(&config, &plan, report, &|ranks, plan, report| {
        measure(&config, plan, ranks, (amount, peer), report)
    })
}

/// On one rank.
fn measure(
    config: &SftConfig,
    plan: &Plan,
    mut ranks: Ranks,
    (amount, peer): (Amount, Option<&str>),
    report: &mut dyn Report,
) -> Result<Bench> {
    let mut began = Instant::now();
    let mut ground = Ground::survey(config, plan, Purpose::Train, &mut ranks, report, &StopFlag::default())?;
    let clock = Instant::now();
    let Some(batches) = ground.data.loader.next_step()? else {
        return Err(Error::train("the data hold no step", "look at `embertune check`"));
    };
    let data_ms = ms(clock);
    let mut beside = None;
    if let Some(command) = peer {
        beside = Some(peer::measure(command, config, &ground, &batches, amount, report)?);
        began = Instant::now();
    }
    let alone = RunConfig { name: String::new(), start_step: 0, config: config.clone() };
    let (model, _) = setup::model(&[alone], std::slice::from_ref(&ground), report)?;
    let (selected, room) = (ground.selected, ground.room);
    let speed = setup::Speed::new(&selected, &model);
    let optimizer = setup::optimizer(config, &model.trainable(), &ranks);
    let options = setup::step_options(config);
    let mut run = Run { config, ranks, model, optimizer, options, batches };
    let mut times = Vec::with_capacity(amount.steps);
    let (mut waits, mut to_first_step, mut most) = (Vec::new(), 0.0, None);
    for step in 0..amount.warmup + amount.steps.max(1) {
        let clock = Instant::now();
        let wait = run.step().map_err(|e| room.explain(e, &selected))?;
        if step == 0 {
            to_first_step = began.elapsed().as_secs_f64();
        }
        if step >= amount.warmup {
            times.push(ms(clock));
            waits.push(wait);
        }
        most = most.max(device_bytes(&run.model.device()));
        report.progress("measuring", step + 1, amount.warmup + amount.steps);
    }
    // What follows isn't what a run does.
    let process_bytes = peak_process_bytes();
    report.event(&Event::Note("measuring phases".into()));
    let mut phases = run.phases(amount.steps.min(PHASED))?;
    phases.insert(0, ("data", data_ms));
    let seconds = median(times.clone()) / 1e3;
    let device = hardware_name(&selected.device).unwrap_or_else(|| selected.name.clone());
    let counts = run.model.parameter_counts();
    let trainable = format!("{} trained", counts.trainable);
    let count = run.ranks.count();
    Ok(Bench {
        ranks: count,
        reduced_bytes: if count > 1 { 4 * counts.trainable as u64 } else { 0 },
        what: [
            config.model.name.clone(),
            device,
            format!("{:?}", run.model.dtype()).to_lowercase(),
            trainable,
        ],
        tokens: count * run.batches.iter().map(Batch::tokens).sum::<usize>(),
        trained: run.trained_tokens()?,
        mfu: speed.mfu(&run.batches, seconds),
        host_waits: median(waits) / median(times.clone()),
        ms: times,
        phases,
        device_bytes: most,
        process_bytes,
        estimated_bytes: room.memory(room.rows).total(),
        to_first_step,
        peer: beside,
    })
}

struct Run<'a> {
    config: &'a SftConfig,
    ranks: Ranks,
    model: Decoder,
    optimizer: super::optim::Optimizer,
    options: StepOptions,
    batches: Vec<Batch>,
}

impl Run<'_> {
    /// A step as `sft` makes it; milliseconds that the host waited for the device in it.
    fn step(&mut self) -> Result<f64> {
        let tokens = self.trained_tokens()?;
        let sums = forward_backward(&self.model, &self.batches, &self.options)?;
        let sums = sums.over(&self.ranks, &self.model, 0, self.batches.len(), tokens)?;
        self.update(sums)
    }

    fn trained_tokens(&self) -> Result<usize> {
        let own: usize = self.batches.iter().map(Batch::trained_tokens).sum();
        Ok(self.ranks.sum_f64([own as f64])?[0] as usize)
    }

    fn update(&mut self, sums: GradSums) -> Result<f64> {
        let (lr, max_norm) = (self.config.optim.lr, self.config.optim.max_norm);
        let update = sums.update(&mut self.model, &mut self.optimizer, lr, max_norm, &self.ranks)?;
        Ok(update.map_or(0.0, |update| 1e3 * update.waited))
    }

    fn sync(&self) -> Result<()> {
        let failed = |e| Error::device(format!("the device failed: {e:?}"), "");
        self.model.device().sync().map_err(failed)
    }

    /// Medians of forward, backward and optimizer; forward is a pass without a tape, backward the rest of both.
    fn phases(&mut self, steps: usize) -> Result<Vec<(&'static str, f64)>> {
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..steps {
            let plain = self.model.valid().rounded();
            self.sync()?;
            let clock = Instant::now();
            for batch in &self.batches {
                drop(plain.loss_sum(&plain.inputs(batch, Some(self.options.dropout_seed))?));
            }
            self.sync()?;
            let forward = ms(clock);
            let clock = Instant::now();
            let sums = forward_backward(&self.model, &self.batches, &self.options)?;
            self.sync()?;
            let both = ms(clock);
            // All begin the sum together: what is measured is the sum, not who comes late.
            let tokens = self.trained_tokens()?;
            let clock = Instant::now();
            let sums = sums.over(&self.ranks, &self.model, 0, self.batches.len(), tokens)?;
            self.ranks.finish()?;
            self.sync()?;
            times[2].push(ms(clock));
            let clock = Instant::now();
            self.update(sums)?;
            self.sync()?;
            times[0].push(forward);
            times[1].push(both - forward);
            times[3].push(ms(clock));
        }
        let [forward, backward, sum, optimizer] = times.map(median);
        let mut phases = vec![("forward", forward), ("backward", backward), ("optimizer", optimizer)];
        if self.ranks.count() > 1 {
            phases.insert(2, ("all-reduce", sum));
        }
        Ok(phases)
    }
}

fn ms(clock: Instant) -> f64 {
    1e3 * clock.elapsed().as_secs_f64()
}

impl Peer {
    /// Milliseconds of the median step.
    pub fn median_ms(&self) -> f64 {
        median(self.ms.clone())
    }

    /// For a step of `tokens`.
    fn to_json(&self, tokens: usize) -> Value {
        json!({
            "name": self.name, "ms_per_step": { "median": self.median_ms(), "all": self.ms },
            "tokens_per_second": tokens as f64 / self.median_ms() * 1e3, "peak_bytes": self.peak_bytes,
        })
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

impl Bench {
    /// Milliseconds of the median step.
    pub fn median_ms(&self) -> f64 {
        median(self.ms.clone())
    }

    /// Tokens a second, padding included, and trained ones.
    pub fn tokens_per_second(&self) -> [f64; 2] {
        [self.tokens, self.trained].map(|tokens| tokens as f64 / self.median_ms() * 1e3)
    }

    /// All of it, for `--json`.
    pub fn to_json(&self) -> Value {
        let [model, device, dtype, trainable] = &self.what;
        let [all, trained] = self.tokens_per_second();
        let phases: serde_json::Map<String, Value> =
            self.phases.iter().map(|(name, ms)| (name.to_string(), json!(ms))).collect();
        json!({
            "model": model, "device": device, "dtype": dtype, "trainable": trainable,
            "ranks": self.ranks, "all_reduce_bytes": self.reduced_bytes,
            "tokens_per_second_per_rank": all / self.ranks as f64,
            "tokens_per_step": self.tokens, "trained_tokens_per_step": self.trained,
            "ms_per_step": { "median": self.median_ms(), "all": self.ms },
            "tokens_per_second": all, "trained_tokens_per_second": trained,
            "phases_ms": phases, "host_waits_for_device": self.host_waits,
            "mfu_percent": self.mfu, "mfu_formula": MFU_FORMULA,
            "peak_device_bytes": self.device_bytes, "peak_process_bytes": self.process_bytes,
            "estimated_bytes": self.estimated_bytes,
            "seconds_to_first_step": self.to_first_step, "version": env!("CARGO_PKG_VERSION"),
            "peer": self.peer.as_ref().map(|peer| peer.to_json(self.tokens)),
        })
    }
}
