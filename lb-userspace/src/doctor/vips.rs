//! The VIPs as addresses: on no device of this node, and in a subnet of it.

use std::net::IpAddr;

use super::paths::subnet_of;
use super::pins::Pinned;
use super::subject::{Subject, Vip};
use super::uplinks::Port;
use super::{Check, Finding};
use crate::dataplane;
use crate::desired::Announce;
use crate::interfaces::{Host, in_subnet};

pub(super) fn look(
    subject: &Subject,
    host: &Host,
    ports: &[Port],
    pinned: Option<&Pinned>,
) -> Vec<Finding> {
    let vips = subject.vips.iter();
    let mut findings: Vec<_> = vips
        .flat_map(|vip| [judge_subnet(vip, host, ports), judge_local(vip, host)])
        .collect();
    let nowhere = pinned.into_iter().flat_map(|pinned| &pinned.nowhere);
    findings.extend(nowhere.map(|vip| {
        Finding::error(
            Check::OwnAddress,
            vip,
            "it has ports, and no uplink carries it: it is not served",
            "ip -br addr: an uplink must be up and have an address in its subnet; the agent's log tells more",
        )
    }));
    findings
}

fn judge_subnet(vip: &Vip, host: &Host, ports: &[Port]) -> Finding {
    let check = Check::OwnAddress;
    let address = vip.address;
    let is_own = |port: &&Port| {
        let mut own = host.addresses.iter();
        own.any(|own| {
            own.index == port.device.index
                && own.address != address
                && in_subnet(address, own.address, own.prefix)
        })
    };
    if let Some(port) = ports.iter().find(is_own) {
        let found = format!("{} has an address in its subnet", port.device.name);
        return Finding::ok(check, address, found);
    }
    let named = ports.iter().find_map(|port| {
        let (_, length) = subnet_of(address, host, port)?;
        Some((port, length))
    });
    match named {
        Some((port, length)) => Finding::warning(
            check,
            address,
            format!(
                "{} has no address in its subnet: peers cannot be spoken with there",
                port.device.name
            ),
            format!("ip addr add ADDRESS/{length} dev {}", port.device.name),
        ),
        None => {
            let length = if address.is_ipv4() { 24 } else { 64 };
            Finding::error(
                check,
                address,
                "no uplink of this node has an address in its subnet: it is not served",
                format!("ip addr add ADDRESS/{length} dev UPLINK; ip -br addr shows what there is"),
            )
        }
    }
}

fn judge_local(vip: &Vip, host: &Host) -> Finding {
    let check = Check::VipLocal;
    let address: IpAddr = vip.address;
    let Some(owner) = dataplane::owner_of_vip(host, address) else {
        return Finding::ok(check, address, "no device of this node has it");
    };
    let name = &owner.name;
    if vip.announce == Announce::External {
        let found = format!("on {name}, as whoever announces it wants");
        return Finding::ok(check, address, found);
    }
    let prefix = host.addresses.iter().find(|own| own.address == address);
    let prefix = prefix.map_or(32, |own| own.prefix);
    Finding::error(
        check,
        address,
        format!(
            "it is an address of this node, on {name}: the kernel answers for it, and the agent refuses to serve it"
        ),
        format!(
            "ip addr del {address}/{prefix} dev {name}; or `announce: external`, if something else manages it"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::uplinks::tests::port;
    use super::*;
    use crate::interfaces::{Address, Interface};

    fn host(addresses: &[(u32, [u8; 4], u8)]) -> Host {
        let mut host = Host::default();
        for (index, name) in [(1, "lo"), (3, "eth1"), (9, "kube-ipvs0")] {
            let interface = Interface {
                index,
                name: name.to_owned(),
                loopback: index == 1,
                ..Interface::default()
            };
            host.interfaces.insert(index, interface);
        }
        host.addresses
            .extend(addresses.iter().map(|(index, address, prefix)| Address {
                index: *index,
                address: (*address).into(),
                prefix: *prefix,
            }));
        host
    }

    const VIP: Vip = Vip {
        address: IpAddr::V4(std::net::Ipv4Addr::new(172, 22, 0, 2)),
        announce: Announce::Always,
    };

    #[test]
    fn a_vip_on_a_device_is_an_error_unless_it_does_no_harm() {
        for (index, prefix, announce, status) in [
            (3, 24, Announce::Always, Status::Error),
            (1, 24, Announce::Always, Status::Error),
            (1, 32, Announce::Always, Status::Ok),
            (9, 32, Announce::Elect, Status::Ok),
            (3, 32, Announce::External, Status::Ok),
        ] {
            let vip = Vip { announce, ..VIP };
            let found = judge_local(&vip, &host(&[(index, [172, 22, 0, 2], prefix)]));
            assert_eq!(found.status, status, "{}", found.found);
        }
        let found = judge_local(&VIP, &host(&[(3, [172, 22, 0, 2], 24)]));
        let remedy = found.remedy.expect("a remedy");
        assert!(
            remedy.starts_with("ip addr del 172.22.0.2/24 dev eth1"),
            "{remedy}"
        );
    }

    #[test]
    fn a_vip_needs_an_address_beside_it() {
        let status = |addresses: &[(u32, [u8; 4], u8)]| {
            judge_subnet(&VIP, &host(addresses), &[port()]).status
        };
        assert_eq!(status(&[(3, [172, 22, 0, 11], 24)]), Status::Ok);
        assert_eq!(status(&[(3, [172, 22, 1, 11], 24)]), Status::Error);
        assert_eq!(status(&[(1, [172, 22, 0, 11], 24)]), Status::Error);
        assert_eq!(status(&[(3, [172, 22, 0, 2], 24)]), Status::Error, "itself");
    }
}
