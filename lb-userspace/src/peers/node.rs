//! One node among its peers, without sockets, clock or maps: what it hears goes in, what it says and does comes out.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use lb_common::{Announcer, LAYOUT_VERSION, from_name, to_name};
use tracing::{info, warn};

use super::election::{Change, Claim, Election, Situation};
use super::members::{Member, Refusal};
use super::probe::Told;
use super::wire::{self, Body, Rejection};
use super::{Counters, Link, PeerView, View, VipView, Wanted, nanoseconds};
use crate::desired::Announce;
use crate::tables::PeerRow;

/// How long a candidate waits for the exceptions of its peers before it takes a VIP without them.
const SYNC_PATIENCE: Duration = Duration::from_secs(2);
/// How long a peer that is no longer wanted, and neither live nor reflecting, is remembered.
pub(super) const FORGET_AFTER: Duration = Duration::from_secs(600);
/// How long a VIP is answered for by a node that stops without anybody to hand over to: its next agent goes on.
const LEAVE_ANSWERING: Duration = Duration::from_secs(120);

/// A datagram to send.
#[derive(Clone, Debug)]
pub(super) struct Outgoing {
    /// Link that it concerns.
    pub(super) uplink: u32,
    /// Own address to send from.
    pub(super) from: IpAddr,
    /// Peer's address.
    pub(super) to: IpAddr,
    /// What to send.
    pub(super) datagram: Vec<u8>,
}

/// What is to be done after something was heard or time has passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Todo {
    /// A round of heartbeats is to be sent now, not when its time comes.
    pub(super) say: bool,
}

/// A node among its peers.
pub(super) struct Node {
    wanted: Wanted,
    incarnation: u64,
    sequence: u64,
    version: String,
    members: BTreeMap<String, Member>,
    elections: BTreeMap<IpAddr, Election>,
    /// What earlier agents left, for VIPs that are not wanted yet.
    inherited: BTreeMap<IpAddr, Announcer>,
    counters: Counters,
    started: Duration,
    last_look: Duration,
    listening_since: Duration,
    unsynced_since: Option<Duration>,
    yields: BTreeMap<IpAddr, String>,
    is_leaving: bool,
    has_left: bool,
    told_of_twin: bool,
}

impl Node {
    /// A node that begins now, with what earlier agents left in the `announcers` map.
    pub(super) fn new(
        wanted: Wanted,
        incarnation: u64,
        inherited: BTreeMap<IpAddr, Announcer>,
        now: Duration,
    ) -> Self {
        let mut node = Self {
            wanted: wanted.clone(),
            incarnation,
            sequence: 0,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            members: BTreeMap::new(),
            elections: BTreeMap::new(),
            inherited,
            counters: Counters::default(),
            started: now,
            last_look: now,
            listening_since: now,
            unsynced_since: None,
            yields: BTreeMap::new(),
            is_leaving: false,
            has_left: false,
            told_of_twin: false,
        };
        node.want(wanted, now);
        node
    }

    /// Takes another wish; to be followed by a look.
    pub(super) fn want(&mut self, wanted: Wanted, now: Duration) -> Todo {
        if wanted.node != self.wanted.node {
            self.members.remove(&wanted.node);
        }
        let is_elsewhere = wanted.places() != self.wanted.places();
        let has_left_places = !self.wanted.places().is_subset(&wanted.places());
        if has_left_places {
            // Until peers know the new address, what does not come to it is not their silence.
            self.listening_since = now;
        }
        self.wanted = wanted;
        let elected: BTreeSet<IpAddr> = self.elected().map(|(vip, _)| vip).collect();
        self.elections.retain(|vip, _| elected.contains(vip));
        for vip in elected {
            if self.elections.contains_key(&vip) {
                continue;
            }
            let row = self.inherited.remove(&vip);
            let election = match row {
                Some(row)
                    if row.answer_until > nanoseconds(now)
                        && from_name(&row.holder) == from_name(&self.own_name()) =>
                {
                    info!(%vip, epoch = row.epoch, "this node holds the VIP still and goes on");
                    let since = Duration::from_nanos(row.since);
                    Election::resumed(row.epoch, row.answer_until, &self.wanted.node, since, now)
                }
                Some(row) => Election::new(row.epoch, now),
                None => Election::new(0, now),
            };
            self.elections.insert(vip, election);
        }
        let slots: BTreeSet<u32> = self.wanted.links.iter().map(|link| link.uplink).collect();
        for member in self.members.values_mut() {
            member.keep_links(&slots);
        }
        Todo { say: is_elsewhere }
    }

    fn own_name(&self) -> [u8; lb_common::NAME_LEN] {
        to_name(&self.wanted.node)
    }

    /// What this node does now.
    pub(super) fn wanted(&self) -> &Wanted {
        &self.wanted
    }

    /// Its incarnation.
    pub(super) fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Takes a peer for known that an earlier agent knew.
    pub(super) fn remember(&mut self, name: &str, remembered: PeerRow, now: Duration) {
        if name != self.wanted.node {
            let member = Member::remembered(remembered, now);
            self.members.entry(name.to_owned()).or_insert(member);
        }
    }

    /// How long a peer's word is good for: three intervals.
    pub(super) fn hold(&self) -> Duration {
        self.wanted.interval.saturating_mul(3)
    }

    fn link(&self, uplink: u32) -> Option<&Link> {
        self.wanted.links.iter().find(|link| link.uplink == uplink)
    }

    fn is_own(&self, address: IpAddr) -> bool {
        let mut links = self.wanted.links.iter();
        links.any(|link| link.addresses.iter().any(|(own, _)| *own == address))
    }

    fn elected(&self) -> impl Iterator<Item = (IpAddr, &super::VipWanted)> {
        let vips = self.wanted.vips.iter();
        vips.filter(|(_, vip)| vip.announce == Announce::Elect)
            .map(|(address, vip)| (*address, vip))
    }

    /// Takes a datagram that came to `own` on a link; one that is rejected changes nothing but a counter.
    pub(super) fn hear(
        &mut self,
        uplink: u32,
        own: IpAddr,
        from: IpAddr,
        datagram: &[u8],
        now: Duration,
    ) -> Option<Todo> {
        let body = match wire::open(&self.wanted.keys, datagram) {
            Ok(body) => body,
            Err(Rejection::Forged) => {
                self.counters.rejected_forged += 1;
                return None;
            }
            Err(Rejection::Malformed) => {
                self.counters.rejected_malformed += 1;
                return None;
            }
        };
        let is_for_here = body.to == Some(own) && body.addresses.contains(&from);
        if body.node.is_empty() || !is_for_here || self.link(uplink).is_none() {
            self.counters.rejected_malformed += 1;
            return None;
        }
        if body.node == self.wanted.node {
            self.counters.rejected_malformed += 1;
            if !self.told_of_twin {
                self.told_of_twin = true;
                warn!(node = %body.node, %from, "another machine calls itself by this node's name: give one of them another name");
            }
            return None;
        }
        let hold = self.hold();
        let member = self.members.entry(body.node.clone()).or_default();
        let me = (self.incarnation, self.wanted.node.as_str());
        let is_first = match member.hear(uplink, from, &body, me, now, hold) {
            Ok(is_first) => is_first,
            Err(Refusal::Twin) => {
                self.counters.rejected_malformed += 1;
                return None;
            }
            Err(Refusal::Replayed) => {
                self.counters.rejected_replayed += 1;
                return None;
            }
        };
        self.counters.heartbeats_heard += 1;
        // Our clock was set back before we started: to the peer we are a replay of ourselves.
        let known = body.known.get(&self.wanted.node);
        let is_behind = known.filter(|known| **known >= self.incarnation);
        if let Some(known) = is_behind {
            self.incarnation = known.saturating_add(1);
            self.sequence = 0;
        }
        let mut todo = self.look(now);
        todo.say |= is_first || is_behind.is_some();
        Some(todo)
    }

    /// Lets time pass: to be called several times an interval.
    pub(super) fn look(&mut self, now: Duration) -> Todo {
        let hold = self.hold();
        // What was missed while this process slept, or had no key, was not silence.
        let slept = now.saturating_sub(self.last_look) > self.wanted.interval;
        if slept || self.wanted.keys.is_empty() {
            self.listening_since = now;
        }
        self.last_look = now;
        self.forget(now);
        self.follow_sync(now);
        let mut todo = Todo::default();
        let alone = self.is_alone(now);
        let vips: Vec<IpAddr> = self.elections.keys().copied().collect();
        for vip in vips {
            let Some(wanted) = self.wanted.vips.get(&vip) else {
                continue;
            };
            let carrier = self.link(wanted.uplink).is_some_and(|link| link.carrier);
            let may_hold = wanted.candidate && carrier;
            let uplink = wanted.uplink;
            let (mut claims, mut rivals) = (Vec::new(), Vec::new());
            for (name, member) in &self.members {
                let Some(heard) = member.claim(uplink, now, hold) else {
                    continue;
                };
                if let Some(epoch) = heard.claims.get(&vip) {
                    claims.push(Claim {
                        node: name,
                        epoch: *epoch,
                        heard: heard.at,
                        yields: heard.yields.get(&vip) == Some(&self.wanted.node),
                    });
                }
                let is_live = member.is_live_on(uplink, now, hold, self.listening_since);
                if is_live && heard.candidates.contains(&vip) {
                    rivals.push(name.as_str());
                }
            }
            let situation = Situation {
                now,
                listening_since: self.listening_since,
                hold,
                me: &self.wanted.node,
                vip,
                may_hold: may_hold && !self.has_left,
                may_claim: self.may_claim(now),
                alone,
                claims: &claims,
                rivals: &rivals,
            };
            let Some(election) = self.elections.get_mut(&vip) else {
                continue;
            };
            if self.has_left {
                continue;
            }
            match election.look(&situation) {
                Some(Change::Claimed) => {
                    info!(%vip, epoch = election.epoch, "this node takes the VIP");
                    self.counters.takeovers += 1;
                    todo.say = true;
                }
                Some(Change::Released) => {
                    info!(%vip, to = election.holder, "this node gives the VIP up");
                    self.yields.remove(&vip);
                    todo.say = true;
                }
                None => {}
            }
        }
        todo
    }

    /// Whether this node has no peers, in the configuration or on the wire.
    pub(super) fn is_alone(&self, now: Duration) -> bool {
        let is_configured = self
            .wanted
            .addresses
            .iter()
            .any(|address| !self.is_own(*address));
        let hold = self.hold();
        let mut members = self.members.values();
        !is_configured && !members.any(|member| member.is_heard(now, hold))
    }

    fn follow_sync(&mut self, now: Duration) {
        let hold = self.hold();
        let mut members = self.members.values();
        let is_behind = members
            .any(|member| member.is_live(now, hold, self.listening_since) && !member.is_synced());
        self.unsynced_since = match (is_behind, self.unsynced_since) {
            (false, _) => None,
            (true, since) => since.or(Some(now)),
        };
    }

    /// Whether this node may take a VIP now, as far as it is not a matter of the VIP.
    fn may_claim(&self, now: Duration) -> bool {
        let is_synced = self
            .unsynced_since
            .is_none_or(|since| now.saturating_sub(since) >= SYNC_PATIENCE);
        self.wanted.ready && is_synced && !self.is_leaving
    }

    fn forget(&mut self, now: Duration) {
        let hold = self.hold();
        let wanted = &self.wanted.addresses;
        self.members.retain(|name, member| {
            let stays = member.stays(wanted, now, hold);
            if !stays {
                info!(peer = name, "a peer is gone for good");
            }
            stays
        });
    }

    /// The datagrams of one round: one for every address of a peer on every link.
    pub(super) fn round(&mut self, now: Duration) -> Vec<Outgoing> {
        let Some(key) = self.wanted.keys.first().cloned() else {
            return Vec::new();
        };
        let mut out = Vec::new();
        if self.has_left {
            return out;
        }
        let links = self.wanted.links.clone();
        for link in &links {
            let body = self.body(link, now);
            for (from, to) in self.pairs(link, now) {
                self.sequence += 1;
                let body = Body {
                    sequence: self.sequence,
                    to: Some(to),
                    ..body.clone()
                };
                out.push(Outgoing {
                    uplink: link.uplink,
                    from,
                    to,
                    datagram: wire::seal(&key, &body),
                });
            }
        }
        self.counters.heartbeats_sent += out.len() as u64;
        out
    }

    /// Own address and peer's address of every pair on a link, peers that called without being wanted included.
    fn pairs(&self, link: &Link, now: Duration) -> BTreeSet<(IpAddr, IpAddr)> {
        let hold = self.hold();
        let members = self.members.values();
        let callers = members.filter_map(|member| member.caller(link.uplink, now, hold));
        let addresses = self.wanted.addresses.iter().copied().chain(callers);
        let peers = addresses.filter(|address| !self.is_own(*address));
        let with_own = peers.filter_map(|peer| {
            let mut own = link.addresses.iter();
            let own = own.find(|(own, prefix)| is_in_subnet(peer, *own, *prefix))?;
            Some((own.0, peer))
        });
        with_own.collect()
    }

    /// What this node has to say on a link, but for sequence and receiver.
    fn body(&self, link: &Link, now: Duration) -> Body {
        let hold = self.hold();
        let on_link = |vip: &IpAddr| {
            let vip = self.wanted.vips.get(vip);
            vip.is_some_and(|vip| vip.uplink == link.uplink)
        };
        let may_claim = self.may_claim(now);
        let candidates = self.elected().filter(|(_, vip)| {
            vip.uplink == link.uplink && vip.candidate && link.carrier && may_claim
        });
        let held = self.elections.iter();
        let held = held.filter(|(vip, election)| election.holding && on_link(vip));
        let mut heard = BTreeMap::new();
        let mut known = BTreeMap::new();
        for (name, member) in &self.members {
            if member.claim_or_fresh(link.uplink, now, hold) {
                heard.insert(name.clone(), member.incarnation);
            }
            if member.is_behind(now, hold) {
                known.insert(name.clone(), member.incarnation);
            }
        }
        let yields = self.yields.iter().filter(|(vip, _)| on_link(vip));
        Body {
            node: self.wanted.node.clone(),
            incarnation: self.incarnation,
            sequence: 0,
            to: None,
            version: self.version.clone(),
            layout: LAYOUT_VERSION,
            mac: link.mac,
            addresses: link.addresses.iter().map(|(address, _)| *address).collect(),
            vips: held.map(|(vip, election)| (*vip, election.epoch)).collect(),
            candidates: candidates.map(|(vip, _)| vip).collect(),
            heard,
            known,
            yields: yields.map(|(vip, to)| (*vip, to.clone())).collect(),
            exceptions: super::exceptions::VERSION,
            down: self.wanted.down.clone(),
        }
    }

    /// A round that began at `before` went out on these links (which are those without anybody to send to, too).
    pub(super) fn has_said(&mut self, before: Duration, uplinks: &BTreeSet<u32>) {
        let hold = self.hold();
        if self.has_left {
            return;
        }
        for (vip, election) in &mut self.elections {
            let wanted = self.wanted.vips.get(vip);
            if wanted.is_some_and(|wanted| uplinks.contains(&wanted.uplink)) {
                election.has_said(before, hold);
            }
        }
    }

    /// Begins to hand over: every VIP is yielded to the best peer that would take it. Returns whether there is any that
    /// somebody will take.
    pub(super) fn leave(&mut self, now: Duration) -> bool {
        self.is_leaving = true;
        let hold = self.hold();
        self.yields.clear();
        for (vip, election) in &self.elections {
            let Some(wanted) = self.wanted.vips.get(vip) else {
                continue;
            };
            if !election.holding {
                continue;
            }
            let takers = self.members.iter().filter(|(_, member)| {
                member.is_live_on(wanted.uplink, now, hold, self.listening_since)
                    && member.would_take(wanted.uplink, *vip)
            });
            let best = takers.max_by_key(|(name, _)| super::election::rank(*vip, name));
            if let Some((name, _)) = best {
                self.yields.insert(*vip, name.clone());
            }
        }
        !self.yields.is_empty()
    }

    /// Whether it is about to stop.
    pub(super) fn is_leaving(&self) -> bool {
        self.is_leaving
    }

    /// Whether somebody has yet to take what this node yields.
    pub(super) fn is_yielding(&self) -> bool {
        let mut yields = self.yields.keys();
        yields.any(|vip| {
            self.elections
                .get(vip)
                .is_some_and(|election| election.holding)
        })
    }

    /// Ends it: says and changes nothing any more. What nobody could take stays answered for a while; what somebody
    /// should have taken, and did not, falls silent before its peers' patience ends.
    pub(super) fn left(&mut self, now: Duration) {
        self.has_left = true;
        for (vip, election) in &mut self.elections {
            if election.holding && !self.yields.contains_key(vip) {
                let until = nanoseconds(now + LEAVE_ANSWERING);
                election.answer_until = election.answer_until.max(until);
            }
        }
    }

    /// The rows of the `announcers` map.
    pub(super) fn announcers(&self, now: Duration) -> BTreeMap<IpAddr, Announcer> {
        let row = |election: &Election| Announcer {
            answer_until: election.answers_until(now),
            epoch: election.epoch,
            since: nanoseconds(election.since),
            holder: to_name(election.holder.as_deref().unwrap_or_default()),
            conflict: to_name(election.conflict.as_deref().unwrap_or_default()),
        };
        let elections = self.elections.iter();
        elections
            .map(|(vip, election)| (*vip, row(election)))
            .collect()
    }

    /// VIPs that this node announces now.
    pub(super) fn announced(&self, now: Duration) -> BTreeSet<IpAddr> {
        let vips = self.wanted.vips.iter();
        let is_announced = |(address, vip): &(&IpAddr, &super::VipWanted)| match vip.announce {
            Announce::Always => true,
            Announce::External => false,
            Announce::Elect => self.elections.get(*address).is_some_and(|election| {
                election.holding && election.answers_until(now) > nanoseconds(now)
            }),
        };
        vips.filter(is_announced).map(|(vip, _)| *vip).collect()
    }

    /// Peers with their incarnations and where their exceptions are to be had: address and own uplink.
    pub(super) fn sources(&self, now: Duration) -> BTreeMap<String, (u64, IpAddr, u32)> {
        let hold = self.hold();
        let members = self.members.iter();
        let sources = members.filter_map(|(name, member)| {
            let (uplink, address) = member.source(now, hold)?;
            Some((name.clone(), (member.incarnation, address, uplink)))
        });
        sources.collect()
    }

    /// A snapshot of the exceptions of a peer's incarnation has arrived.
    pub(super) fn has_synced(&mut self, name: &str, incarnation: u64) {
        if let Some(member) = self.members.get_mut(name) {
            member.synced = Some(incarnation);
        }
    }

    /// Takes what probes of a peer have told.
    pub(super) fn probed(&mut self, name: &str, told: Told, now: Duration) {
        if let Some(member) = self.members.get_mut(name) {
            member.probed(told, now);
        }
    }

    /// Peers and their MACs on the links that have a VIP: whom to probe.
    pub(super) fn targets(&self) -> Vec<(String, u32, [u8; 6])> {
        let used: BTreeSet<u32> = self.wanted.vips.values().map(|vip| vip.uplink).collect();
        let members = self.members.iter();
        let targets = members.flat_map(|(name, member)| {
            let links = member.links.iter().filter(|(slot, _)| used.contains(slot));
            links.map(move |(slot, heard)| (name.clone(), *slot, heard.mac))
        });
        targets.collect()
    }

    /// Names of all peers.
    pub(super) fn names(&self) -> BTreeSet<String> {
        self.members.keys().cloned().collect()
    }

    /// Counters that others count for this node.
    pub(super) fn counters(&mut self) -> &mut Counters {
        &mut self.counters
    }

    /// Everything for whoever looks.
    pub(super) fn view(&self, now: Duration) -> View {
        let hold = self.hold();
        let members = self.members.iter();
        let peers: BTreeMap<String, PeerView> = members
            .map(|(name, member)| {
                let live = member.is_live(now, hold, self.listening_since);
                (name.clone(), member.view(live, now))
            })
            .collect();
        let vips = self.elections.iter().map(|(vip, election)| {
            let view = VipView {
                holder: election.holder.clone(),
                epoch: election.epoch,
                conflict: election.conflict.clone(),
            };
            (*vip, view)
        });
        // Before that it is not known who is there.
        let has_listened = self.is_alone(now) || now.saturating_sub(self.started) >= hold;
        let is_settled = |peer: &PeerView| {
            let is_here = peer.live || peer.reflecting;
            !is_here || (peer.synced && peer.live)
        };
        View {
            settled: has_listened && peers.values().all(is_settled),
            vips: vips.collect(),
            peers,
            counters: self.counters,
        }
    }
}

fn is_in_subnet(address: IpAddr, own: IpAddr, prefix: u8) -> bool {
    let same = |a: u128, b: u128, bits: u32| {
        let host = bits.saturating_sub(prefix.into());
        a.checked_shr(host).unwrap_or(0) == b.checked_shr(host).unwrap_or(0)
    };
    match (address, own) {
        (IpAddr::V4(a), IpAddr::V4(b)) => same(a.to_bits().into(), b.to_bits().into(), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => same(a.to_bits(), b.to_bits(), 128),
        _ => false,
    }
}
