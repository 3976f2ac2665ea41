//! Other nodes: what they hand on, what is handed on to them, and their probes.

use core::mem::offset_of;

use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use lb_common::{
    Addr, FlowKey, MAX_PEER_ADDRS, PEER_REFLECTS, PeerMac, SERVICE_SILENT, ServiceKey, Uplink,
    Verdict, checksum, field, frame,
    packet::{
        EthernetHeader, Ip, Ipv4Header, Ipv6Header, PROBE_ASKS, PROBE_MAGIC, PROBE_RETURNS,
        PROBE_SOURCE, PROBE_SOURCE_V6, Probe, TCP_ACK, TCP_SYN, Tcp, UdpHeader, mac_word, protocol,
    },
    peer_link,
};

use crate::{
    balance::frame_length,
    hook::{Hook, exchange_ends},
    maps::{
        CONTROL, EXCEPTIONS, PEER_MACS, PEERS, REFLECTIONS, SCRATCH, SERVICES, UPLINK, UPLINKS,
        count_handed_on,
    },
};

/// Where probes come from.
const SOURCE: Addr = {
    let [a, b, c, d] = PROBE_SOURCE;
    Addr {
        octets: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d],
    }
};
/// The same over IPv6.
const SOURCE_V6: Addr = Addr {
    octets: PROBE_SOURCE_V6,
};

/// Whether other nodes are known at all.
#[inline(always)]
pub fn are_known() -> bool {
    CONTROL.get(0).is_some_and(|control| control.peers != 0)
}

/// Whether peers may not yet have told which flows are theirs.
#[inline(always)]
fn are_settling() -> bool {
    match CONTROL.get(0) {
        // SAFETY: a helper without arguments.
        Some(control) if control.peers != 0 => unsafe {
            bpf_ktime_get_boot_ns() < control.settle_until
        },
        _ => false,
    }
}

/// Whether a packet in mid-flow without an entry may be of a flow that sits on a peer: one that may not yet have told,
/// or that does not answer now. It is never reset then.
#[inline(always)]
pub fn may_have(vip: Addr, port: u16) -> bool {
    if are_settling() {
        return true;
    }
    // SAFETY: one word of a value that a concurrent update may overwrite: one wrong answer at most.
    unsafe { SERVICES.get(&ServiceKey::new(vip, port)) }
        .is_some_and(|service| service.flags & SERVICE_SILENT != 0)
}

/// Number of the peer that a frame comes from.
#[inline(always)]
pub fn sender<H: Hook>(hook: &H) -> Option<u32> {
    let ethernet = hook.at::<EthernetHeader>(0)?;
    let key = PeerMac {
        mac: field!(ethernet, source),
        uplink: UPLINK.load() as u16,
    };
    // SAFETY: one word, copied out.
    unsafe { PEER_MACS.get(&key) }.copied()
}

/// Whether a peer handed this packet on to us: a frame from it that is none of its own.
#[inline(always)]
pub fn has_handed_on<H: Hook>(hook: &H, ip: &Ip) -> bool {
    if !are_known() {
        return false;
    }
    let Some(number) = sender(hook) else {
        return false;
    };
    let Some(peer) = PEERS.get(peer_link(number, UPLINK.load())) else {
        return false;
    };
    for at in 0..MAX_PEER_ADDRS {
        if peer.addrs[at] == ip.source {
            return false;
        }
    }
    true
}

/// Finds out whether a peer handed this packet on to us, for [`handed_on`].
#[inline(always)]
pub fn note_handed_on<H: Hook>(hook: &H, ip: &Ip) {
    let has = u64::from(has_handed_on(hook, ip));
    if let Some(scratch) = SCRATCH.get_ptr_mut(0) {
        // SAFETY: a slot of this CPU's own.
        unsafe { (*scratch).handed_on = has };
    }
}

/// What [`note_handed_on`] found out about this packet.
#[inline(always)]
pub fn handed_on() -> bool {
    handed_on_word() != 0
}

/// The same as 1 or 0.
#[inline(always)]
pub fn handed_on_word() -> u64 {
    match SCRATCH.get_ptr(0) {
        // SAFETY: as above; volatile, or the compiler would remember what was written.
        Some(scratch) => unsafe { (&raw const (*scratch).handed_on).read_volatile() },
        None => 0,
    }
}

/// The peer that has told that a flow is its own.
#[inline(always)]
pub fn of_exception(key: &FlowKey) -> Option<u32> {
    // The look-up is in memory that nothing else has touched lately.
    if !are_known() {
        return None;
    }
    // SAFETY: one word, copied out.
    Some(unsafe { EXCEPTIONS.get(key) }?.peer)
}

/// A packet of a flow that a peer has told to be its own; `None` for all others, and for a new flow where that
/// peer takes none.
#[inline(always)]
pub fn exception(tcp: &Tcp, key: &FlowKey) -> Option<Verdict> {
    let number = of_exception(key)?;
    if tcp.flags & (TCP_SYN | TCP_ACK) == TCP_SYN {
        let peer = PEERS.get(peer_link(number, UPLINK.load()))?;
        if peer.flags & PEER_REFLECTS == 0 {
            return None;
        }
    }
    Some(to(number, Verdict::HandedOnException))
}

/// Decides to hand a packet on, which [`hand_on`] does in one place for all: the code is large.
#[inline(always)]
pub fn to(number: u32, verdict: Verdict) -> Verdict {
    if let Some(scratch) = SCRATCH.get_ptr_mut(0) {
        // SAFETY: a slot of this CPU's own.
        unsafe { (*scratch).peer = u64::from(number) };
    }
    verdict
}

/// Sends a packet to another node, which rewrites it and answers the client itself.
#[inline(always)]
pub fn hand_on<H: Hook>(hook: &mut H, ip: &Ip, verdict: Verdict) -> Verdict {
    let number = match SCRATCH.get_ptr(0) {
        // SAFETY: as above; volatile, or the compiler would remember what was written.
        Some(scratch) => unsafe { (&raw const (*scratch).peer).read_volatile() as u32 },
        None => return Verdict::DroppedNoPeer,
    };
    let Some(peer) = PEERS.get(peer_link(number, UPLINK.load())) else {
        return Verdict::DroppedNoPeer;
    };
    // SAFETY: a field of the map's value.
    if unsafe { mac_word(&raw const peer.mac) } == 0 {
        return Verdict::DroppedNoPeer;
    }
    let to = peer.mac;
    let Some(uplink) = UPLINKS.get(UPLINK.load()) else {
        return Verdict::DroppedNoPeer;
    };
    let addresses = [to, uplink.mac];
    match lower(hook, ip) {
        Some(true) => {}
        Some(false) => return Verdict::DroppedTtl,
        None => return Verdict::DroppedRewrite,
    }
    if hook.store(0, &addresses).is_none() {
        return Verdict::DroppedRewrite;
    }
    let is_new = matches!(verdict, Verdict::HandedOnNew);
    count_handed_on(number, frame_length(ip), is_new);
    verdict
}

/// Takes one from the time to live; false where it is used up.
#[inline(always)]
fn lower<H: Hook>(hook: &mut H, ip: &Ip) -> Option<bool> {
    if ip.is_v6() {
        // With the octet before it: the verifier sees no bound in the comparison that one alone is compiled to.
        let at = ip.network() + offset_of!(Ipv6Header, next_header);
        let pair = hook.at::<[u8; 2]>(at)?;
        // SAFETY: `at` checked the bounds.
        let [next_header, limit] = unsafe { frame::get(pair) };
        if limit <= 1 {
            return Some(false);
        }
        hook.store(at, &[next_header, limit - 1])?;
        return Some(true);
    }
    let header = hook.at::<Ipv4Header>(ip.network())?;
    let (ttl, protocol) = (field!(header, ttl), field!(header, protocol));
    if ttl <= 1 {
        return Some(false);
    }
    let (old, new) = (
        u16::from_ne_bytes([ttl, protocol]),
        u16::from_ne_bytes([ttl - 1, protocol]),
    );
    let sum = checksum::update(field!(header, checksum), checksum::replaced16(old, new));
    // Time to live, protocol and checksum lie side by side, and the header's sum as a whole stays as it is.
    hook.store(ip.network() + offset_of!(Ipv4Header, ttl), &[new, sum])?;
    Some(true)
}

/// A probe, on its way out or back; `None` for what is none.
#[inline(always)]
pub fn probe<H: Hook>(hook: &mut H, uplink: &Uplink, ip: &Ip) -> Option<Verdict> {
    if ip.protocol != protocol::UDP || ip.is_fragment() {
        return None;
    }
    let own = if ip.is_v6() { SOURCE_V6 } else { SOURCE };
    let asks = ip.source == own;
    if !asks && ip.destination != own || !ip.reaches(size_of::<UdpHeader>() + size_of::<Probe>()) {
        return None;
    }
    let port = CONTROL.get(0)?.heartbeat_port.to_be();
    hook.pull(ip.transport() + size_of::<UdpHeader>() + size_of::<Probe>());
    let udp = hook.at::<UdpHeader>(ip.transport())?;
    if field!(udp, destination) != port || field!(udp, source) != port {
        return None;
    }
    let at = ip.transport() + size_of::<UdpHeader>();
    let probe = hook.at::<Probe>(at)?;
    let direction = u32::from_be(field!(probe, direction));
    let nonce = field!(probe, nonce);
    if u32::from_be(field!(probe, magic)) != PROBE_MAGIC {
        return None;
    }
    let number = sender(hook)?;
    if !asks {
        if direction != PROBE_RETURNS {
            return None;
        }
        let reflection = REFLECTIONS.get_ptr_mut(peer_link(number, UPLINK.load()))?;
        // SAFETY: two words that the programs alone write; the agent compares the nonce as a whole.
        unsafe {
            (*reflection).nonce = u64::from(nonce[1]) << 32 | u64::from(nonce[0]);
            (*reflection).at = bpf_ktime_get_boot_ns();
        }
        return Some(Verdict::DroppedProbeReturned);
    }
    if direction != PROBE_ASKS {
        return None;
    }
    crate::balance::vip(&ip.destination)?;
    let ethernet = hook.at::<EthernetHeader>(0)?;
    let macs = [field!(ethernet, source), uplink.mac];
    let back = Probe {
        magic: PROBE_MAGIC.to_be(),
        direction: PROBE_RETURNS.to_be(),
        nonce,
    };
    // UDP over IPv4 has none here, which 0 says (RFC 768).
    let sum = if ip.is_v6() {
        let changed = checksum::replaced32(PROBE_ASKS.to_be(), PROBE_RETURNS.to_be());
        match checksum::update(field!(udp, checksum), changed) {
            0 => u16::MAX,
            sum => sum,
        }
    } else {
        0
    };
    let done = exchange_ends(hook, ip).is_some()
        && hook
            .store(ip.transport() + offset_of!(UdpHeader, checksum), &sum)
            .is_some()
        && hook.store(at, &back).is_some()
        && hook.store(0, &macs).is_some();
    Some(if done {
        Verdict::ProbeReflected
    } else {
        Verdict::DroppedRewrite
    })
}
