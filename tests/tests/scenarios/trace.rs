//! `ironlb trace`: what it says would happen is what happens, and asking changes nothing.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ironlb::dataplane::shadow::{USES, Use};
use ironlb_tests::{
    API_PORT, Agent, Capture, Host, IMAGE_PORT, Namespace, Node, RPC_PORT, VIP, VIP6, ironlb, run,
    wait_until,
};
use lb_common::layout::{LAYOUT_VERSION, map};
use lb_common::verdict::Verdict;
use serde_json::{Value, json};

use crate::scene::{Mode, Scene, fleet, get, in_both_modes};

in_both_modes!(
    the_backend_that_a_syn_would_get_is_the_one_that_a_connection_gets,
    packets_of_a_download_are_told_by_its_living_entries,
    asking_changes_nothing_that_serves,
);

/// Exit code, standard output and standard error of a trace on a node, of other pins than its own if they are named.
fn ask(node: &Node, root: Option<&Path>, arguments: &[&str]) -> (Option<i32>, String, String) {
    let binary = ironlb().expect("ironlb").to_str().expect("a path");
    let root = root.unwrap_or(&node.bpffs).to_str().expect("a path");
    let mut words = vec![binary, "trace", "--bpffs", root];
    words.extend(arguments);
    let output = node.namespace.output(words).expect("ironlb");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

/// The answers as JSON.
fn traces(node: &Node, arguments: &[&str]) -> Vec<Value> {
    let (code, out, said) = ask(node, None, &[arguments, &["-o", "json"]].concat());
    assert_eq!(code, Some(0), "{said}");
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("no JSON ({error}): {out}"))
}

/// The answer about a packet made of addresses.
fn trace(node: &Node, (from, to): (SocketAddr, SocketAddr), more: &[&str]) -> Value {
    let ends = ["--from", &from.to_string(), "--to", &to.to_string()];
    let mut traces = traces(node, &[&ends, more].concat());
    assert_eq!(traces.len(), 1);
    traces.remove(0)
}

/// What an entry of a map says that decided, as the trace tells it.
fn decided<'a>(trace: &'a Value, map: &str) -> &'a Value {
    let entries = trace["entries"].as_array().expect("entries");
    let found = entries.iter().find(|entry| entry["map"] == map);
    &found.unwrap_or_else(|| panic!("no {map} in {trace:#}"))["value"]
}

/// What would become of entries: map and kind of change.
fn changes(trace: &Value) -> Vec<(&str, &str)> {
    let changes = trace["changes"].as_array().expect("changes").iter();
    changes
        .map(|change| {
            let word = |name: &str| change[name].as_str().expect("a word");
            (word("map"), word("change"))
        })
        .collect()
}

/// Who answers a request from a port of the client's.
fn instance(client: &Namespace, port: u16, address: IpAddr) -> anyhow::Result<String> {
    let url = format!("http://{}/v1", SocketAddr::new(address, API_PORT));
    let port = port.to_string();
    let said = client.exec([
        "curl",
        "-sS",
        "-f",
        "--max-time",
        "3",
        "--local-port",
        &port,
        &url,
    ])?;
    let answer: Value = serde_json::from_str(&said)?;
    Ok(answer["instance"].as_str().unwrap_or_default().to_owned())
}

fn the_backend_that_a_syn_would_get_is_the_one_that_a_connection_gets(mode: Mode) {
    let lab = mode.builder().build().expect("laboratory");
    let mut config = lab.config(mode.name());
    lab.with_ipv6(&mut config);
    let agent = Agent::start(&lab.nodes[0], &config).expect("agent");
    let scene = Scene { agent, config, lab };
    let (node, host) = (scene.node(), scene.host());
    let client = &host.namespace;
    wait_until("IPv6 is served", Duration::from_secs(10), || {
        Ok(instance(client, 40_999, VIP6.into()).is_ok())
    })
    .expect("IPv6");

    let mut named = BTreeMap::<String, u32>::new();
    for port in 41_000..41_006 {
        // A port of its own for each: curl binds it for both versions of IP.
        for (own, port, vip) in [
            (IpAddr::from(host.address), port, IpAddr::from(VIP)),
            (host.address6.into(), port + 100, VIP6.into()),
        ] {
            let ends = (SocketAddr::new(own, port), SocketAddr::new(vip, API_PORT));
            let told = trace(node, ends, &[]);
            assert_eq!(told["verdict"], "forwarded_new", "{told:#}");
            assert_eq!(told["explanation"], Verdict::ForwardedNew.explanation());
            assert_eq!(told["action"], "pass");
            assert_eq!(changes(&told), [(map::YOUNG, "inserted")]);
            let backend = decided(&told, map::BACKENDS);
            assert_eq!(told["after"]["destination"], backend["pod"]);
            assert_eq!(told["after"]["source"], ends.0.to_string());
            assert_eq!(decided(&told, map::SERVICES)["service"], "ironic");
            let chosen = backend["instance"].as_str().expect("instance").to_owned();
            let served = instance(client, port, vip).expect("an answer");
            assert_eq!(chosen, served, "{told:#}");
            *named.entry(chosen).or_default() += 1;
        }
    }
    // Of 12 fair choices among three none fell on another one once in 40,000 times.
    assert!(named.len() > 1, "{named:?}");
}

fn packets_of_a_download_are_told_by_its_living_entries(mode: Mode) {
    let scene = Scene::with(mode, mode.builder().image_mib(32), |_| {});
    let node = scene.node();
    let mut download = scene.living_download(IMAGE_PORT, "/images/common.img?rate=8m");
    let living = scene.maps().living(map::LIVING).expect("flows");
    let (key, flow) = living[0];
    let end = |addr: lb_common::Addr, port| SocketAddr::new(addr.into(), port);
    let client = end(key.client, key.client_port);
    let (vip, pod) = (end(key.addr, key.port), end(flow.addr, flow.port));

    let told = trace(node, (client, vip), &["--flags", "ack"]);
    assert_eq!(told["verdict"], "forwarded", "{told:#}");
    let entry = decided(&told, map::LIVING);
    assert_eq!(entry["pod"], pod.to_string());
    assert_eq!(decided(&told, map::BACKENDS)["instance"], entry["instance"]);
    assert_eq!(told["after"]["destination"], pod.to_string());
    // As the flow's own packets come.
    assert_eq!(told["before"]["source_mac"], entry["last_hop"]);
    let allowed = [(map::LIVING, "changed")];
    assert!(
        changes(&told).iter().all(|change| allowed.contains(change)),
        "{told:#}"
    );

    let told = trace(
        node,
        (pod, client),
        &["--direction", "out", "--flags", "ack"],
    );
    assert_eq!(told["verdict"], "replied", "{told:#}");
    assert_eq!(told["program"], "ironlb_egress");
    assert_eq!(decided(&told, map::LIVING_REPLY)["vip"], vip.to_string());
    assert_eq!(told["before"]["source"], pod.to_string());
    assert_eq!(told["after"]["source"], vip.to_string());

    // A reset would end it, and does not: it was but a question.
    let told = trace(
        node,
        (pod, client),
        &["--direction", "out", "--flags", "rst"],
    );
    assert_eq!(
        changes(&told),
        [
            (map::LIVING, "removed"),
            (map::LIVING_REPLY, "removed"),
            (map::YOUNG, "changed")
        ],
        "{told:#}"
    );
    assert_eq!(scene.maps().living(map::LIVING).expect("flows").len(), 1);
    download.goes_on().expect("too short");
    download.finish(&scene.lab.image.sha256).expect("download");
}

/// Every pinned map but the counters, as bpftool shows it.
fn dump(node: &Node) -> BTreeMap<&'static str, String> {
    let kept = USES.into_iter().filter(|(_, kind)| *kind != Use::Fresh);
    kept.map(|(name, _)| {
        let mut bpftool = Command::new("bpftool");
        bpftool.args(["-j", "map", "dump", "pinned"]);
        let shown = run(bpftool.arg(node.maps().path(name))).expect("bpftool");
        (name, shown)
    })
    .collect()
}

fn asking_changes_nothing_that_serves(mode: Mode) {
    let mut scene = Scene::new(mode);
    let client = scene.host().address;
    get(&scene.host().namespace, VIP, API_PORT, "/").expect("an answer");
    // With the agent dead nobody writes but the programs, and nobody sends.
    scene.agent.process.kill().expect("kill");
    std::thread::sleep(Duration::from_millis(500));
    let node = scene.node();
    let objects = node.maps().kernel_objects().expect("objects");
    let seen = |scene: &Scene| {
        [
            Verdict::ForwardedNew,
            Verdict::ForwardedMiss,
            Verdict::RefusedNoService,
        ]
        .map(|verdict| scene.count(verdict))
    };
    let (before, counted) = (dump(node), seen(&scene));
    for (port, flags, verdict) in [
        (API_PORT, "syn", "forwarded_new"),
        (IMAGE_PORT, "ack", "forwarded_miss"),
        (RPC_PORT, "syn", "refused_no_service"),
    ] {
        let ends = (
            SocketAddr::from((client, 42_000)),
            SocketAddr::from((VIP, port)),
        );
        let told = trace(node, ends, &["--flags", flags]);
        assert_eq!(told["verdict"], verdict, "{told:#}");
    }
    let after = dump(node);
    for (name, shown) in before {
        assert!(shown == after[name], "{name} was changed");
    }
    assert_eq!(seen(&scene), counted);
    let left = node.maps().kernel_objects().expect("objects");
    assert_eq!(left, objects, "something of a trace stays");
    get(&scene.host().namespace, VIP, API_PORT, "/").expect("it serves on");
}

#[test]
fn a_port_that_nobody_serves_is_shown_with_its_reset() {
    let scene = Scene::new(Mode::Tc);
    let (node, client) = (
        scene.node(),
        SocketAddr::from((scene.host().address, 40_000)),
    );
    let vip = SocketAddr::from((VIP, RPC_PORT));
    let told = trace(node, (client, vip), &[]);
    assert_eq!(told["verdict"], "refused_no_service");
    assert_eq!(
        (&told["action"], &told["leaves"]),
        (&json!("transmit"), &json!("eth1"))
    );
    let (before, after) = (&told["before"], &told["after"]);
    assert_eq!(after["flags"], "ack,rst");
    assert_eq!(
        (&after["source"], &after["destination"]),
        (&before["destination"], &before["source"])
    );
    assert_eq!(
        (&after["source_mac"], &after["destination_mac"]),
        (&before["destination_mac"], &before["source_mac"])
    );
    assert_eq!(changes(&told), []);

    // For people, the same.
    let ends = ["--from", &client.to_string(), "--to", &vip.to_string()];
    let (code, table, said) = ask(node, None, &ends);
    assert_eq!(code, Some(0), "{said}");
    for part in [
        "refused_no_service",
        Verdict::RefusedNoService.explanation(),
        "transmit out of eth1",
        "No entry would change.",
    ] {
        assert!(table.contains(part), "no `{part}` in\n{table}");
    }
}

#[test]
fn a_pod_of_another_node_is_named_with_its_node() {
    let (fleet, holder) = fleet(Mode::Tc, 2);
    let other = 1 - holder;
    let (first, second) = (&fleet.lab.nodes[holder], &fleet.lab.nodes[other]);
    let mac = |node: usize| {
        fleet
            .mac(node)
            .map(|octet| format!("{octet:02x}"))
            .join(":")
    };
    let mut seen = 0;
    for port in 43_000..43_012 {
        let client = SocketAddr::from((fleet.lab.hosts[0].address, port));
        let ends = (client, SocketAddr::from((VIP, API_PORT)));
        let told = trace(first, ends, &[]);
        if told["verdict"] == "forwarded_new" {
            continue;
        }
        assert_eq!(told["verdict"], "handed_on_new", "{told:#}");
        assert_eq!(decided(&told, map::PEERS)["node"], second.name, "{told:#}");
        assert_eq!(told["after"]["destination_mac"], mac(other));
        assert_eq!(told["after"]["destination"], ends.1.to_string());
        assert_eq!(told["after"]["ttl"], 63);
        assert_eq!(told["leaves"], "eth1");
        assert_eq!(changes(&told), [(map::YOUNG, "inserted")]);

        // As that node gets it.
        let there = trace(second, ends, &["--mac", &mac(holder)]);
        assert_eq!(there["verdict"], "forwarded_new", "{there:#}");
        assert_eq!(decided(&there, map::PEER_MACS)["node"], first.name);
        let instance = |trace| decided(trace, map::BACKENDS)["instance"].clone();
        assert_eq!(instance(&there), instance(&told));
        seen += 1;
    }
    // All of 12 fair choices between two fall on one once in 4,096 times.
    assert!(seen > 0);
}

#[test]
fn packets_of_a_capture_are_traced_each_by_itself() {
    let scene = Scene::new(Mode::Tc);
    let Host { namespace, .. } = scene.host();
    let wire = Capture::start(namespace, "eth0", "tcp and dst port 6385").expect("tcpdump");
    let file = wire.file().to_owned();
    get(namespace, VIP, API_PORT, "/").expect("an answer");
    let captured = wire.finish().expect("tcpdump").len();
    assert!(captured >= 4, "SYN, ACK, request, FIN: {captured}");
    let file = file.to_str().expect("a path");

    let first = traces(scene.node(), &["--pcap", file]);
    assert_eq!(first.len(), 1);
    assert_eq!(
        (&first[0]["packet"], &first[0]["verdict"]),
        (&json!(1), &json!("forwarded_new"))
    );
    assert_eq!(first[0]["before"]["flags"], "syn");
    let all = traces(scene.node(), &["--pcap", file, "--packet", "all"]);
    let numbers: Vec<_> = all
        .iter()
        .filter_map(|trace| trace["packet"].as_u64())
        .collect();
    assert_eq!(numbers, (1..=captured as u64).collect::<Vec<_>>());
    assert_eq!(all[0]["verdict"], first[0]["verdict"]);
    // The connection is over: its entry guards its port, and none of the others saw the SYN begin it anew.
    for trace in &all[1..] {
        assert_eq!(trace["verdict"], "forwarded", "{trace:#}");
        assert_eq!(
            decided(trace, map::YOUNG)["state"],
            json!(["closing"]),
            "{trace:#}"
        );
    }
    let (code, _, said) = ask(scene.node(), None, &["--pcap", file, "--packet", "999"]);
    assert_eq!(code, Some(1));
    assert!(
        said.contains(&format!("has no packet 999: its last one is {captured}")),
        "{said}"
    );

    // One that is no whole frame, and a file that ends within a packet, as a killed tcpdump leaves it.
    let mut bytes = fs::read(file).expect("capture");
    let (header, first) = (24, 24 + 16);
    let length = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four"));
    let second = first + length(header + 8) as usize;
    let mut short = bytes[header..first].to_vec();
    short[8..12].copy_from_slice(&13_u32.to_le_bytes());
    short[12..16].copy_from_slice(&13_u32.to_le_bytes());
    short.extend([0; 13]);
    bytes.splice(second..second, short);
    bytes.pop();
    let damaged = scene.node().config.with_extension("pcap");
    fs::write(&damaged, bytes).expect("capture");
    let damaged = damaged.to_str().expect("a path");
    let (code, shown, said) = ask(
        scene.node(),
        None,
        &["--pcap", damaged, "--packet", "all", "-o", "json"],
    );
    assert_eq!(code, Some(1), "{said}");
    let shown: Value = serde_json::from_str(&shown).unwrap_or_else(|e| panic!("{e}: {shown}"));
    let numbers = shown.as_array().expect("a list").iter();
    let numbers: Vec<_> = numbers
        .filter_map(|trace| trace["packet"].as_u64())
        .collect();
    assert_eq!(
        numbers,
        [&[1], &Vec::from_iter(3..=captured as u64)[..]].concat()
    );
    assert!(
        said.contains("packet 2: ") && said.contains("damaged"),
        "{said}"
    );
}

#[test]
fn what_cannot_be_answered_is_an_error_that_says_why() {
    let scene = Scene::new(Mode::Tc);
    let (node, host) = (scene.node(), scene.host());
    let refused = |root: Option<&Path>, arguments: &[&str], code: i32, words: &str| {
        let (exit, _, said) = ask(node, root, arguments);
        assert_eq!(exit, Some(code), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: {said}");
    };
    let config = node.config.to_str().expect("a path");
    refused(None, &["--pcap", config], 1, "is no capture");
    let gone = format!("{config}.gone");
    refused(None, &["--pcap", &gone], 1, "cannot read");

    // tcpdump writes cooked headers for `any`.
    let wire = Capture::start(&host.namespace, "any", "tcp and dst port 6385").expect("tcpdump");
    let cooked = wire.file().to_owned();
    get(&host.namespace, VIP, API_PORT, "/").expect("an answer");
    wire.finish().expect("tcpdump");
    let cooked = cooked.to_str().expect("a path");
    refused(None, &["--pcap", cooked], 1, "not Ethernet");

    let from = SocketAddr::from((host.address, 40_000)).to_string();
    let to = SocketAddr::from((VIP, API_PORT)).to_string();
    let ends = ["--from", &from, "--to", &to];
    refused(
        None,
        &[&ends[..], &["--uplink", "eth9"]].concat(),
        1,
        "there is eth1",
    );
    let both = ["--from", &from, "--to", "[fd00::1]:80"];
    refused(None, &both, 1, "different versions of IP");
    refused(None, &ends[..2], 2, "--to");

    // A bpffs takes no names with a dot.
    let name = node.bpffs.file_name().expect("a name").to_string_lossy();
    let root = node.bpffs.with_file_name(format!("{name}-other"));
    refused(Some(&root), &ends, 3, "nothing is loaded");
    let layout = root.join(format!("v{}", LAYOUT_VERSION - 1));
    fs::create_dir_all(&layout).expect("directories");
    let (code, _, said) = ask(node, Some(&root), &ends);
    fs::remove_dir(&layout).expect("directory");
    fs::remove_dir(&root).expect("directory");
    assert_eq!(code, Some(1), "{said}");
    let words = format!("has the map layout v{}", LAYOUT_VERSION - 1);
    assert!(said.contains(&words), "{said}");
}
