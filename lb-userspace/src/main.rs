//! ironlb.
fn main() {}
