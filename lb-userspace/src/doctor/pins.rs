//! What is pinned, and who looks after it.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use aya::util::KernelVersion;
use lb_common::LAYOUT_VERSION;

use super::{Check, Finding, list};
use crate::dataplane::read::{ControlView, PeerView, PortView, Reader, UplinkView, VipView};
use crate::dataplane::{self, DataplaneError, TCX_SINCE};

/// What the pinned maps say.
pub(super) struct Pinned {
    pub(super) control: ControlView,
    pub(super) uplinks: Vec<UplinkView>,
    pub(super) vips: Vec<VipView>,
    pub(super) peers: Vec<PeerView>,
    pub(super) ports: Vec<PortView>,
    /// VIPs with ports that no uplink carries.
    pub(super) nowhere: BTreeSet<IpAddr>,
    /// Maps without a pin.
    missing: Vec<&'static str>,
    /// Versions of other layouts that are pinned, too.
    others: Vec<u32>,
}

/// What there is below the pin root.
pub(super) enum Loaded {
    /// Nothing.
    Nothing,
    /// It may not be looked at.
    Hidden(String),
    /// Of these layouts, none of which is this version's.
    Others(Vec<u32>),
    /// Maps that cannot be read as what they should be.
    Broken(DataplaneError),
    /// Maps of this version's layout.
    Here(Box<Pinned>),
}

pub(super) fn look(root: &Path) -> Loaded {
    if let Err(error) = std::fs::read_dir(root) {
        return match error.kind() {
            io::ErrorKind::NotFound => Loaded::Nothing,
            _ => Loaded::Hidden(format!("{} cannot be looked at: {error}", root.display())),
        };
    }
    let mut others = match dataplane::layouts(root) {
        Ok(layouts) => layouts,
        Err(error) => return Loaded::Broken(error),
    };
    others.retain(|layout| *layout != LAYOUT_VERSION);
    let read = || -> Result<Pinned, DataplaneError> {
        let reader = Reader::open(root)?;
        dataplane::check_pins(root)?;
        Ok(Pinned {
            control: reader.control()?,
            uplinks: reader.uplinks()?,
            vips: reader.vips()?,
            peers: reader.peers()?,
            ports: reader.ports()?,
            nowhere: reader.vips_without_uplink()?,
            missing: dataplane::missing(root),
            others: others.clone(),
        })
    };
    match read() {
        Ok(pinned) => Loaded::Here(Box::new(pinned)),
        Err(DataplaneError::NotLoaded { .. }) if others.is_empty() => Loaded::Nothing,
        Err(DataplaneError::NotLoaded { .. }) => Loaded::Others(others),
        Err(error) => Loaded::Broken(error),
    }
}

pub(super) fn judge(loaded: &Loaded, root: &Path, kernel: KernelVersion) -> Vec<Finding> {
    let on = root.display();
    let unload = match root == Path::new(dataplane::DEFAULT_BPFFS) {
        true => "ironlb unload".to_owned(),
        false => format!("ironlb unload --bpffs {on}"),
    };
    let versions = |layouts: &[u32]| list(layouts.iter().map(|layout| format!("v{layout}")));
    let pinned = match loaded {
        Loaded::Nothing => {
            let found = "nothing is pinned: no agent has served from this root yet";
            return vec![Finding::skipped(Check::Layout, on, found)];
        }
        Loaded::Hidden(why) => return vec![Finding::skipped(Check::Layout, on, why)],
        Loaded::Others(others) => {
            let found = format!(
                "what is pinned has the layout {}, and this version's is v{LAYOUT_VERSION}: it is not taken over, \
                 and its flows end with it",
                versions(others)
            );
            return vec![Finding::error(Check::Layout, on, found, unload)];
        }
        Loaded::Broken(error) => {
            return vec![Finding::error(Check::Layout, on, error.to_string(), unload)];
        }
        Loaded::Here(pinned) => pinned,
    };
    let layout = if !pinned.missing.is_empty() {
        let found = format!(
            "no pin is left of {}: what was in these maps is lost when the agent ends",
            list(&pinned.missing)
        );
        let remedy = "start `ironlb agent`: it pins them again";
        Finding::warning(Check::Layout, on, found, remedy)
    } else if !pinned.others.is_empty() {
        let found = format!(
            "beside this version's maps (v{LAYOUT_VERSION}) those of {} are left, with their programs",
            versions(&pinned.others)
        );
        Finding::warning(Check::Layout, on, found, unload)
    } else {
        Finding::ok(
            Check::Layout,
            on,
            format!("v{LAYOUT_VERSION}, this version's"),
        )
    };
    let mut findings = vec![layout];
    findings.extend(judge_agent(&pinned.control, &pinned.vips));
    findings.extend(judge_links(pinned, kernel));
    findings
}

/// Whether the agent runs in another network namespace than this process, as far as that can be seen.
fn is_elsewhere(control: &ControlView) -> bool {
    let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).ok();
    let agents = namespace(&control.agent_pid.to_string());
    control.agent_running && agents.is_some_and(|agents| Some(agents) != namespace("self"))
}

fn judge_agent(control: &ControlView, vips: &[VipView]) -> [Finding; 2] {
    const START: &str = "start `ironlb agent` (systemctl start ironlb, or the DaemonSet's pod)";
    let agent = if is_elsewhere(control) {
        let pid = control.agent_pid;
        let found = format!(
            "runs, process {pid}, in another network namespace: what is said of interfaces, routes and the firewall is of this one"
        );
        let remedy = format!("nsenter --target {pid} --net ironlb doctor");
        Finding::error(Check::Agent, "", found, remedy)
    } else if control.agent_running {
        let own = env!("CARGO_PKG_VERSION");
        let version = &control.agent_version;
        let other = match version == own {
            true => String::new(),
            false => format!("; this binary is {own}"),
        };
        let found = format!(
            "runs, process {}, version {version}{other}",
            control.agent_pid
        );
        Finding::ok(Check::Agent, "", found)
    } else {
        let elected = vips.iter().filter(|vip| vip.announcer.is_some());
        let elected: Vec<_> = elected.map(|vip| vip.address).collect();
        let silent = match &elected[..] {
            [] => String::new(),
            some => format!("; this node does not announce {} any more", list(some)),
        };
        let found = format!(
            "no agent runs that could be seen from here: what was written last serves on, without health checks and changes{silent}"
        );
        Finding::warning(Check::Agent, "", found, START)
    };
    let tables = match (control.synced_seconds, control.agent_started_seconds) {
        (None, _) => Finding::error(
            Check::Tables,
            "",
            "no agent has ever brought the tables in step with its configuration: nothing is served",
            "read the agent's log",
        ),
        (Some(synced), Some(started)) if control.agent_running && synced > started => {
            Finding::warning(
                Check::Tables,
                "",
                format!(
                    "the agent started {} ago and has not written the tables since; what serves is {} old",
                    age(started),
                    age(synced)
                ),
                "read the agent's log: is its source (the API server) out of reach?",
            )
        }
        (Some(synced), _) => Finding::ok(
            Check::Tables,
            "",
            format!("last written {} ago", age(synced)),
        ),
    };
    [agent, tables]
}

/// An uplink without programs serves nobody, whatever its row says.
fn judge_links(pinned: &Pinned, kernel: KernelVersion) -> Vec<Finding> {
    // Before TCX programs at TC have no links.
    let bare = pinned.uplinks.iter().filter(|uplink| {
        uplink.mode != dataplane::AttachedMode::Egress
            && uplink.programs.is_empty()
            && kernel >= TCX_SINCE
    });
    bare.map(|uplink| {
        let found = "no program is pinned on it: its packets pass untouched unless the agent still holds them";
        let remedy = "start `ironlb agent`: it attaches again";
        Finding::warning(Check::Mode, &uplink.interface, found, remedy)
    })
    .collect()
}

fn age(seconds: f64) -> String {
    humantime::format_duration(std::time::Duration::from_secs(seconds as u64)).to_string()
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    fn control() -> ControlView {
        ControlView {
            agent_pid: 7,
            agent_running: true,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            agent_started_seconds: Some(100.0),
            synced_seconds: Some(50.0),
            refusals_per_second: 1000,
            living_full: false,
            living_capacity: 1,
            young_capacity: 1,
            layout_version: LAYOUT_VERSION,
        }
    }

    #[test]
    fn an_agent_that_is_away_is_a_warning_and_one_that_never_wrote_an_error() {
        let cases = [
            (control(), Status::Ok, Status::Ok),
            (
                ControlView {
                    agent_running: false,
                    ..control()
                },
                Status::Warning,
                Status::Ok,
            ),
            (
                ControlView {
                    synced_seconds: Some(1000.0),
                    ..control()
                },
                Status::Ok,
                Status::Warning,
            ),
            (
                ControlView {
                    synced_seconds: None,
                    ..control()
                },
                Status::Ok,
                Status::Error,
            ),
        ];
        for (control, agent, tables) in cases {
            let found = judge_agent(&control, &[]);
            assert_eq!([agent, tables], [found[0].status, found[1].status]);
        }
    }

    #[test]
    fn another_layout_is_to_be_unloaded_at_its_root() {
        let kernel = KernelVersion::new(6, 6, 0);
        let root = Path::new("/sys/fs/bpf/second");
        let found = judge(&Loaded::Others(vec![2]), root, kernel);
        assert_eq!(found[0].status, Status::Error);
        assert!(found[0].found.contains("v2"), "{}", found[0].found);
        let remedy = found[0].remedy.as_deref();
        assert_eq!(remedy, Some("ironlb unload --bpffs /sys/fs/bpf/second"));
        let found = judge(&Loaded::Nothing, root, kernel);
        assert_eq!(found[0].status, Status::Skipped);
    }
}
