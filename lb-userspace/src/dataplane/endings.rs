//! Flows that end because their backend is gone: both ends are told, and silence is no reason to wait.
//!
//! The programs refuse a client's next packet, but a client that only receives sends none, and a pod that still runs
//! would go on sending to it. Of flows to pods of other nodes their nodes tell; of those of a dead node the one that
//! handed them on.

use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use aya::maps::{Array, HashMap, MapData};
use lb_common::events::{BY_AGENT, Ending};
use lb_common::packet::{TCP_RST, TcpHeader, protocol};
use lb_common::{
    BACKEND_ALIVE, Backend, FLOW_ELSEWHERE, FORWARD, Flow, FlowKey, MAX_UPLINKS, PEER_REFLECTS,
    Peer, Uplink, backend_generation, backend_index, from_name, map, peer_link,
};
use socket2::{Domain, Socket, Type};
use tracing::debug;

use super::maps::{pinned, uplinks};
use super::pins::layout_dir;
use super::read::{Clock, Reader};
use super::{DataplaneError, boot_time, nanoseconds};
use crate::interfaces::Host;
use crate::packet::{ip_header, transport_checksum};

/// So many resets are sent before others get their turn.
const BURST: usize = 256;
/// How long that takes.
const PAUSE: Duration = Duration::from_millis(2);

/// How long the programs stay for clients that ask back before all is unloaded.
const ASKED_BACK: Duration = Duration::from_millis(200);

/// Which flows are to end.
pub(super) enum Which<'a> {
    /// Those whose backend is gone, or has one of these indices and is about to be.
    Gone(&'a HashSet<u16>),
    /// All that live.
    All,
}

/// Ends flows of the data plane below `root`: takes them out of the tables, and resets client and pod. Returns what they
/// were.
pub(super) fn end(root: &Path, which: &Which<'_>) -> Result<Vec<Ending>, DataplaneError> {
    let dir = layout_dir(root);
    let mut living: HashMap<MapData, FlowKey, Flow> = pinned(&dir, map::LIVING)?;
    let mut replies: HashMap<MapData, FlowKey, Flow> = pinned(&dir, map::LIVING_REPLY)?;
    let mut young: HashMap<MapData, FlowKey, Flow> = pinned(&dir, map::YOUNG)?;
    let backends: Array<MapData, Backend> = pinned(&dir, map::BACKENDS)?;
    let peers: Array<MapData, Peer> = pinned(&dir, map::PEERS)?;
    let row = |flow: &Flow| {
        let row = backends.get(&backend_index(flow.backend), 0).ok()?;
        (row.generation == backend_generation(flow.backend)).then_some(row)
    };
    let ends = |flow: &Flow| match which {
        Which::All => true,
        Which::Gone(going) => {
            let lives = row(flow).is_some_and(|row| row.flags & BACKEND_ALIVE != 0);
            !lives || going.contains(&(backend_index(flow.backend) as u16))
        }
    };
    let reflects = |number: u16| {
        (0..MAX_UPLINKS).any(|uplink| {
            let peer = peers.get(&peer_link(u32::from(number), uplink), 0);
            peer.is_ok_and(|peer| peer.flags & PEER_REFLECTS != 0)
        })
    };
    let is_orphan = |flow: &Flow| {
        flow.state & FLOW_ELSEWHERE != 0
            && row(flow).is_some_and(|row| row.peer != 0 && !reflects(row.peer))
    };
    // A key that is removed under the iterator sends it back to the start: an end to it.
    let most = 2 * Reader::open(root)?.capacity(map::LIVING)? as usize;
    let mut over = Vec::new();
    for entry in living.iter().take(most) {
        let (key, flow) =
            entry.map_err(|source| DataplaneError::map("read", map::LIVING, source))?;
        if key.direction == FORWARD && ends(&flow) {
            over.push((key, flow));
        }
    }
    let has_orphans = match which {
        Which::All => false,
        Which::Gone(going) => going.iter().any(|index| {
            let row = backends.get(&u32::from(*index), 0);
            row.is_ok_and(|row| row.peer != 0 && !reflects(row.peer))
        }),
    };
    if has_orphans {
        let most = 2 * Reader::open(root)?.capacity(map::YOUNG)? as usize;
        let entries = young.iter().take(most).filter_map(Result::ok);
        over.extend(entries.filter(|(_, flow)| is_orphan(flow) && ends(flow)));
    }
    let clock = Clock::now();
    let mut resets = Resets::default();
    let mut told: HashSet<FlowKey> = HashSet::new();
    let mut ended = Vec::new();
    for (key, flow) in over {
        if !told.insert(key) {
            continue;
        }
        let reply_key = FlowKey::reply(key.client, flow.client_port, flow.addr, flow.port);
        let reply = replies.get(&reply_key, 0);
        // The reply entry first, as the programs do; what is not there any more need not be removed.
        let _ = replies.remove(&reply_key);
        let lived = living.remove(&key).is_ok();
        let _ = young.remove(&key);
        let at = |addr: lb_common::Addr, port| SocketAddr::new(addr.into(), port);
        let (client, vip) = (at(key.client, key.client_port), at(key.addr, key.port));
        // Or a program was faster, and has told of it.
        if lived || flow.state & FLOW_ELSEWHERE != 0 {
            ended.push(ending(&key, &flow, reply.as_ref().ok(), &clock));
        }
        // The pod first. A client that has received more meanwhile asks back (RFC 5961 section 3.2), and it is the pod that
        // answers: with a reset only once it has its own, while after its answer nobody would tell the client any more.
        if let Ok(reply) = reply {
            let (client, pod) = (at(key.client, flow.client_port), at(flow.addr, flow.port));
            resets.send(client, pod, reply.last_ack);
        }
        resets.send(vip, client, flow.last_ack);
        if told.len().is_multiple_of(BURST) {
            std::thread::sleep(PAUSE);
        }
    }
    Ok(ended)
}

/// The record of a flow whose backend is gone.
fn ending(key: &FlowKey, flow: &Flow, reply: Option<&Flow>, clock: &Clock) -> Ending {
    Ending {
        at: nanoseconds(boot_time()),
        started: clock.boot_time_of(flow.started),
        bytes_in: flow.bytes,
        bytes_out: reply.map_or(0, |reply| reply.bytes),
        key: *key,
        pod: flow.addr,
        pod_port: flow.port,
        service: flow.service,
        backend: flow.backend,
        by: BY_AGENT,
        refusal: 0,
        state: flow.state,
        uplink: flow.uplink,
        pad: [0; 4],
    }
}

/// As [`end`] for all flows, if the interfaces that are served are those of this network namespace: elsewhere the resets
/// would go to others.
pub(super) fn end_all(root: &Path) -> Result<(), DataplaneError> {
    let host = Host::read()?;
    let is_here = |row: &Uplink| {
        let own = host.interfaces.get(&row.ifindex);
        own.is_some_and(|own| own.name == from_name(&row.name))
    };
    let rows = uplinks(root);
    let mut used = rows.iter().filter(|row| row.ifindex != 0).peekable();
    if used.peek().is_some() && used.all(is_here) && !end(root, &Which::All)?.is_empty() {
        std::thread::sleep(ASKED_BACK);
    }
    Ok(())
}

/// Sends resets as the other end of a connection would.
#[derive(Default)]
struct Resets {
    v4: Option<Socket>,
    v6: Option<Socket>,
}

impl Resets {
    /// Sends one that `to` accepts: with the number that it expects next (RFC 9293 section 3.5.3). 0 is not known.
    fn send(&mut self, from: SocketAddr, to: SocketAddr, sequence: u32) {
        if sequence == 0 {
            return;
        }
        if let Err(error) = self.try_send(from, to, sequence) {
            debug!(%from, %to, %error, "cannot send a reset");
        }
    }

    fn try_send(&mut self, from: SocketAddr, to: SocketAddr, sequence: u32) -> io::Result<()> {
        let (place, domain) = match to {
            SocketAddr::V4(_) => (&mut self.v4, Domain::IPV4),
            SocketAddr::V6(_) => (&mut self.v6, Domain::IPV6),
        };
        let socket = match place {
            Some(socket) => socket,
            None => place.insert(raw(domain)?),
        };
        let Some(packet) = reset(from, to, sequence) else {
            return Ok(());
        };
        // The kernel routes by the address alone, and wants no port of a raw socket.
        let to = SocketAddr::new(to.ip(), 0);
        socket.send_to(&packet, &to.into()).map(drop)
    }
}

fn raw(domain: Domain) -> io::Result<Socket> {
    /// `IPPROTO_RAW`: packets bring their IP header along (raw(7)).
    const RAW: i32 = 255;
    let socket = Socket::new(domain, Type::RAW, Some(RAW.into()))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// A RST as a whole packet; `None` between versions of IP.
fn reset(from: SocketAddr, to: SocketAddr, sequence: u32) -> Option<Vec<u8>> {
    const LENGTH: u16 = size_of::<TcpHeader>() as u16;
    let mut packet = ip_header(from.ip(), to.ip(), protocol::TCP, LENGTH)?;
    let mut tcp = Vec::with_capacity(usize::from(LENGTH));
    tcp.extend(from.port().to_be_bytes());
    tcp.extend(to.port().to_be_bytes());
    tcp.extend(sequence.to_be_bytes());
    tcp.extend([0; 4]);
    // Five words of header, the flag; no window, no checksum yet, nothing urgent.
    tcp.extend([5 << 4, TCP_RST, 0, 0, 0, 0, 0, 0]);
    let sum = transport_checksum(&packet, protocol::TCP, &tcp);
    tcp[16..18].copy_from_slice(&sum.to_be_bytes());
    packet.extend(tcp);
    Some(packet)
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::{NetHeaders, PacketHeaders, TransportHeader};

    #[test]
    fn a_reset_is_one_of_the_connection_with_a_right_checksum() {
        for (from, to) in [
            ("172.22.0.2:6385", "172.22.0.100:40000"),
            ("[fd00:22::2]:6385", "[fd00:22::100]:40000"),
        ] {
            let (from, to) = (from.parse().expect("valid"), to.parse().expect("valid"));
            let packet = reset(from, to, 77).expect("of one version");
            let headers = PacketHeaders::from_ip_slice(&packet).expect("parses");
            let Some(TransportHeader::Tcp(tcp)) = headers.transport else {
                panic!("not TCP")
            };
            let sum = match headers.net.expect("IP") {
                NetHeaders::Ipv4(ip, _) => tcp.calc_checksum_ipv4(&ip, &[]),
                NetHeaders::Ipv6(ip, _) => tcp.calc_checksum_ipv6(&ip, &[]),
                other => panic!("{other:?}"),
            };
            assert_eq!(tcp.checksum, sum.expect("short"));
            assert!(tcp.rst && !tcp.ack && !tcp.syn);
            assert_eq!(tcp.sequence_number, 77);
            assert_eq!((tcp.source_port, tcp.destination_port), (6385, 40000));
        }
    }
}
