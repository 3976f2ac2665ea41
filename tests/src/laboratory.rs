//! The laboratory itself: topology, addresses, offloads, and its end.

use std::fs;
use std::net::Ipv4Addr;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::image::Image;
use crate::namespace::Namespace;
use crate::process::Process;
use crate::registry::Kept;
use crate::web::{API_PORT, IMAGE_PORT};
use crate::{registry, web};

/// The VIP of Ironic on the provisioning network.
pub const VIP: Ipv4Addr = Ipv4Addr::new(172, 22, 0, 2);
/// First port of the range whose ports belong to one instance each.
const INSTANCE_BASE: u16 = 6200;
/// Provisioning port of every node.
const UPLINK: &str = "eth1";
/// The bridge that the provisioning port may be enslaved to.
const NODE_BRIDGE: &str = "br-ex";

/// How a node is laid out.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Ironic pods on it.
    pub pods: u8,
    /// Makes `eth1` a port of a bridge `br-ex`, which carries the node's address, with
    /// `bridge-nf-call-iptables=1`: what kind, dev-scripts and OVN-style set-ups do.
    pub bridged: bool,
    /// Value of `rp_filter` on all interfaces.
    pub rp_filter: u8,
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self {
            pods: 3,
            bridged: false,
            rp_filter: 0,
        }
    }
}

/// Options of a laboratory to be.
#[derive(Clone, Debug)]
pub struct Builder {
    complete_checksums: bool,
    image_mib: u32,
    nodes: Vec<NodeOptions>,
}

impl Builder {
    /// Makes the links behave like wires (the default leaves every offload on): senders towards the
    /// nodes write whole checksums, frames carry their VLAN tag, and those that XDP transmits are
    /// received. Native XDP on veth needs that.
    pub fn complete_checksums(mut self, on: bool) -> Self {
        self.complete_checksums = on;
        self
    }

    /// Size of the image that every pod serves (default 4 MiB).
    pub fn image_mib(mut self, mib: u32) -> Self {
        self.image_mib = mib;
        self
    }

    /// The control-plane nodes (default: one with three pods).
    pub fn nodes(mut self, nodes: Vec<NodeOptions>) -> Self {
        self.nodes = nodes;
        self
    }

    /// Builds it, after removing laboratories whose owner has died.
    ///
    /// # Errors
    /// When a command fails (the message names it); what was built by then is removed.
    pub fn build(self) -> Result<Laboratory> {
        registry::sweep()?;
        registry::ensure_bpffs()?;
        let tag = registry::register()?;
        self.lay_out(&tag)
            .map_err(|error| match registry::down(&tag) {
                Ok(()) => error,
                Err(left) => error.context(format!("and cannot clean up after it: {left:#}")),
            })
    }

    fn lay_out(self, tag: &str) -> Result<Laboratory> {
        let directory = registry::directory(tag);
        let namespace = |role: &str| Namespace::create(tag, role, &directory);
        let switch = namespace("switch")?;
        switch.ip("link add br0 type bridge mcast_snooping 0\nlink set br0 up")?;
        // The switch is a wire: no firewall of it may see, defragment or delay anything.
        switch.sysctl("net.bridge.bridge-nf-call-iptables", "0")?;
        switch.sysctl("net.bridge.bridge-nf-call-ip6tables", "0")?;
        let cabling = Cabling {
            switch: &switch,
            complete_checksums: self.complete_checksums,
        };

        let host = |role: &str, last: u8| -> Result<Host> {
            let namespace = namespace(role)?;
            let address = Ipv4Addr::new(172, 22, 0, last);
            cabling.plug(&namespace, "eth0", role)?;
            namespace.ip(&format!("addr add {address}/24 dev eth0"))?;
            Ok(Host { namespace, address })
        };
        let hosts = vec![host("host0", 100)?, host("host1", 101)?];
        let bmc = host("bmc", 150)?;

        let image = Image::create(&directory.join("common.img"), self.image_mib)?;
        let mut nodes = Vec::new();
        for (number, options) in (0_u8..).zip(self.nodes) {
            nodes.push(Node::build(tag, number, options, &cabling, &image)?);
        }
        Ok(Laboratory {
            tag: tag.to_owned(),
            switch,
            hosts,
            bmc,
            nodes,
            image,
            kept: false,
        })
    }
}

/// How namespaces are connected to the provisioning switch.
pub(crate) struct Cabling<'a> {
    pub(crate) switch: &'a Namespace,
    pub(crate) complete_checksums: bool,
}

impl Cabling<'_> {
    /// Connects `interface` of `namespace` to the switch's port `port`.
    pub(crate) fn plug(&self, namespace: &Namespace, interface: &str, port: &str) -> Result<()> {
        self.switch.ip(&format!(
            "link add {port} type veth peer name {interface} netns {}\n\
             link set {port} master br0 up",
            namespace.name()
        ))?;
        namespace.ip(&format!("link set {interface} up"))?;
        if self.complete_checksums {
            namespace.exec(["ethtool", "-K", interface, "tx", "off"])?;
            // NAPI at the other end, without which a frame that XDP transmits is lost, and VLAN
            // tags in the frame, where XDP sees them.
            let wire = ["ethtool", "-K", port, "gro", "on", "txvlan", "off"];
            self.switch.exec(wire)?;
        }
        Ok(())
    }
}

/// A machine on the provisioning network that is not a node.
#[derive(Debug)]
pub struct Host {
    /// Its namespace; its interface is `eth0`.
    pub namespace: Namespace,
    /// Its address on the provisioning network.
    pub address: Ipv4Addr,
}

/// A control-plane node.
#[derive(Debug)]
pub struct Node {
    /// `node0`, …
    pub name: String,
    /// Its namespace.
    pub namespace: Namespace,
    /// Its address on the provisioning network.
    pub address: Ipv4Addr,
    /// The interface that carries the address: `eth1`, or the bridge over it.
    pub uplink: &'static str,
    /// Its Ironic pods.
    pub pods: Vec<Pod>,
    /// Where its agent pins maps and links (`--bpffs`).
    pub bpffs: PathBuf,
    /// Where its agent's configuration is written.
    pub config: PathBuf,
}

/// An Ironic pod.
#[derive(Debug)]
pub struct Pod {
    /// Instance name: `ironic-0`, …, over all nodes.
    pub instance: String,
    /// Slot of its instance port.
    pub slot: u32,
    /// Its namespace; its interface is `eth0`.
    pub namespace: Namespace,
    /// Its address.
    pub address: Ipv4Addr,
    /// Its nginx.
    pub web: Process,
}

impl Pod {
    /// The VIP port that leads to this instance's image server alone.
    pub fn instance_port(&self) -> u16 {
        INSTANCE_BASE + self.slot as u16
    }

    /// Path of the file that only this instance has.
    pub fn own_path(&self) -> String {
        format!("/images/{}/boot.iso", self.instance)
    }
}

impl Node {
    fn build(
        tag: &str,
        number: u8,
        options: NodeOptions,
        cabling: &Cabling<'_>,
        image: &Image,
    ) -> Result<Self> {
        let NodeOptions {
            pods,
            bridged,
            rp_filter,
        } = options;
        let name = format!("node{number}");
        let directory = registry::directory(tag);
        let namespace = Namespace::create(tag, &name, &directory)?;
        namespace.sysctl("net.ipv4.ip_forward", "1")?;
        // Both: the kernel takes the larger of `all` and the interface's own.
        for scope in ["all", "default"] {
            let name = format!("net.ipv4.conf.{scope}.rp_filter");
            namespace.sysctl(&name, &rp_filter.to_string())?;
        }
        cabling.plug(&namespace, UPLINK, &name)?;
        let address = Ipv4Addr::new(172, 22, 0, 11 + number);
        let uplink = if bridged {
            // With a MAC that is not the port's: frames for the node carry the bridge's.
            namespace.ip(&format!(
                "link add {NODE_BRIDGE} address 02:00:00:00:ee:{number:02x} type bridge mcast_snooping 0\n\
                 link set {UPLINK} master {NODE_BRIDGE}\n\
                 link set {NODE_BRIDGE} up"
            ))?;
            namespace.sysctl("net.bridge.bridge-nf-call-iptables", "1")?;
            NODE_BRIDGE
        } else {
            UPLINK
        };
        namespace.ip(&format!("addr add {address}/24 dev {uplink}"))?;

        let mut node = Self {
            bpffs: PathBuf::from(registry::BPFFS).join(format!("ironlb-{tag}-{name}")),
            config: directory.join(format!("{name}.yaml")),
            name,
            namespace,
            address,
            uplink,
            pods: Vec::new(),
        };
        for index in 0..pods {
            let slot = u32::from(number) * u32::from(pods) + u32::from(index);
            let pod = Pod::build(tag, &node, number, index, slot, image)
                .with_context(|| format!("cannot start pod {index} of {}", node.name))?;
            node.pods.push(pod);
        }
        Ok(node)
    }
}

impl Pod {
    /// As the CNI plugin `ptp` does it: a veth pair, the node's end with the gateway's address and
    /// a host route to the pod.
    fn build(
        tag: &str,
        node: &Node,
        node_number: u8,
        index: u8,
        slot: u32,
        image: &Image,
    ) -> Result<Self> {
        let instance = format!("ironic-{slot}");
        let directory = registry::directory(tag);
        let namespace = Namespace::create(tag, &instance, &directory)?;
        let address = Ipv4Addr::new(10, 244, node_number, 11 + index);
        let gateway = Ipv4Addr::new(10, 244, node_number, 1);
        node.namespace.ip(&format!(
            "link add pod{index} type veth peer name eth0 netns {}\n\
             addr add {gateway}/32 dev pod{index}\n\
             link set pod{index} up\n\
             route add {address}/32 dev pod{index} src {gateway}",
            namespace.name()
        ))?;
        namespace.ip(&format!(
            "addr add {address}/32 dev eth0\n\
             link set eth0 up\n\
             route add {gateway}/32 dev eth0\n\
             route add default via {gateway} dev eth0"
        ))?;
        let directory = directory.join(&instance);
        let web = web::start(&namespace, &instance, image, &directory)?;
        Ok(Self {
            instance,
            slot,
            namespace,
            address,
            web,
        })
    }
}

/// A laboratory; all of it is removed when the value is dropped, unless kept.
#[derive(Debug)]
pub struct Laboratory {
    tag: String,
    /// The provisioning switch: its ports are named after what is plugged in.
    pub switch: Namespace,
    /// Bare-metal hosts: 172.22.0.100 and .101, without a route to the pods.
    pub hosts: Vec<Host>,
    /// A BMC: 172.22.0.150.
    pub bmc: Host,
    /// Control-plane nodes: 172.22.0.11, …
    pub nodes: Vec<Node>,
    /// The image that every pod serves.
    pub image: Image,
    kept: bool,
}

impl Laboratory {
    /// Starts describing one.
    pub fn builder() -> Builder {
        Builder {
            complete_checksums: false,
            image_mib: 4,
            nodes: vec![NodeOptions::default()],
        }
    }

    /// Unique name of this laboratory on this machine, for [`crate::down`].
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Directory of its files (logs, configurations, web roots); removed with it.
    pub fn directory(&self) -> PathBuf {
        registry::directory(&self.tag)
    }

    /// Configuration of an agent that serves every pod of the laboratory on the VIP: the API, the
    /// images, and an image port for each instance. JSON, hence YAML; change it by its keys.
    pub fn config(&self, mode: &str) -> Value {
        let pods = || self.nodes.iter().flat_map(|node| &node.pods);
        let last = INSTANCE_BASE + 31;
        json!({
            "apiVersion": "ironlb.dev/v1",
            "uplinks": [{"subnet": "172.22.0.0/24", "mode": mode, "bypass": "drop"}],
            "vips": [{"address": VIP, "announce": "always"}],
            "services": [{
                "name": "ironic",
                "vip": VIP,
                "ports": [{"name": "api", "port": API_PORT}, {"name": "images", "port": IMAGE_PORT}],
                "instance_ports": {"images": format!("{INSTANCE_BASE}-{last}")},
                "backends": pods().map(|pod| json!({
                    "instance": pod.instance, "slot": pod.slot, "address": pod.address,
                })).collect::<Vec<_>>(),
            }],
        })
    }

    /// Routes the pods' addresses on `host` by way of the node, around the VIP.
    ///
    /// # Errors
    /// When a route cannot be set.
    pub fn route_to_pods(&self, host: &Host) -> Result<()> {
        for (number, node) in self.nodes.iter().enumerate() {
            host.namespace.ip(&format!(
                "route replace 10.244.{number}.0/24 via {}",
                node.address
            ))?;
        }
        Ok(())
    }

    /// Leaves the laboratory up after this process ends; [`crate::down`] with its tag removes it.
    ///
    /// # Errors
    /// When it cannot be registered so.
    pub fn keep(mut self) -> Result<String> {
        registry::keep(&self.tag, Kept::Laboratory)?;
        self.kept = true;
        for pod in self.nodes.iter_mut().flat_map(|node| &mut node.pods) {
            pod.web.leave();
        }
        Ok(self.tag.clone())
    }
}

impl Laboratory {
    /// What the agents said goes with the directory: a failed test shows it.
    fn show_agent_logs(&self) {
        let Ok(files) = fs::read_dir(self.directory()) else {
            return;
        };
        for path in files.flatten().map(|file| file.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if let Some(log) = fs::read_to_string(&path)
                .ok()
                .filter(|_| name.contains("-agent-"))
            {
                eprintln!("--- {name}:\n{log}---");
            }
        }
    }
}

impl Drop for Laboratory {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        if std::thread::panicking() {
            self.show_agent_logs();
        }
        for pod in self.nodes.iter_mut().flat_map(|node| &mut node.pods) {
            // Ended already is fine.
            let _ = pod.web.kill();
        }
        if let Err(error) = registry::down(&self.tag) {
            eprintln!("laboratory {} is not wholly removed: {error:#}", self.tag);
        }
    }
}
