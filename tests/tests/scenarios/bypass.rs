//! Connections between provisioned hosts and pods around the VIP.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use ironlb_tests::{API_PORT, IMAGE_PORT, Namespace, RPC_PORT, VIP};
use lb_common::verdict::Verdict;
use serde_json::json;

use crate::scene::{Mode, Scene, assert_silent, get, in_both_modes};

in_both_modes!(
    a_route_around_the_vip_leads_nowhere_but_pods_reach_hosts,
    direct_connections_work_where_they_are_allowed,
);

fn a_route_around_the_vip_leads_nowhere_but_pods_reach_hosts(mode: Mode) {
    let scene = Scene::with(mode, mode.builder(), |config| {
        config["uplinks"][0]["bypass_udp"] = json!([53]);
    });
    let pod = &scene.node().pods[0];
    for host in &scene.lab.hosts {
        scene.lab.route_to_pods(host).expect("route");
    }
    let before = scene.count(Verdict::DroppedBypass);
    for port in [RPC_PORT, IMAGE_PORT, 22] {
        assert_silent(&scene.lab.hosts[1].namespace, pod.address, port);
    }
    let dropped = scene.count(Verdict::DroppedBypass) - before;
    assert!(dropped >= 3, "{dropped} attempts were counted");
    get(&scene.lab.hosts[1].namespace, VIP, API_PORT, "/").expect("the VIP serves it");

    // A conductor connects to a ramdisk, and asks a name server.
    let host = scene.host();
    let ramdisk = bind(&host.namespace, |any| TcpListener::bind((any, 9999)));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut conductor, _) = ramdisk.accept().expect("accept");
            let mut question = [0; 4];
            conductor.read_exact(&mut question).expect("read");
            conductor.write_all(&question).expect("write");
        });
        let connected = pod.namespace.enter(|| {
            TcpStream::connect_timeout(&(host.address, 9999).into(), Duration::from_secs(2))
        });
        let mut connected = connected.expect("namespace").expect("connect");
        connected
            .set_read_timeout(Some(Duration::from_secs(2)))
            .expect("timeout");
        connected.write_all(b"ping").expect("write");
        let mut answer = [0; 4];
        connected.read_exact(&mut answer).expect("read");
        assert_eq!(&answer, b"ping");
    });
    let answers = |port: u16| {
        let server = bind(&host.namespace, |any| UdpSocket::bind((any, port)));
        let client = bind(&pod.namespace, |any| UdpSocket::bind((any, 0)));
        server
            .set_read_timeout(Some(Duration::from_secs(2)))
            .expect("timeout");
        client
            .set_read_timeout(Some(Duration::from_millis(500)))
            .expect("timeout");
        client.send_to(b"who", (host.address, port)).expect("send");
        let mut question = [0; 16];
        let (_, asker) = server.recv_from(&mut question).expect("question");
        server.send_to(b"me", asker).expect("answer");
        client.recv_from(&mut question).is_ok()
    };
    assert!(answers(53), "bypass_udp lists 53");
    assert!(!answers(5353), "bypass_udp does not list 5353");
}

fn bind<T: Send>(
    namespace: &Namespace,
    socket: impl FnOnce(std::net::Ipv4Addr) -> std::io::Result<T> + Send,
) -> T {
    let bound = namespace.enter(|| socket(std::net::Ipv4Addr::UNSPECIFIED));
    bound.expect("namespace").expect("bind")
}

fn direct_connections_work_where_they_are_allowed(mode: Mode) {
    let scene = Scene::with(mode, mode.builder(), |config| {
        config["uplinks"][0]["bypass"] = json!("allow");
    });
    let (host, pod) = (&scene.lab.hosts[1], &scene.node().pods[0]);
    scene.lab.route_to_pods(host).expect("route");
    for port in [RPC_PORT, API_PORT] {
        get(&host.namespace, pod.address, port, "/").expect("direct answer");
    }
    get(&host.namespace, pod.address, IMAGE_PORT, &pod.own_path()).expect("direct answer");
    get(&host.namespace, VIP, pod.instance_port(), &pod.own_path()).expect("answer of the VIP");
    get(&host.namespace, pod.address, IMAGE_PORT, &pod.own_path()).expect("direct answer");
}
