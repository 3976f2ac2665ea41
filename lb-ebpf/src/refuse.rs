//! Refusals: a RST as the addressed host would send it, so that a client knows at once.

use aya_ebpf::helpers::bpf_jiffies64;
use lb_common::{
    Addr, VIP_REFUSE_DROP, Verdict, field,
    packet::{self, EthernetHeader, Ipv4, Reset, TCP_RST, Tcp},
};

use crate::{
    balance::vip,
    hook::Hook,
    maps::{BUCKET, CONTROL, TICKS_PER_SECOND},
};

/// Answers a packet to a VIP with a RST, or drops it as the VIP and the rate limit say.
#[inline(always)]
pub fn refuse<H: Hook>(hook: &mut H, ip: &Ipv4, tcp: &Tcp, verdict: Verdict) -> Verdict {
    if tcp.flags & TCP_RST != 0 {
        return Verdict::DroppedReset;
    }
    if ip.is_from_no_host() {
        return Verdict::DroppedSource;
    }
    let vip = vip(&Addr::from_v4_raw(ip.destination));
    if vip.is_none_or(|vip| vip.flags & VIP_REFUSE_DROP != 0) {
        return Verdict::DroppedRefused;
    }
    if !take_token() {
        return Verdict::DroppedRateLimited;
    }
    match answer(hook, ip) {
        Some(()) => verdict,
        None => Verdict::DroppedRewrite,
    }
}

/// Turns the packet into its RST.
#[inline(always)]
fn answer<H: Hook>(hook: &mut H, ip: &Ipv4) -> Option<()> {
    let partial = H::MAY_BE_PARTIAL && packet::has_partial_checksum(hook, ip);
    // The device sums from where the request's TCP header began: with options cut out it is elsewhere.
    if partial && ip.transport - ip.offset != size_of::<packet::Ipv4Header>() {
        return None;
    }
    let reset = packet::reset(hook, ip, partial)?;
    let ethernet = hook.at::<EthernetHeader>(0)?;
    let addresses = [field!(ethernet, source), field!(ethernet, destination)];
    hook.store(ip.offset, &reset)?;
    hook.store(0, &addresses)?;
    hook.cut(ip.offset + size_of::<Reset>())
}

/// Takes a token of this CPU's bucket, which holds one second's worth.
#[inline(always)]
fn take_token() -> bool {
    let (Some(bucket), Some(control)) = (BUCKET.get_ptr_mut(0), CONTROL.get(0)) else {
        return false;
    };
    // SAFETY: a slot of this CPU's own.
    let bucket = unsafe { &mut *bucket };
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_jiffies64() };
    let rate = u64::from(control.refusals_per_second);
    let cost = u64::from(TICKS_PER_SECOND.load());
    let full = rate * cost;
    let passed = now.wrapping_sub(bucket.refilled);
    bucket.refilled = now;
    bucket.tokens = if passed >= cost || bucket.tokens + passed * rate > full {
        full
    } else {
        bucket.tokens + passed * rate
    };
    if bucket.tokens < cost {
        return false;
    }
    bucket.tokens -= cost;
    true
}
