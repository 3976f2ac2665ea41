//! `cargo xtask demo`: ironlb at work in the laboratory, as a report to read.

use anyhow::Result;

use crate::laboratory;

/// Options of `cargo xtask demo`.
#[derive(clap::Args)]
pub struct Options {
    /// Leave the laboratory up, and say how to play with it.
    #[arg(long, conflicts_with = "down")]
    keep: bool,
    /// End what `--keep` left.
    #[arg(long)]
    down: bool,
}

/// Runs the demo, which is a binary of the laboratory's crate.
///
/// # Errors
/// When something that the demo shows is not as it must be.
pub fn run(Options { keep, down }: Options) -> Result<()> {
    let mut arguments = Vec::new();
    if keep {
        arguments.push("--keep".to_owned());
    }
    if down {
        arguments.push("--down".to_owned());
    }
    laboratory::run("demo", &arguments, None)
}
