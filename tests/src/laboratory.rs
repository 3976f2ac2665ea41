//! The laboratory itself: topology, addresses, offloads, and its end.

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

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
/// The same on its IPv6 network.
pub const VIP6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x22, 0, 0, 0, 0, 0, 2);
/// First port of the range whose ports belong to one instance each.
const INSTANCE_BASE: u16 = 6200;
/// Provisioning port of every node.
const UPLINK: &str = "eth1";
/// What the peers of a laboratory authenticate each other with.
const PEERS_KEY: &str = "66c1f2a0c77a4c5d9f3b0a5e7f1d2c3b4a59687786958473625140f0e1d2c3b4";
/// The bridge that the provisioning port may be enslaved to.
const NODE_BRIDGE: &str = "br-ex";

/// The IPv6 address that goes with an IPv4 one: the last octet's digits are those of the last group.
pub(crate) fn twin(prefix: [u16; 4], last: u8) -> Ipv6Addr {
    let digits = u16::from(last / 100) << 8 | u16::from(last / 10 % 10) << 4 | u16::from(last % 10);
    let [a, b, c, d] = prefix;
    Ipv6Addr::new(a, b, c, d, 0, 0, 0, digits)
}

/// On the provisioning network, which is `fd00:22::/64`, too.
pub(crate) fn provisioning6(last: u8) -> Ipv6Addr {
    twin([0xfd00, 0x22, 0, 0], last)
}

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
    snooping: bool,
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

    /// Makes the switch send multicast only where somebody has joined the group, and ask who has (IGMP and MLD snooping,
    /// with a querier).
    pub fn snooping(mut self, on: bool) -> Self {
        self.snooping = on;
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

    /// So many control-plane nodes with so many pods each.
    pub fn nodes_with_pods(self, nodes: usize, pods: u8) -> Self {
        let node = NodeOptions {
            pods,
            ..NodeOptions::default()
        };
        self.nodes(vec![node; nodes])
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
        let snoops = u8::from(self.snooping);
        switch.ip(&format!(
            "link add br0 type bridge mcast_snooping {snoops} mcast_querier {snoops} \
             mcast_query_response_interval 100 mcast_startup_query_interval 100\n\
             link set br0 up"
        ))?;
        // The switch is a wire: no firewall of it may see, defragment or delay anything.
        switch.sysctl("net.bridge.bridge-nf-call-iptables", "0")?;
        switch.sysctl("net.bridge.bridge-nf-call-ip6tables", "0")?;
        let cabling = Cabling {
            switch: &switch,
            complete_checksums: self.complete_checksums,
        };

        let host = |role: &str, last| cabling.host(namespace(role)?, role, last);
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
            complete_checksums: self.complete_checksums,
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
    /// Makes a namespace a host on the provisioning network, by the switch's port `port`: with the addresses whose last
    /// part is `last`.
    pub(crate) fn host(&self, namespace: Namespace, port: &str, last: u8) -> Result<Host> {
        let (address, address6) = (Ipv4Addr::new(172, 22, 0, last), provisioning6(last));
        self.plug(&namespace, "eth0", port)?;
        namespace.ip(&format!(
            "addr add {address}/24 dev eth0\naddr add {address6}/64 dev eth0 nodad"
        ))?;
        Ok(Host {
            namespace,
            address,
            address6,
        })
    }

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
    /// Its IPv6 address there.
    pub address6: Ipv6Addr,
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
    /// Its IPv6 address.
    pub address6: Ipv6Addr,
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
    /// Bytes that have left by its provisioning port.
    ///
    /// # Errors
    /// When the port is not there.
    pub fn bytes_sent(&self) -> Result<u64> {
        let shown = self
            .namespace
            .exec(["ip", "-s", "-j", "link", "show", "dev", UPLINK])?;
        let shown: Value = serde_json::from_str(&shown)?;
        let bytes = shown[0]["stats64"]["tx"]["bytes"].as_u64();
        bytes.with_context(|| format!("no bytes sent in {shown}"))
    }

    /// MAC of its provisioning port.
    ///
    /// # Errors
    /// When the port is not there.
    pub fn mac(&self) -> Result<[u8; 6]> {
        Ok(self.namespace.interface(UPLINK)?.1)
    }

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
        namespace.sysctl("net.ipv6.conf.all.forwarding", "1")?;
        // A node that has been up for long has its link-local addresses; without them the kernel can solicit no neighbor.
        namespace.sysctl("net.ipv6.conf.default.dad_transmits", "0")?;
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
        let address6 = provisioning6(11 + number);
        namespace.ip(&format!(
            "addr add {address}/24 dev {uplink}\naddr add {address6}/64 dev {uplink} nodad"
        ))?;

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
        let pods6 = [0xfd00, 0x244, 0, u16::from(node_number)];
        let (address6, gateway6) = (twin(pods6, 11 + index), twin(pods6, 1));
        node.namespace.ip(&format!(
            "link add pod{index} type veth peer name eth0 netns {}\n\
             addr add {gateway}/32 dev pod{index}\n\
             addr add {gateway6}/128 dev pod{index} nodad\n\
             link set pod{index} up\n\
             route add {address}/32 dev pod{index} src {gateway}\n\
             route add {address6}/128 dev pod{index}",
            namespace.name()
        ))?;
        namespace.ip(&format!(
            "addr add {address}/32 dev eth0\n\
             addr add {address6}/128 dev eth0 nodad\n\
             link set eth0 up\n\
             route add {gateway}/32 dev eth0\n\
             route add {gateway6}/128 dev eth0\n\
             route add default via {gateway} dev eth0\n\
             route add default via {gateway6} dev eth0"
        ))?;
        let directory = directory.join(&instance);
        let web = web::start(&namespace, &instance, image, &directory)?;
        Ok(Self {
            instance,
            slot,
            namespace,
            address,
            address6,
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
    complete_checksums: bool,
    kept: bool,
}

impl Laboratory {
    /// How long a switch with snooping floods at first: it asks in centiseconds as set above, and waits for answers.
    pub const SNOOPS_AFTER: Duration = Duration::from_secs(3);

    /// Starts describing one.
    pub fn builder() -> Builder {
        Builder {
            complete_checksums: false,
            snooping: false,
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

    /// Gives a configuration of [`Laboratory::config`] or [`Laboratory::config_elected`] the IPv6 VIP and the pods' IPv6
    /// addresses, too.
    pub fn with_ipv6(&self, config: &mut Value) {
        let mut vip = config["vips"][0].clone();
        vip["address"] = json!(VIP6);
        config["vips"].as_array_mut().expect("vips").push(vip);
        config["services"][0]["vip"] = json!(format!("{VIP},{VIP6}"));
        let pods = self.nodes.iter().flat_map(|node| &node.pods);
        for (backend, pod) in backends(config).iter_mut().zip(pods) {
            backend["address"] = json!(format!("{},{}", pod.address, pod.address6));
        }
    }

    /// As [`Laboratory::config`], for agents that are each other's peers and elect who announces the VIP;
    /// every backend names its node. The peers' key is written to the laboratory's directory.
    ///
    /// # Errors
    /// When the key cannot be written.
    pub fn config_elected(&self, mode: &str) -> Result<Value> {
        let key = self.directory().join("peers.key");
        fs::write(&key, PEERS_KEY)
            .and_then(|()| fs::set_permissions(&key, fs::Permissions::from_mode(0o600)))
            .with_context(|| format!("cannot write {}", key.display()))?;
        let mut config = self.config(mode);
        config["vips"][0]["announce"] = json!("elect");
        let addresses: Vec<_> = self.nodes.iter().map(|node| node.address).collect();
        config["peers"] = json!({"key": {"file": key}, "nodes": addresses});
        let pods = self
            .nodes
            .iter()
            .flat_map(|node| node.pods.iter().map(|_| node.address));
        for (backend, node) in backends(&mut config).iter_mut().zip(pods) {
            backend["node"] = json!(node);
        }
        Ok(config)
    }

    /// Pulls the cable out of the switch's port `port`, e.g. `node0`: both ends lose the carrier.
    ///
    /// # Errors
    /// When there is no such port.
    pub fn unplug(&self, port: &str) -> Result<()> {
        self.switch.ip(&format!("link set {port} down"))
    }

    /// Puts it in again.
    ///
    /// # Errors
    /// When there is no such port.
    pub fn plug(&self, port: &str) -> Result<()> {
        self.switch.ip(&format!("link set {port} up"))
    }

    /// Takes a node's provisioning NIC away and puts another one in its place, with the same name and address. Its
    /// checksums are unfinished, whatever the laboratory's are.
    ///
    /// # Errors
    /// When that cannot be done.
    pub fn replace_uplink(&self, node: usize) -> Result<()> {
        let node = &self.nodes[node];
        self.switch.ip(&format!("link del {}", node.name))?;
        let cabling = Cabling {
            switch: &self.switch,
            complete_checksums: false,
        };
        cabling.plug(&node.namespace, "eth1", &node.name)?;
        let address = format!("addr add {}/24 dev eth1", node.address);
        node.namespace.ip(&address)
    }

    /// A BMC on a network of its own, 172.25.0.0/24, to which the first node has a second port, `eth2`. Its address is
    /// 172.25.0.150, the node's 172.25.0.11, and the pods are where they were.
    ///
    /// # Errors
    /// When a command fails.
    pub fn second_network(&self) -> Result<Host> {
        let directory = self.directory();
        let namespace = |role: &str| Namespace::create(&self.tag, role, &directory);
        let (switch, far) = (namespace("switch1")?, namespace("bmc1")?);
        switch.ip("link add br0 type bridge mcast_snooping 0\nlink set br0 up")?;
        let cabling = Cabling {
            switch: &switch,
            complete_checksums: self.complete_checksums,
        };
        cabling.plug(&far, "eth0", "bmc1")?;
        far.ip("addr add 172.25.0.150/24 dev eth0\naddr add fd00:25::150/64 dev eth0 nodad")?;
        let node = &self.nodes[0].namespace;
        cabling.plug(node, "eth2", "node0")?;
        node.ip("addr add 172.25.0.11/24 dev eth2\naddr add fd00:25::11/64 dev eth2 nodad")?;
        Ok(Host {
            namespace: far,
            address: Ipv4Addr::new(172, 25, 0, 150),
            address6: Ipv6Addr::new(0xfd00, 0x25, 0, 0, 0, 0, 0, 0x150),
        })
    }

    /// A host behind two routers, the link between which carries packets of `mtu` bytes at most; all others have 1,500.
    /// The nodes know the way to it.
    ///
    /// # Errors
    /// When a command fails.
    pub fn host_behind(&self, mtu: u32) -> Result<Host> {
        let directory = self.directory();
        let namespace = |role: &str| Namespace::create(&self.tag, role, &directory);
        let (near, distant, far) = (namespace("near")?, namespace("distant")?, namespace("far")?);
        let cabling = Cabling {
            switch: &self.switch,
            complete_checksums: false,
        };
        cabling.plug(&near, "eth0", "near")?;
        let wire = |from: &Namespace, to: &Namespace, mtu: u32| {
            from.ip(&format!(
                "link add to-{0} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {1}\nlink set to-{0} up",
                if to.name() == far.name() { "far" } else { "distant" },
                to.name()
            ))?;
            to.ip("link set eth0 up")
        };
        wire(&near, &distant, mtu)?;
        wire(&distant, &far, 1500)?;
        for router in [&near, &distant] {
            router.sysctl("net.ipv4.ip_forward", "1")?;
            router.sysctl("net.ipv6.conf.all.forwarding", "1")?;
        }
        near.ip("addr add 172.22.0.200/24 dev eth0\n\
             addr add fd00:22::200/64 dev eth0 nodad\n\
             addr add 172.24.0.1/24 dev to-distant\n\
             addr add fd00:24::1/64 dev to-distant nodad\n\
             route add 172.23.0.0/24 via 172.24.0.2\n\
             route add fd00:23::/64 via fd00:24::2")?;
        distant.ip("addr add 172.24.0.2/24 dev eth0\n\
             addr add fd00:24::2/64 dev eth0 nodad\n\
             addr add 172.23.0.1/24 dev to-far\n\
             addr add fd00:23::1/64 dev to-far nodad\n\
             route add default via 172.24.0.1\n\
             route add default via fd00:24::1")?;
        let host = Host {
            address: Ipv4Addr::new(172, 23, 0, 2),
            address6: Ipv6Addr::new(0xfd00, 0x23, 0, 0, 0, 0, 0, 2),
            namespace: far,
        };
        host.namespace.ip("addr add 172.23.0.2/24 dev eth0\n\
             addr add fd00:23::2/64 dev eth0 nodad\n\
             route add default via 172.23.0.1\n\
             route add default via fd00:23::1")?;
        for node in &self.nodes {
            node.namespace
                .ip("route add 172.23.0.0/24 via 172.22.0.200\n\
                 route add 172.24.0.0/24 via 172.22.0.200\n\
                 route add fd00:23::/64 via fd00:22::200\n\
                 route add fd00:24::/64 via fd00:22::200")?;
        }
        Ok(host)
    }

    /// Lets `node` and all others that are cut off so reach the hosts but not each other, or ends that.
    ///
    /// # Errors
    /// When the bridge cannot do that.
    pub fn cut_off(&self, node: &Node, on: bool) -> Result<()> {
        let on = if on { "on" } else { "off" };
        let port = &node.name;
        self.switch.ip(&format!(
            "link set dev {port} type bridge_slave isolated {on}"
        ))
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

/// The backends of the one service in a configuration of [`Laboratory::config`].
///
/// # Panics
/// When there are none.
pub fn backends(config: &mut Value) -> &mut Vec<Value> {
    config["services"][0]["backends"]
        .as_array_mut()
        .expect("a service with backends")
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
