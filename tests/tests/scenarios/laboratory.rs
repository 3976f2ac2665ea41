//! The laboratory alone, without a load balancer in it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use ironlb_tests::{API_PORT, Capture, IMAGE_PORT, Image, Laboratory, NodeOptions, RPC_PORT, VIP};

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
