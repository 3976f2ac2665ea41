//! Whether what native XDP sends out of a veth arrives: a peer without NAPI loses all of it, silently.
//!
//! veth counts XDP_TX that failed. A redirect that the kernel refuses is a drop of the receive queue (since
//! Linux 6.3, where a device says whether it takes redirected frames: `__xdp_enqueue`). Before, it is
//! a redirect that never arrives.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tracing::debug;

use crate::dataplane::AttachedMode;
use crate::ethtool;
use crate::observed::Observed;

/// How often the counters are read.
const PERIOD: Duration = Duration::from_secs(2);

/// Counters of a device, over all its queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sent {
    /// XDP_TX that failed, and redirects that were refused.
    errors: u64,
    /// Frames that the program redirected.
    redirected: u64,
    /// Redirected frames that reached the other end.
    arrived: u64,
}

impl Sent {
    /// From the names that veth gives to its counters; other drivers have none of them.
    fn new(counters: &BTreeMap<String, u64>) -> Self {
        let sum = |direction: &str, what: &str| {
            let mine = counters.iter().filter(|(name, _)| {
                let queue = name
                    .strip_prefix(direction)
                    .and_then(|rest| rest.strip_suffix(what));
                queue.is_some_and(|queue| queue.bytes().all(|byte| byte.is_ascii_digit()))
            });
            mine.map(|(_, value)| value).sum()
        };
        Self {
            errors: sum("rx_queue_", "_xdp_tx_errors") + sum("rx_queue_", "_drops"),
            redirected: sum("rx_queue_", "_xdp_redirect"),
            arrived: sum("tx_queue_", "_xdp_xmit"),
        }
    }

    /// Frames lost since an earlier look. Redirects count only if none at all arrived: others may
    /// redirect to this device too.
    fn lost_since(self, earlier: Self) -> u64 {
        let redirected = self.redirected.saturating_sub(earlier.redirected);
        let lost = match self.arrived.saturating_sub(earlier.arrived) {
            0 => redirected,
            _ => 0,
        };
        lost + self.errors.saturating_sub(earlier.errors)
    }
}

/// Watches the interfaces that native XDP is attached to, for ever.
pub(super) async fn watch(observed: Arc<Observed>) {
    let mut earlier: BTreeMap<u32, Sent> = BTreeMap::new();
    let mut round = interval(PERIOD);
    round.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        round.tick().await;
        let mut present = BTreeMap::new();
        for attachment in observed.attachments() {
            if attachment.mode != AttachedMode::Native {
                continue;
            }
            let sent = match ethtool::counters(&attachment.interface) {
                Ok(counters) => Sent::new(&counters),
                Err(error) => {
                    debug!(%error, "cannot read the counters of {}", attachment.interface);
                    continue;
                }
            };
            if let Some(earlier) = earlier.get(&attachment.ifindex) {
                match sent.lost_since(*earlier) {
                    0 => {}
                    frames => observed.lost(&attachment.interface, frames),
                }
            }
            present.insert(attachment.ifindex, sent);
        }
        earlier = present;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn veth(errors: u64, redirected: u64, arrived: u64) -> Sent {
        let counters = [
            ("peer_ifindex", 2),
            ("rx_queue_0_xdp_packets", 99),
            ("rx_queue_0_drops", 30),
            ("rx_queue_0_xdp_drops", 44),
            ("rx_queue_0_xdp_tx_errors", errors),
            ("rx_queue_1_xdp_tx_errors", 0),
            ("rx_queue_0_xdp_redirect", redirected),
            ("tx_queue_0_xdp_xmit", arrived),
            ("tx_queue_0_xdp_xmit_errors", 55),
        ];
        let counters = counters.map(|(name, value)| (name.to_owned(), value));
        Sent::new(&BTreeMap::from(counters))
    }

    #[test]
    fn what_does_not_arrive_is_lost() {
        assert_eq!(
            veth(1, 2, 3),
            Sent {
                errors: 31,
                redirected: 2,
                arrived: 3
            }
        );
        assert_eq!(veth(0, 10, 10).lost_since(veth(0, 4, 4)), 0);
        assert_eq!(veth(0, 10, 4).lost_since(veth(0, 4, 4)), 6);
        assert_eq!(veth(7, 0, 0).lost_since(veth(5, 0, 0)), 2);
        // A device that was made anew counts from zero.
        assert_eq!(veth(0, 0, 0).lost_since(veth(5, 5, 5)), 0);
        assert_eq!(Sent::new(&BTreeMap::new()), Sent::default());
    }
}
