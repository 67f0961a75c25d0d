//! A thread that owns databases, and the queue to it.
//!
//! Requests that wait at the same moment for the same database share a transaction: one commit for all of them. Each has a
//! savepoint of its own, so one that fails takes nothing from the others. A reply is given after the commit only.
//!
//! A small write that finds the thread at rest is done by its caller, at once: to wake a thread, and to be woken by it, costs
//! more than the commit.
//!
//! ```text
//! caller ── Job ──▶ bounded queue ──▶ thread: take what is there ─▶ by database ─▶ BEGIN · work · COMMIT ─▶ replies
//!    ▲                                                                                                   │
//!    └────────────────────────────────────── oneshot ◀──────────────────────────────────────────────────┘
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::oneshot;

use super::error::CatalogError;
use super::open_databases::{OpenDatabases, Target};
use super::sqlite::{Db, Result, after_commit};
use crate::core::durability::Durability;
use crate::core::limits;

/// A thread tidies when nothing was written for so long.
const QUIET: Duration = Duration::from_millis(20);
/// Whoever made a kernel has begun to work with it after so long.
const NEW_KERNEL_GRACE: Duration = Duration::from_millis(200);

enum Job {
    /// Reads or writes one database.
    Request(Target, Request),
    /// Works on the set of databases itself, outside of any transaction.
    Manage(Box<dyn FnOnce(&mut OpenDatabases) + Send>),
    /// Callers have written themselves: look after the databases once there is time.
    CheckpointWals,
    /// Ends the thread after what came before.
    Stop,
}

/// A request that can share a transaction.
struct Request {
    /// Of a write; a read has none.
    label: Option<&'static str>,
    work: Box<dyn AnyRequest>,
}

/// Where a request's answer comes.
type Answer<T> = oneshot::Receiver<Result<T>>;

impl Request {
    /// A request, and where its answer comes.
    fn new<T: Send + 'static>(
        label: Option<&'static str>,
        work: impl FnOnce(&Db) -> Result<T> + Send + 'static,
    ) -> (Request, Answer<T>) {
        let (sender, receiver) = oneshot::channel();
        (Request { label, work: Box::new(TypedRequest { work: Some(work), done: None, sender }) }, receiver)
    }
}

trait AnyRequest: Send {
    /// Does it and keeps the result; says whether it went well.
    fn run(&mut self, db: &Db) -> bool;
    /// Puts a failure in place of the result.
    fn fail(&mut self, error: CatalogError);
    /// The failure that is kept, if any.
    fn failure(&self) -> Option<CatalogError>;
    /// Sends the result, or if there is none of its own, that failure.
    fn reply(self: Box<Self>, failed: Option<&CatalogError>);
}

struct TypedRequest<T, F> {
    work: Option<F>,
    done: Option<Result<T>>,
    sender: oneshot::Sender<Result<T>>,
}

impl<T: Send, F: FnOnce(&Db) -> Result<T> + Send> AnyRequest for TypedRequest<T, F> {
    fn run(&mut self, db: &Db) -> bool {
        self.done = self.work.take().map(|work| work(db));
        matches!(self.done, Some(Ok(_)))
    }

    fn fail(&mut self, error: CatalogError) {
        self.done = Some(Err(error));
    }

    fn failure(&self) -> Option<CatalogError> {
        self.done.as_ref().and_then(|done| done.as_ref().err()).map(CatalogError::again)
    }

    fn reply(self: Box<Self>, failed: Option<&CatalogError>) {
        let result = match (self.done, failed) {
            (Some(Err(own)), _) => Err(own),
            (_, Some(error)) => Err(error.again()),
            (Some(Ok(value)), None) => Ok(value),
            // It panicked: a defect of ours, told on stderr by the panic itself.
            (None, None) => Err(CatalogError::Stopped),
        };
        // A caller that no longer waits has lost nothing but the answer.
        let _ = self.sender.send(result);
    }
}

/// The reply to a request, which is queued already. Dropping it leaves the request as it is.
#[must_use = "the request's failure would go unseen"]
#[derive(Debug)]
pub struct Pending<T>(Result<Answer<T>, Option<CatalogError>>);

impl<T> Future for Pending<T> {
    type Output = Result<T, CatalogError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Ok(receiver) => Pin::new(receiver).poll(context).map(|reply| reply.unwrap_or(Err(CatalogError::Stopped))),
            Err(error) => Poll::Ready(Err(error.take().unwrap_or(CatalogError::Stopped))),
        }
    }
}

/// The sending half: one for each thread, cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Queue {
    jobs: SyncSender<Job>,
    shared: Arc<WriterShared>,
}

/// What a thread and its callers share.
#[derive(Debug)]
struct WriterShared {
    databases: Mutex<OpenDatabases>,
    /// Requests that were queued and are not answered yet: while there are any, a new one queues too, so order holds.
    waiting: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Work that panics is caught under the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WriterShared {
    /// The databases, if the thread is at rest and this one is open.
    fn idle(&self, target: Target) -> Option<MutexGuard<'_, OpenDatabases>> {
        let databases =
            (self.waiting.load(Ordering::Acquire) == 0).then(|| self.databases.try_lock().ok()).flatten()?;
        // Waiting for the device is never a caller's business.
        let is_at_rest = self.waiting.load(Ordering::Acquire) == 0;
        (is_at_rest && databases.durability() != Durability::Power && databases.is_open(target)).then_some(databases)
    }
}

impl Queue {
    /// Runs `work` on one database. With a label it is a write and shares a transaction; else a read.
    ///
    /// The request is queued when this is called, not when the future is first polled.
    pub(super) fn run<T: Send + 'static>(
        &self,
        target: Target,
        label: Option<&'static str>,
        work: impl FnOnce(&Db) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        self.queue(target, Request::new(label, work))
    }

    /// As [`Self::run`], for a write that takes no longer than waking a thread: it may be done at once, by the caller.
    pub(super) fn run_small<T: Send + 'static>(
        &self,
        target: Target,
        label: &'static str,
        work: impl FnOnce(&Db) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        let (job, receiver) = Request::new(Some(label), work);
        if let Some(mut databases) = self.shared.idle(target) {
            run_group(&mut databases, target, vec![job]);
            if databases.is_check_due() {
                // A queue that is full leads to a look as well.
                let _ = self.send(Job::CheckpointWals);
            }
            return Pending(Ok(receiver));
        }
        self.queue(target, (job, receiver))
    }

    fn queue<T>(&self, target: Target, (job, answer): (Request, Answer<T>)) -> Pending<T> {
        Pending(self.send(Job::Request(target, job)).map(|()| answer).map_err(Some))
    }

    /// Runs `work` on the set of databases, outside of any transaction.
    pub(super) fn manage<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut OpenDatabases) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        let (sender, receiver) = oneshot::channel();
        let job = Job::Manage(Box::new(move |databases| {
            // As in `TypedRequest::reply`.
            let _ = sender.send(work(databases));
        }));
        Pending(self.send(job).map(|()| receiver).map_err(Some))
    }

    fn send(&self, job: Job) -> Result<()> {
        self.shared.waiting.fetch_add(1, Ordering::AcqRel);
        self.jobs.try_send(job).map_err(|error| {
            self.shared.waiting.fetch_sub(1, Ordering::AcqRel);
            match error {
                TrySendError::Full(_) => CatalogError::Busy,
                TrySendError::Disconnected(_) => CatalogError::Stopped,
            }
        })
    }

    /// Ends the thread once it has done what is queued. Blocks while the queue is full.
    pub(super) fn stop(&self) {
        // Who asks later is told that it has stopped. If it has ended already, there is nothing to do.
        self.shared.waiting.fetch_add(1, Ordering::AcqRel);
        let _ = self.jobs.send(Job::Stop);
    }
}

/// Starts a thread that owns `databases`.
///
/// # Errors
/// The operating system gives no thread.
pub(super) fn start(name: &str, databases: OpenDatabases) -> std::io::Result<(Queue, JoinHandle<()>)> {
    let (jobs, queue) = sync_channel(limits::DATABASE_REQUESTS);
    let shared = Arc::new(WriterShared { databases: Mutex::new(databases), waiting: AtomicUsize::new(0) });
    let own = Arc::clone(&shared);
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || serve(&queue, &own))?;
    Ok((Queue { jobs, shared }, thread))
}

/// The next request; meanwhile what can wait for a quiet moment is done.
fn next_job(queue: &Receiver<Job>, shared: &WriterShared) -> Option<Job> {
    if let Ok(job) = queue.try_recv() {
        return Some(job);
    }
    // While the catalog's own thread writes of the new kernel.
    lock(&shared.databases).sync_states();
    loop {
        if !lock(&shared.databases).has_upkeep() {
            return queue.recv().ok();
        }
        match queue.recv_timeout(QUIET) {
            Ok(job) => return Some(job),
            Err(RecvTimeoutError::Timeout) => {
                let mut databases = lock(&shared.databases);
                databases.sync_in_background(NEW_KERNEL_GRACE);
                databases.checkpoint_wals(QUIET);
            }
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

fn serve(queue: &Receiver<Job>, shared: &WriterShared) {
    let mut going = true;
    while going && let Some(first) = next_job(queue, shared) {
        let mut databases = lock(&shared.databases);
        let mut groups: Vec<(Target, Vec<Request>)> = Vec::new();
        let (mut next, mut taken) = (Some(first), 0);
        while let Some(job) = next.take() {
            match job {
                Job::Request(target, job) => match groups.iter_mut().find(|(of, _)| *of == target) {
                    Some((_, group)) => group.push(job),
                    None => groups.push((target, vec![job])),
                },
                Job::Manage(work) => {
                    // Order holds: what came before is done before.
                    run_groups(&mut databases, &mut groups);
                    // A panic is a defect of ours; it ends this request, not the thread that everyone needs.
                    let _ = catch_unwind(AssertUnwindSafe(|| work(&mut databases)));
                }
                Job::CheckpointWals => {}
                Job::Stop => going = false,
            }
            taken += 1;
            if going && taken < limits::DATABASE_BATCH {
                next = queue.try_recv().ok();
            }
        }
        run_groups(&mut databases, &mut groups);
        if databases.is_check_due() {
            databases.checkpoint_wals(Duration::ZERO);
        }
        if going {
            shared.waiting.fetch_sub(taken, Ordering::AcqRel);
        } else {
            databases.close_all();
        }
    }
    lock(&shared.databases).close_all();
}

fn run_groups(databases: &mut OpenDatabases, groups: &mut Vec<(Target, Vec<Request>)>) {
    groups.drain(..).for_each(|(target, group)| run_group(databases, target, group));
}

fn run_group(databases: &mut OpenDatabases, target: Target, mut group: Vec<Request>) {
    let writes = group.iter().any(|job| job.label.is_some());
    match databases.db(target) {
        Ok(db) => {
            let failed = transact(db, &mut group).err();
            answer(group, failed.as_ref());
        }
        Err(error) => answer(group, Some(&error)),
    }
    if writes {
        databases.wrote(target);
    }
}

fn answer(group: Vec<Request>, failed: Option<&CatalogError>) {
    group.into_iter().for_each(|job| job.work.reply(failed));
}

/// One transaction for all of them, if any of them writes. An error is everyone's who has none of his own.
fn transact(db: &Db, group: &mut [Request]) -> Result<()> {
    if group.iter().all(|job| job.label.is_none()) {
        group.iter_mut().for_each(|job| {
            perform(db, job);
        });
        return Ok(());
    }
    db.begin()?;
    let alone = group.len() == 1;
    for job in group.iter_mut() {
        let well = if alone { perform(db, job) } else { db.savepoint(|db| perform(db, job))? };
        if !db.in_transaction() {
            // SQLite has rolled back all of it, what the others did as well.
            return Err(job.work.failure().unwrap_or(CatalogError::Stopped));
        }
        if !well {
            job.label = None;
        }
    }
    if group.iter().all(|job| job.label.is_none()) {
        db.rollback();
        return Ok(());
    }
    db.commit()?;
    group.iter().filter_map(|job| job.label).for_each(after_commit);
    Ok(())
}

fn perform(db: &Db, job: &mut Request) -> bool {
    let well = catch_unwind(AssertUnwindSafe(|| job.work.run(db))).unwrap_or(false);
    match job.label.filter(|_| well).map(|label| db.before_commit(label)) {
        Some(Err(error)) => {
            job.work.fail(error);
            false
        }
        Some(Ok(())) | None => well,
    }
}
