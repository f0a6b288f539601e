//! `embertune sweep`: one run for each combination of values, all in one job over one base.

use crate::config::{self, Loaded};
use crate::{Error, Result};

/// A flag with several values.
struct Axis {
    /// `optim.lr`
    key: String,
    values: Vec<String>,
}

/// The job: what has one value stands at its top, each combination of the others is a run named after them,
/// `lr=1e-4_rank=8`.
///
/// # Errors
/// What [`config::load`] finds; no flag with several values; a file that has `[[runs]]` itself.
pub(super) fn load(args: &[String]) -> Result<Loaded> {
    let (axes, rest) = split(args);
    sound(&axes)?;
    no_words(&rest)?;
    if axes.is_empty() {
        let hint = "write several numbers with commas: `sweep @ run.toml --optim.lr 1e-4,3e-4 --model.lora.rank 8,16`";
        return Err(usage("no flag has several values: there is nothing to sweep over", hint));
    }
    let mut job = config::load(&rest)?;
    if !job.runs.is_empty() {
        return Err(usage("the file has `[[runs]]` itself", "train it with `sft`, or take them out"));
    }
    for combination in combinations(&axes) {
        let name: Vec<String> =
            combination.iter().map(|(key, value)| format!("{}={value}", last(key))).collect();
        let text: String = combination.iter().map(|(key, value)| format!("{key} = {value}\n")).collect();
        job.runs.push(config::load_run(&job.config, &name.join("_"), &text)?);
    }
    Ok(job)
}

/// Each run has a folder of its own, named after its values: no value may come twice.
fn sound(axes: &[Axis]) -> Result<()> {
    for (n, Axis { key, values }) in axes.iter().enumerate() {
        if axes[..n].iter().any(|other| other.key == *key) {
            return Err(usage(
                &format!("`--{key}` is swept over twice"),
                "write all its values once, with commas",
            ));
        }
        let number = |value: &String| value.parse::<f64>().ok();
        let same = |(n, value): (usize, &String)| {
            values[..n]
                .iter()
                .find(|other| number(other) == number(value))
                .map(|other| (other.clone(), value.clone()))
        };
        if let Some((first, second)) = values.iter().enumerate().find_map(same) {
            let name = last(key);
            let message = if first == second {
                format!("`--{key}` has `{first}` twice: two runs would be called `{name}={first}`")
            } else {
                format!(
                    "`--{key}` has a number twice: the runs `{name}={first}` and `{name}={second}` are the same"
                )
            };
            return Err(usage(&message, "leave one of them out"));
        }
    }
    Ok(())
}

/// A list with commas of which some are numbers was to be swept over; but where a key takes text, a comma is a part of it.
fn no_words(args: &[String]) -> Result<()> {
    for (n, arg) in args.iter().enumerate() {
        let Some(flag) = arg.strip_prefix("--") else { continue };
        let (key, value) = match flag.split_once('=') {
            Some(glued) => glued,
            None => (flag, args.get(n + 1).map_or("", String::as_str)),
        };
        let parts: Vec<&str> = value.split(',').map(str::trim).collect();
        let is_number = |part: &&str| part.parse::<f64>().is_ok();
        if value.starts_with("--")
            || !parts.iter().any(is_number)
            || config::takes_text(&key.replace('-', "_"))
        {
            continue;
        }
        if let Some(word) = parts.iter().find(|part| parts.len() > 1 && !is_number(part)) {
            let hint = format!("write numbers alone: `--{key} 1e-4,3e-4`");
            return Err(usage(
                &format!("`--{key}`: `{word}` is no number, so `{value}` can't be swept over"),
                &hint,
            ));
        }
    }
    Ok(())
}

fn usage(message: &str, hint: &str) -> Error {
    Error::Usage { message: message.into(), hint: hint.into() }
}

/// Flags with several numbers, and the other arguments.
fn split(args: &[String]) -> (Vec<Axis>, Vec<String>) {
    let (mut axes, mut rest) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < args.len() {
        let flag = args[at].strip_prefix("--");
        let glued = flag.and_then(|flag| flag.split_once('='));
        let taken = match (flag, glued) {
            (_, Some((key, value))) => axis(key, value).map(|axis| (axis, 1)),
            (Some(key), None) => args.get(at + 1).and_then(|value| axis(key, value)).map(|axis| (axis, 2)),
            _ => None,
        };
        match taken {
            Some((axis, words)) => {
                axes.push(axis);
                at += words;
            }
            None => {
                rest.push(args[at].clone());
                at += 1;
            }
        }
    }
    (axes, rest)
}

fn axis(key: &str, value: &str) -> Option<Axis> {
    let values: Vec<String> = value.split(',').map(|part| part.trim().to_string()).collect();
    let numbers = values.len() > 1 && values.iter().all(|value| value.parse::<f64>().is_ok());
    numbers.then(|| Axis { key: key.replace('-', "_"), values })
}

fn last(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

fn combinations(axes: &[Axis]) -> Vec<Vec<(&str, &str)>> {
    let mut all = vec![Vec::new()];
    for Axis { key, values } in axes {
        let mut longer = Vec::with_capacity(all.len() * values.len());
        for start in &all {
            longer
                .extend(values.iter().map(|value| [&start[..], &[(key.as_str(), value.as_str())]].concat()));
        }
        all = longer;
    }
    all
}

/// The arguments that read the job that was written.
pub(super) fn again(job: &Loaded) -> Vec<String> {
    let file = job.config.output_dir.join("configs").join("sft.toml");
    vec!["@".into(), file.display().to_string()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RunConfig;

    #[test]
    fn each_combination_is_a_run() {
        let args = [
            "--optim.lr",
            "1e-4,3e-4",
            "--model.lora.rank=8,16",
            "--max-steps",
            "5",
            "--data.name",
            "a,b.jsonl",
        ];
        let job = load(&args.map(String::from)).unwrap();
        let runs: Vec<_> = job
            .runs
            .iter()
            .map(|RunConfig { name, config, .. }| {
                (name.as_str(), config.optim.lr, config.model.lora.as_ref().unwrap().rank)
            })
            .collect();
        assert_eq!(
            runs,
            [
                ("lr=1e-4_rank=8", 1e-4, 8),
                ("lr=1e-4_rank=16", 1e-4, 16),
                ("lr=3e-4_rank=8", 3e-4, 8),
                ("lr=3e-4_rank=16", 3e-4, 16),
            ]
        );
        assert_eq!(job.config.max_steps, Some(5));
        assert!(
            load(&["--max-steps".into(), "5".into()]).unwrap_err().to_string().contains("nothing to sweep")
        );
    }
}
