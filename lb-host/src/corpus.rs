//! Dialogues as bytes: what the fuzzer makes, and what files in `fuzz/seeds` hold.
//!
//! A dialogue is a row of steps. Each is an octet that says how the packet comes, a word (big-endian) with the frame's
//! length, and the frame, which ends with the file at the latest. Where the octet says [`TURN`], no packet comes: the rest
//! of it is the number of what happens instead. Any bytes are a dialogue.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::{fs, io};

use lb_common::layout::map;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};

use crate::engine::{Outcome, Program};
use crate::frame::{Packet, Sum};
use crate::oracle;
use crate::scene::{API, EMPTY, IMAGES, INSTANCE, REMOTE, Scene, scene};
use crate::turn::Turn;

/// Bits of a step's first octet: the program,
const PROGRAM: u8 = 0b11;
/// whether the NIC has stripped a tag, VLAN 0 with a priority,
const TAG: u8 = 0b100;
/// what is known of the checksum,
const SUM: u8 = 0b1_1000;
/// and how much of the frame is at hand.
const LINEAR: u8 = 0b1110_0000;

/// An Ethernet header.
const LINK: usize = 14;
/// The longest dialogue.
const STEPS: usize = 8;
/// Room for living flows: little, so that it ends.
const LIVING: usize = 4;
/// Room for young and closing ones: as many as it takes to leave a client no port.
const YOUNG: usize = 5;

/// `PROGRAM`'s values.
pub const XDP: u8 = 0;
/// Likewise.
pub const INGRESS: u8 = 1;
/// Likewise.
pub const EGRESS: u8 = 2;
/// None of them: a [`Turn`], whose number is in the other bits.
pub const TURN: u8 = 3;

/// A dialogue's steps as they are written: how the packet comes, and the frame, which a turn has none of.
pub type Written = Vec<(u8, Vec<u8>)>;

/// A step of a dialogue.
#[derive(Clone, Debug)]
pub enum Step {
    /// A program meets a packet.
    Packet(Program, Packet),
    /// Something else happens.
    Turn(Turn),
}

/// A turn as it is written.
pub fn turn(turn: Turn) -> (u8, Vec<u8>) {
    ((turn as u8) << 2 | TURN, Vec::new())
}

/// Reads the steps of a dialogue.
pub fn steps(bytes: &[u8]) -> Vec<Step> {
    let written = read(bytes).into_iter();
    written
        .filter_map(|(how, frame)| step(how, &frame))
        .collect()
}

/// The steps of a dialogue with plain packets: all of them at hand, nothing known of their sums.
pub fn plain(written: &Written) -> Vec<Step> {
    let plain = |how: u8| {
        if is_turn(how) { how } else { how & PROGRAM }
    };
    let steps = written.iter();
    steps
        .filter_map(|(how, frame)| step(plain(*how), frame))
        .collect()
}

fn is_turn(how: u8) -> bool {
    how & PROGRAM == TURN
}

/// Reads a dialogue as it is written.
pub fn read(mut bytes: &[u8]) -> Written {
    let mut steps = Written::new();
    while let [how, high, low, rest @ ..] = bytes
        && steps.len() < STEPS
    {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(rest.len());
        let (frame, rest) = rest.split_at(length);
        bytes = rest;
        if is_turn(*how) {
            steps.push((*how, Vec::new()));
        } else if length >= LINK {
            // The kernel brings no packet without a whole Ethernet header.
            steps.push((*how, frame.to_vec()));
        }
    }
    steps
}

/// `None` for a turn that there is not.
fn step(how: u8, frame: &[u8]) -> Option<Step> {
    let program = match how & PROGRAM {
        XDP => Program::Xdp,
        INGRESS => Program::Ingress,
        EGRESS => Program::Egress,
        _ => return Some(Step::Turn(*Turn::ALL.get(usize::from(how >> 2))?)),
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
    Some(Step::Packet(program, packet))
}

/// The bytes of a dialogue.
pub fn write(steps: &Written) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (how, frame) in steps {
        bytes.push(*how);
        bytes.extend((frame.len() as u16).to_be_bytes());
        bytes.extend(frame);
    }
    bytes
}

/// Makes dialogues out of others, the same ones in every run: where libFuzzer is not at hand, and where two engines are to
/// be shown the same.
pub struct Mutations {
    random: Xoshiro256PlusPlus,
    seeds: Vec<Written>,
}

impl Mutations {
    /// Of these dialogues, by a number that chooses the way.
    pub fn new(seeds: Vec<Written>, number: u64) -> Self {
        assert!(seeds.iter().any(|seed| !seed.is_empty()), "no seed");
        let random = Xoshiro256PlusPlus::seed_from_u64(number);
        Self { random, seeds }
    }

    fn one(&mut self) -> Written {
        loop {
            let at = self.random.random_range(0..self.seeds.len());
            if !self.seeds[at].is_empty() {
                return self.seeds[at].clone();
            }
        }
    }

    fn edit(&mut self, steps: &mut Written) {
        let other = self.one();
        let random = &mut self.random;
        let step = random.random_range(0..steps.len());
        let kind = random.random_range(0..11);
        let (how, frame) = &mut steps[step];
        if is_turn(*how) {
            (*how, _) = turn(Turn::ALL[random.random_range(0..Turn::ALL.len())]);
            return;
        }
        // Most of what the engine reads is at the front.
        let reach = frame.len().min(if random.random_bool(0.8) {
            80
        } else {
            usize::MAX
        });
        let at = random.random_range(0..reach);
        match kind {
            0 => *how = random.random::<u8>() & !PROGRAM | random.random_range(XDP..TURN),
            1 => frame[at] = random.random(),
            2 => frame[at] ^= 1 << random.random_range(0..8),
            3 => frame[at] = [0, 1, 0x7f, 0x80, 0xff][random.random_range(0..5)],
            4 if at + 1 < frame.len() => {
                let words = [0, 1, 0x4000, 0xffff, API, IMAGES, INSTANCE, REMOTE, EMPTY];
                let word = words[random.random_range(0..words.len())];
                frame[at..at + 2].copy_from_slice(&word.to_be_bytes());
            }
            5 => frame.truncate(at.max(LINK)),
            6 => frame.extend((0..random.random_range(1..64)).map(|_| random.random::<u8>())),
            7 => {
                let count = random.random_range(1..9);
                frame.splice(at..at, (0..count).map(|_| random.random::<u8>()));
            }
            8 => {
                // The rest of another frame.
                let (_, tail) = &other[random.random_range(0..other.len())];
                frame.truncate(at);
                frame.extend(tail.get(at..).unwrap_or_default());
                frame.resize(frame.len().max(LINK), 0);
            }
            9 => {
                let number = random.random_range(0..Turn::ALL.len());
                steps.insert(step, turn(Turn::ALL[number]));
                steps.truncate(STEPS);
            }
            _ => {
                let from = random.random_range(0..other.len());
                steps.splice(step..step, other[from..].iter().cloned());
                steps.truncate(STEPS);
            }
        }
    }
}

impl Iterator for Mutations {
    type Item = Written;

    fn next(&mut self) -> Option<Written> {
        let mut steps = self.one();
        for _ in 0..self.random.random_range(0..5) {
            self.edit(&mut steps);
        }
        Some(steps)
    }
}

/// Plays dialogues on the scene.
pub struct Stage {
    scene: Scene,
    fresh: crate::Engine,
}

impl Default for Stage {
    fn default() -> Self {
        let scene = scene();
        let fresh = scene.engine(LIVING, YOUNG);
        Self { scene, fresh }
    }
}

impl Stage {
    /// Plays one on fresh tables, and tells what became of its packets.
    ///
    /// # Panics
    /// When the oracle finds a packet treated as it must not be.
    pub fn play(&self, steps: &[Step]) -> Vec<Outcome> {
        let mut engine = self.fresh.clone();
        let mut scene = Cow::Borrowed(&self.scene);
        let mut is_torn = false;
        let mut outcomes = Vec::new();
        for step in steps {
            let (program, packet) = match step {
                Step::Packet(program, packet) => (*program, packet),
                Step::Turn(turn) => {
                    is_torn |= turn.tears();
                    turn.take(scene.to_mut(), &mut engine);
                    continue;
                }
            };
            engine.attach(program);
            // What is at hand, and what is known of sums, decides nothing.
            let plain = Packet {
                linear: packet.frame.len(),
                sum: Sum::None,
                ..packet.clone()
            };
            let is_plain = plain.linear == packet.linear && packet.sum == Sum::None;
            let other = (!is_plain).then(|| engine.clone().run(program, &plain));
            let living = engine.rows(map::LIVING);
            let outcome = engine.run(program, packet);
            engine.clock().jiffies += 1;
            engine.clock().boot += 4_000_000;
            oracle::check(&scene, program, packet, &outcome);
            oracle::check_told(packet, &outcome, &engine.events());
            oracle::check_ended(&living, &engine.rows(map::LIVING), &engine.endings());
            if !is_torn {
                oracle::check_pairs(&engine);
            }
            if let Some(other) = other {
                oracle::check_alike(packet, &outcome, &other);
            }
            outcomes.push(outcome);
        }
        outcomes
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
