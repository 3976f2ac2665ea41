//! What is the node's own stays the node's: its address, and what a VIP passes to it.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, UdpSocket};
use std::time::Duration;

use etherparse::{IcmpEchoHeader, Icmpv4Header, Icmpv4Type, SlicedPacket, TransportSlice};
use ironlb_tests::{API_PORT, Host, VIP};
use lb_common::verdict::Verdict;
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};

use crate::scene::{Mode, Scene, connect, get, in_both_modes};

in_both_modes!(
    the_nodes_own_address_is_untouched,
    listed_protocols_of_the_vip_reach_the_host_and_others_do_not,
);

fn the_nodes_own_address_is_untouched(mode: Mode) {
    let scene = Scene::new(mode);
    let (host, node) = (scene.host(), scene.node());
    assert!(ping(host, node.address), "the node does not answer");
    // The same port as on the VIP, and one like ssh's.
    for port in [API_PORT, 22] {
        let server = node
            .namespace
            .enter(|| TcpListener::bind((node.address, port)));
        let server = server.expect("namespace").expect("bind");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut client, _) = server.accept().expect("accept");
                client.write_all(b"SSH-2.0").expect("write");
            });
            let client = connect(&host.namespace, node.address, port, Duration::from_secs(2));
            let mut client = client.expect("connect");
            client
                .set_read_timeout(Some(Duration::from_secs(2)))
                .expect("timeout");
            let mut banner = String::new();
            client.read_to_string(&mut banner).expect("read");
            assert_eq!(banner, "SSH-2.0");
        });
    }
    // DHCP, as a host without an address asks for it.
    let server = node
        .namespace
        .enter(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 67)));
    let server = server.expect("namespace").expect("bind");
    server
        .set_read_timeout(Some(Duration::from_secs(2)))
        .expect("timeout");
    let asked = host.namespace.enter(|| {
        let client = UdpSocket::bind((host.address, 68))?;
        client.set_broadcast(true)?;
        client.send_to(b"discover", (Ipv4Addr::BROADCAST, 67))
    });
    asked.expect("namespace").expect("send");
    server
        .recv_from(&mut [0; 16])
        .expect("the question arrives");
    // Hosts among themselves.
    let other = scene.lab.hosts[1].address;
    assert!(ping(host, other), "the other host does not answer");
}

/// Whether `target` answers an echo request.
fn ping(host: &Host, target: Ipv4Addr) -> bool {
    let socket = host.namespace.enter(|| -> io::Result<Socket> {
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4))?;
        socket.connect(&SocketAddrV4::new(target, 0).into())?;
        Ok(socket)
    });
    let socket = socket.expect("namespace").expect("socket");
    let limit = Duration::from_secs(2);
    socket.set_read_timeout(Some(limit)).expect("timeout");
    let echo = IcmpEchoHeader { id: 7, seq: 1 };
    let payload = b"ironlb";
    let header = Icmpv4Header::with_checksum(Icmpv4Type::EchoRequest(echo), payload);
    let mut request = header.to_bytes().to_vec();
    request.extend_from_slice(payload);
    socket.send(&request).expect("send");
    let mut packet = [0; 128];
    (&socket).read(&mut packet).is_ok_and(|length| {
        let answer = SlicedPacket::from_ip(&packet[..length]).expect("IP");
        let Some(TransportSlice::Icmpv4(answer)) = answer.transport else {
            return false;
        };
        answer.header().icmp_type == Icmpv4Type::EchoReply(echo)
    })
}

fn listed_protocols_of_the_vip_reach_the_host_and_others_do_not(mode: Mode) {
    let scene = Scene::with(mode, mode.builder(), |config| {
        config["vips"][0]["pass"] = json!(["udp/5050"]);
    });
    let (host, node) = (scene.host(), scene.node());
    let add = format!("addr add {VIP}/32 dev lo");
    node.namespace.ip(&add).expect("address");
    let echoes = |port: u16| {
        let server = node.namespace.enter(|| UdpSocket::bind((VIP, port)));
        let server = server.expect("namespace").expect("bind");
        let client = host
            .namespace
            .enter(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)));
        let client = client.expect("namespace").expect("bind");
        let limit = Some(Duration::from_millis(500));
        server.set_read_timeout(limit).expect("timeout");
        client.set_read_timeout(limit).expect("timeout");
        client.send_to(b"inspect", (VIP, port)).expect("send");
        let mut packet = [0; 16];
        let Ok((length, asker)) = server.recv_from(&mut packet) else {
            return false;
        };
        server.send_to(&packet[..length], asker).expect("answer");
        let (_, sender) = client.recv_from(&mut packet).expect("answer");
        assert_eq!(sender, (VIP, port).into());
        true
    };
    let passed = scene.count(Verdict::PassedListed);
    assert!(echoes(5050), "`pass` lists it");
    assert_eq!(scene.count(Verdict::PassedListed), passed + 1);
    let dropped = scene.count(Verdict::DroppedProtocol);
    assert!(!echoes(5051), "`pass` does not list it");
    assert_eq!(scene.count(Verdict::DroppedProtocol), dropped + 1);
    // TCP of the VIP is ours as before.
    get(&host.namespace, VIP, API_PORT, "/").expect("answer");
}
