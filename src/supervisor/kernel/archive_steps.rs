//! Steps after the commit of an archive, unarchive or handover transition.

use super::journal::Records;
use crate::core::error::{Error, Result};
use crate::core::kernel::transition::{Decision, Record, Recovery, Step, Transition};
use crate::core::kernel::{Event, Life};
use crate::supervisor::host::Host;

/// Lifecycle state after this transition record; unchanged if the transition was not committed.
pub(crate) fn life_after(life: &Life, record: &Record, now_ms: i64) -> Life {
    let mut life = life.clone();
    let event = match (record.transition, record.decision) {
        (Transition::Archive { checkpoint }, Decision::Committed) => Some(Event::ArchiveAsked { checkpoint }),
        (Transition::Unarchive { .. }, Decision::Committed) => Some(Event::Unarchived),
        (Transition::HandoverOut { handover, host, epoch, .. }, Decision::Committed) => {
            Some(Event::DepartureCommitted { host, epoch, handover })
        }
        (Transition::Restore { .. }, _) | (_, Decision::Open | Decision::Aborted) => None,
    };
    if let Some(event) = event {
        // The actions are notifications; the kernel's task publishes them with the commit.
        let _ = life.step(event, now_ms);
    }
    life
}

/// Performs the remaining steps of such a transition. Idempotent.
///
/// Calls `enter` at the start of each step and `save` to write the lifecycle state after it ([`life_after`]). `again`: an
/// earlier attempt or daemon made the decision.
///
/// # Errors
/// Catalog errors and errors of file removal.
pub(crate) async fn carry_out(
    host: &Host,
    records: &Records,
    record: &Record,
    mut enter: impl FnMut(Step) -> Result<()>,
    save: impl AsyncFnMut() -> Result<()>,
    again: bool,
) -> Result<()> {
    match (record.transition, record.recovery()) {
        (Transition::Archive { .. } | Transition::HandoverOut { .. }, Recovery::Finish) => {
            enter(Step::Lifecycle)?;
            host.making_room(save).await?;
            enter(Step::Cleanup)?;
            if let Transition::HandoverOut { .. } = record.transition {
                // A loss of power that takes the decision back must find the files.
                match again {
                    true => host.sync_decision_again(Some(records.kernel())).await?,
                    false => host.sync_decision(Some(records.kernel())).await?,
                }
            }
            Ok(host.catalog.clear_kernel_files(records.kernel()).await?)
        }
        (Transition::Unarchive { .. }, Recovery::Finish) => {
            enter(Step::Lifecycle)?;
            host.making_room(save).await
        }
        (Transition::Unarchive { .. }, Recovery::Revert | Recovery::FinishOrRevert) => {
            Ok(host.catalog.clear_kernel_files(records.kernel()).await?)
        }
        // The files were not changed.
        (Transition::Archive { .. } | Transition::HandoverOut { .. }, Recovery::Revert | Recovery::FinishOrRevert) => {
            Ok(())
        }
        (Transition::Restore { .. }, _) => Err(Error::internal("a restore is ended by its own recovery")),
    }
}
