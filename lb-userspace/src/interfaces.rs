//! The node's interfaces, addresses and routes as netlink tells of them, and which interfaces an
//! uplink means. Asks in the network namespace of the calling thread; nothing here reads `/sys`,
//! which may show another namespace's devices.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use ipnet::IpNet;
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage, LinkXdp,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteMetric, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tracing::debug;

use crate::desired::UplinkSelector;

/// An error about interfaces.
#[derive(Debug, thiserror::Error)]
pub enum InterfaceError {
    /// Netlink did not answer.
    #[error("cannot ask the kernel for {what} by netlink: {source}")]
    Netlink {
        /// What was asked for.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A slave of a bond (or team) was named.
    #[error(
        "{interface} is a slave of {bond}, which receives its packets: name {bond} as the uplink instead"
    )]
    BondSlave {
        /// The slave.
        interface: String,
        /// Its bond.
        bond: String,
    },
    /// Not an Ethernet device.
    #[error("{interface} has no Ethernet header: name a NIC, a bond, a VLAN device or a bridge")]
    NotEthernet {
        /// The interface.
        interface: String,
    },
    /// A pattern that cannot be read.
    #[error("`{pattern}` is not a pattern for interface names: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// Why not.
        reason: String,
    },
}

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Interface {
    /// Index.
    pub index: u32,
    /// Name.
    pub name: String,
    /// Kind of a virtual device (`veth`, `bridge`, `vlan`, …); none for hardware.
    pub kind: Option<String>,
    /// Link-layer address, if it is one of Ethernet.
    pub mac: Option<[u8; 6]>,
    /// MTU, bytes.
    pub mtu: u32,
    /// Receive queues.
    pub rx_queues: u32,
    /// The bridge, bond or VRF that it is enslaved to.
    pub master: Option<u32>,
    /// The other end of a veth, or the device below, where that is in this network namespace.
    pub link: Option<u32>,
    /// Packets have an Ethernet header.
    pub ethernet: bool,
    /// It is a loopback device.
    pub loopback: bool,
    /// It is up and has a carrier.
    pub running: bool,
    /// Ids of the XDP programs that are attached, in whatever mode.
    pub xdp: Vec<u32>,
}

impl Interface {
    /// Whether the device is of this kind.
    pub fn is(&self, kind: &str) -> bool {
        self.kind.as_deref() == Some(kind)
    }
}

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    /// Index of the interface.
    pub index: u32,
    /// The address.
    pub address: IpAddr,
    /// Length of its prefix, bits.
    pub prefix: u8,
}

/// Where to attach for an uplink, and whose identity its frames have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Index of the interface that programs are attached to.
    pub port: u32,
    /// Index of the interface that has the MAC and the addresses: the bridge of a port, else the same.
    pub device: u32,
}

/// What the kernel said about this network namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// Interfaces by index.
    pub interfaces: BTreeMap<u32, Interface>,
    /// Addresses.
    pub addresses: Vec<Address>,
    /// Interfaces that a default route leads through.
    pub default_routes: BTreeSet<u32>,
}

impl Host {
    /// All own addresses.
    pub fn own(&self) -> BTreeSet<IpAddr> {
        self.addresses.iter().map(|a| a.address).collect()
    }

    /// Asks the kernel.
    pub fn read() -> Result<Self, InterfaceError> {
        let mut netlink = Netlink::open()?;
        let mut host = Self::default();
        netlink.ask(
            "interfaces",
            RouteNetlinkMessage::GetLink(LinkMessage::default()),
            NLM_F_DUMP,
            |message| {
                if let RouteNetlinkMessage::NewLink(link) = message {
                    let interface = interface(&link);
                    host.interfaces.insert(interface.index, interface);
                }
            },
        )?;
        netlink.ask(
            "addresses",
            RouteNetlinkMessage::GetAddress(AddressMessage::default()),
            NLM_F_DUMP,
            |message| {
                if let RouteNetlinkMessage::NewAddress(message) = message {
                    host.addresses.extend(address(&message));
                }
            },
        )?;
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut question = RouteMessage::default();
            question.header.address_family = family;
            netlink.ask(
                "routes",
                RouteNetlinkMessage::GetRoute(question),
                NLM_F_DUMP,
                |message| {
                    if let RouteNetlinkMessage::NewRoute(route) = message {
                        host.default_routes.extend(default_route(&route));
                    }
                },
            )?;
        }
        Ok(host)
    }

    /// The other end of a veth, where it is in this network namespace.
    pub fn other_end(&self, interface: &Interface) -> Option<&Interface> {
        let index = interface.link.filter(|_| interface.is("veth"))?;
        self.interfaces.get(&index)
    }

    /// The interface that has this address, and the length of its prefix.
    pub fn owner(&self, address: IpAddr) -> Option<(&Interface, u8)> {
        let found = self.addresses.iter().find(|a| a.address == address)?;
        Some((self.interfaces.get(&found.index)?, found.prefix))
    }

    /// Subnets that an interface has an address in, in the order of its addresses; link-local ones are no subnets.
    pub fn subnets(&self, index: u32) -> impl Iterator<Item = (IpAddr, u8)> {
        let own = self.addresses.iter().filter(move |a| a.index == index);
        own.filter_map(|a| {
            let net = IpNet::new(a.address, a.prefix).ok()?;
            let is_local = match a.address {
                IpAddr::V4(v4) => v4.is_link_local(),
                IpAddr::V6(v6) => v6.is_unicast_link_local(),
            };
            (!is_local).then(|| (net.network(), a.prefix))
        })
    }

    /// Whether an address of the interface is in the same subnet as `address`.
    pub fn on_link(&self, index: u32, address: IpAddr) -> bool {
        self.addresses
            .iter()
            .any(|a| a.index == index && in_subnet(address, a.address, a.prefix))
    }

    /// The interfaces that an uplink means. Empty when there is none now.
    pub fn resolve(&self, selector: &UplinkSelector) -> Result<Vec<Place>, InterfaceError> {
        let mut places = BTreeSet::new();
        for interface in self.selected(selector)? {
            if !interface.ethernet {
                return Err(InterfaceError::NotEthernet {
                    interface: interface.name.clone(),
                });
            }
            let master = interface.master.and_then(|m| self.interfaces.get(&m));
            if let Some(bond) = master.filter(|m| m.is("bond") || m.is("team")) {
                return Err(InterfaceError::BondSlave {
                    interface: interface.name.clone(),
                    bond: bond.name.clone(),
                });
            }
            places.extend(self.places(interface));
        }
        Ok(places.into_iter().collect())
    }

    /// Where egress is attached because a default route leads there: replies may leave by it.
    pub fn default_route_places(&self) -> Vec<Place> {
        let devices = self.default_routes.iter();
        let interfaces = devices.filter_map(|index| self.interfaces.get(index));
        let with_header = interfaces.filter(|interface| interface.ethernet && !interface.loopback);
        with_header
            .flat_map(|interface| self.places(interface))
            .collect()
    }

    /// The ports of a bridge, the interface itself for everything else.
    fn places(&self, interface: &Interface) -> Vec<Place> {
        let index = interface.index;
        if !interface.is("bridge") {
            let master = interface.master.and_then(|m| self.interfaces.get(&m));
            let device = master
                .filter(|m| m.is("bridge"))
                .map_or(index, |bridge| bridge.index);
            return vec![Place {
                port: index,
                device,
            }];
        }
        let ports = || {
            let all = self.interfaces.values();
            all.filter(|port| port.master == Some(index) && port.ethernet)
        };
        // The host side of local pods and virtual machines is no uplink, unless there is nothing else.
        let is_local = |port: &&Interface| port.is("veth") || port.is("tun");
        let mut uplinks: Vec<_> = ports().filter(|port| !is_local(port)).collect();
        if uplinks.is_empty() {
            uplinks = ports().collect();
        }
        let place = |port: &Interface| Place {
            port: port.index,
            device: index,
        };
        uplinks.into_iter().map(place).collect()
    }

    fn selected(&self, selector: &UplinkSelector) -> Result<Vec<&Interface>, InterfaceError> {
        let all = self.interfaces.values().filter(|i| !i.loopback);
        Ok(match selector {
            UplinkSelector::Subnet(network, length) => {
                let inside = |interface: &&Interface| {
                    self.addresses.iter().any(|a| {
                        a.index == interface.index && in_subnet(a.address, *network, *length)
                    })
                };
                all.filter(inside).collect()
            }
            UplinkSelector::Name(pattern) => {
                let compiled =
                    glob::Pattern::new(pattern).map_err(|error| InterfaceError::Pattern {
                        pattern: pattern.clone(),
                        reason: error.msg.to_owned(),
                    })?;
                all.filter(|interface| compiled.matches(&interface.name))
                    .collect()
            }
            UplinkSelector::Mac(mac) => {
                let same: Vec<_> = all.filter(|i| i.mac == Some(*mac)).collect();
                // Bonds lend their MAC to their slaves, and VLAN devices have their parent's: the MAC
                // means the device that receives for all of them.
                let stands = |interface: &&&Interface| {
                    let has_master = same.iter().any(|m| interface.master == Some(m.index));
                    !has_master && !interface.is("vlan")
                };
                let standing: Vec<_> = same.iter().filter(stands).copied().collect();
                if standing.is_empty() { same } else { standing }
            }
        })
    }
}

/// Whether `address` is in the subnet that `network` (any address of it) and `length` name.
pub fn in_subnet(address: IpAddr, network: IpAddr, length: u8) -> bool {
    let differ = match (address, network) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (u32::from(a) ^ u32::from(b)).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (u128::from(a) ^ u128::from(b)).leading_zeros(),
        _ => return false,
    };
    differ >= u32::from(length)
}

/// The interface by which this node reaches `address`, or `None` where there is no route.
pub fn route_to(address: IpAddr) -> Result<Option<u32>, InterfaceError> {
    Ok(route(address)?.and_then(|route| route.device))
}

/// The interfaces by which this node reaches these addresses.
pub fn routes_to(
    addresses: impl IntoIterator<Item = IpAddr>,
) -> Result<BTreeSet<u32>, InterfaceError> {
    // One socket for all: there may be thousands of them.
    let mut netlink = Netlink::open()?;
    let mut devices = BTreeSet::new();
    for address in addresses {
        devices.extend(netlink.route(address)?.and_then(|route| route.device));
    }
    Ok(devices)
}

/// How this node reaches an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Route {
    /// Index of the interface that packets leave by.
    pub device: Option<u32>,
    /// MTU of the route itself, bytes, where it has one.
    pub mtu: Option<u32>,
}

/// The route to `address`, or `None` where there is none.
pub fn route(address: IpAddr) -> Result<Option<Route>, InterfaceError> {
    Netlink::open()?.route(address)
}

/// The next hop of a default route, IPv4 first; `None` where there is none that can be named alone.
pub fn default_gateway() -> Result<Option<IpAddr>, InterfaceError> {
    let mut gateways = BTreeSet::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut question = RouteMessage::default();
        question.header.address_family = family;
        let question = RouteNetlinkMessage::GetRoute(question);
        Netlink::open()?.ask("routes", question, NLM_F_DUMP, |message| {
            if let RouteNetlinkMessage::NewRoute(route) = message
                && !default_route(&route).is_empty()
            {
                gateways.extend(gateway(&route));
            }
        })?;
    }
    Ok(gateways.into_iter().next())
}

/// The next hop of a route; a link-local one would be of use with its interface only.
fn gateway(route: &RouteMessage) -> Option<IpAddr> {
    let hops = route.attributes.iter();
    let mut hops = hops.filter_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Gateway(RouteAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    });
    hops.find(|address| match address {
        IpAddr::V4(address) => !address.is_link_local(),
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    })
}

/// Ends an XDP attachment that was made by netlink, if it still is `program`'s.
pub fn clear_xdp(index: u32, program: BorrowedFd<'_>) -> Result<(), InterfaceError> {
    /// `XDP_FLAGS_DRV_MODE | XDP_FLAGS_REPLACE` of `linux/if_link.h`.
    const DRIVER_REPLACE: u32 = 1 << 2 | 1 << 4;
    let mut message = LinkMessage::default();
    message.header.index = index;
    let program = program.as_raw_fd().cast_unsigned();
    message.attributes.push(LinkAttribute::Xdp(vec![
        LinkXdp::Fd(-1),
        LinkXdp::Flags(DRIVER_REPLACE),
        LinkXdp::ExpectedFd(program),
    ]));
    let request = RouteNetlinkMessage::SetLink(message);
    Netlink::open()?.ask("the end of an XDP attachment", request, NLM_F_ACK, |_| ())
}

fn interface(link: &LinkMessage) -> Interface {
    let mut found = Interface {
        index: link.header.index,
        ethernet: link.header.link_layer_type == LinkLayerType::Ether,
        loopback: link.header.flags.contains(LinkFlags::Loopback),
        running: link
            .header
            .flags
            .contains(LinkFlags::Up | LinkFlags::LowerUp),
        ..Interface::default()
    };
    let mut elsewhere = false;
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => found.name.clone_from(name),
            LinkAttribute::Address(bytes) => found.mac = bytes.as_slice().try_into().ok(),
            LinkAttribute::Mtu(mtu) => found.mtu = *mtu,
            LinkAttribute::NumRxQueues(queues) => found.rx_queues = *queues,
            LinkAttribute::Controller(master) => found.master = Some(*master),
            LinkAttribute::Link(link) => found.link = Some(*link).filter(|index| *index != 0),
            LinkAttribute::LinkNetNsId(_) => elsewhere = true,
            LinkAttribute::LinkInfo(infos) => {
                found.kind = infos.iter().find_map(|info| match info {
                    LinkInfo::Kind(kind) => Some(kind_name(kind)),
                    _ => None,
                });
            }
            LinkAttribute::Xdp(xdp) => {
                let ids = xdp.iter().filter_map(|attribute| match attribute {
                    LinkXdp::ProgId(id)
                    | LinkXdp::DrvProgId(id)
                    | LinkXdp::SkbProgId(id)
                    | LinkXdp::HwProgId(id) => Some(*id).filter(|id| *id != 0),
                    _ => None,
                });
                found.xdp = ids.collect::<BTreeSet<_>>().into_iter().collect();
            }
            _ => {}
        }
    }
    if elsewhere {
        // An index of another namespace.
        found.link = None;
    }
    found
}

/// The kernel's word for a kind.
fn kind_name(kind: &InfoKind) -> String {
    kind.to_string()
}

fn address(message: &AddressMessage) -> Option<Address> {
    // A point-to-point address is the peer's in IFA_ADDRESS and ours in IFA_LOCAL; IPv6 has the former only.
    let attributes = message.attributes.iter();
    let (mut local, mut own) = (None, None);
    for attribute in attributes {
        match attribute {
            AddressAttribute::Local(address) => local = Some(*address),
            AddressAttribute::Address(address) => own = Some(*address),
            _ => {}
        }
    }
    Some(Address {
        index: message.header.index,
        address: local.or(own)?,
        prefix: message.header.prefix_len,
    })
}

fn default_route(route: &RouteMessage) -> Vec<u32> {
    let header = &route.header;
    let is_default = header.destination_prefix_length == 0
        && header.kind == RouteType::Unicast
        && header.table == RouteHeader::RT_TABLE_MAIN;
    if !is_default {
        return Vec::new();
    }
    let mut devices: Vec<_> = outgoing(route).into_iter().collect();
    for attribute in &route.attributes {
        if let RouteAttribute::MultiPath(hops) = attribute {
            devices.extend(hops.iter().map(|hop| hop.interface_index));
        }
    }
    devices
}

fn outgoing(route: &RouteMessage) -> Option<u32> {
    route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Oif(index) => Some(*index),
            _ => None,
        })
}

fn mtu(route: &RouteMessage) -> Option<u32> {
    let attributes = route.attributes.iter();
    let metrics = attributes.filter_map(|attribute| match attribute {
        RouteAttribute::Metrics(metrics) => Some(metrics),
        _ => None,
    });
    metrics.flatten().find_map(|metric| match metric {
        RouteMetric::Mtu(mtu) => Some(*mtu).filter(|mtu| *mtu != 0),
        _ => None,
    })
}

/// Tells that something about interfaces or addresses has changed.
#[derive(Debug)]
pub struct Changes {
    socket: AsyncFd<Socket>,
}

impl Changes {
    /// `RTMGRP_LINK`, `RTMGRP_IPV4_IFADDR` and `RTMGRP_IPV6_IFADDR` (`linux/rtnetlink.h`).
    const GROUPS: u32 = 0x1 | 0x10 | 0x100;

    /// Begins to listen, in the network namespace of the calling thread. To be called on a runtime.
    pub fn listen() -> Result<Self, InterfaceError> {
        let open = || -> io::Result<_> {
            let mut socket = Socket::new(NETLINK_ROUTE)?;
            socket.bind(&SocketAddr::new(0, Self::GROUPS))?;
            socket.set_non_blocking(true)?;
            // SAFETY: the descriptor stays open as long as its owner, which goes into the same value.
            Ok(unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }?)
        };
        let socket = open().map_err(|source| InterfaceError::Netlink {
            what: "changes of interfaces",
            source,
        })?;
        Ok(Self { socket })
    }

    /// Waits for a change. Safe to cancel. What has changed is not told: messages may be lost.
    pub async fn changed(&mut self) {
        // A readable socket without an error cannot fail to be waited for.
        let Ok(mut ready) = self.socket.readable().await else {
            return std::future::pending().await;
        };
        let mut buffer = Vec::with_capacity(1 << 16);
        loop {
            buffer.clear();
            match self.socket.get_ref().recv(&mut buffer, 0) {
                Ok(_) => {}
                // An overrun (ENOBUFS) is news, too.
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
        }
        ready.clear_ready();
    }
}

/// A route netlink socket. Synchronous: every question here is answered by the kernel at once.
struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    fn open() -> Result<Self, InterfaceError> {
        let open = || -> io::Result<_> {
            let mut socket = Socket::new(NETLINK_ROUTE)?;
            socket.bind_auto()?;
            socket.connect(&SocketAddr::new(0, 0))?;
            Ok(Self {
                socket,
                sequence: 0,
            })
        };
        open().map_err(|source| InterfaceError::Netlink {
            what: "a socket",
            source,
        })
    }

    /// See [`route`].
    fn route(&mut self, address: IpAddr) -> Result<Option<Route>, InterfaceError> {
        let mut question = RouteMessage::default();
        (
            question.header.address_family,
            question.header.destination_prefix_length,
        ) = match address {
            IpAddr::V4(_) => (AddressFamily::Inet, 32),
            IpAddr::V6(_) => (AddressFamily::Inet6, 128),
        };
        let destination = RouteAddress::from(address);
        question
            .attributes
            .push(RouteAttribute::Destination(destination));
        let mut found = None;
        let asked = self.ask(
            "a route",
            RouteNetlinkMessage::GetRoute(question),
            NLM_F_ACK,
            |message| {
                if let RouteNetlinkMessage::NewRoute(route) = message {
                    found = Some(Route {
                        device: outgoing(&route),
                        mtu: mtu(&route),
                    });
                }
            },
        );
        match asked {
            Ok(()) => Ok(found),
            // No route at all, unreachable, prohibited, black hole.
            Err(InterfaceError::Netlink { source, .. })
                if matches!(
                    source.kind(),
                    io::ErrorKind::NetworkUnreachable
                        | io::ErrorKind::HostUnreachable
                        | io::ErrorKind::PermissionDenied
                        | io::ErrorKind::InvalidInput
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Sends one question and hands every answer to `take`.
    fn ask(
        &mut self,
        what: &'static str,
        question: RouteNetlinkMessage,
        flags: u16,
        mut take: impl FnMut(RouteNetlinkMessage),
    ) -> Result<(), InterfaceError> {
        self.exchange(question, flags, &mut take)
            .map_err(|source| InterfaceError::Netlink { what, source })
    }

    fn exchange(
        &mut self,
        question: RouteNetlinkMessage,
        flags: u16,
        take: &mut dyn FnMut(RouteNetlinkMessage),
    ) -> io::Result<()> {
        self.sequence += 1;
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(question));
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let invalid = |error: &dyn std::fmt::Display| io::Error::other(error.to_string());
                let length = NetlinkBuffer::new_checked(&rest)
                    .map_err(|error| invalid(&error))?
                    .length() as usize;
                let (message, tail) = rest.split_at(length.min(rest.len()));
                rest = tail
                    .get(length.next_multiple_of(4) - length..)
                    .unwrap_or(&[]);
                let message = match NetlinkMessage::<RouteNetlinkMessage>::deserialize(message) {
                    Ok(message) => message,
                    Err(error) => {
                        // One device with an attribute of tomorrow must not blind us to all others.
                        debug!(%error, "a netlink message cannot be read");
                        continue;
                    }
                };
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                match message.payload {
                    NetlinkPayload::Done(_) => return Ok(()),
                    NetlinkPayload::Error(error) => {
                        // Code 0 is the acknowledgement that NLM_F_ACK asked for.
                        return match error.code {
                            None => Ok(()),
                            Some(_) => Err(error.to_io()),
                        };
                    }
                    NetlinkPayload::InnerMessage(answer) => take(answer),
                    _ => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node: `bond0` (slaves `eth0`, `eth1`) with `bond0.7` above, `br0` with a NIC, a pod and a machine.
    fn host() -> Host {
        let mut host = Host::default();
        let mut add = |index, name: &str, kind: &str, master, mac| {
            let interface = Interface {
                index,
                name: name.to_owned(),
                kind: (!kind.is_empty()).then(|| kind.to_owned()),
                mac: Some([2, 0, 0, 0, 0, mac]),
                master,
                ethernet: kind != "tun-l3",
                loopback: name == "lo",
                ..Interface::default()
            };
            host.interfaces.insert(index, interface);
        };
        add(1, "lo", "", None, 0);
        add(2, "eth0", "", Some(4), 4);
        add(3, "eth1", "", Some(4), 4);
        add(4, "bond0", "bond", None, 4);
        add(5, "bond0.7", "vlan", None, 4);
        add(6, "br0", "bridge", None, 6);
        add(7, "eth2", "", Some(6), 6);
        add(8, "veth1a", "veth", Some(6), 8);
        add(9, "tap0", "tun", Some(6), 9);
        add(10, "br1", "bridge", None, 10);
        add(11, "veth2b", "veth", Some(10), 11);
        add(12, "wg0", "tun-l3", None, 12);
        for (index, address, prefix) in [
            (5, [172, 22, 0, 11], 24),
            (6, [172, 23, 0, 11], 24),
            (10, [172, 24, 0, 11], 24),
        ] {
            host.addresses.push(Address {
                index,
                address: address.into(),
                prefix,
            });
        }
        host.default_routes = [6, 12].into();
        host
    }

    fn ports(selector: &UplinkSelector) -> Vec<(u32, u32)> {
        let places = host().resolve(selector).expect("resolves");
        places.iter().map(|p| (p.port, p.device)).collect()
    }

    fn name(pattern: &str) -> UplinkSelector {
        UplinkSelector::Name(pattern.to_owned())
    }

    fn subnet(octets: [u8; 4]) -> UplinkSelector {
        UplinkSelector::Subnet(octets.into(), 24)
    }

    #[test]
    fn a_subnet_finds_the_interface_with_an_address_in_it() {
        assert_eq!(ports(&subnet([172, 22, 0, 0])), [(5, 5)]);
        assert_eq!(ports(&subnet([172, 99, 0, 0])), []);
    }

    #[test]
    fn a_bridge_means_its_ports_that_are_not_local_pods_or_machines() {
        assert_eq!(ports(&subnet([172, 23, 0, 0])), [(7, 6)]);
        assert_eq!(ports(&name("br0")), [(7, 6)]);
        assert_eq!(
            ports(&name("veth1a")),
            [(8, 6)],
            "a port by name is that port"
        );
        assert_eq!(ports(&name("br1")), [(11, 10)], "nothing else is there");
    }

    #[test]
    fn a_slave_of_a_bond_is_refused_by_the_name_of_the_bond() {
        let error = host().resolve(&name("eth[01]")).expect_err("slaves");
        assert!(error.to_string().contains("name bond0"), "{error}");
        assert_eq!(ports(&name("bond0")), [(4, 4)]);
    }

    #[test]
    fn a_mac_means_the_device_that_receives_for_all_that_share_it() {
        assert_eq!(ports(&UplinkSelector::Mac([2, 0, 0, 0, 0, 4])), [(4, 4)]);
        assert_eq!(ports(&UplinkSelector::Mac([2, 0, 0, 0, 0, 6])), [(7, 6)]);
        assert_eq!(ports(&UplinkSelector::Mac([2, 0, 0, 0, 0, 99])), []);
    }

    #[test]
    fn what_has_no_ethernet_header_is_refused_as_uplink_and_skipped_for_replies() {
        assert!(matches!(
            host().resolve(&name("wg0")),
            Err(InterfaceError::NotEthernet { .. })
        ));
        let places = host().default_route_places();
        assert_eq!(places, [Place { port: 7, device: 6 }]);
    }

    #[test]
    fn subnets_are_told_apart_by_family_and_bits() {
        let v4 = |octets: [u8; 4]| IpAddr::from(octets);
        assert!(in_subnet(v4([172, 22, 0, 2]), v4([172, 22, 0, 0]), 24));
        assert!(!in_subnet(v4([172, 22, 1, 2]), v4([172, 22, 0, 0]), 24));
        assert!(in_subnet(v4([9, 9, 9, 9]), v4([0, 0, 0, 0]), 0));
        let v6 = "fd00::1".parse().expect("valid");
        assert!(!in_subnet(v6, v4([0, 0, 0, 0]), 0));
        assert!(in_subnet(v6, "fd00::".parse().expect("valid"), 64));
    }

    #[test]
    fn the_loopback_device_and_its_route_are_known_to_the_kernel() {
        let host = Host::read().expect("netlink answers");
        let lo = host.interfaces.values().find(|i| i.loopback).expect("lo");
        assert_eq!(lo.name, "lo");
        let route = route_to(IpAddr::from([127, 0, 0, 1])).expect("netlink answers");
        assert_eq!((lo.link, lo.master), (None, None));
        assert!(route.is_none_or(|index| index == lo.index), "{route:?}");
    }
}
