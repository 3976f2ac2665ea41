//! An agent's control plane as `ironlb agent` runs it, with the maps' part played by the plan alone.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ironlb::desired::{KeySpec, PeersSpec};
use ironlb::kubernetes::{Options, Status};
use ironlb::plan::{Health, Nodes, plan};
use ironlb::source::{Prepared, Source};
use ironlb::tables::TableSet;
use tempfile::TempDir;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::api::{NAMESPACE, PATIENCE, Server};

/// The election of agents in tests is quicker.
pub const LEASE: Duration = Duration::from_secs(5);

/// What a node's maps would hold.
pub struct Node {
    pub status: Arc<Status>,
    tables: watch::Receiver<Arc<TableSet>>,
    peers: watch::Receiver<Option<PeersSpec>>,
    addresses: watch::Sender<BTreeSet<IpAddr>>,
    stop: Option<oneshot::Sender<bool>>,
    task: JoinHandle<()>,
    folder: TempDir,
}

/// Whether what is wanted gets into the maps.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Maps {
    Written,
    Stuck,
}

impl Node {
    pub async fn start(server: &Server, name: &str, config: &str, maps: Maps) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut source = source(server, name, config, folder.path()).await;
        let first = timeout(PATIENCE, source.first())
            .await
            .expect("the API is read");
        let status = source.kubernetes().expect("Kubernetes").clone();
        let (told, tables) = watch::channel(Arc::new(TableSet::default()));
        let (told_peers, peers) = watch::channel(first.peers.clone());
        let (addresses, mut found_at) = watch::channel(BTreeSet::new());
        let (stop, mut stopped) = oneshot::channel();
        let node = name.to_owned();
        let task = tokio::spawn(async move {
            let mut state = first;
            loop {
                let (tables, _) = plan(&state, &Health::default(), &Nodes::all_of(&state, &node));
                let has_changed = **told.borrow() != tables;
                if maps == Maps::Written {
                    source.in_step(&tables, &[], has_changed);
                }
                told.send_replace(Arc::new(tables));
                tokio::select! {
                    () = source.changed() => {}
                    Ok(()) = found_at.changed() => {
                        source.found_at(found_at.borrow_and_update().clone());
                    }
                    gently = &mut stopped => {
                        if gently == Ok(true) {
                            source.stop().await;
                        }
                        return;
                    }
                }
                if let Some(news) = source.news().expect("the file has not changed") {
                    told_peers.send_replace(news.peers.clone());
                    state = news;
                }
            }
        });
        Self {
            status,
            tables,
            peers,
            addresses,
            stop: Some(stop),
            task,
            folder,
        }
    }

    /// Gives its uplinks addresses.
    pub fn moves_to(&self, addresses: &[&str]) {
        self.addresses.send_replace(parsed(addresses));
    }

    /// The folder with its configuration and with what it remembers.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Lines of the key that its election has, and where it looks for peers.
    pub fn peers(&self) -> (Vec<String>, BTreeSet<IpAddr>) {
        known(self.peers.borrow().as_ref())
    }

    /// Waits until it knows that of its peers.
    pub async fn knows(
        &mut self,
        what: &str,
        is_so: impl Fn(&[String], &BTreeSet<IpAddr>) -> bool,
    ) {
        let waited = self.peers.wait_for(|peers| {
            let (key, addresses) = known(peers.as_ref());
            is_so(&key, &addresses)
        });
        let is_late = timeout(PATIENCE, waited).await.is_err();
        assert!(!is_late, "{what}: not in {PATIENCE:?}: {:?}", self.peers());
    }

    /// Ends it as SIGTERM does.
    pub async fn stop(mut self) {
        self.end(true).await;
    }

    /// Ends it as SIGKILL does.
    pub async fn kill(mut self) {
        self.end(false).await;
    }

    async fn end(&mut self, gently: bool) {
        let stop = self.stop.take().expect("it is ended once");
        stop.send(gently).expect("it runs");
        (&mut self.task).await.expect("it ends well");
    }

    pub fn tables(&self) -> Arc<TableSet> {
        self.tables.borrow().clone()
    }

    /// Waits until the maps hold something.
    pub async fn holds(&mut self, what: &str, is_so: impl Fn(&TableSet) -> bool) {
        let waited = timeout(PATIENCE, self.tables.wait_for(|tables| is_so(tables))).await;
        let is_late = waited.is_err();
        drop(waited);
        if is_late {
            panic!(
                "{what}: not in {PATIENCE:?}; the maps hold {:#?}",
                self.tables()
            );
        }
    }
}

/// An agent's source in a folder, which an earlier one may have used.
pub async fn source(server: &Server, name: &str, config: &str, folder: &Path) -> Source {
    let path = folder.join("lb.yaml");
    std::fs::write(&path, config).expect("write");
    let options = Options {
        client: server.agent(),
        namespace: NAMESPACE.into(),
        node: name.into(),
        resync: Duration::from_secs(300),
        lease: LEASE,
        state_dir: folder.join("state"),
    };
    let prepared = Prepared::read(path, Some(options)).await;
    prepared.expect("a good configuration").start()
}

/// Addresses as a program has them.
pub fn parsed(addresses: &[&str]) -> BTreeSet<IpAddr> {
    let addresses = addresses.iter();
    addresses
        .map(|text| text.parse().expect("an address"))
        .collect()
}

/// Lines of the key, and addresses.
pub fn known(peers: Option<&PeersSpec>) -> (Vec<String>, BTreeSet<IpAddr>) {
    let peers = peers.expect("a node of a cluster is never alone");
    let KeySpec::Text(key) = &peers.key else {
        panic!("the key is no file: {:?}", peers.key)
    };
    let lines = key.lines().map(str::to_owned).collect();
    (lines, peers.nodes.clone())
}

/// Who a VIP port leads to: names, `!` in front of those that take no new flows. `None` if it is not configured.
pub fn leads_to(tables: &TableSet, vip: &str, port: u16) -> Option<Vec<String>> {
    let vip: IpAddr = vip.parse().expect("an address");
    let row = tables.ports.get(&(vip, port))?;
    let name = |backend: &ironlb::tables::BackendRow| {
        let mark = if backend.eligible { "" } else { "!" };
        format!("{mark}{}", backend.instance)
    };
    Some(row.backends.iter().map(name).collect())
}
