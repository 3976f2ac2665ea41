//! The agent's own port: who is answered there, and with what.

use std::io::{ErrorKind::WouldBlock, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ironlb_tests::{API_PORT, Agent, IMAGE_PORT, Laboratory, Namespace, VIP, ironlb, wait_until};
use serde_json::Value;

use crate::scene::{Mode, Scene, connect, get, in_both_modes};

const PORT: u16 = 9469;
const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;
/// The node's address on its pods' links.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 1);

in_both_modes!(
    metrics_count_what_passed,
    a_pod_learns_its_urls_and_nobody_elses,
);

/// Status and body, whatever the status.
fn ask(client: &Namespace, address: Ipv4Addr, path: &str, options: &[&str]) -> (String, String) {
    let url = format!("http://{address}:{PORT}{path}");
    let base = ["curl", "-sS", "--max-time", "5", "-w", "\n%{http_code}"];
    let said = client
        .exec(base.iter().chain(options).chain(&[url.as_str()]))
        .expect("curl");
    let (body, status) = said.rsplit_once('\n').expect("a status");
    (status.to_owned(), body.to_owned())
}

fn metric(text: &str, series: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(series));
    let value = line.unwrap_or_else(|| panic!("no {series} in\n{text}"));
    value.trim().parse().expect("a number")
}

fn metrics_count_what_passed(mode: Mode) {
    let scene = Scene::new(mode);
    let node = &scene.node().namespace;
    let host = &scene.host().namespace;
    for _ in 0..5 {
        get(host, VIP, API_PORT, "/").expect("an answer");
    }
    let pod = &scene.node().pods[1];
    let image = format!("http://{VIP}:{}/images/common.img", pod.instance_port());
    host.exec([
        "curl",
        "-sSf",
        "--max-time",
        "20",
        "-o",
        "/dev/null",
        &image,
    ])
    .expect("4 MiB");
    connect(host, VIP, 6189, Duration::from_secs(1)).expect_err("JSON-RPC is refused");

    let (status, text) = ask(node, LOOPBACK, "/metrics", &[]);
    assert_eq!(status, "200", "{text}");
    let port = format!(r#"vip="{VIP}",port="{API_PORT}",service="ironic",port_name="api",slot="""#);
    assert_eq!(
        metric(&text, &format!("ironlb_port_flows_total{{{port}}}")),
        5.0
    );
    let own = format!(
        r#"vip="{VIP}",port="{}",service="ironic",port_name="images",slot="1",instance_name="{}",address="{}""#,
        pod.instance_port(),
        pod.instance,
        pod.address
    );
    assert_eq!(
        metric(&text, &format!("ironlb_backend_flows_total{{{own}}}")),
        1.0
    );
    let bytes = format!("ironlb_backend_bytes_total{{{own},direction=\"out\"}}");
    let size = metric(&text, &bytes);
    assert!(
        size > f64::from(4 << 20),
        "4 MiB were {size} bytes of frames"
    );
    let refused = r#"ironlb_packets_total{verdict="refused_no_service"}"#;
    assert_eq!(metric(&text, refused), 1.0);
    let attached = format!(
        r#"ironlb_uplink_attached{{interface="eth1",mode="{}"}}"#,
        mode.name()
    );
    assert_eq!(metric(&text, &attached), 1.0);
    assert_eq!(metric(&text, "ironlb_ready"), 1.0);
    assert_eq!(metric(&text, "ironlb_state_age_seconds"), 0.0);
    assert_eq!(
        metric(&text, r#"ironlb_flow_table_entries{table="living"}"#),
        131_072.0
    );
    for (path, body) in [("/healthz", "ok\n"), ("/readyz", "ready\n")] {
        assert_eq!(
            ask(node, LOOPBACK, path, &[]),
            ("200".to_owned(), body.to_owned())
        );
    }
}

fn a_pod_learns_its_urls_and_nobody_elses(mode: Mode) {
    let scene = Scene::new(mode);
    let [first, second, ..] = &scene.node().pods[..] else {
        panic!("pods");
    };
    // No option and no variable: the default gateway is the node.
    let written = || {
        let arguments = [
            "instance-env",
            "--images",
            "images",
            "--api",
            "api",
            "--timeout",
            "5s",
            "-o",
            "-",
        ];
        let mut command = second.namespace.command(ironlb().expect("a binary"));
        command
            .args(arguments)
            .env_remove("HOST_IP")
            .env_remove("NODE_IP");
        ironlb_tests::run(&mut command).expect("instance-env")
    };
    let port = second.instance_port();
    assert_eq!(
        written(),
        format!(
            "IRONIC_HTTP_URL=http://{VIP}:{port}\n\
             IRONIC_IPA_BASE_URL=http://{VIP}:{port}\n\
             IRONIC_EXTERNAL_HTTP_URL=http://{VIP}:{port}\n\
             IRONIC_BASE_URL=http://{VIP}:{API_PORT}\n\
             IRONIC_EXTERNAL_CALLBACK_URL=http://{VIP}:{API_PORT}\n"
        )
    );

    let (status, body) = ask(&second.namespace, GATEWAY, "/v1/instances/self", &[]);
    assert_eq!(status, "200", "{body}");
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(answer["address"], second.address.to_string());
    assert_eq!(answer["services"][0]["instance"], second.instance);
    assert_eq!(answer["services"][0]["ports"]["images"], IMAGE_PORT);

    let other = format!("/v1/instances/{}", first.address);
    let (status, body) = ask(&second.namespace, GATEWAY, &other, &[]);
    assert_eq!(status, "403", "{body}");
    // The node itself is no instance, and nothing leads to it.
    let (status, body) = ask(&scene.node().namespace, LOOPBACK, "/v1/instances/self", &[]);
    assert_eq!(status, "404", "{body}");
    let (status, body) = ask(
        &second.namespace,
        GATEWAY,
        "/v1/log-level",
        &["-X", "PUT", "-d", "debug"],
    );
    assert_eq!(status, "403", "{body}");
}

/// As on a node whose provisioning NIC is a second one: nobody gets at the agent by it, and on one
/// that is the node's only one everybody may.
#[test]
fn hosts_on_an_uplink_are_refused_unless_it_carries_the_internal_address() {
    let scene = Scene::new(Mode::Tc);
    let host = scene.host();
    let address = scene.node().address;
    let limit = Duration::from_secs(2);
    let refused = |target: Ipv4Addr| {
        let url = format!("http://{target}:{PORT}/metrics");
        let output = host
            .namespace
            .output(["curl", "-sS", "--max-time", "3", &url])
            .expect("curl");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.stdout.is_empty() && !output.status.success(),
            "{target} answers"
        );
        assert!(!said.contains("timed out"), "{target}: {said}");
    };
    refused(address);
    // The VIP itself does not lead there either.
    connect(&host.namespace, VIP, PORT, limit).expect_err("the VIP has no such port");
    // Nor does another address of the node, routed by way of the uplink.
    host.namespace
        .ip(&format!("route add {GATEWAY} via {address}"))
        .expect("a route");
    refused(GATEWAY);
    // From a pod the same address is good.
    let pod = &scene.node().pods[0].namespace;
    assert_eq!(ask(pod, GATEWAY, "/healthz", &[]).0, "200");
    let Scene { agent, lab, .. } = scene;
    drop(agent);

    let node = &lab.nodes[0];
    let words = ["agent", "--node-address", "172.22.0.11", "--config"].map(Into::into);
    let words = [ironlb().expect("a binary").as_os_str().to_owned()]
        .into_iter()
        .chain(words)
        .chain([
            node.config.clone().into(),
            "--bpffs".into(),
            node.bpffs.clone().into(),
            "--state-dir".into(),
            node.state_dir().into(),
        ]);
    let process = node.namespace.spawn("agent-open", words).expect("agent");
    let _agent = Agent { process };
    wait_until("the port answers", Duration::from_secs(10), || {
        let url = format!("http://{address}:{PORT}/readyz");
        let output =
            lab.hosts[0]
                .namespace
                .output(["curl", "-sS", "-f", "--max-time", "1", &url])?;
        Ok(output.status.success())
    })
    .expect("an answer on the node's internal address");
}

#[test]
fn a_bad_file_is_told_as_an_old_state_and_the_loglevel_changes_while_it_runs() {
    let scene = Scene::new(Mode::Tc);
    let node = scene.node();
    let level = |words: &[&str]| {
        let mut command = node.namespace.command(ironlb().expect("a binary"));
        command.arg("log-level").args(words);
        ironlb_tests::run(&mut command)
    };
    assert_eq!(level(&[]).expect("a level").trim(), "info");
    let set = level(&["debug,hyper=info"]).expect("a level");
    assert_eq!(set.trim(), "hyper=info,debug");
    let error = level(&["ironlb=nonsense"]).expect_err("no filter");
    assert!(
        format!("{error:#}").contains("ironlb=nonsense"),
        "{error:#}"
    );

    node.write_config_text("uplinks: oops").expect("written");
    let limit = Duration::from_secs(10);
    wait_until("the mistake is a metric", limit, || {
        let (_, text) = ask(&node.namespace, LOOPBACK, "/metrics", &[]);
        let is_bad = metric(&text, "ironlb_config_rejected") == 1.0;
        Ok(is_bad && metric(&text, "ironlb_state_age_seconds") > 0.0)
    })
    .expect("an old state");
    let (_, text) = ask(&node.namespace, LOOPBACK, "/readyz", &[]);
    assert!(
        text.contains("apiVersion") || text.contains("uplinks"),
        "{text}"
    );
    get(&scene.host().namespace, VIP, API_PORT, "/").expect("the last good state serves");
    node.write_config(&scene.config).expect("written");
    wait_until("the state is fresh", limit, || {
        let (_, text) = ask(&node.namespace, LOOPBACK, "/metrics", &[]);
        Ok(metric(&text, "ironlb_state_age_seconds") == 0.0)
    })
    .expect("a fresh state");
}

#[test]
fn native_on_a_veth_whose_peer_lacks_napi_is_not_ready() {
    let scene = Scene::new(Mode::Native);
    let node = scene.node();
    let ready = || ask(&node.namespace, LOOPBACK, "/readyz", &[]);
    assert_eq!(ready().0, "200");
    let name = node.name.as_str();
    scene
        .lab
        .switch
        .exec(["ethtool", "-K", name, "gro", "off"])
        .expect("ethtool");
    // Refusals and ARP answers get lost from now on.
    let said = wait_until("the loss is noticed", Duration::from_secs(15), || {
        let _ = connect(
            &scene.host().namespace,
            VIP,
            6189,
            Duration::from_millis(300),
        );
        Ok(ready().0 == "503")
    });
    let (_, text) = ready();
    said.unwrap_or_else(|error| panic!("{error:#}: {text}"));
    assert!(text.contains("eth1") && text.contains("gro on"), "{text}");
    let (_, text) = ask(&node.namespace, LOOPBACK, "/metrics", &[]);
    assert!(
        metric(
            &text,
            r#"ironlb_uplink_lost_frames_total{interface="eth1"}"#
        ) >= 1.0
    );
}

#[test]
fn an_uplink_without_a_link_is_told() {
    let scene = Scene::new(Mode::Tc);
    let node = scene.node();
    let says = |word: &str, is: bool| {
        wait_until(&format!("`{word}`: {is}"), Duration::from_secs(5), || {
            let (status, text) = ask(&node.namespace, LOOPBACK, "/readyz", &[]);
            Ok(status == "200" && text.contains(word) == is)
        })
        .expect("readyz");
    };
    says("it has no link", false);
    scene.lab.unplug(&node.name).expect("unplug");
    says("it has no link", true);
    scene.lab.plug(&node.name).expect("plug");
    says("it has no link", false);
    get(&scene.host().namespace, VIP, API_PORT, "/").expect("an answer");
}

/// Requests that never end, from one pod, again and again.
#[test]
fn a_pod_that_holds_many_connections_keeps_nobody_from_the_port() {
    let scene = Scene::new(Mode::Tc);
    let [greedy, other, ..] = &scene.node().pods[..] else {
        panic!("two pods are needed");
    };
    let done = AtomicBool::new(false);
    let at_last = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|scope| {
        let held = scope.spawn(|| {
            let hold = || {
                let (mut held, mut most) = (Vec::new(), 0);
                while !done.load(Ordering::Relaxed) && Instant::now() < at_last {
                    let limit = Duration::from_millis(200);
                    let stream = TcpStream::connect_timeout(&(GATEWAY, PORT).into(), limit);
                    held.extend(stream.and_then(|mut stream| {
                        stream.write_all(b"GET /hea")?;
                        stream.set_nonblocking(true)?;
                        Ok(stream)
                    }));
                    // Those that were reset, or have waited too long, are replaced.
                    held.retain(
                        |stream| matches!(stream.peek(&mut [0]), Err(e) if e.kind() == WouldBlock),
                    );
                    most = most.max(held.len());
                }
                most
            };
            greedy.namespace.enter(hold).expect("namespace")
        });
        std::thread::sleep(Duration::from_secs(1));
        for _ in 0..20 {
            let own = ask(&scene.node().namespace, LOOPBACK, "/healthz", &[]);
            assert_eq!(own.0, "200");
            assert_eq!(ask(&other.namespace, GATEWAY, "/healthz", &[]).0, "200");
        }
        done.store(true, Ordering::Relaxed);
        let most = held.join().expect("no panic");
        assert!(most >= 8, "it held {most} at most: too few to tell");
    });
    assert_eq!(ask(&greedy.namespace, GATEWAY, "/healthz", &[]).0, "200");
}

/// An init container that starts before its pod has a slot.
#[test]
fn instance_env_waits_for_the_slot_and_gives_up_with_the_reason() {
    let lab = Laboratory::builder().build().expect("laboratory");
    let node = &lab.nodes[0];
    let mut config = lab.config("tc");
    let backend = |config: &mut Value| config["services"][0]["backends"][0].take();
    let whole = backend(&mut config.clone());
    let mut without = whole.clone();
    without.as_object_mut().expect("a backend").remove("slot");
    config["services"][0]["backends"][0] = without;
    let _agent = Agent::start(node, &config).expect("agent");

    let pod = &node.pods[0];
    let file = lab.directory().join("instance.env");
    let command = |patience: &str| {
        let mut command = pod.namespace.command(ironlb().expect("a binary"));
        command
            .args(["instance-env", "--images", "images", "--api", "api"])
            .args([
                "--agent",
                &IpAddr::from(GATEWAY).to_string(),
                "--timeout",
                patience,
            ])
            .arg("--output")
            .arg(&file);
        command
    };
    let error = ironlb_tests::run(&mut command("2s")).expect_err("there is no slot");
    let said = format!("{error:#}");
    assert!(
        said.contains("gave up after 2s") && said.contains("no slot yet"),
        "{said}"
    );
    assert!(said.contains("waiting (0 s)"), "{said}");
    assert!(!file.exists(), "half a file");

    let waiting = command("30s").spawn().expect("instance-env");
    config["services"][0]["backends"][0] = whole;
    node.write_config(&config).expect("written");
    let status = waiting.wait_with_output().expect("its end").status;
    assert!(status.success());
    let text = std::fs::read_to_string(&file).expect("the file");
    let url = format!("IRONIC_HTTP_URL=http://{VIP}:{}\n", pod.instance_port());
    assert!(text.starts_with(&url), "{text}");
}
