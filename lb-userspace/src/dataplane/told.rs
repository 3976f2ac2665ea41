//! What the programs tell as it happens: the readers of the two rings, and the names of what records are about.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::{Duration, SystemTime};

use aya::maps::{Array, MapData, PerCpuArray, RingBuf};
use lb_common::events::{Ending, Event, Telling, Watch};
use lb_common::{
    Backend, BackendInfo, FLOW_HANDED_ON, PortInfo, ServiceKey, Uplink, backend_generation,
    backend_index, from_name, map,
};

use super::maps::pinned;
use super::{DataplaneError, boot_time, nanoseconds, pins};

/// So long the programs go on telling when the monitor does not ask any more.
pub const WATCH_FOR: Duration = Duration::from_secs(3);

/// The wall clock's time of a moment on `CLOCK_BOOTTIME`.
pub fn wall_time(at: u64) -> SystemTime {
    let ago = nanoseconds(boot_time()).saturating_sub(at);
    SystemTime::now() - Duration::from_nanos(ago)
}

/// Endings as the programs tell them. One reader: the agent, which has the root's lock.
pub struct Endings {
    ring: RingBuf<MapData>,
}

impl std::fmt::Debug for Endings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endings").finish_non_exhaustive()
    }
}

impl Endings {
    /// Opens the ring below a pin root. What was told while nobody listened is in it, as far as there was room.
    pub fn open(root: &Path) -> Result<Self, DataplaneError> {
        let ring = pinned(&pins::layout_dir(root), map::ENDINGS)?;
        Ok(Self { ring })
    }

    /// The next one, if there is one.
    pub fn take(&mut self) -> Option<Ending> {
        // A record of another length would be of another build: the layout's check has refused that.
        self.ring
            .next()
            .and_then(|bytes| Ending::from_bytes(&bytes))
    }
}

/// How many events did not reach a reader, over all CPUs, since the maps were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NotTold {
    /// Kept back by rate limit or sampling.
    pub suppressed: u64,
    /// Found no room in the ring.
    pub lost: u64,
    /// Endings that found no room in theirs.
    pub endings_lost: u64,
}

impl NotTold {
    /// Reads the counters below a pin root.
    pub fn read(root: &Path) -> Result<Self, DataplaneError> {
        let counters: PerCpuArray<MapData, Telling> =
            pinned(&pins::layout_dir(root), map::TELLING)?;
        Self::sum(&counters)
    }

    fn sum(counters: &PerCpuArray<MapData, Telling>) -> Result<Self, DataplaneError> {
        let mut sum = Self::default();
        let values = counters
            .get(&0, 0)
            .map_err(|source| DataplaneError::map("read", map::TELLING, source))?;
        for cpu in values.iter() {
            sum.suppressed += cpu.suppressed;
            sum.lost += cpu.lost;
            sum.endings_lost += cpu.endings_lost;
        }
        Ok(sum)
    }
}

/// A watch: while it lives and is renewed, the programs tell events. One at a time below a root.
pub struct Watching {
    ring: RingBuf<MapData>,
    watch: Array<MapData, Watch>,
    counters: PerCpuArray<MapData, Telling>,
    wanted: Watch,
    before: NotTold,
    /// On the layout's directory; it ends with the process, however that ends.
    _lock: File,
}

impl std::fmt::Debug for Watching {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watching").finish_non_exhaustive()
    }
}

impl Watching {
    /// Begins to watch. [`DataplaneError::Watched`] while somebody else does.
    pub fn begin(root: &Path, wanted: Watch) -> Result<Self, DataplaneError> {
        let dir = pins::layout_dir(root);
        pins::expect(root, map::WATCH)?;
        let failed = |error| DataplaneError::pins("open", &dir, error);
        let lock = File::open(&dir).map_err(failed)?;
        let mut watch: Array<MapData, Watch> = pinned(&dir, map::WATCH)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let noted = watch.get(&0, 0).map_or(0, |watch| watch.pid);
                let noted = Some(noted).filter(|pid| *pid != 0);
                return Err(DataplaneError::Watched {
                    path: root.into(),
                    // From another PID namespace the lock's owner has no number here.
                    pid: pins::owner(&dir).flatten().or(noted),
                });
            }
            Err(TryLockError::Error(error)) => {
                return Err(DataplaneError::pins("lock", &dir, error));
            }
        }
        let mut ring: RingBuf<MapData> = pinned(&dir, map::EVENTS)?;
        // What was told to a former one.
        watch
            .set(0, Watch::default(), 0)
            .map_err(|source| DataplaneError::map("write", map::WATCH, source))?;
        while ring.next().is_some() {}
        let counters = pinned(&dir, map::TELLING)?;
        let mut watching = Self {
            ring,
            watch,
            before: NotTold::sum(&counters)?,
            counters,
            wanted: Watch {
                pid: std::process::id(),
                ..wanted
            },
            _lock: lock,
        };
        watching.renew()?;
        Ok(watching)
    }

    /// Asks for another [`WATCH_FOR`].
    pub fn renew(&mut self) -> Result<(), DataplaneError> {
        self.wanted.until = nanoseconds(boot_time() + WATCH_FOR);
        self.write(self.wanted)
    }

    fn write(&mut self, watch: Watch) -> Result<(), DataplaneError> {
        self.watch
            .set(0, watch, 0)
            .map_err(|source| DataplaneError::map("write", map::WATCH, source))
    }

    /// The next event, if there is one.
    pub fn take(&mut self) -> Option<Event> {
        self.ring.next().and_then(|bytes| Event::from_bytes(&bytes))
    }

    /// How many did not reach us since the beginning.
    pub fn not_told(&self) -> Result<NotTold, DataplaneError> {
        let now = NotTold::sum(&self.counters)?;
        Ok(NotTold {
            suppressed: now.suppressed - self.before.suppressed,
            lost: now.lost - self.before.lost,
            endings_lost: now.endings_lost - self.before.endings_lost,
        })
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        // Without it the programs would go on for a few seconds.
        let _ = self.write(Watch::default());
    }
}

/// Looks up what numbers in records mean, one by one and as it is now.
pub struct Names {
    ports: Array<MapData, PortInfo>,
    backends: Array<MapData, Backend>,
    instances: Array<MapData, BackendInfo>,
    uplinks: Array<MapData, Uplink>,
}

impl std::fmt::Debug for Names {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Names").finish_non_exhaustive()
    }
}

impl Names {
    /// Opens the maps below a pin root.
    pub fn open(root: &Path) -> Result<Self, DataplaneError> {
        let dir = pins::layout_dir(root);
        Ok(Self {
            ports: pinned(&dir, map::PORT_INFO)?,
            backends: pinned(&dir, map::BACKENDS)?,
            instances: pinned(&dir, map::BACKEND_INFO)?,
            uplinks: pinned(&dir, map::UPLINKS)?,
        })
    }

    /// Service and port name of a VIP port, while its id is still its own.
    pub fn service(&self, id: u16, vip_port: &ServiceKey) -> Option<(String, String)> {
        let info = self.ports.get(&u32::from(id), 0).ok()?;
        (info.vip_port == *vip_port).then(|| (from_name(&info.service), from_name(&info.port)))
    }

    /// The same of a VIP port whose id is not known.
    pub fn service_at(&self, vip_port: &ServiceKey) -> Option<(String, String)> {
        let infos = self.ports.iter().filter_map(Result::ok);
        let mut own = infos.filter(|info| info.vip_port == *vip_port);
        own.next()
            .map(|info| (from_name(&info.service), from_name(&info.port)))
    }

    /// All services that have a VIP port.
    pub fn services(&self) -> Vec<String> {
        let infos = self.ports.iter().filter_map(Result::ok);
        let used = infos.filter(|info| info.vip_port.port != 0);
        let mut names: Vec<_> = used.map(|info| from_name(&info.service)).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Stable identity of a backend, while its index is still its own.
    pub fn instance(&self, backend: u32) -> Option<String> {
        let index = backend_index(backend);
        let row = self.backends.get(&index, 0).ok()?;
        if row.generation != backend_generation(backend) {
            return None;
        }
        let name = from_name(&self.instances.get(&index, 0).ok()?.instance);
        (!name.is_empty()).then_some(name)
    }

    /// Name of an uplink's interface.
    pub fn interface(&self, slot: u8) -> String {
        let row = self.uplinks.get(&u32::from(slot & !FLOW_HANDED_ON), 0);
        row.map_or_else(|_| String::new(), |row| from_name(&row.name))
    }
}
