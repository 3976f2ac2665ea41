//! Where the other agents are and what they sign with: their Leases, a Secret, and a file in which this agent
//! remembers both.
//!
//! The file is for a start without the API: the election must go on while nobody can be asked who takes part.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::runtime::reflector::Store;
use kube::{Api, Error};
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::status::Status;
use super::watch::{Watched, wait_after};
use super::writer::{Failure, within};
use crate::config::ClusterConfig;
use crate::desired::{KeySpec, PeersSpec};

/// On an agent's Lease: its addresses on its uplinks, separated by commas.
pub(super) const ADDRESSES: &str = "ironlb.dev/addresses";
/// Name of the Secret that all agents share.
pub(super) const SECRET: &str = "ironlb-peers";
/// What the Secret holds: keys, a line each, of which the first signs and all are accepted.
const KEY: &str = "key";
/// Name of the file.
const FILE: &str = "peers.json";
/// Bytes of a key that is made here.
const KEY_BYTES: usize = 32;
/// How often to look whether a key is missing.
const LOOK: Duration = Duration::from_secs(1);

/// What is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    /// Lines; empty until there are some.
    key: String,
    /// Where agents may be found.
    addresses: BTreeSet<IpAddr>,
}

/// What an agent knows of the others.
pub(super) struct Directory {
    agents: Arc<Watched<Lease>>,
    secrets: Watched<Secret>,
    file: PathBuf,
    known: Known,
    /// What the file holds, as far as it was read or written.
    saved: Known,
    /// The last key that was known, for a Secret that is to be made again.
    key: watch::Sender<String>,
    complaint: String,
}

impl Directory {
    /// Begins with what the file in `state` remembers.
    pub fn new(agents: Arc<Watched<Lease>>, secrets: Watched<Secret>, state: &Path) -> Self {
        let file = state.join(FILE);
        let saved = match read(&file) {
            Ok(known) => known,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Known::default(),
            Err(error) => {
                let file = file.display();
                warn!("cannot read {file}, what an earlier agent knew of its peers: {error}");
                Known::default()
            }
        };
        Self {
            agents,
            secrets,
            file,
            key: watch::Sender::new(saved.key.clone()),
            known: saved.clone(),
            saved,
            complaint: String::new(),
        }
    }

    /// Whether it is known who takes part, by the API or by the file.
    pub fn is_known(&self) -> bool {
        let is_read = self.agents.has_synced() && self.secrets.has_synced();
        !self.known.key.is_empty() && (is_read || !self.saved.key.is_empty())
    }

    /// What the election needs, as it is known now. Without a key before it is known who takes part: a node that hears
    /// nobody because it knows nobody must not think itself alone.
    pub fn peers(&mut self, config: &ClusterConfig) -> PeersSpec {
        self.look();
        let key = match self.is_known() {
            true => self.known.key.clone(),
            false => String::new(),
        };
        PeersSpec {
            key: KeySpec::Text(key),
            nodes: self.known.addresses.clone(),
            interval: config.heartbeat_interval,
            port: config.peer_port,
        }
    }

    fn look(&mut self) {
        // What was read stays while the API is away: the stores keep it.
        if self.agents.has_synced() {
            let leases = self.agents.store.state();
            self.known.addresses = leases.iter().flat_map(|lease| addresses(lease)).collect();
        }
        if let Some(key) = self
            .secrets
            .has_synced()
            .then(|| key(&self.secrets.store))
            .flatten()
        {
            self.key.send_replace(key.clone());
            self.known.key = key;
        }
        if self.is_known() && self.known != self.saved {
            let why = match write(&self.file, &self.known) {
                Ok(()) => String::new(),
                Err(error) => format!(
                    "cannot write {}: {error}; an agent that starts while the Kubernetes API is away \
                     will not take part in elections (--run-dir)",
                    self.file.display()
                ),
            };
            if why.is_empty() {
                self.saved = self.known.clone();
            } else if why != self.complaint {
                warn!("{why}");
            }
            self.complaint = why;
        }
    }

    /// Makes a key whenever there is none, as long as this is polled.
    pub fn keeper(
        &self,
        api: Api<Secret>,
        leads_until: watch::Receiver<Option<Instant>>,
        status: Arc<Status>,
    ) -> impl Future<Output = ()> + use<> {
        let (store, what) = (self.secrets.store.clone(), self.secrets.what().to_owned());
        let last = self.key.subscribe();
        let has_synced = move || status.has_synced(std::slice::from_ref(&what));
        keep(api, store, has_synced, leads_until, last)
    }
}

/// For ever: a Secret that is missing is made by the agent that writes. One that was deleted comes back as it was, so
/// that a slip breaks no election; whoever wants another key edits it.
async fn keep(
    api: Api<Secret>,
    store: Store<Secret>,
    has_synced: impl Fn() -> bool,
    leads_until: watch::Receiver<Option<Instant>>,
    last: watch::Receiver<String>,
) {
    let mut failures = 0;
    loop {
        sleep(LOOK.max(wait_after(failures))).await;
        let leads = leads_until
            .borrow()
            .is_some_and(|until| Instant::now() < until);
        if !leads || !has_synced() || !store.is_empty() {
            continue;
        }
        let known = Some(last.borrow().clone()).filter(|key| !key.is_empty());
        let Some(key) = known.or_else(new_key) else {
            continue;
        };
        let secret = Secret {
            metadata: ObjectMeta {
                name: Some(SECRET.to_owned()),
                ..ObjectMeta::default()
            },
            string_data: Some([(KEY.to_owned(), key)].into()),
            ..Secret::default()
        };
        match within(api.create(&PostParams::default(), &secret)).await {
            Ok(_) => {
                failures = 0;
                info!("made Secret {SECRET}, the key of the agents among themselves");
            }
            Err(Failure::Api(Error::Api(status))) if status.is_already_exists() => failures = 0,
            Err(failure) => {
                failures += 1;
                if failures == 1 {
                    warn!(
                        "cannot make Secret {SECRET}, without which no VIP is elected: {failure}"
                    );
                }
            }
        }
    }
}

/// A key of [`KEY_BYTES`] random bytes in base64; `None` where the system has no random numbers.
fn new_key() -> Option<String> {
    let mut bytes = vec![0; KEY_BYTES];
    SystemRandom::new().fill(&mut bytes).ok()?;
    match json!(ByteString(bytes)) {
        Value::String(text) => Some(text),
        _ => None,
    }
}

/// The Secret's lines, if there are any.
fn key(store: &Store<Secret>) -> Option<String> {
    let secret = store.state().into_iter().next()?;
    let text = String::from_utf8(secret.data.as_ref()?.get(KEY)?.0.clone()).ok()?;
    (!text.trim().is_empty()).then_some(text)
}

fn addresses(lease: &Lease) -> BTreeSet<IpAddr> {
    let annotations = lease.metadata.annotations.as_ref();
    let text = annotations.and_then(|annotations| annotations.get(ADDRESSES));
    let parts = text.into_iter().flat_map(|text| text.split(','));
    parts.filter_map(|part| part.trim().parse().ok()).collect()
}

fn read(file: &Path) -> io::Result<Known> {
    Ok(serde_json::from_slice(&fs::read(file)?)?)
}

/// Whole or not at all, for nobody else to read.
fn write(file: &Path, known: &Known) -> io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let new = file.with_extension("new");
    // One that an earlier agent left half-written may have any mode.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = fs::File::options();
    let mut written = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)?;
    written.write_all(&serde_json::to_vec(known)?)?;
    fs::rename(&new, file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn what_is_remembered_is_read_again_and_nobody_elses_to_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("ironlb").join(FILE);
        assert_eq!(
            read(&file).expect_err("nothing").kind(),
            io::ErrorKind::NotFound
        );
        let mut known = Known {
            key: new_key().expect("random numbers"),
            addresses: ["172.22.0.11", "2001:db8::1"]
                .map(|text| text.parse().expect("valid"))
                .into(),
        };
        write(&file, &known).expect("written");
        known.addresses.pop_first();
        fs::write(file.with_extension("new"), "half").expect("written");
        write(&file, &known).expect("written over");
        assert_eq!(read(&file).expect("read"), known);
        let mode = fs::metadata(&file).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        fs::write(&file, "{\"key\":").expect("written");
        assert_eq!(
            read(&file).expect_err("broken").kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn a_new_key_is_long_enough_and_unlike_another() {
        let keys = [new_key(), new_key()].map(|key| key.expect("random numbers"));
        assert_ne!(keys[0], keys[1]);
        for key in keys {
            crate::peers::Key::from_bytes(key.as_bytes()).expect("a good key");
        }
    }

    #[test]
    fn addresses_of_a_lease_are_those_that_are_some() {
        let lease: Lease = serde_json::from_value(json!({
            "metadata": {"annotations": {ADDRESSES: "172.22.0.11, what, 2001:db8::1,"}},
        }))
        .expect("a Lease");
        let expected = ["172.22.0.11", "2001:db8::1"].map(|text| text.parse().expect("valid"));
        assert_eq!(addresses(&lease), expected.into());
        assert_eq!(addresses(&Lease::default()), BTreeSet::new());
    }
}
