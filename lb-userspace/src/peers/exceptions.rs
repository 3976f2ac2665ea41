//! Exceptions: living flows that the hash would place on another node than the one they are on. Each node finds its own
//! and tells its peers, which find those flows by the telling.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aya::maps::{Array, HashMap, MapData, MapError};
use lb_common::choice::{EVERYWHERE, NOBODY, choose};
use lb_common::{
    BACKEND_ALIVE, Backend, Exception, Flow, FlowKey, MAX_BACKENDS, MAX_EXCEPTIONS, Service,
    ServiceKey, backend_generation, backend_index, map,
};
use tokio::sync::{Notify, broadcast, mpsc, watch};
use tracing::warn;

use crate::dataplane::read::Reader;
use crate::dataplane::{DataplaneError, open_map};

/// Version of the stream of exceptions.
pub(super) const VERSION: u32 = 1;
/// Time between scans without a reason.
const PERIOD: Duration = Duration::from_secs(2);
/// Scans without a reason take no more of a CPU than one part in so many.
const SHARE: u32 = 20;
/// Rows written before others get their turn.
const CHUNK: usize = 512;
/// Changes that a subscriber may be behind before it has to begin anew.
const BACKLOG: usize = 64;

/// The map of peers' exceptions, which this module alone writes.
pub(super) struct Maps {
    exceptions: HashMap<MapData, FlowKey, Exception>,
}

impl Maps {
    /// Opens it.
    pub(super) fn open(root: &Path) -> Result<Self, DataplaneError> {
        // What a scan reads is opened for each scan; that it can be is told at once.
        Scanner::open(root)?;
        let exceptions = open_map(root, map::EXCEPTIONS)?;
        Ok(Self { exceptions })
    }
}

impl Table for Maps {
    fn rows(&self) -> BTreeMap<FlowKey, u32> {
        let rows = self.exceptions.iter().filter_map(Result::ok);
        rows.map(|(key, row)| (key, row.peer)).collect()
    }

    fn set(&mut self, key: &FlowKey, peer: u32) -> bool {
        let row = Exception { peer };
        self.exceptions.insert(key, row, 0).is_ok()
    }

    fn remove(&mut self, key: &FlowKey) {
        // What is not there need not be removed.
        let _ = self.exceptions.remove(key);
    }
}

/// Where exceptions of peers are written.
pub(super) trait Table {
    /// All rows: number of the peer by flow.
    fn rows(&self) -> BTreeMap<FlowKey, u32>;
    /// Writes a row; tells whether there was room.
    fn set(&mut self, key: &FlowKey, peer: u32) -> bool;
    /// Removes a row.
    fn remove(&mut self, key: &FlowKey);
}

/// Whether a living flow that is on this node is one that the hash would place elsewhere.
fn is_exception(key: &FlowKey, flow: &Flow, service: &Service, backends: &[Backend]) -> bool {
    let backend = |id: u32| {
        let row = backends.get(backend_index(id) as usize)?;
        let is_it = row.generation == backend_generation(id) && row.flags & BACKEND_ALIVE != 0;
        is_it.then_some(row)
    };
    if backend(flow.backend).is_none_or(|own| own.peer != 0) {
        return false;
    }
    match choose(service, key, EVERYWHERE, NOBODY) {
        None => true,
        Some(chosen) => backend(chosen).is_some_and(|chosen| chosen.peer != 0),
    }
}

/// What a scan reads.
pub(super) struct Scanner {
    services: HashMap<MapData, ServiceKey, Service>,
    backends: Array<MapData, Backend>,
    living: HashMap<MapData, FlowKey, Flow>,
    /// How many flows can live.
    capacity: usize,
}

/// What a scan found.
#[derive(Default)]
struct Scan {
    keys: BTreeSet<FlowKey>,
    lost: u64,
    took: Duration,
}

impl Scanner {
    fn open(root: &Path) -> Result<Self, DataplaneError> {
        Ok(Self {
            services: open_map(root, map::SERVICES)?,
            backends: open_map(root, map::BACKENDS)?,
            living: open_map(root, map::LIVING)?,
            capacity: Reader::open(root)?.capacity(map::LIVING)? as usize,
        })
    }

    fn scan(&self) -> Result<Scan, MapError> {
        let began = Instant::now();
        let mut services = BTreeMap::new();
        for row in self.services.iter() {
            let (key, service) = row?;
            // Half-written: the agent is at it, and says so when it is through.
            if service.version == service.version_tail {
                services.insert(key, service);
            }
        }
        let mut backends = Vec::new();
        let used = services.values().flat_map(|service| {
            let count = (service.count as usize).min(service.candidates.len());
            service.candidates[..count].iter()
        });
        let mut last = used.map(|candidate| backend_index(candidate.backend)).max();
        let mut scan = Scan::default();
        // A table that changes may be walked in circles: an end to it.
        let most = self.capacity.saturating_mul(2);
        for row in self.living.iter().take(most) {
            let (key, flow) = row?;
            let service = services.get(&ServiceKey::new(key.addr, key.port));
            let Some(service) = service else { continue };
            last = last.max(Some(backend_index(flow.backend)));
            let end = last.map_or(0, |last| last + 1).min(MAX_BACKENDS);
            for index in backends.len() as u32..end {
                backends.push(self.backends.get(&index, 0)?);
            }
            if !is_exception(&key, &flow, service, &backends) {
                continue;
            }
            if scan.keys.len() < MAX_EXCEPTIONS as usize {
                scan.keys.insert(key);
            } else {
                scan.lost += 1;
            }
        }
        scan.took = began.elapsed();
        Ok(scan)
    }
}

/// A change of this node's exceptions.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Delta {
    /// Those that are new.
    pub(super) add: Vec<FlowKey>,
    /// Those that are none any more.
    pub(super) remove: Vec<FlowKey>,
}

/// This node's exceptions.
pub(super) struct Own {
    keys: RefCell<BTreeSet<FlowKey>>,
    deltas: broadcast::Sender<Arc<Delta>>,
    scans: watch::Sender<u64>,
    asked: Notify,
    is_alone: Cell<bool>,
    lost: Cell<u64>,
}

impl Own {
    /// None yet.
    pub(super) fn new() -> Rc<Self> {
        Rc::new(Self {
            keys: RefCell::default(),
            deltas: broadcast::Sender::new(BACKLOG),
            scans: watch::Sender::new(0),
            asked: Notify::new(),
            is_alone: Cell::new(true),
            lost: Cell::new(0),
        })
    }

    /// Asks for a scan now.
    pub(super) fn look(&self) {
        self.asked.notify_one();
    }

    /// Without peers there is nobody to look for.
    pub(super) fn set_alone(&self, is_alone: bool) {
        if self.is_alone.replace(is_alone) && !is_alone {
            self.look();
        }
    }

    /// How many there are, and how many were too many.
    pub(super) fn count(&self) -> (u64, u64) {
        (self.keys.borrow().len() as u64, self.lost.get())
    }

    /// All of them once a scan has ended that is under way or begins now, and the changes from there on.
    pub(super) async fn subscribe(&self) -> (Vec<FlowKey>, broadcast::Receiver<Arc<Delta>>) {
        let mut scans = self.scans.subscribe();
        scans.borrow_and_update();
        self.look();
        // The sender is this very object.
        let _ = scans.changed().await;
        let keys = self.keys.borrow();
        (keys.iter().copied().collect(), self.deltas.subscribe())
    }

    /// Finds what it is told to, whenever it is asked to look.
    #[cfg(test)]
    pub(super) async fn scanning_of(self: Rc<Self>, find: impl Fn(u64) -> BTreeSet<FlowKey>) {
        loop {
            self.asked.notified().await;
            let count = *self.scans.borrow();
            self.replace(find(count));
        }
    }

    /// Takes what is so now, and tells those who subscribed.
    fn replace(&self, keys: BTreeSet<FlowKey>) {
        let delta = {
            let old = self.keys.borrow();
            Delta {
                add: keys.difference(&old).copied().collect(),
                remove: old.difference(&keys).copied().collect(),
            }
        };
        *self.keys.borrow_mut() = keys;
        if delta != Delta::default() {
            // An error is that nobody listens.
            let _ = self.deltas.send(Arc::new(delta));
        }
        self.scans.send_modify(|count| *count += 1);
    }

    /// Scans when asked, and now and then.
    pub(super) async fn scanning(self: Rc<Self>, root: std::path::PathBuf) {
        let mut pause = PERIOD;
        loop {
            let is_asked = tokio::time::timeout(pause, self.asked.notified()).await;
            if is_asked.is_err() && self.is_alone.get() {
                continue;
            }
            let root = root.clone();
            // Of its own thread: heartbeats do not wait for it.
            let scan = tokio::task::spawn_blocking(move || {
                let scanner = Scanner::open(&root).map_err(|error| error.to_string())?;
                scanner.scan().map_err(|error| error.to_string())
            });
            match scan.await {
                Ok(Ok(scan)) => {
                    pause = PERIOD.max(scan.took.saturating_mul(SHARE));
                    if scan.lost > 0 && self.lost.get() == 0 {
                        warn!(
                            lost = scan.lost,
                            "more flows than peers can be told of sit elsewhere than the hash places them: the rest may break when a node fails"
                        );
                    }
                    self.lost.set(scan.lost);
                    self.replace(scan.keys);
                }
                Ok(Err(error)) => warn!(error, "cannot look for exceptions; trying again"),
                Err(error) => warn!(%error, "the search for exceptions ended early"),
            }
        }
    }
}

/// News of peers' exceptions.
pub(super) enum News {
    /// All of a peer's incarnation.
    Snapshot {
        /// The peer.
        peer: String,
        /// Its incarnation.
        incarnation: u64,
        /// Its exceptions.
        keys: BTreeSet<FlowKey>,
    },
    /// A change of them.
    Change {
        /// The peer.
        peer: String,
        /// What has changed.
        delta: Delta,
    },
    /// Peers by name and number.
    Numbers(BTreeMap<String, u32>),
    /// Only these peers are known still.
    Known(BTreeSet<String>),
}

/// What is held of peers' exceptions.
pub(super) struct Held<T> {
    table: T,
    owners: BTreeMap<String, BTreeSet<FlowKey>>,
    numbers: BTreeMap<String, u32>,
    /// What the table holds.
    written: BTreeMap<FlowKey, u32>,
    lost: u64,
}

impl<T: Table> Held<T> {
    /// Adopts what the table holds, by the numbers that peers had.
    pub(super) fn adopt(table: T, numbers: BTreeMap<String, u32>) -> Self {
        let written = table.rows();
        let mut owners: BTreeMap<String, BTreeSet<FlowKey>> = BTreeMap::new();
        for (name, number) in &numbers {
            let keys = written.iter().filter(|(_, peer)| *peer == number);
            let keys: BTreeSet<_> = keys.map(|(key, _)| *key).collect();
            if !keys.is_empty() {
                owners.insert(name.clone(), keys);
            }
        }
        let mut held = Self {
            table,
            owners,
            numbers,
            written,
            lost: 0,
        };
        let orphans: Vec<FlowKey> = held.written.keys().copied().collect();
        held.write(&orphans);
        held
    }

    /// Takes news; tells which rows may have to be written.
    fn take(&mut self, news: News) -> Vec<FlowKey> {
        match news {
            News::Snapshot { peer, keys, .. } => {
                let old = self.owners.insert(peer, keys.clone()).unwrap_or_default();
                old.union(&keys).copied().collect()
            }
            News::Change { peer, delta } => {
                let keys = self.owners.entry(peer).or_default();
                for key in &delta.remove {
                    keys.remove(key);
                }
                keys.extend(&delta.add);
                delta.remove.into_iter().chain(delta.add).collect()
            }
            News::Numbers(numbers) => {
                if numbers == self.numbers {
                    return Vec::new();
                }
                self.numbers = numbers;
                self.owners.values().flatten().copied().collect()
            }
            News::Known(names) => {
                let gone: Vec<String> = self.owners.keys().cloned().collect();
                let gone = gone.into_iter().filter(|name| !names.contains(name));
                let keys: Vec<BTreeSet<FlowKey>> =
                    gone.filter_map(|name| self.owners.remove(&name)).collect();
                keys.into_iter().flatten().collect()
            }
        }
    }

    /// Makes rows what they should be.
    fn write(&mut self, keys: &[FlowKey]) {
        for key in keys {
            let owner = self.owners.iter().find_map(|(name, keys)| {
                let number = self.numbers.get(name)?;
                keys.contains(key).then_some(*number)
            });
            if owner == self.written.get(key).copied() {
                continue;
            }
            let Some(number) = owner else {
                self.table.remove(key);
                self.written.remove(key);
                continue;
            };
            let has_room =
                self.written.contains_key(key) || self.written.len() < MAX_EXCEPTIONS as usize;
            if has_room && self.table.set(key, number) {
                self.written.insert(*key, number);
            } else {
                if self.lost == 0 {
                    warn!(
                        "no room for more exceptions of peers: their flows may break when the next node takes the VIP"
                    );
                }
                self.lost += 1;
            }
        }
    }

    /// Takes news as they come, and tells whose exceptions are all here.
    pub(super) async fn keep(
        mut self,
        mut news: mpsc::Receiver<News>,
        synced: mpsc::UnboundedSender<(String, u64)>,
        counts: Rc<Cell<(u64, u64)>>,
    ) {
        while let Some(item) = news.recv().await {
            let whole = match &item {
                News::Snapshot {
                    peer, incarnation, ..
                } => Some((peer.clone(), *incarnation)),
                _ => None,
            };
            let keys = self.take(item);
            for chunk in keys.chunks(CHUNK) {
                self.write(chunk);
                // Heartbeats go first.
                tokio::task::yield_now().await;
            }
            counts.set((self.written.len() as u64, self.lost));
            if let Some(whole) = whole {
                // An error is the end of the thread.
                let _ = synced.send(whole);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lb_common::choice::{identity, name_hash};
    use lb_common::{Addr, BACKEND_ELIGIBLE, Candidate, MAX_BACKENDS_PER_PORT, backend_id};
    use std::net::Ipv4Addr;

    fn key(client_port: u16) -> FlowKey {
        let address = |last| Addr::from(Ipv4Addr::new(172, 22, 0, last));
        FlowKey::forward(address(100), client_port, address(2), 6180)
    }

    fn flow(backend: u32) -> Flow {
        Flow {
            backend,
            ..Flow::default()
        }
    }

    fn service(count: u32) -> Service {
        let mut candidates = [Candidate::default(); MAX_BACKENDS_PER_PORT];
        for index in 0..count as u16 {
            candidates[usize::from(index)] = Candidate {
                backend: backend_id(index, 1),
                identity: identity(&format!("ironic-{index}")),
            };
        }
        Service {
            version: 1,
            id: 0,
            flags: 0,
            seed: name_hash("metal3/ironic"),
            count,
            sources: 0,
            local: 1,
            candidates,
            pad_tail: 0,
            version_tail: 1,
        }
    }

    /// Backends of which the first is on this node and the others on peers.
    fn backends() -> Vec<Backend> {
        let backend = |peer| Backend {
            addr: Addr::UNSPECIFIED,
            port: 80,
            service: 0,
            generation: 1,
            flags: BACKEND_ALIVE | BACKEND_ELIGIBLE,
            peer,
            pad: 0,
        };
        (0..3).map(backend).collect()
    }

    #[test]
    fn a_flow_that_the_hash_would_place_on_a_peer_is_an_exception_and_no_other() {
        let (service, mut backends) = (service(3), backends());
        let here = flow(backend_id(0, 1));
        let (mut exceptions, mut found) = (0, 0);
        for port in 1024..1324 {
            let key = key(port);
            let chosen = choose(&service, &key, EVERYWHERE, NOBODY).expect("has backends");
            let is = is_exception(&key, &here, &service, &backends);
            assert_eq!(is, backend_index(chosen) != 0);
            exceptions += u32::from(is);
            found += u32::from(!is);
            assert!(
                !is_exception(&key, &flow(backend_id(1, 1)), &service, &backends),
                "a peer's"
            );
            assert!(
                !is_exception(&key, &flow(backend_id(0, 2)), &service, &backends),
                "gone"
            );
        }
        assert!(exceptions > 100 && found > 50);
        let nobody = self::service(0);
        assert!(
            is_exception(&key(1), &here, &nobody, &backends),
            "the hash finds nobody"
        );
        backends[0].flags = 0;
        assert!(
            !is_exception(&key(1), &here, &nobody, &backends),
            "its backend is gone"
        );
    }

    /// A map in ordinary memory.
    #[derive(Clone, Default)]
    struct Memory(Rc<RefCell<BTreeMap<FlowKey, u32>>>);

    impl Table for Memory {
        fn rows(&self) -> BTreeMap<FlowKey, u32> {
            self.0.borrow().clone()
        }

        fn set(&mut self, key: &FlowKey, peer: u32) -> bool {
            self.0.borrow_mut().insert(*key, peer);
            true
        }

        fn remove(&mut self, key: &FlowKey) {
            self.0.borrow_mut().remove(key);
        }
    }

    fn numbers(peers: &[(&str, u32)]) -> BTreeMap<String, u32> {
        let peers = peers.iter();
        peers
            .map(|(name, number)| ((*name).to_owned(), *number))
            .collect()
    }

    fn snapshot(peer: &str, ports: &[u16]) -> News {
        News::Snapshot {
            peer: peer.to_owned(),
            incarnation: 1,
            keys: ports.iter().map(|port| key(*port)).collect(),
        }
    }

    fn change(peer: &str, add: &[u16], remove: &[u16]) -> News {
        let keys = |ports: &[u16]| ports.iter().map(|port| key(*port)).collect();
        News::Change {
            peer: peer.to_owned(),
            delta: Delta {
                add: keys(add),
                remove: keys(remove),
            },
        }
    }

    fn ports(memory: &Memory) -> Vec<(u16, u32)> {
        let rows = memory.0.borrow();
        rows.iter()
            .map(|(key, peer)| (key.client_port, *peer))
            .collect()
    }

    #[test]
    fn what_an_earlier_agent_left_is_kept_until_its_owner_tells_otherwise() {
        let memory = Memory::default();
        for (port, peer) in [(1, 1), (2, 1), (3, 2), (4, 9)] {
            memory.0.borrow_mut().insert(key(port), peer);
        }
        let mut held = Held::adopt(memory.clone(), numbers(&[("b", 1), ("c", 2)]));
        assert_eq!(
            ports(&memory),
            [(1, 1), (2, 1), (3, 2)],
            "nobody has number 9"
        );
        let mut tell = |news| {
            let keys = held.take(news);
            held.write(&keys);
            ports(&memory)
        };
        assert_eq!(tell(snapshot("b", &[2, 5])), [(2, 1), (3, 2), (5, 1)]);
        assert_eq!(tell(change("b", &[6], &[2])), [(3, 2), (5, 1), (6, 1)]);
        // A client comes again from the same port, to another node.
        assert_eq!(tell(change("c", &[5], &[])), [(3, 2), (5, 1), (6, 1)]);
        assert_eq!(tell(change("b", &[], &[5])), [(3, 2), (5, 2), (6, 1)]);
        // The data plane gives numbers later, and others.
        assert_eq!(tell(snapshot("d", &[7])), [(3, 2), (5, 2), (6, 1)]);
        let all = numbers(&[("b", 4), ("c", 2), ("d", 3)]);
        assert_eq!(tell(News::Numbers(all)), [(3, 2), (5, 2), (6, 4), (7, 3)]);
        let known = BTreeSet::from(["b".to_owned(), "d".to_owned()]);
        assert_eq!(tell(News::Known(known)), [(6, 4), (7, 3)]);
    }

    #[test]
    fn what_is_too_much_is_counted_and_the_rest_is_held() {
        let mut held = Held::adopt(Memory::default(), numbers(&[("b", 1)]));
        let address = |host: u32| Addr::from(Ipv4Addr::from(0x0a00_0000 + host));
        let keys: BTreeSet<FlowKey> = (0..MAX_EXCEPTIONS + 10)
            .map(|host| FlowKey::forward(address(host), 1, address(0), 80))
            .collect();
        let keys = held.take(News::Snapshot {
            peer: "b".to_owned(),
            incarnation: 1,
            keys,
        });
        held.write(&keys);
        assert_eq!(
            (held.written.len(), held.lost),
            (MAX_EXCEPTIONS as usize, 10)
        );
    }

    #[test]
    fn a_subscriber_gets_all_and_then_what_changes() {
        let own = Own::new();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(async {
            let keys = |ports: &[u16]| -> BTreeSet<FlowKey> {
                ports.iter().map(|port| key(*port)).collect()
            };
            let scanner = own.clone();
            let first = keys(&[1, 2]);
            let scan = async move {
                scanner.asked.notified().await;
                scanner.replace(first);
            };
            let ((all, mut deltas), ()) = tokio::join!(own.subscribe(), scan);
            assert!(all == [key(1), key(2)]);
            own.replace(keys(&[2, 3]));
            let delta = deltas.recv().await.expect("told");
            assert!(delta.add == [key(3)] && delta.remove == [key(1)]);
            own.replace(keys(&[2, 3]));
            assert!(deltas.try_recv().is_err(), "nothing has changed");
        });
    }
}
