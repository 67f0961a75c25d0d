//! The plan of a kernel's sandbox: checked data. Pure.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::layer::{Layer, SandboxError};
use crate::core::limits;
use crate::core::spec::{KernelLimits, Net, check_inside_path};

/// The user and group id that code inside sees.
pub const GUEST_ID: u32 = 1000;
/// The name of that user and group.
pub const GUEST_NAME: &str = "guest";
/// Path of every kernel's workspace inside.
pub use crate::core::spec::WORKSPACE;
/// `/tmp` and `/dev/shm` together may fill this fraction of a kernel's memory, as a divisor.
const SCRATCH_SHARE: u64 = 2;
/// Files in `/tmp` and `/dev/shm` per MiB of their size.
const SCRATCH_FILES_PER_MIB: u64 = 256;

/// A file or folder of the host inside the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedMount {
    /// Path inside.
    pub inside: PathBuf,
    /// Path on the host, without symbolic links. A link found when it is opened is refused.
    pub source: PathBuf,
    /// Whether the kernel may write.
    pub writable: bool,
    /// Whether the host's configuration gives it to every kernel; it cannot be unmounted then.
    #[serde(default)]
    pub system: bool,
    /// Whether the owner of its files is mapped to the user that runs the kernel. Otherwise that
    /// user opens the source with its own rights.
    #[serde(default)]
    pub is_mapped: bool,
}

/// The unprivileged user that runs a kernel when the daemon is root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunAs {
    /// User id; never 0.
    pub uid: u32,
    /// Group id; never 0.
    pub gid: u32,
    /// Whether the kernel is root's, so that the configuration may map owners of mounts.
    pub map_root: bool,
}

impl RunAs {
    /// The user that runs a kernel in a virtual machine.
    pub const GUEST: RunAs = RunAs { uid: 1000, gid: 1000, map_root: true };
}

/// The sandbox of one kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxPlan {
    /// Its network access.
    pub net: Net,
    /// Its limits.
    pub limits: KernelLimits,
    /// Its mounts.
    #[serde(default)]
    pub mounts: Vec<PlannedMount>,
    /// Layers that its owner waived.
    #[serde(default)]
    pub degraded: Vec<Layer>,
    /// Needed if the daemon is root, ignored otherwise.
    #[serde(default)]
    pub run_as: Option<RunAs>,
    /// The kernel's own folder.
    pub kernel_dir: PathBuf,
    /// A folder of the host that exists as long as the sandbox and carries a root daemon's staging
    /// tree; none: the kernel's folder. Removing a folder on the host detaches every mount on it,
    /// in all namespaces.
    #[serde(default)]
    pub staged_on: Option<PathBuf>,
    /// Whether the sandbox has no kernel until [`Init::enter_kernel`](super::Init::enter_kernel).
    /// The workspace is then empty, and the starter of the sandbox keeps it read-only.
    #[serde(default)]
    pub unbound: bool,
    /// The folder shown as `/workspace`: a path within the kernel's folder.
    #[serde(default = "workspace")]
    pub own_workspace: PathBuf,
    /// Another folder to show as `/workspace`: the one of the kernel that shares its workspace.
    #[serde(default)]
    pub workspace: Option<PathBuf>,
    /// The host name inside.
    pub hostname: String,
    /// The cgroup v2 folder to create, below one where the daemon may create children; the daemon
    /// removes it.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
    /// Folders hidden from every mount, even of a parent folder: the daemon's data, sockets and
    /// settings, and always the kernel's own folder.
    #[serde(default)]
    pub protected: Vec<PathBuf>,
    /// Files of the system shown in place of others, each by its source and its path inside: the identity of a virtual
    /// machine.
    #[serde(default)]
    pub replaced: Vec<(PathBuf, PathBuf)>,
}

fn workspace() -> PathBuf {
    PathBuf::from("workspace")
}

impl SandboxPlan {
    /// A plan with default limits, no network and no mounts.
    pub fn new(kernel_dir: impl Into<PathBuf>) -> Self {
        SandboxPlan {
            net: Net::None,
            limits: KernelLimits::default(),
            mounts: Vec::new(),
            degraded: Vec::new(),
            run_as: None,
            kernel_dir: kernel_dir.into(),
            staged_on: None,
            unbound: false,
            own_workspace: workspace(),
            workspace: None,
            hostname: String::from("kernel"),
            cgroup: None,
            protected: Vec::new(),
            replaced: Vec::new(),
        }
    }

    /// Checks every rule that does not depend on the host.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn check(&self) -> Result<(), SandboxError> {
        let wrong = |cause: String| Err(SandboxError::new(Layer::PivotRoot, cause).hint("correct the request"));
        if let Some(layer) = self.degraded.iter().find(|layer| !layer.can_be_degraded()) {
            return Err(SandboxError::new(*layer, "this layer can never be left out").hint("take it off the list"));
        }
        if let Some(RunAs { uid: 0, .. } | RunAs { gid: 0, .. }) = self.run_as {
            return Err(SandboxError::new(Layer::RunAs, "kernels never run as root"));
        }
        if !self.kernel_dir.is_absolute() {
            return wrong(format!("kernel folder {:?} is not absolute", self.kernel_dir));
        }
        if !self.own_workspace.components().all(|part| matches!(part, std::path::Component::Normal(_))) {
            return wrong(format!("workspace {:?} is not within the kernel's folder", self.own_workspace));
        }
        if let Some(workspace) = self.workspace.as_ref().filter(|workspace| !workspace.is_absolute()) {
            return wrong(format!("workspace {workspace:?} is not absolute"));
        }
        let name_fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        if self.hostname.is_empty() || self.hostname.len() > limits::NAME_BYTES || !self.hostname.bytes().all(name_fits)
        {
            return wrong(format!(
                "host name {:?} has other characters than letters, digits, '-', '_', '.'",
                self.hostname
            ));
        }
        if self.mounts.len() > limits::MOUNTS {
            return wrong(format!("{} mounts are more than {}", self.mounts.len(), limits::MOUNTS));
        }
        for (i, mount) in self.mounts.iter().enumerate() {
            if let Err(error) = check_inside_path(&mount.inside) {
                return wrong(error.to_string());
            }
            if !mount.source.is_absolute() {
                return wrong(format!("source {:?} is not absolute", mount.source));
            }
            if self.mounts[..i].iter().any(|earlier| earlier.inside == mount.inside) {
                return wrong(format!("{:?} is mounted twice", mount.inside));
            }
        }
        Ok(())
    }

    /// Whether the owner waived that layer.
    pub fn may_lack(&self, layer: Layer) -> bool {
        self.degraded.contains(&layer)
    }

    /// The mounts, each after those that contain it.
    pub fn mounts_outermost_first(&self) -> Vec<&PlannedMount> {
        let mut mounts: Vec<&PlannedMount> = self.mounts.iter().collect();
        mounts.sort_by_key(|mount| mount.inside.components().count());
        mounts
    }

    /// Size of `/tmp` and `/dev/shm` together, bytes.
    pub fn scratch_bytes(&self) -> u64 {
        self.limits.memory_bytes / SCRATCH_SHARE
    }

    /// Files in `/tmp` and `/dev/shm` together.
    pub fn scratch_files(&self) -> u64 {
        (self.scratch_bytes() >> 20).max(1) * SCRATCH_FILES_PER_MIB
    }

    /// Number of processors for the kernel when affinity is the limit.
    pub fn whole_cpus(&self) -> usize {
        usize::try_from(self.limits.cpu_milli.div_ceil(1000)).unwrap_or(1).max(1)
    }

    /// Whether the plan lets the kernel write at that path inside.
    pub fn writable_at(&self, inside: &Path) -> bool {
        const ALWAYS: [&str; 5] = ["/workspace", "/tmp", "/dev/shm", "/dev/pts", "/proc"];
        let ours = self
            .mounts
            .iter()
            .filter(|mount| inside.starts_with(&mount.inside))
            .max_by_key(|mount| mount.inside.components().count());
        match ours {
            Some(mount) => mount.writable,
            None => ALWAYS.iter().any(|root| inside.starts_with(root)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(inside: &str, writable: bool) -> PlannedMount {
        PlannedMount { inside: inside.into(), source: inside.into(), writable, system: false, is_mapped: false }
    }

    #[test]
    fn default_sandbox_plan_is_valid() {
        let plan = SandboxPlan::new("/var/lib/ryokan/kernels/x");
        assert_eq!(plan.check(), Ok(()));
        let json = serde_json::to_string(&plan).unwrap_or_default();
        assert_eq!(serde_json::from_str::<SandboxPlan>(&json).ok(), Some(plan));
    }

    #[test]
    fn invalid_sandbox_plans_are_refused() {
        let refused = |change: fn(&mut SandboxPlan)| {
            let mut plan = SandboxPlan::new("/k");
            change(&mut plan);
            plan.check().is_err()
        };
        assert!(refused(|p| p.kernel_dir = "k".into()));
        assert!(refused(|p| p.own_workspace = "/workspace".into()));
        assert!(refused(|p| p.own_workspace = "../workspace".into()));
        assert!(refused(|p| p.hostname = String::new()));
        assert!(refused(|p| p.hostname = "a b".into()));
        assert!(refused(|p| p.degraded = vec![Layer::Capabilities]));
        assert!(refused(|p| p.run_as = Some(RunAs { uid: 0, gid: 5, map_root: false })));
        assert!(refused(|p| p.run_as = Some(RunAs { uid: 5, gid: 0, map_root: false })));
        assert!(refused(|p| p.mounts = vec![mount("/etc/x", false)]));
        assert!(refused(|p| p.mounts = vec![mount("/a", false), mount("/a", true)]));
    }

    #[test]
    fn nearest_mount_wins() {
        let mut plan = SandboxPlan::new("/k");
        plan.mounts = vec![mount("/workspace/ro", false), mount("/data", true), mount("/data/ro", false)];
        for (path, writable) in [
            ("/workspace", true),
            ("/workspace/ro", false),
            ("/workspace/ro/x", false),
            ("/workspace/rox", true),
            ("/data/x", true),
            ("/data/ro/x", false),
            ("/usr", false),
            ("/", false),
            ("/tmp", true),
        ] {
            assert_eq!(plan.writable_at(Path::new(path)), writable, "{path}");
        }
        let order: Vec<_> = plan.mounts_outermost_first().iter().map(|m| m.inside.clone()).collect();
        assert_eq!(order[0], Path::new("/data"));
    }

    #[test]
    fn fractional_cpus_round_up() {
        for (milli, whole) in [(10, 1), (1000, 1), (1001, 2), (4000, 4)] {
            let mut plan = SandboxPlan::new("/k");
            plan.limits.cpu_milli = milli;
            assert_eq!(plan.whole_cpus(), whole);
        }
    }
}
