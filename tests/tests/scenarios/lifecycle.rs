//! One agent per pin root, and an end that leaves nothing.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use ironlb_tests::{API_PORT, Agent, KernelObjects, Node, VIP, wait_until};
use lb_common::LAYOUT_VERSION;
use serde_json::{Value, json};

use crate::download::as_layout;
use crate::scene::{Mode, Scene, get, in_both_modes};

in_both_modes!(
    a_second_agent_is_refused_and_unload_leaves_nothing,
    an_agent_that_cannot_see_the_kernels_types_serves,
);

fn a_second_agent_is_refused_and_unload_leaves_nothing(mode: Mode) {
    let mut scene = Scene::new(mode);
    let mut second = Agent::spawn(scene.node()).expect("second agent");
    let said = second.refusal().expect("refusal");
    let first = scene.agent.process.pid().to_string();
    assert!(
        said.contains(&first),
        "the owner's pid {first} is not named: {said}"
    );
    get(&scene.host().namespace, VIP, API_PORT, "/").expect("the first agent's state serves");

    let objects = scene.maps().kernel_objects().expect("objects");
    assert_eq!(objects.left(), objects);
    assert!(!objects.links.is_empty());
    scene.agent.process.kill().expect("kill");
    get(&scene.host().namespace, VIP, API_PORT, "/").expect("it serves without an agent");

    scene.node().ironlb(&["unload"]).expect("unload");
    let bpffs = &scene.node().bpffs;
    let pins = std::fs::read_dir(bpffs).map_or(0, Iterator::count);
    assert_eq!(pins, 0, "pins are left in {}", bpffs.display());
    // The kernel frees programs and maps a moment after the last reference.
    let left = || objects.left();
    wait_until("the kernel has freed all", Duration::from_secs(5), || {
        Ok(left() == KernelObjects::default())
    })
    .unwrap_or_else(|error| panic!("{error}: {:?}", left()));
    scene
        .node()
        .ironlb(&["unload"])
        .expect("unload once more is no error");
}

/// A program that starts `ironlb` by a line of shell, in which `"$@"` is its whole command.
fn launcher(node: &Node, line: &str) -> PathBuf {
    let path = node.config.with_extension("sh");
    let ironlb = ironlb_tests::ironlb().expect("ironlb").display();
    let script = format!("#!/bin/sh\nset -e -- {ironlb} \"$@\"\n{line}\n");
    std::fs::write(&path, script).expect("script");
    let executable = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(&path, executable).expect("permissions");
    path
}

/// As on a kernel without BTF of its own, and in a container without /sys.
fn an_agent_that_cannot_see_the_kernels_types_serves(mode: Mode) {
    let lab = mode.builder().build().expect("laboratory");
    let node = &lab.nodes[0];
    node.write_config(&lab.config(mode.name()))
        .expect("configuration");
    let blind = launcher(
        node,
        "exec unshare --mount sh -ec '\
         mount -t tmpfs tmpfs /sys/kernel/btf; test ! -e /sys/kernel/btf/vmlinux; exec \"$@\"' sh \"$@\"",
    );
    let mut agent = Agent::spawn_binary(node, &blind).expect("agent");
    agent.wait_until_ready(node).expect("ready");
    get(&lab.hosts[0].namespace, VIP, API_PORT, "/").expect("an answer");
}

/// An agent that has made its maps and waits for an API that never answers.
fn without_api(node: &Node) -> Agent {
    let uplinks = json!([{"name": "eth1", "mode": "tc"}]);
    let vips = json!([{"address": VIP, "namespaces": ["metal3"]}]);
    let config = json!({"apiVersion": "ironlb.dev/v1", "uplinks": uplinks, "vips": vips});
    node.write_config(&config).expect("configuration");
    let kubeconfig = node.config.with_extension("kubeconfig");
    let named = |what: &str, is: Value| json!([{"name": "none", what: is}]);
    let api = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "none",
        "clusters": named("cluster", json!({"server": "https://127.0.0.1:1"})),
        "users": named("user", json!({"token": "none"})),
        "contexts": named("context", json!({"cluster": "none", "user": "none"})),
    });
    std::fs::write(&kubeconfig, api.to_string()).expect("kubeconfig");
    let line = format!(
        "exec env KUBECONFIG={} \"$@\" --kubernetes --run-dir {}",
        kubeconfig.display(),
        node.state_dir().display()
    );
    let agent = Agent::spawn_binary(node, &launcher(node, &line)).expect("agent");
    let made = || Ok(node.maps().path("services").exists());
    wait_until("maps are there", Duration::from_secs(60), made)
        .unwrap_or_else(|error| panic!("{error:#}: {:?}", agent.process.log()));
    agent
}

#[test]
fn an_agent_that_ends_before_it_knows_what_to_serve_leaves_nothing() {
    let lab = Mode::Tc.builder().build().expect("laboratory");
    let node = &lab.nodes[0];
    let mut agent = without_api(node);
    agent.stop().expect("stop");
    let log = agent.process.log().expect("log");
    assert!(agent.process.wait().expect("status").success(), "{log}");
    assert!(!node.bpffs.exists(), "pins are left: {log}");
}

#[test]
fn an_upgrade_that_ends_before_it_knows_what_to_serve_ends_nothing() {
    let mut scene = Scene::new(Mode::Tc);
    scene.agent.process.kill().expect("kill");
    let former = LAYOUT_VERSION - 1;
    as_layout(scene.node(), former);
    let links = || {
        let links = scene.node().bpffs.join(format!("v{former}/links"));
        std::fs::read_dir(links).map_or(0, Iterator::count)
    };
    let before = links();
    without_api(scene.node()).stop().expect("stop");
    get(&scene.host().namespace, VIP, API_PORT, "/").expect("what served before goes on");
    assert_eq!((links(), before), (2, 2), "of ingress and egress");
}

#[test]
fn what_may_not_be_looked_at_is_not_taken_for_nothing() {
    let scene = Scene::new(Mode::Tc);
    let node = scene.node();
    let allow = |mode: u32| {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&node.bpffs, mode).expect("permissions");
    };
    allow(0);
    for verb in ["status", "flows", "monitor"] {
        let ironlb = ironlb_tests::ironlb().expect("ironlb").to_str();
        let without = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"];
        let bpffs = node.bpffs.to_str().expect("a path");
        let command = [ironlb.expect("a path"), verb, "--bpffs", bpffs];
        let output = node.namespace.output(without.iter().chain(&command));
        let output = output.expect("setpriv");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{verb}: {said}");
        assert!(said.contains("Permission denied"), "{verb}: {said}");
    }
    allow(0o700);
}

/// Neither an agent that is killed nor one that ends in peace leaves a mount, or needs another one.
#[test]
fn twenty_restarts_leave_mounts_as_they_are_and_traffic_goes_on() {
    let mut scene = Scene::new(Mode::Tc);
    // Those that the agents see: of other tests there is none in them, as names of namespaces are mounts, too.
    let mounts = || {
        let all = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        let points = all.lines().filter_map(|line| line.split(' ').nth(4));
        let own = points.filter(|point| !point.starts_with("/run/netns/"));
        own.map(str::to_owned).collect::<Vec<_>>()
    };
    let before = mounts();
    assert!(before.iter().any(|point| point == "/sys/fs/bpf"));
    let objects = scene.maps().kernel_objects().expect("objects");
    for number in 0..20 {
        if number % 2 == 0 {
            scene.agent.process.kill().expect("kill");
        } else {
            scene.agent.stop().expect("stop");
        }
        let answer = get(&scene.host().namespace, VIP, API_PORT, "/");
        answer.unwrap_or_else(|error| panic!("without agent {number}: {error:#}"));
        scene.agent = Agent::launch(scene.node()).expect("agent");
    }
    assert_eq!(mounts(), before);
    let after = scene.maps().kernel_objects().expect("objects");
    assert_eq!(after.maps, objects.maps);
    assert!(after.links.keys().eq(objects.links.keys()));
    get(&scene.host().namespace, VIP, API_PORT, "/").expect("an answer");
}
