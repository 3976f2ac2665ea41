//! ARP and neighbor discovery for VIPs: answered while this node announces them, consumed while it does not.

use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use lb_common::{
    Addr, Uplink, VIP_EXTERNAL, Verdict, Vip, field,
    packet::{
        self, ALL_NODES_MAC, Advertisement, ArpPacket, EthernetHeader, Ip, NEIGHBOR_ADVERTISEMENT,
        NEIGHBOR_SOLICITATION, NeighborMessage, protocol,
    },
};

use crate::{balance::vip, hook::Hook, maps::ANNOUNCERS, peers};

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
        // Of a peer's claim this node's own kernel has to learn, as long as it is not ours.
        return if peers::sender(hook).is_some() && !answers(&Addr::from_v4_raw(sender), claimed) {
            Verdict::Passed
        } else {
            Verdict::DroppedArpClaim
        };
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
    if !answers(&Addr::from_v4_raw(target), asked) {
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

/// Takes a neighbor solicitation or advertisement (RFC 4861) about a VIP of this uplink; `None` for all else.
#[inline(always)]
pub fn solicitation<H: Hook>(
    hook: &mut H,
    uplink: &Uplink,
    ip: &Ip,
    group: bool,
) -> Option<Verdict> {
    if ip.protocol != protocol::ICMPV6 {
        return None;
    }
    hook.pull(ip.transport() + size_of::<NeighborMessage>());
    let message = hook.at::<NeighborMessage>(ip.transport())?;
    let kind = field!(message, kind);
    if kind != NEIGHBOR_SOLICITATION && kind != NEIGHBOR_ADVERTISEMENT {
        return None;
    }
    let target = Addr::from_words(field!(message, target));
    if !uplink.vip_filter.may_contain(target.v4_raw()) {
        return None;
    }
    let vip = vip(&target)?;
    if vip.flags & VIP_EXTERNAL != 0 {
        return None;
    }
    // As much as a valid one may have.
    hook.pull(ip.transport() + (ip.transport_length() as usize & 0x7f));
    if packet::neighbor(hook, ip).is_none() {
        return Some(Verdict::DroppedNdInvalid);
    }
    let answers = answers(&target, vip);
    if kind == NEIGHBOR_ADVERTISEMENT {
        // As with ARP.
        return Some(if peers::sender(hook).is_some() && !answers {
            Verdict::Passed
        } else {
            Verdict::DroppedNdClaim
        });
    }
    if !answers {
        return Some(Verdict::DroppedNdSilent);
    }
    let is_nobody = ip.source == Addr::UNSPECIFIED;
    // Whoever tries an address before using it asks the group (RFC 4862 section 5.4.2).
    if (is_nobody && !group) || (!is_nobody && ip.is_from_no_host()) {
        return Some(Verdict::DroppedNdInvalid);
    }
    let ethernet = hook.at::<EthernetHeader>(0)?;
    let (asker, to) = if is_nobody {
        (None, ALL_NODES_MAC)
    } else {
        (Some(&ip.source), field!(ethernet, source))
    };
    let answer = packet::advertisement(&target, uplink.mac, asker);
    let addresses = [to, uplink.mac];
    let done = hook
        .resize(ip.network() + size_of::<Advertisement>())
        .is_some()
        && hook.store(ip.network(), &answer).is_some()
        && hook.store(0, &addresses).is_some();
    Some(if done {
        Verdict::NdAnswered
    } else {
        Verdict::DroppedRewrite
    })
}

/// Whether this node announces the VIP now.
#[inline(always)]
pub fn answers(addr: &Addr, vip: &Vip) -> bool {
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_ktime_get_boot_ns() };
    // SAFETY: one word, read once.
    now < vip.answer_until
        || unsafe { ANNOUNCERS.get(addr) }.is_some_and(|announcer| now < announcer.answer_until)
}

/// An address that lies on a two-byte boundary, as one word in memory order.
#[inline(always)]
fn word(halves: [u16; 2]) -> u32 {
    u32::from(halves[1]) << 16 | u32::from(halves[0])
}
