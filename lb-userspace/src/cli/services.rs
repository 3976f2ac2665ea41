//! `ironlb services`: VIP ports and what is behind them.

use std::path::Path;
use std::process::ExitCode;

use super::{Output, OutputArgument, bytes, count, emit, emit_json, or_dash, some_of, table};
use crate::dataplane::read::{PortView, Reader};

/// Show the VIP ports, how many backends are behind them, and their traffic.
///
/// Reads the pinned maps alone, so it works with the agent dead.
#[derive(clap::Args)]
#[command(after_help = "\
Exit codes: 0 success, 1 error, 3 nothing is loaded at that root.

READY counts the backends that take new flows among those that exist: a port with none refuses new
connections. A port with a slot belongs to one instance and is never another's. FROM are the source ranges
that new connections must come from, where not all are admitted.

Examples:
  ironlb services
  ironlb services -o json | jq '.[] | select(.eligible == 0) | .port'")]
pub(super) struct Arguments {
    #[command(flatten)]
    output: OutputArgument,
}

pub(super) fn run(arguments: &Arguments, bpffs: &Path) -> anyhow::Result<ExitCode> {
    let ports = Reader::open(bpffs)?.ports()?;
    match arguments.output.output {
        Output::Json => emit_json(&ports)?,
        Output::Table => emit(&table(
            &[
                "VIP", "SERVICE", "PORT", "SLOT", "FROM", "READY", "BACKENDS", "FLOWS", "IN", "OUT",
            ],
            ports.iter().map(row),
        ))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn row(port: &PortView) -> [String; 10] {
    let instances: Vec<_> = port
        .backends
        .iter()
        .map(|backend| match backend.eligible {
            true => backend.instance.clone(),
            false => format!("{} (not ready)", backend.instance),
        })
        .collect();
    [
        format!("{}:{}", port.vip, port.port),
        port.service.clone(),
        port.name.clone(),
        or_dash(port.slot),
        match &port.source_ranges {
            None => "-".to_owned(),
            Some(ranges) if ranges.is_empty() => "nowhere".to_owned(),
            Some(ranges) => {
                let ranges: Vec<_> = ranges.iter().map(ToString::to_string).collect();
                some_of(&ranges, 2)
            }
        },
        match port.serving {
            true => format!("{}/{}", port.eligible, port.backends.len()),
            false => "leaving".to_owned(),
        },
        match &instances[..] {
            [] => "-".to_owned(),
            some => some_of(some, 4),
        },
        count(port.traffic.flows),
        bytes(port.traffic.bytes_in),
        bytes(port.traffic.bytes_out),
    ]
}
