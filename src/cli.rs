//! The command line: each subcommand loads its configuration and calls the library.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use burn::tensor::DType;
use clap::{Parser, Subcommand};
use tracing::Level;

use crate::checkpoint::RunFolder;
use crate::config::{self, Difference, SftConfig};
use crate::report::log::{self, LogFile};
use crate::report::{Both, Event, LineFormat, Plain, Report, RunInfo, StepMetrics};
use crate::{Error, Result, SftLearner, StopFlag, Summary, export, hub, train};

mod again;
mod bench;
mod preview;

/// Supervised fine-tuning of Qwen3-class language models, with LoRA or in full.
#[derive(Debug, Parser)]
#[command(name = "embertune", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Fine-tune: `sft @ run.toml @ more.toml --optim.lr 1e-4`; without arguments, a tiny model on embedded
    /// data. `sft --help` lists every key.
    #[command(disable_help_flag = true)]
    Sft {
        /// `@ FILE` and `--section.key VALUE`, as often as needed; later ones win.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Find out in seconds what `sft` would do: data, sizes, steps, an estimate of memory, what is wrong.
    Check {
        /// As for `sft`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Find out how fast `sft` would be: `bench @ run.toml`. Nothing is saved.
    Bench {
        /// As for `sft`; and `--steps N` (10), `--warmup N` (3), `--json FILE`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Look at one row: the text that the chat template makes of it, trained tokens coloured. `preview @ run.toml`
    Preview {
        /// As for `sft`; and `--row N` (from 1), `--ids` for a token a line.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Write the Hugging Face model that base and adapter make together.
    Merge {
        /// The base model: a folder, or a name as in `model.name`.
        #[arg(long, value_name = "MODEL")]
        base: String,
        /// Folder of the PEFT adapter, or a run's `weights/step_N`.
        #[arg(long, value_name = "DIR")]
        adapter: PathBuf,
        /// Folder to write, which must not exist.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// How to store the merged weights: `float32` keeps all that training changed. Default: the base's own.
        #[arg(long, value_parser = ["float32", "float16", "bfloat16"])]
        dtype: Option<String>,
    },
}

/// Parses the process's arguments, runs the subcommand, prints what went wrong, and returns the exit code. A usage
/// error ends the process here, with code 2.
pub fn run() -> u8 {
    let mut format = LineFormat::Text;
    let result = match Cli::parse().command {
        Command::Sft { args } if args.iter().any(|a| a == "--help" || a == "-h") => {
            print(&format!("{SFT_USAGE}\n{}", config::reference()))
        }
        Command::Sft { args } => sft(&args, &mut format),
        Command::Check { args } => check(&args),
        Command::Bench { args } => bench::bench(&args),
        Command::Preview { args } => preview::preview(&args),
        Command::Merge { base, adapter, out, dtype } => merge(&base, &adapter, &out, dtype.as_deref()),
    };
    let Err(error) = result else { return 0 };
    let _ = writeln!(io::stderr(), "{}", describe_error(&error, format));
    error.exit_code()
}

const SFT_USAGE: &str = "\
Usage: embertune sft [@ FILE]... [--SECTION.KEY VALUE]...

Files merge from left to right, flags win over files. `--SECTION` alone switches a section on, the value \
`None` switches it off, `--KEY` and `--no-KEY` set a boolean.
";

/// An error with its causes and its hint: lines, or one JSON object.
fn describe_error(error: &Error, format: LineFormat) -> String {
    let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    let causes: Vec<String> = causes.map(ToString::to_string).collect();
    if format == LineFormat::Json {
        let line = serde_json::json!({
            "level": "ERROR", "message": error.to_string(), "causes": causes, "hint": error.hint(),
        });
        return line.to_string();
    }
    let mut text = format!("error: {error}");
    causes.iter().for_each(|cause| text += &format!("\n  caused by: {cause}"));
    error.hint().into_iter().for_each(|hint| text += &format!("\nhint: {hint}"));
    text
}

/// Prints a result. Whoever listens may have left.
fn print(text: &str) -> Result<()> {
    match writeln!(io::stdout(), "{}", text.trim_end()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(Error::io("standard output", "write", e)),
        _ => Ok(()),
    }
}

/// Prints what comes after the work: that it can't be printed doesn't undo the work.
fn print_after(text: &str) {
    if text.is_empty() {
        return;
    }
    if let Err(error) = print(text) {
        tracing::warn!("{error}");
    }
}

fn sft(args: &[String], format: &mut LineFormat) -> Result<()> {
    let config::Loaded { config, differences } = config::load(args)?;
    let level: Level = config.log.level.parse().unwrap_or(Level::INFO);
    *format = if config.log.json_logging { LineFormat::Json } else { LineFormat::Text };
    let format = *format;
    let learner = SftLearner::new(config.clone())?;
    let file = LogFile::new(&RunFolder::new(&config).log());
    let mut file = config.log.file.then_some(file);
    log::init(level, format, file.clone());

    let terminal = Plain::new(io::stderr(), format).from_level(level);
    let mut report = Both(terminal, ToFile::new(file.clone(), format, level));
    for line in describe(&differences) {
        report.event(&Event::Note(line));
    }
    let stop = stop_on_ctrl_c(format)?;
    match learner.fit_with(&mut report, &stop) {
        Ok(summary) => print_after(&next_steps(&config, args, &summary)),
        Err(error) => {
            let error = with_command(error, args);
            if let Some(file) = &mut file {
                let _ = writeln!(file, "{}", describe_error(&error, format));
            }
            return Err(error);
        }
    }
    Ok(())
}

/// An interruption's hint, with the command that goes on.
fn with_command(error: Error, args: &[String]) -> Error {
    match error {
        Error::Interrupted { step, checkpoint: Some(path), .. } => {
            let command = again::command(args, &[]);
            let hint = format!("the newest checkpoint is `{}`; go on with\n  {command}", path.display());
            Error::Interrupted { step, checkpoint: Some(path), hint }
        }
        other => other,
    }
}

fn check(args: &[String]) -> Result<()> {
    let config::Loaded { config, differences } = config::load(args)?;
    let checked = train::check::check(&config)?;
    print(&format!("{}\n{checked}", describe(&differences).join("\n")))
}

/// `key = value (default)` for each key that isn't at its default.
fn describe(differences: &[Difference]) -> Vec<String> {
    if differences.is_empty() {
        return vec!["Configuration: the defaults".into()];
    }
    let lines = differences.iter().map(|d| format!("  {} = {} (default {})", d.key, d.value, d.default));
    std::iter::once("Configuration, where it differs from the defaults:".to_string()).chain(lines).collect()
}

/// The first Ctrl-C (or SIGTERM, as schedulers send it) finishes the step at hand and saves; the second ends the
/// process at once.
fn stop_on_ctrl_c(format: LineFormat) -> Result<StopFlag> {
    let stop = StopFlag::default();
    let flag = stop.clone();
    let handler = move || {
        if flag.stop() {
            std::process::exit(130);
        }
        let text = "stopping: what is under way is finished and saved first; once more ends at once";
        Plain::new(io::stderr(), format).event(&Event::Note(text.into()));
    };
    ctrlc::set_handler(handler).map_err(|e| Error::Usage {
        message: format!("cannot listen for Ctrl-C: {e}"),
        hint: String::new(),
    })?;
    Ok(stop)
}

/// What to do with the result.
fn next_steps(config: &SftConfig, args: &[String], summary: &Summary) -> String {
    let mut text = String::new();
    if let Some(adapter) = &summary.adapter {
        let merged = config.output_dir.join("merged");
        text += &format!(
            "Adapter: {}\nMerge it into the base model:\n  embertune merge --base {} --adapter {} --out {}\n",
            adapter.display(),
            quoted(&summary.base),
            quoted(adapter),
            quoted(&merged)
        );
    }
    if let Some(weights) = &summary.weights {
        text += &format!("Weights: {}\n", weights.display());
    }
    if summary.checkpoint.is_some() {
        let ends = [
            ("max-steps", config.max_steps.map(|_| 2 * summary.steps)),
            ("num-epochs", config.num_epochs.map(|n| 2 * n)),
        ];
        let ends = ends.into_iter().filter_map(|(key, end)| Some((key, end?)));
        text += &format!("Go on training:\n  {}\n", again::command(args, &ends.collect::<Vec<_>>()));
    }
    text
}

/// A path as a shell takes it.
fn quoted(path: &Path) -> String {
    again::quoted(&path.display().to_string())
}

fn merge(base: &str, adapter: &Path, out: &Path, dtype: Option<&str>) -> Result<()> {
    log::init(Level::INFO, LineFormat::Text, None);
    let taken = std::fs::read_dir(out).map(|mut entries| entries.next().is_some()).unwrap_or(out.exists());
    if taken {
        let hint = "name another folder with `--out`, or delete this one";
        return Err(Error::model(out, "`--out` is there already, and nothing is overwritten", hint));
    }
    let base = hub::model_dir(base).map_err(about_base)?;
    // `weights/step_N` of a run holds the adapter in a folder of its own.
    let inner = adapter.join("lora_adapters");
    let has_config = |dir: &Path| dir.join("adapter_config.json").exists();
    let adapter = if !has_config(adapter) && has_config(&inner) { &inner } else { adapter };
    let dtype = dtype.map(|name| match name {
        "float32" => DType::F32,
        "float16" => DType::F16,
        _ => DType::BF16,
    });
    let report = export::merge_as(&base, adapter, out, dtype)?;
    for warning in &report.warnings {
        tracing::warn!("{warning}");
    }
    let (change, name) = &report.largest_change;
    print_after(&format!(
        "Merged: {}\n{} weights changed, by {change:.3e} at most (in `{name}`); rounding to the base's type \
         costs {:.3e} at most",
        out.display(),
        report.changed,
        report.largest_rounding
    ));
    Ok(())
}

/// The base of a merge is named by a flag, not by a key.
fn about_base(error: Error) -> Error {
    let named = |message: String| message.replace("`model.name`", "`--base`");
    match error {
        Error::Hub { message, hint } => Error::Hub { message: named(message), hint },
        Error::Model { path, message, hint } => Error::Model { path, message: named(message), hint },
        other => other,
    }
}

/// The log file as a listener: opened when the run's folder is ready.
struct ToFile {
    file: Option<(LogFile, Plain<LogFile>)>,
}

impl ToFile {
    fn new(file: Option<LogFile>, format: LineFormat, level: Level) -> Self {
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

    fn event(&mut self, event: &Event) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_after_sft_are_left_alone() {
        let words = ["embertune", "sft", "@", "a.toml", "--optim.lr", "1e-4", "--ckpt", "--model.name", "-x"];
        let Command::Sft { args } = Cli::try_parse_from(words).unwrap().command else { panic!("not sft") };
        assert_eq!(args, words[2..]);
        let Command::Sft { args } = Cli::try_parse_from(["embertune", "sft", "--help"]).unwrap().command
        else {
            panic!("not sft")
        };
        assert_eq!(args, ["--help"]);
    }

    #[test]
    fn next_steps_can_be_pasted() {
        let summary = Summary {
            steps: 10,
            adapter: Some("out put/weights/step_10/lora_adapters".into()),
            checkpoint: Some("out put/checkpoints/step_10".into()),
            base: "base".into(),
            ..Summary::default()
        };
        let config = SftConfig { output_dir: "out put".into(), max_steps: Some(10), ..SftConfig::default() };
        let text = next_steps(&config, &["@".into(), "it's.toml".into()], &summary);
        assert!(
            text.contains("merge --base base --adapter 'out put/weights/step_10/lora_adapters'"),
            "{text}"
        );
        assert!(text.contains(r"sft @ 'it'\''s.toml' --ckpt.resume-step -1 --max-steps 20"), "{text}");
        let epochs = SftConfig { max_steps: None, num_epochs: Some(3), ..config };
        let text = next_steps(&epochs, &[], &summary);
        assert!(text.contains("sft --ckpt.resume-step -1 --num-epochs 6\n"), "{text}");
    }

    #[test]
    fn errors_are_json_where_lines_are() {
        let error = Error::io("a.txt", "read", io::Error::other("gone"));
        let line: serde_json::Value =
            serde_json::from_str(&describe_error(&error, LineFormat::Json)).unwrap();
        assert_eq!((&line["message"], &line["causes"][0]), (&"a.txt: cannot read".into(), &"gone".into()));
        assert_eq!(describe_error(&error, LineFormat::Text), "error: a.txt: cannot read\n  caused by: gone");
    }
}
