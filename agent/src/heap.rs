//! The C library's heap: what the recorder freed goes back to the kernel.
//!
//! A finished file of the log gives back tens of MiB at once, in pieces. Left alone, glibc keeps them
//! and puts the next ones elsewhere, and the recorder's memory rises for a long time though nothing
//! more is in use: beside a training job every MiB is somebody else's.

/// Bytes from which on a block has pages of its own, that are gone when it is freed, and none where
/// it was never written. glibc begins with twice this and raises it up to 32 MiB as such blocks are
/// freed, unless it is told (mallopt(3), `M_MMAP_THRESHOLD`). The Parquet writer takes 1 MiB and
/// 94 KiB (zstd's state to decompress) for every column and writes to little of it: taken from memory
/// that was used before, they would keep it.
#[cfg(target_env = "gnu")]
const OWN_PAGES_BYTES: i32 = 64 << 10;

/// Settles how blocks are taken. Call it once, before a recording starts.
pub fn settle() {
    #[cfg(target_env = "gnu")]
    // SAFETY: glibc has mallopt, which sets a number of its own under its own lock.
    if unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_PAGES_BYTES) } == 0 {
        tracing::debug!("the heap's threshold was not taken");
    }
}

/// Gives free pages of all threads' heaps back. It takes milliseconds in which other threads may wait
/// for memory: call it now and then, from a thread that has time.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: glibc has malloc_trim, which touches free pages only, under the heaps' locks.
    unsafe {
        libc::malloc_trim(0);
    }
}
