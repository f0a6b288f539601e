//! Work on all cores, in order, with back pressure.
//!
//! ```text
//! pieces (a thread) ──> work (a thread for each core) ──> sink (the caller's thread, in the order of the pieces)
//! ```
//!
//! What lies between the first arrow and the last is bounded in bytes: no more is taken in until something has
//! come out. A piece that is larger than all of that goes alone.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::error::Result;

/// How often the sink is called when nothing comes.
const PATIENCE: Duration = Duration::from_millis(100);

/// A piece of work.
pub(super) struct Piece<T> {
    pub content: T,
    /// What it weighs.
    pub bytes: usize,
}

/// Hands each piece to `work` and what comes of it to `sink`, in order; `sink(None)` now and then in between,
/// so that it can stop. At most `bytes` are under way.
///
/// # Errors
/// Those of `sink`, which ends everything.
///
/// # Panics
/// If `pieces` or `work` does.
pub(super) fn in_order<T: Send, U: Send>(
    pieces: impl Iterator<Item = Piece<T>> + Send,
    threads: usize,
    bytes: usize,
    work: impl Fn(T) -> U + Sync,
    mut sink: impl FnMut(Option<U>) -> Result<()>,
) -> Result<()> {
    let room = Room { limit: bytes, state: Mutex::default(), changed: Condvar::new() };
    let (jobs, waiting) = channel();
    let (done, results) = channel();
    let waiting = Mutex::new(waiting);
    thread::scope(|scope| {
        let (room, waiting, work) = (&room, &waiting, &work);
        // Whatever ends this scope ends the threads.
        let _close = Close(room);
        scope.spawn(move || read(pieces, room, &jobs));
        for _ in 0..threads.max(1) {
            let done = done.clone();
            scope.spawn(move || serve(waiting, room, work, &done));
        }
        drop(done);
        collect(&results, room, &mut sink)
    })
}

/// A piece's number and weight, and itself.
type Job<T> = (usize, usize, T);
/// What came of it.
type Done<U> = (usize, usize, Result<U, Box<dyn Any + Send>>);

fn read<T>(pieces: impl Iterator<Item = Piece<T>>, room: &Room, jobs: &Sender<Job<T>>) {
    for (number, piece) in pieces.enumerate() {
        if !room.take(piece.bytes) || jobs.send((number, piece.bytes, piece.content)).is_err() {
            return;
        }
    }
}

fn serve<T, U>(
    waiting: &Mutex<Receiver<Job<T>>>,
    room: &Room,
    work: &impl Fn(T) -> U,
    done: &Sender<Done<U>>,
) {
    loop {
        let job = lock(waiting).recv();
        let Ok((number, bytes, content)) = job else { return };
        if room.is_closed() {
            return;
        }
        let result = catch_unwind(AssertUnwindSafe(|| work(content)));
        if done.send((number, bytes, result)).is_err() {
            return;
        }
    }
}

fn collect<U>(
    results: &Receiver<Done<U>>,
    room: &Room,
    sink: &mut impl FnMut(Option<U>) -> Result<()>,
) -> Result<()> {
    let mut early = BTreeMap::new();
    let mut next = 0;
    loop {
        match results.recv_timeout(PATIENCE) {
            Ok((number, bytes, result)) => {
                early.insert(number, (bytes, result.unwrap_or_else(|panic| resume_unwind(panic))));
            }
            Err(RecvTimeoutError::Timeout) => sink(None)?,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        while let Some((bytes, result)) = early.remove(&next) {
            sink(Some(result))?;
            room.give(bytes);
            next += 1;
        }
    }
}

/// How much is under way.
struct Room {
    limit: usize,
    state: Mutex<Under>,
    changed: Condvar,
}

#[derive(Default)]
struct Under {
    bytes: usize,
    closed: bool,
}

impl Room {
    /// Waits for room; `false` when there will be none.
    fn take(&self, bytes: usize) -> bool {
        let full = |under: &mut Under| {
            !under.closed && under.bytes > 0 && under.bytes.saturating_add(bytes) > self.limit
        };
        let guard = self.changed.wait_while(lock(&self.state), full);
        let mut under = guard.unwrap_or_else(PoisonError::into_inner);
        under.bytes = under.bytes.saturating_add(bytes);
        !under.closed
    }

    fn give(&self, bytes: usize) {
        let mut under = lock(&self.state);
        under.bytes = under.bytes.saturating_sub(bytes);
        self.changed.notify_all();
    }

    fn is_closed(&self) -> bool {
        lock(&self.state).closed
    }
}

struct Close<'a>(&'a Room);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).closed = true;
        self.0.changed.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::time::Instant;

    use super::*;
    use crate::error::Error;

    fn pieces(n: usize, bytes: usize) -> impl Iterator<Item = Piece<usize>> + Send {
        (0..n).map(move |content| Piece { content, bytes })
    }

    #[test]
    fn results_come_in_order_whatever_each_takes() {
        for threads in [1, 2, 7] {
            let mut got = Vec::new();
            let work = |i: usize| {
                thread::sleep(Duration::from_micros((i * 7919 % 300) as u64));
                i * i
            };
            in_order(pieces(300, 10), threads, 100, work, |result| {
                got.extend(result);
                Ok(())
            })
            .unwrap();
            assert_eq!(got, (0..300).map(|i| i * i).collect::<Vec<_>>());
        }
    }

    #[test]
    fn no_more_is_under_way_than_there_is_room_for() {
        let (under_way, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let counted = |bytes| {
            pieces(200, bytes).inspect(|_| {
                // One is read before there is room for it.
                most.fetch_max(under_way.fetch_add(1, SeqCst) + 1, SeqCst);
            })
        };
        let out = |result: Option<usize>| {
            thread::sleep(Duration::from_micros(100));
            under_way.fetch_sub(usize::from(result.is_some()), SeqCst);
            Ok(())
        };
        in_order(counted(10), 3, 50, |i| i, out).unwrap();
        assert!(most.load(SeqCst) <= 5 + 1 + 1, "{most:?} pieces of 10 bytes in room for 50");
        most.store(0, SeqCst);
        in_order(counted(1000), 3, 50, |i| i, out).unwrap();
        assert!(most.load(SeqCst) <= 1 + 1 + 1, "one that is too large goes alone, not {most:?}");
    }

    #[test]
    fn an_error_or_a_panic_ends_everything() {
        let endless = || (0..).map(|content| Piece { content, bytes: 10 });
        let fail = |result: Option<usize>| match result {
            Some(5) => Err(Error::train("enough", "")),
            _ => Ok(()),
        };
        assert_eq!(in_order(endless(), 2, 100, |i| i, fail).unwrap_err().to_string(), "enough");
        let work = |i: usize| if i == 7 { panic!("piece 7") } else { i };
        let panic = catch_unwind(|| in_order(endless(), 2, 100, work, |_| Ok(()))).unwrap_err();
        assert_eq!(*panic.downcast_ref::<&str>().unwrap(), "piece 7");
        // Nothing comes until the sink was asked, however late the machine gets to that.
        let asked = AtomicUsize::new(0);
        let stuck = std::iter::from_fn(|| -> Option<Piece<usize>> {
            let started = Instant::now();
            while asked.load(SeqCst) == 0 && started.elapsed() < Duration::from_secs(60) {
                thread::sleep(Duration::from_millis(1));
            }
            None
        });
        let ask = |_| {
            asked.store(1, SeqCst);
            Err(Error::train("stopped", ""))
        };
        let stopped = in_order(stuck, 2, 100, |i| i, ask);
        assert_eq!(stopped.unwrap_err().to_string(), "stopped", "the sink is asked while nothing comes");
    }
}
