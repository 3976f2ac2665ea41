//! Programs on interfaces: which mode, whose link, and that it is still where it was put.
//!
//! A link is pinned as soon as it exists, so it outlives the process; a restart updates the program
//! behind it (`bpf_link_update`), so the interface never goes without.

use std::collections::BTreeMap;
use std::io;
use std::time::Instant;

use aya::programs::links::{FdLink, LinkError, LinkOrder, PinnedLink};
use aya::programs::tc::{
    NlOptions, SchedClassifierLink, TcAttachOptions, TcHandle, qdisc_add_clsact,
    qdisc_detach_program,
};
use aya::programs::xdp::{XdpError, XdpLink};
use aya::programs::{
    ProgramError, ProgramInfo, SchedClassifier, TcAttachType, TcError, Xdp, XdpMode,
    loaded_programs,
};
use aya::util::KernelVersion;
use aya::{Ebpf, EbpfLoader};
use lb_common::{MAX_UPLINKS, Uplink, from_name, global, map, program};
use tracing::{info, warn};

use super::error::chain;
use super::pins::Pins;
use super::{AttachedMode, DataplaneError, Hook, LoadedProgram, Options, maps};
use crate::desired::Mode;
use crate::ethtool::{self, Offload};
use crate::interfaces::{self, Interface};

/// TCX (`bpf_link` for TC programs) came with Linux 6.6, commit e420bed02507.
pub(crate) const TCX_SINCE: KernelVersion = KernelVersion::new(6, 6, 0);
/// Multi-buffer XDP came with Linux 5.18, commit f45d5b6ce2e8.
pub(crate) const FRAGS_SINCE: KernelVersion = KernelVersion::new(5, 18, 0);
/// Where our clsact filter is: ahead of all that does not ask for the same.
const CLSACT: (u16, TcHandle) = (1, TcHandle::new(0, 1));
/// Slots as values that a loader can borrow.
pub(super) static SLOTS: [u32; MAX_UPLINKS as usize] = {
    let mut slots = [0; MAX_UPLINKS as usize];
    let mut at = 0;
    while at < slots.len() {
        slots[at] = at as u32;
        at += 1;
    }
    slots
};

/// Loads the object, once per attachment: its constants differ. Reads the kernel's BTF once.
pub(super) struct Loader<'a> {
    loader: EbpfLoader<'a>,
}

impl<'a> Loader<'a> {
    /// A loader whose maps are the pinned ones, made where they are missing.
    pub(super) fn new(pins: &Pins, options: &Options, ticks: &'a u32) -> Self {
        let mut loader = EbpfLoader::new();
        for name in map::ALL {
            loader.map_pin_path(name, pins.dir().join(name));
            if let Some(size) = maps::capacity(name, options) {
                loader.map_max_entries(name, size);
            }
        }
        loader.override_global(global::TICKS_PER_SECOND, ticks, true);
        Self { loader }
    }

    /// Loads the object for a slot; no program is loaded yet, but all maps exist.
    pub(super) fn load(&mut self, slot: u32) -> Result<Ebpf, DataplaneError> {
        let slot = &SLOTS[slot as usize];
        self.loader.override_global(global::UPLINK, slot, true);
        self.loader
            .load(crate::OBJECT)
            .map_err(|error| load_error("ironlb-bpf", &error))
    }
}

/// Asks the kernel to take every program of the object, and attaches none.
pub(super) fn load_all(object: &mut Ebpf) -> Vec<LoadedProgram> {
    program::ALL
        .into_iter()
        .map(|name| LoadedProgram {
            name,
            instructions: load_program(object, name).map(|info| info.verified_instruction_count()),
        })
        .collect()
}

/// Asks the kernel to take one program of the object.
pub(super) fn load_program(
    object: &mut Ebpf,
    name: &'static str,
) -> Result<ProgramInfo, DataplaneError> {
    let info = match name {
        program::XDP | program::XDP_PLAIN => {
            let xdp: &mut Xdp = typed(object, name)?;
            xdp.load().and_then(|()| xdp.info())
        }
        _ => {
            let tc: &mut SchedClassifier = typed(object, name)?;
            tc.load().and_then(|()| tc.info())
        }
    };
    info.map_err(|error| load_error(name, &error))
}

/// An interface that is to have our programs.
pub(super) struct Target<'a> {
    /// Where programs are attached.
    pub(super) port: &'a Interface,
    /// The other end of a veth, where that is in this network namespace.
    pub(super) other_end: Option<&'a Interface>,
    /// Mode of the forward path; `None` for egress alone.
    pub(super) mode: Option<Mode>,
}

/// What this process has attached to an interface.
#[derive(Debug)]
pub(super) struct Attached {
    /// What was asked for.
    wanted: Option<Mode>,
    /// What it got.
    pub(super) mode: AttachedMode,
    /// Why it got that.
    reason: Option<String>,
    /// Program ids by hook.
    programs: BTreeMap<Hook, u32>,
    /// The pinned links of those that have one, so that they outlive their pins as long as this process lives.
    links: BTreeMap<Hook, FdLink>,
}

impl Attached {
    fn add(&mut self, hook: Hook, (program, link): New) {
        self.programs.insert(hook, program);
        if let Some(link) = link {
            self.links.insert(hook, link);
        }
    }
}

/// What attaching made or adopted: a program by its id, and its link where it has one (clsact filters do not).
type New = (u32, Option<FdLink>);

/// Attaches and remembers what is attached.
#[derive(Debug, Default)]
pub(super) struct Attacher {
    attached: BTreeMap<u32, Attached>,
}

/// Why the forward path cannot be native.
struct NotNative {
    reason: String,
    /// Whether `auto` may serve by TC instead.
    may_fall: bool,
    foreign: Option<String>,
}

impl Attacher {
    /// Brings one interface's programs in step. Returns the mode and what there is to say about it.
    ///
    /// `switch` is called when the forward path of the new mode is attached and that of the old is not yet
    /// removed.
    pub(super) fn ensure(
        &mut self,
        pins: &Pins,
        target: &Target<'_>,
        loader: &mut dyn FnMut() -> Result<Ebpf, DataplaneError>,
        switch: &mut dyn FnMut(AttachedMode) -> Result<(), DataplaneError>,
    ) -> Result<(AttachedMode, Option<String>), DataplaneError> {
        let ifindex = target.port.index;
        if let Some(known) = self.attached.get(&ifindex)
            && known.wanted == target.mode
            && is_intact(known, target.port)?
        {
            let note = notes(known, target)?;
            return Ok((known.mode, note));
        }
        // Its links have pins, so they stay; a link that must go must not be held here.
        self.attached.remove(&ifindex);
        let had_egress = !has_tcx() || pins.link(Hook::Egress, ifindex).exists();
        let mut object = loader()?;
        let mut attached = Attached {
            wanted: target.mode,
            mode: AttachedMode::Egress,
            reason: None,
            programs: BTreeMap::new(),
            links: BTreeMap::new(),
        };
        attached.add(
            Hook::Egress,
            attach_tc(pins, &mut object, target.port, Hook::Egress)?,
        );
        if let Some(wanted) = target.mode
            && let Err(error) = forward(pins, &mut object, target, wanted, &mut attached)
        {
            // What served before goes on; where nothing did, nothing is left.
            drop(attached);
            if !had_egress {
                remove(pins, Hook::Egress, ifindex, &target.port.name)?;
            }
            return Err(error);
        }
        let mode = attached.mode;
        switch(mode)?;
        for hook in [Hook::Xdp, Hook::Ingress] {
            if !attached.programs.contains_key(&hook) {
                remove(pins, hook, ifindex, &target.port.name)?;
            }
        }
        let note = notes(&attached, target)?;
        info!(interface = target.port.name, ?mode, note, "attached");
        self.attached.insert(ifindex, attached);
        Ok((mode, note))
    }

    /// Whether every link has its pin.
    pub(super) fn is_pinned(&self, pins: &Pins) -> bool {
        let links = self.attached.iter();
        let mut links = links.flat_map(|(ifindex, attached)| {
            attached.links.keys().map(|hook| pins.link(*hook, *ifindex))
        });
        links.all(|path| path.exists())
    }

    /// Pins links that have lost their pins.
    pub(super) fn pin_again(&mut self, pins: &Pins) -> Result<(), DataplaneError> {
        for (ifindex, attached) in &mut self.attached {
            for hook in [Hook::Egress, Hook::Xdp, Hook::Ingress] {
                let path = pins.link(hook, *ifindex);
                if path.exists() {
                    continue;
                }
                if let Some(link) = attached.links.remove(&hook) {
                    let pinned = link.pin(&path).map_err(|error| {
                        DataplaneError::pins("pin", &path, io::Error::other(chain(&error)))
                    })?;
                    attached.links.insert(hook, pinned.into());
                }
            }
        }
        Ok(())
    }

    /// Forgets an interface and removes its links, the forward path first.
    pub(super) fn remove(
        &mut self,
        pins: &Pins,
        ifindex: u32,
        name: &str,
    ) -> Result<(), DataplaneError> {
        self.attached.remove(&ifindex);
        for hook in [Hook::Xdp, Hook::Ingress, Hook::Egress] {
            remove(pins, hook, ifindex, name)?;
        }
        info!(interface = name, "detached");
        Ok(())
    }
}

/// Removes our clsact filters from the interfaces of these rows; nothing where links are used.
pub(super) fn remove_filters(uplinks: &[Uplink]) {
    if has_tcx() {
        return;
    }
    for uplink in uplinks.iter().filter(|uplink| uplink.ifindex != 0) {
        let name = from_name(&uplink.name);
        remove_filter(&name, Hook::Ingress);
        remove_filter(&name, Hook::Egress);
    }
}

pub(super) fn has_tcx() -> bool {
    KernelVersion::current().is_ok_and(|version| version >= TCX_SINCE)
}

/// Why a device is served at TC although its driver has XDP. Local senders leave the checksum unfinished on these; XDP
/// sees the packet before anybody completes it, and an incremental rewrite would spoil it.
pub(crate) fn unfinished_sums(port: &Interface) -> Option<String> {
    let kind = port.kind.as_deref()?;
    let is_virtual = ["veth", "tun", "bridge"].contains(&kind);
    is_virtual.then(|| format!("XDP on a {kind} device would see unfinished checksums"))
}

/// Why `mode: native` would spoil packets, and what to do, where that can be seen: senders behind the other end of a veth leave
/// checksums unfinished.
fn spoils(target: &Target<'_>) -> Option<String> {
    let peer = &target.other_end?.name;
    let is_unfinished = ethtool::offload(peer, Offload::TransmitChecksum).is_ok_and(|on| on);
    is_unfinished.then(|| {
        format!(
            "its other end {peer} leaves checksums unfinished, and packets rewritten in XDP would be corrupt: \
             `ethtool -K {peer} tx off`, or use `mode: tc`"
        )
    })
}

/// Ids and names of the TCX programs on the way in or out, first to last; none before Linux 6.6.
pub(crate) fn programs_at_tc(
    port: &Interface,
    direction: TcAttachType,
) -> Result<Vec<(u32, String)>, ProgramError> {
    if has_tcx() {
        tcx_programs(port, direction)
    } else {
        Ok(Vec::new())
    }
}

/// The ladder: native where it serves rightly, else TC, with the reason.
fn forward(
    pins: &Pins,
    object: &mut Ebpf,
    target: &Target<'_>,
    wanted: Mode,
    attached: &mut Attached,
) -> Result<(), DataplaneError> {
    let port = target.port;
    if wanted == Mode::Native
        && let Some(reason) = spoils(target)
    {
        return Err(DataplaneError::Attach {
            program: program::XDP,
            interface: port.name.clone(),
            reason,
        });
    }
    let reason = match (wanted, unfinished_sums(port)) {
        (Mode::Tc, _) => None,
        (Mode::Auto, Some(sums)) => {
            let (_, foreign) = xdp_of_others(pins, port)?;
            Some(match foreign {
                Some(foreign) => {
                    format!("{foreign} is attached by somebody else and stays; {sums}")
                }
                None => sums,
            })
        }
        (Mode::Auto | Mode::Native, _) => match attach_xdp(pins, object, port)? {
            Ok(new) => {
                attached.add(Hook::Xdp, new);
                attached.mode = AttachedMode::Native;
                return Ok(());
            }
            Err(NotNative {
                reason,
                may_fall,
                foreign,
            }) => {
                let interface = port.name.clone();
                match foreign {
                    Some(foreign) if wanted == Mode::Native => {
                        return Err(DataplaneError::ForeignXdp { interface, foreign });
                    }
                    None if wanted == Mode::Native || !may_fall => {
                        return Err(DataplaneError::Attach {
                            program: program::XDP,
                            interface,
                            reason: if may_fall {
                                format!("{reason}; or use `mode: tc`")
                            } else {
                                reason
                            },
                        });
                    }
                    _ => Some(reason),
                }
            }
        },
    };
    attached.add(Hook::Ingress, attach_tc(pins, object, port, Hook::Ingress)?);
    attached.mode = AttachedMode::Tc;
    attached.reason = reason;
    Ok(())
}

/// A pinned link of ours, and the id of its program.
type Ours = (FdLink, u32);

/// Our pinned XDP link, and the program of somebody else, by name and id.
fn xdp_of_others(
    pins: &Pins,
    port: &Interface,
) -> Result<(Option<Ours>, Option<String>), DataplaneError> {
    let ours = pinned_link(pins, Hook::Xdp, port, |id| Ok(port.xdp.contains(&id)))?;
    let is_foreign = |id: &&u32| ours.as_ref().is_none_or(|(_, own)| own != *id);
    let foreign = port.xdp.iter().find(is_foreign).map(|id| program_name(*id));
    Ok((ours, foreign))
}

/// A time without a program, because the link of an earlier agent takes none of ours.
struct Gap {
    hook: Hook,
    begun: Instant,
}

impl Gap {
    /// Ends the link.
    fn open(
        pins: &Pins,
        port: &Interface,
        hook: Hook,
        error: &DataplaneError,
    ) -> Result<Self, DataplaneError> {
        warn!(
            interface = port.name, hook = hook.name(), %error,
            "the pinned link cannot be updated; it is made anew, and for a moment nothing is attached"
        );
        let begun = Instant::now();
        pins.remove_link(hook, port.index)?;
        Ok(Self { hook, begun })
    }

    /// Tells how long it was, now that another link is there.
    fn close(self, port: &Interface) {
        warn!(
            interface = port.name,
            hook = self.hook.name(),
            gap = ?self.begun.elapsed(),
            "the link was made anew"
        );
    }
}

/// Adopts or makes the XDP link.
fn attach_xdp(
    pins: &Pins,
    object: &mut Ebpf,
    port: &Interface,
) -> Result<Result<New, NotNative>, DataplaneError> {
    let has_frags = KernelVersion::current().is_ok_and(|version| version >= FRAGS_SINCE);
    let name = if has_frags {
        program::XDP
    } else {
        program::XDP_PLAIN
    };
    let pin = pins.link(Hook::Xdp, port.index);
    let (old, foreign) = xdp_of_others(pins, port)?;
    if let Some(foreign) = foreign {
        let reason = format!(
            "{foreign} is attached by somebody else and stays; without it ironlb would use XDP"
        );
        return Ok(Err(NotNative {
            reason,
            may_fall: true,
            foreign: Some(foreign),
        }));
    }
    let xdp: &mut Xdp = typed(object, name)?;
    xdp.load().map_err(|error| load_error(name, &error))?;
    let failed = |error: &dyn std::error::Error| DataplaneError::Attach {
        program: name,
        interface: port.name.clone(),
        reason: chain(error),
    };
    let mut gap = None;
    if let Some((link, _)) = old {
        let updated = XdpLink::try_from(link)
            .map_err(|error| failed(&error))
            .and_then(|link| xdp.attach_to_link(link).map_err(|error| failed(&error)));
        match updated {
            Ok(id) => {
                let link = xdp.take_link(id).map_err(|error| failed(&error))?;
                let link = FdLink::try_from(link).map_err(|error| failed(&error))?;
                return Ok(Ok((program_id(xdp, name)?, Some(link))));
            }
            Err(error) => {
                gap = Some(Gap::open(pins, port, Hook::Xdp, &error)?);
            }
        }
    }
    let id = match xdp.attach_to_if_index(port.index, XdpMode::Driver) {
        Ok(id) => id,
        Err(error) => return Ok(Err(not_native(port, &error))),
    };
    if let Some(gap) = gap {
        gap.close(port);
    }
    let link = xdp.take_link(id).map_err(|error| failed(&error))?;
    let Ok(link) = FdLink::try_from(link) else {
        // aya fell back to netlink: such an attachment has no link, cannot be pinned, and aya does not
        // end it on drop either.
        let fd = xdp.fd().map_err(|error| failed(&error))?;
        interfaces::clear_xdp(port.index, std::os::fd::AsFd::as_fd(fd))?;
        let error = io::Error::from(rustix::io::Errno::INVAL);
        return Ok(Err(words(port, error.raw_os_error(), &error.to_string())));
    };
    let link = link.pin(&pin).map_err(|error| failed(&error))?;
    Ok(Ok((program_id(xdp, name)?, Some(link.into()))))
}

/// Adopts or makes the TC attachment of a direction.
fn attach_tc(
    pins: &Pins,
    object: &mut Ebpf,
    port: &Interface,
    hook: Hook,
) -> Result<New, DataplaneError> {
    let (name, direction) = hook.tc();
    let failed = |error: &dyn std::error::Error| DataplaneError::Attach {
        program: name,
        interface: port.name.clone(),
        reason: chain(error),
    };
    let tc: &mut SchedClassifier = typed(object, name)?;
    tc.load().map_err(|error| load_error(name, &error))?;
    if !has_tcx() {
        attach_clsact(tc, port, direction).map_err(|error| failed(&error))?;
        return Ok((program_id(tc, name)?, None));
    }
    let old = pinned_link(pins, hook, port, |id| {
        let attached = tcx_programs(port, direction).map_err(|error| failed(&error))?;
        Ok(attached.iter().any(|(other, _)| *other == id))
    })?;
    let mut gap = None;
    if let Some((link, _)) = old {
        let updated = SchedClassifierLink::try_from(link)
            .map_err(|error| failed(&error))
            .and_then(|link| tc.attach_to_link(link).map_err(|error| failed(&error)));
        match updated {
            Ok(id) => {
                let link = tc.take_link(id).map_err(|error| failed(&error))?;
                let link = FdLink::try_from(link).map_err(|error| failed(&error))?;
                return Ok((program_id(tc, name)?, Some(link)));
            }
            Err(error) => {
                gap = Some(Gap::open(pins, port, hook, &error)?);
            }
        }
    }
    let attached = tcx_programs(port, direction).map_err(|error| failed(&error))?;
    if let Some((other, _)) = attached.into_iter().find(|(_, found)| found == name) {
        return Err(DataplaneError::OtherRoot {
            interface: port.name.clone(),
            program: name,
            id: other,
            root: pins.other_root(hook, port.index, other),
        });
    }
    let options = TcAttachOptions::TcxOrder(LinkOrder::first());
    let id = tc
        .attach_with_options(&port.name, direction, options)
        .map_err(|error| failed(&error))?;
    if let Some(gap) = gap {
        gap.close(port);
    }
    let link = tc.take_link(id).map_err(|error| failed(&error))?;
    let link = FdLink::try_from(link).map_err(|error| failed(&error))?;
    let link = link
        .pin(pins.link(hook, port.index))
        .map_err(|error| failed(&error))?;
    Ok((program_id(tc, name)?, Some(link.into())))
}

/// Below Linux 6.6: a filter at a place of our own, replaced where it is there already.
fn attach_clsact(
    tc: &mut SchedClassifier,
    port: &Interface,
    direction: TcAttachType,
) -> Result<(), ProgramError> {
    let (priority, handle) = CLSACT;
    let old = SchedClassifierLink::attached(&port.name, direction, priority, handle, None)
        .map_err(TcError::IoError)?;
    let id = match tc.attach_to_link(old) {
        Ok(id) => id,
        Err(_) => {
            if let Err(error) = qdisc_add_clsact(&port.name) {
                let exists = matches!(&error, TcError::NetlinkError(e) if e.raw_os_error() == Some(rustix::io::Errno::EXIST.raw_os_error()));
                if !exists {
                    return Err(error.into());
                }
            }
            let options = TcAttachOptions::Netlink(NlOptions {
                priority,
                handle,
                classid: None,
            });
            tc.attach_with_options(&port.name, direction, options)?
        }
    };
    // Filters need no descriptor to live, and aya would end ours when the link is dropped.
    std::mem::forget(tc.take_link(id)?);
    Ok(())
}

fn remove_filter(interface: &str, hook: Hook) {
    let (name, direction) = hook.tc();
    // An interface or filter that is gone is what we want.
    if let Err(error) = qdisc_detach_program(interface, direction, name)
        && !matches!(&error, TcError::IoError(_))
    {
        warn!(interface, %error, "the clsact filter cannot be removed");
    }
}

fn remove(pins: &Pins, hook: Hook, ifindex: u32, name: &str) -> Result<(), DataplaneError> {
    if hook != Hook::Xdp && !has_tcx() {
        remove_filter(name, hook);
        return Ok(());
    }
    pins.remove_link(hook, ifindex)
}

/// The link that an earlier agent pinned, with its program's id. One whose interface went (or is in another
/// network namespace) is removed: `is_here` tells whether that program is attached to the interface at hand.
fn pinned_link(
    pins: &Pins,
    hook: Hook,
    port: &Interface,
    is_here: impl FnOnce(u32) -> Result<bool, DataplaneError>,
) -> Result<Option<Ours>, DataplaneError> {
    let path = pins.link(hook, port.index);
    let broken =
        |error: LinkError| DataplaneError::pins("open", &path, io::Error::other(chain(&error)));
    if !path.exists() {
        return Ok(None);
    }
    let link = FdLink::from(PinnedLink::from_pin(&path).map_err(broken)?);
    let id = link.info().map_err(broken)?.program_id();
    if is_here(id)? {
        return Ok(Some((link, id)));
    }
    pins.remove_link(hook, port.index)?;
    Ok(None)
}

/// Whether all programs that we attached still are, wherever in the chain.
fn is_intact(attached: &Attached, port: &Interface) -> Result<bool, DataplaneError> {
    for (hook, id) in &attached.programs {
        let here = match hook {
            Hook::Xdp => port.xdp.contains(id),
            Hook::Ingress | Hook::Egress if has_tcx() => {
                chain_of(port, *hook)?.iter().any(|(other, _)| other == id)
            }
            Hook::Ingress | Hook::Egress => true,
        };
        if !here {
            warn!(
                interface = port.name,
                hook = hook.name(),
                "our program was removed by somebody; attaching it again"
            );
            return Ok(false);
        }
    }
    Ok(true)
}

/// Why not native, and who runs before us.
fn notes(attached: &Attached, target: &Target<'_>) -> Result<Option<String>, DataplaneError> {
    let mut notes: Vec<String> = attached.reason.clone().into_iter().collect();
    if attached.mode == AttachedMode::Native {
        notes.extend(spoils(target));
    }
    if !target.port.running {
        notes.push("it has no link: nothing arrives".to_owned());
    }
    for (hook, id) in &attached.programs {
        if *hook == Hook::Xdp || !has_tcx() {
            continue;
        }
        let chain = chain_of(target.port, *hook)?;
        let before: Vec<_> = chain
            .iter()
            .take_while(|(other, _)| other != id)
            .map(|(other, name)| format!("`{name}` (program {other})"))
            .collect();
        if !before.is_empty() {
            notes.push(format!(
                "{} runs before ironlb at TCX {} and may hide packets from it",
                before.join(", "),
                hook.name()
            ));
        }
    }
    Ok((!notes.is_empty()).then(|| notes.join("; ")))
}

fn chain_of(port: &Interface, hook: Hook) -> Result<Vec<(u32, String)>, DataplaneError> {
    let (name, direction) = hook.tc();
    tcx_programs(port, direction).map_err(|error| DataplaneError::Attach {
        program: name,
        interface: port.name.clone(),
        reason: format!("its place cannot be read: {}", chain(&error)),
    })
}

/// Ids and names of the TCX programs of a direction, first to last.
fn tcx_programs(
    port: &Interface,
    direction: TcAttachType,
) -> Result<Vec<(u32, String)>, ProgramError> {
    let (_, programs) = SchedClassifier::query_tcx(&port.name, direction)?;
    Ok(programs
        .iter()
        .map(|program| {
            let name = program.name_as_str().unwrap_or("?");
            (program.id(), name.to_owned())
        })
        .collect())
}

pub(super) fn typed<'a, P>(
    object: &'a mut Ebpf,
    name: &'static str,
) -> Result<&'a mut P, DataplaneError>
where
    &'a mut P: TryFrom<&'a mut aya::programs::Program, Error = ProgramError>,
{
    let program = object
        .program_mut(name)
        .ok_or_else(|| DataplaneError::Object(format!("it has no program `{name}`")))?;
    program
        .try_into()
        .map_err(|_| DataplaneError::Object(format!("`{name}` is of another type")))
}

fn program_id<P>(program: &P, name: &'static str) -> Result<u32, DataplaneError>
where
    P: HasInfo,
{
    program.id().map_err(|error| load_error(name, &error))
}

/// Programs that tell their id.
trait HasInfo {
    /// The kernel's id.
    fn id(&self) -> Result<u32, ProgramError>;
}

impl HasInfo for Xdp {
    fn id(&self) -> Result<u32, ProgramError> {
        self.info().map(|info| info.id())
    }
}

impl HasInfo for SchedClassifier {
    fn id(&self) -> Result<u32, ProgramError> {
        self.info().map(|info| info.id())
    }
}

pub(super) fn load_error(what: &'static str, error: &dyn std::error::Error) -> DataplaneError {
    let mut reason = chain(error);
    if let Some(limit) = super::memlock_limit() {
        reason += &format!(
            "; maps count as locked memory before Linux {}, of which this process may have {limit} bytes: {}",
            super::NO_MEMLOCK_SINCE,
            super::MEMLOCK_REMEDY
        );
    }
    DataplaneError::Load { what, reason }
}

/// An XDP program by name and id, for people.
pub(crate) fn program_name(id: u32) -> String {
    let mut all = loaded_programs().filter_map(Result::ok);
    let name = all
        .find(|program| program.id() == id)
        .and_then(|program| program.name_as_str().map(str::to_owned))
        .filter(|name| !name.is_empty());
    match name {
        Some(name) => format!("the XDP program `{name}` (id {id})"),
        None => format!("the XDP program with id {id}"),
    }
}

fn not_native(port: &Interface, error: &ProgramError) -> NotNative {
    let errno = match error {
        ProgramError::SyscallError(error) => error.io_error.raw_os_error(),
        ProgramError::XdpError(XdpError::NetlinkError(error)) => error.raw_os_error(),
        _ => None,
    };
    words(port, errno, &chain(error))
}

/// What drivers mean by an error, and what helps.
fn words(port: &Interface, errno: Option<i32>, text: &str) -> NotNative {
    use rustix::io::Errno;
    let Interface {
        name,
        mtu,
        rx_queues,
        ..
    } = port;
    let hint = match errno.map(Errno::from_raw_os_error) {
        Some(Errno::OPNOTSUPP) => "its driver has no XDP".to_owned(),
        Some(Errno::RANGE) => format!(
            "its MTU of {mtu} is too large for XDP in this driver; lower it with `ip link set dev {name} mtu 1500`"
        ),
        Some(Errno::INVAL) => format!(
            "its driver refuses XDP as the device is set up (MTU {mtu}, {rx_queues} receive queues; LRO must be off): \
             try `ethtool -K {name} lro off`, a smaller MTU, or fewer queues with `ethtool -L {name} combined N`"
        ),
        Some(Errno::NOMEM | Errno::NOSPC) => format!(
            "its driver has not enough queues or memory for XDP: try `ethtool -L {name} combined N` with half as many"
        ),
        Some(Errno::BUSY) => "something else keeps it busy for XDP".to_owned(),
        _ => {
            return NotNative {
                reason: text.to_owned(),
                may_fall: false,
                foreign: None,
            };
        }
    };
    NotNative {
        reason: format!("{hint} ({text})"),
        may_fall: true,
        foreign: None,
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    fn port() -> Interface {
        Interface {
            name: "eth1".to_owned(),
            mtu: 9000,
            rx_queues: 8,
            ..Interface::default()
        }
    }

    /// What drivers say, in the words of their users' reports: virtio_net, ENA, mlx5, veth, those without XDP.
    #[test]
    fn every_errno_of_a_driver_leads_to_tc_with_its_remedy() {
        let remedies = [
            (Errno::OPNOTSUPP, "no XDP"),
            (Errno::RANGE, "ip link set dev eth1 mtu 1500"),
            (Errno::INVAL, "ethtool -K eth1 lro off"),
            (Errno::INVAL, "MTU 9000, 8 receive queues"),
            (Errno::INVAL, "ethtool -L eth1 combined N"),
            (Errno::NOMEM, "ethtool -L eth1 combined N"),
            (Errno::NOSPC, "ethtool -L eth1 combined N"),
            (Errno::BUSY, "busy"),
        ];
        for (errno, remedy) in remedies {
            let told = words(&port(), Some(errno.raw_os_error()), "as the kernel said it");
            assert!(told.may_fall, "{errno}");
            assert!(told.reason.contains(remedy), "{errno}: {}", told.reason);
            assert!(told.reason.ends_with("(as the kernel said it)"));
        }
        // No step of the ladder: TC would not be allowed either.
        for errno in [Some(Errno::PERM.raw_os_error()), None] {
            let told = words(&port(), errno, "as the kernel said it");
            assert!(!told.may_fall, "{errno:?}");
            assert_eq!(told.reason, "as the kernel said it");
        }
    }
}
