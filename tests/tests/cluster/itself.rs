//! The cluster is what it must be for the other scenarios to mean something.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ironlb_tests::cluster::Cluster;

use crate::Scenario;

pub const SCENARIOS: &[Scenario] = &[
    (
        "pods_of_both_nodes_reach_each_other",
        pods_of_both_nodes_reach_each_other,
    ),
    ("a_cluster_ip_is_served", a_cluster_ip_is_served),
    (
        "hosts_reach_nodes_and_not_pods",
        hosts_reach_nodes_and_not_pods,
    ),
    (
        "pods_outlive_an_outage_of_the_api",
        pods_outlive_an_outage_of_the_api,
    ),
];

/// Two web servers, one on each node, behind a ClusterIP.
const WEB: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ports: [{port: 80}]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: web
        image: localhost/web:test
        imagePullPolicy: Never
        readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}
"#;

/// Starts the web servers; name, node and address of each.
fn web(cluster: &Cluster) -> Result<Vec<[String; 3]>> {
    cluster.apply(WEB)?;
    cluster.wait_ready("daemonset/web", &[], Duration::from_secs(60))?;
    let pods = cluster.get(&["pods", "--selector", "app=web"])?;
    let pods = pods["items"].as_array().context("no list of pods")?;
    let field = |pod: &serde_json::Value, pointer: &str| {
        let field = pod.pointer(pointer).and_then(|value| value.as_str());
        field
            .map(str::to_owned)
            .with_context(|| format!("no {pointer} in {pod}"))
    };
    pods.iter()
        .map(|pod| {
            Ok([
                field(pod, "/metadata/name")?,
                field(pod, "/spec/nodeName")?,
                field(pod, "/status/podIP")?,
            ])
        })
        .collect()
}

/// What a pod sees of a URL.
fn fetch(cluster: &Cluster, pod: &str, url: &str) -> Result<String> {
    cluster.kubectl(&[
        "exec",
        pod,
        "--",
        "curl",
        "--silent",
        "--show-error",
        "--max-time",
        "5",
        url,
    ])
}

fn pods_of_both_nodes_reach_each_other(cluster: &mut Cluster) -> Result<()> {
    let pods = web(cluster)?;
    let nodes: Vec<_> = pods.iter().map(|[_, node, _]| node.as_str()).collect();
    ensure!(
        nodes.contains(&"node-a") && nodes.contains(&"node-b"),
        "pods are on {nodes:?}"
    );
    for [asking, _, own] in &pods {
        for [asked, _, address] in &pods {
            let answer = fetch(cluster, asking, &format!("http://{address}/"))?;
            ensure!(
                answer.contains(asked) && answer.contains(own),
                "{asking} ({own}) asked {asked}, and got {answer}"
            );
        }
    }
    Ok(())
}

fn a_cluster_ip_is_served(cluster: &mut Cluster) -> Result<()> {
    let pods = web(cluster)?;
    let service = cluster.get(&["service", "web"])?;
    let address = service["spec"]["clusterIP"]
        .as_str()
        .context("no ClusterIP")?;
    let mut answered = Vec::new();
    for _ in 0..40 {
        let answer = fetch(cluster, &pods[0][0], &format!("http://{address}/"))?;
        answered.extend(
            pods.iter()
                .map(|[name, ..]| name)
                .filter(|name| answer.contains(*name)),
        );
    }
    for [name, ..] in &pods {
        ensure!(
            answered.contains(&name),
            "{name} answered none of 40 requests"
        );
    }
    Ok(())
}

fn hosts_reach_nodes_and_not_pods(cluster: &mut Cluster) -> Result<()> {
    let pods = web(cluster)?;
    let host = &cluster.hosts[0].namespace;
    for node in &cluster.nodes {
        // kubelet, which answers that it does not know the host.
        let kubelet = format!("https://{}:10250/", node.provisioning);
        host.exec([
            "curl",
            "--silent",
            "--insecure",
            "--max-time",
            "5",
            &kubelet,
        ])?;
    }
    for [name, _, address] in &pods {
        let answer = host.output(["curl", "--silent", "--max-time", "2", address])?;
        ensure!(
            !answer.status.success(),
            "a host reaches {name} at {address}"
        );
    }
    Ok(())
}

fn pods_outlive_an_outage_of_the_api(cluster: &mut Cluster) -> Result<()> {
    let before = web(cluster)?;
    cluster.stop_apiserver()?;
    ensure!(
        cluster.kubectl(&["get", "nodes"]).is_err(),
        "the API still answers"
    );
    for [name, _, address] in &before {
        let answer = cluster.nodes[0].exec(["curl", "--silent", "--max-time", "5", address])?;
        ensure!(answer.contains(name), "{name} answers {answer}");
    }
    cluster.start_apiserver()?;
    let after = web(cluster)?;
    ensure!(before == after, "pods were {before:?} and are {after:?}");
    Ok(())
}
