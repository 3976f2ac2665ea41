//! New connections at a steady pace, as a client that wants something now: when none was to be had.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::command::run;
use crate::load::exchange;
use crate::namespace::Namespace;

/// What the client knows of the VIP before each connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neighbour {
    /// What it has learned: it follows announcements alone.
    Warm,
    /// Nothing: it asks by ARP each time, as one that has just booted.
    Cold,
}

/// A connection attempt with a small exchange.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// When it began.
    pub at: Instant,
    /// Why it failed.
    pub failure: Option<String>,
}

/// Connects every 50 ms until it is finished.
#[derive(Debug)]
pub struct Prober {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<Attempt>>>,
}

impl Prober {
    /// How far apart the attempts are.
    pub const PERIOD: Duration = Duration::from_millis(50);
    /// How long one may take: a SYN that was lost is sent again after a second, which is too late.
    const LIMIT: Duration = Duration::from_millis(900);

    /// Begins to ask `target` for `path` from `namespace`. With [`Neighbour::Cold`] the namespace forgets its
    /// neighbours: no other prober there stays warm, and no other cold one gets its answers.
    pub fn start(
        namespace: &Namespace,
        target: (Ipv4Addr, u16),
        path: &str,
        neighbour: Neighbour,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let (namespace, path) = (namespace.clone(), path.to_owned());
        let target = SocketAddrV4::new(target.0, target.1);
        let thread = std::thread::spawn(move || {
            // Threads and commands begun there stay there.
            namespace.enter(|| probe(target, &path, neighbour, &stopped))?
        });
        Self { stop, thread }
    }

    /// Ends it; its attempts in their order.
    ///
    /// # Errors
    /// When it could not try.
    pub fn finish(self) -> Result<Vec<Attempt>> {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(attempts) => attempts,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Makes the namespace ask anew for an address.
fn forget(address: Ipv4Addr) -> Result<()> {
    const ATTEMPTS: usize = 5;
    let flush = || {
        let address = address.to_string();
        run(Command::new("ip").args(["neigh", "flush", "to", &address]))
    };
    // An entry that the kernel itself drops meanwhile is an error to `ip`, sometimes without a word.
    let is_done = (1..ATTEMPTS).any(|_| flush().is_ok());
    if is_done { Ok(()) } else { flush().map(drop) }
}

/// One attempt. A host that nobody answers for is told after three seconds, and so beyond the limit: sooner it is only
/// the next attempt's flush, which takes the question away that this one waits on. No machine does that to itself.
fn attempt(target: SocketAddrV4, path: &str, neighbour: Neighbour) -> Result<()> {
    let begin = Instant::now();
    loop {
        let left = Prober::LIMIT.saturating_sub(begin.elapsed());
        let done = exchange(None, target, path, left.max(Duration::from_millis(1)));
        let Err(error) = &done else { return done };
        let cause = error.downcast_ref::<std::io::Error>();
        let is_flushed = cause.is_some_and(|e| e.kind() == std::io::ErrorKind::HostUnreachable);
        if neighbour == Neighbour::Warm || !is_flushed || begin.elapsed() > Prober::LIMIT {
            return done;
        }
    }
}

fn probe(
    target: SocketAddrV4,
    path: &str,
    neighbour: Neighbour,
    stop: &AtomicBool,
) -> Result<Vec<Attempt>> {
    std::thread::scope(|scope| {
        let mut running = Vec::new();
        let mut next = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            if neighbour == Neighbour::Cold {
                forget(*target.ip())?;
            }
            // Each on its own: one that waits holds no other up.
            running.push(scope.spawn(move || {
                let at = Instant::now();
                let failure = attempt(target, path, neighbour).err();
                Attempt {
                    at,
                    failure: failure.map(|error| format!("{error:#}")),
                }
            }));
            next += Prober::PERIOD;
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        Ok(running
            .into_iter()
            .map(|attempt| match attempt.join() {
                Ok(attempt) => attempt,
                Err(panic) => std::panic::resume_unwind(panic),
            })
            .collect())
    })
}
