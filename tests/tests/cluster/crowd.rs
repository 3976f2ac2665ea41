//! More than a provisioning network ever has: hundreds of Services whose endpoints change all the time, and other
//! programs' rules beside ours.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ironlb_tests::cluster::{Cluster, ironlb_image};
use ironlb_tests::{API_PORT, Download, VIP, wait_until};
use lb_common::MAX_BACKENDS;
use serde_json::{Value, json};

use crate::Scenario;
use crate::scene::{PATIENCE, SERVING, Web, begin, clients, empty, serving_node, start_download};

pub const SCENARIOS: &[Scenario] = &[
    (
        "firewalls_beside_us_drop_nothing_of_ours",
        firewalls_beside_us_drop_nothing_of_ours,
    ),
    (
        "the_maps_hold_what_the_api_says_after_a_minute_of_changes",
        the_maps_hold_what_the_api_says_after_a_minute_of_changes,
    ),
];

/// kube-proxy redirects in nftables; in iptables it also drops what conntrack calls invalid, so that rule is added.
fn firewalls_beside_us_drop_nothing_of_ours(cluster: &mut Cluster) -> Result<()> {
    const TABLE: &str = "ironlb-test";
    begin(cluster)?;
    let node = serving_node(cluster)?;
    node.exec(["nft", "list", "table", "ip", "kube-proxy"])
        .context("kube-proxy does not run")?;
    let sha256 = start_download(cluster, 256)?;
    let rule = format!(
        "add table ip {TABLE}; \
         add chain ip {TABLE} forward {{ type filter hook forward priority 0; }}; \
         add rule ip {TABLE} forward ct state established counter accept; \
         add rule ip {TABLE} forward ct state invalid counter drop"
    );
    node.exec(["nft", &rule])?;
    let host = &cluster.hosts[0].namespace;
    let url = format!("http://{VIP}:{API_PORT}/download");
    // As fast as it goes, where half-seen connections fall out of conntrack's window.
    let download = || Download::start(host, &url, &[], Duration::from_secs(60))?.finish(&sha256);
    let downloaded = download().and_then(|()| download());
    let counters = node.exec(["nft", "list", "chain", "ip", TABLE, "forward"]);
    node.exec(["nft", "delete", "table", "ip", TABLE])?;
    downloaded?;
    let counters = counters?;
    let packets = |state: &str| {
        let line = counters.lines().find(|line| line.contains(state));
        let count = line.and_then(|line| line.split_once("packets ")?.1.split(' ').next());
        count.and_then(|count| count.parse::<u64>().ok())
    };
    ensure!(
        packets("established") > Some(100) && packets("invalid") == Some(0),
        "the rules say {counters}"
    );
    Ok(())
}

/// The VIP of the crowd's Services, each at a port of its own.
const CROWD_VIP: &str = "172.22.0.3";
const CROWD: &str = "crowd";
const SERVICES: usize = 200;
const FIRST_PORT: usize = 10_000;
const CHURN: Duration = Duration::from_secs(60);

/// Endpoints of a Service: 50, or as many as there is room for in the maps.
fn endpoints_each() -> usize {
    const OTHERS: usize = 64;
    50.min((MAX_BACKENDS as usize - OTHERS) / SERVICES)
}

fn the_maps_hold_what_the_api_says_after_a_minute_of_changes(cluster: &mut Cluster) -> Result<()> {
    begin(cluster)?;
    empty(cluster, CROWD)?;
    Web::default().start(cluster)?;
    cluster.trust_endpoints()?;
    let node = serving_node(cluster)?;
    let had = node.to_maps()?;
    let clients = clients(cluster, 20);
    let mut random = Random(0x1d0_2c0de);
    let services: Vec<Value> = (0..SERVICES).map(service).collect();
    create(cluster, services)?;
    create(
        cluster,
        (0..SERVICES)
            .map(|number| slice(number, &mut random))
            .collect(),
    )?;

    let begun = Instant::now();
    let mut changes = 0;
    while begun.elapsed() < CHURN {
        // All slices anew, and some Services go and come back.
        let gone: Vec<usize> = (0..5)
            .map(|_| random.below(SERVICES))
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect();
        let names: Vec<String> = gone
            .iter()
            .map(|number| format!("crowd-{number}"))
            .collect();
        let mut delete = vec!["delete", "service", "--wait=false", "--namespace", CROWD];
        delete.extend(names.iter().map(String::as_str));
        cluster.kubectl(&delete)?;
        let slices = (0..SERVICES)
            .map(|number| slice(number, &mut random))
            .collect();
        submit(cluster, "replace", slices)?;
        create(cluster, gone.iter().copied().map(service).collect())?;
        changes += SERVICES + 2 * gone.len();
    }
    let took = begun.elapsed();
    let ended = Instant::now();
    let wanted = wanted(cluster)?;
    ensure!(
        wanted.len() > SERVICES * endpoints_each() / 2,
        "only {} endpoints are left",
        wanted.len()
    );
    let same = wait_until("the maps hold what the API says", PATIENCE, || {
        Ok(held(cluster)? == wanted)
    });
    same.with_context(|| {
        let held = held(cluster).unwrap_or_default();
        format!(
            "missing: {:?}, too many: {:?}",
            wanted.difference(&held).take(5).collect::<Vec<_>>(),
            held.difference(&wanted).take(5).collect::<Vec<_>>()
        )
    })?;
    let lag = ended.elapsed();
    let requests = clients.stop()?;
    requests.all_served(20 * CHURN.as_secs() as usize / 2)?;
    let (sum, count) = node.to_maps()?;
    let mean = (sum - had.0) / (count - had.1) * 1e3;
    eprintln!(
        "    {SERVICES} Services with {} endpoints each at most, {changes} changes in {took:.0?}; equal {lag:.1?} after \
         the last (the look included); {mean:.0} ms from event to maps on average; {} requests beside it, none failed",
        endpoints_each(),
        requests.0.len()
    );
    cluster.kubectl(&["delete", "namespace", CROWD, "--wait=false"])?;
    cluster.deploy_ironlb(&ironlb_image()?)?;
    cluster.restart_agents()
}

/// A number generator (xorshift64) whose results are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

fn service(number: usize) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": format!("crowd-{number}"), "namespace": CROWD,
            "annotations": {"ironlb.dev/vip": CROWD_VIP},
        },
        "spec": {
            "type": "LoadBalancer", "loadBalancerClass": "ironlb.dev/xdp",
            "allocateLoadBalancerNodePorts": false,
            "ports": [{"name": "web", "port": FIRST_PORT + number}],
        },
    })
}

/// Most of a Service's endpoints, in states that chance decides.
fn slice(number: usize, random: &mut Random) -> Value {
    let mut endpoints = Vec::new();
    for last in 1..=endpoints_each() {
        let (ready, terminating) = match random.below(10) {
            0 => continue,
            1 => (false, false),
            2 => (false, true),
            _ => (true, false),
        };
        endpoints.push(json!({
            "addresses": [format!("10.201.{number}.{last}")], "nodeName": SERVING,
            "conditions": {"ready": ready, "serving": ready || terminating, "terminating": terminating},
        }));
    }
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": format!("crowd-{number}"), "namespace": CROWD,
            "labels": {"kubernetes.io/service-name": format!("crowd-{number}")},
        },
        "endpoints": endpoints,
        "ports": [{"name": "web", "port": 8080}],
    })
}

fn create(cluster: &Cluster, objects: Vec<Value>) -> Result<()> {
    submit(cluster, "create", objects)
}

/// All objects by one kubectl.
fn submit(cluster: &Cluster, verb: &str, objects: Vec<Value>) -> Result<()> {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
    cluster
        .kubectl_with_input(&[verb, "--filename", "-"], &list)
        .map(drop)
}

/// A VIP port, an address, and whether it takes new flows.
type Row = (u64, String, bool);

/// What follows from the API's objects.
fn wanted(cluster: &Cluster) -> Result<BTreeSet<Row>> {
    let list = |kind: &str| -> Result<Vec<Value>> {
        let mut list = cluster.get(&[kind, "--namespace", CROWD])?;
        match list["items"].take() {
            Value::Array(items) => Ok(items),
            other => anyhow::bail!("{kind} are {other}"),
        }
    };
    let slices = list("endpointslices")?;
    let mut rows = BTreeSet::new();
    for service in list("services")? {
        let port = service
            .pointer("/spec/ports/0/port")
            .and_then(Value::as_u64);
        let port = port.context("a Service has a port")?;
        let name = &service["metadata"]["name"];
        let of_it =
            |slice: &&Value| slice["metadata"]["labels"]["kubernetes.io/service-name"] == *name;
        for slice in slices.iter().filter(of_it) {
            for endpoint in slice["endpoints"].as_array().into_iter().flatten() {
                let address = endpoint["addresses"][0].as_str().context("an address")?;
                let ready = endpoint["conditions"]["ready"] == true;
                rows.insert((port, address.to_owned(), ready));
            }
        }
    }
    Ok(rows)
}

/// What the serving node's maps hold.
fn held(cluster: &Cluster) -> Result<BTreeSet<Row>> {
    let ports = serving_node(cluster)?.reader()?.ports()?;
    let ports = ports
        .into_iter()
        .filter(|port| port.serving && port.vip.to_string() == CROWD_VIP);
    Ok(ports
        .flat_map(|port| {
            let number = u64::from(port.port);
            let rows = port.backends.into_iter();
            rows.map(move |backend| (number, backend.address.to_string(), backend.eligible))
        })
        .collect())
}
