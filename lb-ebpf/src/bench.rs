//! What `cargo xtask bench` puts in front of a program under `BPF_PROG_TEST_RUN`, which hands the same buffer to
//! every run: a wrapper that makes the packet new again and calls the program, and a trivial program for comparison.
//! Both are reached by the same tail call, so the difference of two measurements is the program alone.

#![expect(
    missing_docs,
    reason = "aya's macros do not pass an entry point's documentation on"
)]
#![no_std]
#![no_main]

use aya_ebpf::{
    bindings::xdp_action,
    btf_maps::{LruHashMap, ProgramArray},
    macros::{btf_map, xdp},
    programs::XdpContext,
};
use core::mem::offset_of;
use lb_common::{DEFAULT_YOUNG_FLOWS, Flow, FlowKey};

/// The program to call, at 0.
#[btf_map(name = "target")]
static TARGET: ProgramArray<1> = ProgramArray::new();

/// A table like that of young flows.
#[btf_map(name = "lru")]
static LRU: LruHashMap<
    [u64; size_of::<FlowKey>() / 8],
    [u64; size_of::<Flow>() / 8],
    { DEFAULT_YOUNG_FLOWS as usize },
> = LruHashMap::new();

/// Words of a frame's headers that are made new: Ethernet, IPv6 and TCP without options fit.
const WORDS: usize = 10;

/// The buffer of a test run: the frame as the program sees it, and behind its payload how it shall be.
#[repr(C)]
struct Buffer {
    /// The headers now.
    headers: [u64; WORDS],
    /// The headers at the beginning of every run.
    fresh: [u64; WORDS],
    /// Counts runs.
    run: u32,
    /// What a run adds to `run`: 0 keeps the client, 1 makes every run another client.
    step: u32,
}

/// Restores an IPv4 frame, and calls the target on it.
#[xdp(frags)]
pub fn bench_wrap(ctx: XdpContext) -> u32 {
    wrap::<{ 14 + 12 + 2 }, { 14 + 20 }>(ctx)
}

/// The same for an IPv6 frame.
#[xdp(frags)]
pub fn bench_wrap6(ctx: XdpContext) -> u32 {
    wrap::<{ 14 + 8 + 14 }, { 14 + 40 }>(ctx)
}

/// `CLIENT` is where the last octet pair of the source address is: the client's own part of it. `PORT` is where the
/// source port is.
#[inline(always)]
fn wrap<const CLIENT: usize, const PORT: usize>(ctx: XdpContext) -> u32 {
    let start = ctx.data();
    if start + size_of::<Buffer>() > ctx.data_end() {
        return xdp_action::XDP_ABORTED;
    }
    let buffer = start as *mut Buffer;
    // SAFETY: the bounds of the whole were checked; offsets of frames are even, hence unaligned accesses.
    unsafe {
        for word in 0..WORDS {
            let fresh = (start + offset_of!(Buffer, fresh) + word * 8) as *const u64;
            let now = (start + word * 8) as *mut u64;
            now.write_unaligned(fresh.read_unaligned());
        }
        let step = (&raw const (*buffer).step).read_unaligned();
        let run = (&raw const (*buffer).run).read_unaligned() + step;
        (&raw mut (*buffer).run).write_unaligned(run);
        // A host's port first, then the next host.
        let port = (start + PORT) as *mut u16;
        port.write_unaligned(port.read_unaligned() ^ run as u16);
        let client = (start + CLIENT) as *mut u16;
        client.write_unaligned(client.read_unaligned() ^ (run >> 16) as u16);
        TARGET.tail_call(&ctx, 0);
    }
    xdp_action::XDP_ABORTED
}

/// The trivial program.
#[xdp(frags)]
pub fn bench_pass(_ctx: XdpContext) -> u32 {
    xdp_action::XDP_PASS
}

/// Puts an entry for the client of an IPv4 frame into a table, and no more: what of a new flow is the kernel's.
#[xdp(frags)]
pub fn bench_insert(ctx: XdpContext) -> u32 {
    const ENDS: usize = 14 + 12;
    let start = ctx.data();
    if start + ENDS + 12 > ctx.data_end() {
        return xdp_action::XDP_ABORTED;
    }
    let mut key = [0; size_of::<FlowKey>() / 8];
    // SAFETY: the bounds were checked; offsets of frames are even, hence unaligned accesses.
    unsafe {
        key[0] = ((start + ENDS) as *const u64).read_unaligned();
        key[1] = u64::from(((start + ENDS + 8) as *const u32).read_unaligned());
    }
    match LRU.insert(key, [0; size_of::<Flow>() / 8], 0) {
        Ok(()) => xdp_action::XDP_PASS,
        Err(_) => xdp_action::XDP_ABORTED,
    }
}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
