//! The hooks that the engine runs at: how each reaches, changes and cuts a packet.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM},
    helpers::{
        bpf_csum_update, bpf_fib_lookup, bpf_l3_csum_replace, bpf_l4_csum_replace,
        bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_pull_data, bpf_skb_store_bytes,
        bpf_xdp_adjust_tail,
    },
    programs::{TcContext, XdpContext},
};
use core::{ffi::c_void, mem::offset_of};
use lb_common::{
    Addr, MODE_NATIVE, MODE_TC,
    events::{CAPTURE, CAPTURE_STEP, Event},
    frame::Frame,
    packet::{self, Change, Ip, Ipv4Header, Ipv6Header, TcpHeader},
};

use crate::{events, maps::Route};

/// Length of the routing table's question.
const ROUTE_LENGTH: i32 = size_of::<Route>() as i32;
/// `BPF_FIB_LOOKUP_OUTPUT` of `linux/bpf.h`: the interface is the one to leave by.
const BPF_FIB_LOOKUP_OUTPUT: u32 = 2;

/// A frame at a hook.
pub trait Hook: Frame {
    /// The mode of an uplink whose forward path runs here (`MODE_*`).
    const MODE: u8;

    /// Whether the TCP checksum may be unfinished here, the device being expected to complete it.
    const MAY_BE_PARTIAL: bool;

    /// Makes the first `length` bytes readable by [`Frame::at`] where the hook can.
    fn pull(&mut self, length: usize);

    /// Notes the frame's beginning and length, at XDP as far as it lies in the first buffer.
    fn capture(&mut self, event: &mut Event);

    /// Tells of the packet what [`events`] noted.
    fn tell(&self);

    /// Overwrites bytes; `None` when the hook refuses.
    fn store<T: Copy>(&mut self, offset: usize, value: &T) -> Option<()>;

    /// The same, and keeps a sum over the whole packet right where the hook has one.
    fn store_summed<T: Copy>(&mut self, offset: usize, value: &T) -> Option<()>;

    /// Asks the kernel's routing table; `None` when it knows no neighbour.
    fn route(&mut self, question: *mut Route) -> Option<()>;

    /// Makes the frame `length` bytes long.
    fn resize(&mut self, length: usize) -> Option<()>;

    /// Rewrites a TCP packet's destination and mends its checksums.
    fn rewrite_destination(&mut self, ip: &Ip, change: &Change) -> Option<()>;
}

/// Looks behind what stands between the IP header and TCP; `None` when the frame ends within it.
#[inline(always)]
pub fn find_transport<H: Hook>(hook: &mut H, ip: &mut Ip) -> Option<()> {
    if !ip.is_v6() {
        return Some(());
    }
    if packet::is_extension(ip.protocol) {
        hook.pull(packet::EXTENSION_HEADERS);
    }
    packet::extensions(hook, ip)
}

/// Exchanges source and destination of an IP header, which leaves every sum as it is.
#[inline(always)]
pub fn exchange_ends<H: Hook>(hook: &mut H, ip: &Ip) -> Option<()> {
    if ip.is_v6() {
        let ends = [ip.destination, ip.source];
        hook.store(ip.network() + offset_of!(Ipv6Header, source), &ends)
    } else {
        let ends = [ip.destination.v4_raw(), ip.source.v4_raw()];
        hook.store(ip.network() + offset_of!(Ipv4Header, source), &ends)
    }
}

/// Where the packet begins and ends now.
///
/// Read anew for every header: were the values known to be the same, the compiler would drop a check
/// that follows from an earlier one at a higher offset, which the verifier does not see through.
///
/// # Safety
/// Both point into the program's context.
#[inline(always)]
unsafe fn bounds(data: *const u32, end: *const u32) -> (usize, usize) {
    // SAFETY: the caller's.
    unsafe { (data.read_volatile() as usize, end.read_volatile() as usize) }
}

/// Asks the kernel's routing table; `None` when it knows no neighbour.
///
/// # Safety
/// `context` is the program's, `question` points to one.
#[inline(always)]
unsafe fn ask_route(context: *mut c_void, question: *mut Route) -> Option<()> {
    // SAFETY: the caller's; the question is as long as said.
    let found = unsafe {
        bpf_fib_lookup(
            context,
            question.cast(),
            ROUTE_LENGTH,
            BPF_FIB_LOOKUP_OUTPUT,
        )
    };
    (found == 0).then_some(())
}

/// A packet at XDP.
pub struct Xdp {
    ctx: XdpContext,
}

impl Xdp {
    /// Wraps the program's context.
    #[inline(always)]
    pub fn new(ctx: XdpContext) -> Self {
        Self { ctx }
    }
}

impl Frame for Xdp {
    #[inline(always)]
    fn at<T>(&self, offset: usize) -> Option<*mut T> {
        // SAFETY: the context is the program's own for its whole run.
        let (data, end) = unsafe {
            bounds(
                &raw const (*self.ctx.ctx).data,
                &raw const (*self.ctx.ctx).data_end,
            )
        };
        let start = data + offset;
        (start + size_of::<T>() <= end).then_some(start as *mut T)
    }

    #[inline(always)]
    fn stripped_tag(&self) -> Option<u16> {
        // A tag that the NIC strips is not visible to XDP before Linux 6.8 (metadata kfunc), and
        // there only for some drivers: the agent turns stripping off or takes `tc`.
        None
    }
}

impl Hook for Xdp {
    const MODE: u8 = MODE_NATIVE;
    const MAY_BE_PARTIAL: bool = false;

    #[inline(always)]
    fn pull(&mut self, _length: usize) {}

    #[inline(always)]
    fn capture(&mut self, event: &mut Event) {
        event.length = (self.ctx.data_end() - self.ctx.data()) as u32;
        // A helper that does so came with Linux 5.18 (bpf_xdp_load_bytes).
        let mut at = 0;
        while at < CAPTURE {
            let Some(piece) = self.at::<[u8; CAPTURE_STEP]>(at) else {
                break;
            };
            // SAFETY: `at` checked the bounds.
            let [first, second] = unsafe { lb_common::frame::get(piece) };
            event.frame[at] = first;
            event.frame[at + 1] = second;
            at += CAPTURE_STEP;
        }
        event.captured = at as u64;
    }

    #[inline(always)]
    fn tell(&self) {
        events::ironlb_tell_xdp(self.ctx.ctx);
    }

    #[inline(always)]
    fn store<T: Copy>(&mut self, offset: usize, value: &T) -> Option<()> {
        let pointer = self.at::<T>(offset)?;
        // SAFETY: `at` checked the bounds.
        unsafe { pointer.write(*value) };
        Some(())
    }

    #[inline(always)]
    fn store_summed<T: Copy>(&mut self, offset: usize, value: &T) -> Option<()> {
        self.store(offset, value)
    }

    #[inline(always)]
    fn route(&mut self, question: *mut Route) -> Option<()> {
        // SAFETY: the context is the program's own.
        unsafe { ask_route(self.ctx.ctx.cast(), question) }
    }

    #[inline(always)]
    fn resize(&mut self, length: usize) -> Option<()> {
        // Kept apart from `length`: the verifier takes `end - data`, but not `length - end + data`.
        let have = core::hint::black_box(self.ctx.data_end() - self.ctx.data());
        let change = length as i32 - have as i32;
        // SAFETY: the context is the program's own. Pointers into the packet are dead after this.
        let done = unsafe { bpf_xdp_adjust_tail(self.ctx.ctx, change) };
        (done == 0).then_some(())
    }

    #[inline(always)]
    fn rewrite_destination(&mut self, ip: &Ip, change: &Change) -> Option<()> {
        packet::rewrite_destination(self, ip, change)
    }
}

/// A packet at TC, ingress or egress.
pub struct Tc {
    skb: *mut __sk_buff,
    /// Slot of the uplink to leave by, when the verdict redirects.
    pub out: u32,
    /// Whether the kernel is to find the MAC there.
    pub by_neighbor: bool,
    /// The gateway, when the client itself is no neighbour there.
    pub next_hop: Option<Addr>,
}

impl Tc {
    /// Wraps the program's context.
    #[inline(always)]
    pub fn new(ctx: &TcContext) -> Self {
        Self {
            skb: ctx.skb.skb,
            out: 0,
            by_neighbor: false,
            next_hop: None,
        }
    }

    #[inline(always)]
    fn store_with<T: Copy>(&mut self, offset: usize, value: &T, flags: u64) -> Option<()> {
        // SAFETY: the helper checks the offset; `value` is as long as said.
        let done = unsafe {
            bpf_skb_store_bytes(
                self.skb,
                offset as u32,
                core::ptr::from_ref(value).cast(),
                size_of::<T>() as u32,
                flags,
            )
        };
        (done == 0).then_some(())
    }

    /// Rewrites a TCP packet's source and mends its checksums.
    #[inline(always)]
    pub fn rewrite_source(&mut self, ip: &Ip, change: &Change) -> Option<()> {
        self.rewrite(
            ip,
            change,
            [
                offset_of!(Ipv4Header, source),
                offset_of!(Ipv6Header, source),
            ],
            [
                offset_of!(TcpHeader, source),
                offset_of!(TcpHeader, destination),
            ],
        )
    }

    /// The helpers keep the sum of every kind of skb right: complete, unfinished, or over the whole
    /// packet by the NIC; GSO packets included. `addr` is where the address is in either version's header.
    #[inline(always)]
    fn rewrite(
        &mut self,
        ip: &Ip,
        change: &Change,
        addr: [usize; 2],
        ports: [usize; 2],
    ) -> Option<()> {
        let tcp_sum = (ip.transport() + offset_of!(TcpHeader, checksum)) as u32;
        let pseudo = u64::from(BPF_F_PSEUDO_HDR);
        if ip.is_v6() {
            // Of a sum over the whole packet an address and the TCP checksum make up for each other, and the helper
            // knows that only from Linux 6.16 on (BPF_F_IPV6). It refuses to update a sum that is not there.
            // SAFETY: the context is the program's own.
            let whole = unsafe { bpf_csum_update(self.skb, 0) } >= 0;
            let difference = u64::from(change.addresses_v6());
            let flags = if whole { 0 } else { pseudo };
            // SAFETY: the helper checks the offset against the skb itself.
            if unsafe { bpf_l4_csum_replace(self.skb, tcp_sum, 0, difference, flags) } != 0 {
                return None;
            }
            self.store(ip.network() + addr[1], &change.new_addr)?;
        } else {
            let ip_sum = (ip.network() + offset_of!(Ipv4Header, checksum)) as u32;
            let (old, new) = (change.old_addr.v4_raw(), change.new_addr.v4_raw());
            let (before, after) = (u64::from(old), u64::from(new));
            // SAFETY: as above.
            let failed = unsafe {
                bpf_l4_csum_replace(self.skb, tcp_sum, before, after, pseudo | 4) != 0
                    || bpf_l3_csum_replace(self.skb, ip_sum, before, after, 4) != 0
            };
            if failed {
                return None;
            }
            self.store(ip.network() + addr[0], &new)?;
        }
        let [port, other_port] = ports;
        self.replace_port(ip, port, change.old_port, change.new_port)?;
        self.replace_port(ip, other_port, change.old_other_port, change.new_other_port)
    }

    #[inline(always)]
    fn replace_port(&mut self, ip: &Ip, offset: usize, old: u16, new: u16) -> Option<()> {
        if old == new {
            return Some(());
        }
        let sum = (ip.transport() + offset_of!(TcpHeader, checksum)) as u32;
        let (old, new) = (old.to_be(), new.to_be());
        // SAFETY: the helper checks the offset against the skb itself.
        if unsafe { bpf_l4_csum_replace(self.skb, sum, u64::from(old), u64::from(new), 2) } != 0 {
            return None;
        }
        self.store(ip.transport() + offset, &new)
    }
}

impl Frame for Tc {
    #[inline(always)]
    fn at<T>(&self, offset: usize) -> Option<*mut T> {
        // SAFETY: the context is the program's own for its whole run.
        let (data, end) =
            unsafe { bounds(&raw const (*self.skb).data, &raw const (*self.skb).data_end) };
        let start = data + offset;
        (start + size_of::<T>() <= end).then_some(start as *mut T)
    }

    #[inline(always)]
    fn stripped_tag(&self) -> Option<u16> {
        // SAFETY: the context is the program's own for its whole run.
        let (present, tag) = unsafe { ((*self.skb).vlan_present, (*self.skb).vlan_tci) };
        (present != 0).then_some(tag as u16)
    }

    #[inline(always)]
    fn length_beyond_header(&self, network: usize) -> u32 {
        // SAFETY: as above.
        let (segment, length) = unsafe { ((*self.skb).gso_size, (*self.skb).len) };
        // What is not to be segmented only lies about its length.
        if segment == 0 {
            return 0;
        }
        length.saturating_sub(network as u32)
    }
}

impl Hook for Tc {
    const MODE: u8 = MODE_TC;
    const MAY_BE_PARTIAL: bool = true;

    #[inline(always)]
    fn pull(&mut self, length: usize) {
        // SAFETY: as above.
        let (data, end, len) = unsafe {
            (
                (*self.skb).data as usize,
                (*self.skb).data_end as usize,
                (*self.skb).len,
            )
        };
        if data + length > end && len as usize > end - data {
            let want = if length as u32 > len {
                len
            } else {
                length as u32
            };
            // SAFETY: as above. A failure leaves the packet as it is, and `at` says None.
            unsafe { bpf_skb_pull_data(self.skb, want) };
        }
    }

    #[inline(always)]
    fn capture(&mut self, event: &mut Event) {
        // SAFETY: the context is the program's own for its whole run.
        let length = unsafe { (*self.skb).len };
        event.length = length;
        event.captured = 0;
        let Some(last) = length.checked_sub(1) else {
            return;
        };
        const { assert!(CAPTURE.is_power_of_two()) };
        let last = if last < CAPTURE as u32 {
            last
        } else {
            CAPTURE as u32 - 1
        };
        // From 1 to CAPTURE in whatever way it is looked at: old verifiers do not learn it from tests.
        let wanted = (core::hint::black_box(last) & (CAPTURE as u32 - 1)) + 1;
        // SAFETY: the helper checks against the skb; `frame` has room for `wanted`.
        let done = unsafe {
            bpf_skb_load_bytes(self.skb.cast(), 0, event.frame.as_mut_ptr().cast(), wanted)
        };
        if done == 0 {
            event.captured = u64::from(wanted);
        }
    }

    #[inline(always)]
    fn tell(&self) {
        events::ironlb_tell_tc(self.skb);
    }

    #[inline(always)]
    fn store<T: Copy>(&mut self, offset: usize, value: &T) -> Option<()> {
        self.store_with(offset, value, 0)
    }

    #[inline(always)]
    fn store_summed<T: Copy>(&mut self, offset: usize, value: &T) -> Option<()> {
        self.store_with(offset, value, u64::from(BPF_F_RECOMPUTE_CSUM))
    }

    #[inline(always)]
    fn route(&mut self, question: *mut Route) -> Option<()> {
        // SAFETY: the context is the program's own.
        unsafe { ask_route(self.skb.cast(), question) }
    }

    #[inline(always)]
    fn resize(&mut self, length: usize) -> Option<()> {
        // SAFETY: the context is the program's own.
        let done = unsafe { bpf_skb_change_tail(self.skb, length as u32, 0) };
        (done == 0).then_some(())
    }

    #[inline(always)]
    fn rewrite_destination(&mut self, ip: &Ip, change: &Change) -> Option<()> {
        self.rewrite(
            ip,
            change,
            [
                offset_of!(Ipv4Header, destination),
                offset_of!(Ipv6Header, destination),
            ],
            [
                offset_of!(TcpHeader, destination),
                offset_of!(TcpHeader, source),
            ],
        )
    }
}
