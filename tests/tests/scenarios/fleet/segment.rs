//! What changes on the provisioning segment itself: MACs, addresses, interfaces, and a switch that filters.

use std::time::{Duration, Instant};

use ironlb_tests::{API_PORT, Fleet, Neighbour, Prober, VIP, backends, wait_until};
use serde_json::{Value, json};

use crate::scene::{Clients, Mode, RECOVERY, fleet};

const NODES: usize = 3;
/// Within which a new interface serves: its programs have to be loaded, on a busy machine.
const REPLACED: Duration = Duration::from_secs(4);
/// Within which a filter is spoken of: some probes may be lost without one.
const SAID: Duration = Duration::from_secs(10);
/// How long it is watched after that.
const WATCHED: Duration = Duration::from_secs(3);

/// Lets something happen to a node that does not announce the VIP, while clients download from all pods and connect:
/// no download may break, and connections succeed again soon, those to the node's own pod too.
fn survives(limit: Duration, happens: impl FnOnce(&mut Fleet, usize)) {
    let (mut fleet, holder) = fleet(Mode::Tc, NODES);
    let other = (holder + 1) % NODES;
    let pod = &fleet.lab.nodes[other].pods[0];
    let target = (VIP, pod.instance_port());
    let client = fleet.lab.hosts[1].namespace.clone();
    let own = Prober::start(&client, target, &pod.own_path(), Neighbour::Cold);
    let clients = Clients::start(&fleet, |_| true);
    let begin = Instant::now();
    happens(&mut fleet, other);
    let took = begin.elapsed();
    std::thread::sleep(limit + WATCHED);
    let own = own.finish().expect("connections");
    let seen = clients.finish();
    seen.assert_served_again(begin, took + limit);
    let late = own
        .iter()
        .find(|attempt| attempt.failure.is_some() && attempt.at > begin + took + limit);
    assert!(late.is_none(), "{late:?}");
    seen.assert_one_holder(&fleet, holder);
}

#[test]
fn a_node_that_gets_another_mac_is_followed() {
    survives(RECOVERY, |fleet, node| {
        let node = &fleet.lab.nodes[node].namespace;
        node.ip("link set eth1 address 02:00:00:00:77:01")
            .expect("MAC");
    });
}

#[test]
fn the_holder_announces_the_vip_anew_when_it_gets_another_mac() {
    const MAC: [u8; 6] = [2, 0, 0, 0, 0x77, 2];
    let (fleet, holder) = fleet(Mode::Tc, NODES);
    let client = &fleet.lab.hosts[0].namespace;
    // It knows the VIP's MAC and asks for it no more.
    let prober = Prober::start(client, (VIP, API_PORT), "/", Neighbour::Warm);
    std::thread::sleep(Duration::from_millis(500));
    let changed = Instant::now();
    let node = &fleet.lab.nodes[holder].namespace;
    node.ip("link set eth1 address 02:00:00:00:77:02")
        .expect("MAC");
    std::thread::sleep(RECOVERY + WATCHED);
    let attempts = prober.finish().expect("connections");
    let mut late = attempts
        .iter()
        .filter(|attempt| attempt.at > changed + RECOVERY);
    let failed = late.find(|attempt| attempt.failure.is_some());
    assert!(failed.is_none(), "{failed:?}");
    assert_eq!(fleet.lab.nodes[holder].mac().expect("MAC"), MAC);
}

#[test]
fn a_node_that_gets_another_address_is_followed() {
    survives(RECOVERY, |fleet, node| {
        let mut config = fleet
            .lab
            .config_elected(Mode::Tc.name())
            .expect("configuration");
        let node = &fleet.lab.nodes[node];
        let (old, new) = (node.address, "172.22.0.77");
        let moved = |address: &mut Value| {
            if *address == json!(old) {
                *address = json!(new);
            }
        };
        let nodes = config["peers"]["nodes"].as_array_mut().expect("nodes");
        nodes.iter_mut().for_each(moved);
        for backend in backends(&mut config) {
            moved(&mut backend["node"]);
        }
        let address = format!("addr add {new}/24 dev eth1\naddr del {old}/24 dev eth1");
        // As the last of several it would go with the first.
        let promote = "net.ipv4.conf.eth1.promote_secondaries";
        node.namespace.sysctl(promote, "1").expect("sysctl");
        node.namespace.ip(&address).expect("address");
        fleet.reconfigure(&config).expect("configuration");
    });
}

#[test]
fn a_node_whose_interface_is_replaced_is_followed() {
    survives(REPLACED, |fleet, node| {
        fleet.lab.replace_uplink(node).expect("interface")
    });
}

#[test]
fn pods_behind_a_switch_port_that_filters_sources_are_not_used_and_that_is_said() {
    let (mut fleet, holder) = fleet(Mode::Tc, NODES);
    let other = (holder + 1) % NODES;
    let node = &fleet.lab.nodes[other];
    // Port security: only the node's own address may come from there.
    let rules = format!(
        "add table bridge guard; \
         add chain bridge guard forward {{ type filter hook forward priority 0; }}; \
         add rule bridge guard forward iifname {} ip saddr != {} drop",
        node.name, node.address
    );
    let nft = fleet.lab.switch.exec(["nft", &rules]);
    nft.expect("nft's bridge family");
    let said = wait_until("the holder says so", SAID, || {
        Ok(fleet
            .agent(holder)?
            .process
            .log()?
            .contains("port security"))
    });
    said.expect("log");
    let client = &fleet.lab.hosts[0].namespace;
    let prober = Prober::start(client, (VIP, API_PORT), "/", Neighbour::Cold);
    std::thread::sleep(WATCHED);
    crate::scene::assert_served(&prober.finish().expect("connections"));
}
