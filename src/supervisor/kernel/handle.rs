//! A kernel as the rest of the daemon holds it: the door to its task, and what can be seen without asking the task.
//!
//! Reads that touch only databases or the present view go straight (that of a journal, once what was told is written); whatever changes the
//! kernel or needs its worker goes through the task's bounded queue.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::{Rc, Weak};

use tokio::sync::{mpsc, oneshot};

use super::command::{Actor, Change, Command, Operation, Reply, Trace, Waiting};
use super::execution::Execution;
use super::tools::Tools;
use crate::catalog::state::{Finished, Restored};
use crate::core::error::{Error, Result};
use crate::core::exec::ExecRequest;
use crate::core::ids::{CheckpointId, Digest, Epoch, ExecId, KernelId};
use crate::core::info::{GivenMount, JournalEntry, JournalView, KernelInfo};
use crate::core::kernel::State;
use crate::core::kernel::transition::Transitions;
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::core::origin::{Origin, OriginKind};
use crate::core::retention::Retention;
use crate::core::spec::KernelSpec;
use crate::link::host::{Job, WorkerLink};
use crate::supervisor::host::audit::Audited;
use crate::supervisor::kernel::journal::{Found, Records};
use crate::supervisor::kernel::sharing::Sharing;
use crate::supervisor::workers::worker::KernelStart;

/// What everybody may see of a kernel; written by its task only.
#[derive(Debug, Clone)]
pub struct View {
    /// Where it is in its life.
    pub state: State,
    /// Grows with each change from outside.
    pub version: u64,
    /// How many executions there were.
    pub executions: u64,
    /// How many checkpoints there are.
    pub checkpoints: u64,
    /// Milliseconds since 1970.
    pub last_used_at_ms: i64,
    /// Sandbox layers in force.
    pub sandbox: Vec<String>,
    /// What the worker holds that its state does not capture.
    pub missed: Vec<MissedEntry>,
    /// Files that the last capture of the workspace by this daemon could not read.
    pub unreadable: Vec<MissedEntry>,
    /// Background jobs.
    pub jobs: Vec<Job>,
    /// The worker's init on this host.
    pub worker_pid: Option<u32>,
    /// How its state came to be.
    pub origin: Origin,
    /// What of that the worker was told when it started; of one that was adopted nothing is known.
    pub(crate) told_origin: Option<(OriginKind, u32)>,
}

/// The door to one kernel.
pub struct Kernel {
    /// Its identity.
    pub id: KernelId,
    /// Its owner.
    pub uid: u32,
    /// What it was made from.
    pub spec: KernelSpec,
    /// Its epoch on this host.
    pub epoch: Epoch,
    /// The kernel in whose workspace it works, if that is not its own.
    pub thread_of: Option<KernelId>,
    /// Milliseconds since 1970.
    pub created_at_ms: i64,
    /// What its events call it.
    pub event_name: String,
    /// What it keeps on disk.
    pub records: Records,
    pub(crate) view: RefCell<View>,
    pub(crate) link: RefCell<Option<Rc<WorkerLink>>>,
    pub(crate) executions: RefCell<HashMap<ExecId, Rc<Execution>>>,
    pub(crate) commands: mpsc::Sender<Box<Command>>,
    /// The exclusive change that it is in.
    pub(crate) transitions: RefCell<Transitions>,
    /// Its MCP servers' tools, which are the task's.
    pub(crate) tools: RefCell<Weak<Tools>>,
    /// Who works in its workspace.
    pub(crate) sessions: Sharing,
    /// How the workspace is captured, and why no better.
    pub(crate) capture: RefCell<String>,
    /// The tree that whoever follows its files builds upon: its objects are in use.
    pub(crate) base: Cell<Option<Digest>>,
    /// How long checkpoints that ryokan takes by itself are kept.
    pub(crate) retention: Cell<Retention>,
    /// Before then, milliseconds since 1970, no checkpoint becomes too old.
    pub(crate) prune_due_ms: Cell<i64>,
    /// Checkpoints that operations read now, and how many do.
    pub(crate) held: RefCell<BTreeMap<CheckpointId, u32>>,
    /// So that the host knows how many are in memory.
    pub(crate) _remembered: Rc<()>,
}

impl Kernel {
    /// What can be seen now.
    pub fn view(&self) -> View {
        self.view.borrow().clone()
    }

    /// How its state came to be, and its generation.
    pub(crate) fn origin_now(&self) -> (OriginKind, u32) {
        let view = self.view.borrow();
        (view.origin.kind, view.origin.generation)
    }

    /// The kernel as clients are shown it; asks a live worker what it uses.
    pub async fn info(&self) -> KernelInfo {
        let link = self.link.borrow().clone();
        let memory_bytes = match link {
            // One that does not answer in time must not keep a list from being shown.
            Some(link) => match tokio::time::timeout(limits::USAGE_ANSWER, link.usage()).await {
                Ok(Ok(usage)) => usage.memory_bytes,
                Ok(Err(_)) | Err(_) => 0,
            },
            None => 0,
        };
        KernelInfo { memory_bytes, ..self.info_without_usage() }
    }

    /// What it is made from, with what has changed of that since.
    pub(crate) fn spec_now(&self) -> KernelSpec {
        KernelSpec { retention: self.retention.get(), ..self.spec.clone() }
    }

    /// The kernel as clients are shown it in lists.
    pub fn info_without_usage(&self) -> KernelInfo {
        let view = self.view.borrow();
        KernelInfo {
            id: self.id,
            spec: self.spec_now(),
            state: view.state.name().to_owned(),
            state_reason: view.state.reason(),
            version: view.version,
            epoch: self.epoch,
            checkpoints: u32::try_from(view.checkpoints).unwrap_or(u32::MAX),
            created_at_ms: self.created_at_ms,
            last_used_at_ms: view.last_used_at_ms,
            memory_bytes: 0,
            sandbox: view.sandbox.clone(),
            uid: self.uid,
            executions: view.executions,
            origin: view.origin.clone(),
            thread_of: self.thread_of,
            capture: self.capture.borrow().clone(),
        }
    }

    pub(super) async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        self.commands.try_send(Box::new(command(reply))).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                Error::busy(format!("kernel {} has too many requests waiting", self.spec.name))
                    .hint("wait for some of them to be answered")
            }
            mpsc::error::TrySendError::Closed(_) => self.gone(),
        })?;
        answer.await.unwrap_or_else(|_| Err(self.gone()))
    }

    /// As [`Self::ask`], for what must be done however many ask for something.
    pub(super) async fn ask_patiently<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Box::new(command(reply))).await.map_err(|_| self.gone())?;
        answer.await.unwrap_or_else(|_| Err(self.gone()))
    }

    fn gone(&self) -> Error {
        Error::not_found(format!("kernel {} is no longer here", self.spec.name))
    }

    /// Why it cannot be archived: it was used meanwhile.
    pub(crate) fn used_meanwhile(&self) -> Error {
        Error::conflict(format!("kernel {} was used while it was to be archived", self.spec.name))
            .reason("used")
            .hint("try again when no client uses it")
    }

    /// What its worker needs to know of it.
    ///
    /// # Errors
    /// `corrupt` if the kernel in whose workspace it works is gone.
    pub(crate) fn start_request(&self) -> Result<KernelStart<'_>> {
        let (id, epoch, uid, origin) = (self.id, self.epoch, self.uid, self.origin_now());
        if let Some(owner) = self.thread_of
            && self.files().id != owner
        {
            return Err(Error::corrupt(format!("kernel {owner}, in whose workspace it works, is gone")));
        }
        Ok(KernelStart { id, epoch, uid, spec: &self.spec, origin, workspace_of: self.thread_of })
    }

    /// Journals and queues an execution.
    ///
    /// # Errors
    /// `busy`, `conflict`, `unavailable` (breaker), and those of the journal.
    pub async fn run(&self, request: ExecRequest, actor: Actor) -> Result<Rc<Execution>> {
        request.check().map_err(|error| Error::invalid(error.to_string()))?;
        self.ask(|reply| Command::Run(Box::new(request), actor, reply)).await
    }

    /// An execution by number: live, or from the journal.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn execution(&self, id: ExecId) -> Result<Rc<Execution>> {
        if let Some(live) = self.executions.borrow().get(&id) {
            return Ok(Rc::clone(live));
        }
        match self.records.find(id).await? {
            Found::Ended(kept, end) => Ok(Execution::ended(id, kept, *end)),
            Found::Running => {
                // It ended between the two looks, or its worker is being adopted.
                let live = self.executions.borrow().get(&id).cloned();
                live.ok_or_else(|| Error::unavailable(format!("execution {id} is being taken over")).hint("try again"))
            }
            Found::Nothing => Err(Error::not_found(format!("kernel {} has no execution {id}", self.spec.name))),
        }
    }

    /// Journal entries after a number, oldest first, at most one page. Of an execution that has ended and whose end has no
    /// room in the journal yet, what the task knows is told.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn journal(&self, view: JournalView, after: u64, most: usize) -> Result<Vec<JournalEntry>> {
        let mut page = self.records.journal(view, after, most).await?;
        let executions = self.executions.borrow();
        for entry in page.iter_mut().filter(|entry| entry.status == "running") {
            if let Some(end) = executions.get(&ExecId(entry.exec)).and_then(|execution| execution.unjournalled()) {
                end.status.name().clone_into(&mut entry.status);
                (entry.code, entry.err, entry.duration_us) = (end.code, end.err, end.duration_us);
            }
        }
        Ok(page)
    }

    /// Interrupts an execution.
    ///
    /// # Errors
    /// `notFound` if there never was one of that number.
    pub async fn interrupt(&self, exec: ExecId, actor: Actor) -> Result<()> {
        self.ask(|reply| Command::Interrupt(exec, actor, reply)).await
    }

    /// Interrupts what runs now, if anything does.
    ///
    /// # Errors
    /// `busy` (leased).
    pub(crate) async fn interrupt_running(&self, actor: &Actor) -> Result<()> {
        let running = match self.view.borrow().state {
            State::Busy { exec } => Some(exec),
            _ => None,
        };
        match running {
            Some(exec) => self.interrupt(exec, actor.clone()).await,
            None => Ok(()),
        }
    }

    /// Notes the version that a change brought; gives the one before. Nothing else sets it: changes may hear of their places in the
    /// journal in another order than they have them there.
    pub(crate) fn advance(&self, version: u64) -> u64 {
        let mut view = self.view.borrow_mut();
        let newest = view.version.max(version);
        std::mem::replace(&mut view.version, newest)
    }

    /// Takes from the live worker what is mounted and is not to be after a restore, which follows.
    ///
    /// # Errors
    /// If one of them cannot be taken away; then all of them are there.
    pub(crate) async fn part_with_mounts(&self, wanted: Vec<GivenMount>) -> Result<()> {
        self.ask_patiently(|reply| Command::PartWithMounts(wanted, reply)).await
    }

    /// The restore does not follow. What cannot be mounted again is told by the task.
    pub(crate) async fn take_back_mounts(&self) {
        let _ = self.ask_patiently(Command::TakeBackMounts).await;
    }

    /// Ends a restore.
    ///
    /// # Errors
    /// What keeps a mount from being made, and the database's.
    pub(crate) async fn finish_restore(&self, done: Restored) -> Result<Finished> {
        self.ask_patiently(|reply| Command::Restored(Box::new(done), reply)).await
    }

    /// More standard input for a running execution.
    ///
    /// # Errors
    /// `conflict` if it does not run or takes no input.
    pub async fn stdin(&self, exec: ExecId, data: &[u8], end: bool) -> Result<()> {
        let running = matches!(self.view.borrow().state, State::Busy { exec: running } if running == exec);
        let link = self.link.borrow().clone();
        match link {
            Some(link) if running => link.stdin(exec, data, end).await,
            _ => Err(Error::conflict(format!("execution {exec} does not run"))),
        }
    }

    /// Does something with the worker when its turn comes; starts one if there is none. With a `change`, `what` is journalled
    /// first and takes its place in the order of versions; if it fails then, that is journalled, too.
    ///
    /// # Errors
    /// Those of starting a worker, and of `operation`.
    pub async fn with_worker<T, F>(
        &self,
        change: Option<(Change, String)>,
        operation: impl FnOnce(Rc<WorkerLink>) -> F + 'static,
    ) -> Result<T>
    where
        T: 'static,
        F: Future<Output = Result<T>> + 'static,
    {
        let trace = match change {
            Some((change, text)) => Trace::Journalled(change, text),
            None => Trace::None,
        };
        self.operate(trace, None, operation).await
    }

    /// As [`Self::with_worker`], for a change that journals itself, as long as it is waited for.
    ///
    /// # Errors
    /// `conflict`, `busy` (leased), and those of [`Self::with_worker`].
    pub(crate) async fn change_with_worker<T, F>(
        &self,
        trace: Trace,
        waiting: Waiting,
        operation: impl FnOnce(Rc<WorkerLink>) -> F + 'static,
    ) -> Result<T>
    where
        T: 'static,
        F: Future<Output = Result<T>> + 'static,
    {
        self.operate(trace, Some(waiting), operation).await
    }

    /// Somebody who waited for a turn has given up: what was asked for leaves the queue. If the task has no time to hear of it now,
    /// it finds out when the next comes.
    pub(crate) fn leave_queue(&self) {
        let _ = self.commands.try_send(Box::new(Command::LeaveQueue));
    }

    /// Waits until an interrupted transition was recovered and a worker is ready, before everything else that waits.
    ///
    /// # Errors
    /// Those of the recovery and of starting a worker.
    pub(crate) async fn recovered(&self) -> Result<()> {
        self.operate(Trace::Recovery, None, |_| async { Ok(()) }).await
    }

    async fn operate<T, F>(
        &self,
        trace: Trace,
        waiting: Option<Waiting>,
        operation: impl FnOnce(Rc<WorkerLink>) -> F + 'static,
    ) -> Result<T>
    where
        T: 'static,
        F: Future<Output = Result<T>> + 'static,
    {
        let journalled = match &trace {
            Trace::Journalled(change, text) => Some((change.actor.clone(), text.clone())),
            Trace::None | Trace::Transition(_) | Trace::Recovery | Trace::InitialState(_) => None,
        };
        let (sender, result) = oneshot::channel();
        let operation: Operation = Box::new(move |link| {
            Box::pin(async move {
                let done = match link {
                    Ok(link) => operation(link).await,
                    Err(error) => Err(error),
                };
                // A caller that no longer waits has lost nothing but the answer.
                let _ = sender.send(done);
            })
        });
        match trace {
            Trace::Recovery => self.ask_patiently(|reply| Command::Operate(trace, operation, waiting, reply)).await?,
            trace => self.ask(|reply| Command::Operate(trace, operation, waiting, reply)).await?,
        }
        let done = result.await.unwrap_or_else(|_| Err(self.gone()));
        if let (Err(error), Some((actor, text))) = (&done, &journalled) {
            self.note_failure(actor, text, error).await;
        }
        done
    }

    /// The journal has a change already that was not made: it says so, too. Whoever asked for the change is told anyway.
    async fn note_failure(&self, actor: &Actor, text: &str, error: &Error) {
        match self.records.mark(actor, &format!("{text} failed: {error}"), crate::sys::clock::now_ms()).await {
            Ok(version) => {
                self.advance(version);
            }
            Err(error) => tracing::warn!(kernel = %self.spec.name, %error, "a failed change is not in the journal"),
        }
    }
}

impl Audited for Kernel {
    fn id(&self) -> KernelId {
        self.id
    }

    fn uid(&self) -> u32 {
        self.uid
    }

    fn version(&self) -> u64 {
        self.view.borrow().version
    }
}
