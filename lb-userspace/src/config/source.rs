//! A file that is followed: what it says now, and a sign when it may say something else.
//!
//! The folder is watched, not the file: editors and `kubectl` replace files by renaming, and a mounted
//! ConfigMap changes by swapping a symbolic link beside the file. Whoever uses this also asks from time
//! to time, for what no watch of one folder can see (a link to another folder, a network file system).

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::watch;
use tracing::warn;

use super::{ConfigError, read};

/// Quiet time after a sign of change: a writer that does not rename needs a moment.
const SETTLE: Duration = Duration::from_millis(100);

/// A file that may change, and what is read in it.
pub struct FileSource<T> {
    path: PathBuf,
    parse: Parse<T>,
    /// What it said the last time.
    last: Option<Seen>,
    /// Signs of change, where they are to be had.
    watch: Option<Watch>,
    history: History,
}

/// How a file fared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// How often it said something new that was good.
    pub good: u64,
    /// How often it could not be read, or said what cannot be served.
    pub bad: u64,
    /// What is wrong with it as it is now.
    pub problem: Option<String>,
}

/// What a file's text means; the path is for the messages.
type Parse<T> = fn(&Path, &str) -> Result<T, ConfigError>;

#[derive(PartialEq)]
enum Seen {
    Text(String),
    Unreadable(io::ErrorKind),
}

impl<T> FileSource<T> {
    /// Reads a file for the first time, when it must be good, and watches it from before that.
    pub fn open(path: PathBuf, parse: Parse<T>) -> Result<(Self, T), ConfigError> {
        let watch = Watch::new(&path)
            .inspect_err(|error| {
                let path = path.display();
                warn!(
                    "cannot watch {path}, so changes are seen when it is looked at only: {error}"
                );
            })
            .ok();
        let text = read(&path)?;
        let said = parse(&path, &text)?;
        let source = Self {
            path,
            parse,
            last: Some(Seen::Text(text)),
            watch,
            history: History {
                good: 1,
                ..History::default()
            },
        };
        Ok((source, said))
    }

    /// Waits for a sign that the file may say something else. Safe to cancel.
    pub async fn changed(&mut self) {
        match &mut self.watch {
            Some(watch) => watch.changed().await,
            None => std::future::pending().await,
        }
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the file says, `None` if that is what it said the last time: the same news, good or bad,
    /// is told once.
    pub fn news(&mut self) -> Result<Option<T>, ConfigError> {
        let text = read(&self.path);
        let seen = match &text {
            Ok(text) => Seen::Text(text.clone()),
            Err(ConfigError::Read { error, .. }) => Seen::Unreadable(error.kind()),
            Err(ConfigError::Invalid { .. }) => unreachable!("reading does not judge"),
        };
        if self.last.as_ref() == Some(&seen) {
            return Ok(None);
        }
        self.last = Some(seen);
        let said = text.and_then(|text| (self.parse)(&self.path, &text));
        match &said {
            Ok(_) => self.history.good += 1,
            Err(_) => self.history.bad += 1,
        }
        self.history.problem = said.as_ref().err().map(ToString::to_string);
        said.map(Some)
    }

    /// How it fared so far.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Makes the next [`Self::news`] tell whatever the file says then.
    pub fn forget(&mut self) {
        self.last = None;
    }
}

/// Signs of change in a file's folder.
struct Watch {
    _watcher: RecommendedWatcher,
    signs: watch::Receiver<u64>,
}

impl Watch {
    /// Watches the folder of a file.
    fn new(file: &Path) -> notify::Result<Self> {
        let folder = match file.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let (sender, signs) = watch::channel(0);
        let mut watcher =
            notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
                // Our own reading is an event too; a watch that lost events is a reason to look.
                if event.map_or(true, |event| !matches!(event.kind, EventKind::Access(_))) {
                    sender.send_modify(|count| *count += 1);
                }
            })?;
        watcher.watch(folder, RecursiveMode::NonRecursive)?;
        Ok(Self {
            _watcher: watcher,
            signs,
        })
    }

    /// Waits until something changed and then was quiet for a moment. Safe to cancel.
    async fn changed(&mut self) {
        // Unseen until all is quiet, so that a cancelled wait loses no sign.
        while matches!(self.signs.has_changed(), Ok(false)) {
            if self.signs.clone().changed().await.is_err() {
                // The watcher is gone: there will be no further sign.
                return std::future::pending().await;
            }
        }
        loop {
            let before = *self.signs.borrow();
            tokio::time::sleep(SETTLE).await;
            if *self.signs.borrow_and_update() == before {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::super::parse;
    use super::*;
    use crate::desired::DesiredState;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn file(vip: &str) -> String {
        format!(
            "apiVersion: ironlb.dev/v1\nuplinks: [{{subnet: 172.22.0.0/24}}]\nvips: [{{address: {vip}}}]\n"
        )
    }

    fn vip(state: Option<DesiredState>) -> Option<String> {
        state.map(|state| state.vips[0].address.to_string())
    }

    async fn sign(source: &mut FileSource<DesiredState>) {
        tokio::time::timeout(PATIENCE, source.changed())
            .await
            .expect("a sign of the change");
    }

    async fn quiet(source: &mut FileSource<DesiredState>) {
        let sign = tokio::time::timeout(Duration::from_millis(400), source.changed()).await;
        assert!(sign.is_err(), "a sign without a change");
    }

    #[tokio::test]
    async fn a_file_that_is_replaced_or_rewritten_is_news_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("lb.yaml");
        fs::write(&path, file("172.22.0.2")).expect("write");
        let (mut source, state) = FileSource::open(path.clone(), parse).expect("good");
        assert_eq!(vip(Some(state)).as_deref(), Some("172.22.0.2"));
        assert_eq!(source.news().expect("good"), None);
        quiet(&mut source).await;

        let new = folder.path().join(".lb.yaml.new");
        fs::write(&new, file("172.22.0.3")).expect("write");
        fs::rename(&new, &path).expect("rename");
        sign(&mut source).await;
        assert_eq!(
            vip(source.news().expect("good")).as_deref(),
            Some("172.22.0.3")
        );

        fs::write(&path, file("172.22.0.4")).expect("write");
        sign(&mut source).await;
        assert_eq!(
            vip(source.news().expect("good")).as_deref(),
            Some("172.22.0.4")
        );
        quiet(&mut source).await;

        source.forget();
        assert_eq!(
            vip(source.news().expect("good")).as_deref(),
            Some("172.22.0.4")
        );
    }

    #[tokio::test]
    async fn a_mounted_configmap_that_swaps_its_link_is_news() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        for (version, address) in [("..v1", "172.22.0.2"), ("..v2", "172.22.0.3")] {
            fs::create_dir(at(version)).expect("a folder");
            fs::write(at(version).join("lb.yaml"), file(address)).expect("write");
        }
        symlink("..v1", at("..data")).expect("a link");
        symlink("..data/lb.yaml", at("lb.yaml")).expect("a link");
        let (mut source, state) = FileSource::open(at("lb.yaml"), parse).expect("good");
        assert_eq!(vip(Some(state)).as_deref(), Some("172.22.0.2"));

        symlink("..v2", at("..data_tmp")).expect("a link");
        fs::rename(at("..data_tmp"), at("..data")).expect("rename");
        sign(&mut source).await;
        assert_eq!(
            vip(source.news().expect("good")).as_deref(),
            Some("172.22.0.3")
        );
    }

    #[test]
    fn a_bad_file_and_a_missing_one_are_told_once_each() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("lb.yaml");
        assert!(matches!(
            FileSource::open(path.clone(), parse),
            Err(ConfigError::Read { .. })
        ));
        fs::write(&path, file("172.22.0.3")).expect("write");
        let (mut source, _) = FileSource::open(path.clone(), parse).expect("good");
        fs::remove_file(&path).expect("remove");
        assert!(matches!(source.news(), Err(ConfigError::Read { .. })));
        assert!(matches!(source.news(), Ok(None)));
        fs::write(&path, "uplinks: oops").expect("write");
        assert!(matches!(source.news(), Err(ConfigError::Invalid { .. })));
        assert!(matches!(source.news(), Ok(None)));
        fs::write(&path, file("172.22.0.2")).expect("write");
        assert!(matches!(source.news(), Ok(Some(_))));
    }
}
