//! What scenarios share: agents that run, a namespace for Services that is empty, web servers behind a VIP.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, SocketAddrV4};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ironlb_tests::cluster::{AGENTS, Clients, Cluster, ClusterNode, ironlb_image};
use ironlb_tests::{API_PORT, VIP, wait_until};
use serde_json::{Value, json};

/// Where Services may have the VIP.
pub const NAMESPACE: &str = "metal3";
/// kubectl's option for it.
pub const IN: [&str; 2] = ["--namespace", NAMESPACE];
/// How long anything of Kubernetes may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(90);
/// Where the web servers of [`Web`] are reached.
pub const TARGET: SocketAddr = SocketAddr::V4(SocketAddrV4::new(VIP, API_PORT));
/// A node, where it matters on which one something is.
pub const SERVING: &str = "node-a";

/// The agents run, as deploy/ ships them, and no Service has the VIP.
pub fn begin(cluster: &Cluster) -> Result<()> {
    if cluster
        .get(&["daemonset/ironlb", "--namespace", AGENTS])
        .is_err()
    {
        cluster.deploy_ironlb(&ironlb_image()?)?;
    }
    cluster.agents_ready()?;
    empty(cluster, NAMESPACE)
}

/// Makes a namespace, or removes what is in it.
pub fn empty(cluster: &Cluster, namespace: &str) -> Result<()> {
    cluster.apply(
        &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
            .to_string(),
    )?;
    let kinds = "deployment,statefulset,daemonset,service,endpointslice,pod,event";
    let words = ["delete", kinds, "--all", "--now", "--namespace", namespace];
    cluster.kubectl(&words).map(drop)?;
    // A ReplicaSet makes new pods until it is collected itself.
    wait_until(&format!("no pod is left in {namespace}"), PATIENCE, || {
        let words = ["delete", "pod", "--all", "--now", "--namespace", namespace];
        cluster.kubectl(&words)?;
        let left = cluster.get(&["pods,replicasets", "--namespace", namespace])?;
        Ok(left["items"].as_array().is_some_and(Vec::is_empty))
    })?;
    wait_until("ServiceAccounts are made", PATIENCE, || {
        let account = ["get", "serviceaccount/default", "--namespace", namespace];
        Ok(cluster.kubectl(&account).is_ok())
    })
}

/// Web servers, with a Service that has port [`API_PORT`] of the VIP.
#[derive(Clone, Copy)]
pub struct Web {
    pub replicas: u32,
    /// Node that they are on, where it matters.
    pub node: Option<&'static str>,
    /// How many seconds one serves on when it is told to end.
    pub linger: u32,
    /// Size of `/download`.
    pub download_mib: u32,
}

impl Default for Web {
    fn default() -> Self {
        Self {
            replicas: 3,
            node: None,
            linger: 5,
            download_mib: 1,
        }
    }
}

/// A pod of [`Web`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WebPod {
    pub name: String,
    pub node: String,
    pub address: String,
}

impl Web {
    /// The Service alone.
    pub fn service() -> Value {
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "web", "namespace": NAMESPACE},
            "spec": {
                "type": "LoadBalancer", "loadBalancerClass": "ironlb.dev/xdp",
                "allocateLoadBalancerNodePorts": false,
                "selector": {"app": "web"},
                "ports": [{"name": "api", "port": API_PORT, "targetPort": 80}],
            },
        })
    }

    /// Containers and what belongs to them; ready while `/ready` says yes and nginx answers.
    fn pod(self) -> Value {
        let ready = "[ \"$(cat /ready)\" = yes ] && curl -sf -o /dev/null http://127.0.0.1/";
        json!({
            "terminationGracePeriodSeconds": self.linger + 5,
            "nodeSelector": self.node.map(|node| json!({"kubernetes.io/hostname": node})),
            "containers": [{
                "name": "web", "image": "localhost/web:test", "imagePullPolicy": "Never",
                "command": ["sh", "-c", "echo yes >/ready; exec serve"],
                "env": [
                    {"name": "LINGER", "value": self.linger.to_string()},
                    {"name": "DOWNLOAD_MIB", "value": self.download_mib.to_string()},
                ],
                "readinessProbe": {
                    "exec": {"command": ["sh", "-c", ready]},
                    "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 1,
                },
            }],
        })
    }

    /// Starts the web servers and the Service; they serve when this returns.
    pub fn start(self, cluster: &Cluster) -> Result<Vec<WebPod>> {
        self.apply(cluster)?;
        cluster.wait_ready("deployment/web", &IN, PATIENCE)?;
        serving(cluster, self.replicas as usize)?;
        pods(cluster)
    }

    /// As [`Web::start`], without waiting.
    pub fn apply(self, cluster: &Cluster) -> Result<()> {
        let items = [Self::service(), self.deployment()];
        let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
        cluster.apply(&list.to_string())
    }

    /// The web servers alone.
    pub fn deployment(self) -> Value {
        json!({
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": "web", "namespace": NAMESPACE},
            "spec": {
                "replicas": self.replicas,
                "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
                "selector": {"matchLabels": {"app": "web"}},
                "template": {"metadata": {"labels": {"app": "web"}}, "spec": self.pod()},
            },
        })
    }
}

/// The web servers that do not end, as the API has them.
fn listed(cluster: &Cluster) -> Result<Vec<Value>> {
    let mut pods = cluster.get(&["pods", "--selector", "app=web", IN[0], IN[1]])?;
    let pods = pods["items"].as_array_mut().context("no list of pods")?;
    pods.retain(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    Ok(std::mem::take(pods))
}

/// The web servers that do not end.
pub fn pods(cluster: &Cluster) -> Result<Vec<WebPod>> {
    let field = |pod: &Value, pointer: &str| {
        let field = pod.pointer(pointer).and_then(Value::as_str);
        field
            .map(str::to_owned)
            .with_context(|| format!("no {pointer} in {pod}"))
    };
    let mut pods = listed(cluster)?
        .iter()
        .map(|pod| {
            Ok(WebPod {
                name: field(pod, "/metadata/name")?,
                node: field(pod, "/spec/nodeName")?,
                address: field(pod, "/status/podIP")?,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    pods.sort();
    Ok(pods)
}

/// The node called [`SERVING`].
pub fn serving_node(cluster: &Cluster) -> Result<&ClusterNode> {
    let mut nodes = cluster.nodes.iter();
    nodes
        .find(|node| node.name == SERVING)
        .with_context(|| format!("no {SERVING}"))
}

/// Names of the pods that take new flows at a port of the VIP, as the maps of any node have it; `None` while a node
/// does not serve it.
pub fn ready_at(cluster: &Cluster, port: u16) -> Result<Option<BTreeSet<String>>> {
    ready_behind(cluster, (VIP, port).into())
}

/// As [`ready_at`], of any VIP.
pub fn ready_behind(cluster: &Cluster, at: SocketAddr) -> Result<Option<BTreeSet<String>>> {
    let mut all = BTreeSet::new();
    for node in &cluster.nodes {
        match ready_on(node, at)? {
            Some(ready) => all.extend(ready),
            None => return Ok(None),
        }
    }
    Ok(Some(all))
}

/// As [`ready_behind`], of one node's maps.
fn ready_on(node: &ClusterNode, at: SocketAddr) -> Result<Option<BTreeSet<String>>> {
    let ports = node.reader()?.ports()?;
    let port = ports
        .into_iter()
        .find(|view| view.vip == at.ip() && view.port == at.port() && view.serving);
    Ok(port.map(|port| {
        let ready = port.backends.into_iter().filter(|backend| backend.eligible);
        ready.map(|backend| backend.instance).collect()
    }))
}

/// Waits until so many pods, which do not end, take new flows at [`API_PORT`], whichever node is asked.
pub fn serving(cluster: &Cluster, count: usize) -> Result<()> {
    let waited = wait_until(&format!("{count} pods are served"), PATIENCE, || {
        let all = listed(cluster)?;
        let names = all
            .iter()
            .filter_map(|pod| pod["metadata"]["name"].as_str());
        let names: BTreeSet<_> = names.map(str::to_owned).collect();
        for node in &cluster.nodes {
            let right = |ready: BTreeSet<_>| ready.len() == count && ready.is_subset(&names);
            if !ready_on(node, TARGET)?.is_some_and(right) {
                return Ok(false);
            }
        }
        Ok(true)
    });
    waited.with_context(|| {
        let kinds = "deployments,replicasets,pods,endpointslices";
        let there = ["get", kinds, "--output", "wide", IN[0], IN[1]];
        let agents = [
            "logs",
            "--selector",
            "app.kubernetes.io/name=ironlb",
            "--prefix",
        ];
        let agents = [&agents[..], &["--tail=10", "--namespace", AGENTS]].concat();
        let said = [&there[..], &agents].map(|words| {
            let said = cluster.kubectl(words);
            said.unwrap_or_else(|error| format!("{error:#}"))
        });
        let held: Vec<_> = cluster
            .nodes
            .iter()
            .map(|node| ready_on(node, TARGET))
            .collect();
        format!(
            "the maps hold {held:?}; the API has:\n{}\nagents say:\n{}",
            said[0], said[1]
        )
    })
}

/// Waits until a Service of [`NAMESPACE`] shows the VIP.
pub fn shows_vip(cluster: &Cluster, service: &str) -> Result<()> {
    let vip = VIP.to_string();
    wait_until(&format!("{service} shows {vip}"), PATIENCE, || {
        Ok(external(cluster, service, NAMESPACE)?.is_some_and(|ip| ip == vip))
    })
}

/// The first address in a Service's status.
pub fn external(cluster: &Cluster, service: &str, namespace: &str) -> Result<Option<String>> {
    Ok(externals(cluster, service, namespace)?.into_iter().next())
}

/// The addresses in a Service's status.
fn externals(cluster: &Cluster, service: &str, namespace: &str) -> Result<Vec<String>> {
    let service = cluster.get(&["service", service, "--namespace", namespace])?;
    let ingress = service.pointer("/status/loadBalancer/ingress");
    let ips = ingress.and_then(Value::as_array).into_iter().flatten();
    Ok(ips
        .filter_map(|ingress| ingress["ip"].as_str().map(str::to_owned))
        .collect())
}

/// Waits until a Service of [`NAMESPACE`] shows these VIPs and no other.
pub fn shows(cluster: &Cluster, service: &str, vips: &[IpAddr]) -> Result<()> {
    let vips: Vec<_> = vips.iter().map(IpAddr::to_string).collect();
    let what = format!("{service} shows {}", vips.join(", "));
    let mut shown = Vec::new();
    let waited = wait_until(&what, PATIENCE, || {
        shown = externals(cluster, service, NAMESPACE)?;
        Ok(shown == vips)
    });
    waited.with_context(|| format!("it shows {shown:?}"))
}

/// Waits until there is an Event on a Service, and returns what it says.
pub fn event(cluster: &Cluster, service: &str, namespace: &str, reason: &str) -> Result<String> {
    let mut note = None;
    wait_until(&format!("an Event tells {reason}"), PATIENCE, || {
        let selector =
            format!("involvedObject.kind=Service,involvedObject.name={service},reason={reason}");
        let words = [
            "events",
            "--namespace",
            namespace,
            "--field-selector",
            &selector,
        ];
        let events = cluster.get(&words)?;
        note = events
            .pointer("/items/0/message")
            .and_then(Value::as_str)
            .map(str::to_owned);
        Ok(note.is_some())
    })?;
    note.with_context(|| format!("no {reason}"))
}

/// curl on a bare-metal host: what it printed.
pub fn curl(cluster: &Cluster, url: &str) -> Result<String> {
    let words = ["curl", "-sSf", "--max-time", "10", url];
    cluster.hosts[0].namespace.exec(words)
}

/// A connection to the VIP must be refused, and at once.
pub fn refused(cluster: &Cluster, port: u16) -> Result<()> {
    refused_at(cluster, (VIP, port).into())
}

/// As [`refused`], of any VIP.
pub fn refused_at(cluster: &Cluster, at: SocketAddr) -> Result<()> {
    /// curl's exit code for a refused connection.
    const REFUSED: i32 = 7;
    let url = format!("http://{at}/");
    let begun = Instant::now();
    let words = ["curl", "-sS", "--connect-timeout", "5", &url];
    let output = cluster.hosts[0].namespace.output(words)?;
    ensure!(
        output.status.code() == Some(REFUSED) && begun.elapsed() < Duration::from_secs(3),
        "{url} is not refused at once: {output:?} after {:?}",
        begun.elapsed()
    );
    Ok(())
}

/// Requests from a bare-metal host to [`TARGET`].
pub fn clients(cluster: &Cluster, per_second: u32) -> Clients {
    clients_of(cluster, TARGET, per_second)
}

/// As [`clients`], to any VIP.
pub fn clients_of(cluster: &Cluster, target: SocketAddr, per_second: u32) -> Clients {
    Clients::start(&cluster.hosts[0].namespace, target, per_second)
}

/// Starts one web server with a `/download` of that size; its SHA-256, as the server's node gets it.
pub fn start_download(cluster: &Cluster, mib: u32) -> Result<String> {
    let web = Web {
        download_mib: mib,
        replicas: 1,
        node: Some(SERVING),
        ..Web::default()
    };
    let pod = web.start(cluster)?.remove(0);
    let script = format!("curl -sSf http://{}/download | sha256sum", pod.address);
    let sum = serving_node(cluster)?.exec(["sh", "-c", &script])?;
    Ok(sum.split_whitespace().next().unwrap_or_default().to_owned())
}
