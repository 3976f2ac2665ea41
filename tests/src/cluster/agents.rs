//! ironlb in the cluster: its image, `deploy/` as it ships, and what the nodes' maps hold.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use ironlb::dataplane::read::Reader;
use serde_json::json;

use super::{Cluster, ClusterNode};
use crate::command::wait_until;
use crate::laboratory::VIP;
use crate::maps::Maps;

/// Namespace of the agents.
pub const AGENTS: &str = "ironlb";
/// Where the agents pin, on their nodes.
const PINS: &str = "sys/fs/bpf/ironlb";

/// How long agents may take to agree on a machine that does much else.
const ELECTION: Duration = Duration::from_secs(60);

/// A kustomization for the test cluster: `ironlb`, `ironic`, …
pub fn overlay(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("cluster/overlays")
        .join(name)
}

/// The archive of ironlb's image, which `IRONLB_IMAGE` names.
///
/// # Errors
/// When it names none.
pub fn ironlb_image() -> Result<PathBuf> {
    let path = std::env::var_os("IRONLB_IMAGE").map(PathBuf::from).context(
        "IRONLB_IMAGE must name the archive of ironlb's image: `cargo xtask test --cluster` builds it and \
         says where it is",
    )?;
    // Whoever runs this may be in another folder than the one who says it.
    std::path::absolute(&path).with_context(|| format!("{} is no path", path.display()))
}

impl Cluster {
    /// Loads ironlb's image on the nodes, applies `deploy/` with the VIPs of the test cluster, and waits until
    /// the agents are ready. Again, it puts back what was changed meanwhile.
    ///
    /// # Errors
    /// When they are not in two minutes; the message holds what they say.
    pub fn deploy_ironlb(&self, image: &Path) -> Result<()> {
        for node in &self.nodes {
            node.import(image)?;
        }
        self.apply_kustomization(&overlay("ironlb"))?;
        self.agents_ready()
    }

    /// Lets agents use endpoints that no pod stands behind; [`Cluster::deploy_ironlb`] and a restart end that.
    ///
    /// # Errors
    /// As [`Cluster::agents_ready`].
    pub fn trust_endpoints(&self) -> Result<()> {
        let map = self.get(&["configmap/ironlb", "--namespace", AGENTS])?;
        let file = map["data"]["lb.yaml"].as_str().context("no lb.yaml")?;
        let file = format!("{file}kubernetes: {{endpointsWithoutPods: true}}\n");
        let patch = json!({"data": {"lb.yaml": file}}).to_string();
        let words = [
            "patch",
            "configmap/ironlb",
            "--type=merge",
            "--patch",
            &patch,
        ];
        self.kubectl(&[&words[..], &["--namespace", AGENTS]].concat())?;
        self.restart_agents()
    }

    /// Restarts the agents, which read their configuration then, and waits until they are ready.
    ///
    /// # Errors
    /// As [`Cluster::agents_ready`].
    pub fn restart_agents(&self) -> Result<()> {
        let restart = ["rollout", "restart", "daemonset/ironlb"];
        self.kubectl(&[&restart[..], &["--namespace", AGENTS]].concat())?;
        self.agents_ready()
    }

    /// Waits until the agents' rollout is done.
    ///
    /// # Errors
    /// When it is not in two minutes; the message holds what they say.
    pub fn agents_ready(&self) -> Result<()> {
        let namespace = ["--namespace", AGENTS];
        self.wait_ready("daemonset/ironlb", &namespace, Duration::from_secs(120))
            .with_context(|| {
                let all = ["logs", "--selector", "app.kubernetes.io/name=ironlb"];
                let words = [&all[..], &["--tail=20", "--prefix"], &namespace].concat();
                let said = self.kubectl(&words);
                format!(
                    "agents say:\n{}",
                    said.unwrap_or_else(|error| format!("{error:#}"))
                )
            })
    }

    /// Waits until exactly one node answers for the VIP, and returns it.
    ///
    /// # Errors
    /// When it is not so in a minute.
    pub fn announcing(&self) -> Result<&ClusterNode> {
        self.announcing_vip(VIP.into())
    }

    /// As [`Cluster::announcing`], for another VIP.
    ///
    /// # Errors
    /// As there.
    pub fn announcing_vip(&self, address: IpAddr) -> Result<&ClusterNode> {
        let mut answering = Vec::new();
        let what = format!("one node announces {address}");
        let waited = wait_until(&what, ELECTION, || {
            answering.clear();
            for node in &self.nodes {
                let vips = node.reader()?.vips()?;
                if vips
                    .iter()
                    .any(|vip| vip.address == address && vip.answering)
                {
                    answering.push(node);
                }
            }
            Ok(answering.len() == 1)
        });
        let names: Vec<_> = answering.iter().map(|node| &node.name).collect();
        waited.with_context(|| format!("it is announced by {names:?}"))?;
        answering
            .pop()
            .with_context(|| format!("nobody announces {address}"))
    }

    /// Name of the agent's pod on a node.
    ///
    /// # Errors
    /// When there is none.
    pub fn agent_on(&self, node: &ClusterNode) -> Result<String> {
        let here = format!("spec.nodeName={}", node.name);
        let words = ["pods", "--namespace", AGENTS, "--field-selector", &here];
        let pods = self.get(&words)?;
        let mut live = pods["items"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        let name = live
            .next()
            .and_then(|pod| pod["metadata"]["name"].as_str())
            .with_context(|| format!("no agent on {}", node.name))?;
        Ok(name.to_owned())
    }
}

impl ClusterNode {
    /// Where the agent's pins are, seen from outside of the node.
    ///
    /// # Errors
    /// When the node is dead.
    pub fn pins(&self) -> Result<PathBuf> {
        Ok(self.root()?.join(PINS))
    }

    /// The agent's maps, read as `ironlb services` and the other commands do.
    ///
    /// # Errors
    /// When nothing is loaded.
    pub fn reader(&self) -> Result<Reader> {
        let pins = self.pins()?;
        Reader::open(&pins).with_context(|| format!("cannot read {}'s maps", self.name))
    }

    /// The maps themselves.
    ///
    /// # Errors
    /// When the node is dead.
    pub fn maps(&self) -> Result<Maps> {
        Ok(Maps::new(&self.pins()?))
    }

    /// Time from watch events to the maps (seconds, all together), and how many there were, since the agent's start.
    ///
    /// # Errors
    /// When the agent does not answer, or counts nothing of the kind.
    pub fn to_maps(&self) -> Result<(f64, f64)> {
        let metric = |part: &str| {
            let name = format!("ironlb_kubernetes_event_to_maps_seconds_{part}");
            self.metric(&name)?
                .with_context(|| format!("no metric {name}"))
        };
        Ok((metric("sum")?, metric("count")?))
    }

    /// A metric of the agent, with its labels as they are printed; `None` if there is none of that name.
    ///
    /// # Errors
    /// When the agent does not answer.
    pub fn metric(&self, name: &str) -> Result<Option<f64>> {
        let url = "http://127.0.0.1:9469/metrics";
        let metrics = self.exec(["curl", "-sSf", "--max-time", "5", url])?;
        let value = metrics
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value
            .map(|value| value.parse().with_context(|| format!("{name} is {value}")))
            .transpose()
    }
}
