//! A node: containerd, kubelet, CNI and perhaps kube-proxy in network, mount and pid namespaces of its own.
//! Ending its first process ends everything on it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::control_plane::{ControlPlane, tail};
use super::pki::Pki;
use crate::command::{run, wait_until};
use crate::namespace::Namespace;
use crate::process::Process;
use crate::registry;

/// Its first process.
const INIT: &str = include_str!("node.sh");
/// Values that kubelet would write to the whole machine.
const SYSCTLS: &[(&str, &str)] = &[
    ("vm.overcommit_memory", "1"),
    ("vm.panic_on_oom", "0"),
    ("kernel.panic", "10"),
    ("kernel.panic_on_oops", "1"),
    ("kernel.keys.root_maxkeys", "1000000"),
    ("kernel.keys.root_maxbytes", "25000000"),
];
const CONTAINERD: &str = r#"version = 3
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["/mnt/bin"]
conf_dir = "/mnt/cni"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = false
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "localhost/pause:test"
"#;

/// A node of the cluster; it dies with the value.
#[derive(Debug)]
pub struct ClusterNode {
    /// Its name in Kubernetes.
    pub name: String,
    /// Its network namespace: `eth0` to the other nodes, `eth1` to the provisioning network.
    pub namespace: Namespace,
    /// Its InternalIP.
    pub internal: Ipv4Addr,
    /// Its address on the provisioning network.
    pub provisioning: Ipv4Addr,
    /// Its IPv6 address there.
    pub provisioning6: Ipv6Addr,
    init: Process,
    directory: PathBuf,
}

/// What a node shall be.
pub(crate) struct Plan<'a> {
    pub(crate) name: &'a str,
    pub(crate) internal: Ipv4Addr,
    pub(crate) internal6: Ipv6Addr,
    pub(crate) provisioning: Ipv4Addr,
    pub(crate) provisioning6: Ipv6Addr,
    /// Addresses of its pods, a /24 and a /64.
    pub(crate) pods: [String; 2],
    pub(crate) kube_proxy: bool,
}

impl ClusterNode {
    /// Starts it in `namespace`, whose network is there, with its files in `directory`; containerd
    /// answers when this returns, kubelet waits for [`ClusterNode::join`].
    ///
    /// # Errors
    /// When containerd does not come up; the message holds the end of its log.
    pub(crate) fn start(
        tag: &str,
        plan: &Plan<'_>,
        namespace: Namespace,
        pki: &Pki,
        binaries: &Path,
        directory: &Path,
    ) -> Result<Self> {
        let Plan {
            name,
            internal,
            internal6,
            provisioning,
            provisioning6,
            ref pods,
            kube_proxy,
        } = *plan;
        let group = format!("ironlb-{tag}-{name}");
        create_cgroup(tag, &group)?;
        for folder in ["bin", "lib", "log", "cni", "sysctl"] {
            let folder = directory.join(folder);
            fs::create_dir_all(&folder)
                .with_context(|| format!("cannot create {}", folder.display()))?;
        }
        let write = |file: &str, text: &str| {
            let path = directory.join(file);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
        };
        for (sysctl, value) in SYSCTLS {
            write(&format!("sysctl/{sysctl}"), &format!("{value}\n"))?;
        }
        let user = format!("system:node:{name}");
        let addresses = [internal.into(), internal6.into()];
        let identity = pki.identity(&user, "system:nodes", &[name], &addresses)?;
        write("ca.crt", &pki.certificate)?;
        write("node.crt", &identity.certificate)?;
        write("node.key", &identity.key)?;
        let server = ControlPlane::server();
        write("kubeconfig", &pki.kubeconfig(&identity, &server))?;
        let proxy = pki.identity("system:kube-proxy", "system:node-proxier", &[], &[])?;
        write("kube-proxy.conf", &pki.kubeconfig(&proxy, &server))?;
        write("containerd.toml", CONTAINERD)?;
        write("cni/10-pods.conflist", &cni(pods))?;
        write("kubelet.json", &kubelet(&group))?;
        write("name", name)?;
        write("addresses", &format!("{internal},{internal6}"))?;

        let mut words: Vec<String> = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            INIT,
            "node.sh",
        ]
        .map(str::to_owned)
        .into();
        words.extend([directory, binaries].map(|path| path.display().to_string()));
        if kube_proxy {
            words.extend(
                [
                    "kube-proxy",
                    "--proxy-mode=nftables",
                    "--kubeconfig=/mnt/kube-proxy.conf",
                    "--hostname-override",
                    name,
                    "--cluster-cidr=10.244.0.0/16,fd00:244::/48",
                    // These are the whole machine's: left as they are.
                    "--conntrack-max-per-core=0",
                    "--conntrack-tcp-timeout-established=0s",
                    "--conntrack-tcp-timeout-close-wait=0s",
                ]
                .map(str::to_owned),
            );
        }
        let mut node = Self {
            name: name.to_owned(),
            init: namespace.spawn("init", words)?,
            namespace,
            internal,
            provisioning,
            provisioning6,
            directory: directory.to_owned(),
        };
        let ready = wait_until("containerd answers", Duration::from_secs(30), || {
            ensure!(node.init.running()?, "the node's first process has ended");
            Ok(node
                .command("ctr")
                .is_ok_and(|mut ctr| run(ctr.arg("version")).is_ok()))
        });
        ready.with_context(|| node.logs())?;
        Ok(node)
    }

    /// Lets kubelet (and kube-proxy) start: the API is there.
    ///
    /// # Errors
    /// When the file system refuses.
    pub(crate) fn join(&self) -> Result<()> {
        let gate = self.directory.join("start-kubelet");
        File::create(&gate)
            .map(drop)
            .with_context(|| format!("cannot create {}", gate.display()))
    }

    /// Loads an image (an OCI archive) into containerd.
    ///
    /// # Errors
    /// When containerd does not take it.
    pub fn import(&self, archive: &Path) -> Result<()> {
        let file =
            File::open(archive).with_context(|| format!("cannot open {}", archive.display()))?;
        let mut ctr = self.command("ctr")?;
        ctr.args(["--namespace", "k8s.io", "images", "import", "-"]);
        let output = ctr
            .stdin(file)
            .stdout(Stdio::null())
            .output()
            .with_context(|| format!("cannot start {ctr:?}"))?;
        ensure!(
            output.status.success(),
            "{} does not take {}: {}",
            self.name,
            archive.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(())
    }

    /// Its first process, as the machine numbers it.
    fn first_process(&self) -> Result<String> {
        let outer = self.init.pid();
        let children = format!("/proc/{outer}/task/{outer}/children");
        let children = fs::read_to_string(&children)
            .with_context(|| format!("{} is dead: no {children}", self.name))?;
        let init = children.split_whitespace().next();
        init.map(str::to_owned)
            .with_context(|| format!("{} has no first process", self.name))
    }

    /// Its file system, seen from outside of it.
    pub(crate) fn root(&self) -> Result<PathBuf> {
        Ok(Path::new("/proc").join(self.first_process()?).join("root"))
    }

    /// A command that will run on the node, in all its namespaces.
    ///
    /// # Errors
    /// When the node is dead.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        let init = self.first_process()?;
        let mut command = Command::new("nsenter");
        command
            .args([
                "--target", &init, "--net", "--mount", "--pid", "--wd=/", "--",
            ])
            // The init's own PATH is not inherited.
            .args(["env", "PATH=/mnt/bin:/usr/sbin:/usr/bin:/sbin:/bin"])
            .arg(program);
        Ok(command)
    }

    /// Runs a command on the node and returns its stdout.
    ///
    /// # Errors
    /// When it cannot be started or does not succeed.
    pub fn exec<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Result<String> {
        let mut words = words.into_iter();
        let program = words.next().context("no command to run was given")?;
        run(self.command(program)?.args(words))
    }

    /// The node dies at once, as by a power cut: every process on it, pods included.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn kill(&mut self) -> Result<()> {
        self.init.kill()
    }

    /// The ends of its daemons' logs.
    pub fn logs(&self) -> String {
        const LINES: usize = 15;
        let mut logs = format!("{} said:\n{}\n", self.name, tail(&self.init));
        for daemon in ["containerd", "kubelet", "kube-proxy"] {
            let path = self.directory.join(format!("log/{daemon}.log"));
            let log = fs::read_to_string(path).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let end = lines[lines.len().saturating_sub(LINES)..].join("\n");
            logs.push_str(&format!("--- its {daemon}:\n{end}\n"));
        }
        logs
    }

    /// Leaves it running after the value is gone.
    pub(crate) fn leave(&mut self) {
        self.init.leave();
    }
}

/// Pods are connected by veth pairs and routes, without a bridge and without masquerading.
fn cni(pods: &[String; 2]) -> String {
    let ranges = pods.each_ref().map(|subnet| json!([{"subnet": subnet}]));
    json!({
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [
            {
                "type": "ptp",
                "ipMasq": false,
                "ipam": {
                    "type": "host-local",
                    "ranges": ranges,
                    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    })
    .to_string()
}

fn kubelet(group: &str) -> String {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": false,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{group}"),
        "enforceNodeAllocatable": [],
        // To lower it takes CAP_SYS_RESOURCE, which root in a container may lack.
        "oomScoreAdj": 0,
        "failSwapOn": false,
        "localStorageCapacityIsolation": false,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "authentication": {
            "x509": {"clientCAFile": "/mnt/ca.crt"},
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": "/mnt/node.crt",
        "tlsPrivateKeyFile": "/mnt/node.key",
        "resolvConf": "/dev/null",
        "protectKernelDefaults": false,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
    })
    .to_string()
}

/// Makes the node's control group, in every hierarchy that the machine has.
fn create_cgroup(tag: &str, group: &str) -> Result<()> {
    let root = Path::new(registry::CGROUPS);
    let create = |parent: &Path| -> Result<PathBuf> {
        let path = parent.join(group);
        registry::note(tag, &path)?;
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(path)
    };
    let write = |path: &Path, value: &str| {
        fs::write(path, value)
            .with_context(|| format!("cannot write {value} to {}", path.display()))
    };
    if let Ok(controllers) = fs::read_to_string(root.join("cgroup.controllers")) {
        // Version 2: a group has the controllers that its parent hands down.
        let all: Vec<String> = controllers
            .split_whitespace()
            .map(|controller| format!("+{controller}"))
            .collect();
        write(&root.join("cgroup.subtree_control"), &all.join(" "))?;
        create(root)?;
        return Ok(());
    }
    let hierarchies = fs::read_dir(root)
        .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
        .with_context(|| format!("cannot list {}", root.display()))?;
    for hierarchy in hierarchies {
        // Links are second names.
        if !hierarchy.file_type()?.is_dir() {
            continue;
        }
        let path = create(&hierarchy.path())?;
        if hierarchy.file_name() == "cpuset" {
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let value = fs::read_to_string(hierarchy.path().join(file))?;
                write(&path.join(file), value.trim())?;
            }
        }
    }
    Ok(())
}
