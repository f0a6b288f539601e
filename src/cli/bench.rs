//! `embertune bench`: how fast a configuration trains on this machine.

use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;

use tracing::Level;

use super::print;
use crate::config;
use crate::report::{LineFormat, Plain, gib, log};
use crate::train::bench::{Amount, Bench, bench as measure};
use crate::{Error, Result};

/// What is measured, and where it goes.
#[derive(Debug, Clone, PartialEq)]
struct Options {
    amount: Amount,
    json: Option<PathBuf>,
    peer: Option<String>,
}

pub(super) fn bench(args: &[String]) -> Result<()> {
    let (options, args) = Options::take(args)?;
    let config = config::load(&args)?.config;
    log::init(Level::INFO, LineFormat::Text, None);
    let found = {
        let report = &mut Plain::new(io::stderr(), LineFormat::Text);
        measure(&config, options.amount, options.peer.as_deref(), report)?
    };
    if let Some(path) = &options.json {
        let text = format!("{:#}\n", found.to_json());
        std::fs::write(path, text).map_err(|e| Error::io(path, "write", e))?;
    }
    print(&describe(&found))
}

impl Options {
    /// Takes `--steps N`, `--warmup N`, `--json FILE` and `--peer COMMAND` out of the arguments; the others are the configuration's.
    fn take(args: &[String]) -> Result<(Self, Vec<String>)> {
        let mut options = Options { amount: Amount { warmup: 3, steps: 10 }, json: None, peer: None };
        let mut rest = Vec::new();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let (name, value) = arg.split_once('=').map_or((arg.as_str(), None), |(n, v)| (n, Some(v)));
            let mut value = || value.map(String::from).or_else(|| args.next().cloned());
            match name {
                "--steps" => options.amount.steps = number(name, value(), 1)?,
                "--warmup" => options.amount.warmup = number(name, value(), 0)?,
                "--json" => {
                    options.json = Some(value().ok_or_else(|| usage("`--json` wants a file"))?.into())
                }
                "--peer" => options.peer = Some(value().ok_or_else(|| usage("`--peer` wants a command"))?),
                _ => rest.push(arg.clone()),
            }
        }
        Ok((options, rest))
    }
}

fn number(name: &str, value: Option<String>, least: usize) -> Result<usize> {
    let parsed = value.as_deref().and_then(|value| value.parse().ok()).filter(|&n| n >= least);
    let found = value.map_or("nothing".into(), |value| format!("`{value}`"));
    parsed.ok_or_else(|| usage(&format!("`{name}` wants a number from {least}, not {found}")))
}

fn usage(message: &str) -> Error {
    Error::Usage { message: message.into(), hint: "For example `bench @ run.toml --steps 20`.".into() }
}

fn describe(bench: &Bench) -> String {
    let [model, device, dtype, trainable] = &bench.what;
    let [all, trained] = bench.tokens_per_second();
    let mut text = format!("{model} on {device} in {dtype}, {trainable}\n");
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<24}{value}");
    };
    let spread = |f: fn(f64, f64) -> f64| bench.ms.iter().copied().reduce(f).unwrap_or(0.0);
    let (least, most) = (spread(f64::min), spread(f64::max));
    line("step", format!("{:.1} ms ({least:.1} to {most:.1}, {} steps)", bench.median_ms(), bench.ms.len()));
    line("tokens a second", format!("{all:.0}, trained {trained:.0}"));
    if bench.ranks > 1 {
        line("of each of the ranks", format!("{:.0} ({} ranks)", all / bench.ranks as f64, bench.ranks));
        line("summed over the ranks", format!("{:.1} MB a step", bench.reduced_bytes as f64 / 1e6));
    }
    if let Some(mfu) = bench.mfu {
        line("MFU", format!("{mfu:.1} %"));
    }
    let phases: Vec<String> = bench.phases.iter().map(|(name, ms)| format!("{name} {ms:.1}")).collect();
    line("phases alone, ms", phases.join(", "));
    line("host waits for device", format!("{:.0} % of a step", 100.0 * bench.host_waits));
    let of = |bytes: Option<u64>| bytes.map(|bytes| format!("{:.2} GiB", gib(bytes)));
    if let Some(bytes) = of(bench.device_bytes) {
        line("memory of the device", bytes);
    }
    if let Some(bytes) = of(bench.process_bytes) {
        line("memory of the process", bytes);
    }
    line("estimated by `check`", format!("{:.2} GiB", gib(bench.estimated_bytes)));
    line("start to first step", format!("{:.2} s", bench.to_first_step));
    if let Some(peer) = &bench.peer {
        let seconds = peer.median_ms() / 1e3;
        let memory = of(peer.peak_bytes).map(|gib| format!(", {gib}")).unwrap_or_default();
        let _ = writeln!(text, "{}, on the same step before", peer.name);
        let mut line = |name: &str, value: String| writeln!(text, "  {name:<24}{value}");
        let _ = line("step", format!("{:.1} ms ({} steps){memory}", 1e3 * seconds, peer.ms.len()));
        let _ = line("tokens a second", format!("{:.0}", bench.tokens as f64 / seconds));
        let _ = line("embertune's, times that", format!("{:.2}", 1e3 * seconds / bench.median_ms()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_its_own_are_taken_out() {
        let args = [
            "@",
            "a.toml",
            "--steps",
            "5",
            "--warmup=0",
            "--optim.lr",
            "1",
            "--json",
            "x.json",
            "--peer",
            "python3 p.py",
        ];
        let (options, rest) = Options::take(&args.map(String::from)).unwrap();
        let amount = Amount { warmup: 0, steps: 5 };
        assert_eq!(
            options,
            Options { amount, json: Some("x.json".into()), peer: Some("python3 p.py".into()) }
        );
        assert_eq!(rest, ["@", "a.toml", "--optim.lr", "1"]);
        for wrong in [["--steps", "0"], ["--warmup", "x"]] {
            assert!(Options::take(&wrong.map(String::from)).is_err());
        }
        assert!(Options::take(&["--json".into()]).is_err());
    }
}
