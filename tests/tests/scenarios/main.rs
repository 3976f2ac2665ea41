//! Scenarios with real clients and servers, named for what a user would notice. A file per concern.

mod laboratory;
