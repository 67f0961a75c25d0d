//! A kernel's files: its workspace, followed by a [`Workspace`] that goes with the kernel.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use crate::core::checkpoint::WorkspacePart;
use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::core::ids::{Digest, KernelId};
use crate::core::missed::{MissedEntry, UNREADABLE};
use crate::store::{Store, StoreHandle};
use crate::supervisor::checkpoint::quiesce::settle;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::workspace::{
    self, Captured, Collected, Donor, Restored, SharedBatch, Snapshot, Tracker, TreeId, Workspace, WorkspaceError,
    WorkspacePaths,
};

/// The file with what is known of the workspace.
const INDEX: &str = "workspace.index";

/// The workspace of a kernel's workspace, while its holder works with it. Goes back to the kernel when it is dropped.
pub(super) struct Files {
    kernel: Rc<Kernel>,
    store: StoreHandle,
    workspace: Option<Box<dyn Workspace>>,
    durability: Durability,
    _turn: OwnedSemaphorePermit,
}

/// What was captured of the files.
pub(super) struct CapturedFiles {
    pub part: WorkspacePart,
    /// What is not in it.
    pub missed: Vec<MissedEntry>,
    /// For how long nothing inside ran, microseconds.
    pub pause_us: u64,
    /// Files whose content was read.
    pub files_read: u64,
    /// Why everything was looked at; empty: only what changed was.
    pub full_walk: String,
}

impl CapturedFiles {
    /// Of what is not in it, what nobody leaves out on purpose: files that could not be read.
    pub(super) fn unreadable(&self) -> Vec<MissedEntry> {
        self.missed.iter().filter(|missed| missed.reason == UNREADABLE).cloned().collect()
    }
}

impl Files {
    /// The workspace of the kernel's workspace, when its turn comes; opened if there is none yet.
    ///
    /// # Errors
    /// `deadline`; `conflict` if the files are another kernel's and between two states; those of opening it.
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
            let open = host.drivers.of(owner.spec.isolation)?.workspace(places);
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
        // Everything inside may stand still for this: it waits for nobody.
        let done = self.store.run_beside(move |store| {
            let done = work(&mut *workspace, store);
            Ok((workspace, done))
        });
        let (workspace, done) = done.await?;
        self.workspace = Some(workspace);
        Ok(done?)
    }

    /// Reads what changed while the kernel may still write.
    pub async fn prepare(&mut self, objects: &Arc<SharedBatch>) -> Result<()> {
        let objects = Arc::clone(objects);
        self.run(move |workspace, _| workspace.prepare(&*objects)).await
    }

    /// Collects what changed since. Nothing may write.
    pub async fn collect(&mut self, objects: &Arc<SharedBatch>) -> Result<Collected> {
        let objects = Arc::clone(objects);
        self.run(move |workspace, _| workspace.collect(&*objects)).await
    }

    /// Makes a tree of it; the kernel may write again.
    pub async fn finish(&mut self, collected: Collected) -> Result<CapturedFiles> {
        let captured = self.run(move |workspace, _| workspace.finish(collected)).await?;
        if let Some(workspace) = &self.workspace {
            let unwatched = workspace.unwatched().map(|why| format!("; everything is looked at each time: {why}"));
            *self.kernel.capture.borrow_mut() = format!("{}{}", workspace.driver(), unwatched.unwrap_or_default());
        }
        Ok(describe(captured))
    }

    /// What was captured did not become durable.
    pub fn doubt(&mut self) {
        if let Some(workspace) = &mut self.workspace {
            workspace.invalidate();
        }
    }

    /// Makes the workspace what a tree says. Gives how many entries were changed.
    pub async fn restore(&mut self, tree: Digest) -> Result<u64> {
        let durability = self.durability;
        let restored = self.run(move |workspace, store| workspace.restore(TreeId(tree), store, durability)).await?;
        Ok(restored.changed)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // Lost in a panic: the next one opens another, which looks at everything.
        if let Some(workspace) = self.workspace.take() {
            self.kernel.keep_workspace(workspace);
        }
    }
}

fn places(host: &Host, kernel: KernelId) -> WorkspacePaths {
    let paths = host.catalog.kernel_files(kernel);
    WorkspacePaths { staging: paths.staging, index: paths.dir.join(INDEX), workspace: paths.workspace }
}

/// A kernel whose files are given to others, as they were at its last capture.
pub(crate) struct FileDonor {
    kernel: Rc<Kernel>,
    donor: Arc<Donor>,
    /// Whoever writes to them could not be stopped for an instant: it is not tried again.
    is_unsettled: Cell<bool>,
}

/// What files of a kernel's workspace can be given to others: none if it is not sure what is known of them.
///
/// # Errors
/// Those of [`Files::of`].
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
    /// Takes a snapshot where the file system has such, with what was changed in it since the donor's knowledge.
    async fn snapshot(&self, host: &Host, places: WorkspacePaths) -> Result<Option<Snapshot>> {
        let donor = Arc::clone(&self.donor);
        let taken = host.store.run_beside(move |_| Ok(donor.snapshot(&places)));
        let Some(mut snapshot) = taken.await?? else { return Ok(None) };
        if self.is_unsettled.get() {
            return Ok(Some(snapshot));
        }
        let told = async {
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
        match told.await {
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
    /// What its files were made from.
    pub way: &'static str,
    /// Why all of them were looked at; empty: only those that might differ.
    pub full_walk: String,
    /// Its files, as they were made, for who copies them once more. Nobody is told of who reads those, yet: to read the parent's makes its
    /// next checkpoint look at them all.
    pub files: Option<Donor>,
}

/// Fills the workspace of a kernel that nobody knows yet, from the store and from what there is of its files: a copy of those of `like` that
/// was made ahead, or a live workspace.
///
/// # Errors
/// Those of making it; what was made is the caller's to remove.
pub(crate) async fn fill(
    host: &Host,
    kernel: KernelId,
    tree: Digest,
    like: Option<KernelId>,
    giving: Option<&FileDonor>,
) -> Result<Filled> {
    let (places, durability) = (places(host, kernel), host.config.daemon.durability);
    if let Some(spare) = like.and_then(|like| host.prepared.take(like)) {
        let to = places.clone();
        let filled = host.store.run_beside(move |store| {
            let made = spare.become_workspace(TreeId(tree), to, store, durability);
            Ok(made.and_then(|(tracker, restored)| ended(tracker, "prepared_copy", restored)))
        });
        match filled.await? {
            Ok(filled) => return Ok(filled),
            // Nothing depends on one.
            Err(error) => {
                tracing::warn!(%kernel, %error, "a spare workspace could not be used");
                empty(places.clone()).await?;
            }
        }
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

/// Makes a new workspace an empty folder again.
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

/// Keeps what is known of a new workspace, so that its first checkpoint reads nothing again. The tracker does not stay: each is one of
/// the user's few queues.
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
