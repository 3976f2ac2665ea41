//! How far the agent is in step with the API, for logs, metrics and readiness.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Upper bounds of the buckets in which [`Latency`] counts, in milliseconds.
pub const LATENCY_BUCKETS_MS: [u32; 10] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];

/// What watches and the writer note, and everybody else reads.
#[derive(Debug, Default)]
pub struct Status {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    kinds: BTreeMap<String, Kind>,
    /// Whether everything has been read once.
    whole: bool,
    contact: Option<Instant>,
    event: Option<Instant>,
    leads: bool,
    latency: Latency,
}

#[derive(Debug)]
struct Kind {
    begun: Instant,
    has_synced: bool,
    broken: Option<(Instant, String)>,
}

/// Times from a watch event to the end of the write that it caused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// How many there were up to each of [`LATENCY_BUCKETS_MS`], not counting those of lower buckets.
    pub buckets: [u64; LATENCY_BUCKETS_MS.len()],
    /// How many there were, those beyond the last bucket included.
    pub count: u64,
    /// All together.
    pub sum: Duration,
}

impl Status {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Age of the state that is served: since when nothing has shown that it is the API's. `None` until
    /// everything has been read once.
    pub fn state_age(&self) -> Option<Duration> {
        let inner = self.inner();
        if !inner.whole {
            return None;
        }
        let behind = inner.kinds.values().filter_map(|kind| match &kind.broken {
            Some((since, _)) => Some(*since),
            None => (!kind.has_synced).then_some(kind.begun),
        });
        let since = behind.chain(inner.contact).min();
        since.map(|since| since.elapsed())
    }

    /// Time since the last event of a watch, `None` if there was none yet.
    pub fn event_age(&self) -> Option<Duration> {
        self.inner().event.map(|event| event.elapsed())
    }

    /// What is read from the API but cannot be now, with the reason.
    pub fn broken(&self) -> Vec<String> {
        let inner = self.inner();
        let kinds = inner.kinds.iter();
        kinds
            .filter_map(|(what, kind)| {
                let (_, why) = kind.broken.as_ref()?;
                Some(format!("{what}: {why}"))
            })
            .collect()
    }

    /// Whether this agent is the one that writes.
    pub fn leads(&self) -> bool {
        self.inner().leads
    }

    /// Times from watch event to maps.
    pub fn latency(&self) -> Latency {
        self.inner().latency.clone()
    }

    /// A kind of objects is read from now on.
    pub(super) fn begin(&self, what: &str) {
        let kind = Kind {
            begun: Instant::now(),
            has_synced: false,
            broken: None,
        };
        self.inner().kinds.insert(what.to_owned(), kind);
    }

    /// A kind of objects is read no more.
    pub(super) fn end(&self, what: &str) {
        self.inner().kinds.remove(what);
    }

    /// All objects of a kind have been read.
    pub(super) fn synced(&self, what: &str) {
        let mut inner = self.inner();
        if let Some(kind) = inner.kinds.get_mut(what) {
            kind.has_synced = true;
            kind.broken = None;
        }
        inner.whole |= inner.kinds.values().all(|kind| kind.has_synced);
        inner.contact = Some(Instant::now());
    }

    /// A watch brought an event.
    pub(super) fn event(&self) {
        let mut inner = self.inner();
        inner.event = Some(Instant::now());
        inner.contact = inner.event;
    }

    /// Objects of a kind cannot be read; returns whether that is news.
    pub(super) fn broke(&self, what: &str, why: &str) -> bool {
        let mut inner = self.inner();
        // Nothing has shown anything since the last contact.
        let since = inner.contact.unwrap_or_else(Instant::now);
        let Some(kind) = inner.kinds.get_mut(what) else {
            return false;
        };
        let (since, known) = kind.broken.take().unwrap_or((since, String::new()));
        let is_news = known != why;
        kind.broken = Some((since, why.to_owned()));
        is_news
    }

    /// The API answered.
    pub(super) fn contact(&self) {
        self.inner().contact = Some(Instant::now());
    }

    pub(super) fn set_leads(&self, leads: bool) {
        self.inner().leads = leads;
    }

    /// What an event `since` then caused has been written to the maps.
    pub(super) fn applied(&self, took: Duration) {
        let latency = &mut self.inner().latency;
        latency.count += 1;
        latency.sum += took;
        let mut bounds = LATENCY_BUCKETS_MS
            .iter()
            .map(|ms| Duration::from_millis(u64::from(*ms)));
        if let Some(bucket) = bounds.position(|bound| took <= bound) {
            latency.buckets[bucket] += 1;
        }
    }

    /// Whether everything has been read once.
    pub(super) fn has_synced(&self, what: &[String]) -> bool {
        let inner = self.inner();
        let synced = |what: &String| inner.kinds.get(what).is_some_and(|kind| kind.has_synced);
        what.iter().all(synced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_age_grows_from_the_last_contact_before_a_watch_broke() {
        let status = Status::default();
        assert_eq!(status.state_age(), None);
        status.begin("Services");
        status.begin("Pods");
        status.synced("Services");
        assert_eq!(status.state_age(), None, "Pods have not been read");
        status.synced("Pods");
        std::thread::sleep(Duration::from_millis(30));
        assert!(status.broke("Pods", "refused"));
        assert!(!status.broke("Pods", "refused"), "no news");
        // An answer to something else does not make the watch whole.
        status.contact();
        assert!(status.state_age() >= Some(Duration::from_millis(30)));
        assert_eq!(status.broken(), ["Pods: refused"]);
        status.synced("Pods");
        assert!(status.state_age() < Some(Duration::from_millis(30)));
        assert_eq!(status.broken(), Vec::<String>::new());
        // What is to be read from now on makes the state old until it is.
        status.begin("Pods of another namespace");
        std::thread::sleep(Duration::from_millis(30));
        status.contact();
        assert!(status.state_age() >= Some(Duration::from_millis(30)));
    }

    #[test]
    fn latencies_are_counted_in_buckets() {
        let status = Status::default();
        for ms in [1, 7, 8, 3000] {
            status.applied(Duration::from_millis(ms));
        }
        let latency = status.latency();
        assert_eq!(latency.buckets, [1, 0, 0, 2, 0, 0, 0, 0, 0, 0]);
        assert_eq!(
            (latency.count, latency.sum),
            (4, Duration::from_millis(3016))
        );
    }
}
