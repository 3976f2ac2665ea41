//! Two nodes share a VIP: pods of both serve, and whichever announces it may go.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ironlb_tests::cluster::{AGENTS, Cluster, ClusterNode};
use ironlb_tests::{API_PORT, Download, VIP, wait_until};

use crate::Scenario;
use crate::scene::{PATIENCE, Web, begin, clients, curl, start_download};

pub const SCENARIOS: &[Scenario] = &[
    (
        "pods_of_every_node_serve_and_see_the_client",
        pods_of_every_node_serve_and_see_the_client,
    ),
    (
        "the_agent_that_announces_is_deleted_and_nothing_fails",
        the_agent_that_announces_is_deleted_and_nothing_fails,
    ),
    (
        "agents_that_restart_without_the_api_go_on_announcing",
        agents_that_restart_without_the_api_go_on_announcing,
    ),
];

/// Requests a second: one every 50 ms.
const PACE: u32 = 20;

fn pods_of_every_node_serve_and_see_the_client(cluster: &mut Cluster) -> Result<()> {
    begin(cluster)?;
    let web = Web {
        replicas: 4,
        ..Web::default()
    };
    let pods = web.start(cluster)?;
    let nodes: BTreeSet<_> = pods.iter().map(|pod| &pod.node).collect();
    ensure!(nodes.len() == cluster.nodes.len(), "pods are {pods:?}");
    let host = cluster.hosts[0].address.to_string();
    let mut answered = BTreeSet::new();
    for _ in 0..60 {
        let answer = curl(cluster, &format!("http://{VIP}:{API_PORT}/"))?;
        let pod = pods.iter().find(|pod| answer.contains(&pod.name));
        let pod = pod.with_context(|| format!("of {pods:?} nobody answers {answer}"))?;
        ensure!(
            answer.contains(&host),
            "{pod:?} answers {answer}; the client is {host}"
        );
        answered.insert(&pod.name);
    }
    ensure!(
        answered.len() == pods.len(),
        "only {answered:?} of {pods:?} answered"
    );
    Ok(())
}

fn the_agent_that_announces_is_deleted_and_nothing_fails(cluster: &mut Cluster) -> Result<()> {
    begin(cluster)?;
    let sha256 = start_download(cluster, 64)?;
    let former = cluster.announcing()?;
    let agent = cluster.agent_on(former)?;
    let clients = clients(cluster, PACE);
    let url = format!("http://{VIP}:{API_PORT}/download?rate=2m");
    let host = &cluster.hosts[0].namespace;
    let mut download = Download::start(host, &url, &[], Duration::from_secs(180))?;
    std::thread::sleep(Duration::from_secs(1));
    cluster.kubectl(&["delete", "pod", &agent, "--namespace", AGENTS])?;
    let next = cluster.announcing()?;
    ensure!(
        next.name != former.name,
        "{} announces the VIP still",
        next.name
    );
    cluster.agents_ready()?;
    download.goes_on()?;
    download.finish(&sha256)?;
    let requests = clients.stop()?;
    requests.all_served(PACE as usize * 3)?;
    let slowest = requests.0.iter().map(|request| request.took).max();
    eprintln!(
        "    {} was followed by {}: {} requests and a download, nothing failed; the slowest request took {:.0?}",
        former.name,
        next.name,
        requests.0.len(),
        slowest.unwrap_or_default()
    );
    Ok(())
}

/// How long the API stays away after that: longer than what the former agents promised to answer, or so many seconds
/// as `IRONLB_OUTAGE_SECONDS` says.
fn outage() -> Result<Duration> {
    let seconds = std::env::var("IRONLB_OUTAGE_SECONDS").unwrap_or("5".to_owned());
    let seconds = seconds
        .parse()
        .with_context(|| format!("IRONLB_OUTAGE_SECONDS is {seconds}"))?;
    Ok(Duration::from_secs(seconds))
}

fn agents_that_restart_without_the_api_go_on_announcing(cluster: &mut Cluster) -> Result<()> {
    begin(cluster)?;
    let web = Web {
        replicas: 4,
        ..Web::default()
    };
    web.start(cluster)?;
    cluster.announcing()?;
    let clients = clients(cluster, PACE);
    let started = |node: &ClusterNode| -> Result<f64> {
        let since = node.reader()?.control()?.agent_started_seconds;
        since.context("no agent")
    };
    cluster.stop_apiserver()?;
    let restarted = (|| {
        for node in &cluster.nodes {
            let ctr = ["ctr", "--namespace", "k8s.io"];
            let list = ctr.iter().chain(&["tasks", "list"]).chain(&["--quiet"]);
            let tasks = node.exec(list)?;
            let mut killed = 0;
            for task in tasks.split_whitespace() {
                let info = node.exec(ctr.iter().chain(&["containers", "info", task]))?;
                if info.contains("\"io.kubernetes.container.name\": \"agent\"") {
                    let kill = ["tasks", "kill", "--signal", "SIGKILL", task];
                    node.exec(ctr.iter().chain(&kill))?;
                    killed += 1;
                }
            }
            ensure!(killed == 1, "{killed} agents were ended on {}", node.name);
        }
        let begun = std::time::Instant::now();
        for node in &cluster.nodes {
            wait_until(&format!("{}'s agent is back", node.name), PATIENCE, || {
                Ok(started(node)? < begun.elapsed().as_secs_f64())
            })?;
        }
        std::thread::sleep(outage()?);
        cluster.announcing()?;
        let host = &cluster.hosts[0].namespace;
        host.ip("neigh flush dev eth0")?;
        curl(cluster, &format!("http://{VIP}:{API_PORT}/")).map(drop)
    })();
    cluster.start_apiserver()?;
    restarted?;
    cluster.agents_ready()?;
    let requests = clients.stop()?;
    requests.all_served(PACE as usize * 5)?;
    eprintln!(
        "    both agents restarted without the API: {} requests, none failed",
        requests.0.len()
    );
    Ok(())
}
