//! Where the agent gets from what it is to serve: a file, or Kubernetes.

use std::collections::BTreeSet;
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

    /// Begins to follow Kubernetes. To be called on a runtime.
    pub fn start(self) -> Source {
        match self {
            Self::File(file, state) => Source::File(Box::new(file), Some(state)),
            Self::Kubernetes(file, config, options) => {
                let source = kubernetes::Source::start(file, config, *options);
                Source::Kubernetes(Box::new(source))
            }
        }
    }
}

/// A source that is followed.
pub enum Source {
    /// All is in the file, and its first state is here until somebody asks for it.
    File(Box<FileSource<DesiredState>>, Option<DesiredState>),
    /// The file leaves the services to Kubernetes.
    Kubernetes(Box<kubernetes::Source>),
}

impl Source {
    /// Waits for the first state: with Kubernetes until everything has been read there. To be asked once, and not after
    /// [`Self::news`] has brought one.
    pub async fn first(&mut self) -> DesiredState {
        match self {
            Self::File(_, first) => match first.take() {
                Some(state) => state,
                None => std::future::pending().await,
            },
            Self::Kubernetes(kubernetes) => kubernetes.first().await,
        }
    }

    /// What can be wanted without the services, before the first state is there: [`Self::news`] brings that. `None`
    /// where it is there already, or nothing is known of the peers.
    pub fn meanwhile(&mut self) -> Option<DesiredState> {
        match self {
            Self::File(..) => None,
            Self::Kubernetes(kubernetes) => kubernetes.meanwhile(),
        }
    }

    /// Tells where this agent is found by its peers.
    pub fn found_at(&mut self, addresses: BTreeSet<IpAddr>) {
        match self {
            Self::File(..) => {}
            Self::Kubernetes(kubernetes) => kubernetes.found_at(addresses),
        }
    }

    /// The configuration file.
    pub fn path(&self) -> &Path {
        match self {
            Self::File(file, _) => file.path(),
            Self::Kubernetes(kubernetes) => kubernetes.file().path(),
        }
    }

    /// How the file fared so far.
    pub fn history(&self) -> &History {
        match self {
            Self::File(file, _) => file.history(),
            Self::Kubernetes(kubernetes) => kubernetes.file().history(),
        }
    }

    /// Waits for a sign that something else may be wanted. Safe to cancel.
    pub async fn changed(&mut self) {
        match self {
            Self::File(file, _) => file.changed().await,
            Self::Kubernetes(kubernetes) => kubernetes.changed().await,
        }
    }

    /// What is wanted, `None` if nothing has changed since it was asked last.
    pub fn news(&mut self) -> Result<Option<DesiredState>, ConfigError> {
        match self {
            Self::File(file, _) => {
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
            Self::File(file, _) => file.look(),
            Self::Kubernetes(kubernetes) => kubernetes.file_mut().look(),
        }
    }

    /// Has the file read again; whatever it says then is news.
    pub fn forget(&mut self) {
        match self {
            Self::File(file, _) => file.forget(),
            Self::Kubernetes(kubernetes) => kubernetes.file_mut().forget(),
        }
    }

    /// Tells that the maps hold these tables but for those VIPs that no uplink carries, and whether
    /// something had to be written for it.
    pub fn in_step(&mut self, tables: &TableSet, idle: &[IpAddr], has_written: bool) {
        match self {
            Self::File(..) => {}
            Self::Kubernetes(kubernetes) => kubernetes.in_step(tables, idle, has_written),
        }
    }

    /// How far Kubernetes is followed.
    pub fn kubernetes(&self) -> Option<&Arc<kubernetes::Status>> {
        match self {
            Self::File(..) => None,
            Self::Kubernetes(kubernetes) => Some(kubernetes.status()),
        }
    }

    /// Ends what runs beside the agent.
    pub async fn stop(self) {
        match self {
            Self::File(..) => {}
            Self::Kubernetes(kubernetes) => kubernetes.stop().await,
        }
    }
}
