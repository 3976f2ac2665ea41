//! `ironlb doctor`: every fault is made for real, found with its remedy, and gone once the remedy was followed.

use std::path::Path;
use std::time::Duration;

use ironlb_tests::{
    API_PORT, Agent, Fleet, Laboratory, Namespace, Node, NodeOptions, VIP, VIP6, ironlb,
    run_with_input, wait_until,
};
use serde_json::{Value, json};

use crate::foreign::attach_xdp;
use crate::scene::{Mode, Scene, connect, fleet, fleet_lab, get, in_both_modes};

in_both_modes!(
    a_healthy_node_has_no_errors_before_with_and_after_its_agent,
    who_else_answers_for_a_vip_is_found,
    who_else_answers_for_an_ipv6_vip_is_found,
    a_fleet_knows_its_own_macs_from_a_strangers,
);

/// What the doctor said.
pub struct Diagnosis {
    code: Option<i32>,
    report: Value,
}

impl Diagnosis {
    pub fn of(node: &Node, arguments: &[&str]) -> Self {
        Self::at(node, &node.bpffs, arguments)
    }

    /// With other pins than the node's.
    fn at(node: &Node, bpffs: &Path, arguments: &[&str]) -> Self {
        Self::within(&node.namespace, bpffs, arguments)
    }

    /// From a network namespace.
    fn within(namespace: &Namespace, bpffs: &Path, arguments: &[&str]) -> Self {
        let binary = ironlb().expect("ironlb").to_str().expect("a path");
        let bpffs = bpffs.to_str().expect("a path");
        let mut command = vec![binary, "doctor", "-o", "json", "--bpffs", bpffs];
        command.extend(arguments);
        let output = namespace.output(command).expect("ironlb");
        let report = serde_json::from_slice(&output.stdout);
        let said = String::from_utf8_lossy(&output.stderr);
        Self {
            code: output.status.code(),
            report: report.unwrap_or_else(|error| panic!("no report ({error}): {said}")),
        }
    }

    /// Before there is an agent: of the file that the node has.
    fn of_config(node: &Node, arguments: &[&str]) -> Self {
        let config = node.config.to_str().expect("a path");
        Self::of(node, &[&["--config", config], arguments].concat())
    }

    pub fn findings(&self) -> impl Iterator<Item = &Value> {
        self.report["findings"].as_array().expect("findings").iter()
    }

    fn checks(&self, status: &str) -> Vec<&str> {
        let findings = self.findings().filter(|f| f["status"] == status);
        findings.filter_map(|f| f["check"].as_str()).collect()
    }

    /// The one finding of a check that has this status.
    fn finding(&self, check: &str, status: &str) -> &Value {
        let is_it = |f: &&Value| f["check"] == check && f["status"] == status;
        let found: Vec<_> = self.findings().filter(is_it).collect();
        assert_eq!(found.len(), 1, "{check} {status}: {:#}", self.report);
        found[0]
    }

    /// Asserts that these are all errors, and the exit code says so.
    fn assert_errors(&self, checks: &[&str]) {
        assert_eq!(self.checks("error"), checks, "{:#}", self.report);
        assert_eq!(self.report["errors"], checks.len());
        assert_eq!(self.code, Some(i32::from(!checks.is_empty())));
    }

    fn assert_sound(&self) {
        self.assert_errors(&[]);
        assert_eq!(self.checks("warning"), [""; 0], "{:#}", self.report);
    }
}

/// Does what a finding says: the command lines of its remedy, up to an alternative.
fn follow(node: &Node, finding: &Value) {
    let remedy = finding["remedy"].as_str().expect("a remedy");
    let commands = remedy.split("; or ").next().expect("a command");
    node.namespace
        .exec(["sh", "-e", "-c", commands])
        .unwrap_or_else(|error| panic!("the remedy `{remedy}` does not work: {error:#}"));
}

fn text<'a>(finding: &'a Value, key: &str) -> &'a str {
    finding[key].as_str().expect("a text")
}

/// A laboratory whose node has a configuration, but no agent yet.
fn configured(mode: &str) -> Laboratory {
    let lab = Laboratory::builder().build().expect("laboratory");
    let config = lab.config(mode);
    lab.nodes[0].write_config(&config).expect("configuration");
    lab
}

fn a_healthy_node_has_no_errors_before_with_and_after_its_agent(mode: Mode) {
    let lab = mode.builder().build().expect("laboratory");
    let node = &lab.nodes[0];
    // XDP on a veth is for laboratories.
    let expected: &[&str] = match mode {
        Mode::Native => &["mode"],
        Mode::Tc => &[],
    };
    let of_nothing = Diagnosis::of(node, &[]);
    of_nothing.assert_errors(&[]);
    of_nothing.finding("config", "skipped");
    assert!(!of_nothing.checks("ok").contains(&"forwarding"));

    node.write_config(&lab.config(mode.name()))
        .expect("configuration");
    let before = Diagnosis::of_config(node, &[]);
    before.assert_errors(&[]);
    assert_eq!(before.checks("warning"), expected, "{:#}", before.report);

    let mut agent = Agent::launch(node).expect("agent");
    let with = Diagnosis::of(node, &["--strict"]);
    assert_eq!(with.checks("error"), [""; 0], "{:#}", with.report);
    assert_eq!(with.checks("warning"), expected, "{:#}", with.report);
    assert_eq!(with.code, Some(i32::from(!expected.is_empty())));
    let astray = Diagnosis::within(&lab.hosts[0].namespace, &node.bpffs, &["--no-probe"]);
    let agents = astray.finding("agent", "error");
    let said = text(agents, "found");
    assert!(said.contains("in another network namespace"), "{said}");
    let answers = with.finding("vip-conflict", "ok");
    assert_eq!(
        text(answers, "found"),
        "this node answers for it, and nobody else"
    );

    agent.process.kill().expect("kill");
    let after = Diagnosis::of(node, &[]);
    after.assert_errors(&[]);
    let agent = after.finding("agent", "warning");
    assert!(text(agent, "remedy").contains("ironlb agent"), "{agent}");
    assert_eq!(Diagnosis::of(node, &["--strict"]).code, Some(1));

    // For people: the worst first, with its remedy below it.
    let table = node.ironlb(&["doctor"]).expect("success");
    let second = table.lines().nth(1).expect("a finding");
    assert!(second.starts_with("warning"), "{table}");
    assert!(table.contains("→ start `ironlb agent`"), "{table}");
}

#[test]
fn a_node_that_does_not_route_is_told_how_to() {
    let scene = Scene::new(Mode::Tc);
    let (node, client) = (scene.node(), &scene.host().namespace);
    Diagnosis::of(node, &[]).assert_sound();
    node.namespace
        .sysctl("net.ipv4.ip_forward", "0")
        .expect("sysctl");
    get(client, VIP, API_PORT, "/").expect_err("nothing is forwarded");

    let ill = Diagnosis::of(node, &[]);
    ill.assert_errors(&["forwarding"]);
    let finding = ill.finding("forwarding", "error");
    assert_eq!(text(finding, "remedy"), "sysctl -w net.ipv4.ip_forward=1");
    follow(node, finding);
    Diagnosis::of(node, &[]).assert_sound();
    get(client, VIP, API_PORT, "/").expect("answer");

    // Of the uplink alone.
    node.namespace
        .sysctl("net.ipv4.conf.eth1.forwarding", "0")
        .expect("sysctl");
    let ill = Diagnosis::of(node, &[]);
    ill.assert_errors(&["forwarding"]);
    follow(node, ill.finding("forwarding", "error"));
    Diagnosis::of(node, &[]).assert_sound();
}

#[test]
fn a_vip_on_a_device_is_told_with_the_device() {
    let lab = configured("tc");
    let node = &lab.nodes[0];
    let add = |device| {
        node.namespace
            .ip(&format!("addr add {VIP}/32 dev {device}"))
    };
    add("lo").expect("address");
    Diagnosis::of_config(node, &[]).assert_sound();
    add("pod0").expect("address");
    let ill = Diagnosis::of_config(node, &[]);
    ill.assert_errors(&["vip-local"]);
    let finding = ill.finding("vip-local", "error");
    assert_eq!(finding["on"], json!(VIP));
    assert!(text(finding, "found").contains("pod0"), "{finding}");
    follow(node, finding);
    Diagnosis::of_config(node, &[]).assert_sound();
    Agent::launch(node).expect("the agent does not mind either");
}

fn who_else_answers_for_a_vip_is_found(mode: Mode) {
    let scene = Scene::new(mode);
    let (node, thief) = (scene.node(), &scene.lab.hosts[1].namespace);
    thief
        .ip(&format!("addr add {VIP}/32 dev eth0"))
        .expect("address");

    let ill = Diagnosis::of(node, &[]);
    ill.assert_errors(&["vip-conflict"]);
    let finding = ill.finding("vip-conflict", "error");
    assert_eq!(finding["on"], json!(VIP));
    // The native program takes the answer away before anybody can read it.
    let named = match mode {
        Mode::Tc => mac(thief.interface("eth0").expect("eth0").1),
        Mode::Native => "somebody else".to_owned(),
    };
    assert!(text(finding, "found").contains(&named), "{finding}");

    let silent = Diagnosis::of(node, &["--no-probe"]);
    silent.assert_errors(&[]);
    silent.finding("vip-conflict", "skipped");

    thief
        .ip(&format!("addr del {VIP}/32 dev eth0"))
        .expect("address");
    Diagnosis::of(node, &[]).assert_errors(&[]);
}

fn who_else_answers_for_an_ipv6_vip_is_found(mode: Mode) {
    let lab = mode.builder().build().expect("laboratory");
    let mut config = lab.config(mode.name());
    lab.with_ipv6(&mut config);
    let node = &lab.nodes[0];
    let _agent = Agent::start(node, &config).expect("agent");
    let sound = Diagnosis::of(node, &[]);
    sound.assert_errors(&[]);
    let of_vip = |diagnosis: &Diagnosis, status: &str| {
        let mut findings = diagnosis.findings();
        let found = findings.find(|f| f["check"] == "vip-conflict" && f["on"] == json!(VIP6));
        let found = found.unwrap_or_else(|| panic!("nothing of {VIP6}: {:#}", diagnosis.report));
        assert_eq!(found["status"], status, "{found}");
        text(found, "found").to_owned()
    };
    let found = of_vip(&sound, "ok");
    assert_eq!(found, "this node answers for it, and nobody else");

    let thief = &lab.hosts[1].namespace;
    let address = format!("{VIP6}/64 dev eth0");
    thief
        .ip(&format!("addr add {address} nodad"))
        .expect("address");
    // What other hosts know stays: they are not told what the thief answers.
    let host = &lab.hosts[0].namespace;
    let url = format!("http://[{VIP6}]:{API_PORT}/");
    let known = || host.exec(["ip", "-6", "neighbour", "show", "to", &VIP6.to_string()]);
    host.ip(&format!(
        "neigh replace {VIP6} lladdr {} dev eth0 nud stale",
        mac(node.mac().expect("MAC"))
    ))
    .expect("neighbour");
    let ill = Diagnosis::of(node, &[]);
    ill.assert_errors(&["vip-conflict"]);
    let named = match mode {
        Mode::Tc => mac(thief.interface("eth0").expect("eth0").1),
        Mode::Native => "somebody else".to_owned(),
    };
    let found = of_vip(&ill, "error");
    assert!(found.contains(&named), "{found}");
    let entry = known().expect("neighbours");
    assert!(entry.contains(&mac(node.mac().expect("MAC"))), "{entry}");

    thief.ip(&format!("addr del {address}")).expect("address");
    Diagnosis::of(node, &[]).assert_errors(&[]);
    host.exec(["curl", "-sS", "-f", "--max-time", "3", &url])
        .expect("answer");
}

fn mac([a, b, c, d, e, f]: [u8; 6]) -> String {
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

fn a_fleet_knows_its_own_macs_from_a_strangers(mode: Mode) {
    let (fleet, holder) = fleet(mode, 2);
    let nodes = &fleet.lab.nodes;
    let follower = &nodes[1 - holder];
    let known = wait_until("the nodes know each other", Duration::from_secs(10), || {
        Ok(
            Diagnosis::of(follower, &[]).finding("vip-conflict", "ok")["found"]
                == format!("{} answers for it", nodes[holder].name),
        )
    });
    known.expect("the holder's answer is a peer's");
    Diagnosis::of(&nodes[holder], &[]).assert_errors(&[]);
    // Without its maps it asks for the peers' addresses, too.
    let elsewhere = follower.bpffs.with_extension("none");
    let config = follower.config.to_str().expect("a path");
    let without = Diagnosis::at(follower, &elsewhere, &["--config", config]);
    let finding = without.finding("vip-conflict", "ok");
    let found = format!("{} answers for it", nodes[holder].address);
    assert_eq!(text(finding, "found"), found);

    let thief = &fleet.lab.hosts[1].namespace;
    thief
        .ip(&format!("addr add {VIP}/32 dev eth0"))
        .expect("address");
    let ill = Diagnosis::of(follower, &[]);
    ill.assert_errors(&["vip-conflict"]);
}

#[test]
fn a_node_that_is_not_heard_is_told() {
    let lab = fleet_lab(Mode::Tc, 2);
    let config = lab.config_elected("tc").expect("configuration");
    let mut fleet = Fleet::prepare(lab, &config).expect("configurations");
    fleet.launch(0).expect("agent");
    let other = fleet.lab.nodes[1].address.to_string();
    wait_for_word_of(&fleet, &other, "warning", "no agent has been heard");
    fleet.launch(1).expect("agent");
    let name = fleet.lab.nodes[1].name.to_owned();
    wait_for_word_of(&fleet, &name, "ok", "heard, and takes new flows");
    fleet.kill(1).expect("killed");
    wait_for_word_of(&fleet, &name, "warning", "its agent is not heard");
    let status = fleet.lab.nodes[1].ironlb(&["status"]).expect("status");
    let last = format!("no agent (last: by {})", fleet.lab.nodes[0].name);
    assert!(status.contains(&last), "{status}");
}

/// Waits until node 0's doctor says of another node what begins so.
fn wait_for_word_of(fleet: &Fleet, on: &str, status: &str, found: &str) {
    let mut said = Vec::new();
    let heard = wait_until("the doctor tells", Duration::from_secs(20), || {
        let diagnosis = Diagnosis::of_config(&fleet.lab.nodes[0], &["--no-probe"]);
        said = diagnosis
            .findings()
            .filter(|f| f["check"] == "peers")
            .cloned()
            .collect();
        Ok(said
            .iter()
            .any(|f| f["on"] == on && f["status"] == status && text(f, "found").starts_with(found)))
    });
    heard.unwrap_or_else(|error| panic!("{on}: {status}: {found}: {error:#}; last: {said:#?}"));
}

#[test]
fn a_foreign_xdp_program_is_named_with_what_it_prevents() {
    let lab = configured("native");
    let node = &lab.nodes[0];
    let foreign = attach_xdp(&node.namespace);
    let ill = Diagnosis::of_config(node, &[]);
    ill.assert_errors(&["foreign-xdp"]);
    let finding = ill.finding("foreign-xdp", "error");
    assert_eq!(finding["on"], "eth1");
    assert!(
        text(finding, "found").contains("`foreign` (id "),
        "{finding}"
    );
    assert!(text(finding, "remedy").starts_with("ip link set dev eth1 xdp off"));

    let config = lab.config("auto");
    let _agent = Agent::start(node, &config).expect("auto serves by TC");
    let served = Diagnosis::of_config(node, &[]);
    served.assert_errors(&[]);
    served.finding("foreign-xdp", "warning");
    drop(foreign);
    Diagnosis::of_config(node, &[]).assert_sound();
}

#[test]
fn a_firewall_that_drops_what_is_forwarded_is_told_with_the_rules_that_open_it() {
    let scene = Scene::new(Mode::Tc);
    let (node, client) = (scene.node(), &scene.host().namespace);
    let load = |rules: &str| {
        let mut nft = node.namespace.command("nft");
        run_with_input(nft.args(["-f", "-"]), rules).expect("nft");
    };
    load("table inet guard { chain fw { type filter hook forward priority 0; policy drop; }; }\n");
    get(client, VIP, API_PORT, "/").expect_err("the firewall drops it");
    let ill = Diagnosis::of(node, &[]);
    ill.assert_errors(&["forward-chain"]);
    let finding = ill.finding("forward-chain", "error");
    assert_eq!(finding["on"], "nft inet guard fw");
    follow(node, finding);
    Diagnosis::of(node, &[]).assert_sound();
    get(client, VIP, API_PORT, "/").expect("answer");

    // Rules that may or may not let it pass, INVALID, and a hostPort as portmap makes it: they bite later.
    load(
        "flush ruleset\n\
         table inet guard { chain fw { type filter hook forward priority 0; policy drop;\n\
         ct state invalid drop; ct state established,related accept; ip saddr 172.22.0.0/24 accept; }; }\n\
         table inet cni_hostport { chain hostports { ip protocol tcp th dport 6385 dnat ip to 10.244.0.9:80; }; }\n",
    );
    get(client, VIP, API_PORT, "/").expect("answer");
    let warned = Diagnosis::of(node, &[]);
    warned.assert_errors(&[]);
    let checks = ["forward-chain", "invalid-drop", "host-port"];
    assert_eq!(warned.checks("warning"), checks, "{:#}", warned.report);
    assert_eq!(Diagnosis::of(node, &["--strict"]).code, Some(1));

    // iptables' own, in whichever of the two kinds is installed.
    load("flush ruleset\n");
    node.namespace
        .exec(["iptables", "-P", "FORWARD", "DROP"])
        .expect("iptables");
    let ill = Diagnosis::of(node, &[]);
    ill.assert_errors(&["forward-chain"]);
    let finding = ill.finding("forward-chain", "error");
    assert_eq!(finding["on"], "iptables filter FORWARD");
    follow(node, finding);
    Diagnosis::of(node, &[]).assert_sound();
    get(client, VIP, API_PORT, "/").expect("answer");
}

#[test]
fn a_strict_reverse_path_filter_without_a_way_back_is_told_and_loosened() {
    let strict = NodeOptions {
        rp_filter: 1,
        ..NodeOptions::default()
    };
    let builder = Mode::Tc.builder().nodes(vec![strict]);
    let scene = Scene::with(Mode::Tc, builder, |_| {});
    let (node, client) = (scene.node(), &scene.host().namespace);
    Diagnosis::of(node, &[]).assert_sound();
    get(client, VIP, API_PORT, "/").expect("strict does no harm by itself");

    node.namespace
        .ip("route del 172.22.0.0/24 dev eth1\nroute add 172.22.0.0/24 dev pod0")
        .expect("routes");
    let limit = Duration::from_millis(500);
    connect(client, VIP, API_PORT, limit).expect_err("the filter drops it");
    let ill = Diagnosis::of(node, &[]);
    ill.assert_errors(&["rp-filter", "return-path"]);
    let filter = ill.finding("rp-filter", "error");
    assert_eq!(
        text(filter, "remedy"),
        "sysctl -w net/ipv4/conf/eth1/rp_filter=2"
    );
    follow(node, filter);
    let half = Diagnosis::of(node, &[]);
    half.assert_errors(&["return-path"]);
    follow(node, half.finding("return-path", "error"));
    Diagnosis::of(node, &[]).assert_sound();
    get(client, VIP, API_PORT, "/").expect("answer");
}

#[test]
fn a_bridge_is_looked_at_with_its_port() {
    let bridged = NodeOptions {
        bridged: true,
        rp_filter: 1,
        ..NodeOptions::default()
    };
    let builder = Mode::Tc.builder().nodes(vec![bridged]);
    let scene = Scene::with(Mode::Tc, builder, |_| {});
    let node = scene.node();
    let sound = Diagnosis::of(node, &[]);
    sound.assert_sound();
    let uplink = sound.finding("uplink", "ok");
    assert_eq!(uplink["on"], "eth1");
    assert_eq!(text(uplink, "found"), "veth, port of br-ex");
    assert_eq!(sound.finding("return-path", "ok")["on"], "br-ex");

    let thief = &scene.lab.hosts[1].namespace;
    let add = format!("addr add {VIP}/32 dev eth0");
    thief.ip(&add).expect("address");
    Diagnosis::of(node, &[]).assert_errors(&["vip-conflict"]);
}

#[test]
fn an_uplink_without_a_link_or_an_address_and_a_bad_file_are_told() {
    let lab = configured("tc");
    let node = &lab.nodes[0];
    lab.unplug("node0").expect("unplug");
    Diagnosis::of_config(node, &["--no-probe"]).assert_errors(&["carrier"]);
    lab.plug("node0").expect("plug");

    let mut config = lab.config("tc");
    config["uplinks"][0] = json!({"name": "pod0", "mode": "tc"});
    node.write_config(&config).expect("configuration");
    Diagnosis::of_config(node, &[]).assert_errors(&["own-address"]);
    config["uplinks"][0] = json!({"subnet": "172.29.0.0/24"});
    config["vips"][0]["address"] = json!("172.29.0.2");
    config["services"][0]["vip"] = json!("172.29.0.2");
    node.write_config(&config).expect("configuration");
    Diagnosis::of_config(node, &[]).assert_errors(&["uplink", "own-address"]);

    node.write_config_text("uplinks: oops")
        .expect("configuration");
    let ill = Diagnosis::of_config(node, &[]);
    ill.assert_errors(&["config"]);
    let remedy = format!("ironlb check {}", node.config.display());
    assert_eq!(text(ill.finding("config", "error"), "remedy"), remedy);
}

#[test]
fn backends_on_the_host_network_or_without_a_route_are_told() {
    let lab = configured("tc");
    let node = &lab.nodes[0];
    let mut config = lab.config("tc");
    config["services"][0]["backends"][0]["address"] = json!(node.address);
    node.write_config(&config).expect("configuration");
    let found = Diagnosis::of_config(node, &[]);
    found.assert_errors(&[]);
    let finding = found.finding("host-network", "warning");
    assert!(text(finding, "found").contains("ironic-0 (172.22.0.11:6385)"));

    let pod = &node.pods[1];
    node.namespace
        .ip(&format!("route del {}/32 dev pod1", pod.address))
        .expect("route");
    let found = Diagnosis::of_config(node, &[]);
    found.assert_errors(&[]);
    let finding = found.finding("pod-route", "warning");
    assert!(text(finding, "found").contains(&pod.address.to_string()));
}
