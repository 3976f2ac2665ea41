//! Constants of an attachment, which the loader writes before the kernel sees a program.

use crate::store;

/// A constant that may be overridden.
pub struct Global<T> {
    value: T,
}

impl<T> Global<T> {
    /// Its value unless overridden.
    pub const fn new(value: T) -> Self {
        Self { value }
    }
}

impl Global<u32> {
    /// Its value.
    pub fn load(&self) -> u32 {
        store::current(|store| store.global(self.id())).unwrap_or(self.value)
    }

    /// What it is known by.
    pub fn id(&self) -> usize {
        core::ptr::from_ref(self).addr()
    }
}
