//! The programs of ironlb on the host: `lb-ebpf`'s own modules, compiled for this machine.
//!
//! They name the crate `aya_ebpf`; here that is this crate, whose modules of the same names stand in for the kernel: maps
//! in ordinary memory (`btf_maps`), helpers (`helpers`), and contexts whose packets end right before a page that
//! nobody may read (`frame`). Nothing of the engine is written twice, so what holds here holds for the source of the
//! loaded programs; that the kernel's own helpers and maps do the same is what `tests/tests/packets` compares.
//!
//! [`oracle`] tells by an independent packet library what may have become of a packet, [`corpus`] replays dialogues from
//! files, and the fuzz target (`fuzz/`) looks for others.

#![expect(
    clippy::needless_borrows_for_generic_args,
    reason = "the programs' modules, as in their own crate"
)]

// A name for ourselves: the modules below say `use aya_ebpf::…`.
extern crate self as aya_ebpf;

mod bindings;
mod btf_maps;
pub mod corpus;
mod engine;
mod frame;
mod global;
mod helpers;
pub mod oracle;
mod programs;
pub mod scene;
pub mod seeds;
mod store;
pub mod turn;

/// What `maps.rs` declares its maps with: a section and a symbol, which do no harm here.
mod macros {
    pub use aya_ebpf_macros::btf_map;
}

#[path = "../../lb-ebpf/src/balance.rs"]
mod balance;
#[path = "../../lb-ebpf/src/events.rs"]
mod events;
#[path = "../../lb-ebpf/src/flows.rs"]
mod flows;
#[path = "../../lb-ebpf/src/hook.rs"]
mod hook;
#[path = "../../lb-ebpf/src/icmp.rs"]
mod icmp;
#[path = "../../lb-ebpf/src/maps.rs"]
mod maps;
#[path = "../../lb-ebpf/src/neighbor.rs"]
mod neighbor;
#[path = "../../lb-ebpf/src/peers.rs"]
mod peers;
#[path = "../../lb-ebpf/src/refuse.rs"]
mod refuse;
#[path = "../../lb-ebpf/src/reply.rs"]
mod reply;

pub use engine::{Engine, Outcome, Program, Redirection};
pub use frame::{Packet, Sum};
pub use store::Clock;

use global::Global;
