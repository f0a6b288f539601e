//! The command line: each subcommand loads its configuration and calls the library.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::{CommandFactory, Parser, Subcommand};
use tracing::Level;

use crate::checkpoint::RunFolder;
use crate::config::{self, Difference};
use crate::report::log::{self, LogFile, ToFile};
use crate::report::{Both, Event, LineFormat, Live, Plain, Report};
use crate::terminal::{self, Stderr};
use crate::train::ranks::World;
use crate::{Error, Result, SftLearner, StopFlag};

mod again;
mod bench;
mod check;
mod completions;
mod folders;
mod generate;
mod launch;
mod lint;
mod manual;
mod merge;
mod plot;
mod preview;
mod push;
mod sweep;

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
    /// Train a run for each combination of values, all at once over one base: `sweep @ run.toml --optim.lr 1e-4,3e-4`
    Sweep {
        /// As for `sft`; flags with several numbers (`1e-4,3e-4`) are swept over.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Find out in seconds what `sft` would do: data, sizes, steps, an estimate of memory, what is wrong.
    Check {
        /// As for `sft`; and `--resolved`: the whole configuration first, as `sft` would write it; `--fit`: the largest
        /// micro-batch that fits what is free, or `--memory 80GiB`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Find out how fast `sft` would be: `bench @ run.toml`. Nothing is saved.
    Bench {
        /// As for `sft`; and `--steps N` (10), `--warmup N` (3), `--json FILE`, `--peer COMMAND`: another trainer on the same
        /// step, such as `python3 tools/parity/peer.py`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Look at one row: the text that the chat template makes of it, trained tokens coloured. `preview @ run.toml`
    Preview {
        /// As for `sft`; and `--row N` (from 1), `--ids` for a token a line.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Train with a process for each of several devices of this machine: `launch --ranks 2 -- sft @ run.toml`
    Launch {
        /// How many.
        #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
        ranks: u16,
        /// What each of them does: `sft …`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        args: Vec<String>,
    },
    /// Let a model answer: `generate --model DIR --adapter runs/x "What is a tide?"`; without a prompt, a conversation
    Generate(Box<generate::GenerateArgs>),
    /// Find out whether PEFT, vLLM, SGLang and llama.cpp take an adapter as it is: `lint runs/x/weights/step_200`
    Lint(lint::LintArgs),
    /// Draw the curves of runs: `plot outputs/lora outputs/full --out compare` writes compare.svg and compare.png
    Plot(plot::PlotArgs),
    /// Write the Hugging Face model that base and adapter make together.
    Merge {
        /// The base model: a folder, or a name as in `model.name`.
        #[arg(long, value_name = "MODEL")]
        base: String,
        /// Folder of the PEFT adapter; or of a run, whose newest is taken.
        #[arg(long, value_name = "DIR")]
        adapter: PathBuf,
        /// Folder to write, which must not exist.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// How to store the merged weights: `float32` keeps all that training changed. Default: the base's own.
        #[arg(long, value_parser = ["float32", "float16", "bfloat16"])]
        dtype: Option<String>,
    },
    /// Print what a shell needs to complete commands, flags and every key: `source <(embertune completions bash)`
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page of a command, or write all of them: `man sft | man -l -`
    Man(manual::ManArgs),
    /// Upload an adapter or a model to the Hugging Face hub: `push runs/x --repo me/my-adapter --private`
    Push(push::PushArgs),
}

/// Parses the process's arguments, runs the subcommand, prints what went wrong, and returns the exit code. A usage
/// error ends the process here, with code 2.
pub fn run() -> u8 {
    let mut format = LineFormat::Text;
    let result = match Cli::parse().command {
        Command::Sft { args } if args.iter().any(|a| a == "--help" || a == "-h") => {
            print(&format!("{SFT_USAGE}\n{}", config::help()))
        }
        Command::Sft { args } => {
            format = format_of(&args);
            config::load(&args).and_then(|job| sft(job, &args, &mut format))
        }
        Command::Sweep { args } => sweep::load(&args).and_then(|job| {
            let again = sweep::again(&job);
            sft(job, &again, &mut format)
        }),
        Command::Check { args } => check::check(&args),
        Command::Bench { args } => bench::bench(&args),
        Command::Preview { args } => preview::preview(&args),
        Command::Launch { ranks, args } => match launch::launch(ranks.into(), &args) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Generate(args) => generate::run(&args),
        Command::Lint(args) => lint::run(&args),
        Command::Plot(args) => plot::run(&args),
        Command::Push(args) => push::run(&args),
        Command::Merge { base, adapter, out, dtype } => merge::merge(&base, &adapter, &out, dtype.as_deref()),
        Command::Completions { shell } => print(&completions::script(Cli::command(), shell)),
        Command::Man(args) => manual::run(Cli::command(), &args),
    };
    let Err(error) = result else { return 0 };
    let _ = writeln!(io::stderr(), "{}", describe_error(&error, format));
    error.exit_code()
}

const SFT_USAGE: &str = "\
Fine-tunes a language model on your conversations: LoRA adapters with `[model.lora]`, else all its weights.

  embertune sft                                           a tiny model on embedded data, in a minute
  embertune sft @ run.toml                                what run.toml says
  embertune sft @ base.toml @ lora.toml --optim.lr 1e-4   the second file over the first, flags over both

run.toml, for a start:

  max_steps = 200
  [model]
  name = \"Qwen/Qwen3-0.6B\"     # a Hugging Face folder or hub id
  [model.lora]
  [data]
  name = \"rows.jsonl\"          # `check @ run.toml` says what is in it, `preview @ run.toml` shows a row
  seq_len = 2048
  batch_size = 8
  [ckpt]
  interval = 50

Usage: embertune sft [@ FILE]... [--SECTION.KEY VALUE]...

`--SECTION` alone switches a section on, the value `None` switches it off; `--KEY` and `--no-KEY` set a boolean;
`--SECTION @ FILE` takes a section from a file of its own. Every key, as a flag, with its default:
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

/// How errors are told before the configuration is known.
fn format_of(args: &[String]) -> LineFormat {
    let wanted = |arg: &String| {
        matches!(arg.replace('_', "-").as_str(), "--log.json-logging" | "--log.json-logging=true")
    };
    if args.iter().any(wanted) { LineFormat::Json } else { LineFormat::Text }
}

/// Trains; `args` read the same job again.
fn sft(job: config::Loaded, args: &[String], format: &mut LineFormat) -> Result<()> {
    let config::Loaded { config, runs, differences } = job;
    let level: Level = config.log.level.parse().unwrap_or(Level::INFO);
    *format = if config.log.json_logging { LineFormat::Json } else { LineFormat::Text };
    let format = *format;
    let learner = SftLearner::with_runs(config.clone(), runs)?;
    let file = LogFile::new(&RunFolder::new(&config).log());
    let mut file = config.log.file.then_some(file);
    log::init(level, format, file.clone());

    let stop = stop_on_ctrl_c(format)?;
    let mut live = Live::new(format, level);
    // Of several processes each would draw on one terminal.
    if !config.log.plain && !matches!(World::of(&config)?, World::Processes(_)) {
        let stop = stop.clone();
        live = live.with_dashboard(move || {
            stop.stop();
        });
    }
    let mut report = Both(live, ToFile::new(file.clone(), format, level));
    for line in describe(&differences) {
        report.event(&Event::Note(line));
    }
    let result = learner.fit_with(&mut report, &stop);
    // The terminal is free again.
    drop(report);
    match result {
        Ok(summary) => print_after(&again::next_steps(&again::program(), &config, args, &summary)),
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
            let command = again::command(&again::program(), args, &[]);
            let hint = format!("the newest checkpoint is `{}`; go on with\n  {command}", path.display());
            Error::Interrupted { step, checkpoint: Some(path), hint }
        }
        other => other,
    }
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
            terminal::leave();
            std::process::exit(130);
        }
        let text = "stopping: what is under way is finished and saved first; once more ends at once";
        Plain::new(Stderr, format).event(&Event::Note(text.into()));
    };
    ctrlc::set_handler(handler).map_err(|e| Error::Usage {
        message: format!("cannot listen for Ctrl-C: {e}"),
        hint: String::new(),
    })?;
    Ok(stop)
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
    fn errors_are_json_where_lines_are() {
        let error = Error::io("a.txt", "read", io::Error::other("gone"));
        let line: serde_json::Value =
            serde_json::from_str(&describe_error(&error, LineFormat::Json)).unwrap();
        assert_eq!((&line["message"], &line["causes"][0]), (&"a.txt: cannot read".into(), &"gone".into()));
        assert_eq!(describe_error(&error, LineFormat::Text), "error: a.txt: cannot read\n  caused by: gone");
    }
}
