//! What the programs do with other nodes: hand on, take over, reflect.

use lb_common::layout::{FLOW_HANDED_ON, MAX_PEER_ADDRS, PEER_REFLECTS, Peer, SERVICE_SILENT};
use lb_common::packet::{PROBE_ASKS, PROBE_MAGIC, PROBE_RETURNS, PROBE_SOURCE, Probe};
use lb_host::scene::HEARTBEAT_PORT;

use super::*;

const PEER: Ipv4Addr = Ipv4Addr::new(172, 22, 0, 12);
const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 12];
const NUMBER: u32 = 3;

fn peer(flags: u16) -> Peer {
    let mut addrs = [Addr::UNSPECIFIED; MAX_PEER_ADDRS];
    addrs[1] = Addr::from(PEER);
    Peer {
        mac: PEER_MAC,
        flags,
        addrs,
    }
}

/// As [`engine`], with the backends of those indices on a peer: 0 and 1 are the API on both pods, 2 and 3 images, 4
/// is the instance port's.
fn engine_with_peer(remote: &[u16]) -> Engine {
    let mut engine = engine();
    engine
        .set_peer(NUMBER, peer(PEER_REFLECTS), remote)
        .expect("writes");
    engine
}

/// A client's packet as a peer hands it on.
fn handed_on(port: u16, flags: u8) -> Vec<u8> {
    let mut frame = to_vip(port, flags);
    frame[6..12].copy_from_slice(&PEER_MAC);
    frame
}

#[track_caller]
fn assert_handed_on(before: &[u8], after: &[u8]) {
    assert_eq!(after[..6], PEER_MAC, "to the peer");
    assert_eq!(after[6..12], NODE_MAC, "from this node");
    let (ip, _) = checked(after);
    assert_eq!(ip.time_to_live, before[14 + 8] - 1);
    assert_eq!(ends(after), ends(before), "addresses and ports stay");
    assert_eq!(after[34..], before[34..], "TCP stays");
}

#[test]
fn a_flow_of_another_nodes_pod_goes_to_that_node_as_it_is() {
    for name in FORWARD {
        let mut engine = engine_with_peer(&[0, 1]);
        let syn = to_vip(API, TCP_SYN);
        let there = run(&mut engine, name, &syn, Verdict::HandedOnNew);
        assert_handed_on(&syn, &there.frame);
        for (flags, verdict) in [
            (TCP_SYN, Verdict::HandedOn),
            (TCP_ACK, Verdict::HandedOn),
            (TCP_ACK | TCP_FIN, Verdict::HandedOn),
        ] {
            let frame = to_vip(API, flags);
            let there = run(&mut engine, name, &frame, verdict);
            assert_handed_on(&frame, &there.frame);
        }
        let traffic = engine.traffic(map::PEER_STATS, NUMBER).expect("reads");
        assert_eq!((traffic.packets_in, traffic.flows), (4, 1));
        // The node of the pod counts the flow.
        let port = engine.traffic(map::PORT_STATS, 0).expect("reads");
        assert_eq!(port.packets_in, 0);
        assert!(living(&mut engine, API).is_none());
    }
}

#[test]
fn a_packet_in_mid_flow_leaves_no_entry_that_would_outlive_a_change_of_the_tables() {
    for name in FORWARD {
        let mut engine = engine_with_peer(&[0, 1]);
        let frame = to_vip(API, TCP_ACK);
        let there = run(&mut engine, name, &frame, Verdict::HandedOnMiss);
        assert_handed_on(&frame, &there.frame);
        assert!(young(&mut engine, API).is_none());
    }
}

#[test]
fn what_a_peer_hands_on_is_for_a_pod_of_this_node_and_never_goes_on() {
    for name in FORWARD {
        // POD0 is the peer's: whatever the hash says, what it hands on is for POD1.
        let mut engine = engine_with_peer(&[0]);
        for last in 100..116 {
            let client = Ipv4Addr::new(172, 22, 0, last);
            let mut syn = tcp((client, PORT), (VIP, API), TCP_SYN, b"");
            syn[..6].copy_from_slice(&NODE_MAC);
            syn[6..12].copy_from_slice(&PEER_MAC);
            let there = run(&mut engine, name, &syn, Verdict::ForwardedNew);
            assert_eq!(ends(&there.frame), ((client, PORT), (POD1, API)));
        }
        // All of them are the peer's.
        let mut engine = engine_with_peer(&[0, 1]);
        for (port, flags) in [
            (API, TCP_SYN),
            (API, TCP_ACK),
            (6189, TCP_SYN),
            (6189, TCP_ACK),
        ] {
            untouched(
                &mut engine,
                name,
                &handed_on(port, flags),
                Verdict::DroppedNotHere,
            );
        }
    }
}

#[test]
fn what_a_peer_hands_on_in_mid_flow_is_never_reset() {
    for name in FORWARD {
        let mut engine = engine_with_peer(&[]);
        for flags in [TCP_ACK, TCP_ACK | TCP_FIN, TCP_RST, TCP_SYN | TCP_ACK] {
            untouched(
                &mut engine,
                name,
                &handed_on(API, flags),
                Verdict::DroppedNotHere,
            );
        }
        assert!(young(&mut engine, API).is_none());
    }
}

#[test]
fn a_pods_refusal_of_what_a_peer_handed_on_goes_out_at_once() {
    let mut engine = engine_with_peer(&[]);
    let syn = handed_on(API, TCP_SYN);
    let (_, reset) = refused_by_pod(&mut engine, program::XDP, &syn);
    run(&mut engine, program::EGRESS, &reset, Verdict::RepliedYoung);
}

#[test]
fn a_peers_own_traffic_is_not_taken_for_handed_on() {
    for name in FORWARD {
        let mut engine = engine_with_peer(&[0, 1]);
        let mut own = tcp((PEER, PORT), (VIP, API), TCP_SYN, b"");
        own[..6].copy_from_slice(&NODE_MAC);
        own[6..12].copy_from_slice(&PEER_MAC);
        // To a pod on the peer itself, and refused like anybody's.
        run(&mut engine, name, &own, Verdict::HandedOnNew);
        let mut own = tcp((PEER, PORT), (VIP, 6189), TCP_SYN, b"");
        own[..6].copy_from_slice(&NODE_MAC);
        own[6..12].copy_from_slice(&PEER_MAC);
        let reset = run(&mut engine, name, &own, Verdict::RefusedNoService);
        assert_eq!(reset.frame[..6], PEER_MAC);
    }
}

#[test]
fn frames_of_unknown_machines_are_not_trusted() {
    for name in FORWARD {
        let mut engine = engine_with_peer(&[0, 1]);
        let mut frame = handed_on(6189, TCP_SYN);
        frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 13]);
        run(&mut engine, name, &frame, Verdict::RefusedNoService);
    }
}

#[test]
fn a_flow_that_was_handed_on_lives_here_and_knows_the_way() {
    for name in FORWARD {
        let mut engine = engine_with_peer(&[0]);
        let syn = run(
            &mut engine,
            name,
            &handed_on(API, TCP_SYN),
            Verdict::ForwardedNew,
        );
        let pod = ends(&syn.frame).1;
        let syn_ack = tcp(pod, (CLIENT, PORT), TCP_SYN | TCP_ACK, b"");
        run(
            &mut engine,
            program::EGRESS,
            &syn_ack,
            Verdict::RepliedYoung,
        );
        run(
            &mut engine,
            name,
            &handed_on(API, TCP_ACK),
            Verdict::Forwarded,
        );
        let data = tcp(pod, (CLIENT, PORT), TCP_ACK, b"answer");
        run(&mut engine, program::EGRESS, &data, Verdict::RepliedYoung);
        let flow = living(&mut engine, API).expect("living");
        assert_eq!(flow.uplink, FLOW_HANDED_ON);
        assert_eq!(flow.last_hop, PEER_MAC);
        // The VIP has moved here: the same flow, now from the client itself.
        run(&mut engine, name, &to_vip(API, TCP_ACK), Verdict::Forwarded);
        let flow = living(&mut engine, API).expect("living");
        assert_eq!((flow.uplink, flow.last_hop), (0, CLIENT_MAC));
        // Replies leave by the new way, too.
        let reply = FlowKey::reply(CLIENT.into(), PORT, flow.addr, flow.port);
        let entry = engine.flow(map::LIVING_REPLY, &reply).expect("reads");
        let entry = entry.expect("of a living flow");
        assert_eq!((entry.uplink, entry.last_hop), (0, CLIENT_MAC));
    }
}

#[test]
fn a_flow_that_sits_elsewhere_than_the_hash_says_goes_where_its_node_has_told() {
    for name in FORWARD {
        let mut engine = engine_with_peer(&[]);
        engine
            .set_exception(&forward_key(API), NUMBER)
            .expect("writes");
        for flags in [TCP_ACK, TCP_SYN, TCP_ACK | TCP_FIN] {
            let frame = to_vip(API, flags);
            let there = run(&mut engine, name, &frame, Verdict::HandedOnException);
            assert_handed_on(&frame, &there.frame);
        }
        // It takes no new flows: a SYN is a new connection, which the hash places.
        engine.set_peer(NUMBER, peer(0), &[]).expect("writes");
        run(
            &mut engine,
            name,
            &to_vip(API, TCP_ACK),
            Verdict::HandedOnException,
        );
        run(
            &mut engine,
            name,
            &to_vip(API, TCP_SYN),
            Verdict::ForwardedNew,
        );
        // What is left of it where peers are no longer known leads nowhere.
        let alone = |control: &mut Control| control.peers = 0;
        engine.change_control(alone).expect("writes");
        engine
            .lose_flow(map::YOUNG, &forward_key(API))
            .expect("was there");
        run(
            &mut engine,
            name,
            &to_vip(API, TCP_ACK),
            Verdict::ForwardedMiss,
        );
    }
}

#[test]
fn that_a_pod_of_another_node_is_gone_is_for_that_node_to_say() {
    for name in FORWARD {
        let mut engine = engine_with_peer(&[0, 1]);
        run(
            &mut engine,
            name,
            &to_vip(API, TCP_SYN),
            Verdict::HandedOnNew,
        );
        for (index, pod) in [(0, POD0), (1, POD1)] {
            gone(&mut engine, index, (pod, API), 0);
        }
        let no_backends = |service: &mut Service| service.count = 0;
        let key = ServiceKey::new(Addr::from(VIP), API);
        engine.change_service(key, no_backends).expect("writes");
        let settle = |control: &mut Control| control.settle_until = u64::MAX;
        engine.change_control(settle).expect("writes");
        // As often as the client asks.
        for _ in 0..2 {
            let ack = to_vip(API, TCP_ACK);
            untouched(&mut engine, name, &ack, Verdict::DroppedSettling);
        }
    }
}

#[test]
fn a_living_flow_of_this_node_is_no_exception() {
    for name in FORWARD {
        let mut engine = engine_with_peer(&[]);
        establish(&mut engine, name, API);
        engine
            .set_exception(&forward_key(API), NUMBER)
            .expect("writes");
        run(&mut engine, name, &to_vip(API, TCP_ACK), Verdict::Forwarded);
    }
}

#[test]
fn a_packet_whose_time_to_live_is_used_up_is_not_handed_on() {
    for name in FORWARD {
        let mut engine = engine_with_peer(&[0, 1]);
        let mut frame = to_vip(API, TCP_SYN);
        frame[14 + 8] = 1;
        let ip = etherparse::Ipv4HeaderSlice::from_slice(&frame[14..]).expect("IPv4");
        let sum = ip.to_header().calc_header_checksum();
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
        untouched(&mut engine, name, &frame, Verdict::DroppedTtl);
    }
}

#[test]
fn a_peer_whose_mac_is_not_known_gets_nothing() {
    for name in FORWARD {
        let mut engine = engine_with_peer(&[0, 1]);
        let unknown = Peer {
            mac: [0; 6],
            ..peer(PEER_REFLECTS)
        };
        engine.set_peer(NUMBER, unknown, &[0, 1]).expect("writes");
        untouched(
            &mut engine,
            name,
            &to_vip(API, TCP_SYN),
            Verdict::DroppedNoPeer,
        );
    }
}

#[test]
fn while_peers_may_not_have_told_yet_nothing_in_mid_flow_is_reset() {
    for name in FORWARD {
        let mut engine = engine_with_peer(&[]);
        let settle = |engine: &mut Engine, until| {
            let change = |control: &mut Control| control.settle_until = until;
            engine.change_control(change).expect("writes");
        };
        settle(&mut engine, u64::MAX);
        // A port without backends: a new connection is refused at once, an old one may be a peer's.
        run(
            &mut engine,
            name,
            &to_vip(INSTANCE + 9, TCP_SYN),
            Verdict::RefusedNoBackend,
        );
        untouched(
            &mut engine,
            name,
            &to_vip(INSTANCE + 9, TCP_ACK),
            Verdict::DroppedSettling,
        );
        // Nor does this node, whose file may have been half written.
        untouched(
            &mut engine,
            name,
            &to_vip(INSTANCE + 5, TCP_ACK),
            Verdict::DroppedSettling,
        );
        run(
            &mut engine,
            name,
            &to_vip(INSTANCE + 5, TCP_SYN),
            Verdict::RefusedNoService,
        );
        // The pod does not know the flow either; its RST would end it.
        let miss = run(
            &mut engine,
            name,
            &to_vip(API, TCP_ACK),
            Verdict::ForwardedMiss,
        );
        let pod = ends(&miss.frame).1;
        let reset = tcp(pod, (CLIENT, PORT), TCP_RST, b"");
        untouched(
            &mut engine,
            program::EGRESS,
            &reset,
            Verdict::DroppedSettling,
        );
        assert!(
            young(&mut engine, API).is_none(),
            "the next packet is placed anew"
        );
        // A RST to a SYN is the pod's own word; that of a second pod goes out.
        let syn = to_vip(API, TCP_SYN);
        let (_, first) = refused_by_pod(&mut engine, name, &syn);
        run(
            &mut engine,
            program::EGRESS,
            &first,
            Verdict::DroppedFirstReset,
        );
        let (_, second) = refused_by_pod(&mut engine, name, &syn);
        run(&mut engine, program::EGRESS, &second, Verdict::RepliedYoung);
        // So it is as long as a node with pods of that port does not answer.
        settle(&mut engine, 1);
        for port in [INSTANCE + 9, API] {
            let silent = |service: &mut Service| service.flags |= SERVICE_SILENT;
            engine
                .change_service(ServiceKey::new(Addr::from(VIP), port), silent)
                .expect("writes");
        }
        untouched(
            &mut engine,
            name,
            &to_vip(INSTANCE + 9, TCP_ACK),
            Verdict::DroppedSettling,
        );
        engine
            .lose_flow(map::YOUNG, &forward_key(API))
            .expect("was young");
        run(
            &mut engine,
            name,
            &to_vip(API, TCP_ACK),
            Verdict::ForwardedMiss,
        );
        untouched(
            &mut engine,
            program::EGRESS,
            &reset,
            Verdict::DroppedSettling,
        );
        for port in [INSTANCE + 9, API] {
            let heard = |service: &mut Service| service.flags = 0;
            engine
                .change_service(ServiceKey::new(Addr::from(VIP), port), heard)
                .expect("writes");
        }
        // Later the pod's word is good for all.
        settle(&mut engine, 1);
        run(
            &mut engine,
            name,
            &to_vip(INSTANCE + 9, TCP_ACK),
            Verdict::RefusedNoBackend,
        );
        let miss = run(
            &mut engine,
            name,
            &to_vip(IMAGES, TCP_ACK),
            Verdict::ForwardedMiss,
        );
        let reset = tcp(ends(&miss.frame).1, (CLIENT, PORT), TCP_RST, b"");
        run(&mut engine, program::EGRESS, &reset, Verdict::RepliedYoung);
    }
}

fn probe(from: Ipv4Addr, to: Ipv4Addr, mac: [u8; 6], direction: u32) -> Vec<u8> {
    let probe = Probe {
        magic: PROBE_MAGIC.to_be(),
        direction: direction.to_be(),
        nonce: [1, 2],
    };
    let mut payload = Vec::new();
    payload.extend(probe.magic.to_ne_bytes());
    payload.extend(probe.direction.to_ne_bytes());
    payload.extend(probe.nonce.iter().flat_map(|half| half.to_ne_bytes()));
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(mac, NODE_MAC)
        .ipv4(from.octets(), to.octets(), 64)
        .udp(HEARTBEAT_PORT, HEARTBEAT_PORT)
        .write(&mut frame, &payload)
        .expect("writes");
    frame
}

#[test]
fn a_peers_probe_is_sent_back_with_the_vip_as_its_source() {
    let source = Ipv4Addr::from(PROBE_SOURCE);
    for name in FORWARD {
        let mut engine = engine_with_peer(&[]);
        let asked = probe(source, VIP, PEER_MAC, PROBE_ASKS);
        let back = run(&mut engine, name, &asked, Verdict::ProbeReflected).frame;
        let mut wanted = probe(VIP, source, NODE_MAC, PROBE_RETURNS);
        wanted[..6].copy_from_slice(&PEER_MAC);
        // UDP over IPv4 may go without a sum.
        wanted[40..42].fill(0);
        assert_eq!(back, wanted);
        // Not for those that are not known, nor to what is no VIP.
        let stranger = probe(source, VIP, CLIENT_MAC, PROBE_ASKS);
        untouched(&mut engine, name, &stranger, Verdict::DroppedProtocol);
        let elsewhere = probe(source, PEER, PEER_MAC, PROBE_ASKS);
        untouched(&mut engine, name, &elsewhere, Verdict::Passed);
    }
}

#[test]
fn an_own_probe_that_comes_back_is_noted_and_consumed() {
    let source = Ipv4Addr::from(PROBE_SOURCE);
    for name in FORWARD {
        let mut engine = engine_with_peer(&[]);
        let back = probe(VIP, source, PEER_MAC, PROBE_RETURNS);
        untouched(&mut engine, name, &back, Verdict::DroppedProbeReturned);
        let reflection = engine.reflection(NUMBER).expect("reads");
        assert_eq!(reflection.nonce, 2 << 32 | 1);
        assert!(reflection.at > 0);
        let forged = probe(VIP, source, CLIENT_MAC, PROBE_RETURNS);
        untouched(&mut engine, name, &forged, Verdict::Passed);
    }
}

#[test]
fn of_a_peers_claim_the_kernel_learns_unless_this_node_announces() {
    for name in FORWARD {
        let mut engine = engine_with_peer(&[]);
        let mut claim = arp(VIP, VIP);
        claim[6..12].copy_from_slice(&PEER_MAC);
        untouched(&mut engine, name, &claim, Verdict::DroppedArpClaim);
        let silent = Vip {
            answer_until: 0,
            ..vip()
        };
        engine.set_vip(VIP, silent).expect("writes");
        untouched(&mut engine, name, &claim, Verdict::Passed);
        // Of anybody else's it learns nothing.
        untouched(&mut engine, name, &arp(VIP, VIP), Verdict::DroppedArpClaim);
    }
}
