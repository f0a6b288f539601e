//! Downloads from the hub into its local cache, through the crate `hf-hub`.

use std::fs;
use std::path::PathBuf;

use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, RepoType};

use super::cache::{self, Kind, Repo};
use super::{Choice, Listing, Problem};

/// Fetches what `choose` wants of a repository's main branch: the snapshot folder and the files' names.
pub(super) fn download(repo: &Repo, choose: &Choice) -> Result<(PathBuf, Vec<String>), Problem> {
    let (api, endpoint) = api().map_err(|e| unreachable_hub(repo, "the hub", &e))?;
    let kind = match repo.kind {
        Kind::Model => RepoType::Model,
        Kind::Dataset => RepoType::Dataset,
    };
    let handle = api.repo(hf_hub::Repo::new(repo.id.clone(), kind));
    let info = handle.info().map_err(|e| unreachable_hub(repo, &endpoint, &e))?;
    let mut paths: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
    paths.sort();
    let files = choose(&Remote { handle: &handle, paths }).map_err(Problem::Wrong)?;

    let mark = repo.unfinished_mark();
    let write = |e: std::io::Error| Problem::Unreachable {
        why: format!("cannot write to the cache {}: {e}", repo.folder().display()),
        hint: "Set `HF_HOME` to a folder that can be written to.".into(),
    };
    fs::create_dir_all(repo.folder()).and_then(|()| fs::write(&mark, "")).map_err(write)?;
    // Twice, as files that were cached of an older commit are no part of the new snapshot.
    for _ in 0..2 {
        for file in &files {
            handle.get(file).map_err(|e| unreachable_hub(repo, &format!("{endpoint} ({file})"), &e))?;
        }
        let snapshot = cache::newest_snapshot(repo);
        if let Some(dir) = snapshot.filter(|dir| files.iter().all(|file| dir.join(file).exists())) {
            fs::remove_file(&mark).map_err(write)?;
            return Ok((dir, files));
        }
    }
    Err(Problem::Unreachable {
        why: "the repository changed while it was downloaded".into(),
        hint: "Start again.".into(),
    })
}

/// A repository whose files are fetched when they are read.
struct Remote<'a> {
    handle: &'a ApiRepo,
    paths: Vec<String>,
}

impl Listing for Remote<'_> {
    fn paths(&self) -> &[String] {
        &self.paths
    }

    fn read(&self, path: &str) -> Option<String> {
        self.paths
            .iter()
            .any(|p| p == path)
            .then(|| self.handle.get(path).ok())?
            .and_then(|p| fs::read_to_string(p).ok())
    }
}

/// hf-hub reads `HF_HOME` and `HF_ENDPOINT` itself, but neither `HF_HUB_CACHE` nor `HF_TOKEN`.
fn api() -> Result<(Api, String), ApiError> {
    let endpoint =
        cache::variable("HF_ENDPOINT").map(|v| v.to_string_lossy().trim_end_matches('/').to_string());
    let endpoint = endpoint.unwrap_or_else(|| "https://huggingface.co".into());
    let token_file = || {
        let path = cache::variable("HF_TOKEN_PATH").unwrap_or_else(|| cache::hf_home().join("token"));
        fs::read_to_string(path).ok()
    };
    let token = cache::variable("HF_TOKEN").map(|v| v.to_string_lossy().into_owned()).or_else(token_file);
    let token = token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty());
    let api = ApiBuilder::from_cache(Cache::new(cache::hub_cache()))
        .with_endpoint(endpoint.clone())
        .with_token(token)
        .with_retries(3)
        .with_progress(true)
        .build()?;
    Ok((api, endpoint))
}

fn unreachable_hub(repo: &Repo, endpoint: &str, error: &ApiError) -> Problem {
    let mut text = error.to_string();
    // The chain holds the reason: a host that isn't found, a connection refused.
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    let hint = match text.as_str() {
        t if t.contains("401") || t.contains("403") => {
            "The repository is private, gated or doesn't exist: check the name, accept its terms on the hub, \
             and set `HF_TOKEN`."
        }
        t if t.contains("404") => "Check the name.",
        t if t.contains("429") => "The hub asks to wait: try again later, or set `HF_TOKEN`.",
        _ => "Check the connection, or name a local folder; what is in the hub's cache works without one.",
    };
    let why = format!("{endpoint} was asked for `{}` and it failed: {text}", repo.id);
    Problem::Unreachable { why, hint: hint.into() }
}
