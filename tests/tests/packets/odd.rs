//! Odd packets: each has a verdict, and it is the one that the documents give.

use super::*;

/// A packet that is changed, and what becomes of it.
type Row = (&'static str, fn(&mut Vec<u8>), Verdict);

/// Where IPv4 begins.
const IP: usize = 14;
/// Where TCP begins behind it.
const TCP: usize = IP + 20;

/// Puts VLAN tags behind the MACs, the outermost first.
fn tagged(frame: &[u8], tags: &[u16]) -> Vec<u8> {
    let tags = tags.iter().flat_map(|tag| {
        let [high, low] = tag.to_be_bytes();
        [0x81, 0x00, high, low]
    });
    let tags: Vec<u8> = tags.collect();
    [&frame[..12], &tags, &frame[12..]].concat()
}

#[test]
fn odd_headers_have_their_verdict() {
    let rows: &[Row] = &[
        ("version 5", |p| p[IP] = 0x55, Verdict::DroppedMalformed),
        ("IHL 4", |p| p[IP] = 0x44, Verdict::DroppedMalformed),
        (
            "IHL beyond the frame",
            |p| {
                p[IP] = 0x4f;
                p.truncate(TCP + 20)
            },
            Verdict::DroppedMalformed,
        ),
        (
            "total length 0",
            |p| p[IP + 2..IP + 4].fill(0),
            Verdict::DroppedMalformed,
        ),
        (
            "total length within the IP header",
            |p| p[IP + 3] = 19,
            Verdict::DroppedMalformed,
        ),
        (
            "total length within the TCP header",
            |p| p[IP + 3] = 39,
            Verdict::DroppedMalformed,
        ),
        // As with wrong checksums and a TTL that is used up: the kernel, which routes it on, or the pod drops it.
        (
            "total length beyond the frame",
            |p| p[IP + 2] = 5,
            Verdict::ForwardedNew,
        ),
        (
            "TCP data offset 4",
            |p| p[TCP + 12] = 0x40,
            Verdict::DroppedMalformed,
        ),
        (
            "TCP data offset beyond the packet",
            |p| p[TCP + 12] = 0xf0,
            Verdict::DroppedMalformed,
        ),
        (
            "first fragment",
            |p| p[IP + 6] = 0x20,
            Verdict::DroppedFragment,
        ),
        (
            "middle fragment",
            |p| p[IP + 6..IP + 8].copy_from_slice(&[0x20, 8]),
            Verdict::DroppedFragment,
        ),
        (
            "last fragment",
            |p| p[IP + 6..IP + 8].copy_from_slice(&[0, 8]),
            Verdict::DroppedFragment,
        ),
        ("TTL 1", |p| p[IP + 8] = 1, Verdict::ForwardedNew),
        (
            "wrong IP checksum",
            |p| p[IP + 10] ^= 0xff,
            Verdict::ForwardedNew,
        ),
        (
            "wrong TCP checksum",
            |p| p[TCP + 16] ^= 0xff,
            Verdict::ForwardedNew,
        ),
        (
            "source 0.0.0.0",
            |p| p[IP + 12..IP + 16].fill(0),
            Verdict::DroppedSource,
        ),
        (
            "source multicast",
            |p| p[IP + 12] = 224,
            Verdict::DroppedSource,
        ),
        (
            "source broadcast",
            |p| p[IP + 12..IP + 16].fill(255),
            Verdict::DroppedSource,
        ),
        (
            "source loopback",
            |p| p[IP + 12] = 127,
            Verdict::DroppedSource,
        ),
        (
            "the VIP as source",
            |p| p.copy_within(IP + 16..IP + 20, IP + 12),
            Verdict::DroppedSource,
        ),
        ("no flags", |p| p[TCP + 13] = 0, Verdict::ForwardedMiss),
        ("all flags", |p| p[TCP + 13] = 0xff, Verdict::ForwardedMiss),
        ("SYN and FIN", |p| p[TCP + 13] = 0x03, Verdict::ForwardedNew),
        ("SYN and RST", |p| p[TCP + 13] = 0x06, Verdict::ForwardedNew),
        ("FIN alone", |p| p[TCP + 13] = 0x01, Verdict::ForwardedMiss),
        (
            "URG, PSH and FIN",
            |p| p[TCP + 13] = 0x29,
            Verdict::ForwardedMiss,
        ),
    ];
    let mut wrong = Vec::new();
    for name in FORWARD {
        let mut engine = engine();
        for ((what, change, verdict), port) in rows.iter().zip(PORT..) {
            // A flow of its own.
            let mut frame = tcp((CLIENT, port), (VIP, API), TCP_SYN, b"");
            change(&mut frame);
            let seen = engine.run(name, &frame).expect("runs").verdict;
            if seen != *verdict {
                wrong.push(format!("{name}: {what}: {seen:?}, not {verdict:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn up_to_two_tags_are_looked_behind() {
    for name in [program::XDP, program::XDP_PLAIN] {
        let mut engine = engine();
        let syn = to_vip(API, TCP_SYN);
        let rows: &[(&[u16], Verdict)] = &[
            (&[], Verdict::ForwardedNew),
            // Priority alone is no VLAN (IEEE 802.1Q section 6.9).
            (&[0xe000], Verdict::Forwarded),
            (&[0xe000, 0], Verdict::Forwarded),
            (&[7], Verdict::PassedOtherVlan),
            (&[7, 8], Verdict::PassedOtherVlan),
            (&[0, 7], Verdict::PassedOtherVlan),
            (&[0, 0, 0], Verdict::Passed),
            (&[7, 8, 9], Verdict::PassedOtherVlan),
        ];
        for (tags, verdict) in rows {
            let frame = tagged(&syn, tags);
            let seen = engine.run(name, &frame).expect("runs");
            assert_eq!(seen.verdict, *verdict, "{name}: {tags:?}");
        }
    }
}

/// Cut anywhere, a packet is never served, and what is left to the kernel is as it came.
#[test]
fn a_packet_that_ends_too_early_is_never_forwarded() {
    let whole = tagged(&to_vip(API, TCP_SYN), &[0]);
    let refused = tagged(&to_vip(INSTANCE + 9, TCP_SYN), &[0]);
    for name in [program::XDP, program::XDP_PLAIN] {
        let mut engine = engine();
        for frame in [&whole, &refused] {
            for length in 14..frame.len() {
                let cut = &frame[..length];
                let seen = engine.run(name, cut).expect("runs");
                let expected = match length {
                    ..38 => Verdict::Passed,
                    _ => Verdict::DroppedMalformed,
                };
                assert_eq!(seen.verdict, expected, "{name}: {length}");
                assert_eq!(seen.frame, cut, "{name}: {length}");
            }
        }
    }
}
