//! How many connections there may be, so that nobody keeps the port from the others: a pod that holds many must not make
//! the kubelet take the agent for dead.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Connections from this node itself: the kubelet, the command line.
const OWN: usize = 32;
/// Connections from elsewhere: Prometheus, pods.
const OTHERS: usize = 64;
/// Of those, from one address.
const OF_ONE: usize = 8;

/// Counts connections.
#[derive(Debug, Default)]
pub(super) struct Room {
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    own: usize,
    /// By address; those without any are not in it.
    others: HashMap<IpAddr, usize>,
}

/// The place of one connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    room: Arc<Room>,
    /// `None` from this node itself.
    of: Option<IpAddr>,
}

impl Room {
    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a connection of `peer`, if there is one.
    pub(super) fn take(self: &Arc<Self>, peer: IpAddr, is_own: bool) -> Option<Place> {
        let mut taken = self.taken();
        if is_own {
            taken.own = Some(taken.own + 1).filter(|own| *own <= OWN)?;
        } else {
            let has_room = taken.others.values().sum::<usize>() < OTHERS;
            let of_it = taken.others.get(&peer).copied().unwrap_or(0);
            if !has_room || of_it >= OF_ONE {
                return None;
            }
            taken.others.insert(peer, of_it + 1);
        }
        Some(Place {
            room: Arc::clone(self),
            of: (!is_own).then_some(peer),
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.room.taken();
        let Some(peer) = self.of else {
            taken.own -= 1;
            return;
        };
        if let Some(of_it) = taken.others.get_mut(&peer) {
            *of_it -= 1;
            if *of_it == 0 {
                taken.others.remove(&peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_one_address_nor_all_others_take_the_room_of_the_node_itself() {
        let room = Arc::new(Room::default());
        let pod = |number: u8| IpAddr::from([10, 244, 0, number]);
        let mut places: Vec<_> = (0..20).filter_map(|_| room.take(pod(1), false)).collect();
        assert_eq!(places.len(), OF_ONE);
        places.extend((2..100).filter_map(|number| room.take(pod(number), false)));
        assert_eq!(places.len(), OTHERS);
        let own: Vec<_> = (0..100).filter_map(|_| room.take(pod(200), true)).collect();
        assert_eq!(own.len(), OWN);
        drop(places.remove(0));
        assert!(room.take(pod(1), false).is_some(), "a place is free again");
        drop((places, own));
        let taken = room.taken();
        assert_eq!((taken.own, taken.others.len()), (0, 0));
    }
}
