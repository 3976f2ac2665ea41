//! Gratuitous ARP and unsolicited neighbor advertisements: tell hosts and switches where a VIP is, before they ask.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use lb_common::Addr;
use lb_common::packet::{ALL_NODES_MAC, Advertisement, advertisement, ethertype};
use socket2::{Domain, Socket, Type};
use tracing::debug;

use crate::packet::{self, Arp, ethernet};

/// When the frames of a burst are sent, in milliseconds from its beginning: some of them may meet a port that does not
/// forward yet.
const BURST: [u64; 5] = [0, 50, 150, 400, 1000];
/// Time between announcements without a reason: switches forget after five minutes, by default.
const REMIND: Duration = Duration::from_secs(60);
/// Bursts because of foreign claims begin this far apart at least: two that claim must not outshout each other.
const DISPUTE: Duration = Duration::from_secs(1);

/// The frames that announce a VIP: the announcement of RFC 5227 section 3, and the unasked answer that some hosts heed
/// instead; for IPv6 the unsolicited advertisement of RFC 4861 section 7.2.6.
pub(super) fn frames(mac: [u8; 6], vlan: Option<u16>, vip: IpAddr) -> Vec<Vec<u8>> {
    let vip = match vip {
        IpAddr::V4(vip) => vip,
        IpAddr::V6(_) => {
            let mut frame = ethernet(ALL_NODES_MAC, mac, vlan, ethertype::IPV6);
            let told = advertisement(&Addr::from(vip), mac, None);
            // SAFETY: repr(C) of integers without padding.
            frame.extend(unsafe {
                core::mem::transmute::<Advertisement, [u8; size_of::<Advertisement>()]>(told)
            });
            return vec![frame];
        }
    };
    let announce = |(operation, target_mac)| {
        let announcement = Arp {
            operation,
            sender_mac: mac,
            sender: vip,
            target_mac,
            target: vip,
        };
        announcement.broadcast(vlan)
    };
    [(Arp::ASKS, [0; 6]), (Arp::ANSWERS, mac)]
        .map(announce)
        .to_vec()
}

/// Membership in groups that questions for VIPs are sent to: a switch that snoops on MLD lets them through then, and so
/// does the NIC.
#[derive(Debug, Default)]
pub(super) struct Groups {
    joined: BTreeMap<(u32, Ipv6Addr), Option<Socket>>,
}

impl Groups {
    /// Joins on these interfaces what is wanted and leaves the rest; what fails is tried again the next time.
    pub(super) fn follow(&mut self, wanted: &BTreeSet<(u32, Ipv6Addr)>) {
        self.joined.retain(|place, _| wanted.contains(place));
        for place in wanted {
            let membership = self.joined.entry(*place).or_default();
            if membership.is_none() {
                let (device, group) = place;
                match join(*device, group) {
                    Ok(socket) => *membership = Some(socket),
                    Err(error) => debug!(device, %group, %error, "cannot join the group"),
                }
            }
        }
    }
}

fn join(device: u32, group: &Ipv6Addr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV6, Type::DGRAM, None)?;
    socket.join_multicast_v6(group, device)?;
    Ok(socket)
}

/// When to announce what.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    vips: BTreeMap<IpAddr, Burst>,
    disputed: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
struct Burst {
    began: Duration,
    sent: usize,
    last: Duration,
}

impl Burst {
    fn new(now: Duration) -> Self {
        Self {
            began: now,
            sent: 0,
            last: now,
        }
    }
}

impl Schedule {
    /// Follows what this node announces: a burst for everything new. VIPs of `risen` are new once more: their link has
    /// come up.
    pub(super) fn follow(
        &mut self,
        announced: &BTreeSet<IpAddr>,
        risen: &BTreeSet<IpAddr>,
        now: Duration,
    ) {
        self.vips
            .retain(|vip, _| announced.contains(vip) && !risen.contains(vip));
        for vip in announced {
            self.vips.entry(*vip).or_insert_with(|| Burst::new(now));
        }
    }

    /// Somebody else claims one of the VIPs.
    pub(super) fn dispute(&mut self, now: Duration) {
        let is_soon = |at: Duration| now.saturating_sub(at) < DISPUTE;
        if self.disputed.is_some_and(is_soon) {
            return;
        }
        self.disputed = Some(now);
        for burst in self.vips.values_mut() {
            *burst = Burst::new(now);
        }
    }

    /// VIPs to announce now.
    pub(super) fn due(&mut self, now: Duration) -> Vec<IpAddr> {
        let mut due = Vec::new();
        for (vip, burst) in &mut self.vips {
            let is_due = match BURST.get(burst.sent) {
                Some(at) => now >= burst.began + Duration::from_millis(*at),
                None => now.saturating_sub(burst.last) >= REMIND,
            };
            if is_due {
                burst.sent += 1;
                burst.last = now;
                due.push(*vip);
            }
        }
        due
    }
}

/// Packet sockets that only send, by interface index.
#[derive(Debug, Default)]
pub(super) struct Wires {
    sockets: BTreeMap<u32, Socket>,
}

impl Wires {
    /// Sends a frame out of an interface.
    pub(super) fn send(&mut self, ifindex: u32, frame: &[u8]) -> io::Result<()> {
        let socket = match self.sockets.entry(ifindex) {
            std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::btree_map::Entry::Vacant(entry) => {
                entry.insert(packet::sender(ifindex)?)
            }
        };
        match socket.send(frame) {
            Ok(_) => Ok(()),
            Err(error) => {
                // An interface that went and came back has another index or none: open it anew the next time.
                self.sockets.remove(&ifindex);
                Err(error)
            }
        }
    }

    /// Closes what is not among these.
    pub(super) fn keep(&mut self, ifindexes: &BTreeSet<u32>) {
        self.sockets
            .retain(|ifindex, _| ifindexes.contains(ifindex));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(1_000_000 + milliseconds)
    }

    fn times(schedule: &mut Schedule, from: u64, to: u64) -> Vec<u64> {
        (from..to)
            .step_by(10)
            .filter(|now| !schedule.due(at(*now)).is_empty())
            .collect()
    }

    #[test]
    fn a_gain_is_announced_in_a_burst_and_then_once_a_minute() {
        let vips = BTreeSet::from(["172.22.0.2".parse().expect("valid")]);
        let mut schedule = Schedule::default();
        schedule.follow(&vips, &BTreeSet::new(), at(0));
        assert_eq!(
            times(&mut schedule, 0, 130_000),
            [0, 50, 150, 400, 1000, 61_000, 121_000]
        );
        schedule.follow(&vips, &vips, at(130_000));
        assert_eq!(
            times(&mut schedule, 130_000, 130_100).len(),
            2,
            "the link came up"
        );
        schedule.follow(&BTreeSet::new(), &BTreeSet::new(), at(131_000));
        assert!(times(&mut schedule, 131_000, 200_000).is_empty(), "lost");
    }

    #[test]
    fn a_dispute_is_answered_at_most_once_a_second() {
        let vips = BTreeSet::from(["172.22.0.2".parse().expect("valid")]);
        let mut schedule = Schedule::default();
        schedule.follow(&vips, &BTreeSet::new(), at(0));
        times(&mut schedule, 0, 5000);
        let mut sent = 0;
        for now in (5000..7000).step_by(10) {
            schedule.dispute(at(now));
            sent += schedule.due(at(now)).len();
        }
        // Two bursts, each cut short by the next.
        assert_eq!(sent, 8);
    }

    #[test]
    fn both_forms_of_the_announcement_name_the_vip_as_sender_and_target() {
        let mac = [2, 0, 0, 0, 0, 1];
        let vip = std::net::Ipv4Addr::new(172, 22, 0, 2);
        for (frame, operation) in frames(mac, None, vip.into()).iter().zip([1, 2]) {
            assert_eq!(frame.len(), 42);
            assert_eq!(frame[..6], [0xff; 6]);
            assert_eq!(frame[20..22], [0, operation]);
            assert_eq!(
                (&frame[22..28], &frame[28..32]),
                (&mac[..], &vip.octets()[..])
            );
            assert_eq!(frame[38..42], vip.octets());
        }
        let tagged = &frames(mac, Some(7), vip.into())[0];
        assert_eq!(tagged[12..18], [0x81, 0, 0, 7, 8, 6]);
    }

    #[test]
    fn an_unsolicited_advertisement_overrides_what_neighbours_know() {
        let mac = [2, 0, 0, 0, 0, 1];
        let vip: Ipv6Addr = "fd00:22::2".parse().expect("valid");
        let frames = frames(mac, None, vip.into());
        let [frame] = &frames[..] else {
            panic!("{} frames", frames.len())
        };
        assert_eq!(frame[..6], [0x33, 0x33, 0, 0, 0, 1]);
        let ip = packet::checked_icmpv6(frame);
        assert_eq!((ip.hop_limit, ip.source), (255, vip.octets()));
        // Override alone; the VIP; its MAC.
        assert_eq!(frame[54..62], [136, 0, frame[56], frame[57], 0x20, 0, 0, 0]);
        assert_eq!(frame[62..78], vip.octets());
        assert_eq!(frame[78..], [2, 1, 2, 0, 0, 0, 0, 1]);
        assert_eq!(packet::solicited_node(vip).to_string(), "ff02::1:ff00:2");
    }
}
