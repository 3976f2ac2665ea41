//! Plays any bytes as a dialogue with the programs, and panics where the oracle finds a packet treated as it must not be.

#![no_main]

use std::cell::Cell;
use std::time::Instant;

use lb_host::corpus::{Stage, steps};
use libfuzzer_sys::fuzz_target;

/// How many frames to play, if not without end: libFuzzer itself counts dialogues.
const FRAMES: &str = "IRONLB_FUZZ_FRAMES";

/// Frames after which to tell how far it is.
const TELLS: u64 = 1_000_000;

struct Run {
    stage: Stage,
    limit: Option<u64>,
    frames: Cell<u64>,
    dialogues: Cell<u64>,
    started: Instant,
}

thread_local! {
    static RUN: Run = Run {
        stage: Stage::default(),
        limit: std::env::var(FRAMES).ok().map(|frames| frames.parse().expect("a number of frames")),
        frames: Cell::new(0),
        dialogues: Cell::new(0),
        started: Instant::now(),
    };
}

impl Run {
    fn progress(&self) -> String {
        format!(
            "{} frames of {} dialogues in {:.0} s",
            self.frames.get(),
            self.dialogues.get(),
            self.started.elapsed().as_secs_f64()
        )
    }
}

fuzz_target!(|bytes: &[u8]| {
    RUN.with(|run| {
        let before = run.frames.get();
        let played = run.stage.play(&steps(bytes)).len() as u64;
        run.frames.set(before + played);
        run.dialogues.set(run.dialogues.get() + 1);
        if run.limit.is_some_and(|limit| run.frames.get() >= limit) {
            eprintln!("no fault in {}", run.progress());
            // An ordinary exit is what libFuzzer takes for a crash.
            // SAFETY: ends the process, whose finds are files already.
            unsafe { libc::_exit(0) }
        }
        if before / TELLS != run.frames.get() / TELLS {
            eprintln!("{}", run.progress());
        }
    });
});
