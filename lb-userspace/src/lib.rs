//! The agent and command line of ironlb, as a library for the binary and for tests.
//!
//! A pipeline of plain values, each arrow a module:
//! `source (file | Kubernetes) → DesiredState → plan (pure) → TableSet → dataplane (maps)`.

pub mod agent;
pub mod capture;
pub mod cli;
pub mod config;
pub mod dataplane;
pub mod desired;
pub mod doctor;
pub mod ended;
pub mod ethtool;
pub mod health;
pub mod http;
pub mod interfaces;
pub mod kubernetes;
mod memory;
pub mod netdev;
pub mod observed;
pub mod packet;
pub mod peers;
pub mod plan;
pub mod source;
pub mod tables;

/// The eBPF object that the programs are loaded from.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/ironlb-bpf"));

/// The eBPF object that the bench runs [`OBJECT`]'s programs with; nothing else refers to it.
pub static BENCH_OBJECT: &[u8] =
    aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/ironlb-bench-bpf"));
