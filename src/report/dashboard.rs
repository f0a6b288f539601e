//! Burn's dashboard on a terminal, in place of a line a step.
//!
//! Burn's renderer draws in a thread of its own. A user's kill key and whatever else goes wrong with it is a panic
//! there, and in whoever speaks to it next. So a second thread, the keeper, alone speaks to it: training tells the
//! keeper and never waits, and whatever happens the keeper gives the terminal back and lines go on.
//!
//! ```text
//! training ──┐                                   ┌─ draws, reads keys
//! tracing  ──┼─ channel ─▶ keeper ─ channel ─▶ Burn's renderer
//! Ctrl-C   ──┘               │  ◀── quit, kill, panic ──┘
//!                            └─▶ asks the run to stop
//! ```

mod panels;

use std::fmt;
use std::io::{IsTerminal, Write};
use std::mem::ManuallyDrop;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use burn_train::Interrupter;
use burn_train::logger::TrainingProgressLogger;
use burn_train::renderer::tui::TuiMetricsRendererWrapper;

use super::{Event, RunInfo, StepMetrics};
use crate::terminal::{self, Holder, Modes, Stderr};
use panels::Panels;

/// Asks the run to stop: what Burn's keys for that do.
pub(super) type Quit = Box<dyn Fn() + Send>;

/// Burn draws nothing useful on less.
const SMALLEST: (u16, u16) = (60, 16);
/// How often the keeper looks whether the renderer lives and the user wants to quit.
const LOOK: Duration = Duration::from_millis(50);
/// How long a renderer may take to come up.
const START: Duration = Duration::from_secs(5);
/// How long one may take to end. A terminal that takes nothing in keeps it longer; it isn't waited for.
const END: Duration = Duration::from_secs(2);
/// How long one may take to put the terminal's modes back while somebody panics.
const RESTORE: Duration = Duration::from_millis(500);
/// Warnings that are kept, to be printed when the terminal is free again.
const KEPT: usize = 100;

/// The thread of Burn that draws.
const RENDERER: &str = "train-renderer";
const KEEPER: &str = "dashboard";

/// Raw mode's counterpart: mouse and screen as they were, the cursor shown.
const PLAIN_SCREEN: &str = "\x1b[?1006l\x1b[?1015l\x1b[?1003l\x1b[?1002l\x1b[?1000l\x1b[?1049l\x1b[?25h";

/// What the keeper is told.
enum Message {
    Step(Box<StepMetrics>),
    Event(Event),
    Text(String),
    Doing(String),
    Leave(Why),
}

/// What others know of the keeper.
struct Keeper {
    tell: Sender<Message>,
    modes: Modes,
    over: Mutex<bool>,
    is_over: Condvar,
}

/// A dashboard that is up, or was.
pub(super) struct Dashboard(Arc<Keeper>);

impl fmt::Debug for Dashboard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dashboard {{ up: {} }}", self.is_up())
    }
}

impl Dashboard {
    /// Takes the terminal, if there is one in front of a user and large enough.
    pub fn open(run: &RunInfo, quit: Quit) -> Option<Self> {
        let large =
            terminal::size().is_none_or(|(columns, rows)| columns >= SMALLEST.0 && rows >= SMALLEST.1);
        if !large || !terminal::can_draw() || !std::io::stdout().is_terminal() {
            return None;
        }
        let (tell, told) = mpsc::channel();
        let (ready, is_ready) = mpsc::channel();
        let keeper = Keeper { tell, modes: Modes::now()?, over: Mutex::new(false), is_over: Condvar::new() };
        let (keeper, panels) = (Arc::new(keeper), Panels::new(run));
        let kept = Kept { keeper: keeper.clone(), told, panels, quit, warnings: Vec::new() };
        thread::Builder::new().name(KEEPER.into()).spawn(move || kept.keep(&ready)).ok()?;
        // A keeper that fails drops its end.
        match is_ready.recv_timeout(START) {
            Ok(()) => Some(Self(keeper)),
            Err(_) => {
                keeper.leave();
                None
            }
        }
    }

    /// Whether the terminal is the dashboard's.
    pub fn is_up(&self) -> bool {
        !*self.0.over()
    }

    /// Shows a step; says whether it could.
    pub fn step(&self, metrics: &StepMetrics) -> bool {
        self.is_up() && self.0.tell.send(Message::Step(Box::new(metrics.clone()))).is_ok()
    }

    /// Shows what isn't a line of the log; says whether it was that.
    pub fn event(&self, event: &Event) -> bool {
        let shown = matches!(event, Event::Validation { .. } | Event::Sample { .. });
        let counted = matches!(event, Event::Saved { .. });
        if !self.is_up() || !(shown || counted) {
            return false;
        }
        self.0.tell.send(Message::Event(event.clone())).is_ok() && shown
    }

    /// Shows what is under way until the next step; says whether it could.
    pub fn doing(&self, what: &str) -> bool {
        self.is_up() && self.0.tell.send(Message::Doing(what.into())).is_ok()
    }

    /// Gives the terminal back.
    pub fn close(&self) {
        self.0.leave();
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        self.close();
    }
}

impl Keeper {
    fn over(&self) -> std::sync::MutexGuard<'_, bool> {
        self.over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The terminal is free: says so, once.
    fn end(&self) -> bool {
        let first = !std::mem::replace(&mut *self.over(), true);
        self.is_over.notify_all();
        first
    }

    /// What Burn would do, where it couldn't.
    fn restore(&self) {
        let mut out = std::io::stdout();
        let _ = out.write_all(PLAIN_SCREEN.as_bytes()).and_then(|()| out.flush());
        self.modes.restore();
    }

    /// Asks for the terminal and waits for it.
    fn leave_for(&self, why: Why) {
        let _ = self.tell.send(Message::Leave(why));
        let over = self.over();
        let waited = self.is_over.wait_timeout_while(over, END, |over| !*over);
        let over = *waited.unwrap_or_else(PoisonError::into_inner).0;
        if !over && self.end() {
            self.restore();
            terminal::hold(None);
        }
    }
}

impl Holder for Keeper {
    fn print(&self, text: &str) {
        let _ = self.tell.send(Message::Text(text.into()));
    }

    fn leave(&self) {
        self.leave_for(Why::Asked);
    }
}

/// Why the dashboard went.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Why {
    Asked,
    /// Somebody else panics: until that is over, nobody may touch the panic hook, which Burn does in the end.
    Panic,
    Killed,
    Broken,
}

/// What the keeper's thread has.
struct Kept {
    keeper: Arc<Keeper>,
    told: Receiver<Message>,
    panels: Panels,
    quit: Quit,
    warnings: Vec<String>,
}

impl Kept {
    /// Holds the terminal until it is asked to leave, or the renderer dies.
    fn keep(mut self, ready: &Sender<()>) {
        let hook = Hook::under();
        let interrupter = Interrupter::new();
        let from = self.panels.starting_point();
        // Never dropped but when all went well: its drop speaks to the renderer.
        let mut renderer = ManuallyDrop::new(TuiMetricsRendererWrapper::new(interrupter.clone(), from));
        let mut up = false;
        let why = catch_unwind(AssertUnwindSafe(|| {
            let alive = self.panels.begin(&mut *renderer);
            if !is_drawing(&alive) {
                return Why::Broken;
            }
            hook.over(&self.keeper);
            Modes::listen_to_ctrl_c();
            terminal::hold(Some(self.keeper.clone()));
            let _ = ready.send(());
            up = true;
            self.show(&mut renderer, &alive, &interrupter)
        }));
        // A panic here is that of a call to a renderer that the user has killed, now or in an earlier run of this
        // process: Burn remembers it.
        let why = why.unwrap_or(if up { Why::Killed } else { Why::Broken });
        match why {
            Why::Asked => {
                // A user who kills it just now is served.
                let end = AssertUnwindSafe(|| drop(ManuallyDrop::into_inner(renderer)));
                if catch_unwind(end).is_err() {
                    self.keeper.restore();
                }
                hook.remove();
            }
            Why::Panic => self.end_beside(ManuallyDrop::into_inner(renderer), hook),
            Why::Killed | Why::Broken => {
                self.keeper.restore();
                hook.remove();
            }
        }
        terminal::hold(None);
        let keeper = self.keeper.clone();
        self.say(why);
        keeper.end();
    }

    /// The renderer gives the terminal back and then waits for the panic hook: somebody else waits for that.
    fn end_beside(&self, renderer: TuiMetricsRendererWrapper, hook: Hook) {
        let end = move || {
            drop(renderer);
            hook.remove();
        };
        let since = Instant::now();
        if thread::Builder::new().name(KEEPER.into()).spawn(end).is_ok() {
            while !self.keeper.modes.are_set() && since.elapsed() < RESTORE {
                thread::sleep(Duration::from_millis(5));
            }
            // Its last words follow the modes.
            thread::sleep(Duration::from_millis(20));
        }
        self.keeper.restore();
    }

    fn show(
        &mut self,
        renderer: &mut TuiMetricsRendererWrapper,
        alive: &Arc<String>,
        interrupter: &Interrupter,
    ) -> Why {
        let mut stopping = false;
        loop {
            match self.told.recv_timeout(LOOK) {
                Ok(Message::Leave(why)) => return why,
                Err(RecvTimeoutError::Disconnected) => return Why::Asked,
                Ok(message) => self.draw(renderer, message),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if Arc::strong_count(alive) == 1 {
                // One that was killed says so by a panic.
                renderer.log_event_training(String::new());
                return Why::Broken;
            }
            if interrupter.should_stop() && !std::mem::replace(&mut stopping, true) {
                (self.quit)();
                self.panels.line(
                    renderer,
                    "stopping: what is under way is finished and saved first; Ctrl-C ends at once",
                );
            }
        }
    }

    fn draw(&mut self, renderer: &mut TuiMetricsRendererWrapper, message: Message) {
        match message {
            Message::Step(metrics) => self.panels.step(renderer, &metrics),
            Message::Event(Event::Validation { run, step, loss, .. }) => {
                self.panels.held_out(renderer, run.as_deref(), step, loss);
            }
            Message::Event(Event::Sample { run, step, prompt, text }) => {
                self.panels.sample(renderer, (run.as_deref(), step), &prompt, &text);
            }
            Message::Event(Event::Saved { .. }) => renderer.log_event_training("Saved".into()),
            Message::Doing(what) => Panels::doing(renderer, &what),
            Message::Event(_) | Message::Leave(_) => {}
            Message::Text(text) => {
                self.note(&text);
                self.panels.line(renderer, &text);
            }
        }
    }

    /// Keeps warnings.
    fn note(&mut self, text: &str) {
        let urgent = ["warning: ", "error: "].iter().any(|word| text.starts_with(word));
        if urgent && self.warnings.len() < KEPT {
            self.warnings.push(text.trim_end().into());
        }
    }

    /// On the terminal, which is free: what must not be missed, and why there are lines now.
    fn say(mut self, why: Why) {
        let mut late = Vec::new();
        while let Ok(message) = self.told.try_recv() {
            if let Message::Text(text) = message {
                self.note(&text);
                late.push(text.trim_end().to_string());
            }
        }
        let mut lines = self.warnings;
        if matches!(why, Why::Killed | Why::Broken) {
            late.retain(|line| !lines.contains(line));
            lines.extend(late);
        }
        lines.extend(match why {
            Why::Asked | Why::Panic => None,
            Why::Killed => {
                (self.quit)();
                Some("stopping: what is under way is finished and saved first; Ctrl-C ends at once".into())
            }
            Why::Broken => Some("the dashboard could not go on; lines follow".into()),
        });
        for line in lines {
            let _ = Stderr.write_all(format!("{line}\n").as_bytes());
        }
    }
}

/// Waits until the renderer has seen the name's metric: then it draws, and Burn's panic hook is in place.
fn is_drawing(name: &Arc<String>) -> bool {
    let since = Instant::now();
    while since.elapsed() < START {
        match Arc::strong_count(name) {
            1 => return false,
            2 => thread::sleep(Duration::from_millis(1)),
            _ => return true,
        }
    }
    false
}

type PanicHook = Box<dyn Fn(&panic::PanicHookInfo<'_>) + Send + Sync>;

/// The panic hook that was there before Burn's, which Burn's wraps and puts back when all went well.
struct Hook(Arc<PanicHook>);

impl Hook {
    fn under() -> Self {
        let before = Arc::new(panic::take_hook());
        let same = before.clone();
        panic::set_hook(Box::new(move |info| same(info)));
        Self(before)
    }

    /// In place of Burn's, which gives the terminal back while its thread draws on: the keeper gives it back, and then
    /// the message is to be seen. What panics in the dashboard itself is its own affair.
    fn over(&self, keeper: &Arc<Keeper>) {
        let (before, keeper): (_, Weak<Keeper>) = (self.0.clone(), Arc::downgrade(keeper));
        panic::set_hook(Box::new(move |info| {
            if thread::current().name().is_some_and(|name| name == RENDERER || name == KEEPER) {
                // What it drops now would complain, and a panic in a panic ends the process.
                return terminal::let_go_if_gone();
            }
            if let Some(keeper) = keeper.upgrade() {
                keeper.leave_for(Why::Panic);
            }
            before(info);
        }));
    }

    fn remove(self) {
        drop(panic::take_hook());
        match Arc::try_unwrap(self.0) {
            Ok(before) => panic::set_hook(before),
            Err(shared) => panic::set_hook(Box::new(move |info| shared(info))),
        }
    }
}
