use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use proptest::prelude::*;

use super::*;
use crate::desired::{Announce, InstancePorts, PassSpec, PortSpec, Refuse, VipSpec};
use crate::tables::PeerLink;

const VIP: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 22, 0, 2));

fn vip(address: IpAddr) -> VipSpec {
    VipSpec {
        address,
        announce: Announce::Always,
        candidate: true,
        refuse: Refuse::Reject,
        pass: vec![],
    }
}

fn pod(number: u8) -> IpAddr {
    IpAddr::from([10, 244, 0, number])
}

fn backend(number: u8) -> BackendSpec {
    BackendSpec {
        instance: format!("ironic-{number:02}"),
        slot: Some(number.into()),
        address: pod(number),
        node: None,
        uid: String::new(),
        ready: true,
        draining: false,
        ports: None,
    }
}

fn port(name: &str, port: u16, target_port: u16) -> PortSpec {
    PortSpec {
        name: name.into(),
        port,
        target_port,
    }
}

fn range(port_name: &str, base: u16, last: u16) -> InstancePorts {
    InstancePorts {
        port_name: port_name.into(),
        target_port: 8080,
        base,
        last,
        except: BTreeSet::new(),
    }
}

fn ironic(backends: u8) -> ServiceSpec {
    ServiceSpec {
        precedence: 0,
        name: "ironic".into(),
        vip: VIP,
        ports: vec![port("images", 6180, 8080), port("api", 6385, 6385)],
        instance_ports: vec![range("images", 6200, 6231)],
        client_affinity: false,
        source_ranges: None,
        health: None,
        backends: (0..backends).map(backend).collect(),
    }
}

fn state(services: Vec<ServiceSpec>) -> DesiredState {
    DesiredState {
        uplinks: vec![],
        vips: vec![vip(VIP)],
        services,
        peers: None,
    }
}

/// Backends of a VIP port as `instance:port`, with `!` in front of those that are not eligible.
fn leads_to(tables: &TableSet, port: u16) -> Vec<String> {
    let row = &tables.ports[&(VIP, port)];
    let text = |backend: &BackendRow| {
        let mark = if backend.eligible { "" } else { "!" };
        format!("{mark}{}:{}", backend.instance, backend.port)
    };
    row.backends.iter().map(text).collect()
}

fn messages(warnings: &[Warning]) -> Vec<String> {
    warnings.iter().map(ToString::to_string).collect()
}

#[test]
fn shared_ports_lead_to_all_and_instance_ports_to_one() {
    let (tables, warnings) = plan(
        &state(vec![ironic(2)]),
        &Health::default(),
        &Nodes::default(),
    );
    assert_eq!(warnings, []);
    let ports: Vec<_> = tables.ports.keys().map(|(_, port)| *port).collect();
    // Slots 2 to 31 have no backend: no row, so the data plane refuses them.
    assert_eq!(ports, [6180, 6200, 6201, 6385]);
    assert_eq!(
        leads_to(&tables, 6180),
        ["ironic-00:8080", "ironic-01:8080"]
    );
    assert_eq!(
        leads_to(&tables, 6385),
        ["ironic-00:6385", "ironic-01:6385"]
    );
    assert_eq!(leads_to(&tables, 6200), ["ironic-00:8080"]);
    assert_eq!(leads_to(&tables, 6201), ["ironic-01:8080"]);
    let row = &tables.ports[&(VIP, 6201)];
    assert_eq!((row.slot, row.port_name.as_str()), (Some(1), "images"));
    assert_eq!(row.seed, name_hash("ironic"));
    assert_eq!(tables.ports[&(VIP, 6385)].slot, None);
}

#[test]
fn a_backend_that_is_not_ready_stays_without_being_eligible() {
    let mut service = ironic(3);
    service.backends[0].ready = false;
    let mut health = Health::default();
    assert!(health.set("ironic", pod(1), false));
    assert!(!health.set("ironic", pod(1), false), "no news");
    health.set("another service", pod(2), false);
    let wanted = state(vec![service]);

    let (tables, _) = plan(&wanted, &health, &Nodes::default());
    assert_eq!(
        leads_to(&tables, 6385),
        ["!ironic-00:6385", "!ironic-01:6385", "ironic-02:6385"]
    );
    // An instance port is never another's: it refuses.
    assert_eq!(leads_to(&tables, 6200), ["!ironic-00:8080"]);

    assert!(health.set("ironic", pod(1), true));
    // A check cannot make ready what the source says is not.
    health.set("ironic", pod(0), true);
    let (tables, _) = plan(&wanted, &health, &Nodes::default());
    assert_eq!(
        leads_to(&tables, 6385),
        ["!ironic-00:6385", "ironic-01:6385", "ironic-02:6385"]
    );
}

/// What each state of two pods lets them serve: of the shared port, and of the instance port that they
/// share as two incarnations.
#[test]
fn draining_backends_serve_where_nobody_is_ready() {
    const READY: (bool, bool) = (true, false);
    const DRAINING: (bool, bool) = (false, true);
    const NEITHER: (bool, bool) = (false, false);
    let cases = [
        (READY, READY, ["00", "01"].as_slice(), ["00"].as_slice()),
        (READY, DRAINING, &["00"], &["00"]),
        (DRAINING, READY, &["01"], &["01"]),
        (DRAINING, DRAINING, &["00", "01"], &["00"]),
        (NEITHER, DRAINING, &["01"], &["01"]),
        (NEITHER, NEITHER, &[], &[]),
    ];
    for (first, second, shared, instance) in cases {
        let mut service = ironic(2);
        for (backend, (ready, draining)) in service.backends.iter_mut().zip([first, second]) {
            (backend.ready, backend.draining) = (ready, draining);
            backend.slot = Some(3);
        }
        let (tables, warnings) = plan(&state(vec![service]), &Health::default(), &Nodes::default());
        assert_eq!(warnings, []);
        let eligible = |port| -> Vec<String> {
            let all = leads_to(&tables, port);
            assert_eq!(all.len(), 2, "nobody's flows end");
            let takes = all.into_iter().filter(|name| !name.starts_with('!'));
            takes.map(|name| name[7..9].to_owned()).collect()
        };
        let what = format!("{first:?} and {second:?}");
        assert_eq!(eligible(6385), shared, "shared port of {what}");
        assert_eq!(eligible(6203), instance, "instance port of {what}");
    }
}

#[test]
fn a_drain_helps_no_backend_whose_checks_fail() {
    let mut service = ironic(2);
    service.backends[0].draining = true;
    service.backends[0].ready = false;
    let mut health = Health::default();
    health.set("ironic", pod(1), false);
    let wanted = state(vec![service]);
    let (tables, _) = plan(&wanted, &health, &Nodes::default());
    assert_eq!(
        leads_to(&tables, 6385),
        ["ironic-00:6385", "!ironic-01:6385"]
    );
    health.set("ironic", pod(0), false);
    let (tables, _) = plan(&wanted, &health, &Nodes::default());
    assert_eq!(
        leads_to(&tables, 6385),
        ["!ironic-00:6385", "!ironic-01:6385"]
    );
}

#[test]
fn a_backend_with_ports_of_its_own_has_no_others() {
    let mut service = ironic(3);
    service.backends[0].ports = Some(BTreeMap::from([("api".into(), 7385)]));
    service.backends[1].ports = Some(BTreeMap::from([("images".into(), 7180)]));
    let (tables, warnings) = plan(&state(vec![service]), &Health::default(), &Nodes::default());
    assert_eq!(warnings, []);
    assert_eq!(
        leads_to(&tables, 6385),
        ["ironic-00:7385", "ironic-02:6385"]
    );
    assert_eq!(
        leads_to(&tables, 6180),
        ["ironic-01:7180", "ironic-02:8080"]
    );
    assert!(!tables.ports.contains_key(&(VIP, 6200)), "it has no images");
    assert_eq!(leads_to(&tables, 6201), ["ironic-01:7180"]);
}

#[test]
fn a_service_without_backends_keeps_its_shared_ports() {
    let (tables, warnings) = plan(
        &state(vec![ironic(0)]),
        &Health::default(),
        &Nodes::default(),
    );
    assert_eq!(warnings, []);
    assert_eq!(tables.ports.len(), 2);
    assert!(leads_to(&tables, 6385).is_empty());
}

#[test]
fn backend_65_and_later_are_unused_by_order_of_instance() {
    let mut service = ironic(66);
    service.instance_ports = vec![range("images", 7000, 7100)];
    service.backends.reverse();
    let (tables, warnings) = plan(&state(vec![service]), &Health::default(), &Nodes::default());
    let rows = leads_to(&tables, 6385);
    assert_eq!(rows.len(), MAX_BACKENDS_PER_PORT);
    assert_eq!(rows[63], "ironic-63:6385");
    assert!(!tables.ports.contains_key(&(VIP, 7064)));
    assert_eq!(
        messages(&warnings),
        [
            "service ironic: ironic-64 is unused; at most 64 backends a service",
            "service ironic: ironic-65 is unused; at most 64 backends a service",
        ]
    );
}

#[test]
fn the_ninth_vip_port_to_one_pod_port_loses() {
    let mut service = ironic(1);
    service.ports = (0..9)
        .map(|at| port(&format!("p{at}"), 9000 - at, 80))
        .collect();
    service.instance_ports = vec![];
    let (tables, warnings) = plan(&state(vec![service]), &Health::default(), &Nodes::default());
    assert_eq!(leads_to(&tables, 8992), ["ironic-00:80"]);
    assert_eq!(leads_to(&tables, 8999), ["ironic-00:80"]);
    assert!(leads_to(&tables, 9000).is_empty());
    assert_eq!(
        messages(&warnings),
        [
            "service ironic: port 9000 of 172.22.0.2 does not lead to ironic-00 (10.244.0.0:80); \
             at most 8 VIP ports may lead to one pod port"
        ]
    );
}

#[test]
fn a_port_that_two_services_want_stays_with_the_first_by_name() {
    let mut late = ironic(1);
    late.name = "zinc".into();
    late.backends[0].address = pod(200);
    late.ports.push(port("metrics", 9608, 9608));
    let (tables, warnings) = plan(
        &state(vec![late, ironic(1)]),
        &Health::default(),
        &Nodes::default(),
    );
    assert_eq!(tables.ports[&(VIP, 6385)].service, "ironic");
    assert_eq!(tables.ports[&(VIP, 9608)].service, "zinc");
    assert!(
        messages(&warnings).contains(
            &"service zinc: port 6385 of 172.22.0.2 is already taken by service ironic".to_owned()
        ),
        "{warnings:#?}"
    );
}

#[test]
fn ranges_that_do_not_fit_lose_alone() {
    let mut service = ironic(1);
    service.instance_ports[0].except.insert(6201);
    service.backends.push(backend(1));
    service.backends.push(BackendSpec {
        slot: Some(40),
        ..backend(9)
    });
    service.backends.push(BackendSpec {
        slot: None,
        ..backend(10)
    });
    let (tables, warnings) = plan(&state(vec![service]), &Health::default(), &Nodes::default());
    let ports: Vec<_> = tables.ports.keys().map(|(_, port)| *port).collect();
    assert_eq!(ports, [6180, 6200, 6385]);
    assert_eq!(leads_to(&tables, 6200), ["ironic-00:8080"]);
    assert_eq!(leads_to(&tables, 6385).len(), 4);
    assert_eq!(
        messages(&warnings),
        [
            "service ironic: instance ports `images` end before slot 40 of ironic-09; it has no port there",
        ]
    );
}

#[test]
fn a_service_on_a_foreign_vip_is_not_served() {
    let mut service = ironic(1);
    service.vip = pod(99);
    let (tables, warnings) = plan(&state(vec![service]), &Health::default(), &Nodes::default());
    assert!(tables.ports.is_empty());
    assert_eq!(
        messages(&warnings),
        ["service ironic: 10.244.0.99 is not a VIP of this agent; the service is not served"]
    );
}

#[test]
fn pass_is_sorted_once_each_and_bounded() {
    let mut wanted = state(vec![]);
    wanted.vips[0].pass = [9, 3, 3, 5, 1, 2, 4, 8, 7, 6]
        .map(|port| PassSpec { protocol: 17, port })
        .into();
    let (tables, warnings) = plan(&wanted, &Health::default(), &Nodes::default());
    let ports: Vec<_> = tables.vips[&VIP].pass.iter().map(|p| p.port).collect();
    assert_eq!(ports, [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(warnings, [Warning::TooManyPasses { vip: VIP }]);
}

#[test]
fn ports_beyond_the_maps_lose_in_order() {
    let mut service = ironic(1);
    service.instance_ports = vec![];
    service.ports = (0..=MAX_PORTS as u16)
        .rev()
        .map(|at| port(&format!("p{at}"), 1000 + at, 1000 + at))
        .collect();
    let (tables, warnings) = plan(&state(vec![service]), &Health::default(), &Nodes::default());
    assert_eq!(tables.ports.len(), MAX_PORTS as usize);
    let beyond = 1000 + MAX_PORTS as u16;
    assert!(!tables.ports.contains_key(&(VIP, beyond)));
    assert!(
        matches!(&warnings[..], [Warning::TablesFull { port, .. }] if *port == beyond),
        "{warnings:#?}"
    );
}

/// Desired states with few names and numbers, so that everything that can clash does.
fn any_state() -> impl Strategy<Value = DesiredState> {
    // Instances are unique in a service; the same pods may be in several.
    let backends = prop::collection::btree_map(
        0..9_u8,
        (prop::option::of(0..6_u32), any::<(bool, bool)>()),
        0..8,
    );
    let ports = prop::collection::btree_map("[a-d]", (80..90_u16, 80..83_u16), 1..5);
    let ranges = prop::collection::btree_map("[a-e]", (80..90_u16, 0..6_u16), 0..3);
    let service = (0..3_u8, ports, ranges, backends, any::<bool>());
    let services = prop::collection::btree_map("[a-d]", service, 0..4);
    (services, prop::collection::vec((1..20_u8, 0..3_u16), 0..12)).prop_map(|(services, pass)| {
        DesiredState {
            uplinks: vec![],
            vips: (0..2)
                .map(|number| VipSpec {
                    pass: pass
                        .iter()
                        .map(|&(protocol, port)| PassSpec { protocol, port })
                        .collect(),
                    ..vip([172, 22, 0, number].into())
                })
                .collect(),
            peers: None,
            services: services
                .into_iter()
                .map(
                    |(name, (vip, ports, ranges, backends, client_affinity))| ServiceSpec {
                        precedence: 0,
                        name,
                        vip: [172, 22, 0, vip].into(),
                        ports: ports
                            .into_iter()
                            .map(|(name, (number, target))| port(&name, number, target))
                            .collect(),
                        instance_ports: ranges
                            .into_iter()
                            .map(|(name, (base, length))| range(&name, base, base + length))
                            .collect(),
                        client_affinity,
                        source_ranges: None,
                        health: None,
                        backends: backends
                            .into_iter()
                            .map(|(number, (slot, (ready, draining)))| BackendSpec {
                                slot,
                                ready,
                                draining,
                                ..backend(number)
                            })
                            .collect(),
                    },
                )
                .collect(),
        }
    })
}

/// A state and the same with every list in another order.
fn shuffled_pairs() -> impl Strategy<Value = (DesiredState, DesiredState)> {
    any_state().prop_flat_map(|state| {
        let other = state.clone();
        let DesiredState {
            uplinks,
            vips,
            services,
            peers,
        } = state.clone();
        let services: Vec<_> = services
            .into_iter()
            .map(|service| {
                let lists = (
                    Just(service.ports.clone()).prop_shuffle(),
                    Just(service.instance_ports.clone()).prop_shuffle(),
                    Just(service.backends.clone()).prop_shuffle(),
                );
                lists.prop_map(move |(ports, instance_ports, backends)| ServiceSpec {
                    ports,
                    instance_ports,
                    backends,
                    ..service.clone()
                })
            })
            .collect();
        let vips: Vec<_> = vips
            .into_iter()
            .map(|vip| {
                let pass = Just(vip.pass.clone()).prop_shuffle();
                pass.prop_map(move |pass| VipSpec {
                    pass,
                    ..vip.clone()
                })
            })
            .collect();
        (vips.prop_shuffle(), services.prop_shuffle()).prop_map(move |(vips, services)| {
            let shuffled = DesiredState {
                uplinks: uplinks.clone(),
                vips,
                services,
                peers: peers.clone(),
            };
            (other.clone(), shuffled)
        })
    })
}

proptest! {
    #[test]
    fn the_order_of_lists_means_nothing((state, shuffled) in shuffled_pairs()) {
        prop_assert_eq!(
            plan(&state, &Health::default(), &Nodes::default()),
            plan(&shuffled, &Health::default(), &Nodes::default())
        );
    }

    #[test]
    fn whatever_is_wanted_the_tables_keep_the_limits_of_the_data_plane(state in any_state()) {
        let (tables, _) = plan(&state, &Health::default(), &Nodes::default());
        let mut leading: BTreeMap<_, usize> = BTreeMap::new();
        for ((vip, _), row) in &tables.ports {
            prop_assert!(tables.vips.contains_key(vip));
            prop_assert!(row.backends.len() <= MAX_BACKENDS_PER_PORT);
            prop_assert!(row.backends.is_sorted_by_key(|backend| &backend.instance));
            if row.slot.is_some() {
                prop_assert!(row.backends.iter().filter(|b| b.eligible).count() <= 1);
            }
            for backend in &row.backends {
                *leading.entry((backend.address, backend.port)).or_default() += 1;
            }
        }
        prop_assert!(leading.values().all(|count| *count <= MAX_VIP_PORTS_PER_POD_PORT));
        for row in tables.vips.values() {
            prop_assert!(row.pass.len() <= MAX_PASS);
        }
    }
}

#[test]
fn of_many_warnings_of_a_kind_ten_are_told() {
    let mut service = ironic(0);
    service.backends = (0..80).map(backend).collect();
    service.instance_ports.clear();
    let mut other = ironic(0);
    other.name = "other".into();
    other.instance_ports.clear();
    let (_, warnings) = plan(
        &state(vec![service, other]),
        &Health::default(),
        &Nodes::default(),
    );
    assert_eq!(warnings.len(), 18, "{warnings:?}");
    let told = sentences(&warnings);
    assert_eq!(told.len(), 13, "{told:#?}");
    assert_eq!(
        told[0],
        "service other: port 6180 of 172.22.0.2 is already taken by service ironic"
    );
    assert_eq!(
        told[2],
        "service ironic: ironic-64 is unused; at most 64 backends a service"
    );
    assert_eq!(told[12], "and 6 more like it");
}

#[test]
fn instances_are_in_the_order_of_people() {
    let sorted = [
        "",
        "1x",
        "02",
        "2",
        "10",
        "ironic",
        "ironic1",
        "ironic-0",
        "ironic-02",
        "ironic-2",
        "ironic-9",
        "ironic-10",
        "ironic-10-a",
        "ironic-18446744073709551616",
        "ironic-a",
    ];
    for (at, a) in sorted.iter().enumerate() {
        for (other, b) in sorted.iter().enumerate() {
            assert_eq!(natural(a, b), at.cmp(&other), "{a} {b}");
        }
    }
}

#[test]
fn a_backend_too_many_loses_and_not_one_that_serves() {
    let mut service = ironic(0);
    service.instance_ports.clear();
    let named = |number: u8| BackendSpec {
        instance: format!("ironic-{number}"),
        ..backend(number)
    };
    service.backends = (0..65).map(named).collect();
    let (tables, warnings) = plan(&state(vec![service]), &Health::default(), &Nodes::default());
    assert_eq!(
        messages(&warnings),
        ["service ironic: ironic-64 is unused; at most 64 backends a service"]
    );
    assert_eq!(leads_to(&tables, 6385)[10], "ironic-10:6385");
}

#[test]
fn an_address_that_a_node_has_lost_still_names_it_until_another_has_it() {
    let lost: IpAddr = "172.22.0.13".parse().expect("valid");
    let backend = |node: IpAddr| BackendSpec {
        instance: "ironic-0".into(),
        slot: None,
        address: "10.244.0.11".parse().expect("valid"),
        node: Some(node.to_string()),
        uid: String::new(),
        ready: true,
        draining: false,
        ports: None,
    };
    let mut nodes = Nodes {
        name: "here".into(),
        addresses: BTreeSet::from([lost]),
        ..Nodes::default()
    };
    nodes.remember();
    nodes.addresses.clear();
    nodes.remember();
    assert!(nodes.is_here(&backend(lost)));
    let link = PeerLink {
        mac: [2; 6],
        addresses: vec![lost],
    };
    let peer = PeerRow {
        links: BTreeMap::from([(0, link)]),
        ..PeerRow::default()
    };
    nodes.peers.insert("there".into(), peer);
    nodes.remember();
    assert!(!nodes.is_here(&backend(lost)));
    nodes.peers.get_mut("there").expect("above").links.clear();
    nodes.remember();
    assert!(!nodes.is_here(&backend(lost)), "it was there last");
}

#[test]
fn a_port_without_room_for_its_source_ranges_is_not_open_to_all() {
    let ranges = |count: u16, second: u8| {
        let net = |n: u16| {
            let [a, b] = n.to_be_bytes();
            IpNet::new(IpAddr::from([10, second, a, b]), 32).expect("a network")
        };
        Some((0..count).map(net).collect::<BTreeSet<_>>())
    };
    let service = |name: &str, number, precedence, source_ranges| ServiceSpec {
        name: name.into(),
        precedence,
        ports: vec![port("api", number, 6385)],
        instance_ports: vec![],
        source_ranges,
        ..ironic(1)
    };
    let limit = MAX_SOURCE_RANGES as u16;
    let services = vec![
        service("a", 1, 2, ranges(2, 1)),
        service("b", 2, 1, ranges(limit - 1, 2)),
        service("c", 3, 0, ranges(1, 3)),
        // Equal lists are one.
        service("d", 4, 3, ranges(limit - 1, 2)),
        service("e", 5, 4, None),
    ];
    let (tables, warnings) = plan(&state(services), &Health::default(), &Nodes::default());
    let ports: Vec<_> = tables.ports.keys().map(|(_, port)| *port).collect();
    assert_eq!(ports, [2, 3, 4, 5]);
    assert_eq!(
        messages(&warnings),
        [
            "service a: port 1 of 172.22.0.2 is not served, for want of room for its source ranges; at most 2048 an agent, equal lists counted once"
        ]
    );
}
