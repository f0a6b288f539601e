//! A card as the ops see it: a stream of our own beside CubeCL's, in the same (primary) context.
//!
//! CubeCL's streams are private, but events order whole contexts: [`Gpu::enter`] makes the side
//! stream wait for all that was launched before, and all that is launched later wait for the side
//! stream. The host never waits. So a buffer that Burn frees after an op may be handed out again at
//! once: whoever writes it comes after the op on the card.

use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::sys::{self as cu, CUdevice_attribute as Attribute, CUresult};

use super::gemm::Products;
use super::kernels::Kernels;

/// The oldest driver that can order contexts with events.
const DRIVER: i32 = 12_050;
/// Bytes of the products' scratch memory.
pub const WORKSPACE: usize = 64 << 20;
/// Streams for products that don't depend on each other, the side stream among them.
const LANES: usize = 4;
/// Counters that kernels find at 0 and leave at 0.
const COUNTERS: usize = 1024;

/// One card: context, side stream and what is reused from call to call.
pub struct Gpu {
    context: cu::CUcontext,
    main: Lane,
    before: cu::CUevent,
    after: cu::CUevent,
    lanes: OnceLock<[Lane; LANES]>,
    /// 90 for compute capability 9.0.
    pub capability: u32,
    /// Number of multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of shared memory that a block may have.
    pub shared_memory: usize,
    counters: u64,
    pool: cu::CUmemoryPool,
    caches: Mutex<Caches>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpu (compute capability {})", self.capability)
    }
}

// SAFETY: contexts, streams and events of the driver may be used from any thread; `enter` holds the
// lock on `caches` around every use of the stream.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// A stream and what products work in there.
#[derive(Debug, Clone, Copy)]
pub struct Lane {
    /// The stream.
    pub stream: cu::CUstream,
    /// The address of the products' scratch memory, [`WORKSPACE`] bytes.
    pub workspace: u64,
    /// Recorded where others wait for this stream.
    reached: cu::CUevent,
}

impl Lane {
    /// With the card's context current.
    fn new() -> Result<Self, Unusable> {
        let (mut stream, mut workspace, mut reached) = (null_mut(), 0, null_mut());
        // SAFETY: each call gets a place for its result; nothing is ever freed.
        unsafe {
            let apart = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            ok(cu::cuStreamCreate(&mut stream, apart), "a stream")?;
            ok(cu::cuEventCreate(&mut reached, UNTIMED), "an event")?;
            ok(cu::cuMemAlloc_v2(&mut workspace, WORKSPACE), "64 MiB")?;
        }
        Ok(Self { stream, workspace, reached })
    }

    /// What is launched here from now on comes after what the other has now.
    fn follow(&self, other: &Lane) {
        // SAFETY: streams and events are never freed.
        unsafe {
            must(cu::cuEventRecord(other.reached, other.stream), "recording a stream");
            must(cu::cuStreamWaitEvent(self.stream, other.reached, 0), "waiting for a stream");
        }
    }
}

/// For events that only order.
const UNTIMED: u32 = cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;

/// What is looked up instead of made again.
struct Caches {
    kernels: Kernels,
    products: Products,
}

/// The side stream, entered: what is launched through it runs in order.
pub struct Side<'a> {
    /// The card.
    pub gpu: &'static Gpu,
    caches: MutexGuard<'a, Caches>,
}

/// Why a card can't be used, and what to do.
#[derive(Debug, Clone)]
pub struct Unusable {
    /// What is wrong.
    pub problem: String,
    /// The remedy.
    pub hint: &'static str,
}

static CARDS: Mutex<BTreeMap<usize, &'static Gpu>> = Mutex::new(BTreeMap::new());

impl Gpu {
    /// The card with this index, opened at the first call.
    ///
    /// # Errors
    /// A missing or old driver, a missing library, a card that is too old.
    pub fn open(index: usize) -> Result<&'static Gpu, Unusable> {
        let mut cards = CARDS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = cards.get(&index) {
            return Ok(gpu);
        }
        let gpu: &'static Gpu = Box::leak(Box::new(Gpu::new(index)?));
        cards.insert(index, gpu);
        Ok(gpu)
    }

    fn new(index: usize) -> Result<Gpu, Unusable> {
        libraries()?;
        let device = device(index)?;
        let (mut context, mut counters) = (null_mut(), 0);
        let (mut before, mut after) = (null_mut(), null_mut());
        // SAFETY: each call gets a place for its result; the device is valid, and from the second
        // call on the context is current. The allocations are never freed.
        unsafe {
            ok(cu::cuDevicePrimaryCtxRetain(&mut context, device), "its context")?;
            ok(cu::cuCtxSetCurrent(context), "its context")?;
            ok(cu::cuEventCreate(&mut before, UNTIMED), "an event")?;
            ok(cu::cuEventCreate(&mut after, UNTIMED), "an event")?;
            ok(cu::cuMemAlloc_v2(&mut counters, COUNTERS), "a little memory")?;
            ok(cu::cuMemsetD8_v2(counters, 0, COUNTERS), "a little memory")?;
        }
        let [major, minor] = [
            attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ];
        if major < 8 {
            return Err(Unusable {
                problem: format!("its compute capability is {major}.{minor}, but bf16 products need 8.0"),
                hint: "set `device = \"wgpu\"`, or use a card of the Ampere generation or later",
            });
        }
        let shared = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let products = Products::new((major * 10 + minor) as u32)?;
        let pool = super::memory::pool(index)?;
        Ok(Gpu {
            context,
            main: Lane::new()?,
            before,
            after,
            lanes: OnceLock::new(),
            capability: (major * 10 + minor) as u32,
            multiprocessors: attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
            shared_memory: attribute(device, shared)? as usize,
            counters,
            pool,
            caches: Mutex::new(Caches { kernels: Kernels::default(), products }),
        })
    }

    /// Runs `work` on the side stream, after all that was launched and before all that will be.
    /// Resolve pointers before: that is what makes earlier launches reach the card.
    pub fn enter<R>(&'static self, work: impl FnOnce(&mut Side<'_>) -> R) -> R {
        let caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        let mut side = Side { gpu: self, caches };
        self.make_current();
        // SAFETY: handles made by `new`, which live as long as the process.
        unsafe {
            must(cu::cuCtxRecordEvent(self.context, self.before), "recording what came before");
            must(cu::cuStreamWaitEvent(self.main.stream, self.before, 0), "waiting for what came before");
        }
        side.mark(|| None);
        let result = work(&mut side);
        // SAFETY: as above.
        unsafe {
            must(cu::cuEventRecord(self.after, self.main.stream), "recording an op");
            must(cu::cuCtxWaitEvent(self.context, self.after), "ordering an op");
        }
        result
    }

    /// The address of counter `n`, an int that is 0 between launches.
    pub fn counter(&self, n: usize) -> u64 {
        assert!(n * 4 < COUNTERS);
        self.counters + n as u64 * 4
    }

    /// The side stream.
    pub fn stream(&self) -> cu::CUstream {
        self.main.stream
    }

    /// The side stream and its scratch memory.
    pub fn main(&self) -> Lane {
        self.main
    }

    /// The pool of `memory.rs`.
    pub(super) fn pool(&self) -> cu::CUmemoryPool {
        self.pool
    }

    /// Makes the card's context that of the thread.
    pub(super) fn make_current(&self) {
        // SAFETY: the context lives as long as the process.
        must(unsafe { cu::cuCtxSetCurrent(self.context) }, "setting the context");
    }
}

impl Side<'_> {
    /// The compiled kernels.
    pub fn kernels(&mut self) -> &mut Kernels {
        &mut self.caches.kernels
    }

    /// The prepared products.
    pub fn products(&mut self) -> &mut Products {
        &mut self.caches.products
    }

    /// Runs `work` on up to `wanted` streams, the side stream first, which begin after what is launched and end before what
    /// will be. What it launches on different ones must not depend on each other.
    pub fn fork(&mut self, wanted: usize, work: impl FnOnce(&mut Self, &[Lane])) {
        let gpu = self.gpu;
        let all = gpu.lanes.get_or_init(|| {
            let more = || Lane::new().unwrap_or_else(|e| panic!("CUDA, a stream: {}", e.problem));
            std::array::from_fn(|n| if n == 0 { gpu.main } else { more() })
        });
        let lanes = &all[..wanted.clamp(1, LANES)];
        lanes[1..].iter().for_each(|lane| lane.follow(&gpu.main));
        work(self, lanes);
        lanes[1..].iter().for_each(|lane| gpu.main.follow(lane));
    }

    /// `bytes` zeros at `pointer`.
    pub fn zero(&mut self, pointer: u64, bytes: usize) {
        // SAFETY: the caller names memory of a tensor that it holds.
        must(unsafe { cu::cuMemsetD8Async(pointer, 0, bytes, self.gpu.stream()) }, "filling with zeros");
    }
}

/// Number of cards; 0 without a driver.
pub fn count() -> usize {
    let mut count = 0;
    // SAFETY: nothing of the driver is called unless it is there; the call gets a place for its result.
    let found = unsafe {
        cu::is_culib_present()
            && cu::cuInit(0) == CUresult::CUDA_SUCCESS
            && cu::cuDeviceGetCount(&mut count) == CUresult::CUDA_SUCCESS
    };
    if found { count.max(0) as usize } else { 0 }
}

/// Whether the driver, cuBLASLt and NVRTC can be loaded.
fn libraries() -> Result<(), Unusable> {
    // SAFETY: these look for libraries and call nothing in them.
    let [driver, products, compiler] = unsafe {
        [
            cu::is_culib_present(),
            cudarc::cublaslt::sys::is_culib_present(),
            cudarc::nvrtc::sys::is_culib_present(),
        ]
    };
    let missing = |name: &str, hint| Err(Unusable { problem: format!("`{name}` isn't there"), hint });
    if !driver {
        return missing("libcuda.so", "install NVIDIA's driver, or set `device = \"auto\"`");
    }
    let toolkit =
        "install CUDA's runtime libraries (12.5 or later), and name their folder in LD_LIBRARY_PATH";
    if !products {
        return missing("libcublasLt.so", toolkit);
    }
    if !compiler {
        return missing("libnvrtc.so", toolkit);
    }
    Ok(())
}

fn device(index: usize) -> Result<cu::CUdevice, Unusable> {
    let (mut version, mut device) = (0, 0);
    // SAFETY: `libraries` has found the driver; each call gets a place for its result.
    unsafe {
        ok(cu::cuInit(0), "the driver")?;
        ok(cu::cuDriverGetVersion(&mut version), "the driver's version")?;
        ok(cu::cuDeviceGet(&mut device, index as i32), "the card")?;
    }
    if version < DRIVER {
        return Err(Unusable {
            problem: format!("the driver is made for CUDA {}.{}", version / 1000, version % 1000 / 10),
            hint: "install a driver for CUDA 12.5 or later (555 or later)",
        });
    }
    Ok(device)
}

fn attribute(device: cu::CUdevice, attribute: Attribute) -> Result<i32, Unusable> {
    let mut value = 0;
    // SAFETY: the device is valid, and the call gets a place for its result.
    ok(unsafe { cu::cuDeviceGetAttribute(&mut value, attribute, device) }, "its properties")?;
    Ok(value)
}

pub(super) fn ok(result: CUresult, what: &str) -> Result<(), Unusable> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Unusable {
        problem: format!("it doesn't give {what}: {result:?}"),
        hint: "look at `nvidia-smi`: is the card there, free and healthy?",
    })
}

/// Panics where the driver refuses: ops return tensors, not results.
pub fn must(result: CUresult, what: &str) {
    assert!(result == CUresult::CUDA_SUCCESS, "CUDA, {what}: {result:?}");
}
