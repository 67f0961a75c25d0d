//! The enclosure of a real sandbox: `sandbox::Init` with its watches. Runs in init.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::enclosure::{Enclosure, EngineParts, KernelMount, ProcessProgram, SandboxedProcess, SnapshotsMemory, Watch};
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::kernel::CrashCause;
use crate::link::types::WorkerUsage;
use crate::sandbox::{
    ActivityProbe, EngineProgram, Exit, Frozen, Init, KernelEntry, KernelFolder, MemoryWatch, MountSource,
    SandboxError, Verdict, WorkspaceWatch,
};
use crate::sys::process;

/// Time for an interrupted execution to end before the workspace is counted again.
const NEXT_LOOK: Duration = Duration::from_millis(500);
/// Longest pause between two checks.
const SLOWEST: Duration = Duration::from_secs(5);

/// A watch and its next due time.
struct Due<W> {
    watch: W,
    at: Instant,
}

/// The sandbox around one engine.
pub struct Sandboxed {
    init: Init,
    engine: EngineName,
    pid: i32,
    memory: Option<Due<MemoryWatch>>,
    /// Whether RLIMIT_DATA stands in for a memory cgroup.
    memory_by_rlimit: bool,
    workspace: Option<Due<WorkspaceWatch>>,
    activity: ActivityProbe,
    /// Workspace counts due because something has run.
    rounds_due: u8,
    frozen: Option<Frozen>,
}

impl Sandboxed {
    /// Starts the engine in the sandbox. Init must have one thread.
    ///
    /// # Errors
    /// The layer that failed.
    pub fn start(
        mut init: Init,
        engine: EngineName,
        program: EngineProgram,
    ) -> Result<(Sandboxed, EngineParts), SandboxError> {
        let process = init.spawn_engine(program)?;
        let parts = EngineParts {
            pid: process.pid,
            pidfd: process.pidfd,
            control: process.control.into(),
            stdout: process.stdout,
            stderr: process.stderr,
        };
        let now = Instant::now();
        let memory = Some(Due { watch: MemoryWatch::new(&init), at: now });
        let memory_by_rlimit = !init.has_memory_cgroup();
        let workspace = watch_workspace(&init, now);
        Ok((
            Sandboxed {
                init,
                engine,
                pid: parts.pid,
                memory,
                memory_by_rlimit,
                workspace,
                activity: ActivityProbe::default(),
                rounds_due: 0,
                frozen: None,
            },
            parts,
        ))
    }

    /// Gives a sandbox that was prepared without a kernel the folder of one: a detached mount, and its path. `unbound`: it
    /// becomes a warm worker's. Returns the folder as init sees it.
    ///
    /// # Errors
    /// As [`Init::enter_kernel`].
    pub fn take_folder(
        &mut self,
        (tree, path): (OwnedFd, PathBuf),
        hostname: String,
        unbound: bool,
    ) -> Result<PathBuf> {
        let protected = vec![path.clone()];
        let dir = MountSource::Tree { tree, shows: path };
        let folder = Some(KernelFolder { dir, own_workspace: "workspace".into(), workspace: None });
        self.enter_kernel(KernelEntry { folder, hostname, protected }, Vec::new())?;
        if unbound {
            self.init.leave_unbound();
        }
        Ok(self.init.kernel_dir())
    }

    /// Whether a count of the workspace is in progress.
    fn is_counting(&self) -> bool {
        self.workspace.as_ref().is_some_and(|due| due.watch.is_counting())
    }

    /// Whether the host kernel killed a process for lack of memory.
    fn oom_killed(&self) -> bool {
        let Some(cgroup) = self.init.cgroup_path() else { return false };
        let events = std::fs::read_to_string(cgroup.join("engine/memory.events"))
            .or_else(|_| std::fs::read_to_string(cgroup.join("memory.events")))
            .unwrap_or_default();
        let killed = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        killed.and_then(|count| count.trim().parse::<u64>().ok()).is_some_and(|count| count > 0)
    }
}

fn watch_workspace(init: &Init, now: Instant) -> Option<Due<WorkspaceWatch>> {
    let root: OwnedFd = init.open_workspace().ok()?;
    Some(Due { watch: WorkspaceWatch::new(root, init.workspace_limit()), at: now })
}

/// Ticks a watch if due; returns the time of the next tick.
fn tick<W>(due: &mut Option<Due<W>>, look: impl FnOnce(&mut W) -> Verdict, cause: CrashCause) -> Watch {
    let now = Instant::now();
    let Some(due) = due else { return Watch::Within { next: SLOWEST } };
    if due.at <= now {
        match look(&mut due.watch) {
            Verdict::Within { next_ms } => due.at = Instant::now() + Duration::from_millis(next_ms).min(SLOWEST),
            Verdict::Beyond { used, limit, unit } => {
                tracing::info!(used, limit, unit, "a limit is broken");
                due.at = Instant::now() + NEXT_LOOK;
                let may_delete = cause == CrashCause::DiskFull && unit == "bytes";
                return if may_delete { Watch::Full } else { Watch::Beyond(cause) };
            }
        }
    }
    Watch::Within { next: due.at.saturating_duration_since(now) }
}

impl Enclosure for Sandboxed {
    fn layers(&self) -> Vec<String> {
        self.init.report().lines()
    }

    fn signal(&mut self, signal: Signal) {
        // Init reaps the engine, so the id stays the engine's until init has seen its end.
        let _ = kill(Pid::from_raw(self.pid), signal);
    }

    fn kill_all(&mut self) {
        self.init.kill_all();
    }

    fn reap(&mut self) -> Option<Exit> {
        let engine = self.init.reap().into_iter().find(|(pid, _)| *pid == self.pid)?;
        Some(engine.1)
    }

    fn cause_of(&mut self, exit: Exit) -> CrashCause {
        let killed = exit == Exit::Signal(Signal::SIGKILL as i32);
        // Without a cgroup the limit is RLIMIT_DATA, and Rust aborts when an allocation fails.
        let aborted = exit == Exit::Signal(Signal::SIGABRT as i32);
        let no_memory =
            (killed && self.oom_killed()) || (aborted && self.engine == EngineName::Kaish && self.memory_by_rlimit);
        match exit {
            Exit::Signal(_) | Exit::Status(_) if no_memory => CrashCause::OutOfMemory,
            Exit::Signal(signal) => CrashCause::Signalled(signal),
            Exit::Status(status) => CrashCause::Exited(status),
        }
    }

    fn freeze(&mut self) -> Result<()> {
        if self.frozen.is_none() {
            self.frozen = Some(self.init.freeze().map_err(Error::deadline)?);
        }
        Ok(())
    }

    fn thaw(&mut self) {
        if let Some(frozen) = self.frozen.take() {
            self.init.thaw(frozen);
        }
    }

    fn adopt_snapshot(&mut self, pid: i32) -> Result<OwnedFd> {
        if pid == self.pid {
            return Err(Error::refused("it is the engine itself"));
        }
        self.init.adopt_snapshot(pid).map_err(Error::refused)
    }

    fn replace_engine(&mut self, pid: i32, spared: &[i32]) -> Result<Option<Exit>> {
        let ended = self.init.leave_only(pid, spared).map_err(Error::deadline)?;
        self.pid = pid;
        Ok(ended)
    }

    fn snapshots_memory(&mut self, copies: &[i32], enough: u64) -> SnapshotsMemory {
        let (used_bytes, free_bytes) = self.init.snapshots_memory(self.pid, copies, enough);
        SnapshotsMemory { used_bytes, free_bytes }
    }

    fn spawn_process(&mut self, program: ProcessProgram, stdin: Option<OwnedFd>) -> Result<SandboxedProcess> {
        self.init.spawn_process(self.pid, program, stdin).map_err(Error::from)
    }

    fn has_own_loopback(&self) -> bool {
        self.init.has_own_loopback()
    }

    fn open_workspace(&self) -> Result<OwnedFd> {
        self.init.open_workspace().map_err(|error| Error::internal(error.to_string()))
    }

    fn has_activity(&mut self) -> bool {
        // Without a workspace watch no count would ever complete.
        let active = self.activity.has_activity();
        if active && self.workspace.is_some() {
            // A running count may have missed the latest writes.
            self.rounds_due = 1 + u8::from(self.is_counting());
        }
        active || self.rounds_due > 0
    }

    fn watch(&mut self) -> Watch {
        let init = &self.init;
        let memory = tick(&mut self.memory, |watch| watch.tick(init), CrashCause::OutOfMemory);
        let mut counted = false;
        let count = |watch: &mut WorkspaceWatch| {
            let verdict = watch.tick();
            counted = !watch.is_counting();
            verdict
        };
        let workspace = tick(&mut self.workspace, count, CrashCause::DiskFull);
        if counted {
            self.rounds_due = self.rounds_due.saturating_sub(1);
        }
        match (memory, workspace) {
            (Watch::Beyond(cause), _) | (_, Watch::Beyond(cause)) => Watch::Beyond(cause),
            (Watch::Full, _) | (_, Watch::Full) => Watch::Full,
            (Watch::Within { next: one }, Watch::Within { next: other }) => Watch::Within { next: one.min(other) },
        }
    }

    fn stands_still(&self) -> bool {
        u32::try_from(self.pid).is_ok_and(process::is_stopped)
    }

    fn sync_files(&mut self) -> std::io::Result<()> {
        Ok(nix::unistd::syncfs(self.init.open_workspace()?)?)
    }

    fn usage(&mut self) -> WorkerUsage {
        let used = self.init.usage();
        WorkerUsage {
            memory_bytes: used.memory_bytes,
            pids: used.tasks,
            cpu_us: used.cpu_us,
            workspace_bytes: self.workspace.as_ref().map_or(0, |due| due.watch.last_bytes()),
        }
    }

    fn bind(&mut self, path: &Path, source: MountSource, writable: bool) -> Result<()> {
        if self.init.bound().any(|bound| bound == path) {
            return Err(Error::already_exists(format!("something is mounted at {} already", path.display())));
        }
        self.init.bind(source, path, writable).map_err(Error::from)
    }

    fn enter_kernel(&mut self, kernel: KernelEntry, mut mounts: Vec<KernelMount>) -> Result<Option<PathBuf>> {
        let (comes, any) = (kernel.folder.is_some(), !mounts.is_empty());
        self.init.enter_kernel(kernel)?;
        // A mount hides earlier mounts below its place.
        mounts.sort_by_key(|(inside, ..)| inside.components().count());
        for (inside, source, writable) in mounts {
            self.init.bind(source, &inside, writable)?;
        }
        // Without new mounts they are unchanged since their verification.
        if comes || any {
            self.init.look_at_mounts(self.pid)?;
        }
        if !comes {
            return Ok(None);
        }
        self.workspace = watch_workspace(&self.init, Instant::now());
        Ok(Some(self.init.kernel_dir()))
    }

    fn rename(&mut self, hostname: String) -> Result<()> {
        self.init.rename(hostname).map_err(Error::from)
    }

    fn rehearse(&mut self) {
        if let Err(error) = self.init.rehearse(self.pid) {
            tracing::debug!(%error, "binding a kernel was not rehearsed");
        }
    }

    fn bound(&self) -> Vec<String> {
        self.init.bound().map(|path| path.display().to_string()).collect()
    }

    fn unbind(&mut self, path: &Path) -> Result<()> {
        if !self.init.bound().any(|bound| bound == path) {
            return Err(Error::not_found(format!("nothing is mounted at {}", path.display())));
        }
        self.init.unbind(path).map_err(Error::from)
    }
}
