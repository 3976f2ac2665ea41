//! etcd, the API server, the controller manager and the scheduler, in a network namespace of their own.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::pki::{Pki, token_keys};
use crate::command::wait_until;
use crate::namespace::Namespace;
use crate::process::Process;

/// Address of the API server on the nodes' network.
pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 250, 0, 2);
/// The ClusterIP of the API server: the first of [`SERVICES`].
const CLUSTER_IP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// Where ClusterIPs come from; a Service that names no family has one of the first.
const SERVICES: &str = "10.96.0.0/16,fd00:96::/112";
const ETCD: &str = "http://127.0.0.1:2379";

/// The control plane's processes; they end with the value.
#[derive(Debug)]
pub(crate) struct ControlPlane {
    /// Where they run.
    pub(crate) namespace: Namespace,
    /// The administrator's kubeconfig.
    pub(crate) kubeconfig: PathBuf,
    binaries: PathBuf,
    state: PathBuf,
    etcd: Process,
    apiserver: Option<Process>,
    /// Controller manager and scheduler.
    controllers: Vec<Process>,
}

impl ControlPlane {
    /// URL of the API server.
    pub(crate) fn server() -> String {
        format!("https://{ADDRESS}:6443")
    }

    /// Starts all of it in `namespace`, with its files in `state`; the API answers when this returns.
    ///
    /// # Errors
    /// When a process ends at once, or the API is not ready in a minute.
    pub(crate) fn start(
        namespace: Namespace,
        pki: &Pki,
        binaries: &Path,
        state: &Path,
    ) -> Result<Self> {
        let write = |file: &str, text: &str| -> Result<PathBuf> {
            let path = state.join(file);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            Ok(path)
        };
        let names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"];
        let addresses = [ADDRESS.into(), CLUSTER_IP.into()];
        let server = pki.identity("kube-apiserver", "kube-apiserver", &names, &addresses)?;
        let admin = pki.identity("admin", "system:masters", &[], &[])?;
        let (token_key, token_public) = token_keys()?;
        write("ca.crt", &pki.certificate)?;
        write("api.crt", &server.certificate)?;
        write("api.key", &server.key)?;
        write("admin.crt", &admin.certificate)?;
        write("admin.key", &admin.key)?;
        write("tokens.key", &token_key)?;
        write("tokens.pub", &token_public)?;
        let kubeconfig = write("kubeconfig", &pki.kubeconfig(&admin, &Self::server()))?;

        let etcd = namespace.spawn(
            "etcd",
            [
                binaries.join("etcd").display().to_string(),
                format!("--data-dir={}", state.join("etcd").display()),
                format!("--listen-client-urls={ETCD}"),
                format!("--advertise-client-urls={ETCD}"),
                "--listen-peer-urls=http://127.0.0.1:2380".to_owned(),
                "--initial-advertise-peer-urls=http://127.0.0.1:2380".to_owned(),
                "--initial-cluster=default=http://127.0.0.1:2380".to_owned(),
                // Its data dies with the cluster.
                "--unsafe-no-fsync".to_owned(),
            ],
        )?;
        let mut control_plane = Self {
            namespace,
            kubeconfig,
            binaries: binaries.to_owned(),
            state: state.to_owned(),
            etcd,
            apiserver: None,
            controllers: Vec::new(),
        };
        control_plane.start_apiserver()?;
        control_plane.start_controllers()?;
        Ok(control_plane)
    }

    /// Starts the API server, and waits until it answers.
    ///
    /// # Errors
    /// When it ends, or is not ready in a minute; the message holds the end of its log.
    pub(crate) fn start_apiserver(&mut self) -> Result<()> {
        let mut words = vec![
            self.binaries.join("kube-apiserver").display().to_string(),
            format!("--etcd-servers={ETCD}"),
            format!("--advertise-address={ADDRESS}"),
            format!("--service-cluster-ip-range={SERVICES}"),
        ];
        words.extend(
            [
                self.at("tls-cert-file", "api.crt"),
                self.at("tls-private-key-file", "api.key"),
                self.at("client-ca-file", "ca.crt"),
                self.at("cert-dir", "certificates"),
                self.at("kubelet-client-certificate", "admin.crt"),
                self.at("kubelet-client-key", "admin.key"),
                self.at("service-account-key-file", "tokens.pub"),
                self.at("service-account-signing-key-file", "tokens.key"),
                "service-account-issuer=https://kubernetes.default.svc".to_owned(),
                "kubelet-preferred-address-types=InternalIP".to_owned(),
                "authorization-mode=Node,RBAC".to_owned(),
                "enable-admission-plugins=NodeRestriction".to_owned(),
                "allow-privileged".to_owned(),
            ]
            .map(|option| format!("--{option}")),
        );
        let mut apiserver = self.namespace.spawn("kube-apiserver", words)?;
        let ready = wait_until("the API is ready", Duration::from_secs(60), || {
            ensure!(apiserver.running()?, "the API server has ended");
            ensure!(self.etcd.running()?, "etcd has ended: {}", self.etcd.log()?);
            let answer = self.kubectl(&["get", "--raw", "/readyz"]).output()?;
            Ok(answer.status.success())
        });
        ready.with_context(|| tail(&apiserver))?;
        self.apiserver = Some(apiserver);
        Ok(())
    }

    /// Starts controller manager and scheduler.
    ///
    /// # Errors
    /// When they cannot be started.
    pub(crate) fn start_controllers(&mut self) -> Result<()> {
        self.controllers = vec![
            self.component(
                "kube-controller-manager",
                &[
                    self.at("service-account-private-key-file", "tokens.key"),
                    self.at("root-ca-file", "ca.crt"),
                    self.at("cert-dir", "certificates"),
                    "use-service-account-credentials".to_owned(),
                    "kube-api-qps=200".to_owned(),
                    "kube-api-burst=400".to_owned(),
                ],
            )?,
            self.component("kube-scheduler", &[])?,
        ];
        Ok(())
    }

    /// Ends the API server at once: a SIGTERM would first wait up to a minute for watches to end. Controller manager
    /// and scheduler end too: where several stand for election they do so by themselves when the API is away. One that
    /// lived on would, for want of Leases, call every node not ready with its first word to the new API server.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn stop_apiserver(&mut self) -> Result<()> {
        self.controllers.clear();
        match self.apiserver.take() {
            Some(mut apiserver) => apiserver.kill(),
            None => Ok(()),
        }
    }

    /// kubectl with the administrator's rights.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = self.namespace.command(self.binaries.join("kubectl"));
        command
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .args(arguments)
            // Not in the home directory of whoever runs this.
            .env("KUBECACHEDIR", self.state.join("kubectl"));
        command
    }

    /// Writes a program that does what [`ControlPlane::kubectl`] does, and returns its path.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn write_kubectl(&self) -> Result<PathBuf> {
        let path = self.state.join("bin/kubectl");
        let script = format!(
            "#!/bin/sh\nexec nsenter --net='{}' -- env KUBECACHEDIR='{}' '{}' --kubeconfig '{}' \"$@\"\n",
            self.namespace.path().display(),
            self.state.join("kubectl").display(),
            self.binaries.join("kubectl").display(),
            self.kubeconfig.display(),
        );
        fs::create_dir_all(self.state.join("bin"))
            .and_then(|()| fs::write(&path, script))
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }

    /// Leaves the processes running after the value is gone.
    pub(crate) fn leave(&mut self) {
        self.etcd.leave();
        for process in self.apiserver.iter_mut().chain(&mut self.controllers) {
            process.leave();
        }
    }

    fn component(&self, program: &str, options: &[String]) -> Result<Process> {
        let mut words = vec![
            self.binaries.join(program).display().to_string(),
            format!("--kubeconfig={}", self.kubeconfig.display()),
            "--leader-elect=false".to_owned(),
        ];
        words.extend(options.iter().map(|option| format!("--{option}")));
        self.namespace.spawn(program, words)
    }

    /// An option whose value is a file of ours.
    fn at(&self, option: &str, file: &str) -> String {
        format!("{option}={}", self.state.join(file).display())
    }
}

/// The end of a process's log, for an error message.
pub(crate) fn tail(process: &Process) -> String {
    const LINES: usize = 20;
    let log = process.log().unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}
