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
    Announce, BackendSpec, Bypass, DesiredState, HealthSpec, InstancePorts, Mode, PassSpec,
    PortSpec, Refuse, ServiceSpec, UplinkSelector, UplinkSpec, VipSpec,
};
use crate::plan::{self, Health, Warning};

/// UDP answers that reach pods although direct connections are dropped: DNS, NTP, IPMI.
const BYPASS_UDP: [u16; 3] = [53, 123, 623];
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);
const HEALTH_INTERVALS: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(3600);
const HEALTH_FAIL: u32 = 3;
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
    let mut checker = Checker::default();
    let state = checker.file(file);
    for (at, vip) in file.vips.iter().enumerate() {
        if let Some(nodes) = &vip.nodes {
            checker.complain(
                nodes.referenced,
                format!("vips[{at}].nodes"),
                "nodes can only be chosen among peers, which this version does not have; \
                 leave it out and give the VIP to one node's file",
            );
        }
    }
    checker.tables(file, &state);
    checker.result(state)
}

/// What a file says to an agent of a cluster, or every mistake in the order of the file.
pub(super) fn check_cluster(file: &schema::File) -> Result<ClusterConfig, Vec<Problem>> {
    let mut checker = Checker::default();
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
    let schema::Kubernetes {
        default_class,
        endpoints_without_pods,
    } = file.kubernetes;
    checker.result(ClusterConfig {
        state,
        policies,
        default_class,
        endpoints_without_pods,
    })
}

#[derive(Default)]
struct Checker {
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
            peers,
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
            services: {
                self.peers(peers.as_ref());
                self.services(services)
            },
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
        let (_, warnings) = plan::plan(state, &Health::default());
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
        let is_external = raw.announce.as_ref().is_some_and(|a| a.value == "external");
        if !is_external && nodes.as_ref().is_none_or(|nodes| nodes.len() > 1) {
            self.complain(
                raw.nodes.as_ref().map_or(at, |nodes| nodes.referenced),
                format!("{path}.nodes"),
                "`announce: always` makes every node answer for the VIP; \
                 name exactly one in `nodes`, or use `announce: external`",
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
        let gateway = gateway.as_ref().and_then(|gateway| {
            let path = format!("{path}.gateway");
            let address = self.address(&path, gateway)?;
            if let Some(UplinkSelector::Subnet(net, length)) = selector
                && !contains(net, length, address)
            {
                let message = format!("{address} is not in the uplink's subnet {net}/{length}");
                self.complain(gateway.referenced, path, message);
            }
            Some(address)
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
            gateway,
            bypass,
            bypass_udp,
        })
    }

    fn subnet(&mut self, path: &str, raw: &Text) -> Option<UplinkSelector> {
        let Ok(net) = raw.value.parse::<IpNet>() else {
            let message = format!("`{}` is not a subnet such as 172.22.0.0/24", raw.value);
            self.complain(raw.referenced, path, message);
            return None;
        };
        if !self.served(path, raw, net.addr()) {
            return None;
        }
        if net.prefix_len() > 0 && !is_unicast(net.addr()) {
            let message = format!("{net} is not a subnet of unicast addresses");
            self.complain(raw.referenced, path, message);
            return None;
        }
        if net.trunc() != net {
            let message = format!("{net} has host bits set; the subnet is {}", net.trunc());
            self.complain(raw.referenced, path, message);
            return None;
        }
        if net.prefix_len() == 0 {
            let message = format!("{net} is every network; name the one that the uplink is in");
            self.complain(raw.referenced, path, message);
            return None;
        }
        Some(UplinkSelector::Subnet(net.addr(), net.prefix_len()))
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
        let announce = match announce {
            Some(text) if text.value == "elect" => {
                self.complain(
                    text.referenced,
                    announce_path,
                    "`elect` needs peers to elect among, which this version does not have; \
                     use `always` on exactly one node, or `external`",
                );
                Announce::Always
            }
            text => self.one_of(
                &announce_path,
                text.as_ref(),
                &[
                    ("always", Announce::Always),
                    ("external", Announce::External),
                ],
            ),
        };
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

    fn peers(&mut self, raw: Option<&Spanned<schema::Peers>>) {
        let Some(peers) = raw else { return };
        let schema::Peers { key, nodes } = &peers.value;
        if key.is_some() || nodes.as_ref().is_some_and(|nodes| !nodes.is_empty()) {
            self.complain(
                peers.referenced,
                "peers",
                "peers are not supported yet; remove the section",
            );
        }
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

    fn service(&mut self, path: &str, raw: &schema::Service) -> Option<ServiceSpec> {
        let schema::Service {
            name,
            vip,
            ports,
            instance_ports,
            health,
            session_affinity,
            backends,
        } = raw;
        let vip_path = format!("{path}.vip");
        let address = self.address(&vip_path, vip);
        if let Some(address) = address
            && !self.vips.contains_key(&address)
        {
            let message = format!("{address} is not in `vips`; add it there");
            self.complain(vip.referenced, vip_path, message);
        }
        let client_affinity = self.one_of(
            &format!("{path}.sessionAffinity"),
            session_affinity.as_ref(),
            &[("None", false), ("ClientIP", true)],
        );
        let port_names: Vec<_> = ports.value.iter().map(|port| &*port.name.value).collect();
        let ranges = instance_ports.as_ref();
        let ports = self.ports(path, &name.value, address, ports);
        let ranges = self.ranges(path, &name.value, address, (&port_names, &ports), ranges);
        let health = health
            .as_ref()
            .and_then(|health| self.health(&format!("{path}.health"), health));
        let backends = self.backends(path, &ranges, backends);
        Some(ServiceSpec {
            precedence: 0,
            name: name.value.clone(),
            vip: address?,
            ports,
            instance_ports: ranges,
            client_affinity,
            health,
            backends,
        })
    }

    fn ports(
        &mut self,
        path: &str,
        service: &str,
        vip: Option<IpAddr>,
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
            if let Some(vip) = vip {
                let who = format!("port `{}` of service `{service}`", name.value);
                let path = format!("{path}.port");
                self.claim(path, vip, (number, number), who, port.referenced);
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
        vip: Option<IpAddr>,
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
            if let Some(vip) = vip {
                let who = format!("instance ports `{port_name}` of service `{service}`");
                self.claim(path, vip, (base, last), who, range.referenced);
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
            let address_path = format!("{path}.address");
            let Some(ip) = self.address(&address_path, address) else {
                continue;
            };
            if let Some(other) = addresses.insert(ip, &instance.value) {
                let message = format!("{ip} is already the address of instance `{other}`");
                self.complain(address.referenced, address_path, message);
            }
            backends.push(BackendSpec {
                instance: instance.value.clone(),
                slot,
                address: ip,
                uid: String::new(),
                ready: ready.unwrap_or(true),
                draining: false,
                ports: None,
            });
        }
        backends
    }

    /// Every VIP is a host in an uplink's subnet; not to be told where an uplink is found by name or MAC.
    fn vips_against_uplinks(&mut self, raw: &[schema::Vip], uplinks: &[UplinkSpec]) {
        let all_known = subnets(uplinks).count() == uplinks.len() && !uplinks.is_empty();
        for (at, vip) in raw.iter().enumerate() {
            let Ok(ip) = vip.address.value.parse() else {
                continue;
            };
            if !self.vips.contains_key(&ip) {
                continue;
            }
            let place = || format!("vips[{at}].address");
            if all_known && !subnets(uplinks).any(|(net, length)| contains(net, length, ip)) {
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
            let Ok(ip) = gateway.value.parse::<IpAddr>() else {
                continue;
            };
            let path = format!("uplinks[{at}].gateway");
            if let Some(vip) = self.vips.get(&ip) {
                let line = vip.line();
                let message = format!("{ip} is the VIP of line {line}; a gateway is another host");
                self.complain(gateway.referenced, &path, message);
            }
            self.host(gateway.referenced, path, ip, uplinks);
        }
    }

    fn backends_against_uplinks(&mut self, raw: &[schema::Service], uplinks: &[UplinkSpec]) {
        for (service_at, service) in raw.iter().enumerate() {
            for (at, backend) in service.backends.iter().enumerate() {
                if let Ok(ip) = backend.address.value.parse() {
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
                let Ok(ip) = address.value.parse::<IpAddr>() else {
                    continue;
                };
                if let Some(vip) = self.vips.get(&ip) {
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
        let Ok(address) = raw.value.parse::<IpAddr>() else {
            let message = format!("`{}` is not an IP address", raw.value);
            self.complain(raw.referenced, path, message);
            return None;
        };
        if !self.served(path, raw, address) {
            return None;
        }
        if !is_unicast(address) {
            let message = format!("{address} is not a unicast address that others can reach");
            self.complain(raw.referenced, path, message);
            return None;
        }
        Some(address)
    }

    fn served(&mut self, path: &str, raw: &Text, address: IpAddr) -> bool {
        if address.is_ipv6() {
            let message = format!("IPv6 is not served yet: {}", raw.value);
            self.complain(raw.referenced, path, message);
        }
        address.is_ipv4()
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
        IpAddr::V6(v6) => !(v6.is_unspecified() || v6.is_loopback() || v6.is_multicast()),
    }
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
