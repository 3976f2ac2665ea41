//! A network namespace of the laboratory: made, entered, and removed with all that runs in it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::command::{run, run_with_input, wait_until};
use crate::process::Process;

/// A named network namespace. It lives until the laboratory's registry removes it.
#[derive(Clone, Debug)]
pub struct Namespace {
    name: String,
    /// The laboratory's, for what processes here write.
    directory: PathBuf,
}

impl Namespace {
    /// Makes `ironlb-<tag>-<role>` with its loopback up.
    pub(crate) fn create(tag: &str, role: &str, directory: &Path) -> Result<Self> {
        let name = format!("ironlb-{tag}-{role}");
        run(Command::new("ip").args(["netns", "add", &name]))?;
        let namespace = Self {
            name,
            directory: directory.to_owned(),
        };
        namespace.ip("link set lo up")?;
        Ok(namespace)
    }

    /// Its name, as `ip netns` knows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that `setns` wants.
    pub fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    /// Runs lines of `ip` commands here in one batch (each without the leading `ip`).
    ///
    /// # Errors
    /// At the first line that fails.
    pub fn ip(&self, lines: &str) -> Result<()> {
        run_with_input(
            Command::new("ip").args(["-n", &self.name, "-batch", "-"]),
            lines,
        )
        .map(drop)
    }

    /// A command that will run here. The file system, `/sys` included, stays the caller's:
    /// `ip netns exec` would mount a fresh `/sys` without the pins of our maps.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.path().display()))
            .arg("--")
            .arg(program);
        command
    }

    /// Runs a command here and returns its stdout.
    ///
    /// # Errors
    /// When it cannot be started or does not succeed.
    pub fn exec<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Result<String> {
        run(&mut self.command_of(words)?)
    }

    /// Runs a command here, whatever its exit code.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn output<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Result<Output> {
        let mut command = self.command_of(words)?;
        command
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot start {command:?}"))
    }

    /// Starts a command here that goes on in the background; what it says is in [`Process::log`].
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn<S: AsRef<OsStr>>(
        &self,
        label: &str,
        words: impl IntoIterator<Item = S>,
    ) -> Result<Process> {
        // A log of its own for each, also of those with one label.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let log = self.file(&format!("{label}-{number}.log"));
        Process::start(&mut self.command_of(words)?, label, &log)
    }

    /// A file of the laboratory that belongs to this namespace.
    pub(crate) fn file(&self, suffix: &str) -> PathBuf {
        self.directory.join(format!("{}-{suffix}", self.name))
    }

    fn command_of<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Result<Command> {
        let mut words = words.into_iter();
        let program = words.next().context("no command to run was given")?;
        let mut command = self.command(program);
        command.args(words);
        Ok(command)
    }

    /// Calls `work` on a thread of its own that has moved into this namespace. Sockets that it
    /// makes stay here when they are returned.
    ///
    /// # Errors
    /// When the namespace cannot be entered.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let path = self.path();
        let file = std::fs::File::open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        let entered = std::thread::scope(|scope| {
            scope
                .spawn(move || {
                    use std::os::fd::AsFd;
                    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                        .map(|()| work())
                })
                .join()
        });
        match entered {
            Ok(result) => result.with_context(|| format!("setns to {} failed", path.display())),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Writes a `net.*` sysctl of this namespace.
    ///
    /// # Errors
    /// When the kernel does not have it or refuses the value.
    pub fn sysctl(&self, name: &str, value: &str) -> Result<()> {
        let path = Path::new("/proc/sys").join(name.replace('.', "/"));
        self.enter(|| std::fs::write(&path, value))?
            .with_context(|| {
                format!(
                    "cannot write {value} to {} in {}",
                    path.display(),
                    self.name
                )
            })
    }

    /// Index and MAC of an interface here.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn interface(&self, name: &str) -> Result<(u32, [u8; 6])> {
        // /sys shows the namespace that it was mounted in, so ask by a command.
        let shown = self.exec(["ip", "-j", "link", "show", "dev", name])?;
        let shown: serde_json::Value = serde_json::from_str(&shown)?;
        let read = || {
            let index = u32::try_from(shown[0]["ifindex"].as_u64()?).ok()?;
            let mut mac = [0; 6];
            let mut octets = shown[0]["address"].as_str()?.split(':');
            for octet in &mut mac {
                *octet = u8::from_str_radix(octets.next()?, 16).ok()?;
            }
            Some((index, mac))
        };
        read().with_context(|| format!("no index and MAC of {name} in {shown}"))
    }

    /// Ends what runs in the namespace `name`, then removes it. Not being there is fine.
    pub(crate) fn remove(name: &str) -> Result<()> {
        if !Path::new("/run/netns").join(name).exists() {
            return Ok(());
        }
        let running = || -> Result<Vec<Pid>> {
            let listed = run(Command::new("ip").args(["netns", "pids", name]))?;
            Ok(listed
                .split_whitespace()
                .filter_map(|pid| pid.parse().ok())
                .filter_map(Pid::from_raw)
                .collect())
        };
        let ended = format!("nothing runs in {name}");
        wait_until(&ended, Duration::from_secs(5), || {
            let running = running()?;
            for pid in &running {
                // Gone already is as good.
                let _ = kill_process(*pid, Signal::KILL);
            }
            Ok(running.is_empty())
        })?;
        run(Command::new("ip").args(["netns", "delete", name])).map(drop)
    }
}
