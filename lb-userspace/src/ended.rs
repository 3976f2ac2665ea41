//! Long flows that have ended, and who ended them: a bounded record on disk, for the question of the morning after.
//!
//! Two files of JSON lines, the older one replaced by the newer when that is full. A line is whole or skipped, so a crash
//! costs the record that was being written. Whatever the disk does, serving goes on: this runs on a thread of its own.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use humantime::{format_rfc3339_millis, parse_rfc3339};
use lb_common::events::{
    BY_AGENT, BY_CLIENT_FIN, BY_CLIENT_RESET, BY_GONE, BY_POD_FIN, BY_POD_RESET, Ending,
};
use lb_common::{FLOW_ELSEWHERE, FLOW_HANDED_ON, ServiceKey, Verdict};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tracing::{info, warn};

use crate::dataplane::DataplaneError;
use crate::dataplane::told::{Endings, Names, wall_time};
use crate::observed::Observed;

/// Where it is unless somebody says otherwise.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/ironlb";

/// A flow that lasted so long is recorded.
const LONG: Duration = Duration::from_secs(10);
/// So is one that brought so many bytes.
const LARGE: u64 = 10_000_000;
/// Bytes of one of the two files, at most: about 1,500 records.
const FILE_SIZE: u64 = 512 << 10;
/// How often the ring is looked at. The programs wake nobody.
const ROUND: Duration = Duration::from_millis(250);
/// How often, at most, records are brought to the disk itself: others share it.
const SYNC: Duration = Duration::from_secs(10);
/// How often a disk that did not take a record is tried again.
const RETRY: Duration = Duration::from_secs(30);
/// How long the end of the agent waits for the last records.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Abnormal ends in the log, at most, in [`LOG_WINDOW`].
const LOG_LINES: u32 = 10;
const LOG_WINDOW: Duration = Duration::from_secs(10);

const NEW: &str = "ended.jsonl";
const OLD: &str = "ended.old.jsonl";
const LOCK: &str = "ended.lock";
/// First line of each file: a file without it is not ours.
const HEADER: &str = r#"{"ironlb":"ended flows","version":1}"#;

/// Who ended a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndedBy {
    /// The client closed first (FIN).
    ClientFin,
    /// The pod closed first (FIN).
    PodFin,
    /// The client reset it.
    ClientReset,
    /// The pod reset it.
    PodReset,
    /// Its backend is gone, and we reset it.
    Gone,
}

impl EndedBy {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::ClientFin,
        Self::PodFin,
        Self::ClientReset,
        Self::PodReset,
        Self::Gone,
    ];

    /// Of a record's `BY_*`. `None` for that of a living flow.
    pub fn of(by: u8) -> Option<Self> {
        Some(match by {
            BY_CLIENT_FIN => Self::ClientFin,
            BY_POD_FIN => Self::PodFin,
            BY_CLIENT_RESET => Self::ClientReset,
            BY_POD_RESET => Self::PodReset,
            BY_GONE | BY_AGENT => Self::Gone,
            _ => return None,
        })
    }

    /// As in labels and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::ClientFin => "client_fin",
            Self::PodFin => "pod_fin",
            Self::ClientReset => "client_reset",
            Self::PodReset => "pod_reset",
            Self::Gone => "gone",
        }
    }

    /// For people.
    pub fn text(self) -> &'static str {
        match self {
            Self::ClientFin => "client closed",
            Self::PodFin => "pod closed",
            Self::ClientReset => "client reset",
            Self::PodReset => "pod reset",
            Self::Gone => "backend gone",
        }
    }

    /// Whether one side was cut off.
    pub fn is_abnormal(self) -> bool {
        !matches!(self, Self::ClientFin | Self::PodFin)
    }
}

/// A flow that has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EndedFlow {
    /// When.
    #[serde(serialize_with = "to_text", deserialize_with = "from_text")]
    pub ended: SystemTime,
    /// How long it lasted.
    pub duration_seconds: f64,
    /// Client.
    pub client: IpAddr,
    /// The client's port.
    pub client_port: u16,
    /// VIP.
    pub vip: IpAddr,
    /// VIP port.
    pub vip_port: u16,
    /// Service; empty where it was not known any more.
    pub service: String,
    /// Name of the service's port; likewise.
    pub port_name: String,
    /// Pod address.
    pub pod: IpAddr,
    /// Pod port.
    pub pod_port: u16,
    /// The backend's stable identity; empty where it was not known any more.
    pub instance: String,
    /// Bytes from the client (frames).
    pub bytes_in: u64,
    /// Bytes to the client (frames); none where another node sent them.
    pub bytes_out: Option<u64>,
    /// Who ended it.
    pub by: EndedBy,
    /// Our verdict, where a packet of the client's showed that the backend is gone.
    pub refusal: Option<String>,
    /// The client's packets came by way of another node.
    pub handed_on: bool,
}

fn to_text<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_rfc3339_millis(*time))
}

fn from_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SystemTime, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_rfc3339(&text).map_err(serde::de::Error::custom)
}

impl EndedFlow {
    /// What a record of a flow means that somebody has ended.
    pub fn new(ending: &Ending, by: EndedBy, names: Option<&Names>) -> Self {
        let vip_port = ServiceKey::new(ending.key.addr, ending.key.port);
        let service = names.and_then(|names| names.service(ending.service, &vip_port));
        let (service, port_name) = service.unwrap_or_default();
        let refusal = usize::from(ending.refusal).checked_sub(1);
        let refusal = refusal.and_then(|number| Verdict::ALL.get(number));
        Self {
            ended: wall_time(ending.at),
            duration_seconds: ending.at.saturating_sub(ending.started) as f64 / 1e9,
            client: ending.key.client.into(),
            client_port: ending.key.client_port,
            vip: ending.key.addr.into(),
            vip_port: ending.key.port,
            service,
            port_name,
            pod: ending.pod.into(),
            pod_port: ending.pod_port,
            instance: names
                .and_then(|names| names.instance(ending.backend))
                .unwrap_or_default(),
            bytes_in: ending.bytes_in,
            bytes_out: bytes_out(ending),
            by,
            refusal: refusal.map(|verdict| verdict.name().to_owned()),
            handed_on: ending.uplink & FLOW_HANDED_ON != 0,
        }
    }
}

/// Whether a flow belongs into the record: it was long, or large, or lost its backend. Told before anything else of it is
/// found out: short ones may end by the ten thousand a second.
fn is_recorded(ending: &Ending, by: EndedBy) -> bool {
    let bytes = ending
        .bytes_in
        .saturating_add(bytes_out(ending).unwrap_or(0));
    let nanoseconds = ending.at.saturating_sub(ending.started);
    u128::from(nanoseconds) > LONG.as_nanos() || bytes > LARGE || by == EndedBy::Gone
}

/// Bytes to the client; none where another node sent them.
fn bytes_out(ending: &Ending) -> Option<u64> {
    (ending.state & FLOW_ELSEWHERE == 0).then_some(ending.bytes_out)
}

/// The files of one state directory, as their only writer.
#[derive(Debug)]
struct Store {
    dir: PathBuf,
    file: File,
    length: u64,
    /// The last line may lack its end.
    torn: bool,
    unsynced: bool,
    _lock: File,
}

impl Store {
    /// Opens what is there, or begins anew. Files that are not ours are set aside.
    fn open(dir: &Path) -> io::Result<Self> {
        if !dir.exists() {
            DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        }
        let lock = options().open(dir.join(LOCK))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::other(
                    "another agent writes there: give each a --state-dir of its own",
                ));
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        set_aside_if_foreign(&dir.join(OLD))?;
        set_aside_if_foreign(&dir.join(NEW))?;
        let mut store = Self {
            dir: dir.to_owned(),
            file: options().open(dir.join(NEW))?,
            length: 0,
            torn: false,
            unsynced: false,
            _lock: lock,
        };
        store.find_end()?;
        Ok(store)
    }

    fn find_end(&mut self) -> io::Result<()> {
        self.length = self.file.metadata()?.len();
        if self.length == 0 {
            return self.write(&format!("{HEADER}\n"));
        }
        let mut last = [0];
        self.file.seek(SeekFrom::End(-1))?;
        self.file.read_exact(&mut last)?;
        self.torn = last != *b"\n";
        Ok(())
    }

    fn append(&mut self, flows: &[EndedFlow]) -> io::Result<()> {
        let mut lines = String::new();
        for flow in flows {
            lines += &serde_json::to_string(flow)?;
            lines.push('\n');
        }
        if self.length + lines.len() as u64 > FILE_SIZE {
            self.rotate()?;
        }
        self.write(&lines)
    }

    fn rotate(&mut self) -> io::Result<()> {
        let new = self.dir.join(NEW);
        // Whoever removed it has taken the record away on purpose.
        match fs::rename(&new, self.dir.join(OLD)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.file = options().open(new)?;
        self.torn = false;
        self.find_end()
    }

    fn write(&mut self, lines: &str) -> io::Result<()> {
        let text = match self.torn {
            true => format!("\n{lines}"),
            false => lines.to_owned(),
        };
        // Until it has been written whole.
        self.torn = true;
        self.file.write_all(text.as_bytes())?;
        self.torn = false;
        self.unsynced = true;
        self.length += text.len() as u64;
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        if self.unsynced {
            self.file.sync_data()?;
            self.unsynced = false;
        }
        Ok(())
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true).mode(0o600);
    options
}

/// Whether a file begins as ours do, or is empty, or not there.
fn is_ours(path: &Path) -> io::Result<bool> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        opened => opened?,
    };
    let mut begin = Vec::new();
    file.take(HEADER.len() as u64 + 1).read_to_end(&mut begin)?;
    // A crash may have torn the very first line.
    let wanted = format!("{HEADER}\n").into_bytes();
    Ok(wanted.starts_with(&begin))
}

fn set_aside_if_foreign(path: &Path) -> io::Result<()> {
    if matches!(is_ours(path), Ok(true)) {
        return Ok(());
    }
    let now = format_rfc3339_millis(SystemTime::now()).to_string();
    let mut aside = path.as_os_str().to_owned();
    aside.push(format!(".foreign-{now}"));
    fs::rename(path, &aside)?;
    warn!(
        "{} cannot be read as a record of ended flows: set aside as {}",
        path.display(),
        Path::new(&aside).display()
    );
    Ok(())
}

/// What a state directory holds.
#[derive(Debug, Default)]
pub struct Record {
    /// Flows, the first that ended first.
    pub flows: Vec<EndedFlow>,
    /// Lines that are no records: torn by a crash, or of a later version.
    pub unreadable: usize,
}

/// Reads what an agent has recorded, beside it or after it.
pub fn read(dir: &Path) -> io::Result<Record> {
    // The newer one first: it may become the older one meanwhile.
    let new = File::open(dir.join(NEW))?;
    let id = |file: &File| file.metadata().map(|meta| (meta.dev(), meta.ino()));
    let old = match File::open(dir.join(OLD)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        opened => Some(opened?),
    };
    let old = match old {
        Some(old) if id(&old)? == id(&new)? => None,
        old => old,
    };
    let mut record = Record::default();
    for file in old.into_iter().chain([new]) {
        for line in BufReader::new(file).split(b'\n') {
            let line = line?;
            if line.is_empty() || line == HEADER.as_bytes() {
                continue;
            }
            match serde_json::from_slice(&line) {
                Ok(flow) => record.flows.push(flow),
                Err(_) => record.unreadable += 1,
            }
        }
    }
    Ok(record)
}

/// What the recorder hears of the agent.
enum Word {
    Ended(Box<Ending>),
    Stop(Sender<()>),
}

/// The thread that follows endings.
#[derive(Debug)]
pub struct Recorder {
    words: Sender<Word>,
}

/// Tells the recorder of a flow that the agent itself has ended.
#[derive(Clone, Debug)]
pub struct Teller {
    words: Sender<Word>,
}

impl Teller {
    /// Of one more.
    pub fn tell(&self, ending: Ending) {
        // The thread ends with the agent.
        let _ = self.words.send(Word::Ended(Box::new(ending)));
    }
}

impl Recorder {
    /// Begins to follow the endings of the data plane below `root`, and records them in `dir`.
    ///
    /// # Errors
    /// When the ring cannot be opened, or a thread not be started.
    pub fn start(
        root: &Path,
        dir: PathBuf,
        observed: Arc<Observed>,
    ) -> Result<Self, DataplaneError> {
        let (words, heard) = channel();
        let writer = Writer {
            endings: Endings::open(root)?,
            names: Names::open(root)?,
            observed,
            dir,
            store: None,
            problem: None,
            tried: None,
            synced: Instant::now(),
            log: LogLimit::default(),
        };
        thread::Builder::new()
            .name("ended".to_owned())
            .spawn(move || writer.run(&heard))
            .map_err(|error| DataplaneError::pins("start a thread for", root, error))?;
        Ok(Self { words })
    }

    /// By which others tell of endings.
    pub fn teller(&self) -> Teller {
        Teller {
            words: self.words.clone(),
        }
    }

    /// Has the last records written, unless the disk takes its time.
    pub fn stop(self) {
        let (done, ended) = channel();
        if self.words.send(Word::Stop(done)).is_ok() {
            let _ = ended.recv_timeout(LAST_WORDS);
        }
    }
}

struct Writer {
    endings: Endings,
    names: Names,
    observed: Arc<Observed>,
    dir: PathBuf,
    store: Option<Store>,
    /// What was last said of the disk.
    problem: Option<String>,
    /// When the disk was last tried in vain.
    tried: Option<Instant>,
    synced: Instant,
    log: LogLimit,
}

impl Writer {
    fn run(mut self, heard: &Receiver<Word>) {
        // So that what is wrong with the directory is told at the start.
        self.put(&[]);
        loop {
            let word = heard.recv_timeout(ROUND);
            let mut endings = Vec::new();
            let mut stop = None;
            match word {
                Ok(Word::Ended(ending)) => {
                    endings.push(*ending);
                    // Many end at a time.
                    for word in heard.try_iter() {
                        match word {
                            Word::Ended(ending) => endings.push(*ending),
                            Word::Stop(done) => stop = Some(done),
                        }
                    }
                }
                Ok(Word::Stop(done)) => stop = Some(done),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            endings.extend(std::iter::from_fn(|| self.endings.take()));
            self.note(&endings);
            if let Some(done) = stop {
                self.sync();
                let _ = done.send(());
                return;
            }
            if self.synced.elapsed() > SYNC {
                self.sync();
            }
            self.log.tell_of_others();
        }
    }

    fn note(&mut self, endings: &[Ending]) {
        let mut flows = Vec::new();
        for ending in endings {
            let Some(by) = EndedBy::of(ending.by) else {
                continue;
            };
            self.observed.measured.ended(by);
            if !is_recorded(ending, by) {
                continue;
            }
            let flow = EndedFlow::new(ending, by, Some(&self.names));
            if by.is_abnormal() && self.log.take() {
                tell(&flow);
            }
            flows.push(flow);
        }
        if !flows.is_empty() {
            self.put(&flows);
        }
    }

    /// Appends to the record. A disk that does not take it costs these records and a line in the log.
    fn put(&mut self, flows: &[EndedFlow]) {
        if self.tried.is_some_and(|tried| tried.elapsed() < RETRY) {
            return;
        }
        let result = match &mut self.store {
            Some(store) => store.append(flows),
            None => Store::open(&self.dir).and_then(|store| {
                let store = self.store.insert(store);
                if flows.is_empty() {
                    Ok(())
                } else {
                    store.append(flows)
                }
            }),
        };
        self.judge(result);
    }

    fn sync(&mut self) {
        self.synced = Instant::now();
        if let Some(store) = &mut self.store {
            let result = store.sync();
            if result.is_err() {
                self.judge(result);
            }
        }
    }

    fn judge(&mut self, result: io::Result<()>) {
        let problem = result.err().map(|error| {
            format!(
                "cannot record ended flows in {}: {error}; flows are served all the same, \
                 `ironlb flows --ended` will lack them (--state-dir)",
                self.dir.display()
            )
        });
        self.tried = problem.is_some().then(Instant::now);
        if problem != self.problem {
            match &problem {
                Some(problem) => warn!("{problem}"),
                None => info!("ended flows are recorded in {} again", self.dir.display()),
            }
            self.problem = problem;
        }
    }
}

fn tell(flow: &EndedFlow) {
    let text = flow.by.text();
    warn!(
        client = %flow.client,
        client_port = flow.client_port,
        vip = %flow.vip,
        vip_port = flow.vip_port,
        pod = %flow.pod,
        instance = flow.instance,
        seconds = flow.duration_seconds.round(),
        bytes_in = flow.bytes_in,
        bytes_out = flow.bytes_out,
        "a flow has ended abnormally: {text}"
    );
}

/// Keeps a pod with a thousand downloads from filling the log when it goes.
#[derive(Default)]
struct LogLimit {
    since: Option<Instant>,
    told: u32,
    others: u32,
}

impl LogLimit {
    /// Whether one more may be told.
    fn take(&mut self) -> bool {
        self.since.get_or_insert_with(Instant::now);
        if self.told < LOG_LINES {
            self.told += 1;
            return true;
        }
        self.others += 1;
        false
    }

    fn tell_of_others(&mut self) {
        if self.since.is_some_and(|since| since.elapsed() > LOG_WINDOW) {
            if self.others > 0 {
                warn!(
                    "{} more flows have ended abnormally; `ironlb flows --ended` lists them",
                    self.others
                );
            }
            *self = Self::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::tempdir;

    fn flow(client_port: u16) -> EndedFlow {
        EndedFlow {
            ended: parse_rfc3339("2026-01-31T01:02:03.456Z").expect("valid"),
            duration_seconds: 12.5,
            client: [172, 22, 0, 101].into(),
            client_port,
            vip: [172, 22, 0, 2].into(),
            vip_port: 6180,
            service: "metal3/ironic".to_owned(),
            port_name: "images".to_owned(),
            pod: [10, 244, 0, 11].into(),
            pod_port: 6180,
            instance: "ironic-0".to_owned(),
            bytes_in: 1000,
            bytes_out: Some(20_000_000),
            by: EndedBy::Gone,
            refusal: Some("refused_gone".to_owned()),
            handed_on: false,
        }
    }

    fn ports(record: &Record) -> Vec<u16> {
        record.flows.iter().map(|flow| flow.client_port).collect()
    }

    #[test]
    fn a_record_survives_a_restart_as_it_was() {
        let dir = tempdir().expect("folder");
        let dir = dir.path().join("made");
        for port in [1, 2] {
            let mut store = Store::open(&dir).expect("opens");
            store.append(&[flow(port)]).expect("writes");
        }
        let record = read(&dir).expect("reads");
        assert_eq!(record.flows, [flow(1), flow(2)]);
        assert_eq!(record.unreadable, 0);
    }

    #[test]
    fn the_record_is_bounded_and_keeps_the_newest() {
        let dir = tempdir().expect("folder");
        let mut store = Store::open(dir.path()).expect("opens");
        for port in 0..6000 {
            store.append(&[flow(port)]).expect("writes");
        }
        let record = read(dir.path()).expect("reads");
        let kept = ports(&record);
        assert!(kept.len() > 1000, "{}", kept.len());
        let newest: Vec<u16> = (6000 - kept.len() as u16..6000).collect();
        assert_eq!(kept, newest);
        let size = |name| fs::metadata(dir.path().join(name)).expect("there").len();
        let bytes = size(NEW) + size(OLD);
        assert!(bytes <= 2 * FILE_SIZE, "{bytes}");
    }

    #[test]
    fn a_torn_record_costs_only_itself() {
        let dir = tempdir().expect("folder");
        let path = dir.path().join(NEW);
        let mut store = Store::open(dir.path()).expect("opens");
        store.append(&[flow(1), flow(2)]).expect("writes");
        drop(store);
        let text = fs::read(&path).expect("reads");
        // Wherever the crash cut.
        for cut in HEADER.len() / 2..text.len() {
            fs::write(&path, &text[..cut]).expect("writes");
            let mut store = Store::open(dir.path()).expect("opens");
            store.append(&[flow(3)]).expect("writes");
            let record = read(dir.path()).expect("reads");
            let kept = ports(&record);
            assert_eq!(kept.last(), Some(&3), "cut at {cut}");
            assert!(record.unreadable <= 1, "cut at {cut}");
            let lines = text[..cut].split(|byte| *byte == b'\n').count();
            let whole = lines.saturating_sub(2);
            assert!(kept.len() > whole, "cut at {cut}: {kept:?}");
        }
    }

    #[test]
    fn what_is_not_ours_is_set_aside() {
        for foreign in [
            &b"somebody's notes\n"[..],
            &[0xff; 100],
            b"{\"ironlb\":\"ended flows\",\"version\":9}\n",
        ] {
            let dir = tempdir().expect("folder");
            fs::write(dir.path().join(NEW), foreign).expect("writes");
            let mut store = Store::open(dir.path()).expect("opens");
            store.append(&[flow(1)]).expect("writes");
            assert_eq!(ports(&read(dir.path()).expect("reads")), [1]);
            let names = fs::read_dir(dir.path()).expect("lists");
            let aside = names
                .map(|entry| entry.expect("entry").path())
                .find(|path| path.to_string_lossy().contains(".foreign-"))
                .expect("set aside");
            assert_eq!(fs::read(aside).expect("reads"), foreign);
        }
        let dir = tempdir().expect("folder");
        fs::create_dir(dir.path().join(NEW)).expect("a folder in its place");
        let mut store = Store::open(dir.path()).expect("opens");
        store.append(&[flow(1)]).expect("writes");
    }

    #[test]
    fn two_writers_are_one_too_many() {
        let dir = tempdir().expect("folder");
        let first = Store::open(dir.path()).expect("opens");
        let error = Store::open(dir.path()).expect_err("locked").to_string();
        assert!(error.contains("--state-dir"), "{error}");
        drop(first);
        Store::open(dir.path()).expect("free again");
    }

    #[test]
    fn short_flows_are_not_recorded_unless_their_backend_has_gone() {
        let nothing = Ending::from_bytes(&[0; size_of::<Ending>()]).expect("as long as one");
        let second = 1_000_000_000;
        let short = Ending {
            at: 109 * second,
            started: 100 * second,
            bytes_in: 1000,
            bytes_out: 5000,
            by: BY_CLIENT_RESET,
            ..nothing
        };
        let recorded =
            |ending: Ending| is_recorded(&ending, EndedBy::of(ending.by).expect("ended"));
        assert!(!recorded(short));
        let bytes_out = LARGE;
        assert!(recorded(Ending { bytes_out, ..short }));
        let at = 111 * second;
        assert!(recorded(Ending { at, ..short }));
        let by = BY_GONE;
        assert!(recorded(Ending { by, ..short }));
    }

    #[test]
    fn a_thousand_ends_are_a_few_lines_in_the_log() {
        let mut limit = LogLimit::default();
        let told = (0..1000).filter(|_| limit.take()).count();
        assert_eq!(told, LOG_LINES as usize);
        assert_eq!(limit.others, 1000 - LOG_LINES);
    }
}
