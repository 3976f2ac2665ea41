//! Where a packet lies while a program runs on it: below 4 GiB, because contexts tell addresses in 32 bits, and right
//! before a page that nobody may read, so that a read past the end is a crash and not a quiet one.

use std::cell::RefCell;
use std::ffi::c_void;

use etherparse::checksum::Sum16BitWords;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use rustix::param::page_size;

use crate::bindings::{__sk_buff, xdp_md};

/// A packet that comes to a program.
#[derive(Clone, Debug)]
pub struct Packet {
    /// The frame, its tags included.
    pub frame: Vec<u8>,
    /// TC: how many bytes of it are at hand without pulling.
    pub linear: usize,
    /// TC: a tag that is kept beside the bytes (TCI).
    pub tag: Option<u16>,
    /// TC: what is known of its checksum.
    pub sum: Sum,
}

impl Packet {
    /// A frame as a wire brings it, all in one piece.
    pub fn new(frame: impl Into<Vec<u8>>) -> Self {
        let frame = frame.into();
        Self {
            linear: frame.len(),
            frame,
            tag: None,
            sum: Sum::None,
        }
    }
}

/// What of a packet's checksums is known to an skb (`linux/skbuff.h`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sum {
    /// `CHECKSUM_NONE`.
    None,
    /// `CHECKSUM_COMPLETE`: the NIC has summed all that follows the Ethernet header.
    Complete,
    /// `CHECKSUM_PARTIAL`: a device is to sum from the transport header on; its checksum is the pseudo-header's sum.
    Partial,
}

/// Room for the largest packet and what a program adds.
const ROOM: usize = 1 << 17;
/// Where to look for memory that contexts can tell the address of.
const LOWEST: usize = 1 << 28;
const HIGHEST: usize = 1 << 30;

/// Memory between two pages that nobody may touch.
struct Arena {
    base: usize,
}

impl Arena {
    fn new() -> Self {
        let length = ROOM + 2 * page_size();
        for hint in (LOWEST..HIGHEST).step_by(length) {
            let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
            // SAFETY: replaces no mapping, so that nothing else lies there.
            let mapped =
                unsafe { mmap_anonymous(hint as *mut c_void, length, ProtFlags::empty(), flags) };
            if mapped.is_ok_and(|at| at as usize == hint) {
                let protection = MprotectFlags::READ | MprotectFlags::WRITE;
                // SAFETY: within the mapping that was just made.
                unsafe { mprotect((hint + page_size()) as *mut c_void, ROOM, protection) }
                    .expect("memory that was just mapped");
                return Self { base: hint };
            }
        }
        panic!("no memory between {LOWEST:#x} and {HIGHEST:#x} is free for packets");
    }

    fn end(&self) -> usize {
        self.base + page_size() + ROOM
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which nobody uses any more.
        let _ = unsafe { munmap(self.base as *mut c_void, ROOM + 2 * page_size()) };
    }
}

/// The packet of the program that runs on this thread: a linear part, and what is not at hand.
pub struct Frame {
    arena: Arena,
    linear: usize,
    rest: Vec<u8>,
    /// What is known of its checksum; the sum itself for [`Sum::Complete`].
    pub sum: Sum,
    pub whole: u16,
}

thread_local! {
    static FRAME: RefCell<Frame> = RefCell::new(Frame {
        arena: Arena::new(),
        linear: 0,
        rest: Vec::new(),
        sum: Sum::None,
        whole: 0,
    });
}

/// The packet of this thread's program.
pub fn current<R>(use_it: impl FnOnce(&mut Frame) -> R) -> R {
    FRAME.with_borrow_mut(use_it)
}

impl Frame {
    /// Lays a packet down.
    pub fn place(&mut self, packet: &Packet) {
        let (linear, rest) = packet.frame.split_at(packet.linear.min(packet.frame.len()));
        assert!(
            packet.frame.len() + 1024 <= ROOM,
            "a packet of {}",
            packet.frame.len()
        );
        self.linear = 0;
        self.set_linear(linear);
        self.rest = rest.to_vec();
        self.sum = packet.sum;
        self.whole = !Sum16BitWords::new()
            .add_slice(packet.frame.get(14..).unwrap_or_default())
            .ones_complement();
    }

    fn set_linear(&mut self, bytes: &[u8]) {
        self.linear = bytes.len();
        // SAFETY: within the arena's room, as checked when it was laid down or grew.
        unsafe {
            core::ptr::copy(
                bytes.as_ptr(),
                (self.arena.end() - bytes.len()) as *mut u8,
                bytes.len(),
            );
        }
    }

    /// The bytes at hand.
    pub fn linear(&self) -> &[u8] {
        // SAFETY: within the arena's room; programs do not run meanwhile.
        unsafe {
            core::slice::from_raw_parts((self.arena.end() - self.linear) as *const u8, self.linear)
        }
    }

    /// The same, to be written.
    pub fn linear_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; borrowed with the frame.
        unsafe {
            core::slice::from_raw_parts_mut(
                (self.arena.end() - self.linear) as *mut u8,
                self.linear,
            )
        }
    }

    /// All bytes.
    pub fn all(&self) -> Vec<u8> {
        [self.linear(), &self.rest].concat()
    }

    /// Length of all.
    pub fn len(&self) -> usize {
        self.linear + self.rest.len()
    }

    /// Brings so many bytes to hand; false where there are fewer.
    pub fn pull(&mut self, length: usize) -> bool {
        if length > self.len() {
            return false;
        }
        if let Some(more) = length.checked_sub(self.linear)
            && more > 0
        {
            let linear = [self.linear(), &self.rest[..more]].concat();
            self.rest.drain(..more);
            self.set_linear(&linear);
        }
        true
    }

    /// Cuts or lengthens the packet, with zeros.
    pub fn resize(&mut self, length: usize) {
        let mut bytes = self.all();
        bytes.resize(length, 0);
        self.rest.clear();
        self.set_linear(&bytes);
    }

    /// Where the bytes at hand are.
    fn bounds(&self) -> (u32, u32) {
        let end = self.arena.end();
        // Fits: the arena lies below HIGHEST.
        ((end - self.linear) as u32, end as u32)
    }

    /// Tells a context where the packet is now.
    pub fn tell_xdp(&self, context: &mut xdp_md) {
        (context.data, context.data_end) = self.bounds();
    }

    /// Likewise.
    pub fn tell_skb(&self, context: &mut __sk_buff) {
        (context.data, context.data_end) = self.bounds();
        context.len = self.len() as u32;
    }
}
