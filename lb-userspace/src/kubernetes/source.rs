//! The pieces put together: what the agent sees of Kubernetes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::{Mutex, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{debug, info, warn};

use super::directory::{ADDRESSES, Directory, SECRET};
use super::lease::{self, Election};
use super::status::Status;
use super::translate::{Snapshot, translate};
use super::watch::{self as watches, Sign, Watches, wait_after};
use super::writer::{MANAGER, PATIENCE, Published, SERVED, ServedMap, Writer, within};
use crate::config::source::FileSource;
use crate::config::{ClusterConfig, ConfigError};
use crate::desired::DesiredState;
use crate::tables::TableSet;

/// The Lease of the election.
const WRITER_LEASE: &str = "ironlb-writer";
/// How long changes are gathered before they are looked at: so long, or as long as the last look took,
/// which leaves half of a processor to others however fast changes come.
const SHORTEST_GATHER: Duration = Duration::from_millis(5);
const LONGEST_GATHER: Duration = Duration::from_millis(50);
/// How often a start that waits for the API says so.
const SAY_AGAIN: Duration = Duration::from_secs(10);
/// How long a start waits for the peers and their key when all else is known: the first writer makes the key.
const PEERS_PATIENCE: Duration = Duration::from_secs(5);
/// How often an agent states again what its Lease should say, in case somebody removed it.
const STATE_AGAIN: Duration = Duration::from_secs(300);

/// How to take services from Kubernetes.
#[derive(Clone)]
pub struct Options {
    /// The API.
    pub client: Client,
    /// Namespace of the agents, for their Leases.
    pub namespace: String,
    /// This node's name.
    pub node: String,
    /// How often everything is listed anew.
    pub resync: Duration,
    /// How long the writer's Lease lasts.
    pub lease: Duration,
    /// Folder in which the peers and their key are remembered for a start without the API.
    pub state_dir: PathBuf,
}

impl Options {
    /// The options of an agent on a node, with the API that its surroundings name: in a pod its
    /// ServiceAccount, else a kubeconfig.
    pub async fn infer(
        node: String,
        namespace: Option<String>,
        state_dir: PathBuf,
    ) -> Result<Self, SourceError> {
        let mut config = kube::Config::infer().await?;
        config.connect_timeout = Some(PATIENCE);
        let client = Client::try_from(config)?;
        let namespace = namespace.unwrap_or_else(|| client.default_namespace().to_owned());
        Ok(Self {
            client,
            namespace,
            node,
            resync: watches::RESYNC,
            lease: lease::DURATION,
            state_dir,
        })
    }
}

/// Why Kubernetes cannot be the source.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// No API is named.
    #[error(
        "cannot tell which Kubernetes API to use: {0}; run in a pod with a ServiceAccount, \
         or name a kubeconfig in KUBECONFIG"
    )]
    Infer(#[from] kube::config::InferConfigError),
    /// The API's client could not be made.
    #[error("cannot make a client of the Kubernetes API: {0}")]
    Client(#[from] kube::Error),
}

/// Kubernetes as a source: the file says which VIPs there are, the API which Services.
pub struct Source {
    file: FileSource<ClusterConfig>,
    config: Arc<ClusterConfig>,
    node: String,
    watches: Watches,
    status: Arc<Status>,
    directory: Directory,
    published: watch::Sender<Option<Arc<Published>>>,
    stated: watch::Sender<Stated>,
    election: Arc<Mutex<Election>>,
    tasks: Vec<AbortHandle>,
    /// Since when the change that is being served was known, and when the work on it began.
    changed: Option<(Instant, Instant)>,
    gather: Duration,
}

/// What an agent's own Lease tells the others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Stated {
    /// What its maps hold, once they hold what the API wants.
    served: Option<ServedMap>,
    /// Its addresses on its uplinks.
    addresses: BTreeSet<IpAddr>,
}

impl Drop for Source {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl Source {
    /// Begins to watch and to stand for the election. To be called on a runtime.
    pub fn start(file: FileSource<ClusterConfig>, config: ClusterConfig, options: Options) -> Self {
        let Options {
            client,
            namespace,
            node,
            resync,
            lease,
            state_dir,
        } = options;
        let status = Arc::new(Status::default());
        let mut watches = Watches::start(&client, resync, &status);
        watches.follow(&config);
        let leases: Api<Lease> = Api::namespaced(client.clone(), &namespace);
        let (published, published_receiver) = watch::channel(None);
        let (stated, stated_receiver) = watch::channel(Stated::default());
        let (leads, leads_until) = watch::channel(None);
        let election = Election::new(leases.clone(), WRITER_LEASE, &node, lease);
        let election = Arc::new(Mutex::new(election));
        let agents_sign = Arc::new(Sign::default());
        let signs = vec![agents_sign.clone(), watches.sign.clone()];
        let agents = Arc::new(watches::agent_leases(&client, &namespace, &status, signs));
        let secret = watches::secret(&client, &namespace, SECRET, &status, &watches.sign);
        let directory = Directory::new(agents.clone(), secret, &state_dir);
        let secrets = Api::namespaced(client.clone(), &namespace);
        let keeper = directory.keeper(secrets, leads_until.clone(), status.clone());
        let agents = (agents, agents_sign);
        let writer = Writer::new(client, &node, published_receiver, leads_until, agents);
        let tasks = vec![
            tokio::spawn(keeper).abort_handle(),
            tokio::spawn(stand(election.clone(), leads, status.clone())).abort_handle(),
            tokio::spawn(writer.run()).abort_handle(),
            tokio::spawn(state(leases, node.clone(), stated_receiver)).abort_handle(),
        ];
        Self {
            file,
            config: Arc::new(config),
            node,
            watches,
            status,
            directory,
            published,
            stated,
            election,
            tasks,
            changed: None,
            gather: SHORTEST_GATHER,
        }
    }

    /// What is known of the API's state.
    pub fn status(&self) -> &Arc<Status> {
        &self.status
    }

    /// The file.
    pub fn file(&self) -> &FileSource<ClusterConfig> {
        &self.file
    }

    /// The file.
    pub fn file_mut(&mut self) -> &mut FileSource<ClusterConfig> {
        &mut self.file
    }

    /// What can be wanted before the API has said anything: all but the Services. `None` if no earlier agent has left
    /// behind who its peers are.
    pub fn meanwhile(&mut self) -> Option<DesiredState> {
        let mut state = translate(&self.config, &Snapshot::default()).desired(&self.node);
        state.peers = Some(self.directory.peers(&self.config));
        self.directory.is_known().then_some(state)
    }

    /// Waits until everything has been read once, and says while it waits why it does. For the peers it waits only a
    /// while: Services can be served without.
    pub async fn first(&mut self) -> DesiredState {
        let mut without_peers = None;
        loop {
            let waited = async {
                match &without_peers {
                    Some((until, _)) => sleep_until(*until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.watches.sign.raised() => {}
                () = waited => {
                    if let Some((_, state)) = without_peers {
                        return state;
                    }
                }
                () = sleep(SAY_AGAIN) => {
                    let broken = self.status.broken();
                    info!("waiting for the Kubernetes API; what the maps hold goes on serving{}{}",
                        if broken.is_empty() { "" } else { ": " }, broken.join("; "));
                }
            }
            if let Some(state) = self.translate(true) {
                if self.directory.is_known() {
                    return state;
                }
                let until = without_peers.map(|(until, _)| until);
                let until = until.unwrap_or_else(|| Instant::now() + PEERS_PATIENCE);
                without_peers = Some((until, state));
            }
        }
    }

    /// Waits for a sign of change in the API or the file. Safe to cancel.
    pub async fn changed(&mut self) {
        tokio::select! {
            () = self.watches.sign.raised() => sleep(self.gather).await,
            () = self.file.changed() => {}
        }
    }

    /// What is wanted now, `None` if nothing has changed.
    pub fn news(&mut self) -> Result<Option<DesiredState>, ConfigError> {
        let config = self.file.news()?;
        let is_new = config.is_some();
        if let Some(config) = config {
            info!("{} has changed and is good", self.file.path().display());
            self.watches.follow(&config);
            self.config = Arc::new(config);
        }
        Ok(self.translate(is_new))
    }

    fn translate(&mut self, anyway: bool) -> Option<DesiredState> {
        let begun = Instant::now();
        let since = self.watches.sign.take();
        if since.is_none() && !anyway {
            return None;
        }
        let Some(snapshot) = self.watches.snapshot() else {
            // Something is still to be read; its sign is to come.
            return None;
        };
        let translation = translate(&self.config, &snapshot);
        let mut state = translation.desired(&self.node);
        state.peers = Some(self.directory.peers(&self.config));
        let former = self.changed.map(|(since, _)| since);
        self.changed = former.or(since).map(|since| (since, begun));
        self.published.send_replace(Some(Arc::new(Published {
            services: snapshot.services,
            translation,
        })));
        Some(state)
    }

    /// Tells that the maps hold these tables, but for those VIPs that no uplink carries, and whether
    /// something had to be written.
    pub fn in_step(&mut self, tables: &TableSet, idle: &[IpAddr], has_written: bool) {
        let mut served = ServedMap::new();
        for ((vip, _), row) in &tables.ports {
            if !idle.contains(vip) {
                served.entry(*vip).or_default().insert(row.service.clone());
            }
        }
        // The first one always: an earlier agent may have told more.
        self.stated.send_if_modified(|last| {
            let is_new = last.served.as_ref() != Some(&served);
            last.served = Some(served);
            is_new
        });
        if let Some((since, begun)) = self.changed.take() {
            self.gather = begun.elapsed().clamp(SHORTEST_GATHER, LONGEST_GATHER);
            if has_written {
                let took = since.elapsed();
                self.status.applied(took);
                debug!("in the maps {took:.1?} after the watch event");
            }
        }
    }

    /// Tells where this agent is found.
    pub fn found_at(&mut self, addresses: BTreeSet<IpAddr>) {
        self.stated.send_if_modified(|last| {
            let is_new = last.addresses != addresses;
            last.addresses = addresses;
            is_new
        });
    }

    /// Lets another agent write. What has been written stays.
    pub async fn stop(self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        let released = async { self.election.lock().await.release().await };
        match timeout(PATIENCE, released).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!("cannot give up the writer's Lease; it will run out: {error}"),
            Err(_) => warn!("cannot give up the writer's Lease; it will run out"),
        }
    }
}

/// Stands for the election for ever.
async fn stand(
    election: Arc<Mutex<Election>>,
    leads: watch::Sender<Option<Instant>>,
    status: Arc<Status>,
) {
    let mut complaint = String::new();
    loop {
        let (pause, until) = {
            let mut election = election.lock().await;
            match within(election.step()).await {
                Ok(()) => {
                    status.contact();
                    complaint.clear();
                }
                Err(failure) => {
                    let why = failure.to_string();
                    if why != complaint {
                        warn!("cannot look at the writer's Lease: {why}");
                        complaint = why;
                    }
                }
            }
            (election.pause(), election.holds_until())
        };
        if until.is_some() != status.leads() {
            match until {
                Some(_) => info!("this agent writes status and Events from now on"),
                None => info!("this agent writes no more: it does not hold the Lease any longer"),
            }
            status.set_leads(until.is_some());
        }
        // Only a change of hands wakes the writer.
        leads.send_if_modified(|last| {
            let changes_hands = last.is_some() != until.is_some();
            *last = until;
            changes_hands
        });
        sleep(pause).await;
    }
}

/// States for ever, in a Lease of this agent's own, what its maps hold and where it is found.
async fn state(leases: Api<Lease>, node: String, mut stated: watch::Receiver<Stated>) {
    let name = format!("ironlb-agent-{node}");
    let params = PatchParams::apply(MANAGER).force();
    let mut failures = 0;
    while !matches!(timeout(STATE_AGAIN, stated.changed()).await, Ok(Err(_))) {
        loop {
            let Stated { served, addresses } = stated.borrow_and_update().clone();
            // To leave it out would be to say that nothing is served.
            let Some(served) = served else { break };
            let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
            let lease = json!({
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {
                    "name": name,
                    "labels": {"ironlb.dev/lease": "agent"},
                    "annotations": {SERVED: json!(served).to_string(), ADDRESSES: addresses.join(",")},
                },
                "spec": {"holderIdentity": node},
            });
            match within(leases.patch(&name, &params, &Patch::Apply(lease))).await {
                Ok(_) => {
                    failures = 0;
                    break;
                }
                Err(failure) => {
                    failures += 1;
                    if failures == 1 {
                        warn!("cannot state in Lease {name} what is served: {failure}");
                    }
                    sleep(wait_after(failures)).await;
                }
            }
        }
    }
}
