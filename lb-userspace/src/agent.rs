//! The agent: keeps the data plane in step with its source and with what the health checks find.
//!
//! It is not in the packets' way. What it has written goes on serving while it is away, while its
//! file is bad or the Kubernetes API out of reach, and after it has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant as Clock};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tracing::{debug, error, info, warn};

use crate::config::{self, ConfigError};
use crate::dataplane::read::Reader;
use crate::dataplane::{
    self, Applied, AttachReport, AttachedMode, Attachment, Dataplane, DataplaneError, GONE_AFTER,
};
use crate::desired::{DesiredState, KeySpec};
use crate::ended::Recorder;
use crate::health::{Change, Checks};
use crate::http::{self, LogFilter};
use crate::interfaces::{Changes, Host, InterfaceError, in_subnet};
use crate::kubernetes::{self, SourceError};
use crate::memory;
use crate::observed::Observed;
use crate::peers::{self, Key, Link, PeerView, Peers, PeersError, VipWanted, Wanted};
use crate::plan::{self, Nodes, Warning, brief};
use crate::source::{Prepared, Source};
use crate::tables::{PeerRow, TableSet};

/// How often interfaces and the file are looked at without a sign that they changed.
const ROUND: Duration = Duration::from_secs(2);
/// How soon to come back to backends that should have been ended and are not yet.
const GONE_AGAIN: Duration = Duration::from_millis(200);

/// How long changes of interfaces are gathered.
const GATHER_CHANGES: Duration = Duration::from_millis(20);
/// How long a planned stop waits for a peer to take the VIPs.
const HAND_OVER: Duration = Duration::from_secs(2);
/// The rhythm of a node that has no peers.
const ALONE_INTERVAL: Duration = Duration::from_millis(300);

/// After so many writes the plan and its rows have taken memory worth giving back.
const MANY_WRITES: usize = 1000;

/// What the log says of a signal during the start.
const ENDED_EARLY: &str = "ended before there was anything to serve";

/// A node's name: the one that was given, else the host's.
pub fn node_name(given: Option<String>) -> String {
    given.unwrap_or_else(|| {
        let uname = rustix::system::uname();
        uname.nodename().to_string_lossy().into_owned()
    })
}

/// How the agent runs.
#[derive(Clone)]
pub struct Options {
    /// The file.
    pub config: PathBuf,
    /// This node's name, unlike that of any peer.
    pub node: String,
    /// Where services come from Kubernetes instead of the file.
    pub kubernetes: Option<Kubernetes>,
    /// Where the maps are and how large they are made.
    pub dataplane: dataplane::Options,
    /// Where ended flows are recorded.
    pub state_dir: PathBuf,
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
    /// Namespace of the agents; without it that of the ServiceAccount or kubeconfig.
    pub namespace: Option<String>,
    /// Where peers and their key are remembered for a start without the API.
    pub run_dir: PathBuf,
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
    /// The other nodes.
    #[error(transparent)]
    Peers(#[from] PeersError),
    /// Interfaces cannot be followed.
    #[error(transparent)]
    Interfaces(#[from] InterfaceError),
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
    memory::keep_little();
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
            Some(Kubernetes { namespace, run_dir }) => {
                let node = options.node.clone();
                Some(kubernetes::Options::infer(node, namespace, run_dir).await?)
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
        let former = Reader::open(&options.dataplane.bpffs);
        let control = former.and_then(|maps| maps.control());
        let serves = control.is_ok_and(|control| control.synced_seconds.is_some());
        let mut dataplane = Dataplane::open(&options.dataplane)?;
        let observed = Arc::new(Observed::new());
        let root = &options.dataplane.bpffs;
        let recorder = match Recorder::start(root, options.state_dir, Arc::clone(&observed)) {
            Ok(recorder) => recorder,
            Err(error) => {
                dataplane.give_up()?;
                return Err(error.into());
            }
        };
        dataplane.tell_of_endings(recorder.teller());
        if let Some(http) = options.http {
            tokio::spawn(http::serve(http, Arc::clone(&observed), options.log));
        }
        let mut source = prepared.start();
        // An earlier agent's maps serve, and the peers wait for no API.
        let meanwhile = source.meanwhile().filter(|_| serves);
        let waits = meanwhile.is_some();
        let state = match meanwhile {
            Some(state) => state,
            None => tokio::select! {
                state = source.first() => state,
                () = signals.end() => {
                    info!("{ENDED_EARLY}");
                    return Ok(dataplane.give_up()?);
                }
            },
        };
        let mut agent = Agent::new(dataplane, state, observed, options.node);
        agent.waits = waits;
        if let Err(error) = agent.start() {
            agent.dataplane.give_up()?;
            return Err(error.into());
        }
        agent.meet(options.dataplane.bpffs.clone())?;
        let mut changes = Changes::listen()?;
        memory::give_back();
        agent.serve(&mut source, &mut signals, &mut changes).await;
        source.stop().await;
        if let Some(peers) = agent.peers.take() {
            peers.hand_over(HAND_OVER).await;
        }
        recorder.stop();
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
    nodes: Nodes,
    /// Those whom this agent speaks with, once it has something to say.
    peers: Option<Peers>,
    peers_wanted: Option<Wanted>,
    /// Backends that other nodes have found not to answer.
    down_elsewhere: BTreeSet<(String, IpAddr)>,
    links: Vec<Link>,
    keys: Vec<Key>,
    tables: Arc<TableSet>,
    attachments: Vec<Attachment>,
    /// Whether the maps hold `tables` for the present attachments.
    in_step: bool,
    /// The source has not said yet which services there are: those that the maps hold are left alone.
    waits: bool,
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
    peer_notes: Told<String>,
    settle_failure: Told<String>,
    serving: String,
}

impl Agent {
    fn new(
        dataplane: Dataplane,
        state: DesiredState,
        observed: Arc<Observed>,
        node: String,
    ) -> Self {
        Self {
            observed,
            state,
            checks: Checks::default(),
            nodes: Nodes {
                name: node,
                peers: dataplane.peers(),
                ..Nodes::default()
            },
            peers: None,
            peers_wanted: None,
            down_elsewhere: BTreeSet::new(),
            links: Vec::new(),
            keys: Vec::new(),
            tables: Arc::default(),
            attachments: Vec::new(),
            in_step: false,
            waits: false,
            has_written: false,
            gone_due: None,
            dataplane,
            idle: Vec::new(),
            warnings: Told::default(),
            uplink_notes: Told::default(),
            table_notes: Told::default(),
            attach_failure: Told::default(),
            apply_failure: Told::default(),
            gone_failure: Told::default(),
            peer_notes: Told::default(),
            settle_failure: Told::default(),
            serving: String::new(),
        }
    }

    /// Serves the first state. The checks start behind it: they find backends as the file says.
    fn start(&mut self) -> Result<(), DataplaneError> {
        self.nodes.addresses = Host::read()?.own();
        self.nodes.remember();
        self.plan();
        self.attach()?;
        if !self.waits {
            self.apply()?;
        }
        self.follow_checks();
        Ok(())
    }

    /// Begins to speak with the peers.
    fn meet(&mut self, bpffs: PathBuf) -> Result<(), PeersError> {
        self.read_keys();
        let wanted = self.wanted();
        let options = peers::Options {
            bpffs,
            remembered: self.nodes.peers.clone(),
        };
        self.peers = Some(peers::start(options, wanted.clone())?);
        self.peers_wanted = Some(wanted);
        Ok(())
    }

    /// Reads the peers' keys anew; what cannot be read leaves them as they are.
    fn read_keys(&mut self) {
        let spec = self.state.peers.as_ref();
        let problem = match spec.map_or_else(|| Ok(Vec::new()), |spec| keys(&spec.key)) {
            Ok(keys) => {
                self.keys = keys;
                None
            }
            Err(problem) => Some(problem),
        };
        let view = self.observed.view();
        let notes = view.peers.iter().filter_map(|(name, peer)| {
            let note = peer.note.as_ref()?;
            Some(format!("node {name}: {note}"))
        });
        self.peer_notes.tell(problem.into_iter().chain(notes));
    }

    /// What this node is among its peers.
    fn wanted(&self) -> Wanted {
        let spec = &self.state.peers;
        let keyless = spec.is_some() && self.keys.is_empty();
        let placed = self.dataplane.placed();
        let vips = self.tables.vips.iter().filter_map(|(vip, row)| {
            let wanted = VipWanted {
                uplink: *placed.get(vip)?,
                announce: row.announce,
                candidate: row.candidate,
            };
            Some((*vip, wanted))
        });
        Wanted {
            node: self.nodes.name.clone(),
            addresses: spec
                .as_ref()
                .map(|spec| spec.nodes.clone())
                .unwrap_or_default(),
            keys: self.keys.clone(),
            interval: spec.as_ref().map_or(ALONE_INTERVAL, |spec| spec.interval),
            port: spec.as_ref().map_or(0, |spec| spec.port),
            links: self.links.clone(),
            vips: vips.collect(),
            down: self.checks.health().down().clone(),
            // Without a key nobody is heard, and silence would be taken for absence.
            ready: (self.in_step || self.waits) && !self.attachments.is_empty() && !keyless,
        }
    }

    /// Tells the peers' thread what has changed here.
    fn tell_peers(&mut self) {
        let wanted = self.wanted();
        if let Some(peers) = &self.peers
            && self.peers_wanted.as_ref() != Some(&wanted)
        {
            peers.want(wanted.clone());
            self.peers_wanted = Some(wanted);
        }
    }

    /// Takes what is known of the peers.
    fn follow_peers(&mut self) {
        let Some(view) = self.peers.as_ref().and_then(Peers::view) else {
            return;
        };
        let row = |(name, peer): (&String, &PeerView)| {
            let row = PeerRow {
                version: peer.version.clone(),
                live: peer.live,
                reflecting: peer.reflecting,
                synced: peer.synced,
                links: peer.links.clone(),
            };
            (name.clone(), row)
        };
        let rows: BTreeMap<_, _> = view.peers.iter().map(row).collect();
        tell_of_peers(&self.nodes.peers, &rows);
        let down = view
            .peers
            .values()
            .flat_map(|peer| peer.down.iter().cloned());
        let down = down.collect();
        if self.nodes.peers != rows || self.down_elsewhere != down {
            self.nodes.peers = rows;
            self.nodes.remember();
            self.down_elsewhere = down;
            self.plan();
        }
        self.observed.peers(view);
    }

    /// As long as a peer may not have told which flows are its own, nothing in mid-flow is reset.
    fn settle(&mut self) {
        let view = self.observed.view();
        if !view.settled && !view.peers.is_empty() {
            let failure = self.dataplane.settle().err();
            self.settle_failure.tell_failure(failure);
        }
    }

    async fn serve(&mut self, source: &mut Source, signals: &mut Signals, changes: &mut Changes) {
        self.keep_in_step(source);
        self.observed.file(source.history());
        if let Some(kubernetes) = source.kubernetes() {
            self.observed.follow(Arc::clone(kubernetes));
        }
        let mut round = interval(ROUND);
        round.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut look_due = None;
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
                () = changes.changed() => {
                    // Pods that come and go bring many changes at a time.
                    look_due = look_due.or_else(|| Some(Instant::now() + GATHER_CHANGES));
                }
                () = due(look_due) => {
                    look_due = None;
                    self.keep_attached();
                }
                () = peers_changed(self.peers.as_mut()) => {
                    self.follow_peers();
                    self.settle();
                }
                _ = round.tick() => {
                    source.look();
                    self.reload(source);
                    self.keep_attached();
                    self.follow_peers();
                    self.read_keys();
                    self.settle();
                }
            }
            self.keep_in_step(source);
            self.tell_peers();
            self.observed.turned();
        }
    }

    fn reload(&mut self, source: &mut Source) {
        let news = source.news();
        self.observed.file(source.history());
        match news {
            Ok(None) => {}
            Ok(Some(state)) if !self.waits && state == self.state => {
                debug!("the same is wanted as before")
            }
            Ok(Some(state)) => {
                let has_other_uplinks = state.uplinks != self.state.uplinks;
                let has_other_peers = state.peers != self.state.peers;
                self.waits = false;
                self.state = state;
                if has_other_peers {
                    self.read_keys();
                }
                self.follow_checks();
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

    /// Each node checks its own backends and tells the others: from elsewhere a pod need not be reachable.
    fn follow_checks(&mut self) {
        let nodes = &self.nodes;
        self.checks
            .follow(&self.state, |backend| nodes.is_here(backend));
    }

    fn plan(&mut self) {
        let started = Clock::now();
        let health = self.checks.health().and(&self.down_elsewhere);
        let (tables, warnings) = plan::plan(&self.state, &health, &self.nodes);
        let took = started.elapsed();
        for warning in plan::sentences(&self.warnings.replace(warnings.iter().cloned())) {
            warn!("{warning}");
        }
        if tables != *self.tables {
            self.tables = Arc::new(tables);
            self.in_step = false;
        }
        self.observed
            .planned(took, &self.state, &health, &self.tables, warnings.len());
    }

    fn attach(&mut self) -> Result<(), DataplaneError> {
        let uplinks = &self.state.uplinks;
        let attached = self.dataplane.attach(uplinks, &self.tables);
        self.observed.attached(attached.as_ref());
        let AttachReport {
            attachments,
            idle,
            links,
            addresses,
        } = attached?;
        if self.links != links {
            // Where VIPs belong is told by addresses.
            self.links = links;
            self.in_step = false;
        }
        if self.nodes.addresses != addresses {
            self.nodes.addresses = addresses;
            self.nodes.remember();
            self.plan();
            self.follow_checks();
        }
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
        if let Some(peers) = self.peers.as_ref().filter(|_| writes > 0) {
            peers.tables_changed();
        }
        self.note(applied);
        if writes > MANY_WRITES {
            memory::give_back();
        }
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
        if self.waits {
            return;
        }
        if !self.in_step {
            let failure = self.apply().err();
            self.apply_failure.tell_failure(failure);
        }
        source.found_at(self.found_at());
        if self.in_step {
            source.in_step(
                &self.tables,
                &self.idle,
                std::mem::take(&mut self.has_written),
            );
        }
    }

    /// Own addresses where peers that share a VIP find this node.
    fn found_at(&self) -> BTreeSet<IpAddr> {
        let shares = |(address, length): &(IpAddr, u8)| {
            let mut vips = self.state.vips.iter();
            vips.any(|vip| in_subnet(vip.address, *address, *length))
        };
        let addresses = self.links.iter().flat_map(|link| &link.addresses);
        addresses
            .filter(|address| shares(address))
            .map(|(address, _)| *address)
            .collect()
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

/// Says who has come and gone.
fn tell_of_peers(before: &BTreeMap<String, PeerRow>, now: &BTreeMap<String, PeerRow>) {
    for (name, peer) in now {
        let was = before.get(name).cloned().unwrap_or_default();
        if was.live != peer.live || was.reflecting != peer.reflecting {
            let agent = if peer.live {
                "is heard"
            } else {
                "is not heard"
            };
            let program = if peer.reflecting {
                "takes new flows"
            } else {
                "takes no new flows"
            };
            info!(peer = name, "its agent {agent}, its data plane {program}");
        }
    }
}

/// The keys of a file or Secret, a line each.
fn keys(spec: &KeySpec) -> Result<Vec<Key>, String> {
    let (text, of) = match spec {
        KeySpec::Text(text) => (text.clone(), "the peers' key".to_owned()),
        KeySpec::File(path) => match config::read(path) {
            Ok(text) => (text, path.display().to_string()),
            Err(error) => {
                return Err(format!(
                    "cannot read the peers' key {}: {error}",
                    path.display()
                ));
            }
        },
    };
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let keys: Result<Vec<_>, _> = lines.map(|line| Key::from_bytes(line.as_bytes())).collect();
    match keys {
        Ok(keys) if keys.is_empty() && matches!(spec, KeySpec::File(_)) => {
            Err(format!("{of}: there is no key in it"))
        }
        Ok(keys) => Ok(keys),
        Err(error) => Err(format!("{of}: {error}")),
    }
}

async fn peers_changed(peers: Option<&mut Peers>) {
    match peers {
        Some(peers) => peers.changed().await,
        None => std::future::pending().await,
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
