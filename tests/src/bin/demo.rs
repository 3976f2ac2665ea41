//! The demo: ironlb at work in the laboratory, as a report to read; `cargo xtask demo` builds and runs it.
//!
//! Every line that begins with `ok` has been checked; one that begins with `FAILED` makes the exit code 1.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use ironlb_tests::{
    API_PORT, Agent, Download, Fleet, Host, IMAGE_PORT, Image, Kept, Laboratory, Neighbour, Node,
    Outcome, Prober, RPC_PORT, Report, VIP, VIP6, down, heads, ironlb, kept, run, sweep,
    wait_until,
};
use serde_json::Value;

/// Size of the image that the demo downloads.
const IMAGE_MIB: u32 = 256;
/// Times that a download is measured; the best counts, the others met other work on the machine.
const DOWNLOADS: u32 = 3;

#[derive(Parser)]
struct Options {
    /// Leave the laboratory up.
    #[arg(long)]
    keep: bool,
    /// End laboratories that were kept.
    #[arg(long, conflicts_with = "keep")]
    down: bool,
    /// Only remove what killed owners have left.
    #[arg(long, conflicts_with_all = ["keep", "down"])]
    sweep: bool,
}

fn main() -> ExitCode {
    match main_of(&Options::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            println!("\n{failed} of the above FAILED");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("\nthe demo cannot go on: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Does what the options say; the number of failed checks.
fn main_of(options: &Options) -> Result<u32> {
    let Options {
        keep,
        down: end,
        sweep: only_sweep,
    } = *options;
    if only_sweep {
        sweep()?;
        return Ok(0);
    }
    if end {
        let tags = kept(Kept::Laboratory)?;
        for tag in &tags {
            down(tag)?;
        }
        sweep()?;
        println!("{} kept laboratories ended", tags.len());
        return Ok(0);
    }
    show(keep)
}

fn show(keep: bool) -> Result<u32> {
    println!(
        "ironlb demo on Linux {}\n\n\
         laying out a laboratory of network namespaces: a provisioning bridge with two bare-metal hosts and a BMC,\n\
         one control-plane node, three Ironic pods with a web server (nginx) each …",
        rustix::system::uname().release().to_string_lossy()
    );
    let laboratory = Laboratory::builder()
        .complete_checksums(true)
        .image_mib(IMAGE_MIB)
        .build()?;
    let node = laboratory.nodes.first().context("a node was asked for")?;
    let host = laboratory.hosts.first().context("hosts are there")?;
    // Real NICs segment in hardware; the frames that the XDP program sees, on their way in, stay complete.
    node.namespace
        .exec(["ethtool", "-K", node.uplink, "tx", "on"])?;
    println!(
        "\n   host0 {}, host1 {}, bmc {}\n   └─ provisioning bridge ── {} {} (eth1) ── {}\n   VIP {VIP}",
        host.address,
        laboratory.hosts[1].address,
        laboratory.bmc.address,
        node.name,
        node.address,
        node.pods
            .iter()
            .map(|pod| format!("{} {}", pod.instance, pod.address))
            .collect::<Vec<_>>()
            .join(", ")
    );
    let mut report = Report::default();

    // Before ironlb is loaded: later, `bypass: drop` keeps hosts from reaching pods directly.
    laboratory.route_to_pods(host)?;
    let direct = best_download(
        &laboratory,
        host,
        &format!("{}:{IMAGE_PORT}", node.pods[0].address),
    )
    .context("download from a pod without ironlb")?;

    report.part("The agent loads the programs and serves");
    let mut config = laboratory.config("native");
    laboratory.with_ipv6(&mut config);
    let mut agent = Agent::start(node, &config)?;
    report.check(
        attached_natively(node)?,
        "the XDP program runs in the driver of node0's provisioning NIC (native mode)",
    );

    spread(&mut report, host, node)?;
    instances(&mut report, host, node)?;
    over_ipv6(&mut report, host, node)?;
    refusal(&mut report, host, node)?;
    download(&mut report, &laboratory, host, &direct)?;
    agent = kill_agent(&mut report, &laboratory, host, node, agent)?;
    inside(&mut report, node)?;

    if keep {
        agent.process.leave();
        play(&laboratory, host, node)?;
        laboratory.keep()?;
    } else {
        drop(agent);
        drop(laboratory);
        failover(&mut report)?;
        println!(
            "\nThe laboratories are removed. To keep the first one and play with it: cargo xtask demo --keep"
        );
    }
    Ok(report.failed)
}

/// Three nodes that share the VIP: the one that announces it goes in the middle of downloads.
fn failover(report: &mut Report) -> Result<()> {
    const NODES: usize = 3;
    /// Twelve seconds for 48 MiB.
    const IMAGE_MIB: u32 = 48;
    const RATE: &str = "4m";
    report.part("Three nodes with a pod each share the VIP: the announcer's agent is killed, and the next one stopped");
    let laboratory = Laboratory::builder()
        .nodes_with_pods(NODES, 1)
        .image_mib(IMAGE_MIB)
        .build()?;
    let config = laboratory.config_elected("tc")?;
    let mut fleet = Fleet::start(laboratory, &config)?;
    let first = fleet.wait_for_holder(Duration::from_secs(10))?;
    println!("          node{first} announces {VIP}; a download begins from the pod of each node");
    let sha256 = fleet.lab.image.sha256.clone();
    let host = fleet.lab.hosts[0].namespace.clone();
    let pods = fleet.lab.nodes.iter().flat_map(|node| &node.pods);
    let downloads = pods.map(|pod| {
        let url = format!(
            "http://{VIP}:{}{}?rate={RATE}",
            pod.instance_port(),
            Image::URL_PATH
        );
        Download::start(&host, &url, &[], Duration::from_secs(60))
    });
    let mut downloads = downloads.collect::<Result<Vec<_>>>()?;
    let prober = Prober::start(
        &fleet.lab.hosts[1].namespace,
        (VIP, API_PORT),
        "/",
        Neighbour::Cold,
    );
    std::thread::sleep(Duration::from_secs(1));
    let killed = Instant::now();
    fleet.kill(first)?;
    let second = fleet.wait_for_successor(first, Duration::from_secs(5))?;
    report.check(
        second != first,
        &format!(
            "node{first}'s agent killed (SIGKILL): node{second} answers for {VIP} {:.1?} later",
            killed.elapsed()
        ),
    );
    fleet.launch(first)?;
    std::thread::sleep(Duration::from_secs(1));
    let stopped = Instant::now();
    fleet.stop(second)?;
    let third = fleet.wait_for_successor(second, Duration::from_secs(5))?;
    report.check(
        third != second,
        &format!(
            "node{second}'s agent stopped (SIGTERM): node{third} has taken {VIP} within {:.1?}",
            stopped.elapsed()
        ),
    );
    std::thread::sleep(Duration::from_secs(1));
    let attempts = prober.finish()?;
    let dark = attempts
        .iter()
        .filter(|attempt| attempt.failure.is_some() && attempt.at < stopped)
        .map(|attempt| attempt.at.saturating_duration_since(killed))
        .max()
        .unwrap_or_default();
    report.check(
        dark < Duration::from_millis(1500),
        &format!("after the kill new connections failed for {dark:.1?} at most, the hosts asking anew each time"),
    );
    let lost = attempts.iter();
    let lost = lost.filter(|attempt| attempt.at >= stopped && attempt.failure.is_some());
    let lost = lost.count();
    report.check(
        lost == 0,
        &format!("of the connections tried every 50 ms around the stop {lost} failed"),
    );
    for download in &mut downloads {
        let end = download.end(&sha256)?;
        report.check(
            end.outcome == Outcome::Whole,
            &format!(
                "the download from {} is whole, its checksum right: {:?}",
                end.instance, end.outcome
            ),
        );
    }
    Ok(())
}

/// Whether the node's uplink has an XDP program in its driver.
fn attached_natively(node: &Node) -> Result<bool> {
    /// `XDP_ATTACHED_DRV` of linux/if_link.h.
    const DRIVER: u64 = 1;
    let shown = node
        .namespace
        .exec(["ip", "-j", "link", "show", "dev", node.uplink])?;
    let shown: Value = serde_json::from_str(&shown).context("read the JSON of `ip link`")?;
    Ok(shown[0]["xdp"]["mode"].as_u64() == Some(DRIVER))
}

/// Runs curl on a host and returns what it printed; the answers themselves go where `arguments` say.
fn curl(host: &Host, arguments: &[&str]) -> Result<String> {
    let mut words = vec!["curl", "--silent", "--show-error", "--max-time", "60"];
    words.extend(arguments);
    host.namespace.exec(words)
}

/// Which pod answers which of 60 connections to the shared API port.
fn spread(report: &mut Report, host: &Host, node: &Node) -> Result<()> {
    const CONNECTIONS: usize = 60;
    report.part(&format!(
        "{CONNECTIONS} connections to {VIP}:{API_PORT}, the port of all instances"
    ));
    let url = format!("http://{VIP}:{API_PORT}/v1");
    let mut answered = Vec::new();
    for _ in 0..CONNECTIONS {
        let answer: Value = serde_json::from_str(&curl(host, &[&url])?)
            .with_context(|| format!("the answer of {url} is not the API's JSON"))?;
        let instance = answer["instance"]
            .as_str()
            .context("no instance in the answer")?;
        ensure!(
            answer["client"] == host.address.to_string(),
            "{instance} saw the client as {}, not as {}",
            answer["client"],
            host.address
        );
        answered.push(instance.to_owned());
    }
    let mut counts: BTreeMap<&str, u32> = node
        .pods
        .iter()
        .map(|pod| (pod.instance.as_str(), 0))
        .collect();
    for instance in &answered {
        *counts.entry(instance).or_default() += 1;
    }
    for (line, instances) in answered.chunks(20).enumerate() {
        let numbers: Vec<&str> = instances
            .iter()
            .map(|instance| instance.trim_start_matches("ironic-"))
            .collect();
        println!(
            "          {:2}–{:2}: ironic- {}",
            line * 20 + 1,
            line * 20 + instances.len(),
            numbers.join(" ")
        );
    }
    let shares: Vec<String> = counts
        .iter()
        .map(|(name, count)| format!("{name}: {count}"))
        .collect();
    report.check(
        counts.len() == node.pods.len() && counts.values().all(|count| *count > 0),
        &format!("every instance answered some ({})", shares.join(", ")),
    );
    report.check(
        true,
        &format!("the pods see the client's own address, {}", host.address),
    );
    Ok(())
}

/// The port of each instance leads to it and never to another.
fn instances(report: &mut Report, host: &Host, node: &Node) -> Result<()> {
    const HEADS: usize = 100;
    report.part("A port for each instance: a file that only this instance has, 100 HEADs each");
    for pod in &node.pods {
        let url = format!("http://{VIP}:{}{}", pod.instance_port(), pod.own_path());
        let codes = heads(&host.namespace, &url, HEADS)?;
        let good = codes.iter().filter(|code| *code == "200").count();
        report.check(
            good == HEADS && codes.len() == HEADS,
            &format!(
                "{VIP}:{}{} → {good} of {HEADS} are 200",
                pod.instance_port(),
                pod.own_path()
            ),
        );
    }
    let (first, last) = (&node.pods[0], &node.pods[node.pods.len() - 1]);
    let url = format!("http://{VIP}:{}{}", last.instance_port(), first.own_path());
    let codes = heads(&host.namespace, &url, 1)?;
    report.check(
        codes == ["404"],
        &format!(
            "{}'s file on {}'s port → {}",
            first.instance,
            last.instance,
            codes.join(" ")
        ),
    );
    Ok(())
}

/// The same ports over IPv6.
fn over_ipv6(report: &mut Report, host: &Host, node: &Node) -> Result<()> {
    report.part(&format!("The same over IPv6, at [{VIP6}]"));
    let mut answered = BTreeSet::new();
    for _ in 0..30 {
        let answer = curl(host, &[&format!("http://[{VIP6}]:{API_PORT}/v1")])?;
        let answer: Value = serde_json::from_str(&answer).context("the API's JSON")?;
        let client = answer["client"].as_str().unwrap_or_default();
        ensure!(
            client == host.address6.to_string(),
            "a pod saw the client as {client}"
        );
        let instance = answer["instance"].as_str().unwrap_or_default();
        answered.insert(instance.to_owned());
    }
    report.check(
        answered.len() == node.pods.len(),
        &format!(
            "30 connections, {} instances answered and saw {}",
            answered.len(),
            host.address6
        ),
    );
    let pod = &node.pods[0];
    let url = format!("http://[{VIP6}]:{}{}", pod.instance_port(), pod.own_path());
    let codes = heads(&host.namespace, &url, 20)?;
    let good = codes.iter().filter(|code| *code == "200").count();
    report.check(
        good == 20,
        &format!("[{VIP6}]:{} → {good} of 20 are 200", pod.instance_port()),
    );
    let ping = ["ping", "-n", "-c", "1", "-w", "3", &VIP6.to_string()];
    report.check(host.namespace.exec(ping).is_ok(), "the VIP answers a ping");
    Ok(())
}

/// A port that is not configured is refused at once, and not reachable around the VIP either.
fn refusal(report: &mut Report, host: &Host, node: &Node) -> Result<()> {
    /// curl's exit code for a refused connection.
    const REFUSED: i32 = 7;
    /// curl's exit code for one that got no answer in time.
    const SILENCE: i32 = 28;
    report.part(&format!("JSON-RPC ({RPC_PORT}) stays unreachable"));
    let connect = |address: &str| {
        host.namespace.output([
            "curl",
            "--silent",
            "--connect-timeout",
            "1",
            "--output",
            "/dev/null",
            "--write-out",
            "%{time_total}",
            address,
        ])
    };
    let output = connect(&format!("http://{VIP}:{RPC_PORT}/"))?;
    let took: f64 = String::from_utf8_lossy(&output.stdout)
        .parse()
        .unwrap_or(f64::MAX);
    report.check(
        output.status.code() == Some(REFUSED) && took < 0.1,
        &format!("{VIP}:{RPC_PORT} is refused after {:.1} ms", took * 1e3),
    );
    let pod = &node.pods[0];
    let output = connect(&format!("http://{}:{RPC_PORT}/", pod.address))?;
    report.check(
        output.status.code() == Some(SILENCE),
        &format!(
            "{}:{RPC_PORT}, by a route around the VIP, is dropped (`bypass: drop`)",
            pod.address
        ),
    );
    Ok(())
}

/// A download that was measured.
struct Measured {
    mib_per_second: f64,
    sha256: String,
}

/// Downloads the common image: once to a file, for its sum, and a few times to nowhere, for the speed.
fn best_download(laboratory: &Laboratory, host: &Host, server: &str) -> Result<Measured> {
    let url = format!("http://{server}{}", Image::URL_PATH);
    let file = laboratory.directory().join("download.img");
    curl(host, &["--fail", "--output", path(&file)?, &url])?;
    let sha256 = sha256(&file)?;
    std::fs::remove_file(&file).with_context(|| format!("remove {}", file.display()))?;
    let mut best = 0.0_f64;
    for _ in 0..DOWNLOADS {
        let said = curl(
            host,
            &[
                "--fail",
                "--output",
                "/dev/null",
                "--write-out",
                "%{speed_download}",
                &url,
            ],
        )?;
        let speed: f64 = said
            .trim()
            .parse()
            .with_context(|| format!("curl's speed is {said}"))?;
        best = best.max(speed / f64::from(1 << 20));
    }
    Ok(Measured {
        mib_per_second: best,
        sha256,
    })
}

fn path(path: &Path) -> Result<&str> {
    path.to_str()
        .with_context(|| format!("{} is not UTF-8", path.display()))
}

fn sha256(file: &Path) -> Result<String> {
    let sum = run(Command::new("sha256sum").arg(file))?;
    Ok(sum.split_whitespace().next().unwrap_or_default().to_owned())
}

/// A big download through the VIP, next to the same from a pod directly.
fn download(
    report: &mut Report,
    laboratory: &Laboratory,
    host: &Host,
    direct: &Measured,
) -> Result<()> {
    report.part(&format!("A download of {IMAGE_MIB} MiB"));
    let through = best_download(laboratory, host, &format!("{VIP}:{IMAGE_PORT}"))?;
    report.check(
        through.sha256 == laboratory.image.sha256,
        &format!(
            "its SHA-256 is the image's, {}…",
            &laboratory.image.sha256[..16]
        ),
    );
    report.check(
        direct.sha256 == laboratory.image.sha256,
        "and so is that of the one from a pod directly, before ironlb was loaded",
    );
    println!(
        "          through the VIP {:.0} MiB/s, from the pod directly {:.0} MiB/s (ratio {:.2}; best of {DOWNLOADS} each)",
        through.mib_per_second,
        direct.mib_per_second,
        through.mib_per_second / direct.mib_per_second
    );
    Ok(())
}

/// The agent is killed while a download runs; another takes over.
fn kill_agent(
    report: &mut Report,
    laboratory: &Laboratory,
    host: &Host,
    node: &Node,
    mut agent: Agent,
) -> Result<Agent> {
    report.part("The agent is killed (SIGKILL) in mid-download");
    let file = laboratory.directory().join("interrupted.img");
    // Paced at the server to four seconds.
    let url = format!(
        "http://{VIP}:{IMAGE_PORT}{}?rate={}m",
        Image::URL_PATH,
        IMAGE_MIB / 4
    );
    let mut curl = host.namespace.spawn(
        "curl",
        [
            "curl",
            "--silent",
            "--show-error",
            "--fail",
            "--max-time",
            "60",
            "--output",
            path(&file)?,
            &url,
        ],
    )?;
    let size = || std::fs::metadata(&file).map_or(0, |metadata| metadata.len());
    wait_until("a quarter has arrived", Duration::from_secs(20), || {
        ensure!(curl.running()?, "curl ended: {}", curl.log()?);
        Ok(size() > laboratory.image.bytes / 4)
    })?;
    let pid = agent.process.pid();
    agent.process.kill()?;
    let at_kill = size();
    report.check(
        at_kill < laboratory.image.bytes,
        &format!(
            "agent {pid} killed when {} of {IMAGE_MIB} MiB had arrived",
            at_kill >> 20
        ),
    );
    let status = curl.wait()?;
    report.check(
        status.success() && sha256(&file)? == laboratory.image.sha256,
        &match curl.log()?.trim() {
            "" => "the download did not notice: it is whole, its SHA-256 is the image's".to_owned(),
            complaint => format!("the download: {complaint}"),
        },
    );
    let answer = self::curl(host, &[&format!("http://{VIP}:{API_PORT}/v1")])?;
    report.check(
        answer.contains("instance"),
        "new connections are served without an agent, too",
    );
    let agent = Agent::launch(node)?;
    report.check(
        attached_natively(node)?,
        &format!(
            "a new agent, {}, has adopted what is loaded",
            agent.process.pid()
        ),
    );
    Ok(agent)
}

/// What bpftool shows of the map of services.
fn inside(report: &mut Report, node: &Node) -> Result<()> {
    let services = node.maps().path("services");
    report.part(&format!(
        "Look inside with standard tools: bpftool map dump pinned {}",
        services.display()
    ));
    let dump = run(Command::new("bpftool")
        .args(["--pretty", "map", "dump", "pinned"])
        .arg(&services))?;
    let dump: Value = serde_json::from_str(&dump).context("read bpftool's JSON")?;
    let entries = dump.as_array().context("bpftool's JSON is no list")?;
    // With BTF, bpftool adds what it makes of the bytes.
    let mut entry = entries
        .iter()
        .map(|entry| &entry["formatted"])
        .find(|entry| entry["key"]["port"] == API_PORT)
        .cloned()
        .with_context(|| format!("no entry for port {API_PORT} with field names in {dump}"))?;
    if let Some(candidates) = entry["value"]["candidates"].as_array_mut() {
        candidates.truncate(node.pods.len());
    }
    report.check(
        entry["value"]["count"] == node.pods.len(),
        &format!(
            "{} VIP ports; port {API_PORT} has {} backends:",
            entries.len(),
            entry["value"]["count"]
        ),
    );
    report.show(&compact(&entry));
    Ok(())
}

/// JSON with a line for each field, and lists of numbers on one line.
fn compact(entry: &Value) -> String {
    let mut lines = Vec::new();
    for side in ["key", "value"] {
        let Some(fields) = entry[side].as_object() else {
            continue;
        };
        lines.push(format!("{side}:"));
        lines.extend(
            fields
                .iter()
                .map(|(name, value)| format!("    {name}: {value}")),
        );
    }
    lines.join("\n")
}

/// How to play with a laboratory that stays.
fn play(laboratory: &Laboratory, host: &Host, node: &Node) -> Result<()> {
    let ironlb = format!(
        "nsenter --net={} {}",
        node.namespace.path().display(),
        ironlb()?.display()
    );
    let bpffs = node.bpffs.display();
    println!(
        "\nThe laboratory {} stays up. Play with it:
    on host0      nsenter --net={} curl http://{VIP}:{API_PORT}/v1
    the node      {ironlb} status --bpffs {bpffs}
                  {ironlb} services --bpffs {bpffs}
                  {ironlb} flows --bpffs {bpffs}
    the wire      nsenter --net={} tcpdump -ni any tcp
    the maps      bpftool map dump pinned {}
    its config    {} (re-read on change)
    its logs      {}
To end it: cargo xtask demo --down",
        laboratory.tag(),
        host.namespace.path().display(),
        laboratory.switch.path().display(),
        node.maps().path("verdicts").display(),
        node.config.display(),
        laboratory.directory().display(),
    );
    Ok(())
}
