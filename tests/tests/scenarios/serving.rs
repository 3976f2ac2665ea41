//! Who serves which port of the VIP, and what happens to the ports that nobody serves.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

use ironlb_tests::{
    API_PORT, Capture, IMAGE_PORT, Outcome, RPC_PORT, VIP, backends, heads, wait_until,
};
use lb_common::layout::map;
use lb_common::verdict::Verdict;
use serde_json::json;
use socket2::{Domain, Socket, Type};

use crate::scene::{Mode, Scene, connect, get, in_both_modes};

in_both_modes!(
    connections_spread_over_all_pods_and_show_the_clients_address,
    connections_of_a_client_reach_one_pod_where_affinity_is_asked_for,
    a_host_without_a_route_to_the_pods_hears_from_the_vip_alone,
    an_instance_port_reaches_its_instance_and_never_another,
    an_instance_that_moves_resets_its_old_flow_and_serves_new_ones_within_two_seconds,
    one_client_port_to_two_vip_ports_of_one_pod_makes_two_connections,
    ports_that_nobody_serves_are_refused_at_once,
    source_ranges_refuse_new_connections_alone,
    a_pod_that_refuses_before_it_is_known_to_end_refuses_no_client,
);

fn connections_spread_over_all_pods_and_show_the_clients_address(mode: Mode) {
    let scene = Scene::new(mode);
    let mut answers = BTreeMap::<String, u32>::new();
    for client in [scene.host(), &scene.lab.bmc] {
        for _ in 0..60 {
            let answer = get(&client.namespace, VIP, API_PORT, "/v1").expect("answer");
            let answer: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
            assert_eq!(answer["client"], client.address.to_string());
            let instance = answer["instance"].as_str().expect("instance");
            *answers.entry(instance.to_owned()).or_default() += 1;
        }
    }
    // 120 fair choices among three: below 20 is more than four sigma away from 40.
    assert_eq!(answers.len(), 3, "{answers:?}");
    assert!(answers.values().all(|hits| *hits >= 20), "{answers:?}");
}

fn connections_of_a_client_reach_one_pod_where_affinity_is_asked_for(mode: Mode) {
    let mut scene = Scene::with(mode, mode.builder(), |config| {
        config["services"][0]["sessionAffinity"] = json!("ClientIP");
    });
    let client = scene.host().namespace.clone();
    let answering = |from: u8, times: u32| -> BTreeSet<String> {
        let ask = |_| {
            let (own, url) = (
                format!("172.22.0.{from}"),
                format!("http://{VIP}:{API_PORT}/v1"),
            );
            let words = ["curl", "-sSf", "--max-time", "3", "--interface", &own, &url];
            let answer = client.exec(words).expect("an answer");
            let answer: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
            answer["instance"].as_str().expect("instance").to_owned()
        };
        (0..times).map(ask).collect()
    };
    let mut all = BTreeSet::new();
    for from in 201..213 {
        client
            .ip(&format!("addr add 172.22.0.{from}/24 dev eth0"))
            .expect("address");
        let one = answering(from, 6);
        assert_eq!(one.len(), 1, "172.22.0.{from} reached {one:?}");
        all.extend(one);
    }
    assert!(all.len() > 1, "twelve clients reached {all:?} alone");

    scene.config["services"][0]["sessionAffinity"] = json!("None");
    scene.node().write_config(&scene.config).expect("file");
    wait_until("connections spread", Duration::from_secs(10), || {
        Ok(answering(201, 12).len() > 1)
    })
    .expect("spread");
}

/// What a ramdisk says to Ironic, and an image that it fetches.
fn a_host_without_a_route_to_the_pods_hears_from_the_vip_alone(mode: Mode) {
    let mut scene = Scene::new(mode);
    let (host, pod) = (scene.host(), &scene.node().pods[0]);
    let (client, own, address) = (host.namespace.clone(), pod.instance_port(), pod.address);
    let route = ["ip", "route", "get", &address.to_string()];
    client.exec(route).expect_err("it has a route to the pods");
    let others = format!("ip and dst host {} and not src host {VIP}", host.address);
    let wire = Capture::start(&client, "eth0", &others).expect("capture");

    get(&client, VIP, API_PORT, "/v1/lookup").expect("a lookup");
    let body = scene.lab.directory().join("inspection");
    std::fs::write(&body, vec![b'x'; 900 << 10]).expect("file");
    let body = format!("@{}", body.display());
    let url = format!("http://{VIP}:{API_PORT}/v1/continue_inspection");
    let words = ["curl", "-sS", "-f", "--max-time", "15", "--data-binary"];
    let told = client.exec(words.iter().chain(&[body.as_str(), &url]));
    assert!(told.expect("an inspection").contains("instance"));
    scene
        .download(own, "/images/common.img")
        .finish(&scene.lab.image.sha256)
        .expect("an image");
    let refused = connect(&client, VIP, RPC_PORT, Duration::from_secs(2));
    refused.expect_err("JSON-RPC answers");
    // Its pod goes in the midst of another one.
    let mut broken = scene.living_download(own, "/images/common.img?rate=200k");
    backends(&mut scene.config).remove(0);
    scene.node().write_config(&scene.config).expect("file");
    let end = broken.end(&scene.lab.image.sha256).expect("curl");
    assert_eq!(end.outcome, Outcome::Reset, "{}", end.said);

    let strangers = wire.finish().expect("capture");
    assert!(strangers.is_empty(), "{strangers:#?}");
}

/// Another pod, on another address, is the same instance now.
fn an_instance_that_moves_resets_its_old_flow_and_serves_new_ones_within_two_seconds(mode: Mode) {
    let mut scene = Scene::with(mode, mode.builder(), |config| backends(config).truncate(1));
    let [old, new, ..] = &scene.lab.nodes[0].pods[..] else {
        panic!("three pods expected");
    };
    let (port, moved, path) = (old.instance_port(), new.address, new.own_path());
    let client = scene.host().namespace.clone();
    let mut flow = connect(&client, VIP, port, Duration::from_secs(2)).expect("connect");
    let half = format!("GET {} HTTP/1.0\r\n", old.own_path());
    flow.write_all(half.as_bytes()).expect("send");
    let lives = || Ok(!scene.maps().living(map::LIVING)?.is_empty());
    wait_until("the old flow lives", Duration::from_secs(5), lives).expect("flow");

    backends(&mut scene.config)[0]["address"] = json!(moved);
    let since = Instant::now();
    scene.node().write_config(&scene.config).expect("file");
    let served = || Ok(get(&client, VIP, port, &path).is_ok());
    wait_until("the new pod serves", Duration::from_secs(5), served).expect("served");
    let took = since.elapsed();
    println!("{mode:?}: a new connection was served after {took:?}");
    assert!(took < Duration::from_secs(2), "{took:?}");

    flow.set_read_timeout(Some(Duration::from_secs(8)))
        .expect("timeout");
    let error = flow.read_exact(&mut [0]).expect_err("the old pod answers");
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
    println!(
        "{mode:?}: the old one was reset after {:?}",
        since.elapsed()
    );
}

fn an_instance_port_reaches_its_instance_and_never_another(mode: Mode) {
    let scene = Scene::new(mode);
    for pod in &scene.node().pods {
        // A connection each, from ports that the kernel picks.
        let url = format!("http://{VIP}:{}{}", pod.instance_port(), pod.own_path());
        let codes = heads(&scene.host().namespace, &url, 1000).expect("curl");
        let right = codes.iter().filter(|code| *code == "200").count();
        assert_eq!((right, codes.len()), (1000, 1000), "{}", pod.instance);
    }
    // One client port, three VIP ports at the same time: three flows.
    let flows = scene.node().pods.iter().map(|pod| {
        let target = SocketAddrV4::new(VIP, pod.instance_port());
        let connected = scene.host().namespace.enter(|| -> io::Result<Socket> {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.set_reuse_address(true)?;
            socket.bind(&SocketAddrV4::new(scene.host().address, 33333).into())?;
            socket.set_read_timeout(Some(Duration::from_secs(2)))?;
            socket.connect_timeout(&target.into(), Duration::from_secs(2))?;
            Ok(socket)
        });
        (pod, connected.expect("namespace").expect("connect"))
    });
    for (pod, mut flow) in flows.collect::<Vec<_>>() {
        let request = format!("GET {} HTTP/1.0\r\n\r\n", pod.own_path());
        flow.write_all(request.as_bytes()).expect("send");
        let mut answer = String::new();
        flow.read_to_string(&mut answer).expect("receive");
        let expected = format!("boot image of {}\n", pod.instance);
        assert!(answer.ends_with(&expected), "{answer}");
    }
}

/// Both at a time, and one right after the other, while the pod is in TIME_WAIT.
fn one_client_port_to_two_vip_ports_of_one_pod_makes_two_connections(mode: Mode) {
    const PORT: u16 = 33_334;
    let scene = Scene::with(mode, mode.builder(), |config| {
        // One pod alone: both ports lead to it.
        backends(config).truncate(1);
    });
    let pod = &scene.node().pods[0];
    let ports = [IMAGE_PORT, pod.instance_port()];
    let open = |port: u16| {
        let target = SocketAddrV4::new(VIP, port);
        let opened = scene.host().namespace.enter(|| -> io::Result<Socket> {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.set_reuse_address(true)?;
            socket.bind(&SocketAddrV4::new(scene.host().address, PORT).into())?;
            socket.set_read_timeout(Some(Duration::from_secs(2)))?;
            let begin = Instant::now();
            loop {
                match socket.connect_timeout(&target.into(), Duration::from_secs(2)) {
                    // The pod's last acknowledgment of the connection before is still on its way. Less than the 200 ms after
                    // which the client's FIN would be sent again: the first must have been answered.
                    Err(error)
                        if error.kind() == io::ErrorKind::AddrNotAvailable
                            && begin.elapsed() < Duration::from_millis(150) =>
                    {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    done => break done.map(|()| socket),
                }
            }
        });
        opened.expect("namespace").expect("connect")
    };
    let expected = format!("boot image of {}\n", pod.instance);
    let ask = |flow: &mut Socket| {
        let request = format!("GET {} HTTP/1.0\r\n\r\n", pod.own_path());
        flow.write_all(request.as_bytes()).expect("send");
        let mut answer = String::new();
        flow.read_to_string(&mut answer).expect("receive");
        assert!(answer.ends_with(&expected), "{answer}");
    };
    for _ in 0..3 {
        let mut flows = ports.map(open);
        flows.iter_mut().for_each(ask);
    }
    for port in [ports, ports].concat() {
        // The pod closes first: it has the TIME_WAIT.
        ask(&mut open(port));
    }
}

fn ports_that_nobody_serves_are_refused_at_once(mode: Mode) {
    let scene = Scene::with(mode, mode.builder(), |config| {
        let services = config["services"].as_array_mut().expect("services");
        services.push(json!({
            "name": "empty", "vip": VIP, "ports": [{"name": "http", "port": 8080}], "backends": [],
        }));
    });
    // An address resolution would count as delay.
    get(&scene.host().namespace, VIP, API_PORT, "/").expect("the VIP is there");
    let refused = |port: u16| {
        // The best of five: the machine may be busy with other tests.
        let delay = (0..5).map(|_| {
            let begin = Instant::now();
            let limit = Duration::from_secs(2);
            let error =
                connect(&scene.host().namespace, VIP, port, limit).expect_err("nobody serves it");
            assert_eq!(
                error.kind(),
                io::ErrorKind::ConnectionRefused,
                "port {port}: {error}"
            );
            begin.elapsed()
        });
        let delay = delay.min().expect("five");
        assert!(
            delay < Duration::from_millis(5),
            "port {port} was refused after {delay:?}"
        );
    };
    let (service, backend) = (Verdict::RefusedNoService, Verdict::RefusedNoBackend);
    let before = [scene.count(service), scene.count(backend)];
    // JSON-RPC listens in every pod; an instance port without an instance is nobody's.
    refused(RPC_PORT);
    refused(6203);
    refused(8080);
    let after = [scene.count(service), scene.count(backend)];
    assert_eq!(after, [before[0] + 10, before[1] + 5]);
}

fn source_ranges_refuse_new_connections_alone(mode: Mode) {
    let mut scene = Scene::new(mode);
    let [host, bmc] = [scene.host(), &scene.lab.bmc].map(|host| host.namespace.clone());
    let pod = &scene.node().pods[0];
    let (own, path) = (pod.instance_port(), pod.own_path());
    let mut download = scene.living_download(own, "/images/common.img?rate=1m");
    let admitted = format!("{}/32", scene.lab.bmc.address);
    scene.config["services"][0]["sourceRanges"] = json!([admitted]);
    scene.node().write_config(&scene.config).expect("file");

    let shown = || scene.node().ironlb(&["services", "-o", "json"]);
    let is_shown = || Ok(shown()?.contains(&admitted));
    wait_until("the ranges are shown", Duration::from_secs(5), is_shown).expect("ranges");
    for port in [API_PORT, IMAGE_PORT, own] {
        let refused = connect(&host, VIP, port, Duration::from_secs(2));
        let error = refused.expect_err("a client outside of the ranges is served");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{port}");
    }
    assert_eq!(scene.count(Verdict::RefusedSource), 3);
    for (port, path) in [(API_PORT, "/v1"), (own, &path)] {
        get(&bmc, VIP, port, path).expect("a client within the ranges");
    }
    download.goes_on().expect("too short");
    download.finish(&scene.lab.image.sha256).expect("download");

    scene.config["services"][0]
        .as_object_mut()
        .expect("service")
        .remove("sourceRanges");
    scene.node().write_config(&scene.config).expect("file");
    let served = || Ok(get(&host, VIP, own, &path).is_ok());
    wait_until("all are served again", Duration::from_secs(5), served).expect("served");
}

fn a_pod_that_refuses_before_it_is_known_to_end_refuses_no_client(mode: Mode) {
    // Nobody checks its health: only its own word is there.
    let mut scene = Scene::new(mode);
    let pod = &mut scene.lab.nodes[0].pods[0];
    let own = pod.instance_port();
    pod.web.kill().expect("nginx");
    let client = &scene.host().namespace;
    let begin = Instant::now();
    let mut asked = 0;
    while begin.elapsed() < Duration::from_secs(4) {
        asked += 1;
        get(client, VIP, API_PORT, "/v1").unwrap_or_else(|error| panic!("{asked}: {error:#}"));
    }
    let kept = scene.count(Verdict::DroppedFirstReset);
    assert!(kept > 0, "of {asked} connections none was its own");
    // A port of its own is nobody else's: its refusal is the answer.
    let refused = connect(client, VIP, own, Duration::from_millis(900));
    let error = refused.expect_err("it serves");
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    assert_eq!(scene.count(Verdict::DroppedFirstReset), kept);
}
