//! What may have become of a packet, told without the engine: an independent packet library reads it, sums are taken from
//! scratch, and all bytes that a verdict does not speak of are as they were.

use etherparse::checksum::Sum16BitWords;
use etherparse::{
    Icmpv6Slice, LaxNetSlice, LaxSlicedPacket, LinkExtSlice, NetSlice, SlicedPacket, TransportSlice,
};
use lb_common::events::{CAPTURE, EVENT_REFUSAL, Ending, Event, NO_VERDICT, kind_of};
use lb_common::frame::Buffer;
use lb_common::layout::{Addr, BACKEND_ALIVE, BACKEND_ELIGIBLE, Flow, FlowKey, ServiceKey, map};
use lb_common::packet::{self, Ip, PROBE_RETURNS, ethertype, protocol};
use lb_common::{Action, Verdict};

use crate::engine::{Engine, Outcome, Program};
use crate::frame::{Packet, Sum};
use crate::scene::{CLIENT, GATEWAY, NODE_MAC, OTHER_MAC, OTHER_SLOT, PEER_MAC, Scene, VIP, VIP6};

/// An Ethernet header.
const LINK: usize = 14;
/// What an echo has at least behind its IP header.
const ICMP: usize = 8;
/// What a probe has behind its IP header.
const UDP_AND_PROBE: usize = 8 + size_of::<packet::Probe>();

/// Where what of a frame is.
#[derive(Clone, Copy, Debug)]
struct Layout {
    network: usize,
    transport: usize,
    /// End of the IP packet, at most the frame's.
    end: usize,
    /// What the IP header says of the length of all behind it and its extensions.
    length: u32,
    is_v6: bool,
    protocol: u8,
}

/// What the engine's parser makes of a frame.
fn parsed(frame: &[u8]) -> Option<(Layout, Ip)> {
    let mut bytes = frame.to_vec();
    let buffer = Buffer::new(&mut bytes);
    let link = packet::link(&buffer)?;
    let ip = match link.ethertype {
        ethertype::IPV4 => packet::ipv4(&buffer, link.network)?,
        ethertype::IPV6 => {
            let mut ip = packet::ipv6(&buffer, link.network)?;
            packet::extensions(&buffer, &mut ip)?;
            ip
        }
        _ => return None,
    };
    let layout = Layout {
        network: ip.network(),
        transport: ip.transport(),
        end: frame.len().min(ip.network() + ip.length as usize),
        length: ip.transport_length(),
        is_v6: ip.is_v6(),
        protocol: ip.protocol,
    };
    Some((layout, ip))
}

/// The TCP packet that the library finds, however long it is said to be: offsets of its IP and TCP headers, and its flow.
fn found(frame: &[u8]) -> Option<(usize, usize, FlowKey)> {
    let offset = |part: &[u8]| part.as_ptr().addr() - frame.as_ptr().addr();
    let sliced = LaxSlicedPacket::from_ethernet(frame).ok()?;
    let Some(TransportSlice::Tcp(tcp)) = &sliced.transport else {
        return None;
    };
    let (network, source, destination) = match sliced.net.as_ref()? {
        LaxNetSlice::Ipv4(ip) => {
            let header = ip.header();
            let network = offset(header.slice());
            let from = |octets: [u8; 4]| Addr::from_v4_raw(u32::from_ne_bytes(octets));
            (network, from(header.source()), from(header.destination()))
        }
        LaxNetSlice::Ipv6(ip) => {
            let header = ip.header();
            let octets = |octets| Addr { octets };
            let network = offset(header.slice());
            (
                network,
                octets(header.source()),
                octets(header.destination()),
            )
        }
        LaxNetSlice::Arp(_) => return None,
    };
    let flow = FlowKey::forward(
        source,
        tcp.source_port(),
        destination,
        tcp.destination_port(),
    );
    Some((network, offset(tcp.slice()), flow))
}

/// Panics where the engine's parser and the library read a TCP packet differently.
#[track_caller]
pub fn check_parsed(frame: &[u8]) {
    let Some((network, transport, flow)) = found(frame) else {
        return;
    };
    let mut bytes = frame.to_vec();
    let Some((layout, ip)) = parsed(frame) else {
        // Three tags are one more than the engine looks behind.
        let tags = LaxSlicedPacket::from_ethernet(frame).map_or(0, |sliced| sliced.link_exts.len());
        assert!(
            tags > 2 || has_odd_tag(frame) || frame.len() < network + 20,
            "no IP: {frame:02x?}"
        );
        return;
    };
    if ip.is_v6() != (frame[network] >> 4 == 6) {
        // The library goes by the version in the header, Ethernet's type notwithstanding; the kernel drops such a one.
        assert!(!ip.is_well_formed(), "of two versions: {frame:02x?}");
        return;
    }
    assert_eq!(layout.network, network);
    assert_eq!((ip.source, ip.destination), (flow.client, flow.addr));
    if layout.protocol != protocol::TCP || ip.is_fragment() {
        // More extension headers, or others, than the engine looks behind; or on its way to elsewhere.
        assert!(layout.is_v6 || ip.is_fragment(), "not TCP: {frame:02x?}");
        return;
    }
    assert_eq!(layout.transport, transport);
    if let Some(tcp) = packet::tcp(&Buffer::new(&mut bytes), &ip) {
        assert_eq!((tcp.source, tcp.destination), (flow.client_port, flow.port));
    }
}

/// Whether a tag is of a kind that the library takes for one, but neither 802.1Q nor the kernel.
fn has_odd_tag(frame: &[u8]) -> bool {
    frame[12..14] == [0x91, 0] || frame.get(16..18) == Some(&[0x91, 0])
}

/// Whether a frame is a whole, sound TCP packet for a VIP that is served here, from somebody who may send it: the engine
/// must not take it for anything else.
fn is_sound_for_vip(frame: &[u8]) -> bool {
    let Ok(sliced) = SlicedPacket::from_ethernet(frame) else {
        return false;
    };
    let is_untagged = sliced.link_exts.len() <= 2
        && sliced.link_exts.iter().all(|tag| match tag {
            LinkExtSlice::Vlan(vlan) => vlan.vlan_identifier().value() == 0,
            LinkExtSlice::Macsec(_) => false,
        });
    let Some(TransportSlice::Tcp(_)) = sliced.transport else {
        return false;
    };
    let is_ours = match &sliced.net {
        Some(NetSlice::Ipv4(ip)) => {
            let header = ip.header();
            header.destination() == VIP.octets()
                && header.source() == CLIENT.octets()
                && !ip.is_payload_fragmented()
        }
        Some(NetSlice::Ipv6(ip)) => {
            use etherparse::Ipv6ExtensionSlice::{Authentication, Routing};
            let mut count = 0;
            let is_known = ip.extensions().clone().into_iter().all(|header| {
                count += 1;
                match header {
                    Authentication(_) => false,
                    Routing(routing) => routing.payload()[1] == 0,
                    _ => true,
                }
            });
            ip.header().destination() == VIP6.octets()
                // Of a length of 0 the library makes all that is there (RFC 2675, BIG TCP); the engine knows none.
                && ip.header().payload_length() != 0
                && ip.header().source()[0] == 0xfd
                && ip.header().source() != VIP6.octets()
                && is_known
                && count <= packet::MAX_EXTENSIONS
                && !ip.is_payload_fragmented()
        }
        _ => false,
    };
    frame[..6] == NODE_MAC && is_untagged && !has_odd_tag(frame) && is_ours
}

/// Whether a packet's transport header lies behind more extension headers than the engine brings to hand of an skb that
/// is not linear: there it takes such a packet for one that is cut.
fn is_beyond_reach(packet: &Packet) -> bool {
    packet.linear < packet.frame.len()
        && packet.frame.len() > packet::EXTENSION_HEADERS
        && parsed(&packet.frame)
            .is_none_or(|(layout, _)| layout.transport + 20 > packet::EXTENSION_HEADERS)
}

/// Sum of 16-bit words in memory order, folded; 0xffff where a checksum among them is right.
fn sum(parts: &[&[u8]]) -> u16 {
    let all = parts
        .iter()
        .fold(Sum16BitWords::new(), |sum, part| sum.add_slice(part));
    !all.ones_complement()
}

/// In one's complement there are two zeros.
fn same(a: u16, b: u16) -> bool {
    a == b || (a == 0 && b == 0xffff) || (a == 0xffff && b == 0)
}

impl Layout {
    /// What the transport's checksum is over, summed.
    fn transport_sum(&self, frame: &[u8]) -> u16 {
        let carried = &frame[self.transport..self.end.max(self.transport)];
        if self.protocol == protocol::ICMP {
            return sum(&[carried]);
        }
        sum(&[&self.pseudo_sum(frame).to_ne_bytes(), carried])
    }

    /// Sum of the pseudo-header.
    fn pseudo_sum(&self, frame: &[u8]) -> u16 {
        let length = self.length.to_be_bytes();
        sum(&[&frame[self.addresses()], &length, &[0, self.protocol]])
    }

    fn addresses(&self) -> std::ops::Range<usize> {
        let (at, length) = if self.is_v6 { (8, 16) } else { (12, 4) };
        self.network + at..self.network + at + 2 * length
    }

    fn source(&self) -> std::ops::Range<usize> {
        let all = self.addresses();
        all.start..all.start + all.len() / 2
    }

    fn destination(&self) -> std::ops::Range<usize> {
        let all = self.addresses();
        all.start + all.len() / 2..all.end
    }

    /// The IPv4 header, or nothing of IPv6, where it has no sum.
    fn header(&self) -> std::ops::Range<usize> {
        let length = if self.is_v6 {
            0
        } else {
            self.transport - self.network
        };
        self.network..self.network + length
    }

    fn header_checksum(&self) -> std::ops::Range<usize> {
        let length = if self.is_v6 { 0 } else { 2 };
        self.network + 10..self.network + 10 + length
    }

    fn bytes(&self, at: usize, length: usize) -> std::ops::Range<usize> {
        self.transport + at..self.transport + at + length
    }

    /// Address and port at one end.
    fn end_of(&self, frame: &[u8], is_source: bool) -> (Addr, u16) {
        let (range, at) = if is_source {
            (self.source(), 0)
        } else {
            (self.destination(), 2)
        };
        let bytes = &frame[range];
        let addr = match <[u8; 16]>::try_from(bytes) {
            Ok(octets) => Addr { octets },
            Err(_) => Addr::from_v4_raw(u32::from_ne_bytes(bytes.try_into().expect("four"))),
        };
        let port = &frame[self.bytes(at, 2)];
        (addr, u16::from_be_bytes([port[0], port[1]]))
    }
}

/// Panics unless two frames are alike but for some bytes.
#[track_caller]
fn check_rest(before: &[u8], after: &[u8], but: &[std::ops::Range<usize>]) {
    assert_eq!(before.len(), after.len(), "length");
    for (at, (old, new)) in before.iter().zip(after).enumerate() {
        assert!(
            old == new || but.iter().any(|range| range.contains(&at)),
            "octet {at} was {old:#x} and is {new:#x}"
        );
    }
}

#[track_caller]
fn check_same(what: &str, before: u16, after: u16) {
    assert!(
        same(before, after),
        "{what}: sum was {before:#x} and is {after:#x}"
    );
}

/// A frame with what a device does to one whose sum is left to it.
fn finished(packet: &Packet, frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    if packet.sum == Sum::Partial {
        let (layout, _) = parsed(&packet.frame).expect("only TCP is left to a device");
        let complete = !sum(&[&frame[layout.transport..]]);
        frame[layout.bytes(16, 2)].copy_from_slice(&complete.to_ne_bytes());
    }
    frame
}

/// Leaves the rest of a TCP packet's sum to a device, as a local sender does; false for all other frames.
pub fn leave_sum(frame: &mut [u8]) -> bool {
    let Some((layout, ip)) = parsed(frame) else {
        return false;
    };
    let is_tcp = packet::tcp(&Buffer::new(&mut frame.to_vec()), &ip).is_some();
    let is_whole = layout.end == frame.len() && layout.network + ip.length as usize == layout.end;
    if layout.protocol != protocol::TCP || ip.is_fragment() || !is_tcp || !is_whole {
        return false;
    }
    let pseudo = layout.pseudo_sum(frame);
    frame[layout.bytes(16, 2)].copy_from_slice(&pseudo.to_ne_bytes());
    true
}

/// Panics where a packet was treated as it must not be.
///
/// # Panics
/// Then.
#[track_caller]
pub fn check(scene: &Scene, program: Program, packet: &Packet, outcome: &Outcome) {
    use Verdict as V;
    let verdict = outcome.verdict;
    let before = finished(packet, &packet.frame);
    check_parsed(&before);
    if program != Program::Egress && is_sound_for_vip(&before) && !is_beyond_reach(packet) {
        assert!(
            !matches!(
                verdict,
                V::Passed
                    | V::PassedOtherMac
                    | V::PassedOtherVlan
                    | V::PassedDirect
                    | V::DroppedMalformed
                    | V::DroppedFragment
                    | V::DroppedProtocol
                    | V::DroppedGroupMac
                    | V::DroppedSource
                    | V::DroppedBypass
            ),
            "a sound packet for the VIP is {verdict:?}"
        );
    }
    assert!(
        is_of_both(verdict) || is_of_egress(verdict) == (program == Program::Egress),
        "{program:?} says {verdict:?}"
    );
    let after = match verdict.action() {
        Action::Drop => outcome.frame.clone(),
        _ if verdict.name().starts_with("passed") => outcome.frame.clone(),
        _ => finished(packet, &outcome.frame),
    };
    match verdict {
        V::Forwarded => forwarded(scene, &before, &after, BACKEND_ALIVE),
        V::ForwardedNew => forwarded(scene, &before, &after, BACKEND_ALIVE | BACKEND_ELIGIBLE),
        V::ForwardedMiss => forwarded(scene, &before, &after, BACKEND_ALIVE | BACKEND_ELIGIBLE),
        V::Replied | V::RepliedYoung | V::RepliedRestored => replied(scene, &before, &after),
        V::RepliedRedirected => redirected(scene, &before, &after, outcome),
        V::ForwardedIcmp => quoted(&before, &after, true, 0),
        V::RepliedIcmp => quoted(&before, &after, false, 0),
        V::HandedOn | V::HandedOnNew | V::HandedOnMiss | V::HandedOnException => {
            handed_on(&before, &after);
        }
        _ if verdict.is_refusal() => {
            // At TC one that looks as if a device was to finish it is answered by one that a device finishes.
            let is_bare = program == Program::Ingress && packet.sum != Sum::Partial && {
                let layout = tcp_of(&before);
                before[layout.bytes(16, 2)] == layout.pseudo_sum(&before).to_ne_bytes()
            };
            reset(scene, &before, &after, is_bare);
        }
        V::ArpAnswered => arp(&before, &after),
        V::NdAnswered => advertisement(&before, &after),
        V::EchoAnswered => echo(&before, &after),
        V::ProbeReflected => probe(&before, &after),
        V::DroppedRewrite => {
            // A RST whose sum a device cannot finish, or whose way the kernel does not know.
            let is_lost = is_handed_on(scene, &before) && scene.neighbor.is_none();
            assert!(
                program == Program::Ingress || is_lost,
                "no rewrite of a plain packet fails"
            );
        }
        _ => assert_eq!(after, packet.frame, "{verdict:?} changed the frame"),
    }
    if let Some(whole) = outcome.whole
        && verdict.action() == Action::Pass
    {
        let is = sum(&[&outcome.frame[LINK..]]);
        check_same("CHECKSUM_COMPLETE", is, whole);
    }
}

/// Panics where what is at hand of a packet, or is known of its sum, made a difference.
///
/// # Panics
/// Then.
#[track_caller]
pub fn check_alike(packet: &Packet, one: &Outcome, other: &Outcome) {
    if is_beyond_reach(packet) {
        return;
    }
    assert_eq!(
        one.verdict, other.verdict,
        "{:?}, {} at hand",
        packet.sum, packet.linear
    );
    if packet.sum != Sum::Partial {
        assert_eq!(
            one.frame, other.frame,
            "{:?}, {} at hand",
            packet.sum, packet.linear
        );
    }
}

/// Panics where a monitor that watches everything is told something else of a packet than what became of it.
///
/// # Panics
/// Then.
#[track_caller]
pub fn check_told(packet: &Packet, outcome: &Outcome, events: &[Event]) {
    let (flows, packets): (Vec<&Event>, Vec<&Event>) =
        events.iter().partition(|event| event.verdict == NO_VERDICT);
    assert!(flows.iter().all(|event| event.captured == 0));
    let kind = kind_of(outcome.verdict);
    // A refusal that could not be answered has been told of already.
    let is_told = kind != 0 && kind != EVENT_REFUSAL;
    assert!(packets.len() <= 2 && (!is_told || !packets.is_empty()));
    for event in &packets {
        let is_last = event.verdict == outcome.verdict as u8;
        assert!(
            is_last || event.kind == EVENT_REFUSAL,
            "told of {}",
            event.verdict
        );
        let frame = if event.kind == EVENT_REFUSAL {
            &packet.frame
        } else {
            &outcome.frame
        };
        assert_eq!(event.length as usize, frame.len(), "length of what is told");
        let captured = event.captured as usize;
        assert_eq!(event.frame[..captured], frame[..captured], "what is told");
        // At XDP it is read by pairs of octets.
        let most = frame.len().min(CAPTURE);
        assert!(
            captured == most || captured + 1 == most,
            "{captured} of {most}"
        );
    }
    if is_told {
        assert!(packets.iter().any(|event| event.kind == kind));
    }
}

/// Panics unless the flows that have left the living table, and no others, are told to have ended.
///
/// # Panics
/// Then.
#[track_caller]
pub fn check_ended(before: &[(FlowKey, Flow)], after: &[(FlowKey, Flow)], endings: &[Ending]) {
    let is_over = |key: &FlowKey| !after.iter().any(|(other, _)| other == key);
    let keys = before.iter().map(|(key, _)| *key);
    let over: Vec<FlowKey> = keys.filter(is_over).collect();
    let told: Vec<FlowKey> = endings.iter().map(|ending| ending.key).collect();
    assert!(
        over == told,
        "{} flows ended, {} told",
        over.len(),
        told.len()
    );
    assert!(endings.iter().all(|ending| ending.by != 0), "by nobody");
}

/// Panics unless every living flow has both its entries, which name each other, and no other entry is there.
///
/// # Panics
/// Then.
#[track_caller]
pub fn check_pairs(engine: &Engine) {
    let flows = engine.rows::<FlowKey, Flow>(map::LIVING);
    let mut replies = engine.rows::<FlowKey, Flow>(map::LIVING_REPLY);
    for (key, flow) in flows {
        let reply = FlowKey::reply(key.client, flow.client_port, flow.addr, flow.port);
        let place = replies.iter().position(|(other, _)| *other == reply);
        let (_, entry) = replies.swap_remove(place.expect("a living flow's reply entry"));
        assert_eq!(
            (entry.addr, entry.port, entry.client_port, entry.backend),
            (key.addr, key.port, key.client_port, flow.backend)
        );
        assert_eq!((entry.uplink, entry.last_hop), (flow.uplink, flow.last_hop));
    }
    assert!(replies.is_empty(), "{} reply entries alone", replies.len());
}

/// What both paths say.
fn is_of_both(verdict: Verdict) -> bool {
    use Verdict as V;
    matches!(
        verdict,
        V::Passed | V::PassedDirect | V::DroppedSettling | V::DroppedRewrite
    )
}

fn is_of_egress(verdict: Verdict) -> bool {
    use Verdict as V;
    matches!(
        verdict,
        V::Replied
            | V::RepliedYoung
            | V::RepliedRestored
            | V::RepliedRedirected
            | V::RepliedIcmp
            | V::DroppedTableFull
            | V::DroppedReplyUnknown
            | V::DroppedFirstReset
    )
}

#[track_caller]
fn tcp_of(frame: &[u8]) -> Layout {
    let (layout, ip) = parsed(frame).expect("an IP packet");
    assert_eq!(layout.protocol, protocol::TCP);
    assert!(!ip.is_fragment());
    layout
}

/// Whether a frame is one of the peer's that is none of its own.
fn is_handed_on(scene: &Scene, frame: &[u8]) -> bool {
    let is_own = || parsed(frame).is_some_and(|(_, ip)| scene.peer.addrs.contains(&ip.source));
    scene
        .peer_mac()
        .is_some_and(|peer| frame[6..12] == peer.mac)
        && !is_own()
}

/// The backends of a VIP port that are on this node and have those bits.
fn pods_of(scene: &Scene, (addr, port): (Addr, u16), flags: u16) -> Vec<(Addr, u16)> {
    let key = ServiceKey::new(addr, port);
    let service = scene.served.services.iter().find(|(of, _)| *of == key);
    let Some((_, service)) = service else {
        return Vec::new();
    };
    scene
        .served
        .backends
        .iter()
        .filter(|backend| {
            backend.service == service.id && backend.peer == 0 && backend.flags & flags == flags
        })
        .map(|backend| (backend.addr, backend.port))
        .collect()
}

#[track_caller]
fn rewritten(before: &[u8], after: &[u8], is_source: bool, link: usize) -> Layout {
    let layout = tcp_of(before);
    let address = if is_source {
        layout.source()
    } else {
        layout.destination()
    };
    let but = [
        0..link,
        address,
        layout.header_checksum(),
        layout.bytes(0, 4),
        layout.bytes(16, 2),
    ];
    check_rest(before, after, &but);
    check_parsed(after);
    let header = layout.header();
    check_same(
        "IP",
        sum(&[&before[header.clone()]]),
        sum(&[&after[header]]),
    );
    check_same(
        "TCP",
        layout.transport_sum(before),
        layout.transport_sum(after),
    );
    layout
}

#[track_caller]
fn forwarded(scene: &Scene, before: &[u8], after: &[u8], flags: u16) {
    let layout = rewritten(before, after, false, 0);
    let (vip, pod) = (layout.end_of(before, false), layout.end_of(after, false));
    assert!(
        pods_of(scene, vip, flags).contains(&pod),
        "{vip:?} leads to {pod:?}"
    );
}

#[track_caller]
fn replied(scene: &Scene, before: &[u8], after: &[u8]) {
    let layout = rewritten(before, after, true, 12);
    let (pod, vip) = (layout.end_of(before, true), layout.end_of(after, true));
    // One that is gone may still send what it has.
    assert!(
        pods_of(scene, vip, 0).contains(&pod),
        "{pod:?} shows as {vip:?}"
    );
}

/// A reply, or an ICMP error, that leaves by the other uplink.
#[track_caller]
fn redirected(scene: &Scene, before: &[u8], after: &[u8], outcome: &Outcome) {
    let (layout, _) = parsed(before).expect("an IP packet");
    if layout.protocol == protocol::TCP {
        replied(scene, before, after);
    } else {
        quoted(before, after, false, 12);
    }
    let redirection = outcome.redirection.expect("it goes somewhere");
    assert_eq!(redirection.uplink, OTHER_SLOT);
    if redirection.by_neighbor {
        assert_eq!(after[..12], before[..12], "the kernel finds the MACs");
        let is_far = !layout.is_v6 && !before[layout.destination()].starts_with(&[172, 22, 0]);
        let gateway = is_far.then_some(Addr::from(GATEWAY));
        assert_eq!(redirection.next_hop, gateway);
    } else {
        assert_eq!(after[6..12], OTHER_MAC);
    }
}

#[track_caller]
fn handed_on(before: &[u8], after: &[u8]) {
    let (layout, _) = parsed(before).expect("an IP packet");
    let limit = layout.network + if layout.is_v6 { 7 } else { 8 };
    check_rest(
        before,
        after,
        &[0..12, limit..limit + 1, layout.header_checksum()],
    );
    assert_eq!((&after[..6], &after[6..12]), (&PEER_MAC[..], &NODE_MAC[..]));
    assert!(
        after[limit] > 0 && after[limit] == before[limit] - 1,
        "time to live"
    );
    let header = layout.header();
    check_same(
        "IP",
        sum(&[&before[header.clone()]]),
        sum(&[&after[header]]),
    );
}

/// Panics unless the link layer of an answer is that of the question, the other way round.
#[track_caller]
fn answered(before: &[u8], after: &[u8], network: usize, to: &[u8]) {
    assert_eq!((&after[..6], &after[6..12]), (to, &NODE_MAC[..]));
    assert_eq!(after[12..network], before[12..network], "tags");
}

/// RFC 9293 section 3.10.7.1.
#[track_caller]
fn reset(scene: &Scene, before: &[u8], after: &[u8], is_bare: bool) {
    let layout = tcp_of(before);
    let asked = &before[layout.transport..];
    let word = |at: usize| u32::from_be_bytes(asked[at..at + 4].try_into().expect("four"));
    let (flags, header) = (asked[13], u32::from(asked[12] >> 4) * 4);
    assert_eq!(flags & packet::TCP_RST, 0, "a RST is never answered");
    let to = if is_handed_on(scene, before) {
        scene.neighbor.expect("or it could not be answered")
    } else {
        before[6..12].try_into().expect("six")
    };
    answered(before, after, layout.network, &to);
    let sliced = SlicedPacket::from_ethernet(after).expect("a sound packet");
    let Some(TransportSlice::Tcp(tcp)) = &sliced.transport else {
        panic!("no TCP")
    };
    match &sliced.net {
        Some(NetSlice::Ipv4(ip)) => {
            let ip = ip.header().to_header();
            assert!(
                same(ip.header_checksum, ip.calc_header_checksum()),
                "IP checksum"
            );
            let of = tcp.to_header().calc_checksum_ipv4(&ip, &[]);
            assert!(
                is_bare || same(tcp.checksum(), of.expect("short")),
                "TCP checksum"
            );
        }
        Some(NetSlice::Ipv6(ip)) => {
            let of = tcp
                .to_header()
                .calc_checksum_ipv6(&ip.header().to_header(), &[]);
            assert!(
                is_bare || same(tcp.checksum(), of.expect("short")),
                "TCP checksum"
            );
        }
        _ => panic!("no IP"),
    }
    assert!(tcp.payload().is_empty() && tcp.options().is_empty());
    assert_eq!(
        after.len(),
        layout.network + if layout.is_v6 { 60 } else { 40 }
    );
    let (answer, _) = parsed(after).expect("parsed above");
    assert_eq!(answer.end_of(after, true), layout.end_of(before, false));
    assert_eq!(answer.end_of(after, false), layout.end_of(before, true));
    assert!(tcp.rst() && !tcp.syn() && !tcp.fin());
    if flags & packet::TCP_ACK != 0 {
        assert_eq!((tcp.sequence_number(), tcp.ack()), (word(8), false));
    } else {
        let ends = flags & packet::TCP_SYN != 0;
        let length =
            layout.length - header + u32::from(ends) + u32::from(flags & packet::TCP_FIN != 0);
        assert!(tcp.ack());
        assert_eq!(tcp.acknowledgment_number(), word(4).wrapping_add(length));
    }
}

/// Where the network header begins.
fn network(frame: &[u8]) -> usize {
    let mut bytes = frame.to_vec();
    packet::link(&Buffer::new(&mut bytes))
        .expect("a link layer")
        .network
}

/// RFC 826.
#[track_caller]
fn arp(before: &[u8], after: &[u8]) {
    let network = network(before);
    answered(before, after, network, &before[6..12]);
    assert_eq!(before.len(), after.len());
    let (asked, told) = (&before[network..], &after[network..]);
    let expected = [
        &asked[..6],
        &[0, 2],
        &NODE_MAC,
        &asked[24..28],
        &asked[8..18],
        &asked[28..],
    ];
    assert_eq!(told, expected.concat());
    assert_eq!(asked[6..8], [0, 1], "a question");
}

/// RFC 4861 sections 4.4 and 7.2.4.
#[track_caller]
fn advertisement(before: &[u8], after: &[u8]) {
    let network = network(before);
    let target = &before[network + 48..network + 64];
    let asker = &before[network + 8..network + 24];
    let is_nobody = asker == [0; 16];
    let to: &[u8] = if is_nobody {
        &[0x33, 0x33, 0, 0, 0, 1]
    } else {
        &before[6..12]
    };
    answered(before, after, network, to);
    let (layout, ip) = parsed(after).expect("an IP packet");
    assert_eq!(after.len(), layout.network + 72);
    assert_eq!(after[network + 7], 255, "hop limit");
    let told = &after[network + 40..];
    let slice = Icmpv6Slice::from_slice(told).expect("ICMPv6");
    assert!(slice.is_checksum_valid(ip.source.octets, ip.destination.octets));
    assert_eq!(told[..2], [136, 0]);
    assert_eq!(
        (told[4] & 0x40 != 0, told[4] & 0x20 != 0),
        (!is_nobody, true)
    );
    assert_eq!((&told[8..24], &ip.source.octets[..]), (target, target));
    assert_eq!(told[24..], [&[2, 1][..], &NODE_MAC].concat());
    if !is_nobody {
        assert_eq!(ip.destination.octets, asker);
    }
}

#[track_caller]
fn check_exchanged(layout: &Layout, before: &[u8], after: &[u8]) {
    assert_eq!(after[layout.source()], before[layout.destination()]);
    assert_eq!(after[layout.destination()], before[layout.source()]);
}

#[track_caller]
fn echo(before: &[u8], after: &[u8]) {
    let (layout, _) = parsed(before).expect("an IP packet");
    let limit = layout.network + if layout.is_v6 { 7 } else { 8 };
    let but = [
        0..12,
        limit..limit + 1,
        layout.header_checksum(),
        layout.addresses(),
        layout.bytes(0, 4),
    ];
    check_rest(before, after, &but);
    answered(before, after, layout.network, &before[6..12]);
    check_exchanged(&layout, before, after);
    assert_eq!(after[limit], 64, "it begins a way of its own");
    let kinds = if layout.is_v6 { (128, 129) } else { (8, 0) };
    assert_eq!((before[layout.transport], after[layout.transport]), kinds);
    let header = layout.header();
    check_same(
        "IP",
        sum(&[&before[header.clone()]]),
        sum(&[&after[header]]),
    );
    assert!(layout.length as usize >= ICMP, "no whole echo");
    check_same(
        "ICMP",
        layout.transport_sum(before),
        layout.transport_sum(after),
    );
}

#[track_caller]
fn probe(before: &[u8], after: &[u8]) {
    let (layout, _) = parsed(before).expect("an IP packet");
    let but = [
        0..12,
        layout.addresses(),
        layout.bytes(6, 2),
        layout.bytes(12, 4),
    ];
    check_rest(before, after, &but);
    answered(before, after, layout.network, &PEER_MAC);
    check_exchanged(&layout, before, after);
    assert_eq!(after[layout.bytes(12, 4)], PROBE_RETURNS.to_be_bytes());
    if layout.is_v6 {
        assert!(layout.length as usize >= UDP_AND_PROBE, "no whole probe");
        check_same(
            "UDP",
            layout.transport_sum(before),
            layout.transport_sum(after),
        );
        assert_ne!(after[layout.bytes(6, 2)], [0, 0], "UDP over IPv6 has a sum");
    } else {
        assert_eq!(after[layout.bytes(6, 2)], [0, 0]);
    }
}

/// An ICMP error and what it quotes; for the pod what it sent, for the client what that sent.
#[track_caller]
fn quoted(before: &[u8], after: &[u8], to_pod: bool, link: usize) {
    let (outer, _) = parsed(before).expect("an IP packet");
    let at = outer.transport + 8;
    // As a frame of its own, as far as it is quoted.
    let ethertype: &[u8] = if outer.is_v6 { &[0x86, 0xdd] } else { &[8, 0] };
    let quote = |frame: &[u8]| [&[0; 12], ethertype, &frame[at..outer.end]].concat();
    let (old, new) = (quote(before), quote(after));
    let (inner, _) = parsed(&old).expect("a quoted packet with addresses");
    let move_out = |range: std::ops::Range<usize>| range.start - LINK + at..range.end - LINK + at;
    let (outer_end, inner_end) = if to_pod {
        (outer.destination(), inner.source())
    } else {
        (outer.source(), inner.destination())
    };
    let but = [
        0..link,
        outer_end,
        outer.header_checksum(),
        outer.bytes(2, 2),
        move_out(inner_end),
        move_out(inner.header_checksum()),
        move_out(inner.bytes(0, 4)),
        move_out(inner.bytes(16, 2)),
    ];
    check_rest(before, after, &but);
    assert!(
        move_out(inner.bytes(0, 4)).end <= outer.end,
        "rewrote ports that are not quoted"
    );
    let header = outer.header();
    check_same(
        "IP",
        sum(&[&before[header.clone()]]),
        sum(&[&after[header]]),
    );
    check_same(
        "ICMP",
        outer.transport_sum(before),
        outer.transport_sum(after),
    );
    let header = inner.header();
    check_same(
        "quoted IP",
        sum(&[&old[header.clone()]]),
        sum(&[&new[header]]),
    );
    // What is quoted may say of itself that it is shorter; there is no sum to speak of, then.
    let sum_end = inner.bytes(16, 2).end;
    if sum_end <= inner.end && move_out(sum_end..sum_end).end <= outer.end {
        check_same(
            "quoted TCP",
            inner.transport_sum(&old),
            inner.transport_sum(&new),
        );
    }
}
