//! The programs in the kernel, and their source on the host (lb-host), which is what the fuzzer runs: the same packets over
//! the same tables have the same verdicts, bytes, entries and events.

use std::borrow::Cow;

use ironlb_tests::engine::Engine;
use lb_common::layout::{Flow, FlowKey, Uplink, map, program};
use lb_host::Program;
use lb_host::corpus::{self, Mutations, Step, Written, files, plain};
use lb_host::scene::{Scene, scene};
use lb_host::turn::Flows;

/// Room for flows, which no dialogue fills.
const ROOM: u32 = 64;
/// Frames that are made out of the kept dialogues.
const MUTATED: usize = 20_000;

/// Ticks of what the programs in the kernel take for a second: none passes, however busy the machine is.
const TICKS: u32 = 1_000_000;

/// The programs in the kernel with a scene's tables.
fn in_kernel(scene: &Scene) -> Engine {
    let mut engine = Engine::load_ticking(ROOM, 1024, TICKS).expect("the object loads");
    engine.write_scene(scene).expect("writes");
    engine
}

/// Tables in the kernel.
struct Tables<'a>(&'a mut Engine);

impl Flows for Tables<'_> {
    fn rows(&mut self, table: &str) -> Vec<(FlowKey, Flow)> {
        self.0.flows(table).expect("reads")
    }

    fn put(&mut self, table: &str, key: &FlowKey, flow: &Flow) -> bool {
        self.0.set_flow(table, key, *flow).is_ok()
    }

    fn lose(&mut self, table: &str, key: &FlowKey) {
        self.0.lose_flow(table, key).expect("it was there");
    }
}

/// What of an entry does not tell of the time.
fn shown(mut flows: Vec<(FlowKey, Flow)>) -> Vec<String> {
    flows.sort_by_key(|(key, _)| *key);
    let flow = |(key, flow): (FlowKey, Flow)| {
        format!(
            "{:?} {} {:?} {}: {:?} {} {} backend {:#x} service {} ack {} fins {} {} bytes {} by {:x?} {:#x} state {}",
            key.client,
            key.client_port,
            key.addr,
            key.port,
            flow.addr,
            flow.port,
            flow.client_port,
            flow.backend,
            flow.service,
            flow.last_ack,
            flow.client_fin,
            flow.pod_fin,
            flow.bytes,
            flow.last_hop,
            flow.uplink,
            flow.state
        )
    };
    flows.into_iter().map(flow).collect()
}

/// What of an event does not tell of the time.
fn told(events: Vec<lb_common::events::Event>) -> Vec<String> {
    let event = |event: lb_common::events::Event| {
        let captured = &event.frame[..event.captured as usize];
        format!(
            "kind {} verdict {} length {}: {captured:02x?}",
            event.kind, event.verdict, event.length
        )
    };
    events.into_iter().map(event).collect()
}

/// Whether the kernel's own test run takes a frame at a hook: of skbs it refuses those that end within their IP header.
fn is_taken(program: Program, frame: &[u8]) -> bool {
    let header = match frame[12..14] {
        [8, 0] => 20,
        [0x86, 0xdd] => 40,
        _ => 1,
    };
    program == Program::Xdp || frame.len() >= 14 + header
}

struct Pair {
    kernel: Engine,
    scene: Scene,
    fresh: lb_host::Engine,
    runs: usize,
    turns: usize,
    left_out: usize,
}

impl Pair {
    fn new() -> Self {
        let scene = scene();
        Self {
            kernel: in_kernel(&scene),
            fresh: scene.engine(ROOM as usize, 1024),
            scene,
            runs: 0,
            turns: 0,
            left_out: 0,
        }
    }

    /// Plays a dialogue twice, and panics at the first difference.
    fn play(&mut self, name: &str, dialogue: &Written) {
        let mut host = self.fresh.clone();
        let mut scene = Cow::Borrowed(&self.scene);
        let backends = scene.served.backends.len();
        self.kernel.forget(backends).expect("writes");
        let steps = plain(dialogue);
        for (at, step) in steps.iter().enumerate() {
            let (program, packet) = match step {
                Step::Packet(program, packet) => (*program, packet),
                Step::Turn(turn) if turn.is_of_host() => {
                    self.left_out += steps.len() - at;
                    break;
                }
                Step::Turn(turn) => {
                    self.turns += 1;
                    turn.take(scene.to_mut(), &mut host);
                    self.kernel.write_scene(&scene).expect("writes");
                    turn.stir(&mut Tables(&mut self.kernel));
                    continue;
                }
            };
            let frame = &packet.frame;
            if !is_taken(program, frame) {
                self.left_out += 1;
                continue;
            }
            self.runs += 1;
            let name = format!("{name}, step {at}, {program:?}: {frame:02x?}");
            host.attach(program);
            let uplink: Uplink = host.get(map::UPLINKS, &0_u32).expect("there is one");
            let there = host.run(program, packet);
            host.clock().jiffies += 1;
            let program = match program {
                Program::Xdp => program::XDP,
                Program::Ingress => program::INGRESS,
                Program::Egress => program::EGRESS,
            };
            let here = self.kernel.run_in(program, uplink.mode, frame);
            let here = here.unwrap_or_else(|error| panic!("{name}: {error:#}"));
            assert_eq!(here.verdict, there.verdict, "{name}");
            assert_eq!(here.frame, there.frame, "{name}: {:?}", here.verdict);
            for table in [map::LIVING, map::LIVING_REPLY, map::YOUNG] {
                assert_eq!(
                    shown(self.kernel.flows(table).expect("reads")),
                    shown(host.rows(table)),
                    "{name}: {:?}, {table}",
                    here.verdict
                );
            }
            let events = self.kernel.events().expect("reads");
            assert_eq!(told(events), told(host.events()), "{name}: events");
        }
        if let Cow::Owned(_) = scene {
            self.kernel.write_scene(&self.scene).expect("writes");
        }
    }
}

#[test]
fn kept_dialogues_go_as_they_do_on_the_host() {
    let mut pair = Pair::new();
    for (path, bytes) in files().expect("fuzz/seeds can be read") {
        pair.play(&path.display().to_string(), &corpus::read(&bytes));
    }
    assert!(pair.runs > 400, "{} runs", pair.runs);
    assert!(pair.turns > 50, "{} turns", pair.turns);
}

#[test]
fn mutated_dialogues_go_as_they_do_on_the_host() {
    let mut pair = Pair::new();
    let seeds = files().expect("fuzz/seeds can be read");
    let seeds = seeds.iter().map(|(_, bytes)| corpus::read(bytes)).collect();
    for (at, dialogue) in Mutations::new(seeds, 2).enumerate() {
        pair.play(&format!("mutation {at}"), &dialogue);
        if pair.runs >= MUTATED {
            break;
        }
    }
    assert!(pair.left_out < MUTATED / 10, "{} left out", pair.left_out);
}
