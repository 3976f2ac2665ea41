//! `cargo xtask fuzz`: libFuzzer looks for packets that the engine treats as it must not. The engine's own source runs on
//! the host (lb-host), where an oracle judges every packet.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::exec::{command, exec, root, stage, target_directory};
use crate::setup;

/// Where libFuzzer keeps dialogues that have reached something new, from one run to the next.
const CORPUS: &str = "fuzz/corpus/engine";
/// Where it leaves what has found a fault.
const ARTIFACTS: &str = "fuzz/artifacts/engine";
/// What is kept for ever.
const SEEDS: &str = "fuzz/seeds";

/// Options of `cargo xtask fuzz`.
#[derive(clap::Args)]
pub struct Options {
    /// Stop after so many frames without a fault; a dialogue has up to eight.
    #[arg(long, value_name = "COUNT", default_value_t = 10_000_000)]
    frames: u64,
}

/// Fuzzes; needs no root, no eBPF compiler and no kernel.
///
/// # Errors
/// When a dialogue finds a fault: it is a file in `fuzz/seeds` then, where `cargo test -p lb-host` plays it again.
pub fn run(Options { frames }: Options) -> Result<()> {
    let fuzzer = setup::ensure_fuzzer()?;
    let corpus = root().join(CORPUS);
    fs::create_dir_all(&corpus).with_context(|| format!("make {}", corpus.display()))?;
    let target = target_directory()?.join("../fuzz");
    let cargo_fuzz = |action: &str| {
        let mut command = command(&fuzzer);
        command
            .args(["fuzz", action, "--fuzz-dir", "fuzz"])
            // Whoever reads behind a packet crashes without one: a page that nobody may read follows it.
            .args(["--sanitizer", "none", "--target-dir"])
            .arg(&target)
            // Coverage is counted by a flag that stable compilers take for nightly's.
            .env("RUSTC_BOOTSTRAP", "1");
        command
    };
    stage(
        "build the fuzzer",
        "the engine with libFuzzer's counters; about a minute at the first time",
        || exec(cargo_fuzz("build").arg("engine")),
    )?;

    let known = artifacts()?;
    let mut fuzz = cargo_fuzz("run");
    fuzz.args(["engine", CORPUS, SEEDS, "--"])
        // A dialogue of whole frames; what a longer one finds, a shorter one does, too. Told is what is new alone.
        .args(["-max_len=4096", "-len_control=0", "-reduce_inputs=0"])
        .env("IRONLB_FUZZ_FRAMES", frames.to_string());
    let fuzzed = stage(
        &format!("fuzz {frames} frames"),
        "libFuzzer shows what is new to it: `cov` counts branches, `corp` dialogues",
        || exec(&mut fuzz),
    );
    let found: Vec<_> = artifacts()?.difference(&known).cloned().collect();
    if found.is_empty() {
        return fuzzed;
    }
    let mut kept = Vec::new();
    for path in &found {
        let name = path.file_name().context("a file without a name")?;
        let seed = Path::new(SEEDS).join(name);
        fs::copy(path, root().join(&seed)).with_context(|| format!("keep {}", path.display()))?;
        kept.push(seed.display().to_string());
    }
    bail!(
        "a fault: see it by `cargo run -p lb-host --example play {}`, mend it, and commit the file under a name that tells \
         what it found: `cargo test -p lb-host` plays it again",
        kept.join(" ")
    )
}

/// What has found faults so far.
fn artifacts() -> Result<BTreeSet<PathBuf>> {
    let folder = root().join(ARTIFACTS);
    if !folder.exists() {
        return Ok(BTreeSet::new());
    }
    let entries = fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))?;
    entries.map(|entry| Ok(entry?.path())).collect()
}
