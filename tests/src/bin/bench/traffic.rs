//! Traffic in laboratories of one shape: plain routing, the same once more (control), ironlb in `native` and `tc`, and
//! nftables. All are up at the same time and are measured in turn, so that each ratio compares neighbours in time.
//! With [`Path::SecondNode`] the pods are on another node than the one that announces the VIP.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use comfy_table::Table;
use ironlb_tests::{
    API_PORT, Fleet, IMAGE_PORT, Image, Laboratory, Load, LoadReport, NodeOptions, Pod, VIP,
};
use serde_json::{Map, Value, json};

use crate::statistics::{Estimate, median};
use crate::{judge, nftables};

/// How long a download runs before it is measured: slow start, and the window's growth.
const RAMP: Duration = Duration::from_millis(200);
/// How long it is measured.
const DOWNLOAD: Duration = Duration::from_millis(1200);
/// How long agents need to tell each other what they have after one has begun.
const SETTLE: Duration = Duration::from_secs(4);
/// How long connections are made.
const CONNECTIONS: Duration = Duration::from_millis(1000);
/// How many clients make connections at a time.
const CLIENTS: u32 = 4;
/// Last octets of the addresses that they come from.
const SOURCES: std::ops::Range<u8> = 200..216;
/// Requests that a download sends ahead: more than it can receive in its time.
const REQUESTS: usize = 500;
/// Seconds a second of other work that still make a quiet machine.
const QUIET: f64 = 0.1;
/// Resolution of /proc/stat, spread over a download.
const TICK: f64 = 0.01;
/// Least ratio of downloads and connections to plain routing.
const GOAL: f64 = 0.97;
/// Greatest ratio of CPU per GiB.
const GOAL_CPU: f64 = 1.03;

/// Where the pods are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// On the only node.
    OneNode,
    /// All on a second node, while the first one announces the VIP and has none: what the clients send crosses both.
    SecondNode,
}

impl Path {
    fn variants(self) -> &'static [Variant] {
        match self {
            Self::OneNode => &Variant::ALL,
            // kube-proxy's way to another node costs the client's address: no like for like.
            Self::SecondNode => &[
                Variant::Routing,
                Variant::Control,
                Variant::TwoHops,
                Variant::Native,
                Variant::Tc,
            ],
        }
    }

    /// The nodes; the last one has the pods.
    fn nodes(self) -> Vec<NodeOptions> {
        let pods = NodeOptions::default();
        match self {
            Self::OneNode => vec![pods],
            Self::SecondNode => {
                let none = NodeOptions {
                    pods: 0,
                    ..NodeOptions::default()
                };
                vec![none, pods]
            }
        }
    }

    /// Whether there is a goal to reach. Of a machine that others keep busy too, the CPU time says nothing; and a
    /// second node's work is meant to be there.
    fn judges(self, metric: Metric, quiet: bool) -> bool {
        metric != Metric::CpuPerGib || (quiet && self == Self::OneNode)
    }
}

/// What is in the way of the traffic.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Variant {
    Routing,
    Control,
    /// Plain routing by way of the first node: the same way as ironlb's, on which the same processors do one hop more.
    TwoHops,
    Native,
    Tc,
    Nftables,
}

impl Variant {
    const ALL: [Self; 5] = [
        Self::Routing,
        Self::Control,
        Self::Native,
        Self::Tc,
        Self::Nftables,
    ];

    /// Name in the JSON.
    fn name(self) -> &'static str {
        match self {
            Self::Routing => "routing",
            Self::Control => "control",
            Self::TwoHops => "two_hops",
            Self::Native => "native",
            Self::Tc => "tc",
            Self::Nftables => "nftables",
        }
    }

    /// Whether the clients dial the VIP; else the pods.
    fn has_vip(self) -> bool {
        !matches!(self, Self::Routing | Self::Control | Self::TwoHops)
    }
}

/// A laboratory under measurement.
struct Bed {
    variant: Variant,
    /// Without agents where none is in the way.
    fleet: Fleet,
}

impl Bed {
    fn build(variant: Variant, path: Path) -> Result<Self> {
        let laboratory = Laboratory::builder()
            .complete_checksums(true)
            .image_mib(64)
            .nodes(path.nodes())
            .build()?;
        for node in &laboratory.nodes {
            // Real NICs segment in hardware; the frames that the programs see on their way in stay complete.
            node.namespace
                .exec(["ethtool", "-K", node.uplink, "tx", "on"])?;
        }
        let host = &laboratory.hosts[0];
        for last in SOURCES {
            let address = format!("addr add 172.22.0.{last}/24 dev eth0");
            host.namespace.ip(&address)?;
        }
        match variant {
            Variant::Routing | Variant::Control => laboratory.route_to_pods(host)?,
            Variant::TwoHops => route_by_first_node(&laboratory)?,
            _ => {}
        }
        if variant == Variant::Nftables {
            laboratory.nodes.iter().try_for_each(nftables::program)?;
        }
        let mode = variant.name();
        let config = match path {
            Path::OneNode => laboratory.config(mode),
            Path::SecondNode => laboratory.config_elected(mode)?,
        };
        let fleet = match variant {
            Variant::Native | Variant::Tc => Fleet::start(laboratory, &config)?,
            _ => Fleet::prepare(laboratory, &config)?,
        };
        let mut bed = Self { variant, fleet };
        if matches!(variant, Variant::Native | Variant::Tc) {
            bed.let_first_announce()?;
        }
        Ok(bed)
    }

    /// Lets the first node announce the VIP: it stays where it is, so the others step back once.
    fn let_first_announce(&mut self) -> Result<()> {
        let holder = self.fleet.wait_for_holder(Fleet::PATIENCE)?;
        if holder != 0 {
            self.fleet.stop(holder)?;
            let next = self.fleet.wait_for_successor(holder, Fleet::PATIENCE)?;
            ensure!(next == 0, "node{next} announces the VIP, node0 was to");
            self.fleet.launch(holder)?;
            std::thread::sleep(SETTLE);
        }
        Ok(())
    }

    fn pods(&self) -> &[Pod] {
        self.fleet.lab.nodes.last().map_or(&[], |node| &node.pods)
    }

    /// Where the image comes from for the client of that number: the pods in turn, by their own ports on the VIP.
    fn image(&self, number: usize) -> SocketAddrV4 {
        let pod = &self.pods()[number % self.pods().len()];
        if self.variant.has_vip() {
            SocketAddrV4::new(VIP, pod.instance_port())
        } else {
            SocketAddrV4::new(pod.address, IMAGE_PORT)
        }
    }

    fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.fleet.lab.hosts[0].namespace.enter(work)
    }
}

/// Routes the pods of the last node by way of the first one, whose kernel forwards as ironlb would hand on.
fn route_by_first_node(laboratory: &Laboratory) -> Result<()> {
    let (Some(first), Some(last)) = (laboratory.nodes.first(), laboratory.nodes.last()) else {
        return Ok(());
    };
    let pods = laboratory.nodes.len() - 1;
    for (namespace, interface, gateway) in [
        (&laboratory.hosts[0].namespace, "eth0", first.address),
        (&first.namespace, first.uplink, last.address),
    ] {
        // A shorter way must not be told.
        for name in ["accept_redirects", "send_redirects"] {
            for scope in ["all", interface] {
                namespace.sysctl(&format!("net.ipv4.conf.{scope}.{name}"), "0")?;
            }
        }
        namespace.ip(&format!("route replace 10.244.{pods}.0/24 via {gateway}"))?;
    }
    Ok(())
}

/// A figure that is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Metric {
    Download1,
    Download8,
    Connections,
    CpuPerGib,
}

impl Metric {
    const ALL: [Self; 4] = [
        Self::Download1,
        Self::Download8,
        Self::Connections,
        Self::CpuPerGib,
    ];

    /// Name in the JSON.
    fn name(self) -> &'static str {
        match self {
            Self::Download1 => "download_1",
            Self::Download8 => "download_8",
            Self::Connections => "connections",
            Self::CpuPerGib => "cpu_per_gib",
        }
    }

    fn heading(self) -> &'static str {
        match self {
            Self::Download1 => "download, 1 flow",
            Self::Download8 => "download, 8 flows",
            Self::Connections => "new connections/s",
            Self::CpuPerGib => "CPU per GiB",
        }
    }

    fn unit(self, value: f64) -> String {
        match self {
            Self::Download1 | Self::Download8 => format!("{:.2} GiB/s", value),
            Self::Connections => format!("{value:.0} /s"),
            Self::CpuPerGib => format!("{value:.3} s"),
        }
    }

    /// Whether an estimate of the ratio reaches the goal, or may.
    fn met(self, ratio: Estimate) -> bool {
        match self {
            Self::CpuPerGib => ratio.lo <= GOAL_CPU,
            _ => ratio.hi >= GOAL,
        }
    }
}

/// Samples by round of one laboratory.
#[derive(Default)]
struct Samples {
    of: [Vec<f64>; Metric::ALL.len()],
    connections: LoadReport,
}

/// Measures all laboratories in `rounds` rounds; the JSON of the ratios to plain routing.
pub fn measure(path: Path, rounds: usize) -> Result<Value> {
    println!(
        "laying out {} laboratories of the same shape …",
        path.variants().len()
    );
    let beds = path
        .variants()
        .iter()
        .map(|&variant| {
            Bed::build(variant, path)
                .with_context(|| format!("lay out the laboratory for {}", variant.name()))
        })
        .collect::<Result<Vec<_>>>()?;
    let idle = idle()?;
    let quiet = tell_idle(idle);
    println!("{rounds} rounds begin …");

    // Not measured: neighbours, page cache, nginx's first steps.
    for bed in &beds {
        download(bed, 1)?;
    }
    let begin = Instant::now();
    let mut samples: Vec<Samples> = beds.iter().map(|_| Samples::default()).collect();
    for round in 0..rounds {
        // Another first one in each round: what precedes a sample must not always be the same.
        let order = || (0..beds.len()).map(|at| (at + round) % beds.len());
        for at in order() {
            let Sample { rate, busy } = download(&beds[at], 1)?;
            push(&mut samples[at], Metric::Download1, rate);
            push(
                &mut samples[at],
                Metric::CpuPerGib,
                (busy - idle).max(TICK) / rate,
            );
        }
        for at in order() {
            push(
                &mut samples[at],
                Metric::Download8,
                download(&beds[at], 8)?.rate,
            );
        }
        for at in order() {
            let before = &samples[at].connections;
            let report = connections(&beds[at], before.served + before.failed)?;
            push(
                &mut samples[at],
                Metric::Connections,
                f64::from(report.served) / report.elapsed.as_secs_f64(),
            );
            samples[at].connections.add(report);
        }
        println!(
            "    round {} of {rounds}, {} s",
            round + 1,
            begin.elapsed().as_secs()
        );
    }
    Ok(report(path, &beds, &samples, quiet))
}

fn push(samples: &mut Samples, metric: Metric, value: f64) {
    samples.of[metric as usize].push(value);
}

fn report(path: Path, beds: &[Bed], samples: &[Samples], quiet: bool) -> Value {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    let mut header = vec!["ratio to plain routing: median [90 % interval]".to_owned()];
    header.extend(Metric::ALL.map(|metric| metric.heading().to_owned()));
    table.set_header(header);
    let routing = &samples[0];
    let mut row = vec!["plain routing itself".to_owned()];
    row.extend(Metric::ALL.map(|metric| metric.unit(median(routing.of[metric as usize].clone()))));
    table.add_row(row);
    let mut json = Map::new();
    for (bed, own) in beds.iter().zip(samples).skip(1) {
        let is_ironlb = matches!(bed.variant, Variant::Native | Variant::Tc);
        let title = match bed.variant {
            Variant::Control => "control: plain routing once more".to_owned(),
            Variant::TwoHops => "plain routing by way of the first node".to_owned(),
            Variant::Native | Variant::Tc => format!("ironlb, {}", bed.variant.name()),
            variant => variant.name().to_owned(),
        };
        let judged = |metric| is_ironlb && path.judges(metric, quiet);
        let (row, mut ratios) = ratios(&title, own, routing, |metric, ratio| {
            if judged(metric) {
                judge(metric.met(ratio))
            } else {
                ""
            }
        });
        table.add_row(row);
        let two_hops = beds.iter().position(|bed| bed.variant == Variant::TwoHops);
        if let (true, Some(at)) = (is_ironlb, two_hops) {
            let (row, others) = self::ratios(
                &format!("{title}, to that way"),
                own,
                &samples[at],
                |_, _| "",
            );
            table.add_row(row);
            ratios.insert("to_two_hops".to_owned(), Value::Object(others));
        }
        json.insert(bed.variant.name().to_owned(), Value::Object(ratios));
    }
    println!(
        "\n{table}\ngoals: downloads and connections ≥ {GOAL}{}; \
         missed only when the whole interval is on the wrong side",
        match path {
            Path::OneNode => format!(", CPU per GiB ≤ {GOAL_CPU}"),
            Path::SecondNode => String::new(),
        }
    );
    for (bed, samples) in beds.iter().zip(samples) {
        let LoadReport {
            served,
            failed,
            first_failure,
            ..
        } = &samples.connections;
        if let Some(failure) = first_failure {
            println!(
                "{failed} of {} connections failed with {}, the first: {failure}",
                served + failed,
                bed.variant.name()
            );
        }
    }
    json!(json)
}

/// A row of ratios between neighbours in time, and the same for the JSON.
fn ratios(
    title: &str,
    own: &Samples,
    reference: &Samples,
    verdict: impl Fn(Metric, Estimate) -> &'static str,
) -> (Vec<String>, Map<String, Value>) {
    let mut row = vec![title.to_owned()];
    let mut json = Map::new();
    for metric in Metric::ALL {
        let pairs: Vec<f64> = own.of[metric as usize]
            .iter()
            .zip(&reference.of[metric as usize])
            .map(|(own, reference)| own / reference)
            .collect();
        let ratio = Estimate::of(&pairs);
        json.insert(metric.name().to_owned(), ratio.json());
        row.push(format!(
            "{:.2} [{:.2}–{:.2}] {}",
            ratio.median,
            ratio.lo,
            ratio.hi,
            verdict(metric, ratio)
        ));
    }
    (row, json)
}

/// What a download showed.
struct Sample {
    /// GiB a second.
    rate: f64,
    /// Seconds a second that the machine's processors were busy.
    busy: f64,
}

/// Downloads with some flows at a time.
fn download(bed: &Bed, flows: usize) -> Result<Sample> {
    let streams = bed.enter(|| {
        (0..flows)
            .map(|number| request(bed.image(number)))
            .collect::<Result<Vec<_>>>()
    })??;
    let received = AtomicU64::new(0);
    let stopping = AtomicBool::new(false);
    let sample = std::thread::scope(|scope| {
        let readers: Vec<_> = streams
            .iter()
            .map(|stream| scope.spawn(|| receive(stream, &received, &stopping)))
            .collect();
        std::thread::sleep(RAMP);
        let measured = measure_busy(DOWNLOAD, || received.load(Ordering::Relaxed));
        stopping.store(true, Ordering::Relaxed);
        for stream in &streams {
            // The other end may have closed first, which its reader tells.
            let _ = stream.shutdown(Shutdown::Both);
        }
        for reader in readers {
            match reader.join() {
                Ok(read) => read?,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        measured
    })?;
    let Busy {
        progress,
        busy,
        seconds,
    } = sample;
    ensure!(
        progress > 0,
        "{}: a download with {flows} flows stands still",
        bed.variant.name()
    );
    Ok(Sample {
        rate: progress as f64 / f64::from(1 << 30) / seconds,
        busy: busy / seconds,
    })
}

/// Connects, and asks for the image many times over.
fn request(server: SocketAddrV4) -> Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&server.into(), Duration::from_secs(5))
        .with_context(|| format!("connect to {server}"))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let get = format!(
        "GET {} HTTP/1.1\r\nHost: {}\r\n\r\n",
        Image::URL_PATH,
        server.ip()
    );
    stream
        .write_all(get.repeat(REQUESTS).as_bytes())
        .with_context(|| format!("send requests to {server}"))?;
    Ok(stream)
}

/// Reads until told to stop.
fn receive(mut stream: &TcpStream, received: &AtomicU64, stopping: &AtomicBool) -> Result<()> {
    let mut buffer = vec![0; 256 * 1024];
    let mut head = true;
    loop {
        match stream.read(&mut buffer) {
            Ok(length) if length > 0 => {
                if std::mem::take(&mut head) {
                    let answer = String::from_utf8_lossy(&buffer[..length.min(16)]).into_owned();
                    ensure!(
                        answer.starts_with("HTTP/1.1 200"),
                        "the answer is {answer:?}"
                    );
                }
                received.fetch_add(length as u64, Ordering::Relaxed);
            }
            _ if stopping.load(Ordering::Relaxed) => return Ok(()),
            Ok(_) => anyhow::bail!("the server closed in mid-download"),
            Err(error) => return Err(error).context("a download broke"),
        }
    }
}

/// Makes connections, each with a small exchange, all from pairs of address and port that were not used before:
/// whether a pod still holds such a pair in TIME_WAIT depends on how many addresses it is dialled by, which is
/// not what is compared here. A few may fail; without any that is served it is an error.
fn connections(bed: &Bed, first: u32) -> Result<LoadReport> {
    let targets = match bed.variant.has_vip() {
        true => vec![SocketAddrV4::new(VIP, API_PORT)],
        false => {
            // By chance, as a hash spreads them: in turn, no two clients would ever wait for the same pod.
            let pods = bed.pods();
            let any = |number: u32| {
                pods[(number.wrapping_mul(2_654_435_769) >> 16) as usize % pods.len()].address
            };
            (0..1009)
                .map(|number| SocketAddrV4::new(any(number), API_PORT))
                .collect()
        }
    };
    let load = Load {
        sources: SOURCES
            .map(|last| Ipv4Addr::new(172, 22, 0, last))
            .collect(),
        targets,
        first,
        count: u32::MAX,
        limit: CONNECTIONS,
        patience: Load::PATIENCE,
        threads: CLIENTS,
    };
    let report = load.run(&bed.fleet.lab.hosts[0].namespace)?;
    ensure!(
        report.served > 0,
        "no connection through {} was served; the first: {}",
        bed.variant.name(),
        report.first_failure.unwrap_or_default()
    );
    Ok(report)
}

/// What happened while time went by.
struct Busy {
    progress: u64,
    /// Processor seconds.
    busy: f64,
    seconds: f64,
}

/// Lets time go by, and tells how far `progress` got and how busy the machine was.
fn measure_busy(time: Duration, progress: impl Fn() -> u64) -> Result<Busy> {
    let (begin, busy, before) = (Instant::now(), busy_seconds()?, progress());
    std::thread::sleep(time);
    Ok(Busy {
        progress: progress() - before,
        busy: busy_seconds()? - busy,
        seconds: begin.elapsed().as_secs_f64(),
    })
}

/// Tells how busy the machine is by itself, and warns when that is in the figures; whether it is quiet.
pub fn tell_idle(idle: f64) -> bool {
    println!("idle, the machine is busy for {idle:.3} s a second");
    let quiet = idle <= QUIET;
    if !quiet {
        println!(
            "WARNING: other work is going on here; it is in every figure below, in CPU per GiB above all"
        );
    }
    quiet
}

/// Seconds a second that the machine is busy by itself.
pub fn idle() -> Result<f64> {
    let idle = (0..5)
        .map(|_| {
            let Busy { busy, seconds, .. } = measure_busy(Duration::from_secs(1), || 0)?;
            Ok(busy / seconds)
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(median(idle))
}

/// Seconds that the machine's processors have been busy since boot, all together.
fn busy_seconds() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/stat").context("read /proc/stat")?;
    let line = stat.lines().next().context("/proc/stat is empty")?;
    // user nice system idle iowait irq softirq steal guest guest_nice; the last two are in the first two.
    let fields: Vec<u64> = line
        .split_whitespace()
        .skip(1)
        .map_while(|field| field.parse().ok())
        .collect();
    ensure!(fields.len() >= 8, "/proc/stat begins with `{line}`");
    let busy = fields[0] + fields[1] + fields[2] + fields[5] + fields[6] + fields[7];
    Ok(busy as f64 / rustix::param::clock_ticks_per_second() as f64)
}
