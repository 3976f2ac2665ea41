//! Several nodes that share the VIP. What clients notice is measured here in fractions of a second, so these run one
//! after the other.

mod failover;
mod keepalived;
mod peers;
mod segment;
mod soak;
mod two_tiers;
