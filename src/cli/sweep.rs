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
