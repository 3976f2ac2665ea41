//! What is told of single flows and packets: endings to the agent, everything else to a monitor while one watches.
//!
//! Records are made in [`SCRATCH`] and copied to their ring. Nobody is woken: readers come by themselves, a few times a
//! second, so that a burst of short flows costs no wake-ups.

use aya_ebpf::{
    bindings::{__sk_buff, xdp_md},
    helpers::{bpf_get_prandom_u32, bpf_ktime_get_boot_ns},
    programs::{TcContext, XdpContext},
};
use lb_common::{
    Addr, Flow, FlowKey, Verdict,
    events::{
        BY_GONE, EVENT_DROP, EVENT_ENDED, EVENT_LIVING, EVENT_NEW, EVENT_REFUSAL, Ending, Event,
        NO_VERDICT, Watch, verdicts_of,
    },
};

use crate::{
    hook::{Hook, Tc, Xdp},
    maps::{
        ENDINGS, EVENTS, SCRATCH, TELLING, TICKS_PER_SECOND, UPLINK, WATCH, YOUNG, copy_words,
        ticks, zero_words,
    },
    refuse::take_from,
};

/// `BPF_RB_NO_WAKEUP` of `linux/bpf.h`.
const NO_WAKEUP: u64 = 1;
/// In a second.
const NANOSECONDS: u64 = 1_000_000_000;
/// Verdicts that begin a flow.
const NEW: u64 = verdicts_of(EVENT_NEW);
/// Verdicts that are told before their packets become the answers.
const REFUSALS: u64 = verdicts_of(EVENT_REFUSAL);
/// Verdicts whose packets' keys are in [`SCRATCH`]. Of a drop it may be a former packet's: the frame tells.
const KEYED: u64 = NEW | REFUSALS;
/// Verdicts that are told at the end of a run. All others cost one test of a bit.
const TOLD: u64 = NEW | verdicts_of(EVENT_DROP);

/// The watch, as long as somebody does.
#[inline(always)]
fn watch() -> Option<&'static Watch> {
    let watch = WATCH.get(0)?;
    // SAFETY: a helper without arguments.
    (watch.until != 0 && unsafe { bpf_ktime_get_boot_ns() } < watch.until).then_some(watch)
}

/// Tells what became of a packet, at the end of a program's run: a new flow, or a drop.
#[inline(always)]
pub fn tell<H: Hook>(hook: &H, verdict: Verdict) {
    if (TOLD >> verdict as u32) & 1 != 0 {
        packet(hook, verdict);
    }
}

/// Tells of a refusal, before the packet becomes its answer.
#[inline(always)]
pub fn refusal<H: Hook>(hook: &H, verdict: Verdict) {
    const { assert!(TOLD & REFUSALS == 0) };
    packet(hook, verdict);
}

#[inline(always)]
fn packet<H: Hook>(hook: &H, verdict: Verdict) {
    if let Some(scratch) = SCRATCH.get_ptr_mut(0) {
        // SAFETY: a slot of this CPU's own.
        unsafe { (*scratch).event.verdict = verdict as u8 };
        hook.tell();
    }
}

/// [`packet`] at XDP. A global function: the verifier walks it once for itself, and not on every way that leads here; its
/// verdict is where [`packet`] put it. Its stack is what the engine leaves of 512 bytes.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn ironlb_tell_xdp(ctx: *mut xdp_md) -> u32 {
    of_packet(&mut Xdp::new(XdpContext::new(ctx)));
    0
}

/// The same at TC.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn ironlb_tell_tc(ctx: *mut __sk_buff) -> u32 {
    of_packet(&mut Tc::new(&TcContext::new(ctx)));
    0
}

#[inline(always)]
fn of_packet<H: Hook>(hook: &mut H) {
    let Some(event) = chosen() else {
        return;
    };
    hook.capture(event);
    describe();
}

/// The record of the packet's event, if one is to be sent. The verdict alone is in it.
#[inline(always)]
fn chosen() -> Option<&'static mut Event> {
    let watch = watch()?;
    let scratch = SCRATCH.get_ptr_mut(0)?;
    // SAFETY: a slot of this CPU's own.
    let (key, event) = unsafe { (&(*scratch).key, &mut (*scratch).event) };
    let verdict = bit(event);
    let is_meant = watch.verdicts & verdict != 0
        && (KEYED & verdict == 0 || is_meant(watch, key))
        && is_chosen(watch);
    is_meant.then_some(event)
}

/// Says what the event is about, and sends it.
#[inline(always)]
fn describe() {
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: a slot of this CPU's own.
    let (key, event) = unsafe { (&(*scratch).key, &mut (*scratch).event) };
    // SAFETY: the map's value, all of integers.
    unsafe { zero_words(&raw mut event.flow) };
    // SAFETY: a helper without arguments.
    event.flow.at = unsafe { bpf_ktime_get_boot_ns() };
    event.kind = EVENT_DROP;
    if KEYED & bit(event) != 0 {
        event.kind = EVENT_REFUSAL;
        // SAFETY: both are the map's.
        unsafe { copy_words(&raw mut event.flow.key, key) };
    }
    if NEW & bit(event) != 0 {
        event.kind = EVENT_NEW;
        // SAFETY: read only, copied out.
        if let Some(flow) = unsafe { YOUNG.get(key) } {
            note(&mut event.flow, flow);
        }
    }
    send(event);
}

/// The bit of the event's verdict; read anew every time, or it would need a place on the stack.
#[inline(always)]
fn bit(event: &Event) -> u64 {
    // SAFETY: a field of the map's value.
    1 << (unsafe { (&raw const event.verdict).read_volatile() } & 63)
}

/// A flow has become living.
#[inline(always)]
pub fn living(key: &FlowKey, flow: &Flow) {
    if watch().is_none() {
        return;
    }
    keep_facts(key, flow, 0);
    ironlb_tell_living();
}

/// Tells of the flow that [`keep_facts`] noted.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn ironlb_tell_living() -> u32 {
    if let Some(scratch) = SCRATCH.get_ptr_mut(0) {
        // SAFETY: a slot of this CPU's own.
        of_flow(unsafe { &mut (*scratch).event }, EVENT_LIVING);
    }
    0
}

/// Tells of a flow's end, the facts being noted: for the one who removed its entry.
#[inline(always)]
pub fn ended(event: &mut Event) {
    let sent = ENDINGS.output_untyped::<Ending>(&event.flow, NO_WAKEUP);
    if sent.is_err()
        && let Some(telling) = TELLING.get_ptr_mut(0)
    {
        // SAFETY: a slot of this CPU's own.
        unsafe { (*telling).endings_lost += 1 };
    }
    of_flow(event, EVENT_ENDED);
}

/// Notes a flow for what is told of it.
#[inline(always)]
pub fn keep_facts(key: &FlowKey, flow: &Flow, by: u8) {
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: a slot of this CPU's own.
    let facts = unsafe { &mut (*scratch).event.flow };
    // SAFETY: a helper without arguments.
    facts.at = unsafe { bpf_ktime_get_boot_ns() };
    // SAFETY: the map's value, and a key.
    unsafe { copy_words(&raw mut facts.key, key) };
    facts.bytes_out = 0;
    facts.by = by;
    facts.refusal = if by == BY_GONE {
        1 + Verdict::RefusedGone as u8
    } else {
        0
    };
    facts.pad = [0; 4];
    note(facts, flow);
}

/// Notes what a forward entry knows, after the time.
#[inline(always)]
fn note(facts: &mut Ending, flow: &Flow) {
    let age = ticks().wrapping_sub(flow.started);
    // There are always some; a panic on a division by none would be more than a verifier takes.
    let tick = NANOSECONDS.checked_div(u64::from(TICKS_PER_SECOND.load()));
    let age = u64::from(age) * tick.unwrap_or(0);
    facts.started = facts.at.wrapping_sub(age);
    facts.bytes_in = flow.bytes;
    // SAFETY: both are addresses.
    unsafe { copy_words(&raw mut facts.pod, &raw const flow.addr) };
    facts.pod_port = flow.port;
    facts.service = flow.service;
    facts.backend = flow.backend;
    facts.state = flow.state;
    facts.uplink = flow.uplink;
}

/// Tells of a flow, if somebody watches for such events.
#[inline(always)]
fn of_flow(event: &mut Event, kind: u8) {
    let Some(watch) = watch() else {
        return;
    };
    if (watch.kinds >> kind) & 1 == 0 || !is_meant(watch, &event.flow.key) {
        return;
    }
    event.length = 0;
    event.captured = 0;
    event.kind = kind;
    event.verdict = NO_VERDICT;
    send(event);
}

#[inline(always)]
fn is_meant(watch: &Watch, key: &FlowKey) -> bool {
    watch.client == Addr::UNSPECIFIED || watch.client == key.client
}

/// Whether one of those packets is told that clients can send without end.
#[inline(always)]
fn is_chosen(watch: &Watch) -> bool {
    let Some(telling) = TELLING.get_ptr_mut(0) else {
        return false;
    };
    // SAFETY: a slot of this CPU's own.
    let telling = unsafe { &mut *telling };
    // SAFETY: a helper without arguments.
    let sampled = watch.sample <= 1 || unsafe { bpf_get_prandom_u32() } % watch.sample == 0;
    let chosen = sampled && take_from(&mut telling.bucket, watch.per_second);
    if !chosen {
        telling.suppressed += 1;
    }
    chosen
}

#[inline(always)]
fn send(event: &mut Event) {
    event.uplink = UPLINK.load() as u8;
    event.pad = 0;
    let sent = EVENTS.output_untyped::<Event>(&*event, NO_WAKEUP);
    if sent.is_err()
        && let Some(telling) = TELLING.get_ptr_mut(0)
    {
        // SAFETY: a slot of this CPU's own.
        unsafe { (*telling).lost += 1 };
    }
}
