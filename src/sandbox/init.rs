//! Init: PID 1 of the worker's PID namespace, the trusted side of the sandbox.
//!
//! Owns the mount namespace with the host's tree (N1), the engine's mount namespace by descriptor
//! (N2), and the report of the layers in force. Has capabilities only in its own user namespace,
//! and cannot be inspected.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, OFlag, open, openat};
use nix::mount::{MsFlags, mount};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::{Mode, umask};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, chdir, sethostname};

use super::bind::LiveBind;
use super::cgroup::Cgroup;
use super::enter::{NAMESPACES, Outer, namespaces};
use super::layer::{Layer, LayerStatus, SandboxError, SandboxReport, failed};
use super::plan::SandboxPlan;
use super::staging;
use crate::core::spec::Net;
use crate::sys::mount::{NODEV, NOEXEC, NOSUID, attach, new_file_system};
use crate::sys::process::{set_dumpable, set_name};

/// The engine's program.
#[derive(Debug)]
pub enum EngineProgram {
    /// A program inside.
    Exec {
        /// Path and arguments.
        argv: Vec<String>,
        /// Its whole environment.
        env: Vec<(String, String)>,
        /// Passed as descriptor 4.
        extra_fd: Option<OwnedFd>,
    },
    /// A function of this program, in a forked child.
    Call {
        /// The function; its descriptors follow the engine contract.
        entry: fn(Vec<String>) -> !,
        /// The function's arguments.
        arguments: Vec<String>,
        /// Its whole environment.
        env: Vec<(String, String)>,
    },
}

/// A started engine. Init's ends are close-on-exec and non-blocking.
#[derive(Debug)]
pub struct EngineProcess {
    /// Its process id in init's namespace.
    pub pid: i32,
    /// Readable once the process has ended.
    pub pidfd: OwnedFd,
    /// The peer of its descriptor 3.
    pub control: OwnedFd,
    /// Read end of its stdout.
    pub stdout: OwnedFd,
    /// Read end of its stderr.
    pub stderr: OwnedFd,
}

/// The source of a mount.
#[derive(Debug)]
pub enum MountSource {
    /// A host path without symbolic links, opened with init's own rights.
    Path(PathBuf),
    /// A detached mount from a root daemon, and its path on the host.
    Tree {
        /// The mount.
        tree: OwnedFd,
        /// Its path on the host, without symbolic links.
        shows: PathBuf,
    },
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// By itself, with this status.
    Status(i32),
    /// By this signal.
    Signal(i32),
}

impl Exit {
    /// The status as in shells: 128 plus the number of a signal.
    pub fn code(self) -> i32 {
        match self {
            Exit::Status(status) => status,
            Exit::Signal(signal) => 128 + signal,
        }
    }
}

/// The engine's side of the mounts.
pub(super) struct EngineTree {
    /// Its mount namespace.
    pub namespace: OwnedFd,
    /// The root of its `/tmp` and `/dev/shm`, to measure them.
    pub scratch: OwnedFd,
}

/// Init. There is one for each worker.
pub struct Init {
    pub(super) plan: SandboxPlan,
    pub(super) report: SandboxReport,
    pub(super) staging: Option<OwnedFd>,
    pub(super) cgroup: Option<Cgroup>,
    pub(super) no_cgroup: Option<String>,
    pub(super) protected: Vec<PathBuf>,
    pub(super) live: Vec<LiveBind>,
    /// Planned mounts that were removed later.
    pub(super) unbound: Vec<PathBuf>,
    pub(super) live_count: u64,
    pub(super) engine: Option<EngineTree>,
    /// The engine's files with the host name, open if a binding was rehearsed.
    pub(super) host_files: Vec<File>,
    /// The names of the kernel's folder and a shared workspace in the staging tree.
    pub(super) staged_kernel: &'static str,
    pub(super) staged_shared: &'static str,
    pub(super) kernel_dir: OwnedFd,
}

impl Init {
    /// The first function of PID 1.
    pub(super) fn begin(outer: Outer) -> Result<Init, SandboxError> {
        let Outer { plan, mut report, host_namespaces, staged, cgroup, no_cgroup, protected } = outer;
        set_name("ryokan-init");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>)
            .map_err(failed(Layer::MountNs, "cannot make the mounts private"))?;
        own_proc()?;
        set_dumpable(false).map_err(failed(Layer::PidNs, "cannot hide init"))?;
        left_behind(&plan, &host_namespaces, &mut report)?;
        umask(Mode::from_bits_truncate(0o022));
        setrlimit(Resource::RLIMIT_CORE, 1, 1).map_err(failed(Layer::Rlimits, "cannot forbid core files"))?;
        if matches!(report.status(Layer::UtsNs), Some(LayerStatus::Enforced { .. })) {
            sethostname(&plan.hostname).map_err(failed(Layer::UtsNs, "cannot set the host name"))?;
        }
        if plan.net == Net::None && matches!(report.status(Layer::NetNs), Some(LayerStatus::Enforced { .. })) {
            crate::sys::net::loopback_up().map_err(failed(Layer::NetNs, "cannot bring the loopback up"))?;
            report.enforced(Layer::NetNs, "own, loopback only");
        }
        let folder = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let (staging, kernel_dir) = if staged {
            let staging =
                open(".", folder, Mode::empty()).map_err(failed(Layer::IdMap, "cannot open the staging tree"))?;
            let kernel = openat(&staging, staging::KERNEL, folder, Mode::empty());
            (Some(staging), kernel)
        } else {
            (None, open(&plan.kernel_dir, folder, Mode::empty()))
        };
        let kernel_dir =
            kernel_dir.map_err(failed(Layer::PivotRoot, format_args!("cannot open {:?}", plan.kernel_dir)))?;
        chdir("/").map_err(failed(Layer::PivotRoot, "cannot leave the staging tree"))?;
        Ok(Init {
            plan,
            report,
            staging,
            cgroup,
            no_cgroup,
            protected,
            live: Vec::new(),
            unbound: Vec::new(),
            live_count: 0,
            engine: None,
            host_files: Vec::new(),
            staged_kernel: staging::KERNEL,
            staged_shared: staging::SHARED,
            kernel_dir,
        })
    }

    /// The layers in force. Complete once an engine runs.
    pub fn report(&self) -> &SandboxReport {
        &self.report
    }

    /// Whether the network namespace is the kernel's own, with nothing but a loopback.
    pub fn has_own_loopback(&self) -> bool {
        let is_own = matches!(self.report.status(Layer::NetNs), Some(LayerStatus::Enforced { .. }));
        is_own && self.plan.net == Net::None
    }

    /// The kernel's folder with `engine.db`, by a path that only this process can follow.
    pub fn kernel_dir(&self) -> PathBuf {
        staging::through(&self.kernel_dir, "")
    }

    /// The engine state database, by a path that only this process can follow.
    pub fn engine_db_path(&self) -> PathBuf {
        staging::through(&self.kernel_dir, "engine.db")
    }

    /// Opens the workspace for a watch or a walk.
    ///
    /// # Errors
    /// If the workspace is gone.
    pub fn open_workspace(&self) -> std::io::Result<OwnedFd> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        Ok(match (&self.plan.workspace, &self.staging) {
            (None, _) => openat(&self.kernel_dir, &self.plan.own_workspace, flags, Mode::empty())?,
            (Some(_), Some(staging)) => openat(staging, self.staged_shared, flags, Mode::empty())?,
            (Some(workspace), None) => open(workspace, flags, Mode::empty())?,
        })
    }

    /// The workspace, by a path in N1.
    pub(super) fn workspace_path(&self) -> PathBuf {
        match (&self.staging, &self.plan.workspace) {
            (Some(staging), None) => staging::through(staging, self.staged_kernel).join(&self.plan.own_workspace),
            (Some(staging), Some(_)) => staging::through(staging, self.staged_shared),
            (None, None) => self.plan.kernel_dir.join(&self.plan.own_workspace),
            (None, Some(workspace)) => workspace.clone(),
        }
    }

    /// The workspace's size limit, bytes.
    pub fn workspace_limit(&self) -> u64 {
        self.plan.limits.workspace_bytes
    }

    /// The cgroup's folder on the host, for the daemon to remove after the worker's end.
    pub fn cgroup_path(&self) -> Option<&Path> {
        self.cgroup.as_ref().map(|cgroup| cgroup.path.as_path())
    }

    /// Whether a cgroup limits memory.
    pub fn has_memory_cgroup(&self) -> bool {
        self.by_cgroup().memory
    }

    /// Reaps every ended process, including the engine's orphans.
    pub fn reap(&self) -> Vec<(i32, Exit)> {
        let mut ended = Vec::new();
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG | WaitPidFlag::__WALL)) {
                Ok(WaitStatus::Exited(pid, status)) => ended.push((pid.as_raw(), Exit::Status(status))),
                Ok(WaitStatus::Signaled(pid, signal, _)) => ended.push((pid.as_raw(), Exit::Signal(signal as i32))),
                Ok(WaitStatus::StillAlive) | Err(_) => return ended,
                Ok(_) => {}
            }
        }
    }

    /// Kills every process but init in one step. [`Init::reap`] collects them.
    pub fn kill_all(&self) {
        if self.cgroup.as_ref().is_some_and(Cgroup::kill) {
            return;
        }
        // From PID 1, -1 means every other process of the namespace. The host kernel iterates under
        // a lock that forks take, too, so no process escapes.
        let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
    }
}

/// Mounts a `/proc` of our own PID namespace over the host's, in N1.
fn own_proc() -> Result<(), SandboxError> {
    let what = "cannot mount a /proc of our own";
    let proc = new_file_system("proc", &[], NOSUID | NODEV | NOEXEC).map_err(failed(Layer::PidNs, what))?;
    let target = openat(AT_FDCWD, "/proc", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(failed(Layer::PidNs, "cannot open /proc"))?;
    attach(proc.as_fd(), target.as_fd()).map_err(failed(Layer::PidNs, what))
}

/// Checks that every namespace that should be left was left.
fn left_behind(
    plan: &SandboxPlan,
    host: &BTreeMap<String, String>,
    report: &mut SandboxReport,
) -> Result<(), SandboxError> {
    let ours = namespaces()?;
    for (layer, _, name) in NAMESPACES {
        let shared = layer == Layer::NetNs && plan.net == Net::Host;
        if !shared && !plan.may_lack(layer) && ours.get(name) == host.get(name) {
            return Err(SandboxError::new(layer, format!("init is still in the host's {name} namespace")));
        }
    }
    if std::process::id() != 1 {
        return Err(SandboxError::new(Layer::PidNs, "init is not the first process of its namespace"));
    }
    report.enforced(Layer::PidNs, "own, init is PID 1 and hidden");
    report.enforced(Layer::MountNs, "own, and another for the engine");
    Ok(())
}

/// Opens a file of init's `/proc`.
pub(super) fn proc_file(pid: i32, name: &str) -> std::io::Result<String> {
    use std::io::Read;
    let mut text = String::new();
    File::open(format!("/proc/{pid}/{name}"))?.take(1 << 20).read_to_string(&mut text)?;
    Ok(text)
}
