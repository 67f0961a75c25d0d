//! The standard error of the daemon's own programs, as a locked file.
//!
//! Each program inherits the file and with it the lock. A daemon that finds the lock taken waits: a program of the former
//! daemon still runs.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// Size from which on the log is emptied, unless a program runs, bytes.
const LOG_BYTES: u64 = 1 << 20;
/// Part of the log that an error repeats, bytes.
const SHOWN_BYTES: usize = 500;
/// Pause between two attempts to lock.
const PAUSE: Duration = Duration::from_millis(20);

/// The locked file.
#[derive(Debug)]
pub struct ProgramLog {
    file: Flock<File>,
    /// Programs whose text may still be read.
    running: Arc<AtomicUsize>,
}

/// The place in the log where the text of a program begins. The log is not emptied before it is dropped.
#[derive(Debug)]
pub struct Place {
    at: u64,
    running: Arc<AtomicUsize>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.running.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ProgramLog {
    /// Opens the log, and waits for programs of a former daemon; `None` if one does not end within `wait`. Blocks.
    ///
    /// # Errors
    /// The operating system's errors.
    pub fn open(path: &Path, wait: Duration) -> io::Result<Option<ProgramLog>> {
        use std::os::unix::fs::OpenOptionsExt as _;
        let mut file = File::options().create(true).append(true).read(true).mode(0o600).open(path)?;
        let deadline = Instant::now() + wait;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(file) => return Ok(Some(ProgramLog { file, running: Arc::default() })),
                Err((unlocked, Errno::EWOULDBLOCK)) if Instant::now() < deadline => {
                    file = unlocked;
                    std::thread::sleep(PAUSE);
                }
                Err((_, Errno::EWOULDBLOCK)) => return Ok(None),
                Err((_, error)) => return Err(error.into()),
            }
        }
    }

    /// The standard error of a program, and the place in the log where its text begins.
    ///
    /// # Errors
    /// The operating system's errors.
    pub fn begin(&self) -> io::Result<(Stdio, Place)> {
        let errors = Stdio::from(self.file.try_clone()?);
        if self.running.load(Ordering::Relaxed) == 0 && self.file.metadata()?.len() > LOG_BYTES {
            self.file.set_len(0)?;
        }
        let at = self.file.metadata()?.len();
        self.running.fetch_add(1, Ordering::Relaxed);
        Ok((errors, Place { at, running: Arc::clone(&self.running) }))
    }

    /// The beginning of what was written from a place on, as one line: by that program, and by others that run beside it.
    pub fn said_since(&self, place: &Place) -> String {
        let mut bytes = vec![0; SHOWN_BYTES];
        let (mut read, mut at) = (0, place.at);
        // The text is for people; without it the exit code remains.
        while let Ok(count @ 1..) = self.file.read_at(&mut bytes[read..], at) {
            (read, at) = (read + count, at + count as u64);
        }
        String::from_utf8_lossy(&bytes[..read]).trim().replace('\n', "; ")
    }
}

/// The process group of a program. Dropping it kills the group, unless the program has ended.
#[derive(Debug)]
pub struct RunningGroup(Option<i32>);

impl RunningGroup {
    /// The group that a program leads.
    pub fn of(id: Option<u32>) -> RunningGroup {
        RunningGroup(id.and_then(|id| i32::try_from(id).ok()))
    }

    /// The program has ended: its id may belong to another.
    pub fn ended(&mut self) {
        self.0 = None;
    }
}

impl Drop for RunningGroup {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // It may have ended just now.
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn concurrent_programs_keep_text() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let log = ProgramLog::open(&path, Duration::ZERO).expect("opened").expect("free");
        let write = |errors: Stdio, script: &str| {
            let done = Command::new("/bin/sh").args(["-c", script]).stderr(errors).status();
            assert!(done.expect("it runs").success());
        };
        let (errors, first) = log.begin().expect("begun");
        write(errors, "echo of the first >&2; head -c 1100000 /dev/zero | tr '\\0' x >&2");
        // Larger than its bound, it stays while the first program is read.
        let (errors, second) = log.begin().expect("begun");
        write(errors, "echo of the second >&2");
        assert!(log.said_since(&first).starts_with("of the first"), "{}", log.said_since(&first));
        assert_eq!(log.said_since(&second), "of the second");
        // Reading moves no offset that the programs share.
        assert_eq!(log.said_since(&second), "of the second");
        drop((first, second));
        let (_errors, third) = log.begin().expect("begun");
        assert_eq!((third.at, log.said_since(&third).as_str()), (0, ""));
    }
}
