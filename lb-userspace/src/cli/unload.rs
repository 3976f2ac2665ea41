//! `ironlb unload`: take everything out of the kernel.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};

use super::{Output, OutputArgument, block_on, emit, emit_json};
use crate::dataplane::{self, UnloadReport};

/// Detach all programs and remove all maps: nothing is served any more.
///
/// Every flow that runs over a VIP ends. Refused while an agent runs, which would put it all back.
/// Where nothing is loaded there is nothing to do, which is a success. The record of ended flows on disk
/// (`ironlb flows --ended`) stays, for it tells what became of them: remove /var/lib/ironlb yourself.
#[derive(clap::Args)]
#[command(after_help = "\
Exit codes: 0 nothing is loaded any more, 1 error.

Examples:
  ironlb unload
  ironlb unload --bpffs /sys/fs/bpf/second
  ironlb unload --stay                 for a container that shall not be started again")]
pub(super) struct Arguments {
    /// Do not end when all is done, but on SIGTERM or SIGINT.
    #[arg(long)]
    stay: bool,
    #[command(flatten)]
    output: OutputArgument,
}

pub(super) fn run(arguments: &Arguments, bpffs: &Path) -> anyhow::Result<ExitCode> {
    let report = dataplane::unload(bpffs)?;
    let Arguments { stay, output } = arguments;
    match output.output {
        Output::Json => emit_json(&report)?,
        Output::Table => {
            let UnloadReport { links, maps } = &report;
            let mut text: String = links
                .iter()
                .map(|link| format!("detached {link}\n"))
                .collect();
            text += &match (links.is_empty(), maps.len()) {
                (true, 0) => format!("nothing was loaded at {}", bpffs.display()),
                (_, maps) => format!("removed {maps} map(s) from {}", bpffs.display()),
            };
            emit(&text)?;
        }
    }
    if *stay {
        block_on(async {
            let mut terminate = signal(SignalKind::terminate()).context("listen for signals")?;
            let mut interrupt = signal(SignalKind::interrupt()).context("listen for signals")?;
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            Ok(())
        })?;
    }
    Ok(ExitCode::SUCCESS)
}
