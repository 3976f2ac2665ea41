//! The command line: a file per verb, and what they share.

mod agent;
mod backends;
mod check;
mod completions;
mod counters;
mod doctor;
mod flows;
mod instance_env;
mod log_level;
mod monitor;
mod services;
mod status;
mod trace;
mod unload;

use std::fmt::Display;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use bytesize::ByteSize;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use comfy_table::Table;
use comfy_table::presets::NOTHING;

use crate::dataplane::{DEFAULT_BPFFS, DataplaneError};
use crate::plan::natural;

/// Exit code of a failure.
const FAILED: u8 = 1;
/// Exit code of arguments that mean nothing.
const WRONG_USAGE: u8 = 2;
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
  ironlb doctor --config lb.yaml       would this node serve it? what will bite?
  ironlb agent --config lb.yaml        serve it
  ironlb status                        what serves, and how packets end
  ironlb flows --client 172.22.0.101   which pod serves this host
  ironlb flows --ended --since 12h     what became of last night's downloads
  ironlb monitor                       what happens now
  ironlb trace --from 172.22.0.101:40000 --to 172.22.0.2:6385
                                       what would happen to this packet
  ironlb unload                        take everything out of the kernel"
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
    Status(status::Arguments),
    Services(services::Arguments),
    Backends(backends::Arguments),
    Flows(flows::Arguments),
    Counters(counters::Arguments),
    Monitor(monitor::Arguments),
    Trace(trace::Arguments),
    Doctor(doctor::Arguments),
    Unload(unload::Arguments),
    InstanceEnv(instance_env::Arguments),
    LogLevel(log_level::Arguments),
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
    let bpffs = match std::path::absolute(&bpffs) {
        Ok(bpffs) => bpffs,
        Err(error) => {
            eprintln!("ironlb: --bpffs {}: {error}", bpffs.display());
            return ExitCode::from(WRONG_USAGE);
        }
    };
    let result = match command {
        Command::Agent(arguments) => agent::run(arguments, &bpffs),
        Command::Check(arguments) => check::run(&arguments),
        Command::Status(arguments) => status::run(&arguments, &bpffs),
        Command::Services(arguments) => services::run(&arguments, &bpffs),
        Command::Backends(arguments) => backends::run(&arguments, &bpffs),
        Command::Flows(arguments) => flows::run(arguments, &bpffs),
        Command::Counters(arguments) => counters::run(&arguments, &bpffs),
        Command::Monitor(arguments) => monitor::run(&arguments, &bpffs),
        Command::Trace(arguments) => trace::run(&arguments, &bpffs),
        Command::Doctor(arguments) => doctor::run(arguments, &bpffs),
        Command::Unload(arguments) => unload::run(&arguments, &bpffs),
        Command::InstanceEnv(arguments) => instance_env::run(&arguments),
        Command::LogLevel(arguments) => log_level::run(&arguments),
        Command::Completions(arguments) => completions::run(&arguments, &mut Cli::command()),
    };
    result.unwrap_or_else(|error| {
        eprintln!("ironlb: {}", in_full(&error));
        let code = match error.downcast_ref() {
            Some(DataplaneError::NotLoaded { .. }) => NOT_LOADED,
            _ => FAILED,
        };
        ExitCode::from(code)
    })
}

/// An error with its causes, each told once: the text of many a library's error, and of ours, already
/// says what its cause says.
fn in_full(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text.extend([": ", &cause]);
        }
    }
    text
}

/// The error that a filter is for something that does not exist, with what there is.
fn unknown(
    what: &str,
    asked: impl Display,
    there_is: impl Iterator<Item = String>,
) -> anyhow::Error {
    let mut there_is: Vec<_> = there_is.collect();
    there_is.sort_unstable_by(|a, b| natural(a, b));
    there_is.dedup();
    match &there_is[..] {
        [] => anyhow!("no {what} is called `{asked}`: there is none at all"),
        some => anyhow!(
            "no {what} is called `{asked}`; there is {}",
            some_of(some, 10)
        ),
    }
}

/// The first of a list, and how many more there are.
fn some_of(list: &[String], limit: usize) -> String {
    let first = list[..list.len().min(limit)].join(", ");
    match list.len().saturating_sub(limit) {
        0 => first,
        more => format!("{first}, and {more} more"),
    }
}

/// Runs a future on a runtime of its own, on this thread.
fn block_on<T>(future: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?
        .block_on(future)
}

/// Writes to standard output. A reader that has seen enough (`head`) is not an error.
fn emit(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{}", text.trim_end()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(()),
    }
}

/// Writes a value as JSON.
fn emit_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    emit(&serde_json::to_string_pretty(value)?)
}

/// Columns for people. They align, and nothing is drawn around them, so that `grep` and `awk` work.
fn table<const N: usize>(header: &[&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(*header);
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

/// What there is, or a dash.
fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// A time for people: `3h 25m`, `12s`, `0.4s`.
fn ago(seconds: f64) -> String {
    if seconds < 10.0 {
        return format!("{seconds:.1}s");
    }
    let whole = Duration::from_secs(seconds as u64);
    let text = humantime::format_duration(whole).to_string();
    // The two largest units say enough.
    text.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

/// Bytes for people, in powers of 1024.
fn bytes(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}

/// A count for people: digits in groups of three.
fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_cause_is_told_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot read the file: {source}")]
        struct Twice {
            source: io::Error,
        }
        let source = io::Error::other("no such file");
        let error = anyhow::Error::new(Twice { source }).context("cannot start");
        assert_eq!(
            in_full(&error),
            "cannot start: cannot read the file: no such file"
        );
        assert_eq!(in_full(&anyhow!("a").context("b")), "b: a");
    }

    #[test]
    fn who_asks_for_what_there_is_not_is_told_what_there_is() {
        let instances = || ["ironic-10", "ironic-2", "ironic-2"].map(str::to_owned);
        assert_eq!(
            unknown("instance", "ironic-3", instances().into_iter()).to_string(),
            "no instance is called `ironic-3`; there is ironic-2, ironic-10"
        );
        let many = (6200..6232).map(|port| port.to_string());
        assert_eq!(
            unknown("VIP port", 0, many).to_string(),
            "no VIP port is called `0`; there is 6200, 6201, 6202, 6203, 6204, 6205, 6206, 6207, 6208, 6209, and 22 more"
        );
        assert_eq!(
            unknown("VIP", "172.22.0.2", std::iter::empty()).to_string(),
            "no VIP is called `172.22.0.2`: there is none at all"
        );
    }

    #[test]
    fn quantities_are_readable() {
        assert_eq!(count(7), "7");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(bytes(256 << 20), "256.0 MiB");
        assert_eq!(ago(0.42), "0.4s");
        assert_eq!(ago(59.9), "59s");
        assert_eq!(ago(3.0 * 3600.0 + 125.0), "3h 2m");
    }
}
