//! The outer process: from the spawner's child to init, a sibling that is PID 1 of its own
//! namespaces.
//!
//! Owns the order: steps that need root, then the user, the namespaces, and init. Runs nothing
//! untrusted, and ends as soon as init exists.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid, setsid};

use super::cgroup::{self, Cgroup};
use super::init::Init;
use super::layer::{Layer, LayerStatus, SandboxError, SandboxReport, failed};
use super::plan::{GUEST_ID, SandboxPlan};
use super::staging;
use crate::core::spec::Net;
use crate::sys::namespace::{Forked, fork_sibling};
use crate::sys::process::{close_all_except, exit_now, set_dumpable, set_parent_death_signal};

/// The namespaces in the order of leaving them, each with its layer.
pub(super) const NAMESPACES: [(Layer, CloneFlags, &str); 7] = [
    (Layer::UserNs, CloneFlags::CLONE_NEWUSER, "user"),
    (Layer::MountNs, CloneFlags::CLONE_NEWNS, "mnt"),
    (Layer::PidNs, CloneFlags::CLONE_NEWPID, "pid"),
    (Layer::NetNs, CloneFlags::CLONE_NEWNET, "net"),
    (Layer::IpcNs, CloneFlags::CLONE_NEWIPC, "ipc"),
    (Layer::UtsNs, CloneFlags::CLONE_NEWUTS, "uts"),
    (Layer::CgroupNs, CloneFlags::CLONE_NEWCGROUP, "cgroup"),
];

/// The outer process's results for init.
pub(super) struct Outer {
    /// The plan.
    pub plan: SandboxPlan,
    /// The layers in force so far.
    pub report: SandboxReport,
    /// The host's namespaces by name.
    pub host_namespaces: BTreeMap<String, String>,
    /// Whether the working directory is the staging tree.
    pub staged: bool,
    /// Limits by cgroup, if available.
    pub cgroup: Option<Cgroup>,
    /// Why there is no cgroup though one was planned.
    pub no_cgroup: Option<String>,
    /// Protected folders without symbolic links.
    pub protected: Vec<PathBuf>,
}

/// Leaves the host's namespaces and becomes init. Called by the outer process, which must have one
/// thread. Returns only in init, and on an error in either process.
///
/// Closes descriptors other than 0, 1, 2 and `keep`. `report_pid` is called in the outer process
/// with init's id on the host; then that process exits with status 0, and init is a child of its
/// parent.
///
/// # Errors
/// The layer that the host refuses, with a hint. Nothing untrusted has run.
pub fn enter(plan: &SandboxPlan, keep: &[BorrowedFd<'_>], report_pid: impl FnOnce(i32)) -> Result<Init, SandboxError> {
    plan.check()?;
    let kept: Vec<i32> = [0, 1, 2].into_iter().chain(keep.iter().map(AsRawFd::as_raw_fd)).collect();
    close_all_except(&kept).map_err(failed(Layer::Descriptors, "cannot close what was inherited"))?;
    // Fails only for a process group leader, which is as good.
    let _ = setsid();
    // If the parent dies now, init would have no owner. (A change of user clears this; that only
    // shortens the protection.)
    let _ = set_parent_death_signal(Some(Signal::SIGKILL));
    let mut outer = Outer {
        plan: plan.clone(),
        report: SandboxReport::default(),
        host_namespaces: namespaces()?,
        staged: false,
        cgroup: None,
        no_cgroup: None,
        protected: Vec::new(),
    };
    outer.resolve_protected();
    outer.prepare_cgroup();
    outer.become_user()?;
    outer.leave_namespaces()?;
    match fork_sibling().map_err(failed(Layer::PidNs, "cannot start init"))? {
        Forked::Parent(pid) => {
            report_pid(pid.as_raw());
            exit_now(0);
        }
        Forked::Child => Init::begin(outer),
    }
}

/// The namespaces of this process by name.
pub(super) fn namespaces() -> Result<BTreeMap<String, String>, SandboxError> {
    let mut found = BTreeMap::new();
    for (layer, _, name) in NAMESPACES {
        let link = std::fs::read_link(Path::new("/proc/self/ns").join(name))
            .map_err(failed(layer, "cannot read /proc/self/ns"))?;
        found.insert(name.to_owned(), link.to_string_lossy().into_owned());
    }
    Ok(found)
}

impl Outer {
    fn resolve_protected(&mut self) {
        let folders = self.plan.protected.iter().chain([&self.plan.kernel_dir]).chain(&self.plan.workspace);
        // A missing folder needs no protection.
        self.protected = folders.filter_map(|folder| std::fs::canonicalize(folder).ok()).collect();
    }

    fn prepare_cgroup(&mut self) {
        let Some(path) = &self.plan.cgroup else { return };
        match cgroup::establish(path, &self.plan.limits) {
            Ok(cgroup) => self.cgroup = Some(cgroup),
            // Rlimits and the watchdog then set the limits, and the report says so.
            Err(error) => self.no_cgroup = Some(format!("{}: {error}", path.display())),
        }
    }

    /// Root becomes the kernels' user; any other user stays the same.
    fn become_user(&mut self) -> Result<(), SandboxError> {
        if !Uid::effective().is_root() {
            return Ok(());
        }
        let run_as = self
            .plan
            .run_as
            .ok_or_else(|| SandboxError::new(Layer::RunAs, "ryokan is root, and kernels never run as root"))?;
        staging::stage(&self.plan, run_as)?;
        self.staged = true;
        let (uid, gid) = (Uid::from_raw(run_as.uid), Gid::from_raw(run_as.gid));
        setgroups(&[])
            .and_then(|()| setresgid(gid, gid, gid))
            .and_then(|()| setresuid(uid, uid, uid))
            .map_err(failed(Layer::RunAs, format_args!("cannot become uid {uid} gid {gid}")))?;
        // A change of user removes that user's access to /proc/self, where the id maps are written.
        set_dumpable(true).map_err(failed(Layer::RunAs, "cannot open /proc/self to the new user"))?;
        self.report.enforced(Layer::RunAs, format!("uid {uid} gid {gid}"));
        self.report.enforced(Layer::IdMap, "the kernel's folder belongs to that user, seen from inside only");
        Ok(())
    }

    fn leave_namespaces(&mut self) -> Result<(), SandboxError> {
        let (uid, gid) = (Uid::effective(), Gid::effective());
        let (users, mut others): (Vec<_>, Vec<_>) =
            NAMESPACES.into_iter().partition(|(layer, ..)| *layer == Layer::UserNs);
        self.leave_each(&users)?;
        map_guest(uid, gid).map_err(failed(Layer::UserNs, "cannot map the user"))?;
        self.report.enforced(Layer::UserNs, format!("uid {GUEST_ID} inside is uid {uid} of the host"));
        if self.plan.net == Net::Host {
            others.retain(|(layer, ..)| *layer != Layer::NetNs);
            self.report.enforced(Layer::NetNs, "the host's network, as asked for");
        }
        // All together, or none; leaving each in turn then finds the one that fails.
        let all = others.iter().fold(CloneFlags::empty(), |all, (_, flag, _)| all | *flag);
        if unshare(all).is_err() {
            return self.leave_each(&others);
        }
        others.into_iter().for_each(|(layer, ..)| self.report.enforced(layer, "own"));
        Ok(())
    }

    fn leave_each(&mut self, namespaces: &[(Layer, CloneFlags, &str)]) -> Result<(), SandboxError> {
        for &(layer, flag, name) in namespaces {
            match unshare(flag) {
                Ok(()) => self.report.enforced(layer, "own"),
                Err(error) if self.plan.may_lack(layer) => {
                    self.report.note(layer, LayerStatus::Degraded { why: error.to_string() });
                }
                Err(error) => {
                    return Err(SandboxError::new(layer, format!("cannot leave the host's {name} namespace: {error}")));
                }
            }
        }
        Ok(())
    }
}

/// Maps one user and one group. `setgroups` is disabled first: otherwise code could leave a group
/// whose purpose is to forbid access.
fn map_guest(uid: Uid, gid: Gid) -> std::io::Result<()> {
    std::fs::write("/proc/self/uid_map", format!("{GUEST_ID} {uid} 1"))?;
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/gid_map", format!("{GUEST_ID} {gid} 1"))
}
