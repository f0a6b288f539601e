//! A program on a real pseudo-terminal, with a screen that shows what a terminal would show.

use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use portable_pty::{Child, CommandBuilder, MasterPty, PtySize, SlavePty, native_pty_system};

/// Other tests may have the machine: nothing here is about speed.
const PATIENCE: Duration = Duration::from_secs(120);

pub struct Session {
    child: Box<dyn Child + Send + Sync>,
    /// `None` once it has gone away.
    terminal: Option<Terminal>,
    seen: Arc<Mutex<Seen>>,
    modes: String,
}

struct Terminal {
    master: Box<dyn MasterPty + Send>,
    /// Held, so that the terminal's modes outlive the child.
    _slave: Box<dyn SlavePty + Send>,
    keys: Box<dyn Write + Send>,
    /// Set: ends at the next thing it reads.
    gone: Arc<AtomicBool>,
    reader: JoinHandle<()>,
}

struct Seen {
    parser: vt100::Parser,
    bytes: Vec<u8>,
}

fn positive(n: u16) -> NonZeroU16 {
    NonZeroU16::new(n).unwrap_or(NonZeroU16::MIN)
}

fn size((columns, rows): (u16, u16)) -> PtySize {
    PtySize { rows, cols: columns, pixel_width: 0, pixel_height: 0 }
}

/// A screen's text; spaces that don't end a line are spaces.
pub fn text(screen: &vt100::Screen) -> String {
    screen.contents().replace('\u{a0}', " ")
}

impl Session {
    /// Starts `command` on a terminal of so many columns and rows.
    pub fn start(mut command: CommandBuilder, (columns, rows): (u16, u16)) -> Self {
        let pair = native_pty_system().openpty(size((columns, rows))).expect("a pseudo-terminal");
        if command.get_env("TERM").is_none_or(|term| term != "dumb" && !term.is_empty()) {
            command.env("TERM", "xterm-256color");
        }
        let modes = format!("{:?}", pair.master.get_termios());
        let child = pair.slave.spawn_command(command).expect("the program starts");
        let mut reader = pair.master.try_clone_reader().expect("a reader");
        let keys = pair.master.take_writer().expect("a writer");
        let parser = vt100::Parser::new(positive(rows), positive(columns), 1000);
        let seen = Arc::new(Mutex::new(Seen { parser, bytes: Vec::new() }));
        let gone = Arc::new(AtomicBool::new(false));
        let (sight, stop) = (seen.clone(), gone.clone());
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 1 << 16];
            while let Ok(n @ 1..) = reader.read(&mut buffer) {
                let mut seen = sight.lock().unwrap();
                seen.parser.process(&buffer[..n]);
                seen.bytes.extend(&buffer[..n]);
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let terminal = Terminal { master: pair.master, _slave: pair.slave, keys, gone, reader };
        Self { child, terminal: Some(terminal), seen, modes }
    }

    fn terminal(&self) -> &Terminal {
        self.terminal.as_ref().expect("the terminal is there")
    }

    /// The screen, a line a row.
    pub fn screen(&self) -> String {
        self.look(text)
    }

    pub fn look<T>(&self, look: impl FnOnce(&vt100::Screen) -> T) -> T {
        look(self.seen.lock().unwrap().parser.screen())
    }

    /// Everything that was ever written, control codes too.
    pub fn written(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap().bytes).into()
    }

    pub fn types(&mut self, keys: &str) {
        let to = &mut self.terminal.as_mut().expect("the terminal is there").keys;
        to.write_all(keys.as_bytes()).and_then(|()| to.flush()).expect("the terminal takes keys");
    }

    pub fn resize(&self, (columns, rows): (u16, u16)) {
        self.seen.lock().unwrap().parser.set_size(positive(rows), positive(columns));
        self.terminal().master.resize(size((columns, rows))).expect("a new size");
    }

    /// Waits until the screen is as `what` says.
    #[track_caller]
    pub fn until(&self, what: &str, is: impl Fn(&vt100::Screen) -> bool) {
        let since = Instant::now();
        while !self.look(&is) {
            assert!(since.elapsed() < PATIENCE, "not {what}:\n{}\n---\n{}", self.screen(), self.tail());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until all of these are on the screen.
    #[track_caller]
    pub fn shows(&self, words: &[&str]) {
        self.until(&format!("shown {words:?}"), |screen| {
            let text = text(screen);
            words.iter().all(|word| text.contains(word))
        });
    }

    /// The exit code, once the program has ended and all it wrote is here.
    #[track_caller]
    pub fn ends(&mut self) -> u32 {
        let since = Instant::now();
        let code = loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                break status.exit_code();
            }
            assert!(since.elapsed() < PATIENCE, "still running:\n{}\n---\n{}", self.screen(), self.tail());
            std::thread::sleep(Duration::from_millis(20));
        };
        let mut had = usize::MAX;
        while had != self.seen.lock().unwrap().bytes.len() {
            had = self.seen.lock().unwrap().bytes.len();
            std::thread::sleep(Duration::from_millis(200));
        }
        code
    }

    /// The terminal goes away, as when its window is closed: nobody holds its other end any more.
    pub fn hang_up(&mut self) {
        let Terminal { master, _slave, keys, gone, reader } = self.terminal.take().expect("a terminal");
        gone.store(true, Ordering::Relaxed);
        reader.join().expect("something is drawn");
        drop((master, _slave, keys));
    }

    /// The terminal is as it was: the normal screen, the cursor shown, no mouse, the modes of before.
    #[track_caller]
    pub fn is_restored(&self) {
        let screen = self.screen();
        let (alternate, hidden) = self.look(|screen| (screen.alternate_screen(), screen.hide_cursor()));
        let mouse = self.look(|screen| screen.mouse_protocol_mode() != vt100::MouseProtocolMode::None);
        assert!(!alternate && !hidden && !mouse, "{alternate} {hidden} {mouse}\n{screen}");
        assert_eq!(format!("{:?}", self.terminal().master.get_termios()), self.modes, "{screen}");
        let written = self.written();
        for word in ["panicked", "RUST_BACKTRACE"] {
            assert!(!written.contains(word), "{screen}\n---\n{}", self.tail());
        }
    }

    /// These were written, on whatever screen.
    #[track_caller]
    pub fn said(&self, words: &[&str]) {
        let written = self.written();
        for word in words {
            assert!(written.contains(word), "`{word}` in\n{}\n---\n{}", self.screen(), self.tail());
        }
    }

    fn tail(&self) -> String {
        // Without what a frame that changes nothing is made of.
        let written = self.written().replace("\x1b[39m\x1b[49m\x1b[59m\x1b[0m\x1b[?25l", "");
        let from = written.char_indices().rev().nth(3000).map_or(0, |(at, _)| at);
        written[from..].escape_debug().to_string()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
