//! What runs inside the guests of `cargo xtask kernels`, as their first process: loads modules, asks the kernel to
//! take every program, builds a laboratory with a real agent in each mode, and reports on the second serial port,
//! a JSON object a line. A step that fails does not keep the others from running.

mod devices;
mod limits;
mod paths;
mod programs;

use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use aya::util::KernelVersion;
use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, reboot};
use serde_json::{Value, json};

/// Where reports go: the first serial port is the kernel's.
const REPORT: &str = "/dev/ttyS1";
/// Word of the kernel's command line that asks for the rows of devices, too.
const DEVICES: &str = "ironlb.devices";
/// Kernel modules, in the order in which they are to be loaded.
const MODULES: &str = "/modules";

/// Tells the host what came of things.
struct Reporter {
    port: File,
}

impl Reporter {
    fn say(&mut self, value: &Value) {
        // A host that does not listen any more cannot be told that either.
        let _ = writeln!(self.port, "{value}").and_then(|()| self.port.flush());
    }

    /// Does one step and reports what came of it; the work returns what there is to say.
    fn step(&mut self, name: &str, work: impl FnOnce() -> Result<String>) {
        self.say(&json!({"begin": name}));
        let started = Instant::now();
        let done = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            bail!("it panicked: {}", text.unwrap_or("see the serial log"))
        });
        let (ok, said) = match done {
            Ok(said) => (true, said),
            Err(error) => (false, format!("{error:#}")),
        };
        let seconds = started.elapsed().as_secs_f64();
        self.say(&json!({"step": name, "ok": ok, "said": said, "seconds": seconds}));
    }
}

fn main() -> Result<()> {
    if std::process::id() != 1 {
        bail!("this is the first process of a guest: run `cargo xtask kernels`");
    }
    let run = prepare().and_then(|()| {
        let mut reporter = Reporter {
            port: File::options()
                .write(true)
                .open(REPORT)
                .with_context(|| format!("open {REPORT}"))?,
        };
        run(&mut reporter)
    });
    if let Err(error) = run {
        eprintln!("guest: {error:#}");
    }
    rustix::fs::sync();
    // The end of the first process would be a panic of the kernel.
    reboot(RebootCommand::PowerOff).context("power off")
}

/// File systems and an environment as programs expect them.
fn prepare() -> Result<()> {
    let none = MountFlags::empty();
    for (kind, target) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/run"),
        ("tmpfs", "/tmp"),
        ("bpf", "/sys/fs/bpf"),
    ] {
        mount(kind, target, kind, none, None)
            .with_context(|| format!("mount {kind} at {target}"))?;
    }
    Ok(())
}

fn run(reporter: &mut Reporter) -> Result<()> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").context("read the release")?;
    reporter.say(&json!({"release": release.trim()}));
    let kernel = KernelVersion::current().context("the kernel's version")?;
    reporter.step("kernel modules", load_modules);
    for program in programs::load_all(kernel) {
        reporter.say(&program);
    }
    for mode in ["native", "tc"] {
        reporter.step(&format!("{mode} on veth"), || paths::serve(kernel, mode));
    }
    reporter.step("a limit of locked memory is lifted or told", || {
        limits::memlock(kernel)
    });
    let words = fs::read_to_string("/proc/cmdline").context("read /proc/cmdline")?;
    if words.split_whitespace().any(|word| word == DEVICES) {
        devices::rows(kernel, reporter);
    }
    reporter.say(&json!({"end": true}));
    Ok(())
}

fn load_modules() -> Result<String> {
    let mut names: Vec<_> = fs::read_dir(MODULES)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
        .with_context(|| format!("list {MODULES}"))?;
    names.sort();
    ensure!(!names.is_empty(), "{MODULES} is empty");
    for path in &names {
        load_module(path).with_context(|| format!("load {}", path.display()))?;
    }
    Ok(format!("{} loaded", names.len()))
}

fn load_module(path: &Path) -> Result<()> {
    let file = File::open(path)?;
    rustix::system::finit_module(file.as_fd(), c"", 0)?;
    Ok(())
}
