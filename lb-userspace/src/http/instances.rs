//! What a pod may know of itself: the VIPs and ports that lead to it, and to it alone.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::tables::{BackendRow, PortRow, TableSet};

/// A pod as the tables have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceAnswer {
    /// The pod's address.
    pub address: IpAddr,
    /// What leads to it: one for every service and VIP, by VIP and service.
    pub services: Vec<InstanceService>,
    /// What leads to its address of the other version of IP: apart, so that who wants the only VIP finds one.
    #[serde(default)]
    pub other_version: Vec<InstanceService>,
}

/// A service on a VIP that a pod is behind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceService {
    /// Service, `namespace/name` in Kubernetes.
    pub service: String,
    /// The VIP.
    pub vip: IpAddr,
    /// The pod's stable identity.
    pub instance: String,
    /// Its slot, once it has one.
    pub slot: Option<u32>,
    /// Ports on the VIP that all instances share, by name.
    pub ports: BTreeMap<String, u16>,
    /// Ports on the VIP that lead to this instance alone, by the name of the shared port.
    pub instance_ports: BTreeMap<String, u16>,
}

/// A backend on this node, with the VIP port that leads to it.
type Place<'a> = (&'a (IpAddr, u16), &'a PortRow, &'a BackendRow);

/// What the tables say of the pod with this address; `None` where no VIP port leads to it.
pub fn answer(tables: &TableSet, address: IpAddr) -> Option<InstanceAnswer> {
    let places = || {
        tables.ports.iter().flat_map(|(place, row)| {
            let here = row.backends.iter().filter(|backend| backend.node.is_none());
            here.map(move |backend| (place, row, backend))
        })
    };
    let own: Vec<Place<'_>> = places()
        .filter(|(.., backend)| backend.address == address)
        .collect();
    if own.is_empty() {
        return None;
    }
    let identities: BTreeSet<_> = own
        .iter()
        .map(|(_, row, backend)| identity(row, backend))
        .collect();
    let other_version = gather(places().filter(|(_, row, backend)| {
        backend.address.is_ipv4() != address.is_ipv4()
            && identities.contains(&identity(row, backend))
    }));
    Some(InstanceAnswer {
        address,
        services: gather(own.into_iter()),
        other_version,
    })
}

/// What a pod is, whichever its address: its UID says it everywhere, else its name does in one service.
fn identity<'a>(row: &'a PortRow, backend: &'a BackendRow) -> (&'a str, &'a str, &'a str) {
    let service = match &*backend.uid {
        "" => &*row.service,
        _ => "",
    };
    (service, &backend.instance, &backend.uid)
}

/// Ports by VIP and service.
fn gather<'a>(places: impl Iterator<Item = Place<'a>>) -> Vec<InstanceService> {
    let mut services: BTreeMap<(IpAddr, &str), InstanceService> = BTreeMap::new();
    for ((vip, port), row, backend) in places {
        let service = services
            .entry((*vip, &row.service))
            .or_insert_with(|| InstanceService {
                service: row.service.clone(),
                vip: *vip,
                instance: backend.instance.clone(),
                slot: None,
                ports: BTreeMap::new(),
                instance_ports: BTreeMap::new(),
            });
        let ports = match row.slot {
            None => &mut service.ports,
            Some(_) => &mut service.instance_ports,
        };
        ports.insert(row.port_name.clone(), *port);
        service.slot = service.slot.or(row.slot);
    }
    services.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use crate::desired::DesiredState;
    use crate::plan::{Health, Nodes, plan};

    const FILE: &str = "
apiVersion: ironlb.dev/v1
uplinks: [{subnet: 172.22.0.0/24}]
vips: [{address: 172.22.0.2}, {address: 172.22.0.3}]
services:
- name: metal3/ironic
  vip: 172.22.0.2
  ports: [{name: api, port: 6385}, {name: images, port: 6180}, {name: images-tls, port: 6183}]
  instance_ports: {images: 6200-6231, images-tls: 6300-6331}
  backends:
  - {instance: ironic-0, slot: 0, address: 10.244.0.11}
  - {instance: ironic-1, slot: 1, address: 10.244.0.12, ready: false}
  - {instance: ironic-2, slot: 2, address: 10.244.0.13}
  - {instance: ironic-3, address: 10.244.0.14}
- name: metal3/bmc
  vip: 172.22.0.3
  ports: [{name: api, port: 6385}]
  backends: [{instance: ironic-1, address: 10.244.0.12}]
";

    /// A pod with two addresses, on two VIPs.
    const DUAL: &str = "
apiVersion: ironlb.dev/v1
uplinks: [{subnet: 172.22.0.0/24}]
vips: [{address: 172.22.0.2}, {address: \"fd00:22::2\"}]
services:
- name: metal3/ironic
  vip: 172.22.0.2, fd00:22::2
  ports: [{name: api, port: 6385}, {name: images, port: 6180}]
  instance_ports: {images: 6200-6231}
  backends:
  - {instance: ironic-0, slot: 0, address: \"10.244.0.11, fd00:244::11\"}
  - {instance: ironic-1, slot: 1, address: \"10.244.0.12, fd00:244::12\"}
- name: metal3/bmc
  vip: fd00:22::2
  ports: [{name: bmc, port: 8000}]
  backends: [{instance: ironic-1, address: \"fd00:244::12\"}]
";

    #[test]
    fn by_one_of_its_addresses_a_pod_learns_what_leads_to_the_other() {
        let mut state = config::parse(std::path::Path::new("test"), DUAL).expect("a good file");
        let learned = |state: &DesiredState, address: &str| {
            let (tables, _) = plan(state, &Health::default(), &Nodes::default());
            let answer = answer(&tables, address.parse().expect("an address"));
            let answer = answer.expect("it is behind the VIPs");
            let all = answer.services.iter().chain(&answer.other_version);
            let images = |s: &InstanceService| s.instance_ports.get("images").copied();
            let rows = all.map(|s| (s.vip.to_string(), s.service.clone(), images(s)));
            (answer.services.len(), rows.collect::<Vec<_>>())
        };
        let row = |vip: &str, service: &str, images| (vip.to_owned(), service.to_owned(), images);
        let v4 = row("172.22.0.2", "metal3/ironic", Some(6201));
        let v6 = row("fd00:22::2", "metal3/ironic", Some(6201));
        let bmc = row("fd00:22::2", "metal3/bmc", None);
        // In a file the same name in another service may be somebody else's.
        assert_eq!(
            learned(&state, "10.244.0.12"),
            (1, vec![v4.clone(), v6.clone()])
        );
        assert_eq!(
            learned(&state, "fd00:244::12"),
            (2, vec![bmc.clone(), v6.clone(), v4.clone()])
        );
        // A UID is that of one pod.
        for backend in state.services.iter_mut().flat_map(|s| &mut s.backends) {
            backend.uid = format!("uid-{}", backend.instance);
        }
        assert_eq!(learned(&state, "10.244.0.12"), (1, vec![v4, bmc, v6]));
    }

    fn answered(address: &str) -> Option<InstanceAnswer> {
        let mut state = config::parse(std::path::Path::new("test"), FILE).expect("a good file");
        // No file may say so: the range of images ends before slot 2.
        let ranges = &mut state.services[0].instance_ports;
        let images = ranges.iter_mut().find(|range| range.port_name == "images");
        images.expect("a range").last = 6201;
        let (tables, _) = plan(&state, &Health::default(), &Nodes::default());
        answer(&tables, address.parse().expect("an address"))
    }

    fn ports(ports: &[(&str, u16)]) -> BTreeMap<String, u16> {
        ports
            .iter()
            .map(|(name, port)| ((*name).to_owned(), *port))
            .collect()
    }

    #[test]
    fn a_pod_learns_its_own_ports_ready_or_not() {
        let answer = answered("10.244.0.12").expect("it is behind two VIPs");
        let [ironic, bmc] = &answer.services[..] else {
            panic!("{answer:?}");
        };
        assert_eq!(ironic.service, "metal3/ironic");
        assert_eq!(ironic.instance, "ironic-1");
        assert_eq!(ironic.slot, Some(1));
        assert_eq!(
            ironic.ports,
            ports(&[("api", 6385), ("images", 6180), ("images-tls", 6183)])
        );
        assert_eq!(
            ironic.instance_ports,
            ports(&[("images", 6201), ("images-tls", 6301)])
        );
        assert_eq!(bmc.vip.to_string(), "172.22.0.3");
        assert_eq!((bmc.slot, bmc.instance_ports.len()), (None, 0));
    }

    #[test]
    fn a_pod_without_a_slot_has_no_instance_ports_and_one_beyond_a_range_not_that_one() {
        let beyond = answered("10.244.0.13").expect("it is behind the VIP");
        assert_eq!(
            beyond.services[0].instance_ports,
            ports(&[("images-tls", 6302)])
        );
        let without = answered("10.244.0.14").expect("it is behind the VIP");
        assert_eq!(without.services[0].slot, None);
        assert!(without.services[0].instance_ports.is_empty());
        assert_eq!(answered("10.244.0.99"), None);
    }
}
