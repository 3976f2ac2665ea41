//! Properties of the whole engine on packets of every make.

use etherparse::{
    EtherType, IpNumber, Ipv4Header, Ipv4Options, Ipv6Header, SingleVlanHeader, TcpHeader, VlanId,
    VlanPcp,
};
use lb_common::layout::{Flow, FlowKey, map};
use lb_common::{Action, Verdict};
use lb_host::corpus::{Stage, Step};
use lb_host::scene::{
    API, CLIENT, CLIENT_MAC, CLIENT6, EMPTY, IMAGES, INSTANCE, NODE_MAC, PODS, PODS6, REMOTE,
    RESTRICTED, VIP, VIP6,
};
use lb_host::{Packet, Program, Sum, oracle};
use proptest::prelude::*;
use proptest::sample::select;

/// What of a packet may be any.
#[derive(Clone, Debug)]
struct Make {
    /// EtherTypes and priorities of tags of VLAN 0.
    tags: Vec<(u16, u8)>,
    is_v6: bool,
    /// Words of IPv4 options, or extension headers: number and units of eight octets beyond the first.
    options: u8,
    extensions: Vec<(u8, u8)>,
    port: u16,
    client_port: u16,
    tcp_options: u8,
    flags: u8,
    sequence: u32,
    acknowledgment: u32,
    limit: u8,
    identification: u16,
    payload: Vec<u8>,
    /// Octets behind the packet, as a short frame has.
    padding: u8,
    is_from_pod: bool,
    pod: usize,
}

fn make() -> impl Strategy<Value = Make> {
    let link = (
        prop::collection::vec((select(vec![0x8100, 0x88a8]), 0..8_u8), 0..=2),
        any::<bool>(),
        0..=10_u8,
        prop::collection::vec((select(vec![43_u8, 60, 44]), 0..4_u8), 0..=3),
        any::<bool>(),
    );
    let tcp = (
        select(vec![
            API, IMAGES, INSTANCE, REMOTE, EMPTY, RESTRICTED, 6189, 22,
        ]),
        any::<u16>(),
        0..=10_u8,
        any::<u8>(),
        any::<u32>(),
        any::<u32>(),
    );
    let rest = (
        any::<u8>(),
        any::<u16>(),
        prop::collection::vec(any::<u8>(), 0..200),
        0..20_u8,
        prop::bool::weighted(0.2),
    );
    (link, tcp, rest).prop_map(|(link, tcp, rest)| {
        let (tags, is_v6, options, extensions, with_hop_by_hop) = link;
        let (port, client_port, tcp_options, flags, sequence, acknowledgment) = tcp;
        let (limit, identification, payload, padding, is_from_pod) = rest;
        // Only at the first place (RFC 8200 section 4.1).
        let first = with_hop_by_hop.then_some((0, 1));
        Make {
            tags,
            is_v6,
            options,
            extensions: first.into_iter().chain(extensions).collect(),
            port,
            client_port,
            tcp_options,
            flags,
            sequence,
            acknowledgment,
            limit,
            identification,
            payload,
            padding,
            is_from_pod,
            pod: 0,
        }
    })
}

impl Make {
    /// The frame, all of whose sums the library has computed.
    fn frame(&self) -> Vec<u8> {
        let mut frame = if self.is_from_pod {
            [CLIENT_MAC, NODE_MAC].concat()
        } else {
            [NODE_MAC, CLIENT_MAC].concat()
        };
        let ip = if self.is_v6 {
            EtherType::IPV6
        } else {
            EtherType::IPV4
        };
        let mut kinds: Vec<EtherType> =
            self.tags.iter().map(|(kind, _)| EtherType(*kind)).collect();
        kinds.push(ip);
        frame.extend(kinds[0].0.to_be_bytes());
        for ((_, priority), next) in self.tags.iter().zip(&kinds[1..]) {
            let tag = SingleVlanHeader {
                pcp: VlanPcp::try_new(*priority).expect("three bits"),
                drop_eligible_indicator: false,
                vlan_id: VlanId::try_new(0).expect("twelve bits"),
                ether_type: *next,
            };
            frame.extend(tag.to_bytes());
        }
        let ports = if self.is_from_pod {
            (self.port, self.client_port)
        } else {
            (self.client_port, self.port)
        };
        let mut tcp = TcpHeader::new(ports.0, ports.1, self.sequence, 1024);
        (tcp.fin, tcp.syn, tcp.rst) = (
            self.flags & 1 != 0,
            self.flags & 2 != 0,
            self.flags & 4 != 0,
        );
        (tcp.psh, tcp.ack, tcp.urg) = (
            self.flags & 8 != 0,
            self.flags & 16 != 0,
            self.flags & 32 != 0,
        );
        tcp.acknowledgment_number = self.acknowledgment;
        // No-operations.
        tcp.set_options_raw(&vec![1; usize::from(self.tcp_options) * 4])
            .expect("forty octets at most");
        if self.is_v6 {
            self.v6(&mut frame, &mut tcp);
        } else {
            self.v4(&mut frame, &mut tcp);
        }
        frame.extend(tcp.to_bytes());
        frame.extend(&self.payload);
        frame.resize(frame.len() + usize::from(self.padding), 0xaa);
        frame
    }

    fn v4(&self, frame: &mut Vec<u8>, tcp: &mut TcpHeader) {
        let ends = if self.is_from_pod {
            (PODS[self.pod].octets(), CLIENT.octets())
        } else {
            (CLIENT.octets(), VIP.octets())
        };
        let length = (tcp.header_len() + self.payload.len()) as u16;
        let mut ip =
            Ipv4Header::new(length, self.limit, IpNumber::TCP, ends.0, ends.1).expect("short");
        ip.options = Ipv4Options::try_from(&vec![1; usize::from(self.options) * 4][..])
            .expect("forty octets at most");
        ip.identification = self.identification;
        ip.set_payload_len(usize::from(length)).expect("short");
        ip.header_checksum = ip.calc_header_checksum();
        tcp.checksum = tcp.calc_checksum_ipv4(&ip, &self.payload).expect("short");
        frame.extend(ip.to_bytes());
    }

    fn v6(&self, frame: &mut Vec<u8>, tcp: &mut TcpHeader) {
        let ends = if self.is_from_pod {
            (PODS6[self.pod].octets(), CLIENT6.octets())
        } else {
            (CLIENT6.octets(), VIP6.octets())
        };
        let mut next = IpNumber::TCP;
        let mut extensions = Vec::new();
        for (number, units) in self.extensions.iter().rev() {
            // An atomic fragment (RFC 6946) has one unit.
            let units = if *number == 44 { 0 } else { *units };
            let mut header = vec![0; 8 * (usize::from(units) + 1)];
            (header[0], header[1]) = (next.0, units);
            if *number != 43 && *number != 44 {
                // Padding: one option of all that is left (RFC 8200 section 4.2).
                (header[2], header[3]) = (1, header.len() as u8 - 4);
            }
            extensions.splice(0..0, header);
            next = IpNumber(*number);
        }
        let ip = Ipv6Header {
            payload_length: (extensions.len() + tcp.header_len() + self.payload.len()) as u16,
            next_header: next,
            hop_limit: self.limit,
            source: ends.0,
            destination: ends.1,
            ..Ipv6Header::default()
        };
        tcp.checksum = tcp.calc_checksum_ipv6(&ip, &self.payload).expect("short");
        frame.extend(ip.to_bytes());
        frame.extend(extensions);
    }
}

fn program(is_xdp: bool) -> Program {
    if is_xdp {
        Program::Xdp
    } else {
        Program::Ingress
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// The oracle finds a whole packet: parsed to the same fields, rewritten with right sums, and nothing else changed.
    #[test]
    fn a_sound_packet_is_served_and_nothing_else_of_it_changes(
        make in make(), is_xdp: bool, tag: bool, sum in 0..3_u8, at_hand in 14..200_usize,
    ) {
        let mut frame = make.frame();
        oracle::check_parsed(&frame);
        let is_partial = sum == 1 && !is_xdp && make.padding == 0 && oracle::leave_sum(&mut frame);
        let packet = Packet {
            linear: at_hand.min(frame.len()),
            tag: tag.then_some(0xe000),
            sum: match sum {
                1 if is_partial => Sum::Partial,
                2 => Sum::Complete,
                _ => Sum::None,
            },
            frame,
        };
        let program = if make.is_from_pod { Program::Egress } else { program(is_xdp) };
        let stage = Stage::default();
        let step = Step::Packet(program, packet);
        let outcome = &stage.play(&[step.clone(), step])[0];
        let is_served = !outcome.verdict.name().starts_with("passed");
        prop_assert!(is_served || make.is_from_pod || make.extensions.len() > 4, "{:?}", outcome.verdict);
    }

    /// A dialogue lives, and both its directions keep right sums, whatever the packets look like.
    #[test]
    fn a_dialogue_comes_back_from_the_vip(make in make(), is_xdp: bool) {
        let mut make = Make { port: API, flags: 2, is_from_pod: false, ..make };
        make.extensions.truncate(2);
        let stage = Stage::default();
        let mut engine = stage.scene().engine(8, 8);
        let forward = program(is_xdp);
        engine.attach(forward);
        let mut run = |program, frame: Vec<u8>| {
            let packet = Packet::new(frame);
            let outcome = engine.run(program, &packet);
            oracle::check(stage.scene(), program, &packet, &outcome);
            (outcome, packet.frame)
        };
        let (syn, _) = run(forward, make.frame());
        prop_assert_eq!(syn.verdict, Verdict::ForwardedNew);
        let network = 14 + 4 * make.tags.len();
        let (address, length) = if make.is_v6 { (8, 16) } else { (12, 4) };
        let source = network + address..network + address + length;
        let chosen = &syn.frame[source.end..source.end + length];
        let is_first = chosen == PODS[0].octets() || chosen == PODS6[0].octets();
        let reply = Make { flags: 18, is_from_pod: true, pod: usize::from(!is_first), ..make.clone() };
        let (answer, _) = run(Program::Egress, reply.frame());
        prop_assert_eq!(answer.verdict, Verdict::RepliedYoung);
        let vip: &[u8] = if make.is_v6 { &VIP6.octets() } else { &VIP.octets() };
        prop_assert_eq!(&answer.frame[source], vip);
        let (data, _) = run(forward, Make { flags: 16, ..make.clone() }.frame());
        prop_assert_eq!(data.verdict, Verdict::Forwarded);
        let flows = engine.rows::<FlowKey, Flow>(map::YOUNG).len();
        prop_assert!(flows > 0);
    }

    /// Cut anywhere, a packet gets a verdict, is never answered or brought to a pod, and is as it was.
    #[test]
    fn a_packet_that_is_cut_is_left_alone(make in make(), is_xdp: bool) {
        let make = Make { padding: 0, payload: Vec::new(), ..make };
        let whole = make.frame();
        let program = if make.is_from_pod { Program::Egress } else { program(is_xdp) };
        let stage = Stage::default();
        // Behind the fixed part of the TCP header the engine reads nothing.
        let end = whole.len() - 4 * usize::from(make.tcp_options);
        for length in 14..end {
            let packet = Packet::new(&whole[..length]);
            let outcome = &stage.play(&[Step::Packet(program, packet)])[0];
            let is_left = matches!(outcome.verdict, Verdict::Passed | Verdict::DroppedMalformed | Verdict::DroppedProtocol);
            prop_assert!(is_left, "{length} of {end}: {:?}", outcome.verdict);
            prop_assert_eq!(&outcome.frame[..], &whole[..length]);
        }
    }

    /// Any octets get a verdict that the oracle lets stand.
    #[test]
    fn any_bytes_have_a_verdict(bytes in prop::collection::vec(any::<u8>(), 14..200), start in 0..5_usize, is_xdp: bool, out: bool) {
        let mut frame = bytes;
        // Something that gets past the first checks.
        let starts: [&[u8]; 5] = [
            &[], &NODE_MAC, &[2, 0, 0, 0, 0, 11, 2, 0, 0, 0, 0, 100, 8, 0], &[2, 0, 0, 0, 0, 11, 2, 0, 0, 0, 0, 100, 0x86, 0xdd],
            &[2, 0, 0, 0, 0, 11, 2, 0, 0, 0, 0, 100, 0x81, 0],
        ];
        frame[..starts[start].len()].copy_from_slice(starts[start]);
        let program = if out { Program::Egress } else { program(is_xdp) };
        let outcome = &Stage::default().play(&[Step::Packet(program, Packet::new(frame))])[0];
        let is_sent = matches!(outcome.verdict.action(), Action::Transmit | Action::Redirect);
        prop_assert!(!is_sent || outcome.frame.len() >= 42);
    }
}
