//! `/metrics`: what the pinned maps count, and what the agent knows of itself, as OpenMetrics text.
//!
//! Counters are read when somebody asks. Names follow the conventions of Prometheus; docs/KUBERNETES.md
//! lists them, and a test compares.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::dataplane::read::{
    BackendView, ControlView, FlowCounts, PeerView, PortView, Reader, TrafficView, UplinkView,
    VerdictView, VipView,
};
use crate::dataplane::told::NotTold;
use crate::dataplane::{AttachedMode, DataplaneError};
use crate::kubernetes::LATENCY_BUCKETS_MS;
use crate::observed::{Followed, Measured, Snapshot};
use crate::peers::Counters;

/// The text's type.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What the maps say at one moment.
#[derive(Debug)]
pub(super) struct Views {
    control: ControlView,
    flows: FlowCounts,
    verdicts: Vec<VerdictView>,
    uplinks: Vec<UplinkView>,
    vips: Vec<VipView>,
    peers: Vec<PeerView>,
    ports: Vec<PortView>,
    not_told: NotTold,
}

impl Views {
    /// Reads all maps: many system calls, so not for the runtime's own threads.
    pub(super) fn read(reader: &Reader) -> Result<Self, DataplaneError> {
        Ok(Self {
            control: reader.control()?,
            flows: reader.flow_counts()?,
            verdicts: reader.verdicts()?,
            uplinks: reader.uplinks()?,
            vips: reader.vips()?,
            peers: reader.peers()?,
            ports: reader.ports()?,
            not_told: reader.not_told()?,
        })
    }
}

/// The text for what was read and observed.
pub(super) fn render(
    views: Views,
    snapshot: Snapshot,
    measured: &Measured,
) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("ironlb");
    let Measured {
        plan,
        write,
        map_writes,
        health_changes,
        flows_ended,
    } = measured.clone();
    registry.register("plan_duration_seconds", "Time to plan the tables", plan);
    registry.register(
        "write_duration_seconds",
        "Time to bring the maps in step",
        write,
    );
    registry.register("map_writes", "Map writes and removals", map_writes);
    registry.register(
        "health_check_changes",
        "Changes of a backend's health",
        health_changes,
    );
    registry.register(
        "flows_ended",
        "Living flows that have ended, by who ended them, since the agent's start",
        flows_ended,
    );
    registry.register_collector(Box::new(Scrape { views, snapshot }));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

/// A label and its value.
type Label = (&'static str, String);

#[derive(Debug)]
struct Scrape {
    views: Views,
    snapshot: Snapshot,
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder) -> fmt::Result {
        let mut out = Output { encoder };
        self.agent(&mut out)?;
        self.tables(&mut out)?;
        self.peers(&mut out)?;
        self.ports(&mut out)?;
        self.backends(&mut out)
    }
}

impl Scrape {
    fn agent(&self, out: &mut Output<'_>) -> fmt::Result {
        let Snapshot {
            state_age,
            file,
            kubernetes,
            ready,
            warnings,
            idle,
            checks,
            lost,
            peers: _,
        } = &self.snapshot;
        let control = &self.views.control;
        out.gauges(
            "build_info",
            "The running agent: version and layout of the maps",
            [(
                vec![
                    ("version", env!("CARGO_PKG_VERSION").to_owned()),
                    ("layout", control.layout_version.to_string()),
                ],
                1.0,
            )],
        )?;
        out.gauge("ready", "Whether /readyz says so", f64::from(*ready))?;
        out.gauge(
            "state_age_seconds",
            "Time since the source last showed that the state is its own; 0 for a file that is good",
            state_age.as_secs_f64(),
        )?;
        out.gauge(
            "config_rejected",
            "Whether the configuration file as it is now cannot be served",
            f64::from(file.problem.is_some()),
        )?;
        let results = [("good", file.good), ("bad", file.bad)];
        out.counters(
            "config_reads",
            "Configurations that were read, by whether they could be served",
            results.map(|(result, count)| (vec![("result", result.to_owned())], count)),
        )?;
        if let Some(followed) = kubernetes {
            out.kubernetes(followed)?;
        }
        out.gauge(
            "unfulfilled_wishes",
            "What the source wants and the tables do not hold: clashes, full ranges; the log names them",
            *warnings as f64,
        )?;
        out.gauge(
            "uplinks_idle",
            "Configured uplinks that no interface of the node matches",
            *idle as f64,
        )?;
        if let Some(synced) = control.synced_seconds {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            out.gauge(
                "maps_synced_timestamp_seconds",
                "When the maps were last brought in step with the source, which happens when something changes",
                now.map_or(0.0, |now| now.as_secs_f64() - synced),
            )?;
        }
        // One row a backend: several incarnations may have an address between them.
        let results: BTreeMap<_, _> = checks
            .iter()
            .map(|check| ((&check.service, &check.instance, check.address), check.up))
            .collect();
        out.gauges(
            "health_check_up",
            "Result of a backend's health check",
            results
                .into_iter()
                .map(|((service, instance, address), up)| {
                    let labels = vec![
                        ("service", service.clone()),
                        ("instance_name", instance.clone()),
                        ("address", address.to_string()),
                    ];
                    (labels, f64::from(up))
                }),
        )?;
        out.counters(
            "uplink_lost_frames",
            "Frames that native XDP sent out of a veth and that the other end did not take",
            lost.iter()
                .map(|(interface, frames)| (vec![("interface", interface.clone())], *frames)),
        )
    }

    fn tables(&self, out: &mut Output<'_>) -> fmt::Result {
        let Views {
            control,
            flows,
            verdicts,
            uplinks,
            vips,
            peers: _,
            ports: _,
            not_told,
        } = &self.views;
        out.counters(
            "packets",
            "Packets by how they ended",
            verdicts
                .iter()
                .map(|v| (vec![("verdict", v.verdict.to_owned())], v.packets)),
        )?;
        let table = |name: &str| vec![("table", name.to_owned())];
        out.gauges(
            "flows",
            "Entries of the flow tables; the young one holds flows that begin and that end",
            [
                (table("living"), flows.living as f64),
                (table("young"), flows.young as f64),
            ],
        )?;
        out.gauges(
            "flow_table_entries",
            "Room of the flow tables",
            [
                (table("living"), f64::from(control.living_capacity)),
                (table("young"), f64::from(control.young_capacity)),
            ],
        )?;
        out.gauge(
            "flow_table_full",
            "Whether new flows are refused because the living table has no room",
            f64::from(control.living_full),
        )?;
        out.counters(
            "endings_lost",
            "Ended flows that the agent did not hear of, because it was away for long",
            [(Vec::new(), not_told.endings_lost)],
        )?;
        out.gauges(
            "uplink_attached",
            "Interfaces that carry programs; mode is native, tc, or egress where only replies leave",
            uplinks.iter().map(|uplink| {
                let mode = match uplink.mode {
                    AttachedMode::Native => "native",
                    AttachedMode::Tc => "tc",
                    AttachedMode::Egress => "egress",
                };
                let labels = vec![
                    ("interface", uplink.interface.clone()),
                    ("mode", mode.to_owned()),
                ];
                (labels, f64::from(!uplink.programs.is_empty()))
            }),
        )?;
        out.gauges(
            "vip_announced",
            "Whether this node answers ARP and ND for the VIP",
            vips.iter().map(|vip| {
                let labels = vec![
                    ("vip", vip.address.to_string()),
                    ("interface", vip.interface.clone()),
                ];
                (labels, f64::from(vip.answering))
            }),
        )
    }

    fn peers(&self, out: &mut Output<'_>) -> fmt::Result {
        let Views { vips, peers, .. } = &self.views;
        let node = |peer: &PeerView| vec![("node", peer.node.clone())];
        let gauge = |is: fn(&PeerView) -> bool| {
            let row = move |peer: &PeerView| (node(peer), f64::from(is(peer)));
            peers.iter().map(row).collect::<Vec<_>>()
        };
        out.gauges(
            "peer_live",
            "Whether the other node's agent is heard",
            gauge(|peer| peer.live),
        )?;
        out.gauges(
            "peer_reflecting",
            "Whether probes come back from the other node's program, so that it takes new flows",
            gauge(|peer| peer.reflecting),
        )?;
        out.gauges(
            "peer_synced",
            "Whether the other node has told which flows the hash would not find",
            gauge(|peer| peer.synced),
        )?;
        out.counters(
            "peer_handed_on_packets",
            "Packets of clients that were handed on to the other node",
            peers
                .iter()
                .map(|peer| (node(peer), peer.handed_on_packets)),
        )?;
        out.counters(
            "peer_handed_on_bytes",
            "Bytes of clients that were handed on to the other node",
            peers.iter().map(|peer| (node(peer), peer.handed_on_bytes)),
        )?;
        out.counters(
            "peer_handed_on_flows",
            "New flows that were handed on to the other node",
            peers.iter().map(|peer| (node(peer), peer.handed_on_flows)),
        )?;
        let elected = || {
            let rows = vips.iter();
            rows.filter_map(|vip| Some((vip.address.to_string(), vip.announcer.as_ref()?)))
        };
        out.gauges(
            "vip_announcer",
            "The node that announces an elected VIP, as this one sees it",
            elected().filter_map(|(vip, row)| {
                let labels = vec![("vip", vip), ("node", row.node.clone()?)];
                Some((labels, 1.0))
            }),
        )?;
        out.gauges(
            "vip_epoch",
            "Rises with every change of an elected VIP's announcer",
            elected().map(|(vip, row)| (vec![("vip", vip)], row.epoch as f64)),
        )?;
        out.gauges(
            "vip_conflict",
            "Whether nodes disagree on who announces an elected VIP",
            elected().map(|(vip, row)| (vec![("vip", vip)], f64::from(row.conflict.is_some()))),
        )?;
        let Counters {
            heartbeats_sent,
            heartbeats_heard,
            rejected_forged,
            rejected_replayed,
            rejected_malformed,
            probes_sent,
            probes_returned,
            gratuitous_arps,
            exceptions_sent,
            exceptions_held,
            exceptions_lost,
            takeovers,
        } = self.snapshot.peers;
        let result = |name: &str, count| (vec![("result", name.to_owned())], count);
        out.counters(
            "heartbeats",
            "Heartbeats among the nodes; rejected ones changed nothing",
            [
                result("sent", heartbeats_sent),
                result("heard", heartbeats_heard),
                result("forged", rejected_forged),
                result("replayed", rejected_replayed),
                result("malformed", rejected_malformed),
            ],
        )?;
        out.counters(
            "probes",
            "Probes of other nodes' programs",
            [
                result("sent", probes_sent),
                result("returned", probes_returned),
            ],
        )?;
        let of = |whose: &str, count: u64| (vec![("of", whose.to_owned())], count as f64);
        out.gauges(
            "exceptions",
            "Living flows that the hash would not find: of this node, and of the others as they have told",
            [of("self", exceptions_sent), of("peers", exceptions_held)],
        )?;
        let none = Vec::new;
        out.counters(
            "exceptions_lost",
            "Exceptions that there was no room for",
            [(none(), exceptions_lost)],
        )?;
        out.counters(
            "gratuitous_arps",
            "Frames that announced a VIP unasked",
            [(none(), gratuitous_arps)],
        )?;
        out.counters(
            "takeovers",
            "Elected VIPs that this node has taken",
            [(none(), takeovers)],
        )
    }

    fn ports(&self, out: &mut Output<'_>) -> fmt::Result {
        let ports = &self.views.ports;
        let serving = || ports.iter().filter(|port| port.serving);
        out.gauges(
            "port_backends",
            "Backends of a VIP port",
            serving().map(|port| (port_labels(port), port.backends.len() as f64)),
        )?;
        out.gauges(
            "port_backends_ready",
            "Backends of a VIP port that take new flows",
            serving().map(|port| (port_labels(port), port.eligible as f64)),
        )?;
        let traffic = ports.iter().map(|port| (port_labels(port), port.traffic));
        out.traffic("port", "a VIP port", traffic)
    }

    fn backends(&self, out: &mut Output<'_>) -> fmt::Result {
        // Two incarnations of an instance may exist for a moment, under the same names.
        let mut rows: BTreeMap<Vec<Label>, TrafficView> = BTreeMap::new();
        for port in &self.views.ports {
            for backend in &port.backends {
                let sum = rows.entry(backend_labels(port, backend)).or_default();
                let TrafficView {
                    packets_in,
                    bytes_in,
                    packets_out,
                    bytes_out,
                    flows,
                } = backend.traffic;
                sum.packets_in += packets_in;
                sum.bytes_in += bytes_in;
                sum.packets_out += packets_out;
                sum.bytes_out += bytes_out;
                sum.flows += flows;
            }
        }
        out.traffic("backend", "a backend", rows.into_iter())
    }
}

fn port_labels(port: &PortView) -> Vec<Label> {
    let mut labels = address_labels(port.vip, port.port);
    labels.push(("service", port.service.clone()));
    labels.push(("port_name", port.name.clone()));
    // An empty label is none.
    labels.push((
        "slot",
        port.slot.map_or_else(String::new, |slot| slot.to_string()),
    ));
    labels
}

/// `instance` is a label of Prometheus's own.
fn backend_labels(port: &PortView, backend: &BackendView) -> Vec<Label> {
    let mut labels = port_labels(port);
    labels.push(("instance_name", backend.instance.clone()));
    labels.push(("address", backend.address.to_string()));
    labels
}

fn address_labels(vip: IpAddr, port: u16) -> Vec<Label> {
    vec![("vip", vip.to_string()), ("port", port.to_string())]
}

struct Output<'a> {
    encoder: DescriptorEncoder<'a>,
}

impl Output<'_> {
    fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        let help = format!("{help}.");
        let metric = self
            .encoder
            .encode_descriptor(name, &help, None, MetricType::Gauge)?;
        ConstGauge::new(value).encode(metric)
    }

    fn gauges(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (Vec<Label>, f64)>,
    ) -> fmt::Result {
        let mut metric =
            self.encoder
                .encode_descriptor(name, &format!("{help}."), None, MetricType::Gauge)?;
        for (labels, value) in rows {
            ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn counters(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (Vec<Label>, u64)>,
    ) -> fmt::Result {
        let mut metric =
            self.encoder
                .encode_descriptor(name, &format!("{help}."), None, MetricType::Counter)?;
        for (labels, value) in rows {
            ConstCounter::new(value).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn kubernetes(&mut self, followed: &Followed) -> fmt::Result {
        let Followed { leads, latency } = followed;
        self.gauge(
            "kubernetes_leader",
            "Whether this agent writes status, slots and Events of the Services",
            f64::from(*leads),
        )?;
        let beyond = latency.count - latency.buckets.iter().sum::<u64>();
        let bounds = LATENCY_BUCKETS_MS.iter().map(|ms| f64::from(*ms) / 1000.0);
        let buckets: Vec<_> = bounds
            .zip(latency.buckets)
            .chain([(f64::INFINITY, beyond)])
            .collect();
        let mut metric = self.encoder.encode_descriptor(
            "kubernetes_event_to_maps_seconds",
            "Time from a watch event to the maps.",
            None,
            MetricType::Histogram,
        )?;
        let sum = latency.sum.as_secs_f64();
        metric.encode_histogram::<NoLabelSet>(sum, latency.count, &buckets, None)
    }

    /// The counters of something that traffic goes through; `in` is from clients.
    fn traffic(
        &mut self,
        what: &str,
        whose: &str,
        rows: impl Iterator<Item = (Vec<Label>, TrafficView)>,
    ) -> fmt::Result {
        let (mut packets, mut bytes, mut flows) = (Vec::new(), Vec::new(), Vec::new());
        for (labels, traffic) in rows {
            let towards = |direction: &str| {
                let mut labels = labels.clone();
                labels.push(("direction", direction.to_owned()));
                labels
            };
            packets.push((towards("in"), traffic.packets_in));
            packets.push((towards("out"), traffic.packets_out));
            bytes.push((towards("in"), traffic.bytes_in));
            bytes.push((towards("out"), traffic.bytes_out));
            flows.push((labels, traffic.flows));
        }
        let help = |of: &str| format!("{of} of {whose}");
        self.counters(
            &format!("{what}_packets"),
            &help("Packets from (in) and to clients (out; a GSO packet counts once)"),
            packets,
        )?;
        self.counters(
            &format!("{what}_bytes"),
            &help("Bytes of frames from (in) and to clients (out)"),
            bytes,
        )?;
        self.counters(&format!("{what}_flows"), &help("New flows"), flows)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use super::*;
    use crate::dataplane::read::AnnouncerView;
    use crate::kubernetes::Latency;
    use crate::observed::{CheckResult, Observed};

    fn views() -> Views {
        let traffic = TrafficView {
            packets_in: 1,
            bytes_in: 20,
            packets_out: 3,
            bytes_out: 40,
            flows: 5,
        };
        let vip = IpAddr::from([172, 22, 0, 2]);
        let backend = |generation: u16| BackendView {
            index: generation,
            generation,
            instance: "ironic-0".to_owned(),
            uid: generation.to_string(),
            address: IpAddr::from([10, 244, 0, 11]),
            port: 6180,
            vip: Some(vip),
            vip_port: Some(6200),
            service: "metal3/ironic".to_owned(),
            port_name: "images".to_owned(),
            node: None,
            eligible: true,
            host_network: false,
            traffic,
        };
        Views {
            control: ControlView {
                agent_pid: 1,
                agent_running: true,
                agent_version: "1".to_owned(),
                agent_started_seconds: Some(1.0),
                synced_seconds: Some(2.5),
                refusals_per_second: 1000,
                living_full: false,
                living_capacity: 131_072,
                young_capacity: 65_536,
                layout_version: 1,
            },
            not_told: NotTold {
                suppressed: 1,
                lost: 2,
                endings_lost: 3,
            },
            flows: FlowCounts {
                living: 7,
                young: 8,
            },
            verdicts: vec![VerdictView {
                verdict: "forwarded",
                packets: 12,
                explanation: "",
            }],
            uplinks: vec![UplinkView {
                slot: 0,
                interface: "eth1".to_owned(),
                ifindex: 2,
                mode: AttachedMode::Native,
                mac: String::new(),
                vlan: None,
                bypass_drop: true,
                bypass_udp: Vec::new(),
                gateways: Vec::new(),
                vips: vec![vip],
                programs: Vec::new(),
            }],
            vips: vec![VipView {
                address: vip,
                interface: "eth1".to_owned(),
                external: false,
                answering: true,
                announcer: Some(AnnouncerView {
                    node: Some("node-a".to_owned()),
                    since_seconds: Some(5.0),
                    epoch: 3,
                    conflict: None,
                }),
                refuse: "reject".to_owned(),
                pass: Vec::new(),
            }],
            peers: vec![PeerView {
                number: 1,
                node: "node-b".to_owned(),
                version: "1".to_owned(),
                live: false,
                reflecting: true,
                synced: true,
                since_seconds: Some(5.0),
                links: Vec::new(),
                handed_on_packets: 10,
                handed_on_bytes: 11,
                handed_on_flows: 12,
            }],
            ports: vec![PortView {
                id: 3,
                vip,
                port: 6200,
                service: "metal3/ironic".to_owned(),
                name: "images".to_owned(),
                slot: Some(0),
                client_affinity: false,
                source_ranges: None,
                serving: true,
                eligible: 1,
                backends: vec![backend(1), backend(2)],
                traffic,
            }],
        }
    }

    fn text() -> String {
        let observed = Observed::new();
        observed.measured.plan.observe(0.001);
        observed.lost("eth1", 9);
        let mut snapshot = observed.snapshot();
        snapshot.state_age = Duration::from_millis(1500);
        snapshot.file.bad = 2;
        snapshot.peers.rejected_forged = 4;
        snapshot.peers.exceptions_held = 6;
        snapshot.kubernetes = Some(Followed {
            leads: true,
            latency: Latency {
                buckets: [0, 0, 0, 3, 0, 0, 0, 0, 0, 0],
                count: 4,
                sum: Duration::from_millis(2028),
            },
        });
        snapshot.checks = vec![CheckResult {
            service: "metal3/ironic".to_owned(),
            instance: "ironic-0".to_owned(),
            address: IpAddr::from([10, 244, 0, 11]),
            up: false,
        }];
        render(views(), snapshot, &observed.measured).expect("text")
    }

    #[test]
    fn names_are_labels_and_counters_are_sums() {
        let text = text();
        let port =
            r#"vip="172.22.0.2",port="6200",service="metal3/ironic",port_name="images",slot="0""#;
        for line in [
            r#"ironlb_packets_total{verdict="forwarded"} 12"#.to_owned(),
            r#"ironlb_flows{table="living"} 7.0"#.to_owned(),
            r#"ironlb_flow_table_entries{table="young"} 65536.0"#.to_owned(),
            r#"ironlb_uplink_attached{interface="eth1",mode="native"} 0.0"#.to_owned(),
            r#"ironlb_uplink_lost_frames_total{interface="eth1"} 9"#.to_owned(),
            r#"ironlb_vip_announced{vip="172.22.0.2",interface="eth1"} 1.0"#.to_owned(),
            r#"ironlb_vip_announcer{vip="172.22.0.2",node="node-a"} 1.0"#.to_owned(),
            r#"ironlb_peer_live{node="node-b"} 0.0"#.to_owned(),
            r#"ironlb_peer_reflecting{node="node-b"} 1.0"#.to_owned(),
            r#"ironlb_peer_handed_on_flows_total{node="node-b"} 12"#.to_owned(),
            r#"ironlb_heartbeats_total{result="forged"} 4"#.to_owned(),
            r#"ironlb_exceptions{of="peers"} 6.0"#.to_owned(),
            "ironlb_state_age_seconds 1.5".to_owned(),
            "ironlb_plan_duration_seconds_count 1".to_owned(),
            r#"ironlb_config_reads_total{result="bad"} 2"#.to_owned(),
            "ironlb_kubernetes_leader 1.0".to_owned(),
            r#"ironlb_kubernetes_event_to_maps_seconds_bucket{le="0.01"} 3"#.to_owned(),
            r#"ironlb_kubernetes_event_to_maps_seconds_bucket{le="+Inf"} 4"#.to_owned(),
            r#"ironlb_health_check_up{service="metal3/ironic",instance_name="ironic-0",address="10.244.0.11"} 0.0"#.to_owned(),
            format!("ironlb_port_bytes_total{{{port},direction=\"out\"}} 40"),
            format!("ironlb_port_backends{{{port}}} 2.0"),
            // Two incarnations, one row.
            format!("ironlb_backend_flows_total{{{port},instance_name=\"ironic-0\",address=\"10.244.0.11\"}} 10"),
        ] {
            assert!(text.lines().any(|l| l == line), "no line `{line}` in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
        let mut lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        lines.sort_unstable();
        let series = |line: &str| line.rsplit_once(' ').map(|(series, _)| series.to_owned());
        assert!(
            lines.windows(2).all(|w| series(w[0]) != series(w[1])),
            "a series twice"
        );
    }

    #[test]
    fn the_documentation_lists_exactly_these_metrics() {
        let text = text();
        let served: BTreeSet<_> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE "))
            .filter_map(|line| line.split_once(' '))
            .map(|(name, kind)| match kind {
                "counter" => format!("{name}_total"),
                _ => name.to_owned(),
            })
            .collect();
        let manual = include_str!("../../../docs/KUBERNETES.md");
        let documented: BTreeSet<_> = manual
            .lines()
            .filter_map(|line| line.strip_prefix("| `ironlb_"))
            .filter_map(|rest| rest.split_once('`'))
            .map(|(name, _)| format!("ironlb_{name}"))
            .collect();
        assert_eq!(documented, served);
    }
}
