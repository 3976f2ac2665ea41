//! A file that is followed: what it says now, and a sign when it says something else.
//!
//! The folder is watched, not the file: editors and `kubectl` replace files by renaming, and a mounted
//! ConfigMap changes by swapping a symbolic link beside the file. Whoever uses this also has it looked at
//! from time to time, for what no watch of one folder can see (a link to another folder, a network file
//! system). A file is read on a thread of its own: one that hangs (NFS) must not hold up the agent.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tracing::warn;

use super::{ConfigError, Unreadable, read};

/// Quiet time after a sign of change: a writer that does not rename needs a moment.
const SETTLE: Duration = Duration::from_millis(100);
/// How long reading may take before the log says so.
const SLOW: Duration = Duration::from_secs(5);

/// A file that may change, and what is read in it.
pub struct FileSource<T> {
    path: PathBuf,
    parse: Parse<T>,
    /// The reading that goes on; never more than one.
    reading: Option<Elsewhere<Said>>,
    /// It may have begun too early for what has changed since.
    read_again: bool,
    /// What it said the last time.
    last: Option<Said>,
    /// That has not been asked for yet.
    is_news: bool,
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

/// What a file said.
type Said = Result<String, Unreadable>;

/// Work that may hang, on a thread of its own. Nobody waits for that at the end of the process, as a
/// runtime would for its own threads.
struct Elsewhere<R> {
    result: oneshot::Receiver<R>,
    /// When the log is to say that it takes long, `None` once it has.
    slow_at: Option<Instant>,
}

impl<R: Send + 'static> Elsewhere<R> {
    fn begin(work: impl FnOnce() -> R + Send + 'static) -> Self {
        let (sender, result) = oneshot::channel();
        let thread = thread::Builder::new().name("config".to_owned());
        // Without a thread the sender is dropped, which the receiver notices.
        let _ = thread.spawn(move || sender.send(work()));
        Self {
            result,
            slow_at: Some(Instant::now() + SLOW),
        }
    }

    /// Waits for the result, and says once if that takes long. Safe to cancel.
    async fn finish(&mut self, path: &Path, meanwhile: &str) -> Result<R, Unreadable> {
        loop {
            let slow = async {
                match self.slow_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                result = &mut self.result => return result.map_err(|_| Unreadable::NoThread),
                () = slow => {
                    self.slow_at = None;
                    let (path, slow) = (path.display(), SLOW.as_secs());
                    warn!("reading {path} takes longer than {slow} s; {meanwhile}");
                }
            }
        }
    }
}

impl<T> FileSource<T> {
    /// Reads a file for the first time, when it must be good, and watches it from before that.
    pub async fn open(path: PathBuf, parse: Parse<T>) -> Result<(Self, T), ConfigError> {
        let file = path.clone();
        // To find the folder may take as long as to read the file.
        let mut first = Elsewhere::begin(move || (Watch::new(&file), read(&file)));
        let first = first.finish(&path, "waiting for it").await;
        let (watch, text) = match first {
            Ok((watch, Ok(text))) => (watch, text),
            Ok((_, Err(why))) | Err(why) => return Err(ConfigError::Read { path, why }),
        };
        let watch = watch
            .inspect_err(|error| {
                let path = path.display();
                warn!(
                    "cannot watch {path}, so changes are seen when it is looked at only: {error}"
                );
            })
            .ok();
        let mut source = Self {
            path,
            parse,
            reading: None,
            read_again: false,
            last: Some(Ok(text)),
            is_news: true,
            watch,
            history: History::default(),
        };
        // What it says is news, so there is something.
        match source.news()? {
            Some(said) => Ok((source, said)),
            None => unreachable!("what is read first is news"),
        }
    }

    /// Waits until the file says something else than it did the last time. Safe to cancel.
    pub async fn changed(&mut self) {
        while !self.is_news {
            let said = tokio::select! {
                said = said(self.reading.as_mut(), &self.path) => said,
                () = sign(self.watch.as_mut()) => {
                    self.look();
                    continue;
                }
            };
            self.reading = None;
            if std::mem::take(&mut self.read_again) {
                self.look();
            }
            let said = Some(said);
            self.is_news = self.last != said;
            self.last = said;
        }
    }

    /// Has the file read again; if it says something else, [`Self::changed`] tells.
    pub fn look(&mut self) {
        if self.reading.is_some() {
            self.read_again = true;
            return;
        }
        let path = self.path.clone();
        self.reading = Some(Elsewhere::begin(move || read(&path)));
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the file says, `None` if that is what it said the last time: the same news, good or bad,
    /// is told once. Reads nothing itself.
    pub fn news(&mut self) -> Result<Option<T>, ConfigError> {
        let Some(last) = self.last.as_ref().filter(|_| self.is_news) else {
            return Ok(None);
        };
        self.is_news = false;
        let said = match last {
            Ok(text) => (self.parse)(&self.path, text),
            Err(why) => Err(ConfigError::Read {
                path: self.path.clone(),
                why: why.clone(),
            }),
        };
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

    /// Has the file read again; whatever it says then, [`Self::changed`] tells.
    pub fn forget(&mut self) {
        self.last = None;
        self.is_news = false;
        self.look();
    }
}

async fn said(reading: Option<&mut Elsewhere<Said>>, path: &Path) -> Said {
    match reading {
        Some(reading) => reading
            .finish(path, "the last good configuration goes on serving")
            .await
            .flatten(),
        None => std::future::pending().await,
    }
}

async fn sign(watch: Option<&mut Watch>) {
    match watch {
        Some(watch) => watch.changed().await,
        None => std::future::pending().await,
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
            self.signs.mark_changed();
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

    async fn change(source: &mut FileSource<DesiredState>) {
        tokio::time::timeout(PATIENCE, source.changed())
            .await
            .expect("the change");
    }

    async fn quiet(source: &mut FileSource<DesiredState>) {
        let change = tokio::time::timeout(Duration::from_millis(400), source.changed()).await;
        assert!(change.is_err(), "told without a change");
    }

    #[tokio::test]
    async fn a_file_that_is_replaced_or_rewritten_is_news_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("lb.yaml");
        fs::write(&path, file("172.22.0.2")).expect("write");
        let (mut source, state) = FileSource::open(path.clone(), parse).await.expect("good");
        assert_eq!(vip(Some(state)).as_deref(), Some("172.22.0.2"));
        assert_eq!(source.news().expect("good"), None);
        quiet(&mut source).await;

        let new = folder.path().join(".lb.yaml.new");
        fs::write(&new, file("172.22.0.3")).expect("write");
        fs::rename(&new, &path).expect("rename");
        change(&mut source).await;
        assert_eq!(
            vip(source.news().expect("good")).as_deref(),
            Some("172.22.0.3")
        );

        fs::write(&path, file("172.22.0.4")).expect("write");
        change(&mut source).await;
        assert_eq!(
            vip(source.news().expect("good")).as_deref(),
            Some("172.22.0.4")
        );
        quiet(&mut source).await;

        source.forget();
        change(&mut source).await;
        assert_eq!(
            vip(source.news().expect("good")).as_deref(),
            Some("172.22.0.4")
        );
    }

    /// The agent waits for other things, too, and begins to wait anew when one of them comes.
    #[tokio::test]
    async fn a_change_is_not_lost_when_the_wait_for_quiet_ends_early() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("lb.yaml");
        fs::write(&path, file("172.22.0.2")).expect("write");
        let (mut source, _) = FileSource::open(path.clone(), parse).await.expect("good");
        quiet(&mut source).await;

        fs::write(folder.path().join("other"), "").expect("write");
        // Within the first quiet time, which therefore is none; the wait ends within the second.
        let early = tokio::time::timeout(SETTLE * 3 / 2, source.changed());
        let later = async {
            tokio::time::sleep(SETTLE / 2).await;
            fs::write(&path, file("172.22.0.3")).expect("write");
        };
        let (early, ()) = tokio::join!(early, later);
        assert!(early.is_err(), "told before all was quiet");
        change(&mut source).await;
        assert_eq!(
            vip(source.news().expect("good")).as_deref(),
            Some("172.22.0.3")
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
        let (mut source, state) = FileSource::open(at("lb.yaml"), parse).await.expect("good");
        assert_eq!(vip(Some(state)).as_deref(), Some("172.22.0.2"));

        symlink("..v2", at("..data_tmp")).expect("a link");
        fs::rename(at("..data_tmp"), at("..data")).expect("rename");
        change(&mut source).await;
        assert_eq!(
            vip(source.news().expect("good")).as_deref(),
            Some("172.22.0.3")
        );
    }

    /// What it says next, looked at without a sign as the agent does.
    async fn next(
        source: &mut FileSource<DesiredState>,
    ) -> Result<Option<DesiredState>, ConfigError> {
        source.look();
        change(source).await;
        source.news()
    }

    #[tokio::test]
    async fn a_bad_file_and_a_missing_one_are_told_once_each() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("lb.yaml");
        assert!(matches!(
            FileSource::open(path.clone(), parse).await,
            Err(ConfigError::Read { .. })
        ));
        fs::write(&path, file("172.22.0.3")).expect("write");
        let (mut source, _) = FileSource::open(path.clone(), parse).await.expect("good");
        fs::remove_file(&path).expect("remove");
        assert!(matches!(
            next(&mut source).await,
            Err(ConfigError::Read { .. })
        ));
        quiet(&mut source).await;
        fs::write(&path, "uplinks: oops").expect("write");
        assert!(matches!(
            next(&mut source).await,
            Err(ConfigError::Invalid { .. })
        ));
        quiet(&mut source).await;
        fs::write(&path, file("172.22.0.2")).expect("write");
        assert!(matches!(next(&mut source).await, Ok(Some(_))));
        assert_eq!((source.history().good, source.history().bad), (2, 2));
    }

    #[tokio::test]
    async fn a_file_that_becomes_a_pipe_is_refused_and_holds_up_nobody() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("lb.yaml");
        fs::write(&path, file("172.22.0.3")).expect("write");
        let (mut source, _) = FileSource::open(path.clone(), parse).await.expect("good");
        fs::remove_file(&path).expect("remove");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).expect("a pipe");
        let error = next(&mut source).await.expect_err("a pipe");
        assert_eq!(
            error.to_string(),
            format!(
                "cannot read {}: it is a pipe (FIFO); a configuration is a regular file",
                path.display()
            )
        );
    }

    #[tokio::test]
    async fn a_reading_that_hangs_is_told_once_and_waited_for_without_another() {
        let (sender, result) = oneshot::channel();
        let mut reading = Elsewhere::<u8> {
            result,
            slow_at: Some(Instant::now()),
        };
        let path = Path::new("lb.yaml");
        let wait =
            tokio::time::timeout(Duration::from_millis(100), reading.finish(path, "waiting"));
        assert!(wait.await.is_err(), "nothing has come");
        assert_eq!(reading.slow_at, None, "told");
        sender.send(7).expect("somebody waits");
        assert_eq!(reading.finish(path, "waiting").await, Ok(7));
    }
}
