//! Tables to run on: what is served where, as rows of the maps.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use lb_common::choice;
use lb_common::events::Watch;
use lb_common::layout::{
    Addr, BACKEND_ALIVE, BACKEND_ELIGIBLE, Backend, Candidate, Control, Exception, Filter, FlowKey,
    MAX_BACKENDS_PER_PORT, MAX_PASS, MAX_PEER_ADDRS, MAX_VIP_PORTS_PER_POD_PORT, MODE_NATIVE,
    PEER_REFLECTS, Pass, Peer, PeerMac, Pod, PodPort, Service, ServiceKey, Source,
    UPLINK_BYPASS_DROP, UPLINK_FORWARD, Uplink, VIP_EXTERNAL, VIP_REFUSE_DROP, Vip, backend_id,
    map, peer_link, to_name,
};

use crate::Engine;

/// A VIP, a port of it, and the pods behind: address and port.
pub type ServedPort<'a, A> = (A, u16, &'a [(A, u16)]);

/// Rows that serve VIP ports.
#[derive(Clone, Default)]
pub struct Served {
    /// By index.
    pub backends: Vec<Backend>,
    /// By VIP port.
    pub services: Vec<(ServiceKey, Service)>,
    /// By pod port.
    pub pod_ports: Vec<(ServiceKey, PodPort)>,
    /// By address.
    pub pods: Vec<(Addr, Pod)>,
    /// What the agent tells.
    pub control: Control,
}

/// VIP ports with live, eligible backends, and everything that hangs off them. Backend indices are given in order, the
/// generation is 1.
pub fn serve<A: Into<IpAddr> + Copy>(ports: &[ServedPort<'_, A>]) -> Served {
    let mut served = Served::default();
    served.control.refusals_per_second = 1000;
    let mut leads: BTreeMap<ServiceKey, Vec<ServiceKey>> = BTreeMap::new();
    let mut pods = BTreeMap::new();
    for (id, (vip, port, backends)) in ports.iter().enumerate() {
        let vip_port = ServiceKey::new(Addr::from((*vip).into()), *port);
        let mut candidates = [Candidate::default(); MAX_BACKENDS_PER_PORT];
        for (at, (pod, pod_port)) in backends.iter().enumerate() {
            let pod: IpAddr = (*pod).into();
            let addr = Addr::from(pod);
            candidates[at] = Candidate {
                backend: backend_id(served.backends.len() as u16, 1),
                identity: choice::identity(&pod.to_string()),
            };
            served.backends.push(Backend {
                addr,
                port: *pod_port,
                service: id as u16,
                generation: 1,
                flags: BACKEND_ALIVE | BACKEND_ELIGIBLE,
                peer: 0,
                pad: 0,
            });
            leads
                .entry(ServiceKey::new(addr, *pod_port))
                .or_default()
                .push(vip_port);
            served.control.pod_filter.insert(&addr);
            pods.insert(addr, Pod { flags: 0 });
        }
        let service = Service {
            version: 1,
            id: id as u16,
            flags: 0,
            seed: choice::name_hash("metal3/ironic"),
            count: backends.len() as u32,
            sources: 0,
            local: u64::MAX,
            candidates,
            pad_tail: 0,
            version_tail: 1,
        };
        served.services.push((vip_port, service));
    }
    served.pods = pods.into_iter().collect();
    for (pod_port, vip_ports) in leads {
        let nothing = ServiceKey::new(Addr::UNSPECIFIED, 0);
        let mut value = PodPort {
            count: vip_ports.len() as u32,
            flags: 0,
            vip_ports: [nothing; MAX_VIP_PORTS_PER_POD_PORT],
        };
        value.vip_ports[..vip_ports.len()].copy_from_slice(&vip_ports);
        served.pod_ports.push((pod_port, value));
    }
    served
}

/// The client of the scene.
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(172, 22, 0, 100);
/// The VIP that is announced here.
pub const VIP: Ipv4Addr = Ipv4Addr::new(172, 22, 0, 2);
/// One that somebody else announces.
pub const VIP_OF_OTHERS: Ipv4Addr = Ipv4Addr::new(172, 22, 0, 3);
/// One that another node announces now, and that drops what it would refuse.
pub const VIP_SILENT: Ipv4Addr = Ipv4Addr::new(172, 22, 0, 4);
/// The pods of this node, and one of the peer.
pub const PODS: [Ipv4Addr; 3] = [
    Ipv4Addr::new(10, 244, 0, 10),
    Ipv4Addr::new(10, 244, 0, 11),
    Ipv4Addr::new(10, 244, 1, 10),
];
/// The client over IPv6.
pub const CLIENT6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x22, 0, 0, 0, 0, 0, 0x100);
/// The VIP over IPv6.
pub const VIP6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x22, 0, 0, 0, 0, 0, 2);
/// The pods over IPv6.
pub const PODS6: [Ipv6Addr; 3] = [
    Ipv6Addr::new(0xfd00, 0x244, 0, 0, 0, 0, 0, 0x10),
    Ipv6Addr::new(0xfd00, 0x244, 0, 0, 0, 0, 0, 0x11),
    Ipv6Addr::new(0xfd00, 0x244, 1, 0, 0, 0, 0, 0x10),
];
/// MAC of the client.
pub const CLIENT_MAC: [u8; 6] = [2, 0, 0, 0, 0, 100];
/// MAC of this node.
pub const NODE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 11];
/// The client's port.
pub const CLIENT_PORT: u16 = 40_000;
/// MAC of this node on the other uplink.
pub const OTHER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 21];
/// Slot of the other uplink.
pub const OTHER_SLOT: u32 = 1;
/// The way from there to clients elsewhere, over IPv4.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(172, 22, 0, 1);
/// MAC of the peer.
pub const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 12];
/// Number of the peer.
pub const PEER: u32 = 3;
/// VIP port with both pods of this node.
pub const API: u16 = 6385;
/// Likewise, where an instance port leads, too.
pub const IMAGES: u16 = 6180;
/// VIP port of the second pod's images.
pub const INSTANCE: u16 = 6200;
/// VIP port of the peer's pod.
pub const REMOTE: u16 = 6201;
/// VIP port without a backend.
pub const EMPTY: u16 = 6209;
/// VIP port for clients of the upper half of the subnet alone.
pub const RESTRICTED: u16 = 6210;
/// UDP port that the VIP leaves to the host.
pub const PASSED_UDP: u16 = 69;
/// UDP port of heartbeats and probes.
pub const HEARTBEAT_PORT: u16 = 9470;

/// All rows of the scene.
#[derive(Clone)]
pub struct Scene {
    /// What is served.
    pub served: Served,
    /// Slot 0: where packets come in.
    pub uplink: Uplink,
    /// [`OTHER_SLOT`]: where packets may have come in.
    pub other: Uplink,
    /// Addresses that are served.
    pub vips: Vec<(Addr, Vip)>,
    /// The other node.
    pub peer: Peer,
    /// A monitor, of everything.
    pub watch: Watch,
    /// Who may use [`RESTRICTED`]: list, addresses and the length of their prefix.
    pub ranges: (u32, Vec<(IpAddr, u8)>),
    /// Flows that the peer has told to be its own.
    pub exceptions: Vec<FlowKey>,
    /// MAC of all neighbours, where the kernel knows any; on the host alone.
    pub neighbor: Option<[u8; 6]>,
}

/// A node with pods, VIPs of all kinds over IPv4 and IPv6, and a peer.
pub fn scene() -> Scene {
    let pod = |at: usize, port| (IpAddr::from(PODS[at]), port);
    let pod6 = |at: usize, port| (IpAddr::from(PODS6[at]), port);
    let (vip, vip6) = (IpAddr::from(VIP), IpAddr::from(VIP6));
    let mut served = serve(&[
        (vip, API, &[pod(0, API), pod(1, API)]),
        (vip, IMAGES, &[pod(0, IMAGES), pod(1, IMAGES)]),
        (vip, INSTANCE, &[pod(1, IMAGES)]),
        (vip, REMOTE, &[pod(2, IMAGES)]),
        (vip, EMPTY, &[]),
        (vip, RESTRICTED, &[pod(0, RESTRICTED)]),
        (vip6, API, &[pod6(0, API), pod6(1, API)]),
        (vip6, IMAGES, &[pod6(0, IMAGES), pod6(1, IMAGES)]),
        (vip6, INSTANCE, &[pod6(1, IMAGES)]),
        (vip6, REMOTE, &[pod6(2, IMAGES)]),
        (vip6, EMPTY, &[]),
        (VIP_OF_OTHERS.into(), API, &[pod(0, 7000)]),
        (VIP_SILENT.into(), API, &[pod(1, 7000)]),
    ]);
    for backend in &mut served.backends {
        if [
            Addr::from(IpAddr::from(PODS[2])),
            Addr::from(IpAddr::from(PODS6[2])),
        ]
        .contains(&backend.addr)
        {
            backend.peer = PEER as u16;
        }
    }
    let list = 1;
    for (key, service) in &mut served.services {
        if key.port == REMOTE {
            service.local = 0;
        }
        if key.port == RESTRICTED {
            service.sources = list;
        }
    }
    served.control.peers = 1;
    served.control.heartbeat_port = HEARTBEAT_PORT;
    // The rate limit is not what is looked at.
    served.control.refusals_per_second = 1_000_000;
    let mut pass = [Pass::default(); MAX_PASS];
    pass[0] = Pass {
        port: PASSED_UDP,
        protocol: 17,
        pad: 0,
    };
    let own = Vip {
        answer_until: u64::MAX,
        flags: 0,
        uplink: 0,
        pass,
    };
    let others = Vip {
        answer_until: 0,
        flags: VIP_EXTERNAL,
        ..own
    };
    let silent = Vip {
        answer_until: 1,
        flags: VIP_REFUSE_DROP,
        ..own
    };
    let vips = vec![
        (Addr::from(vip), own),
        (Addr::from(vip6), own),
        (Addr::from(IpAddr::from(VIP_OF_OTHERS)), others),
        (Addr::from(IpAddr::from(VIP_SILENT)), silent),
    ];
    let mut vip_filter = Filter::default();
    for (addr, _) in &vips {
        vip_filter.insert(addr);
    }
    let mut addrs = [Addr::UNSPECIFIED; MAX_PEER_ADDRS];
    addrs[0] = Addr::from(IpAddr::from(Ipv4Addr::new(172, 22, 0, 12)));
    let uplink = Uplink {
        vip_filter,
        ifindex: 1,
        flags: UPLINK_FORWARD | UPLINK_BYPASS_DROP,
        mac: NODE_MAC,
        vlan: 0,
        mode: MODE_NATIVE,
        prefixes: [96 + 24, 0],
        pad: 0,
        device: 1,
        name: to_name("eth1"),
        bypass_udp: [53, 0, 0, 0, 0, 0, 0, 0],
        gateways: [Addr::UNSPECIFIED; 2],
        networks: [
            Addr::from(IpAddr::from(Ipv4Addr::new(172, 22, 0, 0))),
            Addr::UNSPECIFIED,
        ],
    };
    Scene {
        served,
        uplink,
        other: Uplink {
            mac: OTHER_MAC,
            name: to_name("eth2"),
            gateways: [Addr::from(GATEWAY), Addr::UNSPECIFIED],
            ..uplink
        },
        vips,
        peer: Peer {
            mac: PEER_MAC,
            flags: PEER_REFLECTS,
            addrs,
        },
        watch: Watch {
            until: u64::MAX,
            verdicts: u64::MAX,
            kinds: u32::MAX,
            per_second: 1_000_000,
            sample: 1,
            pid: 1,
            client: Addr::UNSPECIFIED,
        },
        ranges: (list, vec![(Ipv4Addr::new(172, 22, 0, 128).into(), 25)]),
        exceptions: Vec::new(),
        neighbor: None,
    }
}

impl Scene {
    /// An engine with these rows, and room for so many flows.
    pub fn engine(&self, living: usize, young: usize) -> Engine {
        let mut engine = Engine::default();
        self.write(&mut engine);
        engine.limit(map::LIVING, living);
        engine.limit(map::LIVING_REPLY, living);
        engine.limit(map::YOUNG, young);
        engine
    }

    /// Writes these rows, and takes out those that are none of them any more.
    pub fn write(&self, engine: &mut Engine) {
        let served = &self.served;
        for (index, backend) in served.backends.iter().enumerate() {
            engine.set(map::BACKENDS, &(index as u32), backend);
        }
        for (key, service) in &served.services {
            engine.set(map::SERVICES, key, service);
        }
        for (key, pod_port) in &served.pod_ports {
            engine.set(map::POD_PORTS, key, pod_port);
        }
        for (addr, pod) in &served.pods {
            engine.set(map::PODS, addr, pod);
        }
        engine.set(map::CONTROL, &0_u32, &served.control);
        engine.set(map::UPLINKS, &0_u32, &self.uplink);
        engine.set(map::UPLINKS, &OTHER_SLOT, &self.other);
        for (addr, vip) in &self.vips {
            engine.set(map::VIPS, addr, vip);
        }
        engine.set(map::PEERS, &peer_link(PEER, 0), &self.peer);
        engine.clear(map::PEER_MACS);
        if let Some(mac) = self.peer_mac() {
            engine.set(map::PEER_MACS, &mac, &PEER);
        }
        engine.clear(map::EXCEPTIONS);
        for key in &self.exceptions {
            engine.set(map::EXCEPTIONS, key, &Exception { peer: PEER });
        }
        engine.set(map::WATCH, &0_u32, &self.watch);
        let (list, ranges) = &self.ranges;
        for (address, length) in ranges {
            let source = Source::new(*list, Addr::from(*address));
            let prefix = source.fixed_bits() + u32::from(*length);
            let key = aya::maps::lpm_trie::Key::new(prefix, source);
            engine.set(map::SOURCES, &key, &1_u32);
        }
        engine.set_neighbor(self.neighbor);
    }

    /// What frames of the peer are known by, while its MAC is known.
    pub fn peer_mac(&self) -> Option<PeerMac> {
        let mac = self.peer.mac;
        (mac != [0; 6]).then_some(PeerMac { mac, uplink: 0 })
    }
}
