//! A big download is right, and nothing that happens to the agent disturbs it.

use std::fs;
use std::io::{Read as _, Write as _};
use std::mem::offset_of;
use std::net::IpAddr;
use std::time::Duration;

use aya::maps::{HashMap, MapData};
use ironlb_tests::{
    API_PORT, Agent, Download, IMAGE_PORT, Image, KernelObjects, Load, Node, VIP, ironlb,
    wait_until,
};
use lb_common::layout::{Addr, Flow, FlowKey, LAYOUT_VERSION, map};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::scene::{Mode, Scene, connect, get, in_both_modes};

in_both_modes!(
    a_big_download_arrives_unharmed,
    a_download_outlives_reloads_good_and_bad,
    a_download_and_new_connections_outlive_the_agent,
    a_download_and_new_connections_outlive_another_map_layout,
    a_download_and_new_connections_outlive_a_map_layout_without_rings,
    a_map_layout_that_is_not_known_serves_on_untouched,
    an_idle_connection_outlives_an_upgrade_with_its_pod,
);

/// Slow enough that all of a scenario happens meanwhile.
const PACED: &str = "/images/common.img?rate=8m";

fn a_big_download_arrives_unharmed(mode: Mode) {
    let scene = Scene::with(mode, mode.builder().image_mib(256), |_| {});
    let sha256 = &scene.lab.image.sha256;
    let download = scene.download(IMAGE_PORT, Image::URL_PATH);
    download.finish(sha256).expect("download");
}

fn a_download_outlives_reloads_good_and_bad(mode: Mode) {
    let scene = Scene::with(mode, mode.builder().image_mib(32), |_| {});
    let client = &scene.host().namespace;
    let mut download = scene.living_download(IMAGE_PORT, PACED);
    let instance = &scene.node().pods[1];

    let mut moved = scene.config.clone();
    moved["services"][0]["instance_ports"]["images"] = json!("6300-6331");
    scene.node().write_config(&moved).expect("configuration");
    wait_until("the new port is served", Duration::from_secs(5), || {
        Ok(get(client, VIP, 6301, &instance.own_path()).is_ok())
    })
    .expect("reload");
    get(client, VIP, 6201, &instance.own_path()).expect_err("the old port is served still");

    let said = scene.agent.process.log().expect("log").len();
    scene
        .node()
        .write_config_text("services: [ never closed")
        .expect("configuration");
    wait_until(
        "the agent says that the file is bad",
        Duration::from_secs(5),
        || {
            let log = scene.agent.process.log()?;
            let file = scene.node().config.display().to_string();
            Ok(log[said..].contains(&file))
        },
    )
    .expect("complaint");
    get(client, VIP, 6301, &instance.own_path()).expect("the last good state serves");
    get(client, VIP, API_PORT, "/").expect("the last good state serves");

    scene
        .node()
        .write_config(&scene.config)
        .expect("configuration");
    wait_until(
        "the first port is served again",
        Duration::from_secs(5),
        || Ok(get(client, VIP, 6201, &instance.own_path()).is_ok()),
    )
    .expect("reload");
    download.goes_on().expect("too short");
    download.finish(&scene.lab.image.sha256).expect("download");
}

fn a_download_and_new_connections_outlive_the_agent(mode: Mode) {
    // Longer than a start of the agent on a busy machine.
    let mut scene = Scene::with(mode, mode.builder().image_mib(64), |_| {});
    let before = scene.maps().kernel_objects().expect("objects");
    let download = scene.living_download(IMAGE_PORT, PACED);
    let after = replace_agent(&mut scene, 0, |_| ());
    assert_eq!(before.maps, after.maps, "maps were made anew");
    assert_same_links(&before, &after);
    assert_still_whole(&scene, download);
}

/// What is pinned becomes what a version with another layout would have left.
pub fn as_layout(node: &Node, version: u32) {
    let dir = |version| node.bpffs.join(format!("v{version}"));
    fs::rename(dir(LAYOUT_VERSION), dir(version)).expect("rename");
}

/// A flow's entry up to layout 6: with whole times of 8 bytes each.
fn former_flow(flow: &Flow, started: u64) -> [u8; 64] {
    // SAFETY: repr(C) without padding.
    let bytes: [u8; size_of::<Flow>()] = unsafe { std::mem::transmute(*flow) };
    let (before, after) = (
        offset_of!(Flow, started),
        offset_of!(Flow, last_seen) + size_of_val(&flow.last_seen),
    );
    let last_seen = (1 << 32) | u64::from(flow.last_seen);
    let parts = [
        &bytes[..before],
        &started.to_ne_bytes(),
        &last_seen.to_ne_bytes(),
        &bytes[after..],
    ];
    parts.concat().try_into().expect("64 bytes")
}

/// What is pinned becomes what a version with longer entries of flows (layout 5 or 6) would have left. Its programs write to the
/// maps that they have: what they do from now on is not in those that are pinned.
fn as_long_flows(node: &Node, version: u32, started: u64) {
    let maps = node.maps();
    let flows = [map::LIVING, map::LIVING_REPLY, map::YOUNG].map(|name| {
        let flows = maps.living(name).expect("flows");
        let mut former = HashMap::<MapData, FlowKey, [u8; 64]>::create(131_072, 0).expect("a map");
        for (key, flow) in flows {
            let flow = former_flow(&flow, started);
            former.insert(key, flow, 0).expect("an entry");
        }
        (name, former)
    });
    as_layout(node, version);
    let pin = |name| node.bpffs.join(format!("v{version}")).join(name);
    for (name, former) in flows {
        fs::remove_file(pin(name)).expect("remove");
        former.pin(pin(name)).expect("pin");
    }
    if version == 5 {
        for name in [map::ENDINGS, map::EVENTS, map::WATCH, map::TELLING] {
            fs::remove_file(pin(name)).expect("remove");
        }
    }
}

fn a_download_and_new_connections_outlive_another_map_layout(mode: Mode) {
    outlive_layout(mode, 6);
}

fn a_download_and_new_connections_outlive_a_map_layout_without_rings(mode: Mode) {
    outlive_layout(mode, 5);
}

fn outlive_layout(mode: Mode, version: u32) {
    const HOUR: u64 = 3600;
    const SECOND: u64 = 1_000_000_000;
    let mut scene = Scene::with(mode, mode.builder().image_mib(64), |_| {});
    let before = scene.maps().kernel_objects().expect("objects");
    let download = scene.living_download(IMAGE_PORT, PACED);
    let living = scene.maps().living(map::LIVING).expect("flows");
    let key = living[0].0;
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let up = now.tv_sec.cast_unsigned();
    // As far as there has been one.
    let hour = HOUR.min(up);
    // What the programs write after that is in no pinned map: connections that are open when they are replaced are lost.
    let after = replace_agent(&mut scene, THREADS, |node| {
        as_long_flows(node, version, (up - hour) * SECOND);
    });
    assert_same_links(&before, &after);
    assert!(
        before.maps.is_disjoint(&after.maps),
        "maps of the former layout are in use"
    );
    let former = scene.node().bpffs.join(format!("v{version}"));
    assert!(!former.exists(), "the former layout's pins are left");
    let log = scene.agent.process.log().expect("log");
    assert!(
        log.contains("took over the state of another map layout"),
        "{log}"
    );
    let flow = scene.maps().living(map::LIVING).expect("flows");
    let taken = flow.iter().find(|(other, _)| *other == key);
    let (_, taken) = taken.expect("the download has lost its entry");
    assert_eq!(
        (taken.addr, taken.port, taken.backend),
        (living[0].1.addr, living[0].1.port, living[0].1.backend)
    );
    let client = IpAddr::from(key.client).to_string();
    let flows = scene
        .node()
        .ironlb(&["flows", "-o", "json", "--client", &client])
        .expect("flows");
    let flows: Value = serde_json::from_str(&flows).expect("JSON");
    let age = |flow: &Value| flow["age_seconds"].as_f64();
    let ages = flows.as_array().into_iter().flatten().filter_map(age);
    let oldest = ages.fold(0.0, f64::max) as u64;
    assert!((hour..hour + 60).contains(&oldest), "{flows}");
    assert_still_whole(&scene, download);
}

fn a_map_layout_that_is_not_known_serves_on_untouched(mode: Mode) {
    let mut scene = Scene::new(mode);
    scene.agent.process.kill().expect("kill");
    as_layout(scene.node(), 4);
    let mut agent = Agent::spawn(scene.node()).expect("an agent");
    let said = agent.refusal().expect("refusal");
    assert!(
        said.contains("map layout 4") && said.contains("ironlb unload"),
        "{said}"
    );
    get(&scene.host().namespace, VIP, API_PORT, "/").expect("what was loaded serves");
    scene.node().ironlb(&["unload"]).expect("unload");
    assert!(!scene.node().bpffs.join("v4").exists(), "pins are left");
}

/// How many connections are open at a time while an agent is replaced.
const THREADS: u32 = 2;

/// Kills the agent and starts another one while a client opens connections, of which no more than `lost` may fail; `between` is
/// done to the node when no agent runs.
fn replace_agent(scene: &mut Scene, lost: u32, between: impl FnOnce(&Node)) -> KernelObjects {
    // The program itself answers, and nobody else would: a moment without it is a loss.
    let quick = ["ping", "-q", "-n", "-i", "0.005", &VIP.to_string()];
    let mut ping = scene.host().namespace.spawn("ping", quick).expect("ping");
    let node = scene.node().namespace.clone();
    let watch = ["ip", "-o", "monitor", "link"];
    let mut events = node.spawn("events", watch).expect("ip monitor");
    wait_until("events of links are seen", Duration::from_secs(5), || {
        node.ip("link set eth1 txqueuelen 999\nlink set eth1 txqueuelen 1000")?;
        Ok(events.log()?.contains("eth1"))
    })
    .expect("an event");
    // Those of the last change, too.
    std::thread::sleep(Duration::from_millis(200));
    let seen = events.log().expect("log").len();
    // From an address of its own: curl may have taken any port of the host's first.
    let source = std::net::Ipv4Addr::new(172, 22, 0, 200);
    let line = format!("addr add {source}/24 dev eth0");
    scene.host().namespace.ip(&line).expect("address");
    let load = Load {
        sources: vec![source],
        targets: vec![std::net::SocketAddrV4::new(VIP, API_PORT)],
        first: 0,
        count: 50_000,
        limit: Duration::from_millis(2500),
        // Far shorter than the download that goes on beside.
        patience: Duration::from_secs(2),
        threads: THREADS,
    };
    let (after, report) = std::thread::scope(|scope| {
        let client = &scene.lab.hosts[0].namespace;
        let load = scope.spawn(move || load.run(client).expect("load"));
        std::thread::sleep(Duration::from_millis(300));
        scene.agent.process.kill().expect("kill");
        between(&scene.lab.nodes[0]);
        std::thread::sleep(Duration::from_millis(300));
        scene.agent = Agent::launch(&scene.lab.nodes[0]).expect("a second agent");
        let after = scene.lab.nodes[0].maps().kernel_objects().expect("objects");
        (after, load.join().expect("load"))
    });
    assert!(report.failed <= lost, "{report:?}");
    assert!(report.served > 100, "{report:?}");
    let event = events.log().expect("log").split_off(seen);
    assert_eq!(event, "", "an event of a link");
    events.kill().expect("kill");
    ping.signal(Signal::INT).expect("ping");
    ping.wait().expect("ping");
    let said = ping.log().expect("log");
    assert!(said.contains(" 0% packet loss"), "{said}");
    after
}

fn assert_same_links(before: &KernelObjects, after: &KernelObjects) {
    let links = |objects: &KernelObjects| objects.links.keys().copied().collect::<Vec<_>>();
    assert!(!links(before).is_empty());
    assert_eq!(links(before), links(after), "links were made anew");
    for (link, program) in &after.links {
        assert_ne!(
            before.links[link], *program,
            "link {link} still runs the old program"
        );
    }
}

fn assert_still_whole(scene: &Scene, mut download: Download) {
    download.goes_on().expect("too short");
    download.finish(&scene.lab.image.sha256).expect("download");
}

/// No time is too long: the entries are made to look weeks old.
fn an_idle_connection_outlives_an_upgrade_with_its_pod(mode: Mode) {
    /// 25 days on a kernel with 1,000 a second, which is the fastest.
    const WEEKS: u32 = 1 << 31;
    let mut scene = Scene::new(mode);
    let client = scene.host().namespace.clone();
    let mut idle: Vec<_> = (0..6)
        .map(|_| {
            let limit = Duration::from_secs(2);
            let mut flow = connect(&client, VIP, API_PORT, limit).expect("connect");
            flow.write_all(b"GET /v1 HTTP/1.0\r\n").expect("send");
            flow
        })
        .collect();
    let living = || scene.maps().living(map::LIVING).expect("flows");
    let all = || Ok(living().len() == 6);
    wait_until("all live", Duration::from_secs(5), all).expect("flows");
    let pod_of = |port: u16| {
        let flows = living();
        let flow = flows.iter().find(|(key, _)| key.client_port == port);
        let address = flow.expect("a flow").1.addr;
        let pods = scene.node().pods.iter();
        let mut pods = pods.filter(|pod| Addr::from(pod.address) == address);
        pods.next().expect("a pod").instance.clone()
    };
    let ports = idle
        .iter()
        .map(|flow| flow.local_addr().expect("own").port());
    let pods: Vec<_> = ports.map(pod_of).collect();
    scene.maps().age(WEEKS).expect("maps");

    // An upgrade: the new version is another file.
    let next = scene.lab.directory().join("ironlb-next");
    fs::copy(ironlb().expect("ironlb"), &next).expect("copy");
    scene.agent.stop().expect("stop");
    get(&client, VIP, API_PORT, "/").expect("it serves without an agent");
    let node = &scene.lab.nodes[0];
    scene.agent = Agent::spawn_binary(node, &next).expect("the next version");
    scene.agent.wait_until_ready(node).expect("ready");
    // Whatever an agent does after its start.
    std::thread::sleep(Duration::from_secs(3));

    for (flow, pod) in idle.iter_mut().zip(pods) {
        flow.set_read_timeout(Some(Duration::from_secs(2)))
            .expect("timeout");
        flow.write_all(b"\r\n").expect("send");
        let mut answer = String::new();
        flow.read_to_string(&mut answer).expect("the answer");
        assert!(answer.contains(&format!("\"{pod}\"")), "{pod}: {answer}");
    }
}
