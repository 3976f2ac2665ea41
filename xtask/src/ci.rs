//! What a change must pass: formatting, lints, documentation, tests, those on other kernels and on a real Kubernetes
//! included.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::exec::{command, elapsed, exec, stage};
use crate::{kernels, setup, test};

/// Options of `cargo xtask ci`.
#[derive(clap::Args)]
pub struct Options {}

/// CI has an hour for all. Where everything else has taken so long, on a fresh machine the scenarios on Kubernetes,
/// which is built from source first, would take more than the rest of it.
const LATEST: Duration = Duration::from_secs(25 * 60);
/// As [`LATEST`] where it is built already.
const LATEST_BUILT: Duration = Duration::from_secs(40 * 60);
/// As [`LATEST`] for the end of other kernels where no Kubernetes follows.
const LATEST_ALONE: Duration = Duration::from_secs(55 * 60);
/// Other kernels may take so long: two minutes each are usual, half of it loading programs without KVM.
const KERNELS: Duration = Duration::from_secs(10 * 60);
/// With less than this they are not begun.
const KERNELS_AT_LEAST: Duration = Duration::from_secs(4 * 60);

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
    let Rest {
        kernels,
        kubernetes,
    } = rest(begin.elapsed(), test::is_cluster_built()?);
    match kernels {
        Some(room) => kernels::of_built(&["6.1", "6.12"], room)?,
        None => eprintln!(
            "\n!!! SKIPPED: ironlb was tried on no other kernel. This machine has taken {} for the rest, and there \
             is too little time left; by itself: cargo xtask kernels\n",
            elapsed(begin.elapsed())
        ),
    }
    if !kubernetes {
        eprintln!(
            "\n!!! SKIPPED: no test on a real Kubernetes has run. This machine has taken {} for the rest, and would \
             not build and test Kubernetes within the hour; by itself: cargo xtask test --cluster\n",
            elapsed(begin.elapsed())
        );
        return Ok(());
    }
    test::on_cluster(None)
}

/// What there is time for after the tests that need neither.
#[derive(Debug, PartialEq, Eq)]
struct Rest {
    /// How long other kernels may take, if at all.
    kernels: Option<Duration>,
    /// Whether the scenarios on Kubernetes run.
    kubernetes: bool,
}

/// Shares the rest of the hour: other kernels get what the scenarios on Kubernetes can spare.
fn rest(took: Duration, built: bool) -> Rest {
    let kubernetes = built || took <= LATEST;
    let latest = match (kubernetes, built) {
        (true, true) => LATEST_BUILT,
        (true, false) => LATEST,
        (false, _) => LATEST_ALONE,
    };
    let room = latest.saturating_sub(took).min(KERNELS);
    Rest {
        kernels: (room >= KERNELS_AT_LEAST).then_some(room),
        kubernetes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_kernels_never_take_the_time_of_kubernetes() {
        let minutes = |minutes: u64| Duration::from_secs(minutes * 60);
        let share = |took, built| {
            let Rest {
                kernels,
                kubernetes,
            } = rest(minutes(took), built);
            (kernels.map(|room| room.as_secs() / 60), kubernetes)
        };
        assert_eq!(share(10, false), (Some(10), true));
        assert_eq!(share(20, false), (Some(5), true));
        assert_eq!(share(22, false), (None, true));
        assert_eq!(share(26, false), (Some(10), false));
        assert_eq!(share(52, false), (None, false));
        assert_eq!(share(33, true), (Some(7), true));
        assert_eq!(share(50, true), (None, true));
    }
}
