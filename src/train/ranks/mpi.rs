//! Ranks as processes under MPI, for devices that NCCL doesn't serve. A rank that fails or is killed takes the others
//! with it: that is MPI's own way.
//!
//! Sums are made from all ranks' values in the order of the ranks, as between threads, so that both give the same
//! bits; MPI's own sums may take any order.

use std::cell::RefCell;

use burn::tensor::{Device, Tensor, TensorData};
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives, Root};

use super::{Link, Place, as_one};
use crate::{Error, Result};

/// Numbers that are gathered from every rank at once.
const PIECE: usize = 1 << 20;

/// The link through MPI.
pub(super) struct Mpi {
    world: SimpleCommunicator,
    /// Room for a piece from every rank.
    gathered: RefCell<Vec<f32>>,
}

impl Mpi {
    /// Begins MPI. The universe ends it when it is dropped, which waits for all ranks.
    ///
    /// # Errors
    /// The process wasn't started by `mpirun` or `srun --mpi`: MPI knows another number of ranks.
    pub fn new(place: &Place) -> Result<(Universe, Self)> {
        let hint = "start the ranks with `mpirun -n 2 embertune sft …`, or `srun --mpi=pmix`";
        let Some(universe) = mpi::initialize() else { return Err(Error::device("MPI doesn't begin", hint)) };
        let world = universe.world();
        let (rank, ranks) = (world.rank() as usize, world.size() as usize);
        if (rank, ranks) != (place.rank, place.ranks) {
            let (want, of) = (place.rank, place.ranks);
            let message =
                format!("the environment says rank {want} of {of}, MPI says rank {rank} of {ranks}");
            return Err(Error::device(message, hint));
        }
        Ok((universe, Self { world, gathered: RefCell::default() }))
    }

    fn add(&self, values: &mut [f32]) {
        let mut gathered = self.gathered.borrow_mut();
        let ranks = self.world.size() as usize;
        for piece in values.chunks_mut(PIECE) {
            gathered.resize(ranks * piece.len(), 0.0);
            self.world.all_gather_into(&*piece, &mut gathered[..]);
            let (first, rest) = gathered.split_at(piece.len());
            piece.copy_from_slice(first);
            for rank in rest.chunks(piece.len()) {
                piece.iter_mut().zip(rank).for_each(|(sum, value)| *sum += value);
            }
        }
    }
}

impl Link for Mpi {
    fn sum(&self, parts: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>> {
        as_one(parts, |values| {
            let (device, [n]) = (values.device(), values.dims());
            let mut values = values.into_data().try_to_vec::<f32>().expect("gradients are f32");
            self.add(&mut values);
            Ok(Tensor::from_data(TensorData::new(values, [n]), &device))
        })
    }

    fn spread(&self, parts: Vec<Tensor<1>>, owners: &[usize]) -> Result<Vec<Tensor<1>>> {
        let as_owner = |(part, &owner): (Tensor<1>, &usize)| {
            let (device, [n]) = (part.device(), part.dims());
            let mut values = part.into_data().try_to_vec::<f32>().expect("parameters are f32");
            self.world.process_at_rank(owner as i32).broadcast_into(&mut values[..]);
            Tensor::from_data(TensorData::new(values, [n]), &device)
        };
        Ok(parts.into_iter().zip(owners).map(as_owner).collect())
    }

    fn sum_f64(&self, values: &mut [f64]) -> Result<()> {
        let mut gathered = vec![0.0; self.world.size() as usize * values.len()];
        self.world.all_gather_into(&*values, &mut gathered[..]);
        let n = values.len();
        values.fill(0.0);
        for rank in gathered.chunks(n) {
            values.iter_mut().zip(rank).for_each(|(sum, value)| *sum += value);
        }
        Ok(())
    }

    fn broadcast(&self, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
        let root = self.world.process_at_rank(0);
        let mut length = bytes.len() as u64;
        root.broadcast_into(&mut length);
        bytes.resize(length as usize, 0);
        root.broadcast_into(&mut bytes[..]);
        Ok(bytes)
    }

    fn on_device(&mut self, _: &Device) -> Result<()> {
        Ok(())
    }
}
