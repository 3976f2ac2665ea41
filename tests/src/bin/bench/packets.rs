//! Nanoseconds a packet, net of a trivial program, and how large the programs are.

use std::net::Ipv4Addr;

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
/// An address of neither a VIP nor a pod, and which the first filters do not mistake for one.
const FOREIGN: Ipv4Addr = Ipv4Addr::new(172, 22, 0, 55);
const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, 0, 11];
const CLIENT_MAC: [u8; 6] = [2, 0, 0, 0, 0, 100];
const PORT: u16 = 6385;

/// Runs in one call: a call costs 17 ms besides.
const RUNS: u32 = 1_000_000;
/// Headers in the buffer of lb-ebpf/src/bench.rs, in bytes.
const HEADERS: usize = 56;

/// One kind of packet.
struct Kind {
    /// Name in the JSON.
    name: &'static str,
    /// What it is, for people.
    what: &'static str,
    /// How it must end.
    verdict: Verdict,
    /// Where it goes.
    to: Ipv4Addr,
    /// A SYN, of another client at every run; else an ACK of the one client.
    syn: bool,
    /// The most it shall cost, net.
    goal: Option<f64>,
}

const KINDS: [Kind; 3] = [
    Kind {
        name: "established_v4",
        what: "ACK of an established flow",
        verdict: Verdict::Forwarded,
        to: VIP,
        syn: false,
        goal: Some(100.0),
    },
    Kind {
        name: "new_flow_v4",
        what: "SYN of a new flow, tables full",
        verdict: Verdict::ForwardedNew,
        to: VIP,
        syn: true,
        goal: None,
    },
    Kind {
        name: "not_ours",
        what: "TCP to a foreign address",
        verdict: Verdict::Passed,
        to: FOREIGN,
        syn: false,
        goal: Some(40.0),
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
        let mut run = |target: &ProgramFd| bench.run(target, &buffer);
        run(&target)?;
        let before = engine.verdicts()?[kind.verdict as usize];
        let mut costs = Vec::new();
        for _ in 0..rounds {
            let trivial = bench.run_trivial(&buffer)?;
            costs.push(bench.run(&target, &buffer)? - trivial);
        }
        let ended = engine.verdicts()?[kind.verdict as usize] - before;
        ensure!(
            ended == u64::from(rounds) * u64::from(RUNS),
            "{} was measured, but only {ended} of {} packets ended as {}",
            kind.what,
            u64::from(rounds) * u64::from(RUNS),
            kind.verdict.name()
        );
        let cost = median(costs);
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
    println!("{table}\n");
    let instructions = instructions(&mut engine)?;
    Ok((Value::Object(json), instructions))
}

/// The object with three pods behind a VIP port, and an established flow to one of them.
fn engine() -> Result<Engine> {
    let mut engine = Engine::load_sized(DEFAULT_LIVING_FLOWS, DEFAULT_YOUNG_FLOWS)?;
    let mut vip_filter = Filter::default();
    vip_filter.insert(&Addr::from(VIP));
    let mut pod_filter = Filter::default();
    for pod in PODS {
        pod_filter.insert(&Addr::from(pod));
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
    engine.set_vip(
        VIP,
        Vip {
            answer_until: u64::MAX,
            flags: 0,
            uplink: 0,
            pass: [Pass::default(); MAX_PASS],
        },
    )?;
    engine.serve(&[(VIP, PORT, &PODS.map(|pod| (pod, PORT)))])?;
    let (client, vip, pod) = (Addr::from(CLIENT), Addr::from(VIP), Addr::from(PODS[0]));
    let flow = |addr| Flow {
        addr,
        port: PORT,
        client_port: CLIENT_PORT,
        backend: backend_id(0, 1),
        last_hop: CLIENT_MAC,
        ..Flow::default()
    };
    let forward = FlowKey::forward(client, CLIENT_PORT, vip, PORT);
    let reply = FlowKey::reply(client, CLIENT_PORT, pod, PORT);
    engine.set_flow(map::LIVING_REPLY, &reply, flow(vip))?;
    engine.set_flow(map::LIVING, &forward, flow(pod))?;
    Ok(engine)
}

const CLIENT_PORT: u16 = 40_000;

impl Kind {
    /// The buffer that lb-ebpf/src/bench.rs describes.
    fn buffer(&self) -> Result<Vec<u8>> {
        let tcp = PacketBuilder::ethernet2(CLIENT_MAC, UPLINK_MAC)
            .ipv4(CLIENT.octets(), self.to.octets(), 64)
            .tcp(CLIENT_PORT, PORT, 1, 64_240);
        let tcp = if self.syn { tcp.syn() } else { tcp.ack(1) };
        let mut frame = Vec::new();
        tcp.write(&mut frame, &[]).context("build a packet")?;
        frame.resize(HEADERS, 0);
        let step = u32::from(self.syn);
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
}

impl Bench {
    fn load() -> Result<Self> {
        let mut ebpf = EbpfLoader::new()
            .load(ironlb::BENCH_OBJECT)
            .context("load the bench's object")?;
        for name in ["bench_wrap", "bench_pass"] {
            xdp(&mut ebpf, name)?
                .load()
                .with_context(|| format!("load {name}"))?;
        }
        let trivial = xdp(&mut ebpf, "bench_pass")?.fd()?.try_clone()?;
        let target = ebpf.take_map("target").context("no map `target`")?;
        Ok(Self {
            target: ProgramArray::try_from(target)?,
            ebpf,
            trivial,
        })
    }

    /// Nanoseconds a run of the wrapper with a target.
    fn run(&mut self, target: &ProgramFd, buffer: &[u8]) -> Result<f64> {
        self.target
            .set(0, target, 0)
            .context("set the wrapper's target")?;
        let mut options = TestRunOptions::new();
        options.data_in = Some(buffer);
        options.repeat = RUNS;
        let result = xdp(&mut self.ebpf, "bench_wrap")?
            .test_run(options)
            .context("run the wrapper")?;
        Ok(result.duration.as_nanos() as f64)
    }

    /// Nanoseconds a run of the wrapper with the trivial program.
    fn run_trivial(&mut self, buffer: &[u8]) -> Result<f64> {
        let trivial = self.trivial.try_clone()?;
        self.run(&trivial, buffer)
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
