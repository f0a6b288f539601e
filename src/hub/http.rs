//! Requests to the hub, both ways: patience with servers that are busy, redirects that don't carry the token away.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use ureq::http::Response;
use ureq::{Agent, Body, RequestBuilder, SendBody};

use super::cache;

/// How often a request is tried that may well succeed later.
const TRIES: u32 = 5;
/// The longest that a server's `Retry-After` is followed.
const LONGEST_WAIT: Duration = Duration::from_secs(120);
/// A transfer that goes on longer is begun anew where it stopped.
const LONGEST_BODY: Duration = Duration::from_secs(600);

/// What was answered.
pub(super) struct Answer {
    pub response: Response<Body>,
    /// Headers of the hub itself, where it sent on to another server.
    pub first: ureq::http::HeaderMap,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// The server refused: status, and what it said about it.
    Refused(u16, String),
    /// It didn't come to an answer.
    Broken(String),
    /// It wants a longer pause than one would make.
    Busy(u64),
}

/// The hub, as the environment names it.
pub(super) struct Hub {
    agent: Agent,
    pub endpoint: String,
    token: Option<String>,
    tries: u32,
}

impl Hub {
    /// `impatient`: one try, where there is something to fall back on.
    pub fn new(impatient: bool) -> Self {
        let variable = |key| cache::variable(key).map(|v| v.to_string_lossy().into_owned());
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let token_file = || {
            let path = cache::variable("HF_TOKEN_PATH").unwrap_or_else(|| cache::hf_home().join("token"));
            std::fs::read_to_string(path).ok()
        };
        let token = variable("HF_TOKEN").or_else(token_file).map(|token| token.trim().to_string());
        let wait = Duration::from_secs(if impatient { 5 } else { 15 });
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(wait))
            .timeout_recv_response(Some(2 * wait))
            .timeout_recv_body(Some(LONGEST_BODY))
            .user_agent(concat!("embertune/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        let token = token.filter(|token| !token.is_empty());
        let endpoint = endpoint.trim_end_matches('/').to_string();
        Self { agent, endpoint, token, tries: if impatient { 1 } else { TRIES } }
    }

    /// Whether there is a token to show.
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Asks until there is an answer, or no hope of one. `from`: the first byte that is wanted.
    pub fn get(&self, path: &str, from: u64) -> Result<Answer, Failure> {
        let url = format!("{}{path}", self.endpoint);
        self.patiently(|| self.follow(&url, |url| self.ask(url, from)))
    }

    /// Posts `body`, which is of the media type `kind`.
    pub fn post(&self, url: &str, kind: &str, body: &[u8]) -> Result<Answer, Failure> {
        let send = |url: &str| {
            let request = self.agent.post(url).header("Content-Type", kind).header("Accept", accepted(kind));
            self.signed(request, url).send(body)
        };
        self.patiently(|| self.follow(url, send))
    }

    /// Puts a part of a file where the hub said that it is wanted, with the headers that it named; `told` hears of
    /// each piece's bytes (a try that begins anew tells them again). The length goes ahead: stores of files want it.
    pub fn put(
        &self,
        url: &str,
        headers: &[(String, String)],
        (file, part): (&Path, Range<u64>),
        told: &mut dyn FnMut(u64),
    ) -> Result<Answer, Failure> {
        self.patiently(|| {
            let mut file = File::open(file)?;
            file.seek(SeekFrom::Start(part.start))?;
            let length = part.end - part.start;
            let mut reader = Told { reader: file.take(length), told: &mut *told };
            let request = self.agent.put(url).header("Content-Length", length.to_string());
            let request = headers.iter().fold(request, |request, (name, value)| request.header(name, value));
            let response = self.signed(request, url).send(SendBody::from_reader(&mut reader))?;
            Ok(Answer { first: response.headers().clone(), response })
        })
    }

    /// Asks until there is an answer, or no hope of one.
    fn patiently(&self, mut ask: impl FnMut() -> Result<Answer, ureq::Error>) -> Result<Answer, Failure> {
        let mut tried = 0;
        loop {
            tried += 1;
            let failure = match ask() {
                Ok(answer) => match answer.response.status().as_u16() {
                    200..300 | 416 => return Ok(answer),
                    status => refused(status, answer),
                },
                Err(error) => (Failure::Broken(chain(&error)), None),
            };
            let (failure, asked) = failure;
            let hopeless = matches!(failure, Failure::Refused(status, _) if status < 500 && status != 429);
            if hopeless || tried >= self.tries {
                return Err(failure);
            }
            let wait = asked.unwrap_or(Duration::from_millis(250) * 2u32.pow(tried - 1));
            if wait > LONGEST_WAIT {
                return Err(Failure::Busy(wait.as_secs()));
            }
            tracing::warn!("{failure}; trying again in {:.1} s", wait.as_secs_f64());
            std::thread::sleep(wait);
        }
    }

    /// One request and the redirects that it leads to.
    fn follow(
        &self,
        url: &str,
        ask: impl Fn(&str) -> Result<Response<Body>, ureq::Error>,
    ) -> Result<Answer, ureq::Error> {
        let mut url = url.to_string();
        let mut first = None;
        for _ in 0..8 {
            let response = ask(&url)?;
            let location = response.headers().get("location").and_then(|l| l.to_str().ok());
            let next = location.filter(|_| response.status().is_redirection()).map(|l| absolute(l, &url));
            first.get_or_insert_with(|| response.headers().clone());
            match next {
                Some(next) => url = next,
                None => return Ok(Answer { response, first: first.unwrap_or_default() }),
            }
        }
        Err(ureq::Error::TooManyRedirects)
    }

    fn ask(&self, url: &str, from: u64) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(url).header("Accept-Encoding", "identity");
        if from > 0 {
            request = request.header("Range", format!("bytes={from}-"));
        }
        self.signed(request, url).call()
    }

    /// A request to the hub itself, with the token. The servers that files lie on are none of its business.
    fn signed<T>(&self, request: RequestBuilder<T>, url: &str) -> RequestBuilder<T> {
        let ours = url.strip_prefix(&self.endpoint).is_some_and(|path| path.starts_with('/'));
        match self.token.as_ref().filter(|_| ours) {
            Some(token) => request.header("Authorization", format!("Bearer {token}")),
            None => request,
        }
    }
}

/// What is wanted back for a body of this kind: large files have a media type of their own, both ways.
fn accepted(kind: &str) -> &str {
    if kind.starts_with("application/vnd.") { kind } else { "application/json" }
}

/// A reader whose bytes are told of.
struct Told<'a, R> {
    reader: R,
    told: &'a mut dyn FnMut(u64),
}

impl<R: Read> Read for Told<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let bytes = self.reader.read(buffer)?;
        (self.told)(bytes as u64);
        Ok(bytes)
    }
}

/// A `Location`, which may be a path on the same server.
fn absolute(location: &str, url: &str) -> String {
    if let Some(other) = location.strip_prefix("//") {
        let scheme = url.split_once("//").map_or("https:", |(scheme, _)| scheme);
        return format!("{scheme}//{other}");
    }
    if !location.starts_with('/') {
        return location.into();
    }
    let server = url.match_indices('/').nth(2).map_or(url, |(end, _)| &url[..end]);
    format!("{server}{location}")
}

/// A refusal, and how long the server asks to wait.
fn refused(status: u16, mut answer: Answer) -> (Failure, Option<Duration>) {
    let header = |name: &str| answer.response.headers().get(name)?.to_str().ok().map(str::to_string);
    let wait = header("retry-after").and_then(|s| s.trim().parse().ok()).map(Duration::from_secs);
    let said = header("x-error-message").or_else(|| {
        let text = answer.response.body_mut().read_to_string().ok()?;
        let json: serde_json::Value = serde_json::from_str(&text).ok()?;
        let several = json["errors"].as_array().into_iter().flatten();
        let several: Vec<&str> = several.filter_map(|error| error["message"].as_str()).collect();
        json["error"].as_str().map(str::to_string).or((!several.is_empty()).then(|| several.join("; ")))
    });
    (Failure::Refused(status, said.unwrap_or_default()), wait)
}

/// A name as a part of a URL.
pub(super) fn escaped(name: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~".contains(&b);
    let byte = |b: u8| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") };
    name.bytes().map(byte).collect()
}

/// An error with its causes: a host that isn't found, a connection refused.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Refused(status, said) if said.is_empty() => write!(f, "the hub answered {status}"),
            Failure::Refused(status, said) => write!(f, "the hub answered {status}: {said}"),
            Failure::Broken(why) => f.write_str(why),
            Failure::Busy(seconds) => write!(f, "the hub is busy and asks to wait {seconds} s"),
        }
    }
}

impl Failure {
    /// How to mend it.
    pub fn hint(&self) -> &'static str {
        match self {
            Failure::Refused(401 | 403, _) => {
                "The repository is private, gated or doesn't exist: check the name, accept its terms on the hub, \
                 and set `HF_TOKEN`."
            }
            Failure::Refused(404, _) => "Check the name, and the revision behind `@` if there is one.",
            Failure::Refused(429, _) | Failure::Busy(_) => {
                "The hub asks to wait: try again later, or set `HF_TOKEN`."
            }
            _ => {
                "Check the connection, or name a local folder; what is in the hub's cache works without one."
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_may_be_paths() {
        assert_eq!(absolute("/b?c", "http://x:1/a/d"), "http://x:1/b?c");
        assert_eq!(absolute("https://y/b", "http://x/a"), "https://y/b");
        assert_eq!(absolute("//y/b", "http://x/a"), "http://y/b");
    }
}
