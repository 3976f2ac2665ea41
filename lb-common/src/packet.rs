//! Headers as they lie in a frame, and what the engine reads from and writes to them.

use crate::{checksum, field, frame::Frame, set_field};

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

/// Bytes that a frame must have for the engine to look at TCP: Ethernet, IPv4 and TCP without options.
pub const HEADERS: usize =
    size_of::<EthernetHeader>() + size_of::<Ipv4Header>() + size_of::<TcpHeader>();

/// EtherTypes, host order (IEEE 802 numbers, IANA).
pub mod ethertype {
    /// IPv4.
    pub const IPV4: u16 = 0x0800;
    /// ARP.
    pub const ARP: u16 = 0x0806;
    /// 802.1Q tag.
    pub const VLAN: u16 = 0x8100;
    /// 802.1ad service tag.
    pub const SERVICE_VLAN: u16 = 0x88a8;
}

/// IP protocol numbers (IANA).
pub mod protocol {
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
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

/// What the engine needs of an IPv4 header.
#[derive(Clone, Copy)]
pub struct Ipv4 {
    /// Offset of this header.
    pub offset: usize,
    /// Offset of what follows it.
    pub transport: usize,
    /// Length of header and data in bytes.
    pub total_length: u16,
    /// Source, as it lies in the packet.
    pub source: u32,
    /// Destination, as it lies in the packet.
    pub destination: u32,
    /// Protocol number.
    pub protocol: u8,
    /// Whether this is a fragment (the first one too).
    pub fragment: bool,
    /// Whether this is a fragment without the transport header.
    pub later_fragment: bool,
    /// Whether version and lengths make sense.
    pub well_formed: bool,
}

impl Ipv4 {
    /// Whether no host on a wire can have sent this: of this network, loopback, multicast, reserved and
    /// broadcast addresses (RFC 1122 section 3.2.1.3), or the one it goes to.
    #[inline(always)]
    pub fn is_from_no_host(&self) -> bool {
        let first = u32::from_be(self.source) >> 24;
        first == 0 || first == 127 || first >= 224 || self.source == self.destination
    }
}

/// Reads an IPv4 header with options of any length; `None` when the frame ends before its addresses.
#[inline(always)]
pub fn ipv4(frame: &impl Frame, offset: usize) -> Option<Ipv4> {
    let header = frame.at::<Ipv4Header>(offset)?;
    let version_length = field!(header, version_length);
    let header_length = usize::from(version_length & 0xf) * 4;
    let total_length = u16::from_be(field!(header, total_length));
    let fragment = u16::from_be(field!(header, fragment));
    Some(Ipv4 {
        offset,
        transport: offset + header_length,
        total_length,
        source: field!(header, source),
        destination: field!(header, destination),
        protocol: field!(header, protocol),
        fragment: fragment & FRAGMENT_MASK != 0,
        later_fragment: fragment & FRAGMENT_OFFSET_MASK != 0,
        well_formed: version_length >> 4 == 4
            && header_length >= size_of::<Ipv4Header>()
            && usize::from(total_length) >= header_length,
    })
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

/// Reads the TCP header of a whole IPv4 packet; `None` when headers are cut or contradict each other.
#[inline(always)]
pub fn tcp(frame: &impl Frame, ip: &Ipv4) -> Option<Tcp> {
    let header = frame.at::<TcpHeader>(ip.transport)?;
    let header_length = usize::from(field!(header, data_offset) >> 4) * 4;
    let needed = ip.transport - ip.offset + header_length;
    if !ip.well_formed
        || header_length < size_of::<TcpHeader>()
        || usize::from(ip.total_length) < needed
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

/// A rewrite of one end of a TCP/IPv4 packet, with the other end's port where a flow is translated.
#[derive(Clone, Copy)]
pub struct Change {
    /// Address before, as it lies in the packet.
    pub old_addr: u32,
    /// Address after.
    pub new_addr: u32,
    /// Port before, host order.
    pub old_port: u16,
    /// Port after, host order.
    pub new_port: u16,
    /// Port of the other end before, host order.
    pub old_other_port: u16,
    /// Port of the other end after, host order.
    pub new_other_port: u16,
}

/// Rewrites destination address and port (and the source port, where it differs) of a TCP/IPv4 packet
/// whose TCP checksum is complete, and mends both checksums.
#[inline(always)]
pub fn rewrite_destination(frame: &impl Frame, ip: &Ipv4, change: &Change) -> Option<()> {
    let header = frame.at::<Ipv4Header>(ip.offset)?;
    let tcp = frame.at::<TcpHeader>(ip.transport)?;
    let address = checksum::replaced32(change.old_addr, change.new_addr);
    set_field!(header, destination, change.new_addr);
    set_field!(
        header,
        checksum,
        checksum::update(field!(header, checksum), address)
    );
    let mut delta =
        address + checksum::replaced16(change.old_port.to_be(), change.new_port.to_be());
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

/// A RST over IPv4, ready to be written where the packet's network header was.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Reset {
    /// IPv4 header without options.
    pub ip: Ipv4Header,
    /// TCP header without options.
    pub tcp: TcpHeader,
}

/// The RST that answers a packet (RFC 9293 section 3.10.7.1), as the addressed host would send it.
///
/// With `partial` the TCP checksum is left as the bare pseudo-header sum, for a device that sums the
/// rest (`CHECKSUM_PARTIAL`).
#[inline(always)]
pub fn reset(frame: &impl Frame, ip: &Ipv4, partial: bool) -> Option<Reset> {
    let request = frame.at::<TcpHeader>(ip.transport)?;
    let flags = field!(request, flags);
    let (sequence, acknowledgment, reply_flags) = if flags & TCP_ACK != 0 {
        (field!(request, acknowledgment), 0, TCP_RST)
    } else {
        let header_length = u32::from(field!(request, data_offset) >> 4) * 4;
        let data = u32::from(ip.total_length)
            .wrapping_sub((ip.transport - ip.offset) as u32)
            .wrapping_sub(header_length);
        let length = data + u32::from(flags & TCP_SYN != 0) + u32::from(flags & TCP_FIN != 0);
        let next = u32::from_be(field!(request, sequence)).wrapping_add(length);
        (0, next.to_be(), TCP_RST | TCP_ACK)
    };
    let total_length = size_of::<Reset>() as u16;
    let mut reset = Reset {
        ip: Ipv4Header {
            version_length: 0x45,
            service: 0,
            total_length: total_length.to_be(),
            identification: 0,
            fragment: DONT_FRAGMENT.to_be(),
            ttl: 64,
            protocol: protocol::TCP,
            checksum: 0,
            source: ip.destination,
            destination: ip.source,
        },
        tcp: TcpHeader {
            source: field!(request, destination),
            destination: field!(request, source),
            sequence,
            acknowledgment,
            data_offset: 5 << 4,
            flags: reply_flags,
            window: 0,
            checksum: 0,
            urgent: 0,
        },
    };
    // SAFETY: repr(C) of integers without padding, twenty bytes each.
    let (ip_words, tcp_words) = unsafe {
        (
            core::mem::transmute::<Ipv4Header, [u32; 5]>(reset.ip),
            core::mem::transmute::<TcpHeader, [u32; 5]>(reset.tcp),
        )
    };
    reset.ip.checksum = !checksum::fold(checksum::sum_words(&ip_words));
    let pseudo = checksum::pseudo_v4(
        reset.ip.source,
        reset.ip.destination,
        protocol::TCP,
        size_of::<TcpHeader>() as u16,
    );
    reset.tcp.checksum = if partial {
        checksum::fold(pseudo)
    } else {
        !checksum::fold(pseudo + checksum::sum_words(&tcp_words))
    };
    Some(reset)
}

/// Whether the TCP checksum is but the pseudo-header's sum: a local sender left the rest to a device
/// that a virtual link does not have. One complete checksum in 65,536 looks alike.
#[inline(always)]
pub fn has_partial_checksum(frame: &impl Frame, ip: &Ipv4) -> bool {
    let Some(tcp) = frame.at::<TcpHeader>(ip.transport) else {
        return false;
    };
    let length = ip.total_length - (ip.transport - ip.offset) as u16;
    let pseudo = checksum::pseudo_v4(ip.source, ip.destination, protocol::TCP, length);
    field!(tcp, checksum) == checksum::fold(pseudo)
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
                new_addr: raw(pod),
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
        let length = ip.total_length - 20;
        let pseudo = checksum::pseudo_v4(ip.source, raw(VIP), protocol::TCP, length);
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
