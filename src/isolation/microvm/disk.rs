//! The private disks of machines: made here, and opened for one machine at a time.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::process::Stdio;

use super::qemu::find_program;
use crate::core::error::{Error, Result};
use crate::core::limits;

/// The size of a kernel's new disk.
pub(super) fn disk_bytes(workspace_bytes: u64) -> u64 {
    workspace_bytes.saturating_add(limits::VM_EXTRA_DISK_BYTES).min(limits::VM_DISK_MAX_BYTES)
}

/// Makes an empty disk of that size in a new sparse file.
///
/// # Errors
/// `unsupported` without `mke2fs`; its errors.
pub(super) async fn make_disk(path: &Path, bytes: u64) -> Result<()> {
    let program = find_program("mke2fs")
        .ok_or_else(|| Error::unsupported("mke2fs is not installed").reason("mke2fs").hint("install e2fsprogs"))?;
    let failed = |error: std::io::Error| Error::unavailable(format!("make {}: {error}", path.display()));
    let mut options = std::fs::OpenOptions::new();
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    // A machine that lost its daemon while it started may still use the former file.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let file = options.write(true).create_new(true).open(path).map_err(failed)?;
    file.set_len(bytes).map_err(failed)?;
    let mut command = tokio::process::Command::new(program);
    command.args(["-q", "-F", "-t", "ext4", "-m", "0", "-E"]);
    command.arg("lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0").arg(path);
    command.env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let made = tokio::time::timeout(limits::VM_CALL, command.output()).await;
    match made {
        Ok(Ok(made)) if made.status.success() => Ok(()),
        Ok(Ok(made)) => {
            let why = String::from_utf8_lossy(&made.stderr[..made.stderr.len().min(500)]).trim().to_owned();
            Err(Error::unavailable(format!("mke2fs cannot make {}: {why}", path.display())))
        }
        Ok(Err(error)) => Err(failed(error)),
        Err(_) => Err(Error::deadline("mke2fs did not end in time")),
    }
}

/// Opens a disk for one machine: QEMU inherits the lock with the descriptor, and holds it until its end.
///
/// # Errors
/// `busy` while another machine has it.
pub(super) fn open_disk(path: &Path) -> Result<File> {
    let failed = |error: std::io::Error| Error::unavailable(format!("open {}: {error}", path.display()));
    let disk = File::options().read(true).write(true).open(path).map_err(failed)?;
    match disk.try_lock() {
        Ok(()) => Ok(disk),
        Err(TryLockError::WouldBlock) => Err(Error::busy("another virtual machine has the kernel's disk")
            .reason("disk")
            .hint("try again; if it stays so, restart the daemon: it ends machines that no kernel has")),
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::core::error::ErrorCode;

    #[test]
    fn disk_has_one_machine() -> std::io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("disk");
        std::fs::write(&path, b"")?;
        let disk = open_disk(&path).map_err(std::io::Error::other)?;
        let busy = open_disk(&path).err();
        assert!(busy.is_some_and(|error| error.code == ErrorCode::Busy && !error.hint.is_empty()));
        // As QEMU inherits it, the daemon's own descriptor being closed.
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::from(disk)).spawn()?;
        let held = open_disk(&path).is_err();
        child.kill()?;
        child.wait()?;
        assert!(held, "the child holds the lock");
        assert!(open_disk(&path).is_ok());
        Ok(())
    }

    #[tokio::test]
    async fn new_disk_is_a_new_file() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("disk.new");
        make_disk(&path, 8 << 20).await?;
        let held = open_disk(&path)?;
        make_disk(&path, 8 << 20).await?;
        drop((open_disk(&path)?, held));
        Ok(())
    }
}
