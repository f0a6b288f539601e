//! The terminal: who has it. Lines go to standard error through [`Stderr`]; a [`Bar`] makes way for them, and the
//! dashboard, while it is up, takes them itself.

use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Whoever has the terminal while it isn't free for lines.
pub(crate) trait Holder: Send + Sync {
    /// Text that would have been printed.
    fn print(&self, text: &str);
    /// Gives the terminal back, and returns when that is done.
    fn leave(&self);
}

static HOLDER: Mutex<Option<Arc<dyn Holder>>> = Mutex::new(None);
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// What a panic elsewhere leaves here is whole.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on `holder` has what is printed; `None`: standard error again.
#[cfg(feature = "tui")]
pub(crate) fn hold(holder: Option<Arc<dyn Holder>>) {
    *locked(&HOLDER) = holder;
}

/// Makes the terminal what it was before this program drew on it: before one ends in the middle.
pub(crate) fn leave() {
    let holder = locked(&HOLDER).clone();
    if let Some(holder) = holder {
        holder.leave();
    }
    if let Some(bar) = locked(&BAR).take() {
        bar.finish_and_clear();
    }
}

/// Standard error, or whoever has the terminal. A line is to come in one write.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let holder = locked(&HOLDER);
        if let Some(holder) = &*holder {
            holder.print(&String::from_utf8_lossy(bytes));
            return Ok(bytes.len());
        }
        let bar = locked(&BAR).clone();
        let write = || io::stderr().write(bytes);
        bar.map_or_else(write, |bar| bar.suspend(write))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether control codes may be written to standard error.
pub(crate) fn can_draw() -> bool {
    io::stderr().is_terminal() && !is_dumb() && size().is_none_or(|(columns, _)| columns >= 20)
}

/// Whether what is written to `out` may have colours: <https://no-color.org>.
pub(crate) fn has_colours(out: &impl IsTerminal) -> bool {
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    out.is_terminal() && !no_colour && !is_dumb()
}

/// A terminal that knows no control codes, or whose kind nobody named.
fn is_dumb() -> bool {
    let term = std::env::var_os("TERM").unwrap_or_default();
    term == "dumb" || (cfg!(unix) && term.is_empty())
}

/// Columns and rows, where the system says.
pub(crate) fn size() -> Option<(u16, u16)> {
    #[cfg(unix)]
    let size = rustix::termios::tcgetwinsize(io::stderr()).ok().map(|size| (size.ws_col, size.ws_row));
    #[cfg(not(unix))]
    let size = None;
    size
}

/// Where the terminal has gone away, lets what is still written to it go nowhere: some panic when they can't.
#[cfg(feature = "tui")]
pub(crate) fn let_go_if_gone() {
    #[cfg(unix)]
    if rustix::termios::tcgetattr(io::stderr()).is_err()
        && let Ok(nowhere) = std::fs::OpenOptions::new().write(true).open("/dev/null")
    {
        let _ = rustix::stdio::dup2_stdout(&nowhere);
        let _ = rustix::stdio::dup2_stderr(&nowhere);
    }
}

/// Something long, drawn on the terminal while that is free, else hidden.
#[derive(Debug)]
pub(crate) struct Bar(ProgressBar);

impl Bar {
    /// `total` bytes, of which `done` are there already.
    pub fn of_bytes(what: &str, total: Option<u64>, done: u64) -> Self {
        let style = match total {
            Some(_) => "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{msg} {bytes} {bytes_per_sec}",
        };
        let bar = Self::new(what, total.unwrap_or(0), style);
        bar.0.set_position(done);
        bar.0.reset_eta();
        bar
    }

    /// Things counted, nobody knows up to what.
    pub fn of_count(what: &str) -> Self {
        Self::new(what, 0, "{msg}: {human_pos} {per_sec}")
    }

    /// Something that has no parts.
    pub fn of_time(what: &str) -> Self {
        let bar = Self::new(what, 0, "{msg} {spinner} {elapsed}");
        if !bar.is_hidden() {
            bar.0.enable_steady_tick(Duration::from_millis(100));
        }
        bar
    }

    fn new(what: &str, total: u64, style: &str) -> Self {
        let free = can_draw() && locked(&HOLDER).is_none();
        let target = if free { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let style = ProgressStyle::with_template(style).expect("a template of ours");
        let bar = ProgressBar::with_draw_target(Some(total), target).with_style(style);
        bar.set_message(what.to_string());
        if free {
            *locked(&BAR) = Some(bar.clone());
        }
        Self(bar)
    }

    /// Whether nobody sees it, so that lines should tell.
    pub fn is_hidden(&self) -> bool {
        self.0.is_hidden()
    }

    /// So much is done.
    pub fn set(&self, done: u64) {
        self.0.set_position(done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
        if !self.is_hidden() {
            *locked(&BAR) = None;
        }
    }
}

/// How the terminal treats what is typed, to be put back later.
#[cfg(all(unix, feature = "tui"))]
#[derive(Debug, Clone)]
pub(crate) struct Modes(rustix::termios::Termios);

#[cfg(all(unix, feature = "tui"))]
impl Modes {
    /// As it is now; `None` where there is no terminal, or where this process may not touch it, being in the
    /// background.
    pub fn now() -> Option<Self> {
        let own = rustix::process::getpgrp();
        let in_front = rustix::termios::tcgetpgrp(io::stderr()).is_ok_and(|group| group == own);
        if !in_front {
            return None;
        }
        rustix::termios::tcgetattr(io::stderr()).ok().map(Self)
    }

    /// In raw mode Ctrl-C is a key. Makes it a signal again; Ctrl-Z and Ctrl-\ stay keys, for they would leave the
    /// terminal as it is.
    pub fn listen_to_ctrl_c() {
        use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, tcgetattr, tcsetattr};
        const DISABLED: u8 = if cfg!(target_os = "linux") { 0 } else { 0xff };
        let Ok(mut modes) = tcgetattr(io::stderr()) else { return };
        modes.local_modes |= LocalModes::ISIG;
        modes.special_codes[SpecialCodeIndex::VSUSP] = DISABLED;
        modes.special_codes[SpecialCodeIndex::VQUIT] = DISABLED;
        let _ = tcsetattr(io::stderr(), OptionalActions::Now, &modes);
    }

    /// Whether they are in force.
    pub fn are_set(&self) -> bool {
        let now = rustix::termios::tcgetattr(io::stderr());
        now.is_ok_and(|now| {
            (now.local_modes, now.input_modes, now.output_modes)
                == (self.0.local_modes, self.0.input_modes, self.0.output_modes)
        })
    }

    /// Puts them back.
    pub fn restore(&self) {
        let _ = rustix::termios::tcsetattr(io::stderr(), rustix::termios::OptionalActions::Now, &self.0);
    }
}

#[cfg(all(not(unix), feature = "tui"))]
#[derive(Debug, Clone)]
pub(crate) struct Modes;

#[cfg(all(not(unix), feature = "tui"))]
impl Modes {
    pub fn now() -> Option<Self> {
        Some(Self)
    }

    pub fn listen_to_ctrl_c() {}

    pub fn are_set(&self) -> bool {
        false
    }

    pub fn restore(&self) {}
}
