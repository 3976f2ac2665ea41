//! What a version with another map layout left serving: its state is taken over while its programs go on.
//!
//! Rows and counters are copied when the new maps are made, flows directly before the links get new programs
//! (`bpf_link_update`: no link goes away) and once more afterwards, for those that began in between. A flow is copied
//! once: what the new programs have made of it since is not undone by a further attempt.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use aya::Pod as Plain;
use aya::maps::{Array, HashMap, LpmTrie, MapData, MapError, PerCpuArray};
use lb_common::{
    Addr, Announcer, Backend, BackendInfo, Control, Exception, Flow, FlowKey, Peer, PeerInfo,
    PeerMac, Pod, PodPort, PortInfo, Service, ServiceKey, Source, Traffic, Uplink, Vip, map,
};
use tracing::{info, warn};

use super::maps::pinned;
use super::pins::{self, Pins};
use super::read::Clock;
use super::{DataplaneError, attach};

/// Layouts whose maps are read with this version's types but for flows: all else that they have is the same. Layout 5 lacks
/// the rings and what belongs to them.
const KNOWN: [u32; 2] = [5, 6];
/// `BPF_NOEXIST` of `linux/bpf.h`.
const NOEXIST: u64 = 1;

/// A flow's entry in those layouts.
#[repr(C)]
#[derive(Clone, Copy)]
struct FormerFlow {
    addr: Addr,
    port: u16,
    client_port: u16,
    backend: u32,
    last_ack: u32,
    service: u16,
    client_fin: u8,
    pod_fin: u8,
    /// `CLOCK_BOOTTIME` nanoseconds.
    started: u64,
    /// `jiffies_64`.
    last_seen: u64,
    bytes: u64,
    last_hop: [u8; 6],
    uplink: u8,
    state: u8,
}

const _: () = assert!(size_of::<FormerFlow>() == 64);
// SAFETY: repr(C), made of integers and byte arrays only, without implicit padding.
unsafe impl Plain for FormerFlow {}

impl FormerFlow {
    /// The same entry as it is in this layout.
    fn now(self, clock: &Clock) -> Flow {
        Flow {
            addr: self.addr,
            port: self.port,
            client_port: self.client_port,
            backend: self.backend,
            last_ack: self.last_ack,
            service: self.service,
            client_fin: self.client_fin,
            pod_fin: self.pod_fin,
            started: clock.ticks_at(self.started),
            last_seen: self.last_seen as u32,
            bytes: self.bytes,
            last_hop: self.last_hop,
            uplink: self.uplink,
            state: self.state,
        }
    }
}

/// Copies a map from one layout's directory to another's.
type Copy = fn(&Path, &Path, &'static str) -> Result<(), DataplaneError>;

/// What is copied when the new maps have been made, all before `uplinks`: that says that it is done.
const ROWS: [(&str, Copy); 19] = [
    (map::VERDICTS, counters::<u64>),
    (map::PORT_STATS, counters::<Traffic>),
    (map::BACKEND_STATS, counters::<Traffic>),
    (map::PEER_STATS, counters::<Traffic>),
    (map::VIPS, hash::<Addr, Vip>),
    (map::SERVICES, hash::<ServiceKey, Service>),
    (map::BACKENDS, array::<Backend>),
    (map::POD_PORTS, hash::<ServiceKey, PodPort>),
    (map::PODS, hash::<Addr, Pod>),
    (map::PORT_INFO, array::<PortInfo>),
    (map::BACKEND_INFO, array::<BackendInfo>),
    (map::CONTROL, array::<Control>),
    (map::PEERS, array::<Peer>),
    (map::PEER_MACS, hash::<PeerMac, u32>),
    (map::PEER_INFO, array::<PeerInfo>),
    (map::EXCEPTIONS, hash::<FlowKey, Exception>),
    (map::ANNOUNCERS, hash::<Addr, Announcer>),
    (map::SOURCES, sources),
    (map::UPLINKS, array::<Uplink>),
];

/// Another layout's directory, with programs that serve from its maps.
pub(super) struct Former {
    dir: PathBuf,
    version: u32,
    /// When the first link got a new program.
    began: Option<Instant>,
    living: Taken,
    replies: Taken,
    young: Taken,
    direct: Taken,
}

impl std::fmt::Debug for Former {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Former")
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

/// Which entries of a map have been copied, and how many found no room.
#[derive(Default)]
struct Taken {
    keys: HashSet<FlowKey>,
    no_room: usize,
}

impl Former {
    /// The state that an agent of another layout left below the root, if its programs may still serve.
    pub(super) fn find(root: &Path) -> Result<Option<Self>, DataplaneError> {
        let mut found = None;
        for version in pins::layouts(root)? {
            let dir = pins::dir_of(root, version);
            if version == lb_common::LAYOUT_VERSION || !serves(&dir)? {
                continue;
            }
            if !KNOWN.contains(&version) {
                return Err(DataplaneError::UnknownLayout { path: dir, version });
            }
            found = Some(Self {
                dir,
                version,
                began: None,
                living: Taken::default(),
                replies: Taken::default(),
                young: Taken::default(),
                direct: Taken::default(),
            });
        }
        Ok(found)
    }

    /// Copies all but flows to new maps; what an earlier attempt has copied stays.
    pub(super) fn copy_rows(&self, to: &Path) -> Result<(), DataplaneError> {
        let uplinks: Array<MapData, Uplink> = pinned(to, map::UPLINKS)?;
        if uplinks.iter().flatten().any(|row| row.ifindex != 0) {
            return Ok(());
        }
        for (name, copy) in ROWS {
            if self.dir.join(name).exists() {
                copy(&self.dir, to, name)?;
            }
        }
        Ok(())
    }

    /// Copies the flows and takes the links, whose programs are to be replaced at once.
    pub(super) fn begin(&mut self, pins: &Pins) -> Result<(), DataplaneError> {
        self.copy_flows(&pins.dir())?;
        for (hook, ifindex) in pins::links(&self.dir)? {
            let from = self.dir.join("links").join(pins::link_name(hook, ifindex));
            fs::rename(&from, pins.link(hook, ifindex))
                .map_err(|error| DataplaneError::pins("move", &from, error))?;
        }
        self.began.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Copies what began meanwhile, and removes the former maps: no program uses them any more.
    pub(super) fn finish(&mut self, pins: &Pins) -> Result<(), DataplaneError> {
        let ended = self.end_ended(&pins.dir())?;
        let copied = self.living.keys.len();
        self.copy_flows(&pins.dir())?;
        let gap = self.began.map_or(0, |began| began.elapsed().as_millis());
        pins::remove_layout(&self.dir, &mut |_| ())?;
        let no_room = self.living.no_room + self.replies.no_room;
        if no_room != 0 {
            warn!(
                no_room,
                "the new flow tables are smaller: so many entries are lost"
            );
        }
        info!(
            from = self.version,
            to = lb_common::LAYOUT_VERSION,
            living = copied,
            begun_meanwhile = self.living.keys.len() - copied,
            ended_meanwhile = ended,
            gap_ms = gap as u64,
            "took over the state of another map layout; flows that began in the gap may have waited for a retransmission"
        );
        Ok(())
    }

    fn copy_flows(&mut self, to: &Path) -> Result<(), DataplaneError> {
        let clock = Clock::now();
        let now = |flow: FormerFlow| flow.now(&clock);
        // The reply entry first, as the programs do.
        flows(&self.dir, to, map::LIVING_REPLY, &mut self.replies, now)?;
        flows(&self.dir, to, map::LIVING, &mut self.living, now)?;
        flows(&self.dir, to, map::YOUNG, &mut self.young, now)?;
        let same = |seen: u64| seen;
        flows(&self.dir, to, map::DIRECT, &mut self.direct, same)
    }

    /// Flows that were copied and that the former programs ended afterwards would live for ever.
    fn end_ended(&self, to: &Path) -> Result<usize, DataplaneError> {
        let former: HashMap<MapData, FlowKey, FormerFlow> = pinned(&self.dir, map::LIVING)?;
        let mut living: HashMap<MapData, FlowKey, Flow> = pinned(to, map::LIVING)?;
        let mut replies: HashMap<MapData, FlowKey, Flow> = pinned(to, map::LIVING_REPLY)?;
        let mut ended = 0;
        for key in &self.living.keys {
            if former.get(key, 0).is_ok() {
                continue;
            }
            if let Ok(flow) = living.get(key, 0) {
                let reply = FlowKey::reply(key.client, flow.client_port, flow.addr, flow.port);
                let _ = replies.remove(&reply);
                let _ = living.remove(key);
                ended += 1;
            }
        }
        Ok(ended)
    }
}

/// Whether programs may serve from a layout's maps: they have links, or (filters have none) an uplink is in use.
fn serves(dir: &Path) -> Result<bool, DataplaneError> {
    if !pins::links(dir)?.is_empty() {
        return Ok(true);
    }
    if attach::has_tcx() || !dir.join(map::UPLINKS).exists() {
        return Ok(false);
    }
    let uplinks: Array<MapData, Uplink> = pinned(dir, map::UPLINKS)?;
    Ok(uplinks.iter().flatten().any(|row| row.ifindex != 0))
}

/// Copies entries that have not been copied yet.
fn flows<F: Plain, V: Plain>(
    from: &Path,
    to: &Path,
    name: &'static str,
    taken: &mut Taken,
    now: impl Fn(F) -> V,
) -> Result<(), DataplaneError> {
    let source: HashMap<MapData, FlowKey, F> = pinned(from, name)?;
    let mut target: HashMap<MapData, FlowKey, V> = pinned(to, name)?;
    let capacity = MapData::from_pin(from.join(name))
        .and_then(|data| data.info())
        .map_err(|source| DataplaneError::map("look at", name, source))?
        .max_entries();
    // A key that is removed under the iterator sends it back to the start: an end to it.
    for key in source.keys().take(2 * capacity as usize) {
        let key = key.map_err(|source| DataplaneError::map("read", name, source))?;
        if taken.keys.contains(&key) {
            continue;
        }
        let Ok(flow) = source.get(&key, 0) else {
            continue;
        };
        match target.insert(key, now(flow), NOEXIST) {
            Ok(()) => {}
            // The new programs have made it.
            Err(MapError::SyscallError(error)) if is(&error, rustix::io::Errno::EXIST) => {}
            Err(MapError::SyscallError(error)) if is(&error, rustix::io::Errno::TOOBIG) => {
                taken.no_room += 1;
                continue;
            }
            Err(source) => return Err(DataplaneError::map("write", name, source)),
        }
        taken.keys.insert(key);
    }
    Ok(())
}

fn is(error: &aya::sys::SyscallError, errno: rustix::io::Errno) -> bool {
    error.io_error.raw_os_error() == Some(errno.raw_os_error())
}

fn hash<K: Plain, V: Plain>(
    from: &Path,
    to: &Path,
    name: &'static str,
) -> Result<(), DataplaneError> {
    let source: HashMap<MapData, K, V> = pinned(from, name)?;
    let mut target: HashMap<MapData, K, V> = pinned(to, name)?;
    source
        .iter()
        .try_for_each(|row| row.and_then(|(key, value)| target.insert(key, value, 0)))
        .map_err(|source| DataplaneError::map("copy", name, source))
}

fn sources(from: &Path, to: &Path, name: &'static str) -> Result<(), DataplaneError> {
    let source: LpmTrie<MapData, Source, u32> = pinned(from, name)?;
    let mut target: LpmTrie<MapData, Source, u32> = pinned(to, name)?;
    source
        .iter()
        .try_for_each(|row| row.and_then(|(key, value)| target.insert(&key, value, 0)))
        .map_err(|source| DataplaneError::map("copy", name, source))
}

fn array<V: Plain>(from: &Path, to: &Path, name: &'static str) -> Result<(), DataplaneError> {
    let source: Array<MapData, V> = pinned(from, name)?;
    let mut target: Array<MapData, V> = pinned(to, name)?;
    source
        .iter()
        .zip(0..)
        .try_for_each(|(row, at)| row.and_then(|row| target.set(at, row, 0)))
        .map_err(|source| DataplaneError::map("copy", name, source))
}

fn counters<V: Plain>(from: &Path, to: &Path, name: &'static str) -> Result<(), DataplaneError> {
    let source: PerCpuArray<MapData, V> = pinned(from, name)?;
    let mut target: PerCpuArray<MapData, V> = pinned(to, name)?;
    source
        .iter()
        .zip(0..)
        .try_for_each(|(row, at)| row.and_then(|row| target.set(at, row, 0)))
        .map_err(|source| DataplaneError::map("copy", name, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_map_is_taken_over_or_left_for_a_reason() {
        let flows = [map::LIVING, map::LIVING_REPLY, map::YOUNG, map::DIRECT];
        let left = [
            map::PRESSURE,    // set again by the first insert that finds no room
            map::BUCKET,      // fills within a second
            map::REFLECTIONS, // probes are sent several times a second
            map::SHUNNED,     // lasts a second
            map::ENDINGS,     // read by an agent of its own layout
            map::EVENTS,
            map::WATCH,
            map::TELLING,
        ];
        let rows = ROWS.map(|(name, _)| name);
        let mut all: Vec<_> = rows.into_iter().chain(flows).chain(left).collect();
        all.sort_unstable();
        let mut wanted = map::ALL.to_vec();
        wanted.sort_unstable();
        assert_eq!(all, wanted);
        assert_eq!(
            rows.last(),
            Some(&map::UPLINKS),
            "it says that all is copied"
        );
    }
}
