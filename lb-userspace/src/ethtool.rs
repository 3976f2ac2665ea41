//! What a device's driver says of itself (`ethtool -i`, `-k`, `-S`). Asks in the network namespace of the calling thread.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::io;

use rustix::ioctl::{Updater, ioctl};
use socket2::{Domain, Socket, Type};

/// `SIOCETHTOOL` of `linux/sockios.h`.
const SIOCETHTOOL: rustix::ioctl::Opcode = 0x8946;
/// `ETHTOOL_GSSET_INFO`, `ETHTOOL_GSTRINGS` and `ETHTOOL_GSTATS` of `linux/ethtool.h`.
const GET_SIZES: u32 = 0x37;
const GET_NAMES: u32 = 0x1b;
const GET_VALUES: u32 = 0x1d;
/// `ETHTOOL_GDRVINFO` of `linux/ethtool.h`.
const GET_DRIVER: u32 = 0x03;
/// `ETH_SS_STATS`: of all sets of names, that of the counters.
const COUNTERS: u32 = 1;
/// `ETH_GSTRING_LEN`, bytes.
const NAME_LENGTH: usize = 32;

/// `struct ifreq` with `ifr_data`.
#[repr(C)]
struct Request {
    name: [u8; 16],
    data: *mut c_void,
    rest: [u8; 16],
}

const _: () = assert!(size_of::<Request>() == 40);

/// The counters of an interface; none where its driver keeps none.
///
/// # Errors
/// What the kernel says, e.g. that there is no such interface.
pub fn counters(interface: &str) -> io::Result<BTreeMap<String, u64>> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    // struct ethtool_sset_info: cmd, reserved, sset_mask (u64), data[].
    let mut sizes = vec![0_u32; 5];
    sizes[0] = GET_SIZES;
    sizes[2] = 1 << COUNTERS;
    if let Err(error) = ask(&socket, interface, sizes.as_mut_ptr().cast()) {
        return match error.kind() {
            io::ErrorKind::Unsupported => Ok(BTreeMap::new()),
            _ => Err(error),
        };
    }
    // The mask comes back without the sets that the driver does not have.
    let count = if sizes[2] == 0 { 0 } else { sizes[4] as usize };
    if count == 0 {
        return Ok(BTreeMap::new());
    }

    // struct ethtool_gstrings: cmd, string_set, len, data[].
    let mut names = vec![0_u8; 12 + count * NAME_LENGTH];
    names[..4].copy_from_slice(&GET_NAMES.to_ne_bytes());
    names[4..8].copy_from_slice(&COUNTERS.to_ne_bytes());
    names[8..12].copy_from_slice(&(count as u32).to_ne_bytes());
    ask(&socket, interface, names.as_mut_ptr().cast())?;

    // struct ethtool_stats: cmd, n_stats, data[].
    let mut values = vec![0_u64; 1 + count];
    let mut head = [0; 8];
    head[..4].copy_from_slice(&GET_VALUES.to_ne_bytes());
    head[4..].copy_from_slice(&(count as u32).to_ne_bytes());
    values[0] = u64::from_ne_bytes(head);
    ask(&socket, interface, values.as_mut_ptr().cast())?;

    let names = names[12..].chunks_exact(NAME_LENGTH).map(|name| {
        let end = name.iter().position(|byte| *byte == 0);
        String::from_utf8_lossy(&name[..end.unwrap_or(name.len())]).into_owned()
    });
    Ok(names.zip(values.into_iter().skip(1)).collect())
}

/// The driver of an interface, e.g. `virtio_net`.
///
/// # Errors
/// What the kernel says, e.g. that there is no such interface.
pub fn driver(interface: &str) -> io::Result<String> {
    /// Place and length of the name in `struct ethtool_drvinfo`, which has 196 bytes.
    const NAME: std::ops::Range<usize> = 4..36;
    let mut info = [0_u32; 49];
    info[0] = GET_DRIVER;
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    ask(&socket, interface, info.as_mut_ptr().cast())?;
    let bytes = info.into_iter().flat_map(u32::to_ne_bytes);
    let name: Vec<u8> = bytes.skip(NAME.start).take(NAME.len()).collect();
    let end = name.iter().position(|byte| *byte == 0);
    Ok(String::from_utf8_lossy(&name[..end.unwrap_or(name.len())]).into_owned())
}

/// An offload that may stand in a program's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// Senders leave checksums to the device (`tx`).
    TransmitChecksum,
    /// Packets are merged on the way in (`gro`); a veth with it has NAPI.
    Gro,
    /// The device merges packets (`lro`).
    Lro,
    /// The device takes VLAN tags off (`rxvlan`).
    ReceiveVlan,
}

/// Whether an offload is on.
///
/// # Errors
/// What the kernel says, e.g. that there is no such interface.
pub fn offload(interface: &str, offload: Offload) -> io::Result<bool> {
    // ETHTOOL_GTXCSUM, ETHTOOL_GGRO, and ETHTOOL_GFLAGS with ETH_FLAG_LRO and ETH_FLAG_RXVLAN.
    let (command, bits) = match offload {
        Offload::TransmitChecksum => (0x16, u32::MAX),
        Offload::Gro => (0x2b, u32::MAX),
        Offload::Lro => (0x25, 1 << 15),
        Offload::ReceiveVlan => (0x25, 1 << 8),
    };
    // struct ethtool_value: cmd, data.
    let mut value = [command, 0_u32];
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    ask(&socket, interface, value.as_mut_ptr().cast())?;
    Ok(value[1] & bits != 0)
}

/// `command` points to a command of ethtool with the room for its answer that it says.
fn ask(socket: &Socket, interface: &str, command: *mut c_void) -> io::Result<()> {
    let mut name = [0; 16];
    let bytes = interface.as_bytes();
    if bytes.len() >= name.len() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    name[..bytes.len()].copy_from_slice(bytes);
    let mut request = Request {
        name,
        data: command,
        rest: [0; 16],
    };
    // SAFETY: SIOCETHTOOL takes a `struct ifreq`, which Request is, whose `ifr_data` points to a command:
    // the callers' buffers are as long as the counts in them say, and the kernel writes no more than that.
    unsafe { ioctl(socket, Updater::<SIOCETHTOOL, Request>::new(&mut request)) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_counters_has_none_and_one_that_is_not_there_is_an_error() {
        assert_eq!(counters("lo").expect("lo"), BTreeMap::new());
        counters("ironlb-none").expect_err("no such interface");
        counters("a-name-that-is-too-long").expect_err("no such interface");
    }

    #[test]
    fn the_loopback_device_tells_its_offloads_but_has_no_driver() {
        assert!(offload("lo", Offload::TransmitChecksum).expect("lo"));
        assert!(!offload("lo", Offload::ReceiveVlan).expect("lo"));
        offload("ironlb-none", Offload::Gro).expect_err("no such interface");
        driver("lo").expect_err("no driver");
    }
}
