//! Whether a PostgreSQL server runs in a data directory, by what the host shows of processes. Blocks.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use crate::core::error::{Error, ErrorCode};
use crate::sys::process;

/// More than the size of a file that names a server's process.
const MOST: u64 = 4096;

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
            Ok(Some(_)) => match process::any_works_in(data) {
                Some(true) => Process::Runs,
                Some(false) if process::sees_all() => Process::Ended,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uncertain_files_are_unknown() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("postmaster.pid");
        assert_eq!(Process::of(dir.path()), Process::Ended);
        // A process, but not one that works here.
        std::fs::write(&file, "1\n").expect("written");
        assert_ne!(Process::of(dir.path()), Process::Runs);
        std::fs::remove_file(&file).expect("removed");
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).expect("made");
        assert_eq!(Process::of(dir.path()), Process::Unknown);
    }
}
