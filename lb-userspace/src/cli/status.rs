//! `ironlb status`: what serves, whether the agent lives, and how packets end.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;

use serde::Serialize;

use super::flows::is_expired;
use super::{Output, OutputArgument, ago, bytes, count, emit, emit_json, or_dash, table};
use crate::dataplane::AttachedMode;
use crate::dataplane::read::{
    ControlView, FlowFilter, FlowState, PeerView, Reader, UplinkView, VerdictView, VipView,
};

/// Show what serves, whether the agent lives, and how packets ended.
///
/// Reads the pinned maps alone, so it works with the agent dead.
#[derive(clap::Args)]
#[command(after_help = "\
Exit codes: 0 something is loaded, 1 error, 3 nothing is loaded at that root.

Examples:
  ironlb status
  ironlb status -o json | jq .agent.agent_running
  ironlb counters                      what each of the counters means")]
pub(super) struct Arguments {
    #[command(flatten)]
    output: OutputArgument,
}

#[derive(Serialize)]
struct Report {
    agent: ControlView,
    uplinks: Vec<UplinkView>,
    vips: Vec<VipView>,
    /// Those that are not served, for want of an uplink in their subnet.
    vips_without_uplink: BTreeSet<IpAddr>,
    /// The other nodes.
    peers: Vec<PeerView>,
    flows: Flows,
    /// Those that happened.
    verdicts: Vec<VerdictView>,
}

#[derive(Serialize, Default)]
struct Flows {
    living: usize,
    young: usize,
    closing: usize,
    refused: usize,
}

pub(super) fn run(arguments: &Arguments, bpffs: &Path) -> anyhow::Result<ExitCode> {
    let reader = Reader::open(bpffs)?;
    let mut flows = Flows::default();
    let all = reader.flows(&FlowFilter::default())?;
    for flow in all.iter().filter(|flow| !is_expired(flow)) {
        *match flow.state {
            FlowState::Living => &mut flows.living,
            FlowState::Young => &mut flows.young,
            FlowState::Closing => &mut flows.closing,
            FlowState::Refused => &mut flows.refused,
        } += 1;
    }
    let mut verdicts = reader.verdicts()?;
    verdicts.retain(|verdict| verdict.packets > 0);
    let report = Report {
        agent: reader.control()?,
        uplinks: reader.uplinks()?,
        vips: reader.vips()?,
        vips_without_uplink: reader.vips_without_uplink()?,
        peers: reader.peers()?,
        flows,
        verdicts,
    };
    match arguments.output.output {
        Output::Json => emit_json(&report)?,
        Output::Table => emit(&describe(&report))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn describe(report: &Report) -> String {
    let Report {
        agent,
        uplinks,
        vips,
        vips_without_uplink,
        peers,
        flows,
        verdicts,
    } = report;
    let nowhere = |vip: &IpAddr| {
        let announced = "no: no uplink is in its subnet";
        [&vip.to_string(), "-", announced, "-", "-", "-"].map(str::to_owned)
    };
    let verdicts = verdicts
        .iter()
        .map(|verdict| [verdict.verdict.to_owned(), count(verdict.packets)]);
    let mut parts = vec![
        describe_agent(agent, flows),
        table(
            &[
                "UPLINK",
                "MODE",
                "MAC",
                "VLAN",
                "GATEWAY",
                "DIRECT TO PODS",
                "PROGRAMS",
            ],
            uplinks.iter().map(uplink_row),
        ),
        table(
            &[
                "VIP",
                "UPLINK",
                "ANNOUNCED",
                "SINCE",
                "REFUSAL",
                "PASSED TO THE HOST",
            ],
            vips.iter()
                .map(|vip| vip_row(vip, agent))
                .chain(vips_without_uplink.iter().map(nowhere)),
        ),
    ];
    if !peers.is_empty() {
        parts.push(table(
            &[
                "NODE",
                "AGENT",
                "DATA PLANE",
                "FLOWS KNOWN",
                "SINCE",
                "AT",
                "HANDED ON",
                "VERSION",
            ],
            peers.iter().map(peer_row),
        ));
    }
    parts.push(table(&["VERDICT", "PACKETS"], verdicts));
    parts.join("\n\n")
}

fn peer_row(peer: &PeerView) -> [String; 8] {
    let links = peer.links.iter().map(|link| {
        let addresses: Vec<_> = link.addresses.iter().map(ToString::to_string).collect();
        format!("{} {} {}", link.interface, link.mac, addresses.join(" "))
    });
    let choose = |is: bool, yes: &str, no: &str| if is { yes } else { no }.to_owned();
    [
        peer.node.clone(),
        choose(peer.live, "heard", "silent"),
        choose(peer.reflecting, "takes flows", "no new flows"),
        choose(peer.synced, "yes", "no"),
        or_dash(peer.since_seconds.map(ago)),
        links.collect::<Vec<_>>().join(", "),
        format!(
            "{}, {} flows",
            bytes(peer.handed_on_bytes),
            count(peer.handed_on_flows)
        ),
        peer.version.clone(),
    ]
}

fn describe_agent(agent: &ControlView, flows: &Flows) -> String {
    let mut lines = Vec::new();
    if agent.agent_running {
        let started = agent.agent_started_seconds;
        let started = started.map_or_else(String::new, |s| format!(", started {} ago", ago(s)));
        lines.push(format!(
            "agent    runs (process {}, version {}{started})",
            agent.agent_pid, agent.agent_version
        ));
    } else {
        lines.push("agent    does not run; the data plane serves what it wrote last".to_owned());
    }
    if let Some(seconds) = agent.synced_seconds {
        lines.push(format!("tables   written {} ago", ago(seconds)));
    }
    lines.push(format!(
        "flows    {} living of {}{}, {} young and {} closing of {}, {} refused",
        flows.living,
        agent.living_capacity,
        match agent.living_full {
            true => " (full: new flows are refused)",
            false => "",
        },
        flows.young,
        flows.closing,
        agent.young_capacity,
        flows.refused,
    ));
    lines.join("\n")
}

fn uplink_row(uplink: &UplinkView) -> [String; 7] {
    let programs = uplink.programs.iter();
    let programs = programs.map(|link| format!("{}:{}", link.hook, link.program));
    [
        uplink.interface.clone(),
        match uplink.mode {
            AttachedMode::Native => "native",
            AttachedMode::Tc => "tc",
            AttachedMode::Egress => "replies only",
        }
        .to_owned(),
        uplink.mac.clone(),
        or_dash(uplink.vlan),
        match &uplink.gateways[..] {
            [] => "-".to_owned(),
            gateways => {
                let gateways: Vec<_> = gateways.iter().map(ToString::to_string).collect();
                gateways.join(" ")
            }
        },
        match uplink.bypass_drop {
            true => "dropped",
            false => "allowed",
        }
        .to_owned(),
        programs.collect::<Vec<_>>().join(" "),
    ]
}

fn vip_row(vip: &VipView, agent: &ControlView) -> [String; 6] {
    let announcer = vip.announcer.as_ref();
    let mut announced = match (vip.external, vip.answering) {
        (true, _) => "by others".to_owned(),
        (false, true) => "here".to_owned(),
        (false, false) => match announcer.and_then(|announcer| announcer.node.as_ref()) {
            Some(node) if agent.agent_running => format!("by {node}"),
            Some(node) => format!("not here: no agent (last: by {node})"),
            None => "no".to_owned(),
        },
    };
    if let Some(conflict) = announcer.and_then(|announcer| announcer.conflict.as_ref()) {
        announced.push_str(&format!(" ({conflict})"));
    }
    [
        vip.address.to_string(),
        vip.interface.clone(),
        announced,
        or_dash(
            announcer
                .and_then(|announcer| announcer.since_seconds)
                .map(ago),
        ),
        vip.refuse.clone(),
        match &vip.pass[..] {
            [] => "-".to_owned(),
            pass => pass.join(" "),
        },
    ]
}
