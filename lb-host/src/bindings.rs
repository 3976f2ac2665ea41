//! What of the kernel's headers the programs name.

/// A packet at XDP (`linux/bpf.h`, as far as the programs read it): addresses are words of 32 bits.
#[repr(C)]
pub struct xdp_md {
    pub data: u32,
    pub data_end: u32,
}

/// A packet at TC (`linux/bpf.h`), likewise.
#[repr(C)]
pub struct __sk_buff {
    pub len: u32,
    pub vlan_present: u32,
    pub vlan_tci: u32,
    pub data: u32,
    pub data_end: u32,
    pub gso_size: u32,
}

/// `bpf_skb_store_bytes` keeps a sum over the whole packet right.
pub const BPF_F_RECOMPUTE_CSUM: u32 = 1;
/// `bpf_l4_csum_replace` is told of a part of the pseudo-header.
pub const BPF_F_PSEUDO_HDR: u32 = 16;
