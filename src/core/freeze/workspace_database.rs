//! SQLite databases in workspaces: what their first bytes say, without SQLite.
//!
//! The files come from untrusted workspaces. Only the application's own schema number is read: at a fixed place of the
//! file's header, or of the newest committed first page in its write-ahead log.

use serde::{Deserialize, Serialize};

/// Bytes of a file's header.
pub const HEADER: usize = 100;
/// The place of `user_version` in it.
const VERSION: std::ops::Range<usize> = 60..64;
const LOG_HEADER: usize = 32;
const FRAME_HEADER: usize = 24;

/// The ends of the names of files that are looked at.
pub const NAMES: [&str; 4] = [".db", ".db3", ".sqlite", ".sqlite3"];

/// A database in a workspace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkspaceDatabase {
    /// Its path within the workspace.
    pub path: String,
    /// The application's own schema number; 0: the application does not count.
    pub user_version: i64,
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

fn version(page: &[u8]) -> Option<i64> {
    number(page, VERSION.start).map(|version| i64::from(version.cast_signed()))
}

/// The schema number of a database; `None`: it is none.
pub fn user_version(start: &[u8]) -> Option<i64> {
    match start.len() >= HEADER && start.starts_with(b"SQLite format 3\0") {
        true => version(start),
        false => None,
    }
}

/// The schema number in a write-ahead log; `None`: it has no committed first page.
pub fn logged_version(log: &[u8]) -> Option<i64> {
    if number(log, 0)? & !1 != 0x377f_0682 {
        return None;
    }
    let page = usize::try_from(number(log, 8)?).ok().filter(|page| (512..=65536).contains(page))?;
    let salts = log.get(16..24)?;
    let (mut committed, mut pending) = (None, None);
    for frame in log.get(LOG_HEADER..)?.chunks_exact(FRAME_HEADER + page) {
        // What follows is of an earlier log.
        if frame.get(8..16) != Some(salts) {
            break;
        }
        if number(frame, 0)? == 1 {
            pending = version(&frame[FRAME_HEADER..]);
        }
        if number(frame, 4)? != 0 {
            committed = pending.or(committed);
        }
    }
    committed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(version: i32, bytes: usize) -> Vec<u8> {
        let mut page = vec![0; bytes];
        page[..16].copy_from_slice(b"SQLite format 3\0");
        page[VERSION].copy_from_slice(&version.to_be_bytes());
        page
    }

    fn log(frames: &[(u32, u32, &[u8; 8], i32)]) -> Vec<u8> {
        let mut log = vec![0; LOG_HEADER];
        log[..4].copy_from_slice(&0x377f_0683u32.to_be_bytes());
        log[8..12].copy_from_slice(&512u32.to_be_bytes());
        log[16..24].copy_from_slice(b"saltsalt");
        for (number, size, salts, version) in frames {
            log.extend(number.to_be_bytes());
            log.extend(size.to_be_bytes());
            log.extend(*salts);
            log.extend([0u8; 8]);
            log.extend(page(*version, 512));
        }
        log
    }

    #[test]
    fn version_is_read() {
        assert_eq!(user_version(&page(7, HEADER)), Some(7));
        assert_eq!(user_version(&page(-2, 4096)), Some(-2));
        assert_eq!(user_version(&page(7, HEADER)[..HEADER - 1]), None);
        assert_eq!(user_version(&[b'x'; 4096]), None);
    }

    #[test]
    fn log_is_newer() {
        let salts = b"saltsalt";
        assert_eq!(logged_version(&log(&[(1, 3, salts, 4)])), Some(4));
        assert_eq!(logged_version(&log(&[(1, 3, salts, 4), (1, 0, salts, 5), (2, 3, salts, 0)])), Some(5));
        // Neither what is not committed nor an earlier log counts.
        assert_eq!(logged_version(&log(&[(1, 3, salts, 4), (1, 0, salts, 5)])), Some(4));
        assert_eq!(logged_version(&log(&[(2, 3, salts, 4), (1, 3, b"pepperpe", 5)])), None);
        for damaged in [&b""[..], &log(&[])[..20], &[0xff; 5000]] {
            assert_eq!(logged_version(damaged), None);
        }
    }
}
