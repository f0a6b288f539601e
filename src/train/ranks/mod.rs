//! Ranks: the devices that share each step, and what they do together.
//!
//! Every rank runs the recipe of [`super::sft`] on its own device, over its own rows of each step (row k belongs to
//! rank k mod R, see [`crate::data::Loader::shared`]), and adds up with the others through a link:
//!
//! ```text
//! rank 0   rows 0, R, …      ┐ Σ loss, Σ tokens  ┐ the same division, clipping   ┐ files, messages
//! rank 1   rows 1, R + 1, …  ┤ Σ gradients       ┤ and update on every rank      │ logs/rank_1.log
//! rank 2   rows 2, R + 2, …  ┘ (one all-reduce)  ┘                               │ logs/rank_2.log
//! ```
//!
//! All ranks do the same number of steps and collective calls whatever the data. A rank that fails says so to the
//! others, whose next (or waiting) collective call returns [`Error::Rank`]: nobody waits for the dead.
//!
//! One rank alone has no link, and nothing here costs it anything.

mod environment;
#[cfg(any(feature = "cuda", test))]
mod meeting;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "cuda")]
mod nccl;
mod processes;
mod threads;

use std::any::Any;
use std::fmt;

use burn::tensor::{Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use environment::{Launcher, Place};

use crate::config::{DeviceSpec, Plan, SftConfig};
use crate::report::Report;
use crate::{Error, Result, device};

/// Where several ranks come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum World {
    /// One device, one process.
    Alone,
    /// One process, a thread a device.
    Threads(usize),
    /// This process is one of several, started by a launcher.
    Processes(Place),
}

impl World {
    /// What the environment and the key `device` say.
    ///
    /// # Errors
    /// An environment that contradicts itself, or several devices for one process among several.
    pub fn of(config: &SftConfig) -> Result<Self> {
        let named = DeviceSpec::parse(&config.device).map_err(|problem| Error::Config(vec![problem]))?;
        let devices = device::count(&named);
        match Place::read(|name| std::env::var(name).ok())? {
            Some(place) if place.ranks > 1 => Ok(World::Processes(place)),
            _ if devices > 1 => Ok(World::Threads(devices)),
            _ => Ok(World::Alone),
        }
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        match self {
            World::Alone => 1,
            World::Threads(ranks) => *ranks,
            World::Processes(place) => place.ranks,
        }
    }

    /// Runs `work` on every rank of this process, and returns what rank 0 (or the process's only rank) returned, or
    /// the error of the rank that failed first.
    ///
    /// # Errors
    /// Whatever `work` returns; ranks that don't come, or fail.
    pub fn run<T: Send>(
        &self,
        config: &SftConfig,
        plan: &Plan,
        report: &mut dyn Report,
        work: Work<'_, T>,
    ) -> Result<T> {
        match self {
            World::Alone => work(Ranks::alone(), plan, report),
            World::Threads(ranks) => threads::run(*ranks, config, plan, report, work),
            World::Processes(place) => processes::run(place, config, plan, report, work),
        }
    }
}

/// What every rank does, given the plan with its own device.
pub type Work<'a, T> = &'a (dyn Fn(Ranks, &Plan, &mut dyn Report) -> Result<T> + Sync);

/// One rank: which it is, and its link to the others.
pub struct Ranks {
    rank: usize,
    ranks: usize,
    link: Option<Box<dyn Link>>,
}

/// What ranks do together. Every rank makes the same calls in the same order; sums are the same bits on all.
///
/// # Errors
/// Of each call: another rank failed ([`Error::Rank`]).
trait Link {
    /// Σ over the ranks, of f32 vectors of the same lengths on all. May be under way until [`Link::finish`].
    fn sum(&self, parts: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>>;
    /// Σ over the ranks, number by number, in f64.
    fn sum_f64(&self, values: &mut [f64]) -> Result<()>;
    /// Rank 0's bytes for all.
    fn broadcast(&self, bytes: Vec<u8>) -> Result<Vec<u8>>;
    /// Each part as its owner has it. May be under way until [`Link::finish`].
    fn spread(&self, parts: Vec<Tensor<1>>, owners: &[usize]) -> Result<Vec<Tensor<1>>>;
    /// Waits for what is under way. Whoever waits for the device himself calls it first: a device waits for the dead.
    fn finish(&self) -> Result<()> {
        Ok(())
    }
    /// The device that this rank computes on is open now.
    fn on_device(&mut self, device: &Device) -> Result<()>;
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.ranks)
    }
}

impl Ranks {
    /// The only rank.
    pub fn alone() -> Self {
        Self { rank: 0, ranks: 1, link: None }
    }

    /// Which rank this is, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.ranks
    }

    /// Whether this is the rank that writes files and speaks.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// Opens the links that need a device.
    pub fn on_device(&mut self, device: &Device) -> Result<()> {
        self.link.as_mut().map_or(Ok(()), |link| link.on_device(device))
    }

    /// Σ over the ranks, of f32 vectors of one length each, in one call. On cards nobody waits for it before
    /// [`Ranks::finish`].
    ///
    /// # Errors
    /// Another rank failed.
    pub fn sum(&self, parts: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>> {
        match self.link.as_ref().filter(|_| !parts.is_empty()) {
            Some(link) => link.sum(parts),
            None => Ok(parts),
        }
    }

    /// Until the sums that were asked for are there; before a rank waits for its device in any other way.
    ///
    /// # Errors
    /// Another rank failed.
    pub fn finish(&self) -> Result<()> {
        self.link.as_ref().map_or(Ok(()), |link| link.finish())
    }

    /// Each part as its owner has it, on all ranks; the others bring one of the same length.
    ///
    /// # Errors
    /// Another rank failed.
    pub fn spread(&self, parts: Vec<Tensor<1>>, owners: &[usize]) -> Result<Vec<Tensor<1>>> {
        assert_eq!(parts.len(), owners.len(), "each part has an owner");
        match &self.link {
            Some(link) if !parts.is_empty() => link.spread(parts, owners),
            _ => Ok(parts),
        }
    }

    /// Shares things of these sizes out: the largest first, each to the rank that has least, so that all have about
    /// as much. The same on every rank.
    pub fn owners(&self, sizes: &[usize]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        order.sort_by_key(|&n| std::cmp::Reverse(sizes[n]));
        let (mut loads, mut owners) = (vec![0; self.ranks], vec![0; sizes.len()]);
        for n in order {
            let owner = (0..self.ranks).min_by_key(|&rank| loads[rank]).expect("there is one rank at least");
            loads[owner] += sizes[n];
            owners[n] = owner;
        }
        owners
    }

    /// Σ over the ranks, number by number.
    ///
    /// # Errors
    /// Another rank failed.
    pub fn sum_f64<const N: usize>(&self, mut values: [f64; N]) -> Result<[f64; N]> {
        self.sum_each(&mut values)?;
        Ok(values)
    }

    /// [`Ranks::sum_f64`] of as many numbers as there are.
    ///
    /// # Errors
    /// Another rank failed.
    pub fn sum_each(&self, values: &mut [f64]) -> Result<()> {
        match self.link.as_ref().filter(|_| !values.is_empty()) {
            Some(link) => link.sum_f64(values),
            None => Ok(()),
        }
    }

    /// Whether any rank says yes.
    ///
    /// # Errors
    /// Another rank failed.
    pub fn any(&self, yes: bool) -> Result<bool> {
        Ok(self.sum_f64([f64::from(u8::from(yes))])?[0] > 0.0)
    }

    /// Until all are here.
    ///
    /// # Errors
    /// Another rank failed.
    pub fn wait(&self) -> Result<()> {
        self.any(false).map(drop)
    }

    /// What rank 0 makes of `work`, for all.
    ///
    /// # Errors
    /// That of `work`; on the other ranks [`Error::Rank`].
    pub fn from_first<T: Serialize + DeserializeOwned>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let Some(link) = &self.link else { return work() };
        if self.is_first() {
            let value = work()?;
            link.broadcast(serde_json::to_vec(&value).expect("what ranks share is plain data"))?;
            return Ok(value);
        }
        let bytes = link.broadcast(Vec::new())?;
        serde_json::from_slice(&bytes)
            .map_err(|e| Error::rank(0, format!("sent what rank {} can't read: {e}", self.rank)))
    }

    /// Holds what must be the same everywhere against rank 0's.
    ///
    /// # Errors
    /// It is another: `what` differs.
    pub fn agree(&self, what: &str, value: &str, hint: &str) -> Result<()> {
        let first: String = self.from_first(|| Ok(value.to_string()))?;
        if first == value {
            return Ok(());
        }
        let rank = self.rank;
        Err(Error::train(
            format!("{what} of rank {rank} is not that of rank 0: `{value}`, there `{first}`"),
            hint,
        ))
    }
}

/// A sum of vectors as that of one long one.
fn as_one(parts: Vec<Tensor<1>>, sum: impl FnOnce(Tensor<1>) -> Result<Tensor<1>>) -> Result<Vec<Tensor<1>>> {
    let lengths: Vec<usize> = parts.iter().map(|part| part.dims()[0]).collect();
    Ok(sum(Tensor::cat(parts, 0))?.split_with_sizes(lengths, 0))
}

/// What a panic said.
fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    format!("panicked: {}", text.as_deref().unwrap_or("without a message"))
}

#[cfg(all(test, feature = "flex"))]
mod tests;
