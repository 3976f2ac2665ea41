//! The pin root on the bpffs: its directories, its lock, and its end.
//!
//! `<root>/v<LAYOUT>/<map>` and `<root>/v<LAYOUT>/links/<hook>-<ifindex>`; LAYOUT is the version of the map layout. The
//! lock is an flock on the root directory itself, so it ends with the process however that ends.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use aya::programs::links::{FdLink, PinnedLink};
use lb_common::{LAYOUT_VERSION, from_name, map};

use tracing::debug;

use super::{DataplaneError, Hook, UnloadReport, attach, endings, maps};

/// `BPF_FS_MAGIC` of `linux/magic.h`.
const BPF_FS_MAGIC: u32 = 0xcafe_4a11;

/// The pin root, locked.
#[derive(Debug)]
pub(super) struct Pins {
    root: PathBuf,
    /// Holds the lock.
    lock: File,
}

impl Pins {
    /// Makes the directories and takes the lock.
    pub(super) fn open(root: &Path) -> Result<Self, DataplaneError> {
        check_bpffs(root)?;
        let pins = Self {
            root: root.to_owned(),
            lock: lock(root)?,
        };
        pins.make_dirs()?;
        Ok(pins)
    }

    fn make_dirs(&self) -> Result<(), DataplaneError> {
        make_dir(&self.dir())?;
        make_dir(&self.dir().join("links"))
    }

    /// Whether everything is still pinned that was when the data plane was opened; links are looked at elsewhere.
    pub(super) fn are_whole(&self) -> bool {
        let dir = self.dir();
        self.is_locked() && map::ALL.iter().all(|name| dir.join(name).exists())
    }

    /// Makes the directories again, and takes the lock again where the root is another one than before.
    pub(super) fn renew(&mut self) -> Result<(), DataplaneError> {
        check_bpffs(&self.root)?;
        if !self.is_locked() {
            self.lock = lock(&self.root)?;
        }
        self.make_dirs()
    }

    /// The root below which a program's link of an interface is pinned, on the same bpffs and near its mount.
    pub(super) fn other_root(&self, hook: Hook, ifindex: u32, program: u32) -> Option<PathBuf> {
        const DEPTH: usize = 3;
        let device = fs::metadata(&self.root).ok()?.st_dev();
        let is_here = |path: &Path| fs::metadata(path).is_ok_and(|meta| meta.st_dev() == device);
        let mount = self
            .root
            .ancestors()
            .take_while(|path| is_here(path))
            .last()?;
        let mut roots = vec![mount.to_owned()];
        for _ in 0..DEPTH {
            for root in &roots {
                // Of any layout: the programs may be an older version's.
                let layouts = entries(root).unwrap_or_default().into_iter();
                let holds = |layout: PathBuf| {
                    let path = layout.join("links").join(link_name(hook, ifindex));
                    let info = PinnedLink::from_pin(path).map(|pin| FdLink::from(pin).info());
                    matches!(info, Ok(Ok(info)) if info.program_id() == program)
                };
                if layouts.filter(|path| is_layout(path)).any(holds) {
                    return Some(root.clone());
                }
            }
            let inner = roots.iter().filter_map(|root| entries(root).ok()).flatten();
            roots = inner.filter(|path| path.is_dir()).collect();
        }
        None
    }

    fn is_locked(&self) -> bool {
        is_at(&self.lock, &self.root)
    }

    /// Where the maps of this layout are.
    pub(super) fn dir(&self) -> PathBuf {
        layout_dir(&self.root)
    }

    /// Where the link of a hook is.
    pub(super) fn link(&self, hook: Hook, ifindex: u32) -> PathBuf {
        self.dir().join("links").join(link_name(hook, ifindex))
    }

    /// Hook and interface index of every pinned link.
    pub(super) fn links(&self) -> Result<Vec<(Hook, u32)>, DataplaneError> {
        links(&self.dir())
    }

    /// Removes a link's pin, and with it the link, if it is there.
    pub(super) fn remove_link(&self, hook: Hook, ifindex: u32) -> Result<(), DataplaneError> {
        let path = self.link(hook, ifindex);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(DataplaneError::pins("remove", &path, error))
            }
            _ => Ok(()),
        }
    }
}

fn is_layout(path: &Path) -> bool {
    layout(path).is_some()
}

/// The version of the map layout that a directory is of.
fn layout(path: &Path) -> Option<u32> {
    path.file_name()?.to_str()?.strip_prefix('v')?.parse().ok()
}

/// Versions of the map layouts that something is pinned of below a root, in order.
pub(crate) fn layouts(root: &Path) -> Result<Vec<u32>, DataplaneError> {
    let all = entries(root)?;
    let mut layouts: Vec<_> = all.iter().filter_map(|path| layout(path)).collect();
    layouts.sort_unstable();
    Ok(layouts)
}

/// A map of this layout must have a pin, or nothing is loaded. Where that cannot be told, it is no answer.
pub(super) fn expect(root: &Path, map: &str) -> Result<(), DataplaneError> {
    let path = layout_dir(root).join(map);
    match path.try_exists() {
        Ok(true) => Ok(()),
        Ok(false) => Err(DataplaneError::NotLoaded { path: root.into() }),
        Err(error) => Err(DataplaneError::pins("look at", &path, error)),
    }
}

/// Maps of this layout that have no pin.
pub(crate) fn missing(root: &Path) -> Vec<&'static str> {
    let dir = layout_dir(root);
    let all = map::ALL.into_iter();
    all.filter(|name| !dir.join(name).exists()).collect()
}

pub(super) fn link_name(hook: Hook, ifindex: u32) -> String {
    format!("{}-{ifindex}", hook.name())
}

/// Where the maps of this layout are below a root.
pub(super) fn layout_dir(root: &Path) -> PathBuf {
    dir_of(root, LAYOUT_VERSION)
}

/// Where the maps of a layout are below a root.
pub(super) fn dir_of(root: &Path, layout: u32) -> PathBuf {
    root.join(format!("v{layout}"))
}

/// The pinned links below a layout directory.
pub(super) fn links(dir: &Path) -> Result<Vec<(Hook, u32)>, DataplaneError> {
    let names = entries(&dir.join("links"))?;
    let parse = |path: &PathBuf| {
        let (hook, ifindex) = path.file_name()?.to_str()?.split_once('-')?;
        Some((Hook::from_name(hook)?, ifindex.parse().ok()?))
    };
    let mut links: Vec<_> = names.iter().filter_map(parse).collect();
    links.sort_unstable();
    Ok(links)
}

/// Process id of who has the lock, if somebody has it: `Some(None)` when it cannot be seen from here.
pub(crate) fn owner(root: &Path) -> Option<Option<u32>> {
    let inode = fs::metadata(root).ok()?;
    let device = inode.st_dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let place = format!("{major:02x}:{minor:02x}:{}", inode.st_ino());
    // 1: FLOCK  ADVISORY  WRITE 4242 00:1d:2 0 EOF; a waiting process has "->" behind the number.
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let line = locks.lines().find(|line| {
        let mut words = line.split_whitespace().skip(1);
        words.next() == Some("FLOCK") && words.any(|word| word == place)
    })?;
    let pid = line.split_whitespace().nth(4)?.parse().ok();
    Some(pid.filter(|pid| *pid != 0))
}

/// Whether a root is, or would be, on a bpffs.
pub(crate) fn check_bpffs(root: &Path) -> Result<(), DataplaneError> {
    let existing = root.ancestors().find(|path| path.exists());
    let path = existing.unwrap_or(Path::new("/"));
    let kind = rustix::fs::statfs(path)
        .map_err(|error| DataplaneError::pins("look at", path, error.into()))?;
    // The field's width differs between architectures; the magic fits 32 bits.
    if kind.f_type as u32 == BPF_FS_MAGIC {
        Ok(())
    } else {
        let path = path.to_owned();
        Err(DataplaneError::NotBpffs { path })
    }
}

fn make_dir(path: &Path) -> Result<(), DataplaneError> {
    fs::create_dir_all(path).map_err(|error| DataplaneError::pins("create", path, error))
}

/// Whether a path still leads to an open file.
fn is_at(file: &File, path: &Path) -> bool {
    let place = |meta: io::Result<fs::Metadata>| meta.ok().map(|m| (m.st_dev(), m.st_ino()));
    place(file.metadata()) == place(fs::metadata(path))
}

/// A bpffs lets anybody make directories, and anybody who can open one can hold its lock: the root must be
/// ours, and nobody else's business.
fn make_root(root: &Path) -> Result<(), DataplaneError> {
    let failed = |error| DataplaneError::pins("look at", root, error);
    if !root.exists() {
        if let Some(parent) = root.parent() {
            make_dir(parent)?;
        }
        match fs::DirBuilder::new().mode(0o700).create(root) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(DataplaneError::pins("create", root, error));
            }
            _ => {}
        }
    }
    let found = fs::symlink_metadata(root).map_err(failed)?;
    let user = rustix::process::geteuid().as_raw();
    if !found.is_dir() || found.st_uid() != user {
        return Err(DataplaneError::RootOfOthers {
            path: root.to_owned(),
            owner: found.st_uid(),
        });
    }
    // The mount itself may be shared with others.
    let above = root.parent().map(fs::metadata);
    let is_mount = above.is_none_or(|above| above.is_ok_and(|a| a.st_dev() != found.st_dev()));
    if found.st_mode() & 0o077 != 0 && !is_mount {
        fs::set_permissions(root, fs::Permissions::from_mode(0o700))
            .map_err(|error| DataplaneError::pins("close to others", root, error))?;
    }
    Ok(())
}

fn lock(root: &Path) -> Result<File, DataplaneError> {
    make_root(root)?;
    let directory = File::open(root).map_err(|error| DataplaneError::pins("open", root, error))?;
    match directory.try_lock() {
        Ok(()) => {
            // Somebody's `unload` may have removed the directory between the two calls.
            if is_at(&directory, root) {
                Ok(directory)
            } else {
                lock(root)
            }
        }
        Err(TryLockError::WouldBlock) => Err(DataplaneError::Locked {
            path: root.to_owned(),
            // From another PID namespace the lock's owner has no number here; what it wrote of itself is
            // better than nothing.
            pid: owner(root).flatten().or_else(|| maps::agent_pid(root)),
        }),
        Err(TryLockError::Error(error)) => Err(DataplaneError::pins("lock", root, error)),
    }
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>, DataplaneError> {
    let failed = |error| DataplaneError::pins("list", dir, error);
    let read = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(failed)?,
    };
    read.map(|entry| Ok(entry.map_err(failed)?.path()))
        .collect()
}

/// Removes a layout's links and maps; tells of the maps.
pub(super) fn remove_layout(
    dir: &Path,
    removed: &mut dyn FnMut(&str),
) -> Result<(), DataplaneError> {
    let remove = |path: &Path| {
        fs::remove_file(path).map_err(|error| DataplaneError::pins("remove", path, error))
    };
    let remove_dir = |path: &Path| match fs::remove_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(|error| DataplaneError::pins("remove", path, error)),
    };
    // Forward paths end before reply paths, so that no new flow starts whose replies nobody rewrites.
    let mut pins = entries(&dir.join("links"))?;
    pins.sort_by_key(|path| {
        path.file_name()
            .is_some_and(|n| n.as_encoded_bytes().starts_with(b"egress"))
    });
    for pin in pins {
        remove(&pin)?;
    }
    remove_dir(&dir.join("links"))?;
    for pin in entries(dir)? {
        let name = pin.file_name().unwrap_or_default().to_string_lossy();
        if map::ALL.contains(&&*name) {
            removed(&name);
        }
        remove(&pin)?;
    }
    remove_dir(dir)
}

/// Removes everything of ours below the root, the root included. Takes the lock unless `held` has it.
pub(super) fn remove_all(root: &Path, held: Option<Pins>) -> Result<UnloadReport, DataplaneError> {
    let mut report = UnloadReport::default();
    if !root.exists() {
        return Ok(report);
    }
    check_bpffs(root)?;
    let _lock = match held {
        Some(Pins { lock, .. }) => lock,
        None => lock(root)?,
    };
    // Whoever downloads learns that it is over. It is no reason to leave anything loaded if that fails.
    if let Err(error) = endings::end_all(root) {
        debug!(%error, "cannot tell clients that their flows end");
    }
    let uplinks = maps::uplinks(root);
    attach::remove_filters(&uplinks);
    let name_of = |ifindex: u32| {
        let uplink = uplinks.iter().find(|uplink| uplink.ifindex == ifindex);
        uplink.map_or_else(String::new, |uplink| {
            format!(" ({})", from_name(&uplink.name))
        })
    };
    for dir in entries(root)?.into_iter().filter(|path| is_layout(path)) {
        for (hook, ifindex) in links(&dir)? {
            let interface = name_of(ifindex);
            report
                .links
                .push(format!("{}-{ifindex}{interface}", hook.name()));
        }
        remove_layout(&dir, &mut |map| report.maps.push(map.to_owned()))?;
    }
    report.maps.sort_unstable();
    // The root may be a mount point or hold somebody else's pins; then it stays.
    let _ = fs::remove_dir(root);
    Ok(report)
}
