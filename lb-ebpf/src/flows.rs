//! The life of a flow: young, living, closing.
//!
//! Forward and reply entry of a living flow come and go together, the reply entry first: while only
//! the forward entry is there, the reply path finds it by its second look.

use aya_ebpf::helpers::{bpf_jiffies64, bpf_ktime_get_boot_ns};
use lb_common::{
    Addr, Backend, CLOSING_GUARD, FLOW_CLOSING, Flow, FlowKey, MAX_VIP_PORTS_PER_POD_PORT, PodPort,
    ServiceKey,
};

use crate::events;
use crate::maps::{
    LIVING, LIVING_REPLY, POD_PORTS, PRESSURE, SCRATCH, TICKS_PER_SECOND, UPLINK, YOUNG, copy_words,
};

/// Seconds that a young entry guards its client port: as long as a pod may retry a SYN-ACK.
const YOUNG_GUARD: u64 = 120;

/// What an insert into a full hash returns (`asm-generic/errno-base.h`). Others tell of contention on a
/// bucket (EBUSY, EDEADLK, ETIMEDOUT): the flow stays young, and the pod's next segment tries again.
const E2BIG: i32 = 7;
/// `BPF_NOEXIST` of `linux/bpf.h`.
const NOEXIST: u64 = 1;

/// A fresh forward entry, in [`SCRATCH`]: there always is one.
#[inline(always)]
pub fn young(key: &FlowKey, backend: &Backend, id: u32) -> Option<&'static mut Flow> {
    let scratch = SCRATCH.get_ptr_mut(0)?;
    // SAFETY: a slot of this CPU's own, and a packet begins one flow.
    let flow = unsafe { &mut (*scratch).flow };
    *flow = Flow {
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
    };
    Some(flow)
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

/// Removes both entries of a living flow, which ends by somebody (`BY_*`).
#[inline(always)]
pub fn remove_living(key: &FlowKey, flow: &Flow, by: u8) {
    end(key, flow, by, false);
}

/// Ends a living flow: its entry in the young table, which guards the client port, comes to light again.
#[inline(always)]
pub fn close(key: &FlowKey, flow: &Flow, state: u8, by: u8) {
    if let Some(closing) = kept(flow) {
        closing.state = state;
        // SAFETY: a helper without arguments.
        closing.last_seen = unsafe { bpf_jiffies64() };
        end(key, closing, by, true);
    }
}

/// A copy of an entry that is not on the stack.
#[inline(always)]
fn kept(flow: &Flow) -> Option<&'static mut Flow> {
    let scratch = SCRATCH.get_ptr_mut(0)?;
    // SAFETY: a slot of this CPU's own; nothing else in this run refers to it.
    unsafe {
        copy_words(&raw mut (*scratch).flow, flow);
        Some(&mut (*scratch).flow)
    }
}

#[inline(always)]
fn end(key: &FlowKey, flow: &Flow, by: u8, closes: bool) {
    events::keep_facts(key, flow, by);
    if let Some(scratch) = SCRATCH.get_ptr_mut(0) {
        // SAFETY: a slot of this CPU's own.
        unsafe {
            (*scratch).reply_key = reply_key(key, flow);
            (*scratch).closes = u64::from(closes);
        }
        ironlb_end();
    }
}

/// Ends the living flow whose facts are in [`SCRATCH`]. A global function: the verifier walks it once for itself, not on
/// every way that leads here. Its stack is what the engine leaves of 512 bytes.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn ironlb_end() -> u32 {
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else {
        return 0;
    };
    // SAFETY: a slot of this CPU's own.
    let scratch = unsafe { &mut *scratch };
    let key = &scratch.event.flow.key;
    if scratch.closes != 0 {
        match YOUNG.get_ptr_mut(key) {
            // An insert into a full LRU costs as much as all the rest of a short flow together.
            // SAFETY: the value is this map's; only this flow's packets write it.
            Some(young) => unsafe { copy_words(young, &raw const scratch.flow) },
            // A long flow's has been given away.
            None => drop(YOUNG.insert(key, &scratch.flow, 0)),
        }
    }
    let reply = &scratch.reply_key;
    // SAFETY: read only, copied out.
    let bytes = unsafe { LIVING_REPLY.get(reply) }.map_or(0, |entry| entry.bytes);
    scratch.event.flow.bytes_out = bytes;
    let _ = LIVING_REPLY.remove(reply);
    // Of two processors that end it at once, one does.
    let removed = LIVING.remove(&scratch.event.flow.key).is_ok();
    // Another processor may have found the forward entry in between and restored the reply entry. A look is
    // cheaper than a removal, which takes the bucket's lock.
    if LIVING_REPLY.get_ptr(reply).is_some() {
        let _ = LIVING_REPLY.remove(reply);
    }
    if let Some(pressure) = PRESSURE.get_ptr_mut(0) {
        // SAFETY: one word; a lost race is repaired by the next removal.
        unsafe {
            if (*pressure).living_full != 0 {
                (*pressure).living_full = 0;
            }
        }
    }
    if removed {
        events::ended(&mut scratch.event);
    }
    0
}

/// Makes a young flow living. False when the living table has no room.
///
/// The young entry stays, hidden behind the living one, until the flow ends or the LRU needs its place.
///
/// Two processors may do so at once: one wins. A FIN that another one notes meanwhile is noted in the
/// young entry first and then, if it is there, in the living one, so it is in one of them at the end.
#[inline(always)]
pub fn promote(key: &FlowKey, young: &Flow) -> bool {
    let (Some(living), Some(scratch)) = (kept(young), SCRATCH.get_ptr_mut(0)) else {
        return true;
    };
    living.state = 0;
    let reply = reply_key(key, living);
    // SAFETY: a slot of this CPU's own.
    let entry = unsafe { &mut (*scratch).reply };
    *entry = reply_entry(key, living);
    let mut inserted = LIVING_REPLY.insert(&reply, &*entry, NOEXIST);
    if inserted.is_ok() {
        inserted = LIVING.insert(key, &*living, NOEXIST);
        if inserted.is_err() {
            let _ = LIVING_REPLY.remove(&reply);
        }
    }
    match inserted {
        Ok(()) => {
            events::living(key, living);
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

/// How many ports are tried for a client before its SYN is dropped; it will come again.
const ATTEMPTS: u32 = 5;

/// The client's port towards the backend's pod port: its own or, where that is in use through another VIP port and
/// both connections would be one to the pod, another that is free.
#[inline(always)]
pub fn free_port(key: &FlowKey, backend: &Backend) -> Option<u16> {
    // SAFETY: read only; a concurrent update costs one wrong answer at most.
    let Some(ways) = (unsafe { POD_PORTS.get(&ServiceKey::new(backend.addr, backend.port)) })
    else {
        // Being taken away.
        return Some(key.client_port);
    };
    let mut port = key.client_port;
    for _ in 0..ATTEMPTS {
        if !is_taken(key, backend, ways, port) {
            return Some(port);
        }
        // Any permutation does, as long as it is the same every time: a flow whose entry is lost finds its port again.
        port = port.wrapping_mul(25_173).wrapping_add(13_849) | 0x8000;
    }
    None
}

/// Whether another flow of the client has a port towards the backend's pod port.
#[inline(always)]
fn is_taken(key: &FlowKey, backend: &Backend, ways: &PodPort, port: u16) -> bool {
    let reply = FlowKey::reply(key.client, port, backend.addr, backend.port);
    // SAFETY: read once.
    if let Some(entry) = unsafe { LIVING_REPLY.get(&reply) } {
        let forward = FlowKey::forward(key.client, entry.client_port, entry.addr, entry.port);
        // Its own forward entry is missing, or we would not be here.
        if !is_same(&forward, key) && LIVING.get_ptr(&forward).is_some() {
            return true;
        }
        // A reply entry alone belongs to no flow: it must neither stand in the way of this one's nor
        // answer for another VIP port.
        let _ = LIVING_REPLY.remove(&reply);
    }
    ways.count > 1 && is_used_elsewhere(key, backend, ways, port)
}

#[inline(always)]
fn is_same(a: &FlowKey, b: &FlowKey) -> bool {
    a.client_port == b.client_port && a.port == b.port && a.addr == b.addr
}

#[inline(always)]
fn is_used_elsewhere(key: &FlowKey, backend: &Backend, ways: &PodPort, port: u16) -> bool {
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_jiffies64() };
    let second = u64::from(TICKS_PER_SECOND.load());
    for at in 0..=MAX_VIP_PORTS_PER_POD_PORT {
        let Some(other) = way(key.client, ways, at, port, (backend.addr, backend.port)) else {
            continue;
        };
        if is_same(&other, key) {
            continue;
        }
        // SAFETY: read only.
        if let Some(flow) = unsafe { LIVING.get(&other) }
            && leads_to(flow, &backend.addr, backend.port, port)
        {
            return true;
        }
        // SAFETY: read only.
        if let Some(flow) = unsafe { YOUNG.get(&other) }
            && leads_to(flow, &backend.addr, backend.port, port)
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

/// The key of the flow by which a client may have reached a pod port, its port there being `port`: one for each of the
/// pod port's VIP ports, where the client's own port is the same, and last that of a translated flow.
#[inline(always)]
pub fn way(
    client: Addr,
    ways: &PodPort,
    at: usize,
    port: u16,
    (addr, pod_port): (Addr, u16),
) -> Option<FlowKey> {
    if at < MAX_VIP_PORTS_PER_POD_PORT {
        if at as u32 >= ways.count {
            return None;
        }
        let vip_port = ways.vip_ports[at];
        return Some(FlowKey::forward(client, port, vip_port.addr, vip_port.port));
    }
    // SAFETY: read only.
    let entry = unsafe { YOUNG.get(&FlowKey::reply(client, port, addr, pod_port)) }?;
    Some(FlowKey::forward(
        client,
        entry.client_port,
        entry.addr,
        entry.port,
    ))
}

/// Keeps what a translated flow's replies are found by, while it is young.
#[inline(always)]
pub fn keep_translated(key: &FlowKey, flow: &Flow) {
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: a slot of this CPU's own. Not on the stack: it is full.
    let scratch = unsafe { &mut *scratch };
    scratch.reply_key = reply_key(key, flow);
    if YOUNG.get_ptr(&scratch.reply_key).is_none() {
        scratch.reply = reply_entry(key, flow);
        let _ = YOUNG.insert(&scratch.reply_key, &scratch.reply, 0);
    }
}
