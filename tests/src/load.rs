//! Many short connections, fast: connect, one small exchange, close.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use socket2::{Domain, Socket, Type};

use crate::namespace::Namespace;

/// A load of short connections to a web server.
#[derive(Clone, Debug)]
pub struct Load {
    /// Addresses that the connections come from in turn, each with every port from 10,000 on.
    pub sources: Vec<Ipv4Addr>,
    /// Where they go, in turn.
    pub targets: Vec<SocketAddrV4>,
    /// Number of the first one: those of an earlier load with the same sources are to be left out.
    pub first: u32,
    /// How many connections at most.
    pub count: u32,
    /// How long at most.
    pub limit: Duration,
    /// How long a connection may wait for each of its steps.
    pub patience: Duration,
    /// How many at a time.
    pub threads: u32,
}

/// What came of a [`Load`].
#[derive(Clone, Debug, Default)]
pub struct LoadReport {
    /// Connections that got their answer.
    pub served: u32,
    /// Connections that did not.
    pub failed: u32,
    /// Why the first of them failed.
    pub first_failure: Option<String>,
    /// How long it took.
    pub elapsed: Duration,
}

impl LoadReport {
    /// Takes in what came of another part of the same load; the time stays.
    pub fn add(&mut self, other: Self) {
        self.served += other.served;
        self.failed += other.failed;
        self.first_failure = self.first_failure.take().or(other.first_failure);
    }
}

impl Load {
    /// Longer than any step of a connection takes that is served at all.
    pub const PATIENCE: Duration = Duration::from_secs(60);

    /// Runs it from `namespace`.
    ///
    /// # Errors
    /// When the namespace cannot be entered; failed connections are in the report.
    pub fn run(&self, namespace: &Namespace) -> Result<LoadReport> {
        let begin = Instant::now();
        let next = AtomicU32::new(0);
        let worker = || {
            let mut report = LoadReport::default();
            while begin.elapsed() < self.limit {
                let done = next.fetch_add(1, Ordering::Relaxed);
                if done >= self.count {
                    break;
                }
                let number = self.first + done;
                let source = self.source(number);
                let target = self.targets[number as usize % self.targets.len()];
                match exchange(Some(source), target, "/", self.patience) {
                    Ok(()) => report.served += 1,
                    Err(error) => {
                        report.failed += 1;
                        report
                            .first_failure
                            .get_or_insert(format!("connection {number} from {source}: {error:#}"));
                    }
                }
            }
            report
        };
        let reports = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads)
                .map(|_| scope.spawn(|| namespace.enter(worker)))
                .collect();
            threads
                .into_iter()
                .map(|thread| match thread.join() {
                    Ok(report) => report,
                    Err(panic) => std::panic::resume_unwind(panic),
                })
                .collect::<Result<Vec<_>>>()
        })?;
        let mut all = LoadReport {
            elapsed: begin.elapsed(),
            ..LoadReport::default()
        };
        reports.into_iter().for_each(|report| all.add(report));
        Ok(all)
    }
}

impl Load {
    /// Where connection `number` comes from: no pair is used twice in the first 50,000 rounds.
    fn source(&self, number: u32) -> SocketAddrV4 {
        let sources = self.sources.len() as u32;
        let port = 10_000 + (number / sources % 50_000) as u16;
        SocketAddrV4::new(self.sources[(number % sources) as usize], port)
    }
}

/// One connection that ends as most do: the server closes after its answer, then the client. From a port
/// that the kernel picks, unless `source` is given. In the namespace of the calling thread.
///
/// # Errors
/// When a step of it fails or takes longer than `limit`; the message names the step.
pub fn exchange(
    source: Option<SocketAddrV4>,
    target: SocketAddrV4,
    path: &str,
    limit: Duration,
) -> Result<()> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).context("socket")?;
    if let Some(source) = source {
        socket.set_reuse_address(true)?;
        socket.bind(&source.into()).context("bind")?;
    }
    socket.set_read_timeout(Some(limit))?;
    socket
        .connect_timeout(&target.into(), limit)
        .context("connect")?;
    (&socket)
        .write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())
        .context("send")?;
    let mut answer = Vec::new();
    (&socket).read_to_end(&mut answer).context("receive")?;
    anyhow::ensure!(
        answer.starts_with(b"HTTP/1.1 200"),
        "answer is {:?}",
        String::from_utf8_lossy(&answer)
    );
    Ok(())
}
