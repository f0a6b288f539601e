//! The ops on CUDA cards: own kernels (the `.cu` files here) and cuBLASLt on Burn's tensors.
//!
//! An op is a method of an extension trait on `Cube` and on `Autodiff<Cube, C>`: it takes the
//! tensors' addresses, allocates its outputs through CubeCL and enters the card's side stream once
//! (`driver.rs`). A `takes…` function says whether an op's kernels fit the tensors at hand; what they
//! don't take goes to the plain version.
//!
//! bf16 tensors are computed in f32 and rounded once when they are stored; products of f32 tensors
//! don't use TF32. Sums run in an order that depends on shapes and the card alone.

pub mod attention;
mod driver;
pub mod elements;
pub mod embedding;
mod gemm;
mod kernels;
mod launches;
pub mod layer;
pub mod loss;
mod memory;
pub mod nccl;
pub mod optim;
pub mod products;
pub mod stack;
pub mod tensor;
pub mod trace;
mod work;

pub use driver::{Gpu, Unusable, count};
pub use tensor::{gpu_of, is_card};

/// Bytes that the layer op has taken for itself on the device, beside Burn's pools; 0 where it isn't a card.
pub fn reserved_bytes(device: &burn::tensor::Device) -> u64 {
    tensor::card(device).and_then(|index| Gpu::open(index).ok()).map_or(0, Gpu::reserved_bytes)
}

/// Bytes that nobody has taken on the card; `None` where the device isn't one.
pub fn free_bytes(device: &burn::tensor::Device) -> Option<u64> {
    let gpu = tensor::card(device).and_then(|index| Gpu::open(index).ok())?;
    Some(gpu.free_bytes() as u64)
}
