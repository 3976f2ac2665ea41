//! What users see in the API: status, given VIPs and slots on Services, and Events. Written by the agent
//! that holds the Lease, for all of them.
//!
//! A Service's status shows a VIP once an agent on which that VIP is effective has told, in a Lease of its
//! own, that its maps hold the Service there. Everything is one patch of `services/status`, which for
//! Services also carries annotations: the agent needs no right to change a Service itself. The patch
//! names the version that it was made for, so it never undoes what somebody else wrote meanwhile.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{LoadBalancerIngress, Service};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Error};
use serde_json::{Map, Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, info, warn};

use super::events::{Notice, Teller};
use super::translate::{Outcome, Translation};
use super::watch::{Sign, Watched, wait_after};
use super::{ASSIGNED_VIPS, INSTANCE_SLOTS, Problem};

/// On an agent's Lease: JSON `{VIP: [namespace/name]}` of what its maps hold.
pub(super) const SERVED: &str = "ironlb.dev/served";
/// Who changed it, for the API's records.
pub(super) const MANAGER: &str = "ironlb";
/// How long an answer may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// How often everything is gone through without a sign of change.
const PERIOD: Duration = Duration::from_secs(60);
/// How long problems may pass by themselves before they are told.
const EVENTS_WAIT: Duration = Duration::from_secs(1);
/// Events that one Service may cause; what is beyond them stays in the log.
const MOST_EVENTS: usize = 20;

/// Services by VIP, as maps hold them.
pub(super) type ServedMap = BTreeMap<IpAddr, BTreeSet<String>>;

/// What the writer works from.
pub(super) struct Published {
    pub services: Vec<Arc<Service>>,
    pub translation: Translation,
}

pub(super) struct Writer {
    pub client: Client,
    pub published: watch::Receiver<Option<Arc<Published>>>,
    /// Until when this agent may write.
    pub leads_until: watch::Receiver<Option<Instant>>,
    pub agents: Arc<Watched<Lease>>,
    pub agents_sign: Arc<Sign>,
    pub teller: Teller,
    /// Versions that a patch of ours has already replaced, by `namespace/name`.
    written: HashMap<String, String>,
    failures: u32,
}

impl Writer {
    pub fn new(
        client: Client,
        node: &str,
        published: watch::Receiver<Option<Arc<Published>>>,
        leads_until: watch::Receiver<Option<Instant>>,
        (agents, agents_sign): (Arc<Watched<Lease>>, Arc<Sign>),
    ) -> Self {
        Self {
            teller: Teller::new(client.clone(), node.to_owned()),
            client,
            published,
            leads_until,
            agents,
            agents_sign,
            written: HashMap::new(),
            failures: 0,
        }
    }

    /// Writes whenever something has changed and this agent holds the Lease. Never ends by itself.
    pub async fn run(mut self) {
        let mut next = Instant::now();
        let mut events_due = next;
        loop {
            tokio::select! {
                changed = self.published.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    events_due = events_due.min(Instant::now() + EVENTS_WAIT);
                }
                changed = self.leads_until.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    // What a former writer did is not known.
                    self.written.clear();
                    events_due = Instant::now();
                }
                () = self.agents_sign.raised() => drop(self.agents_sign.take()),
                () = sleep_until(next) => {}
            }
            let published = self.published.borrow_and_update().clone();
            let (true, Some(published)) = (self.may_write(), published) else {
                next = Instant::now() + PERIOD;
                continue;
            };
            let mut whole = self.write_services(&published).await;
            if whole && Instant::now() >= events_due {
                whole = self.tell_problems(&published).await;
                events_due = Instant::now() + PERIOD;
            }
            self.failures = if whole { 0 } else { self.failures + 1 };
            let now = Instant::now();
            let again = if whole {
                PERIOD
            } else {
                wait_after(self.failures)
            };
            next = (now + again).min(events_due.max(now));
        }
    }

    fn may_write(&self) -> bool {
        let until = *self.leads_until.borrow();
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Returns whether all that was to be written is.
    async fn write_services(&mut self, published: &Published) -> bool {
        let serving = Serving::new(&published.translation, &self.agents.store.state());
        let mut whole = true;
        for service in &published.services {
            let (key, version) = (key(service), version(service));
            let Some(outcome) = published.translation.outcomes().get(&key) else {
                self.written.remove(&key);
                continue;
            };
            if self
                .written
                .get(&key)
                .is_some_and(|written| written == version)
            {
                // The watch has not brought our own change yet.
                continue;
            }
            let served = serving.of(&key, outcome);
            let Some(patch) = changes(service, outcome, &served) else {
                continue;
            };
            if !self.may_write() {
                return false;
            }
            match self.patch(service, patch).await {
                Ok(()) => {
                    let version = version.to_owned();
                    self.written.insert(key.clone(), version);
                    whole &= self.tell_gains(service, &key, &served).await;
                }
                // It has changed or gone, and the watch will bring that.
                Err(Failure::Api(Error::Api(status)))
                    if status.is_conflict() || status.is_not_found() =>
                {
                    debug!("Service {key} has changed meanwhile");
                }
                Err(failure) => {
                    warn!("cannot write the status of Service {key}: {failure}");
                    whole = false;
                }
            }
        }
        whole
    }

    async fn patch(&self, service: &Service, patch: Value) -> Result<(), Failure> {
        let namespace = service.metadata.namespace.as_deref().unwrap_or_default();
        let name = service.metadata.name.as_deref().unwrap_or_default();
        let api: Api<Service> = Api::namespaced(self.client.clone(), namespace);
        let params = PatchParams {
            field_manager: Some(MANAGER.to_owned()),
            ..PatchParams::default()
        };
        debug!("patching the status of Service {namespace}/{name}: {patch}");
        let patch = Patch::Merge(patch);
        within(api.patch_status(name, &params, &patch))
            .await
            .map(drop)
    }

    async fn tell_gains(&mut self, service: &Service, key: &str, served: &[IpAddr]) -> bool {
        let shown = shown(service);
        for vip in served.iter().filter(|vip| !shown.contains(vip)) {
            info!("Service {key} is served on {vip}");
            let notice = Notice {
                kind: "Normal",
                reason: "Served",
                note: format!("served on VIP {vip}"),
            };
            if !self.tell(service, key, notice).await {
                return false;
            }
        }
        true
    }

    async fn tell_problems(&mut self, published: &Published) -> bool {
        let mut limits = published.translation.limits();
        let mut holds: HashMap<String, BTreeSet<Problem>> = HashMap::new();
        for (key, outcome) in published.translation.outcomes() {
            let mut problems = outcome.problems.clone();
            problems.append(&mut limits.remove(key).unwrap_or_default());
            holds.insert(key.clone(), problems);
        }
        let by_uid: HashMap<&str, &BTreeSet<Problem>> = published
            .services
            .iter()
            .filter_map(|service| {
                Some((service.metadata.uid.as_deref()?, holds.get(&key(service))?))
            })
            .collect();
        self.teller.retain(|uid, notice| {
            let problems = by_uid.get(uid);
            let is_problem = |problem: &Problem| warning(problem) == *notice;
            problems.is_some_and(|p| notice.kind == "Normal" || p.iter().any(is_problem))
        });
        let mut whole = true;
        for service in &published.services {
            let key = key(service);
            for problem in holds.get(&key).into_iter().flatten().take(MOST_EVENTS) {
                if !self.may_write() {
                    return false;
                }
                whole &= self.tell(service, &key, warning(problem)).await;
            }
        }
        whole
    }

    async fn tell(&mut self, service: &Service, key: &str, notice: Notice) -> bool {
        let told = within(self.teller.tell(service, notice)).await;
        if let Err(failure) = &told {
            warn!("cannot write an Event of Service {key}: {failure}");
        }
        told.is_ok()
    }
}

/// Why something could not be written.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("{0}")]
    Api(#[from] Error),
    #[error("no answer within {PATIENCE:?}")]
    Timeout,
}

pub(super) async fn within<T>(call: impl Future<Output = Result<T, Error>>) -> Result<T, Failure> {
    match timeout(PATIENCE, call).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(Failure::Timeout),
    }
}

fn warning(problem: &Problem) -> Notice {
    Notice {
        kind: "Warning",
        reason: problem.reason(),
        note: problem.to_string(),
    }
}

fn key(service: &Service) -> String {
    let metadata = &service.metadata;
    let (namespace, name) = (metadata.namespace.as_deref(), metadata.name.as_deref());
    format!(
        "{}/{}",
        namespace.unwrap_or_default(),
        name.unwrap_or_default()
    )
}

fn version(service: &Service) -> &str {
    service
        .metadata
        .resource_version
        .as_deref()
        .unwrap_or_default()
}

fn ingress(service: &Service) -> &[LoadBalancerIngress] {
    let status = service
        .status
        .as_ref()
        .and_then(|status| status.load_balancer.as_ref());
    let ingress = status.and_then(|load_balancer| load_balancer.ingress.as_deref());
    ingress.unwrap_or_default()
}

/// Addresses that its status shows.
fn shown(service: &Service) -> Vec<IpAddr> {
    let ips = ingress(service)
        .iter()
        .filter_map(|ingress| ingress.ip.as_deref());
    ips.filter_map(|ip| ip.parse().ok()).collect()
}

/// Which VIPs of which Services are served, as those agents say that are to serve them.
struct Serving<'a> {
    translation: &'a Translation,
    /// By node.
    agents: BTreeMap<String, ServedMap>,
}

impl<'a> Serving<'a> {
    fn new(translation: &'a Translation, leases: &[Arc<Lease>]) -> Self {
        let agents = leases.iter().filter_map(|lease| {
            let node = lease.spec.as_ref()?.holder_identity.clone()?;
            let served = lease.metadata.annotations.as_ref()?.get(SERVED)?;
            Some((node, serde_json::from_str(served).ok()?))
        });
        Self {
            translation,
            agents: agents.collect(),
        }
    }

    fn of(&self, key: &str, outcome: &Outcome) -> Vec<IpAddr> {
        let serves = |vip: &&IpAddr| {
            self.agents.iter().any(|(node, served)| {
                self.translation.is_effective_on(vip, node)
                    && served
                        .get(*vip)
                        .is_some_and(|services| services.contains(key))
            })
        };
        outcome.vips.iter().filter(serves).copied().collect()
    }
}

/// What is to be changed of a Service, as a merge patch; `None` if it says all that it should.
fn changes(service: &Service, outcome: &Outcome, served: &[IpAddr]) -> Option<Value> {
    let annotations = service.metadata.annotations.as_ref();
    let says = |name| annotations.and_then(|annotations| annotations.get(name));
    let mut wanted = Map::new();
    if says(ASSIGNED_VIPS) != outcome.assigned.as_ref() {
        wanted.insert(ASSIGNED_VIPS.to_owned(), json!(outcome.assigned));
    }
    if let Some(slots) = &outcome.slots
        && says(INSTANCE_SLOTS) != Some(slots)
    {
        wanted.insert(INSTANCE_SLOTS.to_owned(), json!(slots));
    }
    let shows = ingress(service);
    let shall_show: Vec<LoadBalancerIngress> = if outcome.left.is_empty() {
        let ours = |vip: &IpAddr| LoadBalancerIngress {
            ip: Some(vip.to_string()),
            ip_mode: Some("VIP".to_owned()),
            ..LoadBalancerIngress::default()
        };
        served.iter().map(ours).collect()
    } else {
        // Somebody else's by now: only what we wrote goes.
        let is_left = |ingress: &&LoadBalancerIngress| {
            let ip = ingress.ip.as_deref().and_then(|ip| ip.parse().ok());
            ip.is_none_or(|ip| !outcome.left.contains(&ip))
        };
        shows.iter().filter(is_left).cloned().collect()
    };
    let mut patch = json!({"metadata": {"resourceVersion": version(service)}});
    if shows != shall_show {
        let ingress = (!shall_show.is_empty()).then_some(shall_show);
        patch["status"] = json!({"loadBalancer": {"ingress": ingress}});
    } else if wanted.is_empty() {
        return None;
    }
    if !wanted.is_empty() {
        patch["metadata"]["annotations"] = Value::Object(wanted);
    }
    Some(patch)
}

#[cfg(test)]
mod tests;
