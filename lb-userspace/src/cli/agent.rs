//! `ironlb agent`: serve what a configuration file or Kubernetes says.

use std::io::{self, IsTerminal as _};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use lb_common::{DEFAULT_LIVING_FLOWS, DEFAULT_YOUNG_FLOWS};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::{EnvFilter, reload};

use crate::agent::{self, Kubernetes, Options};
use crate::dataplane;
use crate::ended::DEFAULT_STATE_DIR;
use crate::http::{self, LogFilter};

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
At --listen: /metrics, /healthz, /readyz, /v1/instances/self (for `ironlb instance-env`) and
/v1/log-level (for `ironlb log-level`). Hosts that come by an uplink are refused there, unless the
uplink carries one of --node-address.

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
    /// This node's name: in Kubernetes, and among its peers [default there: the host's name].
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    node_name: Option<String>,
    /// Namespace of the agents in Kubernetes, for their Leases; that of the ServiceAccount by default.
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME")]
    namespace: Option<String>,
    /// Folder in which an agent in Kubernetes remembers its peers and their key, for a start while the API is away.
    #[arg(long, value_name = "FOLDER", default_value = "/run/ironlb")]
    run_dir: PathBuf,
    /// Folder in which ended flows are recorded for `ironlb flows --ended`: 1 MiB at most. One that cannot be
    /// written disturbs nothing else.
    #[arg(long, value_name = "FOLDER", default_value = DEFAULT_STATE_DIR)]
    state_dir: PathBuf,
    /// Flows that last: room is taken at once, about 280 bytes each. Fixed when the maps are made.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_LIVING_FLOWS, value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    living_flows: u32,
    /// Flows that begin or end. Fixed when the maps are made.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_YOUNG_FLOWS, value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    young_flows: u32,
    /// Detach everything at the end instead of leaving it running.
    #[arg(long)]
    detach_on_exit: bool,
    /// Where metrics and probes are served: an address with a port, or `none`
    /// [default: port 9469 on all addresses].
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = listen)]
    listen: Option<Listen>,
    /// The node's internal addresses, by comma. Without them, an uplink with a default route is taken
    /// for the one that carries them.
    #[arg(
        long,
        value_name = "IP",
        env = "HOST_IP",
        value_delimiter = ',',
        hide_env_values = true
    )]
    node_address: Vec<IpAddr>,
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

/// Where to listen.
#[derive(Clone, Copy)]
enum Listen {
    Nowhere,
    At(SocketAddr),
}

fn listen(text: &str) -> Result<Listen, String> {
    match text {
        "none" => Ok(Listen::Nowhere),
        address => address.parse().map(Listen::At).map_err(|_| {
            "neither `none` nor an address with a port, such as 127.0.0.1:9469 or [::]:9469"
                .to_owned()
        }),
    }
}

/// The subscriber's filter with its handle, and the text that it came from.
struct Reloadable<S> {
    handle: reload::Handle<EnvFilter, S>,
}

impl<S> LogFilter for Reloadable<S> {
    fn get(&self) -> String {
        let filter = match self.handle.with_current(ToString::to_string) {
            Ok(filter) => filter,
            Err(error) => return error.to_string(),
        };
        let said = filter.split(',').filter(|part| *part != QUIET);
        said.collect::<Vec<_>>().join(",")
    }

    fn set(&self, filter: &str) -> Result<(), String> {
        let new = parse_filter(filter).map_err(|error| super::in_full(&error))?;
        self.handle.reload(new).map_err(|error| error.to_string())
    }
}

/// The Kubernetes client logs every try that fails; we tell those that matter, once. A filter that names
/// it wins.
const QUIET: &str = "kube_client=off";

fn parse_filter(text: &str) -> anyhow::Result<EnvFilter> {
    // The parser takes a misspelt level for the name of a module, and would then log nothing else.
    for part in text.split(',') {
        let level = part.rsplit_once('=').map_or(part, |(_, level)| level);
        let level = level.trim();
        if level.is_empty() || level.parse::<LevelFilter>().is_err() {
            bail!(
                "`{part}` is not a log level: off, error, warn, info, debug or trace, or MODULE=LEVEL; several by comma"
            );
        }
    }
    EnvFilter::try_new(format!("{QUIET},{text}"))
        .with_context(|| format!("`{text}` is not a log level or filter"))
}

pub(super) fn run(arguments: Arguments, bpffs: &Path) -> anyhow::Result<ExitCode> {
    let Arguments {
        config,
        kubernetes,
        node_name,
        namespace,
        run_dir,
        state_dir,
        living_flows,
        young_flows,
        detach_on_exit,
        listen,
        node_address,
        log_format,
        log_level,
    } = arguments;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(parse_filter(&log_level)?)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr);
    let log: Arc<dyn LogFilter> = match log_format {
        LogFormat::Text => {
            let builder = builder.with_filter_reloading();
            let handle = builder.reload_handle();
            builder.init();
            Arc::new(Reloadable { handle })
        }
        LogFormat::Json => {
            let builder = builder.json().with_filter_reloading();
            let handle = builder.reload_handle();
            builder.init();
            Arc::new(Reloadable { handle })
        }
    };
    let http = |listen| http::Options {
        listen,
        node_addresses: node_address,
        bpffs: bpffs.to_owned(),
    };
    agent::run(Options {
        config,
        node: agent::node_name(node_name),
        kubernetes: kubernetes.then_some(Kubernetes { namespace, run_dir }),
        dataplane: dataplane::Options {
            bpffs: bpffs.to_owned(),
            living_flows,
            young_flows,
        },
        state_dir,
        detach_on_exit,
        http: match listen {
            Some(Listen::Nowhere) => None,
            Some(Listen::At(address)) => Some(http(Some(address))),
            None => Some(http(None)),
        },
        log,
    })?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_level_is_no_module() {
        for good in ["info", "OFF", "warn,ironlb=trace", "ironlb::plan=debug"] {
            assert!(parse_filter(good).is_ok(), "{good}");
        }
        for bad in [
            "inof",
            "bogus=",
            "info,",
            "",
            "ironlb=verbose",
            "ironlb::plan",
        ] {
            let text = parse_filter(bad).expect_err(bad).to_string();
            assert!(text.contains("is not a log level: off, error"), "{text}");
        }
    }
}
