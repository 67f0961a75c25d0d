//! Memory shortage: a trigger on a PSI file, and available memory where there is none.
//!
//! The host kernel fires a trigger while tasks stall for memory
//! (`Documentation/accounting/psi.rst`), so no polling is needed.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

/// Makes a PSI file fire, at most once per `window`, when tasks stalled for `stall` of it. A firing
/// is priority data on the descriptor.
///
/// Without privileges the host kernel accepts only windows that are multiples of two seconds.
///
/// # Errors
/// If the file does not exist or accepts no trigger.
pub fn trigger(file: &Path, stall: Duration, window: Duration) -> io::Result<OwnedFd> {
    let mut opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(file)?;
    // With its terminating zero: the host kernel expects one.
    opened.write_all(format!("some {} {}\0", stall.as_micros(), window.as_micros()).as_bytes())?;
    Ok(OwnedFd::from(opened))
}

/// Whether a PSI file counts the stalls of the whole host. These include control groups that reach a limit of their own.
pub fn is_host_wide(file: &Path) -> bool {
    file == Path::new("/proc/pressure/memory")
}

/// The available share of the host's memory, 0 to 1.
///
/// # Errors
/// If `/proc/meminfo` lacks the figures.
pub fn available() -> io::Result<f64> {
    let text = io::read_to_string(File::open("/proc/meminfo")?)?;
    part_of(&text).ok_or_else(|| io::Error::other("/proc/meminfo has no memory figures"))
}

/// The host's memory, bytes.
///
/// # Errors
/// If `/proc/meminfo` lacks the figure.
pub fn total() -> io::Result<u64> {
    let text = io::read_to_string(File::open("/proc/meminfo")?)?;
    let kib = figure(&text, "MemTotal").ok_or_else(|| io::Error::other("/proc/meminfo has no memory figures"))?;
    Ok(kib as u64 * 1024)
}

fn part_of(meminfo: &str) -> Option<f64> {
    let (all, free) = (figure(meminfo, "MemTotal")?, figure(meminfo, "MemAvailable")?);
    (all > 0.0).then(|| free / all)
}

fn figure(meminfo: &str, key: &str) -> Option<f64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
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
        // A stall cannot exceed its window.
        assert!(trigger(Path::new("/proc/pressure/memory"), window * 2, window).is_err());
    }
}
