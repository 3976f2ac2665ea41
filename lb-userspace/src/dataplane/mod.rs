//! The kernel's side of the agent: pinned maps, programs on interfaces, and the rows between them.
//!
//! Everything outlives the process: maps and links are pinned below [`Options::bpffs`], so that a
//! restart finds flows, ids and attachments as they were.

mod attach;
mod batch;
mod endings;
mod error;
mod former;
mod maps;
mod pins;
pub mod read;
mod rows;
pub mod shadow;
pub mod told;
pub mod trace;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aya::maps::{Map, MapData, MapError};
use aya::programs::TcAttachType;
use aya::util::KernelVersion;
use lb_common::{
    Addr, BACKEND_ALIVE, Control, MAX_BYPASS_UDP, MODE_NATIVE, MODE_NONE, MODE_TC,
    UPLINK_BYPASS_DROP, UPLINK_FORWARD, UPLINK_TRANSMIT_BY_REDIRECT, Uplink, program, to_name,
    version,
};
use rustix::time::{ClockId, clock_getres, clock_gettime};
use tracing::{info, warn};

use crate::desired::{Announce, Bypass, UplinkSelector, UplinkSpec};
use crate::ended::Teller;
use crate::interfaces::{self, Host, Interface, Place};
use crate::peers::Link;
use crate::tables::{PeerRow, TableSet};
use attach::{Attacher, Loader, Target};
use endings::Which;
use former::Former;
use maps::Maps;
use pins::Pins;
use rows::{Input, Leaving, NO_UPLINK, Rows, Write};

pub(crate) use attach::{FRAGS_SINCE, TCX_SINCE, program_name, programs_at_tc, unfinished_sums};
pub use error::DataplaneError;
pub(crate) use pins::{check_bpffs, layouts, missing, owner};

/// Where pins are unless somebody says otherwise.
pub const DEFAULT_BPFFS: &str = "/sys/fs/bpf/ironlb";
/// A backend is gone once no source has had it for so long; its flows go on until then.
pub const GONE_AFTER: Duration = Duration::from_secs(2);

/// RSTs a second and CPU at most.
const REFUSALS_PER_SECOND: u32 = 1000;

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

/// Where a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Hook {
    /// XDP in the driver.
    Xdp,
    /// TC ingress.
    Ingress,
    /// TC egress.
    Egress,
}

impl Hook {
    /// As a pin's name has it.
    fn name(self) -> &'static str {
        match self {
            Self::Xdp => "xdp",
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        [Self::Xdp, Self::Ingress, Self::Egress]
            .into_iter()
            .find(|hook| hook.name() == name)
    }

    /// Program and direction of a TC hook; XDP has no direction and counts as ingress.
    fn tc(self) -> (&'static str, TcAttachType) {
        match self {
            Self::Xdp => (program::XDP, TcAttachType::Ingress),
            Self::Ingress => (program::INGRESS, TcAttachType::Ingress),
            Self::Egress => (program::EGRESS, TcAttachType::Egress),
        }
    }
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
    /// Uplinks as peers are spoken with on them.
    pub links: Vec<Link>,
    /// Addresses of this node.
    pub addresses: BTreeSet<IpAddr>,
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
    pins: Pins,
    /// Kernel ticks a second.
    ticks: u32,
    /// Nothing was pinned before, of any layout.
    is_first: bool,
    held: Held,
    /// What serves until the first [`Self::attach`].
    former: Option<Former>,
    attacher: Attacher,
    served: Vec<Served>,
    /// The last [`Self::attach`] could not say where everything is: VIPs stay where they are.
    incomplete: bool,
    leaving: Leaving,
    /// What [`Self::apply`] was last given.
    tables: Option<Arc<TableSet>>,
    /// Who records the flows that are ended with their backends.
    recorder: Option<Teller>,
}

/// The maps with a copy of what they hold.
struct Held {
    maps: Maps,
    rows: Rows,
    /// All of them, flows too, so that they outlive their pins as long as this process lives.
    all: Vec<(&'static str, MapData)>,
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A mebibyte of rows tells nobody anything.
        f.debug_struct("Held").finish_non_exhaustive()
    }
}

impl Held {
    /// Checks what is pinned, makes what is missing, and says in `control` whose it is now.
    fn open(
        pins: &Pins,
        options: &Options,
        ticks: u32,
        former: Option<&Former>,
    ) -> Result<Self, DataplaneError> {
        maps::check(&pins.dir(), options)?;
        Loader::new(pins, options, &ticks).load(0)?;
        if let Some(former) = former {
            former.copy_rows(&pins.dir())?;
        }
        let maps = Maps::open(&pins.dir())?;
        let rows = maps.rows()?;
        let all = maps::all(&pins.dir())?;
        let mut held = Self { maps, rows, all };
        let control = Control {
            refusals_per_second: REFUSALS_PER_SECOND,
            agent_pid: std::process::id(),
            agent_started: nanoseconds(boot_time()),
            agent_version: to_name(env!("CARGO_PKG_VERSION")),
            ..held.rows.control
        };
        held.write(&Write::Control(Box::new(control)))?;
        Ok(held)
    }

    /// Pins what is not.
    fn pin_again(&self, dir: &Path) -> Result<(), DataplaneError> {
        for (name, map) in &self.all {
            let path = dir.join(name);
            if !path.exists() {
                map.pin(&path).map_err(|error| {
                    DataplaneError::pins("pin", &path, io::Error::other(error::chain(&error)))
                })?;
            }
        }
        Ok(())
    }

    fn write(&mut self, write: &Write) -> Result<(), DataplaneError> {
        let (_, done) = self.maps.execute(std::slice::from_ref(write));
        done?;
        self.rows.record(write);
        Ok(())
    }

    /// In their order; `rows` is what they lead to. What is written before an error is recorded.
    fn write_all(&mut self, writes: &[Write], rows: Rows) -> Result<(), DataplaneError> {
        let mut written = 0;
        while written < writes.len() {
            let (count, done) = self.maps.execute(&writes[written..]);
            written += count;
            if let Err(error) = done {
                let done = writes[..written].iter();
                done.for_each(|write| self.rows.record(write));
                return Err(error);
            }
        }
        self.rows = rows;
        Ok(())
    }

    fn write_uplink(&mut self, slot: u32, row: Uplink) -> Result<(), DataplaneError> {
        if self.rows.uplinks[slot as usize] == row {
            return Ok(());
        }
        self.write(&Write::Uplink(slot, Box::new(row)))
    }

    fn write_mode(&mut self, slot: u32, mode: AttachedMode) -> Result<(), DataplaneError> {
        let mut row = self.rows.uplinks[slot as usize];
        row.mode = match mode {
            AttachedMode::Native => MODE_NATIVE,
            AttachedMode::Tc => MODE_TC,
            AttachedMode::Egress => MODE_NONE,
        };
        self.write_uplink(slot, row)
    }
}

/// An uplink as far as the placement of VIPs needs it.
#[derive(Debug)]
struct Served {
    slot: u32,
    /// Has the addresses.
    device: u32,
    subnet: Option<(IpAddr, u8)>,
}

/// An interface and the uplink that it serves, if it is more than a way out for replies.
struct Wanted<'a> {
    place: Place,
    port: &'a Interface,
    spec: Option<&'a UplinkSpec>,
}

impl Dataplane {
    /// Takes the lock, checks what is pinned and makes what is missing. Attaches nothing. Where nothing was pinned and
    /// this fails, nothing is.
    pub fn open(options: &Options) -> Result<Self, DataplaneError> {
        raise_memlock();
        let root = &options.bpffs;
        let is_first = layouts(root)?.is_empty();
        let pins = Pins::open(root)?;
        let ticks = ticks_per_second();
        let open = || {
            let former = Former::find(root)?;
            let held = Held::open(&pins, options, ticks, former.as_ref())?;
            Ok((held, former))
        };
        let (held, former) = match open() {
            Ok(open) => open,
            Err(error) => {
                if is_first && let Err(error) = pins::remove_all(root, Some(pins)) {
                    warn!("what was begun stays pinned, and `ironlb unload` removes it: {error}");
                }
                return Err(error);
            }
        };
        Ok(Self {
            is_first,
            held,
            former,
            options: options.clone(),
            pins,
            ticks,
            attacher: Attacher::default(),
            served: Vec::new(),
            incomplete: true,
            leaving: Leaving::new(),
            tables: None,
            recorder: None,
        })
    }

    /// From now on, tells of the flows that are ended with their backends.
    pub fn tell_of_endings(&mut self, recorder: Teller) {
        self.recorder = Some(recorder);
    }

    /// Whether all is pinned that goes on serving when this process ends.
    pub fn is_pinned(&self) -> bool {
        self.pins.are_whole() && self.attacher.is_pinned(&self.pins)
    }

    /// Pins again what somebody removed from the bpffs: maps and links live on as long as this process holds them.
    fn mend(&mut self) -> Result<(), DataplaneError> {
        if self.is_pinned() {
            return Ok(());
        }
        self.pins.renew()?;
        self.held.pin_again(&self.pins.dir())?;
        self.attacher.pin_again(&self.pins)?;
        warn!(
            root = %self.options.bpffs.display(),
            "somebody removed pins of ironlb; they are there again, and nothing was lost"
        );
        Ok(())
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
        let host = Host::read()?;
        check_vips(&host, tables)?;
        self.mend()?;
        let mut report = AttachReport {
            addresses: host.own(),
            ..AttachReport::default()
        };
        let mut failed = None;
        let mut wanted: BTreeMap<u32, Wanted<'_>> = BTreeMap::new();
        let mut want = |place: Place, spec| {
            if let Some(port) = host.interfaces.get(&place.port) {
                let new = Wanted { place, port, spec };
                wanted.entry(place.port).or_insert(new);
            }
        };
        for spec in uplinks {
            match host.resolve(&spec.selector) {
                Ok(places) if places.is_empty() => report.idle.push(idle(&spec.selector)),
                Ok(places) => places.into_iter().for_each(|place| want(place, Some(spec))),
                Err(error) => drop(failed.get_or_insert(error.into())),
            }
        }
        for place in host.default_route_places() {
            want(place, None);
        }
        let routed = match uplinks.iter().any(|spec| spec.bypass == Bypass::Auto) {
            true => interfaces::routes_to(self.backends(tables))?,
            false => BTreeSet::new(),
        };

        let Self {
            options,
            pins,
            ticks,
            held,
            attacher,
            former,
            ..
        } = self;
        if let Some(former) = former {
            former.begin(pins)?;
        }
        let mut loader = None;
        let mut served = Vec::new();
        for want in wanted.values() {
            let mut one = || {
                let slot = slot_for(&held.rows, &host, want.port)?;
                let former = held.rows.uplinks[slot as usize];
                let row = uplink_row(&former, want, &host, &routed);
                held.write_uplink(slot, row)?;
                let target = Target {
                    port: want.port,
                    other_end: host.other_end(want.port),
                    mode: want.spec.map(|spec| spec.mode),
                };
                let mut load = || {
                    loader
                        .get_or_insert_with(|| Loader::new(pins, options, ticks))
                        .load(slot)
                };
                let mut switch = |mode| held.write_mode(slot, mode);
                let (mode, note) = attacher.ensure(pins, &target, &mut load, &mut switch)?;
                Ok((slot, mode, note))
            };
            match one() {
                Ok((slot, mode, note)) => {
                    if let Some(spec) = want.spec {
                        let addresses = host.addresses.iter();
                        let addresses = addresses.filter(|a| {
                            // A link-local one means nothing without its interface.
                            let is_local =
                                matches!(a.address, IpAddr::V6(v6) if v6.is_unicast_link_local());
                            a.index == want.place.device && !is_local
                        });
                        report.links.push(Link {
                            uplink: slot,
                            ifindex: want.port.index,
                            device: want.place.device,
                            mac: held.rows.uplinks[slot as usize].mac,
                            vlan: spec.vlan,
                            addresses: addresses.map(|a| (a.address, a.prefix)).collect(),
                            carrier: want.port.running,
                        });
                        served.push(Served {
                            slot,
                            device: want.place.device,
                            subnet: match spec.selector {
                                UplinkSelector::Subnet(network, length) => Some((network, length)),
                                _ => None,
                            },
                        });
                    }
                    report.attachments.push(Attachment {
                        interface: want.port.name.clone(),
                        ifindex: want.port.index,
                        mode,
                        note,
                    });
                }
                Err(error) => drop(failed.get_or_insert(error)),
            }
        }
        let keep = wanted.into_keys().collect();
        self.served = served;
        self.incomplete = failed.is_some();
        if let Some(error) = failed {
            return Err(error);
        }
        self.remove_others(&keep)?;
        if let Some(former) = &mut self.former {
            former.finish(&self.pins)?;
            self.former = None;
        }
        Ok(report)
    }

    /// Addresses of all backends. Before the first [`Self::apply`] those count that an earlier agent has left, too:
    /// they are served.
    fn backends(&self, tables: &TableSet) -> BTreeSet<IpAddr> {
        let rows = tables.ports.values().flat_map(|port| &port.backends);
        let held = self.held.rows.backends.iter();
        let held = held.filter(|row| self.tables.is_none() && row.addr != Addr::UNSPECIFIED);
        let held = held.map(|row| row.addr.into());
        rows.map(|row| row.address).chain(held).collect()
    }

    /// Ends attachments to interfaces that no uplink means any more, and those whose interface is gone.
    fn remove_others(&mut self, keep: &BTreeSet<u32>) -> Result<(), DataplaneError> {
        let rows = self.held.rows.uplinks.iter();
        let mut others: BTreeSet<u32> = rows.map(|row| row.ifindex).collect();
        others.extend(self.pins.links()?.into_iter().map(|(_, ifindex)| ifindex));
        others.remove(&0);
        for ifindex in others.difference(keep) {
            let slot = self
                .held
                .rows
                .uplinks
                .iter()
                .position(|row| row.ifindex == *ifindex);
            let name = slot.map_or_else(
                || format!("interface {ifindex}"),
                |slot| lb_common::from_name(&self.held.rows.uplinks[slot].name),
            );
            self.attacher.remove(&self.pins, *ifindex, &name)?;
            if let Some(slot) = slot {
                self.held.write_uplink(slot as u32, NO_UPLINK)?;
            }
        }
        Ok(())
    }

    /// Brings the maps in step with `tables`, by a diff in safe order. Call [`Self::attach`] before.
    pub fn apply(&mut self, tables: &Arc<TableSet>) -> Result<Applied, DataplaneError> {
        let applied = self.bring(tables)?;
        let control = Control {
            synced_at: nanoseconds(boot_time()),
            ..self.held.rows.control
        };
        self.held.write(&Write::Control(Box::new(control)))?;
        self.tables = Some(Arc::clone(tables));
        Ok(applied)
    }

    /// The uplink slot of every VIP that has one.
    pub fn placed(&self) -> BTreeMap<IpAddr, u32> {
        let vips = self.held.rows.vips.iter();
        vips.map(|(vip, row)| ((*vip).into(), row.uplink)).collect()
    }

    /// Peers as the maps remember them, by name.
    pub fn peers(&self) -> BTreeMap<String, PeerRow> {
        self.held.rows.named_peers()
    }

    /// Gives peers more time to tell which flows are theirs: see [`Control::settle_until`].
    pub fn settle(&mut self) -> Result<(), DataplaneError> {
        let control = Control {
            settle_until: nanoseconds(boot_time() + rows::SETTLE),
            ..self.held.rows.control
        };
        self.held.write(&Write::Control(Box::new(control)))
    }

    /// Ends backends that left [`GONE_AFTER`] ago. To be called at least every other second after
    /// [`Self::apply`]; writes nothing when nothing is due.
    pub fn tick(&mut self) -> Result<Applied, DataplaneError> {
        let now = boot_time();
        let due = self.leaving.values().any(|deadline| *deadline <= now);
        match self.tables.take() {
            Some(tables) if due => {
                // While the pods are still known: what they send meanwhile is dropped by name.
                let due = self
                    .leaving
                    .iter()
                    .filter(|(_, deadline)| **deadline <= now);
                let going: HashSet<u16> = due.map(|(index, _)| *index).collect();
                self.end_flows(&going);
                let applied = self.bring(&tables);
                self.tables = Some(tables);
                applied
            }
            tables => {
                self.tables = tables;
                Ok(Applied {
                    leaving: self.leaving.len(),
                    ..Applied::default()
                })
            }
        }
    }

    fn bring(&mut self, tables: &TableSet) -> Result<Applied, DataplaneError> {
        let host = Host::read()?;
        check_vips(&host, tables)?;
        let placement = self.placement(&host, tables);
        let input = Input {
            tables,
            placement: &placement,
            host: &host.own(),
            now: boot_time(),
        };
        let plan = rows::plan(&self.held.rows, &self.leaving, &input);
        // Deadlines run on even if a write fails and all is tried again.
        self.leaving = plan.leaving;
        let backends = &self.held.rows.backends;
        let ends = plan.writes.iter().any(|write| match write {
            Write::Backend(index, row) => {
                let was = &backends[usize::from(*index)];
                was.flags & BACKEND_ALIVE != 0
                    && (row.flags & BACKEND_ALIVE == 0 || row.generation != was.generation)
            }
            _ => false,
        });
        self.held.write_all(&plan.writes, plan.rows)?;
        if ends {
            // Those that another pod's address or a lack of room ends at once.
            self.end_flows(&HashSet::new());
        }
        let unplaced = |vip: &&IpAddr| !placement.contains_key(vip);
        Ok(Applied {
            writes: plan.writes.len(),
            vips_without_uplink: tables.vips.keys().filter(unplaced).copied().collect(),
            notes: plan.notes,
            leaving: self.leaving.len(),
        })
    }

    /// Ends the flows of backends that are gone, and of these. Without it the programs refuse what clients send.
    fn end_flows(&self, going: &HashSet<u16>) {
        match endings::end(&self.options.bpffs, &Which::Gone(going)) {
            Ok(ended) if ended.is_empty() => {}
            Ok(ended) => {
                info!("{} flows ended with their backends", ended.len());
                if let Some(recorder) = &self.recorder {
                    ended.into_iter().for_each(|ending| recorder.tell(ending));
                }
            }
            Err(error) => warn!("cannot end the flows of backends that are gone: {error}"),
        }
    }

    /// The uplink of every VIP that has one: the one whose subnet names it, else the one that is in its subnet, else the one
    /// that has it: an address that goes for a moment ends nothing.
    fn placement(&self, host: &Host, tables: &TableSet) -> BTreeMap<IpAddr, u32> {
        let mut placement = BTreeMap::new();
        for vip in tables.vips.keys() {
            let named = self.served.iter().find(|served| {
                served
                    .subnet
                    .is_some_and(|(network, length)| interfaces::in_subnet(*vip, network, length))
            });
            let on_link = || {
                let mut served = self.served.iter();
                served.find(|served| host.on_link(served.device, *vip))
            };
            let former = || {
                let row = self.held.rows.vips.get(&Addr::from(*vip));
                let slot = row.map(|row| row.uplink);
                let serves = |slot: &u32| self.served.iter().any(|served| served.slot == *slot);
                slot.filter(|slot| self.incomplete || serves(slot))
            };
            let found = named.or_else(on_link).map(|served| served.slot);
            if let Some(slot) = found.or_else(former) {
                placement.insert(*vip, slot);
            }
        }
        placement
    }

    /// Ends a start that comes to nothing: what served before, of whatever layout, goes on; where nothing did, nothing is left.
    pub fn give_up(self) -> Result<(), DataplaneError> {
        match self.is_first {
            true => self.detach(),
            false => Ok(()),
        }
    }

    /// Detaches the programs and removes all pins.
    pub fn detach(self) -> Result<(), DataplaneError> {
        let Self {
            options,
            pins,
            held,
            ..
        } = self;
        drop(held);
        pins::remove_all(&options.bpffs, Some(pins))?;
        Ok(())
    }
}

/// What [`unload`] removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct UnloadReport {
    /// Links detached, as `hook-ifindex (name)`; the name where it is known.
    pub links: Vec<String>,
    /// Maps unpinned.
    pub maps: Vec<String>,
}

/// Detaches every program and removes every pin of ours below `bpffs`, of whatever layout.
/// Nothing there is not an error; an agent that lives is: [`DataplaneError::Locked`]. Below Linux 6.6 the TC
/// programs are filters, not links: there it must run in the agent's network namespace to find them.
pub fn unload(bpffs: &Path) -> Result<UnloadReport, DataplaneError> {
    pins::remove_all(bpffs, None)
}

/// A program that the kernel was asked to take.
#[derive(Debug)]
pub struct LoadedProgram {
    /// Its name in the object.
    pub name: &'static str,
    /// Instructions that the verifier walked, where the kernel tells (Linux 5.16, commit aba64c7da983); or why it refused.
    pub instructions: Result<Option<u32>, DataplaneError>,
}

/// Asks the kernel to take every program of the object, as an agent would, and attaches none: what a kernel thinks of
/// them, those included that an agent would not use on it. Maps are made and pinned as for an agent; [`unload`] ends them.
pub fn load_all(options: &Options) -> Result<Vec<LoadedProgram>, DataplaneError> {
    let Dataplane { pins, ticks, .. } = Dataplane::open(options)?;
    let mut object = Loader::new(&pins, options, &ticks).load(0)?;
    Ok(attach::load_all(&mut object))
}

/// An address of this node cannot be a VIP: the kernel would answer for it, and accept what we pass.
fn check_vips(host: &Host, tables: &TableSet) -> Result<(), DataplaneError> {
    let ours = tables.vips.iter();
    for (vip, _) in ours.filter(|(_, row)| row.announce != Announce::External) {
        if let Some(interface) = owner_of_vip(host, *vip) {
            return Err(DataplaneError::VipIsLocal {
                vip: *vip,
                interface: interface.name.clone(),
            });
        }
    }
    Ok(())
}

/// The device that has a VIP as its address, where that does harm. kube-proxy in IPVS mode keeps service addresses on a
/// device of its own, and a whole-length address on `lo` is what `pass` needs.
pub(crate) fn owner_of_vip(host: &Host, vip: IpAddr) -> Option<&Interface> {
    let whole = if vip.is_ipv4() { 32 } else { 128 };
    let addresses = host.addresses.iter().filter(|a| a.address == vip);
    let mut owners = addresses.filter_map(|a| Some((host.interfaces.get(&a.index)?, a.prefix)));
    let owner = owners.find(|(interface, prefix)| {
        interface.name != "kube-ipvs0" && !(interface.loopback && *prefix == whole)
    });
    owner.map(|(interface, _)| interface)
}

/// Whether what is pinned below a root is what this version takes it for.
pub(crate) fn check_pins(root: &Path) -> Result<(), DataplaneError> {
    maps::check(&pins::layout_dir(root), &Options::default())
}

/// The slot that the interface has, or that its former self had, or a free one.
fn slot_for(rows: &Rows, host: &Host, port: &Interface) -> Result<u32, DataplaneError> {
    let find = |is_it: &dyn Fn(&Uplink) -> bool| rows.uplinks.iter().position(is_it);
    let name: [u8; 16] = to_name(&port.name);
    find(&|row| row.ifindex == port.index)
        .or_else(|| find(&|row| row.name == name && !host.interfaces.contains_key(&row.ifindex)))
        .or_else(|| find(&|row| row.ifindex == 0))
        .map(|slot| slot as u32)
        .ok_or_else(|| DataplaneError::TooManyUplinks {
            interface: port.name.clone(),
        })
}

/// The row of an attachment; filter and mode stay as they are until VIPs and programs are in place.
fn uplink_row(former: &Uplink, want: &Wanted<'_>, host: &Host, routed: &BTreeSet<u32>) -> Uplink {
    let device = host.interfaces.get(&want.place.device);
    let mac = device.and_then(|device| device.mac).or(want.port.mac);
    let mut row = Uplink {
        vip_filter: former.vip_filter,
        ifindex: want.port.index,
        mac: mac.unwrap_or_default(),
        mode: former.mode,
        name: to_name(&want.port.name),
        device: want.place.device,
        ..NO_UPLINK
    };
    let Some(spec) = want.spec else {
        return row;
    };
    let drops = match spec.bypass {
        Bypass::Drop => true,
        Bypass::Allow => false,
        Bypass::Auto => !routed.contains(&want.place.device) && !routed.contains(&want.place.port),
    };
    row.flags = UPLINK_FORWARD;
    if drops {
        row.flags |= UPLINK_BYPASS_DROP;
    }
    if want.port.is("veth") {
        row.flags |= UPLINK_TRANSMIT_BY_REDIRECT;
    }
    row.vlan = spec.vlan.unwrap_or(0);
    for gateway in &spec.gateways {
        let gateway = Addr::from(*gateway);
        row.gateways[version(&gateway)] = gateway;
    }
    let named = match spec.selector {
        UplinkSelector::Subnet(network, length) => Some((network, length)),
        _ => None,
    };
    // Of what is not said the first address tells.
    for (network, length) in named.into_iter().chain(host.subnets(want.place.device)) {
        let mapped = if network.is_ipv4() { 96 } else { 0 };
        let network = Addr::from(network);
        let version = version(&network);
        if row.prefixes[version] == 0 {
            row.networks[version] = network;
            row.prefixes[version] = length + mapped;
        }
    }
    for (place, port) in row.bypass_udp[..MAX_BYPASS_UDP]
        .iter_mut()
        .zip(&spec.bypass_udp)
    {
        *place = *port;
    }
    row
}

/// That an uplink means no interface now.
pub(crate) fn idle(selector: &UplinkSelector) -> String {
    match selector {
        UplinkSelector::Subnet(network, length) => {
            format!("no interface has an address in {network}/{length}")
        }
        UplinkSelector::Name(pattern) => format!("no interface is called `{pattern}`"),
        UplinkSelector::Mac([a, b, c, d, e, f]) => {
            format!("no interface has the MAC {a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
        }
    }
}

/// Opens a map that is pinned below a root.
pub(crate) fn open_map<T>(root: &Path, name: &'static str) -> Result<T, DataplaneError>
where
    T: TryFrom<Map, Error = MapError>,
{
    maps::pinned(&pins::layout_dir(root), name)
}

/// Maps count against the cgroup's memory from here on, and no more as locked memory: commit 755e5d55367a.
pub(crate) const NO_MEMLOCK_SINCE: KernelVersion = KernelVersion::new(5, 11, 0);
/// What to do about a limit of locked memory.
pub(crate) const MEMLOCK_REMEDY: &str =
    "ulimit -l unlimited (LimitMEMLOCK=infinity in a unit), or CAP_SYS_RESOURCE";

/// Where maps count as locked memory: how many bytes of it this process may have, if not all.
pub(crate) fn memlock_limit() -> Option<u64> {
    let kernel = KernelVersion::current().ok()?;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    limit.filter(|_| kernel < NO_MEMLOCK_SINCE)
}

/// Where it may not be raised, making maps will tell: [`memlock_limit`].
fn raise_memlock() {
    let unlimited = rustix::process::Rlimit {
        current: None,
        maximum: None,
    };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Memlock, unlimited);
}

/// `CLOCK_BOOTTIME`.
pub(crate) fn boot_time() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(
        now.tv_sec.try_into().unwrap_or(0),
        now.tv_nsec.try_into().unwrap_or(0),
    )
}

pub(crate) fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// `CONFIG_HZ`: the coarse clock advances by one tick.
fn ticks_per_second() -> u32 {
    let tick = clock_getres(ClockId::MonotonicCoarse).tv_nsec.max(1);
    ((1_000_000_000 + tick / 2) / tick)
        .try_into()
        .unwrap_or(u32::MAX)
}
