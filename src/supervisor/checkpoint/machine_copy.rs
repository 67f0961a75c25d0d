//! Copies the running machine of a kernel for a fork: one moment of its memory, its processors and its disk.
//!
//! ```text
//! safe point ─▶ processes stop ─▶ machine stops, is saved, continues ─▶ processes continue ─▶ memory is separated
//! ```
//!
//! The kernel keeps its worker and its connection. Nothing is recorded: a daemon that is killed leaves a stopped machine,
//! which the next one continues, and files that it removes.

use std::rc::Rc;
use std::time::{Duration, Instant};

use super::queue_ticket::{self, Ticket};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::isolation::MachineCopy;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Trace;

/// Copies a kernel's machine at its next safe point. Returns how long the kernel stood still.
///
/// # Errors
/// `unsupported` for the isolation, `conflict` if the kernel is in a transition, `deadline` if it did not become idle or a
/// process did not stop, and those of saving: the kernel runs on.
pub async fn copy_machine(host: &Rc<Host>, kernel: &Rc<Kernel>, wait: Duration) -> Result<(MachineCopy, Duration)> {
    let (host, own) = (Rc::clone(host), Rc::clone(kernel));
    let (saved, pause) = queue_ticket::take(Ticket::new(kernel), Trace::None, wait, move |link| async move {
        own.not_in_transition()?;
        let began = Instant::now();
        let late = |_| Err(Error::deadline("the worker did not answer"));
        let stopped = tokio::time::timeout(limits::WORKER_STOP, link.suspend_for_copy()).await.unwrap_or_else(late);
        let saved = match stopped {
            Ok(()) => host.making_room(async || own.save_running(&host).await).await,
            Err(error) => Err(error),
        };
        // The worker may be stopped although its answer was lost.
        let resumed = tokio::time::timeout(limits::WORKER_STOP, link.resume()).await.unwrap_or_else(late);
        if let Err(error) = &resumed {
            tracing::warn!(kernel = %own.spec().name, %error, "a copied kernel did not continue; its worker is ended");
            own.release_worker();
        }
        let pause = began.elapsed();
        Ok((saved.and_then(|saved| resumed.map(|()| saved))?, pause))
    })
    .await?;
    Ok((saved.into_copy().await?, pause))
}
