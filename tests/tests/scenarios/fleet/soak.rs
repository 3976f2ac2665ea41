//! Many paced downloads while all that can happen to agents happens, again and again, and backends come and go:
//! only those whose own pod was removed may break, or begin in vain while its node's cable is out. A tenth of it here, all of it by `cargo xtask test --soak`.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ironlb_tests::{Download, Fleet, IMAGE_PORT, Laboratory, Outcome, VIP, backends};
use serde_json::{Value, json};

use crate::scene::{Mode, fleet_of};

#[test]
fn a_tenth_of_the_soak_breaks_no_download() {
    Soak {
        downloads: 5,
        faults: 5,
        restarts: 10,
        rate: "2m",
    }
    .run();
}

#[test]
#[ignore = "takes a quarter of an hour: cargo xtask test --soak"]
fn the_whole_soak_breaks_no_download() {
    Soak {
        downloads: 50,
        faults: 20,
        restarts: 100,
        rate: "512k",
    }
    .run();
}

/// How much of it.
struct Soak {
    /// Downloads at any time.
    downloads: usize,
    /// Faults of the announcer, of each kind in turn.
    faults: usize,
    /// Restarts of each agent after that.
    restarts: usize,
    /// How a download is paced.
    rate: &'static str,
}

/// What happens to the agent that announces the VIP.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Stopped,
    Killed,
    Hung,
    Upgraded,
    /// The cable is out for a while: the VIP moves, and no agent ends.
    Moved,
}

const FAULTS: [Fault; 5] = [
    Fault::Stopped,
    Fault::Killed,
    Fault::Hung,
    Fault::Upgraded,
    Fault::Moved,
];
/// What happens to a backend, in this order; then it is the next one's turn.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// Takes no new flows.
    Drained,
    Removed,
    Added,
    /// Another pod with another address has its name.
    Rolled,
}

const CHANGES: [Change; 4] = [
    Change::Drained,
    Change::Removed,
    Change::Added,
    Change::Rolled,
];
const NODES: usize = 3;
/// Size of the image in MiB.
const IMAGE: u32 = 16;
/// Longer than any election takes.
const SUCCESSION: Duration = Duration::from_secs(10);
/// How long a state lasts before the next change.
const PAUSE: Duration = Duration::from_secs(2);

impl Soak {
    fn run(&self) {
        let lab = Laboratory::builder()
            .nodes_with_pods(NODES, 2)
            .image_mib(IMAGE);
        let (mut fleet, _) = fleet_of(Mode::Tc, lab.build().expect("laboratory"));
        let mut pods = Pods::new(&fleet, Mode::Tc);
        let traffic = Traffic::start(&fleet, self.downloads, self.rate);
        for number in 0..self.faults {
            let holder = fleet.wait_for_holder(SUCCESSION).expect("ARP");
            let fault = FAULTS[number % FAULTS.len()];
            say(&format!(
                "fault {} of {}: node{holder} is {fault:?}; {} downloads done",
                number + 1,
                self.faults,
                traffic.done()
            ));
            // While the VIP moves and while it is back: both have to cope.
            pods.change(&fleet);
            let begin = Instant::now();
            fault.happen(&mut fleet, holder);
            if matches!(fault, Fault::Moved) {
                pods.were_behind_the_cable(&fleet, holder, begin);
            }
            pods.change(&fleet);
            std::thread::sleep(PAUSE);
        }
        for node in 0..NODES {
            for number in 0..self.restarts {
                if number % 10 == 0 {
                    say(&format!(
                        "node{node}: restart {} of {}; {} downloads done",
                        number + 1,
                        self.restarts,
                        traffic.done()
                    ));
                }
                if number % 2 == 0 {
                    fleet.stop(node).expect("stop");
                } else {
                    fleet.kill(node).expect("kill");
                }
                fleet.launch(node).expect("agent");
            }
        }
        fleet.wait_for_holder(SUCCESSION).expect("ARP");
        traffic.finish(self.downloads, &pods);
    }
}

/// Progress, for whoever waits.
fn say(line: &str) {
    eprintln!("soak: {line}");
}

impl Fault {
    /// Does it to the holder, and undoes it.
    fn happen(self, fleet: &mut Fleet, holder: usize) {
        let succeeded = |fleet: &Fleet| {
            fleet.wait_for_successor(holder, SUCCESSION).expect("ARP");
            std::thread::sleep(PAUSE);
        };
        match self {
            Self::Stopped | Self::Killed => {
                if matches!(self, Self::Stopped) {
                    fleet.stop(holder).expect("stop");
                } else {
                    fleet.kill(holder).expect("kill");
                }
                succeeded(fleet);
                fleet.launch(holder).expect("agent");
            }
            Self::Hung => {
                fleet.hang(holder).expect("hang");
                succeeded(fleet);
                fleet.resume(holder).expect("resume");
            }
            Self::Upgraded => fleet.upgrade(holder).expect("upgrade"),
            Self::Moved => {
                let port = fleet.lab.nodes[holder].name.clone();
                fleet.lab.unplug(&port).expect("unplug");
                succeeded(fleet);
                fleet.lab.plug(&port).expect("plug");
            }
        }
    }
}

/// The backends as the agents' files have them, and when some of them went. Those with odd slots come and go; the
/// others stay.
struct Pods {
    config: Value,
    all: Vec<Value>,
    changes: usize,
    /// When an instance was removed or got another address.
    gone: Vec<(Instant, String)>,
    /// From when to when the instance port led to a pod that could not be reached.
    out_of_reach: Vec<(Instant, Instant, u16)>,
}

impl Pods {
    fn new(fleet: &Fleet, mode: Mode) -> Self {
        let mut config = fleet
            .lab
            .config_elected(mode.name())
            .expect("configuration");
        let all = backends(&mut config).clone();
        // The addresses that rolled pods get; nginx listens on all of a pod's.
        for pod in fleet.lab.nodes.iter().flat_map(|node| &node.pods) {
            let second = second_address(pod.address);
            pod.namespace
                .ip(&format!("addr add {second}/32 dev eth0"))
                .expect("address");
        }
        for node in &fleet.lab.nodes {
            for (index, pod) in node.pods.iter().enumerate() {
                let second = second_address(pod.address);
                node.namespace
                    .ip(&format!("route add {second}/32 dev pod{index}"))
                    .expect("route");
            }
        }
        Self {
            config,
            all,
            changes: 0,
            gone: Vec::new(),
            out_of_reach: Vec::new(),
        }
    }

    /// Drains, removes, adds or rolls one that may go, in all agents' files.
    fn change(&mut self, fleet: &Fleet) {
        let victims = self.all.len() / 2;
        let slot = self.changes / CHANGES.len() % victims * 2 + 1;
        let change = CHANGES[self.changes % CHANGES.len()];
        self.changes += 1;
        let mut backend = self.all[slot].clone();
        let instance = backend["instance"].as_str().expect("instance").to_owned();
        let listed = backends(&mut self.config);
        match change {
            Change::Drained => {
                let mut same = listed.iter_mut().filter(|b| b["instance"] == *instance);
                same.next().expect("it is there")["ready"] = json!(false);
            }
            Change::Removed => listed.retain(|other| other["instance"] != *instance),
            Change::Added => listed.push(backend),
            Change::Rolled => {
                let address = backend["address"].as_str().expect("address");
                let address = second_address(address.parse().expect("address"));
                backend["address"] = json!(address);
                self.all[slot] = backend.clone();
                listed.retain(|other| other["instance"] != *instance);
                listed.push(backend);
            }
        }
        // Who drains keeps its downloads.
        if matches!(change, Change::Removed | Change::Rolled) {
            self.gone.push((Instant::now(), instance));
        }
        fleet.reconfigure(&self.config).expect("configuration");
    }

    /// Notes that the pods of `node` could not be reached since `begin`, until probes come back from it.
    fn were_behind_the_cable(&mut self, fleet: &Fleet, node: usize, begin: Instant) {
        let end = Instant::now() + PAUSE;
        let ports = fleet.lab.nodes[node].pods.iter();
        self.out_of_reach
            .extend(ports.map(|pod| (begin, end, pod.instance_port())));
    }

    /// Whether a download had to break: its pod was removed, or could not be reached when it began.
    fn had_to_break(&self, end: &Ended) -> bool {
        let could_not_begin = || {
            let mut times = self.out_of_reach.iter();
            times.any(|(from, to, port)| *port == end.port && *from < end.to && end.from < *to)
        };
        self.went(&end.instance, end.from, end.to)
            || end.outcome == Outcome::Refused && could_not_begin()
    }

    /// Whether `instance` went in a time. An agent that was away learns of it when it is back.
    fn went(&self, instance: &str, from: Instant, to: Instant) -> bool {
        let late = SUCCESSION;
        let mut gone = self.gone.iter();
        gone.any(|(at, name)| name == instance && *at < to && from < *at + late)
    }
}

/// The other address of a pod: from either to the other.
fn second_address(address: Ipv4Addr) -> Ipv4Addr {
    let [a, b, c, last] = address.octets();
    Ipv4Addr::new(a, b, c, last ^ 0x80)
}

/// A download that has ended.
struct Ended {
    /// The port of the VIP that it asked.
    port: u16,
    outcome: Outcome,
    instance: String,
    from: Instant,
    to: Instant,
    said: String,
}

/// Downloads from all nodes, so many at any time.
struct Traffic {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicUsize>,
    thread: JoinHandle<Vec<Ended>>,
}

impl Traffic {
    fn start(fleet: &Fleet, count: usize, rate: &str) -> Self {
        let (stop, done) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicUsize::new(0)),
        );
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&done));
        // Every other one by the shared port, the rest by the ports of instances that stay.
        let pods = fleet.lab.nodes.iter().flat_map(|node| &node.pods);
        let ports: Vec<_> = pods
            .filter(|pod| pod.slot % 2 == 0)
            .flat_map(|pod| [pod.instance_port(), IMAGE_PORT])
            .collect();
        let hosts: Vec<_> = fleet
            .lab
            .hosts
            .iter()
            .map(|h| h.namespace.clone())
            .collect();
        let sha256 = fleet.lab.image.sha256.clone();
        let path = format!("/images/common.img?rate={rate}");
        let begin = move |number: usize| {
            let port = ports[number % ports.len()];
            let url = format!("http://{VIP}:{port}{path}");
            let host = &hosts[number / ports.len() % hosts.len()];
            // While nobody announces the VIP a connection may take a second or two.
            let options = ["--connect-timeout", "15"];
            let limit = Duration::from_secs(300);
            let download = Download::start(host, &url, &options, limit);
            (port, Instant::now(), download.expect("curl"))
        };
        let thread = std::thread::spawn(move || {
            let mut running: Vec<_> = (0..count).map(&begin).collect();
            let mut begun = count;
            let mut ended = Vec::new();
            while !running.is_empty() {
                let mut going = Vec::new();
                for (port, from, mut download) in running {
                    if download.running().expect("curl") {
                        going.push((port, from, download));
                        continue;
                    }
                    let end = download.end(&sha256).expect("curl");
                    ended.push(Ended {
                        port,
                        outcome: end.outcome,
                        instance: end.instance,
                        from,
                        to: Instant::now(),
                        said: end.said,
                    });
                    counted.fetch_add(1, Ordering::Relaxed);
                }
                running = going;
                while running.len() < count && !stopped.load(Ordering::Relaxed) {
                    running.push(begin(begun));
                    begun += 1;
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            ended
        });
        std::thread::sleep(PAUSE);
        Self { stop, done, thread }
    }

    /// How many have ended.
    fn done(&self) -> usize {
        self.done.load(Ordering::Relaxed)
    }

    /// Begins no more, waits for the rest, and asserts that all are whole but those whose pod went.
    fn finish(self, count: usize, pods: &Pods) {
        say("waiting for the last downloads");
        self.stop.store(true, Ordering::Relaxed);
        let ended = match self.thread.join() {
            Ok(ended) => ended,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let mut outcomes = BTreeMap::<Outcome, usize>::new();
        let mut broken = Vec::new();
        let mut excused = 0;
        for end in &ended {
            *outcomes.entry(end.outcome).or_default() += 1;
            if end.outcome == Outcome::Whole {
                continue;
            }
            if pods.had_to_break(end) {
                excused += 1;
            } else {
                let age = end.to - end.from;
                broken.push(format!(
                    "{:?} after {age:?}: {}",
                    end.outcome,
                    end.said.trim()
                ));
            }
        }
        say(&format!(
            "{outcomes:?}, {excused} of them had lost their pod"
        ));
        assert!(broken.is_empty(), "{} broken: {broken:#?}", broken.len());
        let whole = outcomes.get(&Outcome::Whole).copied().unwrap_or_default();
        assert!(whole >= 2 * count, "too few to tell: {outcomes:?}");
    }
}
