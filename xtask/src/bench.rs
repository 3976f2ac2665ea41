//! `cargo xtask bench`: what the data plane costs, by itself and next to plain routing and nftables.

use std::path::PathBuf;

use anyhow::{Context as _, Result};

use crate::laboratory;

/// Options of `cargo xtask bench`.
#[derive(clap::Args)]
pub struct Options {
    /// Write the figures to this file as well.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Fewer rounds: minutes instead of a quarter of an hour, and wider intervals.
    #[arg(long)]
    quick: bool,
}

/// Runs the bench, which is a binary of the laboratory's crate.
///
/// # Errors
/// When it cannot measure; figures that miss their goal are no error.
pub fn run(Options { json, quick }: Options) -> Result<()> {
    let mut arguments = Vec::new();
    if let Some(file) = json {
        let file =
            std::path::absolute(&file).with_context(|| format!("resolve {}", file.display()))?;
        arguments.extend(["--json".to_owned(), file.display().to_string()]);
    }
    if quick {
        arguments.push("--quick".to_owned());
    }
    laboratory::run("bench", &arguments)
}
