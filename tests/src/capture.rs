//! Frames on a wire of the laboratory, by tcpdump.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::process::Signal;

use crate::command::{run, wait_until};
use crate::namespace::Namespace;
use crate::process::Process;

/// A running capture.
#[derive(Debug)]
pub struct Capture {
    tcpdump: Process,
    file: PathBuf,
}

impl Capture {
    /// Captures what matches `filter` (pcap syntax) on `interface`; it runs when this returns.
    ///
    /// # Errors
    /// When tcpdump does not start.
    pub fn start(namespace: &Namespace, interface: &str, filter: &str) -> Result<Self> {
        let file = namespace.file(&format!("{interface}.pcap"));
        // -Z root: Debian's tcpdump would give up the right to write here.
        let mut tcpdump = namespace.spawn(
            "tcpdump",
            [
                "tcpdump".as_ref(),
                "-n".as_ref(),
                // What waits in a ring buffer is lost at the end.
                "--immediate-mode".as_ref(),
                "-U".as_ref(),
                "-Zroot".as_ref(),
                "-i".as_ref(),
                interface.as_ref(),
                "-w".as_ref(),
                file.as_os_str(),
                filter.as_ref(),
            ],
        )?;
        wait_until("tcpdump listens", Duration::from_secs(5), || {
            ensure!(tcpdump.running()?, "tcpdump ended: {}", tcpdump.log()?);
            Ok(tcpdump.log()?.contains("listening on"))
        })?;
        Ok(Self { tcpdump, file })
    }

    /// The file that it is written to, which stays when the capture ends.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Ends the capture; a line for each frame, as tcpdump prints it.
    ///
    /// # Errors
    /// When tcpdump fails.
    pub fn finish(mut self) -> Result<Vec<String>> {
        // What was sent just now may still be in its buffer.
        std::thread::sleep(Duration::from_millis(300));
        self.tcpdump.signal(Signal::INT)?;
        self.tcpdump.wait()?;
        let shown = run(Command::new("tcpdump")
            .args(["-n", "-e", "-r"])
            .arg(&self.file))?;
        Ok(shown.lines().map(str::to_owned).collect())
    }
}
