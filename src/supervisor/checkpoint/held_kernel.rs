//! Kernels of a group: held together, captured within one pause, restored as one.
//!
//! A held kernel is in a transition, and an operation of its queue lasts until the release: no execution and no other
//! operation starts. From its capture to its thaw, or to its restore, everything inside is frozen, too.
//!
//! ```text
//! hold ─▶ capture ─▶ thaw ─▶ seal ─▶ (dropped)
//!         frozen     runs    a checkpoint of the moment of the capture
//! ```
//! A kernel with a parked execution has no operation of its queue: its files are held, which keeps work from starting, too.
//! The execution is frozen with everything else, and goes on at the thaw.

use std::rc::Rc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::gather::{self, Gathering, gather_beside, gather_quiesced};
use super::memory::Keep;
use super::queue_ticket::{self, Ticket};
use super::quiesce::{Quiesced, Stop};
use super::restore;
use super::state;
use super::take::seal;
use super::verify::Present;
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType, Restoration};
use crate::core::error::{Error, Result};
use crate::core::freeze::drain::{Drain, Executions, InFlight};
use crate::core::ids::{CheckpointId, ExecId};
use crate::core::kernel::transition::Kind;
use crate::core::limits;
use crate::core::snapshot::PortableKind;
use crate::core::spec::Isolation;
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Actor, Change, Trace};
use crate::supervisor::kernel::sharing::FilesHold;
use crate::supervisor::kernel::transition::ExclusiveTransition;

/// Pause between looks for an execution that begins.
const LOOKED_FOR: Duration = Duration::from_millis(10);

/// What keeps other work from a held kernel, until it is dropped.
enum Hold {
    /// An operation of its queue.
    Turn { _release: oneshot::Sender<()> },
    /// Its files are held, beside an execution that goes on.
    Beside { exec: ExecId, _files: FilesHold },
}

/// A kernel in which nothing starts. Dropping it releases the kernel.
pub(crate) struct HeldKernel {
    host: Rc<Host>,
    kernel: Rc<Kernel>,
    link: Rc<WorkerLink>,
    transition: ExclusiveTransition,
    executions: Executions,
    frozen: Option<Quiesced>,
    gathering: Option<Gathering>,
    /// The sealed checkpoint of the present state, for a restore.
    safety: Option<(CheckpointId, Present)>,
    hold: Hold,
}

impl HeldKernel {
    /// Waits until the kernel is idle, and holds it; or holds it beside its running execution.
    ///
    /// # Errors
    /// `conflict` beside another transition, `busy` (leased), `deadline` if running code does not end, `unsupported`
    /// (`park`) if it cannot be parked, and errors of the worker's start.
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
        let mut ahead = kernel.queued();
        ahead.extend(kernel.running());
        ahead.sort_unstable();
        let mut executions = Executions::default();
        if drain.running == InFlight::Abandon {
            executions.interrupted = kernel.interrupt_running(actor).await?.map_or(0, |exec| exec.0);
        }
        let (link, hold) = loop {
            if let (InFlight::Park, Some(exec)) = (drain.running, kernel.running()) {
                match beside(kernel, exec, actor).await? {
                    Some(held) => break held,
                    None => continue,
                }
            }
            if let Some(held) = turn(kernel, actor, drain).await? {
                break held;
            }
        };
        let awaited = ahead.iter().filter(|exec| exec.0 != executions.interrupted && !kernel.is_unfinished(**exec));
        executions.awaited = awaited.map(|exec| exec.0).collect();
        let (host, kernel) = (Rc::clone(host), Rc::clone(kernel));
        let (frozen, gathering, safety) = (None, None, None);
        Ok(HeldKernel { host, kernel, link, transition, executions, frozen, gathering, safety, hold })
    }

    /// What became of its executions so far.
    pub fn executions(&self) -> Executions {
        let queued = self.kernel.queued().into_iter().map(|exec| exec.0).collect();
        Executions { queued, ..self.executions.clone() }
    }

    /// Whether an execution goes on in it.
    pub fn is_beside(&self) -> bool {
        matches!(self.hold, Hold::Beside { .. })
    }

    /// The kernel's revision while nothing starts.
    pub fn revision(&self) -> String {
        match &self.hold {
            Hold::Turn { .. } => self.kernel.view().version.to_string(),
            // What the capture holds of it is of one moment by itself.
            Hold::Beside { exec, .. } => format!("beside execution {exec}"),
        }
    }

    /// Freezes everything inside and captures it, without storing what can be read later. Nothing is visible yet.
    ///
    /// # Errors
    /// Capture errors of any part.
    pub async fn capture(&mut self, kind: CheckpointType) -> Result<CheckpointId> {
        let HeldKernel { host, kernel, link, .. } = &*self;
        let beside = match &self.hold {
            Hold::Beside { exec, .. } => gather_beside(host, kernel, link, (*exec, kind)).await?,
            Hold::Turn { .. } => None,
        };
        let (gathering, still) = match beside {
            Some(captured) => captured,
            // Nothing runs, or the execution has ended and nothing else has begun.
            None => {
                let keep = Some(Keep { kind, spare: None });
                let stop = (PortableKind::Checkpoint, Stop::Freeze);
                gather_quiesced(host, kernel, Some(link), keep, stop).await?
            }
        };
        self.executions.parked = gathering.under_way().map_or(0, |exec| exec.0);
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
        let description = match self.executions.parked {
            0 => String::new(),
            exec => format!("the engine's state before execution {exec}, and the files of a moment while it ran"),
        };
        let name = CheckpointRequest::name_of(name);
        let request = CheckpointRequest { pinned: true, description, ..CheckpointRequest::new(kind, &name) };
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

    /// Suspends everything inside, which does not run in between if it is frozen. The kernel stays held. An execution
    /// beside which it is held goes on.
    ///
    /// # Errors
    /// Errors of the worker, which runs on then.
    pub async fn pause(&mut self) -> Result<()> {
        if self.is_beside() {
            return self.thaw().await;
        }
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

/// Takes a turn in the queue. `None`: an execution has begun before, which is to be parked.
async fn turn(kernel: &Rc<Kernel>, actor: &Actor, drain: Drain) -> Result<Option<(Rc<WorkerLink>, Hold)>> {
    let (ticket, guard) = Ticket::with_guard(kernel);
    let (started, mut on_start) = oneshot::channel();
    let (release, on_release) = oneshot::channel::<()>();
    let trace = Trace::Transition(Change { actor: actor.clone(), expected_version: 0 });
    let holding = tokio::task::spawn_local(queue_ticket::take(ticket, trace, drain.wait, move |link| async move {
        // The holder may have given up.
        let _ = started.send(link);
        // Only the end of the sender matters.
        let _ = on_release.await;
        Ok(())
    }));
    let began = async {
        while drain.running != InFlight::Park || kernel.running().is_none() {
            tokio::time::sleep(LOOKED_FOR).await;
        }
    };
    let started = tokio::select! {
        biased;
        started = &mut on_start => started,
        () = began => return Ok(None),
    };
    let Ok(link) = started else {
        let ended = holding.await.map_err(|error| Error::internal(error.to_string()))?;
        return Err(ended.err().unwrap_or_else(|| Error::internal("the kernel was released at once")));
    };
    drop(guard);
    Ok(Some((link, Hold::Turn { _release: release })))
}

/// Keeps everything from starting beside a running execution. `None`: it has ended.
///
/// # Errors
/// `busy` (leased), `unsupported` (`park`).
async fn beside(kernel: &Rc<Kernel>, exec: ExecId, actor: &Actor) -> Result<Option<(Rc<WorkerLink>, Hold)>> {
    kernel.admit(actor, 0).await?;
    let name = kernel.spec().name.clone();
    if kernel.spec().isolation != Isolation::Process {
        return Err(Error::unsupported(format!(
            "execution {exec} of {name} runs in a virtual machine, which is not parked"
        ))
        .reason("park")
        .hint("wait for its end (--wait), or interrupt it (--interrupt)"));
    }
    let files = kernel.hold_files();
    let link = kernel.link.borrow().clone().filter(|_| kernel.running() == Some(exec));
    let Some(link) = link else { return Ok(None) };
    // A refusal comes before anything stands still. Whether it has ended is seen again by the capture. The worker knows
    // better which one it is.
    let refused = |error: Error| {
        let message = format!("kernel {name}: {}", error.message);
        Error { message, ..error }
    };
    let exec = state::under_way(&link).await?.unwrap_or(exec);
    state::saved_before(&link, exec).await.map_err(refused)?;
    Ok(Some((link, Hold::Beside { exec, _files: files })))
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
