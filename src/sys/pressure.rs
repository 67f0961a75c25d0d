//! When memory is short: a trigger on a PSI file, and what is free where there is none.
//!
//! A trigger of the host kernel fires while tasks stand still for want of memory (`Documentation/accounting/psi.rst`): nobody looks in
//! vain, and between two firings nothing is done.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

/// Has a PSI file fire, at most once in each `window`, when some task stood still for `stall` of it. The descriptor has priority data then.
///
/// Without privileges the host kernel takes only windows of whole pairs of seconds.
///
/// # Errors
/// If there is no such file, or it takes no trigger.
pub fn trigger(file: &Path, stall: Duration, window: Duration) -> io::Result<OwnedFd> {
    let mut opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(file)?;
    // With its end: the host kernel takes the last byte for it.
    opened.write_all(format!("some {} {}\0", stall.as_micros(), window.as_micros()).as_bytes())?;
    Ok(OwnedFd::from(opened))
}

/// The part of the host's memory that can be had, 0 to 1.
///
/// # Errors
/// If `/proc/meminfo` does not say.
pub fn available() -> io::Result<f64> {
    let text = io::read_to_string(File::open("/proc/meminfo")?)?;
    part_of(&text).ok_or_else(|| io::Error::other("/proc/meminfo does not say how much memory there is"))
}

fn part_of(meminfo: &str) -> Option<f64> {
    let of = |key: &str| -> Option<f64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    let (all, free) = (of("MemTotal")?, of("MemAvailable")?);
    (all > 0.0).then(|| free / all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_parsed() {
        assert_eq!(part_of("MemTotal:       400 kB\nMemFree:  1 kB\nMemAvailable:    100 kB\n"), Some(0.25));
        assert_eq!(part_of("MemTotal:       400 kB\n"), None);
        let here = available().expect("known");
        assert!(here > 0.0 && here < 1.0, "{here}");
    }

    #[test]
    fn psi_trigger_needs_psi_file() {
        let dir = tempfile::tempdir().expect("a folder");
        let (stall, window) = (Duration::from_millis(100), Duration::from_secs(2));
        let absent = trigger(&dir.path().join("memory"), stall, window).map_err(|error| error.kind());
        assert_eq!(absent.map(drop), Err(io::ErrorKind::NotFound));
        trigger(Path::new("/proc/pressure/memory"), stall, window).expect("a trigger");
        // Longer than its window nothing can stand still.
        assert!(trigger(Path::new("/proc/pressure/memory"), window * 2, window).is_err());
    }
}
