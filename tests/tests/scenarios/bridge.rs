//! A provisioning port that is enslaved to a bridge, on a node with a firewall.

use std::time::Duration;

use ironlb_tests::{API_PORT, IMAGE_PORT, Image, NodeOptions, RPC_PORT, VIP, run_with_input};

use crate::scene::{Mode, Scene, connect, get, in_both_modes};

in_both_modes!(a_bridge_port_serves_in_spite_of_invalid_drop_and_strict_rp_filter);

fn a_bridge_port_serves_in_spite_of_invalid_drop_and_strict_rp_filter(mode: Mode) {
    let node = NodeOptions {
        bridged: true,
        rp_filter: 1,
        ..NodeOptions::default()
    };
    let builder = mode.builder().image_mib(1024).nodes(vec![node]);
    let scene = Scene::with(mode, builder, |_| {});
    // As kube-proxy programs it: half-seen flows would be cut here.
    let rules = "table inet filter {\n\
                 chain forward {\n\
                 type filter hook forward priority 0; policy accept;\n\
                 ct state invalid counter drop;\n\
                 ct state established,related accept;\n\
                 }\n}\n";
    run_with_input(
        scene.node().namespace.command("nft").args(["-f", "-"]),
        rules,
    )
    .expect("nft");

    for pod in &scene.node().pods {
        let client = &scene.host().namespace;
        get(client, VIP, pod.instance_port(), &pod.own_path()).expect("own file");
    }
    get(&scene.lab.bmc.namespace, VIP, API_PORT, "/").expect("answer");
    let download = scene.download(IMAGE_PORT, Image::URL_PATH);
    download.finish(&scene.lab.image.sha256).expect("download");
    let refused = connect(
        &scene.host().namespace,
        VIP,
        RPC_PORT,
        Duration::from_secs(1),
    );
    let refused = refused.expect_err("JSON-RPC is reachable");
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
}
