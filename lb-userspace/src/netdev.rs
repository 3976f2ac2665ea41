//! What a device's driver can do in XDP, as the kernel's `netdev` family of generic netlink tells it (Linux 6.3 and
//! later, `Documentation/netlink/specs/netdev.yaml`). Asks in the network namespace of the calling thread.

use std::io;

use netlink_sys::protocols::NETLINK_GENERIC;
use netlink_sys::{Socket, SocketAddr};

/// Number of the family that knows the others, its question for one, and the attributes of question and answer
/// (`linux/genetlink.h`).
const CONTROL: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
/// `NETDEV_CMD_DEV_GET` and its attributes (`linux/netdev.h`).
const GET_DEVICE: u8 = 1;
const DEVICE_INDEX: u16 = 1;
const DEVICE_FEATURES: u16 = 3;
/// `NLMSG_ERROR` and `NLM_F_REQUEST` (`linux/netlink.h`).
const ERROR: u16 = 2;
const REQUEST: u16 = 1;
/// Bytes of a message's header and of the generic one behind it.
const HEADER: usize = 16;
const HEADERS: usize = HEADER + 4;

/// What a driver can do natively.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct XdpFeatures {
    /// Programs that pass, drop, and send back.
    pub basic: bool,
    /// Packets in several buffers.
    pub frags: bool,
}

impl XdpFeatures {
    /// `NETDEV_XDP_ACT_BASIC` and `NETDEV_XDP_ACT_RX_SG`.
    fn from_bits(bits: u64) -> Self {
        Self {
            basic: bits & 1 != 0,
            frags: bits & 1 << 5 != 0,
        }
    }
}

/// What the driver of an interface can do; `None` on a kernel that does not tell.
///
/// # Errors
/// What the kernel says, e.g. that there is no such interface.
pub fn xdp_features(ifindex: u32) -> io::Result<Option<XdpFeatures>> {
    let family = match ask(CONTROL, GET_FAMILY, FAMILY_NAME, b"netdev\0") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        answer => answer?,
    };
    let Some(family) = attribute(&family, FAMILY_ID).and_then(|id| id.first_chunk()) else {
        return Ok(None);
    };
    let family = u16::from_ne_bytes(*family);
    let device = ask(family, GET_DEVICE, DEVICE_INDEX, &ifindex.to_ne_bytes())?;
    let features = attribute(&device, DEVICE_FEATURES).and_then(|bits| bits.first_chunk());
    Ok(features.map(|bits| XdpFeatures::from_bits(u64::from_ne_bytes(*bits))))
}

/// A question with one attribute; the answer without its headers.
fn ask(family: u16, command: u8, kind: u16, value: &[u8]) -> io::Result<Vec<u8>> {
    let mut socket = Socket::new(NETLINK_GENERIC)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&question(family, command, kind, value), 0)?;
    let (answer, _) = socket.recv_from_full()?;
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let found = answer.get(4..6).and_then(|kind| kind.first_chunk());
    if found.map(|kind| u16::from_ne_bytes(*kind)) == Some(ERROR) {
        let code = answer.get(HEADER..).and_then(|rest| rest.first_chunk());
        let code = i32::from_ne_bytes(*code.ok_or_else(invalid)?);
        return Err(io::Error::from_raw_os_error(-code));
    }
    answer
        .get(HEADERS..)
        .map(<[u8]>::to_vec)
        .ok_or_else(invalid)
}

fn question(family: u16, command: u8, kind: u16, value: &[u8]) -> Vec<u8> {
    let attribute = 4 + value.len();
    let length = HEADERS + attribute.next_multiple_of(4);
    let mut message = Vec::with_capacity(length);
    message.extend((length as u32).to_ne_bytes());
    message.extend(family.to_ne_bytes());
    message.extend(REQUEST.to_ne_bytes());
    // Sequence number and port: there is one answer, and the kernel fills in the port.
    message.extend([0; 8]);
    message.extend([command, 1, 0, 0]);
    message.extend((attribute as u16).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(value);
    message.resize(length, 0);
    message
}

/// The value of an attribute, among attributes one behind the other.
fn attribute(mut rest: &[u8], wanted: u16) -> Option<&[u8]> {
    /// Nested, and in network order: not part of the kind.
    const FLAGS: u16 = 0xc000;
    loop {
        let length = usize::from(u16::from_ne_bytes(*rest.first_chunk()?));
        let kind = u16::from_ne_bytes(*rest.get(2..)?.first_chunk()?) & !FLAGS;
        let value = rest.get(4..length)?;
        if kind == wanted {
            return Some(value);
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_is_found_behind_others_and_a_cut_one_is_not() {
        let mut bytes = Vec::new();
        for (kind, value) in [(1_u16, &b"odd"[..]), (3, &[33, 0, 0, 0, 0, 0, 0, 0])] {
            bytes.extend((4 + value.len() as u16).to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend(value);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        assert_eq!(attribute(&bytes, 1), Some(&b"odd"[..]));
        assert_eq!(attribute(&bytes, 3).map(<[u8]>::len), Some(8));
        assert_eq!(attribute(&bytes, 2), None);
        assert_eq!(attribute(&bytes[..14], 3), None);
        let features = XdpFeatures::from_bits(33);
        assert!(features.basic && features.frags);
        assert_eq!(XdpFeatures::from_bits(2), XdpFeatures::default());
    }

    #[test]
    fn the_loopback_device_has_no_native_xdp_and_one_that_is_not_there_is_an_error() {
        // A kernel before 6.3 says nothing of either.
        let Some(features) = xdp_features(1).expect("netlink answers") else {
            return;
        };
        assert_eq!(features, XdpFeatures::default());
        xdp_features(u32::MAX).expect_err("no such interface");
    }
}
