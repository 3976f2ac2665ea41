//! `ironlb counters`: how packets ended, in words.

use std::path::Path;
use std::process::ExitCode;

use super::{Output, OutputArgument, count, emit, emit_json, table};
use crate::dataplane::read::Reader;

/// Show how packets ended, and what each verdict means.
///
/// Every packet that the programs look at gets exactly one verdict. Reads the pinned maps alone, so
/// it works with the agent dead.
#[derive(clap::Args)]
#[command(after_help = "\
Exit codes: 0 success, 1 error, 3 nothing is loaded at that root.

Examples:
  ironlb counters                      those that are not zero
  ironlb counters --all                every verdict there is
  watch -d ironlb counters")]
pub(super) struct Arguments {
    /// Show those that never happened too.
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    output: OutputArgument,
}

pub(super) fn run(arguments: &Arguments, bpffs: &Path) -> anyhow::Result<ExitCode> {
    let Arguments { all, output } = arguments;
    let mut verdicts = Reader::open(bpffs)?.verdicts()?;
    verdicts.retain(|verdict| *all || verdict.packets > 0);
    match output.output {
        Output::Json => emit_json(&verdicts)?,
        Output::Table => emit(&table(
            &["VERDICT", "PACKETS", "MEANING"],
            verdicts.iter().map(|verdict| {
                [
                    verdict.verdict.to_owned(),
                    count(verdict.packets),
                    verdict.explanation.to_owned(),
                ]
            }),
        ))?,
    }
    Ok(ExitCode::SUCCESS)
}
