//! `cargo xtask bench`: what the data plane costs, by itself and next to plain routing and nftables; and what clients
//! notice when nodes go.

use std::path::PathBuf;

use anyhow::{Context as _, Result};

use crate::image::{self, Arch};
use crate::laboratory;

/// Options of `cargo xtask bench`.
#[derive(clap::Args)]
pub struct Options {
    /// Write the figures to this file as well.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Fewer rounds: minutes instead of a quarter of an hour, and wider intervals.
    #[arg(long)]
    quick: bool,
    /// Instead: how soon the maps follow Kubernetes, on a real cluster of two nodes.
    #[arg(long)]
    cluster: bool,
    /// Instead: what clients notice of a failover between three nodes, next to MetalLB with kube-proxy, and what a
    /// second node on the way costs.
    #[arg(long, conflicts_with = "cluster")]
    failover: bool,
    /// Only packets by themselves: a minute.
    #[arg(long, conflicts_with_all = ["cluster", "failover"])]
    packets: bool,
}

/// Runs the bench, which is a binary of the laboratory's crate.
///
/// # Errors
/// When it cannot measure; figures that miss their goal are no error.
pub fn run(options: Options) -> Result<()> {
    let Options {
        json,
        quick,
        cluster,
        failover,
        packets,
    } = options;
    let mut arguments = Vec::new();
    if cluster {
        let image = image::build(Arch::own()?)?;
        arguments.extend(["--cluster".to_owned(), image.display().to_string()]);
    }
    if failover {
        arguments.push("--failover".to_owned());
    }
    if packets {
        arguments.push("--packets".to_owned());
    }
    // As users run it: what the agent does of its own takes time from the packets.
    let shipped = match cluster || packets {
        true => None,
        false => Some(image::binary(Arch::own()?)?),
    };
    if let Some(file) = json {
        let file =
            std::path::absolute(&file).with_context(|| format!("resolve {}", file.display()))?;
        arguments.extend(["--json".to_owned(), file.display().to_string()]);
    }
    if quick {
        arguments.push("--quick".to_owned());
    }
    laboratory::run("bench", &arguments, shipped.as_deref())
}
