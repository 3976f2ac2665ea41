//! The command line: a file per verb, and what they share.

mod agent;
mod check;
mod completions;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

use crate::dataplane::{DEFAULT_BPFFS, DataplaneError};

/// Exit code of a failure.
const FAILED: u8 = 1;
/// Exit code where there is nothing to look at.
const NOT_LOADED: u8 = 3;

/// An L4 load balancer in XDP that puts Ironic's TCP ports on a provisioning network.
#[derive(Parser)]
#[command(
    name = "ironlb",
    version,
    propagate_version = true,
    after_help = "\
Exit codes: 0 success, 1 error, 2 wrong usage, 3 nothing is loaded at that root.

Examples:
  ironlb check lb.yaml                 is this file right? touches nothing
  ironlb agent --config lb.yaml        serve it"
)]
struct Cli {
    /// Where the maps and links are pinned: one agent a root.
    #[arg(long, global = true, value_name = "DIR", default_value = DEFAULT_BPFFS)]
    bpffs: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Agent(agent::Arguments),
    Check(check::Arguments),
    Completions(completions::Arguments),
}

/// How a report is written.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// A table for people.
    Table,
    /// JSON for programs: raw numbers, bytes and nanoseconds.
    Json,
}

#[derive(Args)]
struct OutputArgument {
    /// How the report is written.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// Parses the arguments, runs the verb, and tells how it went.
pub fn main() -> ExitCode {
    let Cli { bpffs, command } = Cli::parse();
    let result = match command {
        Command::Agent(arguments) => agent::run(arguments, &bpffs),
        Command::Check(arguments) => check::run(&arguments),
        Command::Completions(arguments) => completions::run(&arguments, &mut Cli::command()),
    };
    result.unwrap_or_else(|error| {
        eprintln!("ironlb: {error:#}");
        let code = match error.downcast_ref() {
            Some(DataplaneError::NotLoaded { .. }) => NOT_LOADED,
            _ => FAILED,
        };
        ExitCode::from(code)
    })
}

/// Prints a value as JSON.
fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}
