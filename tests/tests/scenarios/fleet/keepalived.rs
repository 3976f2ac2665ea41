//! Beside keepalived: it announces the VIP, ironlb balances it and hands on to the pods of all nodes.

use std::collections::BTreeSet;
use std::time::Duration;

use ironlb_tests::{API_PORT, Fleet, Neighbour, Prober, VIP, start_keepalived, wait_until};
use serde_json::json;

use crate::scene::{Mode, fleet_lab};

const NODES: usize = 2;
const PATIENCE: Duration = Duration::from_secs(15);
/// keepalived takes a silent master for dead after three advertisements and a part of a second.
const TAKEOVER: Duration = Duration::from_secs(5);

#[test]
fn keepalived_announces_and_pods_of_all_nodes_serve_before_and_after_its_failover() {
    let lab = fleet_lab(Mode::Tc, NODES);
    let mut config = lab.config_elected("tc").expect("configuration");
    config["vips"] = json!([{"address": VIP, "announce": "external"}]);
    let mut fleet = Fleet::prepare(lab, &config).expect("configurations");
    fleet.launch_all().expect("agents");
    let directory = fleet.lab.directory();
    let start = |node: usize, priority| {
        start_keepalived(&fleet.lab.nodes[node], &directory, priority).expect("keepalived")
    };
    let mut first = start(0, 200);
    let _second = start(1, 100);
    let holder = fleet.wait_for_holder(PATIENCE).expect("a master");
    assert_eq!(holder, 0, "the one with the higher priority");
    every_pod_answers(&fleet);

    let host = &fleet.lab.hosts[0].namespace;
    let prober = Prober::start(host, (VIP, API_PORT), "/", Neighbour::Cold);
    std::thread::sleep(Duration::from_secs(1));
    // Its child takes the address away.
    first.kill().expect("kill");
    let successor = fleet.wait_for_successor(0, PATIENCE).expect("a master");
    assert_eq!(successor, 1);
    std::thread::sleep(Duration::from_secs(1));
    let attempts = prober.finish().expect("connections");
    let failed = attempts.iter().filter(|attempt| attempt.failure.is_some());
    let dark = Prober::PERIOD * failed.count() as u32;
    println!("keepalived's own failover kept new connections waiting for {dark:?}");
    assert!(dark < TAKEOVER, "{dark:?}");
    assert!(attempts.last().is_some_and(|last| last.failure.is_none()));
    every_pod_answers(&fleet);
}

/// A pod of each node answers within some connections to the port of all.
fn every_pod_answers(fleet: &Fleet) {
    let pods = fleet.lab.nodes.iter().flat_map(|node| &node.pods);
    let pods: BTreeSet<String> = pods.map(|pod| pod.instance.clone()).collect();
    let url = format!("http://{VIP}:{API_PORT}/v1");
    let mut answered = BTreeSet::new();
    wait_until("pods of all nodes answer", PATIENCE, || {
        let answer = fleet.lab.hosts[0].namespace.exec([
            "curl",
            "--silent",
            "--show-error",
            "--max-time",
            "5",
            &url,
        ])?;
        let answer: serde_json::Value = serde_json::from_str(&answer)?;
        answered.extend(answer["instance"].as_str().map(str::to_owned));
        Ok(answered == pods)
    })
    .expect("all of them");
}
