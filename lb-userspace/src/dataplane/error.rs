//! What can go wrong between the agent and the kernel, with what to do about it.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

/// An error of the data plane.
#[derive(Debug, thiserror::Error)]
pub enum DataplaneError {
    /// The pin root is not on a bpffs.
    #[error("{path} is not on a bpffs: run `mount -t bpf bpf /sys/fs/bpf`, or name a bpffs with --bpffs")]
    NotBpffs {
        /// The path, or its nearest ancestor that exists.
        path: PathBuf,
    },
    /// Another agent has the lock.
    #[error(
        "another agent ({}) manages {path}: stop it first, or give this one a root of its own with --bpffs",
        pid.map_or_else(|| "its process id is not visible from here".to_owned(), |pid| format!("process {pid}"))
    )]
    Locked {
        /// The pin root.
        path: PathBuf,
        /// The owner's process id, where this process can see it.
        pid: Option<u32>,
    },
    /// A file operation below the pin root failed.
    #[error("cannot {action} {path}: {source}")]
    Pins {
        /// What was tried, e.g. `create`.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is nothing of ours below the pin root.
    #[error("nothing is loaded at {path}: start `ironlb agent`, or name its pin root with --bpffs")]
    NotLoaded {
        /// The pin root.
        path: PathBuf,
    },
    /// A VIP is an address of this node.
    #[error(
        "VIP {vip} is an address of this node (on {interface}): remove it with `ip addr del {vip} dev {interface}`, \
         or say `announce: external` if something else manages the address"
    )]
    VipIsLocal {
        /// The VIP.
        vip: IpAddr,
        /// The device that has it.
        interface: String,
    },
}
