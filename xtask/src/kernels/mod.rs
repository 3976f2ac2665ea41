//! `cargo xtask kernels`: whether ironlb loads and works on other kernels than this machine's. Debian's kernels boot in
//! QEMU with this build's binaries, and a laboratory runs inside.

mod debian;
mod guest;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use comfy_table::{Table, presets::ASCII_MARKDOWN};

use crate::exec::{elapsed, stage, target_directory};
use crate::{laboratory, setup};

/// Where other devices than veth are tried, too: the machine's own kernel may have none of them.
const ROWS: &str = "6.12";

/// Seconds that one guest may take, unless somebody says otherwise; two minutes are usual.
const LIMIT: u64 = 300;
/// A guest that would have less time is not started.
const SHORTEST: Duration = Duration::from_secs(90);

/// Options of `cargo xtask kernels`.
#[derive(clap::Args)]
#[command(after_help = "\
Each kernel boots in QEMU without KVM, with the binaries of this build and the laboratory, and
  - takes every program: a table tells how many instructions its verifier walked;
  - serves downloads over IPv4 and IPv6 in native XDP and at TC (clsact before Linux 6.6),
    refuses a port, keeps a download while the agent restarts, and is empty after unload;
  - as 6.12 also serves on a VLAN device, a bond, a team device and virtio_net.

Kernels are Debian's cloud images, fetched with apt lists of their own and never installed.
They are kept in target/kernels, as each guest's serial log is. Only on amd64.

Exit code: 0 when all that should load loads and all that should work works.

Examples:
  cargo xtask kernels                  5.10, 6.1, 6.12 and the newest
  cargo xtask kernels 6.1 6.18         any series that Debian has
  cargo xtask kernels --refresh        with the newest packages of each")]
pub struct Options {
    /// Series (`6.1`), versions (`6.12.117`), or `newest`.
    #[arg(default_values = ["5.10", "6.1", "6.12", debian::NEWEST], value_parser = debian::parse)]
    versions: Vec<String>,
    /// Fetch kernels that are there already anew.
    #[arg(long)]
    refresh: bool,
    /// Debian mirror to fetch from; default is that of the machine's apt.
    #[arg(long, value_name = "URL")]
    mirror: Option<String>,
    /// Seconds that one guest may take.
    #[arg(long, value_name = "SECONDS", default_value_t = LIMIT)]
    limit: u64,
}

/// Builds, and boots the kernels one after the other.
///
/// # Errors
/// When something does not load or does not work on one of them.
pub fn run(options: Options) -> Result<()> {
    setup::ensure_kernels()?;
    laboratory::build("the guests run this build")?;
    check(&options, None)
}

/// As [`run`], of these versions and with binaries that are built already, as far as there is `room`: kernels that find
/// too little of it are skipped, which is said loudly.
///
/// # Errors
/// As [`run`].
pub fn of_built(versions: &[&str], room: Duration) -> Result<()> {
    let deadline = Instant::now() + room;
    setup::ensure_kernels()?;
    let options = Options {
        versions: versions.iter().map(|&version| version.to_owned()).collect(),
        refresh: false,
        mirror: None,
        limit: LIMIT,
    };
    check(&options, Some(deadline))
}

fn check(options: &Options, deadline: Option<Instant>) -> Result<()> {
    let Options {
        versions,
        refresh,
        mirror,
        limit,
    } = options;
    debian::check_keyring()?;
    let directory = directory()?;
    let kernels = debian::kernels(&directory, versions, *refresh, mirror.as_deref())?;
    let initial = stage(
        "pack the guests' initial file system",
        "binaries and libraries of this machine",
        || guest::initial(&directory, &target_directory()?),
    )?;
    let mut reports = Vec::new();
    for kernel in &kernels {
        let own = Duration::from_secs(*limit);
        let left = deadline.map_or(own, |deadline| deadline.duration_since(Instant::now()));
        if left < own.min(SHORTEST) {
            skipped(&kernel.version);
            continue;
        }
        eprintln!("==> Linux {} ({})", kernel.version, kernel.package);
        let rows = kernel.version == ROWS;
        let mut report = guest::run(kernel, &initial, &directory, rows, own.min(left))?;
        eprintln!("    ended after {}", elapsed(report.took));
        match report.unfinished.take() {
            // Others took the time that it should have had.
            Some(_) if left < own => skipped(&kernel.version),
            Some(doing) => report.failures.push(format!(
                "not ready after {} ({doing}): does it hang, or is the machine busy? Then a larger --limit",
                elapsed(own)
            )),
            None => {}
        }
        reports.push(report);
    }
    summary(&reports)
}

fn skipped(version: &str) {
    eprintln!(
        "\n!!! SKIPPED: ironlb was not (or not wholly) tried on Linux {version}, for lack of time; by itself: \
         cargo xtask kernels {version}\n"
    );
}

/// `kernels` in cargo's target directory.
fn directory() -> Result<PathBuf> {
    let profile = target_directory()?;
    let target = profile
        .parent()
        .context("xtask is not in a target directory")?;
    let directory = target.join("kernels");
    std::fs::create_dir_all(&directory)
        .with_context(|| format!("create {}", directory.display()))?;
    Ok(directory)
}

/// Prints the table and what failed.
fn summary(reports: &[guest::Report]) -> Result<()> {
    let table = |header: [&str; 3]| {
        let mut table = Table::new();
        table.load_style(ASCII_MARKDOWN).set_header(header);
        table
    };
    let mut programs = table(["kernel", "program", "verified instructions"]);
    let mut steps = table(["kernel", "step", "result"]);
    for report in reports {
        for program in &report.programs {
            programs.add_row([&report.release, &program.name, &program.said]);
        }
        for (name, said) in &report.steps {
            let first = said.lines().next().unwrap_or_default();
            steps.add_row([&report.release, name.as_str(), first]);
        }
    }
    println!("\n{programs}\n\n{steps}\n");
    let mut failed = Vec::new();
    for report in reports.iter().filter(|report| !report.failures.is_empty()) {
        for failure in &report.failures {
            println!("FAILED on Linux {}: {failure}", report.version);
        }
        failed.push(report.version.as_str());
    }
    if !failed.is_empty() {
        bail!(
            "ironlb does not work on Linux {}: see above",
            failed.join(", ")
        );
    }
    Ok(())
}
