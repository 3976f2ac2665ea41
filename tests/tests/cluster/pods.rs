//! Pods come and go while clients ask: nobody notices as long as one is left.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ironlb_tests::cluster::Cluster;
use ironlb_tests::{API_PORT, wait_until};

use crate::Scenario;
use crate::scene::{
    IN, PATIENCE, Web, WebPod, begin, clients, pods, ready_at, serving, serving_node,
};

pub const SCENARIOS: &[Scenario] = &[
    (
        "no_request_fails_while_pods_become_unready_and_ready",
        no_request_fails_while_pods_become_unready_and_ready,
    ),
    (
        "no_request_fails_while_pods_are_scaled_rolled_and_deleted",
        no_request_fails_while_pods_are_scaled_rolled_and_deleted,
    ),
    (
        "a_pod_that_ends_at_once_loses_nothing_after_the_agent_knows",
        a_pod_that_ends_at_once_loses_nothing_after_the_agent_knows,
    ),
    (
        "no_request_fails_while_nodes_are_drained",
        no_request_fails_while_nodes_are_drained,
    ),
];

/// Requests a second while pods come and go.
const PACE: u32 = 40;

/// Says whether a pod is ready.
fn say(cluster: &Cluster, pod: &WebPod, ready: bool) -> Result<()> {
    let script = format!("echo {} >/ready", if ready { "yes" } else { "no" });
    let words = ["exec", &pod.name, IN[0], IN[1], "--", "sh", "-c", &script];
    cluster.kubectl(&words).map(drop)
}

fn no_request_fails_while_pods_become_unready_and_ready(cluster: &mut Cluster) -> Result<()> {
    begin(cluster)?;
    let pods = Web::default().start(cluster)?;
    let clients = clients(cluster, PACE);
    for pod in &pods[..2] {
        say(cluster, pod, false)?;
        wait_until("the unready pod gets nothing new", PATIENCE, || {
            let ready = ready_at(cluster, API_PORT)?.context("the port is not served")?;
            Ok(!ready.contains(&pod.name))
        })?;
    }
    // One is left, and serves all of them.
    let alone = Instant::now();
    std::thread::sleep(Duration::from_secs(2));
    let until = Instant::now();
    for pod in &pods[..2] {
        say(cluster, pod, true)?;
    }
    serving(cluster, pods.len())?;
    std::thread::sleep(Duration::from_secs(2));
    let requests = clients.stop()?;
    requests.all_served(PACE as usize * 4)?;
    let others = requests.0.iter().filter(|request| {
        let meanwhile = (alone..until).contains(&request.begun);
        meanwhile && request.outcome.as_ref() != Ok(&pods[2].name)
    });
    let others = others.count();
    ensure!(others == 0, "{others} requests went to unready pods");
    let answers = requests.answers();
    ensure!(answers.len() == pods.len(), "answers came from {answers:?}");
    eprintln!(
        "    {} requests, none failed: {answers:?}",
        requests.0.len()
    );
    Ok(())
}

fn no_request_fails_while_pods_are_scaled_rolled_and_deleted(cluster: &mut Cluster) -> Result<()> {
    begin(cluster)?;
    Web::default().start(cluster)?;
    let clients = clients(cluster, PACE);
    for replicas in [1, 4] {
        let replicas_option = format!("--replicas={replicas}");
        cluster.kubectl(&["scale", "deployment/web", &replicas_option, IN[0], IN[1]])?;
        cluster.wait_ready("deployment/web", &IN, PATIENCE)?;
        serving(cluster, replicas)?;
    }
    let before = pods(cluster)?;
    cluster.kubectl(&["rollout", "restart", "deployment/web", IN[0], IN[1]])?;
    cluster.wait_ready("deployment/web", &IN, PATIENCE)?;
    wait_until("only new pods are served", PATIENCE, || {
        let ready = ready_at(cluster, API_PORT)?.context("the port is not served")?;
        let old = |name: &String| before.iter().any(|pod| pod.name == *name);
        Ok(ready.len() == 4 && !ready.iter().any(old))
    })?;
    let victim = &pods(cluster)?[0].name.clone();
    cluster.kubectl(&["delete", "pod", victim, IN[0], IN[1]])?;
    cluster.wait_ready("deployment/web", &IN, PATIENCE)?;
    serving(cluster, 4)?;
    let requests = clients.stop()?;
    requests.all_served(PACE as usize * 8)?;
    eprintln!(
        "    {} requests of {} pods, none failed",
        requests.0.len(),
        requests.answers().len()
    );
    Ok(())
}

/// Its web server ends at SIGTERM, which kubelet sends while the news of it are still on their way to us.
fn a_pod_that_ends_at_once_loses_nothing_after_the_agent_knows(
    cluster: &mut Cluster,
) -> Result<()> {
    const PACE: u32 = 100;
    const TIMES: u32 = 5;
    begin(cluster)?;
    let web = Web {
        linger: 0,
        ..Web::default()
    };
    web.start(cluster)?;
    let node = serving_node(cluster)?;
    let readers = cluster.nodes.iter().map(|node| node.reader());
    let readers = readers.collect::<Result<Vec<_>>>()?;
    let (mut before, mut slowest, mut all) = (0, Duration::ZERO, 0);
    let had = node.to_maps()?;
    for _ in 0..TIMES {
        let clients = clients(cluster, PACE);
        std::thread::sleep(Duration::from_secs(1));
        let victim = pods(cluster)?[0].name.clone();
        let deleted = Instant::now();
        cluster.kubectl(&["delete", "pod", &victim, "--wait=false", IN[0], IN[1]])?;
        let mut known = None;
        wait_until("both agents know that the pod ends", PATIENCE, || {
            let asked = Instant::now();
            let mut takes_new = false;
            for reader in &readers {
                let mut backends = reader.backends()?.into_iter();
                takes_new |= backends.any(|backend| backend.instance == victim && backend.eligible);
            }
            known = (!takes_new).then_some(asked);
            Ok(!takes_new)
        })?;
        // From the beginning of the look that showed it: a little early, which is the strict side.
        let known = known.context("the agent knows")?;
        std::thread::sleep(Duration::from_secs(1));
        cluster.wait_ready("deployment/web", &IN, PATIENCE)?;
        serving(cluster, 3)?;
        let requests = clients.stop()?;
        let late: Vec<_> = requests
            .failed()
            .filter(|request| request.begun >= known)
            .collect();
        ensure!(
            late.is_empty(),
            "{} requests failed that began after the agent knew: {:?}",
            late.len(),
            &late[..late.len().min(3)]
        );
        before += requests.failed().count();
        all += requests.0.len();
        slowest = slowest.max(known - deleted);
    }
    let (sum, count) = node.to_maps()?;
    eprintln!(
        "    {TIMES} pods deleted under {PACE} connections a second: of {all} requests {before} failed, all of them \
         before the agent knew, which took {slowest:.0?} from kubectl's start at most, and {:.1} ms from the watch event on average",
        (sum - had.0) / (count - had.1) * 1e3
    );
    Ok(())
}

fn no_request_fails_while_nodes_are_drained(cluster: &mut Cluster) -> Result<()> {
    begin(cluster)?;
    let web = Web {
        replicas: 4,
        ..Web::default()
    };
    web.start(cluster)?;
    let clients = clients(cluster, PACE);
    let drained = (|| {
        for node in &cluster.nodes {
            let words = [
                "drain",
                &node.name,
                "--ignore-daemonsets",
                "--force",
                "--timeout=60s",
                "--delete-emptydir-data",
            ];
            cluster.kubectl(&words)?;
            cluster.wait_ready("deployment/web", &IN, PATIENCE)?;
            serving(cluster, 4)?;
            let pods = pods(cluster)?;
            ensure!(
                pods.iter().all(|pod| pod.node != node.name),
                "{} is drained and has some of {pods:?}",
                node.name
            );
            // The agent stays on the node that is drained.
            cluster.agent_on(node)?;
            cluster.kubectl(&["uncordon", &node.name])?;
            // On both nodes again.
            cluster.kubectl(&["rollout", "restart", "deployment/web", IN[0], IN[1]])?;
            cluster.wait_ready("deployment/web", &IN, PATIENCE)?;
            serving(cluster, 4)?;
        }
        Ok(())
    })();
    // For the others, whatever came of it.
    for node in &cluster.nodes {
        cluster.kubectl(&["uncordon", &node.name])?;
    }
    drained?;
    clients.stop()?.all_served(PACE as usize * 4)
}
