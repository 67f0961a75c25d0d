//! The standard error of the daemon's own programs, as a locked file.
//!
//! Each program inherits the file and with it the lock. A daemon that finds the lock taken waits: a program of the former
//! daemon still runs.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// Size from which on the log is emptied, bytes.
const LOG_BYTES: u64 = 1 << 20;
/// Part of the log that an error repeats, bytes.
const SHOWN_BYTES: u64 = 500;
/// Pause between two attempts to lock.
const PAUSE: Duration = Duration::from_millis(20);

/// The locked file.
#[derive(Debug)]
pub struct ProgramLog {
    file: Flock<File>,
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
                Ok(file) => return Ok(Some(ProgramLog { file })),
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
    pub fn begin(&self) -> io::Result<(Stdio, u64)> {
        if self.file.metadata()?.len() > LOG_BYTES {
            self.file.set_len(0)?;
        }
        Ok((Stdio::from(self.file.try_clone()?), self.file.metadata()?.len()))
    }

    /// The place in the log where the next program's text begins.
    pub fn end(&self) -> u64 {
        // The text is for people; a wrong place shows too much of it.
        self.file.metadata().map(|meta| meta.len()).unwrap_or_default()
    }

    /// The beginning of what was written from a place on, as one line.
    pub fn said_since(&self, at: u64) -> String {
        let mut bytes = Vec::new();
        let mut file: &File = &self.file;
        // The text is for people; without it the exit code remains.
        let _ = file.seek(SeekFrom::Start(at)).and_then(|_| file.take(SHOWN_BYTES).read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).trim().replace('\n', "; ")
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
