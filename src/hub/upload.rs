//! What of a folder goes to the hub: what an adapter or a model is made of. What a trainer keeps for itself stays, and
//! so do hidden files; what looks like a secret stops all.

use std::fs;
use std::path::{Path, PathBuf};

use fancy_regex::Regex;
use glob::Pattern;

use super::walk;
use crate::error::{Error, Result};

/// Endings of what belongs to a model.
const ENDINGS: [&str; 10] =
    [".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken", ".md", ".gguf", ".png", ".svg"];
/// Names without one.
const NAMES: [&str; 3] = ["LICENSE", "NOTICE", "USE_POLICY"];
/// What trainers, this one and others, keep to go on from.
const STATE: [&str; 8] = [
    "optimizer.*",
    "trainable.safetensors",
    "state.json",
    "trainer_state.json",
    "training_args.*",
    "scheduler.*",
    "rng_state*",
    "STABLE",
];
/// Text that nobody would want to be read by others: tokens of the hub and of others, private keys.
const SECRETS: &str = r"hf_[A-Za-z0-9]{30,}|ghp_[A-Za-z0-9]{36}|AKIA[0-9A-Z]{16}|sk-[A-Za-z0-9_-]{40,}|-----BEGIN [A-Z ]*PRIVATE KEY-----";
/// Text files above this are vocabularies.
const LONGEST_TEXT: u64 = 1 << 20;

/// One file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UploadFile {
    /// Inside the folder, and inside the repository.
    pub path: String,
    /// Its size.
    pub bytes: u64,
}

/// What goes, and what stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upload {
    /// The folder.
    pub dir: PathBuf,
    /// By name.
    pub files: Vec<UploadFile>,
    /// What stays, and why.
    pub left: Vec<(String, &'static str)>,
}

impl Upload {
    /// Looks through an adapter's or a model's folder. Files that match one of `include` go too.
    ///
    /// # Errors
    /// A folder that is neither, or holds what looks like a secret; a pattern that isn't one or matches nothing.
    pub fn of(dir: &Path, include: &[String]) -> Result<Self> {
        let mut paths = Vec::new();
        walk(dir, "", 0, &mut paths)?;
        paths.sort();
        let mut upload = Self { dir: dir.into(), files: Vec::new(), left: Vec::new() };
        let wanted = patterns(include, &paths)?;
        for path in paths {
            match reason_to_stay(&path).filter(|_| !wanted.iter().any(|pattern| pattern.matches(&path))) {
                Some(reason) => upload.left.push((path, reason)),
                None => {
                    let file = dir.join(&path);
                    let bytes = fs::metadata(&file).map_err(|e| Error::io(&file, "read", e))?.len();
                    no_secret(&file, &path, bytes)?;
                    upload.files.push(UploadFile { path, bytes });
                }
            }
        }
        upload.is_whole()?;
        Ok(upload)
    }

    /// All together.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    fn is_whole(&self) -> Result<()> {
        let has = |name: &str| self.files.iter().any(|file| file.path == name);
        let weights = |ending: &str| self.files.iter().any(|file| file.path.ends_with(ending));
        let adapter = has("adapter_config.json") && has("adapter_model.safetensors");
        if adapter || has("config.json") && (weights(".safetensors") || weights(".gguf")) {
            return Ok(());
        }
        let (message, hint) = match self.left.iter().any(|(path, _)| path == "trainable.safetensors") {
            true => {
                ("is a checkpoint to go on from, not weights", "the run's `weights/step_N` are for others")
            }
            false => (
                "is neither an adapter (`adapter_config.json`, `adapter_model.safetensors`) nor a model \
                 (`config.json`, weights)",
                "name the folder of an adapter, of a merged model, or of a run",
            ),
        };
        Err(Error::model(&self.dir, message, hint))
    }
}

fn patterns(include: &[String], paths: &[String]) -> Result<Vec<Pattern>> {
    let fault = |text: &str, why: &str| Error::Usage {
        message: format!("`--include {text}`: {why}"),
        hint: "a path inside the folder; `*` is any part of it, hidden files never go".into(),
    };
    let pattern = |text: &String| {
        let pattern = Pattern::new(text).map_err(|e| fault(text, &e.to_string()))?;
        let matches = paths.iter().any(|path| pattern.matches(path));
        matches.then_some(pattern).ok_or_else(|| fault(text, "no such file"))
    };
    include.iter().map(pattern).collect()
}

/// Why a file isn't pushed unless it is asked for.
fn reason_to_stay(path: &str) -> Option<&'static str> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let is_state = |pattern: &str| Pattern::new(pattern).is_ok_and(|pattern| pattern.matches(name));
    if STATE.iter().any(|pattern| is_state(pattern)) {
        return Some("a trainer's state");
    }
    let belongs = NAMES.contains(&name) || ENDINGS.iter().any(|ending| name.ends_with(ending));
    (!belongs).then_some("not a part of a model")
}

/// # Errors
/// A name or a text that speaks of a secret.
fn no_secret(file: &Path, path: &str, bytes: u64) -> Result<()> {
    let name = path.rsplit('/').next().unwrap_or(path).to_lowercase();
    let stem = name.split('.').next().unwrap_or_default();
    let telling = ["secret", "credential", "password", "id_rsa"].iter().any(|word| name.contains(word));
    let hint = "take it out of the folder; nothing was pushed";
    if telling || stem == "token" || name.ends_with(".pem") || name.ends_with(".key") {
        return Err(Error::model(file, "has the name of a secret", hint));
    }
    let is_text = [".json", ".md", ".txt", ".jinja"].iter().any(|ending| name.ends_with(ending));
    if !is_text || bytes > LONGEST_TEXT {
        return Ok(());
    }
    let text = fs::read(file).map_err(|e| Error::io(file, "read", e))?;
    let secret = Regex::new(SECRETS).expect("a constant");
    let found = String::from_utf8_lossy(&text)
        .lines()
        .position(|line| secret.is_match(line).unwrap_or(false))
        .map(|line| format!("line {} holds what looks like a token or a private key", line + 1));
    found.map_or(Ok(()), |message| Err(Error::model(file, message, hint)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    const ADAPTER: [(&str, &str); 3] =
        [("adapter_config.json", "{}"), ("adapter_model.safetensors", "12345678"), ("README.md", "# Mine")];

    #[test]
    fn what_a_trainer_keeps_stays_and_what_is_asked_for_goes() {
        let more = [
            ("optimizer.pt", "state"),
            ("trainer_state.json", "{}"),
            ("rng_state_0.pth", "x"),
            ("STABLE", "x"),
            (".env", "HF_TOKEN=x"),
            (".git/config", "x"),
            ("notes.docx", "x"),
            ("images/curve.png", "x"),
        ];
        let dir = folder(&[&ADAPTER[..], &more].concat());
        let upload = Upload::of(dir.path(), &[]).unwrap();
        let names: Vec<&str> = upload.files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(
            names,
            ["README.md", "adapter_config.json", "adapter_model.safetensors", "images/curve.png"]
        );
        assert_eq!(upload.bytes(), 6 + 2 + 8 + 1);
        let left: Vec<&str> = upload.left.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(left, ["STABLE", "notes.docx", "optimizer.pt", "rng_state_0.pth", "trainer_state.json"]);
        let upload = Upload::of(dir.path(), &["*.docx".into(), "optimizer.pt".into()]).unwrap();
        assert_eq!((upload.files.len(), upload.left.len()), (6, 3));
        for wrong in ["nothing*", "[", ".env"] {
            let error = Upload::of(dir.path(), &[wrong.into()]).unwrap_err();
            assert!(error.to_string().contains(wrong), "{error}");
        }
    }

    #[test]
    fn secrets_stop_all() {
        let token = format!("hf_{}", "a1B2".repeat(9));
        for (path, text, line) in [
            ("README.md", format!("# Mine\n\ntoken: {token}"), "line 3"),
            ("notes.json", format!("{{\"key\": \"AKIA{}\"}}", "ABCD".repeat(4)), "line 1"),
            ("key.txt", "-----BEGIN RSA PRIVATE KEY-----".to_string(), "line 1"),
            ("token.txt", String::new(), "the name of a secret"),
            ("my_credentials.json", "{}".to_string(), "the name of a secret"),
        ] {
            let dir = folder(&ADAPTER);
            fs::write(dir.path().join(path), text).unwrap();
            let error = Upload::of(dir.path(), &[]).unwrap_err().to_string();
            assert!(error.contains(path) && error.contains(line), "{error}");
        }
        // A model's own files have such names.
        let dir =
            folder(&[&ADAPTER[..], &[("tokenizer.json", "{}"), ("special_tokens_map.json", "{}")]].concat());
        assert_eq!(Upload::of(dir.path(), &[]).unwrap().files.len(), 5);
    }

    #[test]
    fn a_folder_without_weights_is_refused() {
        let dir =
            folder(&[("trainable.safetensors", "x"), ("optimizer.safetensors", "x"), ("state.json", "{}")]);
        let error = Upload::of(dir.path(), &[]).unwrap_err();
        assert!(error.to_string().contains("checkpoint to go on from"), "{error}");
        let dir = folder(&[("notes.md", "x")]);
        assert!(Upload::of(dir.path(), &[]).unwrap_err().to_string().contains("neither an adapter"));
    }
}
