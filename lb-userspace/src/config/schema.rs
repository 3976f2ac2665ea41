//! The file as it is written: what YAML may hold, with the place of every value, and nothing decided.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_saphyr::Spanned;

/// A text scalar and its place.
pub(super) type Text = Spanned<String>;
/// A number and its place; ranges are checked later, so that the message can name them.
pub(super) type Number = Spanned<i64>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    #[serde(rename = "apiVersion")]
    pub api_version: Text,
    pub uplinks: Spanned<Vec<Spanned<Uplink>>>,
    #[serde(default)]
    pub vips: Vec<Vip>,
    #[serde(default)]
    pub peers: Option<Spanned<Peers>>,
    #[serde(default)]
    pub kubernetes: Kubernetes,
    #[serde(default)]
    pub services: Vec<Service>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kubernetes {
    #[serde(default, rename = "defaultClass")]
    pub default_class: bool,
    #[serde(default, rename = "endpointsWithoutPods")]
    pub endpoints_without_pods: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Uplink {
    #[serde(default)]
    pub subnet: Option<Text>,
    #[serde(default)]
    pub name: Option<Text>,
    #[serde(default)]
    pub mac: Option<Text>,
    #[serde(default)]
    pub mode: Option<Text>,
    #[serde(default)]
    pub vlan: Option<Number>,
    #[serde(default)]
    pub gateway: Option<Text>,
    #[serde(default)]
    pub bypass: Option<Text>,
    #[serde(default)]
    pub bypass_udp: Option<Spanned<Vec<Number>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Vip {
    pub address: Text,
    #[serde(default)]
    pub announce: Option<Text>,
    #[serde(default)]
    pub nodes: Option<Spanned<Vec<Text>>>,
    #[serde(default)]
    pub refuse: Option<Text>,
    #[serde(default)]
    pub pass: Option<Spanned<Vec<Text>>>,
    #[serde(default)]
    pub namespaces: Option<Vec<Text>>,
    #[serde(default, rename = "autoAssign")]
    pub auto_assign: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Peers {
    #[serde(default)]
    pub key: Option<PeerKey>,
    #[serde(default)]
    pub nodes: Option<Spanned<Vec<Text>>>,
    #[serde(default)]
    pub interval: Option<Text>,
    #[serde(default)]
    pub port: Option<Number>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PeerKey {
    pub file: Text,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Service {
    pub name: Text,
    pub vip: Text,
    pub ports: Spanned<Vec<Port>>,
    #[serde(default)]
    pub instance_ports: Option<BTreeMap<String, Text>>,
    #[serde(default)]
    pub health: Option<Health>,
    #[serde(default, rename = "sessionAffinity")]
    pub session_affinity: Option<Text>,
    #[serde(default, rename = "sourceRanges")]
    pub source_ranges: Option<Spanned<Vec<Text>>>,
    #[serde(default)]
    pub backends: Vec<Backend>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Port {
    pub name: Text,
    pub port: Number,
    #[serde(default, rename = "targetPort")]
    pub target_port: Option<Number>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Health {
    pub tcp: Number,
    #[serde(default)]
    pub interval: Option<Text>,
    #[serde(default)]
    pub fail: Option<Number>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Backend {
    pub instance: Text,
    #[serde(default)]
    pub slot: Option<Number>,
    pub address: Text,
    #[serde(default)]
    pub node: Option<Text>,
    #[serde(default)]
    pub ready: Option<bool>,
}
