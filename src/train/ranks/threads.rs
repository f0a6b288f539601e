//! Ranks as threads of one process: what they exchange goes through shared memory; gradients too, unless all of them
//! are on CUDA cards, which add up through NCCL.
//!
//! Sums run in the order of the ranks, whichever comes first.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use burn::tensor::{Device, Tensor, TensorData};

use super::{Link, Ranks, Work, as_one, panic_message};
use crate::checkpoint::RunFolder;
use crate::config::{Plan, SftConfig};
use crate::report::log::{LogFile, ToFile};
use crate::report::{LineFormat, Quiet, Report};
use crate::{Error, Result};

/// The main thread's usual stack; the recorded graph of a deep model is walked recursively.
const STACK: usize = 64 << 20;

/// What one rank brings to an exchange.
type Brought = Box<dyn Any + Send + Sync>;

/// The meeting place of the threads.
pub(super) struct Group {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Number of finished exchanges.
    round: u64,
    brought: Vec<Option<Brought>>,
    /// What was brought to the last finished exchange.
    all: Arc<Vec<Brought>>,
    /// The first rank that failed, and its message.
    failed: Option<(usize, String)>,
}

impl Group {
    pub(super) fn new(ranks: usize) -> Arc<Self> {
        let brought = (0..ranks).map(|_| None).collect();
        let state = State { round: 0, brought, all: Arc::new(Vec::new()), failed: None };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings `value` and takes what all have brought, in the order of the ranks.
    fn exchange(&self, rank: usize, value: Brought) -> Result<Arc<Vec<Brought>>> {
        let mut state = self.lock();
        let round = state.round;
        state.brought[rank] = Some(value);
        if state.brought.iter().all(Option::is_some) {
            state.all = Arc::new(state.brought.iter_mut().filter_map(Option::take).collect());
            state.round += 1;
            self.changed.notify_all();
        }
        // The next exchange can't finish before this rank brings something to it.
        while state.round == round {
            if let Some((rank, message)) = &state.failed {
                return Err(Error::rank(*rank, message.clone()));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(state.all.clone())
    }

    /// Tells all that this rank is out; the first to say so is the cause.
    pub(super) fn fail(&self, rank: usize, message: String) {
        self.lock().failed.get_or_insert((rank, message));
        self.changed.notify_all();
    }

    /// Whether a rank has failed, and how.
    pub(super) fn failure(&self) -> Option<(usize, String)> {
        self.lock().failed.clone()
    }
}

/// One thread's link to the others.
struct Thread {
    rank: usize,
    group: Arc<Group>,
    #[cfg(feature = "cuda")]
    cards: Option<super::nccl::Cards>,
}

impl Thread {
    fn exchange<T: Send + Sync + 'static>(&self, value: T) -> Result<Vec<Arc<T>>> {
        let all = self.group.exchange(self.rank, Box::new(Arc::new(value)))?;
        let same = |brought: &Brought| {
            brought
                .downcast_ref::<Arc<T>>()
                .cloned()
                .expect("all ranks make the same calls in the same order")
        };
        Ok(all.iter().map(same).collect())
    }
}

impl Link for Thread {
    fn sum(&self, parts: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>> {
        #[cfg(feature = "cuda")]
        if let Some(cards) = &self.cards {
            return cards.sum(parts, &|| self.group.failure());
        }
        as_one(parts, |values| {
            let (device, [n]) = (values.device(), values.dims());
            let own = values.into_data().try_to_vec::<f32>().expect("gradients are f32");
            let all = self.exchange(own)?;
            Ok(Tensor::from_data(TensorData::new(added(&all), [n]), &device))
        })
    }

    #[cfg(feature = "cuda")]
    fn finish(&self) -> Result<()> {
        self.cards.as_ref().map_or(Ok(()), |cards| cards.finish(&|| self.group.failure()))
    }

    fn spread(&self, parts: Vec<Tensor<1>>, owners: &[usize]) -> Result<Vec<Tensor<1>>> {
        #[cfg(feature = "cuda")]
        if let Some(cards) = &self.cards {
            return cards.spread(parts, owners, &|| self.group.failure());
        }
        let own = parts.iter().zip(owners).map(|(part, owner)| {
            (*owner == self.rank).then(|| part.to_data().try_to_vec::<f32>().expect("parameters are f32"))
        });
        let all = self.exchange(own.collect::<Vec<_>>())?;
        let as_owner = |(n, part): (usize, Tensor<1>)| match (owners[n] == self.rank, &all[owners[n]][n]) {
            (true, _) => part,
            (false, Some(values)) => {
                Tensor::from_data(TensorData::new(values.clone(), part.dims()), &part.device())
            }
            (false, None) => unreachable!("the owner brings its parts"),
        };
        Ok(parts.into_iter().enumerate().map(as_owner).collect())
    }

    fn sum_f64(&self, values: &mut [f64]) -> Result<()> {
        let all = self.exchange(values.to_vec())?;
        values.fill(0.0);
        for rank in all {
            values.iter_mut().zip(rank.iter()).for_each(|(sum, value)| *sum += value);
        }
        Ok(())
    }

    fn broadcast(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        Ok(self.exchange(bytes)?[0].to_vec())
    }

    #[cfg(not(feature = "cuda"))]
    fn on_device(&mut self, _: &Device) -> Result<()> {
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn on_device(&mut self, device: &Device) -> Result<()> {
        use super::nccl::{Cards, unique_id};
        let is_card = crate::ops::cuda::is_card(device);
        if self.exchange(is_card)?.iter().all(|card| **card) {
            let id = if self.rank == 0 { unique_id()? } else { [0; 128] };
            let ids = self.exchange(id)?;
            self.cards = Some(Cards::join(device, &ids[0], self.rank, ids.len())?);
        }
        Ok(())
    }
}

/// Σ in the order of the ranks.
fn added(all: &[Arc<Vec<f32>>]) -> Vec<f32> {
    let mut sum = all[0].to_vec();
    for rank in &all[1..] {
        assert_eq!(rank.len(), sum.len(), "all ranks train the same parameters");
        sum.iter_mut().zip(rank.iter()).for_each(|(sum, value)| *sum += value);
    }
    sum
}

/// Runs `work` on `ranks` threads, rank 0 on this one.
pub(super) fn run<T: Send>(
    ranks: usize,
    config: &SftConfig,
    plan: &Plan,
    report: &mut dyn Report,
    work: Work<'_, T>,
) -> Result<T> {
    let group = Group::new(ranks);
    let one = |rank: usize, report: &mut dyn Report| -> Result<T> {
        let link = Thread {
            rank,
            group: group.clone(),
            #[cfg(feature = "cuda")]
            cards: None,
        };
        let plan = plan.on_rank(rank);
        let me = Ranks { rank, ranks, link: Some(Box::new(link)) };
        let result = catch_unwind(AssertUnwindSafe(|| work(me, &plan, report)))
            .unwrap_or_else(|payload| Err(Error::train(panic_message(&*payload), "")));
        if let Err(error) = &result {
            group.fail(rank, error.to_string());
        }
        result
    };
    let folder = RunFolder::new(config);
    let results = thread::scope(|scope| -> Result<Vec<Result<T>>> {
        let mut others = Vec::new();
        for rank in 1..ranks {
            let (one, log) = (&one, folder.rank_log(rank));
            let body = move || one(rank, &mut *quiet_report(config, log));
            let thread = thread::Builder::new().name(format!("rank {rank}")).stack_size(STACK);
            let spawned = thread.spawn_scoped(scope, body);
            others.push(spawned.map_err(|e| {
                let error = Error::io(format!("rank {rank}"), "start a thread for", e);
                group.fail(rank, error.to_string());
                error
            })?);
        }
        let mut results = vec![one(0, report)];
        results.extend(others.into_iter().map(|other| other.join().expect("panics are caught inside")));
        Ok(results)
    })?;
    first_cause(results, group.failure().map(|(rank, _)| rank))
}

/// Rank 0's result, or the error of the rank that failed first.
fn first_cause<T>(mut results: Vec<Result<T>>, failed: Option<usize>) -> Result<T> {
    match failed {
        None | Some(0) => results.swap_remove(0),
        Some(rank) => match (results.swap_remove(rank), results.swap_remove(0)) {
            // It says itself how to go on.
            (Err(Error::Interrupted { .. }), Err(first @ Error::Interrupted { .. })) => Err(first),
            (Err(error), _) => Err(error.on_rank(rank)),
            (Ok(_), first) => first,
        },
    }
}

/// Ranks other than 0 speak to a file of their own.
pub(super) fn quiet_report(config: &SftConfig, log: std::path::PathBuf) -> Box<dyn Report> {
    if !config.log.file {
        return Box::new(Quiet);
    }
    let format = if config.log.json_logging { LineFormat::Json } else { LineFormat::Text };
    let level = config.log.level.parse().unwrap_or(tracing::Level::INFO);
    Box::new(ToFile::new(Some(LogFile::new(&log)), format, level))
}
