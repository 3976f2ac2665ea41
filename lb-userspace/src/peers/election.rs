//! Who announces a VIP: one node's part of the election, without clock, network or map.
//!
//! Sticky: a holder stays until it falls silent, yields, or hears a better claim. A claim is better by its epoch, then by
//! its node's rank. A holder answers until a deadline that lies before the time at which others take it for gone, so that
//! it is silent when another begins, whatever has become of its agent.

use std::net::IpAddr;
use std::time::Duration;

use lb_common::choice::name_hash;

use super::nanoseconds;

/// Place of a node among those that may announce a VIP; the highest is first.
pub(super) fn rank(vip: IpAddr, node: &str) -> (u64, &str) {
    (name_hash(&format!("{vip}/{node}")), node)
}

/// How long a holder answers after it has begun a round of heartbeats: ended well before `hold`, after which its peers
/// take it for gone.
pub(super) fn answering(hold: Duration) -> Duration {
    hold - hold / 8
}

/// The part of the hold time in which a claim is heard and, if it is the better one, obeyed: 56 ms by default.
const HESITATION: u32 = 16;

/// A claim of a peer, heard within the last hold time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim<'a> {
    /// Who claims.
    pub(super) node: &'a str,
    /// Epoch of the claim.
    pub(super) epoch: u64,
    /// When it was heard.
    pub(super) heard: Duration,
    /// The peer asks this node to take the VIP.
    pub(super) yields: bool,
}

/// What a node knows when it looks at one VIP.
#[derive(Debug)]
pub(super) struct Situation<'a> {
    /// Time since boot.
    pub(super) now: Duration,
    /// Since when this node has been listening without a pause: silence counts from here at the earliest.
    pub(super) listening_since: Duration,
    /// How long a claim is good for.
    pub(super) hold: Duration,
    /// This node.
    pub(super) me: &'a str,
    /// The VIP.
    pub(super) vip: IpAddr,
    /// Carrier is there, and the node is one that may announce.
    pub(super) may_hold: bool,
    /// It may take the VIP now.
    pub(super) may_claim: bool,
    /// There are no peers.
    pub(super) alone: bool,
    /// Claims of peers.
    pub(super) claims: &'a [Claim<'a>],
    /// Live peers that would take the VIP.
    pub(super) rivals: &'a [&'a str],
}

/// What a look changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// This node claims the VIP; it answers once that has been said.
    Claimed,
    /// It answers no more.
    Released,
}

/// One VIP's election.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Election {
    /// Highest epoch heard or made.
    pub(super) epoch: u64,
    /// This node claims the VIP.
    pub(super) holding: bool,
    /// It answers before this time, boot-time nanoseconds.
    pub(super) answer_until: u64,
    /// It does not answer before this time: another may have claimed the VIP in the same moment.
    answer_from: Duration,
    /// Who announces, as far as is known.
    pub(super) holder: Option<String>,
    /// Since when.
    pub(super) since: Duration,
    /// Two claim it.
    pub(super) conflict: Option<String>,
    /// When a claim of a peer was last heard, or this node gave up its own.
    last_claim: Duration,
}

impl Election {
    /// An election that begins now, with the epoch of an earlier one.
    pub(super) fn new(epoch: u64, now: Duration) -> Self {
        Self {
            epoch,
            holding: false,
            answer_until: 0,
            answer_from: Duration::ZERO,
            holder: None,
            since: now,
            conflict: None,
            last_claim: now,
        }
    }

    /// Goes on where an earlier agent of this node stopped while it held the VIP.
    pub(super) fn resumed(
        epoch: u64,
        answer_until: u64,
        me: &str,
        since: Duration,
        now: Duration,
    ) -> Self {
        Self {
            holding: true,
            answer_until,
            holder: Some(me.to_owned()),
            since,
            ..Self::new(epoch, now)
        }
    }

    /// Looks at the situation.
    pub(super) fn look(&mut self, at: &Situation<'_>) -> Option<Change> {
        let best = at
            .claims
            .iter()
            .max_by_key(|claim| (claim.epoch, rank(at.vip, claim.node)));
        let was_holding = self.holding;
        if self.holding {
            self.hold(at, best);
        }
        if !at.may_hold {
            // Without a carrier nobody is heard: silence counts from its return on.
            self.last_claim = at.now;
        }
        self.conflict = match (self.holding, best, at.claims) {
            (true, Some(other), _) => Some(format!("{} claims it too", other.node)),
            (false, _, [first, second, ..]) => {
                Some(format!("{} and {} both claim it", first.node, second.node))
            }
            _ => None,
        };
        if self.holding {
            return None;
        }
        if let Some(best) = best {
            self.epoch = self.epoch.max(best.epoch);
            self.last_claim = self.last_claim.max(best.heard);
        }
        if !was_holding && at.may_hold && at.may_claim && self.is_mine_to_take(at) {
            self.epoch = self.epoch.saturating_add(1);
            self.holding = true;
            let is_given = at.alone || at.claims.iter().any(|claim| claim.yields);
            self.answer_from = if is_given {
                at.now
            } else {
                at.now + at.hold / HESITATION
            };
            self.set_holder(Some(at.me), at.now);
            if at.alone {
                self.answer_until = u64::MAX;
            }
            return Some(Change::Claimed);
        }
        self.set_holder(best.map(|claim| claim.node), at.now);
        was_holding.then_some(Change::Released)
    }

    /// Whether what this node holds stays its own.
    fn hold(&mut self, at: &Situation<'_>, best: Option<&Claim<'_>>) {
        let own = (self.epoch, rank(at.vip, at.me));
        let is_beaten = best.is_some_and(|claim| (claim.epoch, rank(at.vip, claim.node)) > own);
        // Others may have taken it meanwhile: listen before answering again.
        let has_slept = self.answer_until <= nanoseconds(at.now);
        if !at.may_hold || is_beaten || has_slept {
            self.holding = false;
            self.answer_until = 0;
            self.last_claim = at.now;
        } else if at.alone {
            self.answer_until = u64::MAX;
        } else {
            // There was nobody, or the last agent stopped without anybody to hand over to.
            let most = nanoseconds(at.now + answering(at.hold));
            self.answer_until = self.answer_until.min(most);
        }
    }

    fn is_mine_to_take(&self, at: &Situation<'_>) -> bool {
        if at.alone || at.claims.iter().any(|claim| claim.yields) {
            return true;
        }
        let own = rank(at.vip, at.me);
        let ahead = at
            .rivals
            .iter()
            .filter(|rival| rank(at.vip, rival) > own)
            .count();
        let silence = at
            .now
            .saturating_sub(self.last_claim.max(at.listening_since));
        // The next in rank steps in where one ahead does not.
        let patience = at
            .hold
            .saturating_mul(1 + 2 * u32::try_from(ahead).unwrap_or(u32::MAX / 4));
        at.claims.is_empty() && silence >= patience
    }

    fn set_holder(&mut self, holder: Option<&str>, now: Duration) {
        if self.holder.as_deref() != holder {
            self.holder = holder.map(str::to_owned);
            self.since = now;
        }
    }

    /// Until when it answers, as of now.
    pub(super) fn answers_until(&self, now: Duration) -> u64 {
        if now < self.answer_from {
            0
        } else {
            self.answer_until
        }
    }

    /// A round of heartbeats that began at `before` has said that this node holds the VIP.
    pub(super) fn has_said(&mut self, before: Duration, hold: Duration) {
        if self.holding && self.answer_until != u64::MAX {
            let until = nanoseconds(before + answering(hold));
            self.answer_until = self.answer_until.max(until);
        }
    }
}
