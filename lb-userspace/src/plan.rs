//! From what is wanted and what is healthy to what the maps shall hold: a pure function.
//!
//! The order of lists means nothing: equal sets give equal tables. Where something does not fit or
//! clashes, only that loses, in an order that depends on precedence, names and numbers alone, with a [`Warning`].

use std::cmp::Ordering;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem::discriminant;
use std::net::IpAddr;

use lb_common::choice::name_hash;
use lb_common::{
    MAX_BACKENDS, MAX_BACKENDS_PER_PORT, MAX_PASS, MAX_PORTS, MAX_SOURCE_RANGES,
    MAX_VIP_PORTS_PER_POD_PORT,
};

use crate::desired::{BackendSpec, DesiredState, ServiceSpec};
use crate::tables::{BackendRow, PeerRow, PortRow, TableSet, VipRow};

/// What the checks found: backends that are known not to answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    down: BTreeSet<(String, IpAddr)>,
}

impl Health {
    /// Notes a result for the backend of a service; returns whether that changes anything.
    pub fn set(&mut self, service: &str, address: IpAddr, up: bool) -> bool {
        let key = (service.to_owned(), address);
        if up {
            self.down.remove(&key)
        } else {
            self.down.insert(key)
        }
    }

    /// The backends that are known not to answer, as service and address.
    pub fn down(&self) -> &BTreeSet<(String, IpAddr)> {
        &self.down
    }

    /// The same, and what others have found.
    pub fn and(&self, others: &BTreeSet<(String, IpAddr)>) -> Self {
        Self {
            down: self.down.union(others).cloned().collect(),
        }
    }

    /// Whether a backend is not known to be down.
    pub fn is_up(&self, service: &str, address: IpAddr) -> bool {
        !self.down.contains(&(service.to_owned(), address))
    }
}

/// This node and the others, as far as they are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
    /// This node's name.
    pub name: String,
    /// This node's addresses.
    pub addresses: BTreeSet<IpAddr>,
    /// The others, by name.
    pub peers: BTreeMap<String, PeerRow>,
    /// Which node, by name, had an address last: one that is lost for a while still names its node.
    pub former: BTreeMap<IpAddr, String>,
}

/// Where a backend is.
enum Place<'a> {
    Here,
    Peer(&'a String, &'a PeerRow),
    Unknown(&'a String),
}

/// A backend, and what is known of it here.
#[derive(Clone, Copy)]
struct Standing<'a> {
    backend: &'a BackendSpec,
    /// The peer that it is on.
    node: Option<&'a String>,
    /// It can be reached.
    is_up: bool,
}

impl Nodes {
    /// As the node of that name would see it, did all nodes take new flows that backends are on.
    pub fn all_of(state: &DesiredState, name: &str) -> Self {
        let peer = PeerRow {
            reflecting: true,
            ..PeerRow::default()
        };
        let backends = state.services.iter().flat_map(|service| &service.backends);
        let nodes: BTreeSet<&String> = backends.filter_map(|b| b.node.as_ref()).collect();
        Self {
            name: name.to_owned(),
            addresses: BTreeSet::new(),
            peers: nodes
                .into_iter()
                .map(|node| (node.clone(), peer.clone()))
                .collect(),
            former: BTreeMap::new(),
        }
    }

    /// Whether a backend is on this node.
    pub fn is_here(&self, backend: &BackendSpec) -> bool {
        matches!(self.place(backend), Place::Here)
    }

    /// The place of a backend, whose node goes by its name or by an address of it.
    fn place<'a>(&'a self, backend: &'a BackendSpec) -> Place<'a> {
        let Some(node) = &backend.node else {
            return Place::Here;
        };
        let address: Option<IpAddr> = node.parse().ok();
        if *node == self.name || address.is_some_and(|address| self.addresses.contains(&address)) {
            return Place::Here;
        }
        let has = |peer: &PeerRow| {
            let mut links = peer.links.values();
            address.is_some_and(|address| links.any(|link| link.addresses.contains(&address)))
        };
        let now = self
            .peers
            .iter()
            .find(|(name, peer)| *name == node || has(peer));
        let former = || {
            let name = self.former.get(&address?)?;
            if *name == self.name {
                return Some(Place::Here);
            }
            let (name, peer) = self.peers.get_key_value(name)?;
            Some(Place::Peer(name, peer))
        };
        match now {
            Some((name, peer)) => Place::Peer(name, peer),
            None => former().unwrap_or(Place::Unknown(node)),
        }
    }

    /// Remembers who has which address.
    pub fn remember(&mut self) {
        for address in &self.addresses {
            self.former.insert(*address, self.name.clone());
        }
        for (name, peer) in &self.peers {
            for address in peer.links.values().flat_map(|link| &link.addresses) {
                self.former.insert(*address, name.clone());
            }
        }
    }
}

/// Something wanted that the tables do not hold.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Warning {
    /// A backend's node has never been heard of.
    #[error(
        "service {service}: {instance} is not used; its node {node} is not known as a peer: its agent \
         has not been heard since this node's maps were made"
    )]
    NodeUnknown {
        /// Service.
        service: String,
        /// Backend.
        instance: String,
        /// Its node.
        node: String,
    },
    /// The service's VIP is not among the VIPs.
    #[error("service {service}: {vip} is not a VIP of this agent; the service is not served")]
    UnknownVip {
        /// Service.
        service: String,
        /// Its VIP.
        vip: IpAddr,
    },
    /// A VIP port is wanted twice.
    #[error("service {service}: port {port} of {vip} is already taken by service {taken_by}")]
    PortTaken {
        /// Service that does not get the port.
        service: String,
        /// VIP.
        vip: IpAddr,
        /// Port.
        port: u16,
        /// Service that has it.
        taken_by: String,
    },
    /// A slot is beyond a range.
    #[error(
        "service {service}: instance ports `{port_name}` end before slot {slot} of {instance}; it has no port there"
    )]
    SlotOutOfRange {
        /// Service.
        service: String,
        /// Range.
        port_name: String,
        /// Slot.
        slot: u32,
        /// Backend.
        instance: String,
    },
    /// A service has more backends than a choice can be made among.
    #[error(
        "service {service}: {instance} is unused; at most {MAX_BACKENDS_PER_PORT} backends a service"
    )]
    BackendUnused {
        /// Service.
        service: String,
        /// Backend.
        instance: String,
    },
    /// Too many VIP ports lead to a pod port.
    #[error(
        "service {service}: port {port} of {vip} does not lead to {instance} ({address}:{target_port}); \
         at most {MAX_VIP_PORTS_PER_POD_PORT} VIP ports may lead to one pod port"
    )]
    TooManyVipPorts {
        /// Service.
        service: String,
        /// VIP.
        vip: IpAddr,
        /// Port.
        port: u16,
        /// Backend.
        instance: String,
        /// Its address.
        address: IpAddr,
        /// Its port.
        target_port: u16,
    },
    /// A VIP passes more than fits.
    #[error("VIP {vip}: only {MAX_PASS} entries of `pass` are used")]
    TooManyPasses {
        /// VIP.
        vip: IpAddr,
    },
    /// The source ranges of all services are more than fit.
    #[error(
        "service {service}: port {port} of {vip} is not served, for want of room for its source ranges; \
         at most {MAX_SOURCE_RANGES} an agent, equal lists counted once"
    )]
    TooManySourceRanges {
        /// Service.
        service: String,
        /// VIP.
        vip: IpAddr,
        /// Port.
        port: u16,
    },
    /// The tables are full.
    #[error(
        "service {service}: port {port} of {vip} is not served; \
         at most {MAX_PORTS} VIP ports and {MAX_BACKENDS} backends of VIP ports an agent"
    )]
    TablesFull {
        /// Service.
        service: String,
        /// VIP.
        vip: IpAddr,
        /// Port.
        port: u16,
    },
}

/// Lines of a kind that are told one by one.
const TOLD: usize = 10;

/// Sorted warnings for people: a sentence each, but of each kind only the first few, and how many more.
pub fn sentences(warnings: &[Warning]) -> Vec<String> {
    let same_kind = |a: &Warning, b: &Warning| discriminant(a) == discriminant(b);
    let kinds = warnings.chunk_by(same_kind);
    kinds.flat_map(brief).collect()
}

/// The first few of a list as lines, and how many more like it.
pub(crate) fn brief(list: &[impl ToString]) -> Vec<String> {
    let more = list.len().saturating_sub(TOLD);
    let first = list.iter().take(TOLD).map(ToString::to_string);
    let rest = (more > 0).then(|| format!("and {more} more like it"));
    first.chain(rest).collect()
}

/// The tables for a desired state, and what of it they do not hold, sorted.
///
/// - A shared port lists the service's backends in the [`natural`] order of instances; those that are not ready stay
///   (their flows go on) without being eligible. Where nobody is ready those that drain are eligible.
///   With none eligible the port refuses.
/// - An instance port exists for every slot that a backend has, and leads to that instance alone: to one
///   of its incarnations, where a new one is ready before the old one has gone. The rest of a range has
///   no row: it is refused like any port that is not configured.
/// - A backend of a peer takes new flows as long as that node's program reflects probes.
pub fn plan(state: &DesiredState, health: &Health, nodes: &Nodes) -> (TableSet, Vec<Warning>) {
    let mut planner = Planner::default();
    planner.tables.peers.clone_from(&nodes.peers);
    planner.tables.heartbeat_port = state.peers.as_ref().map_or(0, |peers| peers.port);
    for vip in &state.vips {
        let mut pass = vip.pass.clone();
        pass.sort_unstable();
        pass.dedup();
        if pass.len() > MAX_PASS {
            planner
                .warnings
                .push(Warning::TooManyPasses { vip: vip.address });
            pass.truncate(MAX_PASS);
        }
        let row = VipRow {
            announce: vip.announce,
            candidate: vip.candidate,
            refuse: vip.refuse,
            pass,
        };
        planner.tables.vips.insert(vip.address, row);
    }
    let mut services: Vec<_> = state.services.iter().collect();
    services.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    for service in services {
        planner.service(service, health, nodes);
    }
    let order = planner.by_precedence();
    planner.limit_vip_ports_per_pod_port(&order);
    planner.limit_tables(&order);
    planner.warnings.sort_unstable();
    (planner.tables, planner.warnings)
}

#[derive(Default)]
struct Planner {
    tables: TableSet,
    warnings: Vec<Warning>,
    /// Of services, by name.
    precedence: HashMap<String, u32>,
}

impl Planner {
    fn service(&mut self, service: &ServiceSpec, health: &Health, nodes: &Nodes) {
        let ServiceSpec {
            name,
            precedence,
            vip,
            ports,
            instance_ports,
            client_affinity: _,
            source_ranges: _,
            health: _,
            backends,
        } = service;
        self.precedence.insert(name.clone(), *precedence);
        if !self.tables.vips.contains_key(vip) {
            self.warnings.push(Warning::UnknownVip {
                service: name.clone(),
                vip: *vip,
            });
            return;
        }
        let mut backends: Vec<_> = backends.iter().collect();
        backends.sort_unstable_by(|a, b| natural(&a.instance, &b.instance).then_with(|| a.cmp(b)));
        let unused = backends.split_off(backends.len().min(MAX_BACKENDS_PER_PORT));
        self.warnings
            .extend(unused.iter().map(|backend| Warning::BackendUnused {
                service: name.clone(),
                instance: backend.instance.clone(),
            }));
        let mut standings = Vec::with_capacity(backends.len());
        for backend in backends {
            let (node, is_reached) = match nodes.place(backend) {
                Place::Here => (None, true),
                Place::Peer(node, peer) => (Some(node), peer.reflecting),
                Place::Unknown(node) => {
                    self.warnings.push(Warning::NodeUnknown {
                        service: name.clone(),
                        instance: backend.instance.clone(),
                        node: node.clone(),
                    });
                    continue;
                }
            };
            let is_up = is_reached && health.is_up(name, backend.address);
            standings.push(Standing {
                backend,
                node,
                is_up,
            });
        }

        let mut ports: Vec<_> = ports.iter().collect();
        ports.sort_unstable_by_key(|port| (port.port, &port.name));
        for port in &ports {
            let rows = rows(&standings, &port.name, port.target_port);
            self.port(service, port.port, &port.name, None, rows);
        }

        let mut slots: BTreeMap<u32, Vec<Standing<'_>>> = BTreeMap::new();
        for standing in &standings {
            if let Some(slot) = standing.backend.slot {
                slots.entry(slot).or_default().push(*standing);
            }
        }
        let mut ranges: Vec<_> = instance_ports.iter().collect();
        ranges.sort_unstable_by_key(|range| (range.base, range.last, &range.port_name));
        for range in ranges {
            for (&slot, incarnations) in &slots {
                let port = u16::try_from(slot)
                    .ok()
                    .and_then(|slot| range.base.checked_add(slot))
                    .filter(|port| *port <= range.last);
                let Some(port) = port else {
                    self.warnings.push(Warning::SlotOutOfRange {
                        service: name.clone(),
                        port_name: range.port_name.clone(),
                        slot,
                        instance: incarnations[0].backend.instance.clone(),
                    });
                    continue;
                };
                if range.except.contains(&port) {
                    continue;
                }
                let mut rows = rows(incarnations, &range.port_name, range.target_port);
                let mut eligible = rows.iter_mut().filter(|row| row.eligible);
                eligible.next();
                eligible.for_each(|row| row.eligible = false);
                if !rows.is_empty() {
                    self.port(service, port, &range.port_name, Some(slot), rows);
                }
            }
        }
    }

    fn port(
        &mut self,
        service: &ServiceSpec,
        port: u16,
        name: &str,
        slot: Option<u32>,
        backends: Vec<BackendRow>,
    ) {
        match self.tables.ports.entry((service.vip, port)) {
            Entry::Vacant(free) => {
                free.insert(PortRow {
                    service: service.name.clone(),
                    port_name: name.to_owned(),
                    slot,
                    seed: name_hash(&service.name),
                    client_affinity: service.client_affinity,
                    source_ranges: service.source_ranges.clone(),
                    backends,
                });
            }
            Entry::Occupied(taken) => self.warnings.push(Warning::PortTaken {
                service: service.name.clone(),
                vip: service.vip,
                port,
                taken_by: taken.get().service.clone(),
            }),
        }
    }

    /// VIP ports in the order in which they get what there is not enough of: by their services' precedence, so that
    /// who has it keeps it, then by VIP and port.
    fn by_precedence(&self) -> Vec<(IpAddr, u16)> {
        let ports = self.tables.ports.iter();
        let mut ports: Vec<_> = ports
            .map(|(&place, row)| (self.precedence.get(&row.service).copied(), place))
            .collect();
        ports.sort_unstable();
        ports.into_iter().map(|(_, place)| place).collect()
    }

    /// The reply path tries the VIP ports of a pod port one by one, so their number is bounded: the later
    /// ones lose that backend.
    fn limit_vip_ports_per_pod_port(&mut self, order: &[(IpAddr, u16)]) {
        let mut leading: BTreeMap<(IpAddr, u16), usize> = BTreeMap::new();
        for &(vip, port) in order {
            let Some(row) = self.tables.ports.get_mut(&(vip, port)) else {
                continue;
            };
            let service = &row.service;
            row.backends.retain(|backend| {
                let count = leading.entry((backend.address, backend.port)).or_default();
                *count += 1;
                let fits = *count <= MAX_VIP_PORTS_PER_POD_PORT;
                if !fits {
                    self.warnings.push(Warning::TooManyVipPorts {
                        service: service.clone(),
                        vip,
                        port,
                        instance: backend.instance.clone(),
                        address: backend.address,
                        target_port: backend.port,
                    });
                }
                fits
            });
        }
    }

    /// Ports beyond the size of the maps are not served.
    fn limit_tables(&mut self, order: &[(IpAddr, u16)]) {
        let (mut ports, mut backends) = (0, 0);
        let (mut lists, mut ranges) = (BTreeSet::new(), 0);
        for &(vip, port) in order {
            let Some(row) = self.tables.ports.get(&(vip, port)) else {
                continue;
            };
            if let Some(list) = &row.source_ranges
                && !lists.contains(list)
            {
                if ranges + list.len() > MAX_SOURCE_RANGES as usize {
                    // Open to all is no choice.
                    self.warnings.push(Warning::TooManySourceRanges {
                        service: row.service.clone(),
                        vip,
                        port,
                    });
                    self.tables.ports.remove(&(vip, port));
                    continue;
                }
                ranges += list.len();
                lists.insert(list.clone());
            }
            let count = row.backends.len();
            if ports < MAX_PORTS as usize && backends + count <= MAX_BACKENDS as usize {
                ports += 1;
                backends += count;
            } else {
                self.warnings.push(Warning::TablesFull {
                    service: row.service.clone(),
                    vip,
                    port,
                });
                self.tables.ports.remove(&(vip, port));
            }
        }
    }
}

/// The order of people: `ironic-2` comes before `ironic-10`, so of too many the one that was added last
/// loses, not one that serves.
pub fn natural(a: &str, b: &str) -> Ordering {
    /// Runs of digits, as numbers, come before runs of anything else.
    fn parts(text: &str) -> impl Iterator<Item = (bool, usize, &[u8])> {
        let same_kind = |a: &u8, b: &u8| a.is_ascii_digit() == b.is_ascii_digit();
        text.as_bytes().chunk_by(same_kind).map(|part| {
            if !part[0].is_ascii_digit() {
                return (true, 0, part);
            }
            let zeros = part.iter().take_while(|digit| **digit == b'0').count();
            (false, part.len() - zeros, &part[zeros..])
        })
    }
    parts(a).cmp(parts(b)).then_with(|| a.cmp(b))
}

/// The backends that have the port, in their order, with those eligible that are to get new flows.
fn rows(standings: &[Standing<'_>], port_name: &str, target_port: u16) -> Vec<BackendRow> {
    let having = || {
        let all = standings.iter();
        all.filter_map(|standing| {
            Some((standing, standing.backend.target(port_name, target_port)?))
        })
    };
    let is_ready = having().any(|(standing, _)| standing.is_up && standing.backend.ready);
    let row = |(standing, port): (&Standing<'_>, u16)| {
        let Standing {
            backend,
            node,
            is_up,
        } = *standing;
        BackendRow {
            instance: backend.instance.clone(),
            uid: backend.uid.clone(),
            address: backend.address,
            port,
            node: node.cloned(),
            eligible: is_up && (backend.ready || !is_ready && backend.draining),
        }
    };
    // They are kept: collected, they would have room for up to twice as many.
    let mut rows = Vec::with_capacity(standings.len());
    rows.extend(having().map(row));
    rows
}

#[cfg(test)]
mod tests;
