//! `ironlb completions`: a shell's completion script.

use std::io;
use std::process::ExitCode;

/// Print the completion script of a shell.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ironlb completions bash > /etc/bash_completion.d/ironlb
  source <(ironlb completions zsh)")]
pub(super) struct Arguments {
    /// Which shell.
    shell: clap_complete::Shell,
}

pub(super) fn run(arguments: &Arguments, command: &mut clap::Command) -> anyhow::Result<ExitCode> {
    clap_complete::generate(arguments.shell, command, "ironlb", &mut io::stdout());
    Ok(ExitCode::SUCCESS)
}
