//! Where files of the hub lie on this machine, and where ours do.

use std::fs;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::data_ending;
use crate::assets::Asset;
use crate::error::{Error, Result};
pub(super) use crate::folders::variable;
use crate::folders::{self, user_cache};

/// What a repository holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Model,
    Dataset,
}

/// A repository of the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Repo {
    pub kind: Kind,
    /// `owner/name`.
    pub id: String,
}

impl Repo {
    /// `None` when `name` can't be the name of a repository.
    pub fn parse(kind: Kind, name: &str) -> Option<Self> {
        let (owner, repo) = name.split_once('/')?;
        let fits = |part: &str| {
            !part.is_empty()
                && !part.starts_with(['.', '-', '~'])
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        let is_file = data_ending(repo).is_some();
        (fits(owner) && fits(repo) && !is_file).then(|| Self { kind, id: name.to_string() })
    }

    /// Its folder in the cache.
    pub fn folder(&self) -> PathBuf {
        let kind = match self.kind {
            Kind::Model => "models",
            Kind::Dataset => "datasets",
        };
        hub_cache().join(format!("{kind}--{}", self.id.replace('/', "--")))
    }

    /// There while a download is unfinished: the snapshot isn't whole then.
    pub fn unfinished_mark(&self) -> PathBuf {
        self.folder().join(".embertune-unfinished")
    }
}

/// The folder of the hub's tools (huggingface_hub, constants.py): `HF_HOME`.
pub(super) fn hf_home() -> PathBuf {
    variable("HF_HOME").unwrap_or_else(|| user_cache().join("huggingface"))
}

/// Their cache of repositories.
pub(super) fn hub_cache() -> PathBuf {
    variable("HF_HUB_CACHE")
        .or_else(|| variable("HUGGINGFACE_HUB_CACHE"))
        .unwrap_or_else(|| hf_home().join("hub"))
}

/// The cached snapshot of a repository's main branch, if there is one and no download was cut.
pub(super) fn snapshot(repo: &Repo) -> Option<PathBuf> {
    newest_snapshot(repo).filter(|_| !repo.unfinished_mark().exists())
}

/// The same, whole or not.
pub(super) fn newest_snapshot(repo: &Repo) -> Option<PathBuf> {
    let folder = repo.folder();
    let commit = fs::read_to_string(folder.join("refs/main")).ok()?;
    Some(folder.join("snapshots").join(commit.trim())).filter(|dir| dir.is_dir())
}

/// The folder of something compiled in; its name holds a hash, so that versions keep apart.
pub(super) fn write_asset(asset: &Asset) -> Result<PathBuf> {
    let mut hash = Xxh3::new();
    for (path, content) in asset.files {
        hash.update(path.as_bytes());
        hash.update(content);
    }
    let name = format!("{}-{:016x}", asset.name.replace('/', "--"), hash.digest());
    // A home that can't be written to is no reason not to train.
    let in_cache = write_once(&folders::cache(), &name, asset);
    in_cache.or_else(|_| write_once(&std::env::temp_dir().join("embertune"), &name, asset))
}

fn write_once(parent: &Path, name: &str, asset: &Asset) -> Result<PathBuf> {
    let dir = parent.join(name);
    let is_whole = || {
        asset
            .files
            .iter()
            .all(|(path, content)| fs::read(dir.join(path)).is_ok_and(|found| found == *content))
    };
    if is_whole() {
        return Ok(dir);
    }
    let unfinished = parent.join(format!(".{name}-{}", std::process::id()));
    for (path, content) in asset.files {
        let file = unfinished.join(path);
        let folder = file.parent().unwrap_or(&unfinished);
        fs::create_dir_all(folder).map_err(|e| Error::io(folder, "create", e))?;
        fs::write(&file, content).map_err(|e| Error::io(&file, "write", e))?;
    }
    // Someone may have been faster, or have left a broken one.
    if !is_whole() {
        let _ = fs::remove_dir_all(&dir);
        let renamed = fs::rename(&unfinished, &dir);
        if !is_whole() {
            renamed.map_err(|e| Error::io(&dir, "write", e))?;
        }
    }
    let _ = fs::remove_dir_all(&unfinished);
    Ok(dir)
}
