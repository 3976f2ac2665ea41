//! A real API server on a real etcd, without nodes and controllers: objects are what a test makes them.

use std::fs;
use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::{Api, Client, Config, discovery};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::{Mutex, MutexGuard};

/// The agents' namespace and ServiceAccount, as deploy/ has them.
pub const NAMESPACE: &str = "ironlb";
const ACCOUNT: &str = "system:serviceaccount:ironlb:ironlb";
/// How long anything may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// One API server at a time.
static TURN: Mutex<()> = Mutex::const_new(());

/// An API server and its etcd, which end with the value.
pub struct Server {
    assets: PathBuf,
    folder: TempDir,
    etcd: Child,
    etcd_port: u16,
    port: u16,
    apiserver: Option<Child>,
    _turn: MutexGuard<'static, ()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        for child in self.apiserver.iter_mut().chain([&mut self.etcd]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Where kube-apiserver and etcd are: what `KUBEBUILDER_ASSETS` names, else what the laboratory's cluster has
/// built beside this test.
fn assets() -> Option<PathBuf> {
    let is_whole = |folder: &PathBuf| {
        ["kube-apiserver", "etcd"]
            .iter()
            .all(|name| folder.join(name).is_file())
    };
    if let Some(folder) = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from) {
        assert!(
            is_whole(&folder),
            "no kube-apiserver and etcd in {}",
            folder.display()
        );
        return Some(folder);
    }
    let own = std::env::current_exe().expect("the test's path");
    let target = own
        .ancestors()
        .find(|folder| folder.join("CACHEDIR.TAG").exists())?;
    let cache = fs::read_dir(target.join("cluster")).ok()?;
    let folders = cache.flatten().map(|entry| entry.path());
    folders.filter(is_whole).max()
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    listener.local_addr().expect("its address").port()
}

impl Server {
    /// Starts one, or says loudly that it cannot. With the rights of deploy/base/rbac.yaml.
    pub async fn start() -> Option<Self> {
        let Some(assets) = assets() else {
            // Not through the captured output of a test.
            let _ = writeln!(
                std::io::stderr().lock(),
                "\n!!! SKIPPED: no kube-apiserver and etcd. `cargo xtask test --cluster` builds them; \
                 KUBEBUILDER_ASSETS names a folder that has them.\n"
            );
            return None;
        };
        let turn = TURN.lock().await;
        let folder = tempfile::tempdir().expect("a folder");
        let (etcd_port, peer_port, port) = (free_port(), free_port(), free_port());
        let key = rcgen::KeyPair::generate().expect("a key");
        let at = |name: &str| folder.path().join(name);
        fs::write(at("tokens.key"), key.serialize_pem()).expect("write");
        fs::write(at("tokens.pub"), key.public_key_pem()).expect("write");
        fs::write(
            at("tokens.csv"),
            format!(
                "admin,admin,admin,system:masters\nagent,{ACCOUNT},agent,\"system:serviceaccounts,system:serviceaccounts:ironlb\"\n"
            ),
        )
        .expect("write");
        let url = format!("http://127.0.0.1:{etcd_port}");
        let peer = format!("http://127.0.0.1:{peer_port}");
        let etcd = Command::new(assets.join("etcd"))
            .arg(format!("--data-dir={}", at("etcd").display()))
            .args([
                format!("--listen-client-urls={url}"),
                format!("--advertise-client-urls={url}"),
            ])
            .args([
                format!("--listen-peer-urls={peer}"),
                format!("--initial-advertise-peer-urls={peer}"),
            ])
            .args([
                format!("--initial-cluster=default={peer}"),
                "--unsafe-no-fsync".into(),
            ])
            .stdout(Stdio::null())
            .stderr(fs::File::create(at("etcd.log")).expect("a log"))
            .spawn()
            .expect("etcd starts");
        let mut server = Self {
            assets,
            folder,
            etcd,
            etcd_port,
            port,
            apiserver: None,
            _turn: turn,
        };
        server.start_apiserver().await;
        for namespace in [NAMESPACE, "metal3", "tenant"] {
            let api: Api<Namespace> = Api::all(server.admin());
            let object =
                json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
            let params = PatchParams::apply("test");
            api.patch(namespace, &params, &Patch::Apply(object))
                .await
                .expect("a namespace");
        }
        let rbac = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/base/rbac.yaml");
        let rbac = fs::read_to_string(rbac).expect("deploy/base/rbac.yaml");
        for object in serde_saphyr::from_multiple::<Value>(&rbac).expect("YAML") {
            server.apply(object).await;
        }
        Some(server)
    }

    /// Starts the API server again, on what etcd has.
    pub async fn start_apiserver(&mut self) {
        let at = |name: &str| self.folder.path().join(name).display().to_string();
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.folder.path().join("apiserver.log"))
            .expect("a log");
        let child = Command::new(self.assets.join("kube-apiserver"))
            .args([
                format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port),
                format!("--secure-port={}", self.port),
                "--bind-address=127.0.0.1".into(),
                "--endpoint-reconciler-type=none".into(),
                format!("--cert-dir={}", at("certificates")),
                format!("--token-auth-file={}", at("tokens.csv")),
                "--authorization-mode=RBAC".into(),
                "--disable-admission-plugins=ServiceAccount".into(),
                format!("--service-account-key-file={}", at("tokens.pub")),
                format!("--service-account-signing-key-file={}", at("tokens.key")),
                "--service-account-issuer=https://kubernetes.default.svc".into(),
                "--service-cluster-ip-range=10.0.0.0/16".into(),
            ])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("kube-apiserver starts");
        self.apiserver = Some(child);
        let client = self.admin();
        let answers = async {
            loop {
                let request = http::Request::get("/readyz")
                    .body(Vec::new())
                    .expect("a request");
                if client.request_text(request).await.is_ok() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, answers).await.is_err() {
            let log = fs::read_to_string(self.folder.path().join("apiserver.log"));
            panic!("the API server is not ready: {}", log.unwrap_or_default());
        }
    }

    /// Ends the API server without a word, as a power cut does.
    pub fn stop_apiserver(&mut self) {
        if let Some(mut child) = self.apiserver.take() {
            child.kill().expect("it lives");
            child.wait().expect("it ends");
        }
    }

    fn client(&self, token: &str) -> Client {
        let url = format!("https://127.0.0.1:{}", self.port);
        let mut config = Config::new(url.parse().expect("a URL"));
        config.accept_invalid_certs = true;
        config.auth_info.token = Some(token.to_owned().into());
        Client::try_from(config).expect("a client")
    }

    /// A client that may do everything.
    pub fn admin(&self) -> Client {
        self.client("admin")
    }

    /// A client with the rights of an agent's pod.
    pub fn agent(&self) -> Client {
        self.client("agent")
    }

    /// `kubectl apply` of an object.
    pub async fn apply(&self, object: Value) -> DynamicObject {
        let text = |path: &str| {
            let value = object.pointer(path).and_then(Value::as_str);
            value.map(str::to_owned)
        };
        let version = text("/apiVersion").expect("apiVersion");
        let (group, version) = version.split_once('/').unwrap_or(("", &version));
        let kind = GroupVersionKind::gvk(group, version, &text("/kind").expect("kind"));
        let client = self.admin();
        let (resource, _) = discovery::pinned_kind(&client, &kind)
            .await
            .expect("a known kind");
        let api: Api<DynamicObject> = match text("/metadata/namespace") {
            Some(namespace) => Api::namespaced_with(client, &namespace, &resource),
            None => Api::all_with(client, &resource),
        };
        let name = text("/metadata/name").expect("a name");
        api.patch(
            &name,
            &PatchParams::apply("test").force(),
            &Patch::Apply(&object),
        )
        .await
        .unwrap_or_else(|error| panic!("cannot apply {object}: {error}"))
    }
}
