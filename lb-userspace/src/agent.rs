//! The agent: keeps the data plane in step with its source and with what the health checks find.
//!
//! It is not in the packets' way. What it has written goes on serving while it is away, while its
//! file is bad or the Kubernetes API out of reach, and after it has ended.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant as Clock};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tracing::{debug, error, info, warn};

use crate::config::ConfigError;
use crate::dataplane::read::Reader;
use crate::dataplane::{
    self, Applied, AttachReport, AttachedMode, Attachment, Dataplane, DataplaneError, GONE_AFTER,
};
use crate::desired::DesiredState;
use crate::health::{Change, Checks};
use crate::http::{self, LogFilter};
use crate::kubernetes::{self, SourceError};
use crate::observed::Observed;
use crate::plan::{self, Warning, brief};
use crate::source::{Prepared, Source};
use crate::tables::TableSet;

/// How often interfaces and the file are looked at without a sign that they changed.
const ROUND: Duration = Duration::from_secs(2);
/// How soon to come back to backends that should have been ended and are not yet.
const GONE_AGAIN: Duration = Duration::from_millis(200);

/// What the log says of a signal during the start.
const ENDED_EARLY: &str = "ended before there was anything to serve";

/// How the agent runs.
#[derive(Clone)]
pub struct Options {
    /// The file.
    pub config: PathBuf,
    /// Where services come from Kubernetes instead of the file.
    pub kubernetes: Option<Kubernetes>,
    /// Where the maps are and how large they are made.
    pub dataplane: dataplane::Options,
    /// Whether the data plane ends with the agent.
    pub detach_on_exit: bool,
    /// The port for metrics and probes, if there is to be one.
    pub http: Option<http::Options>,
    /// The log's filter.
    pub log: Arc<dyn LogFilter>,
}

/// Who this agent is in a cluster.
#[derive(Clone, Debug)]
pub struct Kubernetes {
    /// The node's name.
    pub node: String,
    /// Namespace of the agents; without it that of the ServiceAccount or kubeconfig.
    pub namespace: Option<String>,
}

/// Why the agent could not start, or not end as told.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The file.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The Kubernetes API.
    #[error(transparent)]
    Kubernetes(#[from] SourceError),
    /// The kernel's side.
    #[error(transparent)]
    Dataplane(#[from] DataplaneError),
    /// The process's own machinery.
    #[error("cannot {what}: {error}")]
    Process {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        error: std::io::Error,
    },
}

/// Serves until SIGTERM or SIGINT. A bad file or a data plane that cannot be attached is an error at
/// the start, and only a line in the log later.
pub fn run(options: Options) -> Result<(), AgentError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|error| AgentError::Process {
            what: "start the runtime",
            error,
        })?;
    runtime.block_on(async {
        let mut signals = Signals::new()?;
        let kubernetes = match options.kubernetes {
            None => None,
            Some(Kubernetes { node, namespace }) => {
                Some(kubernetes::Options::infer(node, namespace).await?)
            }
        };
        let path = options.config.display().to_string();
        let prepared = tokio::select! {
            prepared = Prepared::read(options.config, kubernetes) => prepared?,
            () = signals.end() => {
                info!("{ENDED_EARLY}");
                return Ok(());
            }
        };
        info!("{path} is good; loading the programs");
        let first = matches!(
            Reader::open(&options.dataplane.bpffs),
            Err(DataplaneError::NotLoaded { .. })
        );
        let dataplane = Dataplane::open(&options.dataplane)?;
        let observed = Arc::new(Observed::new());
        if let Some(http) = options.http {
            tokio::spawn(http::serve(http, Arc::clone(&observed), options.log));
        }
        let (mut source, state) = tokio::select! {
            started = prepared.start() => started,
            () = signals.end() => {
                info!("{ENDED_EARLY}");
                return Ok(());
            }
        };
        let mut agent = Agent::new(dataplane, state, observed);
        if let Err(error) = agent.start() {
            if first {
                // What served before goes on; a start from nothing leaves nothing.
                agent.dataplane.detach()?;
            }
            return Err(error.into());
        }
        agent.serve(&mut source, &mut signals).await;
        source.stop().await;
        if options.detach_on_exit {
            agent.dataplane.detach()?;
            info!("detached: nothing is served any more");
        } else if agent.dataplane.is_pinned() {
            info!("the data plane goes on serving; `ironlb unload` ends it");
        } else {
            let root = options.dataplane.bpffs.display();
            error!("nothing is served any more: somebody removed what was pinned below {root}");
        }
        Ok(())
    })
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> Result<Self, AgentError> {
        let listen = |kind| {
            signal(kind).map_err(|error| AgentError::Process {
                what: "listen for signals",
                error,
            })
        };
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    /// Waits for a signal that ends the agent.
    async fn end(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

struct Agent {
    dataplane: Dataplane,
    observed: Arc<Observed>,
    state: DesiredState,
    checks: Checks,
    tables: Arc<TableSet>,
    attachments: Vec<Attachment>,
    /// Whether the maps hold `tables` for the present attachments.
    in_step: bool,
    /// Whether that took writes that the source has not been told of.
    has_written: bool,
    /// When backends that have left are to be ended.
    gone_due: Option<Instant>,
    /// VIPs that no uplink carries.
    idle: Vec<IpAddr>,
    warnings: Told<Warning>,
    uplink_notes: Told<String>,
    table_notes: Told<String>,
    attach_failure: Told<String>,
    apply_failure: Told<String>,
    gone_failure: Told<String>,
    serving: String,
}

impl Agent {
    fn new(dataplane: Dataplane, state: DesiredState, observed: Arc<Observed>) -> Self {
        Self {
            dataplane,
            observed,
            state,
            checks: Checks::default(),
            tables: Arc::default(),
            attachments: Vec::new(),
            in_step: false,
            has_written: false,
            gone_due: None,
            idle: Vec::new(),
            warnings: Told::default(),
            uplink_notes: Told::default(),
            table_notes: Told::default(),
            attach_failure: Told::default(),
            apply_failure: Told::default(),
            gone_failure: Told::default(),
            serving: String::new(),
        }
    }

    /// Serves the first state. The checks start behind it: they find backends as the file says.
    fn start(&mut self) -> Result<(), DataplaneError> {
        self.plan();
        self.attach()?;
        self.apply()?;
        self.checks.follow(&self.state);
        Ok(())
    }

    async fn serve(&mut self, source: &mut Source, signals: &mut Signals) {
        self.keep_in_step(source);
        self.observed.file(source.history());
        if let Some(kubernetes) = source.kubernetes() {
            self.observed.follow(Arc::clone(kubernetes));
        }
        let mut round = interval(ROUND);
        round.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let Signals {
                terminate,
                interrupt,
                hangup,
            } = signals;
            tokio::select! {
                _ = terminate.recv() => return info!("SIGTERM"),
                _ = interrupt.recv() => return info!("SIGINT"),
                _ = hangup.recv() => {
                    info!("SIGHUP: reading {} again", source.path().display());
                    source.forget();
                }
                () = source.changed() => self.reload(source),
                changes = self.checks.changed() => {
                    self.observed.measured.health_changes.inc_by(changes.len() as u64);
                    tell_health(&changes);
                    self.plan();
                }
                () = due(self.gone_due) => self.end_gone(),
                _ = round.tick() => {
                    source.look();
                    self.reload(source);
                    self.keep_attached();
                }
            }
            self.keep_in_step(source);
            self.observed.turned();
        }
    }

    fn reload(&mut self, source: &mut Source) {
        let news = source.news();
        self.observed.file(source.history());
        match news {
            Ok(None) => {}
            Ok(Some(state)) if state == self.state => debug!("the same is wanted as before"),
            Ok(Some(state)) => {
                let has_other_uplinks = state.uplinks != self.state.uplinks;
                self.state = state;
                self.checks.follow(&self.state);
                self.plan();
                if !has_other_uplinks {
                    // Backends come and go more often than interfaces, and somebody waits for them.
                    self.keep_in_step(source);
                }
                self.keep_attached();
            }
            Err(problems) => {
                let problems = problems.to_string();
                let problems: Vec<_> = problems.lines().collect();
                for line in brief(&problems) {
                    error!("{line}");
                }
                let path = source.path().display();
                error!("{path} cannot be served; the last good configuration goes on serving");
            }
        }
    }

    fn plan(&mut self) {
        let started = Clock::now();
        let (tables, warnings) = plan::plan(&self.state, self.checks.health());
        let took = started.elapsed();
        for warning in plan::sentences(&self.warnings.replace(warnings.iter().cloned())) {
            warn!("{warning}");
        }
        if tables != *self.tables {
            self.tables = Arc::new(tables);
            self.in_step = false;
        }
        let health = self.checks.health();
        self.observed
            .planned(took, &self.state, health, &self.tables, warnings.len());
    }

    fn attach(&mut self) -> Result<(), DataplaneError> {
        let uplinks = &self.state.uplinks;
        let attached = self.dataplane.attach(uplinks, &self.tables);
        self.observed.attached(attached.as_ref());
        let AttachReport { attachments, idle } = attached?;
        let notes = attachments.iter().filter_map(|attachment| {
            let note = attachment.note.as_ref()?;
            Some(format!("{}: {note}", attachment.interface))
        });
        self.uplink_notes.tell(notes.chain(idle));
        if attachments != self.attachments {
            self.attachments = attachments;
            self.in_step = false;
        }
        Ok(())
    }

    fn apply(&mut self) -> Result<(), DataplaneError> {
        let started = Clock::now();
        let applied = self.dataplane.apply(&self.tables);
        self.observed.applied(started.elapsed(), applied.as_ref());
        let applied = applied?;
        self.in_step = true;
        let writes = applied.writes;
        self.has_written |= writes > 0;
        self.note(applied);
        let serving = self.summary();
        if writes > 0 || serving != self.serving {
            info!(writes, "{serving}");
            self.serving = serving;
        }
        Ok(())
    }

    /// Attaches what has come or changed; what fails is tried again in the next round.
    fn keep_attached(&mut self) {
        let failure = self.attach().err();
        self.attach_failure.tell_failure(failure);
    }

    /// Writes what has changed, and tells the source; what fails is tried again at the next occasion.
    fn keep_in_step(&mut self, source: &mut Source) {
        if !self.in_step {
            let failure = self.apply().err();
            self.apply_failure.tell_failure(failure);
        }
        if self.in_step {
            source.in_step(
                &self.tables,
                &self.idle,
                std::mem::take(&mut self.has_written),
            );
        }
    }

    fn end_gone(&mut self) {
        self.gone_due = Some(Instant::now() + GONE_AGAIN);
        let ended = self.dataplane.tick();
        if matches!(&ended, Ok(applied) if applied.leaving == 0) {
            self.gone_due = None;
        }
        self.gone_failure.tell_failure(ended.err());
    }

    fn note(&mut self, applied: Applied) {
        let Applied {
            writes: _,
            vips_without_uplink,
            notes,
            leaving,
        } = applied;
        let idle = vips_without_uplink
            .iter()
            .map(|vip| format!("VIP {vip} is not served: no uplink is in its subnet"));
        self.table_notes.tell(idle.chain(notes));
        self.idle = vips_without_uplink;
        if leaving > 0 {
            self.gone_due = Some(Instant::now() + GONE_AFTER);
        }
    }

    fn summary(&self) -> String {
        let uplinks: Vec<_> = self
            .attachments
            .iter()
            .map(|attachment| {
                let mode = match attachment.mode {
                    AttachedMode::Native => "native",
                    AttachedMode::Tc => "tc",
                    AttachedMode::Egress => "replies only",
                };
                format!("{} ({mode})", attachment.interface)
            })
            .collect();
        let ready = self.tables.ports.values().filter(|port| {
            let mut backends = port.backends.iter();
            backends.any(|backend| backend.eligible)
        });
        let ports = format!(
            "{} VIP ports ({} with a ready backend) of {} VIPs",
            self.tables.ports.len(),
            ready.count(),
            self.tables.vips.len(),
        );
        match &uplinks[..] {
            [] => format!("waiting for an interface to serve {ports} on"),
            uplinks => format!("serving {ports} on {}", uplinks.join(", ")),
        }
    }
}

/// Tells what the checks found: those that fail first, not more than a few one by one.
fn tell_health(changes: &[Change]) {
    let (failing, answering): (Vec<_>, Vec<_>) = changes.iter().partition(|c| c.failure.is_some());
    for line in brief(&failing) {
        warn!("{line}");
    }
    for line in brief(&answering) {
        info!("{line}");
    }
}

/// Warnings that are told when they come up, not as long as they last.
struct Told<T> {
    present: BTreeSet<T>,
}

impl<T> Default for Told<T> {
    fn default() -> Self {
        Self {
            present: BTreeSet::new(),
        }
    }
}

impl Told<String> {
    fn tell(&mut self, messages: impl IntoIterator<Item = String>) {
        for message in self.replace(messages) {
            warn!("{message}");
        }
    }

    fn tell_failure(&mut self, failure: Option<DataplaneError>) {
        for message in self.replace(failure.map(|error| error.to_string())) {
            error!("{message}");
        }
    }
}

impl<T: Ord + Clone> Told<T> {
    /// Takes what holds now and returns what is new in it, sorted.
    fn replace(&mut self, messages: impl IntoIterator<Item = T>) -> Vec<T> {
        let messages: BTreeSet<_> = messages.into_iter().collect();
        let new = messages.difference(&self.present).cloned().collect();
        self.present = messages;
        new
    }
}

async fn due(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_is_told_once_until_it_has_passed() {
        let mut told = Told::default();
        let tell = |told: &mut Told<String>, messages: &[&str]| {
            told.replace(messages.iter().map(ToString::to_string))
        };
        assert_eq!(tell(&mut told, &["a", "b"]), ["a", "b"]);
        assert!(tell(&mut told, &["b", "a"]).is_empty());
        assert_eq!(tell(&mut told, &["b", "c"]), ["c"]);
        assert_eq!(tell(&mut told, &["a"]), ["a"]);
    }
}
