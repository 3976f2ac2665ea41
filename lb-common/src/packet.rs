//! Headers as they lie in a frame, and what the engine reads from and writes to them.

use crate::{Addr, checksum, field, frame::Frame, set_field};

/// Ethernet II header (IEEE 802.3 clause 3.1.1).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EthernetHeader {
    /// Destination MAC.
    pub destination: [u8; 6],
    /// Source MAC.
    pub source: [u8; 6],
    /// EtherType, network order.
    pub ethertype: u16,
}

/// What follows the EtherType of a tagged frame (IEEE 802.1Q clause 9.6).
#[repr(C)]
#[derive(Clone, Copy)]
struct VlanTag {
    /// Tag control information, network order: the low 12 bits are the VLAN.
    control: u16,
    /// The next EtherType, network order.
    ethertype: u16,
}

/// IPv4 header without options (RFC 791 section 3.1). Multi-byte fields are in network order.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Ipv4Header {
    /// Version in the high half, header length in 4-byte words in the low half.
    pub version_length: u8,
    /// Differentiated services and ECN.
    pub service: u8,
    /// Length of header and data.
    pub total_length: u16,
    /// Identification.
    pub identification: u16,
    /// Flags and fragment offset.
    pub fragment: u16,
    /// Time to live.
    pub ttl: u8,
    /// Protocol.
    pub protocol: u8,
    /// Header checksum.
    pub checksum: u16,
    /// Source address.
    pub source: u32,
    /// Destination address.
    pub destination: u32,
}

/// IPv6 header (RFC 8200 section 3). Multi-byte fields are in network order.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Ipv6Header {
    /// Version in the highest four bits, traffic class, flow label.
    pub version_class_flow: u32,
    /// Length of all that follows this header.
    pub payload_length: u16,
    /// Protocol number of what follows.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source address, as words that lie as in the packet.
    pub source: [u32; 4],
    /// Destination address.
    pub destination: [u32; 4],
}

/// The part that IPv6 extension headers have in common (RFC 8200 section 4), and the fragment header whole.
#[repr(C)]
#[derive(Clone, Copy)]
struct Extension {
    /// Protocol number of what follows.
    next_header: u8,
    /// Length in 8-byte words without the first; reserved in a fragment header.
    length: u8,
    /// Fragment header: offset in the upper 13 bits, more-fragments flag in the lowest; routing header: type and segments
    /// left. Network order.
    fragment: u16,
}

/// Segments left, in the second half-word of a routing header.
const SEGMENTS_LEFT: u16 = 0xff;

/// TCP header without options (RFC 9293 section 3.1). Multi-byte fields are in network order.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct TcpHeader {
    /// Source port.
    pub source: u16,
    /// Destination port.
    pub destination: u16,
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledgment number.
    pub acknowledgment: u32,
    /// Header length in 4-byte words in the high half.
    pub data_offset: u8,
    /// `TCP_*` bits.
    pub flags: u8,
    /// Window.
    pub window: u16,
    /// Checksum over pseudo-header, header and data.
    pub checksum: u16,
    /// Urgent pointer.
    pub urgent: u16,
}

/// UDP header (RFC 768). Fields are in network order.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UdpHeader {
    /// Source port.
    pub source: u16,
    /// Destination port.
    pub destination: u16,
    /// Length of header and data.
    pub length: u16,
    /// Checksum.
    pub checksum: u16,
}

/// ICMP and ICMPv6 header (RFC 792, RFC 4443 section 2.1).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IcmpHeader {
    /// Type.
    pub kind: u8,
    /// Code.
    pub code: u8,
    /// Checksum, network order; in ICMPv6 with a pseudo-header.
    pub checksum: u16,
    /// What the type makes of it; in errors the packet follows that they are about.
    pub rest: u32,
}

/// ARP packet for IPv4 over Ethernet (RFC 826). Multi-byte fields are in network order.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ArpPacket {
    /// 1: Ethernet.
    pub hardware: u16,
    /// 0x0800: IPv4.
    pub protocol: u16,
    /// 6.
    pub hardware_length: u8,
    /// 4.
    pub protocol_length: u8,
    /// 1 asks, 2 answers.
    pub operation: u16,
    /// MAC of the sender.
    pub sender_mac: [u8; 6],
    /// Address of the sender, as two half words: it is not aligned to four bytes.
    pub sender: [u16; 2],
    /// MAC of the target.
    pub target_mac: [u8; 6],
    /// Address of the target.
    pub target: [u16; 2],
}

/// A probe of a peer's data plane: UDP from [`PROBE_SOURCE`] to the VIP at the heartbeat port, which the peer's program
/// sends back with addresses, ports and MACs exchanged. Multi-byte fields are in network order.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Probe {
    /// [`PROBE_MAGIC`].
    pub magic: u32,
    /// [`PROBE_ASKS`] or [`PROBE_RETURNS`].
    pub direction: u32,
    /// What the asker knows its probe by: a little-endian number of 64 bits, low half first.
    pub nonce: [u32; 2],
}

/// First word of a probe, `ilbp` in ASCII, host order.
pub const PROBE_MAGIC: u32 = 0x696c_6270;
/// A probe on its way to the peer.
pub const PROBE_ASKS: u32 = 0;
/// A probe on its way back.
pub const PROBE_RETURNS: u32 = 1;
/// Where probes come from, as octets: an address that no host has (TEST-NET-1, RFC 5737), as a client's is none of
/// the sender's own, so that they meet the filters that clients' packets will meet.
pub const PROBE_SOURCE: [u8; 4] = [192, 0, 2, 1];
/// The same for a VIP of IPv6, `2001:db8::1` (RFC 3849).
pub const PROBE_SOURCE_V6: [u8; 16] = [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

/// Bytes at the beginning of a frame within which an IP header lies, behind two tags, or TCP over IPv4 without options and
/// tags.
pub const HEADERS: usize =
    size_of::<EthernetHeader>() + 2 * size_of::<VlanTag>() + size_of::<Ipv6Header>();
const _: () = assert!(
    HEADERS >= size_of::<EthernetHeader>() + size_of::<Ipv4Header>() + size_of::<TcpHeader>()
);

/// Bytes within which the extension headers of IPv6 are looked for: together they may have 450, far more than anybody sends.
pub const EXTENSION_HEADERS: usize = 512;

/// EtherTypes, host order (IEEE 802 numbers, IANA).
pub mod ethertype {
    /// IPv4.
    pub const IPV4: u16 = 0x0800;
    /// ARP.
    pub const ARP: u16 = 0x0806;
    /// IPv6.
    pub const IPV6: u16 = 0x86dd;
    /// 802.1Q tag.
    pub const VLAN: u16 = 0x8100;
    /// 802.1ad service tag.
    pub const SERVICE_VLAN: u16 = 0x88a8;
}

/// IP protocol numbers (IANA).
pub mod protocol {
    /// ICMP.
    pub const ICMP: u8 = 1;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// IPv6 hop-by-hop options.
    pub const HOP_BY_HOP: u8 = 0;
    /// IPv6 routing header.
    pub const ROUTING: u8 = 43;
    /// IPv6 fragment header.
    pub const FRAGMENT: u8 = 44;
    /// ICMPv6.
    pub const ICMPV6: u8 = 58;
    /// IPv6 destination options.
    pub const DESTINATION_OPTIONS: u8 = 60;
}

/// FIN.
pub const TCP_FIN: u8 = 1;
/// SYN.
pub const TCP_SYN: u8 = 2;
/// RST.
pub const TCP_RST: u8 = 4;
/// ACK.
pub const TCP_ACK: u8 = 16;

/// More-fragments flag and fragment offset of [`Ipv4Header::fragment`], host order: non-zero in every fragment.
const FRAGMENT_MASK: u16 = 0x3fff;
/// Fragment offset of [`Ipv4Header::fragment`], host order.
const FRAGMENT_OFFSET_MASK: u16 = 0x1fff;
/// Don't-fragment flag, host order.
const DONT_FRAGMENT: u16 = 0x4000;
/// The VLAN of a tag's control information; 0 means a priority tag (IEEE 802.1Q clause 9.6).
const VLAN_MASK: u16 = 0x0fff;
/// A VLAN that no frame has: two VLANs in one frame are nobody's.
const VLAN_STACKED: u16 = 0xffff;

/// Six octets as one number, in memory order.
///
/// # Safety
/// `mac` points to six readable bytes within the checked part of a frame.
#[inline(always)]
pub unsafe fn mac_word(mac: *const [u8; 6]) -> u64 {
    // SAFETY: four and two of the caller's six bytes.
    let (low, high) = unsafe {
        (
            crate::frame::get(mac.cast::<u32>()),
            crate::frame::get(mac.cast::<u16>().add(2)),
        )
    };
    u64::from(high) << 32 | u64::from(low)
}

/// The link layer of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link {
    /// Offset of the network header.
    pub network: usize,
    /// What the network header is, host order.
    pub ethertype: u16,
    /// The frame's VLAN, 0 for none. Priority tags do not count; two VLANs in one frame give a number
    /// that no VLAN has.
    pub vlan: u16,
}

/// Reads the link layer, with up to two tags in the bytes.
#[inline(always)]
pub fn link(frame: &impl Frame) -> Option<Link> {
    let ethernet = frame.at::<EthernetHeader>(0)?;
    let mut link = Link {
        network: size_of::<EthernetHeader>(),
        ethertype: u16::from_be(field!(ethernet, ethertype)),
        vlan: frame.stripped_tag().map_or(0, |tag| tag & VLAN_MASK),
    };
    for _ in 0..2 {
        if link.ethertype != ethertype::VLAN && link.ethertype != ethertype::SERVICE_VLAN {
            return Some(link);
        }
        let tag = frame.at::<VlanTag>(link.network)?;
        let vlan = u16::from_be(field!(tag, control)) & VLAN_MASK;
        if vlan != 0 {
            link.vlan = if link.vlan == 0 { vlan } else { VLAN_STACKED };
        }
        link.ethertype = u16::from_be(field!(tag, ethertype));
        link.network += size_of::<VlanTag>();
    }
    Some(link)
}

/// How many IPv6 extension headers the engine looks behind; what has more is of no protocol that it serves.
pub const MAX_EXTENSIONS: usize = 4;
/// Bits that an offset of a network header has at most, also of one that an ICMP error quotes.
const NETWORK_MASK: u32 = 0xff;
/// Bits that an offset of a transport header has at most: behind two tags and as many extension headers as may be,
/// of 2,048 bytes each.
const TRANSPORT_MASK: u32 = 0x3fff;

/// What the engine needs of an IPv4 or IPv6 header.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Ip {
    /// Source.
    pub source: Addr,
    /// Destination.
    pub destination: Addr,
    /// Offset of this header.
    offset: u32,
    /// Offset of what follows it and its extensions.
    transport: u32,
    /// Length of header, extensions and data in bytes.
    pub length: u32,
    /// Number of the protocol that is carried.
    pub protocol: u8,
    /// `IP_*` bits.
    flags: u8,
    /// Zero.
    pad: [u8; 2],
}

/// Version 6.
const IP_V6: u8 = 1;
/// A fragment (the first one too).
const IP_FRAGMENT: u8 = 2;
/// A fragment without the transport header.
const IP_LATER: u8 = 4;
/// Version and lengths make sense.
const IP_WELL_FORMED: u8 = 8;

impl Ip {
    /// Offset of this header.
    #[inline(always)]
    pub fn network(&self) -> usize {
        // The verifier does not know what a value out of a map can be.
        (self.offset & NETWORK_MASK) as usize
    }

    /// Offset of what follows it and its extensions.
    #[inline(always)]
    pub fn transport(&self) -> usize {
        (self.transport & TRANSPORT_MASK) as usize
    }

    /// Length of this header with options and extensions.
    #[inline(always)]
    pub fn header_length(&self) -> usize {
        self.transport().wrapping_sub(self.network())
    }

    /// Length of the transport header and data.
    #[inline(always)]
    pub fn transport_length(&self) -> u32 {
        self.length.wrapping_sub(self.header_length() as u32)
    }

    /// Whether so many bytes behind the headers belong to the packet, by its own account.
    #[inline(always)]
    pub fn reaches(&self, bytes: usize) -> bool {
        self.length as usize >= self.header_length() + bytes
    }

    /// Whether this is IPv6.
    #[inline(always)]
    pub fn is_v6(&self) -> bool {
        self.flags & IP_V6 != 0
    }

    /// Whether the header has neither options nor extensions.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        let own = if self.is_v6() {
            size_of::<Ipv6Header>()
        } else {
            size_of::<Ipv4Header>()
        };
        self.header_length() == own
    }

    /// Whether it carries ICMP, or ICMPv6 over IPv6.
    #[inline(always)]
    pub fn is_icmp(&self) -> bool {
        self.protocol
            == if self.is_v6() {
                protocol::ICMPV6
            } else {
                protocol::ICMP
            }
    }

    /// Whether this is a fragment (the first one too).
    #[inline(always)]
    pub fn is_fragment(&self) -> bool {
        self.flags & IP_FRAGMENT != 0
    }

    /// Whether this is a fragment without the transport header.
    #[inline(always)]
    pub fn is_later_fragment(&self) -> bool {
        self.flags & IP_LATER != 0
    }

    /// Whether version and lengths make sense.
    #[inline(always)]
    pub fn is_well_formed(&self) -> bool {
        self.flags & IP_WELL_FORMED != 0
    }

    /// Whether no host on a wire can have sent this: of this network, loopback, multicast, reserved and
    /// broadcast addresses (RFC 1122 section 3.2.1.3; RFC 4291 sections 2.5 and 2.7, mapped ones too), or the one it
    /// goes to.
    #[inline(always)]
    pub fn is_from_no_host(&self) -> bool {
        let [a, b, c, d] = self.source.words();
        let nowhere = if self.is_v6() {
            let (c, d) = (u32::from_be(c), u32::from_be(d));
            let low = a == 0 && b == 0 && (c == 0xffff || (c == 0 && d <= 1));
            low || u32::from_be(a) >> 24 == 0xff
        } else {
            let first = u32::from_be(d) >> 24;
            first == 0 || first == 127 || first >= 224
        };
        nowhere || self.source == self.destination
    }
}

/// Reads an IPv4 header with options of any length; `None` when the frame ends before its addresses.
#[inline(always)]
pub fn ipv4(frame: &impl Frame, offset: usize) -> Option<Ip> {
    let header = frame.at::<Ipv4Header>(offset)?;
    let version_length = field!(header, version_length);
    let header_length = u32::from(version_length & 0xf) * 4;
    let mut total_length = u32::from(u16::from_be(field!(header, total_length)));
    if total_length == 0 {
        total_length = frame.length_beyond_header(offset);
    }
    let fragment = u16::from_be(field!(header, fragment));
    let mut flags = 0;
    if fragment & FRAGMENT_MASK != 0 {
        flags |= IP_FRAGMENT;
    }
    if fragment & FRAGMENT_OFFSET_MASK != 0 {
        flags |= IP_LATER;
    }
    if version_length >> 4 == 4
        && header_length >= size_of::<Ipv4Header>() as u32
        && total_length >= header_length
    {
        flags |= IP_WELL_FORMED;
    }
    Some(Ip {
        source: Addr::from_v4_raw(field!(header, source)),
        destination: Addr::from_v4_raw(field!(header, destination)),
        offset: offset as u32,
        transport: offset as u32 + header_length,
        length: total_length,
        protocol: field!(header, protocol),
        flags,
        pad: [0; 2],
    })
}

/// Reads an IPv6 header; `None` when the frame ends before its end. [`extensions`] finds the transport header.
#[inline(always)]
pub fn ipv6(frame: &impl Frame, offset: usize) -> Option<Ip> {
    let header = frame.at::<Ipv6Header>(offset)?;
    let is_six = u32::from_be(field!(header, version_class_flow)) >> 28 == 6;
    let payload_length = u32::from(u16::from_be(field!(header, payload_length)));
    let mut length = size_of::<Ipv6Header>() as u32 + payload_length;
    if payload_length == 0 {
        length = length.max(frame.length_beyond_header(offset));
    }
    Some(Ip {
        source: Addr::from_words(field!(header, source)),
        destination: Addr::from_words(field!(header, destination)),
        offset: offset as u32,
        transport: offset as u32 + size_of::<Ipv6Header>() as u32,
        length,
        protocol: field!(header, next_header),
        flags: if is_six {
            IP_V6 | IP_WELL_FORMED
        } else {
            IP_V6
        },
        pad: [0; 2],
    })
}

/// Whether an IPv6 header is followed by one of the extension headers that [`extensions`] looks behind.
#[inline(always)]
pub fn is_extension(next_header: u8) -> bool {
    matches!(
        next_header,
        protocol::HOP_BY_HOP
            | protocol::ROUTING
            | protocol::FRAGMENT
            | protocol::DESTINATION_OPTIONS
    )
}

/// Looks behind the extension headers of an IPv6 packet; `None` when the frame ends within them.
#[inline(always)]
pub fn extensions(frame: &impl Frame, ip: &mut Ip) -> Option<()> {
    for _ in 0..MAX_EXTENSIONS {
        if !is_extension(ip.protocol) {
            return Some(());
        }
        let is_fragment = ip.protocol == protocol::FRAGMENT;
        let header = frame.at::<Extension>(ip.transport())?;
        let is_routed = ip.protocol == protocol::ROUTING
            && u16::from_be(field!(header, fragment)) & SEGMENTS_LEFT != 0;
        if is_routed {
            // On its way to somewhere else (RFC 8200 section 4.4): no pod may learn of it, or it would answer.
            return Some(());
        }
        ip.protocol = field!(header, next_header);
        if is_fragment {
            let fragment = u16::from_be(field!(header, fragment));
            ip.transport += 8;
            // An atomic fragment (RFC 6946) is whole.
            if fragment & !6 != 0 {
                ip.flags |= IP_FRAGMENT;
            }
            if fragment & !7 != 0 {
                ip.flags |= IP_LATER;
                return Some(());
            }
        } else {
            ip.transport += (u32::from(field!(header, length)) + 1) * 8;
        }
    }
    Some(())
}

/// What the engine needs of a TCP header.
#[derive(Clone, Copy)]
pub struct Tcp {
    /// Source port, host order.
    pub source: u16,
    /// Destination port, host order.
    pub destination: u16,
    /// Acknowledgment number, host order.
    pub acknowledgment: u32,
    /// `TCP_*` bits.
    pub flags: u8,
}

/// Reads the TCP header of a whole packet; `None` when headers are cut or contradict each other.
#[inline(always)]
pub fn tcp(frame: &impl Frame, ip: &Ip) -> Option<Tcp> {
    let header = frame.at::<TcpHeader>(ip.transport())?;
    let header_length = usize::from(field!(header, data_offset) >> 4) * 4;
    if !ip.is_well_formed() || header_length < size_of::<TcpHeader>() || !ip.reaches(header_length)
    {
        return None;
    }
    Some(Tcp {
        source: u16::from_be(field!(header, source)),
        destination: u16::from_be(field!(header, destination)),
        acknowledgment: u32::from_be(field!(header, acknowledgment)),
        flags: field!(header, flags),
    })
}

/// A rewrite of one end of a TCP packet, with the other end's port where a flow is translated.
#[derive(Clone, Copy)]
pub struct Change {
    /// Address before.
    pub old_addr: Addr,
    /// Address after, of the same version.
    pub new_addr: Addr,
    /// Port before, host order.
    pub old_port: u16,
    /// Port after, host order.
    pub new_port: u16,
    /// Port of the other end before, host order.
    pub old_other_port: u16,
    /// Port of the other end after, host order.
    pub new_other_port: u16,
}

impl Change {
    /// What the addresses of an IPv6 packet add to the sum of its pseudo-header.
    #[inline(always)]
    pub fn addresses_v6(&self) -> u32 {
        replaced_v6(&self.old_addr, &self.new_addr)
    }
}

/// What replacing an IPv6 address adds to a sum.
#[inline(always)]
pub fn replaced_v6(old: &Addr, new: &Addr) -> u32 {
    let (old, new) = (old.words(), new.words());
    checksum::replaced32(old[0], new[0])
        + checksum::replaced32(old[1], new[1])
        + checksum::replaced32(old[2], new[2])
        + checksum::replaced32(old[3], new[3])
}

/// Rewrites destination address and port (and the source port, where it differs) of a TCP packet
/// whose TCP checksum is complete, and mends the checksums.
#[inline(always)]
pub fn rewrite_destination(frame: &impl Frame, ip: &Ip, change: &Change) -> Option<()> {
    let mut delta = if ip.is_v6() {
        let header = frame.at::<Ipv6Header>(ip.network())?;
        set_field!(header, destination, change.new_addr.words());
        change.addresses_v6()
    } else {
        let header = frame.at::<Ipv4Header>(ip.network())?;
        let address = checksum::replaced32(change.old_addr.v4_raw(), change.new_addr.v4_raw());
        set_field!(header, destination, change.new_addr.v4_raw());
        set_field!(
            header,
            checksum,
            checksum::update(field!(header, checksum), address)
        );
        address
    };
    let tcp = frame.at::<TcpHeader>(ip.transport())?;
    delta += checksum::replaced16(change.old_port.to_be(), change.new_port.to_be());
    set_field!(tcp, destination, change.new_port.to_be());
    if change.old_other_port != change.new_other_port {
        delta += checksum::replaced16(change.old_other_port.to_be(), change.new_other_port.to_be());
        set_field!(tcp, source, change.new_other_port.to_be());
    }
    set_field!(
        tcp,
        checksum,
        checksum::update(field!(tcp, checksum), delta)
    );
    Some(())
}

/// Sum of the pseudo-header of what a packet from `source` to `destination` carries (RFC 9293 section 3.1, RFC 8200
/// section 8.1).
#[inline(always)]
fn pseudo(is_v6: bool, source: &Addr, destination: &Addr, protocol: u8, length: u32) -> u32 {
    if is_v6 {
        checksum::sum_words(&source.words())
            + checksum::sum_words(&destination.words())
            + u32::from(u16::from(protocol).to_be())
            + u32::from((length as u16).to_be())
    } else {
        checksum::pseudo_v4(
            source.v4_raw(),
            destination.v4_raw(),
            protocol,
            length as u16,
        )
    }
}

/// Types and codes of ICMP that the engine knows.
pub mod icmp {
    /// IPv4 echo request and reply.
    pub const ECHO: u8 = 8;
    /// See [`ECHO`].
    pub const ECHO_REPLY: u8 = 0;
    /// IPv6 echo request and reply.
    pub const ECHO_V6: u8 = 128;
    /// See [`ECHO_V6`].
    pub const ECHO_REPLY_V6: u8 = 129;
    /// IPv4: destination unreachable, fragmentation needed among it (RFC 1191).
    const UNREACHABLE: u8 = 3;
    /// IPv4: time exceeded.
    const TIME_EXCEEDED: u8 = 11;
    /// IPv4: parameter problem.
    const PARAMETER_PROBLEM: u8 = 12;
    /// IPv6: errors are 1 (unreachable), 2 (packet too big), 3 (time exceeded), 4 (parameter problem).
    const ERRORS_V6: core::ops::RangeInclusive<u8> = 1..=4;

    /// Whether a message of a type is about a packet, which it quotes.
    #[inline(always)]
    pub fn is_error(is_v6: bool, kind: u8) -> bool {
        if is_v6 {
            ERRORS_V6.contains(&kind)
        } else {
            kind == UNREACHABLE || kind == TIME_EXCEEDED || kind == PARAMETER_PROBLEM
        }
    }
}

/// What an ICMP error quotes of a TCP packet.
#[derive(Clone, Copy)]
pub struct Quoted {
    /// Its IP header.
    pub ip: Ip,
    /// Its source port, host order.
    pub source: u16,
    /// Its destination port, host order.
    pub destination: u16,
}

/// Reads the TCP packet that an ICMP error is about; `None` for other messages, and for those about other packets.
#[inline(always)]
pub fn quoted(frame: &impl Frame, ip: &Ip) -> Option<Quoted> {
    // Errors need no options, and the verifier no more offsets.
    if !ip.is_plain() || !ip.is_well_formed() || ip.is_fragment() {
        return None;
    }
    let header = frame.at::<IcmpHeader>(ip.transport())?;
    if !icmp::is_error(ip.is_v6(), field!(header, kind)) {
        return None;
    }
    let at = ip.transport() + size_of::<IcmpHeader>();
    let inner = if ip.is_v6() {
        ipv6(frame, at)?
    } else {
        ipv4(frame, at)?
    };
    if inner.protocol != protocol::TCP || inner.is_later_fragment() || !inner.is_well_formed() {
        return None;
    }
    // An error goes to whom the packet came from.
    if inner.source != ip.destination {
        return None;
    }
    // Behind the packet a short frame has padding.
    if ip.transport_length() as usize + ip.transport() < inner.transport() + size_of::<[u16; 2]>() {
        return None;
    }
    let ports = frame.at::<[u16; 2]>(inner.transport())?;
    // SAFETY: `at` checked the bounds.
    let [source, destination] = unsafe { crate::frame::get(ports) };
    Some(Quoted {
        ip: inner,
        source: u16::from_be(source),
        destination: u16::from_be(destination),
    })
}

/// A RST over IPv4, ready to be written where the packet's network header was.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Reset {
    /// IPv4 header without options.
    pub ip: Ipv4Header,
    /// TCP header without options.
    pub tcp: TcpHeader,
}

/// The same over IPv6.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Reset6 {
    /// IPv6 header.
    pub ip: Ipv6Header,
    /// TCP header without options.
    pub tcp: TcpHeader,
}

/// The TCP header of the RST that answers a packet (RFC 9293 section 3.10.7.1), as the addressed host would send it.
///
/// With `partial` the checksum is left as the bare pseudo-header sum, for a device that sums the rest
/// (`CHECKSUM_PARTIAL`).
#[inline(always)]
pub fn reset(frame: &impl Frame, ip: &Ip, partial: bool) -> Option<TcpHeader> {
    let request = frame.at::<TcpHeader>(ip.transport())?;
    let flags = field!(request, flags);
    let (sequence, acknowledgment, reply_flags) = if flags & TCP_ACK != 0 {
        (field!(request, acknowledgment), 0, TCP_RST)
    } else {
        let header_length = u32::from(field!(request, data_offset) >> 4) * 4;
        let data = ip.transport_length().wrapping_sub(header_length);
        let length = data + u32::from(flags & TCP_SYN != 0) + u32::from(flags & TCP_FIN != 0);
        let next = u32::from_be(field!(request, sequence)).wrapping_add(length);
        (0, next.to_be(), TCP_RST | TCP_ACK)
    };
    let mut reset = TcpHeader {
        source: field!(request, destination),
        destination: field!(request, source),
        sequence,
        acknowledgment,
        data_offset: 5 << 4,
        flags: reply_flags,
        window: 0,
        checksum: 0,
        urgent: 0,
    };
    // SAFETY: repr(C) of integers without padding, twenty bytes.
    let words = unsafe { core::mem::transmute::<TcpHeader, [u32; 5]>(reset) };
    let pseudo = pseudo(
        ip.is_v6(),
        &ip.destination,
        &ip.source,
        protocol::TCP,
        size_of::<TcpHeader>() as u32,
    );
    reset.checksum = if partial {
        checksum::fold(pseudo)
    } else {
        !checksum::fold(pseudo + checksum::sum_words(&words))
    };
    Some(reset)
}

/// A RST in an IPv4 packet that answers `ip`.
#[inline(always)]
pub fn reset_v4(ip: &Ip, tcp: TcpHeader) -> Reset {
    let mut header = Ipv4Header {
        version_length: 0x45,
        service: 0,
        total_length: (size_of::<Reset>() as u16).to_be(),
        identification: 0,
        fragment: DONT_FRAGMENT.to_be(),
        ttl: 64,
        protocol: protocol::TCP,
        checksum: 0,
        source: ip.destination.v4_raw(),
        destination: ip.source.v4_raw(),
    };
    // SAFETY: repr(C) of integers without padding, twenty bytes.
    let words = unsafe { core::mem::transmute::<Ipv4Header, [u32; 5]>(header) };
    header.checksum = !checksum::fold(checksum::sum_words(&words));
    Reset { ip: header, tcp }
}

/// A RST in an IPv6 packet that answers `ip`.
#[inline(always)]
pub fn reset_v6(ip: &Ip, tcp: TcpHeader) -> Reset6 {
    Reset6 {
        ip: ipv6_header(
            &ip.destination,
            &ip.source,
            protocol::TCP,
            size_of::<TcpHeader>() as u16,
            64,
        ),
        tcp,
    }
}

/// An IPv6 header without traffic class and flow label.
#[inline(always)]
fn ipv6_header(
    source: &Addr,
    destination: &Addr,
    next_header: u8,
    payload_length: u16,
    hop_limit: u8,
) -> Ipv6Header {
    Ipv6Header {
        version_class_flow: (6_u32 << 28).to_be(),
        payload_length: payload_length.to_be(),
        next_header,
        hop_limit,
        source: source.words(),
        destination: destination.words(),
    }
}

/// Whether the TCP checksum is but the pseudo-header's sum: a local sender left the rest to a device
/// that a virtual link does not have. One complete checksum in 65,536 looks alike.
#[inline(always)]
pub fn has_partial_checksum(frame: &impl Frame, ip: &Ip) -> bool {
    let Some(tcp) = frame.at::<TcpHeader>(ip.transport()) else {
        return false;
    };
    let length = ip.transport_length();
    let pseudo = pseudo(
        ip.is_v6(),
        &ip.source,
        &ip.destination,
        protocol::TCP,
        length,
    );
    field!(tcp, checksum) == checksum::fold(pseudo)
}

/// Neighbor solicitation or advertisement (RFC 4861 sections 4.3 and 4.4) without options.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NeighborMessage {
    /// [`NEIGHBOR_SOLICITATION`] or [`NEIGHBOR_ADVERTISEMENT`].
    pub kind: u8,
    /// 0.
    pub code: u8,
    /// Checksum with the pseudo-header.
    pub checksum: u16,
    /// [`ADVERTISEMENT_SOLICITED`] and [`ADVERTISEMENT_OVERRIDE`] in the highest bits, network order.
    pub flags: u32,
    /// The address in question.
    pub target: [u32; 4],
}

/// ICMPv6 type that asks for the MAC of an address.
pub const NEIGHBOR_SOLICITATION: u8 = 135;
/// ICMPv6 type that tells it.
pub const NEIGHBOR_ADVERTISEMENT: u8 = 136;
/// The advertisement answers a solicitation. Host order.
pub const ADVERTISEMENT_SOLICITED: u32 = 1 << 30;
/// The advertisement replaces what was known. Host order.
pub const ADVERTISEMENT_OVERRIDE: u32 = 1 << 29;
/// Option with the MAC of the target, in an advertisement (RFC 4861 section 4.6.1).
const TARGET_LINK_LAYER: u8 = 2;
/// Hop limit of every neighbor message: none has passed a router (RFC 4861 section 7.1).
pub const NEIGHBOR_HOP_LIMIT: u8 = 255;
/// `ff02::1`, all nodes of the link, as words that lie as in a packet.
pub const ALL_NODES: [u32; 4] = [0xff02_0000_u32.to_be(), 0, 0, 1_u32.to_be()];
/// The MAC of that group (RFC 2464 section 7).
pub const ALL_NODES_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
/// The most that a neighbor message with all its options is looked at.
const NEIGHBOR_UNITS: usize = 8;

/// A neighbor advertisement with the target's MAC, ready to be written where a packet's network header was.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Advertisement {
    /// IPv6 header.
    pub ip: Ipv6Header,
    /// The message.
    pub message: NeighborMessage,
    /// Type of the option.
    pub option: u8,
    /// Its length in units of 8 bytes.
    pub option_length: u8,
    /// MAC of the target.
    pub mac: [u8; 6],
}

/// The advertisement that says that `mac` has the address `target`: to `asker`, or to all nodes where it answers
/// nobody or somebody without an address (RFC 4861 section 7.2.4).
#[inline(always)]
pub fn advertisement(target: &Addr, mac: [u8; 6], asker: Option<&Addr>) -> Advertisement {
    let (to, flags) = match asker {
        Some(asker) => (*asker, ADVERTISEMENT_SOLICITED | ADVERTISEMENT_OVERRIDE),
        None => (Addr::from_words(ALL_NODES), ADVERTISEMENT_OVERRIDE),
    };
    let length = (size_of::<Advertisement>() - size_of::<Ipv6Header>()) as u16;
    let mut advertisement = Advertisement {
        ip: ipv6_header(target, &to, protocol::ICMPV6, length, NEIGHBOR_HOP_LIMIT),
        message: NeighborMessage {
            kind: NEIGHBOR_ADVERTISEMENT,
            code: 0,
            checksum: 0,
            flags: flags.to_be(),
            target: target.words(),
        },
        option: TARGET_LINK_LAYER,
        option_length: 1,
        mac,
    };
    // SAFETY: repr(C) of integers without padding, 72 bytes.
    let words = unsafe { core::mem::transmute::<Advertisement, [u32; 18]>(advertisement) };
    let mut sum = pseudo(true, target, &to, protocol::ICMPV6, u32::from(length));
    for word in &words[10..] {
        sum += (word & 0xffff) + (word >> 16);
    }
    advertisement.message.checksum = !checksum::fold(sum);
    advertisement
}

/// A neighbor message that follows the IPv6 header directly and is valid by RFC 4861 section 7.1: from this link,
/// long enough, with a right checksum. `None` for everything else.
#[inline(always)]
pub fn neighbor(frame: &impl Frame, ip: &Ip) -> Option<NeighborMessage> {
    let header = frame.at::<Ipv6Header>(ip.network())?;
    let length = ip.transport_length() as usize;
    if field!(header, hop_limit) != NEIGHBOR_HOP_LIMIT
        || length < size_of::<NeighborMessage>()
        || length > NEIGHBOR_UNITS * 8
        || !length.is_multiple_of(8)
    {
        return None;
    }
    let mut sum = pseudo(
        true,
        &ip.source,
        &ip.destination,
        protocol::ICMPV6,
        length as u32,
    );
    for unit in 0..NEIGHBOR_UNITS {
        if unit * 8 >= length {
            break;
        }
        let words = frame.at::<[u32; 2]>(ip.transport() + unit * 8)?;
        // SAFETY: `at` checked the bounds.
        let words = unsafe { crate::frame::get(words) };
        sum += checksum::sum_words(&words);
    }
    let message = frame.at::<NeighborMessage>(ip.transport())?;
    if checksum::fold(sum) != 0xffff || field!(message, code) != 0 {
        return None;
    }
    // SAFETY: `at` checked the bounds.
    Some(unsafe { crate::frame::get(message) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Buffer;
    use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TcpOptionElement, TransportSlice};
    use proptest::prelude::*;

    const VIP: [u8; 4] = [172, 22, 0, 2];
    const POD: [u8; 4] = [10, 244, 0, 11];

    fn raw(octets: [u8; 4]) -> u32 {
        u32::from_ne_bytes(octets)
    }

    fn packet(client: [u8; 4], port: u16, options: &[TcpOptionElement], payload: &[u8]) -> Vec<u8> {
        let builder = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2])
            .ipv4(client, VIP, 64)
            .tcp(port, 6385, 1000, 1024)
            .ack(77)
            .options(options)
            .expect("fits");
        let mut bytes = Vec::new();
        builder.write(&mut bytes, payload).expect("writes");
        bytes
    }

    /// Panics unless an independent library finds both checksums right.
    fn assert_checksums(bytes: &[u8]) {
        let sliced = SlicedPacket::from_ethernet(bytes).expect("parses");
        let Some(NetSlice::Ipv4(ip)) = sliced.net else {
            panic!("not IPv4")
        };
        let Some(TransportSlice::Tcp(tcp)) = sliced.transport else {
            panic!("not TCP")
        };
        let header = ip.header().to_header();
        assert_eq!(header.header_checksum, header.calc_header_checksum());
        let sum = tcp
            .to_header()
            .calc_checksum_ipv4(&header, tcp.payload())
            .expect("short");
        assert_eq!(tcp.checksum(), sum);
    }

    proptest! {
        #[test]
        fn a_rewrite_keeps_both_checksums_right(
            client: [u8; 4], port: u16, new_port: u16, new_client_port: u16, pod: [u8; 4],
            payload in prop::collection::vec(any::<u8>(), 0..1461), timestamps: bool,
        ) {
            let options = [TcpOptionElement::Timestamp(1, 2)];
            let mut bytes = packet(client, port, if timestamps { &options } else { &[] }, &payload);
            let frame = Buffer::new(&mut bytes);
            let link = link(&frame).expect("Ethernet");
            let ip = ipv4(&frame, link.network).expect("IPv4");
            let tcp = tcp(&frame, &ip).expect("TCP");
            rewrite_destination(&frame, &ip, &Change {
                old_addr: ip.destination,
                new_addr: Addr::from_v4_raw(raw(pod)),
                old_port: tcp.destination,
                new_port,
                old_other_port: tcp.source,
                new_other_port: new_client_port,
            }).expect("in bounds");
            assert_checksums(&bytes);
            prop_assert_eq!(&bytes[30..34], &pod);
            prop_assert_eq!(&bytes[34..36], &new_client_port.to_be_bytes());
            prop_assert_eq!(&bytes[36..38], &new_port.to_be_bytes());
        }

        #[test]
        fn a_reset_is_one_that_the_client_accepts(
            client: [u8; 4], port: u16, payload in prop::collection::vec(any::<u8>(), 0..100), with_ack: bool,
        ) {
            let mut bytes = packet(client, port, &[], &payload);
            if !with_ack {
                bytes[47] = TCP_SYN;
            }
            let frame = Buffer::new(&mut bytes);
            let ip = ipv4(&frame, 14).expect("IPv4");
            let reset = reset(&frame, &ip, false).expect("in bounds");
            let reset = reset_v4(&ip, reset);
            // SAFETY: repr(C) of integers without padding.
            let written: [u8; 40] = unsafe { core::mem::transmute(reset) };
            let mut answer = bytes[..14].to_vec();
            answer.extend(written);
            assert_checksums(&answer);
            if with_ack {
                prop_assert_eq!(reset.tcp.sequence, 77_u32.to_be());
                prop_assert_eq!(reset.tcp.flags, TCP_RST);
            } else {
                prop_assert_eq!(reset.tcp.acknowledgment, (1000 + payload.len() as u32 + 1).to_be());
                prop_assert_eq!(reset.tcp.flags, TCP_RST | TCP_ACK);
            }
        }

        #[test]
        fn no_bytes_make_the_parser_read_past_the_end(bytes in prop::collection::vec(any::<u8>(), 0..80), tag: Option<u16>) {
            let mut bytes = bytes;
            let frame = match tag {
                Some(tag) => Buffer::with_tag(&mut bytes, tag),
                None => Buffer::new(&mut bytes),
            };
            if let Some(link) = link(&frame)
                && let Some(ip) = ipv4(&frame, link.network)
                && let Some(_) = tcp(&frame, &ip)
            {
                let _ = reset(&frame, &ip, false);
                let _ = has_partial_checksum(&frame, &ip);
            }
        }
    }

    #[test]
    fn tags_give_the_frames_vlan() {
        let plain = packet([172, 22, 0, 100], 40000, &[], &[]);
        let tagged = |tags: &[(u16, u16)]| {
            let mut bytes = plain.clone();
            for (ethertype, control) in tags.iter().rev() {
                bytes.splice(
                    12..12,
                    [ethertype.to_be_bytes(), control.to_be_bytes()].concat(),
                );
            }
            let parsed = link(&Buffer::new(&mut bytes)).expect("Ethernet");
            (parsed.vlan, parsed.ethertype == ethertype::IPV4)
        };
        assert_eq!(tagged(&[]), (0, true));
        assert_eq!(tagged(&[(0x8100, 100)]), (100, true));
        assert_eq!(tagged(&[(0x8100, 0xe000)]), (0, true), "priority tag");
        assert_eq!(tagged(&[(0x88a8, 0), (0x8100, 100)]), (100, true));
        assert_eq!(tagged(&[(0x88a8, 7), (0x8100, 100)]), (VLAN_STACKED, true));
        assert!(
            !tagged(&[(0x88a8, 7), (0x8100, 100), (0x8100, 5)]).1,
            "three tags"
        );
        let mut bytes = plain.clone();
        assert_eq!(
            link(&Buffer::with_tag(&mut bytes, 100))
                .expect("Ethernet")
                .vlan,
            100
        );
    }

    #[test]
    fn a_partial_checksum_is_recognised() {
        let mut bytes = packet([172, 22, 0, 100], 40000, &[], b"GET / HTTP/1.1\r\n\r\n");
        let ip = ipv4(&Buffer::new(&mut bytes), 14).expect("IPv4");
        assert!(!has_partial_checksum(&Buffer::new(&mut bytes), &ip));
        let length = ip.length as u16 - 20;
        let pseudo = checksum::pseudo_v4(ip.source.v4_raw(), raw(VIP), protocol::TCP, length);
        bytes[50..52].copy_from_slice(&checksum::fold(pseudo).to_ne_bytes());
        assert!(has_partial_checksum(&Buffer::new(&mut bytes), &ip));
    }

    #[test]
    fn contradicting_lengths_are_no_tcp() {
        let whole = packet(POD, 40000, &[], &[]);
        let mut short_total = whole.clone();
        short_total[16..18].copy_from_slice(&30_u16.to_be_bytes());
        let mut long_header = whole.clone();
        long_header[46] = 0xf0;
        let mut short_header = whole.clone();
        short_header[46] = 0x40;
        let mut short_ip = whole.clone();
        short_ip[14] = 0x44;
        for mut bytes in [short_total, long_header, short_header, short_ip] {
            let frame = Buffer::new(&mut bytes);
            let ip = ipv4(&frame, 14).expect("long enough");
            assert!(tcp(&frame, &ip).is_none());
        }
    }
}
