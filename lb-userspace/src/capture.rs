//! Frames out of a capture file, pcap or pcapng, as tcpdump and Wireshark write them.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use pcap_parser::pcapng::Block;
use pcap_parser::traits::PcapNGPacketBlock as _;
use pcap_parser::{Linktype, PcapBlockOwned, PcapError, create_reader};

/// A block that is larger than this is none of a sane file: captures of whole 64 KiB packets have 256 KiB.
const LARGEST: usize = 1 << 20;

/// Why a capture cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is something else.
    #[error(
        "{path} is no capture: it begins neither as pcap nor as pcapng (`tcpdump -w FILE` writes one)"
    )]
    NoCapture {
        /// The file.
        path: PathBuf,
    },
    /// Its packets do not begin with an Ethernet header.
    #[error(
        "packet {packet} of {path} has the link type {found}, not Ethernet: capture on the interface itself, not on `any`, a \
         tunnel or a Wi-Fi monitor"
    )]
    LinkType {
        /// The file.
        path: PathBuf,
        /// Number of the packet, from 1.
        packet: u64,
        /// The link type.
        found: String,
    },
    /// It is damaged.
    #[error("{path} is damaged after packet {after}: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The last packet that is whole, 0 for none.
        after: u64,
        /// Why.
        reason: String,
    },
}

/// A captured packet.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Its number, from 1.
    pub number: u64,
    /// What was captured of it.
    pub bytes: &'a [u8],
    /// How long it was.
    pub length: usize,
}

/// Calls `take` with the packets of a file in their order, until it says false. Returns how many packets were looked at.
///
/// A packet of another link type is an error when it is reached.
pub fn each<E: From<CaptureError>>(
    path: &Path,
    mut take: impl FnMut(Packet<'_>) -> Result<bool, E>,
) -> Result<u64, E> {
    let failed = |source| CaptureError::Read {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(failed)?;
    if file.metadata().is_ok_and(|meta| meta.is_dir()) {
        return Err(failed(io::ErrorKind::IsADirectory.into()).into());
    }
    let Ok(mut reader) = create_reader(LARGEST, file) else {
        let path = path.to_owned();
        return Err(CaptureError::NoCapture { path }.into());
    };
    // Of the interfaces of a pcapng section, or of the one of a pcap file.
    let mut link_types: Vec<Linktype> = Vec::new();
    let mut number = 0;
    let malformed = |after, reason: &str| CaptureError::Malformed {
        path: path.to_owned(),
        after,
        reason: reason.to_owned(),
    };
    loop {
        let consumed = match reader.next() {
            Ok((offset, block)) => {
                let packet = match &block {
                    PcapBlockOwned::LegacyHeader(header) => {
                        link_types = vec![header.network];
                        None
                    }
                    PcapBlockOwned::Legacy(packet) => Some((0, packet.data, packet.origlen)),
                    PcapBlockOwned::NG(Block::SectionHeader(_)) => {
                        link_types.clear();
                        None
                    }
                    PcapBlockOwned::NG(Block::InterfaceDescription(interface)) => {
                        link_types.push(interface.linktype);
                        None
                    }
                    PcapBlockOwned::NG(Block::EnhancedPacket(packet)) => {
                        Some((packet.if_id, packet.packet_data(), packet.origlen))
                    }
                    PcapBlockOwned::NG(Block::SimplePacket(packet)) => {
                        Some((0, packet.packet_data(), packet.origlen))
                    }
                    PcapBlockOwned::NG(_) => None,
                };
                if let Some((interface, bytes, length)) = packet {
                    let Some(link_type) = link_types.get(interface as usize) else {
                        let reason = "a packet of an interface that it does not describe";
                        return Err(malformed(number, reason).into());
                    };
                    number += 1;
                    if *link_type != Linktype::ETHERNET {
                        return Err(CaptureError::LinkType {
                            path: path.to_owned(),
                            packet: number,
                            found: link_type.to_string(),
                        }
                        .into());
                    }
                    let packet = Packet {
                        number,
                        bytes,
                        length: bytes.len().max(length as usize),
                    };
                    if !take(packet)? {
                        return Ok(number);
                    }
                }
                Some(offset)
            }
            Err(PcapError::Eof) => return Ok(number),
            Err(PcapError::Incomplete(_)) => None,
            Err(PcapError::UnexpectedEof) => {
                return Err(malformed(number, "it ends within a packet").into());
            }
            Err(PcapError::BufferTooSmall) => {
                return Err(malformed(number, "a packet of more than 1 MiB").into());
            }
            Err(_) => return Err(malformed(number, "what follows is no packet").into()),
        };
        match consumed {
            Some(offset) => reader.consume(offset),
            None if reader.reader_exhausted() => {
                return Err(malformed(number, "it ends within a packet").into());
            }
            None => {
                if reader.refill().is_err() {
                    return Err(malformed(number, "it cannot be read on").into());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    /// A pcap file of one link type, as libpcap writes it.
    fn pcap(link_type: u32, packets: &[&[u8]]) -> Vec<u8> {
        let mut file = 0xa1b2_c3d4_u32.to_le_bytes().to_vec();
        file.extend([2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        file.extend(262_144_u32.to_le_bytes());
        file.extend(link_type.to_le_bytes());
        for packet in packets {
            let length = packet.len() as u32;
            for word in [1, 2, length, length + 100] {
                file.extend(word.to_le_bytes());
            }
            file.extend(*packet);
        }
        file
    }

    /// What is read of a file: number, bytes and length of each packet, or the error.
    fn read(bytes: &[u8]) -> Result<Vec<(u64, Vec<u8>, usize)>, String> {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(bytes).expect("written");
        let mut packets = Vec::new();
        let seen = each::<CaptureError>(file.path(), |packet| {
            packets.push((packet.number, packet.bytes.to_vec(), packet.length));
            Ok(true)
        });
        seen.map_err(|error| {
            let path = file.path().display().to_string();
            error.to_string().replace(&path, "FILE")
        })?;
        Ok(packets)
    }

    #[test]
    fn packets_come_in_order_with_their_lengths() {
        let large = vec![7; 65_000];
        let file = pcap(1, &[&[1; 60], &large]);
        let packets = read(&file).expect("a capture");
        assert_eq!(packets, [(1, vec![1; 60], 160), (2, large, 65_100)]);
        assert_eq!(read(&pcap(1, &[])), Ok(Vec::new()));
    }

    #[test]
    fn what_is_wrong_with_a_file_is_told() {
        let cut = pcap(1, &[&[1; 60], &[2; 60]]);
        let cases: [(Vec<u8>, &str); 4] = [
            (Vec::new(), "FILE is no capture"),
            (
                b"apiVersion: ironlb.dev/v1\nuplinks: []\n".to_vec(),
                "FILE is no capture",
            ),
            (
                cut[..cut.len() - 10].to_vec(),
                "FILE is damaged after packet 1: it ends within a packet",
            ),
            (
                pcap(113, &[&[1; 60]]),
                "packet 1 of FILE has the link type LINUX_SLL",
            ),
        ];
        for (bytes, expected) in cases {
            let said = read(&bytes).expect_err("not to be read");
            assert!(said.starts_with(expected), "{said}");
        }
    }
}
