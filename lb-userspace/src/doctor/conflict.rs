//! Who answers for the VIPs: asked by ARP probes (RFC 5227), which claim nothing and change nobody's table, and by neighbor
//! solicitations (RFC 4861), of which hosts learn no more than this node's own address.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::time::{Duration, Instant};

use lb_common::Verdict;

use super::paths::subnet_of;
use super::pins::Pinned;
use super::subject::{Subject, Vip};
use super::uplinks::Port;
use super::{Check, Finding, list, mac_text};
use crate::dataplane::AttachedMode;
use crate::dataplane::read::Reader;
use crate::desired::Announce;
use crate::interfaces::{Host, in_subnet};
use crate::packet::{self, Arp, neighbor};

/// Questions for an address.
const PROBES: u32 = 3;
/// How long answers to each are waited for.
const WAIT: Duration = Duration::from_millis(330);
/// A native program consumes answers before they can be heard; how long its counter is watched for one VIP.
const WATCH: Duration = Duration::from_millis(150);

type Mac = [u8; 6];

/// Who answered for an address.
type Answers = BTreeMap<IpAddr, BTreeSet<Mac>>;

/// Whose MACs are known.
#[derive(Clone, Debug, Default)]
struct Known {
    own: BTreeSet<Mac>,
    /// Names, or addresses, of other nodes.
    peers: BTreeMap<Mac, String>,
}

/// What was heard about one VIP.
#[derive(Clone, Debug, Default)]
struct Heard {
    answers: BTreeSet<Mac>,
    /// A native program counted claims meanwhile, whose sender it keeps to itself.
    hidden: bool,
    /// This node announces it now.
    announces: bool,
}

pub(super) fn look(
    subject: &Subject,
    host: &Host,
    ports: &[Port],
    pinned: Option<&Pinned>,
    bpffs: &Path,
) -> Vec<Finding> {
    let mut known = Known {
        own: host.interfaces.values().filter_map(|i| i.mac).collect(),
        peers: pinned.map(peers_of).unwrap_or_default(),
    };
    let own = host.own();
    let others = subject.peers.iter().filter(|peer| !own.contains(peer));
    let others: Vec<IpAddr> = others.copied().collect();
    let mut findings = Vec::new();
    let mut heard: BTreeMap<IpAddr, Heard> = BTreeMap::new();
    for port in ports {
        let name = &port.interface.name;
        let vips = subject.vips.iter().map(|vip| vip.address);
        let vips: Vec<IpAddr> = vips
            .filter(|vip| subnet_of(*vip, host, port).is_some())
            .collect();
        let asker = asker(host, port);
        let (vips, unheard): (Vec<_>, Vec<_>) = vips
            .into_iter()
            .partition(|vip| vip.is_ipv4() || asker.is_some());
        if !unheard.is_empty() {
            let found = format!(
                "nobody can be asked who answers for {}: this node has no link-local address there",
                list(unheard)
            );
            findings.push(Finding::skipped(Check::VipConflict, name, found));
        }
        if vips.is_empty() {
            continue;
        }
        let on_link = |peer: &&IpAddr| {
            let mut own = host.addresses.iter();
            own.any(|own| {
                own.index == port.device.index && in_subnet(**peer, own.address, own.prefix)
            })
        };
        let peers = others.iter().filter(on_link);
        let targets: Vec<_> = vips.iter().chain(peers).copied().collect();
        match ask(port, asker, &targets, PROBES, WAIT) {
            Ok(answers) => {
                for (address, macs) in answers {
                    if others.contains(&address) {
                        for mac in macs {
                            known
                                .peers
                                .entry(mac)
                                .or_insert_with(|| address.to_string());
                        }
                    } else if vips.contains(&address) {
                        heard.entry(address).or_default().answers.extend(macs);
                    }
                }
                for vip in &vips {
                    let hidden = is_claimed_unheard(port, asker, *vip, bpffs);
                    heard.entry(*vip).or_default().hidden |= hidden;
                }
            }
            Err(error) => findings.push(Finding::skipped(
                Check::VipConflict,
                name,
                format!(
                    "nobody could be asked who answers for {}: {error}",
                    list(vips)
                ),
            )),
        }
    }
    let views = pinned.map_or(&[][..], |pinned| &pinned.vips);
    for (address, mut heard) in heard {
        let view = views.iter().find(|view| view.address == address);
        heard.announces = view.is_some_and(|view| view.answering);
        let vip = subject.vips.iter().find(|vip| vip.address == address);
        findings.extend(vip.map(|vip| judge(vip, &heard, &known)));
    }
    findings
}

/// The address that this node asks others for theirs from: a link-local one is enough, and never a VIP.
fn asker(host: &Host, port: &Port) -> Option<Ipv6Addr> {
    let own = host.addresses.iter();
    let own = own.filter(|own| own.index == port.device.index);
    let mut own = own.filter_map(|own| match own.address {
        IpAddr::V6(address) => Some(address),
        IpAddr::V4(_) => None,
    });
    own.find(Ipv6Addr::is_unicast_link_local)
}

/// Peers as the maps know them.
fn peers_of(pinned: &Pinned) -> BTreeMap<Mac, String> {
    let links = pinned.peers.iter().flat_map(|peer| {
        let links = peer.links.iter();
        links.filter_map(|link| Some((parse(&link.mac)?, peer.node.clone())))
    });
    links.collect()
}

fn parse(text: &str) -> Option<Mac> {
    let octets = text.split(':').map(|octet| u8::from_str_radix(octet, 16));
    let octets: Vec<u8> = octets.collect::<Result<_, _>>().ok()?;
    octets.try_into().ok()
}

/// Asks for all addresses `rounds` times, and listens for `wait` after each.
fn ask(
    port: &Port,
    asker: Option<Ipv6Addr>,
    targets: &[IpAddr],
    rounds: u32,
    wait: Duration,
) -> io::Result<Answers> {
    let socket = packet::claim_listener(port.interface.index)?;
    let mac = port.device.mac.or(port.interface.mac);
    let mac = mac.ok_or_else(|| io::Error::other("it has no MAC"))?;
    let vlan = port.uplink.vlan;
    let mut answers = Answers::new();
    let mut frame = [0; 128];
    for _ in 0..rounds {
        for target in targets {
            let question = match (target, asker) {
                (IpAddr::V4(target), _) => Arp::probe(mac, *target).broadcast(vlan),
                (IpAddr::V6(target), Some(own)) => neighbor::solicitation(mac, own, *target, vlan),
                (IpAddr::V6(_), None) => continue,
            };
            socket.send(&question)?;
        }
        let end = Instant::now() + wait;
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            // Zero would mean for ever.
            socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            match (&socket).read(&mut frame) {
                Ok(length) => {
                    let said = claim(&frame[..length], vlan);
                    if let Some((address, mac)) = said.filter(|said| targets.contains(&said.0)) {
                        answers.entry(address).or_default().insert(mac);
                    }
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(answers)
}

/// Which address a frame says that its sender has, and with which MAC.
fn claim(frame: &[u8], vlan: Option<u16>) -> Option<(IpAddr, Mac)> {
    let arp = Arp::parse(frame, vlan).map(|said| (said.sender.into(), said.sender_mac));
    arp.or_else(|| neighbor::advertised(frame, vlan).map(|(address, mac)| (address.into(), mac)))
}

/// Whether the program on a natively attached uplink counts a claim of a VIP when it is asked for.
fn is_claimed_unheard(port: &Port, asker: Option<Ipv6Addr>, vip: IpAddr, bpffs: &Path) -> bool {
    let verdict = match vip {
        IpAddr::V4(_) => Verdict::DroppedArpClaim,
        IpAddr::V6(_) => Verdict::DroppedNdClaim,
    };
    let claims = || -> Option<u64> {
        let verdicts = Reader::open(bpffs).ok()?.verdicts().ok()?;
        let name = verdict.name();
        let claims = verdicts.iter().find(|verdict| verdict.verdict == name)?;
        Some(claims.packets)
    };
    if port.attached != Some(AttachedMode::Native) {
        return false;
    }
    let before = claims();
    ask(port, asker, &[vip], 1, WATCH).is_ok() && claims() > before
}

fn judge(vip: &Vip, heard: &Heard, known: &Known) -> Finding {
    let check = Check::VipConflict;
    let address = vip.address;
    let Heard {
        answers,
        hidden,
        announces,
    } = heard;
    let macs = |macs: &[&Mac]| list(macs.iter().map(|mac| mac_text(**mac)));
    let strangers = answers.iter();
    let strangers =
        strangers.filter(|mac| !known.own.contains(*mac) && !known.peers.contains_key(*mac));
    let strangers: Vec<_> = strangers.collect();
    if vip.announce == Announce::External {
        let all: Vec<_> = answers.iter().collect();
        return match &all[..] {
            [] => Finding::ok(
                check,
                address,
                "external, and nobody but perhaps this node answers for it now",
            ),
            [mac] => Finding::ok(
                check,
                address,
                format!("external: {} answers for it", mac_text(**mac)),
            ),
            several => Finding::warning(
                check,
                address,
                format!("external, and several answer for it: {}", macs(several)),
                "look at what announces it (keepalived, MetalLB): does each side take itself for the master?",
            ),
        };
    }
    if !strangers.is_empty() && vip.announce == Announce::Elect && known.peers.is_empty() {
        return Finding::warning(
            check,
            address,
            format!(
                "{} answers for it; no other node is known yet, so this may be one or a stranger",
                macs(&strangers)
            ),
            "ironlb status on the other nodes: which of them has this MAC?",
        );
    }
    if !strangers.is_empty() {
        let found = format!(
            "{} answers for it, and is neither this node's nor another node's: clients go there",
            macs(&strangers)
        );
        let remedy = format!(
            "find that machine by its MAC (bridge fdb show; the switch's table) and there: ip addr del {address}/PREFIX dev \
             INTERFACE; or choose another VIP"
        );
        return Finding::error(check, address, found, remedy);
    }
    if *hidden {
        return Finding::error(
            check,
            address,
            "somebody else answers for it; the native program consumes the answers, so the MAC is not seen from here",
            match address {
                IpAddr::V4(_) => {
                    format!("from another machine of the segment: arping -D -I INTERFACE {address}")
                }
                IpAddr::V6(_) => {
                    format!("from another machine of the segment: ndisc6 -m {address} INTERFACE")
                }
            },
        );
    }
    let peers = answers.iter().filter_map(|mac| known.peers.get(mac));
    let peers: BTreeSet<_> = peers.collect();
    match (peers.is_empty(), announces) {
        (false, true) => Finding::warning(
            check,
            address,
            format!("this node announces it, and so does {}", list(peers)),
            "ironlb status on both: do they hear each other (port 9470)?",
        ),
        (false, false) => Finding::ok(check, address, format!("{} answers for it", list(peers))),
        (true, true) => Finding::ok(check, address, "this node answers for it, and nobody else"),
        (true, false) => Finding::ok(check, address, "nobody else answers for it"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    const OWN: Mac = [2, 0, 0, 0, 0, 1];
    const PEER: Mac = [2, 0, 0, 0, 0, 2];
    const STRANGER: Mac = [2, 0, 0, 0, 0, 0xee];

    fn status(announce: Announce, announces: bool, answers: &[Mac], peers: &[Mac]) -> Status {
        finding(announce, announces, answers, peers).status
    }

    fn finding(announce: Announce, announces: bool, answers: &[Mac], peers: &[Mac]) -> Finding {
        let vip = Vip {
            address: [172, 22, 0, 2].into(),
            announce,
        };
        let heard = Heard {
            answers: answers.iter().copied().collect(),
            hidden: false,
            announces,
        };
        let known = Known {
            own: [OWN].into(),
            peers: peers.iter().map(|mac| (*mac, "node1".to_owned())).collect(),
        };
        judge(&vip, &heard, &known)
    }

    #[test]
    fn a_stranger_that_answers_is_an_error_that_names_its_mac() {
        use Announce::{Always, Elect};
        for (announce, announces) in [(Always, true), (Always, false), (Elect, false)] {
            let found = finding(announce, announces, &[PEER, STRANGER], &[PEER]);
            assert_eq!(found.status, Status::Error);
            assert!(found.found.contains("02:00:00:00:00:ee"), "{}", found.found);
            assert!(
                !found.found.contains("02:00:00:00:00:02"),
                "{}",
                found.found
            );
        }
        assert_eq!(status(Always, true, &[], &[]), Status::Ok);
        assert_eq!(
            status(Always, true, &[OWN], &[]),
            Status::Ok,
            "another uplink"
        );
    }

    #[test]
    fn a_peer_that_answers_is_right_unless_this_node_does_too() {
        use Announce::Elect;
        assert_eq!(status(Elect, false, &[PEER], &[PEER]), Status::Ok);
        assert_eq!(status(Elect, true, &[PEER], &[PEER]), Status::Warning);
        assert_eq!(
            status(Elect, false, &[PEER], &[]),
            Status::Warning,
            "not known yet"
        );
    }

    #[test]
    fn of_an_external_vip_one_owner_is_right_and_two_are_not() {
        use Announce::External;
        assert_eq!(status(External, false, &[STRANGER], &[]), Status::Ok);
        assert_eq!(
            status(External, false, &[STRANGER, PEER], &[PEER]),
            Status::Warning
        );
    }

    #[test]
    fn claims_that_a_native_program_keeps_to_itself_are_an_error() {
        for (address, tool) in [
            ([172, 22, 0, 2].into(), "arping -D"),
            ("fd00:22::2".parse().expect("valid"), "ndisc6 -m fd00:22::2"),
        ] {
            let vip = Vip {
                address,
                announce: Announce::Always,
            };
            let heard = Heard {
                hidden: true,
                announces: true,
                ..Heard::default()
            };
            let found = judge(&vip, &heard, &Known::default());
            assert_eq!(found.status, Status::Error);
            assert!(found.remedy.is_some_and(|remedy| remedy.contains(tool)));
        }
    }

    #[test]
    fn macs_are_read_as_the_maps_views_write_them() {
        assert_eq!(parse(&mac_text(STRANGER)), Some(STRANGER));
        assert_eq!(parse("02:00"), None);
    }
}
