//! Init: PID 1 of the worker's PID namespace, the trusted side of the sandbox.
//!
//! Owns the mount namespace with the host's tree (N1), the engine's mount namespace by descriptor (N2), and the report of what
//! is in force. Keeps capabilities in its own user namespace only, and cannot be looked into.

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

/// What runs in the sandbox.
#[derive(Debug)]
pub enum EngineProgram {
    /// A program of the tree inside.
    Exec {
        /// Its path and arguments.
        argv: Vec<String>,
        /// Its whole environment.
        env: Vec<(String, String)>,
        /// Becomes its descriptor 4.
        extra_fd: Option<OwnedFd>,
    },
    /// A function of this very program, in a forked child.
    Call {
        /// The function; its descriptors are those of the engine contract.
        entry: fn(Vec<String>) -> !,
        /// What it is given.
        arguments: Vec<String>,
        /// Its whole environment.
        env: Vec<(String, String)>,
    },
}

/// A started engine. Init's ends are close-on-exec and non-blocking.
#[derive(Debug)]
pub struct EngineProcess {
    /// As init sees it.
    pub pid: i32,
    /// Readable once it has ended.
    pub pidfd: OwnedFd,
    /// The other end of its descriptor 3.
    pub control: OwnedFd,
    /// What it writes to 1.
    pub stdout: OwnedFd,
    /// What it writes to 2.
    pub stderr: OwnedFd,
}

/// Where a live mount comes from.
#[derive(Debug)]
pub enum MountSource {
    /// A path of the host's tree without symbolic links, opened with init's own rights.
    Path(PathBuf),
    /// A detached mount that a daemon that is root made, and the path that it shows.
    Tree {
        /// The mount.
        tree: OwnedFd,
        /// What it shows, without symbolic links.
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
    /// The status as shells tell it: 128 and the signal's number for one.
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
    /// The root of its `/tmp` and `/dev/shm`, to ask how full they are.
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
    /// Planned mounts that were taken away since.
    pub(super) unbound: Vec<PathBuf>,
    pub(super) live_count: u64,
    pub(super) engine: Option<EngineTree>,
    /// The engine's files that say what its host is called, open, if that was rehearsed.
    pub(super) host_files: Vec<File>,
    /// The names under which the kernel's folder and a thread's workspace hang in the staging tree.
    pub(super) staged_kernel: &'static str,
    pub(super) staged_shared: &'static str,
    pub(super) kernel_dir: OwnedFd,
}

impl Init {
    /// The first thing that PID 1 does.
    pub(super) fn begin(outer: Outer) -> Result<Init, SandboxError> {
        let Outer { plan, mut report, host_namespaces, staged, cgroup, no_cgroup, protected } = outer;
        set_name("ryokan-init");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>)
            .map_err(failed(Layer::MountNs, "cannot make the mounts our own"))?;
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

    /// What is in force. Complete once an engine runs.
    pub fn report(&self) -> &SandboxReport {
        &self.report
    }

    /// The kernel's folder, by a path that only this process can follow. `engine.db` is in it.
    pub fn kernel_dir(&self) -> PathBuf {
        staging::through(&self.kernel_dir, "")
    }

    /// The database of engine state, by a path that only this process can follow.
    pub fn engine_db_path(&self) -> PathBuf {
        staging::through(&self.kernel_dir, "engine.db")
    }

    /// The workspace, opened for a watch or for walking.
    ///
    /// # Errors
    /// If it is gone.
    pub fn open_workspace(&self) -> std::io::Result<OwnedFd> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        Ok(match (&self.plan.workspace, &self.staging) {
            (None, _) => openat(&self.kernel_dir, &self.plan.own_workspace, flags, Mode::empty())?,
            (Some(_), Some(staging)) => openat(staging, self.staged_shared, flags, Mode::empty())?,
            (Some(workspace), None) => open(workspace, flags, Mode::empty())?,
        })
    }

    /// The workspace by a path of N1.
    pub(super) fn workspace_path(&self) -> PathBuf {
        match (&self.staging, &self.plan.workspace) {
            (Some(staging), None) => staging::through(staging, self.staged_kernel).join(&self.plan.own_workspace),
            (Some(staging), Some(_)) => staging::through(staging, self.staged_shared),
            (None, None) => self.plan.kernel_dir.join(&self.plan.own_workspace),
            (None, Some(workspace)) => workspace.clone(),
        }
    }

    /// How large the workspace may be, bytes.
    pub fn workspace_limit(&self) -> u64 {
        self.plan.limits.workspace_bytes
    }

    /// The cgroup's folder as the host names it, for the daemon to remove after the worker's end.
    pub fn cgroup_path(&self) -> Option<&Path> {
        self.cgroup.as_ref().map(|cgroup| cgroup.path.as_path())
    }

    /// Collects every process that has ended, orphans of the engine's included.
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

    /// Kills everything but init, in one step. The ended processes are still to be collected with [`Init::reap`].
    pub fn kill_all(&self) {
        if self.cgroup.as_ref().is_some_and(Cgroup::kill) {
            return;
        }
        // To PID 1, -1 means every process of the namespace except itself. The host kernel goes through them under a lock
        // that also forks take, so nothing escapes.
        let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
    }
}

/// A `/proc` of our own PID namespace over the host's, in N1.
fn own_proc() -> Result<(), SandboxError> {
    let what = "cannot mount a /proc of our own";
    let proc = new_file_system("proc", &[], NOSUID | NODEV | NOEXEC).map_err(failed(Layer::PidNs, what))?;
    let target = openat(AT_FDCWD, "/proc", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(failed(Layer::PidNs, "cannot open /proc"))?;
    attach(proc.as_fd(), target.as_fd()).map_err(failed(Layer::PidNs, what))
}

/// Checks that each namespace that was to be left has been left.
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
