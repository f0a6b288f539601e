//! Sums over several cards by NCCL, on the side stream.
//!
//! NCCL is opened when it is needed, as `libnccl.so.2` (its packages have no other name) or `libnccl.so`. Only calls
//! that haven't changed since NCCL 2.4 are used. Sums of tensors are queued like any op, so that the host runs ahead.
//! Nobody waits for ever: the host looks for the end of what is queued, and aborts it if it learns meanwhile that
//! another rank has failed.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::time::Duration;

use burn::backend::{Cube, TensorMetadata};
use burn::tensor::Tensor;
use cudarc::driver::sys::{self as cu, CUresult};
use libloading::Library;

use super::driver::{Gpu, Unusable, must};
use super::optim::gathered;
use super::tensor::{address, dense, empty, pointer};

/// `ncclUniqueId`.
pub type UniqueId = [u8; 128];

#[repr(C)]
#[derive(Clone, Copy)]
struct RawId(UniqueId);

type Raw = *mut c_void;
type Status = c_int;
const SUCCESS: Status = 0;
const IN_PROGRESS: Status = 7;
/// `ncclSum`, `ncclUint8`, `ncclFloat32`, `ncclFloat64`.
const SUM: c_int = 0;
const UINT8: c_int = 1;
const FLOAT32: c_int = 7;
const FLOAT64: c_int = 8;

/// The calls of NCCL that are used.
struct Nccl {
    unique_id: unsafe extern "C" fn(*mut RawId) -> Status,
    init: unsafe extern "C" fn(*mut Raw, c_int, RawId, c_int) -> Status,
    all_reduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Raw, cu::CUstream) -> Status,
    broadcast:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Raw, cu::CUstream) -> Status,
    group_start: unsafe extern "C" fn() -> Status,
    group_end: unsafe extern "C" fn() -> Status,
    async_error: unsafe extern "C" fn(Raw, *mut Status) -> Status,
    abort: unsafe extern "C" fn(Raw) -> Status,
    describe: unsafe extern "C" fn(Status) -> *const c_char,
}

impl Nccl {
    fn get() -> Result<&'static Nccl, Unusable> {
        static NCCL: OnceLock<Result<Nccl, String>> = OnceLock::new();
        let opened = NCCL.get_or_init(|| Self::open().map_err(|e| e.to_string()));
        opened.as_ref().map_err(|e| Unusable {
            problem: format!("several cards need NCCL, and `libnccl.so.2` can't be opened: {e}"),
            hint: "install NCCL (2.18 or later), and name its folder in LD_LIBRARY_PATH",
        })
    }

    fn open() -> Result<Nccl, libloading::Error> {
        // SAFETY: opening NCCL runs its initialisers, which expect nothing of us; the signatures are those of
        // nccl.h; the library is never closed.
        unsafe {
            let library = Library::new("libnccl.so.2").or_else(|_| Library::new("libnccl.so"))?;
            let library: &'static Library = Box::leak(Box::new(library));
            Ok(Nccl {
                unique_id: *library.get(b"ncclGetUniqueId\0")?,
                init: *library.get(b"ncclCommInitRank\0")?,
                all_reduce: *library.get(b"ncclAllReduce\0")?,
                broadcast: *library.get(b"ncclBroadcast\0")?,
                group_start: *library.get(b"ncclGroupStart\0")?,
                group_end: *library.get(b"ncclGroupEnd\0")?,
                async_error: *library.get(b"ncclCommGetAsyncError\0")?,
                abort: *library.get(b"ncclCommAbort\0")?,
                describe: *library.get(b"ncclGetErrorString\0")?,
            })
        }
    }

    fn text(&self, status: Status) -> String {
        // SAFETY: NCCL returns a constant string for every status.
        let text = unsafe { CStr::from_ptr((self.describe)(status)) };
        text.to_string_lossy().into_owned()
    }
}

/// Why a call over the cards has no result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// NCCL says so.
    Nccl(String),
    /// The caller gave up waiting, since another rank has failed.
    GaveUp,
}

/// This card's place among several. Never destroyed: that would wait for the others, and the process that ends frees
/// it.
pub struct Communicator {
    nccl: &'static Nccl,
    gpu: &'static Gpu,
    rank: usize,
    raw: Raw,
    done: cu::CUevent,
    /// A little memory for numbers of the host.
    buffer: u64,
    /// Whether it was aborted: NCCL has freed it then, and what was under way is garbage.
    gone: Cell<bool>,
}

/// Bytes of [`Communicator::buffer`].
const BUFFER: usize = 1 << 16;

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator").finish_non_exhaustive()
    }
}

// SAFETY: a communicator may be used from any thread, one at a time.
unsafe impl Send for Communicator {}

impl Communicator {
    /// A new id, made by one rank and told to all.
    ///
    /// # Errors
    /// NCCL can't be opened, or finds no network.
    pub fn unique_id() -> Result<UniqueId, Unusable> {
        let nccl = Nccl::get()?;
        let mut id = RawId([0; 128]);
        // SAFETY: the call gets a place for its result.
        match unsafe { (nccl.unique_id)(&mut id) } {
            SUCCESS => Ok(id.0),
            status => Err(refused("an id", &nccl.text(status))),
        }
    }

    /// Joins the others; waits for all of them.
    ///
    /// # Errors
    /// NCCL can't be opened, or the cards don't reach each other.
    pub fn new(gpu: &'static Gpu, id: &UniqueId, rank: usize, ranks: usize) -> Result<Self, Unusable> {
        let nccl = Nccl::get()?;
        gpu.make_current();
        let (mut raw, mut done, mut buffer) = (null_mut(), null_mut(), 0);
        // SAFETY: the card's context is current; each call gets a place for its result.
        unsafe {
            match (nccl.init)(&mut raw, ranks as c_int, RawId(*id), rank as c_int) {
                SUCCESS => {}
                status => return Err(refused("a communicator", &nccl.text(status))),
            }
            must(cu::cuEventCreate(&mut done, cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32), "an event");
            must(cu::cuMemAlloc_v2(&mut buffer, BUFFER), "a little memory");
        }
        Ok(Self { nccl, gpu, rank, raw, done, buffer, gone: Cell::new(false) })
    }

    /// Σ over the cards of each part, f32, as one sum of one allocation, which holds the results. Nobody waits for it before
    /// [`Communicator::finish`].
    ///
    /// # Errors
    /// NCCL's own.
    pub fn sum(&self, parts: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>, Failure> {
        self.alive()?;
        let (places, copies) = gathered(parts);
        let [Some(first), Some(last)] = [places.first(), places.last()] else { return Ok(Vec::new()) };
        let end = address(last) + (last.meta.num_elements() * size_of::<f32>()) as u64;
        // This look-up waits for what was launched before. What lies between the parts is summed too.
        let at = pointer(first);
        let status = self.gpu.enter(|side| {
            copies.iter().for_each(|copy| copy.run(side));
            self.reduce(at, (end - at) as usize / size_of::<f32>(), FLOAT32)
        });
        self.queued(status)?;
        Ok(places.into_iter().map(Tensor::from_primitive::<Cube>).collect())
    }

    /// Each part as its owner has it, f32; those of others are overwritten where nobody else holds their memory. Nobody
    /// waits for it before [`Communicator::finish`].
    ///
    /// # Errors
    /// As [`Communicator::sum`].
    pub fn spread(&self, parts: Vec<Tensor<1>>, owners: &[usize]) -> Result<Vec<Tensor<1>>, Failure> {
        self.alive()?;
        let place = |(part, &owner): (Tensor<1>, &usize)| {
            let part = dense(part.try_into_primitive::<Cube>().expect("the tensor is on a card"));
            // What is overwritten needn't be copied first.
            if owner == self.rank || part.can_mut() { part } else { empty(&part, part.shape(), part.dtype) }
        };
        let parts: Vec<_> = parts.into_iter().zip(owners).map(place).collect();
        let places: Vec<(u64, usize)> = parts.iter().map(|p| (address(p), p.meta.num_elements())).collect();
        // This look-up waits for what was launched before.
        parts.first().map(pointer);
        let status = self.gpu.enter(|_| {
            // SAFETY: each place is memory of that many numbers on this card, held until the calls are queued; those
            // between start and end are made as one.
            unsafe {
                let mut status = vec![(self.nccl.group_start)()];
                for (&(at, n), &owner) in places.iter().zip(owners) {
                    let (at, root, stream) = (at as *mut c_void, owner as c_int, self.gpu.stream());
                    status.push((self.nccl.broadcast)(at, at, n, FLOAT32, root, self.raw, stream));
                }
                status.push((self.nccl.group_end)());
                status.into_iter().find(|s| ![SUCCESS, IN_PROGRESS].contains(s)).unwrap_or(SUCCESS)
            }
        });
        self.queued(status)?;
        Ok(parts.into_iter().map(Tensor::from_primitive::<Cube>).collect())
    }

    /// Until all that was asked for is there.
    ///
    /// # Errors
    /// NCCL's own, or `failed` said that another rank has failed.
    pub fn finish(&self, failed: &dyn Fn() -> bool) -> Result<(), Failure> {
        self.alive()?;
        self.gpu.make_current();
        // SAFETY: handles made by `new`.
        must(unsafe { cu::cuEventRecord(self.done, self.gpu.stream()) }, "recording a sum");
        for round in 0u32.. {
            // SAFETY: as above.
            match unsafe { cu::cuEventQuery(self.done) } {
                CUresult::CUDA_SUCCESS => return Ok(()),
                CUresult::CUDA_ERROR_NOT_READY => {}
                error => must(error, "waiting for a sum"),
            }
            // Most sums are done in a millisecond; what takes longer is looked at less often.
            match round {
                0..2_000 => std::hint::spin_loop(),
                _ => std::thread::sleep(Duration::from_micros(100)),
            }
            if round % 64 != 63 {
                continue;
            }
            let mut status = SUCCESS;
            // SAFETY: the communicator is alive; the call gets a place for its result.
            unsafe { (self.nccl.async_error)(self.raw, &mut status) };
            let broken = status != SUCCESS && status != IN_PROGRESS;
            if broken || failed() {
                self.give_up();
                return Err(if broken { Failure::Nccl(self.nccl.text(status)) } else { Failure::GaveUp });
            }
        }
        unreachable!("the loop ends by returning")
    }

    /// Σ over the cards, number by number.
    ///
    /// # Errors
    /// As [`Communicator::finish`].
    pub fn sum_f64(&self, values: &mut [f64], failed: &dyn Fn() -> bool) -> Result<(), Failure> {
        let n = values.len();
        self.on_buffer(bytemuck::cast_slice_mut(values), failed, |at| self.reduce(at, n, FLOAT64))
    }

    /// Rank 0's bytes on every card; all bring as many.
    ///
    /// # Errors
    /// As [`Communicator::finish`].
    pub fn broadcast(&self, bytes: &mut [u8], failed: &dyn Fn() -> bool) -> Result<(), Failure> {
        for piece in bytes.chunks_mut(BUFFER) {
            let n = piece.len();
            self.on_buffer(piece, failed, |at| {
                let at = at as *mut c_void;
                // SAFETY: `at` is `BUFFER` bytes on the card.
                unsafe { (self.nccl.broadcast)(at, at, n, UINT8, 0, self.raw, self.gpu.stream()) }
            })?;
        }
        Ok(())
    }

    /// Copies to the card, calls, waits, and copies back.
    fn on_buffer(
        &self,
        bytes: &mut [u8],
        failed: &dyn Fn() -> bool,
        call: impl FnOnce(u64) -> Status,
    ) -> Result<(), Failure> {
        self.alive()?;
        assert!(bytes.len() <= BUFFER, "more numbers of the host than there is room for");
        let (buffer, stream) = (self.buffer, self.gpu.stream());
        let status = self.gpu.enter(|_| {
            // SAFETY: the bytes outlive the copy, since the stream is waited for below, in every case.
            let copied =
                unsafe { cu::cuMemcpyHtoDAsync_v2(buffer, bytes.as_ptr().cast(), bytes.len(), stream) };
            must(copied, "copying to the card");
            call(buffer)
        });
        self.queued(status)?;
        self.finish(failed)?;
        self.gpu.make_current();
        // SAFETY: as above; this copy waits for itself.
        must(
            unsafe { cu::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), buffer, bytes.len()) },
            "copying from the card",
        );
        Ok(())
    }

    fn reduce(&self, at: u64, n: usize, kind: c_int) -> Status {
        let at = at as *mut c_void;
        // SAFETY: `at` is memory of `n` such numbers on this card, held until the call is queued.
        unsafe { (self.nccl.all_reduce)(at, at, n, kind, SUM, self.raw, self.gpu.stream()) }
    }

    fn alive(&self) -> Result<(), Failure> {
        match self.gone.get() {
            true => Err(Failure::Nccl("an earlier call was given up".into())),
            false => Ok(()),
        }
    }

    /// Whether NCCL took the call.
    fn queued(&self, status: Status) -> Result<(), Failure> {
        if status == SUCCESS || status == IN_PROGRESS {
            return Ok(());
        }
        self.give_up();
        Err(Failure::Nccl(self.nccl.text(status)))
    }

    /// Ends what is under way: the stream goes on without it.
    fn give_up(&self) {
        self.gone.set(true);
        // SAFETY: the communicator is alive, and nothing is called on it any more: the run ends.
        unsafe {
            (self.nccl.abort)(self.raw);
            cu::cuStreamSynchronize(self.gpu.stream());
        }
    }
}

fn refused(what: &str, why: &str) -> Unusable {
    Unusable {
        problem: format!("NCCL doesn't give {what}: {why}"),
        hint: "NCCL_DEBUG=INFO makes it say more; do the cards and machines reach each other?",
    }
}
