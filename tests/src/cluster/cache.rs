//! What takes long to build and is kept in `target/cluster`: each thing under a name with the hash of
//! what it was built from, made once, also when several processes want it at the same time.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher as _};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result};

/// `cluster` in cargo's target directory.
///
/// # Errors
/// When the running executable is not in a target directory.
pub(crate) fn directory() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot tell the running executable")?;
    let target = own
        .ancestors()
        .find(|directory| directory.join("CACHEDIR.TAG").exists())
        .with_context(|| format!("{} is not in cargo's target directory", own.display()))?;
    let directory = target.join("cluster");
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    Ok(directory)
}

/// What something is built from.
#[derive(Default)]
pub(crate) struct Inputs(DefaultHasher);

impl Inputs {
    /// Adds words, such as options of a command.
    pub(crate) fn text(mut self, text: &str) -> Self {
        self.0.write(text.as_bytes());
        self.0.write_u8(0);
        self
    }

    /// Adds a file's content, or those of all files below a directory with their names.
    ///
    /// # Errors
    /// When one cannot be read.
    pub(crate) fn path(mut self, path: &Path) -> Result<Self> {
        let cannot = || format!("cannot read {}", path.display());
        if path.is_dir() {
            let mut entries = fs::read_dir(path)
                .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
                .with_context(cannot)?;
            entries.sort_by_key(fs::DirEntry::file_name);
            for entry in entries {
                self = self
                    .text(&entry.file_name().to_string_lossy())
                    .path(&entry.path())?;
            }
        } else {
            let content = fs::read(path).with_context(cannot)?;
            self.0.write_usize(content.len());
            self.0.write(&content);
        }
        Ok(self)
    }
}

/// The path of `name`, a file or a directory, built from `inputs`; `make` writes it where it is told if
/// it is not there yet.
///
/// # Errors
/// Those of `make`; then nothing is kept.
pub(crate) fn cached(
    name: &str,
    inputs: &Inputs,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let directory = directory()?;
    let path = directory.join(format!("{name}-{:016x}", inputs.0.finish()));
    if path.exists() {
        return Ok(path);
    }
    let lock = directory.join(format!("{name}.lock"));
    let lock = File::create(&lock).with_context(|| format!("cannot create {}", lock.display()))?;
    lock.lock().context("cannot lock the cluster's cache")?;
    if path.exists() {
        return Ok(path);
    }
    let part = path.with_extension("part");
    // Of one that was interrupted.
    let _ = fs::remove_dir_all(&part).or_else(|_| fs::remove_file(&part));
    make(&part)?;
    fs::rename(&part, &path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Does one piece of work under a headline, and says how long it took.
///
/// # Errors
/// Those of the work, with the headline as context.
pub(crate) fn stage<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprintln!("==> {what}");
    let started = Instant::now();
    let done = work().with_context(|| format!("could not {what}"))?;
    eprintln!("    done in {:.1} s", started.elapsed().as_secs_f64());
    Ok(done)
}
