//! Views of the pinned maps for people and tools. Needs no agent: whatever a map holds is shown, and
//! what is half-written (a name without a row, a row without a name) is shown as far as it goes.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{AttachedMode, DataplaneError};

/// An attachment.
#[derive(Clone, Debug, Serialize)]
pub struct UplinkView {
    /// Slot in the `uplinks` map.
    pub slot: u32,
    /// Interface name when it was attached.
    pub interface: String,
    /// Interface index.
    pub ifindex: u32,
    /// How the forward path is attached.
    pub mode: AttachedMode,
    /// Destination MAC of frames meant for it.
    pub mac: String,
    /// The one VLAN that is meant.
    pub vlan: Option<u16>,
    /// Whether direct connection attempts to pods are dropped.
    pub bypass_drop: bool,
    /// UDP source ports that reach pods nevertheless.
    pub bypass_udp: Vec<u16>,
    /// Next hop for clients outside the subnet.
    pub gateway: Option<IpAddr>,
    /// VIPs of this uplink.
    pub vips: Vec<IpAddr>,
    /// Ids of the programs that its pinned links hold, by hook (`xdp`, `ingress`, `egress`).
    pub programs: Vec<LinkView>,
}

/// A pinned link.
#[derive(Clone, Debug, Serialize)]
pub struct LinkView {
    /// `xdp`, `ingress` or `egress`.
    pub hook: String,
    /// Link id.
    pub link: u32,
    /// Program id.
    pub program: u32,
}

/// A VIP.
#[derive(Clone, Debug, Serialize)]
pub struct VipView {
    /// The address.
    pub address: IpAddr,
    /// Interface of its uplink.
    pub interface: String,
    /// Somebody else announces it.
    pub external: bool,
    /// Whether ARP and ND questions are answered now.
    pub answering: bool,
    /// `reject` or `drop`.
    pub refuse: String,
    /// What goes to the host, as `tcp/22`, `icmp`.
    pub pass: Vec<String>,
}

/// Packets and bytes, over all CPUs, since the row got its owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TrafficView {
    /// Packets from clients.
    pub packets_in: u64,
    /// Bytes from clients (frames).
    pub bytes_in: u64,
    /// Packets to clients; a GSO packet counts once.
    pub packets_out: u64,
    /// Bytes to clients (frames).
    pub bytes_out: u64,
    /// New flows.
    pub flows: u64,
}

/// A VIP port with its backends.
#[derive(Clone, Debug, Serialize)]
pub struct PortView {
    /// Id.
    pub id: u16,
    /// VIP.
    pub vip: IpAddr,
    /// Port on the VIP.
    pub port: u16,
    /// Service, e.g. `metal3/ironic`.
    pub service: String,
    /// Port name, e.g. `images`.
    pub name: String,
    /// Instance slot of an instance port.
    pub slot: Option<u32>,
    /// All flows of a client to one backend.
    pub client_affinity: bool,
    /// Whether the data plane serves it; false for one that has left and whose flows are being ended.
    pub serving: bool,
    /// How many backends take new flows.
    pub eligible: usize,
    /// Its backends that exist, those that take no new flows included.
    pub backends: Vec<BackendView>,
    /// Counters.
    pub traffic: TrafficView,
}

/// A backend.
#[derive(Clone, Debug, Serialize)]
pub struct BackendView {
    /// Index in the `backends` map.
    pub index: u16,
    /// Generation of the index.
    pub generation: u16,
    /// Stable identity, e.g. `ironic-0`.
    pub instance: String,
    /// Incarnation; empty for files.
    pub uid: String,
    /// Pod address.
    pub address: IpAddr,
    /// Pod port.
    pub port: u16,
    /// VIP of its VIP port.
    pub vip: Option<IpAddr>,
    /// VIP port.
    pub vip_port: Option<u16>,
    /// Service.
    pub service: String,
    /// Port name.
    pub port_name: String,
    /// Takes new flows.
    pub eligible: bool,
    /// The address is this node's own (host network).
    pub host_network: bool,
    /// Counters.
    pub traffic: TrafficView,
}

/// Where a flow is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FlowState {
    /// The pod has answered: kept until it ends.
    Living,
    /// The pod has not answered yet.
    Young,
    /// Ended; guards against port collisions.
    Closing,
    /// Found no room among the living.
    Refused,
}

/// A flow.
#[derive(Clone, Debug, Serialize)]
pub struct FlowView {
    /// State.
    pub state: FlowState,
    /// Client.
    pub client: IpAddr,
    /// The client's port.
    pub client_port: u16,
    /// VIP.
    pub vip: IpAddr,
    /// VIP port.
    pub vip_port: u16,
    /// Service, where the VIP port is still known.
    pub service: String,
    /// Pod address.
    pub pod: IpAddr,
    /// Pod port.
    pub pod_port: u16,
    /// The backend's stable identity, where it is still known.
    pub instance: String,
    /// Whether the backend is gone: the flow's next packet is refused.
    pub gone: bool,
    /// The client's port towards the pod, where it is translated.
    pub translated_port: Option<u16>,
    /// Seconds since it began.
    pub age_seconds: f64,
    /// Seconds since its last packet in either direction.
    pub idle_seconds: f64,
    /// Bytes from the client (frames).
    pub bytes_in: u64,
    /// Bytes to the client (frames).
    pub bytes_out: u64,
    /// Interface on which the client's packets arrive.
    pub interface: String,
    /// MAC they come from.
    pub last_hop: String,
}

/// Which flows to show; what is `None` does not restrict.
#[derive(Clone, Debug, Default)]
pub struct FlowFilter {
    /// Of this client.
    pub client: Option<IpAddr>,
    /// To this VIP.
    pub vip: Option<IpAddr>,
    /// To this port of a VIP.
    pub vip_port: Option<u16>,
    /// Of this backend, by stable identity or pod address.
    pub backend: Option<String>,
    /// In this state.
    pub state: Option<FlowState>,
}

/// A verdict and how often it was given.
#[derive(Clone, Debug, Serialize)]
pub struct VerdictView {
    /// Name.
    pub verdict: &'static str,
    /// Packets, over all CPUs.
    pub packets: u64,
    /// One sentence.
    pub explanation: &'static str,
}

/// The state as a whole.
#[derive(Clone, Debug, Serialize)]
pub struct ControlView {
    /// Process id of the agent that wrote last.
    pub agent_pid: u32,
    /// Whether an agent holds the lock now.
    pub agent_running: bool,
    /// Version of that agent.
    pub agent_version: String,
    /// Seconds since that agent started.
    pub agent_started_seconds: Option<f64>,
    /// Seconds since the maps last came in step with the source.
    pub synced_seconds: Option<f64>,
    /// Refusals a second and CPU at most.
    pub refusals_per_second: u32,
    /// Whether the living table has no room.
    pub living_full: bool,
    /// Room of the living table.
    pub living_capacity: u32,
    /// Room of the young table.
    pub young_capacity: u32,
    /// Version of the map layout.
    pub layout_version: u32,
}

/// Reads the pinned maps.
#[derive(Debug)]
pub struct Reader {
    root: PathBuf,
}

impl Reader {
    /// Opens the maps below a pin root. [`DataplaneError::NotLoaded`] when there are none.
    pub fn open(bpffs: &Path) -> Result<Self, DataplaneError> {
        Ok(Self { root: bpffs.into() })
    }
    /// Attachments by slot.
    pub fn uplinks(&self) -> Result<Vec<UplinkView>, DataplaneError> {
        todo!("{:?}", self.root)
    }
    /// VIPs by address.
    pub fn vips(&self) -> Result<Vec<VipView>, DataplaneError> {
        todo!()
    }
    /// VIP ports by VIP and port, with their backends.
    pub fn ports(&self) -> Result<Vec<PortView>, DataplaneError> {
        todo!()
    }
    /// Backends that exist, by VIP port and identity.
    pub fn backends(&self) -> Result<Vec<BackendView>, DataplaneError> {
        todo!()
    }
    /// Flows that match, longest first among the living, then the young, then the ended.
    pub fn flows(&self, filter: &FlowFilter) -> Result<Vec<FlowView>, DataplaneError> {
        let _ = filter;
        todo!()
    }
    /// All verdicts in the order of their numbers, those that never happened included.
    pub fn verdicts(&self) -> Result<Vec<VerdictView>, DataplaneError> {
        todo!()
    }
    /// The state as a whole.
    pub fn control(&self) -> Result<ControlView, DataplaneError> {
        todo!()
    }
}
