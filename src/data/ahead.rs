//! A thread that has the next value ready before it is asked for, and no more than that.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, JoinHandle};

use crate::error::{Error, Result};

/// Values, made one ahead of their use.
#[derive(Debug)]
pub(super) struct Ahead<T> {
    values: Option<Receiver<Result<T>>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Ahead<T> {
    /// Starts to call `make`, until it gives `None` or an error.
    ///
    /// # Errors
    /// There can't be another thread.
    pub fn start(mut make: impl FnMut() -> Result<Option<T>> + Send + 'static) -> Result<Self> {
        // Nothing is stored between the two: what is ready waits in the thread itself.
        let (ready, values) = sync_channel(0);
        let run = move || {
            loop {
                let made =
                    catch_unwind(AssertUnwindSafe(&mut make)).unwrap_or_else(|panic| Err(fault(&*panic)));
                let Some(made) = made.transpose() else { return };
                let failed = made.is_err();
                if ready.send(made).is_err() || failed {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("data".into()).spawn(run);
        let thread =
            thread.map_err(|e| Error::train(format!("can't start a thread for the data: {e}"), ""))?;
        Ok(Self { values: Some(values), thread: Some(thread) })
    }

    /// The next value, or `None` after the last.
    ///
    /// # Errors
    /// That of `make`; if it panicked, what it said.
    pub fn next(&mut self) -> Result<Option<T>> {
        self.values.as_ref().and_then(|values| values.recv().ok()).transpose()
    }
}

fn fault(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    Error::train(format!("the thread that reads the data ahead has failed: {text}"), "")
}

impl<T> Drop for Ahead<T> {
    fn drop(&mut self) {
        // Without a receiver the thread ends at its next value.
        self.values = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::time::Duration;

    use super::*;

    #[test]
    fn one_value_is_made_ahead_and_the_rest_when_asked_for() {
        let made = Arc::new(AtomicUsize::new(0));
        let count = made.clone();
        let mut ahead = Ahead::start(move || {
            let number = count.fetch_add(1, SeqCst);
            Ok((number < 3).then_some(number))
        })
        .unwrap();
        thread::sleep(Duration::from_millis(50));
        assert_eq!(made.load(SeqCst), 1, "before anything was asked for");
        let got: Vec<_> = std::iter::from_fn(|| ahead.next().unwrap()).collect();
        assert_eq!(got, [0, 1, 2]);
        assert!(ahead.next().unwrap().is_none());
    }

    #[test]
    fn errors_and_panics_come_when_their_value_is_due() {
        let mut number = 0;
        let mut ahead = Ahead::start(move || {
            number += 1;
            if number == 2 { panic!("no {number}") } else { Ok(Some(number)) }
        })
        .unwrap();
        assert_eq!(ahead.next().unwrap(), Some(1));
        let error = ahead.next().unwrap_err().to_string();
        assert!(error.ends_with("reads the data ahead has failed: no 2"), "{error}");
        drop(Ahead::start(|| Ok(Some(1))).unwrap());
    }
}
