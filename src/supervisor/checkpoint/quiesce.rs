//! A workspace that stands still: everything that could write to it is stopped, in the kernel and in the other sessions.

use std::rc::Rc;

use super::take::freeze;
use crate::core::error::{ErrorCode, Result};
use crate::link::host::WorkerLink;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::sharing::FilesHold;

/// Workers in which nothing runs until [`Quiesced::end`].
pub(super) struct Quiesced {
    own: Option<Rc<WorkerLink>>,
    others: Vec<Rc<WorkerLink>>,
    _hold: FilesHold,
}

impl Quiesced {
    /// Stops the kernel's worker, which the caller holds, if there is one, and those of the other sessions.
    ///
    /// # Errors
    /// If one does not stop: then all go on.
    pub async fn of(kernel: &Rc<Kernel>, link: Option<&Rc<WorkerLink>>) -> Result<Quiesced> {
        let hold = kernel.hold_files();
        if let Some(link) = link {
            freeze(link).await?;
        }
        let mut still = Quiesced { own: link.cloned(), others: Vec::new(), _hold: hold };
        for other in kernel.others() {
            let Some(link) = other.link.borrow().clone() else { continue };
            match link.freeze_at_work().await {
                Ok(()) => still.others.push(link),
                // It has just ended, or is about to: what it still writes is seen as what it is.
                Err(error) if matches!(error.code, ErrorCode::Lost | ErrorCode::Unavailable) => {}
                Err(error) => {
                    // It may have stopped though its answer did not come.
                    let _ = link.thaw().await;
                    still.end().await?;
                    return Err(error);
                }
            }
        }
        Ok(still)
    }

    /// Lets everything go on.
    ///
    /// # Errors
    /// The own worker's.
    pub async fn end(self) -> Result<()> {
        for other in &self.others {
            if let Err(error) = other.thaw().await {
                tracing::debug!(%error, "a worker ended while it stood still");
            }
        }
        match &self.own {
            Some(own) => own.thaw().await,
            None => Ok(()),
        }
    }
}

/// Stops whatever may write to the kernel's files for a moment, and lets it go on: nothing is within a call then that changes a
/// file, so what was changed before has been told.
///
/// # Errors
/// If one did not stop.
pub(super) async fn settle(kernel: &Rc<Kernel>) -> Result<()> {
    let _hold = kernel.hold_files();
    for session in std::iter::once(Rc::clone(kernel)).chain(kernel.others()) {
        let Some(link) = session.link.borrow().clone() else { continue };
        let frozen = link.freeze_at_work().await;
        // Also if it failed: it may have stopped though its answer did not come.
        let thawed = link.thaw().await;
        frozen.and(thawed)?;
    }
    Ok(())
}
