//! Downloads whose backend goes: they end at once, and nobody sees the pod's own address meanwhile.

use std::time::{Duration, Instant};

use etherparse::{NetSlice, SlicedPacket};
use ironlb_tests::{Agent, Download, IMAGE_PORT, Outcome, VIP, VIP6, Wire, backends, wait_until};
use lb_common::layout::map;

use crate::scene::{Mode, Scene, in_both_modes};

in_both_modes!(
    downloads_of_a_removed_backend_end_with_a_reset_though_their_clients_say_nothing,
    downloads_end_with_a_reset_when_all_is_unloaded,
);

/// Two seconds of grace, and some for a busy machine.
const ENDED: Duration = Duration::from_secs(8);

/// A scene with one pod, and a slow download from it for each version of IP. The server sends in bursts and is silent
/// between, so that its client has nothing to say either.
fn downloading(mode: Mode) -> (Scene, Vec<Download>) {
    let lab = mode.builder().image_mib(16).build().expect("laboratory");
    let mut config = lab.config(mode.name());
    lab.with_ipv6(&mut config);
    backends(&mut config).truncate(1);
    let agent = Agent::start(&lab.nodes[0], &config).expect("agent");
    let scene = Scene { agent, config, lab };
    let downloads = [VIP.to_string(), format!("[{VIP6}]")].map(|vip| {
        let url = format!("http://{vip}:{IMAGE_PORT}/images/common.img?rate=200k");
        let limit = Duration::from_secs(60);
        Download::start(&scene.host().namespace, &url, &[], limit).expect("curl")
    });
    let begun = Instant::now();
    let living = || Ok(scene.maps().living(map::LIVING)?.len() == 2);
    wait_until("both downloads run", Duration::from_secs(10), living).expect("flows");
    println!("both downloads run after {:?}", begun.elapsed());
    // The server's bursts and its silence.
    std::thread::sleep(Duration::from_secs(2));
    (scene, downloads.into())
}

fn assert_all_reset(scene: &Scene, downloads: Vec<Download>, since: Instant) {
    for mut download in downloads {
        let end = download.end(&scene.lab.image.sha256).expect("curl");
        assert_eq!(end.outcome, Outcome::Reset, "{}", end.said);
    }
    assert!(since.elapsed() < ENDED, "{:?}", since.elapsed());
}

fn downloads_of_a_removed_backend_end_with_a_reset_though_their_clients_say_nothing(mode: Mode) {
    let (mut scene, downloads) = downloading(mode);
    let wire = Wire::open(&scene.host().namespace, "eth0").expect("wire");
    let pod = &scene.lab.nodes[0].pods[0];
    let (v4, v6) = (pod.address, pod.address6);
    backends(&mut scene.config).clear();
    let removed = Instant::now();
    scene.node().write_config(&scene.config).expect("file");
    let seen = wire.receive(Duration::from_secs(5), |frame| {
        let packet = SlicedPacket::from_ethernet(frame).ok()?;
        let is_pods = match packet.net? {
            NetSlice::Ipv4(ip) => ip.header().source_addr() == v4,
            NetSlice::Ipv6(ip) => ip.header().source_addr() == v6,
            _ => false,
        };
        is_pods.then(|| frame.to_vec())
    });
    assert_eq!(seen.expect("frames"), None, "the pod's own address");
    assert_all_reset(&scene, downloads, removed);
    // The pod has been told, too, and waits for nobody.
    let sockets = ["ss", "-Htn", "state", "established"];
    let open = scene.lab.nodes[0].pods[0].namespace.exec(sockets);
    assert_eq!(open.expect("ss").trim(), "");
}

fn downloads_end_with_a_reset_when_all_is_unloaded(mode: Mode) {
    let (mut scene, downloads) = downloading(mode);
    scene.agent.process.kill().expect("kill");
    let unloaded = Instant::now();
    scene.node().ironlb(&["unload"]).expect("unload");
    assert_all_reset(&scene, downloads, unloaded);
}
