//! The programs of ironlb: entry points that bring a packet to the engine and carry out its verdict.

#![expect(
    missing_docs,
    reason = "aya's macros do not pass an entry point's documentation on"
)]
#![expect(
    clippy::needless_borrows_for_generic_args,
    reason = "helpers take addresses: by value, keys and entries would be copied once more on a 512-byte stack"
)]
#![no_std]
#![no_main]

mod balance;
mod events;
mod flows;
mod hook;
mod icmp;
mod maps;
mod neighbor;
mod peers;
mod refuse;
mod reply;

use aya_ebpf::{
    bindings::{
        TC_ACT_SHOT, TC_ACT_UNSPEC, bpf_redir_neigh, bpf_redir_neigh__bindgen_ty_1, xdp_action,
    },
    helpers::{bpf_redirect, bpf_redirect_neigh},
    macros::{classifier, xdp},
    programs::{TcContext, XdpContext},
};
use lb_common::{Action, Addr, UPLINK_TRANSMIT_BY_REDIRECT};

use crate::{
    hook::{Tc, Xdp},
    maps::{UPLINK, UPLINKS, count},
};

// Inlined into what aya makes of them: old verifiers (6.1, not 6.12) count 32 bytes of the 512 of stack for every
// function on the way, also for one that uses none.

/// The forward path on an uplink, for drivers that keep a packet in one or in several buffers.
#[xdp(frags)]
#[inline(always)]
pub fn ironlb_xdp(ctx: XdpContext) -> u32 {
    at_xdp(ctx)
}

/// The forward path on an uplink, for kernels before 5.18 and drivers without multi-buffer support.
#[xdp]
#[inline(always)]
pub fn ironlb_xdp_sb(ctx: XdpContext) -> u32 {
    at_xdp(ctx)
}

#[inline(always)]
fn at_xdp(ctx: XdpContext) -> u32 {
    let mut hook = Xdp::new(ctx);
    let verdict = balance::forward(&mut hook);
    count(verdict);
    events::tell(&hook, verdict);
    match verdict.action() {
        Action::Pass => xdp_action::XDP_PASS,
        Action::Transmit => transmit(),
        Action::Drop | Action::Redirect => xdp_action::XDP_DROP,
    }
}

/// Sends the packet back out of the interface that it came from.
#[inline(always)]
fn transmit() -> u32 {
    match UPLINKS.get(UPLINK.load()) {
        Some(uplink) if uplink.flags & UPLINK_TRANSMIT_BY_REDIRECT != 0 => {
            // SAFETY: a helper that takes two integers.
            unsafe { bpf_redirect(uplink.ifindex, 0) as u32 }
        }
        _ => xdp_action::XDP_TX,
    }
}

/// The forward path where XDP cannot serve.
#[classifier]
#[inline(always)]
pub fn ironlb_ingress(ctx: TcContext) -> i32 {
    let mut hook = Tc::new(&ctx);
    let verdict = balance::forward(&mut hook);
    count(verdict);
    events::tell(&hook, verdict);
    match verdict.action() {
        // TCX_NEXT has the same number: whatever is attached behind us sees the packet too.
        Action::Pass => TC_ACT_UNSPEC,
        Action::Transmit => redirect(UPLINK.load()),
        Action::Drop | Action::Redirect => TC_ACT_SHOT,
    }
}

/// The reply path.
#[classifier]
#[inline(always)]
pub fn ironlb_egress(ctx: TcContext) -> i32 {
    let mut hook = Tc::new(&ctx);
    let verdict = reply::reply(&mut hook);
    count(verdict);
    events::tell(&hook, verdict);
    match verdict.action() {
        Action::Pass => TC_ACT_UNSPEC,
        Action::Redirect if hook.by_neighbor => by_neighbor(hook.out, &hook.next_hop),
        Action::Redirect => redirect(hook.out),
        Action::Drop | Action::Transmit => TC_ACT_SHOT,
    }
}

/// Sends the packet out of an uplink.
#[inline(always)]
fn redirect(uplink: u32) -> i32 {
    match UPLINKS.get(uplink) {
        // SAFETY: a helper that takes two integers.
        Some(uplink) => unsafe { bpf_redirect(uplink.ifindex, 0) as i32 },
        None => TC_ACT_SHOT,
    }
}

/// Sends the packet out of an uplink, to the client itself or by the uplink's gateway: the kernel finds the MAC.
#[inline(always)]
fn by_neighbor(uplink: u32, next_hop: &Option<Addr>) -> i32 {
    const AF_INET: u32 = 2;
    const AF_INET6: u32 = 10;
    let Some(uplink) = UPLINKS.get(uplink) else {
        return TC_ACT_SHOT;
    };
    match next_hop {
        // SAFETY: without parameters the packet's own destination is the neighbour.
        None => unsafe { bpf_redirect_neigh(uplink.device, core::ptr::null_mut(), 0, 0) as i32 },
        Some(gateway) => {
            let mut to = bpf_redir_neigh {
                nh_family: AF_INET6,
                __bindgen_anon_1: bpf_redir_neigh__bindgen_ty_1 {
                    ipv6_nh: gateway.words(),
                },
            };
            if gateway.is_v4() {
                to.nh_family = AF_INET;
                to.__bindgen_anon_1.ipv4_nh = gateway.v4_raw();
            }
            let length = size_of::<bpf_redir_neigh>() as i32;
            // SAFETY: `to` is as long as said.
            unsafe { bpf_redirect_neigh(uplink.device, &raw mut to, length, 0) as i32 }
        }
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
