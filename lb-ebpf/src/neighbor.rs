//! ARP for VIPs: answered while this node announces them, consumed while it does not.

use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use lb_common::{
    Addr, Uplink, VIP_EXTERNAL, Verdict, field,
    packet::{ArpPacket, EthernetHeader},
};

use crate::{balance::vip, hook::Hook};

/// ARP operation that asks (RFC 826), network order.
const REQUEST: u16 = 1_u16.to_be();
/// ARP operation that answers, network order.
const REPLY: u16 = 2_u16.to_be();

/// Takes an ARP packet; what is not about a VIP of this uplink passes.
#[inline(always)]
pub fn arp<H: Hook>(hook: &mut H, uplink: &Uplink, offset: usize) -> Verdict {
    let Some(packet) = hook.at::<ArpPacket>(offset) else {
        return Verdict::Passed;
    };
    let target = word(field!(packet, target));
    let sender = word(field!(packet, sender));
    if uplink.vip_filter.may_contain(sender)
        && let Some(claimed) = vip(&Addr::from_v4_raw(sender))
        && claimed.flags & VIP_EXTERNAL == 0
    {
        return Verdict::DroppedArpClaim;
    }
    if !uplink.vip_filter.may_contain(target) {
        return Verdict::Passed;
    }
    let Some(asked) = vip(&Addr::from_v4_raw(target)) else {
        return Verdict::Passed;
    };
    if asked.flags & VIP_EXTERNAL != 0 || field!(packet, operation) != REQUEST {
        return Verdict::Passed;
    }
    // SAFETY: a helper without arguments.
    if unsafe { bpf_ktime_get_boot_ns() } >= asked.answer_until {
        return Verdict::DroppedArpSilent;
    }
    let asker = field!(packet, sender_mac);
    let answer = ArpPacket {
        hardware: field!(packet, hardware),
        protocol: field!(packet, protocol),
        hardware_length: field!(packet, hardware_length),
        protocol_length: field!(packet, protocol_length),
        operation: REPLY,
        sender_mac: uplink.mac,
        sender: field!(packet, target),
        target_mac: asker,
        target: field!(packet, sender),
    };
    let Some(ethernet) = hook.at::<EthernetHeader>(0) else {
        return Verdict::Passed;
    };
    let addresses = [field!(ethernet, source), uplink.mac];
    if hook.store(offset, &answer).is_none() || hook.store(0, &addresses).is_none() {
        return Verdict::DroppedRewrite;
    }
    Verdict::ArpAnswered
}

/// An address that lies on a two-byte boundary, as one word in memory order.
#[inline(always)]
fn word(halves: [u16; 2]) -> u32 {
    u32::from(halves[1]) << 16 | u32::from(halves[0])
}
