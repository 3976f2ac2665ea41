//! The kernel's side of the agent: pinned maps, programs on interfaces, and the rows between them.
//!
//! Everything outlives the process: maps and links are pinned below [`Options::bpffs`], so that a
//! restart finds flows, ids and attachments as they were.

mod error;
pub mod read;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::desired::UplinkSpec;
use crate::tables::TableSet;

pub use error::DataplaneError;

/// Where pins are unless somebody says otherwise.
pub const DEFAULT_BPFFS: &str = "/sys/fs/bpf/ironlb";
/// A backend is gone once no source has had it for so long; its flows go on until then.
pub const GONE_AFTER: Duration = Duration::from_secs(2);

/// Where the maps are and how large they are made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Root of the pins, on a bpffs; made if it is missing.
    pub bpffs: PathBuf,
    /// Living flows. Fixed when the map is made: a pinned one keeps its size.
    pub living_flows: u32,
    /// Young flows. Fixed when the map is made.
    pub young_flows: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            bpffs: DEFAULT_BPFFS.into(),
            living_flows: lb_common::DEFAULT_LIVING_FLOWS,
            young_flows: lb_common::DEFAULT_YOUNG_FLOWS,
        }
    }
}

/// How the forward path of an interface is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AttachedMode {
    /// XDP in the driver.
    Native,
    /// TC ingress.
    Tc,
    /// No forward path: the interface only carries replies (it has a default route).
    Egress,
}

/// What is attached to one interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// Name.
    pub interface: String,
    /// Index.
    pub ifindex: u32,
    /// Mode.
    pub mode: AttachedMode,
    /// What a person should know: why not native, whose program is ahead of ours.
    pub note: Option<String>,
}

/// What [`Dataplane::attach`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttachReport {
    /// Interfaces that carry our programs.
    pub attachments: Vec<Attachment>,
    /// One sentence for every uplink that no interface of this node matches now; the next call tries again.
    pub idle: Vec<String>,
}

/// What [`Dataplane::apply`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Map writes and removals; 0 when the maps already held it all.
    pub writes: usize,
    /// VIPs that are not served because no attached interface is in their subnet.
    pub vips_without_uplink: Vec<IpAddr>,
    /// What did not fit into the maps, a sentence each.
    pub notes: Vec<String>,
    /// Backends that left and are kept for their flows until [`GONE_AFTER`] has passed.
    pub leaving: usize,
}

/// The loaded data plane of this node. One per [`Options::bpffs`], guarded by a lock that ends with the process.
///
/// Calls use the network namespace of the thread that makes them. Dropping it leaves everything running.
#[derive(Debug)]
pub struct Dataplane {
    options: Options,
}

impl Dataplane {
    /// Takes the lock, checks what is pinned and makes what is missing. Attaches nothing.
    pub fn open(options: &Options) -> Result<Self, DataplaneError> {
        let _ = options;
        todo!()
    }

    /// Brings interfaces in step with `uplinks`: attaches, adopts, detaches, follows MACs. Idempotent and
    /// cheap when nothing changed, so it is to be called every few seconds. `tables` decide `bypass: auto`.
    ///
    /// An uplink that cannot be attached makes this an error after all others have been served.
    pub fn attach(
        &mut self,
        uplinks: &[UplinkSpec],
        tables: &TableSet,
    ) -> Result<AttachReport, DataplaneError> {
        let _ = (uplinks, tables, &self.options);
        todo!()
    }

    /// Brings the maps in step with `tables`, by a diff in safe order. Call [`Self::attach`] before.
    pub fn apply(&mut self, tables: &TableSet) -> Result<Applied, DataplaneError> {
        let _ = tables;
        todo!()
    }

    /// Ends backends that left [`GONE_AFTER`] ago. To be called at least every other second after
    /// [`Self::apply`]; writes nothing when nothing is due.
    pub fn tick(&mut self) -> Result<Applied, DataplaneError> {
        todo!()
    }

    /// Detaches the programs and removes all pins.
    pub fn detach(self) -> Result<(), DataplaneError> {
        todo!()
    }
}

/// What [`unload`] removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct UnloadReport {
    /// Links detached, as `kind-ifindex` with the interface's name where it is known.
    pub links: Vec<String>,
    /// Maps unpinned.
    pub maps: Vec<String>,
}

/// Detaches every program and removes every pin of ours below `bpffs`, of whatever layout.
/// Nothing there is not an error; an agent that lives is: [`DataplaneError::Locked`].
pub fn unload(bpffs: &Path) -> Result<UnloadReport, DataplaneError> {
    let _ = bpffs;
    todo!()
}
