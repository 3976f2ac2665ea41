//! A guest: its initial file system with what this workspace has built, and what it reports.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::debian::{self, Kernel};
use crate::exec::{Interrupt, Supervised, command, exec, find, output};

/// Programs of this machine that the laboratory runs inside, with the libraries that they are linked to.
const PROGRAMS: &[&str] = &[
    "ip",
    "tc",
    "nsenter",
    "ethtool",
    "nginx",
    "curl",
    "sh",
    "sha256sum",
    "teamnl",
];
/// Those built here: under which name in the guest, and cargo's.
const OWN: &[(&str, &str)] = &[("init", "guest"), ("bin/ironlb", "ironlb")];
/// Mount points and what programs expect.
const DIRECTORIES: &[&str] = &["bin", "dev", "etc", "proc", "run", "sys", "tmp"];
/// So much of a guest's serial log is printed when it fails.
const LOG_LINES: usize = 40;

/// Builds the initial file system that all guests have in common.
///
/// Binaries are the dynamically linked ones of the build at hand: nothing is compiled for the guests, and the libraries
/// that they want are this machine's.
///
/// # Errors
/// When a program is missing.
pub fn initial(directory: &Path, target: &Path) -> Result<PathBuf> {
    let root = directory.join("root");
    debian::remove(&root)?;
    for name in DIRECTORIES {
        let path = root.join(name);
        fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
    }
    // Without it the first process has neither stdout nor stderr.
    let console = root.join("dev/console");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &console,
        rustix::fs::FileType::CharacterDevice,
        mode,
        rustix::fs::makedev(5, 1),
    )
    .with_context(|| format!("make the device {}", console.display()))?;
    for (name, content) in [
        ("passwd", "root:x:0:0:root:/:/bin/sh\n"),
        ("group", "root:x:0:\n"),
    ] {
        let path = root.join("etc").join(name);
        fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
    }
    for (name, binary) in OWN {
        let from = target.join(binary);
        // Symbols are most of them.
        exec(command("strip").arg("-o").arg(root.join(name)).arg(&from))?;
        libraries(&from, &root)?;
    }
    for name in PROGRAMS {
        let from = find(name).with_context(|| format!("no `{name}` in PATH"))?;
        copy(&from, &root.join("bin").join(name))?;
        libraries(&from, &root)?;
    }
    let archive = directory.join("root.cpio");
    debian::pack(&root, &archive)?;
    debian::remove(&root)?;
    Ok(archive)
}

/// Copies the shared libraries of a program to where it looks for them.
fn libraries(program: &Path, root: &Path) -> Result<()> {
    let said = output(command("ldd").arg(program))?;
    for line in said.lines() {
        // "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)", "/lib64/ld-linux-x86-64.so.2 (0x…)", or one of the kernel's.
        ensure!(
            !line.contains("not found"),
            "{} wants a library that is not there: {line}",
            program.display()
        );
        let Some(path) = line.split_whitespace().find(|word| word.starts_with('/')) else {
            continue;
        };
        let to = root.join(path.trim_start_matches('/'));
        if !to.exists() {
            copy(Path::new(path), &to)?;
        }
    }
    Ok(())
}

/// Copies a file with its mode, a link's target, and makes its directory.
fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    }
    fs::copy(from, to).with_context(|| format!("copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// A program that the guest's kernel was asked to take.
pub struct Program {
    /// Its name.
    pub name: String,
    /// What there is to say: verified instructions, or why not.
    pub said: String,
}

/// What came of a guest.
#[derive(Default)]
pub struct Report {
    /// As it was asked for.
    pub version: String,
    /// What the guest's kernel calls itself.
    pub release: String,
    /// Programs, in the object's order.
    pub programs: Vec<Program>,
    /// Steps and what there is to say of each.
    pub steps: Vec<(String, String)>,
    /// What went wrong.
    pub failures: Vec<String>,
    /// What it was doing when its time was over.
    pub unfinished: Option<String>,
    /// How long it lived.
    pub took: Duration,
}

/// Boots a kernel with the guest's program, and follows what it reports.
///
/// # Errors
/// When the user interrupts it or there is no QEMU; what goes wrong inside is in the report.
pub fn run(
    kernel: &Kernel,
    initial: &Path,
    directory: &Path,
    rows: bool,
    limit: Duration,
) -> Result<Report> {
    let archive = directory.join("guest.cpio");
    concatenate(&[initial, &kernel.modules], &archive)?;
    let log = directory.join(format!("{}.log", kernel.version));
    let mut qemu = command("qemu-system-x86_64");
    // Without cmpxchg16b: QEMU 7.2 gets it wrong at times when it emulates several processors, and SLUB panics.
    qemu.args(["-machine", "pc", "-accel", "tcg", "-cpu", "qemu64,-cx16"])
        .args(["-smp", "2", "-m", "1024"])
        .args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
        ])
        .arg("-serial")
        .arg(format!("file:{}", log.display()))
        .args(["-serial", "stdio"])
        .arg("-kernel")
        .arg(&kernel.image)
        .arg("-initrd")
        .arg(&archive);
    // What the kernel does not know itself becomes the first process's environment.
    let mut words =
        "console=ttyS0 panic=-1 quiet loglevel=4 PATH=/bin IRONLB=/bin/ironlb".to_owned();
    if rows {
        words.push_str(" ironlb.devices");
        // Two NICs on one wire.
        for number in 0..2 {
            qemu.arg("-netdev")
                .arg(format!("hubport,id=n{number},hubid=0"))
                .arg("-device")
                .arg(format!(
                    "virtio-net-pci,netdev=n{number},romfile=,mac=52:54:00:00:00:0{number}"
                ));
        }
    }
    qemu.arg("-append").arg(words).stdout(Stdio::piped());

    let started = Instant::now();
    let mut guest = Supervised::start(&mut qemu, Interrupt::Kill)?;
    let stdout = guest.child.stdout.take().context("QEMU has no stdout")?;
    let (sender, lines) = channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    let mut report = Report {
        version: kernel.version.clone(),
        ..Report::default()
    };
    let mut ended = false;
    let mut doing = "booting".to_owned();
    loop {
        match lines.recv_timeout(limit.saturating_sub(started.elapsed())) {
            Ok(line) => match serde_json::from_str(line.trim()) {
                Ok(Value::Object(said)) => ended |= report.take(&Value::Object(said), &mut doing),
                _ => eprintln!("    {line}"),
            },
            Err(RecvTimeoutError::Timeout) => {
                report.unfinished = Some(doing);
                guest.stop();
                break;
            }
            Err(RecvTimeoutError::Disconnected) => {
                if !ended {
                    report
                        .failures
                        .push(format!("the guest ended early, {doing}"));
                }
                break;
            }
        }
    }
    let status = guest.wait()?;
    drop(lines);
    let _ = reader.join();
    report.took = started.elapsed();
    let failed = !report.failures.is_empty() || report.unfinished.is_some();
    if !failed && !status.success() {
        bail!("QEMU ended with {status}");
    }
    if failed {
        eprintln!("    the end of its serial log, {}:", log.display());
        let said = fs::read(&log).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<_> = said.lines().collect();
        for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
            eprintln!("    | {}", line.trim_end());
        }
    }
    // A hundred megabytes that are quickly made again.
    fs::remove_file(&archive).with_context(|| format!("remove {}", archive.display()))?;
    Ok(report)
}

impl Report {
    /// Takes what a guest says into account, and shows it. Whether it was the last.
    fn take(&mut self, said: &Value, doing: &mut String) -> bool {
        let text = |key: &str| said[key].as_str().unwrap_or_default().to_owned();
        let ok = said["ok"] == true;
        if let Some(release) = said["release"].as_str() {
            eprintln!("    {release} has booted");
            self.release = release.to_owned();
            *doing = "loading modules and programs".to_owned();
        } else if let Some(name) = said["begin"].as_str() {
            *doing = format!("at the step `{name}`");
        } else if let Some(name) = said["step"].as_str() {
            let seconds = said["seconds"].as_f64().unwrap_or_default();
            let mark = if ok { "ok" } else { "FAILED" };
            eprintln!("    {mark}: {name}: {} ({seconds:.1} s)", text("said"));
            if !ok {
                self.failures.push(format!("{name}: {}", text("said")));
            }
            self.steps.push((name.to_owned(), text("said")));
        } else if let Some(name) = said["program"].as_str() {
            let short = match (ok, said["lacks"].as_str(), said["instructions"].as_u64()) {
                (true, Some(lacks), _) => lacks.to_owned(),
                (true, None, Some(instructions)) => instructions.to_string(),
                (true, None, None) => "-".to_owned(),
                (false, ..) => "REFUSED".to_owned(),
            };
            if ok {
                eprintln!("    ok: the program {name}: {short}");
            } else {
                eprintln!("    FAILED: the program {name}: {}", text("said"));
                self.failures
                    .push(format!("{name} is refused: {}", text("said")));
            }
            self.programs.push(Program {
                name: name.to_owned(),
                said: short,
            });
        }
        said["end"] == true
    }
}

fn concatenate(parts: &[&Path], to: &Path) -> Result<()> {
    let mut file = File::create(to).with_context(|| format!("create {}", to.display()))?;
    for part in parts {
        let mut from = File::open(part).with_context(|| format!("open {}", part.display()))?;
        io::copy(&mut from, &mut file).with_context(|| format!("copy {}", part.display()))?;
    }
    Ok(())
}
