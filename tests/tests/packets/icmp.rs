//! ICMP: errors find the pod, or the client, by the packet that they quote, and that is what its sender sent.

use etherparse::{Icmpv4Type, IpNumber, icmpv4};

use super::v6::{CLIENT6, POD6, VIP6, checked6, engine6, establish6};
use super::*;

const ROUTER: Ipv4Addr = Ipv4Addr::new(172, 22, 0, 200);
/// Of the small link.
const MTU: u16 = 1400;

/// The sum of 16-bit words (RFC 1071) over parts of even lengths; 0xffff where a checksum among them is right.
fn sum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0_u32;
    for pair in parts.concat().chunks(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Fragmentation needed, from a router to `to`, about a frame of which so many bytes of the packet are quoted.
fn too_big(to: Ipv4Addr, about: &[u8], quoted: usize) -> Vec<u8> {
    let quote = &about[14..about.len().min(14 + quoted)];
    let kind =
        Icmpv4Type::DestinationUnreachable(icmpv4::DestUnreachableHeader::FragmentationNeeded {
            next_hop_mtu: MTU,
        });
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(CLIENT_MAC, NODE_MAC)
        .ipv4(ROUTER.octets(), to.octets(), 64)
        .icmpv4(kind)
        .write(&mut frame, quote)
        .expect("writes");
    frame
}

/// Asserts that all sums of an error over IPv4 are right, those of the quoted packet too, if it is whole; the frame that
/// is quoted, with a link layer before it.
#[track_caller]
fn quoted_of(frame: &[u8], is_whole: bool) -> Vec<u8> {
    assert_eq!(sum(&[&frame[14..34]]), 0xffff, "IP");
    assert_eq!(sum(&[&frame[34..]]), 0xffff, "ICMP");
    assert_eq!(sum(&[&frame[42..62]]), 0xffff, "quoted IP");
    let quoted = [&[0; 12][..], &[8, 0], &frame[42..]].concat();
    if is_whole {
        checked(&quoted);
    }
    quoted
}

/// Source and destination, addresses and ports, of a frame with TCP over IPv4, whatever its sums.
fn plain_ends(frame: &[u8]) -> ((Ipv4Addr, u16), (Ipv4Addr, u16)) {
    let address =
        |at: usize| Ipv4Addr::from([frame[at], frame[at + 1], frame[at + 2], frame[at + 3]]);
    let port = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    ((address(26), port(34)), (address(30), port(36)))
}

#[test]
fn an_error_about_a_reply_reaches_its_pod_as_if_the_pods_own_packet_had_met_it() {
    for name in FORWARD {
        let mut engine = engine();
        let pod = establish(&mut engine, name, API);
        let reply = tcp((VIP, API), (CLIENT, PORT), TCP_ACK, b"too long");
        for (quoted, is_whole) in [(28, false), (48, true)] {
            let error = too_big(VIP, &reply, quoted);
            let there = run(&mut engine, name, &error, Verdict::ForwardedIcmp).frame;
            assert_eq!(there.len(), error.len());
            assert_eq!(there[26..34], [ROUTER.octets(), pod.0.octets()].concat());
            assert_eq!(there[34..36], error[34..36], "type and code");
            assert_eq!(there[38..42], error[38..42], "MTU");
            let quoted = quoted_of(&there, is_whole);
            assert_eq!(plain_ends(&quoted), (pod, (CLIENT, PORT)));
        }
        // Whoever it comes from, it does not make a flow, nor look like the client's.
        let flow = living(&mut engine, API).expect("lives");
        assert_eq!(flow.last_hop, CLIENT_MAC);
    }
}

#[test]
fn errors_about_other_packets_are_dropped_by_name() {
    for name in FORWARD {
        let mut engine = engine();
        let stranger = tcp((VIP, API), (CLIENT, 55), TCP_ACK, b"");
        let error = too_big(VIP, &stranger, 48);
        untouched(&mut engine, name, &error, Verdict::DroppedIcmpUnknown);
        // Not what the VIP has sent.
        let other = tcp((POD0, API), (CLIENT, PORT), TCP_ACK, b"");
        let error = too_big(VIP, &other, 48);
        untouched(&mut engine, name, &error, Verdict::DroppedProtocol);
        // Less than the ports.
        let cut = too_big(VIP, &stranger, 22);
        untouched(&mut engine, name, &cut, Verdict::DroppedProtocol);
        // Ports of one of our flows, but behind the packet, where a short frame has padding.
        establish(&mut engine, name, API);
        let ours = tcp((VIP, API), (CLIENT, PORT), TCP_ACK, b"");
        let mut padded = too_big(VIP, &ours, 20);
        padded.extend_from_slice(&ours[34..38]);
        untouched(&mut engine, name, &padded, Verdict::DroppedProtocol);
        let mut later = too_big(VIP, &stranger, 48);
        later[20..22].copy_from_slice(&[0x20, 0]);
        untouched(&mut engine, name, &later, Verdict::DroppedFragment);
        let udp = {
            let mut frame = udp((VIP, 69), 1234);
            frame[26..34].copy_from_slice(&[VIP.octets(), CLIENT.octets()].concat());
            too_big(VIP, &frame, 48)
        };
        untouched(&mut engine, name, &udp, Verdict::DroppedProtocol);
    }
}

#[test]
fn an_error_about_a_clients_packet_leaves_with_the_vip_instead_of_the_pod() {
    for name in FORWARD {
        let mut engine = engine();
        let pod = establish(&mut engine, name, API);
        let there = tcp((CLIENT, PORT), pod, TCP_ACK, b"too long");
        // From the pod, or from the node on its way.
        for from in [pod.0, Ipv4Addr::new(172, 22, 0, 11)] {
            let mut error = too_big(CLIENT, &there, 48);
            error[26..30].copy_from_slice(&from.octets());
            error[24..26].fill(0);
            let fresh = !sum(&[&error[14..34]]);
            error[24..26].copy_from_slice(&fresh.to_be_bytes());
            let out = run(&mut engine, program::EGRESS, &error, Verdict::RepliedIcmp).frame;
            assert_eq!(out[26..34], [VIP.octets(), CLIENT.octets()].concat());
            let quoted = quoted_of(&out, true);
            assert_eq!(plain_ends(&quoted), ((CLIENT, PORT), (VIP, API)));
            assert_eq!(
                quoted[14..],
                to_vip_long(API)[14..],
                "as the client sent it"
            );
        }
        // The node's own business.
        let other = too_big(CLIENT, &tcp((CLIENT, 55), pod, TCP_ACK, b""), 48);
        untouched(&mut engine, program::EGRESS, &other, Verdict::Passed);
    }
}

fn to_vip_long(port: u16) -> Vec<u8> {
    tcp((CLIENT, PORT), (VIP, port), TCP_ACK, b"too long")
}

#[test]
fn an_error_about_a_flow_of_another_node_goes_to_that_node() {
    use lb_common::layout::{MAX_PEER_ADDRS, PEER_REFLECTS, Peer};
    const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 12];
    let peer = Peer {
        mac: PEER_MAC,
        flags: PEER_REFLECTS,
        addrs: [Addr::UNSPECIFIED; MAX_PEER_ADDRS],
    };
    let reply = tcp((VIP, API), (CLIENT, PORT), TCP_ACK, b"too long");
    let error = too_big(VIP, &reply, 48);
    for name in FORWARD {
        let mut engine = engine();
        engine.set_peer(3, peer, &[0, 1]).expect("writes");
        let there = run(&mut engine, name, &error, Verdict::HandedOnMiss).frame;
        assert_eq!(there[..12], [PEER_MAC, NODE_MAC].concat());
        assert_eq!(there[34..], error[34..]);
        let key = forward_key(API);
        engine.set_exception(&key, 3).expect("writes");
        run(&mut engine, name, &error, Verdict::HandedOnException);
        // There it is for a pod of that node, or for nobody.
        let mut handed = error.clone();
        handed[6..12].copy_from_slice(&PEER_MAC);
        untouched(&mut engine, name, &handed, Verdict::DroppedNotHere);
    }
}

#[test]
fn a_ping_is_answered_while_the_vip_is_announced() {
    let mut ping = Vec::new();
    PacketBuilder::ethernet2(CLIENT_MAC, NODE_MAC)
        .ipv4(CLIENT.octets(), VIP.octets(), 17)
        .icmpv4_echo_request(7, 1)
        .write(&mut ping, b"hello")
        .expect("writes");
    let mut ping6 = Vec::new();
    PacketBuilder::ethernet2(CLIENT_MAC, NODE_MAC)
        .ipv6(CLIENT6.octets(), VIP6.octets(), 17)
        .icmpv6_echo_request(7, 1)
        .write(&mut ping6, b"hello!")
        .expect("writes");
    for name in FORWARD {
        let mut engine = engine();
        let answer = run(&mut engine, name, &ping, Verdict::EchoAnswered).frame;
        assert_eq!(answer[..12], [CLIENT_MAC, NODE_MAC].concat());
        assert_eq!(answer[26..34], [VIP.octets(), CLIENT.octets()].concat());
        assert_eq!((answer[22], answer[34], answer[35]), (64, 0, 0));
        assert_eq!(sum(&[&answer[14..34]]), 0xffff, "IP");
        assert_eq!(sum(&[&answer[34..]]), 0xffff, "ICMP");
        assert_eq!(answer[38..], ping[38..], "identifier, sequence and data");
        let silent = Vip {
            answer_until: 1,
            ..vip()
        };
        engine.set_vip(VIP, silent).expect("writes");
        untouched(&mut engine, name, &ping, Verdict::DroppedProtocol);

        let mut engine = engine6();
        let answer = run(&mut engine, name, &ping6, Verdict::EchoAnswered).frame;
        assert_eq!(answer[22..54], [VIP6.octets(), CLIENT6.octets()].concat());
        assert_eq!((answer[21], answer[54], answer[55]), (64, 129, 0));
        let length = (answer.len() - 54) as u16;
        let pseudo = [&length.to_be_bytes()[..], &[0, IpNumber::IPV6_ICMP.0]].concat();
        assert_eq!(sum(&[&answer[22..54], &pseudo, &answer[54..]]), 0xffff);
        assert_eq!(answer[58..], ping6[58..]);
    }
}

#[test]
fn packet_too_big_over_ipv6_reaches_the_pod() {
    for name in FORWARD {
        let mut engine = engine6();
        let pod = establish6(&mut engine, name, API);
        assert!(POD6.contains(&pod.0));
        let mut reply = Vec::new();
        PacketBuilder::ethernet2(NODE_MAC, CLIENT_MAC)
            .ipv6(VIP6.octets(), CLIENT6.octets(), 64)
            .tcp(API, PORT, 1, 1000)
            .ack(9)
            .write(&mut reply, b"too long")
            .expect("writes");
        let router = "fd00:22::200".parse::<std::net::Ipv6Addr>().expect("valid");
        let kind = etherparse::Icmpv6Type::PacketTooBig {
            mtu: u32::from(MTU),
        };
        let mut error = Vec::new();
        PacketBuilder::ethernet2(CLIENT_MAC, NODE_MAC)
            .ipv6(router.octets(), VIP6.octets(), 64)
            .icmpv6(kind)
            .write(&mut error, &reply[14..])
            .expect("writes");
        let there = run(&mut engine, name, &error, Verdict::ForwardedIcmp).frame;
        assert_eq!(there[22..54], [router.octets(), pod.0.octets()].concat());
        let length = (there.len() - 54) as u16;
        let pseudo = [&length.to_be_bytes()[..], &[0, IpNumber::IPV6_ICMP.0]].concat();
        assert_eq!(sum(&[&there[22..54], &pseudo, &there[54..]]), 0xffff);
        let quoted = [&[0; 12][..], &[0x86, 0xdd], &there[62..]].concat();
        let (source, destination, ..) = checked6(&quoted);
        assert_eq!((source, destination), (pod, (CLIENT6, PORT)));
    }
}
