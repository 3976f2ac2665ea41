//! Keys and values of every map, their names and their sizes.
//!
//! All are `#[repr(C)]` with explicit, zeroed padding and no enums or `Option`s, because both sides
//! of the kernel boundary read them as bytes. Changing any of them bumps [`LAYOUT_VERSION`]: the
//! maps are pinned below a directory of that name and outlive the program that made them.
//! Multi-byte integers are in host order, addresses are the octets in network order, so that
//! `bpftool map dump` shows what a person expects.

use core::mem::{offset_of, size_of};

/// Version of everything in this module; part of the pin path (`…/v7/`).
pub const LAYOUT_VERSION: u32 = 7;

/// How many uplinks (attachments) one agent manages at most.
pub const MAX_UPLINKS: u32 = 16;
/// How many VIPs one agent serves at most.
pub const MAX_VIPS: u32 = 64;
/// How many VIP ports (shared and instance ports together) one agent serves at most.
pub const MAX_PORTS: u32 = 1024;
/// How many backends of all VIP ports together one agent serves at most; a backend's index fits 16 bits.
pub const MAX_BACKENDS: u32 = 16_384;
/// How many backends one VIP port chooses among at most; the rest is reported as unused.
pub const MAX_BACKENDS_PER_PORT: usize = 64;
/// How many VIP ports may lead to one pod port: the reply path tries them one by one.
pub const MAX_VIP_PORTS_PER_POD_PORT: usize = 8;
/// How many protocols or ports of one VIP may be passed to the host.
pub const MAX_PASS: usize = 8;
/// How many UDP source ports an uplink lets through to pods (`bypass_udp`).
pub const MAX_BYPASS_UDP: usize = 8;
/// Living flows by default. Preallocated: 128 k take 40 MiB for both directions.
pub const DEFAULT_LIVING_FLOWS: u32 = 131_072;
/// Young and closing flows by default (LRU).
pub const DEFAULT_YOUNG_FLOWS: u32 = 65_536;
/// How many nodes share a VIP at most, this one (number 0) included.
pub const MAX_PEERS: u32 = 32;
/// How many flows of peers sit elsewhere than the hash places them, at most.
pub const MAX_EXCEPTIONS: u32 = 65_536;
/// How many source ranges all services together have at most, equal lists counted once.
pub const MAX_SOURCE_RANGES: u32 = 2048;
/// Addresses that a peer has on an uplink, at most.
pub const MAX_PEER_ADDRS: usize = 4;
/// Directly connected clients remembered with `bypass: allow` (LRU).
pub const DIRECT_FLOWS: u32 = 16_384;

/// Names of the maps, in the object as well as below the pin directory. The kernel cuts names to 15 bytes.
pub mod map {
    /// [`Uplink`](super::Uplink) by attachment slot.
    pub const UPLINKS: &str = "uplinks";
    /// [`Vip`](super::Vip) by [`Addr`](super::Addr).
    pub const VIPS: &str = "vips";
    /// [`Service`](super::Service) by [`ServiceKey`](super::ServiceKey).
    pub const SERVICES: &str = "services";
    /// [`Backend`](super::Backend) by index.
    pub const BACKENDS: &str = "backends";
    /// [`PodPort`](super::PodPort) by [`ServiceKey`](super::ServiceKey) (a pod's address and port).
    pub const POD_PORTS: &str = "pod_ports";
    /// [`Pod`](super::Pod) by [`Addr`](super::Addr).
    pub const PODS: &str = "pods";
    /// Living flows, client to VIP: [`Flow`](super::Flow) by [`FlowKey`](super::FlowKey).
    pub const LIVING: &str = "living";
    /// Living flows, pod to client: [`Flow`](super::Flow) by [`FlowKey`](super::FlowKey).
    pub const LIVING_REPLY: &str = "living_reply";
    /// Young and closing flows (LRU): [`Flow`](super::Flow) by [`FlowKey`](super::FlowKey).
    pub const YOUNG: &str = "young";
    /// Direct connections to pods that `bypass: allow` has seen (LRU): jiffies by [`FlowKey`](super::FlowKey).
    pub const DIRECT: &str = "direct";
    /// Packets by [`Verdict`](crate::Verdict), per CPU.
    pub const VERDICTS: &str = "verdicts";
    /// [`Traffic`](super::Traffic) by VIP port id, per CPU.
    pub const PORT_STATS: &str = "port_stats";
    /// [`Traffic`](super::Traffic) by backend index, per CPU.
    pub const BACKEND_STATS: &str = "backend_stats";
    /// [`PortInfo`](super::PortInfo) by VIP port id; for people, no program reads it.
    pub const PORT_INFO: &str = "port_info";
    /// [`BackendInfo`](super::BackendInfo) by backend index; for people, no program reads it.
    pub const BACKEND_INFO: &str = "backend_info";
    /// [`Control`](super::Control) at 0, written by the agent alone.
    pub const CONTROL: &str = "control";
    /// [`Pressure`](super::Pressure) at 0, written by the programs alone.
    pub const PRESSURE: &str = "pressure";
    /// [`Bucket`](super::Bucket) at 0, per CPU: the rate limit of refusals.
    pub const BUCKET: &str = "bucket";
    /// [`Peer`](super::Peer) by [`peer_link`](super::peer_link).
    pub const PEERS: &str = "peers";
    /// Number of the peer by [`PeerMac`](super::PeerMac).
    pub const PEER_MACS: &str = "peer_macs";
    /// [`PeerInfo`](super::PeerInfo) by number of the peer; no program reads it.
    pub const PEER_INFO: &str = "peer_info";
    /// [`Traffic`](super::Traffic) handed on, by number of the peer, per CPU.
    pub const PEER_STATS: &str = "peer_stats";
    /// [`Reflection`](super::Reflection) by [`peer_link`](super::peer_link), written by the programs alone.
    pub const REFLECTIONS: &str = "reflections";
    /// Living flows of peers that the hash would place elsewhere: [`Exception`](super::Exception) by
    /// [`FlowKey`](super::FlowKey), written by the agent alone.
    pub const EXCEPTIONS: &str = "exceptions";
    /// [`Announcer`](super::Announcer) by [`Addr`](super::Addr) of a VIP whose announcer is elected.
    pub const ANNOUNCERS: &str = "announcers";
    /// 1 by [`Source`](super::Source), a trie of prefixes: who may open connections to services with source ranges.
    pub const SOURCES: &str = "sources";
    /// When a backend's RST to a SYN was last kept from a client, in `jiffies_64`, by index; written by the programs alone.
    pub const SHUNNED: &str = "shunned";
    /// Flows that have ended, a ring for the agent: [`Ending`](crate::events::Ending).
    pub const ENDINGS: &str = "endings";
    /// What a monitor is told, a ring: [`Event`](crate::events::Event).
    pub const EVENTS: &str = "events";
    /// [`Watch`](crate::events::Watch) at 0, written by the monitor.
    pub const WATCH: &str = "watch";
    /// [`Telling`](crate::events::Telling) at 0, per CPU, written by the programs alone.
    pub const TELLING: &str = "telling";
    /// All of them.
    pub const ALL: [&str; 31] = [
        UPLINKS,
        VIPS,
        SERVICES,
        BACKENDS,
        POD_PORTS,
        PODS,
        LIVING,
        LIVING_REPLY,
        YOUNG,
        DIRECT,
        VERDICTS,
        PORT_STATS,
        BACKEND_STATS,
        PORT_INFO,
        BACKEND_INFO,
        CONTROL,
        PRESSURE,
        BUCKET,
        PEERS,
        PEER_MACS,
        PEER_INFO,
        PEER_STATS,
        REFLECTIONS,
        EXCEPTIONS,
        ANNOUNCERS,
        SOURCES,
        SHUNNED,
        ENDINGS,
        EVENTS,
        WATCH,
        TELLING,
    ];
}

/// Names of the programs in the object.
pub mod program {
    /// XDP on an uplink: the forward path.
    pub const XDP: &str = "ironlb_xdp";
    /// TC ingress of an uplink: the same forward path where XDP cannot serve.
    pub const INGRESS: &str = "ironlb_ingress";
    /// TC egress of an uplink and of NICs that carry a default route: the reply path.
    pub const EGRESS: &str = "ironlb_egress";
    /// XDP twin of [`XDP`] without multi-buffer support, for kernels below 5.18.
    pub const XDP_PLAIN: &str = "ironlb_xdp_sb";
    /// All of them.
    pub const ALL: [&str; 4] = [XDP, XDP_PLAIN, INGRESS, EGRESS];
}

/// Names of the constants that the loader sets per attachment (`.rodata`, frozen at load).
pub mod global {
    /// `u32`: slot of the attachment in the `uplinks` map.
    pub const UPLINK: &str = "UPLINK";
    /// `u32`: kernel ticks a second (`CONFIG_HZ`), the unit of [`Flow::last_seen`](super::Flow).
    pub const TICKS_PER_SECOND: &str = "TICKS_PER_SECOND";
}

/// An IPv6 address, or an IPv4 address mapped into IPv6 (RFC 4291 section 2.5.5.2), in network order.
#[repr(C, align(4))]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Addr {
    /// The sixteen octets.
    pub octets: [u8; 16],
}

impl Addr {
    /// The unspecified address `::`.
    pub const UNSPECIFIED: Self = Self { octets: [0; 16] };

    /// The mapped form of an IPv4 address whose four octets, as they lie in a packet, are the memory of `raw`.
    #[inline(always)]
    pub fn from_v4_raw(raw: u32) -> Self {
        Self::from_words([0, 0, 0xffff_u32.to_be(), raw])
    }

    /// An address from four words whose memory is the sixteen octets.
    #[inline(always)]
    pub fn from_words(words: [u32; 4]) -> Self {
        // SAFETY: both are sixteen plain bytes, and Addr is aligned as a word.
        unsafe { core::mem::transmute(words) }
    }

    /// Four words whose memory is the sixteen octets.
    #[inline(always)]
    pub fn words(&self) -> [u32; 4] {
        // SAFETY: both are sixteen plain bytes, and Addr is aligned as a word.
        unsafe { core::mem::transmute(*self) }
    }

    /// The word that holds an IPv4 address, as it lies in a packet. Meaningless for IPv6.
    #[inline(always)]
    pub fn v4_raw(&self) -> u32 {
        self.words()[3]
    }

    /// Whether this is a mapped IPv4 address.
    #[inline(always)]
    pub fn is_v4(&self) -> bool {
        let [a, b, c, _] = self.words();
        a == 0 && b == 0 && c == 0xffff_u32.to_be()
    }
}

/// A small set of addresses that errs on the side of containing: one load decides that a packet is
/// not ours, before any map is asked.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Filter {
    /// Bit `n` is set when an address whose octets XOR to `n` is in the set.
    pub bits: [u64; 4],
}

impl Filter {
    /// The bit of an address, by the word of its last four octets (the whole of an IPv4 address).
    #[inline(always)]
    pub fn slot(last_word: u32) -> u32 {
        let folded = last_word ^ (last_word >> 16);
        (folded ^ (folded >> 8)) & 0xff
    }

    /// Whether an address whose last word is `last_word` may be in the set.
    #[inline(always)]
    pub fn may_contain(&self, last_word: u32) -> bool {
        let slot = Self::slot(last_word);
        // Four words and a two-bit index: written so that the verifier sees the bound.
        (self.bits[((slot >> 6) & 3) as usize] >> (slot & 63)) & 1 == 1
    }

    /// Adds an address.
    pub fn insert(&mut self, addr: &Addr) {
        let slot = Self::slot(addr.v4_raw());
        self.bits[(slot >> 6) as usize] |= 1 << (slot & 63);
    }
}

/// What an attachment is: identity, first checks and policy of one managed interface.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Uplink {
    /// VIPs of this uplink.
    pub vip_filter: Filter,
    /// Interface index; 0 marks a free slot.
    pub ifindex: u32,
    /// `UPLINK_*` bits.
    pub flags: u32,
    /// Destination MAC of unicast frames meant for this uplink (the bridge's own for a bridge port).
    pub mac: [u8; 6],
    /// The one VLAN whose frames are meant; 0 means untagged ones.
    pub vlan: u16,
    /// `MODE_*`: how the forward path is attached.
    pub mode: u8,
    /// Lengths of the `networks`' prefixes in bits of the mapped form (an IPv4 /24 is 120); 0 where one is not known.
    pub prefixes: [u8; 2],
    /// Zero.
    pub pad: u8,
    /// Index of the interface that has addresses and neighbours: the bridge of a port, else `ifindex`.
    pub device: u32,
    /// Interface name, zero-terminated, for people.
    pub name: [u8; 16],
    /// UDP source ports whose packets reach pods directly in spite of [`UPLINK_BYPASS_DROP`]; 0 is unused.
    pub bypass_udp: [u16; MAX_BYPASS_UDP],
    /// Next hops for clients outside the uplink's subnets, IPv4 and IPv6; unspecified where there is none.
    pub gateways: [Addr; 2],
    /// The uplink's subnets, IPv4 and IPv6.
    pub networks: [Addr; 2],
}

impl Uplink {
    /// Next hop to an address outside of the uplink's subnets, where there is one.
    #[inline(always)]
    pub fn next_hop(&self, addr: &Addr) -> Option<Addr> {
        if self.is_on_link(addr) {
            return None;
        }
        let gateway = self.gateways[version(addr)];
        (gateway != Addr::UNSPECIFIED).then_some(gateway)
    }

    /// Whether an address is in the uplink's subnet of its version. So is every one where that is not known.
    #[inline(always)]
    pub fn is_on_link(&self, addr: &Addr) -> bool {
        let bits = u32::from(self.prefixes[version(addr)]);
        if bits == 0 {
            return true;
        }
        let (network, addr) = (self.networks[version(addr)].words(), addr.words());
        let mut at = 0;
        while at < 4 {
            let differing = u32::from_be(network[at] ^ addr[at]);
            let before = 32 * at as u32;
            // Bits of this word that are the network's.
            let own = bits.saturating_sub(before);
            let others = 32_u32.saturating_sub(own);
            // All 32 of them leave nothing to compare.
            if differing.checked_shr(others).unwrap_or(0) != 0 {
                return false;
            }
            at += 1;
        }
        true
    }
}

/// Place of an address in what is kept for IPv4 and IPv6.
#[inline(always)]
pub fn version(addr: &Addr) -> usize {
    if addr.is_v4() { 0 } else { 1 }
}

/// The forward path serves this uplink's VIPs. Clear on a NIC that only carries a default route.
pub const UPLINK_FORWARD: u32 = 1;
/// Direct connection attempts to pods are dropped (`bypass: drop`).
pub const UPLINK_BYPASS_DROP: u32 = 2;

/// Answers leave by XDP_REDIRECT to the interface itself, not by XDP_TX: veth schedules its peer's NAPI after XDP_TX
/// only if the peer has an XDP program, else the frame waits in the ring for other traffic
/// (`veth_xdp_flush`, Linux 6.18).
pub const UPLINK_TRANSMIT_BY_REDIRECT: u32 = 4;

/// Nothing is attached on the forward path.
pub const MODE_NONE: u8 = 0;
/// XDP in the driver.
pub const MODE_NATIVE: u8 = 1;
/// TC ingress (TCX, or clsact below Linux 6.6).
pub const MODE_TC: u8 = 2;

/// One protocol or port of a VIP that goes to the host.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Pass {
    /// Destination port, 0 for every one (and for protocols without ports).
    pub port: u16,
    /// IP protocol number; 0 marks an unused place.
    pub protocol: u8,
    /// Zero.
    pub pad: u8,
}

/// A virtual address.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Vip {
    /// ARP and ND questions are answered before this time: `CLOCK_BOOTTIME` nanoseconds,
    /// `u64::MAX` for ever, 0 never. Where the announcer is elected, [`Announcer`] has the time.
    pub answer_until: u64,
    /// `VIP_*` bits.
    pub flags: u32,
    /// Slot of the uplink that the VIP belongs to.
    pub uplink: u32,
    /// What goes to the host.
    pub pass: [Pass; MAX_PASS],
}

/// Somebody else (keepalived, MetalLB) owns the address: ARP, ND and what is not balanced pass untouched.
pub const VIP_EXTERNAL: u32 = 1;
/// Refusals are silent drops, not RSTs (`refuse: drop`).
pub const VIP_REFUSE_DROP: u32 = 2;

/// An address and a TCP port: a VIP port, or a pod port.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceKey {
    /// The address.
    pub addr: Addr,
    /// TCP port.
    pub port: u16,
    /// Zero.
    pub pad: u16,
}

impl ServiceKey {
    /// The key of a VIP port or pod port.
    #[inline(always)]
    pub const fn new(addr: Addr, port: u16) -> Self {
        Self { addr, port, pad: 0 }
    }
}

/// A backend as a VIP port lists it: where it is, and who it is for the choice.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Candidate {
    /// Backend id: generation in the high half, index in the low half. See [`backend_id`].
    pub backend: u32,
    /// Hash of the backend's stable identity (instance or pod name, not its address).
    pub identity: u32,
}

/// A VIP port and the backends eligible for its new flows.
///
/// Readers may see a value that a concurrent update is overwriting (a preallocated hash reuses
/// elements at once: 19 of 85 million reads saw another service's words), so the value carries its
/// version at both ends and is used only when they agree.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Service {
    /// Version; equal to [`Service::version_tail`] in a whole value.
    pub version: u32,
    /// Id of this VIP port: its slot in `port_stats` and `port_info`.
    pub id: u16,
    /// `SERVICE_*` bits.
    pub flags: u16,
    /// Seed of the choice, from namespace and name of the service.
    pub seed: u64,
    /// How many of `candidates` are in use.
    pub count: u32,
    /// Number of the list of source ranges that new flows must come from, 0 for anywhere. See [`Source`].
    pub sources: u32,
    /// Bit `n` is set where `candidates[n]` is on this node: what a peer hands on is for one of them.
    pub local: u64,
    /// Backends that take new flows, sorted by stable identity.
    pub candidates: [Candidate; MAX_BACKENDS_PER_PORT],
    /// Zero.
    pub pad_tail: u32,
    /// Version once more.
    pub version_tail: u32,
}

/// An instance port: one backend or none, never another.
pub const SERVICE_INSTANCE: u16 = 1;
/// The choice hashes the client's address only (`sessionAffinity: ClientIP`).
pub const SERVICE_CLIENT_IP: u16 = 2;
/// Some backend is on a node whose program does not reflect probes: flows that find no entry may be its own.
pub const SERVICE_SILENT: u16 = 4;

/// What follows the length of the prefix in a key of the `sources` trie. The first word, always part of the prefix,
/// tells list and version of IP apart: else `::/0` would contain every IPv4 address.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Source {
    /// Number of the list, as in [`Service::sources`].
    pub list: u16,
    /// Place of the version of IP, as [`version`] says.
    pub version: u16,
    /// The client, or the range's address.
    pub addr: Addr,
}

impl Source {
    /// Length of a key's prefix up to the end of the address, in bits.
    pub const BITS: u32 = 8 * size_of::<Self>() as u32;

    /// What an address is looked up by in a list.
    #[inline(always)]
    pub fn new(list: u32, addr: Addr) -> Self {
        Self {
            list: list as u16,
            version: version(&addr) as u16,
            addr,
        }
    }

    /// Length of a key's prefix up to the beginning of what the version of IP calls the address.
    #[inline(always)]
    pub fn fixed_bits(&self) -> u32 {
        Self::BITS - if self.version == 0 { 32 } else { 128 }
    }
}

/// One pod port behind one VIP port.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Backend {
    /// Address of the pod, or of the node for a pod on the host network.
    pub addr: Addr,
    /// TCP port of the pod.
    pub port: u16,
    /// Id of the VIP port.
    pub service: u16,
    /// Raised whenever the index gets another backend: flows of the former one are recognised as gone.
    pub generation: u16,
    /// `BACKEND_*` bits.
    pub flags: u16,
    /// Number of the node that it is on, 0 for this one.
    pub peer: u16,
    /// Zero.
    pub pad: u16,
}

/// The backend exists: its flows go on. Clear once it is gone.
pub const BACKEND_ALIVE: u16 = 1;
/// The backend takes new flows.
pub const BACKEND_ELIGIBLE: u16 = 2;

/// Composes a backend id.
#[inline(always)]
pub const fn backend_id(index: u16, generation: u16) -> u32 {
    (generation as u32) << 16 | index as u32
}

/// The index in a backend id.
#[inline(always)]
pub const fn backend_index(id: u32) -> u32 {
    id & 0xffff
}

/// The generation in a backend id.
#[inline(always)]
pub const fn backend_generation(id: u32) -> u16 {
    (id >> 16) as u16
}

/// The VIP ports that lead to a pod port.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PodPort {
    /// How many of `vip_ports` are in use.
    pub count: u32,
    /// `POD_*` bits, as in [`Pod`].
    pub flags: u32,
    /// The VIP ports.
    pub vip_ports: [ServiceKey; MAX_VIP_PORTS_PER_POD_PORT],
}

/// An address that backends have.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Pod {
    /// `POD_*` bits.
    pub flags: u32,
}

/// The address is the node's own (host network): it is not guarded against direct connections.
pub const POD_HOST: u32 = 1;

/// Identifies a flow in one direction.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowKey {
    /// The client.
    pub client: Addr,
    /// The VIP ([`FORWARD`]) or the pod ([`REPLY`]).
    pub addr: Addr,
    /// The client's TCP port, as the sender of this direction's packets writes it.
    pub client_port: u16,
    /// TCP port of the VIP or of the pod.
    pub port: u16,
    /// [`FORWARD`] or [`REPLY`].
    pub direction: u8,
    /// Zero.
    pub pad: [u8; 3],
}

/// Client to VIP.
pub const FORWARD: u8 = 0;
/// Pod to client.
pub const REPLY: u8 = 1;

impl FlowKey {
    /// The key of packets from a client to a VIP port.
    #[inline(always)]
    pub const fn forward(client: Addr, client_port: u16, vip: Addr, vip_port: u16) -> Self {
        Self {
            client,
            addr: vip,
            client_port,
            port: vip_port,
            direction: FORWARD,
            pad: [0; 3],
        }
    }

    /// The key of packets from a pod port to a client.
    #[inline(always)]
    pub const fn reply(client: Addr, client_port: u16, pod: Addr, pod_port: u16) -> Self {
        Self {
            client,
            addr: pod,
            client_port,
            port: pod_port,
            direction: REPLY,
            pad: [0; 3],
        }
    }
}

/// All that the rewrite of a flow's packets in one direction needs.
///
/// In a forward entry `addr:port` is the pod, in a reply entry it is the VIP.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Flow {
    /// Address that replaces the packet's: the pod as destination (forward), the VIP as source (reply).
    pub addr: Addr,
    /// Port that replaces the packet's.
    pub port: u16,
    /// The client's port in the other direction's packets; differs from the key's only when translated.
    pub client_port: u16,
    /// Backend id.
    pub backend: u32,
    /// The last acknowledgment number of this direction (host order), to build a RST that its sender accepts; 0 while it
    /// is not known.
    pub last_ack: u32,
    /// Id of the VIP port.
    pub service: u16,
    /// Forward: 1 once the client's FIN was seen. Written by the forward path alone.
    pub client_fin: u8,
    /// Forward: 1 once the pod's FIN was seen. Written by the reply path alone.
    pub pod_fin: u8,
    /// When the flow began: the lower half of `jiffies_64`. It is looked at as a difference from now, so that it may wrap; what is
    /// older than 49 days (with 1,000 ticks a second) looks younger.
    pub started: u32,
    /// Last packet of this direction (while a closing entry: when it closed), likewise.
    pub last_seen: u32,
    /// Bytes of this direction, frames with their link-layer header.
    pub bytes: u64,
    /// MAC that the client's packets come from.
    pub last_hop: [u8; 6],
    /// Slot of the uplink on which the client's packets arrive, and [`FLOW_HANDED_ON`].
    pub uplink: u8,
    /// `FLOW_*` bits.
    pub state: u8,
}

/// The flow has ended (FIN both ways, or RST); the entry guards against port collisions.
pub const FLOW_CLOSING: u8 = 1;
/// Seconds that a closing entry guards its client port: as long as the pod may hold TIME_WAIT.
pub const CLOSING_GUARD: u64 = 60;
/// Closing only by a RST of the client, which the pod may have rejected.
pub const FLOW_CLAIMED: u8 = 2;
/// The living table had no room: the client's next packet is refused.
pub const FLOW_REFUSED: u8 = 4;

/// Begun by a packet in mid-flow: the pod's RST would say that the flow is elsewhere, not that it has ended.
pub const FLOW_MISS: u8 = 8;
/// On its way to the pod of a peer, which alone tells the client when that pod is gone.
pub const FLOW_ELSEWHERE: u8 = 16;
/// The pod has answered the SYN: a RST of it is the connection's end, not its refusal.
pub const FLOW_ANSWERED: u8 = 32;
/// The pod's RST to the SYN was kept from the client, whose next SYN goes to another backend.
pub const FLOW_SPARED: u8 = 64;
/// Begun by such a next SYN: another RST is not kept from the client.
pub const FLOW_SECOND: u8 = 128;
/// Seconds for which a backend whose RST was kept from a client gets no new flows of shared ports.
pub const SHUN: u64 = 1;
/// In [`Flow::uplink`]: the client's packets come by way of a peer, so `last_hop` does not lead to the client.
pub const FLOW_HANDED_ON: u8 = 0x80;

/// The node of a peer as seen on one uplink.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Peer {
    /// Its MAC there; zero while it is not known.
    pub mac: [u8; 6],
    /// `PEER_*` bits.
    pub flags: u16,
    /// Its own addresses there: what comes from them is its own traffic, not handed on.
    pub addrs: [Addr; MAX_PEER_ADDRS],
}

/// Probes come back from its program: it takes new flows.
pub const PEER_REFLECTS: u16 = 1;

/// Index of a peer on an uplink, in `peers` and `reflections`.
#[inline(always)]
pub const fn peer_link(peer: u32, uplink: u32) -> u32 {
    peer * MAX_UPLINKS + uplink
}

/// The MAC of a peer on an uplink.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct PeerMac {
    /// The MAC.
    pub mac: [u8; 6],
    /// Slot of the uplink.
    pub uplink: u16,
}

/// A peer for people and for the next agent.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerInfo {
    /// Its node's name; empty for a free number.
    pub name: [u8; NAME_LEN],
    /// Version of its agent, zero-padded.
    pub version: [u8; 32],
    /// `PEER_IS_*` bits.
    pub flags: u32,
    /// Zero.
    pub pad: u32,
    /// When `flags` last changed: `CLOCK_BOOTTIME` nanoseconds.
    pub since: u64,
}

/// Its agent's heartbeats are heard.
pub const PEER_IS_LIVE: u32 = 1;
/// Its program reflects probes.
pub const PEER_IS_REFLECTING: u32 = 2;
/// Its exceptions are known here.
pub const PEER_IS_SYNCED: u32 = 4;

/// The last probe that a peer's program sent back.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Reflection {
    /// Nonce of the probe.
    pub nonce: u64,
    /// When it came back: `CLOCK_BOOTTIME` nanoseconds.
    pub at: u64,
}

/// Where a flow sits that the hash would place elsewhere.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Exception {
    /// Number of the peer.
    pub peer: u32,
}

/// Who announces a VIP by election, as this node sees it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Announcer {
    /// This node answers before this time: `CLOCK_BOOTTIME` nanoseconds.
    pub answer_until: u64,
    /// Epoch of the highest claim heard or made.
    pub epoch: u64,
    /// When the present announcer was first seen: `CLOCK_BOOTTIME` nanoseconds.
    pub since: u64,
    /// Node that announces it; empty for none.
    pub holder: [u8; NAME_LEN],
    /// What nodes disagree on, for people; empty where they do not.
    pub conflict: [u8; NAME_LEN],
}

/// Packets and bytes of a VIP port or a backend, per CPU.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Traffic {
    /// Packets from clients.
    pub packets_in: u64,
    /// Bytes from clients (frames).
    pub bytes_in: u64,
    /// Packets to clients; a GSO packet counts once.
    pub packets_out: u64,
    /// Bytes to clients (frames).
    pub bytes_out: u64,
    /// New flows: SYNs that made an entry.
    pub flows: u64,
}

/// Bytes that a name in [`PortInfo`] and [`BackendInfo`] holds, zero-padded; longer ones are cut.
pub const NAME_LEN: usize = 96;

/// A VIP port for people.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PortInfo {
    /// The VIP port; port 0 marks a free id.
    pub vip_port: ServiceKey,
    /// Instance slot + 1 for an instance port, else 0.
    pub slot: u32,
    /// Service, e.g. `metal3/ironic`.
    pub service: [u8; NAME_LEN],
    /// Port name, e.g. `images`.
    pub port: [u8; NAME_LEN],
}

/// A backend for people.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BackendInfo {
    /// Stable identity, e.g. `ironic-0`.
    pub instance: [u8; NAME_LEN],
    /// Which incarnation has the address (the pod's UID); empty for files.
    pub uid: [u8; NAME_LEN],
}

/// What the agent tells the programs and whoever looks at the maps.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Control {
    /// Addresses that backends have.
    pub pod_filter: Filter,
    /// RSTs a second and CPU at most; more refusals are dropped.
    pub refusals_per_second: u32,
    /// Process id of the agent that wrote last.
    pub agent_pid: u32,
    /// When that agent started: `CLOCK_BOOTTIME` nanoseconds.
    pub agent_started: u64,
    /// When the maps last came in step with the source: `CLOCK_BOOTTIME` nanoseconds.
    pub synced_at: u64,
    /// Version of that agent, zero-padded.
    pub agent_version: [u8; 32],
    /// Before this time peers may not yet have told where their flows are: what finds no entry in mid-flow
    /// is not reset. `CLOCK_BOOTTIME` nanoseconds.
    pub settle_until: u64,
    /// UDP port of heartbeats and probes, host order.
    pub heartbeat_port: u16,
    /// How many peers are known; without any, nobody's MAC is looked up.
    pub peers: u16,
    /// Zero.
    pub pad: u32,
}

/// What the programs tell about their tables.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Pressure {
    /// 1 when the living table had no room: SYNs without an entry are refused for a second.
    pub living_full: u32,
    /// When that was, the lower half of `jiffies_64`.
    pub full_at: u32,
}

/// Token bucket.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Bucket {
    /// `jiffies_64` of the last refill.
    pub refilled: u64,
    /// Tokens left, scaled by ticks a second.
    pub tokens: u64,
}

macro_rules! sizes {
    ($($ty:ty = $size:literal),+ $(,)?) => {
        $(const _: () = assert!(size_of::<$ty>() == $size, concat!("size of ", stringify!($ty)));)+

        #[cfg(feature = "user")]
        mod pod {
            use super::*;
            // SAFETY: each is repr(C), made of integers and byte arrays only, without implicit padding.
            $(unsafe impl aya::Pod for $ty {})+
        }

        /// Size in bytes of every type of the contract, by name.
        pub const SIZES: &[(&str, usize)] = &[$((stringify!($ty), $size)),+];
    };
}

sizes! {
    Addr = 16,
    Filter = 32,
    Uplink = 152,
    Pass = 4,
    Vip = 48,
    ServiceKey = 20,
    Candidate = 8,
    Service = 552,
    Backend = 28,
    PodPort = 168,
    Pod = 4,
    FlowKey = 40,
    Flow = 56,
    Traffic = 40,
    PortInfo = 216,
    BackendInfo = 192,
    Control = 104,
    Pressure = 8,
    Bucket = 16,
    Peer = 72,
    PeerMac = 8,
    PeerInfo = 144,
    Source = 20,
    Reflection = 16,
    Exception = 4,
    Announcer = 216,
}

const _: () = {
    assert!(offset_of!(Uplink, mac) == 40);
    assert!(offset_of!(Uplink, name) == 56);
    assert!(offset_of!(Vip, pass) == 16);
    assert!(offset_of!(Service, seed) == 8);
    assert!(offset_of!(Service, candidates) == 32);
    assert!(offset_of!(Service, version_tail) == 548);
    assert!(offset_of!(Backend, service) == 18);
    assert!(offset_of!(FlowKey, client_port) == 32);
    assert!(offset_of!(Flow, backend) == 20);
    assert!(offset_of!(Flow, started) == 32);
    assert!(offset_of!(Flow, last_hop) == 48);
    assert!(offset_of!(Control, agent_pid) == 36);
    assert!(offset_of!(Control, settle_until) == 88);
    assert!(offset_of!(Peer, addrs) == 8);
    assert!(offset_of!(Announcer, holder) == 24);
};

#[cfg(feature = "user")]
mod text {
    use super::*;
    use std::{
        fmt,
        net::{IpAddr, Ipv4Addr, Ipv6Addr},
    };

    impl From<IpAddr> for Addr {
        fn from(ip: IpAddr) -> Self {
            let octets = match ip {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                IpAddr::V6(v6) => v6.octets(),
            };
            Self { octets }
        }
    }

    impl From<Ipv6Addr> for Addr {
        fn from(ip: Ipv6Addr) -> Self {
            IpAddr::V6(ip).into()
        }
    }

    impl From<Ipv4Addr> for Addr {
        fn from(ip: Ipv4Addr) -> Self {
            IpAddr::V4(ip).into()
        }
    }

    impl From<Addr> for IpAddr {
        fn from(addr: Addr) -> Self {
            let v6 = Ipv6Addr::from(addr.octets);
            v6.to_ipv4_mapped().map_or(Self::V6(v6), Self::V4)
        }
    }

    impl fmt::Display for Addr {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            IpAddr::from(*self).fmt(f)
        }
    }

    impl fmt::Debug for Addr {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            IpAddr::from(*self).fmt(f)
        }
    }

    /// `text` as a zero-padded name, cut at a character boundary so that the last byte stays zero.
    pub fn to_name<const N: usize>(text: &str) -> [u8; N] {
        let mut end = text.len().min(N - 1);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let mut name = [0; N];
        name[..end].copy_from_slice(&text.as_bytes()[..end]);
        name
    }

    /// The text of a zero-padded name.
    pub fn from_name(name: &[u8]) -> String {
        let end = name
            .iter()
            .position(|byte| *byte == 0)
            .unwrap_or(name.len());
        String::from_utf8_lossy(&name[..end]).into_owned()
    }
}
#[cfg(feature = "user")]
pub use text::{from_name, to_name};

#[cfg(all(test, feature = "user"))]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    #[test]
    fn an_ipv4_address_is_recognisable_in_a_dump() {
        let addr = Addr::from(Ipv4Addr::new(172, 22, 0, 2));
        assert_eq!(addr.octets[10..], [0xff, 0xff, 172, 22, 0, 2]);
        assert!(addr.is_v4());
        assert_eq!(addr, Addr::from_v4_raw(u32::from_ne_bytes([172, 22, 0, 2])));
        assert_eq!(IpAddr::from(addr).to_string(), "172.22.0.2");
        assert_eq!(addr.to_string(), "172.22.0.2");
    }

    #[test]
    fn an_ipv6_address_is_not_taken_for_ipv4() {
        let addr = Addr::from("fd2e:6f44:5dd8::2".parse::<IpAddr>().expect("valid"));
        assert!(!addr.is_v4());
        assert_eq!(addr.to_string(), "fd2e:6f44:5dd8::2");
    }

    #[test]
    fn an_uplink_knows_its_subnet() {
        let v4 = |octets: [u8; 4]| Addr::from(Ipv4Addr::from(octets));
        let v6 = |text: &str| Addr::from(text.parse::<Ipv6Addr>().expect("address"));
        let mut uplink = Uplink {
            vip_filter: Filter::default(),
            ifindex: 1,
            flags: 0,
            mac: [0; 6],
            vlan: 0,
            mode: 0,
            prefixes: [96 + 24, 0],
            pad: 0,
            device: 1,
            name: [0; 16],
            bypass_udp: [0; MAX_BYPASS_UDP],
            gateways: [Addr::UNSPECIFIED; 2],
            networks: [Addr::from(Ipv4Addr::new(172, 22, 0, 0)), Addr::UNSPECIFIED],
        };
        assert!(uplink.is_on_link(&v4([172, 22, 0, 100])));
        assert!(!uplink.is_on_link(&v4([172, 22, 1, 100])));
        assert!(uplink.is_on_link(&v6("fd00::1")), "it is not known");
        uplink.prefixes[0] = 128;
        assert!(!uplink.is_on_link(&v4([172, 22, 0, 1])));
        uplink.prefixes = [0, 60];
        assert!(uplink.is_on_link(&v4([10, 0, 0, 1])));
        uplink.networks[1] = v6("fd00:22::");
        assert!(uplink.is_on_link(&v6("fd00:22:0:f::1")));
        assert!(!uplink.is_on_link(&v6("fd00:22:0:10::1")));
        assert!(!uplink.is_on_link(&v6("fd01:22::1")));
        assert_eq!(uplink.next_hop(&v6("fd01::1")), None);
        uplink.gateways[1] = v6("fe80::1");
        assert_eq!(uplink.next_hop(&v6("fd01::1")), Some(v6("fe80::1")));
        uplink.prefixes[1] = 128;
        assert!(!uplink.is_on_link(&v6("fd00:22::1")));
    }

    #[test]
    fn a_filter_never_misses_what_it_holds() {
        let mut filter = Filter::default();
        for last in 0..=255 {
            let addr = Addr::from(Ipv4Addr::new(10, 1, 2, last));
            filter.insert(&addr);
            assert!(filter.may_contain(addr.v4_raw()));
        }
        let mut one = Filter::default();
        one.insert(&Addr::from(Ipv4Addr::new(172, 22, 0, 2)));
        let foreign = Addr::from(Ipv4Addr::new(172, 22, 0, 3));
        assert!(!one.may_contain(foreign.v4_raw()));
    }

    #[test]
    fn a_long_name_is_cut_at_a_character_and_stays_terminated() {
        let name: [u8; 8] = to_name("ironicé-and-more");
        assert_eq!(from_name(&name), "ironic");
        assert_eq!(from_name(&to_name::<8>("iron")), "iron");
    }
}
