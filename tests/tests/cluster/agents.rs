//! Agents and the API come and go: what is served stays as it is.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ironlb_tests::cluster::{AGENTS, Cluster, ironlb_image, overlay};
use ironlb_tests::{API_PORT, Download, KernelObjects, VIP, wait_until};
use serde_json::json;

use crate::Scenario;
use crate::scene::{
    IN, PATIENCE, Web, begin, clients, curl, ready_at, serving, serving_node, start_download,
};

pub const SCENARIOS: &[Scenario] = &[
    (
        "an_outage_of_the_api_changes_nothing",
        an_outage_of_the_api_changes_nothing,
    ),
    (
        "a_download_outlives_agents_that_are_deleted_restarted_and_upgraded",
        a_download_outlives_agents_that_are_deleted_restarted_and_upgraded,
    ),
    (
        "the_capabilities_of_the_overlay_are_enough",
        the_capabilities_of_the_overlay_are_enough,
    ),
    (
        "a_right_that_is_missing_is_told",
        a_right_that_is_missing_is_told,
    ),
    // The last one: those after it would install everything again.
    (
        "uninstalling_leaves_nothing_on_the_nodes",
        uninstalling_leaves_nothing_on_the_nodes,
    ),
];

/// How long the API is away.
const OUTAGE: Duration = Duration::from_secs(60);
/// A port that the Service gets after it.
const NEW_PORT: u16 = 8080;

fn an_outage_of_the_api_changes_nothing(cluster: &mut Cluster) -> Result<()> {
    begin(cluster)?;
    let sha256 = start_download(cluster, 192)?;
    let age = "ironlb_state_age_seconds";
    let maps = |cluster: &Cluster| -> Result<String> {
        let ports = serving_node(cluster)?.reader()?.ports()?;
        let rows: Vec<_> = ports
            .iter()
            .map(|port| {
                let backends: Vec<_> = port
                    .backends
                    .iter()
                    .map(|b| (b.index, b.generation, &b.instance, b.eligible))
                    .collect();
                format!(
                    "{} {} {:?} {backends:?}",
                    port.port, port.serving, port.slot
                )
            })
            .collect();
        Ok(rows.join("\n"))
    };
    let before = maps(cluster)?;
    let clients = clients(cluster, 20);
    // Longer than the outage.
    let url = format!("http://{VIP}:{API_PORT}/download?rate=2m");
    let host = &cluster.hosts[0].namespace;
    let mut download = Download::start(host, &url, &[], Duration::from_secs(240))?;
    cluster.stop_apiserver()?;
    std::thread::sleep(OUTAGE);
    let during = (maps(cluster), serving_node(cluster)?.metric(age));
    cluster.start_apiserver()?;
    let back = Instant::now();
    let (during, grown) = (during.0?, during.1?.context("no age of the state")?);
    ensure!(before == during, "maps were\n{before}\nand are\n{during}");
    ensure!(
        grown > OUTAGE.as_secs_f64() / 2.0,
        "{age} is {grown} after {OUTAGE:?} without the API"
    );
    download.goes_on()?;

    // And it goes on from there.
    wait_until("the state is as new as the API", PATIENCE, || {
        Ok(serving_node(cluster)?
            .metric(age)?
            .is_some_and(|age| age < 5.0))
    })?;
    // A change that the agent alone must see: Kubernetes' own controllers hesitate for up to a minute.
    let patch =
        json!([{"op": "add", "path": "/spec/ports/-", "value": {"name": "new", "port": NEW_PORT}}]);
    let patch = format!("--patch={patch}");
    cluster.kubectl(&["patch", "service/web", "--type=json", &patch, IN[0], IN[1]])?;
    wait_until("the new port is served", PATIENCE, || {
        Ok(ready_at(cluster, NEW_PORT)?.is_some())
    })?;
    let in_step = back.elapsed();
    download.finish(&sha256)?;
    let requests = clients.stop()?;
    requests.all_served(20 * OUTAGE.as_secs() as usize)?;
    eprintln!(
        "    {OUTAGE:?} without the API: {} requests and a download, nothing failed; {age} was {grown:.0}; a new \
         port of the Service was in the maps {in_step:.1?} after the API was back",
        requests.0.len()
    );
    Ok(())
}

fn a_download_outlives_agents_that_are_deleted_restarted_and_upgraded(
    cluster: &mut Cluster,
) -> Result<()> {
    const NEXT: &str = "localhost/ironlb:next";
    begin(cluster)?;
    let sha256 = start_download(cluster, 64)?;
    let node = serving_node(cluster)?;
    let objects = node.maps()?.kernel_objects()?;
    let url = format!("http://{VIP}:{API_PORT}/download?rate=1m");
    let host = &cluster.hosts[0].namespace;
    let mut download = Download::start(host, &url, &[], Duration::from_secs(180))?;
    let clients = clients(cluster, 20);

    // Deleted, without time to end in peace.
    let agent = cluster.agent_on(node)?;
    let delete = ["delete", "pod", &agent, "--grace-period=0", "--force"];
    cluster.kubectl(&[&delete[..], &["--namespace", AGENTS]].concat())?;
    cluster.agents_ready()?;
    let second = cluster.agent_on(node)?;
    ensure!(second != agent, "{agent} was not deleted");
    // The new one is at work.
    cluster.kubectl(&["scale", "deployment/web", "--replicas=2", IN[0], IN[1]])?;
    serving(cluster, 2)?;

    cluster.restart_agents()?;
    ensure!(
        cluster.agent_on(node)? != second,
        "{second} was not restarted"
    );

    // Another image is an upgrade, whatever is in it.
    for node in &cluster.nodes {
        let tag = ["ctr", "--namespace", "k8s.io", "images", "tag", "--force"];
        node.exec(tag.into_iter().chain(["localhost/ironlb:dev", NEXT]))?;
    }
    let image = format!("agent={NEXT}");
    cluster.kubectl(&[
        "set",
        "image",
        "daemonset/ironlb",
        &image,
        "--namespace",
        AGENTS,
    ])?;
    cluster.agents_ready()?;
    download.goes_on().context("before the last agent came")?;
    cluster.kubectl(&["rollout", "undo", "daemonset/ironlb", "--namespace", AGENTS])?;
    cluster.agents_ready()?;

    let after = node.maps()?.kernel_objects()?;
    ensure!(
        objects.maps == after.maps && objects.links.keys().eq(after.links.keys()),
        "maps or links were made anew: {objects:?}, {after:?}"
    );
    ensure!(
        objects.programs.keys().ne(after.programs.keys()),
        "the programs are still those of the first agent"
    );
    download.finish(&sha256)?;
    let requests = clients.stop()?;
    requests.all_served(100)?;
    eprintln!(
        "    5 agents, one after another: {} requests and a download, nothing failed",
        requests.0.len()
    );
    Ok(())
}

/// Agents without privileges adopt what privileged ones have loaded, and the other way round.
fn the_capabilities_of_the_overlay_are_enough(cluster: &mut Cluster) -> Result<()> {
    begin(cluster)?;
    Web::default().start(cluster)?;
    let node = serving_node(cluster)?;
    let programs = node.maps()?.kernel_objects()?.programs;
    let clients = clients(cluster, 20);
    let patch = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../deploy/overlays/capabilities/capabilities.yaml");
    let patch = format!("--patch-file={}", patch.display());
    let namespace = ["--namespace", AGENTS];
    cluster.kubectl(&[&["patch", "daemonset/ironlb", &patch][..], &namespace].concat())?;
    let limited = (|| {
        cluster.agents_ready()?;
        let agent = cluster.agent_on(node)?;
        let pod = cluster.get(&[&["pod", &agent][..], &namespace].concat())?;
        let privileged = pod.pointer("/spec/containers/0/securityContext/privileged");
        ensure!(
            privileged == Some(&json!(false)),
            "{agent} is privileged: {privileged:?}"
        );
        cluster.kubectl(&["scale", "deployment/web", "--replicas=2", IN[0], IN[1]])?;
        serving(cluster, 2)?;
        let now = node.maps()?.kernel_objects()?.programs;
        ensure!(
            programs.keys().ne(now.keys()),
            "the programs are still those of the agent before"
        );
        Ok(())
    })();
    cluster.kubectl(&[&["rollout", "undo", "daemonset/ironlb"][..], &namespace].concat())?;
    cluster.agents_ready()?;
    limited?;
    cluster.kubectl(&["scale", "deployment/web", "--replicas=3", IN[0], IN[1]])?;
    serving(cluster, 3)?;
    clients.stop()?.all_served(20)
}

/// What the agents may do is no more than they need: without it they say what is missing.
fn a_right_that_is_missing_is_told(cluster: &mut Cluster) -> Result<()> {
    /// Kind and name of a role, its resource, and the verb that goes.
    const RIGHTS: &[(&str, &str, &str, &str)] = &[
        ("clusterrole", "ironlb", "services", "watch"),
        ("clusterrole", "ironlb", "endpointslices", "list"),
        ("clusterrole", "ironlb", "services/status", "patch"),
        ("clusterrole", "ironlb", "events", "create"),
        ("clusterrole", "ironlb-pods", "pods", "list"),
        ("role", "ironlb", "leases", "update"),
        ("role", "ironlb", "secrets", "list"),
        ("role", "ironlb", "secrets", "create"),
    ];
    begin(cluster)?;
    let logs = |cluster: &Cluster| {
        let selector = "--selector=app.kubernetes.io/name=ironlb";
        cluster.kubectl(&["logs", selector, "--tail=-1", "--namespace", AGENTS])
    };
    let restart = |cluster: &Cluster| {
        let selector = "--selector=app.kubernetes.io/name=ironlb";
        let words = ["delete", "pod", selector, "--now", "--namespace", AGENTS];
        cluster.kubectl(&words).map(drop)
    };
    let told = (|| -> Result<()> {
        for (kind, name, resource, verb) in RIGHTS {
            let mut role = cluster.get(&[kind, name, "--namespace", AGENTS])?;
            // As a user writes it, of no certain version.
            let identity = json!({"name": name, "namespace": role["metadata"]["namespace"]});
            role["metadata"] = identity;
            let whole = role.to_string();
            let rules = role["rules"].as_array_mut().context("a role has rules")?;
            let rule = rules
                .iter_mut()
                .find(|rule| {
                    let verbs = rule["verbs"].as_array();
                    rule["resources"] == json!([resource])
                        && verbs.is_some_and(|verbs| verbs.iter().any(|has| has == verb))
                })
                .with_context(|| format!("{kind} {name} has no rule for {verb} {resource}"))?;
            let verbs = rule["verbs"].as_array_mut().context("a rule has verbs")?;
            verbs.retain(|has| has != verb);
            if verbs.is_empty() {
                // The API takes no rule without one.
                *rule = json!({"apiGroups": [""], "resources": ["none"], "verbs": ["get"]});
            }
            cluster.apply(&role.to_string())?;
            // Something to make.
            let secret = ["delete", "secret", "ironlb-peers", "--ignore-not-found"];
            cluster.kubectl(&[&secret[..], &["--namespace", AGENTS]].concat())?;
            restart(cluster)?;
            // Something to write, and something to tell.
            let mut service = Web::service();
            service["metadata"]["name"] = format!("{verb}-{}", resource.replace('/', "-")).into();
            service["metadata"]["annotations"] = json!({"ironlb.dev/vip": "172.22.0.2,192.0.2.1"});
            cluster.apply(&service.to_string())?;
            let asked = format!("cannot {verb} resource");
            let waited = wait_until(&format!("agents miss {verb} {resource}"), PATIENCE, || {
                let said = logs(cluster).unwrap_or_default();
                Ok(said
                    .lines()
                    .any(|line| line.contains("forbidden") && line.contains(&asked)))
            });
            cluster.apply(&whole)?;
            waited.with_context(|| logs(cluster).unwrap_or_default())?;
        }
        Ok(())
    })();
    // As it ships again, whatever came of it.
    cluster.deploy_ironlb(&ironlb_image()?)?;
    told?;
    restart(cluster)?;
    cluster.agents_ready()?;
    Web::default().start(cluster)?;
    let said = logs(cluster)?;
    ensure!(
        !said.contains("forbidden"),
        "with what ships, something is forbidden: {said}"
    );
    Ok(())
}

fn uninstalling_leaves_nothing_on_the_nodes(cluster: &mut Cluster) -> Result<()> {
    begin(cluster)?;
    Web::default().start(cluster)?;
    let url = format!("http://{VIP}:{API_PORT}/");
    let mut objects = Vec::new();
    for node in &cluster.nodes {
        objects.push(node.maps()?.kernel_objects()?);
    }
    let kustomize = |verb: &str, directory: &Path| {
        let directory = directory.display().to_string();
        cluster
            .kubectl(&[verb, "--kustomize", &directory])
            .map(drop)
    };
    kustomize("delete", &overlay("ironlb"))?;
    // Without agents it still serves.
    curl(cluster, &url)?;
    let uninstall = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/uninstall");
    kustomize("apply", &uninstall)?;
    let namespace = ["--namespace", "ironlb-uninstall"];
    cluster.wait_ready("daemonset/ironlb-uninstall", &namespace, PATIENCE)?;
    kustomize("delete", &uninstall)?;
    for (node, objects) in cluster.nodes.iter().zip(&objects) {
        ensure!(!node.pins()?.exists(), "pins are left on {}", node.name);
        wait_until("the kernel has dropped everything", PATIENCE, || {
            Ok(objects.left() == KernelObjects::default())
        })
        .with_context(|| format!("{} has {:?}", node.name, objects.left()))?;
    }
    // Nobody tells where the VIP is. (A client that remembers still reaches the node, where kube-proxy redirects
    // what a Service's status says.)
    let host = &cluster.hosts[0].namespace;
    host.ip("neigh flush dev eth0")?;
    ensure!(curl(cluster, &url).is_err(), "{url} still answers");
    cluster
        .kubectl(&["delete", "service/web", IN[0], IN[1]])
        .map(drop)
}
