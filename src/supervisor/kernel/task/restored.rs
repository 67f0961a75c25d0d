//! The task's part in the end of a restore: mounts, servers, and the restore's record.

use std::path::Path;

use super::Task;
use crate::catalog::state::{Finished, Restored};
use crate::core::error::Result;
use crate::core::info::GivenMount;
use crate::isolation::HostMount;
use crate::supervisor::kernel::journal::version_after;

impl Task {
    /// Restores mounts and servers: in the live worker first, then in the records. A failure is rolled back.
    pub(crate) async fn restored(&mut self, done: Restored) -> Result<Finished> {
        let (wanted, mcp) = (done.mounts.clone(), done.mcp.clone());
        let parted = std::mem::take(&mut self.mounts.detached);
        let is_gone = |mount: &&GivenMount| !wanted.contains(mount) && !parted.contains(mount);
        let gone: Vec<GivenMount> = self.mounts.added.iter().filter(is_gone).cloned().collect();
        let is_new = |mount: &&GivenMount| !self.mounts.added.contains(mount) || parted.contains(mount);
        let new: Vec<GivenMount> = wanted.iter().filter(is_new).cloned().collect();
        let (target, safety) = (done.target, done.safety);
        let recorded = match self.exchange(&gone, &new).await {
            Ok(()) => self.kernel.records.finish_restore(done).await,
            Err(error) => Err(error),
        };
        let finished = match recorded {
            Ok(finished) => finished,
            Err(error) => {
                if let Err(stuck) = self.exchange(&new, &gone).await {
                    tracing::warn!(error = %stuck, "mounts that were being restored are not what is recorded");
                }
                // The state to which the kernel returns has these mounts.
                self.mounts.detached = parted;
                return Err(error);
            }
        };
        if target != safety {
            let mut view = self.kernel.view.borrow_mut();
            view.origin = view.origin.after_restore(target);
        }
        self.mounts.added = wanted;
        self.kernel.terms_changed();
        self.tools.replace(&mcp);
        self.kernel.advance(version_after(finished.sequence));
        Ok(finished)
    }

    /// Detaches, before a restore changes the files, the mounts that it does not keep: all or none.
    ///
    /// If the restore fails, the kernel returns to a state with these mounts, and they are reattached.
    pub(crate) async fn detach_mounts(&mut self, wanted: &[GivenMount]) -> Result<()> {
        self.mounts.detached = self.mounts.added.iter().filter(|mount| !wanted.contains(mount)).cloned().collect();
        let parted = self.exchange(&self.mounts.detached, &[]).await;
        if parted.is_err() {
            self.reattach_mounts().await;
        }
        parted
    }

    /// Reattaches the mounts of a cancelled restore.
    pub(crate) async fn reattach_mounts(&mut self) {
        let parted = std::mem::take(&mut self.mounts.detached);
        if let Err(error) = self.exchange(&[], &parted).await {
            tracing::warn!(%error, "a mount that is recorded is missing until the worker ends");
        }
    }

    /// Exchanges mounts of the live worker. Mounts that are already as requested stay.
    pub(super) async fn exchange(&self, gone: &[GivenMount], new: &[GivenMount]) -> Result<()> {
        use crate::core::error::ErrorCode;
        let (Some(link), Some(current)) = (self.link(), &self.worker.current) else { return Ok(()) };
        // Nested mounts are detached before their parents, and attached after them.
        let (mut gone, mut new): (Vec<_>, Vec<_>) = (gone.iter().collect(), new.iter().collect());
        let depth = |given: &&GivenMount| Path::new(&given.mount.path).components().count();
        gone.sort_by_key(|given| std::cmp::Reverse(depth(given)));
        new.sort_by_key(depth);
        for given in gone {
            match current.worker.handle().detach_mount(&link, Path::new(&given.mount.path)).await {
                Err(error) if error.code != ErrorCode::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        for GivenMount { mount, real } in new {
            let given = Path::new(&mount.source);
            let source = self.host.revalidate_source(self.kernel.uid, given, real.as_deref().map(Path::new))?;
            let attached = HostMount { inside: mount.path.clone().into(), source, writable: mount.writable };
            match current.worker.handle().attach_mount(&link, &attached).await {
                Err(error) if error.code != ErrorCode::AlreadyExists => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }
}
