//! The steps of archiving a kernel, and of its reversal, that follow the commit.

use super::journal::Records;
use crate::core::error::{Error, Result};
use crate::core::kernel::transition::{Decision, Record, Recovery, Step, Transition};
use crate::core::kernel::{Event, Life};
use crate::supervisor::host::Host;

/// The life of a kernel after the transition of this record, if that was committed.
pub(crate) fn life_after(life: &Life, record: &Record, now_ms: i64) -> Life {
    let mut life = life.clone();
    let event = match (record.transition, record.decision) {
        (Transition::Archive { checkpoint }, Decision::Committed) => Some(Event::ArchiveAsked { checkpoint }),
        (Transition::Unarchive { .. }, Decision::Committed) => Some(Event::Unarchived),
        (Transition::Restore { .. }, _) | (_, Decision::Open | Decision::Aborted) => None,
    };
    if let Some(event) = event {
        // Its actions are notices, which the kernel's task gives with the commit.
        let _ = life.step(event, now_ms);
    }
    life
}

/// Does what the record of an archiving, or of its reversal, leaves to be done. May be repeated. `enter` is called at the beginning of each step, `save` writes the life
/// after it ([`life_after`]).
///
/// # Errors
/// Those of the catalog and of removing files.
pub(crate) async fn carry_out(
    host: &Host,
    records: &Records,
    record: &Record,
    mut enter: impl FnMut(Step) -> Result<()>,
    save: impl AsyncFnMut() -> Result<()>,
) -> Result<()> {
    match (record.transition, record.recovery()) {
        (Transition::Archive { .. }, Recovery::Finish) => {
            enter(Step::Lifecycle)?;
            host.making_room(save).await?;
            enter(Step::Cleanup)?;
            Ok(host.catalog.clear_kernel_files(records.kernel()).await?)
        }
        (Transition::Unarchive { .. }, Recovery::Finish) => {
            enter(Step::Lifecycle)?;
            host.making_room(save).await
        }
        (Transition::Unarchive { .. }, Recovery::Revert | Recovery::FinishOrRevert) => {
            Ok(host.catalog.clear_kernel_files(records.kernel()).await?)
        }
        // Its files were not touched.
        (Transition::Archive { .. }, Recovery::Revert | Recovery::FinishOrRevert) => Ok(()),
        (Transition::Restore { .. }, _) => Err(Error::internal("a restore is ended by its own recovery")),
    }
}
