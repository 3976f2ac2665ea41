//! Downloads and questions by curl: in the background with the checksum of what arrived, and HEADs.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::command::wait_until;
use crate::namespace::Namespace;
use crate::process::Process;

/// Asks for a URL's head so many times from `namespace`, by a connection of its own each time; the HTTP codes.
///
/// # Errors
/// When the last one gets no answer.
pub fn heads(namespace: &Namespace, url: &str, count: usize) -> Result<Vec<String>> {
    // curl expands the range.
    let url = format!("{url}?[1-{count}]");
    let quiet = ["curl", "--silent", "--show-error", "--max-time", "60"];
    let head = [
        "--head",
        "--header",
        "Connection: close",
        "--output",
        "/dev/null",
    ];
    let print = ["--write-out", "%{http_code}\n", &url];
    let codes = namespace.exec(quiet.iter().chain(&head).chain(&print))?;
    Ok(codes.lines().map(str::to_owned).collect())
}

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
