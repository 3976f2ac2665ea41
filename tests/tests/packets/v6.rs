//! The same over IPv6, where it is not the same: headers, checksums, extension headers, neighbor discovery.

use std::net::Ipv6Addr;

use etherparse::{NetHeaders, PacketHeaders, TransportHeader};

use super::*;

pub const CLIENT6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x22, 0, 0, 0, 0, 0, 0x100);
pub const VIP6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x22, 0, 0, 0, 0, 0, 2);
pub const POD6: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0xfd00, 0x244, 0, 0, 0, 0, 0, 0x10),
    Ipv6Addr::new(0xfd00, 0x244, 0, 0, 0, 0, 0, 0x11),
];
const NEIGHBOR: u8 = 58;

pub fn engine6() -> Engine {
    let mut engine = Engine::load(64).expect("the object loads");
    let mut uplink = uplink(1, UPLINK_FORWARD | UPLINK_BYPASS_DROP);
    uplink.vip_filter.insert(&Addr::from(VIP6));
    engine.set_uplink(0, uplink).expect("writes");
    engine.set_vip(VIP6, vip()).expect("writes");
    engine
        .serve(&[
            (VIP6, API, &[(POD6[0], API), (POD6[1], API)]),
            (VIP6, INSTANCE, &[(POD6[1], IMAGES)]),
            (VIP6, INSTANCE + 9, &[]),
        ])
        .expect("writes");
    engine
}

/// Headers between the fixed one and TCP, as bytes whose first says what follows, from the first header's number on.
#[derive(Clone, Default)]
struct Extensions {
    first: u8,
    bytes: Vec<u8>,
}

impl Extensions {
    /// Puts one of a number and of so many units of 8 bytes before the rest.
    fn before(self, number: u8, units: u8) -> Self {
        let next = if self.bytes.is_empty() { 6 } else { self.first };
        let mut bytes = vec![0; usize::from(units) * 8];
        bytes[0] = next;
        bytes[1] = units - 1;
        bytes.extend(self.bytes);
        Self {
            first: number,
            bytes,
        }
    }

    /// A routing header with so many segments left.
    fn routed(self, segments: u8) -> Self {
        let mut all = self.before(43, 1);
        all.bytes[3] = segments;
        all
    }

    /// A fragment header with an offset and the more-fragments flag.
    fn fragment(self, offset: u16, more: bool) -> Self {
        let mut all = self.before(44, 1);
        all.bytes[1] = 0;
        all.bytes[2..4].copy_from_slice(&(offset << 3 | u16::from(more)).to_be_bytes());
        all
    }
}

fn tcp6(from: (Ipv6Addr, u16), to: (Ipv6Addr, u16), flags: u8, extensions: &Extensions) -> Vec<u8> {
    let (source, destination) = macs(from.0 == CLIENT6);
    let header = tcp_header(from.1, to.1, flags);
    let builder = PacketBuilder::ethernet2(source, destination)
        .ipv6(from.0.octets(), to.0.octets(), 64)
        .tcp_header(header);
    let payload: &[u8] = if flags == TCP_SYN { b"" } else { b"data" };
    let mut bytes = Vec::new();
    builder.write(&mut bytes, payload).expect("writes");
    if !extensions.bytes.is_empty() {
        bytes[14 + 6] = extensions.first;
        let length = u16::from_be_bytes([bytes[18], bytes[19]]) + extensions.bytes.len() as u16;
        bytes[18..20].copy_from_slice(&length.to_be_bytes());
        bytes.splice(54..54, extensions.bytes.iter().copied());
    }
    bytes
}

fn to_vip6(port: u16, flags: u8) -> Vec<u8> {
    tcp6((CLIENT6, PORT), (VIP6, port), flags, &Extensions::default())
}

/// Ends, hop limit and flags of a TCP packet whose checksum an independent library finds right.
#[track_caller]
pub fn checked6(frame: &[u8]) -> ((Ipv6Addr, u16), (Ipv6Addr, u16), u8, TcpHeader) {
    let packet = PacketHeaders::from_ethernet_slice(frame).expect("parses");
    let Some(NetHeaders::Ipv6(ip, _)) = packet.net else {
        panic!("not IPv6: {frame:02x?}")
    };
    let Some(TransportHeader::Tcp(tcp)) = packet.transport else {
        panic!("not TCP: {frame:02x?}")
    };
    let sum = tcp
        .calc_checksum_ipv6(&ip, packet.payload.slice())
        .expect("short");
    assert_eq!(tcp.checksum, sum, "TCP checksum");
    (
        (ip.source.into(), tcp.source_port),
        (ip.destination.into(), tcp.destination_port),
        ip.hop_limit,
        tcp,
    )
}

#[test]
fn a_dialogue_over_ipv6_reaches_one_pod_and_comes_back_from_the_vip() {
    for name in FORWARD {
        let mut engine = engine6();
        let frame = to_vip6(API, TCP_SYN);
        let syn = run(&mut engine, name, &frame, Verdict::ForwardedNew);
        let (client, pod, limit, _) = checked6(&syn.frame);
        assert_eq!(
            (client, limit),
            ((CLIENT6, PORT), 64),
            "the kernel routes it"
        );
        assert!(POD6.contains(&pod.0) && pod.1 == API);
        // As a host would have sent it there: nothing but ends and sum differs.
        let plain = Extensions::default();
        assert_eq!(syn.frame, tcp6(client, pod, TCP_SYN, &plain));
        let answer = |flags| tcp6(pod, (CLIENT6, PORT), flags, &Extensions::default());
        let back = run(
            &mut engine,
            program::EGRESS,
            &answer(TCP_SYN | TCP_ACK),
            Verdict::RepliedYoung,
        );
        let flags = TCP_SYN | TCP_ACK;
        assert_eq!(back.frame, tcp6((VIP6, API), client, flags, &plain));
        run(
            &mut engine,
            program::EGRESS,
            &answer(TCP_ACK),
            Verdict::RepliedYoung,
        );
        for _ in 0..2 {
            let data = run(
                &mut engine,
                name,
                &to_vip6(API, TCP_ACK),
                Verdict::Forwarded,
            );
            assert_eq!(checked6(&data.frame).1, pod);
            let back = run(
                &mut engine,
                program::EGRESS,
                &answer(TCP_ACK),
                Verdict::Replied,
            );
            let (vip, client, ..) = checked6(&back.frame);
            assert_eq!((vip, client), ((VIP6, API), (CLIENT6, PORT)));
        }
        let key = FlowKey::forward(Addr::from(CLIENT6), PORT, Addr::from(VIP6), API);
        assert!(engine.flow(map::LIVING, &key).expect("reads").is_some());
    }
}

/// Brings a flow to the VIP to life and returns its pod.
pub fn establish6(engine: &mut Engine, name: &str, port: u16) -> (Ipv6Addr, u16) {
    let syn = run(engine, name, &to_vip6(port, TCP_SYN), Verdict::ForwardedNew);
    let pod = checked6(&syn.frame).1;
    let answer = tcp6(pod, (CLIENT6, PORT), TCP_ACK, &Extensions::default());
    run(engine, program::EGRESS, &answer, Verdict::RepliedYoung);
    pod
}

#[test]
fn refusals_over_ipv6_are_what_the_client_accepts() {
    for name in FORWARD {
        let mut engine = engine6();
        for (port, verdict) in [
            (INSTANCE + 9, Verdict::RefusedNoBackend),
            (6189, Verdict::RefusedNoService),
        ] {
            // Whatever stands between the headers: what goes back has nothing of it.
            for extensions in [
                Extensions::default(),
                Extensions::default().before(60, 2).before(0, 1),
            ] {
                let syn = tcp6((CLIENT6, PORT), (VIP6, port), TCP_SYN, &extensions);
                let reset = run(&mut engine, name, &syn, verdict);
                assert_eq!(reset.frame.len(), 14 + 40 + 20);
                assert_eq!(reset.frame[..12], [CLIENT_MAC, NODE_MAC].concat());
                let (vip, client, limit, tcp) = checked6(&reset.frame);
                assert_eq!((vip, client), ((VIP6, port), (CLIENT6, PORT)));
                assert_eq!((tcp.rst, tcp.ack, limit), (true, true, 64));
                assert_eq!(tcp.acknowledgment_number, 1001);
            }
            let ack = run(&mut engine, name, &to_vip6(port, TCP_ACK), verdict);
            let (.., tcp) = checked6(&ack.frame);
            assert_eq!((tcp.rst, tcp.ack, tcp.sequence_number), (true, false, 77));
        }
    }
}

#[test]
fn tcp_is_found_behind_extension_headers() {
    let plain = Extensions::default;
    for name in FORWARD {
        let mut engine = engine6();
        for (number, extensions) in (PORT..).zip([
            plain().before(0, 1),
            plain().before(60, 3).before(43, 2).before(0, 1),
            plain().before(60, 32),
            // RFC 6946: a fragment of nothing else is whole.
            plain().fragment(0, false),
            plain()
                .before(60, 1)
                .fragment(0, false)
                .before(43, 1)
                .before(0, 1),
        ]) {
            let frame = tcp6((CLIENT6, number), (VIP6, API), TCP_SYN, &extensions);
            let there = run(&mut engine, name, &frame, Verdict::ForwardedNew).frame;
            let between = 54..54 + extensions.bytes.len();
            assert_eq!(frame[between.clone()], there[between], "they stay");
            let (client, pod, ..) = checked6(&there);
            assert_eq!(client, (CLIENT6, number));
            let answer = tcp6(pod, client, TCP_SYN | TCP_ACK, &extensions);
            let back = run(&mut engine, program::EGRESS, &answer, Verdict::RepliedYoung);
            assert_eq!(checked6(&back.frame).0, (VIP6, API));
        }
    }
}

#[test]
fn what_hides_tcp_is_dropped_by_name() {
    let plain = Extensions::default;
    let mut cut = tcp6((CLIENT6, PORT), (VIP6, API), TCP_SYN, &plain().before(0, 1));
    cut[14 + 40 + 1] = 200;
    let frame = |extensions| tcp6((CLIENT6, PORT), (VIP6, API), TCP_SYN, &extensions);
    let mut short = to_vip6(API, TCP_SYN);
    short[18..20].copy_from_slice(&19_u16.to_be_bytes());
    for name in FORWARD {
        let mut engine = engine6();
        for (frame, verdict) in [
            (frame(plain().fragment(0, true)), Verdict::DroppedFragment),
            (frame(plain().fragment(8, true)), Verdict::DroppedFragment),
            (
                frame(plain().before(60, 1).fragment(8, false)),
                Verdict::DroppedFragment,
            ),
            // On its way to somewhere else: the pod would answer for itself.
            (frame(plain().routed(1)), Verdict::DroppedProtocol),
            // Encrypted, or more headers than anybody needs.
            (frame(plain().before(50, 1)), Verdict::DroppedProtocol),
            (
                frame(
                    plain()
                        .before(60, 1)
                        .before(60, 1)
                        .before(60, 1)
                        .before(60, 1)
                        .before(60, 1),
                ),
                Verdict::DroppedProtocol,
            ),
            (cut.clone(), Verdict::DroppedMalformed),
            (short.clone(), Verdict::DroppedMalformed),
        ] {
            untouched(&mut engine, name, &frame, verdict);
        }
    }
}

#[test]
fn an_ipv6_packet_is_never_taken_for_one_of_a_mapped_ipv4_vip() {
    for name in FORWARD {
        let mut engine = engine();
        let mapped = VIP.to_ipv6_mapped();
        let frame = tcp6(
            (CLIENT6, PORT),
            (mapped, API),
            TCP_SYN,
            &Extensions::default(),
        );
        untouched(&mut engine, name, &frame, Verdict::Passed);
        let mut engine = engine6();
        for source in [
            CLIENT.to_ipv6_mapped(),
            Ipv6Addr::LOCALHOST,
            Ipv6Addr::UNSPECIFIED,
            VIP6,
            Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1),
        ] {
            let mut frame = tcp6((source, PORT), (VIP6, API), TCP_SYN, &Extensions::default());
            frame[..12].copy_from_slice(&[NODE_MAC, CLIENT_MAC].concat());
            untouched(&mut engine, name, &frame, Verdict::DroppedSource);
        }
    }
}

#[test]
fn a_flow_over_ipv6_of_another_nodes_pod_loses_a_hop_and_nothing_else() {
    use lb_common::layout::{MAX_PEER_ADDRS, PEER_REFLECTS, Peer};
    const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 12];
    let peer6 = Ipv6Addr::new(0xfd00, 0x22, 0, 0, 0, 0, 0, 0x12);
    let mut addrs = [Addr::UNSPECIFIED; MAX_PEER_ADDRS];
    addrs[2] = Addr::from(peer6);
    let peer = Peer {
        mac: PEER_MAC,
        flags: PEER_REFLECTS,
        addrs,
    };
    for name in FORWARD {
        let mut engine = engine6();
        engine.set_peer(3, peer, &[0, 1]).expect("writes");
        let syn = to_vip6(API, TCP_SYN);
        let there = run(&mut engine, name, &syn, Verdict::HandedOnNew).frame;
        assert_eq!(there[..12], [PEER_MAC, NODE_MAC].concat());
        assert_eq!(there[14 + 7], 63, "hop limit");
        assert_eq!(there[14..14 + 7], syn[14..14 + 7]);
        assert_eq!(there[14 + 8..], syn[14 + 8..]);
        let mut last_hop = to_vip6(API, TCP_ACK);
        last_hop[14 + 7] = 1;
        untouched(&mut engine, name, &last_hop, Verdict::DroppedTtl);
        // The second node: for its own pods alone, and never on again.
        let mut engine = engine6();
        engine.set_peer(3, peer, &[0]).expect("writes");
        let mut handed = to_vip6(API, TCP_SYN);
        handed[6..12].copy_from_slice(&PEER_MAC);
        let here = run(&mut engine, name, &handed, Verdict::ForwardedNew);
        assert_eq!(checked6(&here.frame).1, (POD6[1], API));
        let mut own = tcp6(
            (peer6, PORT),
            (VIP6, INSTANCE + 9),
            TCP_SYN,
            &Extensions::default(),
        );
        own[..12].copy_from_slice(&[NODE_MAC, PEER_MAC].concat());
        run(&mut engine, name, &own, Verdict::RefusedNoBackend);
    }
}

/// A neighbor message with its checksum and an option of that type and of 8 bytes.
fn neighbor(
    (kind, flags): (u8, u32),
    (from, to): (Ipv6Addr, Ipv6Addr),
    target: Ipv6Addr,
    option: Option<u8>,
) -> Vec<u8> {
    let mut message = vec![kind, 0, 0, 0];
    message.extend(flags.to_be_bytes());
    message.extend(target.octets());
    if let Some(option) = option {
        message.extend([option, 1]);
        message.extend(CLIENT_MAC);
    }
    let mac = match to.octets() {
        [0xff, .., a, b, c, d] => [0x33, 0x33, a, b, c, d],
        _ => NODE_MAC,
    };
    let mut frame = [&mac[..], &CLIENT_MAC, &[0x86, 0xdd]].concat();
    let length = message.len() as u16;
    frame.extend([0x60, 0, 0, 0]);
    frame.extend(length.to_be_bytes());
    frame.extend([NEIGHBOR, 255]);
    frame.extend(from.octets());
    frame.extend(to.octets());
    let pseudo = [
        &from.octets()[..],
        &to.octets(),
        &[0, 0],
        &length.to_be_bytes(),
        &[0, 0, 0, NEIGHBOR],
        &message,
    ];
    let mut sum = 0_u32;
    for pair in pseudo.concat().chunks(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], pair[1]]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    message[2..4].copy_from_slice(&(!sum as u16).to_be_bytes());
    frame.extend(message);
    frame
}

const SOLICITATION: (u8, u32) = (135, 0);
const SOLICITED_NODE: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 2);
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// Options with the MAC of the sender, and of the target; a nonce (RFC 3971).
const SOURCE_MAC: u8 = 1;
const TARGET_MAC: u8 = 2;
const NONCE: u8 = 14;

/// Asserts that a frame is the advertisement of the VIP with our MAC; where it goes, and its flags.
#[track_caller]
fn advertised(frame: &[u8]) -> ([u8; 6], Ipv6Addr, u8) {
    let packet = PacketHeaders::from_ethernet_slice(frame).expect("parses");
    let Some(NetHeaders::Ipv6(ip, _)) = packet.net else {
        panic!("not IPv6")
    };
    let Some(TransportHeader::Icmpv6(message)) = packet.transport else {
        panic!("not ICMPv6")
    };
    let payload = packet.payload.slice();
    let sum = message
        .icmp_type
        .calc_checksum(ip.source, ip.destination, payload)
        .expect("short");
    assert_eq!(message.checksum, sum, "checksum");
    assert_eq!((ip.hop_limit, ip.source), (255, VIP6.octets()));
    assert_eq!(frame.len(), 14 + 72);
    assert_eq!(frame[6..12], NODE_MAC);
    assert_eq!(frame[54..56], [136, 0]);
    assert_eq!(frame[62..78], VIP6.octets(), "target");
    assert_eq!(frame[78..], [&[TARGET_MAC, 1][..], &NODE_MAC].concat());
    let to = frame[..6].try_into().expect("six");
    (to, ip.destination.into(), frame[58])
}

#[test]
fn neighbors_are_told_where_the_vip_is_until_the_deadline() {
    const SOLICITED_OVERRIDE: u8 = 0x60;
    const OVERRIDE: u8 = 0x20;
    let asks = |from, to, option| neighbor(SOLICITATION, (from, to), VIP6, option);
    for name in FORWARD {
        let mut engine = engine6();
        for question in [
            asks(CLIENT6, SOLICITED_NODE, Some(SOURCE_MAC)),
            asks(CLIENT6, SOLICITED_NODE, None),
            // To see whether it is still there (RFC 4861 section 7.3.3).
            asks(CLIENT6, VIP6, Some(SOURCE_MAC)),
            asks(CLIENT6, VIP6, None),
        ] {
            let answer = run(&mut engine, name, &question, Verdict::NdAnswered);
            let told = advertised(&answer.frame);
            assert_eq!(told, (CLIENT_MAC, CLIENT6, SOLICITED_OVERRIDE));
        }
        // Before somebody uses the address as its own.
        for option in [None, Some(NONCE)] {
            let question = asks(Ipv6Addr::UNSPECIFIED, SOLICITED_NODE, option);
            let answer = run(&mut engine, name, &question, Verdict::NdAnswered);
            let to_all = ([0x33, 0x33, 0, 0, 0, 1], ALL_NODES, OVERRIDE);
            assert_eq!(advertised(&answer.frame), to_all);
        }
        let other = neighbor(SOLICITATION, (CLIENT6, SOLICITED_NODE), POD6[0], None);
        untouched(&mut engine, name, &other, Verdict::Passed);
        let question = asks(CLIENT6, SOLICITED_NODE, Some(SOURCE_MAC));
        let silent = Vip {
            answer_until: 1,
            ..vip()
        };
        engine.set_vip(VIP6, silent).expect("writes");
        untouched(&mut engine, name, &question, Verdict::DroppedNdSilent);
        let external = Vip {
            flags: VIP_EXTERNAL,
            ..silent
        };
        engine.set_vip(VIP6, external).expect("writes");
        untouched(&mut engine, name, &question, Verdict::Passed);
    }
}

#[test]
fn neighbor_messages_that_are_not_valid_or_claim_the_vip_are_consumed() {
    const ADVERTISEMENT: (u8, u32) = (136, 1 << 29);
    for name in FORWARD {
        let mut engine = engine6();
        let good = neighbor(
            SOLICITATION,
            (CLIENT6, SOLICITED_NODE),
            VIP6,
            Some(SOURCE_MAC),
        );
        let mut routed = good.clone();
        routed[14 + 7] = 254;
        let mut sum = good.clone();
        sum[56] ^= 1;
        let mut code = good.clone();
        code[55] = 1;
        code[57] -= 1;
        let mut length = good.clone();
        length.truncate(good.len() - 1);
        length[19] -= 1;
        let unicast = neighbor(SOLICITATION, (Ipv6Addr::UNSPECIFIED, VIP6), VIP6, None);
        for frame in [routed, sum, code, length, unicast] {
            untouched(&mut engine, name, &frame, Verdict::DroppedNdInvalid);
        }
        let claim = neighbor(ADVERTISEMENT, (VIP6, ALL_NODES), VIP6, Some(TARGET_MAC));
        untouched(&mut engine, name, &claim, Verdict::DroppedNdClaim);
        run(&mut engine, name, &good, Verdict::NdAnswered);
    }
}

#[test]
fn source_ranges_are_of_one_version_of_ip_each() {
    let key = ServiceKey::new(Addr::from(VIP6), API);
    let syn = to_vip6(API, TCP_SYN);
    let cases: [(&str, u8, Verdict); 6] = [
        ("0.0.0.0", 0, Verdict::RefusedSource),
        ("::", 0, Verdict::ForwardedNew),
        ("fd00:22::", 64, Verdict::ForwardedNew),
        ("fd00:22::100", 128, Verdict::ForwardedNew),
        ("fd00:22::101", 128, Verdict::RefusedSource),
        ("fd00:23::", 32, Verdict::RefusedSource),
    ];
    for (address, length, verdict) in cases {
        let mut engine = engine6();
        let range = (address.parse().expect("an address"), length);
        engine.admit(key, 1, &[range]).expect("writes");
        let outcome = run(&mut engine, program::XDP, &syn, verdict);
        if verdict == Verdict::RefusedSource {
            let (client, ..) = checked6(&outcome.frame);
            assert_eq!(client, (VIP6, API));
        }
    }
    // Not even all of IPv6 contains an IPv4 client, though addresses of IPv4 are kept mapped.
    let mut engine = engine();
    let key = ServiceKey::new(Addr::from(VIP), API);
    engine
        .admit(key, 1, &[("::".parse().expect("an address"), 0)])
        .expect("writes");
    run(
        &mut engine,
        program::XDP,
        &to_vip(API, TCP_SYN),
        Verdict::RefusedSource,
    );
}
