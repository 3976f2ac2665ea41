//! `cargo xtask cluster`: a real Kubernetes of two nodes on a provisioning network, with ironlb in it.

use anyhow::Result;
use clap::Subcommand;

use crate::image::{self, Arch};
use crate::laboratory;

/// Options of `cargo xtask cluster`.
#[derive(clap::Args)]
pub struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a cluster that stays, deploy ironlb there, and say how to use it.
    Up {
        /// Do without kube-proxy: nothing answers at ClusterIPs then.
        #[arg(long)]
        no_kube_proxy: bool,
        /// Start three Ironics, too.
        #[arg(long)]
        ironic: bool,
    },
    /// End what `up` left.
    Down,
    /// Show ironlb at work in front of three real Ironics, on a cluster that goes with the report.
    Demo,
}

/// Runs the laboratory's cluster.
///
/// # Errors
/// When it does not come up, or something that the demo shows is not as it must be.
pub fn run(Options { command }: Options) -> Result<()> {
    let mut arguments = Vec::new();
    match command {
        Command::Up {
            no_kube_proxy,
            ironic,
        } => {
            let image = image::build(Arch::own()?)?;
            arguments.extend(["up", "--image"].map(str::to_owned));
            arguments.push(image.display().to_string());
            if no_kube_proxy {
                arguments.push("--no-kube-proxy".to_owned());
            }
            if ironic {
                arguments.push("--ironic".to_owned());
            }
        }
        Command::Down => arguments.push("down".to_owned()),
        Command::Demo => {
            let image = image::build(Arch::own()?)?;
            arguments.extend(["demo", "--image"].map(str::to_owned));
            arguments.push(image.display().to_string());
        }
    }
    laboratory::run("cluster", &arguments, None)
}
