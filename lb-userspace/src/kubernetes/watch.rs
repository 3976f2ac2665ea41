//! The API's objects as they are now: lists that are kept up by watches, and a sign when they change.
//!
//! Whatever goes wrong, the last state stays until a whole new list has been read. So an outage of the
//! API changes nothing, and what a watch has missed is healed by the next list: after every error, and
//! from time to time without one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::hash::Hash;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, PodStatus, Secret, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::reflector::{self, Store, store::Writer};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{debug, info, warn};

use super::status::Status;
use super::translate::Snapshot;
use crate::config::{ClusterConfig, Namespaces};

/// Slices of Services that have an address; headless ones are nobody's to balance.
const SLICES: &str = "kubernetes.io/service-name,!service.kubernetes.io/headless";
/// Marks the Leases in which agents tell what they serve.
pub(super) const AGENT_LEASES: &str = "ironlb.dev/lease=agent";
/// How often everything is listed anew although no watch has failed.
pub const RESYNC: Duration = Duration::from_secs(300);
/// How long one watch call lasts. A connection that died without a word is noticed soon after that.
const WATCH_SECONDS: u32 = 60;
const SHORTEST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// How long to wait after a number of failures in a row.
pub(super) fn wait_after(failures: u32) -> Duration {
    (SHORTEST_WAIT * 2_u32.saturating_pow(failures.saturating_sub(1).min(16))).min(LONGEST_WAIT)
}

/// A sign that something has changed, and since when nobody has looked.
#[derive(Debug, Default)]
pub(super) struct Sign {
    notify: Notify,
    since: Mutex<Option<Instant>>,
}

impl Sign {
    pub fn raise(&self) {
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        since.get_or_insert_with(Instant::now);
        drop(since);
        self.notify.notify_one();
    }

    /// Takes the sign down and tells since when it was up.
    pub fn take(&self) -> Option<Instant> {
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        since.take()
    }

    /// Waits until the sign is up. Safe to cancel: it stays up until it is taken.
    pub async fn raised(&self) {
        loop {
            let notified = self.notify.notified();
            let since = *self.since.lock().unwrap_or_else(PoisonError::into_inner);
            if since.is_some() {
                return;
            }
            notified.await;
        }
    }
}

/// Everything that an agent watches.
pub(super) struct Watches {
    client: Client,
    resync: Duration,
    status: Arc<Status>,
    /// Up when Services, slices, pods or what is known of the agents have changed.
    pub sign: Arc<Sign>,
    services: Watched<Service>,
    slices: Watched<EndpointSlice>,
    /// By namespace; `None` for all of them.
    pods: BTreeMap<Option<String>, Watched<Pod>>,
}

impl Watches {
    /// Starts to watch what does not depend on the configuration. Called on the runtime.
    pub fn start(client: &Client, resync: Duration, status: &Arc<Status>) -> Self {
        let sign = Arc::new(Sign::default());
        let all = watcher::Config::default().timeout(WATCH_SECONDS);
        let plan = Plan {
            resync,
            status: status.clone(),
            signs: vec![sign.clone()],
        };
        let services = plan.watch(Api::all(client.clone()), "Services", &all, |_| {});
        let slices = all.clone().labels(SLICES);
        let slices = plan.watch(Api::all(client.clone()), "EndpointSlices", &slices, |_| {});
        Self {
            client: client.clone(),
            resync,
            status: status.clone(),
            sign,
            services,
            slices,
            pods: BTreeMap::new(),
        }
    }

    /// Watches the pods of those namespaces that VIPs are for, and no others.
    pub fn follow(&mut self, config: &ClusterConfig) {
        let mut wanted: BTreeSet<Option<String>> = BTreeSet::new();
        for policy in config.policies.values() {
            match &policy.namespaces {
                Namespaces::All => wanted.extend([None]),
                Namespaces::Named(names) => wanted.extend(names.iter().cloned().map(Some)),
            }
        }
        if wanted.contains(&None) {
            wanted = BTreeSet::from([None]);
        }
        self.pods.retain(|namespace, _| wanted.contains(namespace));
        for namespace in wanted {
            if self.pods.contains_key(&namespace) {
                continue;
            }
            let (api, what) = match &namespace {
                None => (Api::all(self.client.clone()), "Pods".to_owned()),
                Some(name) => (
                    Api::namespaced(self.client.clone(), name),
                    format!("Pods of namespace {name}"),
                ),
            };
            let plan = Plan {
                resync: self.resync,
                status: self.status.clone(),
                signs: vec![self.sign.clone()],
            };
            let config = watcher::Config::default().timeout(WATCH_SECONDS);
            let pods = plan.watch(api, &what, &config, keep_what_matters);
            self.pods.insert(namespace, pods);
        }
    }

    /// What the API holds, `None` until all of it has been read once.
    pub fn snapshot(&self) -> Option<Snapshot> {
        let mut what: Vec<_> = self.pods.values().map(|pods| pods.what.clone()).collect();
        what.extend([self.services.what.clone(), self.slices.what.clone()]);
        self.status.has_synced(&what).then(|| Snapshot {
            services: self.services.store.state(),
            slices: self.slices.store.state(),
            pods: self
                .pods
                .values()
                .flat_map(|pods| pods.store.state())
                .collect(),
        })
    }
}

/// The Leases in which agents tell what they serve and where they are.
pub(super) fn agent_leases(
    client: &Client,
    namespace: &str,
    status: &Arc<Status>,
    signs: Vec<Arc<Sign>>,
) -> Watched<Lease> {
    let plan = Plan {
        resync: RESYNC,
        status: status.clone(),
        signs,
    };
    let config = watcher::Config::default()
        .timeout(WATCH_SECONDS)
        .labels(AGENT_LEASES);
    let api = Api::namespaced(client.clone(), namespace);
    plan.watch(api, "Leases of agents", &config, |_| {})
}

/// The one Secret of that name.
pub(super) fn secret(
    client: &Client,
    namespace: &str,
    name: &str,
    status: &Arc<Status>,
    sign: &Arc<Sign>,
) -> Watched<Secret> {
    let plan = Plan {
        resync: RESYNC,
        status: status.clone(),
        signs: vec![sign.clone()],
    };
    // The right to read is for this name alone, and so must the question be.
    let config = watcher::Config::default()
        .timeout(WATCH_SECONDS)
        .fields(&format!("metadata.name={name}"));
    let api = Api::namespaced(client.clone(), namespace);
    plan.watch(api, &format!("Secret {name}"), &config, |_| {})
}

/// Of a pod, what the translation reads. The rest would be most of an agent's memory.
fn keep_what_matters(pod: &mut Pod) {
    pod.status = pod.status.take().map(|status| PodStatus {
        pod_ips: status.pod_ips,
        ..PodStatus::default()
    });
    pod.metadata.annotations = None;
    if let Some(spec) = pod.spec.take() {
        let containers = spec.containers.into_iter().map(|container| Container {
            name: container.name,
            ports: container.ports,
            ..Container::default()
        });
        pod.spec = Some(PodSpec {
            host_network: spec.host_network,
            containers: containers.collect(),
            ..PodSpec::default()
        });
    }
}

/// How to watch.
struct Plan {
    resync: Duration,
    status: Arc<Status>,
    signs: Vec<Arc<Sign>>,
}

/// Objects of one kind that are kept up to date until this is dropped.
pub(super) struct Watched<K: Resource<DynamicType = ()> + 'static> {
    what: String,
    status: Arc<Status>,
    pub store: Store<K>,
    task: AbortHandle,
}

impl<K: Resource<DynamicType = ()> + 'static> Drop for Watched<K> {
    fn drop(&mut self) {
        self.task.abort();
        self.status.end(&self.what);
    }
}

impl<K: Resource<DynamicType = ()> + Clone + 'static> Watched<K> {
    /// What it is called in [`Status`].
    pub fn what(&self) -> &str {
        &self.what
    }

    /// Whether all has been read once.
    pub fn has_synced(&self) -> bool {
        self.status.has_synced(std::slice::from_ref(&self.what))
    }
}

impl Plan {
    fn watch<K>(
        self: &Plan,
        api: Api<K>,
        what: &str,
        config: &watcher::Config,
        prune: fn(&mut K),
    ) -> Watched<K>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    {
        let (store, writer) = reflector::store();
        self.status.begin(what);
        let follow = follow(Follow {
            api,
            what: what.to_owned(),
            config: config.clone(),
            prune,
            writer,
            resync: self.resync,
            status: self.status.clone(),
            signs: self.signs.clone(),
        });
        Watched {
            what: what.to_owned(),
            status: self.status.clone(),
            store,
            task: tokio::spawn(follow).abort_handle(),
        }
    }
}

struct Follow<K: Resource<DynamicType = ()> + Clone + 'static> {
    api: Api<K>,
    what: String,
    config: watcher::Config,
    prune: fn(&mut K),
    writer: Writer<K>,
    resync: Duration,
    status: Arc<Status>,
    signs: Vec<Arc<Sign>>,
}

/// Lists and watches for ever. A list is a consistent read, never one of an API server's older past, as
/// an initial list by watch may be; the watch after it asks for bookmarks.
async fn follow<K>(mut follow: Follow<K>)
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    K::DynamicType: Hash + Eq,
{
    let what = follow.what.clone();
    let mut failures = 0;
    loop {
        let mut events = pin!(watcher(follow.api.clone(), follow.config.clone()));
        let resync = Instant::now() + follow.resync;
        loop {
            let event = tokio::select! {
                event = events.next() => event,
                () = sleep_until(resync) => {
                    debug!("{what}: listing anew");
                    break;
                }
            };
            match event {
                Some(Ok(event)) => {
                    let event = event.modify(|object| {
                        object.meta_mut().managed_fields = None;
                        (follow.prune)(object);
                    });
                    follow.writer.apply_watcher_event(&event);
                    match event {
                        Event::Init | Event::InitApply(_) => {}
                        Event::InitDone => {
                            if std::mem::take(&mut failures) > 0 {
                                info!("{what}: read again");
                            }
                            follow.status.synced(&what);
                            follow.signs.iter().for_each(|sign| sign.raise());
                        }
                        Event::Apply(_) | Event::Delete(_) => {
                            follow.status.event();
                            follow.signs.iter().for_each(|sign| sign.raise());
                        }
                    }
                }
                Some(Err(error)) => {
                    failures += 1;
                    told(&follow.status, &what, &error);
                    sleep(wait_after(failures)).await;
                    break;
                }
                None => break,
            }
        }
    }
}

fn told(status: &Status, what: &str, error: &watcher::Error) {
    if let watcher::Error::WatchError(gone) = error
        && gone.code == 410
    {
        debug!("{what}: the watch fell too far behind; listing anew");
        return;
    }
    let mut why = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        let cause = error.to_string();
        if !why.contains(&cause) {
            why.extend([": ", &cause]);
        }
        source = error.source();
    }
    if status.broke(what, &why) {
        warn!("cannot read {what}; the last state goes on serving: {why}");
    }
}
