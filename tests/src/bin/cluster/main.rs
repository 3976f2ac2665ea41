//! A Kubernetes cluster to play with, and a demo of ironlb in one; `cargo xtask cluster` builds and runs this.

mod demo;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use ironlb_tests::cluster::{Cluster, ContainerImage, overlay};
use ironlb_tests::{Kept, VIP, down, kept, sweep};

#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start one that stays.
    Up {
        /// Without kube-proxy, nothing answers at ClusterIPs.
        #[arg(long)]
        no_kube_proxy: bool,
        /// Start three Ironics, too.
        #[arg(long)]
        ironic: bool,
        /// The image of ironlb, an OCI archive: it is deployed.
        #[arg(long)]
        image: Option<PathBuf>,
    },
    /// End those that stay.
    Down,
    /// Show ironlb in front of three real Ironics.
    Demo {
        /// The image of ironlb, an OCI archive.
        #[arg(long)]
        image: PathBuf,
    },
}

fn main() -> ExitCode {
    let done = match Options::parse().command {
        Command::Up {
            no_kube_proxy,
            ironic,
            image,
        } => up(!no_kube_proxy, ironic, image).map(|()| 0),
        Command::Down => end().map(|()| 0),
        Command::Demo { image } => demo::show(image),
    };
    match done {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            println!("\n{failed} of the above FAILED");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn up(kube_proxy: bool, ironic: bool, image: Option<PathBuf>) -> Result<()> {
    if let Some(tag) = kept(Kept::Cluster)?.first() {
        bail!("cluster {tag} is up already; to end it: cargo xtask cluster down");
    }
    let mut builder = Cluster::builder()
        .kube_proxy(kube_proxy)
        .image(ContainerImage::Web);
    if ironic {
        builder = builder.image(ContainerImage::Ironic);
    }
    if let Some(image) = &image {
        builder = builder.image(ContainerImage::Archive(image.clone()));
    }
    let cluster = builder.build()?;
    if let Some(image) = &image {
        cluster.deploy_ironlb(image)?;
    }
    if ironic {
        cluster.apply_kustomization(&overlay("ironic"))?;
        let namespace = ["--namespace", "metal3"];
        cluster.wait_ready("statefulset/ironic", &namespace, Duration::from_secs(180))?;
    }
    let usage = usage(&cluster);
    let kubectl = cluster.keep()?;
    println!(
        "{usage}\n    kubectl       {} get nodes\nTo end it: cargo xtask cluster down",
        kubectl.display()
    );
    Ok(())
}

fn end() -> Result<()> {
    let tags = kept(Kept::Cluster)?;
    for tag in &tags {
        down(tag)?;
    }
    sweep()?;
    println!("{} clusters ended", tags.len());
    Ok(())
}

/// How to play with a cluster that stays.
fn usage(cluster: &Cluster) -> String {
    let nodes: String = cluster
        .nodes
        .iter()
        .map(|node| {
            format!(
                "    on {}     nsenter --net={} ip address\n",
                node.name,
                node.namespace.path().display()
            )
        })
        .collect();
    format!(
        "\nThe cluster {} stays up: nodes node-a (172.22.0.11) and node-b (172.22.0.12), VIP {VIP}. Play with it:
{nodes}    on host0      nsenter --net={} curl http://{VIP}:6385/
    the wire      nsenter --net={} tcpdump -ni any tcp
    images        localhost/web:test and what was asked for; imagePullPolicy: Never",
        cluster.tag(),
        cluster.hosts[0].namespace.path().display(),
        cluster.switch.path().display(),
    )
}
