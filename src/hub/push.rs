//! Uploads to the hub by its HTTP protocol, as huggingface_hub 2.4 does (`_commit_api.py`, `lfs.py`): the repository is
//! made if it isn't there, the hub says which files are large, those go to where it sends them, named by their sha256,
//! and one commit makes all of it visible at once. Until then nothing of it is.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::cache::Repo;
use super::http::{Answer, Failure, Hub, chain, escaped};
use super::remote::Progress;
use super::upload::UploadFile;
use super::{Destination, Pushed, Upload};
use crate::error::{Error, Result};

const JSON: &str = "application/json";
/// The media type of git's large files.
const LFS: &str = "application/vnd.git-lfs+json";
/// As many files as the hub takes in one request.
const MOST_FILES: usize = 256;

/// A push under way.
struct Push<'a> {
    hub: Hub,
    repo: &'a Repo,
    upload: &'a Upload,
}

/// A file, and how the hub wants it.
struct Wanted<'a> {
    file: &'a UploadFile,
    /// The sha256 of a large one.
    large: Option<String>,
}

/// Uploads what goes, as one commit.
///
/// # Errors
/// No token, no right to write, a name or a file that the hub doesn't take, no connection: nothing has changed then.
pub(super) fn push(upload: &Upload, repo: &Repo, to: &Destination) -> Result<Pushed> {
    let push = Push { hub: Hub::new(false), repo, upload };
    if !push.hub.has_token() {
        let message = format!("there is no token to push to `{}` with", repo.id);
        let hint =
            "make one that may write (hub: Settings, Access Tokens) and set `HF_TOKEN`, or `hf auth login`";
        return Err(Error::Hub { message, hint: hint.into() });
    }
    push.card()?;
    push.repository(to.private)?;
    push.branch()?;
    let wanted = push.wanted()?;
    let sent = push.large(&wanted)?;
    let answer = push.commit(&wanted, &to.message)?;
    let commit = answer["commitOid"].as_str().unwrap_or_default().to_string();
    let url = format!("{}/{}", push.hub.endpoint, repo.id);
    let url = if repo.revision == "main" { url } else { format!("{url}/tree/{}", escaped(&repo.revision)) };
    Ok(Pushed { url, commit, sent })
}

impl Push<'_> {
    /// Lets the hub read the head of the card, which it would otherwise refuse when all else has been sent.
    fn card(&self) -> Result<()> {
        const CARD: &str = "README.md";
        if !self.upload.files.iter().any(|file| file.path == CARD) {
            return Ok(());
        }
        let path = self.upload.dir.join(CARD);
        let content = std::fs::read_to_string(&path).map_err(|e| Error::io(&path, "read", e))?;
        let body = json!({ "repoType": "model", "content": content });
        match self.post(&format!("{}/api/validate-yaml", self.hub.endpoint), JSON, &body) {
            Err(failure @ Failure::Refused(400, _)) => {
                Err(self.error("reading the card (`README.md`)", &failure))
            }
            // Whatever else is wrong, the requests that have to succeed will tell; not every hub knows this one.
            _ => Ok(()),
        }
    }

    /// Makes the repository, unless it is there.
    fn repository(&self, private: bool) -> Result<()> {
        let (owner, name) = self.repo.id.split_once('/').unwrap_or(("", &self.repo.id));
        let mut body = json!({ "name": name, "organization": owner, "type": "model" });
        if private {
            body["visibility"] = "private".into();
        }
        let made = self.post(&format!("{}/api/repos/create", self.hub.endpoint), JSON, &body);
        let about = || self.hub.get(&format!("/api/models/{}", self.repo.id), 0);
        match made {
            Ok(_) | Err(Failure::Refused(409, _)) => {}
            // Tokens for one repository may not make any.
            Err(Failure::Refused(401..=403, _)) if about().is_ok() => {}
            Err(failure) => return Err(self.error("making the repository", &failure)),
        }
        if private {
            let about = about().and_then(read).map_err(|f| self.error("looking at the repository", &f))?;
            if about["private"] != Value::Bool(true) {
                let hint =
                    "make it private on the hub (Settings), name another `--repo`, or leave `--private` out";
                let message = format!("`{}` is there already, and everyone can read it", self.repo.id);
                return Err(Error::Hub { message, hint: hint.into() });
            }
        }
        Ok(())
    }

    /// Makes the branch, unless it is there.
    fn branch(&self) -> Result<()> {
        let revision = &self.repo.revision;
        if revision == "main" || revision.starts_with("refs/") {
            return Ok(());
        }
        match self.post(&self.api("branch"), JSON, &json!({})) {
            // That it may not be made doesn't say that it isn't there: the commit will tell.
            Ok(_) | Err(Failure::Refused(403 | 409, _)) => Ok(()),
            Err(failure) => Err(self.error(&format!("making the branch `{revision}`"), &failure)),
        }
    }

    /// Asks how each file is wanted. What the hub's own rules leave out (its `.gitignore`) is left out.
    fn wanted(&self) -> Result<Vec<Wanted<'_>>> {
        let mut wanted = Vec::new();
        for files in self.upload.files.chunks(MOST_FILES) {
            let described = files.iter().map(|file| {
                let sample = self.first_bytes(&file.path)?;
                Ok(json!({ "path": file.path, "sample": STANDARD.encode(sample), "size": file.bytes }))
            });
            let body = json!({ "files": described.collect::<Result<Vec<Value>>>()? });
            let doing = "asking how the files are wanted";
            let answer = self.post(&self.api("preupload"), JSON, &body).map_err(|f| self.error(doing, &f))?;
            for file in files {
                let mut told = answer["files"].as_array().into_iter().flatten();
                let told = told.find(|told| told["path"] == file.path.as_str());
                let odd =
                    || self.error(doing, &Failure::Broken(format!("nothing is said of `{}`", file.path)));
                let told = told.ok_or_else(odd)?;
                if told["shouldIgnore"] == Value::Bool(true) {
                    tracing::warn!("{}: the repository's `.gitignore` leaves it out", file.path);
                    continue;
                }
                // Stores of large files don't take empty ones.
                let is_large = told["uploadMode"] == "lfs" && file.bytes > 0;
                let large = if is_large { Some(self.sha256(&file.path)?) } else { None };
                wanted.push(Wanted { file, large });
            }
        }
        Ok(wanted)
    }

    /// Sends the large files that the hub doesn't have; returns their bytes.
    fn large(&self, wanted: &[Wanted]) -> Result<u64> {
        let mut sent = 0;
        let large: Vec<(&UploadFile, &String)> =
            wanted.iter().filter_map(|wanted| Some((wanted.file, wanted.large.as_ref()?))).collect();
        for files in large.chunks(MOST_FILES) {
            let objects: Vec<Value> =
                files.iter().map(|(file, oid)| json!({ "oid": oid, "size": file.bytes })).collect();
            let body = json!({
                "operation": "upload", "transfers": ["basic", "multipart"], "hash_algo": "sha256",
                "ref": { "name": self.repo.revision }, "objects": objects,
            });
            let url = format!("{}/{}.git/info/lfs/objects/batch", self.hub.endpoint, self.repo.id);
            let doing = "asking where large files go";
            let answer = self.post(&url, LFS, &body).map_err(|f| self.error(doing, &f))?;
            for (file, oid) in files {
                let mut told = answer["objects"].as_array().into_iter().flatten();
                let told = told.find(|told| told["oid"] == oid.as_str());
                let odd =
                    || self.error(doing, &Failure::Broken(format!("nothing is said of `{}`", file.path)));
                sent += self.send(file, oid, told.ok_or_else(odd)?)?;
            }
        }
        Ok(sent)
    }

    /// Sends one large file to where the hub wants it; none of it if the hub has it.
    fn send(&self, file: &UploadFile, oid: &str, told: &Value) -> Result<u64> {
        let doing = format!("sending `{}`", file.path);
        let failed = |failure: Failure| self.error(&doing, &failure);
        if let Some(code) = told["error"]["code"].as_u64() {
            let said = told["error"]["message"].as_str().unwrap_or_default().to_string();
            return Err(failed(Failure::Refused(u16::try_from(code).unwrap_or(0), said)));
        }
        let actions = &told["actions"];
        let Some(url) = actions["upload"]["href"].as_str() else { return Ok(0) };
        let header = actions["upload"]["header"].as_object().into_iter().flatten();
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
        let header: Vec<(String, String)> = header.map(|(name, value)| (name.clone(), text(value))).collect();
        let piece = header.iter().find(|(name, _)| name == "chunk_size");
        match piece.map(|(_, bytes)| bytes.parse::<u64>()) {
            None => {
                let mut progress = Progress::new("uploading", &file.path, Some(file.bytes), 0);
                let from = (&*self.upload.dir.join(&file.path), 0..file.bytes);
                self.hub.put(url, &header, from, &mut |bytes| progress.add(bytes)).map_err(failed)?;
            }
            Some(Ok(piece)) if piece > 0 => {
                self.in_pieces(file, (oid, url), &header, piece).map_err(failed)?
            }
            Some(_) => return Err(failed(Failure::Broken("`chunk_size` is no number".into()))),
        }
        if let Some(verify) = actions["verify"]["href"].as_str() {
            self.post(verify, LFS, &json!({ "oid": oid, "size": file.bytes })).map_err(failed)?;
        }
        Ok(file.bytes)
    }

    /// A file as pieces, each to an address of its own; `done` hears what each was taken as.
    fn in_pieces(
        &self,
        file: &UploadFile,
        (oid, done): (&str, &str),
        header: &[(String, String)],
        piece: u64,
    ) -> Result<(), Failure> {
        let number = |(name, url): &(String, String)| Some((name.parse::<u64>().ok()?, url.clone()));
        let mut urls: Vec<(u64, String)> = header.iter().filter_map(number).collect();
        urls.sort();
        if urls.len() as u64 != file.bytes.div_ceil(piece) {
            let text = format!("{} addresses for {} bytes in pieces of {piece}", urls.len(), file.bytes);
            return Err(Failure::Broken(text));
        }
        let mut progress = Progress::new("uploading", &file.path, Some(file.bytes), 0);
        let mut parts = Vec::new();
        for (n, (_, url)) in urls.iter().enumerate() {
            let from = n as u64 * piece;
            let part = from..(from + piece).min(file.bytes);
            let path = self.upload.dir.join(&file.path);
            let answer = self.hub.put(url, &[], (&path, part), &mut |bytes| progress.add(bytes))?;
            let etag = answer.response.headers().get("etag").and_then(|etag| etag.to_str().ok());
            let etag = etag.filter(|etag| !etag.is_empty());
            let etag = etag.ok_or_else(|| Failure::Broken(format!("no `ETag` for piece {}", n + 1)))?;
            parts.push(json!({ "partNumber": n + 1, "etag": etag }));
        }
        self.post(done, LFS, &json!({ "oid": oid, "parts": parts })).map(drop)
    }

    /// All files at once. Where the answer was lost, the same files are committed again: they make the same tree.
    fn commit(&self, wanted: &[Wanted], message: &str) -> Result<Value> {
        let mut lines = vec![json!({ "key": "header", "value": { "summary": message, "description": "" } })];
        for Wanted { file, large } in wanted {
            lines.push(match large {
                Some(oid) => json!({ "key": "lfsFile", "value": {
                    "path": file.path, "algo": "sha256", "oid": oid, "size": file.bytes,
                } }),
                None => {
                    let path = self.upload.dir.join(&file.path);
                    let bytes = std::fs::read(&path).map_err(|e| Error::io(&path, "read", e))?;
                    json!({ "key": "file", "value": {
                        "path": file.path, "encoding": "base64", "content": STANDARD.encode(bytes),
                    } })
                }
            });
        }
        let body: String = lines.iter().flat_map(|line| [line.to_string(), "\n".into()]).collect();
        let answer = self.hub.post(&self.api("commit"), "application/x-ndjson", body.as_bytes());
        answer.and_then(read).map_err(|failure| self.error("committing", &failure))
    }

    fn api(&self, what: &str) -> String {
        let Repo { id, revision, .. } = self.repo;
        format!("{}/api/models/{id}/{what}/{}", self.hub.endpoint, escaped(revision))
    }

    fn post(&self, url: &str, kind: &str, body: &Value) -> Result<Value, Failure> {
        self.hub.post(url, kind, body.to_string().as_bytes()).and_then(read)
    }

    fn open(&self, path: &str) -> Result<File> {
        let path = self.upload.dir.join(path);
        File::open(&path).map_err(|e| Error::io(&path, "read", e))
    }

    fn first_bytes(&self, path: &str) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = self.open(path)?.take(512).read_to_end(&mut bytes);
        read.map_err(|e| Error::io(self.upload.dir.join(path), "read", e)).map(|_| bytes)
    }

    fn sha256(&self, path: &str) -> Result<String> {
        let mut file = self.open(path)?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer) {
                Ok(0) => return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
                Ok(bytes) => hash.update(&buffer[..bytes]),
                Err(e) => return Err(Error::io(Path::new(path), "read", e)),
            }
        }
    }

    fn error(&self, doing: &str, failure: &Failure) -> Error {
        let Repo { id, revision, .. } = self.repo;
        let at = format!("{}/{id} at `{revision}`", self.hub.endpoint);
        Error::Hub { message: format!("{at}: {doing} failed: {failure}"), hint: remedy(failure).into() }
    }
}

/// What mends a refusal.
fn remedy(failure: &Failure) -> &'static str {
    match failure {
        Failure::Refused(400 | 422, _) => "mend what the hub says about the name or the card (`README.md`)",
        Failure::Refused(401, _) => {
            "the token isn't known: make one that may write (hub: Settings, Access Tokens) and set `HF_TOKEN`, or \
             `hf auth login`"
        }
        Failure::Refused(402, _) => "the owner's plan has no room for it: see the hub's Settings, Billing",
        Failure::Refused(403, _) => {
            "the token may not write there: take one with the right `write` for this owner, or another `--repo`"
        }
        Failure::Refused(404, _) => {
            "there is no such repository or revision, or the token can't see it: check `--repo` and `--revision`"
        }
        Failure::Refused(409 | 412, _) => "someone else pushes there at the same time: run the command again",
        Failure::Refused(413, _) => {
            "it is larger than the hub takes: leave large files out, or write the model in a smaller type \
             (`embertune merge --dtype bfloat16`)"
        }
        Failure::Refused(429, _) | Failure::Busy(_) => {
            "the hub asks to wait: run the command again later, what has arrived isn't sent again"
        }
        _ => "check the connection and run the command again: what has arrived isn't sent again",
    }
}

/// An answer's JSON; an empty answer is `null`.
fn read(mut answer: Answer) -> Result<Value, Failure> {
    let text = answer.response.body_mut().with_config().limit(1 << 28).read_to_string();
    let text = text.map_err(|e| Failure::Broken(chain(&e)))?;
    if text.trim().is_empty() {
        return Ok(Value::Null);
    }
    // What only says that it worked need not be JSON.
    Ok(serde_json::from_str(&text).unwrap_or(Value::String(text)))
}
