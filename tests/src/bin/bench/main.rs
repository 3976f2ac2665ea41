//! The bench: what the data plane costs; `cargo xtask bench` builds and runs it.
//!
//! A packet by itself, by `BPF_PROG_TEST_RUN` of the real object; and traffic in laboratories of the same shape with
//! and without ironlb, as ratios to plain routing.
//!
//! Or what clients notice when nodes go, next to what they have without it.

mod cluster;
mod control;
mod failover;
mod nftables;
mod packets;
mod statistics;
mod traffic;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser;
use serde_json::{Value, json};

#[derive(Parser)]
struct Options {
    /// Write the figures to this file as well.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Fewer rounds.
    #[arg(long)]
    quick: bool,
    /// Instead: how soon the maps follow Kubernetes, with this image of ironlb.
    #[arg(long, value_name = "IMAGE")]
    cluster: Option<PathBuf>,
    /// Instead: what clients notice of a failover between three nodes, and what a second node costs.
    #[arg(long, conflicts_with = "cluster")]
    failover: bool,
    /// Only packets by themselves.
    #[arg(long, conflicts_with_all = ["cluster", "failover"])]
    packets: bool,
}

fn main() -> ExitCode {
    match measure(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nthe bench cannot go on: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure(options: Options) -> Result<()> {
    let Options {
        json: file,
        quick,
        cluster,
        failover,
        packets,
    } = options;
    println!(
        "ironlb bench on Linux {}\n",
        rustix::system::uname().release().to_string_lossy()
    );
    let all = if let Some(image) = cluster {
        let times = cluster::measure(&image, if quick { 10 } else { 40 })?;
        json!({"control": {"endpoint_to_maps_ms": times}})
    } else if failover {
        let seen = failover::measure(if quick { 1 } else { 5 })?;
        println!(
            "\nThe pods on another node than the one that announces the VIP, next to plain routing to that node:"
        );
        let mut second = traffic::measure(traffic::Path::SecondNode, if quick { 3 } else { 12 })?;
        let mut ratios = second["tc"].take();
        for other in ["native", "control", "two_hops"] {
            ratios[other] = second[other].take();
        }
        json!({"failover": seen, "ratio_to_routing": {"second_node": ratios}})
    } else {
        let (per_packet, instructions) = packets::measure(if quick { 5 } else { 15 })?;
        if packets {
            let all = json!({"per_packet_ns": per_packet, "instructions": instructions});
            return write(file.as_deref(), &all);
        }
        let ratios = traffic::measure(traffic::Path::OneNode, if quick { 5 } else { 20 })?;
        let control = control::measure(if quick { 3 } else { 9 })?;
        json!({
            "per_packet_ns": per_packet,
            "ratio_to_routing": ratios,
            "instructions": instructions,
            "control": control,
        })
    };
    write(file.as_deref(), &all)
}

/// Writes the figures to the file that is to have them.
fn write(file: Option<&Path>, figures: &Value) -> Result<()> {
    if let Some(file) = file {
        std::fs::write(file, format!("{figures:#}\n"))
            .with_context(|| format!("write {}", file.display()))?;
        println!("\nfigures are in {}", file.display());
    }
    Ok(())
}

/// Whether a goal is reached: missed only when the whole interval lies on the wrong side.
fn judge(met: bool) -> &'static str {
    if met { "met" } else { "MISSED" }
}
