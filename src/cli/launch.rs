//! `embertune launch`: the ranks of one machine, a process each, without torchrun, srun or mpirun.

use std::fs;
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use crate::config::{self, DeviceKind, DeviceSpec};
use crate::{Error, Result, device};

/// Ranks that don't end by themselves after one has failed are ended after so long.
const GRACE: Duration = Duration::from_secs(30);

/// Starts `ranks` times `embertune` with `args` (`sft …`), waits for them, and returns the exit code of the first that
/// failed, or 0.
///
/// # Errors
/// Arguments that aren't `sft …`, what the device needs and isn't there, and a rank that is killed.
pub(super) fn launch(ranks: usize, args: &[String]) -> Result<u8> {
    let Some(("sft", keys)) = args.split_first().map(|(first, rest)| (first.as_str(), rest)) else {
        return Err(usage("`launch` starts `sft`", "write `embertune launch --ranks 2 -- sft @ run.toml`"));
    };
    let config = config::load(keys)?.config;
    let spec = DeviceSpec::parse(&config.device).map_err(|problem| Error::Config(vec![problem]))?;
    let mut started = match device::kind(&spec) {
        DeviceKind::Cuda => cards(ranks, args)?,
        _ => vec![by_mpi(ranks, args)?],
    };
    forward_signals(&started)?;
    wait(&mut started)
}

fn usage(message: impl Into<String>, hint: impl Into<String>) -> Error {
    Error::Usage { message: message.into(), hint: hint.into() }
}

/// This program, in a process group of its own: a Ctrl-C on the terminal reaches the launcher alone, which passes it
/// on once.
fn own(program: impl AsRef<std::ffi::OsStr>) -> Command {
    #[cfg_attr(not(unix), expect(unused_mut))]
    let mut command = Command::new(program);
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    command
}

fn this_program() -> Result<std::path::PathBuf> {
    std::env::current_exe().map_err(|e| Error::io("this program", "find", e))
}

/// A process a card, told by torchrun's variables where to meet.
fn cards(ranks: usize, args: &[String]) -> Result<Vec<Child>> {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = free.map_err(|e| Error::io("127.0.0.1", "find a free port at", e))?.port();
    let mut started: Vec<Child> = Vec::new();
    for rank in 0..ranks {
        let mut command = own(this_program()?);
        command.args(args).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        for (name, value) in [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks)] {
            command.env(name, value.to_string());
        }
        match command.spawn() {
            Ok(child) => started.push(child),
            Err(e) => {
                started.iter_mut().for_each(|child| drop(child.kill()));
                return Err(Error::io(format!("rank {rank}"), "start", e));
            }
        }
    }
    Ok(started)
}

/// mpirun with all ranks.
fn by_mpi(ranks: usize, args: &[String]) -> Result<Child> {
    if !cfg!(feature = "mpi") {
        return Err(Error::device(
            "ranks on devices other than CUDA are processes under MPI, which this build doesn't have",
            "build with `--features mpi`; or use several devices in one process, e.g. `--device flex:0,1`",
        ));
    }
    let mut command = own("mpirun");
    // In a container everybody is root. Each rank may use all cores.
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.args(["-n", &ranks.to_string(), "--oversubscribe", "--bind-to", "none"]);
    command.arg(this_program()?).args(args);
    command.spawn().map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::device(
            "`mpirun` isn't there",
            "install Open MPI (`apt install openmpi-bin libopenmpi-dev`)",
        ),
        _ => Error::io("mpirun", "start", e),
    })
}

/// A signal to the launcher goes to every rank: not to mpirun, which would kill them in the middle of a save.
fn forward_signals(started: &[Child]) -> Result<()> {
    let processes: Vec<u32> = started.iter().map(Child::id).collect();
    let handler = move || {
        for &process in &processes {
            let below = children(process);
            let ranks = if below.is_empty() { vec![process] } else { below };
            let _ = Command::new("kill").arg("-TERM").args(ranks.iter().map(u32::to_string)).status();
        }
    };
    ctrlc::set_handler(handler).map_err(|e| usage(format!("cannot listen for Ctrl-C: {e}"), ""))
}

/// The processes that a process has started, as Linux lists them.
fn children(process: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().filter_map(|id| id.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// Until all have ended.
fn wait(started: &mut [Child]) -> Result<u8> {
    let mut failed: Option<(usize, ExitStatus, Instant)> = None;
    let ranks = started.len();
    let mut running: Vec<(usize, &mut Child)> = started.iter_mut().enumerate().collect();
    while !running.is_empty() {
        running.retain_mut(|(rank, child)| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                if !status.success() {
                    failed.get_or_insert((*rank, status, Instant::now()));
                }
                false
            }
            Err(_) => false,
        });
        if failed.as_ref().is_some_and(|(_, _, since)| since.elapsed() > GRACE) {
            running.iter_mut().for_each(|(_, child)| drop(child.kill()));
        }
        thread::sleep(Duration::from_millis(50));
    }
    let Some((rank, status, _)) = failed else { return Ok(0) };
    // What went wrong was said by the rank itself, if it could.
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(code) => Ok(code),
        None => Err(Error::train(
            format!("rank {rank} of {ranks} ended: {status}"),
            "was it out of memory? `dmesg` and the logs in `logs/` may say more",
        )),
    }
}
