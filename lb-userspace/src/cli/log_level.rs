//! `ironlb log-level`: what a running agent logs.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;

use anyhow::bail;
use hyper::Method;

use super::{block_on, emit};
use crate::http::{LOG_LEVEL_PATH, PORT, client};

/// Show or change what the running agent logs, until it ends.
#[derive(clap::Args)]
#[command(after_help = "\
Exit codes: 0 success, 1 error.

Examples:
  ironlb log-level                            what is logged now
  ironlb log-level debug
  ironlb log-level info,ironlb::health=debug
  kubectl -n ironlb exec POD -- ironlb log-level debug")]
pub(super) struct Arguments {
    /// error, warn, info, debug or trace, or a filter such as `info,ironlb::health=debug`.
    level: Option<String>,
    /// Where the agent listens, on this node's loopback.
    #[arg(long, value_name = "ADDRESS:PORT", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT)))]
    agent: SocketAddr,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments { level, agent } = arguments;
    let (method, body) = match level {
        Some(level) => (Method::PUT, level.clone()),
        None => (Method::GET, String::new()),
    };
    let (status, answer) = block_on(client::ask(*agent, method, LOG_LEVEL_PATH, body))?;
    if !status.is_success() {
        bail!("the agent at {agent} refuses: {}", answer.trim_end());
    }
    emit(&answer)?;
    Ok(ExitCode::SUCCESS)
}
