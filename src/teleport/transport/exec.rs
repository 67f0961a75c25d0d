//! A shell command as a transport. It runs in its own process group, which ends with the connection.

use std::process::Stdio;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;
use tokio::task::JoinHandle;

use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::teleport::Wire;

/// Time in which a failed command's error output is read.
const STDERR_WAIT: std::time::Duration = std::time::Duration::from_secs(2);

/// The command.
pub(super) struct Child {
    group: Option<Pid>,
    child: tokio::process::Child,
    said: JoinHandle<Vec<u8>>,
}

impl Drop for Child {
    fn drop(&mut self) {
        self.said.abort();
        // A group whose leader was not waited for keeps its number.
        if let Some(group) = self.group
            && matches!(self.child.try_wait(), Ok(None))
        {
            let _ = killpg(group, Signal::SIGKILL);
        }
    }
}

/// Starts the command.
pub(super) fn start(command: &str) -> Result<(Wire, Child)> {
    let mut starting = Command::new("/bin/sh");
    starting.arg("-c").arg(command).current_dir("/");
    starting.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    starting.process_group(0).kill_on_drop(true);
    let failed =
        |error: std::io::Error| Error::unavailable(format!("the transport's command cannot be started: {error}"));
    let mut child = starting.spawn().map_err(failed)?;
    let (Some(to), Some(from), Some(mut errors)) = (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err(Error::internal("the transport's command has no standard streams"));
    };
    let group = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
    let said = tokio::task::spawn_local(async move {
        let (mut kept, mut room) = (Vec::new(), [0; 1024]);
        // Read to the end, so that the command does not block; the beginning is kept.
        while let Ok(count @ 1..) = errors.read(&mut room).await {
            let left = limits::HANDOVER_STDERR_BYTES - kept.len();
            kept.extend_from_slice(&room[..count.min(left)]);
        }
        kept
    });
    Ok((Wire::new(from, to), Child { group, child, said }))
}

impl Child {
    /// What the command wrote to its standard error, once that is closed.
    pub(super) async fn stderr(mut self) -> String {
        let kept = tokio::time::timeout(STDERR_WAIT, &mut self.said).await;
        let kept = kept.ok().and_then(std::result::Result::ok).unwrap_or_default();
        let text = String::from_utf8_lossy(&kept);
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
    }
}
