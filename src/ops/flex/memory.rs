//! Freed memory stays in the process.
//!
//! A step makes and drops the same large tensors layer after layer. By default glibc returns each
//! of them to the system and gets it back page by page, zeroed: for a 12 MB result that took ten
//! times as long as computing it.

/// Sets malloc's thresholds, once for the whole process. Nothing outside Linux with glibc.
pub fn keep() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            // SAFETY: mallopt takes two integers, locks what it changes, and may be called any time.
            unsafe {
                // Blocks up to 1 GiB come from the heap, and its end is never given back; …
                libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 30);
                libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
                // … nor are the 64 MiB heaps of threads that were there before; …
                libc::mallopt(libc::M_TOP_PAD, 1 << 27);
                // … those that start from now on use the one heap.
                libc::mallopt(libc::M_ARENA_MAX, 1);
            }
        });
    }
}
