//! Very many short connections while no agent runs: the tables empty themselves.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::process::Command;
use std::time::Duration;

use ironlb_tests::{API_PORT, Load, Namespace, VIP, run, wait_until};
use lb_common::layout::{DEFAULT_LIVING_FLOWS, FORWARD, map};
use lb_common::verdict::Verdict;

use crate::scene::{Mode, Scene, connect, get, in_both_modes};

in_both_modes!(
    short_connections_leave_room_for_more_without_an_agent,
    connections_that_say_nothing_leave_nothing,
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
