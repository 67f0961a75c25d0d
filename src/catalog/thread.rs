//! A thread that owns databases, and the queue to it.
//!
//! Requests for one database that wait at the same time share a transaction and its commit. Each has its own savepoint,
//! so a failed request does not affect the others. Replies are sent after the commit.
//!
//! If the thread is idle, the caller itself does a small write at once: waking the thread, and being woken by it, costs
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

/// Time without writes after which the thread checkpoints the WALs.
const QUIET: Duration = Duration::from_millis(20);
/// Time after which a new kernel's first use is over, and its files are synced.
const NEW_KERNEL_GRACE: Duration = Duration::from_millis(200);

enum Job {
    /// A read or write of one database.
    Request(Target, Request),
    /// Work on the set of databases, outside of any transaction.
    Manage(Box<dyn FnOnce(&mut OpenDatabases) + Send>),
    /// Check the WALs' sizes: callers have written.
    CheckpointWals,
    /// End after the requests before.
    Stop,
}

/// A request that can share a transaction.
struct Request {
    /// The label of a write; `None` for a read.
    label: Option<&'static str>,
    work: Box<dyn AnyRequest>,
}

/// Receives the reply to a request.
type Answer<T> = oneshot::Receiver<Result<T>>;

impl Request {
    /// A request and the receiver of its reply.
    fn new<T: Send + 'static>(
        label: Option<&'static str>,
        work: impl FnOnce(&Db) -> Result<T> + Send + 'static,
    ) -> (Request, Answer<T>) {
        let (sender, receiver) = oneshot::channel();
        (Request { label, work: Box::new(TypedRequest { work: Some(work), done: None, sender }) }, receiver)
    }
}

trait AnyRequest: Send {
    /// Runs the request and keeps its result; returns whether it succeeded.
    fn run(&mut self, db: &Db) -> bool;
    /// Replaces the result with a failure.
    fn fail(&mut self, error: CatalogError);
    /// The failure, if any.
    fn failure(&self) -> Option<CatalogError>;
    /// Sends the request's own failure, else `failed`, else the result.
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
            // It panicked: a bug, printed on stderr by the panic.
            (None, None) => Err(CatalogError::Stopped),
        };
        // The caller may have dropped the future.
        let _ = self.sender.send(result);
    }
}

/// The reply to a queued request. Dropping it does not cancel the request.
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

/// The sending half; one per thread, cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Queue {
    jobs: SyncSender<Job>,
    shared: Arc<WriterShared>,
}

/// State that a thread shares with its callers.
#[derive(Debug)]
struct WriterShared {
    databases: Mutex<OpenDatabases>,
    /// Queued requests without a reply: while there are any, new requests queue too, which keeps their order.
    waiting: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Panics of requests are caught under the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WriterShared {
    /// The databases, if the thread is idle and this one is open.
    fn idle(&self, target: Target) -> Option<MutexGuard<'_, OpenDatabases>> {
        let databases =
            (self.waiting.load(Ordering::Acquire) == 0).then(|| self.databases.try_lock().ok()).flatten()?;
        // A caller must never wait for the device.
        let is_at_rest = self.waiting.load(Ordering::Acquire) == 0;
        (is_at_rest && databases.durability() != Durability::Power && databases.is_open(target)).then_some(databases)
    }
}

impl Queue {
    /// Runs `work` on one database: with a label as a write that shares a transaction, else as a read.
    ///
    /// The request is queued by the call, not by the first poll of the future.
    pub(super) fn run<T: Send + 'static>(
        &self,
        target: Target,
        label: Option<&'static str>,
        work: impl FnOnce(&Db) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        self.queue(target, Request::new(label, work))
    }

    /// As [`Self::run`], for a write that takes no longer than waking the thread: the caller may do it at once.
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
                // A full queue leads to a check as well.
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

    /// Ends the thread after the queued requests. Blocks while the queue is full.
    pub(super) fn stop(&self) {
        // Later requests fail with `Stopped`. The thread may have ended already.
        self.shared.waiting.fetch_add(1, Ordering::AcqRel);
        let _ = self.jobs.send(Job::Stop);
    }
}

/// Starts a thread that owns `databases`.
///
/// # Errors
/// The thread cannot be started.
pub(super) fn start(name: &str, databases: OpenDatabases) -> std::io::Result<(Queue, JoinHandle<()>)> {
    let (jobs, queue) = sync_channel(limits::DATABASE_REQUESTS);
    let shared = Arc::new(WriterShared { databases: Mutex::new(databases), waiting: AtomicUsize::new(0) });
    let own = Arc::clone(&shared);
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || serve(&queue, &own))?;
    Ok((Queue { jobs, shared }, thread))
}

/// Waits for the next request; uses quiet moments for upkeep.
fn next_job(queue: &Receiver<Job>, shared: &WriterShared) -> Option<Job> {
    if let Ok(job) = queue.try_recv() {
        return Some(job);
    }
    // While the catalog's own thread writes the new kernel's row.
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
                    // Keeps the order: earlier requests first.
                    run_groups(&mut databases, &mut groups);
                    // A panic is a bug; it fails this request and must not end the thread.
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

/// Runs all of them in one transaction if any of them writes. An error fails all that have no failure of their own.
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
            // SQLite has rolled back everything, the other requests' changes too.
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
