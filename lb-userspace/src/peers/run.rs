//! The thread: sockets, time and maps around [`Node`].

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ring::rand::{SecureRandom, SystemRandom};
use socket2::{Domain, Socket, Type};
use tokio::net::TcpSocket;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::MissedTickBehavior;
use tracing::{debug, warn};

use super::announce::{self, Groups, Schedule, Wires};
use super::exceptions::{self, Held, News, Own};
use super::maps::Maps;
use super::node::{Node, Outgoing, Todo};
use super::probe::{self, Tracker};
use super::stream::{self, Identity, Owner};
use super::wire::Key;
use super::{Command, Counters, Options, View, VipWanted, Wanted, boot_time};
use crate::desired::Announce;
use crate::packet;

/// Looks an interval: the time at which a deadline is noticed is uncertain by one part in so many of it.
const LOOKS: u32 = 8;
/// The shortest time between looks.
const MIN_LOOK: Duration = Duration::from_millis(5);
/// The longest one: announcements have a rhythm of their own.
const MAX_LOOK: Duration = Duration::from_millis(50);
/// Datagrams that wait to be heard; more are lost, as they are in a socket.
const QUEUE: usize = 1024;
/// News of exceptions that wait to be written; streams wait with them.
const NEWS: usize = 16;
/// Time between attempts to open a socket.
const RETRY: Duration = Duration::from_secs(1);

/// A datagram as it came.
struct Packet {
    uplink: u32,
    own: IpAddr,
    from: IpAddr,
    datagram: Vec<u8>,
}

/// Stops a task when it is dropped.
struct Task(AbortHandle);

impl Task {
    fn spawn(work: impl Future<Output = ()> + 'static) -> Self {
        Self(tokio::task::spawn_local(work).abort_handle())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Where this node speaks and listens: an uplink and an own address on it, with the port.
type Place = (u32, IpAddr, u16);

/// Sockets of one place. What could not be opened is tried again.
struct Open {
    udp: Option<(UdpSocket, Task)>,
    tcp: Option<Task>,
    tried: Duration,
    told: bool,
}

/// A stream of exceptions: of which incarnation, from where, with which keys.
type Source = (u64, IpAddr, u16, Vec<Key>);

/// A planned stop.
struct Leaving {
    until: Duration,
    done: oneshot::Sender<()>,
}

struct Runner {
    node: Node,
    maps: Maps,
    places: BTreeMap<Place, Open>,
    packets: mpsc::Sender<Packet>,
    own: Rc<Own>,
    identity: watch::Sender<Identity>,
    sources: BTreeMap<String, (Source, Task)>,
    news: mpsc::Sender<News>,
    held: Rc<Cell<(u64, u64)>>,
    publish: watch::Sender<Option<Arc<View>>>,
    schedule: Schedule,
    wires: Wires,
    groups: Groups,
    /// Links that had a carrier, and their MACs.
    carriers: BTreeSet<(u32, [u8; 6])>,
    tracker: Tracker,
    foreign_claims: u64,
    last_tick: Duration,
    /// When the last regular round began.
    last_round: Option<Duration>,
    leaving: Option<Leaving>,
    random: SystemRandom,
}

/// Speaks with the peers until nobody holds the other end of `commands`.
pub(super) async fn run(
    maps: Maps,
    table: exceptions::Maps,
    Options { bpffs, remembered }: Options,
    wanted: Wanted,
    mut commands: mpsc::UnboundedReceiver<Command>,
    publish: watch::Sender<Option<Arc<View>>>,
) {
    let (packets, mut heard) = mpsc::channel(QUEUE);
    let (news, inbox) = mpsc::channel(NEWS);
    let (synced, mut whole) = mpsc::unbounded_channel();
    let own = Own::new();
    let held = Rc::new(Cell::new((0, 0)));
    let numbers = maps.numbers();
    let numbers = numbers.into_iter().map(|(name, peer)| (name, peer.number));
    let keeper = Held::adopt(table, numbers.collect()).keep(inbox, synced, held.clone());
    let _keeper = Task::spawn(keeper);
    let _scanner = Task::spawn(own.clone().scanning(bpffs));

    let now = boot_time();
    let incarnation = SystemTime::now().duration_since(UNIX_EPOCH);
    let incarnation = incarnation.map_or(1, super::nanoseconds);
    let mut node = Node::new(wanted, incarnation, maps.announcers().clone(), now);
    for (name, remembered) in remembered {
        node.remember(&name, remembered, now);
    }
    let identity = watch::Sender::new(identity(&node, false));
    let foreign_claims = maps.foreign_claims();
    let mut runner = Runner {
        node,
        maps,
        places: BTreeMap::new(),
        packets,
        own,
        identity,
        sources: BTreeMap::new(),
        news,
        held,
        publish,
        schedule: Schedule::default(),
        wires: Wires::default(),
        groups: Groups::default(),
        carriers: BTreeSet::new(),
        tracker: Tracker::default(),
        foreign_claims,
        last_tick: now,
        last_round: None,
        leaving: None,
        random: SystemRandom::new(),
    };
    let mut period = Duration::ZERO;
    let mut ticks = tokio::time::interval(MIN_LOOK);
    let todo = runner.tick();
    runner.act(todo);
    loop {
        let wanted_period = (runner.node.wanted().interval / LOOKS).clamp(MIN_LOOK, MAX_LOOK);
        if period != wanted_period {
            period = wanted_period;
            ticks = tokio::time::interval(period);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        }
        // What has arrived is heard before time is let pass: silence is what is not even in the queue.
        let todo = tokio::select! {
            biased;
            command = commands.recv() => match command {
                None => return,
                Some(command) => runner.obey(command),
            },
            Some(packet) = heard.recv() => {
                let now = boot_time();
                // A flood must not keep time from passing.
                if now.saturating_sub(runner.last_tick) > 2 * period {
                    let todo = runner.tick();
                    runner.act(todo);
                }
                let Packet { uplink, own, from, datagram } = packet;
                match runner.node.hear(uplink, own, from, &datagram, now) {
                    Some(todo) => todo,
                    None => continue,
                }
            }
            Some((name, incarnation)) = whole.recv() => {
                runner.node.has_synced(&name, incarnation);
                Todo::default()
            }
            _ = ticks.tick() => runner.tick(),
        };
        runner.act(todo);
    }
}

fn identity(node: &Node, leaves: bool) -> Identity {
    Identity {
        owner: Owner {
            node: node.wanted().node.clone(),
            incarnation: node.incarnation(),
        },
        keys: node.wanted().keys.clone(),
        leaves,
    }
}

impl Runner {
    fn obey(&mut self, command: Command) -> Todo {
        match command {
            Command::Want(wanted) => {
                if wanted.port != self.node.wanted().port {
                    self.places.clear();
                }
                let mut todo = self.node.want(*wanted, boot_time());
                todo.say |= self.node.look(boot_time()).say;
                todo
            }
            Command::TablesChanged => {
                self.own.look();
                Todo::default()
            }
            Command::HandOver { patience, done } => {
                let now = boot_time();
                self.node.leave(now);
                let until = now + patience;
                self.leaving = Some(Leaving { until, done });
                Todo { say: true }
            }
        }
    }

    fn tick(&mut self) -> Todo {
        let now = boot_time();
        self.last_tick = now;
        let mut todo = self.node.look(now);
        if self.leaving.is_some() {
            // Who was to take over may be gone itself.
            self.node.leave(now);
        }
        let is_time = self
            .last_round
            .is_none_or(|last| now.saturating_sub(last) >= self.node.wanted().interval);
        if is_time {
            self.last_round = Some(now);
            todo.say = true;
            self.join();
            self.probe(now);
        }
        let claims = self.maps.foreign_claims();
        if claims > self.foreign_claims {
            self.schedule.dispute(now);
        }
        self.foreign_claims = claims;
        todo
    }

    /// Says and writes what there is to say and write.
    fn act(&mut self, todo: Todo) {
        let now = boot_time();
        self.open_places(now);
        // Who is beaten falls silent before it says anything.
        self.write();
        if todo.say {
            self.say();
            self.write();
            self.follow_sources(now);
        }
        self.finish_leaving();
        self.announce(boot_time());
        self.publish();
    }

    fn write(&mut self) {
        let all = self.node.wanted().ready;
        self.maps.write(&self.node.announcers(boot_time()), all);
    }

    /// Sends a round of heartbeats, and takes note where it went out.
    fn say(&mut self) {
        let before = boot_time();
        let mut went: BTreeMap<u32, bool> = BTreeMap::new();
        for link in &self.node.wanted().links {
            went.insert(link.uplink, link.carrier);
        }
        let round = self.node.round(before);
        let mut tried: BTreeMap<u32, bool> = BTreeMap::new();
        for outgoing in &round {
            let is_sent = self.send(outgoing);
            *tried.entry(outgoing.uplink).or_default() |= is_sent;
        }
        went.extend(tried);
        let went = went
            .into_iter()
            .filter_map(|(uplink, ok)| ok.then_some(uplink));
        self.node.has_said(before, &went.collect());
    }

    /// Sends a heartbeat. That a peer is not there is no failure of ours.
    fn send(&self, outgoing: &Outgoing) -> bool {
        let port = self.node.wanted().port;
        let open = self.places.get(&(outgoing.uplink, outgoing.from, port));
        let Some((socket, _)) = open.and_then(|open| open.udp.as_ref()) else {
            return false;
        };
        let to = SocketAddr::new(outgoing.to, port);
        // An error may be that of an earlier datagram, which is told once.
        let sent = socket
            .send_to(&outgoing.datagram, to)
            .or_else(|_| socket.send_to(&outgoing.datagram, to));
        match sent {
            Ok(_) => true,
            Err(error) => {
                debug!(%to, %error, "cannot send a heartbeat");
                matches!(
                    error.kind(),
                    io::ErrorKind::HostUnreachable | io::ErrorKind::ConnectionRefused
                )
            }
        }
    }

    /// Opens and closes sockets.
    fn open_places(&mut self, now: Duration) {
        let wanted = self.node.wanted();
        let port = wanted.port;
        let places: BTreeSet<Place> = wanted
            .links
            .iter()
            .flat_map(|link| {
                let addresses = link.addresses.iter();
                addresses.map(move |(address, _)| (link.uplink, *address, port))
            })
            .collect();
        self.places.retain(|place, _| places.contains(place));
        for place in places {
            let open = self.places.entry(place).or_insert(Open {
                udp: None,
                tcp: None,
                tried: Duration::ZERO,
                told: false,
            });
            let is_whole = open.udp.is_some() && open.tcp.is_some();
            if is_whole || now.saturating_sub(open.tried) < RETRY {
                continue;
            }
            open.tried = now;
            let (uplink, address, port) = place;
            let at = SocketAddr::new(address, port);
            let mut errors = Vec::new();
            if open.udp.is_none() {
                match listen_udp(at, uplink, self.packets.clone()) {
                    Ok(udp) => open.udp = Some(udp),
                    Err(error) => errors.push(("UDP", error)),
                }
            }
            if open.tcp.is_none() {
                match listen_tcp(at) {
                    Ok(listener) => {
                        let identity = self.identity.subscribe();
                        let serve = stream::serve(listener, identity, self.own.clone());
                        open.tcp = Some(Task::spawn(serve));
                    }
                    Err(error) => errors.push(("TCP", error)),
                }
            }
            for (protocol, error) in errors {
                if !open.told {
                    warn!(%at, protocol, %error, "cannot listen for peers; trying again every second");
                }
                open.told = true;
            }
        }
    }

    /// Follows where exceptions of peers are to be had, and who is known at all.
    fn follow_sources(&mut self, now: Duration) {
        self.own.set_alone(self.node.is_alone(now));
        let identity = identity(&self.node, self.node.is_leaving());
        self.identity.send_if_modified(|old| {
            let is_new = *old != identity;
            *old = identity;
            is_new
        });
        let port = self.node.wanted().port;
        let keys = self.node.wanted().keys.clone();
        let names = self.node.names();
        self.sources.retain(|name, _| names.contains(name));
        for (name, (incarnation, address, _)) in self.node.sources(now) {
            let source = (incarnation, address, port, keys.clone());
            let is_followed = self
                .sources
                .get(&name)
                .is_some_and(|(old, _)| *old == source);
            if is_followed {
                continue;
            }
            let owner = Owner {
                node: name.clone(),
                incarnation,
            };
            let at = SocketAddr::new(address, port);
            // The former one ends before the next begins.
            self.sources.remove(&name);
            let task = Task::spawn(stream::follow(owner, at, keys.clone(), self.news.clone()));
            self.sources.insert(name, (source, task));
        }
        // When the inbox is full, the next interval comes soon enough.
        let _ = self.news.try_send(News::Known(names));
    }

    /// Looks what came back of the last probes, and sends the next.
    fn probe(&mut self, now: Duration) {
        let numbers = self.maps.numbers();
        let by_name = numbers
            .iter()
            .map(|(name, peer)| (name.clone(), peer.number));
        // As above.
        let _ = self.news.try_send(News::Numbers(by_name.collect()));
        let mut targets = self.node.targets();
        targets.retain(|(name, ..)| numbers.contains_key(name));
        let places = targets
            .iter()
            .map(|(name, uplink, _)| (name.clone(), *uplink));
        self.tracker.follow(&places.collect(), |name| {
            numbers.get(name).is_some_and(|peer| peer.is_reflecting)
        });
        let mut counted = (0, 0);
        for (name, uplink, mac) in targets {
            let Some(peer) = numbers.get(&name) else {
                continue;
            };
            let target = (name, uplink);
            if let Some(nonce) = self.maps.reflection(peer.number, uplink)
                && self.tracker.judge(&target, nonce)
            {
                counted.1 += 1;
            }
            let wanted = self.node.wanted();
            let link = wanted.links.iter().find(|link| link.uplink == uplink);
            let mut vips = wanted.vips.iter();
            let vip = vips.find(|(_, row)| row.uplink == uplink);
            let (Some(link), Some((vip, _))) = (link, vip) else {
                continue;
            };
            let mut nonce = [0; 8];
            if self.random.fill(&mut nonce).is_err() {
                continue;
            }
            let nonce = u64::from_ne_bytes(nonce);
            let frame = probe::frame((link.mac, mac), link.vlan, *vip, wanted.port, nonce);
            // One that cannot be sent cannot come back either.
            self.tracker.sent(&target, nonce);
            match self.wires.send(link.ifindex, &frame) {
                Ok(()) => counted.0 += 1,
                Err(error) => debug!(peer = target.0, %error, "cannot send a probe"),
            }
        }
        for name in self.node.names() {
            let told = self.tracker.peer(&name);
            self.node.probed(&name, told, now);
        }
        let counters = self.node.counters();
        counters.probes_sent += counted.0;
        counters.probes_returned += counted.1;
    }

    /// Joins the groups in which VIPs are asked for: on every node that serves them, as it may be the next to answer.
    fn join(&mut self) {
        let wanted = self.node.wanted();
        let place = |(vip, row): (&IpAddr, &VipWanted)| {
            let link = wanted.links.iter().find(|link| link.uplink == row.uplink)?;
            match vip {
                IpAddr::V6(vip) if row.announce != Announce::External => {
                    Some((link.device, packet::solicited_node(*vip)))
                }
                _ => None,
            }
        };
        let places = wanted.vips.iter().filter_map(place).collect();
        self.groups.follow(&places);
    }

    /// Announces VIPs whose time has come.
    fn announce(&mut self, now: Duration) {
        let wanted = self.node.wanted();
        let up = wanted.links.iter().filter(|link| link.carrier);
        let up: BTreeSet<(u32, [u8; 6])> = up.map(|link| (link.uplink, link.mac)).collect();
        let announced = self.node.announced(now);
        let risen = announced.iter().filter(|vip| {
            let vip = wanted.vips.get(*vip);
            vip.is_some_and(|vip| {
                let mut links = up.iter().filter(|link| link.0 == vip.uplink);
                links.any(|link| !self.carriers.contains(link))
            })
        });
        let risen: BTreeSet<IpAddr> = risen.copied().collect();
        self.schedule.follow(&announced, &risen, now);
        self.carriers = up;
        let ifindexes = wanted.links.iter().map(|link| link.ifindex);
        self.wires.keep(&ifindexes.collect());
        let mut sent = 0;
        for vip in self.schedule.due(now) {
            let row = wanted.vips.get(&vip);
            let link =
                row.and_then(|row| wanted.links.iter().find(|link| link.uplink == row.uplink));
            let Some(link) = link else {
                continue;
            };
            for frame in announce::frames(link.mac, link.vlan, vip) {
                match self.wires.send(link.ifindex, &frame) {
                    Ok(()) => sent += 1,
                    Err(error) => debug!(%vip, %error, "cannot announce the VIP"),
                }
            }
        }
        self.node.counters().gratuitous_arps += sent;
    }

    fn finish_leaving(&mut self) {
        let now = boot_time();
        let is_over = self
            .leaving
            .as_ref()
            .is_some_and(|leaving| !self.node.is_yielding() || now >= leaving.until);
        if !is_over {
            return;
        }
        if let Some(leaving) = self.leaving.take() {
            self.node.left(now);
            self.write();
            // Whoever waited may have lost patience.
            let _ = leaving.done.send(());
        }
    }

    fn publish(&mut self) {
        let (own, own_lost) = self.own.count();
        let (held, held_lost) = self.held.get();
        let counters = self.node.counters();
        counters.exceptions_sent = own;
        counters.exceptions_held = held;
        counters.exceptions_lost = own_lost + held_lost;
        let view = self.node.view(boot_time());
        let quiet = |view: &View| View {
            counters: Counters::default(),
            ..view.clone()
        };
        self.publish.send_if_modified(|old| {
            let is_new = old.as_deref().map(quiet) != Some(quiet(&view));
            *old = Some(Arc::new(view));
            is_new
        });
    }
}

fn listen_udp(
    at: SocketAddr,
    uplink: u32,
    packets: mpsc::Sender<Packet>,
) -> io::Result<(UdpSocket, Task)> {
    let socket = Socket::new(Domain::for_address(at), Type::DGRAM, None)?;
    socket.set_nonblocking(true)?;
    socket.bind(&at.into())?;
    let socket = UdpSocket::from(socket);
    let receiver = tokio::net::UdpSocket::from_std(socket.try_clone()?)?;
    let task = Task::spawn(async move {
        let mut buffer = vec![0; 65_536];
        loop {
            match receiver.recv_from(&mut buffer).await {
                Ok((length, from)) => {
                    let packet = Packet {
                        uplink,
                        own: at.ip(),
                        from: from.ip(),
                        datagram: buffer[..length].to_vec(),
                    };
                    if packets.send(packet).await.is_err() {
                        return;
                    }
                }
                // That of an earlier datagram to a peer that is not there.
                Err(error) => debug!(%at, %error, "cannot receive heartbeats"),
            }
        }
    });
    Ok((socket, task))
}

fn listen_tcp(at: SocketAddr) -> io::Result<tokio::net::TcpListener> {
    const BACKLOG: u32 = 64;
    let socket = if at.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    }?;
    socket.set_reuseaddr(true)?;
    socket.bind(at)?;
    socket.listen(BACKLOG)
}
