//! The node's interfaces as netlink tells of them, and which of them an uplink means.
