//! The ways of packets through this node's kernel: from the uplink to the pods, and back to the clients.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use super::subject::Subject;
use super::uplinks::Port;
use super::{Check, Finding, set_sysctl, sysctl};
use crate::desired::UplinkSelector;
use crate::interfaces::{self, Host, Interface, in_subnet};

/// The kernel's values for one device; `None` where there is none to read.
#[derive(Clone, Copy, Debug, Default)]
struct Values {
    forwarding: Option<u32>,
    /// Of all devices: the larger one counts.
    rp_filter_all: Option<u32>,
    rp_filter: Option<u32>,
}

/// Where a packet to some address goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By the interface of this index.
    By(u32),
    /// Nowhere.
    Nowhere,
    /// The kernel was not asked, or did not answer.
    Unknown,
}

pub(super) fn look(subject: &Subject, host: &Host, ports: &[Port]) -> Vec<Finding> {
    let devices: BTreeMap<u32, &Port> = ports.iter().map(|p| (p.device.index, p)).collect();
    let backends = subject.local_backends();
    let mut routes: Vec<(u32, Option<u32>)> = Vec::new();
    let mut unreachable = Vec::new();
    for address in &backends {
        match interfaces::route(*address) {
            Ok(Some(route)) => routes.extend(route.device.map(|device| (device, route.mtu))),
            Ok(None) => unreachable.push(*address),
            // Whoever gets no answer here gets none below, and says so.
            Err(_) => {}
        }
    }
    let mut findings = forwarding(subject, host, &devices, &routes);
    for port in devices.values() {
        let subnets = subnets(subject, host, port);
        let v4 = subnets.iter().find(|(network, _)| network.is_ipv4());
        if let Some(subnet) = v4 {
            let way = way(somebody(*subnet, subject, host));
            findings.push(judge_rp_filter(port, values(&port.device.name), way, host));
        }
        for subnet in &subnets {
            let way = way(somebody(*subnet, subject, host));
            findings.push(judge_return(port, *subnet, way, host, &devices));
        }
        findings.push(judge_path_mtu(port, &routes, host));
    }
    findings.push(judge_pods(backends.len(), &unreachable));
    findings
}

fn judge_pods(backends: usize, unreachable: &[IpAddr]) -> Finding {
    let check = Check::PodRoute;
    match (backends, unreachable) {
        (0, _) => Finding::skipped(check, "", "no backends of this node are known"),
        (_, []) => Finding::ok(check, "", "a route leads to each backend of this node"),
        (_, some) => Finding::warning(
            check,
            "",
            format!(
                "no route leads to {}: what is balanced there is lost, until the CNI has made the pod's interface",
                super::list(some)
            ),
            format!("ip route get {}; do these pods run on this node?", some[0]),
        ),
    }
}

fn values(device: &str) -> Values {
    let of = |device: &str, key: &str| sysctl(format!("net/ipv4/conf/{device}/{key}"));
    Values {
        forwarding: of(device, "forwarding"),
        rp_filter_all: of("all", "rp_filter"),
        rp_filter: of(device, "rp_filter"),
    }
}

/// Subnets of VIPs on an uplink's device, without those where this node has no address: that is a finding of its own.
pub(super) fn subnets(subject: &Subject, host: &Host, port: &Port) -> BTreeSet<(IpAddr, u8)> {
    let vips = subject.vips.iter();
    let subnets = vips.filter_map(|vip| subnet_of(vip.address, host, port));
    subnets
        .map(|(address, length)| (network(address, length), length))
        .collect()
}

/// The subnet of a VIP, if it is on the uplink: as an address of its device has it, else as its selector does.
pub(super) fn subnet_of(vip: IpAddr, host: &Host, port: &Port) -> Option<(IpAddr, u8)> {
    let own = host.addresses.iter().filter(|own| {
        // The VIP itself, put on the device by mistake, tells nothing.
        own.index == port.device.index && own.address != vip
    });
    let mut own = own.map(|own| (own.address, own.prefix));
    let is_in = |(address, length): &(IpAddr, u8)| in_subnet(vip, *address, *length);
    own.find(is_in).or_else(|| match port.uplink.selector {
        UplinkSelector::Subnet(network, length) => Some((network, length)).filter(is_in),
        _ => None,
    })
}

/// The first address of a subnet.
fn network(address: IpAddr, length: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0);
            Ipv4Addr::from(u32::from(v4) & mask).into()
        }
        IpAddr::V6(v6) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(length)).unwrap_or(0);
            std::net::Ipv6Addr::from(u128::from(v6) & mask).into()
        }
    }
}

/// An address of a subnet that may be a client's: neither this node's nor a VIP.
fn somebody(subnet: (IpAddr, u8), subject: &Subject, host: &Host) -> Option<IpAddr> {
    let (network, length) = subnet;
    let own = host.own();
    let candidate = |offset: u8| -> IpAddr {
        match network {
            IpAddr::V4(v4) => Ipv4Addr::from(u32::from(v4).wrapping_add(offset.into())).into(),
            IpAddr::V6(v6) => {
                std::net::Ipv6Addr::from(u128::from(v6).wrapping_add(offset.into())).into()
            }
        }
    };
    let is_vip = |address: IpAddr| subject.vips.iter().any(|vip| vip.address == address);
    let mut candidates = (1..=u8::MAX).map(candidate);
    candidates.find(|address| {
        in_subnet(*address, network, length) && !own.contains(address) && !is_vip(*address)
    })
}

fn way(address: Option<IpAddr>) -> Way {
    match address.map(interfaces::route_to) {
        Some(Ok(Some(device))) => Way::By(device),
        Some(Ok(None)) => Way::Nowhere,
        Some(Err(_)) | None => Way::Unknown,
    }
}

/// Of the uplinks' devices, and of those towards pods: answers are forwarded, too.
fn forwarding(
    subject: &Subject,
    host: &Host,
    devices: &BTreeMap<u32, &Port>,
    routes: &[(u32, Option<u32>)],
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let towards = routes.iter().map(|(device, _)| *device);
    let all: BTreeSet<u32> = devices.keys().copied().chain(towards).collect();
    let named = all.iter().filter_map(|index| host.interfaces.get(index));
    let named: Vec<_> = named.filter(|device| !device.loopback).collect();
    if subject.vips.iter().any(|vip| vip.address.is_ipv4()) {
        let all = sysctl("net/ipv4/ip_forward");
        let each = named.iter().map(|device| {
            let name = device.name.as_str();
            (name, values(name).forwarding)
        });
        findings.push(judge_forwarding_v4(all, &each.collect::<Vec<_>>()));
    }
    if subject.vips.iter().any(|vip| vip.address.is_ipv6()) {
        findings.push(judge_forwarding_v6(sysctl("net/ipv6/conf/all/forwarding")));
    }
    findings
}

fn judge_forwarding_v4(all: Option<u32>, each: &[(&str, Option<u32>)]) -> Finding {
    let check = Check::Forwarding;
    let closed = each.iter().filter(|(_, value)| *value == Some(0));
    let closed: Vec<_> = closed.map(|(name, _)| *name).collect();
    if all.is_none() && each.iter().all(|(_, value)| value.is_none()) {
        return Finding::skipped(check, "IPv4", "/proc/sys/net/ipv4 cannot be read");
    }
    if closed.is_empty() && (all != Some(0) || !each.is_empty()) {
        return Finding::ok(check, "IPv4", "the kernel routes");
    }
    let whence = match closed.is_empty() {
        true => String::new(),
        false => format!(" what arrives by {}", super::list(&closed)),
    };
    let found = format!(
        "the kernel does not route{whence}: packets are rewritten and then dropped on their way between clients and pods"
    );
    let remedy = match all {
        Some(0) => "sysctl -w net.ipv4.ip_forward=1".to_owned(),
        _ => {
            let each = closed.iter();
            let each = each.map(|name| set_sysctl("ipv4", name, "forwarding", 1));
            each.collect::<Vec<_>>().join("; ")
        }
    };
    Finding::error(check, "IPv4", found, remedy)
}

fn judge_forwarding_v6(all: Option<u32>) -> Finding {
    let check = Check::Forwarding;
    match all {
        Some(0) => Finding::error(
            check,
            "IPv6",
            "the kernel does not route IPv6 between the uplink and the pods",
            "sysctl -w net.ipv6.conf.all.forwarding=1",
        ),
        Some(_) => Finding::ok(check, "IPv6", "the kernel routes"),
        None => Finding::skipped(
            check,
            "IPv6",
            "the kernel has no IPv6, or /proc cannot be read",
        ),
    }
}

fn judge_rp_filter(port: &Port, values: Values, way: Way, host: &Host) -> Finding {
    const STRICT: u32 = 1;
    let check = Check::RpFilter;
    let name = &port.device.name;
    let (Some(all), Some(own)) = (values.rp_filter_all, values.rp_filter) else {
        return Finding::skipped(check, name, "/proc/sys/net/ipv4/conf cannot be read");
    };
    let effective = all.max(own);
    // Loose is 2, the larger one: setting it on the device is enough whatever `all` says.
    let loose = set_sysctl("ipv4", name, "rp_filter", 2);
    let dropped = |who: &str, why: &str| {
        format!(
            "rp_filter is {effective} (all: {all}, {name}: {own}) and {why}: the kernel drops packets of {who} that arrive by {name}"
        )
    };
    let back_elsewhere = way != Way::By(port.device.index);
    match (effective, way) {
        (0, _) => Finding::ok(check, name, "off"),
        (STRICT, Way::By(_) | Way::Nowhere) if back_elsewhere => {
            let why = "no route to the VIP's subnet leads back by it";
            Finding::error(check, name, dropped("clients", why), loose)
        }
        (STRICT, _)
            if !port.uplink.gateways.is_empty()
                && !host.default_routes.contains(&port.device.index) =>
        {
            let why = "the default route does not lead back by it";
            let who = "clients behind the gateway";
            Finding::warning(check, name, dropped(who, why), loose)
        }
        (STRICT, Way::Unknown) => {
            let found = "strict, and it is not known where clients are";
            Finding::skipped(check, name, found)
        }
        (STRICT, _) => Finding::ok(check, name, "strict, and clients are reached back by it"),
        (_, Way::Nowhere) => {
            let why = "there is no route to the VIP's subnet at all";
            let remedy = set_sysctl("ipv4", name, "rp_filter", 0);
            Finding::error(check, name, dropped("clients", why), remedy)
        }
        _ => Finding::ok(check, name, "loose"),
    }
}

/// `uplinks`: devices by index that replies are rewritten on, as on those with a default route.
fn judge_return<T>(
    port: &Port,
    subnet: (IpAddr, u8),
    way: Way,
    host: &Host,
    uplinks: &BTreeMap<u32, T>,
) -> Finding {
    let check = Check::ReturnPath;
    let name = &port.device.name;
    let (network, length) = subnet;
    let remedy = format!("ip route replace {network}/{length} dev {name}");
    let device = match way {
        Way::Unknown => {
            let found = format!("how {network}/{length} is reached could not be found out");
            return Finding::skipped(check, name, found);
        }
        Way::Nowhere => {
            let found =
                format!("no route leads to {network}/{length}: answers to clients are dropped");
            return Finding::error(check, name, found, remedy);
        }
        Way::By(index) if index == port.device.index => {
            let found = format!("answers to {network}/{length} leave by it");
            return Finding::ok(check, name, found);
        }
        Way::By(index) => host.interfaces.get(&index),
    };
    let elsewhere = device.map_or("another interface", |device| device.name.as_str());
    let is_watched = device.is_some_and(|device| {
        let index = device.index;
        let watched = host.default_route_places();
        let mut watched = watched.iter();
        uplinks.contains_key(&index)
            || watched.any(|place| place.device == index || place.port == index)
    });
    if is_watched {
        let found = format!(
            "answers to {network}/{length} are routed out of {elsewhere} and redirected from there: more work for each packet, \
             and firewalls see them on the wrong interface"
        );
        return Finding::warning(check, name, found, remedy);
    }
    let found = format!(
        "answers to {network}/{length} leave by {elsewhere}, where nobody rewrites them: clients see the pods' addresses and reset"
    );
    Finding::error(check, name, found, remedy)
}

/// The kernel's "fragmentation needed" would name the pod's address, which the client knows nothing of. A pod's end of a
/// veth has the same MTU, so TCP knows it; a tunnel's need not be that of the pods behind it.
fn judge_path_mtu(port: &Port, routes: &[(u32, Option<u32>)], host: &Host) -> Finding {
    let check = Check::PathMtu;
    let name = &port.device.name;
    let mtu = port.interface.mtu.min(port.device.mtu);
    let smaller = |(index, own): &(u32, Option<u32>)| -> Option<(&Interface, u32)> {
        let device = host.interfaces.get(index)?;
        let fits = own.map_or(device.mtu, |own| own.min(device.mtu));
        (fits < mtu).then_some((device, fits))
    };
    let mut narrow: Vec<_> = routes.iter().filter_map(smaller).collect();
    narrow.sort_by_key(|(device, fits)| (device.is("veth"), *fits));
    match narrow.first() {
        Some((device, fits)) if !device.is("veth") => {
            let found = format!(
                "{mtu} here, but {fits} on {} towards backends: where the pods' own MTU is larger than that, large packets \
                 are lost, and clients cannot be told (it would name the pod's address)",
                device.name
            );
            let remedy = format!(
                "give the pods an MTU of {fits} at most (the CNI's configuration), or: ip link set dev {} mtu {mtu}",
                device.name
            );
            Finding::warning(check, name, found, remedy)
        }
        Some((device, fits)) => {
            let found = format!(
                "{mtu} here, {fits} on {} at least: the pods' TCP says so to clients",
                device.name
            );
            Finding::ok(check, name, found)
        }
        None if routes.is_empty() => {
            Finding::skipped(check, name, "no way to a backend of this node is known")
        }
        None => Finding::ok(check, name, "clients' packets fit the way to the backends"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::uplinks::tests::port;
    use super::*;
    use crate::interfaces::Address;

    const SUBNET: (IpAddr, u8) = (IpAddr::V4(Ipv4Addr::new(172, 22, 0, 0)), 24);

    /// `eth0` (2) with the default route, `eth1` (3), a pod's `veth1` (4) and a tunnel (5).
    fn host() -> Host {
        let mut host = Host::default();
        for (index, name, kind, mtu) in [
            (2, "eth0", None, 1500),
            (3, "eth1", None, 1500),
            (4, "veth1", Some("veth"), 1400),
            (5, "flannel.1", Some("vxlan"), 1450),
        ] {
            let interface = Interface {
                index,
                name: name.to_owned(),
                kind: kind.map(str::to_owned),
                mtu,
                ethernet: true,
                ..Interface::default()
            };
            host.interfaces.insert(index, interface);
        }
        host.default_routes = [2].into();
        host
    }

    #[test]
    fn forwarding_is_set_where_it_is_off() {
        let open = judge_forwarding_v4(Some(1), &[("eth1", Some(1)), ("veth1", Some(1))]);
        assert_eq!(open.status, Status::Ok);
        let all = judge_forwarding_v4(Some(0), &[("eth1", Some(0))]);
        let remedy = all.remedy.as_deref();
        assert_eq!(remedy, Some("sysctl -w net.ipv4.ip_forward=1"));
        assert_eq!(all.status, Status::Error);
        let one = judge_forwarding_v4(Some(1), &[("eth1.7", Some(0)), ("veth1", Some(1))]);
        let remedy = one.remedy.as_deref();
        assert_eq!(remedy, Some("sysctl -w net/ipv4/conf/eth1.7/forwarding=1"));
        assert_eq!(judge_forwarding_v4(None, &[]).status, Status::Skipped);
        assert_eq!(judge_forwarding_v4(Some(0), &[]).status, Status::Error);
        assert_eq!(judge_forwarding_v4(Some(1), &[]).status, Status::Ok);
        assert_eq!(judge_forwarding_v6(Some(0)).status, Status::Error);
        assert_eq!(judge_forwarding_v6(Some(1)).status, Status::Ok);
    }

    #[test]
    fn the_reverse_path_filter_matters_where_clients_are_not_reached_back() {
        let values = |all, own| Values {
            forwarding: Some(1),
            rp_filter_all: Some(all),
            rp_filter: Some(own),
        };
        let mut behind = port();
        behind.uplink.gateways = vec!["172.22.0.1".parse().expect("valid")];
        for (port, all, own, way, status) in [
            (port(), 0, 0, Way::By(2), Status::Ok),
            (port(), 1, 0, Way::By(3), Status::Ok),
            (port(), 1, 0, Way::By(2), Status::Error),
            (port(), 0, 1, Way::Nowhere, Status::Error),
            (port(), 1, 2, Way::By(2), Status::Ok),
            (port(), 2, 0, Way::Nowhere, Status::Error),
            (port(), 0, 1, Way::Unknown, Status::Skipped),
            (behind.clone(), 1, 1, Way::By(3), Status::Warning),
            (behind, 2, 1, Way::By(3), Status::Ok),
        ] {
            let found = judge_rp_filter(&port, values(all, own), way, &host());
            assert_eq!(found.status, status, "{all} {own} {way:?}: {}", found.found);
        }
        let found = judge_rp_filter(&port(), values(1, 0), Way::By(2), &host());
        let remedy = found.remedy.as_deref();
        assert_eq!(remedy, Some("sysctl -w net/ipv4/conf/eth1/rp_filter=2"));
    }

    #[test]
    fn answers_leave_by_the_uplink_or_at_least_where_they_are_redirected() {
        let uplinks = BTreeMap::from([(3, ()), (4, ())]);
        for (way, status) in [
            (Way::By(3), Status::Ok),
            (Way::By(2), Status::Warning),
            (Way::By(4), Status::Warning),
            (Way::By(5), Status::Error),
            (Way::Nowhere, Status::Error),
            (Way::Unknown, Status::Skipped),
        ] {
            let found = judge_return(&port(), SUBNET, way, &host(), &uplinks);
            assert_eq!(found.status, status, "{way:?}");
        }
    }

    #[test]
    fn a_pod_without_a_route_is_told_by_its_address() {
        assert_eq!(judge_pods(0, &[]).status, Status::Skipped);
        assert_eq!(judge_pods(2, &[]).status, Status::Ok);
        let found = judge_pods(2, &[[10, 244, 0, 11].into()]);
        assert_eq!(found.status, Status::Warning);
        assert!(found.found.contains("10.244.0.11"), "{}", found.found);
    }

    #[test]
    fn a_narrow_tunnel_is_a_warning_and_a_narrow_pod_is_not() {
        let judge = |routes: &[(u32, Option<u32>)]| judge_path_mtu(&port(), routes, &host());
        assert_eq!(judge(&[]).status, Status::Skipped);
        assert_eq!(judge(&[(2, None)]).status, Status::Ok);
        assert_eq!(judge(&[(4, None)]).status, Status::Ok);
        let found = judge(&[(4, None), (5, None)]);
        assert_eq!(found.status, Status::Warning);
        assert!(found.found.contains("1450 on flannel.1"), "{}", found.found);
        assert_eq!(judge(&[(2, Some(1300))]).status, Status::Warning, "route");
    }

    #[test]
    fn a_client_to_be_is_neither_this_node_nor_a_vip() {
        let mut host = host();
        host.addresses.push(Address {
            index: 3,
            address: [172, 22, 0, 1].into(),
            prefix: 24,
        });
        let subject = Subject {
            vips: vec![super::super::subject::Vip {
                address: [172, 22, 0, 2].into(),
                announce: crate::desired::Announce::Always,
            }],
            ..Subject::default()
        };
        assert_eq!(subnets(&subject, &host, &port()), [SUBNET].into());
        let expected = Some([172, 22, 0, 3].into());
        assert_eq!(somebody(SUBNET, &subject, &host), expected);
        let whole = ([172, 22, 0, 2].into(), 32);
        assert_eq!(somebody(whole, &subject, &host), None);
    }
}
