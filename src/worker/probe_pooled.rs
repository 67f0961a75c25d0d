//! `ryokan-worker probe --pooled`: binds the kernel to a finished sandbox, as for a warm worker,
//! before the program runs.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use crate::sandbox::{
    EngineProcess, Init, KernelEntry, KernelFolder, MountSource, Owners, PlannedMount, RunAs, SandboxError, SandboxPlan,
};

/// Waits for the kernel, then becomes the program. No user code runs before.
const AWAIT_KERNEL: &str = "read -r go <&3 && cd /workspace && exec \"$@\"";

/// The kernel's part of a plan.
pub(super) struct Kernel {
    plan: SandboxPlan,
    dir: MountSource,
    workspace: Option<MountSource>,
    mounts: Vec<(PlannedMount, MountSource)>,
}

/// Splits a plan into a sandbox on `stand_in` without a kernel, and the kernel's part.
pub(super) fn part(plan: &SandboxPlan, stand_in: &Path) -> Result<(SandboxPlan, Kernel), SandboxError> {
    let (system, own): (Vec<_>, Vec<_>) = plan.mounts.iter().cloned().partition(|mount| mount.system);
    let unbound = SandboxPlan {
        unbound: true,
        kernel_dir: stand_in.to_owned(),
        own_workspace: PathBuf::from("workspace"),
        workspace: None,
        hostname: String::from("slot"),
        mounts: system,
        ..plan.clone()
    };
    let run_as = plan.run_as.filter(|_| nix::unistd::Uid::effective().is_root());
    let owners = Owners::default();
    let source = |path: &Path, run_as: Option<RunAs>| match run_as {
        Some(run_as) => Ok(MountSource::Tree { tree: owners.mapped(path, run_as)?, shows: path.to_owned() }),
        None => Ok(MountSource::Path(path.to_owned())),
    };
    let mut mounts = Vec::with_capacity(own.len());
    for mount in own {
        let source = source(&mount.source, run_as.filter(|_| mount.is_mapped))?;
        mounts.push((mount, source));
    }
    mounts.sort_by_key(|(mount, _)| mount.inside.components().count());
    let kernel = Kernel {
        dir: source(&plan.kernel_dir, run_as)?,
        workspace: plan.workspace.as_deref().map(|shared| source(shared, run_as)).transpose()?,
        mounts,
        plan: plan.clone(),
    };
    Ok((unbound, kernel))
}

/// A program that waits for its kernel.
pub(super) fn waiting(argv: &[String]) -> Vec<String> {
    ["/bin/sh", "-c", AWAIT_KERNEL, "sh"].into_iter().map(String::from).chain(argv.iter().cloned()).collect()
}

impl Kernel {
    /// Descriptors that init must keep open until then.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let mounts = self.mounts.iter().map(|(_, source)| source);
        [&self.dir].into_iter().chain(&self.workspace).chain(mounts).filter_map(|source| match source {
            MountSource::Tree { tree, .. } => Some(tree.as_fd()),
            MountSource::Path(_) => None,
        })
    }

    /// Binds the kernel and starts the program.
    pub(super) fn enter(self, init: &mut Init, engine: &EngineProcess) -> Result<(), SandboxError> {
        let Kernel { plan, dir, workspace, mounts } = self;
        let folders = [Some(&plan.kernel_dir), plan.workspace.as_ref()];
        let protected = folders.into_iter().flatten().filter_map(|folder| folder.canonicalize().ok()).collect();
        let folder = KernelFolder { dir, own_workspace: plan.own_workspace, workspace };
        init.enter_kernel(KernelEntry { folder: Some(folder), hostname: plan.hostname, protected })?;
        for (mount, source) in mounts {
            init.bind(source, &mount.inside, mount.writable)?;
        }
        init.look_at_mounts(engine.pid)?;
        let reported = nix::unistd::write(&engine.control, b"go\n");
        reported.map(drop).map_err(|error| {
            SandboxError::new(crate::sandbox::Layer::Descriptors, format!("cannot signal the program: {error}"))
        })
    }
}
