//! Scenarios with real clients and servers, named for what a user would notice. A file per concern;
//! most run twice: `native` with complete checksums on the wire, `tc` with every offload on.

mod announce;
mod bridge;
mod bypass;
mod doctor;
mod download;
mod ending;
mod fleet;
mod foreign;
mod frames;
mod host;
mod ipv6;
mod laboratory;
mod lifecycle;
mod lost_reply;
mod many;
mod monitor;
mod path_mtu;
mod port;
mod scene;
mod serving;
mod trace;
mod uplinks;
