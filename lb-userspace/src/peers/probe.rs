//! Probes: whether a peer's program, not its agent, takes packets.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use lb_common::packet::{
    PROBE_ASKS, PROBE_MAGIC, PROBE_SOURCE, PROBE_SOURCE_V6, Probe, ethertype, protocol,
};

use crate::packet::{ethernet, ip_header, transport_checksum};

/// So many probes without an answer, and the peer does not reflect; and so many in a row with one until one that was
/// lost does again: behind a link that has just come up, its kernel has yet to find its neighbours.
const MISSED: usize = 3;

/// The frame of a probe.
pub(super) fn frame(
    (from, to): ([u8; 6], [u8; 6]),
    vlan: Option<u16>,
    vip: IpAddr,
    port: u16,
    nonce: u64,
) -> Vec<u8> {
    /// Length of the UDP header and the probe.
    const LENGTH: u16 = 8 + size_of::<Probe>() as u16;
    let mut udp = Vec::with_capacity(usize::from(LENGTH));
    udp.extend(port.to_be_bytes());
    udp.extend(port.to_be_bytes());
    udp.extend(LENGTH.to_be_bytes());
    udp.extend([0, 0]);
    udp.extend(PROBE_MAGIC.to_be_bytes());
    udp.extend(PROBE_ASKS.to_be_bytes());
    udp.extend(nonce.to_le_bytes());
    let (kind, source): (u16, IpAddr) = match vip {
        IpAddr::V4(_) => (ethertype::IPV4, PROBE_SOURCE.into()),
        IpAddr::V6(_) => (ethertype::IPV6, PROBE_SOURCE_V6.into()),
    };
    let header = ip_header(source, vip, protocol::UDP, LENGTH).unwrap_or_default();
    // Over IPv4 UDP goes without a checksum.
    if vip.is_ipv6() {
        let sum = match transport_checksum(&header, protocol::UDP, &udp) {
            // 0 would say that there is none (RFC 8200 section 8.1).
            0 => u16::MAX,
            sum => sum,
        };
        udp[6..8].copy_from_slice(&sum.to_be_bytes());
    }
    let mut frame = ethernet(to, from, vlan, kind);
    frame.extend(header);
    frame.extend(udp);
    frame
}

/// Whether the programs of peers reflect, by peer and own uplink.
#[derive(Debug, Default)]
pub(super) struct Tracker {
    tracks: BTreeMap<(String, u32), Track>,
}

/// What probes of a peer have told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Told {
    /// They come back.
    pub(super) reflects: bool,
    /// Enough of them did not come back.
    pub(super) has_missed: bool,
}

#[derive(Debug, Default)]
struct Track {
    outstanding: VecDeque<u64>,
    missed: usize,
    returned: usize,
    is_reflecting: bool,
    has_ever: bool,
}

impl Tracker {
    /// Follows the set of those to probe. A new one is taken for what `was` says until probes have told.
    pub(super) fn follow(&mut self, targets: &BTreeSet<(String, u32)>, was: impl Fn(&str) -> bool) {
        self.tracks.retain(|target, _| targets.contains(target));
        for target in targets {
            if !self.tracks.contains_key(target) {
                let track = Track {
                    is_reflecting: was(&target.0),
                    has_ever: was(&target.0),
                    ..Track::default()
                };
                self.tracks.insert(target.clone(), track);
            }
        }
    }

    /// A probe has been sent.
    pub(super) fn sent(&mut self, target: &(String, u32), nonce: u64) {
        if let Some(track) = self.tracks.get_mut(target) {
            track.outstanding.push_back(nonce);
            if track.outstanding.len() > MISSED {
                track.outstanding.pop_front();
            }
        }
    }

    /// Takes the nonce of the last probe that came back, before the next is sent; tells whether it is news.
    pub(super) fn judge(&mut self, target: &(String, u32), returned: u64) -> bool {
        let Some(track) = self.tracks.get_mut(target) else {
            return false;
        };
        let mut outstanding = track.outstanding.iter();
        if let Some(place) = outstanding.position(|nonce| *nonce == returned) {
            track.outstanding.drain(..=place);
            track.missed = 0;
            track.returned += 1;
            track.is_reflecting |= !track.has_ever || track.returned >= MISSED;
            track.has_ever = true;
            return true;
        }
        if !track.outstanding.is_empty() {
            track.missed += 1;
            track.returned = 0;
            if track.missed >= MISSED {
                track.is_reflecting = false;
            }
        }
        false
    }

    /// What probes of a peer have told, on all links together.
    pub(super) fn peer(&self, name: &str) -> Told {
        let tracks = self.tracks.iter().filter(|((peer, _), _)| peer == name);
        tracks.fold(Told::default(), |told, (_, track)| Told {
            reflects: told.reflects || track.is_reflecting,
            has_missed: told.has_missed || track.missed >= MISSED,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_missed_probes_and_no_fewer_tell_that_a_peer_does_not_reflect() {
        let target = ("b".to_owned(), 0);
        let mut tracker = Tracker::default();
        tracker.follow(&BTreeSet::from([target.clone()]), |_| true);
        let mut last = 0;
        for nonce in 1..10 {
            assert!(
                tracker.peer("b").reflects,
                "before three were sent, or all came back"
            );
            tracker.judge(&target, last);
            tracker.sent(&target, nonce);
            last = nonce;
        }
        let mut reflects = Vec::new();
        for nonce in 10..15 {
            tracker.judge(&target, 8);
            tracker.sent(&target, nonce);
            reflects.push(tracker.peer("b").reflects);
        }
        assert_eq!(reflects, [true, true, false, false, false]);
        let mut reflects = Vec::new();
        for nonce in 14..17_u64 {
            assert!(tracker.judge(&target, nonce));
            assert!(!tracker.peer("b").has_missed);
            tracker.sent(&target, nonce + 1);
            reflects.push(tracker.peer("b").reflects);
        }
        assert_eq!(
            reflects,
            [false, false, true],
            "not by the first that comes back"
        );
    }

    #[test]
    fn an_old_answer_is_no_answer() {
        let target = ("b".to_owned(), 0);
        let mut tracker = Tracker::default();
        tracker.follow(&BTreeSet::from([target.clone()]), |_| false);
        for nonce in 1..10 {
            assert!(!tracker.judge(&target, 77));
            tracker.sent(&target, nonce);
        }
        let told = tracker.peer("b");
        assert!(!told.reflects && told.has_missed);
    }

    #[test]
    fn a_probe_is_a_whole_packet_of_either_version() {
        for vip in ["172.22.0.2", "fd00:22::2"] {
            let vip: IpAddr = vip.parse().expect("valid");
            let frame = frame(([1; 6], [2; 6]), None, vip, 9470, 5);
            assert_eq!((&frame[..6], &frame[6..12]), (&[2; 6][..], &[1; 6][..]));
            let packet = etherparse::PacketHeaders::from_ethernet_slice(&frame).expect("parses");
            let Some(etherparse::TransportHeader::Udp(udp)) = packet.transport else {
                panic!("{vip}: not UDP")
            };
            let payload = packet.payload.slice();
            match packet.net.expect("IP") {
                etherparse::NetHeaders::Ipv4(ip, _) => {
                    assert_eq!(ip.header_checksum, ip.calc_header_checksum());
                    assert_eq!(udp.checksum, 0);
                }
                etherparse::NetHeaders::Ipv6(ip, _) => {
                    let sum = udp.calc_checksum_ipv6(&ip, payload).expect("short");
                    assert_eq!(udp.checksum, sum);
                }
                other => panic!("{other:?}"),
            }
            assert_eq!((udp.destination_port, &payload[..4]), (9470, &b"ilbp"[..]));
        }
    }
}
