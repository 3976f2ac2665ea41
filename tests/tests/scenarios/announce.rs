//! Who answers ARP questions for the VIP, and when nobody does.

use std::time::Duration;

use ironlb_tests::{API_PORT, Agent, Capture, Namespace, VIP, VIP6, Wire, wait_until};
use lb_common::verdict::Verdict;
use serde_json::json;

use crate::scene::{Mode, Scene, get, in_both_modes};

in_both_modes!(
    arp_is_answered_until_the_deadline_and_consumed_after,
    arp_for_an_external_vip_is_left_to_its_owner,
    a_gain_and_a_carrier_that_comes_back_are_announced_by_the_uplink_alone,
    a_vip_that_was_taken_away_while_no_agent_ran_is_silent_soon_after_its_start,
);

const LIMIT: Duration = Duration::from_millis(500);

fn arp_is_answered_until_the_deadline_and_consumed_after(mode: Mode) {
    let scene = Scene::new(mode);
    // Here a kernel that sees the question would answer it: the address is local.
    let add = format!("addr add {VIP}/32 dev lo");
    scene.node().namespace.ip(&add).expect("address");
    let (host, node) = (scene.host(), scene.node());
    let wire = Wire::open(&host.namespace, "eth0").expect("wire");
    let (_, mac) = node.namespace.interface("eth1").expect("eth1");
    let ask = |vlan| wire.resolve(host.address, VIP, vlan, LIMIT).expect("ARP");

    let answered = scene.count(Verdict::ArpAnswered);
    assert_eq!(ask(None), Some(mac));
    assert_eq!(scene.count(Verdict::ArpAnswered), answered + 1);
    // The node's own address is the kernel's to answer.
    let own = wire
        .resolve(host.address, node.address, None, LIMIT)
        .expect("ARP");
    assert_eq!(own, Some(mac));
    assert_eq!(scene.count(Verdict::ArpAnswered), answered + 1);
    // In another VLAN the address is somebody else's.
    let other = scene.count(Verdict::PassedOtherVlan);
    assert_eq!(ask(Some(7)), None);
    assert_eq!(scene.count(Verdict::PassedOtherVlan), other + 1);

    let silent = scene.count(Verdict::DroppedArpSilent);
    scene.maps().set_answer_until(VIP, 1).expect("deadline");
    assert_eq!(ask(None), None, "somebody answers past the deadline");
    assert_eq!(scene.count(Verdict::DroppedArpSilent), silent + 1);
    scene
        .maps()
        .set_answer_until(VIP, u64::MAX)
        .expect("deadline");
    assert_eq!(ask(None), Some(mac));
}

fn arp_for_an_external_vip_is_left_to_its_owner(mode: Mode) {
    let scene = Scene::with(mode, mode.builder(), |config| {
        config["vips"][0]["announce"] = json!("external");
    });
    let host = scene.host();
    let wire = Wire::open(&host.namespace, "eth0").expect("wire");
    let ask = || wire.resolve(host.address, VIP, None, LIMIT).expect("ARP");
    assert_eq!(ask(), None, "nobody owns the VIP yet");

    let add = format!("addr add {VIP}/32 dev eth1");
    scene.node().namespace.ip(&add).expect("address");
    let (_, mac) = scene.node().namespace.interface("eth1").expect("eth1");
    assert_eq!(ask(), Some(mac));
    assert_eq!(scene.count(Verdict::ArpAnswered), 0);
    get(&host.namespace, VIP, API_PORT, "/").expect("its ports are balanced all the same");
}

/// Gratuitous ARP and unsolicited neighbor advertisements, each in a burst of five.
fn a_gain_and_a_carrier_that_comes_back_are_announced_by_the_uplink_alone(mode: Mode) {
    /// What is sent in the first second; a port that has just come up may lose the first of it.
    const BURST: usize = 4;
    const SECOND: Duration = Duration::from_millis(1500);
    let lab = mode.builder().build().expect("laboratory");
    let mut config = lab.config(mode.name());
    lab.with_ipv6(&mut config);
    let node = &lab.nodes[0].namespace;
    // The address that an announcer of another kind would speak for.
    node.ip(&format!("addr add {VIP}/32 dev lo"))
        .expect("address");
    // To all nodes: an answer goes to who asked.
    let filter = format!(
        "(arp and src host {VIP} and dst host {VIP}) or (icmp6 and dst host ff02::1 and ip6[40] == 136)"
    );
    let watch =
        |namespace: &Namespace, link| Capture::start(namespace, link, &filter).expect("tcpdump");
    let assert_burst = |wire: Capture| {
        let frames = wire.finish().expect("capture");
        for vip in [VIP.to_string(), VIP6.to_string()] {
            let told = frames.iter().filter(|frame| frame.contains(&vip)).count();
            assert!(told >= BURST, "{vip}: {frames:#?}");
        }
    };
    let elsewhere = ["lo", "pod0"].map(|link| watch(node, link));
    let wire = watch(&lab.hosts[0].namespace, "eth0");
    let _agent = Agent::start(&lab.nodes[0], &config).expect("agent");
    std::thread::sleep(SECOND);
    assert_burst(wire);

    lab.unplug("node0").expect("unplug");
    std::thread::sleep(SECOND);
    let wire = watch(&lab.hosts[0].namespace, "eth0");
    lab.plug("node0").expect("plug");
    std::thread::sleep(2 * SECOND);
    assert_burst(wire);
    for wire in elsewhere {
        let frames = wire.finish().expect("capture");
        assert!(frames.is_empty(), "{frames:#?}");
    }
}

/// As it may be after a crash: what the agent had written goes with its next start, and no device ever had it.
fn a_vip_that_was_taken_away_while_no_agent_ran_is_silent_soon_after_its_start(mode: Mode) {
    let other = std::net::Ipv4Addr::new(172, 22, 0, 3);
    let mut scene = Scene::new(mode);
    let host = scene.host();
    let (wire, own) = (
        Wire::open(&host.namespace, "eth0").expect("wire"),
        host.address,
    );
    let (_, mac) = scene.node().namespace.interface("eth1").expect("eth1");
    let ask = |vip| wire.resolve(own, vip, None, LIMIT).expect("ARP");
    scene.agent.process.kill().expect("kill");
    let on_devices = scene.node().namespace.exec(["ip", "-o", "address"]);
    assert!(!on_devices.expect("ip").contains(&VIP.to_string()));

    scene.config["vips"][0]["address"] = json!(other);
    scene.config["services"][0]["vip"] = json!(other);
    scene.agent = Agent::start(scene.node(), &scene.config).expect("agent");
    assert_eq!(ask(other), Some(mac));
    // What leaves is given two seconds.
    let is_silent = || Ok(ask(VIP).is_none());
    wait_until("nobody answers for it", 10 * LIMIT, is_silent).expect("silence");
    get(&scene.host().namespace, other, API_PORT, "/").expect("answer");
}
