//! `ironlb flows`: who talks to which pod.

use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;

use clap::ValueEnum;
use lb_common::CLOSING_GUARD;

use super::{Output, OutputArgument, ago, bytes, emit, emit_json, table, unknown};
use crate::dataplane::read::{BackendView, FlowFilter, FlowState, FlowView, Reader};

/// Rows of a table unless somebody asks for more.
const TABLE_LIMIT: usize = 100;

/// Show the flows: who talks to which pod, since when, and how much.
///
/// A flow is young until the pod has answered; living ones stay, idle or not, until they end; closing
/// ones have ended and keep their port from being reused for a minute. Reads the pinned maps alone, so
/// it works with the agent dead.
#[derive(clap::Args)]
#[command(after_help = "\
Exit codes: 0 success, 1 error or no such VIP, port or instance, 3 nothing is loaded at that root.

Examples:
  ironlb flows --client 172.22.0.101
  ironlb flows --vip 172.22.0.2 --port 6180 --state living
  ironlb flows --instance ironic-1 --limit 0
  ironlb flows -o json | jq 'map(select(.idle_seconds > 3600))'")]
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
    #[arg(long, value_enum)]
    state: Option<State>,
    /// Closing ones whose minute is over, too: they stay in the table until somebody needs their place.
    #[arg(long)]
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
    let Arguments {
        client,
        vip,
        port,
        instance,
        state,
        all: with_expired,
        limit,
        output: OutputArgument { output },
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
            None => format!("{}:{}", flow.client, flow.client_port),
            Some(port) => format!("{}:{} (as {port})", flow.client, flow.client_port),
        },
        format!("{}:{}", flow.vip, flow.vip_port),
        format!("{}:{}", flow.pod, flow.pod_port),
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
