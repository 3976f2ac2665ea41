//! Heartbeats as they lie in a datagram: sealed with a shared key, and opened only with one.
//!
//! `ilbh`, wire version (1 byte), key id (4 bytes), HMAC-SHA256 (RFC 2104, 32 bytes) over all the rest, body (JSON).
//! Fields that a reader does not know are passed over, those that a writer did not have take their default, so that
//! agents one version apart understand each other.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use ring::{digest, hmac};
use serde::{Deserialize, Serialize};

use super::PeersError;

const MAGIC: &[u8; 4] = b"ilbh";
const VERSION: u8 = 1;
const KEY_ID: usize = 4;
const TAG: usize = 32;
const HEADER: usize = MAGIC.len() + 1 + KEY_ID;
/// Bytes that a key has at least.
const MIN_KEY: usize = 16;

/// A key that peers share.
#[derive(Clone)]
pub struct Key {
    bytes: Vec<u8>,
    id: [u8; KEY_ID],
    hmac: hmac::Key,
}

impl Key {
    /// A key from what its file holds; white space around it does not count.
    ///
    /// # Errors
    /// When it is shorter than 16 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PeersError> {
        let bytes = bytes.trim_ascii();
        if bytes.len() < MIN_KEY {
            return Err(PeersError::ShortKey {
                found: bytes.len(),
                wanted: MIN_KEY,
            });
        }
        let mut id = [0; KEY_ID];
        id.copy_from_slice(&digest::digest(&digest::SHA256, bytes).as_ref()[..KEY_ID]);
        Ok(Self {
            bytes: bytes.to_owned(),
            id,
            hmac: hmac::Key::new(hmac::HMAC_SHA256, bytes),
        })
    }

    /// What tells keys apart without telling them: the first bytes of the key's SHA-256.
    pub(super) fn id(&self) -> [u8; KEY_ID] {
        self.id
    }

    /// The tag of some pieces, one after the other.
    pub(super) fn sign(&self, pieces: &[&[u8]]) -> [u8; TAG] {
        let mut context = hmac::Context::with_key(&self.hmac);
        for piece in pieces {
            context.update(piece);
        }
        let mut tag = [0; TAG];
        tag.copy_from_slice(context.sign().as_ref());
        tag
    }

    /// Whether `tag` is that of the pieces, told in a time that does not depend on the answer.
    pub(super) fn verifies(&self, pieces: &[&[u8]], tag: &[u8]) -> bool {
        hmac::verify(&self.hmac, &pieces.concat(), tag).is_ok()
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Key {}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({:02x?})", self.id)
    }
}

/// What a node says on one link.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Body {
    /// The sender.
    pub(super) node: String,
    /// When its agent started, wall clock nanoseconds; raised where a peer remembers a later one.
    pub(super) incarnation: u64,
    /// Rises with every datagram of an incarnation.
    pub(super) sequence: u64,
    /// The address that it is sent to: a datagram is of no use to anybody else.
    pub(super) to: Option<IpAddr>,
    /// Version of the agent.
    pub(super) version: String,
    /// Version of its maps.
    pub(super) layout: u32,
    /// Its MAC on this link.
    pub(super) mac: [u8; 6],
    /// Its addresses on this link.
    pub(super) addresses: Vec<IpAddr>,
    /// VIPs of this link that it holds, with the epoch of the claim.
    pub(super) vips: BTreeMap<IpAddr, u64>,
    /// VIPs of this link that it would hold.
    pub(super) candidates: BTreeSet<IpAddr>,
    /// Whose heartbeats it hears on this link, of which incarnation.
    pub(super) heard: BTreeMap<String, u64>,
    /// Who came with an incarnation below one that it had before.
    pub(super) known: BTreeMap<String, u64>,
    /// Who shall take a VIP that it holds.
    #[serde(rename = "yield")]
    pub(super) yields: BTreeMap<IpAddr, String>,
    /// Version of the exceptions' stream that it offers; 0 for none.
    pub(super) exceptions: u32,
    /// Backends of it that fail their health checks, as service and address.
    pub(super) down: BTreeSet<(String, IpAddr)>,
}

/// Why a datagram is not a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rejection {
    /// Of no key that we have, or not sealed with it.
    Forged,
    /// Not as a heartbeat lies, or of another wire version.
    Malformed,
}

/// The datagram of a body.
pub(super) fn seal(key: &Key, body: &Body) -> Vec<u8> {
    let mut datagram = Vec::with_capacity(1024);
    datagram.extend(MAGIC);
    datagram.push(VERSION);
    datagram.extend(key.id());
    // Maps with keys of text and numbers always have a JSON form.
    let json = serde_json::to_vec(body).unwrap_or_default();
    datagram.extend(key.sign(&[&datagram, &json]));
    datagram.extend(json);
    datagram
}

/// The body of a datagram that was sealed with one of the keys.
pub(super) fn open(keys: &[Key], datagram: &[u8]) -> Result<Body, Rejection> {
    let (header, rest) = datagram
        .split_at_checked(HEADER)
        .ok_or(Rejection::Malformed)?;
    let (tag, json) = rest.split_at_checked(TAG).ok_or(Rejection::Malformed)?;
    if &header[..MAGIC.len()] != MAGIC || header[MAGIC.len()] != VERSION {
        return Err(Rejection::Malformed);
    }
    let id = &header[MAGIC.len() + 1..];
    let mut named = keys.iter().filter(|key| key.id() == id);
    if !named.any(|key| key.verifies(&[header, json], tag)) {
        return Err(Rejection::Forged);
    }
    serde_json::from_slice(json).map_err(|_| Rejection::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        Key::from_bytes(text.as_bytes()).expect("long enough")
    }

    fn body() -> Body {
        Body {
            node: "a".into(),
            incarnation: 7,
            sequence: 3,
            vips: BTreeMap::from([("172.22.0.2".parse().expect("valid"), 5)]),
            ..Body::default()
        }
    }

    #[test]
    fn what_is_sealed_is_opened_with_any_of_the_keys() {
        let (old, new) = (key("the old key, 16 bytes"), key("the new key, 16 bytes"));
        let datagram = seal(&old, &body());
        assert_eq!(open(&[new.clone(), old], &datagram), Ok(body()));
        assert_eq!(open(&[new], &datagram), Err(Rejection::Forged));
    }

    #[test]
    fn white_space_around_a_key_does_not_count_and_a_short_one_is_refused() {
        assert_eq!(key("  sixteen bytes ok\n"), key("sixteen bytes ok"));
        let error = Key::from_bytes(b"  fifteen bytes..  \n").expect_err("too short");
        assert!(error.to_string().contains("has 15 bytes"));
    }

    #[test]
    fn no_changed_or_cut_datagram_is_opened() {
        let keys = [key("the only key, 16 bytes")];
        let datagram = seal(&keys[0], &body());
        for at in 0..datagram.len() {
            let mut changed = datagram.clone();
            changed[at] ^= 1;
            assert!(open(&keys, &changed).is_err(), "byte {at}");
            assert!(open(&keys, &datagram[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn agents_of_other_versions_are_understood() {
        let keys = [key("the only key, 16 bytes")];
        let mut datagram = Vec::new();
        datagram.extend(MAGIC);
        datagram.push(VERSION);
        datagram.extend(keys[0].id());
        let json = br#"{"node":"a","incarnation":7,"sequence":3,"colour":"new"}"#;
        datagram.extend(keys[0].sign(&[&datagram, json]));
        datagram.extend(json);
        let body = open(&keys, &datagram).expect("understood");
        assert_eq!((body.node.as_str(), body.sequence), ("a", 3));
        assert!(body.vips.is_empty() && body.yields.is_empty());
    }
}
