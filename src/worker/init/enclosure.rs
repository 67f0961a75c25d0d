//! The interface between init and the sandbox around the engine. `Sandboxed` implements it; tests
//! use one without a sandbox.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::core::error::{Error, Result};
use crate::core::kernel::CrashCause;
use crate::link::types::WorkerUsage;
pub use crate::sandbox::{
    Exit, KernelEntry, KernelFolder, MountSource, NotRun, ProcessProgram, ProcessStreams, ProcessTree,
    SandboxedProcess, TreeEnd,
};

/// A started engine.
#[derive(Debug)]
pub struct EngineParts {
    /// Its process.
    pub pid: i32,
    /// Readable once the process has ended.
    pub pidfd: OwnedFd,
    /// Its control socket.
    pub control: UnixStream,
    /// Read end of its stdout.
    pub stdout: OwnedFd,
    /// Read end of its stderr.
    pub stderr: OwnedFd,
}

/// Result of checking memory and workspace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Watch {
    /// Within the limits.
    Within {
        /// Time until the next check.
        next: Duration,
    },
    /// A limit was exceeded: the engine must end.
    Beyond(CrashCause),
    /// The workspace exceeds its size limit: the execution must end, and code may run to delete files.
    Full,
}

/// A mount of a kernel: path inside, source, and whether the kernel may write.
pub type KernelMount = (PathBuf, MountSource, bool);

/// Memory of the engine's forked snapshots, and free memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SnapshotsMemory {
    /// Memory that ending them would free, bytes.
    pub used_bytes: u64,
    /// Memory that the kernel may still take beside them, bytes.
    pub free_bytes: u64,
}

/// The sandbox around one engine.
pub trait Enclosure {
    /// The layers in force, one line each.
    fn layers(&self) -> Vec<String>;
    /// Sends a signal to the engine's process.
    fn signal(&mut self, signal: Signal);
    /// Kills every process but init.
    fn kill_all(&mut self);
    /// Reaps ended processes; returns the engine's exit if it is among them.
    fn reap(&mut self) -> Option<Exit>;
    /// Derives the crash cause from the exit and the sandbox's own facts.
    fn cause_of(&mut self, exit: Exit) -> CrashCause;
    /// Stops every process but init until [`Enclosure::thaw`].
    ///
    /// # Errors
    /// `Deadline` if a process does not stop; then all resume.
    fn freeze(&mut self) -> Result<()>;
    /// Resumes the stopped processes, if any.
    fn thaw(&mut self);
    /// Validates a process as a forked snapshot of the engine, by the host kernel's facts alone,
    /// and opens it.
    ///
    /// # Errors
    /// The violated condition.
    fn adopt_snapshot(&mut self, pid: i32) -> Result<OwnedFd> {
        Err(Error::unsupported(format!("process {pid} cannot be a snapshot here")))
    }
    /// Makes a snapshot the engine: every process inside but the `spared` ends. Returns the
    /// snapshot's exit if it ended meanwhile.
    ///
    /// # Errors
    /// `Deadline` if a process does not end.
    fn replace_engine(&mut self, pid: i32, _spared: &[i32]) -> Result<Option<Exit>> {
        Err(Error::unsupported(format!("process {pid} cannot become the engine here")))
    }
    /// Memory of the snapshots. An upper bound suffices if it is at most `enough` and half of the
    /// free memory without them.
    fn snapshots_memory(&mut self, _copies: &[i32], _enough: u64) -> SnapshotsMemory {
        SnapshotsMemory::default()
    }
    /// Gives an enclosure without a kernel its folder and mounts, once. Returns the folder of an
    /// existing kernel by a path for this process.
    ///
    /// # Errors
    /// The host's errors; the enclosure is unusable then.
    fn enter_kernel(&mut self, kernel: KernelEntry, _mounts: Vec<KernelMount>) -> Result<Option<PathBuf>> {
        Err(Error::unsupported(format!("kernel {} cannot be bound here", kernel.hostname)))
    }
    /// Gives the kernel another host name.
    ///
    /// # Errors
    /// The host's errors.
    fn rename(&mut self, hostname: String) -> Result<()> {
        Err(Error::unsupported(format!("the host name cannot become {hostname} here")))
    }
    /// Rehearses [`Enclosure::enter_kernel`], so that its code and data are in memory.
    fn rehearse(&mut self) {}
    /// Starts a program beside the engine, in its sandbox. Without `stdin` its input is empty.
    ///
    /// # Errors
    /// The layer that failed; nothing of the program has run then.
    fn spawn_process(&mut self, program: ProcessProgram, _stdin: Option<OwnedFd>) -> Result<SandboxedProcess> {
        Err(Error::unsupported(format!("{:?} cannot run beside the engine here", program.argv.first())))
    }
    /// Opens the workspace, to write its files to the disk.
    ///
    /// # Errors
    /// If there is none.
    fn open_workspace(&self) -> Result<OwnedFd> {
        Err(Error::unsupported("there is no workspace here"))
    }
    /// Whether this process and everything inside share a loopback of their own, without the host.
    fn has_own_loopback(&self) -> bool {
        false
    }
    /// Whether anything inside has run since the last call, or resource usage is still being
    /// counted.
    fn has_activity(&mut self) -> bool;
    /// Checks memory and workspace. Called while something runs.
    fn watch(&mut self) -> Watch;
    /// Whether the engine's process is stopped.
    fn stands_still(&self) -> bool {
        false
    }
    /// Writes the workspace's files to the disk. Blocks for what was written lately only.
    ///
    /// # Errors
    /// The disk's.
    fn sync_files(&mut self) -> std::io::Result<()> {
        Ok(())
    }
    /// Current resource usage.
    fn usage(&mut self) -> WorkerUsage;
    /// Adds a mount.
    ///
    /// # Errors
    /// The host's errors.
    fn bind(&mut self, path: &Path, source: MountSource, writable: bool) -> Result<()>;
    /// The paths inside with mounts from the host.
    fn bound(&self) -> Vec<String>;
    /// Removes a mount.
    ///
    /// # Errors
    /// `NotFound`, `Busy`.
    fn unbind(&mut self, path: &Path) -> Result<()>;
}
