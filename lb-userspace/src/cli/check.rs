//! `ironlb check`: is a configuration file right?

use std::path::PathBuf;
use std::process::ExitCode;

use serde::Serialize;

use super::{FAILED, Output, OutputArgument, emit, emit_json};
use crate::config::{self, ConfigError, Problem};
use crate::plan::{self, Health, Nodes};

/// Check a configuration file without touching anything.
///
/// Every mistake is told with its place in the file. What is right but will not be served as written
/// (limits of the data plane) is told as a warning.
#[derive(clap::Args)]
#[command(after_help = "\
Exit codes: 0 the file can be served, 1 it cannot.

Examples:
  ironlb check /etc/ironlb/lb.yaml
  ironlb check --kubernetes lb.yaml
  ironlb check -o json lb.yaml | jq '.problems[].message'")]
pub(super) struct Arguments {
    /// The file.
    file: PathBuf,
    /// Check it as an agent with `--kubernetes` reads it: services come from there.
    #[arg(long)]
    kubernetes: bool,
    #[command(flatten)]
    output: OutputArgument,
}

#[derive(Serialize, Default)]
struct Report {
    valid: bool,
    problems: Vec<Problem>,
    /// Every one.
    warnings: Vec<String>,
    uplinks: usize,
    vips: usize,
    services: usize,
    shared_ports: usize,
    instance_ports: usize,
    backends: usize,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments {
        file,
        kubernetes,
        output,
    } = arguments;
    let state = match kubernetes {
        false => config::load(file),
        true => config::load_cluster(file).map(|config| config.state),
    };
    let mut brief = Vec::new();
    let (report, error) = match state {
        Ok(state) => {
            let (tables, warnings) =
                plan::plan(&state, &Health::default(), &Nodes::all_of(&state, ""));
            brief = plan::sentences(&warnings);
            let instance_ports = tables.ports.values().filter(|row| row.slot.is_some());
            let instance_ports = instance_ports.count();
            let report = Report {
                valid: true,
                problems: Vec::new(),
                warnings: warnings.iter().map(ToString::to_string).collect(),
                uplinks: state.uplinks.len(),
                vips: state.vips.len(),
                services: state.services.len(),
                shared_ports: tables.ports.len() - instance_ports,
                instance_ports,
                backends: state.services.iter().map(|s| s.backends.len()).sum(),
            };
            (report, None)
        }
        Err(error @ ConfigError::Read { .. }) => return Err(error.into()),
        Err(error) => {
            let mut report = Report::default();
            if let ConfigError::Invalid { problems, .. } = &error {
                report.problems.clone_from(problems);
            }
            (report, Some(error))
        }
    };
    match (output.output, &error) {
        (Output::Json, _) => emit_json(&report)?,
        (Output::Table, Some(error)) => eprintln!("{error}"),
        (Output::Table, None) => {
            for warning in brief {
                eprintln!("{}: warning: {warning}", file.display());
            }
            emit(&format!(
                "{}: good: {} uplink(s), {} VIP(s), {} service(s), {} shared and {} instance port(s), {} backend(s)",
                file.display(),
                report.uplinks,
                report.vips,
                report.services,
                report.shared_ports,
                report.instance_ports,
                report.backends,
            ))?;
        }
    }
    Ok(match error {
        None => ExitCode::SUCCESS,
        Some(_) => ExitCode::from(FAILED),
    })
}
