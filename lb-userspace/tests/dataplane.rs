//! The data plane on real interfaces: each test has network namespaces and a pin root of its own. As root.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant};

use aya::EbpfLoader;
use aya::maps::{Array, HashMap, Map, MapData};
use aya::programs::{
    LinkOrder, Program, SchedClassifier, TcAttachType, Xdp, XdpMode, tc::TcAttachOptions,
};
use ironlb::dataplane::read::{FlowFilter, LinkView, Reader};
use ironlb::dataplane::shadow::{USES, Use};
use ironlb::dataplane::{AttachReport, AttachedMode, Dataplane, DataplaneError, Options, unload};
use ironlb::desired::{Announce, Bypass, Mode, Refuse, UplinkSelector, UplinkSpec};
use ironlb::interfaces::InterfaceError;
use ironlb::tables::{BackendRow, PortRow, TableSet, VipRow};
use lb_common::{Addr, LAYOUT_VERSION, Uplink, Vip, map, program};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// What names of namespaces and pin roots begin with; the process and the test follow.
const PREFIX: &str = "ironlb-dp-";

/// A network namespace with an uplink (`up0`, 172.22.0.11/24) whose other end is in a second one.
struct Node {
    name: String,
    bpffs: PathBuf,
}

impl Node {
    fn new(test: &str) -> Self {
        static SWEEP: Once = Once::new();
        SWEEP.call_once(Self::sweep);
        let node = Self::called(format!("{PREFIX}{}-{test}", std::process::id()));
        let wire = node.wire();
        run(&format!("ip netns add {}", node.name));
        run(&format!("ip netns add {wire}"));
        node.ip("link add up0 type veth peer name wire0");
        node.ip(&format!("link set wire0 netns {wire} up"));
        node.ip("addr add 172.22.0.11/24 dev up0");
        node.ip("link set up0 up");
        node.ip("link set lo up");
        node
    }

    fn called(name: String) -> Self {
        let bpffs = Path::new("/sys/fs/bpf").join(&name);
        Self { name, bpffs }
    }

    /// Removes what killed runs left behind: names carry the process that made them.
    fn sweep() {
        for directory in ["/run/netns", "/sys/fs/bpf"] {
            for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                let process = name
                    .strip_prefix(PREFIX)
                    .and_then(|rest| rest.split('-').next());
                if process.is_some_and(|id| !Path::new("/proc").join(id).exists()) {
                    drop(Self::called(name));
                }
            }
        }
    }

    fn wire(&self) -> String {
        format!("{}-w", self.name)
    }

    fn ip(&self, arguments: &str) {
        run(&format!("ip -n {} {arguments}", self.name));
    }

    /// As senders on a wire do: native XDP is refused where it can be seen that they do not.
    fn sends_whole_checksums(&self, interface: &str) {
        let name = &self.name;
        run(&format!(
            "nsenter --net=/run/netns/{name} ethtool -K {interface} tx off"
        ));
    }

    fn options(&self) -> Options {
        Options {
            bpffs: self.bpffs.clone(),
            living_flows: 1024,
            young_flows: 1024,
        }
    }

    /// Runs something in the namespace, on a thread of its own.
    fn inside<T: Send>(&self, run: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(Path::new("/run/netns").join(&self.name)).expect("namespace");
        thread::scope(|scope| {
            let inside = scope.spawn(move || {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                    .expect("setns");
                run()
            });
            match inside.join() {
                Ok(value) => value,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    fn open(&self) -> Dataplane {
        // A command that another test starts right now has the lock, too, until it executes.
        for _ in 0..100 {
            match Dataplane::open(&self.options()) {
                Err(DataplaneError::Locked { .. }) => thread::sleep(Duration::from_millis(10)),
                opened => return opened.expect("opens"),
            }
        }
        Dataplane::open(&self.options()).expect("opens")
    }

    fn reader(&self) -> Reader {
        Reader::open(&self.bpffs).expect("loaded")
    }

    /// The pinned links of `up0` by hook.
    fn links(&self) -> BTreeMap<String, LinkView> {
        let uplinks = self.reader().uplinks().expect("uplinks");
        let up0 = uplinks.into_iter().find(|uplink| uplink.interface == "up0");
        let links = up0.expect("up0 is attached").programs.into_iter();
        links.map(|link| (link.hook.clone(), link)).collect()
    }

    fn map<T: TryFrom<Map, Error: std::fmt::Debug>>(&self, name: &str) -> T {
        let data = MapData::from_pin(self.maps().join(name)).expect("pinned");
        T::try_from(Map::from_map_data(data).expect("known type")).expect("as laid out")
    }

    /// Where the maps are.
    fn maps(&self) -> PathBuf {
        self.bpffs.join(format!("v{LAYOUT_VERSION}"))
    }

    fn clean(&self) {
        let _ = unload(&self.bpffs);
        for name in [self.name.clone(), self.wire()] {
            let _ = Command::new("ip").args(["netns", "del", &name]).output();
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.clean();
    }
}

fn run(command: &str) {
    let mut words = command.split_whitespace();
    let output = Command::new(words.next().expect("a program"))
        .args(words)
        .output()
        .expect("starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {text}");
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn named(name: &str, mode: Mode) -> UplinkSpec {
    UplinkSpec {
        selector: UplinkSelector::Name(name.to_owned()),
        mode,
        vlan: None,
        gateways: Vec::new(),
        bypass: Bypass::Auto,
        bypass_udp: vec![53, 123],
    }
}

fn in_subnet(mode: Mode) -> UplinkSpec {
    UplinkSpec {
        selector: UplinkSelector::Subnet(ip("172.22.0.0"), 24),
        ..named("", mode)
    }
}

/// VIP 172.22.0.2:6385 with these backends on 10.244.0.N:6385.
fn tables(backends: &[(&str, u8)]) -> Arc<TableSet> {
    let row = |(instance, last): &(&str, u8)| BackendRow {
        instance: (*instance).to_owned(),
        uid: String::new(),
        address: IpAddr::from([10, 244, 0, *last]),
        port: 6385,
        node: None,
        eligible: true,
    };
    let vip = VipRow {
        announce: Announce::Always,
        candidate: true,
        refuse: Refuse::Reject,
        pass: Vec::new(),
    };
    let port = PortRow {
        service: "metal3/ironic".to_owned(),
        port_name: "api".to_owned(),
        slot: None,
        seed: 7,
        client_affinity: false,
        source_ranges: None,
        backends: backends.iter().map(row).collect(),
    };
    Arc::new(TableSet {
        vips: [(ip("172.22.0.2"), vip)].into(),
        ports: [((ip("172.22.0.2"), 6385), port)].into(),
        ..TableSet::default()
    })
}

/// Attaches and applies, and leaves it all running.
fn serve(node: &Node, uplinks: &[UplinkSpec], tables: &Arc<TableSet>) -> AttachReport {
    node.inside(|| {
        let mut dataplane = node.open();
        let report = dataplane.attach(uplinks, tables).expect("attaches");
        let applied = dataplane.apply(tables).expect("applies");
        assert_eq!(applied.vips_without_uplink, Vec::<IpAddr>::new());
        report
    })
}

fn restart_keeps_links_and_replaces_programs(test: &str, mode: Mode, forward: &str) {
    let node = Node::new(test);
    let tables = tables(&[("ironic-0", 10)]);
    serve(&node, &[in_subnet(mode)], &tables);
    let before = node.links();
    assert_eq!(before.keys().collect::<Vec<_>>(), ["egress", forward]);
    serve(&node, &[in_subnet(mode)], &tables);
    let after = node.links();
    for (hook, link) in &before {
        assert_eq!(link.link, after[hook].link, "{hook}: the link stays");
        assert_ne!(
            link.program, after[hook].program,
            "{hook}: the program is new"
        );
    }
}

#[test]
fn a_restart_updates_the_programs_behind_native_links() {
    restart_keeps_links_and_replaces_programs("native", Mode::Native, "xdp");
}

#[test]
fn a_restart_updates_the_programs_behind_tc_links() {
    restart_keeps_links_and_replaces_programs("tc", Mode::Tc, "ingress");
}

#[test]
fn auto_is_tc_on_veth_and_says_why() {
    let node = Node::new("auto");
    let report = serve(&node, &[in_subnet(Mode::Auto)], &tables(&[]));
    let [attachment] = &report.attachments[..] else {
        panic!("{report:?}");
    };
    assert_eq!(attachment.interface, "up0");
    assert_eq!(attachment.mode, AttachedMode::Tc);
    let note = attachment.note.as_deref().expect("a reason");
    assert!(note.contains("veth") && note.contains("checksum"), "{note}");
}

#[test]
fn a_driver_without_xdp_falls_to_tc_in_auto_and_is_an_error_in_native() {
    let node = Node::new("noxdp");
    node.ip("link add link up0 name mac0 type macvlan mode bridge");
    let report = serve(
        &node,
        &[named("mac0", Mode::Auto), in_subnet(Mode::Tc)],
        &tables(&[]),
    );
    let mac0 = &report.attachments[1];
    assert_eq!(
        (mac0.interface.as_str(), mac0.mode),
        ("mac0", AttachedMode::Tc)
    );
    let note = mac0.note.as_deref().expect("a reason");
    assert!(note.contains("has no XDP"), "{note}");
    let error = node.inside(|| {
        let mut dataplane = node.open();
        dataplane.attach(&[named("mac0", Mode::Native)], &tables(&[]))
    });
    let text = error.expect_err("native cannot be").to_string();
    assert!(text.contains("mac0") && text.contains("mode: tc"), "{text}");
}

/// Of every errno that a virtual device can give; the words for the others are tested beside them.
#[test]
fn what_cannot_be_native_gets_the_remedy_and_nothing_stays_attached() {
    let node = Node::new("remedy");
    let wanted = tables(&[("ironic-0", 10)]);
    node.ip("link add link up0 name mac0 type macvlan mode bridge");
    // As many receive queues as the other end sends with are wanted.
    node.ip("link add many0 numtxqueues 4 numrxqueues 4 type veth peer name few0 numrxqueues 1");
    node.sends_whole_checksums("many0");
    for (name, remedy) in [
        ("mac0", "its driver has no XDP"),
        ("few0", "ethtool -L few0 combined N"),
    ] {
        let uplinks = [in_subnet(Mode::Tc), named(name, Mode::Native)];
        node.inside(|| {
            let mut dataplane = node.open();
            let error = dataplane.attach(&uplinks, &wanted).expect_err("no XDP");
            let text = error.to_string();
            for part in [name, remedy, "mode: tc"] {
                assert!(text.contains(part), "{name}: no `{part}` in {text}");
            }
            dataplane.apply(&wanted).expect("the other uplink serves");
            let host = ironlb::interfaces::Host::read().expect("reads");
            let port = host.interfaces.values().find(|i| i.name == name);
            assert_eq!(port.expect("there").xdp, [0; 0], "{name}");
            // A link ends a moment after its pin.
            let attached = || {
                let hooks = [TcAttachType::Ingress, TcAttachType::Egress];
                let of = |hook| SchedClassifier::query_tcx(name, hook).expect("query").1;
                hooks.into_iter().map(|hook| of(hook).len()).sum::<usize>()
            };
            let deadline = Instant::now() + Duration::from_secs(5);
            while attached() > 0 {
                assert!(Instant::now() < deadline, "{name}: programs are left at TC");
                thread::sleep(Duration::from_millis(10));
            }
        });
        let links = fs::read_dir(node.maps().join("links")).expect("links");
        assert_eq!(links.count(), 2, "{name}: those of up0");
    }
    // What has served there goes on.
    serve(
        &node,
        &[in_subnet(Mode::Tc), named("mac0", Mode::Tc)],
        &wanted,
    );
    let error = node.inside(|| {
        let mut dataplane = node.open();
        dataplane.attach(&[in_subnet(Mode::Tc), named("mac0", Mode::Native)], &wanted)
    });
    error.expect_err("no XDP");
    let links = fs::read_dir(node.maps().join("links")).expect("links");
    assert_eq!(links.count(), 4);
}

#[test]
fn a_change_of_mode_replaces_the_forward_path() {
    let node = Node::new("mode");
    let tables = tables(&[]);
    node.inside(|| {
        let mut dataplane = node.open();
        for (mode, hook) in [
            (Mode::Tc, "ingress"),
            (Mode::Native, "xdp"),
            (Mode::Tc, "ingress"),
        ] {
            dataplane
                .attach(&[in_subnet(mode)], &tables)
                .expect("attaches");
            let links = node.links();
            assert_eq!(links.keys().collect::<Vec<_>>(), ["egress", hook]);
        }
    });
}

#[test]
fn a_foreign_xdp_program_is_left_alone_and_named() {
    let node = Node::new("foreign");
    let tables = tables(&[]);
    node.ip("link add link up0 name other type macvlan mode bridge");
    node.inside(|| {
        let mut foreign = EbpfLoader::new().load(ironlb::OBJECT).expect("loads");
        let foreign: &mut Xdp = foreign
            .program_mut(program::XDP_PLAIN)
            .expect("there")
            .try_into()
            .expect("XDP");
        foreign.load().expect("loads");
        foreign.attach("up0", XdpMode::Driver).expect("attaches");
        let id = foreign.info().expect("info").id();
        let mut dataplane = node.open();
        let error = dataplane
            .attach(&[in_subnet(Mode::Native)], &tables)
            .expect_err("native would displace it");
        let DataplaneError::ForeignXdp { interface, foreign } = &error else {
            panic!("{error}");
        };
        assert_eq!(interface, "up0");
        assert!(
            foreign.contains("ironlb_xdp_sb") && foreign.contains(&id.to_string()),
            "{foreign}"
        );
        let host = ironlb::interfaces::Host::read().expect("reads");
        let up0 = host.interfaces.values().find(|i| i.name == "up0");
        assert_eq!(up0.expect("there").xdp, [id]);
    });
}

#[test]
fn a_program_ahead_of_ours_is_reported() {
    let node = Node::new("ahead");
    let tables = tables(&[]);
    node.inside(|| {
        let mut dataplane = node.open();
        let report = dataplane
            .attach(&[in_subnet(Mode::Tc)], &tables)
            .expect("attaches");
        assert_eq!(report.attachments[0].note, None);
        let mut foreign = EbpfLoader::new().load(ironlb::OBJECT).expect("loads");
        let foreign: &mut SchedClassifier = foreign
            .program_mut(program::INGRESS)
            .expect("there")
            .try_into()
            .expect("TC");
        foreign.load().expect("loads");
        let first = TcAttachOptions::TcxOrder(LinkOrder::first());
        foreign
            .attach_with_options("up0", TcAttachType::Ingress, first)
            .expect("attaches");
        let report = dataplane
            .attach(&[in_subnet(Mode::Tc)], &tables)
            .expect("attaches");
        let note = report.attachments[0].note.as_deref().expect("a note");
        assert!(note.contains("before ironlb at TCX ingress"), "{note}");
    });
}

#[test]
fn a_second_agent_is_refused_and_told_the_pid_of_the_first() {
    let node = Node::new("second");
    let _first = node.open();
    for error in [
        Dataplane::open(&node.options()).expect_err("locked"),
        unload(&node.bpffs).expect_err("locked"),
    ] {
        let DataplaneError::Locked { pid, .. } = error else {
            panic!("{error}");
        };
        assert_eq!(pid, Some(std::process::id()));
    }
}

#[test]
fn an_agent_with_another_root_is_refused_on_the_same_interface_and_told_which() {
    let node = Node::new("roots");
    serve(
        &node,
        &[in_subnet(Mode::Native)],
        &tables(&[("ironic-0", 10)]),
    );
    let other = Node::called(format!("{}-other", node.name));
    node.inside(|| {
        let mut dataplane = other.open();
        let wanted = tables(&[("ironic-0", 10)]);
        for mode in [Mode::Native, Mode::Tc] {
            let error = dataplane
                .attach(&[in_subnet(mode)], &wanted)
                .expect_err("taken");
            let DataplaneError::OtherRoot { root, .. } = &error else {
                panic!("{error}");
            };
            assert_eq!(root.as_ref(), Some(&node.bpffs));
            assert!(error.to_string().contains("ironlb unload --bpffs"));
        }
    });
    assert_eq!(node.links().len(), 2, "the first one's are untouched");
}

#[test]
fn pins_that_somebody_removed_are_there_again_and_nothing_is_lost() {
    let node = Node::new("mend");
    let wanted = tables(&[("ironic-0", 10), ("ironic-1", 11)]);
    node.inside(|| {
        let mut dataplane = node.open();
        let uplinks = [in_subnet(Mode::Native)];
        dataplane.attach(&uplinks, &wanted).expect("attaches");
        dataplane.apply(&wanted).expect("applies");
        let objects = || {
            let maps = map::ALL.map(|name| {
                let data = MapData::from_pin(node.maps().join(name)).expect("pinned");
                data.info().expect("info").id()
            });
            let links = node.links().into_values();
            (
                maps,
                links
                    .map(|link| (link.link, link.program))
                    .collect::<Vec<_>>(),
            )
        };
        let before = objects();
        for gone in [&["services"][..], &["links"], &["", "links", ".."]] {
            for path in gone {
                let path = node.maps().join(path);
                if !path.is_dir() {
                    fs::remove_file(&path).expect("removes");
                    continue;
                }
                for entry in fs::read_dir(&path).expect("lists").flatten() {
                    if !entry.path().is_dir() {
                        fs::remove_file(entry.path()).expect("removes");
                    }
                }
            }
            assert!(!dataplane.is_pinned());
            dataplane.attach(&uplinks, &wanted).expect("attaches");
            assert!(dataplane.is_pinned());
            assert_eq!(
                objects(),
                before,
                "the same maps and links as ever, flows included"
            );
            let applied = dataplane.apply(&wanted).expect("applies");
            assert_eq!(applied.writes, 0);
        }
        // The root itself, as `rm -rf` does it.
        for directory in [node.maps().join("links"), node.maps(), node.bpffs.clone()] {
            for entry in fs::read_dir(&directory).expect("lists").flatten() {
                fs::remove_file(entry.path()).expect("removes");
            }
            fs::remove_dir(&directory).expect("removes");
        }
        dataplane.attach(&uplinks, &wanted).expect("attaches");
        assert_eq!(objects(), before);
        assert!(matches!(
            Dataplane::open(&node.options()),
            Err(DataplaneError::Locked { .. })
        ));
    });
}

#[test]
fn the_root_is_closed_to_others_and_never_somebody_elses() {
    let node = Node::new("owner");
    drop(node.open());
    let mode = || {
        let root = fs::metadata(&node.bpffs).expect("there");
        std::os::unix::fs::MetadataExt::mode(&root) & 0o777
    };
    assert_eq!(mode(), 0o700);
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&node.bpffs, open).expect("chmod");
    drop(node.open());
    assert_eq!(mode(), 0o700, "made by an older version");
    std::os::unix::fs::chown(&node.bpffs, Some(65_534), None).expect("chown");
    for error in [
        Dataplane::open(&node.options()).expect_err("not ours"),
        unload(&node.bpffs).expect_err("not ours"),
    ] {
        let text = error.to_string();
        assert!(
            text.contains("65534") && text.contains("remove it"),
            "{text}"
        );
    }
    std::os::unix::fs::chown(&node.bpffs, Some(0), None).expect("chown");
}

#[test]
fn unload_leaves_nothing() {
    let node = Node::new("unload");
    serve(
        &node,
        &[in_subnet(Mode::Native)],
        &tables(&[("ironic-0", 10)]),
    );
    let report = unload(&node.bpffs).expect("unloads");
    assert_eq!(report.maps.len(), map::ALL.len());
    assert_eq!(report.links.len(), 2, "{:?}", report.links);
    assert!(
        report.links.iter().all(|link| link.ends_with("(up0)")),
        "{:?}",
        report.links
    );
    assert!(!node.bpffs.exists());
    // The kernel ends a link whose pin was the last to hold it a moment later (after an RCU grace period).
    let attached = || {
        node.inside(|| {
            let host = ironlb::interfaces::Host::read().expect("reads");
            let up0 = host.interfaces.values().find(|i| i.name == "up0");
            let (_, egress) =
                SchedClassifier::query_tcx("up0", TcAttachType::Egress).expect("query");
            up0.expect("there").xdp.len() + egress.len()
        })
    };
    let deadline = Instant::now() + Duration::from_secs(10);
    while attached() > 0 {
        assert!(Instant::now() < deadline, "programs are still attached");
        thread::sleep(Duration::from_millis(10));
    }
    assert!(matches!(
        Reader::open(&node.bpffs),
        Err(DataplaneError::NotLoaded { .. })
    ));
    assert_eq!(
        unload(&node.bpffs).expect("nothing to do"),
        Default::default()
    );
}

#[test]
fn a_restart_finds_ids_and_backends_again() {
    let node = Node::new("ids");
    let uplinks = [in_subnet(Mode::Tc)];
    serve(
        &node,
        &uplinks,
        &tables(&[("ironic-0", 10), ("ironic-1", 11)]),
    );
    let before = node.reader().backends().expect("backends");
    node.inside(|| {
        let both = tables(&[("ironic-0", 10), ("ironic-1", 11)]);
        let mut dataplane = node.open();
        dataplane.attach(&uplinks, &both).expect("attaches");
        let applied = dataplane.apply(&both).expect("applies");
        assert_eq!(applied.writes, 0, "nothing changed");
    });
    let after = node.reader().backends().expect("backends");
    let ids = |views: &[ironlb::dataplane::read::BackendView]| -> Vec<_> {
        views
            .iter()
            .map(|v| (v.instance.clone(), v.index, v.generation))
            .collect()
    };
    assert_eq!(ids(&before), ids(&after));
    assert_eq!(before.len(), 2);
    let ports = node.reader().ports().expect("ports");
    assert_eq!(
        (ports[0].service.as_str(), ports[0].eligible),
        ("metal3/ironic", 2)
    );
    assert_eq!(
        node.reader()
            .flows(&FlowFilter::default())
            .expect("flows")
            .len(),
        0
    );
}

#[test]
fn a_backend_that_returns_within_two_seconds_never_left() {
    let node = Node::new("flap");
    let both = tables(&[("ironic-0", 10), ("ironic-1", 11)]);
    let one = tables(&[("ironic-0", 10)]);
    node.inside(|| {
        let mut dataplane = node.open();
        dataplane
            .attach(&[in_subnet(Mode::Tc)], &both)
            .expect("attaches");
        dataplane.apply(&both).expect("applies");
        let id = |name: &str| {
            let views = node.reader().backends().expect("backends");
            let view = views.into_iter().find(|view| view.instance == name);
            view.map(|view| (view.index, view.generation, view.eligible))
        };
        let (index, generation, _) = id("ironic-1").expect("alive");
        assert_eq!(dataplane.apply(&one).expect("applies").leaving, 1);
        assert_eq!(
            id("ironic-1"),
            Some((index, generation, false)),
            "no new flows at once"
        );
        dataplane.apply(&both).expect("applies");
        assert_eq!(id("ironic-1"), Some((index, generation, true)));
        dataplane.apply(&one).expect("applies");
        assert_eq!(dataplane.tick().expect("ticks").writes, 0, "not yet");
        thread::sleep(Duration::from_millis(2100));
        assert!(dataplane.tick().expect("ticks").writes > 0);
        assert_eq!(id("ironic-1"), None, "gone");
        dataplane.apply(&both).expect("applies");
        assert_eq!(
            id("ironic-1"),
            Some((index, generation + 1, true)),
            "another one"
        );
    });
}

#[test]
fn a_mac_change_and_a_new_interface_of_the_same_name_are_followed() {
    let node = Node::new("mac");
    let tables = tables(&[("ironic-0", 10)]);
    let uplinks = [named("up0", Mode::Native)];
    node.inside(|| {
        let mut dataplane = node.open();
        dataplane.attach(&uplinks, &tables).expect("attaches");
        dataplane.apply(&tables).expect("applies");
        node.ip("link set up0 address 02:00:00:00:00:77");
        dataplane.attach(&uplinks, &tables).expect("attaches");
        let uplink = &node.reader().uplinks().expect("uplinks")[0];
        assert_eq!(uplink.mac, "02:00:00:00:00:77");
        let before = (uplink.slot, uplink.ifindex);

        node.ip("link del up0");
        let report = dataplane.attach(&uplinks, &tables).expect("idles");
        assert_eq!(report.attachments, []);
        assert_eq!(report.idle, ["no interface is called `up0`"]);
        let applied = dataplane.apply(&tables).expect("applies");
        assert_eq!(applied.vips_without_uplink, [ip("172.22.0.2")]);

        node.ip("link add up0 type veth peer name wire1");
        node.sends_whole_checksums("wire1");
        node.ip("addr add 172.22.0.11/24 dev up0");
        dataplane.attach(&uplinks, &tables).expect("attaches");
        dataplane.apply(&tables).expect("applies");
        let uplink = &node.reader().uplinks().expect("uplinks")[0];
        assert_ne!(before.1, uplink.ifindex);
        assert_eq!(uplink.vips, [ip("172.22.0.2")]);
        assert_eq!(uplink.programs.len(), 2);
    });
}

#[test]
fn a_bridge_means_its_uplink_port_and_its_own_mac() {
    let node = Node::new("bridge");
    node.ip("addr flush dev up0");
    node.ip("link add br0 type bridge");
    node.ip("link set br0 address 02:00:00:00:00:b0 up");
    node.ip("link set up0 master br0");
    node.ip("addr add 172.22.0.11/24 dev br0");
    for spec in [
        in_subnet(Mode::Tc),
        named("br0", Mode::Tc),
        named("up0", Mode::Tc),
    ] {
        let report = serve(&node, &[spec], &tables(&[]));
        assert_eq!(report.attachments.len(), 1);
        assert_eq!(report.attachments[0].interface, "up0");
        let uplinks = node.reader().uplinks().expect("uplinks");
        assert_eq!(uplinks[0].mac, "02:00:00:00:00:b0");
        assert_eq!(uplinks[0].vips, [ip("172.22.0.2")]);
    }
}

#[test]
fn a_default_route_elsewhere_carries_replies_only() {
    let node = Node::new("default");
    node.ip("link add out0 type veth peer name out1");
    node.ip("addr add 192.0.2.1/24 dev out0");
    node.ip("link set out0 up");
    node.ip("link set out1 up");
    node.ip("route add default via 192.0.2.254");
    let report = serve(&node, &[in_subnet(Mode::Tc)], &tables(&[("ironic-0", 10)]));
    let modes: BTreeMap<_, _> = report
        .attachments
        .iter()
        .map(|attachment| (attachment.interface.as_str(), attachment.mode))
        .collect();
    assert_eq!(
        modes,
        [("out0", AttachedMode::Egress), ("up0", AttachedMode::Tc)].into()
    );
    // The only route to the backend leaves elsewhere, so direct connections are dropped.
    let uplinks = node.reader().uplinks().expect("uplinks");
    let up0 = uplinks.iter().find(|uplink| uplink.interface == "up0");
    assert!(up0.expect("there").bypass_drop);
    // A route to the backend through the uplink makes them ordinary traffic of it.
    node.ip("route add 10.244.0.0/24 via 172.22.0.1");
    serve(&node, &[in_subnet(Mode::Tc)], &tables(&[("ironic-0", 10)]));
    let uplinks = node.reader().uplinks().expect("uplinks");
    let up0 = uplinks.iter().find(|uplink| uplink.interface == "up0");
    assert!(!up0.expect("there").bypass_drop);
}

#[test]
fn an_uplink_that_leaves_the_configuration_is_detached() {
    let node = Node::new("leave");
    node.ip("link add up1 type veth peer name wire1");
    node.sends_whole_checksums("wire1");
    let tables = tables(&[]);
    serve(
        &node,
        &[in_subnet(Mode::Tc), named("up1", Mode::Native)],
        &tables,
    );
    assert_eq!(node.reader().uplinks().expect("uplinks").len(), 2);
    serve(&node, &[in_subnet(Mode::Tc)], &tables);
    let uplinks = node.reader().uplinks().expect("uplinks");
    assert_eq!(uplinks.len(), 1);
    assert_eq!(uplinks[0].interface, "up0");
    let links = fs::read_dir(node.maps().join("links"))
        .expect("links")
        .count();
    assert_eq!(links, 2);
}

#[test]
fn a_pinned_map_of_another_shape_is_an_error_that_names_the_field() {
    let node = Node::new("shape");
    fs::create_dir_all(node.maps()).expect("directory");
    let wrong = HashMap::<MapData, Addr, u64>::create(64, 0).expect("a map");
    wrong.pin(node.maps().join(map::VIPS)).expect("pins");
    let error = Dataplane::open(&node.options()).expect_err("another shape");
    let DataplaneError::Layout {
        path,
        field,
        found,
        wanted,
    } = &error
    else {
        panic!("{error}");
    };
    assert!(path.ends_with(map::VIPS));
    let size = size_of::<Vip>().to_string();
    assert_eq!((*field, found.as_str(), wanted), ("value size", "8", &size));
    assert!(error.to_string().contains("ironlb unload"), "{error}");
}

#[test]
fn a_flow_table_keeps_the_size_it_was_made_with() {
    let node = Node::new("size");
    drop(node.open());
    let larger = Options {
        living_flows: 4096,
        ..node.options()
    };
    drop(Dataplane::open(&larger).expect("the pinned size is kept"));
    let control = node.reader().control().expect("control");
    assert_eq!(control.living_capacity, 1024);
    assert_eq!(control.agent_pid, std::process::id());
    assert!(!control.agent_running);
}

#[test]
fn a_vip_on_a_device_is_refused_unless_external() {
    let node = Node::new("local");
    node.ip("addr add 172.22.0.2/24 dev up0");
    node.inside(|| {
        let mut tables = tables(&[]);
        let mut dataplane = node.open();
        let error = dataplane
            .attach(&[in_subnet(Mode::Tc)], &tables)
            .expect_err("local");
        let text = error.to_string();
        assert!(
            text.contains("172.22.0.2") && text.contains("up0"),
            "{text}"
        );
        for vip in Arc::make_mut(&mut tables).vips.values_mut() {
            vip.announce = Announce::External;
        }
        dataplane
            .attach(&[in_subnet(Mode::Tc)], &tables)
            .expect("attaches");
        dataplane.apply(&tables).expect("applies");
        assert!(!node.reader().vips().expect("vips")[0].answering);
    });
}

#[test]
fn a_deadline_in_the_map_is_not_overwritten() {
    let node = Node::new("deadline");
    let both = tables(&[("ironic-0", 10), ("ironic-1", 11)]);
    node.inside(|| {
        let mut dataplane = node.open();
        dataplane
            .attach(&[in_subnet(Mode::Tc)], &both)
            .expect("attaches");
        dataplane.apply(&both).expect("applies");
        assert!(node.reader().vips().expect("vips")[0].answering);
        let mut vips: HashMap<MapData, Addr, Vip> = node.map(map::VIPS);
        let key = Addr::from(ip("172.22.0.2"));
        let row = vips.get(&key, 0).expect("there");
        vips.insert(
            key,
            Vip {
                answer_until: 1,
                ..row
            },
            0,
        )
        .expect("writes");
        dataplane
            .apply(&tables(&[("ironic-0", 10)]))
            .expect("applies");
        assert!(!node.reader().vips().expect("vips")[0].answering);
    });
}

#[test]
fn who_announces_may_change_while_it_serves() {
    let node = Node::new("announce");
    let always = tables(&[("ironic-0", 10)]);
    let mut elect = (*always).clone();
    for row in elect.vips.values_mut() {
        row.announce = Announce::Elect;
    }
    let elect = Arc::new(elect);
    node.inside(|| {
        let mut dataplane = node.open();
        dataplane
            .attach(&[in_subnet(Mode::Tc)], &always)
            .expect("attaches");
        for (tables, answers) in [
            (&elect, false),
            (&always, true),
            (&elect, false),
            (&always, true),
        ] {
            dataplane.apply(tables).expect("applies");
            let vips = node.reader().vips().expect("vips");
            assert_eq!(vips[0].answering, answers);
        }
    });
}

#[test]
fn what_is_not_a_bpffs_is_refused_with_the_remedy() {
    let directory = std::env::temp_dir().join(format!("{PREFIX}{}-no-bpffs", std::process::id()));
    let options = Options {
        bpffs: directory.clone(),
        ..Options::default()
    };
    let text = Dataplane::open(&options).expect_err("no bpffs").to_string();
    assert!(text.contains("mount -t bpf"), "{text}");
    assert!(!directory.exists());
}

#[test]
fn the_filter_of_an_uplink_holds_its_vips() {
    let node = Node::new("filter");
    serve(&node, &[in_subnet(Mode::Tc)], &tables(&[]));
    let uplinks: Array<MapData, Uplink> = node.map(map::UPLINKS);
    let uplink = uplinks.get(&0, 0).expect("slot 0");
    assert!(
        uplink
            .vip_filter
            .may_contain(Addr::from(ip("172.22.0.2")).v4_raw())
    );
    let mut same = uplink.vip_filter;
    same.insert(&Addr::from(ip("172.22.0.2")));
    assert!(same == uplink.vip_filter, "and nothing else");
    assert_eq!(uplink.bypass_udp[..3], [53, 123, 0]);
}

#[test]
fn an_interface_without_ethernet_header_is_refused() {
    let node = Node::new("noeth");
    node.ip("tuntap add dev tun0 mode tun");
    let error = node.inside(|| {
        let mut dataplane = node.open();
        dataplane
            .attach(&[named("tun0", Mode::Tc)], &tables(&[]))
            .expect_err("no Ethernet")
    });
    assert!(matches!(
        error,
        DataplaneError::Interface(InterfaceError::NotEthernet { .. })
    ));
}

/// Loads every program of the object with some maps made read-only for programs, and tells which of them the verifier refuses.
fn refused_with_read_only(node: &Node, names: &[&str]) -> Vec<String> {
    /// `BPF_F_RDONLY_PROG` of `linux/bpf.h`.
    const RDONLY_PROG: u32 = 1 << 7;
    let parsed = aya_obj::Object::parse(ironlb::OBJECT).expect("the object");
    fs::create_dir_all(&node.bpffs).expect("a root");
    let mut loader = EbpfLoader::new();
    for name in names {
        let wanted = &parsed.maps[*name];
        let map = aya_obj::Map::new_from_params(
            wanted.map_type(),
            wanted.key_size(),
            wanted.value_size(),
            wanted.max_entries(),
            wanted.map_flags() | RDONLY_PROG,
        );
        let path = node.bpffs.join(name);
        let map = MapData::create(map, name, None).expect("a map");
        map.pin(&path).expect("pinned");
        loader.map_pin_path(name, path);
    }
    let mut object = loader.load(ironlb::OBJECT).expect("loads");
    for name in names {
        fs::remove_file(node.bpffs.join(name)).expect("unpinned");
    }
    let mut is_refused = |name: &&str| {
        let loaded = match object.program_mut(name).expect("the program") {
            Program::Xdp(xdp) => xdp.load(),
            Program::SchedClassifier(tc) => tc.load(),
            _ => unreachable!("neither XDP nor TC"),
        };
        loaded.is_err()
    };
    let refused = program::ALL.into_iter().filter(|name| is_refused(name));
    refused.map(str::to_owned).collect()
}

#[test]
fn what_a_trace_shares_with_the_programs_that_serve_no_program_writes() {
    let node = Node::new("read-only");
    let shared = USES.into_iter().filter(|(_, kind)| *kind == Use::Shared);
    let shared: Vec<&str> = shared.map(|(name, _)| name).collect();
    assert!(shared.contains(&map::SERVICES));
    assert_eq!(refused_with_read_only(&node, &shared), [""; 0]);
    // The verifier would have told: this one is written.
    assert_eq!(refused_with_read_only(&node, &[map::YOUNG]), program::ALL);
}
