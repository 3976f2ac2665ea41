//! What the real programs do to packets, one row or dialogue each: packet in, packet out, verdict,
//! action, entries and counters. Checksums are recomputed from scratch by an independent library.

mod events;
mod host;
mod icmp;
mod odd;
mod peers;
mod v6;

use std::net::Ipv4Addr;
use std::thread::sleep;
use std::time::Duration;

use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TcpHeader, TransportSlice};
use ironlb_tests::engine::{Engine, Outcome, tc, xdp};
use lb_common::layout::{
    Addr, BACKEND_ALIVE, Backend, Candidate, Control, FLOW_CLAIMED, FLOW_CLOSING, Filter, Flow,
    FlowKey, MODE_NATIVE, MODE_NONE, MODE_TC, POD_HOST, Pass, Service, ServiceKey,
    UPLINK_BYPASS_DROP, UPLINK_FORWARD, Uplink, VIP_EXTERNAL, VIP_REFUSE_DROP, Vip, backend_id,
    map, program, to_name,
};
use lb_common::packet::{TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN};
use lb_common::{Action, Verdict};

const CLIENT: Ipv4Addr = Ipv4Addr::new(172, 22, 0, 100);
const VIP: Ipv4Addr = Ipv4Addr::new(172, 22, 0, 2);
const POD0: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 10);
const POD1: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 11);
const CLIENT_MAC: [u8; 6] = [2, 0, 0, 0, 0, 100];
const NODE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 11];
const API: u16 = 6385;
const IMAGES: u16 = 6180;
const INSTANCE: u16 = 6200;
const PORT: u16 = 40_000;
const FORWARD: [&str; 3] = [program::XDP, program::XDP_PLAIN, program::INGRESS];

fn uplink(ifindex: u32, flags: u32) -> Uplink {
    let mut vip_filter = Filter::default();
    vip_filter.insert(&Addr::from(VIP));
    Uplink {
        vip_filter,
        ifindex,
        flags,
        mac: NODE_MAC,
        vlan: 0,
        mode: MODE_NATIVE,
        prefixes: [96 + 24, 0],
        pad: 0,
        device: ifindex,
        name: to_name("eth1"),
        bypass_udp: [53, 0, 0, 0, 0, 0, 0, 0],
        gateways: [Addr::UNSPECIFIED; 2],
        networks: [Addr::from(Ipv4Addr::new(172, 22, 0, 0)), Addr::UNSPECIFIED],
    }
}

fn vip() -> Vip {
    Vip {
        answer_until: u64::MAX,
        flags: 0,
        uplink: 0,
        pass: [Pass::default(); 8],
    }
}

/// An engine that serves the API and images on two pods, and an instance port of the second.
fn engine_with(living: u32) -> Engine {
    let mut engine = Engine::load(living).expect("the object loads");
    engine
        .set_uplink(0, uplink(1, UPLINK_FORWARD | UPLINK_BYPASS_DROP))
        .expect("writes");
    engine.set_vip(VIP, vip()).expect("writes");
    let images = [(POD0, IMAGES), (POD1, IMAGES)];
    engine
        .serve(&[
            (VIP, API, &[(POD0, API), (POD1, API)]),
            (VIP, IMAGES, &images),
            (VIP, INSTANCE, &[(POD1, IMAGES)]),
            (VIP, INSTANCE + 9, &[]),
        ])
        .expect("writes");
    engine
}

fn engine() -> Engine {
    engine_with(64)
}

/// Source and destination of a frame from the client, or to it.
fn macs(from_client: bool) -> ([u8; 6], [u8; 6]) {
    if from_client {
        (CLIENT_MAC, NODE_MAC)
    } else {
        (NODE_MAC, CLIENT_MAC)
    }
}

fn tcp_header(from: u16, to: u16, flags: u8) -> TcpHeader {
    let mut header = TcpHeader::new(from, to, 1000, 1024);
    header.syn = flags & TCP_SYN != 0;
    header.ack = flags & TCP_ACK != 0;
    header.fin = flags & TCP_FIN != 0;
    header.rst = flags & TCP_RST != 0;
    header.acknowledgment_number = if header.ack { 77 } else { 0 };
    header
}

fn tcp(from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), flags: u8, payload: &[u8]) -> Vec<u8> {
    let (source, destination) = macs(from.0 == CLIENT || to.0 == VIP);
    let header = tcp_header(from.1, to.1, flags);
    let builder = PacketBuilder::ethernet2(source, destination)
        .ipv4(from.0.octets(), to.0.octets(), 64)
        .tcp_header(header);
    let mut bytes = Vec::new();
    builder.write(&mut bytes, payload).expect("writes");
    bytes
}

fn udp(to: (Ipv4Addr, u16), from_port: u16) -> Vec<u8> {
    let mut bytes = Vec::new();
    PacketBuilder::ethernet2(CLIENT_MAC, NODE_MAC)
        .ipv4(CLIENT.octets(), to.0.octets(), 64)
        .udp(from_port, to.1)
        .write(&mut bytes, b"hello")
        .expect("writes");
    bytes
}

fn to_vip(port: u16, flags: u8) -> Vec<u8> {
    tcp(
        (CLIENT, PORT),
        (VIP, port),
        flags,
        if flags == TCP_SYN { b"" } else { b"data" },
    )
}

/// Ends of a TCP packet whose checksums an independent library finds right.
fn ends(frame: &[u8]) -> ((Ipv4Addr, u16), (Ipv4Addr, u16)) {
    let (ip, tcp) = checked(frame);
    (
        (ip.source.into(), tcp.source_port),
        (ip.destination.into(), tcp.destination_port),
    )
}

fn checked(frame: &[u8]) -> (etherparse::Ipv4Header, TcpHeader) {
    let sliced = SlicedPacket::from_ethernet(frame).expect("parses");
    let Some(NetSlice::Ipv4(ip)) = sliced.net else {
        panic!("not IPv4: {frame:02x?}")
    };
    let Some(TransportSlice::Tcp(tcp)) = sliced.transport else {
        panic!("not TCP: {frame:02x?}")
    };
    let header = ip.header().to_header();
    assert_eq!(
        header.header_checksum,
        header.calc_header_checksum(),
        "IP checksum"
    );
    let sum = tcp
        .to_header()
        .calc_checksum_ipv4(&header, tcp.payload())
        .expect("short");
    assert_eq!(tcp.checksum(), sum, "TCP checksum");
    (header, tcp.to_header())
}

fn expected(name: &str, action: Action) -> u32 {
    match (name, action) {
        (program::INGRESS | program::EGRESS, Action::Pass) => tc::NEXT,
        (program::INGRESS | program::EGRESS, Action::Drop) => tc::SHOT,
        (program::INGRESS | program::EGRESS, _) => tc::REDIRECT,
        (_, Action::Pass) => xdp::PASS,
        (_, Action::Transmit) => xdp::TX,
        (_, _) => xdp::DROP,
    }
}

/// Runs a program, and asserts verdict and action.
#[track_caller]
fn run(engine: &mut Engine, name: &str, frame: &[u8], verdict: Verdict) -> Outcome {
    let outcome = engine.run(name, frame).expect("runs");
    assert_eq!(outcome.verdict, verdict, "{name}");
    assert_eq!(
        outcome.action,
        expected(name, verdict.action()),
        "{name}: {verdict:?}"
    );
    outcome
}

/// The same, and asserts that the frame is as it was.
#[track_caller]
fn untouched(engine: &mut Engine, name: &str, frame: &[u8], verdict: Verdict) {
    let outcome = run(engine, name, frame, verdict);
    assert_eq!(
        outcome.frame, frame,
        "{name}: {verdict:?} changed the frame"
    );
}

fn forward_key(port: u16) -> FlowKey {
    FlowKey::forward(Addr::from(CLIENT), PORT, Addr::from(VIP), port)
}

/// Brings a flow to VIP:`port` to life and returns its pod.
fn establish(engine: &mut Engine, name: &str, port: u16) -> (Ipv4Addr, u16) {
    let syn = run(engine, name, &to_vip(port, TCP_SYN), Verdict::ForwardedNew);
    let pod = ends(&syn.frame).1;
    let syn_ack = tcp(pod, (CLIENT, PORT), TCP_SYN | TCP_ACK, b"");
    run(engine, program::EGRESS, &syn_ack, Verdict::RepliedYoung);
    run(engine, name, &to_vip(port, TCP_ACK), Verdict::Forwarded);
    let data = tcp(pod, (CLIENT, PORT), TCP_ACK, b"answer");
    run(engine, program::EGRESS, &data, Verdict::RepliedYoung);
    pod
}

fn living(engine: &mut Engine, port: u16) -> Option<Flow> {
    engine.flow(map::LIVING, &forward_key(port)).expect("reads")
}

fn young(engine: &mut Engine, port: u16) -> Option<Flow> {
    engine.flow(map::YOUNG, &forward_key(port)).expect("reads")
}

/// Writes a backend of this node anew.
fn set_backend(
    engine: &mut Engine,
    index: u16,
    pod: (Ipv4Addr, u16),
    service: u16,
    (generation, flags): (u16, u16),
) {
    let backend = Backend {
        addr: Addr::from(pod.0),
        port: pod.1,
        service,
        generation,
        flags,
        peer: 0,
        pad: 0,
    };
    engine.set_backend(index, backend).expect("writes");
}

fn gone(engine: &mut Engine, index: u16, pod: (Ipv4Addr, u16), service: u16) {
    set_backend(engine, index, pod, service, (1, 0));
}

#[test]
fn a_dialogue_reaches_one_pod_and_comes_back_from_the_vip() {
    for name in FORWARD {
        let mut engine = engine();
        let pod = establish(&mut engine, name, API);
        assert!([POD0, POD1].contains(&pod.0) && pod.1 == API);
        let request = run(&mut engine, name, &to_vip(API, TCP_ACK), Verdict::Forwarded);
        assert_eq!(ends(&request.frame), ((CLIENT, PORT), pod));
        let answer = tcp(pod, (CLIENT, PORT), TCP_ACK, b"data");
        let answer = run(&mut engine, program::EGRESS, &answer, Verdict::Replied);
        assert_eq!(ends(&answer.frame), ((VIP, API), (CLIENT, PORT)));
        let flow = living(&mut engine, API).expect("living");
        assert_eq!((flow.addr, flow.port), (Addr::from(pod.0), pod.1));
        assert_eq!((flow.last_hop, flow.last_ack), (CLIENT_MAC, 77));
    }
}

#[test]
fn counters_tell_packets_and_bytes_of_port_and_backend() {
    let mut engine = engine();
    let pod = establish(&mut engine, program::XDP, INSTANCE);
    assert_eq!(pod, (POD1, IMAGES));
    let port = engine.traffic(map::PORT_STATS, 2).expect("reads");
    assert_eq!(port, engine.traffic(map::BACKEND_STATS, 4).expect("reads"));
    assert_eq!((port.packets_in, port.packets_out, port.flows), (2, 2, 1));
    assert_eq!((port.bytes_in, port.bytes_out), (54 + 58, 54 + 60));
    assert_eq!(
        engine
            .traffic(map::PORT_STATS, 0)
            .expect("reads")
            .packets_in,
        0
    );
}

#[test]
fn a_client_port_that_is_used_again_is_another_flow() {
    for name in FORWARD {
        let mut engine = engine();
        let pod = establish(&mut engine, name, INSTANCE);
        let first = living(&mut engine, INSTANCE).expect("living");
        // Longer than a tick.
        sleep(Duration::from_millis(20));
        let reset = tcp(pod, (CLIENT, PORT), TCP_RST, b"");
        run(&mut engine, program::EGRESS, &reset, Verdict::Replied);
        let syn = to_vip(INSTANCE, TCP_SYN);
        run(&mut engine, name, &syn, Verdict::ForwardedNew);
        // A retransmission is not another one.
        run(&mut engine, name, &syn, Verdict::Forwarded);
        let second = young(&mut engine, INSTANCE).expect("young");
        let later = second.started.wrapping_sub(first.started);
        assert!((1..1 << 31).contains(&later), "{later}");
        assert_eq!(second.bytes, 2 * syn.len() as u64);
        let port = engine.traffic(map::PORT_STATS, 2).expect("reads");
        assert_eq!(port.flows, 2);
    }
}

#[test]
fn rewrites_keep_checksums_right_for_odd_lengths_and_extreme_sums() {
    for name in FORWARD {
        let mut engine = engine();
        let pod = establish(&mut engine, name, API);
        let payloads = [
            vec![],
            vec![0xff],
            vec![0; 3],
            vec![0xff; 1459],
            (0..=255).collect(),
            vec![0xff; 1460],
        ];
        for payload in payloads {
            let frame = tcp((CLIENT, PORT), (VIP, API), TCP_ACK, &payload);
            let there = run(&mut engine, name, &frame, Verdict::Forwarded);
            assert_eq!(ends(&there.frame), ((CLIENT, PORT), pod));
            assert_eq!(there.frame[54..], payload);
            let frame = tcp(pod, (CLIENT, PORT), TCP_ACK, &payload);
            let back = run(&mut engine, program::EGRESS, &frame, Verdict::Replied);
            assert_eq!(ends(&back.frame), ((VIP, API), (CLIENT, PORT)));
        }
        // Whatever the sum of the packet: the identification field moves the IP sum, the last two
        // bytes of data the TCP sum, over all values that matter for carries.
        for extreme in [0_u16, 1, 0x7fff, 0x8000, 0xfffe, 0xffff] {
            let mut frame = tcp((CLIENT, PORT), (VIP, API), TCP_ACK, &extreme.to_be_bytes());
            frame[18..20].copy_from_slice(&extreme.to_be_bytes());
            let ip = etherparse::Ipv4HeaderSlice::from_slice(&frame[14..]).expect("IPv4");
            let sum = ip.to_header().calc_header_checksum();
            frame[24..26].copy_from_slice(&sum.to_be_bytes());
            let there = run(&mut engine, name, &frame, Verdict::Forwarded);
            assert_eq!(ends(&there.frame).1, pod);
        }
    }
}

/// Against the packet that a host would have sent with these ends, made from scratch by an independent library.
#[test]
fn a_rewrite_changes_ends_and_sums_and_no_other_byte() {
    for name in FORWARD {
        let (mut engine, pod) = engine_with_a_taken_port(name);
        let client = (CLIENT, PORT);
        for (flags, payload) in [
            (TCP_ACK, &b""[..]),
            (TCP_ACK, b"x"),
            (TCP_ACK, &[0xa5; 1460]),
            (TCP_SYN, b""),
            (TCP_FIN | TCP_ACK, b"end"),
        ] {
            let frame = tcp(client, (VIP, INSTANCE), flags, payload);
            let there = run(&mut engine, name, &frame, Verdict::Forwarded);
            assert_eq!(there.frame, tcp(client, pod, flags, payload), "{name}");
            let frame = tcp(pod, client, TCP_ACK, payload);
            let back = run(&mut engine, program::EGRESS, &frame, Verdict::Replied);
            let expected = tcp((VIP, INSTANCE), client, TCP_ACK, payload);
            assert_eq!(back.frame, expected, "{name}");
        }
        // With another client port, too.
        let syn = to_vip(IMAGES, TCP_SYN);
        let there = run(&mut engine, name, &syn, Verdict::ForwardedNew);
        let translated = ends(&there.frame).0;
        assert_ne!(translated, client);
        assert_eq!(there.frame, tcp(translated, pod, TCP_SYN, b""), "{name}");
        let frame = tcp(pod, translated, TCP_SYN | TCP_ACK, b"");
        let back = run(&mut engine, program::EGRESS, &frame, Verdict::RepliedYoung);
        let expected = tcp((VIP, IMAGES), client, TCP_SYN | TCP_ACK, b"");
        assert_eq!(back.frame, expected, "{name}");
    }
}

#[test]
fn ip_options_are_carried_along() {
    for name in FORWARD {
        let mut engine = engine();
        let mut frame = to_vip(API, TCP_SYN);
        frame.splice(34..34, [1; 40]);
        frame[14] = 0x4f;
        let length = frame.len() as u16 - 14;
        frame[16..18].copy_from_slice(&length.to_be_bytes());
        let ip = etherparse::Ipv4HeaderSlice::from_slice(&frame[14..]).expect("IPv4");
        let sum = ip.to_header().calc_header_checksum();
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
        let there = run(&mut engine, name, &frame, Verdict::ForwardedNew);
        assert_eq!(there.frame[34..74], [1; 40]);
        assert_eq!(ends(&there.frame).1.1, API);
    }
}

#[test]
fn an_instance_port_reaches_its_instance_and_no_other() {
    let mut engine = engine();
    for port in (1024..u16::MAX).step_by(97) {
        let frame = tcp((CLIENT, port), (VIP, INSTANCE), TCP_SYN, b"");
        let there = run(&mut engine, program::XDP, &frame, Verdict::ForwardedNew);
        assert_eq!(ends(&there.frame), ((CLIENT, port), (POD1, IMAGES)));
    }
}

#[test]
fn a_retransmitted_syn_keeps_its_backend_while_that_takes_new_flows() {
    for name in FORWARD {
        let mut engine = engine();
        let first = run(
            &mut engine,
            name,
            &to_vip(API, TCP_SYN),
            Verdict::ForwardedNew,
        );
        let pod = ends(&first.frame).1;
        let again = run(&mut engine, name, &to_vip(API, TCP_SYN), Verdict::Forwarded);
        assert_eq!(ends(&again.frame).1, pod);
        // Not ready any more: the flow is not established, so the SYN may go elsewhere.
        let index = u16::from(pod.0 == POD1);
        set_backend(&mut engine, index, (pod.0, API), 0, (1, BACKEND_ALIVE));
        only_candidate(&mut engine, API, 0, 1 - index);
        let other = run(
            &mut engine,
            name,
            &to_vip(API, TCP_SYN),
            Verdict::ForwardedNew,
        );
        assert_ne!(ends(&other.frame).1, pod);
    }
}

/// Leaves one backend to a VIP port.
fn only_candidate(engine: &mut Engine, port: u16, id: u16, index: u16) {
    let mut candidates = [Candidate::default(); 64];
    candidates[0] = Candidate {
        backend: backend_id(index, 1),
        identity: 7,
    };
    let service = Service {
        version: 2,
        id,
        flags: 0,
        seed: 1,
        count: 1,
        sources: 0,
        local: u64::MAX,
        candidates,
        pad_tail: 0,
        version_tail: 2,
    };
    engine
        .set_service(ServiceKey::new(Addr::from(VIP), port), service)
        .expect("writes");
}

#[test]
fn an_unready_backend_keeps_its_living_flows() {
    for name in FORWARD {
        let mut engine = engine();
        let pod = establish(&mut engine, name, API);
        let index = u16::from(pod.0 == POD1);
        set_backend(&mut engine, index, (pod.0, API), 0, (1, BACKEND_ALIVE));
        only_candidate(&mut engine, API, 0, 1 - index);
        let data = run(&mut engine, name, &to_vip(API, TCP_ACK), Verdict::Forwarded);
        assert_eq!(ends(&data.frame).1, pod);
        // A stray SYN goes to the pod too, which answers with a challenge ACK.
        let syn = run(&mut engine, name, &to_vip(API, TCP_SYN), Verdict::Forwarded);
        assert_eq!(ends(&syn.frame).1, pod);
    }
}

#[test]
fn a_flow_of_a_gone_backend_is_refused_and_its_next_syn_served_elsewhere() {
    for name in FORWARD {
        let mut engine = engine();
        let pod = establish(&mut engine, name, API);
        let index = u16::from(pod.0 == POD1);
        gone(&mut engine, index, pod, 0);
        only_candidate(&mut engine, API, 0, 1 - index);
        let reset = run(
            &mut engine,
            name,
            &to_vip(API, TCP_ACK),
            Verdict::RefusedGone,
        );
        assert_reset(&reset.frame, 77, None);
        assert!(living(&mut engine, API).is_none() && young(&mut engine, API).is_none());
        let syn = run(
            &mut engine,
            name,
            &to_vip(API, TCP_SYN),
            Verdict::ForwardedNew,
        );
        assert_ne!(ends(&syn.frame).1, pod);
    }
}

#[test]
fn an_index_with_a_new_generation_is_another_backend() {
    let mut engine = engine();
    let pod = establish(&mut engine, program::XDP, API);
    let index = u16::from(pod.0 == POD1);
    set_backend(&mut engine, index, (pod.0, API), 0, (2, BACKEND_ALIVE));
    run(
        &mut engine,
        program::XDP,
        &to_vip(API, TCP_ACK),
        Verdict::RefusedGone,
    );
}

#[test]
fn a_syn_of_a_living_flow_whose_backend_is_gone_begins_anew() {
    let mut engine = engine();
    let pod = establish(&mut engine, program::XDP, API);
    let index = u16::from(pod.0 == POD1);
    gone(&mut engine, index, pod, 0);
    only_candidate(&mut engine, API, 0, 1 - index);
    let syn = run(
        &mut engine,
        program::XDP,
        &to_vip(API, TCP_SYN),
        Verdict::ForwardedNew,
    );
    assert_ne!(ends(&syn.frame).1, pod);
    assert!(living(&mut engine, API).is_none());
}

#[test]
fn a_flow_that_ends_leaves_the_living_table_without_the_agent() {
    for name in FORWARD {
        for client_first in [true, false] {
            let mut engine = engine();
            let pod = establish(&mut engine, name, API);
            let client_fin = to_vip(API, TCP_FIN | TCP_ACK);
            let pod_fin = tcp(pod, (CLIENT, PORT), TCP_FIN | TCP_ACK, b"");
            if client_first {
                run(&mut engine, name, &client_fin, Verdict::Forwarded);
                assert!(living(&mut engine, API).is_some(), "half closed is living");
                run(&mut engine, program::EGRESS, &pod_fin, Verdict::Replied);
            } else {
                run(&mut engine, program::EGRESS, &pod_fin, Verdict::Replied);
                run(&mut engine, name, &client_fin, Verdict::Forwarded);
            }
            assert!(living(&mut engine, API).is_none());
            let reply = FlowKey::reply(Addr::from(CLIENT), PORT, Addr::from(pod.0), pod.1);
            assert!(
                engine
                    .flow(map::LIVING_REPLY, &reply)
                    .expect("reads")
                    .is_none()
            );
            assert_eq!(young(&mut engine, API).expect("guards").state, FLOW_CLOSING);
            // The last segments of both sides still find their way, and revive nothing.
            let last = run(&mut engine, name, &to_vip(API, TCP_ACK), Verdict::Forwarded);
            assert_eq!(ends(&last.frame).1, pod);
            let ack = tcp(pod, (CLIENT, PORT), TCP_ACK, b"");
            let ack = run(&mut engine, program::EGRESS, &ack, Verdict::RepliedYoung);
            assert_eq!(ends(&ack.frame).0, (VIP, API));
            assert!(living(&mut engine, API).is_none());
            // The client uses its port again.
            establish_again(&mut engine, name);
        }
    }
}

#[test]
fn a_fin_before_the_pods_first_segment_counts() {
    for name in FORWARD {
        let mut engine = engine();
        let syn = run(
            &mut engine,
            name,
            &to_vip(API, TCP_SYN),
            Verdict::ForwardedNew,
        );
        let pod = ends(&syn.frame).1;
        run(
            &mut engine,
            name,
            &to_vip(API, TCP_FIN | TCP_ACK),
            Verdict::Forwarded,
        );
        let ack = tcp(pod, (CLIENT, PORT), TCP_ACK, b"");
        run(&mut engine, program::EGRESS, &ack, Verdict::RepliedYoung);
        assert!(living(&mut engine, API).is_some(), "half closed is living");
        let fin = tcp(pod, (CLIENT, PORT), TCP_FIN | TCP_ACK, b"");
        run(&mut engine, program::EGRESS, &fin, Verdict::Replied);
        assert!(living(&mut engine, API).is_none());
    }
}

fn establish_again(engine: &mut Engine, name: &str) {
    let syn = run(engine, name, &to_vip(API, TCP_SYN), Verdict::ForwardedNew);
    let pod = ends(&syn.frame).1;
    run(
        engine,
        program::EGRESS,
        &tcp(pod, (CLIENT, PORT), TCP_ACK, b"x"),
        Verdict::RepliedYoung,
    );
    assert!(living(engine, API).is_some());
}

#[test]
fn a_pods_reset_ends_the_flow() {
    let mut engine = engine();
    let pod = establish(&mut engine, program::XDP, API);
    let reset = tcp(pod, (CLIENT, PORT), TCP_RST, b"");
    let reset = run(&mut engine, program::EGRESS, &reset, Verdict::Replied);
    assert_eq!(ends(&reset.frame).0, (VIP, API));
    assert_eq!(young(&mut engine, API).expect("guards").state, FLOW_CLOSING);
    sleep(Duration::from_millis(1100));
    let data = tcp(pod, (CLIENT, PORT), TCP_ACK, b"x");
    run(&mut engine, program::EGRESS, &data, Verdict::RepliedYoung);
    assert!(living(&mut engine, API).is_none());
}

/// A SYN to the API; returns its pod, and the pod's RST.
fn refused_by_pod(engine: &mut Engine, name: &str, syn: &[u8]) -> ((Ipv4Addr, u16), Vec<u8>) {
    let syn = run(engine, name, syn, Verdict::ForwardedNew);
    let (client, pod) = ends(&syn.frame);
    (pod, tcp(pod, client, TCP_RST | TCP_ACK, b""))
}

#[test]
fn a_pods_refusal_on_a_shared_port_is_kept_from_the_client_once() {
    for name in FORWARD {
        let mut engine = engine();
        let syn = to_vip(API, TCP_SYN);
        let (first, reset) = refused_by_pod(&mut engine, name, &syn);
        run(
            &mut engine,
            program::EGRESS,
            &reset,
            Verdict::DroppedFirstReset,
        );
        // For a second nobody's new flow goes there; what is under way keeps its pod.
        for port in PORT + 1..PORT + 30 {
            let other = tcp((CLIENT, port), (VIP, API), TCP_SYN, b"");
            let (pod, _) = refused_by_pod(&mut engine, name, &other);
            assert_ne!(pod, first);
        }
        // The client's next SYN goes to the other pod, whose refusal is the answer.
        let (second, reset) = refused_by_pod(&mut engine, name, &syn);
        assert_ne!(second, first);
        let answer = run(&mut engine, program::EGRESS, &reset, Verdict::RepliedYoung);
        assert_eq!(ends(&answer.frame).0, (VIP, API));
        assert_eq!(young(&mut engine, API).expect("guards").state, FLOW_CLOSING);

        sleep(Duration::from_millis(1100));
        let others = (PORT + 30..PORT + 60).map(|port| {
            let other = tcp((CLIENT, port), (VIP, API), TCP_SYN, b"");
            refused_by_pod(&mut engine, name, &other).0
        });
        assert!(others.collect::<Vec<_>>().contains(&first), "for ever");
    }
}

#[test]
fn a_flow_that_was_refused_once_lives_on_with_its_second_pod() {
    let mut engine = engine();
    let syn = to_vip(API, TCP_SYN);
    let (first, reset) = refused_by_pod(&mut engine, program::XDP, &syn);
    run(
        &mut engine,
        program::EGRESS,
        &reset,
        Verdict::DroppedFirstReset,
    );
    let (second, _) = refused_by_pod(&mut engine, program::XDP, &syn);
    assert_ne!(second, first);
    // A retransmission does not hop once more.
    run(&mut engine, program::XDP, &syn, Verdict::Forwarded);
    let answer = |flags| tcp(second, (CLIENT, PORT), flags, b"");
    for flags in [TCP_SYN | TCP_ACK, TCP_ACK] {
        run(
            &mut engine,
            program::EGRESS,
            &answer(flags),
            Verdict::RepliedYoung,
        );
    }
    let data = run(
        &mut engine,
        program::XDP,
        &to_vip(API, TCP_ACK),
        Verdict::Forwarded,
    );
    assert_eq!(ends(&data.frame).1, second);
    run(
        &mut engine,
        program::EGRESS,
        &answer(TCP_ACK),
        Verdict::Replied,
    );
}

#[test]
fn other_resets_of_a_pod_go_out_at_once() {
    // Of an instance port, which nobody else can serve.
    let mut engine = engine();
    let syn = run(
        &mut engine,
        program::XDP,
        &to_vip(INSTANCE, TCP_SYN),
        Verdict::ForwardedNew,
    );
    let pod = ends(&syn.frame).1;
    let reset = tcp(pod, (CLIENT, PORT), TCP_RST | TCP_ACK, b"");
    run(&mut engine, program::EGRESS, &reset, Verdict::RepliedYoung);
    // After the SYN has been answered: it is the end of a connection.
    let (pod, reset) = refused_by_pod(&mut engine, program::XDP, &to_vip(API, TCP_SYN));
    let syn_ack = tcp(pod, (CLIENT, PORT), TCP_SYN | TCP_ACK, b"");
    run(
        &mut engine,
        program::EGRESS,
        &syn_ack,
        Verdict::RepliedYoung,
    );
    run(&mut engine, program::EGRESS, &reset, Verdict::RepliedYoung);
    // To a packet in mid-flow.
    let data = run(
        &mut engine,
        program::XDP,
        &to_vip(IMAGES, TCP_ACK),
        Verdict::ForwardedMiss,
    );
    let reset = tcp(ends(&data.frame).1, (CLIENT, PORT), TCP_RST, b"");
    run(&mut engine, program::EGRESS, &reset, Verdict::RepliedYoung);
    // Of the only pod that takes new flows.
    let mut engine = self::engine();
    only_candidate(&mut engine, API, 0, 0);
    let (_, reset) = refused_by_pod(&mut engine, program::XDP, &to_vip(API, TCP_SYN));
    run(&mut engine, program::EGRESS, &reset, Verdict::RepliedYoung);
}

#[test]
fn a_clients_reset_that_the_pod_rejects_does_not_end_the_flow() {
    let mut engine = engine();
    let pod = establish(&mut engine, program::XDP, API);
    run(
        &mut engine,
        program::XDP,
        &to_vip(API, TCP_RST),
        Verdict::Forwarded,
    );
    assert_eq!(
        young(&mut engine, API).expect("claimed").state,
        FLOW_CLOSING | FLOW_CLAIMED
    );
    let data = tcp(pod, (CLIENT, PORT), TCP_ACK, b"x");
    run(&mut engine, program::EGRESS, &data, Verdict::RepliedYoung);
    assert!(
        living(&mut engine, API).is_none(),
        "sent before the pod knew"
    );
    sleep(Duration::from_millis(1100));
    run(&mut engine, program::EGRESS, &data, Verdict::RepliedYoung);
    assert!(living(&mut engine, API).is_some());
    run(&mut engine, program::EGRESS, &data, Verdict::Replied);
}

#[test]
fn a_lost_reply_entry_is_made_again() {
    let mut engine = engine();
    let pod = establish(&mut engine, program::XDP, IMAGES);
    let reply = FlowKey::reply(Addr::from(CLIENT), PORT, Addr::from(pod.0), pod.1);
    engine
        .lose_flow(map::LIVING_REPLY, &reply)
        .expect("was there");
    let data = tcp(pod, (CLIENT, PORT), TCP_ACK, b"more");
    let data_out = run(
        &mut engine,
        program::EGRESS,
        &data,
        Verdict::RepliedRestored,
    );
    assert_eq!(ends(&data_out.frame), ((VIP, IMAGES), (CLIENT, PORT)));
    run(&mut engine, program::EGRESS, &data, Verdict::Replied);
    // Lost just before the pod closes: the flow ends all the same.
    engine
        .lose_flow(map::LIVING_REPLY, &reply)
        .expect("was there");
    let reset = tcp(pod, (CLIENT, PORT), TCP_RST, b"");
    run(
        &mut engine,
        program::EGRESS,
        &reset,
        Verdict::RepliedRestored,
    );
    assert!(living(&mut engine, IMAGES).is_none());
}

#[test]
fn neither_syns_nor_blind_acks_reach_the_living_table() {
    let mut engine = engine();
    for port in 1024..1124 {
        let syn = tcp((CLIENT, port), (VIP, API), TCP_SYN, b"");
        let there = run(&mut engine, program::XDP, &syn, Verdict::ForwardedNew);
        let pod = ends(&there.frame).1;
        let syn_ack = tcp(pod, (CLIENT, port), TCP_SYN | TCP_ACK, b"");
        run(
            &mut engine,
            program::EGRESS,
            &syn_ack,
            Verdict::RepliedYoung,
        );
        let ack = tcp((CLIENT, port + 1000), (VIP, API), TCP_ACK, b"");
        let there = run(&mut engine, program::XDP, &ack, Verdict::ForwardedMiss);
        let pod = ends(&there.frame).1;
        let reset = tcp(pod, (CLIENT, port + 1000), TCP_RST, b"");
        run(&mut engine, program::EGRESS, &reset, Verdict::RepliedYoung);
        for port in [port, port + 1000] {
            let key = FlowKey::forward(Addr::from(CLIENT), port, Addr::from(VIP), API);
            assert!(engine.flow(map::LIVING, &key).expect("reads").is_none());
        }
    }
}

#[test]
fn a_fin_that_comes_again_after_all_is_forgotten_makes_no_living_flow() {
    for name in FORWARD {
        let mut engine = engine();
        let fin = to_vip(API, TCP_FIN | TCP_ACK);
        let there = run(&mut engine, name, &fin, Verdict::ForwardedMiss);
        let pod = ends(&there.frame).1;
        let ack = tcp(pod, (CLIENT, PORT), TCP_ACK, b"");
        run(&mut engine, program::EGRESS, &ack, Verdict::RepliedYoung);
        assert!(living(&mut engine, API).is_none());
        // Anything else in mid-flow does.
        let ack = to_vip(IMAGES, TCP_ACK);
        let there = run(&mut engine, name, &ack, Verdict::ForwardedMiss);
        let data = tcp(ends(&there.frame).1, (CLIENT, PORT), TCP_ACK, b"x");
        run(&mut engine, program::EGRESS, &data, Verdict::RepliedYoung);
        assert!(living(&mut engine, IMAGES).is_some());
    }
}

#[test]
fn a_full_living_table_refuses_new_flows_and_keeps_the_old() {
    let mut engine = engine_with(1);
    establish(&mut engine, program::XDP, API);
    let second = |flags| tcp((CLIENT, PORT + 1), (VIP, API), flags, b"");
    let syn = run(
        &mut engine,
        program::XDP,
        &second(TCP_SYN),
        Verdict::ForwardedNew,
    );
    let pod = ends(&syn.frame).1;
    let data = tcp(pod, (CLIENT, PORT + 1), TCP_ACK, b"x");
    run(
        &mut engine,
        program::EGRESS,
        &data,
        Verdict::DroppedTableFull,
    );
    run(
        &mut engine,
        program::XDP,
        &second(TCP_ACK),
        Verdict::RefusedTableFull,
    );
    let third = tcp((CLIENT, PORT + 2), (VIP, API), TCP_SYN, b"");
    run(&mut engine, program::XDP, &third, Verdict::RefusedTableFull);
    run(
        &mut engine,
        program::XDP,
        &to_vip(API, TCP_ACK),
        Verdict::Forwarded,
    );
    // Whether it is full still is tried once a second: the end that made room may have been before it was noted.
    sleep(Duration::from_millis(1100));
    let fourth = |flags| tcp((CLIENT, PORT + 3), (VIP, API), flags, b"");
    let syn = fourth(TCP_SYN);
    let there = run(&mut engine, program::XDP, &syn, Verdict::ForwardedNew);
    let data = tcp(ends(&there.frame).1, (CLIENT, PORT + 3), TCP_ACK, b"x");
    let egress = program::EGRESS;
    run(&mut engine, egress, &data, Verdict::DroppedTableFull);
    let ack = fourth(TCP_ACK);
    run(&mut engine, program::XDP, &ack, Verdict::RefusedTableFull);
    run(&mut engine, program::XDP, &third, Verdict::RefusedTableFull);
    // Room again.
    run(
        &mut engine,
        program::XDP,
        &to_vip(API, TCP_RST),
        Verdict::Forwarded,
    );
    run(&mut engine, program::XDP, &third, Verdict::ForwardedNew);
}

/// An engine with a living flow of the client's port to the instance, and its pod alone behind the shared port.
fn engine_with_a_taken_port(name: &str) -> (Engine, (Ipv4Addr, u16)) {
    let mut engine = engine();
    let pod = establish(&mut engine, name, INSTANCE);
    only_candidate(&mut engine, IMAGES, 1, 3);
    (engine, pod)
}

#[test]
fn the_same_client_port_to_two_vip_ports_of_one_pod_makes_two_connections() {
    for name in FORWARD {
        let (mut engine, pod) = engine_with_a_taken_port(name);
        let syn = to_vip(IMAGES, TCP_SYN);
        let there = run(&mut engine, name, &syn, Verdict::ForwardedNew);
        let (translated, second) = ends(&there.frame);
        assert_eq!((translated.0, second), (CLIENT, pod));
        assert_ne!(translated.1, PORT);
        let again = run(&mut engine, name, &syn, Verdict::Forwarded);
        assert_eq!(ends(&again.frame).0, translated, "a retransmission");
        let dialogue = [
            (TCP_SYN | TCP_ACK, Verdict::RepliedYoung, Verdict::Forwarded),
            (TCP_ACK, Verdict::RepliedYoung, Verdict::Forwarded),
            (TCP_ACK, Verdict::Replied, Verdict::Forwarded),
        ];
        for (flags, back, there) in dialogue {
            let answer = tcp(pod, translated, flags, b"");
            let answer = run(&mut engine, program::EGRESS, &answer, back);
            assert_eq!(ends(&answer.frame), ((VIP, IMAGES), (CLIENT, PORT)));
            let next = run(&mut engine, name, &to_vip(IMAGES, TCP_ACK), there);
            assert_eq!(ends(&next.frame), (translated, pod));
            // The first one notices nothing.
            let data = tcp(pod, (CLIENT, PORT), TCP_ACK, b"x");
            let data = run(&mut engine, program::EGRESS, &data, Verdict::Replied);
            assert_eq!(ends(&data.frame), ((VIP, INSTANCE), (CLIENT, PORT)));
        }
        let flow = living(&mut engine, IMAGES).expect("lives");
        assert_eq!(flow.client_port, translated.1);
        for side in [TCP_ACK | TCP_FIN, TCP_ACK] {
            let answer = tcp(pod, translated, side, b"");
            let answer = run(&mut engine, program::EGRESS, &answer, Verdict::Replied);
            assert_eq!(ends(&answer.frame), ((VIP, IMAGES), (CLIENT, PORT)));
        }
        let fin = to_vip(IMAGES, TCP_ACK | TCP_FIN);
        run(&mut engine, name, &fin, Verdict::Forwarded);
        assert!(living(&mut engine, IMAGES).is_none());
        assert!(living(&mut engine, INSTANCE).is_some());
    }
}

#[test]
fn what_the_replies_of_a_translated_flow_are_found_by_comes_back_with_the_clients_next_packet() {
    for name in FORWARD {
        let (mut engine, pod) = engine_with_a_taken_port(name);
        let syn = to_vip(IMAGES, TCP_SYN);
        let there = run(&mut engine, name, &syn, Verdict::ForwardedNew);
        let translated = ends(&there.frame).0;
        let (client, pod_addr) = (Addr::from(CLIENT), Addr::from(pod.0));
        let reply = FlowKey::reply(client, translated.1, pod_addr, pod.1);
        engine.lose_flow(map::YOUNG, &reply).expect("was there");
        let answer = tcp(pod, translated, TCP_SYN | TCP_ACK, b"");
        let lost = Verdict::DroppedReplyUnknown;
        untouched(&mut engine, program::EGRESS, &answer, lost);
        run(&mut engine, name, &syn, Verdict::Forwarded);
        let answer = run(&mut engine, program::EGRESS, &answer, Verdict::RepliedYoung);
        assert_eq!(ends(&answer.frame), ((VIP, IMAGES), (CLIENT, PORT)));
    }
}

#[test]
fn a_translated_port_is_nobody_elses() {
    for name in FORWARD {
        let (mut engine, pod) = engine_with_a_taken_port(name);
        let mut ports = vec![PORT];
        // Each flow of a port that the one before was translated to is translated itself.
        for _ in 0..4 {
            let port = *ports.last().expect("one");
            let syn = tcp((CLIENT, port), (VIP, IMAGES), TCP_SYN, b"");
            let there = run(&mut engine, name, &syn, Verdict::ForwardedNew);
            let (translated, to) = ends(&there.frame);
            assert_eq!(to, pod);
            assert!(!ports.contains(&translated.1), "{ports:?} {translated:?}");
            ports.push(translated.1);
        }
        // Of five that it would try all are in use.
        let last = to_vip(IMAGES, TCP_SYN);
        engine
            .lose_flow(map::YOUNG, &forward_key(IMAGES))
            .expect("was there");
        let syn = tcp((CLIENT, ports[1]), (VIP, INSTANCE), TCP_SYN, b"");
        run(&mut engine, name, &syn, Verdict::ForwardedNew);
        untouched(&mut engine, name, &last, Verdict::DroppedCollision);
    }
}

#[test]
fn a_reply_entry_without_its_flow_stands_in_nobodys_way() {
    for name in FORWARD {
        let mut engine = engine();
        establish(&mut engine, name, INSTANCE);
        for table in [map::LIVING, map::YOUNG] {
            engine
                .lose_flow(table, &forward_key(INSTANCE))
                .expect("was there");
        }
        only_candidate(&mut engine, IMAGES, 1, 3);
        let pod = establish(&mut engine, name, IMAGES);
        let data = tcp(pod, (CLIENT, PORT), TCP_ACK, b"x");
        let answer = run(&mut engine, program::EGRESS, &data, Verdict::Replied);
        assert_eq!(ends(&answer.frame).0, (VIP, IMAGES));
        for table in [map::LIVING, map::YOUNG] {
            engine
                .lose_flow(table, &forward_key(IMAGES))
                .expect("was there");
        }
        establish(&mut engine, name, IMAGES);
        assert!(living(&mut engine, IMAGES).is_some());
    }
}

#[test]
fn a_reply_entry_without_its_flow_does_not_keep_the_next_one_of_its_port_young() {
    // One VIP port leads to the pod port, or several.
    for (name, port) in FORWARD
        .iter()
        .flat_map(|name| [(*name, API), (*name, INSTANCE)])
    {
        let mut engine = engine();
        let pod = establish(&mut engine, name, port);
        let reply = FlowKey::reply(Addr::from(CLIENT), PORT, Addr::from(pod.0), pod.1);
        // With the young entry that comes to light, and without one.
        for evicted in [false, true] {
            let key = forward_key(port);
            engine.lose_flow(map::LIVING, &key).expect("was there");
            if evicted {
                engine.lose_flow(map::YOUNG, &key).expect("was there");
            }
            let syn = to_vip(port, TCP_SYN);
            let verdict = if evicted {
                Verdict::ForwardedNew
            } else {
                Verdict::Forwarded
            };
            run(&mut engine, name, &syn, verdict);
            let syn_ack = tcp(pod, (CLIENT, PORT), TCP_SYN | TCP_ACK, b"");
            let answer = run(
                &mut engine,
                program::EGRESS,
                &syn_ack,
                Verdict::RepliedYoung,
            );
            assert_eq!(ends(&answer.frame).0, (VIP, port));
            let left = engine.flow(map::LIVING_REPLY, &reply).expect("reads");
            assert!(left.is_none(), "it would hide the flow");
            let data = tcp(pod, (CLIENT, PORT), TCP_ACK, b"x");
            run(&mut engine, program::EGRESS, &data, Verdict::RepliedYoung);
            assert!(living(&mut engine, port).is_some());
            // A SYN-ACK that the pod sends again takes nothing from a flow that lives.
            run(&mut engine, program::EGRESS, &syn_ack, Verdict::Replied);
            run(&mut engine, program::EGRESS, &data, Verdict::Replied);
        }
    }
}

#[test]
fn a_flow_whose_young_entry_was_evicted_guards_its_port_like_any_other() {
    for evicted in [false, true] {
        let mut engine = engine();
        let pod = establish(&mut engine, program::XDP, INSTANCE);
        if evicted {
            engine
                .lose_flow(map::YOUNG, &forward_key(INSTANCE))
                .expect("was there");
        }
        let reset = tcp(pod, (CLIENT, PORT), TCP_RST, b"");
        run(&mut engine, program::EGRESS, &reset, Verdict::Replied);
        assert!(living(&mut engine, INSTANCE).is_none());
        let closing = young(&mut engine, INSTANCE).expect("guards");
        assert_eq!((closing.state, closing.last_ack), (FLOW_CLOSING, 77));
    }
}

#[test]
fn a_closing_entry_stops_guarding_its_port_after_a_minute() {
    let mut engine = engine();
    let pod = establish(&mut engine, program::XDP, INSTANCE);
    run(
        &mut engine,
        program::EGRESS,
        &tcp(pod, (CLIENT, PORT), TCP_RST, b""),
        Verdict::Replied,
    );
    only_candidate(&mut engine, IMAGES, 1, 3);
    let syn = to_vip(IMAGES, TCP_SYN);
    let there = run(&mut engine, program::XDP, &syn, Verdict::ForwardedNew);
    assert_ne!(ends(&there.frame).0.1, PORT, "the pod may be in TIME_WAIT");
    engine
        .lose_flow(map::YOUNG, &forward_key(IMAGES))
        .expect("was there");
    let mut closing = young(&mut engine, INSTANCE).expect("guards");
    closing.last_seen = closing.last_seen.wrapping_sub(61 * 1000);
    engine
        .set_flow(map::YOUNG, &forward_key(INSTANCE), closing)
        .expect("writes");
    let there = run(&mut engine, program::XDP, &syn, Verdict::ForwardedNew);
    assert_eq!(ends(&there.frame).0.1, PORT);
    assert!(
        young(&mut engine, INSTANCE).is_none(),
        "would catch the new flow's replies"
    );
}

/// Asserts a RST that a client with a connection accepts (`acknowledgment: None`), or one in SYN-SENT does.
#[track_caller]
fn assert_reset(frame: &[u8], sequence: u32, acknowledgment: Option<u32>) {
    assert_eq!(frame.len(), 54, "no more than headers");
    assert_eq!(
        (&frame[..6], &frame[6..12]),
        (&CLIENT_MAC[..], &NODE_MAC[..])
    );
    let (ip, tcp) = checked(frame);
    assert_eq!((ip.source, ip.destination), (VIP.octets(), CLIENT.octets()));
    assert!(tcp.rst && !tcp.syn && !tcp.fin);
    assert_eq!(tcp.sequence_number, sequence);
    assert_eq!(tcp.ack.then_some(tcp.acknowledgment_number), acknowledgment);
}

#[test]
fn a_port_without_service_or_backend_is_refused_with_a_valid_reset() {
    for name in FORWARD {
        let mut engine = engine();
        for (port, verdict) in [
            (6189, Verdict::RefusedNoService),
            (INSTANCE + 9, Verdict::RefusedNoBackend),
        ] {
            let outcome = run(&mut engine, name, &to_vip(port, TCP_SYN), verdict);
            assert_reset(&outcome.frame, 0, Some(1001));
            assert_eq!(ends(&outcome.frame), ((VIP, port), (CLIENT, PORT)));
            let outcome = run(&mut engine, name, &to_vip(port, TCP_ACK), verdict);
            assert_reset(&outcome.frame, 77, None);
            let fin = tcp((CLIENT, PORT), (VIP, port), TCP_FIN, b"abc");
            let outcome = run(&mut engine, name, &fin, verdict);
            assert_reset(&outcome.frame, 0, Some(1004));
            run(
                &mut engine,
                name,
                &to_vip(port, TCP_RST),
                Verdict::DroppedReset,
            );
        }
    }
}

#[test]
fn new_flows_come_from_the_source_ranges_alone() {
    let outside = Ipv4Addr::new(172, 22, 1, 100);
    let from = |client, port, flags| tcp((client, PORT), (VIP, port), flags, b"");
    let key = |port| ServiceKey::new(Addr::from(VIP), port);
    for name in FORWARD {
        let mut engine = engine();
        let others = [(VIP.into(), 8)];
        // The longest prefix is no better than any other: one that contains the client admits it.
        let ranges = [
            (Ipv4Addr::new(172, 22, 0, 0).into(), 24),
            (CLIENT.into(), 32),
        ];
        establish(&mut engine, name, API);
        engine.admit(key(API), 7, &others).expect("writes");
        engine.admit(key(IMAGES), 8, &ranges).expect("writes");
        engine.admit(key(INSTANCE), 9, &[]).expect("writes");

        let syn = from(outside, IMAGES, TCP_SYN);
        let refused = run(&mut engine, name, &syn, Verdict::RefusedSource);
        let (ip, tcp) = checked(&refused.frame);
        assert_eq!(ip.destination, outside.octets());
        assert!(tcp.rst && tcp.ack && tcp.acknowledgment_number == 1001);
        let late = from(outside, IMAGES, TCP_ACK);
        run(&mut engine, name, &late, Verdict::RefusedSource);
        let syn = from(CLIENT, IMAGES, TCP_SYN);
        run(&mut engine, name, &syn, Verdict::ForwardedNew);
        let syn = from(CLIENT, INSTANCE, TCP_SYN);
        run(&mut engine, name, &syn, Verdict::RefusedSource);
        // What has begun before goes on, its end included.
        let data = to_vip(API, TCP_ACK);
        run(&mut engine, name, &data, Verdict::Forwarded);
        // 172.0.0.0/8 contains it.
        let syn = from(outside, API, TCP_SYN);
        run(&mut engine, name, &syn, Verdict::ForwardedNew);
    }
}

#[test]
fn a_source_that_no_host_has_begins_no_flow_and_gets_no_answer() {
    for name in FORWARD {
        let mut engine = engine();
        for source in [
            "0.0.0.0",
            "0.1.2.3",
            "127.0.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "172.22.0.2",
        ] {
            let source = source.parse().expect("an address");
            for port in [API, 6189] {
                for flags in [TCP_SYN, TCP_ACK] {
                    let mut frame = tcp((source, PORT), (VIP, port), flags, b"");
                    frame[..12].copy_from_slice(&[NODE_MAC, CLIENT_MAC].concat());
                    run(&mut engine, name, &frame, Verdict::DroppedSource);
                }
            }
        }
    }
}

#[test]
fn a_reset_to_a_local_sender_leaves_the_sum_to_the_device() {
    let mut engine = engine();
    let mut syn = to_vip(6189, TCP_SYN);
    let pseudo = |source: Ipv4Addr, destination: Ipv4Addr| {
        let words = [source.octets(), destination.octets()].concat();
        let sum: u32 = words
            .chunks(2)
            .map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])))
            .sum();
        let sum = sum + 6 + 20;
        ((sum & 0xffff) + (sum >> 16)) as u16
    };
    syn[50..52].copy_from_slice(&pseudo(CLIENT, VIP).to_be_bytes());
    let outcome = run(
        &mut engine,
        program::INGRESS,
        &syn,
        Verdict::RefusedNoService,
    );
    assert_eq!(outcome.frame[50..52], pseudo(VIP, CLIENT).to_be_bytes());
}

#[test]
fn refusals_are_silent_where_the_vip_says_so_and_limited_everywhere() {
    for name in FORWARD {
        let mut engine = engine();
        let control = Control {
            refusals_per_second: 3,
            ..Control::default()
        };
        engine.set_control(control).expect("writes");
        let refused = (0..20)
            .filter(|_| {
                let outcome = engine.run(name, &to_vip(6189, TCP_SYN)).expect("runs");
                assert!(matches!(
                    outcome.verdict,
                    Verdict::RefusedNoService | Verdict::DroppedRateLimited
                ));
                outcome.verdict == Verdict::RefusedNoService
            })
            .count();
        // The test run stays on one processor or moves to the other once: a bucket each.
        assert!((3..=7).contains(&refused), "{refused} refusals");
        engine
            .set_vip(
                VIP,
                Vip {
                    flags: VIP_REFUSE_DROP,
                    ..vip()
                },
            )
            .expect("writes");
        run(
            &mut engine,
            name,
            &to_vip(6189, TCP_SYN),
            Verdict::DroppedRefused,
        );
    }
}

#[test]
fn a_half_written_service_is_not_used() {
    for name in FORWARD {
        let mut engine = engine();
        let mut candidates = [Candidate::default(); 64];
        candidates[0] = Candidate {
            backend: backend_id(0, 1),
            identity: 1,
        };
        let torn = Service {
            version: 5,
            id: 0,
            flags: 0,
            seed: 0,
            count: 1,
            sources: 0,
            local: u64::MAX,
            candidates,
            pad_tail: 0,
            version_tail: 6,
        };
        let key = ServiceKey::new(Addr::from(VIP), API);
        engine.set_service(key, torn).expect("writes");
        run(
            &mut engine,
            name,
            &to_vip(API, TCP_SYN),
            Verdict::DroppedInconsistent,
        );
        // Whole, but its backend belongs to another VIP port.
        engine
            .set_service(
                key,
                Service {
                    version_tail: 5,
                    id: 3,
                    ..torn
                },
            )
            .expect("writes");
        run(
            &mut engine,
            name,
            &to_vip(API, TCP_SYN),
            Verdict::DroppedInconsistent,
        );
    }
}

#[test]
fn what_is_not_ours_passes_untouched() {
    for name in FORWARD {
        let mut engine = engine();
        let foreign = tcp(
            (CLIENT, PORT),
            (Ipv4Addr::new(172, 22, 0, 11), API),
            TCP_SYN,
            b"",
        );
        untouched(&mut engine, name, &foreign, Verdict::Passed);
        // Looks like the VIP to the filter, but is not.
        let alike = tcp(
            (CLIENT, PORT),
            (Ipv4Addr::new(22, 172, 0, 2), API),
            TCP_SYN,
            b"",
        );
        untouched(&mut engine, name, &alike, Verdict::Passed);
        untouched(
            &mut engine,
            name,
            &udp((Ipv4Addr::new(8, 8, 8, 8), 53), 53),
            Verdict::Passed,
        );
        let mut flooded = to_vip(API, TCP_SYN);
        flooded[5] = 99;
        untouched(&mut engine, name, &flooded, Verdict::PassedOtherMac);
        let mut dhcp = udp((Ipv4Addr::BROADCAST, 67), 68);
        dhcp[..6].copy_from_slice(&[0xff; 6]);
        untouched(&mut engine, name, &dhcp, Verdict::Passed);
        let mut broadcast = to_vip(API, TCP_SYN);
        broadcast[..6].copy_from_slice(&[0xff; 6]);
        untouched(&mut engine, name, &broadcast, Verdict::DroppedGroupMac);
        let mut ipv6 = to_vip(API, TCP_SYN);
        ipv6[12..14].copy_from_slice(&[0x86, 0xdd]);
        untouched(&mut engine, name, &ipv6, Verdict::Passed);
    }
}

#[test]
fn another_vlan_passes_and_the_uplinks_own_is_served() {
    // With tags in the bytes, as XDP sees them; TC has them in metadata, which only live frames do.
    for name in [program::XDP, program::XDP_PLAIN] {
        let mut engine = engine();
        let mut tagged = to_vip(API, TCP_SYN);
        tagged.splice(12..12, [0x81, 0, 0x20, 100]);
        untouched(&mut engine, name, &tagged, Verdict::PassedOtherVlan);
        let mut priority = to_vip(API, TCP_SYN);
        priority.splice(12..12, [0x81, 0, 0xe0, 0]);
        run(&mut engine, name, &priority, Verdict::ForwardedNew);
        engine
            .set_uplink(
                0,
                Uplink {
                    vlan: 100,
                    ..uplink(1, UPLINK_FORWARD)
                },
            )
            .expect("writes");
        let there = run(&mut engine, name, &tagged, Verdict::Forwarded);
        assert_eq!(there.frame[12..16], tagged[12..16]);
        untouched(
            &mut engine,
            name,
            &to_vip(API, TCP_SYN),
            Verdict::PassedOtherVlan,
        );
        let mut stacked = to_vip(API, TCP_SYN);
        stacked.splice(12..12, [0x88, 0xa8, 0, 7, 0x81, 0, 0, 100]);
        untouched(&mut engine, name, &stacked, Verdict::PassedOtherVlan);
    }
}

#[test]
fn other_protocols_to_the_vip_are_dropped_unless_passed() {
    for name in FORWARD {
        let mut engine = engine();
        untouched(
            &mut engine,
            name,
            &udp((VIP, 69), 1069),
            Verdict::DroppedProtocol,
        );
        let mut fragment = udp((VIP, 69), 1069);
        fragment[20..22].copy_from_slice(&[0x20, 0]);
        untouched(&mut engine, name, &fragment, Verdict::DroppedFragment);
        let mut pass = [Pass::default(); 8];
        pass[0] = Pass {
            port: 69,
            protocol: 17,
            pad: 0,
        };
        pass[1] = Pass {
            port: 22,
            protocol: 6,
            pad: 0,
        };
        engine.set_vip(VIP, Vip { pass, ..vip() }).expect("writes");
        untouched(
            &mut engine,
            name,
            &udp((VIP, 69), 1069),
            Verdict::PassedListed,
        );
        untouched(
            &mut engine,
            name,
            &udp((VIP, 70), 1069),
            Verdict::DroppedProtocol,
        );
        untouched(
            &mut engine,
            name,
            &to_vip(22, TCP_SYN),
            Verdict::PassedListed,
        );
        run(
            &mut engine,
            name,
            &to_vip(API, TCP_SYN),
            Verdict::ForwardedNew,
        );
    }
}

#[test]
fn an_external_vip_passes_what_is_not_balanced() {
    for name in FORWARD {
        let mut engine = engine();
        engine
            .set_vip(
                VIP,
                Vip {
                    flags: VIP_EXTERNAL,
                    answer_until: 0,
                    ..vip()
                },
            )
            .expect("writes");
        untouched(
            &mut engine,
            name,
            &udp((VIP, 69), 1069),
            Verdict::PassedExternal,
        );
        untouched(
            &mut engine,
            name,
            &to_vip(22, TCP_SYN),
            Verdict::PassedExternal,
        );
        untouched(&mut engine, name, &arp(CLIENT, VIP), Verdict::Passed);
        run(
            &mut engine,
            name,
            &to_vip(API, TCP_SYN),
            Verdict::ForwardedNew,
        );
    }
}

fn arp(sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut bytes = [&[0xff; 6][..], &CLIENT_MAC, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]].concat();
    bytes.extend([&CLIENT_MAC[..], &sender.octets(), &[0; 6], &target.octets()].concat());
    bytes.resize(60, 0);
    bytes
}

#[test]
fn arp_for_the_vip_is_answered_until_the_deadline_and_consumed_after_it() {
    for name in FORWARD {
        let mut engine = engine();
        for sender in [CLIENT, Ipv4Addr::UNSPECIFIED] {
            let outcome = run(&mut engine, name, &arp(sender, VIP), Verdict::ArpAnswered);
            let answer = [
                &CLIENT_MAC[..],
                &NODE_MAC,
                &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2],
                &NODE_MAC,
                &VIP.octets(),
                &CLIENT_MAC,
                &sender.octets(),
            ]
            .concat();
            assert_eq!(outcome.frame[..42], answer, "RFC 826");
        }
        untouched(&mut engine, name, &arp(VIP, VIP), Verdict::DroppedArpClaim);
        let other = arp(CLIENT, Ipv4Addr::new(172, 22, 0, 11));
        untouched(&mut engine, name, &other, Verdict::Passed);
        engine
            .set_vip(
                VIP,
                Vip {
                    answer_until: 1,
                    ..vip()
                },
            )
            .expect("writes");
        untouched(
            &mut engine,
            name,
            &arp(CLIENT, VIP),
            Verdict::DroppedArpSilent,
        );
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let now = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        let soon = now + 300_000_000;
        engine
            .set_vip(
                VIP,
                Vip {
                    answer_until: soon,
                    ..vip()
                },
            )
            .expect("writes");
        run(&mut engine, name, &arp(CLIENT, VIP), Verdict::ArpAnswered);
        sleep(Duration::from_millis(350));
        untouched(
            &mut engine,
            name,
            &arp(CLIENT, VIP),
            Verdict::DroppedArpSilent,
        );
    }
}

#[test]
fn only_the_program_of_the_uplinks_mode_acts() {
    let mut engine = engine();
    for (name, mode) in [
        (program::XDP, MODE_TC),
        (program::XDP_PLAIN, MODE_TC),
        (program::INGRESS, MODE_NATIVE),
        (program::XDP, MODE_NONE),
    ] {
        let outcome = engine
            .run_in(name, mode, &to_vip(API, TCP_SYN))
            .expect("runs");
        assert_eq!(outcome.verdict, Verdict::Passed, "{name} in mode {mode}");
    }
}

#[test]
fn a_vip_of_another_uplink_passes() {
    for name in FORWARD {
        let mut engine = engine();
        engine
            .set_vip(VIP, Vip { uplink: 1, ..vip() })
            .expect("writes");
        untouched(&mut engine, name, &to_vip(API, TCP_SYN), Verdict::Passed);
        untouched(&mut engine, name, &arp(CLIENT, VIP), Verdict::Passed);
    }
}

#[test]
fn no_attempt_reaches_a_pod_around_the_vip() {
    for name in FORWARD {
        let mut engine = engine();
        let attempt = tcp((CLIENT, PORT), (POD0, 6189), TCP_SYN, b"");
        untouched(&mut engine, name, &attempt, Verdict::DroppedBypass);
        untouched(
            &mut engine,
            name,
            &udp((POD0, 161), 40_000),
            Verdict::DroppedBypass,
        );
        let mut in_pieces = attempt.clone();
        in_pieces[20..22].copy_from_slice(&[0x20, 0]);
        untouched(&mut engine, name, &in_pieces, Verdict::DroppedBypass);
        // Answers to what the pod itself asked.
        let answer = tcp((CLIENT, 9999), (POD0, 50_000), TCP_SYN | TCP_ACK, b"");
        untouched(&mut engine, name, &answer, Verdict::Passed);
        untouched(&mut engine, name, &udp((POD0, 40_000), 53), Verdict::Passed);
        // The node's own address is not guarded.
        engine.set_pod(POD0, POD_HOST).expect("writes");
        untouched(&mut engine, name, &attempt, Verdict::Passed);
    }
}

#[test]
fn replies_that_belong_to_no_flow_do_not_show_the_pods_address() {
    let mut engine = engine();
    let stray = tcp((POD0, API), (CLIENT, PORT), TCP_ACK, b"x");
    untouched(
        &mut engine,
        program::EGRESS,
        &stray,
        Verdict::DroppedReplyUnknown,
    );
    // A connection of the pod's own passes, and so does everybody else's.
    let own = tcp((POD0, 50_000), (CLIENT, 9999), TCP_SYN, b"");
    untouched(&mut engine, program::EGRESS, &own, Verdict::Passed);
    let other = tcp(
        (Ipv4Addr::new(172, 22, 0, 11), 22),
        (CLIENT, PORT),
        TCP_ACK,
        b"x",
    );
    untouched(&mut engine, program::EGRESS, &other, Verdict::Passed);
    // On a NIC that only carries a default route, routed cluster traffic passes.
    engine.set_uplink(0, uplink(1, 0)).expect("writes");
    untouched(&mut engine, program::EGRESS, &stray, Verdict::Passed);
}

#[test]
fn direct_connections_live_where_bypass_allows_them() {
    for name in FORWARD {
        let mut engine = engine();
        engine
            .set_uplink(0, uplink(1, UPLINK_FORWARD))
            .expect("writes");
        let syn = tcp((CLIENT, PORT), (POD0, API), TCP_SYN, b"");
        untouched(&mut engine, name, &syn, Verdict::PassedDirect);
        let answer = tcp((POD0, API), (CLIENT, PORT), TCP_SYN | TCP_ACK, b"");
        untouched(&mut engine, program::EGRESS, &answer, Verdict::PassedDirect);
    }
}

#[test]
fn the_reply_leaves_by_the_uplink_on_which_the_client_arrives() {
    let mut engine = engine();
    let pod = establish(&mut engine, program::INGRESS, API);
    // The same flow, its arrival uplink being another one.
    let other = Uplink {
        mac: [2, 0, 0, 0, 0, 12],
        ..uplink(1, UPLINK_FORWARD)
    };
    engine.set_uplink(1, other).expect("writes");
    let key = FlowKey::reply(Addr::from(CLIENT), PORT, Addr::from(pod.0), pod.1);
    let entry = engine
        .flow(map::LIVING_REPLY, &key)
        .expect("reads")
        .expect("living");
    engine
        .set_flow(map::LIVING_REPLY, &key, Flow { uplink: 1, ..entry })
        .expect("writes");
    let data = tcp(pod, (CLIENT, PORT), TCP_ACK, b"x");
    let outcome = run(
        &mut engine,
        program::EGRESS,
        &data,
        Verdict::RepliedRedirected,
    );
    assert_eq!(ends(&outcome.frame).0, (VIP, API));
    assert_eq!(
        (&outcome.frame[..6], &outcome.frame[6..12]),
        (&CLIENT_MAC[..], &other.mac[..])
    );
    // Two ports of one bridge have one MAC: the bridge knows best.
    engine
        .set_uplink(
            1,
            Uplink {
                mac: NODE_MAC,
                ..other
            },
        )
        .expect("writes");
    run(&mut engine, program::EGRESS, &data, Verdict::Replied);
}

#[test]
fn a_frame_cut_anywhere_gets_a_verdict_and_never_a_rewrite() {
    for name in FORWARD {
        let mut engine = engine();
        let whole = to_vip(API, TCP_SYN);
        // The kernel's test run takes no IPv4 skb without a whole IPv4 header.
        let shortest = if name == program::INGRESS { 34 } else { 14 };
        for length in shortest..whole.len() {
            let outcome = engine.run(name, &whole[..length]).expect("runs");
            let expected = if length < 34 {
                Verdict::Passed
            } else {
                Verdict::DroppedMalformed
            };
            assert_eq!(outcome.verdict, expected, "{name} {length}");
            assert_eq!(outcome.frame, whole[..length]);
        }
        assert!(young(&mut engine, API).is_none());
    }
}
