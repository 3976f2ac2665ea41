//! Agents among themselves: the election when they start, part and meet again, and when others pretend.

use std::io::Write as _;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use etherparse::{SlicedPacket, TransportSlice};
use ironlb_tests::{API_PORT, ArpWatch, Fleet, Neighbour, Prober, VIP, Wire, wait_until};

use crate::scene::{
    Clients, Mode, RECOVERY, assert_one_holder, assert_served, connect, fleet, fleet_lab,
};

/// Where agents hear heartbeats.
const HEARTBEATS: u16 = 9470;

#[test]
fn nodes_that_start_together_have_one_holder_from_the_first_answer_on() {
    let lab = fleet_lab(Mode::Tc, 3);
    let config = lab.config_elected(Mode::Tc.name()).expect("configuration");
    let mut fleet = Fleet::prepare(lab, &config).expect("configurations");
    let arp = ArpWatch::start(&fleet.lab.hosts[0], VIP).expect("ARP");
    fleet.launch_all().expect("agents");
    let holder = fleet.wait_for_holder(Fleet::PATIENCE).expect("ARP");
    std::thread::sleep(Duration::from_secs(3));
    assert_one_holder(&fleet, &arp.finish().expect("ARP"), holder);
}

#[test]
fn a_node_alone_keeps_the_vip_answering_through_a_restart_of_its_agent() {
    let (mut fleet, holder) = fleet(Mode::Tc, 1);
    let clients = Clients::start(&fleet, |_| true);
    fleet.stop(holder).expect("stop");
    fleet.launch(holder).expect("agent");
    std::thread::sleep(RECOVERY);
    let seen = clients.finish();
    seen.assert_all_served();
    seen.assert_one_holder(&fleet, holder);
}

#[test]
fn two_nodes_that_lost_sight_of_each_other_both_answer_until_they_meet_again() {
    let (fleet, _) = fleet(Mode::Tc, 2);
    let clients = Clients::start(&fleet, |_| true);
    let cut_off = |on| {
        for node in &fleet.lab.nodes {
            fleet.lab.cut_off(node, on).expect("port");
        }
    };
    cut_off(true);
    wait_until("both answer", Duration::from_secs(5), || {
        Ok(fleet.answering()?.len() == 2)
    })
    .expect("ARP");
    cut_off(false);
    let holder = fleet.wait_for_holder(Duration::from_secs(5)).expect("ARP");
    let met = Instant::now();
    std::thread::sleep(Duration::from_secs(2));
    let seen = clients.finish();
    let after: Vec<_> = seen
        .answers
        .iter()
        .filter(|answer| answer.at > met)
        .copied()
        .collect();
    assert_one_holder(&fleet, &after, holder);
    // At any time somebody answers.
    let gaps = seen.answers.windows(2).map(|pair| pair[1].at - pair[0].at);
    let gap = gaps.max().expect("answers");
    assert!(gap < RECOVERY, "nobody answered for {gap:?}");
    // The holder could not hand on what it had for the other's pod.
    for attempts in [&seen.warm, &seen.cold] {
        let later = attempts
            .iter()
            .filter(|attempt| attempt.at > met + RECOVERY / 2);
        assert_served(&later.cloned().collect::<Vec<_>>());
    }
}

#[test]
fn a_restart_of_another_agent_leaves_the_holder_alone() {
    let (mut fleet, holder) = fleet(Mode::Tc, 3);
    let other = (holder + 1) % 3;
    let clients = Clients::start(&fleet, |_| true);
    fleet.stop(other).expect("stop");
    fleet.launch(other).expect("agent");
    fleet.kill(other).expect("kill");
    fleet.launch(other).expect("agent");
    std::thread::sleep(RECOVERY);
    let seen = clients.finish();
    // It remembers its peers: not for a moment did it take their pods out of its maps.
    let log = fleet.agent(other).expect("agent").process.log();
    let log = log.expect("log");
    assert!(!log.contains("is not used"), "{log}");
    seen.assert_all_served();
    seen.assert_one_holder(&fleet, holder);
}

#[test]
fn forged_and_replayed_heartbeats_change_nothing() {
    let (mut fleet, holder) = fleet(Mode::Tc, 3);
    let host = &fleet.lab.hosts[0];
    let recorded = record(&fleet, holder, Duration::from_millis(1500));
    assert!(recorded.len() >= 3, "only {} heartbeats", recorded.len());

    let arp = ArpWatch::start(&fleet.lab.hosts[1], VIP).expect("ARP");
    let client = &fleet.lab.bmc.namespace;
    let prober = Prober::start(client, (VIP, API_PORT), "/", Neighbour::Cold);
    let wire = Wire::open(&host.namespace, "eth0").expect("wire");
    let replay = || {
        for frame in &recorded {
            wire.send(frame).expect("frame");
        }
    };
    let socket = host.namespace.enter(|| UdpSocket::bind("0.0.0.0:0"));
    let socket = socket.expect("namespace").expect("socket");
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        for node in &fleet.lab.nodes {
            // The node may say that nobody hears it.
            let _ = socket.send_to(&noise.bytes(1400), (node.address, HEARTBEATS));
        }
        replay();
        std::thread::sleep(Duration::from_millis(10));
    }
    for node in &fleet.lab.nodes {
        let limit = Duration::from_millis(500);
        if let Ok(mut stream) = connect(&host.namespace, node.address, HEARTBEATS, limit) {
            // It may close at the first byte.
            let _ = stream.write_all(&noise.bytes(1400));
        }
    }
    std::thread::sleep(RECOVERY);
    assert_one_holder(&fleet, &arp.finish().expect("ARP"), holder);
    assert_served(&prober.finish().expect("connections"));

    // What a dead holder once said does not keep it alive.
    let arp = ArpWatch::start(&fleet.lab.hosts[1], VIP).expect("ARP");
    let mac = wire.mac();
    fleet.kill(holder).expect("kill");
    let crash = Instant::now();
    while crash.elapsed() < 2 * RECOVERY {
        for frame in &recorded {
            assert_eq!(frame[6..12], mac);
            wire.send(frame).expect("frame");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let successor = fleet
        .wait_for_successor(holder, Duration::ZERO)
        .expect("ARP");
    let turns = ironlb_tests::turns(&arp.finish().expect("ARP"));
    let macs: Vec<_> = turns.iter().map(|turn| turn.mac).collect();
    let expected = [holder, successor].map(|node| fleet.mac(node));
    // It may have fallen silent before the first question.
    assert!(expected.ends_with(&macs), "{turns:#?}");
    let dark = turns.last().expect("answers").first - crash;
    assert!(dark < RECOVERY, "{dark:?}");
}

/// What the peers and `holder` say to each other in `limit`, as frames that come from the first host: the
/// switch would send a node's own packets there if it saw its MAC.
fn record(fleet: &Fleet, holder: usize, limit: Duration) -> Vec<Vec<u8>> {
    let port = &fleet.lab.nodes[holder].name;
    let wire = Wire::open(&fleet.lab.switch, port).expect("wire");
    let own = Wire::open(&fleet.lab.hosts[0].namespace, "eth0").expect("wire");
    let mut frames = Vec::new();
    wire.receive(limit, |frame| {
        let packet = SlicedPacket::from_ethernet(frame).ok()?;
        let Some(TransportSlice::Udp(datagram)) = packet.transport else {
            return None;
        };
        if datagram.destination_port() == HEARTBEATS {
            let mut frame = frame.to_vec();
            frame[6..12].copy_from_slice(&own.mac());
            // On a veth it is unfinished; 0 is none (RFC 768), else the receiver's kernel would drop it.
            let udp = 14 + usize::from(frame[14] & 0xf) * 4;
            frame[udp + 6..udp + 8].fill(0);
            frames.push(frame);
        }
        None::<()>
    })
    .expect("frames");
    frames
}

/// Random enough bytes: xorshift64.
struct Noise(u64);

impl Noise {
    fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Fewer than `limit` of them.
    fn bytes(&mut self, limit: u64) -> Vec<u8> {
        let length = self.word() % limit;
        (0..length).map(|_| self.word() as u8).collect()
    }
}
