//! The maps, as lb-common lays them out, and the constants of an attachment.

use aya_ebpf::{
    Global,
    btf_maps::{Array, HashMap, LruHashMap, PerCpuArray},
    macros::btf_map,
};
use lb_common::{
    Addr, Backend, BackendInfo, Bucket, Control, DEFAULT_LIVING_FLOWS, DEFAULT_YOUNG_FLOWS,
    DIRECT_FLOWS, Flow, FlowKey, MAX_BACKENDS, MAX_PORTS, MAX_UPLINKS, MAX_VIPS, Pod, PodPort,
    PortInfo, Pressure, Service, ServiceKey, Traffic, Uplink, Verdict, Vip, verdict::MAX_VERDICTS,
};

/// Slot of this attachment in [`UPLINKS`].
#[unsafe(no_mangle)]
pub static UPLINK: Global<u32> = Global::new(0);

/// Kernel ticks a second, the rate of `jiffies_64`.
#[unsafe(no_mangle)]
pub static TICKS_PER_SECOND: Global<u32> = Global::new(250);

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
