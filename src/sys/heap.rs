//! The allocator's free memory. Called by init and the daemon.

use std::io;

/// Bytes of the allocator's memory in use; `None` where the C library has no figure.
pub fn used_bytes() -> Option<u64> {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: the call takes no pointers and only reads the allocator's own data under its locks.
        let found = unsafe { libc::mallinfo2() };
        Some((found.uordblks + found.hblkhd) as u64)
    }
    #[cfg(not(target_env = "gnu"))]
    None
}

/// Resident anonymous memory of this process, bytes.
///
/// # Errors
/// If `/proc` is missing.
pub fn resident_bytes() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Returns the allocator's free memory to the system.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes no pointers; the allocator takes its own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Makes all threads of this process and its forks share one heap, and large buffers be returned to the system when they
/// are freed. With a heap each, every thread asks the host kernel for pages of its own; by default the first large buffer
/// lets the allocator keep up to 64 MiB of free memory. For processes with one active thread at a time. Does nothing where
/// the C library lacks the settings.
pub fn share() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets numbers of the allocator.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BUFFER_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_FREE_BYTES);
    }
}

/// Size from which a buffer has pages of its own, bytes.
#[cfg(target_env = "gnu")]
const LARGE_BUFFER_BYTES: i32 = 256 << 10;
/// Free memory at the end of the heap that is kept, bytes.
#[cfg(target_env = "gnu")]
const KEPT_FREE_BYTES: i32 = 1 << 20;

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(target_env = "gnu")]
    fn used_bytes_follow_allocations() {
        let before = super::used_bytes().expect("glibc");
        let held: Vec<Box<[u8]>> = (0..1000).map(|_| vec![1; 10_000].into_boxed_slice()).collect();
        assert!(super::used_bytes().expect("glibc") >= before + 5_000_000);
        assert!(super::resident_bytes().expect("proc") > 5_000_000);
        drop(held);
        super::trim();
    }
}
