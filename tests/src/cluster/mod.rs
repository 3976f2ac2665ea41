//! A real Kubernetes of two nodes in network namespaces, with a provisioning network: real API server,
//! kubelets, containerd and CNI, built from source and kept in `target/cluster`. Everything but the control plane has
//! an IPv6 address too: `fd00:22::11` beside 172.22.0.11, `fd00:244:0:1::/64` beside 10.244.1.0/24.
//!
//! ```text
//!  host0 .100   host1 .101   bmc .150        control 10.250.0.2: etcd, API server, controllers
//!     └────────────┴────────────┴─── switch        │
//!            172.22.0.0/24,           │ │        fabric 10.250.0.0/24
//!            VIP 172.22.0.2           │ │          │ │
//!                    eth1 172.22.0.11 ┘ │   ┌──────┘ │ eth0 10.250.0.12
//!                       node-a ─────────│───┘      node-b
//!                       pods 10.244.0.0/24         pods 10.244.1.0/24
//!                         eth1 172.22.0.12 ────────┘
//! ```

mod agents;
mod binaries;
mod cache;
mod clients;
mod control_plane;
mod images;
mod node;
mod pki;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::command::{run, run_with_input, wait_until};
use crate::laboratory::{Cabling, Host, provisioning6, twin};
use crate::namespace::Namespace;
use crate::registry::{self, Kept};
use control_plane::ControlPlane;
use node::Plan;
use pki::Pki;

pub use agents::{AGENTS, ironlb_image, overlay};
pub use clients::{Clients, Request, Requests};
pub use images::ContainerImage;
pub use node::ClusterNode;

/// The nodes' names.
const NODES: [&str; 2] = ["node-a", "node-b"];
/// Interface to the other nodes, and of machines that are no nodes.
const FABRIC: &str = "eth0";
/// Provisioning port of every node.
const UPLINK: &str = "eth1";

/// Options of a cluster to be.
#[derive(Clone, Debug)]
pub struct ClusterBuilder {
    kube_proxy: bool,
    images: Vec<ContainerImage>,
}

impl ClusterBuilder {
    /// Runs kube-proxy (nftables mode) on the nodes; the default. Without it nothing answers at ClusterIPs.
    pub fn kube_proxy(mut self, on: bool) -> Self {
        self.kube_proxy = on;
        self
    }

    /// Loads an image on every node.
    pub fn image(mut self, image: ContainerImage) -> Self {
        self.images.push(image);
        self
    }

    /// Builds it, after removing those whose owner has died: at the first time with all that it is made
    /// of. Says on stderr what it does. Its nodes are ready when this returns.
    ///
    /// # Errors
    /// When something does not build or start (the message says what); what was made by then is removed.
    pub fn build(mut self) -> Result<Cluster> {
        registry::sweep()?;
        registry::ensure_bpffs()?;
        let binaries = binaries::binaries()?;
        self.images.insert(0, ContainerImage::Pause);
        let archives: Vec<PathBuf> = self
            .images
            .iter()
            .map(ContainerImage::archive)
            .collect::<Result<_>>()?;
        let tag = registry::register()?;
        cache::stage("start the cluster", || {
            self.start(&tag, &binaries, &archives)
        })
        .map_err(|error| match registry::down(&tag) {
            Ok(()) => error,
            Err(left) => error.context(format!("and cannot clean up after it: {left:#}")),
        })
    }

    fn start(self, tag: &str, binaries: &Path, archives: &[PathBuf]) -> Result<Cluster> {
        let state = cache::directory()?.join("state").join(tag);
        registry::note(tag, &state)?;
        std::fs::create_dir_all(&state)
            .with_context(|| format!("cannot create {}", state.display()))?;
        let network = Network::lay_out(tag)?;
        let pki = Pki::create()?;

        let start_node = |number: u8, namespace: Namespace| -> Result<ClusterNode> {
            let name = NODES[usize::from(number)];
            let directory = state.join(name);
            let plan = Plan {
                name,
                internal: internal(number),
                internal6: internal6(number),
                provisioning: Ipv4Addr::new(172, 22, 0, 11 + number),
                provisioning6: provisioning6(11 + number),
                pods: [pods(number), pods6(number)],
                kube_proxy: self.kube_proxy,
            };
            let node = ClusterNode::start(tag, &plan, namespace, &pki, binaries, &directory)
                .with_context(|| format!("cannot start {name}"))?;
            for archive in archives {
                node.import(archive)?;
            }
            Ok(node)
        };
        let (control_plane, nodes) = std::thread::scope(|scope| {
            let nodes: Vec<_> = (0..)
                .zip(network.nodes)
                .map(|(number, namespace)| scope.spawn(move || start_node(number, namespace)))
                .collect();
            let control = ControlPlane::start(network.control, &pki, binaries, &state);
            let nodes = nodes.into_iter().map(|node| match node.join() {
                Ok(node) => node,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            let nodes = nodes.collect::<Result<Vec<_>>>();
            Ok::<_, anyhow::Error>((control?, nodes?))
        })?;
        let cluster = Cluster {
            tag: tag.to_owned(),
            control_plane,
            nodes,
            switch: network.switch,
            hosts: network.hosts,
            bmc: network.bmc,
            kept: false,
        };
        cluster.join_nodes()?;
        Ok(cluster)
    }
}

/// Address of a node towards the others.
fn internal(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 250, 0, 11 + number)
}

/// The same of IPv6.
fn internal6(number: u8) -> Ipv6Addr {
    twin([0xfd00, 0x250, 0, 0], 11 + number)
}

/// Addresses of a node's pods.
fn pods(number: u8) -> String {
    format!("10.244.{number}.0/24")
}

/// The same of IPv6.
fn pods6(number: u8) -> String {
    format!("fd00:244:0:{number}::/64")
}

/// The namespaces and what connects them.
struct Network {
    control: Namespace,
    nodes: Vec<Namespace>,
    switch: Namespace,
    hosts: Vec<Host>,
    bmc: Host,
}

impl Network {
    fn lay_out(tag: &str) -> Result<Self> {
        let directory = registry::directory(tag);
        let namespace = |role: &str| Namespace::create(tag, role, &directory);
        let bridge = |role: &str| -> Result<Namespace> {
            let namespace = namespace(role)?;
            namespace.ip("link add br0 type bridge mcast_snooping 0\nlink set br0 up")?;
            // A wire: no firewall of it may see, defragment or delay anything.
            for family in ["iptables", "ip6tables"] {
                namespace.sysctl(&format!("net.bridge.bridge-nf-call-{family}"), "0")?;
            }
            Ok(namespace)
        };
        let (fabric, switch) = (bridge("fabric")?, bridge("switch")?);
        let to_fabric = Cabling {
            switch: &fabric,
            complete_checksums: false,
        };
        let to_switch = Cabling {
            switch: &switch,
            complete_checksums: false,
        };

        let control = namespace("control")?;
        to_fabric.plug(&control, FABRIC, "control")?;
        control.ip(&format!(
            "addr add {}/24 dev {FABRIC}",
            control_plane::ADDRESS
        ))?;
        let mut nodes = Vec::new();
        for (number, name) in (0..).zip(NODES) {
            let node = namespace(name)?;
            node.sysctl("net.ipv4.ip_forward", "1")?;
            node.sysctl("net.ipv6.conf.all.forwarding", "1")?;
            // Pods find their gateway at once, as on a node that has been up for long.
            node.sysctl("net.ipv6.conf.default.dad_transmits", "0")?;
            // Both: the kernel takes the larger of `all` and the interface's own.
            for scope in ["all", "default"] {
                node.sysctl(&format!("net.ipv4.conf.{scope}.rp_filter"), "0")?;
            }
            to_fabric.plug(&node, FABRIC, name)?;
            to_switch.plug(&node, UPLINK, name)?;
            // Nobody is at .1, but kubelet looks for a default route.
            let mut lines = format!(
                "addr add {}/24 dev {FABRIC}\n\
                 addr add {}/64 dev {FABRIC} nodad\n\
                 addr add 172.22.0.{}/24 dev {UPLINK}\n\
                 addr add {}/64 dev {UPLINK} nodad\n\
                 route add default via 10.250.0.1\n\
                 route add default via fd00:250::1\n",
                internal(number),
                internal6(number),
                11 + number,
                provisioning6(11 + number)
            );
            for other in (0..).take(NODES.len()).filter(|other| *other != number) {
                let routes = format!(
                    "route add {} via {}\nroute add {} via {}\n",
                    pods(other),
                    internal(other),
                    pods6(other),
                    internal6(other)
                );
                lines.push_str(&routes);
            }
            node.ip(&lines)?;
            nodes.push(node);
        }
        let host = |role: &str, last| to_switch.host(namespace(role)?, role, last);
        let hosts = vec![host("host0", 100)?, host("host1", 101)?];
        let bmc = host("bmc", 150)?;
        Ok(Self {
            control,
            nodes,
            switch,
            hosts,
            bmc,
        })
    }
}

/// A running cluster; all of it is removed when the value is dropped, unless kept.
#[derive(Debug)]
pub struct Cluster {
    tag: String,
    control_plane: ControlPlane,
    /// The nodes, both with the label `node-role.kubernetes.io/control-plane`.
    pub nodes: Vec<ClusterNode>,
    /// The provisioning switch: its ports are named after what is plugged in.
    pub switch: Namespace,
    /// Bare-metal hosts: 172.22.0.100 and .101, without a route to the pods.
    pub hosts: Vec<Host>,
    /// A BMC: 172.22.0.150.
    pub bmc: Host,
    kept: bool,
}

impl Cluster {
    /// Starts describing one.
    pub fn builder() -> ClusterBuilder {
        ClusterBuilder {
            kube_proxy: true,
            images: Vec::new(),
        }
    }

    /// Unique name of this cluster on this machine, for [`crate::down`].
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Runs kubectl with the administrator's rights and returns its stdout.
    ///
    /// # Errors
    /// When it does not succeed.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        run(&mut self.control_plane.kubectl(arguments))
    }

    /// Objects as the API has them: `["pods", "--all-namespaces"]`, `["service", "ironic"]`, …
    ///
    /// # Errors
    /// When there are none, or the API does not answer.
    pub fn get(&self, arguments: &[&str]) -> Result<Value> {
        let mut words = vec!["get", "--output", "json"];
        words.extend(arguments);
        let answer = self.kubectl(&words)?;
        serde_json::from_str(&answer).context("kubectl's JSON cannot be read")
    }

    /// Applies manifests.
    ///
    /// # Errors
    /// When the API does not take them; the message holds them.
    pub fn apply(&self, manifests: &str) -> Result<()> {
        self.kubectl_with_input(&["apply", "--filename", "-"], manifests)
            .map(drop)
    }

    /// As [`Cluster::kubectl`], with something on its stdin.
    ///
    /// # Errors
    /// As there.
    pub fn kubectl_with_input(&self, arguments: &[&str], input: &str) -> Result<String> {
        run_with_input(&mut self.control_plane.kubectl(arguments), input)
    }

    /// Applies a kustomization.
    ///
    /// # Errors
    /// When it cannot be built, or the API does not take it.
    pub fn apply_kustomization(&self, directory: &Path) -> Result<()> {
        let mut kubectl = self.control_plane.kubectl(&["apply", "--kustomize"]);
        run(kubectl.arg(directory)).map(drop)
    }

    /// Waits until something is ready: a workload's rollout (`statefulset/ironic`) or the condition
    /// `Ready` (`pod/web`); `options` may name a namespace.
    ///
    /// # Errors
    /// When it is not within `limit`; the message holds events and what the nodes say.
    pub fn wait_ready(&self, what: &str, options: &[&str], limit: Duration) -> Result<()> {
        let workload = ["deployment/", "statefulset/", "daemonset/"]
            .iter()
            .any(|kind| what.starts_with(kind));
        let timeout = format!("--timeout={}s", limit.as_secs());
        let mut words = if workload {
            vec!["rollout", "status", what]
        } else {
            vec!["wait", "--for=condition=Ready", what]
        };
        words.push(&timeout);
        words.extend(options);
        let waited = self.kubectl(&words);
        waited.map(drop).with_context(|| {
            let mut describe = vec!["get", "events,pods", "--output", "wide"];
            describe.extend(options);
            let told = self.kubectl(&describe);
            format!(
                "{what} is not ready after {limit:?}:\n{}",
                told.unwrap_or_else(|error| format!("{error:#}"))
            )
        })
    }

    /// Ends the API server; what runs on the nodes goes on.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn stop_apiserver(&mut self) -> Result<()> {
        self.control_plane.stop_apiserver()
    }

    /// Starts the API server again, and with it the controllers; it answers when this returns.
    ///
    /// # Errors
    /// When it does not come up in a minute.
    pub fn start_apiserver(&mut self) -> Result<()> {
        self.control_plane.start_apiserver()?;
        self.control_plane.start_controllers()
    }

    /// Leaves the cluster up after this process ends; [`crate::down`] with its tag removes it. Returns
    /// the path of a kubectl for people.
    ///
    /// # Errors
    /// When it cannot be registered so.
    pub fn keep(mut self) -> Result<PathBuf> {
        registry::keep(&self.tag, Kept::Cluster)?;
        self.kept = true;
        self.control_plane.leave();
        for node in &mut self.nodes {
            node.leave();
        }
        self.control_plane.write_kubectl()
    }

    /// Lets the kubelets start, and waits until both nodes are ready.
    fn join_nodes(&self) -> Result<()> {
        for node in &self.nodes {
            node.join()?;
        }
        let names = NODES.map(|name| format!("node/{name}"));
        let mut ready = vec!["wait", "--for=condition=Ready", "--timeout=60s"];
        ready.extend(names.iter().map(String::as_str));
        // kubectl does not wait for what is not there at all.
        let ready = wait_until("both nodes are ready", Duration::from_secs(60), || {
            Ok(self.kubectl(&ready).is_ok())
        });
        ready.with_context(|| {
            let logs: Vec<String> = self.nodes.iter().map(ClusterNode::logs).collect();
            format!("the nodes are not ready\n{}", logs.join("\n"))
        })?;
        // A kubelet may not give itself this label.
        let label = "node-role.kubernetes.io/control-plane=";
        self.kubectl(&["label", "nodes", "--all", label])?;
        // Pods cannot be made before.
        wait_until("ServiceAccounts are made", Duration::from_secs(30), || {
            Ok(self.kubectl(&["get", "serviceaccount/default"]).is_ok())
        })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        if let Err(error) = registry::down(&self.tag) {
            eprintln!("cluster {} is not wholly removed: {error:#}", self.tag);
        }
    }
}
