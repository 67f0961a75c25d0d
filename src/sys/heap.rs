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
