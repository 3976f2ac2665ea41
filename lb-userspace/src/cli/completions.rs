//! `ironlb completions`: a shell's completion script.

use std::process::ExitCode;

use anyhow::Context as _;

use super::emit;

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
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, command, "ironlb", &mut script);
    emit(&String::from_utf8(script).context("the completion script is not text")?)?;
    Ok(ExitCode::SUCCESS)
}
