//! Plays a dialogue (a file that the fuzzer or a test has kept), and shows each step and what became of it.

use std::error::Error;
use std::fmt::Write as _;

use lb_host::corpus::{Stage, Step, steps};

fn hex(frame: &[u8]) -> String {
    frame.iter().fold(String::new(), |mut text, octet| {
        let _ = write!(text, "{octet:02x}");
        text
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args()
        .nth(1)
        .ok_or("which file? e.g. fuzz/seeds/closed-v4-xdp")?;
    let bytes = std::fs::read(&path).map_err(|error| format!("{path}: {error}"))?;
    let steps = steps(&bytes);
    let stage = Stage::default();
    for (at, step) in steps.iter().enumerate() {
        match step {
            Step::Turn(turn) => println!("{turn:?}"),
            Step::Packet(program, packet) => println!(
                "{program:?}, {} of {} bytes at hand, tag {:?}, sum {:?}\n    {}",
                packet.linear,
                packet.frame.len(),
                packet.tag,
                packet.sum,
                hex(&packet.frame)
            ),
        }
        // From the beginning every time: what comes last is what has not been shown yet.
        let outcomes = stage.play(&steps[..=at]);
        if let (Step::Packet(..), Some(outcome)) = (step, outcomes.last()) {
            println!("    {:?}\n    {}", outcome.verdict, hex(&outcome.frame));
        }
    }
    Ok(())
}
