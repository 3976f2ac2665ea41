//! Contexts as `aya_ebpf::programs` offers them.

use crate::bindings::{__sk_buff, xdp_md};

/// At XDP.
pub struct XdpContext {
    pub ctx: *mut xdp_md,
}

impl XdpContext {
    pub fn new(ctx: *mut xdp_md) -> Self {
        Self { ctx }
    }

    pub fn data(&self) -> usize {
        // SAFETY: valid while the program runs, which is as long as this is used.
        unsafe { (*self.ctx).data as usize }
    }

    pub fn data_end(&self) -> usize {
        // SAFETY: as above.
        unsafe { (*self.ctx).data_end as usize }
    }
}

/// At TC.
pub struct TcContext {
    pub skb: SkBuff,
}

/// What is in it.
pub struct SkBuff {
    pub skb: *mut __sk_buff,
}

impl TcContext {
    pub fn new(skb: *mut __sk_buff) -> Self {
        Self {
            skb: SkBuff { skb },
        }
    }
}
