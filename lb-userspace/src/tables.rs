//! What the plan says the maps shall hold, in logical terms: the dataplane gives ids and slots to rows.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::desired::{Announce, PassSpec, Refuse};
pub use crate::peers::PeerLink;

/// The rows of all tables that the plan decides. Equal inputs give equal tables, whatever their order.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct TableSet {
    /// VIPs.
    pub vips: BTreeMap<IpAddr, VipRow>,
    /// VIP ports, by VIP and port.
    pub ports: BTreeMap<(IpAddr, u16), PortRow>,
    /// Other nodes, by name.
    pub peers: BTreeMap<String, PeerRow>,
    /// UDP port of heartbeats and probes, 0 where there are no peers.
    pub heartbeat_port: u16,
}

/// Another node.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PeerRow {
    /// Version of its agent.
    pub version: String,
    /// Its agent's heartbeats are heard.
    pub live: bool,
    /// Its program reflects probes: it takes new flows.
    pub reflecting: bool,
    /// Its exceptions are known here.
    pub synced: bool,
    /// How it is reached, by the slot of this node's uplink.
    pub links: BTreeMap<u32, PeerLink>,
}

/// A VIP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VipRow {
    /// Who announces it.
    pub announce: Announce,
    /// This node may announce it.
    pub candidate: bool,
    /// What a refusal looks like.
    pub refuse: Refuse,
    /// What goes to the host, sorted, at most [`lb_common::MAX_PASS`].
    pub pass: Vec<PassSpec>,
}

/// A VIP port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortRow {
    /// Service name.
    pub service: String,
    /// Port name.
    pub port_name: String,
    /// Instance slot of an instance port.
    pub slot: Option<u32>,
    /// Seed of the choice.
    pub seed: u64,
    /// All flows of a client to one backend.
    pub client_affinity: bool,
    /// Where clients of new flows may be, `None` for anywhere.
    pub source_ranges: Option<BTreeSet<IpNet>>,
    /// Pods in the [`natural`](crate::plan::natural) order of instances, at most [`lb_common::MAX_BACKENDS_PER_PORT`]; those that take no new flows included.
    pub backends: Vec<BackendRow>,
}

/// A pod port behind a VIP port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BackendRow {
    /// Stable identity.
    pub instance: String,
    /// Incarnation.
    pub uid: String,
    /// Pod address.
    pub address: IpAddr,
    /// Pod port.
    pub port: u16,
    /// The peer that it is on; none for this node.
    pub node: Option<String>,
    /// Takes new flows.
    pub eligible: bool,
}
