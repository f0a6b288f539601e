//! Memory of our own for what only the side stream touches: taken and given back in the stream's order, so that
//! neither waits, and kept by the driver's pool between steps.

use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use burn::tensor::DType;
use cudarc::driver::sys::{self as cu, CUresult};

use super::driver::{Gpu, Side, Unusable, must, ok};
use super::gemm::Matrix;
use super::kernels::{Arg, Files, Grid, Module};

/// Places in a block start at multiples of this.
const ALIGNMENT: usize = 256;

/// Bytes on the card; given back when dropped.
#[derive(Debug)]
pub struct Block {
    gpu: &'static Gpu,
    pointer: u64,
}

impl Drop for Block {
    fn drop(&mut self) {
        self.gpu.give_back(self.pointer);
    }
}

/// Divides a block among matrices: first all are named, then the block is taken.
#[derive(Debug, Default)]
pub struct Layout {
    bytes: usize,
}

/// Where a matrix will lie in its block.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    offset: usize,
    matrix: Matrix,
}

impl Layout {
    /// Room for `rows` rows of `columns` elements, `stride` apart.
    pub fn matrix(&mut self, rows: usize, columns: usize, stride: usize, dtype: DType) -> Place {
        let place =
            Place { offset: self.bytes, matrix: Matrix { stride, ..Matrix::dense(0, rows, columns, dtype) } };
        self.bytes += (rows * stride * dtype.size()).next_multiple_of(ALIGNMENT);
        place
    }

    /// Room for rows without gaps.
    pub fn dense(&mut self, rows: usize, columns: usize, dtype: DType) -> Place {
        self.matrix(rows, columns, columns, dtype)
    }

    /// The block for all of them.
    pub fn block(&self, side: &Side<'_>) -> Block {
        side.gpu.take(self.bytes)
    }
}

impl Block {
    /// The matrix at its place.
    pub fn at(&self, place: Place) -> Matrix {
        Matrix { pointer: self.pointer + place.offset as u64, ..place.matrix }
    }
}

/// The pool of a card; never given back.
pub(super) fn pool(device: usize) -> Result<cu::CUmemoryPool, Unusable> {
    // SAFETY: the properties are plain words, for which zeros are valid.
    let mut props: cu::CUmemPoolProps = unsafe { std::mem::zeroed() };
    props.allocType = cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    let location = [cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as i32, device as i32];
    let mut pool = null_mut();
    let mut keep = u64::MAX;
    let threshold = cu::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: a location begins with its type and its device's number, two words of 32 bits; the calls get places
    // for their results and a value of the attribute's size.
    unsafe {
        (&raw mut props.location).cast::<[i32; 2]>().write_unaligned(location);
        ok(cu::cuMemPoolCreate(&mut pool, &props), "a memory pool")?;
        ok(cu::cuMemPoolSetAttribute(pool, threshold, (&raw mut keep).cast()), "a memory pool")?;
    }
    Ok(pool)
}

impl Gpu {
    fn take(&'static self, bytes: usize) -> Block {
        let mut pointer = 0;
        let mut take = || {
            // SAFETY: the card's context is current inside `enter`; the call gets a place for its result.
            unsafe { cu::cuMemAllocFromPoolAsync(&mut pointer, bytes.max(1), self.pool(), self.stream()) }
        };
        let mut result = take();
        if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            // Pieces that are free but lie apart go back to the driver first.
            // SAFETY: the stream and the pool live as long as the process.
            unsafe {
                must(cu::cuStreamSynchronize(self.stream()), "waiting for memory");
                must(cu::cuMemPoolTrimTo(self.pool(), 0), "freeing memory");
            }
            result = take();
        }
        assert!(
            result == CUresult::CUDA_SUCCESS,
            "{}: {:.1} GiB more are wanted, {:.1} GiB are free ({result:?})",
            crate::ops::OUT_OF_MEMORY,
            gib(bytes),
            gib(self.free_bytes()),
        );
        if poisoned() {
            // SAFETY: the block has just been taken.
            must(unsafe { cu::cuMemsetD8Async(pointer, 0xff, bytes, self.stream()) }, "poisoning");
        }
        Block { gpu: self, pointer }
    }

    fn give_back(&self, pointer: u64) {
        self.make_current();
        // SAFETY: the block was taken from this stream's pool; what was launched before still finds it.
        must(unsafe { cu::cuMemFreeAsync(pointer, self.stream()) }, "giving memory back");
    }

    /// Bytes that the pool has taken from the card.
    pub fn reserved_bytes(&self) -> u64 {
        let mut bytes = 0u64;
        let attribute = cu::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
        self.make_current();
        // SAFETY: the call gets a place of the attribute's size.
        let result = unsafe { cu::cuMemPoolGetAttribute(self.pool(), attribute, (&raw mut bytes).cast()) };
        must(result, "the pool's size");
        bytes
    }

    /// Bytes of the card that nobody has taken.
    pub fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        self.make_current();
        // SAFETY: the call gets places for its results.
        must(unsafe { cu::cuMemGetInfo_v2(&mut free, &mut total) }, "free memory");
        free
    }
}

/// Whether blocks are filled with NaNs (`EMBERTUNE_CUDA_POISON=1`, for tests).
fn poisoned() -> bool {
    static POISONED: OnceLock<bool> = OnceLock::new();
    *POISONED.get_or_init(|| std::env::var("EMBERTUNE_CUDA_POISON").is_ok_and(|value| value == "1"))
}

fn gib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

impl Side<'_> {
    /// Copies a matrix, row by row.
    pub fn copy(&mut self, from: Matrix, to: Matrix) {
        assert_eq!((from.rows, from.columns, from.dtype), (to.rows, to.columns, to.dtype), "copy");
        if from.rows == 0 || from.columns == 0 {
            return;
        }
        let size = from.dtype.size();
        let of_eight = |x: &Matrix| {
            x.pointer.is_multiple_of(16) && x.stride.is_multiple_of(8) && x.columns.is_multiple_of(8)
        };
        if from.dtype == DType::BF16 && of_eight(&from) && of_eight(&to) {
            return self.copy_rows(from, to);
        }
        let on_card = cu::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let copy = cu::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: on_card,
            srcHost: null(),
            srcDevice: from.pointer,
            srcArray: null_mut(),
            srcPitch: from.stride * size,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: on_card,
            dstHost: null_mut(),
            dstDevice: to.pointer,
            dstArray: null_mut(),
            dstPitch: to.stride * size,
            WidthInBytes: from.columns * size,
            Height: from.rows,
        };
        // SAFETY: both matrices lie in memory that the caller holds.
        must(unsafe { cu::cuMemcpy2DAsync_v2(&copy, self.gpu.stream()) }, "copying a matrix");
        self.mark(|| Some("copy".into()));
    }

    /// By a kernel: the copy engine is slow where rows are short.
    fn copy_rows(&mut self, from: Matrix, to: Matrix) {
        let mut arguments = [from.pointer, to.pointer].map(Arg::from).to_vec();
        arguments.extend([from.stride, to.stride, from.rows, from.columns].map(Arg::from));
        let grid = Grid::new((from.rows * from.columns).div_ceil(2048), 256);
        self.launch(Module::bf16(Files::Small, 0), "copy_rows", grid, &arguments);
    }

    /// Fills a matrix with zeros.
    pub fn clear(&mut self, x: Matrix) {
        if x.rows == 0 || x.columns == 0 {
            return;
        }
        let size = x.dtype.size();
        // SAFETY: the matrix lies in memory that the caller holds.
        let result = unsafe {
            cu::cuMemsetD2D8Async(x.pointer, x.stride * size, 0, x.columns * size, x.rows, self.gpu.stream())
        };
        must(result, "filling a matrix with zeros");
    }
}
