//! Where the agent gets from what it is to serve: a file, or Kubernetes.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::info;

use crate::config::source::{FileSource, History};
use crate::config::{ClusterConfig, ConfigError, parse, parse_cluster};
use crate::desired::DesiredState;
use crate::kubernetes;
use crate::tables::TableSet;

/// A source whose file has been read and found good, and nothing else done.
pub enum Prepared {
    /// All is in the file.
    File(FileSource<DesiredState>, DesiredState),
    /// The file leaves the services to Kubernetes.
    Kubernetes(
        FileSource<ClusterConfig>,
        ClusterConfig,
        Box<kubernetes::Options>,
    ),
}

impl Prepared {
    /// Reads the file.
    pub async fn read(
        file: PathBuf,
        kubernetes: Option<kubernetes::Options>,
    ) -> Result<Self, ConfigError> {
        match kubernetes {
            None => {
                let (file, state) = FileSource::open(file, parse).await?;
                Ok(Self::File(file, state))
            }
            Some(options) => {
                let (file, config) = FileSource::open(file, parse_cluster).await?;
                Ok(Self::Kubernetes(file, config, Box::new(options)))
            }
        }
    }

    /// The first state, which for Kubernetes has to wait until everything has been read there.
    pub async fn start(self) -> (Source, DesiredState) {
        match self {
            Self::File(file, state) => (Source::File(file), state),
            Self::Kubernetes(file, config, options) => {
                let mut source = kubernetes::Source::start(file, config, *options);
                let state = source.first().await;
                (Source::Kubernetes(Box::new(source)), state)
            }
        }
    }
}

/// A source that has brought a first state.
pub enum Source {
    /// All is in the file.
    File(FileSource<DesiredState>),
    /// The file leaves the services to Kubernetes.
    Kubernetes(Box<kubernetes::Source>),
}

impl Source {
    /// The configuration file.
    pub fn path(&self) -> &Path {
        match self {
            Self::File(file) => file.path(),
            Self::Kubernetes(kubernetes) => kubernetes.file().path(),
        }
    }

    /// How the file fared so far.
    pub fn history(&self) -> &History {
        match self {
            Self::File(file) => file.history(),
            Self::Kubernetes(kubernetes) => kubernetes.file().history(),
        }
    }

    /// Waits for a sign that something else may be wanted. Safe to cancel.
    pub async fn changed(&mut self) {
        match self {
            Self::File(file) => file.changed().await,
            Self::Kubernetes(kubernetes) => kubernetes.changed().await,
        }
    }

    /// What is wanted, `None` if nothing has changed since it was asked last.
    pub fn news(&mut self) -> Result<Option<DesiredState>, ConfigError> {
        match self {
            Self::File(file) => {
                let state = file.news()?;
                if state.is_some() {
                    info!("{} has changed and is good", file.path().display());
                }
                Ok(state)
            }
            Self::Kubernetes(kubernetes) => kubernetes.news(),
        }
    }

    /// Has the file read again; if it says something else, [`Self::changed`] tells.
    pub fn look(&mut self) {
        match self {
            Self::File(file) => file.look(),
            Self::Kubernetes(kubernetes) => kubernetes.file_mut().look(),
        }
    }

    /// Has the file read again; whatever it says then is news.
    pub fn forget(&mut self) {
        match self {
            Self::File(file) => file.forget(),
            Self::Kubernetes(kubernetes) => kubernetes.file_mut().forget(),
        }
    }

    /// Tells that the maps hold these tables but for those VIPs that no uplink carries, and whether
    /// something had to be written for it.
    pub fn in_step(&mut self, tables: &TableSet, idle: &[IpAddr], has_written: bool) {
        match self {
            Self::File(_) => {}
            Self::Kubernetes(kubernetes) => kubernetes.in_step(tables, idle, has_written),
        }
    }

    /// How far Kubernetes is followed.
    pub fn kubernetes(&self) -> Option<&Arc<kubernetes::Status>> {
        match self {
            Self::File(_) => None,
            Self::Kubernetes(kubernetes) => Some(kubernetes.status()),
        }
    }

    /// Ends what runs beside the agent.
    pub async fn stop(self) {
        match self {
            Self::File(_) => {}
            Self::Kubernetes(kubernetes) => kubernetes.stop().await,
        }
    }
}
