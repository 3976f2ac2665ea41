//! Large frames: jumbo ones on the wire, and those that offloads make of many. On the connection both sides send at the
//! same time, and every octet is checked.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ironlb_tests::{API_PORT, Agent, IMAGE_PORT, VIP, Wire};
use serde_json::json;
use socket2::SockRef;

use crate::scene::{Mode, Scene, get, in_both_modes};

in_both_modes!(jumbo_frames_arrive_both_ways_and_a_change_of_the_mtu_harms_nobody);

/// A port of the VIP that the first pod alone has.
const BULK_PORT: u16 = 7000;
/// What each side sends.
const BULK: usize = 48 << 20;
const CHUNK: usize = 1 << 16;
const LIMIT: Duration = Duration::from_secs(30);
/// What is between an MTU and the data of a segment at least: headers of IP and TCP, timestamps.
const HEADERS: u32 = 52;

fn scene(mode: Mode, mtu: u32) -> Scene {
    let lab = mode.builder().image_mib(48).build().expect("laboratory");
    let mut config = lab.config(mode.name());
    let services = config["services"].as_array_mut().expect("services");
    services.push(json!({
        "name": "bulk", "vip": VIP, "ports": [{"name": "bulk", "port": BULK_PORT}],
        "backends": [{"instance": "ironic-0", "address": lab.nodes[0].pods[0].address}],
    }));
    set_mtu(&lab, mtu);
    let agent = Agent::start(&lab.nodes[0], &config).expect("agent");
    Scene { agent, config, lab }
}

/// Of every link between the first host and the pods.
fn set_mtu(lab: &ironlb_tests::Laboratory, mtu: u32) {
    let node = &lab.nodes[0];
    let set = |namespace: &ironlb_tests::Namespace, link: &str| {
        let line = format!("link set {link} mtu {mtu}");
        namespace.ip(&line).expect("MTU");
    };
    for port in ["host0", "node0", "br0"] {
        set(&lab.switch, port);
    }
    set(&lab.hosts[0].namespace, "eth0");
    set(&node.namespace, "eth1");
    for (number, pod) in node.pods.iter().enumerate() {
        set(&node.namespace, &format!("pod{number}"));
        set(&pod.namespace, "eth0");
    }
}

/// Every eight octets of it tell where they belong.
fn fill(chunk: &mut [u8], at: usize) {
    for (number, word) in chunk.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&((at + number * 8) as u64).to_be_bytes());
    }
}

/// Sends all of it and receives as much, at the same time.
fn talk(stream: &TcpStream) {
    stream.set_read_timeout(Some(LIMIT)).expect("timeout");
    stream.set_write_timeout(Some(LIMIT)).expect("timeout");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, mut chunk) = (stream, vec![0; CHUNK]);
            for at in (0..BULK).step_by(CHUNK) {
                fill(&mut chunk, at);
                stream.write_all(&chunk).expect("send");
            }
        });
        let (mut stream, mut chunk, mut wanted) = (stream, vec![0; CHUNK], vec![0; CHUNK]);
        for at in (0..BULK).step_by(CHUNK) {
            stream.read_exact(&mut chunk).expect("receive");
            fill(&mut wanted, at);
            assert!(chunk == wanted, "other data within {CHUNK} of {at}");
        }
    });
}

/// Both ways over the VIP; the most data that a segment of the client's may have.
fn bulk(scene: &Scene) -> u32 {
    let pod = &scene.node().pods[0];
    let listener = pod
        .namespace
        .enter(|| TcpListener::bind((pod.address, BULK_PORT)));
    let listener = listener.expect("namespace").expect("bind");
    std::thread::scope(|scope| {
        scope.spawn(|| talk(&listener.accept().expect("accept").0));
        let target = SocketAddr::from((VIP, BULK_PORT));
        let client = &scene.host().namespace;
        let stream = client.enter(|| TcpStream::connect_timeout(&target, LIMIT));
        let stream = stream.expect("namespace").expect("connect");
        talk(&stream);
        SockRef::from(&stream).tcp_mss().expect("TCP_MAXSEG")
    })
}

fn jumbo_frames_arrive_both_ways_and_a_change_of_the_mtu_harms_nobody(mode: Mode) {
    const JUMBO: u32 = 9000;
    const USUAL: u32 = 1500;
    // The programs are attached to a port that has it already.
    let scene = scene(mode, JUMBO);
    let attached = || {
        let objects = scene.maps().kernel_objects().expect("objects");
        (
            objects.links,
            scene
                .node()
                .ironlb(&["status", "-o", "json"])
                .expect("status"),
        )
    };
    let (links, status) = attached();
    let mode = format!(r#""mode": "{}""#, mode.name());
    assert!(status.contains(&mode), "no {mode} in {status}");
    let segment = |mtu| {
        let most = bulk(&scene);
        assert!((mtu - HEADERS..mtu).contains(&most), "{most} of {mtu}");
    };
    segment(JUMBO);

    // Two that see the changes.
    let paced = "/images/common.img?rate=4m";
    let mut large = scene.living_download(IMAGE_PORT, paced);
    set_mtu(&scene.lab, USUAL);
    let mut small = scene.living_download(IMAGE_PORT, paced);
    segment(USUAL);
    set_mtu(&scene.lab, JUMBO);
    segment(JUMBO);
    get(&scene.host().namespace, VIP, API_PORT, "/").expect("an answer");
    let (now, status) = attached();
    assert_eq!(now, links, "links or programs were changed");
    assert!(status.contains(&mode), "no {mode} in {status}");
    for download in [&mut large, &mut small] {
        download.goes_on().expect("too short");
    }
    for download in [large, small] {
        download.finish(&scene.lab.image.sha256).expect("download");
    }
}

/// The longest frame of TCP that arrives at an interface while something is done.
fn longest(wires: &[&Wire], work: impl FnOnce()) -> Vec<usize> {
    let stop = Instant::now() + LIMIT;
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watches = wires.iter().map(|wire| {
            let done = &done;
            scope.spawn(move || {
                let mut longest = 0;
                while !done.load(std::sync::atomic::Ordering::Relaxed) && Instant::now() < stop {
                    let look = Duration::from_millis(50);
                    let all = wire.receive(look, |frame| {
                        longest = longest.max(frame.len());
                        None::<()>
                    });
                    all.expect("frames");
                }
                longest
            })
        });
        let watches: Vec<_> = watches.collect();
        work();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        watches
            .into_iter()
            .map(|watch| watch.join().expect("frames"))
            .collect()
    })
}

/// Made by the sender's TSO, or by GRO of the node and the host out of frames as on a wire.
#[test]
fn frames_of_64_kib_pass_whole_at_tc() {
    let scene = scene(Mode::Tc, 1500);
    let (host, node) = (&scene.host().namespace, &scene.node().namespace);
    let pod = &scene.node().pods[0].namespace;
    let wires = [pod, host].map(|end| Wire::open(end, "eth0").expect("wire"));
    let wires = [&wires[0], &wires[1]];
    for (namespace, link) in [(node, "eth1"), (host, "eth0")] {
        let on = ["ethtool", "-K", link, "gro", "on"];
        namespace.exec(on).expect("ethtool");
    }
    let lengths = longest(&wires, || assert!(bulk(&scene) > 0));
    println!("sent as one: {lengths:?}");
    assert!(lengths.iter().all(|length| *length > 60_000), "{lengths:?}");

    // A veth leaves GRO to what its other end could have sent as one.
    let off = ["ethtool", "-K", "node0", "tso", "off"];
    scene.lab.switch.exec(off).expect("ethtool");
    let lengths = longest(&wires[..1], || assert!(bulk(&scene) > 0));
    println!("merged on the way in: {lengths:?}");
    assert!(lengths[0] > 20_000, "{lengths:?}");
}
