//! Looking inside: what a monitor shows while real clients come and go, and what is known the morning after.

use std::time::Duration;

use ironlb_tests::{
    API_PORT, Agent, Download, IMAGE_PORT, Outcome, Process, RPC_PORT, VIP, backends, heads,
    wait_until,
};
use lb_common::events::Watch;
use lb_common::map;
use rustix::process::Signal;
use serde_json::Value;

use crate::scene::{Mode, Scene, connect, in_both_modes};

in_both_modes!(
    a_monitor_shows_flows_and_refusals_as_they_happen,
    the_frames_of_refusals_are_what_tcpdump_reads,
    the_morning_after_tells_how_long_downloads_ended,
);

/// Patience with a busy machine.
const SOON: Duration = Duration::from_secs(10);
/// How long a client waits for its refusal.
const REFUSED: Duration = Duration::from_secs(2);

/// A monitor that watches already.
fn monitor(scene: &Scene, options: &[&str]) -> Process {
    let words = [&["monitor"], options].concat();
    let process = scene.node().start_ironlb(&words).expect("monitor");
    wait_until("the monitor watches", SOON, || {
        let watch: Watch = scene.maps().first(map::WATCH)?;
        Ok(watch.until != 0 && watch.pid == process.pid())
    })
    .unwrap_or_else(|error| panic!("{error}: {:?}", process.log()));
    process
}

/// What a monitor has said, once `enough` is in it.
fn said(monitor: &Process, what: &str, enough: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    let events = || {
        let log = monitor.log()?;
        // The last line may be half-written.
        let lines = log
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        anyhow::Ok(lines.collect::<Vec<Value>>())
    };
    wait_until(what, SOON, || Ok(enough(&events()?)))
        .unwrap_or_else(|error| panic!("{error}: {}", monitor.log().expect("log")));
    events().expect("log")
}

fn interrupt(mut monitor: Process) {
    monitor.signal(Signal::INT).expect("signal");
    wait_until("the monitor ends", SOON, || Ok(!monitor.running()?)).expect("end");
    let status = monitor.wait().expect("status");
    assert!(status.success(), "{:?}", monitor.log());
}

fn a_monitor_shows_flows_and_refusals_as_they_happen(mode: Mode) {
    let scene = Scene::new(mode);
    let host = &scene.host().namespace;
    let node = scene.node();
    let watch = monitor(&scene, &["-o", "json"]);

    let second = node.ironlb(&["monitor", "--for", "5s"]);
    let text = format!("{:#}", second.expect_err("a second monitor"));
    assert!(text.contains(&watch.pid().to_string()), "{text}");

    let url = format!("http://{VIP}:{API_PORT}/");
    heads(host, &url, 1).expect("an answer");
    connect(host, VIP, RPC_PORT, REFUSED).expect_err("not for clients");
    let of = |events: &[Value], kind: &str, port: u16| {
        let mut events = events.iter();
        let found = events.find(|event| event["kind"] == kind && event["vip_port"] == port);
        found.cloned()
    };
    let events = said(&watch, "a flow's life and a refusal are shown", |events| {
        of(events, "ended", API_PORT).is_some() && of(events, "refusal", RPC_PORT).is_some()
    });
    let client = scene.host().address.to_string();
    let [new, living, ended] = ["new", "living", "ended"].map(|kind| {
        let event = of(&events, kind, API_PORT);
        event.unwrap_or_else(|| panic!("no flow is {kind}: {events:#?}"))
    });
    assert_eq!(new["verdict"], "forwarded_new");
    for event in [&new, &living, &ended] {
        assert_eq!(event["client"], client, "{event}");
        assert_eq!(event["vip"], VIP.to_string());
        assert_eq!(event["client_port"], new["client_port"]);
        let interface = event["interface"].as_str().expect("interface");
        assert!(!interface.is_empty(), "{event}");
        let instance = event["instance"].as_str().expect("instance");
        let mut pods = node.pods.iter();
        let pod = pods.find(|pod| pod.instance == instance).expect("a pod");
        assert_eq!(event["pod"], pod.address.to_string());
        assert_eq!(event["service"], "ironic");
    }
    assert!(ended["bytes_in"].as_u64() > Some(100), "{ended}");
    assert!(ended["bytes_out"].as_u64() > Some(100), "{ended}");
    let by = ended["by"].as_str().expect("who");
    assert!(["client_fin", "pod_fin"].contains(&by), "{ended}");
    let refusal = of(&events, "refusal", RPC_PORT).expect("seen");
    assert_eq!(refusal["verdict"], "refused_no_service");
    assert_eq!(refusal["client"], client);
    assert_eq!(refusal["packet"]["flags"], "SYN");
    interrupt(watch);
    let idle: Watch = scene.maps().first(map::WATCH).expect("watch");
    assert_eq!(idle.until, 0, "it leaves nobody to tell to");

    // For people, by itself to an end, and only what is asked for.
    let options = ["--kind", "refusal", "--count", "1", "--client", &client];
    let mut brief = monitor(&scene, &options);
    heads(host, &url, 1).expect("an answer");
    connect(host, VIP, RPC_PORT, REFUSED).expect_err("not for clients");
    assert!(brief.wait().expect("status").success());
    let line = brief.log().expect("log");
    let wanted = format!("> {VIP}:{RPC_PORT}");
    assert!(line.contains(&client) && line.contains(&wanted), "{line}");
    assert_eq!(line.lines().count(), 1, "{line}");

    // A killed one is in nobody's way.
    let mut killed = monitor(&scene, &[]);
    killed.kill().expect("kill");
    interrupt(monitor(&scene, &["--kind", "drop"]));
    let error = node.ironlb(&["monitor", "--service", "nobody", "--for", "1s"]);
    let error = format!("{:#}", error.expect_err("no such service"));
    assert!(error.contains("ironic"), "{error}");
}

fn the_frames_of_refusals_are_what_tcpdump_reads(mode: Mode) {
    let scene = Scene::new(mode);
    let file = scene.node().config.with_extension("pcap");
    let path = file.to_str().expect("text");
    let watch = monitor(&scene, &["--kind", "refusal", "--pcap", path, "-o", "json"]);
    let host = &scene.host().namespace;
    for _ in 0..3 {
        connect(host, VIP, RPC_PORT, REFUSED).expect_err("not for clients");
    }
    said(&watch, "three refusals are shown", |events| {
        events.len() >= 3
    });
    interrupt(watch);
    let read = ["tcpdump", "-nr", path, "tcp[tcpflags] = tcp-syn"];
    let read = scene.node().namespace.exec(read).expect("tcpdump reads it");
    let packets: Vec<_> = read.lines().collect();
    assert_eq!(packets.len(), 3, "{read}");
    let from = format!("IP {}.", scene.host().address);
    let to = format!("> {VIP}.{RPC_PORT}: Flags [S]");
    for packet in packets {
        assert!(packet.contains(&from) && packet.contains(&to), "{packet}");
    }
}

fn the_morning_after_tells_how_long_downloads_ended(mode: Mode) {
    const MIB: u64 = 1 << 20;
    let mut scene = Scene::with(mode, mode.builder().image_mib(24), |_| {});
    let url = format!("http://{VIP}:{IMAGE_PORT}/images/common.img");
    let limit = Duration::from_secs(60);
    let client = scene.host().address.to_string();
    let paced = |scene: &Scene, rate: &str| {
        let url = format!("{url}?rate={rate}");
        Download::start(&scene.host().namespace, &url, &[], limit).expect("curl")
    };
    let mut whole = paced(&scene, "2m");
    // The agent is away at its end: what it did not see is in the ring.
    std::thread::sleep(Duration::from_secs(2));
    scene.agent.process.kill().expect("kill");
    let end = whole.end(&scene.lab.image.sha256).expect("curl");
    assert_eq!(end.outcome, Outcome::Whole, "{}", end.said);
    scene.agent = Agent::launch(scene.node()).expect("agent");
    let state_dir = scene.node().state_dir();
    let state_dir = state_dir.to_str().expect("text");
    let ended = |scene: &Scene, wanted: usize| -> Vec<Value> {
        let of_client = ["flows", "--ended", "--since", "5m", "--client", &client];
        let verb = [&of_client[..], &["--state-dir", state_dir, "-o", "json"]].concat();
        // Until the agent has made the record there is none to read.
        let read = || {
            let text = scene.node().ironlb(&verb).ok()?;
            serde_json::from_str::<Vec<Value>>(&text).ok()
        };
        wait_until("the ends are recorded", SOON, || {
            Ok(read().is_some_and(|flows| flows.len() >= wanted))
        })
        .unwrap_or_else(|error| panic!("{error}: {:?}", read()));
        read().expect("record")
    };
    let flows = ended(&scene, 1);
    let [flow] = &flows[..] else {
        panic!("one long flow: {flows:#?}")
    };
    let got = flow["bytes_out"].as_u64().expect("bytes");
    assert!(
        (24 * MIB..26 * MIB).contains(&got),
        "{got} bytes for 24 MiB"
    );
    let seconds = flow["duration_seconds"].as_f64().expect("seconds");
    assert!((10.0..60.0).contains(&seconds), "{seconds} s");
    assert_eq!(flow["by"], "client_fin", "curl closes");
    assert_eq!(flow["vip_port"], IMAGE_PORT);
    assert_eq!(flow["instance"], end.instance);
    assert_eq!(flow["service"], "ironic");
    assert_eq!(flow["refusal"], Value::Null);

    // A pod dies under a download, without a word, and then it is no backend any more.
    let mut cut = paced(&scene, "200k");
    std::thread::sleep(Duration::from_secs(2));
    let flows = ["flows", "--state", "living", "--port", "6180", "-o", "json"];
    let flows = scene.node().ironlb(&flows).expect("flows");
    let flows: Vec<Value> = serde_json::from_str(&flows).expect("JSON");
    let instance = flows[0]["instance"].as_str().expect("instance");
    let mut pods = scene.node().pods.iter();
    let pod = pods.find(|pod| pod.instance == instance).expect("a pod");
    let down = ["ip", "link", "set", "eth0", "down"];
    pod.namespace.exec(down).expect("no more of it");
    let address = pod.address.to_string();
    backends(&mut scene.config).retain(|backend| backend["address"] != address);
    scene.node().write_config(&scene.config).expect("file");
    let end = cut.end(&scene.lab.image.sha256).expect("curl");
    assert_eq!(end.outcome, Outcome::Reset, "{}", end.said);
    let flows = ended(&scene, 2);
    assert_eq!(flows.len(), 2, "{flows:#?}");
    let cut = &flows[0];
    assert_eq!((&cut["by"], &cut["pod"]), (&"gone".into(), &address.into()));
    assert!(cut["bytes_out"].as_u64() > Some(200_000), "{cut}");
    let log = scene.agent.process.log().expect("log");
    assert!(log.contains("ended abnormally: backend gone"), "{log}");

    // Both survive the agent, and people can read them.
    scene.agent.stop().expect("stop");
    let table = ["flows", "--ended", "--state-dir", state_dir];
    let table = scene.node().ironlb(&table).expect("record");
    for text in ["backend gone", "client closed"] {
        assert!(table.contains(text), "{table}");
    }
}
