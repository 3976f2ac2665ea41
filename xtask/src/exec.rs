//! Running other programs, and saying what is being done and how long it took.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// The repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a folder of the repository")
}

/// A command that runs in the repository.
///
/// Without the variables that `cargo run` set for xtask itself: its library path would send a toolchain outside
/// rustup to the wrong libraries.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).env_remove("LD_LIBRARY_PATH");
    command
}

/// Runs a command to its end; its output goes to the terminal.
///
/// # Errors
/// When it cannot be started, or ends with anything but success.
pub fn exec(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("start {command:?}"))?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}

/// Runs a command to its end and returns what it printed.
///
/// # Errors
/// When it cannot be started, or ends with anything but success: then what it said is part of the error.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("start {command:?}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{command:?} ended with {}: {}", output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Where a program is, by `PATH` and the folders of administrators' programs.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|directory| directory.join(program))
        .find(|candidate| candidate.is_file())
}

/// Does one piece of work under a headline, and says how long it took.
///
/// # Errors
/// Those of the work, with the headline as context.
pub fn stage<T>(what: &str, why: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprintln!("==> {what} ({why})");
    let started = Instant::now();
    let done = work().with_context(|| format!("could not {what}"))?;
    eprintln!("    done in {}", elapsed(started.elapsed()));
    Ok(done)
}

/// A duration as people say it.
pub fn elapsed(duration: Duration) -> String {
    match duration.as_secs() {
        seconds @ 60.. => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{:.1} s", duration.as_secs_f64()),
    }
}
