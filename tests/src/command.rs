//! Running commands: every failure names the command and what it wrote to stderr.

use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Runs a command to its end and returns its stdout.
///
/// # Errors
/// When it cannot be started or does not succeed; the message holds the command and its stderr.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {command:?}"))?;
    success(command, output)
}

/// As [`run`], with `input` on the command's stdin.
///
/// # Errors
/// As [`run`].
pub fn run_with_input(command: &mut Command, input: &str) -> Result<String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {command:?}"))?;
    let written = child
        .stdin
        .take()
        .map_or(Ok(()), |mut stdin| stdin.write_all(input.as_bytes()));
    let output = child
        .wait_with_output()
        .with_context(|| format!("cannot wait for {command:?}"))?;
    let stdout =
        success(command, output).with_context(|| format!("its input was:\n{}", input.trim()))?;
    written.with_context(|| format!("cannot write to stdin of {command:?}"))?;
    Ok(stdout)
}

fn success(command: &Command, output: Output) -> Result<String> {
    if !output.status.success() {
        bail!(
            "{command:?} ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    String::from_utf8(output.stdout).with_context(|| format!("{command:?} wrote bytes, not text"))
}

/// Asks `condition` every 20 ms until it holds.
///
/// # Errors
/// When it does not within `limit`, or cannot be asked.
pub fn wait_until(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let end = Instant::now() + limit;
    loop {
        if condition().with_context(|| format!("waiting until {what}"))? {
            return Ok(());
        }
        if Instant::now() > end {
            bail!("waited {limit:?} in vain until {what}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
