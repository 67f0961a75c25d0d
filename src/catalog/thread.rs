//! A thread that owns databases, and the queue to it.
//!
//! Requests that wait at the same moment for the same database share a transaction: one commit for all of them. Each has a
//! savepoint of its own, so one that fails takes nothing from the others. A reply is given after the commit only.
//!
//! ```text
//! caller ── Job ──▶ bounded queue ──▶ thread: take what is there ─▶ by database ─▶ BEGIN · work · COMMIT ─▶ replies ─▶ tidy
//!    ▲                                                                                                   │
//!    └────────────────────────────────────── oneshot ◀──────────────────────────────────────────────────┘
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::task::{Context, Poll};
use std::thread::JoinHandle;

use tokio::sync::oneshot;

use super::bank::{Bank, Target};
use super::error::CatalogError;
use super::sqlite::{Db, Result, after_commit};
use crate::core::limits;

enum Job {
    /// Reads or writes one database.
    Inside(Target, Inside),
    /// Works on the set of databases itself, outside of any transaction.
    Outside(Box<dyn FnOnce(&mut Bank) + Send>),
    /// Ends the thread after what came before.
    Stop,
}

/// A request that can share a transaction.
struct Inside {
    /// Of a write; a read has none.
    label: Option<&'static str>,
    work: Box<dyn Work>,
}

trait Work: Send {
    /// Does it and keeps the result; says whether it went well.
    fn run(&mut self, db: &Db) -> bool;
    /// Puts a failure in place of the result.
    fn fail(&mut self, error: CatalogError);
    /// The failure that is kept, if any.
    fn failure(&self) -> Option<CatalogError>;
    /// Sends the result, or if there is none of its own, that failure.
    fn reply(self: Box<Self>, failed: Option<&CatalogError>);
}

struct Request<T, F> {
    work: Option<F>,
    done: Option<Result<T>>,
    sender: oneshot::Sender<Result<T>>,
}

impl<T: Send, F: FnOnce(&Db) -> Result<T> + Send> Work for Request<T, F> {
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
pub struct Pending<T>(Result<oneshot::Receiver<Result<T>>, Option<CatalogError>>);

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
        let (sender, receiver) = oneshot::channel();
        let work = Box::new(Request { work: Some(work), done: None, sender });
        Pending(self.send(Job::Inside(target, Inside { label, work })).map(|()| receiver).map_err(Some))
    }

    /// Runs `work` on the set of databases, outside of any transaction.
    pub(super) fn run_outside<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Bank) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        let (sender, receiver) = oneshot::channel();
        let job = Job::Outside(Box::new(move |bank| {
            // As in `Request::reply`.
            let _ = sender.send(work(bank));
        }));
        Pending(self.send(job).map(|()| receiver).map_err(Some))
    }

    fn send(&self, job: Job) -> Result<()> {
        self.jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => CatalogError::Busy,
            TrySendError::Disconnected(_) => CatalogError::Stopped,
        })
    }

    /// Ends the thread once it has done what is queued. Blocks while the queue is full.
    pub(super) fn stop(&self) {
        // If it has ended already, there is nothing to do.
        let _ = self.jobs.send(Job::Stop);
    }
}

/// Starts a thread that owns `bank`.
///
/// # Errors
/// The operating system gives no thread.
pub(super) fn start(name: &str, bank: Bank) -> std::io::Result<(Queue, JoinHandle<()>)> {
    let (jobs, queue) = sync_channel(limits::DATABASE_REQUESTS);
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || serve(&queue, bank))?;
    Ok((Queue { jobs }, thread))
}

fn serve(queue: &Receiver<Job>, mut bank: Bank) {
    let mut going = true;
    while going {
        let first = match queue.try_recv() {
            Ok(job) => job,
            Err(_) => {
                bank.sync_now();
                let Ok(job) = queue.recv() else { break };
                job
            }
        };
        let mut groups: Vec<(Target, Vec<Inside>)> = Vec::new();
        let mut next = Some(first);
        let mut taken = 0;
        while let Some(job) = next.take() {
            match job {
                Job::Inside(target, job) => match groups.iter_mut().find(|(of, _)| *of == target) {
                    Some((_, group)) => group.push(job),
                    None => groups.push((target, vec![job])),
                },
                Job::Outside(work) => {
                    // Order holds: what came before is done before.
                    run_groups(&mut bank, &mut groups);
                    // A panic is a defect of ours; it ends this request, not the thread that everyone needs.
                    let _ = catch_unwind(AssertUnwindSafe(|| work(&mut bank)));
                }
                Job::Stop => going = false,
            }
            taken += 1;
            if going && taken < limits::DATABASE_BATCH {
                next = queue.try_recv().ok();
            }
        }
        run_groups(&mut bank, &mut groups);
    }
    bank.close_all();
}

fn run_groups(bank: &mut Bank, groups: &mut Vec<(Target, Vec<Inside>)>) {
    for (target, mut group) in groups.drain(..) {
        match bank.db(target) {
            Ok(db) => {
                let failed = transact(db, &mut group).err();
                answer(group, failed.as_ref());
                db.tidy();
            }
            Err(error) => answer(group, Some(&error)),
        }
    }
}

fn answer(group: Vec<Inside>, failed: Option<&CatalogError>) {
    group.into_iter().for_each(|job| job.work.reply(failed));
}

/// One transaction for all of them, if any of them writes. An error is everyone's who has none of his own.
fn transact(db: &Db, group: &mut [Inside]) -> Result<()> {
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

fn perform(db: &Db, job: &mut Inside) -> bool {
    let well = catch_unwind(AssertUnwindSafe(|| job.work.run(db))).unwrap_or(false);
    match job.label.filter(|_| well).map(|label| db.before_commit(label)) {
        Some(Err(error)) => {
            job.work.fail(error);
            false
        }
        Some(Ok(())) | None => well,
    }
}
