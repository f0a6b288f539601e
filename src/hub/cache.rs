//! Where files of the hub lie on this machine, and where ours do.

use std::fs;
#[cfg(feature = "hub")]
use std::io;
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

impl Kind {
    /// As the hub's addresses have it.
    pub fn plural(self) -> &'static str {
        match self {
            Kind::Model => "models",
            Kind::Dataset => "datasets",
        }
    }
}

/// A repository of the hub, at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Repo {
    pub kind: Kind,
    /// `owner/name`.
    pub id: String,
    /// A branch, a tag or a commit.
    pub revision: String,
}

impl Repo {
    /// `owner/name`, or `owner/name@revision`; `None` when `name` can't be the name of a repository.
    pub fn parse(kind: Kind, name: &str) -> Option<Self> {
        let (id, revision) = name.split_once('@').unwrap_or((name, "main"));
        let (owner, repo) = id.split_once('/')?;
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let fits =
            |part: &str| !part.is_empty() && !part.starts_with(['.', '-', '~']) && part.chars().all(plain);
        let is_file = data_ending(repo).is_some();
        let names = fits(owner) && fits(repo) && revision.split('/').all(fits);
        let (id, revision) = (id.to_string(), revision.to_string());
        (names && !is_file).then_some(Self { kind, id, revision })
    }

    /// Whether the revision is a commit, which never changes.
    pub fn is_commit(&self) -> bool {
        self.revision.len() == 40 && self.revision.chars().all(|c| c.is_ascii_hexdigit())
    }

    /// Its folder in the cache.
    pub fn folder(&self) -> PathBuf {
        hub_cache().join(format!("{}--{}", self.kind.plural(), self.id.replace('/', "--")))
    }

    /// The paths in a commit, kept beside what was downloaded of it.
    pub fn listing_file(&self, commit: &str) -> PathBuf {
        self.folder().join(".embertune").join(format!("{commit}.json"))
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

/// The cached snapshot of a repository's revision, if there is one; it may hold a part of the files only.
pub(super) fn snapshot(repo: &Repo) -> Option<PathBuf> {
    let commit = match fs::read_to_string(repo.folder().join("refs").join(&repo.revision)) {
        Ok(commit) => commit.trim().to_string(),
        Err(_) if repo.is_commit() => repo.revision.clone(),
        Err(_) => return None,
    };
    Some(repo.folder().join("snapshots").join(commit)).filter(|dir| dir.is_dir())
}

/// The paths in the commit of a snapshot, where the download kept them.
pub(super) fn listing(repo: &Repo, snapshot: &Path) -> Option<Vec<String>> {
    let commit = snapshot.file_name()?.to_str()?;
    serde_json::from_slice(&fs::read(repo.listing_file(commit)).ok()?).ok()
}

/// Keeps the paths in a commit.
#[cfg(feature = "hub")]
pub(super) fn write_listing(repo: &Repo, commit: &str, paths: &[String]) -> io::Result<()> {
    write_whole(&repo.listing_file(commit), &serde_json::to_vec(paths)?)
}

/// Says which commit a branch is at.
#[cfg(feature = "hub")]
pub(super) fn write_ref(repo: &Repo, commit: &str) -> io::Result<()> {
    if repo.is_commit() {
        return Ok(());
    }
    write_whole(&repo.folder().join("refs").join(&repo.revision), commit.as_bytes())
}

/// Nobody reads half of it.
#[cfg(feature = "hub")]
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent)?;
    let unfinished = parent.join(format!(".embertune-{}", std::process::id()));
    fs::write(&unfinished, bytes)?;
    fs::rename(&unfinished, path)
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
