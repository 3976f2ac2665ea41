//! `ironlb trace`: what would happen to a packet.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{anyhow, bail};
use clap::ValueEnum;
use serde_json::Value;

use super::{FAILED, Output, OutputArgument, ago, emit, emit_json, or_dash, table, unknown};
use crate::capture;
use crate::dataplane::trace::{
    ChangeKind, ChangeView, Direction, Fields, Question, TCP_FLAGS, Trace, Tracer,
};

/// Explain what would happen to a packet, without sending one.
///
/// The packet is made of addresses, or taken from a capture. The real program of the interface runs on it, loaded a second
/// time: what it reads are the maps that serve, what it writes are copies of them. So nothing that serves changes, no
/// counter moves, and what would change is told. Needs root, and no agent.
///
/// It looks at the program of one interface: not at what the kernel does before and behind it (routes, firewalls).
#[derive(clap::Args)]
#[command(after_help = "\
Exit codes: 0 success, 1 error or no such interface, 2 wrong usage, 3 nothing is loaded at that root.

A packet made of addresses is TCP, a SYN unless --flags says otherwise. Of a flow that exists
it is the next packet: from the same MAC, with the same acknowledgment.

A capture of an uplink at TC has clients' packets as the program gets them, and pods' packets
as it has rewritten them: capture those on the pod's interface. Natively, clients' packets have
been rewritten, too: capture them on the client, or upstream.

Examples:
  ironlb trace --from 172.22.0.50:40000 --to 172.22.0.2:6385
  ironlb trace --from '[fd00:22::50]:40000' --to '[fd00:22::2]:6385' --flags ack
  ironlb trace --direction out --from 10.244.0.11:6385 --to 172.22.0.50:40000 --flags syn,ack
  ironlb trace --pcap eth1.pcap --packet 7
  ironlb trace --pcap eth1.pcap --packet all -o json | jq -r '.[] | \"\\(.packet) \\(.verdict)\"'")]
pub(super) struct Arguments {
    /// Where the packet comes from.
    #[arg(
        long,
        value_name = "IP:PORT",
        requires = "to",
        required_unless_present = "pcap"
    )]
    from: Option<SocketAddr>,
    /// Where it goes to.
    #[arg(long, value_name = "IP:PORT", requires = "from")]
    to: Option<SocketAddr>,
    /// Its TCP flags, as syn,ack: of syn, ack, fin, rst, psh, urg; or none.
    #[arg(long, value_parser = flags, default_value = "syn", conflicts_with = "pcap")]
    flags: u8,
    /// MAC of the other end: that it comes from, or with --direction out that it goes to [default: that of the flow's last
    /// packet, else 02:00:00:00:00:01].
    #[arg(long, value_name = "MAC", conflicts_with = "pcap")]
    mac: Option<Mac>,
    /// Take the packet from this capture, a pcap or pcapng file with Ethernet headers.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["from", "to"])]
    pcap: Option<PathBuf>,
    /// Which packet of the capture, from 1; or all, each as if it were the only one.
    #[arg(
        long,
        value_name = "N|all",
        default_value = "1",
        requires = "pcap",
        conflicts_with = "from"
    )]
    packet: Which,
    /// Which way it goes through the interface [default: in; of a captured packet what its MACs say].
    #[arg(long, value_enum)]
    direction: Option<Way>,
    /// The interface [default: the VIP's or, of packets going out, the one that routing chooses].
    #[arg(long, value_name = "NAME")]
    uplink: Option<String>,
    #[command(flatten)]
    output: OutputArgument,
}

#[derive(Clone, Copy, ValueEnum)]
enum Way {
    /// From the network: the forward path.
    In,
    /// To the network: the reply path.
    Out,
}

impl From<Way> for Direction {
    fn from(way: Way) -> Self {
        match way {
            Way::In => Self::In,
            Way::Out => Self::Out,
        }
    }
}

#[derive(Clone, Copy)]
enum Which {
    All,
    Number(u64),
}

impl FromStr for Which {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("all", _) => Ok(Self::All),
            (_, Ok(number)) if number > 0 => Ok(Self::Number(number)),
            _ => Err("neither a number from 1 on nor `all`".to_owned()),
        }
    }
}

#[derive(Clone, Copy)]
struct Mac([u8; 6]);

impl FromStr for Mac {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let octets: Vec<&str> = text.split(':').collect();
        let mut mac = [0; 6];
        if octets.len() != mac.len() {
            return Err("not six octets, as 02:00:00:00:00:01".to_owned());
        }
        for (octet, text) in mac.iter_mut().zip(octets) {
            *octet = u8::from_str_radix(text, 16)
                .map_err(|_| format!("`{text}` is no octet of a MAC"))?;
        }
        Ok(Self(mac))
    }
}

fn flags(text: &str) -> Result<u8, String> {
    if text == "none" {
        return Ok(0);
    }
    text.split(',').try_fold(0, |flags, name| {
        let known = TCP_FLAGS.iter().find(|(known, _)| *known == name);
        let (_, bit) = known.ok_or_else(|| format!("`{name}` is no flag of TCP"))?;
        Ok(flags | bit)
    })
}

pub(super) fn run(arguments: &Arguments, bpffs: &Path) -> anyhow::Result<ExitCode> {
    let mut tracer = Tracer::open(bpffs)?;
    let (traces, problems) = match (&arguments.pcap, arguments.from, arguments.to) {
        (Some(file), _, _) => of_capture(&mut tracer, arguments, file)?,
        (None, Some(from), Some(to)) => (
            vec![of_addresses(&mut tracer, arguments, from, to)?],
            Vec::new(),
        ),
        // clap sees to it.
        _ => bail!("neither --from and --to nor --pcap"),
    };
    match arguments.output.output {
        Output::Json => emit_json(&traces)?,
        Output::Table => {
            let texts: Vec<String> = traces.iter().map(text).collect();
            emit(&texts.join("\n\n"))?;
        }
    }
    for problem in &problems {
        eprintln!("ironlb: {problem:#}");
    }
    Ok(match problems[..] {
        [] => ExitCode::SUCCESS,
        [..] => ExitCode::from(FAILED),
    })
}

fn of_addresses(
    tracer: &mut Tracer,
    arguments: &Arguments,
    from: SocketAddr,
    to: SocketAddr,
) -> anyhow::Result<Trace> {
    let direction = arguments.direction.map_or(Direction::In, Direction::from);
    let found = tracer.slot_for(to.ip(), direction);
    let slot = slot(tracer, arguments, direction, found, Some(to.ip()))?;
    let question = Question {
        from,
        to,
        flags: arguments.flags,
        direction,
        mac: arguments.mac.map(|Mac(mac)| mac),
    };
    let frame = tracer
        .frame(slot, &question)?
        .ok_or_else(|| anyhow!("{from} and {to} are of different versions of IP"))?;
    Ok(tracer.trace(slot, direction, &frame, frame.len())?)
}

/// Traces of those packets that can be traced, and what is wrong with the others and the file.
fn of_capture(
    tracer: &mut Tracer,
    arguments: &Arguments,
    file: &Path,
) -> anyhow::Result<(Vec<Trace>, Vec<anyhow::Error>)> {
    let (mut traces, mut problems) = (Vec::new(), Vec::new());
    let seen = capture::each::<anyhow::Error>(file, |packet| {
        if let Which::Number(wanted) = arguments.packet
            && wanted != packet.number
        {
            return Ok(true);
        }
        let asked = arguments.direction.map(Direction::from);
        let (direction, found) = tracer.place_of(packet.bytes, asked);
        let slot = slot(tracer, arguments, direction, found, None)?;
        match tracer.trace(slot, direction, packet.bytes, packet.length) {
            Ok(trace) => traces.push(Trace {
                packet: Some(packet.number),
                ..trace
            }),
            Err(error) => problems.push(anyhow!("packet {}: {error}", packet.number)),
        }
        Ok(matches!(arguments.packet, Which::All))
    });
    let nothing = traces.is_empty() && problems.is_empty();
    match (arguments.packet, seen) {
        (_, Err(error)) if nothing => return Err(error),
        (_, Err(error)) => problems.push(error),
        (_, Ok(0)) => bail!("{} has no packet", file.display()),
        (Which::Number(wanted), Ok(seen)) if nothing => bail!(
            "{} has no packet {wanted}: its last one is {seen}",
            file.display()
        ),
        (_, Ok(_)) => {}
    }
    Ok((traces, problems))
}

/// The slot of the interface that was asked for, or was found.
fn slot(
    tracer: &Tracer,
    arguments: &Arguments,
    direction: Direction,
    found: Option<u32>,
    to: Option<IpAddr>,
) -> anyhow::Result<u32> {
    let there_is = tracer.interfaces(direction);
    if let Some(name) = &arguments.uplink {
        let slot = tracer.slot(name, direction);
        return slot
            .ok_or_else(|| unknown("interface with this program", name, there_is.into_iter()));
    }
    found.ok_or_else(|| {
        let to = to.map_or_else(String::new, |to| format!("{to} is no VIP, and "));
        match there_is.is_empty() {
            true => anyhow!("no interface has a program for packets that go this way: see `ironlb status`"),
            false => anyhow!(
                "{to}it is not clear by which interface the packet goes: name one of {} by --uplink",
                there_is.join(", ")
            ),
        }
    })
}

fn text(trace: &Trace) -> String {
    let way = match trace.direction {
        Direction::In => "in",
        Direction::Out => "out",
    };
    let leaves = trace
        .leaves
        .as_ref()
        .map_or_else(String::new, |name| format!(" out of {name}"));
    let mut head = vec![
        ["VERDICT".to_owned(), trace.verdict.to_owned()],
        ["".to_owned(), trace.explanation.to_owned()],
        ["ACTION".to_owned(), format!("{}{leaves}", trace.action)],
        [
            "PROGRAM".to_owned(),
            format!(
                "{} of {}, {way}: {}",
                trace.program, trace.uplink, trace.returned
            ),
        ],
    ];
    if let Some(number) = trace.packet {
        head.insert(0, ["PACKET".to_owned(), number.to_string()]);
    }
    head.extend(
        trace
            .notes
            .iter()
            .map(|note| ["NOTE".to_owned(), note.clone()]),
    );
    let mut parts = vec![pairs(&head)];
    if !trace.entries.is_empty() {
        let rows = trace.entries.iter();
        parts.push(table(
            &["DECIDED BY", "KEY", "VALUE"],
            rows.map(|entry| {
                [
                    entry.map.to_owned(),
                    entry.key.clone(),
                    inline(&entry.value),
                ]
            }),
        ));
    }
    parts.push(match trace.changes.is_empty() {
        true => "No entry would change.".to_owned(),
        false => table(
            &["WOULD BE", "IN", "KEY", "VALUE"],
            trace.changes.iter().map(change),
        ),
    });
    let after = trace.after.as_ref();
    let mut names: Vec<&str> = trace.before.0.iter().map(|(name, _)| *name).collect();
    for (name, _) in after.iter().flat_map(|fields| &fields.0) {
        if !names.contains(name) {
            names.push(name);
        }
    }
    let value = |fields: &Fields, name: &str| {
        let mut fields = fields.0.iter();
        let found = fields.find(|(other, _)| *other == name);
        or_dash(found.map(|(_, value)| plain(value)))
    };
    parts.push(table(
        &["FRAME", "BEFORE", "AFTER", ""],
        names.into_iter().map(|name| {
            let before = value(&trace.before, name);
            let then = after.map_or_else(|| "-".to_owned(), |after| value(after, name));
            let differs = after.is_some() && before != then;
            let mark = if differs { "changed" } else { "" };
            [name.to_owned(), before, then, mark.to_owned()]
        }),
    ));
    parts.join("\n\n")
}

/// Two columns without a header.
fn pairs(rows: &[[String; 2]]) -> String {
    let lines = rows.iter().map(|[name, value]| format!("{name:<9}{value}"));
    lines.collect::<Vec<_>>().join("\n")
}

fn change(change: &ChangeView) -> [String; 4] {
    let (kind, value) = match (change.change, &change.before, &change.after) {
        (ChangeKind::Changed, Some(before), Some(after)) => ("changed", differing(before, after)),
        (ChangeKind::Removed, Some(before), _) => ("removed", inline(before)),
        (ChangeKind::Inserted, _, Some(after)) => ("inserted", inline(after)),
        _ => ("changed", String::new()),
    };
    [
        kind.to_owned(),
        change.map.to_owned(),
        change.key.clone(),
        value,
    ]
}

/// What differs between two values of an entry, before and after.
fn differing(before: &Fields, after: &Fields) -> String {
    let pairs = before.0.iter().zip(&after.0);
    let differ = pairs.filter(|(before, after)| before != after);
    let texts = differ.map(|((name, before), (_, after))| {
        let (before, after) = (plain(before), plain(after));
        format!("{}={before}→{after}", short(name))
    });
    texts.collect::<Vec<_>>().join(" ")
}

fn inline(fields: &Fields) -> String {
    let texts = fields
        .0
        .iter()
        .map(|(name, value)| format!("{}={}", short(name), plain(value)));
    texts.collect::<Vec<_>>().join(" ")
}

/// A name for people, whose values say their unit.
fn short(name: &str) -> &str {
    name.strip_suffix("_seconds").unwrap_or(name)
}

/// A value for people.
fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::Array(list) if list.is_empty() => "-".to_owned(),
        Value::Array(list) => {
            let texts: Vec<String> = list.iter().map(plain).collect();
            texts.join(",")
        }
        Value::Number(number) if number.is_f64() => ago(number.as_f64().unwrap_or(0.0)),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn flags_and_macs_are_what_they_say() {
        assert_eq!(flags("syn,ack"), Ok(0x12));
        assert_eq!(flags("none"), Ok(0));
        assert_eq!(flags("sin"), Err("`sin` is no flag of TCP".to_owned()));
        let mac: Mac = "02:00:00:00:0a:ff".parse().expect("a MAC");
        assert_eq!(mac.0, [2, 0, 0, 0, 10, 255]);
        assert!("02:00:00:00:0a".parse::<Mac>().is_err());
        assert!("0".parse::<Which>().is_err());
    }

    #[test]
    fn of_a_changed_entry_only_what_differs_is_shown() {
        let fields = |idle: f64, fin| {
            Fields(vec![
                ("instance", json!("ironic-0")),
                ("idle_seconds", json!(idle)),
                ("client_fin", json!(fin)),
            ])
        };
        assert_eq!(
            differing(&fields(3.0, false), &fields(0.0, true)),
            "idle=3.0s→0.0s client_fin=no→yes"
        );
        assert_eq!(
            inline(&fields(3.0, false)),
            "instance=ironic-0 idle=3.0s client_fin=no"
        );
    }
}
