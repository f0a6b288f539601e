//! A sign of life after each step: a GET of a URL, from a thread of its own.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use ureq::Agent;

/// An answer isn't waited for longer.
const LONGEST: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Heartbeat(SyncSender<()>);

impl Heartbeat {
    /// Gets `url` each time that it is asked to.
    pub fn start(url: String) -> Self {
        // One beat may wait while one is under way: a slow server hears less often.
        let (sender, beats) = sync_channel(1);
        std::thread::spawn(move || beat_on(&url, &beats));
        Self(sender)
    }

    /// A step is done. Never waits.
    pub fn beat(&self) {
        // Where one waits already, or the thread is gone, there is nothing to add.
        let _ = self.0.try_send(());
    }
}

fn beat_on(url: &str, beats: &Receiver<()>) {
    let agent = Agent::config_builder()
        .timeout_global(Some(LONGEST))
        .user_agent(concat!("embertune/", env!("CARGO_PKG_VERSION")))
        .build()
        .new_agent();
    let mut failed = false;
    while beats.recv().is_ok() {
        match agent.get(url).call() {
            Ok(_) => failed = false,
            Err(error) => {
                if !std::mem::replace(&mut failed, true) {
                    tracing::warn!("`heartbeat.url`: {error}");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_step_is_a_request() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let heartbeat = Heartbeat::start(format!("http://{}/ping/abc", server.local_addr().unwrap()));
        for _ in 0..2 {
            heartbeat.beat();
            let (mut stream, _) = server.accept().unwrap();
            let mut request = [0; 512];
            let length = stream.read(&mut request).unwrap();
            let request = String::from_utf8_lossy(&request[..length]).into_owned();
            assert!(request.starts_with("GET /ping/abc HTTP/1.1"), "{request}");
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").unwrap();
        }
    }

    #[test]
    fn a_server_that_does_not_answer_costs_no_time() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let heartbeat = Heartbeat::start(format!("http://{}/", server.local_addr().unwrap()));
        let clock = Instant::now();
        for _ in 0..1000 {
            heartbeat.beat();
        }
        drop(heartbeat);
        assert!(clock.elapsed() < LONGEST / 2, "{:?}", clock.elapsed());
    }

    #[test]
    fn a_server_that_is_gone_is_no_trouble() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        drop(server);
        let heartbeat = Heartbeat::start(format!("http://{address}/"));
        heartbeat.beat();
        std::thread::sleep(Duration::from_millis(100));
        heartbeat.beat();
    }
}
