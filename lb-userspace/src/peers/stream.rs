//! The stream of exceptions: a peer connects to their owner, gets all of them, and then what changes.
//!
//! Both say hello with a nonce; every frame after that carries a sequence and an HMAC over direction, both nonces, sequence
//! and payload, so that none can be forged, sent again, left out, or turned back to its sender.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use lb_common::{Addr, FlowKey, MAX_EXCEPTIONS};
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::timeout;
use tracing::{debug, warn};

use super::exceptions::{Delta, News, Own, VERSION};
use super::wire::Key;

const MAGIC: &[u8; 4] = b"ilbx";
const NONCE: usize = 16;
const HELLO: usize = MAGIC.len() + 1 + 4 + NONCE;
const TAG: usize = 32;
/// Flows in one frame.
const FLOWS: usize = 1000;
/// Bytes of a flow: addresses and ports.
const FLOW: usize = 36;
/// Bytes of a frame's payload at most.
const MAX_PAYLOAD: usize = 1 + FLOWS * FLOW;
/// Silence after which the other end is taken for gone.
const PATIENCE: Duration = Duration::from_secs(3);
/// Time between signs of life.
const PING: Duration = Duration::from_secs(1);
/// Pauses between attempts grow from here to there.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// Connections at a time.
const MAX_CONNECTIONS: usize = 2 * lb_common::MAX_PEERS as usize;

/// Kinds of frames, their first byte.
mod kind {
    pub(super) const SUBSCRIBE: u8 = b's';
    pub(super) const OWNER: u8 = b'o';
    pub(super) const ADD: u8 = b'+';
    pub(super) const REMOVE: u8 = b'-';
    pub(super) const WHOLE: u8 = b'w';
    pub(super) const PING: u8 = b'p';
    pub(super) const BYE: u8 = b'b';
}

/// Who owns the exceptions of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Owner {
    /// Its node.
    pub(super) node: String,
    /// Its incarnation.
    pub(super) incarnation: u64,
}

/// What an owner's connections follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// Who this is.
    pub(super) owner: Owner,
    /// Keys that peers share.
    pub(super) keys: Vec<Key>,
    /// The agent is about to stop.
    pub(super) leaves: bool,
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn nonce() -> io::Result<[u8; NONCE]> {
    let mut nonce = [0; NONCE];
    SystemRandom::new()
        .fill(&mut nonce)
        .map_err(|_| io::Error::other("the kernel gives no random bytes"))?;
    Ok(nonce)
}

async fn patient<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(PATIENCE, work)
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Both ends' hello: which key, and what makes this session unlike every other.
async fn say_hello<S: AsyncWrite + Unpin>(stream: &mut S, key: &Key) -> io::Result<[u8; NONCE]> {
    let nonce = nonce()?;
    let mut hello = Vec::with_capacity(HELLO);
    hello.extend(MAGIC);
    hello.push(VERSION as u8);
    hello.extend(key.id());
    hello.extend(nonce);
    patient(stream.write_all(&hello)).await?;
    Ok(nonce)
}

async fn hear_hello<S: AsyncRead + Unpin>(
    stream: &mut S,
    keys: &[Key],
) -> io::Result<(Key, [u8; NONCE])> {
    let mut hello = [0; HELLO];
    patient(async { stream.read_exact(&mut hello).await.map(drop) }).await?;
    if &hello[..4] != MAGIC || hello[4] != VERSION as u8 {
        return Err(invalid("not a stream of exceptions of this version"));
    }
    let key = keys.iter().find(|key| key.id() == hello[5..9]);
    let key = key.ok_or_else(|| invalid("of an unknown key"))?.clone();
    let mut nonce = [0; NONCE];
    nonce.copy_from_slice(&hello[9..]);
    Ok((key, nonce))
}

/// One direction of a session.
struct Seal {
    key: Key,
    /// Direction and both nonces.
    context: Vec<u8>,
    sequence: u64,
}

impl Seal {
    fn new(key: &Key, direction: u8, subscriber: &[u8], owner: &[u8]) -> Self {
        let context = [&[direction], subscriber, owner].concat();
        Self {
            key: key.clone(),
            context,
            sequence: 0,
        }
    }

    async fn send<S: AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
        payload: &[u8],
    ) -> io::Result<()> {
        let sequence = self.sequence.to_be_bytes();
        self.sequence += 1;
        let mut frame = Vec::with_capacity(4 + TAG + payload.len());
        frame.extend((payload.len() as u32).to_be_bytes());
        frame.extend(self.key.sign(&[&self.context, &sequence, payload]));
        frame.extend(payload);
        patient(stream.write_all(&frame)).await
    }

    async fn receive<S: AsyncRead + Unpin>(&mut self, stream: &mut S) -> io::Result<Vec<u8>> {
        patient(async {
            let mut head = [0; 4 + TAG];
            stream.read_exact(&mut head).await?;
            let (length, tag) = head.split_at(4);
            let length = u32::from_be_bytes([length[0], length[1], length[2], length[3]]) as usize;
            if length == 0 || length > MAX_PAYLOAD {
                return Err(invalid("a frame of an impossible length"));
            }
            let mut payload = vec![0; length];
            stream.read_exact(&mut payload).await?;
            let sequence = self.sequence.to_be_bytes();
            if !self
                .key
                .verifies(&[&self.context, &sequence, &payload], tag)
            {
                return Err(invalid("a forged frame"));
            }
            self.sequence += 1;
            Ok(payload)
        })
        .await
    }
}

fn encode(kind: u8, flows: &[FlowKey]) -> Vec<u8> {
    let mut payload = Vec::with_capacity(1 + flows.len() * FLOW);
    payload.push(kind);
    for flow in flows {
        payload.extend(flow.client.octets);
        payload.extend(flow.addr.octets);
        payload.extend(flow.client_port.to_be_bytes());
        payload.extend(flow.port.to_be_bytes());
    }
    payload
}

fn decode(flows: &[u8]) -> io::Result<Vec<FlowKey>> {
    let (flows, rest) = flows.as_chunks::<FLOW>();
    if !rest.is_empty() {
        return Err(invalid("a flow is cut"));
    }
    let addr = |octets: &[u8]| {
        let mut addr = Addr::UNSPECIFIED;
        addr.octets.copy_from_slice(octets);
        addr
    };
    let port = |at: &[u8]| u16::from_be_bytes([at[0], at[1]]);
    let flow = |flow: &[u8; FLOW]| {
        FlowKey::forward(
            addr(&flow[..16]),
            port(&flow[32..34]),
            addr(&flow[16..32]),
            port(&flow[34..36]),
        )
    };
    Ok(flows.iter().map(flow).collect())
}

/// Serves those who connect, each for itself, until dropped.
pub(super) async fn serve(
    listener: TcpListener,
    identity: watch::Receiver<Identity>,
    own: Rc<Own>,
) {
    let slots = std::sync::Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let accepted = listener.accept().await;
        while connections.try_join_next().is_some() {}
        let (mut stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                debug!(%error, "cannot accept a peer's connection");
                tokio::time::sleep(BACKOFF.0).await;
                continue;
            }
        };
        // One too many: it comes again.
        let Ok(slot) = slots.clone().try_acquire_owned() else {
            continue;
        };
        let (identity, own) = (identity.clone(), own.clone());
        connections.spawn_local(async move {
            let _slot = slot;
            if let Err(error) = tell(&mut stream, identity, &own).await {
                debug!(%from, %error, "a peer's connection for exceptions has ended");
            }
        });
    }
}

/// Tells one subscriber everything.
async fn tell<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    mut identity: watch::Receiver<Identity>,
    own: &Own,
) -> io::Result<()> {
    let who = identity.borrow_and_update().clone();
    let (key, theirs) = hear_hello(stream, &who.keys).await?;
    let ours = say_hello(stream, &key).await?;
    let mut from = Seal::new(&key, kind::SUBSCRIBE, &theirs, &ours);
    let mut to = Seal::new(&key, kind::OWNER, &theirs, &ours);
    if from.receive(stream).await?.first() != Some(&kind::SUBSCRIBE) {
        return Err(invalid("not a subscriber"));
    }
    let mut payload = vec![kind::OWNER];
    payload.extend(serde_json::to_vec(&who.owner)?);
    to.send(stream, &payload).await?;
    let (flows, mut deltas) = own.subscribe().await;
    for flows in flows.chunks(FLOWS) {
        to.send(stream, &encode(kind::ADD, flows)).await?;
    }
    to.send(stream, &[kind::WHOLE]).await?;
    loop {
        tokio::select! {
            delta = deltas.recv() => {
                let delta = match delta {
                    Ok(delta) => delta,
                    Err(RecvError::Lagged(_)) => return Err(invalid("the subscriber is too slow")),
                    Err(RecvError::Closed) => return Ok(()),
                };
                for flows in delta.remove.chunks(FLOWS) {
                    to.send(stream, &encode(kind::REMOVE, flows)).await?;
                }
                for flows in delta.add.chunks(FLOWS) {
                    to.send(stream, &encode(kind::ADD, flows)).await?;
                }
            }
            changed = identity.changed() => {
                let now = identity.borrow_and_update().clone();
                if changed.is_err() || now != who {
                    // What it has stays right: it asks again whom it then finds.
                    return to.send(stream, &[kind::BYE]).await;
                }
            }
            () = tokio::time::sleep(PING) => to.send(stream, &[kind::PING]).await?,
        }
    }
}

/// Gets the exceptions of a peer's incarnation, again and again, until dropped.
pub(super) async fn follow(
    expected: Owner,
    at: SocketAddr,
    keys: Vec<Key>,
    news: mpsc::Sender<News>,
) {
    let mut pause = BACKOFF.0;
    let mut told = false;
    for attempt in 0_usize.. {
        // While keys change, the owner may not yet have the one that we sign with.
        let Some(key) = keys.get(attempt % keys.len().max(1)) else {
            return;
        };
        let mut is_whole = false;
        let connect = patient(TcpStream::connect(at));
        let ended = match connect.await {
            Ok(mut stream) => listen(&mut stream, &expected, key, &news, &mut is_whole).await,
            Err(error) => Err(error),
        };
        if is_whole {
            pause = BACKOFF.0;
            told = false;
        }
        match ended {
            Err(error) if !told && pause == BACKOFF.1 => {
                told = true;
                warn!(peer = expected.node, %at, %error, "cannot get the exceptions of a peer: is its TCP port open to this node? Trying again");
            }
            Err(error) => {
                debug!(peer = expected.node, %at, %error, "the stream of exceptions has ended");
            }
            Ok(()) => {}
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(BACKOFF.1);
    }
}

/// One session.
async fn listen<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    expected: &Owner,
    key: &Key,
    news: &mpsc::Sender<News>,
    is_whole: &mut bool,
) -> io::Result<()> {
    let ours = say_hello(stream, key).await?;
    let (_, theirs) = hear_hello(stream, std::slice::from_ref(key)).await?;
    let mut to = Seal::new(key, kind::SUBSCRIBE, &ours, &theirs);
    let mut from = Seal::new(key, kind::OWNER, &ours, &theirs);
    to.send(stream, &[kind::SUBSCRIBE]).await?;
    let hello = from.receive(stream).await?;
    let owner = match hello.split_first() {
        Some((&kind::OWNER, json)) => serde_json::from_slice::<Owner>(json)?,
        _ => return Err(invalid("not an owner of exceptions")),
    };
    if owner != *expected {
        return Err(invalid(
            "another node, or another start of it, is at the address",
        ));
    }
    let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
    let mut snapshot = BTreeSet::new();
    loop {
        let payload = from.receive(stream).await?;
        let Some((kind, flows)) = payload.split_first() else {
            continue;
        };
        let mut delta = Delta::default();
        match *kind {
            kind::ADD => delta.add = decode(flows)?,
            kind::REMOVE => delta.remove = decode(flows)?,
            kind::WHOLE => {
                let item = News::Snapshot {
                    peer: owner.node.clone(),
                    incarnation: owner.incarnation,
                    keys: std::mem::take(&mut snapshot),
                };
                *is_whole = true;
                news.send(item).await.map_err(gone)?;
                continue;
            }
            kind::BYE => return Ok(()),
            // A ping, or something that a later version has to say.
            _ => continue,
        }
        if *is_whole {
            let peer = owner.node.clone();
            news.send(News::Change { peer, delta })
                .await
                .map_err(gone)?;
        } else {
            snapshot.extend(delta.add);
            if snapshot.len() > MAX_EXCEPTIONS as usize {
                return Err(invalid("more exceptions than any node may have"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        Key::from_bytes(text.as_bytes()).expect("long enough")
    }

    #[test]
    fn flows_survive_the_stream_and_a_cut_one_is_refused() {
        let address = |last| Addr::from(std::net::Ipv4Addr::new(172, 22, 0, last));
        let flows = [
            FlowKey::forward(address(100), 40_000, address(2), 6180),
            FlowKey::forward(address(101), 1, address(2), 6385),
        ];
        let payload = encode(kind::ADD, &flows);
        let decoded = decode(&payload[1..]).expect("whole");
        assert!(decoded == flows);
        assert!(decode(&payload[1..payload.len() - 1]).is_err());
    }

    #[tokio::test]
    async fn a_forged_repeated_or_reflected_frame_ends_the_session() {
        let (right, wrong) = (
            key("the right key, 16 bytes"),
            key("the wrong key, 16 bytes"),
        );
        for (sender, direction, repeat) in [
            (&wrong, kind::OWNER, false),
            (&right, kind::SUBSCRIBE, false),
            (&right, kind::OWNER, true),
        ] {
            let (mut here, mut there) = tokio::io::duplex(1 << 16);
            let mut to = Seal::new(sender, direction, b"a", b"b");
            let mut from = Seal::new(&right, kind::OWNER, b"a", b"b");
            if repeat {
                to.send(&mut here, &[kind::PING]).await.expect("sent");
                assert!(from.receive(&mut there).await.is_ok());
                to.sequence = 0;
            }
            to.send(&mut here, &[kind::PING]).await.expect("sent");
            assert!(from.receive(&mut there).await.is_err());
        }
    }

    /// Serves `own` on loopback, and follows it; returns what is told.
    async fn told(
        own: Rc<Own>,
        served: &[Key],
        asked: &[Key],
        expected: &str,
    ) -> mpsc::Receiver<News> {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let at = listener.local_addr().expect("bound");
        let owner = |node: &str| Owner {
            node: node.to_owned(),
            incarnation: 7,
        };
        let identity = watch::Sender::new(Identity {
            owner: owner("b"),
            keys: served.to_vec(),
            leaves: false,
        });
        let (news, told) = mpsc::channel(16);
        let receiver = identity.subscribe();
        tokio::task::spawn_local(async move {
            serve(listener, receiver, own).await;
            drop(identity);
        });
        tokio::task::spawn_local(follow(owner(expected), at, asked.to_vec(), news));
        told
    }

    fn run(work: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        tokio::task::LocalSet::new().block_on(&runtime, work);
    }

    fn flows(ports: std::ops::Range<u16>) -> BTreeSet<FlowKey> {
        let address = |last| Addr::from(std::net::Ipv4Addr::new(172, 22, 0, last));
        ports
            .map(|port| FlowKey::forward(address(100), port, address(2), 6180))
            .collect()
    }

    #[test]
    fn a_peer_gets_all_exceptions_and_then_what_changes_with_any_common_key() {
        let (old, new) = (key("the old key, 16 bytes"), key("the new key, 16 bytes"));
        for asked in [vec![old.clone()], vec![new.clone(), old.clone()]] {
            run(async {
                let own = Own::new();
                let scans = own.clone().scanning_of(|count| match count {
                    0 => flows(1..5001),
                    _ => flows(1001..6001),
                });
                tokio::task::spawn_local(scans);
                let mut told = told(own.clone(), std::slice::from_ref(&old), &asked, "b").await;
                match told.recv().await {
                    Some(News::Snapshot {
                        peer,
                        incarnation,
                        keys,
                    }) => {
                        assert_eq!((peer.as_str(), incarnation), ("b", 7));
                        assert!(keys == flows(1..5001));
                    }
                    _ => panic!("not a snapshot"),
                }
                own.look();
                let mut keys = flows(1..5001);
                while keys != flows(1001..6001) {
                    match timeout(PATIENCE, told.recv()).await {
                        Ok(Some(News::Change { delta, .. })) => {
                            keys.retain(|key| !delta.remove.contains(key));
                            keys.extend(delta.add);
                        }
                        _ => panic!("no change is told"),
                    }
                }
            });
        }
    }

    #[test]
    fn nothing_is_told_to_a_stranger_nor_taken_from_another_node_than_was_meant() {
        let (right, wrong) = (
            key("the right key, 16 bytes"),
            key("the wrong key, 16 bytes"),
        );
        for (asked, expected) in [(&wrong, "b"), (&right, "c")] {
            run(async {
                let own = Own::new();
                tokio::task::spawn_local(own.clone().scanning_of(|_| flows(1..10)));
                let keys = std::slice::from_ref(asked);
                let mut told = told(own, std::slice::from_ref(&right), keys, expected).await;
                assert!(timeout(Duration::from_secs(1), told.recv()).await.is_err());
            });
        }
    }
}
