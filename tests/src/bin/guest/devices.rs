//! Kinds of devices that the machine's own kernel may not have. With `mode: auto` each serves, natively or at TC, and
//! says why at TC. Native or not, links are as wires: senders write whole checksums.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use aya::util::KernelVersion;
use ironlb_tests::{Agent, IMAGE_PORT, Laboratory, Namespace, VIP};
use serde_json::json;

use crate::{Reporter, paths};

/// What the kernel says of a device without XDP, in the agent's words.
const NO_XDP: &str = "its driver has no XDP";
/// MACs of the guest's two NICs, which are one wire.
const NICS: [&str; 2] = ["52:54:00:00:00:00", "52:54:00:00:00:01"];

/// A row of each.
pub fn rows(kernel: KernelVersion, reporter: &mut Reporter) {
    reporter.step("a VLAN device is served at TC, and why is said", || {
        let mut lab = laboratory()?;
        let host = &lab.hosts[0].namespace;
        for (namespace, parent, last) in
            [(host, "eth0", 100), (&lab.nodes[0].namespace, "eth1", 11)]
        {
            namespace.ip(&format!("link add {parent}.7 link {parent} type vlan id 7"))?;
            move_address(namespace, parent, &format!("{parent}.7"), last)?;
        }
        lab.nodes[0].uplink = "eth1.7";
        serves(kernel, &lab, "tc", Some(NO_XDP))
    });
    reporter.step("a bond is served natively", || {
        let mut lab = laboratory()?;
        bond(&lab.nodes[0].namespace)?;
        lab.nodes[0].uplink = "bond0";
        // A veth that is an uplink itself is redirected to instead, for which GRO at the other end is enough; a slave
        // that is one sends back only to an end with a program. NICs do without.
        let napi = paths::attach_napi(&lab.switch, &lab.nodes[0].name)?;
        let served = serves(kernel, &lab, "native", None);
        drop(napi);
        served
    });
    reporter.step(
        "a slave of a bond is refused, and the bond is named",
        || {
            let lab = laboratory()?;
            bond(&lab.nodes[0].namespace)?;
            refused(&lab)
        },
    );
    reporter.step("a team device is served at TC, and why is said", || {
        let mut lab = laboratory()?;
        let node = &lab.nodes[0].namespace;
        node.ip("link add team0 type team")?;
        node.exec(["teamnl", "team0", "setoption", "mode", "roundrobin"])?;
        enslave(node, "team0")?;
        lab.nodes[0].uplink = "team0";
        serves(kernel, &lab, "tc", Some(NO_XDP))
    });
    reporter.step("virtio_net is served natively", || {
        let mut lab = laboratory()?;
        let host = &lab.hosts[0].namespace;
        let node = &lab.nodes[0].namespace;
        for (mac, namespace, former, last) in
            [(NICS[0], host, "eth0", 100), (NICS[1], node, "eth1", 11)]
        {
            let nic = nic(mac)?;
            let (name, to) = ("nic0", namespace.name());
            ironlb_tests::run(
                std::process::Command::new("ip")
                    .args(["link", "set", &nic, "netns", to, "name", name]),
            )?;
            move_address(namespace, former, name, last)?;
        }
        lab.nodes[0].uplink = "nic0";
        serves(kernel, &lab, "native", None)
    });
}

fn laboratory() -> Result<Laboratory> {
    Laboratory::builder()
        .nodes_with_pods(1, 1)
        .complete_checksums(true)
        .build()
}

/// Gives a device the provisioning address that another one has, and brings it up.
fn move_address(namespace: &Namespace, from: &str, to: &str, last: u8) -> Result<()> {
    namespace.ip(&format!(
        "addr flush dev {from}\n\
         link set {to} up\n\
         addr add 172.22.0.{last}/24 dev {to}"
    ))
}

/// Makes the provisioning port of a node a bond's slave.
fn bond(node: &Namespace) -> Result<()> {
    node.ip("link add bond0 type bond mode active-backup miimon 100")?;
    enslave(node, "bond0")
}

/// Makes the provisioning port of a node the slave of a device that is there.
fn enslave(node: &Namespace, master: &str) -> Result<()> {
    node.ip(&format!(
        "link set eth1 down\n\
         link set eth1 master {master}\n\
         link set eth1 up"
    ))?;
    move_address(node, "eth1", master, 11)
}

/// The name of the NIC with a MAC, in this process's namespace.
fn nic(mac: &str) -> Result<String> {
    let entries = fs::read_dir("/sys/class/net").context("list /sys/class/net")?;
    for entry in entries {
        let entry = entry.context("list /sys/class/net")?;
        let address = fs::read_to_string(entry.path().join("address")).unwrap_or_default();
        if address.trim() == mac {
            return Ok(entry.file_name().to_string_lossy().into_owned());
        }
    }
    anyhow::bail!("no NIC has the MAC {mac}: is virtio_net loaded?")
}

/// Starts an agent with `mode: auto`; it must take `mode` on the node's uplink, for this reason, and serve.
fn serves(
    kernel: KernelVersion,
    lab: &Laboratory,
    mode: &str,
    why: Option<&str>,
) -> Result<String> {
    let node = &lab.nodes[0];
    let mut agent = Agent::start(node, &lab.config("auto"))?;
    let status = paths::status(node)?;
    ensure!(
        status["uplinks"][0]["interface"] == node.uplink,
        "the uplink is not {}: {status}",
        node.uplink
    );
    let hook = paths::hook_of(kernel, node, &status, mode)?;
    let log = agent.process.log()?;
    if let Some(why) = why {
        ensure!(log.contains(why), "the agent does not say `{why}`:\n{log}");
    }
    let host = &lab.hosts[0].namespace;
    paths::download(host, &VIP.to_string(), IMAGE_PORT, &lab.image)?;
    paths::refuses(host, node, VIP)?;
    ensure!(
        agent.process.running()?,
        "the agent has ended: {}",
        agent.process.log()?
    );
    paths::unload(node, &mut agent)?;
    let why = why.map_or_else(String::new, |why| format!(" ({why})"));
    Ok(format!("{mode}{why}: {hook}; download, refusal, unload"))
}

/// An agent that is told to use a bond's slave must name the bond.
fn refused(lab: &Laboratory) -> Result<String> {
    const ADVICE: &str = "name bond0 as the uplink instead";
    let node = &lab.nodes[0];
    let mut config = lab.config("auto");
    config["uplinks"][0] = json!({"name": "eth1"});
    node.write_config(&config)?;
    let mut agent = Agent::spawn(node)?;
    let log = agent.refusal()?;
    ensure!(log.contains(ADVICE), "no `{ADVICE}` in: {log}");
    ensure!(!node.bpffs.exists(), "it left {}", node.bpffs.display());
    Ok(format!("refused: {ADVICE}"))
}
