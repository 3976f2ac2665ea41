//! The node that announces the VIP goes away, in every way that it can: others take over, and no download breaks.

use std::time::{Duration, Instant};

use ironlb_tests::{Download, Outcome, VIP, backends};

use crate::scene::{Clients, Mode, RECOVERY, fleet, in_both_modes};

in_both_modes!(
    a_planned_stop_of_the_holder_is_not_noticed,
    new_connections_soon_work_after_the_holders_agent_crashes,
);

const NODES: usize = 3;
/// Within which a successor must be found; how fast is asserted by what clients see.
const SUCCESSION: Duration = Duration::from_secs(5);
/// Long enough to see whether it stays as it is.
const CALM: Duration = Duration::from_millis(1500);

fn a_planned_stop_of_the_holder_is_not_noticed(mode: Mode) {
    let (mut fleet, holder) = fleet(mode, NODES);
    let clients = Clients::start(&fleet, |_| true);
    fleet.stop(holder).expect("stop");
    let successor = fleet.wait_for_successor(holder, SUCCESSION).expect("ARP");
    fleet.launch(holder).expect("agent");
    std::thread::sleep(CALM);
    let seen = clients.finish();
    seen.assert_all_served();
    let took = seen.change(&fleet, holder, successor);
    assert!(took < Duration::from_millis(200), "{took:?}");
}

fn new_connections_soon_work_after_the_holders_agent_crashes(mode: Mode) {
    let (mut fleet, holder) = fleet(mode, NODES);
    let clients = Clients::start(&fleet, |_| true);
    let crash = Instant::now();
    fleet.kill(holder).expect("kill");
    let successor = fleet.wait_for_successor(holder, SUCCESSION).expect("ARP");
    std::thread::sleep(CALM);
    // The one that comes back is one of the others then.
    fleet.launch(holder).expect("agent");
    std::thread::sleep(CALM);
    let seen = clients.finish();
    seen.assert_served_again(crash, RECOVERY);
    seen.handover(&fleet, holder, successor);
}

#[test]
fn a_holder_that_hangs_falls_silent_before_another_answers_and_stays_so() {
    let (mut fleet, holder) = fleet(Mode::Tc, NODES);
    let clients = Clients::start(&fleet, |_| true);
    let hang = Instant::now();
    fleet.hang(holder).expect("hang");
    let successor = fleet.wait_for_successor(holder, SUCCESSION).expect("ARP");
    std::thread::sleep(CALM);
    fleet.resume(holder).expect("resume");
    std::thread::sleep(CALM);
    let answering = fleet.answering().expect("ARP");
    assert_eq!(answering.into_iter().collect::<Vec<_>>(), [successor]);
    let seen = clients.finish();
    seen.assert_served_again(hang, RECOVERY);
    seen.handover(&fleet, holder, successor);
}

/// Downloads from the pods behind the cable wait for it and go on.
#[test]
fn a_pulled_cable_of_the_holder_breaks_no_download() {
    let (mut fleet, holder) = fleet(Mode::Tc, NODES);
    let clients = Clients::start(&fleet, |_| true);
    let port = fleet.lab.nodes[holder].name.clone();
    let pulled = Instant::now();
    fleet.lab.unplug(&port).expect("unplug");
    let successor = fleet.wait_for_successor(holder, SUCCESSION).expect("ARP");
    std::thread::sleep(CALM);
    fleet.lab.plug(&port).expect("plug");
    std::thread::sleep(CALM);
    let running = fleet
        .agent(holder)
        .and_then(|agent| agent.process.running());
    assert!(running.expect("agent"), "the agent did not outlive it");
    let seen = clients.finish();
    seen.assert_served_again(pulled, RECOVERY);
    seen.handover(&fleet, holder, successor);
}

#[test]
fn downloads_from_other_nodes_outlive_the_holders_node() {
    let (mut fleet, holder) = fleet(Mode::Tc, NODES);
    let lost = fleet.lab.nodes[holder].pods[0].instance.clone();
    let clients = Clients::start(&fleet, |pod| pod.instance != lost);
    let death = Instant::now();
    fleet.kill_node(holder).expect("node");
    let successor = fleet.wait_for_successor(holder, SUCCESSION).expect("ARP");
    std::thread::sleep(
        (death + Duration::from_millis(6200)).saturating_duration_since(Instant::now()),
    );
    let seen = clients.finish();
    seen.assert_served_again(death, RECOVERY);
    seen.handover(&fleet, holder, successor);
}

/// They hang as long as the pod may come back; their clients say nothing that could be refused.
#[test]
fn downloads_of_a_dead_node_end_when_its_pods_are_taken_out() {
    let (mut fleet, holder) = fleet(Mode::Tc, NODES);
    let dead = (holder + 1) % NODES;
    let (port, instance) = {
        let pod = &fleet.lab.nodes[dead].pods[0];
        (pod.instance_port(), pod.instance.clone())
    };
    let url = format!("http://{VIP}:{port}/images/common.img?rate=1m");
    let client = &fleet.lab.hosts[0].namespace;
    let limit = Duration::from_secs(60);
    let mut download = Download::start(client, &url, &[], limit).expect("curl");
    std::thread::sleep(CALM);
    fleet.kill_node(dead).expect("node");
    std::thread::sleep(CALM);
    assert!(download.running().expect("curl"), "it may come back");
    let mut config = fleet
        .lab
        .config_elected(Mode::Tc.name())
        .expect("configuration");
    backends(&mut config).retain(|backend| backend["instance"] != *instance);
    let removed = Instant::now();
    fleet.reconfigure(&config).expect("configuration");
    let end = download.end(&fleet.lab.image.sha256).expect("curl");
    assert_eq!(end.outcome, Outcome::Reset, "{}", end.said);
    assert!(removed.elapsed() < SUCCESSION, "{:?}", removed.elapsed());
}

const DEAD: Duration = Duration::from_secs(60);

/// It is no holder: only new flows to its pods could notice.
#[test]
fn pods_of_another_node_are_served_while_its_agent_is_dead() {
    let (mut fleet, holder) = fleet(Mode::Tc, NODES);
    let other = (holder + 1) % NODES;
    let client = fleet.lab.hosts[1].namespace.clone();
    let pod = &fleet.lab.nodes[other].pods[0];
    let target = (VIP, pod.instance_port());
    let cold = ironlb_tests::Neighbour::Cold;
    let prober = ironlb_tests::Prober::start(&client, target, &pod.own_path(), cold);
    let clients = Clients::start(&fleet, |_| true);
    fleet.kill(other).expect("kill");
    let death = Instant::now();
    std::thread::sleep(Duration::from_secs(3));
    let seen = clients.finish();
    seen.assert_all_served();
    seen.assert_one_holder(&fleet, holder);
    // Longer than anything that the dead agent wrote or promised lasts.
    std::thread::sleep(DEAD.saturating_sub(death.elapsed()));
    fleet.launch(other).expect("agent");
    std::thread::sleep(CALM);
    crate::scene::assert_served(&prober.finish().expect("connections"));
}
