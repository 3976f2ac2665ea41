//! `ironlb agent`: serve what a configuration file or Kubernetes says.

use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::ValueEnum;
use lb_common::{DEFAULT_LIVING_FLOWS, DEFAULT_YOUNG_FLOWS};
use tracing_subscriber::EnvFilter;

use crate::agent::{self, Kubernetes, Options};
use crate::dataplane;

/// Serve a configuration file, or with `--kubernetes` the Services of a cluster: load the programs,
/// attach them, and keep the tables in step.
///
/// The data plane does not need the agent: it goes on serving when the agent ends or dies, and the
/// next one takes it over without an interruption. The file is read again when it changes and on
/// SIGHUP; a bad file is told and the last good one goes on serving. Health checks take backends that
/// do not answer out of the choice for new flows; a backend counts as ready until it has failed its
/// checks, also after a restart.
///
/// With `--kubernetes` the file has uplinks and VIPs, and who may use them; services and backends come
/// from the API that the pod's ServiceAccount or KUBECONFIG names. While that is out of reach, the last
/// state goes on serving.
#[derive(clap::Args)]
#[command(after_help = "\
Signals: SIGHUP reads the file again; SIGTERM and SIGINT end the agent and leave the data plane
running, unless --detach-on-exit is given.

Examples:
  ironlb agent --config /etc/ironlb/lb.yaml
  ironlb agent --config lb.yaml --detach-on-exit --log-level debug
  ironlb agent --config lb.yaml --kubernetes --node-name node-a
  ironlb agent --config lb.yaml --bpffs /sys/fs/bpf/second   a second agent, on other interfaces")]
pub(super) struct Arguments {
    /// The configuration file; `ironlb check` tells whether it is right.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Take services from Kubernetes.
    #[arg(long, requires = "node_name")]
    kubernetes: bool,
    /// This node's name in Kubernetes.
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    node_name: Option<String>,
    /// Namespace of the agents in Kubernetes, for their Leases; that of the ServiceAccount by default.
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME")]
    namespace: Option<String>,
    /// Flows that last: room is taken at once, about 280 bytes each. Fixed when the maps are made.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_LIVING_FLOWS, value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    living_flows: u32,
    /// Flows that begin or end. Fixed when the maps are made.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_YOUNG_FLOWS, value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    young_flows: u32,
    /// Detach everything at the end instead of leaving it running.
    #[arg(long)]
    detach_on_exit: bool,
    /// How the log is written (to standard error).
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
    /// What is logged: error, warn, info, debug or trace, or a filter such as `info,ironlb::health=debug`.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: String,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogFormat {
    /// A line for people.
    Text,
    /// A JSON object a line.
    Json,
}

pub(super) fn run(arguments: Arguments, bpffs: &Path) -> anyhow::Result<ExitCode> {
    let Arguments {
        config,
        kubernetes,
        node_name,
        namespace,
        living_flows,
        young_flows,
        detach_on_exit,
        log_format,
        log_level,
    } = arguments;
    let filter = EnvFilter::try_new(&log_level)
        .with_context(|| format!("`{log_level}` is not a log level or filter"))?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr);
    match log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    agent::run(Options {
        config,
        kubernetes: node_name
            .filter(|_| kubernetes)
            .map(|node| Kubernetes { node, namespace }),
        dataplane: dataplane::Options {
            bpffs: bpffs.to_owned(),
            living_flows,
            young_flows,
        },
        detach_on_exit,
    })?;
    Ok(ExitCode::SUCCESS)
}
