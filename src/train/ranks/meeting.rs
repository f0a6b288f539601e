//! Where the processes of a run meet, and how each learns that another has failed.
//!
//! Rank 0 listens at `MASTER_ADDR:MASTER_PORT`; the others connect, say which rank they are, and stay connected. Over
//! these lines go a few bytes at the start (NCCL's unique id) and then only signs of life: gradients never do.
//! A rank that fails says so; one that is killed is missed by its closed connection, one whose machine is gone by
//! its silence. All others hear of it and end.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::environment::Place;
use crate::{Error, Result};

/// From one sign of life to the next.
const BEAT: Duration = Duration::from_secs(3);
/// A rank that is silent for so long is gone.
const SILENCE: Duration = Duration::from_secs(15);
/// A rank that doesn't see by itself that another has failed ends after so long.
const GRACE: Duration = Duration::from_secs(10);

/// Longest line that is read.
const MAX_LINE: u64 = 1 << 16;

/// A line between two ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Message {
    Hello { version: String, rank: usize, ranks: usize },
    Refused(String),
    Welcome,
    Bytes(Vec<u8>),
    Alive,
    Failed { rank: usize, message: String },
    Done,
}

/// The connections of this process: rank 0 has one to each other rank, the others have one to rank 0.
pub(super) struct Meeting {
    rank: usize,
    peers: Vec<Peer>,
    shared: Arc<Shared>,
}

/// A connection, and the rank at its other end.
struct Peer {
    rank: usize,
    write: Arc<Mutex<TcpStream>>,
    read: Option<BufReader<TcpStream>>,
}

/// What the threads that listen tell the run, and the run them.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    failed: Option<(usize, String)>,
    /// The run is over: nobody need be heard any more.
    left: bool,
}

impl Shared {
    fn fail(&self, rank: usize, message: String) {
        let mut state = lock(&self.state);
        if !state.left {
            state.failed.get_or_insert((rank, message));
        }
        self.changed.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn send(write: &Mutex<TcpStream>, message: &Message) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message).expect("messages are plain data");
    line.push(b'\n');
    lock(write).write_all(&line)
}

/// The next line; `None` at the end of the connection.
fn receive(read: &mut BufReader<TcpStream>) -> std::io::Result<Option<Message>> {
    let mut line = String::new();
    if read.by_ref().take(MAX_LINE).read_line(&mut line)? == 0 {
        return Ok(None);
    }
    serde_json::from_str(&line).map(Some).map_err(|e| std::io::Error::new(ErrorKind::InvalidData, e))
}

impl Meeting {
    /// Waits until all ranks are there.
    ///
    /// # Errors
    /// Some aren't there after `limit` (which ones), rank 0 can't be reached, the port is taken.
    pub fn new(place: &Place, limit: Duration) -> Result<Self> {
        let deadline = Instant::now() + limit;
        let peers = match place.rank {
            0 => host(place, deadline, limit)?,
            _ => vec![join(place, deadline, limit)?],
        };
        Ok(Self { rank: place.rank, peers, shared: Arc::default() })
    }

    /// Rank 0's bytes for all; before [`Meeting::watch`].
    ///
    /// # Errors
    /// A rank has left.
    pub fn share(&mut self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        let lost = |rank: usize| Error::rank(rank, "its connection ended while the ranks met");
        if self.rank == 0 {
            for peer in &self.peers {
                send(&peer.write, &Message::Bytes(bytes.clone())).map_err(|_| lost(peer.rank))?;
            }
            return Ok(bytes);
        }
        let read = self.peers[0].read.as_mut().expect("nobody listens yet");
        match receive(read) {
            Ok(Some(Message::Bytes(bytes))) => Ok(bytes),
            Ok(Some(Message::Failed { rank, message })) => Err(Error::rank(rank, message)),
            _ => Err(lost(0)),
        }
    }

    /// Listens for the others' failures from now on, and gives signs of life. Should this process go on for
    /// [`GRACE`] after a failure (it may hang in a driver), `end` is called, which ends it.
    pub fn watch(&mut self, end: impl FnOnce(Error) + Send + 'static) {
        for peer in &mut self.peers {
            if let Some(read) = peer.read.take() {
                let (rank, shared) = (peer.rank, self.shared.clone());
                thread::spawn(move || listen(rank, read, &shared));
            }
        }
        let writes: Vec<_> = self.peers.iter().map(|peer| peer.write.clone()).collect();
        let shared = self.shared.clone();
        thread::spawn(move || {
            if let Some((rank, message)) = beat(&writes, &shared) {
                end(Error::rank(rank, message));
            }
        });
    }

    /// The first failure that this process has heard of.
    pub fn failure(&self) -> Option<(usize, String)> {
        lock(&self.shared.state).failed.clone()
    }

    /// Tells the others that this rank failed, or that it is done, and listens no more.
    pub fn leave(&self, failed: Option<String>) {
        let last = {
            let mut state = lock(&self.shared.state);
            if let Some(message) = failed {
                state.failed.get_or_insert((self.rank, message));
            }
            state.left = true;
            match state.failed.clone() {
                Some((rank, message)) => Message::Failed { rank, message },
                None => Message::Done,
            }
        };
        self.shared.changed.notify_all();
        self.peers.iter().for_each(|peer| drop(send(&peer.write, &last)));
    }
}

/// Hears one other rank until it is done.
fn listen(rank: usize, mut read: BufReader<TcpStream>, shared: &Shared) {
    let _ = read.get_ref().set_read_timeout(Some(SILENCE));
    loop {
        match receive(&mut read) {
            Ok(Some(Message::Failed { rank, message })) => return shared.fail(rank, message),
            Ok(Some(Message::Done)) => return,
            Ok(Some(_)) => {}
            Ok(None) => return shared.fail(rank, "ended without a word (killed, or out of memory?)".into()),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return shared.fail(
                    rank,
                    format!("has been silent for {} s: is its machine there?", SILENCE.as_secs()),
                );
            }
            Err(e) => return shared.fail(rank, format!("its connection broke: {e}")),
        }
    }
}

/// Signs of life until the run is over; a failure is passed on. Returns it if the run doesn't end by itself.
fn beat(writes: &[Arc<Mutex<TcpStream>>], shared: &Shared) -> Option<(usize, String)> {
    let mut state = lock(&shared.state);
    while !state.left && state.failed.is_none() {
        state = shared.changed.wait_timeout(state, BEAT).unwrap_or_else(PoisonError::into_inner).0;
        if state.failed.is_none() {
            drop(state);
            writes.iter().for_each(|write| drop(send(write, &Message::Alive)));
            state = lock(&shared.state);
        }
    }
    let (rank, message) = state.failed.clone()?;
    drop(state);
    let news = Message::Failed { rank, message: message.clone() };
    writes.iter().for_each(|write| drop(send(write, &news)));
    let until = Instant::now() + GRACE;
    let mut state = lock(&shared.state);
    while !state.left {
        let left = until.checked_duration_since(Instant::now());
        let Some(left) = left else { return Some((rank, message)) };
        state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    None
}

/// Rank 0: takes one connection from each of the others.
fn host(place: &Place, deadline: Instant, limit: Duration) -> Result<Vec<Peer>> {
    let (name, port) = (&place.master.0, place.master.1);
    let listener = TcpListener::bind(("0.0.0.0", port)).map_err(|e| {
        Error::train(
            format!("rank 0 can't listen at port {port}: {e}"),
            "set `MASTER_PORT` to a free port, for all ranks",
        )
    })?;
    listener.set_nonblocking(true).map_err(|e| Error::io(format!("port {port}"), "listen at", e))?;
    let mut peers: Vec<Peer> = Vec::new();
    while peers.len() + 1 < place.ranks {
        match listener.accept() {
            Ok((stream, _)) => peers.extend(greet(place, &peers, stream)),
            Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(20)),
            Err(_) => {
                let there = |rank: &usize| peers.iter().any(|peer| peer.rank == *rank);
                let missing: Vec<_> = (1..place.ranks).filter(|r| !there(r)).map(|r| r.to_string()).collect();
                return Err(Error::train(
                    format!(
                        "of {} ranks, rank{} {} did not come to {name}:{port} within {} s",
                        place.ranks,
                        if missing.len() == 1 { "" } else { "s" },
                        missing.join(", "),
                        limit.as_secs()
                    ),
                    "look at their logs: did they start, and do they reach this machine? `dist_timeout_seconds` says \
                     how long to wait",
                ));
            }
        }
    }
    for peer in &peers {
        send(&peer.write, &Message::Welcome)
            .map_err(|_| Error::rank(peer.rank, "its connection ended while the ranks met"))?;
    }
    Ok(peers)
}

/// A connection that names a rank which isn't there yet; others are sent away.
fn greet(place: &Place, peers: &[Peer], stream: TcpStream) -> Option<Peer> {
    stream.set_nonblocking(false).ok()?;
    // Whoever is no rank of ours must not hold up the others.
    stream.set_read_timeout(Some(BEAT)).ok()?;
    stream.set_nodelay(true).ok()?;
    let write = Arc::new(Mutex::new(stream.try_clone().ok()?));
    let mut read = BufReader::new(stream);
    let Ok(Some(Message::Hello { version, rank, ranks })) = receive(&mut read) else { return None };
    let problem = if version != env!("CARGO_PKG_VERSION") {
        Some(format!("version {version} of embertune, rank 0 has {}", env!("CARGO_PKG_VERSION")))
    } else if ranks != place.ranks || rank == 0 || rank >= ranks {
        Some(format!("rank {rank} of {ranks}, rank 0 expects {} ranks", place.ranks))
    } else if peers.iter().any(|peer| peer.rank == rank) {
        Some(format!("there are two ranks {rank}"))
    } else {
        None
    };
    if let Some(problem) = problem {
        let _ = send(&write, &Message::Refused(problem));
        return None;
    }
    read.get_ref().set_read_timeout(None).ok()?;
    Some(Peer { rank, write, read: Some(read) })
}

/// The others: connect to rank 0, which may not be there yet, and wait until all are.
fn join(place: &Place, deadline: Instant, limit: Duration) -> Result<Peer> {
    let (name, port) = (&place.master.0, place.master.1);
    let rank = place.rank;
    let stream = loop {
        match connect(name, port) {
            Ok(stream) => break stream,
            Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(200)),
            Err(e) => {
                let message =
                    format!("rank {rank} found no rank 0 at {name}:{port} within {} s: {e}", limit.as_secs());
                return Err(Error::train(
                    message,
                    "look at rank 0's log; `MASTER_ADDR` and `MASTER_PORT` name its machine and a port that is open \
                     between the machines",
                ));
            }
        }
    };
    let broke = |e: std::io::Error| Error::rank(0, format!("its connection broke while the ranks met: {e}"));
    stream.set_nodelay(true).map_err(broke)?;
    let write = Arc::new(Mutex::new(stream.try_clone().map_err(broke)?));
    let version = env!("CARGO_PKG_VERSION").to_string();
    send(&write, &Message::Hello { version, rank, ranks: place.ranks }).map_err(broke)?;
    let mut read = BufReader::new(stream);
    match receive(&mut read).map_err(broke)? {
        Some(Message::Welcome) => Ok(Peer { rank: 0, write, read: Some(read) }),
        Some(Message::Refused(why)) => Err(Error::train(
            format!("rank 0 at {name}:{port} sent rank {rank} away: {why}"),
            "start all ranks alike, and set `MASTER_PORT` to a port that no other run uses",
        )),
        _ => Err(Error::rank(0, "ended before all ranks were there")),
    }
}

fn connect(name: &str, port: u16) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::new(ErrorKind::NotFound, "no such host");
    for address in (name, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::ranks::Launcher;

    fn place(rank: usize, ranks: usize, port: u16) -> Place {
        let master = ("127.0.0.1".into(), port);
        Place { rank, ranks, local_rank: rank, master, launcher: Launcher::Torchrun }
    }

    fn free_port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    /// All of them, met.
    fn meet(ranks: usize) -> Vec<Meeting> {
        let port = free_port();
        let threads: Vec<_> = (0..ranks)
            .rev()
            .map(|rank| {
                thread::spawn(move || Meeting::new(&place(rank, ranks, port), Duration::from_secs(20)))
            })
            .collect();
        let mut all: Vec<_> = threads.into_iter().map(|t| t.join().unwrap().unwrap()).collect();
        all.reverse();
        all
    }

    fn heard(meeting: &Meeting) -> (usize, String) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(failure) = meeting.failure() {
                return failure;
            }
            assert!(Instant::now() < deadline, "nothing was heard");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn ranks_meet_and_hear_of_a_failure() {
        let mut all = meet(3);
        let others: Vec<_> = all.drain(1..).collect();
        let share = |mut m: Meeting| thread::spawn(move || (m.share(Vec::new()).unwrap(), m));
        let shared: Vec<_> = others.into_iter().map(share).collect();
        assert_eq!(all[0].share(vec![1, 2, 3]).unwrap(), [1, 2, 3]);
        for thread in shared {
            let (bytes, meeting) = thread.join().unwrap();
            assert_eq!(bytes, [1, 2, 3]);
            all.push(meeting);
        }
        all.iter_mut().for_each(|m| m.watch(|_| {}));
        all[2].leave(Some("out of memory".into()));
        // By way of rank 0.
        for meeting in &all[..2] {
            assert_eq!(heard(meeting), (2, "out of memory".into()));
        }
    }

    #[test]
    fn a_rank_that_is_gone_is_missed_and_one_that_is_done_is_not() {
        let mut all = meet(3);
        all.iter_mut().for_each(|m| m.watch(|_| {}));
        all[1].leave(None);
        thread::sleep(Duration::from_millis(100));
        assert_eq!(all[0].failure(), None);
        // As the kernel does for a process that is killed.
        let gone = all.pop().unwrap();
        lock(&gone.peers[0].write).shutdown(std::net::Shutdown::Both).unwrap();
        let (rank, message) = heard(&all[0]);
        assert!(rank == 2 && message.contains("without a word"), "{rank}: {message}");
    }

    #[test]
    fn a_rank_that_does_not_end_is_ended() {
        let mut all = meet(2);
        let (ended, end) = std::sync::mpsc::channel();
        all[0].watch(move |error| ended.send(error.to_string()).unwrap());
        all[1].leave(Some("boom".into()));
        assert!(end.recv_timeout(GRACE + Duration::from_secs(5)).unwrap().contains("boom"));
    }

    #[test]
    fn who_is_missing_is_named() {
        let port = free_port();
        let limit = Duration::from_millis(700);
        let third = thread::spawn(move || Meeting::new(&place(2, 4, port), limit).err().unwrap().to_string());
        let error = Meeting::new(&place(0, 4, port), limit).err().unwrap();
        assert!(error.to_string().contains("of 4 ranks, ranks 1, 3 did not come"), "{error}");
        assert!(third.join().unwrap().contains("before all ranks were there"));
        let error = Meeting::new(&place(1, 2, free_port()), Duration::from_millis(300)).err().unwrap();
        assert!(error.to_string().contains("rank 1 found no rank 0 at 127.0.0.1"), "{error}");
    }

    #[test]
    fn strangers_are_sent_away_and_do_not_hold_up_the_others() {
        let port = free_port();
        let host = thread::spawn(move || Meeting::new(&place(0, 2, port), Duration::from_secs(20)));
        let mut stranger = loop {
            if let Ok(stream) = connect("127.0.0.1", port) {
                break stream;
            }
        };
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let error = Meeting::new(&place(5, 9, port), Duration::from_secs(20)).err().unwrap();
        assert!(error.to_string().contains("expects 2 ranks"), "{error}");
        Meeting::new(&place(1, 2, port), Duration::from_secs(20)).unwrap();
        host.join().unwrap().unwrap();
    }
}
