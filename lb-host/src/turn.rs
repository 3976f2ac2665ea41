//! What happens between two packets of a dialogue: the agent writes other rows, entries are lost, time passes.

use std::net::{IpAddr, Ipv4Addr};

use lb_common::choice::identity;
use lb_common::layout::{
    Addr, BACKEND_ALIVE, BACKEND_ELIGIBLE, Candidate, FLOW_HANDED_ON, Flow, FlowKey,
    MAX_BACKENDS_PER_PORT, POD_HOST, SERVICE_SILENT, UPLINK_BYPASS_DROP, VIP_EXTERNAL, backend_id,
    map,
};

use crate::Engine;
use crate::scene::{
    API, CLIENT, CLIENT_MAC, CLIENT_PORT, CLIENT6, IMAGES, INSTANCE, OTHER_SLOT, PEER, PODS, PODS6,
    Scene, VIP, VIP6,
};

macro_rules! turns {
    ($($turn:ident = $text:literal,)+) => {
        /// A turn of a dialogue.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Turn {
            $(#[doc = $text] $turn,)+
        }

        impl Turn {
            /// All of them. Files name a turn by its place here: append.
            pub const ALL: &[Self] = &[$(Self::$turn,)+];
        }
    };
}

turns! {
    Gone = "The second pod is gone.",
    Unready = "The second pod takes no new flows.",
    Replaced = "The second pod is gone, and a new one has its address and its places.",
    Torn = "All services are being written.",
    Settling = "Peers may not yet have told where their flows are.",
    Told = "The peer has told that it has the client's flows.",
    PeerFails = "The peer's program does not reflect probes any more.",
    PeerUnknown = "The peer's MAC is not known any more.",
    Silent = "Nothing is announced here any more.",
    Limited = "No refusal is answered.",
    Allowed = "Clients may connect to pods directly.",
    OnHost = "The pods are on the host network.",
    OtherUplink = "All flows arrive by another uplink than the one that routing chooses for replies.",
    LostReplies = "The reply entries of living flows are lost.",
    LostFlows = "The forward entries of living flows are lost.",
    LostYoung = "Young and closing entries are lost.",
    Full = "The living table is full of other clients' flows.",
    NoRoom = "The young table takes no entry, as an LRU whose elements other processors have.",
    Neighbor = "The kernel knows the client's MAC.",
    Later = "Two minutes pass.",
}

/// Tables of flows that a turn stirs.
pub trait Flows {
    /// All rows of a table.
    fn rows(&mut self, table: &str) -> Vec<(FlowKey, Flow)>;
    /// Writes a row; false where there is no room for it.
    fn put(&mut self, table: &str, key: &FlowKey, flow: &Flow) -> bool;
    /// Takes a row out.
    fn lose(&mut self, table: &str, key: &FlowKey);
}

impl Flows for Engine {
    fn rows(&mut self, table: &str) -> Vec<(FlowKey, Flow)> {
        Self::rows(self, table)
    }

    fn put(&mut self, table: &str, key: &FlowKey, flow: &Flow) -> bool {
        self.insert(table, key, flow)
    }

    fn lose(&mut self, table: &str, key: &FlowKey) {
        self.remove(table, key);
    }
}

impl Turn {
    /// Whether the kernel cannot be made to take this turn.
    pub fn is_of_host(self) -> bool {
        matches!(self, Self::NoRoom | Self::Neighbor | Self::Later)
    }

    /// Whether it tears the two entries of a living flow apart.
    pub fn tears(self) -> bool {
        matches!(self, Self::LostReplies | Self::LostFlows)
    }

    /// Takes the turn on the host.
    pub fn take(self, scene: &mut Scene, engine: &mut Engine) {
        match self {
            Self::NoRoom => engine.limit(map::YOUNG, 0),
            Self::Later => {
                let clock = engine.clock();
                clock.jiffies += 120 * 250;
                clock.boot += 120 * 1_000_000_000;
            }
            _ => {}
        }
        self.change(scene);
        scene.write(engine);
        self.stir(engine);
    }

    /// Changes what the agent writes.
    pub fn change(self, scene: &mut Scene) {
        match self {
            Self::Gone => scene.second_pod(|flags, _| *flags = 0),
            Self::Unready => scene.second_pod(|flags, _| *flags &= !BACKEND_ELIGIBLE),
            Self::Replaced => scene.second_pod(|flags, generation| {
                *flags = BACKEND_ALIVE | BACKEND_ELIGIBLE;
                *generation = generation.wrapping_add(1);
            }),
            Self::Torn => {
                for (_, service) in &mut scene.served.services {
                    service.version = service.version_tail.wrapping_add(1);
                }
            }
            Self::Settling => scene.served.control.settle_until = u64::MAX,
            Self::Told => {
                let ends = [
                    (IpAddr::from(CLIENT), IpAddr::from(VIP)),
                    (CLIENT6.into(), VIP6.into()),
                ];
                for (client, vip) in ends {
                    let (client, vip) = (Addr::from(client), Addr::from(vip));
                    let key = |port| FlowKey::forward(client, CLIENT_PORT, vip, port);
                    scene.exceptions.extend([API, IMAGES, INSTANCE].map(key));
                }
            }
            Self::PeerFails => {
                scene.peer.flags = 0;
                for backend in &mut scene.served.backends {
                    if backend.peer == PEER as u16 {
                        backend.flags &= !BACKEND_ELIGIBLE;
                        let id = backend.service;
                        let services = scene.served.services.iter_mut();
                        for (_, service) in services.filter(|(_, service)| service.id == id) {
                            service.flags |= SERVICE_SILENT;
                        }
                    }
                }
                scene.offer();
            }
            Self::PeerUnknown => scene.peer.mac = [0; 6],
            Self::Silent => {
                let vips = scene.vips.iter_mut();
                for (_, vip) in vips.filter(|(_, vip)| vip.flags & VIP_EXTERNAL == 0) {
                    vip.answer_until = 1;
                }
            }
            Self::Limited => scene.served.control.refusals_per_second = 0,
            Self::Allowed => scene.uplink.flags &= !UPLINK_BYPASS_DROP,
            Self::OnHost => {
                for (_, pod) in &mut scene.served.pods {
                    pod.flags |= POD_HOST;
                }
                for (_, pod_port) in &mut scene.served.pod_ports {
                    pod_port.flags |= POD_HOST;
                }
            }
            Self::Neighbor => scene.neighbor = Some(CLIENT_MAC),
            Self::OtherUplink
            | Self::LostReplies
            | Self::LostFlows
            | Self::LostYoung
            | Self::Full
            | Self::NoRoom
            | Self::Later => {}
        }
    }

    /// Changes what the programs have written.
    pub fn stir(self, flows: &mut impl Flows) {
        match self {
            Self::LostReplies => lose_all(flows, map::LIVING_REPLY),
            Self::LostFlows => lose_all(flows, map::LIVING),
            Self::LostYoung => lose_all(flows, map::YOUNG),
            Self::OtherUplink => {
                for table in [map::LIVING, map::LIVING_REPLY, map::YOUNG] {
                    for (key, flow) in flows.rows(table) {
                        let uplink = flow.uplink & FLOW_HANDED_ON | OTHER_SLOT as u8;
                        flows.put(table, &key, &Flow { uplink, ..flow });
                    }
                }
            }
            Self::Full => {
                for table in [map::LIVING, map::LIVING_REPLY] {
                    let mut number = 0;
                    while {
                        let (key, flow) = filler(number, table == map::LIVING_REPLY);
                        flows.put(table, &key, &flow)
                    } {
                        number += 1;
                    }
                }
            }
            _ => {}
        }
    }
}

fn lose_all(flows: &mut impl Flows, table: &str) {
    for (key, _) in flows.rows(table) {
        flows.lose(table, &key);
    }
}

/// The entry of another client's living flow, forward or reply.
fn filler(number: u16, is_reply: bool) -> (FlowKey, Flow) {
    // Of TEST-NET-2 (RFC 5737).
    let client = Addr::from(Ipv4Addr::new(198, 51, 100, 1));
    let (vip, pod) = (Addr::from(VIP), Addr::from(PODS[0]));
    let key = if is_reply {
        FlowKey::reply(client, number, pod, API)
    } else {
        FlowKey::forward(client, number, vip, API)
    };
    let flow = Flow {
        addr: if is_reply { vip } else { pod },
        port: API,
        client_port: number,
        // The first of all.
        backend: backend_id(0, 1),
        last_ack: 0,
        service: 0,
        client_fin: 0,
        pod_fin: 0,
        started: 1,
        last_seen: 1,
        bytes: 0,
        last_hop: CLIENT_MAC,
        uplink: 0,
        state: 0,
    };
    (key, flow)
}

impl Scene {
    /// Changes flags and generation of the second pod's backends.
    fn second_pod(&mut self, change: impl Fn(&mut u16, &mut u16)) {
        let second = [Addr::from(PODS[1]), Addr::from(PODS6[1])];
        for backend in &mut self.served.backends {
            if second.contains(&backend.addr) {
                change(&mut backend.flags, &mut backend.generation);
            }
        }
        self.offer();
    }

    /// Lets services choose among the backends that take new flows.
    fn offer(&mut self) {
        for (_, service) in &mut self.served.services {
            let backends = self.served.backends.iter().enumerate();
            let of_service = backends.filter(|(_, backend)| {
                backend.service == service.id && backend.flags & BACKEND_ELIGIBLE != 0
            });
            service.candidates = [Candidate::default(); MAX_BACKENDS_PER_PORT];
            service.count = 0;
            for (place, (index, backend)) in service.candidates.iter_mut().zip(of_service) {
                *place = Candidate {
                    backend: backend_id(index as u16, backend.generation),
                    identity: identity(&backend.addr.to_string()),
                };
                service.count += 1;
            }
        }
    }
}
