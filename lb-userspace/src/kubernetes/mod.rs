//! Kubernetes as the source: Services and their EndpointSlices in, [`DesiredState`] out, and what users
//! are to see of it back into the API.
//!
//! What is decided is decided in [`translate`], without I/O. Every agent watches and translates alike and
//! serves its own node's share of it; one of them, elected by a Lease, writes.
//!
//! [`DesiredState`]: crate::desired::DesiredState

mod directory;
mod endpoints;
mod events;
mod lease;
mod problem;
mod slots;
mod source;
mod status;
pub mod translate;
mod watch;
mod writer;

pub use problem::Problem;
pub use source::{Options, Source, SourceError};
pub use status::{LATENCY_BUCKETS_MS, Latency, Status};

/// The class of Services that are ours.
pub const CLASS: &str = "ironlb.dev/xdp";
/// On a Service: the VIPs that it wants, separated by commas.
pub const VIP: &str = "ironlb.dev/vip";
/// On a Service, by us: the VIPs that it was given. What no VIP is asked for keeps.
pub const ASSIGNED_VIPS: &str = "ironlb.dev/assigned-vips";
/// On a Service: groups `<port name>=<base>-<last>`, separated by commas.
pub const INSTANCE_PORTS: &str = "ironlb.dev/instance-ports";
/// On a Service, by us: JSON `{identity: slot}`.
pub const INSTANCE_SLOTS: &str = "ironlb.dev/instance-slots";
