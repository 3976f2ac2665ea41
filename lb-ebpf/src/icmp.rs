//! ICMP: echo for VIPs, and errors about flows, which find their way by the packet that they quote.

use core::mem::offset_of;

use lb_common::{
    Flow, FlowKey, Verdict, Vip, checksum, field,
    packet::{
        self, Change, EthernetHeader, IcmpHeader, Ip, Ipv4Header, Ipv6Header, Quoted, TcpHeader,
        icmp,
    },
};

use crate::{
    balance::{alive, place},
    hook::{Hook, exchange_ends},
    maps::{LIVING, LIVING_REPLY, YOUNG},
    neighbor, peers,
};

/// Bytes of an ICMP error that are looked at: its header, and of the packet the headers.
const QUOTED: usize = size_of::<IcmpHeader>() + size_of::<Ipv6Header>() + size_of::<TcpHeader>();

/// Which end of a quoted packet is ours.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// It was a pod's reply: the error goes to the pod.
    Source,
    /// It was a client's packet: the error goes to the client.
    Destination,
}

/// An ICMP error for a VIP about a TCP packet; `None` for all else.
#[inline(always)]
pub fn error<H: Hook>(hook: &mut H, ip: &Ip) -> Option<Verdict> {
    hook.pull(ip.transport() + QUOTED);
    let quoted = packet::quoted(hook, ip)?;
    let key = FlowKey::forward(
        quoted.ip.destination,
        quoted.destination,
        quoted.ip.source,
        quoted.source,
    );
    if let Some(flow) = LIVING.get_ptr_mut(&key) {
        // SAFETY: only read; an update meanwhile costs one wrong packet at most.
        let flow = unsafe { &*flow };
        if alive(flow.backend).is_none() {
            return Some(Verdict::DroppedIcmpUnknown);
        }
        return Some(to_pod(hook, ip, &quoted, flow));
    }
    peers::note_handed_on(hook, ip);
    if !peers::handed_on()
        && let Some(number) = peers::of_exception(&key)
    {
        return Some(peers::to(number, Verdict::HandedOnException));
    }
    if let Some(flow) = YOUNG.get_ptr_mut(&key) {
        // SAFETY: as above.
        let flow = unsafe { &*flow };
        if alive(flow.backend).is_some_and(|backend| backend.peer == 0) {
            return Some(to_pod(hook, ip, &quoted, flow));
        }
    }
    if peers::handed_on() {
        return Some(Verdict::DroppedNotHere);
    }
    Some(match place(&key) {
        Some(0) | None => Verdict::DroppedIcmpUnknown,
        Some(peer) => peers::to(u32::from(peer), Verdict::HandedOnMiss),
    })
}

#[inline(always)]
fn to_pod<H: Hook>(hook: &mut H, ip: &Ip, quoted: &Quoted, flow: &Flow) -> Verdict {
    let change = Change {
        old_addr: quoted.ip.source,
        new_addr: flow.addr,
        old_port: quoted.source,
        new_port: flow.port,
        old_other_port: quoted.destination,
        new_other_port: flow.client_port,
    };
    match rewrite(hook, ip, quoted, &change, End::Source) {
        Some(()) => Verdict::ForwardedIcmp,
        None => Verdict::DroppedRewrite,
    }
}

/// An ICMP error that leaves, about a client's packet to a pod of a living flow: the error carries the VIP, and the
/// packet is again as the client sent it. `None` for all else.
#[inline(always)]
pub fn leaving<H: Hook>(hook: &mut H, ip: &Ip) -> Option<(Flow, Verdict)> {
    hook.pull(ip.transport() + QUOTED);
    let quoted = packet::quoted(hook, ip)?;
    let key = FlowKey::reply(
        quoted.ip.source,
        quoted.source,
        quoted.ip.destination,
        quoted.destination,
    );
    // SAFETY: only read; an update meanwhile costs one wrong packet at most.
    let flow = *unsafe { LIVING_REPLY.get(&key) }?;
    let change = Change {
        old_addr: quoted.ip.destination,
        new_addr: flow.addr,
        old_port: quoted.destination,
        new_port: flow.port,
        old_other_port: quoted.source,
        new_other_port: flow.client_port,
    };
    let verdict = match rewrite(hook, ip, &quoted, &change, End::Destination) {
        Some(()) => Verdict::RepliedIcmp,
        None => Verdict::DroppedRewrite,
    };
    Some((flow, verdict))
}

/// Rewrites one end of the quoted packet and the address of the error itself, and mends all sums.
#[inline(always)]
fn rewrite<H: Hook>(
    hook: &mut H,
    ip: &Ip,
    quoted: &Quoted,
    change: &Change,
    end: End,
) -> Option<()> {
    let outer_old = match end {
        End::Source => ip.destination,
        End::Destination => ip.source,
    };
    let mut ports = checksum::replaced16(change.old_port.to_be(), change.new_port.to_be());
    ports += checksum::replaced16(change.old_other_port.to_be(), change.new_other_port.to_be());
    // What changes in the error's own bytes; in ICMPv6 its pseudo-header counts.
    let mut delta = ports;
    let addresses;
    if ip.is_v6() {
        addresses = change.addresses_v6();
        let (inner, outer) = match end {
            End::Source => (
                offset_of!(Ipv6Header, source),
                offset_of!(Ipv6Header, destination),
            ),
            End::Destination => (
                offset_of!(Ipv6Header, destination),
                offset_of!(Ipv6Header, source),
            ),
        };
        delta += addresses + packet::replaced_v6(&outer_old, &change.new_addr);
        hook.store_summed(quoted.ip.network() + inner, &change.new_addr)?;
        hook.store_summed(ip.network() + outer, &change.new_addr)?;
    } else {
        let (old, new) = (change.old_addr.v4_raw(), change.new_addr.v4_raw());
        addresses = checksum::replaced32(old, new);
        let (inner, outer) = match end {
            End::Source => (
                offset_of!(Ipv4Header, source),
                offset_of!(Ipv4Header, destination),
            ),
            End::Destination => (
                offset_of!(Ipv4Header, destination),
                offset_of!(Ipv4Header, source),
            ),
        };
        let header = hook.at::<Ipv4Header>(quoted.ip.network())?;
        let sum = field!(header, checksum);
        let mended = checksum::update(sum, addresses);
        delta += addresses + checksum::replaced16(sum, mended);
        let header = hook.at::<Ipv4Header>(ip.network())?;
        let outer_sum = checksum::update(
            field!(header, checksum),
            checksum::replaced32(outer_old.v4_raw(), new),
        );
        let at = offset_of!(Ipv4Header, checksum);
        hook.store_summed(quoted.ip.network() + at, &mended)?;
        hook.store_summed(quoted.ip.network() + inner, &new)?;
        hook.store_summed(ip.network() + at, &outer_sum)?;
        hook.store_summed(ip.network() + outer, &new)?;
    }
    // As much as is quoted: eight bytes of TCP at least (RFC 792), often all.
    let at = quoted.ip.transport() + offset_of!(TcpHeader, checksum);
    let quoted_end = ip.network() + ip.length as usize;
    if at + size_of::<u16>() <= quoted_end
        && let Some(sum) = hook.at::<[u16; 1]>(at)
    {
        // SAFETY: `at` checked the bounds.
        let [sum] = unsafe { lb_common::frame::get(sum) };
        let mended = checksum::update(sum, addresses + ports);
        delta += checksum::replaced16(sum, mended);
        hook.store_summed(at, &mended)?;
    }
    let (own, other) = match end {
        End::Source => (
            offset_of!(TcpHeader, source),
            offset_of!(TcpHeader, destination),
        ),
        End::Destination => (
            offset_of!(TcpHeader, destination),
            offset_of!(TcpHeader, source),
        ),
    };
    let transport = quoted.ip.transport();
    hook.store_summed(transport + own, &change.new_port.to_be())?;
    hook.store_summed(transport + other, &change.new_other_port.to_be())?;
    let header = hook.at::<IcmpHeader>(ip.transport())?;
    let mended = checksum::update(field!(header, checksum), delta);
    hook.store_summed(ip.transport() + offset_of!(IcmpHeader, checksum), &mended)
}

/// An echo request for a VIP that this node announces: the reply; `None` for all else.
#[inline(always)]
pub fn echo<H: Hook>(hook: &mut H, ip: &Ip, vip: &Vip) -> Option<Verdict> {
    const TTL: u8 = 64;
    hook.pull(ip.transport() + size_of::<IcmpHeader>());
    let header = hook.at::<IcmpHeader>(ip.transport())?;
    let (asks, answers) = if ip.is_v6() {
        (icmp::ECHO_V6, icmp::ECHO_REPLY_V6)
    } else {
        (icmp::ECHO, icmp::ECHO_REPLY)
    };
    let (kind, code) = (field!(header, kind), field!(header, code));
    if kind != asks || ip.is_from_no_host() || !neighbor::answers(&ip.destination, vip) {
        return None;
    }
    if !ip.is_well_formed() || !ip.reaches(size_of::<IcmpHeader>()) {
        return Some(Verdict::DroppedMalformed);
    }
    let changed = checksum::replaced16(
        u16::from_ne_bytes([kind, code]),
        u16::from_ne_bytes([answers, code]),
    );
    let mended = checksum::update(field!(header, checksum), changed);
    let ethernet = hook.at::<EthernetHeader>(0)?;
    let macs = [field!(ethernet, source), field!(ethernet, destination)];
    let head = [u16::from_ne_bytes([answers, code]), mended];
    if ip.is_v6() {
        hook.store(ip.network() + offset_of!(Ipv6Header, hop_limit), &TTL)?;
    } else {
        let fresh = hook.at::<Ipv4Header>(ip.network())?;
        let (ttl, protocol) = (field!(fresh, ttl), field!(fresh, protocol));
        let (old, new) = (
            u16::from_ne_bytes([ttl, protocol]),
            u16::from_ne_bytes([TTL, protocol]),
        );
        let sum = checksum::update(field!(fresh, checksum), checksum::replaced16(old, new));
        hook.store_summed(ip.network() + offset_of!(Ipv4Header, ttl), &[new, sum])?;
    }
    let done = exchange_ends(hook, ip).is_some()
        && hook.store_summed(ip.transport(), &head).is_some()
        && hook.store(0, &macs).is_some();
    Some(if done {
        Verdict::EchoAnswered
    } else {
        Verdict::DroppedRewrite
    })
}
