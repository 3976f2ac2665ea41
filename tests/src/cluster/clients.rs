//! Clients that ask at a steady pace in the background, each time by a connection of its own, and remember
//! every answer.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::namespace::Namespace;

/// How many ask in turn: one that waits for an answer does not hinder the others.
const CLIENTS: u32 = 8;
/// How long a client waits to be connected, and for each part of the answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Running clients. Dropping the value ends them.
#[derive(Debug)]
pub struct Clients {
    enough: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<Vec<Request>>>>,
}

/// A request and what came of it.
#[derive(Clone, Debug)]
pub struct Request {
    /// When the client began to connect.
    pub begun: Instant,
    /// How long it took.
    pub took: Duration,
    /// Name of the pod that answered, or what went wrong.
    pub outcome: Result<String, String>,
}

/// All requests of some clients, by time.
#[derive(Clone, Debug)]
pub struct Requests(pub Vec<Request>);

impl Clients {
    /// Starts them in `namespace`: so many requests a second to a web server (`localhost/web:test`) at `target`.
    pub fn start(namespace: &Namespace, target: SocketAddr, per_second: u32) -> Self {
        let enough = Arc::new(AtomicBool::new(false));
        let pace = Duration::from_secs(1) / per_second;
        let begin = Instant::now();
        let threads = (0..CLIENTS).map(|number| {
            let (namespace, enough) = (namespace.clone(), Arc::clone(&enough));
            let mut next = begin + pace * number;
            let ask = move || {
                let mut requests = Vec::new();
                while !enough.load(Ordering::Relaxed) {
                    sleep(next.saturating_duration_since(Instant::now()));
                    let begun = Instant::now();
                    let outcome = ask(target).map_err(|error| format!("{error:#}"));
                    requests.push(Request {
                        begun,
                        took: begun.elapsed(),
                        outcome,
                    });
                    // Not to catch up after a long wait.
                    next = (next + pace * CLIENTS).max(begun);
                }
                requests
            };
            std::thread::spawn(move || namespace.enter(ask))
        });
        Self {
            threads: threads.collect(),
            enough,
        }
    }

    /// Lets them finish what they are at, and returns all that came of it.
    ///
    /// # Errors
    /// When the namespace could not be entered.
    pub fn stop(mut self) -> Result<Requests> {
        self.enough.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for thread in self.threads.drain(..) {
            match thread.join() {
                Ok(requests) => all.extend(requests?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        all.sort_by_key(|request| request.begun);
        Ok(Requests(all))
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.enough.store(true, Ordering::Relaxed);
    }
}

impl Requests {
    /// How many each pod answered.
    pub fn answers(&self) -> BTreeMap<&str, usize> {
        let mut answers = BTreeMap::new();
        for pod in self.0.iter().flat_map(|request| &request.outcome) {
            *answers.entry(pod.as_str()).or_default() += 1;
        }
        answers
    }

    /// Those that failed.
    pub fn failed(&self) -> impl Iterator<Item = &Request> {
        self.0.iter().filter(|request| request.outcome.is_err())
    }

    /// None failed, and there were at least so many.
    ///
    /// # Errors
    /// When it is not so; the message tells how those that failed did.
    pub fn all_served(&self, at_least: usize) -> Result<()> {
        let failed: Vec<_> = self.failed().collect();
        ensure!(
            failed.is_empty() && self.0.len() >= at_least,
            "{} of {} requests failed ({at_least} or more expected, none to fail): {:?}",
            failed.len(),
            self.0.len(),
            &failed[..failed.len().min(5)]
        );
        Ok(())
    }
}

/// One request.
fn ask(target: SocketAddr) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&target, PATIENCE).context("connect")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream
        .write_all(b"GET / HTTP/1.0\r\n\r\n")
        .context("send")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("receive")?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .with_context(|| format!("the answer is {answer:?}"))?;
    ensure!(head.starts_with("HTTP/1.1 200"), "the answer is {answer:?}");
    let body: Value =
        serde_json::from_str(body).with_context(|| format!("the answer is {body:?}"))?;
    let pod = body["pod"].as_str().context("no pod in the answer")?;
    Ok(pod.to_owned())
}
