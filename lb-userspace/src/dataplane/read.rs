//! Views of the pinned maps for people and tools. Needs no agent: whatever a map holds is shown, and
//! what is half-written (a name without a row, a row without a name) is shown as far as it goes.

use std::collections::{BTreeSet, HashMap as Index, HashSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use aya::maps::{Array, HashMap, MapData, MapError, PerCpuArray};
use aya::programs::links::{FdLink, PinnedLink};
use ipnet::IpNet;
use lb_common::{
    Addr, Announcer, BACKEND_ALIVE, BACKEND_ELIGIBLE, Backend, BackendInfo, Control, FLOW_CLOSING,
    FLOW_ELSEWHERE, FLOW_HANDED_ON, FLOW_REFUSED, FORWARD, Flow, FlowKey, LAYOUT_VERSION,
    MAX_UPLINKS, MODE_NATIVE, MODE_TC, NAME_LEN, PEER_IS_LIVE, PEER_IS_REFLECTING, PEER_IS_SYNCED,
    POD_HOST, Pass, Peer, PeerInfo, Pod, PortInfo, Pressure, SERVICE_CLIENT_IP, Service,
    ServiceKey, Source, Traffic, UPLINK_BYPASS_DROP, Uplink, VIP_EXTERNAL, VIP_REFUSE_DROP,
    Verdict, Vip, backend_generation, backend_index, from_name, map, peer_link,
};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::maps::{self, pinned};
use super::told::NotTold;
use super::{AttachedMode, DataplaneError, boot_time, nanoseconds, pins, ticks_per_second};

/// An attachment.
#[derive(Clone, Debug, Serialize)]
pub struct UplinkView {
    /// Slot in the `uplinks` map.
    pub slot: u32,
    /// Interface name when it was attached.
    pub interface: String,
    /// Interface index.
    pub ifindex: u32,
    /// How the forward path is attached.
    pub mode: AttachedMode,
    /// Destination MAC of frames meant for it.
    pub mac: String,
    /// The one VLAN that is meant.
    pub vlan: Option<u16>,
    /// Whether direct connection attempts to pods are dropped.
    pub bypass_drop: bool,
    /// UDP source ports that reach pods nevertheless.
    pub bypass_udp: Vec<u16>,
    /// Next hops for clients outside the subnets.
    pub gateways: Vec<IpAddr>,
    /// VIPs of this uplink.
    pub vips: Vec<IpAddr>,
    /// Ids of the programs that its pinned links hold, by hook (`xdp`, `ingress`, `egress`).
    pub programs: Vec<LinkView>,
}

/// A pinned link.
#[derive(Clone, Debug, Serialize)]
pub struct LinkView {
    /// `xdp`, `ingress` or `egress`.
    pub hook: String,
    /// Link id.
    pub link: u32,
    /// Program id.
    pub program: u32,
}

/// A VIP.
#[derive(Clone, Debug, Serialize)]
pub struct VipView {
    /// The address.
    pub address: IpAddr,
    /// Interface of its uplink.
    pub interface: String,
    /// Somebody else announces it.
    pub external: bool,
    /// Whether ARP and ND questions are answered now.
    pub answering: bool,
    /// Who announces it, where that is elected.
    pub announcer: Option<AnnouncerView>,
    /// `reject` or `drop`.
    pub refuse: String,
    /// What goes to the host, as `tcp/22`, `icmp`.
    pub pass: Vec<String>,
}

/// The outcome of an election, as this node sees it.
#[derive(Clone, Debug, Serialize)]
pub struct AnnouncerView {
    /// The node that announces the VIP, if any does.
    pub node: Option<String>,
    /// Seconds since it was first seen to.
    pub since_seconds: Option<f64>,
    /// Epoch of the highest claim: it rises with every change.
    pub epoch: u64,
    /// What nodes disagree on.
    pub conflict: Option<String>,
}

/// Another node.
#[derive(Clone, Debug, Serialize)]
pub struct PeerView {
    /// Its number in the maps.
    pub number: u32,
    /// Its name.
    pub node: String,
    /// Version of its agent.
    pub version: String,
    /// Its agent's heartbeats are heard.
    pub live: bool,
    /// Its program sends probes back: it takes new flows.
    pub reflecting: bool,
    /// Its exceptions are known here.
    pub synced: bool,
    /// Seconds since one of these changed.
    pub since_seconds: Option<f64>,
    /// Where it is.
    pub links: Vec<PeerLinkView>,
    /// Packets from clients that were handed on to it.
    pub handed_on_packets: u64,
    /// Their bytes (frames).
    pub handed_on_bytes: u64,
    /// New flows among them.
    pub handed_on_flows: u64,
}

/// Another node on one uplink.
#[derive(Clone, Debug, Serialize)]
pub struct PeerLinkView {
    /// This node's interface.
    pub interface: String,
    /// Its MAC there.
    pub mac: String,
    /// Its addresses there.
    pub addresses: Vec<IpAddr>,
}

/// Packets and bytes, over all CPUs, since the row got its owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TrafficView {
    /// Packets from clients.
    pub packets_in: u64,
    /// Bytes from clients (frames).
    pub bytes_in: u64,
    /// Packets to clients; a GSO packet counts once.
    pub packets_out: u64,
    /// Bytes to clients (frames).
    pub bytes_out: u64,
    /// New flows.
    pub flows: u64,
}

/// A VIP port with its backends.
#[derive(Clone, Debug, Serialize)]
pub struct PortView {
    /// Id.
    pub id: u16,
    /// VIP.
    pub vip: IpAddr,
    /// Port on the VIP.
    pub port: u16,
    /// Service, e.g. `metal3/ironic`.
    pub service: String,
    /// Port name, e.g. `images`.
    pub name: String,
    /// Instance slot of an instance port.
    pub slot: Option<u32>,
    /// All flows of a client to one backend.
    pub client_affinity: bool,
    /// Where clients of new flows must be, where not all are admitted.
    pub source_ranges: Option<BTreeSet<IpNet>>,
    /// Whether the data plane serves it; false for one that has left and whose flows are being ended.
    pub serving: bool,
    /// How many backends take new flows.
    pub eligible: usize,
    /// Its backends that exist, those that take no new flows included.
    pub backends: Vec<BackendView>,
    /// Counters.
    pub traffic: TrafficView,
}

/// A backend.
#[derive(Clone, Debug, Serialize)]
pub struct BackendView {
    /// Index in the `backends` map.
    pub index: u16,
    /// Generation of the index.
    pub generation: u16,
    /// Stable identity, e.g. `ironic-0`.
    pub instance: String,
    /// Incarnation; empty for files.
    pub uid: String,
    /// Pod address.
    pub address: IpAddr,
    /// Pod port.
    pub port: u16,
    /// VIP of its VIP port.
    pub vip: Option<IpAddr>,
    /// VIP port.
    pub vip_port: Option<u16>,
    /// Service.
    pub service: String,
    /// Port name.
    pub port_name: String,
    /// The node that it is on; none for this one.
    pub node: Option<String>,
    /// Takes new flows.
    pub eligible: bool,
    /// The address is this node's own (host network).
    pub host_network: bool,
    /// Counters.
    pub traffic: TrafficView,
}

/// Where a flow is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FlowState {
    /// The pod has answered: kept until it ends.
    Living,
    /// The pod has not answered yet.
    Young,
    /// Ended; guards against port collisions.
    Closing,
    /// Found no room among the living.
    Refused,
}

/// A flow.
#[derive(Clone, Debug, Serialize)]
pub struct FlowView {
    /// State.
    pub state: FlowState,
    /// Client.
    pub client: IpAddr,
    /// The client's port.
    pub client_port: u16,
    /// VIP.
    pub vip: IpAddr,
    /// VIP port.
    pub vip_port: u16,
    /// Service, where the VIP port is still known.
    pub service: String,
    /// Pod address.
    pub pod: IpAddr,
    /// Pod port.
    pub pod_port: u16,
    /// The backend's stable identity, where it is still known.
    pub instance: String,
    /// Whether the backend is gone: the flow's next packet is refused.
    pub gone: bool,
    /// The client's port towards the pod, where it is translated.
    pub translated_port: Option<u16>,
    /// Seconds since it began.
    pub age_seconds: f64,
    /// Seconds since its last packet in either direction.
    pub idle_seconds: f64,
    /// Bytes from the client (frames).
    pub bytes_in: u64,
    /// Bytes to the client; they are counted with the entry that only a living flow has.
    pub bytes_out: Option<u64>,
    /// Interface on which the client's packets arrive.
    pub interface: String,
    /// MAC they come from.
    pub last_hop: String,
    /// They come by way of another node.
    pub handed_on: bool,
}

/// How full the flow tables are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FlowCounts {
    /// Living flows.
    pub living: usize,
    /// Flows that begin, end or were refused.
    pub young: usize,
}

/// Which flows to show; what is `None` does not restrict.
#[derive(Clone, Debug, Default)]
pub struct FlowFilter {
    /// Of this client.
    pub client: Option<IpAddr>,
    /// To this VIP.
    pub vip: Option<IpAddr>,
    /// To this port of a VIP.
    pub vip_port: Option<u16>,
    /// Of this backend, by stable identity or pod address.
    pub backend: Option<String>,
    /// In this state.
    pub state: Option<FlowState>,
}

/// A verdict and how often it was given.
#[derive(Clone, Debug, Serialize)]
pub struct VerdictView {
    /// Name.
    pub verdict: &'static str,
    /// Packets, over all CPUs.
    pub packets: u64,
    /// One sentence.
    pub explanation: &'static str,
}

/// The state as a whole.
#[derive(Clone, Debug, Serialize)]
pub struct ControlView {
    /// Process id of the agent that wrote last.
    pub agent_pid: u32,
    /// Whether an agent holds the lock now.
    pub agent_running: bool,
    /// Version of that agent.
    pub agent_version: String,
    /// Seconds since that agent started.
    pub agent_started_seconds: Option<f64>,
    /// Seconds since the maps last came in step with the source.
    pub synced_seconds: Option<f64>,
    /// Refusals a second and CPU at most.
    pub refusals_per_second: u32,
    /// Whether the living table has no room.
    pub living_full: bool,
    /// Room of the living table.
    pub living_capacity: u32,
    /// Room of the young table.
    pub young_capacity: u32,
    /// Version of the map layout.
    pub layout_version: u32,
}

/// Reads the pinned maps. Every call reads anew.
#[derive(Debug)]
pub struct Reader {
    root: PathBuf,
    dir: PathBuf,
}

impl Reader {
    /// Looks for the maps below a pin root. [`DataplaneError::NotLoaded`] when there are none,
    /// [`DataplaneError::Pins`] when that cannot be told.
    pub fn open(bpffs: &Path) -> Result<Self, DataplaneError> {
        let root = bpffs.to_owned();
        let dir = pins::layout_dir(&root);
        pins::expect(&root, map::CONTROL)?;
        Ok(Self { root, dir })
    }

    /// Attachments by slot.
    pub fn uplinks(&self) -> Result<Vec<UplinkView>, DataplaneError> {
        let vips: Vec<(Addr, Vip)> = self.hash(map::VIPS)?;
        let links = pins::links(&self.dir)?;
        let rows: Vec<Uplink> = self.array(map::UPLINKS)?;
        let used = rows.iter().zip(0..).filter(|(row, _)| row.ifindex != 0);
        let view = |(row, slot): (&Uplink, u32)| {
            let mut own: Vec<IpAddr> = vips
                .iter()
                .filter(|(_, vip)| vip.uplink == slot)
                .map(|(addr, _)| (*addr).into())
                .collect();
            own.sort_unstable();
            let links = links.iter().filter(|(_, ifindex)| *ifindex == row.ifindex);
            UplinkView {
                slot,
                interface: from_name(&row.name),
                ifindex: row.ifindex,
                mode: match row.mode {
                    MODE_NATIVE => AttachedMode::Native,
                    MODE_TC => AttachedMode::Tc,
                    _ => AttachedMode::Egress,
                },
                mac: mac(&row.mac),
                vlan: (row.vlan != 0).then_some(row.vlan),
                bypass_drop: row.flags & UPLINK_BYPASS_DROP != 0,
                bypass_udp: row
                    .bypass_udp
                    .into_iter()
                    .filter(|port| *port != 0)
                    .collect(),
                gateways: row
                    .gateways
                    .into_iter()
                    .filter(|gateway| *gateway != Addr::UNSPECIFIED)
                    .map(IpAddr::from)
                    .collect(),
                vips: own,
                programs: links
                    .filter_map(|(hook, ifindex)| {
                        let name = format!("{}-{ifindex}", hook.name());
                        link_view(&self.dir.join("links").join(name), hook.name())
                    })
                    .collect(),
            }
        };
        Ok(used.map(view).collect())
    }

    /// VIPs by address.
    pub fn vips(&self) -> Result<Vec<VipView>, DataplaneError> {
        let uplinks: Vec<Uplink> = self.array(map::UPLINKS)?;
        let rows: Vec<(Addr, Vip)> = self.hash(map::VIPS)?;
        let clock = Clock::now();
        let announcers: Vec<(Addr, Announcer)> = self.hash(map::ANNOUNCERS)?;
        let announcers: Index<Addr, Announcer> = announcers.into_iter().collect();
        let now = nanoseconds(boot_time());
        let view = |(addr, vip): (Addr, Vip)| VipView {
            address: addr.into(),
            interface: interface(&uplinks, vip.uplink),
            external: vip.flags & VIP_EXTERNAL != 0,
            answering: vip.answer_until > now
                || announcers
                    .get(&addr)
                    .is_some_and(|row| row.answer_until > now),
            announcer: announcers.get(&addr).map(|row| {
                let named = |name: &[u8]| Some(from_name(name)).filter(|name| !name.is_empty());
                AnnouncerView {
                    node: named(&row.holder),
                    since_seconds: clock.seconds_since(row.since),
                    epoch: row.epoch,
                    conflict: named(&row.conflict),
                }
            }),
            refuse: if vip.flags & VIP_REFUSE_DROP != 0 {
                "drop".to_owned()
            } else {
                "reject".to_owned()
            },
            pass: vip.pass.iter().filter_map(pass).collect(),
        };
        let mut views: Vec<_> = rows.into_iter().map(view).collect();
        views.sort_by_key(|view| view.address);
        Ok(views)
    }

    /// VIPs that have ports and that no uplink carries: nothing arrives for them.
    pub fn vips_without_uplink(&self) -> Result<BTreeSet<IpAddr>, DataplaneError> {
        let ports: Vec<(ServiceKey, Service)> = self.hash(map::SERVICES)?;
        let rows: Vec<(Addr, Vip)> = self.hash(map::VIPS)?;
        let mut vips: BTreeSet<_> = ports.into_iter().map(|(key, _)| key.addr.into()).collect();
        for (placed, _) in rows {
            vips.remove(&placed.into());
        }
        Ok(vips)
    }

    /// Other nodes by number.
    pub fn peers(&self) -> Result<Vec<PeerView>, DataplaneError> {
        let uplinks: Vec<Uplink> = self.array(map::UPLINKS)?;
        let rows: Vec<Peer> = self.array(map::PEERS)?;
        let infos: Vec<PeerInfo> = self.array(map::PEER_INFO)?;
        let stats = self.traffic(map::PEER_STATS)?;
        let clock = Clock::now();
        let mut views = Vec::new();
        for (info, number) in infos.iter().zip(0..) {
            if info.name == [0; NAME_LEN] {
                continue;
            }
            let links = (0..MAX_UPLINKS).filter_map(|uplink| {
                let row = rows.get(peer_link(number, uplink) as usize)?;
                let used = row.addrs.iter().filter(|addr| **addr != Addr::UNSPECIFIED);
                let view = PeerLinkView {
                    interface: interface(&uplinks, uplink),
                    mac: mac(&row.mac),
                    addresses: used.map(|addr| (*addr).into()).collect(),
                };
                (row.mac != [0; 6]).then_some(view)
            });
            let traffic = stats(number as u16)?;
            views.push(PeerView {
                number,
                node: from_name(&info.name),
                version: from_name(&info.version),
                live: info.flags & PEER_IS_LIVE != 0,
                reflecting: info.flags & PEER_IS_REFLECTING != 0,
                synced: info.flags & PEER_IS_SYNCED != 0,
                since_seconds: clock.seconds_since(info.since),
                links: links.collect(),
                handed_on_packets: traffic.packets_in,
                handed_on_bytes: traffic.bytes_in,
                handed_on_flows: traffic.flows,
            });
        }
        Ok(views)
    }

    /// VIP ports by VIP and port, with their backends.
    pub fn ports(&self) -> Result<Vec<PortView>, DataplaneError> {
        let services: Vec<(ServiceKey, Service)> = self.hash(map::SERVICES)?;
        let services: Index<ServiceKey, Service> = services.into_iter().collect();
        let sources = maps::sources(&pinned(&self.dir, map::SOURCES)?)?;
        let infos: Vec<PortInfo> = self.array(map::PORT_INFO)?;
        let stats = self.traffic(map::PORT_STATS)?;
        let mut backends: Index<u16, Vec<BackendView>> = Index::new();
        for (service, view) in self.backend_views(&infos)? {
            backends.entry(service).or_default().push(view);
        }
        let used = infos.iter().zip(0..).filter(|(i, _)| i.vip_port.port != 0);
        let mut views = Vec::new();
        for (info, id) in used {
            let service = services.get(&info.vip_port).filter(|s| s.id == id);
            views.push(PortView {
                id,
                vip: info.vip_port.addr.into(),
                port: info.vip_port.port,
                service: from_name(&info.service),
                name: from_name(&info.port),
                slot: info.slot.checked_sub(1),
                client_affinity: service.is_some_and(|s| s.flags & SERVICE_CLIENT_IP != 0),
                source_ranges: service
                    .filter(|service| service.sources != 0)
                    .map(|service| ranges(&sources, service.sources)),
                serving: service.is_some(),
                eligible: service.map_or(0, |service| service.count as usize),
                backends: backends.remove(&id).unwrap_or_default(),
                traffic: stats(id)?,
            });
        }
        views.sort_by_key(|view| (view.vip, view.port));
        Ok(views)
    }

    /// Backends that exist, by VIP port and identity.
    pub fn backends(&self) -> Result<Vec<BackendView>, DataplaneError> {
        let infos: Vec<PortInfo> = self.array(map::PORT_INFO)?;
        let views = self.backend_views(&infos)?;
        Ok(views.into_iter().map(|(_, view)| view).collect())
    }

    fn backend_views(&self, infos: &[PortInfo]) -> Result<Vec<(u16, BackendView)>, DataplaneError> {
        let rows: Vec<Backend> = self.array(map::BACKENDS)?;
        let names: Array<MapData, BackendInfo> = pinned(&self.dir, map::BACKEND_INFO)?;
        let peers: Vec<PeerInfo> = self.array(map::PEER_INFO)?;
        let pods: Vec<(Addr, Pod)> = self.hash(map::PODS)?;
        let pods: Index<Addr, Pod> = pods.into_iter().collect();
        let stats = self.traffic(map::BACKEND_STATS)?;
        let mut views = Vec::new();
        for (row, index) in rows.iter().zip(0..) {
            if row.flags & BACKEND_ALIVE == 0 {
                continue;
            }
            let name = names
                .get(&u32::from(index), 0)
                .map_err(|source| DataplaneError::map("read", map::BACKEND_INFO, source))?;
            let port = infos.get(usize::from(row.service));
            let port = port.filter(|port| port.vip_port.port != 0);
            let view = BackendView {
                index,
                generation: row.generation,
                instance: from_name(&name.instance),
                uid: from_name(&name.uid),
                address: row.addr.into(),
                port: row.port,
                vip: port.map(|port| port.vip_port.addr.into()),
                vip_port: port.map(|port| port.vip_port.port),
                service: port.map_or_else(String::new, |port| from_name(&port.service)),
                port_name: port.map_or_else(String::new, |port| from_name(&port.port)),
                node: (row.peer != 0)
                    .then(|| peers.get(usize::from(row.peer)))
                    .flatten()
                    .map(|peer| from_name(&peer.name)),
                eligible: row.flags & BACKEND_ELIGIBLE != 0,
                host_network: pods.get(&row.addr).is_some_and(|p| p.flags & POD_HOST != 0),
                traffic: stats(index)?,
            };
            views.push((row.service, view));
        }
        let order = |(_, v): &(u16, BackendView)| (v.vip, v.vip_port, v.instance.clone(), v.index);
        views.sort_by_cached_key(order);
        Ok(views)
    }

    /// Flows that match, by state and then longest first. An LRU that packets rewrite meanwhile may hide a
    /// flow or show one that has just ended, but shows none twice.
    pub fn flows(&self, filter: &FlowFilter) -> Result<Vec<FlowView>, DataplaneError> {
        let uplinks: Vec<Uplink> = self.array(map::UPLINKS)?;
        let infos: Vec<PortInfo> = self.array(map::PORT_INFO)?;
        let rows: Vec<Backend> = self.array(map::BACKENDS)?;
        let names: Vec<BackendInfo> = self.array(map::BACKEND_INFO)?;
        let replies: HashMap<MapData, FlowKey, Flow> = pinned(&self.dir, map::LIVING_REPLY)?;
        let young: HashMap<MapData, FlowKey, Flow> = pinned(&self.dir, map::YOUNG)?;
        let clock = Clock::now();
        let mut seen = HashSet::new();
        let mut views = Vec::new();
        for name in [map::LIVING, map::YOUNG] {
            for (key, flow) in self.hash::<FlowKey, Flow>(name)? {
                // A flow that was promoted between the two looks is shown as living.
                if key.direction != FORWARD || !seen.insert(key) {
                    continue;
                }
                let reply_key = FlowKey::reply(key.client, flow.client_port, flow.addr, flow.port);
                let reply = replies
                    .get(&reply_key, 0)
                    .or_else(|_| young.get(&reply_key, 0))
                    .ok();
                let index = backend_index(flow.backend) as usize;
                // A row whose index has another owner by now names that one, not the flow's.
                let owner = rows.get(index).filter(|row| {
                    row.generation == backend_generation(flow.backend)
                        && row.service == flow.service
                });
                let instance = owner.and(names.get(index)).map(|name| &name.instance);
                let service = infos.get(usize::from(flow.service));
                let service =
                    service.filter(|info| info.vip_port == ServiceKey::new(key.addr, key.port));
                let idle = clock.since_ticks(flow.last_seen);
                let idle = reply.map_or(idle, |r| clock.since_ticks(r.last_seen).min(idle));
                let view = FlowView {
                    state: state(name, &flow),
                    client: key.client.into(),
                    client_port: key.client_port,
                    vip: key.addr.into(),
                    vip_port: key.port,
                    service: service.map_or_else(String::new, |info| from_name(&info.service)),
                    pod: flow.addr.into(),
                    pod_port: flow.port,
                    instance: instance.map_or_else(String::new, |name| from_name(name)),
                    gone: owner.is_none_or(|row| row.flags & BACKEND_ALIVE == 0),
                    translated_port: (flow.client_port != key.client_port)
                        .then_some(flow.client_port),
                    age_seconds: clock.since_ticks(flow.started),
                    idle_seconds: idle,
                    bytes_in: flow.bytes,
                    bytes_out: reply.map(|reply| reply.bytes),
                    interface: interface(&uplinks, (flow.uplink & !FLOW_HANDED_ON).into()),
                    handed_on: flow.uplink & FLOW_HANDED_ON != 0,
                    last_hop: mac(&flow.last_hop),
                };
                if filter.matches(&view) {
                    views.push(view);
                }
            }
        }
        views.sort_by(|a, b| {
            let longest = || b.age_seconds.total_cmp(&a.age_seconds);
            a.state.cmp(&b.state).then_with(longest)
        });
        Ok(views)
    }

    /// How many flows there are. One system call a flow: far cheaper than [`Self::flows`].
    pub fn flow_counts(&self) -> Result<FlowCounts, DataplaneError> {
        let mut seen = HashSet::new();
        self.see_flows(map::LIVING, &mut seen)?;
        let living = seen.len();
        // A living flow may have a hidden entry among the young ones.
        self.see_flows(map::YOUNG, &mut seen)?;
        let young = seen.len() - living;
        Ok(FlowCounts { living, young })
    }

    fn see_flows(
        &self,
        name: &'static str,
        seen: &mut HashSet<FlowKey>,
    ) -> Result<(), DataplaneError> {
        let map: HashMap<MapData, FlowKey, Flow> = pinned(&self.dir, name)?;
        // As in `hash`: a key that goes under the iterator sends it back to the start.
        let steps = 2 * self.capacity(name)? as usize;
        for key in map.keys().take(steps) {
            let key = key.map_err(|source| DataplaneError::map("read", name, source))?;
            if key.direction == FORWARD {
                seen.insert(key);
            }
        }
        Ok(())
    }

    /// All verdicts in the order of their numbers, those that never happened included.
    pub fn verdicts(&self) -> Result<Vec<VerdictView>, DataplaneError> {
        let counters: PerCpuArray<MapData, u64> = pinned(&self.dir, map::VERDICTS)?;
        let view = |verdict: &Verdict| {
            let values = counters
                .get(&(*verdict as u32), 0)
                .map_err(|source| DataplaneError::map("read", map::VERDICTS, source))?;
            Ok(VerdictView {
                verdict: verdict.name(),
                packets: values.iter().sum(),
                explanation: verdict.explanation(),
            })
        };
        Verdict::ALL.iter().map(view).collect()
    }

    /// How many events and endings have reached nobody.
    pub fn not_told(&self) -> Result<NotTold, DataplaneError> {
        NotTold::read(&self.root)
    }

    /// The state as a whole.
    pub fn control(&self) -> Result<ControlView, DataplaneError> {
        let control: Control = self.first(map::CONTROL)?;
        let pressure: Pressure = self.first(map::PRESSURE)?;
        let clock = Clock::now();
        let owner = pins::owner(&self.root);
        Ok(ControlView {
            agent_pid: control.agent_pid,
            agent_running: owner.is_some(),
            agent_version: from_name(&control.agent_version),
            agent_started_seconds: clock.seconds_since(control.agent_started),
            synced_seconds: clock.seconds_since(control.synced_at),
            refusals_per_second: control.refusals_per_second,
            living_full: pressure.living_full != 0,
            living_capacity: self.capacity(map::LIVING)?,
            young_capacity: self.capacity(map::YOUNG)?,
            layout_version: LAYOUT_VERSION,
        })
    }

    /// Where the maps are.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn first<V: aya::Pod>(&self, name: &'static str) -> Result<V, DataplaneError> {
        let array: Array<MapData, V> = pinned(&self.dir, name)?;
        array
            .get(&0, 0)
            .map_err(|source| DataplaneError::map("read", name, source))
    }

    pub(super) fn array<V: aya::Pod>(&self, name: &'static str) -> Result<Vec<V>, DataplaneError> {
        let array: Array<MapData, V> = pinned(&self.dir, name)?;
        array
            .iter()
            .collect::<Result<_, _>>()
            .map_err(|source| DataplaneError::map("read", name, source))
    }

    /// All entries of a hash, each once. A key that is removed under the iterator sends it back to the
    /// start, so it may never end under churn: it gets as many steps as twice the map has room for.
    pub(super) fn hash<K, V>(&self, name: &'static str) -> Result<Vec<(K, V)>, DataplaneError>
    where
        K: aya::Pod + Eq + std::hash::Hash,
        V: aya::Pod,
    {
        let map: HashMap<MapData, K, V> = pinned(&self.dir, name)?;
        let steps = 2 * self.capacity(name)? as usize;
        let failed = |source| DataplaneError::map("read", name, source);
        let mut seen = HashSet::new();
        let mut entries = Vec::new();
        for key in map.keys().take(steps) {
            let key = key.map_err(failed)?;
            if !seen.insert(key) {
                continue;
            }
            match map.get(&key, 0) {
                Ok(value) => entries.push((key, value)),
                // It went between the two calls.
                Err(MapError::KeyNotFound) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(entries)
    }

    /// How many entries a map has room for.
    pub(crate) fn capacity(&self, name: &'static str) -> Result<u32, DataplaneError> {
        MapData::from_pin(self.dir.join(name))
            .and_then(|data| data.info())
            .map(|info| info.max_entries())
            .map_err(|source| DataplaneError::map("look at", name, source))
    }

    fn traffic(
        &self,
        name: &'static str,
    ) -> Result<impl Fn(u16) -> Result<TrafficView, DataplaneError>, DataplaneError> {
        let stats: PerCpuArray<MapData, Traffic> = pinned(&self.dir, name)?;
        Ok(move |index: u16| {
            let values = stats
                .get(&u32::from(index), 0)
                .map_err(|source| DataplaneError::map("read", name, source))?;
            let mut sum = TrafficView::default();
            for cpu in values.iter() {
                sum.packets_in += cpu.packets_in;
                sum.bytes_in += cpu.bytes_in;
                sum.packets_out += cpu.packets_out;
                sum.bytes_out += cpu.bytes_out;
                sum.flows += cpu.flows;
            }
            Ok(sum)
        })
    }
}

impl FlowFilter {
    fn matches(&self, flow: &FlowView) -> bool {
        let Self {
            client,
            vip,
            vip_port,
            backend,
            state,
        } = self;
        let is_backend =
            |wanted: &String| flow.instance == *wanted || wanted.parse() == Ok(flow.pod);
        client.is_none_or(|client| flow.client == client)
            && vip.is_none_or(|vip| flow.vip == vip)
            && vip_port.is_none_or(|port| flow.vip_port == port)
            && backend.as_ref().is_none_or(is_backend)
            && state.is_none_or(|state| flow.state == state)
    }
}

/// What the times in the maps are relative to.
pub(super) struct Clock {
    boot_time: u64,
    jiffies: u64,
    ticks: u64,
}

impl Clock {
    pub(super) fn now() -> Self {
        let ticks = u64::from(ticks_per_second());
        // `jiffies_64` starts five minutes before the 32-bit counter wraps (INITIAL_JIFFIES) and goes on
        // with CLOCK_MONOTONIC.
        let monotonic = clock_gettime(ClockId::Monotonic);
        let seconds = u64::try_from(monotonic.tv_sec).unwrap_or(0);
        let rest = u64::try_from(monotonic.tv_nsec).unwrap_or(0) * ticks / 1_000_000_000;
        let initial = (1 << 32) - 300 * ticks;
        Self {
            boot_time: nanoseconds(boot_time()),
            jiffies: initial + seconds * ticks + rest,
            ticks,
        }
    }

    /// The same with what the kernel's count of ticks was a moment ago: it may be some tenths of a second behind the clock.
    /// Of that count the lower half is given.
    pub(super) fn with_ticks(self, ticks: u32) -> Self {
        let ahead = (self.jiffies as u32).wrapping_sub(ticks).cast_signed();
        let jiffies = self.jiffies.wrapping_add_signed(-i64::from(ahead));
        Self { jiffies, ..self }
    }

    /// Seconds since a boot time, of a row that has one.
    fn seconds_since(&self, time: u64) -> Option<f64> {
        (time != 0).then(|| self.since_boot_time(time))
    }

    pub(super) fn since_boot_time(&self, nanoseconds: u64) -> f64 {
        self.boot_time.saturating_sub(nanoseconds) as f64 / 1e9
    }

    pub(super) fn since_jiffies(&self, jiffies: u64) -> f64 {
        self.jiffies.saturating_sub(jiffies) as f64 / self.ticks as f64
    }

    /// Seconds since a count of ticks of which the lower half is given.
    pub(super) fn since_ticks(&self, ticks: u32) -> f64 {
        self.ticks_since(ticks) as f64 / self.ticks as f64
    }

    fn ticks_since(&self, ticks: u32) -> u64 {
        /// What lies ahead by less was a moment ago: the clocks differ by as much.
        const MOMENT: u64 = 10;
        let since = u64::from((self.jiffies as u32).wrapping_sub(ticks));
        if since + MOMENT * self.ticks >= 1 << 32 {
            0
        } else {
            since
        }
    }

    /// Nanoseconds of a tick.
    fn tick(&self) -> u64 {
        1_000_000_000 / self.ticks
    }

    /// The boot time, in nanoseconds, of a count of ticks of which the lower half is given.
    pub(super) fn boot_time_of(&self, ticks: u32) -> u64 {
        let since = self.ticks_since(ticks) * self.tick();
        self.boot_time.saturating_sub(since)
    }

    /// The lower half of the count of ticks at a boot time in nanoseconds.
    pub(super) fn ticks_at(&self, boot_time: u64) -> u32 {
        let since = self.boot_time.saturating_sub(boot_time) / self.tick();
        self.jiffies.wrapping_sub(since) as u32
    }
}

fn state(map_name: &str, flow: &Flow) -> FlowState {
    // Of a flow on another node only the client's packets are seen here: its FIN is all that tells of the end.
    let is_left = flow.state & FLOW_ELSEWHERE != 0 && flow.client_fin != 0;
    if flow.state & FLOW_CLOSING != 0 || is_left {
        FlowState::Closing
    } else if flow.state & FLOW_REFUSED != 0 {
        FlowState::Refused
    } else if map_name == map::LIVING {
        FlowState::Living
    } else {
        FlowState::Young
    }
}

/// The ranges of a list.
pub(super) fn ranges(sources: &BTreeSet<(u32, Source)>, list: u32) -> BTreeSet<IpNet> {
    let of_list = sources
        .iter()
        .filter(|(_, source)| u32::from(source.list) == list);
    let range = of_list.filter_map(|(prefix, source)| {
        let length = prefix.checked_sub(source.fixed_bits())?;
        IpNet::new(source.addr.into(), length as u8).ok()
    });
    range.collect()
}

pub(super) fn interface(uplinks: &[Uplink], slot: u32) -> String {
    uplinks
        .get(slot as usize)
        .map_or_else(String::new, |uplink| from_name(&uplink.name))
}

pub(super) fn mac([a, b, c, d, e, f]: &[u8; 6]) -> String {
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

pub(super) fn pass(pass: &Pass) -> Option<String> {
    let protocol = match pass.protocol {
        0 => return None,
        1 => "icmp".to_owned(),
        6 => "tcp".to_owned(),
        17 => "udp".to_owned(),
        58 => "icmpv6".to_owned(),
        number => number.to_string(),
    };
    Some(match pass.port {
        0 => protocol,
        port => format!("{protocol}/{port}"),
    })
}

fn link_view(pin: &Path, hook: &str) -> Option<LinkView> {
    let link = FdLink::from(PinnedLink::from_pin(pin).ok()?);
    let info = link.info().ok()?;
    Some(LinkView {
        hook: hook.to_owned(),
        link: info.id(),
        program: info.program_id(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ticks of a clock that has counted so many.
    fn clock(jiffies: u64) -> Clock {
        Clock {
            boot_time: 3_600_000_000_000,
            jiffies,
            ticks: 250,
        }
    }

    #[test]
    fn half_a_count_of_ticks_may_wrap() {
        const HALF: u64 = 1 << 32;
        for jiffies in [
            HALF - 300 * 250,
            HALF + 100,
            5 * HALF - 1,
            5 * HALF,
            7 * HALF + 250,
        ] {
            let clock = clock(jiffies);
            let before = |ticks: u64| jiffies.wrapping_sub(ticks) as u32;
            assert_eq!(clock.since_ticks(before(500)), 2.0);
            assert_eq!(
                clock.since_ticks(before(HALF / 2)),
                (HALF / 2) as f64 / 250.0
            );
            assert_eq!(clock.since_ticks(before(0_u64.wrapping_sub(3))), 0.0);
            assert_eq!(clock.boot_time_of(before(500)), 3_598_000_000_000);
            assert_eq!(clock.ticks_at(3_598_000_000_000), before(500));
            let behind = clock.with_ticks(before(40));
            assert_eq!(behind.jiffies, jiffies - 40);
            let ahead = behind.with_ticks(before(0));
            assert_eq!(ahead.jiffies, jiffies);
        }
    }
}
