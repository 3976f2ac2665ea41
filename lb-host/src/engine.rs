//! An engine: tables and clocks, and runs of programs over them.

use aya::Pod;
use lb_common::events::{Ending, Event};
use lb_common::layout::{Addr, global, map};
use lb_common::{Verdict, layout::MODE_NATIVE, layout::MODE_TC, layout::Uplink};

use crate::bindings::{__sk_buff, xdp_md};
use crate::btf_maps::Map as _;
use crate::frame::{self, Packet, Sum};
use crate::hook::{Tc, Xdp};
use crate::programs::{TcContext, XdpContext};
use crate::store::{self, Clock, Store, bytes};
use crate::{balance, events, maps, reply};

/// The programs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Program {
    /// `ironlb_xdp` and its twin.
    Xdp,
    /// `ironlb_ingress`.
    Ingress,
    /// `ironlb_egress`.
    Egress,
}

/// Where a reply leaves that does not leave where it would.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Redirection {
    /// Slot of the uplink.
    pub uplink: u32,
    /// Whether the kernel finds the MAC there.
    pub by_neighbor: bool,
    /// By which gateway, if not directly.
    pub next_hop: Option<Addr>,
}

/// What became of a packet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// How it ended.
    pub verdict: Verdict,
    /// The frame after it.
    pub frame: Vec<u8>,
    /// Where it leaves, for [`Verdict::RepliedRedirected`].
    pub redirection: Option<Redirection>,
    /// What a `CHECKSUM_COMPLETE` skb says of the sum of all behind the Ethernet header, in memory order.
    pub whole: Option<u16>,
}

/// Tables, and the programs that run on them.
#[derive(Clone, Default)]
pub struct Engine {
    store: Store,
}

/// The maps that are worth to be read or written from outside.
fn id(name: &str) -> usize {
    match name {
        map::UPLINKS => maps::UPLINKS.id(),
        map::VIPS => maps::VIPS.id(),
        map::SERVICES => maps::SERVICES.id(),
        map::BACKENDS => maps::BACKENDS.id(),
        map::POD_PORTS => maps::POD_PORTS.id(),
        map::PODS => maps::PODS.id(),
        map::LIVING => maps::LIVING.id(),
        map::LIVING_REPLY => maps::LIVING_REPLY.id(),
        map::YOUNG => maps::YOUNG.id(),
        map::DIRECT => maps::DIRECT.id(),
        map::CONTROL => maps::CONTROL.id(),
        map::PRESSURE => maps::PRESSURE.id(),
        map::PEERS => maps::PEERS.id(),
        map::PEER_MACS => maps::PEER_MACS.id(),
        map::EXCEPTIONS => maps::EXCEPTIONS.id(),
        map::ANNOUNCERS => maps::ANNOUNCERS.id(),
        map::REFLECTIONS => maps::REFLECTIONS.id(),
        map::SHUNNED => maps::SHUNNED.id(),
        map::SOURCES => maps::SOURCES.id(),
        map::WATCH => maps::WATCH.id(),
        map::TELLING => maps::TELLING.id(),
        _ => panic!("the engine on the host does not show the map {name}"),
    }
}

impl Engine {
    /// Writes a row of a map; an array's key is a `u32`.
    pub fn set<K: Pod, V: Pod>(&mut self, map: &str, key: &K, value: &V) {
        assert!(self.insert(map, key, value), "no room in {map}");
    }

    /// The same; false where there is no room for it.
    pub fn insert<K: Pod, V: Pod>(&mut self, map: &str, key: &K, value: &V) -> bool {
        let unlimited = (usize::MAX, false);
        let inserted = self
            .store
            .insert(id(map), bytes(key), value, 0, unlimited)
            .is_ok();
        self.store.end_run();
        inserted
    }

    /// Takes a row out of a hash.
    pub fn remove<K: Pod>(&mut self, map: &str, key: &K) {
        // It may not be there.
        let _ = self.store.remove(id(map), bytes(key));
        self.store.end_run();
    }

    /// A row of a map.
    pub fn get<K: Pod, V: Pod>(&self, map: &str, key: &K) -> Option<V> {
        self.rows::<K, V>(map)
            .into_iter()
            .find(|(row, _)| bytes(row) == bytes(key))
            .map(|(_, value)| value)
    }

    /// All rows of a map that have been written.
    pub fn rows<K: Pod, V: Pod>(&self, map: &str) -> Vec<(K, V)> {
        let rows = self.store.rows(id(map)).map(|(key, value)| {
            assert!(key.len() == size_of::<K>() && size_of_val(&**value) >= size_of::<V>());
            // SAFETY: as long as that, and every pattern of bits is one of a Pod.
            unsafe {
                (
                    key.as_ptr().cast::<K>().read_unaligned(),
                    value.as_ptr().cast::<V>().read(),
                )
            }
        });
        rows.collect()
    }

    /// Forgets a map's rows.
    pub fn clear(&mut self, map: &str) {
        self.store.clear(id(map));
    }

    /// Limits a map to so many rows.
    pub fn limit(&mut self, map: &str, room: usize) {
        self.store.limit(id(map), room);
    }

    /// Takes what was told to a monitor.
    pub fn events(&mut self) -> Vec<Event> {
        let records = self.store.take(maps::EVENTS.id());
        let event = |record: Box<[u8]>| Event::from_bytes(&record).expect("an event");
        records.into_iter().map(event).collect()
    }

    /// Takes what was told of flows that have ended.
    pub fn endings(&mut self) -> Vec<Ending> {
        let records = self.store.take(maps::ENDINGS.id());
        let ending = |record: Box<[u8]>| Ending::from_bytes(&record).expect("an ending");
        records.into_iter().map(ending).collect()
    }

    /// Sets what a tick is; 250 a second unless set.
    pub fn set_ticks(&mut self, per_second: u32) {
        debug_assert_eq!(global::TICKS_PER_SECOND, "TICKS_PER_SECOND");
        self.store
            .set_global(maps::TICKS_PER_SECOND.id(), per_second);
    }

    /// The clocks.
    pub fn clock(&mut self) -> &mut Clock {
        &mut self.store.clock
    }

    /// Lets the routing table know every neighbour by this MAC, or none.
    pub fn set_neighbor(&mut self, mac: Option<[u8; 6]>) {
        self.store.neighbor = mac;
    }

    /// Attaches uplink 0 in the mode in which a program serves it.
    pub fn attach(&mut self, program: Program) {
        let Some(uplink) = self.get::<u32, Uplink>(map::UPLINKS, &0) else {
            return;
        };
        let mode = match program {
            Program::Xdp => MODE_NATIVE,
            Program::Ingress => MODE_TC,
            Program::Egress => uplink.mode,
        };
        self.set(map::UPLINKS, &0_u32, &Uplink { mode, ..uplink });
    }

    /// Runs a program on a packet, as attached to uplink 0.
    pub fn run(&mut self, program: Program, packet: &Packet) -> Outcome {
        store::exchange(&mut self.store);
        let outcome = match program {
            Program::Xdp => at_xdp(packet),
            Program::Ingress | Program::Egress => at_tc(program, packet),
        };
        store::exchange(&mut self.store);
        self.store.end_run();
        outcome
    }
}

fn at_xdp(packet: &Packet) -> Outcome {
    let mut context = xdp_md {
        data: 0,
        data_end: 0,
    };
    // A driver shows the program all of a frame.
    let packet = Packet::new(packet.frame.clone());
    frame::current(|frame| {
        frame.place(&packet);
        frame.tell_xdp(&mut context);
    });
    let ctx = &raw mut context;
    let mut hook = Xdp::new(XdpContext::new(ctx));
    let verdict = balance::forward(&mut hook);
    maps::count(verdict);
    events::tell(&hook, verdict);
    Outcome {
        verdict,
        frame: frame::current(|frame| frame.all()),
        redirection: None,
        whole: None,
    }
}

fn at_tc(program: Program, packet: &Packet) -> Outcome {
    let mut context = __sk_buff {
        len: 0,
        vlan_present: u32::from(packet.tag.is_some()),
        vlan_tci: packet.tag.unwrap_or(0).into(),
        data: 0,
        data_end: 0,
        gso_size: 0,
    };
    frame::current(|frame| {
        frame.place(packet);
        frame.tell_skb(&mut context);
    });
    let skb = &raw mut context;
    let mut hook = Tc::new(&TcContext::new(skb));
    let verdict = match program {
        Program::Egress => reply::reply(&mut hook),
        _ => balance::forward(&mut hook),
    };
    maps::count(verdict);
    events::tell(&hook, verdict);
    let redirection = (verdict == Verdict::RepliedRedirected).then_some(Redirection {
        uplink: hook.out,
        by_neighbor: hook.by_neighbor,
        next_hop: hook.next_hop,
    });
    frame::current(|frame| Outcome {
        verdict,
        frame: frame.all(),
        redirection,
        whole: (frame.sum == Sum::Complete).then_some(frame.whole),
    })
}
