//! What the control plane costs: a large configuration from the file to the maps, the agent's memory, and the tables'.

use std::fs;
use std::os::fd::{AsFd as _, AsRawFd as _};

use anyhow::{Context as _, Result};
use aya::EbpfLoader;
use aya::maps::Map;
use comfy_table::Table;
use ironlb_tests::{Agent, Laboratory, VIP};
use lb_common::map;
use serde_json::{Value, json};

use crate::judge;
use crate::statistics::Estimate;

const SERVICES: u8 = 200;
const BACKENDS: u8 = 50;
const FLOWS: u32 = 100_000;
/// Most milliseconds of a whole plan and its writes.
const GOAL_WRITE: f64 = 40.0;
/// Most MiB of the agent's resident memory.
const GOAL_RSS: f64 = 30.0;
/// Most MiB of both tables of living flows.
const GOAL_MAPS: f64 = 32.0;

/// Measures so many starts of an agent; the JSON of the figures.
pub fn measure(starts: usize) -> Result<Value> {
    println!("\n{SERVICES} services with {BACKENDS} backends each, {starts} starts of the agent …");
    let laboratory = Laboratory::builder().build()?;
    let node = &laboratory.nodes[0];
    let mut config = laboratory.config("tc");
    let service = |number: u8| {
        let backend = |at: u8| json!({"instance": format!("pod-{at}"), "address": format!("10.250.{number}.{at}")});
        json!({
            "name": format!("service-{number}"),
            "vip": VIP,
            "ports": [{"name": "api", "port": 10_000 + u32::from(number)}],
            "backends": (1..=BACKENDS).map(backend).collect::<Vec<_>>(),
        })
    };
    config["services"] = (0..SERVICES).map(service).collect();
    node.write_config(&config)?;
    let (mut written, mut resident) = (Vec::new(), Vec::new());
    for _ in 0..starts {
        let mut agent = Agent::spawn(node)?;
        agent.wait_until_ready(node)?;
        let metrics = node.namespace.exec([
            "curl",
            "-sSf",
            "--max-time",
            "5",
            "http://127.0.0.1:9469/metrics",
        ])?;
        let seconds = |name: &str| -> Result<f64> {
            let line = metrics.lines().find_map(|line| line.strip_prefix(name));
            let value = line.with_context(|| format!("the agent has no metric {name}"))?;
            Ok(value.trim().parse()?)
        };
        // The first plan is the whole one; what follows finds nothing to do.
        let plan = seconds("ironlb_plan_duration_seconds_sum")?;
        let write = seconds("ironlb_write_duration_seconds_sum")?;
        written.push((plan + write) * 1e3);
        resident.push(resident_mib(agent.process.pid())?);
        agent.stop()?;
        node.ironlb(&["unload"])?;
    }
    let (written, resident) = (Estimate::of(&written), Estimate::of(&resident));
    let maps = tables_mib()?;
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(["control plane", "median [90 % interval]", "goal", ""]);
    let cell = |e: Estimate| format!("{:.1} [{:.1}–{:.1}]", e.median, e.lo, e.hi);
    table.add_row([
        "whole plan and writes, ms",
        &cell(written),
        &format!("< {GOAL_WRITE}"),
        judge(written.lo < GOAL_WRITE),
    ]);
    table.add_row([
        "agent's resident memory, MiB",
        &cell(resident),
        &format!("< {GOAL_RSS}"),
        judge(resident.lo < GOAL_RSS),
    ]);
    table.add_row([
        &format!("tables of {FLOWS} living flows, MiB"),
        &format!("{maps:.1}"),
        &format!("< {GOAL_MAPS}"),
        judge(maps < GOAL_MAPS),
    ]);
    println!("{table}");
    Ok(json!({
        "plan_write_ms": written.json(),
        "agent_rss_mib": resident.json(),
        "map_mib_100k": maps,
    }))
}

fn resident_mib(pid: u32) -> Result<f64> {
    let path = format!("/proc/{pid}/status");
    number(&path, "VmRSS:").map(|kib| kib / 1024.0)
}

/// What the kernel says that both tables of living flows take.
fn tables_mib() -> Result<f64> {
    let mut loader = EbpfLoader::new();
    loader.map_max_entries(map::LIVING, FLOWS);
    loader.map_max_entries(map::LIVING_REPLY, FLOWS);
    let object = loader.load(ironlb::OBJECT)?;
    let mut bytes = 0.0;
    for name in [map::LIVING, map::LIVING_REPLY] {
        let Some(Map::HashMap(data)) = object.map(name) else {
            anyhow::bail!("the object has no hash `{name}`");
        };
        let path = format!("/proc/self/fdinfo/{}", data.fd().as_fd().as_raw_fd());
        bytes += number(&path, "memlock:")?;
    }
    Ok(bytes / f64::from(1 << 20))
}

/// The number behind a name in a file of /proc.
fn number(path: &str, name: &str) -> Result<f64> {
    let text = fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|line| line.split_whitespace().next());
    let number = number.with_context(|| format!("{path} has no {name}"))?;
    Ok(number.parse()?)
}
