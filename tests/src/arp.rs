//! Who answers for an address, asked again and again: the turns of the nodes that announce a VIP.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::laboratory::Host;
use crate::wire::{Wire, arp_answer, arp_question};

/// An ARP answer, or a claim that nobody had asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// When it was read.
    pub at: Instant,
    /// The MAC in it.
    pub mac: [u8; 6],
}

/// Answers of one node with none of another between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The node's MAC.
    pub mac: [u8; 6],
    /// The first answer.
    pub first: Instant,
    /// The last answer.
    pub last: Instant,
}

/// The turns in answers that are in the order of the wire. Two nodes that answer at the same time make many.
pub fn turns(answers: &[Answer]) -> Vec<Turn> {
    let mut turns: Vec<Turn> = Vec::new();
    for Answer { at, mac } in answers.iter().copied() {
        match turns.last_mut() {
            Some(turn) if turn.mac == mac => turn.last = at,
            _ => turns.push(Turn {
                mac,
                first: at,
                last: at,
            }),
        }
    }
    turns
}

/// Asks by ARP every 20 ms until it is finished.
#[derive(Debug)]
pub struct ArpWatch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<Answer>>>,
}

impl ArpWatch {
    /// How far apart the questions are.
    pub const PERIOD: Duration = Duration::from_millis(20);

    /// Begins to ask who has `address` from `host`, which should have no other traffic: its frames are all read.
    ///
    /// # Errors
    /// When there is no right to open its interface.
    pub fn start(host: &Host, address: Ipv4Addr) -> Result<Self> {
        let wire = Wire::open(&host.namespace, "eth0")?;
        let question = arp_question(wire.mac(), host.address, address, None)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut answers = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                wire.send(&question)?;
                answers.extend(listen(&wire, address, Self::PERIOD)?);
            }
            Ok(answers)
        });
        Ok(Self { stop, thread })
    }

    /// Ends it; the answers in the order of the wire.
    ///
    /// # Errors
    /// When it could not ask.
    pub fn finish(self) -> Result<Vec<Answer>> {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(answers) => answers,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// All answers about `address` within `limit`.
fn listen(wire: &Wire, address: Ipv4Addr, limit: Duration) -> Result<Vec<Answer>> {
    let mut answers = Vec::new();
    wire.receive(limit, |frame| {
        let at = Instant::now();
        answers.extend(arp_answer(frame, address).map(|mac| Answer { at, mac }));
        None::<()>
    })?;
    Ok(answers)
}

/// Asks once who has `address`; all who answer within `limit`.
pub(crate) fn ask(host: &Host, address: Ipv4Addr, limit: Duration) -> Result<Vec<Answer>> {
    let wire = Wire::open(&host.namespace, "eth0")?;
    wire.send(&arp_question(wire.mac(), host.address, address, None)?)?;
    listen(&wire, address, limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handover_is_two_turns_and_an_overlap_more() {
        let begin = Instant::now();
        let turns_of = |macs: &[u8]| {
            let answers: Vec<_> = (0_u32..)
                .zip(macs)
                .map(|(number, mac)| Answer {
                    at: begin + ArpWatch::PERIOD * number,
                    mac: [*mac; 6],
                })
                .collect();
            turns(&answers)
        };
        let handover = turns_of(&[1, 1, 1, 2, 2]);
        let macs: Vec<_> = handover.iter().map(|turn| turn.mac[0]).collect();
        assert_eq!(macs, [1, 2]);
        assert_eq!(handover[1].first - handover[0].last, ArpWatch::PERIOD);
        assert_eq!(turns_of(&[1, 1, 2, 1, 2]).len(), 4);
    }
}
