//! `embertune check`: what a run would be, and with `--fit` the largest micro-batch that there is memory for.

use tracing::Level;

use super::{describe, print};
use crate::config;
use crate::report::{LineFormat, log};
use crate::train::check::{Asked, check as find_out};
use crate::{Error, Result};

/// What is asked beside the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Options {
    resolved: bool,
    asked: Asked,
}

pub(super) fn check(args: &[String]) -> Result<()> {
    log::init(Level::INFO, LineFormat::Text, None);
    let (options, args) = Options::take(args)?;
    let config::Loaded { config, runs, differences } = config::load(&args)?;
    match options.resolved {
        true => print(&config::RunConfig::to_toml(&config, &runs))?,
        false => print(&describe(&differences).join("\n"))?,
    }
    if runs.is_empty() {
        let found = find_out(&config, options.asked)?;
        print(&found.to_string())?;
        return found.in_the_way.map_or(Ok(()), Err);
    }
    let mut in_the_way: Option<Error> = None;
    for run in &runs {
        let found = find_out(&run.config, options.asked).map_err(|error| error.after(in_the_way.take()))?;
        print(&format!("\nRun {}\n{found}", run.name))?;
        if let Some(error) = found.in_the_way {
            in_the_way = Some(error.after(in_the_way));
        }
    }
    in_the_way.map_or(Ok(()), Err)
}

impl Options {
    /// Takes `--resolved`, `--fit` and `--memory SIZE` out of the arguments; the others are the configuration's.
    fn take(args: &[String]) -> Result<(Self, Vec<String>)> {
        let mut options = Options::default();
        let mut rest = Vec::new();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let (name, value) = arg.split_once('=').map_or((arg.as_str(), None), |(n, v)| (n, Some(v)));
            match (name, value) {
                ("--resolved", None) => options.resolved = true,
                ("--fit", None) => options.asked.fit = true,
                ("--memory", value) => {
                    let value = value.map(String::from).or_else(|| args.next().cloned());
                    options.asked.memory = Some(bytes(value.as_deref())?);
                }
                _ => rest.push(arg.clone()),
            }
        }
        Ok((options, rest))
    }
}

/// A size such as `80GiB`, `24 GB` or `600MiB`; a number alone is GiB.
fn bytes(text: Option<&str>) -> Result<u64> {
    let wrong = || {
        let found = text.map_or("nothing".into(), |text| format!("`{text}`"));
        Error::Usage {
            message: format!("`--memory` wants a size, not {found}"),
            hint: "For example `check @ run.toml --fit --memory 80GiB`.".into(),
        }
    };
    let lower = text.ok_or_else(wrong)?.to_lowercase();
    let number = lower.trim_end_matches(char::is_alphabetic);
    let unit = match &lower[number.len()..] {
        "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "kib" | "k" => 1024.0,
        "mib" | "m" => 1024.0 * 1024.0,
        "gib" | "g" | "" => 1024.0 * 1024.0 * 1024.0,
        "tib" | "t" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return Err(wrong()),
    };
    let number: f64 = number.trim().parse().map_err(|_| wrong())?;
    if number.is_finite() && number > 0.0 { Ok((number * unit) as u64) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_its_own_are_taken_out() {
        let args = ["@", "a.toml", "--fit", "--memory", "1.5GiB", "--optim.lr", "1", "--resolved"];
        let (options, rest) = Options::take(&args.map(String::from)).unwrap();
        let asked = Asked { fit: true, memory: Some(3 << 29) };
        assert_eq!(options, Options { resolved: true, asked });
        assert_eq!(rest, ["@", "a.toml", "--optim.lr", "1"]);
    }

    #[test]
    fn sizes_have_units() {
        for (text, wanted) in
            [("80GiB", 80 << 30), ("80", 80 << 30), ("2 gb", 2_000_000_000), ("600MiB", 600 << 20)]
        {
            assert_eq!(bytes(Some(text)).unwrap(), wanted, "{text}");
        }
        for text in [None, Some(""), Some("GiB"), Some("-1GiB"), Some("3 apples"), Some("inf")] {
            assert_eq!(bytes(text).unwrap_err().exit_code(), 2, "{text:?}");
        }
    }
}
