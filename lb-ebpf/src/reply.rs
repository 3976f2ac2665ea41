//! The reply path: pod to client, with the VIP put back as the source.

use aya_ebpf::helpers::bpf_jiffies64;
use lb_common::{
    Addr, FLOW_ANSWERED, FLOW_CLAIMED, FLOW_CLOSING, FLOW_HANDED_ON, FLOW_MISS, FLOW_REFUSED,
    FLOW_SPARED, Flow, FlowKey, MAX_VIP_PORTS_PER_POD_PORT, POD_HOST, SERVICE_INSTANCE, ServiceKey,
    UPLINK_FORWARD, Uplink, Verdict, backend_index,
    events::{BY_CLIENT_FIN, BY_POD_RESET},
    packet::{
        self, Change, Ip, TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN, Tcp as TcpFields, ethertype,
        mac_word, protocol,
    },
};

use crate::{
    balance::frame_length,
    flows,
    hook::{Hook, Tc, find_transport},
    icmp,
    maps::{
        CONTROL, DIRECT, LIVING, LIVING_REPLY, POD_PORTS, SCRATCH, SERVICES, SHUNNED,
        TICKS_PER_SECOND, UPLINK, UPLINKS, YOUNG, count_out, keep, ticks,
    },
    peers,
};

/// Takes a frame through the reply path.
#[inline(always)]
pub fn reply(hook: &mut Tc) -> Verdict {
    hook.pull(packet::HEADERS);
    let Some(link) = packet::link(hook) else {
        return Verdict::Passed;
    };
    let ip = match link.ethertype {
        ethertype::IPV4 => packet::ipv4(hook, link.network),
        ethertype::IPV6 => packet::ipv6(hook, link.network),
        _ => return Verdict::Passed,
    };
    let (Some(mut ip), Some(control)) = (ip, CONTROL.get(0)) else {
        return Verdict::Passed;
    };
    if ip.is_icmp() {
        // Whoever sends it: the node itself, too, says that a client's packet is too big for the pod's way.
        return match icmp::leaving(hook, &ip) {
            Some((flow, Verdict::RepliedIcmp)) => send(
                hook,
                &ip,
                u32::from(flow.uplink),
                &flow.last_hop,
                Verdict::RepliedIcmp,
            ),
            Some((_, verdict)) => verdict,
            None => Verdict::Passed,
        };
    }
    if !control.pod_filter.may_contain(ip.source.v4_raw()) {
        return Verdict::Passed;
    }
    if find_transport(hook, &mut ip).is_none() || ip.protocol != protocol::TCP || ip.is_fragment() {
        return Verdict::Passed;
    }
    hook.pull(ip.transport() + size_of::<packet::TcpHeader>());
    let Some(tcp) = packet::tcp(hook, &ip) else {
        return Verdict::Passed;
    };
    let key = FlowKey::reply(ip.destination, tcp.destination, ip.source, tcp.source);
    let Some(kept) = keep(&ip, &tcp, &key) else {
        return Verdict::Passed;
    };
    let (ip, tcp, key) = (&kept.ip, &kept.tcp, &kept.key);
    // SAFETY: the value is this map's; concurrent writers keep every field a valid integer.
    let entry = match LIVING_REPLY
        .get_ptr_mut(key)
        .map(|entry| unsafe { &mut *entry })
    {
        // A young flow has no such entry.
        Some(entry) if tcp.flags & TCP_SYN == 0 || !flows::is_lone(key, entry) => entry,
        _ => return second_look(hook, ip, tcp, key),
    };
    let bytes = frame_length(ip);
    entry.last_seen = ticks();
    entry.bytes += bytes;
    if tcp.flags & TCP_ACK != 0 {
        entry.last_ack = tcp.acknowledgment;
    }
    count_out(entry.service, backend_index(entry.backend), bytes);
    let change = to_client(ip, tcp, entry.addr, entry.port, entry.client_port);
    let (uplink, last_hop) = (u32::from(entry.uplink), entry.last_hop);
    if tcp.flags & (TCP_FIN | TCP_RST) != 0 {
        let forward = FlowKey::forward(key.client, entry.client_port, entry.addr, entry.port);
        end(&forward, tcp.flags);
    }
    rewritten(hook, ip, &change, uplink, &last_hop, Verdict::Replied)
}

/// Notes the pod's FIN or RST in the forward entry, which alone knows both sides.
#[inline(always)]
fn end(forward: &FlowKey, flags: u8) {
    if flags & TCP_FIN != 0
        && LIVING.get_ptr(forward).is_none()
        && let Some(young) = YOUNG.get_ptr_mut(forward)
    {
        // Being promoted on another processor, which takes the mark along.
        // SAFETY: a byte of the map's value.
        unsafe { (*young).pod_fin = 1 };
    }
    // SAFETY: the value is this map's.
    let Some(flow) = LIVING
        .get_ptr_mut(forward)
        .map(|flow| unsafe { &mut *flow })
    else {
        return;
    };
    if flags & TCP_FIN != 0 {
        flow.pod_fin = 1;
    }
    if flags & TCP_RST != 0 || flow.client_fin & flow.pod_fin != 0 {
        // The forward path would have ended it, had the pod's FIN been the first.
        let by = if flags & TCP_RST != 0 {
            BY_POD_RESET
        } else {
            BY_CLIENT_FIN
        };
        flows::close(forward, flow, FLOW_CLOSING, by);
    }
}

/// A segment without a living reply entry: of a young or closing flow, of one whose reply entry was
/// lost, or none of ours.
#[inline(always)]
fn second_look(hook: &mut Tc, ip: &Ip, tcp: &TcpFields, key: &FlowKey) -> Verdict {
    // SAFETY: read only; a concurrent update costs one wrong answer at most.
    let Some(pod_port) = (unsafe { POD_PORTS.get(&ServiceKey::new(key.addr, key.port)) }) else {
        return Verdict::Passed;
    };
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else {
        return Verdict::Passed;
    };
    // SAFETY: a slot of this CPU's own, of which nothing else writes this until the run's end.
    let forward = unsafe { &mut (*scratch).other_key };
    let bytes = frame_length(ip);
    for at in 0..=MAX_VIP_PORTS_PER_POD_PORT {
        if !flows::way(key, pod_port, at, forward) {
            continue;
        }
        let forward = &*forward;
        if let Some(flow) = LIVING
            .get_ptr_mut(forward)
            // SAFETY: the value is this map's.
            .map(|flow| unsafe { &mut *flow })
            && flows::leads_to(flow, key)
        {
            let _ = LIVING_REPLY.insert(key, &flows::reply_entry(forward, flow), 0);
            // Closed meanwhile on another processor: a reply entry alone would stay for ever.
            if LIVING.get_ptr(forward).is_none() {
                let _ = LIVING_REPLY.remove(key);
            }
            let verdict = Verdict::RepliedRestored;
            let verdict = restore(hook, ip, tcp, forward, flow, bytes, verdict);
            if tcp.flags & (TCP_FIN | TCP_RST) != 0 {
                end(forward, tcp.flags);
            }
            return verdict;
        }
        if let Some(flow) = YOUNG
            .get_ptr_mut(forward)
            // SAFETY: the value is this map's.
            .map(|flow| unsafe { &mut *flow })
            && flows::leads_to(flow, key)
        {
            if tcp.flags & TCP_RST != 0
                && flow.state & FLOW_MISS != 0
                && peers::may_have(forward.addr, forward.port)
            {
                // The pod does not know the flow, but a peer may.
                let _ = YOUNG.remove(forward);
                return Verdict::DroppedSettling;
            }
            if tcp.flags & TCP_RST != 0 && spare(forward, flow) {
                return Verdict::DroppedFirstReset;
            }
            if !grow(forward, flow, tcp.flags) {
                return Verdict::DroppedTableFull;
            }
            let verdict = Verdict::RepliedYoung;
            return restore(hook, ip, tcp, forward, flow, bytes, verdict);
        }
    }
    // SAFETY: read only.
    if pod_port.flags & POD_HOST != 0 || unsafe { DIRECT.get(key) }.is_some() {
        return Verdict::PassedDirect;
    }
    let uplink = UPLINKS.get(UPLINK.load());
    if uplink.is_some_and(|uplink| uplink.flags & UPLINK_FORWARD != 0) {
        Verdict::DroppedReplyUnknown
    } else {
        Verdict::Passed
    }
}

/// Keeps a pod's RST from a client whose SYN it answers, where the next one can go to another backend: a pod that ends
/// refuses before its endpoint is known to. Only once, and not where a peer handed the SYN on, which would do so again.
#[inline(always)]
fn spare(forward: &FlowKey, flow: &mut Flow) -> bool {
    if flow.state != 0 || flow.uplink & FLOW_HANDED_ON != 0 {
        return false;
    }
    // SAFETY: two words of a value that a concurrent update may overwrite: one wrong answer at most.
    let has_others = unsafe { SERVICES.get(&ServiceKey::new(forward.addr, forward.port)) }
        .is_some_and(|service| service.flags & SERVICE_INSTANCE == 0 && service.count > 1);
    let Some(shunned) = SHUNNED.get_ptr_mut(backend_index(flow.backend)) else {
        return false;
    };
    if has_others {
        flow.state = FLOW_SPARED;
        // SAFETY: one word of the map's value; helpers without arguments.
        unsafe { *shunned = bpf_jiffies64() };
    }
    has_others
}

/// Lets a pod's segment move a young flow on. False when the living table has no room.
#[inline(always)]
fn grow(forward: &FlowKey, flow: &mut Flow, flags: u8) -> bool {
    if flags & TCP_RST != 0 {
        flow.state = FLOW_CLOSING;
        return true;
    }
    if flags & TCP_SYN != 0 {
        flow.state |= FLOW_ANSWERED;
        return true;
    }
    if flow.state & FLOW_CLOSING != 0 {
        // The pod's own stack tells whether a client's RST was one: it goes on sending if not.
        let since = ticks().wrapping_sub(flow.last_seen);
        if flow.state & FLOW_CLAIMED == 0 || since <= TICKS_PER_SECOND.load() {
            return true;
        }
    }
    if flags & TCP_FIN != 0 {
        flow.pod_fin = 1;
    }
    if flow.client_fin & flow.pod_fin != 0 {
        flow.state = FLOW_CLOSING;
        return true;
    }
    if flow.state & FLOW_MISS != 0 && flow.client_fin != 0 {
        // A FIN that was sent again after its flow had been forgotten: what answers is the pod's TIME_WAIT, which nothing
        // follows that would end a living flow.
        return true;
    }
    if flows::promote(forward, flow) {
        if flags & TCP_FIN != 0
            && let Some(living) = LIVING.get_ptr_mut(forward)
        {
            // SAFETY: a byte of the map's value.
            unsafe { (*living).pod_fin = 1 };
        }
        return true;
    }
    flow.state |= FLOW_REFUSED;
    flows::note_full();
    false
}

/// Rewrites a segment by a forward entry.
#[inline(always)]
fn restore(
    hook: &mut Tc,
    ip: &Ip,
    tcp: &TcpFields,
    forward: &FlowKey,
    flow: &Flow,
    bytes: u64,
    verdict: Verdict,
) -> Verdict {
    let change = to_client(ip, tcp, forward.addr, forward.port, forward.client_port);
    let (uplink, last_hop) = (u32::from(flow.uplink), flow.last_hop);
    count_out(flow.service, backend_index(flow.backend), bytes);
    rewritten(hook, ip, &change, uplink, &last_hop, verdict)
}

/// The rewrite that makes a pod's segment one of the VIP's.
#[inline(always)]
fn to_client(ip: &Ip, tcp: &TcpFields, vip: Addr, vip_port: u16, client_port: u16) -> Change {
    Change {
        old_addr: ip.source,
        new_addr: vip,
        old_port: tcp.source,
        new_port: vip_port,
        old_other_port: tcp.destination,
        new_other_port: client_port,
    }
}

#[inline(always)]
fn rewritten(
    hook: &mut Tc,
    ip: &Ip,
    change: &Change,
    arrival: u32,
    last_hop: &[u8; 6],
    verdict: Verdict,
) -> Verdict {
    if hook.rewrite_source(ip, change).is_none() {
        return Verdict::DroppedRewrite;
    }
    send(hook, ip, arrival, last_hop, verdict)
}

/// Lets a rewritten packet leave by the uplink on which the client's packets arrive.
#[inline(always)]
fn send(hook: &mut Tc, ip: &Ip, arrival: u32, last_hop: &[u8; 6], verdict: Verdict) -> Verdict {
    let handed_on = arrival & u32::from(FLOW_HANDED_ON) != 0;
    let arrival = arrival & !u32::from(FLOW_HANDED_ON);
    if arrival == UPLINK.load() {
        return verdict;
    }
    let (Some(here), Some(there)) = (UPLINKS.get(UPLINK.load()), UPLINKS.get(arrival)) else {
        return verdict;
    };
    if there.ifindex == 0 || same_bridge(here, there) {
        return verdict;
    }
    hook.out = arrival;
    if handed_on {
        // The last hop is a peer, which is not on the way back.
        hook.by_neighbor = true;
        hook.next_hop = there.next_hop(&ip.destination);
        return Verdict::RepliedRedirected;
    }
    let addresses = [*last_hop, there.mac];
    if hook.store(0, &addresses).is_none() {
        return Verdict::DroppedRewrite;
    }
    Verdict::RepliedRedirected
}

/// Ports of one bridge carry the bridge's MAC, and the bridge knows behind which of them the client is.
#[inline(always)]
fn same_bridge(here: &Uplink, there: &Uplink) -> bool {
    // SAFETY: fields of map values.
    unsafe { mac_word(&raw const here.mac) == mac_word(&raw const there.mac) }
}
