//! Every dialogue in `fuzz/seeds` is played again: what once found a fault finds it for ever.

use lb_host::corpus::{Stage, files, steps};

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
