//! A kernel's new name: reserved, recorded by the kernel's task, then used by the table of kernels and the socket.

use std::rc::Rc;

use super::Supervisor;
use crate::core::error::{Error, Result};
use crate::core::name::KernelName;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Change;

impl Supervisor {
    /// Changes a kernel's name; returns its version. The present name is no error.
    ///
    /// # Errors
    /// `alreadyExists`, `conflict` (also during a move to another host), `busy` (leased), `refused`, `departed`.
    pub async fn rename(&self, kernel: &Rc<Kernel>, name: KernelName, change: Change) -> Result<u64> {
        let (this, kernel) = (self.clone(), Rc::clone(kernel));
        // A separate task, so that a client's disconnect leaves nothing half done.
        let renaming = tokio::task::spawn_local(async move { this.rename_kernel(&kernel, name, change).await });
        renaming.await.map_err(|error| Error::internal(error.to_string()))?
    }

    async fn rename_kernel(&self, kernel: &Rc<Kernel>, name: KernelName, change: Change) -> Result<u64> {
        let _reserved = match kernel.spec().name == name {
            true => None,
            false => Some(self.reserve_name(kernel.uid, name.clone())?),
        };
        self.refuse_in_handover(kernel).await?;
        let before = kernel.spec().name.clone();
        let version = kernel.rename(change, name).await?;
        let name = kernel.spec().name.clone();
        if before != name && self.get(kernel.id).is_some() {
            let mut by_name = self.registry.by_name.borrow_mut();
            by_name.retain(|_, id| *id != kernel.id);
            by_name.insert((kernel.uid, name), kernel.id);
            drop(by_name);
            self.publish_socket(kernel, true);
        }
        Ok(version)
    }
}
