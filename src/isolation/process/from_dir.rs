//! Fills a new workspace from a folder of the host.
//!
//! coreutils' `cp -a` does the copying: it keeps modes, times, links, holes and attributes, and shares blocks where the
//! file system can.

use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use tokio::process::Command;

use crate::core::error::{Error, Result};
use crate::core::quantity::format_size;

/// Copies the contents of `from` into `workspace`.
///
/// # Errors
/// `invalidArgument` if the source is no folder, `unsupported` in a system-wide daemon for another user (whose rights a
/// copy by the daemon would ignore), `refused` if it is larger than the workspace may be, `unavailable` with `cp`'s
/// message.
pub(super) async fn copy(from: &Path, workspace: &Path, uid: u32, most_bytes: u64) -> Result<()> {
    if uid != nix::unistd::geteuid().as_raw() {
        return Err(Error::unsupported("the system-wide daemon does not copy other users' folders")
            .hint("give the folder with --allow-path and copy it inside the kernel"));
    }
    // Opened by the checked name, without following links: a later change of the name does not change the copied
    // folder.
    let opened = crate::sandbox::open_host_path(from)
        .map_err(|error| Error::refused(format!("{}: {error}", from.display())).reason("source"))?;
    let folder = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()));
    if !folder.is_dir() {
        return Err(Error::invalid(format!("{} is not a folder", from.display())));
    }
    let within = |program: &str| {
        let mut command = Command::new(program);
        command.current_dir(&folder);
        command
    };
    let size = run(within("du").args(["--summarize", "--block-size=1", "--apparent-size", "--", "."])).await?;
    let bytes: u64 = size.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(u64::MAX);
    if bytes > most_bytes {
        let (size, most) = (format_size(bytes), format_size(most_bytes));
        return Err(Error::refused(format!("{} has {size}, more than the workspace's {most}", from.display()))
            .reason("workspace_size")
            .hint("copy less of it, or make the kernel with a larger workspace"));
    }
    run(within("cp").args(["-a", "--reflink=auto", "--", "."]).arg(workspace)).await?;
    restore_mode(workspace)
}

/// Restores the workspace's mode: `cp -a` copied that of the source folder, but the workspace is private to the kernel.
fn restore_mode(workspace: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let mode = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(workspace, mode)
        .map_err(|error| Error::internal(format!("{}: {error}", workspace.display())))
}

async fn run(command: &mut Command) -> Result<String> {
    command.kill_on_drop(true).stdin(std::process::Stdio::null());
    // `cp` dies with the daemon: it must not write into a folder that the next daemon removes.
    crate::sys::process::end_with_parent(command.as_std_mut());
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    let failed = |why: String| {
        Error::unavailable(format!("{program} failed: {why}"))
            .hint("look at the folder's permissions and the free space")
    };
    let output = command.output().await.map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        return Err(failed(words.trim().chars().take(500).collect()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
