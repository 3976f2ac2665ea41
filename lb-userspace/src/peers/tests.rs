//! Simulated nodes on simulated time: what they say to each other, lost, late and cut off, and who answers for the VIP.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use lb_common::Announcer;
use proptest::prelude::*;

use super::node::{Node, Todo};
use super::probe::Told;
use super::wire::{self, Body};
use super::{Key, Link, VipWanted, Wanted, nanoseconds};
use crate::desired::Announce;

const VIP: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 22, 0, 2));
const INTERVAL: Duration = Duration::from_millis(300);
const STEP: Duration = Duration::from_millis(20);
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

const REFLECTS: Told = Told {
    reflects: true,
    has_missed: false,
};
const SILENT: Told = Told {
    reflects: false,
    has_missed: true,
};

fn key(text: &str) -> Key {
    Key::from_bytes(text.as_bytes()).expect("long enough")
}

fn address(node: usize) -> IpAddr {
    Ipv4Addr::new(172, 22, 0, 11 + node as u8).into()
}

fn wanted(node: usize, nodes: usize) -> Wanted {
    Wanted {
        node: NAMES[node].to_owned(),
        addresses: (0..nodes).map(address).collect(),
        keys: vec![key("the old key, 16 bytes")],
        interval: INTERVAL,
        port: 9470,
        links: vec![Link {
            device: 0,
            uplink: 0,
            ifindex: 2,
            mac: [2, 0, 0, 0, 0, node as u8],
            vlan: None,
            addresses: vec![(address(node), 24)],
            carrier: true,
        }],
        vips: BTreeMap::from([(
            VIP,
            VipWanted {
                uplink: 0,
                announce: Announce::Elect,
                candidate: true,
            },
        )]),
        ready: true,
        down: BTreeSet::new(),
    }
}

/// A machine: its program answers by the map, whatever its agent does.
struct Machine {
    wanted: Wanted,
    agent: Option<Node>,
    map: BTreeMap<IpAddr, Announcer>,
    paused: bool,
    /// The machine as a whole stands still since then, and its clock with it: a virtual one that its host has stopped.
    stands: Option<Duration>,
    /// How long it stood still before.
    stood: Duration,
    last_round: Duration,
}

struct Flight {
    at: Duration,
    from: usize,
    to: usize,
    datagram: Vec<u8>,
}

struct Sim {
    now: Duration,
    machines: Vec<Machine>,
    flights: Vec<Flight>,
    /// Everything that was ever sent, with its receiver.
    record: Vec<(usize, usize, Vec<u8>)>,
    /// Of 100 datagrams so many are lost.
    loss: u32,
    /// Those on one side do not reach those on the other.
    side: BTreeSet<usize>,
    random: u64,
    /// Longest time that two answered at once.
    double: Duration,
    /// Longest time that nobody did.
    nobody: Duration,
    nobody_since: Option<Duration>,
    incarnations: u64,
}

impl Sim {
    fn new(nodes: usize, seed: u64) -> Self {
        let mut sim = Self {
            now: Duration::from_secs(1000),
            machines: Vec::new(),
            flights: Vec::new(),
            record: Vec::new(),
            loss: 0,
            side: BTreeSet::new(),
            random: seed | 1,
            double: Duration::ZERO,
            nobody: Duration::ZERO,
            nobody_since: None,
            incarnations: 1_000_000,
        };
        for node in 0..nodes {
            sim.machines.push(Machine {
                wanted: wanted(node, nodes),
                agent: None,
                map: BTreeMap::new(),
                paused: false,
                stands: None,
                stood: Duration::ZERO,
                last_round: Duration::ZERO,
            });
        }
        sim
    }

    fn started(nodes: usize, seed: u64) -> Self {
        let mut sim = Self::new(nodes, seed);
        for node in 0..nodes {
            sim.start(node);
        }
        sim
    }

    fn start(&mut self, node: usize) {
        self.incarnations += 1;
        self.start_as(node, self.incarnations);
    }

    /// What time it is on a machine.
    fn clock(&self, node: usize) -> Duration {
        let machine = &self.machines[node];
        machine.stands.unwrap_or(self.now) - machine.stood
    }

    fn stop(&mut self, node: usize) {
        let now = self.now;
        self.machines[node].stands.get_or_insert(now);
    }

    fn go_on(&mut self, node: usize) {
        let now = self.now;
        let machine = &mut self.machines[node];
        machine.stood += machine
            .stands
            .take()
            .map_or(Duration::ZERO, |since| now - since);
    }

    fn start_as(&mut self, node: usize, incarnation: u64) {
        let now = self.clock(node);
        let machine = &mut self.machines[node];
        let wanted = machine.wanted.clone();
        machine.agent = Some(Node::new(wanted, incarnation, machine.map.clone(), now));
        machine.last_round = Duration::ZERO;
        machine.paused = false;
    }

    fn kill(&mut self, node: usize) {
        self.machines[node].agent = None;
        self.flights.retain(|flight| flight.to != node);
    }

    fn want(&mut self, node: usize, change: impl Fn(&mut Wanted)) {
        let now = self.clock(node);
        let machine = &mut self.machines[node];
        change(&mut machine.wanted);
        if let Some(agent) = &mut machine.agent {
            let mut todo = agent.want(machine.wanted.clone(), now);
            todo.say |= agent.look(now).say;
            self.act(node, todo);
        }
    }

    fn agent(&self, node: usize) -> &Node {
        self.machines[node].agent.as_ref().expect("runs")
    }

    fn agent_mut(&mut self, node: usize) -> &mut Node {
        self.machines[node].agent.as_mut().expect("runs")
    }

    fn random(&mut self, below: u64) -> u64 {
        // Xorshift (Marsaglia, 2003).
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % below
    }

    fn act(&mut self, node: usize, todo: Todo) {
        let now = self.clock(node);
        let machine = &mut self.machines[node];
        let Some(agent) = &mut machine.agent else {
            return;
        };
        machine.map = agent.announcers(now);
        if !todo.say {
            return;
        }
        let round = agent.round(now);
        agent.has_said(now, &BTreeSet::from([0]));
        machine.map = agent.announcers(now);
        for outgoing in round {
            let to = (0..self.machines.len()).find(|to| address(*to) == outgoing.to);
            let to = to.expect("a machine has it");
            self.record.push((node, to, outgoing.datagram.clone()));
            let is_cut = self.side.contains(&node) != self.side.contains(&to);
            let is_lost = self.random(100) < self.loss.into();
            let receiver = &self.machines[to];
            if is_cut || is_lost || receiver.agent.is_none() || receiver.stands.is_some() {
                continue;
            }
            let late = Duration::from_millis(self.random(40));
            self.flights.push(Flight {
                at: self.now + late,
                from: node,
                to,
                datagram: outgoing.datagram,
            });
        }
    }

    fn hear(&mut self, node: usize) {
        let (arrived, now) = (self.now, self.clock(node));
        let (mut due, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.flights)
            .into_iter()
            .partition(|flight| flight.to == node && flight.at <= arrived);
        self.flights = rest;
        due.sort_by_key(|flight| flight.at);
        for flight in due {
            let (own, from) = (address(node), address(flight.from));
            let agent = self.agent_mut(node);
            let todo = agent.hear(0, own, from, &flight.datagram, now);
            for (name, (incarnation, ..)) in agent.sources(now) {
                agent.has_synced(&name, incarnation);
            }
            self.act(node, todo.unwrap_or_default());
        }
    }

    fn look(&mut self, node: usize) {
        let now = self.clock(node);
        let mut todo = self.agent_mut(node).look(now);
        if now.saturating_sub(self.machines[node].last_round) >= INTERVAL {
            self.machines[node].last_round = now;
            todo.say = true;
        }
        self.act(node, todo);
    }

    fn step(&mut self) {
        self.now += STEP;
        let now = self.now;
        for node in 0..self.machines.len() {
            let machine = &self.machines[node];
            if machine.paused || machine.stands.is_some() || machine.agent.is_none() {
                continue;
            }
            // Nobody promises that what waits is heard before time is looked at.
            if self.random(2) == 0 {
                self.hear(node);
                self.look(node);
            } else {
                self.look(node);
                self.hear(node);
            }
        }
        match self.answering().len() {
            0 => {
                let since = *self.nobody_since.get_or_insert(now);
                self.nobody = self.nobody.max(now - since + STEP);
            }
            1 => self.nobody_since = None,
            _ => {
                self.nobody_since = None;
                self.double += STEP;
            }
        }
    }

    fn run(&mut self, seconds: f64) {
        let end = self.now + Duration::from_secs_f64(seconds);
        while self.now < end {
            self.step();
        }
    }

    /// Machines whose program answers for the VIP.
    fn answering(&self) -> Vec<usize> {
        let machines = self.machines.iter().enumerate();
        machines
            .filter(|(node, machine)| {
                let row = machine.map.get(&VIP);
                let now = nanoseconds(self.clock(*node));
                machine.stands.is_none() && row.is_some_and(|row| row.answer_until > now)
            })
            .map(|(node, _)| node)
            .collect()
    }

    fn holder(&self) -> usize {
        let answering = self.answering();
        assert_eq!(answering.len(), 1, "exactly one answers: {answering:?}");
        answering[0]
    }

    fn forget_times(&mut self) {
        self.double = Duration::ZERO;
        self.nobody = Duration::ZERO;
        self.nobody_since = None;
    }
}

#[test]
fn of_nodes_that_start_together_exactly_one_answers_and_all_know_it() {
    for seed in 0..50 {
        let mut sim = Sim::started(2 + seed as usize % 3, seed);
        sim.run(4.0);
        let holder = sim.holder();
        assert_eq!(sim.double, Duration::ZERO, "seed {seed}");
        assert!(
            sim.nobody <= Duration::from_millis(1500),
            "{:?}",
            sim.nobody
        );
        for node in 0..sim.machines.len() {
            let view = sim.agent(node).view(sim.now);
            assert_eq!(view.vips[&VIP].holder.as_deref(), Some(NAMES[holder]));
            assert_eq!(view.vips[&VIP].conflict, None);
            assert!(view.settled || view.peers.values().all(|peer| peer.live));
        }
    }
}

#[test]
fn a_holder_that_stands_still_is_silent_before_another_answers() {
    for seed in 0..60 {
        let mut sim = Sim::started(3, seed);
        sim.run(4.0 + seed as f64 * 0.02);
        let holder = sim.holder();
        sim.forget_times();
        sim.machines[holder].paused = true;
        let stopped = sim.now;
        while sim.answering() == [holder] {
            sim.step();
        }
        let silent = sim.now;
        while sim.answering().is_empty() {
            sim.step();
        }
        // An eighth of the hold time lies between.
        assert!(
            sim.now - silent >= Duration::from_millis(60),
            "{:?}",
            sim.now - silent
        );
        assert!(
            sim.now - stopped <= Duration::from_millis(1000),
            "{:?}",
            sim.now - stopped
        );
        sim.run(5.0);
        let next = sim.holder();
        sim.machines[holder].paused = false;
        sim.run(5.0);
        assert_eq!(sim.holder(), next, "who comes back changes nothing");
        assert_eq!(sim.double, Duration::ZERO);
    }
}

/// Its deadline has not passed by its own clock, so that it answers beside the one that took the VIP meanwhile: until it
/// has heard of that.
#[test]
fn a_machine_that_stood_still_with_its_clock_gives_way_at_the_next_heartbeat() {
    let mut overlap = Duration::ZERO;
    for seed in 0..60 {
        let mut sim = Sim::started(3, seed);
        sim.run(4.0 + seed as f64 * 0.02);
        let holder = sim.holder();
        sim.stop(holder);
        sim.run(1.0 + seed as f64 * 0.5);
        let next = sim.holder();
        sim.forget_times();
        sim.go_on(holder);
        sim.run(1.0);
        assert_eq!(sim.holder(), next, "who comes back changes nothing");
        overlap = overlap.max(sim.double);
        sim.forget_times();
        sim.run(5.0);
        assert_eq!(
            (sim.holder(), sim.double, sim.nobody),
            (next, Duration::ZERO, Duration::ZERO)
        );
    }
    assert!(!overlap.is_zero(), "it must not know that it stood still");
    // On its way for 40 ms at most, and looked at in steps.
    let heartbeat = INTERVAL + Duration::from_millis(40) + STEP * 2;
    assert!(overlap <= heartbeat, "{overlap:?}");
}

#[test]
fn a_follower_that_stands_still_or_starts_anew_changes_nothing() {
    let mut sim = Sim::started(3, 7);
    sim.run(4.0);
    let holder = sim.holder();
    sim.forget_times();
    for node in (0..3).filter(|node| *node != holder) {
        sim.machines[node].paused = true;
        sim.run(3.0);
        sim.machines[node].paused = false;
        sim.run(3.0);
        sim.kill(node);
        sim.run(3.0);
        sim.start(node);
        sim.run(3.0);
    }
    assert_eq!(
        (sim.holder(), sim.double, sim.nobody),
        (holder, Duration::ZERO, Duration::ZERO)
    );
}

#[test]
fn an_agent_that_starts_anew_within_its_deadline_goes_on_at_once() {
    let mut sim = Sim::started(3, 3);
    sim.run(4.0);
    let holder = sim.holder();
    let epoch = sim.machines[holder].map[&VIP].epoch;
    sim.forget_times();
    sim.kill(holder);
    sim.run(0.3);
    sim.start(holder);
    sim.run(5.0);
    assert_eq!(
        (sim.holder(), sim.double, sim.nobody),
        (holder, Duration::ZERO, Duration::ZERO)
    );
    assert_eq!(sim.machines[holder].map[&VIP].epoch, epoch);
}

#[test]
fn an_agent_that_starts_anew_after_its_deadline_follows() {
    let mut sim = Sim::started(3, 3);
    sim.run(4.0);
    let holder = sim.holder();
    sim.forget_times();
    sim.kill(holder);
    sim.run(2.0);
    let next = sim.holder();
    assert_ne!(next, holder);
    sim.start(holder);
    sim.run(5.0);
    assert_eq!((sim.holder(), sim.double), (next, Duration::ZERO));
    assert!(
        sim.machines[holder].map[&VIP].epoch >= 2,
        "the epoch goes on rising"
    );
}

#[test]
fn a_clock_that_was_set_back_does_not_lock_a_node_out() {
    let mut sim = Sim::started(2, 5);
    sim.run(4.0);
    let follower = 1 - sim.holder();
    sim.kill(follower);
    sim.run(2.0);
    sim.start_as(follower, 5);
    sim.run(3.0);
    for node in 0..2 {
        let view = sim.agent(node).view(sim.now);
        assert!(view.peers[NAMES[1 - node]].live, "as {node} sees it");
    }
}

#[test]
fn a_holder_without_carrier_or_no_candidate_any_more_is_silent_at_once() {
    for carrier in [true, false] {
        let mut sim = Sim::started(3, 11);
        sim.run(4.0);
        let holder = sim.holder();
        sim.forget_times();
        sim.want(holder, |wanted| {
            if carrier {
                wanted.links[0].carrier = false;
            } else {
                wanted.vips.get_mut(&VIP).expect("wanted").candidate = false;
            }
        });
        assert!(sim.answering().is_empty());
        if carrier {
            sim.side = BTreeSet::from([holder]);
        }
        sim.run(3.0);
        assert_ne!(sim.holder(), holder);
        sim.side.clear();
        sim.run(3.0);
        assert_ne!(sim.holder(), holder);
        assert_eq!(sim.double, Duration::ZERO);
    }
}

#[test]
fn a_node_whose_key_comes_later_listens_first() {
    for seed in 0..20 {
        let mut sim = Sim::started(3, seed);
        sim.run(4.0);
        let holder = sim.holder();
        let late = (holder + 1) % 3;
        let keys = std::mem::take(&mut sim.machines[late].wanted.keys);
        sim.kill(late);
        sim.start(late);
        sim.forget_times();
        sim.run(4.0 + seed as f64 * 0.02);
        sim.want(late, |wanted| wanted.keys.clone_from(&keys));
        sim.run(4.0);
        assert_eq!(
            (sim.holder(), sim.double, sim.nobody),
            (holder, Duration::ZERO, Duration::ZERO)
        );
    }
}

#[test]
fn a_planned_stop_hands_over_within_the_time_of_two_datagrams() {
    for seed in 0..20 {
        let mut sim = Sim::started(3, seed);
        sim.run(4.0);
        let holder = sim.holder();
        sim.forget_times();
        let now = sim.now;
        assert!(sim.agent_mut(holder).leave(now));
        sim.act(holder, Todo { say: true });
        while sim.agent(holder).is_yielding() {
            assert!(sim.now - now < Duration::from_secs(1), "nobody takes it");
            sim.step();
        }
        let took = sim.now - now;
        assert!(took <= Duration::from_millis(160), "{took:?}");
        let now = sim.now;
        sim.agent_mut(holder).left(now);
        sim.act(holder, Todo::default());
        assert_ne!(sim.holder(), holder);
        // The next answers before it is known to: never nobody.
        assert_eq!(sim.nobody, Duration::ZERO);
        assert!(sim.double <= Duration::from_millis(100), "{:?}", sim.double);
        sim.kill(holder);
        sim.run(3.0);
        assert_ne!(sim.holder(), holder);
    }
}

#[test]
fn a_planned_stop_without_anybody_to_take_over_leaves_the_vip_answering() {
    let mut sim = Sim::started(2, 1);
    sim.run(4.0);
    let holder = sim.holder();
    sim.kill(1 - holder);
    sim.run(2.0);
    let now = sim.now;
    assert!(!sim.agent_mut(holder).leave(now));
    sim.agent_mut(holder).left(now);
    sim.act(holder, Todo { say: true });
    sim.kill(holder);
    sim.run(110.0);
    assert_eq!(sim.holder(), holder);
    sim.start(holder);
    sim.run(60.0);
    assert_eq!(sim.holder(), holder);
    assert_eq!(sim.agent(holder).view(sim.now).vips[&VIP].epoch, 1);
}

#[test]
fn a_node_alone_answers_for_ever_until_peers_are_configured() {
    let mut sim = Sim::new(2, 1);
    for node in 0..2 {
        sim.machines[node].wanted.addresses = BTreeSet::from([address(node)]);
    }
    sim.start(0);
    sim.step();
    assert_eq!(sim.machines[0].map[&VIP].answer_until, u64::MAX);
    sim.want(0, |wanted| wanted.addresses = BTreeSet::from([address(1)]));
    sim.run(1.0);
    assert_eq!(sim.holder(), 0);
    assert!(sim.machines[0].map[&VIP].answer_until < nanoseconds(sim.now + INTERVAL * 3));
    // The other has not been told of this one, takes itself for alone, and hears better.
    sim.start(1);
    sim.run(3.0);
    assert!(sim.agent(1).view(sim.now).peers["a"].live);
    let holder = sim.holder();
    let view = sim.agent(1).view(sim.now);
    assert_eq!(view.vips[&VIP].holder.as_deref(), Some(NAMES[holder]));
}

#[test]
fn who_is_not_ready_takes_nothing() {
    let mut sim = Sim::new(2, 1);
    sim.machines[0].wanted.ready = false;
    sim.machines[1].wanted.ready = false;
    sim.start(0);
    sim.start(1);
    sim.run(10.0);
    assert!(sim.answering().is_empty());
    sim.want(1, |wanted| wanted.ready = true);
    sim.run(1.0);
    assert_eq!(sim.holder(), 1);
}

#[test]
fn a_machine_with_the_name_of_a_live_one_takes_nothing_from_it() {
    let mut sim = Sim::started(3, 9);
    sim.run(4.0);
    let twin = |sim: &Sim, sequence| {
        let body = Body {
            node: "b".into(),
            incarnation: u64::MAX,
            sequence,
            to: Some(address(0)),
            mac: [2, 0, 0, 0, 0, 99],
            addresses: vec![address(9)],
            heard: BTreeMap::from([("a".into(), sim.agent(0).incarnation())]),
            ..Body::default()
        };
        wire::seal(&sim.agent(0).wanted().keys[0], &body)
    };
    let (before, now) = (sim.agent(0).view(sim.now), sim.now);
    let datagram = twin(&sim, 1);
    sim.agent_mut(0)
        .hear(0, address(0), address(9), &datagram, now);
    let after = sim.agent(0).view(now);
    assert_eq!(after.peers["b"].links, before.peers["b"].links);
    assert!(after.peers["b"].live);
    let note = after.peers["b"].note.as_deref().expect("it is told");
    assert!(note.contains("two machines"), "{note}");

    // Once the first is silent, the name is free.
    sim.kill(1);
    sim.run(2.0);
    let (now, datagram) = (sim.now, twin(&sim, 2));
    sim.agent_mut(0)
        .hear(0, address(0), address(9), &datagram, now);
    let taken = sim.agent(0).view(now);
    assert_eq!(taken.peers["b"].links[&0].addresses, [address(9)]);
}

#[test]
fn forged_replayed_and_cut_datagrams_change_nothing_and_are_counted() {
    let mut sim = Sim::started(3, 9);
    sim.run(4.0);
    let now = sim.now;
    let view = sim.agent(0).view(now);
    let claim = Body {
        node: "b".into(),
        incarnation: u64::MAX,
        sequence: 1,
        to: Some(address(0)),
        addresses: vec![address(1)],
        vips: BTreeMap::from([(VIP, 1000)]),
        heard: BTreeMap::from([("a".into(), sim.agent(0).incarnation())]),
        ..Body::default()
    };
    let forged = wire::seal(&key("of somebody else entirely"), &claim);
    let record: Vec<Vec<u8>> = sim
        .record
        .iter()
        .filter(|(_, to, _)| *to == 0)
        .map(|(.., d)| d.clone())
        .collect();
    let elsewhere: Vec<Vec<u8>> = sim
        .record
        .iter()
        .filter(|(from, to, _)| (*from, *to) == (1, 2))
        .map(|(.., d)| d.clone())
        .collect();
    let before = view.counters;
    let agent = sim.agent_mut(0);
    agent.hear(0, address(0), address(1), &forged, now);
    for datagram in &record {
        for from in 1..3 {
            agent.hear(0, address(0), address(from), datagram, now);
        }
        agent.hear(
            0,
            address(0),
            address(1),
            &datagram[..datagram.len() / 2],
            now,
        );
        agent.hear(0, address(0), address(1), &datagram[..7], now);
    }
    for datagram in &elsewhere {
        agent.hear(0, address(0), address(1), datagram, now);
    }
    let mut after = agent.view(now);
    let counted = after.counters;
    after.counters = before;
    assert_eq!(after, view);
    let records = record.len() as u64;
    assert_eq!(counted.heartbeats_heard, before.heartbeats_heard);
    assert_eq!(
        counted.rejected_forged - before.rejected_forged,
        1 + records
    );
    assert_eq!(
        counted.rejected_replayed - before.rejected_replayed,
        records
    );
    assert_eq!(
        counted.rejected_malformed - before.rejected_malformed,
        2 * records + elsewhere.len() as u64
    );
}

#[test]
fn what_was_said_to_an_earlier_agent_does_not_make_a_peer_live_nor_a_holder() {
    let mut sim = Sim::started(2, 9);
    sim.run(4.0);
    let holder = sim.holder();
    let other = 1 - holder;
    // Everybody stops; then one starts, and somebody repeats what the holder said to it.
    sim.kill(holder);
    sim.kill(other);
    sim.run(5.0);
    sim.start(other);
    let record: Vec<Vec<u8>> = sim
        .record
        .iter()
        .filter(|(_, to, _)| *to == other)
        .map(|(.., d)| d.clone())
        .collect();
    // In the later half it holds the VIP.
    for datagram in record.iter().skip(record.len() / 2) {
        let now = sim.now;
        let todo = sim
            .agent_mut(other)
            .hear(0, address(other), address(holder), datagram, now);
        sim.act(other, todo.unwrap_or_default());
        let view = sim.agent(other).view(now);
        assert!(!view.peers[NAMES[holder]].live);
        sim.run(0.3);
    }
    assert_eq!(sim.holder(), other);
}

#[test]
fn keys_are_exchanged_without_anybody_noticing() {
    let (old, new) = (key("the old key, 16 bytes"), key("the new key, 16 bytes"));
    let mut sim = Sim::started(3, 13);
    sim.run(4.0);
    let holder = sim.holder();
    sim.forget_times();
    for keys in [
        vec![old.clone(), new.clone()],
        vec![new.clone(), old],
        vec![new],
    ] {
        for node in 0..3 {
            sim.want(node, |wanted| wanted.keys.clone_from(&keys));
            sim.run(0.5);
        }
    }
    assert_eq!(
        (sim.holder(), sim.double, sim.nobody),
        (holder, Duration::ZERO, Duration::ZERO)
    );
    assert_eq!(sim.agent(0).view(sim.now).counters.rejected_forged, 0);
}

#[test]
fn another_mac_and_address_of_a_peer_are_followed() {
    let mut sim = Sim::started(2, 17);
    sim.run(2.0);
    sim.want(1, |wanted| wanted.links[0].mac = [2, 0, 0, 0, 9, 9]);
    sim.run(0.7);
    let view = sim.agent(0).view(sim.now);
    assert_eq!(view.peers["b"].links[&0].mac, [2, 0, 0, 0, 9, 9]);
    assert_eq!(view.peers["b"].note, None);
    assert!(view.peers["b"].live);
}

#[test]
fn a_node_that_moves_to_another_address_does_not_take_its_peers_for_silent() {
    for node in 0..3 {
        let mut sim = Sim::new(3, 17);
        let old = IpAddr::from([172, 22, 0, 77]);
        sim.machines[node].wanted.links[0].addresses.push((old, 24));
        for node in 0..3 {
            sim.start(node);
        }
        sim.run(4.0);
        let holder = sim.holder();
        if holder == node {
            continue;
        }
        let nobody = sim.nobody;
        // Its peers send to where it is no more; their files come to know of that later than its own.
        sim.side.insert(node);
        sim.run(0.7);
        sim.want(node, |wanted| wanted.links[0].addresses.truncate(1));
        sim.run(0.6);
        sim.side.clear();
        sim.run(2.0);
        assert_eq!(
            (sim.holder(), sim.double, sim.nobody),
            (holder, Duration::ZERO, nobody)
        );
    }
}

#[test]
fn two_machines_of_one_name_are_spoken_of() {
    let mut sim = Sim::new(3, 17);
    sim.machines[2].wanted.node = "b".into();
    for node in 0..3 {
        sim.start(node);
    }
    sim.run(3.0);
    let note = sim.agent(0).view(sim.now).peers["b"].note.clone();
    assert!(note.is_some_and(|note| note.contains("two machines")));
}

#[test]
fn a_live_peer_whose_probes_do_not_come_back_is_explained() {
    let mut sim = Sim::started(2, 1);
    sim.run(4.0);
    assert_eq!(sim.agent(0).view(sim.now).peers["b"].note, None);
    sim.run(3.0);
    let note = |sim: &Sim| sim.agent(0).view(sim.now).peers["b"].note.clone();
    assert_eq!(note(&sim), None, "it has not been probed");
    let now = sim.now;
    sim.agent_mut(0).probed("b", SILENT, now);
    assert!(note(&sim).is_some_and(|note| note.contains("port security")));
    let now = sim.now;
    sim.agent_mut(0).probed("b", REFLECTS, now);
    assert_eq!(note(&sim), None);
    // Some are lost while its program is replaced.
    sim.agent_mut(0).probed("b", SILENT, now);
    assert_eq!(note(&sim), None);
    sim.run(6.0);
    assert!(note(&sim).is_some(), "a switch began to filter");
}

#[test]
fn a_peer_without_its_agent_leaves_the_tables_unsettled() {
    let mut sim = Sim::started(2, 1);
    sim.run(4.0);
    let now = sim.now;
    sim.agent_mut(0).probed("b", REFLECTS, now);
    assert!(sim.agent(0).view(now).settled);
    sim.kill(1);
    sim.run(2.0);
    assert!(!sim.agent(0).view(sim.now).settled);
    let now = sim.now;
    sim.agent_mut(0).probed("b", SILENT, now);
    assert!(
        sim.agent(0).view(now).settled,
        "a machine that is off has nothing to tell"
    );
}

/// What happens to simulated nodes.
#[derive(Clone, Debug)]
enum Happens {
    Loss(u32),
    Cut(Vec<usize>),
    Heal,
    Pause(usize),
    Continue(usize),
    Stop(usize),
    GoOn(usize),
    Kill(usize),
    Start(usize),
    Carrier(usize, bool),
}

fn happens(connected: bool) -> impl Strategy<Value = Happens> {
    let cuts = prop_oneof![
        (0_usize..3).prop_map(Happens::Stop),
        (0_usize..3).prop_map(Happens::GoOn),
        (0_u32..70).prop_map(Happens::Loss),
        prop::collection::vec(0_usize..3, 1..3).prop_map(Happens::Cut),
        Just(Happens::Heal),
    ];
    let harmless = prop_oneof![
        (0_usize..3).prop_map(Happens::Pause),
        (0_usize..3).prop_map(Happens::Continue),
        (0_usize..3).prop_map(Happens::Kill),
        (0_usize..3).prop_map(Happens::Start),
        (0_usize..3, any::<bool>()).prop_map(|(node, up)| Happens::Carrier(node, up)),
    ];
    if connected {
        harmless.boxed()
    } else {
        prop_oneof![cuts, harmless].boxed()
    }
}

fn happen(sim: &mut Sim, what: &Happens) {
    match what {
        Happens::Loss(loss) => sim.loss = *loss,
        Happens::Cut(side) => sim.side = side.iter().copied().collect(),
        Happens::Heal => {
            sim.side.clear();
            sim.loss = 0;
        }
        Happens::Pause(node) => sim.machines[*node].paused = true,
        Happens::Continue(node) => sim.machines[*node].paused = false,
        Happens::Stop(node) => sim.stop(*node),
        Happens::GoOn(node) => sim.go_on(*node),
        Happens::Kill(node) => sim.kill(*node),
        Happens::Start(node) => {
            if sim.machines[*node].agent.is_none() {
                sim.start(*node);
            }
        }
        Happens::Carrier(node, up) => sim.want(*node, |wanted| wanted.links[0].carrier = *up),
    }
}

fn heal(sim: &mut Sim) {
    happen(sim, &Happens::Heal);
    for node in 0..3 {
        happen(sim, &Happens::Continue(node));
        happen(sim, &Happens::GoOn(node));
        happen(sim, &Happens::Start(node));
        happen(sim, &Happens::Carrier(node, true));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_once_it_is_over_exactly_one_answers(
        seed: u64, story in prop::collection::vec((happens(false), 1_u32..150), 1..15),
    ) {
        let mut sim = Sim::started(3, seed);
        for (what, steps) in story {
            happen(&mut sim, &what);
            for _ in 0..steps {
                sim.step();
            }
        }
        heal(&mut sim);
        sim.run(6.0);
        let holder = sim.holder();
        sim.forget_times();
        sim.run(3.0);
        prop_assert_eq!((sim.holder(), sim.double, sim.nobody), (holder, Duration::ZERO, Duration::ZERO));
        for node in 0..3 {
            let view = sim.agent(node).view(sim.clock(node));
            prop_assert_eq!(view.vips[&VIP].holder.as_deref(), Some(NAMES[holder]));
        }
    }

    #[test]
    fn in_a_connected_network_never_two_answer(
        seed: u64, story in prop::collection::vec((happens(true), 1_u32..150), 1..15),
    ) {
        let mut sim = Sim::started(3, seed);
        for (what, steps) in story {
            happen(&mut sim, &what);
            for _ in 0..steps {
                sim.step();
                prop_assert!(sim.answering().len() < 2, "{:?} at {:?}", sim.answering(), sim.now);
            }
        }
    }
}
