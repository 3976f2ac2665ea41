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
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde_path_to_error::Segment;
use serde_saphyr::{Error, Location, MessageFormatter as _, Options, UserMessageFormatter};

use crate::desired::DesiredState;

/// The format that this version reads.
pub const API_VERSION: &str = "ironlb.dev/v1";

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
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
            path: path.into(),
            message: message.into(),
        }
    }
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
    parse(path, &read(path)?)
}

/// Reads and checks a file that leaves the services to Kubernetes.
pub fn load_cluster(path: &Path) -> Result<ClusterConfig, ConfigError> {
    parse_cluster(path, &read(path)?)
}

/// Reads a file's text, without a look at what it says.
pub fn read(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|error| ConfigError::Read {
        path: path.to_owned(),
        error,
    })
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
