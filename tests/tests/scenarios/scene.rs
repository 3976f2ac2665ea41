//! What the scenarios share: a laboratory with an agent on its node, in one of the two modes.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use ironlb_tests::{Agent, Builder, Download, Host, Laboratory, Maps, Namespace, Node, VIP};
use lb_common::verdict::Verdict;
use serde_json::Value;

/// How the forward path is attached, and what its packets look like there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// XDP in the driver; whole checksums, as on a real wire.
    Native,
    /// TC ingress; every offload on.
    Tc,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Tc => "tc",
        }
    }

    pub fn builder(self) -> Builder {
        Laboratory::builder().complete_checksums(self == Self::Native)
    }
}

/// Makes a test of each function in each mode.
macro_rules! in_both_modes {
    ($($scenario:ident),+ $(,)?) => {
        mod native {
            $(#[test] fn $scenario() { super::$scenario($crate::scene::Mode::Native) })+
        }
        mod tc {
            $(#[test] fn $scenario() { super::$scenario($crate::scene::Mode::Tc) })+
        }
    };
}
pub(crate) use in_both_modes;

/// A laboratory whose node serves the VIP. The agent goes before the laboratory.
pub struct Scene {
    pub agent: Agent,
    pub config: Value,
    pub lab: Laboratory,
}

impl Scene {
    pub fn new(mode: Mode) -> Self {
        Self::with(mode, mode.builder(), |_| {})
    }

    /// With a laboratory and a configuration of its own.
    pub fn with(mode: Mode, builder: Builder, change: impl FnOnce(&mut Value)) -> Self {
        let lab = builder.build().expect("laboratory");
        let mut config = lab.config(mode.name());
        change(&mut config);
        let agent = Agent::start(&lab.nodes[0], &config).expect("agent");
        Self { agent, config, lab }
    }

    pub fn node(&self) -> &Node {
        &self.lab.nodes[0]
    }

    pub fn maps(&self) -> Maps {
        self.node().maps()
    }

    pub fn count(&self, verdict: Verdict) -> u64 {
        self.maps().verdict(verdict).expect("verdicts")
    }

    pub fn host(&self) -> &Host {
        &self.lab.hosts[0]
    }

    /// Starts to download `path` from `port` of the VIP.
    pub fn download(&self, port: u16, path: &str, options: &[&str]) -> Download {
        let url = format!("http://{VIP}:{port}{path}");
        let limit = Duration::from_secs(60);
        Download::start(&self.host().namespace, &url, options, limit).expect("curl")
    }
}

/// The answer to one request.
pub fn get(client: &Namespace, address: Ipv4Addr, port: u16, path: &str) -> anyhow::Result<String> {
    let url = format!("http://{address}:{port}{path}");
    client.exec(["curl", "-sS", "-f", "--max-time", "3", &url])
}

/// Tries to connect for at most `limit`.
pub fn connect(
    client: &Namespace,
    address: Ipv4Addr,
    port: u16,
    limit: Duration,
) -> io::Result<TcpStream> {
    let address = SocketAddr::from((address, port));
    client
        .enter(|| TcpStream::connect_timeout(&address, limit))
        .expect("namespace")
}

/// Asserts that nothing answers a connection attempt, not even with a refusal.
pub fn assert_silent(client: &Namespace, address: Ipv4Addr, port: u16) {
    let error = connect(client, address, port, Duration::from_millis(500))
        .expect_err("somebody accepted the connection");
    assert_eq!(
        error.kind(),
        io::ErrorKind::TimedOut,
        "{address}:{port}: {error}"
    );
}
