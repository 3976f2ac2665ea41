//! The pinned maps of a node, read (and where a test must, written) as any tool could.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use aya::maps::{Array, HashMap, Map, MapData, PerCpuArray, loaded_maps};
use aya::programs::{loaded_links, loaded_programs};
use lb_common::layout::{Addr, Control, Flow, FlowKey, LAYOUT_VERSION, Vip, map};
use lb_common::verdict::Verdict;

/// Opens maps below a pin root.
#[derive(Clone, Debug)]
pub struct Maps {
    directory: PathBuf,
}

impl Maps {
    pub(crate) fn new(bpffs: &Path) -> Self {
        Self {
            directory: bpffs.join(format!("v{LAYOUT_VERSION}")),
        }
    }

    /// Where a map is pinned.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn open(&self, name: &str) -> Result<MapData> {
        let path = self.path(name);
        MapData::from_pin(&path).with_context(|| format!("cannot open the map {}", path.display()))
    }

    /// The one value of an array.
    ///
    /// # Errors
    /// When the map is not there.
    pub fn first<V: aya::Pod>(&self, name: &str) -> Result<V> {
        let map = Array::<_, V>::try_from(Map::Array(self.open(name)?))?;
        Ok(map.get(&0, 0)?)
    }

    /// What the agent tells.
    ///
    /// # Errors
    /// When the map is not there.
    pub fn control(&self) -> Result<Control> {
        let map = Array::<_, Control>::try_from(Map::Array(self.open(map::CONTROL)?))?;
        Ok(map.get(&0, 0)?)
    }

    /// Packets that ended with `verdict`, of all processors.
    ///
    /// # Errors
    /// When the map is not there.
    pub fn verdict(&self, verdict: Verdict) -> Result<u64> {
        let map = PerCpuArray::<_, u64>::try_from(Map::PerCpuArray(self.open(map::VERDICTS)?))?;
        Ok(map.get(&(verdict as u32), 0)?.iter().sum())
    }

    fn flows(&self, name: &str) -> Result<HashMap<MapData, FlowKey, Flow>> {
        Ok(HashMap::try_from(Map::HashMap(self.open(name)?))?)
    }

    /// Keys of the living flows, in the map's order ([`map::LIVING`] or [`map::LIVING_REPLY`]).
    ///
    /// # Errors
    /// When the map is not there.
    pub fn living(&self, name: &str) -> Result<Vec<(FlowKey, Flow)>> {
        let flows = self.flows(name)?;
        let listed = flows.iter().collect::<Result<_, _>>();
        listed.with_context(|| format!("cannot list {name}"))
    }

    /// Removes the entry of a flow, as if it had been lost.
    ///
    /// # Errors
    /// When it is not there.
    pub fn lose(&self, name: &str, key: &FlowKey) -> Result<()> {
        self.flows(name)?
            .remove(key)
            .with_context(|| format!("cannot remove an entry of {name}"))
    }

    /// Makes all entries of living flows look as if their last packet had been so many jiffies earlier.
    ///
    /// # Errors
    /// When the maps are not there.
    pub fn age(&self, jiffies: u32) -> Result<()> {
        for name in [map::LIVING, map::LIVING_REPLY] {
            let mut flows = self.flows(name)?;
            for (key, mut flow) in self.living(name)? {
                flow.last_seen = flow.last_seen.wrapping_sub(jiffies);
                flows.insert(key, flow, 0)?;
            }
        }
        Ok(())
    }

    /// Sets until when ARP questions for `vip` are answered: boot-time nanoseconds.
    ///
    /// # Errors
    /// When the VIP is not there.
    pub fn set_answer_until(&self, vip: Ipv4Addr, until: u64) -> Result<()> {
        let mut vips = HashMap::<_, Addr, Vip>::try_from(Map::HashMap(self.open(map::VIPS)?))?;
        let key = Addr::from_v4_raw(u32::from_ne_bytes(vip.octets()));
        let mut value = vips
            .get(&key, 0)
            .with_context(|| format!("{vip} is not in {}", map::VIPS))?;
        value.answer_until = until;
        Ok(vips.insert(key, value, 0)?)
    }

    /// Everything in the kernel that belongs to these maps.
    ///
    /// # Errors
    /// When the maps are not there or the kernel does not list its objects.
    pub fn kernel_objects(&self) -> Result<KernelObjects> {
        let mut objects = KernelObjects::default();
        for name in map::ALL {
            objects.maps.insert(self.open(name)?.info()?.id());
        }
        for program in loaded_programs() {
            // It may have gone between being listed and being asked.
            let Ok(program) = program else { continue };
            let used = program.map_ids().ok().flatten().unwrap_or_default();
            if used.iter().any(|id| objects.maps.contains(id)) {
                let name = program.name_as_str().unwrap_or_default();
                objects.programs.insert(program.id(), name.to_owned());
            }
        }
        for link in loaded_links().flatten() {
            if objects.programs.contains_key(&link.program_id()) {
                objects.links.insert(link.id(), link.program_id());
            }
        }
        Ok(objects)
    }
}

/// Ids of BPF objects in the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelObjects {
    /// Maps.
    pub maps: BTreeSet<u32>,
    /// Programs that use them, with their names.
    pub programs: BTreeMap<u32, String>,
    /// Links of these programs: link to program.
    pub links: BTreeMap<u32, u32>,
}

impl KernelObjects {
    /// Those of them that the kernel still has.
    pub fn left(&self) -> Self {
        let maps: BTreeSet<_> = loaded_maps().flatten().map(|map| map.id()).collect();
        let programs: BTreeSet<_> = loaded_programs().flatten().map(|p| p.id()).collect();
        let links: BTreeSet<_> = loaded_links().flatten().map(|link| link.id()).collect();
        let mut left = self.clone();
        left.maps.retain(|id| maps.contains(id));
        left.programs.retain(|id, _| programs.contains(id));
        left.links.retain(|id, _| links.contains(id));
        left
    }
}
