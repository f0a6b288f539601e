//! What to do after a run: merge its adapter, go on where it stopped.

use std::path::{Path, PathBuf};

use crate::Summary;
use crate::config::{self, SchedulerConfig, SftConfig};
use crate::report::shell_quoted;

/// Switches that were for this run alone.
const ONCE: [&str; 5] = [
    "clean_output_dir",
    "ckpt.skip_progress",
    "ckpt.skip_scheduler",
    "ckpt.skip_dataloader",
    "ckpt.skip_optimizer",
];

/// This program as the user called it, for a shell.
pub(super) fn program() -> String {
    let name = std::env::args().next().filter(|name| !name.is_empty());
    shell_quoted(&name.unwrap_or_else(|| "embertune".into()))
}

/// What to do with the result.
pub(super) fn next_steps(program: &str, config: &SftConfig, args: &[String], summary: &Summary) -> String {
    let mut text = String::new();
    // Of several runs the best.
    let (of, result) = match summary.runs.first() {
        Some((name, run)) => (format!(" of {name}"), run),
        None => (String::new(), summary),
    };
    if let Some(adapter) = &result.adapter {
        let [base, from, to] = [&result.base, adapter, &free_name(&config.output_dir.join("merged"))]
            .map(|path| shell_quoted(&path.display().to_string()));
        text += &format!(
            "Adapter{of}: {}\nAsk it:\n  {program} generate --model {base} --adapter {from}\n\
             Merge it into the base model:\n  {program} merge --base {base} --adapter {from} --out {to}\n",
            adapter.display()
        );
    }
    if let Some(weights) = &summary.weights {
        let quoted = shell_quoted(&weights.display().to_string());
        text +=
            &format!("Weights: {}\nAsk them:\n  {program} generate --model {quoted}\n", weights.display());
    }
    if result.checkpoint.is_some() {
        // A run among several may have ended before the job's end.
        let several = !summary.runs.is_empty();
        let ends = [
            ("max-steps", config.max_steps.map(|job| 2 * if several { job } else { result.steps })),
            ("num-epochs", config.num_epochs.map(|n| 2 * n)),
        ];
        let ends = ends.into_iter().filter_map(|(key, end)| Some((key, end?)));
        let command = command(program, args, &ends.collect::<Vec<_>>());
        let own =
            if several { " (but for runs with an end of their own, which stay as they are)" } else { "" };
        text += &format!(
            "Go on training, to twice the length{}{own}:\n  {command}\n",
            stretched(&config.scheduler)
        );
    }
    text
}

/// What a longer run does to the learning rate.
fn stretched(scheduler: &SchedulerConfig) -> &'static str {
    match scheduler {
        SchedulerConfig::Constant | SchedulerConfig::Linear { decay_steps: 0, .. } => "",
        _ => " (the learning rate will decay towards the new end: it begins higher than it ended here)",
    }
}

/// The name, or with a number behind it if that is taken.
fn free_name(path: &Path) -> PathBuf {
    let numbered = (2..).map(|n| PathBuf::from(format!("{}-{n}", path.display())));
    let mut names = std::iter::once(path.to_path_buf()).chain(numbered);
    names.find(|path| !path.exists()).expect("numbers don't end")
}

/// `embertune sft …` with the arguments of this run, but for what the next must not do again, from the newest
/// checkpoint to new `ends` (`max-steps` or `num-epochs`, and its value).
pub(super) fn command(program: &str, args: &[String], ends: &[(&str, usize)]) -> String {
    let is_end = |key: &str| ends.iter().any(|(end, _)| end.replace('-', "_") == key);
    let mut kept: Vec<String> = Vec::new();
    let mut dropping = false;
    for arg in args {
        if let Some(flag) = arg.strip_prefix("--") {
            let key = key_of(flag);
            dropping = key == "ckpt.resume_step" || ONCE.contains(&key.as_str()) || is_end(&key);
        } else if arg.starts_with('@') {
            dropping = false;
        }
        if !dropping {
            kept.push(arg.clone());
        }
    }
    let ends: Vec<String> = ends.iter().flat_map(|(key, n)| [format!("--{key}"), n.to_string()]).collect();
    // What files switch on has to be switched off.
    let loaded = config::load(&[&kept[..], &ends].concat());
    let on = |key: &&&str| loaded.as_ref().is_ok_and(|loaded| is_on(&loaded.config, key));
    kept.extend(ONCE.iter().filter(on).map(|key| format!("--no-{}", key.replace('_', "-"))));
    kept.extend(["--ckpt.resume-step".into(), "-1".into()]);
    kept.extend(ends);
    let words = kept.iter().map(|arg| format!(" {}", shell_quoted(arg)));
    format!("{program} sft{}", words.collect::<String>())
}

/// The key of `KEY`, `KEY=VALUE` or `no-KEY`, as files spell it.
fn key_of(flag: &str) -> String {
    let key = flag.split_once('=').map_or(flag, |(key, _)| key).replace('-', "_");
    let key = key.strip_prefix("no_").unwrap_or(&key);
    key.replace(".no_", ".")
}

fn is_on(config: &SftConfig, key: &str) -> bool {
    let ckpt = config.ckpt.as_ref();
    match key {
        "clean_output_dir" => config.clean_output_dir,
        "ckpt.skip_progress" => ckpt.is_some_and(|c| c.skip_progress),
        "ckpt.skip_scheduler" => ckpt.is_some_and(|c| c.skip_scheduler),
        "ckpt.skip_dataloader" => ckpt.is_some_and(|c| c.skip_dataloader),
        _ => ckpt.is_some_and(|c| c.skip_optimizer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(args: &str, ends: &[(&str, usize)]) -> String {
        let args: Vec<String> = args.split_whitespace().map(String::from).collect();
        command("embertune", &args, ends)
    }

    #[test]
    fn what_must_not_happen_twice_is_left_out() {
        let go_on = "embertune sft --seed 7 --ckpt.resume-step -1 --max-steps 4";
        for once in [
            "--clean-output-dir",
            "--clean_output_dir true",
            "--clean-output-dir=true",
            "--no-clean-output-dir",
            "--ckpt.resume-step 3",
            "--ckpt.resume_step=3 --ckpt.skip-progress",
            "--max-steps 2",
            "--max_steps=2",
        ] {
            assert_eq!(of(&format!("{once} --seed 7"), &[("max-steps", 4)]), go_on);
            assert_eq!(of(&format!("--seed 7 {once}"), &[("max-steps", 4)]), go_on);
        }
    }

    #[test]
    fn what_a_file_switches_on_is_switched_off() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.toml");
        std::fs::write(&file, "clean_output_dir = true\nmax_steps = 2\n[ckpt]\nskip_optimizer = true\n")
            .unwrap();
        let file = file.to_str().unwrap();
        assert_eq!(
            of(&format!("@ {file} --clean-output-dir"), &[]),
            format!(
                "embertune sft @ {file} --no-clean-output-dir --no-ckpt.skip-optimizer --ckpt.resume-step -1"
            )
        );
    }

    #[test]
    fn next_steps_can_be_pasted() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out put");
        std::fs::create_dir_all(out.join("merged")).unwrap();
        let summary = Summary {
            steps: 10,
            adapter: Some("out put/weights/step_10/lora_adapters".into()),
            checkpoint: Some("out put/checkpoints/step_10".into()),
            base: "base".into(),
            ..Summary::default()
        };
        let config = SftConfig { output_dir: out.clone(), max_steps: Some(10), ..SftConfig::default() };
        let text = next_steps("./embertune", &config, &["@".into(), "it's.toml".into()], &summary);
        let merge = "./embertune merge --base base --adapter 'out put/weights/step_10/lora_adapters'";
        assert!(text.contains(&format!("{merge} --out '{}-2'", out.join("merged").display())), "{text}");
        assert!(
            text.contains(r"./embertune sft @ 'it'\''s.toml' --ckpt.resume-step -1 --max-steps 20"),
            "{text}"
        );
        assert!(!text.contains("learning rate"), "{text}");
        let scheduler = SchedulerConfig::Cosine { warmup_steps: 1, min_lr: 0.0 };
        let epochs = SftConfig { max_steps: None, num_epochs: Some(3), scheduler, ..config };
        let text = next_steps("embertune", &epochs, &[], &summary);
        assert!(text.contains("sft --ckpt.resume-step -1 --num-epochs 6\n"), "{text}");
        assert!(text.contains("begins higher than it ended"), "{text}");
    }
}
