//! `ironlb flows`: who talks to which pod.

use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;

use clap::ValueEnum;

use super::{Output, OutputArgument, ago, bytes, emit, emit_json, table};
use crate::dataplane::read::{FlowFilter, FlowState, FlowView, Reader};

/// Rows of a table unless somebody asks for more.
const TABLE_LIMIT: usize = 100;

/// Show the flows: who talks to which pod, since when, and how much.
///
/// A flow is young until the pod has answered; living ones stay, idle or not, until they end; closing
/// ones have ended and keep their port from being reused too early. Reads the pinned maps alone, so it
/// works with the agent dead.
#[derive(clap::Args)]
#[command(after_help = "\
Exit codes: 0 success, 1 error, 3 nothing is loaded at that root.

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
        limit,
        output: OutputArgument { output },
    } = arguments;
    let mut flows = Reader::open(bpffs)?.flows(&FlowFilter {
        client,
        vip,
        vip_port: port,
        backend: instance,
        state: state.map(|state| match state {
            State::Living => FlowState::Living,
            State::Young => FlowState::Young,
            State::Closing => FlowState::Closing,
            State::Refused => FlowState::Refused,
        }),
    })?;
    let all = flows.len();
    match limit {
        Some(0) => {}
        Some(limit) => flows.truncate(limit),
        None if output == Output::Table => flows.truncate(TABLE_LIMIT),
        None => {}
    }
    match output {
        Output::Json => emit_json(&flows)?,
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
    Ok(ExitCode::SUCCESS)
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
        match flow.state {
            FlowState::Living => bytes(flow.bytes_out),
            // Replies are counted with the entry that only a living flow has.
            FlowState::Young | FlowState::Closing | FlowState::Refused => "-".to_owned(),
        },
        flow.interface.clone(),
    ]
}
