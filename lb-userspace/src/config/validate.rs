//! The meaning of the file: every value checked, all mistakes gathered, each with its place.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use lb_common::{
    MAX_BACKENDS, MAX_BACKENDS_PER_PORT, MAX_BYPASS_UDP, MAX_PASS, MAX_PORTS, MAX_UPLINKS,
    MAX_VIPS, NAME_LEN,
};
use serde_saphyr::{Location, Spanned};

use super::schema::{self, Number, Text};
use super::{API_VERSION, ClusterConfig, Namespaces, Problem, VipPolicy, is_shown};
use crate::desired::{
    Announce, BackendSpec, Bypass, DesiredState, HealthSpec, InstancePorts, KeySpec, Mode,
    PassSpec, PeersSpec, PortSpec, Refuse, ServiceSpec, UplinkSelector, UplinkSpec, VipSpec,
};
use crate::plan::{self, Health, Nodes, Warning};

/// UDP answers that reach pods although direct connections are dropped: DNS, NTP, IPMI.
const BYPASS_UDP: [u16; 3] = [53, 123, 623];
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);
const HEALTH_INTERVALS: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(3600);
const HEALTH_FAIL: u32 = 3;
/// Between two heartbeats: three missed and a new election are over in a second.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(300);
const HEARTBEAT_INTERVALS: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(50)..=Duration::from_secs(10);
/// Beside 9469, where metrics and probes are.
const PEER_PORT: u16 = 9470;
/// Bytes of an interface's name at most (`IFNAMSIZ` without the zero).
const INTERFACE_NAME: usize = 15;
/// Names that stand for IP protocol numbers in `pass` (IANA's keywords).
const PROTOCOLS: &[(&str, u8)] = &[
    ("icmp", 1),
    ("igmp", 2),
    ("tcp", TCP),
    ("udp", UDP),
    ("dccp", 33),
    ("gre", 47),
    ("esp", 50),
    ("ah", 51),
    ("ospf", 89),
    ("pim", 103),
    ("vrrp", 112),
    ("sctp", SCTP),
    ("udplite", 136),
];
const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;

/// The desired state, or every mistake in the order of the file.
pub(super) fn check(file: &schema::File) -> Result<DesiredState, Vec<Problem>> {
    let mut checker = Checker {
        has_peers: file.peers.is_some(),
        ..Checker::default()
    };
    let mut state = checker.file(file);
    state.peers = checker.peers(file.peers.as_ref());
    for (at, vip) in file.vips.iter().enumerate() {
        if let Some(nodes) = &vip.nodes {
            checker.complain(
                nodes.referenced,
                format!("vips[{at}].nodes"),
                "nodes have names in Kubernetes only; a VIP that a node is not to announce is \
                 `announce: external` in that node's file",
            );
        }
    }
    checker.tables(file, &state);
    checker.result(state)
}

/// What a file says to an agent of a cluster, or every mistake in the order of the file.
pub(super) fn check_cluster(file: &schema::File) -> Result<ClusterConfig, Vec<Problem>> {
    let mut checker = Checker {
        in_cluster: true,
        ..Checker::default()
    };
    let state = checker.file(file);
    if let Some(service) = file.services.first() {
        checker.complain(
            service.name.referenced,
            "services",
            "services come from Kubernetes here; remove the section",
        );
    }
    let mut policies = BTreeMap::new();
    for (at, vip) in file.vips.iter().enumerate() {
        let policy = checker.policy(&format!("vips[{at}]"), vip);
        if let Ok(address) = vip.address.value.parse() {
            policies.insert(address, policy);
        }
    }
    if let Some(peers) = &file.peers
        && (peers.value.key.is_some() || peers.value.nodes.is_some())
    {
        checker.complain(
            peers.referenced,
            "peers",
            "agents find each other and their key in Kubernetes; only `interval` and `port` are said here",
        );
    }
    let (heartbeat_interval, peer_port) = checker.heartbeats(file.peers.as_ref());
    let schema::Kubernetes {
        default_class,
        endpoints_without_pods,
    } = file.kubernetes;
    checker.result(ClusterConfig {
        state,
        policies,
        default_class,
        endpoints_without_pods,
        heartbeat_interval,
        peer_port,
    })
}

#[derive(Default)]
struct Checker {
    /// The file is an agent's that has services, peers and their key from Kubernetes.
    in_cluster: bool,
    /// It names peers.
    has_peers: bool,
    problems: Vec<Problem>,
    /// VIPs of the file and where they are.
    vips: HashMap<IpAddr, Location>,
    /// VIP ports that a service, an instance range or `pass` has.
    claims: Vec<Claim>,
}

/// Ports of a VIP that somebody has.
struct Claim {
    vip: IpAddr,
    first: u16,
    last: u16,
    who: String,
    at: Location,
}

impl Checker {
    fn complain(&mut self, at: Location, path: impl Into<String>, message: impl Into<String>) {
        self.problems.push(Problem::new(at, path, message));
    }

    /// What every source reads of a file.
    fn file(&mut self, file: &schema::File) -> DesiredState {
        let schema::File {
            api_version,
            uplinks,
            vips,
            peers: _,
            kubernetes: _,
            services,
        } = file;
        if api_version.value != API_VERSION {
            let found = &api_version.value;
            self.complain(
                api_version.referenced,
                "apiVersion",
                format!(
                    "`{found}` is not a format that this version reads; it reads `{API_VERSION}`"
                ),
            );
        }
        let state = DesiredState {
            uplinks: self.uplinks(uplinks),
            vips: self.vips(vips),
            services: self.services(services),
            peers: None,
        };
        self.vips_against_uplinks(vips, &state.uplinks);
        self.gateways(&uplinks.value, &state.uplinks);
        self.vips_against_backends(services);
        self.backends_against_uplinks(services, &state.uplinks);
        state
    }

    fn result<T>(mut self, checked: T) -> Result<T, Vec<Problem>> {
        if self.problems.is_empty() {
            return Ok(checked);
        }
        self.problems
            .sort_by_key(|problem| (problem.line, problem.column));
        Err(self.problems)
    }

    /// All VIP ports fit into the maps. To be told last, of a file that is right otherwise.
    fn tables(&mut self, file: &schema::File, state: &DesiredState) {
        if !self.problems.is_empty() {
            return;
        }
        let (_, warnings) = plan::plan(state, &Health::default(), &Nodes::all_of(state, ""));
        let left_out: Vec<_> = warnings
            .iter()
            .filter_map(|warning| match warning {
                Warning::TablesFull { service, vip, port } => Some((service, vip, port)),
                _ => None,
            })
            .collect();
        let Some((service, vip, port)) = left_out.first() else {
            return;
        };
        let mut services = file.services.iter().enumerate();
        if let Some((at, raw)) = services.find(|(_, raw)| raw.name.value == **service) {
            let others = match left_out.len() - 1 {
                0 => String::new(),
                others => format!(", nor do {others} more of this file"),
            };
            let message = format!(
                "port {port} of {vip} does not fit{others}; \
                 at most {MAX_PORTS} VIP ports and {MAX_BACKENDS} backends of VIP ports an agent"
            );
            self.complain(raw.name.referenced, format!("services[{at}]"), message);
        }
    }

    /// Who may use a VIP. It is said, not assumed: a VIP for all is a VIP that any tenant can take.
    fn policy(&mut self, path: &str, raw: &schema::Vip) -> VipPolicy {
        let at = raw.address.referenced;
        let namespaces = match &raw.namespaces {
            None => {
                self.complain(
                    at,
                    format!("{path}.namespaces"),
                    "name the namespaces whose Services may have this VIP, or `[\"*\"]` for all",
                );
                Namespaces::All
            }
            Some(names) if names.iter().any(|name| name.value == "*") => Namespaces::All,
            Some(names) => Namespaces::Named(names.iter().map(|name| name.value.clone()).collect()),
        };
        let nodes = raw.nodes.as_ref().map(|nodes| -> BTreeSet<_> {
            nodes.value.iter().map(|node| node.value.clone()).collect()
        });
        for (at, node) in raw.nodes.iter().flat_map(|nodes| &nodes.value).enumerate() {
            if let Some(mistake) = name_mistake(&node.value) {
                self.complain(node.referenced, format!("{path}.nodes[{at}]"), mistake);
            }
        }
        if let Some(raw) = raw.nodes.as_ref().filter(|raw| raw.value.is_empty()) {
            self.complain(
                raw.referenced,
                format!("{path}.nodes"),
                "a VIP without nodes is served nowhere; name at least one, or leave it out for all",
            );
        }
        let is_always = raw.announce.as_ref().is_some_and(|a| a.value == "always");
        if is_always && nodes.as_ref().is_none_or(|nodes| nodes.len() > 1) {
            self.complain(
                raw.nodes.as_ref().map_or(at, |nodes| nodes.referenced),
                format!("{path}.nodes"),
                "`announce: always` makes every node answer for the VIP; \
                 name exactly one in `nodes`, or use `announce: elect`",
            );
        }
        VipPolicy {
            nodes,
            namespaces,
            auto_assign: raw.auto_assign,
        }
    }

    fn uplinks(&mut self, raw: &Spanned<Vec<Spanned<schema::Uplink>>>) -> Vec<UplinkSpec> {
        if raw.value.is_empty() {
            self.complain(
                raw.referenced,
                "uplinks",
                "no uplink: name at least one, e.g. `{subnet: 172.22.0.0/24}`",
            );
        }
        if raw.value.len() > MAX_UPLINKS as usize {
            let message = format!("{} uplinks; at most {MAX_UPLINKS}", raw.value.len());
            self.complain(raw.referenced, "uplinks", message);
        }
        let mut seen: Vec<((UplinkSelector, Option<u16>), Location)> = Vec::new();
        let mut uplinks = Vec::new();
        for (at, uplink) in raw.value.iter().enumerate() {
            let Some(spec) = self.uplink(&format!("uplinks[{at}]"), uplink) else {
                continue;
            };
            let place = (spec.selector.clone(), spec.vlan);
            if let Some((_, first)) = seen.iter().find(|(other, _)| *other == place) {
                let message = format!("the same uplink as in line {}", first.line());
                self.complain(uplink.referenced, format!("uplinks[{at}]"), message);
            }
            seen.push((place, uplink.referenced));
            uplinks.push(spec);
        }
        uplinks
    }

    fn uplink(&mut self, path: &str, raw: &Spanned<schema::Uplink>) -> Option<UplinkSpec> {
        let schema::Uplink {
            subnet,
            name,
            mac,
            mode,
            vlan,
            gateway,
            bypass,
            bypass_udp,
        } = &raw.value;
        let selector = match (subnet, name, mac) {
            (Some(subnet), None, None) => self.subnet(&format!("{path}.subnet"), subnet),
            (None, Some(name), None) => {
                if let Some(mistake) = interface_mistake(&name.value) {
                    self.complain(name.referenced, format!("{path}.name"), mistake);
                }
                Some(UplinkSelector::Name(name.value.clone()))
            }
            (None, None, Some(mac)) => self.mac(&format!("{path}.mac"), mac),
            _ => {
                self.complain(
                    raw.referenced,
                    path,
                    "an uplink is found by exactly one of `subnet`, `name` and `mac`",
                );
                None
            }
        };
        let gateways = gateway.as_ref().map_or_else(Vec::new, |gateway| {
            let path = format!("{path}.gateway");
            let addresses = self.addresses(&path, gateway, Scope::Link);
            for address in &addresses {
                if let Some(UplinkSelector::Subnet(net, length)) = selector
                    && net.is_ipv4() == address.is_ipv4()
                    && !is_link_local(*address)
                    && !contains(net, length, *address)
                {
                    let message = format!("{address} is not in the uplink's subnet {net}/{length}");
                    self.complain(gateway.referenced, &path, message);
                }
            }
            addresses
        });
        let vlan = vlan.as_ref().and_then(|vlan| {
            let path = format!("{path}.vlan");
            self.number(&path, vlan, 1..=4094, "VLAN")
        });
        let mode = self.one_of(
            &format!("{path}.mode"),
            mode.as_ref(),
            &[
                ("auto", Mode::Auto),
                ("native", Mode::Native),
                ("tc", Mode::Tc),
            ],
        );
        let bypass = self.one_of(
            &format!("{path}.bypass"),
            bypass.as_ref(),
            &[
                ("auto", Bypass::Auto),
                ("drop", Bypass::Drop),
                ("allow", Bypass::Allow),
            ],
        );
        let bypass_udp = match bypass_udp {
            Some(ports) => self.bypass_udp(&format!("{path}.bypass_udp"), ports),
            None => BYPASS_UDP.to_vec(),
        };
        Some(UplinkSpec {
            selector: selector?,
            mode,
            vlan,
            gateways,
            bypass,
            bypass_udp,
        })
    }

    fn subnet(&mut self, path: &str, raw: &Text) -> Option<UplinkSelector> {
        let net = self.network(path, raw, "a subnet")?;
        if net.prefix_len() == 0 {
            let message = format!("{net} is every network; name the one that the uplink is in");
            self.complain(raw.referenced, path, message);
            return None;
        }
        Some(UplinkSelector::Subnet(net.addr(), net.prefix_len()))
    }

    /// A network, of which a message says that the text is not `what`.
    fn network(&mut self, path: &str, raw: &Text, what: &str) -> Option<IpNet> {
        let mistake = match raw.value.parse::<IpNet>() {
            Err(_) => format!("`{}` is not {what} such as 172.22.0.0/24", raw.value),
            Ok(net) if net.prefix_len() > 0 && !is_unicast(net.addr()) => {
                format!("{net} is not {what} of unicast addresses")
            }
            Ok(net) if net.trunc() != net => {
                format!("{net} has host bits set; the network is {}", net.trunc())
            }
            Ok(net) => return Some(net),
        };
        self.complain(raw.referenced, path, mistake);
        None
    }

    fn mac(&mut self, path: &str, raw: &Text) -> Option<UplinkSelector> {
        let mut octets = [0; 6];
        let mut parts = raw.value.split(':');
        let whole = octets.iter_mut().all(|octet| {
            let hex = |part: &&str| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit());
            let part = parts.next().filter(hex);
            part.and_then(|part| u8::from_str_radix(part, 16).ok())
                .map(|value| *octet = value)
                .is_some()
        });
        if !whole || parts.next().is_some() {
            let message = format!("`{}` is not a MAC such as 52:54:00:12:34:56", raw.value);
            self.complain(raw.referenced, path, message);
            return None;
        }
        if octets[0] & 1 == 1 || octets == [0; 6] {
            let message = format!("{} is not the MAC of an interface", raw.value);
            self.complain(raw.referenced, path, message);
            return None;
        }
        Some(UplinkSelector::Mac(octets))
    }

    fn bypass_udp(&mut self, path: &str, raw: &Spanned<Vec<Number>>) -> Vec<u16> {
        if raw.value.len() > MAX_BYPASS_UDP {
            let message = format!("{} ports; at most {MAX_BYPASS_UDP}", raw.value.len());
            self.complain(raw.referenced, path, message);
        }
        let mut ports = Vec::new();
        for (at, port) in raw.value.iter().enumerate() {
            let path = format!("{path}[{at}]");
            let Some(number) = self.port(&path, port) else {
                continue;
            };
            if ports.contains(&number) {
                self.complain(port.referenced, path, format!("port {number} twice"));
            }
            ports.push(number);
        }
        ports
    }

    fn vips(&mut self, raw: &[schema::Vip]) -> Vec<VipSpec> {
        if let Some(beyond) = raw.get(MAX_VIPS as usize) {
            let message = format!("{} VIPs; at most {MAX_VIPS}", raw.len());
            self.complain(beyond.address.referenced, "vips", message);
        }
        let mut vips = Vec::new();
        for (at, vip) in raw.iter().enumerate() {
            vips.extend(self.vip(&format!("vips[{at}]"), vip));
        }
        vips
    }

    fn vip(&mut self, path: &str, raw: &schema::Vip) -> Option<VipSpec> {
        let schema::Vip {
            address,
            announce,
            nodes: _,
            refuse,
            pass,
            namespaces,
            auto_assign: _,
        } = raw;
        for (at, namespace) in namespaces.iter().flatten().enumerate() {
            if let Some(mistake) = name_mistake(&namespace.value) {
                let path = format!("{path}.namespaces[{at}]");
                self.complain(namespace.referenced, path, mistake);
            }
        }
        let refuse = self.one_of(
            &format!("{path}.refuse"),
            refuse.as_ref(),
            &[("reject", Refuse::Reject), ("drop", Refuse::Drop)],
        );
        let announce_path = format!("{path}.announce");
        if let Some(text) = announce.as_ref().filter(|text| text.value == "elect")
            && !self.in_cluster
            && !self.has_peers
        {
            self.complain(
                text.referenced,
                &announce_path,
                "`elect` needs `peers` to elect among; a node alone announces its VIPs with `always`",
            );
        }
        // Whoever has peers and does not say otherwise wants exactly one of them to answer.
        let mut kinds = [
            ("always", Announce::Always),
            ("external", Announce::External),
            ("elect", Announce::Elect),
        ];
        if self.in_cluster || self.has_peers {
            kinds.rotate_right(1);
        }
        let announce = self.one_of(&announce_path, announce.as_ref(), &kinds);
        let address_path = format!("{path}.address");
        let ip = self.address(&address_path, address);
        if let Some(ip) = ip {
            if let Some(first) = self.vips.get(&ip) {
                let message = format!("VIP {ip} is already in line {}", first.line());
                self.complain(address.referenced, address_path, message);
            } else {
                self.vips.insert(ip, address.referenced);
            }
        }
        let pass = pass.as_ref().map_or_else(Vec::new, |pass| {
            self.pass(&format!("{path}.pass"), ip, pass)
        });
        Some(VipSpec {
            address: ip?,
            announce,
            candidate: true,
            refuse,
            pass,
        })
    }

    fn pass(&mut self, path: &str, vip: Option<IpAddr>, raw: &Spanned<Vec<Text>>) -> Vec<PassSpec> {
        if raw.value.len() > MAX_PASS {
            let message = format!("{} entries; at most {MAX_PASS}", raw.value.len());
            self.complain(raw.referenced, path, message);
        }
        let mut list = Vec::new();
        for (at, text) in raw.value.iter().enumerate() {
            let path = format!("{path}[{at}]");
            let spec = match parse_pass(&text.value) {
                Ok(spec) => spec,
                Err(message) => {
                    self.complain(text.referenced, path, message);
                    continue;
                }
            };
            if list.contains(&spec) {
                self.complain(text.referenced, path, format!("`{}` twice", text.value));
                continue;
            }
            if let (Some(vip), TCP, 1..) = (vip, spec.protocol, spec.port) {
                let who = format!("`pass: {}` of the VIP", text.value);
                self.claim(path, vip, (spec.port, spec.port), who, text.referenced);
            }
            list.push(spec);
        }
        list
    }

    fn peers(&mut self, raw: Option<&Spanned<schema::Peers>>) -> Option<PeersSpec> {
        let raw = raw?;
        let schema::Peers { key, nodes, .. } = &raw.value;
        let (interval, port) = self.heartbeats(Some(raw));
        if key.is_none() {
            self.complain(
                raw.referenced,
                "peers.key",
                "peers trust each other by a key that all of them have, e.g. `key: {file: /etc/ironlb/key}`; \
                 `head -c 32 /dev/urandom | base64` makes one",
            );
        }
        if let Some(key) = key.as_ref().filter(|key| key.file.value.is_empty()) {
            self.complain(key.file.referenced, "peers.key.file", "names no file");
        }
        if nodes.as_ref().is_none_or(|nodes| nodes.value.is_empty()) {
            let message = "name the nodes by their own addresses in the VIPs' subnets, e.g. `nodes: [172.22.0.11, 172.22.0.12]`; \
                 the list may be the same on all of them";
            self.complain(raw.referenced, "peers.nodes", message);
        }
        let mut addresses = BTreeSet::new();
        for (at, node) in nodes.iter().flat_map(|nodes| &nodes.value).enumerate() {
            let path = format!("peers.nodes[{at}]");
            let Some(address) = self.address(&path, node) else {
                continue;
            };
            if self.vips.contains_key(&address) {
                let message = format!("{address} is a VIP; a node has an address of its own");
                self.complain(node.referenced, &path, message);
            }
            if !addresses.insert(address) {
                self.complain(node.referenced, path, format!("{address} twice"));
            }
        }
        Some(PeersSpec {
            key: KeySpec::File(key.as_ref()?.file.value.clone().into()),
            nodes: addresses,
            interval,
            port,
        })
    }

    fn heartbeats(&mut self, raw: Option<&Spanned<schema::Peers>>) -> (Duration, u16) {
        let raw = raw.map(|raw| &raw.value);
        let mut interval = HEARTBEAT_INTERVAL;
        if let Some(text) = raw.and_then(|raw| raw.interval.as_ref()) {
            let parsed = humantime::parse_duration(&text.value).ok();
            match parsed.filter(|interval| HEARTBEAT_INTERVALS.contains(interval)) {
                Some(parsed) => interval = parsed,
                None => {
                    let message = format!(
                        "`{}` is not a time between 50ms and 10s, such as 300ms",
                        text.value
                    );
                    self.complain(text.referenced, "peers.interval", message);
                }
            }
        }
        let port = raw.and_then(|raw| raw.port.as_ref());
        let port = port.and_then(|port| self.port("peers.port", port));
        (interval, port.unwrap_or(PEER_PORT))
    }

    fn services(&mut self, raw: &[schema::Service]) -> Vec<ServiceSpec> {
        let mut names = HashMap::new();
        let mut services = Vec::new();
        for (at, service) in raw.iter().enumerate() {
            let path = format!("services[{at}]");
            self.unique(
                &mut names,
                &format!("{path}.name"),
                &service.name,
                "service",
            );
            services.extend(self.service(&path, service));
        }
        services
    }

    /// A service as one for each of its VIPs, with the backends of that version.
    fn service(&mut self, path: &str, raw: &schema::Service) -> Vec<ServiceSpec> {
        let schema::Service {
            name,
            vip,
            ports,
            instance_ports,
            health,
            session_affinity,
            source_ranges,
            backends,
        } = raw;
        let vip_path = format!("{path}.vip");
        let vips = self.addresses(&vip_path, vip, Scope::Any);
        for address in &vips {
            if !self.vips.contains_key(address) {
                let message = format!("{address} is not in `vips`; add it there");
                self.complain(vip.referenced, &vip_path, message);
            }
        }
        let client_affinity = self.one_of(
            &format!("{path}.sessionAffinity"),
            session_affinity.as_ref(),
            &[("None", false), ("ClientIP", true)],
        );
        let source_ranges = source_ranges
            .as_ref()
            .map(|ranges| self.source_ranges(&format!("{path}.sourceRanges"), ranges));
        let port_names: Vec<_> = ports.value.iter().map(|port| &*port.name.value).collect();
        let ranges = instance_ports.as_ref();
        let ports = self.ports(path, &name.value, &vips, ports);
        let ranges = self.ranges(path, &name.value, &vips, (&port_names, &ports), ranges);
        let health = health
            .as_ref()
            .and_then(|health| self.health(&format!("{path}.health"), health));
        let backends = self.backends(path, &vips, &ranges, backends);
        let of = |vip: &IpAddr| ServiceSpec {
            precedence: 0,
            name: name.value.clone(),
            vip: *vip,
            ports: ports.clone(),
            instance_ports: ranges.clone(),
            client_affinity,
            source_ranges: source_ranges.clone(),
            health,
            backends: BackendSpec::behind(*vip, &backends),
        };
        vips.iter().map(of).collect()
    }

    fn source_ranges(&mut self, path: &str, raw: &Spanned<Vec<Text>>) -> BTreeSet<IpNet> {
        if raw.value.is_empty() {
            let message = "no range admits nobody; leave the key out to admit all";
            self.complain(raw.referenced, path, message);
        }
        let mut ranges = BTreeSet::new();
        for (at, range) in raw.value.iter().enumerate() {
            let path = format!("{path}[{at}]");
            ranges.extend(self.network(&path, range, "a range of addresses"));
        }
        ranges
    }

    fn ports(
        &mut self,
        path: &str,
        service: &str,
        vips: &[IpAddr],
        raw: &Spanned<Vec<schema::Port>>,
    ) -> Vec<PortSpec> {
        if raw.value.is_empty() {
            let path = format!("{path}.ports");
            self.complain(raw.referenced, path, "a service needs at least one port");
        }
        let mut names = HashMap::new();
        let mut ports = Vec::new();
        for (at, port) in raw.value.iter().enumerate() {
            let schema::Port {
                name,
                port,
                target_port,
            } = port;
            let path = format!("{path}.ports[{at}]");
            self.unique(&mut names, &format!("{path}.name"), name, "port");
            let number = self.port(&format!("{path}.port"), port);
            let target = match target_port {
                Some(target) => self.port(&format!("{path}.targetPort"), target),
                None => number,
            };
            let (Some(number), Some(target_port)) = (number, target) else {
                continue;
            };
            for vip in vips {
                let who = format!("port `{}` of service `{service}`", name.value);
                let path = format!("{path}.port");
                self.claim(path, *vip, (number, number), who, port.referenced);
            }
            ports.push(PortSpec {
                name: name.value.clone(),
                port: number,
                target_port,
            });
        }
        ports
    }

    fn ranges(
        &mut self,
        path: &str,
        service: &str,
        vips: &[IpAddr],
        (port_names, ports): (&[&str], &[PortSpec]),
        raw: Option<&BTreeMap<String, Text>>,
    ) -> Vec<InstancePorts> {
        let mut ranges = Vec::new();
        for (port_name, range) in raw.into_iter().flatten() {
            let path = format!("{path}.instance_ports.{port_name}");
            if !port_names.contains(&port_name.as_str()) {
                let message = format!(
                    "the service has no port named `{port_name}`; it has {}",
                    list(port_names)
                );
                self.complain(range.referenced, &path, message);
            }
            let Some((base, last)) = parse_range(&range.value) else {
                let message = format!(
                    "`{}` is not a range of ports such as 6200-6231",
                    range.value
                );
                self.complain(range.referenced, path, message);
                continue;
            };
            for vip in vips {
                let who = format!("instance ports `{port_name}` of service `{service}`");
                self.claim(path.clone(), *vip, (base, last), who, range.referenced);
            }
            // Without one there is a complaint about it already.
            let target = ports.iter().find(|port| port.name == *port_name);
            ranges.push(InstancePorts {
                port_name: port_name.clone(),
                target_port: target.map_or(0, |port| port.target_port),
                base,
                last,
                except: BTreeSet::new(),
            });
        }
        ranges
    }

    fn health(&mut self, path: &str, raw: &schema::Health) -> Option<HealthSpec> {
        let schema::Health {
            tcp,
            interval,
            fail,
        } = raw;
        let interval = match interval {
            None => Some(HEALTH_INTERVAL),
            Some(text) => {
                let parsed = humantime::parse_duration(&text.value).ok();
                let parsed = parsed.filter(|interval| HEALTH_INTERVALS.contains(interval));
                if parsed.is_none() {
                    let message = format!(
                        "`{}` is not a time between 100ms and 1h, such as 1s or 500ms",
                        text.value
                    );
                    self.complain(text.referenced, format!("{path}.interval"), message);
                }
                parsed
            }
        };
        let fail = match fail {
            None => Some(HEALTH_FAIL),
            Some(fail) => self.number(&format!("{path}.fail"), fail, 1..=1000, "count"),
        };
        Some(HealthSpec {
            tcp: self.port(&format!("{path}.tcp"), tcp)?,
            interval: interval?,
            fail: fail?,
        })
    }

    fn backends(
        &mut self,
        path: &str,
        vips: &[IpAddr],
        ranges: &[InstancePorts],
        raw: &[schema::Backend],
    ) -> Vec<BackendSpec> {
        let mut names = HashMap::new();
        let mut slots: HashMap<u32, &str> = HashMap::new();
        let mut addresses: HashMap<IpAddr, &str> = HashMap::new();
        if let Some(beyond) = raw.get(MAX_BACKENDS_PER_PORT) {
            let message = format!(
                "{} backends; at most {MAX_BACKENDS_PER_PORT} a service",
                raw.len()
            );
            self.complain(
                beyond.instance.referenced,
                format!("{path}.backends"),
                message,
            );
        }
        let mut backends = Vec::new();
        for (at, backend) in raw.iter().enumerate() {
            let schema::Backend {
                instance,
                slot,
                address,
                node,
                ready,
            } = backend;
            let path = format!("{path}.backends[{at}]");
            self.unique(
                &mut names,
                &format!("{path}.instance"),
                instance,
                "instance",
            );
            let slot = slot.as_ref().and_then(|number| {
                let path = format!("{path}.slot");
                let slot = self.number(&path, number, 0..=u32::from(u16::MAX), "slot")?;
                for range in ranges {
                    let last = u32::from(range.last - range.base);
                    if slot > last {
                        let message = format!(
                            "slot {slot} has no port in the range `{}` {}-{}, which ends with slot {last}",
                            range.port_name, range.base, range.last
                        );
                        self.complain(number.referenced, &path, message);
                    }
                }
                if let Some(other) = slots.insert(slot, &instance.value) {
                    let message = format!("slot {slot} is already that of instance `{other}`");
                    self.complain(number.referenced, path, message);
                }
                Some(slot)
            });
            if let Some(node) = node {
                let mistake = match node.value.parse::<IpAddr>() {
                    Ok(_) => None,
                    Err(_) => name_mistake(&node.value),
                };
                let path = format!("{path}.node");
                if let Some(mistake) = mistake {
                    self.complain(node.referenced, path, mistake);
                } else if !self.has_peers {
                    self.complain(
                        node.referenced,
                        path,
                        "backends of other nodes need `peers`; leave `node` out for one of this node",
                    );
                }
            }
            let address_path = format!("{path}.address");
            for ip in self.addresses(&address_path, address, Scope::Any) {
                if let Some(other) = addresses.insert(ip, &instance.value) {
                    let message = format!("{ip} is already the address of instance `{other}`");
                    self.complain(address.referenced, &address_path, message);
                }
                let serves = |vip: &IpAddr| vip.is_ipv4() == ip.is_ipv4();
                if !vips.is_empty() && !vips.iter().any(serves) {
                    let message = format!("{ip}: the service has no VIP of {}", version(ip));
                    self.complain(address.referenced, &address_path, message);
                }
                backends.push(BackendSpec {
                    instance: instance.value.clone(),
                    slot,
                    address: ip,
                    node: node.as_ref().map(|node| node.value.clone()),
                    uid: String::new(),
                    ready: ready.unwrap_or(true),
                    draining: false,
                    ports: None,
                });
            }
        }
        backends
    }

    /// Every VIP is a host in an uplink's subnet; not to be told where an uplink is found by name or MAC.
    fn vips_against_uplinks(&mut self, raw: &[schema::Vip], uplinks: &[UplinkSpec]) {
        let all_known = subnets(uplinks).count() == uplinks.len();
        for (at, vip) in raw.iter().enumerate() {
            let Ok(ip) = vip.address.value.parse() else {
                continue;
            };
            if !self.vips.contains_key(&ip) {
                continue;
            }
            let place = || format!("vips[{at}].address");
            // Where the other version's is named, an uplink's own addresses tell.
            let own = subnets(uplinks).filter(|(net, _)| net.is_ipv4() == ip.is_ipv4());
            let own: Vec<_> = own.collect();
            let is_in = |(net, length): &(IpAddr, u8)| contains(*net, *length, ip);
            if all_known && !own.is_empty() && !own.iter().any(is_in) {
                let message = format!("{ip} is in no uplink's subnet");
                self.complain(vip.address.referenced, place(), message);
            }
            self.host(vip.address.referenced, place(), ip, uplinks);
        }
    }

    fn gateways(&mut self, raw: &[Spanned<schema::Uplink>], uplinks: &[UplinkSpec]) {
        for (at, uplink) in raw.iter().enumerate() {
            let Some(gateway) = &uplink.value.gateway else {
                continue;
            };
            for ip in known(&gateway.value) {
                let path = format!("uplinks[{at}].gateway");
                if let Some(vip) = self.vips.get(&ip) {
                    let line = vip.line();
                    let message =
                        format!("{ip} is the VIP of line {line}; a gateway is another host");
                    self.complain(gateway.referenced, &path, message);
                }
                self.host(gateway.referenced, path, ip, uplinks);
            }
        }
    }

    fn backends_against_uplinks(&mut self, raw: &[schema::Service], uplinks: &[UplinkSpec]) {
        for (service_at, service) in raw.iter().enumerate() {
            for (at, backend) in service.backends.iter().enumerate() {
                for ip in known(&backend.address.value) {
                    let path = format!("services[{service_at}].backends[{at}].address");
                    self.host(backend.address.referenced, path, ip, uplinks);
                }
            }
        }
    }

    /// An address is not one that a subnet has for itself.
    fn host(&mut self, at: Location, path: String, ip: IpAddr, uplinks: &[UplinkSpec]) {
        let mut subnets = subnets(uplinks);
        let found =
            subnets.find_map(|(net, length)| Some((net, length, special(net, length, ip)?)));
        if let Some((net, length, what)) = found {
            let message = format!("{ip} is the {what} address of {net}/{length}, not a host");
            self.complain(at, path, message);
        }
    }

    fn vips_against_backends(&mut self, raw: &[schema::Service]) {
        for (service_at, service) in raw.iter().enumerate() {
            for (at, backend) in service.backends.iter().enumerate() {
                let address = &backend.address;
                for ip in known(&address.value) {
                    let Some(vip) = self.vips.get(&ip) else {
                        continue;
                    };
                    let message = format!(
                        "{ip} is the VIP of line {}; a backend has an address of its own",
                        vip.line()
                    );
                    let path = format!("services[{service_at}].backends[{at}].address");
                    self.complain(address.referenced, path, message);
                }
            }
        }
    }

    /// Takes ports of a VIP for `who`, or says who has one of them.
    fn claim(
        &mut self,
        path: String,
        vip: IpAddr,
        (first, last): (u16, u16),
        who: String,
        at: Location,
    ) {
        let taken = self
            .claims
            .iter()
            .find(|claim| claim.vip == vip && claim.first <= last && first <= claim.last);
        if let Some(taken) = taken {
            let port = first.max(taken.first);
            let message = format!(
                "port {port} of {vip} is already taken by {} (line {})",
                taken.who,
                taken.at.line()
            );
            self.complain(at, path, message);
        }
        self.claims.push(Claim {
            vip,
            first,
            last,
            who,
            at,
        });
    }

    fn unique(
        &mut self,
        seen: &mut HashMap<String, Location>,
        path: &str,
        name: &Text,
        what: &str,
    ) {
        if let Some(mistake) = name_mistake(&name.value) {
            self.complain(name.referenced, path, mistake);
        } else if name.value.len() >= NAME_LEN {
            let message = format!(
                "{} bytes; a name has at most {}",
                name.value.len(),
                NAME_LEN - 1
            );
            self.complain(name.referenced, path, message);
        } else if let Some(first) = seen.get(&name.value) {
            let message = format!(
                "{what} `{}` is already in line {}",
                name.value,
                first.line()
            );
            self.complain(name.referenced, path, message);
        } else {
            seen.insert(name.value.clone(), name.referenced);
        }
    }

    /// A unicast address that can be served.
    fn address(&mut self, path: &str, raw: &Text) -> Option<IpAddr> {
        self.one_address(path, raw, &raw.value, Scope::Any)
    }

    /// One address, or one of each version with a comma between.
    fn addresses(&mut self, path: &str, raw: &Text, scope: Scope) -> Vec<IpAddr> {
        let mut addresses: Vec<IpAddr> = Vec::new();
        for text in parts(&raw.value) {
            let Some(address) = self.one_address(path, raw, text, scope) else {
                continue;
            };
            let same = |other: &&IpAddr| other.is_ipv4() == address.is_ipv4();
            if let Some(other) = addresses.iter().find(same) {
                let of = version(address);
                let message = format!("{other} and {address}: one address of {of}");
                self.complain(raw.referenced, path, message);
                continue;
            }
            addresses.push(address);
        }
        addresses
    }

    fn one_address(&mut self, path: &str, raw: &Text, text: &str, scope: Scope) -> Option<IpAddr> {
        let Ok(address) = text.parse::<IpAddr>() else {
            let message = format!("`{text}` is not an IP address");
            self.complain(raw.referenced, path, message);
            return None;
        };
        if !is_unicast(address) || scope == Scope::Any && is_link_local(address) {
            let message = format!("{address} is not a unicast address that others can reach");
            self.complain(raw.referenced, path, message);
            return None;
        }
        Some(address)
    }

    fn port(&mut self, path: &str, raw: &Number) -> Option<u16> {
        self.number(path, raw, 1..=u16::MAX, "port")
    }

    fn number<T>(
        &mut self,
        path: &str,
        raw: &Number,
        allowed: std::ops::RangeInclusive<T>,
        what: &str,
    ) -> Option<T>
    where
        T: TryFrom<i64> + PartialOrd + std::fmt::Display,
    {
        let number = T::try_from(raw.value)
            .ok()
            .filter(|number| allowed.contains(number));
        if number.is_none() {
            let message = format!(
                "{} is not a {what} ({}-{})",
                raw.value,
                allowed.start(),
                allowed.end()
            );
            self.complain(raw.referenced, path, message);
        }
        number
    }

    /// The value of a word; the first of `words` where there is none or a wrong one.
    fn one_of<T: Copy>(&mut self, path: &str, raw: Option<&Text>, words: &[(&str, T)]) -> T {
        let default = words[0].1;
        let Some(text) = raw else { return default };
        let found = words.iter().find(|(word, _)| *word == text.value);
        if found.is_none() {
            let words: Vec<_> = words.iter().map(|(word, _)| *word).collect();
            let message = format!("`{}` is not one of {}", text.value, list(&words));
            self.complain(text.referenced, path, message);
        }
        found.map_or(default, |(_, value)| *value)
    }
}

fn list(words: &[&str]) -> String {
    let words: Vec<_> = words.iter().map(|word| format!("`{word}`")).collect();
    words.join(", ")
}

/// What is wrong with a name of any kind.
fn name_mistake(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        return Some("empty");
    }
    (!name.chars().all(is_shown)).then_some(
        "a character that is not shown (control, format or direction mark, odd space) is in the name",
    )
}

/// What is wrong with the name of an interface, or a pattern of such: what the kernel's
/// `dev_valid_name` refuses, and what cannot be an uplink.
fn interface_mistake(name: &str) -> Option<String> {
    if let Some(mistake) = name_mistake(name) {
        return Some(mistake.to_owned());
    }
    if let Err(error) = glob::Pattern::new(name) {
        return Some(format!("`{name}` is not a pattern: {error}"));
    }
    if matches!(name, "." | "..") || name.contains(['/', ':', ' ']) {
        return Some(format!(
            "`{name}` cannot be an interface: no name has `/`, `:` or a blank in it, or is `.` or `..`"
        ));
    }
    let shortest = shortest_match(name);
    if shortest > INTERFACE_NAME {
        return Some(format!(
            "`{name}` cannot be an interface: it has {shortest} bytes, and a name at most {INTERFACE_NAME}"
        ));
    }
    (name == "lo").then(|| "`lo` is the loopback, which cannot be an uplink".to_owned())
}

/// Bytes of the shortest name that a pattern matches.
fn shortest_match(pattern: &str) -> usize {
    let mut rest = pattern.chars();
    let mut shortest = 0;
    while let Some(c) = rest.next() {
        shortest += match c {
            '*' => 0,
            '[' => {
                // `]` is one of the set where it is the first in it.
                let set = rest.as_str().trim_start_matches('!');
                let first = set.chars().next().map_or(0, char::len_utf8);
                let end = set[first..]
                    .find(']')
                    .map_or(set.len(), |end| first + end + 1);
                rest = set[end..].chars();
                1
            }
            '?' => 1,
            c => c.len_utf8(),
        };
    }
    shortest
}

/// Subnets of the uplinks that are found by theirs.
fn subnets(uplinks: &[UplinkSpec]) -> impl Iterator<Item = (IpAddr, u8)> {
    uplinks.iter().filter_map(|uplink| match uplink.selector {
        UplinkSelector::Subnet(net, length) => Some((net, length)),
        UplinkSelector::Name(_) | UplinkSelector::Mac(_) => None,
    })
}

/// Whether an address can be a host's.
fn is_unicast(address: IpAddr) -> bool {
    match address {
        // 0/8 is this network, 127/8 loopback, 224/4 multicast, 240/4 reserved: the data plane drops
        // packets from them.
        IpAddr::V4(v4) => !matches!(v4.octets()[0], 0 | 127 | 224..),
        // A mapped address is none on a wire.
        IpAddr::V6(v6) => {
            let is_mapped = v6.to_ipv4_mapped().is_some();
            !(v6.is_unspecified() || v6.is_loopback() || v6.is_multicast() || is_mapped)
        }
    }
}

/// Whether an address means nothing without an interface.
fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// Where an address has to mean something.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// Everywhere.
    Any,
    /// On the uplink's link.
    Link,
}

/// The texts of the addresses in one that may hold several.
fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim)
}

/// The addresses in such a text; of what is none it has been complained.
fn known(text: &str) -> impl Iterator<Item = IpAddr> {
    parts(text).filter_map(|part| part.parse().ok())
}

/// The version of IP of an address, for people.
fn version(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "IPv4" } else { "IPv6" }
}

/// What an address means in a subnet if it is no host's there.
fn special(net: IpAddr, length: u8, address: IpAddr) -> Option<&'static str> {
    let net = IpNet::new(net, length).ok()?;
    // RFC 3021: a /31 has two hosts and nothing else.
    if net.max_prefix_len() - length < 2 {
        return None;
    }
    match address {
        _ if address == net.network() => Some("network"),
        IpAddr::V4(_) if address == net.broadcast() => Some("broadcast"),
        _ => None,
    }
}

fn contains(net: IpAddr, length: u8, address: IpAddr) -> bool {
    IpNet::new(net, length).is_ok_and(|net| net.contains(&address))
}

/// First and last port of a range such as `6200-6231`.
pub(crate) fn parse_range(text: &str) -> Option<(u16, u16)> {
    let (base, last) = text.split_once('-').unwrap_or((text, text));
    let (base, last) = (port_number(base.trim())?, port_number(last.trim())?);
    (base <= last).then_some((base, last))
}

/// A port in digits alone; `parse` would also take a sign.
fn port_number(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|port| digits && *port != 0)
}

fn parse_pass(text: &str) -> Result<PassSpec, String> {
    let (name, port) = match text.split_once('/') {
        Some((name, port)) => (name, Some(port)),
        None => (text, None),
    };
    let known = PROTOCOLS.iter().find(|(known, _)| *known == name);
    // 0 (IPv6 hop-by-hop) marks an unused place in the map.
    let number = name.parse::<u8>().ok().filter(|number| *number != 0);
    let Some(protocol) = known.map(|(_, number)| *number).or(number) else {
        let names: Vec<_> = PROTOCOLS.iter().map(|(name, _)| *name).collect();
        return Err(format!(
            "`{name}` is not an IP protocol: one of {}, or a number (1-255)",
            list(&names)
        ));
    };
    let port = match port {
        None => 0,
        Some(_) if ![TCP, UDP, SCTP].contains(&protocol) => {
            return Err(format!("`{text}`: {name} has no ports; write `{name}`"));
        }
        Some(port) => port_number(port)
            .ok_or_else(|| format!("`{text}`: `{port}` is not a port (1-65535)"))?,
    };
    Ok(PassSpec { protocol, port })
}
