//! `ironlb doctor`: what of this node would keep ironlb from serving, or will bite. A module per concern; each gathers
//! facts and judges them in a pure function, so that every judgement has its test. Nothing on the node is changed; all
//! that leaves it are questions who has a VIP.

mod backends;
mod conflict;
mod firewall;
mod paths;
mod peers;
mod pins;
mod platform;
mod subject;
mod uplinks;
mod vips;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::interfaces::Host;
use pins::Loaded;
use subject::Subject;

/// What is looked at, a name each as in `docs/OPERATIONS.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Check {
    /// The kernel is new enough.
    Kernel,
    /// The kernel describes its types.
    Btf,
    /// The pin root is on a bpffs.
    Bpffs,
    /// The agent may do what it has to.
    Rights,
    /// Maps have room in locked memory.
    Memlock,
    /// The configuration can be served.
    Config,
    /// Pinned maps are of this version's layout.
    Layout,
    /// An agent runs.
    Agent,
    /// The tables have been in step with the agent's source.
    Tables,
    /// The uplink is there and can be one.
    Uplink,
    /// The uplink has a link.
    Carrier,
    /// How the forward path is attached, and how it could be.
    Mode,
    /// The uplink's packets fit XDP.
    Mtu,
    /// No XDP program of others.
    ForeignXdp,
    /// Nobody's TC program is ahead of ours.
    TcOrder,
    /// Offloads that native XDP cannot live with.
    Offloads,
    /// This node has an address of its own in a VIP's subnet.
    OwnAddress,
    /// The kernel routes.
    Forwarding,
    /// The reverse path filter lets clients in.
    RpFilter,
    /// Answers to clients leave by the uplink.
    ReturnPath,
    /// Routes lead to the pods of this node.
    PodRoute,
    /// Clients' packets fit the way to the pods.
    PathMtu,
    /// A VIP is no address of this node.
    VipLocal,
    /// Nobody else answers for a VIP.
    VipConflict,
    /// The other nodes are heard, and take new flows.
    Peers,
    /// The firewall lets forwarded packets through.
    ForwardChain,
    /// The firewall does not drop what conntrack takes for invalid.
    InvalidDrop,
    /// No hostPort has the number of a VIP port.
    HostPort,
    /// Backends are guarded by `bypass: drop`.
    HostNetwork,
}

impl Check {
    /// All of them, in the order in which they are made.
    pub const ALL: [Self; 29] = [
        Self::Kernel,
        Self::Btf,
        Self::Bpffs,
        Self::Rights,
        Self::Memlock,
        Self::Config,
        Self::Layout,
        Self::Agent,
        Self::Tables,
        Self::Uplink,
        Self::Carrier,
        Self::Mode,
        Self::Mtu,
        Self::ForeignXdp,
        Self::TcOrder,
        Self::Offloads,
        Self::OwnAddress,
        Self::Forwarding,
        Self::RpFilter,
        Self::ReturnPath,
        Self::PodRoute,
        Self::PathMtu,
        Self::VipLocal,
        Self::VipConflict,
        Self::Peers,
        Self::ForwardChain,
        Self::InvalidDrop,
        Self::HostPort,
        Self::HostNetwork,
    ];

    /// Its name.
    pub fn name(self) -> String {
        let name = serde_json::to_value(self).ok();
        let name = name.as_ref().and_then(|name| name.as_str());
        name.unwrap_or_default().to_owned()
    }
}

/// How it stands with one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Keeps ironlb from serving, or clients from being served.
    Error,
    /// Will bite.
    Warning,
    /// Could not be seen.
    Skipped,
    /// As it should be.
    Ok,
}

/// What was found out about one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub check: Check,
    /// On what: an interface, a VIP, a table; empty for the node as a whole.
    pub on: String,
    /// How it stands.
    pub status: Status,
    /// What was found, and what it means.
    pub found: String,
    /// What to do about it: a command line where there is one.
    pub remedy: Option<String>,
}

impl Finding {
    fn new(check: Check, on: impl ToString, status: Status, found: impl Into<String>) -> Self {
        Self {
            check,
            on: on.to_string(),
            status,
            found: found.into(),
            remedy: None,
        }
    }

    fn ok(check: Check, on: impl ToString, found: impl Into<String>) -> Self {
        Self::new(check, on, Status::Ok, found)
    }

    fn skipped(check: Check, on: impl ToString, found: impl Into<String>) -> Self {
        Self::new(check, on, Status::Skipped, found)
    }

    fn with_remedy(self, remedy: impl Into<String>) -> Self {
        Self {
            remedy: Some(remedy.into()),
            ..self
        }
    }

    fn warning(
        check: Check,
        on: impl ToString,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::new(check, on, Status::Warning, found).with_remedy(remedy)
    }

    fn error(
        check: Check,
        on: impl ToString,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::new(check, on, Status::Error, found).with_remedy(remedy)
    }
}

/// What to look at.
#[derive(Clone, Debug)]
pub struct Options {
    /// The configuration file; without it, what the pinned maps say.
    pub config: Option<PathBuf>,
    /// Read the file as an agent with `--kubernetes` does.
    pub kubernetes: bool,
    /// This node's name, as the file calls it.
    pub node: String,
    /// Root of the pins.
    pub bpffs: PathBuf,
    /// Ask by ARP and neighbor solicitations who answers for the VIPs.
    pub probe: bool,
}

/// Looks at this node, in the network namespace of the calling thread.
pub fn examine(options: &Options) -> Vec<Finding> {
    let mut findings = platform::look(&options.bpffs);
    let loaded = pins::look(&options.bpffs);
    let host = match Host::read() {
        Ok(host) => host,
        Err(error) => {
            let remedy = "run it where AF_NETLINK sockets are allowed";
            findings.push(Finding::error(Check::Uplink, "", error.to_string(), remedy));
            return findings;
        }
    };
    let pinned = match &loaded {
        Loaded::Here(pinned) => Some(&**pinned),
        _ => None,
    };
    let subject = match &options.config {
        Some(file) => match Subject::from_file(file, options, &host, pinned) {
            Ok(subject) => {
                let found = format!("{} can be served", file.display());
                findings.push(Finding::ok(Check::Config, "", found));
                Some(subject)
            }
            Err(error) => {
                let kubernetes = if options.kubernetes {
                    "--kubernetes "
                } else {
                    ""
                };
                let remedy = format!("ironlb check {kubernetes}{}", file.display());
                findings.push(Finding::error(Check::Config, "", error.to_string(), remedy));
                pinned.map(Subject::from_maps)
            }
        },
        None => {
            let found = match pinned {
                Some(_) => "no --config: uplinks, VIPs and services are those of the pinned maps",
                None => {
                    "no --config, and no maps to read instead: the platform alone was looked at"
                }
            };
            findings.push(Finding::skipped(Check::Config, "", found));
            pinned.map(Subject::from_maps)
        }
    };
    findings.extend(pins::judge(&loaded, &options.bpffs, platform::present()));
    let Some(subject) = subject else {
        return findings;
    };
    let is_blind = matches!(loaded, Loaded::Hidden(_) | Loaded::Broken(_));
    let (ports, found) = uplinks::look(&subject, &host, pinned, is_blind);
    findings.extend(found);
    findings.extend(paths::look(&subject, &host, &ports));
    findings.extend(vips::look(&subject, &host, &ports, pinned));
    findings.extend(match options.probe {
        true => conflict::look(&subject, &host, &ports, pinned, &options.bpffs),
        false => vec![Finding::skipped(
            Check::VipConflict,
            "",
            "--no-probe: nobody was asked who answers for the VIPs",
        )],
    });
    findings.extend(peers::look(&subject, &host, pinned));
    let devices: BTreeSet<String> = ports.iter().map(|port| port.device.name.clone()).collect();
    findings.extend(firewall::look(&subject, &host, &devices));
    findings.extend(backends::look(&subject, &host, &ports));
    findings
}

/// A list for people, cut where it gets long.
fn list<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    const MOST: usize = 5;
    let all: Vec<_> = items.into_iter().map(|item| item.to_string()).collect();
    let first = all[..all.len().min(MOST)].join(", ");
    match all.len().saturating_sub(MOST) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

/// A MAC as people write it.
fn mac_text([a, b, c, d, e, f]: [u8; 6]) -> String {
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

/// A number in a file of `/proc/sys`, by the path below it; `None` where it is not there or not a number.
fn sysctl(path: impl AsRef<Path>) -> Option<u32> {
    let text = std::fs::read_to_string(Path::new("/proc/sys").join(path)).ok()?;
    text.trim().parse().ok()
}

/// The command that sets a `net.*` value of an interface, whose name may hold dots: `sysctl` takes slashes, too.
fn set_sysctl(family: &str, interface: &str, key: &str, value: u32) -> String {
    format!("sysctl -w net/{family}/conf/{interface}/{key}={value}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_has_a_line_in_the_documents_and_no_other_has() {
        let document = include_str!("../../../docs/OPERATIONS.md");
        let (_, section) = document.split_once("\n## Doctor\n").expect("the section");
        let section = section.split("\n## ").next().expect("its text");
        let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
        let documented: Vec<_> = rows.filter_map(|row| row.split('`').next()).collect();
        assert_eq!(documented, Check::ALL.map(Check::name));
    }

    #[test]
    fn a_long_list_is_cut() {
        assert_eq!(list([1, 2]), "1, 2");
        assert_eq!(list(1..=7), "1, 2, 3, 4, 5 and 2 more");
    }
}
