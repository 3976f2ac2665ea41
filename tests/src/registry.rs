//! Which laboratories and clusters exist on this machine: a directory each below `/run/ironlb-lab`, with
//! the owner's process in it. Removes one by its tag, and all whose owner has died.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, mount};

use crate::command::wait_until;
use crate::namespace::Namespace;

const ROOT: &str = "/run/ironlb-lab";
/// What the owner file says of one that outlives its process.
const KEPT: &str = "kept";
/// File of a tag that lists directories elsewhere that go with it.
const DIRECTORIES: &str = "directories";
/// Where control groups live.
pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";
/// Where BPF pins live.
pub(crate) const BPFFS: &str = "/sys/fs/bpf";

/// What outlives its process and is removed only when somebody says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// A laboratory of namespaces.
    Laboratory,
    /// A Kubernetes cluster.
    Cluster,
}

impl Kept {
    /// Marks the directory of a kept cluster.
    const CLUSTER: &str = "cluster";

    fn of(tag: &str) -> Option<Self> {
        let owner = fs::read_to_string(directory(tag).join("owner")).ok()?;
        let cluster = directory(tag).join(Self::CLUSTER).exists();
        (owner == KEPT).then_some(if cluster {
            Self::Cluster
        } else {
            Self::Laboratory
        })
    }
}

/// Directory of a laboratory's files.
pub(crate) fn directory(tag: &str) -> PathBuf {
    Path::new(ROOT).join(tag)
}

/// Claims a tag that no other laboratory has, and its directory.
pub(crate) fn register() -> Result<String> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let pid = std::process::id();
    let tag = format!("{pid}-{}", COUNT.fetch_add(1, Ordering::Relaxed));
    let directory = directory(&tag);
    // A dead process may have had our id: its laboratory goes before ours comes.
    down(&tag)?;
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    let started = start_time(pid).context("cannot read our own /proc/<pid>/stat")?;
    write_owner(&tag, &format!("{pid} {started}"))?;
    Ok(tag)
}

/// Marks it as one that outlives its process: only [`down`] removes it.
pub(crate) fn keep(tag: &str, kept: Kept) -> Result<()> {
    if matches!(kept, Kept::Cluster) {
        let mark = directory(tag).join(Kept::CLUSTER);
        fs::write(&mark, "").with_context(|| format!("cannot write {}", mark.display()))?;
    }
    write_owner(tag, KEPT)
}

/// Notes a directory elsewhere, for [`down`] to remove with the rest; control groups count as such.
pub(crate) fn note(tag: &str, elsewhere: &Path) -> Result<()> {
    use std::io::Write as _;
    let list = directory(tag).join(DIRECTORIES);
    fs::File::options()
        .create(true)
        .append(true)
        .open(&list)
        .and_then(|mut file| writeln!(file, "{}", elsewhere.display()))
        .with_context(|| format!("cannot note {} in {}", elsewhere.display(), list.display()))
}

fn write_owner(tag: &str, text: &str) -> Result<()> {
    let path = directory(tag).join("owner");
    // Whole or not at all: a sweeper may read it now.
    let fresh = path.with_extension("new");
    fs::write(&fresh, text)
        .and_then(|()| fs::rename(&fresh, &path))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn tags() -> Result<Vec<String>> {
    let entries = match fs::read_dir(ROOT) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("cannot list {ROOT}"))?,
    };
    let mut tags = Vec::new();
    for entry in entries {
        tags.extend(entry?.file_name().into_string());
    }
    tags.sort();
    Ok(tags)
}

/// Tags of those that were kept.
///
/// # Errors
/// When the registry cannot be read.
pub fn kept(kind: Kept) -> Result<Vec<String>> {
    let mut tags = tags()?;
    tags.retain(|tag| Kept::of(tag) == Some(kind));
    Ok(tags)
}

/// Removes all laboratories whose owner has died without doing so.
///
/// # Errors
/// When one cannot be removed.
pub fn sweep() -> Result<()> {
    for tag in tags()? {
        let owner = fs::read_to_string(directory(&tag).join("owner"));
        let alive = match owner.as_deref() {
            Ok(KEPT) => true,
            Ok(owner) => owner.split_once(' ').is_some_and(|(pid, started)| {
                pid.parse().ok().and_then(start_time).as_deref() == Some(started)
            }),
            // Just being registered, or crashed within that: the tag begins with the owner's pid.
            Err(_) => tag
                .split_once('-')
                .and_then(|(pid, _)| pid.parse().ok())
                .is_some_and(|pid| start_time(pid).is_some()),
        };
        if !alive {
            down(&tag)
                .with_context(|| format!("cannot remove the leftovers of laboratory {tag}"))?;
        }
    }
    Ok(())
}

/// When a process started, in the kernel's own words: a pid may be used again, the pair is not.
fn start_time(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Field 22; the second is the command in parentheses and may hold spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19).map(str::to_owned)
}

/// Removes a laboratory: what runs in it, its namespaces, pins and files. Works from any process
/// and any thread, and when parts are missing.
///
/// # Errors
/// When something stays.
pub fn down(tag: &str) -> Result<()> {
    // Two may remove one laboratory at the same time: the second waits and finds nothing.
    let path = directory(tag);
    let lock = match fs::File::open(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        opened => Some(opened.with_context(|| format!("cannot open {}", path.display()))?),
    };
    if let Some(lock) = &lock {
        lock.lock()
            .with_context(|| format!("cannot lock {}", path.display()))?;
    }
    let prefix = format!("ironlb-{tag}-");
    // Agents first: they would see their links go.
    for name in names_in("/run/netns", &prefix)? {
        Namespace::remove(&name)?;
    }
    for name in names_in(BPFFS, &prefix)? {
        remove_directory(&Path::new(BPFFS).join(name))?;
    }
    // Without a list there is nothing elsewhere.
    let elsewhere = fs::read_to_string(path.join(DIRECTORIES)).unwrap_or_default();
    for directory in elsewhere.lines().map(Path::new) {
        if directory.starts_with(CGROUPS) {
            remove_cgroup(directory)?;
        } else {
            remove_directory(directory)?;
        }
    }
    remove_directory(&path)
}

fn names_in(directory: &str, prefix: &str) -> Result<Vec<String>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("cannot list {directory}"))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(
            entry?
                .file_name()
                .into_string()
                .ok()
                .filter(|name| name.starts_with(prefix)),
        );
    }
    Ok(names)
}

/// Removes a control group and those in it, as soon as their processes are gone.
fn remove_cgroup(group: &Path) -> Result<()> {
    /// Its files are the kernel's: only the directories can go, from the leaves up.
    fn leaves_first(group: &Path) -> std::io::Result<()> {
        for entry in fs::read_dir(group)?.flatten() {
            if entry.file_type()?.is_dir() {
                leaves_first(&entry.path())?;
            }
        }
        fs::remove_dir(group)
    }
    let mut last = None;
    wait_until("its processes are gone", Duration::from_secs(20), || {
        last = leaves_first(group).err();
        Ok(!group.exists())
    })
    .with_context(|| format!("cannot remove {}: {last:?}", group.display()))
}

fn remove_directory(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Mounts the BPF file system where the machine has not done so.
pub(crate) fn ensure_bpffs() -> Result<()> {
    const BPF_FS_MAGIC: u32 = 0xcafe_4a11;
    let mounted =
        || rustix::fs::statfs(BPFFS).is_ok_and(|found| found.f_type as u32 == BPF_FS_MAGIC);
    if mounted() {
        return Ok(());
    }
    // Two test processes must not stack two mounts: the lock is held until this returns.
    let lock = fs::File::create("/run/ironlb-lab.lock").context("cannot create the mount lock")?;
    lock.lock().context("cannot take the mount lock")?;
    if mounted() {
        return Ok(());
    }
    mount("bpf", BPFFS, "bpf", MountFlags::empty(), None)
        .with_context(|| format!("cannot mount the BPF file system at {BPFFS}"))
}
