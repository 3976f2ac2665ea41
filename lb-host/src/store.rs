//! What the maps hold. While a program runs, its engine's store is the thread's.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

/// The kernel's clocks.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// `jiffies_64`.
    pub jiffies: u64,
    /// `CLOCK_BOOTTIME`, nanoseconds.
    pub boot: u64,
}

impl Default for Clock {
    /// Some time after the boot, so that neither is 0, which the maps take for never.
    fn default() -> Self {
        const SECONDS: u64 = 3600;
        Self {
            jiffies: SECONDS * 250,
            boot: SECONDS * 1_000_000_000,
        }
    }
}

/// A value's memory, aligned as the kernel aligns it.
pub type Value = Box<[u64]>;

/// One map's rows, by their key's bytes.
#[derive(Clone, Default)]
pub struct Table {
    rows: BTreeMap<Box<[u8]>, Value>,
    /// How many rows it has room for, where that is not what its type says.
    room: Option<usize>,
}

/// All of them.
#[derive(Clone, Default)]
pub struct Store {
    tables: HashMap<usize, Table>,
    globals: HashMap<usize, u32>,
    /// Records that nobody has taken yet.
    rings: HashMap<usize, Vec<Box<[u8]>>>,
    /// What programs have removed in this run: they may still hold a pointer, which the kernel lets them.
    removed: Vec<Value>,
    pub clock: Clock,
    /// State of the random numbers.
    pub random: u64,
    /// MAC of every neighbour, if the routing table knows any.
    pub neighbor: Option<[u8; 6]>,
}

/// `-E2BIG`: no room for another row.
pub const NO_ROOM: i32 = -7;
/// `-ENOMEM`: nothing that an LRU could forget.
const NO_ELEMENT: i32 = -12;
/// `-EAGAIN`: a ring without room.
const AGAIN: i32 = -11;
/// What a ring needs for a record besides its bytes.
const RECORD: usize = 8;
/// `-EEXIST`.
const EXISTS: i32 = -17;
/// `-ENOENT`.
const MISSING: i32 = -2;
/// `BPF_NOEXIST`.
const NOEXIST: u64 = 1;

/// Memory for a value of so many bytes, zeroed.
fn zeroed(size: usize) -> Value {
    vec![0; size.div_ceil(size_of::<u64>())].into()
}

/// The bytes of a key, of which the contract says that it has no padding.
pub fn bytes<T>(value: &T) -> &[u8] {
    // SAFETY: as many bytes as the value has; types of keys are made of integers without padding.
    unsafe { core::slice::from_raw_parts(core::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// A copy of a value's memory.
fn stored<T>(value: &T) -> Value {
    let mut memory = zeroed(size_of::<T>());
    // SAFETY: as long as the value, and nobody else's.
    unsafe {
        core::ptr::copy_nonoverlapping(
            core::ptr::from_ref(value).cast::<u8>(),
            memory.as_mut_ptr().cast(),
            size_of::<T>(),
        );
    }
    memory
}

impl Store {
    fn table(&mut self, id: usize) -> &mut Table {
        self.tables.entry(id).or_default()
    }

    /// A row of a hash.
    pub fn find(&mut self, id: usize, key: &[u8]) -> Option<*mut u64> {
        Some(self.tables.get_mut(&id)?.rows.get_mut(key)?.as_mut_ptr())
    }

    /// A row of an array, all of which are there from the beginning.
    pub fn row(&mut self, id: usize, index: u32, size: usize) -> *mut u64 {
        let rows = &mut self.table(id).rows;
        let key = index.to_ne_bytes();
        if !rows.contains_key(&key[..]) {
            rows.insert(Box::from(key), zeroed(size));
        }
        rows.get_mut(&key[..]).expect("just inserted").as_mut_ptr()
    }

    /// Writes a row; where there is no room, an LRU forgets another one, unless it has none at all.
    pub fn insert<V>(
        &mut self,
        id: usize,
        key: &[u8],
        value: &V,
        flags: u64,
        (room, is_lru): (usize, bool),
    ) -> Result<(), i32> {
        let table = self.tables.entry(id).or_default();
        if let Some(row) = table.rows.get_mut(key) {
            if flags & NOEXIST != 0 {
                return Err(EXISTS);
            }
            // The kernel takes a new element, and who holds the old one goes on reading it.
            self.removed.push(std::mem::replace(row, stored(value)));
            return Ok(());
        }
        let room = table.room.unwrap_or(room);
        if table.rows.len() >= room {
            if !is_lru {
                return Err(NO_ROOM);
            }
            if room == 0 {
                return Err(NO_ELEMENT);
            }
            let forgotten = table.rows.pop_first().map(|(_, value)| value);
            self.removed.extend(forgotten);
        }
        table.rows.insert(key.into(), stored(value));
        Ok(())
    }

    /// Adds a record to a ring of so many bytes.
    pub fn output(&mut self, id: usize, record: &[u8], room: usize) -> Result<(), i32> {
        let records = self.rings.entry(id).or_default();
        let need = |record: &[u8]| (RECORD + record.len()).next_multiple_of(RECORD);
        let taken: usize = records.iter().map(|record| need(record)).sum();
        if taken + need(record) > room - 1 {
            return Err(AGAIN);
        }
        records.push(record.into());
        Ok(())
    }

    /// Takes a ring's records.
    pub fn take(&mut self, id: usize) -> Vec<Box<[u8]>> {
        self.rings.remove(&id).unwrap_or_default()
    }

    /// Takes a row out.
    pub fn remove(&mut self, id: usize, key: &[u8]) -> Result<(), i32> {
        let value = self.table(id).rows.remove(key).ok_or(MISSING)?;
        self.removed.push(value);
        Ok(())
    }

    /// All rows of a map, in the order of their keys' bytes.
    pub fn rows(&self, id: usize) -> impl Iterator<Item = (&[u8], &Value)> {
        let table = self.tables.get(&id).into_iter();
        table.flat_map(|table| table.rows.iter().map(|(key, value)| (&**key, value)))
    }

    /// Limits a map to so many rows.
    pub fn limit(&mut self, id: usize, room: usize) {
        self.table(id).room = Some(room);
    }

    /// Forgets a map's rows.
    pub fn clear(&mut self, id: usize) {
        self.table(id).rows.clear();
    }

    pub fn global(&self, id: usize) -> Option<u32> {
        self.globals.get(&id).copied()
    }

    pub fn set_global(&mut self, id: usize, value: u32) {
        self.globals.insert(id, value);
    }

    /// To be called when no program runs.
    pub fn end_run(&mut self) {
        self.removed.clear();
    }
}

thread_local! {
    static CURRENT: RefCell<Store> = RefCell::default();
}

/// The store of the program that runs on this thread.
pub fn current<R>(use_it: impl FnOnce(&mut Store) -> R) -> R {
    CURRENT.with_borrow_mut(use_it)
}

/// Exchanges a store for the thread's.
pub fn exchange(store: &mut Store) {
    current(|current| std::mem::swap(current, store));
}
