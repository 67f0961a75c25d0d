//! The worker's executable, held open for as long as the daemon runs.
//!
//! An upgrade replaces the file that the name leads to. Daemon and worker must be of one build, so a daemon goes on starting the one
//! that it began with; the new one comes with the new daemon.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use tokio::process::Command;
use tokio::sync::Mutex;

use super::spawning::Spawner;

/// An executable that stays the same, whatever happens to its name.
#[derive(Debug)]
pub struct WorkerProgram {
    path: PathBuf,
    held: OwnedFd,
    spawner: Mutex<Option<Spawner>>,
}

impl WorkerProgram {
    /// Opens the executable of that name.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(path: PathBuf) -> io::Result<WorkerProgram> {
        // `O_PATH`: it is to be run, and may be replaced, also in place.
        let held = open(&path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(WorkerProgram { path, held, spawner: Mutex::new(None) })
    }

    /// Where it was.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What spawns it, once it was needed.
    pub(crate) fn spawner(&self) -> &Mutex<Option<Spawner>> {
        &self.spawner
    }

    /// A command that runs it.
    pub(crate) fn command(&self) -> Command {
        // Looked up in the new process, before the descriptor is closed there.
        let mut command = Command::new(format!("/proc/self/fd/{}", self.held.as_raw_fd()));
        command.arg0("ryokan-worker");
        command
    }
}
