//! What init needs of the sandbox around the engine. `sandbox::Init` is the real one; tests bring one without a sandbox.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::core::error::{Error, Result};
use crate::core::kernel::CrashCause;
use crate::link::types::WorkerUsage;
pub use crate::sandbox::{Exit, KernelEntry, KernelFolder, MountSource};

/// A started engine.
#[derive(Debug)]
pub struct EngineParts {
    /// Its process.
    pub pid: i32,
    /// Readable once it has ended.
    pub pidfd: OwnedFd,
    /// Its control socket.
    pub control: UnixStream,
    /// What it writes to 1.
    pub stdout: OwnedFd,
    /// What it writes to 2.
    pub stderr: OwnedFd,
}

/// What the watch over memory and workspace found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Watch {
    /// Within the limits; to be called again.
    Within {
        /// After this.
        next: Duration,
    },
    /// A limit is broken: the engine has to go.
    Beyond(CrashCause),
}

/// A mount of a kernel: where inside, from what, and whether the kernel may change it.
pub type KernelMount = (PathBuf, MountSource, bool);

/// What copies of the engine cost, and what is left.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SnapshotsMemory {
    /// Memory that would be free without them, bytes.
    pub used_bytes: u64,
    /// What the kernel could take beside them until its limit, bytes.
    pub free_bytes: u64,
}

/// The sandbox around one engine.
pub trait Enclosure {
    /// The layers in force, one line each.
    fn layers(&self) -> Vec<String>;
    /// Sends a signal to the engine's process.
    fn signal(&mut self, signal: Signal);
    /// Kills everything but init.
    fn kill_all(&mut self);
    /// Collects ended processes; gives the engine's exit if it is among them.
    fn reap(&mut self) -> Option<Exit>;
    /// Why the engine ended, as far as the sandbox knows better than its exit says.
    fn cause_of(&mut self, exit: Exit) -> CrashCause;
    /// Stops everything but init: nothing inside writes until [`Enclosure::thaw`].
    ///
    /// # Errors
    /// `Deadline` if something does not stop; then everything goes on.
    fn freeze(&mut self) -> Result<()>;
    /// Lets everything go on; nothing if nothing is stopped.
    fn thaw(&mut self);
    /// Makes a process that says it is a copy of the engine one that can be woken; gives a descriptor of it. Only what the host kernel says
    /// of it counts.
    ///
    /// # Errors
    /// What it is not.
    fn adopt_snapshot(&mut self, pid: i32) -> Result<OwnedFd> {
        Err(Error::unsupported(format!("process {pid} cannot be a copy here")))
    }
    /// Makes a copy the engine: everything else inside but the `spared` ends. Gives its exit if it ended meanwhile.
    ///
    /// # Errors
    /// `Deadline` if something does not end.
    fn replace_engine(&mut self, pid: i32, _spared: &[i32]) -> Result<Option<Exit>> {
        Err(Error::unsupported(format!("process {pid} cannot become the engine here")))
    }
    /// What copies cost; an upper bound will do if it is at most `enough` and half of what would be free.
    fn snapshots_memory(&mut self, _copies: &[i32], _enough: u64) -> SnapshotsMemory {
        SnapshotsMemory::default()
    }
    /// Puts a kernel's folder and mounts into an enclosure that was made without. Once. If the kernel brought a folder, gives that by a path
    /// for this process.
    ///
    /// # Errors
    /// What the host refuses; the enclosure is of no use then.
    fn enter_kernel(&mut self, kernel: KernelEntry, _mounts: Vec<KernelMount>) -> Result<Option<PathBuf>> {
        Err(Error::unsupported(format!("kernel {} cannot come later here", kernel.hostname)))
    }
    /// Does for nothing what [`Enclosure::enter_kernel`] will do: what that takes is in memory then.
    fn rehearse(&mut self) {}
    /// Whether anything inside has run since this was asked last, or what is used is still being counted.
    fn has_activity(&mut self) -> bool;
    /// Looks at memory and workspace. Called while something runs.
    fn watch(&mut self) -> Watch;
    /// Whether something has stopped the engine's process.
    fn stands_still(&self) -> bool {
        false
    }
    /// What is used now.
    fn usage(&mut self) -> WorkerUsage;
    /// Mounts something.
    ///
    /// # Errors
    /// What the host refuses.
    fn bind(&mut self, path: &Path, source: MountSource, writable: bool) -> Result<()>;
    /// The paths inside at which something of the host's is mounted that the kernel was given.
    fn bound(&self) -> Vec<String>;
    /// Takes a mount away.
    ///
    /// # Errors
    /// `NotFound`, `Busy`.
    fn unbind(&mut self, path: &Path) -> Result<()>;
}
