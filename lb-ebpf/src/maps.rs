//! The maps, as lb-common lays them out, and the constants of an attachment.

use aya_ebpf::{
    Global,
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf},
    helpers::bpf_jiffies64,
    macros::btf_map,
};
use lb_common::{
    Addr, Announcer, Backend, BackendInfo, Bucket, Control, DEFAULT_LIVING_FLOWS,
    DEFAULT_YOUNG_FLOWS, DIRECT_FLOWS, Exception, Flow, FlowKey, MAX_BACKENDS, MAX_EXCEPTIONS,
    MAX_PEERS, MAX_PORTS, MAX_SOURCE_RANGES, MAX_UPLINKS, MAX_VIPS, Peer, PeerInfo, PeerMac, Pod,
    PodPort, PortInfo, Pressure, Reflection, Service, ServiceKey, Source, Traffic, Uplink, Verdict,
    Vip,
    events::{ENDINGS_RING, EVENTS_RING, Ending, Event, Telling, Watch},
    packet::{Ip, Tcp},
    verdict::MAX_VERDICTS,
};

/// Slot of this attachment in [`UPLINKS`].
#[unsafe(no_mangle)]
pub static UPLINK: Global<u32> = Global::new(0);

/// Kernel ticks a second, the rate of `jiffies_64`.
#[unsafe(no_mangle)]
pub static TICKS_PER_SECOND: Global<u32> = Global::new(250);

/// Now, as entries of flows note it: the lower half of `jiffies_64`.
#[inline(always)]
pub fn ticks() -> u32 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_jiffies64() as u32 }
}

macro_rules! maps {
    ($($(#[$doc:meta])+ $name:ident, $export:literal: $ty:ty;)+) => {
        $($(#[$doc])+ #[btf_map(name = $export)] pub static $name: $ty = <$ty>::new();)+
    };
}

maps! {
    /// See [`lb_common::map::UPLINKS`].
    UPLINKS, "uplinks": Array<Uplink, { MAX_UPLINKS as usize }>;
    /// See [`lb_common::map::VIPS`].
    VIPS, "vips": HashMap<Addr, Vip, { MAX_VIPS as usize }>;
    /// See [`lb_common::map::SERVICES`].
    SERVICES, "services": HashMap<ServiceKey, Service, { MAX_PORTS as usize }>;
    /// See [`lb_common::map::BACKENDS`].
    BACKENDS, "backends": Array<Backend, { MAX_BACKENDS as usize }>;
    /// See [`lb_common::map::POD_PORTS`].
    POD_PORTS, "pod_ports": HashMap<ServiceKey, PodPort, { MAX_BACKENDS as usize }>;
    /// See [`lb_common::map::PODS`].
    PODS, "pods": HashMap<Addr, Pod, { MAX_BACKENDS as usize }>;
    /// See [`lb_common::map::LIVING`].
    LIVING, "living": HashMap<FlowKey, Flow, { DEFAULT_LIVING_FLOWS as usize }>;
    /// See [`lb_common::map::LIVING_REPLY`].
    LIVING_REPLY, "living_reply": HashMap<FlowKey, Flow, { DEFAULT_LIVING_FLOWS as usize }>;
    /// See [`lb_common::map::YOUNG`].
    YOUNG, "young": LruHashMap<FlowKey, Flow, { DEFAULT_YOUNG_FLOWS as usize }>;
    /// See [`lb_common::map::DIRECT`].
    DIRECT, "direct": LruHashMap<FlowKey, u64, { DIRECT_FLOWS as usize }>;
    /// See [`lb_common::map::VERDICTS`].
    VERDICTS, "verdicts": PerCpuArray<u64, { MAX_VERDICTS as usize }>;
    /// See [`lb_common::map::PORT_STATS`].
    PORT_STATS, "port_stats": PerCpuArray<Traffic, { MAX_PORTS as usize }>;
    /// See [`lb_common::map::BACKEND_STATS`].
    BACKEND_STATS, "backend_stats": PerCpuArray<Traffic, { MAX_BACKENDS as usize }>;
    /// See [`lb_common::map::PORT_INFO`].
    PORT_INFO, "port_info": Array<PortInfo, { MAX_PORTS as usize }>;
    /// See [`lb_common::map::BACKEND_INFO`].
    BACKEND_INFO, "backend_info": Array<BackendInfo, { MAX_BACKENDS as usize }>;
    /// See [`lb_common::map::CONTROL`].
    CONTROL, "control": Array<Control, 1>;
    /// See [`lb_common::map::PRESSURE`].
    PRESSURE, "pressure": Array<Pressure, 1>;
    /// See [`lb_common::map::BUCKET`].
    BUCKET, "bucket": PerCpuArray<Bucket, 1>;
    /// See [`lb_common::map::PEERS`].
    PEERS, "peers": Array<Peer, { (MAX_PEERS * MAX_UPLINKS) as usize }>;
    /// See [`lb_common::map::PEER_MACS`].
    PEER_MACS, "peer_macs": HashMap<PeerMac, u32, { (MAX_PEERS * MAX_UPLINKS) as usize }>;
    /// See [`lb_common::map::PEER_INFO`].
    PEER_INFO, "peer_info": Array<PeerInfo, { MAX_PEERS as usize }>;
    /// See [`lb_common::map::PEER_STATS`].
    PEER_STATS, "peer_stats": PerCpuArray<Traffic, { MAX_PEERS as usize }>;
    /// See [`lb_common::map::REFLECTIONS`].
    REFLECTIONS, "reflections": Array<Reflection, { (MAX_PEERS * MAX_UPLINKS) as usize }>;
    /// See [`lb_common::map::EXCEPTIONS`].
    EXCEPTIONS, "exceptions": HashMap<FlowKey, Exception, { MAX_EXCEPTIONS as usize }>;
    /// See [`lb_common::map::ANNOUNCERS`].
    ANNOUNCERS, "announcers": HashMap<Addr, Announcer, { MAX_VIPS as usize }>;
    /// See [`lb_common::map::SOURCES`]. Twice the number, so that old and new lists fit beside each other.
    SOURCES, "sources": LpmTrie<Source, u32, { 2 * MAX_SOURCE_RANGES as usize }>;
    /// See [`lb_common::map::SHUNNED`].
    SHUNNED, "shunned": Array<u64, { MAX_BACKENDS as usize }>;
    /// See [`lb_common::map::ENDINGS`]. None of them: a ring has no size of a value, and libbpf insists that both agree.
    ENDINGS, "endings": RingBuf<[Ending; 0], { ENDINGS_RING as usize }>;
    /// See [`lb_common::map::EVENTS`].
    EVENTS, "events": RingBuf<[Event; 0], { EVENTS_RING as usize }>;
    /// See [`lb_common::map::WATCH`].
    WATCH, "watch": Array<Watch, 1>;
    /// See [`lb_common::map::TELLING`].
    TELLING, "telling": PerCpuArray<Telling, 1>;
    /// What one run of a program keeps outside its stack.
    SCRATCH, "scratch": PerCpuArray<Scratch, 1>;
}

/// `struct bpf_fib_lookup` (`linux/bpf.h`), as far as our questions and their answers use it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Route {
    /// `AF_INET` or `AF_INET6`.
    pub family: u8,
    /// Zero: no port takes part in the question.
    pub l4: [u8; 5],
    /// Length of the packet for the check of the MTU, 0 for none.
    pub tot_len: u16,
    /// Interface.
    pub ifindex: u32,
    /// Type of service, or flow label.
    pub tos: u32,
    /// Source; an IPv4 address is in the first word.
    pub source: [u32; 4],
    /// Destination, likewise; in the answer the next hop.
    pub destination: [u32; 4],
    /// VLAN of the answer.
    pub vlan: u32,
    /// The interface's MAC, in the answer.
    pub own_mac: [u8; 6],
    /// The next hop's MAC, in the answer.
    pub mac: [u8; 6],
}

const _: () = assert!(size_of::<Route>() == 64);

/// What one run of a program keeps outside its stack.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Scratch {
    /// A question to the routing table: too large for the stack.
    pub route: Route,
    /// 1 where a peer handed the packet on. The verifier does not follow values through a map: else it would walk
    /// all the rest once for every way in which this was found out.
    pub handed_on: u64,
    /// Number of the peer to hand the packet on to.
    pub peer: u64,
    /// Id of the backend that the choice passes over, or [`NOBODY`](lb_common::choice::NOBODY).
    pub avoid: u64,
    /// The packet, for the same reason: whether it is IPv4 or IPv6, with tags or without, all that follows is
    /// verified once.
    pub ip: Ip,
    /// Its TCP header.
    pub tcp: Tcp,
    /// The key of its flow.
    pub key: FlowKey,
    /// The entry of the flow that it begins, moves or closes: too large for the stack.
    pub flow: Flow,
    /// The reply entry of `flow`.
    pub reply: Flow,
    /// Its key.
    pub reply_key: FlowKey,
    /// The key of another flow, with which it may share its pod port.
    pub other_key: FlowKey,
    /// That pod port.
    pub pod_port: ServiceKey,
    /// Zero.
    pub pad: u32,
    /// 1 where a flow that ends becomes a closing one.
    pub closes: u64,
    /// What is told of it: too large for the stack.
    pub event: Event,
}

/// Copies a value of whole words. The compiler would call `memmove`, a loop over bytes: it costs time, the verifier walks every
/// turn, and old kernels count 32 bytes of stack for a call within a global function, which are not there.
///
/// # Safety
/// Both are valid for a `T`, whose size and alignment are multiples of four.
#[inline(always)]
pub unsafe fn copy_words<T>(to: *mut T, from: *const T) {
    const { assert!(size_of::<T>().is_multiple_of(4) && align_of::<T>().is_multiple_of(4)) };
    let (to, from) = (to.cast::<u32>(), from.cast::<u32>());
    let mut at = 0;
    while at < size_of::<T>() / 4 {
        // SAFETY: the caller's. Volatile, or this would become the call again.
        unsafe { to.add(at).write(from.add(at).read_volatile()) };
        at += 1;
    }
}

/// Zeroes a value of whole words, as [`copy_words`] copies it.
///
/// # Safety
/// It is valid for a `T` that may be zero, whose size and alignment are multiples of four.
#[inline(always)]
pub unsafe fn zero_words<T>(value: *mut T) {
    const { assert!(size_of::<T>().is_multiple_of(4) && align_of::<T>().is_multiple_of(4)) };
    let mut at = 0;
    while at < size_of::<T>() / 4 {
        // SAFETY: the caller's.
        unsafe { value.cast::<u32>().add(at).write_volatile(0) };
        at += 1;
    }
}

/// Keeps a packet in [`SCRATCH`] and gives it back from there.
#[inline(always)]
pub fn keep(ip: &Ip, tcp: &Tcp, key: &FlowKey) -> Option<&'static Scratch> {
    let scratch = SCRATCH.get_ptr_mut(0)?;
    // SAFETY: a slot of this CPU's own; what is written here is not written again in this run.
    unsafe {
        (*scratch).ip = *ip;
        (*scratch).tcp = *tcp;
        (*scratch).key = *key;
        // Or the compiler would remember what was written.
        Some(&*core::hint::black_box(scratch))
    }
}

/// Adds a packet to what was handed on to a peer.
#[inline(always)]
pub fn count_handed_on(peer: u32, bytes: u64, new: bool) {
    if let Some(traffic) = PEER_STATS.get_ptr_mut(peer) {
        // SAFETY: a slot of this CPU's own.
        unsafe {
            (*traffic).packets_in += 1;
            (*traffic).bytes_in += bytes;
            (*traffic).flows += u64::from(new);
        }
    }
}

/// Counts a packet under its verdict.
#[inline(always)]
pub fn count(verdict: Verdict) {
    if let Some(counter) = VERDICTS.get_ptr_mut(verdict as u32) {
        // SAFETY: a slot of this CPU's own.
        unsafe { *counter += 1 };
    }
}

/// Adds a client's packet to the counters of its VIP port and backend.
#[inline(always)]
pub fn count_in(service: u16, backend: u32, bytes: u64, new: bool) {
    let add = |traffic: *mut Traffic| {
        // SAFETY: a slot of this CPU's own.
        unsafe {
            (*traffic).packets_in += 1;
            (*traffic).bytes_in += bytes;
            (*traffic).flows += u64::from(new);
        }
    };
    // One after the other: two pointers at a time tempt the compiler to test both for null at once,
    // which the verifier refuses.
    if let Some(traffic) = PORT_STATS.get_ptr_mut(u32::from(service)) {
        add(traffic);
    }
    if let Some(traffic) = BACKEND_STATS.get_ptr_mut(backend) {
        add(traffic);
    }
}

/// Adds a pod's packet to the counters of its VIP port and backend.
#[inline(always)]
pub fn count_out(service: u16, backend: u32, bytes: u64) {
    let add = |traffic: *mut Traffic| {
        // SAFETY: a slot of this CPU's own.
        unsafe {
            (*traffic).packets_out += 1;
            (*traffic).bytes_out += bytes;
        }
    };
    if let Some(traffic) = PORT_STATS.get_ptr_mut(u32::from(service)) {
        add(traffic);
    }
    if let Some(traffic) = BACKEND_STATS.get_ptr_mut(backend) {
        add(traffic);
    }
}
