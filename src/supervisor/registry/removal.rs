//! The removal of kernels, with their threads.

use std::rc::Rc;

use super::Supervisor;
use crate::catalog::{NewAudit, Notes};
use crate::core::error::{DISK_FULL, Error, ErrorCode, Result};
use crate::supervisor::host::audit::bounded;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Actor, Change};

impl Supervisor {
    /// Ends a kernel's worker and deletes the kernel; with `with_threads`, its threads first.
    ///
    /// # Errors
    /// `conflict` (also while it has threads, unless they are removed too), `busy` (leased), and those of the catalog.
    pub async fn remove(&self, kernel: &Rc<Kernel>, change: Change, with_threads: bool) -> Result<()> {
        // A separate task, so that a client's disconnect leaves nothing half removed.
        let (this, kernel) = (self.clone(), Rc::clone(kernel));
        let removing = tokio::task::spawn_local(async move {
            let threads = if with_threads { kernel.threads() } else { Vec::new() };
            // All threads are admitted before the first is removed.
            for thread in &threads {
                thread.admit_removal(&change.actor, 0).await?;
            }
            kernel.admit_removal(&change.actor, change.expected_version).await?;
            this.refuse_member(&kernel).await?;
            // Held until the kernel is removed or the removal fails.
            let _removal = kernel.begin_removal(with_threads)?;
            this.remove_all(&kernel, change).await
        });
        removing.await.map_err(|error| Error::internal(error.to_string()))?
    }

    /// Removes a kernel that an import created and that did not become visible as a member. Neither a lease nor its
    /// group keep it.
    ///
    /// # Errors
    /// As [`Self::remove`].
    pub(crate) async fn withdraw(&self, kernel: &Rc<Kernel>, actor: Actor) -> Result<()> {
        kernel.set_withdrawn();
        let _removal = kernel.begin_removal(true)?;
        self.remove_all(kernel, Change { actor, expected_version: 0 }).await
    }

    /// Refuses what would take a kernel from its group.
    ///
    /// # Errors
    /// `conflict` (`group`, `group_unfinished`).
    pub(crate) async fn refuse_member(&self, kernel: &Kernel) -> Result<()> {
        if kernel.thread_of.is_none() {
            kernel.refuse_unfinished_group()?;
        }
        let Some(group) = self.host.catalog.group_of_kernel(kernel.id).await? else { return Ok(()) };
        Err(Error::conflict(format!("kernel {} is a member of group {group}", kernel.spec().name))
            .reason("group")
            .hint(format!("`ryokan group rm {group} MEMBER` takes it out of the group")))
    }

    /// Removes an ephemeral kernel after its connection has ended.
    pub async fn remove_ephemeral(&self, kernel: &Rc<Kernel>, actor: Actor) {
        if self.host.is_stopping() {
            // The next daemon removes it.
            return;
        }
        match self.remove(kernel, Change { actor, expected_version: 0 }, true).await {
            Ok(()) => {}
            // Its client removed it before disconnecting.
            Err(error) if error.code == ErrorCode::NotFound => {}
            Err(error) => tracing::warn!(kernel = %kernel.spec().name, %error, "an ephemeral kernel is left"),
        }
    }

    /// Removes a kernel's threads, then the kernel itself.
    async fn remove_all(&self, kernel: &Rc<Kernel>, change: Change) -> Result<()> {
        for thread in kernel.threads() {
            let _removal = thread.begin_removal(false)?;
            self.remove_one(&thread, Change { actor: change.actor.clone(), expected_version: 0 }).await?;
        }
        self.remove_one(kernel, change).await
    }

    async fn remove_one(&self, kernel: &Rc<Kernel>, change: Change) -> Result<()> {
        let host = &self.host;
        let (actor, version) = (change.actor.clone(), kernel.view().version);
        self.check_no_handover(kernel).await?;
        kernel.remove(change).await?;
        self.workers.forget_error(kernel.id);
        self.workers.reserved.release(&self.workers, kernel.id).await;
        host.prepared.discard_of(kernel.id).await;
        self.forget_kernel(kernel);
        let line = host.line(&actor, "kernel.remove", Some(kernel));
        let detail = bounded(kernel.spec().name.to_string());
        let audit = NewAudit { version_before: Some(version), detail, ..line };
        let names = host.upkeep.names.read().await;
        let forget = async || {
            let notes = Notes { events: Vec::new(), audit: vec![audit.clone()] };
            Ok(host.catalog.remove_kernel(kernel.id, notes).await?)
        };
        let forgotten = match host.making_room(forget).await {
            // On a full disk, its files are deleted first to make room: the removal is decided and its worker has
            // ended.
            //
            // If the daemon dies in between, the next one finds a kernel without files, which can only be removed.
            Err(error) if error.reason == DISK_FULL => match host.catalog.remove_kernel_files(kernel.id).await {
                Ok(()) => forget().await,
                Err(error) => Err(error.into()),
            },
            forgotten => forgotten,
        };
        if let Err(error) = forgotten {
            // The kernel still exists with all its data, so it must stay usable.
            if let Ok(Some(row)) = host.catalog.kernel(kernel.id).await {
                self.recover_kernel(row, None).await;
            }
            return Err(error);
        }
        host.catalog.remove_kernel_files(kernel.id).await?;
        drop(names);
        host.upkeep.gone.set(host.upkeep.gone.get() + 1);
        host.events.publish(&kernel.event_name(), "kernel_removed", serde_json::json!({ "by": actor.to_string() }));
        Ok(())
    }

    /// Drops a kernel whose task has ended from the table of kernels, and closes its socket.
    pub(super) fn forget_kernel(&self, kernel: &Rc<Kernel>) {
        self.publish_socket(kernel, false);
        self.registry.by_id.borrow_mut().remove(&kernel.id);
        self.registry.by_name.borrow_mut().remove(&(kernel.uid, kernel.spec().name.clone()));
    }
}
