//! The configuration file: YAML text in, [`DesiredState`] or every mistake with its place out.
//!
//! Structure (syntax, unknown and duplicate keys, wrong types) is the YAML reader's business and ends
//! at the first mistake; meaning is checked as a whole, so that one run shows all that is wrong.

mod schema;
pub mod source;
#[cfg(test)]
mod tests;
mod validate;

pub(crate) use validate::parse_range;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read as _};
use std::net::IpAddr;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, fs};

use rustix::fs::OFlags;
use serde_path_to_error::Segment;
use serde_saphyr::{Error, Location, MessageFormatter as _, Options, UserMessageFormatter};

use crate::desired::DesiredState;

/// The format that this version reads.
pub const API_VERSION: &str = "ironlb.dev/v1";
/// Bytes of a file at most: as many as a ConfigMap holds.
pub const MAX_BYTES: u64 = 1 << 20;

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {}: {why}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        why: Unreadable,
    },
    /// The file says something that cannot be served.
    #[error("{}", Lines { file, problems })]
    Invalid {
        /// The file, for the messages.
        file: PathBuf,
        /// What is wrong, at least one, in the order of the file.
        problems: Vec<Problem>,
    },
}

/// Why a file cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// The system refuses; in its words.
    #[error("{0}")]
    System(String),
    /// Not a file, but this.
    #[error("it is {0}; a configuration is a regular file")]
    NotRegular(&'static str),
    /// More than [`MAX_BYTES`].
    #[error("it is larger than {} KiB, the most that is read", MAX_BYTES >> 10)]
    TooLarge,
    /// Not UTF-8.
    #[error("it is not UTF-8 text")]
    NotText,
    /// There is no thread to read it with.
    #[error("no thread could be started for it")]
    NoThread,
}

impl From<io::Error> for Unreadable {
    fn from(error: io::Error) -> Self {
        Self::System(error.to_string())
    }
}

/// One mistake in a file.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Problem {
    /// Line, from 1; 0 when unknown.
    pub line: u64,
    /// Column, from 1; 0 when unknown.
    pub column: u64,
    /// Which value, e.g. `services[0].ports[1].port`; empty for the file as a whole.
    pub path: String,
    /// What is wrong with it and what to do.
    pub message: String,
}

impl Problem {
    fn new(at: Location, path: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            line: at.line(),
            column: at.column(),
            path: shown(&path.into()),
            message: shown(&message.into()),
        }
    }
}

/// Whether a character is seen as what it is: no control or format character (which may turn the text's
/// direction around), and no blank but a plain one.
fn is_shown(c: char) -> bool {
    // A combining mark is escaped unless it has something to combine with.
    matches!(c, '\'' | '"' | '\\') || String::from_iter(['x', c]).escape_debug().count() == 2
}

/// A text with what is not shown escaped: it may come from the file, and goes to a terminal or log.
fn shown(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match is_shown(c) {
            true => shown.push(c),
            false => shown.extend(c.escape_debug()),
        }
    }
    shown
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "{}:{}: ", self.line, self.column)?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)
    }
}

struct Lines<'a> {
    file: &'a Path,
    problems: &'a [Problem],
}

impl fmt::Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, problem) in self.problems.iter().enumerate() {
            if at > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{}:{problem}", self.file.display())?;
        }
        Ok(())
    }
}

/// What a file says to an agent that takes its services from Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterConfig {
    /// Uplinks and VIPs; no services.
    pub state: DesiredState,
    /// Who may use a VIP, for every VIP.
    pub policies: BTreeMap<IpAddr, VipPolicy>,
    /// Serve Services of type LoadBalancer that name no class, too.
    pub default_class: bool,
    /// Use endpoints that no pod stands behind, too: a hand-made slice can aim a VIP anywhere.
    pub endpoints_without_pods: bool,
    /// Time between two heartbeats of the agents.
    pub heartbeat_interval: Duration,
    /// UDP and TCP port of the agents among themselves.
    pub peer_port: u16,
}

/// Who may use a VIP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VipPolicy {
    /// Names of the nodes on which it is effective, `None` for all.
    pub nodes: Option<BTreeSet<String>>,
    /// Namespaces whose Services may have it.
    pub namespaces: Namespaces,
    /// Given to a Service that asks for no particular one.
    pub auto_assign: bool,
}

impl VipPolicy {
    /// Whether the VIP is effective on a node.
    pub fn is_effective_on(&self, node: &str) -> bool {
        self.nodes.as_ref().is_none_or(|nodes| nodes.contains(node))
    }
}

/// A choice of namespaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Namespaces {
    /// Every one (`"*"`).
    All,
    /// These.
    Named(BTreeSet<String>),
}

impl Namespaces {
    /// Whether a namespace is among them.
    pub fn contain(&self, namespace: &str) -> bool {
        match self {
            Self::All => true,
            Self::Named(names) => names.contains(namespace),
        }
    }
}

/// Reads and checks a file.
pub fn load(path: &Path) -> Result<DesiredState, ConfigError> {
    parse(path, &text(path)?)
}

/// Reads and checks a file that leaves the services to Kubernetes.
pub fn load_cluster(path: &Path) -> Result<ClusterConfig, ConfigError> {
    parse_cluster(path, &text(path)?)
}

fn text(path: &Path) -> Result<String, ConfigError> {
    read(path).map_err(|why| ConfigError::Read {
        path: path.to_owned(),
        why,
    })
}

/// Reads a file's text, without a look at what it says. Only of a file system that does not answer it
/// waits.
pub fn read(path: &Path) -> Result<String, Unreadable> {
    regular(&fs::metadata(path)?)?;
    // Whatever has taken the file's place since must not block either.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = fs::OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)?;
    regular(&file.metadata()?)?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Unreadable::TooLarge);
    }
    String::from_utf8(bytes).map_err(|_| Unreadable::NotText)
}

fn regular(metadata: &fs::Metadata) -> Result<(), Unreadable> {
    let kind = metadata.file_type();
    let what = if kind.is_file() {
        return Ok(());
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe (FIFO)"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    };
    Err(Unreadable::NotRegular(what))
}

/// Checks a file's text; `file` is for the messages.
pub fn parse(file: &Path, text: &str) -> Result<DesiredState, ConfigError> {
    meaning(file, text, validate::check)
}

/// Checks the text of a file that leaves the services to Kubernetes.
pub fn parse_cluster(file: &Path, text: &str) -> Result<ClusterConfig, ConfigError> {
    meaning(file, text, validate::check_cluster)
}

fn meaning<T>(
    file: &Path,
    text: &str,
    check: fn(&schema::File) -> Result<T, Vec<Problem>>,
) -> Result<T, ConfigError> {
    structure(text)
        .map_err(|problem| vec![problem])
        .and_then(|raw| check(&raw))
        .map_err(|problems| ConfigError::Invalid {
            file: file.to_owned(),
            problems,
        })
}

fn structure(text: &str) -> Result<schema::File, Problem> {
    let is_blank = |line: &str| matches!(line.trim(), "" | "---") || line.trim().starts_with('#');
    if text.lines().all(is_blank) {
        return Err(Problem {
            line: 1,
            column: 1,
            path: String::new(),
            message: format!(
                "the file is empty; it should hold `apiVersion: {API_VERSION}`, `uplinks`, `vips` and, \
                 unless they come from Kubernetes, `services`"
            ),
        });
    }
    let mut options = Options::default();
    // Lines and columns go into our own one-line messages.
    options.with_snippet = false;
    let mut track = serde_path_to_error::Track::new();
    let read = serde_saphyr::with_deserializer_from_str_with_options(text, options, |yaml| {
        let yaml = serde_path_to_error::Deserializer::new(yaml, &mut track);
        serde::Deserialize::deserialize(yaml)
    });
    read.map_err(|error| {
        let at = error.location().unwrap_or(Location::UNKNOWN);
        let message = match &error {
            Error::MultipleDocuments { .. } => "a second document (`---`); only one is read".into(),
            Error::InvalidScalar { ty: "boolean", .. } => "not `true` or `false`".into(),
            Error::InvalidScalar { .. } => "not a whole number".into(),
            Error::Unexpected { expected, .. } if expected.contains("mapping start") => {
                "keys with values (`key: value`) belong here".into()
            }
            Error::Unexpected { expected, .. } if expected.contains("sequence start") => {
                "a list (`- entry`, or `[entry, entry]`) belongs here".into()
            }
            other => UserMessageFormatter.format_message(other),
        };
        let mut problem = Problem::new(at, path_of(&track.path()), message);
        if matches!(error, Error::SerdeMissingField { .. }) && problem.path.is_empty() {
            // The reader points at the last key of the file, which has nothing to do with it.
            (problem.line, problem.column) = (1, 1);
        }
        problem
    })
}

/// A path as a reader of the file would write it, without the wrapper that records places.
fn path_of(path: &serde_path_to_error::Path) -> String {
    let mut text = String::new();
    for segment in path {
        match segment {
            Segment::Map { key } if key == "value" => {}
            Segment::Map { key } if text.is_empty() => text.push_str(key),
            Segment::Map { key } => text.extend([".", key]),
            Segment::Seq { index } => text.extend(["[", &index.to_string(), "]"]),
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    text
}
