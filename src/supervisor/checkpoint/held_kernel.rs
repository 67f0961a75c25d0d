//! Kernels of a group: held together, captured within one pause, restored as one.
//!
//! A held kernel is in a transition, and an operation of its queue lasts until the release: no execution and no other
//! operation starts. From its capture to its thaw, or to its restore, everything inside is frozen, too.
//!
//! ```text
//! hold ─▶ capture ─▶ thaw ─▶ seal ─▶ (dropped)
//!         frozen     runs    a checkpoint of the moment of the capture
//! ```

use std::rc::Rc;

use tokio::sync::oneshot;

use super::gather::{self, Gathering, gather_quiesced};
use super::memory::Keep;
use super::queue_ticket::{self, Ticket};
use super::quiesce::{Quiesced, Stop};
use super::restore;
use super::take::seal;
use super::verify::Present;
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType, Restoration};
use crate::core::error::{Error, Result};
use crate::core::freeze::drain::Drain;
use crate::core::ids::{CheckpointId, ExecId};
use crate::core::kernel::transition::Kind;
use crate::core::limits;
use crate::core::snapshot::PortableKind;
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Actor, Change, Trace};
use crate::supervisor::kernel::transition::ExclusiveTransition;

/// A kernel in which nothing starts. Dropping it releases the kernel.
pub(crate) struct HeldKernel {
    host: Rc<Host>,
    kernel: Rc<Kernel>,
    link: Rc<WorkerLink>,
    transition: ExclusiveTransition,
    /// The execution that was interrupted for it.
    pub interrupted: Option<ExecId>,
    frozen: Option<Quiesced>,
    gathering: Option<Gathering>,
    /// The sealed checkpoint of the present state, for a restore.
    safety: Option<(CheckpointId, Present)>,
    _release: oneshot::Sender<()>,
}

impl HeldKernel {
    /// Waits until the kernel is idle, and holds it.
    ///
    /// # Errors
    /// `conflict` beside another transition, `busy` (leased), `deadline` if running code does not end, and errors of the
    /// worker's start.
    pub async fn hold(
        host: &Rc<Host>,
        kernel: &Rc<Kernel>,
        kind: Kind,
        actor: &Actor,
        drain: Drain,
    ) -> Result<HeldKernel> {
        if kernel.interrupted() == Some(Kind::Restore) {
            kernel.recovered().await?;
        }
        let transition = ExclusiveTransition::begin(kernel, kind)?;
        let interrupted = if drain.interrupt { kernel.interrupt_running(actor).await? } else { None };
        let (ticket, guard) = Ticket::with_guard(kernel);
        let (started, on_start) = oneshot::channel();
        let (release, on_release) = oneshot::channel::<()>();
        let trace = Trace::Transition(Change { actor: actor.clone(), expected_version: 0 });
        let holding = tokio::task::spawn_local(queue_ticket::take(ticket, trace, drain.wait, move |link| async move {
            // The holder may have given up.
            let _ = started.send(link);
            // Only the end of the sender matters.
            let _ = on_release.await;
            Ok(())
        }));
        let Ok(link) = on_start.await else {
            let ended = holding.await.map_err(|error| Error::internal(error.to_string()))?;
            return Err(ended.err().unwrap_or_else(|| Error::internal("the kernel was released at once")));
        };
        drop(guard);
        let (host, kernel) = (Rc::clone(host), Rc::clone(kernel));
        let (frozen, gathering, safety) = (None, None, None);
        Ok(HeldKernel { host, kernel, link, transition, interrupted, frozen, gathering, safety, _release: release })
    }

    /// The kernel's revision while nothing runs.
    pub fn revision(&self) -> String {
        self.kernel.view().version.to_string()
    }

    /// Freezes everything inside and captures it, without storing what can be read later. Nothing is visible yet.
    ///
    /// # Errors
    /// Capture errors of any part.
    pub async fn capture(&mut self, kind: CheckpointType) -> Result<CheckpointId> {
        let keep = Some(Keep { kind, spare: None });
        let (gathering, still) =
            gather_quiesced(&self.host, &self.kernel, Some(&self.link), keep, (PortableKind::Checkpoint, Stop::Freeze))
                .await?;
        self.frozen = Some(still);
        let id = gathering.id()?;
        self.gathering = Some(gathering);
        Ok(id)
    }

    /// Stores the captured state and makes it a checkpoint.
    ///
    /// # Errors
    /// Store and database errors.
    pub async fn seal(&mut self, name: &str, kind: CheckpointType, actor: &Actor) -> Result<Checkpoint> {
        let gathering = self.gathering.take().ok_or_else(|| Error::internal("nothing was captured"))?;
        let gathered = gathering.finish(&self.host).await?;
        let present = Present::of(&gathered, &self.kernel);
        let request =
            CheckpointRequest { pinned: true, ..CheckpointRequest::new(kind, &CheckpointRequest::name_of(name)) };
        let (checkpoint, _) = seal(&self.host, &self.kernel, gathered, &request, actor, None).await?;
        self.safety = Some((checkpoint.id, present));
        Ok(checkpoint)
    }

    /// Resumes everything inside; the kernel stays held.
    ///
    /// # Errors
    /// Errors of the worker.
    pub async fn thaw(&mut self) -> Result<()> {
        match self.frozen.take() {
            Some(still) => still.end().await,
            None => Ok(()),
        }
    }

    /// Suspends everything inside, which does not run in between if it is frozen. The kernel stays held.
    ///
    /// # Errors
    /// Errors of the worker, which runs on then.
    pub async fn pause(&mut self) -> Result<()> {
        let paused = pause_worker(&self.link).await;
        // A stopped machine would not answer.
        let thawed = self.thaw().await;
        paused.and(thawed)?;
        park(&self.kernel, &self.link).await
    }

    /// Restores a checkpoint. The kernel is held as [`Kind::Restore`].
    ///
    /// # Errors
    /// Restore errors; the kernel is as before.
    pub async fn restore(&mut self, checkpoint: CheckpointId, actor: &Actor) -> Result<Restoration> {
        self.thaw().await?;
        let HeldKernel { host, kernel, link, transition, safety, .. } = self;
        restore::restore_held(host, kernel, link, transition, checkpoint, safety.take(), actor).await
    }

    /// Returns to a checkpoint of the state before, unless the kernel is at it.
    ///
    /// # Errors
    /// Restore errors.
    pub async fn revert(&mut self, checkpoint: CheckpointId, actor: &Actor) -> Result<()> {
        self.thaw().await?;
        let records = &self.kernel.records;
        if records.head().await?.checkpoint == Some(checkpoint) && !records.changed_since_head().await? {
            return Ok(());
        }
        self.transition.release();
        self.transition = ExclusiveTransition::begin(&self.kernel, Kind::Restore)?;
        let HeldKernel { host, kernel, link, transition, .. } = self;
        restore::restore_held(host, kernel, link, transition, checkpoint, None, actor).await.map(drop)
    }
}

/// Suspends a kernel whose group is paused, at its next safe point.
///
/// # Errors
/// `deadline` if running code does not end, and errors of the worker.
pub(crate) async fn pause(kernel: &Rc<Kernel>) -> Result<()> {
    let own = Rc::clone(kernel);
    queue_ticket::take(Ticket::new(kernel), Trace::Recovery, limits::FREEZE_WAIT, move |link| async move {
        // The group may have been resumed meanwhile.
        if !own.is_group_paused() {
            return Ok(());
        }
        pause_worker(&link).await?;
        park(&own, &link).await
    })
    .await
}

async fn pause_worker(link: &WorkerLink) -> Result<()> {
    let paused = tokio::time::timeout(limits::WORKER_STOP, link.suspend()).await;
    let paused = paused.unwrap_or_else(|_| Err(Error::deadline("the worker did not answer")));
    if paused.is_err() {
        // The worker may be paused although its reply was lost.
        let _ = tokio::time::timeout(limits::WORKER_STOP, link.resume()).await;
    }
    paused
}

/// Records that a paused worker is suspended; its machine stops.
async fn park(kernel: &Rc<Kernel>, link: &WorkerLink) -> Result<()> {
    let parked = match kernel.park_worker().await {
        Ok(()) => kernel.suspended(false, false).await,
        failed => failed,
    };
    if parked.is_err() {
        kernel.unpark_worker().await;
        let _ = tokio::time::timeout(limits::WORKER_STOP, link.resume()).await;
    }
    parked
}

/// Stores changed files while the kernel runs on, so that a capture has less to read.
///
/// # Errors
/// Errors of the files and of the store; nothing depends on it.
pub(crate) async fn read_ahead(host: &Rc<Host>, kernel: &Rc<Kernel>) -> Result<()> {
    gather::read_ahead(host, kernel).await
}

/// Reads everything that a restore of this checkpoint needs.
///
/// # Errors
/// `corrupt`, `refused`.
pub(crate) async fn validate(host: &Rc<Host>, kernel: &Rc<Kernel>, checkpoint: CheckpointId) -> Result<()> {
    restore::validate(host, kernel, checkpoint).await
}

/// Removes a checkpoint of a freeze that failed.
///
/// # Errors
/// Database errors.
pub(crate) async fn withdraw(kernel: &Rc<Kernel>, checkpoint: CheckpointId) -> Result<()> {
    if kernel.records.state.withdraw_checkpoint(checkpoint).await? {
        let mut view = kernel.view.borrow_mut();
        view.checkpoints = view.checkpoints.saturating_sub(1);
    }
    Ok(())
}
