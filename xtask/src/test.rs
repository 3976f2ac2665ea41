//! Every test of the workspace: the quick ones first, then those that need the laboratory; and those that need
//! a real Kubernetes, which take longer and are asked for by themselves.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::exec::{Interrupt, Supervised, command, elapsed, exec, stage, target_directory};
use crate::image::{self, Arch};
use crate::{laboratory, setup};

/// Selects all crates; lb-ebpf is built for another target, by lb-userspace's build script.
const WORKSPACE: &[&str] = &["--workspace", "--exclude", "lb-ebpf"];

/// Options of `cargo xtask test`.
#[derive(clap::Args, Default)]
pub struct Options {
    /// Run those on a real Kubernetes instead of the others; it is built from source at the first time.
    #[arg(long)]
    cluster: bool,
    /// Run the soak instead, a quarter of an hour: agents that share VIPs fail again and again under downloads.
    #[arg(long, conflicts_with_all = ["cluster", "filter"])]
    soak: bool,
    /// Run only tests whose name contains this.
    filter: Option<String>,
}

/// What of the workspace is tested, and with which arguments of the tests.
type Selection = (
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
);
const SUITES: &[Selection] = &[
    ("unit tests", &["--lib", "--bins"], &[]),
    (
        "integration and scenario tests",
        &["--test", "*"],
        &["--skip", "fleet::"],
    ),
    (
        "scenarios of several nodes",
        &["--test", "scenarios"],
        &["--test-threads=1", "fleet::"],
    ),
    ("documentation tests", &["--doc"], &[]),
];
/// Those that a filter picks run together, wherever they are.
const FILTERED_SUITES: &[Selection] = &[
    ("unit tests", &["--lib", "--bins"], &[]),
    ("integration and scenario tests", &["--test", "*"], &[]),
];
/// The first one builds what the second one looks for.
const CLUSTER_SUITES: &[Selection] = &[
    (
        "scenarios on a cluster",
        &["--test", "cluster"],
        &["--ignored"],
    ),
    ("Kubernetes as a source", &["--test", "kubernetes"], &[]),
];

/// A tenth of it is among the scenarios. What it says on its way is shown.
const SOAK_SUITES: &[Selection] = &[(
    "soak",
    &["--test", "scenarios"],
    &["--ignored", "--nocapture", "fleet::soak::"],
)];

/// Runs the tests.
///
/// # Errors
/// When one fails; the last lines name those that did.
pub fn run(
    Options {
        cluster,
        soak,
        filter,
    }: Options,
) -> Result<()> {
    if !cluster {
        setup::ensure_tests()?;
        let selections = match &filter {
            _ if soak => SOAK_SUITES,
            Some(_) => FILTERED_SUITES,
            None => SUITES,
        };
        return suites(selections, filter, &[]);
    }
    setup::ensure()?;
    if let Err(missing) = setup::ensure_cluster() {
        eprintln!(
            "\n!!! SKIPPED: no test on a real Kubernetes has run. What it is built with is missing, and cannot \
             be installed here: {missing:#}\n"
        );
        return Ok(());
    }
    on_cluster(filter)
}

/// Whether Kubernetes has been built here already.
///
/// # Errors
/// When cargo does not tell where it builds.
pub fn is_cluster_built() -> Result<bool> {
    let entries = std::fs::read_dir(target_directory()?.join("../cluster"));
    let mut names = entries
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name());
    Ok(names.any(|name| name.as_encoded_bytes().starts_with(b"bin-")))
}

/// Runs the tests on a real Kubernetes.
///
/// # Errors
/// As [`run`]; also when there can be none here.
pub fn on_cluster(filter: Option<String>) -> Result<()> {
    // It installs what is missing, too.
    let image = image::build(Arch::own()?)?;
    suites(CLUSTER_SUITES, filter, &[("IRONLB_IMAGE", &image)])
}

/// Builds everything, runs a list of selections, and sums up.
fn suites(
    selections: &[Selection],
    filter: Option<String>,
    environment: &[(&str, &Path)],
) -> Result<()> {
    // One selection of crates for all suites: another would build dependencies with other features once more.
    stage(
        "build everything",
        "programs, agent, laboratory, tests",
        // Binaries too, with the features that tests ask of their dependencies: the same are used below.
        || {
            exec(
                command("cargo")
                    .args(["build", "--all-targets"])
                    .args(WORKSPACE),
            )
        },
    )?;
    laboratory::sweep()?;
    let started = Instant::now();
    let mut results = Vec::new();
    for selection in selections {
        let (name, ..) = selection;
        eprintln!("==> {name}");
        let suite = suite(selection, filter.as_deref(), environment);
        // Of tests that were killed; all others have cleaned up.
        laboratory::sweep()?;
        results.push((*name, suite?));
    }

    eprintln!("\n==> summary");
    for (name, suite) in &results {
        eprintln!(
            "    {name}: {} passed, {} failed, {} ignored, {}",
            suite.passed,
            suite.failed,
            suite.ignored,
            elapsed(suite.took)
        );
        for test in &suite.failures {
            eprintln!("        FAILED {test}");
        }
    }
    let broken: Vec<_> = results
        .iter()
        .filter(|(_, suite)| !suite.success)
        .map(|(name, _)| *name)
        .collect();
    if !broken.is_empty() {
        bail!("failed: {}", broken.join(", "));
    }
    if results.iter().all(|(_, suite)| suite.passed == 0) {
        bail!(
            "no test ran: none is named like `{}`",
            filter.unwrap_or_default()
        );
    }
    eprintln!("    all passed in {}", elapsed(started.elapsed()));
    Ok(())
}

/// What `cargo test` said about one selection of tests.
#[derive(Default)]
struct Suite {
    success: bool,
    passed: u32,
    failed: u32,
    ignored: u32,
    failures: Vec<String>,
    took: Duration,
}

/// Runs a selection of tests, shows their output and counts results.
fn suite(
    (_, selection, arguments): &Selection,
    filter: Option<&str>,
    environment: &[(&str, &Path)],
) -> Result<Suite> {
    let started = Instant::now();
    let mut cargo = command("cargo");
    cargo
        .args(["test", "--no-fail-fast"])
        .args(WORKSPACE)
        .args(*selection)
        .args(filter)
        .arg("--")
        .args(*arguments)
        .envs(environment.iter().copied())
        // Built above: else each test binary asks cargo for it.
        .env("IRONLB", target_directory()?.join("ironlb"))
        .stdout(Stdio::piped());
    let mut cargo = Supervised::start(&mut cargo, Interrupt::Kill)?;
    let stdout = cargo
        .child
        .stdout
        .take()
        .context("cargo test has no stdout")?;
    let mut suite = Suite::default();
    for line in BufReader::new(stdout).lines() {
        let line = line.context("read what cargo test says")?;
        println!("{line}");
        suite.read(&line);
    }
    suite.success = cargo.wait()?.success();
    suite.took = started.elapsed();
    Ok(suite)
}

impl Suite {
    /// Takes a line of libtest's output into account.
    fn read(&mut self, line: &str) {
        if let Some(test) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.strip_suffix(" ... FAILED"))
        {
            self.failures.push(test.to_owned());
        }
        let Some(result) = line.strip_prefix("test result: ") else {
            return;
        };
        // "ok. 3 passed; 0 failed; 1 ignored; …"
        let counts = result.split_once(". ").map_or("", |(_, counts)| counts);
        for part in counts.split("; ") {
            match part.split_once(' ') {
                Some((count, "passed")) => self.passed += count.parse().unwrap_or(0),
                Some((count, "failed")) => self.failed += count.parse().unwrap_or(0),
                Some((count, "ignored")) => self.ignored += count.parse().unwrap_or(0),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_several_binaries_add_up() {
        let mut suite = Suite::default();
        for line in [
            "test choice::even ... ok",
            "test rewrite::odd_length ... FAILED",
            "test result: FAILED. 1 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "test result: ok. 7 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s",
        ] {
            suite.read(line);
        }
        assert_eq!((suite.passed, suite.failed, suite.ignored), (8, 1, 2));
        assert_eq!(suite.failures, ["rewrite::odd_length"]);
    }
}
