//! Frames as this node sends and hears them beside its programs: link layer, ARP, neighbor discovery, and packet sockets.
//! Sockets belong to the network namespace of the thread that opens them.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use lb_common::packet::{
    NEIGHBOR_ADVERTISEMENT, NEIGHBOR_HOP_LIMIT, NEIGHBOR_SOLICITATION, ethertype, protocol,
};
use socket2::{Domain, SockAddr, SockFilter, Socket, Type};

/// The link layer of a frame, with its tag where it has one.
pub fn ethernet(to: [u8; 6], from: [u8; 6], vlan: Option<u16>, kind: u16) -> Vec<u8> {
    let mut frame = Vec::with_capacity(64);
    frame.extend(to);
    frame.extend(from);
    if let Some(vlan) = vlan {
        frame.extend(ethertype::VLAN.to_be_bytes());
        frame.extend(vlan.to_be_bytes());
    }
    frame.extend(kind.to_be_bytes());
    frame
}

/// An IP header before so many bytes of a protocol's: no options, TTL 64, not to be fragmented; `None` between versions.
pub fn ip_header(from: IpAddr, to: IpAddr, protocol: u8, length: u16) -> Option<Vec<u8>> {
    const TTL: u8 = 64;
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let [high, low] = (20 + length).to_be_bytes();
            let mut header = vec![0x45, 0, high, low, 0, 0, 0x40, 0, TTL, protocol, 0, 0];
            header.extend(from.octets());
            header.extend(to.octets());
            let sum = checksum(&[&header]);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            Some(header)
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let [high, low] = length.to_be_bytes();
            let mut header = vec![0x60, 0, 0, 0, high, low, protocol, TTL];
            header.extend(from.octets());
            header.extend(to.octets());
            Some(header)
        }
        _ => None,
    }
}

/// The checksum of what follows an IP header of [`ip_header`]: over the pseudo-header, too (RFC 9293 section 3.1, RFC
/// 8200 section 8.1).
pub fn transport_checksum(header: &[u8], protocol: u8, body: &[u8]) -> u16 {
    // Both addresses are at the end.
    let ends = &header[if header.len() == 20 { 12 } else { 8 }..];
    let [high, low] = (body.len() as u16).to_be_bytes();
    checksum(&[ends, &[0, protocol, high, low], body])
}

/// The Internet checksum (RFC 1071) of parts of even lengths.
fn checksum(parts: &[&[u8]]) -> u16 {
    let pairs = parts.iter().flat_map(|part| part.chunks(2));
    let sum = pairs.fold(0_u32, |sum, pair| {
        sum + u32::from(u16::from_be_bytes([pair[0], pair[1]]))
    });
    !lb_common::checksum::fold(sum)
}

/// EtherType and payload of a frame of a VLAN. The kernel takes a frame's tag off before a packet socket sees it: one
/// without a tag may be of any VLAN.
fn payload(frame: &[u8], vlan: Option<u16>) -> Option<(u16, &[u8])> {
    /// Without priority and drop eligibility.
    const VLAN_ID: u16 = 0xfff;
    let (kind, rest) = frame.get(12..)?.split_first_chunk()?;
    let kind = u16::from_be_bytes(*kind);
    if kind != ethertype::VLAN {
        return Some((kind, rest));
    }
    let (tag, inner) = rest.split_first_chunk()?;
    if Some(u16::from_be_bytes(*tag) & VLAN_ID) != vlan {
        return None;
    }
    let (kind, rest) = inner.split_first_chunk()?;
    Some((u16::from_be_bytes(*kind), rest))
}

/// The group in which everybody asks who looks for an address (RFC 4291 section 2.7.1).
pub fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b] = address.segments();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | a & 0xff, b)
}

/// Neighbor discovery for IPv6 over Ethernet (RFC 4861): who has an address.
pub mod neighbor {
    use super::*;

    /// Options of a message: the sender's own MAC, and the target's (RFC 4861 section 4.6.1); one unit of eight octets.
    const SOURCE_LINK_LAYER: [u8; 2] = [1, 1];
    const TARGET_LINK_LAYER: [u8; 2] = [2, 1];

    /// The frame that asks who has `target`, from one of this node's own addresses: the answer goes there alone. One to
    /// nobody, as duplicate address detection asks for it, would go to all nodes and override what they know.
    pub fn solicitation(
        mac: [u8; 6],
        own: Ipv6Addr,
        target: Ipv6Addr,
        vlan: Option<u16>,
    ) -> Vec<u8> {
        let group = solicited_node(target);
        // RFC 2464 section 7.
        let [.., a, b, c, d] = group.octets();
        let mut frame = ethernet([0x33, 0x33, a, b, c, d], mac, vlan, ethertype::IPV6);
        let mut message = vec![NEIGHBOR_SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
        message.extend(target.octets());
        message.extend(SOURCE_LINK_LAYER);
        message.extend(mac);
        let length = message.len() as u16;
        if let Some(mut ip) = ip_header(own.into(), group.into(), protocol::ICMPV6, length) {
            ip[7] = NEIGHBOR_HOP_LIMIT;
            let sum = transport_checksum(&ip, protocol::ICMPV6, &message);
            message[2..4].copy_from_slice(&sum.to_be_bytes());
            frame.extend(ip);
        }
        frame.extend(message);
        frame
    }

    /// Which address a frame of a VLAN advertises, and with which MAC.
    pub fn advertised(frame: &[u8], vlan: Option<u16>) -> Option<(Ipv6Addr, [u8; 6])> {
        let (kind, packet) = payload(frame, vlan)?;
        let (ip, message) = packet.split_first_chunk::<40>()?;
        let (message, options) = message.split_first_chunk::<24>()?;
        if kind != ethertype::IPV6
            || (ip[6], ip[7]) != (protocol::ICMPV6, NEIGHBOR_HOP_LIMIT)
            || message[..2] != [NEIGHBOR_ADVERTISEMENT, 0]
        {
            return None;
        }
        let target: [u8; 16] = message[8..].try_into().ok()?;
        let told = options.split_first_chunk::<2>();
        let told = told.filter(|(option, _)| **option == TARGET_LINK_LAYER);
        // It may be left out of the answer to a question that was for one node alone.
        let mac = told.and_then(|(_, mac)| mac.first_chunk());
        let mac = mac.or_else(|| frame.get(6..)?.first_chunk())?;
        Some((target.into(), *mac))
    }
}

/// An ARP packet for IPv4 over Ethernet (RFC 826).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arp {
    /// [`Self::ASKS`] or [`Self::ANSWERS`].
    pub operation: u8,
    /// MAC of the sender.
    pub sender_mac: [u8; 6],
    /// Address of the sender; 0.0.0.0 in a probe, which claims nothing.
    pub sender: Ipv4Addr,
    /// MAC of the target; zero in a question.
    pub target_mac: [u8; 6],
    /// Address of the target.
    pub target: Ipv4Addr,
}

impl Arp {
    /// Operation that asks.
    pub const ASKS: u8 = 1;
    /// Operation that answers.
    pub const ANSWERS: u8 = 2;
    /// Ethernet (1), IPv4, and the lengths of their addresses.
    const HEADER: [u8; 6] = [0, 1, 8, 0, 6, 4];

    /// The question of RFC 5227 section 1.1 whether anybody has an address: it changes nobody's table.
    pub fn probe(mac: [u8; 6], address: Ipv4Addr) -> Self {
        Self {
            operation: Self::ASKS,
            sender_mac: mac,
            sender: Ipv4Addr::UNSPECIFIED,
            target_mac: [0; 6],
            target: address,
        }
    }

    /// The frame that tells it to everybody.
    pub fn broadcast(&self, vlan: Option<u16>) -> Vec<u8> {
        let mut frame = ethernet([0xff; 6], self.sender_mac, vlan, ethertype::ARP);
        frame.extend(Self::HEADER);
        frame.extend([0, self.operation]);
        frame.extend(self.sender_mac);
        frame.extend(self.sender.octets());
        frame.extend(self.target_mac);
        frame.extend(self.target.octets());
        frame
    }

    /// What a frame of a VLAN says, if it is one.
    pub fn parse(frame: &[u8], vlan: Option<u16>) -> Option<Self> {
        let (kind, payload) = payload(frame, vlan)?;
        let packet: &[u8; 28] = payload.first_chunk()?;
        if kind != ethertype::ARP || packet[..6] != Self::HEADER || packet[6] != 0 {
            return None;
        }
        let mac = |at: usize| packet[at..at + 6].try_into().ok();
        let address = |at: usize| {
            let octets: Option<[u8; 4]> = packet[at..at + 4].try_into().ok();
            octets.map(Ipv4Addr::from)
        };
        Some(Self {
            operation: packet[7],
            sender_mac: mac(8)?,
            sender: address(14)?,
            target_mac: mac(18)?,
            target: address(24)?,
        })
    }
}

/// A packet socket on an interface that only sends.
pub fn sender(ifindex: u32) -> io::Result<Socket> {
    let socket = Socket::new(Domain::PACKET, Type::RAW, None)?;
    socket.set_nonblocking(true)?;
    // Protocol 0: nothing is received.
    socket.bind(&link_address(ifindex, 0)?)?;
    Ok(socket)
}

/// A packet socket on an interface that sends, and hears ARP and neighbor advertisements before anything at TC takes them
/// away. It blocks.
pub fn claim_listener(ifindex: u32) -> io::Result<Socket> {
    /// `ETH_P_ALL` of `linux/if_ether.h`: a socket of one protocol comes after TC.
    const ALL: u16 = 3;
    /// Classic BPF (`linux/filter.h`): load a half-word, or an octet, at an offset; jump if equal; return.
    const LOAD_HALF: u16 = 0x28;
    const LOAD_BYTE: u16 = 0x30;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    /// Behind Ethernet: the next header of IPv6, and the type of ICMPv6 behind it.
    const NEXT_HEADER: u32 = 14 + 6;
    const KIND: u32 = 14 + 40;
    let socket = Socket::new(Domain::PACKET, Type::RAW, None)?;
    // Before it is bound: a busy uplink must not fill its buffer with all else. Jumps count from the next instruction.
    socket.attach_filter(&[
        SockFilter::new(LOAD_HALF, 0, 0, 12),
        SockFilter::new(JUMP_IF_EQUAL, 7, 0, u32::from(ethertype::ARP)),
        SockFilter::new(JUMP_IF_EQUAL, 6, 0, u32::from(ethertype::VLAN)),
        SockFilter::new(JUMP_IF_EQUAL, 0, 4, u32::from(ethertype::IPV6)),
        SockFilter::new(LOAD_BYTE, 0, 0, NEXT_HEADER),
        SockFilter::new(JUMP_IF_EQUAL, 0, 2, u32::from(protocol::ICMPV6)),
        SockFilter::new(LOAD_BYTE, 0, 0, KIND),
        SockFilter::new(JUMP_IF_EQUAL, 1, 0, u32::from(NEIGHBOR_ADVERTISEMENT)),
        SockFilter::new(RETURN, 0, 0, 0),
        SockFilter::new(RETURN, 0, 0, u32::from(u16::MAX)),
    ])?;
    socket.bind(&link_address(ifindex, ALL)?)?;
    Ok(socket)
}

/// `struct sockaddr_ll` of `linux/if_packet.h`.
#[repr(C)]
struct LinkAddress {
    family: u16,
    protocol: u16,
    ifindex: i32,
    hardware: u16,
    kind: u8,
    length: u8,
    address: [u8; 8],
}

/// Where a packet socket is bound to: an interface, and an EtherType in host order.
pub fn link_address(ifindex: u32, protocol: u16) -> io::Result<SockAddr> {
    /// `AF_PACKET` of `linux/socket.h`.
    const AF_PACKET: u16 = 17;
    let address = LinkAddress {
        family: AF_PACKET,
        protocol: protocol.to_be(),
        ifindex: ifindex.cast_signed(),
        hardware: 0,
        kind: 0,
        length: 0,
        address: [0; 8],
    };
    // SAFETY: the storage is larger than and aligned for every socket address, and the length written is that of the one
    // stored.
    let ((), address) = unsafe {
        SockAddr::try_init(|storage, length| {
            storage.cast::<LinkAddress>().write(address);
            *length = size_of::<LinkAddress>() as u32;
            Ok(())
        })
    }?;
    Ok(address)
}

/// The IP header of a frame with ICMPv6, as an independent library reads it, which finds its checksum right.
#[cfg(test)]
#[track_caller]
pub(crate) fn checked_icmpv6(frame: &[u8]) -> etherparse::Ipv6Header {
    let packet = etherparse::PacketHeaders::from_ethernet_slice(frame).expect("parses");
    let Some(etherparse::NetHeaders::Ipv6(ip, _)) = packet.net else {
        panic!("not IPv6")
    };
    let Some(etherparse::TransportHeader::Icmpv6(message)) = packet.transport else {
        panic!("not ICMPv6")
    };
    let sum = message
        .icmp_type
        .calc_checksum(ip.source, ip.destination, packet.payload.slice())
        .expect("short");
    assert_eq!(message.checksum, sum);
    ip
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

    #[test]
    fn what_is_written_is_read_in_its_own_vlan_only() {
        let probe = Arp::probe(MAC, Ipv4Addr::new(172, 22, 0, 2));
        let plain = probe.broadcast(None);
        assert_eq!(plain.len(), 42);
        assert_eq!(Arp::parse(&plain, None), Some(probe));
        assert_eq!(Arp::parse(&plain, Some(7)), Some(probe), "tag taken off");
        let tagged = probe.broadcast(Some(7));
        assert_eq!(Arp::parse(&tagged, Some(7)), Some(probe));
        assert_eq!(Arp::parse(&tagged, Some(8)), None);
        assert_eq!(Arp::parse(&tagged, None), None);
    }

    #[test]
    fn what_is_cut_short_or_no_arp_says_nothing() {
        let frame = Arp::probe(MAC, Ipv4Addr::new(172, 22, 0, 2)).broadcast(Some(7));
        for length in 0..frame.len() {
            assert_eq!(Arp::parse(&frame[..length], Some(7)), None, "{length}");
        }
        let mut other = Arp::probe(MAC, Ipv4Addr::LOCALHOST).broadcast(None);
        other[13] = 0;
        assert_eq!(Arp::parse(&other, None), None);
    }

    /// As an independent library reads it: RFC 4861 section 7.2.2.
    #[test]
    fn a_solicitation_asks_the_group_from_an_own_address_with_a_right_checksum() {
        let own: Ipv6Addr = "fe80::1".parse().expect("valid");
        let target: Ipv6Addr = "fd00:22::12:3402".parse().expect("valid");
        let frame = neighbor::solicitation(MAC, own, target, None);
        assert_eq!(
            frame[..12],
            [0x33, 0x33, 0xff, 0x12, 0x34, 2, 2, 0, 0, 0, 0, 1]
        );
        let ip = checked_icmpv6(&frame);
        assert_eq!((ip.hop_limit, ip.source), (255, own.octets()));
        let group: Ipv6Addr = "ff02::1:ff12:3402".parse().expect("valid");
        assert_eq!(ip.destination, group.octets());
        assert_eq!((frame[54], &frame[62..78]), (135, &target.octets()[..]));
        assert_eq!(
            frame[78..],
            [1, 1, 2, 0, 0, 0, 0, 1],
            "where the answer goes"
        );
        let tagged = neighbor::solicitation(MAC, own, target, Some(7));
        assert_eq!(tagged[12..18], [0x81, 0, 0, 7, 0x86, 0xdd]);
        assert_eq!(tagged[18..], frame[14..]);
        assert_eq!(
            neighbor::advertised(&frame, None),
            None,
            "it claims nothing"
        );
    }

    #[test]
    fn an_advertisement_tells_address_and_mac_or_comes_from_it() {
        let target: Ipv6Addr = "fd00:22::2".parse().expect("valid");
        let addr = lb_common::Addr::from(IpAddr::from(target));
        let told = lb_common::packet::advertisement(&addr, [2, 0, 0, 0, 0, 0xee], None);
        // SAFETY: repr(C) of integers without padding.
        let told: [u8; size_of::<lb_common::packet::Advertisement>()] =
            unsafe { core::mem::transmute(told) };
        let frame = |vlan| {
            [
                &ethernet(MAC, [2, 0, 0, 0, 0, 9], vlan, ethertype::IPV6)[..],
                &told,
            ]
            .concat()
        };
        let expected = Some((target, [2, 0, 0, 0, 0, 0xee]));
        assert_eq!(neighbor::advertised(&frame(None), None), expected);
        assert_eq!(neighbor::advertised(&frame(Some(7)), Some(7)), expected);
        assert_eq!(neighbor::advertised(&frame(Some(7)), Some(8)), None);
        let whole = frame(None);
        let without = neighbor::advertised(&whole[..78], None);
        assert_eq!(without, Some((target, [2, 0, 0, 0, 0, 9])));
        for length in 0..78 {
            assert_eq!(
                neighbor::advertised(&whole[..length], None),
                None,
                "{length}"
            );
        }
        let mut routed = whole;
        routed[21] = 254;
        assert_eq!(
            neighbor::advertised(&routed, None),
            None,
            "from another link"
        );
    }
}
