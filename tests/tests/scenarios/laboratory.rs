//! The laboratory alone, without a load balancer in it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use ironlb_tests::{
    API_PORT, ArpWatch, Capture, Download, Fleet, IMAGE_PORT, Image, Laboratory, Neighbour,
    NodeOptions, Outcome, Prober, RPC_PORT, VIP, Wire, turns,
};

use crate::scene::{Mode, fleet_lab};

#[test]
fn hosts_reach_the_pods_by_a_route_alone_and_nothing_stays_behind() {
    let lab = Laboratory::builder()
        .complete_checksums(true)
        .build()
        .expect("laboratory");
    let host = &lab.hosts[0];
    let curl = |url: String| {
        host.namespace
            .exec(["curl", "-sS", "-f", "--max-time", "1", &url])
    };

    let pod = &lab.nodes[0].pods[2];
    let api = format!("http://{}:{API_PORT}/v1", pod.address);
    curl(api.clone()).expect_err("there is no route yet");
    lab.route_to_pods(host).expect("route");
    let wire = Capture::start(&lab.switch, "node0", "net 10.244.0.0/16").expect("capture");
    let answer = curl(api).expect("answer");
    let seen = wire.finish().expect("capture").join("\n");
    assert!(seen.contains("10.244.0.13.6385"), "{seen}");
    assert!(answer.contains(r#""instance": "ironic-2""#), "{answer}");
    assert!(answer.contains(r#""client": "172.22.0.100""#), "{answer}");
    curl(format!("http://{}:{RPC_PORT}/", pod.address)).expect("nothing guards JSON-RPC yet");

    let own =
        |pod: &ironlb_tests::Pod, path| curl(format!("http://{}:{IMAGE_PORT}{path}", pod.address));
    assert_eq!(
        own(pod, pod.own_path()).expect("own file"),
        "boot image of ironic-2\n"
    );
    own(&lab.nodes[0].pods[0], pod.own_path()).expect_err("another instance has it not");

    let url = format!("http://{}:{IMAGE_PORT}{}", pod.address, Image::URL_PATH);
    let sum = host
        .namespace
        .exec(["sh", "-c", &format!("curl -sS -f {url} | sha256sum")]);
    let sum = sum.expect("download");
    assert!(sum.starts_with(&lab.image.sha256), "{sum}");

    curl(format!("http://{VIP}:{API_PORT}/")).expect_err("nobody has the VIP");

    let (directory, namespace) = (lab.directory(), host.namespace.path());
    drop(lab);
    for path in [&directory, &namespace] {
        assert!(!Path::new(path).exists(), "{} stayed", path.display());
    }
}

#[test]
fn a_node_may_have_its_provisioning_port_in_a_bridge() {
    let lab = Laboratory::builder()
        .nodes(vec![NodeOptions {
            bridged: true,
            pods: 1,
            ..NodeOptions::default()
        }])
        .build()
        .expect("laboratory");
    lab.route_to_pods(&lab.bmc).expect("route");
    let url = format!("http://{}:{API_PORT}/", lab.nodes[0].pods[0].address);
    lab.bmc
        .namespace
        .exec(["curl", "-sS", "-f", "--max-time", "2", &url])
        .expect("answer");
}

#[test]
fn a_laboratory_whose_owner_was_killed_is_swept() {
    const OWNER: &str = "IRONLB_TEST_OWNER";
    if std::env::var_os(OWNER).is_some() {
        // The child below: builds one and waits to be killed.
        let lab = Laboratory::builder().build().expect("laboratory");
        println!("\ndirectory {}", lab.directory().display());
        println!("namespace {}", lab.switch.path().display());
        loop {
            std::thread::park();
        }
    }
    let name = "laboratory::a_laboratory_whose_owner_was_killed_is_swept";
    let mut owner = Command::new(std::env::current_exe().expect("own executable"))
        .args(["--exact", name, "--nocapture"])
        .env(OWNER, "1")
        .stdout(Stdio::piped())
        .spawn()
        .expect("owner");
    let mut lines = BufReader::new(owner.stdout.take().expect("stdout")).lines();
    let mut path = |what: &str| {
        let line = lines.find_map(|line| Some(line.ok()?.strip_prefix(what)?.trim().to_owned()));
        line.expect("the owner says what it built")
    };
    let paths = [path("directory"), path("namespace")];
    ironlb_tests::sweep().expect("sweep");
    assert!(
        paths.iter().all(|path| Path::new(path).exists()),
        "the owner lives"
    );
    owner.kill().expect("kill");
    owner.wait().expect("wait");
    ironlb_tests::sweep().expect("sweep");
    for path in paths {
        assert!(!Path::new(&path).exists(), "{path} stayed");
    }
}

/// What tells in other scenarios that all is well, where it is not: no check is blind.
#[test]
fn faults_of_nodes_are_seen_by_clients() {
    let lab = fleet_lab(Mode::Tc, 2);
    // As by mistake: both announce, and neither knows the other.
    let mut config = lab.config(Mode::Tc.name());
    let mut fleet = Fleet::prepare(lab, &config).expect("configurations");
    fleet.launch_all().expect("agents");
    let arp = ArpWatch::start(&fleet.lab.hosts[0], VIP).expect("ARP");
    let answering = |fleet: &Fleet| {
        fleet
            .answering()
            .expect("ARP")
            .into_iter()
            .collect::<Vec<_>>()
    };
    assert_eq!(answering(&fleet), [0, 1]);
    std::thread::sleep(Duration::from_millis(200));
    let overlap = turns(&arp.finish().expect("ARP"));
    assert!(overlap.len() > 2, "{overlap:?}");

    let sees = |fleet: &Fleet| {
        let [from, to] = &fleet.lab.nodes[..] else {
            panic!("two nodes")
        };
        let wire = Wire::open(&from.namespace, "eth1").expect("wire");
        let limit = Duration::from_millis(500);
        let mac = wire.resolve(from.address, to.address, None, limit);
        mac.expect("ARP") == Some(fleet.mac(1))
    };
    let cut_off = |fleet: &Fleet, on| {
        for node in &fleet.lab.nodes {
            fleet.lab.cut_off(node, on).expect("port");
        }
    };
    cut_off(&fleet, true);
    assert!(!sees(&fleet), "they reach each other");
    assert_eq!(answering(&fleet), [0, 1], "the host does not reach them");
    cut_off(&fleet, false);
    assert!(sees(&fleet), "they do not reach each other again");

    fleet.lab.unplug("node1").expect("cable");
    assert_eq!(fleet.wait_for_holder(Duration::ZERO).expect("ARP"), 0);
    let lab = &fleet.lab;
    let (host, pod) = (&lab.hosts[1].namespace, &lab.nodes[0].pods[0]);
    let target = (VIP, pod.instance_port());
    let cold = Prober::start(host, target, &pod.own_path(), Neighbour::Cold);
    let url = format!("http://{VIP}:{}/images/common.img?rate=4m", target.1);
    let mut download = Download::start(host, &url, &[], Duration::from_secs(60)).expect("curl");
    std::thread::sleep(Duration::from_secs(1));
    ironlb_tests::backends(&mut config).retain(|backend| backend["slot"] != pod.slot);
    fleet.reconfigure(&config).expect("configurations");
    std::thread::sleep(Duration::from_secs(1));
    let attempts = cold.finish().expect("connections");
    assert!(attempts[0].failure.is_none(), "{:?}", attempts[0]);
    let last = attempts.last().expect("attempts");
    assert!(last.failure.is_some(), "{last:?}");

    let sha256 = lab.image.sha256.clone();
    fleet.lab.nodes[0].pods[0].web.kill().expect("nginx");
    let end = download.end(&sha256).expect("end");
    assert_ne!(end.outcome, Outcome::Whole, "{}", end.said);
    assert_eq!(end.instance, fleet.lab.nodes[0].pods[0].instance);
    fleet.kill_node(0).expect("node");
    assert_eq!(answering(&fleet), Vec::<usize>::new());
    fleet.hang(1).expect("hang");
    fleet.resume(1).expect("resume");
    fleet.upgrade(1).expect("upgrade");
    fleet.lab.plug("node1").expect("cable");
    let holder = fleet.wait_for_holder(Duration::from_secs(5)).expect("ARP");
    assert_eq!(holder, 1);
}
