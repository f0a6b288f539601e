//! Ranks as processes, one a device: NCCL between CUDA cards, MPI between other devices.

#[cfg(any(feature = "cuda", feature = "mpi"))]
use std::panic::{AssertUnwindSafe, catch_unwind};
#[cfg(feature = "cuda")]
use std::rc::Rc;

#[cfg(feature = "cuda")]
use burn::tensor::{Device, Tensor};

#[cfg(feature = "cuda")]
use super::meeting::Meeting;
use super::threads::quiet_report;
#[cfg(any(feature = "cuda", feature = "mpi"))]
use super::{Link, Ranks, panic_message};
use super::{Place, Work};
use crate::checkpoint::RunFolder;
use crate::config::{DeviceKind, Plan, SftConfig};
use crate::report::Report;
use crate::{Error, Result, device};

/// Runs `work` as the rank that this process is.
pub(super) fn run<T: Send>(
    place: &Place,
    config: &SftConfig,
    plan: &Plan,
    report: &mut dyn Report,
    work: Work<'_, T>,
) -> Result<T> {
    let plan = plan.on_rank(place.local_rank);
    let mut quiet;
    let report = match place.rank {
        0 => report,
        rank => {
            quiet = quiet_report(config, RunFolder::new(config).rank_log(rank));
            &mut *quiet
        }
    };
    match device::kind(&plan.device) {
        DeviceKind::Cuda => by_nccl(place, config, plan, report, work),
        _ => by_mpi(place, plan, report, work),
    }
}

/// `work` on this rank, a panic as an error.
#[cfg(any(feature = "cuda", feature = "mpi"))]
fn caught<T>(
    place: &Place,
    plan: Plan,
    link: Box<dyn Link>,
    report: &mut dyn Report,
    work: Work<'_, T>,
) -> Result<T> {
    let me = Ranks { rank: place.rank, ranks: place.ranks, link: Some(link) };
    catch_unwind(AssertUnwindSafe(|| work(me, &plan, report)))
        .unwrap_or_else(|payload| Err(Error::train(panic_message(&*payload), "")))
}

#[cfg(feature = "mpi")]
fn by_mpi<T>(place: &Place, plan: Plan, report: &mut dyn Report, work: Work<'_, T>) -> Result<T> {
    let (universe, link) = super::mpi::Mpi::new(place)?;
    let result = caught(place, plan, Box::new(link), report, work);
    if result.as_ref().is_err_and(|error| !matches!(error, Error::Interrupted { .. })) {
        // The others are in the middle of a call, or come to one that this rank won't: not to be waited for. The
        // launcher ends them when this process ends with an error.
        std::mem::forget(universe);
    }
    result
}

#[cfg(not(feature = "mpi"))]
fn by_mpi<T>(place: &Place, _: Plan, _: &mut dyn Report, _: Work<'_, T>) -> Result<T> {
    Err(Error::device(
        format!(
            "this is rank {} of {} processes, whose device isn't CUDA: that needs MPI",
            place.rank, place.ranks
        ),
        "build with `--features mpi`; or train with several devices in one process, e.g. `device = \"flex:0,1\"`",
    ))
}

/// NCCL between the cards; a line to rank 0 for signs of life.
#[cfg(feature = "cuda")]
fn by_nccl<T>(
    place: &Place,
    config: &SftConfig,
    plan: Plan,
    report: &mut dyn Report,
    work: Work<'_, T>,
) -> Result<T> {
    let limit = std::time::Duration::from_secs(config.dist_timeout_seconds);
    let mut meeting = Meeting::new(place, limit)?;
    let id = match place.rank {
        0 => super::nccl::unique_id()?.to_vec(),
        _ => Vec::new(),
    };
    let id = meeting.share(id)?.try_into().map_err(|_| Error::rank(0, "sent an id of another length"))?;
    let rank = place.rank;
    meeting.watch(move |error| {
        tracing::error!("rank {rank} is ended: {error}");
        std::process::exit(1)
    });
    let meeting = Rc::new(meeting);
    let link = Network { place: place.clone(), id, meeting: meeting.clone(), cards: None };
    let result = caught(place, plan, Box::new(link), report, work);
    meeting.leave(match &result {
        // All ranks were interrupted together.
        Ok(_) | Err(Error::Interrupted { .. }) => None,
        Err(error) => Some(error.to_string()),
    });
    result
}

#[cfg(not(feature = "cuda"))]
fn by_nccl<T>(_: &Place, _: &SftConfig, _: Plan, _: &mut dyn Report, _: Work<'_, T>) -> Result<T> {
    Err(Error::device("this build has no `cuda` backend", "build with `--features cuda`"))
}

/// The link of a process with a card.
#[cfg(feature = "cuda")]
struct Network {
    place: Place,
    id: crate::ops::cuda::nccl::UniqueId,
    meeting: Rc<Meeting>,
    cards: Option<super::nccl::Cards>,
}

#[cfg(feature = "cuda")]
impl Network {
    fn cards(&self) -> &super::nccl::Cards {
        self.cards.as_ref().expect("the recipe opens the device before ranks exchange anything")
    }
}

#[cfg(feature = "cuda")]
impl Link for Network {
    fn sum(&self, parts: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>> {
        self.cards().sum(parts, &|| self.meeting.failure())
    }

    fn finish(&self) -> Result<()> {
        self.cards().finish(&|| self.meeting.failure())
    }

    fn spread(&self, parts: Vec<Tensor<1>>, owners: &[usize]) -> Result<Vec<Tensor<1>>> {
        self.cards().spread(parts, owners, &|| self.meeting.failure())
    }

    fn sum_f64(&self, values: &mut [f64]) -> Result<()> {
        self.cards().sum_f64(values, &|| self.meeting.failure())
    }

    fn broadcast(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        self.cards().broadcast(bytes, &|| self.meeting.failure())
    }

    fn on_device(&mut self, device: &Device) -> Result<()> {
        let Place { rank, ranks, .. } = self.place;
        self.cards = Some(super::nccl::Cards::join(device, &self.id, rank, ranks)?);
        Ok(())
    }
}
