use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::config::parse_cluster;
use crate::tables::TableSet;

const NODE: &str = "node-a";
/// Two VIPs for metal3, one of them to give away, and one for everybody.
const CONFIG: &str = r#"
apiVersion: ironlb.dev/v1
uplinks: [{subnet: 172.22.0.0/24}]
vips:
  - {address: 172.22.0.2, nodes: [node-a], namespaces: [metal3], pass: [tcp/22]}
  - {address: 172.22.0.3, nodes: [node-a], namespaces: [metal3], autoAssign: true}
  - {address: 172.22.0.9, announce: external, namespaces: ["*"]}
"#;

fn config(text: &str) -> Arc<ClusterConfig> {
    Arc::new(parse_cluster(Path::new("lb.yaml"), text).expect("a good configuration"))
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// Puts `more` over `value` as a JSON merge patch does: null removes.
fn merge(value: &mut Value, more: Value) {
    let Value::Object(more) = more else {
        *value = more;
        return;
    };
    if !value.is_object() {
        *value = json!({});
    }
    let members = value.as_object_mut().expect("made one above");
    for (key, more) in more {
        if more.is_null() {
            members.remove(&key);
        } else {
            merge(members.entry(key).or_insert(Value::Null), more);
        }
    }
}

/// A Service of ours with the ports `api` 6385 and `images` 6180, changed by `more`. Later minutes are younger.
fn service(name: &str, minute: u32, more: Value) -> Arc<Service> {
    let (namespace, name) = name.split_once('/').expect("namespace/name");
    let mut value = json!({
        "metadata": {
            "namespace": namespace, "name": name, "uid": format!("uid-of-{name}"),
            "creationTimestamp": format!("2026-01-01T00:{minute:02}:00Z"),
            "annotations": {VIP: "172.22.0.2"},
        },
        "spec": {
            "type": "LoadBalancer",
            "loadBalancerClass": CLASS,
            "ports": [
                {"name": "images", "port": 6180, "targetPort": "images", "protocol": "TCP"},
                {"name": "api", "port": 6385, "protocol": "TCP"},
            ],
        },
    });
    merge(&mut value, more);
    Arc::new(serde_json::from_value(value).expect("a Service"))
}

fn annotated(name: &str, minute: u32, annotations: Value) -> Arc<Service> {
    service(
        name,
        minute,
        json!({"metadata": {"annotations": annotations}}),
    )
}

/// An endpoint of the pod `name`, whose UID is `uid-<name>`, on this node.
fn endpoint(name: &str, address: &str) -> Value {
    json!({
        "addresses": [address],
        "nodeName": NODE,
        "conditions": {"ready": true, "serving": true, "terminating": false},
        "targetRef": {"kind": "Pod", "namespace": "metal3", "name": name, "uid": format!("uid-{name}")},
    })
}

fn with(mut value: Value, more: Value) -> Value {
    merge(&mut value, more);
    value
}

/// A slice of metal3/ironic with both ports.
fn slice(name: &str, endpoints: &[Value]) -> Arc<EndpointSlice> {
    slice_of("metal3/ironic", name, json!({"endpoints": endpoints}))
}

fn slice_of(service: &str, name: &str, more: Value) -> Arc<EndpointSlice> {
    let (namespace, service) = service.split_once('/').expect("namespace/name");
    let mut value = json!({
        "metadata": {"namespace": namespace, "name": name, "labels": {SERVICE_NAME: service}},
        "addressType": "IPv4",
        "endpoints": [],
        "ports": [
            {"name": "api", "port": 6385, "protocol": "TCP"},
            {"name": "images", "port": 6180, "protocol": "TCP"},
        ],
    });
    merge(&mut value, more);
    Arc::new(serde_json::from_value(value).expect("an EndpointSlice"))
}

fn pod(name: &str, more: Value) -> Arc<Pod> {
    let mut value = json!({
        "metadata": {"namespace": "metal3", "name": name, "uid": format!("uid-{name}")},
        "spec": {"containers": [{"name": "ironic"}]},
    });
    merge(&mut value, more);
    Arc::new(serde_json::from_value(value).expect("a Pod"))
}

fn stateful(name: &str) -> Arc<Pod> {
    let (_, index) = name.rsplit_once('-').expect("an ordinal");
    pod(name, json!({"metadata": {"labels": {POD_INDEX: index}}}))
}

fn daemon(name: &str) -> Arc<Pod> {
    let owner = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "ironic", "uid": "d", "controller": true});
    pod(name, json!({"metadata": {"ownerReferences": [owner]}}))
}

/// A world of metal3/ironic at 172.22.0.2 with these slices.
fn ironic(slices: &[Arc<EndpointSlice>]) -> Snapshot {
    Snapshot {
        services: vec![service("metal3/ironic", 0, json!({}))],
        slices: slices.to_vec(),
        pods: vec![],
    }
}

/// The pods that slices name, in addition to those that are there, and with the addresses that slices give them.
fn with_pods(snapshot: &Snapshot) -> Snapshot {
    let mut all: BTreeMap<String, Value> = snapshot
        .pods
        .iter()
        .map(|pod| {
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            (uid, serde_json::to_value(&**pod).expect("JSON"))
        })
        .collect();
    let mut slices: Vec<_> = snapshot.slices.iter().collect();
    slices.sort_by_key(|slice| (&slice.metadata.namespace, &slice.metadata.name));
    for slice in slices {
        for endpoint in slice.endpoints.iter().flatten() {
            let Some(target) = &endpoint.target_ref else {
                continue;
            };
            let uid = target.uid.clone().unwrap_or_default();
            let pod = all.entry(uid.clone()).or_insert_with(|| {
                json!({"metadata": {"name": target.name, "namespace": slice.metadata.namespace, "uid": uid}})
            });
            let addresses = endpoint.addresses.iter().map(|ip| json!({"ip": ip}));
            let mut ips = pod["status"]["podIPs"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            ips.extend(addresses);
            pod["status"]["podIPs"] = ips.into();
        }
    }
    let pods = all
        .into_values()
        .map(|pod| Arc::new(serde_json::from_value(pod).expect("a Pod")));
    Snapshot {
        pods: pods.collect(),
        services: snapshot.services.clone(),
        slices: snapshot.slices.clone(),
    }
}

/// Translates with the pods that slices name: what becomes of others has a test of its own.
fn translate(config: &Arc<ClusterConfig>, snapshot: &Snapshot) -> Translation {
    super::translate(config, &with_pods(snapshot))
}

fn run(snapshot: &Snapshot) -> Translation {
    translate(&config(CONFIG), snapshot)
}

#[test]
fn an_endpoint_is_used_only_with_the_address_of_its_own_pod_in_its_own_namespace() {
    let address = |ip: &str| json!({"status": {"podIPs": [{"ip": ip}]}});
    let pods = vec![
        pod("ironic-0", address("10.244.0.10")),
        pod("ironic-1", address("10.244.0.99")),
        pod(
            "ironic-2",
            with(
                address("10.244.0.12"),
                json!({"metadata": {"namespace": "tenant"}}),
            ),
        ),
    ];
    let endpoints = [
        endpoint("ironic-0", "10.244.0.10"),
        endpoint("ironic-1", "10.244.0.11"),
        endpoint("ironic-2", "10.244.0.12"),
        endpoint("ghost", "10.250.0.11"),
        with(
            endpoint("ironic-0", "10.244.0.14"),
            json!({"targetRef": {"name": "other"}}),
        ),
    ];
    let snapshot = Snapshot {
        pods,
        ..ironic(&[slice("a", &endpoints)])
    };
    let translation = super::translate(&config(CONFIG), &snapshot);
    assert_eq!(
        leads_to(&translation, NODE)["172.22.0.2:6385"],
        ["ironic-0:6385"]
    );
    let told = problems(&translation, "metal3/ironic").join("\n");
    for address in ["10.244.0.11", "10.244.0.12", "10.244.0.14"] {
        assert!(
            told.contains(&format!("endpoint {address} is not used")),
            "{told}"
        );
    }
    let trusting = CONFIG.replace(
        "uplinks",
        "kubernetes: {endpointsWithoutPods: true}\nuplinks",
    );
    let translation = super::translate(&config(&trusting), &snapshot);
    assert_eq!(leads_to(&translation, NODE)["172.22.0.2:6385"].len(), 5);
}

#[test]
fn a_service_that_lacks_one_of_its_ports_is_served_and_does_not_show_the_vip() {
    let snapshot = Snapshot {
        services: vec![
            service(
                "metal3/old",
                0,
                json!({"spec": {"ports": [{"name": "api", "port": 6385}]}}),
            ),
            service("metal3/new", 1, json!({})),
        ],
        ..Snapshot::default()
    };
    let translation = run(&snapshot);
    let outcome = |name: &str| translation.outcomes()[name].vips.len();
    assert_eq!((outcome("metal3/old"), outcome("metal3/new")), (1, 0));
    assert!(leads_to(&translation, NODE).contains_key("172.22.0.2:6180"));
}

#[test]
fn a_target_port_that_no_pod_has_is_told() {
    let slice = slice_of(
        "metal3/ironic",
        "a",
        json!({
            "endpoints": [endpoint("ironic-0", "10.244.0.10")],
            "ports": [{"name": "api", "port": 6385, "protocol": "TCP"}],
        }),
    );
    let told = problems(&run(&ironic(&[slice])), "metal3/ironic");
    assert_eq!(
        told,
        ["port `images` leads nowhere: none of its pods has its targetPort"]
    );
}

#[test]
fn who_has_a_pod_port_keeps_it_when_others_want_it_too() {
    let one = |name: &str, minute: u32, port: u16| {
        let ports = json!({"spec": {"ports": [{"name": "api", "port": port}]}});
        service(&format!("metal3/{name}"), minute, ports)
    };
    let mut services = vec![one("victim", 0, 9000)];
    services.extend((1..=8).map(|n| one(&format!("thief-{n}"), n, 100 + n as u16)));
    let slices = services.iter().map(|service| {
        let name = format!(
            "metal3/{}",
            service.metadata.name.as_deref().unwrap_or_default()
        );
        let endpoints = json!({"endpoints": [endpoint("ironic-0", "10.244.0.10")]});
        slice_of(&name, &format!("of-{}", name.replace('/', "-")), endpoints)
    });
    let slices = slices.collect();
    let translation = run(&Snapshot {
        services,
        slices,
        ..Snapshot::default()
    });
    let (tables, warnings) = plan_of(&translation, NODE);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert_eq!(tables.ports[&(ip("172.22.0.2"), 9000)].backends.len(), 1);
    assert_eq!(
        tables.ports[&(ip("172.22.0.2"), 108)].backends.len(),
        0,
        "the youngest"
    );
}

/// What the plan makes of a node's share, with all nodes at work.
fn plan_of(translation: &Translation, node: &str) -> (TableSet, Vec<Warning>) {
    let state = translation.desired(node);
    plan::plan(&state, &Health::default(), &Nodes::all_of(&state, node))
}

fn problems(translation: &Translation, service: &str) -> Vec<String> {
    let outcome = &translation.outcomes()[service];
    outcome.problems.iter().map(ToString::to_string).collect()
}

/// What VIP ports of this node lead to, as the plan decides it: `pod:port`, `!` if it takes no new flows.
fn leads_to(translation: &Translation, node: &str) -> BTreeMap<String, Vec<String>> {
    let (tables, warnings) = plan_of(translation, node);
    assert_eq!(warnings, []);
    let name = |backend: &crate::tables::BackendRow| {
        let mark = if backend.eligible { "" } else { "!" };
        format!("{mark}{}:{}", backend.instance, backend.port)
    };
    tables
        .ports
        .iter()
        .map(|((vip, port), row)| {
            (
                format!("{vip}:{port}"),
                row.backends.iter().map(name).collect(),
            )
        })
        .collect()
}

fn port(snapshot: &Snapshot, place: &str) -> Vec<String> {
    leads_to(&run(snapshot), NODE)
        .remove(place)
        .unwrap_or_else(|| panic!("{place} is not served"))
}

#[test]
fn a_service_of_the_class_is_served_with_its_pods() {
    let pods = [
        endpoint("ironic-0", "10.244.0.10"),
        endpoint("ironic-1", "10.244.0.11"),
    ];
    let translation = run(&ironic(&[slice("a", &pods)]));
    assert_eq!(
        leads_to(&translation, NODE),
        BTreeMap::from([
            (
                "172.22.0.2:6180".into(),
                vec!["ironic-0:6180".into(), "ironic-1:6180".into()]
            ),
            (
                "172.22.0.2:6385".into(),
                vec!["ironic-0:6385".into(), "ironic-1:6385".into()]
            ),
        ])
    );
    let state = translation.desired(NODE);
    assert_eq!(state.uplinks.len(), 1);
    assert_eq!(state.services[0].name, "metal3/ironic");
    assert_eq!(state.services[0].backends[1].uid, "uid-ironic-1");
    assert!(!state.services[0].client_affinity);
    let outcome = &translation.outcomes()["metal3/ironic"];
    assert_eq!(outcome.vips, BTreeSet::from([ip("172.22.0.2")]));
    assert_eq!(outcome.assigned.as_deref(), Some("172.22.0.2"));
    assert_eq!(outcome.problems, BTreeSet::new());
}

#[test]
fn a_service_is_ours_by_type_and_class() {
    let other_config = CONFIG.replace("uplinks", "kubernetes: {defaultClass: true}\nuplinks");
    let cases = [
        (json!({}), true, true),
        (json!({"type": "ClusterIP"}), false, false),
        (json!({"type": "NodePort"}), false, false),
        (
            json!({"loadBalancerClass": "example.com/other"}),
            false,
            false,
        ),
        (json!({"loadBalancerClass": null}), false, true),
        (
            json!({"loadBalancerClass": null, "type": "ClusterIP"}),
            false,
            false,
        ),
        (json!({"allocateLoadBalancerNodePorts": false}), true, true),
    ];
    for (spec, ours, ours_as_default) in cases {
        let snapshot = Snapshot {
            services: vec![service("metal3/ironic", 0, json!({"spec": spec}))],
            ..Snapshot::default()
        };
        for (text, expected) in [(CONFIG, ours), (&other_config, ours_as_default)] {
            let translation = translate(&config(text), &snapshot);
            let served = !translation.desired(NODE).services.is_empty();
            assert_eq!(served, expected, "{spec}");
            assert_eq!(
                translation.outcomes().contains_key("metal3/ironic"),
                expected
            );
        }
    }
}

#[test]
fn client_ip_affinity_is_kept() {
    let affine = json!({"spec": {"sessionAffinity": "ClientIP"}});
    let snapshot = Snapshot {
        services: vec![service("metal3/ironic", 0, affine)],
        ..Snapshot::default()
    };
    assert!(run(&snapshot).desired(NODE).services[0].client_affinity);
}

#[test]
fn a_service_without_endpoints_is_served_and_refuses() {
    let translation = run(&ironic(&[]));
    assert_eq!(
        leads_to(&translation, NODE)["172.22.0.2:6385"],
        Vec::<String>::new()
    );
    let outcome = &translation.outcomes()["metal3/ironic"];
    assert_eq!(outcome.vips, BTreeSet::from([ip("172.22.0.2")]));
}

/// Namespace, annotations, members of spec, VIPs that it gets, what is told.
type Asking<'a> = (&'a str, Value, Value, &'a [&'a str], &'a [&'a str]);

#[test]
fn a_vip_comes_from_the_list_and_for_allowed_namespaces_alone() {
    let none = json!({VIP: null});
    let asks = |vips: &str| json!({VIP: vips});
    let by_field = json!({"loadBalancerIP": "172.22.0.3"});
    let cases: Vec<Asking<'_>> = vec![
        (
            "metal3",
            asks("172.22.0.2"),
            json!({}),
            &["172.22.0.2"],
            &[],
        ),
        (
            "metal3",
            none.clone(),
            by_field.clone(),
            &["172.22.0.3"],
            &[],
        ),
        (
            "metal3",
            asks("172.22.0.2"),
            by_field.clone(),
            &["172.22.0.2"],
            &[],
        ),
        (
            "metal3",
            asks(" 172.22.0.2, 172.22.0.3"),
            json!({}),
            &["172.22.0.2", "172.22.0.3"],
            &[],
        ),
        (
            "tenant",
            asks("172.22.0.9"),
            json!({}),
            &["172.22.0.9"],
            &[],
        ),
        (
            "tenant",
            asks("172.22.0.2"),
            json!({}),
            &[],
            &[
                "172.22.0.2 is not for Services of namespace tenant; the agent's list of VIPs decides",
            ],
        ),
        (
            "tenant",
            none,
            by_field,
            &[],
            &[
                "172.22.0.3 is not for Services of namespace tenant; the agent's list of VIPs decides",
            ],
        ),
        (
            "metal3",
            asks("172.22.0.77"),
            json!({}),
            &[],
            &[
                "172.22.0.77 is not in the agent's list of VIPs; ask for one that is, or have it added there",
            ],
        ),
        (
            "metal3",
            asks("172.22.0.2,fd00::2,www"),
            json!({}),
            &["172.22.0.2"],
            &[
                "`www` is not an IP address; ask for a VIP such as 172.22.0.2",
                "fd00::2 is not in the agent's list of VIPs; ask for one that is, or have it added there",
            ],
        ),
        // What it had stays when it asks for nothing that it can have.
        (
            "metal3",
            json!({VIP: "172.22.0.77", ASSIGNED_VIPS: "172.22.0.3"}),
            json!({}),
            &["172.22.0.3"],
            &[
                "172.22.0.77 is not in the agent's list of VIPs; ask for one that is, or have it added there",
                "none of the VIPs asked for can be had; 172.22.0.3 stays",
            ],
        ),
        // But what it wrote there itself gives it nothing.
        (
            "tenant",
            json!({VIP: "172.22.0.2", ASSIGNED_VIPS: "172.22.0.2"}),
            json!({}),
            &[],
            &[
                "172.22.0.2 is not for Services of namespace tenant; the agent's list of VIPs decides",
            ],
        ),
    ];
    for (namespace, annotations, spec, vips, told) in cases {
        let name = format!("{namespace}/ironic");
        let what = format!("{name} {annotations} {spec}");
        let more = json!({"metadata": {"annotations": annotations}, "spec": spec});
        let snapshot = Snapshot {
            services: vec![service(&name, 0, more)],
            ..Snapshot::default()
        };
        let translation = run(&snapshot);
        let vips: BTreeSet<_> = vips.iter().map(|vip| ip(vip)).collect();
        assert_eq!(translation.outcomes()[&name].vips, vips, "{what}");
        assert_eq!(problems(&translation, &name), told, "{what}");
        let served: BTreeSet<_> = translation
            .desired(NODE)
            .services
            .iter()
            .map(|s| s.vip)
            .collect();
        assert_eq!(served, vips, "{what}");
    }
}

#[test]
fn a_foreign_service_takes_nothing_from_the_one_that_serves() {
    let mut snapshot = ironic(&[slice("a", &[endpoint("ironic-0", "10.244.0.10")])]);
    let before = run(&snapshot).desired(NODE);
    // Older than Ironic's.
    snapshot.services[0] = service("metal3/ironic", 9, json!({}));
    snapshot
        .services
        .push(service("tenant/thief", 0, json!({})));
    let translation = run(&snapshot);
    assert_eq!(translation.desired(NODE), before);
    let thief = &translation.outcomes()["tenant/thief"];
    assert_eq!((thief.vips.len(), &thief.assigned), (0, &None));
}

#[test]
fn a_vip_is_given_once_it_is_written_and_kept() {
    let ask_nothing = |name, minute, assigned: Value| {
        annotated(name, minute, json!({VIP: null, ASSIGNED_VIPS: assigned}))
    };
    // The older of two that ask for nothing gets the only free one, the younger one is told.
    let mut snapshot = Snapshot {
        services: vec![
            ask_nothing("metal3/young", 2, Value::Null),
            ask_nothing("metal3/old", 1, Value::Null),
        ],
        ..Snapshot::default()
    };
    let translation = run(&snapshot);
    let old = &translation.outcomes()["metal3/old"];
    assert_eq!(old.assigned.as_deref(), Some("172.22.0.3"));
    assert_eq!(old.vips, BTreeSet::new(), "not before it is written");
    assert_eq!(translation.desired(NODE).services, []);
    assert_eq!(
        problems(&translation, "metal3/young"),
        [
            "no VIP for automatic assignment is free for namespace metal3; \
             ask for one by annotation: Services can share one by ports"
        ]
    );

    // Written, it is effective, and an even older Service does not take it away.
    snapshot.services[1] = ask_nothing("metal3/old", 1, json!("172.22.0.3"));
    snapshot
        .services
        .push(ask_nothing("metal3/older", 0, Value::Null));
    let translation = run(&snapshot);
    let old = &translation.outcomes()["metal3/old"];
    assert_eq!(old.vips, BTreeSet::from([ip("172.22.0.3")]));
    assert_eq!(translation.outcomes()["metal3/older"].assigned, None);
    // It stays when the list no longer gives it away.
    let other_config = config(&CONFIG.replace("autoAssign: true", "autoAssign: false"));
    let translation = translate(&other_config, &snapshot);
    assert_eq!(
        translation.outcomes()["metal3/old"].assigned.as_deref(),
        Some("172.22.0.3")
    );
    // Nobody gets one of another namespace.
    let tenant = Snapshot {
        services: vec![ask_nothing("tenant/other", 0, Value::Null)],
        ..Snapshot::default()
    };
    assert_eq!(run(&tenant).outcomes()["tenant/other"].assigned, None);
}

#[test]
fn a_vip_that_somebody_asks_for_is_not_free() {
    let snapshot = Snapshot {
        services: vec![
            annotated("metal3/old", 0, json!({VIP: null})),
            annotated("metal3/young", 1, json!({VIP: "172.22.0.3"})),
        ],
        ..Snapshot::default()
    };
    assert_eq!(run(&snapshot).outcomes()["metal3/old"].assigned, None);
}

#[test]
fn services_share_a_vip_by_port_and_clashes_go_to_the_older() {
    let metrics = json!([
        {"name": "metrics", "port": 9608, "protocol": "TCP"},
        {"name": "api", "port": 6385, "protocol": "TCP"},
        {"name": "ssh", "port": 22, "protocol": "TCP"},
        {"name": "dns", "port": 53, "protocol": "UDP"},
    ]);
    let mut snapshot = ironic(&[]);
    snapshot.services.push(service(
        "metal3/other",
        5,
        json!({"spec": {"ports": metrics}}),
    ));
    let translation = run(&snapshot);
    let owners: BTreeMap<_, _> = plan_of(&translation, NODE)
        .0
        .ports
        .into_iter()
        .map(|((_, port), row)| (port, row.service))
        .collect();
    let expected = [
        (6180, "metal3/ironic"),
        (6385, "metal3/ironic"),
        (9608, "metal3/other"),
    ];
    assert_eq!(
        owners,
        expected.map(|(port, name)| (port, name.to_owned())).into()
    );
    assert_eq!(
        problems(&translation, "metal3/other"),
        [
            "port `api` of 172.22.0.2: port 6385 is already taken by port `api` of metal3/ironic",
            "port `ssh` of 172.22.0.2: port 22 is already taken by `pass` of the VIP, for the host",
            "port 53/UDP is not served: only TCP is",
        ]
    );
    assert_eq!(
        problems(&translation, "metal3/ironic"),
        Vec::<String>::new()
    );

    // Of one age, the name decides.
    let snapshot = Snapshot {
        services: vec![
            service("metal3/b", 0, json!({})),
            service("metal3/a", 0, json!({})),
        ],
        ..Snapshot::default()
    };
    let translation = run(&snapshot);
    assert_eq!(problems(&translation, "metal3/a"), Vec::<String>::new());
    assert_eq!(problems(&translation, "metal3/b").len(), 2);
    assert_eq!(
        translation.outcomes()["metal3/b"].vips,
        BTreeSet::new(),
        "nothing of it is served, so its status shows nothing"
    );
}

#[test]
fn of_a_group_of_instance_ports_only_the_clashing_ones_are_lost() {
    let young = service(
        "metal3/ironic",
        9,
        json!({"metadata": {"annotations": {INSTANCE_PORTS: "images=6384-6387"}}, "spec": {"ports": [
            {"name": "images", "port": 6180, "protocol": "TCP"},
        ]}}),
    );
    let old = service("metal3/old", 0, json!({}));
    let pods: Vec<_> = (0..4).map(|i| format!("ironic-{i}")).collect();
    let endpoints: Vec<_> = pods
        .iter()
        .zip(0..)
        .map(|(pod, i)| endpoint(pod, &format!("10.244.0.1{i}")))
        .collect();
    let snapshot = Snapshot {
        services: vec![young, old],
        slices: vec![slice("a", &endpoints)],
        pods: pods.iter().map(|pod| stateful(pod)).collect(),
    };
    let translation = run(&snapshot);
    let ports = leads_to(&translation, NODE);
    assert_eq!(ports["172.22.0.2:6384"], ["ironic-0:6180"]);
    assert_eq!(ports["172.22.0.2:6386"], ["ironic-2:6180"]);
    assert_eq!(
        ports["172.22.0.2:6385"],
        Vec::<String>::new(),
        "metal3/old has no pods"
    );
    assert_eq!(
        problems(&translation, "metal3/ironic"),
        [
            "instance ports `images` of 172.22.0.2: port 6385 is already taken by port `api` of metal3/old",
            // Its shared port is lost, and the instance ports that lead to the same pod port are not.
            "port `images` of 172.22.0.2: port 6180 is already taken by port `images` of metal3/old",
        ]
    );
}

/// (ready, serving, terminating) → (takes new flows, takes them where nobody else does), with and without
/// publishNotReadyAddresses.
#[test]
fn conditions_decide_who_takes_new_flows() {
    const READY: (bool, bool) = (true, false);
    const DRAINS: (bool, bool) = (false, true);
    const NEITHER: (bool, bool) = (false, false);
    let table = [
        ((None, None, None), READY, READY),
        ((Some(true), None, None), READY, READY),
        ((Some(true), Some(true), None), READY, READY),
        ((Some(true), Some(false), None), READY, READY),
        ((None, Some(true), None), READY, READY),
        ((None, Some(false), None), READY, READY),
        ((Some(false), None, None), NEITHER, READY),
        ((Some(false), Some(true), None), NEITHER, READY),
        ((Some(false), Some(false), None), NEITHER, READY),
        // The API does not make these without publishNotReadyAddresses; whoever ends is the last choice.
        ((None, None, Some(true)), DRAINS, DRAINS),
        ((Some(true), None, Some(true)), DRAINS, DRAINS),
        ((Some(true), Some(true), Some(true)), DRAINS, DRAINS),
        ((Some(true), Some(false), Some(true)), DRAINS, DRAINS),
        ((None, Some(false), Some(true)), DRAINS, DRAINS),
        ((None, Some(true), Some(true)), DRAINS, DRAINS),
        ((Some(false), None, Some(true)), NEITHER, DRAINS),
        ((Some(false), Some(true), Some(true)), DRAINS, DRAINS),
        ((Some(false), Some(false), Some(true)), NEITHER, DRAINS),
    ];
    let any = [None, Some(false), Some(true)];
    for ready in any {
        for serving in any {
            for terminating in [None, Some(true)] {
                let row = (ready, serving, terminating);
                assert!(table.iter().any(|(listed, ..)| *listed == row), "{row:?}");
            }
        }
    }
    for ((ready, serving, terminating), plain, published) in table {
        for terminating in [terminating, terminating.or(Some(false))] {
            let conditions =
                json!({"ready": ready, "serving": serving, "terminating": terminating});
            let pod = with(
                endpoint("ironic-0", "10.244.0.10"),
                json!({"conditions": conditions}),
            );
            for (publish, expected) in [(false, plain), (true, published)] {
                let spec = json!({"spec": {"publishNotReadyAddresses": publish}});
                let mut snapshot = ironic(&[slice("a", std::slice::from_ref(&pod))]);
                snapshot.services[0] = service("metal3/ironic", 0, spec);
                let backend = run(&snapshot).desired(NODE).services[0].backends[0].clone();
                assert_eq!(
                    (backend.ready, backend.draining),
                    expected,
                    "{conditions}, publishNotReadyAddresses: {publish}"
                );
            }
        }
    }
    // No conditions at all.
    let bare = with(
        endpoint("ironic-0", "10.244.0.10"),
        json!({"conditions": null}),
    );
    assert_eq!(
        port(&ironic(&[slice("a", &[bare])]), "172.22.0.2:6385"),
        ["ironic-0:6385"]
    );
}

fn ending(name: &str, address: &str) -> Value {
    with(
        endpoint(name, address),
        json!({"conditions": {"ready": false, "serving": true, "terminating": true}}),
    )
}

#[test]
fn an_ending_pod_keeps_its_flows_and_serves_while_nobody_else_does() {
    let old = ending("ironic-0", "10.244.0.10");
    let new = endpoint("ironic-1", "10.244.0.11");
    let both = ironic(&[slice("a", &[old.clone(), new])]);
    assert_eq!(
        port(&both, "172.22.0.2:6385"),
        ["!ironic-0:6385", "ironic-1:6385"]
    );
    let alone = ironic(&[slice("a", &[old])]);
    assert_eq!(port(&alone, "172.22.0.2:6385"), ["ironic-0:6385"]);
}

#[test]
fn one_address_in_two_slices_is_one_backend() {
    let ready = endpoint("ironic-0", "10.244.0.10");
    let unready = with(
        ready.clone(),
        json!({"conditions": {"ready": false, "serving": false, "terminating": false}}),
    );
    let (a, b) = (slice("a", &[ready]), slice("b", &[unready]));
    for slices in [[a.clone(), b.clone()], [b, a]] {
        assert_eq!(port(&ironic(&slices), "172.22.0.2:6385"), ["ironic-0:6385"]);
    }
}

#[test]
fn an_address_that_two_pods_have_is_that_of_the_one_that_lives() {
    let dead = ending("ironic-0", "10.244.0.10");
    let starting = with(
        endpoint("ironic-1", "10.244.0.10"),
        json!({"conditions": {"ready": false, "serving": false, "terminating": false}}),
    );
    for endpoints in [[dead.clone(), starting.clone()], [starting, dead]] {
        let snapshot = ironic(&[slice("a", &endpoints)]);
        assert_eq!(port(&snapshot, "172.22.0.2:6385"), ["!ironic-1:6385"]);
    }
}

#[test]
fn pods_in_several_slices_with_ports_of_their_own() {
    let a = slice("a", &[endpoint("ironic-0", "10.244.0.10")]);
    // A newer version of the pods, whose `images` is elsewhere and which has no `api` yet.
    let b = slice_of(
        "metal3/ironic",
        "b",
        json!({
            "endpoints": [endpoint("ironic-1", "10.244.0.11")],
            "ports": [{"name": "images", "port": 8080, "protocol": "TCP"}],
        }),
    );
    let ipv6 = slice_of(
        "metal3/ironic",
        "c",
        json!({"addressType": "IPv6", "endpoints": [endpoint("ironic-0", "fd00::10")]}),
    );
    let foreign = slice_of(
        "tenant/ironic",
        "d",
        json!({"endpoints": [endpoint("other", "10.244.0.99")]}),
    );
    let snapshot = ironic(&[a, b, ipv6, foreign]);
    assert_eq!(
        port(&snapshot, "172.22.0.2:6180"),
        ["ironic-0:6180", "ironic-1:8080"]
    );
    assert_eq!(port(&snapshot, "172.22.0.2:6385"), ["ironic-0:6385"]);
}

#[test]
fn the_only_port_of_a_service_needs_no_name() {
    let mut snapshot = ironic(&[slice_of(
        "metal3/ironic",
        "a",
        json!({
            "endpoints": [endpoint("ironic-0", "10.244.0.10")],
            "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
        }),
    )]);
    snapshot.services[0] = service(
        "metal3/ironic",
        0,
        json!({
            "metadata": {"annotations": {INSTANCE_PORTS: "80=6200-6201"}},
            "spec": {"ports": [{"port": 80, "protocol": "TCP"}]},
        }),
    );
    snapshot.pods.push(stateful("ironic-0"));
    assert_eq!(port(&snapshot, "172.22.0.2:80"), ["ironic-0:8080"]);
    assert_eq!(port(&snapshot, "172.22.0.2:6200"), ["ironic-0:8080"]);
}

#[test]
fn endpoints_without_a_pod_need_leave() {
    let bare = with(
        endpoint("x", "10.0.0.1"),
        json!({"targetRef": null, "nodeName": null}),
    );
    let node = with(
        endpoint("n", "10.0.0.2"),
        json!({"targetRef": {"kind": "Node"}}),
    );
    let vip = endpoint("ironic-9", "172.22.0.3");
    let snapshot = ironic(&[slice("a", &[bare, node, vip])]);
    assert_eq!(port(&snapshot, "172.22.0.2:6385"), Vec::<String>::new());
    let told = problems(&run(&snapshot), "metal3/ironic");
    assert_eq!(
        told,
        [
            "endpoints without a pod are not used; \
             `kubernetes: {endpointsWithoutPods: true}` in the agent's configuration allows them",
            "an endpoint has the address of the VIP 172.22.0.3; it is not used",
        ]
    );
    let lenient = CONFIG.replace(
        "uplinks",
        "kubernetes: {endpointsWithoutPods: true}\nuplinks",
    );
    let translation = translate(&config(&lenient), &snapshot);
    assert_eq!(
        leads_to(&translation, NODE)["172.22.0.2:6385"],
        ["10.0.0.1:6385", "10.0.0.2:6385"]
    );
}

#[test]
fn every_node_serves_pods_wherever_they_are_and_only_some_announce() {
    let away = with(
        endpoint("ironic-1", "10.244.1.11"),
        json!({"nodeName": "node-b"}),
    );
    let instances = json!({INSTANCE_PORTS: "images=6200-6201"});
    let mut snapshot = ironic(&[slice(
        "a",
        &[endpoint("ironic-0", "10.244.0.10"), away.clone()],
    )]);
    snapshot.services[0] = annotated("metal3/ironic", 0, instances.clone());
    snapshot.pods = vec![stateful("ironic-0"), stateful("ironic-1")];
    let translation = run(&snapshot);
    let here = leads_to(&translation, NODE);
    assert_eq!(here["172.22.0.2:6385"], ["ironic-0:6385", "ironic-1:6385"]);
    assert_eq!(here["172.22.0.2:6200"], ["ironic-0:6180"]);
    assert_eq!(here["172.22.0.2:6201"], ["ironic-1:6180"]);
    assert_eq!(leads_to(&translation, "node-b"), here);
    assert_eq!(
        problems(&translation, "metal3/ironic"),
        Vec::<String>::new()
    );
    let nodes: BTreeMap<_, _> = plan_of(&translation, "node-b").0.ports[&(ip("172.22.0.2"), 6385)]
        .backends
        .iter()
        .map(|row| (row.instance.clone(), row.node.clone()))
        .collect();
    let on_a = Some(NODE.to_owned());
    assert_eq!(nodes["ironic-1"], None, "on node-b itself");
    assert_eq!(nodes["ironic-0"], on_a);
    let candidate = |node: &str| {
        let vips = translation.desired(node).vips;
        let vip = vips.into_iter().find(|vip| vip.address == ip("172.22.0.2"));
        vip.map(|vip| vip.candidate)
    };
    assert_eq!(
        (candidate(NODE), candidate("node-b")),
        (Some(true), Some(false))
    );
}

/// A world of instances with their pods, all on this node, and what is written on the Service.
fn instances(pods: &[Arc<Pod>], range: &str, written: Value) -> Snapshot {
    let endpoints: Vec<_> = pods
        .iter()
        .zip(10..)
        .map(|(pod, number)| {
            let name = pod.metadata.name.as_deref().expect("a name");
            endpoint(name, &format!("10.244.0.{number}"))
        })
        .collect();
    Snapshot {
        services: vec![annotated(
            "metal3/ironic",
            0,
            json!({INSTANCE_PORTS: range, INSTANCE_SLOTS: written}),
        )],
        slices: vec![slice("a", &endpoints)],
        pods: pods.to_vec(),
    }
}

/// Effective slots by pod, and what is to be written.
fn slots(snapshot: &Snapshot) -> (BTreeMap<String, u32>, Option<Value>) {
    let translation = run(snapshot);
    let backends = &translation.desired(NODE).services[0].backends;
    let has = |backend: &BackendSpec| Some((backend.instance.clone(), backend.slot?));
    let wanted = translation.outcomes()["metal3/ironic"].slots.as_deref();
    (
        backends.iter().filter_map(has).collect(),
        wanted.map(|text| serde_json::from_str(text).expect("JSON")),
    )
}

fn effective(slots: &[(&str, u32)]) -> BTreeMap<String, u32> {
    slots
        .iter()
        .map(|(name, slot)| ((*name).to_owned(), *slot))
        .collect()
}

fn plain(name: &str) -> Arc<Pod> {
    pod(name, json!({}))
}

#[test]
fn an_index_is_the_slot_at_once_and_in_every_group() {
    let pods = [stateful("ironic-2"), stateful("ironic-0")];
    let snapshot = instances(&pods, "images=6200-6231, api=6300-6331", Value::Null);
    assert_eq!(
        slots(&snapshot),
        (
            effective(&[("ironic-0", 0), ("ironic-2", 2)]),
            Some(json!({"ironic-0": 0, "ironic-2": 2}))
        )
    );
    assert_eq!(port(&snapshot, "172.22.0.2:6202"), ["ironic-2:6180"]);
    assert_eq!(port(&snapshot, "172.22.0.2:6302"), ["ironic-2:6385"]);
    assert!(!leads_to(&run(&snapshot), NODE).contains_key("172.22.0.2:6201"));
}

#[test]
fn other_slots_are_effective_once_written() {
    let pods = [plain("ironic-b"), plain("ironic-a")];
    let snapshot = instances(&pods, "images=6200-6203", Value::Null);
    let written = json!({"ironic-a": 0, "ironic-b": 1});
    assert_eq!(slots(&snapshot), (effective(&[]), Some(written.clone())));
    let snapshot = instances(&pods, "images=6200-6203", json!(written.to_string()));
    assert_eq!(
        slots(&snapshot),
        (effective(&[("ironic-a", 0), ("ironic-b", 1)]), None)
    );
}

#[test]
fn scaling_renumbers_nobody_and_slots_are_reused_only_when_none_is_left() {
    let written = json!(r#"{"a": 0, "b": 1, "c": 2}"#);
    // 3 → 2: nothing to write, the one that is away keeps its slot.
    let two = [plain("b"), plain("c")];
    assert_eq!(
        slots(&instances(&two, "images=6200-6203", written.clone())),
        (effective(&[("b", 1), ("c", 2)]), None)
    );
    // A new one gets the fourth, not that of the one that is away; and it comes back to its own.
    let three = [plain("b"), plain("c"), plain("d")];
    let (now, wanted) = slots(&instances(&three, "images=6200-6203", written.clone()));
    assert_eq!(now, effective(&[("b", 1), ("c", 2)]));
    assert_eq!(wanted, Some(json!({"a": 0, "b": 1, "c": 2, "d": 3})));
    let back = [plain("a"), plain("b"), plain("c")];
    assert_eq!(
        slots(&instances(&back, "images=6200-6203", written.clone())).1,
        None
    );
    // With a range of three the new one gets the place of the one that is away.
    let (_, wanted) = slots(&instances(&three, "images=6200-6202", written.clone()));
    assert_eq!(wanted, Some(json!({"b": 1, "c": 2, "d": 0})));
    // With everybody there it gets none, and says so.
    let four = [plain("a"), plain("b"), plain("c"), plain("d")];
    let snapshot = instances(&four, "images=6200-6202", written);
    assert_eq!(slots(&snapshot).1, None);
    assert_eq!(
        problems(&run(&snapshot), "metal3/ironic"),
        ["d has no instance port: all 3 slots are taken; widen the range"]
    );
}

#[test]
fn a_daemon_is_its_node_whatever_its_pod_is_called() {
    let written = json!(r#"{"node-a": 1}"#);
    // The old pod ends while the new one starts: the port stays with it until the new one is ready.
    let mut snapshot = instances(&[daemon("ironic-x7")], "images=6200-6203", written);
    let starting = with(
        endpoint("ironic-k2", "10.244.0.20"),
        json!({"conditions": {"ready": false, "serving": false, "terminating": false}}),
    );
    snapshot.pods.push(daemon("ironic-k2"));
    snapshot.slices = vec![slice("a", &[ending("ironic-x7", "10.244.0.10"), starting])];
    assert_eq!(
        port(&snapshot, "172.22.0.2:6201"),
        ["!ironic-k2:6180", "ironic-x7:6180"]
    );
    let ready = endpoint("ironic-k2", "10.244.0.20");
    snapshot.slices = vec![slice("a", &[ending("ironic-x7", "10.244.0.10"), ready])];
    assert_eq!(
        port(&snapshot, "172.22.0.2:6201"),
        ["ironic-k2:6180", "!ironic-x7:6180"]
    );
    assert_eq!(slots(&snapshot).1, None);
}

#[test]
fn an_instance_port_stays_with_its_instance_until_that_is_gone() {
    let pods = [stateful("ironic-0"), stateful("ironic-1")];
    let mut snapshot = instances(
        &pods,
        "images=6200-6203",
        json!(r#"{"ironic-0":0,"ironic-1":1}"#),
    );
    let other = endpoint("ironic-1", "10.244.0.11");
    let unready = with(
        endpoint("ironic-0", "10.244.0.10"),
        json!({"conditions": {"ready": false, "serving": false}}),
    );
    for (first, expected) in [
        (ending("ironic-0", "10.244.0.10"), "ironic-0:6180"),
        (unready, "!ironic-0:6180"),
    ] {
        snapshot.slices = vec![slice("a", &[first, other.clone()])];
        assert_eq!(port(&snapshot, "172.22.0.2:6200"), [expected]);
    }
    snapshot.slices = vec![slice("a", &[other])];
    assert!(!leads_to(&run(&snapshot), NODE).contains_key("172.22.0.2:6200"));
}

#[test]
fn a_pod_that_is_not_known_yet_is_not_used_yet() {
    let whole = instances(&[stateful("ironic-0")], "images=6200-6203", Value::Null);
    let whole = with_pods(&whole);
    // A pod of the same name is another one.
    let namesake = pod("ironic-0", json!({"metadata": {"uid": "another"}}));
    for (pods, expected) in [(whole.pods.clone(), 1), (vec![], 0), (vec![namesake], 0)] {
        let snapshot = Snapshot {
            pods,
            services: whole.services.clone(),
            slices: whole.slices.clone(),
        };
        let translation = super::translate(&config(CONFIG), &snapshot);
        assert_eq!(
            leads_to(&translation, NODE)["172.22.0.2:6385"].len(),
            expected
        );
        assert_eq!(problems(&translation, "metal3/ironic"), [""; 0]);
    }
}

#[test]
fn indices_that_clash_or_are_beyond_the_range_are_told() {
    let other = pod("zinc-0", json!({"metadata": {"labels": {POD_INDEX: "0"}}}));
    let pods = [stateful("ironic-0"), other, stateful("ironic-4")];
    let snapshot = instances(&pods, "images=6200-6203", Value::Null);
    assert_eq!(slots(&snapshot).0, effective(&[("ironic-0", 0)]));
    assert_eq!(
        problems(&run(&snapshot), "metal3/ironic"),
        [
            "zinc-0 has no instance port: its index 0 is already that of ironic-0",
            "ironic-4 has no instance port: its index 4 is beyond the last slot 3",
        ]
    );
}

#[test]
fn slots_that_cannot_be_read_are_not_overwritten() {
    let snapshot = instances(
        &[plain("a"), stateful("ironic-1")],
        "images=6200-6203",
        json!("{a: 0"),
    );
    assert_eq!(slots(&snapshot), (effective(&[("ironic-1", 1)]), None));
    let told = problems(&run(&snapshot), "metal3/ironic");
    assert!(
        told[0].starts_with("annotation ironlb.dev/instance-slots is not JSON"),
        "{told:?}"
    );
}

#[test]
fn groups_that_make_no_sense_are_told_and_the_others_serve() {
    let text = "images=6200-6203, images=6300-6303, isos=1-2, api=9-8, api, api=20000-30000";
    let snapshot = instances(&[stateful("ironic-0")], text, json!(r#"{"ironic-0":0}"#));
    assert_eq!(port(&snapshot, "172.22.0.2:6200"), ["ironic-0:6180"]);
    assert_eq!(
        problems(&run(&snapshot), "metal3/ironic"),
        [
            "instance ports `api`: write it as `<port name>=<base>-<last>`, such as `images=6200-6231`",
            "instance ports `api=20000-30000`: more than 1024 ports",
            "instance ports `api=9-8`: `9-8` is not a range of ports; \
             write it as `<port name>=<base>-<last>`, such as `images=6200-6231`",
            "instance ports `images=6300-6303`: a second range for port `images`",
            "instance ports `isos=1-2`: the Service has no TCP port `isos`; it has images, api",
        ]
    );
    // A group over the Service's own ports loses those.
    let snapshot = instances(
        &[stateful("ironic-0")],
        "images=6385-6386",
        json!(r#"{"ironic-0":0}"#),
    );
    assert_eq!(port(&snapshot, "172.22.0.2:6385"), ["ironic-0:6385"]);
    assert_eq!(
        problems(&run(&snapshot), "metal3/ironic"),
        [
            "instance ports `images` of 172.22.0.2: port 6385 is already taken by port `api` of metal3/ironic"
        ]
    );
}

#[test]
fn a_host_port_that_is_a_vip_port_is_told() {
    let with_port = |port: Value, network: bool| {
        let spec = json!({"hostNetwork": network, "containers": [{"name": "c", "ports": [port]}]});
        pod("ironic-0", json!({"spec": spec}))
    };
    let cases = [
        (
            with_port(json!({"containerPort": 6385, "hostPort": 6385}), false),
            true,
        ),
        (
            with_port(
                json!({"containerPort": 80, "hostPort": 6201, "hostIP": "0.0.0.0"}),
                false,
            ),
            true,
        ),
        (
            with_port(json!({"containerPort": 6385, "hostPort": 6385}), true),
            false,
        ),
        (
            with_port(json!({"containerPort": 6385, "hostPort": 16385}), false),
            false,
        ),
        (
            with_port(
                json!({"containerPort": 6385, "hostPort": 6385, "protocol": "UDP"}),
                false,
            ),
            false,
        ),
        (
            with_port(
                json!({"containerPort": 6385, "hostPort": 6385, "hostIP": "10.0.0.1"}),
                false,
            ),
            false,
        ),
        (with_port(json!({"containerPort": 6385}), false), false),
    ];
    for (pod, clashes) in cases {
        let snapshot = instances(
            std::slice::from_ref(&pod),
            "images=6200-6203",
            json!(r#"{"ironic-0":0}"#),
        );
        let told = problems(&run(&snapshot), "metal3/ironic");
        let is_told = told.iter().any(|message| message.contains("hostPort"));
        assert_eq!(is_told, clashes, "{:?}: {told:?}", pod.spec);
    }
}

/// Ranges of the Service, those that are used, what is told.
type Ranges<'a> = (&'a [&'a str], Option<BTreeSet<IpNet>>, &'a [&'a str]);

#[test]
fn source_ranges_arrive_and_a_bad_one_admits_nobody() {
    let net = |text: &str| text.parse::<IpNet>().expect("a network");
    let bad = "loadBalancerSourceRanges: `10.0.0.0/33` is not a range such as 172.22.0.0/24; it admits nobody";
    let cases: [Ranges<'_>; 4] = [
        (&[], None, &[]),
        (
            &[" 10.1.2.3/8", "fd00::/16"],
            Some(BTreeSet::from([net("10.0.0.0/8"), net("fd00::/16")])),
            &[],
        ),
        (&["10.0.0.0/33"], Some(BTreeSet::new()), &[bad]),
        (
            &["10.0.0.0/33", "10.0.0.0/8"],
            Some(BTreeSet::from([net("10.0.0.0/8")])),
            &[bad],
        ),
    ];
    for (texts, ranges, told) in cases {
        let spec = json!({"spec": {"loadBalancerSourceRanges": texts}});
        let snapshot = Snapshot {
            services: vec![service("metal3/ironic", 0, spec)],
            ..Snapshot::default()
        };
        let translation = run(&snapshot);
        let services = translation.desired(NODE).services;
        assert_eq!(services[0].source_ranges, ranges, "{texts:?}");
        assert_eq!(problems(&translation, "metal3/ironic"), told, "{texts:?}");
    }
}

#[test]
fn endpoints_beyond_what_a_node_can_hold_are_told() {
    let endpoints: Vec<_> = (0..65)
        .map(|number| {
            endpoint(
                &format!("ironic-{number:02}"),
                &format!("10.244.0.{number}"),
            )
        })
        .collect();
    let snapshot = ironic(&[slice("a", &endpoints[..40]), slice("b", &endpoints[40..])]);
    let limits = run(&snapshot).limits();
    let told: Vec<_> = limits["metal3/ironic"]
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        told,
        ["more than 64 endpoints on one node; those beyond, by name, are unused"]
    );
    assert_eq!(
        run(&ironic(&[slice("a", &endpoints[..64])])).limits(),
        BTreeMap::new()
    );
}

#[test]
fn a_service_that_left_us_is_to_be_cleaned() {
    let more = json!({
        "metadata": {"annotations": {ASSIGNED_VIPS: "172.22.0.2,172.22.0.3"}},
        "spec": {"type": "ClusterIP", "loadBalancerClass": null},
    });
    let snapshot = Snapshot {
        services: vec![service("metal3/ironic", 0, more)],
        ..Snapshot::default()
    };
    let translation = run(&snapshot);
    let outcome = &translation.outcomes()["metal3/ironic"];
    assert_eq!(
        outcome.left,
        BTreeSet::from([ip("172.22.0.2"), ip("172.22.0.3")])
    );
    assert_eq!(outcome.assigned, None);
}

/// Worlds of few names, addresses and ports, so that all that can clash does.
fn any_world() -> impl Strategy<Value = Snapshot> {
    let vip = prop_oneof![
        Just(Value::Null),
        Just(json!("172.22.0.2")),
        Just(json!("172.22.0.3")),
        Just(json!("172.22.0.2,172.22.0.9")),
        Just(json!("172.22.0.77")),
    ];
    let ports = prop::collection::btree_map("[a-c]", 80..84_u16, 1..4);
    let written = prop_oneof![
        Just(Value::Null),
        Just(json!(r#"{"p0":1,"p1":1,"node-a":0,"gone":2}"#)),
        Just(json!("oops")),
    ];
    let range = prop_oneof![
        Just(Value::Null),
        Just(json!("a=82-84")),
        Just(json!("b=90-91,a=100-103"))
    ];
    let a_service = (vip.clone(), vip, ports, range, written, 0..2_u32);
    let services = prop::collection::btree_map("(metal3|tenant)/[xyz]", a_service, 0..5);
    let condition = prop::option::of(any::<bool>());
    let an_endpoint = (
        0..5_u8,
        0..5_u8,
        prop::option::of(prop_oneof![Just("node-a"), Just("node-b")]),
        (condition.clone(), condition.clone(), condition),
        prop::bool::weighted(0.9),
    );
    let a_slice = (
        "(metal3|tenant)/[xyz]",
        prop::collection::vec(an_endpoint, 0..5),
        prop::collection::btree_map("[a-c]", 8080..8083_u16, 0..3),
    );
    let slices = prop::collection::vec(a_slice, 0..6);
    let kinds = prop::collection::vec(0..4_u8, 5);
    (services, slices, kinds).prop_map(|(services, slices, kinds)| Snapshot {
        services: services
            .into_iter()
            .map(|(name, (vip, assigned, ports, range, written, minute))| {
                let ports: Vec<_> =
                    ports.iter().map(|(name, port)| json!({"name": name, "port": port})).collect();
                let annotations = json!({
                    VIP: vip, ASSIGNED_VIPS: assigned, INSTANCE_PORTS: range, INSTANCE_SLOTS: written,
                });
                let more = json!({"metadata": {"annotations": annotations}, "spec": {"ports": ports}});
                service(&name, minute, more)
            })
            .collect(),
        slices: slices
            .into_iter()
            .enumerate()
            .map(|(number, (service, endpoints, ports))| {
                let ports: Vec<_> =
                    ports.iter().map(|(name, port)| json!({"name": name, "port": port})).collect();
                let endpoints: Vec<_> = endpoints
                    .into_iter()
                    .map(|(pod, address, node, (ready, serving, terminating), is_pod)| {
                        let mut value = with(
                            endpoint(&format!("p{pod}"), &format!("10.0.0.{address}")),
                            json!({
                                "nodeName": node,
                                "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
                            }),
                        );
                        if !is_pod {
                            value["targetRef"] = Value::Null;
                        }
                        value
                    })
                    .collect();
                slice_of(&service, &format!("s{number}"), json!({"endpoints": endpoints, "ports": ports}))
            })
            .collect(),
        pods: kinds
            .into_iter()
            .enumerate()
            .filter_map(|(number, kind)| {
                let name = format!("p{number}");
                match kind {
                    0 => None,
                    1 => Some(daemon(&name)),
                    2 => Some(pod(&name, json!({"metadata": {"labels": {POD_INDEX: number.to_string()}}}))),
                    _ => Some(plain(&name)),
                }
            })
            .collect(),
    })
}

/// A world, and the same as other events would have brought it.
fn shuffled_pairs() -> impl Strategy<Value = (Snapshot, Snapshot)> {
    any_world().prop_flat_map(|world| {
        let slices: Vec<_> = world
            .slices
            .iter()
            .map(|slice| {
                let slice = (**slice).clone();
                let endpoints = slice.endpoints.clone().unwrap_or_default();
                Just(endpoints).prop_shuffle().prop_map(move |endpoints| {
                    Arc::new(EndpointSlice {
                        endpoints: Some(endpoints),
                        ..slice.clone()
                    })
                })
            })
            .collect();
        let other = (
            Just(world.services.clone()).prop_shuffle(),
            slices.prop_shuffle_all(),
            Just(world.pods.clone()).prop_shuffle(),
        );
        (Just(world), other).prop_map(|(world, (services, slices, pods))| {
            let other = Snapshot {
                services,
                slices,
                pods,
            };
            (world, other)
        })
    })
}

/// Values of every strategy, in any order.
trait ShuffleAll {
    type Item;
    fn prop_shuffle_all(self) -> BoxedStrategy<Vec<Self::Item>>;
}

impl<S: Strategy + 'static> ShuffleAll for Vec<S>
where
    S::Value: Clone + 'static,
{
    type Item = S::Value;
    fn prop_shuffle_all(self) -> BoxedStrategy<Vec<S::Value>> {
        self.prop_flat_map(|values| Just(values).prop_shuffle())
            .boxed()
    }
}

/// What the writer would make of a world: every wanted annotation written.
fn written(world: &Snapshot, translation: &Translation) -> Snapshot {
    let mut world = world.clone();
    for service in &mut world.services {
        let metadata = &service.metadata;
        let (namespace, name) = (metadata.namespace.as_deref(), metadata.name.as_deref());
        let key = format!("{}/{}", namespace.expect("one"), name.expect("one"));
        let outcome = &translation.outcomes()[&key];
        let service = Arc::make_mut(service);
        let annotations = service.metadata.annotations.get_or_insert_default();
        annotations.remove(ASSIGNED_VIPS);
        let entries = [
            (ASSIGNED_VIPS, &outcome.assigned),
            (INSTANCE_SLOTS, &outcome.slots),
        ];
        for (name, value) in entries {
            if let Some(value) = value {
                annotations.insert(name.to_owned(), value.clone());
            }
        }
    }
    world
}

proptest! {
    #[test]
    fn the_order_of_events_means_nothing((world, other) in shuffled_pairs()) {
        prop_assert_eq!(run(&world), run(&other));
    }

    #[test]
    fn what_is_written_is_what_is_wanted_from_then_on(world in any_world()) {
        let first = run(&world);
        let settled = written(&world, &first);
        let second = run(&settled);
        for (key, outcome) in second.outcomes() {
            prop_assert_eq!(&outcome.slots, &None, "slots of {}", key);
            prop_assert_eq!(&outcome.assigned, &first.outcomes()[key].assigned);
        }
    }

    #[test]
    fn the_plan_has_nothing_to_settle_and_no_two_instances_share_a_slot(world in any_world()) {
        let translation = run(&world);
        for node in ["node-a", "node-b"] {
            let state = translation.desired(node);
            let (_, warnings) = plan::plan(&state, &Health::default(), &Nodes::all_of(&state, NODE));
            prop_assert_eq!(warnings, vec![]);
            for service in &state.services {
                let mut owners: BTreeMap<u32, Option<String>> = BTreeMap::new();
                for backend in &service.backends {
                    let Some(slot) = backend.slot else { continue };
                    let pods = world.pods.iter();
                    let is_daemon = pods.filter(|pod| pod.metadata.owner_references.is_some())
                        .any(|pod| pod.metadata.name.as_ref() == Some(&backend.instance));
                    let owner = (!is_daemon).then(|| backend.instance.clone());
                    if let Some(other) = owners.insert(slot, owner.clone()) {
                        prop_assert_eq!(other, owner, "slot {} of {}", slot, &service.name);
                    }
                }
            }
        }
    }
}

#[test]
fn a_dual_stack_service_has_a_vip_of_each_version_with_the_pods_addresses_of_it() {
    let both = config(
        r#"
apiVersion: ironlb.dev/v1
uplinks: [{subnet: 172.22.0.0/24}]
vips:
  - {address: 172.22.0.2, namespaces: [metal3], autoAssign: true}
  - {address: "fd00:22::2", namespaces: [metal3], autoAssign: true}
"#,
    );
    let with_families = |families: &[&str], annotations: Value| Snapshot {
        services: vec![service(
            "metal3/ironic",
            0,
            json!({
                "metadata": {"annotations": annotations},
                "spec": {"ipFamilies": families},
            }),
        )],
        slices: vec![
            slice("a", &[endpoint("ironic-0", "10.244.0.10")]),
            slice_of(
                "metal3/ironic",
                "b",
                json!({"addressType": "IPv6", "endpoints": [endpoint("ironic-0", "fd00:244::10")]}),
            ),
        ],
        pods: vec![stateful("ironic-0")],
    };
    let assigned = |families: &[&str]| {
        let free = with_families(families, json!({VIP: null}));
        let translation = translate(&both, &free);
        translation.outcomes()["metal3/ironic"].assigned.clone()
    };
    assert_eq!(
        assigned(&["IPv4", "IPv6"]).as_deref(),
        Some("172.22.0.2,fd00:22::2")
    );
    assert_eq!(assigned(&["IPv6"]).as_deref(), Some("fd00:22::2"));
    let annotations = json!({
        VIP: null,
        ASSIGNED_VIPS: "172.22.0.2,fd00:22::2",
        INSTANCE_PORTS: "images=6200-6203",
    });
    let given = with_families(&["IPv4", "IPv6"], annotations);
    let translation = translate(&both, &given);
    assert!(problems(&translation, "metal3/ironic").is_empty());
    let state = translation.desired(NODE);
    let services = state.services.iter().map(|service| {
        let backends = service.backends.iter();
        let backends: Vec<_> = backends.map(|b| (b.address, b.slot)).collect();
        (service.vip, service.instance_ports.len(), backends)
    });
    assert_eq!(
        services.collect::<Vec<_>>(),
        [
            (ip("172.22.0.2"), 1, vec![(ip("10.244.0.10"), Some(0))]),
            (ip("fd00:22::2"), 1, vec![(ip("fd00:244::10"), Some(0))]),
        ]
    );
    // With one of its versions taken away it loses that VIP, also where it asks for both.
    let asks = "172.22.0.2,fd00:22::2";
    for (families, vip, lost) in [
        ("IPv4", "172.22.0.2", "fd00:22::2"),
        ("IPv6", "fd00:22::2", "172.22.0.2"),
    ] {
        let asked = with_families(&[families], json!({VIP: asks, ASSIGNED_VIPS: asks}));
        let translation = translate(&both, &asked);
        let outcome = &translation.outcomes()["metal3/ironic"];
        assert_eq!(outcome.vips, BTreeSet::from([ip(vip)]));
        assert_eq!(outcome.assigned.as_deref(), Some(vip));
        let served = translation.desired(NODE).services;
        assert_eq!(served.iter().map(|s| s.vip).collect::<Vec<_>>(), [ip(vip)]);
        let told = problems(&translation, "metal3/ironic");
        assert!(
            told.len() == 1 && told[0].starts_with(&format!("{lost} is not served")),
            "{told:?}"
        );
    }
}
