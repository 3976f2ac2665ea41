//! The node's firewall, as `nft` and `iptables-save` show it: what would drop forwarded packets, and hostPorts. The rules
//! are read, never followed for a packet: what cannot be understood counts as a rule that might let packets through.

mod iptables;
mod nft;

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::process::{Command, Stdio};

use super::subject::Subject;
use super::{Check, Finding, list, sysctl};
use crate::interfaces::Host;

/// A chain of rules.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
struct Chain {
    tool: Tool,
    /// `ip`, `ip6`, `inet`, …
    family: String,
    table: String,
    name: String,
    /// Where packets enter it, as the kernel calls it (`forward`, `prerouting`); none for one that is jumped to.
    hook: Option<String>,
    /// What comes to its end is dropped.
    drops: bool,
    rules: Vec<Rule>,
}

/// What shows and changes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
enum Tool {
    #[default]
    Nft,
    Iptables,
    Ip6tables,
}

/// A rule, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
struct Rule {
    /// Interfaces by which a packet comes and goes.
    iif: Option<String>,
    oif: Option<String>,
    /// States of conntrack, in lower case.
    states: BTreeSet<String>,
    /// Destination ports, first and last.
    ports: Vec<(u16, u16)>,
    /// Destination address, or its network, as written.
    destination: Option<String>,
    /// Of another protocol than TCP.
    not_tcp: bool,
    /// It has conditions that are not understood.
    more: bool,
    verdict: Verdict,
}

/// What a rule does with a packet.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
enum Verdict {
    /// Goes on with the next rule.
    #[default]
    Continue,
    Accept,
    Drop,
    /// Goes on in another chain of the table.
    Jump(String),
    /// Another destination is given to it.
    Dnat,
    /// Not understood.
    Unknown,
}

impl Chain {
    fn shown(&self) -> String {
        match self.tool {
            Tool::Nft => format!("nft {} {} {}", self.family, self.table, self.name),
            Tool::Iptables => format!("iptables {} {}", self.table, self.name),
            Tool::Ip6tables => format!("ip6tables {} {}", self.table, self.name),
        }
    }

    /// The command that lets packets through ahead of all else in it.
    fn let_through(&self, device: &str) -> String {
        let Self {
            family,
            table,
            name,
            ..
        } = self;
        let each = |ways: [&str; 2], rule: &dyn Fn(&str) -> String| ways.map(rule).join("; ");
        match self.tool {
            Tool::Nft => each(["iifname", "oifname"], &|way| {
                format!("nft insert rule {family} {table} {name} {way} {device} accept")
            }),
            Tool::Iptables => each(["-i", "-o"], &|way| {
                format!("iptables -I {name} {way} {device} -j ACCEPT")
            }),
            Tool::Ip6tables => each(["-i", "-o"], &|way| {
                format!("ip6tables -I {name} {way} {device} -j ACCEPT")
            }),
        }
    }

    fn is_in(&self, other: &Self) -> bool {
        (self.tool, &self.family, &self.table) == (other.tool, &other.family, &other.table)
    }
}

impl Rule {
    /// Whether it takes all that it lets through on its interfaces.
    fn is_whole(&self) -> bool {
        !self.more && self.ports.is_empty() && self.destination.is_none() && !self.not_tcp
    }
}

pub(super) fn look(subject: &Subject, host: &Host, devices: &BTreeSet<String>) -> Vec<Finding> {
    let has_v6 = subject.vips.iter().any(|vip| vip.address.is_ipv6());
    let mut chains = Vec::new();
    let mut unseen = Vec::new();
    for (command, tool, is_wanted) in [
        (&["iptables-save"][..], Tool::Iptables, true),
        (&["ip6tables-save"][..], Tool::Ip6tables, has_v6),
        (&["nft", "-j", "list", "ruleset"][..], Tool::Nft, true),
    ] {
        if !is_wanted {
            continue;
        }
        let parsed = show(command).and_then(|text| match tool {
            Tool::Nft => nft::parse(&text),
            _ => Ok(iptables::parse(&text, tool)),
        });
        match parsed {
            Ok(new) => chains.extend(new),
            Err(why) => unseen.push(why),
        }
    }
    let chains = without_doubles(chains);
    let liberal = sysctl("net/netfilter/nf_conntrack_tcp_be_liberal") == Some(1);
    let mut findings = judge_forward(&chains, devices, has_v6);
    findings.push(judge_invalid(&chains, liberal));
    findings.push(judge_host_ports(&chains, subject, host));
    if !unseen.is_empty() {
        // What was seen says nothing of what was not.
        findings.retain(|finding| finding.status != super::Status::Ok);
        let found = format!(
            "not all of the firewall could be seen: {}; forward chains, INVALID drops and hostPorts may be there",
            unseen.join("; ")
        );
        findings.push(Finding::skipped(Check::ForwardChain, "", found));
    }
    findings
}

/// What a command writes.
fn show(command: &[&str]) -> Result<String, String> {
    let (name, arguments) = command.split_first().ok_or("no command")?;
    let output = Command::new(name)
        .args(arguments)
        .stdin(Stdio::null())
        .output();
    let output = match output {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(format!("there is no `{name}` here"));
        }
        output => output.map_err(|error| format!("`{name}` cannot be run: {error}"))?,
    };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().next().unwrap_or("it says nothing").to_owned();
        return Err(format!("`{name}` failed: {said}"));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// iptables' rules may be in nftables: there `nft` shows them, too, but not what they say.
fn without_doubles(chains: Vec<Chain>) -> Vec<Chain> {
    let of_iptables: BTreeSet<(String, String, String)> = chains
        .iter()
        .filter(|chain| chain.tool != Tool::Nft)
        .map(|chain| {
            (
                chain.family.clone(),
                chain.table.clone(),
                chain.name.clone(),
            )
        })
        .collect();
    let is_double = |chain: &Chain| {
        let place = (
            chain.family.clone(),
            chain.table.clone(),
            chain.name.clone(),
        );
        chain.tool == Tool::Nft && of_iptables.contains(&place)
    };
    chains
        .into_iter()
        .filter(|chain| !is_double(chain))
        .collect()
}

/// A chain and all that its rules lead to.
fn reachable<'a>(chains: &'a [Chain], from: &'a Chain) -> Vec<&'a Chain> {
    let mut found = vec![from];
    let mut at = 0;
    while let Some(chain) = found.get(at).copied() {
        at += 1;
        for rule in &chain.rules {
            let Verdict::Jump(target) = &rule.verdict else {
                continue;
            };
            let next = chains.iter().find(|c| c.is_in(chain) && c.name == *target);
            if let Some(next) = next
                && !found.iter().any(|known| std::ptr::eq(*known, next))
            {
                found.push(next);
            }
        }
    }
    found
}

fn at_hook<'a>(chains: &'a [Chain], hook: &'a str) -> impl Iterator<Item = &'a Chain> {
    let is_at = move |chain: &&Chain| chain.hook.as_deref() == Some(hook);
    chains.iter().filter(is_at)
}

fn judge_forward(chains: &[Chain], devices: &BTreeSet<String>, has_v6: bool) -> Vec<Finding> {
    let check = Check::ForwardChain;
    let families: &[&str] = match has_v6 {
        true => &["ip", "inet", "ip6"],
        false => &["ip", "inet"],
    };
    let mut findings = Vec::new();
    for chain in at_hook(chains, "forward") {
        if !chain.drops || !families.contains(&chain.family.as_str()) {
            continue;
        }
        let rules: Vec<_> = reachable(chains, chain)
            .into_iter()
            .flat_map(|chain| &chain.rules)
            .collect();
        let closed = devices.iter().filter(|device| !is_open(&rules, device));
        let closed: Vec<_> = closed.collect();
        if closed.is_empty() {
            continue;
        }
        let remedy = closed.iter().map(|device| chain.let_through(device));
        let remedy = remedy.collect::<Vec<_>>().join("; ");
        let may_accept = |rule: &&&Rule| matches!(rule.verdict, Verdict::Accept | Verdict::Unknown);
        let on = chain.shown();
        let uplinks = list(&closed);
        findings.push(match rules.iter().filter(may_accept).count() {
            0 => Finding::error(
                check,
                on,
                format!(
                    "drops whatever is forwarded (policy drop, and no rule accepts anything): packets between {uplinks} and the pods"
                ),
                remedy,
            ),
            some => Finding::warning(
                check,
                on,
                format!(
                    "drops what none of its rules accepts (policy drop): whether its {some} accepting rules let packets pass \
                     between {uplinks} and the pods is not certain; ironlb's packets carry the client's and the pod's address there"
                ),
                remedy,
            ),
        });
    }
    if findings.is_empty() {
        let found = "no firewall drops forwarded packets by default";
        findings.push(Finding::ok(check, "", found));
    }
    findings
}

/// Whether rules certainly let packets pass between a device and the pods, both ways.
fn is_open(rules: &[&Rule], device: &str) -> bool {
    let accepts = |rule: &&&Rule| rule.verdict == Verdict::Accept && rule.is_whole();
    let is = |interface: &Option<String>| interface.as_deref() == Some(device);
    let takes_all = |states: &BTreeSet<String>| {
        states.is_empty() || states.contains("new") && states.contains("established")
    };
    let mut all = rules.iter().filter(accepts);
    let (mut comes, mut goes) = (false, false);
    all.all(|rule| {
        let Rule {
            iif, oif, states, ..
        } = rule;
        let answers = states.is_empty() || states.contains("established");
        comes |= takes_all(states) && oif.is_none() && (iif.is_none() || is(iif));
        goes |= answers && iif.is_none() && (oif.is_none() || is(oif));
        !(comes && goes)
    });
    comes && goes
}

/// Drops in state INVALID.
fn judge_invalid(chains: &[Chain], liberal: bool) -> Finding {
    let check = Check::InvalidDrop;
    let hooks = ["prerouting", "forward", "postrouting"];
    let entries = hooks.into_iter().flat_map(|hook| at_hook(chains, hook));
    let all = entries.flat_map(|entry| reachable(chains, entry));
    let drops = all.filter(|chain| {
        let mut rules = chain.rules.iter();
        rules.any(|rule| rule.verdict == Verdict::Drop && rule.states.contains("invalid"))
    });
    let dropping: BTreeSet<String> = drops.map(Chain::shown).collect();
    if dropping.is_empty() {
        return Finding::ok(check, "", "no rule drops what conntrack takes for invalid");
    }
    let on = list(&dropping);
    if liberal {
        let found =
            "drops in state INVALID, but nf_conntrack_tcp_be_liberal keeps living flows out of it";
        return Finding::ok(check, on, found);
    }
    Finding::warning(
        check,
        on,
        "drops packets in state INVALID: conntrack takes a segment for that when it sees one direction of a flow only (an \
         asymmetric path, as when a pod's answers leave by another way or node) or one out of its window: downloads stall",
        "sysctl -w net.netfilter.nf_conntrack_tcp_be_liberal=1",
    )
}

/// Ports that DNAT takes away from this node's own addresses: they are what a VIP's port becomes once its backend is on the
/// host network, and what clients meet when ironlb is unloaded.
fn judge_host_ports(chains: &[Chain], subject: &Subject, host: &Host) -> Finding {
    let check = Check::HostPort;
    let own = host.own();
    let on_host = subject.backends.iter().filter(|b| own.contains(&b.address));
    let on_host = on_host.map(|backend| backend.port);
    let wanted: BTreeSet<u16> = subject.ports.iter().copied().chain(on_host).collect();
    let concerns = |rule: &Rule| {
        let address = rule.destination.as_deref().map(|written| {
            let address = written
                .split_once('/')
                .map_or(written, |(address, _)| address);
            address.parse::<IpAddr>()
        });
        // An address of others (a ClusterIP) is none of ours.
        !matches!(address, Some(Ok(address)) if !own.contains(&address)
            && !subject.vips.iter().any(|vip| vip.address == address))
    };
    let mut taken = BTreeSet::new();
    let mut places = BTreeSet::new();
    for chain in chains {
        for rule in &chain.rules {
            let is_host_port = chain.name == "CNI-HOSTPORT-DNAT" || rule.verdict == Verdict::Dnat;
            if rule.not_tcp || !is_host_port || !concerns(rule) {
                continue;
            }
            for (first, last) in &rule.ports {
                for port in wanted.iter().filter(|port| (first..=last).contains(port)) {
                    taken.insert(*port);
                    places.insert(chain.shown());
                }
            }
        }
    }
    if taken.is_empty() {
        return Finding::ok(check, "", "no hostPort has the number of a VIP port");
    }
    Finding::warning(
        check,
        list(places),
        format!(
            "rewrites the TCP port {} of this node's addresses (a hostPort): it is a port of a VIP, too, and takes what ironlb \
             sends to a backend on the host network there",
            list(taken)
        ),
        "remove hostPort from the pod that has it: kubectl get pods -A -o json | grep hostPort",
    )
}

#[cfg(test)]
mod tests;
