//! What the CPU versions of the ops share: access to the values of Flex tensors, memory for
//! results, matrix products (`gemm`) and vectorised functions (`simd`).
//!
//! Every kernel of the CPU versions keeps two rules. A value that is a sum is summed in an order
//! that depends on shapes alone, never on the number of threads or their timing. And a row of a
//! result depends on its own document or run alone, not on what else is in the batch.

use std::mem::MaybeUninit;

use burn::backend::{DispatchDevice, Flex};
use burn::tensor::{BackendPrimitive, DType, Device, Shape, Tensor, TensorData};
use burn_flex::FlexTensor;

pub mod few;
pub mod gemm;
mod memory;
pub mod simd;

/// Whether the CPU version takes this tensor; others go to the plain version.
pub fn takes<const D: usize>(x: &Tensor<D>) -> bool {
    x.dtype() == DType::F32 && is_flex(&x.device())
}

/// Whether it is the CPU.
pub fn is_flex(device: &Device) -> bool {
    matches!(device.clone().without_autodiff().as_dispatch(), DispatchDevice::Flex(_))
}

/// Runs `work` on a thread of the pool where this is the CPU's device: from there its loops start without waking one.
pub fn in_pool<T: Send>(device: &Device, work: impl FnOnce() -> T + Send) -> T {
    if is_flex(device) { rayon::scope(|_| work()) } else { work() }
}

/// The CPU tensor inside, without its tape.
pub fn primitive<const D: usize, K>(x: Tensor<D, K>) -> FlexTensor
where
    K: burn::tensor::kind::Autodiff + BackendPrimitive<Flex, Primitive = FlexTensor>,
{
    x.inner().try_into_primitive::<Flex>().expect("`takes` has seen the device")
}

/// The tensor with its elements in row-major order; a copy only if they aren't.
pub fn dense(x: FlexTensor) -> FlexTensor {
    if x.is_contiguous() { x } else { x.to_contiguous() }
}

/// The elements of a dense tensor.
pub fn values(x: &FlexTensor) -> &[f32] {
    x.as_slice().expect("`dense` was called and `takes` has seen f32")
}

/// The elements of an index tensor.
pub fn indices(x: &FlexTensor) -> Vec<usize> {
    fn read<I: burn::tensor::Element + bytemuck::Pod + TryInto<usize>>(x: &FlexTensor) -> Vec<usize> {
        let values = x.as_slice::<I>().expect("contiguous and of this type");
        values.iter().map(|&i| i.try_into().ok().expect("an index is not negative")).collect()
    }
    let x = x.to_contiguous();
    match x.dtype() {
        DType::I64 => read::<i64>(&x),
        DType::I32 => read::<i32>(&x),
        DType::U32 => read::<u32>(&x),
        DType::U64 => read::<u64>(&x),
        other => panic!("index tensors are 32 or 64 bits wide, not {other:?}"),
    }
}

/// A tensor from its elements in row-major order.
pub fn tensor(values: Vec<f32>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape.into()))
}

/// Memory for a result that is going to be written in full. Not zeroed: that would cost as much
/// as many of the kernels. Debug and test builds fill it with NaN, so that tests see what was forgotten.
pub struct Buffer(Vec<MaybeUninit<f32>>);

impl Buffer {
    /// Room for `len` elements.
    pub fn new(len: usize) -> Self {
        memory::keep();
        let mut memory: Vec<MaybeUninit<f32>> = Vec::with_capacity(len);
        // SAFETY: `MaybeUninit` needs no initialisation.
        unsafe { memory.set_len(len) };
        if cfg!(any(debug_assertions, test)) {
            memory.fill(MaybeUninit::new(f32::NAN));
        }
        Self(memory)
    }

    /// The elements to write.
    pub fn slots(&mut self) -> &mut [MaybeUninit<f32>] {
        &mut self.0
    }

    /// The elements as values.
    ///
    /// # Safety
    /// Every element has been written.
    pub unsafe fn finish(self) -> Vec<f32> {
        let mut memory = std::mem::ManuallyDrop::new(self.0);
        let (pointer, len, capacity) = (memory.as_mut_ptr(), memory.len(), memory.capacity());
        // SAFETY: same allocation, same layout of elements; the caller vouches for the contents.
        unsafe { Vec::from_raw_parts(pointer.cast::<f32>(), len, capacity) }
    }
}

/// Numbers between -1 and 1, for tests of what lies below tensors.
#[cfg(test)]
fn random(len: usize, mut seed: u32) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}
