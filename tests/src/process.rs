//! A background process of the laboratory: its log, signals to it, and its end with the value.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

/// A process that is killed when the value is dropped, unless left running.
#[derive(Debug)]
pub struct Process {
    child: Child,
    label: String,
    log: PathBuf,
    left: bool,
}

impl Process {
    /// Starts `command` with stdout and stderr appended to `log`.
    pub(crate) fn start(command: &mut Command, label: &str, log: &Path) -> Result<Self> {
        let open = || {
            File::options()
                .create(true)
                .append(true)
                .open(log)
                .with_context(|| format!("cannot open {}", log.display()))
        };
        let child = command
            .stdin(Stdio::null())
            .stdout(open()?)
            .stderr(open()?)
            // A Ctrl-C at the terminal is for the laboratory's owner, who ends these in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        Ok(Self {
            child,
            label: label.to_owned(),
            log: log.to_owned(),
            left: false,
        })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// All that it has written so far.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn log(&self) -> Result<String> {
        std::fs::read_to_string(&self.log)
            .with_context(|| format!("cannot read {}", self.log.display()))
    }

    /// Whether it has not ended yet.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(Pid::from_child(&self.child), signal)
            .with_context(|| format!("cannot send {signal:?} to {} {}", self.label, self.pid()))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn wait(&mut self) -> Result<ExitStatus> {
        self.child
            .wait()
            .with_context(|| format!("cannot wait for {}", self.label))
    }

    /// Ends it at once (SIGKILL) and reaps it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn kill(&mut self) -> Result<()> {
        self.child
            .kill()
            .with_context(|| format!("cannot kill {}", self.label))?;
        self.wait().map(drop)
    }

    /// Leaves it running after the value is gone.
    pub fn leave(&mut self) {
        self.left = true;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.left {
            // It may have ended by itself.
            let _ = self.kill();
        }
    }
}
