//! The life of a flow: young, living, closing.
//!
//! Forward and reply entry of a living flow come and go together, the reply entry first: while only
//! the forward entry is there, the reply path finds it by its second look.

use aya_ebpf::helpers::{bpf_jiffies64, bpf_ktime_get_boot_ns};
use lb_common::{
    Addr, Backend, CLOSING_GUARD, FLOW_CLOSING, Flow, FlowKey, MAX_VIP_PORTS_PER_POD_PORT, PodPort,
    ServiceKey,
};

use crate::maps::{LIVING, LIVING_REPLY, POD_PORTS, PRESSURE, TICKS_PER_SECOND, UPLINK, YOUNG};

/// Seconds that a young entry guards its client port: as long as a pod may retry a SYN-ACK.
const YOUNG_GUARD: u64 = 120;

/// What an insert into a full hash returns (`asm-generic/errno-base.h`). Others tell of contention on a
/// bucket (EBUSY, EDEADLK, ETIMEDOUT): the flow stays young, and the pod's next segment tries again.
const E2BIG: i32 = 7;
/// `BPF_NOEXIST` of `linux/bpf.h`.
const NOEXIST: u64 = 1;

/// A fresh forward entry.
#[inline(always)]
pub fn young(key: &FlowKey, backend: &Backend, id: u32) -> Flow {
    Flow {
        addr: backend.addr,
        port: backend.port,
        client_port: key.client_port,
        backend: id,
        last_ack: 0,
        service: backend.service,
        client_fin: 0,
        pod_fin: 0,
        // SAFETY: a helper without arguments.
        started: unsafe { bpf_ktime_get_boot_ns() },
        last_seen: 0,
        bytes: 0,
        last_hop: [0; 6],
        uplink: UPLINK.load() as u8,
        state: 0,
    }
}

/// The reply key of a forward entry.
#[inline(always)]
pub fn reply_key(key: &FlowKey, flow: &Flow) -> FlowKey {
    FlowKey::reply(key.client, flow.client_port, flow.addr, flow.port)
}

/// The reply entry of a forward entry.
#[inline(always)]
pub fn reply_entry(key: &FlowKey, flow: &Flow) -> Flow {
    Flow {
        addr: key.addr,
        port: key.port,
        client_port: key.client_port,
        backend: flow.backend,
        last_ack: 0,
        service: flow.service,
        client_fin: 0,
        pod_fin: 0,
        started: flow.started,
        last_seen: flow.last_seen,
        bytes: 0,
        last_hop: flow.last_hop,
        uplink: flow.uplink,
        state: 0,
    }
}

/// Removes both entries of a living flow.
#[inline(always)]
pub fn remove_living(key: &FlowKey, flow: &Flow) {
    let reply = reply_key(key, flow);
    let _ = LIVING_REPLY.remove(&reply);
    let _ = LIVING.remove(key);
    // Another processor may have found the forward entry in between and restored the reply entry. A look is
    // cheaper than a removal, which takes the bucket's lock.
    if LIVING_REPLY.get_ptr(&reply).is_some() {
        let _ = LIVING_REPLY.remove(&reply);
    }
    if let Some(pressure) = PRESSURE.get_ptr_mut(0) {
        // SAFETY: one word; a lost race is repaired by the next removal.
        unsafe {
            if (*pressure).living_full != 0 {
                (*pressure).living_full = 0;
            }
        }
    }
}

/// Ends a living flow: its entry in the young table, which guards the client port, comes to light again.
#[inline(always)]
pub fn close(key: &FlowKey, flow: &Flow, state: u8) {
    let mut closing = *flow;
    closing.state = state;
    // SAFETY: a helper without arguments.
    closing.last_seen = unsafe { bpf_jiffies64() };
    match YOUNG.get_ptr_mut(key) {
        // An insert into a full LRU costs as much as all the rest of a short flow together.
        // SAFETY: the value is this map's; only this flow's packets write it.
        Some(young) => unsafe { *young = closing },
        // A long flow's has been given away.
        None => drop(YOUNG.insert(key, &closing, 0)),
    }
    remove_living(key, &closing);
}

/// Makes a young flow living. False when the living table has no room.
///
/// The young entry stays, hidden behind the living one, until the flow ends or the LRU needs its place.
///
/// Two processors may do so at once: one wins. A FIN that another one notes meanwhile is noted in the
/// young entry first and then, if it is there, in the living one, so it is in one of them at the end.
#[inline(always)]
pub fn promote(key: &FlowKey, young: &Flow) -> bool {
    let mut living = *young;
    living.state = 0;
    let reply = reply_key(key, &living);
    let mut inserted = LIVING_REPLY.insert(&reply, &reply_entry(key, &living), NOEXIST);
    if inserted.is_ok() {
        inserted = LIVING.insert(key, &living, NOEXIST);
        if inserted.is_err() {
            let _ = LIVING_REPLY.remove(&reply);
        }
    }
    match inserted {
        Ok(()) => {
            if let Some(living) = LIVING.get_ptr_mut(key) {
                // SAFETY: bytes of this map's value.
                unsafe {
                    (*living).client_fin |= young.client_fin;
                    (*living).pod_fin |= young.pod_fin;
                }
            }
            true
        }
        Err(error) => error != -E2BIG,
    }
}

/// Whether any VIP port leads to this pod port.
#[inline(always)]
pub fn is_served(pod: &Addr, port: u16) -> bool {
    POD_PORTS.get_ptr(&ServiceKey::new(*pod, port)).is_some()
}

/// Whether an entry names this pod port with the client's own port.
#[inline(always)]
pub fn leads_to(flow: &Flow, pod: &Addr, port: u16, client_port: u16) -> bool {
    flow.addr == *pod && flow.port == port && flow.client_port == client_port
}

/// Whether the client's port is in use to the backend's pod port through another VIP port: both
/// connections would be one to the pod.
#[inline(always)]
pub fn collides(key: &FlowKey, backend: &Backend) -> bool {
    let reply = FlowKey::reply(key.client, key.client_port, backend.addr, backend.port);
    // SAFETY: read once.
    if let Some(entry) = unsafe { LIVING_REPLY.get(&reply) } {
        let forward = FlowKey::forward(key.client, entry.client_port, entry.addr, entry.port);
        // Its own forward entry is missing, or we would not be here.
        let own = entry.addr == key.addr && entry.port == key.port;
        if !own && LIVING.get_ptr(&forward).is_some() {
            return true;
        }
        // A reply entry alone belongs to no flow: it must neither stand in the way of this one's nor
        // answer for another VIP port.
        let _ = LIVING_REPLY.remove(&reply);
    }
    // SAFETY: read only; a concurrent update costs one wrong answer at most.
    let Some(pod_port) = (unsafe { POD_PORTS.get(&ServiceKey::new(backend.addr, backend.port)) })
    else {
        return false;
    };
    pod_port.count > 1 && used_elsewhere(key, backend, pod_port)
}

#[inline(always)]
fn used_elsewhere(key: &FlowKey, backend: &Backend, pod_port: &PodPort) -> bool {
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_jiffies64() };
    let second = u64::from(TICKS_PER_SECOND.load());
    for at in 0..MAX_VIP_PORTS_PER_POD_PORT {
        if at as u32 >= pod_port.count {
            break;
        }
        let vip_port = pod_port.vip_ports[at];
        if vip_port.addr == key.addr && vip_port.port == key.port {
            continue;
        }
        let other = FlowKey::forward(key.client, key.client_port, vip_port.addr, vip_port.port);
        // SAFETY: read only.
        if let Some(flow) = unsafe { LIVING.get(&other) }
            && leads_to(flow, &backend.addr, backend.port, key.client_port)
        {
            return true;
        }
        // SAFETY: read only.
        if let Some(flow) = unsafe { YOUNG.get(&other) }
            && leads_to(flow, &backend.addr, backend.port, key.client_port)
        {
            let guard = if flow.state & FLOW_CLOSING != 0 {
                CLOSING_GUARD
            } else {
                YOUNG_GUARD
            };
            if now.wrapping_sub(flow.last_seen) < guard * second {
                return true;
            }
            // Too old to mean a connection, and it must not catch the new one's replies.
            let _ = YOUNG.remove(&other);
        }
    }
    false
}
