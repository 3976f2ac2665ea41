//! Who may reach the agent's port: everybody but those who come by an uplink.
//!
//! Provisioned hosts belong to anybody. An uplink that carries the node's internal address is the
//! network that the cluster itself lives on, and stays open.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use crate::desired::UplinkSpec;
use crate::interfaces::{self, Host, InterfaceError};

/// How long what the kernel said about the interfaces is good for.
const FRESH: Duration = Duration::from_secs(1);

/// Decides about connections.
#[derive(Debug)]
pub(super) struct Guard {
    /// The node's internal addresses; where none is known, an uplink with a default route is taken for
    /// the one that carries them.
    node_addresses: Vec<IpAddr>,
    known: Option<(Instant, View)>,
}

/// What the guard needs of the node's interfaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct View {
    closed: BTreeSet<u32>,
    /// All addresses by interface.
    addresses: Vec<(IpAddr, u32)>,
}

impl Guard {
    pub(super) fn new(node_addresses: Vec<IpAddr>) -> Self {
        Self {
            node_addresses,
            known: None,
        }
    }

    /// Whether an address is this node's own, or loopback.
    pub(super) fn is_own(
        &mut self,
        uplinks: &[UplinkSpec],
        peer: IpAddr,
    ) -> Result<bool, InterfaceError> {
        let mut own = self.view(uplinks)?.addresses.iter();
        Ok(peer.is_loopback() || own.any(|(own, _)| *own == peer))
    }

    fn view(&mut self, uplinks: &[UplinkSpec]) -> Result<&View, InterfaceError> {
        let fresh = |(seen, _): &(Instant, View)| seen.elapsed() <= FRESH;
        let known = match self.known.take().filter(fresh) {
            Some(known) => known,
            None => {
                let view = View::new(&Host::read()?, uplinks, &self.node_addresses);
                (Instant::now(), view)
            }
        };
        Ok(&self.known.insert(known).1)
    }

    /// Whether a connection is taken: neither its address here nor its way back is that of an uplink
    /// without an internal address.
    pub(super) fn admits(
        &mut self,
        uplinks: &[UplinkSpec],
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Result<bool, InterfaceError> {
        let view = self.view(uplinks)?;
        let (local_ip, peer_ip) = (local.ip().to_canonical(), peer.ip().to_canonical());
        if view.closed.is_empty() || peer_ip.is_loopback() {
            return Ok(true);
        }
        // A link-local address says itself which interface it is of.
        let scope = |address: SocketAddr| match address {
            SocketAddr::V6(address) => Some(address.scope_id()).filter(|scope| *scope != 0),
            SocketAddr::V4(_) => None,
        };
        if let Some(interface) = scope(local).or_else(|| scope(peer)) {
            return Ok(!view.closed.contains(&interface));
        }
        if view.is_of_closed(local_ip) {
            return Ok(false);
        }
        // From the node itself the way back is loopback.
        let back = interfaces::route_to(peer_ip)?;
        Ok(back.is_none_or(|interface| !view.closed.contains(&interface)))
    }
}

impl View {
    fn new(host: &Host, uplinks: &[UplinkSpec], node_addresses: &[IpAddr]) -> Self {
        let places = uplinks
            .iter()
            // An uplink that cannot be resolved is told by the agent, and serves nobody.
            .filter_map(|uplink| host.resolve(&uplink.selector).ok())
            .flatten();
        let open = |device: &u32| match node_addresses {
            [] => host.default_routes.contains(device),
            known => host
                .addresses
                .iter()
                .any(|address| address.index == *device && known.contains(&address.address)),
        };
        let addresses = host.addresses.iter();
        Self {
            closed: places
                .map(|place| place.device)
                .filter(|device| !open(device))
                .collect(),
            addresses: addresses
                .map(|address| (address.address, address.index))
                .collect(),
        }
    }

    fn is_of_closed(&self, address: IpAddr) -> bool {
        let mut owners = self.addresses.iter().filter(|(own, _)| *own == address);
        owners.any(|(_, interface)| self.closed.contains(interface))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::desired::{Bypass, Mode, UplinkSelector};
    use crate::interfaces::{Address, Interface};

    /// eth0 (1) has the node's internal address and the default route, eth1 (2) the provisioning network's.
    fn host() -> Host {
        let interface = |index, name: &str| {
            let interface = Interface {
                index,
                name: name.to_owned(),
                ethernet: true,
                ..Interface::default()
            };
            (index, interface)
        };
        let address = |index, address: &str| Address {
            index,
            address: address.parse().expect("an address"),
            prefix: 24,
        };
        Host {
            interfaces: BTreeMap::from([interface(1, "eth0"), interface(2, "eth1")]),
            addresses: vec![address(1, "192.168.1.11"), address(2, "172.22.0.11")],
            default_routes: BTreeSet::from([1]),
        }
    }

    fn uplink(name: &str) -> UplinkSpec {
        UplinkSpec {
            selector: UplinkSelector::Name(name.to_owned()),
            mode: Mode::Auto,
            vlan: None,
            gateways: Vec::new(),
            bypass: Bypass::Auto,
            bypass_udp: Vec::new(),
        }
    }

    #[test]
    fn an_uplink_is_closed_unless_it_carries_the_internal_address() {
        let internal = ["192.168.1.11".parse().expect("an address")];
        let closed = |uplinks: &[&str], node: &[IpAddr]| {
            let uplinks: Vec<_> = uplinks.iter().map(|name| uplink(name)).collect();
            View::new(&host(), &uplinks, node).closed
        };
        assert_eq!(closed(&["eth1"], &internal), BTreeSet::from([2]));
        assert_eq!(closed(&["eth*"], &internal), BTreeSet::from([2]));
        assert_eq!(closed(&["eth0"], &internal), BTreeSet::new());
        assert_eq!(closed(&[], &internal), BTreeSet::new());
        // A node whose addresses nobody told: the default route decides.
        assert_eq!(closed(&["eth*"], &[]), BTreeSet::from([2]));
        let view = View::new(&host(), &[uplink("eth1")], &internal);
        assert!(view.is_of_closed("172.22.0.11".parse().expect("an address")));
        assert!(!view.is_of_closed(internal[0]));
    }
}
