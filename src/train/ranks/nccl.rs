//! Sums over CUDA cards: [`Communicator`] with errors that name the rank.

use burn::tensor::{Device, Tensor};

use crate::ops::cuda::nccl::{Communicator, Failure, UniqueId};
use crate::ops::cuda::{Unusable, gpu_of};
use crate::{Error, Result};

/// Whether another rank has failed, and how.
pub(super) type Failed<'a> = &'a dyn Fn() -> Option<(usize, String)>;

/// The cards of all ranks, as this rank sees them.
pub(super) struct Cards {
    rank: usize,
    communicator: Communicator,
}

/// An id for [`Cards::join`], made by one rank for all.
///
/// # Errors
/// NCCL can't be used.
pub(super) fn unique_id() -> Result<UniqueId> {
    Communicator::unique_id().map_err(unusable)
}

fn unusable(Unusable { problem, hint }: Unusable) -> Error {
    Error::device(problem, hint)
}

impl Cards {
    /// Waits for all ranks.
    ///
    /// # Errors
    /// The device is no card, or NCCL can't be used.
    pub fn join(device: &Device, id: &UniqueId, rank: usize, ranks: usize) -> Result<Self> {
        let gpu = gpu_of(device).map_err(unusable)?;
        Ok(Self { rank, communicator: Communicator::new(gpu, id, rank, ranks).map_err(unusable)? })
    }

    /// Σ over the cards; nobody waits for it before [`Cards::finish`].
    pub fn sum(&self, parts: Vec<Tensor<1>>, failed: Failed) -> Result<Vec<Tensor<1>>> {
        self.communicator.sum(parts).map_err(|e| self.error(e, failed))
    }

    /// Until all that was asked for is there.
    pub fn finish(&self, failed: Failed) -> Result<()> {
        self.communicator.finish(&|| failed().is_some()).map_err(|e| self.error(e, failed))
    }

    /// Each part as its owner has it; nobody waits for it before [`Cards::finish`].
    pub fn spread(&self, parts: Vec<Tensor<1>>, owners: &[usize], failed: Failed) -> Result<Vec<Tensor<1>>> {
        self.communicator.spread(parts, owners).map_err(|e| self.error(e, failed))
    }

    pub fn sum_f64(&self, values: &mut [f64], failed: Failed) -> Result<()> {
        self.communicator.sum_f64(values, &|| failed().is_some()).map_err(|e| self.error(e, failed))
    }

    /// Rank 0's bytes, whose number goes first.
    pub fn broadcast(&self, mut bytes: Vec<u8>, failed: Failed) -> Result<Vec<u8>> {
        let gave_up = || failed().is_some();
        let mut length = (bytes.len() as u64).to_le_bytes();
        self.communicator.broadcast(&mut length, &gave_up).map_err(|e| self.error(e, failed))?;
        bytes.resize(u64::from_le_bytes(length) as usize, 0);
        self.communicator.broadcast(&mut bytes, &gave_up).map_err(|e| self.error(e, failed))?;
        Ok(bytes)
    }

    fn error(&self, failure: Failure, failed: Failed) -> Error {
        match (failure, failed()) {
            (_, Some((rank, message))) => Error::rank(rank, message),
            (Failure::Nccl(text), None) => Error::device(
                format!("NCCL failed on rank {}: {text}", self.rank),
                "NCCL_DEBUG=INFO makes it say more; look whether all ranks and the links between them are well",
            ),
            (Failure::GaveUp, None) => unreachable!("only a failure makes it give up"),
        }
    }
}
