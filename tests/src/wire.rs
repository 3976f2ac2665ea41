//! Single frames: sent as they are, and looked for among those that arrive.

use std::io;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use etherparse::{ArpEthIpv4Packet, ArpOperation, PacketBuilder, VlanId};
use ironlb::packet::link_address;
use socket2::{Domain, Protocol, Socket, Type};

use crate::namespace::Namespace;

/// `ETH_P_ALL` of `linux/if_ether.h`.
const ALL_PROTOCOLS: u16 = 3;

/// A packet socket on one interface.
#[derive(Debug)]
pub struct Wire {
    socket: Socket,
    mac: [u8; 6],
}

impl Wire {
    /// Opens `interface` of `namespace`.
    ///
    /// # Errors
    /// When there is no such interface or no right to open it.
    pub fn open(namespace: &Namespace, interface: &str) -> Result<Self> {
        let (index, mac) = namespace.interface(interface)?;
        let socket = namespace.enter(|| -> io::Result<Socket> {
            let protocol = Protocol::from(i32::from(ALL_PROTOCOLS.to_be()));
            let socket = Socket::new(Domain::PACKET, Type::RAW, Some(protocol))?;
            socket.bind(&link_address(index, ALL_PROTOCOLS)?)?;
            Ok(socket)
        })?;
        let socket =
            socket.with_context(|| format!("cannot open a packet socket on {interface}"))?;
        Ok(Self { socket, mac })
    }

    /// The interface's own MAC.
    pub fn mac(&self) -> [u8; 6] {
        self.mac
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// When the interface does not take it.
    pub fn send(&self, frame: &[u8]) -> Result<()> {
        self.socket.send(frame).context("cannot send a frame")?;
        Ok(())
    }

    /// The first frame within `limit` that `want` takes for something.
    ///
    /// # Errors
    /// When frames cannot be received.
    pub fn receive<T>(
        &self,
        limit: Duration,
        mut want: impl FnMut(&[u8]) -> Option<T>,
    ) -> Result<Option<T>> {
        use std::io::Read;
        let end = Instant::now() + limit;
        let mut frame = vec![0; 65_536];
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            // Zero would mean for ever.
            self.socket
                .set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            match (&self.socket).read(&mut frame) {
                Ok(length) => {
                    if let Some(found) = want(&frame[..length]) {
                        return Ok(Some(found));
                    }
                }
                // With a time-out, a process that was stopped for a while gets the latter, signal handlers or not
                // (signal(7)).
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(error).context("cannot receive frames"),
            }
        }
        Ok(None)
    }

    /// Asks for the MAC of `address` by ARP, in `vlan` if given, and returns who answers within `limit`.
    ///
    /// # Errors
    /// When frames cannot be sent or received.
    pub fn resolve(
        &self,
        own: Ipv4Addr,
        address: Ipv4Addr,
        vlan: Option<u16>,
        limit: Duration,
    ) -> Result<Option<[u8; 6]>> {
        self.send(&arp_question(self.mac, own, address, vlan)?)?;
        self.receive(limit, |frame| arp_answer(frame, address))
    }
}

/// The MAC that a frame claims for `address`, if it is an ARP answer about it to somebody who asked.
pub(crate) fn arp_answer(frame: &[u8], address: Ipv4Addr) -> Option<[u8; 6]> {
    let packet = etherparse::SlicedPacket::from_ethernet(frame).ok()?;
    let Some(etherparse::NetSlice::Arp(arp)) = packet.net else {
        return None;
    };
    let arp = arp.to_packet().try_eth_ipv4().ok()?;
    // What tells of an address unasked names it at both ends.
    let is_answer = arp.operation == ArpOperation::REPLY && arp.target_ipv4 != address.octets();
    (is_answer && arp.sender_ipv4 == address.octets()).then_some(arp.sender_mac)
}

/// A broadcast frame with the question who has `address`.
///
/// # Errors
/// When `vlan` is not a VLAN id.
pub fn arp_question(
    mac: [u8; 6],
    own: Ipv4Addr,
    address: Ipv4Addr,
    vlan: Option<u16>,
) -> Result<Vec<u8>> {
    let question = ArpEthIpv4Packet {
        operation: ArpOperation::REQUEST,
        sender_mac: mac,
        sender_ipv4: own.octets(),
        target_mac: [0; 6],
        target_ipv4: address.octets(),
    };
    let frame = PacketBuilder::ethernet2(mac, [0xff; 6]);
    let mut bytes = Vec::new();
    match vlan {
        None => frame.arp(question.into()).write(&mut bytes)?,
        Some(id) => frame
            .single_vlan(VlanId::try_new(id)?)
            .arp(question.into())
            .write(&mut bytes)?,
    }
    Ok(bytes)
}
