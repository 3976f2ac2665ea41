//! `cargo xtask`: everything a developer or a CI does with this repository, a module per command.
//!
//! It depends on nothing that needs the eBPF toolchain, because `setup` is what installs that.

mod bench;
mod ci;
mod cluster;
mod demo;
mod exec;
mod fuzz;
mod image;
mod kernels;
mod laboratory;
mod load;
mod setup;
mod test;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Set up, test and try ironlb. Needs root: it installs packages, loads BPF programs and makes network namespaces.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what is missing to build eBPF programs and to run the laboratory; every other command does it first.
    Setup(setup::Options),
    /// Show ironlb at work: a laboratory of network namespaces, real web servers, and a report.
    Demo(demo::Options),
    /// Start a real Kubernetes of two nodes on a provisioning network.
    Cluster(cluster::Options),
    /// Build the container image.
    Image(image::Options),
    /// Build, and load on a real interface.
    Load(load::Options),
    /// Run every test.
    Test(test::Options),
    /// Look for packets that the engine treats as it must not, by libFuzzer; needs no root.
    Fuzz(fuzz::Options),
    /// Boot other kernels in QEMU: do all programs load, and does ironlb work there?
    Kernels(kernels::Options),
    /// Run what CI runs: formatting, lints, documentation, tests.
    Ci(ci::Options),
    /// Measure the data plane: a packet by itself, traffic next to plain routing and nftables, and failovers.
    Bench(bench::Options),
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(Cli { command }: Cli) -> Result<()> {
    exec::handle_interrupts()?;
    match command {
        Command::Setup(options) => setup::run(options),
        Command::Demo(options) => demo::run(options),
        Command::Cluster(options) => cluster::run(options),
        Command::Image(options) => image::run(options),
        Command::Load(options) => load::run(options),
        Command::Test(options) => test::run(options),
        Command::Fuzz(options) => fuzz::run(options),
        Command::Kernels(options) => kernels::run(options),
        Command::Ci(options) => ci::run(options),
        Command::Bench(options) => bench::run(options),
    }
}
