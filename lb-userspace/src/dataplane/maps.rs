//! The pinned maps: made from the object's definitions, checked against them, read and written as rows.

use std::collections::BTreeSet;
use std::path::Path;

use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, Map, MapData, MapError, MapType, PerCpuArray, PerCpuValues};
use aya_obj::Object;
use aya_obj::generated::bpf_map_type;
use lb_common::{
    Addr, Backend, BackendInfo, Control, Peer, PeerInfo, PeerMac, Pod, PodPort, PortInfo, Service,
    ServiceKey, Source, Traffic, Uplink, Vip, map,
};
use tracing::warn;

use super::rows::{Rows, Write, share};
use super::{DataplaneError, Options, batch, pins};

/// Opens a pinned map as what it should be.
pub(super) fn pinned<T>(dir: &Path, name: &'static str) -> Result<T, DataplaneError>
where
    T: TryFrom<Map, Error = MapError>,
{
    MapData::from_pin(dir.join(name))
        .and_then(Map::from_map_data)
        .and_then(T::try_from)
        .map_err(|source| DataplaneError::map("open", name, source))
}

/// Every pinned map, by name: who holds them can pin them again.
pub(super) fn all(dir: &Path) -> Result<Vec<(&'static str, MapData)>, DataplaneError> {
    let open = |name: &&'static str| data(dir, name).map(|data| (*name, data));
    map::ALL.iter().map(open).collect()
}

fn data(dir: &Path, name: &'static str) -> Result<MapData, DataplaneError> {
    MapData::from_pin(dir.join(name)).map_err(|source| DataplaneError::map("open", name, source))
}

/// The process that wrote `control` last, whether it lives or not.
pub(super) fn agent_pid(root: &Path) -> Option<u32> {
    let control: Array<MapData, Control> = pinned(&pins::layout_dir(root), map::CONTROL).ok()?;
    let pid = control.get(&0, 0).ok()?.agent_pid;
    (pid != 0).then_some(pid)
}

/// Rows of the `uplinks` map, or none where it cannot be read.
pub(super) fn uplinks(root: &Path) -> Vec<Uplink> {
    let dir = pins::layout_dir(root);
    let map: Result<Array<MapData, Uplink>, _> = pinned(&dir, map::UPLINKS);
    map.map_or_else(
        |_| Vec::new(),
        |map| map.iter().filter_map(Result::ok).collect(),
    )
}

/// Checks that maps which are pinned already are what the object takes them for: aya reuses a pin
/// without looking, and a program would read and write past its values.
pub(super) fn check(dir: &Path, options: &Options) -> Result<(), DataplaneError> {
    let object =
        Object::parse(crate::OBJECT).map_err(|error| DataplaneError::Object(error.to_string()))?;
    let (here, missing): (Vec<&str>, Vec<&str>) =
        map::ALL.iter().partition(|name| dir.join(name).exists());
    if !here.is_empty() && !missing.is_empty() {
        warn!(
            root = %dir.display(),
            ?missing,
            "pinned maps are missing: they are made again, empty"
        );
    }
    for name in map::ALL {
        let wanted = object
            .maps
            .get(name)
            .ok_or_else(|| DataplaneError::Object(format!("it has no map `{name}`")))?;
        let path = dir.join(name);
        if !path.exists() {
            continue;
        }
        let failed = |source| DataplaneError::map("look at", name, source);
        let found = MapData::from_pin(&path)
            .and_then(|data| data.info())
            .map_err(failed)?;
        let wanted_type = bpf_map_type::try_from(wanted.map_type())
            .map_err(|_| DataplaneError::Object(format!("map `{name}` has an unknown type")))?;
        let wanted_type = MapType::try_from(wanted_type).map_err(failed)?;
        let found_type = found.map_type().map_err(failed)?;
        let mismatch = |field, found: String, wanted: String| DataplaneError::Layout {
            path: path.clone(),
            field,
            found,
            wanted,
        };
        if found_type != wanted_type {
            return Err(mismatch(
                "type",
                format!("{found_type:?}"),
                format!("{wanted_type:?}"),
            ));
        }
        let size = capacity(name, options).unwrap_or(wanted.max_entries());
        let is_sized = capacity(name, options).is_some();
        if is_sized && found.max_entries() != size {
            warn!(
                map = name,
                pinned = found.max_entries(),
                configured = size,
                "the flow table keeps the size it was made with; `ironlb unload` and a new start change it"
            );
        }
        let fields = [
            ("key size", found.key_size(), wanted.key_size()),
            ("value size", found.value_size(), wanted.value_size()),
            ("flags", found.map_flags(), wanted.map_flags()),
            (
                "number of entries",
                found.max_entries(),
                if is_sized { found.max_entries() } else { size },
            ),
        ];
        for (field, found, wanted) in fields {
            if found != wanted {
                return Err(mismatch(field, found.to_string(), wanted.to_string()));
            }
        }
    }
    Ok(())
}

/// How many entries the options give a map, if they say.
pub(super) fn capacity(name: &str, options: &Options) -> Option<u32> {
    match name {
        map::LIVING | map::LIVING_REPLY => Some(options.living_flows),
        map::YOUNG => Some(options.young_flows),
        _ => None,
    }
}

/// The maps that the agent writes.
pub(super) struct Maps {
    uplinks: Array<MapData, Uplink>,
    vips: HashMap<MapData, Addr, Vip>,
    services: HashMap<MapData, ServiceKey, Service>,
    backends: Array<MapData, Backend>,
    pod_ports: HashMap<MapData, ServiceKey, PodPort>,
    pods: HashMap<MapData, Addr, Pod>,
    port_info: Array<MapData, PortInfo>,
    backend_info: Array<MapData, BackendInfo>,
    control: Array<MapData, Control>,
    port_stats: PerCpuArray<MapData, Traffic>,
    backend_stats: PerCpuArray<MapData, Traffic>,
    peers: Array<MapData, Peer>,
    peer_macs: HashMap<MapData, PeerMac, u32>,
    peer_info: Array<MapData, PeerInfo>,
    peer_stats: PerCpuArray<MapData, Traffic>,
    sources: LpmTrie<MapData, Source, u32>,
    bulk: Bulk,
}

/// Entries of one system call. More would save nothing, and take pages from the system that are new each time.
const BULK: usize = 256;

/// The maps that have a row for each backend, once more: see [`batch`].
struct Bulk {
    backends: MapData,
    backend_info: MapData,
    pod_ports: MapData,
    pods: MapData,
}

impl Maps {
    /// Opens them.
    pub(super) fn open(dir: &Path) -> Result<Self, DataplaneError> {
        Ok(Self {
            uplinks: pinned(dir, map::UPLINKS)?,
            vips: pinned(dir, map::VIPS)?,
            services: pinned(dir, map::SERVICES)?,
            backends: pinned(dir, map::BACKENDS)?,
            pod_ports: pinned(dir, map::POD_PORTS)?,
            pods: pinned(dir, map::PODS)?,
            port_info: pinned(dir, map::PORT_INFO)?,
            backend_info: pinned(dir, map::BACKEND_INFO)?,
            control: pinned(dir, map::CONTROL)?,
            port_stats: pinned(dir, map::PORT_STATS)?,
            backend_stats: pinned(dir, map::BACKEND_STATS)?,
            peers: pinned(dir, map::PEERS)?,
            peer_macs: pinned(dir, map::PEER_MACS)?,
            peer_info: pinned(dir, map::PEER_INFO)?,
            peer_stats: pinned(dir, map::PEER_STATS)?,
            sources: pinned(dir, map::SOURCES)?,
            bulk: Bulk {
                backends: data(dir, map::BACKENDS)?,
                backend_info: data(dir, map::BACKEND_INFO)?,
                pod_ports: data(dir, map::POD_PORTS)?,
                pods: data(dir, map::PODS)?,
            },
        })
    }

    /// Reads all rows. Nobody else writes these maps.
    pub(super) fn rows(&self) -> Result<Rows, DataplaneError> {
        let rows = Rows {
            uplinks: array(&self.uplinks, map::UPLINKS)?,
            vips: hash(&self.vips, map::VIPS)?,
            services: hash(&self.services, map::SERVICES)?,
            backends: array(&self.backends, map::BACKENDS)?,
            pod_ports: hash(&self.pod_ports, map::POD_PORTS)?,
            pods: hash(&self.pods, map::PODS)?,
            port_info: array(&self.port_info, map::PORT_INFO)?,
            backend_info: share(array(&self.backend_info, map::BACKEND_INFO)?),
            control: self
                .control
                .get(&0, 0)
                .map_err(|source| DataplaneError::map("read", map::CONTROL, source))?,
            peers: array(&self.peers, map::PEERS)?,
            peer_macs: hash(&self.peer_macs, map::PEER_MACS)?,
            peer_info: array(&self.peer_info, map::PEER_INFO)?,
            sources: sources(&self.sources)?,
            version: 0,
        };
        let version = rows.services.values().map(|s| s.version).max().unwrap_or(0);
        Ok(Rows { version, ..rows })
    }

    /// Does the first write and those after it that one system call can do with it. Returns how many are done.
    pub(super) fn execute(&mut self, writes: &[Write]) -> (usize, Result<(), DataplaneError>) {
        let bulk = &self.bulk;
        let (name, done) = match &writes[0] {
            Write::BackendInfo(..) => {
                return run(
                    &bulk.backend_info,
                    map::BACKEND_INFO,
                    writes,
                    |write| match write {
                        Write::BackendInfo(index, row) => Some((u32::from(*index), **row)),
                        _ => None,
                    },
                );
            }
            Write::Backend(..) => {
                return run(&bulk.backends, map::BACKENDS, writes, |write| match write {
                    Write::Backend(index, row) => Some((u32::from(*index), *row)),
                    _ => None,
                });
            }
            Write::Pod(..) => {
                return run(&bulk.pods, map::PODS, writes, |write| match write {
                    Write::Pod(addr, row) => Some((*addr, *row)),
                    _ => None,
                });
            }
            Write::PodPort(..) => {
                return run(
                    &bulk.pod_ports,
                    map::POD_PORTS,
                    writes,
                    |write| match write {
                        Write::PodPort(key, row) => Some((*key, **row)),
                        _ => None,
                    },
                );
            }
            Write::Uplink(slot, row) => (map::UPLINKS, self.uplinks.set(*slot, **row, 0)),
            Write::Control(row) => (map::CONTROL, self.control.set(0, **row, 0)),
            Write::PortInfo(id, row) => {
                (map::PORT_INFO, self.port_info.set((*id).into(), **row, 0))
            }
            Write::ResetPortStats(id) => (map::PORT_STATS, reset(&mut self.port_stats, *id)),
            Write::ResetBackendStats(index) => {
                (map::BACKEND_STATS, reset(&mut self.backend_stats, *index))
            }
            Write::RemovePod(addr) => (map::PODS, self.pods.remove(addr)),
            Write::RemovePodPort(key) => (map::POD_PORTS, self.pod_ports.remove(key)),
            Write::Service(key, row) => (map::SERVICES, self.services.insert(key, **row, 0)),
            Write::RemoveService(key) => (map::SERVICES, self.services.remove(key)),
            Write::Source(prefix, source) => {
                let key = Key::new(*prefix, *source);
                (map::SOURCES, self.sources.insert(&key, 1, 0))
            }
            Write::RemoveSource(prefix, source) => {
                let key = Key::new(*prefix, *source);
                (map::SOURCES, self.sources.remove(&key))
            }
            Write::Vip(addr, row) => (map::VIPS, self.vips.insert(addr, **row, 0)),
            Write::RemoveVip(addr) => (map::VIPS, self.vips.remove(addr)),
            Write::Peer(link, row) => (map::PEERS, self.peers.set(*link, **row, 0)),
            Write::PeerMac(mac, number) => (map::PEER_MACS, self.peer_macs.insert(mac, number, 0)),
            Write::RemovePeerMac(mac) => (map::PEER_MACS, self.peer_macs.remove(mac)),
            Write::PeerInfo(number, row) => (map::PEER_INFO, self.peer_info.set(*number, **row, 0)),
            Write::ResetPeerStats(number) => {
                (map::PEER_STATS, reset(&mut self.peer_stats, *number as u16))
            }
        };
        match done {
            Ok(()) => (1, Ok(())),
            Err(source) => (0, Err(DataplaneError::map("write", name, source))),
        }
    }
}

/// Does the writes of one kind at the beginning of `writes`, not more than [`BULK`] of them.
fn run<K: aya::Pod, V: aya::Pod>(
    map: &MapData,
    name: &'static str,
    writes: &[Write],
    entry: impl Fn(&Write) -> Option<(K, V)>,
) -> (usize, Result<(), DataplaneError>) {
    let entries = writes.iter().take(BULK).map_while(entry);
    let (keys, values): (Vec<K>, Vec<V>) = entries.unzip();
    match batch::update(map, &keys, &values) {
        Ok(()) => (keys.len(), Ok(())),
        Err((written, source)) => (
            written,
            Err(DataplaneError::map("write", name, source.into())),
        ),
    }
}

fn reset(stats: &mut PerCpuArray<MapData, Traffic>, index: u16) -> Result<(), MapError> {
    let cpus = aya::util::nr_cpus().map_err(|(_, error)| error)?;
    let zero = PerCpuValues::try_from(vec![Traffic::default(); cpus])?;
    stats.set(index.into(), zero, 0)
}

fn array<V: aya::Pod>(
    map: &Array<MapData, V>,
    name: &'static str,
) -> Result<Vec<V>, DataplaneError> {
    map.iter()
        .collect::<Result<_, _>>()
        .map_err(|source| DataplaneError::map("read", name, source))
}

/// Source ranges, each with the length of its prefix.
pub(super) fn sources(
    map: &LpmTrie<MapData, Source, u32>,
) -> Result<BTreeSet<(u32, Source)>, DataplaneError> {
    map.keys()
        .map(|key| key.map(|key| (key.prefix_len(), key.data())))
        .collect::<Result<_, _>>()
        .map_err(|source| DataplaneError::map("read", map::SOURCES, source))
}

fn hash<K, V, C>(map: &HashMap<MapData, K, V>, name: &'static str) -> Result<C, DataplaneError>
where
    K: aya::Pod,
    V: aya::Pod,
    C: FromIterator<(K, V)>,
{
    map.iter()
        .collect::<Result<_, _>>()
        .map_err(|source| DataplaneError::map("read", name, source))
}
