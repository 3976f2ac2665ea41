//! A download by curl in the background, with the checksum of what arrived.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::command::wait_until;
use crate::namespace::Namespace;
use crate::process::Process;

/// A running download. Dropping it ends it.
#[derive(Debug)]
pub struct Download {
    curl: Process,
    url: String,
}

impl Download {
    /// Starts `curl URL | sha256sum` in `namespace`, with `options` for curl; it may take `limit`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(
        namespace: &Namespace,
        url: &str,
        options: &[&str],
        limit: Duration,
    ) -> Result<Self> {
        // curl's exit code would be lost in the pipe; -S makes it say why it failed.
        let script = r#"curl -sS -f "$@" | sha256sum"#;
        let limit = limit.as_secs().to_string();
        let words = ["sh", "-c", script, "curl", "--max-time", &limit, url];
        Ok(Self {
            curl: namespace.spawn("download", words.iter().chain(options))?,
            url: url.to_owned(),
        })
    }

    /// Whether it goes on.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn running(&mut self) -> Result<bool> {
        self.curl.running()
    }

    /// Waits for its end; it must have brought exactly what has the checksum `sha256`.
    ///
    /// # Errors
    /// When it has not; the message holds what curl said.
    pub fn finish(mut self, sha256: &str) -> Result<()> {
        wait_until(
            &format!("the download of {} ends", self.url),
            Duration::from_secs(120),
            || Ok(!self.curl.running()?),
        )?;
        let said = self.curl.log()?;
        ensure!(
            said.lines().any(|line| line.starts_with(sha256)) && !said.contains("curl:"),
            "download of {} is broken, {sha256} expected: {said}",
            self.url
        );
        Ok(())
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        // The shell alone would leave curl behind: the whole group goes.
        if let Some(group) = rustix::process::Pid::from_raw(self.curl.pid().cast_signed()) {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
    }
}
