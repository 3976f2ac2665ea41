//! What the maps hold, what they shall hold, and the writes between the two in safe order. Pure:
//! no kernel here, so that every prefix of the writes can be tested.
//!
//! Ids live in the maps themselves: a VIP port keeps its id as long as `port_info` names it, a backend
//! its index and generation as long as it is alive. So a restarted agent goes on where the last one ended.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use lb_common::choice::identity;
use lb_common::{
    Addr, BACKEND_ALIVE, BACKEND_ELIGIBLE, Backend, BackendInfo, Candidate, Control, Filter,
    MAX_BACKENDS, MAX_BACKENDS_PER_PORT, MAX_PASS, MAX_PEERS, MAX_PORTS, MAX_UPLINKS,
    MAX_VIP_PORTS_PER_POD_PORT, MAX_VIPS, NAME_LEN, PEER_IS_LIVE, PEER_IS_REFLECTING,
    PEER_IS_SYNCED, PEER_REFLECTS, POD_HOST, Pass, Peer, PeerInfo, PeerMac, Pod, PodPort, PortInfo,
    SERVICE_CLIENT_IP, SERVICE_INSTANCE, SERVICE_SILENT, Service, ServiceKey, Source, Uplink,
    VIP_EXTERNAL, VIP_REFUSE_DROP, Vip, backend_id, from_name, peer_link, to_name,
};

use super::GONE_AFTER;
use crate::desired::{Announce, Refuse};
use crate::tables::{BackendRow, PeerLink, PeerRow, PortRow, TableSet, VipRow};

/// The rows that the agent alone writes.
#[derive(Clone, PartialEq)]
pub(super) struct Rows {
    pub(super) uplinks: Vec<Uplink>,
    pub(super) vips: BTreeMap<Addr, Vip>,
    pub(super) services: BTreeMap<ServiceKey, Service>,
    pub(super) backends: Vec<Backend>,
    pub(super) pod_ports: BTreeMap<ServiceKey, PodPort>,
    pub(super) pods: BTreeMap<Addr, Pod>,
    pub(super) port_info: Vec<PortInfo>,
    /// `None` where nobody has had the index yet. A pod is behind several VIP ports: its names are kept once.
    pub(super) backend_info: Vec<Option<Arc<BackendInfo>>>,
    pub(super) control: Control,
    pub(super) peers: Vec<Peer>,
    pub(super) peer_macs: BTreeMap<PeerMac, u32>,
    pub(super) peer_info: Vec<PeerInfo>,
    /// Source ranges, each with the length of its prefix.
    pub(super) sources: BTreeSet<(u32, Source)>,
    /// The highest version that a service was written with; no map holds it.
    pub(super) version: u32,
}

/// A free slot of the `uplinks` map.
pub(super) const NO_UPLINK: Uplink = Uplink {
    vip_filter: Filter { bits: [0; 4] },
    ifindex: 0,
    flags: 0,
    mac: [0; 6],
    vlan: 0,
    mode: 0,
    prefixes: [0; 2],
    pad: 0,
    device: 0,
    name: [0; 16],
    bypass_udp: [0; lb_common::MAX_BYPASS_UDP],
    gateways: [Addr::UNSPECIFIED; 2],
    networks: [Addr::UNSPECIFIED; 2],
};
/// A free number of a peer.
const NO_PEER_INFO: PeerInfo = PeerInfo {
    name: [0; NAME_LEN],
    version: [0; 32],
    flags: 0,
    pad: 0,
    since: 0,
};
/// An index that no backend has had yet.
const NO_BACKEND: Backend = Backend {
    addr: Addr::UNSPECIFIED,
    port: 0,
    service: 0,
    generation: 0,
    flags: 0,
    peer: 0,
    pad: 0,
};
const NO_PORT_INFO: PortInfo = PortInfo {
    vip_port: ServiceKey::new(Addr::UNSPECIFIED, 0),
    slot: 0,
    service: [0; NAME_LEN],
    port: [0; NAME_LEN],
};
static NO_BACKEND_INFO: BackendInfo = BackendInfo {
    instance: [0; NAME_LEN],
    uid: [0; NAME_LEN],
};

impl Default for Rows {
    fn default() -> Self {
        Self {
            uplinks: vec![NO_UPLINK; MAX_UPLINKS as usize],
            vips: BTreeMap::new(),
            services: BTreeMap::new(),
            backends: vec![NO_BACKEND; MAX_BACKENDS as usize],
            pod_ports: BTreeMap::new(),
            pods: BTreeMap::new(),
            port_info: vec![NO_PORT_INFO; MAX_PORTS as usize],
            backend_info: vec![None; MAX_BACKENDS as usize],
            control: Control::default(),
            peers: vec![Peer::default(); (MAX_PEERS * MAX_UPLINKS) as usize],
            peer_macs: BTreeMap::new(),
            peer_info: vec![NO_PEER_INFO; MAX_PEERS as usize],
            sources: BTreeSet::new(),
            version: 0,
        }
    }
}

/// One map write or removal.
#[derive(Clone)]
pub(super) enum Write {
    Uplink(u32, Box<Uplink>),
    Control(Box<Control>),
    PortInfo(u16, Box<PortInfo>),
    /// The counters of a VIP port id that gets a new owner start from zero.
    ResetPortStats(u16),
    BackendInfo(u16, Arc<BackendInfo>),
    /// Likewise for a backend's index.
    ResetBackendStats(u16),
    Backend(u16, Backend),
    Pod(Addr, Pod),
    RemovePod(Addr),
    PodPort(ServiceKey, Box<PodPort>),
    RemovePodPort(ServiceKey),
    Service(ServiceKey, Box<Service>),
    RemoveService(ServiceKey),
    Source(u32, Source),
    RemoveSource(u32, Source),
    Vip(Addr, Box<Vip>),
    RemoveVip(Addr),
    /// By [`peer_link`](lb_common::peer_link).
    Peer(u32, Box<Peer>),
    PeerMac(PeerMac, u32),
    RemovePeerMac(PeerMac),
    PeerInfo(u32, Box<PeerInfo>),
    /// The counters of a number that gets a new owner start from zero.
    ResetPeerStats(u32),
}

impl Rows {
    /// Repeats here what was written to the maps.
    pub(super) fn record(&mut self, write: &Write) {
        match write {
            Write::Uplink(slot, row) => self.uplinks[*slot as usize] = **row,
            Write::Control(row) => self.control = **row,
            Write::PortInfo(id, row) => self.port_info[usize::from(*id)] = **row,
            Write::BackendInfo(index, row) => {
                self.backend_info[usize::from(*index)] = Some(Arc::clone(row));
            }
            Write::ResetPortStats(_) | Write::ResetBackendStats(_) | Write::ResetPeerStats(_) => {}
            Write::Backend(index, row) => self.backends[usize::from(*index)] = *row,
            Write::Pod(addr, row) => {
                self.pods.insert(*addr, *row);
            }
            Write::RemovePod(addr) => {
                self.pods.remove(addr);
            }
            Write::PodPort(key, row) => {
                self.pod_ports.insert(*key, **row);
            }
            Write::RemovePodPort(key) => {
                self.pod_ports.remove(key);
            }
            Write::Service(key, row) => {
                self.version = row.version;
                self.services.insert(*key, **row);
            }
            Write::RemoveService(key) => {
                self.services.remove(key);
            }
            Write::Source(prefix, source) => {
                self.sources.insert((*prefix, *source));
            }
            Write::RemoveSource(prefix, source) => {
                self.sources.remove(&(*prefix, *source));
            }
            Write::Vip(addr, row) => {
                self.vips.insert(*addr, **row);
            }
            Write::RemoveVip(addr) => {
                self.vips.remove(addr);
            }
            Write::Peer(link, row) => self.peers[*link as usize] = **row,
            Write::PeerMac(mac, number) => {
                self.peer_macs.insert(*mac, *number);
            }
            Write::RemovePeerMac(mac) => {
                self.peer_macs.remove(mac);
            }
            Write::PeerInfo(number, row) => self.peer_info[*number as usize] = **row,
        }
    }
}

/// What `backend_info` holds, row by row; equal names are one.
pub(super) fn share(rows: impl IntoIterator<Item = BackendInfo>) -> Vec<Option<Arc<BackendInfo>>> {
    let mut names: HashMap<Names, Arc<BackendInfo>> = HashMap::new();
    let mut one = |row: BackendInfo| {
        (row != NO_BACKEND_INFO).then(|| {
            let shared = names.entry((row.instance, row.uid));
            Arc::clone(shared.or_insert_with(|| Arc::new(row)))
        })
    };
    rows.into_iter().map(&mut one).collect()
}

impl Rows {
    /// Names of a backend; none where nobody has had the index yet.
    fn backend_info(&self, index: u16) -> &BackendInfo {
        let info = &self.backend_info[usize::from(index)];
        info.as_deref().unwrap_or(&NO_BACKEND_INFO)
    }

    /// Peers as an earlier agent knew them.
    pub(super) fn named_peers(&self) -> BTreeMap<String, PeerRow> {
        let named = (1..MAX_PEERS).filter_map(|number| {
            let info = &self.peer_info[number as usize];
            let name = from_name(&info.name);
            let links = (0..MAX_UPLINKS).filter_map(|uplink| {
                let row = self.peers[peer_link(number, uplink) as usize];
                let used = row.addrs.iter().filter(|addr| **addr != Addr::UNSPECIFIED);
                let link = PeerLink {
                    mac: row.mac,
                    addresses: used.map(|addr| (*addr).into()).collect(),
                };
                (row.mac != [0; 6]).then_some((uplink, link))
            });
            let has = |flag| info.flags & flag != 0;
            let peer = PeerRow {
                version: from_name(&info.version),
                live: has(PEER_IS_LIVE),
                reflecting: has(PEER_IS_REFLECTING),
                synced: has(PEER_IS_SYNCED),
                links: links.collect(),
            };
            (!name.is_empty()).then_some((name, peer))
        });
        named.collect()
    }
}

/// What the rows are made from.
pub(super) struct Input<'a> {
    /// What the plan wants.
    pub(super) tables: &'a TableSet,
    /// Uplink slot of every VIP that has one; the others are not served.
    pub(super) placement: &'a BTreeMap<IpAddr, u32>,
    /// Addresses of this node.
    pub(super) host: &'a BTreeSet<IpAddr>,
    /// `CLOCK_BOOTTIME`.
    pub(super) now: Duration,
}

/// How long after a change peers are given to tell which flows are theirs, before what finds no entry in mid-flow
/// counts as lost. Ten heartbeats and the time in which every node hears of the change.
pub(super) const SETTLE: Duration = Duration::from_secs(5);

/// Backends that no source has any more, with the time at which they are gone.
pub(super) type Leaving = BTreeMap<u16, Duration>;

/// The writes that lead from what is to what shall be.
pub(super) struct Plan {
    /// What the maps hold once all is written.
    pub(super) rows: Rows,
    /// In order.
    pub(super) writes: Vec<Write>,
    /// Backends that leave once these writes are done.
    pub(super) leaving: Leaving,
    /// What did not fit, a sentence each.
    pub(super) notes: Vec<String>,
}

/// Finds the writes.
///
/// What comes is written before what goes is removed. Where the maps have no room for both, what goes is
/// removed first, without the time that its flows are given otherwise.
pub(super) fn plan(rows: &Rows, leaving: &Leaving, input: &Input<'_>) -> Plan {
    let (plan, shortage) = step(rows, leaving, input);
    if shortage == Shortage::default() {
        return plan;
    }
    let kept = kept(rows, input.tables, shortage);
    let at_once = (0..MAX_BACKENDS as u16).map(|index| (index, Duration::ZERO));
    let tables = &kept;
    let (mut removal, _) = step(rows, &at_once.collect(), &Input { tables, ..*input });
    let (rest, _) = step(&removal.rows, &Leaving::new(), input);
    removal.writes.extend(rest.writes);
    Plan {
        writes: removal.writes,
        ..rest
    }
}

/// What the maps have no room for as long as they hold what goes.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Shortage {
    vips: bool,
    ports: bool,
    backends: bool,
}

fn step(rows: &Rows, leaving: &Leaving, input: &Input<'_>) -> (Plan, Shortage) {
    let mut goal = Goal::new(rows);
    goal.place_peers(input);
    goal.place_ports(input.tables);
    goal.place_backends(input.tables);
    goal.keep_leaving(leaving, input);
    goal.derive(input);
    let Goal {
        next,
        leaving,
        notes,
        fresh_ports,
        fresh_backends,
        shortage,
        ..
    } = goal;
    let mut next = next;
    if next.control.peers != 0 && places_otherwise(rows, &next) {
        let until = input.now + SETTLE;
        next.control.settle_until = until.as_nanos().try_into().unwrap_or(u64::MAX);
    }
    let writes = order(rows, &mut next, &fresh_ports, &fresh_backends);
    let plan = Plan {
        rows: next,
        writes,
        leaving,
        notes,
    };
    (plan, shortage)
}

/// What the tables want of that which the maps have; the new backends of a known VIP port are in it unless
/// it is backends that there is no room for.
fn kept(rows: &Rows, tables: &TableSet, shortage: Shortage) -> TableSet {
    let mut kept = tables.clone();
    kept.vips
        .retain(|vip, _| rows.vips.contains_key(&Addr::from(*vip)));
    let ports = known_ports(rows);
    let backends = known_backends(rows);
    kept.ports.retain(|&(vip, port), row| {
        let Some(&id) = ports.get(&service_key(vip, port)) else {
            return false;
        };
        if shortage.backends {
            row.backends
                .retain(|backend| backends.contains_key(&backend_key(id, backend)));
        }
        true
    });
    kept
}

fn known_ports(rows: &Rows) -> HashMap<ServiceKey, u16> {
    let ports = rows.port_info.iter().zip(0..);
    ports
        .filter(|(info, _)| info.vip_port.port != 0)
        .map(|(info, id)| (info.vip_port, id))
        .collect()
}

fn known_backends(rows: &Rows) -> HashMap<BackendKey, u16> {
    let backends = rows.backends.iter().zip(0..);
    backends
        .filter(|(backend, _)| backend.flags & BACKEND_ALIVE != 0)
        .map(|(backend, index)| {
            let info = rows.backend_info(index);
            let names = (info.instance, info.uid);
            ((backend.service, backend.addr, backend.port, names), index)
        })
        .collect()
}

fn backend_key(id: u16, row: &BackendRow) -> BackendKey {
    let names = (to_name(&row.instance), to_name(&row.uid));
    (id, Addr::from(row.address), row.port, names)
}

/// What the rows shall be, as it grows.
struct Goal<'a> {
    rows: &'a Rows,
    next: Rows,
    /// Numbers of peers.
    numbers: BTreeMap<String, u32>,
    /// Ids of wanted VIP ports.
    ids: BTreeMap<(IpAddr, u16), u16>,
    /// Indices of wanted backends with what the choice knows them by, by VIP port in the order of its row.
    indices: BTreeMap<(IpAddr, u16), Vec<(u16, u32)>>,
    leaving: Leaving,
    fresh_ports: BTreeSet<u16>,
    fresh_backends: BTreeSet<u16>,
    shortage: Shortage,
    notes: Vec<String>,
}

/// What makes a backend the same one as before.
type BackendKey = (u16, Addr, u16, Names);
/// Instance and uid as the map holds them.
type Names = ([u8; NAME_LEN], [u8; NAME_LEN]);

impl<'a> Goal<'a> {
    fn new(rows: &'a Rows) -> Self {
        let mut next = Rows {
            uplinks: rows.uplinks.clone(),
            backends: rows.backends.clone(),
            backend_info: rows.backend_info.clone(),
            control: rows.control,
            peers: rows.peers.clone(),
            peer_info: rows.peer_info.clone(),
            version: rows.version,
            vips: BTreeMap::new(),
            services: BTreeMap::new(),
            sources: BTreeSet::new(),
            pods: BTreeMap::new(),
            pod_ports: BTreeMap::new(),
            port_info: vec![NO_PORT_INFO; MAX_PORTS as usize],
            peer_macs: BTreeMap::new(),
        };
        for backend in &mut next.backends {
            // What nobody claims below is gone; its generation stays.
            backend.flags = 0;
        }
        Self {
            rows,
            next,
            numbers: BTreeMap::new(),
            ids: BTreeMap::new(),
            indices: BTreeMap::new(),
            leaving: Leaving::new(),
            fresh_ports: BTreeSet::new(),
            fresh_backends: BTreeSet::new(),
            shortage: Shortage::default(),
            notes: Vec::new(),
        }
    }

    /// Numbers stay with their names, also of peers that are away for as long as flows may lead to them.
    fn place_peers(&mut self, input: &Input<'_>) {
        let rows = self.rows;
        let named = |number: &u32| rows.peer_info[*number as usize].name != NO_PEER_INFO.name;
        let known: BTreeMap<[u8; NAME_LEN], u32> = (1..MAX_PEERS)
            .filter(named)
            .map(|number| (rows.peer_info[number as usize].name, number))
            .collect();
        let in_use: BTreeSet<u16> = rows
            .backends
            .iter()
            .filter(|backend| backend.flags & BACKEND_ALIVE != 0)
            .map(|backend| backend.peer)
            .collect();
        let mut free = (1..MAX_PEERS).filter(|number| !named(number));
        let mut kept = BTreeSet::new();
        for (name, peer) in &input.tables.peers {
            let padded = to_name(name);
            let Some(number) = known.get(&padded).copied().or_else(|| free.next()) else {
                self.notes.push(format!(
                    "node {name} is not used: there are more than {} peers",
                    MAX_PEERS - 1
                ));
                continue;
            };
            self.numbers.insert(name.clone(), number);
            kept.insert(number);
            let was = rows.peer_info[number as usize];
            let flag = |is: bool, flag: u32| if is { flag } else { 0 };
            let flags = flag(peer.live, PEER_IS_LIVE)
                | flag(peer.reflecting, PEER_IS_REFLECTING)
                | flag(peer.synced, PEER_IS_SYNCED);
            let is_same = was.name == padded && was.flags == flags;
            self.next.peer_info[number as usize] = PeerInfo {
                name: padded,
                version: to_name(&peer.version),
                flags,
                pad: 0,
                since: if is_same {
                    was.since
                } else {
                    input.now.as_nanos().try_into().unwrap_or(u64::MAX)
                },
            };
            for uplink in 0..MAX_UPLINKS {
                let row = &mut self.next.peers[peer_link(number, uplink) as usize];
                *row = Peer::default();
                let Some(link) = peer.links.get(&uplink) else {
                    continue;
                };
                row.mac = link.mac;
                row.flags = if peer.reflecting { PEER_REFLECTS } else { 0 };
                for (place, address) in row.addrs.iter_mut().zip(&link.addresses) {
                    *place = (*address).into();
                }
            }
        }
        for number in 1..MAX_PEERS {
            if kept.contains(&number) || in_use.contains(&(number as u16)) {
                continue;
            }
            self.next.peer_info[number as usize] = NO_PEER_INFO;
            for uplink in 0..MAX_UPLINKS {
                self.next.peers[peer_link(number, uplink) as usize] = Peer::default();
            }
        }
        // A node that was renamed is two with one MAC, of which one lives: that one comes last.
        let is_live = |number: &u32| {
            let flags = self.next.peer_info[*number as usize].flags;
            kept.contains(number) && flags & PEER_IS_LIVE != 0
        };
        let (live, others): (Vec<_>, Vec<_>) = (1..MAX_PEERS).partition(is_live);
        self.next.peer_macs = others
            .into_iter()
            .chain(live)
            .flat_map(|number| (0..MAX_UPLINKS).map(move |uplink| (number, uplink)))
            .filter_map(|(number, uplink)| {
                let mac = self.next.peers[peer_link(number, uplink) as usize].mac;
                let uplink = uplink as u16;
                (mac != [0; 6]).then_some((PeerMac { mac, uplink }, number))
            })
            .collect();
        let count = self
            .next
            .peer_info
            .iter()
            .filter(|info| info.name != NO_PEER_INFO.name);
        self.next.control.peers = count.count() as u16;
        self.next.control.heartbeat_port = input.tables.heartbeat_port;
    }

    fn place_ports(&mut self, tables: &TableSet) {
        let known = known_ports(self.rows);
        let used: HashSet<u16> = known.values().copied().collect();
        let mut free = (0..MAX_PORTS as u16).filter(|id| !used.contains(id));
        for (&(vip, port), row) in &tables.ports {
            let key = service_key(vip, port);
            let id = known.get(&key).copied().or_else(|| {
                let id = free.next()?;
                self.fresh_ports.insert(id);
                Some(id)
            });
            let Some(id) = id else {
                self.shortage.ports = true;
                self.notes.push(format!(
                    "{vip}:{port} is not served: there are more than {MAX_PORTS} VIP ports"
                ));
                continue;
            };
            self.ids.insert((vip, port), id);
            self.next.port_info[usize::from(id)] = PortInfo {
                vip_port: key,
                slot: row.slot.map_or(0, |slot| slot + 1),
                service: to_name(&row.service),
                port: to_name(&row.port_name),
            };
        }
    }

    fn place_backends(&mut self, tables: &TableSet) {
        let known = known_backends(self.rows);
        let alive: HashSet<u16> = known.values().copied().collect();
        let mut free = (0..MAX_BACKENDS as u16).filter(|index| !alive.contains(index));
        let mut names: HashMap<(&str, &str), Arc<BackendInfo>> = HashMap::new();
        for (&place, &id) in &self.ids {
            let mut indices = Vec::new();
            for row in &tables.ports[&place].backends {
                let key = backend_key(id, row);
                let was = known.get(&key).copied();
                let Some(index) = was.or_else(|| free.next()) else {
                    self.shortage.backends = true;
                    self.notes.push(format!(
                        "{} is not used on {}:{}: there are more than {MAX_BACKENDS} backends",
                        row.instance, place.0, place.1
                    ));
                    continue;
                };
                let former = self.rows.backends[usize::from(index)];
                let generation = if was.is_some() || former == NO_BACKEND {
                    former.generation
                } else {
                    former.generation.wrapping_add(1)
                };
                if was.is_none() {
                    self.fresh_backends.insert(index);
                }
                let (_, addr, _, (instance, uid)) = key;
                let peer = match &row.node {
                    None => Some(0),
                    Some(node) => self.numbers.get(node).map(|number| *number as u16),
                };
                self.next.backends[usize::from(index)] = Backend {
                    addr,
                    port: row.port,
                    service: id,
                    generation,
                    flags: BACKEND_ALIVE
                        | if row.eligible && peer.is_some() {
                            BACKEND_ELIGIBLE
                        } else {
                            0
                        },
                    peer: peer.unwrap_or(former.peer),
                    pad: 0,
                };
                if was.is_none() {
                    let names = names.entry((&row.instance, &row.uid));
                    let info = names.or_insert_with(|| Arc::new(BackendInfo { instance, uid }));
                    self.next.backend_info[usize::from(index)] = Some(Arc::clone(info));
                }
                indices.push((index, identity(&row.instance)));
            }
            self.indices.insert(place, indices);
        }
    }

    /// Backends that are alive in the maps but wanted no more live on for a while: a flap of the source
    /// must not end flows.
    fn keep_leaving(&mut self, leaving: &Leaving, input: &Input<'_>) {
        let rows = || input.tables.ports.values().flat_map(|port| &port.backends);
        let mut owners: HashMap<IpAddr, Vec<&BackendRow>> = HashMap::new();
        for row in rows() {
            owners.entry(row.address).or_default().push(row);
        }
        for (backend, index) in self.rows.backends.iter().zip(0..) {
            let wanted = self.next.backends[usize::from(index)].flags & BACKEND_ALIVE != 0;
            if backend.flags & BACKEND_ALIVE == 0 || wanted {
                continue;
            }
            let deadline = *leaving.get(&index).unwrap_or(&(input.now + GONE_AFTER));
            let address = IpAddr::from(backend.addr);
            let info = self.rows.backend_info(index);
            let is_same = |row: &&BackendRow| {
                to_name(&row.instance) == info.instance && to_name(&row.uid) == info.uid
            };
            // Pods on the host network share the node's address: there only the port tells them apart.
            let is_rival =
                |row: &&&BackendRow| !input.host.contains(&address) || row.port == backend.port;
            let mut rivals = owners
                .get(&address)
                .into_iter()
                .flatten()
                .filter(is_rival)
                .copied()
                .peekable();
            let taken = rivals.peek().is_some() && !rivals.any(|row| is_same(&row));
            if input.now >= deadline || taken {
                continue;
            }
            // Its VIP port keeps the id, so that the same backend is known when it returns. A row of a
            // VIP port that nothing names is the rest of an interrupted write.
            let id = usize::from(backend.service);
            let Some(info) = self.rows.port_info.get(id).filter(|i| i.vip_port.port != 0) else {
                continue;
            };
            let next = &mut self.next.port_info[id];
            if next.vip_port.port == 0 {
                *next = *info;
            }
            self.leaving.insert(index, deadline);
            self.next.backends[usize::from(index)].flags = BACKEND_ALIVE;
        }
    }

    /// Everything that follows from ports and backends.
    fn derive(&mut self, input: &Input<'_>) {
        self.derive_pods(input.host);
        self.derive_services(input.tables);
        self.derive_vips(input);
    }

    fn derive_pods(&mut self, host: &BTreeSet<IpAddr>) {
        let mut filter = Filter::default();
        let of_peers = self.next.peers.iter().flat_map(|peer| peer.addrs);
        let of_peers: BTreeSet<Addr> = of_peers.collect();
        let alive = self.next.backends.iter().zip(0..);
        let alive = alive.filter(|(backend, _)| backend.flags & BACKEND_ALIVE != 0);
        // Of a pod port's VIP ports, those that are wanted come before those of backends that leave.
        let (leave, stay): (Vec<_>, Vec<_>) =
            alive.partition(|(_, index)| self.leaving.contains_key(index));
        for (backend, index) in stay.into_iter().chain(leave) {
            let is_host =
                host.contains(&IpAddr::from(backend.addr)) || of_peers.contains(&backend.addr);
            let flags = if is_host { POD_HOST } else { 0 };
            filter.insert(&backend.addr);
            self.next.pods.insert(backend.addr, Pod { flags });
            if backend.peer != 0 {
                // Its replies do not come by here.
                continue;
            }
            let vip_port = self.next.port_info[usize::from(backend.service)].vip_port;
            let key = ServiceKey::new(backend.addr, backend.port);
            let row = self.next.pod_ports.entry(key).or_insert(PodPort {
                count: 0,
                flags,
                vip_ports: [ServiceKey::new(Addr::UNSPECIFIED, 0); MAX_VIP_PORTS_PER_POD_PORT],
            });
            let count = row.count as usize;
            if row.vip_ports[..count].contains(&vip_port) {
                continue;
            }
            if let Some(place) = row.vip_ports.get_mut(count) {
                *place = vip_port;
                row.count += 1;
            } else if !self.leaving.contains_key(&index) {
                self.notes.push(format!(
                    "more than {MAX_VIP_PORTS_PER_POD_PORT} VIP ports lead to {}:{}: \
                     lost flows of {}:{} cannot be found again",
                    IpAddr::from(backend.addr),
                    backend.port,
                    IpAddr::from(vip_port.addr),
                    vip_port.port
                ));
            }
        }
        for row in self.next.pod_ports.values_mut() {
            // Order of indices is chance; equal sets shall be equal rows.
            row.vip_ports[..row.count as usize].sort_unstable();
        }
        // Built from what is sorted, a tree's nodes are full: row by row they are half empty.
        let pod_ports = std::mem::take(&mut self.next.pod_ports);
        self.next.pod_ports = pod_ports.into_iter().collect();
        self.next.control.pod_filter = filter;
    }

    /// Source ranges; equal lists are one, by the lowest id that has it. Returns the number of every list.
    fn derive_sources<'t>(&mut self, tables: &'t TableSet) -> HashMap<&'t BTreeSet<IpNet>, u32> {
        let mut lists: HashMap<&BTreeSet<IpNet>, u32> = HashMap::new();
        for (place, &id) in &self.ids {
            if let Some(ranges) = &tables.ports[place].source_ranges {
                let number = u32::from(id) + 1;
                lists
                    .entry(ranges)
                    .and_modify(|list| *list = number.min(*list))
                    .or_insert(number);
            }
        }
        for (ranges, list) in &lists {
            let sources = ranges.iter().map(|range| source(*list, range));
            self.next.sources.extend(sources);
        }
        lists
    }

    fn derive_services(&mut self, tables: &TableSet) {
        let lists = self.derive_sources(tables);
        for (&(vip, port), &id) in &self.ids {
            let row = &tables.ports[&(vip, port)];
            let key = service_key(vip, port);
            let mut service = Service {
                version: 0,
                id,
                flags: service_flags(row),
                seed: row.seed,
                count: 0,
                sources: row.source_ranges.as_ref().map_or(0, |ranges| lists[ranges]),
                local: 0,
                candidates: [Candidate::default(); MAX_BACKENDS_PER_PORT],
                pad_tail: 0,
                version_tail: 0,
            };
            let indices = &self.indices[&(vip, port)];
            let eligible = indices.iter().filter_map(|&(index, identity)| {
                let backend = self.next.backends[usize::from(index)];
                (backend.flags & BACKEND_ELIGIBLE != 0).then_some((index, identity, backend))
            });
            let is_silent = |backend: &BackendRow| {
                let peer = backend
                    .node
                    .as_ref()
                    .and_then(|node| tables.peers.get(node));
                peer.is_some_and(|peer| !peer.reflecting)
            };
            if row.backends.iter().any(is_silent) {
                service.flags |= SERVICE_SILENT;
            }
            for ((index, identity, backend), place) in eligible.zip(&mut service.candidates) {
                if backend.peer == 0 {
                    service.local |= 1 << service.count;
                }
                *place = Candidate {
                    backend: backend_id(index, backend.generation),
                    identity,
                };
                service.count += 1;
            }
            self.next.services.insert(key, service);
        }
    }

    fn derive_vips(&mut self, input: &Input<'_>) {
        for (&vip, row) in &input.tables.vips {
            if let Some(&uplink) = input.placement.get(&vip) {
                self.next.vips.insert(vip.into(), vip_row(row, uplink));
            }
        }
        if self.next.vips.len() > MAX_VIPS as usize {
            self.notes.push(format!(
                "{} VIPs are not served: there are more than {MAX_VIPS}",
                self.next.vips.len() - MAX_VIPS as usize
            ));
            while self.next.vips.len() > MAX_VIPS as usize {
                self.next.vips.pop_last();
            }
        }
        for &index in self.leaving.keys() {
            let service = usize::from(self.next.backends[usize::from(index)].service);
            let vip = self.next.port_info[service].vip_port.addr;
            let is_wanted = input.tables.vips.contains_key(&IpAddr::from(vip));
            if let Some(row) = self.rows.vips.get(&vip).filter(|_| !is_wanted) {
                self.next.vips.entry(vip).or_insert(*row);
            }
        }
        let going = self.rows.vips.keys();
        let going = going
            .filter(|vip| !self.next.vips.contains_key(vip))
            .count();
        self.shortage.vips = going + self.next.vips.len() > MAX_VIPS as usize;
        for (slot, uplink) in self.next.uplinks.iter_mut().enumerate() {
            uplink.vip_filter = Filter::default();
            for (addr, vip) in &self.next.vips {
                if vip.uplink as usize == slot && uplink.ifindex != 0 {
                    uplink.vip_filter.insert(addr);
                }
            }
        }
    }
}

fn service_key(vip: IpAddr, port: u16) -> ServiceKey {
    ServiceKey::new(vip.into(), port)
}

/// A source range of a list, with the length of its prefix in the trie.
fn source(list: u32, range: &IpNet) -> (u32, Source) {
    let source = Source::new(list, range.network().into());
    (source.fixed_bits() + u32::from(range.prefix_len()), source)
}

fn service_flags(row: &PortRow) -> u16 {
    let instance = if row.slot.is_some() {
        SERVICE_INSTANCE
    } else {
        0
    };
    instance
        | if row.client_affinity {
            SERVICE_CLIENT_IP
        } else {
            0
        }
}

fn vip_row(row: &VipRow, uplink: u32) -> Vip {
    let (answer_until, external) = match row.announce {
        Announce::Always if row.candidate => (u64::MAX, 0),
        // The elected one's deadline is in a map of its own.
        Announce::Always | Announce::Elect => (0, 0),
        Announce::External => (0, VIP_EXTERNAL),
    };
    let refuse = match row.refuse {
        Refuse::Reject => 0,
        Refuse::Drop => VIP_REFUSE_DROP,
    };
    let mut pass = [Pass::default(); MAX_PASS];
    for (place, spec) in pass.iter_mut().zip(&row.pass) {
        place.port = spec.port;
        place.protocol = spec.protocol;
    }
    Vip {
        answer_until,
        flags: external | refuse,
        uplink,
        pass,
    }
}

/// Whether flows may be placed otherwise than before.
fn places_otherwise(now: &Rows, next: &Rows) -> bool {
    let same = |(key, service): (&ServiceKey, &Service)| {
        now.services
            .get(key)
            .is_some_and(|was| same_service(was, service))
    };
    now.services.len() != next.services.len()
        || !next.services.iter().all(same)
        || now.peers != next.peers
        || now.backends != next.backends
}

/// The same VIP, whose deadline may have been moved meanwhile: what counts is whether it has one of its own, which an
/// elected VIP has not.
fn same_vip(was: &Vip, wanted: &Vip) -> bool {
    let answer_until = wanted.answer_until;
    (was.answer_until == 0) == (answer_until == 0)
        && Vip {
            answer_until,
            ..*was
        } == *wanted
}

/// The same service but for its version.
fn same_service(a: &Service, b: &Service) -> bool {
    let versions = |service: &Service| Service {
        version: 0,
        version_tail: 0,
        ..*service
    };
    a.version == a.version_tail && versions(a) == versions(b)
}

fn union(a: &Filter, b: &Filter) -> Filter {
    let mut bits = a.bits;
    for (word, other) in bits.iter_mut().zip(&b.bits) {
        *word |= other;
    }
    Filter { bits }
}

/// What must be there before a service names it comes first, what must be there as long as one does goes last.
/// Gives `next` what only the writes decide, so that it is what the maps hold after the last one.
fn order(
    now: &Rows,
    next: &mut Rows,
    fresh_ports: &BTreeSet<u16>,
    fresh_backends: &BTreeSet<u16>,
) -> Vec<Write> {
    let mut writes = Vec::new();

    // Filters err on the side of containing: bits are set first and cleared last. Peers are waited for before anything
    // is that they may see otherwise.
    let control = Control {
        pod_filter: union(&now.control.pod_filter, &next.control.pod_filter),
        settle_until: next.control.settle_until,
        heartbeat_port: next.control.heartbeat_port,
        peers: now.control.peers.max(next.control.peers),
        ..now.control
    };
    if control != now.control {
        writes.push(Write::Control(Box::new(control)));
    }
    let meanwhile = |slot: usize, uplink: &Uplink| Uplink {
        vip_filter: union(&now.uplinks[slot].vip_filter, &uplink.vip_filter),
        ..now.uplinks[slot]
    };
    for (slot, uplink) in next.uplinks.iter().enumerate() {
        let row = meanwhile(slot, uplink);
        if row != now.uplinks[slot] {
            writes.push(Write::Uplink(slot as u32, Box::new(row)));
        }
    }

    for (number, info) in (0..).zip(&next.peer_info) {
        let was = &now.peer_info[number as usize];
        if info != was {
            if info.name != was.name {
                writes.push(Write::ResetPeerStats(number));
            }
            writes.push(Write::PeerInfo(number, Box::new(*info)));
        }
    }
    for (link, peer) in (0..).zip(&next.peers) {
        if *peer != now.peers[link as usize] {
            writes.push(Write::Peer(link, Box::new(*peer)));
        }
    }
    for (mac, number) in &next.peer_macs {
        if now.peer_macs.get(mac) != Some(number) {
            writes.push(Write::PeerMac(*mac, *number));
        }
    }

    // Names, then the backends that are or become eligible.
    let other_ports = || {
        let ports = next.port_info.iter().zip(0..);
        ports.filter(|(info, id)| **info != now.port_info[usize::from(*id)])
    };
    for (info, id) in other_ports().filter(|(info, _)| info.vip_port.port != 0) {
        writes.push(Write::PortInfo(id, Box::new(*info)));
    }
    for &id in fresh_ports {
        writes.push(Write::ResetPortStats(id));
    }
    for (info, index) in next.backend_info.iter().zip(0..) {
        if let Some(info) = info
            && now.backend_info(index) != &**info
        {
            writes.push(Write::BackendInfo(index, Arc::clone(info)));
        }
    }
    for &index in fresh_backends {
        // Nobody has counted there yet.
        if now.backends[usize::from(index)] != NO_BACKEND {
            writes.push(Write::ResetBackendStats(index));
        }
    }
    let (gaining, losing): (Vec<_>, Vec<_>) = next
        .backends
        .iter()
        .zip(0..)
        .filter(|(backend, index)| **backend != now.backends[usize::from(*index)])
        .partition(|(backend, index)| {
            let gains = backend.flags & !now.backends[usize::from(*index)].flags != 0;
            gains || fresh_backends.contains(index)
        });
    for (backend, index) in gaining {
        writes.push(Write::Backend(index, *backend));
    }

    // Where replies come from, old and new together.
    for (addr, pod) in &next.pods {
        if now.pods.get(addr) != Some(pod) {
            writes.push(Write::Pod(*addr, *pod));
        }
    }
    let mut widened = Vec::new();
    for (key, row) in &next.pod_ports {
        let was = now.pod_ports.get(key);
        let both = was.map_or(*row, |was| with_former(row, was));
        if was != Some(&both) {
            writes.push(Write::PodPort(*key, Box::new(both)));
        }
        if both != *row {
            widened.push((key, row));
        }
    }

    for (prefix, source) in next.sources.difference(&now.sources) {
        writes.push(Write::Source(*prefix, *source));
    }

    // One version counter for all: a torn read of two services cannot end in equal versions.
    next.version = now.version;
    for (key, service) in &mut next.services {
        match now
            .services
            .get(key)
            .filter(|was| same_service(was, service))
        {
            Some(was) => *service = *was,
            None => {
                next.version = next.version.wrapping_add(1);
                service.version = next.version;
                service.version_tail = next.version;
                writes.push(Write::Service(*key, Box::new(*service)));
            }
        }
    }
    for (addr, vip) in &mut next.vips {
        match now.vips.get(addr).filter(|was| same_vip(was, vip)) {
            Some(was) => *vip = *was,
            None => writes.push(Write::Vip(*addr, Box::new(*vip))),
        }
    }

    // Removal in reverse.
    for addr in now.vips.keys().filter(|addr| !next.vips.contains_key(addr)) {
        writes.push(Write::RemoveVip(*addr));
    }
    for key in now
        .services
        .keys()
        .filter(|key| !next.services.contains_key(key))
    {
        writes.push(Write::RemoveService(*key));
    }
    for (prefix, source) in now.sources.difference(&next.sources) {
        writes.push(Write::RemoveSource(*prefix, *source));
    }
    for (backend, index) in losing {
        writes.push(Write::Backend(index, *backend));
    }
    for key in now
        .pod_ports
        .keys()
        .filter(|key| !next.pod_ports.contains_key(key))
    {
        writes.push(Write::RemovePodPort(*key));
    }
    for (key, row) in widened {
        writes.push(Write::PodPort(*key, Box::new(*row)));
    }
    for addr in now.pods.keys().filter(|addr| !next.pods.contains_key(addr)) {
        writes.push(Write::RemovePod(*addr));
    }
    for (info, id) in other_ports().filter(|(info, _)| info.vip_port.port == 0) {
        writes.push(Write::PortInfo(id, Box::new(*info)));
    }
    for (slot, uplink) in next.uplinks.iter().enumerate() {
        if *uplink != meanwhile(slot, uplink) {
            writes.push(Write::Uplink(slot as u32, Box::new(*uplink)));
        }
    }
    for mac in now
        .peer_macs
        .keys()
        .filter(|mac| !next.peer_macs.contains_key(mac))
    {
        writes.push(Write::RemovePeerMac(*mac));
    }
    if next.control != control {
        writes.push(Write::Control(Box::new(next.control)));
    }
    writes
}

/// `row` and as many of the VIP ports that it had before as fit: they are dropped last.
fn with_former(row: &PodPort, was: &PodPort) -> PodPort {
    let mut all = *row;
    let former = was.vip_ports.iter().take(was.count as usize);
    for vip_port in former {
        let count = all.count as usize;
        if all.vip_ports[..count].contains(vip_port) {
            continue;
        }
        if let Some(place) = all.vip_ports.get_mut(count) {
            *place = *vip_port;
            all.count += 1;
        }
    }
    all.vip_ports[..all.count as usize].sort_unstable();
    all
}

#[cfg(test)]
mod tests {
    use lb_common::{backend_generation, backend_index};
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn vip(last: u8) -> IpAddr {
        IpAddr::from([172, 22, 0, last])
    }

    fn backend(instance: &str, last: u8, eligible: bool) -> BackendRow {
        BackendRow {
            instance: instance.to_owned(),
            uid: format!("uid-{instance}-{last}"),
            address: IpAddr::from([10, 244, 0, last]),
            port: 6385,
            node: None,
            eligible,
        }
    }

    /// Last octet of the VIP, port, and backends as (instance, last octet, eligible).
    type Port<'a> = (u8, u16, &'a [(u8, u8, bool)]);

    fn tables(ports: &[Port<'_>]) -> TableSet {
        let mut tables = TableSet::default();
        for (last, port, backends) in ports {
            let row = VipRow {
                announce: Announce::Always,
                candidate: true,
                refuse: Refuse::Reject,
                pass: Vec::new(),
            };
            tables.vips.insert(vip(*last), row);
            let backends = backends
                .iter()
                .map(|(n, last, eligible)| backend(&format!("ironic-{n}"), *last, *eligible));
            let row = PortRow {
                service: "metal3/ironic".to_owned(),
                port_name: "api".to_owned(),
                slot: None,
                seed: 1,
                client_affinity: false,
                source_ranges: None,
                backends: backends.collect(),
            };
            tables.ports.insert((vip(*last), *port), row);
        }
        tables
    }

    /// The agent's side of the maps, with a check of what must hold after every single write.
    struct Agent {
        rows: Rows,
        leaving: Leaving,
        now: Duration,
    }

    impl Agent {
        fn new() -> Self {
            let mut rows = Rows::default();
            rows.uplinks[0].ifindex = 3;
            Self {
                rows,
                leaving: Leaving::new(),
                now: SECOND,
            }
        }

        fn apply(&mut self, tables: &TableSet) -> usize {
            self.apply_watched(tables, |_| {})
        }

        /// The same, with a look at what the maps hold after every write.
        fn apply_watched(&mut self, tables: &TableSet, watch: impl Fn(&Rows)) -> usize {
            let placement = tables.vips.keys().map(|vip| (*vip, 0)).collect();
            let input = Input {
                tables,
                placement: &placement,
                host: &BTreeSet::new(),
                now: self.now,
            };
            let plan = plan(&self.rows, &self.leaving, &input);
            assert_eq!(plan.notes, Vec::<String>::new());
            for (n, write) in plan.writes.iter().enumerate() {
                self.rows.record(write);
                check_room(&self.rows);
                watch(&self.rows);
                if plan.writes.len() < 2000 || n % 512 == 0 {
                    check(&self.rows);
                }
            }
            assert!(self.rows == plan.rows, "the writes lead to what is planned");
            self.leaving = plan.leaving;
            plan.writes.len()
        }

        fn id(&self, instance: &str) -> Option<(u16, u16)> {
            let rows = self.rows.backends.iter().zip(0..);
            let mut alive = rows.filter(|(row, _)| row.flags & BACKEND_ALIVE != 0);
            let found = alive
                .find(|(_, index)| self.rows.backend_info(*index).instance == to_name(instance));
            found.map(|(row, index)| (index, row.generation))
        }
    }

    /// No map is asked for more than it holds.
    fn check_room(rows: &Rows) {
        assert!(rows.vips.len() <= MAX_VIPS as usize);
        assert!(rows.services.len() <= MAX_PORTS as usize);
        assert!(rows.pods.len() <= MAX_BACKENDS as usize);
        assert!(rows.pod_ports.len() <= MAX_BACKENDS as usize);
    }

    /// What a packet must be able to rely on at any moment.
    fn check(rows: &Rows) {
        for (key, service) in &rows.services {
            assert_eq!(service.version, service.version_tail);
            let info = &rows.port_info[usize::from(service.id)];
            assert!(info.vip_port == *key, "a service's id names it");
            for candidate in &service.candidates[..service.count as usize] {
                let row = rows.backends[backend_index(candidate.backend) as usize];
                assert_eq!(row.generation, backend_generation(candidate.backend));
                assert_eq!(row.service, service.id);
                assert_eq!(row.flags, BACKEND_ALIVE | BACKEND_ELIGIBLE);
                let pod = ServiceKey::new(row.addr, row.port);
                let pod_port = rows.pod_ports.get(&pod).expect("its replies are known");
                assert!(pod_port.vip_ports[..pod_port.count as usize].contains(key));
            }
        }
        for backend in &rows.backends {
            assert!(backend.flags & BACKEND_ELIGIBLE == 0 || backend.flags & BACKEND_ALIVE != 0);
        }
        for addr in rows.pods.keys() {
            assert!(rows.control.pod_filter.may_contain(addr.v4_raw()));
        }
        for (addr, vip) in &rows.vips {
            let uplink = &rows.uplinks[vip.uplink as usize];
            assert!(uplink.vip_filter.may_contain(addr.v4_raw()));
        }
        let versions: HashSet<u32> = rows.services.values().map(|s| s.version).collect();
        assert_eq!(versions.len(), rows.services.len(), "no two are alike");
    }

    #[test]
    fn a_mac_that_two_names_have_is_that_of_the_one_that_lives() {
        let mut agent = Agent::new();
        let mac = [2, 0, 0, 0, 0, 3];
        for living in ["node-3", "node-y", "node-3", "node-a"] {
            let mut tables = tables(&[]);
            for name in ["node-3", "node-y", "node-a"] {
                let link = PeerLink {
                    mac,
                    addresses: Vec::new(),
                };
                let row = PeerRow {
                    live: name == living,
                    links: BTreeMap::from([(0, link)]),
                    ..PeerRow::default()
                };
                tables.peers.insert(name.to_owned(), row);
            }
            agent.apply(&tables);
            let number = agent.rows.peer_macs[&PeerMac { mac, uplink: 0 }];
            let name = agent.rows.peer_info[number as usize].name;
            assert_eq!(name, to_name(living));
        }
    }

    #[test]
    fn nothing_is_written_twice() {
        let mut agent = Agent::new();
        let wanted = tables(&[(2, 6385, &[(0, 10, true), (1, 11, false)])]);
        assert!(agent.apply(&wanted) > 0);
        assert_eq!(agent.apply(&wanted), 0);
    }

    /// The ranges of every VIP port that has some.
    fn admitted(rows: &Rows) -> BTreeMap<u16, BTreeSet<String>> {
        let services = rows.services.iter().filter(|(_, s)| s.sources != 0);
        let ranges = |service: &Service| {
            let sources = rows.sources.iter();
            let of_list = sources.filter(|(_, s)| u32::from(s.list) == service.sources);
            let text = |(prefix, source): &(u32, Source)| {
                let length = prefix - source.fixed_bits();
                format!("{}/{length}", IpAddr::from(source.addr))
            };
            of_list.map(text).collect()
        };
        services.map(|(key, s)| (key.port, ranges(s))).collect()
    }

    #[test]
    fn source_ranges_are_there_before_a_service_needs_them_and_equal_lists_are_one() {
        let with = |ranges: [&[&str]; 3]| {
            let backends: &[_] = &[(0, 10, true)];
            let mut tables = tables(&[(2, 1, backends), (2, 2, backends), (2, 3, backends)]);
            for (row, ranges) in tables.ports.values_mut().zip(ranges) {
                let ranges = ranges.iter().map(|range| range.parse().expect("a network"));
                row.source_ranges = Some(ranges.collect());
            }
            tables
        };
        let a = ["10.0.0.0/8", "fd00::/16"];
        let b = ["172.22.0.0/24", "::/0"];
        let steps: [([&[&str]; 3], usize); 4] = [
            ([&a, &a, &[]], 2),
            ([&b, &a, &a], 4),
            ([&b, &b, &b], 2),
            ([&[], &[], &[]], 0),
        ];
        let mut agent = Agent::new();
        let mut before = BTreeMap::new();
        for (ranges, rows) in steps {
            let next = (1..).zip(ranges.map(|list| list.iter().map(ToString::to_string).collect()));
            let next: BTreeMap<u16, BTreeSet<String>> = next.collect();
            agent.apply_watched(&with(ranges), |rows| {
                for (port, now) in admitted(rows) {
                    let has = |list: Option<&BTreeSet<String>>| {
                        list.is_some_and(|list| list.is_subset(&now))
                    };
                    assert!(
                        has(before.get(&port)) || has(next.get(&port)),
                        "{port}: {now:?}"
                    );
                }
            });
            assert_eq!(admitted(&agent.rows), next);
            assert_eq!(agent.rows.sources.len(), rows, "{ranges:?}");
            before = next;
        }
    }

    #[test]
    fn a_backend_is_gone_two_seconds_after_it_left_and_its_index_gets_a_new_generation() {
        let mut agent = Agent::new();
        let both = tables(&[(2, 6385, &[(0, 10, true), (1, 11, true)])]);
        let one = tables(&[(2, 6385, &[(0, 10, true)])]);
        agent.apply(&both);
        let (index, generation) = agent.id("ironic-1").expect("alive");
        agent.apply(&one);
        agent.now += SECOND;
        agent.apply(&one);
        assert_eq!(agent.id("ironic-1"), Some((index, generation)));
        agent.now += SECOND;
        agent.apply(&one);
        assert_eq!(agent.id("ironic-1"), None);
        let third = tables(&[(2, 6385, &[(0, 10, true), (2, 12, true)])]);
        agent.apply(&third);
        assert_eq!(agent.id("ironic-2"), Some((index, generation + 1)));
    }

    #[test]
    fn a_flap_of_a_whole_service_keeps_port_id_backends_and_vip() {
        let mut agent = Agent::new();
        let wanted = tables(&[(2, 6385, &[(0, 10, true)]), (3, 80, &[])]);
        agent.apply(&wanted);
        let before = agent.id("ironic-0");
        agent.apply(&tables(&[(3, 80, &[]), (3, 81, &[])]));
        assert!(
            agent.rows.vips.contains_key(&vip(2).into()),
            "its flows go on"
        );
        assert!(!agent.rows.services.contains_key(&service_key(vip(2), 6385)));
        agent.now += SECOND;
        agent.apply(&wanted);
        assert_eq!(agent.id("ironic-0"), before);
        agent.apply(&tables(&[]));
        agent.now += 2 * SECOND;
        agent.apply(&tables(&[]));
        assert!(agent.rows.vips.is_empty() && agent.rows.pods.is_empty());
        assert!(
            agent
                .rows
                .port_info
                .iter()
                .all(|info| info.vip_port.port == 0)
        );
        assert!(agent.rows.uplinks[0].vip_filter == Filter::default());
    }

    #[test]
    fn another_pod_on_the_address_ends_the_former_one_at_once() {
        let mut agent = Agent::new();
        agent.apply(&tables(&[(2, 6385, &[(0, 10, true)])]));
        let (index, _) = agent.id("ironic-0").expect("alive");
        agent.apply(&tables(&[(2, 6385, &[(1, 10, true)])]));
        assert_eq!(agent.id("ironic-0"), None);
        assert_ne!(agent.id("ironic-1").expect("alive").0, index);
        assert!(agent.leaving.is_empty());
    }

    #[test]
    fn a_torn_start_is_mended() {
        let mut agent = Agent::new();
        // A backend of a VIP port that nothing names, and one beyond the range of ids.
        for (index, service) in [(5, 9), (6, u16::MAX)] {
            agent.rows.backends[index] = Backend {
                addr: Addr::from(vip(200)),
                port: 1,
                service,
                generation: 4,
                flags: BACKEND_ALIVE,
                ..NO_BACKEND
            };
        }
        agent.apply(&tables(&[(2, 6385, &[(0, 10, true)])]));
        assert_eq!(agent.rows.backends[5].flags, 0);
        assert_eq!(agent.rows.backends[6].flags, 0);
    }

    #[test]
    fn more_vip_ports_than_ids_are_reported_and_the_rest_is_served() {
        let ports: Vec<Port<'_>> = (0..=MAX_PORTS as u16)
            .map(|n| (2, 1000 + n, &[][..]))
            .collect();
        let tables = tables(&ports);
        let input = Input {
            tables: &tables,
            placement: &[(vip(2), 0)].into(),
            host: &BTreeSet::new(),
            now: SECOND,
        };
        let plan = plan(&Rows::default(), &Leaving::new(), &input);
        assert_eq!(plan.notes.len(), 1);
        assert!(
            plan.notes[0].contains("172.22.0.2:2024"),
            "{}",
            plan.notes[0]
        );
    }

    /// Applies two tables which do not fit together, there and back; what serves is counted each time.
    fn replace(first: &TableSet, second: &TableSet) {
        let mut agent = Agent::new();
        for wanted in [first, second, first] {
            agent.apply(wanted);
            let vips: Vec<_> = agent.rows.vips.keys().map(|v| IpAddr::from(*v)).collect();
            assert_eq!(vips, wanted.vips.keys().copied().collect::<Vec<_>>());
            let ports: Vec<_> = agent.rows.services.keys().copied().collect();
            let keys = wanted.ports.keys();
            let keys: BTreeSet<_> = keys.map(|(vip, port)| service_key(*vip, *port)).collect();
            assert!(ports == keys.into_iter().collect::<Vec<_>>());
            let count = agent.rows.services.values().map(|s| s.count as usize);
            let wanted = wanted.ports.values().map(|row| row.backends.len());
            assert_eq!(count.sum::<usize>(), wanted.sum::<usize>());
        }
    }

    #[test]
    fn vips_are_replaced_by_more_than_there_is_room_for_beside_them() {
        let some = |vips: std::ops::Range<u8>| {
            let ports: Vec<Port<'_>> = vips.map(|vip| (vip, 80, &[][..])).collect();
            tables(&ports)
        };
        replace(&some(2..42), &some(42..82));
    }

    #[test]
    fn vip_ports_are_replaced_by_more_than_there_is_room_for_beside_them() {
        let some = |ports: std::ops::Range<u16>| {
            let ports: Vec<Port<'_>> = ports.map(|port| (2, port, &[][..])).collect();
            tables(&ports)
        };
        replace(&some(1000..1600), &some(2000..2600));
        replace(&some(1000..2024), &some(3000..3001));
    }

    #[test]
    fn backends_are_replaced_by_more_than_there_is_room_for_beside_them() {
        let some = |from: u8| {
            let backends: Vec<_> = (from..from + 60).map(|n| (n, n, true)).collect();
            let ports: Vec<Port<'_>> = (80..80 + MAX_BACKENDS as u16 / 60)
                .map(|port| (2, port, &backends[..]))
                .collect();
            let mut tables = tables(&ports);
            for ((_, port), row) in &mut tables.ports {
                row.backends.iter_mut().for_each(|b| b.port = *port);
            }
            tables
        };
        replace(&some(10), &some(100));
    }

    #[test]
    fn vip_ports_that_leave_take_no_room_of_those_that_come() {
        let some = |ports: std::ops::Range<u16>| {
            let ports: Vec<Port<'_>> = ports.map(|port| (2, port, &[(0, 10, true)][..])).collect();
            tables(&ports)
        };
        let mut agent = Agent::new();
        agent.apply(&some(90..96));
        let input = Input {
            tables: &some(80..86),
            placement: &[(vip(2), 0)].into(),
            host: &BTreeSet::new(),
            now: SECOND,
        };
        let plan = plan(&agent.rows, &Leaving::new(), &input);
        assert_eq!(plan.notes, Vec::<String>::new());
        plan.writes.iter().for_each(|w| agent.rows.record(w));
        let row = agent.rows.pod_ports.values().next().expect("its pod port");
        for port in 80..86 {
            assert!(row.vip_ports.contains(&service_key(vip(2), port)));
        }
    }

    /// As [`Port`], but owned.
    type Ports = Vec<(u8, u16, Vec<(u8, u8, bool)>)>;

    fn any_tables() -> impl Strategy<Value = Ports> {
        let backends = prop::collection::btree_map(0..5_u8, any::<bool>(), 0..5);
        let with_address = |(n, eligible)| (n, 10 + n, eligible);
        let backends = backends.prop_map(move |map| map.into_iter().map(with_address).collect());
        prop::collection::vec((2..4_u8, 80..83_u16, backends), 0..5)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn no_write_of_any_history_shows_a_half_state(
            history in prop::collection::vec((any_tables(), 0..3_u64), 1..8),
        ) {
            let mut agent = Agent::new();
            for (ports, seconds) in history {
                let ports: Vec<_> = ports.iter().map(|(v, p, b)| (*v, *p, b.as_slice())).collect();
                let wanted = tables(&ports);
                agent.now += SECOND * seconds as u32;
                agent.apply(&wanted);
                prop_assert_eq!(agent.apply(&wanted), 0);
                for (place, row) in &wanted.ports {
                    let service = &agent.rows.services[&service_key(place.0, place.1)];
                    let eligible = row.backends.iter().filter(|b| b.eligible).count();
                    prop_assert_eq!(service.count as usize, eligible);
                }
            }
        }
    }
}
