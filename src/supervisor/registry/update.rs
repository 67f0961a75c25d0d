//! A change of a kernel's specification, carried out by the kernel's task.

use std::rc::Rc;

use super::Supervisor;
use crate::core::error::{Error, Result};
use crate::core::spec_update::SpecUpdate;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Change;

impl Supervisor {
    /// Changes a kernel's specification; returns its version.
    ///
    /// # Errors
    /// `conflict` (also during a move to another host), `busy` (leased), `refused`, `unsupported`, `notFound`.
    pub async fn update(&self, kernel: &Rc<Kernel>, update: SpecUpdate, change: Change) -> Result<u64> {
        let (this, kernel) = (self.clone(), Rc::clone(kernel));
        // A separate task, so that a client's disconnect leaves nothing half done.
        let updating = tokio::task::spawn_local(async move {
            this.refuse_in_handover(&kernel).await?;
            kernel.update(change, update).await
        });
        updating.await.map_err(|error| Error::internal(error.to_string()))?
    }

    /// Refuses to change a kernel that is being moved to or from another host. The record of an earlier arrival stays.
    ///
    /// # Errors
    /// `conflict`.
    pub(crate) async fn refuse_in_handover(&self, kernel: &Kernel) -> Result<()> {
        let handovers = self.host.catalog.handovers().await?;
        match handovers.iter().any(|row| row.kernel == kernel.id && !row.live) {
            true => Err(Error::conflict(format!("kernel {} has an unfinished handover", kernel.spec().name))
                .reason("handover")
                .hint("`ryokan teleport --status` shows it")),
            false => Ok(()),
        }
    }
}
