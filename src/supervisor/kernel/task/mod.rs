//! The one task that owns a kernel: takes commands and reports in order, steps its `Life`, performs the actions.
//!
//! ```text
//! Kernel (door) ── Command ─▶ ┌──────┐ ── Life::step ─▶ actions: start, stop, dispatch, journal, publish
//! Listener (worker) ─ Report ▶│ Task │
//! clocks ────────────────────▶└──────┘
//! ```
//!
//! Fast work (a database commit) is awaited here; slow work (a worker start, an engine operation) runs beside the task
//! and reports back. State is persisted before the task acts on it.

mod archive;
mod background;
mod change;
mod checkpoints;
mod completion;
mod executions;
mod lifecycle;
mod listener;
mod processes;
mod records;
mod recovery;
mod rename;
mod restored;
mod stop;
mod suspend;
mod update;
mod worker_lifecycle;

use std::collections::VecDeque;
use std::rc::Rc;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::command::{Actor, Command, Operation, Reply, StartMode, Waiting};
use super::execution::Execution;
use super::lease::{self, Lease};
use super::tools::Tools;
use crate::core::error::{Error, Result};
use crate::core::exec::ExecEnd;
use crate::core::ids::ExecId;
use crate::core::info::GivenMount;
use crate::core::kernel::{CrashCause, Event, Life, State, StopReason};
use crate::core::limits;
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::services::{CheckpointService, KernelServices};
use crate::supervisor::workers::Workers;
use crate::supervisor::workers::admission::ExecPermit;
use crate::supervisor::workers::worker::{LiveWorker, Started};

pub(crate) use listener::Listener;

/// An item in the worker's queue.
enum Item {
    Execution(Rc<Execution>),
    Operation(Operation, Option<Waiting>),
    /// A transition: the only item that starts while a transition record exists.
    Transition(Operation, Option<Waiting>),
    /// A stop that waits for all earlier items.
    Stop(Reply<()>),
}

/// Reports of the worker and of the task's helpers. At most a handful exist at a time: one worker, one execution, one
/// operation; so the channel needs no bound of its own.
pub(crate) enum Report {
    /// A start has completed or failed.
    Started { attempt: u64, outcome: Box<Result<Started>> },
    /// The worker ended an execution.
    Ended { exec: ExecId, end: ExecEnd },
    /// The worker accepts no more work.
    Last { attempt: u64 },
    /// The worker reports the cause of its end.
    Dying { attempt: u64, cause: CrashCause },
    /// The link is closed.
    Disconnected { attempt: u64 },
    /// The worker could not save at a stop; it is stopped nevertheless.
    NotSaved { attempt: u64, error: Error },
    /// The worker's process has ended.
    Gone { attempt: u64 },
    /// The paused worker runs again, or does not.
    Resumed { attempt: u64, outcome: Result<()> },
    /// The recovery before this start has completed or failed.
    Recovered { attempt: u64, outcome: Result<()> },
    /// The operation has ended.
    OperationDone { number: u64 },
    /// A permit to run one more execution was granted.
    PermitGranted(ExecPermit),
}

/// The kernel's current worker.
struct Current {
    attempt: u64,
    worker: Rc<LiveWorker>,
    cause: Option<CrashCause>,
    not_saved: Option<Error>,
    /// The engine is gone: queued work waits for the next worker.
    leaving: bool,
}

/// One kernel's task.
pub(crate) struct Task {
    host: Rc<Host>,
    workers: Rc<Workers>,
    checkpoints: Rc<dyn CheckpointService>,
    kernel: Rc<Kernel>,
    life: Life,
    // Boxed: a channel allocates for dozens of items at once, and thousands of kernels may be inactive.
    commands: mpsc::Receiver<Box<Command>>,
    reports: mpsc::UnboundedReceiver<Box<Report>>,
    reporter: mpsc::UnboundedSender<Box<Report>>,
    work: Work,
    worker: WorkerState,
    timers: Timers,
    ends: Ends,
    mounts: Mounts,
    lease: Option<Lease>,
    tools: Rc<Tools>,
    /// Why the history could not be loaded. Nothing is written then: the records on disk stay as they are.
    damage: Option<Error>,
    /// The task is ending.
    leaving: bool,
}

/// Queued work, and the running execution.
struct Work {
    queue: VecDeque<Item>,
    running: Option<(Rc<Execution>, Option<ExecPermit>)>,
    prepared: Option<PreparedStart>,
    permit: Permit,
    /// The operation under way, by number.
    operating: Option<u64>,
    operations: u64,
}

/// The kernel's worker, and requests to stop it.
#[derive(Default)]
struct WorkerState {
    current: Option<Current>,
    /// Present while the starting worker is wanted.
    wanted: Option<oneshot::Sender<()>>,
    /// The mounts with which the worker was started.
    started_with: Vec<GivenMount>,
    stop_replies: Vec<Reply<()>>,
    /// Whether the stop under way is forced, or the daemon's.
    is_stop_forced: bool,
}

/// Deadlines of the task.
#[derive(Default)]
struct Timers {
    /// The idle stop.
    idle_at: Option<Instant>,
    /// The next start after a crash.
    backoff_at: Option<Instant>,
    /// The next attempt to journal an end.
    retry_at: Option<Instant>,
    /// The save of a state change that no client awaits.
    save_at: Option<Instant>,
}

/// Executions that have ended.
#[derive(Default)]
struct Ends {
    reported: Vec<ExecId>,
    /// Executions whose end the journal had no room for, oldest first.
    unjournalled: VecDeque<Rc<Execution>>,
}

/// The mounts added since creation.
#[derive(Default)]
struct Mounts {
    added: Vec<GivenMount>,
    /// Mounts that a restore detached from the live worker before its files changed; they are still recorded.
    detached: Vec<GivenMount>,
}

/// An execution that the worker received before its start was journalled. Withdrawn when dropped.
struct PreparedStart {
    exec: ExecId,
    link: Option<Rc<WorkerLink>>,
}

impl PreparedStart {
    /// Disarms the guard; returns the link that holds the prepared execution.
    fn disarm(mut self) -> Option<Rc<WorkerLink>> {
        self.link.take()
    }
}

impl Drop for PreparedStart {
    fn drop(&mut self) {
        if let Some(link) = &self.link {
            link.abort(self.exec);
        }
    }
}

/// The host-wide permit to run an execution.
enum Permit {
    None,
    Requested(PermitRequest),
    Granted(ExecPermit),
}

/// A queued permit request; withdrawn when dropped.
struct PermitRequest(tokio::task::AbortHandle);

impl Drop for PermitRequest {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Initial data of a task.
pub(crate) struct Beginning {
    pub life: Life,
    pub lease: Option<Lease>,
    pub mounts: Vec<GivenMount>,
    pub tools: Rc<Tools>,
    /// Executions without a worker that could not be closed.
    pub unclosed: Vec<ExecId>,
    /// Why the history could not be loaded.
    pub damage: Option<Error>,
}

/// An adopted worker, with its running and unacknowledged executions.
pub(crate) struct Adopted {
    pub started: Started,
    pub executions: Vec<(Rc<Execution>, bool)>,
}

impl Task {
    pub(crate) fn new(
        services: &KernelServices,
        kernel: Rc<Kernel>,
        commands: mpsc::Receiver<Box<Command>>,
        channel: (mpsc::UnboundedSender<Box<Report>>, mpsc::UnboundedReceiver<Box<Report>>),
        beginning: Beginning,
    ) -> Self {
        let (reporter, reports) = channel;
        *kernel.tools.borrow_mut() = Rc::downgrade(&beginning.tools);
        let mut task = Task {
            host: Rc::clone(&services.host),
            workers: Rc::clone(&services.workers),
            checkpoints: Rc::clone(&services.checkpoints),
            kernel,
            life: beginning.life,
            commands,
            reports,
            reporter,
            work: Work {
                queue: VecDeque::new(),
                running: None,
                prepared: None,
                permit: Permit::None,
                operating: None,
                operations: 0,
            },
            worker: WorkerState::default(),
            timers: Timers::default(),
            ends: Ends::default(),
            mounts: Mounts { added: beginning.mounts, detached: Vec::new() },
            lease: beginning.lease,
            tools: beginning.tools,
            damage: beginning.damage,
            leaving: false,
        };
        task.resume_unjournalled(beginning.unclosed);
        task
    }

    /// Runs until the kernel is removed or the daemon releases it.
    pub(crate) async fn run(mut self, adopted: Option<Adopted>) {
        if adopted.is_some() || !self.host.config.daemon.resume_kernels {
            self.forget_resumption().await;
        }
        if let Some(adopted) = adopted {
            self.adopt(adopted).await;
        } else if let State::Crashed { .. } = self.life.state {
            self.timers.backoff_at = Some(Instant::now() + limits::RESTART_BACKOFF_FIRST);
        }
        self.begin_recovery().await;
        while !self.leaving {
            let clock = earliest(
                earliest(self.timers.idle_at, self.timers.backoff_at),
                earliest(self.timers.retry_at, self.timers.save_at),
            );
            // Boxed: otherwise each waiting task holds room for the largest future.
            tokio::select! {
                biased;
                Some(report) = self.reports.recv() => Box::pin(self.take_report(*report)).await,
                command = self.commands.recv() => match command {
                    Some(command) => Box::pin(self.take_command(*command)).await,
                    None => break,
                },
                () = until(clock) => Box::pin(self.take_clock()).await,
            }
            self.drop_unneeded_permit_request();
        }
        if self.timers.save_at.is_some() {
            self.save_life().await;
        }
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            drop(command);
        }
        self.end_unattached_worker().await;
    }

    async fn take_command(&mut self, command: Command) {
        // An abandoned reply is no failure: the client left.
        match command {
            Command::Run(request, actor, reply) => {
                let _ = reply.send(self.accept(*request, actor).await);
            }
            Command::Spawn(request, actor, reply) => {
                let _ = reply.send(self.accept_process(*request, actor).await);
            }
            Command::Interrupt(exec, actor, reply) => {
                let _ = reply.send(self.interrupt(exec, &actor).await);
            }
            Command::Operate(trace, operation, waiting, reply) => {
                let _ = reply.send(self.operate(trace, operation, waiting).await);
            }
            Command::LeaveQueue => self.drop_given_up(),
            Command::DetachMounts(wanted, reply) => {
                let _ = reply.send(self.detach_mounts(&wanted).await);
            }
            Command::ReattachMounts(reply) => {
                self.reattach_mounts().await;
                let _ = reply.send(Ok(()));
            }
            Command::Restored(done, reply) => {
                let _ = reply.send(self.restored(*done).await);
            }
            Command::Mount(change, mount, reply) => {
                let _ = reply.send(self.mount(change, mount).await);
            }
            Command::Unmount(change, path, reply) => {
                let _ = reply.send(self.unmount(change, &path).await);
            }
            Command::Mounts(reply) => {
                let _ = reply.send(Ok(self.all_mounts().into_iter().map(|given| given.mount).collect()));
            }
            Command::RegisterMcp(change, name, transport, reply) => {
                let _ = reply.send(self.register_mcp(change, name, transport).await);
            }
            Command::UnregisterMcp(change, name, reply) => {
                let _ = reply.send(self.unregister_mcp(change, &name).await);
            }
            Command::McpServers(reply) => {
                let listed = self.tools.list_offered();
                tokio::task::spawn_local(async move { reply.send(Ok(listed.await)) });
            }
            Command::Start(actor, mode, reply) => {
                let _ = reply.send(self.start(&actor, mode).await);
            }
            Command::Stop(actor, mode, reply) => self.stop(actor, mode, reply).await,
            Command::Suspended { release, until_start, reply } => self.suspended(release, until_start, reply).await,
            Command::Message(change, message, reply) => {
                let _ = reply.send(self.message(change, message).await);
            }
            Command::Work(change, what, key, reply) => {
                let _ = reply.send(self.record_work(change, *what, key).await);
            }
            Command::Lease(actor, holder, token, ttl_ms, reply) => {
                let _ = reply.send(self.take_lease(&actor, holder, token, ttl_ms).await);
            }
            Command::ForgetCheckpoint(change, checkpoint, reply) => {
                let _ = reply.send(self.forget_checkpoint(change, &checkpoint).await);
            }
            Command::StopIfIdle(reply) => {
                let rests = matches!(self.life.state, State::Ready) && !self.is_in_use();
                if rests {
                    self.worker.is_stop_forced = false;
                    self.step(Event::StopAsked { reason: StopReason::Memory, force: false }).await;
                }
                let _ = reply.send(Ok(rests));
            }
            Command::Archive(actor, checkpoint, transition, reply) => {
                let _ = reply.send(self.archive(&actor, checkpoint, &transition).await);
            }
            Command::Unarchive(actor, transition, reply) => {
                let _ = reply.send(self.unarchive(&actor, &transition).await);
            }
            Command::Depart(actor, text, transition, decided, reply) => {
                let _ = reply.send(self.depart(&actor, text, &transition, decided).await);
            }
            Command::Settle(reply) => {
                let _ = reply.send(self.settle().await);
            }
            Command::Admit(change, reply) => {
                let _ = reply.send(self.admit(&change.actor, change.expected_version));
            }
            Command::AdmitRemoval(change, reply) => {
                let _ = reply.send(self.admit_removal(&change.actor, change.expected_version));
            }
            Command::Retain(change, retention, reply) => {
                let _ = reply.send(self.retain(change, retention).await);
            }
            Command::Update(change, update, reply) => {
                let _ = reply.send(self.update(change, *update).await);
            }
            Command::Rename(change, name, reply) => {
                let _ = reply.send(self.rename(change, name).await);
            }
            Command::Wake => {
                self.begin_recovery().await;
                self.dispatch().await;
            }
            Command::Remove(change, reply) => self.remove(change, reply).await,
        }
    }

    async fn take_report(&mut self, report: Report) {
        match report {
            Report::Started { attempt, outcome } => self.worker_started(attempt, *outcome).await,
            Report::Ended { exec, end } => self.execution_ended(exec, end).await,
            Report::Last { attempt } => {
                if let Some(current) = self.worker.current.as_mut().filter(|current| current.attempt == attempt) {
                    current.leaving = true;
                }
                self.link_lost(attempt);
            }
            Report::Dying { attempt, cause } => {
                if let Some(current) = self.worker.current.as_mut().filter(|current| current.attempt == attempt) {
                    current.cause.get_or_insert(cause);
                }
            }
            Report::Disconnected { attempt } => self.link_lost(attempt),
            Report::NotSaved { attempt, error } => {
                if let Some(current) = self.worker.current.as_mut().filter(|current| current.attempt == attempt) {
                    current.not_saved = Some(error);
                }
            }
            Report::Gone { attempt } => self.worker_gone(attempt).await,
            Report::Resumed { attempt, outcome } => self.resumed(attempt, outcome).await,
            Report::Recovered { attempt, outcome } => self.recovered(attempt, outcome).await,
            Report::OperationDone { number } => {
                if self.work.operating == Some(number) {
                    self.work.operating = None;
                    match self.life.state {
                        State::Ready => self.step(Event::Used).await,
                        _ => self.dispatch().await,
                    }
                    self.rearm_idle();
                }
            }
            Report::PermitGranted(permit) => {
                self.work.permit = Permit::Granted(permit);
                self.dispatch().await;
                // The work that needed the permit may be gone; other kernels wait for it.
                if matches!(self.work.permit, Permit::Granted(_)) {
                    self.work.permit = Permit::None;
                }
            }
        }
    }

    async fn take_clock(&mut self) {
        let now = Instant::now();
        if self.timers.backoff_at.is_some_and(|at| at <= now) {
            self.timers.backoff_at = None;
            self.step(Event::BackoffElapsed).await;
            self.begin_recovery().await;
        }
        if self.timers.save_at.is_some_and(|at| at <= now) {
            self.save_life().await;
        }
        if self.timers.retry_at.is_some_and(|at| at <= now) {
            // Retry the ends that the journal refused.
            let _ = self.journal_ends().await;
            self.dispatch().await;
        }
        if self.timers.idle_at.is_some_and(|at| at <= now) {
            self.timers.idle_at = None;
            // A stop saves state, and a full disk may have no room for it.
            if self.is_in_use() || self.host.disk_is_full() {
                self.arm_idle();
            } else {
                self.worker.is_stop_forced = false;
                self.step(Event::IdleElapsed).await;
            }
        }
    }

    /// Whether the worker serves a client, or works in the background.
    fn is_in_use(&self) -> bool {
        let serves = self.kernel.connections.get() > 0 || self.kernel.has_background_work();
        serves || self.work.operating.is_some() || !self.work.queue.is_empty()
    }

    fn arm_idle(&mut self) {
        self.timers.idle_at = self.kernel.spec().idle_timeout().map(|timeout| Instant::now() + timeout);
    }

    fn rearm_idle(&mut self) {
        if matches!(self.life.state, State::Ready) && self.work.operating.is_none() {
            self.arm_idle();
        }
    }

    /// Checks that `actor` may change the kernel now and knows its version.
    fn admit(&self, actor: &Actor, expected_version: u64) -> Result<()> {
        if let Some(damage) = &self.damage {
            let message =
                format!("the history of kernel {} could not be loaded: {}", self.kernel.spec().name, damage.message);
            return Err(Error { message, ..damage.clone() }
                .hint("nothing was changed: restart ryokand to load it again, or remove the kernel"));
        }
        self.kernel.check_here()?;
        self.admit_removal(actor, expected_version)
    }

    /// The same for a removal, which needs no history.
    fn admit_removal(&self, actor: &Actor, expected_version: u64) -> Result<()> {
        if self.kernel.is_withdrawn() {
            return Ok(());
        }
        lease::admit(self.lease.as_ref(), &actor.lease, self.host.now_ms())?;
        let version = self.kernel.view.borrow().version;
        if expected_version != 0 && expected_version != version {
            let name = &self.kernel.spec().name;
            return Err(Error::conflict(format!("kernel {name} is at version {version}, not {expected_version}"))
                .hint("look at what changed, then try again with the present version"));
        }
        Ok(())
    }

    fn used(&self) {
        self.kernel.view.borrow_mut().last_used_at_ms = self.host.now_ms();
    }

    fn link(&self) -> Option<Rc<WorkerLink>> {
        self.kernel.link.borrow().clone()
    }

    async fn start(&mut self, actor: &Actor, mode: StartMode) -> Result<()> {
        self.forget_resumption().await;
        self.admit(actor, 0)?;
        self.settle().await?;
        self.room_for_worker()?;
        if mode == StartMode::WithoutMemory {
            self.discard_memory()?;
        }
        self.timers.backoff_at = None;
        self.step(Event::StartAsked).await;
        Ok(())
    }
}

fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
