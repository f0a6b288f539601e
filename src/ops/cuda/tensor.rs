//! CubeCL's tensors as addresses, and new ones.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use burn::backend::{DispatchDevice, TensorMetadata};
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl_server::runtime::Runtime;

use super::driver::{Gpu, Unusable};
use super::gemm::Matrix;

/// Pieces of an allocation start at multiples of this.
pub const PIECE_ALIGNMENT: u64 = 256;

/// Whether the tensor lies on a CUDA card, in bf16 or f32.
pub fn is_on_card<const D: usize>(x: &Tensor<D>) -> bool {
    matches!(x.dtype(), DType::BF16 | DType::F32) && is_card(&x.device())
}

/// Whether the device is a CUDA card.
pub fn is_card(device: &Device) -> bool {
    card(device).is_some()
}

/// The index of the card.
pub fn card(device: &Device) -> Option<usize> {
    let device = device.clone().without_autodiff();
    match device.as_dispatch() {
        DispatchDevice::Cube(CubeDevice::Cuda(card)) => Some(card.index),
        _ => None,
    }
}

/// The card that holds the tensor.
pub fn gpu(x: &CubeTensor) -> &'static Gpu {
    let CubeDevice::Cuda(device) = &x.device else { panic!("{:?} is no CUDA device", x.device) };
    match Gpu::open(device.index) {
        Ok(gpu) => gpu,
        Err(error) => panic!("cuda:{}: {} ({})", device.index, error.problem, error.hint),
    }
}

/// The card that a device is.
///
/// # Errors
/// It is none, or one that can't be used.
pub fn gpu_of(device: &Device) -> Result<&'static Gpu, Unusable> {
    let device = device.clone().without_autodiff();
    match device.as_dispatch() {
        DispatchDevice::Cube(CubeDevice::Cuda(card)) => Gpu::open(card.index),
        other => {
            Err(Unusable { problem: format!("{other:?} is no CUDA card"), hint: "set `device = \"cuda\"`" })
        }
    }
}

/// The address of the first element. Launches that were made before have reached the card then.
pub fn pointer(x: &CubeTensor) -> u64 {
    let resource = x.client.get_resource::<<CudaRuntime as Runtime>::Server>(x.handle.clone());
    match resource {
        Ok(resource) => resource.resource().ptr,
        Err(error) => panic!("CUDA, a tensor {:?} in {:?} has no memory: {error:?}", x.shape(), x.dtype),
    }
}

/// Allocations' addresses by their ids, which CubeCL never uses again; an allocation isn't moved while it lives.
static ADDRESSES: Mutex<Option<HashMap<usize, u64>>> = Mutex::new(None);
/// More entries than that are mostly those of memory that is gone.
const ADDRESSES_KEPT: usize = 1 << 17;

/// The number of the allocation that the tensor lies in; CubeCL never uses one again.
pub fn allocation(x: &CubeTensor) -> usize {
    x.handle.memory.descriptor().id.value
}

/// As [`pointer()`], but CubeCL is asked once for each allocation only: launches that were made before may not have
/// reached the card. An op asks for one [`pointer()`] besides.
pub fn address(x: &CubeTensor) -> u64 {
    let id = allocation(x);
    let offset = x.handle.offset_start.unwrap_or(0);
    let mut known = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if let Some(base) = known.get(&id) {
        return base + offset;
    }
    if known.len() >= ADDRESSES_KEPT {
        known.clear();
    }
    let address = pointer(x);
    known.insert(id, address - offset);
    address
}

/// Pieces of one allocation: tensors of these shapes, their addresses.
pub fn pieces(like: &CubeTensor, shapes: &[Shape], dtype: DType) -> Vec<CubeTensor> {
    let sizes = shapes.iter().map(|shape| (shape.num_elements() * dtype.size()) as u64);
    let rooms: Vec<(u64, u64)> =
        sizes.map(|bytes| (bytes, bytes.next_multiple_of(PIECE_ALIGNMENT))).collect();
    let total: u64 = rooms.iter().map(|(_, room)| room).sum();
    let handle = like.client.empty(total as usize);
    let mut start = 0;
    let places = rooms.into_iter().zip(shapes).map(|((bytes, room), shape)| {
        let handle = handle.clone().offset_start(start).offset_end(total - start - bytes);
        start += room;
        CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), shape.clone(), handle, dtype)
    });
    places.collect()
}

/// A tensor whose elements are still to be written.
pub fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    let shape = shape.into();
    let bytes = shape.num_elements() * dtype.size();
    let handle = like.client.empty(bytes);
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), shape, handle, dtype)
}

/// A matrix whose elements are still to be written, with rows `stride` apart.
pub fn empty_rows(like: &CubeTensor, rows: usize, columns: usize, stride: usize, dtype: DType) -> CubeTensor {
    let handle = like.client.empty(rows * stride * dtype.size());
    let (client, device) = (like.client.clone(), like.device.clone());
    let mut x = CubeTensor::new_contiguous(client, device, Shape::new([rows, columns]), handle, dtype);
    x.meta.strides_mut()[0] = stride;
    x
}

/// A tensor on the card from bytes.
pub fn upload(like: &CubeTensor, bytes: &[u8], shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    let handle = like.client.create_from_slice(bytes);
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), shape.into(), handle, dtype)
}

/// The tensor in row-major order without gaps.
pub fn dense(x: CubeTensor) -> CubeTensor {
    let x = into_contiguous(x);
    let compact = x
        .meta
        .strides()
        .iter()
        .rev()
        .zip(x.shape().iter().rev())
        .try_fold(1, |step, (s, n)| (*s == step || *n == 1).then_some(step * n));
    assert!(compact.is_some(), "a contiguous tensor has no gaps: {x:?}");
    x
}

/// The matrix with whole rows in row-major order; between rows there may be gaps (CubeCL aligns rows
/// to 512 bytes).
pub fn rows(x: CubeTensor) -> CubeTensor {
    let (shape, strides) = (x.shape(), x.meta.strides());
    let keeps = shape.num_dims() == 2 && !x.meta.is_tiled() && strides[1] == 1 && strides[0] >= shape[1];
    if keeps { x } else { dense(x) }
}

/// What [`rows`] or [`dense`] has returned, as a matrix of rows of its last dimension.
pub fn matrix(x: &CubeTensor) -> Matrix {
    matrix_at(x, pointer(x))
}

/// As [`matrix`], by [`address`].
pub fn known_matrix(x: &CubeTensor) -> Matrix {
    matrix_at(x, address(x))
}

fn matrix_at(x: &CubeTensor, pointer: u64) -> Matrix {
    let shape = x.shape();
    let columns = shape[shape.num_dims() - 1];
    let rows = shape.num_elements().checked_div(columns).unwrap_or(0);
    let stride = if shape.num_dims() == 2 && rows > 1 { x.meta.strides()[0] } else { columns };
    Matrix { pointer, rows, columns, stride, dtype: x.dtype, transposed: false }
}

/// The tensor in another type.
pub fn cast(x: CubeTensor, dtype: DType) -> CubeTensor {
    if x.dtype == dtype { x } else { burn_cubecl::kernel::cast(x, dtype) }
}
