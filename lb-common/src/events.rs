//! What the programs tell of single flows and packets as it happens.
//!
//! Two ring buffers, because a ring buffer has one reader's position: [`ENDINGS`](crate::map::ENDINGS) for the agent, always written, and
//! [`EVENTS`](crate::map::EVENTS) for `ironlb monitor`, written only before the deadline in [`WATCH`](crate::map::WATCH). Their records are `#[repr(C)]`
//! like all of [`layout`](crate::layout), and belong to its version.

use core::mem::{offset_of, size_of};

use crate::{
    layout::{Addr, Bucket, FlowKey},
    verdict::{Action, MAX_VERDICTS, Verdict},
};

/// Bytes of the `endings` ring: a power of two, and pages of 64 KiB. Nine thousand records wait in it for an agent that is
/// away.
pub const ENDINGS_RING: u32 = 1 << 20;
/// Bytes of the `events` ring.
pub const EVENTS_RING: u32 = 1 << 20;
/// Bytes of a frame that an event carries, at most.
pub const CAPTURE: usize = 128;
/// A frame is captured in pieces of so many bytes.
pub const CAPTURE_STEP: usize = 2;

/// The client closed first (FIN), then the pod.
pub const BY_CLIENT_FIN: u8 = 1;
/// The pod closed first (FIN), then the client.
pub const BY_POD_FIN: u8 = 2;
/// The client reset the connection. The pod may reject that; then the flow lives again.
pub const BY_CLIENT_RESET: u8 = 3;
/// The pod reset the connection.
pub const BY_POD_RESET: u8 = 4;
/// The backend is gone, and a client's packet showed it.
pub const BY_GONE: u8 = 5;
/// The backend is gone, and the agent reset both ends.
pub const BY_AGENT: u8 = 6;

/// Facts of a flow; in the `endings` ring those of one that has just ended.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Ending {
    /// When: `CLOCK_BOOTTIME` nanoseconds.
    pub at: u64,
    /// When the flow began: `CLOCK_BOOTTIME` nanoseconds; 0 where that is not known.
    pub started: u64,
    /// Bytes from the client, frames with their link-layer header.
    pub bytes_in: u64,
    /// Bytes to the client, likewise.
    pub bytes_out: u64,
    /// Client and VIP port.
    pub key: FlowKey,
    /// The pod; unspecified where none is known.
    pub pod: Addr,
    /// TCP port of the pod.
    pub pod_port: u16,
    /// Id of the VIP port.
    pub service: u16,
    /// Backend id.
    pub backend: u32,
    /// `BY_*`: who ended it; 0 while it lives.
    pub by: u8,
    /// The [`Verdict`] by which we ended it, as its number plus one; 0 where we did not.
    pub refusal: u8,
    /// `FLOW_*` bits.
    pub state: u8,
    /// Slot of the uplink and `FLOW_HANDED_ON`, as in [`Flow::uplink`](crate::layout::Flow::uplink).
    pub uplink: u8,
    /// Zero.
    pub pad: [u8; 4],
}

/// A flow has begun: a packet made its entry.
pub const EVENT_NEW: u8 = 1;
/// The pod has answered: the flow lives.
pub const EVENT_LIVING: u8 = 2;
/// A living flow has ended.
pub const EVENT_ENDED: u8 = 3;
/// A client was refused with a RST.
pub const EVENT_REFUSAL: u8 = 4;
/// A packet was dropped.
pub const EVENT_DROP: u8 = 5;

/// One event.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The flow, as far as it is known: of a drop only the time.
    pub flow: Ending,
    /// Bytes of the frame at the hook; 0 where the event is not a packet's.
    pub length: u32,
    /// `EVENT_*`.
    pub kind: u8,
    /// The [`Verdict`]'s number; of an event that is no packet's, [`NO_VERDICT`].
    pub verdict: u8,
    /// Slot of the attachment that met the packet.
    pub uplink: u8,
    /// Zero.
    pub pad: u8,
    /// How many bytes of `frame` are the packet's, as it came.
    pub captured: u64,
    /// Its beginning; what lies behind `captured` means nothing.
    pub frame: [u8; CAPTURE],
}

/// In [`Event::verdict`]: none.
pub const NO_VERDICT: u8 = u8::MAX;

/// What a monitor wants to see.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Watch {
    /// Nothing is told after this time (`CLOCK_BOOTTIME` nanoseconds), which the monitor moves on as long as it lives.
    pub until: u64,
    /// Bit `n` asks for events of the verdict with number `n`.
    pub verdicts: u64,
    /// Bit `n` asks for events of kind `n`, of those that are no packet's.
    pub kinds: u32,
    /// Of what clients can cause without end, so many a second and CPU at most.
    pub per_second: u32,
    /// One in so many is told, chosen at random; 0 and 1 mean all.
    pub sample: u32,
    /// Process id of the monitor.
    pub pid: u32,
    /// The one client that is meant, where packets of others are not; unspecified for all.
    pub client: Addr,
}

/// What became of events, per CPU.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Telling {
    /// Rate limit of what clients can cause without end.
    pub bucket: Bucket,
    /// Events that the rate limit or the sampling kept back.
    pub suppressed: u64,
    /// Events that found no room in the `events` ring.
    pub lost: u64,
    /// Endings that found no room in the `endings` ring.
    pub endings_lost: u64,
}

/// The kind of event that a packet of a verdict is, 0 for none: an established flow's packets are none.
#[inline(always)]
pub const fn kind_of(verdict: Verdict) -> u8 {
    match verdict {
        // A flow in mid-flow that is handed on leaves no entry here, so that each of its packets would be one.
        Verdict::ForwardedNew | Verdict::ForwardedMiss | Verdict::HandedOnNew => EVENT_NEW,
        verdict if verdict.is_refusal() => EVENT_REFUSAL,
        verdict => match verdict.action() {
            Action::Drop => EVENT_DROP,
            _ => 0,
        },
    }
}

/// Verdicts whose packets are events of this kind, a bit each.
pub const fn verdicts_of(kind: u8) -> u64 {
    let mut bits = 0;
    let mut number = 0;
    while number < Verdict::ALL.len() {
        if kind_of(Verdict::ALL[number]) == kind {
            bits |= 1 << number;
        }
        number += 1;
    }
    bits
}

const _: () = {
    assert!(MAX_VERDICTS <= u64::BITS, "a bit for every verdict");
    assert!(size_of::<Ending>() == 104);
    assert!(size_of::<Event>() == 248);
    assert!(size_of::<Watch>() == 48);
    assert!(size_of::<Telling>() == 40);
    assert!(offset_of!(Ending, key) == 32);
    assert!(offset_of!(Ending, backend) == 92);
    assert!(offset_of!(Ending, by) == 96);
    assert!(offset_of!(Event, kind) == 108);
    assert!(offset_of!(Event, frame) == 120);
    assert!(offset_of!(Watch, client) == 32);
    assert!(CAPTURE.is_multiple_of(CAPTURE_STEP));
};

#[cfg(feature = "user")]
mod pod {
    use super::*;
    // SAFETY: each is repr(C), made of integers and byte arrays only, without implicit padding.
    unsafe impl aya::Pod for Ending {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Event {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Watch {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Telling {}

    /// A record of a ring, if it is as long as one.
    fn from_bytes<T: aya::Pod>(bytes: &[u8]) -> Option<T> {
        // SAFETY: as long as a T, which any bytes are; read without regard to alignment.
        (bytes.len() == size_of::<T>())
            .then(|| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
    }

    impl Ending {
        /// A record of the `endings` ring.
        pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
            from_bytes(bytes)
        }
    }

    impl Event {
        /// A record of the `events` ring.
        pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
            from_bytes(bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_established_flows_are_no_events_and_every_drop_and_refusal_is_one() {
        for verdict in Verdict::ALL {
            let name = verdict.name();
            let kind = kind_of(*verdict);
            assert_eq!(
                name.starts_with("refused_"),
                kind == EVENT_REFUSAL,
                "{name}"
            );
            assert_eq!(name.starts_with("dropped_"), kind == EVENT_DROP, "{name}");
        }
        for quiet in [
            Verdict::Forwarded,
            Verdict::Replied,
            Verdict::HandedOn,
            Verdict::HandedOnMiss,
            Verdict::Passed,
        ] {
            assert_eq!(kind_of(quiet), 0, "{quiet:?}");
        }
        assert_eq!(kind_of(Verdict::ForwardedNew), EVENT_NEW);
        let all = [EVENT_NEW, EVENT_REFUSAL, EVENT_DROP].map(verdicts_of);
        assert_eq!(all[0] & all[1] | all[1] & all[2] | all[0] & all[2], 0);
        assert_ne!(all[1] & 1 << Verdict::RefusedNoService as u32, 0);
    }
}
