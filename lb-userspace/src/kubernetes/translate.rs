//! From what the API holds to what is wanted, and to what is to be written of it: a pure function.
//!
//! The order of objects means nothing: equal sets translate to equal results. Where Services clash the
//! older one wins, then namespace and name decide.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Pod, Service, ServicePort};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;

use super::endpoints::{self, Endpoint};
use super::slots::{self, Identity};
use super::{ASSIGNED_VIPS, CLASS, INSTANCE_PORTS, INSTANCE_SLOTS, Problem, VIP};
use crate::config::{ClusterConfig, parse_range};
use crate::desired::{Announce, BackendSpec, DesiredState, InstancePorts, PortSpec, ServiceSpec};
use crate::plan::{self, Health, Nodes, Warning};

/// Names the Service of a slice.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// A StatefulSet's ordinal, on its pods.
const POD_INDEX: &str = "apps.kubernetes.io/pod-index";
/// A range of instance ports is for tens of instances; one for thousands is a mistake.
const MAX_SLOTS: u16 = 1024;
/// Target ports of Services are the endpoints' matter: every one brings its own.
const NEVER_USED: u16 = 0;
/// IP protocol number of TCP.
const TCP: u8 = 6;

/// What the API holds, as far as it matters here.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Services of all namespaces.
    pub services: Vec<Arc<Service>>,
    /// Slices of all namespaces.
    pub slices: Vec<Arc<EndpointSlice>>,
    /// Pods of the namespaces that VIPs are for.
    pub pods: Vec<Arc<Pod>>,
}

/// What follows from a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Translation {
    config: Arc<ClusterConfig>,
    served: Vec<Served>,
    outcomes: BTreeMap<String, Outcome>,
}

/// What is to be seen of a Service in the API.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Outcome {
    /// VIPs of which it has at least a port; to be shown in its status once they are served.
    pub vips: BTreeSet<IpAddr>,
    /// What [`ASSIGNED_VIPS`] is to say, `None` for no such annotation.
    pub assigned: Option<String>,
    /// What [`INSTANCE_SLOTS`] is to say, `None` to leave it as it is.
    pub slots: Option<String>,
    /// VIPs that its status shows by our doing although it is not ours any more.
    pub left: BTreeSet<IpAddr>,
    /// What its user has to know.
    pub problems: BTreeSet<Problem>,
}

/// A Service of ours, wherever its pods are.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Served {
    name: String,
    client_affinity: bool,
    source_ranges: Option<BTreeSet<IpNet>>,
    vips: BTreeMap<IpAddr, Ports>,
    /// Pods of all nodes; without one what can be reached from every node.
    backends: Vec<BackendSpec>,
}

/// What a Service has of a VIP.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
struct Ports {
    shared: Vec<PortSpec>,
    instance: Vec<InstancePorts>,
}

impl Translation {
    /// What a node is to serve: every VIP, to announce it or for what others hand on to it. One that somebody else
    /// announces only where it is said to be effective.
    pub fn desired(&self, node: &str) -> DesiredState {
        let mut state = self.config.state.clone();
        for vip in &mut state.vips {
            vip.candidate = self.is_effective_on(&vip.address, node);
        }
        state
            .vips
            .retain(|vip| vip.candidate || vip.announce != Announce::External);
        let here: BTreeSet<IpAddr> = state.vips.iter().map(|vip| vip.address).collect();
        let served = self.served.iter().filter(|served| !served.vips.is_empty());
        for (served, precedence) in served.zip(0..) {
            for (vip, ports) in served.vips.iter().filter(|(vip, _)| here.contains(vip)) {
                state.services.push(ServiceSpec {
                    name: served.name.clone(),
                    precedence,
                    vip: *vip,
                    ports: ports.shared.clone(),
                    instance_ports: ports.instance.clone(),
                    client_affinity: served.client_affinity,
                    source_ranges: served.source_ranges.clone(),
                    health: None,
                    backends: BackendSpec::behind(*vip, &served.backends),
                });
            }
        }
        state
    }

    /// Whether a node may announce a VIP.
    pub fn is_effective_on(&self, vip: &IpAddr, node: &str) -> bool {
        let policy = self.config.policies.get(vip);
        policy.is_some_and(|policy| policy.is_effective_on(node))
    }

    /// What is to be seen of the Services that are or were ours, by `namespace/name`.
    pub fn outcomes(&self) -> &BTreeMap<String, Outcome> {
        &self.outcomes
    }

    /// What the data planes of the nodes will not hold, by `namespace/name`.
    pub fn limits(&self) -> BTreeMap<String, BTreeSet<Problem>> {
        let mut names: BTreeSet<&str> = BTreeSet::new();
        for policy in self.config.policies.values() {
            names.extend(policy.nodes.iter().flatten().map(String::as_str));
        }
        let backends = self.served.iter().flat_map(|served| &served.backends);
        names.extend(backends.filter_map(|backend| backend.node.as_deref()));
        if names.is_empty() {
            // Nobody is named, and what does not fit does not fit anywhere.
            names.insert("");
        }
        let mut limits: BTreeMap<String, BTreeSet<Problem>> = BTreeMap::new();
        for node in names {
            let state = self.desired(node);
            // Whether a peer is heard is that node's matter.
            let nodes = Nodes::all_of(&state, node);
            let (_, warnings) = plan::plan(&state, &Health::default(), &nodes);
            for warning in warnings {
                let (service, problem) = match warning {
                    Warning::BackendUnused { service, .. } => (service, Problem::EndpointsUnused),
                    Warning::TooManyVipPorts {
                        service, vip, port, ..
                    } => (service, Problem::TooManyVipPorts { vip, port }),
                    Warning::TablesFull { service, vip, port } => {
                        (service, Problem::TablesFull { vip, port })
                    }
                    Warning::TooManySourceRanges { service, vip, port } => {
                        (service, Problem::TooManySourceRanges { vip, port })
                    }
                    // Decided here before, or not a Service's matter.
                    Warning::UnknownVip { .. }
                    | Warning::NodeUnknown { .. }
                    | Warning::PortTaken { .. }
                    | Warning::SlotOutOfRange { .. }
                    | Warning::TooManyPasses { .. } => continue,
                };
                limits.entry(service).or_default().insert(problem);
            }
        }
        limits
    }
}

/// Translates a snapshot.
pub fn translate(config: &Arc<ClusterConfig>, snapshot: &Snapshot) -> Translation {
    let mut outcomes = BTreeMap::new();
    let mut ours = Vec::new();
    for service in &snapshot.services {
        let (Some(namespace), Some(name)) = (&service.metadata.namespace, &service.metadata.name)
        else {
            continue;
        };
        let key = format!("{namespace}/{name}");
        if is_ours(config, service) {
            ours.push(Candidate::new(key, namespace, name, service));
        } else if let Some(assigned) = annotation(&service.metadata, ASSIGNED_VIPS) {
            let outcome = Outcome {
                left: addresses(assigned).flatten().collect(),
                ..Outcome::default()
            };
            outcomes.insert(key, outcome);
        }
    }
    ours.sort_by(|a, b| (a.created, &a.key).cmp(&(b.created, &b.key)));
    give_vips(config, &mut ours);

    let mut slices: HashMap<(&str, &str), Vec<&EndpointSlice>> = HashMap::new();
    for slice in &snapshot.slices {
        let service = slice
            .metadata
            .labels
            .as_ref()
            .and_then(|l| l.get(SERVICE_NAME));
        if let (Some(namespace), Some(service)) = (&slice.metadata.namespace, service) {
            slices.entry((namespace, service)).or_default().push(slice);
        }
    }
    let pods: HashMap<&str, &Pod> = snapshot
        .pods
        .iter()
        .filter_map(|pod| Some((pod.metadata.uid.as_deref()?, &**pod)))
        .collect();

    let mut claims = Claims::new(config);
    let mut served = Vec::new();
    for candidate in ours {
        let slices = slices.remove(&(candidate.namespace, candidate.name));
        let (service, key, outcome) =
            candidate.serve(config, &mut claims, &slices.unwrap_or_default(), &pods);
        served.push(service);
        outcomes.insert(key, outcome);
    }
    Translation {
        config: config.clone(),
        served,
        outcomes,
    }
}

fn is_ours(config: &ClusterConfig, service: &Service) -> bool {
    let Some(spec) = &service.spec else {
        return false;
    };
    spec.type_.as_deref() == Some("LoadBalancer")
        && match spec.load_balancer_class.as_deref() {
            Some(class) => class == CLASS,
            None => config.default_class,
        }
}

fn annotation<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

/// The parts of a list of addresses; what is not one as it is written.
fn addresses(text: &str) -> impl Iterator<Item = Result<IpAddr, String>> {
    let parts = text
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty());
    parts.map(|part| part.parse().map_err(|_| part.to_owned()))
}

/// A Service of ours on its way to what it gets.
struct Candidate<'a> {
    key: String,
    namespace: &'a str,
    name: &'a str,
    service: &'a Service,
    created: Timestamp,
    vips: BTreeSet<IpAddr>,
    outcome: Outcome,
}

/// VIPs for all candidates, the older ones first.
///
/// What is asked for is effective at once. What is chosen here is effective when it is written on the
/// Service: until then two agents might choose differently.
fn give_vips(config: &ClusterConfig, candidates: &mut [Candidate<'_>]) {
    let mut used = BTreeSet::new();
    for candidate in &mut *candidates {
        candidate.known_vips(config);
        used.extend(candidate.vips.iter().copied());
    }
    for candidate in candidates {
        let mut vips: Vec<IpAddr> = candidate.vips.iter().copied().collect();
        if candidate.asks_for().is_none() {
            for is_v6 in candidate.versions() {
                let mut free = config.policies.iter().filter(|(vip, policy)| {
                    vip.is_ipv6() == is_v6
                        && policy.auto_assign
                        && policy.namespaces.contain(candidate.namespace)
                        && !used.contains(*vip)
                });
                let has = vips.iter().any(|vip| vip.is_ipv6() == is_v6);
                if let Some((vip, _)) = free.next().filter(|_| !has) {
                    used.insert(*vip);
                    vips.push(*vip);
                }
            }
            if vips.is_empty() {
                candidate.complain(Problem::NoFreeVip {
                    namespace: candidate.namespace.to_owned(),
                });
            }
        }
        if !vips.is_empty() {
            let vips: Vec<_> = vips.iter().map(ToString::to_string).collect();
            candidate.outcome.assigned = Some(vips.join(","));
        }
    }
}

impl<'a> Candidate<'a> {
    fn new(key: String, namespace: &'a str, name: &'a str, service: &'a Service) -> Self {
        let created = service.metadata.creation_timestamp.as_ref();
        Self {
            key,
            namespace,
            name,
            service,
            created: created.map_or(Timestamp::MAX, |time| time.0),
            vips: BTreeSet::new(),
            outcome: Outcome::default(),
        }
    }

    fn complain(&mut self, problem: Problem) {
        self.outcome.problems.insert(problem);
    }

    fn asks_for(&self) -> Option<&'a str> {
        let spec = self.service.spec.as_ref();
        annotation(&self.service.metadata, VIP)
            .or_else(|| spec.and_then(|spec| spec.load_balancer_ip.as_deref()))
            .filter(|text| !text.trim().is_empty())
    }

    /// Versions of IP that it has, its first one first: whether each is 6.
    fn versions(&self) -> Vec<bool> {
        let spec = self.service.spec.as_ref();
        let families = spec.and_then(|spec| spec.ip_families.as_deref());
        match families {
            None | Some([]) => vec![false],
            Some(families) => families.iter().map(|family| family == "IPv6").collect(),
        }
    }

    /// The VIPs that it asks for or was given.
    fn known_vips(&mut self, config: &ClusterConfig) {
        let namespace = self.namespace;
        let versions = self.versions();
        let judge = |vip: IpAddr| match config.policies.get(&vip) {
            None => Err(Problem::VipUnknown { vip }),
            Some(policy) if !policy.namespaces.contain(namespace) => Err(Problem::VipNotAllowed {
                vip,
                namespace: namespace.to_owned(),
            }),
            Some(_) if !versions.contains(&vip.is_ipv6()) => {
                Err(Problem::VipOfOtherVersion { vip })
            }
            Some(_) => Ok(vip),
        };
        let assigned = annotation(&self.service.metadata, ASSIGNED_VIPS).unwrap_or_default();
        let mut kept = addresses(assigned)
            .flatten()
            .filter_map(|vip| judge(vip).ok());
        let Some(text) = self.asks_for() else {
            let kept: Vec<_> = kept.collect();
            for is_v6 in &versions {
                self.vips
                    .extend(kept.iter().find(|vip| vip.is_ipv6() == *is_v6));
            }
            return;
        };
        for vip in addresses(text) {
            match vip
                .map_err(|text| Problem::VipInvalid { text })
                .and_then(judge)
            {
                Ok(vip) => drop(self.vips.insert(vip)),
                Err(problem) => self.complain(problem),
            }
        }
        // A slip of the pen must not darken what is served.
        if self.vips.is_empty()
            && let Some(kept) = kept.next()
        {
            self.vips.insert(kept);
            self.complain(Problem::VipKept { kept });
        }
    }

    fn serve(
        mut self,
        config: &ClusterConfig,
        claims: &mut Claims,
        slices: &[&EndpointSlice],
        pods: &HashMap<&str, &Pod>,
    ) -> (Served, String, Outcome) {
        let spec = self.service.spec.clone().unwrap_or_default();
        let source_ranges = self.source_ranges(spec.load_balancer_source_ranges.as_deref());
        let ports = self.ports(spec.ports.as_deref().unwrap_or_default());
        let groups = self.groups(&ports);
        let mut vips = BTreeMap::new();
        for vip in self.vips.clone() {
            let ports = self.claim(claims, vip, &ports, &groups);
            if !ports.shared.is_empty() || !ports.instance.is_empty() {
                vips.insert(vip, ports);
            }
        }
        let publish_not_ready = spec.publish_not_ready_addresses.unwrap_or(false);
        let mut endpoints = endpoints::gather(slices.iter().copied(), publish_not_ready);
        self.refuse_endpoints(config, &mut endpoints, pods);
        for port in &ports {
            let has = |endpoint: &Endpoint| endpoint.ports.contains_key(&port.slice_name);
            if !endpoints.is_empty() && !endpoints.values().any(has) {
                let port = port.spec.name.clone();
                self.complain(Problem::NoTargetPort { port });
            }
        }
        self.tell_of_host_ports(&vips, &endpoints, pods);
        let slots = self.slots(&groups, &endpoints, pods);
        let backends = endpoints.into_iter().map(|(address, endpoint)| {
            let (identity, _) = identity(address, &endpoint, pods);
            let (instance, uid) = match endpoint.pod {
                Some(pod) => pod,
                None => (address.to_string(), String::new()),
            };
            let named = ports.iter().filter_map(|port| {
                let target = endpoint.ports.get(&port.slice_name)?;
                Some((port.spec.name.clone(), *target))
            });
            BackendSpec {
                instance,
                slot: identity.and_then(|identity| slots.get(&identity).copied()),
                address,
                node: endpoint.node,
                uid,
                ready: endpoint.ready,
                draining: endpoint.draining,
                ports: Some(named.collect()),
            }
        });
        let backends = backends.collect();
        // A Service's status makes kube-proxy take all of its ports at that address from the cluster's own pods, also
        // those that are another's.
        let whole = vips
            .iter()
            .filter(|(_, has)| has.shared.len() == ports.len());
        self.outcome.vips = whole.map(|(vip, _)| *vip).collect();
        let served = Served {
            name: self.key.clone(),
            client_affinity: spec.session_affinity.as_deref() == Some("ClientIP"),
            source_ranges,
            vips,
            backends,
        };
        (served, self.key, self.outcome)
    }

    /// What cannot be read admits nobody: the API server takes no such thing.
    fn source_ranges(&mut self, texts: Option<&[String]>) -> Option<BTreeSet<IpNet>> {
        let texts = texts?;
        let mut ranges = BTreeSet::new();
        for text in texts {
            // The API server trims, too.
            match text.trim().parse::<IpNet>() {
                Ok(net) => drop(ranges.insert(net.trunc())),
                Err(_) => self.complain(Problem::BadSourceRange { text: text.clone() }),
            }
        }
        (!texts.is_empty()).then_some(ranges)
    }

    fn ports(&mut self, raw: &[ServicePort]) -> Vec<NamedPort> {
        let mut ports = Vec::new();
        for port in raw {
            let Ok(number) = u16::try_from(port.port) else {
                continue;
            };
            match port.protocol.as_deref() {
                None | Some("TCP") => {}
                Some(protocol) => {
                    self.complain(Problem::ProtocolNotServed {
                        port: number,
                        protocol: protocol.to_owned(),
                    });
                    continue;
                }
            }
            let slice_name = port.name.clone().unwrap_or_default();
            // Only the sole port of a Service may go without a name.
            let name = match &slice_name[..] {
                "" => number.to_string(),
                name => name.to_owned(),
            };
            let spec = PortSpec {
                name,
                port: number,
                target_port: NEVER_USED,
            };
            ports.push(NamedPort { spec, slice_name });
        }
        ports.sort_by_key(|port| port.spec.port);
        ports
    }

    /// The groups of instance ports that make sense.
    fn groups(&mut self, ports: &[NamedPort]) -> Vec<InstancePorts> {
        let text = annotation(&self.service.metadata, INSTANCE_PORTS).unwrap_or_default();
        let mut groups: Vec<InstancePorts> = Vec::new();
        for group in text
            .split(',')
            .map(str::trim)
            .filter(|group| !group.is_empty())
        {
            match parse_group(group, ports) {
                Ok(parsed)
                    if groups
                        .iter()
                        .any(|other| other.port_name == parsed.port_name) =>
                {
                    self.bad_group(
                        group,
                        format!("a second range for port `{}`", parsed.port_name),
                    );
                }
                Ok(parsed) => groups.push(parsed),
                Err(why) => self.bad_group(group, why),
            }
        }
        groups
    }

    fn bad_group(&mut self, group: &str, why: String) {
        let group = group.to_owned();
        self.complain(Problem::BadInstancePorts { group, why });
    }

    /// Takes what is free of the ports that it wants on a VIP.
    fn claim(
        &mut self,
        claims: &mut Claims,
        vip: IpAddr,
        ports: &[NamedPort],
        groups: &[InstancePorts],
    ) -> Ports {
        let mut has = Ports::default();
        for NamedPort { spec, .. } in ports {
            let what = format!("port `{}`", spec.name);
            let owner = format!("port `{}` of {}", spec.name, self.key);
            match claims.take(vip, spec.port, &owner) {
                None => has.shared.push(spec.clone()),
                Some(taken_by) => self.complain(Problem::PortTaken {
                    what,
                    vip,
                    ports: runs(&BTreeSet::from([spec.port])),
                    taken_by,
                }),
            }
        }
        for group in groups {
            let what = format!("instance ports `{}`", group.port_name);
            let owner = format!("{what} of {}", self.key);
            let mut lost: BTreeMap<String, BTreeSet<u16>> = BTreeMap::new();
            for port in group.base..=group.last {
                if let Some(taken_by) = claims.take(vip, port, &owner) {
                    lost.entry(taken_by).or_default().insert(port);
                }
            }
            has.instance.push(InstancePorts {
                except: lost.values().flatten().copied().collect(),
                ..group.clone()
            });
            for (taken_by, ports) in lost {
                self.complain(Problem::PortTaken {
                    what: what.clone(),
                    vip,
                    ports: runs(&ports),
                    taken_by,
                });
            }
        }
        has
    }

    fn refuse_endpoints(
        &mut self,
        config: &ClusterConfig,
        endpoints: &mut BTreeMap<IpAddr, Endpoint>,
        pods: &HashMap<&str, &Pod>,
    ) {
        endpoints.retain(|address, endpoint| {
            if config.policies.contains_key(address) {
                self.complain(Problem::EndpointIsVip { vip: *address });
                return false;
            }
            if config.endpoints_without_pods {
                return true;
            }
            let Some((name, uid)) = &endpoint.pod else {
                self.complain(Problem::EndpointWithoutPod);
                return false;
            };
            // One that is not known yet may be in a moment; if there is no such pod, nothing is lost.
            let Some(pod) = pods.get(&**uid) else {
                return false;
            };
            let is_its_own = pod.metadata.name.as_ref() == Some(name)
                && pod.metadata.namespace.as_deref() == Some(self.namespace)
                && addresses_of(pod).any(|own| own == *address);
            if !is_its_own {
                self.complain(Problem::EndpointOfOtherPod {
                    address: *address,
                    pod: name.clone(),
                });
            }
            is_its_own
        });
    }

    fn tell_of_host_ports(
        &mut self,
        vips: &BTreeMap<IpAddr, Ports>,
        endpoints: &BTreeMap<IpAddr, Endpoint>,
        pods: &HashMap<&str, &Pod>,
    ) {
        let mut vip_ports = BTreeSet::new();
        for ports in vips.values() {
            vip_ports.extend(ports.shared.iter().map(|port| port.port));
            vip_ports.extend(
                ports
                    .instance
                    .iter()
                    .flat_map(|group| group.base..=group.last),
            );
        }
        for endpoint in endpoints.values() {
            let pod = endpoint.pod.as_ref().and_then(|(_, uid)| pods.get(&**uid));
            for port in pod.into_iter().flat_map(|pod| host_ports(pod)) {
                if vip_ports.contains(&port) {
                    self.complain(Problem::HostPortClash { port });
                }
            }
        }
    }

    /// Slots by identity, as far as they are effective.
    fn slots(
        &mut self,
        groups: &[InstancePorts],
        endpoints: &BTreeMap<IpAddr, Endpoint>,
        pods: &HashMap<&str, &Pod>,
    ) -> BTreeMap<String, u32> {
        // A slot has a port in every group.
        let lengths = groups
            .iter()
            .map(|group| u32::from(group.last - group.base) + 1);
        let Some(count) = lengths.min() else {
            return BTreeMap::new();
        };
        let present: BTreeSet<Identity> = endpoints
            .iter()
            .filter_map(|(address, endpoint)| {
                let (identity, index) = identity(*address, endpoint, pods);
                Some((identity?, index))
            })
            .collect();
        let written = annotation(&self.service.metadata, INSTANCE_SLOTS).unwrap_or("{}");
        match serde_json::from_str::<BTreeMap<String, u32>>(written) {
            Ok(written) => {
                let slots = slots::assign(&written, &present, count);
                self.outcome.problems.extend(slots.problems);
                if slots.wanted != written {
                    self.outcome.slots = serde_json::to_string(&slots.wanted).ok();
                }
                slots.effective
            }
            Err(error) => {
                let why = error.to_string();
                self.complain(Problem::BadSlots { why });
                let indexed = present.into_iter().filter(|(_, index)| index.is_some());
                let slots = slots::assign(&BTreeMap::new(), &indexed.collect(), count);
                self.outcome.problems.extend(slots.problems);
                slots.effective
            }
        }
    }
}

/// A port and its name in slices, which is empty for a Service's sole port.
struct NamedPort {
    spec: PortSpec,
    slice_name: String,
}

fn parse_group(group: &str, ports: &[NamedPort]) -> Result<InstancePorts, String> {
    let example = "write it as `<port name>=<base>-<last>`, such as `images=6200-6231`";
    let (name, range) = group.split_once('=').ok_or(example)?;
    let (name, range) = (name.trim(), range.trim());
    if !ports.iter().any(|port| port.spec.name == name) {
        let names: Vec<_> = ports.iter().map(|port| &*port.spec.name).collect();
        return Err(format!(
            "the Service has no TCP port `{name}`; it has {}",
            names.join(", ")
        ));
    }
    let (base, last) = parse_range(range)
        .ok_or_else(|| format!("`{range}` is not a range of ports; {example}"))?;
    if last - base >= MAX_SLOTS {
        return Err(format!("more than {MAX_SLOTS} ports"));
    }
    Ok(InstancePorts {
        port_name: name.to_owned(),
        target_port: NEVER_USED,
        base,
        last,
        except: BTreeSet::new(),
    })
}

/// Who an endpoint is to the slots, and its index. Nobody yet if it has a pod that is not known.
fn identity(
    address: IpAddr,
    endpoint: &Endpoint,
    pods: &HashMap<&str, &Pod>,
) -> (Option<String>, Option<u32>) {
    let Some((name, uid)) = &endpoint.pod else {
        return (Some(address.to_string()), None);
    };
    let Some(pod) = pods.get(&**uid) else {
        return (None, None);
    };
    let index = pod.metadata.labels.as_ref().and_then(|l| l.get(POD_INDEX));
    if let Some(index) = index.and_then(|index| index.parse().ok()) {
        return (Some(name.clone()), Some(index));
    }
    let mut owners = pod.metadata.owner_references.iter().flatten();
    let is_daemon = owners.any(|owner| owner.controller == Some(true) && owner.kind == "DaemonSet");
    // A daemon's pods have new names each time; what lasts is the node.
    let node = endpoint.node.as_ref().filter(|_| is_daemon);
    (Some(node.unwrap_or(name).clone()), None)
}

/// Addresses that a pod has.
fn addresses_of(pod: &Pod) -> impl Iterator<Item = IpAddr> {
    let status = pod.status.as_ref();
    let addresses = status.and_then(|status| status.pod_ips.as_ref());
    addresses
        .into_iter()
        .flatten()
        .filter_map(|address| address.ip.parse().ok())
}

/// Ports of the node that lead to a pod with an address of its own.
fn host_ports(pod: &Pod) -> impl Iterator<Item = u16> {
    let spec = pod.spec.as_ref();
    let spec = spec.filter(|spec| spec.host_network != Some(true));
    let ports = spec
        .into_iter()
        .flat_map(|spec| &spec.containers)
        .flat_map(|container| container.ports.iter().flatten());
    ports
        .filter(|port| {
            port.protocol
                .as_deref()
                .is_none_or(|protocol| protocol == "TCP")
        })
        // With an address of its own it is caught on that address only.
        .filter(|port| matches!(port.host_ip.as_deref(), None | Some("" | "0.0.0.0" | "::")))
        .filter_map(|port| u16::try_from(port.host_port?).ok())
}

/// Ports of VIPs that somebody has.
struct Claims {
    owners: HashMap<(IpAddr, u16), Arc<str>>,
}

impl Claims {
    fn new(config: &ClusterConfig) -> Self {
        let passed = config.state.vips.iter().flat_map(|vip| {
            let tcp = |pass: &&crate::desired::PassSpec| pass.protocol == TCP && pass.port > 0;
            vip.pass
                .iter()
                .filter(tcp)
                .map(|pass| (vip.address, pass.port))
        });
        let owners = passed.map(|place| (place, "`pass` of the VIP, for the host".into()));
        Self {
            owners: owners.collect(),
        }
    }

    /// Takes a port, or says who has it.
    fn take(&mut self, vip: IpAddr, port: u16, owner: &str) -> Option<String> {
        match self.owners.get(&(vip, port)) {
            Some(taken_by) => Some(taken_by.to_string()),
            None => {
                self.owners.insert((vip, port), owner.into());
                None
            }
        }
    }
}

/// Ports as a sentence goes on: `port 1 is`, `ports 1-3, 5 are`.
fn runs(ports: &BTreeSet<u16>) -> String {
    let mut runs: Vec<(u16, u16)> = Vec::new();
    for &port in ports {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == port => *last = port,
            _ => runs.push((port, port)),
        }
    }
    let text: Vec<_> = runs
        .iter()
        .map(|(first, last)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        })
        .collect();
    match ports.len() {
        1 => format!("port {} is", text.join(", ")),
        _ => format!("ports {} are", text.join(", ")),
    }
}

#[cfg(test)]
mod tests;
