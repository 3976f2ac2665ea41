//! What would happen to a packet: the real program's answer, by a [`shadow`](super::shadow) of it, put into words.

use std::collections::HashMap as Index;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::loaded_programs;
use aya::util::KernelVersion;
use lb_common::choice::{self, NOBODY};
use lb_common::frame::Buffer;
use lb_common::packet::{
    self, ArpPacket, EthernetHeader, Ip, Ipv4Header, Ipv6Header, NeighborMessage, Quoted, TCP_ACK,
    TCP_FIN, TCP_RST, TCP_SYN, Tcp, TcpHeader, UdpHeader, ethertype, protocol,
};
use lb_common::{
    Action, Addr, Announcer, BACKEND_ALIVE, BACKEND_ELIGIBLE, Backend, BackendInfo, Control,
    Exception, FLOW_ANSWERED, FLOW_CLAIMED, FLOW_CLOSING, FLOW_ELSEWHERE, FLOW_HANDED_ON,
    FLOW_MISS, FLOW_REFUSED, FLOW_SECOND, FLOW_SPARED, FORWARD, Flow, FlowKey, MODE_NATIVE,
    MODE_NONE, PEER_REFLECTS, POD_HOST, Peer, PeerInfo, PeerMac, Pod, PodPort, PortInfo, REPLY,
    SERVICE_CLIENT_IP, SERVICE_INSTANCE, SHUN, Service, ServiceKey, Source, UPLINK_BYPASS_DROP,
    UPLINK_FORWARD, Uplink, VIP_EXTERNAL, VIP_REFUSE_DROP, Verdict, Vip, backend_generation,
    backend_index, field, from_name, map, peer_link, program,
};
use serde::Serialize;
use serde::ser::Serializer;
use serde_json::{Value, json};

use super::attach::FRAGS_SINCE;
use super::read::{self, Clock, Reader};
use super::shadow::{Difference, LONGEST, Outcome, SHORTEST, Shadow, Tables};
use super::{DataplaneError, Hook, boot_time, maps, nanoseconds, pins};
use crate::interfaces::{self, Host, in_subnet};
use crate::packet::{ethernet, ip_header, transport_checksum};

/// MAC of a client of which nothing is known: a locally administered one.
const SOME_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Which way a packet goes through the node's interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the network: the forward path.
    In,
    /// To the network: the reply path.
    Out,
}

/// Names and values in an order that reads well.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fields(pub Vec<(&'static str, Value)>);

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

/// An entry of a map that decided about the packet.
#[derive(Clone, Debug, Serialize)]
pub struct EntryView {
    /// The map.
    pub map: &'static str,
    /// The key, for people.
    pub key: String,
    /// What it says.
    pub value: Fields,
}

/// What would become of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangeKind {
    /// It is new.
    Inserted,
    /// It is there and gets another value.
    Changed,
    /// It goes.
    Removed,
}

/// An entry that the packet would change.
#[derive(Clone, Debug, Serialize)]
pub struct ChangeView {
    /// The map.
    pub map: &'static str,
    /// What would become of the entry.
    pub change: ChangeKind,
    /// The key, for people.
    pub key: String,
    /// Its value now.
    pub before: Option<Fields>,
    /// Its value then.
    pub after: Option<Fields>,
}

/// What would happen to a packet.
#[derive(Clone, Debug, Serialize)]
pub struct Trace {
    /// Its number in the capture, from 1.
    pub packet: Option<u64>,
    /// The interface.
    pub uplink: String,
    /// Which way it goes through it.
    pub direction: Direction,
    /// The program that was run.
    pub program: &'static str,
    /// Name of the verdict.
    pub verdict: &'static str,
    /// What the verdict means.
    pub explanation: &'static str,
    /// `pass`, `drop`, `transmit` (back out of the uplink) or `redirect` (out of another one).
    pub action: &'static str,
    /// What the program returned, by the kernel's name.
    pub returned: String,
    /// Where it would leave, if the program sends it out.
    pub leaves: Option<String>,
    /// Entries that decided.
    pub entries: Vec<EntryView>,
    /// Entries that would change; counters aside.
    pub changes: Vec<ChangeView>,
    /// The frame as it comes.
    pub before: Fields,
    /// The frame as it goes on; none where it is dropped.
    pub after: Option<Fields>,
    /// What to know about this answer.
    pub notes: Vec<String>,
}

/// A packet that is made of addresses.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// Source.
    pub from: SocketAddr,
    /// Destination.
    pub to: SocketAddr,
    /// `TCP_*` bits.
    pub flags: u8,
    /// Which way it goes.
    pub direction: Direction,
    /// MAC that it comes from (in) or goes to (out); else that of the flow's last packet.
    pub mac: Option<[u8; 6]>,
}

/// Answers what would happen to packets, all by what lay in the maps when it was first asked about an interface and direction.
pub struct Tracer {
    root: PathBuf,
    reader: Reader,
    /// Interfaces that have programs, by slot.
    uplinks: Vec<(u32, Uplink)>,
    rows: Rows,
    shadows: Index<(u32, Direction), Shadow>,
}

/// What is shared with the programs, as it was read.
struct Rows {
    all_uplinks: Vec<Uplink>,
    vips: Index<Addr, Vip>,
    announcers: Index<Addr, Announcer>,
    services: Index<ServiceKey, Service>,
    backends: Vec<Backend>,
    names: Vec<BackendInfo>,
    ports: Vec<PortInfo>,
    pod_ports: Index<ServiceKey, PodPort>,
    pods: Index<Addr, Pod>,
    peers: Vec<Peer>,
    peer_macs: Index<PeerMac, u32>,
    peer_info: Vec<PeerInfo>,
    exceptions: Index<FlowKey, Exception>,
    control: Control,
}

impl Rows {
    fn read(reader: &Reader) -> Result<Self, DataplaneError> {
        Ok(Self {
            all_uplinks: reader.array(map::UPLINKS)?,
            vips: index(reader.hash(map::VIPS)?),
            announcers: index(reader.hash(map::ANNOUNCERS)?),
            services: index(reader.hash(map::SERVICES)?),
            backends: reader.array(map::BACKENDS)?,
            names: reader.array(map::BACKEND_INFO)?,
            ports: reader.array(map::PORT_INFO)?,
            pod_ports: index(reader.hash(map::POD_PORTS)?),
            pods: index(reader.hash(map::PODS)?),
            peers: reader.array(map::PEERS)?,
            peer_macs: index(reader.hash(map::PEER_MACS)?),
            peer_info: reader.array(map::PEER_INFO)?,
            exceptions: index(reader.hash(map::EXCEPTIONS)?),
            control: reader.first(map::CONTROL)?,
        })
    }

    fn peer(&self, number: u32) -> String {
        let info = self.peer_info.get(number as usize);
        info.map_or_else(String::new, |info| from_name(&info.name))
    }

    /// The row of a backend id and the name of its instance, while both are that very backend's.
    fn backend(&self, id: u32) -> Option<(&Backend, String)> {
        let at = backend_index(id) as usize;
        let row = self.backends.get(at)?;
        let name = from_name(&self.names.get(at)?.instance);
        (row.generation == backend_generation(id)).then_some((row, name))
    }

    fn instance(&self, id: u32) -> String {
        self.backend(id)
            .map_or_else(|| "gone".to_owned(), |(_, name)| name)
    }
}

fn index<K: Eq + std::hash::Hash, V>(rows: Vec<(K, V)>) -> Index<K, V> {
    rows.into_iter().collect()
}

impl Tracer {
    /// Reads what is pinned below a root.
    pub fn open(root: &Path) -> Result<Self, DataplaneError> {
        let reader = Reader::open(root).map_err(|error| match pins::layouts(root) {
            Ok(others) if !others.is_empty() && !others.contains(&lb_common::LAYOUT_VERSION) => {
                DataplaneError::OtherLayout {
                    path: root.to_owned(),
                    others,
                }
            }
            _ => error,
        })?;
        let rows = Rows::read(&reader)?;
        let used = (0..).zip(rows.all_uplinks.iter().copied());
        let used = used.filter(|(_, row)| row.ifindex != 0);
        Ok(Self {
            root: root.to_owned(),
            uplinks: used.collect(),
            reader,
            rows,
            shadows: Index::new(),
        })
    }

    /// Names of the interfaces that have programs of a direction.
    pub fn interfaces(&self, direction: Direction) -> Vec<String> {
        let used = self.uplinks_of(direction);
        used.map(|(_, row)| from_name(&row.name)).collect()
    }

    /// The slot of an interface that has a program of a direction.
    pub fn slot(&self, interface: &str, direction: Direction) -> Option<u32> {
        let mut used = self.uplinks_of(direction);
        let found = used.find(|(_, row)| from_name(&row.name) == interface);
        found.map(|(slot, _)| *slot)
    }

    /// The slot of the interface that a packet would come by or leave by, where that can be told: the VIP's, or the one
    /// that the kernel routes to the destination, or the only one.
    pub fn slot_for(&self, to: IpAddr, direction: Direction) -> Option<u32> {
        let found = match direction {
            Direction::In => self.rows.vips.get(&Addr::from(to)).map(|vip| vip.uplink),
            Direction::Out => {
                let device = interfaces::route_to(to).ok().flatten();
                let mut used = self.uplinks_of(direction);
                let found = used.find(|(_, row)| Some(row.device) == device);
                found.map(|(slot, _)| *slot)
            }
        };
        found.or_else(|| self.only(direction))
    }

    /// Slot and direction of a captured frame, where they can be told: by the uplink's MAC in it, else as
    /// [`Self::slot_for`] its destination.
    pub fn place_of(&self, frame: &[u8], direction: Option<Direction>) -> (Direction, Option<u32>) {
        let headers = Headers::parse(frame);
        let own = |mac: [u8; 6]| {
            let found = self.uplinks.iter().filter(|(_, row)| row.mac == mac);
            found.copied().collect::<Vec<_>>()
        };
        let direction = direction.unwrap_or_else(|| {
            let leaves = !own(headers.source).is_empty() && own(headers.destination).is_empty();
            if leaves {
                Direction::Out
            } else {
                Direction::In
            }
        });
        let mac = match direction {
            Direction::In => headers.destination,
            Direction::Out => headers.source,
        };
        let target = headers.target();
        let slot = match own(mac)[..] {
            // The ports of a bridge have one MAC.
            [(slot, row)] if serves(&row, direction) => Some(slot),
            _ => match target {
                Some(to) => self.slot_for(to.into(), direction),
                None => self.only(direction),
            },
        };
        (direction, slot)
    }

    fn only(&self, direction: Direction) -> Option<u32> {
        match self.uplinks_of(direction).collect::<Vec<_>>()[..] {
            [(slot, _)] => Some(*slot),
            _ => None,
        }
    }

    fn uplinks_of(&self, direction: Direction) -> impl Iterator<Item = &(u32, Uplink)> {
        let rows = self.uplinks.iter();
        rows.filter(move |(_, row)| serves(row, direction))
    }

    /// The frame that a question is about: as the flow's next packet would be, where there is a flow. `None` between
    /// versions of IP.
    pub fn frame(
        &mut self,
        slot: u32,
        asked: &Question,
    ) -> Result<Option<Vec<u8>>, DataplaneError> {
        let Question {
            from,
            to,
            flags,
            direction,
            mac,
        } = *asked;
        let uplink = self.rows.all_uplinks[slot as usize];
        let addr = |end: SocketAddr| Addr::from(end.ip());
        let key = match direction {
            Direction::In => FlowKey::forward(addr(from), from.port(), addr(to), to.port()),
            Direction::Out => FlowKey::reply(addr(to), to.port(), addr(from), from.port()),
        };
        let tables = &self.shadow(slot, direction)?.tables;
        let flow = [&tables.living, &tables.living_reply, &tables.young]
            .into_iter()
            .find_map(|table| table.held.get(&key));
        let known = flow.map(|flow| flow.last_hop).filter(|mac| *mac != [0; 6]);
        let other = mac.or(known).unwrap_or(SOME_MAC);
        let (destination, source) = match direction {
            Direction::In => (uplink.mac, other),
            Direction::Out => (other, uplink.mac),
        };
        let kind = match to.ip() {
            IpAddr::V4(_) => ethertype::IPV4,
            IpAddr::V6(_) => ethertype::IPV6,
        };
        let vlan = (uplink.vlan != 0).then_some(uplink.vlan);
        const LENGTH: u16 = size_of::<TcpHeader>() as u16;
        let Some(ip) = ip_header(from.ip(), to.ip(), protocol::TCP, LENGTH) else {
            return Ok(None);
        };
        let acknowledged = match flow.map(|flow| flow.last_ack) {
            _ if flags & TCP_ACK == 0 => 0,
            None | Some(0) => 1,
            Some(last) => last,
        };
        let mut tcp = Vec::with_capacity(usize::from(LENGTH));
        tcp.extend(from.port().to_be_bytes());
        tcp.extend(to.port().to_be_bytes());
        tcp.extend(1_u32.to_be_bytes());
        tcp.extend(acknowledged.to_be_bytes());
        // Five words of header; a window; no checksum yet, nothing urgent.
        tcp.extend([5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
        let sum = transport_checksum(&ip, protocol::TCP, &tcp);
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());
        let mut frame = ethernet(destination, source, vlan, kind);
        frame.extend(ip);
        frame.extend(tcp);
        Ok(Some(frame))
    }

    fn shadow(&mut self, slot: u32, direction: Direction) -> Result<&mut Shadow, DataplaneError> {
        if !self.shadows.contains_key(&(slot, direction)) {
            let (program, _) = self.program(slot, direction);
            let shadow = Shadow::load(&self.root, slot, program)?;
            self.shadows.insert((slot, direction), shadow);
        }
        let shadow = self.shadows.get_mut(&(slot, direction));
        shadow.ok_or_else(|| DataplaneError::Object("a shadow is gone".to_owned()))
    }

    /// The program of a slot, and the hook that it is at.
    fn program(&self, slot: u32, direction: Direction) -> (&'static str, Hook) {
        let mode = self.rows.all_uplinks[slot as usize].mode;
        let has_frags = KernelVersion::current().is_ok_and(|version| version >= FRAGS_SINCE);
        match (direction, mode) {
            (Direction::Out, _) => (program::EGRESS, Hook::Egress),
            (Direction::In, MODE_NATIVE) if has_frags => (program::XDP, Hook::Xdp),
            (Direction::In, MODE_NATIVE) => (program::XDP_PLAIN, Hook::Xdp),
            (Direction::In, _) => (program::INGRESS, Hook::Ingress),
        }
    }

    /// Runs the program of an interface on a frame, and tells what it did.
    ///
    /// `whole` is the packet's length where the frame is only the beginning of it.
    pub fn trace(
        &mut self,
        slot: u32,
        direction: Direction,
        frame: &[u8],
        whole: usize,
    ) -> Result<Trace, DataplaneError> {
        let (program, hook) = self.program(slot, direction);
        let cut = &frame[..frame.len().min(LONGEST)];
        if cut.len() < SHORTEST {
            return Err(DataplaneError::Run {
                program,
                length: cut.len(),
                reason: "an Ethernet header has 14".to_owned(),
            });
        }
        let mut notes = self.notes(slot);
        if cut.len() < whole {
            notes.push(format!(
                "only the first {} of {whole} bytes were given to the program",
                cut.len()
            ));
        }
        let shadow = self.shadow(slot, direction)?;
        let outcome = shadow.run(cut)?;
        let tag = shadow.tag;
        if self.attached_tag(slot, hook).is_some_and(|own| own != tag) {
            notes.push(
                "the program on the interface is of another build than this `ironlb`, which may decide otherwise: \
                 restart the agent with this version, or use the one that it is of"
                    .to_owned(),
            );
        }
        let shadow = &self.shadows[&(slot, direction)];
        let headers = Headers::parse(cut);
        let after = Headers::parse(&outcome.frame);
        let explained = Explained {
            rows: &self.rows,
            reader: &self.reader,
            tables: &shadow.tables,
            outcome: &outcome,
            slot,
            clock: outcome
                .changes
                .ticks()
                .map_or_else(Clock::now, |ticks| Clock::now().with_ticks(ticks)),
        };
        let entries = match direction {
            Direction::In => explained.forward(&headers, &after)?,
            Direction::Out => explained.reply(&headers),
        };
        let action = outcome.verdict.action();
        Ok(Trace {
            packet: None,
            uplink: from_name(&self.rows.all_uplinks[slot as usize].name),
            direction,
            program,
            verdict: outcome.verdict.name(),
            explanation: outcome.verdict.explanation(),
            action: match action {
                Action::Pass => "pass",
                Action::Drop => "drop",
                Action::Transmit => "transmit",
                Action::Redirect => "redirect",
            },
            returned: returned(hook, outcome.returned),
            leaves: explained.leaves(&headers, direction),
            entries,
            changes: explained.changes(),
            before: headers.fields(whole),
            after: (action != Action::Drop).then(|| {
                // An answer is whole, what goes on has its end still.
                let is_answer = outcome.frame.len() != cut.len();
                let end = if is_answer { 0 } else { whole - cut.len() };
                after.fields(outcome.frame.len() + end)
            }),
            notes,
        })
    }

    fn notes(&self, slot: u32) -> Vec<String> {
        let mut notes = Vec::new();
        let row = &self.rows.all_uplinks[slot as usize];
        let name = from_name(&row.name);
        let is_here = Host::read().is_ok_and(|host| {
            let own = host.interfaces.get(&row.ifindex);
            own.is_some_and(|own| own.name == name)
        });
        if !is_here {
            notes.push(format!(
                "{name} is not in this network namespace: where the program asks the routing table, it is not the agent's"
            ));
        }
        notes
    }

    /// Tag of the attached program, where its link has a pin.
    fn attached_tag(&self, slot: u32, hook: Hook) -> Option<u64> {
        let ifindex = self.rows.all_uplinks[slot as usize].ifindex;
        let links = pins::layout_dir(&self.root).join("links");
        let pin = links.join(format!("{}-{ifindex}", hook.name()));
        let link = FdLink::from(PinnedLink::from_pin(pin).ok()?);
        let id = link.info().ok()?.program_id();
        let mut loaded = loaded_programs().filter_map(Result::ok);
        loaded
            .find(|program| program.id() == id)
            .map(|program| program.tag())
    }
}

/// Whether an interface has a program of a direction.
fn serves(row: &Uplink, direction: Direction) -> bool {
    direction == Direction::Out || (row.flags & UPLINK_FORWARD != 0 && row.mode != MODE_NONE)
}

/// A program's return value by the kernel's name (`linux/bpf.h`, `linux/pkt_cls.h`).
fn returned(hook: Hook, value: u32) -> String {
    let name = match (hook, value) {
        (Hook::Xdp, 0) => "XDP_ABORTED",
        (Hook::Xdp, 1) => "XDP_DROP",
        (Hook::Xdp, 2) => "XDP_PASS",
        (Hook::Xdp, 3) => "XDP_TX",
        (Hook::Xdp, 4) => "XDP_REDIRECT",
        (_, u32::MAX) => "TC_ACT_UNSPEC",
        (_, 2) => "TC_ACT_SHOT",
        (_, 7) => "TC_ACT_REDIRECT",
        _ => return value.to_string(),
    };
    name.to_owned()
}

/// What the engine reads of a frame, by the same code.
struct Headers {
    destination: [u8; 6],
    source: [u8; 6],
    vlan: u16,
    ethertype: u16,
    ip: Option<Ip>,
    ttl: Option<u8>,
    tcp: Option<Tcp>,
    udp: Option<(u16, u16)>,
    /// Whom an ARP or neighbor message is about.
    asked: Option<Addr>,
    quoted: Option<Quoted>,
}

impl Headers {
    fn parse(bytes: &[u8]) -> Self {
        use lb_common::frame::Frame as _;
        let mut bytes = bytes.to_owned();
        let frame = Buffer::new(&mut bytes);
        let mut headers = Self {
            destination: [0; 6],
            source: [0; 6],
            vlan: 0,
            ethertype: 0,
            ip: None,
            ttl: None,
            tcp: None,
            udp: None,
            asked: None,
            quoted: None,
        };
        let (Some(ethernet), Some(link)) = (frame.at::<EthernetHeader>(0), packet::link(&frame))
        else {
            return headers;
        };
        headers.destination = field!(ethernet, destination);
        headers.source = field!(ethernet, source);
        headers.vlan = link.vlan;
        headers.ethertype = link.ethertype;
        let ip = match link.ethertype {
            ethertype::IPV4 => {
                headers.ttl = frame
                    .at::<Ipv4Header>(link.network)
                    .map(|ip| field!(ip, ttl));
                packet::ipv4(&frame, link.network)
            }
            ethertype::IPV6 => {
                headers.ttl = frame
                    .at::<Ipv6Header>(link.network)
                    .map(|ip| field!(ip, hop_limit));
                packet::ipv6(&frame, link.network)
            }
            ethertype::ARP => {
                headers.asked = frame.at::<ArpPacket>(link.network).map(|arp| {
                    let [low, high] = field!(arp, target);
                    Addr::from_v4_raw(u32::from(high) << 16 | u32::from(low))
                });
                None
            }
            _ => None,
        };
        let Some(mut ip) = ip else {
            return headers;
        };
        let complete = !ip.is_v6() || packet::extensions(&frame, &mut ip).is_some();
        headers.ip = Some(ip);
        if !complete || ip.is_later_fragment() {
            return headers;
        }
        match ip.protocol {
            protocol::TCP => headers.tcp = packet::tcp(&frame, &ip),
            protocol::UDP => {
                headers.udp = frame.at::<UdpHeader>(ip.transport()).map(|udp| {
                    let (from, to) = (field!(udp, source), field!(udp, destination));
                    (u16::from_be(from), u16::from_be(to))
                });
            }
            _ if ip.is_icmp() => {
                headers.quoted = packet::quoted(&frame, &ip);
                if ip.is_v6()
                    && let Some(message) = frame.at::<NeighborMessage>(ip.transport())
                    && [
                        packet::NEIGHBOR_SOLICITATION,
                        packet::NEIGHBOR_ADVERTISEMENT,
                    ]
                    .contains(&field!(message, kind))
                {
                    headers.asked = Some(Addr::from_words(field!(message, target)));
                }
            }
            _ => {}
        }
        headers
    }

    /// Whom the packet is for or about.
    fn target(&self) -> Option<Addr> {
        self.asked.or(self.ip.map(|ip| ip.destination))
    }

    fn fields(&self, length: usize) -> Fields {
        let mut fields = vec![
            ("length", json!(length)),
            ("source_mac", json!(read::mac(&self.source))),
            ("destination_mac", json!(read::mac(&self.destination))),
        ];
        if self.vlan != 0 {
            fields.push(("vlan", json!(self.vlan)));
        }
        let ports = match (&self.tcp, self.udp) {
            (Some(tcp), _) => Some((tcp.source, tcp.destination)),
            (None, udp) => udp,
        };
        let kind = match (&self.ip, self.ethertype) {
            (None, ethertype::ARP) => "arp".to_owned(),
            (None, other) => format!("ethertype {other:#06x}"),
            (Some(ip), _) => match ip.protocol {
                protocol::TCP => "tcp".to_owned(),
                protocol::UDP => "udp".to_owned(),
                protocol::ICMP => "icmp".to_owned(),
                protocol::ICMPV6 => "icmpv6".to_owned(),
                other => format!("protocol {other}"),
            },
        };
        fields.push(("protocol", json!(kind)));
        if let Some(ip) = self.ip {
            let end = |addr: Addr, port: Option<u16>| match port {
                Some(port) => json!(socket(addr, port)),
                None => json!(addr.to_string()),
            };
            fields.push(("source", end(ip.source, ports.map(|ports| ports.0))));
            fields.push((
                "destination",
                end(ip.destination, ports.map(|ports| ports.1)),
            ));
        }
        if let Some(asked) = self.asked {
            fields.push(("about", json!(asked.to_string())));
        }
        if let Some(quoted) = &self.quoted {
            fields.push((
                "quoted_source",
                json!(socket(quoted.ip.source, quoted.source)),
            ));
            let to = socket(quoted.ip.destination, quoted.destination);
            fields.push(("quoted_destination", json!(to)));
        }
        if let Some(ttl) = self.ttl {
            fields.push(("ttl", json!(ttl)));
        }
        if let Some(tcp) = &self.tcp {
            fields.push(("flags", json!(flag_names(tcp.flags))));
        }
        Fields(fields)
    }
}

/// Names of TCP's flags, as `--flags` takes them.
pub const TCP_FLAGS: [(&str, u8); 6] = [
    ("syn", TCP_SYN),
    ("ack", TCP_ACK),
    ("fin", TCP_FIN),
    ("rst", TCP_RST),
    ("psh", 8),
    ("urg", 32),
];

fn flag_names(flags: u8) -> String {
    let set = TCP_FLAGS.iter().filter(|(_, bit)| flags & bit != 0);
    let names: Vec<&str> = set.map(|(name, _)| *name).collect();
    match names[..] {
        [] => "none".to_owned(),
        _ => names.join(","),
    }
}

fn socket(addr: Addr, port: u16) -> String {
    SocketAddr::new(addr.into(), port).to_string()
}

fn flow_name(key: &FlowKey) -> String {
    let client = socket(key.client, key.client_port);
    let other = socket(key.addr, key.port);
    match key.direction {
        REPLY => format!("{other} → {client}"),
        _ => format!("{client} → {other}"),
    }
}

/// One answer, with all that explains it.
struct Explained<'a> {
    rows: &'a Rows,
    reader: &'a Reader,
    tables: &'a Tables,
    outcome: &'a Outcome,
    slot: u32,
    clock: Clock,
}

impl Explained<'_> {
    /// What decided about a packet from the network.
    fn forward(
        &self,
        headers: &Headers,
        after: &Headers,
    ) -> Result<Vec<EntryView>, DataplaneError> {
        let mut entries = Vec::new();
        let by = PeerMac {
            mac: headers.source,
            uplink: self.slot as u16,
        };
        if let Some(number) = self.rows.peer_macs.get(&by) {
            entries.push(EntryView {
                map: map::PEER_MACS,
                key: read::mac(&by.mac),
                value: Fields(vec![("node", json!(self.rows.peer(*number)))]),
            });
        }
        if let Some(target) = headers.target() {
            self.vip(target, headers.asked.is_some(), &mut entries);
        }
        let key = match (headers.ip, &headers.tcp, &headers.quoted) {
            (Some(ip), Some(tcp), _) => {
                FlowKey::forward(ip.source, tcp.source, ip.destination, tcp.destination)
            }
            (_, _, Some(quoted)) => FlowKey::forward(
                quoted.ip.destination,
                quoted.destination,
                quoted.ip.source,
                quoted.source,
            ),
            _ => return Ok(entries),
        };
        self.flow(&key, headers, &mut entries)?;
        if self.outcome.verdict.is_handed_on() {
            let to = self.rows.peer_macs.get(&PeerMac {
                mac: after.destination,
                uplink: self.slot as u16,
            });
            entries.extend(to.and_then(|number| self.peer(*number)));
        }
        Ok(entries)
    }

    fn vip(&self, target: Addr, is_question: bool, entries: &mut Vec<EntryView>) {
        let Some(vip) = self.rows.vips.get(&target) else {
            if let Some(pod) = self.rows.pods.get(&target) {
                let uplink = self.rows.all_uplinks[self.slot as usize];
                entries.push(EntryView {
                    map: map::PODS,
                    key: target.to_string(),
                    value: Fields(vec![
                        ("host_network", json!(pod.flags & POD_HOST != 0)),
                        ("bypass_drop", json!(uplink.flags & UPLINK_BYPASS_DROP != 0)),
                    ]),
                });
            }
            return;
        };
        let now = nanoseconds(boot_time());
        let announcer = self.rows.announcers.get(&target);
        let elected = announcer.is_some_and(|row| row.answer_until > now);
        let pass: Vec<String> = vip.pass.iter().filter_map(read::pass).collect();
        let mut value = vec![
            (
                "uplink",
                json!(read::interface(&self.rows.all_uplinks, vip.uplink)),
            ),
            (
                "refuse",
                json!(if vip.flags & VIP_REFUSE_DROP != 0 {
                    "drop"
                } else {
                    "reject"
                }),
            ),
            ("answering", json!(vip.answer_until > now || elected)),
            ("external", json!(vip.flags & VIP_EXTERNAL != 0)),
        ];
        if !pass.is_empty() {
            value.push(("pass", json!(pass)));
        }
        entries.push(EntryView {
            map: map::VIPS,
            key: target.to_string(),
            value: Fields(value),
        });
        if let Some(row) = announcer.filter(|_| is_question) {
            entries.push(EntryView {
                map: map::ANNOUNCERS,
                key: target.to_string(),
                value: Fields(vec![("node", json!(from_name(&row.holder)))]),
            });
        }
    }

    /// The look-ups of the forward path in their order: living, exception, young, choice.
    fn flow(
        &self,
        key: &FlowKey,
        headers: &Headers,
        entries: &mut Vec<EntryView>,
    ) -> Result<(), DataplaneError> {
        let verdict = self.outcome.verdict;
        let service = self.rows.services.get(&ServiceKey::new(key.addr, key.port));
        if let Some(service) = service {
            entries.push(self.service(key, service));
        }
        let living = self.tables.living.held.get(key);
        if let Some(flow) = living {
            entries.push(self.entry(map::LIVING, key, flow));
        }
        if verdict == Verdict::HandedOnException
            && let Some(exception) = self.rows.exceptions.get(key)
        {
            entries.push(EntryView {
                map: map::EXCEPTIONS,
                key: flow_name(key),
                value: Fields(vec![("node", json!(self.rows.peer(exception.peer)))]),
            });
            return Ok(());
        }
        let young = self.tables.young.held.get(key);
        if let Some(flow) = young.filter(|_| living.is_none()) {
            entries.push(self.entry(map::YOUNG, key, flow));
        }
        let is_new = headers
            .tcp
            .is_some_and(|tcp| tcp.flags & (TCP_SYN | TCP_ACK) == TCP_SYN);
        if let Some(service) = service.filter(|_| living.is_none() && young.is_none()) {
            if service.sources != 0 {
                entries.push(self.source(key, service)?);
            }
            if is_new {
                self.shunned(service, entries);
            }
        }
        match verdict {
            Verdict::RefusedTableFull => entries.push(EntryView {
                map: map::PRESSURE,
                key: "0".to_owned(),
                value: Fields(vec![("living_full", json!(true))]),
            }),
            Verdict::DroppedSettling => {
                let until = self.rows.control.settle_until;
                let left = until.saturating_sub(nanoseconds(boot_time()));
                entries.push(EntryView {
                    map: map::CONTROL,
                    key: "0".to_owned(),
                    value: Fields(vec![("settles_for_seconds", json!(left as f64 / 1e9))]),
                });
            }
            _ => {}
        }
        // As it is afterwards: a SYN may begin the flow anew, at another backend.
        let begun = self.outcome.changes.flows.iter().find_map(|(_, change)| {
            let is_it = change.key == *key;
            change.after.filter(|_| is_it).map(|flow| flow.backend)
        });
        let kept = || living.or(young).map(|flow| flow.backend);
        let placed = || {
            let service = service.filter(|_| verdict == Verdict::HandedOnMiss)?;
            choice::choose(service, key, choice::EVERYWHERE, NOBODY)
        };
        entries.extend(
            begun
                .or_else(kept)
                .or_else(placed)
                .and_then(|id| self.backend(id)),
        );
        Ok(())
    }

    /// What decided about a packet to the network.
    fn reply(&self, headers: &Headers) -> Vec<EntryView> {
        let mut entries = Vec::new();
        let key = match (headers.ip, &headers.tcp, &headers.quoted) {
            (Some(ip), Some(tcp), _) => {
                FlowKey::reply(ip.destination, tcp.destination, ip.source, tcp.source)
            }
            (_, _, Some(quoted)) => FlowKey::reply(
                quoted.ip.source,
                quoted.source,
                quoted.ip.destination,
                quoted.destination,
            ),
            _ => return entries,
        };
        let pod_port = ServiceKey::new(key.addr, key.port);
        let ways = self.rows.pod_ports.get(&pod_port);
        if let Some(flow) = self.tables.living_reply.held.get(&key) {
            entries.push(self.entry(map::LIVING_REPLY, &key, flow));
            entries.extend(self.backend(flow.backend));
            return entries;
        }
        let Some(ways) = ways else {
            return entries;
        };
        let used = &ways.vip_ports[..(ways.count as usize).min(ways.vip_ports.len())];
        let names: Vec<String> = used.iter().map(|way| socket(way.addr, way.port)).collect();
        entries.push(EntryView {
            map: map::POD_PORTS,
            key: socket(key.addr, key.port),
            value: Fields(vec![
                ("vip_ports", json!(names)),
                ("host_network", json!(ways.flags & POD_HOST != 0)),
            ]),
        });
        let direct = used
            .iter()
            .map(|way| FlowKey::forward(key.client, key.client_port, way.addr, way.port));
        let translated = self
            .tables
            .young
            .held
            .get(&key)
            .map(|flow| FlowKey::forward(key.client, flow.client_port, flow.addr, flow.port));
        for forward in direct.chain(translated) {
            let tables = [
                (map::LIVING, &self.tables.living),
                (map::YOUNG, &self.tables.young),
            ];
            let found = tables.into_iter().find_map(|(name, table)| {
                let flow = table.held.get(&forward)?;
                let leads = flow.addr == key.addr
                    && flow.port == key.port
                    && flow.client_port == key.client_port;
                leads.then_some((name, flow))
            });
            if let Some((name, flow)) = found {
                entries.push(self.entry(name, &forward, flow));
                entries.extend(self.backend(flow.backend));
                break;
            }
        }
        entries
    }

    fn service(&self, key: &FlowKey, service: &Service) -> EntryView {
        let info = self.rows.ports.get(usize::from(service.id));
        let named = |name: fn(&PortInfo) -> String| info.map_or_else(String::new, name);
        let candidates = service.candidates.iter().take(service.count as usize);
        let candidates = candidates.map(|candidate| self.rows.instance(candidate.backend));
        let mut value = vec![
            ("service", json!(named(|info| from_name(&info.service)))),
            ("port", json!(named(|info| from_name(&info.port)))),
            ("candidates", json!(candidates.collect::<Vec<_>>())),
        ];
        if service.flags & SERVICE_INSTANCE != 0 {
            let slot = info.and_then(|info| info.slot.checked_sub(1));
            value.push(("instance_slot", json!(slot)));
        }
        if service.flags & SERVICE_CLIENT_IP != 0 {
            value.push(("affinity", json!("ClientIP")));
        }
        EntryView {
            map: map::SERVICES,
            key: socket(key.addr, key.port),
            value: Fields(value),
        }
    }

    fn source(&self, key: &FlowKey, service: &Service) -> Result<EntryView, DataplaneError> {
        let dir = self.reader.dir();
        let trie = maps::pinned::<aya::maps::lpm_trie::LpmTrie<_, Source, u32>>(dir, map::SOURCES)?;
        let ranges = read::ranges(&maps::sources(&trie)?, service.sources);
        let client = IpAddr::from(key.client);
        let admitting = ranges.iter().filter(|range| {
            let (network, length) = (range.network(), range.prefix_len());
            network.is_ipv4() == client.is_ipv4() && in_subnet(client, network, length)
        });
        let longest = admitting.max_by_key(|range| range.prefix_len());
        Ok(EntryView {
            map: map::SOURCES,
            key: client.to_string(),
            value: Fields(vec![
                ("admitted_by", json!(longest)),
                ("ranges", json!(ranges)),
            ]),
        })
    }

    fn shunned(&self, service: &Service, entries: &mut Vec<EntryView>) {
        for candidate in service.candidates.iter().take(service.count as usize) {
            let index = backend_index(candidate.backend);
            let at = self.tables.shunned.held.get(&index).copied().unwrap_or(0);
            let since = self.clock.since_jiffies(at);
            if at != 0 && since < SHUN as f64 {
                entries.push(EntryView {
                    map: map::SHUNNED,
                    key: self.rows.instance(candidate.backend),
                    value: Fields(vec![("since_seconds", json!(since))]),
                });
            }
        }
    }

    fn backend(&self, id: u32) -> Option<EntryView> {
        let (row, instance) = self.rows.backend(id)?;
        let mut value = vec![
            ("instance", json!(instance)),
            ("pod", json!(socket(row.addr, row.port))),
            ("alive", json!(row.flags & BACKEND_ALIVE != 0)),
            ("eligible", json!(row.flags & BACKEND_ELIGIBLE != 0)),
        ];
        if row.peer != 0 {
            value.push(("node", json!(self.rows.peer(row.peer.into()))));
        }
        Some(EntryView {
            map: map::BACKENDS,
            key: backend_index(id).to_string(),
            value: Fields(value),
        })
    }

    fn peer(&self, number: u32) -> Option<EntryView> {
        let row = self.rows.peers.get(peer_link(number, self.slot) as usize)?;
        Some(EntryView {
            map: map::PEERS,
            key: number.to_string(),
            value: Fields(vec![
                ("node", json!(self.rows.peer(number))),
                ("mac", json!(read::mac(&row.mac))),
                ("takes_new_flows", json!(row.flags & PEER_REFLECTS != 0)),
            ]),
        })
    }

    fn entry(&self, map: &'static str, key: &FlowKey, flow: &Flow) -> EntryView {
        EntryView {
            map,
            key: flow_name(key),
            value: self.flow_fields(key, flow),
        }
    }

    fn flow_fields(&self, key: &FlowKey, flow: &Flow) -> Fields {
        let names = [
            (FLOW_CLOSING, "closing"),
            (FLOW_CLAIMED, "claimed"),
            (FLOW_REFUSED, "refused"),
            (FLOW_MISS, "miss"),
            (FLOW_ELSEWHERE, "elsewhere"),
            (FLOW_ANSWERED, "answered"),
            (FLOW_SPARED, "spared"),
            (FLOW_SECOND, "second"),
        ];
        let set = names.iter().filter(|(bit, _)| flow.state & bit != 0);
        let state: Vec<&str> = set.map(|(_, name)| *name).collect();
        let to = if key.direction == FORWARD {
            "pod"
        } else {
            "vip"
        };
        let mut fields = vec![
            ("instance", json!(self.rows.instance(flow.backend))),
            (to, json!(socket(flow.addr, flow.port))),
        ];
        if flow.client_port != key.client_port {
            fields.push(("translated_port", json!(flow.client_port)));
        }
        fields.extend([
            ("state", json!(state)),
            ("client_fin", json!(flow.client_fin != 0)),
            ("pod_fin", json!(flow.pod_fin != 0)),
            ("last_ack", json!(flow.last_ack)),
            ("age_seconds", json!(self.clock.since_ticks(flow.started))),
            (
                "idle_seconds",
                json!(self.clock.since_ticks(flow.last_seen)),
            ),
            (
                "uplink",
                json!(read::interface(
                    &self.rows.all_uplinks,
                    u32::from(flow.uplink & !FLOW_HANDED_ON)
                )),
            ),
            ("last_hop", json!(read::mac(&flow.last_hop))),
            ("handed_on", json!(flow.uplink & FLOW_HANDED_ON != 0)),
        ]);
        Fields(fields)
    }

    fn changes(&self) -> Vec<ChangeView> {
        let changes = &self.outcome.changes;
        let mut views = Vec::new();
        for (name, difference) in &changes.flows {
            // A counter.
            let counted = |flow: Option<Flow>| flow.map(|flow| Flow { bytes: 0, ..flow });
            if counted(difference.before) != counted(difference.after) {
                views.push(view(name, difference, flow_name, |key, flow| {
                    self.flow_fields(key, flow)
                }));
            }
        }
        let idle = |jiffies: u64| {
            Fields(vec![(
                "idle_seconds",
                json!(self.clock.since_jiffies(jiffies)),
            )])
        };
        views.extend(
            changes
                .direct
                .iter()
                .map(|d| view(map::DIRECT, d, flow_name, |_, at| idle(*at))),
        );
        views.extend(changes.pressure.iter().map(|d| {
            view(map::PRESSURE, d, u32::to_string, |_, row| {
                Fields(vec![("living_full", json!(row.living_full != 0))])
            })
        }));
        views.extend(changes.reflections.iter().map(|d| {
            view(map::REFLECTIONS, d, u32::to_string, |_, row| {
                Fields(vec![("nonce", json!(row.nonce))])
            })
        }));
        let instance = |index: &u32| {
            let name = self.rows.names.get(*index as usize);
            name.map_or_else(String::new, |name| from_name(&name.instance))
        };
        views.extend(changes.shunned.iter().map(|d| {
            view(map::SHUNNED, d, instance, |_, at| {
                Fields(vec![(
                    "since_seconds",
                    json!((*at != 0).then(|| self.clock.since_jiffies(*at))),
                )])
            })
        }));
        // By map, and within it by key: a hash has no order.
        views.sort_by(|a, b| (a.map, &a.key).cmp(&(b.map, &b.key)));
        views
    }

    /// The interface that the program sends the packet out of.
    fn leaves(&self, headers: &Headers, direction: Direction) -> Option<String> {
        let uplinks = &self.rows.all_uplinks;
        match self.outcome.verdict.action() {
            Action::Transmit => Some(read::interface(uplinks, self.slot)),
            Action::Redirect if direction == Direction::Out => {
                // The uplink by which the flow's packets arrive, as its entry says.
                let entries = self.reply(headers);
                entries.iter().find_map(|entry| {
                    let mut fields = entry.value.0.iter();
                    let (_, name) = fields.find(|(name, _)| *name == "uplink")?;
                    name.as_str().map(str::to_owned)
                })
            }
            _ => None,
        }
    }
}

fn view<K, V>(
    map: &'static str,
    difference: &Difference<K, V>,
    name: impl Fn(&K) -> String,
    fields: impl Fn(&K, &V) -> Fields,
) -> ChangeView {
    let Difference { key, before, after } = difference;
    ChangeView {
        map,
        change: match (before, after) {
            (None, _) => ChangeKind::Inserted,
            (_, None) => ChangeKind::Removed,
            _ => ChangeKind::Changed,
        },
        key: name(key),
        before: before.as_ref().map(|value| fields(key, value)),
        after: after.as_ref().map(|value| fields(key, value)),
    }
}
