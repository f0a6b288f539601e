//! Several ranks do what one does: the same losses, norms and adapter, whatever number of them shares a step; and
//! they end together, however one of them ends. Threads here; processes under MPI with `--features mpi`.
#![cfg(feature = "flex")]

mod common;

use common::run::RunDir;
use safetensors::SafeTensors;

/// Dropout, accumulation, an uneven last step, a held-out set, a moving rate.
const HARD: [&str; 15] = [
    "--data.batch-size",
    "6",
    "--data.micro-batch-size",
    "1",
    "--model.lora.dropout",
    "0.1",
    "--scheduler.type",
    "cosine",
    "--scheduler.warmup-steps",
    "0",
    "--max-steps",
    "None",
    "--val.interval",
    "1",
    "--val.data.seq-len",
];

fn hard<'a>(device: &'a str, out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let data = ["64", "--val.data.name", "held_out.jsonl", "--device", device, "--output-dir", out];
    [&HARD[..], &data, more].concat()
}

fn folder() -> RunDir {
    let dir = RunDir::new();
    let chat = |n: usize| {
        let answer = "so it is ".repeat(1 + n % 3);
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"row {n}?\"}}, \
             {{\"role\": \"assistant\", \"content\": \"{answer}{n}\"}}]}}\n"
        )
    };
    dir.write("held_out.jsonl", &(0..5).map(chat).collect::<String>());
    dir
}

/// Values of all tensors of a file, in the order of their names.
fn values(dir: &RunDir, file: &str) -> Vec<f64> {
    let bytes = dir.bytes(file);
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let mut names = file.names();
    names.sort_unstable();
    let floats = |name: &&str| -> Vec<f64> {
        let data = file.tensor(name).expect("its own name").data().to_vec();
        data.chunks(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")).into()).collect()
    };
    names.iter().flat_map(floats).collect()
}

/// ‖a − b‖ / ‖a‖
fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut a.iter().copied())
}

/// The loss of the first step is the same bits (sums of a few f32 in f64 are exact); all else within 1e-6.
fn assert_alike(dir: &RunDir, a: &str, b: &str, weights: &str) {
    let (rows, others) = (dir.rows(a), dir.rows(b));
    assert_eq!(rows.len(), others.len());
    let first = |rows: &[serde_json::Value]| rows[0]["loss/mean"].as_f64().expect("a loss");
    assert_eq!(first(&rows), first(&others), "{a} and {b}");
    for (row, other) in rows.iter().zip(&others) {
        for key in ["step", "progress/total_tokens", "optim/lr"] {
            assert_eq!(row[key], other[key], "{key}");
        }
        for key in ["loss/mean", "optim/grad_norm", "val/loss"] {
            let [x, y] =
                [row, other].map(|row| row[key].as_f64().unwrap_or_else(|| panic!("no {key}: {row}")));
            assert!((x - y).abs() <= 1e-6 * x.abs(), "step {}: {key} {x} of {a}, {y} of {b}", row["step"]);
        }
    }
    let last = rows.len();
    let file = |out: &str| format!("{out}/weights/step_{last}/{weights}");
    let distance = distance(&values(dir, &file(a)), &values(dir, &file(b)));
    assert!(distance < 1e-6, "the weights of {a} and {b} are {distance:.1e} apart");
}

const ADAPTER: &str = "lora_adapters/adapter_model.safetensors";

#[test]
fn two_and_three_ranks_train_as_one() {
    let dir = folder();
    let (lora, full): (&[&str], &[&str]) =
        (&["--num-epochs", "5"], &["--num-epochs", "2", "--model.lora", "None"]);
    for (name, more, weights) in [("lora", lora, ADAPTER), ("full", full, "model.safetensors")] {
        let out = |ranks: usize| format!("{name}{ranks}");
        for (ranks, device) in ["flex", "flex:0,1", "flex:0,1,2"].iter().enumerate() {
            dir.sft(&hard(device, &out(ranks), more)).succeeds();
        }
        assert_alike(&dir, &out(0), &out(1), weights);
        assert_alike(&dir, &out(0), &out(2), weights);
        assert!(dir.text(&format!("{}/logs/rank_2.log", out(2))).contains("rank 2 on flex"));
        assert!(!dir.path(&format!("{}/logs/rank_0.log", out(2))).exists());
    }
}

#[test]
fn a_checkpoint_goes_on_with_another_number_of_ranks() {
    let dir = folder();
    let full = ["--num-epochs", "5", "--model.lora", "None", "--optim.lr", "1e-3"];
    for (kind, more, weights) in [("lora", &full[..2], ADAPTER), ("full", &full[..], "model.safetensors")] {
        let whole = format!("{kind}-whole");
        dir.sft(&hard("flex", &whole, more)).succeeds();
        let steps = dir.rows(&whole).len();
        assert!(steps > 3, "{steps} steps are too few to stop in the middle");
        for (name, first, then) in
            [("up", "flex", "flex:0,1,2"), ("down", "flex:0,1", "flex"), ("over", "flex:0,1", "flex:0,1,2")]
        {
            // The whole run, and then again from its middle.
            let name = format!("{kind}-{name}");
            dir.sft(&hard(first, &name, more)).succeeds();
            dir.sft(&hard(then, &name, &[more, &["--ckpt.resume-step", "2"]].concat())).succeeds();
            assert_alike(&dir, &whole, &name, weights);
        }
    }
}

#[test]
fn a_batch_that_ranks_cannot_share_is_refused() {
    let dir = folder();
    let ran = dir.sft(&hard("flex:0,1,2,3", "out", &["--num-epochs", "1"])).fails(2);
    ran.says(&["`data.batch_size` is 6, which isn't divisible by 4 ranks"]);
}

#[cfg(not(feature = "mpi"))]
#[test]
fn processes_without_mpi_are_refused_with_the_way_out() {
    let dir = folder();
    let mut command =
        dir.command(&[&["sft", "@", "run.toml"], &hard("flex", "out", &["--num-epochs", "1"])[..]].concat());
    command.envs([("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "127.0.0.1")]);
    common::run::Ran::of(command.output().unwrap()).fails(1).says(&[
        "rank 1 of 2",
        "--features mpi",
        "flex:0,1",
    ]);
    dir.run(&["launch", "--ranks", "2", "--", "sft", "@", "run.toml"]).fails(1).says(&["--features mpi"]);
    assert!(!dir.path("out").exists());
}

#[test]
fn launch_starts_nothing_but_sft() {
    folder().run(&["launch", "--ranks", "2", "--", "check"]).fails(2).says(&["launch --ranks 2 -- sft"]);
}

#[cfg(feature = "mpi")]
mod processes {
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;
    use common::run::Ran;

    /// By `mpirun` itself.
    fn mpirun(dir: &RunDir, args: &[&str]) -> Ran {
        let sft = dir.command(&[&["sft", "@", "run.toml"], args].concat());
        let mut command = Command::new("mpirun");
        command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]);
        command.arg(sft.get_program()).args(sft.get_args()).current_dir(dir.path(""));
        Ran::of(command.output().expect("mpirun is installed"))
    }

    fn launched(dir: &RunDir, ranks: &str, args: &[&str]) -> Child {
        let words = [&["launch", "--ranks", ranks, "--", "sft", "@", "run.toml"], args].concat();
        dir.command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs")
    }

    /// Processes of this program's that `parent` has started, through mpirun.
    fn ranks_of(parent: u32) -> Vec<u32> {
        let children = |id: u32| -> Vec<u32> {
            let out =
                Command::new("pgrep").args(["-P", &id.to_string()]).output().expect("pgrep is installed");
            String::from_utf8_lossy(&out.stdout).split_whitespace().filter_map(|id| id.parse().ok()).collect()
        };
        children(parent).into_iter().flat_map(children).collect()
    }

    fn wait_for_step(dir: &RunDir, out: &str, step: usize) {
        let stable = dir.path(&format!("{out}/checkpoints/step_{step}/STABLE"));
        let deadline = Instant::now() + Duration::from_secs(120);
        while !stable.exists() {
            assert!(Instant::now() < deadline, "no step {step} in {out}\n{}", dir.listing());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    #[test]
    fn processes_give_the_same_bits_as_threads() {
        let dir = folder();
        let more = ["--num-epochs", "3"];
        dir.sft(&hard("flex:0,1", "threads", &more)).succeeds();
        mpirun(&dir, &hard("flex", "mpirun", &more)).succeeds();
        Ran::of(launched(&dir, "2", &hard("flex", "launched", &more)).wait_with_output().unwrap()).succeeds();
        for out in ["mpirun", "launched"] {
            assert_eq!(dir.losses("threads"), dir.losses(out));
            let last = dir.rows(out).len();
            let file = |out: &str| dir.bytes(&format!("{out}/weights/step_{last}/{ADAPTER}"));
            assert!(file("threads") == file(out), "the adapters differ");
        }
    }

    #[test]
    fn a_killed_rank_ends_the_run_and_leaves_the_last_checkpoint() {
        let dir = folder();
        let args = hard("flex", "out", &["--num-epochs", "10000"]);
        let mut launcher = launched(&dir, "2", &args);
        wait_for_step(&dir, "out", 2);
        let ranks = ranks_of(launcher.id());
        assert_eq!(ranks.len(), 2, "{ranks:?}");
        let killed = Instant::now();
        assert!(Command::new("kill").args(["-9", &ranks[1].to_string()]).status().unwrap().success());
        let status = launcher.wait().unwrap();
        assert!(!status.success() && killed.elapsed() < Duration::from_secs(30), "{status}");
        let args =
            hard("flex", "out", &["--num-epochs", "None", "--max-steps", "20", "--ckpt.resume-step", "-1"]);
        dir.sft(&args).succeeds();
    }

    #[test]
    fn one_interrupt_of_the_launcher_is_one_checkpoint() {
        let dir = folder();
        let launcher = launched(&dir, "2", &hard("flex", "out", &["--num-epochs", "10000"]));
        wait_for_step(&dir, "out", 1);
        assert!(Command::new("kill").args(["-INT", &launcher.id().to_string()]).status().unwrap().success());
        let ran = Ran::of(launcher.wait_with_output().unwrap());
        assert_eq!(ran.code, Some(130), "{}", ran.all());
        let last = dir.rows("out").len();
        assert!(dir.path(&format!("out/checkpoints/step_{last}/STABLE")).exists(), "{}", dir.listing());
    }
}
