//! Health checks: a TCP connect per backend and interval, each in a task of its own.
//!
//! A backend starts as the source describes it and keeps that until enough checks have failed: an
//! agent's restart must not take backends away that it has not asked yet. A check ends with its backend.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::desired::{BackendSpec, DesiredState, HealthSpec};
use crate::plan::Health;

/// Bounds of how long a connect may take; between them the check's interval decides.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(500);
const LONGEST_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone, PartialEq, Eq, Hash)]
struct Backend {
    service: String,
    address: IpAddr,
}

/// A backend's health changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Service.
    pub service: String,
    /// Address of the backend.
    pub address: IpAddr,
    /// Port that was connected to.
    pub port: u16,
    /// Why it is not healthy, `None` when it is.
    pub failure: Option<String>,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            service,
            address,
            port,
            failure,
        } = self;
        write!(f, "backend {address} of service {service} ")?;
        match failure {
            None => write!(f, "answers on port {port}"),
            Some(why) => write!(f, "does not answer on port {port}: {why}"),
        }
    }
}

/// All checks that run.
pub struct Checks {
    running: HashMap<Backend, Running>,
    health: Health,
    started: u64,
    sender: mpsc::UnboundedSender<(u64, Change)>,
    receiver: mpsc::UnboundedReceiver<(u64, Change)>,
}

struct Running {
    /// Tells a message of this check from one of its predecessor.
    number: u64,
    spec: HealthSpec,
    task: AbortHandle,
}

impl Default for Checks {
    fn default() -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        Self {
            running: HashMap::new(),
            health: Health::default(),
            started: 0,
            sender,
            receiver,
        }
    }
}

impl Checks {
    /// What is known.
    pub fn health(&self) -> &Health {
        &self.health
    }

    /// Starts and stops checks so that exactly those backends of `state` are checked that are `mine`. What is known of a
    /// backend is kept while it is checked, even if how it is checked changes. Needs a tokio runtime.
    pub fn follow(&mut self, state: &DesiredState, mine: impl Fn(&BackendSpec) -> bool) {
        let mut wanted = HashMap::new();
        for service in &state.services {
            let Some(spec) = service.health else { continue };
            let mine = service.backends.iter().filter(|backend| mine(backend));
            wanted.extend(mine.map(|backend| {
                let backend = Backend {
                    service: service.name.clone(),
                    address: backend.address,
                };
                (backend, spec)
            }));
        }
        let health = &mut self.health;
        self.running.retain(|backend, running| {
            let keep = wanted.get(backend) == Some(&running.spec);
            if !keep {
                running.task.abort();
            }
            if !wanted.contains_key(backend) {
                health.set(&backend.service, backend.address, true);
            }
            keep
        });
        for (backend, spec) in wanted {
            if self.running.contains_key(&backend) {
                continue;
            }
            self.started += 1;
            let up = self.health.is_up(&backend.service, backend.address);
            let task = tokio::spawn(check(
                backend.clone(),
                spec,
                up,
                self.started,
                self.sender.clone(),
            ));
            let running = Running {
                number: self.started,
                spec,
                task: task.abort_handle(),
            };
            self.running.insert(backend, running);
        }
    }

    /// Waits for changes, which [`Self::health`] then knows: all that are there, at least one, so that a
    /// service that dies as a whole is one turn of work. Safe to cancel.
    pub async fn changed(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        while changes.is_empty() {
            let Some(mut next) = self.receiver.recv().await else {
                unreachable!("a sender is in self");
            };
            loop {
                changes.extend(self.note(next));
                match self.receiver.try_recv() {
                    Ok(message) => next = message,
                    Err(_) => break,
                }
            }
        }
        changes
    }

    /// Takes a check's message in; `None` where it changes nothing.
    fn note(&mut self, (number, change): (u64, Change)) -> Option<Change> {
        let backend = Backend {
            service: change.service.clone(),
            address: change.address,
        };
        // A check that has been stopped may have left a message behind.
        let current = self.running.get(&backend).map(|running| running.number);
        let up = change.failure.is_none();
        (current == Some(number) && self.health.set(&change.service, change.address, up))
            .then_some(change)
    }
}

impl Drop for Checks {
    fn drop(&mut self) {
        for running in self.running.values() {
            running.task.abort();
        }
    }
}

async fn check(
    backend: Backend,
    spec: HealthSpec,
    mut up: bool,
    number: u64,
    changes: mpsc::UnboundedSender<(u64, Change)>,
) {
    let HealthSpec {
        tcp,
        interval: every,
        fail,
    } = spec;
    let patience = every.clamp(SHORTEST_TIMEOUT, LONGEST_TIMEOUT);
    let mut due = interval(every);
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failures = 0_u32;
    loop {
        due.tick().await;
        let connect = timeout(patience, TcpStream::connect((backend.address, tcp))).await;
        let failure = match connect {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(format!("no answer within {} ms", patience.as_millis())),
        };
        failures = match failure {
            None => 0,
            Some(_) => failures.saturating_add(1),
        };
        if (failures == 0 && !up) || (failures >= fail && up) {
            up = failures == 0;
            let change = Change {
                service: backend.service.clone(),
                address: backend.address,
                port: tcp,
                failure,
            };
            if changes.send((number, change)).is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
