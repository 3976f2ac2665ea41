//! Whether the other nodes are heard, and take new flows.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use super::pins::Pinned;
use super::subject::Subject;
use super::{Check, Finding};
use crate::dataplane::read::PeerView;
use crate::interfaces::Host;

/// Heartbeats that a fresh agent may need to hear everybody.
const SETTLE: Duration = Duration::from_secs(10);

pub(super) fn look(subject: &Subject, host: &Host, pinned: Option<&Pinned>) -> Vec<Finding> {
    let Some(pinned) = pinned else {
        return Vec::new();
    };
    let started = pinned.control.agent_started_seconds.unwrap_or(0.0);
    if !pinned.control.agent_running || started < SETTLE.as_secs_f64() {
        let found = "no agent has listened here for long enough to say who is heard";
        return match subject.peers.is_empty() {
            true => Vec::new(),
            false => vec![Finding::skipped(Check::Peers, "", found)],
        };
    }
    judge(&subject.peers, &host.own(), &pinned.peers)
}

fn judge(listed: &BTreeSet<IpAddr>, own: &BTreeSet<IpAddr>, peers: &[PeerView]) -> Vec<Finding> {
    let links = peers.iter().flat_map(|peer| &peer.links);
    let known: BTreeSet<_> = links.flat_map(|link| &link.addresses).collect();
    let others = listed.difference(own).filter(|a| !known.contains(a));
    let unheard = others.map(|address| {
        let found = "no agent has been heard from there, though `peers` lists it: flows are not handed on to it, and where \
                     a VIP is elected both nodes announce it";
        let remedy = "compare `peers` in both files, the port and the key above all: an agent counts what another key has signed in \
                      ironlb_heartbeats_total{result=\"forged\"}; else look for the heartbeats there with tcpdump";
        Finding::warning(Check::Peers, address, found, remedy)
    });
    peers.iter().map(judge_peer).chain(unheard).collect()
}

fn judge_peer(peer: &PeerView) -> Finding {
    let node = &peer.node;
    match (peer.live, peer.reflecting) {
        (true, true) => Finding::ok(Check::Peers, node, "heard, and takes new flows"),
        (true, false) => {
            let found = "heard, but probes of its data plane do not come back: its pods get no new flows from here";
            let remedy = "run `ironlb doctor` there; a switch port that lets frames pass from known addresses alone does this, too";
            Finding::warning(Check::Peers, node, found, remedy)
        }
        (false, true) => {
            let found = "its agent is not heard; its data plane serves on as it was written last";
            let remedy = "start the agent there, or read its log";
            Finding::warning(Check::Peers, node, found, remedy)
        }
        (false, false) => {
            let found = "neither its agent nor its data plane is heard: its pods get no new flows";
            let remedy = "look after that node, its link and its agent, whose key may have changed; ironlb_heartbeats_total{result=\"forged\"} counts \
                          what another key has signed";
            Finding::warning(Check::Peers, node, found, remedy)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;
    use crate::dataplane::read::PeerLinkView;

    fn peer(live: bool, reflecting: bool) -> PeerView {
        PeerView {
            number: 1,
            node: "node1".to_owned(),
            version: String::new(),
            live,
            reflecting,
            synced: true,
            since_seconds: None,
            links: vec![PeerLinkView {
                interface: "eth0".to_owned(),
                mac: "02:00:00:00:00:01".to_owned(),
                addresses: vec![[172, 22, 0, 12].into()],
            }],
            handed_on_packets: 0,
            handed_on_bytes: 0,
            handed_on_flows: 0,
        }
    }

    #[test]
    fn a_peer_is_well_that_is_heard_and_reflects() {
        for (live, reflecting) in [(true, true), (true, false), (false, true), (false, false)] {
            let finding = judge_peer(&peer(live, reflecting));
            let is_well = live && reflecting;
            assert_eq!(finding.status == Status::Ok, is_well, "{finding:?}");
            assert_eq!(finding.on, "node1");
            assert_eq!(finding.remedy.is_none(), is_well);
        }
    }

    #[test]
    fn a_listed_address_of_which_nothing_was_heard_is_told_and_an_own_one_is_not() {
        let [own, heard, missing] = [11, 12, 13].map(|last| IpAddr::from([172, 22, 0, last]));
        let listed = [own, heard, missing].into();
        let findings = judge(&listed, &[own].into(), &[peer(true, true)]);
        let told: Vec<_> = findings.iter().map(|f| (f.on.as_str(), f.status)).collect();
        assert_eq!(
            told,
            [("node1", Status::Ok), ("172.22.0.13", Status::Warning)]
        );
    }
}
