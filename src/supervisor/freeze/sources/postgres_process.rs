//! Whether a PostgreSQL server runs in a data directory, by what the host shows of processes. Blocks.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use crate::core::error::{Error, ErrorCode};
use crate::sys::process;

/// More than the size of a file that names a server's process.
const MOST: u64 = 4096;
/// Inode number of the first process namespace (include/linux/proc_ns.h): all processes are visible in it.
const FIRST_NAMESPACE: u64 = 0xEFFF_FFFC;

/// What is known of a server's process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Process {
    /// None runs.
    Ended,
    /// One runs.
    Runs,
    /// A file names a process, of which the host does not show whether it is the server.
    Unknown,
}

impl Process {
    /// Of a data directory.
    pub fn of(data: &Path) -> Process {
        match named(data) {
            Ok(None) => Process::Ended,
            Ok(Some(id)) if process::works_in(id, data) => Process::Runs,
            // A server works in its data directory; in another namespace it has another number.
            Ok(Some(_)) => match works_in(data) {
                Some(true) => Process::Runs,
                Some(false) if sees_all() => Process::Ended,
                Some(false) | None => Process::Unknown,
            },
            Err(_) => Process::Unknown,
        }
    }

    /// Why nothing is done to a data directory whose server may run.
    pub fn unknown(data: &Path) -> Error {
        let message = format!("{} has a postmaster.pid, but not whether its server runs", data.display());
        Error::new(ErrorCode::Conflict, message)
            .reason("server_unknown")
            .hint("a process of another container is not visible: stop the server; remove the file only if none runs")
    }
}

/// The process that the server's own file names. The server's user may put anything in its place.
fn named(data: &Path) -> io::Result<Option<u32>> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = match File::options().read(true).custom_flags(flags).open(data.join("postmaster.pid")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = Vec::new();
    file.take(MOST).read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    // A server without clients has a negative number.
    let id = text.lines().next().and_then(|line| line.trim().trim_start_matches('-').parse().ok());
    id.map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Whether a process works in this directory; `None`: one of the directory's user cannot be examined.
fn works_in(directory: &Path) -> Option<bool> {
    let wanted = std::fs::metadata(directory).ok()?;
    let mut sees_each = true;
    for entry in std::fs::read_dir("/proc").ok()?.flatten() {
        if !entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        match std::fs::metadata(entry.path().join("cwd")) {
            Ok(place) if (place.dev(), place.ino()) == (wanted.dev(), wanted.ino()) => return Some(true),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                sees_each &= entry.metadata().is_ok_and(|meta| meta.uid() != wanted.uid());
            }
            Ok(_) | Err(_) => {}
        }
    }
    sees_each.then_some(false)
}

fn sees_all() -> bool {
    std::fs::metadata("/proc/self/ns/pid").is_ok_and(|meta| meta.ino() == FIRST_NAMESPACE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_is_found_by_directory() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("postmaster.pid");
        assert_eq!(Process::of(dir.path()), Process::Ended);
        // A process, but not one that works here.
        std::fs::write(&file, format!("{}\n", std::process::id())).expect("written");
        assert_ne!(Process::of(dir.path()), Process::Runs);
        let mut server =
            std::process::Command::new("sleep").arg("60").current_dir(dir.path()).spawn().expect("started");
        // Its number is of another namespace.
        assert_eq!(Process::of(dir.path()), Process::Runs);
        std::fs::remove_file(&file).expect("removed");
        assert_eq!(Process::of(dir.path()), Process::Ended);
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).expect("made");
        assert_eq!(Process::of(dir.path()), Process::Unknown);
        let _ = server.kill();
        let _ = server.wait();
    }
}
