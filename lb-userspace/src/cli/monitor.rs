//! `ironlb monitor`: flows, refusals and drops as they happen.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use humantime::format_rfc3339_millis;
use lb_common::events::{
    CAPTURE, EVENT_DROP, EVENT_ENDED, EVENT_LIVING, EVENT_NEW, EVENT_REFUSAL, Event, Watch,
    verdicts_of,
};
use lb_common::frame::{Buffer, Frame as _};
use lb_common::packet::{
    self, ArpPacket, Ip, TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN, UdpHeader, ethertype, protocol,
};
use lb_common::{Addr, ServiceKey, Verdict, field};
use pcap_parser::{LegacyPcapBlock, Linktype, PcapHeader, ToVec as _};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, interval, sleep_until};

use super::{Output, OutputArgument, ago, block_on, bytes, unknown};
use crate::dataplane::DataplaneError;
use crate::dataplane::read::Reader;
use crate::dataplane::told::{Names, NotTold, WATCH_FOR, Watching, wall_time};
use crate::ended::{EndedBy, EndedFlow};

/// How often the ring is looked at. The programs wake nobody.
const ROUND: Duration = Duration::from_millis(50);
/// How often it is said that events are missing.
const NOTE: Duration = Duration::from_secs(5);
/// What every node drops all the time, and nobody misses: shown where it is asked for by name.
const ROUTINE: [Verdict; 3] = [
    Verdict::DroppedArpSilent,
    Verdict::DroppedNdSilent,
    Verdict::DroppedProbeReturned,
];

/// Show what happens now, a line each: flows that begin, live and end, refusals and drops.
///
/// The programs tell only while this runs, and then nothing of the packets of established flows. What
/// clients can cause without end (new flows, refusals, drops) is limited by --rate and can be sampled;
/// how much was left out is told on standard error. Needs no agent. One at a time below a root; one
/// that is killed costs the data plane nothing after three seconds.
#[derive(clap::Args)]
#[command(after_help = "\
A line: time (UTC), kind, client > VIP port > pod (instance), and of a flow's end the bytes from and to
the client, how long it lasted and who ended it; of a packet its length, verdict and uplink.
Flows that the agent ends because their backend is gone are in `ironlb flows --ended`, not here.
Without --verdict, what every node drops all the time is left out: dropped_arp_silent,
dropped_nd_silent, dropped_probe_returned.

Exit codes: 0 success, 1 error or another monitor watches, 2 wrong usage, 3 nothing is loaded.

Examples:
  ironlb monitor --client 172.22.0.101        what becomes of this host's connections
  ironlb monitor --kind refusal,drop          who meets closed doors
  ironlb monitor --kind ended --service metal3/ironic -o json | jq .by
  ironlb monitor --verdict dropped_bypass --for 1m --pcap bypass.pcap
  ironlb monitor --kind drop --pcap - | tcpdump -nr -")]
pub(super) struct Arguments {
    /// Only of this client.
    #[arg(long, value_name = "IP")]
    client: Option<IpAddr>,
    /// Only to this VIP.
    #[arg(long, value_name = "IP")]
    vip: Option<IpAddr>,
    /// Only to this port of a VIP.
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// Only of this service, e.g. metal3/ironic.
    #[arg(long, value_name = "NAME")]
    service: Option<String>,
    /// Only of this backend: its instance name or its address.
    #[arg(long, value_name = "NAME|IP")]
    instance: Option<String>,
    /// Only packets of these verdicts; `ironlb counters` lists them.
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = verdict)]
    verdict: Vec<Verdict>,
    /// Only events of these kinds.
    #[arg(long, value_enum, value_delimiter = ',')]
    kind: Vec<Kind>,
    /// End after so many events.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// End after this time, e.g. 10s or 5m.
    #[arg(long = "for", value_name = "TIME", value_parser = humantime::parse_duration)]
    limit: Option<Duration>,
    /// So many new flows, refusals and drops a second and CPU at most.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
    /// Of those, one in N, chosen at random.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    sample: u32,
    /// Write the frames of drops and refusals there, the first 128 bytes of each as they came, for tcpdump
    /// and Wireshark; `-` is standard output, instead of lines.
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgument,
}

/// What an event tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// A flow has begun: its backend is chosen.
    New,
    /// The pod has answered.
    Living,
    /// A living flow has ended.
    Ended,
    /// A client was refused with a RST.
    Refusal,
    /// A packet was dropped.
    Drop,
}

impl Kind {
    const ALL: [Self; 5] = [
        Self::New,
        Self::Living,
        Self::Ended,
        Self::Refusal,
        Self::Drop,
    ];

    fn number(self) -> u8 {
        match self {
            Self::New => EVENT_NEW,
            Self::Living => EVENT_LIVING,
            Self::Ended => EVENT_ENDED,
            Self::Refusal => EVENT_REFUSAL,
            Self::Drop => EVENT_DROP,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Living => "living",
            Self::Ended => "ended",
            Self::Refusal => "refusal",
            Self::Drop => "drop",
        }
    }

    /// Of a packet, not of a flow.
    fn has_packet(self) -> bool {
        matches!(self, Self::New | Self::Refusal | Self::Drop)
    }
}

/// The bits of the verdicts whose packets are events of these kinds.
fn bits_of(kinds: &[Kind]) -> u64 {
    let bits = kinds.iter().map(|kind| verdicts_of(kind.number()));
    bits.fold(0, |all, bits| all | bits)
}

fn verdict(name: &str) -> Result<Verdict, String> {
    let found = Verdict::ALL.iter().find(|verdict| verdict.name() == name);
    match found {
        Some(verdict) if bits_of(&Kind::ALL) >> *verdict as u32 & 1 == 1 => Ok(*verdict),
        Some(_) => Err(
            "packets of established flows and those left alone are no events; those that are: \
             forwarded_new, forwarded_miss, handed_on_new, refused_… and dropped_…"
                .to_owned(),
        ),
        None => Err("no such verdict; `ironlb counters` lists them".to_owned()),
    }
}

/// What the programs are asked for.
fn wanted(arguments: &Arguments) -> anyhow::Result<Watch> {
    let kinds = match (&arguments.kind[..], &arguments.verdict[..]) {
        ([], []) => Kind::ALL.to_vec(),
        // A verdict is a packet's.
        ([], _) => vec![Kind::New, Kind::Refusal, Kind::Drop],
        (kinds, _) => kinds.to_vec(),
    };
    let bits = |verdicts: &[Verdict]| verdicts.iter().fold(0, |bits, v| bits | 1 << *v as u32);
    let verdicts = match &arguments.verdict[..] {
        [] => bits_of(&kinds) & !bits(&ROUTINE),
        named => bits_of(&kinds) & bits(named),
    };
    let of_flows = kinds.iter().filter(|kind| !kind.has_packet());
    let kinds: u32 = of_flows.fold(0, |bits, kind| bits | 1 << kind.number());
    if verdicts == 0 && kinds == 0 {
        bail!(
            "no packet of these verdicts is an event of these kinds: leave out --kind or --verdict"
        );
    }
    Ok(Watch {
        verdicts,
        kinds,
        per_second: arguments.rate,
        sample: arguments.sample,
        client: arguments.client.map_or(Addr::UNSPECIFIED, Addr::from),
        ..Watch::default()
    })
}

/// An event for people and programs.
#[derive(Debug, Serialize)]
struct View {
    time: String,
    kind: Kind,
    #[serde(skip_serializing_if = "Option::is_none")]
    verdict: Option<&'static str>,
    interface: String,
    #[serde(flatten)]
    flow: Option<FlowPart>,
    #[serde(skip_serializing_if = "Option::is_none")]
    packet: Option<PacketPart>,
}

/// The flow of an event.
#[derive(Debug, Serialize)]
struct FlowPart {
    client: IpAddr,
    client_port: u16,
    vip: IpAddr,
    vip_port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    service: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    port_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod_port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    instance: Option<String>,
    #[serde(flatten)]
    end: Option<EndPart>,
}

/// The end of an event's flow.
#[derive(Debug, Serialize)]
struct EndPart {
    duration_seconds: f64,
    bytes_in: u64,
    bytes_out: Option<u64>,
    by: &'static str,
    refusal: Option<String>,
    #[serde(skip)]
    text: &'static str,
}

/// The packet of an event, as it came.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct PacketPart {
    length: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    protocol: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source_port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    destination: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    destination_port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flags: Option<String>,
}

impl PacketPart {
    /// Reads what was captured of a frame, as far as it goes.
    fn read(frame: &[u8], length: u32) -> Self {
        let mut bytes = frame.to_vec();
        let frame = Buffer::new(&mut bytes);
        let mut part = Self {
            length,
            ..Self::default()
        };
        let Some(link) = packet::link(&frame) else {
            return part;
        };
        let ip = match link.ethertype {
            ethertype::IPV4 => packet::ipv4(&frame, link.network),
            ethertype::IPV6 => packet::ipv6(&frame, link.network),
            ethertype::ARP => {
                part.arp(&frame, link.network);
                None
            }
            other => {
                part.protocol = Some(format!("ethertype {other:#06x}"));
                None
            }
        };
        if let Some(mut ip) = ip {
            let whole = !ip.is_v6() || packet::extensions(&frame, &mut ip).is_some();
            part.ip(&frame, &ip, whole);
        }
        part
    }

    fn arp(&mut self, frame: &Buffer<'_>, offset: usize) {
        self.protocol = Some("arp".to_owned());
        if let Some(arp) = frame.at::<ArpPacket>(offset) {
            let address = |words: [u16; 2]| {
                let [[a, b], [c, d]] = words.map(u16::to_ne_bytes);
                IpAddr::from([a, b, c, d])
            };
            self.source = Some(address(field!(arp, sender)));
            self.destination = Some(address(field!(arp, target)));
        }
    }

    fn ip(&mut self, frame: &Buffer<'_>, ip: &Ip, whole: bool) {
        self.source = Some(ip.source.into());
        self.destination = Some(ip.destination.into());
        self.protocol = Some(match ip.protocol {
            protocol::TCP => "tcp".to_owned(),
            protocol::UDP => "udp".to_owned(),
            protocol::ICMP => "icmp".to_owned(),
            protocol::ICMPV6 => "icmpv6".to_owned(),
            other => format!("protocol {other}"),
        });
        if ip.is_fragment() {
            self.flags = Some("fragment".to_owned());
        }
        if !whole || ip.is_later_fragment() {
            return;
        }
        match ip.protocol {
            protocol::TCP => {
                if let Some(tcp) = packet::tcp(frame, ip) {
                    self.source_port = Some(tcp.source);
                    self.destination_port = Some(tcp.destination);
                    let names = [
                        (TCP_SYN, "SYN"),
                        (TCP_FIN, "FIN"),
                        (TCP_RST, "RST"),
                        (TCP_ACK, "ACK"),
                    ];
                    let set = names.iter().filter(|(bit, _)| tcp.flags & bit != 0);
                    let set: Vec<_> = set.map(|(_, name)| *name).collect();
                    self.flags = Some(set.join("+"));
                }
            }
            protocol::UDP => {
                if let Some(udp) = frame.at::<UdpHeader>(ip.transport()) {
                    self.source_port = Some(u16::from_be(field!(udp, source)));
                    self.destination_port = Some(u16::from_be(field!(udp, destination)));
                }
            }
            _ => {}
        }
    }
}

/// What was captured of an event's frame.
fn captured(event: &Event) -> &[u8] {
    let length = (event.captured as usize).min(CAPTURE);
    &event.frame[..length]
}

impl View {
    /// `None` for a kind of a later version.
    fn new(event: &Event, resolver: &mut Resolver) -> Option<Self> {
        let kind = Kind::ALL
            .into_iter()
            .find(|kind| kind.number() == event.kind)?;
        let verdict = Verdict::ALL.get(usize::from(event.verdict));
        Some(Self {
            time: format_rfc3339_millis(wall_time(event.flow.at)).to_string(),
            kind,
            verdict: verdict.map(|verdict| verdict.name()),
            interface: resolver.names.interface(event.uplink),
            flow: (kind != Kind::Drop).then(|| FlowPart::new(event, kind, resolver)),
            packet: (event.length > 0).then(|| PacketPart::read(captured(event), event.length)),
        })
    }

    fn line(&self) -> String {
        // The day is known.
        let time = self.time.split(['T', 'Z']).nth(1).unwrap_or(&self.time);
        let mut line = format!("{time} {:<8}", self.kind.name());
        match (&self.flow, &self.packet) {
            (Some(flow), _) => line += &flow.line(),
            (None, Some(packet)) => {
                if let (Some(source), Some(destination)) = (packet.source, packet.destination) {
                    let source = end(source, packet.source_port);
                    let destination = end(destination, packet.destination_port);
                    line += &format!("{source} > {destination}");
                }
            }
            (None, None) => {}
        }
        if let Some(packet) = &self.packet {
            for word in [&packet.protocol, &packet.flags].into_iter().flatten() {
                line += &format!(" {word}");
            }
            line += &format!(" {} bytes", packet.length);
        }
        if let Some(verdict) = self.verdict {
            line += &format!("  {verdict}");
        }
        if !self.interface.is_empty() {
            line += &format!(" on {}", self.interface);
        }
        line
    }
}

fn end(address: IpAddr, port: Option<u16>) -> String {
    match port {
        None => address.to_string(),
        Some(port) => SocketAddr::new(address, port).to_string(),
    }
}

impl FlowPart {
    fn new(event: &Event, kind: Kind, resolver: &mut Resolver) -> Self {
        let facts = &event.flow;
        let vip_port = ServiceKey::new(facts.key.addr, facts.key.port);
        let has_pod = facts.pod != Addr::UNSPECIFIED;
        let service = match has_pod {
            true => resolver.names.service(facts.service, &vip_port),
            false => resolver.service_at(&vip_port),
        };
        let (service, port_name) = service.unzip();
        let ended = match kind {
            Kind::Ended => EndedBy::of(facts.by).map(|by| EndedFlow::new(facts, by, None)),
            _ => None,
        };
        let instance = has_pod.then(|| resolver.names.instance(facts.backend));
        Self {
            client: facts.key.client.into(),
            client_port: facts.key.client_port,
            vip: facts.key.addr.into(),
            vip_port: facts.key.port,
            service,
            port_name,
            pod: has_pod.then(|| facts.pod.into()),
            pod_port: has_pod.then_some(facts.pod_port),
            instance: instance.flatten(),
            end: ended.map(|flow| EndPart {
                duration_seconds: flow.duration_seconds,
                bytes_in: flow.bytes_in,
                bytes_out: flow.bytes_out,
                by: flow.by.name(),
                text: flow.by.text(),
                refusal: flow.refusal,
            }),
        }
    }

    fn line(&self) -> String {
        let client = end(self.client, Some(self.client_port));
        let mut line = format!("{client} > {}", end(self.vip, Some(self.vip_port)));
        if let Some(pod) = self.pod {
            line += &format!(" > {}", end(pod, self.pod_port));
        }
        if let Some(instance) = &self.instance {
            line += &format!(" ({instance})");
        }
        if let Some(ended) = &self.end {
            line += &format!(
                "  in {} out {} in {}: {}",
                bytes(ended.bytes_in),
                ended.bytes_out.map_or_else(|| "-".to_owned(), bytes),
                ago(ended.duration_seconds),
                ended.text
            );
            if let Some(refusal) = &ended.refusal {
                line += &format!(" ({refusal})");
            }
        }
        line
    }
}

/// Names, and those that a search was needed for: a flood of refusals asks for the same again and again.
struct Resolver {
    names: Names,
    found: HashMap<ServiceKey, (Instant, Option<(String, String)>)>,
}

impl Resolver {
    fn service_at(&mut self, vip_port: &ServiceKey) -> Option<(String, String)> {
        const FRESH: Duration = Duration::from_secs(2);
        /// A scan of the ports of a VIP shall not fill the memory.
        const MOST: usize = 4096;
        if let Some((at, found)) = self.found.get(vip_port)
            && at.elapsed() < FRESH
        {
            return found.clone();
        }
        if self.found.len() >= MOST {
            self.found.clear();
        }
        let found = self.names.service_at(vip_port);
        self.found
            .insert(*vip_port, (Instant::now(), found.clone()));
        found
    }
}

impl Arguments {
    /// Whether an event is one of those asked for. The programs have looked at kind, verdict and, where there is a
    /// flow, client.
    fn matches(&self, view: &View) -> bool {
        let (flow, packet) = (view.flow.as_ref(), view.packet.as_ref());
        // A drop is a client's packet or, on the way out, a pod's.
        let has_address = |wanted: IpAddr, of_flow: Option<IpAddr>| match (flow, packet) {
            (Some(_), _) => of_flow == Some(wanted),
            (None, Some(packet)) => [packet.source, packet.destination].contains(&Some(wanted)),
            (None, None) => false,
        };
        let has_port = |wanted: u16| match (flow, packet) {
            (Some(flow), _) => flow.vip_port == wanted,
            (None, Some(packet)) => packet.destination_port == Some(wanted),
            (None, None) => false,
        };
        let is_of_service =
            |wanted: &String| flow.is_some_and(|flow| flow.service.as_ref() == Some(wanted));
        let is_of_instance = |wanted: &String| {
            flow.is_some_and(|flow| flow.instance.as_ref() == Some(wanted))
                || wanted
                    .parse()
                    .is_ok_and(|pod| has_address(pod, flow.and_then(|flow| flow.pod)))
        };
        self.client
            .is_none_or(|client| has_address(client, flow.map(|flow| flow.client)))
            && self
                .vip
                .is_none_or(|vip| has_address(vip, flow.map(|flow| flow.vip)))
            && self.port.is_none_or(has_port)
            && self.service.as_ref().is_none_or(is_of_service)
            && self.instance.as_ref().is_none_or(is_of_instance)
    }
}

/// Where events go.
struct Sink {
    lines: Option<Output>,
    /// Not buffered, so that a Ctrl-C loses nothing: the rate is limited.
    pcap: Option<Box<dyn Write>>,
}

impl Sink {
    fn open(arguments: &Arguments) -> anyhow::Result<Self> {
        let output = arguments.output.output;
        let Some(path) = &arguments.pcap else {
            return Ok(Self {
                lines: Some(output),
                pcap: None,
            });
        };
        let is_stdout = path.as_os_str() == "-";
        let mut file: Box<dyn Write> = match is_stdout {
            true => Box::new(io::stdout()),
            false => {
                let file = File::create(path);
                Box::new(file.with_context(|| format!("cannot create {}", path.display()))?)
            }
        };
        let header = PcapHeader {
            snaplen: CAPTURE as u32,
            network: Linktype::ETHERNET,
            ..PcapHeader::new()
        };
        write_block(&mut file, header.to_vec_raw())
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self {
            lines: (!is_stdout).then_some(output),
            pcap: Some(file),
        })
    }

    fn put(&mut self, event: &Event, view: &View) -> io::Result<()> {
        if let Some(output) = self.lines {
            let mut stdout = io::stdout().lock();
            match output {
                Output::Table => writeln!(stdout, "{}", view.line())?,
                Output::Json => {
                    serde_json::to_writer(&mut stdout, view)?;
                    stdout.write_all(b"\n")?;
                }
            }
        }
        let has_frame = matches!(view.kind, Kind::Refusal | Kind::Drop);
        if let (Some(pcap), true) = (&mut self.pcap, has_frame) {
            let time = wall_time(event.flow.at).duration_since(SystemTime::UNIX_EPOCH);
            let frame = captured(event);
            let time = time.unwrap_or_default();
            let packet = LegacyPcapBlock {
                ts_sec: time.as_secs() as u32,
                ts_usec: time.subsec_micros(),
                caplen: frame.len() as u32,
                origlen: event.length.max(frame.len() as u32),
                data: frame,
            };
            write_block(pcap, packet.to_vec_raw())?;
        }
        Ok(())
    }
}

/// Writes a part of a capture whole, so that whoever reads along has it.
fn write_block<E: std::fmt::Debug>(
    to: &mut dyn Write,
    block: Result<Vec<u8>, E>,
) -> io::Result<()> {
    let block = block.map_err(|error| io::Error::other(format!("{error:?}")))?;
    to.write_all(&block)?;
    to.flush()
}

/// Why it ends.
enum End {
    Asked,
    /// Whoever read has seen enough.
    Closed,
}

struct Monitor {
    watching: Watching,
    resolver: Resolver,
    sink: Sink,
    shown: u64,
    noted: NotTold,
}

impl Monitor {
    /// Shows what has come. `Some` when it is time to end.
    fn look(&mut self, arguments: &Arguments) -> anyhow::Result<Option<End>> {
        while let Some(event) = self.watching.take() {
            let Some(view) = View::new(&event, &mut self.resolver) else {
                continue;
            };
            if !arguments.matches(&view) {
                continue;
            }
            if let Err(error) = self.sink.put(&event, &view) {
                return closed(error);
            }
            self.shown += 1;
            if arguments.count == Some(self.shown) {
                return Ok(Some(End::Asked));
            }
        }
        // So that whoever reads sees it now.
        match io::stdout().flush() {
            Err(error) => closed(error),
            Ok(()) => Ok(None),
        }
    }

    /// Says what is missing, if more is than was last said.
    fn note(&mut self) -> Result<(), DataplaneError> {
        let now = self.watching.not_told()?;
        let NotTold {
            suppressed, lost, ..
        } = now;
        if (suppressed, lost) != (self.noted.suppressed, self.noted.lost) {
            eprintln!(
                "ironlb: {suppressed} events were left out so far (--rate, --sample), {lost} found no room"
            );
        }
        self.noted = now;
        Ok(())
    }
}

fn closed(error: io::Error) -> anyhow::Result<Option<End>> {
    if error.kind() == io::ErrorKind::BrokenPipe {
        return Ok(Some(End::Closed));
    }
    Err(error).context("cannot write what was seen")
}

pub(super) fn run(arguments: &Arguments, bpffs: &Path) -> anyhow::Result<ExitCode> {
    let wanted = wanted(arguments)?;
    // Whether anything is loaded at all.
    Reader::open(bpffs)?;
    let names = Names::open(bpffs)?;
    if let Some(asked) = &arguments.service {
        check_service(&names, asked)?;
    }
    let watching = Watching::begin(bpffs, wanted)?;
    let mut monitor = Monitor {
        watching,
        resolver: Resolver {
            names,
            found: HashMap::new(),
        },
        sink: Sink::open(arguments)?,
        shown: 0,
        noted: NotTold::default(),
    };
    block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("listen for signals")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("listen for signals")?;
        let mut round = interval(ROUND);
        let mut renewal = interval(WATCH_FOR / 3);
        let mut note = interval(NOTE);
        // As good as never, without a limit.
        let limit = arguments
            .limit
            .unwrap_or(Duration::from_secs(u32::MAX.into()));
        let deadline = sleep_until(Instant::now() + limit);
        tokio::pin!(deadline);
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                () = &mut deadline => break,
                _ = renewal.tick() => monitor.watching.renew()?,
                _ = note.tick() => monitor.note()?,
                _ = round.tick() => {
                    if monitor.look(arguments)?.is_some() {
                        return Ok(());
                    }
                }
            }
        }
        // What came in the last moment.
        monitor.look(arguments).map(drop)
    })?;
    monitor.note()?;
    Ok(ExitCode::SUCCESS)
}

/// A service that does not exist would be waited for in vain.
fn check_service(names: &Names, asked: &str) -> anyhow::Result<()> {
    let services = names.services();
    match services.iter().any(|service| service == asked) {
        true => Ok(()),
        false => Err(unknown("service", asked, services.into_iter())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use etherparse::PacketBuilder;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn parse(words: &str) -> Result<Arguments, clap::Error> {
        let words = ["monitor"].into_iter().chain(words.split_whitespace());
        Line::try_parse_from(words).map(|line| line.arguments)
    }

    fn watch(words: &str) -> anyhow::Result<Watch> {
        wanted(&parse(words).unwrap_or_else(|error| panic!("{error}")))
    }

    #[test]
    fn the_programs_are_asked_for_what_is_wanted_and_no_more() {
        let bit = |verdict: Verdict| 1_u64 << verdict as u32;
        let all = watch("").expect("right");
        assert_eq!(all.kinds, 1 << EVENT_LIVING | 1 << EVENT_ENDED);
        assert_ne!(all.verdicts & bit(Verdict::DroppedBypass), 0);
        assert_eq!(all.verdicts & bit(Verdict::DroppedArpSilent), 0, "routine");
        assert_eq!(all.verdicts & bit(Verdict::Forwarded), 0);
        let named = watch("--verdict dropped_arp_silent,refused_gone").expect("right");
        let wanted = bit(Verdict::DroppedArpSilent) | bit(Verdict::RefusedGone);
        assert_eq!((named.verdicts, named.kinds), (wanted, 0));
        let ended = watch("--kind ended --client 172.22.0.101 --rate 7").expect("right");
        assert_eq!((ended.verdicts, ended.kinds), (0, 1 << EVENT_ENDED));
        assert_eq!(ended.per_second, 7);
        assert_eq!(ended.client.to_string(), "172.22.0.101");
        assert!(watch("--kind refusal --verdict dropped_bypass").is_err());
        for bad in [
            "--verdict forwarded",
            "--verdict bogus",
            "--count 0",
            "--rate 0",
            "--for x",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_was_captured_of_a_packet_is_read_as_far_as_it_goes() {
        let mut frame = Vec::new();
        PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv4([172, 22, 0, 100], [172, 22, 0, 2], 64)
            .tcp(40_000, 6189, 1000, 1024)
            .syn()
            .write(&mut frame, &[7; 200])
            .expect("writes");
        let whole = frame.len() as u32;
        let client = IpAddr::from([172, 22, 0, 100]);
        let part = PacketPart::read(&frame[..128], whole);
        assert_eq!(part.length, whole);
        assert_eq!(part.protocol.as_deref(), Some("tcp"));
        assert_eq!(part.source, Some(client));
        assert_eq!(part.destination_port, Some(6189));
        assert_eq!(part.flags.as_deref(), Some("SYN"));
        for cut in 0..128 {
            // Nothing panics, and what is said is right.
            let part = PacketPart::read(&frame[..cut], whole);
            assert!(part.source.is_none_or(|source| source == client), "{cut}");
        }
        let mut frame = Vec::new();
        PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv6([0xfd; 16], [0xfe; 16], 64)
            .udp(5353, 53)
            .write(&mut frame, &[1])
            .expect("writes");
        let part = PacketPart::read(&frame, frame.len() as u32);
        assert_eq!(part.protocol.as_deref(), Some("udp"));
        assert_eq!(part.source_port, Some(5353));
    }
}
