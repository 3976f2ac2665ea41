//! What a source wants, as plain values: the same whether a file or Kubernetes said it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;

/// Everything that a source wants of this node.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct DesiredState {
    /// Interfaces to serve on.
    pub uplinks: Vec<UplinkSpec>,
    /// Virtual addresses.
    pub vips: Vec<VipSpec>,
    /// Services with their backends.
    pub services: Vec<ServiceSpec>,
    /// The other nodes that share the VIPs; without it this one is alone.
    pub peers: Option<PeersSpec>,
}

/// How nodes that share VIPs find and trust each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeersSpec {
    /// What heartbeats are signed with.
    pub key: KeySpec,
    /// Where agents may be found; this node's own addresses among them mean nothing.
    pub nodes: BTreeSet<IpAddr>,
    /// Time between two heartbeats; a peer lapses after three.
    pub interval: Duration,
    /// UDP port of heartbeats and probes, TCP port of exceptions.
    pub port: u16,
}

/// Where keys come from. The first one signs, all are accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySpec {
    /// A file with a key a line, read again as long as the agent runs.
    File(PathBuf),
    /// The lines of such a file; none until they are known.
    Text(String),
}

/// How an uplink is found on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UplinkSelector {
    /// The interface that has an address in this subnet: network address and prefix length.
    Subnet(IpAddr, u8),
    /// Interfaces whose name matches a shell-like pattern (`eth1`, `enp*f1`).
    Name(String),
    /// The interface with this MAC.
    Mac([u8; 6]),
}

/// How the forward path is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Mode {
    /// Native where the driver serves it rightly, else TC.
    #[default]
    Auto,
    /// XDP in the driver, or an error.
    Native,
    /// TC ingress.
    Tc,
}

/// What happens to direct connections between the uplink and pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Bypass {
    /// Drop, unless the uplink carries the node's internal address or a route to a backend.
    #[default]
    Auto,
    /// Attempts are dropped.
    Drop,
    /// They pass, and so do their replies.
    Allow,
}

/// One uplink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UplinkSpec {
    /// How it is found.
    pub selector: UplinkSelector,
    /// How the forward path is attached.
    pub mode: Mode,
    /// The one VLAN whose frames are meant, `None` for untagged ones.
    pub vlan: Option<u16>,
    /// Next hops for clients outside the subnets, at most one of each version.
    pub gateways: Vec<IpAddr>,
    /// Direct connections.
    pub bypass: Bypass,
    /// UDP source ports whose packets reach pods although direct connections are dropped.
    pub bypass_udp: Vec<u16>,
}

/// Who announces a VIP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announce {
    /// This node, for ever: a dead agent must not darken the VIP.
    Always,
    /// The node that its peers elect.
    Elect,
    /// Somebody else (keepalived, MetalLB).
    External,
}

/// What a refusal looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Refuse {
    /// TCP RST.
    #[default]
    Reject,
    /// Silence.
    Drop,
}

/// A protocol or port of a VIP that goes to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PassSpec {
    /// IP protocol number.
    pub protocol: u8,
    /// Destination port, 0 for all.
    pub port: u16,
}

/// One VIP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VipSpec {
    /// The address.
    pub address: IpAddr,
    /// Who announces it.
    pub announce: Announce,
    /// This node may announce it; else it only serves what others hand on to it.
    pub candidate: bool,
    /// What a refusal looks like.
    pub refuse: Refuse,
    /// What goes to the host.
    pub pass: Vec<PassSpec>,
}

/// A port of a service on its VIP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSpec {
    /// Name, unique in the service.
    pub name: String,
    /// Port on the VIP.
    pub port: u16,
    /// Port of the pods; the same as on the VIP unless said otherwise.
    pub target_port: u16,
}

/// A range of ports of which each belongs to one instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstancePorts {
    /// Name of the service port whose pods' port they lead to.
    pub port_name: String,
    /// That port of the pods, where they have none of their own by that name.
    pub target_port: u16,
    /// Port of slot 0.
    pub base: u16,
    /// Port of the last slot.
    pub last: u16,
    /// Ports of the range that belong to somebody else.
    pub except: BTreeSet<u16>,
}

/// Health check of a service's backends: a TCP connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthSpec {
    /// Pod port to connect to.
    pub tcp: u16,
    /// Time between checks.
    pub interval: Duration,
    /// So many failures in a row make a backend not ready; one success makes it ready.
    pub fail: u32,
}

/// A pod, and how it stands.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BackendSpec {
    /// Stable identity, e.g. `ironic-0`.
    pub instance: String,
    /// Instance slot: it answers on base + slot of every instance port range. Only incarnations of one
    /// instance share a slot.
    pub slot: Option<u32>,
    /// Address.
    pub address: IpAddr,
    /// The node that it is on, by name or address; none where that is this one.
    pub node: Option<String>,
    /// Incarnation (the pod's UID); empty where the source has none.
    pub uid: String,
    /// Takes new flows.
    pub ready: bool,
    /// Ends, and serves until then: takes new flows of a VIP port where nobody is ready.
    pub draining: bool,
    /// Its own ports by the names of the service's ports, and no others; without them it has the
    /// service's target ports.
    pub ports: Option<BTreeMap<String, u16>>,
}

/// One service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceSpec {
    /// Name, `namespace/name` in Kubernetes.
    pub name: String,
    /// Of what there is not enough for all, lower ones get theirs first: the older ones, in Kubernetes.
    pub precedence: u32,
    /// Its VIP.
    pub vip: IpAddr,
    /// Ports.
    pub ports: Vec<PortSpec>,
    /// Instance port ranges.
    pub instance_ports: Vec<InstancePorts>,
    /// All flows of a client to one backend.
    pub client_affinity: bool,
    /// Where clients may be, `None` for anywhere. Of the version of IP of which there is none, nobody is.
    pub source_ranges: Option<BTreeSet<IpNet>>,
    /// Health check, if any.
    pub health: Option<HealthSpec>,
    /// Pods.
    pub backends: Vec<BackendSpec>,
}

impl BackendSpec {
    /// Those of `all` that a VIP can lead to: of its version of IP.
    pub fn behind(vip: IpAddr, all: &[Self]) -> Vec<Self> {
        let of_version = all.iter().filter(|b| b.address.is_ipv4() == vip.is_ipv4());
        of_version.cloned().collect()
    }

    /// Its port behind a port of the service, by that one's name and target port, if it has one there.
    pub fn target(&self, port_name: &str, target_port: u16) -> Option<u16> {
        match &self.ports {
            None => Some(target_port),
            Some(ports) => ports.get(port_name).copied(),
        }
    }

    /// Where a health check of `port` connects to.
    pub fn socket(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.address, port)
    }
}
