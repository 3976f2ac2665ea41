//! The slices of a Service as one set of endpoints: an address once, whatever slices say of it in which
//! order.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::discovery::v1::{
    Endpoint as SliceEndpoint, EndpointConditions, EndpointSlice,
};

/// What stands behind an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    /// Node that it is on.
    pub node: Option<String>,
    /// Name and UID of its pod.
    pub pod: Option<(String, String)>,
    /// Takes new flows.
    pub ready: bool,
    /// Ends, and serves until then.
    pub draining: bool,
    /// TCP ports by name; the only port of a Service may have an empty one.
    pub ports: BTreeMap<String, u16>,
}

/// What slices say of one pod at one address, put together.
#[derive(Default)]
struct Said {
    node: Option<String>,
    ready: bool,
    serving: bool,
    terminating: bool,
    ports: BTreeMap<String, u16>,
}

/// Endpoints by address.
///
/// An endpoint may be in two slices while it moves between them: it is ready if one says so, and ends if
/// one says so, for no pod comes back from that. Two pods may have one address when the first has ended
/// and its object has not: the one that does not end has it.
///
/// `publish_not_ready` (the Service's `publishNotReadyAddresses`) makes readiness mean nothing. The slices'
/// controller then calls pods ready that end; they still are the last to get new flows.
pub(super) fn gather<'a>(
    slices: impl IntoIterator<Item = &'a EndpointSlice>,
    publish_not_ready: bool,
) -> BTreeMap<IpAddr, Endpoint> {
    let mut said: BTreeMap<(IpAddr, Option<(String, String)>), Said> = BTreeMap::new();
    for slice in slices {
        // Each version has slices of its own, and names are no addresses.
        if slice.address_type != "IPv4" && slice.address_type != "IPv6" {
            continue;
        }
        for endpoint in slice.endpoints.iter().flatten() {
            // All consumers use the first address only, says the API.
            let Some(Ok(address)) = endpoint.addresses.first().map(|text| text.parse()) else {
                continue;
            };
            said.entry((address, pod(endpoint)))
                .or_default()
                .hear(slice, endpoint);
        }
    }
    let mut endpoints: BTreeMap<IpAddr, (bool, Endpoint)> = BTreeMap::new();
    for ((address, pod), said) in said {
        let stays = !said.terminating;
        let serves = said.ready || said.serving || publish_not_ready;
        let endpoint = Endpoint {
            node: said.node,
            pod,
            ready: stays && (said.ready || publish_not_ready),
            draining: said.terminating && serves,
            ports: said.ports,
        };
        let rank = |stays: bool, endpoint: &Endpoint| (stays, endpoint.ready, endpoint.draining);
        let wins = endpoints
            .get(&address)
            .is_none_or(|(other, has)| rank(*other, has) < rank(stays, &endpoint));
        if wins {
            endpoints.insert(address, (stays, endpoint));
        }
    }
    endpoints
        .into_iter()
        .map(|(address, (_, endpoint))| (address, endpoint))
        .collect()
}

fn pod(endpoint: &SliceEndpoint) -> Option<(String, String)> {
    let target = endpoint.target_ref.as_ref()?;
    if target.kind.as_deref() != Some("Pod") {
        return None;
    }
    Some((target.name.clone()?, target.uid.clone().unwrap_or_default()))
}

impl Said {
    fn hear(&mut self, slice: &EndpointSlice, endpoint: &SliceEndpoint) {
        let conditions = endpoint.conditions.as_ref();
        let said = |field: fn(&EndpointConditions) -> Option<bool>| conditions.and_then(field);
        // Nothing said means ready; serving then is what ready is.
        let ready = said(|conditions| conditions.ready).unwrap_or(true);
        self.ready |= ready;
        self.serving |= said(|conditions| conditions.serving).unwrap_or(ready);
        self.terminating |= said(|conditions| conditions.terminating).unwrap_or(false);
        // Of differing words the same one wins in any order.
        let node = endpoint.node_name.clone();
        self.node = match self.node.take() {
            None => node,
            Some(known) => Some(node.map_or(known.clone(), |node| node.min(known))),
        };
        for port in slice.ports.iter().flatten() {
            let is_tcp = port
                .protocol
                .as_deref()
                .is_none_or(|protocol| protocol == "TCP");
            let number = port.port.and_then(|port| u16::try_from(port).ok());
            if let (true, Some(number)) = (is_tcp, number) {
                self.ports
                    .entry(port.name.clone().unwrap_or_default())
                    .and_modify(|known| *known = number.min(*known))
                    .or_insert(number);
            }
        }
    }
}
