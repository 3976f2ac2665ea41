//! A Service of both versions of IP has a VIP of each, and each is served as the other is.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ironlb_tests::cluster::Cluster;
use ironlb_tests::{API_PORT, Host, VIP, VIP6, wait_until};
use serde_json::{Value, json};

use crate::Scenario;
use crate::instances::environment;
use crate::scene::{
    IN, NAMESPACE, PATIENCE, TARGET, Web, begin, clients_of, event, pods, ready_behind, refused_at,
    shows,
};

pub const SCENARIOS: &[Scenario] = &[(
    "a_dual_stack_service_answers_on_both_vips",
    a_dual_stack_service_answers_on_both_vips,
)];

/// Both VIPs, in the order in which a Service shows them.
const VIPS: [IpAddr; 2] = [IpAddr::V4(VIP), IpAddr::V6(VIP6)];
/// First port of a range of 16.
const FIRST: u16 = 6200;
/// Requests a second, to each VIP.
const PACE: u32 = 20;
/// How long clients ask before and after something happens.
const WHILE: Duration = Duration::from_secs(2);

/// The web servers' Service, and they themselves with the URLs of which BMCs get the IPv6 ones.
fn objects(web: Web) -> Value {
    let mut service = Web::service();
    service["metadata"]["annotations"] = json!({
        "ironlb.dev/vip": format!("{VIP},{VIP6}"),
        "ironlb.dev/instance-ports": format!("api={FIRST}-{}", FIRST + 15),
    });
    service["spec"]["ipFamilyPolicy"] = json!("RequireDualStack");
    let mut deployment = web.deployment();
    let pod = &mut deployment["spec"]["template"]["spec"];
    let shared = json!([{"name": "shared", "mountPath": "/shared"}]);
    let vip6 = VIP6.to_string();
    pod["initContainers"] = json!([{
        "name": "instance-env", "image": "localhost/ironlb:dev",
        "args": ["instance-env", "--images", "api", "--api", "api", "--external-vip", vip6],
        "env": [{"name": "HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIPs"}}}],
        "volumeMounts": shared,
    }]);
    pod["containers"][0]["volumeMounts"] = shared;
    pod["volumes"] = json!([{"name": "shared", "emptyDir": {}}]);
    json!({"apiVersion": "v1", "kind": "List", "items": [service, deployment]})
}

/// A host's address of the version that a VIP has.
fn address_of(host: &Host, vip: IpAddr) -> IpAddr {
    match vip {
        IpAddr::V4(_) => host.address.into(),
        IpAddr::V6(_) => host.address6.into(),
    }
}

/// Asks at a port of a VIP; the name of the pod that answers. It must have seen the host's own address.
fn ask(host: &Host, at: SocketAddr) -> Result<String> {
    let url = format!("http://{at}/");
    let words = ["curl", "-sSf", "--max-time", "10", &url];
    let answer = host.namespace.exec(words)?;
    let answer: Value =
        serde_json::from_str(&answer).with_context(|| format!("{url} answers {answer}"))?;
    let client = address_of(host, at.ip()).to_string();
    ensure!(
        answer["client"] == client,
        "{url} answers {answer}; the client is {client}"
    );
    let pod = answer["pod"].as_str().context("no pod in the answer")?;
    Ok(pod.to_owned())
}

/// Waits until these pods, and no others, take new flows at the API's port of both VIPs.
fn both_lead_to(cluster: &Cluster, names: &BTreeSet<String>) -> Result<()> {
    let mut held = Vec::new();
    let waited = wait_until("both VIPs lead to all pods", PATIENCE, || {
        held.clear();
        for vip in VIPS {
            held.push(ready_behind(cluster, (vip, API_PORT).into())?);
        }
        Ok(held.iter().all(|ready| ready.as_ref() == Some(names)))
    });
    waited.with_context(|| format!("pods are {names:?}, the maps hold {held:?}"))
}

/// The instance port of each pod on a VIP.
fn instance_ports(cluster: &Cluster, vip: IpAddr) -> Result<BTreeMap<String, u16>> {
    let mut ports = BTreeMap::new();
    for view in cluster.nodes[0].reader()?.ports()? {
        if view.vip == vip && view.serving && view.slot.is_some() {
            let backends = view.backends.into_iter();
            ports.extend(backends.map(|backend| (backend.instance, view.port)));
        }
    }
    Ok(ports)
}

fn patch(cluster: &Cluster, spec: &Value) -> Result<()> {
    let patch = format!("--patch={}", json!({"spec": spec}));
    let words = ["patch", "service/web", "--type=merge", &patch, IN[0], IN[1]];
    cluster.kubectl(&words).map(drop)
}

fn names(cluster: &Cluster) -> Result<BTreeSet<String>> {
    Ok(pods(cluster)?.into_iter().map(|pod| pod.name).collect())
}

fn a_dual_stack_service_answers_on_both_vips(cluster: &mut Cluster) -> Result<()> {
    begin(cluster)?;
    let web = Web {
        replicas: 4,
        ..Web::default()
    };
    cluster.apply(&objects(web).to_string())?;
    cluster.wait_ready("deployment/web", &IN, PATIENCE)?;
    shows(cluster, "web", &VIPS)?;
    both_lead_to(cluster, &names(cluster)?)?;
    every_pod_answers(cluster)?;
    every_instance_has_its_port_and_urls(cluster)?;
    source_ranges_are_those_of_each_version(cluster)?;
    a_deleted_pod_leaves_both(cluster)?;
    a_version_goes_and_comes_back(cluster)
}

/// Each VIP is one node's, so the other node's pods are reached by way of it.
fn every_pod_answers(cluster: &Cluster) -> Result<()> {
    let pods = pods(cluster)?;
    let nodes: BTreeSet<_> = pods.iter().map(|pod| &pod.node).collect();
    ensure!(nodes.len() == cluster.nodes.len(), "pods are {pods:?}");
    let names = names(cluster)?;
    for vip in VIPS {
        let announcer = &cluster.announcing_vip(vip)?.name;
        for host in &cluster.hosts {
            let mut answered = BTreeSet::new();
            for _ in 0..60 {
                answered.insert(ask(host, (vip, API_PORT).into())?);
            }
            ensure!(
                answered == names,
                "at {vip} {answered:?} of {pods:?} answered"
            );
        }
        eprintln!("    {vip} is announced by {announcer}, and pods of both nodes answer");
    }
    Ok(())
}

fn every_instance_has_its_port_and_urls(cluster: &Cluster) -> Result<()> {
    let ports = instance_ports(cluster, VIP.into())?;
    let ports6 = instance_ports(cluster, VIP6.into())?;
    let names = names(cluster)?;
    ensure!(
        ports == ports6 && ports.keys().eq(&names),
        "instance ports of {names:?} are {ports:?} and {ports6:?}"
    );
    let host = &cluster.hosts[0];
    for (name, port) in &ports {
        for vip in VIPS {
            for _ in 0..5 {
                let answered = ask(host, (vip, *port).into())?;
                ensure!(
                    answered == *name,
                    "port {port} of {vip} is {name}'s, and {answered} answers"
                );
            }
        }
        let environment = environment(cluster, name, "web")?;
        for (variable, url) in [
            ("IRONIC_HTTP_URL", format!("http://{VIP}:{port}")),
            ("IRONIC_BASE_URL", format!("http://{VIP}:{API_PORT}")),
            (
                "IRONIC_EXTERNAL_HTTP_URL",
                format!("http://[{VIP6}]:{port}"),
            ),
            (
                "IRONIC_EXTERNAL_CALLBACK_URL",
                format!("http://[{VIP6}]:{API_PORT}"),
            ),
        ] {
            ensure!(
                environment.get(variable) == Some(&url),
                "{variable} is not {url}: {name} has {environment:?}"
            );
        }
    }
    for vip in VIPS {
        refused_at(cluster, (vip, FIRST + 15).into())?;
    }
    Ok(())
}

/// Over IPv4 everybody is admitted, over IPv6 the second host alone.
fn source_ranges_are_those_of_each_version(cluster: &Cluster) -> Result<()> {
    let [host, other] = &cluster.hosts[..] else {
        anyhow::bail!("not two hosts");
    };
    let ranges = json!(["172.22.0.0/24", format!("{}/128", other.address6)]);
    patch(cluster, &json!({"loadBalancerSourceRanges": ranges}))?;
    let at6 = SocketAddr::from((VIP6, API_PORT));
    wait_until("the first host is refused over IPv6", PATIENCE, || {
        Ok(refused_at(cluster, at6).is_ok())
    })?;
    ask(other, at6)?;
    for host in &cluster.hosts {
        ask(host, TARGET)?;
    }
    patch(cluster, &json!({"loadBalancerSourceRanges": null}))?;
    wait_until("the first host is admitted again", PATIENCE, || {
        Ok(ask(host, at6).is_ok())
    })
}

fn a_deleted_pod_leaves_both(cluster: &Cluster) -> Result<()> {
    let clients = VIPS.map(|vip| clients_of(cluster, (vip, API_PORT).into(), PACE));
    std::thread::sleep(WHILE);
    let victim = pods(cluster)?.remove(0).name;
    cluster.kubectl(&["delete", "pod", &victim, "--wait=false", IN[0], IN[1]])?;
    wait_until("the pod gets nothing new from either VIP", PATIENCE, || {
        for vip in VIPS {
            let ready = ready_behind(cluster, (vip, API_PORT).into())?;
            let ready = ready.with_context(|| format!("{vip} is not served"))?;
            if ready.contains(&victim) {
                return Ok(false);
            }
        }
        Ok(true)
    })?;
    cluster.wait_ready("deployment/web", &IN, PATIENCE)?;
    let names = names(cluster)?;
    ensure!(!names.contains(&victim), "pods are {names:?}");
    both_lead_to(cluster, &names)?;
    std::thread::sleep(WHILE);
    let mut counts = Vec::new();
    for clients in clients {
        let requests = clients.stop()?;
        requests.all_served(PACE as usize * 4)?;
        let answered = requests.answers();
        ensure!(
            names.iter().all(|name| answered.contains_key(&**name)),
            "pods are {names:?}, answers came from {answered:?}"
        );
        counts.push(requests.0.len());
    }
    eprintln!("    a pod was deleted: {counts:?} requests to the VIPs, none failed");
    Ok(())
}

fn a_version_goes_and_comes_back(cluster: &Cluster) -> Result<()> {
    let names = names(cluster)?;
    let clients = clients_of(cluster, TARGET, PACE);
    std::thread::sleep(WHILE);
    let single = json!({"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4"]});
    patch(cluster, &single)?;
    shows(cluster, "web", &[VIP.into()])?;
    for port in [API_PORT, FIRST] {
        let at = SocketAddr::from((VIP6, port));
        wait_until(&format!("{at} is not served"), PATIENCE, || {
            Ok(ready_behind(cluster, at)?.is_none())
        })?;
        refused_at(cluster, at)?;
    }
    // Its annotation asks for both still.
    let note = event(cluster, "web", NAMESPACE, "VipNotServed")?;
    ensure!(note.contains(&VIP6.to_string()), "the Event says {note}");
    let ready = ready_behind(cluster, TARGET)?;
    ensure!(
        ready.as_ref() == Some(&names),
        "pods are {names:?}, {VIP} leads to {ready:?}"
    );
    std::thread::sleep(WHILE);
    let dual = json!({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]});
    patch(cluster, &dual)?;
    shows(cluster, "web", &VIPS)?;
    both_lead_to(cluster, &names)?;
    ask(&cluster.hosts[0], (VIP6, API_PORT).into())?;
    let requests = clients.stop()?;
    requests.all_served(PACE as usize * 4)?;
    eprintln!(
        "    IPv6 went and came back: {} requests over IPv4, none failed",
        requests.0.len()
    );
    Ok(())
}
