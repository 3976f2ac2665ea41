//! What a change must pass: formatting, lints, documentation, tests, those on a real Kubernetes included.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::exec::{command, elapsed, exec, stage};
use crate::{setup, test};

/// Options of `cargo xtask ci`.
#[derive(clap::Args)]
pub struct Options {}

/// CI has an hour for all. Where everything else has taken so long, on a fresh machine the scenarios on Kubernetes,
/// which is built from source first, would take more than the rest of it.
const LATEST: Duration = Duration::from_secs(30 * 60);

/// Runs all checks; the quick ones first.
///
/// # Errors
/// At the first that fails.
pub fn run(Options {}: Options) -> Result<()> {
    let begin = Instant::now();
    setup::components()?;
    stage("check the formatting", "cargo fmt", || {
        exec(command("cargo").args(["fmt", "--all", "--check"]))
    })?;
    setup::ensure()?;
    let toolchain = setup::toolchain()?;
    stage(
        "lint the eBPF programs",
        &format!("clippy of {toolchain}"),
        || {
            exec(
                command("rustup")
                    .args(["run", &toolchain, "cargo", "clippy", "--package", "lb-ebpf"])
                    .args(["-Z", "build-std=core", "--target", "bpfel-unknown-none"])
                    .args(["--", "-D", "warnings"])
                    .env("RUSTC_BOOTSTRAP", "1")
                    // As aya-build sets it for the build proper.
                    .env(
                        "RUSTFLAGS",
                        format!("--cfg=bpf_target_arch=\"{}\"", std::env::consts::ARCH),
                    ),
            )
        },
    )?;
    stage(
        "lint lb-common as the eBPF programs see it",
        "no_std",
        || {
            exec(command("cargo").args([
                "clippy",
                "--package",
                "lb-common",
                "--",
                "-D",
                "warnings",
            ]))
        },
    )?;
    stage(
        "lint everything else",
        "all targets, the eBPF object included",
        || {
            exec(
                command("cargo")
                    .args([
                        "clippy",
                        "--workspace",
                        "--exclude",
                        "lb-ebpf",
                        "--all-targets",
                    ])
                    .args(["--", "-D", "warnings"]),
            )
        },
    )?;
    stage("check the documentation", "cargo doc", || {
        exec(
            command("cargo")
                .args(["doc", "--workspace", "--exclude", "lb-ebpf", "--no-deps"])
                .env("RUSTDOCFLAGS", "-D warnings"),
        )
    })?;
    test::run(test::Options::default())?;
    let took = begin.elapsed();
    if took > LATEST && !test::is_cluster_built()? {
        eprintln!(
            "\n!!! SKIPPED: no test on a real Kubernetes has run. This machine has taken {} for the rest, and would \
             not build and test Kubernetes within the hour; by itself: cargo xtask test --cluster\n",
            elapsed(took)
        );
        return Ok(());
    }
    test::on_cluster(None)
}
