//! ironlb at work in Kubernetes, in front of three real Ironics, as a report to read.
//!
//! Every line that begins with `ok` has been checked; one that begins with `FAILED` makes the exit code 1.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ironlb_tests::cluster::{Cluster, ClusterNode, ContainerImage, overlay};
use ironlb_tests::{
    API_PORT, Download, IMAGE_PORT, Neighbour, Prober, RPC_PORT, Report, VIP, VIP6, heads,
    wait_until,
};
use serde_json::{Value, json};

const IN: [&str; 2] = ["--namespace", "metal3"];
const INSTANCES: u16 = 3;
/// First of the instances' ports, as deploy/examples/ironic has them.
const FIRST: u16 = 6200;
/// Bare-metal machines that are enrolled at least, and at most until every conductor has some.
const MACHINES: std::ops::Range<usize> = 12..60;
/// Size of the image that the agents' restart meets.
const IMAGE_MIB: u32 = 64;
/// What machines boot, on every instance: only the URL matters.
const KERNEL: &str = "/var/lib/ironic/ipa.kernel";
/// How long anything of Kubernetes or Ironic may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);
/// How soon after a node's death new connections succeed again.
const RECOVERY: Duration = Duration::from_secs(2);

/// Shows it on a new cluster; the number of failed checks.
pub fn show(image: PathBuf) -> Result<u32> {
    println!(
        "ironlb demo in Kubernetes, on Linux {}\n\n\
         starting two real nodes (kubelet, containerd, kube-proxy) on a provisioning bridge with two bare-metal \n\
         hosts and a BMC; the first time, everything is built from source …",
        rustix::system::uname().release().to_string_lossy()
    );
    let cluster = Cluster::builder()
        .image(ContainerImage::Ironic)
        .image(ContainerImage::Archive(image.clone()))
        .build()?;
    let demo = Demo {
        host: &cluster.hosts[0].namespace,
        node: &cluster.nodes[0],
        cluster: &cluster,
    };
    let mut report = Report::default();
    demo.install(&mut report, &image)?;
    demo.spread(&mut report)?;
    demo.instances(&mut report)?;
    demo.rpc(&mut report)?;
    demo.restart(&mut report)?;
    demo.failover(&mut report)?;
    drop(cluster);
    println!(
        "\nThe cluster is removed. To keep one and play with it: cargo xtask cluster up --ironic"
    );
    Ok(report.failed)
}

struct Demo<'a> {
    cluster: &'a Cluster,
    /// One of them.
    node: &'a ClusterNode,
    /// A bare-metal host.
    host: &'a ironlb_tests::Namespace,
}

impl Demo<'_> {
    fn install(&self, report: &mut Report, image: &std::path::Path) -> Result<()> {
        let Self { cluster, .. } = self;
        report.part("kubectl apply -k deploy/ with this cluster's VIP, then three Ironics");
        let started = Instant::now();
        cluster.deploy_ironlb(image)?;
        report.check(
            true,
            &format!(
                "the agents are ready after {:.1} s: programs attached, maps in step with the API",
                started.elapsed().as_secs_f64()
            ),
        );
        let started = Instant::now();
        cluster.apply_kustomization(&overlay("ironic"))?;
        cluster.wait_ready("statefulset/ironic", &IN, PATIENCE)?;
        report.check(
            true,
            &format!(
                "three Ironics with JSON-RPC and a MariaDB, no host networking, are ready after {:.1} s",
                started.elapsed().as_secs_f64()
            ),
        );
        let pods = [
            "get",
            "pods",
            "--output",
            "wide",
            "--no-headers",
            IN[0],
            IN[1],
        ];
        report.show(&cluster.kubectl(&pods)?);
        let vip = VIP.to_string();
        let mut shown = String::new();
        let shows = wait_until("the Service shows its VIP", PATIENCE, || {
            shown = cluster.kubectl(&["get", "service", "ironic", IN[0], IN[1]])?;
            Ok(shown.contains(&vip))
        });
        report.check(
            shows.is_ok(),
            &format!("`kubectl get service` shows {vip}:"),
        );
        report.show(&shown);
        Ok(())
    }

    /// curl on the bare-metal host, asking Ironic's API: what it answered.
    fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let url = format!("http://{VIP}:{API_PORT}{path}");
        let body = body.map(Value::to_string).unwrap_or_default();
        let mut words = vec!["curl", "-sS", "--fail-with-body", "--max-time", "60"];
        words.extend(["--request", method, &url]);
        words.extend(["--header", "X-OpenStack-Ironic-API-Version: latest"]);
        words.extend(["--header", "Content-Type: application/json"]);
        if !body.is_empty() {
            words.extend(["--data", &body]);
        }
        let output = self.host.output(words)?;
        let answer = String::from_utf8_lossy(&output.stdout);
        ensure!(
            output.status.success(),
            "{method} {url}: {answer}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        if answer.trim().is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_str(&answer).with_context(|| format!("{url} answers {answer}"))
    }

    /// New flows that each instance has had at the shared port of the API.
    fn flows(&self) -> Result<BTreeMap<String, u64>> {
        let mut flows = BTreeMap::new();
        // Whichever node announces the VIP, and whichever the instance is on.
        for node in &self.cluster.nodes {
            let backends = node.reader()?.backends()?.into_iter();
            for backend in backends.filter(|backend| backend.vip_port == Some(API_PORT)) {
                *flows.entry(backend.instance).or_default() += backend.traffic.flows;
            }
        }
        Ok(flows)
    }

    /// Machines are enrolled and acted upon through whichever instance.
    fn spread(&self, report: &mut Report) -> Result<()> {
        report.part(&format!(
            "The API at {VIP}:{API_PORT}, the port of all instances, from host {}",
            self.cluster.hosts[0].address
        ));
        let before = self.flows()?;
        let mut conductors: BTreeMap<String, usize> = BTreeMap::new();
        let mut count = 0;
        while count < MACHINES.start
            || (conductors.len() < usize::from(INSTANCES) && count < MACHINES.end)
        {
            let machine = self.enroll(count)?;
            let conductor = machine["conductor"].as_str().context("no conductor")?;
            *conductors.entry(conductor.to_owned()).or_default() += 1;
            count += 1;
        }
        let all_are = |what: &str, wanted: &str| {
            wait_until(&format!("all machines are {wanted}"), PATIENCE, || {
                let nodes = self.ask("GET", &format!("/v1/nodes?fields={what}&limit=100"), None)?;
                let nodes = nodes["nodes"].as_array().context("no nodes")?;
                Ok(nodes.iter().filter(|node| node[what] == wanted).count() == count)
            })
        };
        for number in 0..count {
            self.put(number, "provision", "manage")?;
        }
        all_are("provision_state", "manageable")?;
        for number in 0..count {
            self.put(number, "power", "power on")?;
        }
        all_are("power_state", "power on")?;
        let told: Vec<_> = conductors
            .iter()
            .map(|(name, count)| format!("{name}: {count}"))
            .collect();
        report.check(
            conductors.len() == usize::from(INSTANCES),
            &format!(
                "{count} machines enrolled, managed and powered on, each by its conductor, whoever was asked ({})",
                told.join(", ")
            ),
        );
        let share: Vec<_> = self
            .flows()?
            .into_iter()
            .map(|(name, flows)| {
                let had = before.get(&name).copied().unwrap_or_default();
                (name, flows - had)
            })
            .collect();
        let told: Vec<_> = share
            .iter()
            .map(|(name, flows)| format!("{name}: {flows}"))
            .collect();
        report.check(
            share.len() == usize::from(INSTANCES) && share.iter().all(|(_, flows)| *flows > 0),
            &format!(
                "every instance had some of the connections ({})",
                told.join(", ")
            ),
        );
        let url = format!("http://[{VIP6}]:{API_PORT}/v1");
        let good = (0..20).filter(|_| self.fetch(&url).is_ok()).count();
        report.check(
            good == 20,
            &format!("over IPv6 it answers, too: {url}, {good} of 20"),
        );
        Ok(())
    }

    /// Enrolls a machine that is to be booted by iPXE; the node as Ironic then has it.
    fn enroll(&self, number: usize) -> Result<Value> {
        let mut node = json!({
            "driver": "fake-hardware", "name": format!("machine-{number}"),
            "boot_interface": "ipxe", "inspect_interface": "agent",
            "driver_info": {"deploy_kernel": format!("file://{KERNEL}"), "deploy_ramdisk": format!("file://{KERNEL}")},
        });
        for interface in ["deploy", "power", "management", "raid", "vendor"] {
            node[format!("{interface}_interface")] = json!("fake");
        }
        let node = self.ask("POST", "/v1/nodes", Some(&node))?;
        let port = json!({
            "node_uuid": node["uuid"],
            "address": format!("52:54:00:00:00:{number:02x}"),
        });
        self.ask("POST", "/v1/ports", Some(&port))?;
        self.machine(number)
    }

    fn machine(&self, number: usize) -> Result<Value> {
        self.ask("GET", &format!("/v1/nodes/machine-{number}"), None)
    }

    /// Asks for another state of a machine.
    fn put(&self, number: usize, what: &str, target: &str) -> Result<()> {
        let path = format!("/v1/nodes/machine-{number}/states/{what}");
        let wanted = json!({"target": target});
        self.ask("PUT", &path, Some(&wanted)).map(drop)
    }

    fn exec(&self, pod: &str, container: &str, script: &str) -> Result<String> {
        let words = ["exec", pod, IN[0], IN[1], "--container", container, "--"];
        self.cluster
            .kubectl(&[&words[..], &["bash", "-c", script]].concat())
    }

    /// An instance's port leads to it, never to another, and the instance knows it.
    fn instances(&self, report: &mut Report) -> Result<()> {
        const HEADS: usize = 50;
        report.part("A port for each instance, and every Ironic knows its own");
        let pod = |number| format!("ironic-{number}");
        for number in 0..INSTANCES {
            let script = format!(
                "echo {0} >/shared/html/{0}.txt; head -c 1M /dev/urandom >{KERNEL}",
                pod(number)
            );
            self.exec(&pod(number), "ironic", &script)?;
        }
        for number in 0..INSTANCES {
            let (own, port) = (pod(number), FIRST + number);
            let url = format!("http://{VIP}:{port}/{own}.txt");
            let codes = heads(self.host, &url, HEADS)?;
            let good = codes.iter().filter(|code| *code == "200").count();
            let other = format!("http://{VIP}:{port}/{}.txt", pod((number + 1) % INSTANCES));
            let other = heads(self.host, &other, 1)?;
            report.check(
                good == HEADS && codes.len() == good && other == ["404"],
                &format!(
                    "{VIP}:{port} → {own}'s own file {good} of {HEADS} times, another's file {}",
                    other.join(" ")
                ),
            );
        }
        for number in 0..INSTANCES {
            self.boots_from(report, &pod(number), FIRST + number)?;
        }
        let root = self.ask("GET", "/v1", None)?;
        let link = root
            .pointer("/links/0/href")
            .and_then(Value::as_str)
            .unwrap_or_default();
        report.check(
            link.starts_with(&format!("http://{VIP}:{API_PORT}")),
            &format!("and so do links in the API's answers: {link}"),
        );
        Ok(())
    }

    /// What the conductor in a pod tells one of its machines to boot leads back to that pod.
    fn boots_from(&self, report: &mut Report, pod: &str, port: u16) -> Result<()> {
        let object = self.cluster.get(&["pod", pod, IN[0], IN[1]])?;
        let address = object["status"]["podIP"].as_str().context("no address")?;
        let mut own = None;
        for number in 0..MACHINES.end {
            let machine = self.machine(number)?;
            let conductor = machine["conductor"].as_str().unwrap_or_default();
            if conductor.split(':').next() == Some(address) {
                own = Some((number, machine));
                break;
            }
        }
        let (number, machine) = own.with_context(|| format!("{pod} has no machine"))?;
        let uuid = machine["uuid"].as_str().context("no UUID")?.to_owned();
        self.put(number, "provision", "inspect")?;
        wait_until(&format!("machine-{number} shall boot"), PATIENCE, || {
            let machine = self.machine(number)?;
            ensure!(
                machine["last_error"].is_null(),
                "Ironic says: {}",
                machine["last_error"]
            );
            Ok(machine["provision_state"] == "inspect wait")
        })?;
        // As the machine gets it: by its address, from the instance that boot.ipxe came from.
        let script = format!("http://{VIP}:{port}/pxelinux.cfg/52-54-00-00-00-{number:02x}");
        let script = self.fetch(&script)?;
        let line = script
            .lines()
            .find(|line| line.starts_with("kernel http"))
            .unwrap_or_default();
        let kernel = line.split_whitespace().nth(1).unwrap_or_default();
        let api = line
            .split_whitespace()
            .find_map(|word| word.strip_prefix("ipa-api-url="));
        let wanted = format!("http://{VIP}:{port}/{uuid}/deploy_kernel");
        let codes = heads(self.host, kernel, 20)?;
        report.check(
            kernel == wanted
                && api.is_some_and(|url| url == format!("http://{VIP}:{API_PORT}"))
                && codes.len() == 20
                && codes.iter().all(|code| code == "200"),
            &format!(
                "Ironic in {pod} tells machine-{number}: kernel http://{VIP}:{port}/…/deploy_kernel (200, 20 of \
                 20), ipa-api-url={}",
                api.unwrap_or("none")
            ),
        );
        Ok(())
    }

    /// What a URL answers the bare-metal host.
    fn fetch(&self, url: &str) -> Result<String> {
        self.host.exec(["curl", "-sSf", "--max-time", "60", url])
    }

    /// Conductors reach each other, and nobody on the provisioning network reaches them.
    fn rpc(&self, report: &mut Report) -> Result<()> {
        /// curl's exit codes for a refused connection, and for no answer in time.
        const REFUSED: i32 = 7;
        const SILENCE: i32 = 28;
        report.part(&format!("JSON-RPC ({RPC_PORT}) between the pods only"));
        let pod = self.cluster.get(&["pod", "ironic-1", IN[0], IN[1]])?;
        let address = pod["status"]["podIP"]
            .as_str()
            .context("no address")?
            .to_owned();
        let url = format!("http://{address}:{RPC_PORT}/");
        let script = format!(
            "curl -sS -o /dev/null -w '%{{http_code}}' --max-time 10 -X POST -d '{{}}' {url}"
        );
        let code = self.exec("ironic-0", "ironic", &script)?;
        report.check(
            code == "401",
            &format!(
                "ironic-0 reaches ironic-1 at {address}:{RPC_PORT}, which wants a password ({code})"
            ),
        );
        let connect = |url: &str| {
            let words = [
                "curl",
                "-sS",
                "--connect-timeout",
                "1",
                "-o",
                "/dev/null",
                url,
            ];
            self.host.output(words)
        };
        let begun = Instant::now();
        let code = connect(&format!("http://{VIP}:{RPC_PORT}/"))?.status.code();
        report.check(
            code == Some(REFUSED),
            &format!(
                "a bare-metal host is refused at {VIP}:{RPC_PORT} ({:.0} ms with curl's start)",
                begun.elapsed().as_secs_f64() * 1e3
            ),
        );
        let (node, route) = (self.node.provisioning, format!("{address}/32"));
        self.host.ip(&format!("route add {route} via {node}"))?;
        let code = connect(&url)?.status.code();
        self.host.ip(&format!("route del {route}"))?;
        report.check(
            code == Some(SILENCE),
            &format!("by a route around the VIP, {address}:{RPC_PORT} is silent (`bypass: drop`)"),
        );
        Ok(())
    }

    /// All agents are replaced while a host downloads an image.
    fn restart(&self, report: &mut Report) -> Result<()> {
        report.part("kubectl rollout restart daemonset/ironlb in mid-download");
        let (mut download, sum) = self.start_download(1)?;
        let (before, started) = (self.cluster.agent_on(self.node)?, Instant::now());
        self.cluster.restart_agents()?;
        let after = self.cluster.agent_on(self.node)?;
        report.check(
            before != after && download.running()?,
            &format!(
                "both agents were replaced in {:.1} s ({before} by {after}); the download runs on",
                started.elapsed().as_secs_f64()
            ),
        );
        // From the other host: the first one's ports may still be in use to the same pods by instance ports, and
        // then its SYNs are dropped for up to a minute (`dropped_collision`).
        let other = &self.cluster.hosts[1].namespace;
        let url = format!("http://{VIP}:{IMAGE_PORT}/boot.ipxe");
        let codes = heads(other, &url, 20)?;
        let good = codes.iter().filter(|code| *code == "200").count();
        report.check(
            good == 20 && codes.len() == good,
            &format!("new connections are served, {good} of 20"),
        );
        finish_download(report, download, &sum);
        Ok(())
    }

    /// Makes an image in a pod and lets the bare-metal host download it from there at 2 MB/s; its checksum.
    fn start_download(&self, instance: u16) -> Result<(Download, String)> {
        let make = format!(
            "head -c {IMAGE_MIB}M /dev/urandom >/shared/html/image.raw && sha256sum /shared/html/image.raw"
        );
        let sum = self.exec(&format!("ironic-{instance}"), "httpd", &make)?;
        let sum = sum.split_whitespace().next().context("no checksum")?;
        let url = format!("http://{VIP}:{}/image.raw?rate=2m", FIRST + instance);
        let download = Download::start(self.host, &url, &[], PATIENCE)?;
        Ok((download, sum.to_owned()))
    }

    /// The node that announces the VIP is cut off while a host downloads from the other node's pod.
    fn failover(&self, report: &mut Report) -> Result<()> {
        report.part("The node that announces the VIP loses its provisioning cable in mid-download");
        let first = self.cluster.announcing()?;
        let mut elsewhere = None;
        for number in 0..INSTANCES {
            let pod = self
                .cluster
                .get(&["pod", &format!("ironic-{number}"), IN[0], IN[1]])?;
            if pod["spec"]["nodeName"] != first.name.as_str() {
                elsewhere = Some(number);
            }
        }
        let instance = elsewhere.with_context(|| format!("all pods are on {}", first.name))?;
        println!(
            "          {} announces {VIP}; a download begins from ironic-{instance} on the other node",
            first.name
        );
        let (mut download, sum) = self.start_download(instance)?;
        let other = &self.cluster.hosts[1].namespace;
        let prober = Prober::start(other, (VIP, API_PORT), "/", Neighbour::Cold);
        std::thread::sleep(Duration::from_secs(2));
        let cut = Instant::now();
        self.cluster
            .switch
            .ip(&format!("link set {} down", first.name))?;
        std::thread::sleep(Duration::from_secs(6));
        let goes_on = download.running()?;
        let attempts = prober.finish();
        self.cluster
            .switch
            .ip(&format!("link set {} up", first.name))?;
        let attempts = attempts?;
        let failed = attempts.iter().filter(|attempt| attempt.failure.is_some());
        let failed: Vec<_> = failed.collect();
        let dark = failed
            .iter()
            .map(|attempt| attempt.at.saturating_duration_since(cut));
        let dark = dark.max().unwrap_or_default();
        report.check(
            dark < RECOVERY && failed.iter().all(|attempt| attempt.at >= cut),
            &format!(
                "of {} new connections, one every 50 ms, {} failed, the last {:.1} s after the cut",
                attempts.len(),
                failed.len(),
                dark.as_secs_f64()
            ),
        );
        report.check(goes_on, "the download went on meanwhile");
        let second = self.cluster.announcing()?;
        report.check(
            second.name != first.name,
            &format!("{} announces {VIP} now", second.name),
        );
        finish_download(report, download, &sum);
        Ok(())
    }
}

/// Waits for a download, which must have brought the whole image.
fn finish_download(report: &mut Report, download: Download, sum: &str) {
    let finished = download.finish(sum);
    report.check(
        finished.is_ok(),
        &match finished {
            Ok(()) => format!(
                "all {IMAGE_MIB} MiB arrived unharmed: SHA-256 {}…",
                &sum[..16]
            ),
            Err(error) => format!("{error:#}"),
        },
    );
}
