//! Both forward paths with a real agent: downloads over the VIP, a refusal, an agent's restart, and the end of it all.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use aya::programs::{Program, XdpMode};
use aya::util::KernelVersion;
use ironlb_tests::engine::Engine;
use ironlb_tests::{
    Agent, Download, IMAGE_PORT, Image, KernelObjects, Laboratory, Namespace, Node, RPC_PORT, VIP,
    VIP6, wait_until,
};
use lb_common::layout::program;
use lb_common::verdict::Verdict;
use serde_json::Value;

/// Links for TC programs; before it they are filters of a clsact qdisc.
const TCX_SINCE: KernelVersion = KernelVersion::new(6, 6, 0);
/// From here on GRO gives a veth NAPI, without which what XDP transmits to it is lost; before it only an XDP program does.
const NAPI_BY_GRO_SINCE: KernelVersion = KernelVersion::new(5, 13, 0);
/// Long for a machine, short for an emulated one that has others beside it.
const LIMIT: Duration = Duration::from_secs(60);

/// Serves a laboratory in `mode` on its veth.
pub fn serve(kernel: KernelVersion, mode: &str) -> Result<String> {
    let lab = Laboratory::builder()
        .nodes_with_pods(1, 1)
        .complete_checksums(mode == "native")
        .build()?;
    let node = &lab.nodes[0];
    // Lives as long as the laboratory.
    let napi = (mode == "native" && kernel < NAPI_BY_GRO_SINCE)
        .then(|| attach_napi(&lab.switch, &node.name))
        .transpose()?;
    let mut config = lab.config(mode);
    lab.with_ipv6(&mut config);
    let mut agent = Agent::start(node, &config)?;

    let status = status(node)?;
    let hook = hook_of(kernel, node, &status, mode)?;
    let host = &lab.hosts[0].namespace;
    download(host, &format!("{VIP}"), IMAGE_PORT, &lab.image)?;
    download(host, &format!("[{VIP6}]"), IMAGE_PORT, &lab.image)?;
    refuses(host, node, VIP)?;

    // Another agent takes over under a running download.
    let url = format!("http://{VIP}:{IMAGE_PORT}{}?rate=1m", Image::URL_PATH);
    let running = Download::start(host, &url, &[], LIMIT)?;
    let flows = || {
        Ok(!node
            .maps()
            .living(lb_common::layout::map::LIVING)?
            .is_empty())
    };
    wait_until("the slow download is a living flow", LIMIT, flows)?;
    agent.stop()?;
    let mut agent = Agent::launch(node)?;
    ensure!(
        hook_of(kernel, node, &self::status(node)?, mode)? == hook,
        "after the agent's restart it is not {hook}"
    );
    running
        .finish(&lab.image.sha256)
        .context("a download that an agent's restart met")?;

    unload(node, &mut agent)?;
    drop(napi);
    Ok(format!("{hook}; downloads, refusal, restart, unload"))
}

/// Gives the other end of the uplink's veth NAPI by an XDP program that passes everything: an uplink that no agent has set
/// up is nobody's.
pub fn attach_napi(switch: &Namespace, port: &str) -> Result<Engine> {
    let (index, _) = switch.interface(port)?;
    let mut engine = Engine::load(64)?;
    match engine.program(program::XDP_PLAIN)? {
        Program::Xdp(xdp) => switch.enter(|| xdp.attach_to_if_index(index, XdpMode::Driver))?,
        _ => bail!("{} is no XDP program", program::XDP_PLAIN),
    }
    .with_context(|| format!("attach to the switch's {port}"))?;
    Ok(engine)
}

/// What `ironlb status` tells.
pub fn status(node: &Node) -> Result<Value> {
    let said = node.ironlb(&["status", "-o", "json"])?;
    serde_json::from_str(&said).with_context(|| format!("no JSON: {said}"))
}

/// How the programs are attached to the one uplink, checked against what this kernel has.
pub fn hook_of(kernel: KernelVersion, node: &Node, status: &Value, mode: &str) -> Result<String> {
    let uplink = &status["uplinks"][0];
    ensure!(uplink["mode"] == mode, "the uplink is not {mode}: {status}");
    let programs = uplink["programs"].as_array().context("no programs")?;
    let links: Vec<_> = programs.iter().filter_map(|p| p["hook"].as_str()).collect();
    let has_tcx = kernel >= TCX_SINCE;
    let mut wanted = Vec::new();
    if has_tcx {
        wanted.push("egress");
        if mode == "tc" {
            wanted.push("ingress");
        }
    }
    if mode == "native" {
        wanted.push("xdp");
    }
    let mut links = links;
    links.sort_unstable();
    ensure!(links == wanted, "links are {links:?}, not {wanted:?}");
    let filters = filters(node)?;
    let clsact = match mode {
        "tc" => &[program::INGRESS, program::EGRESS][..],
        _ => &[program::EGRESS],
    };
    let wanted = if has_tcx { &[][..] } else { clsact };
    ensure!(
        filters == wanted,
        "clsact filters are {filters:?}, not {wanted:?}"
    );
    let tc = if has_tcx { "TCX" } else { "clsact" };
    Ok(match mode {
        "native" => format!("XDP and {tc}"),
        _ => tc.to_owned(),
    })
}

/// Names of the BPF programs that are clsact filters of the node's uplink, those on the way in first.
fn filters(node: &Node) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for direction in ["ingress", "egress"] {
        let words = ["tc", "-j", "filter", "show", "dev", node.uplink, direction];
        let said = node.namespace.exec(words)?;
        let said: Value =
            serde_json::from_str(&said).with_context(|| format!("no JSON: {said}"))?;
        let filters = said.as_array().into_iter().flatten();
        names.extend(
            filters
                .filter_map(|filter| filter["options"]["bpf_name"].as_str())
                .map(str::to_owned),
        );
    }
    Ok(names)
}

/// Downloads the image over a VIP; every octet must be right.
pub fn download(host: &Namespace, vip: &str, port: u16, image: &Image) -> Result<()> {
    let url = format!("http://{vip}:{port}{}", Image::URL_PATH);
    Download::start(host, &url, &[], LIMIT)?.finish(&image.sha256)
}

/// A port that nobody serves must be refused by a RST to the first SYN.
pub fn refuses(host: &Namespace, node: &Node, vip: Ipv4Addr) -> Result<()> {
    let refused = || node.maps().verdict(Verdict::RefusedNoService);
    let before = refused()?;
    let target = SocketAddr::from((vip, RPC_PORT));
    match host.enter(|| TcpStream::connect_timeout(&target, LIMIT))? {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
        Err(error) => bail!("a connection to {target} is not refused: {error}"),
        Ok(_) => bail!("{target} answers, which no service has"),
    }
    let syns = refused()? - before;
    ensure!(syns == 1, "{syns} SYNs were refused, not the first one");
    Ok(())
}

/// Stops the agent, unloads, and looks for what is left.
pub fn unload(node: &Node, agent: &mut Agent) -> Result<()> {
    let objects = node.maps().kernel_objects()?;
    ensure!(!objects.programs.is_empty(), "no programs are loaded");
    agent.stop()?;
    node.ironlb(&["unload"])?;
    ensure!(!node.bpffs.exists(), "unload left {}", node.bpffs.display());
    let filters = filters(node)?;
    ensure!(filters.is_empty(), "unload left the filters {filters:?}");
    // The kernel frees programs and maps a moment after the last reference.
    wait_until("the kernel has freed all", LIMIT, || {
        Ok(objects.left() == KernelObjects::default())
    })
    .with_context(|| format!("unload left {:?}", objects.left()))
}
