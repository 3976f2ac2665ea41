//! Dialogues to begin with: at least one packet of every kind that the engine looks at. `cargo run -p lb-host --example
//! seeds` writes them to `fuzz/seeds`; a test compares what lies there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use etherparse::{
    Ethernet2Header, Icmpv4Type, Icmpv6Type, PacketBuilder, PacketBuilderStep, TcpHeader, icmpv4,
};
use lb_common::choice::{EVERYWHERE, NOBODY, choose};
use lb_common::layout::{Addr, FlowKey, ServiceKey, backend_index};
use lb_common::packet::{
    PROBE_ASKS, PROBE_MAGIC, PROBE_RETURNS, PROBE_SOURCE, PROBE_SOURCE_V6, TCP_ACK, TCP_FIN,
    TCP_RST, TCP_SYN,
};

use crate::corpus::{EGRESS, INGRESS, Written, XDP, turn};
use crate::oracle::leave_sum;
use crate::scene::{
    API, CLIENT, CLIENT_MAC, CLIENT_PORT, CLIENT6, EMPTY, HEARTBEAT_PORT, IMAGES, INSTANCE,
    NODE_MAC, PASSED_UDP, PEER_MAC, PODS, PODS6, REMOTE, RESTRICTED, VIP, VIP_OF_OTHERS,
    VIP_SILENT, VIP6, scene,
};
use crate::turn::Turn;

type End = (IpAddr, u16);
/// A frame, and whether it goes out.
type Sent = (bool, Vec<u8>);
/// Several.
type Frames = Vec<Sent>;

/// What happens next.
enum Next {
    Frame(Sent),
    Turn(Turn),
}
use Next::Frame;

/// The client's port.
const PORT: u16 = CLIENT_PORT;
/// A port of the VIP that is nobody's.
const UNUSED: u16 = 6189;
const ROUTER: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 22, 0, 200));
const ROUTER6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0x22, 0, 0, 0, 0, 0, 0x200));
/// Of a smaller link.
const MTU: u16 = 1400;

fn link(is_out: bool) -> PacketBuilderStep<Ethernet2Header> {
    let (source, destination) = if is_out {
        (NODE_MAC, CLIENT_MAC)
    } else {
        (CLIENT_MAC, NODE_MAC)
    };
    PacketBuilder::ethernet2(source, destination)
}

fn tcp(from: End, to: End, flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut header = TcpHeader::new(from.1, to.1, 1000, 1024);
    header.syn = flags & TCP_SYN != 0;
    header.ack = flags & TCP_ACK != 0;
    header.fin = flags & TCP_FIN != 0;
    header.rst = flags & TCP_RST != 0;

    header.acknowledgment_number = if header.ack { 77 } else { 0 };
    let is_out = to.0 == IpAddr::V4(CLIENT) || to.0 == IpAddr::V6(CLIENT6);
    let mut frame = Vec::new();
    match (from.0, to.0) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => link(is_out)
            .ipv4(source.octets(), destination.octets(), 64)
            .tcp_header(header)
            .write(&mut frame, payload),
        (IpAddr::V6(source), IpAddr::V6(destination)) => link(is_out)
            .ipv6(source.octets(), destination.octets(), 64)
            .tcp_header(header)
            .write(&mut frame, payload),
        _ => unreachable!("both of one version"),
    }
    .expect("a vector takes all");
    frame
}

/// An ICMP error about a frame, of whose packet so many bytes are quoted.
fn too_big(from: IpAddr, to: IpAddr, about: &[u8], quoted: usize, is_out: bool) -> Vec<u8> {
    let quote = &about[14..about.len().min(14 + quoted)];
    let mut frame = Vec::new();
    match (from, to) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            use icmpv4::DestUnreachableHeader::FragmentationNeeded;
            let kind =
                Icmpv4Type::DestinationUnreachable(FragmentationNeeded { next_hop_mtu: MTU });
            link(is_out)
                .ipv4(source.octets(), destination.octets(), 64)
                .icmpv4(kind)
                .write(&mut frame, quote)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => link(is_out)
            .ipv6(source.octets(), destination.octets(), 64)
            .icmpv6(Icmpv6Type::PacketTooBig { mtu: MTU.into() })
            .write(&mut frame, quote),
        _ => unreachable!("both of one version"),
    }
    .expect("a vector takes all");
    frame
}

fn udp(from: End, to: End, mac: [u8; 6], payload: &[u8]) -> Vec<u8> {
    let builder = PacketBuilder::ethernet2(mac, NODE_MAC);
    let mut frame = Vec::new();
    match (from.0, to.0) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => builder
            .ipv4(source.octets(), destination.octets(), 64)
            .udp(from.1, to.1)
            .write(&mut frame, payload),
        (IpAddr::V6(source), IpAddr::V6(destination)) => builder
            .ipv6(source.octets(), destination.octets(), 64)
            .udp(from.1, to.1)
            .write(&mut frame, payload),
        _ => unreachable!("both of one version"),
    }
    .expect("a vector takes all");
    frame
}

fn probe(from: IpAddr, to: IpAddr, direction: u32) -> Vec<u8> {
    let payload = [PROBE_MAGIC, direction, 1, 2]
        .map(u32::to_be_bytes)
        .concat();
    udp(
        (from, HEARTBEAT_PORT),
        (to, HEARTBEAT_PORT),
        PEER_MAC,
        &payload,
    )
}

fn arp(sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let head = [&[0xff; 6][..], &CLIENT_MAC, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]];
    let ends = [&CLIENT_MAC[..], &sender.octets(), &[0; 6], &target.octets()];
    let mut frame = [head.concat(), ends.concat()].concat();
    frame.resize(60, 0);
    frame
}

/// A neighbour solicitation for the VIP (RFC 4861 section 4.3).
fn solicitation(from: Ipv6Addr) -> Vec<u8> {
    let group = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 2];
    let mut message = VIP6.octets().to_vec();
    if !from.is_unspecified() {
        message.extend([&[1, 1][..], &CLIENT_MAC].concat());
    }
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(CLIENT_MAC, [0x33, 0x33, 0xff, 0, 0, 2])
        .ipv6(from.octets(), group, 255)
        .icmpv6(Icmpv6Type::Unknown {
            type_u8: 135,
            code_u8: 0,
            bytes5to8: [0; 4],
        })
        .write(&mut frame, &message)
        .expect("a vector takes all");
    frame
}

fn echo(is_v6: bool) -> Vec<u8> {
    let mut frame = Vec::new();
    if is_v6 {
        link(false)
            .ipv6(CLIENT6.octets(), VIP6.octets(), 3)
            .icmpv6_echo_request(7, 1)
            .write(&mut frame, b"hello")
    } else {
        link(false)
            .ipv4(CLIENT.octets(), VIP.octets(), 3)
            .icmpv4_echo_request(7, 1)
            .write(&mut frame, b"hello")
    }
    .expect("a vector takes all");
    frame
}

/// With tags of VLAN 0 before the rest.
fn tagged(mut frame: Vec<u8>, kinds: &[[u8; 2]]) -> Vec<u8> {
    for kind in kinds.iter().rev() {
        frame.splice(12..12, [kind[0], kind[1], 0x60, 0]);
    }
    frame
}

/// With words of IPv4 options, which do nothing.
fn with_options(mut frame: Vec<u8>, words: usize) -> Vec<u8> {
    frame.splice(34..34, vec![1; 4 * words]);
    frame[14] += words as u8;
    let length = frame.len() as u16 - 14;
    frame[16..18].copy_from_slice(&length.to_be_bytes());
    let header = etherparse::Ipv4HeaderSlice::from_slice(&frame[14..]).expect("just made");
    let checksum = header.to_header().calc_header_checksum();
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    frame
}

/// With extension headers of eight octets each before TCP.
fn with_extensions(mut frame: Vec<u8>, numbers: &[u8]) -> Vec<u8> {
    for number in numbers.iter().rev() {
        let next = std::mem::replace(&mut frame[20], *number);
        let padding = if [0, 60].contains(number) {
            [1, 4]
        } else {
            [0, 0]
        };
        frame.splice(54..54, [next, 0, padding[0], padding[1], 0, 0, 0, 0]);
        let length = frame.len() as u16 - 54;
        frame[18..20].copy_from_slice(&length.to_be_bytes());
    }
    frame
}

/// As the peer hands it on.
fn from_peer(mut frame: Vec<u8>) -> Vec<u8> {
    frame[6..12].copy_from_slice(&PEER_MAC);
    frame
}

/// A client, the VIP, and the pod of its instance port.
fn trio(is_v6: bool) -> (IpAddr, IpAddr, IpAddr) {
    if is_v6 {
        (CLIENT6.into(), VIP6.into(), PODS6[1].into())
    } else {
        (CLIENT.into(), VIP.into(), PODS[1].into())
    }
}

/// The beginning of a download from the instance: the flow is living then.
fn begun(client: (IpAddr, u16), vip: IpAddr, pod: (IpAddr, u16)) -> Frames {
    let there = |flags, payload: &[u8]| (false, tcp(client, (vip, INSTANCE), flags, payload));
    let back = |flags, payload: &[u8]| (true, tcp(pod, client, flags, payload));
    vec![
        there(TCP_SYN, b""),
        back(TCP_SYN | TCP_ACK, b""),
        there(TCP_ACK, b"GET / HTTP/1.1\r\n\r\n"),
        back(TCP_ACK, b"HTTP/1.1 200 OK\r\n\r\n"),
    ]
}

/// The frames of dialogues by a name.
fn plain() -> Vec<(String, Frames)> {
    let mut all = Vec::new();
    for is_v6 in [false, true] {
        let version = if is_v6 { 6 } else { 4 };
        let (client, vip, pod) = trio(is_v6);
        let (client, pod) = ((client, PORT), (pod, IMAGES));
        let there = |port, flags, payload: &[u8]| (false, tcp(client, (vip, port), flags, payload));
        let back = |flags, payload: &[u8]| (true, tcp(pod, client, flags, payload));
        let mut add = |name: &str, frames| all.push((format!("{name}-v{version}"), frames));
        let begin = || begun(client, vip, pod);
        let then = |more: Vec<_>| [begin(), more].concat();
        let fins = vec![
            back(TCP_FIN | TCP_ACK, b""),
            there(INSTANCE, TCP_FIN | TCP_ACK, b""),
            there(INSTANCE, TCP_SYN, b""),
        ];
        add("closed", then(fins));
        let resets = vec![
            there(INSTANCE, TCP_RST, b""),
            back(TCP_ACK, b"more"),
            back(TCP_RST, b""),
        ];
        add("reset", then(resets));
        let shared = vec![
            there(IMAGES, TCP_SYN, b""),
            there(INSTANCE, TCP_ACK, b""),
            there(API, TCP_SYN, b""),
        ];
        add("shared-port", then(shared));
        add(
            "unknown",
            vec![
                there(API, TCP_ACK, b"mid-flow"),
                back(TCP_ACK, b"late"),
                back(TCP_RST, b""),
            ],
        );
        let refused = vec![
            there(EMPTY, TCP_SYN, b""),
            there(EMPTY, TCP_ACK, b"data"),
            there(UNUSED, TCP_SYN, b"early"),
            there(RESTRICTED, TCP_SYN, b""),
            there(UNUSED, TCP_FIN, b""),
            there(UNUSED, TCP_RST, b""),
        ];
        add("refused", refused);
        let (_, asked) = there(REMOTE, TCP_SYN, b"");
        let (_, later) = there(REMOTE, TCP_ACK, b"data");
        add(
            "remote",
            vec![
                (false, asked.clone()),
                (false, later.clone()),
                (false, from_peer(asked)),
            ],
        );
        let (_, asked) = there(INSTANCE, TCP_SYN, b"");
        let (_, other) = there(API, TCP_ACK, b"mid-flow");
        add(
            "from-peer",
            vec![
                (false, from_peer(asked)),
                back(TCP_SYN | TCP_ACK, b""),
                (false, from_peer(other)),
                (false, from_peer(later)),
            ],
        );
        // About what the pod sent, as the client's side saw it; and about what the client sent, as the node saw it.
        let shown = tcp((vip, INSTANCE), client, TCP_ACK, b"HTTP/1.1 200 OK\r\n\r\n");
        let sent = tcp(client, pod, TCP_ACK, b"a long request");
        let router = if is_v6 { ROUTER6 } else { ROUTER };
        let short = if is_v6 { 48 } else { 28 };
        let errors = vec![
            (false, too_big(router, vip, &shown, short, false)),
            (false, too_big(router, vip, &shown, 200, false)),
            (true, too_big(router, client.0, &sent, 200, true)),
            (false, too_big(router, vip, &shown, short - 8, false)),
        ];
        add("error", then(errors));
        let source = if is_v6 {
            IpAddr::from(PROBE_SOURCE_V6)
        } else {
            IpAddr::from(PROBE_SOURCE)
        };
        let others = vec![
            (false, echo(is_v6)),
            (false, probe(source, vip, PROBE_ASKS)),
            (false, probe(vip, source, PROBE_RETURNS)),
            (false, udp(client, (vip, PASSED_UDP), CLIENT_MAC, b"file")),
            (false, udp(client, (vip, 53), CLIENT_MAC, b"name")),
            (false, udp(client, pod, CLIENT_MAC, b"direct")),
            (false, tcp(client, pod, TCP_SYN, b"")),
        ];
        add("others", others);
        let tags = [[0x81, 0], [0x88, 0xa8]];
        let tags = |(is_out, frame)| (is_out, tagged(frame, &tags));
        add("tagged", begin().into_iter().map(tags).collect());
        let longer = |(is_out, frame)| {
            let frame = if is_v6 {
                with_extensions(frame, &[0, 60, 43])
            } else {
                with_options(frame, 10)
            };
            (is_out, frame)
        };
        add("longer", begin().into_iter().map(longer).collect());
    }
    let client = (IpAddr::from(CLIENT), PORT);
    let fragment = |at: [u8; 2]| {
        let mut frame = tcp(client, (VIP.into(), API), TCP_ACK, b"a part");
        frame[20..22].copy_from_slice(&at);
        (false, frame)
    };
    let whole = tcp((CLIENT6.into(), PORT), (VIP6.into(), API), TCP_SYN, b"");
    all.push((
        "fragments".to_owned(),
        vec![
            fragment([0x20, 0]),
            fragment([0, 100]),
            (false, with_extensions(whole, &[44])),
        ],
    ));
    all.push((
        "claims".to_owned(),
        vec![
            (false, arp(CLIENT, VIP)),
            (false, arp(Ipv4Addr::UNSPECIFIED, VIP)),
            (false, arp(VIP, VIP)),
            (false, arp(CLIENT, VIP_OF_OTHERS)),
            (false, arp(CLIENT, VIP_SILENT)),
            (false, solicitation(CLIENT6)),
            (false, solicitation(Ipv6Addr::UNSPECIFIED)),
        ],
    ));
    let with = |at: usize, bytes: &[u8]| {
        let mut frame = tcp(client, (VIP.into(), API), TCP_SYN, b"");
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        (false, frame)
    };
    let group = [1, 0, 0x5e, 0, 0, 1];
    let mut other_vlan = with(0, &[]);
    other_vlan.1.splice(12..12, [0x81, 0, 0, 7]);
    all.push((
        "strays".to_owned(),
        vec![
            with(0, &PEER_MAC),
            with(0, &group),
            other_vlan,
            with(14, &[0x44]),
            with(26, &VIP.octets()),
            with(46, &[0x40]),
            with(30, &Ipv4Addr::new(172, 22, 0, 9).octets()),
        ],
    ));
    let mut last = tcp(client, (VIP.into(), REMOTE), TCP_ACK, b"");
    let unseen = last.clone();
    last[22] = 1;
    let stranger = tcp((VIP.into(), API), client, TCP_ACK, b"");
    let error = too_big(ROUTER, VIP.into(), &stranger, 48, false);
    all.push((
        "beyond".to_owned(),
        vec![(false, unseen), (false, last), (false, error)],
    ));
    // Solicitations that are not valid, or of somebody who uses the VIP.
    let asked = solicitation(CLIENT6);
    let mut far = asked.clone();
    far[21] = 64;
    let mut claim = asked.clone();
    claim[54] = 136;
    let sum = u16::from_be_bytes([claim[56], claim[57]]).wrapping_sub(0x100);
    claim[56..58].copy_from_slice(&sum.to_be_bytes());
    all.push((
        "neighbor-claims".to_owned(),
        vec![(false, far), (false, claim)],
    ));
    let syn = |vip: Ipv4Addr| (false, tcp(client, (vip.into(), API), TCP_SYN, b""));
    let unused = (
        false,
        tcp(client, (VIP_SILENT.into(), UNUSED), TCP_SYN, b""),
    );
    all.push((
        "other-vips".to_owned(),
        vec![syn(VIP_OF_OTHERS), syn(VIP_SILENT), unused],
    ));
    all
}

/// A port from which the client's flow to a VIP port with several backends gets the pod of its instance port.
fn port_to(pod: IpAddr, client: IpAddr, vip: IpAddr, port: u16) -> u16 {
    let served = scene().served;
    let key = ServiceKey::new(vip.into(), port);
    let (_, service) = served
        .services
        .iter()
        .find(|(other, _)| *other == key)
        .expect("it is served");
    let is_chosen = |from: &u16| {
        let flow = FlowKey::forward(client.into(), *from, vip.into(), port);
        choose(service, &flow, EVERYWHERE, NOBODY).is_some_and(|id| {
            let backend = served.backends[backend_index(id) as usize];
            backend.addr == Addr::from(pod)
        })
    };
    (PORT..).find(is_chosen).expect("half of them")
}

/// The port that the engine tries for a client after another.
fn next_port(port: u16) -> u16 {
    port.wrapping_mul(25_173).wrapping_add(13_849) | 0x8000
}

/// Those in which more happens than packets, by a name.
fn turned() -> Vec<(String, Vec<Next>)> {
    let mut all = Vec::new();
    for is_v6 in [false, true] {
        let version = if is_v6 { 6 } else { 4 };
        let (client, vip, pod) = trio(is_v6);
        let router = if is_v6 { ROUTER6 } else { ROUTER };
        let (client, pod) = ((client, PORT), (pod, IMAGES));
        let there =
            |port, flags, payload: &[u8]| Frame((false, tcp(client, (vip, port), flags, payload)));
        let back = |flags, payload: &[u8]| Frame((true, tcp(pod, client, flags, payload)));
        let handed_on = |port, flags| {
            let frame = tcp(client, (vip, port), flags, b"");
            Frame((false, from_peer(frame)))
        };
        let begin = || begun(client, vip, pod).into_iter().map(Frame).collect();
        let by_peer = || {
            vec![
                handed_on(INSTANCE, TCP_SYN),
                back(TCP_SYN | TCP_ACK, b""),
                back(TCP_ACK, b"HTTP/1.1 200 OK\r\n\r\n"),
            ]
        };
        let mut add = |name: &str, parts: [Vec<Next>; 2]| {
            let all_parts = parts.into_iter().flatten().collect();
            all.push((format!("{name}-v{version}"), all_parts));
        };
        let ack = |port| there(port, TCP_ACK, b"more");
        let syn = |port| there(port, TCP_SYN, b"");
        let turn = Next::Turn;

        let gone = vec![
            turn(Turn::Gone),
            back(TCP_ACK, b"last"),
            ack(INSTANCE),
            syn(INSTANCE),
        ];
        add("gone", [begin(), gone]);
        let young = vec![
            syn(INSTANCE),
            turn(Turn::Gone),
            ack(INSTANCE),
            back(TCP_ACK, b""),
        ];
        add("gone-young", [young, vec![]]);
        let unanswered = vec![turn(Turn::Gone), handed_on(INSTANCE, TCP_ACK)];
        add("gone-handed-on", [by_peer(), unanswered]);
        let answered = vec![
            turn(Turn::Gone),
            turn(Turn::Neighbor),
            handed_on(INSTANCE, TCP_ACK),
        ];
        add("gone-neighbor", [by_peer(), answered]);
        let replaced = vec![turn(Turn::Replaced), syn(INSTANCE), ack(INSTANCE)];
        add("replaced", [begin(), replaced]);
        let unready = vec![turn(Turn::Unready), ack(INSTANCE), syn(INSTANCE)];
        add("unready", [begin(), unready]);
        let unready = vec![
            syn(INSTANCE),
            turn(Turn::Unready),
            syn(INSTANCE),
            ack(INSTANCE),
        ];
        add("unready-young", [unready, vec![]]);

        let full = vec![
            syn(INSTANCE),
            back(TCP_SYN | TCP_ACK, b""),
            turn(Turn::Full),
            back(TCP_ACK, b"HTTP/1.1 200 OK\r\n\r\n"),
            ack(INSTANCE),
            syn(API),
        ];
        add("full", [full, vec![]]);
        add("limited", [vec![turn(Turn::Limited), syn(EMPTY)], vec![]]);
        add("torn", [vec![turn(Turn::Torn), syn(API), ack(API)], vec![]]);
        let lost = vec![
            turn(Turn::NoRoom),
            syn(INSTANCE),
            ack(INSTANCE),
            syn(REMOTE),
        ];
        add("no-room", [lost, vec![]]);

        // All ports that are tried for the client are in use through the instance port.
        let first = port_to(pod.0, client.0, vip, IMAGES);
        let ports = std::iter::successors(Some(first), |port| Some(next_port(*port)));
        let from = |from, port| {
            let frame = tcp((client.0, from), (vip, port), TCP_SYN, b"");
            Frame((false, frame))
        };
        let taken = ports.take(5).map(|port| from(port, INSTANCE)).collect();
        add("collision", [taken, vec![from(first, IMAGES)]]);

        let refused = tcp(pod, (client.0, first), TCP_RST | TCP_ACK, b"");
        let spared = vec![
            from(first, IMAGES),
            Frame((true, refused)),
            from(first, IMAGES),
            from(first, INSTANCE),
        ];
        add("spared", [spared, vec![]]);

        let shown = tcp((vip, API), client, TCP_ACK, b"too long");
        let told = vec![
            turn(Turn::Told),
            syn(API),
            ack(API),
            Frame((false, too_big(router, vip, &shown, 48, false))),
            turn(Turn::PeerFails),
            syn(API),
        ];
        add("told", [told, vec![]]);
        let fails = vec![turn(Turn::PeerFails), ack(REMOTE), syn(REMOTE)];
        add("peer-fails", [fails, vec![]]);
        let unknown = vec![
            syn(REMOTE),
            turn(Turn::PeerUnknown),
            ack(REMOTE),
            handed_on(INSTANCE, TCP_ACK),
        ];
        add("peer-unknown", [unknown, vec![]]);
        let settling = vec![
            turn(Turn::Settling),
            ack(EMPTY),
            ack(UNUSED),
            ack(INSTANCE),
            back(TCP_RST, b""),
        ];
        add("settling", [settling, vec![]]);

        let sent = tcp(client, pod, TCP_ACK, b"a long request");
        let error = || Frame((true, too_big(router, client.0, &sent, 200, true)));
        let redirected = || {
            vec![
                turn(Turn::OtherUplink),
                back(TCP_ACK, b"more"),
                error(),
                back(TCP_RST, b""),
            ]
        };
        add("other-uplink", [begin(), redirected()]);
        add("other-uplink-by-peer", [by_peer(), redirected()]);
        let restored = vec![
            turn(Turn::LostReplies),
            back(TCP_ACK, b"more"),
            back(TCP_FIN | TCP_ACK, b""),
            there(INSTANCE, TCP_FIN | TCP_ACK, b""),
        ];
        add("lost-replies", [begin(), restored]);
        let lost = vec![turn(Turn::LostFlows), ack(INSTANCE), back(TCP_ACK, b"more")];
        add("lost-flows", [begin(), lost]);
        let lost = vec![
            turn(Turn::LostYoung),
            there(INSTANCE, TCP_RST, b""),
            turn(Turn::Later),
            back(TCP_ACK, b"more"),
        ];
        add("claimed-long-ago", [begin(), lost]);
        let direct = || Frame((false, tcp(client, pod, TCP_SYN, b"")));
        let allowed = vec![turn(Turn::Allowed), direct(), back(TCP_SYN | TCP_ACK, b"")];
        add("allowed", [allowed, vec![]]);
        let on_host = vec![turn(Turn::OnHost), direct(), back(TCP_SYN | TCP_ACK, b"")];
        add("on-host", [on_host, vec![]]);
        let question = if is_v6 {
            solicitation(CLIENT6)
        } else {
            arp(CLIENT, VIP)
        };
        let silent = vec![
            turn(Turn::Silent),
            Frame((false, question)),
            Frame((false, echo(is_v6))),
            syn(API),
        ];
        add("silent", [silent, vec![]]);
    }
    // To a VIP that somebody else announces, what is not balanced.
    let client = (IpAddr::from(CLIENT), PORT);
    let other = |port| (IpAddr::from(VIP_OF_OTHERS), port);
    let mut fragment = tcp(client, other(API), TCP_ACK, b"a part");
    fragment[20..22].copy_from_slice(&[0x20, 0]);
    let external = vec![
        Frame((false, tcp(client, other(UNUSED), TCP_SYN, b""))),
        Frame((false, udp(client, other(53), CLIENT_MAC, b"name"))),
        Frame((false, fragment)),
    ];
    all.push(("external".to_owned(), external));
    // As a local sender leaves it to a device; its answer would have no options where the device begins to sum.
    let mut bare = with_options(tcp(client, (VIP.into(), EMPTY), TCP_SYN, b""), 2);
    leave_sum(&mut bare);
    all.push((
        "bare-sum-and-options".to_owned(),
        vec![Frame((false, bare))],
    ));
    all
}

/// All of them, by the names of their files: at XDP as wires bring them, and at TC as skbs of all kinds.
pub fn seeds() -> Vec<(String, Written)> {
    let mut seeds = Vec::new();
    let plain = plain().into_iter().map(|(name, frames)| {
        let steps = frames.into_iter().map(Frame).collect();
        (name, steps)
    });
    for (name, steps) in plain.chain(turned()) {
        let mut at_xdp = Written::new();
        let mut at_tc = Written::new();
        for (at, step) in steps.into_iter().enumerate() {
            let (is_out, frame) = match step {
                Frame(sent) => sent,
                Next::Turn(taken) => {
                    at_xdp.push(turn(taken));
                    at_tc.push(turn(taken));
                    continue;
                }
            };
            at_xdp.push((if is_out { EGRESS } else { XDP }, frame.clone()));
            // Tag, sum and what is at hand: another combination for every step.
            let kind = (at as u8)
                .wrapping_mul(0b0010_1100)
                .wrapping_add(0b0010_1000);
            at_tc.push((kind | if is_out { EGRESS } else { INGRESS }, frame));
        }
        seeds.push((format!("{name}-xdp"), at_xdp));
        seeds.push((format!("{name}-tc"), at_tc));
    }
    seeds
}
