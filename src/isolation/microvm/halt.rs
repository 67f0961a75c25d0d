//! A machine that its monitor stopped because this host's disk is full: it is kept, and continues when there is room.
//!
//! ```text
//!  the guest writes to its disk ─▶ no room on the host ─▶ QEMU: io-error ─▶ requests are refused (disk_full)
//!                                       room again ─▶ cont: the write is repeated ─▶ the clock is set ─▶ it continues
//! ```
//!
//! The disk of a machine is sparse: its size is no room on the host. Nothing is lost while the machine stands still.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::monitor::Monitor;
use super::sockets::Sockets;
use crate::core::error::{DISK_FULL, Error, Result};
use crate::core::limits;

/// Whether a machine is halted, for its requests. Clones are of one machine.
#[derive(Clone, Default)]
pub(super) struct Halt(Arc<AtomicBool>);

impl Halt {
    pub(super) fn set(&self, is_halted: bool) {
        self.0.store(is_halted, Ordering::Relaxed);
    }

    /// Refuses a request that the guest would not answer.
    ///
    /// # Errors
    /// `busy` with the reason `disk_full`.
    pub(super) fn check(&self) -> Result<()> {
        match self.0.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(full()),
        }
    }
}

/// Why a halted machine does nothing.
pub(super) fn full() -> Error {
    Error::busy("this host's disk is full: the kernel's virtual machine stands still until there is room")
        .reason(DISK_FULL)
        .hint("make room on the host: the machine continues by itself")
}

/// Whether the monitor stopped the machine for want of room. A monitor that does not answer did not.
pub(super) async fn is_halted(sockets: &Sockets) -> bool {
    let asked = async { Monitor::connect(sockets).await?.is_halted().await };
    asked.await.unwrap_or(false)
}

/// Waits until a halted machine runs.
///
/// # Errors
/// Those of its monitor.
pub(super) async fn await_room(dir: &Path, sockets: &Sockets) -> Result<()> {
    loop {
        tokio::time::sleep(limits::VM_ROOM_RETRY).await;
        if has_room(dir).await {
            let mut monitor = Monitor::connect(sockets).await?;
            if monitor.is_halted().await? {
                monitor.resume().await?;
            }
            return Ok(());
        }
    }
}

/// Whether the file system of a kernel's folder has some room; also if that is not known.
pub(super) async fn has_room(dir: &Path) -> bool {
    let dir = dir.to_owned();
    let found = tokio::task::spawn_blocking(move || nix::sys::statvfs::statvfs(&dir)).await;
    let Ok(Ok(found)) = found else { return true };
    found.blocks_available().saturating_mul(found.fragment_size()) >= limits::VM_ROOM_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn halted_machine_refuses_requests() {
        let halt = Halt::default();
        assert!(halt.check().is_ok());
        halt.clone().set(true);
        let refused = halt.check().expect_err("refused");
        assert_eq!((refused.code.name(), &*refused.reason), ("busy", DISK_FULL));
        halt.set(false);
        assert!(halt.check().is_ok());
        assert!(has_room(Path::new("/nowhere/at/all")).await, "its monitor is asked then");
    }
}
