//! The kernel's helpers that the programs call, with what they return and refuse (`net/core/filter.c`,
//! `net/core/utils.c`), over the thread's [`frame`](crate::frame) and [`store`](crate::store).

use core::ffi::c_void;
use core::mem::offset_of;

use crate::bindings::{__sk_buff, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM, xdp_md};
use crate::frame::{self, Frame, Sum};
use crate::maps::Route;
use crate::store;

const EINVAL: i64 = -22;
const EFAULT: i64 = -14;
const ENOMEM: i64 = -12;
const ENOTSUPP: i64 = -524;
/// `BPF_FIB_LKUP_RET_NO_NEIGH`.
const NO_NEIGHBOR: i64 = 7;
/// An Ethernet header.
const LINK: usize = 14;

pub unsafe fn bpf_jiffies64() -> u64 {
    store::current(|store| store.clock.jiffies)
}

pub unsafe fn bpf_ktime_get_boot_ns() -> u64 {
    store::current(|store| store.clock.boot)
}

pub unsafe fn bpf_get_prandom_u32() -> u32 {
    store::current(|store| {
        // Any will do, and the same in every run: a step of a 64-bit congruential generator (Knuth's).
        store.random = store
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (store.random >> 32) as u32
    })
}

/// Sum of 16-bit words in memory order, folded.
fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// `csum_replace4`, `csum_replace2` and `csum_replace_by_diff`: what is added is the sum of `!from` and `to`.
fn replaced(sum: u16, difference: u64) -> u16 {
    !fold(u64::from(!u32::from(sum)) + difference)
}

/// What replacing a field of up to four bytes adds to a sum.
fn difference(from: u64, to: u64) -> u64 {
    u64::from(!(from as u32)) + u64::from(to as u32)
}

/// Does with a packet at TC what makes its first bytes writable, and tells the context of it.
fn with_writable<R>(
    skb: *mut __sk_buff,
    length: usize,
    change: impl FnOnce(&mut Frame) -> R,
) -> Result<R, i64> {
    frame::current(|frame| {
        let is_there = frame.pull(length);
        // SAFETY: the program's own context.
        frame.tell_skb(unsafe { &mut *skb });
        is_there.then(|| change(frame)).ok_or(EFAULT)
    })
}

fn code(result: Result<i64, i64>) -> i64 {
    result.unwrap_or_else(|code| code)
}

fn read16(frame: &Frame, offset: usize) -> u16 {
    let bytes = frame.linear();
    u16::from_ne_bytes([bytes[offset], bytes[offset + 1]])
}

pub unsafe fn bpf_skb_pull_data(skb: *mut __sk_buff, length: u32) -> i64 {
    match with_writable(skb, length as usize, |_| ()) {
        Ok(()) => 0,
        Err(_) => ENOMEM,
    }
}

pub unsafe fn bpf_skb_load_bytes(
    _skb: *const c_void,
    offset: u32,
    to: *mut c_void,
    length: u32,
) -> i64 {
    let (offset, length) = (offset as usize, length as usize);
    // SAFETY: the program says how long it is.
    let to = unsafe { core::slice::from_raw_parts_mut(to.cast::<u8>(), length) };
    let all = frame::current(|frame| frame.all());
    match all.get(offset..offset + length) {
        Some(bytes) => {
            to.copy_from_slice(bytes);
            0
        }
        None => {
            to.fill(0);
            EFAULT
        }
    }
}

pub unsafe fn bpf_skb_store_bytes(
    skb: *mut __sk_buff,
    offset: u32,
    from: *const c_void,
    length: u32,
    flags: u64,
) -> i64 {
    let (offset, length) = (offset as usize, length as usize);
    let stored = with_writable(skb, offset + length, |frame| {
        // SAFETY: the program says how long it is.
        let new = unsafe { core::slice::from_raw_parts(from.cast::<u8>(), length) };
        let before = frame.linear()[LINK.min(offset)..].to_vec();
        frame.linear_mut()[offset..offset + length].copy_from_slice(new);
        if flags & u64::from(BPF_F_RECOMPUTE_CSUM) != 0 && frame.sum == Sum::Complete {
            assert!(
                offset >= LINK && offset % 2 == 0,
                "summed bytes at {offset}"
            );
            let old = &before[offset - LINK..][..length];
            frame.whole = fold(u64::from(frame.whole) + words(new) + 0xffff - words(old));
        }
        0
    });
    code(stored)
}

/// Sum of a slice's 16-bit words, folded.
fn words(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(2);
    let sum =
        words.map(|pair| u64::from(u16::from_ne_bytes([pair[0], *pair.get(1).unwrap_or(&0)])));
    u64::from(fold(sum.sum()))
}

pub unsafe fn bpf_l3_csum_replace(
    skb: *mut __sk_buff,
    offset: u32,
    from: u64,
    to: u64,
    size: u64,
) -> i64 {
    if offset > 0xffff || offset & 1 != 0 {
        return EFAULT;
    }
    if size != 2 && size != 4 {
        return EINVAL;
    }
    let offset = offset as usize;
    code(with_writable(skb, offset + 2, |frame| {
        let sum = replaced(read16(frame, offset), difference(from, to));
        frame.linear_mut()[offset..offset + 2].copy_from_slice(&sum.to_ne_bytes());
        0
    }))
}

pub unsafe fn bpf_l4_csum_replace(
    skb: *mut __sk_buff,
    offset: u32,
    from: u64,
    to: u64,
    flags: u64,
) -> i64 {
    let pseudo = flags & u64::from(BPF_F_PSEUDO_HDR) != 0;
    let added = match flags & 0xf {
        0 if from == 0 => to,
        2 => difference(from, to),
        4 => difference(from, to),
        _ => return EINVAL,
    };
    if flags & !(u64::from(BPF_F_PSEUDO_HDR) | 0xf) != 0 {
        return EINVAL;
    }
    if offset > 0xffff || offset & 1 != 0 {
        return EFAULT;
    }
    let offset = offset as usize;
    code(with_writable(skb, offset + 2, |frame| {
        let sum = read16(frame, offset);
        let new = match frame.sum {
            // The device sums the rest: only the pseudo-header's part is there, not complemented.
            Sum::Partial if pseudo => fold(u64::from(sum) + added),
            Sum::Partial => sum,
            Sum::None | Sum::Complete => replaced(sum, added),
        };
        if frame.sum == Sum::Complete && pseudo {
            // The checksum makes up for an address that stands elsewhere, and that is stored without another word.
            frame.whole = fold(u64::from(frame.whole) + 0xffff - u64::from(fold(added)));
        }
        frame.linear_mut()[offset..offset + 2].copy_from_slice(&new.to_ne_bytes());
        0
    }))
}

pub unsafe fn bpf_csum_update(_skb: *mut __sk_buff, sum: u32) -> i64 {
    frame::current(|frame| {
        if frame.sum != Sum::Complete {
            return ENOTSUPP;
        }
        frame.whole = fold(u64::from(frame.whole) + u64::from(sum));
        i64::from(frame.whole)
    })
}

pub unsafe fn bpf_skb_change_tail(skb: *mut __sk_buff, length: u32, flags: u64) -> i64 {
    let length = length as usize;
    if flags != 0 || length < LINK {
        return EINVAL;
    }
    frame::current(|frame| {
        let all = frame.all();
        if frame.sum == Sum::Complete && length < all.len() {
            let (cut, is_odd) = (words(&all[length..]), (length - LINK) % 2 == 1);
            let cut = if is_odd {
                u64::from((cut as u16).swap_bytes())
            } else {
                cut
            };
            frame.whole = fold(u64::from(frame.whole) + 0xffff - cut);
        }
        frame.resize(length);
        // SAFETY: the program's own context.
        frame.tell_skb(unsafe { &mut *skb });
    });
    0
}

pub unsafe fn bpf_xdp_adjust_tail(context: *mut xdp_md, change: i32) -> i64 {
    frame::current(|frame| {
        let length = frame.len() as i64 + i64::from(change);
        if length < LINK as i64 {
            return EINVAL;
        }
        frame.resize(length as usize);
        // SAFETY: the program's own context.
        frame.tell_xdp(unsafe { &mut *context });
        0
    })
}

pub unsafe fn bpf_fib_lookup(
    _context: *mut c_void,
    question: *mut c_void,
    length: i32,
    _flags: u32,
) -> i64 {
    if length as usize != size_of::<Route>() {
        return EINVAL;
    }
    let Some(mac) = store::current(|store| store.neighbor) else {
        return NO_NEIGHBOR;
    };
    // SAFETY: as long as the program says.
    unsafe {
        question
            .byte_add(offset_of!(Route, mac))
            .cast::<[u8; 6]>()
            .write(mac);
    }
    0
}
