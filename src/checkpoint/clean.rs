//! `clean_output_dir`: deletes what a run of ours wrote, and nothing else.

use std::fs;
use std::path::{Path, PathBuf};

use super::{RunFolder, find_adapter, folder};
use crate::config::{DataConfig, SftConfig};
use crate::report::{is_page, is_picture};
use crate::{Error, Result};

impl RunFolder {
    /// What `clean_output_dir` would delete.
    fn own(&self) -> Result<Vec<PathBuf>> {
        let mut own = Vec::new();
        for parent in [&self.checkpoints, &self.weights] {
            let entries = folder::entries(parent)?;
            own.extend(entries.into_iter().filter(|(name, path)| folder::is_own(name, path)).map(|(_, p)| p));
        }
        let rows = ["metrics.jsonl", "metrics.jsonl.partial", "samples.jsonl", "samples.jsonl.partial"];
        let files = [
            (self.root.join("configs"), &["sft.toml", "sft.dry-run.toml", "run.json"][..]),
            (self.root.join("logs"), &["trainer.log", "monitor.log"]),
            (self.root.clone(), &rows),
        ];
        for (parent, names) in files {
            for (name, path) in folder::entries(&parent)? {
                let file = fs::symlink_metadata(&path).is_ok_and(|data| !data.is_dir());
                if file && names.iter().any(|wanted| name == *wanted || folder::is_old(&name, wanted)) {
                    own.push(path);
                }
            }
        }
        let [page, svg, png] = ["report.html", "curves.svg", "curves.png"].map(|name| self.root.join(name));
        own.extend(Some(page).filter(|page| is_page(page)));
        if is_picture(&svg) {
            own.push(svg);
            own.extend(Some(png).filter(|png| png.is_file()));
        }
        let events = self.root.join("tensorboard");
        let events = if events.is_dir() { folder::entries(&events)? } else { Vec::new() };
        own.extend(
            events.into_iter().filter(|(name, _)| name.starts_with("events.out.tfevents.")).map(|(_, p)| p),
        );
        Ok(own)
    }

    /// Refuses to clean where the environment forbids it, or where the run's own inputs would be deleted.
    ///
    /// # Errors
    /// `NEVER_CLEAN_OUTPUT_DIR`; a model, tokenizer or data inside what an earlier run wrote, with both paths.
    pub fn may_clean(&self, config: &SftConfig) -> Result<()> {
        if std::env::var_os("NEVER_CLEAN_OUTPUT_DIR").is_some() {
            return Err(Error::checkpoint(
                &self.root,
                "`clean_output_dir` is set, but the environment has NEVER_CLEAN_OUTPUT_DIR",
                "unset one of the two",
            ));
        }
        let own = self.own()?;
        for (key, input) in inputs(config) {
            let Ok(whole) = fs::canonicalize(&input) else { continue };
            let around = own.iter().find(|path| fs::canonicalize(path).is_ok_and(|p| whole.starts_with(p)));
            if let Some(doomed) = around {
                return Err(Error::checkpoint(
                    doomed,
                    format!(
                        "`clean_output_dir` would delete `{key}` = `{}`, which lies in it",
                        input.display()
                    ),
                    "set another `output_dir`, or move that folder elsewhere",
                ));
            }
        }
        Ok(())
    }

    /// Deletes what an earlier run wrote; folders go when nothing else is in them.
    pub(super) fn clean(&self, note: &mut dyn FnMut(String)) -> Result<()> {
        let own = self.own()?;
        for path in &own {
            note(format!("`clean_output_dir`: deleting `{}`", path.display()));
            if path.is_dir() {
                folder::remove(path)?;
            } else {
                fs::remove_file(path).map_err(|e| Error::io(path, "delete", e))?;
            }
        }
        let inner = ["configs", "logs", "tensorboard"].map(|name| self.root.join(name));
        let inner = inner.iter().filter(|path| path.is_dir());
        for parent in [&self.checkpoints, &self.weights].into_iter().chain(inner) {
            let left = folder::entries(parent)?;
            match left.first() {
                None => drop(fs::remove_dir(parent)), // not there, or a link: both are fine
                Some((name, _)) => {
                    let (n, place) = (left.len(), parent.display());
                    let entries = if n == 1 { "entry" } else { "entries" };
                    note(format!("`{place}` keeps {n} {entries} that no run wrote, such as `{name}`"));
                }
            }
        }
        Ok(())
    }
}

/// Local files and folders that the run reads, with their keys.
fn inputs(config: &SftConfig) -> Vec<(&'static str, PathBuf)> {
    let mut names = vec![("model.name", config.model.name.as_str())];
    names.extend(config.tokenizer.name.as_deref().map(|name| ("tokenizer.name", name)));
    if let DataConfig::Sft(data) = &config.data {
        names.push(("data.name", &data.name));
    }
    names.extend(config.val.as_ref().map(|val| ("val.data.name", val.data.name.as_str())));
    names.extend(config.tokenizer.chat_template.as_deref().map(|path| ("tokenizer.chat_template", path)));
    let mut inputs: Vec<_> =
        names.into_iter().map(|(key, name)| (key, Path::new(name).to_path_buf())).collect();
    let adapter = config.model.lora.as_ref().and_then(|lora| lora.init_adapter_path.as_ref());
    // A run's folder stands for its newest adapter.
    let adapter = adapter.map(|path| find_adapter(path).unwrap_or_else(|_| path.clone()));
    inputs.extend(adapter.map(|path| ("model.lora.init_adapter_path", path)));
    inputs.extend(config.sample.as_ref().and_then(|sample| Some(("sample.file", sample.file.clone()?))));
    inputs
}
