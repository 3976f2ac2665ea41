use std::collections::BTreeSet;
use std::path::Path;

use lb_common::MAX_BACKENDS;

use super::*;
use crate::desired::{
    Announce, BackendSpec, Bypass, HealthSpec, InstancePorts, Mode, PassSpec, PortSpec, Refuse,
    ServiceSpec, UplinkSelector, UplinkSpec, VipSpec,
};

/// A file that is right, one value a line where tests replace something.
const GOOD: &str = "\
apiVersion: ironlb.dev/v1
uplinks:
  - {subnet: 172.22.0.0/24, mode: native, vlan: 7, gateway: 172.22.0.1, bypass: drop, bypass_udp: [53]}
vips:
  - {address: 172.22.0.2, announce: external, nodes: null, refuse: drop, pass: [udp/69, icmp], namespaces: [metal3], autoAssign: true}
  - {address: 172.22.0.3}
  - {address: 172.22.0.4}
services:
  - name: ironic
    vip: 172.22.0.2
    ports: [{name: api, port: 6385}, {name: images, port: 80, targetPort: 6180}]
    instance_ports: {images: 6200-6231}
    health: {tcp: 6385, interval: 250ms, fail: 5}
    sessionAffinity: ClientIP
    sourceRanges: [172.22.0.0/16, \"fd00:22::/64\"]
    backends:
      - {instance: ironic-0, slot: 0, address: 10.244.0.11}
      - {instance: ironic-1, slot: 31, address: 10.244.0.12, ready: false}
  - name: other
    vip: 172.22.0.3
    ports: [{name: api, port: 6385}]
";

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn mistakes(text: &str) -> Vec<String> {
    match parse(Path::new("lb.yaml"), text) {
        Err(ConfigError::Invalid { problems, .. }) => {
            problems.iter().map(ToString::to_string).collect()
        }
        other => panic!("expected mistakes, got {other:?} for\n{text}"),
    }
}

#[test]
fn every_key_of_the_format_arrives_in_the_desired_state() {
    let state = parse(Path::new("lb.yaml"), GOOD).expect("a good file");
    assert_eq!(
        state.uplinks,
        [UplinkSpec {
            selector: UplinkSelector::Subnet(ip("172.22.0.0"), 24),
            mode: Mode::Native,
            vlan: Some(7),
            gateways: vec![ip("172.22.0.1")],
            bypass: Bypass::Drop,
            bypass_udp: vec![53],
        }]
    );
    let pass = |protocol, port| PassSpec { protocol, port };
    assert_eq!(
        state.vips,
        [
            VipSpec {
                address: ip("172.22.0.2"),
                announce: Announce::External,
                candidate: true,
                refuse: Refuse::Drop,
                pass: vec![pass(17, 69), pass(1, 0)],
            },
            VipSpec {
                address: ip("172.22.0.3"),
                announce: Announce::Always,
                candidate: true,
                refuse: Refuse::Reject,
                pass: vec![],
            },
            VipSpec {
                address: ip("172.22.0.4"),
                announce: Announce::Always,
                candidate: true,
                refuse: Refuse::Reject,
                pass: vec![],
            },
        ]
    );
    let backend = |instance: &str, slot, address, ready| BackendSpec {
        instance: instance.into(),
        slot: Some(slot),
        address: ip(address),
        node: None,
        uid: String::new(),
        ready,
        draining: false,
        ports: None,
    };
    assert_eq!(
        state.services[0],
        ServiceSpec {
            precedence: 0,
            name: "ironic".into(),
            vip: ip("172.22.0.2"),
            ports: vec![
                PortSpec {
                    name: "api".into(),
                    port: 6385,
                    target_port: 6385
                },
                PortSpec {
                    name: "images".into(),
                    port: 80,
                    target_port: 6180
                },
            ],
            instance_ports: vec![InstancePorts {
                port_name: "images".into(),
                target_port: 6180,
                base: 6200,
                last: 6231,
                except: BTreeSet::new(),
            }],
            client_affinity: true,
            source_ranges: Some(BTreeSet::from([
                "172.22.0.0/16".parse().expect("a network"),
                "fd00:22::/64".parse().expect("a network"),
            ])),
            health: Some(HealthSpec {
                tcp: 6385,
                interval: Duration::from_millis(250),
                fail: 5
            }),
            backends: vec![
                backend("ironic-0", 0, "10.244.0.11", true),
                backend("ironic-1", 31, "10.244.0.12", false),
            ],
        }
    );
    assert_eq!(state.services[1].health, None);
    assert!(!state.services[1].client_affinity);
    assert_eq!(state.services[1].source_ranges, None);
}

#[test]
fn what_is_left_out_has_the_documented_defaults() {
    let text = "apiVersion: ironlb.dev/v1\nuplinks: [{name: 'enp*f1'}, {mac: 52:54:00:12:34:5f}]\n\
                vips: [{address: 172.22.0.2}]\npeers: {key: {file: /etc/ironlb/key}, nodes: [172.22.0.11]}\n";
    let state = parse(Path::new("lb.yaml"), text).expect("a good file");
    let [by_name, by_mac] = &state.uplinks[..] else {
        panic!("two uplinks, got {:?}", state.uplinks);
    };
    assert_eq!(by_name.selector, UplinkSelector::Name("enp*f1".into()));
    assert_eq!(
        by_mac.selector,
        UplinkSelector::Mac([0x52, 0x54, 0, 0x12, 0x34, 0x5f])
    );
    assert_eq!((by_name.mode, by_name.bypass), (Mode::Auto, Bypass::Auto));
    assert_eq!(by_name.bypass_udp, [53, 123, 623]);
    assert_eq!((by_name.vlan, &by_name.gateways[..]), (None, &[][..]));
    let peers = state.peers.expect("peers");
    assert_eq!(
        (peers.interval, peers.port),
        (Duration::from_millis(300), 9470)
    );
    assert_eq!(
        state.vips[0].announce,
        Announce::Elect,
        "whoever has peers wants one of them to answer"
    );
    let alone = text.split("peers").next().expect("some");
    let state = parse(Path::new("lb.yaml"), alone).expect("a good file");
    assert_eq!(state.peers, None);
    assert_eq!(state.vips[0].announce, Announce::Always);
}

#[test]
fn each_mistake_is_one_message_with_its_place() {
    let cases: &[(&str, &str, &str)] = &[
        // Structure.
        (
            "mode: native",
            "mod: native",
            "3:29: uplinks[0].mod: unknown field `mod`",
        ),
        (
            "mode: native",
            "mode: native, mode: tc",
            "3:43: uplinks[0]: duplicate mapping key `mode`",
        ),
        (
            "mode: native",
            "mode: [native]",
            "3:35: uplinks[0].mode: expected string scalar",
        ),
        (
            "services:",
            "serivces:",
            "8:1: serivces: unknown field `serivces`",
        ),
        (
            "apiVersion: ironlb.dev/v1\n",
            "",
            "1:1: missing field `apiVersion`",
        ),
        (
            "{images: 6200-6231}",
            "{images: 6200-6231, images: 1-2}",
            "12:41: services[0].instance_ports: duplicate mapping key `images`",
        ),
        (
            "port: 80",
            "port: www",
            "11:59: services[0].ports[1].port: not a whole number",
        ),
        (
            "ready: false",
            "ready: perhaps",
            "18:69: services[0].backends[1].ready: not `true` or `false`",
        ),
        (
            "port: 6385}]\n",
            "port: 6385}]\n---\nuplinks: []\n",
            "23:1: a second document",
        ),
        (
            "uplinks:\n",
            "peers: []\nuplinks:\n",
            "2:8: peers: keys with values (`key: value`) belong here",
        ),
        // Values.
        (
            "ironlb.dev/v1",
            "ironlb.dev/v2",
            "1:13: apiVersion: `ironlb.dev/v2` is not a format",
        ),
        (
            "subnet: 172.22.0.0/24",
            "subnet: 172.22.0.9/24",
            "3:14: uplinks[0].subnet: 172.22.0.9/24 has host bits set; the network is 172.22.0.0/24",
        ),
        (
            "subnet: 172.22.0.0/24",
            "subnet: 172.22.0.0",
            "3:14: uplinks[0].subnet: `172.22.0.0` is not a subnet",
        ),
        (
            "subnet: 172.22.0.0/24",
            "subnet: 0.0.0.0/0",
            "3:14: uplinks[0].subnet: 0.0.0.0/0 is every network",
        ),
        (
            "subnet: 172.22.0.0/24",
            "name: 'eth[1'",
            "3:12: uplinks[0].name: `eth[1` is not a pattern",
        ),
        (
            "subnet: 172.22.0.0/24",
            "mac: 53:54:00:12:34:56",
            "3:11: uplinks[0].mac: 53:54:00:12:34:56 is not the MAC of an interface",
        ),
        (
            "subnet: 172.22.0.0/24",
            "mac: 52:54:00:12:34:+6",
            "3:11: uplinks[0].mac: `52:54:00:12:34:+6` is not a MAC",
        ),
        (
            "subnet: 172.22.0.0/24",
            "subnet: 172.22.0.0/24, name: eth1",
            "3:5: uplinks[0]: an uplink is found by exactly one of",
        ),
        (
            "subnet: 172.22.0.0/24, ",
            "",
            "3:5: uplinks[0]: an uplink is found by exactly one of",
        ),
        (
            "mode: native",
            "mode: fast",
            "3:35: uplinks[0].mode: `fast` is not one of `auto`, `native`, `tc`",
        ),
        (
            "vlan: 7",
            "vlan: 4095",
            "3:49: uplinks[0].vlan: 4095 is not a VLAN (1-4094)",
        ),
        (
            "gateway: 172.22.0.1",
            "gateway: 172.23.0.1",
            "3:61: uplinks[0].gateway: 172.23.0.1 is not in the uplink's subnet",
        ),
        (
            "bypass: drop",
            "bypass: on",
            "3:81: uplinks[0].bypass: `on` is not one of `auto`, `drop`, `allow`",
        ),
        (
            "[53]",
            "[53, 0]",
            "3:104: uplinks[0].bypass_udp[1]: 0 is not a port (1-65535)",
        ),
        (
            "[53]",
            "[53, 53]",
            "3:104: uplinks[0].bypass_udp[1]: port 53 twice",
        ),
        (
            "[53]",
            "[1, 2, 3, 4, 5, 6, 7, 8, 9]",
            "3:99: uplinks[0].bypass_udp: 9 ports; at most 8",
        ),
        (
            "announce: external",
            "announce: elect",
            "5:37: vips[0].announce: `elect` needs `peers` to elect among",
        ),
        (
            "announce: external",
            "announce: allways",
            "5:37: vips[0].announce: `allways` is not one of `always`, `external`, `elect`",
        ),
        (
            "nodes: null",
            "nodes: [a]",
            "5:54: vips[0].nodes: nodes have names in Kubernetes only",
        ),
        (
            "refuse: drop",
            "refuse: no",
            "5:68: vips[0].refuse: `no` is not one of `reject`, `drop`",
        ),
        (
            "udp/69",
            "udp/0",
            "5:81: vips[0].pass[0]: `udp/0`: `0` is not a port",
        ),
        (
            "udp/69",
            "tftp",
            "5:81: vips[0].pass[0]: `tftp` is not an IP protocol",
        ),
        (
            "udp/69",
            "icmp/8",
            "5:81: vips[0].pass[0]: `icmp/8`: icmp has no ports",
        ),
        (
            "udp/69",
            "tcp/6385",
            "11:31: services[0].ports[0].port: port 6385 of 172.22.0.2 is already taken by `pass: tcp/6385` of the VIP (line 5)",
        ),
        (
            "address: 172.22.0.4",
            "address: 172.22.0",
            "7:15: vips[2].address: `172.22.0` is not an IP address",
        ),
        (
            "address: 172.22.0.4",
            "address: 224.0.0.1",
            "7:15: vips[2].address: 224.0.0.1 is not a unicast address",
        ),
        (
            "address: 172.22.0.4",
            "address: fe80::2",
            "7:15: vips[2].address: fe80::2 is not a unicast address",
        ),
        (
            "address: 172.22.0.4",
            "address: ::ffff:172.22.0.4",
            "7:15: vips[2].address: ::ffff:172.22.0.4 is not a unicast address",
        ),
        (
            "address: 172.22.0.4",
            "address: 172.22.0.2",
            "7:15: vips[2].address: VIP 172.22.0.2 is already in line 5",
        ),
        (
            "172.22.0.4",
            "10.0.0.1",
            "7:15: vips[2].address: 10.0.0.1 is in no uplink's subnet",
        ),
        (
            "services:",
            "peers: {nodes: [172.22.0.11]}\nservices:",
            "8:8: peers.key: peers trust each other by a key that all of them have",
        ),
        (
            "name: other",
            "name: ironic",
            "19:11: services[1].name: service `ironic` is already in line 9",
        ),
        (
            "vip: 172.22.0.3",
            "vip: 172.22.0.5",
            "20:10: services[1].vip: 172.22.0.5 is not in `vips`",
        ),
        (
            "vip: 172.22.0.3",
            "vip: 172.22.0.2",
            "21:31: services[1].ports[0].port: port 6385 of 172.22.0.2 is already taken by port `api` of service `ironic` (line 11)",
        ),
        (
            "[{name: api, port: 6385}]",
            "[]",
            "21:12: services[1].ports: a service needs at least one port",
        ),
        (
            "targetPort: 6180}",
            "targetPort: 6180}, {name: images, port: 81}",
            "11:89: services[0].ports[2].name: port `images` is already in line 11",
        ),
        (
            "port: 80,",
            "port: 65536,",
            "11:59: services[0].ports[1].port: 65536 is not a port (1-65535)",
        ),
        (
            "targetPort: 6180",
            "targetPort: -1",
            "11:75: services[0].ports[1].targetPort: -1 is not a port",
        ),
        (
            "{images: 6200-6231}",
            "{isos: 6200-6231}",
            "12:28: services[0].instance_ports.isos: the service has no port named `isos`; it has `api`, `images`",
        ),
        (
            "{images: 6200-6231}",
            "{images: 6231-6200}",
            "12:30: services[0].instance_ports.images: `6231-6200` is not a range",
        ),
        (
            "{images: 6200-6231}",
            "{images: 6380-6411}",
            "12:30: services[0].instance_ports.images: port 6385 of 172.22.0.2 is already taken by port `api`",
        ),
        (
            "{images: 6200-6231}",
            "{images: 6200-6231, api: 6231-6262}",
            "12:30: services[0].instance_ports.images: port 6231 of 172.22.0.2 is already taken by instance ports `api` of service `ironic`",
        ),
        (
            "interval: 250ms",
            "interval: 250",
            "13:35: services[0].health.interval: `250` is not a time",
        ),
        (
            "interval: 250ms",
            "interval: 1ms",
            "13:35: services[0].health.interval: `1ms` is not a time between",
        ),
        (
            "fail: 5",
            "fail: 0",
            "13:48: services[0].health.fail: 0 is not a count",
        ),
        (
            "sessionAffinity: ClientIP",
            "sessionAffinity: ClientIp",
            "14:22: services[0].sessionAffinity: `ClientIp` is not one of `None`, `ClientIP`",
        ),
        (
            "[172.22.0.0/16, \"fd00:22::/64\"]",
            "[172.22.0.0/16, 172.23.0.1]",
            "15:35: services[0].sourceRanges[1]: `172.23.0.1` is not a range of addresses such as 172.22.0.0/24",
        ),
        (
            "172.22.0.0/16,",
            "172.22.0.1/16,",
            "15:20: services[0].sourceRanges[0]: 172.22.0.1/16 has host bits set; the network is 172.22.0.0/16",
        ),
        (
            "[172.22.0.0/16, \"fd00:22::/64\"]",
            "[]",
            "15:19: services[0].sourceRanges: no range admits nobody; leave the key out to admit all",
        ),
        (
            "instance: ironic-1",
            "instance: ironic-0",
            "18:20: services[0].backends[1].instance: instance `ironic-0` is already in line 17",
        ),
        (
            "slot: 31",
            "slot: 32",
            "18:36: services[0].backends[1].slot: slot 32 has no port in the range `images` 6200-6231, which ends with slot 31",
        ),
        (
            "slot: 31",
            "slot: 0",
            "18:36: services[0].backends[1].slot: slot 0 is already that of instance `ironic-0`",
        ),
        (
            "10.244.0.12",
            "10.244.0.11",
            "18:49: services[0].backends[1].address: 10.244.0.11 is already the address of instance `ironic-0`",
        ),
        (
            "10.244.0.12",
            "172.22.0.3",
            "18:49: services[0].backends[1].address: 172.22.0.3 is the VIP of line 6",
        ),
        (
            "10.244.0.12",
            "fd00::12",
            "18:49: services[0].backends[1].address: fd00::12: the service has no VIP of IPv6",
        ),
        (
            "10.244.0.12",
            "\"10.244.0.12, 10.244.0.13\"",
            "18:49: services[0].backends[1].address: 10.244.0.12 and 10.244.0.13: one address of IPv4",
        ),
        // Addresses that no host has.
        (
            "address: 172.22.0.4",
            "address: 172.22.0.0",
            "7:15: vips[2].address: 172.22.0.0 is the network address of 172.22.0.0/24, not a host",
        ),
        (
            "address: 172.22.0.4",
            "address: 172.22.0.255",
            "7:15: vips[2].address: 172.22.0.255 is the broadcast address of 172.22.0.0/24, not a host",
        ),
        (
            "address: 172.22.0.4",
            "address: 0.0.0.4",
            "7:15: vips[2].address: 0.0.0.4 is not a unicast address that others can reach",
        ),
        (
            "address: 172.22.0.4",
            "address: 127.0.0.4",
            "7:15: vips[2].address: 127.0.0.4 is not a unicast address that others can reach",
        ),
        (
            "address: 172.22.0.4",
            "address: 240.0.0.1",
            "7:15: vips[2].address: 240.0.0.1 is not a unicast address that others can reach",
        ),
        (
            "gateway: 172.22.0.1",
            "gateway: 172.22.0.3",
            "3:61: uplinks[0].gateway: 172.22.0.3 is the VIP of line 6; a gateway is another host",
        ),
        (
            "gateway: 172.22.0.1",
            "gateway: 172.22.0.0",
            "3:61: uplinks[0].gateway: 172.22.0.0 is the network address of 172.22.0.0/24, not a host",
        ),
        (
            "gateway: 172.22.0.1",
            "gateway: 172.22.0.255",
            "3:61: uplinks[0].gateway: 172.22.0.255 is the broadcast address of 172.22.0.0/24, not a host",
        ),
        (
            "gateway: 172.22.0.1",
            "gateway: 224.0.0.1",
            "3:61: uplinks[0].gateway: 224.0.0.1 is not a unicast address that others can reach",
        ),
        (
            "10.244.0.12",
            "172.22.0.255",
            "18:49: services[0].backends[1].address: 172.22.0.255 is the broadcast address of 172.22.0.0/24, not a host",
        ),
        (
            "10.244.0.12",
            "127.0.0.1",
            "18:49: services[0].backends[1].address: 127.0.0.1 is not a unicast address that others can reach",
        ),
        (
            "10.244.0.12",
            "0.0.0.0",
            "18:49: services[0].backends[1].address: 0.0.0.0 is not a unicast address that others can reach",
        ),
        (
            "subnet: 172.22.0.0/24",
            "subnet: 224.0.0.0/24",
            "3:14: uplinks[0].subnet: 224.0.0.0/24 is not a subnet of unicast addresses",
        ),
        // Names that nothing has.
        (
            "subnet: 172.22.0.0/24",
            "name: ''",
            "3:12: uplinks[0].name: empty",
        ),
        (
            "subnet: 172.22.0.0/24",
            "name: lo",
            "3:12: uplinks[0].name: `lo` is the loopback, which cannot be an uplink",
        ),
        (
            "subnet: 172.22.0.0/24",
            "name: ..",
            "3:12: uplinks[0].name: `..` cannot be an interface: no name has `/`, `:` or a blank in it, or is `.` or `..`",
        ),
        (
            "subnet: 172.22.0.0/24",
            "name: eth/*",
            "3:12: uplinks[0].name: `eth/*` cannot be an interface: no name has",
        ),
        (
            "subnet: 172.22.0.0/24",
            "name: 'eth 1'",
            "3:12: uplinks[0].name: `eth 1` cannot be an interface: no name has",
        ),
        (
            "subnet: 172.22.0.0/24",
            "name: \"eth\\t1\"",
            "3:12: uplinks[0].name: a character that is not shown (control, format or direction mark, odd space) is in the name",
        ),
        (
            "subnet: 172.22.0.0/24",
            "name: enp129s0f0np0v11",
            "3:12: uplinks[0].name: `enp129s0f0np0v11` cannot be an interface: it has 16 bytes, and a name at most 15",
        ),
        (
            "subnet: 172.22.0.0/24",
            "name: 'enp129s0f0np[0-9]v[!]1][]2]'",
            "3:12: uplinks[0].name: `enp129s0f0np[0-9]v[!]1][]2]` cannot be an interface: it has 16 bytes",
        ),
        (
            "name: other",
            "name: \"oth\\u202Eer\"",
            "19:11: services[1].name: a character that is not shown",
        ),
        (
            "name: api",
            "name: \"ap\\u200Bi\"",
            "11:20: services[0].ports[0].name: a character that is not shown",
        ),
        (
            "instance: ironic-1",
            "instance: \"a\\nb\"",
            "18:20: services[0].backends[1].instance: a character that is not shown",
        ),
        (
            "instance: ironic-1",
            "instance: \"\\e[31mred\"",
            "18:20: services[0].backends[1].instance: a character that is not shown",
        ),
        (
            "[metal3]",
            "[\"me\\ttal3\"]",
            "5:109: vips[0].namespaces[0]: a character that is not shown",
        ),
        // What is wrong is told without what would confuse a terminal.
        (
            "mode: native",
            "mode: \"\\e[31m\\u202Ex\"",
            "3:35: uplinks[0].mode: `\\u{1b}[31m\\u{202e}x` is not one of",
        ),
        (
            "mode: native",
            "\"m\\e[0m\": native",
            "3:29: uplinks[0].m\\u{1b}[0m: unknown field `m\\u{1b}[0m`",
        ),
    ];
    let mut wrong = Vec::new();
    for (find, replace, expected) in cases {
        let at = GOOD.find(find).unwrap_or_else(|| panic!("no `{find}`"));
        let text = format!("{}{replace}{}", &GOOD[..at], &GOOD[at + find.len()..]);
        let found = mistakes(&text);
        if found.len() != 1 || !found[0].starts_with(expected) {
            wrong.push(format!(
                "`{find}` → `{replace}`: {found:#?}, expected {expected}…"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn all_mistakes_of_meaning_are_told_at_once_in_the_order_of_the_file() {
    let text = GOOD
        .replace("mode: native", "mode: fast")
        .replace("port: 80,", "port: 0,")
        .replace("slot: 31", "slot: 99");
    let found = mistakes(&text);
    let lines: Vec<_> = found.iter().map(|m| m.split(':').next()).collect();
    assert_eq!(lines, [Some("3"), Some("11"), Some("18")], "{found:#?}");
}

#[test]
fn broken_yaml_is_an_error_and_never_a_panic() {
    for text in [
        "",
        "\t- x",
        "a: &a [*a]",
        "foo",
        "[",
        "uplinks: {{{",
        "\u{0}",
        "- - - -",
        "? : ?",
    ] {
        assert_eq!(mistakes(text).len(), 1, "{text:?}");
    }
}

#[test]
fn the_message_names_the_file() {
    let error = parse(Path::new("/etc/ironlb/lb.yaml"), "foo").expect_err("no mapping");
    assert!(
        error.to_string().starts_with("/etc/ironlb/lb.yaml:1:1: "),
        "{error}"
    );
    let missing = load(Path::new("/nonexistent/lb.yaml")).expect_err("no such file");
    assert!(
        missing
            .to_string()
            .starts_with("cannot read /nonexistent/lb.yaml: No such file"),
        "{missing}"
    );
}

#[test]
fn an_empty_file_is_told_what_it_should_hold() {
    for text in ["", "\n\n", "---\n", "# uplinks: []\n  # vips\n"] {
        assert_eq!(
            mistakes(text),
            [
                "1:1: the file is empty; it should hold `apiVersion: ironlb.dev/v1`, `uplinks`, `vips` and, \
                 unless they come from Kubernetes, `services`"
            ]
        );
    }
}

#[test]
fn only_a_regular_file_of_a_sane_size_is_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    rustix::fs::mkfifoat(rustix::fs::CWD, at("fifo"), rustix::fs::Mode::RUSR).expect("a pipe");
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).expect("a socket");
    fs::write(at("large"), vec![b'#'; 1024 * 1024 + 1]).expect("write");
    fs::write(at("latin1"), b"# \xe9").expect("write");
    fs::write(at("largest"), vec![b'#'; 1024 * 1024]).expect("write");
    let cases = [
        (
            at("fifo"),
            "it is a pipe (FIFO); a configuration is a regular file",
        ),
        (
            at("socket"),
            "it is a socket; a configuration is a regular file",
        ),
        (
            at(""),
            "it is a directory; a configuration is a regular file",
        ),
        (
            "/dev/zero".into(),
            "it is a device; a configuration is a regular file",
        ),
        (
            at("large"),
            "it is larger than 1024 KiB, the most that is read",
        ),
        (at("latin1"), "it is not UTF-8 text"),
        (at("missing"), "No such file or directory (os error 2)"),
    ];
    for (path, why) in cases {
        let error = load(&path).expect_err("cannot be read").to_string();
        assert_eq!(error, format!("cannot read {}: {why}", path.display()));
    }
    assert_eq!(read(&at("largest")).map(|text| text.len()), Ok(1024 * 1024));
}

#[test]
fn a_name_that_the_maps_would_cut_is_refused() {
    let fits = "é".repeat(47);
    let text = GOOD.replace("name: other", &format!("name: {fits}x"));
    assert!(parse(Path::new("lb.yaml"), &text).is_ok(), "95 bytes");
    for (find, at) in [
        ("name: other", "19:11: services[1].name"),
        ("name: api", "11:20: services[0].ports[0].name"),
        (
            "instance: ironic-1",
            "18:20: services[0].backends[1].instance",
        ),
    ] {
        let key = find.split(' ').next().expect("a key");
        let text = GOOD.replace(find, &format!("{key} {fits}xx"));
        assert_eq!(
            mistakes(&text)[0],
            format!("{at}: 96 bytes; a name has at most 95")
        );
    }
}

#[test]
fn names_and_patterns_that_an_interface_can_have_are_taken() {
    for name in [
        "enp129s0f0np0v1",
        "enp*f1",
        "e[a-z][a-z][a-z][0-9]",
        "*",
        "br-ex",
        "eth1.7",
        "é",
        "lo1",
    ] {
        let text = GOOD.replace("subnet: 172.22.0.0/24", &format!("name: '{name}'"));
        assert!(parse(Path::new("lb.yaml"), &text).is_ok(), "{name}");
    }
}

#[test]
fn a_point_to_point_subnet_has_no_network_and_no_broadcast_address() {
    let text = "apiVersion: ironlb.dev/v1\nuplinks: [{subnet: 172.22.0.2/31}]\nvips: [{address: 172.22.0.2}]\n";
    assert!(parse(Path::new("lb.yaml"), text).is_ok());
}

#[test]
fn more_than_the_maps_hold_is_a_mistake_of_the_service() {
    let backends = |first: usize, count: usize| -> String {
        (first..first + count)
            .map(|i| {
                let [high, low] = u16::try_from(i).expect("a number").to_be_bytes();
                format!("      - {{instance: i-{i}, address: 10.244.{high}.{low}}}\n")
            })
            .collect()
    };
    let head = |services: &str| {
        format!(
            "apiVersion: ironlb.dev/v1\nuplinks: [{{subnet: 172.22.0.0/24}}]\nvips: [{{address: 172.22.0.2}}]\nservices:\n{services}"
        )
    };
    let service = |number: usize, ports: usize, count: usize| {
        let ports: Vec<_> = (0..ports)
            .map(|i| format!("{{name: p{i}, port: {}}}", 1 + number * 1000 + i))
            .collect();
        format!(
            "  - name: s{number}\n    vip: 172.22.0.2\n    ports: [{}]\n    backends:\n{}",
            ports.join(", "),
            backends(number * 100 + 1, count)
        )
    };
    let parsed = |text: &str| parse(Path::new("lb.yaml"), text);
    assert!(parsed(&head(&service(0, 2, 64))).is_ok());
    assert_eq!(
        mistakes(&head(&service(0, 2, 65))),
        ["73:20: services[0].backends: 65 backends; at most 64 a service"]
    );
    let full = service(0, 1000, 1) + &service(1, 24, 1);
    assert!(parsed(&head(&full)).is_ok());
    assert_eq!(
        mistakes(&head(&(service(0, 1000, 1) + &service(1, 26, 1)))),
        [format!(
            "10:11: services[1]: port 1025 of 172.22.0.2 does not fit, nor do 1 more of this file; \
             at most 1024 VIP ports and {MAX_BACKENDS} backends of VIP ports an agent"
        )]
    );
    let half = MAX_BACKENDS as usize / 2 / 64;
    let full = service(0, half, 64) + &service(1, half, 64);
    assert!(parsed(&head(&full)).is_ok());
    let found = mistakes(&head(&(full + &service(2, 1, 1))));
    assert!(found[0].contains("services[2]: port 2001"), "{found:#?}");
}

/// The same format, for an agent that takes services from Kubernetes.
const CLUSTER: &str = "\
apiVersion: ironlb.dev/v1
uplinks: [{subnet: 172.22.0.0/24}]
vips:
  - {address: 172.22.0.2, nodes: [node-a], namespaces: [metal3, other], autoAssign: true}
  - {address: 172.22.0.3, announce: external, namespaces: [\"*\"]}
kubernetes: {defaultClass: true, endpointsWithoutPods: true}
";

#[test]
fn a_cluster_s_file_says_who_may_use_a_vip_and_where() {
    let config = parse_cluster(Path::new("lb.yaml"), CLUSTER).expect("a good file");
    assert_eq!(config.state.vips.len(), 2);
    assert_eq!(config.state.services, []);
    assert!(config.default_class && config.endpoints_without_pods);
    let first = &config.policies[&ip("172.22.0.2")];
    assert!(first.auto_assign);
    assert!(first.is_effective_on("node-a") && !first.is_effective_on("node-b"));
    assert!(first.namespaces.contain("metal3") && !first.namespaces.contain("tenant"));
    let second = &config.policies[&ip("172.22.0.3")];
    assert!(!second.auto_assign && second.is_effective_on("node-b"));
    assert!(second.namespaces.contain("tenant"));
    // Without the section nothing is taken that does not name us.
    let text = CLUSTER.replace(
        "kubernetes: {defaultClass: true, endpointsWithoutPods: true}\n",
        "",
    );
    let config = parse_cluster(Path::new("lb.yaml"), &text).expect("a good file");
    assert!(!config.default_class && !config.endpoints_without_pods);
}

#[test]
fn a_cluster_s_file_that_would_let_anybody_or_nobody_serve_is_refused() {
    let cases = [
        (
            ", namespaces: [metal3, other]",
            "",
            "4:15: vips[0].namespaces: name the namespaces whose Services may have this VIP, or `[\"*\"]` for all",
        ),
        (
            "[metal3, other]",
            "['']",
            "4:57: vips[0].namespaces[0]: empty",
        ),
        (
            "172.22.0.2, nodes: [node-a]",
            "172.22.0.2, announce: always",
            "4:15: vips[0].nodes: `announce: always` makes every node answer for the VIP; name exactly one in `nodes`",
        ),
        (
            "[node-a]",
            "[node-a, node-b], announce: always",
            "4:34: vips[0].nodes: `announce: always` makes every node answer",
        ),
        (
            "announce: external",
            "announce: external, nodes: []",
            "5:54: vips[1].nodes: a VIP without nodes is served nowhere",
        ),
        (
            "defaultClass: true",
            "defaultClas: true",
            "6:14: kubernetes.defaultClas: unknown field",
        ),
        (
            "kubernetes:",
            "services: [{name: x, vip: 172.22.0.2, ports: [{name: a, port: 1}]}]\nkubernetes:",
            "6:19: services: services come from Kubernetes here; remove the section",
        ),
    ];
    for (good, bad, expected) in cases {
        let text = CLUSTER.replace(good, bad);
        assert_ne!(text, CLUSTER, "{good} is in the file");
        let Err(ConfigError::Invalid { problems, .. }) = parse_cluster(Path::new("lb.yaml"), &text)
        else {
            panic!("expected a mistake in\n{text}");
        };
        let found: Vec<_> = problems.iter().map(ToString::to_string).collect();
        assert!(
            found.len() == 1 && found[0].starts_with(expected),
            "{expected}: {found:?}"
        );
    }
}

#[test]
fn a_service_of_both_versions_is_one_for_each_vip_with_the_backends_of_its_version() {
    let text = r#"
apiVersion: ironlb.dev/v1
uplinks: [{subnet: 172.22.0.0/24, gateway: "172.22.0.1, fe80::1"}]
vips: [{address: 172.22.0.2}, {address: "fd00:22::2"}]
services:
  - name: ironic
    vip: 172.22.0.2, fd00:22::2
    ports: [{name: api, port: 6385}]
    instance_ports: {api: 6200-6231}
    backends:
      - {instance: ironic-0, slot: 0, address: "10.244.0.11, fd00:244::11"}
      - {instance: ironic-1, slot: 1, address: 10.244.0.12}
"#;
    let state = parse(Path::new("lb.yaml"), text).expect("a good file");
    assert_eq!(state.uplinks[0].gateways, [ip("172.22.0.1"), ip("fe80::1")]);
    let services: Vec<_> = state
        .services
        .iter()
        .map(|service| {
            let backends = service.backends.iter();
            let backends: Vec<_> = backends
                .map(|backend| (&*backend.instance, backend.slot, backend.address))
                .collect();
            (service.vip, backends)
        })
        .collect();
    assert_eq!(
        services,
        [
            (
                ip("172.22.0.2"),
                vec![
                    ("ironic-0", Some(0), ip("10.244.0.11")),
                    ("ironic-1", Some(1), ip("10.244.0.12"))
                ]
            ),
            (
                ip("fd00:22::2"),
                vec![("ironic-0", Some(0), ip("fd00:244::11"))]
            ),
        ]
    );
}
