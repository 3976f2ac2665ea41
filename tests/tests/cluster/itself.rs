//! The cluster is what it must be for the other scenarios to mean something, over both versions of IP.

use std::net::{IpAddr, SocketAddr};
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

/// Two web servers, one on each node, behind a ClusterIP of each version.
const WEB: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  ipFamilyPolicy: RequireDualStack
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

/// One of the web servers.
#[derive(Debug, PartialEq)]
struct WebPod {
    name: String,
    node: String,
    /// One of each version.
    addresses: [IpAddr; 2],
}

/// An address of each version from a list in an object.
fn both(addresses: &[&str]) -> Result<[IpAddr; 2]> {
    let addresses = addresses.iter().map(|address| address.parse());
    let addresses: Vec<IpAddr> = addresses.collect::<Result<_, _>>()?;
    let [v4, v6] = addresses[..] else {
        anyhow::bail!("not two addresses: {addresses:?}");
    };
    ensure!(v4.is_ipv4() && v6.is_ipv6(), "addresses are {v4} and {v6}");
    Ok([v4, v6])
}

/// Where a web server answers.
fn url(address: IpAddr) -> String {
    format!("http://{}/", SocketAddr::new(address, 80))
}

/// Starts the web servers.
fn web(cluster: &Cluster) -> Result<Vec<WebPod>> {
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
            let ips = pod["status"]["podIPs"].as_array().into_iter().flatten();
            let ips: Vec<_> = ips.filter_map(|ip| ip["ip"].as_str()).collect();
            Ok(WebPod {
                name: field(pod, "/metadata/name")?,
                node: field(pod, "/spec/nodeName")?,
                addresses: both(&ips)?,
            })
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
    let nodes: Vec<_> = pods.iter().map(|pod| pod.node.as_str()).collect();
    ensure!(
        nodes.contains(&"node-a") && nodes.contains(&"node-b"),
        "pods are on {nodes:?}"
    );
    for asking in &pods {
        for asked in &pods {
            for (own, address) in asking.addresses.iter().zip(asked.addresses) {
                let answer = fetch(cluster, &asking.name, &url(address))?;
                ensure!(
                    answer.contains(&asked.name) && answer.contains(&own.to_string()),
                    "{asking:?} asked {asked:?} at {address}, and got {answer}"
                );
            }
        }
    }
    Ok(())
}

fn a_cluster_ip_is_served(cluster: &mut Cluster) -> Result<()> {
    let pods = web(cluster)?;
    let service = cluster.get(&["service", "web"])?;
    let addresses = service["spec"]["clusterIPs"].as_array();
    let addresses = addresses.into_iter().flatten();
    let addresses: Vec<_> = addresses.filter_map(|address| address.as_str()).collect();
    for address in both(&addresses)? {
        let mut answered = Vec::new();
        for _ in 0..40 {
            let answer = fetch(cluster, &pods[0].name, &url(address))?;
            let names = pods.iter().map(|pod| &pod.name);
            answered.extend(names.filter(|name| answer.contains(*name)));
        }
        for pod in &pods {
            ensure!(
                answered.contains(&&pod.name),
                "{} answered none of 40 requests to {address}",
                pod.name
            );
        }
    }
    Ok(())
}

fn hosts_reach_nodes_and_not_pods(cluster: &mut Cluster) -> Result<()> {
    let pods = web(cluster)?;
    let host = &cluster.hosts[0].namespace;
    for node in &cluster.nodes {
        for address in [node.provisioning.into(), node.provisioning6.into()] {
            // kubelet, which answers that it does not know the host.
            let kubelet = format!("https://{}/", SocketAddr::new(address, 10_250));
            host.exec([
                "curl",
                "--silent",
                "--insecure",
                "--max-time",
                "5",
                &kubelet,
            ])?;
        }
    }
    for pod in &pods {
        for address in pod.addresses {
            let answer = host.output(["curl", "--silent", "--max-time", "2", &url(address)])?;
            ensure!(
                !answer.status.success(),
                "a host reaches {} at {address}",
                pod.name
            );
        }
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
    for pod in &before {
        let url = url(pod.addresses[0]);
        let answer = cluster.nodes[0].exec(["curl", "--silent", "--max-time", "5", &url])?;
        ensure!(answer.contains(&pod.name), "{} answers {answer}", pod.name);
    }
    cluster.start_apiserver()?;
    let after = web(cluster)?;
    ensure!(before == after, "pods were {before:?} and are {after:?}");
    Ok(())
}
