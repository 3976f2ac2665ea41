//! Refusals: a RST as the addressed host would send it, so that a client knows at once.

use aya_ebpf::helpers::bpf_jiffies64;
use lb_common::{
    Bucket, VIP_REFUSE_DROP, Verdict, field,
    packet::{self, EthernetHeader, Ip, Reset, Reset6, TCP_RST, Tcp},
};

use crate::{
    balance::vip,
    events,
    hook::Hook,
    maps::{BUCKET, CONTROL, Route, SCRATCH, TICKS_PER_SECOND, UPLINK, UPLINKS},
    peers,
};

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// Answers a packet to a VIP with a RST, or drops it as the VIP and the rate limit say.
#[inline(always)]
pub fn refuse<H: Hook>(hook: &mut H, ip: &Ip, tcp: &Tcp, verdict: Verdict) -> Verdict {
    if tcp.flags & TCP_RST != 0 {
        return Verdict::DroppedReset;
    }
    if ip.is_from_no_host() {
        return Verdict::DroppedSource;
    }
    let vip = vip(&ip.destination);
    if vip.is_none_or(|vip| vip.flags & VIP_REFUSE_DROP != 0) {
        return Verdict::DroppedRefused;
    }
    if !take_token() {
        return Verdict::DroppedRateLimited;
    }
    events::refusal(hook, verdict);
    match answer(hook, ip) {
        Some(()) => verdict,
        None => Verdict::DroppedRewrite,
    }
}

/// Turns the packet into its RST.
#[inline(always)]
fn answer<H: Hook>(hook: &mut H, ip: &Ip) -> Option<()> {
    let partial = H::MAY_BE_PARTIAL && packet::has_partial_checksum(hook, ip);
    // The device sums from where the request's TCP header began: with options cut out it is elsewhere.
    if partial && !ip.is_plain() {
        return None;
    }
    let reset = packet::reset(hook, ip, partial)?;
    let ethernet = hook.at::<EthernetHeader>(0)?;
    let mut addresses = [field!(ethernet, source), field!(ethernet, destination)];
    if peers::handed_on() {
        // The frame comes from the peer, the RST goes to the client.
        addresses[0] = neighbor(hook, ip)?;
    }
    let length = if ip.is_v6() {
        hook.store(ip.network(), &packet::reset_v6(ip, reset))?;
        size_of::<Reset6>()
    } else {
        hook.store(ip.network(), &packet::reset_v4(ip, reset))?;
        size_of::<Reset>()
    };
    hook.store(0, &addresses)?;
    hook.resize(ip.network() + length)
}

/// MAC by which the client is reached without the peer, if the kernel has it.
#[inline(always)]
fn neighbor<H: Hook>(hook: &mut H, ip: &Ip) -> Option<[u8; 6]> {
    let device = UPLINKS.get(UPLINK.load())?.device;
    let scratch = SCRATCH.get_ptr_mut(0)?;
    // SAFETY: a slot of this CPU's own.
    let route = unsafe { &raw mut (*scratch).route };
    let (family, source, destination) = if ip.is_v6() {
        (AF_INET6, ip.destination.words(), ip.source.words())
    } else {
        let first = |word| [word, 0, 0, 0];
        let (source, destination) = (ip.destination.v4_raw(), ip.source.v4_raw());
        (AF_INET, first(source), first(destination))
    };
    // SAFETY: as above.
    unsafe {
        *route = Route {
            family,
            l4: [0; 5],
            tot_len: 0,
            ifindex: device,
            tos: 0,
            source,
            destination,
            vlan: 0,
            own_mac: [0; 6],
            mac: [0; 6],
        };
    }
    hook.route(route)?;
    // SAFETY: as above.
    Some(unsafe { (*route).mac })
}

/// Takes a token of this CPU's bucket for refusals.
#[inline(always)]
fn take_token() -> bool {
    let (Some(bucket), Some(control)) = (BUCKET.get_ptr_mut(0), CONTROL.get(0)) else {
        return false;
    };
    // SAFETY: a slot of this CPU's own.
    take_from(unsafe { &mut *bucket }, control.refusals_per_second)
}

/// Takes a token of a bucket, which holds one second's worth.
#[inline(always)]
pub fn take_from(bucket: &mut Bucket, per_second: u32) -> bool {
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_jiffies64() };
    let rate = u64::from(per_second);
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
