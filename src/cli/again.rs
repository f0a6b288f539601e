//! The command that goes on where this one stops.

use crate::config::{self, SftConfig};

/// Switches that were for this run alone.
const ONCE: [&str; 5] = [
    "clean_output_dir",
    "ckpt.skip_progress",
    "ckpt.skip_scheduler",
    "ckpt.skip_dataloader",
    "ckpt.skip_optimizer",
];

/// `embertune sft …` with the arguments of this run, but for what the next must not do again, from the newest
/// checkpoint to new `ends` (`max-steps` or `num-epochs`, and its value).
pub(super) fn command(args: &[String], ends: &[(&str, usize)]) -> String {
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
    let words = kept.iter().map(|arg| format!(" {}", quoted(arg)));
    format!("embertune sft{}", words.collect::<String>())
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

/// An argument as a shell takes it.
pub(super) fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./@:=,+%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_string()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(args: &str, ends: &[(&str, usize)]) -> String {
        let args: Vec<String> = args.split_whitespace().map(String::from).collect();
        command(&args, ends)
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
}
