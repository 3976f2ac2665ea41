//! Scenarios on a real Kubernetes: `cargo xtask test --cluster` runs them, one after another on one cluster.
//! A plain `cargo test` leaves them out.

mod agents;
mod crowd;
mod dual_stack;
mod instances;
mod itself;
mod nodes;
mod pods;
mod scene;
mod serving;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Result;
use ironlb_tests::cluster::{Cluster, ContainerImage, ironlb_image};
use libtest_mimic::{Arguments, Failed, Trial};

/// A scenario: its name and what it does to the cluster.
type Scenario = (&'static str, fn(&mut Cluster) -> Result<()>);

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // They share one cluster.
    arguments.test_threads = Some(1);
    let cluster = Arc::new(Mutex::new(None));
    let trials = [
        itself::SCENARIOS,
        serving::SCENARIOS,
        pods::SCENARIOS,
        instances::SCENARIOS,
        dual_stack::SCENARIOS,
        crowd::SCENARIOS,
        nodes::SCENARIOS,
        agents::SCENARIOS,
    ]
    .concat()
    .into_iter()
    .map(|(name, scenario)| {
        let cluster = Arc::clone(&cluster);
        Trial::test(name, move || run(&cluster, name, scenario)).with_ignored_flag(true)
    })
    .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    // Ends it: the process's exit would not.
    drop(cluster);
    conclusion.exit_code()
}

/// Runs a scenario on the cluster, which the first one starts.
fn run(
    cluster: &Mutex<Option<Cluster>>,
    name: &str,
    scenario: fn(&mut Cluster) -> Result<()>,
) -> Result<(), Failed> {
    // A scenario that panicked has spoilt no more than one that failed.
    let mut slot = cluster.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = match slot.take() {
        Some(cluster) => cluster,
        None => start().map_err(|error| format!("{error:#}"))?,
    };
    let begun = Instant::now();
    let done = scenario(slot.insert(cluster));
    eprintln!("    {name}: {:.1} s", begun.elapsed().as_secs_f64());
    done.map_err(|error| {
        // Now, and not only after the last scenario.
        let error = format!("{error:#}");
        eprintln!("{error}");
        error.into()
    })
}

fn start() -> Result<Cluster> {
    Cluster::builder()
        .image(ContainerImage::Web)
        .image(ContainerImage::Archive(ironlb_image()?))
        .build()
}
