//! The command on a real pseudo-terminal: the dashboard through a run, and what is shown where there can be none.
#![cfg(all(unix, feature = "flex", feature = "tui"))]

mod common;

#[path = "dashboard/pty.rs"]
mod pty;
#[path = "dashboard/svg.rs"]
mod svg;

use std::path::PathBuf;
use std::time::Duration;

use common::run::RunDir;
use embertune::report::{Event, LineFormat, Live, PhaseTimes, Report, RunInfo, StepMetrics, Summary};
use portable_pty::CommandBuilder;
use pty::Session;
use tracing::Level;

const LARGE: (u16, u16) = (120, 40);
const SMALL: (u16, u16) = (80, 24);

/// Far more steps than a test waits for, held-out loss and samples.
const LONG: [&str; 16] = [
    "--max-steps",
    "1000000",
    "--val.interval",
    "20",
    "--val.data.name",
    "VAL",
    "--val.data.seq-len",
    "64",
    "--sample.prompts",
    "Hello",
    "--sample.interval",
    "20",
    "--sample.max-new-tokens",
    "8",
    "--ckpt.interval",
    "1000000",
];

/// `embertune` in the test's folder.
fn command(dir: &RunDir, args: &[&str]) -> CommandBuilder {
    let mut command = CommandBuilder::new(env!("CARGO_BIN_EXE_embertune"));
    let run = dir.text("run.toml");
    let data = run.lines().filter(|line| line.starts_with("name = ")).nth(1).expect("data are named");
    let data = data.trim_start_matches("name = ").trim_matches('"');
    command.args(args.iter().map(|arg| if *arg == "VAL" { data } else { *arg }));
    command.cwd(dir.path(""));
    command.env("HF_HUB_OFFLINE", "1");
    for name in ["RUST_LOG", "NO_COLOR", "NEVER_CLEAN_OUTPUT_DIR"] {
        command.env_remove(name);
    }
    command
}

fn sft(dir: &RunDir, args: &[&str]) -> CommandBuilder {
    command(dir, &[&["sft", "@", "run.toml"], args].concat())
}

fn long_run(dir: &RunDir, size: (u16, u16)) -> Session {
    Session::start(sft(dir, &LONG), size)
}

/// How a run ends that was asked to stop.
#[track_caller]
fn assert_stopped(dir: &RunDir, session: &mut Session) {
    assert_eq!(session.ends(), 130, "{}", session.screen());
    session.is_restored();
    session.said(&["error: interrupted after step ", "--ckpt.resume-step -1", "optim.lr = "]);
    let resumed = std::fs::read_dir(dir.path("out/checkpoints")).expect("checkpoints").count();
    assert_eq!(resumed, 1, "{}", dir.listing());
    dir.sft(&["--ckpt.resume-step", "-1", "--max-steps", "1"]).succeeds().says(&["nothing to do: "]);
}

#[test]
fn a_run_is_shown_resized_and_quit() {
    let dir = RunDir::new();
    let mut session = long_run(&dir, LARGE);
    session.shows(&[
        "Loss",
        "Train ",
        "Valid ",
        "Speed",
        "tokens/s",
        "Log",
        "Status: epoch ",
        "Training",
        "Progress",
    ]);
    session.shows(&["Sample", ": Hello ➡"]);
    session.shows(&["Learning rate", "Gradient norm", "Memory", "Full History", " left"]);
    session.until("on a screen of its own, without a cursor", |s| s.alternate_screen() && s.hide_cursor());
    let frame = |(columns, rows): (u16, u16)| {
        move |screen: &vt100::Screen| {
            let corner = |row, column| screen.cell(row, column).map(|cell| cell.contents().to_string());
            let corners =
                [corner(0, 0), corner(0, columns - 1), corner(rows - 1, 0), corner(rows - 1, columns - 1)];
            corners == ["┌", "┐", "└", "┘"].map(|c| Some(c.to_string()))
        }
    };
    session.until("framed", frame(LARGE));
    for size in [SMALL, (200, 50), (20, 5), (1, 1), SMALL] {
        session.resize(size);
        std::thread::sleep(Duration::from_millis(300));
    }
    session.until("framed", frame(SMALL));
    session.shows(&["Loss", "Train ", "Valid ", "Status"]);
    // Keys are Burn's: another plot, other types of plots, the question about quitting and back.
    session.types("\x1b[C\x1b[A");
    session.shows(&["Recent History"]);
    session.types("q");
    session.shows(&["Stop the training."]);
    session.types("c");
    session.shows(&["Recent History"]);
    session.types("q");
    session.shows(&["Stop the training."]);
    session.types("s");
    assert_stopped(&dir, &mut session);
}

#[test]
fn the_kill_key_ends_in_a_checkpoint() {
    let dir = RunDir::new();
    let mut session = long_run(&dir, SMALL);
    session.shows(&["Loss", "tokens/s"]);
    session.types("q");
    session.shows(&["Stop the training immediately."]);
    session.types("k");
    assert_stopped(&dir, &mut session);
    session.said(&["stopping: what is under way is finished and saved first"]);
}

#[test]
fn ctrl_c_is_what_it_is_elsewhere_and_other_signals_leave_the_terminal_alone() {
    let dir = RunDir::new();
    let mut session = long_run(&dir, SMALL);
    session.shows(&["Loss", "tokens/s"]);
    // Ctrl-Z and Ctrl-\ are keys without a meaning.
    session.types("\x1a\x1c");
    std::thread::sleep(Duration::from_millis(300));
    session.until("still up", vt100::Screen::alternate_screen);
    session.types("\x03");
    assert_stopped(&dir, &mut session);
}

#[test]
fn the_second_ctrl_c_ends_at_once_and_leaves_the_terminal_as_it_was() {
    let dir = RunDir::new();
    // The first step is what it begins with, and takes seconds.
    let args = [
        "sft",
        "--device",
        "flex",
        "--data.batch-size",
        "512",
        "--no-val.eval-on-start",
        "--output-dir",
        "out",
    ];
    let mut session = Session::start(command(&dir, &args), SMALL);
    session.shows(&["Controls"]);
    session.types("\x03");
    std::thread::sleep(Duration::from_millis(300));
    session.types("\x03");
    assert_eq!(session.ends(), 130, "{}", session.screen());
    session.is_restored();
    assert!(!session.written().contains("interrupted"), "{}", session.screen());
}

#[test]
fn a_terminal_that_goes_away_ends_in_a_checkpoint() {
    let dir = RunDir::new();
    let mut session = long_run(&dir, SMALL);
    session.shows(&["Loss", "tokens/s"]);
    session.hang_up();
    assert_eq!(session.ends(), 130);
    assert!(
        dir.path("out/checkpoints").read_dir().is_ok_and(|mut found| found.next().is_some()),
        "{}",
        dir.listing()
    );
}

#[test]
fn the_end_is_that_of_a_run_without_dashboard() {
    let dir = RunDir::new();
    let mut session = Session::start(sft(&dir, &["--max-steps", "40"]), LARGE);
    assert_eq!(session.ends(), 0, "{}", session.screen());
    session.is_restored();
    session.said(&["\x1b[?1049h"]);
    let screen = session.screen();
    for line in
        ["Training up to step 40", "Done: 40 steps", "Adapter: out/weights/step_40", "embertune merge"]
    {
        assert!(screen.contains(line), "`{line}` in\n{screen}");
    }
    assert!(!screen.contains("Step 3 "), "{screen}");
    // The log has what the dashboard showed.
    assert!(dir.text("out/logs/trainer.log").contains("Step 3 | "));
}

#[test]
fn an_error_in_the_middle_is_read_on_a_clean_screen() {
    let dir = RunDir::new();
    let args = ["--optim.lr", "1e30", "--optim.max-norm", "None", "--max-steps", "300"];
    let mut session = Session::start(sft(&dir, &args), LARGE);
    assert_eq!(session.ends(), 1, "{}", session.screen());
    session.is_restored();
    let screen = session.screen();
    assert_eq!(screen.matches("is skipped: ").count(), 3, "warnings are not lost:\n{screen}");
    assert!(screen.contains("error: step ") && screen.contains("hint: "), "{screen}");
}

#[test]
fn without_a_terminal_that_can_there_are_lines() {
    let lines = |args: &[&str], size, term: Option<&str>| {
        let dir = RunDir::new();
        let mut command = sft(&dir, args);
        if let Some(term) = term {
            command.env("TERM", term);
        }
        let mut session = Session::start(command, size);
        assert_eq!(session.ends(), 0, "{}", session.screen());
        session.is_restored();
        session.said(&["Step 2 | Time: ", "Done: 2 steps", "Adapter: "]);
        let written = session.written();
        assert!(!written.contains("\x1b[?1049h"), "{written:?}");
        written
    };
    let written = lines(&["--log.plain"], LARGE, None);
    for bar in ["loading weights ", "reading rows", "saving the checkpoint "] {
        assert!(written.contains(bar), "a bar of `{bar}`: {written:?}");
    }
    lines(&["--log.json-logging", "--no-log.json-logging", "--log.plain"], LARGE, None);
    for (size, term) in [(LARGE, Some("dumb")), (LARGE, Some("")), ((0, 0), None), ((19, 5), None)] {
        let written = lines(&[], size, term);
        assert!(!written.contains('\x1b'), "control codes at {size:?} with {term:?}: {written:?}");
    }
    lines(&[], (40, 10), None);
}

#[test]
fn in_the_background_there_are_lines() {
    let dir = RunDir::new();
    let mut shell = CommandBuilder::new("sh");
    let program = env!("CARGO_BIN_EXE_embertune");
    shell.args(["-c", &format!("set -m; {program} sft @ run.toml & wait $!")]);
    shell.cwd(dir.path(""));
    let mut session = Session::start(shell, LARGE);
    assert_eq!(session.ends(), 0, "{}", session.screen());
    session.said(&["Step 2 | Time: ", "Done: 2 steps"]);
    assert!(!session.written().contains("\x1b[?1049h"), "{}", session.screen());
}

#[test]
fn no_color_means_none() {
    let dir = RunDir::new();
    let mut command = sft(&dir, &LONG);
    command.env("NO_COLOR", "1");
    let mut session = Session::start(command, LARGE);
    session.shows(&["Loss", "tokens/s", "Valid "]);
    session.look(|screen| {
        for (row, column) in (0..LARGE.1).flat_map(|row| (0..LARGE.0).map(move |column| (row, column))) {
            let cell = screen.cell(row, column).expect("a cell");
            let plain = cell.fgcolor() == vt100::Color::Default && cell.bgcolor() == vt100::Color::Default;
            assert!(plain, "{:?} at {row}, {column}", cell.contents());
        }
    });
    session.types("\x03");
    assert_stopped(&dir, &mut session);
}

/// A server of tmux of the test's own, which goes with it.
struct Tmux(String);

impl Tmux {
    /// `None`, said so, where there is no tmux.
    fn new() -> Option<Self> {
        let there = std::process::Command::new("tmux").arg("-V").output().is_ok_and(|o| o.status.success());
        if !there {
            eprintln!("skipped: no tmux here");
        }
        there.then(|| Self(format!("embertune-test-{}", std::process::id())))
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        let _ = std::process::Command::new("tmux").args(["-L", &self.0, "kill-server"]).output();
    }
}

#[test]
fn tmux_shows_it_too_and_its_window_is_as_before() {
    let Some(tmux) = Tmux::new() else { return };
    let dir = RunDir::new();
    let run = sft(&dir, &LONG);
    let run = run.get_argv().iter().map(|arg| format!("'{}'", arg.to_string_lossy())).collect::<Vec<_>>();
    dir.write(
        "in_tmux.sh",
        &format!(
            "stty -g > before\n{}\ncode=$?\nstty -g > after\necho \"ended with $code\"\ncat\n",
            run.join(" ")
        ),
    );
    let mut command = CommandBuilder::new("tmux");
    command.args(["-L", &tmux.0, "-u", "-f", "/dev/null", "new-session", "sh in_tmux.sh"]);
    command.cwd(dir.path(""));
    command.env("HF_HUB_OFFLINE", "1");
    for name in ["TMUX", "NO_COLOR"] {
        command.env_remove(name);
    }
    let mut session = Session::start(command, LARGE);
    session.shows(&["Loss", "Train ", "Valid ", "tokens/s", "Full History"]);
    session.resize((100, 30));
    session.until("narrower", |screen| {
        pty::text(screen).contains("tokens/s")
            && screen.cell(0, 99).is_some_and(|cell| cell.contents() == "┐")
    });
    session.types("q");
    session.shows(&["Stop the training."]);
    session.types("s");
    // On tmux's screen from before.
    session.shows(&["error: interrupted after step ", "ended with 130"]);
    session.until("without the dashboard", |screen| !screen.contents().contains("Full History"));
    assert_eq!(dir.text("before"), dir.text("after"));
}

#[test]
fn several_runs_are_several_series() {
    let dir = RunDir::new();
    dir.write(
        "runs.toml",
        "[[runs]]\nname = \"low\"\noptim.lr = 1e-3\n[[runs]]\nname = \"high\"\noptim.lr = 1e-2\n",
    );
    let mut session = Session::start(sft(&dir, &[&["@", "runs.toml"][..], &LONG].concat()), (200, 60));
    session.shows(&["low Test ", "high Test ", "Loss · low", "Loss · high", "Test - low", "Test - high"]);
    session.types("\x03");
    assert_eq!(session.ends(), 130, "{}", session.screen());
    session.is_restored();
    for run in ["low", "high"] {
        assert!(dir.path(&format!("out/runs/{run}/checkpoints")).exists(), "{}", dir.listing());
    }
}

// ---- the reporter by itself: screens that are the same each time ----

/// What a run of `child` is told by its environment.
const PART: &str = "EMBERTUNE_TEST_DASHBOARD";

fn metrics(run: Option<&str>, step: usize) -> StepMetrics {
    StepMetrics {
        run: run.map(String::from),
        step,
        loss: 3.0 - 0.01 * step as f64 + if run == Some("high") { 0.5 } else { 0.0 },
        grad_norm: 1.25,
        lr: 5e-4,
        tokens: 4096,
        ranks: 1,
        trained_tokens: 2048,
        mfu: Some(41.5),
        device_bytes: Some(3 << 30),
        time: PhaseTimes { forward_backward: 0.5, ..PhaseTimes::default() },
        ..StepMetrics::default()
    }
}

/// Not a test: a process that reports a run that isn't there, for those below.
#[test]
#[ignore = "a child of other tests"]
fn child() {
    let part = std::env::var(PART).expect("told what to do");
    let mut live = Live::new(LineFormat::Text, Level::INFO).with_dashboard(|| {});
    let steps_per_epoch = (part != "runs").then_some(40.0);
    let max_steps = Some(100);
    let runs = if part == "runs" { vec!["low".to_string(), "high".to_string()] } else { Vec::new() };
    let (samples, output_dir) = (part == "alone", "out".into());
    live.start(&RunInfo { max_steps, steps_per_epoch, runs, samples, output_dir, ..RunInfo::default() });
    for step in 1..=50 {
        match part.as_str() {
            "runs" => ["low", "high"].iter().for_each(|run| live.step(&metrics(Some(run), step))),
            _ => live.step(&metrics(None, step)),
        }
        if step % 25 == 0 {
            let (run, seconds) = ((part == "runs").then(|| "high".to_string()), 0.5);
            live.event(&Event::Validation { run, step, loss: 2.5, seconds });
        }
    }
    live.event(&Event::Warning("something is odd".into()));
    let path = PathBuf::from("out/checkpoints/step_50");
    live.event(&Event::Saved { what: "checkpoint", path, seconds: 0.25 });
    if part == "alone" {
        let (prompt, text) = ("What is a tide?".into(), "The sea,\ncoming and \x1b[2Jgoing.".into());
        live.event(&Event::Sample { run: None, step: 50, prompt, text });
    }
    if part == "panic" {
        std::thread::sleep(Duration::from_millis(500));
        panic!("a bug in the middle");
    }
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a key");
    live.finish(&Summary::default());
}

fn child_session(part: &str, size: (u16, u16)) -> Session {
    let mut command = CommandBuilder::new(std::env::current_exe().expect("this test program"));
    command.args(["--exact", "child", "--ignored", "--nocapture", "--test-threads=1"]);
    command.env(PART, part);
    command.env_remove("NO_COLOR");
    Session::start(command, size)
}

/// Without what depends on how fast the machine is: seconds that are left.
fn steady(screen: &str) -> String {
    let mut text = screen.to_string() + "\n";
    for word in ["s left", "s of the epoch"] {
        let Some(at) = text.find(word) else { continue };
        let digits = text[..at].chars().rev().take_while(char::is_ascii_digit).count();
        text.replace_range(at - digits..at, "0");
    }
    text
}

/// Compares with `tests/dashboard/NAME.txt`; `EMBERTUNE_BLESS=1` writes that anew.
#[track_caller]
fn assert_screen(session: &Session, name: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/dashboard/{name}.txt"));
    if std::env::var_os("EMBERTUNE_BLESS").is_some() {
        std::thread::sleep(Duration::from_secs(2));
        std::fs::write(&path, steady(&session.screen())).expect("the file can be written");
    }
    let wanted = std::fs::read_to_string(&path).expect("the screen is kept");
    session.until(&format!("as tests/dashboard/{name}.txt:\n{wanted}\n but"), |screen| {
        steady(&pty::text(screen)) == wanted
    });
}

#[test]
fn screens_are_as_they_were() {
    for (part, name, size) in
        [("alone", "alone-120x40", LARGE), ("alone", "alone-80x24", SMALL), ("runs", "runs-120x40", LARGE)]
    {
        let session = child_session(part, size);
        assert_screen(&session, name);
    }
}

#[test]
fn a_panic_is_read_on_a_clean_screen() {
    let mut session = child_session("panic", SMALL);
    session.shows(&["Controls"]);
    assert_ne!(session.ends(), 0);
    let (alternate, hidden) = session.look(|screen| (screen.alternate_screen(), screen.hide_cursor()));
    assert!(!alternate && !hidden, "{}", session.screen());
    assert!(session.screen().contains("a bug in the middle"), "{}", session.screen());
    assert!(session.screen().contains("warning: something is odd"), "{}", session.screen());
}

#[test]
#[ignore = "writes docs/dashboard.svg from a run of the embedded model"]
fn picture() {
    let dir = RunDir::new();
    let system = "Reverse the text character-by-character. Put your answer in <reversed_text> tags.";
    let args = "sft --device flex --output-dir out --ckpt.interval 40 --val.interval 10 --sample.interval 20";
    let args: Vec<_> = args.split(' ').chain(["--sample.prompts", "green and white;"]).collect();
    let args = [&args[..], &["--sample.system", system, "--sample.max-new-tokens", "40"]].concat();
    let session = Session::start(command(&dir, &args), LARGE);
    session.until("in the middle", |screen| {
        let text = pty::text(screen);
        let at = text.split("Status: epoch ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok());
        at.is_some_and(|epoch: f64| epoch > 1.6)
    });
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("docs/dashboard.svg");
    std::fs::write(path, session.look(svg::picture)).expect("the file can be written");
}
