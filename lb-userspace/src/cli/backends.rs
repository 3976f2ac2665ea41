//! `ironlb backends`: pods behind VIP ports.

use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;

use super::{Output, OutputArgument, bytes, count, emit, emit_json, or_dash, table, unknown};
use crate::dataplane::read::{BackendView, Reader};

/// Show the pods behind every VIP port, whether they take new flows, and their traffic.
///
/// Reads the pinned maps alone, so it works with the agent dead.
#[derive(clap::Args)]
#[command(after_help = "\
Exit codes: 0 success, 1 error or no such instance, 3 nothing is loaded at that root.

A backend that is not ready keeps its flows; new ones go elsewhere.

Examples:
  ironlb backends
  ironlb backends --instance ironic-1
  ironlb backends -o json | jq '.[] | select(.eligible | not) | .instance'")]
pub(super) struct Arguments {
    /// Only this instance.
    #[arg(long, value_name = "NAME")]
    instance: Option<String>,
    #[command(flatten)]
    output: OutputArgument,
}

pub(super) fn run(arguments: &Arguments, bpffs: &Path) -> anyhow::Result<ExitCode> {
    let Arguments { instance, output } = arguments;
    let mut backends = Reader::open(bpffs)?.backends()?;
    let mut missing = None;
    if let Some(instance) = instance {
        let all = backends.iter().map(|backend| backend.instance.clone());
        missing = Some(unknown("instance", instance, all));
        backends.retain(|backend| *instance == backend.instance);
    }
    let missing = missing.filter(|_| backends.is_empty());
    match output.output {
        Output::Json => emit_json(&backends)?,
        Output::Table if missing.is_some() => {}
        Output::Table => emit(&table(
            &[
                "INSTANCE", "POD", "NODE", "STATE", "VIP", "SERVICE", "PORT", "FLOWS", "IN", "OUT",
            ],
            backends.iter().map(row),
        ))?,
    }
    missing.map_or(Ok(ExitCode::SUCCESS), Err)
}

fn row(backend: &BackendView) -> [String; 10] {
    let state = match backend.eligible {
        true => "ready",
        false => "not ready",
    };
    [
        backend.instance.clone(),
        SocketAddr::new(backend.address, backend.port).to_string(),
        or_dash(backend.node.as_ref()),
        match backend.host_network {
            true => format!("{state} (host network)"),
            false => state.to_owned(),
        },
        match (backend.vip, backend.vip_port) {
            (Some(vip), Some(port)) => format!("{vip}:{port}"),
            _ => "-".to_owned(),
        },
        backend.service.clone(),
        backend.port_name.clone(),
        count(backend.traffic.flows),
        bytes(backend.traffic.bytes_in),
        bytes(backend.traffic.bytes_out),
    ]
}
