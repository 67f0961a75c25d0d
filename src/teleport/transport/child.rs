//! A program as a transport. It runs in its own process group, which ends with the connection.

use std::process::Stdio;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;
use tokio::task::JoinHandle;

use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::teleport::Wire;

/// Time in which a failed program's error output and status are read.
const END_WAIT: std::time::Duration = std::time::Duration::from_secs(2);

/// The program.
pub(super) struct Child {
    group: Option<Pid>,
    child: tokio::process::Child,
    said: JoinHandle<Vec<u8>>,
}

/// How a program ended.
pub(super) struct Ended {
    /// Its status, if it has ended by itself.
    pub(super) code: Option<i32>,
    /// What it wrote to its standard error, on one line.
    pub(super) said: String,
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

/// Starts a program.
pub(super) fn start(mut starting: Command) -> std::io::Result<Result<(Wire, Child)>> {
    starting.current_dir("/").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    starting.process_group(0).kill_on_drop(true);
    let mut child = starting.spawn()?;
    let (Some(to), Some(from), Some(mut errors)) = (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Ok(Err(Error::internal("the transport's program has no standard streams")));
    };
    let group = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
    let said = tokio::task::spawn_local(async move {
        let (mut kept, mut room) = (Vec::new(), [0; 1024]);
        // Read to the end, so that the program does not block; the beginning is kept.
        while let Ok(count @ 1..) = errors.read(&mut room).await {
            let left = limits::HANDOVER_STDERR_BYTES - kept.len();
            kept.extend_from_slice(&room[..count.min(left)]);
        }
        kept
    });
    Ok(Ok((Wire::new(from, to), Child { group, child, said })))
}

impl Child {
    /// Waits for the program's end, for a limited time.
    pub(super) async fn end(mut self) -> Ended {
        let kept = tokio::time::timeout(END_WAIT, &mut self.said).await;
        let kept = kept.ok().and_then(std::result::Result::ok).unwrap_or_default();
        let text = String::from_utf8_lossy(&kept);
        let said = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned();
        // After this, the group's number may belong to another one.
        let ended = tokio::time::timeout(END_WAIT, self.child.wait()).await;
        Ended { code: ended.ok().and_then(std::result::Result::ok).and_then(|status| status.code()), said }
    }
}
