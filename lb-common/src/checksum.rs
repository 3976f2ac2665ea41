//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624).
//!
//! The sum is the same in either byte order as long as all words are read alike, so everything here
//! works on words as they lie in memory.

/// Folds a sum of 16-bit words into 16 bits with end-around carry.
#[inline(always)]
pub const fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// What replacing a 16-bit word adds to a sum.
#[inline(always)]
pub const fn replaced16(old: u16, new: u16) -> u32 {
    !old as u32 + new as u32
}

/// What replacing a 32-bit word adds to a sum.
#[inline(always)]
pub const fn replaced32(old: u32, new: u32) -> u32 {
    replaced16(old as u16, new as u16) + replaced16((old >> 16) as u16, (new >> 16) as u16)
}

/// The checksum field after words changed: `~(~HC + ~m + m')`, RFC 1624 equation 3. `delta` is the sum
/// of [`replaced16`] and [`replaced32`] of up to 32 k words.
#[inline(always)]
pub const fn update(checksum: u16, delta: u32) -> u16 {
    !fold(!checksum as u32 + fold(delta) as u32)
}

/// Sum of the four-byte words of a header.
#[inline(always)]
pub fn sum_words<const N: usize>(words: &[u32; N]) -> u32 {
    let mut sum = 0;
    for word in words {
        sum += (word & 0xffff) + (word >> 16);
    }
    sum
}

/// Sum of the IPv4 pseudo-header (RFC 9293 section 3.1). Addresses as they lie in a packet, protocol
/// and length (of TCP header and data) in host order.
#[inline(always)]
pub const fn pseudo_v4(source: u32, destination: u32, protocol: u8, length: u16) -> u32 {
    (source & 0xffff)
        + (source >> 16)
        + (destination & 0xffff)
        + (destination >> 16)
        + (protocol as u16).to_be() as u32
        + length.to_be() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The checksum of bytes, from its definition.
    fn checksum(bytes: &[u8]) -> u16 {
        let mut sum = 0_u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(u16::from_ne_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
        }
        !fold(sum)
    }

    /// Zero and 0xffff are the same number in one's complement.
    fn same(a: u16, b: u16) -> bool {
        a == b || (a == 0 && b == 0xffff) || (a == 0xffff && b == 0)
    }

    proptest! {
        #[test]
        fn an_incremental_update_equals_the_sum_from_scratch(
            bytes in prop::collection::vec(any::<u8>(), 8..1500), new32: u32, new16: u16,
        ) {
            let mut bytes = bytes;
            let before = checksum(&bytes);
            let old32 = u32::from_ne_bytes(bytes[..4].try_into().expect("four"));
            let old16 = u16::from_ne_bytes(bytes[4..6].try_into().expect("two"));
            bytes[..4].copy_from_slice(&new32.to_ne_bytes());
            bytes[4..6].copy_from_slice(&new16.to_ne_bytes());
            let after = update(before, replaced32(old32, new32) + replaced16(old16, new16));
            prop_assert!(same(after, checksum(&bytes)), "{after:#x} {:#x}", checksum(&bytes));
        }

        #[test]
        fn an_update_is_undone_by_its_reverse(sum: u16, old: u32, new: u32) {
            let there = update(sum, replaced32(old, new));
            prop_assert!(same(update(there, replaced32(new, old)), sum));
        }
    }

    #[test]
    fn extreme_words_do_not_overflow() {
        for (sum, old, new) in [
            (0, u32::MAX, 0),
            (u16::MAX, 0, u32::MAX),
            (0, 0, 0),
            (u16::MAX, u32::MAX, u32::MAX),
        ] {
            let there = update(sum, replaced32(old, new));
            assert!(same(update(there, replaced32(new, old)), sum));
        }
        assert_eq!(fold(u32::MAX), 0xffff);
    }
}
