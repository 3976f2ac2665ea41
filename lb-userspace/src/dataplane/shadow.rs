//! The object a second time, beside what serves: its programs run on a packet that nobody sent, and what they would
//! write goes into copies.
//!
//! Maps that the programs only read are the pinned ones. All that they write is private to this load and bears no pin;
//! what lies in it is copied from the pinned map. So nothing of the programs needs to know of it, and what they would
//! change is what the copy differs by afterwards.

use std::collections::HashMap as Index;
use std::hash::Hash;
use std::path::Path;

use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, PerCpuValues};
use aya::programs::{ProgramError, SchedClassifier, TestRun, TestRunOptions, TestRunResult, Xdp};
use aya::{Ebpf, EbpfLoader};
use lb_common::{Bucket, Flow, FlowKey, Pressure, Reflection, Verdict, global, map, program};

use super::attach::{SLOTS, load_error, load_program, typed};
use super::error::chain;
use super::read::Reader;
use super::{DataplaneError, Options, maps, pins, ticks_per_second};

/// What becomes of a map in the second load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// The pinned one: no program writes it, or the verifier would refuse it with this map made read-only (a test does).
    Shared,
    /// A copy; what a run changes in it is told.
    Compared,
    /// A copy; what a run changes in it concerns nobody.
    Copied,
    /// New and empty: counters, and what the programs only write.
    Fresh,
}

/// Every map, so that a new one is decided about. What the object has beside them (`scratch`, constants) has no pin and is
/// private anyway.
pub const USES: [(&str, Use); map::ALL.len()] = [
    (map::UPLINKS, Use::Shared),
    (map::VIPS, Use::Shared),
    (map::SERVICES, Use::Shared),
    (map::BACKENDS, Use::Shared),
    (map::POD_PORTS, Use::Shared),
    (map::PODS, Use::Shared),
    (map::LIVING, Use::Compared),
    (map::LIVING_REPLY, Use::Compared),
    (map::YOUNG, Use::Compared),
    (map::DIRECT, Use::Compared),
    (map::VERDICTS, Use::Fresh),
    (map::PORT_STATS, Use::Fresh),
    (map::BACKEND_STATS, Use::Fresh),
    (map::PORT_INFO, Use::Shared),
    (map::BACKEND_INFO, Use::Shared),
    (map::CONTROL, Use::Shared),
    (map::PRESSURE, Use::Compared),
    (map::BUCKET, Use::Copied),
    (map::PEERS, Use::Shared),
    (map::PEER_MACS, Use::Shared),
    (map::PEER_INFO, Use::Shared),
    (map::PEER_STATS, Use::Fresh),
    (map::REFLECTIONS, Use::Compared),
    (map::EXCEPTIONS, Use::Shared),
    (map::ANNOUNCERS, Use::Shared),
    (map::SOURCES, Use::Shared),
    (map::SHUNNED, Use::Compared),
    (map::ENDINGS, Use::Fresh),
    (map::EVENTS, Use::Fresh),
    // Nobody watches a trace.
    (map::WATCH, Use::Fresh),
    (map::TELLING, Use::Fresh),
];

/// The longest frame that a run takes: the kernel wants it in one page with room before and behind.
pub(super) const LONGEST: usize = 3000;
/// The shortest: an Ethernet header.
pub(super) const SHORTEST: usize = 14;
/// Room that an LRU needs per CPU beside its entries not to evict some of them while it is filled.
const LRU_SLACK: u32 = 256;

/// The programs of one attachment with maps of their own.
pub(super) struct Shadow {
    object: Ebpf,
    program: &'static str,
    verdicts: PerCpuArray<MapData, u64>,
    bucket: PerCpuArray<MapData, Bucket>,
    tokens: Vec<Bucket>,
    /// The tables that programs write.
    pub(super) tables: Tables,
    /// The kernel's hash of the program's instructions.
    pub(super) tag: u64,
}

/// What a run did.
pub(super) struct Outcome {
    /// What the program returned.
    pub(super) returned: u32,
    /// The verdict that it counted.
    pub(super) verdict: Verdict,
    /// The frame after it.
    pub(super) frame: Vec<u8>,
    /// What it changed in the tables.
    pub(super) changes: Changes,
}

/// Tables that programs write, one map each.
pub(super) struct Tables {
    pub(super) living: Table<HashMap<MapData, FlowKey, Flow>>,
    pub(super) living_reply: Table<HashMap<MapData, FlowKey, Flow>>,
    pub(super) young: Table<HashMap<MapData, FlowKey, Flow>>,
    direct: Table<HashMap<MapData, FlowKey, u64>>,
    pressure: Table<Array<MapData, Pressure>>,
    reflections: Table<Array<MapData, Reflection>>,
    pub(super) shunned: Table<Array<MapData, u64>>,
}

/// What a run changed.
pub(super) struct Changes {
    /// In [`map::LIVING`], [`map::LIVING_REPLY`] and [`map::YOUNG`].
    pub(super) flows: Vec<(&'static str, Difference<FlowKey, Flow>)>,
    pub(super) direct: Vec<Difference<FlowKey, u64>>,
    pub(super) pressure: Vec<Difference<u32, Pressure>>,
    pub(super) reflections: Vec<Difference<u32, Reflection>>,
    pub(super) shunned: Vec<Difference<u32, u64>>,
}

impl Changes {
    /// The lower half of the kernel's count of ticks during the run, where an entry was given it.
    pub(super) fn ticks(&self) -> Option<u32> {
        let half = |ticks: Option<u64>| ticks.map(|ticks| ticks as u32);
        let flows = self.flows.iter().map(|(_, change)| {
            let seen = |flow: Option<Flow>| flow.map(|flow| flow.last_seen);
            (seen(change.before), seen(change.after))
        });
        let direct = self
            .direct
            .iter()
            .map(|change| (half(change.before), half(change.after)));
        let shunned = self
            .shunned
            .iter()
            .map(|change| (half(change.before), half(change.after)));
        flows
            .chain(direct)
            .chain(shunned)
            .filter(|(before, after)| before != after)
            .filter_map(|(_, after)| after)
            // The latest, also where it has wrapped.
            .reduce(|a, b| if a.wrapping_sub(b) < 1 << 31 { a } else { b })
    }
}

/// An entry that is another one than before, or was not there before, or is no longer.
#[derive(Clone, Copy)]
pub(super) struct Difference<K, V> {
    pub(super) key: K,
    pub(super) before: Option<V>,
    pub(super) after: Option<V>,
}

impl Shadow {
    /// Loads the object as for an attachment, and copies what lies in the maps.
    pub(super) fn load(
        root: &Path,
        slot: u32,
        program: &'static str,
    ) -> Result<Self, DataplaneError> {
        let reader = Reader::open(root)?;
        // What were missing would be made and pinned.
        let missing = pins::missing(root);
        if !missing.is_empty() {
            return Err(DataplaneError::Incomplete {
                path: root.to_owned(),
                missing: missing.join(", "),
            });
        }
        let dir = pins::layout_dir(root);
        let options = Options {
            bpffs: root.to_owned(),
            living_flows: reader.capacity(map::LIVING)?,
            young_flows: reader.capacity(map::YOUNG)?,
        };
        maps::check(&dir, &options)?;
        super::raise_memlock();
        let ticks = ticks_per_second();
        let cpus = aya::util::nr_cpus().map_or(1, |cpus| cpus as u32);
        let mut loader = EbpfLoader::new();
        loader
            .override_global(global::TICKS_PER_SECOND, &ticks, true)
            .override_global(global::UPLINK, &SLOTS[slot as usize], true);
        for (name, kind) in USES {
            match (kind, name) {
                (Use::Shared, _) => {
                    loader.map_pin_path(name, dir.join(name));
                }
                // As full as the live one, or there would be room where there is none.
                (_, map::LIVING | map::LIVING_REPLY) => {
                    loader.map_max_entries(name, options.living_flows);
                }
                (_, map::YOUNG | map::DIRECT) => {
                    let room = reader.capacity(name)?.saturating_add(LRU_SLACK * cpus);
                    loader.map_max_entries(name, room);
                }
                _ => {}
            }
        }
        let mut object = loader
            .load(crate::OBJECT)
            .map_err(|error| load_error("ironlb-bpf", &error))?;
        let tables = Tables {
            living: hash(&mut object, &reader, map::LIVING)?,
            living_reply: hash(&mut object, &reader, map::LIVING_REPLY)?,
            young: hash(&mut object, &reader, map::YOUNG)?,
            direct: hash(&mut object, &reader, map::DIRECT)?,
            pressure: array(&mut object, &reader, map::PRESSURE)?,
            reflections: array(&mut object, &reader, map::REFLECTIONS)?,
            shunned: array(&mut object, &reader, map::SHUNNED)?,
        };
        let verdicts = take(&mut object, map::VERDICTS)?;
        let bucket = take(&mut object, map::BUCKET)?;
        let live: PerCpuArray<MapData, Bucket> = maps::pinned(&dir, map::BUCKET)?;
        let tokens = live
            .get(&0, 0)
            .map_err(|source| DataplaneError::map("read", map::BUCKET, source))?
            .to_vec();
        let tag = load_program(&mut object, program)?.tag();
        Ok(Self {
            object,
            program,
            verdicts,
            bucket,
            tokens,
            tables,
            tag,
        })
    }

    /// Runs the program on a frame, and makes the tables what they were before.
    pub(super) fn run(&mut self, frame: &[u8]) -> Result<Outcome, DataplaneError> {
        let failed = |source| DataplaneError::map("write", map::BUCKET, source);
        let tokens = PerCpuValues::try_from(self.tokens.clone())
            .map_err(|error| failed(MapError::from(error)))?;
        self.bucket.set(0, tokens, 0).map_err(failed)?;
        let before = self.counted()?;
        // An answer may be longer than the question.
        let mut out = vec![0; frame.len() + 256];
        let options = TestRunOptions {
            data_in: Some(frame),
            data_out: Some(&mut out),
            ..TestRunOptions::new()
        };
        let result = test_run(&mut self.object, self.program, options)?.map_err(|error| {
            DataplaneError::Run {
                program: self.program,
                length: frame.len(),
                reason: chain(&error),
            }
        })?;
        out.truncate(result.data_size_out as usize);
        let after = self.counted()?;
        let counted = before.iter().zip(&after).zip(Verdict::ALL);
        let mut counted = counted.filter(|((before, after), _)| before != after);
        let (Some((_, verdict)), None) = (counted.next(), counted.next()) else {
            return Err(DataplaneError::Object(format!(
                "`{}` did not count one verdict for a packet",
                self.program
            )));
        };
        let changes = self.tables.changes()?;
        self.tables.undo(&changes)?;
        Ok(Outcome {
            returned: result.return_value,
            verdict: *verdict,
            frame: out,
            changes,
        })
    }

    fn counted(&self) -> Result<Vec<u64>, DataplaneError> {
        let read = |verdict: &Verdict| {
            let counter = self.verdicts.get(&(*verdict as u32), 0);
            counter.map(|values| values.iter().sum())
        };
        let counted = Verdict::ALL.iter().map(read).collect::<Result<_, _>>();
        counted.map_err(|source| DataplaneError::map("read", map::VERDICTS, source))
    }
}

fn test_run(
    object: &mut Ebpf,
    name: &'static str,
    options: TestRunOptions<'_>,
) -> Result<Result<TestRunResult, ProgramError>, DataplaneError> {
    Ok(match name {
        program::XDP | program::XDP_PLAIN => typed::<Xdp>(object, name)?.test_run(options),
        _ => typed::<SchedClassifier>(object, name)?.test_run(options),
    })
}

impl Tables {
    fn changes(&self) -> Result<Changes, DataplaneError> {
        let mut flows = Vec::new();
        for table in [&self.living, &self.living_reply, &self.young] {
            let differences = table.differences()?.into_iter();
            flows.extend(differences.map(|difference| (table.name, difference)));
        }
        Ok(Changes {
            flows,
            direct: self.direct.differences()?,
            pressure: self.pressure.differences()?,
            reflections: self.reflections.differences()?,
            shunned: self.shunned.differences()?,
        })
    }

    fn undo(&mut self, changes: &Changes) -> Result<(), DataplaneError> {
        for (name, difference) in &changes.flows {
            let table = match *name {
                map::LIVING => &mut self.living,
                map::LIVING_REPLY => &mut self.living_reply,
                _ => &mut self.young,
            };
            table.undo(std::slice::from_ref(difference))?;
        }
        self.direct.undo(&changes.direct)?;
        self.pressure.undo(&changes.pressure)?;
        self.reflections.undo(&changes.reflections)?;
        self.shunned.undo(&changes.shunned)
    }
}

/// What differs in a table.
type Differences<S> = Vec<Difference<<S as Store>::Key, <S as Store>::Value>>;

/// A private map, and what was copied into it.
pub(super) struct Table<S: Store> {
    name: &'static str,
    store: S,
    /// As it was copied.
    pub(super) held: Index<S::Key, S::Value>,
}

impl<S: Store> Table<S> {
    fn fill(
        name: &'static str,
        mut store: S,
        live: impl Iterator<Item = (S::Key, S::Value)>,
    ) -> Result<Self, DataplaneError> {
        // An array begins with zeroes, and most of it stays so.
        let mut held = store
            .all()
            .map_err(|source| DataplaneError::map("read", name, source))?;
        for (key, value) in live {
            if held.get(&key) != Some(&value) {
                store
                    .put(&key, &value)
                    .map_err(|source| DataplaneError::map("copy", name, source))?;
                held.insert(key, value);
            }
        }
        Ok(Self { name, store, held })
    }

    fn differences(&self) -> Result<Differences<S>, DataplaneError> {
        let mut now = self
            .store
            .all()
            .map_err(|source| DataplaneError::map("read", self.name, source))?;
        let mut differences = Vec::new();
        for (key, before) in &self.held {
            let after = now.remove(key);
            if after.as_ref() != Some(before) {
                differences.push(Difference {
                    key: *key,
                    before: Some(*before),
                    after,
                });
            }
        }
        differences.extend(now.into_iter().map(|(key, value)| Difference {
            key,
            before: None,
            after: Some(value),
        }));
        Ok(differences)
    }

    fn undo(&mut self, differences: &[Difference<S::Key, S::Value>]) -> Result<(), DataplaneError> {
        for Difference { key, before, .. } in differences {
            let undone = match before {
                Some(value) => self.store.put(key, value),
                None => self.store.remove(key),
            };
            undone.map_err(|source| DataplaneError::map("write", self.name, source))?;
        }
        Ok(())
    }
}

/// What a table is kept in.
pub(super) trait Store {
    type Key: Copy + Eq + Hash;
    type Value: Copy + PartialEq;
    fn all(&self) -> Result<Index<Self::Key, Self::Value>, MapError>;
    fn put(&mut self, key: &Self::Key, value: &Self::Value) -> Result<(), MapError>;
    fn remove(&mut self, key: &Self::Key) -> Result<(), MapError>;
}

impl<K, V> Store for HashMap<MapData, K, V>
where
    K: aya::Pod + Eq + Hash,
    V: aya::Pod + PartialEq,
{
    type Key = K;
    type Value = V;

    fn all(&self) -> Result<Index<K, V>, MapError> {
        self.iter().collect()
    }

    fn put(&mut self, key: &K, value: &V) -> Result<(), MapError> {
        self.insert(key, value, 0)
    }

    fn remove(&mut self, key: &K) -> Result<(), MapError> {
        Self::remove(self, key)
    }
}

impl<V: aya::Pod + PartialEq> Store for Array<MapData, V> {
    type Key = u32;
    type Value = V;

    fn all(&self) -> Result<Index<u32, V>, MapError> {
        let numbered = (0..).zip(self.iter());
        numbered.map(|(at, value)| Ok((at, value?))).collect()
    }

    fn put(&mut self, key: &u32, value: &V) -> Result<(), MapError> {
        self.set(*key, value, 0)
    }

    fn remove(&mut self, _key: &u32) -> Result<(), MapError> {
        // An array has all its entries always.
        Err(MapError::KeyNotFound)
    }
}

fn take<T>(object: &mut Ebpf, name: &'static str) -> Result<T, DataplaneError>
where
    T: TryFrom<Map, Error = MapError>,
{
    let map = object
        .take_map(name)
        .ok_or_else(|| DataplaneError::Object(format!("it has no map `{name}`")))?;
    T::try_from(map).map_err(|source| DataplaneError::map("open", name, source))
}

fn hash<K, V>(
    object: &mut Ebpf,
    reader: &Reader,
    name: &'static str,
) -> Result<Table<HashMap<MapData, K, V>>, DataplaneError>
where
    K: aya::Pod + Eq + Hash,
    V: aya::Pod + PartialEq,
{
    let live = reader.hash::<K, V>(name)?;
    Table::fill(name, take(object, name)?, live.into_iter())
}

fn array<V: aya::Pod + PartialEq>(
    object: &mut Ebpf,
    reader: &Reader,
    name: &'static str,
) -> Result<Table<Array<MapData, V>>, DataplaneError> {
    let live = reader.array::<V>(name)?;
    Table::fill(name, take(object, name)?, (0..).zip(live))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_map_of_the_object_is_either_shared_or_private() {
        let decided: BTreeSet<&str> = USES.into_iter().map(|(name, _)| name).collect();
        assert_eq!(decided, BTreeSet::from(map::ALL));
        let object = aya_obj::Object::parse(crate::OBJECT).expect("the object");
        let there: BTreeSet<&str> = object.maps.keys().map(String::as_str).collect();
        let unpinned: Vec<_> = there.difference(&decided).copied().collect();
        assert_eq!(unpinned, [".rodata", "scratch"]);
    }
}
