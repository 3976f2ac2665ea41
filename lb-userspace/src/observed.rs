//! What the agent tells of itself while it runs: written by its loop, read by those who ask over HTTP.
//!
//! Whoever asks never waits for the loop, and the loop never for them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

use crate::config::source::History;
use crate::dataplane::{Applied, AttachReport, Attachment, DataplaneError};
use crate::desired::{DesiredState, UplinkSpec};
use crate::ended::EndedBy;
use crate::kubernetes::{Latency, Status};
use crate::peers::{Counters, View};
use crate::plan::Health;
use crate::tables::TableSet;

/// The loop comes round every other second; one that has not for so long hangs.
const LOOP_HANGS: Duration = Duration::from_secs(30);
/// So long the source may be out of reach before the node counts as out of step with it.
const STALE: Duration = Duration::from_secs(30);
/// Losses are told for so long after the last one: refusals and ARP questions may be rare.
const LOSSES_TOLD: Duration = Duration::from_secs(60);

/// The agent's own view of itself.
#[derive(Debug)]
pub struct Observed {
    inner: Mutex<Inner>,
    /// How far Kubernetes is followed, where it is the source.
    kubernetes: OnceLock<Arc<Status>>,
    started: Instant,
    /// What is counted and timed.
    pub measured: Measured,
}

/// Counters and histograms of the agent's work.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Seconds of a plan.
    pub plan: Histogram,
    /// Seconds of bringing the maps in step.
    pub write: Histogram,
    /// Map writes and removals.
    pub map_writes: Counter,
    /// Health checks' changes of mind.
    pub health_changes: Counter,
    /// Living flows that have ended, by who ended them.
    pub flows_ended: Family<[(&'static str, &'static str); 1], Counter>,
}

impl Measured {
    /// A living flow has ended.
    pub fn ended(&self, by: EndedBy) {
        self.flows_ended.get_or_create(&[("by", by.name())]).inc();
    }
}

#[derive(Debug)]
struct Inner {
    /// `None` until the loop runs: the source may take its time to say the first word.
    turned: Option<Instant>,
    history: History,
    /// Since when the file is wrong.
    wrong: Option<Instant>,
    synced: bool,
    attach_failure: Option<String>,
    apply_failure: Option<String>,
    tables: Arc<TableSet>,
    warnings: usize,
    uplinks: Vec<UplinkSpec>,
    attachments: Vec<Attachment>,
    idle: Vec<String>,
    unplaced: Vec<IpAddr>,
    checks: Vec<CheckResult>,
    losses: BTreeMap<String, Loss>,
    view: Arc<View>,
}

/// What the health checks know of a backend.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CheckResult {
    /// Service.
    pub service: String,
    /// Stable identity.
    pub instance: String,
    /// Address.
    pub address: IpAddr,
    /// Whether it answers.
    pub up: bool,
}

/// Frames that an interface could not send.
#[derive(Clone, Copy, Debug)]
struct Loss {
    frames: u64,
    last: Instant,
}

/// A copy of what metrics need.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// How long nothing has shown that the state is the source's; zero for a file that is good.
    pub state_age: Duration,
    /// How the file fared.
    pub file: History,
    /// How far Kubernetes is followed, where it is the source.
    pub kubernetes: Option<Followed>,
    /// Whether the node is ready.
    pub ready: bool,
    /// What the plan left out.
    pub warnings: usize,
    /// Uplinks that no interface of this node matches.
    pub idle: usize,
    /// Results of health checks.
    pub checks: Vec<CheckResult>,
    /// Frames that native XDP could not send, by interface.
    pub lost: BTreeMap<String, u64>,
    /// What has happened among the peers.
    pub peers: Counters,
}

/// How far Kubernetes is followed.
#[derive(Clone, Debug)]
pub struct Followed {
    /// Whether this agent writes what users see.
    pub leads: bool,
    /// Times from watch event to maps.
    pub latency: Latency,
}

/// Whether the node serves as it should, in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// What is missing, a sentence each; ready when empty.
    pub missing: Vec<String>,
    /// What a person may want to know of a node that is ready.
    pub notes: Vec<String>,
}

impl Default for Observed {
    fn default() -> Self {
        Self::new()
    }
}

impl Observed {
    /// Of an agent that has done nothing yet.
    pub fn new() -> Self {
        // 50 µs … 0.4 s for plans, 100 µs … 3.3 s for writes.
        let histogram = |start, length| Histogram::new(exponential_buckets(start, 2.0, length));
        Self {
            inner: Mutex::new(Inner {
                turned: None,
                history: History::default(),
                wrong: None,
                synced: false,
                attach_failure: None,
                apply_failure: None,
                tables: Arc::default(),
                warnings: 0,
                uplinks: Vec::new(),
                attachments: Vec::new(),
                idle: Vec::new(),
                unplaced: Vec::new(),
                checks: Vec::new(),
                losses: BTreeMap::new(),
                view: Arc::default(),
            }),
            kubernetes: OnceLock::new(),
            started: Instant::now(),
            measured: Measured {
                plan: histogram(50e-6, 14),
                write: histogram(100e-6, 16),
                map_writes: Counter::default(),
                health_changes: Counter::default(),
                flows_ended: {
                    let family = Family::default();
                    for by in EndedBy::ALL {
                        // A series that begins with its first event hides that event from rate().
                        drop(family.get_or_create(&[("by", by.name())]));
                    }
                    family
                },
            },
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Nothing that is done under the lock can leave it half-written.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The loop has come round.
    pub fn turned(&self) {
        self.inner().turned = Some(Instant::now());
    }

    /// How the configuration file fares. While it is wrong, the last good one goes on serving.
    pub fn file(&self, history: &History) {
        let mut inner = self.inner();
        if inner.history == *history {
            return;
        }
        inner.wrong = match history.problem {
            None => None,
            Some(_) => inner.wrong.or_else(|| Some(Instant::now())),
        };
        inner.history.clone_from(history);
    }

    /// Services come from Kubernetes, and that is how it is followed. Once an agent.
    pub fn follow(&self, kubernetes: Arc<Status>) {
        self.kubernetes.get_or_init(|| kubernetes);
    }

    /// A plan was made.
    pub fn planned(
        &self,
        took: Duration,
        state: &DesiredState,
        health: &Health,
        tables: &Arc<TableSet>,
        warnings: usize,
    ) {
        self.measured.plan.observe(took.as_secs_f64());
        let checked = state.services.iter().filter(|s| s.health.is_some());
        let checks = checked.flat_map(|service| {
            service.backends.iter().map(|backend| CheckResult {
                service: service.name.clone(),
                instance: backend.instance.clone(),
                address: backend.address,
                up: health.is_up(&service.name, backend.address),
            })
        });
        let checks = checks.collect();
        let mut inner = self.inner();
        inner.checks = checks;
        inner.tables = Arc::clone(tables);
        inner.warnings = warnings;
        inner.uplinks.clone_from(&state.uplinks);
    }

    /// Interfaces were looked at.
    pub fn attached(&self, result: Result<&AttachReport, &DataplaneError>) {
        let mut inner = self.inner();
        match result {
            Ok(AttachReport {
                attachments, idle, ..
            }) => {
                inner.attach_failure = None;
                inner.attachments.clone_from(attachments);
                inner.idle.clone_from(idle);
            }
            Err(error) => inner.attach_failure = Some(error.to_string()),
        }
    }

    /// Tables were written.
    pub fn applied(&self, took: Duration, result: Result<&Applied, &DataplaneError>) {
        self.measured.write.observe(took.as_secs_f64());
        let mut inner = self.inner();
        match result {
            Ok(applied) => {
                self.measured.map_writes.inc_by(applied.writes as u64);
                inner.apply_failure = None;
                inner.synced = true;
                inner.unplaced.clone_from(&applied.vips_without_uplink);
            }
            Err(error) => inner.apply_failure = Some(error.to_string()),
        }
    }

    /// An interface has lost so many frames more.
    pub fn lost(&self, interface: &str, frames: u64) {
        let mut inner = self.inner();
        let now = Instant::now();
        let loss = inner.losses.entry(interface.to_owned()).or_insert(Loss {
            frames: 0,
            last: now,
        });
        loss.frames += frames;
        loss.last = now;
    }

    /// Something is known of the peers.
    pub fn peers(&self, view: Arc<View>) {
        self.inner().view = view;
    }

    /// What is known of the peers.
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.inner().view)
    }

    /// Interfaces that carry our programs.
    pub fn attachments(&self) -> Vec<Attachment> {
        self.inner().attachments.clone()
    }

    /// Uplinks as they are wanted.
    pub fn uplinks(&self) -> Vec<UplinkSpec> {
        self.inner().uplinks.clone()
    }

    /// The tables of the last plan.
    pub fn tables(&self) -> Arc<TableSet> {
        Arc::clone(&self.inner().tables)
    }

    /// Why the process should be ended, if it should.
    pub fn hangs(&self) -> Option<String> {
        let still = self.inner().turned?.elapsed();
        (still > LOOP_HANGS).then(|| {
            format!(
                "the agent's loop has not come round for {} s",
                still.as_secs()
            )
        })
    }

    /// Whether this node serves as the source wants.
    pub fn readiness(&self) -> Readiness {
        let inner = self.inner();
        let mut readiness = Readiness::default();
        let Readiness { missing, notes } = &mut readiness;
        if let Some(why) = &inner.attach_failure {
            missing.push(format!("programs are not attached: {why}"));
        }
        if let Some(why) = &inner.apply_failure {
            missing.push(format!("the tables could not be written: {why}"));
        } else if !inner.synced {
            missing.push(
                "the tables have not been written yet: the agent has just started, or waits for the Kubernetes API"
                    .to_owned(),
            );
        }
        let mut out_of_step = |age: Duration, what: &str, why: &str| {
            let text = format!(
                "{what} for {} s, and what it said last serves: {why}",
                age.as_secs()
            );
            match age >= STALE {
                true => missing.push(text),
                false => notes.push(text),
            }
        };
        if let (Some(since), Some(why)) = (inner.wrong, &inner.history.problem) {
            out_of_step(
                since.elapsed(),
                "the configuration file has been wrong",
                why,
            );
        }
        if let Some(kubernetes) = self.kubernetes.get() {
            let broken = kubernetes.broken();
            let age = kubernetes.state_age().unwrap_or_default();
            if !broken.is_empty() || age >= STALE {
                let why = match &broken[..] {
                    [] => "it does not answer".to_owned(),
                    some => some.join("; "),
                };
                out_of_step(age, "the Kubernetes API has not been heard", &why);
            }
        }
        let recent = |loss: &&Loss| loss.last.elapsed() < LOSSES_TOLD;
        for (interface, loss) in &inner.losses {
            if Some(loss).filter(recent).is_some() {
                missing.push(format!(
                    "{interface} loses what native XDP sends ({} frames): the other end of the veth lacks NAPI, \
                     run `ethtool -K <peer of {interface}> gro on` where that end is, or use `mode: tc`",
                    loss.frames
                ));
            }
        }
        let attachments = inner.attachments.iter();
        notes.extend(attachments.filter_map(|attachment| {
            let note = attachment.note.as_ref()?;
            Some(format!("{}: {note}", attachment.interface))
        }));
        let unplaced = inner.unplaced.iter();
        notes.extend(inner.idle.iter().map(|why| format!("idle: {why}")));
        notes.extend(
            unplaced.map(|vip| format!("VIP {vip} is not served here: no uplink is in its subnet")),
        );
        if inner.warnings > 0 {
            notes.push(format!(
                "{} wish(es) of the source are not fulfilled; the log names them",
                inner.warnings
            ));
        }
        readiness
    }

    /// What metrics need.
    pub fn snapshot(&self) -> Snapshot {
        let ready = self.readiness().missing.is_empty();
        let kubernetes = self.kubernetes.get();
        let inner = self.inner();
        let lost = inner.losses.iter();
        let state_age = match (kubernetes, inner.synced) {
            // What an earlier agent wrote serves, and is at least so old.
            (_, false) => self.started.elapsed(),
            (Some(kubernetes), true) => kubernetes.state_age().unwrap_or_default(),
            (None, true) => inner.wrong.map_or(Duration::ZERO, |since| since.elapsed()),
        };
        Snapshot {
            state_age,
            file: inner.history.clone(),
            kubernetes: kubernetes.map(|status| Followed {
                leads: status.leads(),
                latency: status.latency(),
            }),
            ready,
            warnings: inner.warnings,
            idle: inner.idle.len(),
            checks: inner.checks.clone(),
            lost: lost
                .map(|(name, loss)| (name.clone(), loss.frames))
                .collect(),
            peers: inner.view.counters,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(observed: &Observed) {
        let applied = Applied::default();
        observed.applied(Duration::ZERO, Ok(&applied));
    }

    fn failure() -> DataplaneError {
        DataplaneError::VipIsLocal {
            vip: IpAddr::from([172, 22, 0, 2]),
            interface: "eth1".to_owned(),
        }
    }

    #[test]
    fn ready_means_attached_and_in_step() {
        let observed = Observed::new();
        let Readiness { missing, .. } = observed.readiness();
        assert!(missing[0].contains("not been written yet"), "{missing:?}");
        observed.attached(Ok(&AttachReport::default()));
        applied(&observed);
        assert_eq!(observed.readiness(), Readiness::default());

        observed.attached(Err(&failure()));
        observed.applied(Duration::ZERO, Err(&failure()));
        let Readiness { missing, .. } = observed.readiness();
        assert_eq!(missing.len(), 2);
        assert!(
            missing.iter().all(|line| line.contains("172.22.0.2")),
            "{missing:?}"
        );
        assert!(!observed.snapshot().ready);

        observed.attached(Ok(&AttachReport::default()));
        applied(&observed);
        assert!(observed.snapshot().ready);
    }

    #[test]
    fn a_file_that_is_wrong_for_a_moment_is_a_note() {
        let observed = Observed::new();
        applied(&observed);
        let wrong = |what: &str| History {
            good: 1,
            bad: 1,
            problem: Some(what.to_owned()),
        };
        observed.file(&wrong("no uplink"));
        let Readiness { missing, notes } = observed.readiness();
        assert!(missing.is_empty(), "{missing:?}");
        assert!(notes[0].contains("no uplink"), "{notes:?}");
        let Some(long_ago) = Instant::now().checked_sub(STALE) else {
            return; // The machine has just booted.
        };
        observed.inner().wrong = Some(long_ago);
        // Wrong in another way is as old.
        observed.file(&wrong("no VIP"));
        assert!(observed.snapshot().state_age >= STALE);
        assert!(observed.readiness().missing[0].contains("no VIP"));
        observed.file(&History {
            good: 2,
            ..History::default()
        });
        assert_eq!(observed.snapshot().state_age, Duration::ZERO);
        assert_eq!(observed.readiness(), Readiness::default());
    }

    #[test]
    fn losses_are_told_with_the_remedy_and_idle_uplinks_do_no_harm() {
        let observed = Observed::new();
        applied(&observed);
        observed.attached(Ok(&AttachReport {
            attachments: Vec::new(),
            idle: vec!["no interface is called `eth7`".to_owned()],
            ..AttachReport::default()
        }));
        assert!(observed.snapshot().ready);
        assert_eq!(
            observed.readiness().notes,
            ["idle: no interface is called `eth7`"]
        );
        observed.lost("eth1", 3);
        observed.lost("eth1", 4);
        let missing = observed.readiness().missing;
        assert!(
            missing[0].contains("7 frames") && missing[0].contains("gro on"),
            "{missing:?}"
        );
        assert_eq!(observed.snapshot().lost["eth1"], 7);
    }
}
