//! Kubernetes as a source against a real API server, with the rights that deploy/ ships.

mod api;
mod node;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use api::{NAMESPACE, PATIENCE, Server};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Secret, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::events::v1::Event;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client};
use node::{LEASE, Maps, Node, known, leads_to, parsed, source};
use serde_json::{Value, json};

/// No kubelet runs that would give pods the addresses of their endpoints.
const CONFIG: &str = r#"
apiVersion: ironlb.dev/v1
kubernetes: {endpointsWithoutPods: true}
uplinks: [{subnet: 172.22.0.0/24}]
vips:
  - {address: 172.22.0.2, namespaces: [metal3]}
  - {address: 172.22.0.3, namespaces: [metal3], autoAssign: true}
"#;
const VIP: &str = "172.22.0.2";
const SLOTS: &str = "ironlb.dev/instance-slots";

/// A Service of ours, changed by the members of `annotations` and `spec`.
fn service(name: &str, annotations: Value, spec: Value) -> Value {
    let (namespace, name) = name.split_once('/').expect("namespace/name");
    let mut object = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"namespace": namespace, "name": name, "annotations": annotations},
        "spec": {
            "type": "LoadBalancer", "loadBalancerClass": "ironlb.dev/xdp",
            "allocateLoadBalancerNodePorts": false,
            "ports": [{"name": "api", "port": 6385}, {"name": "images", "port": 6180}],
        },
    });
    for (key, value) in spec.as_object().expect("members") {
        object["spec"][key] = value.clone();
    }
    object
}

fn asks(vip: &str) -> Value {
    json!({"ironlb.dev/vip": vip})
}

/// A slice of metal3/ironic with ready pods (name, last byte of the address) on node-a.
fn slice(name: &str, pods: &[(&str, u8)]) -> Value {
    let endpoints: Vec<_> = pods
        .iter()
        .map(|(pod, number)| {
            json!({
                "addresses": [format!("10.244.0.{number}")], "nodeName": "node-a",
                "conditions": {"ready": true, "serving": true, "terminating": false},
                "targetRef": {"kind": "Pod", "namespace": "metal3", "name": pod, "uid": format!("uid-{pod}")},
            })
        })
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"namespace": "metal3", "name": name, "labels": {"kubernetes.io/service-name": "ironic"}},
        "endpoints": endpoints,
        "ports": [{"name": "api", "port": 6385}, {"name": "images", "port": 6180}],
    })
}

/// A pod of metal3 on node-a, whose container has those ports; returns its UID.
async fn pod(server: &Server, name: &str, ports: Value) -> String {
    let container = json!({"name": "ironic", "image": "ironic", "ports": ports});
    let pod = server
        .apply(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "metal3", "name": name},
            "spec": {"nodeName": "node-a", "containers": [container]},
        }))
        .await;
    pod.metadata.uid.expect("a UID")
}

async fn get(client: &Client, name: &str) -> Service {
    let (namespace, name) = name.split_once('/').expect("namespace/name");
    let api: Api<Service> = Api::namespaced(client.clone(), namespace);
    api.get(name).await.expect("the Service")
}

/// What `kubectl get svc` shows as EXTERNAL-IP, with the mode.
fn external(service: &Service) -> Vec<String> {
    let status = service
        .status
        .as_ref()
        .and_then(|status| status.load_balancer.as_ref());
    let ingress = status.and_then(|status| status.ingress.as_ref());
    let text = |ingress: &k8s_openapi::api::core::v1::LoadBalancerIngress| {
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        format!("{} {}", part(&ingress.ip), part(&ingress.ip_mode))
    };
    ingress.into_iter().flatten().map(text).collect()
}

fn annotation<'a>(service: &'a Service, name: &str) -> Option<&'a str> {
    service
        .metadata
        .annotations
        .as_ref()?
        .get(name)
        .map(String::as_str)
}

/// Asks a Service again and again until it is as it should be.
async fn until(
    client: &Client,
    name: &str,
    what: &str,
    is_so: impl Fn(&Service) -> bool,
) -> Service {
    let begun = Instant::now();
    loop {
        let service = get(client, name).await;
        if is_so(&service) {
            return service;
        }
        assert!(
            begun.elapsed() < PATIENCE,
            "{what}: not in {PATIENCE:?}: {service:#?}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Events on a Service: reason and note, how often told.
async fn events(client: &Client, name: &str) -> BTreeMap<(String, String), i32> {
    let (namespace, name) = name.split_once('/').expect("namespace/name");
    let api: Api<Event> = Api::namespaced(client.clone(), namespace);
    let events = api.list(&ListParams::default()).await.expect("Events");
    let of_it = events.items.into_iter().filter(|event| {
        let regarding = event.regarding.as_ref();
        regarding.is_some_and(|object| object.name.as_deref() == Some(name))
    });
    of_it
        .map(|event| {
            let count = event.series.map_or(1, |series| series.count);
            (
                (
                    event.reason.unwrap_or_default(),
                    event.note.unwrap_or_default(),
                ),
                count,
            )
        })
        .collect()
}

/// Stays so for a while: nothing else is on its way.
const A_WHILE: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread")]
async fn a_service_shows_its_vip_while_it_is_served_and_ours() {
    let Some(server) = Server::start().await else {
        return;
    };
    let client = server.admin();
    server
        .apply(service("metal3/ironic", asks(VIP), json!({})))
        .await;

    // An agent whose maps do not get there: nothing may be shown.
    let stuck = Node::start(&server, "node-a", CONFIG, Maps::Stuck).await;
    let given = |service: &Service| annotation(service, "ironlb.dev/assigned-vips") == Some(VIP);
    until(&client, "metal3/ironic", "the VIP is given", given).await;
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(
        external(&get(&client, "metal3/ironic").await),
        Vec::<String>::new()
    );
    stuck.stop().await;

    // Served without endpoints, it is shown: it refuses.
    let mut node = Node::start(&server, "node-a", CONFIG, Maps::Written).await;
    let shown = |service: &Service| external(service) == ["172.22.0.2 VIP"];
    let ironic = until(&client, "metal3/ironic", "the VIP is shown", shown).await;
    assert_eq!(ironic.metadata.finalizers, None);
    let ports = ironic.spec.expect("a spec").ports.expect("ports");
    assert!(
        ports.iter().all(|port| port.node_port.is_none()),
        "{ports:?}"
    );
    assert_eq!(leads_to(&node.tables(), VIP, 6385), Some(vec![]));
    server.apply(slice("a", &[("ironic-0", 10)])).await;
    node.holds("the pod", |tables| {
        leads_to(tables, VIP, 6385) == Some(vec!["ironic-0".into()])
    })
    .await;

    // No agent: the data plane serves on, and so the status stays.
    node.kill().await;
    tokio::time::sleep(LEASE + A_WHILE).await;
    assert!(shown(&get(&client, "metal3/ironic").await));

    // It goes when the Service is not ours any more, and comes back with it.
    let mut node = Node::start(&server, "node-a", CONFIG, Maps::Written).await;
    let mut plain = service("metal3/ironic", asks(VIP), json!({"type": "ClusterIP"}));
    for field in ["loadBalancerClass", "allocateLoadBalancerNodePorts"] {
        plain["spec"].as_object_mut().expect("a spec").remove(field);
    }
    server.apply(plain).await;
    let clean = |service: &Service| {
        external(service).is_empty() && annotation(service, "ironlb.dev/assigned-vips").is_none()
    };
    until(&client, "metal3/ironic", "nothing of ours is left", clean).await;
    node.holds("not served", |tables| tables.ports.is_empty())
        .await;
    server
        .apply(service("metal3/ironic", asks(VIP), json!({})))
        .await;
    until(&client, "metal3/ironic", "the VIP is shown again", shown).await;

    // Another controller's class: what that one writes stays.
    let mut other = service(
        "metal3/ironic",
        asks(VIP),
        json!({"loadBalancerClass": "example.com/other"}),
    );
    let api: Api<Service> = Api::namespaced(client.clone(), "metal3");
    api.delete("ironic", &DeleteParams::default())
        .await
        .expect("deleted, with no finalizer in the way");
    other["metadata"]["annotations"] = asks(VIP);
    server.apply(other).await;
    let theirs = json!({"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}});
    api.patch_status("ironic", &PatchParams::default(), &Patch::Merge(theirs))
        .await
        .expect("their status");
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(
        external(&get(&client, "metal3/ironic").await),
        ["192.0.2.1 VIP"]
    );
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slots_are_written_once_and_outlive_agents_and_pods() {
    let Some(server) = Server::start().await else {
        return;
    };
    let client = server.admin();
    let mut uids = BTreeMap::new();
    for name in ["ironic-a", "ironic-b", "ironic-c"] {
        uids.insert(name, pod(&server, name, json!([])).await);
    }
    let pods = |pods: &[(&str, u8)]| {
        let mut slice = slice("a", pods);
        for (endpoint, (name, _)) in slice["endpoints"]
            .as_array_mut()
            .expect("a list")
            .iter_mut()
            .zip(pods)
        {
            endpoint["targetRef"]["uid"] = json!(uids[name]);
        }
        slice
    };
    let annotations =
        json!({"ironlb.dev/vip": VIP, "ironlb.dev/instance-ports": "images=6200-6203"});
    server
        .apply(service("metal3/ironic", annotations.clone(), json!({})))
        .await;
    server
        .apply(pods(&[("ironic-a", 10), ("ironic-b", 11)]))
        .await;

    let mut a = Node::start(&server, "node-a", CONFIG, Maps::Written).await;
    let b = Node::start(&server, "node-b", CONFIG, Maps::Written).await;
    let one = |name: &str| Some(vec![name.to_owned()]);
    a.holds("both have ports", |tables| {
        leads_to(tables, VIP, 6200) == one("ironic-a")
            && leads_to(tables, VIP, 6201) == one("ironic-b")
    })
    .await;
    assert_ne!(a.status.leads(), b.status.leads(), "one agent writes");

    // A rolling restart: gone, and another that is new, and the first again.
    server.apply(pods(&[("ironic-b", 11)])).await;
    a.holds("no port without its pod", |tables| {
        leads_to(tables, VIP, 6200).is_none()
    })
    .await;
    server
        .apply(pods(&[("ironic-b", 11), ("ironic-c", 12)]))
        .await;
    a.holds("the new one has the next", |tables| {
        leads_to(tables, VIP, 6202) == one("ironic-c")
    })
    .await;
    server
        .apply(pods(&[
            ("ironic-a", 10),
            ("ironic-b", 11),
            ("ironic-c", 12),
        ]))
        .await;
    a.holds("the first has its own again", |tables| {
        leads_to(tables, VIP, 6200) == one("ironic-a")
    })
    .await;
    let ironic = get(&client, "metal3/ironic").await;
    let slots: Value =
        serde_json::from_str(annotation(&ironic, SLOTS).expect("slots")).expect("JSON");
    assert_eq!(slots, json!({"ironic-a": 0, "ironic-b": 1, "ironic-c": 2}));
    assert_eq!(
        leads_to(&b.tables(), VIP, 6200),
        one("ironic-a"),
        "every node serves"
    );

    // The writer dies without a word: within the Lease's time the other writes.
    let (mut left, begun) = if a.status.leads() {
        a.kill().await;
        (b, Instant::now())
    } else {
        b.kill().await;
        (a, Instant::now())
    };
    server
        .apply(service(
            "metal3/late",
            json!({}),
            json!({"ports": [{"port": 80}]}),
        ))
        .await;
    let given =
        |service: &Service| annotation(service, "ironlb.dev/assigned-vips") == Some("172.22.0.3");
    until(
        &client,
        "metal3/late",
        "a VIP is given by the other agent",
        given,
    )
    .await;
    let took = begun.elapsed();
    assert!(left.status.leads());
    eprintln!("another agent wrote {took:.1?} after the writer's death (Lease: {LEASE:?})");
    assert!(took < LEASE * 2, "{took:?}");
    // One that is told to end hands over at once.
    let c = Node::start(&server, "node-c", CONFIG, Maps::Written).await;
    left.holds("served", |_| true).await;
    left.stop().await;
    let begun = Instant::now();
    while !c.status.leads() {
        assert!(begun.elapsed() < LEASE, "the Lease was given up");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    c.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_the_api_changes_nothing_and_what_it_hid_is_healed() {
    let Some(mut server) = Server::start().await else {
        return;
    };
    server
        .apply(service("metal3/ironic", asks(VIP), json!({})))
        .await;
    server
        .apply(slice("a", &[("ironic-0", 10), ("ironic-1", 11)]))
        .await;
    server
        .apply(slice("b", &[("ironic-2", 12), ("ironic-3", 13)]))
        .await;
    let mut node = Node::start(&server, "node-a", CONFIG, Maps::Written).await;
    let all = Some(
        ["ironic-0", "ironic-1", "ironic-2", "ironic-3"]
            .map(str::to_owned)
            .to_vec(),
    );
    node.holds("all pods", |tables| leads_to(tables, VIP, 6385) == all)
        .await;
    let before = node.tables();
    let begun = Instant::now();
    // Leases are read for themselves, perhaps a little later.
    let is_old = |age: Option<Duration>| age.is_none_or(|age| age >= Duration::from_secs(5));
    while is_old(node.status.state_age()) {
        assert!(begun.elapsed() < PATIENCE, "the state does not get newer");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    server.stop_apiserver();
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert_eq!(node.tables(), before);
    let age = node.status.state_age().expect("it was in step");
    assert!(age >= Duration::from_secs(5), "{age:?}");
    assert_ne!(node.status.broken(), Vec::<String>::new());

    // Two of four go without an event that the agent could see.
    let delete = async |client| {
        let slices: Api<EndpointSlice> = Api::namespaced(client, "metal3");
        slices
            .delete("b", &DeleteParams::default())
            .await
            .expect("deleted");
    };
    server.behind_its_back(delete).await;
    assert_eq!(node.tables(), before);
    server.start_apiserver().await;
    let two = Some(["ironic-0", "ironic-1"].map(str::to_owned).to_vec());
    node.holds("the other two are gone", |tables| {
        leads_to(tables, VIP, 6385) == two
    })
    .await;
    let begun = Instant::now();
    while node
        .status
        .state_age()
        .is_none_or(|age| age > Duration::from_secs(5))
    {
        assert!(
            begun.elapsed() < PATIENCE,
            "in step again: {:?}",
            node.status.broken()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_have_what_it_asks_for_is_told_once_whoever_writes() {
    let Some(server) = Server::start().await else {
        return;
    };
    let client = server.admin();
    server
        .apply(service("metal3/ironic", asks(VIP), json!({})))
        .await;
    server.apply(slice("a", &[("ironic-0", 10)])).await;
    let mut node = Node::start(&server, "node-a", CONFIG, Maps::Written).await;
    let pod = Some(vec!["ironic-0".to_owned()]);
    node.holds("the pod", |tables| leads_to(tables, VIP, 6385) == pod)
        .await;
    server
        .apply(service("tenant/thief", asks(VIP), json!({})))
        .await;
    // Younger than Ironic, it loses one port and gets the other.
    let ports =
        json!({"ports": [{"name": "api", "port": 6385}, {"name": "metrics", "port": 9608}]});
    server
        .apply(service("metal3/young", asks(VIP), ports))
        .await;

    node.holds("what is left of it", |tables| {
        leads_to(tables, VIP, 9608).is_some()
    })
    .await;
    let not_allowed = (
        "VipNotAllowed".to_owned(),
        "172.22.0.2 is not for Services of namespace tenant; the agent's list of VIPs decides"
            .to_owned(),
    );
    let taken = (
        "PortTaken".to_owned(),
        "port `api` of 172.22.0.2: port 6385 is already taken by port `api` of metal3/ironic"
            .to_owned(),
    );
    let begun = Instant::now();
    loop {
        let thief = events(&client, "tenant/thief").await;
        let young = events(&client, "metal3/young").await;
        if thief.contains_key(&not_allowed) && young.contains_key(&taken) {
            assert_eq!(thief, BTreeMap::from([(not_allowed.clone(), 1)]));
            assert_eq!(young, BTreeMap::from([(taken, 1)]));
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{thief:?} {young:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // kube-proxy would send 6385 to the younger one's pods inside the cluster.
    assert_eq!(external(&get(&client, "metal3/young").await), [""; 0]);
    let thief = get(&client, "tenant/thief").await;
    assert_eq!(
        (
            external(&thief),
            annotation(&thief, "ironlb.dev/assigned-vips")
        ),
        (vec![], None)
    );
    assert_eq!(
        leads_to(&node.tables(), VIP, 6385),
        pod,
        "nothing has changed for Ironic"
    );
    assert!(leads_to(&node.tables(), VIP, 9608).is_some());

    // The next writer continues the same Event.
    node.stop().await;
    let node = Node::start(&server, "node-b", CONFIG, Maps::Written).await;
    let begun = Instant::now();
    loop {
        let thief = events(&client, "tenant/thief").await;
        if thief.get(&not_allowed) == Some(&2) {
            assert_eq!(thief.len(), 1, "{thief:?}");
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{thief:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    node.stop().await;
    let leases: Api<Lease> = Api::namespaced(client, NAMESPACE);
    let names: Vec<_> = leases
        .list(&ListParams::default())
        .await
        .expect("Leases")
        .items;
    let names: Vec<_> = names
        .into_iter()
        .filter_map(|lease| lease.metadata.name)
        .collect();
    assert_eq!(
        names,
        [
            "ironlb-agent-node-a",
            "ironlb-agent-node-b",
            "ironlb-writer"
        ]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_port_that_would_catch_a_vips_traffic_is_told_by_an_event() {
    let Some(server) = Server::start().await else {
        return;
    };
    let client = server.admin();
    let ports = json!([
        {"containerPort": 6180, "hostPort": 6180},
        {"containerPort": 6385, "hostPort": 16385},
    ]);
    let uid = pod(&server, "ironic-0", ports).await;
    server
        .apply(service("metal3/ironic", asks(VIP), json!({})))
        .await;
    let mut slice = slice("a", &[("ironic-0", 10)]);
    slice["endpoints"][0]["targetRef"]["uid"] = json!(uid);
    server.apply(slice).await;
    let mut node = Node::start(&server, "node-a", CONFIG, Maps::Written).await;
    let served = Some(vec!["ironic-0".to_owned()]);
    node.holds("the pod", |tables| leads_to(tables, VIP, 6180) == served)
        .await;
    let begun = Instant::now();
    let notes = loop {
        let told = events(&client, "metal3/ironic").await.into_keys();
        let clashes = told.filter(|(reason, _)| reason == "HostPortClash");
        let notes: Vec<_> = clashes.map(|(_, note)| note).collect();
        if !notes.is_empty() {
            break notes;
        }
        assert!(begun.elapsed() < PATIENCE, "no Event");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let [note] = &notes[..] else {
        panic!("one Event: {notes:?}");
    };
    assert!(
        note.contains("hostPort 6180,") && note.ends_with("remove the hostPort"),
        "{note}"
    );
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoint_changes_are_planned_soon_after_the_watch_event() {
    let Some(server) = Server::start().await else {
        return;
    };
    server
        .apply(service("metal3/ironic", asks(VIP), json!({})))
        .await;
    let mut node = Node::start(&server, "node-a", CONFIG, Maps::Written).await;
    for round in 0..50_u8 {
        let name = format!("ironic-{round}");
        server.apply(slice("a", &[(&name, round + 1)])).await;
        let expected = Some(vec![name]);
        node.holds("the change", |tables| {
            leads_to(tables, VIP, 6385) == expected
        })
        .await;
    }
    let latency = node.status.latency();
    let mean = latency.sum / u32::try_from(latency.count).expect("few");
    eprintln!(
        "from watch event to plan: {} changes, mean {mean:.1?}, buckets {:?}",
        latency.count, latency.buckets
    );
    assert!(latency.count >= 50, "{latency:?}");
    assert!(mean < Duration::from_millis(100), "{latency:?}");
    node.stop().await;
}

/// The Secret's key, as it is.
async fn secret(client: &Client) -> Option<(String, String)> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let secret = secrets.get_opt("ironlb-peers").await.expect("an answer")?;
    let data = secret.data.expect("data");
    let key = String::from_utf8(data["key"].0.clone()).expect("text");
    Some((secret.metadata.uid.expect("a UID"), key))
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_find_each_other_and_share_one_key_which_is_followed() {
    let Some(server) = Server::start().await else {
        return;
    };
    let client = server.admin();
    let (mut a, mut b) = tokio::join!(
        Node::start(&server, "node-a", CONFIG, Maps::Written),
        Node::start(&server, "node-b", CONFIG, Maps::Written),
    );
    a.knows("a key", |key, _| key.len() == 1).await;
    b.knows("a key", |key, _| key.len() == 1).await;
    let (uid, first) = secret(&client).await.expect("the Secret");
    assert!(first.len() >= 32, "{first}");
    assert_eq!(
        (a.peers().0, b.peers().0),
        (vec![first.clone()], vec![first.clone()])
    );

    a.moves_to(&["172.22.0.11"]);
    b.moves_to(&["172.22.0.12", "2001:db8::12"]);
    let all = parsed(&["172.22.0.11", "172.22.0.12", "2001:db8::12"]);
    a.knows("all addresses", |_, addresses| *addresses == all)
        .await;
    b.knows("all addresses", |_, addresses| *addresses == all)
        .await;
    // One that is renumbered.
    b.moves_to(&["172.22.0.13"]);
    let all = parsed(&["172.22.0.11", "172.22.0.13"]);
    a.knows("the new address", |_, addresses| *addresses == all)
        .await;

    // Rotation: the new one is accepted before it signs, then it signs, then the old one goes.
    let second = "a second key that is long enough for this";
    for lines in [vec![&first[..], second], vec![second, &first], vec![second]] {
        let patch = json!({"stringData": {"key": lines.join("\n")}});
        let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
        secrets
            .patch(
                "ironlb-peers",
                &PatchParams::default(),
                &Patch::Merge(patch),
            )
            .await
            .expect("edited");
        let begun = Instant::now();
        a.knows("the key of now", |key, _| key == lines).await;
        b.knows("the key of now", |key, _| key == lines).await;
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            begun.elapsed()
        );
    }
    assert_eq!(
        secret(&client).await,
        Some((uid.clone(), second.to_owned()))
    );

    // One that is deleted by mistake comes back as it was.
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    secrets
        .delete("ironlb-peers", &DeleteParams::default())
        .await
        .expect("deleted");
    let begun = Instant::now();
    let again = loop {
        match secret(&client).await {
            Some(again) if again.0 != uid => break again,
            _ => tokio::time::sleep(Duration::from_millis(50)).await,
        }
        assert!(begun.elapsed() < PATIENCE, "the Secret is not made again");
    };
    assert_eq!(again.1, second);
    assert_eq!(
        (a.peers().0, b.peers().0),
        (vec![second.to_owned()], vec![second.to_owned()])
    );

    // An agent that is silent is still a peer; one whose Lease is removed is none.
    b.kill().await;
    tokio::time::sleep(LEASE + A_WHILE).await;
    assert_eq!(a.peers().1, all);
    let leases: Api<Lease> = Api::namespaced(client, NAMESPACE);
    leases
        .delete("ironlb-agent-node-b", &DeleteParams::default())
        .await
        .expect("deleted");
    let left = parsed(&["172.22.0.11"]);
    a.knows("node-b is gone", |_, addresses| *addresses == left)
        .await;
    a.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_api_an_agent_starts_with_the_peers_that_it_remembers() {
    let Some(mut server) = Server::start().await else {
        return;
    };
    server
        .apply(service("metal3/ironic", asks(VIP), json!({})))
        .await;
    server.apply(slice("a", &[("ironic-0", 10)])).await;
    let mut node = Node::start(&server, "node-a", CONFIG, Maps::Written).await;
    node.moves_to(&["172.22.0.11"]);
    let own = parsed(&["172.22.0.11"]);
    node.knows("itself", |key, addresses| {
        !key.is_empty() && *addresses == own
    })
    .await;
    let (key, addresses) = node.peers();
    let new = tempfile::tempdir().expect("a folder");
    let (kept, file) = (new.path().join("kept"), "state/peers.json");
    std::fs::create_dir_all(kept.join("state")).expect("a folder");
    std::fs::copy(node.folder().join(file), kept.join(file)).expect("it is written");
    server.stop_apiserver();
    node.kill().await;

    let mut again = source(&server, "node-a", CONFIG, &kept).await;
    let state = again.meanwhile().expect("it remembers");
    assert_eq!(known(state.peers.as_ref()), (key.clone(), addresses));
    assert_eq!(state.services, vec![]);
    assert_eq!((state.vips.len(), state.uplinks.len()), (2, 1));
    assert!(state.vips.iter().all(|vip| vip.candidate));
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(
        again.news().expect("the file is good"),
        None,
        "the API is away"
    );

    // With the API come the Services, and the peers stay the same.
    server.start_apiserver().await;
    let begun = Instant::now();
    let state = loop {
        let _ = tokio::time::timeout(PATIENCE, again.changed()).await;
        match again.news().expect("the file is good") {
            Some(state) => break state,
            None => assert!(begun.elapsed() < PATIENCE, "no state"),
        }
    };
    assert_eq!(state.services.len(), 1);
    assert_eq!(known(state.peers.as_ref()).0, key);
    again.stop().await;

    // Who remembers nothing has no business in an election.
    let mut nobody = source(&server, "node-b", CONFIG, new.path()).await;
    assert_eq!(nobody.meanwhile(), None);
    nobody.stop().await;
}
