//! What the scenarios share: a laboratory with an agent on its node, in one of the two modes.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use ironlb_tests::{
    API_PORT, Agent, Answer, ArpWatch, Attempt, Builder, Download, Fleet, Host, Laboratory, Maps,
    Namespace, Neighbour, Node, Pod, Prober, Turn, VIP, turns, wait_until,
};
use lb_common::map;
use lb_common::verdict::Verdict;
use serde_json::Value;

/// How the forward path is attached, and what its packets look like there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// XDP in the driver; whole checksums, as on a real wire.
    Native,
    /// TC ingress; every offload on.
    Tc,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Tc => "tc",
        }
    }

    pub fn builder(self) -> Builder {
        Laboratory::builder().complete_checksums(self == Self::Native)
    }
}

/// Makes a test of each function in each mode.
macro_rules! in_both_modes {
    ($($scenario:ident),+ $(,)?) => {
        mod native {
            $(#[test] fn $scenario() { super::$scenario($crate::scene::Mode::Native) })+
        }
        mod tc {
            $(#[test] fn $scenario() { super::$scenario($crate::scene::Mode::Tc) })+
        }
    };
}
pub(crate) use in_both_modes;

/// A laboratory whose node serves the VIP. The agent goes before the laboratory.
pub struct Scene {
    pub agent: Agent,
    pub config: Value,
    pub lab: Laboratory,
}

impl Scene {
    pub fn new(mode: Mode) -> Self {
        Self::with(mode, mode.builder(), |_| {})
    }

    /// With a laboratory and a configuration of its own.
    pub fn with(mode: Mode, builder: Builder, change: impl FnOnce(&mut Value)) -> Self {
        let lab = builder.build().expect("laboratory");
        let mut config = lab.config(mode.name());
        change(&mut config);
        let agent = Agent::start(&lab.nodes[0], &config).expect("agent");
        Self { agent, config, lab }
    }

    pub fn node(&self) -> &Node {
        &self.lab.nodes[0]
    }

    pub fn maps(&self) -> Maps {
        self.node().maps()
    }

    pub fn count(&self, verdict: Verdict) -> u64 {
        self.maps().verdict(verdict).expect("verdicts")
    }

    pub fn host(&self) -> &Host {
        &self.lab.hosts[0]
    }

    /// Starts to download `path` from `port` of the VIP.
    pub fn download(&self, port: u16, path: &str) -> Download {
        download(&self.lab, port, path)
    }

    /// As [`Scene::download`] of something that lasts, once it is a living flow: what is done next meets it.
    pub fn living_download(&self, port: u16, path: &str) -> Download {
        let living = || Ok::<_, anyhow::Error>(self.maps().living(map::LIVING)?.len());
        let before = living().expect("flows");
        let download = self.download(port, path);
        wait_until("the download lives", Duration::from_secs(10), || {
            Ok(living()? > before)
        })
        .expect("a flow");
        download
    }
}

/// Starts to download `path` from `port` of the VIP to the first host.
fn download(lab: &Laboratory, port: u16, path: &str) -> Download {
    let url = format!("http://{VIP}:{port}{path}");
    let limit = Duration::from_secs(60);
    Download::start(&lab.hosts[0].namespace, &url, &[], limit).expect("curl")
}

/// How soon new connections work again after a fault: three missed heartbeats, an election, and some slack for
/// a busy machine.
pub const RECOVERY: Duration = Duration::from_millis(1500);
/// Size of the image that a fleet's pods serve, in MiB, and how they are paced: twelve seconds.
const FLEET_IMAGE: u32 = 48;
const FLEET_PACED: &str = "/images/common.img?rate=4m";

/// A laboratory of `nodes` nodes with a pod each.
pub fn fleet_lab(mode: Mode, nodes: usize) -> Laboratory {
    let builder = mode
        .builder()
        .nodes_with_pods(nodes, 1)
        .image_mib(FLEET_IMAGE);
    builder.build().expect("laboratory")
}

/// `nodes` nodes with a pod each, whose agents have elected one of them; and its number.
pub fn fleet(mode: Mode, nodes: usize) -> (Fleet, usize) {
    fleet_of(mode, fleet_lab(mode, nodes))
}

/// As [`fleet`], in a laboratory of its own.
pub fn fleet_of(mode: Mode, lab: Laboratory) -> (Fleet, usize) {
    let config = lab.config_elected(mode.name()).expect("configuration");
    let fleet = Fleet::start(lab, &config).expect("agents");
    let holder = fleet.answering().expect("ARP");
    let holder = holder.first().copied().expect("a holder");
    (fleet, holder)
}

/// What clients do while something happens to the nodes: a paced download from each pod, new connections from a
/// client that knows the VIP's MAC and from one that always asks for it, and ARP questions.
pub struct Clients {
    downloads: Vec<Download>,
    sha256: String,
    warm: Prober,
    cold: Prober,
    arp: ArpWatch,
}

impl Clients {
    /// With downloads from the pods that are `wanted`; all runs for a while when this returns.
    pub fn start(fleet: &Fleet, wanted: impl Fn(&Pod) -> bool) -> Self {
        let lab = &fleet.lab;
        let pods = lab.nodes.iter().flat_map(|node| &node.pods);
        let downloads = pods
            .filter(|pod| wanted(pod))
            .map(|pod| download(lab, pod.instance_port(), FLEET_PACED))
            .collect();
        let probe = |host: &Host, neighbour| {
            Prober::start(&host.namespace, (VIP, API_PORT), "/", neighbour)
        };
        let clients = Self {
            downloads,
            sha256: lab.image.sha256.clone(),
            warm: probe(&lab.hosts[0], Neighbour::Warm),
            cold: probe(&lab.bmc, Neighbour::Cold),
            arp: ArpWatch::start(&lab.hosts[1], VIP).expect("ARP"),
        };
        std::thread::sleep(Duration::from_millis(800));
        clients
    }

    /// Ends the connections and questions at once and the downloads in their own time: none may be broken, and
    /// none may have been over before this.
    pub fn finish(self) -> Seen {
        let mut downloads = self.downloads;
        for download in &mut downloads {
            download
                .goes_on()
                .expect("it broke, or did not last long enough");
        }
        let seen = Seen {
            warm: self.warm.finish().expect("connections"),
            cold: self.cold.finish().expect("connections"),
            answers: self.arp.finish().expect("ARP"),
        };
        for download in downloads {
            download.finish(&self.sha256).expect("download");
        }
        seen
    }
}

/// What clients saw.
pub struct Seen {
    pub warm: Vec<Attempt>,
    pub cold: Vec<Attempt>,
    pub answers: Vec<Answer>,
}

impl Seen {
    /// Asserts that every connection was served.
    pub fn assert_all_served(&self) {
        assert_served(&self.warm);
        assert_served(&self.cold);
    }

    /// Asserts that connections were served before `event` and again from `limit` after it on, to the end.
    pub fn assert_served_again(&self, event: Instant, limit: Duration) {
        for (what, attempts) in [("warm", &self.warm), ("cold", &self.cold)] {
            let failed = attempts.iter().filter(|attempt| attempt.failure.is_some());
            let failed: Vec<_> = failed.collect();
            // One that was under way may have been cut.
            let early = |attempt: &&&Attempt| attempt.at + Prober::PERIOD < event;
            if let Some(early) = failed.iter().find(early) {
                panic!("{what}: failed before anything had happened: {early:?}");
            }
            let dark = failed
                .last()
                .map_or(Duration::ZERO, |last| last.at + Prober::PERIOD - event);
            println!(
                "{what}: {} of {} connections failed, the last one {dark:?} after the event",
                failed.len(),
                attempts.len()
            );
            assert!(dark < limit, "{what}: {:?}", failed.last());
            let after = attempts.iter().filter(|a| a.at > event + limit).count();
            assert!(
                after > 10,
                "{what}: only {after} connections were tried after it"
            );
        }
    }

    /// The one handover from `old` to `new`, and no other answer: how long nobody answered between.
    pub fn handover(&self, fleet: &Fleet, old: usize, new: usize) -> Duration {
        let turns = turns(&self.answers);
        let [before, after]: [Turn; 2] = turns[..].try_into().unwrap_or_else(|_| {
            panic!("node{old} and then node{new} were to answer, but: {turns:#?}")
        });
        assert_eq!((before.mac, after.mac), (fleet.mac(old), fleet.mac(new)));
        let gap = after.first - before.last;
        println!("nobody answered ARP for {gap:?}");
        gap
    }

    /// The change from `old` to `new`, which may answer both for a moment: how long it took, be it both or none.
    pub fn change(&self, fleet: &Fleet, old: usize, new: usize) -> Duration {
        let (old, new) = (fleet.mac(old), fleet.mac(new));
        let of = |mac| self.answers.iter().filter(move |answer| answer.mac == mac);
        assert_eq!(
            of(old).count() + of(new).count(),
            self.answers.len(),
            "a third one answered"
        );
        let last = of(old).next_back().expect("the old one answered").at;
        let first = of(new).next().expect("the new one answered").at;
        let took = if first > last {
            first - last
        } else {
            last - first
        };
        println!("ARP moved in {took:?}, both answered: {}", first < last);
        took
    }

    /// Asserts that `holder` alone answered.
    pub fn assert_one_holder(&self, fleet: &Fleet, holder: usize) {
        assert_one_holder(fleet, &self.answers, holder);
    }
}

pub fn assert_one_holder(fleet: &Fleet, answers: &[Answer], holder: usize) {
    let turns = turns(answers);
    let macs: Vec<_> = turns.iter().map(|turn| turn.mac).collect();
    assert_eq!(macs, [fleet.mac(holder)], "{turns:#?}");
}

pub fn assert_served(attempts: &[Attempt]) {
    assert!(attempts.len() > 10, "only {} connections", attempts.len());
    let failed = attempts.iter().filter(|attempt| attempt.failure.is_some());
    let failed: Vec<_> = failed.collect();
    assert!(
        failed.is_empty(),
        "{} of {}: {:?}",
        failed.len(),
        attempts.len(),
        failed[0]
    );
}

/// The answer to one request.
pub fn get(client: &Namespace, address: Ipv4Addr, port: u16, path: &str) -> anyhow::Result<String> {
    let url = format!("http://{address}:{port}{path}");
    client.exec(["curl", "-sS", "-f", "--max-time", "3", &url])
}

/// Tries to connect for at most `limit`.
pub fn connect(
    client: &Namespace,
    address: Ipv4Addr,
    port: u16,
    limit: Duration,
) -> io::Result<TcpStream> {
    let address = SocketAddr::from((address, port));
    client
        .enter(|| TcpStream::connect_timeout(&address, limit))
        .expect("namespace")
}

/// Asserts that nothing answers a connection attempt, not even with a refusal.
pub fn assert_silent(client: &Namespace, address: Ipv4Addr, port: u16) {
    let error = connect(client, address, port, Duration::from_millis(500))
        .expect_err("somebody accepted the connection");
    assert_eq!(
        error.kind(),
        io::ErrorKind::TimedOut,
        "{address}:{port}: {error}"
    );
}
