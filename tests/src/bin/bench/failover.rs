//! What clients notice when the node that announces the VIP goes, next to what they have with MetalLB and kube-proxy;
//! and two things of which only the comparison speaks: refusals, and many connections of one host.

use std::io::ErrorKind;
use std::net::{SocketAddr, SocketAddrV4, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use comfy_table::Table;
use ironlb::dataplane::read::Reader;
use ironlb_tests::{
    API_PORT, Answer, ArpWatch, Attempt, Download, Fleet, Image, Laboratory, Neighbour, Outcome,
    Prober, RPC_PORT, VIP, exchange, wait_until,
};
use serde_json::{Value, json};

use crate::judge;
use crate::statistics::median;
use crate::traffic;

/// Nodes, with a pod each.
const NODES: usize = 3;
/// Downloads that run while something happens.
const DOWNLOADS: usize = 20;
/// Size of the image, in MiB, and how it is paced at the server: sixteen seconds.
const IMAGE: u32 = 32;
/// Bytes a second.
const PACE: &str = "2m";
/// How long clients run before something happens.
const BEFORE: Duration = Duration::from_secs(1);
/// How long the crashed agent stays away.
const AWAY: Duration = Duration::from_secs(4);
/// How long agents need after one came back, until each knows what the others have.
const SETTLE: Duration = Duration::from_secs(4);
/// After new connections work again, how long their losses are counted.
const AFTERWARDS: Duration = Duration::from_secs(5);
/// Longest time that new connections may be dark, in seconds.
const GOAL_DARK: f64 = 1.5;
/// Longest time to a refusal, in milliseconds.
const GOAL_REFUSAL: f64 = 1.0;
/// Refusals measured in a round.
const REFUSALS: usize = 200;
/// A port of the VIP whose pods are not ready.
const UNREADY_PORT: u16 = 8080;
/// Connections of one host to one pod.
const ROW: u32 = 36_000;
/// Of which so many make a window.
const WINDOW: usize = 4_000;
/// How many of them at a time.
const ROW_THREADS: u32 = 4;
/// Least ratio of the last window's rate to the first one's: a machine's other work moves it, a table that fills up
/// halves it and more.
const GOAL_FLAT: f64 = 0.8;

/// MetalLB 0.16 (L2) with kube-proxy 1.36 (nftables) as its users get it: medians that were measured once, on a real
/// Kubernetes cluster of three nodes. They are not measured again here.
mod metallb {
    pub const PLANNED: &str = "0 failed connects";
    pub const PLANNED_ARP: &str = "0.12 s";
    pub const PLANNED_DOWNLOADS: &str = "20 of 20 reset";
    pub const CRASH_DARK: &str = "5.5 s";
    pub const CRASH_DOWNLOADS: &str = "20 of 20 reset";
    pub const DEATH_DARK: &str = "6 s";
    pub const DEATH_LOST: &str = "33 % for 45 s";
    /// Dark, and then the losses.
    pub const DEATH_LAST: &str = "51 s";
    pub const DEATH_DOWNLOADS: &str = "20 of 20 hang";
    pub const REFUSAL: &str = "none: EHOSTUNREACH after 3.06 s, or silence";
    pub const ROW: &str = "9000/s → 800/s: 0.09";
}

/// What happens.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Event {
    Planned,
    Crash,
    NodeDeath,
}

impl Event {
    const ALL: [Self; 3] = [Self::Planned, Self::Crash, Self::NodeDeath];

    /// Name in the JSON.
    fn name(self) -> &'static str {
        match self {
            Self::Planned => "planned",
            Self::Crash => "crash",
            Self::NodeDeath => "node_death",
        }
    }

    fn heading(self) -> &'static str {
        match self {
            Self::Planned => "announcer told to stop",
            Self::Crash => "announcer's agent crashes",
            Self::NodeDeath => "announcer's node dies",
        }
    }
}

/// What clients noticed of one event.
struct Round {
    /// Connects that failed, of a client that knows the VIP's MAC and of one that asks each time.
    failed: f64,
    /// How many were tried from the event on.
    tried: usize,
    /// Seconds from the event until a connect was served again: the longer one of the two clients; 0 if none failed.
    dark: f64,
    /// Share of the connects that failed in the time in which none may any more.
    lost: f64,
    /// Seconds from the event to the last connect that failed.
    last_failure: f64,
    /// Seconds from the event until another node answered ARP.
    arp: f64,
    /// Downloads that were not whole at their end, of [`DOWNLOADS`].
    broken: f64,
    /// How they ended, if not whole.
    ends: Vec<String>,
}

/// Measures every event `rounds` times; the JSON of the figures.
pub fn measure(rounds: usize) -> Result<Value> {
    let idle = traffic::idle()?;
    let quiet = traffic::tell_idle(idle);
    println!("laying out a laboratory of {NODES} nodes …");
    let mut fleet = fleet()?;
    let mut all = [const { Vec::new() }; Event::ALL.len()];
    for (event, results) in Event::ALL.into_iter().zip(&mut all) {
        for number in 1..=rounds {
            let round = match event {
                Event::NodeDeath => {
                    // What has died is not brought back.
                    let mut fleet = self::fleet()?;
                    round(&mut fleet, event)?
                }
                _ => round(&mut fleet, event)?,
            };
            println!(
                "    {} {number} of {rounds}: {} of {} connects failed, dark {:.2} s, last failure after {:.2} s, \
                 ARP moved in {:.2} s, {} of {DOWNLOADS} downloads broken{}",
                event.heading(),
                round.failed,
                round.tried,
                round.dark,
                round.last_failure,
                round.arp,
                round.broken,
                round
                    .ends
                    .first()
                    .map_or(String::new(), |end| format!(", the first: {end}"))
            );
            results.push(round);
        }
    }
    let refusals = refusals(&fleet, rounds)?;
    let row = row(&fleet, rounds)?;
    Ok(report(&all, &refusals, &row, quiet))
}

/// Three nodes with a pod each, and a port whose pods are not ready.
fn fleet() -> Result<Fleet> {
    let laboratory = Laboratory::builder()
        .nodes_with_pods(NODES, 1)
        .image_mib(IMAGE)
        .build()?;
    let mut config = laboratory.config_elected("tc")?;
    let mut unready = config["services"][0].clone();
    unready["name"] = json!("unready");
    unready["ports"] = json!([{"name": "http", "port": UNREADY_PORT}]);
    unready["instance_ports"] = json!({});
    for backend in unready["backends"].as_array_mut().into_iter().flatten() {
        backend["ready"] = json!(false);
    }
    config["services"]
        .as_array_mut()
        .context("no services in the configuration")?
        .push(unready);
    // Not Fleet::start: it waits until all backends are used.
    let mut fleet = Fleet::prepare(laboratory, &config)?;
    fleet.launch_all()?;
    fleet.wait_for_holder(Fleet::PATIENCE)?;
    for node in &fleet.lab.nodes {
        let what = format!("{} has met the others", node.name);
        wait_until(&what, Fleet::PATIENCE, || {
            let peers = Reader::open(&node.bpffs)?.peers()?;
            let mut met = peers.iter();
            Ok(peers.len() == NODES - 1 && met.all(|p| p.live && p.reflecting && p.synced))
        })?;
    }
    Ok(fleet)
}

/// Starts clients, lets the event happen, and tells what they noticed.
fn round(fleet: &mut Fleet, event: Event) -> Result<Round> {
    let holder = fleet.wait_for_holder(Fleet::PATIENCE)?;
    let sha256 = fleet.lab.image.sha256.clone();
    let lab = &fleet.lab;
    let (host, watcher, bmc) = (&lab.hosts[0], &lab.hosts[1], &lab.bmc);
    // Those of pods that die with their node cannot but end.
    let pods = lab.nodes.iter().enumerate();
    let pods = pods.filter(|(number, _)| event != Event::NodeDeath || *number != holder);
    let ports: Vec<u16> = pods
        .flat_map(|(_, node)| node.pods.iter().map(|pod| pod.instance_port()))
        .collect();
    let downloads = ports.iter().cycle().take(DOWNLOADS).map(|port| {
        let url = format!("http://{VIP}:{port}{}?rate={PACE}", Image::URL_PATH);
        Download::start(&host.namespace, &url, &[], Duration::from_secs(90))
    });
    let mut downloads = downloads.collect::<Result<Vec<_>>>()?;
    let target = (VIP, API_PORT);
    let warm = Prober::start(&host.namespace, target, "/", Neighbour::Warm);
    let cold = Prober::start(&bmc.namespace, target, "/", Neighbour::Cold);
    let arp = ArpWatch::start(watcher, VIP)?;
    std::thread::sleep(BEFORE);
    for download in &mut downloads {
        ensure!(
            download.running()?,
            "a download ended before anything had happened: {:?}",
            download.end(&sha256)?
        );
    }

    let at = Instant::now();
    match event {
        Event::Planned => {
            fleet.stop(holder)?;
            std::thread::sleep(AWAY);
            fleet.launch(holder)?;
            std::thread::sleep(SETTLE);
        }
        Event::Crash => {
            fleet.kill(holder)?;
            std::thread::sleep(AWAY);
            fleet.launch(holder)?;
            std::thread::sleep(SETTLE);
        }
        Event::NodeDeath => {
            fleet.kill_node(holder)?;
            std::thread::sleep(Duration::from_secs_f64(GOAL_DARK) + AFTERWARDS);
        }
    }
    let (warm, cold) = (
        Noticed::of(&warm.finish()?, at),
        Noticed::of(&cold.finish()?, at),
    );
    let old = fleet.mac(holder);
    let answers = arp.finish()?;
    let moved = answers
        .iter()
        .find(|Answer { at: then, mac }| *then >= at && *mac != old)
        .context("no other node answered ARP after the event")?;
    let mut ends = Vec::new();
    for mut download in downloads {
        let end = download.end(&sha256)?;
        if end.outcome != Outcome::Whole {
            ends.push(format!(
                "{:?} from {}: {}",
                end.outcome,
                end.instance,
                end.said.trim()
            ));
        }
    }
    Ok(Round {
        failed: (warm.failed + cold.failed) as f64,
        tried: warm.tried + cold.tried,
        dark: warm.dark.max(cold.dark),
        lost: warm.lost.max(cold.lost),
        last_failure: warm.last_failure.max(cold.last_failure),
        arp: (moved.at - at).as_secs_f64(),
        broken: ends.len() as f64,
        ends,
    })
}

/// What one client's connects tell of an event.
#[derive(Debug, Default, PartialEq)]
struct Noticed {
    tried: usize,
    failed: usize,
    dark: f64,
    lost: f64,
    last_failure: f64,
}

impl Noticed {
    /// The one that was under way when it happened counts, too.
    fn of(attempts: &[Attempt], event: Instant) -> Self {
        let attempts: Vec<_> = attempts
            .iter()
            .filter(|attempt| attempt.at + Prober::PERIOD >= event)
            .collect();
        let failed = |attempt: &&&Attempt| attempt.failure.is_some();
        let after = |attempt: &Attempt| attempt.at.saturating_duration_since(event).as_secs_f64();
        let Some(first) = attempts.iter().position(|attempt| failed(&attempt)) else {
            return Self {
                tried: attempts.len(),
                ..Self::default()
            };
        };
        // None served any more: dark to the end, which the period after the last one makes longer than any goal
        // that it was watched for.
        let end = attempts.last().map_or(0.0, |last| after(last)) + Prober::PERIOD.as_secs_f64();
        let again = attempts[first..]
            .iter()
            .find(|attempt| attempt.failure.is_none());
        let dark = again.map_or(end, |attempt| after(attempt));
        let from = dark.max(GOAL_DARK);
        let window = from..from + AFTERWARDS.as_secs_f64();
        let then: Vec<_> = attempts
            .iter()
            .filter(|attempt| window.contains(&after(attempt)))
            .collect();
        Self {
            tried: attempts.len(),
            failed: attempts.iter().filter(failed).count(),
            dark,
            lost: then
                .iter()
                .filter(|attempt| attempt.failure.is_some())
                .count() as f64
                / then.len().max(1) as f64,
            last_failure: attempts
                .iter()
                .rfind(failed)
                .map_or(0.0, |attempt| after(attempt)),
        }
    }
}

/// Milliseconds to the refusal of a port that nobody has and of one whose pods are not ready.
fn refusals(fleet: &Fleet, rounds: usize) -> Result<[Vec<f64>; 2]> {
    let client = &fleet.lab.hosts[0].namespace;
    let mut all = [Vec::new(), Vec::new()];
    for (port, times) in [RPC_PORT, UNREADY_PORT].into_iter().zip(&mut all) {
        let target = SocketAddr::from((VIP, port));
        for _ in 0..rounds {
            *times = client.enter(|| {
                let mut took = std::mem::take(times);
                for _ in 0..REFUSALS {
                    let begin = Instant::now();
                    let refused = TcpStream::connect_timeout(&target, Duration::from_secs(5));
                    took.push(begin.elapsed().as_secs_f64() * 1e3);
                    let kind = refused.as_ref().map_err(std::io::Error::kind);
                    ensure!(
                        kind.is_err_and(|kind| kind == ErrorKind::ConnectionRefused),
                        "{target} is not refused: {refused:?}"
                    );
                }
                Ok(took)
            })??;
            // Refusals are rationed.
            std::thread::sleep(Duration::from_secs(1));
        }
        println!(
            "    {target} refused {} times, after {:.3} ms",
            times.len(),
            median(times.clone())
        );
    }
    Ok(all)
}

/// Connections of one host to one pod, in windows: connections a second of the first and the last.
struct Row {
    first: f64,
    last: f64,
}

/// Makes [`ROW`] connections to a pod that is not on the announcer's node; to another such pod each time, whose
/// pairs of addresses and ports are fresh: at most `rounds` times.
fn row(fleet: &Fleet, rounds: usize) -> Result<Vec<Row>> {
    let client = &fleet.lab.hosts[0].namespace;
    client.sysctl("net.ipv4.ip_local_port_range", "1024 65535")?;
    let holder = fleet.wait_for_holder(Fleet::PATIENCE)?;
    let others = fleet.lab.nodes.iter().enumerate();
    let others = others.filter(|(number, _)| *number != holder);
    let pods: Vec<_> = others.flat_map(|(_, node)| &node.pods).collect();
    let mut rows = Vec::new();
    for pod in pods.into_iter().take(rounds) {
        let target = SocketAddrV4::new(VIP, pod.instance_port());
        let path = pod.own_path();
        let (next, failures) = (AtomicU32::new(0), Mutex::new(Vec::new()));
        let times = Mutex::new(Vec::with_capacity(ROW as usize));
        let begin = Instant::now();
        let work = || {
            let mut own = Vec::new();
            while next.fetch_add(1, Ordering::Relaxed) < ROW {
                let limit = Duration::from_secs(20);
                match exchange(None, target, &path, limit) {
                    Ok(()) => own.push(begin.elapsed().as_secs_f64()),
                    Err(error) => lock(&failures).push(format!("{error:#}")),
                }
            }
            lock(&times).extend(own);
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..ROW_THREADS)
                .map(|_| scope.spawn(|| client.enter(work)))
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| match thread.join() {
                    Ok(done) => done,
                    Err(panic) => std::panic::resume_unwind(panic),
                })
        })?;
        let failures = lock(&failures);
        ensure!(
            failures.is_empty(),
            "{} of {ROW} connections to {target} failed, the first: {}",
            failures.len(),
            failures[0]
        );
        let mut times = lock(&times);
        times.sort_by(f64::total_cmp);
        let mut from = 0.0;
        let rates: Vec<f64> = times
            .chunks(WINDOW)
            .map(|window| {
                let until = window[window.len() - 1];
                let rate = window.len() as f64 / (until - from);
                from = until;
                rate
            })
            .collect();
        let shown: Vec<_> = rates.iter().map(|rate| format!("{rate:.0}")).collect();
        println!(
            "    {ROW} connections to {}, by {WINDOW}: {} a second",
            pod.instance,
            shown.join(", ")
        );
        rows.push(Row {
            first: rates[0],
            last: rates[rates.len() - 1],
        });
    }
    Ok(rows)
}

/// What a thread that panicked left is of no use to anybody: its panic ends the bench.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A figure over the rounds.
struct Figure {
    median: f64,
    least: f64,
    most: f64,
}

impl Figure {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.collect();
        Self {
            least: values.iter().copied().fold(f64::INFINITY, f64::min),
            most: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            median: median(values),
        }
    }

    fn json(&self) -> Value {
        json!({"median": self.median, "least": self.least, "most": self.most})
    }

    /// Median and extremes, with so many digits behind the point.
    fn show(&self, digits: usize, unit: &str) -> String {
        let Self {
            median,
            least,
            most,
        } = self;
        format!("{median:.digits$}{unit} [{least:.digits$}–{most:.digits$}]")
    }
}

fn report(
    all: &[Vec<Round>; Event::ALL.len()],
    refusals: &[Vec<f64>; 2],
    row: &[Row],
    quiet: bool,
) -> Value {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header([
        "event",
        "clients see",
        "MetalLB + kube-proxy",
        "ironlb: median [least–most]",
        "ironlb must",
        "",
    ]);
    let mut json = json!({});
    for (event, rounds) in Event::ALL.into_iter().zip(all) {
        let figure = |of: fn(&Round) -> f64| Figure::of(rounds.iter().map(of));
        let failed = figure(|round| round.failed);
        let dark = figure(|round| round.dark);
        let lost = figure(|round| round.lost);
        let last = figure(|round| round.last_failure);
        let arp = figure(|round| round.arp);
        let broken = figure(|round| round.broken);
        let mut add = |what: &str, theirs: &str, ours: String, must: &str, met: &str| {
            table.add_row([event.heading(), what, theirs, &ours, must, met]);
        };
        // What must be none must be none every time.
        let none = |figure: &Figure| judge(figure.most == 0.0);
        let soon = || (format!("< {GOAL_DARK} s"), judge(dark.median < GOAL_DARK));
        let downloads = match event {
            Event::Planned => {
                add(
                    "failed connects",
                    metallb::PLANNED,
                    failed.show(0, ""),
                    "0",
                    none(&failed),
                );
                metallb::PLANNED_DOWNLOADS
            }
            Event::Crash => {
                let (must, met) = soon();
                add(
                    "new connections dark",
                    metallb::CRASH_DARK,
                    dark.show(2, " s"),
                    &must,
                    met,
                );
                metallb::CRASH_DOWNLOADS
            }
            Event::NodeDeath => {
                let (must, met) = soon();
                add(
                    "new connections dark",
                    metallb::DEATH_DARK,
                    dark.show(2, " s"),
                    &must,
                    met,
                );
                let percent = Figure::of(rounds.iter().map(|round| round.lost * 100.0));
                let ours = percent.show(1, " %");
                add(
                    "lost in 5 s from 1.5 s on",
                    metallb::DEATH_LOST,
                    ours,
                    "0",
                    none(&lost),
                );
                add(
                    "last connect that failed",
                    metallb::DEATH_LAST,
                    last.show(2, " s"),
                    &must,
                    judge(last.median < GOAL_DARK),
                );
                metallb::DEATH_DOWNLOADS
            }
        };
        let theirs = match event {
            Event::Planned => metallb::PLANNED_ARP,
            // Not told apart from the dark time.
            Event::Crash | Event::NodeDeath => "",
        };
        add(
            "another node answers ARP",
            theirs,
            arp.show(2, " s"),
            "",
            "",
        );
        let what = match event {
            Event::NodeDeath => format!("broken downloads of {DOWNLOADS} from pods that live"),
            _ => format!("broken downloads of {DOWNLOADS}"),
        };
        add(&what, downloads, broken.show(0, ""), "0", none(&broken));
        json[event.name()] = json!({
            "dark_s": dark.json(),
            "failed_connects": failed.json(),
            "broken_downloads": broken.json(),
            "lost_afterwards": lost.json(),
            "last_failure_s": last.json(),
            "arp_moved_s": arp.json(),
        });
    }
    for (what, name, times) in [
        ("unused port", "unused_port", &refusals[0]),
        ("no ready pod", "no_ready_pod", &refusals[1]),
    ] {
        let figure = Figure::of(times.iter().copied());
        table.add_row([
            what,
            "refused (RST) after",
            metallb::REFUSAL,
            &figure.show(3, " ms"),
            &format!("< {GOAL_REFUSAL} ms"),
            judge(figure.median < GOAL_REFUSAL),
        ]);
        json["refusal_ms"][name] = figure.json();
    }
    let first = Figure::of(row.iter().map(|row| row.first));
    let last = Figure::of(row.iter().map(|row| row.last));
    let ratio = Figure::of(row.iter().map(|row| row.last / row.first));
    let ours = format!(
        "{:.0}/s → {:.0}/s: {}",
        first.median,
        last.median,
        ratio.show(2, "")
    );
    table.add_row([
        &format!("{ROW} connections, one host to one pod"),
        &format!("rate of the first and last {WINDOW}"),
        metallb::ROW,
        &ours,
        &format!("flat: ≥ {GOAL_FLAT}"),
        judge(ratio.median >= GOAL_FLAT),
    ]);
    json["row"] =
        json!({"first_per_s": first.json(), "last_per_s": last.json(), "ratio": ratio.json()});
    json["quiet"] = json!(quiet);
    json["rounds"] = json!(all[0].len());
    println!(
        "\n{table}\nMetalLB 0.16 (L2) and kube-proxy 1.36: medians of a real cluster of three nodes, not measured here. \
         Times and shares are the worse ones of two clients, one that knows the VIP's MAC and one that asks for it each time, \
         connecting every {} ms and failing when not served in 0.9 s; what must be 0 is met only if it was so in every round.",
        Prober::PERIOD.as_millis()
    );
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Attempts every period from one before the event on: a dot was served, an x failed.
    fn attempts(event: Instant, shown: &str) -> Vec<Attempt> {
        (0_u32..)
            .zip(shown.chars())
            .map(|(number, mark)| Attempt {
                at: event + Prober::PERIOD * number - Prober::PERIOD,
                failure: (mark == 'x').then(|| "refused".to_owned()),
            })
            .collect()
    }

    #[test]
    fn dark_is_until_one_is_served_and_losses_after_it_are_counted() {
        let event = Instant::now() + Duration::from_secs(60);
        let of = |shown| Noticed::of(&attempts(event, shown), event);
        assert_eq!(
            of("....."),
            Noticed {
                tried: 5,
                ..Noticed::default()
            }
        );
        // The attempts at 50, 100 and 150 … 200 ms is the first that was served; the one at 250 ms failed again.
        let seen = of("..xxx.x.");
        assert_eq!((seen.tried, seen.failed), (8, 4));
        assert!((seen.dark - 0.2).abs() < 1e-6, "{seen:?}");
        assert!((seen.last_failure - 0.25).abs() < 1e-6, "{seen:?}");
        assert!(seen.lost.abs() < 1e-6, "within what is allowed: {seen:?}");
        // The one at 1.55 s is later than that: one of four from 1.5 s on.
        let late = format!("..xxx{}x..", ".".repeat(27));
        let seen = Noticed::of(&attempts(event, &late), event);
        assert!((seen.dark - 0.2).abs() < 1e-6, "{seen:?}");
        assert!((seen.lost - 0.25).abs() < 1e-6, "{seen:?}");
        let never = of(".xxxx");
        assert!((never.dark - 0.2).abs() < 1e-6, "{never:?}");
    }
}
