//! A flow whose reply entry is lost goes on, and the pod's address never shows on the wire.

use std::time::Duration;

use ironlb_tests::Capture;
use lb_common::layout::map;
use lb_common::verdict::Verdict;
use rustix::process::Signal;

use crate::scene::{Mode, Scene, in_both_modes};

in_both_modes!(a_lost_reply_entry_is_made_again_in_full_flow_and_after_a_pause);

fn a_lost_reply_entry_is_made_again_in_full_flow_and_after_a_pause(mode: Mode) {
    let scene = Scene::with(mode, mode.builder().image_mib(32), |_| {});
    let pod = &scene.node().pods[0];
    let wire = Capture::start(&scene.lab.switch, "node0", "net 10.244.0.0/16").expect("capture");
    let download = scene.living_download(pod.instance_port(), "/images/common.img?rate=8m");

    let lose = || {
        let living = scene.maps().living(map::LIVING_REPLY).expect("flows");
        let [(key, _)] = living[..] else {
            panic!("one living flow expected, there are {}", living.len());
        };
        let before = scene.count(Verdict::RepliedRestored);
        scene.maps().lose(map::LIVING_REPLY, &key).expect("flow");
        before
    };
    let assert_restored = |before: u64| {
        ironlb_tests::wait_until("the entry is there again", Duration::from_secs(5), || {
            Ok(scene.count(Verdict::RepliedRestored) > before
                && scene.maps().living(map::LIVING_REPLY)?.len() == 1)
        })
        .expect("restored");
    };
    assert_restored(lose());

    // Paused at the server until nothing is in flight: the next packet is the pod's.
    pod.web.signal(Signal::STOP).expect("stop");
    std::thread::sleep(Duration::from_millis(500));
    let before = lose();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(
        scene.count(Verdict::RepliedRestored),
        before,
        "it was no pause"
    );
    pod.web.signal(Signal::CONT).expect("continue");
    assert_restored(before);

    download.finish(&scene.lab.image.sha256).expect("download");
    let leaked = wire.finish().expect("capture");
    assert!(leaked.is_empty(), "{leaked:#?}");
}
