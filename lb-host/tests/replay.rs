//! Every dialogue in `fuzz/seeds` is played again: what once found a fault finds it for ever.

use std::collections::BTreeSet;
use std::fs;

use lb_common::Verdict;
use lb_host::corpus::{Stage, files, folder, steps, write};
use lb_host::seeds::seeds;

#[test]
fn no_dialogue_that_is_kept_finds_a_fault() {
    let files = files().expect("fuzz/seeds can be read");
    assert!(!files.is_empty(), "no dialogue in fuzz/seeds");
    let stage = Stage::default();
    for (path, bytes) in files {
        // Named before it can panic; shown for a failed test alone.
        println!("{}", path.display());
        stage.play(&steps(&bytes));
    }
}

#[test]
fn the_files_are_what_the_seeds_are() {
    for (name, dialogue) in seeds() {
        let kept = fs::read(folder().join(&name)).unwrap_or_default();
        assert!(
            kept == write(&dialogue),
            "fuzz/seeds/{name} is another: `cargo run -p lb-host --example seeds`"
        );
    }
}

/// A fuzzer that begins with fewer finds the rest late or never.
#[test]
fn the_seeds_meet_all_verdicts() {
    let stage = Stage::default();
    let mut met = BTreeSet::new();
    for (_, dialogue) in seeds() {
        for outcome in stage.play(&steps(&write(&dialogue))) {
            met.insert(outcome.verdict.name());
        }
    }
    let all = Verdict::ALL.iter().map(|verdict| verdict.name());
    let missing: Vec<_> = all.filter(|name| !met.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
