//! What is known of one peer: what it said last on each link, and what to make of it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use super::node::FORGET_AFTER;
use super::probe::Told;
use super::wire::Body;
use super::{PeerLink, PeerView};
use crate::tables::PeerRow;

/// How long a peer may be live before it must reflect.
const REFLECT_WITHIN: Duration = Duration::from_secs(5);
/// How long a second machine of the same name is spoken of.
const TWIN_FOR: Duration = Duration::from_secs(10);

/// Why a heartbeat counts for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It is not newer than what was heard before.
    Replayed,
    /// Another machine of this name is live.
    Twin,
}

/// What a peer said last on one link.
#[derive(Clone, Debug, Default)]
pub(super) struct Heard {
    /// When; zero for a link that only an earlier agent knew.
    pub(super) at: Duration,
    /// Its MAC there.
    pub(super) mac: [u8; 6],
    /// Its addresses there.
    pub(super) addresses: Vec<IpAddr>,
    /// VIPs that it holds, with epochs.
    pub(super) claims: BTreeMap<IpAddr, u64>,
    /// VIPs that it would hold.
    pub(super) candidates: BTreeSet<IpAddr>,
    /// To whom it yields VIPs.
    pub(super) yields: BTreeMap<IpAddr, String>,
    /// Where it sent from.
    from: Option<IpAddr>,
    /// Highest incarnation and sequence.
    newest: (u64, u64),
    /// It hears this agent.
    hears_us: bool,
    /// Since when it has been live here.
    live_since: Option<Duration>,
}

/// A peer.
#[derive(Clone, Debug, Default)]
pub(super) struct Member {
    /// Highest incarnation heard.
    pub(super) incarnation: u64,
    /// What it said, by own uplink.
    pub(super) links: BTreeMap<u32, Heard>,
    /// Backends of it that fail their health checks.
    down: BTreeSet<(String, IpAddr)>,
    /// Incarnation whose exceptions are here.
    pub(super) synced: Option<u64>,
    version: String,
    layout: u32,
    /// It offers its exceptions.
    has_exceptions: bool,
    /// Incarnations of it and of us that are known to have spoken with each other: what it says with this one is not
    /// replayed, even while it does not hear us.
    verified: Option<(u64, u64)>,
    /// What probes have told.
    told: Told,
    /// When it was last heard, or last reflected.
    last_sign: Duration,
    /// When it last reflected.
    reflected: Duration,
    /// When another machine of its name, or an earlier self, was heard.
    twin: Option<Duration>,
    behind: Option<Duration>,
}

impl Member {
    /// A peer that an earlier agent knew.
    pub(super) fn remembered(remembered: PeerRow, now: Duration) -> Self {
        let links = remembered.links.into_iter().map(|(uplink, link)| {
            let heard = Heard {
                mac: link.mac,
                addresses: link.addresses,
                ..Heard::default()
            };
            (uplink, heard)
        });
        Self {
            version: remembered.version,
            links: links.collect(),
            last_sign: now,
            ..Self::default()
        }
    }

    /// Takes a heartbeat; tells whether it is the first of its incarnation on this link.
    pub(super) fn hear(
        &mut self,
        uplink: u32,
        from: IpAddr,
        body: &Body,
        (own_incarnation, me): (u64, &str),
        now: Duration,
        hold: Duration,
    ) -> Result<bool, Refusal> {
        let heard = self.links.get(&uplink);
        let newest = heard.map(|heard| heard.newest).unwrap_or_default();
        if body.incarnation < self.incarnation || (body.incarnation, body.sequence) <= newest {
            if body.incarnation < self.incarnation {
                let is_same = |heard: &Heard| {
                    heard.mac == body.mac || now.saturating_sub(heard.at) > TWIN_FOR
                };
                if heard.is_some_and(is_same) {
                    self.behind = Some(now);
                } else {
                    self.twin = Some(now);
                }
            }
            return Err(Refusal::Replayed);
        }
        // An agent that starts again has its MAC still, or was silent for a while. A machine that has been given the name of
        // one that is live must not take that one's pods out.
        let is_new = body.incarnation > self.incarnation;
        let is_other = heard.is_none_or(|heard| heard.mac != body.mac);
        if is_new && is_other && self.verified.is_some() && self.is_heard(now, hold) {
            self.twin = Some(now);
            return Err(Refusal::Twin);
        }
        let is_first = newest.0 != body.incarnation;
        let hears_us = body.heard.get(me) == Some(&own_incarnation);
        if hears_us {
            self.verified = Some((body.incarnation, own_incarnation));
        }
        let live_since = heard.and_then(|heard| heard.live_since);
        self.incarnation = body.incarnation;
        self.version.clone_from(&body.version);
        self.layout = body.layout;
        self.down.clone_from(&body.down);
        self.has_exceptions = body.exceptions == super::exceptions::VERSION;
        self.last_sign = now;
        if self.verified != Some((body.incarnation, own_incarnation)) {
            // It may be an old word of its own, sent again: its address may have changed since.
            self.verified = None;
        }
        self.links.insert(
            uplink,
            Heard {
                at: now,
                mac: body.mac,
                addresses: body.addresses.clone(),
                claims: body.vips.clone(),
                candidates: body.candidates.clone(),
                yields: body.yields.clone(),
                from: Some(from),
                newest: (body.incarnation, body.sequence),
                hears_us,
                live_since: hears_us.then(|| live_since.unwrap_or(now)),
            },
        );
        Ok(is_first)
    }

    /// Forgets links that this node no longer has.
    pub(super) fn keep_links(&mut self, slots: &BTreeSet<u32>) {
        self.links.retain(|slot, _| slots.contains(slot));
    }

    fn fresh(&self, uplink: u32, now: Duration, hold: Duration) -> Option<&Heard> {
        let heard = self.links.get(&uplink)?;
        let is_fresh = heard.from.is_some() && now.saturating_sub(heard.at) < hold;
        is_fresh.then_some(heard)
    }

    /// What it says on a link, if that is recent and not a replay: believed even while it does not hear us, for it takes
    /// what we hold when it does not.
    pub(super) fn claim(&self, uplink: u32, now: Duration, hold: Duration) -> Option<&Heard> {
        self.verified?;
        self.fresh(uplink, now, hold)
    }

    /// Whether it is heard on a link.
    pub(super) fn claim_or_fresh(&self, uplink: u32, now: Duration, hold: Duration) -> bool {
        self.fresh(uplink, now, hold).is_some()
    }

    /// Whether it is heard at all.
    pub(super) fn is_heard(&self, now: Duration, hold: Duration) -> bool {
        let mut links = self.links.keys();
        links.any(|uplink| self.fresh(*uplink, now, hold).is_some())
    }

    /// Whether each hears the other on a link. While this agent slept nobody lapsed.
    pub(super) fn is_live_on(
        &self,
        uplink: u32,
        now: Duration,
        hold: Duration,
        listening_since: Duration,
    ) -> bool {
        let heard = self.links.get(&uplink);
        heard.is_some_and(|heard| {
            heard.hears_us && now.saturating_sub(heard.at.max(listening_since)) < hold
        })
    }

    /// Whether each hears the other on any link.
    pub(super) fn is_live(&self, now: Duration, hold: Duration, listening_since: Duration) -> bool {
        let mut links = self.links.keys();
        links.any(|uplink| self.is_live_on(*uplink, now, hold, listening_since))
    }

    /// Whether its exceptions are here, or it has none to give.
    pub(super) fn is_synced(&self) -> bool {
        self.synced == Some(self.incarnation) || (self.incarnation != 0 && !self.has_exceptions)
    }

    /// Whether it has to be told that a later incarnation of it is known.
    pub(super) fn is_behind(&self, now: Duration, hold: Duration) -> bool {
        self.behind.is_some_and(|at| now.saturating_sub(at) < hold)
    }

    /// Where it called from on a link.
    pub(super) fn caller(&self, uplink: u32, now: Duration, hold: Duration) -> Option<IpAddr> {
        self.fresh(uplink, now, hold)?.from
    }

    /// Whether it would take a VIP on a link.
    pub(super) fn would_take(&self, uplink: u32, vip: IpAddr) -> bool {
        let heard = self.links.get(&uplink);
        heard.is_some_and(|heard| heard.candidates.contains(&vip))
    }

    /// The first link on which its exceptions are to be had, and its address there.
    pub(super) fn source(&self, now: Duration, hold: Duration) -> Option<(u32, IpAddr)> {
        if !self.has_exceptions {
            return None;
        }
        let mut links = self.links.keys();
        links.find_map(|uplink| Some((*uplink, self.fresh(*uplink, now, hold)?.from?)))
    }

    /// Takes what probes have told.
    pub(super) fn probed(&mut self, told: Told, now: Duration) {
        self.told = told;
        if told.reflects {
            self.last_sign = now;
            self.reflected = now;
        }
    }

    /// Whether it is remembered: it is wanted, or gives signs of life, or did not long ago.
    pub(super) fn stays(&self, wanted: &BTreeSet<IpAddr>, now: Duration, hold: Duration) -> bool {
        let mut addresses = self.links.values().flat_map(|heard| &heard.addresses);
        self.is_heard(now, hold)
            || addresses.any(|address| wanted.contains(address))
            || now.saturating_sub(self.last_sign) < FORGET_AFTER
    }

    /// For whoever looks.
    pub(super) fn view(&self, live: bool, now: Duration) -> PeerView {
        let since = self.links.values().filter_map(|heard| heard.live_since);
        let is_long_live = since
            .min()
            .is_some_and(|since| now.saturating_sub(since) > REFLECT_WITHIN);
        let note = if self
            .twin
            .is_some_and(|at| now.saturating_sub(at) < TWIN_FOR)
        {
            Some("two machines call themselves by this name: give one of them another name")
        } else if live
            && is_long_live
            && self.told.has_missed
            && now.saturating_sub(self.reflected) > REFLECT_WITHIN
        {
            Some(
                "heartbeats arrive but probes do not come back, so its pods are not used: are its programs attached (`ironlb status` there), or does the switch filter foreign source addresses (port security, IP source guard)?",
            )
        } else {
            None
        };
        let links = self.links.iter().map(|(uplink, heard)| {
            let link = PeerLink {
                mac: heard.mac,
                addresses: heard.addresses.clone(),
            };
            (*uplink, link)
        });
        PeerView {
            version: self.version.clone(),
            layout: self.layout,
            live,
            reflecting: self.told.reflects,
            synced: self.is_synced(),
            links: links.collect(),
            down: self.down.clone(),
            note: note.map(str::to_owned),
        }
    }
}
