//! `ironlb flows`: who talks to which pod.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use clap::ValueEnum;
use lb_common::CLOSING_GUARD;

use super::{Output, OutputArgument, ago, bytes, emit, emit_json, table, unknown};
use crate::dataplane::read::{BackendView, FlowFilter, FlowState, FlowView, Reader};
use crate::ended::{DEFAULT_STATE_DIR, EndedFlow};

/// Rows of a table unless somebody asks for more.
const TABLE_LIMIT: usize = 100;

/// Show the flows: who talks to which pod, since when, and how much.
///
/// A flow is young until the pod has answered; living ones stay, idle or not, until they end; closing
/// ones have ended and keep their port from being reused for a minute. Reads the pinned maps alone, so
/// it works with the agent dead.
///
/// With --ended it shows long flows that are over, and who ended them, from what the agent has recorded on
/// disk: those that lasted more than 10 s, brought more than 10 MB, or lost their backend.
#[derive(clap::Args)]
#[command(after_help = "\
Exit codes: 0 success, 1 error or no such VIP, port or instance, 3 nothing is loaded at that root.

Examples:
  ironlb flows --client 172.22.0.101
  ironlb flows --vip 172.22.0.2 --port 6180 --state living
  ironlb flows --instance ironic-1 --limit 0
  ironlb flows -o json | jq 'map(select(.idle_seconds > 3600))'
  ironlb flows --ended --since 12h
  ironlb flows --ended --client 172.22.0.101 -o json | jq '.[].by'")]
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
    /// Only of this backend: its instance name or its address.
    #[arg(long, value_name = "NAME|IP")]
    instance: Option<String>,
    /// Only in this state.
    #[arg(long, value_enum, conflicts_with = "ended")]
    state: Option<State>,
    /// Long flows that have ended, the last one first, and who ended them: FIN or RST of client or pod, or its
    /// backend being gone.
    #[arg(long)]
    ended: bool,
    /// Of ended ones, only those of this last time, e.g. 30m or 6h.
    #[arg(long, value_name = "TIME", requires = "ended", value_parser = humantime::parse_duration)]
    since: Option<Duration>,
    /// Where the agent records ended flows (its --state-dir).
    #[arg(long, value_name = "FOLDER", requires = "ended", default_value = DEFAULT_STATE_DIR)]
    state_dir: PathBuf,
    /// Closing ones whose minute is over, too: they stay in the table until somebody needs their place.
    #[arg(long, conflicts_with = "ended")]
    all: bool,
    /// So many at most, 0 for all [default: 100 in a table, all in JSON].
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    #[command(flatten)]
    output: OutputArgument,
}

#[derive(Clone, Copy, ValueEnum)]
enum State {
    Living,
    Young,
    Closing,
    Refused,
}

pub(super) fn run(arguments: Arguments, bpffs: &Path) -> anyhow::Result<ExitCode> {
    if arguments.ended {
        return ended(&arguments);
    }
    let Arguments {
        client,
        vip,
        port,
        instance,
        state,
        all: with_expired,
        limit,
        output: OutputArgument { output },
        ended: _,
        since: _,
        state_dir: _,
    } = arguments;
    let reader = Reader::open(bpffs)?;
    let mut flows = reader.flows(&FlowFilter {
        client,
        vip,
        vip_port: port,
        backend: instance.clone(),
        state: state.map(|state| match state {
            State::Living => FlowState::Living,
            State::Young => FlowState::Young,
            State::Closing => FlowState::Closing,
            State::Refused => FlowState::Refused,
        }),
    })?;
    let missing = match flows.is_empty() {
        true => missing(&reader, vip, port, instance)?,
        false => None,
    };
    flows.retain(|flow| with_expired || !is_expired(flow));
    let all = flows.len();
    match limit {
        Some(0) => {}
        Some(limit) => flows.truncate(limit),
        None if output == Output::Table => flows.truncate(TABLE_LIMIT),
        None => {}
    }
    match output {
        Output::Json => emit_json(&flows)?,
        Output::Table if missing.is_some() => {}
        Output::Table => {
            emit(&table(
                &[
                    "STATE", "CLIENT", "VIP", "POD", "INSTANCE", "AGE", "IDLE", "IN", "OUT",
                    "UPLINK",
                ],
                flows.iter().map(row),
            ))?;
            if flows.len() < all {
                eprintln!("{} of {all} flows; --limit 0 shows all", flows.len());
            }
        }
    }
    missing.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// Shows what the agent has recorded.
fn ended(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments {
        client,
        vip,
        port,
        instance,
        since,
        state_dir,
        limit,
        output: OutputArgument { output },
        ..
    } = arguments;
    let record = crate::ended::read(state_dir).with_context(|| {
        format!(
            "cannot read a record of ended flows in {}: has an agent run on this node, and with this --state-dir?",
            state_dir.display()
        )
    })?;
    if record.unreadable > 0 {
        eprintln!(
            "ironlb: {} records could not be read: cut by a crash, or of another version",
            record.unreadable
        );
    }
    let from = since.map(|since| SystemTime::now() - since);
    let is_instance = |flow: &EndedFlow, wanted: &String| {
        flow.instance == *wanted || wanted.parse() == Ok(flow.pod)
    };
    let matches = |flow: &EndedFlow| {
        client.is_none_or(|client| flow.client == client)
            && vip.is_none_or(|vip| flow.vip == vip)
            && port.is_none_or(|port| flow.vip_port == port)
            && instance
                .as_ref()
                .is_none_or(|wanted| is_instance(flow, wanted))
            && from.is_none_or(|from| flow.ended >= from)
    };
    let mut flows: Vec<_> = record.flows.into_iter().filter(matches).collect();
    flows.sort_by_key(|flow| std::cmp::Reverse(flow.ended));
    let all = flows.len();
    match limit {
        Some(0) => {}
        Some(limit) => flows.truncate(*limit),
        None if *output == Output::Table => flows.truncate(TABLE_LIMIT),
        None => {}
    }
    match output {
        Output::Json => emit_json(&flows)?,
        Output::Table => {
            emit(&table(
                &[
                    "ENDED", "CLIENT", "VIP", "POD", "INSTANCE", "SERVICE", "LASTED", "IN", "OUT",
                    "BY",
                ],
                flows.iter().map(ended_row),
            ))?;
            if flows.len() < all {
                eprintln!("{} of {all} flows; --limit 0 shows all", flows.len());
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn end(address: IpAddr, port: u16) -> String {
    SocketAddr::new(address, port).to_string()
}

fn ended_row(flow: &EndedFlow) -> [String; 10] {
    let name = |name: &String| match name.as_str() {
        "" => "-".to_owned(),
        name => name.to_owned(),
    };
    [
        humantime::format_rfc3339_seconds(flow.ended).to_string(),
        end(flow.client, flow.client_port),
        end(flow.vip, flow.vip_port),
        end(flow.pod, flow.pod_port),
        name(&flow.instance),
        match flow.port_name.as_str() {
            "" => name(&flow.service),
            port => format!("{}:{port}", flow.service),
        },
        ago(flow.duration_seconds),
        bytes(flow.bytes_in),
        flow.bytes_out.map_or_else(|| "-".to_owned(), bytes),
        match &flow.refusal {
            None => flow.by.text().to_owned(),
            Some(refusal) => format!("{} ({refusal})", flow.by.text()),
        },
    ]
}

/// What a filter asks for that does not exist.
fn missing(
    reader: &Reader,
    vip: Option<IpAddr>,
    port: Option<u16>,
    instance: Option<String>,
) -> anyhow::Result<Option<anyhow::Error>> {
    if let Some(asked) = vip {
        let vips = reader.vips()?;
        if !vips.iter().any(|vip| vip.address == asked) {
            let vips = vips.iter().map(|vip| vip.address.to_string());
            return Ok(Some(unknown("VIP", asked, vips)));
        }
    }
    if let Some(asked) = port {
        let ports = reader.ports()?;
        let of_vip = || ports.iter().filter(|p| vip.is_none_or(|vip| vip == p.vip));
        if !of_vip().any(|port| port.port == asked) {
            let ports = of_vip().map(|port| port.port.to_string());
            return Ok(Some(unknown("VIP port", asked, ports)));
        }
    }
    if let Some(asked) = instance {
        let backends = reader.backends()?;
        let is_meant = |b: &BackendView| b.instance == asked || asked.parse() == Ok(b.address);
        if !backends.iter().any(is_meant) {
            let instances = backends.iter().map(|backend| backend.instance.clone());
            return Ok(Some(unknown("instance", asked, instances)));
        }
    }
    Ok(None)
}

/// Whether a flow is only a leftover: it has ended, and guards nothing any more.
pub(super) fn is_expired(flow: &FlowView) -> bool {
    flow.state == FlowState::Closing && flow.idle_seconds >= CLOSING_GUARD as f64
}

fn row(flow: &FlowView) -> [String; 10] {
    let state = match flow.state {
        FlowState::Living => "living",
        FlowState::Young => "young",
        FlowState::Closing => "closing",
        FlowState::Refused => "refused",
    };
    [
        match flow.gone {
            true => format!("{state} (backend gone)"),
            false => state.to_owned(),
        },
        match flow.translated_port {
            None => end(flow.client, flow.client_port),
            Some(port) => format!("{} (as {port})", end(flow.client, flow.client_port)),
        },
        end(flow.vip, flow.vip_port),
        end(flow.pod, flow.pod_port),
        match flow.instance.as_str() {
            "" => "-".to_owned(),
            instance => instance.to_owned(),
        },
        ago(flow.age_seconds),
        ago(flow.idle_seconds),
        bytes(flow.bytes_in),
        flow.bytes_out.map_or_else(|| "-".to_owned(), bytes),
        match flow.handed_on {
            true => format!("{} (handed on)", flow.interface),
            false => flow.interface.clone(),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_closing_flow_expires_and_only_after_its_minute() {
        let flow = |state, idle_seconds| FlowView {
            state,
            client: [172, 22, 0, 101].into(),
            client_port: 40_000,
            vip: [172, 22, 0, 2].into(),
            vip_port: 6180,
            service: "ironic".into(),
            pod: [10, 244, 0, 11].into(),
            pod_port: 6180,
            instance: "ironic-0".into(),
            gone: false,
            translated_port: None,
            age_seconds: 7200.0,
            idle_seconds,
            bytes_in: 0,
            bytes_out: None,
            interface: "eth1".into(),
            last_hop: String::new(),
            handed_on: false,
        };
        assert!(!is_expired(&flow(FlowState::Closing, 59.9)));
        assert!(is_expired(&flow(FlowState::Closing, 60.0)));
        assert!(!is_expired(&flow(FlowState::Living, 7200.0)));
    }
}
