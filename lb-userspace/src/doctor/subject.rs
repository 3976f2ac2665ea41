//! What this node is to serve, as far as the checks need it: from a configuration file, or from the pinned maps.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;

use super::Options;
use super::pins::Pinned;
use crate::config::{self, ConfigError};
use crate::dataplane::AttachedMode;
use crate::desired::{Announce, Bypass, Mode, UplinkSelector};
use crate::interfaces::Host;
use crate::plan::{self, Health, Nodes};

/// What is served, or shall be.
#[derive(Clone, Debug, Default)]
pub(super) struct Subject {
    pub(super) uplinks: Vec<Uplink>,
    pub(super) vips: Vec<Vip>,
    /// Port numbers on VIPs.
    pub(super) ports: BTreeSet<u16>,
    pub(super) backends: Vec<Backend>,
    /// Where other nodes may be found; own addresses may be among them.
    pub(super) peers: BTreeSet<IpAddr>,
}

/// An uplink.
#[derive(Clone, Debug)]
pub(super) struct Uplink {
    pub(super) selector: UplinkSelector,
    /// As wanted; as it is where the maps alone tell.
    pub(super) mode: Mode,
    pub(super) vlan: Option<u16>,
    pub(super) gateways: Vec<IpAddr>,
    /// Whether direct connection attempts are dropped; `None` where that is decided when it is attached.
    pub(super) guards: Option<bool>,
}

/// A VIP.
#[derive(Clone, Copy, Debug)]
pub(super) struct Vip {
    pub(super) address: IpAddr,
    pub(super) announce: Announce,
}

/// A backend.
#[derive(Clone, Debug)]
pub(super) struct Backend {
    pub(super) instance: String,
    pub(super) address: IpAddr,
    pub(super) port: u16,
    /// It is on this node.
    pub(super) is_here: bool,
}

impl Subject {
    /// What a file says. Services come from the maps where they come from Kubernetes.
    pub(super) fn from_file(
        file: &Path,
        options: &Options,
        host: &Host,
        pinned: Option<&Pinned>,
    ) -> Result<Self, ConfigError> {
        let kubernetes = options.kubernetes;
        let state = match kubernetes {
            false => config::load(file)?,
            true => config::load_cluster(file)?.state,
        };
        let nodes = Nodes {
            addresses: host.own(),
            ..Nodes::all_of(&state, &options.node)
        };
        let (tables, _) = plan::plan(&state, &Health::default(), &nodes);
        let from_maps = pinned.map(Self::from_maps).unwrap_or_default();
        let uplinks = state.uplinks.iter().map(|uplink| Uplink {
            selector: uplink.selector.clone(),
            mode: uplink.mode,
            vlan: uplink.vlan,
            gateways: uplink.gateways.clone(),
            guards: match uplink.bypass {
                Bypass::Drop => Some(true),
                Bypass::Allow => Some(false),
                Bypass::Auto => None,
            },
        });
        let vips = state.vips.iter().map(|vip| Vip {
            address: vip.address,
            announce: vip.announce,
        });
        let rows = tables.ports.values().flat_map(|port| &port.backends);
        let backends = rows.map(|row| Backend {
            instance: row.instance.clone(),
            address: row.address,
            port: row.port,
            is_here: row.node.is_none(),
        });
        let (ports, backends) = match kubernetes {
            false => (
                tables.ports.keys().map(|(_, port)| *port).collect(),
                backends.collect(),
            ),
            true => (from_maps.ports, from_maps.backends),
        };
        Ok(Self {
            uplinks: uplinks.collect(),
            vips: vips.collect(),
            ports,
            backends,
            peers: state.peers.map(|peers| peers.nodes).unwrap_or_default(),
        })
    }

    /// What the maps say: works without a file, and with the agent dead.
    pub(super) fn from_maps(pinned: &Pinned) -> Self {
        let forward = pinned
            .uplinks
            .iter()
            .filter(|uplink| uplink.mode != AttachedMode::Egress);
        let uplinks = forward.map(|uplink| Uplink {
            selector: UplinkSelector::Name(glob::Pattern::escape(&uplink.interface)),
            mode: match uplink.mode {
                AttachedMode::Native => Mode::Native,
                AttachedMode::Tc | AttachedMode::Egress => Mode::Tc,
            },
            vlan: uplink.vlan,
            gateways: uplink.gateways.clone(),
            guards: Some(uplink.bypass_drop),
        });
        let vips = pinned.vips.iter().map(|vip| Vip {
            address: vip.address,
            announce: match (vip.external, &vip.announcer) {
                (true, _) => Announce::External,
                (false, Some(_)) => Announce::Elect,
                (false, None) => Announce::Always,
            },
        });
        let backends = pinned.ports.iter().flat_map(|port| &port.backends);
        let backends = backends.map(|backend| Backend {
            instance: backend.instance.clone(),
            address: backend.address,
            port: backend.port,
            is_here: backend.node.is_none(),
        });
        let links = pinned.peers.iter().flat_map(|peer| &peer.links);
        Self {
            uplinks: uplinks.collect(),
            vips: vips.collect(),
            ports: pinned.ports.iter().map(|port| port.port).collect(),
            backends: backends.collect(),
            peers: links.flat_map(|link| link.addresses.clone()).collect(),
        }
    }

    /// Addresses of the backends on this node.
    pub(super) fn local_backends(&self) -> BTreeSet<IpAddr> {
        let here = self.backends.iter().filter(|backend| backend.is_here);
        here.map(|backend| backend.address).collect()
    }
}
