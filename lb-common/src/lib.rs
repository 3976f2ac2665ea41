//! The contract between the eBPF programs and userspace.
//!
//! [`layout`] is the only place that knows what a map's key and value look like; [`verdict`] names
//! every way a packet can end; [`events`] is what programs tell as it happens; [`choice`] picks a backend; [`frame`], [`packet`] and [`checksum`] are
//! the parts of the packet engine that need no kernel: the same code runs in BPF and in ordinary tests.

#![cfg_attr(not(any(test, feature = "user")), no_std)]

pub mod checksum;
pub mod choice;
pub mod events;
pub mod frame;
pub mod layout;
pub mod packet;
pub mod verdict;

pub use layout::*;
pub use verdict::{Action, Verdict};
