//! The pin root on the bpffs: its directories, its lock, and its end.
//!
//! `<root>/v1/<map>` and `<root>/v1/links/<hook>-<ifindex>`; the version is that of the map layout. The
//! lock is an flock on the root directory itself, so it ends with the process however that ends.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lb_common::{LAYOUT_VERSION, from_name, map};

use super::{DataplaneError, Hook, UnloadReport, attach, maps};

/// `BPF_FS_MAGIC` of `linux/magic.h`.
const BPF_FS_MAGIC: u32 = 0xcafe_4a11;

/// The pin root, locked.
#[derive(Debug)]
pub(super) struct Pins {
    root: PathBuf,
    /// Holds the lock.
    _lock: File,
}

impl Pins {
    /// Makes the directories and takes the lock.
    pub(super) fn open(root: &Path) -> Result<Self, DataplaneError> {
        check_bpffs(root)?;
        let pins = Self {
            root: root.to_owned(),
            _lock: lock(root)?,
        };
        make_dir(&pins.dir())?;
        make_dir(&pins.dir().join("links"))?;
        Ok(pins)
    }

    /// Where the maps of this layout are.
    pub(super) fn dir(&self) -> PathBuf {
        layout_dir(&self.root)
    }

    /// Where the link of a hook is.
    pub(super) fn link(&self, hook: Hook, ifindex: u32) -> PathBuf {
        let name = format!("{}-{ifindex}", hook.name());
        self.dir().join("links").join(name)
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

/// Where the maps of this layout are below a root.
pub(super) fn layout_dir(root: &Path) -> PathBuf {
    root.join(format!("v{LAYOUT_VERSION}"))
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
pub(super) fn owner(root: &Path) -> Option<Option<u32>> {
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

fn check_bpffs(root: &Path) -> Result<(), DataplaneError> {
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

fn lock(root: &Path) -> Result<File, DataplaneError> {
    make_dir(root)?;
    let directory = File::open(root).map_err(|error| DataplaneError::pins("open", root, error))?;
    match directory.try_lock() {
        Ok(()) => {
            // Somebody's `unload` may have removed the directory between the two calls.
            let inode = |meta: io::Result<fs::Metadata>| meta.ok().map(|meta| meta.st_ino());
            if inode(directory.metadata()) == inode(fs::metadata(root)) {
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

/// Removes everything of ours below the root, the root included. Takes the lock unless `held` has it.
pub(super) fn remove_all(root: &Path, held: Option<Pins>) -> Result<UnloadReport, DataplaneError> {
    let mut report = UnloadReport::default();
    if !root.exists() {
        return Ok(report);
    }
    check_bpffs(root)?;
    let _lock = match held {
        Some(Pins { _lock: lock, .. }) => lock,
        None => lock(root)?,
    };
    let remove = |path: &Path| {
        fs::remove_file(path).map_err(|error| DataplaneError::pins("remove", path, error))
    };
    let remove_dir = |path: &Path| match fs::remove_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(|error| DataplaneError::pins("remove", path, error)),
    };
    let is_layout = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        let version = name.and_then(|name| name.strip_prefix('v'));
        version.is_some_and(|version| version.parse::<u32>().is_ok())
    };
    let uplinks = maps::uplinks(root);
    attach::remove_filters(&uplinks);
    let name_of = |ifindex: u32| {
        let uplink = uplinks.iter().find(|uplink| uplink.ifindex == ifindex);
        uplink.map_or_else(String::new, |uplink| {
            format!(" ({})", from_name(&uplink.name))
        })
    };
    for dir in entries(root)?.into_iter().filter(is_layout) {
        for (hook, ifindex) in links(&dir)? {
            let interface = name_of(ifindex);
            report
                .links
                .push(format!("{}-{ifindex}{interface}", hook.name()));
        }
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
        for pin in entries(&dir)? {
            let name = pin.file_name().unwrap_or_default().to_string_lossy();
            let is_ours = map::ALL.contains(&&*name);
            report.maps.extend(is_ours.then(|| name.into_owned()));
            remove(&pin)?;
        }
        remove_dir(&dir)?;
    }
    report.maps.sort_unstable();
    // The root may be a mount point or hold somebody else's pins; then it stays.
    let _ = fs::remove_dir(root);
    Ok(report)
}
