//! Names of models and datasets → folders and files on this machine.
//!
//! A name is, in this order: a local path, something compiled in, or an `owner/name` of
//! the Hugging Face hub (`owner/name@revision` for another branch, a tag or a commit than `main`). The hub is asked
//! which commit that is now; what its local cache lacks of it (the one that Python's tools use, where
//! `HF_HUB_CACHE` or `HF_HOME` put it) is downloaded. Where it can't be asked, or with `HF_HUB_OFFLINE`, the cache
//! serves. `HF_ENDPOINT` and `HF_TOKEN` are respected. [`push`] is the other way.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::assets;
use crate::config::nearest_sibling;
use crate::error::{Error, Result};

mod cache;
mod card;
#[cfg(feature = "hub")]
mod http;
mod layout;
#[cfg(feature = "hub")]
mod push;
#[cfg(feature = "hub")]
mod remote;
mod upload;

use cache::{Kind, Repo};
pub(crate) use layout::{ENDINGS as DATA_ENDINGS, data_ending};
pub use upload::{Upload, UploadFile};

/// The folder of a model: `config.json`, weights, tokenizer.
///
/// # Errors
/// Nothing by that name on disk, compiled in or on the hub.
pub fn model_dir(name: &str) -> Result<PathBuf> {
    folder(name, "model.name", layout::model_files)
}

/// The folder of a model's `config.json` and tokenizer: as [`model_dir`], but the weights may be missing.
///
/// # Errors
/// As [`model_dir`].
pub fn config_dir(name: &str) -> Result<PathBuf> {
    folder(name, "model.name", layout::tokenizer_files)
}

/// The folder of a tokenizer: as [`model_dir`], but without the weights.
///
/// # Errors
/// As [`model_dir`].
pub fn tokenizer_dir(name: &str) -> Result<PathBuf> {
    folder(name, "tokenizer.name", layout::tokenizer_files)
}

/// Where a push goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// `owner/name`; it is made if it isn't there.
    pub repo: String,
    /// Whether others may not read it.
    pub private: bool,
    /// A branch, which is made if it isn't there; else `main`.
    pub revision: Option<String>,
    /// What the commit is called.
    pub message: String,
}

impl Destination {
    /// Whether a repository and a branch can be called so; nobody is asked.
    ///
    /// # Errors
    /// They can't.
    pub fn check(&self) -> Result<()> {
        self.repository().map(drop)
    }

    fn repository(&self) -> Result<Repo> {
        let revision = self.revision.as_ref();
        let name = revision.map_or(self.repo.clone(), |revision| format!("{}@{revision}", self.repo));
        Repo::parse(Kind::Model, &name).ok_or_else(|| Error::Usage {
            message: format!("`{name}` can't be a repository's name"),
            hint: "wanted `--repo OWNER/NAME` of letters, digits, `-`, `_` and `.`, and a branch in `--revision`"
                .into(),
        })
    }
}

/// What a push came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// Where to look at it.
    pub url: String,
    /// The commit's hash.
    pub commit: String,
    /// Bytes of large files that were sent; what the hub had is not sent again.
    pub sent: u64,
}

/// Uploads files to a repository of models as one commit: all of them, or none. The token is `HF_TOKEN`, or that of
/// `hf auth login`.
///
/// # Errors
/// A name that no repository can have, `HF_HUB_OFFLINE`, no token or right, whatever else the hub refuses, and a
/// connection that can't be had.
pub fn push(upload: &Upload, to: &Destination) -> Result<Pushed> {
    let repo = to.repository()?;
    if offline() {
        let message = "`HF_HUB_OFFLINE` is set: nothing is pushed".into();
        return Err(Error::Hub { message, hint: "unset `HF_HUB_OFFLINE`".into() });
    }
    send(upload, &repo, to)
}

#[cfg(feature = "hub")]
fn send(upload: &Upload, repo: &Repo, to: &Destination) -> Result<Pushed> {
    push::push(upload, repo, to)
}

#[cfg(not(feature = "hub"))]
fn send(_: &Upload, _: &Repo, _: &Destination) -> Result<Pushed> {
    let message = "this program was built without the feature `hub`".into();
    Err(Error::Hub { message, hint: "build it with `--features hub`".into() })
}

/// The hub's name of a model that is called `name` and lies in `folder`: where it is one of the hub's, or lies in its
/// cache.
pub(crate) fn repo_id(name: &str, folder: &Path) -> Option<String> {
    let (id, _) = split_revision(name);
    if !Path::new(name).exists() && !assets::is_embedded(name) && Repo::parse(Kind::Model, id).is_some() {
        return Some(id.into());
    }
    let whole = fs::canonicalize(folder).ok()?;
    whole.iter().find_map(|part| {
        let id = part.to_str()?.strip_prefix("models--")?.replacen("--", "/", 1);
        Repo::parse(Kind::Model, &id).map(|repo| repo.id)
    })
}

/// The hub's name of a dataset, if it is one of the hub's.
pub(crate) fn dataset_id(name: &str) -> Option<String> {
    let local = Path::new(name).exists() || assets::is_embedded(name) || name.contains(['*', '?', '[']);
    Repo::parse(Kind::Dataset, name).filter(|_| !local).map(|repo| repo.id)
}

/// The YAML head of a card, without its lines of `---`.
pub(crate) fn card_head(text: &str) -> Option<&str> {
    card::head(text)
}

/// A name as others take it, and the revision that stood behind its `@`.
pub(crate) fn split_revision(name: &str) -> (&str, Option<&str>) {
    match name.split_once('@') {
        Some((id, revision)) if !Path::new(name).exists() && Repo::parse(Kind::Model, name).is_some() => {
            (id, Some(revision))
        }
        _ => (name, None),
    }
}

/// Which of a repository's files are wanted, or what is missing.
type Choice<'a> = dyn Fn(&dyn Listing) -> Result<Vec<String>, String> + 'a;

/// A folder or a repository: what it holds.
trait Listing {
    /// Paths inside it, sorted.
    fn paths(&self) -> &[String];
    /// The text of a file that the choice of others depends on.
    fn read(&self, path: &str) -> Option<String>;
}

fn folder(
    name: &str,
    key: &str,
    choose: impl Fn(&dyn Listing) -> Result<Vec<String>, String>,
) -> Result<PathBuf> {
    let path = Path::new(name);
    if path.is_dir() {
        return Ok(path.to_path_buf());
    }
    if path.exists() {
        return Err(Error::model(
            path,
            format!("`{key}` is a file; wanted a folder"),
            "Name the folder that holds it.",
        ));
    }
    if let Some(dir) = embedded(name)? {
        return Ok(dir);
    }
    let repo = Repo::parse(Kind::Model, name).ok_or_else(|| not_found(name, key, None))?;
    let (snapshot, _) = resolve(&repo, &choose).map_err(|problem| problem.into_error(name, key))?;
    Ok(snapshot)
}

/// The data files of a dataset: one file, those that a pattern (`data/*.jsonl`) matches, a folder in the
/// hub's layout, or a hub dataset.
///
/// What subsets and splits are, the dataset's card says (`configs` in its `README.md`); without, `subset` is the name
/// of a folder inside it, and files belong to a split by their names.
///
/// # Errors
/// Nothing by that name, no such subset or split (with those that there are).
pub fn dataset_files(name: &str, subset: Option<&str>, split: &str) -> Result<Vec<PathBuf>> {
    const KEY: &str = "data.name";
    let path = Path::new(name);
    let pattern = !path.exists() && name.contains(['*', '?', '[']);
    if path.is_file() || pattern {
        if subset.is_some() || split != "train" {
            let message = "`data.subsets` and `data.splits` choose among the files of a folder; these are named already";
            return Err(Error::data(
                path,
                None,
                message,
                "leave them out, or name the folder in `data.name`",
            ));
        }
        return if pattern { matching(name) } else { Ok(vec![path.to_path_buf()]) };
    }
    let embedded = embedded(name)?;
    let choose = |listing: &dyn Listing| data_files(listing, subset, split);
    if let Some(dir) = embedded.or_else(|| path.is_dir().then(|| path.to_path_buf())) {
        let files = choose(&LocalFolder::read_dir(&dir)?)
            .map_err(|message| Error::data(&dir, None, message, layout::LAYOUT_HINT))?;
        return Ok(files.into_iter().map(|file| dir.join(file)).collect());
    }
    let repo = Repo::parse(Kind::Dataset, name).ok_or_else(|| not_found(name, KEY, None))?;
    let (snapshot, files) = resolve(&repo, &choose).map_err(|problem| problem.into_error(name, KEY))?;
    Ok(files.into_iter().map(|file| snapshot.join(file)).collect())
}

/// The data files of a subset's split in a folder or repository.
fn data_files(listing: &dyn Listing, subset: Option<&str>, split: &str) -> Result<Vec<String>, String> {
    let subsets = card::subsets(&listing.read("README.md").unwrap_or_default())?;
    match card::choose(&subsets, subset)? {
        card::Choice::Files(subset) => subset.split(listing.paths(), split),
        card::Choice::ByName(folder) => layout::data_files(listing.paths(), folder, split),
        card::Choice::Folder(folder) => {
            let inside = |path: &&String| path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
            let paths: Vec<String> = listing.paths().iter().filter(inside).cloned().collect();
            layout::data_files(&paths, None, split)
        }
    }
}

/// The files that a pattern matches, by name. All of them are meant, whatever split their names speak of.
fn matching(pattern: &str) -> Result<Vec<PathBuf>> {
    let fault = |message: String| {
        let hint = "`*` is any part of a name, `**` any folders, `?` one character, `[ab]` one of these.";
        Error::data(pattern, None, message, hint)
    };
    let found = glob::glob(pattern).map_err(|error| fault(format!("not a pattern for files: {error}")))?;
    let files = found.collect::<Result<Vec<_>, _>>().map_err(|error| fault(error.to_string()))?;
    let files: Vec<PathBuf> = files.into_iter().filter(|file| file.is_file()).collect();
    if files.is_empty() { Err(fault("no file matches this pattern".into())) } else { Ok(files) }
}

/// A folder on disk.
struct LocalFolder {
    root: PathBuf,
    paths: Vec<String>,
}

impl LocalFolder {
    fn read_dir(root: &Path) -> Result<Self> {
        let mut paths = Vec::new();
        walk(root, "", 0, &mut paths)?;
        paths.sort();
        Ok(Self { root: root.to_path_buf(), paths })
    }
}

impl Listing for LocalFolder {
    fn paths(&self) -> &[String] {
        &self.paths
    }

    fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok()
    }
}

/// Collects files below `root`, hidden ones apart.
fn walk(root: &Path, inside: &str, depth: usize, paths: &mut Vec<String>) -> Result<()> {
    const MAX_DEPTH: usize = 6;
    let dir = root.join(inside);
    for entry in fs::read_dir(&dir).map_err(|e| Error::io(&dir, "read", e))? {
        let entry = entry.map_err(|e| Error::io(&dir, "read", e))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with('.') {
            continue;
        }
        let path = if inside.is_empty() { name } else { format!("{inside}/{name}") };
        if entry.path().is_dir() {
            if depth < MAX_DEPTH {
                walk(root, &path, depth + 1, paths)?;
            }
        } else {
            paths.push(path);
        }
    }
    Ok(())
}

/// Why a repository could not be had.
#[derive(Debug)]
enum Problem {
    /// Not in the cache, and the network is not to be asked, or can't be.
    Unreachable { why: String, hint: String },
    /// It is there, and isn't what is wanted.
    Wrong(String),
}

impl Problem {
    fn into_error(self, name: &str, key: &str) -> Error {
        match self {
            Problem::Unreachable { why, hint } => not_found(name, key, Some((why, hint))),
            Problem::Wrong(message) => Error::Hub {
                message: format!("`{name}`: {message}"),
                hint: if key == "data.name" { layout::LAYOUT_HINT.into() } else { String::new() },
            },
        }
    }
}

/// A snapshot folder, all wanted files in it, and their names.
type Found = (PathBuf, Vec<String>);

/// What is wanted of a repository, as it is on the hub now; from the cache where the hub can't be asked, or the
/// revision is a commit.
fn resolve(repo: &Repo, choose: &Choice) -> Result<Found, Problem> {
    let cached = cached(repo, choose);
    if offline() {
        return cached.map_err(|why| Problem::Unreachable {
            why: format!("`HF_HUB_OFFLINE` is set and the cache can't serve it: {why}"),
            hint: format!(
                "Unset `HF_HUB_OFFLINE`, or put it into the cache (`hf download {}{}`), or name a local folder.",
                repo.id,
                if repo.kind == Kind::Dataset { " --repo-type dataset" } else { "" }
            ),
        });
    }
    if repo.is_commit() && cached.is_ok() {
        return cached.map_err(Problem::Wrong);
    }
    match (newest(repo, cached.as_ref().ok(), choose), cached) {
        (Err(Problem::Unreachable { why, .. }), Ok(found)) => {
            tracing::warn!("taking {} from the cache, {}: {why}", repo.id, found.0.display());
            Ok(found)
        }
        (newest, _) => newest,
    }
}

/// What is wanted of a repository, if the cache has all of it.
fn cached(repo: &Repo, choose: &Choice) -> Result<Found, String> {
    let dir = cache::snapshot(repo).ok_or("not in the local cache")?;
    let mut listing = LocalFolder::read_dir(&dir).map_err(|e| e.to_string())?;
    if let Some(paths) = cache::listing(repo, &dir) {
        listing.paths = paths;
    }
    let files = choose(&listing)?;
    match files.iter().find(|file| !dir.join(file).exists()) {
        Some(missing) => Err(format!("`{missing}` is not in the local cache")),
        None => Ok((dir, files)),
    }
}

#[cfg(feature = "hub")]
fn newest(repo: &Repo, cached: Option<&Found>, choose: &Choice) -> Result<Found, Problem> {
    remote::newest(repo, cached, choose)
}

#[cfg(not(feature = "hub"))]
fn newest(_: &Repo, _: Option<&Found>, _: &Choice) -> Result<Found, Problem> {
    Err(Problem::Unreachable {
        why: "this program was built without the feature `hub`".into(),
        hint: "Build it with `--features hub`, or name a local folder.".into(),
    })
}

/// As in huggingface_hub (constants.py): 1, true, yes or on.
fn offline() -> bool {
    let set = |key| {
        std::env::var(key).is_ok_and(|v| ["1", "true", "yes", "on"].contains(&v.to_lowercase().as_str()))
    };
    set("HF_HUB_OFFLINE") || set("TRANSFORMERS_OFFLINE") || set("HF_DATASETS_OFFLINE")
}

/// Nothing by that name: says where was looked and what is nearly called so.
fn not_found(name: &str, key: &str, hub: Option<(String, String)>) -> Error {
    if name.trim().is_empty() {
        let hint = "name a file, a folder, or a hub id such as `owner/name`".into();
        return Error::Hub { message: format!("`{key}` is empty"), hint };
    }
    let (tried, mut hint) = match hub {
        Some((why, hint)) => {
            (format!("no such file or folder, and it could not be had from the hub: {why}"), hint)
        }
        None => (missing(Path::new(name)), String::new()),
    };
    if let Some(near) = nearest_sibling(Path::new(name)) {
        hint = format!("Did you mean `{}`?", near.display()) + if hint.is_empty() { "" } else { " " } + &hint;
    }
    let message = format!("`{key}`: {name} not found: {tried}");
    Error::Hub { message, hint }
}

/// Why nothing can be read at `path`.
fn missing(path: &Path) -> String {
    match (path.metadata(), path.is_symlink()) {
        (Ok(_), _) => "it is neither a file nor a folder".into(),
        (Err(error), true) => format!("it is a link that can't be followed: {error}"),
        (Err(error), false) if error.kind() == io::ErrorKind::PermissionDenied => error.to_string(),
        (Err(_), false) => "no such file or folder (and a hub name is `owner/name`)".into(),
    }
}

/// The folder of something compiled in, written to the cache of this program the first time.
fn embedded(name: &str) -> Result<Option<PathBuf>> {
    match assets::ASSETS.iter().find(|asset| asset.name == name) {
        Some(asset) => cache::write_asset(asset).map(Some),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests;
