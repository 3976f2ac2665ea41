//! The laboratory: a provisioning network of network namespaces with bare-metal hosts, a BMC,
//! control-plane nodes and Ironic pods that run a real web server. Tests, `cargo xtask demo` and
//! `cargo xtask bench` all build it here.
//!
//! ```text
//!  host0 .100   host1 .101   bmc .150            node0: eth1 172.22.0.11 ── XDP ── routing
//!     └────────────┴────────────┴──── switch ──────────┘                            ├ pod0 10.244.0.11
//!                  172.22.0.0/24, VIP 172.22.0.2                                    ├ pod1 10.244.0.12
//!                                                                                   └ pod2 10.244.0.13
//! ```

mod agent;
mod arp;
mod capture;
pub mod cluster;
mod command;
mod download;
pub mod engine;
mod fleet;
mod image;
mod keepalived;
mod laboratory;
mod load;
mod maps;
mod namespace;
mod prober;
mod process;
mod registry;
mod report;
mod web;
mod wire;

pub use agent::{Agent, ironlb};
pub use arp::{Answer, ArpWatch, Turn, turns};
pub use capture::Capture;
pub use command::{run, run_with_input, wait_until};
pub use download::{Download, End, Outcome, heads};
pub use fleet::Fleet;
pub use image::Image;
pub use keepalived::start_keepalived;
pub use laboratory::{Builder, Host, Laboratory, Node, NodeOptions, Pod, VIP, VIP6, backends};
pub use load::{Load, LoadReport, exchange};
pub use maps::{KernelObjects, Maps};
pub use namespace::Namespace;
pub use prober::{Attempt, Neighbour, Prober};
pub use process::Process;
pub use registry::{Kept, down, kept, sweep};
pub use report::Report;
pub use web::{API_PORT, IMAGE_PORT, RPC_PORT};
pub use wire::{Wire, arp_question};
