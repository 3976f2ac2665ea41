//! Every way a packet can end, by name.
//!
//! A verdict is a counter, a metric label and a line in docs/OPERATIONS.md. Numbers are positions in
//! the `verdicts` map: append, never reorder without raising the layout version.

/// What the hook is told to do with the packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// On to the kernel (and to programs behind us), changed or not.
    Pass,
    /// Away.
    Drop,
    /// Back out of the interface it came from.
    Transmit,
    /// Out of the uplink that the flow's entry names.
    Redirect,
}

macro_rules! verdicts {
    ($($variant:ident = $name:literal, $action:ident, $text:literal;)+) => {
        /// How a packet ended.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        #[repr(u32)]
        pub enum Verdict {
            $(#[doc = $text] $variant,)+
        }

        impl Verdict {
            /// All verdicts in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// Name in counters, metrics and documents.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// What the hook does with a packet of this verdict.
            #[inline(always)]
            pub const fn action(self) -> Action {
                match self { $(Self::$variant => Action::$action,)+ }
            }

            /// Whether this is a refusal: a RST is owed to the client.
            #[inline(always)]
            pub const fn is_refusal(self) -> bool {
                matches!(
                    self,
                    Self::RefusedNoBackend
                        | Self::RefusedNoService
                        | Self::RefusedGone
                        | Self::RefusedTableFull
                        | Self::RefusedSource
                )
            }

            /// Whether the packet goes to another node.
            #[inline(always)]
            pub const fn is_handed_on(self) -> bool {
                matches!(
                    self,
                    Self::HandedOn
                        | Self::HandedOnNew
                        | Self::HandedOnMiss
                        | Self::HandedOnException
                )
            }

            /// One sentence for people.
            pub const fn explanation(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }
    };
}

verdicts! {
    Passed = "passed", Pass, "Not for a VIP of this uplink; untouched.";
    PassedOtherMac = "passed_other_mac", Pass, "Unicast frame for another machine (a flooding switch); untouched.";
    PassedOtherVlan = "passed_other_vlan", Pass, "Frame of a VLAN that is not the uplink's; untouched.";
    PassedListed = "passed_listed", Pass, "For the VIP, of a protocol or port that `pass` lists; left to the host.";
    PassedExternal = "passed_external", Pass, "For a VIP that somebody else announces (`announce: external`), and not a port that we balance; untouched.";
    PassedDirect = "passed_direct", Pass, "Direct connection between a client and a pod, allowed by `bypass: allow` or because the backend is on the host network; untouched.";
    Forwarded = "forwarded", Pass, "Client to pod, flow known: destination rewritten to the pod.";
    ForwardedNew = "forwarded_new", Pass, "SYN of a new flow: a backend was chosen and the destination rewritten.";
    ForwardedMiss = "forwarded_miss", Pass, "Packet in mid-flow without an entry: placed by the hash alone, which finds the former backend as long as the set of backends is the same.";
    Replied = "replied", Pass, "Pod to client: source rewritten to the VIP.";
    RepliedYoung = "replied_young", Pass, "Pod to client before the flow is living (SYN-ACK, RST) or while it closes: source rewritten to the VIP.";
    RepliedRestored = "replied_restored", Pass, "Pod to client, the reply entry was lost and has been made again from the forward entry.";
    RepliedRedirected = "replied_redirected", Redirect, "Pod to client, sent out of the uplink on which the client's packets arrive instead of the one that routing chose.";
    ArpAnswered = "arp_answered", Transmit, "ARP question for an announced VIP, answered.";
    RefusedNoBackend = "refused_no_backend", Transmit, "The VIP port has no backend that takes new flows; RST.";
    RefusedNoService = "refused_no_service", Transmit, "TCP port of the VIP that no service uses; RST.";
    RefusedGone = "refused_gone", Transmit, "The flow's backend is gone; RST, and the entry is removed.";
    RefusedTableFull = "refused_table_full", Transmit, "The living table has no room for the flow; RST.";
    DroppedRefused = "dropped_refused", Drop, "Would have been refused with a RST, but the VIP says `refuse: drop`.";
    DroppedRateLimited = "dropped_rate_limited", Drop, "Would have been refused with a RST, but there were too many in this second.";
    DroppedReset = "dropped_reset", Drop, "RST for a port or flow that we do not serve; a RST is never answered (RFC 9293 section 3.10.7.1).";
    DroppedCollision = "dropped_collision", Drop, "New flow whose client port is in use to the same pod port through another VIP port, and no other port was found for it; the client sends again.";
    DroppedNoRoom = "dropped_no_room", Drop, "No room for another young flow; the client's SYN is tried again by itself.";
    DroppedTableFull = "dropped_table_full", Drop, "Segment of a pod whose flow found no room in the living table; the client is refused at its next packet.";
    DroppedInconsistent = "dropped_inconsistent", Drop, "A table changed while it was read, twice in a row; the client sends again.";
    DroppedFragment = "dropped_fragment", Drop, "IP fragment to the VIP: it carries no ports to choose by.";
    DroppedMalformed = "dropped_malformed", Drop, "Truncated or contradictory headers in a packet to the VIP.";
    DroppedProtocol = "dropped_protocol", Drop, "Protocol other than TCP to the VIP, not listed in `pass`.";
    DroppedGroupMac = "dropped_group_mac", Drop, "Packet to the VIP in a link-layer broadcast or multicast frame (RFC 1122 section 3.3.6).";
    DroppedArpSilent = "dropped_arp_silent", Drop, "ARP question for a VIP that this node does not announce now; consumed so that no kernel answers it.";
    DroppedArpClaim = "dropped_arp_claim", Drop, "Somebody else claims a VIP by ARP (gratuitous or as sender of a question); consumed.";
    DroppedBypass = "dropped_bypass", Drop, "Direct connection attempt to a pod around the VIP (`bypass: drop`).";
    DroppedReplyUnknown = "dropped_reply_unknown", Drop, "Segment of a served pod port to a client without a flow: let through it would show the pod's address.";
    DroppedRewrite = "dropped_rewrite", Drop, "The kernel refused to rewrite the packet (out of memory).";
    DroppedSource = "dropped_source", Drop, "From an address that no other host has: of this network, loopback, multicast, broadcast (RFC 1122 section 3.2.1.3) or the VIP itself.";
    HandedOn = "handed_on", Transmit, "Client to a pod of another node, flow known: sent to that node, which rewrites it and answers the client itself.";
    HandedOnNew = "handed_on_new", Transmit, "SYN of a new flow: a backend of another node was chosen; sent to that node.";
    HandedOnMiss = "handed_on_miss", Transmit, "Packet in mid-flow without an entry, which the hash places on another node: sent to that node.";
    HandedOnException = "handed_on_exception", Transmit, "Packet of a flow that sits on another node than the hash would place it on, as that node has told: sent to it.";
    ProbeReflected = "probe_reflected", Transmit, "Probe of a peer, sent back: new flows reach this node.";
    DroppedProbeReturned = "dropped_probe_returned", Drop, "Probe of this node that a peer sent back; noted and consumed.";
    DroppedNotHere = "dropped_not_here", Drop, "Handed on by a peer, of a flow that is not known here, or to a VIP port without a pod here: the nodes' tables differ for a moment, or a flow was lost. Never reset, the client sends again.";
    DroppedNoPeer = "dropped_no_peer", Drop, "For a pod of a node whose MAC is not known on this uplink.";
    DroppedTtl = "dropped_ttl", Drop, "For a pod of another node, but its time to live is used up.";
    DroppedSettling = "dropped_settling", Drop, "In mid-flow without an entry, or a pod's RST to such a packet, while peers may not yet have told where their flows are; the client sends again.";
    NdAnswered = "nd_answered", Transmit, "Neighbor solicitation (IPv6) for an announced VIP, answered.";
    DroppedNdSilent = "dropped_nd_silent", Drop, "Neighbor solicitation for a VIP that this node does not announce now; consumed, or the kernel might answer.";
    DroppedNdClaim = "dropped_nd_claim", Drop, "Somebody else's neighbor advertisement for a VIP: it would make this node's kernel send there.";
    DroppedNdInvalid = "dropped_nd_invalid", Drop, "Neighbor message about a VIP that has passed a router or whose length or checksum is wrong (RFC 4861 section 7.1).";
    EchoAnswered = "echo_answered", Transmit, "Echo request (ping) for an announced VIP, answered.";
    ForwardedIcmp = "forwarded_icmp", Pass, "ICMP error about a reply of a pod (fragmentation needed, packet too big, unreachable): steered to that pod by the packet that it quotes, which is rewritten too.";
    RepliedIcmp = "replied_icmp", Pass, "ICMP error about a client's packet to a pod: it and what it quotes carry the VIP instead of the pod.";
    DroppedIcmpUnknown = "dropped_icmp_unknown", Drop, "ICMP error for the VIP about a TCP flow that is not known.";
    RefusedSource = "refused_source", Transmit, "New flow from an address outside of the service's source ranges; RST.";
    DroppedFirstReset = "dropped_first_reset", Drop, "A pod's RST to the SYN of a connection to a shared port, kept from the client once: the backend gets no new flows for a second, and the client's next SYN goes to another. Where another node has handed the SYN on, the RST goes out at once.";
}

/// Counters in the `verdicts` map; room for names to come.
pub const MAX_VERDICTS: u32 = 64;

const _: () = assert!(Verdict::ALL.len() <= MAX_VERDICTS as usize);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verdict_has_a_name_of_its_own_that_tells_its_action() {
        let mut names: Vec<_> = Verdict::ALL.iter().map(|v| v.name()).collect();
        for (number, verdict) in Verdict::ALL.iter().enumerate() {
            assert_eq!(*verdict as usize, number);
            let dropped = verdict.name().starts_with("dropped_");
            assert_eq!(dropped, verdict.action() == Action::Drop, "{verdict:?}");
            let refused = verdict.name().starts_with("refused_");
            assert_eq!(refused, verdict.is_refusal(), "{verdict:?}");
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Verdict::ALL.len());
    }
}
