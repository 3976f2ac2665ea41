//! Many entries of a map in one system call, which aya has no function for: a call for each costs more than all the rest
//! of a large plan.

use std::io;
use std::mem::size_of_val;
use std::os::fd::{AsFd as _, AsRawFd as _};

use aya::maps::MapData;
use aya::sys::SyscallError;
use aya_obj::generated::bpf_attr__bindgen_ty_3 as BatchAttributes;

/// `BPF_MAP_UPDATE_BATCH` of `linux/bpf.h`, in Linux 5.6 and later.
const MAP_UPDATE_BATCH: libc::c_int = 26;

/// Writes entries, whose keys and values are as many, in their order. On an error so many of them, from the first on,
/// are written.
pub(super) fn update<K: aya::Pod, V: aya::Pod>(
    map: &MapData,
    keys: &[K],
    values: &[V],
) -> Result<(), (usize, SyscallError)> {
    let count = keys.len().min(values.len());
    let mut attributes = BatchAttributes {
        in_batch: 0,
        out_batch: 0,
        keys: keys.as_ptr() as u64,
        values: values.as_ptr() as u64,
        count: count as u32,
        map_fd: map.fd().as_fd().as_raw_fd() as u32,
        elem_flags: 0,
        flags: 0,
    };
    // SAFETY: keys and values are at least as many as said, of the sizes that the map was checked to have when it was opened.
    let done = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            MAP_UPDATE_BATCH,
            &raw mut attributes,
            size_of_val(&attributes),
        )
    };
    match done {
        0 => Ok(()),
        _ => {
            let error = SyscallError {
                call: "bpf_map_update_batch",
                io_error: io::Error::last_os_error(),
            };
            // What the kernel turns down as a whole it does not count.
            let written = attributes.count as usize;
            Err((if written == count { 0 } else { written }, error))
        }
    }
}
