//! A command that is told each row: it gets them as JSON, one a line, on its standard input, which ends with the run.
//! What it says goes to `logs/monitor.log`.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::process::{self, Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Rows that wait for a command that is slow; beyond them it misses some.
const WAITING: usize = 10_000;
/// How long the command may take, after the last row, until the run ends without it.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Command {
    /// `None` once it is over.
    rows: Option<SyncSender<Value>>,
    child: Child,
    /// It missed rows, and that was told.
    behind: bool,
}

impl Command {
    /// Starts it in the folder that the run was started in. `EMBERTUNE_OUTPUT_DIR` tells it the run's folder.
    pub fn start(words: &[String], root: &Path) -> io::Result<Self> {
        let logs = root.join("logs");
        fs::create_dir_all(&logs)?;
        let log = OpenOptions::new().create(true).append(true).open(logs.join("monitor.log"))?;
        let mut command = process::Command::new(&words[0]);
        command.args(&words[1..]).env("EMBERTUNE_OUTPUT_DIR", fs::canonicalize(root)?);
        command.stdin(Stdio::piped()).stdout(log.try_clone()?).stderr(log);
        // Ctrl-C is the run's: the command ends when its input does.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command
            .spawn()
            .map_err(|e| io::Error::new(e.kind(), format!("cannot start `{}`: {e}", words[0])))?;
        let input = child.stdin.take().expect("its input is a pipe");
        let (rows, received) = sync_channel(WAITING);
        std::thread::spawn(move || write(input, &received));
        Ok(Self { rows: Some(rows), child, behind: false })
    }

    /// Hands over a row; never waits.
    pub fn send(&mut self, row: Value) {
        let Some(rows) = &self.rows else { return };
        match rows.try_send(row) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                if !std::mem::replace(&mut self.behind, true) {
                    tracing::warn!("`monitors.command` is {WAITING} rows behind: it misses some");
                }
            }
            // The writer has said why.
            Err(TrySendError::Disconnected(_)) => self.rows = None,
        }
    }
}

fn write(mut input: ChildStdin, rows: &Receiver<Value>) {
    for row in rows {
        if let Err(error) = input.write_all(format!("{row}\n").as_bytes()) {
            tracing::warn!("`monitors.command` takes no more rows ({error}); `logs/monitor.log` may say why");
            return;
        }
    }
}

impl Drop for Command {
    /// Ends its input and waits for it, for a while.
    fn drop(&mut self) {
        self.rows = None;
        let clock = Instant::now();
        let mut told = false;
        loop {
            if clock.elapsed() > Duration::from_secs(2) && !std::mem::replace(&mut told, true) {
                tracing::info!("waiting for `monitors.command`, for {} s at most", PATIENCE.as_secs());
            }
            match self.child.try_wait() {
                Ok(Some(status)) if status.success() => return,
                Ok(Some(status)) => {
                    return tracing::warn!("`monitors.command` failed ({status}); see `logs/monitor.log`");
                }
                Ok(None) if clock.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(20)),
                _ => return tracing::warn!("`monitors.command` is still at work; the run ends without it"),
            }
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use serde_json::json;

    use super::*;

    fn start(script: &str, root: &Path) -> Command {
        Command::start(&["sh".into(), "-c".into(), script.into()], root).unwrap()
    }

    #[test]
    fn it_gets_every_row_and_its_words_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = start("echo in $EMBERTUNE_OUTPUT_DIR; cat", folder.path());
        for step in 1..=500 {
            command.send(json!({ "step": step, "text": "a\nb" }));
        }
        drop(command);
        let log = fs::read_to_string(folder.path().join("logs/monitor.log")).unwrap();
        let lines: Vec<&str> = log.lines().collect();
        assert_eq!(lines.len(), 501);
        assert_eq!(lines[0], format!("in {}", fs::canonicalize(folder.path()).unwrap().display()));
        assert_eq!(lines[500], "{\"step\":500,\"text\":\"a\\nb\"}");
    }

    #[test]
    fn one_that_dies_or_does_not_read_is_no_trouble() {
        let folder = tempfile::tempdir().unwrap();
        let clock = Instant::now();
        for script in ["exit 3", "exec sleep 0.3"] {
            let mut command = start(script, folder.path());
            for step in 0..20_000 {
                command.send(json!({ "step": step, "loss/mean": 1.2345678 }));
            }
        }
        assert!(clock.elapsed() < Duration::from_secs(20), "{:?}", clock.elapsed());
        let missing = Command::start(&["no-such-program".into()], folder.path()).unwrap_err().to_string();
        assert!(missing.contains("cannot start `no-such-program`"), "{missing}");
    }
}
