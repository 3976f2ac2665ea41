//! What `deploy/` ships fits what the agent does: configurations are good, and alert rules and dashboard
//! ask for metrics that exist.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::ensure;
use ironlb::config;
use ironlb_tests::{API_PORT, Laboratory, VIP, run, wait_until};
use serde_json::Value;

fn deploy(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../deploy")
        .join(path)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn configurations_are_good() {
    let file = config::load(&deploy("lb.yaml")).unwrap_or_else(|error| panic!("{error}"));
    let clusters = ["base/lb.yaml", "overlays/example/lb.yaml"].map(|path| {
        let config = config::load_cluster(&deploy(path));
        config.unwrap_or_else(|error| panic!("{error}")).state
    });
    for state in clusters.iter().chain([&file]) {
        assert!(!state.vips.is_empty() && !state.uplinks.is_empty());
    }
}

#[test]
fn alert_rules_are_right_and_fire_when_they_should() {
    let promtool = |arguments: &[&str]| {
        let mut promtool = Command::new("promtool");
        run(promtool.current_dir(deploy("monitoring")).args(arguments))
            .unwrap_or_else(|error| panic!("{error:#}"))
    };
    promtool(&["check", "rules", "rules.yaml"]);
    promtool(&["test", "rules", "rules_test.yaml"]);
}

/// The manual's list is what the agent serves: a unit test of the agent compares them.
#[test]
fn alert_rules_and_dashboard_ask_for_metrics_that_exist() {
    let manual = read(&deploy("../docs/KUBERNETES.md"));
    let served: BTreeSet<_> = manual
        .lines()
        .filter_map(|line| line.strip_prefix("| `ironlb_"))
        .filter_map(|rest| rest.split_once('`'))
        .map(|(name, _)| format!("ironlb_{name}"))
        .collect();
    let rules = read(&deploy("monitoring/rules.yaml"));
    let dashboard = read(&deploy("monitoring/dashboard.json"));
    let parsed: Value = serde_json::from_str(&dashboard).expect("JSON");
    let panels = parsed["panels"].as_array().expect("panels");
    assert!(
        panels
            .iter()
            .all(|panel| panel["targets"][0]["expr"].is_string())
    );
    for (file, text) in [("rules", &rules), ("dashboard", &dashboard)] {
        let asked: BTreeSet<_> = text
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .filter(|word| word.starts_with("ironlb_"))
            .map(|word| word.strip_suffix("_bucket").unwrap_or(word).to_owned())
            .collect();
        let missing: Vec<_> = asked.difference(&served).collect();
        assert!(missing.is_empty(), "{file} asks for {missing:?}");
        assert!(asked.len() > 5, "{file} asks for {asked:?} only");
    }
}

/// The overlay's list is enough for the whole life of an agent: load, attach, adopt, unload.
#[test]
fn the_capabilities_of_the_overlay_are_enough() {
    let overlay = read(&deploy("overlays/capabilities/capabilities.yaml"));
    let (_, list) = overlay.split_once("add:").expect("a list");
    let bounding: String = list
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- "))
        .map(|name| format!(",+{}", name.to_lowercase()))
        .collect();
    assert!(bounding.contains("net_admin"), "{bounding}");
    let limited = |words: &[&OsStr]| {
        let set = format!("-all{bounding}");
        let wrapper = ["setpriv", "--inh-caps", "-all", "--bounding-set", &set];
        let binary = ironlb_tests::ironlb().expect("a binary").as_os_str();
        let wrapper = wrapper.into_iter().map(OsStr::new);
        let all = wrapper.chain([binary]).chain(words.iter().copied());
        all.map(OsStr::to_owned).collect::<Vec<_>>()
    };
    for mode in ["native", "tc"] {
        let lab = Laboratory::builder()
            .complete_checksums(mode == "native")
            .build()
            .expect("laboratory");
        let node = &lab.nodes[0];
        node.write_config(&lab.config(mode))
            .expect("a configuration");
        let pins = [OsStr::new("--bpffs"), node.bpffs.as_os_str()];
        let state_dir = node.state_dir();
        let agent = [
            OsStr::new("agent"),
            OsStr::new("--config"),
            node.config.as_os_str(),
            OsStr::new("--state-dir"),
            state_dir.as_os_str(),
        ];
        // The second one adopts what the first has left.
        for _ in 0..2 {
            let words = limited(&[&agent[..], &pins].concat());
            let mut process = node.namespace.spawn("agent", words).expect("agent");
            let ready = wait_until("the agent is ready", Duration::from_secs(20), || {
                ensure!(process.running()?, "it ended");
                let url = "http://127.0.0.1:9469/readyz";
                let curl = node
                    .namespace
                    .output(["curl", "-sf", "--max-time", "1", url])?;
                Ok(curl.status.success())
            });
            let log = process.log().expect("log");
            ready.unwrap_or_else(|error| panic!("{mode}: {error:#}\n{log}"));
            let url = format!("http://{VIP}:{API_PORT}/");
            let host = &lab.hosts[0].namespace;
            host.exec(["curl", "-sSf", "--max-time", "3", &url])
                .expect("an answer");
            process.kill().expect("kill");
        }
        let unload = limited(&[&[OsStr::new("unload")], &pins[..]].concat());
        let said = node.namespace.exec(unload).expect("unload");
        assert!(said.contains("detached"), "{said}");
    }
}
