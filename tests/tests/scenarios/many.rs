//! Very many short connections while no agent runs: the tables empty themselves.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use etherparse::PacketBuilder;
use ironlb_tests::{
    API_PORT, Agent, Download, IMAGE_PORT, Load, LoadReport, Namespace, VIP, Wire, run, wait_until,
};
use lb_common::layout::{DEFAULT_LIVING_FLOWS, FORWARD, map};
use lb_common::verdict::Verdict;

use serde_json::json;
use socket2::SockRef;

use crate::scene::{Mode, Scene, connect, get, in_both_modes};

in_both_modes!(
    short_connections_leave_room_for_more_without_an_agent,
    connections_that_say_nothing_leave_nothing,
    a_small_table_loses_no_living_flow_however_many_come,
);

/// More than twice what the table of living flows holds, from several clients.
const CONNECTIONS: u32 = 300_000;
const _: () = assert!(CONNECTIONS > 2 * DEFAULT_LIVING_FLOWS);

fn short_connections_leave_room_for_more_without_an_agent(mode: Mode) {
    let mut scene = Scene::new(mode);
    let sources: Vec<_> = (200..208)
        .map(|last| Ipv4Addr::new(172, 22, 0, last))
        .collect();
    for source in &sources {
        let line = format!("addr add {source}/24 dev eth0");
        scene.host().namespace.ip(&line).expect("address");
    }
    scene.agent.process.kill().expect("kill");
    for pod in &scene.node().pods {
        keep_flows_on_one_cpu(&pod.namespace);
    }
    let load = Load {
        sources,
        targets: vec![SocketAddrV4::new(VIP, API_PORT)],
        first: 0,
        count: CONNECTIONS,
        limit: Duration::from_secs(240),
        patience: Load::PATIENCE,
        threads: 8,
    };
    let report = load.run(&scene.host().namespace).expect("load");
    println!("{mode:?}: {report:?}");
    assert_eq!(
        (report.served, report.failed),
        (CONNECTIONS, 0),
        "{report:?}"
    );

    get(&scene.host().namespace, VIP, API_PORT, "/").expect("one more");
    for full in [
        Verdict::DroppedTableFull,
        Verdict::RefusedTableFull,
        Verdict::DroppedNoRoom,
    ] {
        assert_eq!(scene.count(full), 0, "{}", full.name());
    }
    assert_nothing_lives(&scene);
}

/// As a port probe or a health check does it: connect, and close at once.
fn connections_that_say_nothing_leave_nothing(mode: Mode) {
    let scene = Scene::new(mode);
    for _ in 0..100 {
        let limit = Duration::from_secs(2);
        connect(&scene.host().namespace, VIP, API_PORT, limit).expect("connect");
    }
    assert_nothing_lives(&scene);
}

/// Room for living flows, and for young ones.
const SMALL: usize = 128;
/// Short connections at a time.
const THREADS: u32 = 4;
/// A port of the VIP that the first pod alone has, and whose connections live until they are closed.
const LONG_PORT: u16 = 7000;

/// A download and an idle connection stay, whatever comes beside them: SYNs, short connections, and others that live, up
/// to twice what there is room for.
fn a_small_table_loses_no_living_flow_however_many_come(mode: Mode) {
    let lab = mode.builder().image_mib(64).build().expect("laboratory");
    let mut config = lab.config(mode.name());
    let services = config["services"].as_array_mut().expect("services");
    services.push(json!({
        "name": "long", "vip": VIP, "ports": [{"name": "long", "port": LONG_PORT}],
        "backends": [{"instance": "ironic-0", "address": lab.nodes[0].pods[0].address}],
    }));
    let node = &lab.nodes[0];
    node.write_config(&config).expect("file");
    let size = SMALL.to_string();
    let options = ["--living-flows", &size, "--young-flows", &size];
    let agent = Agent::launch_with(node, &options).expect("agent");
    let scene = Scene { agent, config, lab };
    let client = &scene.host().namespace;
    let source = Ipv4Addr::new(172, 22, 0, 200);
    let address = format!("addr add {source}/24 dev eth0");
    client.ip(&address).expect("address");
    let wire = Wire::open(client, "eth0").expect("wire");
    let node_mac = scene.node().mac().expect("MAC");
    let pod = &scene.node().pods[0];
    let echo = pod
        .namespace
        .enter(|| TcpListener::bind((pod.address, LONG_PORT)));
    let echo = echo.expect("namespace").expect("bind");
    let listens = SockRef::from(&echo).try_clone().expect("socket");
    let server = std::thread::spawn(move || serve_long(&echo));

    let mut idle = long(client).expect("an idle connection");
    // Long enough for all that comes, on a busy machine too.
    let url = format!("http://{VIP}:{IMAGE_PORT}/images/common.img?rate=2m");
    let limit = Duration::from_secs(120);
    let mut download = Download::start(client, &url, &[], limit).expect("curl");
    let begin = Instant::now();
    let living = || scene.maps().living(map::LIVING).expect("flows").len();
    let both = || Ok(living() == 2);
    wait_until("both live", Duration::from_secs(5), both).expect("flows");

    let mut begun = 0;
    let mut storm = |count: u32| -> LoadReport {
        // From an address that nobody has: these get no answer, and are nobody's.
        for number in begun..begun + count {
            let port = 10_000 + (number % 50_000) as u16;
            let mut syn = Vec::new();
            PacketBuilder::ethernet2(wire.mac(), node_mac)
                .ipv4([172, 22, 0, 222], VIP.octets(), 64)
                .tcp(port, API_PORT, number, 64_240)
                .syn()
                .write(&mut syn, &[])
                .expect("writes");
            wire.send(&syn).expect("SYN");
        }
        let load = Load {
            sources: vec![source],
            targets: vec![SocketAddrV4::new(VIP, API_PORT)],
            first: begun,
            count,
            limit: Duration::from_secs(60),
            patience: Load::PATIENCE,
            threads: THREADS,
        };
        begun += count;
        load.run(client).expect("load")
    };
    let full = [Verdict::DroppedTableFull, Verdict::RefusedTableFull];
    let refused = || full.map(|verdict| scene.count(verdict)).iter().sum::<u64>();

    let report = storm(10_000);
    assert_eq!((report.served, report.failed), (10_000, 0), "{report:?}");
    let mut held = Vec::new();
    for percent in [50, 90] {
        while held.len() + 2 < SMALL * percent / 100 {
            held.push(long(client).unwrap_or_else(|error| panic!("{percent} %: {error}")));
        }
        let report = storm(1000);
        assert_eq!(
            (report.served, report.failed),
            (1000, 0),
            "{percent} %: {report:?}"
        );
    }
    assert_eq!(
        refused(),
        0,
        "something found no room although there was some"
    );
    let mut failed = 0;
    while held.len() + failed as usize + 2 < 2 * SMALL {
        match long(client) {
            Ok(flow) => held.push(flow),
            Err(error) => {
                let kind = error.kind();
                let is_told = [
                    io::ErrorKind::ConnectionRefused,
                    io::ErrorKind::ConnectionReset,
                ];
                assert!(is_told.contains(&kind), "{error}");
                failed += 1;
            }
        }
    }
    // Connections that were just ending may have had a place each when it was asked for.
    let room = SMALL - held.len() - 2;
    assert!(
        room < THREADS as usize,
        "room for {room} was given to nobody"
    );
    let by_name = refused();
    assert!(by_name >= failed, "{failed} failed, {by_name} by name");
    let report = storm(1000);
    let why = report.first_failure.as_deref().unwrap_or_default();
    // One a second is let in, to see whether it is full still, and reset.
    assert!(
        why.contains("refused") || why.contains("reset"),
        "{report:?}"
    );
    let by_name = refused() - by_name;
    assert!(by_name >= u64::from(report.failed), "{by_name}: {report:?}");

    for flow in held.iter_mut().chain([&mut idle]) {
        say(flow).expect("it lives");
    }
    drop(held);
    let served = || Ok(get(client, VIP, API_PORT, "/").is_ok());
    wait_until("there is room again", Duration::from_secs(5), served).expect("room");
    println!("{mode:?}: all came within {:?}", begin.elapsed());
    download.goes_on().expect("too short");
    download.finish(&scene.lab.image.sha256).expect("download");
    say(&mut idle).expect("it lives");
    listens.shutdown(Shutdown::Both).expect("shutdown");
    server.join().expect("server");
}

/// Gives every connection back what it says, until it is closed.
fn serve_long(listener: &TcpListener) {
    while let Ok((mut flow, _)) = listener.accept() {
        std::thread::spawn(move || {
            let mut octet = [0];
            while flow
                .read_exact(&mut octet)
                .and_then(|()| flow.write_all(&octet))
                .is_ok()
            {}
        });
    }
}

/// A connection that has been answered, so that it lives.
fn long(client: &Namespace) -> io::Result<TcpStream> {
    let limit = Duration::from_secs(5);
    let mut flow = connect(client, VIP, LONG_PORT, limit)?;
    flow.set_read_timeout(Some(limit))?;
    say(&mut flow).map(|()| flow)
}

fn say(flow: &mut TcpStream) -> io::Result<()> {
    flow.write_all(b"x")?;
    flow.read_exact(&mut [0])
}

fn assert_nothing_lives(scene: &Scene) {
    let living = || {
        let mut flows = scene.maps().living(map::LIVING).expect("flows");
        flows.extend(scene.maps().living(map::LIVING_REPLY).expect("flows"));
        flows
    };
    let emptied = wait_until("no flow is living", Duration::from_secs(5), || {
        Ok(living().is_empty())
    });
    if let Err(error) = emptied {
        let left: Vec<_> = living()
            .iter()
            .map(|(key, flow)| {
                let kind = if key.direction == FORWARD {
                    "forward"
                } else {
                    "reply"
                };
                let port = key.client_port;
                format!(
                    "{kind} of port {port}, FINs {} {}",
                    flow.client_fin, flow.pod_fin
                )
            })
            .collect();
        panic!(
            "{error}: {} entries: {:#?}",
            left.len(),
            &left[..left.len().min(9)]
        );
    }
}

/// Steers each flow's packets to one processor, as a NIC with queues does. On a veth a client's ACK and
/// its request race on two of them, and now and then (one in 300,000 on a busy machine) the pod's own
/// kernel answers a segment of an established connection with a RST; with steering none was seen.
fn keep_flows_on_one_cpu(pod: &Namespace) {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mask = u32::MAX >> (32 - processors.min(32));
    // `ip netns exec` for once: it shows the namespace's own /sys/class/net.
    let file = "/sys/class/net/eth0/queues/rx-0/rps_cpus";
    let script = format!("echo {mask:x} > {file}");
    let words = ["netns", "exec", pod.name(), "sh", "-c", &script];
    run(Command::new("ip").args(words)).expect("RPS");
}
