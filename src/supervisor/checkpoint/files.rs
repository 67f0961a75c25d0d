//! A kernel's files: its workspace, followed by a [`Workspace`] tracker that belongs to the kernel.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use crate::core::checkpoint::WorkspacePart;
use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::core::ids::{Digest, KernelId};
use crate::core::missed::{MissedEntry, UNREADABLE};
use crate::store::{Store, StoreHandle};
use crate::supervisor::checkpoint::quiesce::settle;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::sharing::CaptureTurn;
use crate::workspace::{
    self, Captured, Collected, Donor, PreparedWorkspace, Restored, SharedBatch, Snapshot, Tracker, TreeId, Workspace,
    WorkspaceError, WorkspacePaths,
};

/// File with the workspace index.
const INDEX: &str = "workspace.index";

/// Exclusive use of a kernel's workspace tracker. Returned to the kernel on drop.
pub(super) struct Files {
    kernel: Rc<Kernel>,
    store: StoreHandle,
    workspace: Option<Box<dyn Workspace>>,
    durability: Durability,
    _turn: CaptureTurn,
}

/// Result of a capture of the files.
pub(super) struct CapturedFiles {
    pub part: WorkspacePart,
    /// Entries that the capture does not include.
    pub missed: Vec<MissedEntry>,
    /// Pause of the code inside, microseconds.
    pub pause_us: u64,
    /// Number of files whose content was read.
    pub files_read: u64,
    /// Reason for a full scan; empty: only changed entries were scanned.
    pub full_walk: String,
}

impl CapturedFiles {
    /// Entries that the capture unintentionally omits: files that could not be read.
    pub(super) fn unreadable(&self) -> Vec<MissedEntry> {
        self.missed.iter().filter(|missed| missed.reason == UNREADABLE).cloned().collect()
    }
}

impl Files {
    /// Acquires the file lock and the workspace tracker; opens the tracker if there is none.
    ///
    /// # Errors
    /// `deadline`; `conflict` if another kernel owns the files and they are between two states; errors of opening the
    /// tracker.
    pub async fn of(host: &Host, kernel: &Rc<Kernel>) -> Result<Files> {
        let turn = kernel.lock_files().await?;
        let owner = kernel.files();
        if owner.id != kernel.id && owner.is_changing() {
            owner.not_in_transition()?;
        }
        let (places, durability) = (places(host, owner.id), host.config.daemon.durability);
        let kept = kernel.take_workspace();
        let store = host.store.clone();
        let mut files = Files { kernel: Rc::clone(kernel), store, workspace: kept, durability, _turn: turn };
        if files.workspace.is_none() {
            let open = host.drivers.of(owner.spec().isolation)?.workspace(places);
            let opened = tokio::task::spawn_blocking(open).await;
            files.workspace = Some(opened.map_err(|error| Error::internal(error.to_string()))??);
        }
        Ok(files)
    }

    async fn run<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut dyn Workspace, &Store) -> std::result::Result<T, WorkspaceError> + Send + 'static,
    ) -> Result<T> {
        let mut workspace = self.workspace.take().ok_or_else(|| Error::internal("the files is gone"))?;
        // The code inside may be frozen meanwhile, so this does not queue.
        let done = self.store.run_beside(move |store| {
            let done = work(&mut *workspace, store);
            Ok((workspace, done))
        });
        let (workspace, done) = done.await?;
        self.workspace = Some(workspace);
        Ok(done?)
    }

    /// Reads changed entries while the kernel may still write.
    pub async fn prepare(&mut self, objects: &Arc<SharedBatch>) -> Result<()> {
        let objects = Arc::clone(objects);
        self.run(move |workspace, _| workspace.prepare(&*objects)).await
    }

    /// Collects the remaining changes. Nothing may write.
    pub async fn collect(&mut self, objects: &Arc<SharedBatch>) -> Result<Collected> {
        let objects = Arc::clone(objects);
        self.run(move |workspace, _| workspace.collect(&*objects)).await
    }

    /// Builds a tree of the collected entries; the kernel may write again.
    pub async fn finish(&mut self, collected: Collected) -> Result<CapturedFiles> {
        let captured = self.run(move |workspace, _| workspace.finish(collected)).await?;
        if let Some(workspace) = &self.workspace {
            let unwatched = workspace.unwatched().map(|why| format!("; everything is looked at each time: {why}"));
            *self.kernel.capture.borrow_mut() = format!("{}{}", workspace.driver(), unwatched.unwrap_or_default());
        }
        Ok(describe(captured))
    }

    /// Invalidates the tracker's knowledge: the capture did not become durable.
    pub fn doubt(&mut self) {
        if let Some(workspace) = &mut self.workspace {
            workspace.invalidate();
        }
    }

    /// Makes the workspace equal to a tree. Returns the number of changed entries.
    pub async fn restore(&mut self, tree: Digest) -> Result<u64> {
        let durability = self.durability;
        let restored = self.run(move |workspace, store| workspace.restore(TreeId(tree), store, durability)).await?;
        Ok(restored.changed)
    }
}

/// Brings files that live elsewhere up to date on this host.
///
/// # Errors
/// Errors of [`Files::of`], and of reading the files.
pub(super) async fn refresh(host: &Host, kernel: &Rc<Kernel>) -> Result<()> {
    Files::of(host, kernel).await?.run(|workspace, _| workspace.refresh()).await
}

impl Drop for Files {
    fn drop(&mut self) {
        // Lost in a panic: the next use opens another tracker, which scans everything.
        if let Some(workspace) = self.workspace.take() {
            self.kernel.keep_workspace(workspace);
        }
    }
}

pub(super) fn places(host: &Host, kernel: KernelId) -> WorkspacePaths {
    let paths = host.catalog.kernel_files(kernel);
    WorkspacePaths { staging: paths.staging, index: paths.dir.join(INDEX), workspace: paths.workspace }
}

/// The bytes that a kernel's files take on their device.
///
/// # Errors
/// `busy` for more files than are counted; those of the device.
pub(crate) async fn used_bytes(host: &Host, kernel: &Kernel) -> Result<u64> {
    let owner = kernel.files();
    host.drivers.of(owner.spec().isolation)?.files(places(host, owner.id)).used_bytes().await
}

/// A kernel whose files are copied to new kernels, as of its last capture.
pub(crate) struct FileDonor {
    kernel: Rc<Kernel>,
    donor: Arc<Donor>,
    /// Set once the writers could not be paused; the snapshot is not tried again.
    is_unsettled: Cell<bool>,
}

/// A donor of the kernel's workspace files; `None` if the tracker's knowledge is uncertain.
///
/// # Errors
/// Errors of [`Files::of`].
pub(crate) async fn donor(host: &Host, kernel: &Rc<Kernel>) -> Result<Option<FileDonor>> {
    let mut files = Files::of(host, kernel).await?;
    let donor = files.run(|workspace, _| workspace.donor()).await?;
    Ok(donor.map(|donor| FileDonor {
        kernel: Rc::clone(kernel),
        donor: Arc::new(donor),
        is_unsettled: Cell::new(false),
    }))
}

impl FileDonor {
    /// Takes a snapshot where the file system supports snapshots, with the changes since the donor's last capture.
    async fn snapshot(&self, host: &Host, places: WorkspacePaths) -> Result<Option<Snapshot>> {
        let donor = Arc::clone(&self.donor);
        let taken = host.store.run_beside(move |_| Ok(donor.snapshot(&places)));
        let Some(mut snapshot) = taken.await?? else { return Ok(None) };
        if self.is_unsettled.get() {
            return Ok(Some(snapshot));
        }
        let reported = async {
            let mut files = Files::of(host, &self.kernel).await?;
            settle(&self.kernel).await?;
            let donor = Arc::clone(&self.donor);
            files
                .run(move |workspace, _| {
                    workspace.report_changes(&donor, &mut snapshot);
                    Ok(snapshot)
                })
                .await
        };
        match reported.await {
            Ok(snapshot) => Ok(Some(snapshot)),
            Err(error) => {
                self.is_unsettled.set(true);
                tracing::debug!(%error, "every file of a snapshot is looked at: what changed since could not be asked");
                Ok(Some(Snapshot::default()))
            }
        }
    }
}

/// How a new kernel's workspace was filled.
#[derive(Default)]
pub(crate) struct Filled {
    /// Source of the files.
    pub way: &'static str,
    /// Reason for a full scan; empty: only entries that might differ were scanned.
    pub full_walk: String,
    /// The new files, as a source of further copies. No tracker watches them yet; reading the parent's files would
    /// make its next checkpoint scan all of them.
    pub files: Option<Donor>,
}

/// Fills the workspace of an unpublished kernel from the store and from existing files: a prepared copy of `like`, or a
/// live workspace.
///
/// # Errors
/// Errors of creating the files; the caller removes what was created.
pub(crate) async fn fill(
    host: &Host,
    kernel: KernelId,
    tree: Digest,
    like: Option<KernelId>,
    giving: Option<&FileDonor>,
) -> Result<Filled> {
    let (places, durability) = (places(host, kernel), host.config.daemon.durability);
    if let Some(spare) = like.and_then(|like| host.prepared.take(like))
        && let Some(filled) = fill_with(host, kernel, tree, spare).await?
    {
        return Ok(filled);
    }
    let snapshot = match giving {
        Some(giving) => giving.snapshot(host, places.clone()).await?,
        None => None,
    };
    let way = match (giving, &snapshot) {
        (Some(_), Some(_)) => "snapshot",
        (Some(_), None) => "copy",
        (None, _) => "store",
    };
    let donor = giving.map(|giving| Arc::clone(&giving.donor));
    let filled = host.store.run_beside(move |store| {
        let donor = donor.as_deref().map(|donor| (donor, snapshot));
        let made = workspace::branch(donor, TreeId(tree), places, store, durability);
        Ok(made.and_then(|(tracker, restored, _)| ended(tracker, way, restored)))
    });
    Ok(filled.await??)
}

/// As [`fill`], from a copy that differs little from the tree, if there is one.
///
/// # Errors
/// As [`fill`].
pub(crate) async fn fill_from(
    host: &Host,
    kernel: KernelId,
    tree: Digest,
    copy: Option<PreparedWorkspace>,
) -> Result<Filled> {
    if let Some(copy) = copy
        && let Some(filled) = fill_with(host, kernel, tree, copy).await?
    {
        return Ok(filled);
    }
    fill(host, kernel, tree, None, None).await
}

/// Puts a prepared copy in the place of an empty workspace and makes it equal to the tree; `None` if that fails, because
/// copies are optional.
async fn fill_with(host: &Host, kernel: KernelId, tree: Digest, copy: PreparedWorkspace) -> Result<Option<Filled>> {
    let (places, durability) = (places(host, kernel), host.config.daemon.durability);
    let to = places.clone();
    let filled = host.store.run_beside(move |store| {
        let made = copy.become_workspace(TreeId(tree), to, store, durability);
        Ok(made.and_then(|(tracker, restored)| ended(tracker, "prepared_copy", restored)))
    });
    match filled.await? {
        Ok(filled) => Ok(Some(filled)),
        Err(error) => {
            tracing::warn!(%kernel, %error, "a spare workspace could not be used");
            empty(places).await?;
            Ok(None)
        }
    }
}

/// Empties a new workspace.
async fn empty(places: WorkspacePaths) -> Result<()> {
    let emptied = tokio::task::spawn_blocking(move || {
        for folder in [&places.workspace, &places.staging] {
            match crate::sys::fs::remove_tree(folder) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&places.workspace)
    });
    let emptied = emptied.await.map_err(|error| Error::internal(error.to_string()))?;
    emptied.map_err(|error| Error::internal(format!("a new workspace could not be emptied: {error}")))
}

/// Keeps the index of a new workspace, so that its first checkpoint reads no file again. The tracker is closed: each
/// one uses one of the user's few notification queues.
fn ended(mut tracker: Tracker, way: &'static str, restored: Restored) -> std::result::Result<Filled, WorkspaceError> {
    tracker.save_made()?;
    let full_walk = restored.stats.full_scan.map(|walk| walk.to_string()).unwrap_or_default();
    Ok(Filled { way, full_walk, files: tracker.into_donor() })
}

fn describe(captured: Captured) -> CapturedFiles {
    let missed = captured.not_captured.iter().map(|missing| MissedEntry {
        key: format!("file/{}", missing.path.display()),
        type_name: "file".into(),
        reason: missing.reason.to_string(),
    });
    CapturedFiles {
        missed: missed.collect(),
        pause_us: captured.stats.pause.as_micros() as u64,
        files_read: captured.stats.read,
        full_walk: captured.stats.full_scan.map(|walk| walk.to_string()).unwrap_or_default(),
        part: WorkspacePart { tree: captured.tree.0, files: captured.entries },
    }
}
