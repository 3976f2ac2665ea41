//! What can go wrong between the agent and the kernel, with what to do about it.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use aya::maps::MapError;

use crate::interfaces::InterfaceError;

/// An error of the data plane.
#[derive(Debug, thiserror::Error)]
pub enum DataplaneError {
    /// The pin root is not on a bpffs.
    #[error(
        "{path} is not on a bpffs: run `mount -t bpf bpf /sys/fs/bpf`, or name a bpffs with --bpffs"
    )]
    NotBpffs {
        /// The path, or its nearest ancestor that exists.
        path: PathBuf,
    },
    /// Another agent has the lock.
    #[error(
        "an agent ({}) manages {path}: stop it first",
        pid.map_or_else(|| "its process id is not visible from here".to_owned(), |pid| format!("process {pid}"))
    )]
    Locked {
        /// The pin root.
        path: PathBuf,
        /// The owner's process id, where this process can see it.
        pid: Option<u32>,
    },
    /// The pin root belongs to another user, or is no directory.
    #[error(
        "{path} is not a directory of this user's but user {owner}'s, who could lock it or put pins there: \
         remove it, or name another root with --bpffs"
    )]
    RootOfOthers {
        /// The pin root.
        path: PathBuf,
        /// Its owner's user id.
        owner: u32,
    },
    /// Programs of another pin root are on the interface.
    #[error(
        "{interface} already runs `{program}` (program {id}) of another ironlb{}: two would handle every packet twice; \
         stop its agent and end it with `ironlb unload{}`, or use its root",
        root.as_ref().map_or_else(String::new, |root| format!(", pinned below {}", root.display())),
        root.as_ref().map_or_else(|| " --bpffs ROOT".to_owned(), |root| format!(" --bpffs {}", root.display()))
    )]
    OtherRoot {
        /// The interface.
        interface: String,
        /// The program.
        program: &'static str,
        /// Its id.
        id: u32,
        /// The other root, where it can be found.
        root: Option<PathBuf>,
    },
    /// Programs serve from maps that this version cannot read.
    #[error(
        "{path} holds state of map layout {version}, which this version (layout {}) cannot take over; its programs serve on: \
         start a version that can, or end them and their flows with `ironlb unload`",
        lb_common::LAYOUT_VERSION
    )]
    UnknownLayout {
        /// Where it is pinned.
        path: PathBuf,
        /// Its layout.
        version: u32,
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
    /// Somebody watches already: a ring has one reader.
    #[error(
        "another `ironlb monitor` ({}) watches {path}: end it first",
        pid.map_or_else(|| "its process id is not visible from here".to_owned(), |pid| format!("process {pid}"))
    )]
    Watched {
        /// The pin root.
        path: PathBuf,
        /// Its process id, where it is known.
        pid: Option<u32>,
    },
    /// What is pinned was made by a version with another map layout.
    #[error(
        "what is loaded at {path} has the map layout {}, this version reads v{}: use the `ironlb` that its agent is of, or \
         end it with `ironlb unload` and start this version's agent",
        others.iter().map(|other| format!("v{other}")).collect::<Vec<_>>().join(", "),
        lb_common::LAYOUT_VERSION
    )]
    OtherLayout {
        /// The pin root.
        path: PathBuf,
        /// The layouts that are there.
        others: Vec<u32>,
    },
    /// Some maps have lost their pins.
    #[error(
        "maps are missing at {path} ({missing}): an agent that runs pins them again within two seconds; else start one"
    )]
    Incomplete {
        /// The pin root.
        path: PathBuf,
        /// The maps.
        missing: String,
    },
    /// The kernel did not run a program on a packet.
    #[error("the kernel does not run `{program}` on a frame of {length} bytes: {reason}")]
    Run {
        /// The program.
        program: &'static str,
        /// Length of the frame.
        length: usize,
        /// Why.
        reason: String,
    },
    /// A map operation failed.
    #[error("cannot {action} the map `{map}`: {}", chain(source))]
    Map {
        /// What was tried, e.g. `write`.
        action: &'static str,
        /// Name of the map.
        map: &'static str,
        /// Why.
        source: MapError,
    },
    /// A pinned map is not what this version takes it for, although the layout's version is the same.
    #[error(
        "the pinned map {path} has the {field} {found}, this version wants {wanted}: it was made by another build; \
         end the flows in it with `ironlb unload`, then start again"
    )]
    Layout {
        /// The pin.
        path: PathBuf,
        /// What differs.
        field: &'static str,
        /// As it is.
        found: String,
        /// As it should be.
        wanted: String,
    },
    /// The built-in object is not as it should be.
    #[error("the eBPF object in this binary is broken, which is a fault of its build: {0}")]
    Object(String),
    /// The kernel did not take the object or a program of it.
    #[error("the kernel does not load `{what}`: {reason}")]
    Load {
        /// The program, or the object as a whole.
        what: &'static str,
        /// Why, with the verifier's words where it was the verifier.
        reason: String,
    },
    /// A program cannot be attached.
    #[error("cannot attach `{program}` to {interface}: {reason}")]
    Attach {
        /// The program.
        program: &'static str,
        /// The interface.
        interface: String,
        /// Why, and what to do.
        reason: String,
    },
    /// Somebody else's XDP program is on the interface and the mode is `native`.
    #[error(
        "{interface} already runs {foreign}, which ironlb never displaces: detach it with \
         `ip link set dev {interface} xdp off`, or let ironlb use `mode: tc`"
    )]
    ForeignXdp {
        /// The interface.
        interface: String,
        /// The program, by name and id.
        foreign: String,
    },
    /// There are more uplinks than slots.
    #[error(
        "no slot is left for {interface}: one agent manages at most {} interfaces",
        lb_common::MAX_UPLINKS
    )]
    TooManyUplinks {
        /// The interface.
        interface: String,
    },
    /// Something about the node's interfaces.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
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

impl DataplaneError {
    pub(crate) fn pins(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Pins {
            action,
            path: path.to_owned(),
            source,
        }
    }

    pub(super) fn map(action: &'static str, map: &'static str, source: MapError) -> Self {
        Self::Map {
            action,
            map,
            source,
        }
    }
}

/// An error with its causes: aya's own text often leaves the number of the system's error to the source.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
