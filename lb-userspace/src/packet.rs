//! Frames as this node sends and hears them beside its programs: link layer, ARP, and packet sockets. Sockets belong to
//! the network namespace of the thread that opens them.

use std::io;
use std::net::{IpAddr, Ipv4Addr};

use lb_common::packet::ethertype;
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

    /// What a frame of a VLAN says, if it is one. The kernel takes a frame's tag off before a packet socket sees it: one
    /// without a tag may be of any VLAN.
    pub fn parse(frame: &[u8], vlan: Option<u16>) -> Option<Self> {
        let (kind, mut rest) = frame.get(12..)?.split_first_chunk()?;
        let mut kind = u16::from_be_bytes(*kind);
        if kind == ethertype::VLAN {
            /// Without priority and drop eligibility.
            const VLAN_ID: u16 = 0xfff;
            let (tag, inner) = rest.split_first_chunk()?;
            if Some(u16::from_be_bytes(*tag) & VLAN_ID) != vlan {
                return None;
            }
            let (inner, payload) = inner.split_first_chunk()?;
            (kind, rest) = (u16::from_be_bytes(*inner), payload);
        }
        let packet: &[u8; 28] = rest.first_chunk()?;
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

/// A packet socket on an interface that sends, and hears ARP before anything at TC takes it away. It blocks.
pub fn arp_listener(ifindex: u32) -> io::Result<Socket> {
    /// `ETH_P_ALL` of `linux/if_ether.h`: a socket of one protocol comes after TC.
    const ALL: u16 = 3;
    /// Classic BPF (`linux/filter.h`): load a half-word at an offset; jump if equal; return.
    const LOAD_HALF: u16 = 0x28;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let socket = Socket::new(Domain::PACKET, Type::RAW, None)?;
    // Before it is bound: a busy uplink must not fill its buffer with all else.
    socket.attach_filter(&[
        SockFilter::new(LOAD_HALF, 0, 0, 12),
        SockFilter::new(JUMP_IF_EQUAL, 2, 0, u32::from(ethertype::ARP)),
        SockFilter::new(JUMP_IF_EQUAL, 1, 0, u32::from(ethertype::VLAN)),
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
}
