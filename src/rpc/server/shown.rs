//! What the holder of a capability may know of a kernel.

use super::kernel::KernelServer;
use crate::core::info::KernelInfo;
use crate::core::rights::Rights;
use crate::supervisor::kernel::Kernel;

impl KernelServer {
    /// Information about the kernel, for this holder.
    pub(super) async fn shown_info(&self) -> KernelInfo {
        self.shown(&self.kernel, self.kernel.info().await)
    }

    /// That part of a kernel's information. What the store has for the kernel alone depends on the contents of its user's
    /// other kernels: a holder of fewer rights could find out what they are.
    pub(super) fn shown(&self, kernel: &Kernel, info: KernelInfo) -> KernelInfo {
        match self.rights == Rights::ALL {
            true => info,
            false => KernelInfo { disk: kernel.disk.get().map(|measured| measured.folder), ..info },
        }
    }
}
