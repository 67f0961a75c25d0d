//! The worker's executable, held open while the daemon runs.
//!
//! An upgrade replaces the file at the path. Daemon and worker must be of one build, so a daemon keeps using the
//! executable that it opened; a new daemon uses the new one.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use tokio::process::Command;
use tokio::sync::Mutex;

use super::spawning::Spawner;

/// An executable that stays the same when its path is replaced.
#[derive(Debug)]
pub struct WorkerProgram {
    path: PathBuf,
    held: OwnedFd,
    spawner: Mutex<Option<Spawner>>,
}

impl WorkerProgram {
    /// Opens the executable at a path.
    ///
    /// # Errors
    /// If the executable cannot be opened.
    pub fn open(path: PathBuf) -> io::Result<WorkerProgram> {
        // `O_PATH`: the file is only executed, and may be replaced, also in place.
        let held = open(&path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(WorkerProgram { path, held, spawner: Mutex::new(None) })
    }

    /// The path at which it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The spawner of workers, once started.
    pub(crate) fn spawner(&self) -> &Mutex<Option<Spawner>> {
        &self.spawner
    }

    /// A command that runs the executable.
    pub(crate) fn command(&self) -> Command {
        // The new process resolves this path before its copy of the descriptor is closed.
        let mut command = Command::new(format!("/proc/self/fd/{}", self.held.as_raw_fd()));
        command.arg0("ryokan-worker");
        command
    }
}
