//! The real object under `BPF_PROG_TEST_RUN`: a packet in, a packet, a verdict and map entries out.
//! No interface, no pins: every engine has maps of its own.

use std::net::IpAddr;
use std::sync::LazyLock;

use anyhow::{Context, Result, bail};
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, MapData, PerCpuArray, PerCpuValues, RingBuf};
use aya::programs::{Program, TestRun, TestRunOptions};
use aya::util::nr_cpus;
use aya::{Btf, Ebpf, EbpfLoader};
use lb_common::Verdict;
use lb_common::events::{Ending, Event, Telling, Watch};
use lb_common::layout::{
    Addr, Backend, Bucket, Control, Exception, Flow, FlowKey, MODE_NATIVE, MODE_TC, Peer, PeerMac,
    Pod, PodPort, Pressure, Reflection, Service, ServiceKey, Source, Traffic, Uplink, Vip, global,
    map, peer_link, program,
};
use lb_host::scene::{self, HEARTBEAT_PORT, OTHER_SLOT, PEER, Scene, Served, ServedPort};

/// The kernel's type information, parsed once: it takes longer than everything else here.
static BTF: LazyLock<Option<Btf>> = LazyLock::new(|| Btf::from_sys_fs().ok());

/// What XDP programs return (`linux/bpf.h`, `enum xdp_action`).
pub mod xdp {
    /// `XDP_DROP`.
    pub const DROP: u32 = 1;
    /// `XDP_PASS`.
    pub const PASS: u32 = 2;
    /// `XDP_TX`.
    pub const TX: u32 = 3;
}

/// What TC programs return (`linux/pkt_cls.h`).
pub mod tc {
    /// `TC_ACT_UNSPEC`, and `TCX_NEXT`.
    pub const NEXT: u32 = u32::MAX;
    /// `TC_ACT_SHOT`.
    pub const SHOT: u32 = 2;
    /// `TC_ACT_REDIRECT`.
    pub const REDIRECT: u32 = 7;
}

/// The loaded object.
pub struct Engine {
    ebpf: Ebpf,
}

/// What became of a packet.
#[derive(Debug)]
pub struct Outcome {
    /// What the program returned.
    pub action: u32,
    /// The frame after it.
    pub frame: Vec<u8>,
    /// The one verdict that was counted.
    pub verdict: Verdict,
}

impl Engine {
    /// Loads the object with room for `living` flows.
    ///
    /// # Errors
    /// When the kernel refuses its maps.
    pub fn load(living: u32) -> Result<Self> {
        Self::load_sized(living, 1024)
    }

    /// As [`Engine::load`], with room for `young` flows too.
    ///
    /// # Errors
    /// When the kernel refuses its maps.
    pub fn load_sized(living: u32, young: u32) -> Result<Self> {
        let ticks = rustix::time::clock_getres(rustix::time::ClockId::MonotonicCoarse).tv_nsec;
        let ticks = u32::try_from(1_000_000_000 / ticks).context("clock resolution")?;
        Self::load_ticking(living, young, ticks)
    }

    /// As [`Engine::load_sized`], a second being so many of the kernel's ticks.
    ///
    /// # Errors
    /// When the kernel refuses its maps.
    pub fn load_ticking(living: u32, young: u32, ticks: u32) -> Result<Self> {
        let mut loader = EbpfLoader::new();
        loader
            .btf(BTF.as_ref())
            .override_global(global::UPLINK, &0_u32, true)
            .override_global(global::TICKS_PER_SECOND, &ticks, true)
            .map_max_entries(map::LIVING, living)
            .map_max_entries(map::LIVING_REPLY, living)
            .map_max_entries(map::YOUNG, young);
        let ebpf = loader
            .load(ironlb::OBJECT)
            .context("cannot load the object")?;
        Ok(Self { ebpf })
    }

    /// Runs a program once on a frame, uplink 0 being attached in that program's mode.
    ///
    /// # Errors
    /// As [`Engine::run_in`].
    pub fn run(&mut self, name: &str, frame: &[u8]) -> Result<Outcome> {
        let mode = if name == program::INGRESS {
            MODE_TC
        } else {
            MODE_NATIVE
        };
        self.run_in(name, mode, frame)
    }

    /// Runs a program once on a frame, uplink 0 being attached in a mode.
    ///
    /// # Errors
    /// When the kernel refuses it (the verifier's log is in the error) or does not run it, or it did
    /// not count exactly one verdict.
    pub fn run_in(&mut self, name: &str, mode: u8, frame: &[u8]) -> Result<Outcome> {
        let uplinks = self.ebpf.map_mut(map::UPLINKS).context("no uplinks")?;
        let mut uplinks = Array::<_, Uplink>::try_from(uplinks)?;
        let uplink = Uplink {
            mode,
            ..uplinks.get(&0, 0)?
        };
        uplinks.set(0, uplink, 0)?;
        let before = self.verdicts()?;
        let mut out = vec![0; frame.len().max(256) + 256];
        let mut options = TestRunOptions::new();
        options.data_in = Some(frame);
        options.data_out = Some(&mut out);
        let result = match self.program(name)? {
            Program::Xdp(program) => program.test_run(options),
            Program::SchedClassifier(program) => program.test_run(options),
            _ => bail!("{name} is neither XDP nor TC"),
        }
        .with_context(|| format!("cannot run {name} on {} bytes", frame.len()))?;
        out.truncate(result.data_size_out as usize);
        let counted: Vec<_> = Verdict::ALL
            .iter()
            .zip(before.iter().zip(self.verdicts()?))
            .filter(|(_, (before, after))| *before != after)
            .collect();
        let [(verdict, (before, after))] = counted[..] else {
            bail!("{name} counted {counted:?}, not one verdict");
        };
        if after != before + 1 {
            bail!("{name} counted {} times", after - before);
        }
        Ok(Outcome {
            action: result.return_value,
            frame: out,
            verdict: *verdict,
        })
    }

    /// A program; loaded when it is first asked for: the verifier takes its time.
    ///
    /// # Errors
    /// When there is none of that name, or the kernel refuses it (the verifier's log is in the error).
    pub fn program(&mut self, name: &str) -> Result<&mut Program> {
        let program = self.ebpf.program_mut(name).context("no such program")?;
        if program.fd().is_err() {
            match program {
                Program::Xdp(program) => program.load(),
                Program::SchedClassifier(program) => program.load(),
                _ => bail!("{name} is neither XDP nor TC"),
            }
            .with_context(|| format!("cannot load {name}"))?;
        }
        Ok(program)
    }

    /// Packets so far by verdict, in the order of [`Verdict::ALL`].
    ///
    /// # Errors
    /// As any map look-up.
    pub fn verdicts(&self) -> Result<Vec<u64>> {
        let counters = PerCpuArray::<_, u64>::try_from(self.map(map::VERDICTS)?)?;
        Verdict::ALL
            .iter()
            .map(|verdict| Ok(counters.get(&(*verdict as u32), 0)?.iter().sum()))
            .collect()
    }

    fn map(&self, name: &str) -> Result<&aya::maps::Map> {
        self.ebpf
            .map(name)
            .with_context(|| format!("no map {name}"))
    }

    fn hash<K: aya::Pod, V: aya::Pod>(
        &mut self,
        name: &str,
    ) -> Result<HashMap<&mut MapData, K, V>> {
        Ok(self
            .ebpf
            .map_mut(name)
            .with_context(|| format!("no map {name}"))?
            .try_into()?)
    }

    fn set<V: aya::Pod>(&mut self, name: &str, index: u32, value: V) -> Result<()> {
        let map = self
            .ebpf
            .map_mut(name)
            .with_context(|| format!("no map {name}"))?;
        Ok(Array::<_, V>::try_from(map)?.set(index, value, 0)?)
    }

    /// Describes an attachment.
    ///
    /// # Errors
    /// As any map update.
    pub fn set_uplink(&mut self, slot: u32, uplink: Uplink) -> Result<()> {
        self.set(map::UPLINKS, slot, uplink)
    }

    /// Describes a VIP.
    ///
    /// # Errors
    /// As any map update.
    pub fn set_vip(&mut self, addr: impl Into<IpAddr>, vip: Vip) -> Result<()> {
        Ok(self
            .hash::<Addr, Vip>(map::VIPS)?
            .insert(Addr::from(addr.into()), vip, 0)?)
    }

    /// Writes what the agent tells.
    ///
    /// # Errors
    /// As any map update.
    pub fn set_control(&mut self, control: Control) -> Result<()> {
        self.set(map::CONTROL, 0, control)
    }

    /// Writes a backend.
    ///
    /// # Errors
    /// As any map update.
    pub fn set_backend(&mut self, index: u16, backend: Backend) -> Result<()> {
        self.set(map::BACKENDS, u32::from(index), backend)
    }

    /// Writes a VIP port's value.
    ///
    /// # Errors
    /// As any map update.
    pub fn set_service(&mut self, key: ServiceKey, service: Service) -> Result<()> {
        Ok(self
            .hash::<ServiceKey, Service>(map::SERVICES)?
            .insert(key, service, 0)?)
    }

    /// Introduces another node on uplink 0, and moves backends to it by their indices.
    ///
    /// # Errors
    /// As any map update.
    pub fn set_peer(&mut self, number: u32, peer: Peer, backends: &[u16]) -> Result<()> {
        self.set(map::PEERS, peer_link(number, 0), peer)?;
        let mac = PeerMac {
            mac: peer.mac,
            uplink: 0,
        };
        self.hash::<PeerMac, u32>(map::PEER_MACS)?
            .insert(mac, number, 0)?;
        for index in backends {
            let rows = self.ebpf.map_mut(map::BACKENDS).context("no backends")?;
            let mut rows = Array::<_, Backend>::try_from(rows)?;
            let row = rows.get(&u32::from(*index), 0)?;
            let row = Backend {
                peer: number as u16,
                ..row
            };
            rows.set(u32::from(*index), row, 0)?;
        }
        let keys: Vec<ServiceKey> = {
            let services = self.hash::<ServiceKey, Service>(map::SERVICES)?;
            services.keys().collect::<Result<_, _>>()?
        };
        for key in keys {
            let mut service = self
                .hash::<ServiceKey, Service>(map::SERVICES)?
                .get(&key, 0)?;
            for (at, candidate) in service.candidates.iter().enumerate() {
                if backends.contains(&(candidate.backend as u16)) {
                    service.local &= !(1 << at);
                }
            }
            self.set_service(key, service)?;
        }
        self.change_control(|control| {
            control.peers += 1;
            control.heartbeat_port = HEARTBEAT_PORT;
        })
    }

    /// Changes what the agent tells.
    ///
    /// # Errors
    /// As any map update.
    pub fn change_control(&mut self, change: impl FnOnce(&mut Control)) -> Result<()> {
        let map = self.ebpf.map_mut(map::CONTROL).context("no control")?;
        let mut map = Array::<_, Control>::try_from(map)?;
        let mut control = map.get(&0, 0)?;
        change(&mut control);
        Ok(map.set(0, control, 0)?)
    }

    /// Writes that a flow sits on a peer.
    ///
    /// # Errors
    /// As any map update.
    pub fn set_exception(&mut self, key: &FlowKey, peer: u32) -> Result<()> {
        Ok(self
            .hash::<FlowKey, Exception>(map::EXCEPTIONS)?
            .insert(key, Exception { peer }, 0)?)
    }

    /// The probe that a peer sent back last.
    ///
    /// # Errors
    /// As any map look-up.
    pub fn reflection(&self, number: u32) -> Result<Reflection> {
        let map = Array::<_, Reflection>::try_from(self.map(map::REFLECTIONS)?)?;
        Ok(map.get(&peer_link(number, 0), 0)?)
    }

    /// Changes a VIP port's value.
    ///
    /// # Errors
    /// When there is none.
    pub fn change_service(
        &mut self,
        key: ServiceKey,
        change: impl FnOnce(&mut Service),
    ) -> Result<()> {
        let mut service = self
            .hash::<ServiceKey, Service>(map::SERVICES)?
            .get(&key, 0)?;
        change(&mut service);
        self.set_service(key, service)
    }

    /// Admits to a VIP port clients of these ranges alone, by a list of that number.
    ///
    /// # Errors
    /// As any map update.
    pub fn admit(&mut self, key: ServiceKey, list: u32, ranges: &[(IpAddr, u8)]) -> Result<()> {
        let map = self.ebpf.map_mut(map::SOURCES).context("no sources")?;
        let mut trie = LpmTrie::<_, Source, u32>::try_from(map)?;
        for (address, length) in ranges {
            let source = Source::new(list, Addr::from(*address));
            let prefix = source.fixed_bits() + u32::from(*length);
            trie.insert(&Key::new(prefix, source), 1, 0)?;
        }
        self.change_service(key, |service| service.sources = list)
    }

    /// Says which addresses are pods.
    ///
    /// # Errors
    /// As any map update.
    pub fn set_pod(&mut self, pod: impl Into<IpAddr>, flags: u32) -> Result<()> {
        let pod_flags = Pod { flags };
        Ok(self
            .hash::<Addr, Pod>(map::PODS)?
            .insert(Addr::from(pod.into()), pod_flags, 0)?)
    }

    /// Configures VIP ports with live, eligible backends, and everything that hangs off them.
    /// Backend indices are given in order, the generation is 1.
    ///
    /// # Errors
    /// As any map update.
    pub fn serve<A: Into<IpAddr> + Copy>(&mut self, ports: &[ServedPort<'_, A>]) -> Result<()> {
        self.write(&scene::serve(ports))
    }

    /// Writes rows that serve VIP ports.
    ///
    /// # Errors
    /// As any map update.
    pub fn write(&mut self, served: &Served) -> Result<()> {
        for (index, backend) in served.backends.iter().enumerate() {
            self.set_backend(index as u16, *backend)?;
        }
        for (key, service) in &served.services {
            self.set_service(*key, *service)?;
        }
        for (addr, pod) in &served.pods {
            self.hash::<Addr, Pod>(map::PODS)?.insert(addr, pod, 0)?;
        }
        for (key, pod_port) in &served.pod_ports {
            self.hash::<ServiceKey, PodPort>(map::POD_PORTS)?
                .insert(key, pod_port, 0)?;
        }
        self.set_control(served.control)
    }

    /// Writes all rows of a scene, and takes out those that are none of them any more.
    ///
    /// # Errors
    /// As any map update.
    pub fn write_scene(&mut self, scene: &Scene) -> Result<()> {
        self.set_uplink(0, scene.uplink)?;
        self.set_uplink(OTHER_SLOT, scene.other)?;
        for (addr, vip) in &scene.vips {
            self.set_vip(*addr, *vip)?;
        }
        self.write(&scene.served)?;
        self.set(map::PEERS, peer_link(PEER, 0), scene.peer)?;
        self.clear::<PeerMac, u32>(map::PEER_MACS)?;
        if let Some(mac) = scene.peer_mac() {
            self.hash::<PeerMac, u32>(map::PEER_MACS)?
                .insert(mac, PEER, 0)?;
        }
        self.clear::<FlowKey, Exception>(map::EXCEPTIONS)?;
        for key in &scene.exceptions {
            self.set_exception(key, PEER)?;
        }
        let (list, ranges) = &scene.ranges;
        for (key, service) in &scene.served.services {
            if service.sources == *list {
                self.admit(*key, *list, ranges)?;
            }
        }
        self.set_watch(scene.watch)
    }

    fn clear<K: aya::Pod, V: aya::Pod>(&mut self, name: &str) -> Result<()> {
        let mut rows = self.hash::<K, V>(name)?;
        for key in rows.keys().collect::<Result<Vec<_>, _>>()? {
            rows.remove(&key)?;
        }
        Ok(())
    }

    /// Forgets what the programs have written that decides anything: flows, pressure, and which of so many backends have
    /// been shunned.
    ///
    /// # Errors
    /// As any map update.
    pub fn forget(&mut self, backends: usize) -> Result<()> {
        for name in [map::LIVING, map::LIVING_REPLY, map::YOUNG] {
            self.clear::<FlowKey, Flow>(name)?;
        }
        self.clear::<FlowKey, u64>(map::DIRECT)?;
        self.set(map::PRESSURE, 0, Pressure::default())?;
        let buckets = self.ebpf.map_mut(map::BUCKET).context("no bucket")?;
        let mut buckets = PerCpuArray::<_, Bucket>::try_from(buckets)?;
        let fresh = vec![Bucket::default(); nr_cpus().map_err(|(_, error)| error)?];
        buckets.set(0, PerCpuValues::try_from(fresh)?, 0)?;
        for index in 0..backends {
            self.set(map::SHUNNED, index as u32, 0_u64)?;
        }
        Ok(())
    }

    /// All rows of a flow table.
    ///
    /// # Errors
    /// As any map look-up.
    pub fn flows(&mut self, name: &str) -> Result<Vec<(FlowKey, Flow)>> {
        let rows = self.hash::<FlowKey, Flow>(name)?;
        Ok(rows.iter().collect::<Result<_, _>>()?)
    }

    /// The entry of a flow in one of the flow tables.
    ///
    /// # Errors
    /// As any map look-up; that it is not there is `None`.
    pub fn flow(&mut self, name: &str, key: &FlowKey) -> Result<Option<Flow>> {
        match self.hash::<FlowKey, Flow>(name)?.get(key, 0) {
            Ok(flow) => Ok(Some(flow)),
            Err(aya::maps::MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes an entry into a flow table.
    ///
    /// # Errors
    /// As any map update.
    pub fn set_flow(&mut self, name: &str, key: &FlowKey, flow: Flow) -> Result<()> {
        Ok(self.hash::<FlowKey, Flow>(name)?.insert(key, flow, 0)?)
    }

    /// Takes an entry out of a flow table.
    ///
    /// # Errors
    /// When it is not there.
    pub fn lose_flow(&mut self, name: &str, key: &FlowKey) -> Result<()> {
        Ok(self.hash::<FlowKey, Flow>(name)?.remove(key)?)
    }

    /// Counters of a VIP port ([`map::PORT_STATS`]) or a backend ([`map::BACKEND_STATS`]), of all processors.
    ///
    /// # Errors
    /// As any map look-up.
    pub fn traffic(&self, name: &str, index: u32) -> Result<Traffic> {
        let counters = PerCpuArray::<_, Traffic>::try_from(self.map(name)?)?;
        let mut sum = Traffic::default();
        for cpu in counters.get(&index, 0)?.iter() {
            sum.packets_in += cpu.packets_in;
            sum.bytes_in += cpu.bytes_in;
            sum.packets_out += cpu.packets_out;
            sum.bytes_out += cpu.bytes_out;
            sum.flows += cpu.flows;
        }
        Ok(sum)
    }

    /// Writes what a monitor wants to see.
    ///
    /// # Errors
    /// As any map update.
    pub fn set_watch(&mut self, watch: Watch) -> Result<()> {
        self.set(map::WATCH, 0, watch)
    }

    /// Takes what was told to a monitor.
    ///
    /// # Errors
    /// When a record is not as long as one.
    pub fn events(&mut self) -> Result<Vec<Event>> {
        self.ring(map::EVENTS, Event::from_bytes)
    }

    /// Takes what was told of flows that have ended.
    ///
    /// # Errors
    /// When a record is not as long as one.
    pub fn endings(&mut self) -> Result<Vec<Ending>> {
        self.ring(map::ENDINGS, Ending::from_bytes)
    }

    fn ring<T>(&mut self, name: &str, parse: impl Fn(&[u8]) -> Option<T>) -> Result<Vec<T>> {
        let map = self
            .ebpf
            .map_mut(name)
            .with_context(|| format!("no map {name}"))?;
        let mut ring = RingBuf::try_from(map)?;
        let mut records = Vec::new();
        while let Some(bytes) = ring.next() {
            records.push(parse(&bytes).with_context(|| format!("{name}: {bytes:?}"))?);
        }
        Ok(records)
    }

    /// What became of events, over all processors.
    ///
    /// # Errors
    /// As any map look-up.
    pub fn telling(&self) -> Result<Telling> {
        let counters = PerCpuArray::<_, Telling>::try_from(self.map(map::TELLING)?)?;
        let mut sum = Telling::default();
        for cpu in counters.get(&0, 0)?.iter() {
            sum.suppressed += cpu.suppressed;
            sum.lost += cpu.lost;
            sum.endings_lost += cpu.endings_lost;
        }
        Ok(sum)
    }
}
