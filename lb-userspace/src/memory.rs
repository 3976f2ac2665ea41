//! What a long-lived agent keeps of memory that it needed for a moment: loading programs and a large plan take tens of
//! MiB for milliseconds, of which the allocator by itself gives back little.

/// Lets the allocator keep little: one heap for the few threads, and large blocks apart from it. For the start of the process.
pub(crate) fn keep_little() {
    #[cfg(target_env = "gnu")]
    {
        /// Blocks from this size on have pages of their own; as much unused memory is kept at the heap's end.
        const LARGE: i32 = 64 << 10;
        // SAFETY: the library's own parameters.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, 1);
            libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
            libc::mallopt(libc::M_TRIM_THRESHOLD, LARGE);
        }
    }
}

/// Gives back to the system what is unused between blocks in use, too.
pub(crate) fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no block in use is touched.
    unsafe {
        libc::malloc_trim(0);
    }
}
