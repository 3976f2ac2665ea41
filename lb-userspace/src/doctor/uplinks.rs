//! The interfaces that packets come by.

use std::io;

use aya::programs::TcAttachType;
use aya::util::KernelVersion;
use lb_common::program;

use super::pins::Pinned;
use super::subject::{Subject, Uplink};
use super::{Check, Finding, list, platform};
use crate::dataplane::{self, AttachedMode, FRAGS_SINCE};
use crate::desired::Mode;
use crate::ethtool::{self, Offload};
use crate::interfaces::{Host, Interface, InterfaceError};
use crate::netdev::{self, XdpFeatures};

/// A packet of more does not fit one page with what XDP and the kernel keep beside it.
const PLAIN_MTU: u32 = 3498;

/// An interface that an uplink means, and what there is to know about it.
#[derive(Clone, Debug)]
pub(super) struct Port {
    /// Where programs are attached.
    pub(super) interface: Interface,
    /// Has the MAC and the addresses: the bridge of a port, else the same.
    pub(super) device: Interface,
    /// What it is meant by.
    pub(super) uplink: Uplink,
    /// How it is attached now.
    pub(super) attached: Option<AttachedMode>,
    /// Where maps are, whether this attachment drops direct attempts.
    pub(super) guards: Option<bool>,
    driver: Option<String>,
    /// `None` where the kernel does not tell.
    features: Option<XdpFeatures>,
    /// Which programs are ours cannot be seen.
    is_blind: bool,
    /// Others' XDP programs.
    foreign: Vec<String>,
    /// Programs at TC that run before ours, and other ironlbs' ones, by direction.
    before: Vec<(&'static str, String)>,
    others: Vec<(&'static str, u32)>,
    offloads: Offloads,
}

/// What native XDP minds; `None` where it cannot be seen.
#[derive(Clone, Debug, Default)]
struct Offloads {
    lro: Option<bool>,
    receive_vlan: Option<bool>,
    /// The other end of a veth, with its transmit checksums and GRO.
    peer: Option<(String, Option<bool>, Option<bool>)>,
}

impl Port {
    /// Whether the forward path is native, or is wanted to be.
    pub(super) fn is_native(&self) -> bool {
        match self.attached {
            Some(attached) => attached == AttachedMode::Native,
            None => self.uplink.mode == Mode::Native,
        }
    }

    /// Whether direct attempts to pods are dropped on it; `None` where nobody has decided yet.
    pub(super) fn guards(&self) -> Option<bool> {
        self.uplink.guards.or(self.guards)
    }

    fn name(&self) -> &str {
        &self.interface.name
    }
}

/// The interfaces of all uplinks, and what is to be said about them.
pub(super) fn look(
    subject: &Subject,
    host: &Host,
    pinned: Option<&Pinned>,
    is_blind: bool,
) -> (Vec<Port>, Vec<Finding>) {
    let kernel = platform::present();
    let mut ports: Vec<Port> = Vec::new();
    let mut findings = Vec::new();
    for uplink in &subject.uplinks {
        let places = match host.resolve(&uplink.selector) {
            Ok(places) => places,
            Err(error) => {
                findings.push(refused(&error));
                continue;
            }
        };
        if places.is_empty() {
            findings.push(absent(&dataplane::idle(&uplink.selector)));
        }
        for place in places {
            let interfaces = &host.interfaces;
            let (Some(interface), Some(device)) =
                (interfaces.get(&place.port), interfaces.get(&place.device))
            else {
                continue;
            };
            if ports.iter().any(|port| port.interface.index == place.port) {
                continue;
            }
            let mut port = gather(uplink, interface, device, host, pinned);
            port.is_blind = is_blind;
            findings.extend(judge(&port, kernel));
            ports.push(port);
        }
    }
    (ports, findings)
}

fn gather(
    uplink: &Uplink,
    interface: &Interface,
    device: &Interface,
    host: &Host,
    pinned: Option<&Pinned>,
) -> Port {
    let rows = pinned.map_or(&[][..], |pinned| &pinned.uplinks);
    let row = rows.iter().find(|row| row.ifindex == interface.index);
    let ours: Vec<u32> = row.map_or_else(Vec::new, |row| {
        row.programs.iter().map(|link| link.program).collect()
    });
    let foreign = interface.xdp.iter().filter(|id| !ours.contains(id));
    let mut before = Vec::new();
    let mut others = Vec::new();
    for (hook, direction, name) in [
        ("ingress", TcAttachType::Ingress, program::INGRESS),
        ("egress", TcAttachType::Egress, program::EGRESS),
    ] {
        // What cannot be read (no rights) is told by the check of rights.
        let chain = dataplane::programs_at_tc(interface, direction).unwrap_or_default();
        if let Some(place) = chain.iter().position(|(id, _)| ours.contains(id)) {
            let named = chain[..place].iter();
            before.extend(named.map(|(id, name)| (hook, format!("`{name}` (program {id})"))));
        }
        let strange = chain
            .iter()
            .filter(|(id, found)| found == name && !ours.contains(id));
        others.extend(strange.map(|(id, _)| (hook, *id)));
    }
    let offload = |interface: &str, offload| ethtool::offload(interface, offload).ok();
    Port {
        interface: interface.clone(),
        device: device.clone(),
        uplink: uplink.clone(),
        attached: row
            .map(|row| row.mode)
            .filter(|mode| *mode != AttachedMode::Egress),
        guards: row.map(|row| row.bypass_drop),
        driver: ethtool::driver(&interface.name).ok(),
        features: features(interface.index),
        is_blind: false,
        foreign: foreign.map(|id| dataplane::program_name(*id)).collect(),
        before,
        others,
        offloads: Offloads {
            lro: offload(&interface.name, Offload::Lro),
            receive_vlan: offload(&interface.name, Offload::ReceiveVlan),
            peer: host.other_end(interface).map(|peer| {
                (
                    peer.name.clone(),
                    offload(&peer.name, Offload::TransmitChecksum),
                    offload(&peer.name, Offload::Gro),
                )
            }),
        },
    }
}

fn features(ifindex: u32) -> Option<XdpFeatures> {
    let found: io::Result<_> = netdev::xdp_features(ifindex);
    found.ok().flatten()
}

fn refused(error: &InterfaceError) -> Finding {
    let (on, remedy) = match error {
        InterfaceError::BondSlave { interface, bond } => (
            interface.clone(),
            format!("name the bond: `uplinks: [{{name: {bond}}}]`"),
        ),
        InterfaceError::NotEthernet { interface } => (
            interface.clone(),
            "name another interface: ip -br link".to_owned(),
        ),
        InterfaceError::Pattern { pattern, .. } => (pattern.clone(), "mend the pattern".to_owned()),
        InterfaceError::Netlink { .. } => (
            String::new(),
            "run it where AF_NETLINK sockets are allowed".to_owned(),
        ),
    };
    Finding::error(Check::Uplink, on, error.to_string(), remedy)
}

fn absent(why: &str) -> Finding {
    let found = format!("{why}: nothing is served on this uplink until there is one");
    Finding::error(
        Check::Uplink,
        "",
        found,
        "ip -br addr; ip link set dev INTERFACE up",
    )
}

fn judge(port: &Port, kernel: KernelVersion) -> Vec<Finding> {
    let Port {
        interface, device, ..
    } = port;
    let name = port.name();
    let shown = match interface.index == device.index {
        true => describe(port),
        false => format!("{}, port of {}", describe(port), device.name),
    };
    let mut findings = vec![
        Finding::ok(Check::Uplink, name, shown),
        match interface.running {
            true => Finding::ok(Check::Carrier, name, "up, with a link"),
            false => Finding::error(
                Check::Carrier,
                name,
                "it is down or has no carrier: nothing arrives, and another node takes its VIPs",
                format!("ip link set dev {name} up; ethtool {name} (link detected?)"),
            ),
        },
        judge_mode(port),
        judge_mtu(port, kernel),
        judge_xdp(port),
    ];
    findings.extend(judge_order(port));
    findings.extend(judge_offloads(port));
    findings
}

fn describe(port: &Port) -> String {
    let kind = port.interface.kind.as_deref();
    match (&port.driver, kind) {
        (Some(driver), Some(kind)) if driver != kind => format!("{kind}, driver {driver}"),
        (Some(driver), None) => format!("driver {driver}"),
        (_, Some(kind)) => kind.to_owned(),
        (None, None) => "driver not known".to_owned(),
    }
}

fn judge_mode(port: &Port) -> Finding {
    let name = port.name();
    let refused = port.features.is_some_and(|features| !features.basic);
    let sums = dataplane::unfinished_sums(&port.interface);
    let now = match port.attached {
        Some(AttachedMode::Native) => "native now",
        Some(AttachedMode::Tc) => "tc now",
        _ => "not attached now",
    };
    let ok = |found: String| Finding::ok(Check::Mode, name, found);
    match (port.uplink.mode, sums) {
        (Mode::Native, Some(sums)) => Finding::warning(
            Check::Mode,
            name,
            format!(
                "native, but {sums}: packets from local senders would be corrupt; this is for laboratories"
            ),
            "let it be `mode: tc` or `mode: auto`",
        ),
        (Mode::Native, None) if refused && port.attached != Some(AttachedMode::Native) => {
            Finding::error(
                Check::Mode,
                name,
                "`mode: native` is asked for, and its driver has no XDP: the agent will not serve it",
                "let it be `mode: tc` or `mode: auto`",
            )
        }
        (Mode::Native, None) => ok(now.to_owned()),
        (Mode::Auto, Some(sums)) => ok(format!("{now}; auto is tc here: {sums}")),
        (Mode::Auto, None) if refused => {
            ok(format!("{now}; auto is tc here: its driver has no XDP"))
        }
        (Mode::Auto, None) if port.attached == Some(AttachedMode::Tc) => Finding::warning(
            Check::Mode,
            name,
            "tc now, although its driver has XDP or does not tell: more work for each packet",
            "read why in the agent's log: `attached … note=…` names what the driver wants",
        ),
        (Mode::Auto, None) => ok(match port.features {
            Some(_) => format!("{now}; native is possible"),
            None => format!("{now}; whether native is possible shows when it is attached"),
        }),
        (Mode::Tc, _) => ok(now.to_owned()),
    }
}

fn judge_mtu(port: &Port, kernel: KernelVersion) -> Finding {
    let name = port.name();
    let mtu = port.interface.mtu;
    let takes_frags = kernel >= FRAGS_SINCE && port.features.is_none_or(|features| features.frags);
    if !port.is_native() || mtu <= PLAIN_MTU || takes_frags {
        return Finding::ok(Check::Mtu, name, format!("{mtu}"));
    }
    let why = match kernel < FRAGS_SINCE {
        true => "this kernel (before 5.18)",
        false => "its driver",
    };
    let found = format!(
        "{mtu}, and {why} has no multi-buffer XDP: packets of more than about {PLAIN_MTU} bytes cannot be taken natively"
    );
    let remedy = format!("ip link set dev {name} mtu 1500, or `mode: tc`");
    Finding::error(Check::Mtu, name, found, remedy)
}

fn judge_xdp(port: &Port) -> Finding {
    let name = port.name();
    if port.is_blind && !port.interface.xdp.is_empty() {
        let found = "which of its XDP programs are ironlb's cannot be seen";
        return Finding::skipped(Check::ForeignXdp, name, found);
    }
    if port.foreign.is_empty() {
        return Finding::ok(Check::ForeignXdp, name, "no XDP program of others");
    }
    let foreign = list(&port.foreign);
    let remedy = format!("ip link set dev {name} xdp off, if nobody needs it; or `mode: tc`");
    if port.uplink.mode == Mode::Native {
        let found = format!(
            "{foreign} is attached: ironlb never displaces it, and will not serve natively"
        );
        return Finding::error(Check::ForeignXdp, name, found, remedy);
    }
    let found = format!(
        "{foreign} is attached and sees packets before ironlb, which serves by tc: what it drops or redirects is never balanced"
    );
    Finding::warning(Check::ForeignXdp, name, found, remedy)
}

fn judge_order(port: &Port) -> Vec<Finding> {
    let name = port.name();
    if port.is_blind {
        let found = "which programs at TC are this ironlb's cannot be seen";
        return vec![Finding::skipped(Check::TcOrder, name, found)];
    }
    let strange = port.others.iter().map(|(hook, id)| {
        let found = format!(
            "another ironlb's program (id {id}) is at {hook}: two would handle every packet twice"
        );
        let remedy = "stop its agent, then `ironlb unload --bpffs ROOT` with its root";
        Finding::error(Check::TcOrder, name, found, remedy)
    });
    let before = port.before.iter().map(|(hook, program)| {
        let found = format!("{program} runs before ironlb at {hook} and may hide packets from it");
        let remedy = format!("bpftool net show dev {name}; restart what attached it after ironlb");
        Finding::warning(Check::TcOrder, name, found, remedy)
    });
    let mut findings: Vec<_> = strange.chain(before).collect();
    if findings.is_empty() {
        findings.push(Finding::ok(
            Check::TcOrder,
            name,
            "nobody is ahead of ironlb at TC",
        ));
    }
    findings
}

fn judge_offloads(port: &Port) -> Vec<Finding> {
    let name = port.name();
    let check = Check::Offloads;
    if !port.is_native() {
        return vec![Finding::ok(check, name, "tc works with all of them")];
    }
    let mut findings = Vec::new();
    if port.offloads.lro == Some(true) {
        findings.push(Finding::warning(
            check,
            name,
            "LRO is on: drivers refuse native XDP with it",
            format!("ethtool -K {name} lro off"),
        ));
    }
    if let (Some(vlan), Some(true)) = (port.uplink.vlan, port.offloads.receive_vlan) {
        findings.push(Finding::error(
            check,
            name,
            format!("it takes VLAN tags off before XDP sees them: no frame looks like one of VLAN {vlan}"),
            format!("ethtool -K {name} rxvlan off, or `mode: tc`"),
        ));
    }
    match &port.offloads.peer {
        Some((peer, tx, gro)) => {
            if *tx == Some(true) {
                findings.push(Finding::error(
                    check,
                    name,
                    format!("its other end {peer} leaves checksums unfinished: packets rewritten in XDP are corrupt"),
                    format!("ethtool -K {peer} tx off"),
                ));
            }
            if *gro == Some(false) {
                findings.push(Finding::warning(
                    check,
                    name,
                    format!("its other end {peer} has no NAPI (GRO is off): what XDP sends back is lost"),
                    format!("ethtool -K {peer} gro on"),
                ));
            }
        }
        None if port.interface.is("veth") => findings.push(Finding::skipped(
            check,
            name,
            "its other end is in another network namespace; it should have: ethtool -K PEER tx off gro on",
        )),
        None => {}
    }
    if findings.is_empty() {
        findings.push(Finding::ok(check, name, "none that native XDP minds"));
    }
    findings
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::Status;
    use super::*;
    use crate::desired::UplinkSelector;

    const NEW: KernelVersion = KernelVersion::new(6, 12, 0);
    const OLD: KernelVersion = KernelVersion::new(5, 10, 0);

    /// `eth1`, attached natively, with nothing odd about it.
    pub(in super::super) fn port() -> Port {
        let interface = Interface {
            index: 3,
            name: "eth1".to_owned(),
            mac: Some([2, 0, 0, 0, 0, 1]),
            mtu: 1500,
            ethernet: true,
            running: true,
            ..Interface::default()
        };
        Port {
            device: interface.clone(),
            interface,
            uplink: Uplink {
                selector: UplinkSelector::Name("eth1".to_owned()),
                mode: Mode::Auto,
                vlan: None,
                gateways: Vec::new(),
                guards: Some(true),
            },
            attached: Some(AttachedMode::Native),
            guards: Some(true),
            driver: Some("mlx5_core".to_owned()),
            features: Some(XdpFeatures {
                basic: true,
                frags: false,
            }),
            is_blind: false,
            foreign: Vec::new(),
            before: Vec::new(),
            others: Vec::new(),
            offloads: Offloads::default(),
        }
    }

    fn veth(mode: Mode) -> Port {
        let mut port = port();
        port.interface.kind = Some("veth".to_owned());
        port.uplink.mode = mode;
        port.attached = None;
        port
    }

    #[test]
    fn a_sound_uplink_has_nothing_but_good_findings() {
        for finding in judge(&port(), NEW) {
            assert_eq!(finding.status, Status::Ok, "{finding:?}");
        }
    }

    #[test]
    fn modes_are_judged_by_what_the_driver_can() {
        let mut no_xdp = port();
        no_xdp.features = Some(XdpFeatures::default());
        no_xdp.attached = Some(AttachedMode::Tc);
        assert_eq!(judge_mode(&no_xdp).status, Status::Ok);
        no_xdp.uplink.mode = Mode::Native;
        assert_eq!(judge_mode(&no_xdp).status, Status::Error);
        let mut fallen = port();
        fallen.attached = Some(AttachedMode::Tc);
        assert_eq!(judge_mode(&fallen).status, Status::Warning);
        assert_eq!(judge_mode(&veth(Mode::Native)).status, Status::Warning);
        let auto = judge_mode(&veth(Mode::Auto));
        assert_eq!(auto.status, Status::Ok);
        assert!(
            auto.found.contains("unfinished checksums"),
            "{}",
            auto.found
        );
    }

    #[test]
    fn a_large_mtu_needs_frags_natively() {
        let mut jumbo = port();
        jumbo.interface.mtu = 9000;
        assert_eq!(judge_mtu(&jumbo, NEW).status, Status::Error, "driver");
        jumbo.features = Some(XdpFeatures {
            basic: true,
            frags: true,
        });
        assert_eq!(judge_mtu(&jumbo, NEW).status, Status::Ok);
        assert_eq!(judge_mtu(&jumbo, OLD).status, Status::Error, "kernel");
        jumbo.attached = Some(AttachedMode::Tc);
        assert_eq!(judge_mtu(&jumbo, OLD).status, Status::Ok);
    }

    #[test]
    fn a_foreign_xdp_program_is_an_error_where_native_is_wanted() {
        let mut foreign = port();
        foreign.foreign = vec!["the XDP program `cilium` (id 12)".to_owned()];
        let found = judge_xdp(&foreign);
        assert_eq!(found.status, Status::Warning);
        assert!(found.found.contains("`cilium` (id 12)"), "{}", found.found);
        foreign.uplink.mode = Mode::Native;
        assert_eq!(judge_xdp(&foreign).status, Status::Error);
        foreign.is_blind = true;
        foreign.interface.xdp = vec![12];
        assert_eq!(judge_xdp(&foreign).status, Status::Skipped);
        assert_eq!(judge_order(&foreign)[0].status, Status::Skipped);
    }

    #[test]
    fn who_is_ahead_at_tc_and_another_ironlb_are_told() {
        let mut crowded = port();
        crowded.before = vec![("ingress", "`cni` (program 5)".to_owned())];
        crowded.others = vec![("egress", 9)];
        let found = judge_order(&crowded);
        let statuses: Vec<_> = found.iter().map(|finding| finding.status).collect();
        assert_eq!(statuses, [Status::Error, Status::Warning]);
        assert!(found[0].found.contains("id 9") && found[1].found.contains("`cni`"));
    }

    #[test]
    fn offloads_matter_natively_alone() {
        let mut port = veth(Mode::Native);
        assert_eq!(judge_offloads(&port)[0].status, Status::Skipped);
        port.offloads.peer = Some(("peer0".to_owned(), Some(true), Some(false)));
        let remedies = |port: &Port| -> Vec<_> {
            let found = judge_offloads(port).into_iter();
            found.filter_map(|finding| finding.remedy).collect()
        };
        assert_eq!(
            remedies(&port),
            ["ethtool -K peer0 tx off", "ethtool -K peer0 gro on"]
        );
        port.uplink.mode = Mode::Tc;
        assert_eq!(remedies(&port), [""; 0]);
        let mut tagged = self::port();
        tagged.offloads.receive_vlan = Some(true);
        assert_eq!(remedies(&tagged), [""; 0], "untagged frames keep nothing");
        tagged.uplink.vlan = Some(7);
        assert_eq!(judge_offloads(&tagged)[0].status, Status::Error);
    }

    #[test]
    fn a_dark_link_and_a_bonds_slave_are_errors() {
        let mut dark = port();
        dark.interface.running = false;
        let found = judge(&dark, NEW);
        let carrier = found.iter().find(|finding| finding.check == Check::Carrier);
        assert_eq!(carrier.map(|finding| finding.status), Some(Status::Error));
        let slave = refused(&InterfaceError::BondSlave {
            interface: "eth0".to_owned(),
            bond: "bond0".to_owned(),
        });
        assert!(slave.remedy.is_some_and(|remedy| remedy.contains("bond0")));
    }
}
