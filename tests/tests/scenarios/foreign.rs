//! Programs of others on the same interface: never displaced, never cut off.

use std::time::Duration;

use aya::Ebpf;
use aya::programs::links::FdLink;
use aya::programs::tc::{NlOptions, TcAttachOptions};
use aya::programs::{
    LinkOrder, ProgramError, SchedClassifier, TcAttachType, Xdp, XdpMode, loaded_programs,
};
use aya_obj::programs::XdpAttachType;
use ironlb_tests::{API_PORT, Agent, Namespace, VIP, wait_until};
use object::write::{Object, Symbol, SymbolSection};
use object::{
    Architecture, BinaryFormat, Endianness, SectionKind, SymbolFlags, SymbolKind, SymbolScope,
};
use serde_json::{Value, json};

use crate::scene::{Mode, Scene, assert_silent, get, in_both_modes};

in_both_modes!(tc_programs_and_filters_behind_ours_stay_effective);

/// An eBPF instruction: operation, destination, source, offset, immediate.
type Instruction = (u8, u8, u8, i16, i32);

/// An object with a program named `foreign` of these instructions.
fn compile(section: &str, instructions: &[Instruction]) -> Vec<u8> {
    let mut object = Object::new(BinaryFormat::Elf, Architecture::Bpf, Endianness::Little);
    let code: Vec<u8> = instructions
        .iter()
        .flat_map(|(operation, destination, source, offset, immediate)| {
            let mut bytes = [0; 8];
            bytes[0] = *operation;
            bytes[1] = source << 4 | destination;
            bytes[2..4].copy_from_slice(&offset.to_le_bytes());
            bytes[4..].copy_from_slice(&immediate.to_le_bytes());
            bytes
        })
        .collect();
    let text = object.add_section(Vec::new(), section.into(), SectionKind::Text);
    object.append_section_data(text, &code, 8);
    object.add_symbol(Symbol {
        name: b"foreign".to_vec(),
        value: 0,
        size: code.len() as u64,
        kind: SymbolKind::Text,
        scope: SymbolScope::Dynamic,
        weak: false,
        section: SymbolSection::Section(text),
        flags: SymbolFlags::None,
    });
    let license = object.add_section(Vec::new(), b"license".to_vec(), SectionKind::ReadOnlyData);
    object.append_section_data(license, b"GPL\0", 1);
    object.write().expect("ELF")
}

/// Loads such a program.
fn load(section: &str, instructions: &[Instruction]) -> Ebpf {
    Ebpf::load(&compile(section, instructions)).expect("foreign program")
}

const EXIT: Instruction = (0x95, 0, 0, 0, 0);

/// `r0 = value`.
const fn set_result(value: i32) -> Instruction {
    (0xb7, 0, 0, 0, value)
}

const TCX_NEXT: i32 = -1;
const TC_SHOT: i32 = 2;

/// A TC program that drops IPv4 packets with `word` in network order `at` bytes into the frame,
/// and leaves all else to whoever comes next.
fn dropper(at: i16, word: [u8; 4]) -> Ebpf {
    // Offsets of data and data_end in struct __sk_buff, linux/bpf.h.
    let (data, data_end) = (76, 80);
    load(
        "classifier",
        &[
            (0x61, 2, 1, data, 0),     // r2 = skb->data
            (0x61, 3, 1, data_end, 0), // r3 = skb->data_end
            set_result(TCX_NEXT),
            (0xbf, 4, 2, 0, 0),                        // r4 = r2
            (0x07, 4, 0, 0, i32::from(at) + 4),        // r4 += at + 4
            (0x2d, 4, 3, 3, 0),                        // if r4 > r3 goto exit
            (0x61, 5, 2, at, 0),                       // r5 = *(u32 *)(r2 + at)
            (0x56, 5, 0, 1, i32::from_ne_bytes(word)), // if w5 != word goto exit
            set_result(TC_SHOT),
            EXIT,
        ],
    )
}

/// Offsets of the addresses in an untagged Ethernet frame.
const SOURCE: i16 = 26;
const DESTINATION: i16 = 30;

/// A foreign program at work in a namespace.
struct Attached<'a> {
    namespace: &'a Namespace,
    program: Option<Ebpf>,
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        // A filter is taken away by interface index, which means something else elsewhere.
        let program = self.program.take();
        let _ = self.namespace.enter(|| drop(program));
    }
}

fn attach_tc(
    namespace: &Namespace,
    mut foreign: Ebpf,
    hook: TcAttachType,
    how: TcAttachOptions,
) -> Attached<'_> {
    let program: &mut SchedClassifier = foreign
        .program_mut("foreign")
        .expect("program")
        .try_into()
        .expect("classifier");
    program.load().expect("load");
    let attached = namespace.enter(|| {
        if matches!(how, TcAttachOptions::Netlink(_)) {
            // Another filter may have brought the qdisc.
            let _ = aya::programs::tc::qdisc_add_clsact("eth1");
        }
        program.attach_with_options("eth1", hook, how)
    });
    attached.expect("namespace").expect("attach");
    Attached {
        namespace,
        program: Some(foreign),
    }
}

fn tc_programs_and_filters_behind_ours_stay_effective(mode: Mode) {
    let scene = Scene::new(mode);
    let node = &scene.node().namespace;
    let [open, tcx, clsact] = &scene.node().pods[..] else {
        panic!("three pods expected");
    };
    let client = &scene.host().namespace;
    let own = |pod: &ironlb_tests::Pod| get(client, VIP, pod.instance_port(), &pod.own_path());
    for pod in &scene.node().pods {
        own(pod).expect("nobody interferes yet");
    }

    // They see the packet behind us: it has the pod's address already, and still reaches them.
    let order = TcAttachOptions::TcxOrder(LinkOrder::last());
    let behind = attach_tc(
        node,
        dropper(DESTINATION, tcx.address.octets()),
        TcAttachType::Ingress,
        order,
    );
    let netlink = || TcAttachOptions::Netlink(NlOptions::default());
    let filter = attach_tc(
        node,
        dropper(DESTINATION, clsact.address.octets()),
        TcAttachType::Ingress,
        netlink(),
    );
    own(open).expect("nobody drops it");
    assert_silent(client, VIP, tcx.instance_port());
    assert_silent(client, VIP, clsact.instance_port());
    drop((behind, filter));

    // On the way out they see the VIP as source.
    own(tcx).expect("the TCX program is gone");
    let order = TcAttachOptions::TcxOrder(LinkOrder::last());
    let behind = attach_tc(
        node,
        dropper(SOURCE, VIP.octets()),
        TcAttachType::Egress,
        order,
    );
    assert_silent(client, VIP, open.instance_port());
    drop(behind);
    own(open).expect("the TCX program is gone");
    let filter = attach_tc(
        node,
        dropper(SOURCE, VIP.octets()),
        TcAttachType::Egress,
        netlink(),
    );
    assert_silent(client, VIP, open.instance_port());
    drop(filter);
    own(open).expect("the filter is gone");
}

/// Lets everything pass.
const XDP_PASS: &[Instruction] = &[set_result(2), EXIT];

/// Attaches an XDP program that lets everything pass to `eth1` of a namespace, until it is dropped.
pub fn attach_xdp(namespace: &Namespace) -> Ebpf {
    let mut foreign = load("xdp", XDP_PASS);
    let program: &mut Xdp = foreign
        .program_mut("foreign")
        .expect("program")
        .try_into()
        .expect("xdp");
    program.load().expect("load");
    let attached = namespace.enter(|| program.attach("eth1", XdpMode::Driver));
    attached.expect("namespace").expect("attach");
    foreign
}

/// Id of the XDP program on an interface, or null.
fn xdp_on(namespace: &Namespace, interface: &str) -> Value {
    let shown = namespace.exec(["ip", "-j", "link", "show", "dev", interface]);
    let shown: Value = serde_json::from_str(&shown.expect("ip")).expect("JSON");
    shown[0]["xdp"]["prog"]["id"].clone()
}

/// As a link of an earlier version may be: the kernel updates none to a program of another attach type.
#[test]
fn a_link_that_takes_no_update_is_made_anew_and_the_gap_is_told() {
    let mut scene = Scene::new(Mode::Native);
    scene.agent.process.kill().expect("kill");
    let node = scene.node();
    let (ifindex, _) = node.namespace.interface("eth1").expect("eth1");
    let pin = node.maps().path("links").join(format!("xdp-{ifindex}"));
    std::fs::remove_file(&pin).expect("our link's pin");
    let gone = || Ok(xdp_on(&node.namespace, "eth1").is_null());
    wait_until("our link has ended", Duration::from_secs(5), gone).expect("no program");

    // A loader that does not know the section gives its program no attach type; it attaches by netlink.
    let object = scene.lab.directory().join("foreign.o");
    std::fs::write(&object, compile("unknown", XDP_PASS)).expect("file");
    let object = object.to_str().expect("a path");
    let by_netlink = ["xdpdrv", "object", object, "section", "unknown"];
    let set = |what: &[&str]| {
        let words = ["ip", "link", "set", "dev", "eth1"];
        node.namespace.exec(words.iter().chain(what)).expect("ip");
    };
    set(&by_netlink);
    let id = xdp_on(&node.namespace, "eth1");
    let programs = loaded_programs().filter_map(Result::ok);
    let mut ours = programs.filter(|program| id == program.id());
    let info = ours.next().expect("the program");
    let mut program =
        Xdp::from_program_info(info, "foreign".into(), XdpAttachType::Interface).expect("XDP");
    set(&["xdp", "off"]);
    let link = node.namespace.enter(|| -> Result<_, ProgramError> {
        let link = program.attach("eth1", XdpMode::Driver)?;
        program.take_link(link)
    });
    let link = FdLink::try_from(link.expect("namespace").expect("attach")).expect("a link");
    drop(link.pin(&pin).expect("pin"));
    assert_eq!(xdp_on(&node.namespace, "eth1"), id);

    scene.agent = Agent::launch(scene.node()).expect("agent");
    let said = scene.agent.process.log().expect("log");
    for part in ["cannot be updated", "made anew", "gap="] {
        assert!(said.contains(part), "no `{part}` in {said}");
    }
    let gap = said.lines().find(|line| line.contains("gap="));
    println!("{}", gap.unwrap_or_default());
    let now = xdp_on(&scene.node().namespace, "eth1");
    assert!(now.is_u64() && now != id, "{now}");
    get(&scene.host().namespace, VIP, API_PORT, "/").expect("it serves");
}

#[test]
fn a_foreign_xdp_program_is_named_and_stays() {
    let lab = Mode::Native.builder().build().expect("laboratory");
    let node = &lab.nodes[0];
    let _foreign = attach_xdp(&node.namespace);
    let on_the_interface = || xdp_on(&node.namespace, "eth1");
    let id = on_the_interface();
    assert!(id.is_u64(), "the foreign program is not attached");

    node.write_config(&lab.config("native"))
        .expect("configuration");
    let mut native = Agent::spawn(node).expect("agent");
    let said = native.refusal().expect("refusal");
    assert!(
        said.contains("foreign") && said.contains(&id.to_string()),
        "{said}"
    );
    assert_eq!(on_the_interface(), id);

    let auto = Agent::start(node, &lab.config("auto")).expect("auto serves by TC");
    get(&lab.hosts[0].namespace, VIP, API_PORT, "/").expect("answer");
    assert_eq!(on_the_interface(), id);
    let said = auto.process.log().expect("log");
    assert!(
        said.contains("foreign") && said.contains(&id.to_string()),
        "{said}"
    );
}

/// Senders on this node itself, behind a veth whose other end is here.
#[test]
fn native_is_refused_where_checksums_arrive_unfinished() {
    let lab = Mode::Native.builder().build().expect("laboratory");
    let node = &lab.nodes[0];
    node.namespace
        .ip("link add own0 type veth peer name own1\n\
             link set own0 up\n\
             link set own1 up")
        .expect("veth");
    let mut config = lab.config("native");
    config["uplinks"] = json!([{"name": "own0", "mode": "native"}]);
    node.write_config(&config).expect("configuration");
    let mut agent = Agent::spawn(node).expect("agent");
    let said = agent.refusal().expect("refusal");
    assert!(
        said.contains("cannot attach `ironlb_xdp` to own0")
            && said.contains("`ethtool -K own1 tx off`"),
        "{said}"
    );
    assert!(xdp_on(&node.namespace, "own0").is_null());
    assert!(!node.bpffs.exists(), "pins are left");

    let remedy = ["ethtool", "-K", "own1", "tx", "off", "gro", "on"];
    node.namespace.exec(remedy).expect("ethtool");
    let _agent = Agent::launch(node).expect("it serves natively");
    assert!(xdp_on(&node.namespace, "own0").is_u64());
}
