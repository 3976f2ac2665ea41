//! Running other programs, stopping them when the user says so, and saying what is being done and how long it took.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid,
};

/// How often the user has asked us to stop.
static INTERRUPTS: AtomicU32 = AtomicU32::new(0);
/// Whether what an interrupt leads to is being done.
static CLEANING_UP: AtomicBool = AtomicBool::new(false);
/// So many interrupts end even that.
const ABORT: u32 = 3;
/// The child that is told about it.
static CHILD: Mutex<Option<(Pid, Interrupt)>> = Mutex::new(None);

/// What a Ctrl-C (or SIGTERM, or SIGHUP) means for a child.
#[derive(Clone, Copy)]
pub enum Interrupt {
    /// It is asked to end.
    Terminate,
    /// It and its process group are killed; somebody cleans up afterwards.
    Kill,
}

/// Lets xtask outlive a Ctrl-C, so that it can clean up. To be called once.
///
/// # Errors
/// When the signal handler cannot be installed.
pub fn handle_interrupts() -> Result<()> {
    ctrlc::set_handler(|| {
        let count = INTERRUPTS.fetch_add(1, Ordering::SeqCst) + 1;
        if CLEANING_UP.load(Ordering::SeqCst) {
            if count >= ABORT {
                eprintln!("aborted: something may be left behind, which the next run removes");
                std::process::exit(130);
            }
            eprintln!("still cleaning up…");
        }
        if let Some(child) = child_slot().as_ref() {
            interrupt(child);
        }
    })
    .context("install the handler of Ctrl-C")
}

/// Whether the user has asked us to stop.
pub fn interrupted() -> bool {
    INTERRUPTS.load(Ordering::SeqCst) > 0
}

/// Runs a command that cleans up to its end, which the terminal's Ctrl-C does not reach; a third
/// interrupt ends xtask.
///
/// # Errors
/// Those of [`output`].
pub fn clean_up(command: &mut Command) -> Result<()> {
    if interrupted() {
        eprintln!("cleaning up…");
    }
    CLEANING_UP.store(true, Ordering::SeqCst);
    let done = output(command.process_group(0)).map(drop);
    CLEANING_UP.store(false, Ordering::SeqCst);
    done
}

fn child_slot() -> MutexGuard<'static, Option<(Pid, Interrupt)>> {
    // A process id and an enum: whole, whoever panicked.
    CHILD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn interrupt(&(pid, how): &(Pid, Interrupt)) {
    // It may have ended by itself.
    let _ = match how {
        Interrupt::Terminate => kill_process(pid, Signal::TERM),
        Interrupt::Kill => kill_process_group(pid, Signal::KILL),
    };
}

/// A child that a Ctrl-C reaches; one at a time.
pub struct Supervised {
    /// The child.
    pub child: Child,
    what: String,
}

impl Supervised {
    /// Starts it, without a stdin.
    ///
    /// # Errors
    /// When it cannot be started, or the user has asked us to stop.
    pub fn start(command: &mut Command, how: Interrupt) -> Result<Self> {
        if interrupted() {
            bail!("interrupted");
        }
        // A group of its own: the terminal's Ctrl-C is for us, who pass it on in our way.
        let child = command
            .stdin(Stdio::null())
            .process_group(0)
            .spawn()
            .with_context(|| format!("start {}", shown(command)))?;
        let entry = (Pid::from_child(&child), how);
        *child_slot() = Some(entry);
        if interrupted() {
            // Between the question above and the entry.
            interrupt(&entry);
        }
        Ok(Self {
            child,
            what: shown(command),
        })
    }

    /// Asks it to end, as a Ctrl-C would.
    pub fn stop(&self) {
        if let Some(child) = child_slot().as_ref() {
            interrupt(child);
        }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When the kernel does not tell of it, or the user has asked us to stop.
    pub fn wait(mut self) -> Result<ExitStatus> {
        let pid = Pid::from_child(&self.child);
        // Not reaped before it leaves the slot: else its id could be another's when the signal comes.
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), ended) {}
        *child_slot() = None;
        let status = self
            .child
            .wait()
            .with_context(|| format!("wait for {}", self.what))?;
        if interrupted() {
            bail!("interrupted");
        }
        Ok(status)
    }
}

/// The repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a folder of the repository")
}

/// Where cargo puts binaries of the profile that xtask itself was built with.
///
/// # Errors
/// When the kernel does not tell where we are.
pub fn target_directory() -> Result<PathBuf> {
    let own = std::env::current_exe().context("find our own executable")?;
    let directory = own.parent().context("our own executable has no folder")?;
    Ok(directory.to_owned())
}

/// A command that runs in the repository.
///
/// Without the library path that `cargo run` set for xtask itself: it would send a toolchain outside rustup to the
/// wrong libraries.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).env_remove("LD_LIBRARY_PATH");
    command
}

/// A command as a person would type it.
fn shown(command: &Command) -> String {
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect();
    format!("`{}`", words.join(" "))
}

/// Runs a command to its end; its output goes to the terminal.
///
/// # Errors
/// When it cannot be started, or ends with anything but success.
pub fn exec(command: &mut Command) -> Result<()> {
    let status = Supervised::start(command, Interrupt::Terminate)?.wait()?;
    if !status.success() {
        bail!("{} ended with {status}", shown(command));
    }
    Ok(())
}

/// Runs a command to its end and returns what it printed.
///
/// # Errors
/// When it cannot be started, or ends with anything but success: then what it said is part of the error.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start {}", shown(command)))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{} ended with {}: {}",
            shown(command),
            output.status,
            said.trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Where a program is, by `PATH` and the folders of administrators' programs.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|directory| directory.join(program))
        .find(|candidate| candidate.is_file())
}

/// Does one piece of work under a headline, and says how long it took.
///
/// # Errors
/// Those of the work, with the headline as context.
pub fn stage<T>(what: &str, why: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprintln!("==> {what} ({why})");
    let started = Instant::now();
    let done = work().with_context(|| format!("could not {what}"))?;
    eprintln!("    done in {}", elapsed(started.elapsed()));
    Ok(done)
}

/// A duration as people say it.
pub fn elapsed(duration: Duration) -> String {
    match duration.as_secs() {
        seconds @ 60.. => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{:.1} s", duration.as_secs_f64()),
    }
}
