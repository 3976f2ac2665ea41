//! A Service gets its VIP, and only who may have it.

use anyhow::{Context as _, Result, ensure};
use ironlb_tests::cluster::Cluster;
use ironlb_tests::{API_PORT, VIP, wait_until};
use serde_json::json;

use crate::Scenario;
use crate::scene::{
    IN, NAMESPACE, PATIENCE, Web, begin, curl, empty, event, external, refused, serving, shows_vip,
};

pub const SCENARIOS: &[Scenario] = &[
    (
        "a_service_shows_its_vip_and_answers_there",
        a_service_shows_its_vip_and_answers_there,
    ),
    ("a_tenant_cannot_take_the_vip", a_tenant_cannot_take_the_vip),
    (
        "an_endpoint_that_lies_about_its_pod_is_not_used",
        an_endpoint_that_lies_about_its_pod_is_not_used,
    ),
];

fn a_service_shows_its_vip_and_answers_there(cluster: &mut Cluster) -> Result<()> {
    begin(cluster)?;
    // Without pods it is there already, and refuses.
    let service = Web::service().to_string();
    cluster.apply(&service)?;
    shows_vip(cluster, "web")?;
    refused(cluster, API_PORT)?;

    let pods = Web::default().start(cluster)?;
    let url = format!("http://{VIP}:{API_PORT}/");
    let host = cluster.hosts[0].address.to_string();
    for _ in 0..20 {
        let answer = curl(cluster, &url)?;
        ensure!(
            pods.iter().any(|pod| answer.contains(&pod.name)) && answer.contains(&host),
            "{url} answers {answer}; pods are {pods:?}, the client is {host}"
        );
    }
    let shown = cluster.kubectl(&["get", "service/web", IN[0], IN[1]])?;
    ensure!(shown.contains(&VIP.to_string()), "kubectl shows {shown}");
    let ports = cluster.get(&["service/web", IN[0], IN[1]])?;
    ensure!(
        ports.pointer("/spec/ports/0/nodePort").is_none(),
        "a node port: {ports}"
    );

    cluster.kubectl(&["delete", "service/web", IN[0], IN[1]])?;
    wait_until("the VIP's port is refused", PATIENCE, || {
        Ok(refused(cluster, API_PORT).is_ok())
    })
}

fn an_endpoint_that_lies_about_its_pod_is_not_used(cluster: &mut Cluster) -> Result<()> {
    const PORT: u16 = 8081;
    begin(cluster)?;
    let pod = Web::default().start(cluster)?.remove(0);
    let object = cluster.get(&["pod", &pod.name, IN[0], IN[1]])?;
    let mut service = Web::service();
    service["metadata"]["name"] = "lies".into();
    service["spec"]["selector"] = json!(null);
    service["spec"]["ports"] = json!([{"port": PORT}]);
    // The kubelet of the node, in the name of a pod.
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": "lies", "namespace": NAMESPACE, "labels": {"kubernetes.io/service-name": "lies"},
        },
        "ports": [{"port": 10_250, "protocol": "TCP"}],
        "endpoints": [{
            "addresses": ["10.250.0.11"], "nodeName": pod.node,
            "conditions": {"ready": true, "serving": true, "terminating": false},
            "targetRef": {
                "kind": "Pod", "namespace": NAMESPACE, "name": pod.name, "uid": object["metadata"]["uid"],
            },
        }],
    });
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [service, slice]});
    cluster.apply(&list.to_string())?;
    let note = event(cluster, "lies", NAMESPACE, "EndpointNotAllowed")?;
    ensure!(note.contains("10.250.0.11"), "the Event says {note}");
    refused(cluster, PORT)
}

fn a_tenant_cannot_take_the_vip(cluster: &mut Cluster) -> Result<()> {
    const TENANT: &str = "tenant";
    begin(cluster)?;
    let pods = Web::default().start(cluster)?;
    empty(cluster, TENANT)?;
    // Ironic's port, and another one; older than nothing, but the namespace decides.
    let service = |name: &str, port: u16| {
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {
                "name": name, "namespace": TENANT,
                "annotations": {"ironlb.dev/vip": VIP.to_string()},
            },
            "spec": {
                "type": "LoadBalancer", "loadBalancerClass": "ironlb.dev/xdp",
                "allocateLoadBalancerNodePorts": false,
                "selector": {"app": "web"}, "ports": [{"port": port, "targetPort": 80}],
            },
        })
    };
    for (name, port) in [("same-port", API_PORT), ("other-port", 8080)] {
        cluster.apply(&service(name, port).to_string())?;
        let note = event(cluster, name, TENANT, "VipNotAllowed")?;
        ensure!(
            note.contains(TENANT) && note.contains(&VIP.to_string()),
            "the Event says {note}"
        );
        let given = external(cluster, name, TENANT)?;
        ensure!(given.is_none(), "{name} was given {given:?}");
    }
    refused(cluster, 8080)?;
    serving(cluster, pods.len()).context("the port's owner lost it")?;
    let answer = curl(cluster, &format!("http://{VIP}:{API_PORT}/"))?;
    ensure!(
        pods.iter().any(|pod| answer.contains(&pod.name)),
        "{NAMESPACE}'s Service answers {answer}"
    );
    cluster
        .kubectl(&["delete", "namespace", TENANT, "--wait=false"])
        .map(drop)
}
