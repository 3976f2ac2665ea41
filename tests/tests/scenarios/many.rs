//! Very many short connections while no agent runs: the tables empty themselves.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use ironlb_tests::{API_PORT, Load, VIP};
use lb_common::layout::{DEFAULT_LIVING_FLOWS, map};
use lb_common::verdict::Verdict;

use crate::scene::{Mode, Scene, get, in_both_modes};

in_both_modes!(short_connections_leave_room_for_more_without_an_agent);

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
    let load = Load {
        sources,
        target: SocketAddrV4::new(VIP, API_PORT),
        count: CONNECTIONS,
        limit: Duration::from_secs(120),
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
    ironlb_tests::wait_until("no flow is living", Duration::from_secs(5), || {
        Ok(scene.maps().living(map::LIVING)?.is_empty()
            && scene.maps().living(map::LIVING_REPLY)?.is_empty())
    })
    .expect("empty tables");
}
