//! Plays any bytes as a dialogue with the programs, and panics where the oracle finds a packet treated as it must not be.

#![no_main]

use std::cell::Cell;
use std::time::Instant;

use lb_host::corpus::{Stage, steps};
use libfuzzer_sys::fuzz_target;

/// How many frames to play, if not without end: libFuzzer itself counts dialogues.
const FRAMES: &str = "IRONLB_FUZZ_FRAMES";

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

fuzz_target!(|bytes: &[u8]| {
    RUN.with(|run| {
        let outcomes = run.stage.play(&steps(bytes));
        run.frames.set(run.frames.get() + outcomes.len() as u64);
        run.dialogues.set(run.dialogues.get() + 1);
        if run.limit.is_some_and(|limit| run.frames.get() >= limit) {
            eprintln!(
                "no fault in {} frames of {} dialogues, {:.0} s",
                run.frames.get(),
                run.dialogues.get(),
                run.started.elapsed().as_secs_f64()
            );
            // An ordinary exit is what libFuzzer takes for a crash.
            // SAFETY: ends the process, whose finds are files already.
            unsafe { libc::_exit(0) }
        }
    });
});
