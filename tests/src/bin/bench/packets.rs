//! Nanoseconds a packet, net of a trivial program, and how large the programs are.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result, ensure};
use aya::maps::ProgramArray;
use aya::programs::{Program, ProgramFd, TestRun as _, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use comfy_table::Table;
use etherparse::PacketBuilder;
use ironlb_tests::engine::Engine;
use lb_common::layout::{
    Addr, DEFAULT_LIVING_FLOWS, DEFAULT_YOUNG_FLOWS, Filter, Flow, FlowKey, MODE_NATIVE, Pass,
    UPLINK_FORWARD, Uplink, Vip, backend_id, map, program, to_name,
};
use lb_common::{MAX_BYPASS_UDP, MAX_PASS, Verdict};
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};
use serde_json::{Map, Value, json};

use crate::judge;
use crate::statistics::median;

const VIP: Ipv4Addr = Ipv4Addr::new(172, 22, 0, 2);
const CLIENT: Ipv4Addr = Ipv4Addr::new(172, 22, 0, 100);
const PODS: [Ipv4Addr; 3] = [
    Ipv4Addr::new(10, 244, 0, 11),
    Ipv4Addr::new(10, 244, 0, 12),
    Ipv4Addr::new(10, 244, 0, 13),
];
const VIP6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x22, 0, 0, 0, 0, 0, 2);
const CLIENT6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x22, 0, 0, 0, 0, 0, 0x100);
const PODS6: [Ipv6Addr; 3] = [
    Ipv6Addr::new(0xfd00, 0x244, 0, 0, 0, 0, 0, 0x11),
    Ipv6Addr::new(0xfd00, 0x244, 0, 0, 0, 0, 0, 0x12),
    Ipv6Addr::new(0xfd00, 0x244, 0, 0, 0, 0, 0, 0x13),
];
/// An address of neither a VIP nor a pod, and which the first filters do not mistake for one.
const FOREIGN: Ipv4Addr = Ipv4Addr::new(172, 22, 0, 55);
const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, 0, 11];
const CLIENT_MAC: [u8; 6] = [2, 0, 0, 0, 0, 100];
const PORT: u16 = 6385;

/// Runs in one call: a call costs 17 ms besides.
const RUNS: u32 = 1_000_000;
/// Headers in the buffer of lb-ebpf/src/bench.rs, in bytes.
const HEADERS: usize = 80;

/// One kind of packet.
struct Kind {
    /// Name in the JSON.
    name: &'static str,
    /// What it is, for people.
    what: &'static str,
    /// How it must end.
    verdict: Verdict,
    /// Where it goes.
    to: IpAddr,
    /// What it carries.
    carries: Carries,
    /// The most it shall cost, net.
    goal: Option<f64>,
}

/// What a packet carries.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Carries {
    /// A SYN, of another client at every run.
    Syn,
    /// An ACK of the one client.
    Ack,
    Udp,
}

/// Which of them is a new flow's SYN over IPv4.
const NEW_FLOW: usize = 1;

const KINDS: [Kind; 6] = [
    Kind {
        name: "established_v4",
        what: "ACK of an established flow",
        verdict: Verdict::Forwarded,
        to: IpAddr::V4(VIP),
        carries: Carries::Ack,
        goal: Some(75.0),
    },
    Kind {
        name: "new_flow_v4",
        what: "SYN of a new flow, tables full",
        verdict: Verdict::ForwardedNew,
        to: IpAddr::V4(VIP),
        carries: Carries::Syn,
        goal: Some(300.0),
    },
    Kind {
        name: "established_v6",
        what: "the same over IPv6: ACK",
        verdict: Verdict::Forwarded,
        to: IpAddr::V6(VIP6),
        carries: Carries::Ack,
        goal: None,
    },
    Kind {
        name: "new_flow_v6",
        what: "the same over IPv6: SYN",
        verdict: Verdict::ForwardedNew,
        to: IpAddr::V6(VIP6),
        carries: Carries::Syn,
        goal: None,
    },
    Kind {
        name: "not_ours",
        what: "TCP to a foreign address",
        verdict: Verdict::Passed,
        to: IpAddr::V4(FOREIGN),
        carries: Carries::Ack,
        goal: Some(30.0),
    },
    Kind {
        name: "other_protocol",
        what: "UDP to a foreign address",
        verdict: Verdict::Passed,
        to: IpAddr::V4(FOREIGN),
        carries: Carries::Udp,
        goal: Some(10.0),
    },
];

/// Measures every kind of packet in `rounds` interleaved rounds; the JSON of the costs and of the programs' sizes.
pub fn measure(rounds: u32) -> Result<(Value, Value)> {
    // One processor for all: no migration, and per-CPU parts of the maps stay warm.
    let mut one = CpuSet::new();
    let all = rustix::thread::sched_getaffinity(None).context("ask for our processors")?;
    one.set(sched_getcpu());
    sched_setaffinity(None, &one).context("stay on one processor")?;
    let measured = on_this_processor(rounds);
    sched_setaffinity(None, &all).context("return to all processors")?;
    measured
}

fn on_this_processor(rounds: u32) -> Result<(Value, Value)> {
    let mut engine = engine()?;
    let mut bench = Bench::load()?;
    let target = {
        let Program::Xdp(program) = engine.program(program::XDP)? else {
            anyhow::bail!("{} is no XDP program", program::XDP);
        };
        program.fd()?.try_clone()?
    };
    let mut table = Table::new();
    table
        .load_style(comfy_table::presets::ASCII_MARKDOWN)
        .set_header(["per packet, XDP", "ns net of a trivial program", "goal", ""]);
    let mut json = Map::new();
    for kind in &KINDS {
        let buffer = kind.buffer()?;
        // Warm: caches, branch predictors, and the young table full.
        let wrapper = kind.wrapper();
        bench.run(wrapper, &target, &buffer)?;
        let before = engine.verdicts()?[kind.verdict as usize];
        let cost = bench.cost(wrapper, &target, &buffer, rounds)?;
        let ended = engine.verdicts()?[kind.verdict as usize] - before;
        ensure!(
            ended == u64::from(rounds) * u64::from(RUNS),
            "{} was measured, but only {ended} of {} packets ended as {}",
            kind.what,
            u64::from(rounds) * u64::from(RUNS),
            kind.verdict.name()
        );
        json.insert(kind.name.to_owned(), json!(cost));
        table.add_row([
            kind.what.to_owned(),
            format!("{cost:.0}"),
            kind.goal
                .map_or(String::new(), |goal| format!("≤ {goal:.0}")),
            kind.goal
                .map_or(String::new(), |goal| judge(cost <= goal).to_owned()),
        ]);
    }
    let insert = bench.insert.try_clone()?;
    let buffer = KINDS[NEW_FLOW].buffer()?;
    bench.run("bench_wrap", &insert, &buffer)?;
    let cost = bench.cost("bench_wrap", &insert, &buffer, rounds)?;
    json.insert("lru_insert".to_owned(), json!(cost));
    let what = "an insert into a full LRU by itself, one of which is in each new flow";
    table.add_row([what, &format!("{cost:.0}")]);
    println!("{table}\n");
    let instructions = instructions(&mut engine)?;
    Ok((Value::Object(json), instructions))
}

/// The object with three pods behind a VIP port, and an established flow to one of them.
fn engine() -> Result<Engine> {
    let mut engine = Engine::load_sized(DEFAULT_LIVING_FLOWS, DEFAULT_YOUNG_FLOWS)?;
    let mut vip_filter = Filter::default();
    let vips = [IpAddr::from(VIP), IpAddr::from(VIP6)];
    for vip in vips {
        vip_filter.insert(&Addr::from(vip));
    }
    let mut pod_filter = Filter::default();
    let pods = PODS.map(|pod| (IpAddr::from(pod), PORT));
    let pods6 = PODS6.map(|pod| (IpAddr::from(pod), PORT));
    for (pod, _) in pods.iter().chain(&pods6) {
        pod_filter.insert(&Addr::from(*pod));
    }
    let foreign = Addr::from(FOREIGN).v4_raw();
    ensure!(
        !vip_filter.may_contain(foreign) && !pod_filter.may_contain(foreign),
        "the filters mistake {FOREIGN}"
    );
    engine.set_uplink(
        0,
        Uplink {
            vip_filter,
            ifindex: 1,
            flags: UPLINK_FORWARD,
            mac: UPLINK_MAC,
            vlan: 0,
            mode: MODE_NATIVE,
            prefixes: [0; 2],
            pad: 0,
            device: 1,
            name: to_name("bench"),
            bypass_udp: [0; MAX_BYPASS_UDP],
            gateways: [Addr::UNSPECIFIED; 2],
            networks: [Addr::UNSPECIFIED; 2],
        },
    )?;
    for vip in vips {
        engine.set_vip(
            vip,
            Vip {
                answer_until: u64::MAX,
                flags: 0,
                uplink: 0,
                pass: [Pass::default(); MAX_PASS],
            },
        )?;
    }
    engine.serve(&[(vips[0], PORT, &pods), (vips[1], PORT, &pods6)])?;
    establish(&mut engine, CLIENT.into(), vips[0], pods[0].0, 0)?;
    establish(&mut engine, CLIENT6.into(), vips[1], pods6[0].0, 1)?;
    Ok(engine)
}

/// Enters a living flow to the first backend of the VIP port of that id.
fn establish(
    engine: &mut Engine,
    client: IpAddr,
    vip: IpAddr,
    pod: IpAddr,
    service: u16,
) -> Result<()> {
    let (client, vip, pod) = (Addr::from(client), Addr::from(vip), Addr::from(pod));
    let flow = |addr| Flow {
        addr,
        port: PORT,
        client_port: CLIENT_PORT,
        backend: backend_id(service * PODS.len() as u16, 1),
        service,
        last_hop: CLIENT_MAC,
        ..Flow::default()
    };
    let forward = FlowKey::forward(client, CLIENT_PORT, vip, PORT);
    let reply = FlowKey::reply(client, CLIENT_PORT, pod, PORT);
    engine.set_flow(map::LIVING_REPLY, &reply, flow(vip))?;
    engine.set_flow(map::LIVING, &forward, flow(pod))
}

const CLIENT_PORT: u16 = 40_000;

impl Kind {
    /// The wrapper that knows its headers.
    fn wrapper(&self) -> &'static str {
        match self.to {
            IpAddr::V4(_) => "bench_wrap",
            IpAddr::V6(_) => "bench_wrap6",
        }
    }

    /// The buffer that lb-ebpf/src/bench.rs describes.
    fn buffer(&self) -> Result<Vec<u8>> {
        let ethernet = PacketBuilder::ethernet2(CLIENT_MAC, UPLINK_MAC);
        let ip = match self.to {
            IpAddr::V4(to) => ethernet.ipv4(CLIENT.octets(), to.octets(), 64),
            IpAddr::V6(to) => ethernet.ipv6(CLIENT6.octets(), to.octets(), 64),
        };
        let mut frame = Vec::new();
        let built = match self.carries {
            Carries::Udp => ip.udp(CLIENT_PORT, PORT).write(&mut frame, &[]),
            Carries::Syn => {
                let tcp = ip.tcp(CLIENT_PORT, PORT, 1, 64_240);
                tcp.syn().write(&mut frame, &[])
            }
            Carries::Ack => {
                let tcp = ip.tcp(CLIENT_PORT, PORT, 1, 64_240);
                tcp.ack(1).write(&mut frame, &[])
            }
        };
        built.context("build a packet")?;
        frame.resize(HEADERS, 0);
        let step = u32::from(self.carries == Carries::Syn);
        Ok([
            &frame[..],
            &frame,
            &0_u32.to_ne_bytes(),
            &step.to_ne_bytes(),
        ]
        .concat())
    }
}

/// The wrapper, and the trivial program.
struct Bench {
    ebpf: Ebpf,
    target: ProgramArray<aya::maps::MapData>,
    trivial: ProgramFd,
    /// Puts an entry into an LRU.
    insert: ProgramFd,
}

impl Bench {
    fn load() -> Result<Self> {
        let mut ebpf = EbpfLoader::new()
            .load(ironlb::BENCH_OBJECT)
            .context("load the bench's object")?;
        for name in ["bench_wrap", "bench_wrap6", "bench_pass", "bench_insert"] {
            xdp(&mut ebpf, name)?
                .load()
                .with_context(|| format!("load {name}"))?;
        }
        let trivial = xdp(&mut ebpf, "bench_pass")?.fd()?.try_clone()?;
        let insert = xdp(&mut ebpf, "bench_insert")?.fd()?.try_clone()?;
        let target = ebpf.take_map("target").context("no map `target`")?;
        Ok(Self {
            target: ProgramArray::try_from(target)?,
            ebpf,
            trivial,
            insert,
        })
    }

    /// Nanoseconds of a target, net of the trivial program: the median of interleaved rounds.
    fn cost(
        &mut self,
        wrapper: &str,
        target: &ProgramFd,
        buffer: &[u8],
        rounds: u32,
    ) -> Result<f64> {
        let mut costs = Vec::new();
        for _ in 0..rounds {
            let trivial = self.run_trivial(wrapper, buffer)?;
            costs.push(self.run(wrapper, target, buffer)? - trivial);
        }
        Ok(median(costs))
    }

    /// Nanoseconds a run of a wrapper with a target.
    fn run(&mut self, wrapper: &str, target: &ProgramFd, buffer: &[u8]) -> Result<f64> {
        self.target
            .set(0, target, 0)
            .context("set the wrapper's target")?;
        let mut options = TestRunOptions::new();
        options.data_in = Some(buffer);
        options.repeat = RUNS;
        let result = xdp(&mut self.ebpf, wrapper)?
            .test_run(options)
            .context("run the wrapper")?;
        Ok(result.duration.as_nanos() as f64)
    }

    /// Nanoseconds a run of a wrapper with the trivial program.
    fn run_trivial(&mut self, wrapper: &str, buffer: &[u8]) -> Result<f64> {
        let trivial = self.trivial.try_clone()?;
        self.run(wrapper, &trivial, buffer)
    }
}

fn xdp<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut Xdp> {
    let program = ebpf
        .program_mut(name)
        .with_context(|| format!("no program {name}"))?;
    Ok(program.try_into()?)
}

/// What the verifier walked, and what the JIT made of it.
fn instructions(engine: &mut Engine) -> Result<Value> {
    let mut table = Table::new();
    table
        .load_style(comfy_table::presets::ASCII_MARKDOWN)
        .set_header(["program", "verified instructions", "jited bytes"]);
    let mut json = Map::new();
    for name in [
        program::XDP,
        program::XDP_PLAIN,
        program::INGRESS,
        program::EGRESS,
    ] {
        let info = match engine.program(name)? {
            Program::Xdp(program) => program.info(),
            Program::SchedClassifier(program) => program.info(),
            _ => anyhow::bail!("{name} is neither XDP nor TC"),
        }?;
        let verified = info.verified_instruction_count();
        let jited = info.size_jitted();
        json.insert(
            name.to_owned(),
            json!({"verified": verified, "jited_bytes": jited}),
        );
        table.add_row([
            name.to_owned(),
            // Since Linux 5.16.
            verified.map_or("unknown".to_owned(), |count| count.to_string()),
            jited.to_string(),
        ]);
    }
    println!("{table}\n");
    Ok(Value::Object(json))
}
