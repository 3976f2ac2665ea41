//! Who writes: an election by an ordinary Lease.
//!
//! Like client-go's: time is this machine's alone. A Lease that somebody else holds is free once it has not
//! changed here for as long as it says, whatever the clocks of others show; and whoever holds it stops to
//! write well before others may think it free.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Error};
use tokio::time::Instant;

/// How long a Lease lasts without a sign of its holder.
pub const DURATION: Duration = Duration::from_secs(15);

/// One candidate's view of the election.
pub(super) struct Election {
    api: Api<Lease>,
    name: String,
    /// Unique among candidates, and the same for an agent that comes back: it goes on at once.
    identity: String,
    duration: Duration,
    seen: Option<(Seen, Instant)>,
    /// Until when this candidate may act as the holder.
    until: Option<Instant>,
}

/// What changes whenever the holder gives a sign.
#[derive(PartialEq)]
struct Seen {
    holder: Option<String>,
    renewed: Option<MicroTime>,
}

impl Election {
    pub fn new(api: Api<Lease>, name: &str, identity: &str, duration: Duration) -> Self {
        Self {
            api,
            name: name.to_owned(),
            identity: identity.to_owned(),
            duration,
            seen: None,
            until: None,
        }
    }

    /// How long to wait between two steps.
    pub fn pause(&self) -> Duration {
        self.duration / 5
    }

    /// Until when this candidate may act, `None` if it must not.
    pub fn holds_until(&self) -> Option<Instant> {
        self.until.filter(|until| Instant::now() < *until)
    }

    /// Looks at the Lease; takes it if it is free and renews it if it is ours. An error changes nothing:
    /// what is held runs out by itself.
    pub async fn step(&mut self) -> Result<(), Error> {
        let begun = Instant::now();
        let Some(lease) = self.api.get_opt(&self.name).await? else {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(self.name.clone()),
                    ..ObjectMeta::default()
                },
                spec: Some(self.taken(0)),
            };
            let made = self.api.create(&PostParams::default(), &lease).await;
            return self.took(made, begun);
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec
            .holder_identity
            .clone()
            .filter(|holder| !holder.is_empty());
        let next = if holder.as_ref() == Some(&self.identity) {
            LeaseSpec {
                renew_time: Some(now()),
                lease_duration_seconds: Some(self.seconds()),
                ..spec
            }
        } else if holder.is_none() || self.has_run_out(&spec, holder, begun) {
            self.taken(spec.lease_transitions.unwrap_or(0).saturating_add(1))
        } else {
            self.until = None;
            return Ok(());
        };
        // With its resourceVersion: whoever is first gets it.
        let lease = Lease {
            spec: Some(next),
            ..lease
        };
        let replaced = self
            .api
            .replace(&self.name, &PostParams::default(), &lease)
            .await;
        self.took(replaced, begun)
    }

    /// Gives the Lease up, so that another need not wait for it to run out.
    pub async fn release(&mut self) -> Result<(), Error> {
        if self.until.take().is_none() {
            return Ok(());
        }
        let Some(lease) = self.api.get_opt(&self.name).await? else {
            return Ok(());
        };
        let spec = lease.spec.clone().unwrap_or_default();
        if spec.holder_identity.as_ref() != Some(&self.identity) {
            return Ok(());
        }
        let lease = Lease {
            spec: Some(LeaseSpec {
                holder_identity: None,
                renew_time: Some(now()),
                ..spec
            }),
            ..lease
        };
        self.api
            .replace(&self.name, &PostParams::default(), &lease)
            .await?;
        Ok(())
    }

    /// Whether the holder has given no sign for as long as its Lease lasts.
    fn has_run_out(&mut self, spec: &LeaseSpec, holder: Option<String>, now: Instant) -> bool {
        let lasts = spec
            .lease_duration_seconds
            .and_then(|s| u64::try_from(s).ok());
        let lasts = lasts.map_or(self.duration, Duration::from_secs);
        let seen = Seen {
            holder,
            renewed: spec.renew_time.clone(),
        };
        match &self.seen {
            Some((last, since)) if *last == seen => now.duration_since(*since) > lasts,
            _ => {
                self.seen = Some((seen, now));
                false
            }
        }
    }

    fn took(&mut self, result: Result<Lease, Error>, begun: Instant) -> Result<(), Error> {
        match result {
            Ok(_) => {
                self.until = Some(begun + self.duration * 2 / 3);
                Ok(())
            }
            Err(Error::Api(status)) if status.is_conflict() || status.is_already_exists() => {
                // Another was first.
                self.until = None;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn taken(&self, transitions: i32) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(self.seconds()),
            acquire_time: Some(now()),
            renew_time: Some(now()),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }

    fn seconds(&self) -> i32 {
        i32::try_from(self.duration.as_secs())
            .unwrap_or(i32::MAX)
            .max(1)
    }
}

fn now() -> MicroTime {
    MicroTime(Timestamp::now())
}
