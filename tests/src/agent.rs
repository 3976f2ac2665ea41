//! The `ironlb` binary and an agent of it on a node of the laboratory.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;

use crate::command::{run, wait_until};
use crate::laboratory::Node;
use crate::maps::Maps;
use crate::process::Process;

/// The `ironlb` binary of this build: what `IRONLB` names, else the one that cargo builds now into
/// the target directory of the running executable.
///
/// # Errors
/// When it cannot be built.
pub fn ironlb() -> Result<&'static Path> {
    static BINARY: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = BINARY.get_or_init(|| build().map_err(|error| format!("{error:#}")));
    match built {
        Ok(path) => Ok(path),
        Err(error) => bail!("no ironlb binary: {error}"),
    }
}

fn build() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("IRONLB") {
        return Ok(path.into());
    }
    let own = std::env::current_exe().context("cannot tell the running executable")?;
    let own = own.parent().context("the executable has no directory")?;
    // Tests are one level deeper than binaries.
    let profile = if own.ends_with("deps") {
        own.parent().unwrap_or(own)
    } else {
        own
    };
    let target = profile
        .parent()
        .context("the executable is not in a target directory")?;
    // Always: cargo does not rebuild another package's binary for a test.
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["build", "--quiet", "--package", "lb-userspace"])
        .arg("--target-dir")
        .arg(target);
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    run(&mut cargo)?;
    let binary = profile.join("ironlb");
    ensure!(
        binary.exists(),
        "cargo built lb-userspace, but not {}",
        binary.display()
    );
    Ok(binary)
}

impl Node {
    /// Writes the agent's configuration, whole or not at all.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_config(&self, config: &Value) -> Result<()> {
        self.write_config_text(&serde_json::to_string_pretty(config)?)
    }

    /// As [`Node::write_config`], from text that need not be valid.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_config_text(&self, text: &str) -> Result<()> {
        let fresh = self.config.with_extension("new");
        fs::write(&fresh, text)
            .and_then(|()| fs::rename(&fresh, &self.config))
            .with_context(|| format!("cannot write {}", self.config.display()))
    }

    /// Arguments of `ironlb` for the verb and this node's pins.
    fn ironlb_command(&self, verb: &[&str]) -> Result<Command> {
        let mut command = self.namespace.command(ironlb()?);
        command.args(verb).arg("--bpffs").arg(&self.bpffs);
        Ok(command)
    }

    /// Runs a verb of `ironlb` on this node, e.g. `["status", "-o", "json"]`, and returns its stdout.
    ///
    /// # Errors
    /// When it does not succeed.
    pub fn ironlb(&self, verb: &[&str]) -> Result<String> {
        run(&mut self.ironlb_command(verb)?)
    }

    /// Where this node's agent keeps what shall survive it.
    pub fn state_dir(&self) -> PathBuf {
        self.config.with_extension("state")
    }

    /// Starts a verb of `ironlb` on this node in the background.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_ironlb(&self, verb: &[&str]) -> Result<Process> {
        let mut words = vec![ironlb()?.as_os_str()];
        words.extend(verb.iter().map(AsRef::<OsStr>::as_ref));
        words.extend(["--bpffs".as_ref(), self.bpffs.as_os_str()]);
        self.namespace.spawn(verb[0], words)
    }

    /// The maps that are pinned on this node.
    ///
    /// # Errors
    /// Never; each map is opened when it is read.
    pub fn maps(&self) -> Maps {
        Maps::new(&self.bpffs)
    }
}

/// A running agent. Dropping it kills the process; what it pinned goes on serving.
#[derive(Debug)]
pub struct Agent {
    /// Its process.
    pub process: Process,
}

impl Agent {
    /// Writes `config`, starts an agent on `node`, and waits until it has brought the maps in step.
    ///
    /// # Errors
    /// When it ends, or is not ready in ten seconds; the message holds its log.
    pub fn start(node: &Node, config: &Value) -> Result<Self> {
        node.write_config(config)?;
        Self::launch(node)
    }

    /// As [`Agent::start`], with the configuration as it is.
    ///
    /// # Errors
    /// As [`Agent::start`].
    pub fn launch(node: &Node) -> Result<Self> {
        let mut agent = Self::spawn(node)?;
        agent.wait_until_ready(node)?;
        Ok(agent)
    }

    /// Waits until it has brought the maps of `node` in step.
    ///
    /// # Errors
    /// As [`Agent::start`].
    pub fn wait_until_ready(&mut self, node: &Node) -> Result<()> {
        let pid = self.process.pid();
        let ready = wait_until("the agent is ready", Duration::from_secs(60), || {
            ensure!(self.process.running()?, "it ended");
            // Maps of a former agent are there from the start: this one's pid must be in them.
            let control = node.maps().control().ok();
            Ok(control.is_some_and(|control| {
                control.agent_pid == pid && control.synced_at >= control.agent_started
            }))
        });
        let log = self.process.log()?;
        ready.with_context(|| format!("agent on {} said:\n{log}", node.name))
    }

    /// Starts an agent on `node` and does not wait: for those that shall fail.
    ///
    /// # Errors
    /// When there is no binary to start.
    pub fn spawn(node: &Node) -> Result<Self> {
        Self::spawn_binary(node, ironlb()?)
    }

    /// As [`Agent::spawn`], from a binary elsewhere, as an upgrade brings it.
    ///
    /// # Errors
    /// When there is no binary to start.
    pub fn spawn_binary(node: &Node, binary: &Path) -> Result<Self> {
        Self::spawn_with(node, binary, &[])
    }

    /// As [`Agent::launch`], with more options on its command line.
    ///
    /// # Errors
    /// As [`Agent::start`].
    pub fn launch_with(node: &Node, options: &[&str]) -> Result<Self> {
        let mut agent = Self::spawn_with(node, ironlb()?, options)?;
        agent.wait_until_ready(node)?;
        Ok(agent)
    }

    fn spawn_with(node: &Node, binary: &Path, options: &[&str]) -> Result<Self> {
        let state_dir = node.state_dir();
        let command = [
            binary.as_os_str(),
            "agent".as_ref(),
            "--node-name".as_ref(),
            node.name.as_ref(),
            "--config".as_ref(),
            node.config.as_os_str(),
            "--bpffs".as_ref(),
            node.bpffs.as_os_str(),
            "--state-dir".as_ref(),
            state_dir.as_os_str(),
        ];
        let options = options.iter().map(OsStr::new);
        let command = command.into_iter().chain(options);
        let process = node.namespace.spawn("agent", command)?;
        Ok(Self { process })
    }

    /// Waits until it gives up, which it must as a failure; what it said.
    ///
    /// # Errors
    /// When it goes on, or ends well.
    pub fn refusal(&mut self) -> Result<String> {
        let limit = Duration::from_secs(60);
        wait_until("the agent gives up", limit, || {
            Ok(!self.process.running()?)
        })?;
        let said = self.process.log()?;
        ensure!(!self.process.wait()?.success(), "it ended well: {said}");
        Ok(said)
    }

    /// Asks it to end (SIGTERM) and waits for that.
    ///
    /// # Errors
    /// When it has ended already, or does not in 20 s.
    pub fn stop(&mut self) -> Result<()> {
        self.process.signal(Signal::TERM)?;
        let limit = Duration::from_secs(20);
        wait_until("the agent ends", limit, || Ok(!self.process.running()?))
    }
}
