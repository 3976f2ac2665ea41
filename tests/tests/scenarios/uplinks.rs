//! A node with a port on each of two networks: hosts on one, their BMCs on the other.

use std::net::Ipv4Addr;
use std::time::Duration;

use ironlb_tests::{
    API_PORT, Agent, Capture, Download, Host, IMAGE_PORT, Namespace, RPC_PORT, VIP, wait_until,
};
use serde_json::json;

use crate::scene::{Mode, Scene, connect, get, in_both_modes};

in_both_modes!(
    vips_on_two_networks_lead_to_the_same_pods_and_do_not_need_each_other,
    a_reply_leaves_by_the_port_on_which_its_client_arrives_whatever_routes_say,
);

/// On the BMCs' network.
const VIP2: Ipv4Addr = Ipv4Addr::new(172, 25, 0, 2);
const PACED: &str = "/images/common.img?rate=4m";

/// A scene with a second uplink, and the host on its network.
fn scene(mode: Mode) -> (Scene, Host) {
    let lab = mode.builder().image_mib(24).build().expect("laboratory");
    let bmc = lab.second_network().expect("network");
    let mut config = lab.config(mode.name());
    let push = |list: &mut serde_json::Value, item| list.as_array_mut().expect("a list").push(item);
    let uplink = json!({"subnet": "172.25.0.0/24", "mode": mode.name(), "bypass": "drop"});
    push(&mut config["uplinks"], uplink);
    push(
        &mut config["vips"],
        json!({"address": VIP2, "announce": "always"}),
    );
    let mut second = config["services"][0].clone();
    second["name"] = json!("ironic-bmc");
    second["vip"] = json!(VIP2);
    push(&mut config["services"], second);
    let agent = Agent::start(&lab.nodes[0], &config).expect("agent");
    (Scene { agent, config, lab }, bmc)
}

fn download(client: &Namespace, vip: Ipv4Addr, options: &[&str]) -> Download {
    let url = format!("http://{vip}:{IMAGE_PORT}{PACED}");
    Download::start(client, &url, options, Duration::from_secs(60)).expect("curl")
}

fn vips_on_two_networks_lead_to_the_same_pods_and_do_not_need_each_other(mode: Mode) {
    let (scene, bmc) = scene(mode);
    let ends = [(&scene.host().namespace, VIP), (&bmc.namespace, VIP2)];
    let serves = |(client, vip): (&Namespace, Ipv4Addr)| {
        for pod in &scene.node().pods {
            let file = get(client, vip, pod.instance_port(), &pod.own_path());
            let file = file.unwrap_or_else(|error| panic!("{vip}: {error:#}"));
            assert_eq!(file, format!("boot image of {}\n", pod.instance));
        }
        let refused = connect(client, vip, RPC_PORT, Duration::from_secs(2));
        let kind = refused.expect_err("JSON-RPC answers").kind();
        assert_eq!(kind, std::io::ErrorKind::ConnectionRefused, "{vip}");
    };
    ends.into_iter().for_each(serves);

    let port = scene.node().name.clone();
    let downloads = ends.map(|(client, vip)| download(client, vip, &[]));
    std::thread::sleep(Duration::from_millis(500));
    scene.lab.unplug(&port).expect("unplug");
    let (client, vip) = ends[0];
    let limit = Duration::from_millis(500);
    connect(client, vip, API_PORT, limit).expect_err("it has no cable");
    serves(ends[1]);
    scene.lab.plug(&port).expect("plug");
    let again = || Ok(get(client, vip, API_PORT, "/").is_ok());
    wait_until(
        "the first network serves again",
        Duration::from_secs(10),
        again,
    )
    .expect("served");
    ends.into_iter().for_each(serves);
    for download in downloads {
        download.finish(&scene.lab.image.sha256).expect("download");
    }
}

/// A BMC behind a router that the node knows no way to, or a wrong one.
fn a_reply_leaves_by_the_port_on_which_its_client_arrives_whatever_routes_say(mode: Mode) {
    const FAR: &str = "198.51.100.50";
    let (scene, bmc) = scene(mode);
    let far = format!("addr add {FAR}/32 dev lo");
    bmc.namespace.ip(&far).expect("address");
    let wrong = format!("route add {FAR}/32 via {}", scene.host().address);
    scene.node().namespace.ip(&wrong).expect("route");
    // The wrong way would lead to the first host.
    let filter = format!("host {FAR}");
    let wire = Capture::start(&scene.host().namespace, "eth0", &filter).expect("capture");
    let download = download(&bmc.namespace, VIP2, &["--interface", FAR]);
    download.finish(&scene.lab.image.sha256).expect("download");
    let strayed = wire.finish().expect("capture");
    assert!(strayed.is_empty(), "{strayed:#?}");
}
