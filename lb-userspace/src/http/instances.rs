//! What a pod may know of itself: the VIPs and ports that lead to it, and to it alone.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::tables::TableSet;

/// A pod as the tables have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceAnswer {
    /// The pod's address.
    pub address: IpAddr,
    /// What leads to it: one for every service and VIP, by VIP and service.
    pub services: Vec<InstanceService>,
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

/// What the tables say of the pod with this address; `None` where no VIP port leads to it.
pub fn answer(tables: &TableSet, address: IpAddr) -> Option<InstanceAnswer> {
    let mut services: BTreeMap<(IpAddr, &str), InstanceService> = BTreeMap::new();
    for ((vip, port), row) in &tables.ports {
        let mut here = row.backends.iter().filter(|backend| backend.node.is_none());
        let Some(backend) = here.find(|backend| backend.address == address) else {
            continue;
        };
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
    (!services.is_empty()).then(|| InstanceAnswer {
        address,
        services: services.into_values().collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
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
