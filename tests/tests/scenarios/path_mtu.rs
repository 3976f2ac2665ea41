//! ICMP: what says that packets are too big reaches whoever sends them, and the VIP answers a ping.

use std::time::Duration;

use ironlb_tests::{API_PORT, Agent, Download, Host, IMAGE_PORT, VIP, VIP6};
use lb_common::verdict::Verdict;

use crate::scene::{Mode, Scene, in_both_modes};

in_both_modes!(
    a_download_through_a_link_with_a_smaller_mtu_completes,
    an_upload_to_a_pod_behind_a_smaller_mtu_completes,
    the_vip_answers_a_ping,
);

const MTU: u32 = 1400;

fn scene(mode: Mode) -> Scene {
    let lab = mode.builder().image_mib(10).build().expect("laboratory");
    let mut config = lab.config(mode.name());
    lab.with_ipv6(&mut config);
    let agent = Agent::start(&lab.nodes[0], &config).expect("agent");
    Scene { agent, config, lab }
}

/// The VIPs as URLs have them.
fn vips() -> [String; 2] {
    [VIP.to_string(), format!("[{VIP6}]")]
}

fn a_download_through_a_link_with_a_smaller_mtu_completes(mode: Mode) {
    let scene = scene(mode);
    let far = scene.lab.host_behind(MTU).expect("routers");
    for vip in vips() {
        let before = scene.count(Verdict::ForwardedIcmp);
        let url = format!("http://{vip}:{IMAGE_PORT}/images/common.img");
        let limit = Duration::from_secs(20);
        let download = Download::start(&far.namespace, &url, &[], limit).expect("curl");
        download
            .finish(&scene.lab.image.sha256)
            .expect("a whole image");
        let steered = scene.count(Verdict::ForwardedIcmp) - before;
        assert!(steered > 0, "{vip}: no pod was told of the smaller MTU");
    }
}

/// The node's own kernel tells the client then, about a packet to a pod that the client does not know.
fn an_upload_to_a_pod_behind_a_smaller_mtu_completes(mode: Mode) {
    let scene = scene(mode);
    for index in 0..scene.node().pods.len() {
        let link = format!("link set pod{index} mtu {MTU}");
        scene.node().namespace.ip(&link).expect("MTU");
    }
    let file = scene.lab.directory().join("upload");
    std::fs::write(&file, vec![b'x'; 900 << 10]).expect("file");
    let body = format!("@{}", file.display());
    for vip in vips() {
        let before = scene.count(Verdict::RepliedIcmp);
        let url = format!("http://{vip}:{API_PORT}/v1/nodes");
        let words = ["curl", "-sS", "-f", "--max-time", "15", "-H", "Expect:"];
        let body = ["--data-binary", &body, &url];
        let upload = words.iter().chain(&body);
        let answer = scene.host().namespace.exec(upload).expect("upload");
        assert!(answer.contains("instance"), "{answer}");
        let told = scene.count(Verdict::RepliedIcmp) - before;
        assert!(
            told > 0,
            "{vip}: the client was not told of the smaller MTU"
        );
    }
}

fn the_vip_answers_a_ping(mode: Mode) {
    let scene = scene(mode);
    let ping = |host: &Host, size: &str| {
        for vip in [VIP.to_string(), VIP6.to_string()] {
            let words = [
                "ping", "-n", "-c", "3", "-i", "0.2", "-w", "5", "-s", size, &vip,
            ];
            host.namespace.exec(words).expect("three answers");
        }
    };
    for size in ["0", "56", "1400"] {
        ping(scene.host(), size);
    }
}
