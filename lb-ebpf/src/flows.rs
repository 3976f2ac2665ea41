//! The life of a flow: young, living, closing.
//!
//! Forward and reply entry of a living flow come and go together, the reply entry first: while only
//! the forward entry is there, the reply path finds it by its second look.

use lb_common::{
    Addr, Backend, CLOSING_GUARD, FLOW_CLOSING, FORWARD, Flow, FlowKey, MAX_VIP_PORTS_PER_POD_PORT,
    PodPort, REPLY, ServiceKey, packet::TCP_SYN,
};

use crate::events;
use crate::maps::{
    LIVING, LIVING_REPLY, POD_PORTS, PRESSURE, SCRATCH, Scratch, TICKS_PER_SECOND, UPLINK, YOUNG,
    copy_words, ticks,
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
        started: ticks(),
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
        closing.last_seen = ticks();
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
        // SAFETY: one word; a lost race is repaired by time.
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
                // Only what is set: what another processor notes meanwhile must not be overwritten.
                // SAFETY: bytes of this map's value.
                unsafe {
                    if young.client_fin != 0 {
                        (*living).client_fin = 1;
                    }
                    if young.pod_fin != 0 {
                        (*living).pod_fin = 1;
                    }
                }
            }
            true
        }
        Err(error) => error != -E2BIG,
    }
}

/// Notes that the living table had no room.
#[inline(always)]
pub fn note_full() {
    if let Some(pressure) = PRESSURE.get_ptr_mut(0) {
        // SAFETY: words of the map's value.
        unsafe {
            (*pressure).full_at = ticks();
            (*pressure).living_full = 1;
        }
    }
}

/// Whether the living table had no room a moment ago. Another processor may have made room just before that was noted:
/// then no removal would follow that clears the note, so it is believed for a second only.
#[inline(always)]
pub fn table_is_full() -> bool {
    PRESSURE.get(0).is_some_and(|pressure| {
        pressure.living_full != 0
            && ticks().wrapping_sub(pressure.full_at) <= TICKS_PER_SECOND.load()
    })
}

/// Whether any VIP port leads to this pod port.
#[inline(always)]
pub fn is_served(pod: &Addr, port: u16) -> bool {
    POD_PORTS.get_ptr(&ServiceKey::new(*pod, port)).is_some()
}

/// Whether a forward entry's replies have this key.
#[inline(always)]
pub fn leads_to(flow: &Flow, reply: &FlowKey) -> bool {
    flow.addr == reply.addr && flow.port == reply.port && flow.client_port == reply.client_port
}

/// How many ports are tried for a client before its SYN is dropped; it will come again.
const ATTEMPTS: u32 = 5;

/// A fresh forward entry as [`young`] makes it, with the client's port towards the backend's pod port: its own or, where
/// that is in use through another VIP port and both connections would be one to the pod, another that is free.
/// `None` when none is found.
#[inline(always)]
pub fn young_of_free_port(key: &FlowKey, backend: &Backend, id: u32) -> Option<&'static mut Flow> {
    young(key, backend, id)?;
    if ironlb_free_port() == 0 {
        return None;
    }
    let scratch = SCRATCH.get_ptr_mut(0)?;
    // SAFETY: a slot of this CPU's own, and the reference that `young` gave is gone.
    Some(unsafe { &mut (*scratch).flow })
}

/// Finds a port for the flow in [`SCRATCH`], which the packet there begins; 0 when there is none. A global function: the
/// verifier walks all attempts once, and not on every way on which a flow begins. Keys are in [`SCRATCH`], too: its stack
/// is what the engine leaves of 512 bytes.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn ironlb_free_port() -> u32 {
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else {
        return 0;
    };
    // SAFETY: a slot of this CPU's own.
    let scratch = unsafe { &mut *scratch };
    // SAFETY: both are the map's.
    unsafe { copy_words(&raw mut scratch.pod_port.addr, &raw const scratch.flow.addr) };
    scratch.pod_port.port = scratch.flow.port;
    scratch.pod_port.pad = 0;
    // SAFETY: read only; a concurrent update costs one wrong answer at most.
    let Some(ways) = (unsafe { POD_PORTS.get(&scratch.pod_port) }) else {
        // Being taken away.
        return 1;
    };
    for _ in 0..ATTEMPTS {
        if !is_taken(scratch, ways) {
            return 1;
        }
        // Any permutation does, as long as it is the same every time: a flow whose entry is lost finds its port again.
        let port = scratch.flow.client_port;
        scratch.flow.client_port = port.wrapping_mul(25_173).wrapping_add(13_849) | 0x8000;
    }
    0
}

/// Whether another flow of the client has the port of the one in [`SCRATCH`] towards its pod port.
#[inline(always)]
fn is_taken(scratch: &mut Scratch, ways: &PodPort) -> bool {
    // A lone way is this flow's own. What a SYN leaves of a reply entry without a flow, the reply path finds at the pod's
    // answer: see `is_lone`. Of flows by a way that is being taken away nothing is asked: they end within seconds.
    if ways.count == 1 && scratch.tcp.flags & TCP_SYN != 0 {
        return false;
    }
    let reply = &mut scratch.reply_key;
    // SAFETY: all are addresses.
    unsafe {
        copy_words(&raw mut reply.client, &raw const scratch.key.client);
        copy_words(&raw mut reply.addr, &raw const scratch.flow.addr);
    }
    reply.client_port = scratch.flow.client_port;
    reply.port = scratch.flow.port;
    reply.direction = REPLY;
    reply.pad = [0; 3];
    // SAFETY: read once.
    if let Some(entry) = unsafe { LIVING_REPLY.get(&scratch.reply_key) } {
        let (vip, port) = (&entry.addr, entry.port);
        let (reply, other) = (&scratch.reply_key, &mut scratch.other_key);
        set_forward(other, reply, entry.client_port, vip, port);
        // Its own forward entry is missing, or we would not be here.
        if !is_own(scratch) && LIVING.get_ptr(&scratch.other_key).is_some() {
            return true;
        }
        // A reply entry alone belongs to no flow: it must neither stand in the way of this one's nor
        // answer for another VIP port.
        let _ = LIVING_REPLY.remove(&scratch.reply_key);
    }
    ways.count > 1 && is_used_elsewhere(scratch, ways)
}

/// Whether the packet's flow goes to the VIP port that is in `other_key`, from the port that is there.
#[inline(always)]
fn is_own(scratch: &Scratch) -> bool {
    let (a, b) = (&scratch.other_key, &scratch.key);
    a.client_port == b.client_port && a.port == b.port && a.addr == b.addr
}

#[inline(always)]
fn is_used_elsewhere(scratch: &mut Scratch, ways: &PodPort) -> bool {
    for at in 0..=MAX_VIP_PORTS_PER_POD_PORT {
        if !way(&scratch.reply_key, ways, at, &mut scratch.other_key) || is_own(scratch) {
            continue;
        }
        let (other, pod) = (&scratch.other_key, &scratch.reply_key);
        // SAFETY: read only.
        if let Some(flow) = unsafe { LIVING.get(other) }
            && leads_to(flow, pod)
        {
            return true;
        }
        // SAFETY: read only.
        if let Some(flow) = unsafe { YOUNG.get(other) }
            && leads_to(flow, pod)
        {
            let guard = if flow.state & FLOW_CLOSING != 0 {
                CLOSING_GUARD
            } else {
                YOUNG_GUARD
            };
            let since = ticks().wrapping_sub(flow.last_seen);
            if u64::from(since) < guard * u64::from(TICKS_PER_SECOND.load()) {
                return true;
            }
            // Too old to mean a connection, and it must not catch the new one's replies.
            let _ = YOUNG.remove(other);
        }
    }
    false
}

/// Makes `forward` the key of the flow by which the client of a reply key may have reached its pod port: one for each of the
/// pod port's VIP ports, where the client's own port is the same, and last that of a translated flow. False where there is
/// none.
#[inline(always)]
pub fn way(reply: &FlowKey, ways: &PodPort, at: usize, forward: &mut FlowKey) -> bool {
    if at < MAX_VIP_PORTS_PER_POD_PORT {
        if at as u32 >= ways.count {
            return false;
        }
        let vip_port = &ways.vip_ports[at];
        set_forward(
            forward,
            reply,
            reply.client_port,
            &vip_port.addr,
            vip_port.port,
        );
        return true;
    }
    // SAFETY: read only.
    let Some(entry) = (unsafe { YOUNG.get(reply) }) else {
        return false;
    };
    set_forward(forward, reply, entry.client_port, &entry.addr, entry.port);
    true
}

/// Makes `forward` the key of a flow of the client of a reply key.
#[inline(always)]
fn set_forward(forward: &mut FlowKey, reply: &FlowKey, client_port: u16, vip: &Addr, port: u16) {
    // SAFETY: all are addresses.
    unsafe {
        copy_words(&raw mut forward.client, &raw const reply.client);
        copy_words(&raw mut forward.addr, vip);
    }
    forward.client_port = client_port;
    forward.port = port;
    forward.direction = FORWARD;
    forward.pad = [0; 3];
}

/// Whether a living reply entry has lost its flow. It is removed then: it would hide from the reply path that a new flow of
/// the same client port has begun, which would stay young for ever.
#[inline(always)]
pub fn is_lone(reply: &FlowKey, entry: &Flow) -> bool {
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else {
        return false;
    };
    // SAFETY: a slot of this CPU's own.
    let forward = unsafe { &mut (*scratch).other_key };
    set_forward(forward, reply, entry.client_port, &entry.addr, entry.port);
    if LIVING.get_ptr(&*forward).is_some() {
        return false;
    }
    let _ = LIVING_REPLY.remove(reply);
    true
}

/// Lets a living flow's replies leave by the way that the client's packets come by now.
#[inline(always)]
pub fn turn_replies(key: &FlowKey, flow: &Flow) {
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: a slot of this CPU's own. Not on the stack: it is full.
    let reply = unsafe { &mut (*scratch).reply_key };
    *reply = reply_key(key, flow);
    if let Some(entry) = LIVING_REPLY.get_ptr_mut(&*reply) {
        // SAFETY: fields of the map's value.
        unsafe {
            (*entry).last_hop = flow.last_hop;
            (*entry).uplink = flow.uplink;
        }
    }
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
