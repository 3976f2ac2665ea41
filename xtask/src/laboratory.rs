//! Binaries of the `ironlb-tests` crate that work in the laboratory: `demo` and `bench`.
//!
//! They are children rather than modules because building them takes the eBPF toolchain, which xtask
//! itself must do without. Whatever happens to one, what it left of its laboratory is removed here.

use std::path::Path;

use anyhow::{Result, bail};

use crate::exec::{Interrupt, Supervised, clean_up, command, exec, stage, target_directory};
use crate::setup;

/// Builds ironlb and the programs of its laboratory; `about` is what to know of that.
///
/// # Errors
/// When that fails.
pub fn build(about: &str) -> Result<()> {
    stage("build ironlb and its laboratory", about, || {
        exec(command("cargo").args([
            "build",
            "--package",
            "lb-userspace",
            "--package",
            "ironlb-tests",
        ]))
    })
}

/// Sets the machine up, builds everything, and runs a binary with arguments to its end; with another ironlb than the one that
/// is built here, if any.
///
/// # Errors
/// When it fails, or the user has interrupted it.
pub fn run(binary: &str, arguments: &[String], ironlb: Option<&Path>) -> Result<()> {
    setup::ensure()?;
    build("a minute or two at first")?;
    let target = target_directory()?;
    let status = Supervised::start(
        command(target.join(binary))
            .args(arguments)
            .env("IRONLB", ironlb.unwrap_or(&target.join("ironlb"))),
        Interrupt::Kill,
    )?
    .wait();
    sweep()?;
    let status = status?;
    if !status.success() {
        bail!("the {binary} has failed: see above");
    }
    Ok(())
}

/// Removes laboratories whose owner was killed; those of others that live, and kept ones, stay.
///
/// # Errors
/// When something of them stays; the message says what.
pub fn sweep() -> Result<()> {
    clean_up(command(target_directory()?.join("demo")).arg("--sweep"))
}
