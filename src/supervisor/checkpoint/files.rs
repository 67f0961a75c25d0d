//! A kernel's files: its workspace, followed by a [`Tracker`] that goes with the kernel.

use std::rc::Rc;

use crate::core::checkpoint::WorkspacePart;
use crate::core::error::{Error, Result};
use crate::core::ids::Digest;
use crate::core::info::MissedEntry;
use crate::store::{Store, StoreHandle};
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::workspace::{Captured, Collected, Durable, Places, Tracker, TreeId, WorkspaceError};

/// The folder beside the workspace in which files are prepared, and the file with what is known of the workspace.
const STAGING: &str = "staging";
const INDEX: &str = "workspace.index";

/// The tracker of a kernel's workspace, while its holder works with it. Goes back to the kernel when it is dropped.
pub(super) struct Files {
    kernel: Rc<Kernel>,
    store: StoreHandle,
    tracker: Option<Box<Tracker>>,
    durable: Durable,
    /// What was read for a tree that is not there yet: nothing names it.
    unnamed: bool,
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

impl Files {
    /// The kernel's tracker; opened if there is none yet.
    pub async fn of(host: &Host, kernel: &Rc<Kernel>) -> Result<Files> {
        let durable = if host.config.power_safe { Durable::Power } else { Durable::Process };
        let mut files =
            Files { kernel: Rc::clone(kernel), store: host.store.clone(), tracker: None, durable, unnamed: false };
        let kept = kernel.tracker.borrow_mut().take();
        files.tracker = match kept {
            Some(tracker) => Some(tracker),
            None => {
                let paths = host.catalog.kernel_files(kernel.id);
                let places = Places {
                    staging: paths.dir.join(STAGING),
                    index: paths.dir.join(INDEX),
                    workspace: paths.workspace,
                };
                let opened = tokio::task::spawn_blocking(move || Tracker::open(places)).await;
                Some(Box::new(opened.map_err(|error| Error::internal(error.to_string()))??))
            }
        };
        Ok(files)
    }

    async fn run<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut Tracker, &Store) -> std::result::Result<T, WorkspaceError> + Send + 'static,
    ) -> Result<T> {
        let mut tracker = self.tracker.take().ok_or_else(|| Error::internal("the workspace's tracker is gone"))?;
        // Everything inside may stand still for this: it waits for nobody.
        let done = self.store.run_beside(move |store| {
            let done = work(&mut tracker, store);
            Ok((tracker, done))
        });
        let (tracker, done) = done.await?;
        self.tracker = Some(tracker);
        Ok(done?)
    }

    /// Reads what changed while the kernel may still write.
    pub async fn prepare(&mut self) -> Result<()> {
        self.unnamed = true;
        self.run(|tracker, store| tracker.prepare(store).map(drop)).await
    }

    /// Collects what changed since. Nothing may write.
    pub async fn collect(&mut self) -> Result<Collected> {
        self.run(|tracker, store| tracker.collect(store)).await
    }

    /// Makes a tree of it; the kernel may write again.
    pub async fn finish(&mut self, collected: Collected) -> Result<CapturedFiles> {
        let captured = self.run(move |tracker, _| tracker.finish(collected)).await?;
        self.unnamed = false;
        Ok(describe(captured))
    }

    /// Makes the workspace what a tree says. Gives how many entries were changed.
    pub async fn restore(&mut self, tree: Digest) -> Result<u64> {
        let durable = self.durable;
        let restored = self.run(move |tracker, store| tracker.restore(TreeId(tree), store, durable)).await?;
        Ok(restored.changed)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // Lost in a panic: the next one opens another, which looks at everything.
        if let Some(mut tracker) = self.tracker.take() {
            if self.unnamed {
                tracker.doubt();
            }
            self.kernel.base.set(tracker.base().map(|tree| tree.0));
            *self.kernel.tracker.borrow_mut() = Some(tracker);
        }
    }
}

fn describe(captured: Captured) -> CapturedFiles {
    let missed = captured.not_captured.iter().map(|missing| MissedEntry {
        key: format!("file/{}", missing.path.display()),
        type_name: "file".into(),
        reason: missing.reason.to_string(),
    });
    CapturedFiles {
        missed: missed.collect(),
        pause_us: captured.how.pause.as_micros() as u64,
        files_read: captured.how.read,
        full_walk: captured.how.walk.map(|walk| walk.to_string()).unwrap_or_default(),
        part: WorkspacePart { tree: captured.tree.0, files: captured.entries },
    }
}

/// Whether everything is there that a tree needs.
pub(super) async fn check(host: &Host, tree: Digest) -> Result<()> {
    let missing = host.store.run(move |store| {
        let (mut seen, mut missing) = (std::collections::HashSet::new(), None);
        let walked = crate::workspace::reach(store, TreeId(tree), &mut seen, &mut |object| {
            if !store.contains(object) {
                missing = Some(object);
            }
            Ok(())
        });
        Ok(walked.map(|()| missing))
    });
    match missing.await?? {
        Some(object) => Err(Error::corrupt(format!("the files' tree {tree} lacks object {object}"))),
        None => Ok(()),
    }
}
