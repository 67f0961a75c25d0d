//! The handle of a kernel: the queue to its task, and its published state.
//!
//! Reads of databases and of the published view bypass the task; a journal read first waits until the reported entries
//! are written. Changes and worker operations go through the task's bounded queue.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::{Rc, Weak};

use tokio::sync::{mpsc, oneshot};

use super::command::{Actor, Change, Command, Operation, Reply, Trace, Waiting};
use super::execution::Execution;
use super::tools::Tools;
use crate::catalog::state::{Finished, Restored};
use crate::core::checkpoint::Restoration;
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecRequest, ExecStatus};
use crate::core::ids::{CheckpointId, Digest, Epoch, ExecId, KernelId};
use crate::core::info::{GivenMount, JournalEntry, JournalView, KernelInfo};
use crate::core::kernel::State;
use crate::core::kernel::transition::Transitions;
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::core::origin::{Origin, OriginKind};
use crate::core::retention::Retention;
use crate::core::spec::KernelSpec;
use crate::core::spec_update::not_in_force;
use crate::isolation::SavedMachine;
use crate::link::handshake::WorkerIdentity;
use crate::link::host::{Job, WorkerLink};
use crate::supervisor::host::Host;
use crate::supervisor::host::audit::Audited;
use crate::supervisor::kernel::disk::MeasuredDisk;
use crate::supervisor::kernel::journal::{Found, Records};
use crate::supervisor::kernel::processes::RunningProcess;
use crate::supervisor::kernel::sharing::Sharing;
use crate::supervisor::workers::worker::{KeptMemory, KernelStart, LiveWorker, identity_of};

/// The event of a machine that was copied with its whole memory while it stood still.
const MACHINE_COPIED_WHOLE: &str = "machine_copied_whole";

/// The event of a machine that was suspended with all of its memory.
const MACHINE_SAVED_WHOLE: &str = "machine_saved_whole";

/// Published state of a kernel; only its task writes it.
#[derive(Debug, Clone)]
pub struct View {
    /// Lifecycle state.
    pub state: State,
    /// Version; grows with each change by a client.
    pub version: u64,
    /// Number of executions.
    pub executions: u64,
    /// Number of checkpoints.
    pub checkpoints: u64,
    /// Time of last use, milliseconds since 1970.
    pub last_used_at_ms: i64,
    /// Version of the engine's interpreter, as the last worker reported it; empty: there was none yet.
    pub engine_version: String,
    /// Sandbox layers in force.
    pub sandbox: Vec<String>,
    /// Contents of the worker that its saved state does not include.
    pub missed: Vec<MissedEntry>,
    /// Files that the last capture of the workspace by this daemon could not read.
    pub unreadable: Vec<MissedEntry>,
    /// Background jobs.
    pub jobs: Vec<Job>,
    /// The worker's init on this host.
    pub worker_pid: Option<u32>,
    /// Origin of the kernel's state.
    pub origin: Origin,
    /// Origin that the worker received at its start; unknown for an adopted worker.
    pub(crate) known_origin: Option<(OriginKind, u32)>,
}

/// Handle of one kernel.
pub struct Kernel {
    /// Id of the kernel.
    pub id: KernelId,
    /// Uid of the owner.
    pub uid: u32,
    pub(crate) spec: RefCell<Rc<KernelSpec>>,
    /// The specification that the present worker has, if it was changed since.
    pub(crate) worker_spec: RefCell<Option<Rc<KernelSpec>>>,
    /// Epoch on this host.
    pub epoch: Epoch,
    /// The kernel that owns the workspace, if this kernel is a thread.
    pub thread_of: Option<KernelId>,
    /// Time of creation, milliseconds since 1970.
    pub created_at_ms: i64,
    pub(crate) event_name: RefCell<String>,
    /// Records on disk.
    pub records: Records,
    pub(crate) view: RefCell<View>,
    pub(crate) link: RefCell<Option<Rc<WorkerLink>>>,
    /// The current worker; owned by the task.
    pub(crate) worker: RefCell<Weak<LiveWorker>>,
    pub(crate) executions: RefCell<HashMap<ExecId, Rc<Execution>>>,
    /// Processes beside the engine.
    pub(crate) processes: RefCell<BTreeMap<ExecId, RunningProcess>>,
    /// Number of open connections to its ports.
    pub(crate) connections: Rc<Cell<usize>>,
    pub(crate) commands: mpsc::Sender<Box<Command>>,
    /// The current exclusive transition.
    pub(crate) transitions: RefCell<Transitions>,
    /// Tools of the MCP servers; owned by the task.
    pub(crate) tools: RefCell<Weak<Tools>>,
    /// The sessions that share the workspace.
    pub(crate) sessions: Sharing,
    /// Capture method of the workspace, and why no faster one is available.
    pub(crate) capture: RefCell<String>,
    /// The restore that recovery finished last, for its caller.
    pub(crate) finished_restore: RefCell<Option<Restoration>>,
    /// What became of memory that was kept in the kernel's folder, at the last start of a worker.
    pub(crate) kept_memory: Cell<KeptMemory>,
    /// The tree on which the workspace tracker is based: its objects are in use.
    pub(crate) base: Cell<Option<Digest>>,
    /// Retention of automatic checkpoints.
    pub(crate) retention: Cell<Retention>,
    /// Earliest time at which a checkpoint expires, milliseconds since 1970.
    pub(crate) prune_due_ms: Cell<i64>,
    /// Checkpoints that operations read now, with the number of readers.
    pub(crate) held: RefCell<BTreeMap<CheckpointId, u32>>,
    /// What it takes on the disk, as last measured.
    pub(crate) disk: Cell<Option<MeasuredDisk>>,
    /// Whether its history could not be read when the daemon started.
    pub(crate) is_unreadable: bool,
    /// Whether the next daemon starts the kernel: see `registry::resume`.
    pub(crate) resumes: Cell<bool>,
    /// See [`Kernel::terms`].
    pub(crate) terms: Cell<u64>,
    /// Counts the kernels in memory for the host.
    pub(crate) _remembered: Rc<()>,
}

impl Kernel {
    /// A copy of the published state.
    pub fn view(&self) -> View {
        self.view.borrow().clone()
    }

    /// A number that grows when a lease or mounts may refuse what they admitted before.
    pub(crate) fn terms(&self) -> u64 {
        self.terms.get()
    }

    /// Notes that lease or mounts may refuse more than before.
    pub(crate) fn terms_changed(&self) {
        self.terms.set(self.terms.get().wrapping_add(1));
    }

    /// The specification that the present worker has, or the next one will have.
    pub fn worker_spec(&self) -> Rc<KernelSpec> {
        let changed = self.worker_spec.borrow().clone();
        changed.unwrap_or_else(|| self.spec())
    }

    /// What the present worker does not have of the specification.
    pub fn at_next_start(&self) -> Vec<String> {
        not_in_force(&self.worker_spec(), &self.spec())
    }

    /// The present specification.
    pub fn spec(&self) -> Rc<KernelSpec> {
        Rc::clone(&self.spec.borrow())
    }

    /// The present name of the kernel in events.
    pub fn event_name(&self) -> String {
        self.event_name.borrow().clone()
    }

    /// Origin of the present state, and its generation.
    pub(crate) fn origin_now(&self) -> (OriginKind, u32) {
        let view = self.view.borrow();
        (view.origin.kind, view.origin.generation)
    }

    /// Kernel information for clients; queries resource usage from a live worker.
    pub async fn info(&self) -> KernelInfo {
        let link = self.reachable_link().ok().flatten();
        let memory_bytes = match link {
            // A slow worker must not block a listing.
            Some(link) => match tokio::time::timeout(limits::USAGE_ANSWER, link.usage()).await {
                Ok(Ok(usage)) => usage.memory_bytes,
                Ok(Err(_)) | Err(_) => 0,
            },
            None => 0,
        };
        KernelInfo { memory_bytes, ..self.info_without_usage() }
    }

    /// Whether the worker's machine is stopped with the suspended kernel: it answers nothing.
    pub(crate) fn is_parked(&self) -> bool {
        self.worker.borrow().upgrade().is_some_and(|worker| worker.handle().is_parked())
    }

    /// The link to the worker, for a call outside of the queue.
    ///
    /// # Errors
    /// `busy` if the kernel is suspended and its worker cannot answer.
    pub(crate) fn reachable_link(&self) -> Result<Option<Rc<WorkerLink>>> {
        match self.is_parked() {
            true => Err(Error::busy("the kernel is suspended").reason("suspended").hint("resume it first")),
            false => Ok(self.link.borrow().clone()),
        }
    }

    /// Stops the worker's machine, if it has one, after its processes were stopped.
    ///
    /// # Errors
    /// Those of the machine; it runs on.
    pub(crate) async fn park_worker(&self) -> Result<()> {
        let worker = self.worker.borrow().upgrade();
        let Some(worker) = worker else { return Ok(()) };
        if let Err(error) = worker.handle().park().await {
            self.unpark_worker().await;
            return Err(error);
        }
        Ok(())
    }

    /// Saves the memory of the worker's stopped machine.
    ///
    /// # Errors
    /// `unsupported` for the isolation, `conflict` if the worker has ended, those of saving.
    pub(crate) async fn save_memory(&self, host: &Host) -> Result<()> {
        let (worker, identity) = self.identified_worker(host).await?;
        if let Some(why) = worker.handle().save_memory(&identity).await? {
            self.note_whole(host, MACHINE_SAVED_WHOLE, &why);
        }
        Ok(())
    }

    /// Saves the worker's running machine.
    ///
    /// # Errors
    /// As [`Self::save_memory`].
    pub(crate) async fn save_running(&self, host: &Host) -> Result<SavedMachine> {
        let (worker, identity) = self.identified_worker(host).await?;
        let saved = worker.handle().save_running(&identity).await?;
        if let Some(why) = saved.copied_whole() {
            self.note_whole(host, MACHINE_COPIED_WHOLE, why);
        }
        Ok(saved)
    }

    /// Reports that the pause grew with the memory, not with what changed.
    fn note_whole(&self, host: &Host, event: &'static str, why: &str) {
        let spec = self.spec();
        host.metrics.noted(Some(spec.engine), event);
        let detail = serde_json::json!({ "engine": spec.engine.name(), "reason": why });
        host.events.publish(&self.event_name(), event, detail);
    }

    async fn identified_worker(&self, host: &Host) -> Result<(Rc<LiveWorker>, WorkerIdentity)> {
        let worker = self.worker.borrow().upgrade();
        let worker = worker.ok_or_else(|| self.not_in_memory("saved"))?;
        let rows = host.catalog.workers().await?;
        let row = rows.iter().find(|row| row.id == worker.id()).ok_or_else(|| self.not_in_memory("saved"))?;
        let identity = identity_of(row)?;
        Ok((worker, identity))
    }

    /// Ends the worker, whose memory is saved.
    pub(crate) fn release_worker(&self) {
        if let Some(worker) = self.worker.borrow().upgrade() {
            worker.kill();
        }
    }

    /// Continues the worker's machine, if it has one.
    pub(crate) async fn unpark_worker(&self) {
        let worker = self.worker.borrow().upgrade();
        if let Some(worker) = worker
            && let Err(error) = worker.handle().unpark().await
        {
            tracing::warn!(kernel = %self.spec().name, %error, "a worker's machine is not continued");
        }
    }

    /// The specification with its later changes.
    pub(crate) fn spec_now(&self) -> KernelSpec {
        KernelSpec { retention: self.retention.get(), ..(*self.spec()).clone() }
    }

    /// Kernel information for lists.
    pub fn info_without_usage(&self) -> KernelInfo {
        let view = self.view.borrow();
        let at_next_start = self.at_next_start();
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
            in_force: (!at_next_start.is_empty()).then(|| Box::new((*self.worker_spec()).clone())),
            at_next_start,
            disk: self.disk.get().map(|measured| measured.figures()),
        }
    }

    pub(super) async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        self.commands.try_send(Box::new(command(reply))).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                Error::busy(format!("kernel {} has too many requests waiting", self.spec().name))
                    .hint("wait for some of them to be answered")
            }
            mpsc::error::TrySendError::Closed(_) => self.gone(),
        })?;
        answer.await.unwrap_or_else(|_| Err(self.gone()))
    }

    /// As [`Self::ask`], but waits for room in the queue instead of failing.
    pub(super) async fn ask_patiently<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Box::new(command(reply))).await.map_err(|_| self.gone())?;
        answer.await.unwrap_or_else(|_| Err(self.gone()))
    }

    fn gone(&self) -> Error {
        Error::not_found(format!("kernel {} is no longer here", self.spec().name))
    }

    /// The refusal to archive a kernel that was used meanwhile.
    pub(crate) fn used_meanwhile(&self) -> Error {
        Error::conflict(format!("kernel {} was used while it was to be archived", self.spec().name))
            .reason("used")
            .hint("try again when no client uses it")
    }

    /// Parameters of a worker start.
    ///
    /// # Errors
    /// `corrupt` if the kernel that owns the workspace is gone.
    pub(crate) fn start_request(&self) -> Result<KernelStart> {
        let (id, epoch, uid, origin) = (self.id, self.epoch, self.uid, self.origin_now());
        if let Some(owner) = self.thread_of
            && self.files().id != owner
        {
            return Err(Error::corrupt(format!("kernel {owner}, in whose workspace it works, is gone")));
        }
        Ok(KernelStart { id, epoch, uid, spec: self.spec(), origin, workspace_of: self.thread_of })
    }

    /// Journals and queues an execution.
    ///
    /// # Errors
    /// `busy`, `conflict`, `unavailable` (breaker), and journal errors.
    pub async fn run(&self, request: ExecRequest, actor: Actor) -> Result<Rc<Execution>> {
        request.check().map_err(|error| Error::invalid(error.to_string()))?;
        self.ask(|reply| Command::Run(Box::new(request), actor, reply)).await
    }

    /// Finds an execution by number: live, or in the journal.
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
                // The execution ended between the two lookups, or its worker is being adopted.
                let live = self.executions.borrow().get(&id).cloned();
                live.ok_or_else(|| Error::unavailable(format!("execution {id} is being taken over")).hint("try again"))
            }
            Found::Nothing => Err(Error::not_found(format!("kernel {} has no execution {id}", self.spec().name))),
        }
    }

    /// Journal entries after a number, oldest first, at most one page.
    ///
    /// An execution whose end has no room in the journal yet is reported with the end that the task holds, one that has
    /// not begun as queued, with the execution in front of it.
    ///
    /// # Errors
    /// Database errors.
    pub async fn journal(&self, view: JournalView, after: u64, most: usize) -> Result<Vec<JournalEntry>> {
        let mut page = self.records.journal(view, after, most).await?;
        let executions = self.executions.borrow();
        let queued = |id: &ExecId| executions.get(id).is_some_and(|execution| execution.is_queued());
        for entry in page.iter_mut().filter(|entry| entry.status == "running") {
            if queued(&ExecId(entry.exec)) {
                "queued".clone_into(&mut entry.status);
                let ahead = executions.values().filter(|other| other.id.0 < entry.exec && !other.is_finished());
                if let Some(ahead) = ahead.map(|other| other.id).max() {
                    entry.err = format!("queued behind #{ahead}");
                }
                continue;
            }
            if let Some(end) = executions.get(&ExecId(entry.exec)).and_then(|execution| execution.unjournalled()) {
                end.status.name().clone_into(&mut entry.status);
                (entry.code, entry.err, entry.duration_us) = (end.code, end.err, end.duration_us);
            }
        }
        Ok(page)
    }

    /// Interrupts an execution; returns how it ended if it had ended before.
    ///
    /// # Errors
    /// `notFound` if no execution has that number.
    pub async fn interrupt(&self, exec: ExecId, actor: Actor) -> Result<Option<ExecStatus>> {
        self.ask(|reply| Command::Interrupt(exec, actor, reply)).await
    }

    /// Interrupts the running execution, if any; returns its number.
    ///
    /// # Errors
    /// `busy` (leased).
    pub(crate) async fn interrupt_running(&self, actor: &Actor) -> Result<Option<ExecId>> {
        match self.running() {
            Some(exec) => self.interrupt(exec, actor.clone()).await.map(|_| Some(exec)),
            None => Ok(None),
        }
    }

    /// Sets the version after a change; returns the previous version.
    ///
    /// The only place that sets the version: changes may learn their journal positions out of order.
    pub(crate) fn advance(&self, version: u64) -> u64 {
        let mut view = self.view.borrow_mut();
        let newest = view.version.max(version);
        std::mem::replace(&mut view.version, newest)
    }

    /// Detaches the mounts of the live worker that the coming restore does not keep.
    ///
    /// # Errors
    /// If a mount cannot be detached; all mounts stay attached then.
    pub(crate) async fn detach_mounts(&self, wanted: Vec<GivenMount>) -> Result<()> {
        self.ask_patiently(|reply| Command::DetachMounts(wanted, reply)).await
    }

    /// Reattaches the detached mounts: the restore was cancelled. The task reports mounts that cannot be reattached.
    pub(crate) async fn reattach_mounts(&self) {
        let _ = self.ask_patiently(Command::ReattachMounts).await;
    }

    /// Ends a restore.
    ///
    /// # Errors
    /// Mount errors and database errors.
    pub(crate) async fn finish_restore(&self, done: Restored) -> Result<Finished> {
        self.ask_patiently(|reply| Command::Restored(Box::new(done), reply)).await
    }

    /// Writes standard input of a running execution.
    ///
    /// # Errors
    /// `conflict` if the execution is not running or accepts no input.
    pub async fn stdin(&self, exec: ExecId, data: &[u8], end: bool) -> Result<()> {
        let running = matches!(self.view.borrow().state, State::Busy { exec: running } if running == exec)
            || self.processes.borrow().contains_key(&exec);
        match self.reachable_link()? {
            Some(link) if running => link.stdin(exec, data, end).await,
            _ => Err(Error::conflict(format!("execution {exec} does not run"))),
        }
    }

    /// Runs an operation on the worker in queue order; starts a worker if there is none.
    ///
    /// With a `change`, `what` is journalled first, ordered by version; a failure is journalled, too.
    ///
    /// # Errors
    /// Worker start errors, and errors of `operation`.
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

    /// As [`Self::with_worker`], for a change that writes its own journal entry. Dropped with its caller while queued.
    ///
    /// # Errors
    /// `conflict`, `busy` (leased), and errors of [`Self::with_worker`].
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

    /// Notifies the task that a queued caller has given up.
    ///
    /// If the task's queue is full, the task finds the abandoned request when it takes the next one.
    pub(crate) fn leave_queue(&self) {
        let _ = self.commands.try_send(Box::new(Command::LeaveQueue));
    }

    /// Waits until an interrupted transition was recovered and a worker is ready, before all other queued work.
    ///
    /// # Errors
    /// Recovery errors and worker start errors.
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
                // An abandoned caller loses only the reply.
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

    /// Journals the failure of a change that the journal already has. The requester receives the error in any case.
    async fn note_failure(&self, actor: &Actor, text: &str, error: &Error) {
        match self.records.mark(actor, &format!("{text} failed: {error}"), crate::sys::clock::now_ms()).await {
            Ok(version) => {
                self.advance(version);
            }
            Err(error) => tracing::warn!(kernel = %self.spec().name, %error, "a failed change is not in the journal"),
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
