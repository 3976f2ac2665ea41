//! Which backend a new flow gets: highest random weight (rendezvous hashing).
//!
//! Every candidate's weight depends on the flow and on that candidate's identity alone, so a backend
//! that leaves moves its own flows only, and one that joins takes an even share of everybody's.
//! Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous", 1996.

use crate::layout::{Addr, Candidate, FlowKey, MAX_BACKENDS_PER_PORT, SERVICE_CLIENT_IP, Service};

/// Finalizer of MurmurHash3 (x64): every input bit flips every output bit with probability one half.
#[inline(always)]
const fn mix(mut word: u64) -> u64 {
    word ^= word >> 33;
    word = word.wrapping_mul(0xff51_afd7_ed55_8ccd);
    word ^= word >> 33;
    word = word.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    word ^ (word >> 33)
}

/// Hash of what the choice sees of a flow: the client's address, and unless the service has client
/// affinity also its port, the VIP and the VIP port.
#[inline(always)]
pub fn flow_hash(seed: u64, key: &FlowKey, client_only: bool) -> u64 {
    let hash = absorb(seed, &key.client);
    if client_only {
        return hash;
    }
    let ports = u64::from(key.client_port) << 16 | u64::from(key.port);
    mix(absorb(hash, &key.addr) ^ ports)
}

#[inline(always)]
fn absorb(hash: u64, addr: &Addr) -> u64 {
    let [a, b, c, d] = addr.words();
    let hash = mix(hash ^ (u64::from(a) << 32 | u64::from(b)));
    mix(hash ^ (u64::from(c) << 32 | u64::from(d)))
}

/// Weight of one candidate for one flow: 0, which counts as none, once in 2^64.
#[inline(always)]
pub const fn weight(flow_hash: u64, identity: u32) -> u64 {
    // The odd multiplier (2^64 / golden ratio) spreads identities over the whole word.
    mix(flow_hash ^ (identity as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// What no backend's id is.
pub const NOBODY: u64 = u64::MAX;

/// Every candidate.
pub const EVERYWHERE: u64 = u64::MAX;

/// The backend id of the heaviest of those candidates whose bits are set in `among` and whose id is not `avoid`, or
/// `None` when there is none.
#[inline(always)]
pub fn choose(service: &Service, key: &FlowKey, among: u64, avoid: u64) -> Option<u32> {
    let hash = flow_hash(service.seed, key, service.flags & SERVICE_CLIENT_IP != 0);
    let (mut best, mut best_weight) = (0, 0);
    for at in 0..MAX_BACKENDS_PER_PORT {
        if at as u32 >= service.count {
            break;
        }
        let Candidate { backend, identity } = service.candidates[at];
        // Without a branch, or the verifier would walk every set of candidates that may be among them.
        let is_other = u64::from(u64::from(backend) != avoid);
        let is_among = core::hint::black_box(among >> at & is_other);
        let weight = weight(hash, identity).wrapping_mul(is_among);
        if weight > best_weight {
            best = backend;
            best_weight = weight;
        }
    }
    (best_weight != 0).then_some(best)
}

/// Hash of a name (FNV-1a, 64 bits): the seed of a service.
pub const fn name_hash(name: &str) -> u64 {
    let bytes = name.as_bytes();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut at = 0;
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        at += 1;
    }
    mix(hash)
}

/// Identity of a backend in the choice, from its stable name.
pub const fn identity(name: &str) -> u32 {
    (name_hash(name) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Addr, Candidate};
    use proptest::prelude::*;

    fn v4(a: u8, b: u8, c: u8, d: u8) -> Addr {
        Addr::from_v4_raw(u32::from_ne_bytes([a, b, c, d]))
    }

    fn service(names: &[String]) -> Service {
        let mut candidates = [Candidate::default(); MAX_BACKENDS_PER_PORT];
        for (at, name) in names.iter().enumerate() {
            candidates[at] = Candidate {
                backend: at as u32,
                identity: identity(name),
            };
        }
        Service {
            version: 1,
            id: 0,
            flags: 0,
            seed: name_hash("metal3/ironic"),
            count: names.len() as u32,
            sources: 0,
            local: 0,
            candidates,
            pad_tail: 0,
            version_tail: 1,
        }
    }

    fn names(count: usize) -> Vec<String> {
        (0..count).map(|n| format!("ironic-{n}")).collect()
    }

    fn flows() -> impl Iterator<Item = FlowKey> {
        (0..4u8).flat_map(|host| {
            (1024..=u16::MAX).step_by(7).map(move |port| {
                FlowKey::forward(v4(172, 22, 0, 100 + host), port, v4(172, 22, 0, 2), 6385)
            })
        })
    }

    #[test]
    fn flows_spread_evenly_over_three_to_ten_backends() {
        for count in 3..=10 {
            let service = service(&names(count));
            let mut hits = vec![0_u32; count];
            for key in flows() {
                hits[choose(&service, &key, EVERYWHERE, NOBODY).expect("has backends") as usize] +=
                    1;
            }
            let all = f64::from(hits.iter().sum::<u32>());
            let share = 1.0 / count as f64;
            let sigma = (all * share * (1.0 - share)).sqrt();
            for hit in hits {
                let off = (f64::from(hit) - all * share).abs();
                assert!(
                    off < 5.0 * sigma,
                    "{count} backends: {hit} of {all} is {off} from even"
                );
            }
        }
    }

    #[test]
    fn no_backend_is_no_choice() {
        let key = flows().next().expect("some");
        assert_eq!(choose(&service(&[]), &key, EVERYWHERE, NOBODY), None);
    }

    #[test]
    fn among_some_the_choice_is_that_of_a_service_with_those_alone() {
        let all = service(&names(5));
        for key in flows() {
            let free = choose(&all, &key, EVERYWHERE, NOBODY).expect("has backends");
            let among = choose(&all, &key, 0b01010, NOBODY).expect("has backends");
            assert!(among == 1 || among == 3);
            // Who is heaviest of all is so of every part that has it.
            if free == 1 || free == 3 {
                assert_eq!(among, free);
            }
        }
        assert_eq!(
            choose(&all, &flows().next().expect("some"), 0, NOBODY),
            None
        );
    }

    #[test]
    fn client_affinity_ignores_the_port() {
        let mut service = service(&names(5));
        service.flags = SERVICE_CLIENT_IP;
        let client = v4(172, 22, 0, 100);
        let of_port = |port| {
            choose(
                &service,
                &FlowKey::forward(client, port, v4(172, 22, 0, 2), 6385),
                EVERYWHERE,
                NOBODY,
            )
        };
        let first = of_port(1024);
        assert!((1025..4000).all(|port| of_port(port) == first));
    }

    proptest! {
        #[test]
        fn removing_a_backend_moves_only_its_own_flows(
            count in 2_usize..=10, gone in 0_usize..10, client: u32, ports in prop::collection::vec(any::<u16>(), 64),
        ) {
            let all = names(count);
            let gone = gone % count;
            let mut left = all.clone();
            left.remove(gone);
            let (before, after) = (service(&all), service(&left));
            for port in ports {
                let key = FlowKey::forward(Addr::from_v4_raw(client), port, v4(172, 22, 0, 2), 6180);
                let was = choose(&before, &key, EVERYWHERE, NOBODY).expect("has backends") as usize;
                let is = choose(&after, &key, EVERYWHERE, NOBODY).expect("has backends") as usize;
                if was != gone {
                    prop_assert_eq!(&all[was], &left[is]);
                }
            }
        }
    }
}
