//! Who answers on which instance port: slots, given once and kept.
//!
//! A slot is effective only once it is written on the Service, so that agents which see things in
//! another order cannot give one slot to two instances. Indices need no writing: they are the pods' own.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use super::Problem;

/// An instance's name and, where it has one, its index.
pub(super) type Identity = (String, Option<u32>);

/// Slots of one Service.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Slots {
    /// What each instance that is there has now.
    pub effective: BTreeMap<String, u32>,
    /// What is to be written, instances that are away included.
    pub wanted: BTreeMap<String, u32>,
    pub problems: Vec<Problem>,
}

/// Gives slots `0..count` to the instances that are there.
///
/// - An index is the slot, whatever was written.
/// - What is written stays, also for an instance that is away.
/// - Others get the lowest slot that is nobody's; when there is none, the lowest of those that are away.
pub(super) fn assign(
    written: &BTreeMap<String, u32>,
    present: &BTreeSet<Identity>,
    count: u32,
) -> Slots {
    let mut slots = Slots::default();
    let mut owners: BTreeMap<u32, String> = BTreeMap::new();
    for (identity, index) in present {
        let Some(index) = *index else { continue };
        if index >= count {
            slots.problems.push(Problem::SlotOutOfRange {
                identity: identity.clone(),
                index,
                last: count.saturating_sub(1),
            });
            continue;
        }
        match owners.entry(index) {
            Entry::Vacant(free) => {
                free.insert(identity.clone());
                slots.effective.insert(identity.clone(), index);
            }
            Entry::Occupied(owner) => slots.problems.push(Problem::SlotTaken {
                identity: identity.clone(),
                slot: index,
                taken_by: owner.get().clone(),
            }),
        }
    }
    let is_indexed = |name: &str| {
        present
            .iter()
            .any(|(other, index)| other == name && index.is_some())
    };
    for (identity, &slot) in written {
        if slot < count
            && !is_indexed(identity)
            && let Entry::Vacant(free) = owners.entry(slot)
        {
            free.insert(identity.clone());
        }
    }
    let named: BTreeSet<&String> = present.iter().map(|(name, _)| name).collect();
    for (identity, index) in present {
        if index.is_some() {
            continue;
        }
        let has = owners.iter().find(|(_, owner)| *owner == identity);
        if let Some((&slot, _)) = has {
            slots.effective.insert(identity.clone(), slot);
            continue;
        }
        let free = (0..count).find(|slot| !owners.contains_key(slot));
        let away = || (0..count).find(|slot| !named.contains(&owners[slot]));
        let Some(slot) = free.or_else(away) else {
            slots.problems.push(Problem::SlotsExhausted {
                identity: identity.clone(),
                slots: count,
            });
            break;
        };
        owners.insert(slot, identity.clone());
    }
    slots.wanted = owners
        .into_iter()
        .map(|(slot, name)| (name, slot))
        .collect();
    slots
}
