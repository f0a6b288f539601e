//! A server on this machine that speaks the hub's protocol, and makes what mistakes it is told to.
#![allow(dead_code)] // each test program uses a part

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// What goes wrong with one request.
#[derive(Clone)]
pub enum Fault {
    /// This status, with these headers.
    Status(u16, Vec<(&'static str, String)>),
    /// So many bytes of the body, then the connection is closed.
    Cut(usize),
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
}

#[derive(Clone, Debug)]
pub struct Asked {
    pub host: String,
    pub path: String,
    pub range: Option<String>,
    pub token: Option<String>,
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
        let asked = Asked {
            host: header("host").unwrap_or_default(),
            path: head[0].split(' ').nth(1).unwrap_or_default().to_string(),
            range: header("range"),
            token: header("authorization"),
        };
        let fault = {
            let mut state = state.lock().unwrap();
            state.asked.push(asked.clone());
            let found = state.faults.iter().position(|(of, _)| asked.path.contains(of.as_str()));
            // One that stands alone stays.
            found.map(|at| {
                let of = state.faults[at].0.clone();
                let more = state.faults.iter().filter(|(other, _)| *other == of).count() > 1;
                if more { state.faults.remove(at).1 } else { state.faults[at].1.clone() }
            })
        };
        if answer(&stream, port, state, &asked, fault).is_none() {
            return;
        }
    }
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
