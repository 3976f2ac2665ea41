//! A big download is right, and nothing that happens to the agent disturbs it.

use std::time::Duration;

use ironlb_tests::{API_PORT, Agent, IMAGE_PORT, Image, Load, VIP, wait_until};
use serde_json::json;

use crate::scene::{Mode, Scene, get, in_both_modes};

in_both_modes!(
    a_big_download_arrives_unharmed,
    a_download_outlives_reloads_good_and_bad,
    a_download_and_new_connections_outlive_the_agent,
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
    let mut download = scene.download(IMAGE_PORT, PACED, &[]);
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
        std::thread::sleep(Duration::from_millis(300));
        scene.agent = Agent::launch(&scene.lab.nodes[0]).expect("a second agent");
        let after = scene.lab.nodes[0].maps().kernel_objects().expect("objects");
        (after, load.join().expect("load"))
    });
    assert_eq!(report.failed, 0, "{report:?}");
    assert!(report.served > 100, "{report:?}");

    let links =
        |objects: &ironlb_tests::KernelObjects| objects.links.keys().copied().collect::<Vec<_>>();
    assert!(!links(&before).is_empty());
    assert_eq!(links(&before), links(&after), "links were made anew");
    assert_eq!(before.maps, after.maps, "maps were made anew");
    for (link, program) in &after.links {
        assert_ne!(
            before.links[link], *program,
            "link {link} still runs the old program"
        );
    }
    assert!(
        download.running().expect("curl"),
        "the download did not last long enough"
    );
    download.finish(&scene.lab.image.sha256).expect("download");
}
