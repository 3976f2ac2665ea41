//! The forward path: client to VIP, to a pod of this node.

use aya_ebpf::{btf_maps::lpm_trie::Key, helpers::bpf_jiffies64};
use core::sync::atomic::{Ordering, compiler_fence};
use lb_common::{
    Addr, BACKEND_ALIVE, BACKEND_ELIGIBLE, Backend, FLOW_ANSWERED, FLOW_CLAIMED, FLOW_CLOSING,
    FLOW_ELSEWHERE, FLOW_HANDED_ON, FLOW_MISS, FLOW_REFUSED, FLOW_SECOND, FLOW_SPARED, Flow,
    FlowKey, MAX_PASS, POD_HOST, SHUN, ServiceKey, Source, UPLINK_BYPASS_DROP, Uplink,
    VIP_EXTERNAL, Verdict, Vip, backend_generation, backend_index,
    choice::{self, NOBODY},
    events::{BY_CLIENT_RESET, BY_GONE, BY_POD_FIN},
    field,
    packet::{
        self, Change, EthernetHeader, Ip, Ipv4Header, PROBE_SOURCE, TCP_ACK, TCP_FIN, TCP_RST,
        TCP_SYN, Tcp, TcpHeader, UdpHeader, ethertype, mac_word, protocol,
    },
};

use crate::{
    flows,
    hook::{Hook, find_transport},
    icmp,
    maps::{
        BACKENDS, CONTROL, DIRECT, LIVING, PODS, SCRATCH, SERVICES, SHUNNED, SOURCES,
        TICKS_PER_SECOND, UPLINK, UPLINKS, VIPS, YOUNG, count_in, keep, ticks,
    },
    neighbor, peers, refuse,
};

/// Takes a frame through the forward path.
#[inline(always)]
pub fn forward<H: Hook>(hook: &mut H) -> Verdict {
    let Some(uplink) = UPLINKS.get(UPLINK.load()) else {
        return Verdict::Passed;
    };
    // While the mode is switched both hooks have a program: only one of them may act on a packet.
    if uplink.mode != H::MODE {
        return Verdict::Passed;
    }
    hook.pull(packet::HEADERS);
    let Some(ethernet) = hook.at::<EthernetHeader>(0) else {
        return Verdict::Passed;
    };
    // SAFETY: `at` checked the header's bounds.
    let destination = unsafe { mac_word(&raw const (*ethernet).destination) };
    let group = destination & 1 != 0;
    // SAFETY: a field of the map's value.
    if !group && destination != unsafe { mac_word(&raw const uplink.mac) } {
        return Verdict::PassedOtherMac;
    }
    let Some(link) = packet::link(hook) else {
        return Verdict::Passed;
    };
    if link.vlan != uplink.vlan {
        return Verdict::PassedOtherVlan;
    }
    let ip = match link.ethertype {
        ethertype::IPV4 if is_foreign(hook, uplink, link.network) => return Verdict::Passed,
        ethertype::IPV4 => packet::ipv4(hook, link.network),
        ethertype::IPV6 => packet::ipv6(hook, link.network),
        ethertype::ARP => return neighbor::arp(hook, uplink, link.network),
        _ => return Verdict::Passed,
    };
    let Some(mut ip) = ip else {
        return Verdict::Passed;
    };
    if ip.is_v6() {
        // A mapped address is none on a wire, and must not be taken for the IPv4 address that maps to it.
        if ip.destination.is_v4() {
            return Verdict::Passed;
        }
        if let Some(verdict) = neighbor::solicitation(hook, uplink, &ip, group) {
            return verdict;
        }
    }
    if let Some(verdict) = peers::probe(hook, uplink, &ip) {
        return verdict;
    }
    if uplink.vip_filter.may_contain(ip.destination.v4_raw())
        && let Some(verdict) = to_vip(hook, &mut ip, group)
    {
        return verdict;
    }
    match CONTROL.get(0) {
        Some(control) if control.pod_filter.may_contain(ip.destination.v4_raw()) => {
            direct(hook, uplink, &mut ip)
        }
        _ => Verdict::Passed,
    }
}

/// Whether an IPv4 packet goes to an address that nothing here is about: most of what arrives. Told by its addresses, before the
/// rest of the header is read.
#[inline(always)]
fn is_foreign<H: Hook>(hook: &H, uplink: &Uplink, network: usize) -> bool {
    let Some(header) = hook.at::<Ipv4Header>(network) else {
        return true;
    };
    let (source, destination) = (field!(header, source), field!(header, destination));
    let prober = u32::from_ne_bytes(PROBE_SOURCE);
    !uplink.vip_filter.may_contain(destination)
        && source != prober
        && destination != prober
        && !CONTROL
            .get(0)
            .is_some_and(|control| control.pod_filter.may_contain(destination))
}

/// A packet that may be for a VIP; `None` when it is not.
#[inline(always)]
fn to_vip<H: Hook>(hook: &mut H, ip: &mut Ip, group: bool) -> Option<Verdict> {
    if find_transport(hook, ip).is_none() {
        vip(&ip.destination)?;
        return Some(Verdict::DroppedMalformed);
    }
    if ip.protocol != protocol::TCP || ip.is_fragment() || group {
        let vip = vip(&ip.destination)?;
        let verdict = not_tcp(hook, ip, vip, group);
        if verdict.is_handed_on() {
            return Some(peers::hand_on(hook, ip, verdict));
        }
        return Some(verdict);
    }
    hook.pull(ip.transport() + size_of::<TcpHeader>());
    let Some(tcp) = packet::tcp(hook, ip) else {
        vip(&ip.destination)?;
        return Some(Verdict::DroppedMalformed);
    };
    let key = FlowKey::forward(ip.source, tcp.source, ip.destination, tcp.destination);
    let kept = keep(ip, &tcp, &key)?;
    let (ip, tcp, key) = (&kept.ip, &kept.tcp, &kept.key);
    let verdict = lookup(hook, ip, tcp, key)?;
    // In one place, for all refusals: the code is large.
    if verdict.is_refusal() {
        return Some(refuse::refuse(hook, ip, tcp, verdict));
    }
    if verdict.is_handed_on() {
        return Some(peers::hand_on(hook, ip, verdict));
    }
    Some(verdict)
}

/// Finds the flow of a packet, or begins one; `None` when the address is no VIP of this uplink.
#[inline(always)]
fn lookup<H: Hook>(hook: &mut H, ip: &Ip, tcp: &Tcp, key: &FlowKey) -> Option<Verdict> {
    if let Some(flow) = LIVING.get_ptr_mut(key) {
        // SAFETY: the value is this map's; concurrent writers keep every field a valid integer.
        if let Some(verdict) = living(hook, ip, tcp, key, unsafe { &mut *flow }) {
            return Some(verdict);
        }
    }
    peers::note_handed_on(hook, ip);
    avoid(NOBODY);
    if !peers::handed_on()
        && let Some(verdict) = peers::exception(tcp, key)
    {
        return Some(verdict);
    }
    if let Some(flow) = YOUNG.get_ptr_mut(key) {
        // SAFETY: as above.
        if let Some(verdict) = young(hook, ip, tcp, key, unsafe { &mut *flow }) {
            return Some(verdict);
        }
    }
    begin(hook, ip, tcp, key)
}

/// The VIP of an address, if it belongs to this uplink.
#[inline(always)]
pub fn vip(addr: &Addr) -> Option<&'static Vip> {
    // SAFETY: only read; an update meanwhile costs one wrong answer at most.
    let vip = unsafe { VIPS.get(addr) }?;
    (vip.uplink == UPLINK.load()).then_some(vip)
}

/// The backend of an id, if that very backend still exists.
#[inline(always)]
pub fn alive(id: u32) -> Option<&'static Backend> {
    let backend = BACKENDS.get(backend_index(id))?;
    (backend.generation == backend_generation(id) && backend.flags & BACKEND_ALIVE != 0)
        .then_some(backend)
}

/// A packet of a living flow; `None` when a SYN is to begin anew because the backend is gone.
#[inline(always)]
fn living<H: Hook>(
    hook: &mut H,
    ip: &Ip,
    tcp: &Tcp,
    key: &FlowKey,
    flow: &mut Flow,
) -> Option<Verdict> {
    if alive(flow.backend).is_none() {
        flows::remove_living(key, flow, BY_GONE);
        let _ = YOUNG.remove(key);
        peers::note_handed_on(hook, ip);
        return gone(tcp);
    }
    let change = to_pod(ip, tcp, flow);
    let bytes = frame_length(ip);
    note_client(tcp, flow, bytes);
    if comes_otherwise(hook, flow) {
        note_way(hook, flow, peers::has_handed_on(hook, ip));
        flows::turn_replies(key, flow);
    }
    count_in(flow.service, backend_index(flow.backend), bytes, false);
    if tcp.flags & TCP_FIN != 0 {
        flow.client_fin = 1;
    }
    if tcp.flags & TCP_RST != 0 || flow.client_fin & flow.pod_fin != 0 {
        // The reply path would have ended it by FIN, had the client's been the first.
        let (state, by) = if tcp.flags & TCP_RST != 0 {
            (FLOW_CLOSING | FLOW_CLAIMED, BY_CLIENT_RESET)
        } else {
            (FLOW_CLOSING, BY_POD_FIN)
        };
        flows::close(key, flow, state, by);
    }
    Some(rewritten(hook, ip, &change, Verdict::Forwarded))
}

/// A packet of a young or closing flow; `None` when it is to begin anew.
#[inline(always)]
fn young<H: Hook>(
    hook: &mut H,
    ip: &Ip,
    tcp: &Tcp,
    key: &FlowKey,
    flow: &mut Flow,
) -> Option<Verdict> {
    let syn = tcp.flags & (TCP_SYN | TCP_ACK) == TCP_SYN;
    let id = flow.backend;
    let backend = alive(id);
    let new = syn && flow.state & FLOW_CLOSING != 0;
    let peer = backend.map_or(0, |backend| u32::from(backend.peer));
    if peer != 0 && peers::handed_on() {
        // From when we were the first to see it, or the peer's table differs.
        if !syn {
            return Some(Verdict::DroppedNotHere);
        }
        let _ = YOUNG.remove(key);
        return None;
    }
    if syn {
        // A retransmission must not hop to another backend while this one takes new flows.
        if flow.state & FLOW_REFUSED != 0
            || backend.is_none_or(|backend| backend.flags & BACKEND_ELIGIBLE == 0)
        {
            let _ = YOUNG.remove(key);
            return None;
        }
        if flow.state & FLOW_SPARED != 0 && !new {
            avoid(u64::from(id));
            let _ = YOUNG.remove(key);
            return None;
        }
        if new {
            // The client uses its port again.
            flow.started = ticks();
            flow.bytes = 0;
        }
        flow.state &= if new {
            FLOW_ELSEWHERE
        } else {
            FLOW_ELSEWHERE | FLOW_ANSWERED | FLOW_SECOND
        };
        flow.client_fin = 0;
        flow.pod_fin = 0;
    } else if backend.is_none() {
        let elsewhere = flow.state & FLOW_ELSEWHERE != 0;
        let _ = YOUNG.remove(key);
        return if elsewhere { None } else { gone(tcp) };
    } else if flow.state & FLOW_REFUSED != 0 {
        let _ = YOUNG.remove(key);
        return Some(Verdict::RefusedTableFull);
    }
    let bytes = frame_length(ip);
    if flow.state & FLOW_CLOSING == 0 {
        note_client(tcp, flow, bytes);
        note_way(hook, flow, peers::handed_on());
        if tcp.flags & TCP_FIN != 0 {
            flow.client_fin = 1;
            // The reply path may have made it living meanwhile, without the mark.
            if let Some(living) = LIVING.get_ptr_mut(key) {
                // SAFETY: a byte of the map's value.
                unsafe { (*living).client_fin = 1 };
            }
        }
        if tcp.flags & TCP_RST != 0 {
            flow.state |= FLOW_CLOSING | FLOW_CLAIMED;
        }
    }
    if peer != 0 {
        let verdict = if new {
            Verdict::HandedOnNew
        } else {
            Verdict::HandedOn
        };
        return Some(peers::to(peer, verdict));
    }
    if flow.client_port != key.client_port {
        flows::keep_translated(key, flow);
    }
    let change = to_pod(ip, tcp, flow);
    let service = flow.service;
    count_in(service, backend_index(id), bytes, new);
    let verdict = if new {
        Verdict::ForwardedNew
    } else {
        Verdict::Forwarded
    };
    Some(rewritten(hook, ip, &change, verdict))
}

/// What becomes of a packet whose backend is gone: a SYN begins anew, the rest is refused.
#[inline(always)]
fn gone(tcp: &Tcp) -> Option<Verdict> {
    if tcp.flags & TCP_SYN != 0 {
        return None;
    }
    Some(Verdict::RefusedGone)
}

/// A packet without an entry: chooses a backend; `None` when the address is no VIP of this uplink.
#[inline(always)]
fn begin<H: Hook>(hook: &mut H, ip: &Ip, tcp: &Tcp, key: &FlowKey) -> Option<Verdict> {
    let vip = vip(&key.addr)?;
    let syn = tcp.flags & (TCP_SYN | TCP_ACK) == TCP_SYN;
    if !syn && peers::handed_on() {
        return Some(Verdict::DroppedNotHere);
    }
    let chosen = match choose(key, syn) {
        Choice::NoService | Choice::NoBackend if peers::handed_on() => {
            return Some(Verdict::DroppedNotHere);
        }
        Choice::NoService => {
            if listed(vip, protocol::TCP, key.port) {
                return Some(Verdict::PassedListed);
            }
            if vip.flags & VIP_EXTERNAL != 0 {
                return Some(Verdict::PassedExternal);
            }
            if !syn && peers::may_have(key.addr, key.port) {
                return Some(Verdict::DroppedSettling);
            }
            return Some(Verdict::RefusedNoService);
        }
        Choice::NoBackend if !syn && peers::may_have(key.addr, key.port) => {
            return Some(Verdict::DroppedSettling);
        }
        Choice::NoBackend => {
            return Some(Verdict::RefusedNoBackend);
        }
        Choice::Inconsistent => return Some(Verdict::DroppedInconsistent),
        Choice::Backend {
            id,
            service,
            sources,
        } => (id, service, sources),
    };
    let (id, service, sources) = chosen;
    if ip.is_from_no_host() {
        return Some(Verdict::DroppedSource);
    }
    let Some(backend) = alive(id) else {
        return Some(Verdict::DroppedInconsistent);
    };
    if backend.service != service {
        return Some(Verdict::DroppedInconsistent);
    }
    let peer = u32::from(backend.peer);
    // A flow of long ago may be living at the peer.
    if (syn || peer == 0) && !is_admitted(key, sources) {
        return Some(if peers::handed_on() {
            Verdict::DroppedNotHere
        } else {
            Verdict::RefusedSource
        });
    }
    if peer != 0 {
        if !syn {
            // No entry: it would outlive a moment in which the nodes' tables differ.
            return Some(peers::to(peer, Verdict::HandedOnMiss));
        }
        let Some(flow) = flows::young(key, backend, id) else {
            return Some(Verdict::DroppedInconsistent);
        };
        note_client(tcp, flow, frame_length(ip));
        note_way(hook, flow, false);
        flow.state = FLOW_ELSEWHERE;
        // Without an entry the hash finds the same node as long as the tables stay.
        let _ = YOUNG.insert(key, &*flow, 0);
        return Some(peers::to(peer, Verdict::HandedOnNew));
    }
    if syn && flows::table_is_full() {
        return Some(Verdict::RefusedTableFull);
    }
    let Some(flow) = flows::young_of_free_port(key, backend, id) else {
        return Some(Verdict::DroppedCollision);
    };
    let bytes = frame_length(ip);
    note_client(tcp, flow, bytes);
    note_way(hook, flow, peers::handed_on());
    if tcp.flags & TCP_FIN != 0 {
        flow.client_fin = 1;
    }
    if tcp.flags & TCP_RST != 0 {
        flow.state = FLOW_CLOSING | FLOW_CLAIMED;
    } else if !syn {
        flow.state = FLOW_MISS;
    } else if avoided() != NOBODY {
        flow.state = FLOW_SECOND;
    }
    if YOUNG.insert(key, &*flow, 0).is_err() {
        return Some(Verdict::DroppedNoRoom);
    }
    if flow.client_port != key.client_port {
        flows::keep_translated(key, flow);
    }
    count_in(service, backend_index(id), bytes, syn);
    let verdict = if syn {
        Verdict::ForwardedNew
    } else {
        Verdict::ForwardedMiss
    };
    Some(rewritten(hook, ip, &to_pod(ip, tcp, flow), verdict))
}

/// Whether a client may open connections to a service with that list of source ranges.
#[inline(always)]
fn is_admitted(key: &FlowKey, sources: u32) -> bool {
    sources == 0
        || SOURCES
            .get(&Key::new(Source::BITS, Source::new(sources, key.client)))
            .is_some()
}

/// Number of the node that the hash places a flow on, 0 for this one.
#[inline(always)]
pub fn place(key: &FlowKey) -> Option<u16> {
    match choose(key, false) {
        Choice::Backend { id, .. } => Some(alive(id)?.peer),
        _ => None,
    }
}

enum Choice {
    NoService,
    NoBackend,
    Inconsistent,
    Backend { id: u32, service: u16, sources: u32 },
}

/// Chooses among the VIP port's candidates, for what a peer handed on among those of this node, and trusts the answer
/// only if the value was whole.
///
/// A new flow passes over a backend whose RST was kept from a client a moment ago; for all else it is the hash alone.
#[inline(always)]
fn choose(key: &FlowKey, is_new: bool) -> Choice {
    let mut avoid = if is_new { avoided() } else { NOBODY };
    for is_last in [false, true] {
        // SAFETY: a concurrent update may overwrite the value while it is read: see below.
        let Some(service) = (unsafe { SERVICES.get(&ServiceKey::new(key.addr, key.port)) }) else {
            return Choice::NoService;
        };
        let (version, id, count) = (service.version, service.id, service.count);
        let sources = service.sources;
        compiler_fence(Ordering::SeqCst);
        // All of them unless it was handed on; without a branch, to be verified once.
        let among = service.local | peers::handed_on_word().wrapping_sub(1);
        let best = choice::choose(service, key, among, avoid);
        compiler_fence(Ordering::SeqCst);
        if service.version_tail != version || service.version != version || service.id != id {
            continue;
        }
        if let Some(backend) = best
            && is_new
            && !is_last
            && avoid == NOBODY
            && is_shunned(backend)
        {
            avoid = u64::from(backend);
            continue;
        }
        // It is better than nobody.
        let avoided = (avoid != NOBODY && count != 0).then_some(avoid as u32);
        return match best.or(avoided) {
            Some(backend) => Choice::Backend {
                id: backend,
                service: id,
                sources,
            },
            None if count == 0 || peers::handed_on() => Choice::NoBackend,
            None => Choice::Inconsistent,
        };
    }
    Choice::Inconsistent
}

/// Lets the choice for this packet pass a backend over, or [`NOBODY`].
#[inline(always)]
fn avoid(id: u64) {
    if let Some(scratch) = SCRATCH.get_ptr_mut(0) {
        // SAFETY: a slot of this CPU's own.
        unsafe { (*scratch).avoid = id };
    }
}

/// The backend that it passes over.
#[inline(always)]
fn avoided() -> u64 {
    match SCRATCH.get_ptr(0) {
        // SAFETY: as above; volatile, or the compiler would remember what was written.
        Some(scratch) => unsafe { (&raw const (*scratch).avoid).read_volatile() },
        None => NOBODY,
    }
}

/// Whether a RST of a backend was kept from a client a moment ago.
#[inline(always)]
fn is_shunned(id: u32) -> bool {
    let Some(&at) = SHUNNED.get(backend_index(id)) else {
        return false;
    };
    // SAFETY: a helper without arguments.
    at != 0
        && unsafe { bpf_jiffies64() }.wrapping_sub(at) < SHUN * u64::from(TICKS_PER_SECOND.load())
}

/// The rewrite that brings a client's packet to the flow's pod.
#[inline(always)]
fn to_pod(ip: &Ip, tcp: &Tcp, flow: &Flow) -> Change {
    Change {
        old_addr: ip.destination,
        new_addr: flow.addr,
        old_port: tcp.destination,
        new_port: flow.port,
        old_other_port: tcp.source,
        new_other_port: flow.client_port,
    }
}

/// Length of the frame, from the headers: at XDP the bytes at hand may be a part.
#[inline(always)]
pub fn frame_length(ip: &Ip) -> u64 {
    ip.network() as u64 + u64::from(ip.length)
}

/// Notes what a client's packet tells about its flow.
#[inline(always)]
fn note_client(tcp: &Tcp, flow: &mut Flow, bytes: u64) {
    flow.last_seen = ticks();
    flow.bytes += bytes;
    if tcp.flags & TCP_ACK != 0 {
        flow.last_ack = tcp.acknowledgment;
    }
}

/// Whether a packet comes by another way than the last one of its flow: only then may it be a peer's, so that the
/// look-up is spared for all others.
#[inline(always)]
fn comes_otherwise<H: Hook>(hook: &H, flow: &Flow) -> bool {
    let Some(ethernet) = hook.at::<EthernetHeader>(0) else {
        return false;
    };
    // SAFETY: `at` checked the bounds; a field of the map's value.
    let (from, former) = unsafe {
        (
            mac_word(&raw const (*ethernet).source),
            mac_word(&raw const flow.last_hop),
        )
    };
    from != former || flow.uplink & !FLOW_HANDED_ON != UPLINK.load() as u8
}

/// Notes by which way a flow's packets come.
#[inline(always)]
fn note_way<H: Hook>(hook: &H, flow: &mut Flow, handed_on: bool) {
    if let Some(ethernet) = hook.at::<EthernetHeader>(0) {
        flow.last_hop = field!(ethernet, source);
    }
    flow.uplink = UPLINK.load() as u8 | if handed_on { FLOW_HANDED_ON } else { 0 };
}

#[inline(always)]
fn rewritten<H: Hook>(hook: &mut H, ip: &Ip, change: &Change, verdict: Verdict) -> Verdict {
    match hook.rewrite_destination(ip, change) {
        Some(()) => verdict,
        None => Verdict::DroppedRewrite,
    }
}

/// What the VIP does with packets that cannot be balanced.
#[inline(always)]
fn not_tcp<H: Hook>(hook: &mut H, ip: &Ip, vip: &Vip, group: bool) -> Verdict {
    if group {
        return Verdict::DroppedGroupMac;
    }
    let is_icmp = ip.is_icmp();
    if is_icmp
        && !ip.is_fragment()
        && let Some(verdict) = icmp::error(hook, ip)
    {
        return verdict;
    }
    if !ip.is_fragment() {
        let port = match ip.protocol {
            protocol::UDP => hook
                .at::<UdpHeader>(ip.transport())
                .map_or(0, |udp| u16::from_be(field!(udp, destination))),
            _ => 0,
        };
        if listed(vip, ip.protocol, port) {
            return Verdict::PassedListed;
        }
    }
    if vip.flags & VIP_EXTERNAL != 0 {
        return Verdict::PassedExternal;
    }
    if ip.is_fragment() {
        return Verdict::DroppedFragment;
    }
    if is_icmp && let Some(verdict) = icmp::echo(hook, ip, vip) {
        return verdict;
    }
    Verdict::DroppedProtocol
}

/// Whether the VIP's `pass` lists a protocol and port.
#[inline(always)]
fn listed(vip: &Vip, protocol: u8, port: u16) -> bool {
    for at in 0..MAX_PASS {
        let pass = vip.pass[at];
        if pass.protocol == protocol && pass.protocol != 0 && (pass.port == 0 || pass.port == port)
        {
            return true;
        }
    }
    false
}

/// A packet from the uplink to an address that may be a pod's.
#[inline(always)]
fn direct<H: Hook>(hook: &mut H, uplink: &Uplink, ip: &mut Ip) -> Verdict {
    let pod_addr = ip.destination;
    // SAFETY: read once, copied out.
    let Some(pod) = (unsafe { PODS.get(&pod_addr) }) else {
        return Verdict::Passed;
    };
    if pod.flags & POD_HOST != 0 {
        return Verdict::Passed;
    }
    let drop = uplink.flags & UPLINK_BYPASS_DROP != 0;
    if find_transport(hook, ip).is_none() {
        return if drop {
            Verdict::DroppedBypass
        } else {
            Verdict::Passed
        };
    }
    // Behind options or extension headers it may not be at hand yet.
    hook.pull(ip.transport() + size_of::<TcpHeader>());
    match ip.protocol {
        // TCP does not fragment by itself: a SYN in pieces is an attempt to slip through.
        protocol::TCP if drop && ip.is_fragment() => Verdict::DroppedBypass,
        protocol::TCP => {
            let Some(tcp) = hook.at::<TcpHeader>(ip.transport()) else {
                return if drop {
                    Verdict::DroppedBypass
                } else {
                    Verdict::Passed
                };
            };
            let flags = field!(tcp, flags);
            if drop {
                // Connections of the pod's own go on: their answers carry ACK.
                return if flags & (TCP_SYN | TCP_ACK) == TCP_SYN {
                    Verdict::DroppedBypass
                } else {
                    Verdict::Passed
                };
            }
            let port = u16::from_be(field!(tcp, destination));
            let client_port = u16::from_be(field!(tcp, source));
            let key = FlowKey::reply(ip.source, client_port, pod_addr, port);
            if flows::is_served(&pod_addr, port) {
                // SAFETY: a helper without arguments.
                let now = unsafe { bpf_jiffies64() };
                let _ = DIRECT.insert(&key, &now, 0);
                return Verdict::PassedDirect;
            }
            Verdict::Passed
        }
        // A later fragment is of no use to anybody without the first.
        protocol::UDP if drop && !ip.is_later_fragment() => {
            let Some(udp) = hook.at::<UdpHeader>(ip.transport()) else {
                return Verdict::DroppedBypass;
            };
            let source = u16::from_be(field!(udp, source));
            for port in uplink.bypass_udp {
                if port != 0 && port == source {
                    return Verdict::Passed;
                }
            }
            Verdict::DroppedBypass
        }
        _ => Verdict::Passed,
    }
}
