//! An agent's control plane as `ironlb agent` runs it, with the maps' part played by the plan alone.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ironlb::kubernetes::{Options, Status};
use ironlb::plan::{Health, plan};
use ironlb::source::Prepared;
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
    stop: Option<oneshot::Sender<bool>>,
    task: JoinHandle<()>,
    _folder: TempDir,
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
        let path = folder.path().join("lb.yaml");
        std::fs::write(&path, config).expect("write");
        let options = Options {
            client: server.agent(),
            namespace: NAMESPACE.into(),
            node: name.into(),
            resync: Duration::from_secs(300),
            lease: LEASE,
        };
        let prepared = Prepared::read(path, Some(options))
            .await
            .expect("a good configuration");
        let (mut source, first) = timeout(PATIENCE, prepared.start())
            .await
            .expect("the API is read");
        let status = source.kubernetes().expect("Kubernetes").clone();
        let (told, tables) = watch::channel(Arc::new(TableSet::default()));
        let (stop, mut stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            let mut state = first;
            loop {
                let (tables, _) = plan(&state, &Health::default());
                let has_changed = **told.borrow() != tables;
                if maps == Maps::Written {
                    source.in_step(&tables, &[], has_changed);
                }
                told.send_replace(Arc::new(tables));
                tokio::select! {
                    () = source.changed() => {}
                    gently = &mut stopped => {
                        if gently == Ok(true) {
                            source.stop().await;
                        }
                        return;
                    }
                }
                if let Some(news) = source.news().expect("the file has not changed") {
                    state = news;
                }
            }
        });
        Self {
            status,
            tables,
            stop: Some(stop),
            task,
            _folder: folder,
        }
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
