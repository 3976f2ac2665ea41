//! How soon the maps follow Kubernetes: a real cluster, an endpoint that becomes ready and unready, one change at a time.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use comfy_table::Table;
use ironlb_tests::cluster::{Cluster, ClusterNode};
use ironlb_tests::wait_until;
use serde_json::{Value, json};

use crate::judge;
use crate::statistics::Estimate;

/// Whose Services may have [`VIP`] in the test cluster.
const NAMESPACE: &str = "crowd";
/// A VIP of the test cluster.
const VIP: &str = "172.22.0.3";
/// Most milliseconds from the watch event to the maps.
const GOAL: f64 = 100.0;

/// Measures so many changes; the JSON of milliseconds from the watch event, and from kubectl's start, to the maps.
pub fn measure(image: &Path, changes: usize) -> Result<Value> {
    let cluster = Cluster::builder().build()?;
    cluster.deploy_ironlb(image)?;
    cluster.trust_endpoints()?;
    let node = cluster.nodes.first().context("a node")?;
    cluster.apply(
        &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
            .to_string(),
    )?;
    cluster.apply(&service().to_string())?;
    change(&cluster, node, true)?;
    let (mut from_event, mut from_kubectl) = (Vec::new(), Vec::new());
    for number in 0..changes {
        let (sum, count) = node.to_maps()?;
        from_kubectl.push(change(&cluster, node, number % 2 == 1)?);
        let (sum, count) = {
            let (new_sum, new_count) = node.to_maps()?;
            (new_sum - sum, new_count - count)
        };
        ensure!(count > 0.0, "the agent has counted no change");
        from_event.push(sum / count * 1e3);
    }
    let (event, kubectl) = (Estimate::of(&from_event), Estimate::of(&from_kubectl));
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header([
        "endpoint change → maps, ms",
        "median [90 % interval]",
        "goal",
        "",
    ]);
    let cell = |e: Estimate| format!("{:.0} [{:.0}–{:.0}]", e.median, e.lo, e.hi);
    let goal = format!("< {GOAL}");
    table.add_row([
        "from the watch event",
        &cell(event),
        &goal,
        judge(event.lo < GOAL),
    ]);
    table.add_row(["from the start of kubectl", &cell(kubectl), "", ""]);
    println!("\n{table}\n{changes} changes, one at a time");
    Ok(json!({"watch_event": event.json(), "kubectl": kubectl.json()}))
}

fn service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "bench", "namespace": NAMESPACE, "annotations": {"ironlb.dev/vip": VIP}},
        "spec": {
            "type": "LoadBalancer", "loadBalancerClass": "ironlb.dev/xdp",
            "allocateLoadBalancerNodePorts": false, "ports": [{"name": "web", "port": 80}],
        },
    })
}

/// Makes the endpoint ready or not, and waits until the maps say so; milliseconds that it took.
fn change(cluster: &Cluster, node: &ClusterNode, ready: bool) -> Result<f64> {
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": "bench", "namespace": NAMESPACE, "labels": {"kubernetes.io/service-name": "bench"},
        },
        "ports": [{"name": "web", "port": 80, "protocol": "TCP"}],
        "endpoints": [{
            "addresses": ["10.201.0.1"], "nodeName": node.name,
            "conditions": {"ready": ready, "serving": ready, "terminating": false},
        }],
    });
    let begin = Instant::now();
    cluster.apply(&slice.to_string())?;
    let what = if ready {
        "the endpoint is used"
    } else {
        "the endpoint is not used"
    };
    wait_until(what, Duration::from_secs(20), || {
        let backends = node.reader()?.backends()?;
        Ok(backends
            .iter()
            .any(|b| b.vip.is_some_and(|vip| vip.to_string() == VIP) && b.eligible == ready))
    })?;
    Ok(begin.elapsed().as_secs_f64() * 1e3)
}
