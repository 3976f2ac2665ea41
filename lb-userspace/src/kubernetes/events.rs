//! Events on Services: one for each problem, told again while it lasts.
//!
//! An Event's name follows from what it says, so that a new writer continues what the last one told
//! instead of telling it anew.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ObjectReference, Service};
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, Error, Resource as _};
use lb_common::choice::name_hash;
use tokio::time::Instant;

/// Events live for an hour on an API server with its defaults.
const TELL_AGAIN: Duration = Duration::from_secs(30 * 60);
/// Longest note that the API takes, in bytes.
const LONGEST_NOTE: usize = 1024;
const CONTROLLER: &str = "ironlb.dev/agent";

/// What an Event says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Notice {
    /// `Normal` or `Warning`.
    pub kind: &'static str,
    pub reason: &'static str,
    pub note: String,
}

/// Tells Events and remembers which.
pub(super) struct Teller {
    client: Client,
    /// Name of this agent's node.
    instance: String,
    /// By the Service's UID: when, and how often.
    told: HashMap<(String, Notice), (Instant, i32)>,
}

impl Teller {
    pub fn new(client: Client, instance: String) -> Self {
        Self {
            client,
            instance,
            told: HashMap::new(),
        }
    }

    /// Forgets what is not a problem any more, so that it is told when it comes back.
    pub fn retain(&mut self, holds: impl Fn(&str, &Notice) -> bool) {
        self.told.retain(|(uid, notice), _| holds(uid, notice));
    }

    /// Tells a notice unless it was told lately.
    pub async fn tell(&mut self, service: &Service, notice: Notice) -> Result<(), Error> {
        let uid = service.metadata.uid.clone().unwrap_or_default();
        let key = (uid, notice);
        let now = Instant::now();
        let count = match self.told.get(&key) {
            Some((at, _)) if now.duration_since(*at) < TELL_AGAIN => return Ok(()),
            Some((_, count)) => count + 1,
            None => 1,
        };
        self.write(service, &key, count).await?;
        self.told.insert(key, (now, count));
        Ok(())
    }

    async fn write(
        &self,
        service: &Service,
        (uid, notice): &(String, Notice),
        count: i32,
    ) -> Result<(), Error> {
        let namespace = service.metadata.namespace.as_deref().unwrap_or("default");
        let api: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let text = format!("{uid} {} {}", notice.reason, notice.note);
        let service_name = service.metadata.name.as_deref().unwrap_or_default();
        let name = format!("{service_name}.{:016x}", name_hash(&text));
        if count == 1 {
            let event = self.event(service, notice, &name, namespace);
            match api.create(&PostParams::default(), &event).await {
                // Another writer told it.
                Err(Error::Api(status)) if status.is_already_exists() || status.is_conflict() => {}
                result => return result.map(drop),
            }
        }
        let series = EventSeries {
            // The API wants at least two.
            count: count.max(2),
            last_observed_time: MicroTime(Timestamp::now()),
        };
        let patch = Patch::Merge(serde_json::json!({"series": series}));
        match api.patch(&name, &PatchParams::default(), &patch).await {
            // It has been forgotten meanwhile.
            Err(Error::Api(status)) if status.is_not_found() => {
                let event = self.event(service, notice, &name, namespace);
                api.create(&PostParams::default(), &event).await.map(drop)
            }
            result => result.map(drop),
        }
    }

    fn event(&self, service: &Service, notice: &Notice, name: &str, namespace: &str) -> Event {
        let mut note = notice.note.clone();
        while note.len() > LONGEST_NOTE {
            note.pop();
        }
        Event {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                namespace: Some(namespace.to_owned()),
                ..ObjectMeta::default()
            },
            action: Some("Serve".to_owned()),
            event_time: Some(MicroTime(Timestamp::now())),
            note: Some(note),
            reason: Some(notice.reason.to_owned()),
            regarding: Some(ObjectReference {
                // Of no use in an Event, and it would tie it to one version of the Service.
                resource_version: None,
                ..service.object_ref(&())
            }),
            reporting_controller: Some(CONTROLLER.to_owned()),
            reporting_instance: Some(self.instance.clone()),
            type_: Some(notice.kind.to_owned()),
            ..Event::default()
        }
    }
}
