//! The pinned maps that the peers' thread reads, and the one of announcers, which it alone writes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use aya::maps::{Array, HashMap, MapData, PerCpuArray};
use lb_common::{
    Addr, Announcer, MAX_PEERS, PEER_IS_REFLECTING, PeerInfo, Reflection, Verdict, from_name, map,
    peer_link,
};
use tracing::warn;

use crate::dataplane::{DataplaneError, open_map};

/// The maps.
pub(super) struct Maps {
    announcers: HashMap<MapData, Addr, Announcer>,
    /// What `announcers` holds.
    written: BTreeMap<IpAddr, Announcer>,
    reflections: Array<MapData, Reflection>,
    peer_info: Array<MapData, PeerInfo>,
    verdicts: PerCpuArray<MapData, u64>,
}

/// A peer as the data plane numbers it.
#[derive(Clone, Debug)]
pub(super) struct Numbered {
    /// Its number.
    pub(super) number: u32,
    /// Whether it was last known to reflect.
    pub(super) is_reflecting: bool,
}

impl Maps {
    /// Opens them.
    pub(super) fn open(root: &Path) -> Result<Self, DataplaneError> {
        let announcers: HashMap<MapData, Addr, Announcer> = open_map(root, map::ANNOUNCERS)?;
        let rows = announcers.iter().filter_map(Result::ok);
        Ok(Self {
            written: rows.map(|(vip, row)| (vip.into(), row)).collect(),
            announcers,
            reflections: open_map(root, map::REFLECTIONS)?,
            peer_info: open_map(root, map::PEER_INFO)?,
            verdicts: open_map(root, map::VERDICTS)?,
        })
    }

    /// What the map of announcers holds.
    pub(super) fn announcers(&self) -> &BTreeMap<IpAddr, Announcer> {
        &self.written
    }

    /// Makes the map of announcers what it should be; with `all` unknown, rows that nobody wants stay.
    pub(super) fn write(&mut self, wanted: &BTreeMap<IpAddr, Announcer>, all: bool) {
        for (vip, row) in wanted {
            if self.written.get(vip) == Some(row) {
                continue;
            }
            match self.announcers.insert(Addr::from(*vip), row, 0) {
                Ok(()) => {
                    self.written.insert(*vip, *row);
                }
                Err(error) => {
                    warn!(%vip, %error, "cannot write who announces the VIP; trying again");
                }
            }
        }
        if !all {
            return;
        }
        let announcers = &mut self.announcers;
        self.written.retain(|vip, _| {
            let stays = wanted.contains_key(vip);
            if !stays {
                // What is not there need not be removed.
                let _ = announcers.remove(&Addr::from(*vip));
            }
            stays
        });
    }

    /// Peers by name.
    pub(super) fn numbers(&self) -> BTreeMap<String, Numbered> {
        let numbers = (1..MAX_PEERS).filter_map(|number| {
            let info = self.peer_info.get(&number, 0).ok()?;
            let name = from_name(&info.name);
            let peer = Numbered {
                number,
                is_reflecting: info.flags & PEER_IS_REFLECTING != 0,
            };
            (!name.is_empty()).then_some((name, peer))
        });
        numbers.collect()
    }

    /// Nonce of the last probe that a peer sent back.
    pub(super) fn reflection(&self, number: u32, uplink: u32) -> Option<u64> {
        let row = self.reflections.get(&peer_link(number, uplink), 0).ok()?;
        Some(row.nonce)
    }

    /// How often somebody else claimed a VIP, over all CPUs.
    pub(super) fn foreign_claims(&self) -> u64 {
        let count = |verdict: Verdict| {
            let values = self.verdicts.get(&(verdict as u32), 0);
            values.map_or(0, |values| values.iter().sum::<u64>())
        };
        count(Verdict::DroppedArpClaim) + count(Verdict::DroppedNdClaim)
    }
}
