//! What each kernel and product took on the card, where `EMBERTUNE_CUDA_TRACE=1` asks for it: an event after each
//! launch, read at the end. Launches run one after the other on the side stream, so the time between two events
//! is that of the second's launch, with any wait for the host before it.

use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys as cu;

use super::driver::{Gpu, Side, must};

struct Mark {
    /// `None` where the stream was entered.
    what: Option<String>,
    event: cu::CUevent,
}

// SAFETY: events of the driver may be used from any thread.
unsafe impl Send for Mark {}

static MARKS: Mutex<Vec<Mark>> = Mutex::new(Vec::new());

/// A kernel's or product's launches.
#[derive(Debug, Clone, PartialEq)]
pub struct Launches {
    /// Kernel, or rows × columns × summands of a product.
    pub what: String,
    /// Milliseconds of the median launch: the first ones wait for code to be loaded.
    pub ms: f64,
    /// How many.
    pub count: usize,
}

/// Whether there is a trace.
pub(super) fn wanted() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| std::env::var("EMBERTUNE_CUDA_TRACE").is_ok_and(|value| value == "1"))
}

impl Side<'_> {
    /// Marks the end of what was launched last.
    pub(super) fn mark(&self, what: impl FnOnce() -> Option<String>) {
        if !wanted() {
            return;
        }
        let mut event = null_mut();
        // SAFETY: the context is current inside `enter`; the call gets a place for its result.
        unsafe {
            must(cu::cuEventCreate(&mut event, 0), "an event");
            must(cu::cuEventRecord(event, self.gpu.stream()), "an event");
        }
        let mut marks = MARKS.lock().unwrap_or_else(PoisonError::into_inner);
        marks.push(Mark { what: what(), event });
    }
}

/// All launches since the last call, the costliest first; empty where no trace is wanted. Waits for the card.
pub fn take(gpu: &Gpu) -> Vec<Launches> {
    let marks = std::mem::take(&mut *MARKS.lock().unwrap_or_else(PoisonError::into_inner));
    let mut all: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    gpu.make_current();
    for pair in marks.windows(2) {
        let mut ms = 0.0f32;
        // SAFETY: events that were recorded on the card's stream; the call gets a place for its result.
        unsafe {
            must(cu::cuEventSynchronize(pair[1].event), "an event");
            must(cu::cuEventElapsedTime_v2(&mut ms, pair[0].event, pair[1].event), "an event");
        }
        if let Some(what) = &pair[1].what {
            all.entry(what.clone()).or_default().push(ms);
        }
    }
    for mark in marks {
        // SAFETY: nobody else holds the event.
        must(unsafe { cu::cuEventDestroy_v2(mark.event) }, "an event");
    }
    let launches = all.into_iter().map(|(what, mut times)| {
        times.sort_by(f32::total_cmp);
        Launches { what, ms: f64::from(times[times.len() / 2]), count: times.len() }
    });
    let mut launches: Vec<Launches> = launches.collect();
    launches.sort_by(|a, b| (b.ms * b.count as f64).total_cmp(&(a.ms * a.count as f64)));
    launches
}
