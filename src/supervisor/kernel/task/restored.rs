//! The end of a restore, as far as it is the task's: what is mounted, which servers there are, and the record of it.

use std::path::Path;

use super::Task;
use crate::catalog::state::{Finished, Restored};
use crate::core::error::Result;
use crate::core::info::GivenMount;
use crate::isolation::HostMount;
use crate::supervisor::kernel::journal::version_after;

impl Task {
    /// Makes mounts and servers what they were, live first, then for good. What fails is taken back.
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
                // The state that it goes back to has them.
                self.mounts.detached = parted;
                return Err(error);
            }
        };
        if target != safety {
            let mut view = self.kernel.view.borrow_mut();
            view.origin = view.origin.after_restore(target);
        }
        self.mounts.added = wanted;
        self.tools.replace(&mcp);
        self.kernel.advance(version_after(finished.sequence));
        Ok(finished)
    }

    /// Takes away, before the files of a restore come, what is not to be mounted after it: all of that or nothing. If the restore does not end
    /// well, it goes back to a state that has it, and gets it again.
    pub(crate) async fn part_with_mounts(&mut self, wanted: &[GivenMount]) -> Result<()> {
        self.mounts.detached = self.mounts.added.iter().filter(|mount| !wanted.contains(mount)).cloned().collect();
        let parted = self.exchange(&self.mounts.detached, &[]).await;
        if parted.is_err() {
            self.take_back_mounts().await;
        }
        parted
    }

    /// Mounts again what was taken away for a restore that does not come.
    pub(crate) async fn take_back_mounts(&mut self) {
        let parted = std::mem::take(&mut self.mounts.detached);
        if let Err(error) = self.exchange(&[], &parted).await {
            tracing::warn!(%error, "a mount that is recorded is missing until the worker ends");
        }
    }

    /// Takes mounts away from the live worker and gives it others. What is as wanted already is left.
    async fn exchange(&self, gone: &[GivenMount], new: &[GivenMount]) -> Result<()> {
        use crate::core::error::ErrorCode;
        let (Some(link), Some(current)) = (self.link(), &self.worker.current) else { return Ok(()) };
        // What stands on another goes before that, and comes after it.
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
            let source = self.host.check_given(self.kernel.uid, given, real.as_deref().map(Path::new))?;
            let attached = HostMount { inside: mount.path.clone().into(), source, writable: mount.writable };
            match current.worker.handle().attach_mount(&link, &attached).await {
                Err(error) if error.code != ErrorCode::AlreadyExists => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }
}
