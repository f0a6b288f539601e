//! Where messages go: `tracing` to the terminal and to `logs/trainer.log`, and the reporter beside it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

use super::{Event as Told, LineFormat, Plain, Report, RunInfo, StepMetrics, Summary};
use crate::terminal::Stderr;
use crate::{Error, Result};

/// A log file that keeps what it is told in memory until the run's folder is ready for it, so
/// that a run which fails in setup leaves no file behind.
#[derive(Debug, Clone)]
pub struct LogFile(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    waiting: Vec<u8>,
    file: Option<File>,
}

impl LogFile {
    /// A log at `path`, not opened yet.
    pub fn new(path: &Path) -> Self {
        Self(Arc::new(Mutex::new(Inner { path: path.into(), waiting: Vec::new(), file: None })))
    }

    /// Opens the file (appending) and writes what has been waiting.
    pub fn open(&self) -> Result<()> {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let path = inner.path.clone();
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|e| Error::io(parent, "create", e))?;
        }
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let mut file = file.map_err(|e| Error::io(&path, "write", e))?;
        let waiting = std::mem::take(&mut inner.waiting);
        file.write_all(&waiting).map_err(|e| Error::io(&path, "write", e))?;
        inner.file = Some(file);
        Ok(())
    }
}

impl Write for LogFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut inner.file {
            Some(file) => file.write(bytes),
            None => {
                inner.waiting.extend_from_slice(bytes);
                Ok(bytes.len())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The log file as a listener: opened when the run's folder is ready.
#[derive(Debug)]
pub struct ToFile {
    file: Option<(LogFile, Plain<LogFile>)>,
}

impl ToFile {
    /// Lines of this format from `level` on; without a file, nothing.
    pub fn new(file: Option<LogFile>, format: LineFormat, level: Level) -> Self {
        Self { file: file.map(|file| (file.clone(), Plain::new(file, format).from_level(level))) }
    }
}

impl Report for ToFile {
    fn progress(&mut self, _: &str, _: usize, _: usize) {}

    fn start(&mut self, run: &RunInfo) {
        if let Some((file, plain)) = &mut self.file {
            if let Err(error) = file.open() {
                tracing::warn!("no log file: {error}");
            }
            plain.start(run);
        }
    }

    fn step(&mut self, metrics: &StepMetrics) {
        if let Some((_, plain)) = &mut self.file {
            plain.step(metrics);
        }
    }

    fn event(&mut self, event: &Told) {
        if let Some((_, plain)) = &mut self.file {
            plain.event(event);
        }
    }

    fn finish(&mut self, summary: &Summary) {
        if let Some((_, plain)) = &mut self.file {
            plain.finish(summary);
        }
    }
}

/// The terminal and, if there is one, the log file.
#[derive(Clone)]
struct Tee(Option<LogFile>);

impl Write for Tee {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(file) = &mut self.0 {
            file.write_all(bytes)?;
        }
        Stderr.write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Tee {
    type Writer = Tee;

    fn make_writer(&'a self) -> Tee {
        self.clone()
    }
}

/// Sends `tracing` to the terminal and to `file`. Other crates are heard from `warn` on; not Burn's dashboard, of whose
/// troubles its keeper tells.
pub fn init(level: Level, format: LineFormat, file: Option<LogFile>) {
    let filter = EnvFilter::new(format!("warn,burn_train=off,embertune={level}"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(Tee(file));
    // A second run in one process keeps the first one's subscriber.
    let _ = builder.event_format(Lines(format)).try_init();
}

/// `warning: text key=value`, or a JSON object with the same.
struct Lines(LineFormat);

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let mut fields = Fields(Map::new());
        event.record(&mut fields);
        let level = *event.metadata().level();
        if self.0 == LineFormat::Json {
            fields.0.insert("level".into(), level.as_str().into());
            return writeln!(writer, "{}", Value::Object(fields.0));
        }
        let message = fields.0.remove("message");
        let prefix = match level {
            Level::ERROR => "error: ",
            Level::WARN => "warning: ",
            _ => "",
        };
        write!(writer, "{prefix}{}", message.as_ref().and_then(Value::as_str).unwrap_or_default())?;
        for (key, value) in fields.0 {
            write!(writer, " {key}={value}")?;
        }
        writeln!(writer)
    }
}

struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name().into(), format!("{value:?}").into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_on_disk_until_the_file_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("logs/trainer.log");
        let mut log = LogFile::new(&path);
        log.write_all(b"early\n").unwrap();
        assert!(!path.parent().unwrap().exists());
        log.open().unwrap();
        log.clone().write_all(b"late\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "early\nlate\n");
    }
}
