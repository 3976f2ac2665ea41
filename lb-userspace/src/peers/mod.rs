//! The nodes that share VIPs: who is there, who announces what, and where flows sit that the hash would not find.
//!
//! Everything runs on a thread of its own, which nothing that the agent does can delay: a late heartbeat is a failover.
//! What decides is in `node` and below, without sockets and clocks, so that many nodes can be simulated in one test.

mod announce;
mod election;
mod exceptions;
mod maps;
mod members;
mod node;
mod probe;
mod run;
mod stream;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

use crate::dataplane::{DataplaneError, boot_time, nanoseconds};
use crate::desired::Announce;
use crate::tables::PeerRow;

pub use wire::Key;

/// Where the maps are, and what they say of the peers.
#[derive(Clone, Debug)]
pub struct Options {
    /// Root of the pins.
    pub bpffs: PathBuf,
    /// Peers as an earlier agent knew them.
    pub remembered: BTreeMap<String, PeerRow>,
}

/// What this node is among its peers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// This node's name, unlike those of its peers.
    pub node: String,
    /// Where peers may be found; own addresses among them do not count.
    pub addresses: BTreeSet<IpAddr>,
    /// Keys that peers share: the first signs, every one is accepted.
    pub keys: Vec<Key>,
    /// Time between heartbeats; a peer lapses after three.
    pub interval: Duration,
    /// UDP port of heartbeats and probes, TCP port of exceptions.
    pub port: u16,
    /// Uplinks of this node.
    pub links: Vec<Link>,
    /// VIPs that this node carries.
    pub vips: BTreeMap<IpAddr, VipWanted>,
    /// Programs are attached and the tables have been in step: this node may announce.
    pub ready: bool,
    /// Backends of this node that fail their health checks, as service and address.
    pub down: BTreeSet<(String, IpAddr)>,
}

impl Wanted {
    /// Addresses of this node and those where peers may be.
    fn places(&self) -> BTreeSet<IpAddr> {
        let own = self.links.iter().flat_map(|link| &link.addresses);
        let own = own.map(|(address, _)| *address);
        own.chain(self.addresses.iter().copied()).collect()
    }
}

/// An uplink.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// Slot in the `uplinks` map.
    pub uplink: u32,
    /// Index of the interface on which frames leave and arrive.
    pub ifindex: u32,
    /// Index of the interface that has the addresses: the bridge of a port, else the same.
    pub device: u32,
    /// MAC that frames for this node have.
    pub mac: [u8; 6],
    /// VLAN of the frames.
    pub vlan: Option<u16>,
    /// Own addresses and their prefix lengths.
    pub addresses: Vec<(IpAddr, u8)>,
    /// The link is up.
    pub carrier: bool,
}

/// A VIP.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VipWanted {
    /// Slot of its uplink.
    pub uplink: u32,
    /// Who announces it.
    pub announce: Announce,
    /// This node may announce it.
    pub candidate: bool,
}

/// What is known of the peers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Peers by node name.
    pub peers: BTreeMap<String, PeerView>,
    /// VIPs whose announcer is elected.
    pub vips: BTreeMap<IpAddr, VipView>,
    /// Every peer that is there has told its exceptions, and none is there without its agent.
    pub settled: bool,
    /// Counters.
    pub counters: Counters,
}

/// A peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerView {
    /// Version of its agent.
    pub version: String,
    /// Version of its maps; 0 while it is not known.
    pub layout: u32,
    /// Each agent hears the other's heartbeats.
    pub live: bool,
    /// Its program sends probes back.
    pub reflecting: bool,
    /// Its exceptions are known here.
    pub synced: bool,
    /// Where it is, by slot of this node's uplink.
    pub links: BTreeMap<u32, PeerLink>,
    /// Backends of it that fail their health checks, as it said last.
    pub down: BTreeSet<(String, IpAddr)>,
    /// What a person should know.
    pub note: Option<String>,
}

/// A peer on one uplink.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerLink {
    /// Its MAC.
    pub mac: [u8; 6],
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
}

/// A VIP whose announcer is elected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VipView {
    /// Node that announces it.
    pub holder: Option<String>,
    /// Highest epoch heard or made.
    pub epoch: u64,
    /// Two nodes claim it.
    pub conflict: Option<String>,
}

/// What has happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Heartbeats sent.
    pub heartbeats_sent: u64,
    /// Heartbeats heard.
    pub heartbeats_heard: u64,
    /// Datagrams of an unknown key or with a wrong tag.
    pub rejected_forged: u64,
    /// Heartbeats that are not newer than one heard before.
    pub rejected_replayed: u64,
    /// Datagrams that are no heartbeats for this node.
    pub rejected_malformed: u64,
    /// Probes sent.
    pub probes_sent: u64,
    /// Probes that came back.
    pub probes_returned: u64,
    /// Frames that announce a VIP.
    pub gratuitous_arps: u64,
    /// Exceptions of this node now.
    pub exceptions_sent: u64,
    /// Exceptions of peers here now.
    pub exceptions_held: u64,
    /// Exceptions that found no room, here or at this node's own count.
    pub exceptions_lost: u64,
    /// Claims of VIPs made.
    pub takeovers: u64,
}

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum PeersError {
    /// A key is too short.
    #[error(
        "the key of the peers has {found} bytes, at least {wanted} are needed: make one with `head -c 32 /dev/urandom | base64`"
    )]
    ShortKey {
        /// Bytes found.
        found: usize,
        /// Bytes needed.
        wanted: usize,
    },
    /// A map cannot be opened.
    #[error(transparent)]
    Map(#[from] DataplaneError),
    /// The thread cannot be started.
    #[error("cannot start the thread that speaks with the peers")]
    Thread(#[source] io::Error),
}

/// What the agent asks of the thread.
enum Command {
    Want(Box<Wanted>),
    TablesChanged,
    HandOver {
        patience: Duration,
        done: oneshot::Sender<()>,
    },
}

/// The thread that speaks with the peers. It ends when this is dropped.
pub struct Peers {
    commands: mpsc::UnboundedSender<Command>,
    view: watch::Receiver<Option<Arc<View>>>,
}

/// Starts to speak with the peers, in the network namespace of the caller.
///
/// # Errors
/// When the maps are not there, or no thread can be started.
pub fn start(options: Options, wanted: Wanted) -> Result<Peers, PeersError> {
    let maps = maps::Maps::open(&options.bpffs)?;
    let exceptions = exceptions::Maps::open(&options.bpffs)?;
    let (commands, receiver) = mpsc::unbounded_channel();
    let (publish, view) = watch::channel(None);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(PeersError::Thread)?;
    std::thread::Builder::new()
        .name("peers".to_owned())
        .spawn(move || {
            let local = tokio::task::LocalSet::new();
            let run = run::run(maps, exceptions, options, wanted, receiver, publish);
            local.block_on(&runtime, run);
            // A scan may be under way: nobody waits for it.
            runtime.shutdown_background();
        })
        .map_err(PeersError::Thread)?;
    Ok(Peers { commands, view })
}

impl Peers {
    /// Takes another wish.
    pub fn want(&self, wanted: Wanted) {
        // Without the thread there is nobody to tell.
        let _ = self.commands.send(Command::Want(Box::new(wanted)));
    }

    /// Says that the rows of services or backends have changed: flows may be exceptions now that were none.
    pub fn tables_changed(&self) {
        let _ = self.commands.send(Command::TablesChanged);
    }

    /// Waits until the view has changed in more than its counters since the last call. Cancel safe.
    pub async fn changed(&mut self) {
        if self.view.changed().await.is_err() {
            // The thread is gone: nothing changes any more.
            std::future::pending::<()>().await;
        }
    }

    /// What is known now; nothing before the thread has looked for the first time.
    pub fn view(&self) -> Option<Arc<View>> {
        self.view.borrow().clone()
    }

    /// A planned stop: hands every VIP to a peer that would take it, and waits for its claim no longer than `patience`.
    /// A VIP that nobody would take stays answered for two minutes.
    pub async fn hand_over(&self, patience: Duration) {
        let (done, is_done) = oneshot::channel();
        if self
            .commands
            .send(Command::HandOver { patience, done })
            .is_ok()
        {
            // An error is the end of the thread, and so of what was waited for.
            let _ = is_done.await;
        }
    }
}
