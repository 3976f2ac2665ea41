//! Dialogues as bytes: what the fuzzer makes, and what files in `fuzz/seeds` hold.
//!
//! A dialogue is a row of steps. Each is an octet that says how the packet comes, a word (big-endian) with the frame's
//! length, and the frame, which ends with the file at the latest. Any bytes are a dialogue.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::engine::{Outcome, Program};
use crate::frame::{Packet, Sum};
use crate::oracle;
use crate::scene::{Scene, scene};

/// Bits of a step's first octet: the program,
const PROGRAM: u8 = 0b11;
/// whether the NIC has stripped a tag, VLAN 0 with a priority,
const TAG: u8 = 0b100;
/// what is known of the checksum,
const SUM: u8 = 0b1_1000;
/// and how much of the frame is at hand.
const LINEAR: u8 = 0b1110_0000;

/// The longest dialogue.
const STEPS: usize = 8;
/// Room for flows: little, so that it ends.
const ROOM: usize = 4;

/// A packet, and which program meets it.
#[derive(Clone, Debug)]
pub struct Step {
    /// The program.
    pub program: Program,
    /// The packet.
    pub packet: Packet,
}

/// Reads the steps of a dialogue.
pub fn steps(mut bytes: &[u8]) -> Vec<Step> {
    let mut steps = Vec::new();
    while let [how, high, low, rest @ ..] = bytes
        && steps.len() < STEPS
    {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(rest.len());
        let (frame, rest) = rest.split_at(length);
        bytes = rest;
        // The kernel brings no packet without a whole Ethernet header.
        if length >= 14 {
            steps.push(step(*how, frame));
        }
    }
    steps
}

fn step(how: u8, frame: &[u8]) -> Step {
    let program = match how & PROGRAM {
        1 => Program::Ingress,
        2 => Program::Egress,
        _ => Program::Xdp,
    };
    let mut packet = Packet::new(frame);
    if program != Program::Xdp {
        packet.tag = (how & TAG != 0).then_some(0x2000);
        packet.sum = match (how & SUM) >> 3 {
            1 => Sum::Complete,
            2 if oracle::leave_sum(&mut packet.frame) => Sum::Partial,
            _ => Sum::None,
        };
        let linear = match (how & LINEAR) >> 5 {
            0 => frame.len(),
            // From the Ethernet header alone to somewhere in a quoted packet.
            part => 14 + (usize::from(part) - 1) * 9,
        };
        packet.linear = linear.min(frame.len());
    }
    Step { program, packet }
}

/// The bytes of a dialogue of plain packets.
pub fn written(steps: &[(Program, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (program, frame) in steps {
        bytes.push(match program {
            Program::Xdp => 0,
            Program::Ingress => 1,
            Program::Egress => 2,
        });
        bytes.extend((frame.len() as u16).to_be_bytes());
        bytes.extend(frame);
    }
    bytes
}

/// Plays dialogues on the scene.
pub struct Stage {
    scene: Scene,
    fresh: crate::Engine,
}

impl Default for Stage {
    fn default() -> Self {
        let scene = scene();
        let fresh = scene.engine(ROOM, ROOM);
        Self { scene, fresh }
    }
}

impl Stage {
    /// Plays one on fresh tables.
    ///
    /// # Panics
    /// When the oracle finds a packet treated as it must not be.
    pub fn play(&self, steps: &[Step]) -> Vec<Outcome> {
        let mut engine = self.fresh.clone();
        let outcomes = steps.iter().map(|Step { program, packet }| {
            engine.attach(*program);
            // What is at hand, and what is known of sums, decides nothing.
            let plain = Packet {
                linear: packet.frame.len(),
                sum: Sum::None,
                ..packet.clone()
            };
            let is_plain = plain.linear == packet.linear && packet.sum == Sum::None;
            let other = (!is_plain).then(|| engine.clone().run(*program, &plain));
            let outcome = engine.run(*program, packet);
            engine.clock().jiffies += 1;
            engine.clock().boot += 4_000_000;
            oracle::check(&self.scene, *program, packet, &outcome);
            if let Some(other) = other {
                oracle::check_alike(packet, &outcome, &other);
            }
            outcome
        });
        outcomes.collect()
    }

    /// The scene that it plays on.
    pub fn scene(&self) -> &Scene {
        &self.scene
    }
}

/// Where dialogues are kept: those that the fuzzer begins with, and those that once found a fault.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds")
}

/// Reads them, in the order of their names.
///
/// # Errors
/// When the folder or a file cannot be read.
pub fn files() -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut paths = fs::read_dir(folder())?
        .map(|entry| Ok(entry?.path()))
        .collect::<io::Result<Vec<_>>>()?;
    paths.sort();
    paths
        .into_iter()
        .map(|path| fs::read(&path).map(|bytes| (path, bytes)))
        .collect()
}
