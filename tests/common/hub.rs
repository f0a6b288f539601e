//! A server on this machine that speaks the hub's protocol, and makes what mistakes it is told to.
#![allow(dead_code)] // each test program uses a part

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base64::Engine;
use serde_json::{Value, json};

/// What goes wrong with one request.
#[derive(Clone)]
pub enum Fault {
    /// This status, with these headers.
    Status(u16, Vec<(&'static str, String)>),
    /// So many bytes of the body, then the connection is closed. Of a body that is sent here, too.
    Cut(usize),
    /// All is done that was asked, and the connection is closed without an answer.
    Lost,
    /// So many bytes of the body, then silence.
    Stall(usize),
    /// The headers speak of so many bytes more than there are.
    Longer(usize),
}

/// What the server holds, and what it will do wrong.
#[derive(Default)]
pub struct State {
    /// Revision → commit.
    pub revisions: BTreeMap<String, String>,
    /// Commit → path → content.
    pub commits: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// Faults of requests whose address holds the text; used up in order, the last of a text never.
    pub faults: Vec<(String, Fault)>,
    /// Requests so far: address, range, token.
    pub asked: Vec<Asked>,
    /// Repositories of models, and whether they are private.
    pub repositories: BTreeMap<String, bool>,
    /// Large files by their sha256.
    pub objects: BTreeMap<String, Vec<u8>>,
    /// Pieces of large files, by their addresses.
    pub pieces: BTreeMap<String, Vec<u8>>,
    /// Large files are wanted in pieces of so many bytes.
    pub piece: Option<usize>,
}

#[derive(Clone, Debug)]
pub struct Asked {
    pub method: String,
    pub host: String,
    pub path: String,
    pub range: Option<String>,
    pub token: Option<String>,
    /// What the head says of the body's length.
    pub length: Option<usize>,
    pub body: Vec<u8>,
}

/// Stops answering when it is dropped.
pub struct Server {
    pub endpoint: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    /// A hub with one repository, `owner/data` or `owner/model`, whose `main` holds these files.
    pub fn new(files: &[(&str, &str)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = shared.clone();
                std::thread::spawn(move || serve(stream, port, &shared));
            }
        });
        let server = Self { endpoint: format!("http://127.0.0.1:{port}"), state };
        server.commit("main", 'a', files);
        server
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Puts files into a commit (forty times the letter) that a revision is at from now on.
    pub fn commit(&self, revision: &str, letter: char, files: &[(&str, &str)]) {
        let commit = letter.to_string().repeat(40);
        let files = files.iter().map(|(path, text)| (path.to_string(), text.as_bytes().to_vec()));
        self.state().commits.insert(commit.clone(), files.collect());
        self.state().revisions.insert(revision.into(), commit);
    }

    pub fn fault(&self, of: &str, fault: Fault) {
        self.state().faults.push((of.into(), fault));
    }

    /// Requests for addresses that hold this text.
    pub fn asked(&self, of: &str) -> Vec<Asked> {
        self.state().asked.iter().filter(|asked| asked.path.contains(of)).cloned().collect()
    }
}

fn serve(stream: TcpStream, port: u16, state: &Mutex<State>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    loop {
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if line.trim().is_empty() {
                break;
            }
            head.push(line.trim().to_string());
        }
        let header = |name: &str| {
            head.iter().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                key.eq_ignore_ascii_case(name).then(|| value.trim().to_string())
            })
        };
        let mut asked = Asked {
            method: head[0].split(' ').next().unwrap_or_default().to_string(),
            length: header("content-length").and_then(|length| length.parse().ok()),
            body: Vec::new(),
            host: header("host").unwrap_or_default(),
            path: head[0].split(' ').nth(1).unwrap_or_default().to_string(),
            range: header("range"),
            token: header("authorization"),
        };
        let fault = next_fault(&asked.path, state);
        let wanted = match fault {
            Some(Fault::Cut(bytes)) if asked.length.is_some() => bytes,
            _ => asked.length.unwrap_or(0),
        };
        asked.body.resize(wanted, 0);
        if reader.read_exact(&mut asked.body).is_err() {
            return;
        }
        state.lock().unwrap().asked.push(asked.clone());
        if asked.length.is_some_and(|length| wanted < length) {
            stream.shutdown(std::net::Shutdown::Both).ok();
            return;
        }
        if answer(&stream, port, state, &asked, fault).is_none() {
            return;
        }
    }
}

/// The fault of this request.
fn next_fault(path: &str, state: &Mutex<State>) -> Option<Fault> {
    let mut state = state.lock().unwrap();
    let at = state.faults.iter().position(|(of, _)| path.contains(of.as_str()))?;
    // One that stands alone stays.
    let of = state.faults[at].0.clone();
    let more = state.faults.iter().filter(|(other, _)| *other == of).count() > 1;
    Some(if more { state.faults.remove(at).1 } else { state.faults[at].1.clone() })
}

/// `None` ends the connection.
fn answer(
    mut stream: &TcpStream,
    port: u16,
    state: &Mutex<State>,
    asked: &Asked,
    fault: Option<Fault>,
) -> Option<()> {
    if let Some(Fault::Status(status, headers)) = &fault
        && *status != 0
    {
        return send(stream, *status, headers, b"no");
    }
    let path = asked.path.split('?').next().unwrap_or_default();
    if let Some((status, headers, body)) = written(&mut state.lock().unwrap(), port, path, asked) {
        if let Some(Fault::Lost) = fault {
            stream.shutdown(std::net::Shutdown::Both).ok();
            return None;
        }
        return send(stream, status, &headers, body.to_string().as_bytes());
    }
    if path.contains("/revision/") {
        let body = {
            let state = state.lock().unwrap();
            let revision = path.rsplit('/').next().unwrap_or_default();
            let commit = state.revisions.get(revision).cloned();
            let commit = commit.or_else(|| state.commits.contains_key(revision).then(|| revision.into()))?;
            let names = state.commits[&commit].keys().map(|name| serde_json::json!({ "rfilename": name }));
            serde_json::json!({ "sha": commit, "siblings": names.collect::<Vec<_>>() }).to_string()
        };
        return send(stream, 200, &[], body.as_bytes());
    }
    let (commit, name) = path.split_once("/resolve/").or(path.split_once("/cdn/"))?.1.split_once('/')?;
    let Some(content) = state.lock().unwrap().commits.get(commit).and_then(|c| c.get(name)).cloned() else {
        return send(stream, 404, &[], b"no");
    };
    let etag = format!("{:016x}", xxhash_rust::xxh3::xxh3_64(&content));
    let longer = if let Some(Fault::Longer(bytes)) = fault { bytes } else { 0 };
    let size = content.len() + longer;
    // Large files lie elsewhere.
    if path.contains("/resolve/") && !name.ends_with(".md") {
        let headers = [
            ("Location", format!("http://localhost:{port}/cdn/{commit}/{name}")),
            ("X-Linked-Size", size.to_string()),
            ("X-Linked-Etag", format!("\"{etag}\"")),
            ("X-Repo-Commit", commit.to_string()),
        ];
        return send(stream, 302, &headers, b"");
    }
    let from = asked.range.as_deref().and_then(|r| r.strip_prefix("bytes=")?.split('-').next()?.parse().ok());
    let from: usize = from.unwrap_or(0);
    if from >= content.len() && from > 0 {
        return send(stream, 416, &[("Content-Range", format!("bytes */{}", content.len()))], b"");
    }
    let (status, range) = match asked.range {
        Some(_) => (206, format!("bytes {from}-{}/{}", content.len() - 1, content.len())),
        None => (200, String::new()),
    };
    let mut headers = vec![("ETag", format!("\"{etag}\""))];
    if status == 206 {
        headers.push(("Content-Range", range));
    }
    let body = &content[from..];
    match fault {
        Some(Fault::Cut(bytes)) => {
            send_part(stream, status, &headers, body, bytes)?;
            stream.shutdown(std::net::Shutdown::Both).ok();
            None
        }
        Some(Fault::Stall(bytes)) => {
            send_part(stream, status, &headers, body, bytes)?;
            std::thread::sleep(Duration::from_secs(60));
            None
        }
        _ => {
            send_part(stream, status, &headers, body, body.len())?;
            stream.flush().ok()
        }
    }
}

type Written = (u16, Vec<(&'static str, String)>, Value);

/// The side of the hub that is written to; `None` for what is read.
fn written(state: &mut State, port: u16, path: &str, asked: &Asked) -> Option<Written> {
    let plain = |status: u16, body: Value| Some((status, Vec::new(), body));
    let no = |status: u16, why: &str| plain(status, json!({ "error": why }));
    let body = || serde_json::from_slice::<Value>(&asked.body).unwrap_or(Value::Null);
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    match (asked.method.as_str(), &parts[..]) {
        ("GET", ["api", "models", owner, name]) => match state.repositories.get(&format!("{owner}/{name}")) {
            Some(private) => plain(200, json!({ "id": format!("{owner}/{name}"), "private": private })),
            None => no(404, "Repository not found"),
        },
        ("POST", ["api", "repos", "create"]) => {
            let body = body();
            let text = |key: &str| body[key].as_str().unwrap_or_default().to_string();
            let id = format!("{}/{}", text("organization"), text("name"));
            assert!(["", "model"].contains(&&*text("type")), "{body}");
            if state.repositories.contains_key(&id) {
                return no(409, "You already created this model repo");
            }
            state.repositories.insert(id.clone(), text("visibility") == "private");
            plain(200, json!({ "url": format!("http://127.0.0.1:{port}/{id}") }))
        }
        ("POST", ["api", "validate-yaml"]) => {
            let refused = body()["content"].as_str().expect("the card").contains("base_model: ./");
            let errors =
                refused.then(|| json!({ "message": "\"base_model\" with value \"./\" is not valid" }));
            let status = if refused { 400 } else { 200 };
            plain(status, json!({ "errors": errors.into_iter().collect::<Vec<_>>(), "warnings": [] }))
        }
        ("POST", ["api", "models", _, _, "branch", branch]) => {
            if state.revisions.contains_key(*branch) {
                return no(409, "Reference already exists");
            }
            let commit = state.revisions["main"].clone();
            state.revisions.insert(branch.to_string(), commit);
            plain(200, Value::Null)
        }
        ("POST", ["api", "models", owner, name, what @ ("preupload" | "commit"), revision]) => {
            if !state.repositories.contains_key(&format!("{owner}/{name}")) {
                return no(404, "Repository not found");
            }
            if !state.revisions.contains_key(*revision) {
                return no(404, &format!("Invalid rev id: {revision}"));
            }
            if *what == "commit" {
                let at = format!("http://127.0.0.1:{port}/{owner}/{name}");
                return committed(state, &at, revision, &asked.body);
            }
            let body = body();
            let files = body["files"].as_array().expect("a list of files").iter().map(|file| {
                let path = file["path"].as_str().expect("a path");
                assert!(file["sample"].is_string() && file["size"].is_u64(), "{file}");
                let mode = if path.ends_with(".safetensors") { "lfs" } else { "regular" };
                json!({ "path": path, "uploadMode": mode, "shouldIgnore": path.contains("ignored"), "oid": null })
            });
            plain(200, json!({ "files": files.collect::<Vec<_>>() }))
        }
        ("POST", [_, repository, "info", "lfs", "objects", "batch"]) if repository.ends_with(".git") => {
            let body = body();
            assert_eq!((&body["operation"], &body["hash_algo"]), (&json!("upload"), &json!("sha256")));
            let objects = body["objects"].as_array().expect("objects").iter().map(|o| wanted(state, port, o));
            plain(200, json!({ "transfer": "basic", "objects": objects.collect::<Vec<_>>() }))
        }
        ("PUT", ["store", oid]) => match stored(state, oid, &asked.body) {
            true if asked.length.is_some() => plain(200, Value::Null),
            _ => no(400, "the content is another, or of no length"),
        },
        ("PUT", ["piece", _, _]) => {
            let etag = format!("\"{:016x}\"", xxhash_rust::xxh3::xxh3_64(&asked.body));
            state.pieces.insert(path.into(), asked.body.clone());
            Some((200, vec![("ETag", etag)], Value::Null))
        }
        ("POST", ["complete", oid]) => {
            let body = body();
            let parts = body["parts"].as_array().expect("parts").iter().enumerate().map(|(n, part)| {
                assert_eq!(part["partNumber"], n + 1);
                let piece = &state.pieces[&format!("/piece/{oid}/{}", n + 1)];
                let etag = format!("\"{:016x}\"", xxhash_rust::xxh3::xxh3_64(piece));
                assert_eq!(part["etag"], etag);
                piece.clone()
            });
            let content = parts.collect::<Vec<_>>().concat();
            if stored(state, oid, &content) { plain(200, Value::Null) } else { no(400, "another content") }
        }
        ("POST", ["verify"]) => {
            let body = body();
            let object = state.objects.get(body["oid"].as_str().expect("an oid"));
            let same = object.is_some_and(|content| body["size"] == content.len());
            if same { plain(200, Value::Null) } else { no(404, "not stored") }
        }
        _ => None,
    }
}

/// Where a large file is wanted; nowhere if it is there.
fn wanted(state: &State, port: u16, object: &Value) -> Value {
    let (oid, size) = (object["oid"].as_str().unwrap(), object["size"].as_u64().unwrap() as usize);
    if state.objects.contains_key(oid) {
        return json!({ "oid": oid, "size": size });
    }
    // Files lie on another server, which is none of the token's business; who vouches for them is the hub.
    let store = format!("http://localhost:{port}");
    let mut header = serde_json::Map::new();
    let href = match state.piece {
        Some(piece) if size > piece => {
            header.insert("chunk_size".into(), piece.to_string().into());
            for n in 1..=size.div_ceil(piece) {
                header.insert(n.to_string(), format!("{store}/piece/{oid}/{n}").into());
            }
            format!("{store}/complete/{oid}")
        }
        _ => format!("{store}/store/{oid}"),
    };
    json!({ "oid": oid, "size": size, "authenticated": true, "actions": {
        "upload": { "href": href, "header": header },
        "verify": { "href": format!("http://127.0.0.1:{port}/verify") },
    } })
}

fn stored(state: &mut State, oid: &str, content: &[u8]) -> bool {
    let same = super::sha256::hex(content) == oid;
    if same {
        state.objects.insert(oid.into(), content.to_vec());
    }
    same
}

/// A commit of lines of JSON, over what the revision holds.
fn committed(state: &mut State, at: &str, revision: &str, body: &[u8]) -> Option<Written> {
    let mut files = state.commits[&state.revisions[revision]].clone();
    let text = std::str::from_utf8(body).expect("text");
    let mut lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line of JSON"));
    let header = lines.next().expect("a header");
    assert!(header["key"] == "header" && header["value"]["summary"].is_string(), "{header}");
    for line in lines {
        let value = &line["value"];
        let path = value["path"].as_str().expect("a path").to_string();
        let content = match line["key"].as_str() {
            Some("file") => {
                assert_eq!(value["encoding"], "base64");
                let text = value["content"].as_str().expect("content");
                base64::engine::general_purpose::STANDARD.decode(text).expect("base64")
            }
            Some("lfsFile") => {
                assert_eq!(value["algo"], "sha256");
                match state.objects.get(value["oid"].as_str().expect("an oid")) {
                    Some(content) if value["size"] == content.len() => content.clone(),
                    _ => {
                        return Some((
                            400,
                            Vec::new(),
                            json!({ "error": format!("{path} was not uploaded") }),
                        ));
                    }
                }
            }
            other => panic!("{other:?}"),
        };
        files.insert(path, content);
    }
    let commit = format!("{:040x}", state.commits.len());
    state.commits.insert(commit.clone(), files);
    state.revisions.insert(revision.into(), commit.clone());
    let url = format!("{at}/commit/{commit}");
    Some((200, Vec::new(), json!({ "success": true, "commitOid": commit, "commitUrl": url })))
}

fn send(stream: &TcpStream, status: u16, headers: &[(&str, String)], body: &[u8]) -> Option<()> {
    send_part(stream, status, headers, body, body.len())
}

/// A whole head, and so many bytes of the body.
fn send_part(
    mut stream: &TcpStream,
    status: u16,
    headers: &[(&str, String)],
    body: &[u8],
    bytes: usize,
) -> Option<()> {
    let mut head = format!("HTTP/1.1 {status} Some reason\r\nContent-Length: {}\r\n", body.len());
    headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(b"\r\n").ok()?;
    stream.write_all(&body[..bytes.min(body.len())]).ok()?;
    stream.flush().ok()
}
