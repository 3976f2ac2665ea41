//! Backends that `bypass: drop` does not guard.

use std::collections::BTreeSet;

use super::subject::Subject;
use super::uplinks::Port;
use super::{Check, Finding, list};
use crate::interfaces::Host;

pub(super) fn look(subject: &Subject, host: &Host, ports: &[Port]) -> Vec<Finding> {
    let guarded = ports.iter().filter(|port| port.guards() != Some(false));
    let guarded: BTreeSet<_> = guarded.map(|port| port.interface.name.as_str()).collect();
    vec![judge(subject, host, &guarded)]
}

/// Packets to an address of the node are the node's own business: the programs let all of them pass.
fn judge(subject: &Subject, host: &Host, guarded: &BTreeSet<&str>) -> Finding {
    let own = host.own();
    let on_host = subject.backends.iter().filter(|b| own.contains(&b.address));
    let on_host: BTreeSet<_> = on_host
        .map(|backend| {
            format!(
                "{} ({}:{})",
                backend.instance, backend.address, backend.port
            )
        })
        .collect();
    if subject.backends.is_empty() {
        return Finding::skipped(Check::HostNetwork, "", "no backends are known");
    }
    if on_host.is_empty() || guarded.is_empty() {
        let found =
            "no backend that `bypass: drop` would have to guard is on this node's own network";
        return Finding::ok(Check::HostNetwork, "", found);
    }
    let found = format!(
        "{} on this node's own network: `bypass: drop` (on {}) does not guard them, hosts there reach their ports at the \
         node's address",
        list(on_host),
        list(guarded)
    );
    let remedy = "run them in the pod network (hostNetwork: false), or bind what is not for hosts to 127.0.0.1";
    Finding::warning(Check::HostNetwork, "", found, remedy)
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::subject::Backend;
    use super::*;
    use crate::interfaces::Address;

    #[test]
    fn backends_on_the_host_network_are_a_warning_where_bypass_drops() {
        let mut host = Host::default();
        host.addresses.push(Address {
            index: 3,
            address: [172, 22, 0, 11].into(),
            prefix: 24,
        });
        let mut subject = Subject::default();
        assert_eq!(
            judge(&subject, &host, &["eth1"].into()).status,
            Status::Skipped
        );
        subject.backends.push(Backend {
            instance: "ironic-0".to_owned(),
            address: [10, 244, 0, 11].into(),
            port: 6385,
            is_here: true,
        });
        assert_eq!(judge(&subject, &host, &["eth1"].into()).status, Status::Ok);
        subject.backends[0].address = [172, 22, 0, 11].into();
        let found = judge(&subject, &host, &["eth1"].into());
        assert_eq!(found.status, Status::Warning);
        assert!(
            found.found.contains("ironic-0 (172.22.0.11:6385)"),
            "{}",
            found.found
        );
        assert_eq!(judge(&subject, &host, &[].into()).status, Status::Ok);
    }
}
