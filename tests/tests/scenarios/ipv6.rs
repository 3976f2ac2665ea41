//! The same over IPv6, beside IPv4: services of both, neighbor discovery, several nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use ironlb_tests::{
    API_PORT, Agent, Builder, Capture, Download, Fleet, IMAGE_PORT, Laboratory, Namespace, Outcome,
    RPC_PORT, VIP, VIP6, wait_until,
};
use serde_json::{Value, json};

use crate::doctor::Diagnosis;
use crate::scene::{Mode, RECOVERY, Scene, get, in_both_modes};

in_both_modes!(
    both_versions_are_served_by_all_pods_and_show_the_clients_address,
    an_address_that_comes_later_brings_its_vip,
    an_instance_port_of_either_version_reaches_its_instance,
    ports_that_nobody_serves_are_refused_over_ipv6,
    a_download_over_ipv6_outlives_the_agent,
    a_download_whose_packets_are_longer_than_their_headers_can_say_arrives_unharmed,
    a_host_that_tries_the_vip_as_its_own_address_is_told,
    pods_of_every_node_serve_over_ipv6_and_a_crash_of_the_holder_breaks_no_download,
);

/// Within which a host that has just come up finds the VIP.
const PATIENCE: Duration = Duration::from_secs(10);

fn scene(mode: Mode) -> Scene {
    scene_in(mode, mode.builder())
}

fn scene_in(mode: Mode, builder: Builder) -> Scene {
    let lab = builder.build().expect("laboratory");
    let mut config = lab.config(mode.name());
    lab.with_ipv6(&mut config);
    let agent = Agent::start(&lab.nodes[0], &config).expect("agent");
    Scene { agent, config, lab }
}

fn get6(client: &Namespace, port: u16, path: &str) -> anyhow::Result<String> {
    let url = format!("http://[{VIP6}]:{port}{path}");
    client.exec(["curl", "-sS", "-f", "--max-time", "3", &url])
}

fn both_versions_are_served_by_all_pods_and_show_the_clients_address(mode: Mode) {
    let scene = scene(mode);
    let mut answers = BTreeMap::<(String, String), u32>::new();
    for client in [scene.host(), &scene.lab.bmc] {
        for _ in 0..60 {
            let asked = [
                (
                    get(&client.namespace, VIP, API_PORT, "/v1"),
                    client.address.to_string(),
                ),
                (
                    get6(&client.namespace, API_PORT, "/v1"),
                    client.address6.to_string(),
                ),
            ];
            for (answer, address) in asked {
                let answer = answer.expect("answer");
                let answer: Value = serde_json::from_str(&answer).expect("JSON");
                assert_eq!(answer["client"], address);
                let instance = answer["instance"].as_str().expect("instance");
                let version = if address.contains(':') { "6" } else { "4" };
                *answers
                    .entry((version.to_owned(), instance.to_owned()))
                    .or_default() += 1;
            }
        }
    }
    assert_eq!(answers.len(), 6, "{answers:?}");
    assert!(answers.values().all(|hits| *hits >= 20), "{answers:?}");
}

/// The address of one version comes when the uplink is served for the other's sake already; and it may go for a moment.
fn an_address_that_comes_later_brings_its_vip(mode: Mode) {
    let lab = mode.builder().build().expect("laboratory");
    let mut config = lab.config(mode.name());
    lab.with_ipv6(&mut config);
    let node = &lab.nodes[0];
    let own = format!("fd00:22::{}", u16::from(node.address.octets()[3]));
    let address = |verb: &str| {
        let line = format!("addr {verb} {own}/64 dev eth1");
        node.namespace.ip(&line)
    };
    address("del").expect("address");
    let _agent = Agent::start(node, &config).expect("agent");
    let client = &lab.hosts[0].namespace;
    get(client, VIP, API_PORT, "/").expect("the other version is served");
    let nowhere = || -> anyhow::Result<Value> {
        let status = node.ironlb(&["status", "-o", "json"])?;
        let status: Value = serde_json::from_str(&status)?;
        Ok(status["vips_without_uplink"].clone())
    };
    assert_eq!(nowhere().expect("status"), json!([VIP6]));
    let doctor = Diagnosis::of(node, &["--no-probe"]);
    let mut errors = doctor.findings().filter(|f| f["status"] == "error");
    assert!(errors.any(|f| f["on"] == json!(VIP6)), "no word of it");

    for _ in 0..2 {
        address("add").expect("address");
        wait_until("the VIP is served", Duration::from_secs(5), || {
            Ok(get6(client, API_PORT, "/").is_ok())
        })
        .expect("served");
        assert_eq!(nowhere().expect("status"), json!([]));
        address("del").expect("address");
        std::thread::sleep(Duration::from_secs(3));
        assert_eq!(nowhere().expect("status"), json!([]), "it keeps its place");
    }
}

fn an_instance_port_of_either_version_reaches_its_instance(mode: Mode) {
    let scene = scene(mode);
    for pod in &scene.node().pods {
        let expected = format!("boot image of {}\n", pod.instance);
        for _ in 0..20 {
            let client = &scene.host().namespace;
            let (port, path) = (pod.instance_port(), pod.own_path());
            assert_eq!(get(client, VIP, port, &path).expect("answer"), expected);
            assert_eq!(get6(client, port, &path).expect("answer"), expected);
        }
    }
}

fn ports_that_nobody_serves_are_refused_over_ipv6(mode: Mode) {
    let scene = scene(mode);
    let client = &scene.host().namespace;
    get6(client, API_PORT, "/").expect("the VIP is there");
    let refused = || {
        let begin = Instant::now();
        let target = SocketAddr::from((VIP6, RPC_PORT));
        let error = client
            .enter(|| TcpStream::connect_timeout(&target, Duration::from_secs(2)))
            .expect("namespace")
            .expect_err("nobody serves it");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{error}");
        begin.elapsed()
    };
    let delay = (0..5).map(|_| refused()).min().expect("five");
    assert!(delay < Duration::from_millis(5), "{delay:?}");
}

fn a_download_over_ipv6_outlives_the_agent(mode: Mode) {
    let mut scene = scene_in(mode, mode.builder().image_mib(24));
    let url = format!("http://[{VIP6}]:{IMAGE_PORT}/images/common.img?rate=8m");
    let limit = Duration::from_secs(60);
    let download = Download::start(&scene.host().namespace, &url, &[], limit).expect("curl");
    std::thread::sleep(Duration::from_secs(1));
    scene.agent.process.kill().expect("kill");
    get6(&scene.host().namespace, API_PORT, "/").expect("new connections");
    scene.agent = Agent::launch(scene.node()).expect("agent");
    download
        .finish(&scene.lab.image.sha256)
        .expect("a whole image");
}

/// BIG TCP, as CNIs turn it on: the length of such a packet is 0 in its header.
fn a_download_whose_packets_are_longer_than_their_headers_can_say_arrives_unharmed(mode: Mode) {
    let scene = scene_in(mode, mode.builder().image_mib(64));
    let pod = &scene.node().pods[0].namespace;
    pod.ip("link set dev eth0 gso_max_size 180000")
        .expect("gso_max_size");
    pod.exec(["ethtool", "-K", "eth0", "tx", "on", "tso", "on"])
        .expect("offloads");
    let long = Capture::start(pod, "eth0", "ip6 and greater 66000").expect("capture");
    let url = format!(
        "http://[{VIP6}]:{}/images/common.img",
        scene.node().pods[0].instance_port()
    );
    let limit = Duration::from_secs(60);
    let download = Download::start(&scene.host().namespace, &url, &[], limit).expect("curl");
    download
        .finish(&scene.lab.image.sha256)
        .expect("a whole image");
    let sent = long.finish().expect("capture");
    assert!(
        !sent.is_empty(),
        "the pod has sent no packet of more than 64 KiB"
    );
}

/// RFC 4862 section 5.4: it must not use an address that somebody has.
fn a_host_that_tries_the_vip_as_its_own_address_is_told(mode: Mode) {
    let scene = scene(mode);
    let host = &scene.host().namespace;
    host.ip(&format!("addr add {VIP6}/64 dev eth0"))
        .expect("address");
    wait_until(
        "the host learns that the address is taken",
        PATIENCE,
        || {
            let shown = host.exec(["ip", "-6", "address", "show", "dev", "eth0", "dadfailed"])?;
            Ok(shown.contains(&VIP6.to_string()))
        },
    )
    .expect("duplicate address detection");
    host.ip(&format!("addr del {VIP6}/64 dev eth0"))
        .expect("address");
    get6(host, API_PORT, "/").expect("answer");
}

/// Questions for the VIP go to its group, which such a switch forwards to members only.
#[test]
fn the_vip_is_found_behind_a_switch_that_snoops_on_multicast() {
    let mode = Mode::Tc;
    let scene = scene_in(mode, mode.builder().snooping(true));
    let (switch, host) = (&scene.lab.switch, &scene.host().namespace);
    let port = &scene.node().name;
    wait_until("the node's port is in the VIP's group", PATIENCE, || {
        let groups = switch.exec(["bridge", "mdb", "show"])?;
        Ok(groups
            .lines()
            .any(|line| line.contains("ff02::1:ff00:2 ") && line.contains(&format!("port {port}"))))
    })
    .expect("MLD");
    // Until it has asked and waited for answers, the switch floods.
    std::thread::sleep(Laboratory::SNOOPS_AFTER);
    host.ip("neigh flush dev eth0").expect("neighbours");
    get6(host, API_PORT, "/").expect("answer");
}

fn pods_of_every_node_serve_over_ipv6_and_a_crash_of_the_holder_breaks_no_download(mode: Mode) {
    let builder = mode.builder().nodes_with_pods(3, 1).image_mib(48);
    let lab = builder.build().expect("laboratory");
    let mut config = lab.config_elected(mode.name()).expect("configuration");
    lab.with_ipv6(&mut config);
    let mut fleet = Fleet::start(lab, &config).expect("agents");
    let client = fleet.lab.hosts[0].namespace.clone();
    let mut instances = BTreeSet::new();
    for _ in 0..40 {
        let answer = get6(&client, API_PORT, "/v1").expect("answer");
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        assert_eq!(answer["client"], fleet.lab.hosts[0].address6.to_string());
        instances.insert(answer["instance"].as_str().expect("instance").to_owned());
    }
    assert_eq!(instances.len(), 3, "{instances:?}");
    let pods = fleet.lab.nodes.iter().flat_map(|node| &node.pods);
    let downloads = pods.map(|pod| {
        let port = pod.instance_port();
        let url = format!("http://[{VIP6}]:{port}/images/common.img?rate=4m");
        Download::start(&client, &url, &[], Duration::from_secs(60)).expect("curl")
    });
    let mut downloads: Vec<_> = downloads.collect();
    std::thread::sleep(Duration::from_secs(1));
    let holder = holder6(&fleet, &client).expect("a holder");
    fleet.kill(holder).expect("kill");
    std::thread::sleep(RECOVERY);
    let successor = holder6(&fleet, &client).expect("a successor");
    assert_ne!(successor, holder);
    for _ in 0..20 {
        get6(&client, API_PORT, "/v1").expect("answer");
    }
    fleet.launch(holder).expect("agent");
    for download in &mut downloads {
        let end = download.end(&fleet.lab.image.sha256).expect("curl");
        assert_eq!(end.outcome, Outcome::Whole, "{}", end.said);
    }
}

/// The node whose MAC a host finds when it asks for the VIP anew.
fn holder6(fleet: &Fleet, host: &Namespace) -> Option<usize> {
    let vip = VIP6.to_string();
    host.ip("neigh flush dev eth0").expect("neighbours");
    get6(host, API_PORT, "/").expect("answer");
    let shown = host.exec(["ip", "-6", "neighbour", "show", &vip]);
    let shown = shown.expect("neighbours");
    let nodes = 0..fleet.lab.nodes.len();
    let mac = |node: usize| {
        let octets = fleet.mac(node).map(|octet| format!("{octet:02x}"));
        octets.join(":")
    };
    nodes.into_iter().find(|node| shown.contains(&mac(*node)))
}
