//! The bounded part of fuzzing, in every run of the tests: so many frames of dialogues that are made out of the kept ones.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::{env, fs};

use lb_host::corpus::{Mutations, Stage, files, read, steps, write};

/// How many, unless the environment says otherwise.
const FRAMES: usize = 200_000;
/// The environment's variables: how many frames, and the number that chooses the way.
const COUNT: &str = "IRONLB_MUTATED_FRAMES";
const NUMBER: &str = "IRONLB_MUTATIONS";

fn number(name: &str, otherwise: u64) -> u64 {
    env::var(name).map_or(otherwise, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {text}"))
    })
}

#[test]
fn no_mutated_dialogue_finds_a_fault() {
    let seeds = files().expect("fuzz/seeds can be read");
    let seeds = seeds.iter().map(|(_, bytes)| read(bytes)).collect();
    let wanted = number(COUNT, FRAMES as u64) as usize;
    let stage = Stage::default();
    let mut frames = 0;
    for dialogue in Mutations::new(seeds, number(NUMBER, 1)) {
        let bytes = write(&dialogue);
        let played = catch_unwind(AssertUnwindSafe(|| stage.play(&steps(&bytes)).len()));
        match played {
            Ok(count) => frames += count,
            Err(panic) => {
                let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("found");
                fs::write(&kept, &bytes).expect("the target directory can be written");
                println!(
                    "after {frames} frames, by {}: give it a name in fuzz/seeds, where it is played again",
                    kept.display()
                );
                resume_unwind(panic);
            }
        }
        if frames >= wanted {
            return;
        }
    }
}
