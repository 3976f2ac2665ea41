//! Instances have ports of their own, keep them, and know them before they start.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use ironlb_tests::cluster::{Cluster, ContainerImage, overlay};
use ironlb_tests::{API_PORT, IMAGE_PORT, VIP, wait_until};
use serde_json::json;

use crate::Scenario;
use crate::scene::{
    IN, NAMESPACE, PATIENCE, begin, curl, ready_at, refused, serving_node, shows_vip,
};

pub const SCENARIOS: &[Scenario] = &[
    (
        "instances_learn_their_urls_before_they_start_and_keep_them",
        instances_learn_their_urls_before_they_start_and_keep_them,
    ),
    (
        "pods_of_the_operators_high_availability_learn_their_urls",
        pods_of_the_operators_high_availability_learn_their_urls,
    ),
];

/// First port of a range of 32.
const FIRST: u16 = 6200;

/// What instance-env wrote, as a container of the pod reads it.
pub fn environment(
    cluster: &Cluster,
    pod: &str,
    container: &str,
) -> Result<BTreeMap<String, String>> {
    let words = ["exec", pod, IN[0], IN[1], "--container", container, "--"];
    let read = ["cat", "/shared/instance.env"];
    let text = cluster.kubectl(&[&words[..], &read].concat())?;
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    Ok(pairs
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect())
}

/// The port of the VIP that a URL leads to.
fn port_of(url: &str) -> Result<u16> {
    let port = url.strip_prefix(&format!("http://{VIP}:"));
    port.and_then(|port| port.trim_end_matches('/').parse().ok())
        .with_context(|| format!("{url} does not lead to the VIP"))
}

fn instances_learn_their_urls_before_they_start_and_keep_them(cluster: &mut Cluster) -> Result<()> {
    begin(cluster)?;
    let service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "ironic", "namespace": NAMESPACE, "annotations": {
            "ironlb.dev/vip": VIP.to_string(),
            "ironlb.dev/instance-ports": format!("image-svc={FIRST}-{}", FIRST + 31),
        }},
        "spec": {
            "type": "LoadBalancer", "loadBalancerClass": "ironlb.dev/xdp",
            "allocateLoadBalancerNodePorts": false,
            "selector": {"app": "web"},
            "ports": [
                {"name": "ironic-api", "port": API_PORT, "targetPort": API_PORT},
                {"name": "image-svc", "port": IMAGE_PORT, "targetPort": IMAGE_PORT},
            ],
        },
    });
    let shared = json!([{"name": "shared", "mountPath": "/shared"}]);
    let set = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet",
        "metadata": {"name": "ironic", "namespace": NAMESPACE},
        "spec": {
            "serviceName": "ironic", "replicas": 3, "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": {
                "terminationGracePeriodSeconds": 1,
                "automountServiceAccountToken": false,
                "initContainers": [{
                    "name": "instance-env", "image": "localhost/ironlb:dev", "args": ["instance-env"],
                    "env": [{"name": "HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}],
                    // As little as a pod can have.
                    "securityContext": {
                        "runAsUser": 997, "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": shared,
                }],
                "containers": [{
                    "name": "web", "image": "localhost/web:test", "imagePullPolicy": "Never",
                    "env": [{"name": "PORTS", "value": format!("{API_PORT} {IMAGE_PORT}")}],
                    "readinessProbe": {"tcpSocket": {"port": IMAGE_PORT}, "periodSeconds": 1},
                    "volumeMounts": shared,
                }],
                "volumes": [{"name": "shared", "emptyDir": {}}],
                "securityContext": {"fsGroup": 994},
            }},
        },
    });
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [service, set]});
    cluster.apply(&list.to_string())?;
    cluster.wait_ready("statefulset/ironic", &IN, PATIENCE)?;
    shows_vip(cluster, "ironic")?;
    let know = |cluster: &Cluster| -> Result<()> {
        for number in 0..3 {
            let pod = format!("ironic-{number}");
            let environment = environment(cluster, &pod, "web")?;
            let base = environment.get("IRONIC_BASE_URL").context("no base URL")?;
            ensure!(port_of(base)? == API_PORT, "{pod} has {environment:?}");
            let url = environment.get("IRONIC_HTTP_URL").context("no URL")?;
            ensure!(port_of(url)? == FIRST + number, "{pod} has {environment:?}");
            // Whoever is sent there gets to this pod, from any port.
            for _ in 0..5 {
                let answer = curl(cluster, url)?;
                ensure!(answer.contains(&pod), "{url} of {pod} answers {answer}");
            }
        }
        Ok(())
    };
    know(cluster)?;
    refused(cluster, FIRST + 3)?;

    // Two are left, and none has another's port; then all come back to theirs.
    cluster.kubectl(&["scale", "statefulset/ironic", "--replicas=2", IN[0], IN[1]])?;
    let alone = |port| ready_at(cluster, port).map(|ready| ready.unwrap_or_default());
    wait_until("the third instance is gone", PATIENCE, || {
        Ok(alone(FIRST + 2)?.is_empty())
    })?;
    refused(cluster, FIRST + 2)?;
    for number in 0..2 {
        let ready = alone(FIRST + number)?;
        ensure!(
            ready == BTreeSet::from([format!("ironic-{number}")]),
            "port {} leads to {ready:?}",
            FIRST + number
        );
    }
    cluster.kubectl(&["scale", "statefulset/ironic", "--replicas=3", IN[0], IN[1]])?;
    cluster.kubectl(&["rollout", "restart", "statefulset/ironic", IN[0], IN[1]])?;
    cluster.wait_ready("statefulset/ironic", &IN, PATIENCE)?;
    for number in 0..3 {
        let name = format!("ironic-{number}");
        wait_until(&format!("{name} is served"), PATIENCE, || {
            Ok(alone(FIRST + number)? == BTreeSet::from([name.clone()]))
        })?;
    }
    know(cluster)
}

/// The operator's pods have no index, one environment for all, and hostPorts; a policy gives them an init container.
fn pods_of_the_operators_high_availability_learn_their_urls(cluster: &mut Cluster) -> Result<()> {
    begin(cluster)?;
    serving_node(cluster)?.import(&ContainerImage::Ironic.archive()?)?;
    // The policy first: it changes pods when they are made.
    let undo = ["delete", "--ignore-not-found", "--kustomize"];
    let overlay = overlay("irso-ha").display().to_string();
    let scenario = (|| {
        cluster.apply_kustomization(overlay.as_ref())?;
        cluster.wait_ready("deployment/ironic-db", &IN, PATIENCE)?;
        // Made anew until the policy is known to the API server, which takes it a moment.
        wait_until(
            "the policy gives a pod its init container",
            PATIENCE,
            || {
                let selector = "--selector=ironic.metal3.io/app=ironic-service";
                let pods = cluster.get(&["pods", selector, IN[0], IN[1]])?;
                let init = pods.pointer("/items/0/spec/initContainers/0/name");
                if init.is_some_and(|name| name == "instance-env") {
                    return Ok(true);
                }
                cluster.kubectl(&["delete", "pod", selector, "--now", IN[0], IN[1]])?;
                std::thread::sleep(std::time::Duration::from_secs(1));
                Ok(false)
            },
        )?;
        cluster.wait_ready("daemonset/ironic-service", &IN, PATIENCE)?;
        shows_vip(cluster, "ironic-provisioning")?;
        let pods = "--selector=ironic.metal3.io/app=ironic-service";
        let pods = cluster.get(&["pods", pods, IN[0], IN[1]])?;
        let pod = pods.pointer("/items/0/metadata/name");
        let pod = pod.and_then(|name| name.as_str()).context("no pod")?;
        let environment = environment(cluster, pod, "httpd")?;
        let url = environment.get("IRONIC_HTTP_URL").context("no URL")?;
        ensure!(port_of(url)? == FIRST, "{pod} has {environment:?}");
        // What Ironic's own process makes of it.
        let root = curl(cluster, &format!("http://{VIP}:{API_PORT}/v1"))?;
        let root: serde_json::Value = serde_json::from_str(&root)?;
        let link = root.pointer("/links/0/href").and_then(|link| link.as_str());
        let own = format!("http://{VIP}:{API_PORT}/v1");
        ensure!(
            link.is_some_and(|link| link.starts_with(&own)),
            "Ironic's links are {link:?}"
        );
        curl(cluster, &format!("{url}/"))?;
        Ok(())
    })();
    cluster.kubectl(&[&undo[..], &[&overlay]].concat())?;
    scenario
}
