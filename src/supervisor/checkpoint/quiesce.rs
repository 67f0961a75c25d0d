//! A quiesced workspace: every possible writer is frozen, in the kernel and in the other sessions.

use std::rc::Rc;

use super::take::freeze;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::limits;
use crate::link::host::WorkerLink;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::sharing::FilesHold;

/// How the kernel's own worker is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// Its processes are frozen for a moment; they continue if the daemon ends.
    Freeze,
    /// As before, beside its running execution.
    FreezeAtWork,
    /// They stay stopped until a daemon adopts the worker, also in a copy of its machine.
    Suspend,
}

/// Frozen workers; nothing runs in them until [`Quiesced::end`].
pub(super) struct Quiesced {
    own: Option<Rc<WorkerLink>>,
    stop: Stop,
    others: Vec<Rc<WorkerLink>>,
    _hold: FilesHold,
}

impl Quiesced {
    /// Freezes the kernel's worker, which the caller holds, if there is one, and the workers of the other sessions.
    ///
    /// # Errors
    /// If a worker does not freeze; all workers resume then.
    pub async fn of(kernel: &Rc<Kernel>, link: Option<&Rc<WorkerLink>>) -> Result<Quiesced> {
        Quiesced::stopped(kernel, link, Stop::Freeze).await
    }

    /// As [`Self::of`], with that stop of the kernel's own worker.
    ///
    /// # Errors
    /// As there.
    pub async fn stopped(kernel: &Rc<Kernel>, link: Option<&Rc<WorkerLink>>, stop: Stop) -> Result<Quiesced> {
        let hold = kernel.hold_files();
        if let Some(link) = link {
            match stop {
                Stop::Freeze => freeze(link).await?,
                Stop::FreezeAtWork => freeze_at_work(link).await?,
                Stop::Suspend => suspend(link).await?,
            }
        }
        let mut still = Quiesced { own: link.cloned(), stop, others: Vec::new(), _hold: hold };
        for other in kernel.others() {
            let Some(link) = other.link.borrow().clone() else { continue };
            match link.freeze_at_work().await {
                Ok(()) => still.others.push(link),
                // The worker has just ended, or is about to; its last writes are captured as ordinary changes.
                Err(error) if matches!(error.code, ErrorCode::Lost | ErrorCode::Unavailable) => {}
                Err(error) => {
                    // The worker may be frozen although its reply was lost.
                    let _ = link.thaw().await;
                    still.end().await?;
                    return Err(error);
                }
            }
        }
        Ok(still)
    }

    /// Resumes all workers.
    ///
    /// # Errors
    /// Errors of the kernel's own worker.
    pub async fn end(self) -> Result<()> {
        for other in &self.others {
            if let Err(error) = other.thaw().await {
                tracing::debug!(%error, "a worker ended while it stood still");
            }
        }
        match (&self.own, self.stop) {
            (Some(own), Stop::Freeze | Stop::FreezeAtWork) => own.thaw().await,
            (Some(own), Stop::Suspend) => resume(own).await,
            (None, _) => Ok(()),
        }
    }
}

/// Freezes everything inside beside a running execution. On failure, nothing stays frozen.
async fn freeze_at_work(link: &WorkerLink) -> Result<()> {
    let frozen = link.freeze_at_work().await;
    if frozen.is_err() {
        // The worker may be frozen although its reply was lost.
        let _ = link.thaw().await;
    }
    frozen
}

/// Suspends a worker until a daemon resumes it. On failure, it runs on.
async fn suspend(link: &WorkerLink) -> Result<()> {
    let suspended = tokio::time::timeout(limits::WORKER_STOP, link.suspend_for_copy()).await;
    let suspended = suspended.unwrap_or_else(|_| Err(Error::deadline("the worker did not answer")));
    if suspended.is_err() {
        // The worker may be suspended although its reply was lost.
        let _ = resume(link).await;
    }
    suspended
}

async fn resume(link: &WorkerLink) -> Result<()> {
    let resumed = tokio::time::timeout(limits::WORKER_STOP, link.resume()).await;
    resumed.unwrap_or_else(|_| Err(Error::deadline("the worker did not answer")))
}

/// Freezes all writers of the kernel's files for a moment, then resumes them.
///
/// No writer is inside a file operation at that moment, so all earlier changes have been notified.
///
/// # Errors
/// If a worker did not freeze.
pub(super) async fn settle(kernel: &Rc<Kernel>) -> Result<()> {
    let _hold = kernel.hold_files();
    for session in std::iter::once(Rc::clone(kernel)).chain(kernel.others()) {
        if session.is_parked() {
            continue;
        }
        let Some(link) = session.link.borrow().clone() else { continue };
        let frozen = link.freeze_at_work().await;
        // Also after a failure: the worker may be frozen although its reply was lost.
        let thawed = link.thaw().await;
        frozen.and(thawed)?;
    }
    Ok(())
}
