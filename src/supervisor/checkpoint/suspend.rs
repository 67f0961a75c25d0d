//! Suspends a kernel: what a stop keeps is stored first, then every process is paused and its memory stays. A virtual
//! machine is stopped, too.
//!
//! Nothing durable depends on the pause, so it is no transition with a record: until the worker is paused the kernel is
//! as before, and afterwards the worker itself says that it is paused.

use std::rc::Rc;

use super::before_stop;
use super::queue_ticket::{self, Ticket};
use crate::core::error::{Error, Result};
use crate::core::kernel::{State, StopReason};
use crate::core::limits;
use crate::core::snapshot::{Architecture, Snapshot, Suspend};
use crate::core::spec::Isolation;
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Actor, Trace};
use crate::sys::fault;

/// How a kernel is suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Suspension {
    /// The running execution is interrupted; otherwise its end is awaited.
    pub interrupt: bool,
    /// The memory is saved and the worker ends: the next use continues from there.
    pub release: bool,
    /// If the daemon is stopped meanwhile, its next start starts the kernel.
    pub until_start: bool,
}

/// Suspends a kernel at its next safe point.
///
/// # Errors
/// `unsupported` with `release` for the isolation, `conflict` if the kernel has no worker or is in a transition, `busy` (leased),
/// `refused` if its processes have more memory than the kind suspend keeps, `deadline` if the kernel did not become idle or a process did not stop, and errors of saving: nothing is paused then.
pub async fn suspend(host: &Rc<Host>, kernel: &Rc<Kernel>, actor: Actor, how: Suspension) -> Result<()> {
    let Suspension { interrupt, release, until_start } = how;
    kernel.admit(&actor, 0).await?;
    kernel.not_in_transition()?;
    match kernel.view().state {
        State::Suspended if !release => return Ok(()),
        State::Suspended | State::Starting | State::Ready | State::Busy { .. } | State::Stopping { .. } => {}
        State::Created
        | State::Stopped { .. }
        | State::Crashed { .. }
        | State::Archived { .. }
        | State::Departed { .. } => return Err(kernel.not_in_memory("suspended")),
    }
    if interrupt {
        kernel.interrupt_running(&actor).await?;
    }
    let (host, own) = (Rc::clone(host), Rc::clone(kernel));
    queue_ticket::take(Ticket::new(kernel), Trace::None, limits::CHECKPOINT_WAIT, move |link| async move {
        own.not_in_transition()?;
        host.making_room(async || link.save().await).await?;
        before_stop::take_or_report(&host, &own, &link, StopReason::Suspended).await;
        check_memory(&host, &own, &link).await?;
        fault::point("kernel.worker.suspend").map_err(|error| Error::unavailable(error.to_string()))?;
        let late = |_| Err(Error::deadline("the worker did not answer"));
        let paused = tokio::time::timeout(limits::WORKER_STOP, link.suspend()).await.unwrap_or_else(late);
        let paused = match paused {
            Ok(()) => own.park_worker().await,
            failed => failed,
        };
        let paused = match paused {
            Ok(()) if release => host.making_room(async || own.save_memory(&host).await).await,
            paused => paused,
        };
        if let Err(error) = paused {
            own.unpark_worker().await;
            // The worker may be paused although its reply was lost.
            let _ = tokio::time::timeout(limits::WORKER_STOP, link.resume()).await;
            return Err(error);
        }
        let suspended = own.suspended(release, until_start).await;
        if suspended.is_err() {
            // The stop that was requested meanwhile needs its answer.
            own.unpark_worker().await;
        }
        suspended
    })
    .await
}

/// Checks the limit of kind suspend for paused processes. A machine has its own memory, and what it saves is checked there.
async fn check_memory(host: &Host, kernel: &Kernel, link: &WorkerLink) -> Result<()> {
    let spec = kernel.spec_now();
    let Some(most) = host.config.limits.suspended_memory.filter(|_| spec.isolation == Isolation::Process) else {
        return Ok(());
    };
    let late = |_| Err(Error::deadline("the worker did not answer"));
    let usage = tokio::time::timeout(limits::WORKER_STOP, link.usage()).await.unwrap_or_else(late)?;
    let snapshot = Snapshot {
        architecture: Architecture::here(),
        base_image_version: String::new(),
        host: host.id(),
        content: Suspend { memory_bytes: usage.memory_bytes, machine: None },
    };
    Ok(snapshot.check_size(most)?)
}
