//! A big download is right, and nothing that happens to the agent disturbs it.

use std::fs;
use std::time::Duration;

use ironlb_tests::{
    API_PORT, Agent, Download, IMAGE_PORT, Image, KernelObjects, Load, Node, VIP, wait_until,
};
use lb_common::{LAYOUT_VERSION, map};
use serde_json::json;

use crate::scene::{Mode, Scene, get, in_both_modes};

in_both_modes!(
    a_big_download_arrives_unharmed,
    a_download_outlives_reloads_good_and_bad,
    a_download_and_new_connections_outlive_the_agent,
    a_download_and_new_connections_outlive_another_map_layout,
    a_map_layout_that_is_not_known_serves_on_untouched,
);

/// Slow enough that all of a scenario happens meanwhile.
const PACED: &str = "/images/common.img?rate=8m";

fn a_big_download_arrives_unharmed(mode: Mode) {
    let scene = Scene::with(mode, mode.builder().image_mib(256), |_| {});
    let sha256 = &scene.lab.image.sha256;
    let download = scene.download(IMAGE_PORT, Image::URL_PATH, &[]);
    download.finish(sha256).expect("download");
}

fn a_download_outlives_reloads_good_and_bad(mode: Mode) {
    let scene = Scene::with(mode, mode.builder().image_mib(32), |_| {});
    let client = &scene.host().namespace;
    let mut download = scene.download(IMAGE_PORT, PACED, &[]);
    std::thread::sleep(Duration::from_millis(300));
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
    assert!(
        download.running().expect("curl"),
        "the download did not last long enough"
    );
    download.finish(&scene.lab.image.sha256).expect("download");
}

fn a_download_and_new_connections_outlive_the_agent(mode: Mode) {
    // Longer than a start of the agent on a busy machine.
    let mut scene = Scene::with(mode, mode.builder().image_mib(64), |_| {});
    let before = scene.maps().kernel_objects().expect("objects");
    let download = scene.download(IMAGE_PORT, PACED, &[]);
    let after = replace_agent(&mut scene, |_| ());
    assert_eq!(before.maps, after.maps, "maps were made anew");
    assert_same_links(&before, &after);
    assert_still_whole(&scene, download);
}

/// What is pinned becomes what the last version with another layout would have left.
fn as_layout(node: &Node, version: u32) {
    let dir = |version| node.bpffs.join(format!("v{version}"));
    fs::rename(dir(LAYOUT_VERSION), dir(version)).expect("rename");
    for name in [map::ENDINGS, map::EVENTS, map::WATCH, map::TELLING] {
        fs::remove_file(dir(version).join(name)).expect("remove");
    }
}

fn a_download_and_new_connections_outlive_another_map_layout(mode: Mode) {
    let mut scene = Scene::with(mode, mode.builder().image_mib(64), |_| {});
    let before = scene.maps().kernel_objects().expect("objects");
    let download = scene.download(IMAGE_PORT, PACED, &[]);
    let mut living = Vec::new();
    wait_until("the download lives", Duration::from_secs(5), || {
        living = scene.maps().living(map::LIVING)?;
        Ok(!living.is_empty())
    })
    .expect("an entry");
    let (key, started) = (living[0].0, living[0].1.started);
    let after = replace_agent(&mut scene, |node| as_layout(node, 5));
    assert_same_links(&before, &after);
    assert!(
        before.maps.is_disjoint(&after.maps),
        "maps of the former layout are in use"
    );
    let former = scene.node().bpffs.join("v5");
    assert!(!former.exists(), "the former layout's pins are left");
    let log = scene.agent.process.log().expect("log");
    assert!(
        log.contains("took over the state of another map layout"),
        "{log}"
    );
    let flow = scene.maps().living(map::LIVING).expect("flows");
    let flow = flow.iter().find(|(other, _)| *other == key);
    assert_eq!(
        flow.map(|(_, flow)| flow.started),
        Some(started),
        "the download has lost its entry"
    );
    assert_still_whole(&scene, download);
}

fn a_map_layout_that_is_not_known_serves_on_untouched(mode: Mode) {
    let mut scene = Scene::new(mode);
    scene.agent.process.kill().expect("kill");
    as_layout(scene.node(), 4);
    let mut agent = Agent::spawn(scene.node()).expect("an agent");
    wait_until("it gives up", Duration::from_secs(60), || {
        Ok(!agent.process.running()?)
    })
    .expect("refusal");
    let said = agent.process.log().expect("log");
    assert!(
        said.contains("map layout 4") && said.contains("ironlb unload"),
        "{said}"
    );
    get(&scene.host().namespace, VIP, API_PORT, "/").expect("what was loaded serves");
    scene.node().ironlb(&["unload"]).expect("unload");
    assert!(!scene.node().bpffs.join("v4").exists(), "pins are left");
}

/// Kills the agent and starts another one while a client opens connections, none of which may fail; `between` is done to the
/// node when no agent runs.
fn replace_agent(scene: &mut Scene, between: impl FnOnce(&Node)) -> KernelObjects {
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
        threads: 2,
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
    assert_eq!(report.failed, 0, "{report:?}");
    assert!(report.served > 100, "{report:?}");
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
    assert!(
        download.running().expect("curl"),
        "the download did not last long enough"
    );
    download.finish(&scene.lab.image.sha256).expect("download");
}
