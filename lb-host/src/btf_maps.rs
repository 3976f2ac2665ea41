//! Maps as `aya_ebpf::btf_maps` offers them, over the thread's [`store`](crate::store).

use core::borrow::Borrow;
use core::marker::PhantomData;

use crate::store::{bytes, current};

/// What a map is known by.
pub trait Map {
    /// An address of its own.
    fn id(&self) -> usize;
}

/// Rows by their index, zeroed at first.
pub struct Array<T, const N: usize> {
    /// Maps without a size could have one address.
    _address: u8,
    value: PhantomData<fn() -> T>,
}

/// A run is on one processor.
pub type PerCpuArray<T, const N: usize> = Array<T, N>;

impl<T, const N: usize> Map for Array<T, N> {
    fn id(&self) -> usize {
        core::ptr::from_ref(self).addr()
    }
}

impl<T, const N: usize> Array<T, N> {
    pub const fn new() -> Self {
        Self {
            _address: 0,
            value: PhantomData,
        }
    }

    pub fn get_ptr_mut(&self, index: u32) -> Option<*mut T> {
        let size = size_of::<T>();
        ((index as usize) < N).then(|| current(|store| store.row(self.id(), index, size)).cast())
    }

    pub fn get_ptr(&self, index: u32) -> Option<*const T> {
        self.get_ptr_mut(index).map(<*mut T>::cast_const)
    }

    pub fn get(&self, index: u32) -> Option<&'static T> {
        // SAFETY: zeroed or written as a T, and there until the run has ended, which no caller outlives.
        self.get_ptr_mut(index).map(|row| unsafe { &*row })
    }
}

macro_rules! hash {
    ($name:ident, $is_lru:literal) => {
        /// Rows by their key.
        pub struct $name<K, V, const N: usize> {
            _address: u8,
            row: PhantomData<fn(K) -> V>,
        }

        impl<K, V, const N: usize> Map for $name<K, V, N> {
            fn id(&self) -> usize {
                core::ptr::from_ref(self).addr()
            }
        }

        impl<K, V, const N: usize> $name<K, V, N> {
            pub const fn new() -> Self {
                Self {
                    _address: 0,
                    row: PhantomData,
                }
            }

            pub fn get_ptr_mut(&self, key: impl Borrow<K>) -> Option<*mut V> {
                current(|store| store.find(self.id(), bytes(key.borrow()))).map(<*mut u64>::cast)
            }

            pub fn get_ptr(&self, key: impl Borrow<K>) -> Option<*const V> {
                self.get_ptr_mut(key).map(<*mut V>::cast_const)
            }

            /// # Safety
            /// The value is not used when the run has ended.
            pub unsafe fn get(&self, key: impl Borrow<K>) -> Option<&'static V> {
                // SAFETY: written as a V; removed ones stay until the run has ended.
                self.get_ptr_mut(key).map(|row| unsafe { &*row })
            }

            pub fn insert(
                &self,
                key: impl Borrow<K>,
                value: impl Borrow<V>,
                flags: u64,
            ) -> Result<(), i32> {
                let key = bytes(key.borrow());
                let kind = (N, $is_lru);
                current(|store| store.insert(self.id(), key, value.borrow(), flags, kind))
            }

            pub fn remove(&self, key: impl Borrow<K>) -> Result<(), i32> {
                current(|store| store.remove(self.id(), bytes(key.borrow())))
            }
        }
    };
}

hash!(HashMap, false);
hash!(LruHashMap, true);

/// Records for a reader, as many as it has room for.
pub struct RingBuf<T, const N: usize> {
    _address: u8,
    record: PhantomData<fn() -> T>,
}

impl<T, const N: usize> Map for RingBuf<T, N> {
    fn id(&self) -> usize {
        core::ptr::from_ref(self).addr()
    }
}

impl<T, const N: usize> RingBuf<T, N> {
    pub const fn new() -> Self {
        Self {
            _address: 0,
            record: PhantomData,
        }
    }

    pub fn output_untyped<U>(&self, record: impl Borrow<U>, _flags: u64) -> Result<(), i32> {
        current(|store| store.output(self.id(), bytes(record.borrow()), N))
    }
}

/// Keys with a prefix.
pub mod lpm_trie {
    /// Of `data` the first `prefix_len` bits count.
    #[repr(C, packed)]
    #[derive(Clone, Copy)]
    pub struct Key<K> {
        /// Bits that count.
        pub prefix_len: u32,
        /// The key.
        pub data: K,
    }

    impl<K> Key<K> {
        pub fn new(prefix_len: u32, data: K) -> Self {
            Self { prefix_len, data }
        }
    }
}

/// Rows by the longest prefix.
pub struct LpmTrie<K, V, const N: usize> {
    _address: u8,
    row: PhantomData<fn(K) -> V>,
}

impl<K, V, const N: usize> Map for LpmTrie<K, V, N> {
    fn id(&self) -> usize {
        core::ptr::from_ref(self).addr()
    }
}

impl<K, V, const N: usize> LpmTrie<K, V, N> {
    pub const fn new() -> Self {
        Self {
            _address: 0,
            row: PhantomData,
        }
    }

    pub fn get(&self, key: &lpm_trie::Key<K>) -> Option<&'static V> {
        let asked = bytes(key);
        let found = current(|store| {
            let contains = |prefix: &[u8]| {
                let (length, prefix) = split(prefix);
                length <= split(asked).0 && is_prefix(prefix, split(asked).1, length)
            };
            store
                .rows(self.id())
                .filter(|(prefix, _)| contains(prefix))
                .max_by_key(|(prefix, _)| split(prefix).0)
                .map(|(_, value)| value.as_ptr())
        })?;
        // SAFETY: written as a V, and programs remove none.
        Some(unsafe { &*found.cast::<V>() })
    }
}

/// Length of the prefix and data of a key.
fn split(key: &[u8]) -> (u32, &[u8]) {
    let (length, data) = key.split_at(size_of::<u32>());
    (u32::from_ne_bytes(length.try_into().expect("four")), data)
}

fn is_prefix(prefix: &[u8], data: &[u8], bits: u32) -> bool {
    let (whole, rest) = (bits as usize / 8, bits % 8);
    prefix[..whole] == data[..whole]
        && (rest == 0 || (prefix[whole] ^ data[whole]) >> (8 - rest) == 0)
}
