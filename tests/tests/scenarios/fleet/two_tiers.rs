//! One node receives all packets for the VIP, and pods on every node serve them.

use std::collections::BTreeSet;
use std::io;
use std::time::{Duration, Instant};

use ironlb_tests::{API_PORT, Capture, Download, Image, RPC_PORT, VIP, heads, wait_until};

use crate::scene::{Mode, connect, fleet, get, in_both_modes};

in_both_modes!(
    pods_on_every_node_serve_see_the_client_and_answer_it_themselves,
    a_download_from_another_node_does_not_cross_the_first,
    an_instance_port_reaches_its_instance_on_whichever_node,
    ports_that_nobody_serves_are_refused_at_once,
    a_nodes_own_connections_reach_pods_of_the_others,
);

const NODES: usize = 3;

fn pods_on_every_node_serve_see_the_client_and_answer_it_themselves(mode: Mode) {
    let (fleet, _) = fleet(mode, NODES);
    let host = &fleet.lab.hosts[0];
    let filter = format!("tcp and dst host {}", host.address);
    let wire = Capture::start(&host.namespace, "eth0", &filter).expect("capture");
    let mut instances = BTreeSet::new();
    for _ in 0..60 {
        let answer = get(&host.namespace, VIP, API_PORT, "/v1").expect("answer");
        let answer: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
        assert_eq!(answer["client"], host.address.to_string());
        instances.insert(answer["instance"].as_str().expect("instance").to_owned());
    }
    // A pod that three fair choices leave out 60 times: once in ten billion runs.
    assert_eq!(instances.len(), NODES, "{instances:?}");
    // All have ended, and nobody is told otherwise, on whichever node their pods are.
    for node in &fleet.lab.nodes {
        wait_until("no ended flow looks young", Duration::from_secs(5), || {
            let flows = node.ironlb(&["flows", "--state", "young", "-o", "json"])?;
            Ok(flows.trim() == "[]")
        })
        .expect("closing");
    }

    let frames = wire.finish().expect("capture");
    let from_vip = format!("{VIP}.{API_PORT} > ");
    let other = frames.iter().find(|frame| !frame.contains(&from_vip));
    assert_eq!(other, None, "not from the VIP");
    for (number, node) in fleet.lab.nodes.iter().enumerate() {
        let mac: Vec<_> = fleet
            .mac(number)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        let own = format!("{} > ", mac.join(":"));
        assert!(
            frames.iter().any(|frame| frame.contains(&own)),
            "{} never answered by itself",
            node.name
        );
    }
}

fn a_download_from_another_node_does_not_cross_the_first(mode: Mode) {
    let (fleet, holder) = fleet(mode, NODES);
    let image = &fleet.lab.image;
    let sent = || fleet.lab.nodes[holder].bytes_sent().expect("bytes sent");
    for (number, node) in fleet.lab.nodes.iter().enumerate() {
        let port = node.pods[0].instance_port();
        let url = format!("http://{VIP}:{port}{}", Image::URL_PATH);
        let before = sent();
        let host = &fleet.lab.hosts[0].namespace;
        Download::start(host, &url, &[], Duration::from_secs(60))
            .expect("curl")
            .finish(&image.sha256)
            .expect("download");
        let percent = (sent() - before) * 100 / image.bytes;
        if number == holder {
            // The figure below means something only if this is counted.
            assert!(percent >= 100, "the holder's own pod: {percent} %");
        } else {
            assert!(percent < 5, "{percent} % crossed the first node");
        }
    }
}

fn an_instance_port_reaches_its_instance_on_whichever_node(mode: Mode) {
    let (fleet, _) = fleet(mode, NODES);
    let host = &fleet.lab.hosts[0].namespace;
    for pod in fleet.lab.nodes.iter().flat_map(|node| &node.pods) {
        let url = format!("http://{VIP}:{}{}", pod.instance_port(), pod.own_path());
        let codes = heads(host, &url, 100).expect("curl");
        assert_eq!(codes, ["200"; 100], "{}", pod.instance);
    }
}

fn ports_that_nobody_serves_are_refused_at_once(mode: Mode) {
    let (fleet, _) = fleet(mode, NODES);
    let host = &fleet.lab.hosts[0].namespace;
    // JSON-RPC, and an instance port whose slot nobody has.
    for port in [RPC_PORT, 6231] {
        let begin = Instant::now();
        let limit = Duration::from_secs(2);
        let error = connect(host, VIP, port, limit).expect_err("somebody accepted");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{port}");
        let took = begin.elapsed();
        assert!(took < Duration::from_millis(500), "{port}: {took:?}");
    }
}

fn a_nodes_own_connections_reach_pods_of_the_others(mode: Mode) {
    let (fleet, holder) = fleet(mode, NODES);
    let nodes = || fleet.lab.nodes.iter().enumerate();
    for (number, client) in nodes().filter(|(number, _)| *number != holder) {
        for (_, node) in nodes().filter(|(other, _)| *other != number) {
            let pod = &node.pods[0];
            let file = get(&client.namespace, VIP, pod.instance_port(), &pod.own_path());
            let file = file
                .unwrap_or_else(|error| panic!("from {} to {}: {error:#}", client.name, node.name));
            assert_eq!(file, format!("boot image of {}\n", pod.instance));
        }
    }
}
