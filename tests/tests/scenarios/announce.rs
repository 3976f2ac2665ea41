//! Who answers ARP questions for the VIP, and when nobody does.

use std::time::Duration;

use ironlb_tests::{API_PORT, VIP, Wire};
use lb_common::verdict::Verdict;
use serde_json::json;

use crate::scene::{Mode, Scene, get, in_both_modes};

in_both_modes!(
    arp_is_answered_until_the_deadline_and_consumed_after,
    arp_for_an_external_vip_is_left_to_its_owner,
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
