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

/// How curl tells which instance answered; empty when none did.
const TELL_INSTANCE: &str = "%{stderr}served by %header{x-instance}\n";
const INSTANCE: &str = "served by ";

/// What came of a download.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// All of it arrived, and it is right.
    Whole,
    /// A RST refused the connection.
    Refused,
    /// A RST ended it.
    Reset,
    /// Nothing came any more.
    Hung,
    /// Something else: an HTTP error, or other bytes.
    Wrong,
}

impl Outcome {
    /// From what curl and sha256sum said; the codes are curl's, in parentheses.
    fn read(said: &str, sha256: &str) -> Self {
        let failed = |code: &str| said.contains(&format!("curl: ({code})"));
        if failed("7") {
            Self::Refused
        } else if ["52", "55", "56"].into_iter().any(failed) {
            Self::Reset
        } else if failed("28") {
            Self::Hung
        } else if !said.contains("curl:") && said.lines().any(|line| line.starts_with(sha256)) {
            Self::Whole
        } else {
            Self::Wrong
        }
    }
}

/// The end of a download.
#[derive(Clone, Debug)]
pub struct End {
    /// What came of it.
    pub outcome: Outcome,
    /// Who served it, as far as the answer came.
    pub instance: String,
    /// What curl said.
    pub said: String,
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
        // Nothing for so many seconds is a flow that hangs, long before the limit.
        let stall = ["--speed-limit", "1", "--speed-time", "20"];
        let tell = ["--write-out", TELL_INSTANCE];
        let limit = limit.as_secs().to_string();
        let words = ["sh", "-c", script, "curl", "--max-time", &limit, url];
        Ok(Self {
            curl: namespace.spawn(
                "download",
                words.iter().chain(&stall).chain(&tell).chain(options),
            )?,
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

    /// It must not have ended yet.
    ///
    /// # Errors
    /// When it has; the message holds what curl said.
    pub fn goes_on(&mut self) -> Result<()> {
        let running = self.running()?;
        let said = self.curl.log()?;
        ensure!(running, "the download of {} has ended: {said}", self.url);
        Ok(())
    }

    /// Waits for its end; it must have brought exactly what has the checksum `sha256`.
    ///
    /// # Errors
    /// When it has not; the message holds what curl said.
    pub fn finish(mut self, sha256: &str) -> Result<()> {
        let end = self.end(sha256)?;
        ensure!(
            end.outcome == Outcome::Whole,
            "download of {} from {} is {:?}, {sha256} expected: {}",
            self.url,
            end.instance,
            end.outcome,
            end.said
        );
        Ok(())
    }

    /// Waits for its end, whatever it brought.
    ///
    /// # Errors
    /// When it does not end.
    pub fn end(&mut self, sha256: &str) -> Result<End> {
        wait_until(
            &format!("the download of {} ends", self.url),
            Duration::from_secs(120),
            || Ok(!self.curl.running()?),
        )?;
        let said = self.curl.log()?;
        let instance = said
            .lines()
            .find_map(|line| line.strip_prefix(INSTANCE))
            .unwrap_or_default();
        Ok(End {
            outcome: Outcome::read(&said, sha256),
            instance: instance.to_owned(),
            said,
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_is_told_from_what_curl_said() {
        let sum = "ab12";
        let whole = "served by ironic-0\nab12  -\n";
        let reset =
            "curl: (56) Recv failure: Connection reset by peer\nserved by ironic-0\ncd34  -\n";
        let refused = "curl: (7) Failed to connect to 172.22.0.2\nserved by \ncd34  -\n";
        let hung = "curl: (28) Operation too slow\nserved by ironic-0\nab12  -\n";
        let missing = "curl: (22) The requested URL returned error: 404\nserved by \ncd34  -\n";
        let other = "served by ironic-0\ncd34  -\n";
        let read = [whole, reset, refused, hung, missing, other].map(|s| Outcome::read(s, sum));
        use Outcome::{Hung, Refused, Reset, Whole, Wrong};
        assert_eq!(read, [Whole, Reset, Refused, Hung, Wrong, Wrong]);
    }
}
