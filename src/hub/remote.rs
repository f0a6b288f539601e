//! Downloads from the hub into its local cache, laid out as Python's tools do: `blobs/` by content,
//! `snapshots/COMMIT/` of links to them, `refs/` from branches to commits.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;
use ureq::http::HeaderMap;
use xxhash_rust::xxh3::xxh3_64;

use super::cache::{self, Kind, Repo};
use super::http::{Answer, Failure, Hub, chain, escaped};
use super::{Choice, Found, Listing, Problem};
use crate::terminal::Bar;

/// The snapshot of a repository's revision as the hub has it now, with what `choose` wants of it. What is cached of
/// that commit stays.
pub(super) fn newest(repo: &Repo, cached: Option<&Found>, choose: &Choice) -> Result<Found, Problem> {
    let hub = Hub::new(cached.is_some());
    let (commit, paths) = commit(&hub, repo)?;
    if let Some(found) = cached.filter(|(dir, _)| dir.file_name().is_some_and(|name| *name == *commit)) {
        return Ok(found.clone());
    }
    let unwritable = |e: std::io::Error| Problem::Unreachable {
        why: format!("cannot write to the cache {}: {e}", repo.folder().display()),
        hint: "Set `HF_HOME` to a folder that can be written to.".into(),
    };
    let _alone = alone(repo).map_err(unwritable)?;
    let snapshot = repo.folder().join("snapshots").join(&commit);
    let remote = Remote { hub: Hub::new(false), repo, commit, snapshot, paths };
    let files = choose(&remote).map_err(Problem::Wrong)?;
    // Before the files: a download that is cut off must not look whole.
    cache::write_listing(repo, &remote.commit, &remote.paths).map_err(unwritable)?;
    for file in &files {
        remote.fetch(file)?;
    }
    cache::write_ref(repo, &remote.commit).map_err(unwritable)?;
    Ok((remote.snapshot, files))
}

/// The commit of a revision, and the paths in it.
fn commit(hub: &Hub, repo: &Repo) -> Result<(String, Vec<String>), Problem> {
    let asked = || format!("{}/{} at `{}`", hub.endpoint, repo.id, repo.revision);
    let path =
        format!("/api/{}/{}/revision/{}", repo.kind.plural(), repo.id, repo.revision.replace('/', "%2F"));
    let mut answer = hub.get(&path, 0).map_err(|failure| unreachable_hub(&asked(), &failure))?;
    let odd = |why: String| unreachable_hub(&asked(), &Failure::Broken(why));
    let text = answer.response.body_mut().with_config().limit(1 << 28).read_to_string();
    let text = text.map_err(|e| odd(chain(&e)))?;
    let info: Value = serde_json::from_str(&text).map_err(|e| odd(format!("no JSON came back: {e}")))?;
    let commit = info["sha"].as_str().filter(|sha| sha.chars().all(|c| c.is_ascii_alphanumeric()));
    let files = info["siblings"].as_array();
    let (Some(commit), Some(files)) = (commit, files) else {
        return Err(odd("the answer holds no `sha` or no `siblings`".into()));
    };
    let names = files.iter().filter_map(|file| file["rfilename"].as_str());
    // A path is to stay inside the snapshot.
    let inside = |path: &&str| path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    let mut paths: Vec<String> = names.filter(inside).map(str::to_string).collect();
    paths.sort();
    Ok((commit.to_string(), paths))
}

/// One process at a time downloads a repository; the others wait, and find it in the cache.
fn alone(repo: &Repo) -> std::io::Result<File> {
    fs::create_dir_all(repo.folder())?;
    let lock = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(repo.folder().join(".embertune-lock"))?;
    if let Err(fs::TryLockError::WouldBlock) = lock.try_lock() {
        tracing::info!("another process downloads {}: waiting for it", repo.id);
        lock.lock()?;
    }
    Ok(lock)
}

/// A commit of a repository, whose files are fetched when they are wanted.
struct Remote<'a> {
    hub: Hub,
    repo: &'a Repo,
    commit: String,
    snapshot: PathBuf,
    paths: Vec<String>,
}

impl Listing for Remote<'_> {
    fn paths(&self) -> &[String] {
        &self.paths
    }

    fn read(&self, path: &str) -> Option<String> {
        if !self.paths.iter().any(|p| p == path) {
            return None;
        }
        match self.fetch(path) {
            Ok(()) => fs::read_to_string(self.snapshot.join(path)).ok(),
            Err(problem) => {
                tracing::warn!("{path}: {problem:?}");
                None
            }
        }
    }
}

/// What a file's headers say.
struct About {
    /// All of it.
    size: Option<u64>,
    /// A name for its content.
    etag: Option<String>,
}

impl Remote<'_> {
    /// Puts a file into the snapshot, unless it is there. What an earlier process left unfinished is gone on with.
    fn fetch(&self, path: &str) -> Result<(), Problem> {
        let target = self.snapshot.join(path);
        if target.exists() {
            return Ok(());
        }
        let blobs = self.repo.folder().join("blobs");
        let name = format!("{:016x}.embertune-part", xxh3_64(format!("{}/{path}", self.commit).as_bytes()));
        let part = blobs.join(name);
        let asked = format!("{}/{} ({path})", self.hub.endpoint, self.repo.id);
        let failed = |failure: &Failure| unreachable_hub(&asked, failure);
        let broken = |e: std::io::Error| failed(&Failure::Broken(e.to_string()));
        fs::create_dir_all(&blobs).map_err(broken)?;
        let about = self.download(path, &part).map_err(|failure| failed(&failure))?;
        keep(&part, &blobs, about.etag.as_deref(), &target).map_err(broken)
    }

    /// Fills `part`, from where it ends, until it is as long as the hub says.
    fn download(&self, path: &str, part: &Path) -> Result<About, Failure> {
        const TRIES: usize = 5;
        let url = format!(
            "{}{}/resolve/{}/{}",
            if self.repo.kind == Kind::Dataset { "/datasets/" } else { "/" },
            self.repo.id,
            self.commit,
            path.split('/').map(escaped).collect::<Vec<_>>().join("/")
        );
        let (mut in_vain, mut furthest) = (0, 0);
        loop {
            let have = fs::metadata(part).map_or(0, |m| m.len());
            let answer = self.hub.get(&url, have)?;
            let (about, ended) = receive(answer, part, have, path);
            let now = fs::metadata(part).map_or(0, |m| m.len());
            if ended.is_ok() && about.size.is_none_or(|size| size == now) {
                return Ok(about);
            }
            let why = match (ended, about.size) {
                (Err(why), _) => why,
                (Ok(()), Some(size)) => format!("{now} bytes came, and the hub says that it has {size}"),
                (Ok(()), None) => "it ended early".into(),
            };
            in_vain = if now > furthest { 0 } else { in_vain + 1 };
            furthest = furthest.max(now);
            if now > about.size.unwrap_or(u64::MAX) || in_vain >= TRIES {
                let _ = fs::remove_file(part);
                return Err(Failure::Broken(why));
            }
            tracing::warn!("{path}: {why}; going on from byte {now}");
            std::thread::sleep(std::time::Duration::from_millis(200 << in_vain));
        }
    }
}

/// Writes what an answer holds behind the first `have` bytes of `part`.
fn receive(answer: Answer, part: &Path, have: u64, path: &str) -> (About, Result<(), String>) {
    let Answer { mut response, first } = answer;
    let number = |headers: &HeaderMap, name: &str| -> Option<u64> {
        headers.get(name)?.to_str().ok()?.rsplit('/').next()?.trim().parse().ok()
    };
    let text = |headers: &HeaderMap, name: &str| -> Option<String> {
        let value = headers.get(name)?.to_str().ok()?;
        let plain = value.trim_start_matches("W/").trim_matches('"').to_string();
        plain.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)).then_some(plain)
    };
    let headers = response.headers().clone();
    let partial = response.status().as_u16() == 206;
    let length = number(&headers, "content-length").filter(|_| response.status().as_u16() == 200);
    let size = number(&first, "x-linked-size").or(number(&headers, "content-range")).or(length);
    let etag = text(&first, "x-linked-etag").or(text(&headers, "etag")).filter(|etag| !etag.is_empty());
    let about = About { size, etag };
    if response.status().as_u16() == 416 {
        // Nothing lies behind what is there: it is whole, or it is none of this file.
        let whole = about.size == Some(have);
        let removed = if whole { Ok(()) } else { fs::remove_file(part).map_err(|e| e.to_string()) };
        return (about, removed.and(if whole { Ok(()) } else { Err("what was there didn't fit".into()) }));
    }
    let from = if partial { have } else { 0 };
    let ended = write_body(response.body_mut().as_reader(), part, from, path, about.size);
    (about, ended)
}

fn write_body(
    mut body: impl Read,
    part: &Path,
    from: u64,
    path: &str,
    size: Option<u64>,
) -> Result<(), String> {
    let told = |e: std::io::Error| e.to_string();
    let file = OpenOptions::new().create(true).write(true).truncate(false).open(part).map_err(told)?;
    file.set_len(from).map_err(told)?;
    let mut file = OpenOptions::new().append(true).open(part).map_err(told)?;
    let mut progress = Progress::new("downloading", path, size, from);
    let mut buffer = vec![0; 1 << 17];
    loop {
        match body.read(&mut buffer) {
            Ok(0) => return file.sync_all().map_err(told),
            Ok(n) => {
                file.write_all(&buffer[..n]).map_err(told)?;
                progress.add(n as u64);
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(chain(&e)),
        }
    }
}

/// Moves a whole file to its name.
fn keep(part: &Path, blobs: &Path, etag: Option<&str>, target: &Path) -> std::io::Result<()> {
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    #[cfg(unix)]
    if let Some(etag) = etag {
        let blob = blobs.join(etag);
        fs::rename(part, &blob)?;
        let root = blobs.parent().unwrap_or(blobs);
        let above =
            target.strip_prefix(root).map_or(0, |inside| inside.components().count().saturating_sub(1));
        let up: PathBuf = std::iter::repeat_n("..", above).collect();
        return std::os::unix::fs::symlink(up.join("blobs").join(etag), target);
    }
    let _ = (blobs, etag);
    fs::rename(part, target)
}

/// A bar on a terminal; elsewhere a line at the start and for each tenth of a large file.
pub(super) struct Progress {
    bar: Bar,
    path: String,
    size: Option<u64>,
    done: u64,
    told: u64,
}

impl Progress {
    /// `doing`: "downloading" or "uploading".
    pub fn new(doing: &str, path: &str, size: Option<u64>, done: u64) -> Self {
        let progress =
            Self { bar: Bar::of_bytes(path, size, done), path: path.into(), size, done, told: done };
        if progress.bar.is_hidden() {
            let size = size.map_or(String::new(), |size| format!(", {:.1} MiB", mib(size)));
            tracing::info!("{doing} {path}{size}");
        }
        progress
    }

    pub fn add(&mut self, bytes: u64) {
        const LARGE: u64 = 1 << 26;
        self.done += bytes;
        self.bar.set(self.done);
        if let Some(size) = self.size.filter(|size| *size >= LARGE && self.bar.is_hidden())
            && self.done - self.told >= size / 10
        {
            self.told = self.done;
            tracing::info!("{}: {:.0} of {:.0} MiB", self.path, mib(self.done), mib(size));
        }
    }
}

pub(super) fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn unreachable_hub(asked: &str, failure: &Failure) -> Problem {
    Problem::Unreachable {
        why: format!("{asked} was asked for and it failed: {failure}"),
        hint: failure.hint().into(),
    }
}
