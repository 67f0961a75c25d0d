//! A sandbox of a warm worker: complete except for the kernel's own folder, name and mounts. Runs
//! in init.
//!
//! ```text
//!  plan.unbound: /workspace is empty ──▶ enter_kernel ──▶ /workspace is the kernel's
//! ```
//!
//! Until then only code of ryokan and the interpreter has run inside, none of a user. A new kernel
//! adopts the sandbox's folder; an existing kernel brings its own.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, open, openat};
use nix::mount::{MntFlags, umount2};
use nix::sys::stat::Mode;
use nix::unistd::sethostname;

use super::bind::{LiveBind, fail, in_engine_tree, open_root, refused, writable_root};
use super::init::{Init, MountSource, proc_file};
use super::layer::{Layer, LayerStatus, SandboxError, failed};
use super::plan::{SandboxPlan, WORKSPACE};
use super::tree::Source;
use super::{staging, tree, tree_etc, verify};
use crate::sys::mount::attach;

/// The kernel's folder in the staging tree, after binding.
const BOUND: &str = "bound";
/// A shared workspace in the staging tree, after binding.
const BOUND_SHARED: &str = "bound-shared";

/// The folder of an existing kernel.
#[derive(Debug)]
pub struct KernelFolder {
    /// The folder.
    pub dir: MountSource,
    /// The folder shown as `/workspace`: a path within it.
    pub own_workspace: PathBuf,
    /// Another folder to show as `/workspace`.
    pub workspace: Option<MountSource>,
}

/// The kernel's part of a sandbox that was built without a kernel.
#[derive(Debug)]
pub struct KernelEntry {
    /// The kernel's folder. None: the kernel adopts the sandbox's folder.
    pub folder: Option<KernelFolder>,
    /// The kernel's host name.
    pub hostname: String,
    /// Further folders that no mount may show, without symbolic links.
    pub protected: Vec<PathBuf>,
}

impl MountSource {
    /// Its path on the host.
    fn shows(&self) -> &Path {
        match self {
            MountSource::Path(path) | MountSource::Tree { shows: path, .. } => path,
        }
    }
}

impl Init {
    /// Gives the sandbox a kernel's folder and name, once. Mounts follow with [`Init::bind`], then
    /// [`Init::look_at_mounts`].
    ///
    /// # Errors
    /// If there is a kernel already or its folder is unreachable. The sandbox is unusable then.
    pub fn enter_kernel(&mut self, kernel: KernelEntry) -> Result<(), SandboxError> {
        if !self.plan.unbound {
            return Err(refused("this sandbox is a kernel's already", "start another worker"));
        }
        let KernelEntry { folder, hostname, protected } = kernel;
        let plan = SandboxPlan { unbound: false, hostname, ..self.plan.clone() };
        let comes = folder.is_some();
        let length_before = self.plan.hostname.len();
        match folder {
            None => {
                plan.check()?;
                self.plan = plan;
            }
            Some(folder) => self.take_over(folder, plan)?,
        }
        self.protected.extend(protected);
        if matches!(self.report.status(Layer::UtsNs), Some(LayerStatus::Enforced { .. })) {
            sethostname(&self.plan.hostname).map_err(failed(Layer::UtsNs, "cannot set the host name"))?;
        }
        let mut files = std::mem::take(&mut self.host_files);
        if let Some(engine) = self.engine.as_ref().filter(|_| comes || files.is_empty()) {
            let source = Source::Own(self.workspace_path());
            files = in_engine_tree(engine, || {
                let tree = comes.then(|| tree::source(&source, Path::new(WORKSPACE), true)).transpose()?;
                Ok(move || {
                    tree.map(|tree| exchange_workspace(&tree)).transpose()?;
                    host_files()
                })
            })?;
        }
        self.write_host_name(files, length_before)
    }

    /// Lets the sandbox be entered once more: it has its folder, and no kernel.
    pub fn leave_unbound(&mut self) {
        self.plan.unbound = true;
    }

    /// Gives the kernel's sandbox another host name: its machine became another kernel's.
    ///
    /// # Errors
    /// If the name is invalid or cannot be set. The old one may be left in part then.
    pub fn rename(&mut self, hostname: String) -> Result<(), SandboxError> {
        let plan = SandboxPlan { hostname, ..self.plan.clone() };
        plan.check()?;
        let length_before = self.plan.hostname.len();
        self.plan = plan;
        if matches!(self.report.status(Layer::UtsNs), Some(LayerStatus::Enforced { .. })) {
            sethostname(&self.plan.hostname).map_err(failed(Layer::UtsNs, "cannot set the host name"))?;
        }
        let files = match &self.engine {
            Some(engine) => in_engine_tree(engine, || Ok(host_files))?,
            None => Vec::new(),
        };
        self.write_host_name(files, length_before)
    }

    fn write_host_name(&self, mut files: Vec<File>, length_before: usize) -> Result<(), SandboxError> {
        // A name that is not shorter overwrites the old one completely.
        let is_shorter = self.plan.hostname.len() < length_before;
        for (file, (path, text)) in files.iter_mut().zip(tree_etc::of_host_name(&self.plan.hostname)) {
            let emptied = if is_shorter { file.set_len(0) } else { Ok(()) };
            let written = emptied.and_then(|()| file.write_all(text.as_bytes()));
            written.map_err(fail(format_args!("cannot write {path}")))?;
        }
        Ok(())
    }

    fn take_over(&mut self, folder: KernelFolder, plan: SandboxPlan) -> Result<(), SandboxError> {
        let KernelFolder { dir, own_workspace, workspace } = folder;
        let plan = SandboxPlan {
            kernel_dir: dir.shows().to_owned(),
            own_workspace,
            workspace: workspace.as_ref().map(|workspace| workspace.shows().to_owned()),
            ..plan
        };
        plan.check()?;
        self.kernel_dir = self.take_folder(dir, BOUND)?;
        if let Some(shared) = workspace {
            self.take_folder(shared, BOUND_SHARED)?;
        }
        (self.staged_kernel, self.staged_shared) = (BOUND, BOUND_SHARED);
        self.plan = plan;
        Ok(())
    }

    /// Compares the engine's mounts with the plan, as its process did before it ran anything.
    ///
    /// # Errors
    /// The first mount that violates the plan.
    pub fn look_at_mounts(&self, engine: i32) -> Result<(), SandboxError> {
        let seen = proc_file(engine, "mountinfo").map_err(fail("cannot read the engine's mounts"))?;
        let mut plan = self.plan.clone();
        plan.mounts.extend(self.live.iter().map(LiveBind::planned));
        verify::judge_mounts(&plan, &seen)
    }

    /// Runs through [`Init::enter_kernel`] without a kernel. Changes nothing, but loads the needed
    /// code and data into memory.
    ///
    /// # Errors
    /// The error that entering would meet.
    pub fn rehearse(&mut self, engine: i32) -> Result<(), SandboxError> {
        if let Some(tree) = &self.engine {
            self.host_files = in_engine_tree(tree, || Ok(|| workspace_inside().and_then(|_| host_files())))?;
        }
        self.look_at_mounts(engine)
    }

    /// Opens a folder of the host: by its path, or in the staging tree, where it lasts as long as
    /// init.
    fn take_folder(&self, source: MountSource, name: &str) -> Result<OwnedFd, SandboxError> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let opened = match (source, &self.staging) {
            (MountSource::Path(path), None) => open(&path, flags, Mode::empty()),
            (MountSource::Tree { tree, .. }, Some(staging)) => {
                staging::hang(staging.as_fd(), name, &tree).map_err(fail("cannot stage the kernel's folder"))?;
                openat(staging, name, flags, Mode::empty())
            }
            (MountSource::Path(_), Some(_)) | (MountSource::Tree { .. }, None) => {
                return Err(refused("a root daemon must send a mount, any other a path", "restart the daemon"));
            }
        };
        opened.map_err(fail("cannot open the kernel's folder"))
    }
}

/// In N2: replaces the empty workspace by the kernel's.
fn exchange_workspace(tree: &OwnedFd) -> Result<(), SandboxError> {
    umount2(WORKSPACE, MntFlags::MNT_DETACH).map_err(fail("cannot detach the empty workspace"))?;
    attach(tree.as_fd(), workspace_inside()?.as_fd()).map_err(fail("cannot mount the workspace"))
}

fn workspace_inside() -> Result<OwnedFd, SandboxError> {
    tree::find(open_root()?.as_fd(), Path::new(WORKSPACE)).map_err(fail("cannot open /workspace inside"))
}

/// In N2: opens the files that contain the host name for writing, in the order of
/// [`tree_etc::of_host_name`].
fn host_files() -> Result<Vec<File>, SandboxError> {
    let bare = writable_root()?;
    let open = |(path, _)| {
        let flags = OFlag::O_WRONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = openat(&bare, tree::relative(Path::new(path)), flags, Mode::empty());
        file.map(File::from).map_err(fail(format_args!("cannot open {path}")))
    };
    tree_etc::of_host_name("").into_iter().map(open).collect()
}
