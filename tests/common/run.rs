//! Running the real binary in a folder of its own; a failed expectation prints all that it wrote.
#![allow(dead_code)] // each test program uses a part

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use super::goldens::root;

/// The device that the tests train on.
pub fn device() -> String {
    std::env::var("EMBERTUNE_TEST_DEVICE").unwrap_or("flex".into())
}

/// A folder with a configuration for the tiny model of `bad/_ok`, removed afterwards.
pub struct RunDir {
    dir: TempDir,
}

/// What a process wrote, with how it ended.
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl RunDir {
    pub fn new() -> Self {
        let dir = TempDir::new().expect("a temporary folder");
        let ok = root().join("bad/_ok").canonicalize().expect("bad/_ok is there");
        let text = format!(
            r#"max_steps = 2
output_dir = "out"
device = "{}"

[model]
name = "{}"

[model.lora]
rank = 4
alpha = 8.0
target_modules = ["q_proj", "v_proj"]

[data]
name = "{}"
seq_len = 64
batch_size = 4
micro_batch_size = 2

[optim]
lr = 1e-2

[ckpt]
interval = 1
"#,
            device(),
            ok.join("model").display(),
            ok.join("train.jsonl").display()
        );
        std::fs::write(dir.path().join("run.toml"), text).expect("the folder can be written");
        Self { dir }
    }

    pub fn path(&self, inner: &str) -> PathBuf {
        self.dir.path().join(inner)
    }

    pub fn bytes(&self, inner: &str) -> Vec<u8> {
        std::fs::read(self.path(inner)).unwrap_or_else(|e| panic!("{inner}: {e}\n{}", self.listing()))
    }

    pub fn text(&self, inner: &str) -> String {
        String::from_utf8(self.bytes(inner)).expect("text")
    }

    pub fn write(&self, inner: &str, text: &str) -> PathBuf {
        std::fs::write(self.path(inner), text).expect("the folder can be written");
        self.path(inner)
    }

    /// Rows of a run's `metrics.jsonl`.
    pub fn rows(&self, out: &str) -> Vec<Value> {
        let text = self.text(&format!("{out}/metrics.jsonl"));
        text.lines().map(|line| serde_json::from_str(line).expect("a JSON row")).collect()
    }

    /// The losses of a run, by step.
    pub fn losses(&self, out: &str) -> Vec<(u64, f64)> {
        let row = |row: &Value| Some((row["step"].as_u64()?, row["loss/mean"].as_f64()?));
        self.rows(out).iter().filter_map(row).collect()
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_embertune"));
        command.args(args).current_dir(self.dir.path());
        command.env_remove("RUST_LOG").env("HF_HUB_OFFLINE", "1").env_remove("NEVER_CLEAN_OUTPUT_DIR");
        command
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        Ran::of(self.command(args).output().expect("the binary runs"))
    }

    /// `sft @ run.toml …`
    pub fn sft(&self, args: &[&str]) -> Ran {
        self.run(&[&["sft", "@", "run.toml"], args].concat())
    }

    /// The same in the background.
    pub fn spawn(&self, args: &[&str]) -> Child {
        let mut command = self.command(&[&["sft", "@", "run.toml"], args].concat());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs")
    }

    pub fn listing(&self) -> String {
        fn walk(folder: &Path, lines: &mut Vec<String>) {
            let Ok(entries) = std::fs::read_dir(folder) else { return };
            for path in entries.flatten().map(|entry| entry.path()) {
                lines.push(path.display().to_string());
                walk(&path, lines);
            }
        }
        let mut lines = Vec::new();
        walk(self.dir.path(), &mut lines);
        lines.sort();
        lines.join("\n")
    }
}

impl Ran {
    pub fn of(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into(),
            stderr: String::from_utf8_lossy(&output.stderr).into(),
        }
    }

    pub fn all(&self) -> String {
        format!("code {:?}\n--- stdout\n{}\n--- stderr\n{}", self.code, self.stdout, self.stderr)
    }

    #[track_caller]
    pub fn succeeds(self) -> Self {
        assert_eq!(self.code, Some(0), "{}", self.all());
        self
    }

    /// Ends with this code and a message, not with a panic.
    #[track_caller]
    pub fn fails(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{}", self.all());
        assert!(self.stderr.contains("error: "), "{}", self.all());
        self.without_panic()
    }

    #[track_caller]
    pub fn without_panic(self) -> Self {
        for word in ["panicked", "RUST_BACKTRACE", "stack backtrace"] {
            assert!(!self.stderr.contains(word), "{}", self.all());
        }
        self
    }

    #[track_caller]
    pub fn says(self, words: &[&str]) -> Self {
        for word in words {
            assert!(self.stderr.contains(word) || self.stdout.contains(word), "`{word}` in\n{}", self.all());
        }
        self
    }
}
