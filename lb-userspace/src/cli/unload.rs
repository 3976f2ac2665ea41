//! `ironlb unload`: take everything out of the kernel.

use std::path::Path;
use std::process::ExitCode;

use super::{Output, OutputArgument, emit, emit_json};
use crate::dataplane::{self, UnloadReport};

/// Detach all programs and remove all maps: nothing is served any more.
///
/// Every flow that runs over a VIP ends. Refused while an agent runs, which would put it all back.
/// Where nothing is loaded there is nothing to do, which is a success.
#[derive(clap::Args)]
#[command(after_help = "\
Exit codes: 0 nothing is loaded any more, 1 error.

Examples:
  ironlb unload
  ironlb unload --bpffs /sys/fs/bpf/second")]
pub(super) struct Arguments {
    #[command(flatten)]
    output: OutputArgument,
}

pub(super) fn run(arguments: &Arguments, bpffs: &Path) -> anyhow::Result<ExitCode> {
    let report = dataplane::unload(bpffs)?;
    match arguments.output.output {
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
    Ok(ExitCode::SUCCESS)
}
