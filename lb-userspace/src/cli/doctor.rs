//! `ironlb doctor`: what of this node would keep ironlb from serving, or will bite.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::Serialize;

use super::{FAILED, Output, OutputArgument, emit, emit_json, table};
use crate::agent;
use crate::doctor::{self, Finding, Options, Status};

/// Look for what keeps ironlb from serving on this node, and for what will bite, and say what to do about it.
///
/// Looks at kernel, rights, interfaces, routes, firewall and VIPs of the network namespace that it runs in. Changes
/// nothing; asks three times by ARP or neighbor solicitation who answers for each VIP, and claims none. Works before the
/// first start (with --config), with the agent dead (from the pinned maps), and as far as it goes without root.
#[derive(clap::Args)]
#[command(after_help = "\
Exit codes: 0 no error (with --strict: no warning either), 1 at least one.

Examples:
  ironlb doctor --config /etc/ironlb/lb.yaml     before the first start
  ironlb doctor                                  of what is served here, agent or not
  ironlb doctor -o json | jq '.findings[] | select(.status == \"error\")'")]
pub(super) struct Arguments {
    /// The configuration file; without it, what the pinned maps say.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Read the file as an agent with `--kubernetes` does: services come from the pinned maps.
    #[arg(long, requires = "config")]
    kubernetes: bool,
    /// This node's name as the file calls it, which tells what backends are here [default: the host's name].
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    node_name: Option<String>,
    /// Warnings count as errors.
    #[arg(long)]
    strict: bool,
    /// Ask nobody who answers for the VIPs.
    #[arg(long)]
    no_probe: bool,
    #[command(flatten)]
    output: OutputArgument,
}

#[derive(Serialize)]
struct Report<'a> {
    errors: usize,
    warnings: usize,
    skipped: usize,
    findings: &'a [Finding],
}

pub(super) fn run(arguments: Arguments, bpffs: &Path) -> anyhow::Result<ExitCode> {
    let Arguments {
        config,
        kubernetes,
        node_name,
        strict,
        no_probe,
        output,
    } = arguments;
    let findings = doctor::examine(&Options {
        config,
        kubernetes,
        node: agent::node_name(node_name),
        bpffs: bpffs.to_owned(),
        probe: !no_probe,
    });
    let count = |status| findings.iter().filter(|f| f.status == status).count();
    let report = Report {
        errors: count(Status::Error),
        warnings: count(Status::Warning),
        skipped: count(Status::Skipped),
        findings: &findings,
    };
    match output.output {
        Output::Json => emit_json(&report)?,
        Output::Table => emit(&describe(&report))?,
    }
    let is_ill = report.errors > 0 || strict && report.warnings > 0;
    Ok(match is_ill {
        false => ExitCode::SUCCESS,
        true => ExitCode::from(FAILED),
    })
}

/// What is worst first.
fn describe(report: &Report<'_>) -> String {
    let mut findings: Vec<_> = report.findings.iter().collect();
    findings.sort_by_key(|finding| finding.status);
    let good = findings.iter().filter(|f| f.status == Status::Ok).count();
    format!(
        "{}\n\n{} error(s), {} warning(s), {} not seen, {good} good",
        table(
            &["STATUS", "CHECK", "ON", "FOUND"],
            findings.into_iter().map(row)
        ),
        report.errors,
        report.warnings,
        report.skipped,
    )
}

fn row(finding: &Finding) -> [String; 4] {
    let Finding {
        check,
        on,
        status,
        found,
        remedy,
    } = finding;
    let status = match status {
        Status::Error => "error",
        Status::Warning => "warning",
        Status::Skipped => "skipped",
        Status::Ok => "ok",
    };
    let mut text = found.clone();
    if let Some(remedy) = remedy {
        text.extend(["\n→ ", remedy]);
    }
    let on = if on.is_empty() { "-" } else { on };
    [status.to_owned(), check.name(), on.to_owned(), text]
}
