//! What the command shows where it runs: on a terminal bars while it sets up and then the dashboard, else lines.

use tracing::Level;

use super::{Event, LineFormat, Plain, Report, RunInfo, StepMetrics, Summary};
use crate::terminal::{self, Bar, Stderr};

#[cfg(feature = "tui")]
use super::dashboard::Dashboard;

/// The reporter of the command.
pub struct Live {
    plain: Plain<Stderr>,
    /// Whether bars may be drawn.
    draws: bool,
    /// What it is about, and whether it has parts.
    bar: Option<((String, bool), Bar)>,
    /// What the dashboard's keys for quitting do; `None`: no dashboard.
    quit: Option<Box<dyn Fn() + Send>>,
    #[cfg(feature = "tui")]
    dashboard: Option<Dashboard>,
}

impl Live {
    /// Lines, and bars on a terminal.
    pub fn new(format: LineFormat, level: Level) -> Self {
        let draws = format == LineFormat::Text && level >= Level::INFO && terminal::can_draw();
        Self {
            plain: Plain::new(Stderr, format).from_level(level),
            draws,
            bar: None,
            quit: None,
            #[cfg(feature = "tui")]
            dashboard: None,
        }
    }

    /// The dashboard in place of lines once training begins, where standard output and error are a terminal in front
    /// of a user. Its keys for quitting and killing call `quit`, which is to stop the run.
    #[must_use]
    pub fn with_dashboard(mut self, quit: impl Fn() + Send + 'static) -> Self {
        self.quit = self.draws.then(|| Box::new(quit) as _);
        self
    }

    /// Whether the dashboard is up and has shown it.
    #[cfg(feature = "tui")]
    fn shown(&self, show: impl FnOnce(&Dashboard) -> bool) -> bool {
        self.dashboard.as_ref().is_some_and(show)
    }

    fn close(&mut self) {
        self.bar = None;
        #[cfg(feature = "tui")]
        drop(self.dashboard.take());
    }
}

impl Report for Live {
    fn progress(&mut self, what: &str, done: usize, total: usize) {
        #[cfg(feature = "tui")]
        if self.shown(|dashboard| dashboard.doing(what)) {
            return;
        }
        if !self.draws {
            return self.plain.progress(what, done, total);
        }
        if total > 0 && done >= total {
            self.bar = None;
            return;
        }
        let has_parts = (done, total) != (0, 0);
        let bar = match &self.bar {
            Some(((of, parts), bar)) if of == what && *parts == has_parts => bar,
            _ => {
                // The old one has to go before the new one comes.
                self.bar = None;
                let bar = match total {
                    0 if has_parts => Bar::of_count(what),
                    0 => Bar::of_time(what),
                    _ => Bar::of_bytes(what, Some(total as u64), 0),
                };
                &self.bar.insert(((what.into(), has_parts), bar)).1
            }
        };
        bar.set(done as u64);
    }

    fn start(&mut self, run: &RunInfo) {
        self.bar = None;
        self.plain.start(run);
        #[cfg(feature = "tui")]
        if let Some(quit) = self.quit.take() {
            self.dashboard = Dashboard::open(run, quit);
        }
    }

    fn step(&mut self, metrics: &StepMetrics) {
        self.bar = None;
        #[cfg(feature = "tui")]
        if self.shown(|dashboard| dashboard.step(metrics)) {
            return;
        }
        self.plain.step(metrics);
    }

    fn event(&mut self, event: &Event) {
        self.bar = None;
        #[cfg(feature = "tui")]
        if self.shown(|dashboard| dashboard.event(event)) {
            return;
        }
        self.plain.event(event);
    }

    fn finish(&mut self, summary: &Summary) {
        self.close();
        self.plain.finish(summary);
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.close();
    }
}
